"""A transport of one's own, made as ARCHITECTURE.md says: five raw operations, here torch's plain functions, and a place
whose links it makes. All above it works, backward included.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from meshcomm.mesh import Mesh
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.transports.algorithms import PacketLink
from meshcomm.runtime.transports.protocol import Link


class PlainLink(PacketLink):
    """Every collective by a plain function of torch.distributed, which waits."""

    nccl = frozenset[str]()

    def __init__(self) -> None:
        self.size, self.index = dist.get_world_size(), dist.get_rank()
        self.ledger, self.orders = Ledger(), dict[Any, list[list[int]]]()

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, getattr(dist.ReduceOp, op.upper()))
        return out

    def _gather(self, x: Tensor) -> Tensor:
        out = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(out, x.contiguous())
        return torch.stack(out)

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        return self._reduce(x, op)[self.index].clone()

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        out = x.new_empty(sum(recv))
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.clone()
        dist.broadcast(out, src)
        return out


class Plain:
    """Where the ranks are: the processes of torch's default group."""

    in_process = False

    def rank(self) -> int:
        return dist.get_rank()

    def world_size(self) -> int:
        return dist.get_world_size()

    def identify(self, shape: Any, ranks: tuple[int, ...]) -> str:
        return "plain"

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        return cast(Link, PlainLink())

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.group.WORLD)

    def device(self) -> torch.device:
        return torch.device("cpu")


def main() -> list[Any]:
    mc.init()
    size = dist.get_world_size()
    mesh = Mesh({"dp": size}, tuple(range(size)), Plain(), size)
    x = torch.tensor([1.0, 2.0]) * (1 + mesh.rank)
    w = torch.ones(2, requires_grad=True)
    with mc.use_mesh(mesh):
        (mc.pvary(w, "dp") * x).sum().backward()
        assert w.grad is not None
        return [
            mc.all_reduce(x, "dp").tolist(),
            mc.all_reduce(x, "dp", "mean", async_op=True).wait().tolist(),
            mc.all_gather(x, "dp").tolist(),
            mc.reduce_scatter(x, "dp").tolist(),
            mc.all_to_all(x, "dp", split_dim=0, concat_dim=0).tolist(),
            mc.broadcast(x, "dp", src=1).tolist(),
            mc.shift(x, "dp", 1).tolist(),
            w.grad.tolist(),
        ]


def test_all_above_a_transport_works_on_five_operations() -> None:
    first, second = mc.launch(main, 2, runtime="processes")
    both = [[3.0, 6.0], [1.5, 3.0], [1.0, 2.0, 2.0, 4.0]]
    assert first == [*both, [3.0], [1.0, 2.0], [2.0, 4.0], [2.0, 4.0], [3.0, 6.0]]
    assert second == [*both, [6.0], [2.0, 4.0], [2.0, 4.0], [1.0, 2.0], [3.0, 6.0]]
