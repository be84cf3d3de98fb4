"""Python objects as bytes and back: tensors arrive on the receiver's device, and what cannot be pickled is named.

Pickle runs whatever code the bytes name: it is for peers that trust each other.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import reprlib
import struct
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm import _torch
from meshcomm.runtime.transports import dtypes

_SMALL = 1024
"""Bytes up to which a buffer stays in the stream."""
_ALIGN = 64


class UnpicklableError(Exception):
    """An object that cannot be pickled; the text says which part of it, and why."""


def byte_view(data: bytearray | memoryview) -> Tensor:
    """The same memory as a uint8 tensor."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8, device="cpu")


# ------------------------------------------------------------------------------------------------------------- packing


class _Pickler(pickle.Pickler):
    """Puts the values of tensors and large buffers beside the stream, each once."""

    def __init__(self, file: Any, grad: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_buffer)
        self._grad = grad
        self.tensors: list[Tensor] = []  # kept alive, so that an address means one tensor
        self.buffers: list[memoryview] = []
        self._places: dict[Any, int] = {}

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) <= _SMALL:
            return True  # into the stream
        self.buffers.append(raw)
        return False

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is pickled; everything else as it likes."""
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.UntypedStorage):
            whole = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return _storage_at, (self._place(whole), whole.shape, _is_elsewhere(whole))
        return NotImplemented

    def _reduce_tensor(self, x: Tensor) -> Any:
        kind = type(x)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            hint = ": pass .to_local()" if hasattr(x, "to_local") else ""
            raise pickle.PicklingError(f"its data is not one dense tensor{hint}")
        if x.grad_fn is not None and self._grad:
            raise pickle.PicklingError(
                "it is part of a graph of autograd, which stays behind: pass .detach(), or move it by a collective"
            )
        if x.layout is not torch.strided or x.is_nested or x.is_quantized:
            return NotImplemented  # torch makes it of dense parts
        if kind is not Parameter and kind.__reduce_ex__ is not Tensor.__reduce_ex__:
            return NotImplemented
        args = (
            self._place(x), tuple(x.shape), x.dtype, _is_elsewhere(x), None if kind is Tensor else kind,
            x.requires_grad and x.grad_fn is None,
        )  # fmt: skip
        return (_tensor_at, args, vars(x), None, None, _set_attributes) if vars(x) else (_tensor_at, args)

    def _place(self, x: Tensor) -> int:
        """Where its values will stand; equal views of one storage share them, as tied weights do."""
        key: Any = len(self.tensors)
        if x.device.type != "meta" and x.numel() and x.data_ptr():
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg())
        if key not in self._places:
            self._places[key] = len(self.tensors)
            self.tensors.append(x.detach())
        return self._places[key]


def _is_elsewhere(x: Tensor) -> str:
    return x.device.type if x.device.type in ("cpu", "meta") else "device"


def pack(obj: Any, root: str = "obj") -> bytearray:
    """The object as bytes.

    Raises:
        UnpicklableError: with the path from ``root`` to what cannot be pickled.
    """
    file, grad = io.BytesIO(), torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with _torch.outside_transforms(), torch.no_grad():
        pickler = _Pickler(file, grad)
        try:
            pickler.dump(obj)
        except Exception as error:
            raise UnpicklableError(_complaint(obj, root, error, grad)) from error
        return _laid_out(pickler, file)


def _laid_out(pickler: _Pickler, file: io.BytesIO) -> bytearray:
    """How many parts and how long they are, the stream, the parts."""
    parts = [bytes_of(x) for x in pickler.tensors] + [byte_view(raw) for raw in map(_writable, pickler.buffers)]
    lengths = [len(pickler.tensors), file.tell(), *(part.numel() for part in parts)]
    starts, total = _starts(lengths)
    data = bytearray(total)
    struct.pack_into(f"<{1 + len(lengths)}q", data, 0, len(lengths), *lengths)
    data[starts[0] : starts[0] + lengths[1]] = file.getbuffer()
    whole = byte_view(data)
    for start, part in zip(starts[1:], parts, strict=True):
        whole[start : start + part.numel()].copy_(part)
    return data


def _writable(raw: memoryview) -> bytearray | memoryview:
    return bytearray(raw) if raw.readonly else raw  # torch warns of memory that it could write to and must not


def bytes_of(x: Tensor) -> Tensor:
    """Its elements one after the other, on the CPU."""
    if x.device.type == "meta":
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = dtypes.plain(x.cpu()).reshape(-1)
    # Not is_contiguous(): whatever the stride, that holds for no elements, and a view as bytes does not.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _starts(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where the stream and each part begin, and the length of it all."""
    starts, at = [], 8 * (1 + len(lengths))
    for length in lengths[1:]:
        at = -(-at // _ALIGN) * _ALIGN
        starts.append(at)
        at += length
    return starts, at


# ----------------------------------------------------------------------------------------------------------- unpacking


class _Open:
    """A packed object that is being read."""

    def __init__(self, values: list[Tensor], device: torch.device) -> None:
        self._values = values
        self._device = device
        self._made: dict[int, Tensor] = {}

    def tensor(self, place: int, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> Tensor:
        """The values at this place on their device; all who share the place share the storage."""
        if place not in self._made:
            # A copy in any case: of the whole message only what is used shall stay in memory.
            values = self._values[place].clone().view(dtype).view(shape)
            self._made[place] = values.to(self._device) if where == "device" else values
        return self._made[place].detach()


class _Local(threading.local):
    def __init__(self) -> None:
        self.open: list[_Open] = []


_local = _Local()


def _tensor_at(
    place: int, shape: tuple[int, ...], dtype: torch.dtype, where: str, kind: type | None, requires_grad: bool
) -> Tensor:
    if where == "meta":
        x = torch.empty(shape, dtype=dtype, device="meta")
    else:
        x = _local.open[-1].tensor(place, dtype, shape, where)
    if kind is Parameter:
        return Parameter(x, requires_grad)
    if kind is not None:
        x = x.as_subclass(kind)
    return x.requires_grad_() if requires_grad else x


def _storage_at(place: int, shape: tuple[int, ...], where: str) -> torch.UntypedStorage:
    return _local.open[-1].tensor(place, torch.uint8, shape, where).untyped_storage()


def _set_attributes(x: Tensor, attributes: dict[str, Any]) -> None:
    vars(x).update(attributes)


def unpack(data: bytearray, device: torch.device) -> Any:
    """The object that :func:`pack` was given; what was on an accelerator is on ``device``, the rest on the CPU."""
    (count,) = struct.unpack_from("<q", data)
    lengths = struct.unpack_from(f"<{count}q", data, 8)
    starts, _ = _starts(lengths)
    view = memoryview(data)
    pieces = [view[start : start + length] for start, length in zip(starts, lengths[1:], strict=True)]
    tensors, buffers = pieces[1 : 1 + lengths[0]], pieces[1 + lengths[0] :]
    _local.open.append(_Open([byte_view(piece) for piece in tensors], device))
    try:
        return pickle.loads(pieces[0], buffers=[bytearray(buffer) for buffer in buffers])
    finally:
        _local.open.pop()


# ------------------------------------------------------------------------------------------------------- the complaint


def _trial(obj: Any, grad: bool) -> Exception | None:
    """Why the object cannot be pickled."""
    with open(os.devnull, "wb") as nowhere:
        try:
            _Pickler(nowhere, grad).dump(obj)
        except Exception as error:
            return error
    return None


def _complaint(obj: Any, path: str, error: Exception, grad: bool) -> str:
    """Which part is to blame: the deepest one that cannot be pickled by itself."""
    seen: dict[int, Any] = {id(obj): obj}
    while True:
        for step, child in _children(obj):
            if id(child) in seen:
                continue
            seen[id(child)] = child
            wrong = _trial(child, grad)
            if wrong is not None:
                obj, path, error = child, path + step, wrong
                break
        else:
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            return f"{path} is {_described(obj)}, which cannot be pickled: {reason}"


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that are pickled with it, each with the step of the path that leads to it."""
    if isinstance(obj, dict):
        yield from ((f".keys({_short(key)})", key) for key in obj)
        yield from ((f"[{_short(key)}]", value) for key, value in obj.items())
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(obj._fields, obj, strict=False))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((f"{{{_short(value)}}}", value) for value in obj)
    elif isinstance(obj, functools.partial):
        yield from ((f".{name}", getattr(obj, name)) for name in ("func", "args", "keywords"))
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, Tensor):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    elif not isinstance(obj, (type, types.FunctionType, types.ModuleType)):
        yield from _reduced(obj)


def _reduced(obj: Any) -> Iterator[tuple[str, Any]]:
    try:
        found = obj.__reduce_ex__(5)
    except Exception:
        return
    if not isinstance(found, tuple):
        return
    parts: tuple[Any, ...] = (*found, None, None, None, None)
    _, args, state, items, pairs, *_ = parts
    for i, arg in enumerate(args or ()):
        yield (f".__class__ ({arg.__qualname__})" if isinstance(arg, type) else f".__reduce__()[{i}]"), arg
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((f".{name}", value) for name, value in part.items())
        elif part is not None:
            yield ".__getstate__()", part
    yield from ((f"[{i}]", value) for i, value in enumerate(items or ()))
    yield from ((f"[{_short(key)}]", value) for key, value in pairs or ())


def _short(key: object) -> str:
    return reprlib.repr(key)


def _described(obj: Any) -> str:
    if isinstance(obj, types.FunctionType):
        what = "a lambda" if obj.__name__ == "<lambda>" else f"the function {obj.__qualname__}"
        return f"{what} of {obj.__code__.co_filename.rsplit('/', 1)[-1]}:{obj.__code__.co_firstlineno}"
    if isinstance(obj, type):
        return f"the class {obj.__qualname__}"
    name = type(obj).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
