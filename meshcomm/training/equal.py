"""What a program can ask of its values: along which axes they vary by type, and whether they are equal indeed."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

from meshcomm._torch import (
    is_without_memory,
    outside_transforms,
    tree_leaves_with_path,
    unwrapped,
    without_modes,
)
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.errors import CommError, VaryingError, fail, few, names, shape_text, text
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.objects.pickles import bytes_of
from meshcomm.runtime.axis_names import written_out
from meshcomm.runtime.ops import Op
from meshcomm.spmd.types.check_vma import checked_axes
from meshcomm.spmd.types.grids import grid_of
from meshcomm.spmd.types.rules.operands import text_of
from meshcomm.spmd.types.vma import Type, behind, marked
from meshcomm.watch import here, paused

_MARK = "mc.mark_varying(x, axes) says along which axes it varies, () for none; or make it where mc.check_vma sees it"
_SHOWN = 5
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


# ------------------------------------------------------------------------------------------------------------- types


def varying_axes(x: Tensor) -> frozenset[str]:
    """The axes along which ``x`` varies, as :func:`check_vma` has it; nothing is communicated.

    Type: that of ``x``, inside of a check and afterwards: what an operation gave it, or :func:`mark_varying`.

    Args:
        x: a tensor.

    Returns: the names of the axes of the checked mesh, or outside of a check of the current one; those along which
        each rank has its own. Along all others it is invariant.

    Cost: none.

    Raises:
        MeshError: not a tensor.
        VaryingError: its type is unknown: it was made where nobody looked, or cannot be said on this mesh.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> def axes():
        ...     x = mc.mark_varying(torch.ones(2), ("dp", "tp"))
        ...     with mc.use_mesh(mesh), mc.check_vma():
        ...         return sorted(mc.varying_axes(mc.all_reduce(x, "tp")))
        >>> mc.launch(axes, ranks=4)[0]
        ['dp']

    Source: ``jax.typeof(x).vma``.
    """
    return _type_of("varying_axes", x, "x").axes


def assert_varying(x: Any, axes: str | tuple[str, ...]) -> None:
    """Check that ``x`` varies along these axes and along no other, as :func:`check_vma` has it; nothing is
    communicated.

    Type: any; see :func:`varying_axes`.

    Args:
        x: a tensor, a pytree of them, or a module, whose parameters and buffers are meant.
        axes: a name, or a tuple of names; ``()`` for what is invariant along all.

    Cost: none.

    Raises:
        MeshError: no such axis; a leaf that is not a tensor.
        VaryingError: another type than that, with the path of the leaf and since when it varies; an unknown type.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     with mc.use_mesh(mesh), mc.check_vma():
        ...         x = torch.ones(2) * mc.axis_index("dp")
        ...         mc.assert_varying(x, "dp")
        ...         mc.assert_varying(mc.all_reduce(x, "dp"), ())
        >>> mc.launch(main, ranks=2)
        [None, None]
    """
    where = "assert_varying"
    wanted = frozenset(checked_axes(where, axes, current_mesh()))
    for path, leaf in _leaves(x):
        kind = _type_of(where, leaf, f"x{path}")
        if kind.axes != wanted:
            since = "; ".join(f"along {axis!r} since {kind.since[axis]}" for axis in sorted(kind.axes))
            ended = [f"along {axis!r} not since {kind.ended[axis]}" for axis in sorted(wanted & kind.ended.keys())]
            fail(
                where,
                f"x{path} varies along {names(sorted(kind.axes)) if kind.axes else 'no axis'}, and not along "
                f"{names(sorted(wanted)) if wanted else 'none'}.",
                got="; ".join([f"x{path} {text_of(leaf)}", *([since] if since else []), *ended]),
                kind=VaryingError,
            )


def _type_of(where: str, x: Any, label: str) -> Type:
    if not isinstance(x, Tensor):
        fail(where, f"{label} is no tensor but {type(x).__name__}.", fix="a tensor")
    with without_modes():
        kind = _noted(x)
    if kind is None:
        what = f"along which axes {label} varies is unknown."
        fail(where, what, got=f"{label} {text_of(x)}", fix=_MARK, kind=VaryingError)
    return kind


def _noted(x: Tensor) -> Type | None:
    ask: Callable[[Tensor], Type | None] | None = getattr(here.watcher, "type_of", None)
    if ask is not None:
        return ask(x)
    kind, other = marked(x), behind(x)
    if kind is None:
        return None if other is None else _noted(other)
    mesh = current_mesh()
    if mesh is not None and kind.grid is None:  # declared by names alone
        axes = frozenset(written_out(kind.axes, mesh.names))
        return kind if axes == kind.axes else kind.moved(grid_of(mesh), axes)
    if mesh is None or kind.grid is None or not kind.axes or kind.grid is grid_of(mesh):
        return kind
    found = kind.grid.moved(kind.axes, grid_of(mesh))
    return None if found is None else kind.moved(grid_of(mesh), found.axes)


def _leaves(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, Module):
        return [(f".{name}", leaf) for name, leaf in [*x.named_parameters(), *x.named_buffers()]]
    return tree_leaves_with_path(x)


# ------------------------------------------------------------------------------------------------------------ values


@Op("assert_invariant", "any", composed=True)
def assert_invariant(tree: Any, axes: AxisName, *, mesh: Mesh | None = None) -> None:
    """Check that all ranks of ``axes`` have the same values, bit for bit: that replicas have not drifted apart, and
    that no memory or link has changed them in silence.

    Type: any; what is compared are values and not types, in a :func:`check_vma` and outside.

    Args:
        tree: a tensor of any dtype, a pytree of tensors, numbers, strings and None, or a module, of which the
            ``state_dict`` is meant. NaN is equal to NaN.
        axes: a name, or a tuple of names.
        mesh: the current mesh by default.

    Cost: each rank reads all of its values once (those of an accelerator are copied to the host), and 24 bytes from
        each rank are gathered. Where these differ, a hash per leaf too.

    Raises:
        MeshError: no such axis; a leaf whose values cannot be compared, with its path.
        CommError: on every rank: they differ, with the paths of the leaves and the indices that differ from the most.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 3})
        >>> def main():
        ...     model = torch.nn.Linear(2, 1)
        ...     mc.all_reduce_params(model.parameters(), "dp", "mean", mesh=mesh)
        ...     mc.assert_invariant(model, "dp", mesh=mesh)
        >>> mc.launch(main, ranks=3)
        [None, None, None]
    """
    where = "assert_invariant"
    with paused(), torch.no_grad():
        ax = check.axis_of(where, axes, mesh)
        with outside_transforms():
            found = {path: _digest(where, leaf, path, ax) for path, leaf in _values(tree)}
        every = agree(_summary(found), ax)
        if all(row == every[0] for row in every):
            return
        _differ(where, all_gather_object(found, axes, mesh=mesh), ax)


def _values(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, Module):
        tree = tree.state_dict()
    return tree_leaves_with_path(tree)


def _digest(where: str, leaf: Any, path: str, axis: Axis) -> bytes:
    """Eight bytes that stand for the leaf."""
    if isinstance(leaf, Tensor):
        try:
            return _of_tensor(leaf)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            check.explain(where, f"tree{path} cannot be compared: {str(error).splitlines()[0]}", axis, x=leaf)
    if leaf is not None and not isinstance(leaf, _PLAIN):
        what = f"tree{path} cannot be compared: it is {type(leaf).__name__}."
        check.explain(where, what, axis, fix="a tensor, a number, a string, or leave it out")
    return _hash(repr(leaf).encode())


def _of_tensor(x: Tensor) -> bytes:
    while (inner := unwrapped(x)) is not None:
        x = inner
    kind = f"{shape_text(x.dtype, x.shape)} {x.layout}".encode()
    if x.is_meta:
        raise TypeError("a meta tensor has no values")
    if is_without_memory(x):  # in a dry run, whose other ranks say what this one says
        return _hash(kind)
    if x.layout is not torch.strided:
        x = x.detach().coalesce() if x.layout is torch.sparse_coo else x.detach()
        parts = [x.indices(), x.values()] if x.layout is torch.sparse_coo else [x.to_dense()]
        return _hash(kind + b"".join(_of_tensor(part) for part in parts))
    return _hash(kind, bytes_of(x.detach()).numpy())


def _hash(*parts: Any) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return made.digest()


def _summary(found: dict[str, bytes]) -> tuple[int, ...]:
    """How many leaves there are, and hashes of their paths and of their values: three numbers of 64 bits."""
    paths = sorted(found)  # the order of a dict is no value
    return len(found), *struct.unpack("<qq", _hash("\0".join(paths).encode()) + _hash(*(found[path] for path in paths)))


def _differ(where: str, every: Sequence[dict[str, bytes]], axis: Axis) -> NoReturn:
    paths = list(dict.fromkeys(path for each in every for path in each))
    wrong: list[str] = []
    for path in paths:
        groups: dict[bytes | None, list[int]] = {}
        for index, each in enumerate(every):
            groups.setdefault(each.get(path), []).append(index)
        if len(groups) > 1:
            most = Counter({digest: len(indices) for digest, indices in groups.items()}).most_common(2)
            rest = [i for digest, indices in groups.items() for i in indices if digest != most[0][0]]
            odd = _indices(sorted(rest)) if most[0][1] > most[1][1] else " and ".join(map(_indices, groups.values()))
            lacks = _indices(groups[None]) if None in groups else ""
            wrong.append(f"tree{path} ({odd}{f'; not there: {lacks}' if lacks else ''})")
    shown = ", ".join(wrong[:_SHOWN]) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
    message = text(
        where,
        f"{len(wrong)} of {len(paths)} leaves differ along {axis.name!r}.",
        got=f"{shown}; this is {axis}",
        fix="they should be equal: broadcast them, or look for what was written or reduced on some ranks only",
    )
    raise CommError(message)


def _indices(indices: Sequence[int]) -> str:
    return f"{'index' if len(indices) == 1 else 'indices'} {few(indices)}"
