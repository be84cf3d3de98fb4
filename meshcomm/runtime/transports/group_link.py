"""How a process group of torch's is called: its calls are begun, waited for and given up, and what fails is said.

Who calls it for what: :mod:`meshcomm.runtime.transports.direct` and :mod:`meshcomm.runtime.transports.process_group`.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm._torch import dispatch_modes, hooked, hooks_nodes, profiler_on
from meshcomm.errors import FIRST_CAUSE, CommError, fail, text
from meshcomm.runtime.call import told
from meshcomm.runtime.health import hosts, peers
from meshcomm.runtime.health.lateness import Late, late_text
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.pending import begin_all, queued, then_all
from meshcomm.runtime.process import accelerator, forks
from meshcomm.runtime.recorder import BEGAN, ENDED, WHAT, Log, Record, failed, under_way
from meshcomm.runtime.transports.device_post import KNOW_NO_TAGS, Outbox
from meshcomm.runtime.transports.direct import SUMMED, DirectLink, options_for
from meshcomm.runtime.transports.gloo.post import CALLS
from meshcomm.runtime.transports.turns import Channel, Turn
from meshcomm.runtime.transports.underway import Messages, Started, StartedOnDevice, Walker, started

T = TypeVar("T")

_TIMED_OUT = "imed out"
"""What gloo says when a time is up."""
_CHANNELS, _MOST_CALLS = 2**15, 2**14
"""Of tags: how many axes, and calls of one that are under way, are told apart."""
Message = tuple[Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""


class Made:
    """An attribute that a link may have of its own; while it has not, it is asked for one. A class with a
    ``__getattr__`` would have every look at any attribute take three times as long.
    """

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, link: Any, kind: type) -> Any:
        return self if link is None else link.made(self._name)


class GroupLink(DirectLink):
    """A group of processes, of which one rank calls the backend."""

    sums_directly = True
    """Whether a sum of what lies on a device is one call of its backend."""
    base: dist.ProcessGroup = cast(Any, Made())
    group: dist.ProcessGroup = cast(Any, Made())
    turn: Turn = cast(Any, Made())
    channel: Channel = cast(Any, Made())
    mail: Any
    """Of links on one machine alone."""
    hold: Any
    """Whoever wants to know of the end of the link has a weak reference to it; it knows the mesh's time-out."""

    def __init__(self, base: dist.ProcessGroup, ranks: tuple[int, ...], index: int, log: Log, name: str) -> None:
        """``base``: a group of torch's that carries messages; the one for collectives is asked for when it is needed.
        ``name``: of this sequence of calls, the same on all ranks.
        """
        self.base, self.name = base, name
        self.makers: dict[str, Callable[[], Any]] = {}
        self._making = threading.Lock()
        self._near: dict[torch.device | None, Any] = {}
        self.numbers = itertools.count()
        self.note_in(log)
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        self._backends = backends = dist.get_backend_config(base)
        self._kinds, self.nccl = _kinds_of(backends)
        self._on_gloo = self._kinds.get("cpu", backends) == "gloo"
        self.orders: dict[Any, list[list[int]]] = {}
        self.ledger = Ledger()
        self.walker: Walker | None = None
        self._outbox = Outbox()
        self.left: dict[tuple[int, int], list[Any]] = {}
        """By whom and over which route: messages over gloo that nobody gets who has asked for them."""
        self._calls = 0
        self._room: Tensor | None = None

    @property
    def place(self) -> str:
        """Where its ranks meet at the store: a group that is adopted again has axes of the same names."""
        return f"{self.log.meeting}: {self.name}"

    def note_in(self, log: Log) -> None:
        """Where calls are noted. A sum that is waited for now is looked for here and not in the class."""
        self.log, self._note = log, log.begin
        self._direct, self._summed = _direct_in(log, self._near), _summed_in(log, self._near)
        if self.sums_directly:
            self.sum_now, self.sums_clones = self._summed, hooks_nodes

    def made(self, name: str) -> Any:
        """What is made when it is first used, and has been taken away since where the groups have ended."""
        if name == "group":
            self.group = self.turn.group
            return self.group
        with self._making:
            if name not in vars(self) and name in self.makers:
                setattr(self, name, self.makers[name]())
        if name in vars(self):
            return vars(self)[name]
        forks.refuse_if_forked("mesh")
        what = "the mesh belongs to a process group that was shut down."
        return fail("mesh", what, fix="make the mesh again after mc.init()")

    def near(self, x: Tensor) -> Any:
        """What moves tensors that lie where ``x`` does, as the group would find it at each call; kept while there is a
        group.
        """
        found = self._near[None if x.is_cpu else x.device] = _torch.backend_for(self.group, x.device)
        return found

    def let_go(self) -> None:
        """Of everything that belongs to a process group, for it is about to end."""
        self._making = threading.Lock()
        self.makers.clear()
        self._near.clear()
        self._outbox.drop()
        self.left.clear()
        for name in ("group", "turn", "base", "mail", "channel"):
            vars(self).pop(name, None)
        self._room = None
        if self.walker is not None and not forks.is_fork():
            self.walker.end()
        self.walker = None

    def connect(self) -> None:
        """NCCL's communicator: made by the first call, it would have a message between two ranks wait for the others,
        and no CUDA graph could begin with it.
        """
        if self.nccl:
            _ = self.group

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """Whether a backend is registered for this kind of device."""
        if device.type == "meta" or (self._kinds and device.type not in self._kinds):
            return f"the mesh moves tensors on {', '.join(sorted(self._kinds)) or 'real devices'}"
        return None

    def tagged(self, device: torch.device) -> tuple[str, ...]:
        """All of them over gloo; where order alone matches messages, those of one exchange, if gloo can tell of it."""
        if self._kinds.get(device.type, self._backends) not in KNOW_NO_TAGS:
            return super().tagged(device)
        return ("exchange",) if self._on_gloo else ()

    def _tag(self) -> int:
        """Of the next messages: one that is waited for later shall not meet one of another call."""
        self._calls = (self._calls + 1) % _MOST_CALLS
        return CALLS + self.channel.number % _CHANNELS * _MOST_CALLS + self._calls

    def _start(self, what: str, start: Callable[[], T]) -> T:
        if queued:
            begin_all()
        try:
            return start()
        except CommError:
            raise
        except RuntimeError as error:
            raise self._error(what, error) from error

    def _error(self, what: str, error: RuntimeError) -> CommError:
        if (turn := vars(self).get("turn")) is not None:
            turn.spoil()
        said = (str(error).splitlines() or [type(error).__name__])[0]
        who = peers.account(self.ranks, closed=_TIMED_OUT not in said)
        if _TIMED_OUT in said and (late := self._late(who)) is not None:
            return CommError(late_text(late))
        who = who or hosts.at(said)  # which is all that is known of a process elsewhere that was killed
        return CommError(
            text(
                what,
                f"the transport failed: {who}{': ' if who else ''}{_brief(said)}",
                got=f"index {self.index} of a group of {self.size}",
                fix=FIRST_CAUSE,
            )
        )

    def end_backend(self, what: str, device: torch.device) -> None:
        """``what`` was given up while the device waits in it: end that, and refuse all that comes after."""
        group, turn = vars(self).get("group"), vars(self).get("turn")
        if group is None or isinstance(group, Ended):
            return
        ended: Any = Ended(
            text(
                "mesh",
                f"{what} over {self.log} was given up when its time was up, and the communicator of its"
                f" {device.type} backend was ended with it.",
                got=f"index {self.index} of a group of {self.size}",
                fix="end all ranks and start again from a checkpoint; or give the call more time",
            )
        )
        self.group, self.base = ended, ended if self.base is group else self.base
        self._near.clear()
        if turn is not None:
            turn.spoil()
        _torch.end_backend(group, device)

    def _late(self, found: str) -> Late | None:
        """The call whose time is up."""
        record = under_way(self.log)
        if record is None:
            return None
        return Late(record[WHAT], self.log, record, monotonic() - record[BEGAN], found=found)

    def _finish(self, what: str, work: dist.Work | None, result: T, keep: object = None) -> T:
        """``result``, once ``work`` is done: NCCL gives none where it was asked for the result at once, for then all
        is done on the caller's stream, without a hop to its own and back. ``keep`` is what is read until then.
        """
        if told.later:
            on_gloo = self._on_gloo and (result is None or cast(Any, result).is_cpu)
            assert work is not None
            return cast(T, started(self, what, work, result, keep, gloo=on_gloo))
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._error(what, error) from error
        return result

    def _wait(self, what: str, works: Sequence[dist.Work]) -> None:
        """At once, whoever asks."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._error(what, error) from error

    def _begin(self, posts: Sequence[Message], wants: Sequence[Message], tag: int) -> Sequence[dist.Work]:
        """Messages to and from ranks, all under way before the first is waited for, so that no order can lock."""

        def begin() -> list[dist.Work]:
            works = [self.base.recv([x], src, tag) for x, src in wants if x.numel()]
            return works + [self.base.send([x], dst, tag) for x, dst in posts if x.numel()]

        return self._start("exchange", begin)

    def _end(self, works: Sequence[dist.Work], result: T, keep: object = None, *, cpu: bool = True) -> T:
        """``result``, once the messages have come; ``keep`` is what is read until then."""
        if not told.later or not works:
            self._wait("exchange", works)
            return result
        if self._on_gloo and cpu:
            return cast(T, Messages(self, works, result, keep))
        begun = [started(self, "exchange", work, None, keep) for work in works]
        return then_all(begun, lambda _: result)


@cache
def _kinds_of(backends: str) -> tuple[dict[str, str], frozenset[str]]:
    """By kind of device its backend, if that is said, and those of NCCL's: nobody changes them."""
    kinds = dict(part.split(":") for part in backends.split(",")) if ":" in backends else {}
    return kinds, frozenset(kind for kind, each in (kinds or {"cuda": backends}).items() if each == "nccl")


def _direct_in(log: Log, near: dict[torch.device | None, Any]) -> Callable[..., Tensor]:
    """``direct(link, what, op, x, root, y, later, name, *given)``: ``y``, which one call of the backend fills, its
    method of this name. ``what`` to ``root`` are as they are noted; ``given`` ends with the options for who waits now,
    or, if ``later``, then. ``near``: what is called, by device.

    A closure, with as little as can be around the call: each line is felt. The group would go through torch's
    dispatcher to the backend, which takes as long as the call itself; it does where somebody looks at what goes through
    there.
    """
    number, keep = log.number, log.records.append  # and nothing that is global: each mesh has these

    def direct(
        link: GroupLink, what: str, op: str, x: Tensor, root: int, y: Tensor, later: bool, name: str, *given: Any
    ) -> Tensor:
        cpu = x.is_cpu
        seen = dispatch_modes() or profiler_on()
        called = link.group if seen else near.get(None if cpu else x.device) or link.near(x)
        shape = x.shape
        record: Record = [number(), what, op, x.dtype, shape, monotonic(), None, None, root, get_ident()]
        keep(record)
        if 0 not in shape:
            try:
                if queued:
                    begin_all()
                work = getattr(called, name)(*given)
                if later:
                    read = None if type(given[0]) is list else x  # what is in a list is ``y`` itself
                    begun: Any
                    if cpu or accelerator.module() is None:
                        begun = Started(link, what, work, y, read, record)
                    else:
                        begun = StartedOnDevice(y, link, what, work, y, read, record)
                    return begun  # type: ignore[no-any-return]
                if work is not None:
                    work.wait()
            except CommError as error:
                failed(record, error)
                raise
            except RuntimeError as error:
                failed(record, error)
                raise link._error(what, error) from error
        record[ENDED] = True if cpu else accelerator.mark_at(accelerator.stream_at(y)) or True
        return y

    return direct


def _summed_in(log: Log, near: dict[torch.device | None, Any]) -> Callable[..., Tensor | None]:
    """``summed(link, x)``: what ``direct`` does of a sum that is waited for now, the call that is made most, without
    what that one asks and hands on for all others. What is to be waited for later, or is not reduced as it is, goes the
    longer way. ``summed(link, x, hook)``: see :class:`Link`.
    """
    number, keep, options = log.number, log.records.append, options_for("AllreduceOptions", False)

    def summed(link: GroupLink, x: Tensor, hook: Tensor | None = None) -> Tensor | None:
        cpu, shape, dtype = x.is_cpu, x.shape, x.dtype
        if dtype not in SUMMED or told.later or (cpu and link._on_gloo):
            return link.all_reduce(x, "sum") if hook is None else None
        called = link.group if dispatch_modes() else near.get(None if cpu else x.device) or link.near(x)
        if hook is not None:
            if called is link.group:  # whose call goes through autograd, which would look at ``y``
                return None
            x = hooked(x, hook)
            link.ledger.at_once += 1
        y = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        record: Record = [number(), "all_reduce", "sum", dtype, shape, monotonic(), None, None, -1, get_ident()]
        keep(record)
        if 0 not in shape:
            try:
                if queued:
                    begin_all()
                # What a backend does to it is no step of the graph, even where it uses torch's operations.
                work = called.allreduce([y if hook is None else y.detach()], options)
                if work is not None:
                    work.wait()
            except CommError as error:
                failed(record, error)
                raise
            except RuntimeError as error:
                failed(record, error)
                raise link._error("all_reduce", error) from error
        record[ENDED] = True if cpu else accelerator.mark_at(accelerator.stream_at(y)) or True
        return y

    return summed


class Ended:
    """In the place of a group whose backend was ended: whoever wants something of it is told."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CommError(self._why)


def _brief(said: str) -> str:
    """What gloo says, without where in its sources and what to think of it."""
    return re.sub(r"^\[\S+\] |\. This is typically .*", "", said)
