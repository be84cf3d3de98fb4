"""How the parameters of a module are cut: the one place that knows, whichever adaptors have cut them.

An adaptor leaves with its module a function that tells its parts; whoever asks needs to know of no adaptor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshcomm._torch import watch_total_norms
from meshcomm.errors import fail
from meshcomm.mesh import Axis, AxisName, Mesh, current_mesh
from meshcomm.parallel.global_places import Place

__all__ = [
    "Dim", "Flat", "Part", "checked_module", "know", "parts_inside", "parts_of", "place_of", "places_of",
    "refuse_copies", "refuse_overlap", "widest_mesh",
]  # fmt: skip


class Dim(NamedTuple):
    """Cut along a dim: of which each of these lengths is divided over the axis."""

    dim: int
    lengths: tuple[int, ...]


class Flat(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened ``shape``."""

    shape: torch.Size
    start: int
    stop: int


class Part(NamedTuple):
    """What an adaptor has made of a parameter on this rank."""

    param: nn.Parameter
    name: str
    """In the module that the adaptor was given."""
    maker: str
    mesh: Mesh
    axis: AxisName
    at: int
    """The index along the axis of the rank that has it."""
    how: Dim | Flat


Teller = Callable[[nn.Module], tuple[Mesh, Iterable[Part]] | None]
"""Tells over which mesh an adaptor has spread a module, and what it has cut; None of one that is not its own any more,
such as one whose attributes are being taken apart.
"""

_NAME, _COPIES = "_meshcomm_cuts", "_meshcomm_copies"
_known: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def know(module: nn.Module, teller: Teller, copies: AxisName = ()) -> None:
    """From now on ``teller`` speaks for ``module``; for a copy of it too, once this was called for the copy.

    ``copies``: the axes along which the adaptor takes all parameters of the module to be the same.
    """
    kept = vars(module)
    if copies:
        kept[_COPIES] = copies
    if teller not in kept.get(_NAME, ()):
        kept[_NAME] = (*kept.get(_NAME, ()), teller)
    _known.add(module)
    watch_total_norms(_refuse_norm)


def _told(part: nn.Module) -> Iterator[tuple[Mesh, Iterable[Part]]]:
    for teller in vars(part).get(_NAME, ()):
        if (told := teller(part)) is not None:
            yield told


def _parts(modules: Iterable[nn.Module]) -> Iterator[Part]:
    """What was made of their parameters."""
    return (part for module in modules for _, parts in _told(module) for part in parts)


def checked_module(where: str, module: object) -> None:
    """It is a module."""
    if not isinstance(module, nn.Module):
        fail(where, f"module is not a torch.nn.Module but {type(module).__name__}.", fix="pass a module")


def widest_mesh(module: nn.Module) -> Mesh | None:
    """The largest of the current mesh and those over which adaptors have spread the module or parts of it, if any."""
    known = [current_mesh(), *(mesh for part in module.modules() for mesh, _ in _told(part))]
    return max(filter(None, known), key=lambda mesh: mesh.size, default=None)


def parts_of(where: str, module: nn.Module) -> dict[int, list[Part]]:
    """By the id of each parameter that is cut, what was made of it: slices, which come last, first.

    Raises MeshError for a part of a module that was cut as a whole, for only the whole knows.
    """
    found = parts_inside(module)
    _refuse_inner(where, module, {id(each) for each in module.modules()}, found)
    return found


def parts_inside(module: nn.Module) -> dict[int, list[Part]]:
    """The same of what the module and its parts know themselves; asks no mesh who this rank is."""
    found: dict[int, list[Part]] = {}
    for part in _parts(module.modules()):
        made = found.setdefault(id(part.param), [])
        if not any((part.axis, part.how) == (other.axis, other.how) for other in made):
            made.append(part)
    for made in found.values():
        made.sort(key=lambda part: isinstance(part.how, Dim))
    return found


def refuse_copies(where: str, module: nn.Module, fix: str, axis: Axis | None = None) -> None:
    """MeshError for a module that is part of one whose parameters are taken to be the same along ``axis``, or any."""
    for each in list(_known):
        same = vars(each).get(_COPIES)
        if same and any(part is module for part in each.modules()):
            for mesh, _ in _told(each):
                if axis is None or len({*axis.ranks} & {*mesh.axis(same).ranks}) > 1:
                    what = "the module is" if each is module else "the module is part of one that is"
                    what = f"{what} data parallel: its parameters are to be the same along axis {same!r}."
                    fail(where, what, fix=fix)


def refuse_overlap(where: str, module: nn.Module, axis: Axis, among: Container[int] | None = None) -> None:
    """MeshError for a parameter of which ranks along ``axis``, who shall have the same, have other parts.

    ``among``: the ids of those that are looked at; all by default.
    """
    for key, parts in parts_inside(module).items():
        for part in parts if among is None or key in among else ():
            if len({*axis.ranks} & {*part.mesh.axis(part.axis).ranks}) > 1:
                what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}"
                fix = "other axes; each axis cuts a parameter once, or has the same of it on all ranks"
                fail(where, f"{what}, and would be taken to be the same along axis {axis.name!r}.", fix=fix)


def places_of(where: str, module: nn.Module) -> dict[int, Place]:
    """By the id of each parameter that is cut, where what is here lies in the global tensor."""
    return {key: place_of(parts) for key, parts in parts_of(where, module).items()}


def place_of(parts: Sequence[Part]) -> Place:
    """Where what is left of a parameter lies; ``parts``: all that was made of it, slices first."""
    place = Place(parts[0].param.shape)
    for part in parts:
        how = part.how
        if isinstance(how, Flat):
            place = Place(how.shape, how.start, how.stop, cut=True)
        else:
            place.cut(how.dim, how.lengths, part.mesh.size_of(part.axis), part.at)
    return place


def _refuse_inner(where: str, module: nn.Module, inside: set[int], found: dict[int, list[Part]]) -> None:
    """What was cut with a module around this one does not know how."""
    outer = [each for each in list(_known) if id(each) not in inside]
    names = {id(p): name for name, p in module.named_parameters() if id(p) not in found} if outer else {}
    for part in _parts(outer):
        if id(part.param) in names:
            what = f"{names[id(part.param)]!r} is a part that {part.maker} has made of a module around this one."
            fail(where, what, fix=f"pass the module that {part.maker} was given, or one around it")


def _refuse_norm(gradients: list[Tensor]) -> None:
    """Torch's norm of gradients of which other ranks have the rest is no norm of theirs."""
    given = {id(g) for g in gradients}
    for part in _parts(list(_known)):
        if part.param.grad is not None and id(part.param.grad) in given and part.mesh.size_of(part.axis) > 1:
            what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}: each rank would take the norm"
            fix = "parallel.clip_grad_norm(module, max_norm), on every rank"
            fail("torch.nn.utils.clip_grad_norm_", f"{what} of what it has.", fix=fix)
