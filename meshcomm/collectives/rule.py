"""How a collective is made differentiable, once for all of them.

A :class:`Rule` says what a collective does on plain tensors and what its transpose is, in terms of other rules; the
rest is said by the collective's :class:`Op`. From that come four ways to run it, chosen per call, the cheapest last:
traced into one graph under torch.compile, an autograd.Function that knows vmap and jvp under a torch.func transform,
one that only knows backward, and the bare call. Since a backward runs rules again, derivatives of every order follow.

:func:`start` is the same for later: the primitives give a Pending.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import (
    backward_pass,
    dual_level_open,
    forward_mode_on,
    functorch_active,
    hook_for_nodes,
    in_graph,
    is_view,
    let_into_graph,
    outside_dispatch_modes,
    outside_transforms,
    plain_apply,
    primal_of,
    profiler_on,
    shortened,
    unwrap_if_dead,
    version_of,
)
from meshcomm.errors import fail
from meshcomm.mesh import Axis, axis_with_key
from meshcomm.runtime.call import UNSEEN, Call, for_later, told
from meshcomm.runtime.callsite import call_site
from meshcomm.runtime.hooks.ranges import in_range
from meshcomm.runtime.ledger import Entry
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import settled, then
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
        """Run it, and tell a link that wants to know meanwhile what is called. ``ended``: see :func:`start`."""
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
        told_of = link.hears or profiler_on()
        if x.requires_grad and _makes_graphs():
            x = unwrap_if_dead(x)
            if told_of and (not link.briefly or profiler_on()):
                return rule.node(x, (axis, given, ()))  # type: ignore[no-any-return]
            if link.sums_clones:
                hook = axis.sum_hook
                y = link.sum_now(link, x, hook_of(axis) if hook is None else hook)
                if y is not None:
                    return y  # type: ignore[no-any-return]
            return node(x, axis)  # type: ignore[no-any-return]
        if not told_of:
            return link.sum_now(link, x)  # type: ignore[no-any-return]
        if not link.briefly or profiler_on():
            return rule.announced(x, axis, given, False, ())
        return link.sum_told(x, (note, given, x.dtype, x.shape, (), False, axis, None))

    return summed


def start(
    rule: Rule,
    x: Tensor,
    axis: Axis,
    params: Params = (),
    tree: Described = (),
    ended: Callable[[Tensor], Tensor] | None = None,
    needs_grad: bool = False,
) -> Any:
    """Begin ``rule`` on ``x``: the result, or a Pending of it. ``x`` may change after the call. ``ended``: what a
    caller that waits by itself does with either; then one node is made, as if :func:`apply` had been called.
    ``needs_grad``: whether ``x`` is that of a node that is made around it.
    """
    if _is_compiling() or functorch_active() or dual_level_open():
        return apply(rule, x, axis, params, tree)
    if x.requires_grad and _makes_graphs():
        return _start_node(rule, x, axis, params, tree, ended)
    link, one_read = axis.link, rule.op.primitive
    if not (rule.local or rule.takes or axis.size == 1 or (one_read and link.copies(one_read, x))):
        x = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    before, told.later = told.later, True  # as ``for_later`` does, without its calls
    try:
        if ended is None and not link.hears and not profiler_on():
            return rule.run(x, axis, *params)
        return rule.announced(x, axis, params, needs_grad, tree, ended)
    finally:
        told.later = before


def _start_node(
    rule: Rule, x: Tensor, axis: Axis, params: Params, tree: Described, ended: Callable[[Tensor], Tensor] | None
) -> Any:
    with torch.no_grad():
        raw = start(rule, x.detach(), axis, params, tree, ended, True)
    if ended is not None:
        site = call_site()
        return then(raw, lambda y: rule.node(unwrap_if_dead(x), (axis, params, [site, y])))
    pair = _Pair(rule, axis, params, version_of(x) if rule.saves else 0)
    token = _start(unwrap_if_dead(x), pair)
    return then(raw, lambda y: pair.finish(token, x, y))


class _Pair:
    """The two nodes of a collective, one where it was begun and one where it was waited for.

    Along the edge between them goes an empty tensor, in both directions: a buffer that a collective is still writing is
    never handed to autograd, which might add it up or look at it.

    In backward the second node comes first. The transpose is begun there, and waited for in the first node, if that
    gives the same order of collectives on all ranks: they may have waited in different orders, so it is held back until
    those that were begun after it, while it was under way, have been begun backwards; in the first node at the latest.
    """

    __slots__ = (
        "__weakref__", "_end", "_held", "_own", "_passes", "_since", "axis", "early", "params", "rule", "version", "y",
    )  # fmt: skip

    def __init__(self, rule: Rule, axis: Axis, params: Params, version: int) -> None:
        self.rule, self.axis, self.params, self.version = rule, axis, params, version
        self.y: Tensor | None = None
        self.early = False
        self._since = axis.link.ledger.at_once
        self._end: Entry | None = None  # of those begun after this one while it was under way
        self._passes: dict[int, _Pass] = {}  # that are between the two nodes
        self._held: dict[int, list[_Pair]] = {}  # those that begin after this one, by pass
        self._own = axis.link.ledger.begin(self)

    def finish(self, token: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The result as a function of ``x``."""
        if self.rule.saves and version_of(x) != self.version:
            fail(
                self.rule.name,
                "x was changed in place between the start and the wait, and its derivative needs it.",
                fix="change it after the wait, or pass x.clone()",
            )
        ledger = self.axis.link.ledger
        self._end = ledger.wait(self)
        self.early = not self.rule.saves and ledger.at_once == self._since
        self.y = y
        return _finish(token, x if self.rule.saves else None, self)  # type: ignore[no-any-return]

    def second_node(self, g: Tensor, saved: tuple[Tensor, ...]) -> None:
        """Take the gradient of the result, and begin the transpose if that may be."""
        number = backward_pass()
        self._passes[number] = _Pass(g, saved)
        if self.early and not (torch.is_grad_enabled() or torch.is_anomaly_enabled()):
            self._begin_in_turn(number)

    def _begin_in_turn(self, number: int) -> None:
        turn = [self]
        while turn:  # there may be thousands, each of which was held back by the next
            pair = turn.pop()
            mine = pair._passes.get(number)
            if mine is None or mine.begun:
                continue
            other = pair._not_begun(number)
            if other is not None:
                other._held.setdefault(number, []).append(pair)
                continue
            mine.gradient, mine.begun = for_later(True, pair._run, mine), True
            turn += reversed(pair._held.pop(number, ()))

    def _not_begun(self, number: int) -> _Pair | None:
        """The first of those that come before this one in backward that has not been begun there."""
        entry, last = self._own.following, -1 if self._end is None else self._end.number
        while entry is not None and entry.number <= last:
            other: _Pair | None = entry.call()
            if other is not None:
                there = other._passes.get(number)
                if there is None or not there.begun:
                    return other
                if other._end is not None and other._end.number > entry.number:
                    entry = other._end  # all up to there had been begun before it
            entry = entry.following
        return None

    def first_node(self) -> Tensor:
        """The gradient of ``x``."""
        number = backward_pass()
        mine = self._passes.pop(number)
        self._held.pop(number, None)
        gradient = mine.gradient if mine.begun else self._run(mine)
        return settled(gradient)  # type: ignore[no-any-return]

    def _run(self, what: _Pass) -> Any:
        return self.rule.transpose(what.g, self.axis, *what.saved, *self.params)


class _Pass:
    """One backward pass between the two nodes of a pair."""

    __slots__ = ("begun", "g", "gradient", "saved")

    def __init__(self, g: Tensor, saved: tuple[Tensor, ...]) -> None:
        self.g, self.saved = g, saved
        self.gradient: Any = None
        self.begun = False


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _Pair) -> Tensor:
        ctx.pair = pair
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.pair.first_node(), None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor | None, pair: _Pair) -> Tensor:
        ctx.pair = pair
        y, pair.y = pair.y, None
        assert y is not None
        if not pair.rule.local and is_view(y):
            y = y.detach()  # as below
        if x is not None:
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.pair.second_node(g, ctx.saved_tensors if ctx.pair.rule.saves else ())
        return g.new_empty(0), None, None


_start: Any = super(Function, shortened(_Start, "pair")).apply  # type: ignore[misc]
_finish: Any = plain_apply(_Finish, "pair")  # under a transform too


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
        elif link.hears or profiler_on():
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
