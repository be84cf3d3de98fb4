"""Backward in two parts: what inputs need now, gradients of weights later.

::

    forward     x ──> [linear] ──> y            D   gradient of x = g @ weight; x and g are kept
                weight ──┘                      W   gradient of weight = g.T @ x, and on into whatever weight is made of

Under the mode each ``torch.nn.functional.linear`` whose weight requires grad is such a node. What uses weights
otherwise has their gradients with those of its inputs; so has a linear layer whose weight is made of the stage's input,
or by operations which backward goes through once only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshcomm._torch import function_of, functorch_active, keeps_tensors
from meshcomm.errors import fail

WHERE = "pipelined"


class Product(NamedTuple):
    """What the gradients of a weight and a bias are made of."""

    weight: GradientEdge | None
    bias: GradientEdge | None
    x: Tensor
    gradient: Tensor


class WeightsLater(TorchFunctionMode):
    """Inside, linear layers leave the gradients of their weights to :meth:`finish`, which comes after backward."""

    def __init__(self) -> None:
        super().__init__()
        self._products: list[Product] = []
        self.open = False
        """Whether the backward that runs is the pipeline's, and not one that a stage does within its forward."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Backward for the inputs: what a checkpoint within a stage computes again is what forward has computed."""
        self.open = True
        try:
            with self:
                yield
        finally:
            self.open = False

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Forward, for the first time or again."""
        was, self.open = self.open, False
        try:
            with self:
                yield
        finally:
            self.open = was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ranks = weight.ndim, 1 if bias is None else bias.ndim
        if not weight.requires_grad or ranks != (2, 1) or functorch_active() or not _separate(weight, bias):
            return functional.linear(input, weight, bias)
        x = input
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # what is kept is what is multiplied
            x, weight, bias = (_cast(each, torch.get_autocast_dtype(kind)) for each in (x, weight, bias))
        # The weight itself stays out of the graph: nodes behind it shall run once, when its gradient is there.
        edges = _edge(weight), _edge(bias)
        start = torch.empty(0, requires_grad=True, device=x.device)
        plain = None if bias is None else bias.detach()
        y: Tensor = _Linear.apply(start, x, weight.detach(), plain, edges, self)  # type: ignore[no-untyped-call]
        return y

    def keep(self, product: Product) -> None:
        """For :meth:`finish`."""
        self._products.append(product)

    @torch.no_grad()
    def finish(self) -> None:
        """The gradients of the weights."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        products, self._products = self._products, []
        for weight, bias, x, gradient in products:
            g = gradient.reshape(-1, gradient.shape[-1])
            if weight is not None:
                edges.append(weight)
                gradients.append(g.t() @ x.reshape(-1, x.shape[-1]).conj())
            if bias is not None:
                edges.append(bias)
                gradients.append(g.sum(0))
        del products
        if edges:
            torch.autograd.backward(edges, gradients)


def _edge(x: Tensor | None) -> GradientEdge | None:
    return get_gradient_edge(x) if x is not None and x.requires_grad else None


def _separate(*weights: Tensor | None) -> bool:
    """Whether backward may go into what these are made of by itself: they are parameters, or these cut or gathered, and
    not made of what the stage is given.
    """
    left = [x.grad_fn for x in weights if x is not None and x.grad_fn is not None]
    while left:
        node: Any = left.pop()
        if getattr(node, "begins_stage", False) or _saves(node):
            return False
        left += [after for after, _ in node.next_functions if after is not None]
    return True


def _saves(node: Any) -> bool:
    """Whether it keeps tensors, which are gone after backward; those that gather or cut parameters here keep none."""
    function = function_of(node)
    if function is None:
        return keeps_tensors(node)
    return function is _Linear or not function.__module__.startswith("meshcomm.")


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x


class _Linear(Function):
    """Gives the gradient of the input alone."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, edges: Any, later: WeightsLater
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edges, ctx.later = edges, later
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.edges
        if ctx.later.open:
            ctx.later.keep(Product(of_weight, of_bias, x.detach(), g.detach()))
        elif torch.is_grad_enabled():  # a derivative that a stage takes, and that is differentiated again
            weight = getattr(of_weight.node, "variable", None)
            if weight is None:
                what = "a stage differentiates what it computes, by weights that are made of other tensors."
                fail(WHERE, what, fix='a schedule without D and W, such as "1f1b"')
        return None, g @ weight.conj() if ctx.needs_input_grad[1] else None, None, None, None, None
