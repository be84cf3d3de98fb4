"""A parallelism of one's own, as ARCHITECTURE.md says: experts that are stacked in one parameter, some on each rank.

It knows nothing of processes, states, checkpoints and norms, and they nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.parallel import clip_grad_norm, data_parallel, full_state_dict, fully_shard, load_full_state_dict
from meshcomm.parallel.checkpoint import load, save
from meshcomm.parallel.cut_parameters import Dim, Part, checked_module, know, refuse_copies, refuse_overlap
from meshcomm.parallel.cut_states import mark_states
from meshcomm.parallel.stand_ins import become, refuse_sliced
from meshcomm.runtime.transports.threads.scheduler import claim

WHERE = "split_experts"
F64 = torch.float64


class Experts(nn.Module):
    """``[e, d, d]``: row ``i`` of the input goes to expert ``i % e``, and on a mesh along ``axis`` each rank has some."""

    def __init__(self, experts: int, width: int, axis: str | None = None) -> None:
        super().__init__()
        self.experts, self.axis = experts, axis
        self.weight = nn.Parameter(torch.randn(experts, width, width, dtype=F64))
        self.scale = nn.Parameter(torch.ones(width, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        mine, scale = self.weight, self.scale
        parts = x.unflatten(0, (-1, self.experts))
        if self.axis is not None:
            parts, scale = mc.shard(parts, self.axis, 1), mc.pvary(scale, self.axis)
        y = torch.einsum("bed,edf->bef", parts, mine) * scale
        if self.axis is not None:
            y = mc.all_gather_invariant(y, self.axis, 1)
        return y.flatten(0, 1)


def split_experts(module: nn.Module, axis: str) -> nn.Module:
    """Each rank of ``axis`` keeps its part of the experts."""
    checked_module(WHERE, module)
    ax = check.axis_of(WHERE, axis, None)
    claim(module, WHERE)
    refuse_sliced(WHERE, module, "call split_experts before fully_shard")
    refuse_copies(WHERE, module, "split_experts before data_parallel", ax)
    refuse_overlap(WHERE, module, ax)
    made = {}
    for path, part in module.named_modules():
        if isinstance(part, Experts):
            if part.experts % ax.size:
                fail(WHERE, f"{part.experts} experts are not divided by axis {axis!r} (size {ax.size}).")
            part.axis, p = axis, part.weight
            how = Dim(0, (part.experts,))
            with torch.no_grad():
                become(p, mc.shard(p.detach(), axis).clone())
            made[id(p)] = Part(f"{path}.weight".lstrip("."), WHERE, ax.mesh, axis, ax.index, how)
    know(module, ax.mesh, made)
    mark_states(module)
    return module


def seeded() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4, dtype=F64), Experts(4, 4), nn.Linear(4, 4, dtype=F64))


def rows() -> Tensor:
    return torch.arange(32.0, dtype=F64).reshape(8, 4) / 10


def alone() -> tuple[float, dict[str, Tensor]]:
    net = seeded()
    net(rows()).square().mean().backward()
    norm = clip_grad_norm_(net.parameters(), 0.1)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return norm.item(), net.state_dict()


@pytest.mark.parametrize("others", ["", "dp", "fsdp"])
def test_states_norms_and_checkpoints_know_it(others: str, tmp_path: Path) -> None:
    mesh = mc.make_mesh({others or "dp": 2 if others else 1, "ep": 2})
    norm, state = alone()

    def main() -> None:
        with mc.use_mesh(mesh):
            net = split_experts(seeded(), "ep")
            x = rows()
            if others == "dp":
                data_parallel(net, "dp", grads="mean")
            if others == "fsdp":
                fully_shard(net, "fsdp", grads="mean")
            if others:
                x = mc.shard(x, others)
            net(x).square().mean().backward()
            assert clip_grad_norm(net, 0.1).item() == pytest.approx(norm)
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            full = full_state_dict(net)
            assert_close(full, state)
            again = split_experts(seeded(), "ep")
            load_full_state_dict(again, state)
            assert_close(full_state_dict(again), state)
            folder = save(tmp_path, net)
            whole = seeded()
            load(folder, whole)
            assert_close(whole.state_dict(), state)
            with pytest.raises(mc.MeshError, match="by (split_experts|fully_shard)"):
                clip_grad_norm_(net.parameters(), 1.0)
            with pytest.raises(mc.MeshError, match="'1.weight' is whole, of shape"):
                again.load_state_dict(state)

    mc.launch(main, ranks=mesh.size)


def test_what_does_not_fit_is_refused() -> None:
    with mc.use_mesh(mc.make_mesh({"ep": 3})), pytest.raises(mc.MeshError, match="4 experts are not divided"):
        mc.launch(lambda: split_experts(seeded(), "ep"), ranks=3)
    with mc.use_mesh(mc.make_mesh({"ep": 2})):
        for first in (lambda net: data_parallel(net, "ep", grads="sum"), lambda net: split_experts(net, "ep")):
            with pytest.raises(mc.MeshError, match="data parallel|would be taken to be the same along axis"):
                mc.launch(lambda: split_experts(first(seeded()), "ep"), ranks=2)
