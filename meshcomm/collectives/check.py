"""What can be wrong with the arguments of a collective, said before anything is communicated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.errors import MeshError, fail, is_held, names, raise_alone, shape_text, text
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.runtime.ops import talks
from meshcomm.runtime.transports.exact import MOST_RANKS

Scanned = Literal["sum", "max", "min", "product", "band", "bor", "bxor"]
"""The reduce ops that have partial results."""
Reduced = Literal["sum", "mean", "max", "min", "product", "band", "bor", "bxor"]
"""All reduce ops."""

_STRIDED = torch.strided
_INTS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_DTYPES = {
    "sum": (*_INTS, *_FLOATS, *_COMPLEX),
    "mean": (*_FLOATS, *_COMPLEX),
    "max": (*_INTS, *_FLOATS, torch.bool),
    "min": (*_INTS, *_FLOATS, torch.bool),
    "product": (*_INTS, *_FLOATS, *_COMPLEX),
    "band": (*_INTS, torch.bool),
    "bor": (*_INTS, torch.bool),
    "bxor": (*_INTS, torch.bool),
}
SUMMED = frozenset(_DTYPES["sum"])
_ALLOWED = frozenset((op, dtype) for op, dtypes in _DTYPES.items() for dtype in dtypes)


def explain(where: str, what: str, axis: Axis, *, x: Tensor | None = None, got: str = "", fix: str = "") -> NoReturn:
    """Fail with the tensor, the mesh and this rank's place on it."""
    parts = [got] if got else []
    if x is not None:
        parts.append(f"x {shape_text(x.dtype, x.shape)}")
    at = ", ".join(f"{name}={place}" for name, place in axis.coordinate.items())
    parts += [f"mesh {axis.mesh.shape}", f"at {at}"]
    message = text(where, what, got="; ".join(parts), fix=fix)
    if talks(where) and not (torch.compiler.is_compiling() or is_held()):
        axis.link.refuse(where, message.split("\n", 1)[0], axis)
    raise_alone(MeshError(message))


def mesh_of(where: str, name: AxisName, mesh: Mesh | None) -> Mesh:
    """``mesh``, or the current mesh."""
    if mesh is None:
        mesh = current_mesh()
        if mesh is None:
            fail(
                where,
                "there is no mesh.",
                got=f"axis {name!r}" if name else "",
                fix="pass mesh=, or call inside `with mc.use_mesh(mesh):`",
            )
    elif not isinstance(mesh, Mesh):
        fail(
            where,
            f"mesh= is a {type(mesh).__name__}.",
            fix="pass a mesh made by mc.make_mesh or mc.Mesh.from_device_mesh",
        )
    return mesh


def axis_of(where: str, name: AxisName, mesh: Mesh | None) -> Axis:
    """The axis called ``name`` of ``mesh`` or of the current mesh."""
    return (mesh if type(mesh) is Mesh else mesh_of(where, name, mesh)).axis(name, where)


def tensor(where: str, x: Tensor, axis: Axis, name: str = "x") -> None:
    """``x`` is a dense tensor on a device that this mesh moves."""
    kind = type(x)
    if kind is not Tensor and kind is not Parameter:
        _odd_tensor(where, x, axis, name)
    if x.layout is not _STRIDED or x.is_nested or x.is_quantized:
        form = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
        fix = {"nested": "torch.nested.to_padded_tensor", "quantized": ".dequantize()"}.get(str(form), ".to_dense()")
        explain(where, f"{name} is a {form} tensor.", axis, fix=f"make it dense first: {fix}")
    if not (axis.moves_cpu and x.is_cpu) and x.device not in axis.devices:
        why = axis.link.check_device(x.device, axis.mesh.strict)
        if why is not None:
            explain(
                where,
                f"{name} is on the wrong device, {x.device}.",
                axis,
                x=x,
                fix=f"{why}; move it to {axis.mesh.device}",
            )
        if x.is_cpu:
            axis.moves_cpu = True
        else:
            axis.devices = *axis.devices, x.device


def _odd_tensor(where: str, x: object, axis: Axis, name: str) -> None:
    if not isinstance(x, Tensor):
        explain(where, f"{name} is not a tensor but {type(x).__name__}.", axis, fix=_made_of(x))
    if (
        type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not torch.compiler.is_compiling()
        and not _torch.is_without_memory(x)
    ):
        fix = "pass .to_local()" if hasattr(x, "to_local") else "pass a plain tensor"
        explain(where, f"{name} is a {type(x).__name__}, whose data is not one dense tensor.", axis, fix=fix)


def _made_of(x: object) -> str:
    """How what is no tensor becomes one, in the words for what it is."""
    if isinstance(x, Iterator):
        return "list(...) of it, a pytree"
    if hasattr(x, "__array__"):
        return "torch.as_tensor(...) of it"
    if hasattr(x, "parameters"):
        return "list(module.parameters()), or its state_dict()"
    return "wait for it first" if hasattr(x, "wait") else "pass a tensor or a pytree of tensors"


def differentiable(x: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def reducible(where: str, x: Tensor, op: str, axis: Axis) -> None:
    """``op`` exists and can reduce the dtype of ``x``."""
    try:
        if (op, x.dtype) in _ALLOWED:
            return
    except TypeError:
        pass
    if not isinstance(op, str) or op not in _DTYPES:
        explain(where, f"no reduce op {op!r}.", axis, x=x, fix=f"one of {names(_DTYPES)}")
    explain(where, f"op {op!r} is not defined for {x.dtype}.", axis, x=x, fix=_cast(op, x.dtype))


def exact(where: str, x: Tensor, op: str, axis: Axis) -> None:
    """A sum or mean of floats, of no more ranks than there is room for."""
    if op not in ("sum", "mean"):
        explain(
            where, f"exact=True with op {op!r}.", axis, x=x, fix='op="sum" or op="mean"; leave exact= out otherwise'
        )
    if x.dtype not in _FLOATS:
        fix = "torch.view_as_real(x)" if x.dtype.is_complex else "leave exact= out: integers always add exactly"
        explain(where, f"exact=True is for floats, and x is {x.dtype}.", axis, x=x, fix=fix)
    if axis.size > MOST_RANKS:
        explain(where, "exact=True over too many ranks.", axis, x=x, fix=f"at most {MOST_RANKS} of them")


def _cast(op: str, dtype: torch.dtype) -> str:
    if op in ("band", "bor", "bxor"):
        return "bitwise ops take integers and bool"
    if dtype == torch.bool:
        return "cast with x.int(), or use op='max' (any) or 'min' (all)"
    if dtype.is_complex:
        return "complex numbers have no order: reduce x.abs() or torch.view_as_real(x)"
    return "cast with x.float() first"


def whole_number(value: object) -> bool:
    """An int, one of numpy's too, and not a bool."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, Integral)


def checked_dim(where: str, x: Tensor, dim: int, axis: Axis, name: str = "dim") -> int:
    """``dim`` counted from the front."""
    if isinstance(dim, int) and dim is not True and dim is not False and 0 <= dim < x.ndim:
        return dim + 0  # as an int: dynamo cannot trace type(), or __class__, of what it was told is constant
    if not whole_number(dim) or not -x.ndim <= dim < x.ndim:
        fix = f"an int from {-x.ndim} to {x.ndim - 1}" if x.ndim else "x has none: x.reshape(1)"
        explain(where, f"{name}={dim!r} is not a dim of x.", axis, x=x, fix=fix)
    return int(dim) % x.ndim


def checked_index(where: str, value: int, axis: Axis, name: str) -> int:
    """An index along the axis."""
    if isinstance(value, int) and value is not True and value is not False and 0 <= value < axis.size:
        return value + 0
    if not whole_number(value) or not 0 <= value < axis.size:
        explain(
            where,
            f"{name}={value!r} is not an index along axis {axis.name!r} (size {axis.size}).",
            axis,
            fix=f"an int from 0 to {axis.size - 1}; it is an index along the axis, not a global rank",
        )
    return int(value)


def even(where: str, x: Tensor, dim: int, axis: Axis, extra: str) -> None:
    """The axis divides the dim."""
    length = x.shape[dim]
    if length % axis.size:
        explain(
            where,
            f"x.shape[{dim}] = {length} is not divisible by axis {axis.name!r} (size {axis.size}).",
            axis,
            x=x,
            fix=f"pad dim {dim} to {-(-length // axis.size) * axis.size}{extra}",
        )


def slices(
    where: str,
    x: Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    axis: Axis,
    name: str = "dim",
    extra: str = ", or pass sizes=",
) -> int:
    """``dim`` of x, counted from the front, can be cut into the ranks' slices."""
    known = isinstance(dim, int) and dim is not True and dim is not False and 0 <= dim < x.ndim
    if known and sizes is None and not x.shape[dim] % axis.size:
        return dim + 0
    place = checked_dim(where, x, dim, axis, name)
    if sizes is not None:
        total(where, x, place, sizes, axis)
    else:
        even(where, x, place, axis, extra)
    return place


def checked_sizes(where: str, sizes: Sequence[int] | None, axis: Axis, name: str = "sizes") -> tuple[int, ...] | None:
    """One length per index of the axis."""
    if sizes is None:
        return None
    if not are_lengths(sizes) or sum(map(int, sizes)) >= 2**63:
        fix = "one non-negative int per index of the axis, below 2**63 in all"
        fix += "; sizes.tolist()" if hasattr(sizes, "tolist") else ""
        explain(where, f"{name}={sizes!r} is not a list of lengths.", axis, fix=fix)
    if len(sizes) != axis.size:
        explain(
            where,
            f"{name} has {len(sizes)} lengths, axis {axis.name!r} has size {axis.size}.",
            axis,
            got=f"{name}={sizes!r}",
            fix="one length per index of the axis, the same list on every rank",
        )
    return tuple(map(int, sizes))


def are_lengths(shape: object) -> TypeGuard[Sequence[int]]:
    """A sequence of non-negative ints, which neither a string nor bytes are."""
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes, bytearray)):
        return False
    return all(whole_number(length) and length >= 0 for length in shape)


def total(where: str, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis, name: str = "sizes") -> None:
    """The lengths sum to the dim."""
    if sum(sizes) != x.shape[dim]:
        explain(
            where,
            f"{name} sum to {sum(sizes)}, x.shape[{dim}] is {x.shape[dim]}.",
            axis,
            x=x,
            got=f"{name}={tuple(sizes)}",
            fix=f"lengths that sum to {x.shape[dim]}",
        )


def own(where: str, x: Tensor, dim: int, sizes: Sequence[int], axis: Axis, name: str = "sizes") -> None:
    """This rank's length is that of the dim."""
    if axis.own_of(sizes) != x.shape[dim]:
        explain(
            where,
            f"{name}[{axis.index}] = {sizes[axis.index]}, but x.shape[{dim}] = {x.shape[dim]} on that index.",
            axis,
            x=x,
            got=f"{name}={tuple(sizes)}",
            fix="the length of the dim on each index, the same list on every rank",
        )


def checked_perm(where: str, perm: Iterable[tuple[int, int]], axis: Axis) -> tuple[tuple[int, int], ...]:
    """Pairs of indices along the axis, with no source and no destination twice, in one order on all ranks."""
    if not isinstance(perm, (list, tuple)) or torch.compiler.is_compiling():
        return _looked_at(where, perm, axis)
    try:  # True is 1 to a dict
        key = axis.size, *perm, *map(type, itertools.chain.from_iterable(perm))
        if (known := _perms.get(key)) is not None:
            return known
    except TypeError:
        return _looked_at(where, perm, axis)
    if len(_perms) >= _MOST_PERMS:
        _perms.clear()
    _perms[key] = _looked_at(where, perm, axis)
    return _perms[key]


_MOST_PERMS = 100
_perms: dict[Any, tuple[tuple[int, int], ...]] = {}


def _looked_at(where: str, perm: Iterable[tuple[int, int]], axis: Axis) -> tuple[tuple[int, int], ...]:
    fix = "perm is a list of (source, destination) indices along the axis"
    fix += ": list(perm.items())" if isinstance(perm, Mapping) else ""
    try:  # of pairs without end the first that are too many tell enough
        given = () if isinstance(perm, Mapping) else itertools.islice(perm, axis.size + 1)
        pairs: list[Any] = [()] if isinstance(perm, Mapping) else [tuple(pair) for pair in given]
    except TypeError:
        pairs = [()]
    for pair in pairs:
        if len(pair) != 2 or not all(whole_number(index) for index in pair):
            explain(where, f"perm={perm!r} is not made of pairs of ints.", axis, fix=fix)
        if not all(0 <= index < axis.size for index in pair):
            explain(
                where, f"perm pair {pair} is out of range for axis {axis.name!r} (size {axis.size}).", axis, fix=fix
            )
    for place, name in enumerate(("source", "destination")):
        column = [pair[place] for pair in pairs]
        twice = next((index for index, count in Counter(column).items() if count > 1), None)
        if twice is not None:
            explain(
                where, f"{name} {twice} stands twice in perm.", axis, got=f"perm={pairs}", fix=f"name each {name} once"
            )
    return tuple(sorted((int(source), int(destination)) for source, destination in pairs))


def apart(where: str, axis: Axis, other: AxisName, name: str) -> None:
    """Two axes have no part in common; said before there are links along the other one."""
    both = [part for part in axes_in(axis.name) if part in axis.mesh.axes_of(other, where)]
    if both:
        what = f"axis {axis.name!r} and {name} {other!r} have {names(both)} in common."
        explain(where, what, axis, fix="each axis of the mesh in one of them")


def no_gradient(where: str, x: Tensor, axis: Axis, instead: str) -> None:
    """Refuse an input whose derivative is asked for, or that is batched, where some rank has no graph: its peers would
    wait in backward.
    """
    why = "requires grad, and this function has no backward" if x.requires_grad and torch.is_grad_enabled() else ""
    if not why and (_torch.functorch_active() or _torch.dual_level_open()):
        why = _wanted_by_transforms(x)
    if why:
        fix = instead if "batched" in why else f"{instead}; or pass x.detach()"
        explain(where, f"x {why}.", axis, x=x, fix=fix)


def _wanted_by_transforms(x: Tensor) -> str:
    layer = x
    while (inner := _torch.unwrapped(layer)) is not None:
        if inner.shape != layer.shape:
            return "is batched by torch.func.vmap, and this function has no rule for that"
        if inner.requires_grad and torch.is_grad_enabled():
            return "requires grad, and this function has no backward"
        layer = inner
    return "has a tangent, and this function has no forward mode" if _torch.has_tangent(x) else ""


def checked_size(where: str, bucket_mb: float, axis: Axis) -> None:
    """A bucket has a positive size."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        explain(where, f"bucket_mb={bucket_mb!r} is not a positive number.", axis, fix="a size in MiB such as 25")
