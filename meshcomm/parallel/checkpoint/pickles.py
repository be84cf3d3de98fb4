"""Pickles read as data. Python's unpickler is a machine that runs what a file tells it to; with these steps it runs
nothing.

What comes out are numbers, strings, lists, tuples and dicts, and where a pickle names a class or function, the name,
with what it was to be called with and what was to be put into it. Work and memory are in proportion to the bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, ClassVar


class Name:
    """A class, a function or a constant: nothing but its name."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Record:
    """What an object was to be made of."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def read_pickle(data: bytes, known: Collection[str]) -> Any:
    """What the bytes say.

    Args:
        data: a pickle of protocol 2 to 5.
        known: the names that may stand in it, as ``module.name``.

    Raises:
        pickle.UnpicklingError: any other name; anything else that is wrong with it.
    """
    try:
        return _Inert(data, known).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        raise pickle.UnpicklingError(f"it is no pickle, or cut short ({told})") from error


def refuse(what: str) -> Any:
    """Fail: it is not what such a file has."""
    raise pickle.UnpicklingError(what)


class _Steps(dict[int, Callable[[Any], None]]):
    """What each byte means."""

    def __missing__(self, code: int) -> Any:
        refuse(f"a step {code:#04x}, which does not belong into plain data")


class _Inert(pickle._Unpickler):
    """Python's unpickler, written in Python, with those of its steps that make plain data; what calls or changes
    objects is written down instead.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar = _Steps({code: pickle._Unpickler.dispatch[code] for code in b"".join([
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
        pickle.BININT1, pickle.BININT2, pickle.BININT, pickle.LONG1, pickle.BINFLOAT,
        pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
        pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
        pickle.MARK, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
        pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
        pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
        pickle.GLOBAL, pickle.STACK_GLOBAL,
    ])})  # fmt: skip

    def __init__(self, data: bytes, known: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._names: dict[str, Name] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The name alone."""
        text = f"{module}.{name}"
        if text not in self._known:
            refuse(f"{_plainly(text)} does not belong into a table of contents")
        return self._names.setdefault(text, Name(text))

    def _call(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(name) is not Name:
            refuse("it calls what is no name")
        self.stack.append(Record(name.text, args))

    def _build(self) -> None:
        state = self.stack.pop()
        self._top(Record).state = state

    def _item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _items(self) -> None:
        self._put(self.pop_mark())

    def _put(self, items: list[Any]) -> None:
        """No tuples as keys: a few hundred bytes can say one that is never hashed to its end."""
        found = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Record):
                refuse(f"a key that is a {type(key).__name__}")
            found[key] = value

    def _top(self, kind: type) -> Any:
        found = self.stack[-1]
        return found if type(found) is kind else refuse(f"it puts something into what is no {kind.__name__}")

    dispatch.update({
        pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _item, pickle.SETITEMS[0]: _items,
    })  # fmt: skip


def _plainly(text: str) -> str:
    """Without what would spoil a terminal."""
    shown = text.encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) < 100 else shown[:100] + "..."
