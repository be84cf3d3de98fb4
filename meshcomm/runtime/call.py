"""One call of a collective, as a value: what a rank says of it, and whether it is the same as the other ranks'.

A link that is told of its calls gets one for each. The ring of the last calls keeps it, the guard and ranks that share
memory compare its digest, ranks of one process compare it as it is, and :mod:`meshcomm.runtime.words` has its text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from meshcomm._torch.backward import backward_pass
from meshcomm.errors import OurError, shape_text
from meshcomm.in_thread import in_thread
from meshcomm.runtime.callsite import CallSite, called_at, site_of
from meshcomm.runtime.whose import Whose, differ
from meshcomm.runtime.words import (
    Words,
    arguments_text,
    axis_text,
    call_text,
    leaves_text,
    messages_text,
    place_of,
    sentence,
)

T = TypeVar("T")

_RUNS = 250
"""The most runs of an all_to_all that are compared."""
_LEAVES = 1000
"""The leaves of a tree that are put into words."""
_PARTS = 50
"""Those and the arguments that are told to others with each call."""
_NAMED = re.compile(r"( \w*dim=\d+)*( requires_grad=False)?$")
"""What stands at the end of a leaf's path."""
_GRADIENTS = {False: 0, True: 1, None: 2}


Post = tuple[Tensor, int, int]
"""A message to send: the tensor, the destination, the tag."""

Want = tuple[int, tuple[int, ...], torch.dtype, int, torch.device]
"""A message to receive: the source, shape, dtype, tag and the device it shall lie on."""


class AxisAt(NamedTuple):
    """What a mesh calls a group, and where this rank is on it: what is left of an axis that may be gone."""

    name: str | tuple[str, ...]
    coordinate: dict[str, int]

    @property
    def own_coordinate(self) -> dict[str, int]:
        """As an Axis calls it."""
        return self.coordinate


class Call(NamedTuple):
    """A call of this rank."""

    what: str
    """The operation, as the user knows it."""
    given: tuple[Any, ...] = ()
    """Those of its arguments that must be equal on all ranks."""
    names: Sequence[str] = ()
    """Their names."""
    needs_grad: bool | None = None
    axis: Any = None
    """Its name, and the rank's place."""
    dtype: torch.dtype | None = None
    shape: Sequence[int] = ()
    fixed: tuple[int, ...] = ()
    """The lengths that must be equal, where the primitive does not see them."""
    tree: tuple[Any, ...] = ()
    """Path, dtype and shape of each leaf, where a pytree was given."""
    whose: Whose | None = None
    """Of a sum that was inserted: the leaf whose gradient it is."""

    moved: tuple[Any, ...] = ()
    """What the primitive sees of it and must be equal on all ranks."""
    send: Sequence[int] = ()
    """The lengths of the runs to each index, of an all_to_all."""
    recv: Sequence[int] = ()
    messages: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    """Of an exchange, those that are sent and those that are expected: the other side, the tag, dtype and shape."""
    site: CallSite | None = None
    backward: bool = False

    def here(
        self,
        moved: tuple[Any, ...] = (),
        send: Sequence[int] = (),
        recv: Sequence[int] = (),
        messages: tuple[Sequence[Any], Sequence[Any]] = ((), ()),
        skip: int = 1,
    ) -> Call:
        """The same with what a link sees of it, and the user's line: it may outlive its axis. ``skip``: of how many
        frames the caller knows that they are this library's; each one that is looked at costs more than the rest.
        """
        at = self.axis
        axis = None if at is None else _new(AxisAt, (at.name, at.own_coordinate))
        seen = moved, send, recv, messages, site_of(sys._getframe(skip)), backward_pass() != -1
        made: Call = _new(Call, (*self[:AXIS], axis, *self[BEHIND:SEEN], *seen))
        return made

    # ------------------------------------------------------------------------------------------------------ its text

    @property
    def text(self) -> str:
        """``all_reduce f32[8] (op='sum')``."""
        x = leaves_text(self.tree) or messages_text(*self.messages)
        if not x and self.dtype is not None:
            x = shape_text(self.dtype, self.shape)
        arguments = arguments_text(self.names, self.given)
        if self.send:
            arguments.append(f"sending {list(self.send)} and receiving {list(self.recv)} elements")
        more = ["that needs a gradient"] if self.needs_grad else []
        more += [f"for {self.whose}"] if self.whose is not None else []
        return call_text(self.what, x, arguments, *more)

    @property
    def at(self) -> str:
        """``train.py:88, in backward``."""
        return "" if self.site is None else called_at(self.site, backward=self.backward)

    def __str__(self) -> str:
        return sentence(self.text, axis_text(self.axis), self.at)

    @property
    def words(self) -> Words:
        """For others."""
        runs = (list(self.send), list(self.recv)) if len(self.send) <= _RUNS else ([], [])
        meant = self.meaning
        parts = dict(itertools.islice(meant.parts.items(), _PARTS))
        return Words(place_of(self.axis), self.text, axis_text(self.axis), self.at, *runs, parts, meant.moved)

    @property
    def meaning(self) -> Words:
        """What all that call the same have in common: what the digest stands for."""
        parts = {
            "operation": self.what,
            **{name: repr(value) for name, value in zip(self.names, self.given, strict=True)},
        }
        for path, dtype, shape in self.tree[:_LEAVES]:
            bare = _NAMED.sub("", path)
            parts[f"x{bare}"] = shape_text(dtype, shape) + path[len(bare) :]
        if not self.tree and self.dtype is not None:
            parts |= {"dtype": str(self.dtype), "shape": str(list(self.shape))}
        return Words("", self.text, "", "", parts=parts, moved=repr((self.moved, self.fixed)))

    # ------------------------------------------------------------------------------------------- whether it is the same

    @property
    def compared(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        found: tuple[Any, ...] = _compared(self)
        return found

    @property
    def digest(self) -> tuple[int, int]:
        """Two numbers of 64 bits that are equal where what is compared is."""
        digest = hashlib.blake2b(repr(self.compared).encode(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)

    @property
    def gradient(self) -> int:
        """Whether one is needed: no, yes, unknown; and above these two bits the word of the leaf whose it is."""
        return _GRADIENTS[self.needs_grad] + (self.word << 2)

    @property
    def word(self) -> int:
        """The leaf whose gradient it is, as a number; 0 for none."""
        return 0 if self.whose is None else self.whose.word

    def agrees(self, other: Call) -> bool:
        """Whether it is the same call as another rank's."""
        if _compared(self) != _compared(other):
            return False
        alike = self.needs_grad is other.needs_grad and self.whose is other.whose
        return alike or gradients_agree(self.gradient, other.gradient)


AXIS, SEEN = Call._fields.index("axis"), Call._fields.index("moved")
"""Which of its fields is the axis, and with which begins what a link sees of it."""
BEHIND = AXIS + 1
_compared = itemgetter(*map(Call._fields.index, ("what", "given", "moved", "fixed", "tree")))
_new: Any = tuple.__new__  # half of what a named tuple's own way costs
BRIEF_AXIS = 6
"""Where the axis stands in what a link is told briefly."""
UNSEEN = (), (), (), ((), ()), None, False
"""The last fields of a call of which no link has seen anything."""


Begun = list[tuple[Callable[..., None], tuple[Any, ...]]] | None


class _Told(Protocol):
    """What this thread is calling, said by who makes the call while its primitives run, and by nobody else: so nothing
    of a call is left for the next one.
    """

    call: Any
    """A :class:`Call`; or, for links that hear and are not watched, what makes one with its arguments, the tree and
    whose gradient it is; for links that are told briefly, what makes one, followed by all of its arguments.
    """
    later: bool
    """Whether the call is waited for later: its primitives then give a Pending where they would have to wait."""
    waits: bool
    """Whether who makes the call waits for it nevertheless."""
    node: Any
    """The node of autograd that is being made of the call, where somebody hears it."""
    begun: Begun
    """How to give up the messages of this call, and with what: see :func:`all_or_none`."""
    takes: bool
    """Whether nobody stands still until a message of this call is here that is received later: what of it comes in a
    second step is then taken by who waits for it, without a thread.
    """


told: _Told = in_thread


def for_later(asked: bool, fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)``, in which what is called is begun and waited for later, or, if not ``asked``, waited for at once.

    A function and no context: Ctrl-C comes where Python enters a function, and at the door of an ``__exit__`` it would
    leave the thread so for ever.
    """
    before, told.later = told.later, asked
    try:
        return fn(*args)
    finally:
        told.later = before


def all_or_none(link: Any, fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)``; who is interrupted in it has none of what has come by its messages: that is for who asks next."""
    before = told.begun
    begun: Begun = None if link.watched and is_agreed(link) else []
    told.begun = begun
    try:
        return fn(*args)
    except BaseException as error:
        given_up(begun, error)
        raise
    finally:
        told.begun = before  # no call from here to where the caller has it


def is_agreed(link: Any) -> bool:
    """Whether a call is one that all ranks have agreed to make: the others count it as made, whatever becomes of it."""
    return bool(getattr(link.hooks, "compare", False))


def given_up(begun: Begun, error: BaseException) -> None:
    """What an interrupted call has begun, once. The first comes to stand first."""
    if begun and not isinstance(error, OurError):
        while begun:
            give_up, args = begun.pop()
            give_up(*args)


def gradients_agree(mine: int, theirs: int) -> bool:
    """Whether two calls that are otherwise equal may both be right: see ``Call.gradient``."""
    if differ(mine >> 2, theirs >> 2):
        return False
    return mine & 3 == theirs & 3 or 2 in (mine & 3, theirs & 3)


def messages_of(posts: Sequence[Post], wants: Sequence[Want]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What a call says of its messages, without the tensors."""
    return [(dst, tag, x.dtype, tuple(x.shape)) for x, dst, tag in posts], [
        (src, tag, dtype, shape) for src, shape, dtype, tag, _ in wants
    ]
