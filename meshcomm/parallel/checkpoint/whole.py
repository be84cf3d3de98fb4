"""Checkpoints that move between meshes, and between this library and torch's own parallelisms.

    ranks  ->  boxes of global tensors, under torch's names  ->  files of torch.distributed.checkpoint  ->  any ranks

Not loaded by ``import meshcomm``: torch's checkpoints import DTensor, a second and more.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.serialization import get_crc32_options

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.checkpoint.files import (
    TABLE,
    Planner,
    Root,
    Writer,
)
from meshcomm.parallel.checkpoint.in_background import Begun, Saving, begin, begin_again, settle
from meshcomm.parallel.checkpoint.parts import (
    Entries,
    Layout,
    Mark,
    Path,
    checked_plain,
    collect,
    layout_of,
    same_parameters,
)
from meshcomm.parallel.checkpoint.reader import OURS, Reader
from meshcomm.parallel.checkpoint.state import Restoring, names_of_groups, random_states, set_random_states
from meshcomm.parallel.checkpoint.team import Shares, Team, all_ranks, checked_both, merged, names_that_count
from meshcomm.runtime.ops import Op
from meshcomm.spmd.types.told import keep_types
from meshcomm.watch import out_of_sight

_GROUPS: Path = ("optim", "param_groups")


class Checkpoint(NamedTuple):
    """What :func:`load` has found beside the state of the module and the optimiser."""

    path: str
    """The folder of this one checkpoint."""
    step: int | None
    """As given to :func:`save`; None in what something else has written."""
    extra: Any
    """As given to :func:`save`, on every rank."""
    rank_extra: Any
    """As this rank has given it to :func:`save`; None on another mesh."""
    same_mesh: bool
    """Whether the mesh has the same axes and sizes as the one that saved: then random states have been put back."""


@Op("checkpoint.save", "all ranks of the mesh call", compared=("path", "step", "keep"))
@out_of_sight
def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    keep: int | None = None,
    mesh: Mesh | None = None,
) -> str:
    """Write a checkpoint: a new folder in ``path``, which appears when it is complete and not before.

    ::

        path/step-00000100/.metadata, __0_0.distcp, __1_0.distcp      dp=4, fsdp=2 x tp=2, one rank: the same tensors

    Parameters are written as boxes of the global tensors, whatever has cut them: ``fully_shard``, ``tensor_parallel``,
    both, or torch's own; what is replicated is written once. States of the optimiser that are shaped like their
    parameter are cut as it is, and everything else in it is replicated. Names are those of
    ``torch.distributed.checkpoint.state_dict``, so that torch loads it as
    ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``. Also written: the random states of
    each rank. Not written: gradients, so save between steps.

    An interrupted save leaves the earlier checkpoints as they are: files are written into another folder and brought to
    the disk, all ranks agree, and one rename gives it its name. What was left of it goes with the next save that sees
    that who has left it has ended. Several jobs may save to ``path``, each its own steps; ``keep`` counts those of all.

    Type: all ranks of the mesh call.

    Args:
        path: the folder of all checkpoints of a run, in a file system that all ranks see under the same name.
        module: as it is in training. Buffers are those of one rank that has them.
        optimizer: of parameters of the module.
        step: names the checkpoint; one more than the latest by default.
        extra: whatever else goes on: plain data (None, numbers, strings, bytes, tensors, and lists, tuples and dicts of
            them), the same on every rank; the first one's is written.
        rank_extra: the same of each rank, such as its place in its data.
        keep: how many checkpoints to leave: this one, and of the others those with the highest steps. None: all.
        mesh: the current mesh by default; all ranks if there is none.

    Returns: the folder of this checkpoint.

    Backward: none.

    Cost: each rank writes its share of p and of the optimiser's state; a table of contents travels to one rank.

    Raises:
        MeshError: on all ranks, before anything is written: what is no plain data; an optimiser of other parameters;
            parameters without values; ranks that do not have all of each tensor between them, or that disagree; a step
            that is there already, or that another job is writing; arguments that differ. And if a rank cannot write:
            then nothing is left behind.

    Example:
        >>> import tempfile, torch, meshcomm as mc
        >>> from meshcomm.parallel.checkpoint import load, save
        >>> folder = tempfile.TemporaryDirectory()
        >>> layer = torch.nn.Linear(2, 1)
        >>> _ = save(folder.name, layer, step=5, extra={"seen": 80}, keep=2)
        >>> found = load(folder.name, torch.nn.Linear(2, 1))
        >>> found.step, found.extra
        (5, {'seen': 80})
        >>> folder.cleanup()

    Source: ``torch.distributed.checkpoint.save``, whose planner and writer do the work.
    """
    asked = _Asked("checkpoint.save", path, module, optimizer, step, extra, rank_extra, keep, mesh)
    settle(asked.team, asked.axis)
    begun, _, planner = asked.begun()
    team, root, shares = begun.team, begun.root, begun.shares
    try:
        writer = Writer(begun.partial, root.folder(begun.step), begun.axis.index)
        results = team.all(lambda: writer.write(shares.plan, planner))
        every = team.gather(results)
        team.first(lambda: writer.conclude(shares.table, every, shares.together.aliases))
        team.first(lambda: root.publish("checkpoint.save", begun.partial, begun.step))
    finally:
        if begun.axis.index == 0:
            root.close(begun.partial)
    if keep is not None:
        team.first(lambda: root.prune(keep, begun.step))
    return root.folder(begun.step)


@Op("checkpoint.async_save", "all ranks of the mesh call", compared=("path", "step", "keep"))
@out_of_sight
def async_save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    keep: int | None = None,
    mesh: Mesh | None = None,
) -> Saving:
    """:func:`save` that goes on while the program computes: it returns when what is to be written has been copied.

    ::

        saving = async_save(path, module, optimizer)   the bits of this moment, copied to memory of the host
        loss(module(rows)).backward(); ...             each rank writes its file on a thread; the first publishes
        saving.wait()                                  or the next save: the disk has it, or an error on every rank

    One save is under way at a time: the next one, of either kind, first waits for the last, and so does :func:`load`.
    The thread calls no collective. The checkpoint appears when all ranks have written, whether anybody waits or not; a
    process that ends writes to the end first, one that is killed leaves the earlier checkpoints as they are.

    Type: all ranks of the mesh call.

    Args:
        path, module, optimizer, step, extra, rank_extra, keep, mesh: as of :func:`save`.

    Returns: a :class:`Saving`: ``wait()`` gives the folder, ``done()`` says whether nobody writes to it any more,
        ``path`` is where the checkpoint will be.

    Backward: none.

    Cost: as of :func:`save`; the caller waits for the agreement of the ranks and for the copy alone: one exchange of a
        KB where all ranks save what the last save had, with other values, and that one is over. The copy's memory, as
        much as this rank writes, is kept for the next save.

    Raises:
        MeshError: as of :func:`save`, before it returns; but if a rank cannot write, or from the second save on if
            ranks have other values of what is one parameter, on all ranks from ``wait()``, or from the next save. Then
            nothing is left behind, and what that save was to write is not written either.

    Example:
        >>> import tempfile, torch, meshcomm as mc
        >>> from meshcomm.parallel.checkpoint import async_save, load
        >>> folder = tempfile.TemporaryDirectory()
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> before = layer.weight.tolist()
        >>> saving = async_save(folder.name, layer, step=5)
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> _ = saving.wait()
        >>> load(folder.name, layer).step, layer.weight.tolist() == before
        (5, True)
        >>> folder.cleanup()

    Source: ``torch.distributed.checkpoint.async_save``.
    """
    asked = _Asked("checkpoint.async_save", path, module, optimizer, step, extra, rank_extra, keep, mesh)
    try:
        again = begin_again(asked.team, asked.root, asked.keep, asked.find, asked.folder, asked.planner)
        if again is not None:
            return again
        settle(asked.team, asked.axis)
        return begin(*asked.begun())
    except BaseException:
        asked.undo()
        raise


class _Asked:
    """A save: its arguments, and what all ranks have agreed to write."""

    def __init__(
        self, where: str, path: Any, module: nn.Module, optimizer: torch.optim.Optimizer | None, step: int | None,
        extra: Any, rank_extra: Any, keep: int | None, mesh: Mesh | None,
    ) -> None:  # fmt: skip
        self.root, self._where = Root(_checked_path(where, path)), where
        checked_both(where, module, optimizer)
        for name, value, least in (("step", step, 0), ("keep", keep, 1)):
            if value is not None and (not check.whole_number(value) or value < least):
                fail(
                    where, f"{name}={value!r} is not a number from {least} on.", fix=f"an int from {least} on, or None"
                )
        self.keep, self._step = keep, None if step is None else int(step)
        self._of, self._extra, self._rank_extra = (module, optimizer), extra, rank_extra
        self.axis = all_ranks(where, module, mesh)
        self.team = Team(where, self.axis, path=self.root.path, step=self._step, keep=keep)
        self._made: tuple[int, str] | None = None

    def find(self, unmarked: Container[Mark] = ()) -> Entries:
        """What this rank has."""
        if self.axis.index == 0:
            _checked_room(self._where, self.root, self._step)
        found = collect(*self._of, unmarked)
        ours = {"mesh": list(self.axis.mesh.shape.items()), "extra": checked_plain(self._where, "extra", self._extra),
                "sums": get_crc32_options()}  # fmt: skip
        found.plain.update({(OURS, key): value for key, value in ours.items()})
        mine = {"random": random_states(), "extra": checked_plain(self._where, "rank_extra", self._rank_extra)}
        found.plain[OURS, "rank", str(self.axis.index)] = mine
        found.plain[OURS, "step"] = self._step  # of which all know at last
        return found

    def folder(self) -> tuple[int, str]:
        """On the first rank: the step, and where to write it, which is made."""
        if self._made is None:
            self._made = self.root.open(self._where, self._step)
        return self._made

    def undo(self) -> None:
        """Nobody writes there."""
        if self._made is not None:
            self.root.close(self._made[1])

    def planner(self, found: Entries, shares: Shares, step: int | None) -> Planner:
        """With what all know by now."""
        found.plain.update({(*_GROUPS, at, "params"): ours for at, ours in enumerate(shares.together.groups)})
        found.plain[OURS, "step"] = step
        return Planner(found)

    def begun(self) -> tuple[Begun, Layout, Planner]:
        """Agree on it."""
        try:
            found, shares, (step, partial) = self.team.share_out(self.find, self.folder)
        except BaseException:
            self.undo()
            raise
        begun = Begun(self.team, self.axis, self.root, step, partial, shares, self.keep)
        return begun, layout_of(found), self.planner(found, shares, step)


@Op("checkpoint.load", "all ranks of the mesh call", compared=("path", "keys", "optimizer"))
@out_of_sight
def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keys: tuple[str, str] = ("model", "optim"),
    random: bool = True,
    mesh: Mesh | None = None,
) -> Checkpoint:
    """Put a checkpoint into a module and an optimiser, whichever mesh and whichever parallelism has written it.

    Training that goes on after it does bit for bit what it would have done, on the same mesh and if what is replicated
    was equal on all ranks.

    **What is trusted.** Loading runs no code that a file names. Torch keeps the table of contents as a pickle and its
    own reader unpickles whatever is in it; here it is read as data, and any name in it that torch does not write is an
    error. Values that are no tensors torch's planner loads with ``weights_only=False``; here they, and all tensors, are
    loaded with ``weights_only=True``. Files are named in the folder itself alone (one may be a link to another place,
    as tools that share files make them). What remains is torch's own reading of tensor files, and what a module's
    ``set_extra_state`` does with what it is given. Who loads the same folder with ``torch.distributed.checkpoint.load``
    has none of this.

    Type: all ranks of the mesh call.

    Args:
        path: what :func:`save` was given: then its latest checkpoint; or the folder of one checkpoint, which
            ``torch.distributed.checkpoint.save`` may have written.
        module: spread over the mesh in any way; its values are overwritten in place.
        optimizer: of parameters of the module, in the same groups as in the run that saved. Its state is replaced;
            it need not have any.
        keys: under which names the state of the module and of the optimiser stand, joined by dots; ``""`` for the top.
        random: put the random states of each rank back, if the mesh has the same axes and sizes.
        mesh: the current mesh by default; all ranks if there is none.

    Returns: a :class:`Checkpoint`.

    Backward: none.

    Cost: each rank reads the stored boxes of which it needs a part, one at a time, and twice: all are seen to be whole
    before any is used.

    Raises:
        MeshError: on all ranks, before anything is changed: no finished checkpoint; missing or unexpected names; other
            shapes or dtypes; another kind of optimiser or other groups; a table that is none; files that are missing,
            too short, or damaged inside.

    Example: see :func:`save`.

    Source: ``torch.distributed.checkpoint.load``.
    """
    where = "checkpoint.load"
    root = Root(_checked_path(where, path))
    checked_both(where, module, optimizer)
    if not isinstance(keys, tuple) or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        fail(where, f"keys={keys!r} are not two names.", fix='("model", "optim")')
    axis = all_ranks(where, module, mesh)
    team = Team(where, axis, path=root.path, keys=keys, optimizer=optimizer is not None)
    settle(team, axis, tell=False)
    folder = team.tell(lambda: _existing(where, root))
    told: tuple[list[list[str]], list[tuple[str, str]]] = team.all(
        lambda: ([], []) if optimizer is None else (names_of_groups(module, optimizer), same_parameters(module))
    )
    every = team.everyone(told)
    groups, same = merged([ours for ours, _ in every]), names_that_count([pairs for _, pairs in every])
    model_key, optim_key = (tuple(key.split(".")) if key else () for key in keys)

    def planned() -> tuple[Restoring, Checkpoint, Any]:
        reader = Reader(where, folder)
        reader.find_sums()
        restoring = Restoring(reader)
        restoring.module(module, model_key)
        if optimizer is not None:
            restoring.optimizer(module, optimizer, optim_key, groups, same)
        restoring.plan()
        return restoring, *_ours(reader, axis)

    restoring, found, states = team.all(planned)
    unused = team.everyone(restoring.unused)
    team.all(lambda: restoring.refuse_unused(unused))
    team.all(restoring.check)
    team.all(restoring.read)
    keep_types(module)
    if random and states is not None:
        team.all(lambda: set_random_states(states))
    return found


@Op("checkpoint.latest", "of the rank that asks", compared=("path",))
def latest(path: str | os.PathLike[str], axis: AxisName | None = None, *, mesh: Mesh | None = None) -> str | None:
    """The folder of the finished checkpoint with the highest step.

    Type: of the rank that asks; with ``axis`` invariant along it, so that all ranks go the same way after it.

    Args:
        path: what :func:`save` was given.
        axis: the ranks that get one answer, that of the first of them: another one may look later, or see another file
            system. None: of this rank alone. (:func:`load` goes by the first rank's.)
        mesh: the current mesh by default.

    Returns: its path, or None if there is none.

    Backward: none.

    Cost: a look into the folder; with ``axis`` a path travels.

    Raises:
        MeshError: ``path`` is no path; no such axis.

    Example:
        >>> from meshcomm.parallel.checkpoint import latest
        >>> latest("no/such/folder") is None
        True

    Source: none.
    """
    where = "checkpoint.latest"
    root = Root(_checked_path(where, path))
    if axis is None:
        return root.latest()
    return Team(where, check.axis_of(where, axis, mesh), path=root.path).tell(root.latest)


# ---------------------------------------------------------------------------------------------------------- arguments


def _checked_path(where: str, path: object) -> str:
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        fail(where, f"path={path!r} is no path.", fix="a folder, as a string or a pathlib.Path")
    return os.path.abspath(given)


def _checked_room(where: str, root: Root, step: int | None) -> None:
    if os.path.exists(root.path) and not os.path.isdir(root.path):
        fail(where, f"{root.path!r} is no folder.", fix="a folder, or a path that is not there yet")
    if step is not None:
        root.refuse_twice(where, step)


def _existing(where: str, root: Root) -> str:
    if os.path.isfile(os.path.join(root.path, TABLE)):
        return root.path
    found = root.latest()
    if found is None:
        fail(
            where,
            f"there is no finished checkpoint in {root.path!r}.",
            fix="the folder that save was given, or one of its steps; a save that was interrupted leaves none",
        )
    return found


def _ours(reader: Reader, axis: Axis) -> tuple[Checkpoint, Any]:
    """What :func:`save` has added, and this rank's random states if they fit."""
    known: dict[str, Any] = {}
    for key in ("step", "mesh", "extra"):
        name = f"{OURS}.{key}"
        known[key] = reader.plain(name) if name in reader.paths else None
    same = known["mesh"] == list(axis.mesh.shape.items())
    mine: Mapping[str, Any] = reader.plain(f"{OURS}.rank.{axis.index}") if same else {}
    if not isinstance(mine, dict) or not isinstance(mine.get("random", {}), dict):
        fail(reader.where, f"what the checkpoint has of rank {axis.index} is not what save writes.", got=reader.folder)
    found = Checkpoint(reader.folder, known["step"], known["extra"], mine.get("extra"), same)
    return found, mine.get("random")
