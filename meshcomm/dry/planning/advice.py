"""advice: what a program would take with one thing changed, for many things, each of them tried.

::

    the run ──> the same again, heard ──> is it the same?  ──> options of what it called ──> a run with each
            ──> its log on a machine with one thing twice as fast; its log without the calls over an axis
            ──> a run on each other mesh ──> a run with each change that is given
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from meshcomm.dry.hardware import Hardware, LinkSpeed
from meshcomm.dry.log import Begin, Log, Wait
from meshcomm.dry.planning.options import Listener, options_worth_a_try
from meshcomm.dry.planning.outcome import (
    Amount,
    Outcome,
    amount_of,
    bars,
    outcome_of,
    reason_of,
    saved,
    tabled,
)
from meshcomm.dry.replay import replayed
from meshcomm.dry.timeline import Timeline
from meshcomm.errors import fail
from meshcomm.pictures.picture import Picture, Shown
from meshcomm.tracing.event import axis_text

__all__ = ["KINDS", "Advice", "Again", "Trial", "advised"]

_WHERE = "DryRun.advice"
_MUCH = 0.05
KINDS = ("program", "mesh", "machine", "limit", "given")
"""Of changes."""


class Again(Protocol):
    """Run the program once more."""

    def __call__(
        self, machine: Hardware, shape: Mapping[str, int] | None, options: Any, given: Mapping[str, Any]
    ) -> Any:
        """On this machine; on another mesh, with other options, with arguments of its own."""


@dataclass(frozen=True)
class Trial:
    """One change that was tried."""

    name: str
    """What is changed: ``"fully_shard(regather=False)"``."""
    kind: str
    """``"program"``, ``"mesh"``, ``"machine"``, ``"limit"`` or ``"given"``."""
    after: Outcome | None
    """What the program takes with it; None where it does not run."""
    seconds: float = math.inf
    """For as much as the program does without it."""
    fits: bool = True
    """Whether the memory of the machine is enough."""
    told: str = ""
    """What else it changes; or why it does not run."""
    compares: bool = True
    """Whether it is known that the program does as much as before, or how much."""


class Advice(Shown):
    """What :meth:`DryRun.advice` has tried, what helps most first."""

    def __init__(self, before: Outcome, machine: Hardware, trials: Sequence[Trial]) -> None:
        self.before = before
        """Seconds, memory and what is waited for, as the program is."""
        self.hardware = machine
        order = sorted((t for t in trials if t.after is not None), key=lambda t: (not t.fits, t.seconds))
        self.trials = tuple(order)
        """Those that run; what is more than the machine's memory last."""
        self.refused = tuple(t for t in trials if t.after is None)
        """Those that do not."""

    @property
    def best(self) -> Trial | None:
        """The one of the program, of the mesh or of yours that helps most; None if none does."""
        ours = (t for t in self.trials if t.fits and t.compares and t.kind in ("program", "mesh", "given"))
        return next((t for t in ours if t.seconds < self.before.seconds * (1 - 1e-3)), None)

    def table(self) -> str:
        """A line for each: seconds, memory, and for how long each axis is waited for."""
        every = [self.before, *(t.after for t in self.trials if t.after is not None)]
        axes = list(dict.fromkeys(axis for each in every for axis in each.exposed))
        heads = ["change", "kind", "ms", "gain", "peak GB", *(f"waits for {axis}" for axis in axes), ""]
        rows = [heads, ["as it is", "", *_figures(self.before, self.before.seconds, "", axes), ""]]
        for t in self.trials:
            assert t.after is not None
            gain = f"{1 - t.seconds / self.before.seconds:+.1%}" if self.before.seconds else ""
            also = "more than its memory" if not t.fits else t.told
            rows.append([t.name, t.kind, *_figures(t.after, t.seconds, gain, axes), also])
        return tabled(rows)

    def __str__(self) -> str:
        best = self.best
        gain = "" if best is None else f"{1 - best.seconds / self.before.seconds:.1%} less time"
        first = "nothing that was tried is faster" if best is None else f"most helps {best.name}: {gain}"
        lines = [f"on {self.hardware.name}: {first}", self.table()]
        return "\n".join([*lines, *(f"not possible: {t.name}: {t.told}" for t in self.refused)])

    def __repr__(self) -> str:
        return f"Advice({len(self.trials)} changes tried)"

    def picture(self) -> Picture:
        """A bar for each: of what its seconds consist."""
        every = [("as it is", self.before, 1.0)]
        for t in self.trials:
            if t.after is not None:
                every.append((t.name, t.after, t.seconds / t.after.seconds if t.after.seconds else 1.0))
        return bars(every, f"changes, on {self.hardware.name}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it: ``.csv``, ``.json``, or the picture as ``.svg``, ``.html``, ``.txt``."""
        rows = [_row("as it is", "", self.before, self.before.seconds, True, "")]
        rows += [_row(t.name, t.kind, t.after, t.seconds, t.fits, t.told) for t in self.trials if t.after]
        rows += [{"change": t.name, "kind": t.kind, "told": t.told} for t in self.refused]
        saved(_WHERE, path, rows, self.picture)


def _figures(outcome: Outcome, seconds: float, gain: str, axes: Sequence[str]) -> list[str]:
    waits = [f"{1e3 * outcome.exposed.get(axis, 0.0):.3f}" for axis in axes]
    return [f"{1e3 * seconds:.3f}", gain, f"{outcome.peak_bytes / 1e9:.2f}", *waits]


def _row(name: str, kind: str, outcome: Outcome, seconds: float, fits: bool, told: str) -> dict[str, Any]:
    waits = {f"waits for {axis}": each for axis, each in outcome.exposed.items()}
    head = {"change": name, "kind": kind, "seconds": seconds, "peak_bytes": outcome.peak_bytes, "fits": fits}
    return {**head, **waits, "told": told}


# ------------------------------------------------------------------------------------------------------------- tried


def advised(
    run: Any,
    again: Again,
    changes: Mapping[str, Mapping[str, Any]] | None,
    tokens: Amount | None,
    kinds: Sequence[str],
) -> Advice:
    """Try all of these kinds."""
    machine: Hardware = run.timeline.hardware
    _check(kinds)
    own = amount_of(_WHERE, tokens, run.shape)
    before = outcome_of(run)
    found: list[Trial] = []
    heard = Listener()
    if set(kinds) & {"program", "mesh", "given"}:
        _refuse_what_differs(run, again(machine, None, heard, {}))

    def tried(kind: str, name: str, told: str = "", shape: Any = None, options: Any = None, given: Any = None) -> None:
        try:
            after = outcome_of(again(machine, shape, options, given or {}))
        except Exception as error:
            found.append(Trial(name, kind, None, told=reason_of(error)))
            return
        much = after.flops / before.flops if before.flops else 1.0
        if own is not None:
            now = amount_of(_WHERE, tokens, shape or run.shape, given)
            assert now is not None
            share = own / now
        else:
            share = 1 / much if shape is not None and much else 1.0
        known = kind != "given" or own is not None or abs(much - 1) < _MUCH
        said = told if known else f"computes {much:.3g} times as much: say tokens="
        found.append(replace(_trial(name, kind, after, share * after.seconds, machine, said), compares=known))

    if "program" in kinds:
        for change in options_worth_a_try(heard.calls):
            tried("program", change.name, change.told, options=Listener(change))
    if "mesh" in kinds:
        for shape in _other_meshes(run.shape):
            tried("mesh", f"a mesh of {shape}", shape=shape)
    if "machine" in kinds:
        for name, faster in _faster(machine):
            after = outcome_of(run.on(faster))
            found.append(_trial(name, "machine", after, after.seconds, machine, ""))
    if "limit" in kinds:
        found += _without_calls(run, machine, before)
    for name, given in _checked_changes(changes, run.program).items():
        tried("given", name, given=given)
    return Advice(before, machine, found)


def _trial(name: str, kind: str, after: Outcome, seconds: float, machine: Hardware, told: str) -> Trial:
    return Trial(name, kind, after, seconds, after.peak_bytes <= machine.memory, told)


def _check(kinds: Any) -> None:
    wrong = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind not in KINDS]
    if wrong:
        fail(_WHERE, f"kinds={kinds!r} are not known.", fix=f"some of {KINDS}")


def _checked_changes(changes: Any, fn: Any) -> dict[str, dict[str, Any]]:
    """By name, if the program takes them."""
    if changes is None:
        return {}
    fix = 'such as {"batch of 4": {"batch": 4}}, for def train(batch=2): ...'
    if not isinstance(changes, Mapping) or not all(isinstance(given, Mapping) for given in changes.values()):
        fail(_WHERE, f"changes={changes!r} are none.", fix=fix)
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):
        fail(_WHERE, "nobody knows which arguments fn takes.", got=repr(fn), fix="a function of your own around it")
    for name, given in changes.items():
        try:
            signature.bind(**given)
        except TypeError as error:
            fail(_WHERE, f"changes[{name!r}]: fn cannot be called so: {error}.", got=f"fn{signature}", fix=fix)
    return {str(name): dict(given) for name, given in changes.items()}


def _refuse_what_differs(run: Any, other: Any) -> None:
    """A program that is not what it was cannot be compared with what it becomes."""
    if math.isclose(run.seconds, other.seconds, rel_tol=1e-6) and run.flops == other.flops:
        return
    what = f"the program does something else when it runs again: {run.seconds:.4g} s, then {other.seconds:.4g} s."
    fix = "make the model, the data and their iterators inside of fn: what is made outside is used up by the first run"
    fail(_WHERE, what, got=f"operations {sum(run.flops.values())}, then {sum(other.flops.values())}", fix=fix)


def _other_meshes(shape: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Of as many ranks: one axis divided by its least factor, another one multiplied."""
    for a, size in shape.items():
        factor = next((f for f in range(2, size + 1) if size % f == 0), None)
        for b in shape if factor is not None else ():
            if a != b:
                yield {**shape, a: size // factor, b: shape[b] * factor}  # type: ignore[operator]


def _faster(machine: Hardware) -> Iterator[tuple[str, Hardware]]:
    """Machines of which one thing is twice as fast."""

    def link(each: LinkSpeed, latency: float = 1.0, bandwidth: float = 1.0) -> LinkSpeed:
        return LinkSpeed(each.latency * latency, each.bandwidth * bandwidth)

    inner, outer = machine.within, machine.between
    yield "links within a node of twice the bandwidth", replace(machine, within=link(inner, bandwidth=2))
    yield "links between nodes of twice the bandwidth", replace(machine, between=link(outer, bandwidth=2))
    half = replace(machine, within=link(inner, 0.5), between=link(outer, 0.5), call=machine.call / 2)
    yield "half the latency of calls", half
    rates = {dtype: 2 * rate for dtype, rate in machine.flops.items()}
    yield "products and attention twice as fast", replace(machine, flops=rates)
    yield "memory of twice the bandwidth", replace(machine, memory_bandwidth=2 * machine.memory_bandwidth)
    yield "a host that needs half the time for an operation", replace(machine, launch=machine.launch / 2)


def _without_calls(run: Any, machine: Hardware, before: Outcome) -> Iterator[Trial]:
    """On paper: as fast as if all that is waited for on an axis were hidden."""
    for axis in before.exposed:
        logs = {rank: _without(log, axis) for rank, log in run.logs.items()}
        ran = replayed(logs, machine)
        times = Timeline(machine, {rank: ran[rank] for rank in run.ranks})
        exposed = {axis_text(each): seconds for each, seconds in times.exposed().items()}
        after = replace(before, seconds=times.seconds, exposed=exposed, parts=dict(times.rows()))
        yield Trial(
            f"calls over {axis} that take no time", "limit", after, times.seconds, True, "no overlap gives more"
        )


def _without(log: Log, axis: str) -> Log:
    gone = {each.at for each in log.steps if isinstance(each, Begin) and axis_text(each.talk.axis) == axis}
    found = copy.copy(log)
    found.steps = [each for each in log.steps if not (isinstance(each, (Begin, Wait)) and each.at in gone)]
    return found
