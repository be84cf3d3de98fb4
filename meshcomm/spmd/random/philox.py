"""Random words by counting: each is a function of a key, of which draw it is, and of where in the global tensor its
element stands. What numbers are made of them is in :mod:`meshcomm.spmd.random.distributions`.

Philox4x32-10 makes four 32-bit words of a key and a counter, on int64 tensors, so that it runs wherever torch does.
"""

from __future__ import annotations

import functools
import itertools
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import out_of_graphs, plain_now
from meshcomm.spmd.random.parts import Part, blocks_of
from meshcomm.spmd.random.programs import Program, Steps, high_halves, low_halves, numpy_now

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


@functools.lru_cache(maxsize=256)
def _keys(key: int) -> list[tuple[int, int]]:
    """Those of the ten rounds, of one of 64 bits."""
    return [((key + i * _W0) & _MASK, ((key >> 32) + i * _W1) & _MASK) for i in range(10)]


@functools.lru_cache(maxsize=32)
def _keys_of_many(key: int, ones: int) -> list[tuple[int, int]]:
    return [(k0 * ones, k1 * ones) for k0, k1 in _keys(key)]


class Rounds:
    """Ten rounds with a key, on int64 tensors; of those that are plain and on the CPU as arrays of ``numpy``, in two
    thirds of the time.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """

    def __init__(self, key: int, numpy: Any = None) -> None:
        # torch makes less ado of tensors of no dims than of numbers, and there are a hundred operations.
        self._keys, self.numpy = _keys(key), numpy
        numbers = [_M0, _M1, 32, _MASK, *itertools.chain(*self._keys)]
        each: Sequence[Any] = torch.tensor(numbers, device="cpu").unbind()
        self.half, self.mask = each[2:4]
        if numpy is not None:
            each = list(numpy.array(numbers, numpy.uint64).reshape(-1, 1))
        self._m0, self._m1, self._half, self._mask, *keys = each
        self._as_tensors = list(zip(keys[::2], keys[1::2], strict=True))
        of: Any = torch if numpy is None else numpy
        self._mul, self._xor, self._and = of.multiply, of.bitwise_xor, of.bitwise_and
        self._shift = torch.bitwise_right_shift if numpy is None else numpy.right_shift

    def words(self, counter: Sequence[Any], spare: Sequence[Tensor]) -> list[Any]:
        """Four random words of 32 bits for a counter of four, each an int or a tensor; above the 32 bits the second and
        the last one may be anything. The counter's tensors are written over, and so are the ``spare`` ones, six in all.
        """
        return self._words(counter, [*spare]) if self.numpy is None else self._words_of_arrays(counter, spare)

    @out_of_graphs
    def _words_of_arrays(self, counter: Sequence[Any], spare: Sequence[Tensor]) -> list[Any]:
        unsigned, signed = self.numpy.uint64, self.numpy.int64
        given = [c if isinstance(c, int) else c.numpy().view(unsigned) for c in counter]
        words = self._words(given, [each.numpy().view(unsigned) for each in spare])
        return [word if isinstance(word, int) else torch.from_numpy(word.view(signed)) for word in words]

    def _words(self, counter: Sequence[Any], spare: list[Any]) -> list[Any]:
        """An int is an int for a round or two more, and costs nothing there."""
        c0, c1, c2, c3 = counter
        mul, shift, xor, clear = self._mul, self._shift, self._xor, self._and
        on_arrays = self.numpy is not None
        for ints, keys in zip(self._keys, self._as_tensors, strict=True):
            # Products wrap at 64 bits, which leaves all bits right. Only the factors need to be free of higher bits.
            if len(spare) == 2:  # all are tensors, as from the fourth round on
                p0, p1 = spare
                mul(c0, self._m0, out=p0)
                mul(c2, self._m1, out=p1)
                for p, c, key, into in (p1, c1, keys[0], c0), (p0, c3, keys[1], c2):
                    if on_arrays:  # whose higher bits are none since the first rounds
                        xor(high_halves(p), low_halves(c), out=low_halves(into))
                        xor(into, key, out=into)
                        continue
                    shift(p, self._half, out=into)
                    xor(into, c, out=into)
                    xor(into, key, out=into)
                    clear(into, self._mask, out=into)
                spare, c1, c3 = [c3, c1], p1, p0
                continue
            p0 = c0 * _M0 if isinstance(c0, int) else mul(c0, self._m0, out=spare.pop())
            p1 = c2 * _M1 if isinstance(c2, int) else mul(c2, self._m1, out=spare.pop())
            spare += [c for c in (c0, c2) if not isinstance(c, int)]
            c0, c2 = self._mixed(p1, c1, ints[0], spare), self._mixed(p0, c3, ints[1], spare)
            spare += [c for c in (c1, c3) if not isinstance(c, int)]
            c1, c3 = p1, p0
        return [c0, c1, c2, c3]

    def _mixed(self, p: Any, c: Any, key: int, spare: list[Any]) -> Any:
        """``p >> 32 ^ c ^ key``, where what is an int is put together first."""
        for each in (p >> 32 if isinstance(p, int) else 0, c if isinstance(c, int) else 0):
            key = (key ^ each) & _MASK
        if isinstance(p, int) and isinstance(c, int):
            return key
        y = spare.pop()
        if isinstance(p, int):
            self._xor(c, key, out=y)
        else:
            self._shift(p, self._half, out=y)
            if not isinstance(c, int):
                self._xor(y, c, out=y)
            self._xor(y, key, out=y)
        return self._and(y, self._mask, out=y)


def _words_of_ints(counter: Sequence[int], key: int, ones: int) -> list[int]:
    """The same of ints that have many words each, where ``ones`` has a one, 64 bits apart: sooner for few."""
    c0, c1, c2, c3 = counter
    mask = _MASK * ones
    for k0, k1 in _keys_of_many(key, ones):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0) & mask, p1, (p0 >> 32 ^ c3 ^ k1) & mask, p0
    return [c0, c1 & mask, c2, c3 & mask]


# ---------------------------------------------------------------------------------------------- the words of n blocks


class Words:
    """Four words for each of n blocks, in the form that is wanted; once, for they may be written over."""

    def __init__(self, rounds: Rounds, words: Sequence[Tensor], room: Tensor) -> None:
        """``words``: as they come from the rounds; ``room``: an int64 ``[n, 2]``."""
        self._rounds, self._words, self._room = rounds, words, room

    @out_of_graphs
    def copy_into(self, words: Any) -> None:
        """All of them: a uint32 ``[4, n]``, an array."""
        for into, word in zip(words, self._words, strict=True):
            into[...] = low_halves(word.numpy())

    def columns(self, out: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Each as int64, from 0 on, with its column of ``out``, a ``[n, 4]``; or all of them with all columns."""
        self._clean()
        return zip(self._words, out.unbind(1), strict=True)

    def halves(self, first: torch.dtype, second: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first two and the last two in other dtypes, ``[2, n]``; integers may be anything above their width."""
        x, y = (self._room.new_empty((2, len(self._room)), dtype=dtype) for dtype in (first, second))
        self._words[1].bitwise_and_(self._rounds.mask)
        for into, word in zip((*x.unbind(), *y.unbind()), self._words, strict=True):
            into.copy_(word)
        return x, y

    def twice(self, out: Tensor) -> Tensor:
        """Two and two in one of 64 bits, the first one above: ``out``, an int64 ``[n, 2]``."""
        self._clean()
        self._pack(out, self._words[0::2], self._words[1::2])
        return out

    def less(self, limit: int, out: Tensor) -> None:
        """Which are less than that: ``out``, a bool ``[n, 4]``."""
        if limit > _MASK:
            out.fill_(True)
        else:
            torch.lt(self.bits(32).bitwise_xor_(-(2**31)), limit - 2**31, out=out)

    def bits(self, count: int) -> Tensor:
        """The highest ones of each: an int32 ``[n, 4]``, from 0 on; of all 32 the highest is the sign."""
        if sys.byteorder == "little":
            self._pack(self._room, self._words[1::2], self._words[0::2])
        else:
            self.twice(self._room)
        y = self._room.view(torch.int32)
        return y if count == 32 else y.bitwise_right_shift_(32 - count).bitwise_and_(2**count - 1)

    def _clean(self) -> None:
        for word in self._words[1::2]:
            word.bitwise_and_(self._rounds.mask)

    def _pack(self, out: Tensor, above: Sequence[Tensor], below: Sequence[Tensor]) -> None:
        for high, low, column in zip(above, below, out.unbind(1), strict=True):
            torch.bitwise_or(high.bitwise_left_shift_(self._rounds.half), low, out=column)


class FewWords(Words):
    """The same of ints, 64 bits apart."""

    def __init__(self, words: Sequence[int], ones: int, length: int) -> None:
        self._ints, self._ones, self.length = words, ones, length

    def memory(self, ints: Sequence[int] | None = None) -> bytearray:
        """One after the other, or these in their place."""
        some = self._ints if ints is None else ints
        return bytearray().join([each.to_bytes(8 * self.length, sys.byteorder) for each in some])

    def _tensor(self, ints: Sequence[int]) -> Tensor:
        return torch.frombuffer(self.memory(ints), dtype=torch.int64).view(len(ints), -1)

    def columns(self, out: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """All of them with all columns of ``out``."""
        return [(self._tensor(self._ints), out.t())]

    def halves(self, first: torch.dtype, second: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first two and the last two in other dtypes, ``[2, n]``."""
        words = self._tensor(self._ints)
        return words[:2].to(first), words[2:].to(second)

    def twice(self, out: Tensor) -> Tensor:
        """Two and two in one of 64 bits, the first one above: ``out``, an int64 ``[n, 2]``."""
        w0, w1, w2, w3 = self._ints
        return out.copy_(self._tensor([w0 << 32 | w1, w2 << 32 | w3]).t())

    def less(self, limit: int, out: Tensor) -> None:
        """Which are less than that: ``out``, a bool ``[n, 4]``."""
        torch.lt(self.bits(32), limit, out=out)

    def bits(self, count: int) -> Tensor:
        """The highest ones of each: an int64 ``[n, 4]``, from 0 on."""
        mask = (2**count - 1) * self._ones
        return self._tensor([word >> (32 - count) & mask for word in self._ints]).t()


# ------------------------------------------------------------------------------------------------------ what is drawn


class Few(NamedTuple):
    """Few blocks of one draw and of the next ones, as lanes of ints."""

    length: int
    ones: int
    low: int
    high: int
    """The halves of a block's index."""
    later: int
    """How much later its draw is."""


@functools.lru_cache(maxsize=256)
def _few(part: Part, per: int, draws: int) -> tuple[list[int], Few]:
    """Where the runs of a part begin, in each of so many draws, and their blocks."""
    base, _, dims, _, count, total = blocks_of(part, per)
    starts = [base]
    for many, stride in dims:
        starts = [step + start for step in range(0, many * stride, stride) for start in starts]
    blocks = [block for start in starts for block in range(start // per, start // per + count)] * draws
    ones, low, high = _lanes((1,) * len(blocks)), _lanes(blocks), 0
    if max(blocks) > _MASK:
        low, high = low & _MASK * ones, low >> 32 & _MASK * ones
    later = _lanes([later for later in range(draws) for _ in range(total)])
    return starts * draws, Few(len(blocks), ones, low, high, later)


_Make = Callable[[Words, Tensor], None]
"""``make(words, out)`` writes ``[n, per]`` numbers for n blocks."""


class Plan:
    """Few blocks of a part, of one draw or of some that follow each other, and the program that makes their numbers."""

    __slots__ = ("_few", "_made", "_memory", "_places", "_program")

    @out_of_graphs
    def __init__(self, numpy: Any, part: Part, per: int, draws: int, dtype: torch.dtype, steps: Steps) -> None:
        starts, self._few = _few(part, per, draws)
        lanes = numpy.empty((4, self._few.length), numpy.uint64)
        self._memory, self._program = memoryview(lanes).cast("B"), Program(low_halves(lanes), per, dtype, steps)
        made, (_, length, _, exact, count, _) = self._program.made, blocks_of(part, per)
        shape = part.shape if draws == 1 else (draws, *part.shape)
        self._made, self._places = made.view(shape) if exact else made.view(-1), None
        if not exact:
            firsts = [per * count * at + start % per for at, start in enumerate(starts)]
            places = [list(range(first, first + length)) for first in firsts]
            self._places = torch.tensor(places, device="cpu").view(shape)

    @out_of_graphs
    def draw(self, stream: Stream, which: Any) -> Tensor:
        """The numbers of this draw, or of this one and the next ones. ``which``: as what it is kept from then on."""
        length, ones, low, high, later = self._few
        counter = low, stream.draw * ones + later, high, stream.attempt * ones
        words, size = _words_of_ints(counter, stream.key, ones), 8 * length
        self._memory[:] = b"".join([word.to_bytes(size, sys.byteorder) for word in words])
        self._program.run()
        y = self._made.clone() if self._places is None else torch.take(self._made, self._places)
        if len(_plans) >= _PLANS:
            _plans.clear()
        _plans[which] = self
        return y


_plans: dict[Any, Plan] = {}
"""Those that no thread uses now."""


class Ahead:
    """Small draws come in runs of the same kind: from the second one on the next ones are made together, for that
    costs little more than one alone. The numbers do not depend on it: each draw has its own.
    """

    def __init__(self) -> None:
        self._kind: Any = None
        self._first, self._last = 0, -2
        self._made: Any = ()
        self.again = False

    def found(self, draw: int, kind: Any) -> Tensor | None:
        """The numbers of this draw, if they are made."""
        at = draw - self._first
        if self._kind != kind:
            self._kind, self.again, self._made = kind, False, ()
        elif 0 <= at < len(self._made):
            self._last = draw
            made: Tensor = self._made[at].clone()
            return made
        else:
            self.again = draw == self._last + 1
        self._last = draw
        return None

    def count(self, draw: int, blocks: int) -> int:
        """How many draws to make now, beginning with this one, of so many blocks each."""
        return max(1, min(_AHEAD // blocks, _MASK - draw)) if self.again else 1

    def keep(self, made: Tensor) -> Tensor:
        """They are made: the first of them."""
        self._made, self._first = made, self._last
        return made[0].clone()


class Stream(NamedTuple):
    """The numbers of one draw."""

    key: int
    """64 bits."""
    draw: int
    """Which draw with this key; 32 bits."""
    attempt: int
    """Which one of this draw, where numbers are rejected and drawn again; 32 bits."""
    device: torch.device
    ahead: Ahead | None = None
    """Of the draws with this key."""

    def few_words(self, few: Few) -> FewWords:
        """Those of these blocks in this draw, and in the next ones."""
        counter = few.low, self.draw * few.ones + few.later, few.high, self.attempt * few.ones
        return FewWords(_words_of_ints(counter, self.key, few.ones), few.ones, few.length)

    def fill(
        self, part: Part, dtype: torch.dtype, per: int, make: _Make, *kind: Any, steps: Steps | None = None
    ) -> Tensor:
        """A tensor with the numbers of ``part``: the element with the global index i is number ``i % per`` of block
        ``i // per``. ``kind``: what else decides what is made of the words. ``steps``: how numpy makes the same.
        """
        if 0 in part.shape:
            return torch.empty(part.shape, dtype=dtype, device=self.device)
        plain = self.device.type == "cpu" and plain_now()
        ahead = self.ahead if plain and self.attempt == 0 else None
        which: Any = (kind, part, dtype)
        if ahead is not None and (found := ahead.found(self.draw, which)) is not None:
            return found
        lone = plain and (ahead is None or not ahead.again) and not torch.compiler.is_compiling()
        if lone and (plan := _plans.pop(which, None)) is not None:
            return plan.draw(self, which)
        base, length, dims, exact, count, total = blocks_of(part, per)
        few, draws = plain and total <= _FEW, 1
        if few and ahead is not None:
            draws = ahead.count(self.draw, total)
        if few and steps is not None and (numpy := numpy_now()) is not None:
            which = which if draws == 1 else (*which, draws)
            plan = _plans.pop(which, None) or Plan(numpy, part, per, draws, dtype, steps)
            y = plan.draw(self, which)
            return y if draws == 1 or ahead is None else ahead.keep(y)
        shape = part.shape if draws == 1 else (draws, *part.shape)
        y = torch.empty(shape, dtype=dtype, device=self.device)
        total *= draws
        values = y.view(total, per) if exact else torch.empty((total, per), dtype=dtype, device=self.device)
        starts: Any
        if few:
            starts, lanes = _few(part, per, draws)
            make(self.few_words(lanes), values)
        else:
            by_numpy = steps if dtype is not torch.int64 else None  # which are 8 bytes each to copy
            starts = self._fill_many(values, base, count, dims, make, by_numpy, (kind, dtype))
        if not exact:
            self._pick(y.view(-1, length), values.view(-1, count * per), per, starts if dims else base)
        if draws > 1 and ahead is not None:
            return ahead.keep(y)
        return y

    def _pick(self, into: Tensor, rows: Tensor, per: int, starts: Any) -> None:
        """Of each row of whole blocks the numbers from where its run begins, or all runs do, on."""
        length = into.shape[1]
        if isinstance(starts, int):
            into.copy_(rows.narrow(1, starts % per, length))
            return
        places = torch.as_tensor(starts, device=self.device) % per
        torch.gather(rows, 1, places[:, None] + torch.arange(length, device=self.device), out=into)

    def _fill_many(
        self,
        values: Tensor,
        base: int,
        count: int,
        dims: list[tuple[int, int]],
        make: _Make,
        steps: Steps | None,
        which: Any,
    ) -> Tensor:
        """Write all of them, so many blocks at a time that their words stay in the cache; gives where runs begin."""
        (total, per), device = values.shape, self.device
        numpy = numpy_now() if device.type == "cpu" and torch.get_num_threads() <= _TORCHS_THREADS else None
        on_cpu = _BY_NUMPY if numpy is not None else _ON_CPU * min(torch.get_num_threads(), _THREADS)
        chunk = min(total, {"cpu": on_cpu, "meta": total}.get(device.type, _ON_OTHERS))
        starts = torch.full((1,), base, dtype=torch.int64, device=device)
        for many, stride in dims:
            strides = torch.arange(many, device=device).mul_(stride)
            starts = (strides[:, None] + starts).view(-1)
        blocks = torch.arange(count if dims else chunk, device=device)
        if dims:
            blocks = ((starts // per)[:, None] + blocks).view(-1)
        first, last = base // per, (base + sum((many - 1) * stride for many, stride in dims)) // per + count - 1
        rounds, high = Rounds(self.key, numpy), first >> 32
        kept = _rooms.pop(which, None) if numpy is not None and chunk == _BY_NUMPY else None
        with torch.inference_mode(False):
            room, program = kept or (torch.empty((8, chunk), dtype=torch.int64, device=device), None)
        for at in range(0, total, chunk):
            *spare, low = room[:6, : min(chunk, total - at)].unbind()
            some = blocks[at : at + chunk] if dims else torch.add(blocks[: total - at], first + at, out=low)
            above = high if last >> 32 == high else torch.bitwise_right_shift(some, rounds.half, out=spare.pop())
            if dims or last > _MASK:
                torch.bitwise_and(some, rounds.mask, out=low)
            words = rounds.words([low, self.draw, above, self.attempt], spare)
            made = Words(rounds, words, room[6:].view(chunk, 2)[: len(some)])
            if steps is None or numpy is None:
                make(made, values[at : at + chunk])
                continue
            fits = program
            if fits is None or len(fits.made) != len(some):
                fits = Program(numpy.empty((4, len(some)), numpy.uint32), per, values.dtype, steps)
                program = program or fits
            made.copy_into(fits.words)
            fits.run()
            values[at : at + chunk].copy_(fits.made)
        if numpy is not None and chunk == _BY_NUMPY:
            if len(_rooms) >= _ROOMS:
                _rooms.clear()
            _rooms[which] = room, program
        return starts


_ON_CPU, _THREADS, _ON_OTHERS = 2**16, 8, 2**24
"""Blocks at a time: for each of a few threads what stays in a cache and is worth a hundred calls, or what bounds the
memory that is taken meanwhile.
"""
_BY_NUMPY, _TORCHS_THREADS = 2**15, 2
"""Blocks at a time for numpy, and up to how many threads of torch's its one is as fast."""
_ROOMS = 2
"""Kinds of draws whose room is kept, 4 to 8 MB: fresh pages cost as much as a tenth of what is written to them."""
_rooms: dict[Any, tuple[Tensor, Program | None]] = {}
_FEW = 2**9
"""Blocks whose words Python's integers give sooner than tensors do."""
_AHEAD = 2**7
"""Blocks of draws that are made together."""
_PLANS = 64
"""Kinds of draws whose plans are kept."""


def _lanes(numbers: Sequence[int]) -> int:
    """All of them in one, 64 bits apart."""
    return int.from_bytes(struct.pack(f"{len(numbers)}Q", *numbers), sys.byteorder)
