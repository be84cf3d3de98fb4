"""Checkpoints that move between meshes, and between this library and torch's own parallelisms.

    ranks  ->  boxes of global tensors, under torch's names  ->  files of torch.distributed.checkpoint  ->  any ranks

Not loaded by ``import meshcomm``: torch's checkpoints import DTensor, a second and more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.serialization import get_crc32_options

from meshcomm.collectives import check
from meshcomm.errors import MeshError, fail
from meshcomm.helpers.objects import broadcast_object, gather_object, scatter_object
from meshcomm.helpers.parcels import FIX, Courier
from meshcomm.mesh import Axis, AxisName, Mesh, current_mesh, make_mesh
from meshcomm.parallel.checkpoint_files import (
    TABLE,
    Metadata,
    Planner,
    Root,
    SavePlan,
    Writer,
    global_plan,
    local_plan,
)
from meshcomm.parallel.checkpoint_parts import Entries, collect, plain_problem, state_names
from meshcomm.parallel.checkpoint_reader import Reader
from meshcomm.parallel.checkpoint_state import Restoring, random_states, set_random_states

__all__ = ["Checkpoint", "full_state_dict", "latest", "load", "save"]

T = TypeVar("T")

_OURS = "meshcomm"
_BATCH = 2**28
"""Bytes of a full state_dict that are gathered at a time."""


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
    where = "checkpoint.save"
    root = Root(_checked_path(where, path))
    _checked_module(where, module, optimizer)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not check.whole_number(value) or value < least):
            fail(where, f"{name}={value!r} is not a number from {least} on.", fix=f"an int from {least} on, or None")
    step = None if step is None else int(step)
    axis = _axis(where, mesh)
    team = _Team(where, axis, path=root.path, step=step, keep=keep)
    team.first(lambda: _checked_room(where, root, step))

    def found_here() -> Entries:
        found = collect(module, optimizer)
        ours = {"mesh": list(axis.mesh.shape.items()), "extra": _checked_plain(where, "extra", extra),
                "sums": get_crc32_options()}  # fmt: skip
        found.plain.update({(_OURS, key): value for key, value in ours.items()})
        mine = {"random": random_states(), "extra": _checked_plain(where, "rank_extra", rank_extra)}
        found.plain[_OURS, "rank", str(axis.index)] = mine
        return found

    found = team.all(found_here)
    found.plain[_OURS, "step"] = step
    plan, table = team.share_out(found)
    step, partial = team.tell(lambda: root.open(where, step))
    found.plain[_OURS, "step"] = step
    try:
        writer = Writer(partial, root.folder(step), axis.index)
        results = team.all(lambda: writer.write(plan, Planner(found)))
        every = team.gather(results)
        team.first(lambda: writer.conclude(table, every, found.aliases))
        team.first(lambda: root.publish(where, partial, step))
    finally:
        if axis.index == 0:
            root.close(partial)
    if keep is not None:
        team.first(lambda: root.prune(keep, step))
    return root.folder(step)


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
    _checked_module(where, module, optimizer)
    if not isinstance(keys, tuple) or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        fail(where, f"keys={keys!r} are not two names.", fix='("model", "optim")')
    axis = _axis(where, mesh)
    team = _Team(where, axis, path=root.path, keys=keys, optimizer=optimizer is not None)
    folder = team.tell(lambda: _existing(where, root))
    model_key, optim_key = (tuple(key.split(".")) if key else () for key in keys)

    def planned() -> tuple[Restoring, Checkpoint, Any]:
        reader = Reader(where, folder)
        reader.sums = f"{_OURS}.sums" in reader.paths and reader.plain(f"{_OURS}.sums") is True
        restoring = Restoring(reader)
        restoring.module(module, model_key)
        if optimizer is not None:
            restoring.optimizer(module, optimizer, optim_key)
        restoring.plan()
        return restoring, *_ours(reader, axis)

    restoring, found, states = team.all(planned)
    team.all(restoring.check)
    team.all(restoring.read)
    if random and states is not None:
        team.all(lambda: set_random_states(states))
    return found


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
        return _latest(root)
    return _Team(where, check.axis_of(where, axis, mesh), path=root.path).tell(lambda: _latest(root))


def _latest(root: Root) -> str | None:
    steps = root.steps()
    return root.folder(steps[-1]) if steps else None


def full_state_dict(
    module: nn.Module, *, shared: str = "copy", dst: int = 0, mesh: Mesh | None = None
) -> dict[str, Tensor] | None:
    """The tensors of the module as if it had never been cut, on one rank: fit for ``safetensors.torch.save_file``.

    Each is whole, contiguous, on the CPU and in memory of its own, as that format wants it.

    Type: all ranks of the mesh call; what is varying becomes one rank's.

    Args:
        module: spread over the mesh in any way.
        shared: "copy": a parameter with several names is there under each, for ``load_state_dict``; "drop": under the
            first one alone, as ``safetensors.torch.save_model`` has it.
        dst: the rank of the mesh that gets it.
        mesh: the current mesh by default; all ranks if there is none.

    Returns: name to tensor on ``dst``, None elsewhere. What is no tensor in ``state_dict`` is left out.

    Backward: none.

    Cost: p elements travel to one rank and stay there, some 256 MiB at a time.

    Raises:
        MeshError: on all ranks: no such rank; ranks that do not have all of each tensor between them.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel.checkpoint import full_state_dict
        >>> from meshcomm.parallel.fsdp_module import fully_shard
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="sum", mesh=mesh)
        ...     found = full_state_dict(model, mesh=mesh)
        ...     return found and {name: tuple(x.shape) for name, x in found.items()}
        >>> mc.launch(main, ranks=2)
        [{'weight': (2, 8), 'bias': (2,)}, None]

    Source: ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` with ``full_state_dict=True``.
    """
    where = "checkpoint.full_state_dict"
    _checked_module(where, module, None)
    if shared not in ("copy", "drop"):
        fail(where, f"shared={shared!r} is neither 'copy' nor 'drop'.", fix="one of them")
    axis = _axis(where, mesh)
    check.checked_index(where, dst, axis, "dst")
    team = _Team(where, axis, dst=dst)
    found = team.all(lambda: _tensors_alone(module))
    plan, _ = team.share_out(found)
    mine = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    full: dict[str, Tensor] = {}
    for batch in _batches(found):
        boxes = [
            (path, box.offsets, box.view.to("cpu", copy=True).contiguous())
            for path in batch
            for box in found.tensors[path].boxes
            if (".".join(map(str, path)), box.offsets) in mine
        ]
        for of_rank in gather_object(boxes, axis.name, dst, mesh=axis.mesh) or ():
            for path, offsets, part in of_rank:
                spread = found.tensors[path]
                whole = full.setdefault(path[1], torch.empty(spread.shape, dtype=spread.dtype, device="cpu"))
                whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
    if axis.index != dst:
        return None
    for alias, name in found.aliases.items() if shared == "copy" else ():
        full[alias.partition(".")[2]] = full[name.partition(".")[2]].clone()
    return {name: full[name] for name in map(state_names(module), module.state_dict()) if name in full}


def _tensors_alone(module: nn.Module) -> Entries:
    found = collect(module, None)
    return Entries({path: spread for path, spread in found.tensors.items() if len(path) == 2}, {}, found.aliases)


def _batches(found: Entries) -> list[list[Any]]:
    batches: list[list[Any]] = [[]]
    room = _BATCH
    for path, spread in found.tensors.items():
        size = spread.dtype.itemsize * int(torch.Size(spread.shape).numel())
        if batches[-1] and size > room:
            batches.append([])
            room = _BATCH
        batches[-1].append(path)
        room -= size
    return batches


# ------------------------------------------------------------------------------------------------------- all together


class _Team:
    """The ranks of one call: what one of them cannot do is an error on all, before they go on."""

    def __init__(self, where: str, axis: Axis, **given: object) -> None:
        self._axis = axis
        self._courier = Courier(where, axis, **given)  # type: ignore[arg-type]

    def all(self, do: Callable[[], T]) -> T:
        """What each rank does for itself."""
        try:
            done = do()
        except Exception as error:
            try:
                self._courier.meet(_problem(error))
            except MeshError as told:
                raise told from error
        self._courier.meet()
        return done

    def first(self, do: Callable[[], T]) -> T | None:
        """What the first rank does for all."""
        return self.all(lambda: do() if self._axis.index == 0 else None)

    def tell(self, do: Callable[[], T]) -> T:
        """The same, and all get what comes of it."""
        found: Any = broadcast_object(self.first(do), self._axis.name, mesh=self._axis.mesh)
        return found  # type: ignore[no-any-return]

    def gather(self, mine: T) -> list[T]:
        """To the first rank; nothing elsewhere."""
        return gather_object(mine, self._axis.name, mesh=self._axis.mesh) or []

    def share_out(self, found: Entries) -> tuple[SavePlan, Metadata]:
        """Who writes what, of that which several ranks have; the table is the first rank's."""
        plans = self.gather(local_plan(found))
        made = self.first(lambda: global_plan(self._courier.where, plans))
        mine = scatter_object(None if made is None else made[0], self._axis.name, mesh=self._axis.mesh)
        return mine, Metadata({}) if made is None else made[1]


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


def _axis(where: str, mesh: Mesh | None) -> Axis:
    """All ranks as one axis."""
    if mesh is None and current_mesh() is None:
        mesh = make_mesh({"rank": -1})
    here = check.mesh_of(where, "", mesh)
    return here.axis(here.axis_names, where)


def _checked_path(where: str, path: object) -> str:
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        fail(where, f"path={path!r} is no path.", fix="a folder, as a string or a pathlib.Path")
    return os.path.abspath(given)


def _checked_module(where: str, module: object, optimizer: object) -> None:
    if not isinstance(module, nn.Module):
        fail(where, f"module is not a torch.nn.Module but {type(module).__name__}.", fix="pass a module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        what = f"optimizer is not a torch.optim.Optimizer but {type(optimizer).__name__}."
        fail(where, what, fix="an optimiser of the module's parameters, or None")


def _checked_plain(where: str, name: str, value: Any) -> Any:
    problem = plain_problem(value, name)
    if problem:
        fail(where, problem, fix="loading runs no code, so only plain data is saved")
    return value


def _checked_room(where: str, root: Root, step: int | None) -> None:
    if os.path.exists(root.path) and not os.path.isdir(root.path):
        fail(where, f"{root.path!r} is no folder.", fix="a folder, or a path that is not there yet")
    if step is not None:
        root.refuse_twice(where, step)


def _existing(where: str, root: Root) -> str:
    if os.path.isfile(os.path.join(root.path, TABLE)):
        return root.path
    found = _latest(root)
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
        name = f"{_OURS}.{key}"
        known[key] = reader.plain(name) if name in reader.paths else None
    same = known["mesh"] == list(axis.mesh.shape.items())
    mine: Mapping[str, Any] = reader.plain(f"{_OURS}.rank.{axis.index}") if same else {}
    if not isinstance(mine, dict) or not isinstance(mine.get("random", {}), dict):
        fail(reader.where, f"what the checkpoint has of rank {axis.index} is not what save writes.", got=reader.folder)
    found = Checkpoint(reader.folder, known["step"], known["extra"], mine.get("extra"), same)
    return found, mine.get("random")
