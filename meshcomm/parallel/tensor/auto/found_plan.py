"""A plan that was found: ordinary data that can be printed, edited and passed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshcomm.parallel.tensor.plan import Block, Style


class Line(NamedTuple):
    """What a plan does with some parameters or modules."""

    pattern: str
    """Of their names."""
    layers: int
    """How many layers there are, or modules."""
    style: str
    cut: str
    """What is cut."""
    gathered: str
    """What is gathered or summed, and when."""
    bytes: float
    """That a rank sends for a token in a step, forward and backward, of all of them together."""
    note: str
    """Why it is whole, or which other layer it is."""


class TensorPlan(dict[str, Style | Block]):
    """A plan of tensor parallelism that :func:`auto_plan` has found: a dict of patterns and styles.

    Args:
        styles: patterns and styles, the first one that fits counts.
        divide: attributes and by what each is divided, as :func:`tensor_parallel` takes them.
        lines: the table.

    Raises: nothing.

    Example:
        >>> from meshcomm.parallel import TensorPlan
        >>> plan = TensorPlan({"up": "column", "down": "row"}, divide={"heads": 2})
        >>> plan["down"], plan.divide
        ('row', {'heads': 2})
    """

    def __init__(
        self,
        styles: Mapping[str, Style | Block],
        *,
        divide: Mapping[str, int] | None = None,
        lines: Sequence[Line] = (),
    ) -> None:
        super().__init__(styles)
        self.divide = dict(divide or {})
        self.lines = tuple(lines)

    def __str__(self) -> str:
        heads = ("pattern", "layers", "style", "cut", "gathered or summed", "B/token", "")
        rows = [
            (x.pattern, str(x.layers), x.style, x.cut, x.gathered, f"{x.bytes:.0f}" if x.bytes else "", x.note)
            for x in self.lines
        ]
        if self.divide:
            rows += [(name, "", f"divided by {by}", "", "", "", "") for name, by in self.divide.items()]
        total = sum(x.bytes for x in self.lines)
        rows.append(("a rank sends per token and step", "", "", "", "", f"{total:.0f}", ""))
        wide = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
        return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip()
                         for row in (heads, *rows))  # fmt: skip

    def __reduce__(self) -> Any:
        return _again, (dict(self), self.divide, self.lines)


def _again(styles: dict[str, Style | Block], divide: dict[str, int], lines: tuple[Line, ...]) -> TensorPlan:
    return TensorPlan(styles, divide=divide, lines=lines)
