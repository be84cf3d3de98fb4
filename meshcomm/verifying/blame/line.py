"""What is said of the line to blame."""

from __future__ import annotations

from typing import NamedTuple


class Blame(NamedTuple):
    """Where, what else is known, and what to write."""

    line: str = ""
    told: tuple[str, ...] = ()
    fix: str = ""
