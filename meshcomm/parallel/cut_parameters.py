"""How the parameters of a module are cut: the one place that knows, whichever adaptors have cut them.

Each module keeps what was made of its own parameters, by their names; so do its copies. Whoever asks needs to know of
no adaptor, and an adaptor of no other one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshcomm._torch import own_parameters, watch_total_norms
from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.errors import fail
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.parallel.global_places import Place
from meshcomm.runtime.axis_names import written_out
from meshcomm.spmd.types.told import told_to_vary
from meshcomm.spmd.types.vma import declared


class Dim(NamedTuple):
    """Cut along a dim: of which each of these lengths is divided over the axis."""

    dim: int
    lengths: tuple[int, ...]


class Flat(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened ``shape``."""

    shape: torch.Size
    start: int
    stop: int
    ranges: tuple[tuple[int, int], ...] = ()
    """The same of each index of the axis."""


class Part(NamedTuple):
    """What an adaptor has made of a parameter on this rank."""

    name: str
    """In the module that the adaptor was given."""
    maker: str
    mesh: Mesh
    axis: AxisName
    """``()``: this rank has all of it."""
    at: int
    """The index along the axis of the rank that has it."""
    how: Dim | Flat

    @property
    def size(self) -> int:
        """In how many parts it is cut."""
        return self.mesh.size_of(self.axis) if self.axis else 1


_CUTS, _MESHES, _COPIES = "_meshcomm_cuts", "_meshcomm_meshes", "_meshcomm_copies"
_SHARED = "_meshcomm_ranks_with_it"
_NOTHING: Mapping[int, Part] = {}
_known: weakref.WeakKeyDictionary[nn.Module, set[int] | None] = weakref.WeakKeyDictionary()
"""The modules that adaptors have spread, in order, and the ids of the parameters that each had then; None of a copy,
which is not whole yet. No references: torch swaps no tensors that have weak ones.
"""


def know(module: nn.Module, mesh: Mesh, made: Mapping[int, Part] = _NOTHING, copies: AxisName = ()) -> None:
    """An adaptor has spread ``module`` over ``mesh``. Of a copy call it again, which has all the rest.

    Args:
        module: what the adaptor was given.
        mesh: over which its parameters are spread, cut or not.
        made: by the id of each parameter that the adaptor has cut, what it has made of it.
        copies: the axes along which it takes all parameters of the module to be the same.
    """
    for owner in module.modules() if made else ():
        cuts = {name: (made[id(p)], *cuts_of(owner).get(name, ()))
                for name, p in own_parameters(owner).items() if id(p) in made}  # fmt: skip
        if cuts:
            vars(owner)[_CUTS] = {**cuts_of(owner), **cuts}
    kept = vars(module)
    if mesh not in kept.get(_MESHES, ()):
        kept[_MESHES] = (*kept.get(_MESHES, ()), mesh)
    if copies:
        kept[_COPIES] = mesh, copies
    _known.setdefault(module, None)
    if "_parameters" in vars(module):  # else it is a copy, in the making
        take_in(module, module.parameters())
    watch_total_norms(_refuse_norm)


def know_as(modules: Iterable[nn.Module], name: Callable[[str], str], maker: str, along: Collection[AxisName]) -> None:
    """What ``maker`` has made of the parameters of parts along any of these axes is made by a call for a module around
    them, in which each has the ``name`` of the one that it had.
    """
    for owner in {each: None for module in modules for each in module.modules()}:
        for key, made in cuts_of(owner).items():
            vars(owner)[_CUTS][key] = tuple(
                part._replace(name=name(part.name)) if part.maker == maker and part.axis in along else part
                for part in made
            )


def know_shared(p: Tensor, ranks: int) -> None:
    """So many ranks have this parameter, each in a module of its own: a part that is the same on all of them."""
    setattr(p, _SHARED, ranks)


def ranks_with(p: Tensor) -> int:
    """How many ranks were said to have this parameter in modules of their own."""
    return int(getattr(p, _SHARED, 1))


def cuts_of(owner: nn.Module) -> Mapping[str, Sequence[Part]]:
    """What was made of the parameters of this one module, by their names, the latest first."""
    found: Mapping[str, Sequence[Part]] = vars(owner).get(_CUTS, {})
    return found


def known_around(module: nn.Module) -> list[nn.Module]:
    """The modules that adaptors have spread of which this one is a part, or which it is."""
    return [each for each in all_known() if any(part is module for part in each.modules())]


def is_spread(module: nn.Module) -> bool:
    """Whether an adaptor was given just this module."""
    return _MESHES in vars(module)


def all_known() -> list[nn.Module]:
    """The modules that adaptors have spread, of all ranks in this process; not a copy that was never finished."""
    return [module for module in list(_known) if "_modules" in vars(module)]


def came_later(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module which adaptors have spread had not then (a copy: when first asked), by name."""
    if _known[module] is None:
        take_in(module, module.parameters())
    had = _known[module] or ()
    return {name: p for name, p in module.named_parameters() if id(p) not in had}


def take_in(module: nn.Module, params: Iterable[Tensor]) -> None:
    """These are its own from now on, as those that it had when it was spread."""
    _known[module] = (_known[module] or set()) | {id(p) for p in params}


def axes_of_module(module: nn.Module) -> list[Axis]:
    """Along which a module is spread: its parameters cut, or the same on all ranks."""
    mesh, same = vars(module).get(_COPIES, (None, ()))
    at = [(mesh, same)] if mesh is not None else []
    at += [(part.mesh, part.axis) for parts in parts_of(module).values() for part in parts]
    found = {(id(mesh), axis): mesh.axis(axis) for mesh, axis in at}
    return sorted(found.values(), key=lambda axis: str(axis.name))


def named_by(pattern: str, path: str) -> bool:
    """Whether it names the parameter or a module that holds it."""
    while path:
        if fnmatchcase(path, pattern):
            return True
        path = path.rpartition(".")[0]
    return False


def checked_module(where: str, module: object) -> None:
    """It is a module."""
    if not isinstance(module, nn.Module):
        fail(where, f"module is not a torch.nn.Module but {type(module).__name__}.", fix="pass a module")


def widest_mesh(module: nn.Module) -> Mesh | None:
    """The largest of the current mesh and those over which adaptors have spread the module or parts of it, if any."""
    known = [current_mesh()]
    for part in module.modules():
        known += vars(part).get(_MESHES, ())
        known += [made.mesh for cuts in cuts_of(part).values() for made in cuts]
    return max(filter(None, known), key=lambda mesh: mesh.size, default=None)


def parts_of(module: nn.Module) -> dict[int, list[Part]]:
    """By the id of each parameter that is cut, what was made of it: slices, which come last, first. Asks no mesh who
    this rank is.
    """
    found: dict[int, list[Part]] = {}
    for owner in module.modules():
        for name, parts in cuts_of(owner).items():
            p = dict.get(own_parameters(owner), name)  # behind a table that shows what was gathered
            made = found.setdefault(id(p), [])
            made += [part for part in parts if not any((part.axis, part.how) == (x.axis, x.how) for x in made)]
    for made in found.values():
        made.sort(key=lambda part: isinstance(part.how, Dim))
    return found


def parts_among(params: Iterable[Tensor]) -> dict[int, list[Part]]:
    """By the id of each of these that is cut, of whatever module, what was made of it."""
    wanted = {id(p) for p in params}
    return {key: parts for module in all_known() for key, parts in parts_of(module).items() if key in wanted}


def meshes_among(params: Iterable[Tensor]) -> list[Mesh]:
    """Over which the modules are spread that have any of these."""
    wanted = {id(p) for p in params}
    spread = [module for module in all_known() if any(id(p) in wanted for p in module.parameters())]
    return [mesh for module in spread for mesh in vars(module).get(_MESHES, ())]


def axes_among(params: Iterable[Tensor]) -> list[Axis]:
    """Along which the modules are spread that have any of these: their parameters cut, or the same on all ranks."""
    wanted = {id(p) for p in params}
    spread = [module for module in all_known() if any(id(p) in wanted for p in module.parameters())]
    found = {(id(axis.mesh), axis.name): axis for module in spread for axis in axes_of_module(module)}
    return sorted(found.values(), key=lambda axis: str(axis.name))


def refuse_copies(where: str, module: nn.Module, fix: str, axis: Axis | None = None) -> None:
    """MeshError for a module that is part of one whose parameters are taken to be the same along ``axis``, or any."""
    for each in known_around(module):
        mesh, same = vars(each).get(_COPIES, (None, ()))
        if mesh is not None and (axis is None or _meet(axis, mesh.axis(same))):
            what = "the module is" if each is module else "the module is part of one that is"
            what = f"{what} data parallel: its parameters are to be the same along axis {same!r}."
            fail(where, what, fix=fix)


def _meet(axis: Axis, other: Axis) -> bool:
    """Whether another rank is along both."""
    return len({*axis.own_ranks} & {*other.own_ranks}) > 1


def cut_along(module: nn.Module, axis: Axis) -> set[int]:
    """The ids of those of which ranks along ``axis`` have other parts."""
    return {key for key, parts in parts_of(module).items() if any(_meet(axis, p.mesh.axis(p.axis)) for p in parts)}


def refuse_overlap(where: str, module: nn.Module, axis: Axis, among: Container[int] | None = None) -> None:
    """MeshError for a parameter of which ranks along ``axis``, who shall have the same, have other parts.

    ``among``: the ids of those that are looked at; all by default.
    """
    for key, parts in parts_of(module).items():
        for part in parts if among is None or key in among else ():
            if part.size > 1 and _meet(axis, part.mesh.axis(part.axis)):
                what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}"
                fix = f"axes={{{part.name!r}: ...}}, the others; each axis cuts a parameter once, or has the same of it"
                fail(where, f"{what}, and would be taken to be the same along axis {axis.name!r}.", fix=fix)


def refuse_cut_elsewhere(where: str, module: nn.Module) -> None:
    """MeshError for a parameter that was cut as one of another module, which has it too."""
    own = parts_of(module)
    cut = {id(p): name for name, p in module.named_parameters() if id(p) not in own and told_to_vary(p)}
    inside = set(module.modules()) if cut else ()
    for owner in (each for other in (all_known() if cut else ()) for each in other.modules() if each not in inside):
        params = own_parameters(owner)
        for key, parts in cuts_of(owner).items():
            name = cut.get(id(params.get(key)))
            if name is not None:
                what = f"{name!r} has been cut by {parts[0].maker} as {parts[0].name!r} of a module that has it too."
                fix = "one call for all that share it; of stages, which tie it by name, a copy.deepcopy of each"
                fail(where, what, fix=fix)


def axes_of_parts(p: Tensor, parts: Iterable[Part], mesh: Mesh) -> tuple[set[str], int]:
    """The axes of ``mesh`` along which ranks have other parts of a parameter, or were said to have other ones (stages
    of a pipeline, what was cut by hand); and in how many parts it is cut along axes of other meshes.
    """
    cut, elsewhere = set(written_out(declared(p), mesh.names)), 1
    for part in parts:
        if (part.mesh.shape, part.mesh.ranks) == (mesh.shape, mesh.ranks):
            cut |= set(axes_in(part.axis))
        else:
            elsewhere *= part.size
    return cut, elsewhere


def places_of(module: nn.Module) -> dict[int, Place]:
    """By the id of each parameter that is cut, where what is here lies in the global tensor."""
    parts, params = parts_of(module), {id(p): p for p in module.parameters()}
    return {key: place_of(p, parts[key]) for key, p in params.items() if key in parts}


def place_of(p: Tensor, parts: Sequence[Part], elements: tuple[int, int] | None = None) -> Place:
    """Where what is left of a parameter lies, or these elements of that.

    ``parts``: all that was made of it, slices first.
    """
    place = Place(p.shape) if elements is None else Place(p.shape, *elements, cut=True)
    for part in parts:
        how = part.how
        if isinstance(how, Flat):
            first, last = (0, how.stop - how.start) if elements is None else elements
            place = Place(how.shape, how.start + first, how.start + last, cut=True)
        else:
            place.cut(how.dim, how.lengths, part.size, part.at)
    return place


def _refuse_norm(gradients: list[Tensor]) -> None:
    """Torch's norm of gradients of which other ranks have the rest is no norm of theirs."""
    given = {id(g) for g in gradients}
    for module in all_known():
        parts = parts_of(module)
        for p in module.parameters():
            if not p.is_leaf:  # another rank's, of this process, is in the middle of its forward
                continue
            for part in parts.get(id(p), ()) if p.grad is not None and id(p.grad) in given else ():
                if part.size > 1:
                    what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}: each rank would take the"
                    fix = "parallel.clip_grad_norm(module, max_norm), on every rank"
                    fail("torch.nn.utils.clip_grad_norm_", f"{what} norm of what it has.", fix=fix)
