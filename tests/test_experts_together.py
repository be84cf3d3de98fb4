"""Experts and context with tensor parallelism and sharding at once, and their checkpoints between meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_vma_adaptors import B, D, S, alone, cut, drawn, made, steps
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel import Column, data_parallel, full_state_dict, fully_shard, tensor_parallel
from meshcomm.parallel.checkpoint import load, save

PLAN: dict[str, Any] = {"*.qkv": Column(parts=3), "*.proj": "row", "*": "replicated"}


def trained(axes: dict[str, int], context: bool, mode: Any) -> dict[str, Tensor] | None:
    """Experts along x, along which the sequence is cut as well, or else the batch."""
    with mc.use_mesh(mc.make_mesh(axes)):
        net = made()
        cut(net, "x", "x" if context else None)
        tensor_parallel(net, PLAN, axis="tp")
        fully_shard(net, ("fsdp", "x"), grads="sum", axes={"*.experts": "fsdp"})
        x, y = drawn(1, B, S, D), drawn(2, B, S, 2)
        if context:
            order = parallel.context_order(S, "x")
            x, y = (mc.shard(mc.shard(each[:, order], "x", 1), "fsdp") for each in (x, y))
        else:
            x, y = (mc.shard(each, ("fsdp", "x")) for each in (x, y))
        mc.mark_varying((x, y), ("fsdp", "x"))
        with mc.check_vma(mode):
            steps(net, x, y, ("fsdp", "x"))
        return full_state_dict(net, 0)


SHAPES = [{"fsdp": 2, "x": 2, "tp": 2}, {"fsdp": 1, "x": 2, "tp": 2}, {"fsdp": 2, "x": 2, "tp": 1}]


@pytest.mark.parametrize(("context", "mode"), [(False, "error"), (True, False)], ids=["batch", "sequence"])
def test_eight_ranks(context: bool, mode: Any) -> None:
    found, *_ = mc.launch(trained, ranks=8, args=(SHAPES[0], context, mode))
    assert_close(found, alone(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("axes", "context"), [(SHAPES[1], False), (SHAPES[1], True), (SHAPES[2], True)], ids=["ep", "cp", "fsdp cp"]
)
def test_four_processes(pool4: Any, axes: dict[str, int], context: bool) -> None:
    found, *_ = pool4.run(trained, axes, context, False)
    assert_close(found, alone(), rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------- checkpoints


def spread(axes: dict[str, int], net: nn.Module) -> Any:
    """The axes that the rows are cut over."""
    over = tuple(axes)
    cut(net, "ep")
    if "fsdp" in axes:
        fully_shard(net, over, grads="sum", axes={"*.experts": "fsdp"})
    elif "dp" in axes:
        data_parallel(net, over, grads="sum", axes={"*.experts": "dp"})
    else:
        data_parallel(net, over, grads="sum", axes={"*.experts": ()})
    return over


def goes_on(axes: dict[str, int], folder: Path, first: int) -> dict[str, Tensor] | None:
    """Two steps of training, from a checkpoint of the steps before, if there is one, and to the next."""
    with mc.use_mesh(mc.make_mesh(axes)):
        net = made()
        over = spread(axes, net)
        adam = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
        if first:
            with torch.no_grad():
                for p in net.parameters():
                    p.zero_()
            load(folder, net, adam)
        for step in range(first, first + 2):
            adam.zero_grad()
            x, y = (mc.shard(drawn(3 * step + at, B, S, d), over) for at, d in ((0, D), (1, 2)))
            mc.all_reduce((net(x) - y).square().sum(), over).backward()
            adam.step()
        save(folder, net, adam, step=first + 2)
        return full_state_dict(net, 0)


def test_checkpoints_from_mesh_to_mesh(tmp_path: Path) -> None:
    """ep 4, ep 2 x dp 2, fsdp 2 x ep 2, one rank, and ep 4 again: as one rank all the way, optimiser and all."""
    ways = [{"ep": 4}, {"dp": 2, "ep": 2}, {"fsdp": 2, "ep": 2}, {"ep": 1}, {"ep": 4}]
    for at, axes in enumerate(ways):
        ranks = torch.Size(axes.values()).numel()
        found, *_ = mc.launch(goes_on, ranks=ranks, args=(axes, tmp_path / "spread", 2 * at))
        expected, *_ = mc.launch(goes_on, ranks=1, args=({"ep": 1}, tmp_path / "alone", 2 * at))
        assert_close(found, expected, rtol=1e-9, atol=1e-9)
