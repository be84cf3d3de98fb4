"""What is special about single functions of torch, by name, for the checker of varying types.

A function that stands nowhere here gives what varies wherever one of its operands does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.spmd.types.sizes.size_rules import SIZED, words

__all__ = ["RANDOM", "Kind", "kind_of"]


HOST = words(
    """
    item tolist numpy equal allclose is_nonzero __bool__ __int__ __float__ __complex__ __index__ __array__
    __contains__ __dlpack__ _local_scalar_dense _nnz
    """
)
"""Give a number of Python from the values of a tensor."""

LENDS = frozenset(["numpy", "__array__", "__dlpack__"])
"""Hand out the memory of a tensor, which may be written into from elsewhere."""

FRESH = words(
    """
    zeros_like ones_like empty_like new_zeros new_ones new_empty new_empty_strided new_full full_like
    """
)
"""Take only shape, dtype and device from their first operand."""

ALIKE = frozenset(["view_as", "reshape_as", "expand_as", "type_as", "to", "sum_to_size", "resize_as_"])
"""Take only shape, dtype and device from the operands after the first."""

EACH = frozenset(["broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"])
"""Give one output per operand; so do all that begin with ``_foreach_`` or ``_fused_``."""

SETTLES = words(
    """
    requires_grad_ detach_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_ share_memory_
    _coalesced_ data_ptr retain_grad register_hook register_post_accumulate_grad_hook dim ndimension size stride numel
    nelement element_size storage_offset is_complex is_floating_point is_contiguous is_conj is_neg is_inference
    is_signed is_pinned is_shared is_same_size is_set_to get_device __len__ untyped_storage
    """
)
"""Ask, or change, how a tensor is seen, and no values."""

PLAIN = words("shape dtype device ndim layout requires_grad is_leaf is_cpu is_cuda grad_fn nbytes itemsize names")
"""Attributes that are no tensors."""

HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook"])
"""Take a function that is called with a gradient."""

OVERWRITES = words(
    """
    copy_ zero_ fill_ uniform_ normal_ bernoulli_ exponential_ random_ log_normal_ geometric_ cauchy_ trunc_normal_
    constant_ ones_ zeros_ eye_ dirac_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_
    sparse_
    """
)
"""Leave nothing of what was in their first operand."""

RANDOM = words(
    """
    rand randn randint randperm normal bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet
    rand_like randn_like randint_like uniform_ normal_ bernoulli_ exponential_ random_ log_normal_ geometric_
    cauchy_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_ sparse_
    uniform exponential geometric cauchy log_normal random normal_functional
    """
)
"""Draw numbers, of what they are given no more than shapes and parameters."""


class _Dropout(NamedTuple):
    """Where a function that drops has its probability (or bounds) and whether it trains."""

    p: int
    p_name: str
    training: int
    training_default: bool


_NOWHERE = 99
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
    "rrelu": _Dropout(_NOWHERE, "", 3, False),
    "rrelu_": _Dropout(_NOWHERE, "", 3, False),
    "scaled_dot_product_attention": _Dropout(4, "dropout_p", -1, True),
    "multi_head_attention_forward": _Dropout(10, "dropout_p", 13, True),
    "_scaled_dot_product_flash_attention": _Dropout(3, "dropout_p", -1, True),
    "_scaled_dot_product_flash_attention_for_cpu": _Dropout(3, "dropout_p", -1, True),
    "_scaled_dot_product_attention_math": _Dropout(4, "dropout_p", -1, True),
    "_scaled_dot_product_attention_math_for_mps": _Dropout(4, "dropout_p", -1, True),
    "_scaled_dot_product_fused_attention_overrideable": _Dropout(4, "dropout_p", -1, True),
    "_scaled_dot_product_efficient_attention": _Dropout(5, "dropout_p", -1, True),
    "_scaled_dot_product_cudnn_attention": _Dropout(5, "dropout_p", -1, True),
    "_flash_attention_forward": _Dropout(7, "dropout_p", -1, True),
    "_flash_attention_forward_no_dropout_inplace": _Dropout(8, "dropout_p", -1, True),
    "_efficient_attention_forward": _Dropout(8, "dropout_p", -1, True),
    "_cudnn_rnn": _Dropout(11, "dropout", 12, True),
    "miopen_rnn": _Dropout(10, "dropout", 11, True),
}
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_NOISY = words(
    """
    gumbel_softmax rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional _fused_dropout
    """
)
"""Random functions of a value, as dropout is."""
_POOLS = words(
    """
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    """
)
"""Draw where to pool, unless they are given the numbers."""


@dataclass(frozen=True, slots=True)  # asked of each operation: a NamedTuple takes twice as long
class Kind:
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
    seeds: str = ""
    """What the gradients of outputs are called."""
    settles: bool = False
    """It changes how a tensor is seen, and no values."""
    hooks: bool = False
    """It is given a function for gradients."""
    asks: bool = False
    """It tells how a tensor is seen, and neither changes it nor gives another."""
    overwrites: bool = False
    """Nothing of what was in its first operand remains."""
    silent: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]] | None = None
    """Into what it writes without counting it as a change."""
    parts: bool = False
    """A collective of torch.distributed that gives each rank something else."""
    shares: bool = False
    """It gives its operand's memory to a tensor that is no view of it."""
    lends: bool = False
    from_data: bool = False
    """It may take data that torch knows nothing of."""
    sized: int = 0
    """From how many tensors on what it gives may have sizes that depend on data; 0: never by itself."""
    ordinary: bool = False
    """None of these."""


@lru_cache(4096)
def kind_of(func: Any) -> Kind:
    """How to read a function of torch, as a mode is given it."""
    name = str(getattr(func, "__name__", func)).split(".")[0]
    if name == "__get__":
        name = str(getattr(func.__self__, "__name__", name))
        return Kind(name, getter=True, asks=name in PLAIN)
    if name == "__set__":
        return Kind(str(getattr(func.__self__, "__name__", name)), setter=True)
    if func is Tensor.backward:
        return Kind(name, runs_backward=True, seeds="gradient")
    if func is torch.autograd.backward:
        return Kind(name, runs_backward=True, seeds="grad_tensors")
    if func is torch.autograd.grad:
        return Kind(name, runs_backward=True, gradients=True)
    drops = _drops(name)
    if drops is None and name not in RANDOM and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        drops = None if name.endswith("_backward") else _always
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    kind = Kind(
        name,
        host=name in HOST,
        fresh=name in FRESH,
        alike=name in ALIKE,
        each=name in EACH or name.startswith(("_foreach_", "_fused_")),
        in_place=in_place,
        random=name in RANDOM,
        drops=drops,
        settles=name in SETTLES,
        hooks=name in HOOKS,
        asks=name in SETTLES - HOOKS and not in_place,
        overwrites=name in OVERWRITES,
        parts=_of_torch_distributed(func) and any(word in name for word in _PARTS),
        silent=_silent(name, getattr(func, "__module__", None) == "torch.nn.functional"),
        shares=name == "detach",
        lends=name in LENDS,
        from_data=name in ("tensor", "as_tensor", "asarray"),
        sized=SIZED.get(name, 0),
    )
    return replace(kind, ordinary=replace(kind, name="", from_data=False, sized=0) == Kind(""))


_IN_PLACE = words(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__
    """
)


def _drops(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
    if name in _NOISY:
        return _always
    if name in _RECURRENT:
        return _recurrent
    if name in _POOLS:
        return _without_samples
    where = _DROPOUT.get(name)
    if where is None:
        return None

    def drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        p = args[where.p] if len(args) > where.p else kwargs.get(where.p_name, 0.0 if "attention" in name else 0.5)
        training = where.training_default
        if 0 <= where.training < len(args):
            training = args[where.training]
        for word in ("training", "train"):
            training = kwargs.get(word, training)
        return bool(training) and p != 0

    return drops


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


_STATISTICS = words(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
    cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts
    """
)


def _silent(name: str, of_python: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]] | None:
    """The statistics of normalisations, and what fused optimizers update."""
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return lambda args, kwargs: [*args[0], args[1]]
    if name == "batch_norm_update_stats" or (of_python and name in ("batch_norm", "instance_norm")):
        place, default = 1, name != "batch_norm"
    elif name in _STATISTICS or name in ("batch_norm", "instance_norm"):
        place, default = 3, True
    else:
        return None

    def silent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", default))
        if training is False:
            return []
        found = [*args[place : place + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
        return [x for x in found if isinstance(x, Tensor)]

    return silent


_PARTS = ("recv", "scatter", "all_to_all")


def _of_torch_distributed(func: Any) -> bool:
    return str(getattr(func, "__module__", None)).startswith(
        ("torch.distributed", "torch._ops._c10d", "torch._ops.c10d")
    )


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The first bool of a recurrent layer says whether it has biases; behind it stand how many layers it has, its
    dropout and whether it trains.
    """
    at = next((i for i, arg in enumerate(args) if isinstance(arg, bool)), len(args))
    return len(args) <= at + 3 or (args[at + 2] != 0 and bool(args[at + 3]))


def _without_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A pool at places of its own choice."""
    return kwargs.get("_random_samples") is None
