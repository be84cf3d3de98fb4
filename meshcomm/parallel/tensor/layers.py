"""What is known of a tensor parallel module: how its parameters are cut, what runs beside its layers, and these layers,
one class per style of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm._torch import version_of
from meshcomm.collectives import check
from meshcomm.collectives.broadcast import broadcast, take_from
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.collectives.reduce import pvary
from meshcomm.errors import fail
from meshcomm.mesh import Axis
from meshcomm.parallel.cut_parameters import Dim, know
from meshcomm.parallel.stand_ins import PLAIN_TABLES, Site, become, seen_as
from meshcomm.parallel.tensor.functions import enter, heads_of, leave, vocab_embedding
from meshcomm.parallel.tensor.plan import WHERE, Column, Named, Style, indivisible
from meshcomm.parallel.tensor.streams import Streams

HERE = "_meshcomm_tensor_parallel"
"""Where it stands among the attributes of its module."""


def known_of(module: nn.Module) -> Parallel | None:
    """What is known of a module that :func:`tensor_parallel` was given."""
    found = vars(module).get(HERE)
    return found if isinstance(found, Parallel) else None


class Parallel:
    """What is known of a module that is tensor parallel."""

    def __init__(self, module: nn.Module, axis: Axis, sequence: bool) -> None:
        self.mesh, self.name, self.index, self.sequence = axis.mesh, axis.name, axis.index, sequence
        self.module = module
        self.cuts: dict[str, Dim] = {}
        self.varied: list[tuple[nn.Module, str]] = []  # parameters that are whole and used in other ways by each rank
        self.placed: dict[int, Tensor] | None = None  # what the module sees while it runs
        self.streams = Streams(module, self.mesh, self.name)
        self._entered: tuple[Tensor, tuple[int, bool], Tensor] | None = None

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Of a copy."""
        vars(self).update(kept)
        know(self.module, self.mesh)

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self.name, WHERE)

    # -------------------------------------------------------------------------------------------------- at the start

    @torch.no_grad()
    def make_parts(self, module: nn.Module) -> None:
        """All values from index 0; of each parameter that is cut this rank's part."""
        here = dict(module.named_parameters())
        for name, p in here.items():
            if p.is_meta:
                fail(
                    WHERE,
                    f"{name!r} is on the meta device.",
                    fix="initialise it first: each rank keeps its part alone",
                )
            check.tensor(WHERE, p, self.axis, repr(name))
        for name, p in here.items():  # one by one: never more than one whole parameter more
            whole = broadcast(p.detach(), self.name, 0, mesh=self.mesh)
            if name in self.cuts:
                trains, part = p.requires_grad, self.part(name, whole)
                p.requires_grad_(False)  # a leaf that trains may not come to vary, and this one shall
                become(p, part)
                p.requires_grad_(trains)
            else:
                p.data = whole
            p.grad = None  # of this rank's own pass, and of what p was
        take_from(0, list(module.buffers()), self.axis)
        self.streams.make_equal()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter."""
        dim, lengths = self.cuts[name]
        pieces = [shard(piece, self.name, dim, mesh=self.mesh) for piece in whole.split(list(lengths), dim)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse."""
        if name not in self.cuts:
            return part.clone()
        dim, lengths = self.cuts[name]
        pieces = part.split([length // self.axis.size for length in lengths], dim)
        return torch.cat([all_gather_invariant(piece, self.name, dim, mesh=self.mesh) for piece in pieces], dim)

    # -------------------------------------------------------------------------------------------------- at each step

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        """Run the module; the gradients of what is varied go together."""
        if self.placed is not None:
            return method(*args, **kwargs)
        begun = self.streams.begin(self.module.training)
        try:
            sites = self._sites()
            values = {id(site.value): site.value for site in sites}
            varied = self.vary(list(values.values()))
            self.placed = {id(x): x for x in varied}
            with seen_as(sites, dict(zip(values, varied, strict=True))):
                return method(*args, **kwargs)
        finally:
            self.placed = self._entered = None
            if begun:
                self.streams.end()

    def _sites(self) -> list[Site]:
        """Where the parameters to vary stand; not those of which a rank has a slice: they are varied in their layer."""
        found = []
        for owner, name in self.varied:
            table = vars(owner)["_parameters"]
            if type(table) in PLAIN_TABLES and table[name] is not None:
                found.append(Site(owner, table, name, table[name]))
        return found

    def vary(self, params: list[Tensor]) -> list[Tensor]:
        """Parameters as each rank uses them in its own way; those that the module has varied are."""
        placed = self.placed or {}
        rest = [p for p in params if id(p) not in placed]
        done = dict(zip(map(id, rest), pvary(rest, self.name, mesh=self.mesh) if rest else [], strict=True))
        return [done.get(id(p), p) for p in params]

    def enter(self, x: Tensor) -> Tensor:
        """As the function; what several layers take in turn enters once."""
        if torch.compiler.is_compiling():
            return enter(x, self.name, sequence=self.sequence, mesh=self.mesh)
        last, moment = self._entered, (version_of(x), torch.is_grad_enabled())
        if last is not None and last[0] is x and last[1] == moment:
            return last[2]
        y = enter(x, self.name, sequence=self.sequence, mesh=self.mesh)
        self._entered = x, moment, y
        return y

    def leave(self, y: Tensor) -> Tensor:
        """As the function."""
        y = leave(y, self.name, sequence=self.sequence, mesh=self.mesh)
        self.left()
        return y

    def left(self) -> None:
        """What comes now is whole, or a part of the sequence."""
        if self.sequence:
            self.streams.cut()
        else:
            self.streams.whole()


# ------------------------------------------------------------------------------------------------------- the layers


def layers_of(state: Parallel, found: Sequence[Named]) -> dict[nn.Module, Layer]:
    """The layers that do something else than before; says how their parameters are cut."""
    made: dict[nn.Module, Layer] = {}
    styles: dict[nn.Module, Style] = {}
    for each in found:
        if styles.setdefault(each.owner, each.style) != each.style:
            fail(WHERE, f"a layer has parameters of two styles, {each.path!r} and others.", fix="name the layer")
        if each.style != "replicated" and each.owner not in made:
            made[each.owner] = _layer(each, state)
    seen: dict[int, tuple[str, Dim | None, bool]] = {}
    for each in found:
        layer = made.get(each.owner)
        cut, varied = (None, False) if layer is None else (layer.cut(each), layer.varies(each))
        before = seen.setdefault(id(each.value), (each.path, cut, varied))
        if before[1:] != (cut, varied):
            what = f"{before[0]!r} and {each.path!r} are one parameter, cut in two ways."
            fail(WHERE, what, fix="the same style for both")
        if cut is not None:
            state.cuts[each.path] = cut
        if varied:
            state.varied.append((each.owner, each.name))
    return made


class Layer:
    """A layer of a style."""

    kind: type[nn.Module] = nn.Module

    def __init__(self, module: Any, style: Style, state: Parallel) -> None:
        self.module, self.style, self.state = module, style, state

    def cut(self, p: Named) -> Dim | None:
        """How a parameter is cut."""
        return None

    def varies(self, p: Named) -> bool:
        """Whether a parameter that is whole is used in another way on each rank."""
        return False

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        """In place of forward."""
        return self.run(method, *args, **kwargs)

    def run(self, method: Any, input: Any) -> Any:
        """The same with what torch's own layers call their input."""
        raise NotImplementedError

    def _even(self, p: Named, dim: int, lengths: Sequence[int]) -> Dim:
        for length in lengths:
            if length % self.state.axis.size:
                part = "" if len(lengths) == 1 else f" (a part of {p.value.shape[dim]})"
                indivisible(f"dim {dim} of {p.path!r} of length {length}{part}", self.state.axis)
        return Dim(dim, tuple(lengths))


class _Column(Layer):
    kind = nn.Linear

    def __init__(self, module: Any, style: Style, state: Parallel) -> None:
        super().__init__(module, style, state)
        self.how = style if isinstance(style, Column) else Column()
        heads, n = self.how.kv_heads, state.axis.size
        self.shared = heads is not None and heads < n
        if heads is not None and (
            heads < 1 or (heads % n and n % heads) or self.how.parts != 1 or module.out_features % heads
        ):
            check.explain(WHERE, f"{self.how} cannot be divided over axis {state.axis.name!r} (size {n}).", state.axis)
        if self.shared and self.how.gather:
            check.explain(WHERE, f"{self.how}: heads that ranks share are not gathered.", state.axis)

    def cut(self, p: Named) -> Dim | None:
        if self.shared:
            return None
        parts, length = self.how.parts, p.value.shape[0]
        if isinstance(parts, int):
            if parts < 1 or length % parts:
                what = f"{p.path!r} of length {length} has not {parts} equal parts."
                fail(WHERE, what, fix="the lengths of the parts")
            parts = (length // parts,) * parts
        if sum(parts) != length:
            what = f"parts {parts} of {p.path!r} do not sum to its length {length}."
            fail(WHERE, what, fix="the lengths of all parts")
        return self._even(p, 0, parts)

    def varies(self, p: Named) -> bool:
        return self.shared

    def run(self, method: Any, input: Tensor) -> Tensor:
        state, parts = self.state, self.how.parts
        y: Tensor = self._of_shared_heads(input) if self.shared else method(state.enter(input))
        if not self.how.gather:
            state.streams.cut()
            return y
        here, n = y.shape[-1], state.axis.size
        lengths = [here // parts] * parts if isinstance(parts, int) else [length // n for length in parts]
        pieces = [all_gather_invariant(piece, state.name, -1, mesh=state.mesh) for piece in y.split(lengths, -1)]
        state.streams.whole()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def _of_shared_heads(self, input: Tensor) -> Tensor:
        state, heads, layer = self.state, self.how.kv_heads or 1, self.module
        whole = state.vary([layer.weight] if layer.bias is None else [layer.weight, layer.bias])
        mine = [heads_of(p, heads, axis=state.name, mesh=state.mesh) for p in whole]
        return F.linear(state.enter(input), *mine)


class _Row(Layer):
    kind = nn.Linear

    def cut(self, p: Named) -> Dim | None:
        return self._even(p, 1, p.value.shape[1:]) if p.name == "weight" else None

    def varies(self, p: Named) -> bool:
        return p.name == "bias" and self.state.sequence

    def run(self, method: Any, input: Tensor) -> Tensor:
        y, bias = self.state.leave(F.linear(input, self.module.weight)), self.module.bias
        if bias is None:
            return y
        return y + (self.state.vary([bias])[0] if self.state.sequence else bias)


class _Vocab(Layer):
    kind = nn.Embedding

    def __init__(self, module: Any, style: Style, state: Parallel) -> None:
        super().__init__(module, style, state)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            fail(WHERE, "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be cut.", got=repr(module))

    def cut(self, p: Named) -> Dim | None:
        return self._even(p, 0, p.value.shape[:1])

    def run(self, method: Any, input: Tensor) -> Tensor:
        state, table = self.state, self.module
        y = vocab_embedding(
            input,
            table.weight,
            axis=state.name,
            padding_idx=table.padding_idx,
            sequence=state.sequence,
            mesh=state.mesh,
        )
        state.left()
        return y


class _Sequence(Layer):
    """On a part of the sequence."""

    def varies(self, p: Named) -> bool:
        return True

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        self.state.streams.cut()
        own = vars(self.module)
        table = own["_parameters"]
        names = [name for owner, name in self.state.varied if owner is self.module and table[name] is not None]
        before = [table[name] for name in names]
        after = self.state.vary(before)
        if all(p is q for p, q in zip(before, after, strict=True)):
            return method(*args, **kwargs)
        own["_parameters"] = {**table, **dict(zip(names, after, strict=True))}
        try:
            return method(*args, **kwargs)
        finally:
            own["_parameters"] = table


class _Split(Layer):
    """On all of it; the result is cut."""

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        y = method(*args, **kwargs)
        if not isinstance(y, Tensor) or y.ndim < 2:
            what = "the result of a layer that is 'split' is not a tensor with a dim of the sequence."
            fail(WHERE, what, fix="'replicated'")
        self.state.streams.cut()
        return shard(y, self.state.name, y.ndim - 2, mesh=self.state.mesh)


_LAYERS: dict[str, type[Layer]] = {
    "column": _Column, "row": _Row, "vocab": _Vocab, "sequence": _Sequence, "split": _Split,
}  # fmt: skip


def _layer(p: Named, state: Parallel) -> Layer:
    name = "column" if isinstance(p.style, Column) else p.style
    kind = _LAYERS[name]
    if not isinstance(p.owner, kind.kind):
        what = f"{p.path!r} is {name!r}, but belongs to a {type(p.owner).__name__}, not a {kind.kind.__name__}."
        fail(WHERE, what, fix='"replicated", or use the functions of meshcomm.parallel in its forward')
    if kind.kind is not nn.Module and kind is not _Column and type(p.owner).forward is not kind.kind.forward:
        what = f"{p.path!r} is {name!r}, but {type(p.owner).__name__} has a forward of its own."
        fail(WHERE, what, fix="use the functions of meshcomm.parallel in it")
    return kind(p.owner, p.style, state)
