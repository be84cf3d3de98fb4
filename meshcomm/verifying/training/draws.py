"""Dropout in a training loop: which rank has dropped which elements, and a run without it.

What ranks draw for themselves is another draw on each mesh, so that losses cannot be those of one rank. A loop that
draws is run with all dropout let through, and its masks are judged apart:

    inputs differ (other data, another shard)    masks must differ
    inputs are the same (replicated)             masks must be the same, or the replicas part
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshcomm.runtime.callsite import call_site

DROPOUTS = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_",
     "feature_dropout")
)  # fmt: skip
_OTHERS = frozenset(
    ("bernoulli", "bernoulli_", "exponential_", "gumbel_softmax", "multinomial", "normal", "normal_", "rand",
     "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "rrelu", "uniform_")
)  # fmt: skip


class Drawn(NamedTuple):
    """Random numbers that a rank has drawn for itself."""

    what: str
    line: str
    input: str
    """A hash; nothing where it is not known what was drawn."""
    mask: str


def _hash(x: Tensor) -> str:
    x = x.detach().to("cpu").contiguous()
    data = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(repr((tuple(x.shape), x.dtype)).encode() + data).hexdigest()


class _Watch(TorchFunctionMode):
    """Lets dropout through, and keeps what it would have dropped."""

    def __init__(self, drawn: list[Drawn]) -> None:
        super().__init__()
        self._drawn = drawn
        self._busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = str(getattr(func, "__name__", ""))
        if self._busy:
            return func(*args, **kwargs)
        if name in DROPOUTS and _drops(args, kwargs):
            return self._dropout(func, name, args, kwargs)
        if name == "scaled_dot_product_attention" and (kwargs.get("dropout_p") or any(args[4:5])):
            self._drawn.append(Drawn("dropout of attention", str(call_site()), "", ""))
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        elif name in _OTHERS and kwargs.get("generator") is None:
            self._drawn.append(Drawn(name, str(call_site()), "", ""))
        return func(*args, **kwargs)

    def _dropout(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.pop("input")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}
        self._busy = True
        try:
            with torch.no_grad():
                mask = func(torch.ones_like(x), *args[1:3], **kwargs)
        finally:
            self._busy = False
        self._drawn.append(Drawn(name, str(call_site()), _hash(x), _hash(mask)))
        return x


def _drops(args: Any, kwargs: dict[str, Any]) -> bool:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and bool(p)


@contextlib.contextmanager
def watched(drawn: list[Drawn], on: bool) -> Iterator[None]:
    """While it is open, dropout goes through and is kept in ``drawn``; nothing, where it is not ``on``."""
    with _Watch(drawn) if on else contextlib.nullcontext():
        yield
