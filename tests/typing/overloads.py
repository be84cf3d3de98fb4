"""What type checkers make of the overloads; nothing runs it."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import meshcomm as mc
from meshcomm.work import Work

F32 = torch.float32


async def typed(x: Tensor, tree: dict[str, list[Tensor]], later: bool) -> None:
    assert_type(mc.all_reduce(x, "a"), Tensor)
    assert_type(mc.all_reduce(x, "a", "max", async_op=False), Tensor)
    assert_type(mc.all_reduce(x, "a", async_op=True), Work[Tensor])
    assert_type(mc.pvary(tree, "a", async_op=True), Work[dict[str, list[Tensor]]])
    assert_type(mc.all_gather(tree, ("a", "b"), 1, async_op=True).wait(), dict[str, list[Tensor]])
    assert_type(mc.all_gather_invariant(x, "a", sizes=[1, 2], async_op=True).wait(timeout=1), Tensor)
    assert_type(mc.shard(x, "a", async_op=True), Work[Tensor])
    assert_type(mc.reduce_scatter(x, "a", async_op=True), Work[Tensor])
    assert_type(mc.all_to_all(x, "a", 0, 1, async_op=True), Work[Tensor])
    assert_type(mc.permute(x, "a", [(0, 1)], async_op=True), Work[Tensor])
    assert_type(mc.shift([x], "a", -1, async_op=True), Work[list[Tensor]])
    assert_type(mc.broadcast(x, "a", async_op=True), Work[Tensor])
    assert_type(mc.reduce(x, "a"), Tensor | None)
    assert_type(mc.reduce(x, "a", async_op=True), Work[Tensor | None])
    assert_type(mc.gather(x, "a", async_op=True), Work[Tensor | None])
    assert_type(mc.scatter(None, "a", like=x, async_op=True), Work[Tensor])
    assert_type(mc.send(x, "a", 1, async_op=True), Work[None])
    assert_type(mc.recv("a", 1, shape=(2,), dtype=F32), Tensor)
    assert_type(mc.recv("a", 1, shape=(2,), dtype=F32, async_op=True), Work[Tensor])
    assert_type(mc.exchange([(x, 1)], [], "a", async_op=True), Work[list[Tensor]])
    assert_type(mc.barrier("a", async_op=True), Work[None])
    work = mc.all_reduce(x, "a", async_op=True)
    assert_type(mc.wait(work), Tensor)
    assert_type(mc.wait([work], 3), list[Tensor])
    assert_type(work.then(lambda y: [float(y)]), Work[list[float]])
    assert_type(await work, Tensor)
    assert_type(work.done(), bool)
    assert_type(mc.all_reduce(x, "a", async_op=later), Tensor | Work[Tensor])
    assert_type(mc.all_reduce(tree, "a", async_op=later), dict[str, list[Tensor]] | Work[dict[str, list[Tensor]]])
    assert_type(mc.reduce(x, "a", async_op=later), Tensor | Work[Tensor | None] | None)
    assert_type(mc.barrier("a", async_op=later), Work[None] | None)
    assert_type(mc.scan(x, "a", async_op=later), Tensor | Work[Tensor])
    assert_type(mc.wait(mc.reshard(x, "(a b) -> b", async_op=later)), Tensor)
