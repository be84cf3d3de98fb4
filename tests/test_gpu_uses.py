"""Streams of one's own, set_device, checkpoints, offload, leaves on two devices, and what they cost, on the accelerator; and
the same programs on the CPU, so that they run on the day there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu_programs as programs
import gpu_uses as uses
import pytest
import torch
import torch.distributed as dist
from test_device_costs import FLOATS, in_order, patterns
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from benchmarks import gpu_parts
from meshcomm._torch import compiling
from meshcomm.runtime.transports import dtypes

on_gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=on_gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "accelerator":
        yield request.param
        return
    with programs.on_the_cpu(torch.float64):
        yield request.param


@pytest.mark.parametrize("fn", [uses.offloaded, uses.leaves_on_two_devices], ids=lambda fn: fn.__name__)
def test_ranks_of_one_process(where: str, fn: Callable[[], Any]) -> None:
    mc.launch(fn, ranks=2)


def test_checkpoints(where: str) -> None:
    uses.saved_and_loaded()


def test_set_device(where: str) -> None:
    before = torch.accelerator.current_device_index() if where != "cpu" else None
    assert mc.launch(uses.own_device, ranks=2) == [[(True, [3.0] * 3, True)] * 3] * 2
    assert before is None or torch.accelerator.current_device_index() == before


def streams_on_the_cpu() -> str:
    with programs.on_the_cpu(torch.float64):
        return uses.own_streams()


@pytest.fixture
def nccl() -> Callable[..., list[Any]]:
    if programs.device().type != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    return lambda fn, *args: mc.launch(fn, ranks=1, args=args, runtime="processes", timeout=100)


def test_streams_over_gloo() -> None:
    assert mc.launch(streams_on_the_cpu, ranks=1, runtime="processes", backend="gloo", timeout=100) == ["cpu"]


@on_gpu
def test_streams_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    assert nccl(uses.own_streams) == ["cuda"]


@on_gpu
def test_leaves_without_a_gradient_cost_one_wait(nccl: Callable[..., list[Any]]) -> None:
    """On the CPU: test_device_costs.py."""
    none, two, six = nccl(uses.few_waits)[0]
    assert (none, two, six) == (0, 1, 1)


@on_gpu
def test_a_bucket_is_copied_once(nccl: Callable[..., list[Any]]) -> None:
    (found,) = nccl(peak)
    assert not found["failed"], found


def peak() -> Any:
    return gpu_parts.peak_of_a_tree(gpu_parts.Place(1, True))


@on_gpu
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_ordered_bit_for_bit(dtype: torch.dtype, op: str) -> None:
    """By look-up and by arithmetic, as in test_device_costs.py."""
    x = patterns(dtype).to(programs.device())
    clothes = dtypes.dress(op, dtype)
    assert clothes is not None
    expected, back = in_order(x, op)
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = clothes.on(x)
    assert torch.equal(bits, expected)
    assert torch.equal(clothes.off(bits).view(ints), back(expected).view(ints))


@on_gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_are_ordered_in_one_kernel(dtype: torch.dtype, op: str) -> None:
    if programs.device().type != "cuda":
        pytest.skip("needs CUDA")
    x, clothes = patterns(dtype).to(programs.device()), dtypes.dress(op, dtype)
    assert clothes is not None
    bits = clothes.on(x)
    clothes.off(bits)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        clothes.off(clothes.on(x))
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, kernels


@on_gpu
@pytest.mark.parametrize("before", [True, False], ids=["used before", "first used in the graph"])
def test_floats_are_ordered_in_a_graph(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled while a graph is captured: it takes more kernels then, and gives the same bits."""
    if programs.device().type != "cuda":
        pytest.skip("needs CUDA")
    x, clothes = patterns(torch.float32).to(programs.device()), dtypes.dress("max", torch.float32)
    assert clothes is not None
    expected, back = in_order(x, "max")
    clothes.off(clothes.on(x))
    if not before:
        monkeypatch.setattr(compiling, "_ran", set())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bits = clothes.on(x)
        floats = clothes.off(bits)
    graph.replay()
    assert torch.equal(bits, expected)
    assert torch.equal(floats.view(torch.int32), back(expected).view(torch.int32))
