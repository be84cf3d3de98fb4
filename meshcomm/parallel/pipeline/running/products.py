"""Operations with a weight whose gradients can be made apart: that of the input now, those of weight and bias later.

linear    y = x weight.T + bias          x.grad = g weight          weight.grad = g.T x
matmul    y = x weight + bias            x.grad = g weight.T        weight.grad = x.T g          bias.grad = sums of g
conv      y = weight * x + bias          the two halves of torch's own convolution_backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Product(Protocol):
    """What is computed of an input, a weight and a bias."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x, where ``g`` is that of the result."""

    def of_weight(self, g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of a weight of this shape."""

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""


class Linear:
    """``torch.nn.functional.linear``: weight ``[out, in]``."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""
        return functional.linear(x, weight, bias)

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""
        return g @ weight.conj()

    def of_weight(self, g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight."""
        return _rows(g).t() @ _rows(x).conj()

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return _rows(g).sum(0)


class Matmul(Linear):
    """``x @ weight`` and ``torch.addmm``: weight ``[in, out]``."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""
        return g @ weight.t().conj()

    def of_weight(self, g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight."""
        return _rows(x).t().conj() @ _rows(g)


class Convolution(NamedTuple):
    """A convolution of any number of dims, or its transpose: its arguments as torch's backward takes them."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result."""
        return torch.convolution(x, weight, bias, *self)

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""
        return self._backward(g, x, weight, 0)

    def of_weight(self, g: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight, of which the shape alone is looked at."""
        return self._backward(g, x, g.new_empty(1).expand(shape), 1)

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return g.sum([at for at in range(g.ndim) if at != 1])

    def _backward(self, g: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        mask = [which == 0, which == 1, False]
        found: Tensor = torch.ops.aten.convolution_backward(g, x, weight, None, *self, mask)[which]
        return found


class Read(NamedTuple):
    """A call, understood."""

    product: Product
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def read(func: Any, args: Any, kwargs: Any) -> Read | None:
    """What a call multiplies by which weight; None where the two gradients cannot be made apart, or need not."""
    reader = READERS.get(func)
    if reader is None:
        return None
    try:
        found = reader(*args, **(kwargs or {}))
    except TypeError:  # other arguments: torch knows them, or says what is wrong
        return None
    if found is None or not isinstance(found.weight, Tensor) or not found.weight.requires_grad:
        return None
    return found if isinstance(found.x, Tensor) and _fits(found) else None


def _fits(call: Read) -> bool:
    product, x, weight, bias = call
    if isinstance(product, Convolution):
        outs = weight.shape[1] * product.groups if product.transposed else weight.shape[0]
        right = x.ndim == weight.ndim == len(product.stride) + 2 and not x.is_complex()
    else:
        outs = weight.shape[1 if isinstance(product, Matmul) else 0] if weight.ndim == 2 else 0
        right = weight.ndim == 2 and x.ndim > 0
    return right and (bias is None or (isinstance(bias, Tensor) and bias.shape == (outs,)))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Read:
    return Read(_LINEAR, input, weight, bias)


def _matmul(input: Tensor, other: Tensor) -> Read:
    return Read(_MATMUL, input, other, None)


def _mm(input: Tensor, mat2: Tensor) -> Read:
    return Read(_MATMUL, input, mat2, None)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Read | None:
    return Read(_MATMUL, mat1, mat2, input) if beta == alpha == 1 else None


def _convolution(dims: int) -> Callable[..., Read | None]:
    def convolution(input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                    groups: int = 1) -> Read | None:  # fmt: skip
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
            if padding != "valid" and any(each % 2 for each in reach):
                return None  # one more on one side
            padding = [0 if padding == "valid" else each // 2 for each in reach]
        sizes = _each(stride, dims), _each(padding, dims), _each(dilation, dims)
        return Read(Convolution(*sizes, False, [0] * dims, groups), input, weight, bias)

    return convolution


def _transposed(dims: int) -> Callable[..., Read]:
    def convolution(input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                    output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Read:  # fmt: skip
        sizes = _each(stride, dims), _each(padding, dims), _each(dilation, dims)
        return Read(Convolution(*sizes, True, _each(output_padding, dims), groups), input, weight, bias)

    return convolution


def _each(value: Any, dims: int) -> list[int]:
    found = list(value) if isinstance(value, (tuple, list)) else [value]
    return found * dims if len(found) == 1 else found


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


_LINEAR, _MATMUL = Linear(), Matmul()
READERS: dict[Any, Callable[..., Read | None]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    **{getattr(functional, f"conv{dims}d"): _convolution(dims) for dims in (1, 2, 3)},
    **{getattr(functional, f"conv_transpose{dims}d"): _transposed(dims) for dims in (1, 2, 3)},
}
"""Who reads a call of each."""
