"""Which parts of the global tensors of a module and its optimiser this rank has, under torch's own names for them.

A part is a box: where it begins in the global tensor, its lengths, and the local memory that holds it. A flat slice is
several boxes; what is cut in several matrices is several again. The format of torch's checkpoints knows boxes and
nothing of meshes, which is why they move between them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcomm.errors import MeshError, fail, held, names, shape_text
from meshcomm.parallel.fsdp_state import Piece, pieces

__all__ = [
    "Box", "Entries", "Named", "Path", "Place", "Spread", "collect", "named", "optimizer_names", "optimizer_path",
    "plain_problem", "state_names",
]  # fmt: skip

Path = tuple[str | int, ...]
"""Where a value stands in nested dicts and lists; joined by dots it is the name in the file."""

_TENSOR_PARALLEL = "_meshcomm_tensor_parallel"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, type(None))


class Box(NamedTuple):
    """A part of a global tensor, and the memory in which it is here."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Tensor


class Spread(NamedTuple):
    """A global tensor, of which this rank has some boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]

    @staticmethod
    def whole(x: Tensor) -> Spread:
        """A tensor that is the same on every rank; of a DTensor what is here."""
        chunks = getattr(x, "__create_chunk_list__", None)
        if chunks is None:
            return Spread(tuple(x.shape), x.dtype, [Box((0,) * x.ndim, tuple(x.shape), _dense(x))])
        here: Any = x.detach().to_local()  # type: ignore[attr-defined]
        found = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks()]
        if len(found) > 1:
            fail("checkpoint", "a DTensor that lies in several pieces on a rank.", got=str(x.placements))  # type: ignore[attr-defined]
        boxes = [Box(offsets, sizes, here) for offsets, sizes in found if math.prod(sizes) or not x.numel()]
        return Spread(tuple(x.shape), x.dtype, boxes)


class Run(NamedTuple):
    """Consecutive places along a dim: where they are here and where in the global tensor."""

    here: int
    length: int
    there: int


class Place:
    """How tensors that are shaped like a parameter lie in the global one: cut along dims, then a flat slice of that."""

    def __init__(self, shape: Sequence[int], start: int = 0, stop: int | None = None, cut: bool = False) -> None:
        """``shape``: before it was sliced flat."""
        self.shape = tuple(shape)
        self.runs = [[Run(0, length, 0)] for length in self.shape]
        self.start, self.stop = start, math.prod(self.shape) if stop is None else stop
        self.is_cut = cut

    def cut(self, dim: int, lengths: Sequence[int], size: int, index: int) -> None:
        """Another cut came before those that are known: each of these lengths into ``size`` parts."""
        table: list[Run] = []
        here = there = 0
        for length in lengths:
            table.append(Run(here, length // size, there + index * (length // size)))
            here, there = here + length // size, there + length
        joined = []
        for a, b in itertools.product(self.runs[dim], table):
            first, last = _overlap(a.there, a.length, b.here, b.length)
            if first < last:
                joined.append(Run(a.here + first - a.there, last - first, b.there + first - b.here))
        self.runs[dim] = joined
        self.shape = (*self.shape[:dim], there, *self.shape[dim + 1 :])
        self.is_cut = True

    def of(self, x: Tensor) -> Spread:
        """``x`` is shaped like the parameter here."""
        if hasattr(x, "__create_chunk_list__"):
            return Spread.whole(x)
        x = _dense(x)
        if not math.prod(self.shape):
            return Spread(self.shape, x.dtype, [Box((0,) * len(self.shape), self.shape, x.new_empty(self.shape))])
        local = tuple(sum(run.length for run in runs) for runs in self.runs)
        boxes = []
        for at, offsets, sizes in _flat_boxes(local, self.start, self.stop):
            whole = x if tuple(x.shape) == local else x.view(-1)[at : at + math.prod(sizes)].view(sizes)
            boxes += list(self._spread(whole, offsets, sizes))
        return Spread(self.shape, x.dtype, boxes)

    def _spread(self, x: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Box]:
        """The global boxes in one local box."""
        for runs in itertools.product(*self.runs):
            y, there = x, []
            for dim, (run, offset, size) in enumerate(zip(runs, offsets, sizes, strict=True)):
                first, last = _overlap(run.here, run.length, offset, size)
                if first >= last:
                    break
                y = y.narrow(dim, first - offset, last - first)
                there.append(run.there + first - run.here)
            else:
                yield Box(tuple(there), tuple(y.shape), y)


def _dense(x: Tensor) -> Tensor:
    """The same memory; files have nothing but dense tensors."""
    y = x.detach()
    if type(y) is not Tensor or y.layout is not torch.strided or y.is_quantized or y.is_nested:
        fail("checkpoint", f"a {type(x).__name__} of layout {x.layout} is no dense tensor.", got=str(tuple(x.shape)))
    return y


def _overlap(a: int, a_length: int, b: int, b_length: int) -> tuple[int, int]:
    return max(a, b), min(a + a_length, b + b_length)


def _flat_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Boxes that are elements ``start`` to ``stop`` of the flattened shape: where in the slice each begins, its offsets
    and sizes; at most 2 d - 1 for d dims.
    """
    at = start
    while at < stop:
        if not shape:
            yield 0, (), ()
            return
        rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # The outermost dim of which a whole row begins here.
        dim, row = next((dim, row) for dim, row in enumerate(rows) if at % row == 0 and at + row <= stop)
        offsets = _unflat(at, shape)
        count = min((stop - at) // row, shape[dim] - offsets[dim])
        yield at - start, offsets, (*(1,) * dim, count, *shape[dim + 1 :])
        at += count * row


def _unflat(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    offsets = []
    for length in reversed(shape):
        at, offset = divmod(at, length)
        offsets.append(offset)
    return tuple(reversed(offsets))


# -------------------------------------------------------------------------------------------------- places of a module


class Named(NamedTuple):
    """The parameters of a module."""

    first: dict[int, str]
    """By id, the name that counts."""
    aliases: dict[str, str]
    """Other names to the name that counts."""
    places: dict[int, Place]
    """By id."""
    params: dict[str, nn.Parameter]
    """By every name."""


def named(module: nn.Module) -> Named:
    """Names as torch's ``get_model_state_dict`` has them, and places."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    params: dict[str, nn.Parameter] = {}
    names_of = state_names(module)
    for given, p in module.named_parameters(remove_duplicate=False):
        name = names_of(given)
        if nn.parameter.is_lazy(p) or p.is_meta:
            fail("checkpoint", f"{name!r} has no {'values' if p.is_meta else 'shape'} yet.", fix="initialise it first")
        if id(p) not in first:
            first[id(p)] = name
        elif name not in params:
            aliases[name] = first[id(p)]
        params[name] = p
    return Named(first, aliases, _places(module), params)


def state_names(module: nn.Module) -> Callable[[str], str]:
    """A function from names in a module to those without the traces of wrappers."""
    outer = [f"{path}.module." if path else "module." for path, part in module.named_modules()
             if isinstance(part, DistributedDataParallel)]  # fmt: skip

    def clean(name: str) -> str:
        for prefix in reversed(outer):
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name[len(prefix) :]
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        return name

    return clean


def _places(module: nn.Module) -> dict[int, Place]:
    """How the adaptors, wherever in the module they were used, have cut its parameters: slices were made last."""
    places: dict[int, Place] = {}
    for part in module.modules():
        slices = _pieces(part)
        for name, p in part.named_parameters(remove_duplicate=False):
            if name in slices:
                shape, start, stop, _ = slices[name]
                places[id(p)] = Place(shape, start, stop, cut=True)
    _refuse_inner(module, places)
    for part in module.modules():
        state = vars(part).get(_TENSOR_PARALLEL)
        if state is None:
            continue
        done = set()
        for name, p in part.named_parameters(remove_duplicate=False):
            if name in state.cuts and id(p) not in done:
                done.add(id(p))
                dim, lengths = state.cuts[name]
                places.setdefault(id(p), Place(p.shape)).cut(dim, lengths, state.axis.size, state.axis.index)
    return places


def _refuse_inner(module: nn.Module, places: Mapping[int, Place]) -> None:
    """What was cut with a module around this one does not know how."""
    states = [vars(part)[_TENSOR_PARALLEL] for part in module.modules() if _TENSOR_PARALLEL in vars(part)]
    for path, part in module.named_modules():
        table: Any = vars(part)["_parameters"]
        sliced = [name for name in getattr(table, "openers", ()) if id(dict.get(table, name)) not in places]
        layer = getattr(getattr(vars(part).get("forward"), "call", None), "__self__", None)
        state = getattr(layer, "state", None)
        known = state is None or not hasattr(state, "cuts") or any(state is each for each in states)
        for maker, found in (("fully_shard", sliced), ("tensor_parallel", [] if known else list(table))):
            if found:
                name = f"{path}.{found[0]}".lstrip(".")
                what = f"{name!r} is a part that {maker} has made of a module around this one."
                fail("checkpoint", what, fix=f"pass the module that {maker} was given, or one around it")


def _pieces(part: nn.Module) -> dict[str, Piece]:
    try:
        with held():
            return pieces(part)
    except MeshError:  # not sharded
        return {}


# ------------------------------------------------------------------------------------------------- what is in the file


class Entries(NamedTuple):
    """What a checkpoint has, by path."""

    tensors: dict[Path, Spread]
    plain: dict[Path, Any]
    aliases: dict[str, str]


def collect(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Entries:
    """The state of a module, and of an optimiser of its parameters, as ``torch.distributed.checkpoint.state_dict``
    names it.
    """
    found = Entries({}, {}, {})
    here, names_of = named(module), state_names(module)
    for given, x in module.state_dict().items():
        name = names_of(given)
        p = here.params.get(name)
        if p is not None and name in here.aliases:
            found.aliases[f"model.{name}"] = f"model.{here.aliases[name]}"
        elif p is not None:
            found.tensors["model", name] = here.places.get(id(p), Place(p.shape)).of(p)
        else:
            _put(found, ("model", name), x)
    if optimizer is not None:
        _collect_optimizer(found, here, optimizer)
    return found


def _collect_optimizer(found: Entries, here: Named, optimizer: torch.optim.Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        theirs = optimizer_names(here, group["params"])
        for key, value in group.items():
            _put(found, ("optim", "param_groups", number, key), theirs if key == "params" else value)
        for name, p in zip(theirs, group["params"], strict=True):
            place = here.places.get(id(p), Place(p.shape))
            for tail, value in _leaves(optimizer.state.get(p, {})):
                path = optimizer_path(name, tail)
                if isinstance(value, Tensor) and value.shape == p.shape:
                    found.tensors[path] = place.of(value)
                    continue
                if isinstance(value, Tensor) and value.ndim and place.is_cut:
                    got = f"{shape_text(value.dtype, value.shape)}, the parameter here {tuple(p.shape)}"
                    fail("checkpoint", f"nothing is known of how {'.'.join(map(str, path))!r} is cut.", got=got,
                         fix="keep it out of the optimiser's state, or the parameter whole")  # fmt: skip
                _put(found, path, value)


def optimizer_names(here: Named, params: Sequence[Tensor]) -> list[str]:
    """The names of what an optimiser has."""
    strange = [tuple(p.shape) for p in params if id(p) not in here.first]
    if strange:
        fail("checkpoint", f"the optimiser has {len(strange)} parameters that are not the module's.",
             got=f"of shapes {strange[:4]}", fix="make the optimiser of module.parameters()")  # fmt: skip
    return [here.first[id(p)] for p in params]


def optimizer_path(name: str, tail: Path) -> Path:
    """Of a state of a parameter."""
    return ("optim", "state", name, *tail)


def _put(found: Entries, at: Path, value: Any) -> None:
    for tail, leaf in _leaves(value):
        path = (*at, *tail)
        if isinstance(leaf, Tensor):
            found.tensors[path] = Spread.whole(leaf)
        else:
            problem = plain_problem(leaf, ".".join(map(str, path)))
            if problem:
                fail("checkpoint", problem, fix="loading runs no code, so only plain data is saved")
            found.plain[path] = leaf


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """As torch takes nested state apart: dicts always, lists where there is a dict or a tensor in them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and _is_nested(value):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    else:
        yield path, value


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(x, (Mapping, Tensor)) or (isinstance(x, list) and _is_nested(x)) for x in values)


def plain_problem(value: Any, where: str) -> str | None:
    """What in a value is no plain data, if anything."""
    if type(value) in _PLAIN or type(value) is Tensor:
        return None
    if type(value) in (list, tuple):
        inner = [(f"{where}[{at}]", each) for at, each in enumerate(value)]
    elif type(value) in (dict, OrderedDict, Counter):
        odd = [key for key in value if type(key) not in _PLAIN]
        if odd:
            return f"{where} has a key that is no plain data: {odd[0]!r}"
        inner = [(f"{where}[{key!r}]", each) for key, each in value.items()]
    else:
        fits = names(kind.__name__ for kind in (list, tuple, dict, Tensor, *_PLAIN[:6]))
        return f"{where} is a {type(value).__name__}, which is no plain data (None, {fits})"
    return next((problem for place, each in inner for problem in [plain_problem(each, place)] if problem), None)
