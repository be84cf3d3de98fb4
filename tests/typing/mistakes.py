"""What checkers find before it is run: each line is wrong, and says to each of them that it knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshcomm as mc


def wrong(x: Tensor, model: nn.Module) -> None:
    mc.all_reduce(x, "dp", "avg")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, "dp", op="SUM")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.scan(x, "dp", "mean")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    mc.reduce_scatter(x, "dp", op=torch.max)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, ["dp"])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, "dp", async_op="yes")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, "dp", async_op=True, timeout=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, "dp", group=None)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    mc.all_gather(x)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    mc.broadcast(x, "dp", src="0")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mc.all_reduce(x, "dp", async_op=True).sum()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    mc.reduce(x, "dp").sum()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    mc.gather(x, "dp") + 1  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand, reportUnusedExpression]
    mc.recv("dp", 0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    mc.launch(wrong, ranks="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mc.launch(wrong, ranks=2, runtime="threads")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mc.parallel.data_parallel(model, "dp")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mc.parallel.data_parallel(model, "dp", grads="avg")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mc.parallel.fully_shard(model, "dp", grads="average")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mc.parallel.full_state_dict(model, dst=0).keys()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    mc.parallel.fully_shard(model, "dp", grads="sum").nothing_of_this()  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    mc.shard_map(torch.sin, in_specs="a b")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    mc.check_vma("strict")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mc.make_mesh({"dp": "2"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    mc.make_mesh(dp=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mc.mark_varying(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mc.psum(x, "dp")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    mc.parallel.FSDP(model)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    mc.wait(mc.all_reduce(x, "dp", async_op=True)).wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    found: int = mc.all_reduce(x, "dp")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    size: str = mc.axis_size("dp")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(found, size)
