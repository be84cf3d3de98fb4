"""All ranks of one call on checkpoints: they fail together, and share out what several of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.errors import MeshError, fail
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object, broadcast_object, gather_object, unpacked
from meshcomm.objects.parcels import FIX, Courier
from meshcomm.objects.pickles import pack, unpack
from meshcomm.parallel.checkpoint.files import Metadata, SavePlan, global_plan, local_plan
from meshcomm.parallel.checkpoint.parts import Entries, Mark, Marks, Path, groups_of, refuse_others
from meshcomm.parallel.cut_parameters import checked_module, widest_mesh
from meshcomm.runtime.transports.dry.world import is_dry

S = TypeVar("S")
T = TypeVar("T")


class Together(NamedTuple):
    """What all ranks have between them, in the order of the ranks."""

    names: list[str]
    """Of what is in a ``state_dict``."""
    aliases: dict[str, str]
    tensors: dict[Path, tuple[tuple[int, ...], torch.dtype]]
    groups: list[list[str]]
    """The parameters of the optimiser's groups."""


class Shares(NamedTuple):
    """Who writes what."""

    plan: SavePlan
    table: Metadata
    together: Together
    common: frozenset[Mark]
    """The parameters, or boxes of them, that are to be the same on this rank and on others."""


class _Here(NamedTuple):
    plan: SavePlan
    marks: Marks
    together: Together


class Team:
    """The ranks of one call: what one of them cannot do is an error on all, before they go on."""

    def __init__(self, where: str, axis: Axis, takes_values: bool = True, /, **given: object) -> None:
        """``takes_values``: whether what they do is done for the values of tensors, which a dry run has not."""
        if takes_values and is_dry():
            fail(where, "a dry run has no values to save or to load.", fix="if not mc.is_dry(): around the call")
        self.axis = axis
        self._courier = Courier(where, axis, **given)  # type: ignore[arg-type]

    def all(self, do: Callable[[], T]) -> T:
        """What each rank does for itself."""
        done: list[T] = []
        self._told(lambda: done.append(do()), lambda _, problem: self._courier.meet(problem))
        return done[0]

    def _told(self, do: Callable[[], S], send: Callable[[S | None, str | None], T]) -> T:
        """``send`` brings the others what this rank has made, or why it could not; then all raise."""
        try:
            made = do()
        except Exception as error:
            try:
                return send(None, _problem(error))
            except MeshError as told:
                raise told from error
        return send(made, None)

    def first(self, do: Callable[[], T]) -> T | None:
        """What the first rank does for all."""
        return self.all(lambda: do() if self.axis.index == 0 else None)

    def tell(self, do: Callable[[], T]) -> T:
        """The same, and all get what comes of it."""
        found: Any = broadcast_object(self.first(do), self.axis.name, mesh=self.axis.mesh)
        return found  # type: ignore[no-any-return]

    def gather(self, mine: T, dst: int = 0) -> list[T]:
        """What each rank has, to one of them; nothing elsewhere."""
        return gather_object(mine, self.axis.name, dst, mesh=self.axis.mesh) or []

    def everyone(self, mine: T) -> list[T]:
        """What each rank has, to all of them."""
        return all_gather_object(mine, self.axis.name, mesh=self.axis.mesh)

    def report(self, do: Callable[[], T]) -> list[T]:
        """What each rank makes, to all of them."""
        every = self._told(
            lambda: pack(do()), lambda data, problem: self._courier.all_gather(data or bytearray(), problem)
        )
        return [unpack(each, torch.device("cpu")) for each in every]

    def share_out(self, find: Callable[[], Entries], more: Callable[[], T]) -> tuple[Entries, Shares, T]:
        """Who writes what, of that which several ranks ``find``, and have alike; the table is the first rank's. Then
        that one does ``more``, and all get what comes of it.
        """
        courier, found, tables = self._courier, list[Entries](), list[Metadata]()

        def here() -> bytearray:
            mine = find()
            found.append(mine)
            return pack(_Here(local_plan(mine), mine.marks, _together(mine)))

        every = self._told(here, lambda data, problem: courier.gather(data or bytearray(), 0, problem))

        def planned() -> list[bytearray] | None:
            if every is None:
                return None
            here = [unpack(each, torch.device("cpu")) for each in every]
            plans, table, together = self._planned(here)
            tables.append(table)
            counts = Counter(key for each in here for key in each.marks)
            common = [frozenset(key for key in each.marks if counts[key] > 1) for each in here]
            done = more()
            return [pack((plan, together, keys, done)) for plan, keys in zip(plans, common, strict=True)]

        row = self._told(planned, lambda rows, problem: courier.scatter(rows, 0, problem))
        plan, together, common, done = unpacked(courier, [row])[0]
        return found[0], Shares(plan, tables[0] if tables else Metadata({}), together, common), cast(T, done)

    def _planned(self, every: Sequence[_Here]) -> tuple[list[SavePlan], Metadata, Together]:
        where = self._courier.where
        plans, table = global_plan(where, [here.plan for here in every])
        refuse_others(where, [here.marks for here in every])
        return plans, table, _union([here.together for here in every])


def _problem(error: Exception) -> str:
    """As the courier carries it: what and got on a line, and the fix."""
    if not isinstance(error, MeshError):
        return f"{type(error).__name__}: {error}".strip().rstrip(".")
    what, *lines = str(error).split("\n")
    said = [what.partition(": ")[2].rstrip(".")]
    fix = ""
    for line in lines:
        if f"\n{line}".startswith(FIX):
            fix = f"\n{line}"
        elif line.startswith("  got: "):
            said.append(line.removeprefix("  got: "))
    return "; ".join(said) + fix


def _together(found: Entries) -> Together:
    tensors = {path: (tuple(spread.shape), spread.dtype) for path, spread in found.tensors.items()}
    return Together(list(found.names), found.aliases, tensors, groups_of(found))


def _union(every: Sequence[Together]) -> Together:
    tensors: dict[Path, tuple[tuple[int, ...], torch.dtype]] = {}
    aliases: dict[str, str] = {}
    for each in every:
        for path, kind in each.tensors.items():
            tensors.setdefault(path, kind)
        aliases.update(each.aliases)
    names = list(dict.fromkeys(name for each in every for name in each.names))
    return Together(names, aliases, tensors, merged([each.groups for each in every]))


def merged(every: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Of each group the names that any rank has in it."""
    most = max(map(len, every), default=0)
    return [
        list(dict.fromkeys(name for groups in every if at < len(groups) for name in groups[at])) for at in range(most)
    ]


def names_that_count(every: Sequence[Sequence[tuple[str, str]]]) -> dict[str, str]:
    """Of names of one parameter the one that stands for all, if ``every`` rank tells the pairs that it knows."""
    found: dict[str, str] = {}

    def counts(name: str) -> str:
        while name in found:
            name = found[name]
        return name

    for one, other in (pair for pairs in every for pair in pairs):
        if counts(one) != counts(other):
            found[counts(one)] = counts(other)
    return {name: counts(name) for name in found}


def all_ranks(where: str, module: nn.Module, mesh: Mesh | None) -> Axis:
    """All ranks as one axis: of ``mesh``, or of the largest of the current mesh and those of the module."""
    here = check.mesh_of(where, "", mesh if mesh is not None else widest_mesh(module) or make_mesh({"rank": -1}))
    return here.axis(here.axis_names, where)


def checked_both(where: str, module: object, optimizer: object) -> None:
    """They are a module, and an optimiser or None."""
    checked_module(where, module)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        what = f"optimizer is not a torch.optim.Optimizer but {type(optimizer).__name__}."
        fail(where, what, fix="an optimiser of the module's parameters, or None")
