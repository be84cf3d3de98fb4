"""The private names of torch behind process groups: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from meshcomm._versions import has, lack
from meshcomm.errors import fail

__all__ = [
    "allgather_base",
    "backend_for",
    "begin_messages",
    "connect",
    "default_store",
    "end_backend",
    "functional",
    "gather_method",
    "is_to_connect",
    "new_group",
    "options_for",
    "reduce_scatter_base",
    "scatter_method",
    "set_limit",
    "shares_communicators",
]

_GATHERS = has("torch.distributed.ProcessGroup._allgather_base", "some µs of each all_gather between processes")
_SCATTERS = has(
    "torch.distributed.ProcessGroup._reduce_scatter_base", "some µs of each reduce_scatter between processes"
)

gather_method, scatter_method = "_allgather_base" if _GATHERS else "", "_reduce_scatter_base" if _SCATTERS else ""
"""Of process groups, where torch has them."""


def allgather_base(group: dist.ProcessGroup, out: Tensor, x: Tensor, options: Any) -> dist.Work:
    """Gather into one buffer; the public ``all_gather_into_tensor`` costs some µs more of Python."""
    if _GATHERS:
        return group._allgather_base(out, x, options)
    return _begun(dist.all_gather_into_tensor(out, x, group=group, async_op=True))


def reduce_scatter_base(
    group: dist.ProcessGroup, out: Tensor, x: Tensor, options: dist.ReduceScatterOptions
) -> dist.Work:
    """Reduce and scatter from one buffer to one buffer."""
    if _SCATTERS:
        return group._reduce_scatter_base(out, x, options)
    return _begun(dist.reduce_scatter_tensor(out, x, options.reduceOp, group=group, async_op=True))


_BACKENDS = has(
    "torch.distributed.ProcessGroup._get_backend",
    "a call on a device that is given up ends all backends of its group, and each call takes half a µs longer",
)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What the group calls for tensors on ``device``, with methods of the same names; a group of a class of somebody's
    own does so by itself, and one that has nothing for them says so at the call.
    """
    if not _BACKENDS or type(group) is not dist.ProcessGroup:
        return group
    try:
        return group._get_backend(device)
    except RuntimeError:
        return group


def end_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Nothing that it has under way goes on, on this kind of device."""
    backend: Any = group._get_backend(device) if _BACKENDS else group
    backend.abort()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is no member of the group"
    return work


def begin_messages(todo: list[dist.P2POp]) -> list[dist.Work]:
    """``batch_isend_irecv`` for each device, for it gives back the works of one alone; one by one in a group that is
    not torch's own class, in which torch 2.15 does not find the backend of a device.
    """
    if type(todo[0].group) is dist.ProcessGroup:
        devices = dict.fromkeys(each.tensor.device for each in todo)
        batches = [[each for each in todo if each.tensor.device == device] for device in devices]
        return [work for batch in batches for work in dist.batch_isend_irecv(batch)]
    peer = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [
        _begun(each.op(each.tensor, group=each.group, tag=each.tag, **{peer[each.op]: each.group_peer}))
        for each in todo
    ]


_STORE = "torch.distributed.distributed_c10d._get_default_store"
_has_store = has(_STORE, "barrier(timeout=) and adopted groups are refused on groups of a class of somebody's own")


def default_store() -> Store:
    """The store over which the default process group met."""
    if _has_store:
        return distributed_c10d._get_default_store()
    group = dist.group.WORLD
    assert group is not None
    store: Store | None = group.get_group_store()
    if store is None:
        fail("init", **lack(_STORE, "a backend that is not a ProcessGroup of its own, or "))
    return store


_HELPERS = ("_world", "_get_default_group", "_new_process_group_helper")
_missing = [
    name
    for name in _HELPERS
    if not has(f"torch.distributed.distributed_c10d.{name}", "groups are to be made in the same order on all ranks")
]


_CONNECT = "torch._C._distributed_c10d.Backend.eager_connect_single_device"
_connects = has(_CONNECT, "on NCCL the first message between some of an axis' ranks waits for the others")


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the communicator for this device that NCCL would make at its first use, while all ranks of the group are
    here: a first message between two of them would wait for the others, and no CUDA graph could begin with it.
    """
    if (backend := _unconnected(group, device)) is not None:
        backend.eager_connect_single_device(device)


def is_to_connect(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether :func:`connect` would make a communicator."""
    return _unconnected(group, device) is not None


def _unconnected(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend for the device if it has no communicator yet."""
    if not _connects or device.type == "cpu" or type(group) is not dist.ProcessGroup or group.size() == 1:
        return None
    if not _has_nccl(dist.get_backend_config(group)):
        return None
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # none for this kind of device
        return None
    if not backend.supports_splitting:  # as torch itself asks
        return None
    # NCCL's would make a second one. The first of these knows of the communicator of all ranks alone, on the device
    # that this thread uses: a new thread the first one.
    is_there = getattr(backend, "_comm_ptr", None) or getattr(backend, "_is_initialized", None)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return None if is_there is not None and is_there() else backend


_SET = "torch.distributed.distributed_c10d._set_pg_timeout"
_sets = has(_SET, "on NCCL axes with other time-outs have communicators of their own")


def shares_communicators(backend: str) -> bool:
    """Whether these backends have communicators that are large, and can be given another time-out."""
    return _sets and not _missing and _has_nccl(backend)


def set_limit(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """The time-out of what is begun in the group from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def _has_nccl(backend: str) -> bool:
    return "nccl" in re.split("[:,]", backend)


def options_for(backend: str, timeout: timedelta) -> Any:
    """What NCCL is to do otherwise than by default: its streams come first on the device, so that what many ranks wait
    for is not behind what one computes. None where it is not among the backends.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or not _has_nccl(backend):
        return None
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def new_group(
    ranks: Sequence[int], name: str, timeout: timedelta, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks`` in the order given; only its members call. ``device``: for which it is
    connected as by :func:`connect`.

    The public ``dist.new_group`` either needs every rank of the world, or derives the group's name from the number of
    groups that this rank has made before, which differs between ranks once groups are made when first used.
    """
    if _missing:
        return _new_group_in_turn(ranks, name, timeout)
    world = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    backend, store = world.pg_map[default]
    store = _own_connection(store)
    bound = default.bound_device_id
    if (
        bound is not None
    ):  # a bound device makes NCCL split the default communicator, which waits for every rank of the world
        default.bound_device_id = None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            name,  # type: ignore[arg-type]  # a NewType of str in some versions
            options_for(backend, timeout),
            timeout=timeout,
            group_desc=name,
        )
    finally:
        if bound is not None:
            default.bound_device_id = bound
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    if device is not None:
        connect(group, device)
    return group  # type: ignore[no-any-return]


def _own_connection(store: Any) -> Any:
    """To the same store: who waits in one holds up all others that ask over it, in whatever thread."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # a store that has one only
        return store


_made = 0
_as_given: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)
"""That ``dist.new_group`` leaves the ranks in their order; torch 2.11 puts them in its own."""


def _new_group_in_turn(ranks: Sequence[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """By ``dist.new_group``, once the members are known to have made equally many before."""
    global _made
    store, rank = default_store(), dist.get_rank()
    store.set(f"meshcomm/made/{name}/{rank}", str(_made))
    every = [int(store.get(f"meshcomm/made/{name}/{other}")) for other in ranks]
    if len(set(every)) > 1:
        instead = f"make and use all meshes on all ranks in the same order ({every} groups were made before), or take "
        fail("make_mesh", **lack(f"torch.distributed.distributed_c10d.{_missing[0]}", instead))
    if not _as_given and list(ranks) != sorted(ranks):
        instead = f"make meshes whose ranks come in order along each axis (these are {list(ranks)}), or take "
        fail("make_mesh", **lack(f"torch.distributed.distributed_c10d.{_missing[0]}", instead))
    group: Any = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name, **_as_given
    )
    _made += 1
    return group  # type: ignore[no-any-return]


class _Lacking:
    """Stands for a namespace of operations that is not there."""

    def __init__(self, where: str, name: str, instead: str) -> None:
        self._said = where, name, instead

    def __getattr__(self, name: str) -> NoReturn:
        where, name, instead = self._said
        fail(where, **lack(name, instead))


_OPS = "torch.ops._c10d_functional.all_reduce"
functional: Any = (
    torch.ops._c10d_functional
    if has(_OPS, "torch.compile of collectives is refused")
    else _Lacking("compile", _OPS, "run without torch.compile, or take ")
)
"""The collectives that trace in one graph and that inductor buckets and overlaps."""
