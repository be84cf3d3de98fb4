"""Random words by counting: each is a function of a key, of which draw it is, and of where in the global tensor its
element stands. What numbers are made of them is in :mod:`meshcomm.spmd.random.distributions`.

Philox4x32-10 makes four 32-bit words of a key and a counter, on int64 tensors, so that it runs wherever torch does.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import plain_now

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


@functools.lru_cache(maxsize=256)
def _keys(key: int) -> list[tuple[int, int]]:
    """Those of the ten rounds, of one of 64 bits."""
    return [((key + i * _W0) & _MASK, ((key >> 32) + i * _W1) & _MASK) for i in range(10)]


class Rounds:
    """Ten rounds with a key, on int64 tensors.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """

    def __init__(self, key: int) -> None:
        # torch makes less ado of tensors of no dims than of numbers, and there are a hundred operations.
        self._keys = _keys(key)
        numbers = [_M0, _M1, 32, _MASK, *itertools.chain(*self._keys)]
        self._m0, self._m1, self.half, self.mask, *keys = torch.tensor(numbers, device="cpu").unbind()
        self._as_tensors = list(zip(keys[::2], keys[1::2], strict=True))

    def words(self, counter: Sequence[Any], spare: list[Tensor]) -> list[Any]:
        """Four random words of 32 bits for a counter of four, each an int or a tensor; above the 32 bits the second and
        the last one may be anything. The counter's tensors are written over, and so are the ``spare`` ones, six in all.

        An int is an int for a round or two more, and costs nothing there.
        """
        p0: Any
        p1: Any
        c0, c1, c2, c3 = counter
        mul, shift, m0, m1, half, mask = torch.mul, torch.bitwise_right_shift, self._m0, self._m1, self.half, self.mask
        for ints, (k0, k1) in zip(self._keys, self._as_tensors, strict=True):
            # Products wrap at 64 bits, which leaves all bits right. Only the factors need to be free of higher bits.
            if len(spare) == 2:  # all are tensors, as from the fourth round on
                p0, p1 = spare
                mul(c0, m0, out=p0)
                mul(c2, m1, out=p1)
                shift(p1, half, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(mask)
                shift(p0, half, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(mask)
                spare, c1, c3 = [c3, c1], p1, p0
                continue
            p0 = c0 * _M0 if isinstance(c0, int) else mul(c0, m0, out=spare.pop())
            p1 = c2 * _M1 if isinstance(c2, int) else mul(c2, m1, out=spare.pop())
            spare += [c for c in (c0, c2) if isinstance(c, Tensor)]
            c0, c2 = self._mixed(p1, c1, ints[0], spare), self._mixed(p0, c3, ints[1], spare)
            spare += [c for c in (c1, c3) if isinstance(c, Tensor)]
            c1, c3 = p1, p0
        return [c0, c1, c2, c3]

    def _mixed(self, p: Any, c: Any, key: int, spare: list[Tensor]) -> Any:
        """``p >> 32 ^ c ^ key``, where what is an int is put together first."""
        for each in (p >> 32 if isinstance(p, int) else 0, c if isinstance(c, int) else 0):
            key = (key ^ each) & _MASK
        if isinstance(p, int):
            return key if isinstance(c, int) else torch.bitwise_xor(c, key, out=spare.pop()).bitwise_and_(self.mask)
        y = torch.bitwise_right_shift(p, self.half, out=spare.pop())
        y = y if isinstance(c, int) else y.bitwise_xor_(c)
        return y.bitwise_xor_(key).bitwise_and_(self.mask)


def _words_of_ints(counter: Sequence[int], key: int, ones: int) -> list[int]:
    """The same of ints that have many words each, where ``ones`` has a one, 64 bits apart: sooner for few."""
    c0, c1, c2, c3 = counter
    mask = _MASK * ones
    for k0, k1 in _keys(key):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0 * ones) & mask, p1, (p0 >> 32 ^ c3 ^ k1 * ones) & mask, p0
    return [c0, c1 & mask, c2, c3 & mask]


# ---------------------------------------------------------------------------------------------- the words of n blocks


class Words:
    """Four words for each of n blocks, in the form that is wanted; once, for they may be written over."""

    def __init__(self, rounds: Rounds, words: Sequence[Tensor], room: Tensor) -> None:
        """``words``: as they come from the rounds; ``room``: an int64 ``[n, 2]``."""
        self._rounds, self._words, self._room = rounds, words, room

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

    def listed(self) -> list[int]:
        """All of them, block by block."""
        words, n = memoryview(self.memory()).cast("Q").tolist(), self.length
        found = [0] * (4 * n)
        for at in range(4):
            found[at::4] = words[at * n : (at + 1) * n]
        return found

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


# ------------------------------------------------------------------------------------------------- parts of a tensor


class Part(NamedTuple):
    """The box of a global tensor that a rank holds."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the global tensor."""
    start: tuple[int, ...]
    """Where the box begins."""

    def runs(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Runs of elements that are neighbours in the global tensor: where the first begins, how long each is, and the
        counts and strides of the dims that lead from one to the others.
        """
        base, length, stride, at = 0, 1, 1, len(self.shape)
        while at:
            at -= 1
            base += self.start[at] * stride
            length *= self.shape[at]
            stride *= self.whole[at]
            if self.shape[at] != self.whole[at]:
                break
        dims = []
        for count, whole, start in zip(
            self.shape[:at][::-1], self.whole[:at][::-1], self.start[:at][::-1], strict=True
        ):
            base += start * stride
            dims.append((count, stride))
            stride *= whole
        return base, length, dims


@functools.lru_cache(maxsize=1024)
def _blocks(part: Part, per: int) -> tuple[int, int, list[tuple[int, int]], bool, int, int]:
    """Its runs, whether they are of whole blocks of so many numbers, how many blocks one touches, and all of them."""
    base, length, dims = part.runs()
    exact = not any(each % per for each in (base, length, *(stride for _, stride in dims)))
    # How many blocks a run touches: exactly, or at most if that differs between runs.
    count = -(-(base % per + length) // per) if exact or not dims else (length + 2 * per - 2) // per
    return base, length, dims, exact, count, count * math.prod(many for many, _ in dims)


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
    base, _, dims, _, count, total = _blocks(part, per)
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
_List = Callable[[list[int]], list[Any]]
"""The numbers of as many words: Python has made very few before torch has begun with the first operation."""


class Ahead:
    """Small draws come in runs of the same kind: from the second one on the next ones are made together, for that
    costs little more than one alone. The numbers do not depend on it: each draw has its own.
    """

    def __init__(self) -> None:
        self._kind: Any = None
        self._first, self._last = 0, -2
        self._made: Any = ()
        self._again = False

    def found(self, draw: int, kind: Any) -> Tensor | None:
        """The numbers of this draw, if they are made."""
        at = draw - self._first
        if self._kind != kind:
            self._kind, self._again, self._made = kind, False, ()
        elif 0 <= at < len(self._made):
            self._last = draw
            made: Tensor = self._made[at].clone()
            return made
        else:
            self._again = draw == self._last + 1
        self._last = draw
        return None

    def count(self, draw: int, blocks: int) -> int:
        """How many draws to make now, beginning with this one, of so many blocks each."""
        return max(1, min(_AHEAD // blocks, _MASK - draw)) if self._again else 1

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
        self, part: Part, dtype: torch.dtype, per: int, make: _Make, *kind: Any, listed: _List | None = None
    ) -> Tensor:
        """A tensor with the numbers of ``part``: the element with the global index i is number ``i % per`` of block
        ``i // per``. ``kind``: what else decides what is made of the words.
        """
        if 0 in part.shape:
            return torch.empty(part.shape, dtype=dtype, device=self.device)
        plain, ahead = self.device.type == "cpu" and plain_now(), self.ahead if self.attempt == 0 else None
        if plain and ahead is not None and (found := ahead.found(self.draw, (kind, part, dtype))) is not None:
            return found
        base, length, dims, exact, count, total = _blocks(part, per)
        few, draws = plain and total <= _FEW, 1
        if few and ahead is not None:
            draws = ahead.count(self.draw, total)
        if few and listed is not None and draws == 1 and total <= _FEWEST:
            return self._listed(part, dtype, listed)
        shape = part.shape if draws == 1 else (draws, *part.shape)
        y = torch.empty(shape, dtype=dtype, device=self.device)
        total *= draws
        values = y.view(total, per) if exact else torch.empty((total, per), dtype=dtype, device=self.device)
        starts: Any
        if few:
            starts, lanes = _few(part, per, draws)
            make(self.few_words(lanes), values)
        else:
            starts = self._fill_many(values, base, count, dims, make)
        if not exact:
            self._pick(y.view(-1, length), values.view(-1, count * per), per, starts if dims else base)
        if draws > 1 and ahead is not None:
            return ahead.keep(y)
        return y

    def _listed(self, part: Part, dtype: torch.dtype, listed: _List) -> Tensor:
        """The same of very few blocks of four numbers."""
        starts, few = _few(part, 4, 1)
        words, (_, length, _, exact, count, _) = self.few_words(few).listed(), _blocks(part, 4)
        if not exact:
            firsts = [4 * count * at + start % 4 for at, start in enumerate(starts)]
            words = [word for first in firsts for word in words[first : first + length]]
        y = torch.tensor(listed(words), dtype=dtype, device=self.device)
        return y if len(part.shape) == 1 else y.resize_(part.shape)  # which is no view

    def _pick(self, into: Tensor, rows: Tensor, per: int, starts: Any) -> None:
        """Of each row of whole blocks the numbers from where its run begins, or all runs do, on."""
        length = into.shape[1]
        if isinstance(starts, int):
            into.copy_(rows.narrow(1, starts % per, length))
            return
        places = torch.as_tensor(starts, device=self.device) % per
        torch.gather(rows, 1, places[:, None] + torch.arange(length, device=self.device), out=into)

    def _fill_many(self, values: Tensor, base: int, count: int, dims: list[tuple[int, int]], make: _Make) -> Tensor:
        """Write all of them, so many blocks at a time that their words stay in the cache; gives where runs begin."""
        (total, per), device = values.shape, self.device
        on_cpu = _ON_CPU * min(torch.get_num_threads(), _THREADS)
        chunk = min(total, {"cpu": on_cpu, "meta": total}.get(device.type, _ON_OTHERS))
        starts = torch.full((1,), base, dtype=torch.int64, device=device)
        for many, stride in dims:
            steps = torch.arange(many, device=device).mul_(stride)
            starts = (steps[:, None] + starts).view(-1)
        blocks = torch.arange(count if dims else chunk, device=device)
        if dims:
            blocks = ((starts // per)[:, None] + blocks).view(-1)
        first, last = base // per, (base + sum((many - 1) * stride for many, stride in dims)) // per + count - 1
        rounds, high = Rounds(self.key), first >> 32
        room = torch.empty((8, chunk), dtype=torch.int64, device=device)
        for at in range(0, total, chunk):
            some = blocks[at : at + chunk] if dims else blocks[: total - at] + (first + at)
            *spare, low = room[:6, : len(some)].unbind()
            torch.bitwise_and(some, rounds.mask, out=low)
            above = high if last >> 32 == high else torch.bitwise_right_shift(some, rounds.half, out=spare.pop())
            words = rounds.words([low, self.draw, above, self.attempt], spare)
            make(Words(rounds, words, room[6:].view(chunk, 2)[: len(some)]), values[at : at + chunk])
        return starts


_ON_CPU, _THREADS, _ON_OTHERS = 2**16, 8, 2**24
"""Blocks at a time: for each of a few threads what stays in a cache and is worth a hundred calls, or what bounds the
memory that is taken meanwhile.
"""
_FEW = 2**9
"""Blocks whose words Python's integers give sooner than tensors do."""
_FEWEST = 2**4
"""Blocks whose numbers Python makes one by one."""
_AHEAD = 2**7
"""Blocks of draws that are made together."""


def _lanes(numbers: Sequence[int]) -> int:
    """All of them in one, 64 bits apart."""
    return int.from_bytes(struct.pack(f"{len(numbers)}Q", *numbers), sys.byteorder)
