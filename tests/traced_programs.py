"""What each rank of a torchrun does and saves a trace of: python traced_programs.py FOLDER. Used by test_hangs_traces.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import parallel

RANKS, WIDTH = 4, 8


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)))


def trained(model: nn.Module) -> None:
    """Three steps: from the second one on units are gathered ahead, in the order of the first."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        parallel.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fsdp() -> None:
    """Sharded, on two replicas, each unit gathered again in backward."""
    trained(parallel.fully_shard(layers(4), "b", replica_axis="a", grads="mean", units=["*"], prefetch=2))


def tensor() -> None:
    model = parallel.tensor_parallel(layers(2), {"0.0": "column", "1.0": "row"}, axis="b")
    trained(parallel.data_parallel(model, "a", grads="mean", bucket_mb=1e-4))


def experts() -> None:
    """Each rank has rows of its own for each expert, so many as its router says."""
    router, w = nn.Linear(WIDTH, RANKS), nn.Parameter(torch.randn(1, WIDTH, WIDTH))
    for rows in (6, 3):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        weight, choice = router(x).softmax(-1).topk(2)

        def own(rows: Tensor, counts: Tensor) -> Tensor:
            return parallel.grouped_matmul(rows, w, counts)

        y = parallel.experts(x, choice, weight, own, axis=("a", "b"), count=RANKS)
        mc.all_reduce(y.sum(), ("a", "b")).backward()


def pipeline(schedule: str, chunks: int) -> None:
    stages = [parallel.fully_shard(layers(1), "b", grads="mean") for _ in range(chunks)]
    step = parallel.pipelined(stages, "a", loss=F.mse_loss, microbatches=4, grads="mean", schedule=schedule)
    optimizer, x = torch.optim.SGD(step.parameters(), lr=0.1), torch.randn(8, WIDTH)
    for _ in range(2):
        step(x, x)
        optimizer.step()
        optimizer.zero_grad()
    step.evaluate(x)


def crossed() -> None:
    """It ends here, and need not where communicators take turns."""
    axes = ("a", "b") if mc.rank() in (0, 3) else ("b", "a")
    mc.wait([mc.all_reduce(torch.ones(4), axis, async_op=True) for axis in axes])


def left_out() -> None:
    """Backward on all ranks but one: the others wait for it, until their time is up."""
    x = torch.ones(4, requires_grad=True)
    y = mc.all_gather(x, ("a", "b")).sum()
    if mc.rank() != 2:
        y.backward()


PROGRAMS: dict[str, Callable[[], object]] = {
    "fsdp": fsdp,
    "tensor": tensor,
    "experts": experts,
    "1f1b": lambda: pipeline("1f1b", 1),
    "interleaved": lambda: pipeline("interleaved", 2),
    "crossed": crossed,
    "left_out": left_out,  # the last one, for nobody can go on after it
}


def main(folder: Path) -> None:
    mc.init(timeout=10.0)
    for name, program in PROGRAMS.items():
        (folder / name).mkdir(exist_ok=True)
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})), mc.trace() as t:
            try:
                program()
            except mc.CommError:
                if name != "left_out":
                    raise
        t.save(folder / name / f"rank{mc.rank()}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
