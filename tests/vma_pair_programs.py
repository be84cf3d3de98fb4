"""Programs of the checker of varying types: a weight and a bias that are varied together, what is narrower and has no
gradient, and everything that is computed in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vma_short_programs import Program, of, weight

from meshcomm.spmd.types.sizes.size_rules import words


def _linear_three_times(x: Tensor, w: Tensor, b: Tensor) -> list[Any]:
    for _ in range(3):
        y = F.linear(x, w, b)
    leaves = [each for each in (w, b) if each.requires_grad]
    return [y, *(torch.autograd.grad(y.sum(), leaves) if leaves and y.requires_grad else [])]


def changed_between() -> list[Any]:
    """Each of the two in each way, and back."""
    x, w, b = of("dp", 2, 4), weight(4, 4), weight(4)
    found = _linear_three_times(x, w, b)
    changes: list[Callable[[Tensor], object]] = [
        lambda each: each.mul_(0.5),
        lambda each: setattr(each, "data", each.data.flip(0)),
        lambda each: each.requires_grad_(False),
        lambda each: each.requires_grad_(True),
    ]
    for each in (w, b):
        for change in changes:
            with torch.no_grad():
                change(each)
            found += _linear_three_times(x, w, b)
        with torch._C.DisableTorchFunction():
            each.data = each.data.clone().mul_(3)
        found += _linear_three_times(x, w, b)
    with torch.no_grad():
        found += [F.linear(x, w, b), F.linear(x, w, b)]
    with torch.inference_mode():
        found += [F.linear(x, w, b) + 0, F.linear(x, w, b) + 0]
    return found


def one_of_two_types() -> list[Any]:
    """Only one of the two is narrower, or by other axes than the other one."""
    x, found = of(("dp", "tp"), 2, 4), []
    kinds: list[Callable[..., Tensor]] = [
        lambda *shape: weight(*shape),
        lambda *shape: of("dp", *shape).requires_grad_(),
        lambda *shape: of("tp", *shape).requires_grad_(),
        lambda *shape: of(("dp", "tp"), *shape).requires_grad_(),
        lambda *shape: of((), *shape),
    ]
    for first in kinds:
        for second in kinds:
            found += _linear_three_times(x, first(4, 4), second(4))
    return found


def one_for_both() -> list[Any]:
    """And others by the same function, with more arguments than these and with fewer."""
    x, v, w, found = of("dp", 4, 4), of("dp", 4), weight(4, 4), []
    p = weight(4)
    for _ in range(3):
        found += [torch.addmm(w, w, x), torch.addmm(x, w, w), torch.addmm(w, x, w), torch.addcmul(v, p, p)]
        found += [F.layer_norm(x, (4,), p, p), F.bilinear(x, x, weight(2, 4, 4), weight(2)), F.linear(x, w)]
        found += [F.linear(x, w, p), F.linear(x, w, bias=p), F.linear(x, w, p * 2), F.linear(x, w * 2, p)]
    return [*found, *torch.autograd.grad(sum(each.sum() for each in found), [w, p])]


def seventy_layers() -> list[Any]:
    """More than are remembered of what is no parameter."""
    x = of("dp", 2, 4)
    leaves = [(weight(4, 4), weight(4)) for _ in range(70)]
    for _ in range(2):
        for w, b in leaves:
            x = torch.tanh(F.linear(x, w, b))
    return [x, *torch.autograd.grad(x.sum(), [each for pair in leaves for each in pair])]


def without_gradients_beside() -> list[Any]:
    """What is narrower has none, then one, then none again."""
    x, k, s, found = of("dp", 4, 4).requires_grad_(), of((), 4, 4), of((), 4), []
    for tracked in (False, True, False):
        k.requires_grad_(tracked)
        s.requires_grad_(tracked)
        for _ in range(3):
            found += [x @ k, k @ x, x * s, s * x, torch.where(x > 2, x, s), torch.addmm(x, x, k), torch.cat([x, k])]
        some = sum(each.sum() for each in found[-7:])
        found += torch.autograd.grad(some, [x, k, s] if tracked else [x])
    return found


_ALONE = words(
    """
    negative_ absolute_ exp2_ expm1_ log2_ log10_ log1p_ floor_ ceil_ trunc_ fix_ frac_ sign_ sgn_ sin_ cos_ tan_
    asin_ acos_ atan_ sinh_ cosh_ asinh_ acosh_ atanh_ arcsin_ arccos_ arctan_ arcsinh_ arccosh_ arctanh_ erf_ erfc_
    erfinv_ sinc_ lgamma_ digamma_ deg2rad_ rad2deg_ logical_not_
    """
)
_OF_TWO = words(
    """
    subtract_ multiply_ divide_ true_divide_ floor_divide_ fmod_ remainder_ xlogy_ hypot_ copysign_ atan2_ arctan2_
    eq_ ne_ lt_ le_ gt_ ge_ not_equal_ less_ less_equal_ greater_ greater_equal_ logical_and_ logical_or_
    logical_xor_
    """
)
_OF_INTEGERS = words(
    """
    bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_left_shift_ bitwise_right_shift_ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__ __ifloordiv__ __imod__
    """
)


def _thrice(x: Tensor, name: str, *others: Any) -> Tensor:
    x = x.double() if name == "float_power_" else x.clone()
    for _ in range(3):
        getattr(x, name)(*others)
    return x


def computed_in_place() -> list[Any]:
    """By what varies, by what does not, and by numbers."""
    x, y, s = of("dp", 4, 4) / 20, of("dp", 4, 4) / 10, of((), 4, 4) / 10
    found = [_thrice(x, name) for name in sorted(_ALONE)]
    found += [_thrice(x, name, other) for name in sorted(_OF_TWO) for other in (y, s)]
    v, more = y[0].clone(), torch.stack([y, s])
    found += [_thrice(x, "addr_", v, v), _thrice(v, "addmv_", x, v), _thrice(x, "addbmm_", more, more)]
    found += [_thrice(more, "baddbmm_", more, more), _thrice(x, "float_power_", 2.0), _thrice(x, "logit_", 0.1)]
    found += [_thrice(x, "round_"), _thrice(x, "nan_to_num_"), _thrice(x, "tril_"), _thrice(x, "triu_", 1)]
    found += [_thrice(x, "cumsum_", 0), _thrice(x, "cumprod_", 0)]
    m, n = of("dp", 4).long(), of((), 4).long()
    found += [_thrice(m, name, other) for name in sorted(_OF_INTEGERS) for other in (m.clone(), n, 2)]
    found += [_thrice(m, "bitwise_not_"), operator.ipow(m.clone(), 2), _thrice(m, "gcd_", n), _thrice(m, "lcm_", n)]
    places, chosen = torch.tensor([0, 2]), x > 0.3
    found += [_thrice(x, "index_fill_", 0, places, 0.5), _thrice(x, "masked_scatter_", chosen, y)]
    found += [_thrice(x, "scatter_reduce_", 0, places.expand(4, 2).t(), y, "sum")]
    return found


def wider_into_narrower() -> list[Any]:
    """What is the same on all ranks is not, once something that varies was computed into it."""
    x, found = of("dp", 4), []
    for name in sorted(_OF_TWO):
        s = of((), 4)
        for _ in range(3):
            getattr(s, name)(x)
        found.append(s)
    return found


def lists_of_views() -> list[Any]:
    """Results for each element, of which some are leaves' or have a gradient."""
    x, w, found = of("dp", 4), weight(4), []
    for _ in range(3):
        found += [*torch._foreach_add([x, x], [x, x]), *torch._foreach_mul([w, w], 2.0), *torch._foreach_sqrt([x])]
        found += [*torch._foreach_norm([x, x]), *torch._foreach_neg((x[:2], x[2:]))]
    return [*found, *torch.autograd.grad(sum(each.sum() for each in found if each.requires_grad), w)]


def lists_without_counts() -> list[Any]:
    """What is made under inference_mode does not count its changes, and views of it do not either."""
    x, n, w, found = of("dp", 4), of((), 4), weight(4), []
    with torch.inference_mode():
        for _ in range(3):
            found += [*torch._foreach_add([x, n], [x, n]), *torch._foreach_mul([w, x], 2.0), *torch._foreach_sqrt([x])]
            found += [*torch._foreach_norm([x, n]), *torch._foreach_neg((x[:2], x[2:])), *torch._foreach_abs(found[:2])]
            found += [*torch._foreach_lerp([x, n], [n, x], 0.5), *torch._foreach_addcmul([x], [n], [x])]
            torch._foreach_add_(found[:2], 1.0)
            found += [*torch._foreach_add(found[:2], found[2:4]), *torch._foreach_neg([each[:2] for each in found[:2]])]
    return found


def one_hot_of_places() -> list[Any]:
    places, found = of("dp", 4).long(), []
    for _ in range(3):
        found += [F.one_hot(places, 16), F.one_hot(places, num_classes=16)]
    return found


def more_operators() -> list[Any]:
    x, m, found = of("dp", 4), of("dp", 4).long(), []
    for _ in range(3):
        found += [~(x > 2), ~m, m << 1, m >> 1, 1 << m, 9 >> m, 3 & m, 3 | m, 3 ^ m, x.char(), x.byte(), x.cfloat()]
        found += [*torch.sort(x), *torch.sort(x, descending=True, stable=True)]
    return found


PAIR_PROGRAMS: dict[str, Program] = {
    each.__name__.replace("_", " "): each
    for each in (
        changed_between, one_of_two_types, one_for_both, seventy_layers, without_gradients_beside, computed_in_place,
        wider_into_narrower, lists_of_views, lists_without_counts, one_hot_of_places, more_operators,
    )
}  # fmt: skip
