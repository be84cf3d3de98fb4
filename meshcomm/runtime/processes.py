"""Links between processes: a torch ProcessGroup called directly, and the same operations in a form that compiles.

n = number of ranks in the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError, fail, text
from meshcomm.runtime import wire, world
from meshcomm.runtime.protocol import Note, Post, Want

__all__ = ["PacketLink", "ProcessLink", "TracedLink", "group_of", "link_of"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_DIRECT = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})
"""Dtypes whose sum and product every backend knows."""

_BITWISE = ("band", "bor", "bxor")


class PacketLink:
    """The primitives of a link in terms of five raw ones, which work on dense tensors of dtypes that every backend
    knows.
    """

    size: int
    index: int
    watched = False
    tree: tuple[Any, ...] = ()
    bitwise: bool
    """Whether the backend has and, or, xor (NCCL has not)."""

    def announce(self, note: Note) -> None:
        """Nobody listens; a rank that calls something else is a matter for the guard."""

    def check_device(self, device: torch.device) -> str | None:
        """Traced tensors were checked before."""
        return None

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        raise NotImplementedError

    def _folds(self, x: Tensor, op: str) -> bool:
        """Whether the backend cannot reduce this, so that it is moved whole and reduced here."""
        return (op == "product" and x.dtype.is_complex) or (op in _BITWISE and not self.bitwise)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """One all_reduce, or an all_gather and a local reduction where the backend cannot."""
        if self._folds(x, op):
            return wire.fold(op, self.all_gather(x).unbind())
        clothes = wire.dress(op, x.dtype)
        if clothes is None:
            return self._reduce(wire.plain(x), op)
        return clothes.off(self._reduce(clothes.on(x).contiguous(), op))

    def all_gather(self, x: Tensor) -> Tensor:
        """One all_gather of the elements, or of their bytes."""
        rows = self._gather(wire.to_bytes(x))
        return wire.from_bytes(rows, x.dtype).reshape(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """One reduce_scatter, or an all_to_all and a local reduction where the backend cannot."""
        shape = x.shape[1:]
        if self._folds(x, op):
            runs = [shape.numel()] * self.size
            return wire.fold(op, self.all_to_all(x.reshape(-1), runs, runs).view(self.size, *shape).unbind())
        clothes = wire.dress(op, x.dtype)
        if clothes is None:
            return self._reduce_scatter(wire.plain(x).reshape(self.size, shape.numel()), op).view(shape)
        dressed = clothes.on(x).contiguous()
        shape = dressed.shape[1:]
        return clothes.off(self._reduce_scatter(dressed.view(self.size, shape.numel()), op).view(shape))

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """One all_to_all of the elements, or of their bytes."""
        packed = wire.to_bytes(x)
        width = x.element_size() // packed.element_size()
        out = self._all_to_all(packed, [width * run for run in send], [width * run for run in recv])
        return wire.from_bytes(out, x.dtype)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """An all_to_all in which at most one run is not empty: no order of sends and receives can lock."""
        send, recv = [0] * self.size, [0] * self.size
        if destination is not None:
            send[destination] = x.numel()
        if source is not None:
            recv[source] = x.numel()
        flat = x.reshape(-1)
        out = self.all_to_all(flat if destination is not None else flat[:0], send, recv)
        return torch.zeros_like(x, memory_format=torch.contiguous_format) if source is None else out.view(x.shape)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """One broadcast of the elements, or of their bytes."""
        return wire.from_bytes(self._broadcast(wire.to_bytes(x), src), x.dtype).view(x.shape)


class ProcessLink(PacketLink):
    """A torch ProcessGroup, called by its own methods: they cost half of what ``torch.distributed``'s functions
    cost.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int) -> None:
        self.group = group
        self.size = len(ranks)
        self.index = index
        backends = dist.get_backend_config(group)
        self._kinds = dict(part.split(":") for part in backends.split(",")) if ":" in backends else {}
        self.bitwise = "nccl" not in backends
        self._options = {name: _options(dist.AllreduceOptions(), op) for name, op in _OPS.items()}
        self._scatter_options = {name: _options(dist.ReduceScatterOptions(), op) for name, op in _OPS.items()}

    def __getattr__(self, name: str) -> NoReturn:
        # Called for what is missing only: the group, once shutdown() has taken it away.
        if name == "group":
            fail(
                "mesh",
                "the mesh belongs to a process group that was shut down.",
                fix="make the mesh again after mc.init()",
            )
        raise AttributeError(name)

    def check_device(self, device: torch.device) -> str | None:
        """Whether a backend is registered for this kind of device."""
        if device.type == "meta" or (self._kinds and device.type not in self._kinds):
            return f"the mesh moves tensors on {', '.join(sorted(self._kinds)) or 'real devices'}"
        return None

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As in the base, with a short way for what is reduced as it is."""
        if x.dtype in _DIRECT and op in ("sum", "product"):
            return self._reduce(x, op)
        return super().all_reduce(x, op)

    def _error(self, what: str, error: RuntimeError) -> CommError:
        return CommError(
            text(
                what,
                f"the transport failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                got=f"index {self.index} of a group of {self.size}",
                fix="look at the other ranks: the first one that failed or stopped is the cause",
            )
        )

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        # A clone has no lazy sign left; naming a memory format costs as much again.
        y = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if y.numel():
            try:
                self.group.allreduce([y], self._options[op]).wait()
            except RuntimeError as error:
                raise self._error("all_reduce", error) from error
        return y

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size * x.numel())
        if x.numel():
            try:
                _torch.allgather_base(self.group, out, x).wait()
            except RuntimeError as error:
                raise self._error("all_gather", error) from error
        return out.view(self.size, x.numel())

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = x.new_empty(x.shape[1:])
        if x.numel():
            try:
                # Flat: torch's fake backend copies a chunk of the input, with its shape.
                _torch.reduce_scatter_base(self.group, out, x.view(-1), self._scatter_options[op]).wait()
            except RuntimeError as error:
                raise self._error("reduce_scatter", error) from error
        return out

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        out = x.new_empty(sum(recv))
        try:
            self.group.alltoall_base(out, x, recv, send, dist.AllToAllOptions()).wait()
        except RuntimeError as error:
            raise self._error("all_to_all", error) from error
        return out

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        y = x.clone()
        if y.numel():
            options = dist.BroadcastOptions()
            options.rootRank = src
            try:
                self.group.broadcast([y], options).wait()
            except RuntimeError as error:
                raise self._error("broadcast", error) from error
        return y

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """The backend's reduce on a copy (it spoils its input on the other ranks), or a gather and a local
        reduction.
        """
        if self._folds(x, op):
            rows = self.gather(x, dst)
            return None if rows is None else wire.fold(op, rows.unbind())
        clothes = wire.dress(op, x.dtype)
        y = wire.plain(x).clone() if clothes is None else clothes.on(x).clone(memory_format=torch.contiguous_format)
        if y.numel():
            options = _options(dist.ReduceOptions(), _OPS[op])
            options.rootRank = dst
            try:
                self.group.reduce([y], options).wait()
            except RuntimeError as error:
                raise self._error("reduce", error) from error
        if self.index != dst:
            return None
        return y if clothes is None else clothes.off(y)

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """An all_to_all in which all runs go to ``dst``."""
        run = x.numel()
        send = [run if i == dst else 0 for i in range(self.size)]
        out = self.all_to_all(x.reshape(-1), send, [run if self.index == dst else 0] * self.size)
        return out.view(self.size, *x.shape) if self.index == dst else None

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """An all_to_all in which all runs come from ``src``."""
        run = like.numel()
        recv = [run if i == src else 0 for i in range(self.size)]
        flat = like.new_empty(0) if x is None else x.reshape(-1)
        return self.all_to_all(flat, [run if self.index == src else 0] * self.size, recv).view(like.shape)

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """One batch of point-to-point operations, so that no order of sends and receives can lock."""
        sent = [(wire.to_bytes(x), dst, tag) for x, dst, tag in posts]
        buffers = [
            wire.to_bytes(torch.empty(shape, dtype=dtype, device=device)) for _, shape, dtype, _, device in wants
        ]
        todo = [dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=dst) for x, dst, tag in sent]
        todo += [
            dist.P2POp(dist.irecv, buffer, group=self.group, tag=want[3], group_peer=want[0])
            for buffer, want in zip(buffers, wants, strict=True)
        ]
        try:
            for work in dist.batch_isend_irecv(todo) if todo else ():
                work.wait()
        except RuntimeError as error:
            raise self._error("exchange", error) from error
        return [wire.from_bytes(buffer, want[2]).view(want[1]) for buffer, want in zip(buffers, wants, strict=True)]

    def barrier(self) -> None:
        """An all_reduce of one element on the CPU where it can be, else on the device: it needs no device of its
        own.
        """
        kind = "cpu" if not self._kinds or "cpu" in self._kinds else next(iter(self._kinds))
        flag = self._reduce(torch.zeros(1, device=kind), "sum")
        flag.item()  # on an accelerator, wait on the host too


class TracedLink(PacketLink):
    """The same operations as functional ops, which trace into one graph with fake tensors."""

    def __init__(self, link: ProcessLink) -> None:
        self.size = link.size
        self.index = link.index
        self.bitwise = link.bitwise
        self._name: Any = link.group.group_name

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """As in the base; a rank without a source gets zeros from itself.

        A collective of which nothing is used is dropped from the graph, on this rank alone, and its peers would wait.
        """
        if source is not None:
            return super().permute(x, source, destination)
        flat = x.reshape(-1)
        runs = {self.index: torch.zeros_like(flat)}
        if destination is not None:
            runs[destination] = flat
        send = [flat.numel() if target in runs else 0 for target in range(self.size)]
        recv = [flat.numel() if target == self.index else 0 for target in range(self.size)]
        return self.all_to_all(torch.cat([runs[target] for target in sorted(runs)]), send, recv).view(x.shape)

    def _done(self, x: Tensor) -> Tensor:
        result: Tensor = _torch.functional.wait_tensor(x)
        return result

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        return self._done(_torch.functional.all_reduce(x, op, self._name))

    def _gather(self, x: Tensor) -> Tensor:
        return self._done(_torch.functional.all_gather_into_tensor(x, self.size, self._name)).view(self.size, *x.shape)

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = self._done(_torch.functional.reduce_scatter_tensor(x, op, self.size, self._name))
        return out.view(x.shape[1:])

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return self._done(_torch.functional.all_to_all_single(x, recv, send, self._name))

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._done(_torch.functional.broadcast(x, src, self._name))


def _options(options: Any, op: Any) -> Any:
    options.reduceOp = op
    return options


_links: dict[tuple[int, ...], ProcessLink] = {}


def link_of(ranks: tuple[int, ...]) -> ProcessLink:
    """The link of these ranks of the world in this order; its members call it together the first time."""
    if ranks not in _links:
        here = world.current()
        assert here is not None
        whole = ranks == tuple(range(here.size))
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        group = dist.group.WORLD if whole else _torch.new_group(ranks, f"meshcomm_{digest}", here.timeout)
        assert group is not None
        _links[ranks] = ProcessLink(group, ranks, ranks.index(here.rank))
    return _links[ranks]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """torch's process group of these ranks."""
    return link_of(ranks).group


def _forget() -> None:
    # A reference to a process group that outlives destroy_process_group ends the interpreter with SIGABRT.
    for link in _links.values():
        del link.group
    _links.clear()


world.on_shutdown(_forget)
