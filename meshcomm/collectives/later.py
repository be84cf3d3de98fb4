"""How a rule is run for later: begun here, and what it gives is a Pending; with a gradient that is two nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling

from meshcomm._torch import (
    backward_pass,
    dual_level_open,
    functorch_active,
    is_view,
    plain_apply,
    profiler_on,
    shortened,
    unwrap_if_dead,
    version_of,
)
from meshcomm.axis import Axis
from meshcomm.collectives.rule import Described, Params, Rule, apply
from meshcomm.errors import fail
from meshcomm.runtime.call import for_later, told
from meshcomm.runtime.callsite import call_site
from meshcomm.runtime.ledger import Entry
from meshcomm.runtime.pending import settled, then


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
    if is_compiling() or functorch_active() or dual_level_open():
        return apply(rule, x, axis, params, tree)
    if x.requires_grad and is_grad_enabled():
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
        self._end = ledger.wait(self._own)
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
            y = y.detach()  # as rule.py does it
        if x is not None:
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.pair.second_node(g, ctx.saved_tensors if ctx.pair.rule.saves else ())
        return g.new_empty(0), None, None


_start: Any = super(Function, shortened(_Start, "pair")).apply  # type: ignore[misc]
_finish: Any = plain_apply(_Finish, "pair")  # under a transform too
