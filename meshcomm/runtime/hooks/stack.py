"""Hooks around the primitives of a link: they stack, and where there are none nothing of them is in the path.

::

    no hook     link.all_reduce(x, "sum") ─────────────────────────────────────────────► the transport
    put_on(a)   link.all_reduce(x, "sum") ──► a.run(what) ── what.go() ────────────────► the transport
    put_on(b)   link.all_reduce(x, "sum") ──► b.run(what) ── what.go() ──► a.run(what) ─► the transport

The last one that was put on is asked first. The guard comes with the link, so it stands next to the transport, and a
trace around it. A link with hooks is the same object: it has another class, made of its own by overriding the
primitives and what is said of them; when the last hook is taken off, it has its own class again. A transport knows
nothing of it. Primitives that a transport makes of others of its own are one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from meshcomm.runtime.call import Call, Post, Want, told
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.transports.protocol import PRIMITIVES, Defaults

_WITHOUT = frozenset(("exchange", "barrier", "barrier_within"))
"""Primitives that are given no tensor."""


Form = Callable[..., tuple[Any, ...]]
"""Of the size of the group, a tensor's shape and the arguments after it: those of the primitive, the shape first."""


class Running(NamedTuple):
    """One primitive that is about to run."""

    name: str
    given: tuple[Any, ...]
    """Its own arguments, as the link got them."""
    call: Call
    """What it belongs to, as this thread was told."""
    link: Any
    asynchronous: bool
    """Whether it is waited for later: the link may then give a Pending."""
    go: Callable[[], Any]
    """Goes on, on any thread (then on the asker's stream): to the next hook, in the end to the transport."""
    form: Form | None = None
    """Of what a link has its own way for: what the protocol's would be given in its place."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Its own, as the protocol has them."""
        if self.form is None:
            return self.given
        x, *more = self.given
        shape, *more = self.form(self.link.size, x.shape, *more)
        return x if shape == x.shape else x.reshape(shape), *more

    @property
    def x(self) -> Any:
        """What this rank gives, if it is one tensor."""
        return None if self.name in _WITHOUT else self.args[0]

    @property
    def like(self) -> Any:
        """The tensor that says dtype and shape, on a rank that may give none."""
        name = self.name
        return None if name in _WITHOUT else self.args[name == "scatter"]

    @property
    def runs(self) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths to and from each index, of an all_to_all."""
        return self.args[1:] if self.name == "all_to_all" else ((), ())

    @property
    def messages(self) -> tuple[Sequence[Post], Sequence[Want]]:
        """Those that an exchange sends and expects."""
        return self.args if self.name == "exchange" else ((), ())

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal on all ranks, beside what the call says."""
        x = self.like
        if x is None:
            return (self.name,) if self.name != "barrier_within" else (self.name, *self.args)
        if self.name == "all_to_all":
            return self.name, x.dtype, x.device.type
        more = {"permute": (), "scatter": self.args[2:]}.get(self.name, self.args[1:])
        return self.name, x.dtype, x.device.type, tuple(x.shape), *more


class Hook:
    """Who wants to know of every primitive of a link, and may hold it back. What is not overridden lets all pass."""

    log: Any = None
    """Where it notes the calls from when they are made on, if it does."""
    compares = False
    """Whether it finds out if the ranks call the same: then the transport need not be told of calls."""

    def announce(self, call: Call) -> None:
        """What the next primitives on this thread belong to."""

    def run(self, what: Running) -> Any:
        """Give what ``what.go()`` gives, or, where it is asynchronous, a Pending of it."""
        return what.go()

    def defers(self, name: str, x: Any) -> bool:
        """Whether the primitive may read ``x`` after the call where it is waited for later."""
        return False

    def refuse(self, where: str, why: str, axis: object) -> None:
        """This rank does not make the call ``where`` that the others may make, for it was wrong."""

    def end(self) -> None:
        """The group is about to end: no more calls."""


class Listener(Hook):
    """Who only listens, and holds nothing back: alone on a link it is told without a :class:`Running` and a way to go
    on, which take longer than all that a trace has to do.
    """

    def begins(self, name: str, given: tuple[Any, ...], call: Call, asynchronous: bool, form: Form | None) -> Any:
        """A primitive is about to run: of what a :class:`Running` has; gives what it is to be told of with its end."""
        raise NotImplementedError

    def ended(self, note: Any, result: Any) -> Any:
        """It has given this, which may be a Pending: what the caller gets."""
        raise NotImplementedError

    def failed(self, note: Any, error: BaseException) -> None:
        """It has raised."""
        raise NotImplementedError

    def run(self, what: Running) -> Any:
        """The same around another hook."""
        note = self.begins(what.name, what.given, what.call, what.asynchronous, what.form)
        try:
            result = what.go()
        except BaseException as error:
            self.failed(note, error)
            raise
        return self.ended(note, result)


def put_on(link: Any, hook: Hook) -> None:
    """Ask ``hook`` first from now on."""
    _change(link, lambda hooks: (*hooks, hook))


def take_off(link: Any, hook: Hook) -> None:
    """Ask it no more; the last one leaves the link as it was."""
    _change(link, lambda hooks: tuple(each for each in hooks if each is not hook))


# ------------------------------------------------------------------------------------------------------ how it is done


class _Here(threading.local):
    """What a link is doing on this thread."""

    inside = False  # the transport is at it


UNKNOWN = Call("a collective")
"""What a primitive belongs to that nobody has announced."""


class _Stack(tuple[Hook, ...]):
    """The hooks of a link."""

    here: _Here
    compare: bool
    defer: tuple[Hook, ...]
    """Those that may read a tensor later."""
    listener: Listener | None
    """The one hook, if it only listens."""


_lock = threading.RLock()


def _change(link: Any, change: Callable[[tuple[Hook, ...]], tuple[Hook, ...]]) -> None:
    with _lock:
        before, stack = link.hooks, _Stack(change(link.hooks))
        stack.here = before.here if before else _Here()
        stack.compare = any(hook.compares for hook in stack)
        stack.defer = tuple(hook for hook in stack if type(hook).defers is not Hook.defers)
        stack.listener = stack[0] if len(stack) == 1 and isinstance(stack[0], Listener) else None
        own = _own_class(type(link))
        if stack:
            link.hooks, link.__class__ = stack, _with_hooks(own)
        else:
            link.__class__ = own
            vars(link).pop("hooks", None)


def _own_class(kind: type) -> type:
    return getattr(kind, "without_hooks", kind)


@cache
def _with_hooks(kind: Any) -> type:
    """``kind``, whose primitives run the hooks. A thread may be in one of them when the last hook is taken off."""

    hears = kind.announce is not Defaults.announce

    def announce(self: Any, call: Call) -> None:
        for hook in self.hooks:
            hook.announce(call)
        if hears:
            kind.announce(self, call)

    def refuse(self: Any, where: str, why: str, axis: object) -> None:
        for hook in self.hooks:
            hook.refuse(where, why, axis)
        kind.refuse(self, where, why, axis)

    def copies(self: Any, name: str, x: torch.Tensor) -> bool:
        hooks = self.hooks  # none once the last one was taken off
        for hook in hooks.defer if hooks else ():
            if hook.defers(name, x):
                return False
        return bool(kind.copies(self, name, x))

    def takes_parts(self: Any, device: torch.device, dtype: torch.dtype) -> bool:
        return not self.hooks.compare and kind.takes_parts(self, device, dtype)

    more: dict[str, Any] = {"announce": announce, "refuse": refuse, "copies": copies, "takes_parts": takes_parts}
    # What a transport does in a way of its own in place of a primitive, hooks see as that.
    more["sum_parts"] = _hooked("all_reduce", kind.sum_parts, lambda size, shape: (shape, "sum"))
    more["scatter_parts"] = _hooked("reduce_scatter", kind.scatter_parts)
    more["scatter_flat"] = _hooked("reduce_scatter", kind.scatter_flat, _in_rows)
    more["swap_flat"] = _hooked("all_to_all", kind.swap_flat, _in_runs)
    more["all_reduce_own"] = _hooked("all_reduce", kind.all_reduce_own)
    more["gather_flat"] = _hooked("all_gather", kind.gather_flat)
    more["join"] = _hooked("gather", kind.join)
    own = {name: _hooked(name, getattr(kind, name)) for name in PRIMITIVES if name != "agree"}  # it is made of others
    more |= {"watched": True, "hears": True, "briefly": False, "without_hooks": kind, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**own, **more})


def _in_rows(size: int, shape: torch.Size, op: str) -> tuple[Any, ...]:
    return (size, shape[0] // size, *shape[1:]), op


def _in_runs(size: int, shape: torch.Size) -> tuple[Any, ...]:
    count = shape.numel()
    runs = (count // size,) * size
    return (count,), runs, runs


def _hooked(name: str, own: Callable[..., Any], form: Form | None = None) -> Callable[..., Any]:
    def primitive(self: Any, *args: Any) -> Any:
        stack = self.hooks
        if not stack or stack.here.inside:
            return own(self, *args)
        here, later, call = stack.here, told.later, told.call
        if type(call) is not Call:
            call = UNKNOWN
        if (listener := stack.listener) is not None:
            note = listener.begins(name, args, call, later, form)
            here.inside = True
            try:
                result = own(self, *args)
            except BaseException as error:
                listener.failed(note, error)
                raise
            finally:
                here.inside = False
            return listener.ended(note, result)
        # The last hook may go on on a thread of its own, whatever is waited for.
        stream = torch.accelerator.current_stream() if accelerator.in_use() is not None else None

        def go() -> Any:
            here.inside, before, waited = True, told.call, told.later
            if stack.compare:
                told.call = None
            try:
                told.later = later
                if stream is None:
                    return own(self, *args)
                with accelerator.on(stream):
                    return own(self, *args)
            finally:
                here.inside, told.call, told.later = False, before, waited

        last = stack[-1]
        what = tuple.__new__(Running, (name, args, call, self, later, go, form))  # half of what its own way costs
        for hook in stack[:-1]:
            what = what._replace(go=partial(hook.run, what))
        if not later:
            return last.run(what)
        told.later = False  # a hook may make calls of its own; as `for_later` does it, which takes longer
        try:
            return last.run(what)
        finally:
            told.later = later

    primitive.__name__, primitive.__doc__ = name, own.__doc__
    return primitive
