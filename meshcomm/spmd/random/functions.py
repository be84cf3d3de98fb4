"""What takes the place of each of torch's random functions under :func:`meshcomm.rng`: the part of a global draw, or an
error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.collectives.check import whole_number
from meshcomm.errors import fail, shape_text
from meshcomm.spmd.random import distributions
from meshcomm.spmd.random.draws import WHERE, Draws, Handler, called, noted_as_drawn
from meshcomm.spmd.random.parts import Part
from meshcomm.spmd.random.philox import Stream
from meshcomm.spmd.types.rules.torch_rules import kind_of

_handlers: dict[Any, Handler | None] = {}


def handler_of(func: Any) -> Handler | None:
    """What takes the place of a random function; None for one that is not random."""
    try:
        return _handlers[func]
    except KeyError:
        kind = kind_of(func)
        return _handlers.setdefault(func, _refuse_if_it_draws if kind.random or kind.drops is not None else None)


R = TypeVar("R", bound=Callable[..., Any])


def _handles(*funcs: Any) -> Callable[[R], R]:
    """The decorated function takes the place of these: ``(draws, func, *args, **kwargs)``."""

    def register(replacement: R) -> R:
        def handler(draws: Draws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs and kwargs.pop("generator", None) is not None:
                what = f"{called(func)} has a generator of its own, whose numbers differ or not as it was seeded."
                fail(WHERE, what, fix="leave generator= out, or draw outside of the context")
            _plain(func, args)
            return replacement(draws, func, *args, **kwargs)

        for func in funcs:
            _handlers[func] = handler
        return replacement

    return register


def _plain(func: Any, args: Sequence[Any]) -> None:
    for x in args:
        if isinstance(x, Tensor) and (hasattr(x, "to_local") or x.layout is not torch.strided):
            what = f"{called(func)} of a {type(x).__name__} in {x.layout}, which is not one dense tensor."
            fail(WHERE, what, fix="draw dense local parts")


# ----------------------------------------------------------------------------------------------------------- refusals


def _refuse(draws: Draws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    name = called(func)
    fix = "draw with torch.rand, randn, randint or bernoulli in its place, or call it outside of the context"
    for part, better in _INSTEAD.items():
        if part in name:
            fix = better
    fail(WHERE, f"{name} cannot draw a part of a global tensor.", got=f"layout {draws.cut.text!r}", fix=fix)


_INSTEAD = {
    "attention": "pass dropout_p=0, or drop weights by F.dropout between softmax and the product with v",
    "dropout": "F.dropout or nn.Dropout; for whole channels multiply by F.dropout of ones of their shape",
    "randperm": "torch.rand(n, ...).argsort() of what is whole on each rank, or draw it under mc.fork_rng(())",
    "multinomial": "add -log(-log(torch.rand_like(logits))) to the logits and take the argmax",
    "gumbel_softmax": "softmax of the logits minus torch.empty_like(logits).exponential_().log()",
    "rrelu": "leaky_relu, or a slope of torch.rand_like(x)",
}


def _refuse_if_it_draws(draws: Draws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    drops = kind_of(func).drops
    return _refuse(draws, func, args, kwargs) if drops is None or drops(args, kwargs) else func(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------- new tensors

Make = Callable[[Stream, Part, torch.dtype], Tensor]
_CPU = torch.device("cpu")
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _float(func: Any, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        fail(WHERE, f"{called(func)} in {dtype}.", fix="draw float16, bfloat16, float32 or float64, and convert")


def _form(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """An empty tensor such as ``func`` would give: torch reads the arguments."""
    if func in _FORMS:
        try:  # for it takes torch 200 µs to say what randn_like would give
            return _FORMS[func](*args, **kwargs, device="meta")
        except (TypeError, RuntimeError):
            pass  # and says what is wrong
    form: Tensor = func(*args, **kwargs, device="meta")
    return form


def _known_form(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[int], torch.dtype] | None:
    """Shape and dtype where they stand there, as nearly always: torch need not be asked."""
    if not args or func not in _SIZED or (kwargs and [*kwargs] != ["dtype"]):
        return None
    size, integers = args, func is torch.randint
    if type(args[-1]) in (tuple, list, torch.Size) and (len(args) == 1 or integers):
        size = args[-1]
    elif integers:
        return None
    dtype = kwargs.get("dtype") or _SIZED[func] or torch.get_default_dtype()
    if type(dtype) is not torch.dtype or not {int}.issuperset(map(type, size)) or min(size, default=0) < 0:
        return None
    return size, dtype


_SIZED = {torch.rand: None, torch.randn: None, torch.randint: torch.int64}
"""Functions that are told sizes, and their dtypes."""


def _form_of_integers(*args: Any, size: Any = None, dtype: torch.dtype = torch.int64, **kwargs: Any) -> Tensor:
    size = args[-1] if args and size is None else size
    if not isinstance(size, (tuple, list)):
        raise TypeError
    return torch.empty(size, dtype=dtype, **kwargs)


_FORMS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: torch.empty, torch.rand_like: torch.empty_like, torch.randn: torch.empty,
    torch.randn_like: torch.empty_like, torch.randint: _form_of_integers,
    torch.normal: lambda mean, std, size, **kwargs: torch.empty(size, **kwargs),
}  # fmt: skip


def _new(
    draws: Draws, func: Any, args: Sequence[Any], kwargs: dict[str, Any], make: Make, integers: bool = False
) -> Tensor:
    """What a function gives that makes a tensor."""
    like = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    given = out = None
    requires_grad = pinned = False
    if kwargs:
        given, out = kwargs.pop("device", None), kwargs.pop("out", None)
        requires_grad, pinned = kwargs.pop("requires_grad", False), kwargs.pop("pin_memory", False)
    if out is not None:
        given, kwargs = out.device, kwargs | {"dtype": out.dtype}
    elif given is None:
        given = like.device if like is not None else torch.get_default_device() if _torch.function_modes() else _CPU
    with _torch.without_modes():
        form, known = None, None if pinned else _known_form(func, args, kwargs)
        if known is None:
            form = _form(func, args, kwargs)
            known = form.shape, form.dtype
        shape, dtype = known
        if not integers:
            _float(func, dtype)
        device = given if isinstance(given, torch.device) else torch.device(given)
        y = draws.made(func, shape, device, lambda stream, part: make(stream, part, dtype))
        if out is not None:
            with torch.no_grad():
                y = out.resize_(shape).copy_(y)
        elif form is not None and (pinned or not form.is_contiguous()):
            y = torch.empty_like(form, device=given, pin_memory=pinned).copy_(y)
        elif y.dtype is not dtype:
            y = y.to(dtype)
    return noted_as_drawn(y.requires_grad_(requires_grad) if requires_grad else y)


@_handles(torch.rand, torch.rand_like)
def _rand(draws: Draws, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    return _new(draws, func, args, kwargs, distributions.uniform)


@_handles(torch.randn, torch.randn_like)
def _randn(draws: Draws, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    return _new(draws, func, args, kwargs, distributions.normal)


@_handles(torch.randint, torch.randint_like)
def _randint(draws: Draws, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    ends = [arg for arg in args if whole_number(arg)]
    if "high" in kwargs:
        ends.append(kwargs["high"])
    if "low" in kwargs:
        ends.insert(0, kwargs["low"])
    low, high = ends if len(ends) == 2 else (0, ends[0] if ends else 0)
    _range(func, low, high, torch.int64)

    def make(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
        _range(func, low, high, dtype)
        return distributions.integers(stream, part, low, high)

    return _new(draws, func, args, kwargs, make, integers=True)


def _range(func: Any, low: Any, high: Any, dtype: torch.dtype) -> None:
    """The integers from low to high - 1 are some, and numbers of this dtype."""
    least, most = _ends(dtype)
    if not (whole_number(low) and whole_number(high) and least <= low < high <= most + 1):
        what = f"{called(func)} from {low!r} to below {high!r} in {dtype}."
        fail(WHERE, what, fix=f"ints, low < high, from {least} to {most}")


@functools.cache
def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """From where to where a dtype holds all integers."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        return -most, most
    return torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**63 - 1)


@_handles(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(
    draws: Draws, func: Any, /, input: Tensor, p: float | None = None, *, out: Tensor | None = None
) -> Tensor:
    if p is None:
        _float(func, input.dtype)
    chosen = _below(draws, func, input, input if p is None else p)
    with _torch.without_modes(), torch.no_grad():
        out = torch.empty_like(input) if out is None else out.resize_(input.shape)
        y: Tensor = out.copy_(chosen)
    return noted_as_drawn(y)


def _below(draws: Draws, func: Any, x: Tensor, p: Any) -> Tensor:
    """Which elements of a tensor such as ``x`` come out as 1."""
    if isinstance(p, Tensor):
        with _torch.without_modes():
            p = p.detach().expand(x.shape)
            wrong = p.device.type == "cpu" and not _torch.functorch_active() and not bool(((p >= 0) & (p <= 1)).all())
    else:
        wrong = not 0 <= p <= 1
    if wrong:
        fail(
            WHERE,
            f"{called(func)} with a probability that is not from 0 to 1.",
            got="" if isinstance(p, Tensor) else repr(p),
        )
    chosen: Tensor = draws.draw(func, x.shape, x.device, lambda stream, part: distributions.below(stream, part, p))
    return chosen


@_handles(torch.normal)
def _normal(draws: Draws, func: Any, /, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        _deviation(func, std)

        def make(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
            return distributions.normal(stream, part, dtype).mul_(std).add_(mean)

        return _new(draws, func, (float(mean), float(std), size), kwargs, make)
    out = kwargs.get("out")
    with _torch.without_modes(), torch.no_grad():
        mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
        form: Tensor = func(*(x.to("meta") if isinstance(x, Tensor) else x for x in (mean, std)))
        _float(func, form.dtype)
        # A tensor of one number may stand on the CPU beside others elsewhere.
        first, *others = (x.device for x in (mean, std) if isinstance(x, Tensor))
        device = others[0] if others and first.type == "cpu" else first
        z = draws.draw(func, form.shape, device, lambda stream, part: distributions.normal(stream, part, form.dtype))
        y = z.mul_(_widened(std, z)).add_(_widened(mean, z)).to(form.dtype)
        if out is not None:
            y = out.resize_(form.shape).copy_(y)
    return noted_as_drawn(y)


def _widened(x: Any, z: Tensor) -> Any:
    return x.to(z.dtype) if isinstance(x, Tensor) else x


def _deviation(func: Any, std: Any) -> None:
    if not std >= 0:
        fail(WHERE, f"{called(func)} with the standard deviation {std!r}.", fix="0 or more")


# ----------------------------------------------------------------------------------------------------------- in place


def _into(draws: Draws, func: Any, x: Tensor, make: Callable[[Stream, Part], Tensor]) -> Tensor:
    values = draws.draw(func, x.shape, x.device, make)
    with _torch.without_modes():
        x.copy_(values)
    return noted_as_drawn(x)


@_handles(Tensor.uniform_)
def _uniform_(draws: Draws, func: Any, /, x: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: float) -> Tensor:
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    _float(func, x.dtype)
    if not low <= high or not math.isfinite(high - low):
        fail(WHERE, f"{called(func)} from {low!r} to {high!r}.", fix="finite numbers, the lower one first")

    def make(stream: Stream, part: Part) -> Tensor:
        y = distributions.uniform(stream, part, x.dtype)
        if (low, high) == (0, 1):
            return y
        y = y.mul_(high - low).add_(low).to(x.dtype)
        return y.masked_fill_(y >= high, low)  # which may have been rounded up

    return _into(draws, func, x, make)


@_handles(Tensor.normal_)
def _normal_(draws: Draws, func: Any, /, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    _float(func, x.dtype)
    _deviation(func, std)
    return _into(draws, func, x, lambda stream, part: distributions.normal(stream, part, x.dtype).mul_(std).add_(mean))


@_handles(Tensor.exponential_)
def _exponential_(draws: Draws, func: Any, /, x: Tensor, lambd: float = 1.0) -> Tensor:
    _float(func, x.dtype)
    if not lambd > 0:
        fail(WHERE, f"{called(func)} with lambd={lambd!r}.", fix="a number above 0")
    form = torch.finfo(x.dtype)
    least = form.smallest_normal * form.eps  # its logarithm is finite

    def make(stream: Stream, part: Part) -> Tensor:
        return distributions.exponential(stream, part, x.dtype).div_(lambd).clamp_(min=least)

    return _into(draws, func, x, make)


@_handles(Tensor.bernoulli_)
def _bernoulli_(draws: Draws, func: Any, /, x: Tensor, p: Any = 0.5) -> Tensor:
    chosen = _below(draws, func, x, p)
    with _torch.without_modes():
        x.copy_(chosen)
    return noted_as_drawn(x)


@_handles(Tensor.random_)
def _random_(draws: Draws, func: Any, /, x: Tensor, *ends: int | None, **kwargs: int | None) -> Tensor:
    given = list(ends)
    low = kwargs.get("from", given.pop(0) if len(given) == 2 else 0)
    high = kwargs.get("to", given.pop(0) if given else None)
    last = _ends(x.dtype)[1] + 1 if high is None else high
    first = 0 if low is None else low
    _range(func, first, last, x.dtype)
    return _into(draws, func, x, lambda stream, part: distributions.integers(stream, part, first, last))


# ------------------------------------------------------------------------------------------------------------ dropout


@_handles(F.dropout, torch.dropout, torch.dropout_)
def _dropout(
    draws: Draws,
    func: Any,
    /,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> Tensor:
    if not 0 <= p <= 1:
        fail(WHERE, f"{called(func)} with p={p!r}.", fix="a probability from 0 to 1")
    if not training or not train or p == 0:
        return input
    kept = noted_as_drawn(_below(draws, func, input, 1 - p))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    # From here on an ordinary product, for autograd and for whoever watches.
    if inplace or func is torch.dropout_:
        return input.mul_(kept).mul_(scale)
    return input.mul(kept).mul(scale)


# ------------------------------------------------------------------------------------------------------------ nn.init
# It calls the methods above, except that these three ask first. The fans are those of the global tensor.


@_handles(nn.init.uniform_)
def _init_uniform(draws: Draws, func: Any, /, tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    with torch.no_grad():
        return _uniform_(draws, func, tensor, a, b)


@_handles(nn.init.normal_)
def _init_normal(draws: Draws, func: Any, /, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    with torch.no_grad():
        return _normal_(draws, func, tensor, mean, std)


@_handles(nn.init.kaiming_uniform_)
def _init_kaiming(
    draws: Draws, func: Any, /, tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> Tensor:
    whole = draws.part(tensor.shape, func).whole
    if len(whole) < 2 or mode.lower() not in ("fan_in", "fan_out"):
        got = f"x {shape_text(tensor.dtype, tensor.shape)}; mode={mode!r}"
        fail(WHERE, "nn.init.kaiming_uniform_ goes by a fan.", got=got, fix="two dims or more; 'fan_in' or 'fan_out'")
    if 0 in whole:
        return tensor
    fan = math.prod(whole[1:]) if mode.lower() == "fan_in" else whole[0] * math.prod(whole[2:])
    bound = math.sqrt(3.0) * (nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    return _init_uniform(draws, func, tensor, -bound, bound)


def _size(draws: Draws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The global tensor's shape, where nn.init asks a part for its own to get the fans."""
    if "calculate_fan" not in draws.in_init():
        return func(*args, **kwargs)
    whole = torch.Size(draws.part(args[0].shape, nn.init.xavier_uniform_).whole)
    return whole[args[1]] if len(args) > 1 else whole


_handlers[Tensor.size] = _handlers[Tensor.shape.__get__] = _size  # type: ignore[attr-defined]
