"""Backward in two parts: what inputs need now, gradients of weights later.

::

    forward     x ──> [linear] ──> y            D   gradient of x = g @ weight; x and g are kept
                weight ──┘                      W   gradient of weight = g.T @ x, and on into whatever weight is made of

Under the mode each linear layer, convolution and product with a matrix whose weight requires grad is such a node, those
in ``nn.MultiheadAttention`` too. What uses weights otherwise (norms, embeddings, recurrent layers, ``einsum``) has
their gradients with those of its inputs; so has a layer whose weight is made of the stage's input, or by operations
which backward goes through once only, and all of a stage that is compiled: its graph has one backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from meshcomm._torch import attention_of_linears, function_of, functorch_active, keeps_tensors
from meshcomm.errors import fail
from meshcomm.parallel.pipeline.running.products import READERS, Product, Read, read

WHERE = "pipelined"


class Owed(NamedTuple):
    """What the gradients of a weight and a bias are made of."""

    product: Product
    shape: torch.Size
    """Of the weight."""
    weight: GradientEdge | None
    bias: GradientEdge | None
    x: Tensor
    gradient: Tensor


class WeightsLater(TorchFunctionMode):
    """Inside, layers leave the gradients of their weights to :meth:`finish`, which comes after backward."""

    def __init__(self, edges: dict[int, GradientEdge] | None = None) -> None:
        """``edges``: of parameters, by ``id``; kept from microbatch to microbatch of a step."""
        super().__init__()
        self._owed: list[Owed] = []
        self._edges = {} if edges is None else edges
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
        kwargs = kwargs or {}
        inside = None if func in READERS else attention_of_linears(func)
        if func not in READERS and inside is None:  # nearly all
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if inside is not None:
                with self:
                    return inside(*args, **kwargs)
            call = read(func, args, kwargs)
            if call is not None and not functorch_active() and _separate(call.weight, call.bias):
                return self._apart(call)
        return func(*args, **kwargs)

    def _apart(self, call: Read) -> Tensor:
        product, x, weight, bias = call
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # what is kept is what is multiplied
            x, weight, bias = (_cast(each, torch.get_autocast_dtype(kind)) for each in (x, weight, bias))
        # The weight itself stays out of the graph: nodes behind it shall run once, when its gradient is there. Autograd
        # sees no tensors in a tuple.
        edges = self._edge(weight), self._edge(bias)
        start = None if x.requires_grad else torch.empty(0, requires_grad=True, device=x.device)
        y: Tensor = _Apart.apply(start, x, (_alone(weight), bias), product, edges, self)  # type: ignore[no-untyped-call]
        return y

    def _edge(self, x: Tensor | None) -> GradientEdge | None:
        if x is None or not x.requires_grad:
            return None
        if x.grad_fn is not None:
            return get_gradient_edge(x)
        found = self._edges.get(id(x))  # the node of a leaf keeps it alive, so that no other one has its id
        if found is None:
            found = self._edges[id(x)] = get_gradient_edge(x)
        return found

    def keep(self, owed: Owed) -> None:
        """For :meth:`finish`."""
        self._owed.append(owed)

    @torch.no_grad()
    def finish(self) -> None:
        """The gradients of the weights."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        every, self._owed = self._owed, []
        for product, shape, weight, bias, x, gradient in every:
            if weight is not None:
                edges.append(weight)
                gradients.append(product.of_weight(gradient, x, shape))
            if bias is not None:
                edges.append(bias)
                gradients.append(product.of_bias(gradient))
        del every
        if edges:
            torch.autograd.backward(edges, gradients)


def _alone(x: Tensor) -> Tensor:
    """Without what it is made of."""
    return x if x.grad_fn is None else x.detach()


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
    return function is _Apart or not function.__module__.startswith("meshcomm.")


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x


class _Apart(Function):
    """Gives the gradient of the input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor | None,
        x: Tensor,
        factors: tuple[Tensor, Tensor | None],
        product: Product,
        edges: Any,
        later: WeightsLater,
    ) -> Tensor:
        weight, bias = factors
        ctx.save_for_backward(x, weight)
        ctx.kept = product, edges, later
        return product.run(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product, (of_weight, of_bias), later = ctx.kept
        if later.open:
            later.keep(Owed(product, weight.shape, of_weight, of_bias, _alone(x), _alone(g)))
        elif torch.is_grad_enabled():  # a derivative that a stage takes, and that is differentiated again
            weight = getattr(of_weight.node, "variable", None)
            if weight is None:
                what = "a stage differentiates what it computes, by weights that are made of other tensors."
                fail(WHERE, what, fix='a schedule without D and W, such as "1f1b"')
        of_input = product.of_input(g, x, weight) if ctx.needs_input_grad[1] else None
        return None, of_input, None, None, None, None
