"""Programs of messages between ranks, the same over gloo, on shared memory and on NCCL."""

from __future__ import annotations

import torch
from torch.testing import assert_close

import meshcomm as mc

LARGE = 1 << 22
"""Elements: far more than any backend takes before somebody receives."""


def both_ways_later(length: int = LARGE) -> None:
    """Each rank begins to send before it begins to receive, and waits for the first first."""
    mesh = mc.make_mesh({"a": size()})
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    x = torch.full((length,), float(mesh.rank), device=mesh.device)
    sent = mc.send(x, "a", dst=right, mesh=mesh, async_op=True)
    got = mc.recv("a", src=left, shape=(length,), dtype=x.dtype, mesh=mesh, async_op=True)
    x.fill_(-1.0)  # it was read
    sent.wait()
    assert_close(got.wait(), torch.full((length,), float(left), device=mesh.device))


def received_before_the_next_call() -> None:
    """Who has begun to send comes to a collective before it waits; who receives comes to it afterwards."""
    mesh = mc.make_mesh({"a": size()})
    x = torch.full((LARGE,), 3.0, device=mesh.device)
    if mesh.rank == 0:
        work = mc.send(x, "a", dst=1, mesh=mesh, async_op=True)
    if mesh.rank == 1:
        assert mc.recv("a", src=0, shape=(LARGE,), dtype=x.dtype, mesh=mesh)[-1].item() == 3.0
    mc.barrier("a", mesh=mesh)
    if mesh.rank == 0:
        work.wait()


def received_before_a_later_one() -> None:
    """The same, where what it waits for first is a receipt that was begun later, and a meeting with a time-out."""
    mesh = mc.make_mesh({"a": size()})
    x = torch.full((LARGE,), 3.0, device=mesh.device)
    if mesh.rank == 0:
        work = mc.send(x, "a", dst=1, mesh=mesh, async_op=True)
        assert mc.recv("a", src=1, shape=(1,), dtype=x.dtype, mesh=mesh, async_op=True).wait().item() == 4.0
    if mesh.rank == 1:
        y = mc.recv("a", src=0, shape=(LARGE,), dtype=x.dtype, mesh=mesh)[-1].item() + 1
        mc.send(torch.full((1,), y, device=mesh.device), "a", dst=0, mesh=mesh)
    if mesh.rank == 0:
        work.wait()
        work = mc.send(x, "a", dst=1, mesh=mesh, async_op=True)
    if mesh.rank == 1:
        assert mc.recv("a", src=0, shape=(LARGE,), dtype=x.dtype, mesh=mesh)[-1].item() == 3.0
    mc.barrier("a", mesh=mesh, timeout=60)
    if mesh.rank == 0:
        work.wait()


def tags_of_one_exchange() -> None:
    """What is asked for in another order than it is given."""
    mesh = mc.make_mesh({"a": size()})
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    sends = [(torch.tensor([float(tag)], device=mesh.device), right, tag) for tag in (5, 0, 9)]
    wants = [(left, (1,), torch.float32, tag) for tag in (9, 5, 0)]
    assert [y.item() for y in mc.exchange(sends, wants, "a", mesh=mesh)] == [9.0, 5.0, 0.0]
    got = mc.exchange(sends, wants, "a", mesh=mesh, async_op=True).wait()
    assert [y.item() for y in got] == [9.0, 5.0, 0.0]


def tags_with_one_and_none_with_another() -> None:
    """Who receives without a tag does not know that the sender has one for somebody else."""
    mesh = mc.make_mesh({"a": size()})
    if mesh.size < 3:
        return
    x = torch.ones(2, device=mesh.device)
    if mesh.rank == 0:
        mc.exchange([(x, 1, 5), (2 * x, 2)], [], "a", mesh=mesh)
    elif mesh.rank == 1:
        [y] = mc.exchange([], [(0, (2,), x.dtype, 5)], "a", mesh=mesh)
        assert y.tolist() == [1.0, 1.0]
    elif mesh.rank == 2:
        assert mc.recv("a", src=0, shape=(2,), dtype=x.dtype, mesh=mesh).tolist() == [2.0, 2.0]
    mc.barrier("a", mesh=mesh)


def from_the_cpu() -> None:
    """A tensor of the CPU arrives on the mesh's device."""
    mesh = mc.make_mesh({"a": size()})
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    x = torch.tensor([1.0 + mesh.rank])
    [y] = mc.exchange([(x, right)], [(left, (1,), torch.float32)], "a", mesh=mesh)
    assert (y.device, y.item()) == (mesh.device, 1.0 + left)
    works = [
        mc.send(x, "a", dst=right, mesh=mesh, async_op=True),
        mc.recv("a", src=left, shape=(1,), dtype=x.dtype, mesh=mesh, async_op=True),
    ]
    assert works[1].wait().item() == 1.0 + left
    works[0].wait()


def first_between_two() -> None:
    """The first that happens on an axis is a message between two of its ranks, and the others come much later."""
    mesh = mc.make_mesh({"a": size()})
    if mesh.rank == 0:
        mc.send(torch.ones(3, device=mesh.device), "a", dst=1, mesh=mesh)
    if mesh.rank == 1:
        assert mc.recv("a", src=0, shape=(3,), dtype=torch.float32, mesh=mesh).sum().item() == 3.0
    mc.barrier("a", mesh=mesh)


def size() -> int:
    return torch.distributed.get_world_size()


PROGRAMS = (
    both_ways_later,
    received_before_the_next_call,
    received_before_a_later_one,
    tags_of_one_exchange,
    tags_with_one_and_none_with_another,
    from_the_cpu,
    first_between_two,
)


def all_of_them() -> None:
    """One after the other, in new meshes."""
    mc.init()
    first_between_two()
    for program in PROGRAMS:
        program()
