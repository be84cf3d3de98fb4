"""Whether ranks that see other data drop other elements, and those that see the same the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshcomm.errors import text
from meshcomm.verifying.report import Finding
from meshcomm.verifying.training.draws import Drawn
from meshcomm.verifying.training.seen import WHERE, Seen


def dropout_findings(seen: Sequence[Seen], sizes: Mapping[str, int]) -> list[Finding]:
    """One for each line at which masks are wrong, of each of the two kinds."""
    found: dict[tuple[str, bool], Finding] = {}
    for number, at, draws in _together(seen):
        for (one, a), (two, b) in _pairs(draws):
            same = a.input == b.input
            if same == (a.mask == b.mask) or (a.line, same) in found:
                continue
            who = f"ranks {one} and {two}, call {at + 1} of step {number}"
            if same:
                what = f"{a.what} at {a.line} drops other elements on ranks whose activations are the same"
                fix = ("what is replicated is dropped alike: with mc.fork_rng(()) around it, mc.rng, or "
                       "parallel.tensor_parallel, which does that")  # fmt: skip
            else:
                what = f"{a.what} at {a.line} drops the same elements on ranks whose activations differ"
                fix = (
                    "draw differently along the axes of the data: mc.fork_rng(axis), mc.rng, or no equal seeds on ranks"
                )
            got = f"{who}: {_place(seen[one])} and {_place(seen[two])}"
            found[a.line, same] = Finding(
                "dropout", a.line, text(WHERE, f"{what}, on {dict(sizes)}.", got=got, fix=fix)
            )
    return list(found.values())


def _place(seen: Seen) -> str:
    return ", ".join(f"{axis}={at}" for axis, at in seen.place.items())


def _together(seen: Sequence[Seen]) -> Iterator[tuple[int, int, list[tuple[int, Drawn]]]]:
    """Step by step, of each line the calls of all ranks that come at the same place there."""
    for number in sorted(seen[0].moments):
        lines: dict[tuple[str, int], list[tuple[int, Drawn]]] = {}
        for rank, each in enumerate(seen):
            count: dict[str, int] = {}
            for drawn in each.moments[number].drawn:
                if drawn.mask:
                    at = count[drawn.line] = count.get(drawn.line, -1) + 1
                    lines.setdefault((drawn.line, at), []).append((rank, drawn))
        for (_, at), draws in lines.items():
            yield number, at, draws


def _pairs(draws: Sequence[tuple[int, Drawn]]) -> Iterator[tuple[tuple[int, Drawn], tuple[int, Drawn]]]:
    for at, one in enumerate(draws):
        for two in draws[at + 1 :]:
            yield one, two
