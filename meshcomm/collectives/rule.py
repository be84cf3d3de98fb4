"""How a collective is made differentiable, once for all of them.

A :class:`Rule` says what a collective does on plain tensors and what its transpose is, in terms of other rules; the
rest is said by the collective's :class:`Op`. From that come four ways to run it, chosen per call, the cheapest last:
traced into one graph under torch.compile, an autograd.Function that knows vmap and jvp under a torch.func transform,
one that only knows backward, and the bare call. Since a backward runs rules again, derivatives of every order follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import (
    dual_level_open,
    forward_mode_on,
    functorch_active,
    hook_for_nodes,
    in_graph,
    is_view,
    let_into_graph,
    outside_dispatch_modes,
    outside_transforms,
    primal_of,
    profiler_on,
    shortened,
    unwrap_if_dead,
)
from meshcomm.axis import Axis, axis_with_key
from meshcomm.errors import fail
from meshcomm.runtime.call import UNSEEN, Call, told
from meshcomm.runtime.hooks.ranges import in_range
from meshcomm.runtime.ops import Op
from meshcomm.runtime.whose import Whose

Params = tuple[Any, ...]
Described = tuple[Any, ...]
"""Path, dtype and shape of each leaf of a pytree, where that is told."""


class Rule:
    """One collective on one tensor."""

    def __init__(
        self,
        op: Op,
        run: Callable[..., Tensor],
        transpose: Callable[..., Tensor],
        *,
        params: tuple[str, ...] | None = None,
        tangent: Callable[..., Tensor] | None = None,
        saves: bool = False,
        ragged: str | None = None,
        whose: str | None = None,
        key: str = "",
        own: Callable[..., Tensor] | None = None,
    ) -> None:
        """``run(x, axis, *params)``; ``transpose(g, axis, *params)``.

        params: their names, by default those of the Op's arguments that are compared, which stand first in any case;
            those that are dims are moved along when a batch dim comes in front.
        tangent: ``tangent(t, axis, *params)``, by default the rule itself, which is right for what is linear.
        saves: whether the derivative depends on the value; transpose and tangent then get ``x, y`` before the params.
        ragged: the param that names the one dim whose length may differ between ranks, where the transport sees no
            shapes.
        whose: the param, one that is not compared, that says which leaf's gradient it sums; that makes it another rule.
        key: what it is called among the rules, if not as its Op and those of the two that were named.
        own: ``run`` of a tensor that nobody else has, which it may write to; ``for_own`` is the rule that does so.
        """
        self.op, self.name = op, op.name
        self.local = not op.communicates
        self.meets = op.gives != "I"  # ranks wait for each other in backward
        self.key = key or self.name + (", by value" if saves else "" if whose is None else ", of a leaf")
        self.params = params = op.compared if params is None else params
        self.run = run
        self.transpose = transpose
        self.tangent = tangent
        self.saves = saves
        self.shift = tuple(params.index(dim) for dim in op.dims)
        self.ragged = None if ragged is None else params.index(ragged)
        self.whose = None if whose is None else params.index(whose)
        self.agreed = tuple(param for param in params if param in op.compared)
        # Function.apply looks for torch.func and what has leaked out of it, which `apply` below does: 3 of 10 µs.
        self.node: Any = super(Function, shortened(_backward_only(self), "call", "call_site")).apply  # type: ignore[misc]
        self.function: Any = _for_transforms(self).apply
        _rules[self.key] = self
        self.note = self.noted  # always the same object
        self.takes = False  # nobody else has what it is given, and it is not looked at again
        self.for_own = self
        if own is not None:
            self.for_own = copy.copy(self)  # where a gradient is needed and under transforms it does as this one
            self.for_own.run, self.for_own.takes = own, True

    def batched(self, params: Params) -> Params:
        """The params for a tensor with one more dim in front."""
        return tuple(param + 1 if i in self.shift else param for i, param in enumerate(params))

    def noted(
        self,
        given: Params,
        dtype: torch.dtype,
        shape: torch.Size,
        tree: Described = (),
        needs_grad: bool | None = None,
        axis: Axis | None = None,
        whose: Whose | None = None,
    ) -> Call:
        """What all ranks say of a call with these params."""
        fixed = () if self.ragged is None else shape[: given[self.ragged]] + shape[given[self.ragged] + 1 :]
        said = self.name, given, self.agreed, needs_grad, axis, dtype, shape, fixed, tree, whose
        return tuple.__new__(Call, said + UNSEEN)  # half of what a named tuple's own way costs

    def announced(
        self,
        x: Tensor,
        axis: Axis,
        params: Params,
        needs_grad: bool | None,
        tree: Described,
        ended: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run it, and tell a link that wants to know meanwhile what is called. ``ended``: see :func:`later.start`."""
        link, given, before = axis.link, params[: len(self.agreed)], told.call
        whose = None if self.whose is None else params[self.whose]
        try:
            if link.briefly:
                told.call = self.note, given, x.dtype, x.shape, tree, needs_grad, axis, whose
                if ended is None and not profiler_on():
                    return self.run(x, axis, *params)
            elif link.watched:
                told.call = call = self.noted(given, x.dtype, x.shape, tree, needs_grad, axis, whose)
                link.announce(call)
            elif link.hears:
                told.call = (self.noted, given, x.dtype, x.shape), tree, whose
            run: Callable[..., Tensor] = self.run if ended is None else lambda *given: ended(self.run(*given))
            if self.local or not profiler_on():
                return run(x, axis, *params)
            with in_range(self.name, axis, x.dtype, x.shape):
                return run(x, axis, *params)
        finally:
            told.call = before


_rules: dict[str, Rule] = {}


def rule_named(name: str) -> Rule:
    """A rule by name: a transpose may stand in a file that imports this one's."""
    return _rules[name]


_is_compiling, _makes_graphs = torch.compiler.is_compiling, torch.is_grad_enabled


def apply(rule: Rule, x: Tensor, axis: Axis, params: Params = (), tree: Described = ()) -> Tensor:
    """Run ``rule`` on ``x`` in the way that the moment calls for. ``tree``: of which ``x`` is made."""
    if _is_compiling():
        return _compiled(rule, x, axis, params)
    if functorch_active() or dual_level_open():
        return rule.function(x, axis, params, tree)  # type: ignore[no-any-return]
    if x.requires_grad and _makes_graphs():
        return rule.node(unwrap_if_dead(x), (axis, params, tree))  # type: ignore[no-any-return]
    if axis.link.hears or profiler_on():
        return rule.announced(x, axis, params, False, tree)
    return rule.run(x, axis, *params)


def sums_of(rule: Rule, transpose: Callable[[Tensor, Axis], Tensor]) -> Callable[[Tensor, Axis], Tensor]:
    """``apply(rule, x, axis, ("sum",))`` of an all_reduce, the call that is made most: there is one Python call less at
    each step, and its node is handed the axis and nothing else. ``transpose``: that of the rule, of a sum.

    Where the backend sums a copy in place, as NCCL does, autograd's own nodes do, which are those of C++::

        x  ->  alias  ->  clone, and then summed in place
        g  <-  transpose, by a hook  <-  g
    """
    note, given = rule.note, ("sum",)

    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        link = axis.link
        link.ledger.at_once += 1
        y: Tensor
        if link.briefly:
            y = link.sum_told(x, (note, given, x.dtype, x.shape, (), True, axis, None))
        else:
            y = link.sum_now(link, x)
        return y.detach() if is_view(y) else y

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return transpose(g, ctx.axis), None

    kind = type(_title(rule), (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    node: Any = super(Function, shortened(kind, "axis")).apply  # type: ignore[misc]

    def hook_of(axis: Axis) -> Tensor:
        with outside_transforms(), outside_dispatch_modes():  # it outlives whatever the first user is in the middle of
            axis.sum_hook = hook_for_nodes(lambda g: None if g is None else transpose(g, axis))
        return axis.sum_hook

    def summed(x: Tensor, axis: Axis) -> Tensor:
        if _is_compiling() or functorch_active() or dual_level_open():
            return apply(rule, x, axis, ("sum",))
        link = axis.link
        announces = (link.hears and not link.briefly) or profiler_on()
        if x.requires_grad and _makes_graphs():
            x = unwrap_if_dead(x)
            if announces:
                return rule.node(x, (axis, given, ()))  # type: ignore[no-any-return]
            if link.sums_clones:
                hook = axis.sum_hook
                y = link.sum_now(link, x, hook_of(axis) if hook is None else hook)
                if y is not None:
                    return y  # type: ignore[no-any-return]
            return node(x, axis)  # type: ignore[no-any-return]
        if announces:
            return rule.announced(x, axis, given, False, ())
        if link.briefly:
            return link.sum_told(x, (note, given, x.dtype, x.shape, (), False, axis, None))
        return link.sum_now(link, x)  # type: ignore[no-any-return]

    return summed


def refuse_in_process(name: str, axis: Axis) -> None:
    """Compiled code runs without the change-overs that in-process ranks need."""
    _ = axis.link.hooks  # a graph is compiled again where somebody else listens: a trace is told of it then
    if axis.mesh.in_process and axis.size > 1:
        fail(
            name,
            "torch.compile does not work on in-process ranks.",
            fix="run the program on processes, or without compile",
        )


def _compiled(rule: Rule, x: Tensor, axis: Axis, params: Params) -> Tensor:
    refuse_in_process(rule.name, axis)
    let_into_graph()
    return _in_graph(x, axis.index_tensor, rule.key, axis.key, params)


@in_graph
def _in_graph(x: Tensor, index: Tensor, rule_key: str, axis_key: str, params: Params) -> Tensor:
    """One node for dynamo; what traces the graph further runs the Function below, transforms and all."""
    return _rules[rule_key].function(x, axis_with_key(axis_key).traced(index), params, ())  # type: ignore[no-any-return]


def _title(rule: Rule) -> str:
    return "".join(part.title() for part in rule.name.split("_"))


def _backward_only(rule: Rule) -> type[Function]:
    """The cheapest Function: no torch.func. Of a call it is told the axis, the params and the tree of which ``x`` is
    made, or in its place a list: the line, and the result that has been waited for.
    """
    run, saves, local = rule.run, rule.saves, rule.local

    def forward(ctx: Any, x: Tensor, call: tuple[Axis, Params, Any]) -> Tensor:
        axis, params, tree = call  # one argument, for each takes time
        ctx.call = axis, params
        link = axis.link
        link.ledger.at_once += 1
        y: Tensor
        if tree.__class__ is list:
            ctx.call_site, y = tree
        elif link.watched or link.briefly or (not local and (link.hears or profiler_on())):
            told.node = ctx
            try:
                y = rule.announced(x, axis, params, True, tree)
            finally:
                told.node = None
        else:
            y = run(x, axis, *params)
        if not local and is_view(y):
            y = y.detach()  # of memory that is its own: autograd would refuse to have it written to
        if saves:
            ctx.save_for_backward(x, y)
        return y

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        axis, params = ctx.call
        # Saved tensors are gone after one backward pass, even if there are none.
        return rule.transpose(g, axis, *(ctx.saved_tensors if saves else ()), *params), None

    return type(_title(rule), (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _for_transforms(rule: Rule) -> type[Function]:
    """A Function with vmap and jvp, for torch.func, forward mode and tracing."""

    def forward(x: Tensor, axis: Axis, params: Params, tree: Described) -> Tensor:
        return rule.announced(x, axis, params, None, tree)

    def setup_context(ctx: Any, inputs: tuple[Tensor, Axis, Params, Described], y: Tensor) -> None:
        x, ctx.axis, ctx.params, _ = inputs
        if rule.saves:
            ctx.save_for_backward(x, y)
            ctx.save_for_forward(x, y)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        saved = ctx.saved_tensors if rule.saves else ()
        return rule.transpose(g, ctx.axis, *saved, *ctx.params), None, None, None

    def jvp(ctx: Any, t: Tensor, *_: None) -> Tensor:
        if rule.tangent is None:
            return apply(rule, t, ctx.axis, ctx.params)
        # Torch switches forward mode off in here, and an outer jvp would lose the tangents of what follows.
        with forward_mode_on():
            return rule.tangent(t, ctx.axis, *(primal_of(saved) for saved in ctx.saved_tensors), *ctx.params)

    def vmap(
        info: Any, in_dims: tuple[int, None, None, None], x: Tensor, axis: Axis, params: Params, tree: Described
    ) -> tuple[Tensor, int]:
        # The batch goes in front on every rank, wherever each has it: a transport sees one layout.
        return apply(rule, x.movedim(in_dims[0], 0), axis, rule.batched(params), tree), 0

    return type(
        _title(rule),
        (Function,),
        {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
            "vmap": staticmethod(vmap),
        },
    )
