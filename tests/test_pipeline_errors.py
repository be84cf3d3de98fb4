"""When a pipeline goes wrong: a stage that raises, a rank that dies, a stage that communicates along the axis, outputs
that change, ranks that ask for other things. Each is told by name, on every rank, and nobody hangs.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import parallel

Run = Callable[..., list[Any]]
MSE = nn.functional.mse_loss
CPU = torch.profiler.ProfilerActivity.CPU


class Stage(nn.Module):
    """A layer, and what goes wrong there in the second microbatch or in the second step."""

    def __init__(self, wrong: str, rank: int) -> None:
        super().__init__()
        self.layer, self.wrong, self.rank, self.calls = nn.Linear(3, 3), wrong, rank, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y, wrong, odd = self.layer(x), self.wrong, self.rank == 1
        if wrong == "raises" and odd and self.calls == 2:
            raise ValueError("boom")
        if wrong == "raises later" and not self.calls:
            raise ValueError("boom")
        if wrong == "raises in backward" and odd and self.calls == 2:
            y.register_hook(lambda g: (_ for _ in ()).throw(ValueError("boom")))
        if wrong == "dies" and odd and self.calls == 2:
            os._exit(3)
        if wrong == "communicates" and odd:
            y = mc.all_reduce(y, "pp")
        if wrong == "pvary":
            y = y * mc.pvary(self.layer.bias, "pp")
        if wrong == "shape at first" and not self.rank:
            y = y[:, :2]
        if wrong == "dtype at first" and not self.rank:
            y = y.double()
        if wrong == "tree at first" and not self.rank:
            y = (y, 2 * y)
        if wrong == "output of the last" and odd:
            y = y[:, :2]
        if wrong == "other shape" and not self.rank and self.calls == 6:
            y = y[:1]
        if wrong == "other dtype" and not self.rank and self.calls == 6:
            y = y.double()
        return y


def trained(wrong: str, **how: Any) -> None:
    mesh = mc.make_mesh({"pp": -1})
    stages = [Stage(wrong, mesh.rank)]
    if wrong == "more stages on one rank" and mesh.rank:
        stages.append(Stage(wrong, mesh.rank))
    if wrong == "other numbers of microbatches":
        how["microbatches"] = 4 + mesh.rank
    if wrong == "other schedules":
        how["schedule"] = ["1f1b", "gpipe"][mesh.rank % 2]
    if wrong == "a table that is wrong on one rank":
        how["schedule"] = [["F0.0"], ["F0.0", "B0.0"]] if mesh.rank == 1 else "1f1b"
    given: dict[str, Any] = {"loss": MSE, "microbatches": 4, "grads": "mean", "mesh": mesh, **how}
    with mc.use_mesh(mesh):
        step = parallel.pipelined(stages, "pp", **given)
        rows = 6 if wrong == "other rows" and mesh.rank == 1 else 8
        for _ in range(2):
            step(torch.ones(8, 3), torch.zeros(rows, 3))


COMMUNICATES = r"meshcomm.pipelined: a stage communicates along axis 'pp', along which its pipeline goes"
IN_A_STAGE = {
    "raises": (ValueError, "boom"),
    "raises in backward": (ValueError, "boom"),
    "communicates": (mc.MeshError, COMMUNICATES),
    "pvary": (mc.MeshError, COMMUNICATES),
    "shape at first": (
        mc.MeshError,
        r"stage 1 \(Stage\) fails .* mat1 and mat2[\s\S]*stage 0 gives f32\[2, 2\] for mic",
    ),
    "dtype at first": (
        mc.MeshError,
        r"stage 1 \(Stage\) fails .* dtype[\s\S]*stage 0 gives f64\[2, 3\] for microbatch 0",
    ),
    "tree at first": (mc.MeshError, r"stage 1 \(Stage\) fails .*not tuple[\s\S]*gives f32\[2, 3\], f32\[2, 3\] for"),
    "output of the last": (mc.MeshError, r"the loss fails [\s\S]*the output is f32\[2, 2\], the target f32\[2, 3\]"),
    "other shape": (mc.CommError, r"stage 0 gives f32\[1, 3\] for microbatch 1, and has given f32\[2, 3\]"),
    "other dtype": (mc.CommError, r"stage 0 gives f64\[2, 3\] for microbatch 1, and has given f32\[2, 3\]"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("wrong", IN_A_STAGE)
def test_what_goes_wrong_in_a_stage(wrong: str) -> None:
    kind, words = IN_A_STAGE[wrong]
    with pytest.raises(kind, match=words):
        mc.launch(trained, ranks=2, args=(wrong,))


ALL = {
    "more stages on one rank": r"each rank has the same number of stages, and these have \[1, 2, 2, 2\]",
    "other numbers of microbatches": "microbatches, grads or remat are not the same on all ranks",
    "other schedules": "schedule, microbatches, grads or remat are not the same on all ranks",
    "a table that is wrong on one rank": "rank 0 misses B0.0",
    "other rows": "ranks have batches of different lengths for targets",
}


def told(wrong: str, words: str) -> None:
    with pytest.raises(mc.MeshError, match=words):
        trained(wrong)


@pytest.mark.parametrize("wrong", ALL)
def test_ranks_that_ask_for_other_things(run4: Run, wrong: str) -> None:
    run4(told, wrong, ALL[wrong])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("raises", r"rank 1 failed in trained: ValueError: boom"),
        ("communicates", r"rank 1 failed in trained: MeshError: " + COMMUNICATES),
        ("dies", r"rank 1 failed in trained: the process ended with exit code 3"),
    ],
)
def test_on_processes(wrong: str, words: str) -> None:
    """Said of the rank whose fault it is, long before the time is up."""
    with pytest.raises(mc.CommError, match=words):
        mc.launch(trained, ranks=2, args=(wrong,), runtime="processes", timeout=200)


def then_right(goes: str) -> None:
    """Steps of which some are looked at by one rank, or have failed on all, are those of the model on one rank."""
    mesh = mc.make_mesh({"pp": 4})
    torch.manual_seed(0)
    whole = nn.Sequential(*[Stage("raises later", rank) for rank in range(4)])
    own = copy.deepcopy(whole[mesh.rank])
    x, y = torch.rand(2, 8, 3)
    step = parallel.pipelined(own, "pp", loss=MSE, microbatches=4, grads="mean", schedule="gpipe", mesh=mesh)
    if goes != "in-process":
        for rank, look in enumerate([lambda: torch.profiler.profile(activities=[CPU]), mc.trace]):
            step(x, y)
            with look() if mesh.rank == rank else contextlib.nullcontext():
                step(x, y)
    for call in (step, step.evaluate):
        own.calls = mesh.rank - 4  # the first stage fails last, and nobody takes its last microbatch but one
        with pytest.raises(ValueError, match="boom"):
            call(*[100 * x, y][: 1 + (call is step)])
        step.zero_grad()
        for _ in range(2):
            own.calls = 0
            torch.testing.assert_close(step(x, y), MSE(whole(x), y).detach())
    whole.zero_grad()
    (2 * MSE(whole(x), y)).backward()
    torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in whole[mesh.rank].parameters()])


@pytest.mark.parametrize("goes", ["in-process", "pool4", "gloo4"])
def test_steps_after_one_that_failed_or_that_one_rank_looked_at(goes: str, request: pytest.FixtureRequest) -> None:
    if goes == "in-process":
        mc.launch(then_right, ranks=4, args=(goes,))
    else:
        request.getfixturevalue(goes).run(then_right, goes)


def test_a_stage_gives_dense_tensors_and_numbers_that_stay() -> None:
    class Gives(nn.Module):
        def __init__(self, what: str) -> None:
            super().__init__()
            self.layer, self.what = nn.Linear(3, 3), what

        def forward(self, x: Tensor) -> Any:
            y: Tensor = self.layer(x)
            return y.to_sparse() if self.what == "sparse" else (y, y.sum().item())

    class Takes(nn.Module):
        def forward(self, x: tuple[Tensor, float]) -> Tensor:
            return x[0]

    def main(what: str) -> None:
        mesh = mc.make_mesh({"pp": 2})
        stage = Gives(what) if mesh.rank == 0 else Takes()
        step = parallel.pipelined(stage, "pp", loss=MSE, microbatches=2, grads="mean", mesh=mesh)
        for _ in range(2):
            step(*torch.rand(2, 4, 3))

    with pytest.raises(mc.MeshError, match=r"stage 0 gives another rank a tensor of layout torch\.sparse_coo"):
        mc.launch(main, ranks=2, args=("sparse",))
    with pytest.raises(mc.CommError, match="as a tensor what changes from batch to batch"):
        mc.launch(main, ranks=2, args=("number",))


WRONG = {
    "a repeated action": ([["F0.0", "F0.0", "B0.0"], ["F0.0", "B0.0"]], "rank 0 repeats F0.0"),
    "a missing action": ([["F0.0"], ["F0.0", "B0.0"]], "rank 0 misses B0.0"),
    "a deadlock": ([["F0.0", "B0.0", "F0.1", "B0.1"], ["F0.0", "F0.1", "B0.1", "B0.0"]], "ranks wait for each other"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tables_that_are_wrong(wrong: str) -> None:
    table, words = WRONG[wrong]
    with pytest.raises(mc.MeshError, match=words):
        mc.launch(lambda: trained(wrong, schedule=table, microbatches=2 if wrong == "a deadlock" else 1), ranks=2)
