"""Messages on NCCL, for the day there are GPUs; the same programs run here over gloo, so that they cannot rot."""

from __future__ import annotations

from collections.abc import Callable

import message_programs as programs
import pytest
import torch
import torch.distributed as dist
from later import for_later

import meshcomm as mc
from meshcomm.runtime.pending import Pending


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_over_gloo(program: Callable[[], None], pool4: mc.WorkerPool) -> None:
    pool4.run(program)


def needs_nccl(ranks: int) -> None:
    if not (dist.is_nccl_available() and torch.cuda.device_count() >= ranks):
        pytest.skip(f"needs NCCL and {ranks} GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("guard", [False, True])
def test_over_nccl(guard: bool) -> None:
    """All programs in turn, of which the first is the first that happens."""
    needs_nccl(2)
    ranks = min(4, torch.cuda.device_count())
    mc.launch(programs.all_of_them, ranks=ranks, runtime="processes", guard=guard, timeout=120)


def tag_refused() -> None:
    mc.init()
    mesh = mc.make_mesh({"a": dist.get_world_size()})
    with pytest.raises(mc.MeshError, match="tag=3, but what moves tensors on cuda"):
        mc.send(torch.ones(1, device=mesh.device), "a", dst=1 - mesh.rank, tag=3, mesh=mesh)
    wrong = 4 + mesh.rank
    other = 1 - mesh.rank
    with pytest.raises(mc.CommError, match="have not given the messages between them the same tags"):
        mc.exchange([(torch.ones(1), other, wrong)], [(other, (1,), torch.float32, wrong)], "a", mesh=mesh)


@pytest.mark.gpu
def test_tags_on_nccl() -> None:
    needs_nccl(2)
    mc.launch(tag_refused, ranks=2, runtime="processes", timeout=60)


def on_the_callers_stream() -> None:
    """What is waited for at once gives no work, and what is captured first in a graph is there already."""
    mc.init()
    mesh = mc.make_mesh({"a": dist.get_world_size()})
    link, x = mesh.axis("a").link, torch.ones(1 << 10, device=mesh.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = link.all_reduce(x, "sum")
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == mesh.size
    with for_later():
        work = link.all_reduce(x, "sum")
    assert isinstance(work, Pending)
    assert work.wait(None)[0].item() == mesh.size


@pytest.mark.gpu
def test_first_in_a_cuda_graph() -> None:
    needs_nccl(2)
    mc.launch(on_the_callers_stream, ranks=2, runtime="processes", timeout=60)
