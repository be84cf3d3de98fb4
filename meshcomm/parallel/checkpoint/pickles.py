"""Pickles read as data. Python's unpickler is a machine that runs what a file tells it to; this one runs nothing.

What comes out are numbers, strings, lists, tuples and dicts, and where a pickle names a class or function, the name,
with what it was to be called with and what was to be put into it. Work and memory are in proportion to the bytes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from typing import Any, ClassVar

__all__ = ["Name", "Record", "read_pickle"]

_LONGEST, _LONGEST_NAME = 16, 512
"""Bytes of an integer, for whatever counts something takes eight; and of a name."""


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
    machine = _Machine(data, known)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise pickle.UnpicklingError(f"it is no pickle, or cut short at byte {machine.at} of {len(data)}") from error


def _refuse(what: str) -> Any:
    raise pickle.UnpicklingError(what)


class _Machine:
    """A stack, the stacks below it, and what was remembered."""

    _STEPS: ClassVar[list[Callable[[_Machine], None]]]
    """What each byte means."""

    def __init__(self, data: bytes, known: Collection[str]) -> None:
        self.data, self.at, self.known = data, 0, known
        self.names: dict[str, Name] = {}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """All of it."""
        data, memo, steps = self.data, self.memo, self._STEPS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _MEMOIZE:  # every third one
                memo.append(self.stack[-1])
                continue
            if code == _STOP:
                break
            steps[code](self)
        if len(self.stack) != 1 or self.below:
            raise pickle.UnpicklingError("it ends before it is complete")
        return self.stack[0]

    def _unknown(self) -> None:
        _refuse(f"byte {self.at - 1} is {self.data[self.at - 1]:#04x}, which does not belong into plain data")

    # -------------------------------------------------------------------------------------------------------- bytes

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise IndexError(end)
        found = self.data[self.at : end]
        self.at = end
        return found

    def _number(self, form: struct.Struct) -> Any:
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _LONGEST_NAME)
        return self._take(end + 1 - self.at)[:-1].decode()

    # ------------------------------------------------------------------------------------------------------- values

    def _protocol(self) -> None:
        if self._number(_U1) > 5:
            _refuse("it is of a protocol that is not known")

    def _frame(self) -> None:
        self._number(_U8)  # how much to read at a time: all is here

    def _one_byte(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def _two_bytes(self) -> None:
        self.stack.append(self._number(_U2))

    def _four_bytes(self) -> None:
        self.stack.append(self._number(_I4))

    def _long(self) -> None:
        count = self._number(_U1)
        if count > _LONGEST:
            _refuse(f"an integer of {count} bytes")
        self.stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _float(self) -> None:
        self.stack.append(self._number(_F8))

    def _text(self, form: struct.Struct) -> None:
        self.stack.append(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def _bytes(self, form: struct.Struct) -> None:
        self.stack.append(self._take(self._number(form)))

    # --------------------------------------------------------------------------------------------------- containers

    def _mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _to_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self.below.pop()
        return found

    def _tuple(self) -> None:
        found = tuple(self._to_mark())
        self.stack.append(found)

    def _tuple_of(self, count: int) -> None:
        stack = self.stack
        if len(stack) < count:
            raise IndexError(count)
        stack[-count:] = [tuple(stack[-count:])]

    def _append(self) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        values = self._to_mark()
        self._top(list).extend(values)

    def _item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _items(self) -> None:
        self._put(self._to_mark())

    def _put(self, items: list[Any]) -> None:
        found = self._top(dict)
        for at in range(0, len(items) - 1, 2):
            key = items[at]
            if type(key) not in _KEYS:
                _refuse(f"a key that is a {type(key).__name__}")
            found[key] = items[at + 1]

    def _top(self, kind: type) -> Any:
        found = self.stack[-1]
        return found if type(found) is kind else _refuse(f"it puts something into what is no {kind.__name__}")

    # ------------------------------------------------------------------------------------------------------- memory

    def _memorise(self, form: struct.Struct) -> None:
        if self._number(form) != len(self.memo):
            _refuse("it remembers in no order")
        self.memo.append(self.stack[-1])

    def _recall(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def _recall_far(self) -> None:
        self.stack.append(self.memo[self._number(_U4)])

    # ------------------------------------------------------------------------------------------------------- objects

    def _name(self, module: Any, name: Any) -> None:
        text = f"{module}.{name}" if type(module) is str and type(name) is str else _refuse("a name that is no text")
        if text not in self.known:
            _refuse(f"{_plainly(text)} does not belong into a table of contents")
        self.stack.append(self.names.setdefault(text, Name(text)))

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._name(module, name)

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _call(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(name) is not Name:
            _refuse("it calls what is no name")
        self.stack.append(Record(name.text, args))

    def _state(self) -> None:
        state = self.stack.pop()
        self._top(Record).state = state


def _plainly(text: str) -> str:
    """Without what would spoil a terminal."""
    shown = text.encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) < 100 else shown[:100] + "..."


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{form}") for form in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP, _MEMOIZE = pickle.STOP[0], pickle.MEMOIZE[0]
_KEYS = (str, int, Record)

_TABLE: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _Machine._protocol, pickle.FRAME: _Machine._frame,
    pickle.NONE: lambda m: m.stack.append(None), pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT1: _Machine._one_byte, pickle.BININT2: _Machine._two_bytes, pickle.BININT: _Machine._four_bytes,
    pickle.LONG1: _Machine._long, pickle.BINFLOAT: _Machine._float,
    pickle.SHORT_BINUNICODE: lambda m: m._text(_U1), pickle.BINUNICODE: lambda m: m._text(_U4),
    pickle.BINUNICODE8: lambda m: m._text(_U8),
    pickle.SHORT_BINBYTES: lambda m: m._bytes(_U1), pickle.BINBYTES: lambda m: m._bytes(_U4),
    pickle.BINBYTES8: lambda m: m._bytes(_U8),
    pickle.MARK: _Machine._mark, pickle.EMPTY_TUPLE: lambda m: m.stack.append(()), pickle.TUPLE: _Machine._tuple,
    pickle.TUPLE1: lambda m: m._tuple_of(1), pickle.TUPLE2: lambda m: m._tuple_of(2),
    pickle.TUPLE3: lambda m: m._tuple_of(3),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]), pickle.APPEND: _Machine._append, pickle.APPENDS: _Machine._appends,
    pickle.EMPTY_DICT: lambda m: m.stack.append({}), pickle.SETITEM: _Machine._item, pickle.SETITEMS: _Machine._items,
    pickle.BINPUT: lambda m: m._memorise(_U1),
    pickle.LONG_BINPUT: lambda m: m._memorise(_U4),
    pickle.BINGET: _Machine._recall, pickle.LONG_BINGET: _Machine._recall_far,
    pickle.GLOBAL: _Machine._global, pickle.STACK_GLOBAL: _Machine._stack_global,
    pickle.REDUCE: _Machine._call, pickle.NEWOBJ: _Machine._call, pickle.BUILD: _Machine._state,
}  # fmt: skip
_Machine._STEPS = [_TABLE.get(bytes([code]), _Machine._unknown) for code in range(256)]
