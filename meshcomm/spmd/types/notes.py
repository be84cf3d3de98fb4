"""What all notes of the checker of varying types have in common, whatever they say and whatever they stand on."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from typing_extensions import Self


class Note:
    """A note on a tensor, which copies of it share and of which nothing is saved: a tensor that is saved with a note
    must load where only plain data may.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Ever:
    """Whether any note of a kind was ever made: until then nobody looks for one, for to find none takes long."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = False
