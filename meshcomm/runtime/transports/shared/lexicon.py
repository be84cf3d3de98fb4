"""Words for what a mailbox says in numbers: a process writes those of a call once, where the others can look them up.

An entry of a mailbox has a digest of a call, and nobody needs more as long as the digests are equal. Where they are
not, who sees it finds in the memory of the other process what its digest stands for, without asking it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

from meshcomm.runtime.process.boxes import WORDS, arena

_HALF = WORDS // 2
_HEAD = 16
_MOST = 4096
"""The calls that are known before the oldest half of them is forgotten."""


class Meaning(NamedTuple):
    """Of a call."""

    code: int
    digest: int
    """Of all that must be equal on all ranks."""
    place: int
    """Where its words are."""


class Lexicon:
    """The calls of this process: ``known`` by all that makes them what they are, and their words.

    Written from the front, in halves: when one is full the other one begins again, so that what was called last can be
    looked up by those that come later. Before the words stand the digest of the call and their length.
    """

    def __init__(self, words: memoryview[int]) -> None:
        self.known: dict[Hashable, Meaning] = {}
        self._words, self._cells = words, words.cast("q")
        self._lock = threading.Lock()
        self._half, self._end = 0, 0
        self.turn = 0
        """How often what is known was forgotten: from then on its words are written anew."""

    def learn(self, key: Hashable, code: int, digest: int, words: bytes) -> Meaning:
        """What is called so from now on."""
        with self._lock:
            meaning = Meaning(code, digest, self._write(digest, words))
            self.known[key] = meaning
            return meaning

    def write(self, digest: int, words: bytes) -> int:
        """The place of words that are said once."""
        with self._lock:
            return self._write(digest, words)

    def _write(self, digest: int, words: bytes) -> int:
        need = _HEAD + -(-len(words) // 8) * 8
        if need > _HALF:
            words, need = b"", _HEAD
        if len(self.known) >= _MOST or self._end + need > _HALF:
            self.known.clear()
            self.turn += 1
            self._half, self._end = 1 - self._half, 0
        place = self._half * _HALF + self._end
        self._cells[place // 8], self._cells[place // 8 + 1] = digest, len(words)
        self._words[place + _HEAD : place + _HEAD + len(words)] = words
        self._end += need
        return place


def find(words: memoryview[int], place: int, digest: int) -> bytes:
    """What a process has written there of the call with this digest; nothing if it has forgotten."""
    found, length = words[place : place + _HEAD].cast("q")
    return bytes(words[place + _HEAD : place + _HEAD + length]) if found == digest else b""


@cache
def _lexicon(pid: int) -> Lexicon:
    return Lexicon(arena().words())


def lexicon() -> Lexicon:
    """This process's own. Raises OSError if there is no such memory."""
    return _lexicon(os.getpid())
