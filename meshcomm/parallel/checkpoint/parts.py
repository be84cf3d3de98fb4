"""Which parts of the global tensors of a module and its optimiser this rank has, under torch's own names for them.

The format of torch's checkpoints knows boxes and nothing of meshes, which is why they move between them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcomm.errors import fail, names, shape_text
from meshcomm.parallel.cut_parameters import Part, parts_of, place_of, places_of
from meshcomm.parallel.fingerprints import Fingerprint, differ, fingerprint_of
from meshcomm.parallel.global_places import Place, Spread
from meshcomm.parallel.later_values import find_marks, has_no_values, refuse_lazy
from meshcomm.parallel.optimizers.shares import WHOLE_STATES, shares_of

Path = tuple[str | int, ...]
"""Where a value stands in nested dicts and lists; joined by dots it is the name in the file."""


def dotted(path: Path) -> str:
    """The name of a path in the file."""
    return ".".join(map(str, path))


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, type(None))


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
    parts: dict[int, list[Part]]
    """By id, of what is cut."""

    def place(self, p: Tensor) -> Place:
        """Where what is here of a parameter lies, cut or not."""
        return self.places.get(id(p)) or Place(p.shape)

    def place_of_state(self, optimizer: torch.optim.Optimizer, p: Tensor) -> tuple[Place, tuple[int, ...]]:
        """The same of what an optimiser keeps here for each of its numbers, and in which shape."""
        shares = shares_of(optimizer)
        if shares is None or shares.is_whole(p):
            return self.place(p), tuple(p.shape)
        return place_of(p, self.parts.get(id(p), ()), shares.range_of(p)), shares.shape_of(p)


def named(module: nn.Module, *, later: bool = False) -> Named:
    """Names as torch's ``get_model_state_dict`` has them, and places; ``later``: parameters may yet have no values."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    params: dict[str, nn.Parameter] = {}
    names_of = state_names(module)
    find_marks(module)
    refuse_lazy("checkpoint", (*module.named_parameters(), *module.named_buffers()))
    for given, p in module.named_parameters(remove_duplicate=False):
        name = names_of(given)
        if not later and has_no_values(p):
            fail("checkpoint", f"{name!r} has no values yet.", fix="parallel.load_full_state_dict, or initialise it")
        if id(p) not in first:
            first[id(p)] = name
        elif name not in params:
            aliases[name] = first[id(p)]
        params[name] = p
    return Named(first, aliases, places_of(module), params, parts_of(module))


def ties_of(stage: nn.Module) -> dict[str, str]:
    """From the names of a stage's parameters that other stages have, too, to the name that all of them know."""
    found = getattr(stage, "tied_parameters", None)
    return dict(found) if isinstance(found, dict) else {}


def same_parameters(module: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter: within the module, and a stage's with the one that all stages know."""
    names_of = state_names(module)
    pairs = [*named(module, later=True).aliases.items()]
    for path, part in module.named_modules():
        inside = f"{path}." if path else ""
        pairs += [(names_of(inside + name), f"tied {known}") for name, known in ties_of(part).items()]
    return pairs


def state_names(module: nn.Module) -> Callable[[str], str]:
    """A function from names in a module to those without the traces of wrappers."""
    outer = [f"{path}.module." if path else "module." for path, part in module.named_modules()
             if isinstance(part, DistributedDataParallel)]  # fmt: skip

    def clean(name: str) -> str:
        for prefix in reversed(outer):
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name[len(prefix) :]
        return without_wrappers(name)

    return clean


def without_wrappers(name: str) -> str:
    """A name without what ``torch.compile`` and wrappers of checkpointing add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# ------------------------------------------------------------------------------------------------- what is in the file


Mark = tuple[str, tuple[int, ...]]
"""A box of a parameter: its name and place."""
Marks = dict[Mark, Fingerprint]
Layout = tuple[object, ...]
"""What decides who writes what."""


class Entries(NamedTuple):
    """What a checkpoint has, by path."""

    tensors: dict[Path, Spread]
    plain: dict[Path, Any]
    aliases: dict[str, str]
    names: list[str]
    """Of all in the module's ``state_dict``, in its order."""
    marks: Marks


def layout_of(found: Entries) -> Layout:
    """All but the values; of the groups of an optimiser the names of their parameters."""
    tensors = [(path, x.shape, x.dtype, [box[:2] for box in x.boxes]) for path, x in found.tensors.items()]
    return tensors, groups_of(found), list(found.plain), found.aliases, found.names


def groups_of(found: Entries) -> list[list[str]]:
    """The names of the parameters in each group of the optimiser."""
    lists = [(path, value) for path, value in found.plain.items() if path[:2] == ("optim", "param_groups")]
    return [list(value) for path, value in lists if len(path) == 4 and path[3] == "params"]


def refuse_others(where: str, every: Sequence[Marks]) -> None:
    """Parameters of one name that are others on each rank: as of stages that count their layers from 0."""
    first: dict[Mark, tuple[int, Fingerprint]] = {}
    for rank, marks in enumerate(every):
        for key, mark in marks.items():
            before, known = first.setdefault(key, (rank, mark))
            if differ(known, mark):
                name = key[0].partition(".")[2]
                fail(
                    where,
                    f"{name!r} has other values on rank {rank} of the mesh than on rank {before}.",
                    got="parameters that nothing has cut are one, if they have one name",
                    fix="other names for stages that differ, as in ModuleDict({str(number): layer}); for experts cut "
                    'by hand tensor_parallel(experts, {"*": Cut(0)}, axis=) of all; equal replicas',
                )


def collect(module: nn.Module, optimizer: torch.optim.Optimizer | None, unmarked: Container[Mark] = ()) -> Entries:
    """The state of a module, and of an optimiser of its parameters, as ``torch.distributed.checkpoint.state_dict``
    names it; without the marks of some boxes.
    """
    found = Entries({}, {}, {}, [], {})
    here, names_of = named(module), state_names(module)
    for given, x in module.state_dict().items():
        name = names_of(given)
        found.names.append(name)
        p = here.params.get(name)
        if p is not None and name in here.aliases:
            found.aliases[f"model.{name}"] = f"model.{here.aliases[name]}"
        elif p is not None:
            spread = found.tensors["model", name] = here.place(p).of(p)
            boxes = {(f"model.{name}", box.offsets): box.view for box in spread.boxes}
            found.marks.update({key: fingerprint_of(x) for key, x in boxes.items() if key not in unmarked})
        else:
            _put(found, ("model", name), x)
    if optimizer is not None:
        _collect_optimizer(found, here, optimizer)
    return found


def _collect_optimizer(found: Entries, here: Named, optimizer: torch.optim.Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        theirs = optimized(here, group["params"])
        for key, value in group.items():
            _put(
                found,
                ("optim", "param_groups", number, key),
                [name for name, _ in theirs] if key == "params" else value,
            )
        for name, p in theirs:
            place, shape = here.place_of_state(optimizer, p)
            for tail, value in _leaves(optimizer.state.get(p, {})):
                path = ("optim", "state", name, *tail)
                if isinstance(value, Tensor) and value.shape == shape and tail[-1] not in WHOLE_STATES:
                    found.tensors[path] = place.of(value)
                    continue
                if isinstance(value, Tensor) and value.ndim and place.is_cut and tail[-1] not in WHOLE_STATES:
                    got = f"{shape_text(value.dtype, value.shape)}, the parameter here {tuple(p.shape)}"
                    fail("checkpoint", f"nothing is known of how {dotted(path)!r} is cut.", got=got,
                         fix="keep it out of the optimiser's state, or the parameter whole")  # fmt: skip
                _put(found, path, value)


_STAND_IN = "_meshcomm_stand_in"


def stand_in(device: torch.device) -> nn.Parameter:
    """A parameter without elements for the optimiser of a rank that has none; no checkpoint has it."""
    made = nn.Parameter(torch.empty(0, device=device))
    vars(made)[_STAND_IN] = True
    return made


def optimized(here: Named, params: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """What an optimiser has, by name; not what a stage without parameters gives it in place of some."""
    strange = [tuple(p.shape) for p in params if id(p) not in here.first and _STAND_IN not in vars(p)]
    if strange:
        fail("checkpoint", f"the optimiser has {len(strange)} parameters that are not the module's.",
             got=f"of shapes {strange[:4]}", fix="make the optimiser of module.parameters()")  # fmt: skip
    return [(here.first[id(p)], p) for p in params if _STAND_IN not in vars(p)]


def _put(found: Entries, at: Path, value: Any) -> None:
    for tail, leaf in _leaves(value):
        path = (*at, *tail)
        if isinstance(leaf, Tensor):
            found.tensors[path] = Spread.whole(leaf)
        else:
            found.plain[path] = checked_plain("checkpoint", dotted(path), leaf)


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


def checked_plain(where: str, name: str, value: Any) -> Any:
    """A value, which is plain data."""
    problem = _plain_problem(value, name)
    if problem:
        fail(where, problem, fix="loading runs no code, so only plain data is saved")
    return value


def _plain_problem(value: Any, where: str) -> str | None:
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
    return next((problem for place, each in inner for problem in [_plain_problem(each, place)] if problem), None)
