"""Which torch this is: the versions that this library was tested with, and the private names that this one lacks.

What is private may be moved by any new torch. So each name is looked for once, at import, and where it is not there its
user takes a public way, or refuses one named feature.
"""

from __future__ import annotations

import logging
import os
import re
from operator import attrgetter
from typing import Any, NamedTuple, TypedDict

import torch

TESTED = ("2.11", "2.13", "2.14", "2.15")
"""With these the whole test suite has passed."""

WITHOUT = "MESHCOMM_WITHOUT"
"""The variable with private names of torch to do without, as on a torch that lacks them; or with where they begin."""


class Name(NamedTuple):
    """A private name of torch."""

    name: str
    costs: str
    """What is slower or refused without it."""


known: list[Name] = []
"""All that were looked for, in that order."""
lacking: list[Name] = []
"""Those that are not there."""

_avoided = os.environ.get(WITHOUT, "").replace(",", " ").split()


def find(name: str, costs: str, instead: Any = None) -> Any:
    """What torch has under a dotted name, or ``instead``; then :data:`lacking` says what that costs."""
    try:
        found, there = attrgetter(name.removeprefix("torch."))(torch), True
    except (AttributeError, ImportError, RuntimeError):
        found, there = None, False
    return found if _noted(name, costs, there) else instead


def has(name: str, costs: str, owner: object = None) -> bool:
    """Whether torch has it, or ``owner`` an attribute of its last part."""
    if owner is not None:
        return _noted(name, costs, hasattr(owner, name.rpartition(".")[2]))
    return find(name, costs, known) is not known


def _noted(name: str, costs: str, there: bool) -> bool:
    there = there and not any(f"{name}.".startswith(f"{part}.") for part in _avoided)
    if name not in (other.name for other in known):
        known.append(Name(name, costs))
        if not there:
            lacking.append(known[-1])
    return there


class Lack(TypedDict):
    """What is wrong, and what mends it."""

    what: str
    fix: str


def lack(name: str, instead: str = "", *, needs: str = "this") -> Lack:
    """What to say of a feature that cannot be had without a private name."""
    tested = f"a torch that meshcomm was tested with: {', '.join(TESTED)}"
    return Lack(what=f"torch {torch.__version__} has no {name}, which {needs} needs.", fix=f"{instead}{tested}")


def untested() -> str | None:
    """A line for a torch that is newer than what was tested; None for any other."""
    if _numbers(str(torch.__version__)) <= _numbers(TESTED[-1]):
        return None
    return f"torch {torch.__version__} is newer than {TESTED[-1]}, the newest that this meshcomm was tested with"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


_said: list[str] = []


def say_if_untested() -> None:
    """Log that, once in a process."""
    line = untested()
    if line is not None and line not in _said:
        _said.append(line)
        less = f"; of torch's private names {len(lacking)} are missing" if lacking else ""
        logging.getLogger("meshcomm").warning("meshcomm: %s%s. `python -m meshcomm` says more.", line, less)
