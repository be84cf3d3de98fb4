"""The programs of ``test_gpu.py`` on the CPU, with and without float64, which Metal does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu_programs as programs
import pytest
import torch

import meshcomm as mc


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def widest(request: pytest.FixtureRequest) -> Iterator[None]:
    with programs.on_the_cpu(request.param):
        yield


INSIDE: list[tuple[Callable[..., Any], int, tuple[Any, ...]]] = [
    (programs.on_device, 4, (("b", "a"),)),
    (programs.trained, 4, (torch.device("cpu"),)),
    (programs.seeded_draws, 3, (True,)),
    (programs.default_device, 2, ()),
    (programs.mixed_devices, 2, ()),
    (programs.autocast_in_ranks, 2, ()),
    (programs.later_on_device, 4, ("a",)),
    (programs.sums_during_backward, 2, ()),
]


@pytest.mark.parametrize(("fn", "ranks", "args"), INSIDE, ids=lambda value: getattr(value, "__name__", ""))
def test_ranks_of_one_process(widest: None, fn: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> None:
    mc.launch(fn, ranks=ranks, args=args)


ALONE: list[Callable[[], Any]] = [
    programs.one_rank, programs.primitives_of_one, programs.later_on_one_rank, programs.recomputed,
    programs.tree_on_two_devices, programs.on_several_streams, programs.queued_on_the_device, programs.given_up,
]  # fmt: skip


def all_alone() -> list[Any]:
    with programs.on_the_cpu(torch.float64):
        return [fn() for fn in ALONE]


def test_one_rank_over_gloo() -> None:
    """The same functions as over NCCL, in which a name that has moved would be found on the day of the GPU."""
    [(first, *others)] = mc.launch(all_alone, ranks=1, runtime="processes", backend="gloo", timeout=200)
    assert first[0] == "cpu"
    assert "cpu:gloo" in first[1]
    assert others == ["cpu"] * (len(ALONE) - 1)
