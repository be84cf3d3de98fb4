"""Whose gradient a sum adds up that the checker of varying types has inserted.

Ranks that build the same graph in another order make the same calls, and would add the gradient of one leaf to that of
another one. What the ranks have in common of a leaf is as which one it got its type, and where. Either may differ in a
right program (one rank types a leaf more, or types it on another line); that both do is a mistake.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

_BITS = 40
_MOST = 1 << 19


class Whose(NamedTuple):
    """A leaf, as all ranks may know it."""

    ordinal: int
    """From 1 on: as which one it got its type, of those that are invariant along the same axes."""
    name: str
    """Where: a line of the program or a spec, how often that was come by, and the path in a tree."""

    @property
    def word(self) -> int:
        """All of it as a number below 2**60."""
        return (self.ordinal % _MOST + 1 << _BITS) + _number_of(self.name)

    def __str__(self) -> str:
        return f"the gradient of leaf {self.ordinal}, {self.name}"


@lru_cache
def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BITS // 8).digest(), "little")


def ordinal_of(word: int) -> int:
    """The ordinal in a word."""
    return (word >> _BITS) - 1


def differ(mine: int, theirs: int) -> bool:
    """Whether two words speak of different leaves; 0 speaks of none."""
    if mine == theirs or not mine or not theirs:
        return False
    return mine >> _BITS != theirs >> _BITS and (mine ^ theirs) & ((1 << _BITS) - 1) != 0
