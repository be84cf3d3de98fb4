"""What is special about single functions of torch, by name, for the checker of varying types.

A function that stands nowhere here gives what varies wherever one of its operands does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshcomm.spmd.types.rules.arguments import by_name, forms_of, is_seeded, only_reads, takes_rows
from meshcomm.spmd.types.sizes.size_rules import SIZED, may_size, source_of, words

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
    _coalesced_ _set_grad_enabled data_ptr retain_grad register_hook register_post_accumulate_grad_hook dim
    ndimension size stride numel nelement element_size storage_offset is_complex is_floating_point is_contiguous
    is_conj is_neg is_inference is_signed is_pinned is_shared is_same_size is_set_to get_device __len__
    untyped_storage
    """
)
"""Ask, or change, how tensors are seen, and no values."""

PLAIN = words(
    """
    shape dtype device ndim layout requires_grad is_leaf is_cpu is_cuda grad_fn nbytes itemsize names is_sparse
    is_sparse_csr is_nested is_quantized is_mkldnn is_meta is_mps is_xla is_xpu is_mtia retains_grad output_nr
    """
)
"""Attributes that are no tensors."""

VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])
"""Attributes that are views."""

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


DROPS = words(
    """
    dropout1d dropout2d dropout3d multi_head_attention_forward gumbel_softmax fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    """
)
"""Random functions of a value that torch does not tag as such; all others that draw and are not above are, too."""


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
    computes: bool = False
    """In place, of what was there and its other operands, or of these alone."""
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
    one_kernel: bool = False
    """One kernel makes its result, which has not been changed since."""
    counts: bool = False
    """What it gives has no gradient."""
    names: tuple[str, ...] = ()
    """Of its arguments, if it is a function of Python that is seen at once and hands on tensors by name."""
    unless: Callable[[tuple[Any, ...], dict[str, Any] | None], bool] | None = None
    """Whether a call of it is none of those that are seen at once."""
    may_write: bool = False
    """Such a call computes in place."""
    way: int = 0
    """How to see at once what it does, where all types are known: one of those below, or 0."""


READS, READS_ROWS, COMPUTES, MAKES = 1, 2, 3, 4
"""Ordinary, and by its schemas it writes into nothing but an ``out=``, and one tensor alone gives no sizes; the same,
where the first argument may be a list of tensors; computes in place; makes a tensor of simple values, or of random
numbers in the image of another."""


def _kind(func: Any) -> Kind:
    name = str(getattr(func, "__name__", func)).split(".")[0]
    if name == "__get__":
        name = str(getattr(func.__self__, "__name__", name))
        shares = name == "data"
        return Kind(name, getter=True, asks=name in PLAIN, shares=shares, way=READS if shares or name in VIEWS else 0)
    if name == "__set__":
        return Kind(str(getattr(func.__self__, "__name__", name)), setter=True)
    if func is Tensor.backward:
        return Kind(name, runs_backward=True, seeds="gradient")
    if func is torch.autograd.backward:
        return Kind(name, runs_backward=True, seeds="grad_tensors")
    if func is torch.autograd.grad:
        return Kind(name, runs_backward=True, gradients=True)
    own = _is_own(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    kind = Kind(
        name,
        host=name in HOST,
        fresh=own and name in FRESH,
        alike=own and name in ALIKE,
        each=name in EACH or name.startswith(("_foreach_", "_fused_")),
        in_place=in_place,
        computes=own and name in _COMPUTES,
        random=name in RANDOM,
        drops=_drops(func, name),
        settles=name in SETTLES,
        hooks=name in HOOKS,
        asks=name in SETTLES - HOOKS and not in_place,
        overwrites=name in OVERWRITES,
        parts=_of_torch_distributed(func) and any(word in name for word in _PARTS),
        silent=_silent(func, name),
        shares=name == "detach",
        lends=name in LENDS,
        from_data=name in ("tensor", "as_tensor", "asarray"),
        sized=SIZED.get(name, 0),
    )
    ordinary = replace(kind, name="", from_data=False, sized=0) == Kind("")
    way = COMPUTES if kind.computes else 0
    nearly = replace(kind, name="", alike=False, fresh=False, shares=False, drops=None, from_data=False, sized=0)
    if func is functional.batch_norm:
        nearly = replace(nearly, silent=None)
    if name in HOST - LENDS:
        nearly = replace(nearly, host=False)
    if (
        nearly == Kind("")
        and (kind.sized != 1 or name in ("where", "one_hot"))
        and not kind.from_data
        and (func in _PURE or only_reads(func))
    ):
        way = READS_ROWS if takes_rows(func) else READS
    elif own and name in _MAKES and not isinstance(func, FunctionType):
        way = MAKES
    return replace(
        kind,
        ordinary=ordinary,
        way=way,
        one_kernel=own and way in (READS, READS_ROWS) and (kind.fresh or name in _ONE_KERNEL),
        counts=name in _COUNTS,
        unless=_unless(func, kind) if way else None,
        may_write=way == READS and _place_of("inplace", func) >= 0,
        names=tuple(inspect.signature(func).parameters) if way and name in _BY_NAME and func in _PURE else (),
    )


def _is_own(func: Any) -> bool:
    """Whether it is torch's own: an operator of somebody else may have the name of one of torch's."""
    module = str(getattr(func, "__module__", None))
    return not module.startswith("torch._ops.") or module == "torch._ops.aten"


_MAKES = words(
    """
    zeros ones empty full arange linspace logspace eye tensor scalar_tensor rand randn randint randperm rand_like
    randn_like randint_like
    """
)

_PURE = frozenset(
    [getattr(functional, name) for name in words(
        """
        softmax log_softmax softmin softsign tanhshrink sigmoid tanh relu relu6 elu selu celu silu mish leaky_relu
        hardtanh hardswish hardsigmoid glu layer_norm group_norm batch_norm rms_norm normalize pad embedding dropout
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits margin_ranking_loss triplet_margin_loss cosine_embedding_loss soft_margin_loss
        poisson_nll_loss gaussian_nll_loss hinge_embedding_loss multi_margin_loss multilabel_margin_loss
        multilabel_soft_margin_loss multi_head_attention_forward
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
        max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        lp_pool1d lp_pool2d lp_pool3d interpolate grid_sample affine_grid local_response_norm unfold fold
        """
    )] + [getattr(Tensor, name) for name in words(
        """
        float half bfloat16 double int long short bool cpu norm sort split unflatten __eq__ __pow__ __rpow__ __rsub__
        __rdiv__ __rtruediv__ __floordiv__ __rfloordiv__ __rmod__ __matmul__ __rmatmul__ __and__ __or__ __xor__
        __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ __rlshift__ __rrshift__ char byte cfloat cdouble
        """
    )] + [torch.einsum, torch.tensordot, torch.cdist, torch.block_diag, torch.norm, torch.split, torch.sort]
)  # fmt: skip
"""Functions that have no schema and write into nothing, unless ``_unless`` says so: what most models call."""


_BY_NAME = words(
    "multi_head_attention_forward layer_norm rms_norm group_norm batch_norm cross_entropy nll_loss binary_cross_entropy"
)


def in_order(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments of a call without names, if those that have one are the next ones in order."""
    more = kind.names[len(args) : len(args) + len(kwargs)]
    if more == tuple(kwargs):  # nearly always
        return (*args, *kwargs.values())
    return (*args, *[kwargs[each] for each in more]) if kwargs.keys() == set(more) else None


def _unless(func: Any, kind: Kind) -> Callable[[tuple[Any, ...], dict[str, Any] | None], bool] | None:
    """Says of a call that it is none of those that are seen at once: it writes, makes a leaf, or is of a size that
    depends on data.
    """
    name = kind.name
    asks = "max_norm" if func is functional.embedding else "inplace"
    place = _place_of(asks, func)
    if place >= 0:

        def writes(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
            asked = args[place] if len(args) > place else kwargs.get(asks) if kwargs else None
            return asked is not None and asked is not False

        return writes
    if kind.fresh or name in _MAKES:  # a leaf made for each rank's own
        return lambda args, kwargs: bool(kwargs and kwargs.get("requires_grad"))
    if kind.name == "__getitem__":
        return lambda args, kwargs: isinstance(args[1], Tensor) and may_size("__getitem__", args)
    if kind.name == "where":
        return lambda args, kwargs: may_size("where", args)
    if kind.name == "one_hot":
        return lambda args, kwargs: source_of("one_hot", args, kwargs or {}) is not None
    return None


def _place_of(name: str, func: Any) -> int:
    """Where an argument of this name stands among those of a function of torch.nn.functional; -1: it has none."""
    if not (isinstance(func, FunctionType) and func in vars(functional).values()):
        return -1
    return next((i for i, each in enumerate(inspect.signature(func).parameters) if each == name), -1)


_COUNTS = words("argmax argmin eq ne lt le gt ge")
_ONE_KERNEL = _COUNTS | words(
    """
    add sub mul div neg abs square exp log sqrt rsqrt relu gelu silu sigmoid tanh sin cos softmax log_softmax layer_norm
    clone cat stack mm bmm addmm baddbmm addcmul addcdiv lerp clamp clamp_min clamp_max maximum minimum where gather
    masked_fill index_select sum mean amax amin cumsum tril triu __add__ __radd__ __sub__ __mul__ __rmul__ __neg__
    """
)


class _Kinds(dict[Any, Kind]):
    """Asked at every operation: half of what a cache of functools costs."""

    def __missing__(self, func: Any) -> Kind:
        if len(self) >= _MOST:
            self.clear()
        found = self[func] = _kind(func)
        return found


_MOST = 4096
KINDS = _Kinds()
kind_of: Callable[[Any], Kind] = KINDS.__getitem__
"""How to read a function of torch, as a mode is given it."""


_IN_PLACE = words(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__
    """
)


_COMPUTES = words(
    """
    add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ clamp_ clamp_min_ clamp_max_ pow_ neg_ abs_ sqrt_ rsqrt_ exp_ log_ relu_
    sigmoid_ tanh_ clip_ square_ reciprocal_ masked_fill_ addmm_ index_add_ index_copy_ scatter_ scatter_add_ __iadd__
    __isub__ __imul__ __itruediv__ __setitem__ copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ random_
    subtract_ multiply_ divide_ true_divide_ negative_ absolute_ floor_divide_ fmod_ remainder_ float_power_ xlogy_
    hypot_ copysign_ atan2_ arctan2_ exp2_ expm1_ log2_ log10_ log1p_ logit_ nan_to_num_ floor_ ceil_ round_ trunc_ fix_
    frac_ sign_ sgn_ sin_ cos_ tan_ asin_ acos_ atan_ sinh_ cosh_ asinh_ acosh_ atanh_ arcsin_ arccos_ arctan_ arcsinh_
    arccosh_ arctanh_ erf_ erfc_ erfinv_ sinc_ lgamma_ digamma_ deg2rad_ rad2deg_ cumsum_ cumprod_ tril_ triu_
    baddbmm_ addbmm_ addmv_ addr_ index_fill_ masked_scatter_ scatter_reduce_
    eq_ ne_ lt_ le_ gt_ ge_ not_equal_ less_ less_equal_ greater_ greater_equal_ logical_and_ logical_or_ logical_xor_
    logical_not_ bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_not_ bitwise_left_shift_ bitwise_right_shift_ gcd_ lcm_
    __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """
)


def _drops(func: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
    """Says of a call whether it draws: unless it is told to drop nothing, not to train, or what is drawn."""
    if name in RANDOM or name.endswith("_backward") or not (name in DROPS or is_seeded(func)):
        return None
    forms = forms_of(func)

    def drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = by_name(forms, args, kwargs)
        p = given.get("p", given.get("dropout_p", given.get("dropout")))
        training = given.get("training", given.get("train", True))
        return p != 0 and bool(training) and given.get("_random_samples") is None

    return drops


STATISTICS = words(
    """
    batch_norm instance_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _batch_norm_with_update cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_update_stats
    """
)
"""Normalisations that write into statistics without a word, unless they are told to use these."""


def _silent(func: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]] | None:
    """The statistics of normalisations, and what fused optimizers update."""
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return lambda args, kwargs: [*args[0], args[1]]
    if name not in STATISTICS:
        return None
    if func is functional.batch_norm:  # it is given these by position, if by anybody
        return lambda args, kwargs: (
            [x for x in args[1:3] if isinstance(x, Tensor)]
            if (args[5] if len(args) > 5 else kwargs.get("training"))
            else []
        )
    forms = forms_of(func)

    def silent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = by_name(forms, args, kwargs)
        if given.get("training", given.get("use_input_stats")) is False:
            return []
        return [x for x in (given.get("running_mean"), given.get("running_var")) if isinstance(x, Tensor)]

    return silent


_PARTS = ("recv", "scatter", "all_to_all")


def _of_torch_distributed(func: Any) -> bool:
    return str(getattr(func, "__module__", None)).startswith(
        ("torch.distributed", "torch._ops._c10d", "torch._ops.c10d")
    )
