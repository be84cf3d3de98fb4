"""Messages on NCCL, for the day there are GPUs; the same programs run here over gloo, so that they cannot rot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import message_programs as programs
import pytest
import torch
import torch.distributed as dist
from later import for_later

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.hooks.guard import messages as letters
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.recorder import recorded
from meshcomm.runtime.start import world
from meshcomm.runtime.transports import group_link, process_group
from meshcomm.runtime.transports.process_group import ProcessLink


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_over_gloo(program: Callable[[], None], pool4: mc.WorkerPool) -> None:
    pool4.run(program)


class Again:
    """A work that may be waited for again, as NCCL's."""

    def __init__(self, work: dist.Work) -> None:
        self.work: dist.Work | None = work

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def as_nccl_does(name: str, folder: str) -> None:
    """A program under guard, over gloo, by order alone: what is waited for later is begun by the program, and who receives
    stands still until it is there, as in ``item()``.
    """
    here = world.current()
    assert here is not None
    rank = here.rank
    world.shutdown()
    os.environ["MESHCOMM_SHARED_MEMORY"] = "0"
    with pytest.MonkeyPatch.context() as patch:
        for place in (group_link, process_group):
            patch.setattr(place, "KNOW_NO_TAGS", {"gloo"}, raising=place is group_link)
        patch.setattr(ProcessLink, "exchange", recorded(ProcessLink._by_batch, "exchange"))
        ready = letters._Passage._make_ready

        def late(self: letters._Passage) -> None:
            """Threads that receive are later to queue it than those that send."""
            time.sleep(0 if self.batch.sides[0].sends else 0.3)
            ready(self)

        patch.setattr(letters._Passage, "_make_ready", late)
        begin = _torch.begin_messages
        patch.setattr(_torch, "begin_messages", lambda todo: [Again(work) for work in begin(todo)])
        mc.init(init_method=f"file://{folder}/{name}", rank=rank, world_size=2, timeout=20, guard=True)
        getattr(programs, name)()


@pytest.mark.parametrize("name", ["received_before_the_next_call", "received_before_a_later_one", "both_ways_later"])
def test_a_program_that_waits_under_guard_begins_what_is_queued(name: str, tmp_path: Path) -> None:
    mc.launch(as_nccl_does, ranks=2, args=(name, str(tmp_path)), runtime="processes", timeout=100)


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


def in_graphs_of_an_adopted_group(folder: str) -> None:
    """Two meshes between the same ranks, one with a time-out of its own, of a group that something else has made."""
    here = world.current()
    assert here is not None
    world.shutdown()
    torch.cuda.set_device(here.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/adopted", rank=here.rank, world_size=here.size
    )
    mesh, other = mc.make_mesh({"a": here.size}), mc.make_mesh({"a": here.size}, timeout=40)
    x = torch.ones(1 << 10, device=mesh.device)
    for each in (mesh, other):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = each.axis("a").link.all_reduce(x, "sum")
        graph.replay()
        torch.cuda.synchronize()
        assert y[0].item() == here.size
    third = mc.make_mesh({"a": 1, "b": here.size})
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(mc.MeshError, match="while a CUDA graph is captured"):
        mc.all_reduce(x, ("a", "b"), mesh=third)


@pytest.mark.gpu
def test_adopted_groups_and_second_axes_first_in_cuda_graphs(tmp_path: Path) -> None:
    needs_nccl(2)
    mc.launch(in_graphs_of_an_adopted_group, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=60)
