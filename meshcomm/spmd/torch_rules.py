"""What is special about single functions of torch, by name, for the checker of varying types.

A function that stands nowhere here gives what varies wherever one of its operands does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RANDOM", "Kind", "kind_of"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HOST = _words(
    """
    item tolist numpy equal allclose is_nonzero __bool__ __int__ __float__ __complex__ __index__ __array__
    __contains__ __dlpack__
    """
)
"""Give a number of Python from the values of a tensor."""

FRESH = _words(
    """
    zeros_like ones_like empty_like new_zeros new_ones new_empty new_empty_strided new_full full_like eye_like
    """
)
"""Take only shape, dtype and device from their first operand."""

ALIKE = frozenset(["view_as", "reshape_as", "expand_as", "type_as", "to", "is_same_size", "sum_to_size", "resize_as_"])
"""Take only shape, dtype and device from the operands after the first."""

EACH = frozenset(["broadcast_tensors", "meshgrid", "align_tensors", "atleast_1d", "atleast_2d", "atleast_3d"])
"""Give one output per operand; so do all that begin with ``_foreach_`` or ``_fused_``."""

RANDOM = _words(
    """
    rand randn randint randperm normal bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet
    rand_like randn_like randint_like uniform_ normal_ bernoulli_ exponential_ random_ log_normal_ geometric_
    cauchy_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_ sparse_
    uniform gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices exponential geometric cauchy log_normal random normal_functional
    randperm_like rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional rand_like_ randint_like_ rrelu_
    rrelu
    """
)
"""Draw numbers."""


class _Dropout(NamedTuple):
    """Where a function that drops has its probability (or bounds) and whether it trains."""

    p: int
    p_name: str
    training: int
    training_default: bool


_DROPOUT = {
    "dropout": _Dropout(1, "p", 2, True),
    "dropout_": _Dropout(1, "p", 2, True),
    "dropout1d": _Dropout(1, "p", 2, True),
    "dropout2d": _Dropout(1, "p", 2, True),
    "dropout3d": _Dropout(1, "p", 2, True),
    "feature_dropout": _Dropout(1, "p", 2, True),
    "feature_dropout_": _Dropout(1, "p", 2, True),
    "native_dropout": _Dropout(1, "p", 2, True),
    "alpha_dropout": _Dropout(1, "p", 2, False),
    "alpha_dropout_": _Dropout(1, "p", 2, False),
    "feature_alpha_dropout": _Dropout(1, "p", 2, False),
    "feature_alpha_dropout_": _Dropout(1, "p", 2, False),
    "rrelu": _Dropout(2, "upper", 3, False),
    "rrelu_": _Dropout(2, "upper", 3, False),
    "scaled_dot_product_attention": _Dropout(4, "dropout_p", -1, True),
    "multi_head_attention_forward": _Dropout(10, "dropout_p", 13, True),
}
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_NOISY = frozenset(["gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"])
"""Random functions of a value, as dropout is."""


class Kind(NamedTuple):
    """How the checker reads a function."""

    name: str
    getter: bool = False
    setter: bool = False
    host: bool = False
    fresh: bool = False
    alike: bool = False
    each: bool = False
    in_place: bool = False
    random: bool = False
    drops: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None
    """Whether a call mixes its operand with random numbers."""
    runs_backward: bool = False
    gradients: bool = False

    @property
    def ordinary(self) -> bool:
        """Nothing is special about it."""
        return not any(self[1:])


@lru_cache(4096)
def kind_of(func: Any) -> Kind:
    """How to read a function of torch, as a mode is given it."""
    name = str(getattr(func, "__name__", func)).split(".")[0]
    if name == "__get__":
        return Kind(str(getattr(func.__self__, "__name__", name)), getter=True)
    if name == "__set__":
        return Kind(str(getattr(func.__self__, "__name__", name)), setter=True)
    if func in (Tensor.backward, torch.autograd.backward):
        return Kind(name, runs_backward=True)
    if func is torch.autograd.grad:
        return Kind(name, runs_backward=True, gradients=True)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return Kind(
        name,
        host=name in HOST,
        fresh=name in FRESH,
        alike=name in ALIKE,
        each=name in EACH or name.startswith(("_foreach_", "_fused_")),
        in_place=in_place,
        random=name in RANDOM and name not in _DROPOUT and name not in _NOISY,
        drops=_drops(name),
    )


_IN_PLACE = _words(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__ __imatmul__
    """
)


def _drops(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
    if name in _NOISY:
        return lambda args, kwargs: True
    if name in _RECURRENT:
        return _recurrent
    where = _DROPOUT.get(name)
    if where is None:
        return None

    def drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        p = args[where.p] if len(args) > where.p else kwargs.get(where.p_name, 0.0 if name.startswith("s") else 0.5)
        training = where.training_default
        if 0 <= where.training < len(args):
            training = args[where.training]
        for word in ("training", "train"):
            training = kwargs.get(word, training)
        return bool(training) and p != 0

    return drops


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The dropout of a recurrent layer is its only float, and behind it stands whether it trains."""
    at = next((i for i, arg in enumerate(args) if isinstance(arg, float)), None)
    return at is not None and args[at] > 0 and bool(args[at + 1])
