"""Links between processes of one machine: CPU tensors go through shared memory.

n = number of ranks in the group. Gloo's threads and sockets take hundreds of microseconds to wake who waits. Here each
rank has a mailbox that the others look into: for each call it writes once what it has for others into memory that it
lends, and an entry that says what it calls and where that lies; who waits looks, gives way, and sleeps until one
rings. So ranks that call different things are told so, and so are those that wait for a rank that is gone.

What a rank has waited for it can compute without the others: in an all_reduce each rank reduces a part and reads the
rest, but if another has begun its own to be waited for later, it reduces that part too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want, for_later, is_agreed, told
from meshcomm.runtime.health.lateness import Late
from meshcomm.runtime.pending import begin_all, queued, then
from meshcomm.runtime.process.lending import put
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import CALL, ENDED, Log, Named, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo.carrier import Carrier
from meshcomm.runtime.transports.gloo.post import route_of
from meshcomm.runtime.transports.group_link import Made
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.protocol import Empty, Parts, joined
from meshcomm.runtime.transports.shared import at_once
from meshcomm.runtime.transports.shared.call import Call, Fill, Mail, Meaning, Reading, Watch
from meshcomm.runtime.transports.shared.differences import compare_given
from meshcomm.runtime.transports.shared.messages import one_message
from meshcomm.runtime.transports.shared.messages.letters import Letters, letters_of
from meshcomm.runtime.transports.shared.messages.parcels import Parcel, Sent
from meshcomm.runtime.transports.shared.messages.posted import Letterbox, Posted
from meshcomm.runtime.transports.shared.words import brief, code_of, meaning_of

T = TypeVar("T")

_ONE_STEP = 2**18
"""Bytes of a tensor up to which all ranks reduce all of it, which takes one meeting and not two."""
_APART = 2**14
"""Bytes of a tensor, in the mean, from which on one pass over it beats one call for many."""


@_torch.out_of_graphs
def _first_now(link: Any, post: Post | None, want: Want | None) -> list[Tensor] | None:
    """``exchange_now`` of a link that has had no message: what it will know of them is made with the first one."""
    if link.mail.letters is None:
        return None
    link.exchange_now = one_message.exchange_now_in(link.log, Posted)
    return link.exchange_now(link, post, want)  # type: ignore[no-any-return]


class OneHostLink(ProcessLink):
    """A group of processes on one machine."""

    mail: Mail = cast(Any, Made())
    hears = shares_memory = True
    exchange_now: Callable[..., Any] = staticmethod(_first_now)
    watches: dict[int, tuple[Watch, Record]] = {}  # noqa: RUF012
    """Of each thread's next call, where somebody wants that all ranks make it, or none does: it is noted already."""

    def note_in(self, log: Log) -> None:
        """As any; small calls that are waited for at once have a way of their own."""
        super().note_in(log)
        self._at_once = at_once.at_once_in(log)
        vars(self).pop("exchange_now", None)  # that is of another log

    def copies(self, name: str, x: Tensor) -> bool:
        """What is lent is a copy."""
        return x.is_cpu or super().copies(name, x)

    def takes_parts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Those that are written to where the others read them, by who waits later."""
        return told.later and device.type == "cpu" and dtype in dtypes.FLOATS

    def place_on_axis(self, index: int) -> int:
        """What the user knows this index of the link as."""
        return index

    def as_called(self, late: Late) -> Late:
        """What the user knows such a call as."""
        return late

    # ------------------------------------------------------------------------------------------- the primitives

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """All read all; where that is much, each reduces a part and reads the others' parts."""
        if not x.is_cpu:
            return super().all_reduce(x, op)
        in_parts = self.size > 2 and self._in_parts(x)
        if not in_parts and (small := self._at_once(self, at_once.ALL_REDUCE, op, x)) is not None:
            return small
        packed = dtypes.to_bytes(x)
        call = self._call("all_reduce", op, x)
        flat = reserve.empty(packed.shape, packed)
        if flat.dtype is not x.dtype:
            flat = dtypes.from_bytes(flat, x.dtype)
        result = flat if flat.shape == x.shape else flat.view(x.shape)
        call.brings(packed, self.mail.others, self.mail.others, spare=self._spare(flat) if in_parts else 0)
        return self._reduced(call, in_parts, op, flat, result)

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """It is read where it is lent."""
        return self.all_reduce(x, op) if x.is_cpu else super().all_reduce_own(x, op)

    def _in_parts(self, x: Tensor) -> bool:
        return self.size > 2 and x.nbytes > _ONE_STEP

    def _spare(self, flat: Tensor) -> int:
        return -(-flat.numel() // self.size) * flat.element_size()

    def _reduced(self, call: Call, in_parts: bool, op: str, out: Tensor, result: Tensor) -> Tensor:
        if not in_parts and call.packed is not None and call.packed.dtype is out.dtype:
            return self._done(call, partial(dtypes.fold, op, out=out), result)

        def as_numbers(got: list[Tensor]) -> list[Tensor]:
            return [dtypes.from_bytes(each, out.dtype) for each in got]

        if not in_parts:
            return self._done(call, lambda got: dtypes.fold(op, as_numbers(got), out=out), result)

        def first(got: list[Tensor]) -> None:
            call.reduce_own(as_numbers(got), op, out)

        def rest(got: list[Tensor]) -> None:
            call.reduce_others(as_numbers(got), op, out)

        return self._done(call, rest, result, first)

    def sum_parts(self, x: Parts) -> Tensor:
        """They are written straight to where the others read them."""
        out = reserve.empty(x.shape, torch.empty(0, dtype=x.dtype, device="cpu"))
        call = self._call("all_reduce", "sum", out)
        in_parts = self._in_parts(out)
        call.brings(
            out,
            self.mail.others,
            self.mail.others,
            spare=self._spare(out) if in_parts else 0,
            write=lambda own: _write(own, x),
        )
        return self._reduced(call, in_parts, "sum", out, out)

    def all_gather(self, x: Tensor) -> Tensor:
        """All read all."""
        if not x.is_cpu:
            return super().all_gather(x)
        small = self._at_once(self, at_once.ALL_GATHER, "", x)
        return self._gathered(x, (self.size, *x.shape)) if small is None else small

    def gather_flat(self, x: Tensor, empty: Empty | None = None) -> Any:
        """The same, of another shape."""
        if not x.is_cpu:
            return super().gather_flat(x, empty)
        if (small := self._at_once(self, at_once.GATHER_FLAT, "", x)) is not None:
            return small
        first, *others = x.shape
        return self._gathered(x, (self.size * first, *others))

    def _gathered(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        packed = dtypes.to_bytes(x)
        out = reserve.empty((self.size * packed.numel(),), packed)
        call = self._call("all_gather", "", x)
        call.brings(packed, self.mail.others, self.mail.others)
        result = out if out.dtype is x.dtype else dtypes.from_bytes(out, x.dtype)
        return self._done(call, partial(torch.cat, out=out), result if len(shape) == 1 else result.view(shape))

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """Everybody reduces its row of all."""
        if not x.is_cpu:
            return super().reduce_scatter(x, op)
        if (small := self._at_once(self, at_once.REDUCE_SCATTER, op, x)) is not None:
            return small
        packed = dtypes.to_bytes(x)
        out = reserve.empty(x.shape[1:], x)
        call = self._call("reduce_scatter", op, x)
        each = packed.numel() // self.size
        own = self.index * each, (self.index + 1) * each
        call.brings(packed, self.mail.others, self.mail.others, unread=own)
        return self._own_row(call, op, out)

    def scatter_flat(self, x: Tensor, op: str) -> Any:
        """The same of what lies so."""
        small = self._at_once(self, at_once.SCATTER_FLAT, op, x) if x.is_cpu else None
        return super().scatter_flat(x, op) if small is None else small

    def scatter_parts(self, x: Parts, op: str) -> Tensor:
        """They are written straight to where the others read them."""
        shape = x.shape
        whole = torch.empty((), dtype=x.dtype, device="cpu").expand(shape.numel())
        out = reserve.empty(shape[1:], whole)
        call = self._call("reduce_scatter", op, out.expand(shape))
        call.brings(whole, self.mail.others, self.mail.others, write=lambda own: _write(own, x))
        return self._own_row(call, op, out)

    def _own_row(self, call: Call, op: str, out: Tensor) -> Tensor:
        count, dtype = out.numel(), out.dtype
        mine, packed = slice(self.index * count, (self.index + 1) * count), call.packed
        as_it_is = packed is not None and packed.dtype is dtype

        def fill(got: list[Tensor]) -> None:
            wholes = got if as_it_is else [dtypes.from_bytes(each, dtype) for each in got]
            dtypes.fold(op, [whole[mine] for whole in wholes], out=out.view(-1))

        return self._done(call, fill, out)

    def swap_flat(self, x: Tensor) -> Any:
        """All read their runs of all."""
        small = self._at_once(self, at_once.SWAP_FLAT, "", x) if x.is_cpu else None
        return super().swap_flat(x) if small is None else small

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """All read their runs of all; a table says where those begin."""
        if not x.is_cpu:
            return super().all_to_all(x, send, recv)
        packed = dtypes.to_bytes(x)
        width = x.element_size() // packed.element_size()
        runs = recv if width == 1 else [width * run for run in recv]
        out = reserve.empty((sum(runs),), packed)
        call = self._call("all_to_all", "", x)
        call.count = 0  # it may differ
        starts = [0, *accumulate(send if width == 1 else [width * run for run in send])]
        own = starts[self.index], starts[self.index + 1]
        call.brings(packed, self.mail.others, self.mail.others, table=[*starts, *runs], unread=own)

        def fill(got: list[Tensor]) -> None:
            torch.cat([whole[slice(*call.table_of(i))] for i, whole in enumerate(got)], out=out)

        return self._done(call, fill, dtypes.from_bytes(out, x.dtype))

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """One reads from one."""
        if not x.is_cpu:
            return super().permute(x, source, destination)
        if (small := self._at_once(self, at_once.PERMUTE, "", x, (source, destination))) is not None:
            return small
        packed = dtypes.to_bytes(x)
        out = torch.zeros_like(packed) if source is None else reserve.empty(packed.shape, packed)
        call = self._call("permute", "", x)
        call.root = -1 if destination is None else destination
        sources = () if source in (None, self.index) else (source,)
        call.brings(packed, () if destination in (None, self.index) else (destination,), sources)

        def fill(got: list[Tensor]) -> None:
            if source is not None:
                out.copy_(got[source])

        result = dtypes.from_bytes(out, x.dtype).view(x.shape)
        return self._done(call, fill, result)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """All read from one."""
        if not x.is_cpu:
            return super().broadcast(x, src)
        if (small := self._at_once(self, at_once.BROADCAST, "", x, src)) is not None:
            return small
        packed = dtypes.to_bytes(x)
        out = reserve.empty(packed.shape, packed)
        call = self._call("broadcast", "", x, src)
        call.brings(packed, *self._from_one(src))
        result = dtypes.from_bytes(out, x.dtype).view(x.shape)
        return self._done(call, lambda got: out.copy_(got[src]), result)

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """One reads from all."""
        if not x.is_cpu:
            return super().reduce(x, op, dst)
        if (small := self._at_once(self, at_once.REDUCE, op, x, dst)) is not None:
            return None if small is at_once.NOTHING else small
        x = dtypes.plain(x)
        packed = dtypes.to_bytes(x)
        out = reserve.empty(x.shape, x) if self.index == dst else None
        call = self._call("reduce", op, x, dst)
        call.brings(packed, *self._to_one(dst))

        def fill(got: list[Tensor]) -> None:
            if out is not None:
                dtypes.fold(op, [dtypes.from_bytes(each, x.dtype) for each in got], out=out.view(-1))

        return self._done(call, fill, out)

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """One reads from all."""
        if not x.is_cpu:
            return super().gather(x, dst)
        if (small := self._at_once(self, at_once.GATHER, "", x, dst)) is not None:
            return None if small is at_once.NOTHING else small
        return self._gathered_on(x, dst)

    def _gathered_on(self, x: Tensor, dst: int) -> Tensor | None:
        packed = dtypes.to_bytes(x)
        out = reserve.empty((self.size * packed.numel() if self.index == dst else 0,), packed)
        call = self._call("gather", "", x, dst)
        call.brings(packed, *self._to_one(dst))
        if self.index != dst:
            return self._done(call, lambda _: None, None)
        result = dtypes.from_bytes(out, x.dtype).view(self.size, *x.shape)
        return self._done(call, partial(torch.cat, out=out), result)

    def join(self, x: Tensor, dst: int) -> Any:
        """The same, of another shape."""
        if not x.is_cpu:
            return super().join(x, dst)
        if (small := self._at_once(self, at_once.JOIN, "", x, dst)) is not None:
            return None if small is at_once.NOTHING else small
        return then(self._gathered_on(x, dst), joined)

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """All read their rows from one."""
        if not like.is_cpu:
            return super().scatter(x, like, src)
        way, lent = (at_once.SCATTERED, like) if x is None else (at_once.SCATTER, x)
        if (small := self._at_once(self, way, "", lent, src)) is not None:
            return small
        packed = dtypes.to_bytes(like[None][:0] if x is None else x)
        out = reserve.empty((like.nbytes // packed.element_size(),), packed)
        call = self._call("scatter", "", like, src)
        call.total = self.size
        own = self.index * out.numel(), (self.index + 1) * out.numel()
        call.brings(packed, *self._from_one(src), unread=own if self.index == src else (0, 0))
        mine = slice(*own)
        result = dtypes.from_bytes(out, like.dtype).view(like.shape)
        return self._done(call, lambda got: out.copy_(got[src][mine]), result)

    def barrier(self) -> object:
        """Entries without anything."""
        call = self._call("barrier", "", torch.empty(0, dtype=torch.uint8, device="cpu"))
        call.brings(None, (), self.mail.others)
        return self._done(call, lambda _: None, None)

    def barrier_within(self, seconds: float) -> None:
        """As in the base: all are here, and what was not compared before can be."""
        super().barrier_within(seconds)
        if "mail" in vars(self):
            compare_given(self.mail)

    # ------------------------------------------------------------------------------------------- messages

    @_torch.out_of_graphs
    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """As in the base; one message to and from others that is waited for at once has a way of its own."""
        if len(posts) < 2 and len(wants) < 2 and (posts or wants) and not (told.later or self.log.inside):
            got: list[Tensor] | None = self.exchange_now(self, posts[0] if posts else None, wants[0] if wants else None)
            if got is not None:
                if got and (begun := told.begun) is not None:
                    begun.append((self.keep, (wants[0], got[0])))
                return got
        return super().exchange(posts, wants)

    def _by_post(
        self, where: str, posts: Sequence[Post], wants: Sequence[Want], sent: Sequence[int], got: Sequence[int]
    ) -> list[Tensor]:
        """By letters in shared memory."""
        if queued:
            begin_all()
        letters: Letters = self.mail.letters or letters_of(self.mail)  # type: ignore[assignment]
        parcels = [Parcel(self, where, want, route) for want, route in zip(wants, got, strict=True)]
        out: list[Sent] = []
        posted, later = Posted(self, where, letters, parcels, out), told.later
        if told.begun is not None:
            told.begun.append((posted.give_up, ()))
        try:
            letters.ask(parcels)
            for post, route in zip(posts, sent, strict=True):
                out.append(letters.send(self, post, route))
            if not later:
                return posted.wait(None)
            if parcels and not told.takes and posted.look():
                letters.see_to_it()
        except BaseException:  # Ctrl-C, too
            if self.watched and is_agreed(self):  # what comes is nobody else's
                posted.abandon()
                letters.see_to_it()
            else:
                posted.give_up()
            raise
        return cast(Any, posted)  # type: ignore[no-any-return]

    def keep(self, want: Want, x: Tensor) -> None:
        """In its place, before those that were asked for later."""
        letters_of(self.mail).give_back(self, want, route_of(self.name, want[3]), x)

    def carrier(self, call: Named) -> Carrier | None:
        """As in the base, by letters."""
        return None if self.watched else Letterbox(self, self.base, self.log, route_of(self.name, 0), call)

    def _error(self, what: str, error: RuntimeError) -> CommError:
        if "mail" in vars(self):
            self.mail.failed = True
        return super()._error(what, error)

    # ------------------------------------------------------------------------------------------- calls

    def _from_one(self, src: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Who reads from this rank, and whom it reads from."""
        return (self.mail.others, ()) if self.index == src else ((), (src,))

    def _to_one(self, dst: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((), self.mail.others) if self.index == dst else ((dst,), ())

    def meet(self, name: str, dtype: torch.dtype) -> None:
        """An entry, as ``watch`` says, before a call that goes another way."""
        if queued:
            begin_all()
        watched = self.watches.pop(get_ident(), None)
        assert watched is not None
        call = self._watched_call(watched, code_of(name, "", dtype), 0, -1)

        def come() -> None:
            call.brings(None, (), self.mail.others)
            self._done(call, lambda _: None, None)

        for_later(False, come)

    def call_of(self, meaning: Meaning, count: int, root: int, record: Record) -> Call:
        """Of what has been said already."""
        return Call(self, self.mail, meaning, count, root, record)

    def _watched_call(self, watched: tuple[Watch, Record], code: int, count: int, root: int) -> Call:
        watch, record = watched
        call = Call(self, self.mail, watch.meaning, count, root, record, watch)
        call.code = code
        return call

    def _call(self, name: str, op: str, x: Tensor, root: int = -1) -> Call:
        if queued:
            begin_all()
        if self.watches and (watched := self.watches.pop(get_ident(), None)) is not None:
            return self._watched_call(watched, code_of(name, op, x.dtype), x.numel(), root)
        mail, dtype, shape = self.mail, x.dtype, x.shape
        said = told.call if self.hears else None
        if said is None:
            called, tree, whose = (), (), None
        else:
            called, tree, whose = said if type(said) is tuple else brief(said)
        key = name, op, dtype, shape, root, called, tree
        try:
            meaning = mail.known.get(key)
        except TypeError:  # an argument without a hash
            key, meaning = (repr(key),), None  # type: ignore[assignment]
        if meaning is None:
            meaning = meaning_of(mail.lexicon, key, called, tree, name, op, dtype, shape, root)
        record = self._note(name, op, dtype, shape, root)
        record[CALL] = called
        call = Call(self, mail, meaning, shape.numel(), root, record)
        if whose is not None:
            call.of(whose.word)
        return call

    def _done(self, call: Call, fill: Fill, result: T, first: Fill | None = None) -> T:
        try:
            call.expect(fill, result, first)
            call.post()
            if told.later:
                return Reading(call)  # type: ignore[return-value]  # for who waits later
            return call.conclude(self.mail.timeout)  # type: ignore[no-any-return]
        except BaseException as error:
            if call.record[ENDED] is None:
                failed(call.record, error)
            call.drop()
            raise


def _write(own: Tensor, x: Parts) -> None:
    small = own.nbytes < _APART * len(x.parts)
    if small or x.factor == 1.0:
        if small and all(part.dtype == own.dtype for part in x.parts):
            torch.cat(list(x.parts), out=own)
        else:
            for place, part in zip(own.split([part.numel() for part in x.parts]), x.parts, strict=True):
                put(place, part)
        if x.factor != 1.0:
            own.mul_(x.factor)
        return
    for place, part in zip(own.split([part.numel() for part in x.parts]), x.parts, strict=True):
        torch.mul(part, x.factor, out=place)
