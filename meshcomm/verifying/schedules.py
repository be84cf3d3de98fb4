"""Whether what a program gives depends on the order in which its ranks run.

::

    the usual order       the results, and what is heard: done(), time-outs, threads, Python objects that ranks share
    nothing heard         a Kahn network: one order stands for all; one more is run as a check of that
    something heard       so many orders that a seed draws; where one gives other results, the shortest order that does

Two orders that differ by one turn are printed: with the one the results are as usual, with the other they are not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import text
from meshcomm.runtime.callsite import site_at
from meshcomm.runtime.transports.threads.orders import Issue, Order, ordered
from meshcomm.verifying.report import Finding
from meshcomm.verifying.shared_state import SharedState

T = TypeVar("T")

_SHOWN = 6
"""Calls of an order that are printed."""
_TRIES = 14
"""Runs that it takes at most to find the shortest order."""


class Alike(NamedTuple):
    """What came of it."""

    findings: list[Finding]
    notes: list[str]


class _Run(NamedTuple):
    order: Order
    results: Any
    error: BaseException | None


class Heard:
    """A run in the usual order that is made for something else: what comes of it, and what is heard meanwhile."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.before, self.order = SharedState(fn), Order()
        self.results: Sequence[Any] | None = None
        self._fn = fn

    def run(self, run: Callable[[], T], results: Callable[[T], Sequence[Any]]) -> T:
        """What it gives; ``results``: those of it that another order is compared with."""
        with ordered(self.order):
            found = run()
        self.results = results(found)
        return found

    def is_clean(self) -> bool:
        """Whether nothing is known of which a result can depend on the order."""
        return self.results is not None and not self.order.heard and not SharedState(self._fn).changed(self.before)


def runs_alike(
    run: Callable[[], Sequence[Any]],
    fn: Callable[..., Any] | None = None,
    *,
    schedules: int = 4,
    seed: int = 0,
    where: str = "verify",
    on: str = "",
    made: Heard | None = None,
) -> Alike:
    """Whether ``run`` gives the same bits in any order of the ranks that it launches.

    Args:
        run: calls :func:`meshcomm.launch` in this process, and gives a list with what each rank returned.
        fn: the program of a rank, whose closure and globals are looked through for what ranks share.
        schedules: how many orders are drawn, where something was heard of which a result can depend on the order.
        seed: of these.
        where: as texts begin.
        on: the mesh, in words.
        made: a run in the usual order that there was already, of ``fn``. Where nothing was heard in it, and another
            order gives the same, it is the first one.

    Returns: findings of kind ``"order"``, and notes.

    Cost: two runs where nothing is heard, one beside ``made``; else ``schedules`` and one, and some more where they
        differ.
    """
    clean = made is not None and made.is_clean()
    before = made.before if made is not None else SharedState(*([] if fn is None else [fn]))

    def taken(order: Order) -> _Run:
        before.restore()
        try:
            with ordered(order):
                return _Run(order, run(), None)
        except Exception as error:
            return _Run(order, None, error)

    if made is not None and clean and schedules and made.order.turns:
        first = _Run(made.order, made.results, None)
        if not _difference(first, taken(Order(f"{seed}, 0"))):
            before.restore()
            return Alike([], [_said({}, 1)])
    usual = taken(Order())
    if usual.error is not None:
        raise usual.error
    changed = SharedState(*([] if fn is None else [fn])).changed(before)
    heard = dict(usual.order.heard)
    if changed:
        heard["shared Python state"] = ", ".join(map(repr, changed[:4])) + (", ..." if len(changed) > 4 else "")
    if not usual.order.turns:
        return Alike([], ["one rank has no orders."] if schedules else [])
    count = schedules if heard else min(schedules, 1)
    for number in range(count):
        other = taken(Order(f"{seed}, {number}"))
        difference = _difference(usual, other)
        if difference:
            again = taken(Order())
            if _difference(usual, again):
                return Alike([], [_unsteady(_difference(usual, again), heard)])
            return Alike([_finding(taken, usual, other, heard | other.order.heard, where, on)], [])
    before.restore()
    return Alike([], [_said(heard, count)])


# ----------------------------------------------------------------------------------------------------------- in words


def _said(heard: dict[str, str], count: int) -> str:
    if heard:
        return (
            f"{_and(heard)}, of which a result can depend on the order of the ranks: {count} orders that were drawn "
            "gave the same bits."
        )
    checked = "; one more was run" if count else ""
    return (
        "one order of the ranks stands for all: no done(), time-out, thread or shared Python state, and messages are "
        f"matched by (source, destination, tag), a Kahn network{checked}."
    )


def _and(heard: dict[str, str]) -> str:
    return "; ".join(f"{what} ({where})" for what, where in heard.items())


def _unsteady(difference: str, heard: dict[str, str]) -> str:
    more = f" ({_and(heard)})" if heard else ""
    return (
        f"two runs in one order differ, so that orders cannot be compared: {difference}{more}; "
        "clocks, files and os.urandom make such numbers."
    )


_FIXES = {
    "done()": "what a rank does must not depend on done() of another one's call: wait()",
    "a time-out": "what a rank does must not depend on whether a time was up",
    "a thread": "let the thread hand on what it made through a queue that the rank waits for",
    "shared Python state": "give each rank objects of its own, made inside of the function; ranks tell each other by "
    "collectives alone",
}


def _finding(
    taken: Callable[[Order], _Run], usual: _Run, other: _Run, heard: dict[str, str], where: str, on: str
) -> Finding:
    right, wrong = _shortest(taken, usual, other)
    first = next((i for i, pair in enumerate(zip(right.order.issued, wrong.order.issued, strict=False))
                  if (pair[0].rank, pair[0].spot) != (pair[1].rank, pair[1].spot)), 0)  # fmt: skip
    orders = [_listed(name, each.order.issued, first)
              for name, each in (("one order", right), ("another one", wrong))]  # fmt: skip
    fixes = [_FIXES[what] for what in _FIXES if what in heard]
    what = f"what the ranks give depends on their order{f', on {on}' if on else ''}: {_difference(right, wrong)}."
    got = (_and(heard) if heard else "nothing that is known to make a difference") + "\n" + "\n".join(orders)
    fix = fixes[0] if fixes else "look for what ranks share: files, class attributes, globals of other modules"
    line = next((place for name, place in heard.items() if name in ("done()", "a time-out")), "")
    if not line and first < len(wrong.order.issued):
        line = str(site_at(wrong.order.issued[first].spot))
    return Finding("order", line, text(where, what, got=got, fix=fix))


def _listed(name: str, issued: Sequence[Issue], first: int) -> str:
    start = max(first - 2, 0)
    lines = [*(["..."] if start else []), *map(str, issued[start : start + _SHOWN])]
    lines += ["..."] if start + _SHOWN < len(issued) else []
    return f"  {name}:\n" + "\n".join(f"    {line}" for line in lines or ["no rank issued a call"])


def _shortest(taken: Callable[[Order], _Run], usual: _Run, other: _Run) -> tuple[_Run, _Run]:
    """Two orders that differ by one turn, of which the second gives something else than usual."""
    turns = other.order.turns
    low, high, right, wrong = 0, len(turns), usual, other
    for _ in range(_TRIES):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        tried = taken(Order(first=turns[:middle]))
        if _difference(usual, tried):
            high, wrong = middle, tried
        else:
            low, right = middle, tried
    return right, wrong


# ------------------------------------------------------------------------------------------------------- what differs


def _difference(one: _Run, two: _Run) -> str:
    """What differs between the results, in words; nothing if they are the same bits."""
    if two.error is not None or one.error is not None:
        said = [f"{type(run.error).__name__}: {str(run.error).splitlines()[0] if str(run.error) else ''}"
                for run in (one, two) if run.error is not None]  # fmt: skip
        same = len(said) == 2 and said[0] == said[1]
        return "" if same else f"in one of them it raises {said[0]}"
    for rank, (a, b) in enumerate(zip(one.results, two.results, strict=True)):
        found = _leaf_difference(a, b)
        if found:
            return f"rank {rank} gives {found}"
    return ""


def _leaf_difference(a: Any, b: Any) -> str:
    ours, theirs = _torch.tree_leaves_with_path(a), _torch.tree_leaves_with_path(b)
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return "results of other structure"
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        at = f" at {path}" if path else ""
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"a tensor of another shape or dtype{at}"
            if not _same_bits(x, y):
                off = (x.double() - y.double()).abs().max().item() if not x.is_complex() else float("nan")
                return f"other numbers{at}, by up to {off:.3g}"
        elif _comparable(x) and _comparable(y) and x != y and not (x != x and y != y):
            return f"{x!r} or {y!r}{at}"
    return ""


def _comparable(x: Any) -> bool:
    return isinstance(x, (str, bytes, int, float, complex, bool, type(None), os.PathLike, torch.dtype, torch.Size))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    x, y = x.detach(), y.detach()
    return torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())
