"""Memory of large results, which is used again when nobody has them any more.

What a process frees in large pieces goes back to the system, and each piece that it asks for next comes as pages that
are not there yet: to touch these takes several times as long as what is written to them. So the storage of a
large result is kept here too, where its size is asked for again, and given to the next result of that size when no
tensor has it and nobody holds it. It is torch's own, as any other: it can be resized, pickled, moved to shared memory,
and forgotten here at any time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from sys import getrefcount

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.process import forks

SWITCH = "MESHCOMM_REUSE_MIB"
"""The variable of the environment with the MiB that are kept at most, of which some may be in use; 0 for none."""
_USUAL = 256
LEAST = 2**19
"""Bytes of a result from which on it is worth it."""
_MOST = 64
"""The most storages that are kept."""
_LONG = 10.0
"""Seconds after which what was not asked for is forgotten."""


class _Kept:
    """A storage that was given to a result."""

    __slots__ = ("_base", "_dtype", "_shape", "given", "nbytes", "storage")

    def __init__(self, nbytes: int) -> None:
        self._base = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._shape: Sequence[int] | None = None
        self._dtype = torch.uint8
        self.storage = self._base.untyped_storage()
        self.nbytes, self.given = nbytes, 0.0

    def is_free(self) -> bool:
        """Whether nobody has it, and it is as it was."""
        storage = self.storage  # numpy has torch never resize again what it has once seen
        if _of_tensor(storage, 1) or getrefcount(storage) > _UNHELD:
            return False
        return storage.nbytes() == self.nbytes and storage.resizable() and not storage.is_shared()

    def tensor(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of its own. Most are as the last one, of which a copy takes half as long, and much less where
        nothing of torch is in the processor's cache.
        """
        if torch.is_inference_mode_enabled() or type(like) not in _PLAIN:  # what is made there, or of it, stays so
            return like.new_empty(0).set_(self.storage, 0, shape, ())
        if self._shape != shape or self._dtype is not like.dtype:
            self._shape, self._dtype = None, like.dtype
            self._base = _torch.lasting(self._formed, shape)
            self._shape = tuple(shape)
        return self._base.data

    def _formed(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device="cpu").set_(self.storage, 0, shape, ())


_of_tensor = _torch.of_tensor
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
with _torch.outside_transforms():  # who imports this may be in a mode
    _spare = _Kept(1)
_UNHELD = getrefcount(_spare.storage) + 1
"""As many references as Python has to a storage that nobody else has, beside the one who looks."""


class Reserve:
    """The storages that this process keeps, those given last at the end."""

    def __init__(self, now: Callable[[], float] = time.monotonic, gives: Callable[[], bool] = _torch.plain_now) -> None:
        """``now``: seconds; ``gives``: whether it may give of what it keeps."""
        self._now, self._gives = now, gives
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._asked: deque[int] = deque(maxlen=_MOST)
        self.held = 0
        """Bytes of what is kept."""
        self._room = _room()

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A new dense tensor of this shape, of the dtype of ``like``, which is on the CPU."""
        nbytes = math.prod(shape) * like.itemsize
        found = self.again(nbytes, shape, like) if nbytes >= LEAST and self._gives() else None
        return like.new_empty(shape) if found is None else found

    def again(self, nbytes: int, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """The same of so many bytes, ``LEAST`` or more, where it may give of what it keeps, as in `find`."""
        # Who holds the lock may be this thread, in the middle of what frees something else. Taken by ``with``: Ctrl-C
        # may come as soon as a call has taken it.
        if nbytes > self._room or self._lock.locked():
            return None
        with self._lock:
            kept = self._take(nbytes, 1)
            return None if kept is None else kept[0].tensor(shape, like)

    def find(self, shape: Sequence[int], like: Tensor, count: int = 1) -> list[Tensor] | None:
        """So many of them, the results of one call; None if they had better be torch's: nobody has asked for such
        before, or they are too small or too large to be kept.
        """
        nbytes = math.prod(shape) * like.itemsize
        if not LEAST <= nbytes <= self._room or not self._gives() or self._lock.locked():
            return None
        with self._lock:
            kept = self._take(nbytes, count)
            return None if kept is None else [each.tensor(shape, like) for each in kept]

    def _take(self, nbytes: int, count: int) -> list[_Kept] | None:
        now, mine = self._now(), self._kept
        found: list[_Kept] = []
        for kept in reversed(mine):  # what was used last is nearest to the processor
            if kept.nbytes == nbytes and kept.is_free():
                found.append(kept)
                if len(found) == count:
                    break
        if len(found) < count:
            if nbytes not in self._asked:  # what is never asked for again is not kept
                self._asked.append(nbytes)
                return None
            new = [_Kept(nbytes) for _ in range(count - len(found))]
            self.held = sum(each.nbytes for each in (*mine, *new))  # anew: Ctrl-C may have come in between
            mine += new
            found += new
        for kept in found:
            kept.given = now
            if kept is not mine[-1]:
                mine.remove(kept)
                mine.append(kept)
        while mine and (self.held > self._room or len(mine) > _MOST or now - mine[0].given > _LONG):
            self.held -= mine.pop(0).nbytes
        return found

    def trim(self, seconds: float = _LONG) -> None:
        """Forget what was not asked for in so long a time."""
        if self._kept and not self._lock.locked():
            with self._lock:
                end = self._now() - seconds
                while self._kept and self._kept[0].given <= end:
                    self.held -= self._kept.pop(0).nbytes


def _room() -> int:
    given = os.environ.get(SWITCH, "")
    return 2**20 * (int(given) if given.isdecimal() else _USUAL) if _torch.counts_uses() else 0


reserve = Reserve()


@forks.in_every_fork
def _forked() -> None:
    reserve.__init__()  # type: ignore[misc]
