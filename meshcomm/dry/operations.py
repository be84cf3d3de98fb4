"""What torch's operations give in a dry run, and who is told of each: the log, the values, the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.dry.log import Log
from meshcomm.dry.memory import LiveMemory
from meshcomm.dry.values import Values, refuse_device, refuse_unknown_size
from meshcomm.dry.workspaces import lstm_keeps

__all__ = ["Operations"]


class Operations:
    """What each operation of torch's gives in a dry run."""

    def __init__(self, values: Values, log: Log | None = None, memory: LiveMemory | None = None) -> None:
        self.values, self.log, self.memory = values, log, memory
        self.count = 0
        """How many there were."""
        self._depth = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go: Callable[[], Any]) -> Any:
        """The result: ``go()``, or what is known."""
        name = _torch.operation_name(func)
        self.count += 1
        if name in _READS:
            if self.log is not None:
                self.log.read()
            return self.values.read(args[0]) if name == _ITEM else bool(self.values.answer(torch.bool))
        if self._depth:
            return go()
        if (device := kwargs.get("device")) is not None and not _torch.is_known_here(device.type):
            refuse_device(device)
        self._depth += 1
        try:
            own = _OWN.get(name)
            result = go() if own is None else own(func, *args, **kwargs)
            if self.log is not None:
                self.log.ran(func, args, kwargs, result)
            self.values.follow(func, args, kwargs, result)
            if self.memory is not None:
                self.memory.see(func, args, kwargs, result)
            if name == _COUNTS and args[0].numel():
                self.values.suppose(result, _evenly(args[0].numel(), result))
        except _torch.UnknownSizeError:
            refuse_unknown_size(func, args)
        finally:
            self._depth -= 1
        return result


_ITEM = "aten::_local_scalar_dense"
_READS = (_ITEM, "aten::equal", "aten::allclose")
_COUNTS = "aten::bincount"


def _evenly(rows: int, counts: Tensor) -> Tensor:
    """As many of the ``rows`` for each of the ``counts``, and of the rest one for each of the first."""
    share, rest = divmod(rows, counts.numel())
    with _torch.outside_transforms():
        return torch.tensor([share + (i < rest) for i in range(counts.numel())], dtype=counts.dtype, device="cpu")


def _bincount(func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many as are asked for: a number that is larger would make it longer."""
    if not minlength:
        refuse_unknown_size(func, (x,))
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _grouped_product(func: Any, a: Tensor, b: Tensor, offsets: Tensor | None = None, *more: Any, **rest: Any) -> Tensor:
    """On the CPU it takes other dtypes than torch knows of."""
    groups = () if a.ndim != b.ndim or offsets is None else offsets.shape
    shape = (*groups, a.shape[-2], b.shape[-1]) if offsets is not None else (*a.shape[:-1], b.shape[-1])
    return a.new_empty(shape, dtype=rest.get("out_dtype") or a.dtype)


def _lstm_layer(func: Any, *args: Any) -> tuple[Tensor, ...]:
    """torch's own says that it keeps nothing."""
    *results, kept = func(*args)
    return *results, kept.new_empty(lstm_keeps(args))


_OWN: dict[str, Callable[..., Any]] = {
    _COUNTS: _bincount,
    "aten::_grouped_mm": _grouped_product,
    "aten::mkldnn_rnn_layer": _lstm_layer,
}
"""What is known of sizes where torch alone does not."""
