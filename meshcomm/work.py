"""Futures: what a collective with ``async_op=True`` returns."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from threading import get_ident
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm._torch.backward import backward_pass
from meshcomm.axis import Axis
from meshcomm.errors import CommError, fail
from meshcomm.limit import Kind, not_done
from meshcomm.runtime.call import Call
from meshcomm.runtime.callsite import known_files
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import forks
from meshcomm.runtime.recorder import CALL, ENDED, THREAD, Named, Record, made, public_call
from meshcomm.runtime.transports.threads.scheduler import current_rank, local
from meshcomm.runtime.transports.underway import Started
from meshcomm.watch import here, paused

T = TypeVar("T", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
K = TypeVar("K")

_Lock = type(threading.RLock())  # half of what asking for one by its function costs
_EAGER_TURNS = 50
"""How often an ``await`` gives the event loop a turn before it sleeps in between."""


class Work(Generic[T]):
    """The result of a collective that is under way: ``mc.all_reduce(x, "dp", async_op=True)``.

    It keeps what the collective needs, and x may be changed meanwhile. What :meth:`wait` gives is the result of the
    synchronous call, differentiable where that is; in the backward pass the transposed collective starts where the
    wait was and is waited for where the start was, so it overlaps with what lay between them. Each ``Work`` must be
    waited for: one that is dropped warns, with the line that made it.

    On an accelerator :meth:`wait` orders the streams and does not block the host. Ranks in one process change over to
    each other in ``wait``, ``done`` and ``await`` (who polls while nobody else can act is told of a deadlock after a
    thousand times). Under a ``torch.func`` transform, in forward mode and on an axis of
    size 1 the work is done when it is made; under ``torch.compile`` the compiler moves starts and waits apart.

    Source: futures of ``torch.distributed``, ``concurrent.futures`` and MPI's requests.
    """

    __slots__ = (
        "__weakref__", "_axis", "_began", "_call", "_claimed", "_error", "_lock", "_look", "_modes", "_over", "_rank",
        "_source", "_value",
    )  # fmt: skip
    _value: T
    _error: BaseException | None
    _call: Any
    """A :class:`Call`, or what makes it."""
    _axis: Axis | None
    _rank: Any
    _lock: Any
    """Ranks of one process need none: they run one at a time."""
    _look: Callable[[Any], object] | None
    """Who looks at the result before anybody has it."""

    def __init__(self, source: Any, call: Any = None, axis: Axis | None = None) -> None:
        self._claimed, self._over = True, False
        self._error = self._rank = self._lock = self._look = None
        self._call = call
        self._axis = axis
        if not isinstance(source, Pending):
            self._over, self._value = True, source
            return
        self._source: Any = source
        if not source.bare:
            self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._rank = rank = local.rank
        if rank is None:
            self._lock = _Lock()
        self._began = time.monotonic()
        self._claimed = False  # now it is made

    def wait(self, timeout: float | None = None) -> T:
        """The result; waits until it is there. Asking again gives the same again.

        Args:
            timeout: seconds after which to give up for now; None waits as long as the mesh's own time-out. Among the
                ranks of one process no time passes: it runs out when no rank can go on.

        Returns: what the synchronous call returns.

        Raises:
            CommError: the time is up (nothing is lost: wait again); the collective failed, and then every wait raises.
        """
        if timeout is not None:
            timeout = _seconds(timeout)
        self._claimed = True
        if self._over and self._error is None:
            return self._value
        lock, began = self._lock, 0.0 if timeout is None else time.monotonic()
        if lock is not None and forks.parent:
            forks.refuse("wait")
        try:  # no call from here to that of the lock: it is inside, for Ctrl-C comes when it has been taken
            if lock is None:
                pass
            elif timeout is None:
                lock.acquire()  # half of what a with statement takes
            elif not lock.acquire(timeout=timeout):
                raise CommError(self._late(timeout))
            try:  # for the one thread that may wait
                if self._error is not None:
                    raise self._error
                if self._over:
                    return self._value
                if timeout is not None:
                    timeout = max(0.0, timeout - (time.monotonic() - began))
                source = self._source
                if timeout is None and source.__class__ is Started and (record := source.noted) is not None:
                    record[THREAD] = get_ident()  # as its own wait does it, without its call
                    try:
                        source.work.wait()
                    except RuntimeError as error:
                        raise source.failure(record, error) from error
                    if record[ENDED] is None:
                        record[ENDED] = time.monotonic()
                    value: T = source.result
                else:
                    value = source.wait(timeout) if source.bare else self._finish(timeout)
                if self._look is not None:
                    self._shown(value)
                self._value, self._over, self._source = value, True, None
                return value
            except TimedOutError as late:
                waited = None if timeout is None else time.monotonic() - began
                raise CommError(self._late(waited, str(late))) from None
            except Exception as error:
                self._error, self._over, self._source, self._look = error, True, None, None
                raise
        finally:
            if lock is not None:
                try:  # noqa: SIM105  # a context is entered by a call, where Ctrl-C comes
                    lock.release()
                except RuntimeError:
                    pass  # it has not been taken; whose it is already takes it at once

    def _finish(self, timeout: float | None) -> Any:
        source = self._source
        if isinstance(source, _Follow):
            return source.wait(timeout)
        grad, inference = self._modes
        transformed = _torch.functorch_active()
        if not transformed and torch.is_grad_enabled() == grad and torch.is_inference_mode_enabled() == inference:
            watcher = here.watcher
            if watcher is None:
                return source.wait(timeout)
            here.watcher = None  # as `paused` does it, which takes longer
            try:
                with _torch.without_modes():
                    value = source.wait(timeout)
                    if (look := self._look) is not None:  # as `_shown` does it, inside of what it would enter
                        look(value)
                        self._look = None
                    return value
            finally:
                here.watcher = watcher
        with contextlib.ExitStack() as stack:
            stack.enter_context(paused())
            if transformed:
                stack.enter_context(_torch.outside_transforms())
            if torch.is_inference_mode_enabled() != inference:
                stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            return source.wait(timeout)

    def _shown(self, value: Any) -> None:
        """Give the result to who is to look at it first."""
        look = self._look
        assert look is not None
        watcher = here.watcher
        here.watcher = None  # as `paused` does it, which takes longer
        try:
            with _torch.without_modes():
                look(value)
            self._look = None  # not before: who is interrupted waits again
        finally:
            here.watcher = watcher

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without waiting.

        A loop that asks again and again lets other ranks of this process run.
        """
        if not self._over and self._rank is None:
            forks.refuse_if_forked("done")
        source = None if self._over else self._source  # another thread may end the wait meanwhile
        return source is None or source.done()

    def then(self, fn: Callable[[T], S]) -> Work[S]:
        """The future of ``fn(result)``.

        ``fn`` runs once, in the first wait for the new work, on the thread that waits.

        Args:
            fn: takes the result.

        Returns: a work of what ``fn`` returns. What ``fn`` raises, every wait for it raises.

        Example:
            >>> import torch, meshcomm as mc
            >>> mesh = mc.make_mesh({"dp": 2})
            >>> def main():
            ...     work = mc.all_reduce(torch.ones(2), "dp", mesh=mesh, async_op=True).then(lambda y: y.sum().item())
            ...     return work.wait()
            >>> mc.launch(main, ranks=2)
            [4.0, 4.0]
        """
        self._claimed = True
        if not callable(fn):
            fail("then", f"fn is not callable but {type(fn).__name__}.", fix="a function of the result")
        if torch.compiler.is_compiling():
            return Work(fn(self.wait()))
        return Work(_Follow(self, fn), self._call, self._axis)

    def __await__(self) -> Generator[Any, None, T]:
        turns = 0
        while not self.done():
            turns += 1
            if turns > _EAGER_TURNS and current_rank() is None and _event_loop_runs():
                yield from asyncio.sleep(min(1e-3, 1e-5 * turns)).__await__()
            else:
                yield
        return self.wait()

    def _late(self, waited: float | None, absent: str = "") -> str:
        since = time.monotonic() - self._began
        return not_done(self._known, waited, since, absent, "wait again, nothing is lost; or")

    @property
    def _known(self) -> Call | None:
        self._call = call = made(self._call)
        return call

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._over else "under way"
        return f"<Work {state}{'' if self._call is None else f': {self._known}'}>"

    def __del__(self) -> None:
        try:
            if self._over or forks.is_fork():
                return
        except AttributeError:  # Ctrl-C came before it was made
            return
        if self._rank is not None and self._rank.world.cancelled:  # another rank's error is what matters
            return
        if self._claimed:
            with contextlib.suppress(Exception):
                self._source.give_up()
            return
        with contextlib.suppress(Exception):
            self._source.abandon()
        call = self._known
        if call is not None and call.site is not None:
            message = f"meshcomm.{call.what}: the Work of {call} was dropped and never waited for"
            with contextlib.suppress(AttributeError, TypeError):  # at the end of the interpreter
                warnings.warn_explicit(message, RuntimeWarning, call.site.file, call.site.line)


def let_go(work: Work[Any]) -> None:
    """Nobody is to wait for it, which is no mistake: what it was for has failed."""
    work._call, work._claimed = None, False


class Source(Pending):
    """A work that another one waits for, which is the one that warns if nobody waits for it."""

    __slots__ = ("_first",)

    def __init__(self, first: Work[Any]) -> None:
        self._first = first
        first._claimed = True

    def wait(self, timeout: float | None) -> Any:
        """Wait for the first work."""
        try:
            return self._first.wait(timeout)
        except CommError as error:
            if not self._first._over:
                raise TimedOutError(str(error)) from None
            raise

    def done(self) -> bool:
        """Whether the first is."""
        return self._first.done()

    def give_up(self) -> None:
        """Pass it on."""
        if not self._first._over:
            self._first._source.give_up()

    def abandon(self) -> None:
        """Pass it on."""
        if not self._first._over:
            self._first._source.abandon()


class _Follow(Source):
    """The source of a work made by ``then``."""

    __slots__ = ("_fn",)

    def __init__(self, first: Work[Any], fn: Callable[[Any], Any]) -> None:
        super().__init__(first)
        self._fn = fn

    def wait(self, timeout: float | None) -> Any:
        """Wait for the first work, then call the function."""
        try:
            value = super().wait(timeout)
        except TimedOutError:
            raise TimedOutError from None
        return self._fn(value)


def looked_at(work: Work[R], look: Callable[[R], object]) -> Work[R]:
    """The same work, whose result is given to ``look`` first, in which no mode sees anything and nobody watches."""
    work._look = look
    if work._over:
        work._shown(work._value)
    return work


def begun(what: str, axis: Axis, x: Tensor | Kind | None, result: Any, skip: int = 1) -> Work[Any]:
    """A work whose result is ``result``, or what that will be; ``x`` is the one tensor that it is about, if it is.
    ``skip``: how many frames out from here are surely not the user's.
    """
    if not isinstance(result, Pending):
        return Work(result)
    dtype, shape = (x.dtype, x.shape) if isinstance(x, Tensor) else (None, ()) if x is None else x
    record: Record | None = result.noted if result.__class__ is Started else result.record()
    call: Named
    work: Work[Any] = _new(Work)  # as ``Work`` and ``noted`` do it, without their calls
    work._claimed, work._over = True, False
    work._error = work._rank = work._lock = work._look = None
    frame = sys._getframe(skip)
    while known_files[(code := frame.f_code).co_filename] and (outer := frame.f_back) is not None:
        frame = outer  # as `call_spot` does it
    place, backward = frame.f_lasti, backward_pass() != -1
    if record is None:
        call = public_call, what, axis.name, axis.own_coordinate, dtype, shape, code, place, backward
        work._began = time.monotonic()
    else:
        number, primitive, op, _, _, work._began, _, before, root, _ = record
        record[CALL] = call = (
            public_call, what, axis.name, axis.own_coordinate, dtype, shape, code, place, backward,
            before, primitive, op, root, number,
        )  # fmt: skip
    work._call, work._axis, work._source = call, axis, result
    if not result.bare:
        work._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    work._rank = rank = local.rank
    if rank is None:
        work._lock = _Lock()
    work._claimed = False
    return work


_new: Any = object.__new__


def kind_of(x: Tensor) -> Kind:
    """Its dtype and shape."""
    return x.dtype, tuple(x.shape)


def _event_loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _seconds(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        fail("wait", f"timeout={timeout!r} is not a number of seconds.", fix="a number from 0 on, or None")
    return float(min(timeout, threading.TIMEOUT_MAX / 2))


@overload
def wait(tree: Tensor | Work[Tensor], timeout: float | None = None) -> Tensor: ...
@overload
def wait(tree: Work[R], timeout: float | None = None) -> R: ...
@overload
def wait(tree: list[Work[R]], timeout: float | None = None) -> list[R]: ...
@overload
def wait(tree: dict[K, Work[R]], timeout: float | None = None) -> dict[K, R]: ...
@overload
def wait(tree: tuple[Work[R], Work[S]], timeout: float | None = None) -> tuple[R, S]: ...
@overload
def wait(tree: tuple[Work[R], ...], timeout: float | None = None) -> tuple[R, ...]: ...
@overload
def wait(tree: Any, timeout: float | None = None) -> Any: ...
def wait(tree: Any, timeout: float | None = None) -> Any:
    """Wait for every :class:`Work` in a pytree.

    Args:
        tree: a pytree; what is no Work stays as it is.
        timeout: seconds for all of them together.

    Returns: the tree with the results in the place of the works.

    Raises:
        CommError: the time is up, or a collective failed. The first one in the order of the tree is raised, and the
            others can still be waited for.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     x = torch.tensor(mesh.rank)
        ...     works = [mc.all_reduce(x, "dp", mesh=mesh, async_op=True), mc.shift(x, "dp", mesh=mesh, async_op=True)]
        ...     return [y.item() for y in mc.wait(works)]
        >>> mc.launch(main, ranks=2)
        [[1, 1], [1, 0]]
    """
    seconds = _seconds(timeout)
    if isinstance(tree, Work):
        return tree.wait(seconds)
    try:
        leaves, spec = _torch.tree_flatten(tree)
    except RecursionError:
        fail("wait", "the tree contains itself, or is nested too deeply.", fix="a list or a dict of works")
    end = None if seconds is None else time.monotonic() + seconds
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Work):
            leaves[i] = leaf.wait(None if end is None else max(0.0, end - time.monotonic()))
    return _torch.tree_unflatten(leaves, spec)
