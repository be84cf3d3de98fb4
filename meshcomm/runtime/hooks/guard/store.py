"""The store of the process group, for the guard: asked on a thread of its own, for it does not answer when the process
that serves it is stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm.errors import CommError, text
from meshcomm.runtime.health import hosts, peers
from meshcomm.runtime.process import exits

_ASKED = 1.0
"""Seconds that the host of such a store has to answer."""
_AGAIN = 0.25
"""Seconds for a store that has not answered the last question: who ends because of that does not wait as long again."""


_NOTHING = "-"
"""What nobody writes: asked to put it in the place of itself, a store gives it back where there is nothing."""


class _Question:
    __slots__ = ("answer", "args", "error", "fn", "over")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        self.over = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def ask(self) -> None:
        try:
            self.answer = self.fn(*self.args)
        except Exception as error:
            self.error = error
        self.over.set()


class PatientStore:
    """A store whose every question has an answer, or is a CommError after so many seconds."""

    def __init__(self, inner: Store, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self._silent = self._over = False
        self._asking = threading.RLock()
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(self._questions,), name="meshcomm store", daemon=True).start()

    def _ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        question = _Question(fn, args)
        with self._asking:
            if self._over:
                _shut_down()
            self._questions.put(question)
        seconds = min(_AGAIN, self._seconds) if self._silent else self._seconds
        self._silent = not question.over.wait(seconds)
        if self._silent:
            _lost(f"it has not answered for {seconds:g} s")
        if question.error is not None:
            _lost(str(question.error).split("\n", 1)[0])
        return question.answer

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._ask(self._inner.set, key, value)

    def peek(self, key: str) -> bytes:
        """What was written, or nothing. There is no ``get``: it waits, and for ever where another one takes away what
        was there a moment ago.
        """
        found = bytes(self._ask(self._inner.compare_set, key, _NOTHING, _NOTHING))
        return b"" if found == _NOTHING.encode() else found

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._ask(self._inner.check, keys))

    def delete_key(self, key: str) -> None:
        """Away."""
        self._ask(self._inner.delete_key, key)

    def end(self) -> None:
        """After what was asked; a thread that asks later is told, for nobody would answer."""
        with self._asking:
            self._over = True
            self._questions.put(None)


def _answer(questions: queue.SimpleQueue[_Question | None]) -> None:
    while (question := questions.get()) is not None:
        with exits.blocked():
            question.ask()
        del question


def _lost(reason: str) -> NoReturn:
    lost = hosts.no_way(hosts.silent([0], _ASKED))
    what = "the store of the process group does not answer, at which the ranks compare their calls"
    what += f": {lost}." if lost else "."
    got = "; ".join(filter(None, (peers.account([0], closed=True), reason)))
    who = f"rank 0 {hosts.where(0)}".rstrip()
    fix = f"look at {who}, which serves it: it has ended, is stopped, or cannot be reached"
    raise CommError(text("guard", what, got=got, fix=fix))


_store: list[PatientStore] = []


def the_store() -> PatientStore:
    """That of the guard that is on."""
    try:
        return _store[-1]
    except IndexError:  # of a thread that outlasts it
        _shut_down()


def _shut_down() -> NoReturn:
    raise CommError(text("guard", "the process group was shut down meanwhile.")) from None


def set_store(value: PatientStore | None) -> None:
    """As the guard begins, and ends."""
    for old in _store:
        old.end()
    _store[:] = [] if value is None else [value]
