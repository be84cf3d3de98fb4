"""On the accelerator: ranks of one process with backward and random states of their own, and NCCL on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_programs as programs
import pytest
import torch
import torch.distributed as dist

import meshcomm as mc

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("axis", ["a", ("b", "a")], ids=str)
def test_every_collective_with_two_derivatives(axis: Any) -> None:
    mc.launch(programs.on_device, ranks=4, args=(axis,))


def test_a_deep_backward_does_not_lock() -> None:
    expected = mc.launch(programs.trained, ranks=4, args=(torch.device("cpu"),))
    found = mc.launch(programs.trained, ranks=4, args=(programs.device(),))
    assert len(found[0]) == 7
    for rank in range(4):
        programs.same(found[rank], expected[rank], f"rank {rank}")


def test_random_states_of_the_device_differ_and_come_back() -> None:
    torch.manual_seed(5)
    torch.rand(1, device=programs.device())  # in use before the launch
    before = torch.get_device_module(programs.device()).get_rng_state()
    first, again = (mc.launch(programs.draws, ranks=4) for _ in range(2))
    assert first == again
    assert len({tuple(row) for rank in first for row in rank}) == 12
    after = torch.get_device_module(programs.device()).get_rng_state()
    programs.same(after, before)


def test_a_change_over_does_not_disturb_the_devices_random_numbers() -> None:
    assert mc.launch(programs.seeded_draws, ranks=3, args=(True,)) == mc.launch(
        programs.seeded_draws, ranks=3, args=(False,)
    )


def test_the_default_device_is_taken_over() -> None:
    kind = programs.device().type
    with torch.device(programs.device()):
        assert mc.launch(programs.default_device, ranks=2) == [[kind] * 4] * 2


def test_leaves_on_two_devices() -> None:
    mc.launch(programs.mixed_devices, ranks=2)


def test_autocast_of_the_device_is_taken_over() -> None:
    with torch.autocast(programs.device().type, dtype=torch.bfloat16):
        assert mc.launch(programs.autocast_in_ranks, ranks=2) == [[torch.bfloat16]] * 2
    assert mc.launch(programs.autocast_in_ranks, ranks=2) == [[torch.float32]] * 2


# ------------------------------------------------------------------------------------------------- processes, one rank


@pytest.fixture
def nccl() -> Callable[..., list[Any]]:
    if programs.device().type != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    return lambda fn, *args: mc.launch(fn, ranks=1, args=args, runtime="processes", timeout=60)


def test_one_rank_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    ((kind, backends),) = nccl(programs.one_rank)
    assert kind == "cuda"
    assert "nccl" in backends
    assert "cpu:gloo" in backends


def test_the_primitives_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    nccl(programs.primitives_of_one)


@pytest.mark.parametrize(
    "fn",
    [
        programs.recomputed, programs.tree_on_two_devices, programs.on_several_streams, programs.queued_on_the_device,
        programs.given_up,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_one_rank_alone_with_nccl(nccl: Callable[..., list[Any]], fn: Callable[[], str]) -> None:
    assert nccl(fn) == ["cuda"]


# --------------------------------------------------------------------------------------------------------------- later


@pytest.mark.parametrize("axis", ["a", ("b", "a")], ids=str)
def test_works_of_ranks_in_one_process(axis: Any) -> None:
    mc.launch(programs.later_on_device, ranks=4, args=(axis,))


def test_sums_during_backward() -> None:
    mc.launch(programs.sums_during_backward, ranks=2)


def test_works_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    nccl(programs.later_on_one_rank)


# ------------------------------------------------------------------------------------------------- the caller's device


def test_ranks_of_one_process_have_the_callers_device_and_stream() -> None:
    if programs.device().type != "cuda":
        pytest.skip("needs streams")
    mine, index = torch.Stream(programs.device()), torch.accelerator.device_count() - 1
    before = torch.accelerator.current_stream()
    with torch.cuda.device(index):
        for stream in (torch.accelerator.current_stream(), mine):
            torch.accelerator.set_stream(stream)
            where = torch.accelerator.current_device_index()
            found = mc.launch(programs.device_and_stream, ranks=2)
            assert [each[:2] for each in found] == [[where, stream]] * 2
            assert torch.equal(
                found[0][2].cpu(), found[1][2].cpu()
            )  # by work on this stream, which has waited for theirs
    torch.accelerator.set_stream(before)


def test_the_first_launch_in_a_process_draws_as_the_next() -> None:
    program = "import gpu_programs as g; a, b = g.seeded_in_a_new_process(); assert a == b, (a, b)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # meshcomm need not be installed
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
