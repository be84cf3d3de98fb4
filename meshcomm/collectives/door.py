"""The door of all collectives: what a type checker knows of how they may be called, who stands between the call and
the function (who watches this thread, the call's own time-out), and how a rule of one tensor is run on a pytree.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from typing_extensions import Required, TypedDict

from meshcomm._torch import dual_level_open, functorch_active, profiler_on
from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.collectives.later import start
from meshcomm.collectives.rule import Params, Rule, apply
from meshcomm.collectives.trees import buckets
from meshcomm.collectives.trees.buckets import ELEMENTS, Rows
from meshcomm.limit import Kind, Limit
from meshcomm.mesh import Mesh
from meshcomm.runtime.call import Begun, Call, for_later, given_up, is_agreed, told
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then, then_all
from meshcomm.runtime.transports.protocol import Link
from meshcomm.watch import by_name, here
from meshcomm.work import begun


class Now(TypedDict, total=False):
    """The keywords of a call that gives its result."""

    mesh: Mesh | None
    async_op: Literal[False]
    timeout: float | timedelta | None


class Later(TypedDict, total=False):
    """The keywords of a call that gives a Work of it."""

    mesh: Mesh | None
    async_op: Required[Literal[True]]
    timeout: None


class Either(TypedDict, total=False):
    """The keywords of a call of which only the run knows which of the two it gives."""

    mesh: Mesh | None
    async_op: Required[bool]
    timeout: None


class NowOfTree(Now, total=False):
    """The same where x may be a pytree."""

    bucket_mb: float


class LaterOfTree(Later, total=False):
    """The same where x may be a pytree."""

    bucket_mb: float


class EitherOfTree(Either, total=False):
    """The same where x may be a pytree."""

    bucket_mb: float


class NowOfLocal(TypedDict, total=False):
    """The same where nothing is sent, for which nobody waits."""

    mesh: Mesh | None
    async_op: Literal[False]
    bucket_mb: float


class LaterOfLocal(TypedDict, total=False):
    """The same where nothing is sent, for which nobody waits."""

    mesh: Mesh | None
    async_op: Required[Literal[True]]
    bucket_mb: float


class EitherOfLocal(TypedDict, total=False):
    """The same where nothing is sent, for which nobody waits."""

    mesh: Mesh | None
    async_op: Required[bool]
    bucket_mb: float


def aside(fn: Callable[..., Any], /, *args: Any) -> Any:
    """A call of ``fn``, a public collective, that is watched or has a time-out: by who watches, or with a Limit in
    place of ``async_op``. Each of the two calls ``fn`` again without itself. ``args``: all, as ``fn`` has them.
    """
    if here.watcher is not None:
        return here.watcher.called(fn, args)
    given = by_name(fn, args)
    given["async_op"] = Limit(fn.__name__, given.pop("timeout"), given["async_op"])
    mine: Begun = []  # its own, for to be back from fn is one more place where Ctrl-C comes
    before, told.begun, told.waits = told.begun, mine, True
    try:
        return fn(**given)
    except BaseException as error:
        given_up(mine, error)
        raise
    finally:
        told.begun, told.waits = before, False


def carried(
    rule: Rule,
    x: Any,
    axis: Axis,
    fits: Callable[..., Params] | None,
    given: tuple[Any, ...],
    bucket_mb: float,
    async_op: bool | Limit,
    in_rows: Callable[..., tuple[Params, Rows]] | None = None,
    *,
    shaped: Callable[[Tensor], Tensor] | None = None,
    ragged: int | None = None,
) -> Any:
    """What a collective gives of a tensor or a pytree, or the Work of it.

    Args:
        rule: what is done to one tensor.
        x: the tensor or the pytree.
        axis: over which.
        fits: ``fits(tensor, axis, *given)`` is what the rule is given beside it; raises for one that it cannot take.
            None: it takes any, with what was given.
        given: what the user gave beside x; those that are dims first, in the order of the Op's.
        bucket_mb: the MiB of the leaves that go together.
        async_op: whether to give a Work, or within which limit to wait.
        in_rows: ``in_rows(axis, *given)`` is what the rule is given beside a bucket, and how leaves lie in it; None:
            each leaf goes by itself.
        shaped: what the rule takes in place of a tensor; the tensor by default.
        ragged: as in :func:`buckets.leaves_of`.
    """
    if isinstance(x, Tensor):
        check.tensor(rule.name, x, axis)
        own = x if shaped is None else shaped(x)
        params = given if fits is None else fits(own, axis, *given)
        return given_by(rule, own, axis, params, async_op, x)
    return _carried_tree(rule, x, axis, fits, given, bucket_mb, async_op, in_rows, shaped, ragged)


def _carried_tree(
    rule: Rule,
    x: Any,
    axis: Axis,
    fits: Callable[..., Params] | None,
    given: tuple[Any, ...],
    bucket_mb: float,
    async_op: bool | Limit,
    in_rows: Callable[..., tuple[Params, Rows]] | None,
    shaped: Callable[[Tensor], Tensor] | None,
    ragged: int | None,
) -> Any:
    def params_of(leaf: Tensor) -> Params:
        return given if fits is None else fits(leaf if shaped is None else shaped(leaf), axis, *given)

    where, dims = rule.name, dict(zip(rule.op.dims, given, strict=False))
    run = partial(start, ended=_as_it_is) if isinstance(async_op, Limit) else start if async_op else apply
    packed = None if in_rows is None else in_rows(axis, *given)
    by_itself = packed is not None and packed[1] is ELEMENTS
    leaves, form, said, alike = buckets.leaves_of(
        where, x, axis, params_of, ragged, dims, any_shape=by_itself, gradients=rule.meets
    )
    leaves = leaves if shaped is None else [shaped(leaf) for leaf in leaves]
    heard = (said,) if rule.local and said else ()  # in backward alone
    if packed is None:
        done = then_all(
            [run(rule, leaf, axis, (*params_of(leaf), *heard), () if at else said) for at, leaf in enumerate(leaves)],
            list,
        )
    else:
        params, rows = packed
        params = *params, *heard
        done = buckets.in_buckets(
            where,
            leaves,
            axis,
            bucket_mb,
            lambda flat, of, is_own: run(rule.for_own if is_own else rule, flat, axis, params, of),
            rows,
            rule.saves,
            said,
            alike=alike,
            # where nobody sees whether it is the same leaves on all ranks
            all_need=rule.meets and not said and axis.size > 1,
        )
    tree = then(done, lambda leaves: buckets.rebuild(leaves, form))
    return _handed(where, axis, None, tree, async_op) if async_op else tree


def by_elements(axis: Axis, *given: Any) -> tuple[Params, Rows]:
    """``in_rows`` of what treats all elements alike."""
    return given, ELEMENTS


def given_by(rule: Rule, x: Tensor, axis: Axis, params: Params, how: bool | Limit, seen: Tensor | None = None) -> Any:
    """What a collective gives of one tensor that it can take. ``seen``: as the user has it."""
    if how is not True:
        return started(rule, x, axis, params, how, seen) if how else apply(rule, x, axis, params)
    if is_compiling() or functorch_active() or dual_level_open() or (x.requires_grad and is_grad_enabled()):
        return started(rule, x, axis, params, how, seen)
    link, given, one_read = axis.link, x, rule.op.primitive  # as `start` does it, without its call
    if not (rule.local or axis.size == 1 or (one_read and link.copies(one_read, x))):
        given = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    before, told.later = told.later, True
    try:
        if link.hears or profiler_on():
            result = rule.announced(given, axis, params, False, ())
        else:
            result = rule.run(given, axis, *params)
    finally:
        told.later = before
    return begun(rule.name, axis, x if seen is None else seen, result, _OURS)


_OURS = 2
"""The frames from the one that looks for the user's line to the public function, or to who carries for it."""


def started(rule: Rule, x: Tensor, axis: Axis, params: Params, how: bool | Limit, seen: Tensor | None = None) -> Any:
    """What a collective that does not wait, or within a limit, gives of one tensor. ``seen``: as the user has it."""
    seen = x if seen is None else seen
    if isinstance(how, Limit):
        return start(rule, x, axis, params, ended=lambda y: how.settled(rule.name, axis, seen, y))
    return begun(rule.name, axis, seen, start(rule, x, axis, params), _OURS)


def _handed(what: str, axis: Axis, x: Tensor | Kind | None, result: Any, how: bool | Limit) -> Any:
    """A result that may be under way, within the limit, or the Work of it."""
    return how.settled(what, axis, x, result) if isinstance(how, Limit) else begun(what, axis, x, result)


def made(
    op: Op, given: tuple[object, ...], axis: Axis, x: Tensor | Kind | None, how: bool | Limit, go: Callable[[Link], Any]
) -> Any:
    """What ``go`` makes of the link of the axis where nothing is differentiable, or the Work of it. ``given``: those of
    the arguments that are compared; ``x``: a tensor that all give alike, or what is known of one that not all have.
    """
    seen = (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else (None, ())
    link, names = axis.link, op.compared[: len(given)]
    before = told.call, told.begun, told.later
    mine: Begun = told.begun if how and isinstance(how, Limit) else []  # that of `aside`, or as `all_or_none` does it
    if link.watched and is_agreed(link):
        mine = None
    told.begun = mine
    try:
        if how or (link.watched and not link.briefly) or profiler_on():
            with calling(axis, Call(op.name, given, names, None, axis, *seen)):
                y = for_later(bool(how), go, link)
                return _handed(op.name, axis, x, y, how) if how else y
        if link.hears and not link.watched:  # the same in fewer steps
            told.call = (Call, op.name, given, names, None, None, *seen, ()), (), None
        else:
            told.call = Call(op.name, given, names, None, axis, *seen)
        told.later = False
        return go(link)
    except BaseException as error:
        given_up(mine, error)
        raise
    finally:
        told.call, told.begun, told.later = before


def kept(x: Tensor, later: bool | Limit) -> Tensor:
    """A copy of what is read after the call, if it is."""
    return x.detach().clone(memory_format=torch.contiguous_format) if later else x


def _as_it_is(y: Any) -> Any:
    """Of a tree: all parts are begun before one of them is waited for."""
    return y
