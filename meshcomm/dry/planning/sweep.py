"""sweep: one program on many meshes, ranked."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from meshcomm.dry.foretold import checked_hardware
from meshcomm.dry.hardware import Hardware
from meshcomm.dry.planning.outcome import (
    Amount,
    Outcome,
    amount_of,
    bars,
    line_of,
    outcome_of,
    reason_of,
    saved,
    tabled,
)
from meshcomm.dry.run import Program, checked_mesh, checked_ranks, drop, run_of
from meshcomm.dry.values import HostValues
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.pictures.picture import Picture, Shown
from meshcomm.runtime.transports.dry.world import dry_world

__all__ = ["Sweep", "SweepRow", "sweep"]

_WHERE = "sweep"
Layers = tuple[int, int, int]
_MUCH = 1.05
"""Steps of which one does so many times as much as another are not told apart by their seconds alone."""


@dataclass(frozen=True)
class SweepRow:
    """A program on one mesh of one machine."""

    mesh: Mapping[str, int]
    hardware: Hardware
    outcome: Outcome | None = None
    """Seconds, memory, what is waited for; None where the program does not run."""
    amount: float | None = None
    """How much a step does, if it is said."""
    reason: str = ""
    """Why it does not run."""
    ranks: tuple[int, ...] = field(default=())
    """Those that ran."""

    @property
    def seconds(self) -> float:
        """Of a step; infinite where there is none."""
        return math.inf if self.outcome is None else self.outcome.seconds

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank has."""
        return 0 if self.outcome is None else self.outcome.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether it runs, and the machine has so much memory."""
        return self.outcome is not None and self.peak_bytes <= self.hardware.memory

    @property
    def exposed(self) -> Mapping[str, float]:
        """Axis to seconds for which nothing is computed, since it is waited for."""
        return {} if self.outcome is None else self.outcome.exposed

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, if it is said how many a step takes in."""
        return None if self.amount is None or self.outcome is None else self.amount / (self.seconds or math.inf)

    def __str__(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())


class Sweep(Shown):
    """What :func:`sweep` has found: ``rows``, the best one first, and what cannot be run."""

    def __init__(self, rows: Iterable[SweepRow]) -> None:
        every = list(rows)
        ran = [row for row in every if row.outcome is not None]
        self.rows = tuple(sorted(ran, key=lambda row: (not row.fits, self._cost(row))))
        """Those that run; those for which the machine's memory is not enough last."""
        self.refused = tuple(row for row in every if row.outcome is None)
        """Those that do not, with the ``reason``."""

    @staticmethod
    def _cost(row: SweepRow) -> float:
        return row.seconds / (row.amount or 1.0)

    @property
    def best(self) -> SweepRow:
        """The first one that fits into memory.

        Raises:
            MeshError: none does.
        """
        if self.rows and self.rows[0].fits:
            return self.rows[0]
        least = min((row.peak_bytes for row in self.rows), default=None)
        what = "no mesh runs." if least is None else f"no mesh fits: the least is {least / 1e9:.4g} GB a rank."
        fail(
            _WHERE,
            what,
            got="; ".join(f"{row}: {row.reason}" for row in self.refused[:3]),
            fix="other meshes; print(found)",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What keeps the rows from being compared."""
        done = [row.outcome.flops for row in self.rows if row.outcome is not None and row.outcome.flops]
        if all(row.amount is None for row in self.rows) and done and max(done) > _MUCH * min(done):
            times = max(done) / min(done)
            return (f"a step on one of these meshes computes {times:.3g} times as much as on another: say tokens=",)
        return ()

    def table(self) -> str:
        """A line for each mesh."""
        axes = list(dict.fromkeys(axis for row in self.rows for axis in row.exposed))
        several = len({row.hardware.name for row in (*self.rows, *self.refused)}) > 1
        told = any(row.amount is not None for row in self.rows)
        heads = ["mesh", *["on"] * several, "ms", *["tokens/s"] * told, "peak GB", "fits"]
        lines = [[*heads, *(f"waits for {axis}" for axis in axes)]]
        for row in self.rows:
            rate = f"{row.tokens_per_second or 0:.0f}"
            cells = [str(row), *[row.hardware.name] * several, f"{1e3 * row.seconds:.3f}", *[rate] * told]
            cells += [f"{row.peak_bytes / 1e9:.2f}", "yes" if row.fits else "no"]
            lines.append([*cells, *(f"{1e3 * row.exposed.get(axis, 0.0):.3f}" for axis in axes)])
        return tabled(lines)

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(row.hardware.name for row in (*self.rows, *self.refused)))
        lines = [f"on {names}", *([self.table()] if self.rows else []), *(f"note: {note}" for note in self.notes)]
        alike: dict[str, list[str]] = {}
        for row in self.refused:
            alike.setdefault(row.reason, []).append(str(row))
        return "\n".join([*lines, *(f"not possible: {'; '.join(rows)}: {reason}" for reason, rows in alike.items())])

    def __repr__(self) -> str:
        return f"Sweep({len(self.rows)} meshes, {len(self.refused)} not possible)"

    def __iter__(self) -> Iterator[SweepRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self) -> Picture:
        """A bar for each mesh: of what the time for as much as the largest step does consists."""
        most = max((row.amount or 1.0 for row in self.rows), default=1.0)
        named = []
        for row in self.rows:
            assert row.outcome is not None
            memory = f"{row.peak_bytes / 1e9:.3g} GB" + ("" if row.fits else ", too much")
            named.append((f"{row}: {memory}", row.outcome, most / (row.amount or 1.0)))
        names = ", ".join(dict.fromkeys(row.hardware.name for row in (*self.rows, *self.refused)))
        return bars(named, f"{len(self.rows)} meshes, on {names}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it: ``.csv``, ``.json``, or the picture as ``.svg``, ``.html``, ``.txt``."""
        saved(_WHERE, path, [_cells(row) for row in (*self.rows, *self.refused)], self.picture)


def _cells(row: SweepRow) -> dict[str, Any]:
    head: dict[str, Any] = {"mesh": str(row), **row.mesh, "hardware": row.hardware.name}
    if row.outcome is None:
        return {**head, "reason": row.reason}
    waits = {f"waits for {axis}": seconds for axis, seconds in row.exposed.items()}
    rate = {} if row.amount is None else {"tokens": row.amount, "tokens_per_second": row.tokens_per_second}
    return {**head, "seconds": row.seconds, **rate, "peak_bytes": row.peak_bytes, "fits": row.fits, **waits}


def sweep(
    fn: Callable[..., object],
    meshes: Iterable[Mapping[str, int] | Mesh],
    hardware: Hardware | Sequence[Hardware],
    *,
    tokens: Amount | None = None,
    layers: Layers | Callable[[Mapping[str, int]], Layers] | None = None,
    ranks: Sequence[int] = (0,),
    host_values: HostValues = None,
) -> Sweep:
    """Which mesh is best for a program: run it dry on each of them, as one rank for all that are alike.

    ::

        found = mc.sweep(train, [{"fsdp": 256}, {"fsdp": 32, "tp": 8}], mc.hardware("h100"), tokens=256 * 8192)

        mesh           ms   tokens/s  peak GB  fits  waits for fsdp  waits for tp
        fsdp 256      ...

    Args:
        fn: as for :func:`dry_run`: a program of no arguments, which finds its mesh as the current one and may
            ``yield``; the last part of it is what counts.
        meshes: axis to size, each; or meshes, of which sizes and names are taken.
        hardware: the machine; or several, on each of which each mesh is timed: a mesh runs once.
        tokens: how many tokens (rows, images) a step takes in on all ranks: a number, or a function of the mesh, a
            dict, that gives it; for a program whose ranks along ``fsdp`` have two rows each, ``lambda mesh: 2 * 8192 *
            mesh["fsdp"]``. Then the best is the one with most tokens per second; otherwise with fewest seconds, and
            ``notes`` say if steps do not do as much.
        layers: ``(few, many, all)``, or a function of the mesh that gives them: ``fn(layers)`` is run with few and many
            layers, all of which are alike, and what all would take is on the line through both: (1, 2, 8) for
            a stage of eight. Few is at least two where layers are gathered ahead.
        ranks: those that run, and count; ranks with whom they exchange messages too, such as other stages.
        host_values: as for :func:`dry_run`.

    Returns: a :class:`Sweep`; ``print`` it, ``.best``, ``.rows``, ``.save("meshes.csv")``. A mesh on which the program
        does not run, because its heads cannot be divided or it has more stages than layers, is in ``.refused`` with
        what the program says; one that needs more memory than the machine has comes last.

    Cost: a dry run for each mesh, two with ``layers``; nothing is communicated. As many ranks as there are take no
        more time than one.

    Raises:
        MeshError: no meshes; sizes that are none; no hardware; tokens or layers that are no such numbers; called inside
            of a dry run.

    Example:
        >>> import torch, meshcomm as mc
        >>> def step():
        ...     model = mc.parallel.fully_shard(torch.nn.Linear(1024, 1024), "fsdp", grads="mean")
        ...     model(torch.randn(64, 1024)).sum().backward()
        >>> found = mc.sweep(step, [{"fsdp": 8}, {"fsdp": 16}, {"dp": 8}], mc.hardware("h100"))
        >>> len(found.rows), found.best.mesh, "'fsdp'" in found.refused[0].reason
        (2, {'fsdp': 8}, True)
    """
    if not callable(fn):
        fail(
            _WHERE,
            f"fn is not callable but {type(fn).__name__}.",
            fix="a function without arguments: one rank's program",
        )
    if dry_world() is not None:
        fail(_WHERE, "called inside of a dry run.", fix="call it outside; mc.is_dry() says where one is")
    machines = _machines(hardware)
    shapes = _meshes(meshes)
    rows: list[SweepRow] = []
    for shape, names in shapes:
        amount, depth = amount_of(_WHERE, tokens, shape), _layers(layers, shape)
        rows += _one(fn, shape, names, machines, amount, depth, ranks, host_values)
    return Sweep(rows)


def _one(
    fn: Callable[..., object],
    shape: dict[str, int],
    names: dict[str, tuple[str, ...]],
    machines: Sequence[Hardware],
    amount: float | None,
    depth: Layers | None,
    ranks: Sequence[int],
    host_values: HostValues,
) -> list[SweepRow]:
    """A mesh, on each machine."""
    runs = []
    chosen = checked_ranks(_WHERE, ranks, math.prod(shape.values()))
    try:
        for count in (None,) if depth is None else depth[:2]:
            program = Program(fn if count is None else functools.partial(fn, count), shape, names, host_values)
            runs.append(run_of(program, chosen, None, partners=True))
    except Exception as error:
        reason = reason_of(error)
        drop(error)
        return [SweepRow(shape, machine, amount=amount, reason=reason) for machine in machines]
    found = []
    for machine in machines:
        try:
            checked_hardware(machine, math.prod(shape.values()))
        except ValueError as error:
            found.append(SweepRow(shape, machine, amount=amount, reason=reason_of(error)))
            continue
        each = [outcome_of(run.on(machine)) for run in runs]
        if depth is not None:
            few, many, every = depth
            each = [line_of(each[0], each[1], (every - few) / (many - few))]
        found.append(SweepRow(shape, machine, each[0], amount, ranks=runs[0].ranks))
    return found


def _machines(hardware: Any) -> list[Hardware]:
    machines = [hardware] if isinstance(hardware, Hardware) or not isinstance(hardware, Sequence) else list(hardware)
    wrong = [each for each in machines if not isinstance(each, Hardware)]
    if not machines or wrong or isinstance(hardware, str):
        got = hardware if isinstance(hardware, str) else wrong[0] if wrong else hardware
        fail(_WHERE, f"hardware={got!r} is none.", fix='mc.hardware("h100"), or several')
    return machines


def _meshes(meshes: Any) -> list[tuple[dict[str, int], dict[str, tuple[str, ...]]]]:
    if isinstance(meshes, (Mapping, Mesh, str)) or not isinstance(meshes, Iterable):
        fail(_WHERE, f"meshes={meshes!r} are no list of meshes.", fix='[{"fsdp": 256}, {"fsdp": 32, "tp": 8}]')
    found = [checked_mesh(_WHERE, mesh) for mesh in meshes]
    if not found:
        fail(_WHERE, "there are no meshes.", fix='[{"fsdp": 256}, {"fsdp": 32, "tp": 8}]')
    return found


def _layers(layers: Any, shape: Mapping[str, int]) -> Layers | None:
    if layers is None:
        return None
    given = layers(dict(shape)) if callable(layers) else layers
    whole = isinstance(given, Sequence) and len(given) == 3 and not isinstance(given, str)
    if not whole or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        fail(_WHERE, f"layers={given!r} are no three numbers.", fix="(few, many, all), such as (2, 4, 32)")
    few, many, every = map(int, given)
    if not 0 < few < many or every < 1:
        fail(_WHERE, f"layers={given!r} are not in order.", fix="0 < few < many, and all, such as (2, 4, 32)")
    return few, many, every
