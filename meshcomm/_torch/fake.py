"""The private names of torch behind tensors that have a shape, a dtype and a storage, and no memory: a part of
:mod:`meshcomm._torch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from meshcomm._versions import find, lack
from meshcomm.errors import fail

__all__ = [
    "UnknownSizeError",
    "gives_views",
    "handled_without_memory",
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


def handled_without_memory(handle: Handle) -> contextlib.AbstractContextManager[object]:
    """The same, where ``handle(func, args, kwargs, go)`` gives the results of each operation of torch's: ``go()`` is
    what torch would give. What has memory may be an operand.
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
            try:
                return handle(func, args, given, lambda: go(func, types, args, given))
            finally:
                _let_go(self)

        def __reduce__(self) -> NoReturn:
            fail("dry_run", "a tensor of a dry run is pickled, or saved: it has no values.", fix=_NOT_THERE)

    mode: contextlib.AbstractContextManager[object] = Handled(allow_non_fake_inputs=True)
    return mode


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
