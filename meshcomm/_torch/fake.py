"""The private names of torch behind tensors that have a shape, a dtype and a storage, and no memory: a part of
:mod:`meshcomm._torch`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm._versions import find, lack
from meshcomm.errors import fail

__all__ = [
    "UnknownSizeError",
    "gives_views",
    "handled_without_memory",
    "is_known_here",
    "is_without_memory",
    "kind_of",
    "memory_of",
    "named_arguments",
    "operation_name",
    "places_like",
    "without_memory",
    "written_by",
]

_MODE, _TENSOR = "torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor"
_fake_mode: Any = find(
    _MODE, "dry_run is refused, save_full_state_dict to a .pt file reserves address space for the whole"
)
_fake_tensor: Any = find(_TENSOR, "dry_run is refused")

UnknownSizeError: type[Exception] = find(
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "what dry_run says of sizes that depend on values is torch's own text",
    ZeroDivisionError,
)
"""How large a result is depends on values."""

_NOT_THERE = "if not mc.is_dry(): around it"
Handle = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


def without_memory() -> contextlib.AbstractContextManager[object]:
    """Tensors that are made inside have a shape, a dtype and a storage, and no memory."""
    mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext() if _fake_mode is None else _fake_mode()
    return mode


@contextlib.contextmanager
def handled_without_memory(handle: Handle, states: Callable[[Tensor], object] = lambda x: None) -> Iterator[None]:
    """The same, where ``handle(func, args, kwargs, go)`` gives the results of each operation of torch's: ``go()`` is
    what torch would give. What has memory may be an operand. ``data_ptr()`` is a number that tells tensors apart as an
    address would; that of a storage is a RuntimeError, and no 0 for all. ``copy.deepcopy`` copies. ``states`` is told
    of each random state that is read, by checkpoints too, which is no operation and has memory.
    """
    if _fake_mode is None or _fake_tensor is None:
        fail("dry_run", **lack(_MODE if _fake_mode is None else _TENSOR))

    class Handled(_fake_mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            go = super().__torch_dispatch__
            if self.in_kernel_invocation:
                return go(func, types, args, given)
            if func in _OF_STORAGES:
                go = self._not_remembered
            try:
                return handle(func, args, given, lambda: go(func, types, args, given))
            finally:
                _let_go(self)

        def _not_remembered(self, *given: Any) -> Any:
            """torch remembers what operations gave, and what they were given: a storage would never go."""
            was, self.cache_enabled = getattr(self, "cache_enabled", False), False
            try:
                return super().__torch_dispatch__(*given)
            finally:
                self.cache_enabled = was

        def __reduce__(self) -> NoReturn:
            fail("dry_run", "a tensor of a dry run is pickled, or saved: it has no values.", fix=_NOT_THERE)

    mode: Any = Handled(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    before, _told.states = _told.states, states
    try:
        with _ways_of_their_own(), mode:
            yield
    finally:
        _told.states = before


@functools.cache
def is_known_here(kind: str) -> bool:
    """Whether tensors without memory may be of this kind of device: where torch is not built for it, autograd would end
    the process. A build for it without such a device will do.
    """
    try:
        with without_memory():
            torch.empty(1, device=kind).copy_(torch.empty(1, device=kind))
    except (RuntimeError, AssertionError):
        return False
    return True


_put = torch.ops.aten.set_
_OF_STORAGES = frozenset(getattr(_put, name) for name in _put.overloads() if "Storage" in name)
_METHODS: dict[str, Callable[..., Any]] = {}
_lock, _inside = threading.Lock(), [0]


class _Told(threading.local):
    states: Callable[[Tensor], object] | None = None


_told, _read_state = _Told(), torch.get_rng_state


def _told_state() -> Tensor:
    x = _read_state()
    if _told.states is not None:
        _told.states(x)
    return x


@contextlib.contextmanager
def _ways_of_their_own() -> Iterator[None]:
    """Tensors without memory have their own methods for what torch does by address; who reads random states is told."""
    with _lock:
        _inside[0] += 1
        torch.get_rng_state = torch.random.get_rng_state = _told_state
        for name, method in _METHODS.items():
            setattr(_fake_tensor, name, method)
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                torch.get_rng_state = torch.random.get_rng_state = _read_state
                for name in _METHODS:
                    delattr(_fake_tensor, name)


def _copied(x: Tensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a tensor: what torch makes a copy of by its storage."""
    if not x.is_leaf:
        return Tensor.__deepcopy__(x, memo)  # type: ignore[no-untyped-call]  # which is refused
    if id(x) in memo:
        return memo[id(x)]
    is_parameter = isinstance(x, Parameter)
    with torch.no_grad():
        y: Any = x.clone() if is_parameter or int(x.untyped_storage().nbytes()) == x.nbytes else _part_of_copy(x, memo)
    if is_parameter:
        y = type(x)(y, x.requires_grad) if type(x) is not _fake_tensor else Parameter(y, x.requires_grad)
    else:
        y.requires_grad_(x.requires_grad)
        own = {name: value for name, value in vars(x).items() if name not in vars(y)}
        vars(y).update(copy.deepcopy(own, memo))
        y.grad = copy.deepcopy(x.grad, memo)
    memo[id(x)] = y
    return y


def _part_of_copy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """The same part of a copy of its storage, one for all that are copied together."""
    key = memory_of(x)
    if key not in memo:
        memo[key] = x.new_empty(int(x.untyped_storage().nbytes()) // x.element_size()).untyped_storage()
    return x.new_empty(0).set_(memo[key], x.storage_offset(), x.size(), x.stride())


def _formatted(x: Tensor, spec: str) -> str:
    """``f"{loss:.3f}"``: torch reads the number of what is a Tensor and of no class of its own."""
    if not x.ndim and kind_of(x) is Tensor:
        return format(x.detach().item(), spec)
    return object.__format__(x, spec)


_METHODS.update(__deepcopy__=_copied, __format__=_formatted, data_ptr=lambda x: _place(x))


def _let_go(mode: Any) -> None:
    """Of the weak references that it keeps to what it has made: ``module.to`` swaps parameters that have none."""
    made = getattr(getattr(getattr(mode, "fake_tensor_converter", None), "meta_converter", None), "tensor_memo", None)
    if made:
        made.clear()


def is_without_memory(x: Tensor) -> bool:
    """Whether it is such a tensor."""
    return _fake_tensor is not None and isinstance(x, _fake_tensor)


def kind_of(x: Tensor) -> type:
    """Its class; of what has no memory, the class that it would have with it."""
    if not is_without_memory(x):
        return type(x)
    return Parameter if isinstance(x, Parameter) else Tensor


def places_like(x: Tensor) -> Callable[[Tensor], int]:
    """What says where the first element of a tensor lies, in bytes, of such as ``x`` is: the address; or a number that
    tells storages apart where there is no memory.
    """
    return _place if is_without_memory(x) else Tensor.data_ptr


def _place(x: Tensor) -> int:
    return (memory_of(x) << 64) + int(x.storage_offset()) * x.element_size()


def memory_of(x: Tensor) -> int:
    """What tells the memory of a tensor from other tensors' that are there at the same time; 0 of what has none."""
    storage = x.untyped_storage()
    found: Any = storage._cdata if is_without_memory(x) else storage.data_ptr()
    return int(found)


def operation_name(func: Any) -> str:
    """Of an operation, as a dispatch mode is given it: "aten::add_"."""
    return str(func._schema.name)


def gives_views(func: Any) -> bool:
    """Whether what an operation gives has the memory of what it is given."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, tensors or lists of them, that an operation changes."""
    if not func._schema.is_mutable:
        return []
    return [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an operation is given, by the names that it has for it."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
