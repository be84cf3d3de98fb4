"""The layers of a tensor parallel module that do something else than before, one class per style of the plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather, all_gather_invariant, shard
from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import Dim
from meshcomm.parallel.tensor.functions import heads_of, own_rows, vocab_embedding
from meshcomm.parallel.tensor.kinds.multihead import attended, cut_of, refuse_odd
from meshcomm.parallel.tensor.kinds.products import Kind, does_as_known, is_as_known, kind_of, mixes_features
from meshcomm.parallel.tensor.plan import (
    OF_PARAMETERS,
    WHERE,
    Column,
    Cut,
    Named,
    Row,
    Style,
    Vocab,
    indivisible,
    lengths_of,
)
from meshcomm.parallel.tensor.state import Parallel


def layers_of(state: Parallel, found: Sequence[Named]) -> dict[nn.Module, Layer]:
    """The layers that do something else than before; says how their parameters are cut."""
    owned: dict[nn.Module, dict[str, Named]] = {}
    for each in found:
        owned.setdefault(each.owner, {}).setdefault(each.name, each)
    made: dict[nn.Module, Layer] = {}
    _refuse_cut_attention(state.module, owned)
    for owner, params in owned.items():
        layer = _layer(list(params.values()), state)
        if layer is not None:
            made[owner] = layer
    seen: dict[int, tuple[str, Dim | None, bool, bool]] = {}
    for each in found:
        at = made.get(each.owner)
        cut, varied = (None, False) if at is None else (at.cut(each), at.varies(each))
        how = cut, varied, each.style == "once"
        before = seen.setdefault(id(each.value), (each.path, *how))
        if before[1:] != how:
            what = f"{before[0]!r} and {each.path!r} are one parameter, cut in two ways."
            fail(WHERE, what, fix="the same style for both")
        if cut is not None:
            state.cuts[each.path] = cut
        if varied:
            state.varied.append((each.owner, each.name))
            if isinstance(each.style, str):
                state.anywhere.append((each.owner, each.name))
            if each.style == "once":
                state.once.add((each.owner, each.name))
    return made


def _refuse_cut_attention(module: nn.Module, owned: Mapping[nn.Module, Mapping[str, Named]]) -> None:
    """Torch's own compares its sizes with those of what it is given, and reads the weights of its last layer."""
    for whole in module.modules():
        if isinstance(whole, nn.MultiheadAttention):
            named = [each for part in whole.modules() for each in owned.get(part, {}).values()]
            cut = any(each.style == "heads" for each in named)
            for each in named:
                if not isinstance(each.style, str) or (cut and each.style != "heads"):
                    what = f"{each.path!r} is {each.style}, but torch's MultiheadAttention is cut as a whole."
                    fix = "'heads' for all of it, or 'replicated'"
                    fail(WHERE, what, fix=fix)


def past_forward(module: nn.Module, changed: Container[nn.Module]) -> Iterator[tuple[nn.Module, str, int]]:
    """The attributes by which layers of torch, in evaluation, read weights past the forward of their parts; off where a
    part has a forward of ours: whose, which, and what it is then."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and any(inner in changed for inner in part.modules()):
            yield part, "use_nested_tensor", 0
        if isinstance(part, nn.TransformerEncoderLayer) and any(inner in changed for inner in part.modules()):
            yield part, "activation_relu_or_gelu", 0


def _layer(params: Sequence[Named], state: Parallel) -> Layer | None:
    """That of a module that has these parameters."""
    p, style = params[0], params[0].style
    if all(isinstance(each.style, Cut) or each.style in OF_PARAMETERS for each in params):
        if all(each.style == "replicated" for each in params):
            return None
        return _OfParameters(p.owner, state, {each.name: each.style for each in params})
    for each in params:
        if type(each.style) is not type(style) or each.style != style:
            fail(WHERE, f"a layer has parameters of two styles, {each.path!r} and others.", fix="name the layer")
    if style == "heads":
        return _Heads(p, state)
    if style == "split":
        return _Split(p.owner, state)
    kind = kind_of(p.owner)
    name, make, kinds = next(known for style_of, known in _LAYERS.items() if isinstance(style, style_of))
    if kind is None or kind.name not in kinds:
        wanted = " or ".join(kinds)
        what = f"{p.path!r} is {name!r}, but belongs to a {type(p.owner).__name__}, not a {wanted}."
        fix = '"replicated"; Cut and Block, which do not ask what is inside; or the functions of meshcomm.parallel'
        fail(WHERE, what, fix=fix)
    if make is not _Column and not does_as_known(p.owner, kind, rows=make is _Vocab):
        what = f"{p.path!r} is {name!r}, but {type(p.owner).__name__} has a forward of its own."
        fix = "use the functions of meshcomm.parallel in it"
        fail(WHERE, what, fix="Column(gather=True), which cuts its width; or " + fix if make is _Vocab else fix)
    return make(p.owner, state, style, kind)


class Layer:
    """A layer of a style."""

    def __init__(self, module: Any, state: Parallel) -> None:
        self.module, self.state = module, state

    def cut(self, p: Named) -> Dim | None:
        """How a parameter is cut."""
        return None

    def varies(self, p: Named) -> bool:
        """Whether a parameter that is whole is used in another way on each rank."""
        return False

    def counts(self) -> Iterator[tuple[nn.Module, str, int]]:
        """The attributes that say of how many outputs it is, and what they are on this rank."""
        yield from ()

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        """In place of forward."""
        raise NotImplementedError


class _OfKind(Layer):
    """A layer of a kind that is known."""

    def __init__(self, module: Any, state: Parallel, style: Any, kind: Kind) -> None:
        super().__init__(module, state)
        self.how, self.kind = style, kind
        if kind.features != -1 and (state.sequence if style.sequence is None else style.sequence):
            what = f"a {type(module).__name__} has the sequence last, where it is not cut."
            fail(WHERE, what, fix=f"{type(style).__name__}(sequence=False), or a Linear on the transposed")

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        """On its one input, whatever that is called."""
        self.state.know_again()
        given = (*args, *kwargs.values()) if kwargs else args
        return self.of(method, given[0]) if len(given) == 1 else method(*args, **kwargs)  # which says what it wants

    def of(self, method: Any, input: Tensor) -> Tensor:
        """On an input."""
        raise NotImplementedError


class _Column(_OfKind):
    how: Column

    def __init__(self, module: Any, state: Parallel, style: Column, kind: Kind) -> None:
        super().__init__(module, state, style, kind)
        heads, n, parts = style.kv_heads, state.axis.size, style.parts
        self.outputs = module.weight.shape[kind.outputs]
        self.shared = heads is not None and heads < n
        self.lengths: tuple[int, ...] = (self.outputs,)
        if heads is not None:
            fused = isinstance(parts, tuple)
            if (heads % n and n % heads) or not (fused or (parts == 1 and self.outputs % heads == 0)):
                fix = "heads that divide the axis, or that it divides, and the lengths of all parts"
                what = f"{style} cannot be divided over axis {state.axis.name!r} (size {n})."
                check.explain(WHERE, what, state.axis, fix=fix)
            if self.shared and style.gather:
                check.explain(WHERE, f"{style}: heads that ranks share are not gathered.", state.axis)
        if kind.inputs is None and (self.shared or _moves(module)):
            what = "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be cut, nor one of shared heads."
            fail(WHERE, what, got=repr(module))

    def cut(self, p: Named) -> Dim | None:
        dim = self.kind.dim_of(p.name)
        if self.shared:
            self.lengths = self._of_shared(p, dim)
            return None
        return Dim(dim, lengths_of(p.path, p.value.shape[dim], self.how.parts, self.state.axis, dim))

    def _of_shared(self, p: Named, dim: int) -> tuple[int, ...]:
        """The lengths of the parts: the first one is cut, if there are several, and the others are of shared heads."""
        length, parts, n = p.value.shape[dim], self.how.parts, self.state.axis.size
        if not isinstance(parts, tuple):
            return (length,)
        if sum(parts) != length:
            fail(WHERE, f"parts {parts} of {p.path!r} do not sum to its length {length}.", fix="the lengths of all")
        if parts[0] % n:
            indivisible(f"dim {dim} of {p.path!r} of length {parts[0]} (a part of {length})", self.state.axis)
        for each in parts[1:]:
            if each % (self.how.kv_heads or 1):
                what = f"a part of {p.path!r} of length {each} has not {self.how.kv_heads} equal heads."
                fail(WHERE, what, fix="kv_heads, and lengths that they divide")
        return parts

    def varies(self, p: Named) -> bool:
        return self.shared

    def counts(self) -> Iterator[tuple[nn.Module, str, int]]:
        for name in self.kind.counts if not self.shared else ():
            yield self.module, name, self.outputs // self.state.axis.size

    def of(self, method: Any, input: Tensor) -> Tensor:
        state, parts = self.state, self.how.parts
        inside = self.module in state.inside
        x = input
        if not inside and (x.is_floating_point() or x.is_complex()):
            x = state.enter(x, state.cuts_sequence(self.how.sequence))
        y: Tensor = self._of_shared_heads(x) if self.shared else method(x)
        if not self.how.gather:
            state.streams.cut()
            return y
        here, n, dim = y.shape[self.kind.features], state.axis.size, self.kind.features
        lengths = [here // parts] * parts if isinstance(parts, int) else [length // n for length in parts]
        gather: Callable[..., Tensor] = all_gather if inside else all_gather_invariant
        pieces = [gather(piece, state.name, dim, mesh=state.mesh) for piece in y.split(lengths, dim)]
        if not inside:
            state.streams.whole()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def _of_shared_heads(self, x: Tensor) -> Tensor:
        layer = self.module
        whole = self.state.vary([layer.weight] if layer.bias is None else [layer.weight, layer.bias])
        y = self.kind.multiply(x, self._mine(whole[0], self.kind.outputs))
        return y if layer.bias is None else y + self.kind.along_features(self._mine(whole[1], 0))

    def _mine(self, whole: Tensor, dim: int) -> Tensor:
        state, heads = self.state, self.how.kv_heads or 1
        pieces = list(whole.transpose(0, dim).split(self.lengths))
        for at, piece in enumerate(pieces):
            if at or len(pieces) == 1:
                pieces[at] = heads_of(piece, heads, axis=state.name, mesh=state.mesh)
            else:
                pieces[at] = piece.chunk(state.axis.size)[state.axis.own_place(piece)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).transpose(0, dim)


class _Row(_OfKind):
    how: Row

    def cut(self, p: Named) -> Dim | None:
        dim = self.kind.inputs or 0
        if p.name != "weight":
            return None
        return Dim(dim, lengths_of(p.path, p.value.shape[dim], 1, self.state.axis, dim))

    def varies(self, p: Named) -> bool:
        return p.name == "bias" and (self.state.sequence if self.how.sequence is None else self.how.sequence)

    def of(self, method: Any, input: Tensor) -> Tensor:
        state, bias = self.state, self.module.bias
        sequence = state.cuts_sequence(self.how.sequence)
        if self.how.split:
            input = self._split(input)
        y = state.leave(self.kind.multiply(input, self.module.weight), sequence)
        if bias is not None:
            y = y + self.kind.along_features(state.vary([bias])[0] if sequence else bias)
        if self.how.enter:
            y = state.enter(y, sequence)
            state.streams.cut()
        return y

    def _split(self, input: Tensor) -> Tensor:
        state = self.state
        dim = self.kind.features
        if self.module in state.inside:
            return input.chunk(state.axis.size, dim)[state.axis.own_place(input)]
        return shard(input, state.name, dim, mesh=state.mesh)


class _Vocab(_OfKind):
    how: Vocab

    def __init__(self, module: Any, state: Parallel, style: Vocab, kind: Kind) -> None:
        super().__init__(module, state, style, kind)
        if _moves(module):
            fail(WHERE, "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be cut.", got=repr(module))

    def cut(self, p: Named) -> Dim | None:
        return Dim(0, lengths_of(p.path, p.value.shape[0], 1, self.state.axis, 0))

    def of(self, method: Any, input: Tensor) -> Tensor:
        state, table = self.state, self.module
        sequence = state.cuts_sequence(self.how.sequence)
        if not is_as_known(table):
            return self._by_own_forward(method, input, sequence)
        y = vocab_embedding(
            input,
            table.weight,
            axis=state.name,
            padding_idx=table.padding_idx,
            sequence=sequence,
            mesh=state.mesh,
        )
        state.left(sequence)
        return y

    def _by_own_forward(self, method: Any, ids: Tensor, sequence: bool) -> Tensor:
        """Of a table that does something with the rows that it looks up."""
        state, table = self.state, self.module
        count = table.weight.shape[0]
        rows, mine = own_rows(WHERE, ids, count, state.axis)
        padding = table.padding_idx
        if padding is not None:
            local = padding - state.axis.index * count
            table.padding_idx = local if 0 <= local < count else None
        try:
            found = method(rows)
        finally:
            table.padding_idx = padding
        return state.leave(found.masked_fill(~mine.unsqueeze(-1), 0), sequence)


def _moves(table: nn.Embedding) -> bool:
    """Whether a look-up does more than look up."""
    return table.max_norm is not None or table.scale_grad_by_freq or table.sparse


class _OfParameters(Layer):
    """A module that does what it did, with parameters that are cut, or whole and used by each rank in its own way."""

    def __init__(self, module: Any, state: Parallel, styles: dict[str, Style]) -> None:
        super().__init__(module, state)
        self.styles = styles

    def cut(self, p: Named) -> Dim | None:
        how = p.style
        if not isinstance(how, Cut):
            return None
        if not -p.value.ndim <= how.dim < p.value.ndim:
            fail(WHERE, f"{how}, but {p.path!r} has {p.value.ndim} dims.", fix="a dim that there is")
        dim = how.dim % p.value.ndim
        lengths = lengths_of(p.path, p.value.shape[dim], how.parts, self.state.axis, dim)
        if p.value.ndim == 1 and mixes_features(p.owner, len(p.value), self.state.axis.size):
            what = f"{p.path!r} is cut, but {type(p.owner).__name__} computes each feature from all of them."
            around = p.path.rpartition(".")[0]
            fix = f"'replicated', and {around!r}: Block('join', 'part'), which gives it all features"
            fail(WHERE, what, fix=fix)
        return Dim(dim, lengths)

    def varies(self, p: Named) -> bool:
        return p.style in ("sequence", "summed", "once")

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        if "sequence" in self.styles.values() and self.state.cuts_sequence():
            self.state.streams.cut()
        own = vars(self.module)
        table = own["_parameters"]
        seen = torch.compiler.is_compiling() or not hasattr(table, "unseen")  # compiled, a table gives what it has
        look: Callable[[str], Any] = (lambda name: table[name]) if seen else table.unseen
        here = {name: look(name) for owner, name in self.state.varied if owner is self.module}
        names = [name for name, p in here.items() if p is not None]
        before = [here[name] for name in names]
        after = self.state.vary(before, [self.styles[name] == "once" for name in names])
        if all(p is q for p, q in zip(before, after, strict=True)):
            return method(*args, **kwargs)
        used = dict(zip(names, after, strict=True))
        own["_parameters"] = {name: used[name] if name in used else look(name) for name in table}
        try:
            return method(*args, **kwargs)
        finally:
            own["_parameters"] = table


class _Heads(Layer):
    """Torch's attention, or its ``out_proj``, which it reads and does not call."""

    def __init__(self, p: Named, state: Parallel) -> None:
        super().__init__(p.owner, state)
        path = p.path.rpartition(".")[0]
        self.around: Any = p.owner
        if not isinstance(p.owner, nn.MultiheadAttention) and path.rpartition(".")[2] == "out_proj":
            self.around = state.module.get_submodule(path.rpartition(".")[0])
        refuse_odd(self.around, path, state)

    def cut(self, p: Named) -> Dim | None:
        return cut_of(p, self.around)

    def varies(self, p: Named) -> bool:
        return self.state.sequence and p.owner is not self.around and p.name == "bias"

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        if self.module is not self.around:
            return method(*args, **kwargs)
        return attended(self.state, self.module, *args, **kwargs)


class _Split(Layer):
    """On all of it; the result is cut."""

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        y = method(*args, **kwargs)
        if not isinstance(y, Tensor) or y.ndim < 2:
            what = "the result of a layer that is 'split' is not a tensor with a dim of the sequence."
            fail(WHERE, what, fix="'replicated'")
        if not self.state.cuts_sequence():
            return y
        self.state.streams.cut()
        return shard(y, self.state.name, y.ndim - 2, mesh=self.state.mesh)


_LAYERS: dict[type, tuple[str, type[_OfKind], tuple[str, ...]]] = {
    Column: ("column", _Column, ("Linear", "Conv1D", "Conv1d of kernel 1", "Embedding")),
    Row: ("row", _Row, ("Linear", "Conv1D", "Conv1d of kernel 1")),
    Vocab: ("vocab", _Vocab, ("Embedding",)),
}
