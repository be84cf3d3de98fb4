"""Schedule: what each rank of a pipeline does, in which order: a table, checked and run on paper when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshcomm import errors
from meshcomm.parallel.pipeline.actions import PLACEMENTS, Action, Stages, Table
from meshcomm.parallel.pipeline.checked import WHERE, check, read
from meshcomm.parallel.pipeline.drawn import drawn
from meshcomm.parallel.pipeline.named import CHUNKS, NAMED, PLACED
from meshcomm.parallel.pipeline.simulate import Costs, DeadlockError, Simulation, Span, cost_of, simulate
from meshcomm.pictures.picture import Picture, Shown

__all__ = ["Action", "Schedule", "Simulation"]


@dataclass(frozen=True, repr=False)
class Schedule(Shown):
    """What each rank of a pipeline does, in which order: data, which nothing can be wrong with once it is made.

        rank 0  F0 F1 .. B0 F2 B1 ..       F0.3: forward of chunk 0 (the first of this rank's stages), microbatch 3
        rank 1  .. F0 B0 F1 B1 ..          B whole backward; or D for the inputs and later W for the weights

    Type: neither; it is equal on every rank, and known without communication
    Args:
        table: for each rank along the axis its actions in order: ``(kind, chunk, microbatch)``, or their texts
            (``"F0.3"``), or one text with blanks between.
        chunks, microbatches: how many stages a rank has, how many microbatches there are; None: what the table has.
        placement: "loop" (rank r's chunk c is stage ``r + ranks * c``), or "v" (every second chunk goes the other way:
            of two, r and ``2 * ranks - 1 - r``).
        name: what it is called in texts and pictures.
    Returns: a schedule. Each rank does its actions in order, and nobody waits to send: it ends whatever they cost
    Backward: B, or D and W, are a microbatch's backward through a stage; W may come any time after D, and what its
        forward keeps is alive until then
    Cost: no communication; time in proportion to the number of actions
    Raises:
        MeshError: an action that is repeated, missing, unknown, or before what it needs; B beside D or W; ranks that
            wait for each other, with the cycle.
    Example:
        >>> from meshcomm.parallel import Schedule
        >>> schedule = Schedule.of("1f1b", ranks=2, chunks=1, microbatches=2)
        >>> schedule.bubble, schedule.peak
        (0.5, (2, 1))
        >>> print(schedule.draw())
        rank 0  F0 F1 .. .. B0 == .. B1 ==
        rank 1  .. F0 B0 == F1 B1 == .. ..
        >>> Schedule([["F0.0", "D0.0", "W0.0"]]).table[0][1]
        Action(kind='D', chunk=0, microbatch=0)
    """

    table: Table
    chunks: int = None  # type: ignore[assignment]  # read from the table
    microbatches: int = None  # type: ignore[assignment]
    placement: str = "loop"
    name: str = field(default="table", compare=False)

    def __post_init__(self) -> None:
        table = read(self.table)
        object.__setattr__(self, "table", table)
        if not table:
            errors.fail(WHERE, "the table has no rank", fix="a row of actions for each rank along the axis")
        for what, at in (("chunks", 1), ("microbatches", 2)):
            if getattr(self, what) is None:
                number = 1 + max((int(action[at]) for row in table for action in row), default=-1)
                object.__setattr__(self, what, number)
            _positive(what, getattr(self, what))
        if self.placement not in PLACEMENTS:
            more = errors.likely(self.placement, PLACEMENTS)
            errors.fail(WHERE, f"placement={self.placement!r} is none of {errors.names(PLACEMENTS)}{more}")
        check(table, self.chunks, self.microbatches)
        try:
            object.__setattr__(self, "_plain", simulate(table, self.stages, cost_of(None, self.stages.number)))
        except DeadlockError as error:
            errors.fail(
                WHERE,
                f"ranks wait for each other: {error}",
                got=f"{self.ranks} ranks, {self.chunks} chunks placed as {self.placement!r}, "
                f"{self.microbatches} microbatches",
                fix="take one of these actions later than the one that is waited for on its rank",
            )

    @classmethod
    def of(
        cls,
        schedule: str | Schedule | Sequence[Sequence[object]],
        ranks: int,
        chunks: int = 1,
        microbatches: int = 1,
    ) -> Schedule:
        """The schedule of a name ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"), of a table, or itself, for so many
        ranks, chunks and microbatches.
        """
        for what, number in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
            _positive(what, number)
        if isinstance(schedule, str) and schedule in NAMED:
            wanted = CHUNKS.get(schedule, chunks)
            if chunks != wanted:
                errors.fail(
                    WHERE,
                    f"{schedule!r} has {wanted} stage{'s' * (wanted > 1)} on each rank, not {chunks}",
                    fix=f"split_stages(model, {ranks * wanted})"
                    + (', or schedule="interleaved"' if wanted == 1 else ', or schedule="1f1b"' if chunks == 1 else ""),
                )
            table = NAMED[schedule](ranks, chunks, microbatches)
            return cls(table, chunks, microbatches, PLACED.get(schedule, "loop"), schedule)
        if isinstance(schedule, str):
            more = errors.likely(schedule, NAMED)
            known = f"one of {errors.names(NAMED)}, or a table"
            errors.fail(WHERE, f"there is no schedule {schedule!r}{more}", fix=known)
        made = schedule if isinstance(schedule, Schedule) else cls(schedule)  # type: ignore[arg-type]
        for what, number in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
            if getattr(made, what) != number:
                errors.fail(
                    WHERE,
                    f"a table of {getattr(made, what)} {what}, and there are {number}",
                    got=repr(made),
                    fix=f'make it for {number} {what}, or give a name such as "1f1b"',
                )
        return made

    @property
    def ranks(self) -> int:
        """How many ranks there are along the axis."""
        return len(self.table)

    @cached_property
    def stages(self) -> Stages:
        """Where the stages are."""
        return Stages(self.ranks, self.chunks, self.placement)

    def stage(self, rank: int, chunk: int) -> int:
        """The stage of the model that is this chunk of this rank."""
        return self.stages.at(rank, chunk)

    def place(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk that a stage of the model is."""
        return self.stages.place(stage)

    @property
    def bubble(self) -> float:
        """Idle time of the rank that has the most to do, as a part of what it has to do; forward, inputs' and weights'
        backward take equally long. With other costs: ``simulate(costs).bubble``.
        """
        return self._simulated.bubble

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """For each rank how many forwards of a microbatch through a chunk are alive at once, at most: from its F to the
        end of its B, or of its W.
        """
        found = []
        for row in self.table:
            alive = most = 0
            for action in row:
                alive += {"F": 1, "B": -1, "W": -1, "D": 0}[action.kind]
                most = max(most, alive)
            found.append(most)
        return tuple(found)

    @cached_property
    def order(self) -> tuple[dict[Action, int], ...]:
        """For each rank the place of each action in its row; that of a D is also said of the B in its stead."""
        rows = [{action: at for at, action in enumerate(row)} for row in self.table]
        return tuple({**{a._replace(kind="B"): at for a, at in row.items() if a.kind == "D"}, **row} for row in rows)

    def simulate(self, costs: Costs | None = None, send: float = 0.0) -> Simulation:
        """When each action begins and ends, if "F", "B", "D", "W" take as long as ``costs`` says: a number for each
        kind, or one per stage, or a function of kind, stage and microbatch; B is D and W where it is not said.
        ``send``: from rank to rank.
        """
        if costs is None and not send:
            return self._simulated
        return simulate(self.table, self.stages, cost_of(costs, self.stages.number), send)

    @property
    def _simulated(self) -> Simulation:
        return self.__dict__["_plain"]  # type: ignore[no-any-return]

    def draw(
        self, costs: Costs | None = None, ran: Sequence[Sequence[tuple[Action, float, float]]] | None = None
    ) -> str:
        """The schedule in letters, a line for each rank; arguments as for :meth:`picture`."""
        return str(self.picture(costs, ran))

    def svg(
        self, costs: Costs | None = None, ran: Sequence[Sequence[tuple[Action, float, float]]] | None = None
    ) -> str:
        """The schedule as an ``<svg>`` element; arguments as for :meth:`picture`."""
        return self.picture(costs, ran).svg

    def picture(
        self, costs: Costs | None = None, ran: Sequence[Sequence[tuple[Action, float, float]]] | None = None
    ) -> Picture:
        """The schedule drawn, with these costs; or what really ran: for each rank its actions with when each began and
        ended (``step.ran``, gathered). Notebooks show it, ``.save(path)`` writes it.
        """
        if ran is None:
            return drawn(self.simulate(costs), self.stages, repr(self))
        first = min((begin for row in ran for _, begin, _ in row), default=0.0)
        spans = tuple(tuple(Span(Action(*a), b - first, e - first) for a, b, e in row) for row in ran)
        return drawn(Simulation(spans), self.stages, f"what ran of {self!r}")

    def __repr__(self) -> str:
        sizes = f"ranks={self.ranks}, chunks={self.chunks}, microbatches={self.microbatches}"
        return f"Schedule({self.name!r}, {sizes}, bubble={self.bubble:.3g}, peak={max(self.peak)})"


def _positive(what: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        errors.fail(WHERE, f"{what}={number!r} is no number of {what}", fix=f"{what}=1 or more")
