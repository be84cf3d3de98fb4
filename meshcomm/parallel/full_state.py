"""Whole states of modules that are spread over a mesh, in any way: full_state_dict, save_full_state_dict and
load_full_state_dict.

p = number of elements of all parameters.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.checkpoint.parts import Entries, Path, collect, dotted, named, state_names
from meshcomm.parallel.checkpoint.team import Team, Together, all_ranks
from meshcomm.parallel.cut_parameters import checked_module
from meshcomm.parallel.global_places import part_of
from meshcomm.parallel.weights.full_files import bytes_in
from meshcomm.parallel.weights.names_in_files import Unfit, as_named, in_files, refuse_names, unfit, union
from meshcomm.parallel.weights.sent_parts import Sent, Strip, Writing, parts_in
from meshcomm.parallel.weights.taken_parts import Loading
from meshcomm.parallel.weights.whole_tensors import opened
from meshcomm.runtime.ops import Op
from meshcomm.spmd.types.told import keep_types
from meshcomm.watch import out_of_sight

Shared = Literal["copy", "drop"]

_BATCH = 2**28
"""Bytes that are gathered at a time."""


@overload
def full_state_dict(
    module: nn.Module, dst: None = None, *, shared: Shared = "copy", mesh: Mesh | None = None
) -> dict[str, Tensor]: ...
@overload
def full_state_dict(
    module: nn.Module, dst: int | None, *, shared: Shared = "copy", mesh: Mesh | None = None
) -> dict[str, Tensor] | None: ...
@Op("full_state_dict", "all ranks of the mesh call", compared=("dst",))
@out_of_sight
def full_state_dict(
    module: nn.Module, dst: int | None = None, *, shared: Shared = "copy", mesh: Mesh | None = None
) -> dict[str, Tensor] | None:
    """The tensors of the module as if it had never been cut: fit for ``load_full_state_dict``, for the module on one
    rank, and for ``safetensors.torch.save_file``.

    Each is whole, contiguous, on the CPU and in memory of its own, as that format wants it. The stages of a pipeline
    have other names on each rank: what all ranks have is put together.

    Type: all ranks of the mesh call; what is varying becomes the same on every rank, or one rank's.

    Args:
        module: spread over the mesh in any way.
        dst: the rank of the mesh that gets it. None: all do.
        shared: "copy": a parameter with several names is there under each, for ``load_state_dict``; "drop": under the
            first one alone, as ``safetensors.torch.save_model`` has it.
        mesh: by default the largest of the current mesh and those of the adaptors; all ranks if there is none.

    Returns: name to tensor; with ``dst`` None on the other ranks. What is no tensor in ``state_dict`` is left out.

    Backward: none.

    Cost: p elements travel to one rank and stay there, or to all, some 256 MiB at a time; each rank reads what it has.

    Raises:
        MeshError: on all ranks: no such rank; ranks that do not have all of each tensor between them; parameters of one
            name that are others on each rank.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import full_state_dict, fully_shard
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="sum", mesh=mesh)
        ...     found = full_state_dict(model, 0)
        ...     return found and {name: tuple(x.shape) for name, x in found.items()}
        >>> mc.launch(main, ranks=2)
        [{'weight': (2, 8), 'bias': (2,)}, None]

    Source: ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` with ``full_state_dict=True``.
    """
    where = "full_state_dict"
    checked_module(where, module)
    if shared not in ("copy", "drop"):
        fail(where, f"shared={shared!r} is neither 'copy' nor 'drop'.", fix="one of them")
    axis = all_ranks(where, module, mesh)
    if dst is not None:
        check.checked_index(where, dst, axis, "dst")
    team = Team(where, axis, dst=dst)
    found, (plan, _, together, _), _ = team.share_out(lambda: _tensors_alone(module), lambda: None)
    mine = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    full: dict[str, Tensor] = {}
    for batch in _batches(together):
        boxes = _boxes(found, batch, mine)
        for of_rank in team.everyone(boxes) if dst is None else team.gather(boxes, dst):
            for path, offsets, part in of_rank:
                shape, dtype = together.tensors[path]
                whole = full.setdefault(path[1], torch.empty(shape, dtype=dtype, device="cpu"))
                part_of(whole, offsets, part.shape).copy_(part)
    if dst is not None and axis.index != dst:
        return None
    for alias, name in together.aliases.items() if shared == "copy" else ():
        full[alias.partition(".")[2]] = full[name.partition(".")[2]].clone()
    return {name: full[name] for name in together.names if name in full}


def _take(writing: Sequence[Writing], batch: Sequence[Strip], every: Sequence[Sequence[Sent]]) -> None:
    writing[0].take(batch, every)


def _tensors_alone(module: nn.Module) -> Entries:
    found = collect(module, None)
    return found._replace(tensors={path: x for path, x in found.tensors.items() if len(path) == 2}, plain={})


def _batches(together: Together) -> list[list[Path]]:
    batches: list[list[Path]] = []
    size = _BATCH + 1
    for path, (shape, dtype) in together.tensors.items():
        more = dtype.itemsize * math.prod(shape)
        size += more
        if size > _BATCH:
            batches.append([])
            size = more
        batches[-1].append(path)
    return batches


def _boxes(found: Entries, batch: list[Path], mine: set[tuple[str, tuple[int, ...]]]) -> list[Any]:
    return [
        (path, box.offsets, box.view.to("cpu", copy=True).contiguous())
        for path in batch
        if path in found.tensors
        for box in found.tensors[path].boxes
        if (dotted(path), box.offsets) in mine
    ]


@Op("save_full_state_dict", "all ranks of the mesh call", compared=("path", "max_shard_size"))
@out_of_sight
def save_full_state_dict(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    mesh: Mesh | None = None,
) -> None:
    """Write the tensors of the module as if it had never been cut, into files that need no meshcomm to be read.

    No rank ever holds the whole: files are laid out first, then some MiB at a time travel to rank 0 of the mesh, which
    writes them where they belong; it alone needs to see ``path``. Files appear when they are complete; an interrupted
    save leaves those that were there. A parameter with several names has the first one alone, as in files of
    transformers; in files of torch it has all of them, and is there once. What is no tensor in ``state_dict`` is left
    out.

    Type: all ranks of the mesh call.

    Args:
        module: spread over the mesh in any way.
        path: the same on every rank. One that ends in ``.safetensors``: one file, for ``safetensors.torch.load_model``;
            in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``: what ``torch.save`` of a ``state_dict`` writes, for
            ``torch.load``; else a folder: ``model.safetensors``, or shards with their
            ``model.safetensors.index.json``, as ``save_pretrained`` of transformers writes them: ``from_pretrained``
            reads it, once ``model.config.save_pretrained(path)`` is there too. What the library keeps in other pieces
            or under other names (experts that it stacks) is written so. Shards of an earlier save are removed.
        max_shard_size: of files in a folder: bytes, or a text such as ``"5GB"``; a larger tensor has a file of its own.
        mesh: by default the largest of the current mesh and those of the adaptors; all ranks if there is none.

    Backward: none.

    Cost: p elements travel to one rank, some 2 MiB at a time. Memory of each rank: its part and a few times that; of
    tensors that transformers makes of several these too, one lot after the other.

    Raises:
        MeshError: on all ranks: not a module; a path or a size that is none; paths that differ; what ``path`` is, if it
            is a file where a folder is meant; a dtype that the format does not have; parameters that have no values
            yet, or that are others on each rank under one name; and if rank 0 cannot write: then nothing new is there.

    Example:
        >>> import tempfile, torch, meshcomm as mc
        >>> from meshcomm.parallel import fully_shard, load_full_state_dict, save_full_state_dict
        >>> mesh, folder = mc.make_mesh({"fsdp": 2}), tempfile.TemporaryDirectory()
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="sum", mesh=mesh)
        ...     save_full_state_dict(model, f"{folder.name}/model.pt")
        >>> _ = mc.launch(main, ranks=2)
        >>> torch.load(f"{folder.name}/model.pt")["weight"].shape
        torch.Size([2, 8])
        >>> folder.cleanup()

    Source: transformers' ``save_pretrained``, accelerate's ``save_model``; the formats are those of safetensors and of
    ``torch.save``.
    """
    where = "save_full_state_dict"
    checked_module(where, module)
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        fail(where, f"path={path!r} is no path.", fix='a folder, or a file such as "model.safetensors"')
    to = str(os.fspath(path))
    most = bytes_in(where, max_shard_size)
    axis = all_ranks(where, module, mesh)
    team = Team(where, axis, path=to, max_shard_size=most)
    found, (plan, _, together, _), _ = team.share_out(lambda: _tensors_alone(module), lambda: None)
    mine = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    in_folders = functools.partial(in_files, where, module)
    writing: list[Writing] = []
    team.first(lambda: writing.append(Writing(where, to, most, together, in_folders)))
    try:
        for batch in team.tell(lambda: writing[0].batches) or ():
            every = team.gather(parts_in(found, batch, mine))
            team.first(functools.partial(_take, writing, batch, every))
        team.first(lambda: writing[0].finish())
    finally:
        for each in writing:
            each.drop()


@Op("load_full_state_dict", "all ranks of the mesh call")
@out_of_sight
def load_full_state_dict(
    module: nn.Module,
    state_or_path: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    mesh: Mesh | None = None,
) -> Unfit:
    """Take this rank's parts of whole tensors, each copied to where it belongs.

    Names, shapes and dtypes are compared first, on all ranks, and nothing is changed where they do not fit. Then each
    rank reads what it keeps: of ``.safetensors`` files slices, which are mapped and copied into the parameters, so that
    no rank ever holds the whole. What is on the meta device gets its memory now, on the device of the mesh: a model
    that was made there and given to the adaptors is loaded without ever having been initialised.

    Values are converted to the dtype of the parameter, as ``copy_`` does it, from float to float and from integer to
    float; not from float to integer, nor from complex to real. Names are compared without what ``torch.compile`` and
    wrappers add to them (``_orig_mod.``). Where a model of ``transformers`` has other names than its files, or stacks
    what they keep apart, its own rules are followed.

    Type: all ranks of the mesh call.

    Args:
        module: spread over the mesh in any way, or a part of such a one.
        state_or_path: whole tensors, equal on every rank:

            a mapping: the ``state_dict`` of the module on one rank, or what :func:`full_state_dict` gave;
            a ``.safetensors`` file (needs the extra ``meshcomm[weights]``), or one that ``torch.save`` has written
            (``.pt``, ``.bin``), of which each rank maps its parts; no code is run;
            a folder of them, as ``save_pretrained`` writes it: ``model.safetensors``, or shards with their
            ``model.safetensors.index.json``; ``pytorch_model.bin``, or shards; or the index itself;
            a folder of :func:`meshcomm.parallel.checkpoint.save`, or of ``torch.distributed.checkpoint``.
        strict: whether names that one side lacks are an error. It is that of all ranks: names that another one has, as
            another stage of a pipeline, are not unexpected. A parameter with several names needs one of them.
        mesh: by default the largest of the current mesh and those of the adaptors; all ranks if there is none.

    Returns: names that one side lacks, as of ``load_state_dict``, and the same on all ranks: ``missing_keys``, which
    keep the values that they had, and ``unexpected_keys``. Both are empty where ``strict`` is True.

    Backward: none.

    Cost: the names travel to all ranks; each rank reads what it keeps, once (of a checkpoint twice), and of slices
    along other dims than the first the pages that they are on. A tensor that ``transformers`` makes of several is whole
    in memory for a moment, and so is a file of the format before torch 1.6.

    Raises:
        MeshError: on all ranks, before anything is changed: not a module; no mapping; no such file; a file or an index
            that is damaged, or names files that are not there; a parameter of another shape, of a dtype that is not
            converted, or that is no tensor; what is on the meta device and gets no value: parameters, and buffers that
            no ``state_dict`` has and that neither their module nor the model's ``_init_weights`` makes again.
        RuntimeError: on all ranks, before anything is changed: missing or unexpected names, if ``strict``.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import full_state_dict, fully_shard, load_full_state_dict
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="sum", mesh=mesh)
        ...     load_full_state_dict(model, {"weight": torch.ones(2, 8), "bias": torch.zeros(2)})
        ...     return full_state_dict(model)["weight"].sum().item()
        >>> mc.launch(main, ranks=2)
        [16.0, 16.0]

    Source: ``torch.distributed.checkpoint.state_dict.set_model_state_dict`` with ``full_state_dict=True``.
    """
    where = "load_full_state_dict"
    checked_module(where, module)
    axis = all_ranks(where, module, mesh)
    team = Team(where, axis, False)  # of shapes too, in a dry run
    with contextlib.ExitStack() as files:
        given = team.all(lambda: opened(where, state_or_path))
        files.callback(given.close)
        groups = team.all(lambda: _groups(module))
        every = {name: group for of_rank in team.everyone(groups) for name, group in of_rank.items()}
        source = team.all(lambda: as_named(where, module, given, every))
        loading = team.all(lambda: Loading(where, module, source, groups, axis.mesh.device))
        found = union(team.everyone(unfit(module, source, every)))
        if strict:
            refuse_names(where, module, given, found)
        team.all(loading.check)
        team.all(loading.fill)
        keep_types(module)
    return found


def _groups(module: nn.Module) -> dict[str, list[str]]:
    """Each name of the module's ``state_dict``, and the other names of what stands there."""
    here, clean = named(module, later=True), state_names(module)
    of: dict[str, list[str]] = {}
    for name in here.params:
        of.setdefault(here.aliases.get(name, name), []).append(name)
    return {name: of.get(here.aliases.get(name, name), []) for name in map(clean, module.state_dict())}
