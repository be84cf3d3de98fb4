"""What is said of the line to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcomm.collectives.check import differentiable
from meshcomm.errors import few
from meshcomm.verifying.blame.trail import Step


class Blame(NamedTuple):
    """Where, what else is known, and what to write."""

    line: str = ""
    told: tuple[str, ...] = ()
    fix: str = ""


def look_at(step: Step, steps: Sequence[Step]) -> str:
    """What is wrong begins in it, or in its indices and masks, which are others on each rank, so that nobody knows."""
    todo, found = list(step.of), dict[int, str]()
    while todo:
        j = todo.pop()
        if j not in found and not differentiable(steps[j].value):
            found[j] = steps[j].line
            todo += steps[j].of
    lines = list(dict.fromkeys(line for _, line in sorted(found.items()) if line))
    if not lines:
        return f"look at {step.name}, whose operands are right"
    return f"look at {step.name}, and at its indices or mask, which come of {few(lines)}: its other operands are right"
