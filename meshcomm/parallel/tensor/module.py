"""Tensor parallelism of a module that knows nothing of it, by a plan of names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm._torch import version_of
from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.collectives.reduce import broadcast, pvary, take_from
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.parallel.cut_parameters import Dim, Part, checked_module, know, refuse_copies, refuse_overlap
from meshcomm.parallel.cut_states import mark_states
from meshcomm.parallel.stand_ins import PLAIN_TABLES, Around, Site, become, refuse_sliced, seen_as
from meshcomm.parallel.tensor.functions import enter, heads_of, leave, vocab_embedding
from meshcomm.parallel.tensor.streams import Streams
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.scheduler import claim

__all__ = ["Column", "tensor_parallel", "whole_parameters"]

M = TypeVar("M", bound=nn.Module)
_WHERE = "tensor_parallel"
_HERE = "_meshcomm_tensor_parallel"
_STYLES = ("column", "row", "vocab", "replicated", "sequence", "split")


class Column(NamedTuple):
    """A linear layer of whose outputs each rank computes a part, if there is more to say than ``"column"``."""

    parts: int | tuple[int, ...] = 1
    """Several matrices in one, each of which is cut: how many equal ones, or their lengths; 3 for q, k and v."""
    kv_heads: int | None = None
    """The heads of keys or values, which may be fewer than ranks: then ranks share them, and each has the weight."""
    gather: bool = False
    """Whether the outputs are gathered again, so that code that follows sees all of them."""


Style = str | Column


@Op("tensor_parallel", "what goes in and comes out is invariant", composed=True)
def tensor_parallel(
    module: M,
    plan: Mapping[str, Style],
    *,
    axis: AxisName,
    sequence: bool = False,
    divide: Sequence[str] = (),
    mesh: Mesh | None = None,
) -> M:
    """Let each rank of ``axis`` keep and compute a part of the layers of ``module``.

    ::

        {"*.qkv": Column(3), "*.proj": "row", "*.up": "column", "*.down": "row", "*.norm*": "replicated"}

    The module is changed in place: its parameters take the values of index 0, so that a seed gives the same model on
    any mesh, and those that are cut keep this rank's part alone. They are the same objects under the same names.
    Layers that are named in the plan do what is said there; all others do what they did, on fewer features.
    ``state_dict`` has this rank's parts, and says so: see :func:`fully_shard`.

    Random numbers in training, of dropout and all that torch draws: what is whole draws alike on all ranks, and what is
    cut draws differently, from a column (or another layer whose result is cut) to the next row (or another one whose
    result is whole); with ``sequence`` from the first layer that cuts on. Both follow from torch's default generators,
    made equal along ``axis``, so that ``torch.utils.checkpoint`` draws the same again. Which elements are dropped
    depends on how the module is cut; under :func:`meshcomm.rng` it does not. What is whole and drawn between a column
    and its row, such as a residual stream beside them, would differ too: draw it before, or under :func:`meshcomm.rng`;
    :func:`meshcomm.check_vma` refuses it.

    Type: what goes in and comes out is invariant along ``axis``, unless the last layer is a column (varying: give it
    to :func:`vocab_cross_entropy`) or the plan ends on a cut sequence. The loss is the same on all ranks: do not
    reduce it over ``axis``.

    Args:
        module: the same on every rank but for the values.
        plan: for patterns of names (``*``, ``?``, ``[ab]``) of parameters, or of modules with all that they have, what
            is done. The first one that fits counts, so that ``"*": "replicated"`` may come last.

            ``"column"``, :class:`Column`: a ``Linear`` of whose outputs each rank computes a part.
            ``"row"``: a ``Linear`` of whose inputs each rank has a part.
            ``"vocab"``: an ``Embedding`` of which each rank has some rows; with ``sequence`` its result is cut.
            ``"replicated"``: whole, and used in the same way on all ranks.
            ``"sequence"``: whole, and used on a part of the sequence: norms, with ``sequence``. If they were called
            replicated, each rank would have the gradient of its part; ``check_vma("error")`` says so.
            ``"split"``: whole, and the result is then cut along the sequence: position embeddings, with ``sequence``.
        axis: a name, or a tuple of names.
        sequence: whether activations between a row and a column are cut along the last dim but one.
        divide: patterns of names of attributes that count what is now on this rank, such as ``"*.attn.heads"``: they
            are divided by the size of the axis.
        mesh: the current mesh by default; it is kept.

    Returns: ``module``.

    Backward: of a column an all_reduce of the gradient of its input, once for several columns of one input. Gradients
        of what is replicated are the same on all ranks; of ``"sequence"`` they are summed over ``axis``.

    Cost: at the start one broadcast of the parameters, and of the generators' states; one of 8 bytes when a module that
        draws runs for the first time, or after ``torch.manual_seed``. Per row one all_reduce forwards, per input of
        columns one backwards; with ``sequence`` an all_gather and a reduce_scatter each.

    Raises:
        MeshError: not a module; no such axis; a pattern for which nothing is left; a parameter that no pattern
            names; a style that does not fit the kind of layer; a dim or an attribute that the axis does not divide;
            ``"sequence"`` and ``"split"`` without ``sequence``; a parameter that stands in layers of other styles; a
            module that is tensor parallel or sharded already, or data parallel along ``axis``; parameters on the meta
            device.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import tensor_parallel
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def program():
        ...     mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        ...     tensor_parallel(mlp, {"0": "column", "2": "row"}, axis="tp", mesh=mesh)
        ...     return tuple(mlp[0].weight.shape), tuple(mlp(torch.ones(3, 4)).shape)
        >>> mc.launch(program, ranks=2)
        [((4, 4), (3, 4)), ((4, 4), (3, 4))]

    Source: Megatron-LM; torch's ``parallelize_module``.
    """
    checked_module(_WHERE, module)
    ax = check.axis_of(_WHERE, axis, mesh)
    claim(module, _WHERE)
    if _HERE in vars(module):
        fail(_WHERE, "the module is tensor parallel already.", fix="one plan for all of it")
    if not isinstance(sequence, bool):
        fail(_WHERE, f"sequence={sequence!r} is neither True nor False.", fix="True or False")
    refuse_sliced(_WHERE, module, "call tensor_parallel before fully_shard")
    refuse_copies(_WHERE, module, "tensor parallelism over another axis than data_parallel's", ax)
    refuse_overlap(_WHERE, module, ax)
    state = _Parallel(module, ax, sequence)
    layers = state.layers(_styles(module, plan, sequence))
    attributes = list(_attributes(module, divide, ax))
    state.make_parts(module)
    for part, name, value in attributes:
        setattr(part, name, value)
    for part, layer in layers.items():
        part.forward = Around(layer.call, part.forward)
    module.forward = Around(state.call, module.forward)
    setattr(module, _HERE, state)
    know(module, _told)
    mark_states(module)
    return module


@Op("whole_parameters", "-> I", composed=True)
def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a tensor parallel module as they were without it: each part gathered.

    Type: -> invariant along its axis.

    Args:
        module: one that :func:`tensor_parallel` gave.

    Returns: name to tensor, on all ranks, new storage; no gradients.

    Cost: an all_gather of each parameter that is cut.

    Raises:
        MeshError: another module.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import tensor_parallel, whole_parameters
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def program():
        ...     layer = torch.nn.Sequential(torch.nn.Linear(4, 8))
        ...     tensor_parallel(layer, {"0": "column"}, axis="tp", mesh=mesh)
        ...     return {name: tuple(x.shape) for name, x in whole_parameters(layer).items()}
        >>> mc.launch(program, ranks=2)[0]
        {'0.weight': (8, 4), '0.bias': (8,)}

    Source: none.
    """
    state = vars(module).get(_HERE) if isinstance(module, nn.Module) else None
    if not isinstance(state, _Parallel):
        got, fix = type(module).__name__, "the one that tensor_parallel gave"
        fail("whole_parameters", "the module is not tensor parallel.", got=got, fix=fix)
    return {name: state.whole(name, p.detach()) for name, p in module.named_parameters()}


def _told(module: nn.Module) -> tuple[Mesh, list[Part]] | None:
    """What is cut of a module that is tensor parallel."""
    state, found = vars(module).get(_HERE), []
    if not isinstance(state, _Parallel):
        return None
    for owner, name, path, how in state.cut:
        p = dict.get(vars(owner)["_parameters"], name)  # behind a table that shows what was gathered
        if isinstance(p, nn.Parameter):
            found.append(Part(p, path, _WHERE, state.mesh, state.name, state.index, how))
    return state.mesh, found


# --------------------------------------------------------------------------------------------------------- the plan


class Named(NamedTuple):
    """A parameter at a place in the module, and what the plan says of it."""

    path: str
    owner: nn.Module
    name: str
    value: Tensor
    style: Style


def _styles(module: nn.Module, plan: Mapping[str, Style], sequence: bool) -> list[Named]:
    """Every parameter at every place with its style."""
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        fail(_WHERE, "the plan is not a mapping of patterns to styles.", got=repr(plan), fix='{"*.up": "column", ...}')
    for pattern, style in plan.items():
        if not isinstance(style, Column) and style not in _STYLES:
            fix = f"one of {names(_STYLES)}, or a Column(...){likely(style, _STYLES)}"
            fail(_WHERE, f"{pattern!r} has no style but {style!r}.", fix=fix)
        if isinstance(style, Column):
            _check_column(style)
        if style in ("sequence", "split") and not sequence:
            fail(_WHERE, f"{pattern!r} is {style!r}, and the sequence is not cut.", fix="pass sequence=True")
    found: list[Named] = []
    missing: list[str] = []
    used: set[str] = set()
    for path, value in module.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(value):
            fail(_WHERE, f"{path!r} has no shape yet.", fix="run the module once before")
        place, _, name = path.rpartition(".")
        fits = next((each for each in plan if _names(each, path)), None)
        if fits is None:
            missing.append(path)
        else:
            used.add(fits)
            found.append(Named(path, module.get_submodule(place), name, value, plan[fits]))
    if missing:
        fail(
            _WHERE,
            f"the plan does not name {names(missing[:8])}{' and others' if len(missing) > 8 else ''}.",
            got=f"patterns {names(plan)}",
            fix='name each parameter; "replicated" for what is whole on all ranks',
        )
    idle = [pattern for pattern in plan if pattern not in used]
    if idle:
        known = [path for path, _ in module.named_modules() if path]
        fail(
            _WHERE,
            f"nothing is left for {names(idle)}.",
            got=f"modules {names(known[:12])}",
            fix="see the order of the plan",
        )
    return found


def _check_column(how: Column) -> None:
    """What does not depend on the layer."""
    lengths = how.parts if isinstance(how.parts, tuple) else (how.parts,)
    good = lengths and all(check.whole_number(length) and length > 0 for length in lengths)
    good = good and (how.kv_heads is None or (check.whole_number(how.kv_heads) and how.kv_heads > 0))
    if not good or not isinstance(how.gather, bool):
        fix = "parts: an int or lengths, from 1 on; kv_heads: an int from 1 on, or None; gather: True or False"
        fail(_WHERE, f"{how} has a value that is none.", fix=fix)


def _names(pattern: str, path: str) -> bool:
    """Whether it names the parameter or a module that holds it."""
    while path:
        if fnmatchcase(path, pattern):
            return True
        path = path.rpartition(".")[0]
    return False


def _attributes(module: nn.Module, divide: Sequence[str], axis: Axis) -> Iterator[tuple[nn.Module, str, int]]:
    if isinstance(divide, str) or not isinstance(divide, Collection):
        fail(_WHERE, f"divide={divide!r} is not a list of patterns.", fix="such as ['*.attn.heads']")
    for pattern in divide:
        count = 0
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if check.whole_number(value) and fnmatchcase(f"{path}.{name}".lstrip("."), pattern):
                    if value % axis.size:
                        _indivisible(f"attribute {'.'.join([path, name]).lstrip('.')} = {value}", axis)
                    count += 1
                    yield part, name, value // axis.size
        if not count:
            fix = "the name of an attribute, with the path of its module; or leave it out"
            fail(_WHERE, f"divide: no attribute that is an int is called {pattern!r}.", fix=fix)


def _indivisible(what: str, axis: Axis) -> NoReturn:
    what = f"{what} is not divisible by axis {axis.name!r} (size {axis.size})."
    check.explain(_WHERE, what, axis, fix="another size of the axis, or 'replicated'")


# ------------------------------------------------------------------------------------------------------- the parts


class _Parallel:
    """What is known of a module that is tensor parallel."""

    def __init__(self, module: nn.Module, axis: Axis, sequence: bool) -> None:
        self.mesh, self.name, self.index, self.sequence = axis.mesh, axis.name, axis.index, sequence
        self.module = module
        self.cuts: dict[str, Dim] = {}
        self.cut: list[
            tuple[nn.Module, str, str, Dim]
        ] = []  # the same by where they stand, whatever their paths become
        self.varied: list[tuple[nn.Module, str]] = []  # parameters that are whole and used in other ways by each rank
        self.placed: dict[int, Tensor] | None = None  # what the module sees while it runs
        self.streams = Streams(module, self.mesh, self.name)
        self._entered: tuple[Tensor, tuple[int, bool], Tensor] | None = None

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Of a copy."""
        vars(self).update(kept)
        know(self.module, _told)

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self.name, _WHERE)

    # -------------------------------------------------------------------------------------------------- at the start

    def layers(self, found: Sequence[Named]) -> dict[nn.Module, _Layer]:
        """The layers that do something else than before; says how their parameters are cut."""
        made: dict[nn.Module, _Layer] = {}
        styles: dict[nn.Module, Style] = {}
        for each in found:
            if styles.setdefault(each.owner, each.style) != each.style:
                fail(_WHERE, f"a layer has parameters of two styles, {each.path!r} and others.", fix="name the layer")
            if each.style != "replicated" and each.owner not in made:
                made[each.owner] = _layer(each, self)
        seen: dict[int, tuple[str, Dim | None, bool]] = {}
        for each in found:
            layer = made.get(each.owner)
            cut, varied = (None, False) if layer is None else (layer.cut(each), layer.varies(each))
            before = seen.setdefault(id(each.value), (each.path, cut, varied))
            if before[1:] != (cut, varied):
                what = f"{before[0]!r} and {each.path!r} are one parameter, cut in two ways."
                fail(_WHERE, what, fix="the same style for both")
            if cut is not None:
                self.cuts[each.path] = cut
                self.cut.append((each.owner, each.name, each.path, cut))
            if varied:
                self.varied.append((each.owner, each.name))
        return made

    @torch.no_grad()
    def make_parts(self, module: nn.Module) -> None:
        """All values from index 0; of each parameter that is cut this rank's part."""
        here = dict(module.named_parameters())
        for name, p in here.items():
            if p.is_meta:
                fail(
                    _WHERE,
                    f"{name!r} is on the meta device.",
                    fix="initialise it first: each rank keeps its part alone",
                )
            check.tensor(_WHERE, p, self.axis, repr(name))
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


class _Layer:
    """A layer of a style."""

    kind: type[nn.Module] = nn.Module

    def __init__(self, module: Any, style: Style, state: _Parallel) -> None:
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
                _indivisible(f"dim {dim} of {p.path!r} of length {length}{part}", self.state.axis)
        return Dim(dim, tuple(lengths))


class _Column(_Layer):
    kind = nn.Linear

    def __init__(self, module: Any, style: Style, state: _Parallel) -> None:
        super().__init__(module, style, state)
        self.how = style if isinstance(style, Column) else Column()
        heads, n = self.how.kv_heads, state.axis.size
        self.shared = heads is not None and heads < n
        if heads is not None and (
            heads < 1 or (heads % n and n % heads) or self.how.parts != 1 or module.out_features % heads
        ):
            check.explain(_WHERE, f"{self.how} cannot be divided over axis {state.axis.name!r} (size {n}).", state.axis)
        if self.shared and self.how.gather:
            check.explain(_WHERE, f"{self.how}: heads that ranks share are not gathered.", state.axis)

    def cut(self, p: Named) -> Dim | None:
        if self.shared:
            return None
        parts, length = self.how.parts, p.value.shape[0]
        if isinstance(parts, int):
            if parts < 1 or length % parts:
                what = f"{p.path!r} of length {length} has not {parts} equal parts."
                fail(_WHERE, what, fix="the lengths of the parts")
            parts = (length // parts,) * parts
        if sum(parts) != length:
            what = f"parts {parts} of {p.path!r} do not sum to its length {length}."
            fail(_WHERE, what, fix="the lengths of all parts")
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


class _Row(_Layer):
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


class _Vocab(_Layer):
    kind = nn.Embedding

    def __init__(self, module: Any, style: Style, state: _Parallel) -> None:
        super().__init__(module, style, state)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            fail(_WHERE, "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be cut.", got=repr(module))

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


class _Sequence(_Layer):
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


class _Split(_Layer):
    """On all of it; the result is cut."""

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        y = method(*args, **kwargs)
        if not isinstance(y, Tensor) or y.ndim < 2:
            what = "the result of a layer that is 'split' is not a tensor with a dim of the sequence."
            fail(_WHERE, what, fix="'replicated'")
        self.state.streams.cut()
        return shard(y, self.state.name, y.ndim - 2, mesh=self.state.mesh)


_LAYERS: dict[str, type[_Layer]] = {
    "column": _Column, "row": _Row, "vocab": _Vocab, "sequence": _Sequence, "split": _Split,
}  # fmt: skip


def _layer(p: Named, state: _Parallel) -> _Layer:
    name = "column" if isinstance(p.style, Column) else p.style
    kind = _LAYERS[name]
    if not isinstance(p.owner, kind.kind):
        what = f"{p.path!r} is {name!r}, but belongs to a {type(p.owner).__name__}, not a {kind.kind.__name__}."
        fail(_WHERE, what, fix='"replicated", or use the functions of meshcomm.parallel in its forward')
    if kind.kind is not nn.Module and kind is not _Column and type(p.owner).forward is not kind.kind.forward:
        what = f"{p.path!r} is {name!r}, but {type(p.owner).__name__} has a forward of its own."
        fail(_WHERE, what, fix="use the functions of meshcomm.parallel in it")
    return kind(p.owner, p.style, state)
