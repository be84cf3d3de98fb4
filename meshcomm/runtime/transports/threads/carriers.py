"""The threads that ranks of one process run on, kept from one run to the next where nobody can tell.

::

    first run   new threads, each begun by the one behind it
    at its end  each drops what Python keeps for it and compares what is left with what it had as new: all alike, and
                they wait, are no threads of Python's any more, and take no signal
    next run    as many ranks of a caller with the same settings: the same threads; else these end, and others begin

So no value in a ``threading.local``, no mode, mask or hook of one run is found by the next one. Kept are threads where
torch computes with one, with no accelerator and under no tracer, on a Python that shows what it keeps for a thread;
never those of a run that has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshcomm._torch.autograd import next_sequence_number
from meshcomm._torch.within_thread import hide_thread, show_thread, state_of_thread
from meshcomm.runtime.process import accelerator

Life = Callable[[BaseException | None], tuple[threading.Lock, bool]]
"""What a rank does on its thread, told why no more threads are to be had, if so; gives the lock of who goes on, and
whether all went well."""

_MOST = 256
_TINY = 5e-324
"""A number that is none to a thread that flushes such."""


class _Started(threading.Event):
    """Nobody waits for it, so it needs no lock."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the thread runs."""
        return self._is_set

    def set(self) -> None:
        """It runs."""
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Go on."""
        return True

    def _at_fork_reinit(self) -> None:
        """In a forked process."""


class _Own:
    """What a thread of ranks has to do."""

    def __init__(self, before: Carrier | None, keeps: bool) -> None:
        self.before = before
        self.leads = False
        self.turn = threading.Lock()  # held by nobody's thread in particular: released to let this one run
        self.turn.acquire()
        self.life: tuple[contextvars.Context, Life] | None = None
        self.mask = b""
        self.keeps = keeps
        self.lives = False
        self.waits = False
        """Whether it has nothing to do, and is as new."""
        self.held = 0
        """How many hold it, at the end of its last life."""
        self.numbered = False
        """Whether autograd has numbered nodes on it."""


class Carrier(threading.Thread):
    """A thread of ranks; who starts it goes on at once, where ``Thread.start`` would wait until it runs."""

    def __init__(self, index: int, before: Carrier | None, *, keeps: bool) -> None:
        super().__init__(name=f"meshcomm rank {index}", daemon=True)
        self._started = _Started()  # a Python that has no such attribute waits, which takes longer
        self.own = _Own(before, keeps)

    def run(self) -> None:
        """Live, as often as there is a rank to live for. First start the thread of the rank before, while this one is
        as new as the caller's settings made it: what a thread inherits, such as its core and its signal mask, no rank
        has changed yet.
        """
        own, error = self.own, _begin(self.own)
        if error is None:
            own.turn.acquire()
        new, number = _found(self) if own.keeps else None, next_sequence_number()
        while own.life is not None:
            context, life = own.life
            own.life = None
            after, well = context.run(life, error)
            del context, life
            own.held, own.lives = sys.getrefcount(self), False
            own.waits = well and own.keeps and _forget() and _found(self) == new
            if not own.waits:
                after.release()
                return
            own.numbered = next_sequence_number() != number
            _hide(self)
            after.release()
            del after
            own.turn.acquire()
            _show(self)


def _begin(own: _Own) -> BaseException | None:
    """Start the thread of the rank before; why that cannot be."""
    try:
        if own.leads:
            _let_others_finish()
        if own.before is not None:
            own.before.start()
    except BaseException as error:
        return error
    finally:
        own.before = None
    return None


class Crew:
    """The threads of one run, which it alone has."""

    def __init__(self, size: int, *, numbered: bool) -> None:
        """``numbered``: no node that autograd has numbered elsewhere meets one of a rank's."""
        self.settings = _settings() if size <= _MOST else None
        self.mask = b"" if self.settings is None else _mask()
        found = _kept.pop() if _kept else None
        self.new = found is None or not found._fits(size, self.settings, numbered)
        self.carriers: list[Carrier] = []
        if found is not None and not self.new:
            self.carriers = found.carriers
            return
        if found is not None:
            found.end()
        for index in range(size):
            before = self.carriers[-1] if self.carriers else None
            self.carriers.append(Carrier(index, before, keeps=self.settings is not None))

    def _fits(self, size: int, settings: Any, numbered: bool) -> bool:
        if len(self.carriers) != size or settings is None or settings != self.settings:
            return False
        return numbered or not any([each.own.numbered for each in self.carriers])  # noqa: C419

    def give(self, index: int, life: Life) -> threading.Lock:
        """What a thread shall do; gives the lock that lets it begin."""
        own = self.carriers[index].own
        own.waits, own.lives, own.mask = False, True, self.mask
        own.life = contextvars.copy_context(), life
        return own.turn

    def start(self) -> None:
        """Have all of them there, as new: each of the new ones starts the one before it."""
        if self.new:
            self.carriers[-1].own.leads = True
            self.carriers[-1].start()

    def leave(self) -> None:
        """All have ended their lives: keep them for the next run, where nobody can tell; otherwise end them."""
        alone = None if self.settings is None else _trial()
        if alone is not None and all([each.own.waits and each.own.held == alone[1] for each in self.carriers]):  # noqa: C419
            _kept.append(self)
        else:
            self.end()

    def end(self) -> None:
        """End them, but for those that are still at it."""
        for each in self.carriers:
            each.own.keeps = False
            if each.own.waits:
                each.own.waits = False
                each.own.turn.release()
        for each in self.carriers:
            if not each.own.lives and each.ident is not None:
                each.join()


_kept: list[Crew] = []
"""The threads of the last run."""


def end_kept() -> None:
    """End the threads that wait for another run."""
    while _kept:
        _kept.pop().end()


# ------------------------------------------------------------------------------------------------- as new, and whether


def _settings() -> Any:
    """All that a new thread has of who starts it, or of the process; None where threads are not kept."""
    if threading.gettrace() is not None or threading.getprofile() is not None or accelerator.module() is not None:
        return None
    if torch.get_num_threads() != 1 or _trial() is None:
        return None
    return _of_system(), threading.stack_size()


def _of_system() -> tuple[Any, ...]:
    """What the system and the processor keep for this thread, but for its signals."""
    return os.sched_getaffinity(0), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), _TINY > 0.0


def _found(thread: Carrier) -> tuple[Any, ...]:
    """All that is kept for this thread and can be asked for, but for what is dropped anyway."""
    return (
        _mask(),
        _of_system(),
        sys.gettrace(),
        sys.getprofile(),
        sys.get_asyncgen_hooks(),
        sys.get_coroutine_origin_tracking_depth(),
        dict(vars(thread)),
        weakref.getweakrefcount(thread),
        state_of_thread(),
    )


def _hide(thread: Carrier) -> None:
    """It is no thread of the program's until it is shown again, and takes no signal."""
    _set_mask(b"\xff" * _MASK)
    hide_thread(thread)


def _show(thread: Carrier) -> None:
    show_thread(thread)
    _set_mask(thread.own.mask)


_SHOWN = "Py_Repr"
"""Under which Python keeps the lists and dicts that are being shown."""
_MASK = 128
"""Bytes of a set of signals."""


@functools.cache
def _python() -> Any:
    """Python's own functions, and the system's, which give up nothing meanwhile."""
    library = ctypes.PyDLL(None)
    library.PyThreadState_GetDict.restype = ctypes.c_void_p
    return library


def _mask() -> bytes:
    """The signals that this thread does not take."""
    found = ctypes.create_string_buffer(_MASK)
    _python().pthread_sigmask(signal.SIG_BLOCK, None, found)
    return found.raw


def _set_mask(mask: bytes) -> None:
    _python().pthread_sigmask(signal.SIG_SETMASK, mask, None)


def _locals() -> dict[Any, Any]:
    """What Python keeps for this thread: a thing for each ``threading.local`` in use; as long as it is there, the
    values of this thread are.
    """
    found: dict[Any, Any] = ctypes.cast(_python().PyThreadState_GetDict(), ctypes.py_object).value
    return found


def _forget() -> bool:
    """Drop them as at the end of a thread; whether nothing else is kept there."""
    trial, found = _trial(), _locals()
    assert trial is not None
    for key in [key for key, value in found.items() if type(value) is trial[0]]:
        del found[key]
    if found.get(_SHOWN) == []:
        del found[_SHOWN]
    return not found


@functools.cache
def _trial() -> tuple[type, int] | None:
    """The kind of those things, and how many hold a thread that is nobody's; None where a trial does not show that a
    thread on this Python can be made as new.
    """
    if sys.implementation.name != "cpython" or not hasattr(os, "sched_setaffinity") or state_of_thread() is None:
        return None
    value = _Value()
    kinds: list[type] = []
    value.text = "another thread's"

    def try_it() -> None:
        before = set(_locals())
        value.text = "mine"
        keys = set(_locals()) - before  # none from Python 3.13 on, which keeps them out of sight
        kinds.extend(type(_locals().pop(key)) for key in keys)
        if value.text != "new" or set(_locals()) - before != keys:
            kinds.clear()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    if len(kinds) != 1 or value.text != "another thread's":
        return None
    return kinds[0], _held_alone()


class _Value(threading.local):
    def __init__(self) -> None:
        self.text = "new"


def _held_alone() -> int:
    """How many hold a thread at the end of a life, if nobody does but who has started it."""
    carriers, ended = [Carrier(0, None, keeps=False)], threading.Lock()
    ended.acquire()
    carriers[0].own.life, carriers[0].own.lives = (contextvars.copy_context(), lambda error: (ended, False)), True
    carriers[0].own.turn.release()
    carriers[0].start()
    ended.acquire()
    carriers[0].join()
    return carriers[0].own.held


# ----------------------------------------------------------------------------------------------------- on one core


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core where torch computes with one thread: only one of them
    runs at a time, and what one has written another one reads. On two cores all of it takes twice as long.
    """
    if not hasattr(os, "sched_setaffinity") or torch.get_num_threads() != 1:
        yield
        return
    cores = os.sched_getaffinity(0)
    _cores.update(cores)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _let_others_finish() -> None:
    """As of a batch, a thread that is woken does not push aside the one that wakes it, which has the interpreter still:
    this one, and those that it starts.
    """
    if hasattr(os, "sched_setscheduler") and torch.get_num_threads() == 1:
        with contextlib.suppress(OSError):  # what the caller has asked for stays
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


_cores: set[int] = set()


def leave_the_core() -> None:
    """A process forked in a rank, such as a worker of a DataLoader, may use all cores again."""
    if _cores:
        os.sched_setaffinity(0, _cores)
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


atexit.register(end_kept)
if hasattr(os, "register_at_fork"):  # Python warns of a fork beside other threads
    os.register_at_fork(before=end_kept, after_in_child=_kept.clear)
