"""After an error that was caught: what was given up meets nobody's next call, and a barrier with a time-out sets all right."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import meshcomm as mc

F32 = torch.float32


def mesh_of(n: int) -> mc.Mesh:
    return mc.make_mesh({"a": n})


def a_call_that_was_given_up() -> tuple[bool, float]:
    """Both are told of a deadlock; rank 0 makes its next call before rank 1 has heard of it."""
    mesh = mesh_of(2)
    with mc.use_mesh(mesh):
        stuck = partial(mc.all_reduce, torch.tensor([100.0]), "a")
        if mesh.rank == 0:
            stuck = partial(mc.recv, "a", 1, shape=(1,), dtype=F32)
        with pytest.raises(mc.CommError, match="deadlock"):
            stuck()
        try:
            mc.all_reduce(torch.tensor([1.0]), "a")
            told = False
        except mc.CommError:
            told = True
        mc.barrier("a", timeout=5)
        return told, mc.all_reduce(torch.tensor([1.0]), "a").item()


def test_a_call_that_was_given_up_meets_no_fresh_one() -> None:
    results = mc.launch(a_call_that_was_given_up, ranks=2)
    assert results[0] == (True, 2.0)
    assert results[1][1] == 2.0


def a_message_under_way() -> float | None:
    """What rank 1 was waiting for in vain has nothing to do with the message that it has sent."""
    mesh = mesh_of(2)
    with mc.use_mesh(mesh):
        work = mc.send(torch.tensor([7.0]), "a", 0, tag=1, async_op=True) if mesh.rank == 1 else None
        with pytest.raises(mc.CommError, match="deadlock"):
            mc.recv("a", 1 - mesh.rank, shape=(1,), dtype=F32, tag=9)
        if work is not None:
            return work.wait()
        return mc.recv("a", 1, shape=(1,), dtype=F32, tag=1).item()


def test_a_message_under_way_outlives_another_wait_of_its_sender() -> None:
    assert mc.launch(a_message_under_way, ranks=2) == [7.0, None]


def out_of_step(n: int, limit: float) -> float:
    """Each rank makes another number of calls that come to nothing."""
    mesh = mesh_of(n)
    with mc.use_mesh(mesh):
        try:
            for _ in range(mesh.rank):
                mc.all_reduce(torch.ones(3 + mesh.rank), "a")
        except mc.CommError:
            pass
        for _ in range(1 if limit >= 1 else 5000):
            try:
                mc.barrier("a", timeout=limit)
                break
            except mc.CommError:
                if limit >= 1:
                    raise
        x = torch.tensor([1.0 + mesh.rank], requires_grad=True)
        mc.all_reduce(x, "a").sum().backward()
        assert x.grad is not None
        return x.grad.item() * mc.all_reduce(x.detach(), "a").item()


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("limit", [5, 0.2])
def test_a_barrier_with_a_time_out_sets_ranks_right_that_are_out_of_step(n: int, limit: float) -> None:
    """One that is short may run out before the others are told; repeated it comes to an end all the same."""
    assert mc.launch(out_of_step, ranks=n, args=(n, limit)) == [n * (n + 1) / 2] * n


def a_work_before_the_barrier() -> str:
    mesh = mesh_of(2)
    with mc.use_mesh(mesh):
        work = mc.all_reduce(torch.ones(1), "a", async_op=True) if mesh.rank == 0 else None
        mc.barrier("a", timeout=5)
        assert mc.all_reduce(torch.tensor([2.0]), "a").item() == 4.0
        if work is None:
            return ""
        with pytest.raises(mc.CommError) as caught:
            work.wait()
        return str(caught.value)


def test_a_work_that_others_never_began_ends_at_the_barrier() -> None:
    told, _ = mc.launch(a_work_before_the_barrier, ranks=2)
    assert told.startswith("meshcomm: not all ranks made a call before they met in a barrier with a time-out")
    assert "rank 0 called all_reduce f32[1] (op='sum') over 'a' at test_going_on.py:" in told


def one_waits_in_a_barrier() -> str:
    mesh = mesh_of(3)
    with mc.use_mesh(mesh):
        told = ""
        try:
            if mesh.rank != 1:
                mc.all_gather(torch.ones(2), "a")
        except mc.CommError as error:
            told = str(error)
        mc.barrier("a", timeout=60)
        return told


def test_who_waits_for_a_rank_in_a_barrier_is_told_and_may_come_there() -> None:
    first, none, third = mc.launch(one_waits_in_a_barrier, ranks=3)
    assert none == ""
    for told in (first, third):
        assert "rank 1 called barrier (timeout=60.0) over 'a'" in told
        assert "called all_gather f32[2] (dim=0) over 'a'" in told


def gone_home() -> str:
    mesh = mesh_of(2)
    if mesh.rank == 1:
        return ""
    with pytest.raises(mc.CommError) as caught:
        mc.barrier("a", timeout=60, mesh=mesh)
    return str(caught.value)


def test_a_barrier_that_nobody_else_will_come_to_runs_out_at_once() -> None:
    assert "absent: index 1 (rank 1)" in mc.launch(gone_home, ranks=2)[0]
