"""The mesh: sizes, coordinates, tuples of axes, subsets, and torch's DeviceMesh on both sides."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshcomm as mc
from meshcomm.axis import AxisName

Run = Callable[..., list[Any]]


def coordinates() -> tuple[Any, ...]:
    mesh = mc.make_mesh({"a": 2, "b": -1})
    return mesh.axis_names, mesh.shape, mesh.size, mesh.rank, mesh.coordinate


def test_the_first_axis_is_major_and_minus_one_is_filled_in(run4: Run) -> None:
    for rank, (names, shape, size, mine, coordinate) in enumerate(run4(coordinates)):
        assert (names, shape, size, mine) == (("a", "b"), {"a": 2, "b": 2}, 4, rank)
        assert coordinate == {"a": rank // 2, "b": rank % 2}


def order(axis: AxisName) -> tuple[list[int], int, int]:
    mesh = mc.make_mesh({"a": 2, "b": 1, "c": 2})
    with mc.use_mesh(mesh):
        gathered = mc.all_gather(torch.tensor([mesh.rank]), axis).tolist()
        return gathered, int(mc.axis_index(axis)), mc.axis_size(axis)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("a", [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ("b", [[0], [1], [2], [3]]),
        (("a",), [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (("a", "c"), [[0, 1, 2, 3]] * 4),
        (("c", "a"), [[0, 2, 1, 3]] * 4),
        (("c", "b", "a"), [[0, 2, 1, 3]] * 4),
        (("b", "c"), [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_a_tuple_is_ordered_as_it_is_written(run4: Run, axis: AxisName, expected: list[list[int]]) -> None:
    for rank, (gathered, index, size) in enumerate(run4(order, axis)):
        assert gathered == expected[rank]
        assert gathered[index] == rank
        assert size == len(gathered)


def subset(ranks: list[int]) -> tuple[Any, str]:
    everyone = mc.make_mesh({"w": 4})
    mesh = mc.make_mesh({"x": len(ranks)}, ranks=ranks)
    try:
        got: Any = mc.all_gather(torch.tensor([everyone.rank]), "x", mesh=mesh).tolist()
        error = ""
    except mc.MeshError as raised:
        got, error = None, str(raised)
    mc.barrier("w", mesh=everyone)
    return got, error


@pytest.mark.parametrize("ranks", [[0, 1], [3, 0], [2], [3, 1, 0]])
def test_a_mesh_on_a_part_of_the_world_refuses_the_others_at_once(run4: Run, ranks: list[int]) -> None:
    for rank, (got, error) in enumerate(run4(subset, ranks)):
        if rank in ranks:
            assert got == ranks
        else:
            assert f"rank {rank} is not in the mesh" in error


def only_some_use_a_tuple() -> list[int]:
    """A tuple's group is made when first used, by its members alone; then everybody makes another one."""
    mesh = mc.make_mesh({"a": 2, "b": 1, "c": 2})
    with mc.use_mesh(mesh):
        if mesh.coordinate["a"] == 0:
            mc.all_reduce(torch.ones(1), ("c", "b"))
        return mc.all_gather(torch.tensor([mesh.rank]), ("c", "b", "a")).tolist()


def test_groups_made_by_some_ranks_do_not_upset_those_made_later(run4: Run) -> None:
    assert run4(only_some_use_a_tuple) == [[0, 2, 1, 3]] * 4


def current() -> list[bool]:
    outer, inner = mc.make_mesh({"x": 4}), mc.make_mesh({"y": 2, "z": 2})
    seen = [mc.current_mesh() is None]
    with mc.use_mesh(outer) as entered:
        seen.append(entered is outer and mc.current_mesh() is outer)
        with mc.use_mesh(inner):
            seen.append(mc.axis_size("z") == 2)
        seen.append(mc.current_mesh() is outer)
    return [*seen, mc.current_mesh() is None]


def test_the_current_mesh_is_the_innermost(run4: Run) -> None:
    assert run4(current) == [[True] * 5] * 4


def test_ranks_inherit_the_callers_current_mesh() -> None:
    with mc.use_mesh(mc.make_mesh({"x": 3})):
        assert mc.launch(lambda: mc.all_reduce(torch.ones(()), "x").item(), ranks=3) == [3.0] * 3


def test_a_mesh_made_outside_serves_several_launches_at_a_time_one() -> None:
    mesh = mc.make_mesh({"x": 2})
    for _ in range(2):
        assert mc.launch(lambda: mc.all_reduce(torch.ones(()), "x", mesh=mesh).item(), ranks=2) == [2.0] * 2
    with pytest.raises(mc.MeshError, match="a mesh made for 2 ranks is used among 3"):
        mc.launch(lambda: mesh.rank, ranks=3)


def test_a_mesh_of_one_works_in_a_plain_process() -> None:
    mesh = mc.make_mesh({"dp": -1, "tp": 1})
    x = torch.randn(4, 3, requires_grad=True)
    with mc.use_mesh(mesh):
        y = mc.reduce_scatter(mc.all_gather(mc.pvary(x, "dp"), ("tp", "dp")), "tp")
        y = mc.all_to_all(mc.shift(y, "dp"), "tp", 0, 1)
        mc.all_reduce(y.square().sum(), ("dp", "tp")).backward()
        assert torch.equal(mc.shift(y, "dp", wrap=False), torch.zeros_like(y))
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_what_a_plain_process_gets() -> None:
    mesh = mc.make_mesh({"dp": -1, "tp": 2})
    assert mesh.shape == {"dp": 1, "tp": 2}
    assert repr(mesh) == "Mesh({'dp': 1, 'tp': 2})"
    with pytest.raises(mc.MeshError, match=r"called outside a rank.*\n.*\n.*mc.launch\(fn, ranks=2\)"):
        mc.all_reduce(torch.ones(1), "tp", mesh=mesh)
    with pytest.raises(mc.MeshError, match="no torch process groups"):
        _ = mesh.device_mesh


def test_a_mesh_is_not_copied_and_not_pickled() -> None:
    mesh = mc.make_mesh({"dp": 2})
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
    with pytest.raises(mc.MeshError, match="cannot be pickled"):
        pickle.dumps(mesh)


# ------------------------------------------------------------------------------------------------ torch's DeviceMesh


def as_device_mesh() -> tuple[Any, ...]:
    mesh = mc.make_mesh({"dp": 2, "one": 1, "tp": 2})
    theirs = mesh.device_mesh
    whole = torch.arange(8.0).view(4, 2)
    cut = distribute_tensor(whole, theirs, [Shard(0), Replicate(), Shard(1)])
    ours = mc.shard(mc.shard(whole, "dp", mesh=mesh), "tp", dim=1, mesh=mesh)
    back = DTensor.from_local(ours, theirs, [Shard(0), Replicate(), Shard(1)]).full_tensor()
    ranks = [dist.get_process_group_ranks(theirs.get_group(name)) for name in mesh.axis_names]
    same = torch.equal(cut.to_local(), ours)
    return same, torch.equal(back, whole), theirs.mesh_dim_names, ranks, theirs is mesh.device_mesh


def test_device_mesh_speaks_to_dtensor(pool4: Any) -> None:
    for rank, (same, back, names, ranks, kept) in enumerate(pool4.run(as_device_mesh)):
        assert same
        assert back
        assert kept
        assert names == ("dp", "one", "tp")
        assert ranks == [[rank % 2, rank % 2 + 2], [rank], [rank // 2 * 2, rank // 2 * 2 + 1]]


def from_device_mesh(grid: list[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    mesh = mc.Mesh.from_device_mesh(DeviceMesh("cpu", grid, mesh_dim_names=names))
    try:
        gathered = mc.all_gather(torch.tensor([dist.get_rank()]), names, mesh=mesh).tolist()
    except mc.MeshError as error:
        return (str(error),)
    return gathered, mesh.coordinate, mesh.device_mesh.mesh.tolist(), mesh.device.type


@pytest.mark.parametrize("grid", [[[0, 1], [2, 3]], [[3, 1], [2, 0]]], ids=["in order", "out of order"])
def test_from_device_mesh_keeps_the_order_of_the_grid(pool4: Any, grid: list[list[int]]) -> None:
    flat = [rank for row in grid for rank in row]
    for rank, (gathered, coordinate, theirs, device) in enumerate(pool4.run(from_device_mesh, grid, ("a", "b"))):
        assert gathered == flat
        assert coordinate == {"a": flat.index(rank) // 2, "b": flat.index(rank) % 2}
        assert theirs == grid
        assert device == "cpu"


def test_from_device_mesh_on_a_part_of_the_world(pool4: Any) -> None:
    inside, *_, outside = pool4.run(from_device_mesh, [0, 1], ("a",))
    assert inside[0] == [0, 1]
    assert "rank 3 is not in the mesh" in outside[0]


def nameless() -> str:
    try:
        mc.Mesh.from_device_mesh(DeviceMesh("cpu", [0, 1, 2, 3]))
    except mc.MeshError as error:
        return str(error)
    return ""


def test_a_device_mesh_without_names_is_refused(pool4: Any) -> None:
    assert all("has no names" in text for text in pool4.run(nameless))


def test_something_else_than_a_device_mesh_is_refused() -> None:
    with pytest.raises(mc.MeshError, match="expected a torch DeviceMesh, got dict"):
        mc.Mesh.from_device_mesh({"dp": 2})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({}, "a mesh needs a mapping"),
        ([("dp", 2)], "a mesh needs a mapping"),
        ({"d p": 2}, "'d p' is not an identifier"),
        ({3: 2}, "axis name 3 is not an identifier"),
        ({"dp": 0}, "axis 'dp' has size 0"),
        ({"dp": -2}, "axis 'dp' has size -2"),
        ({"dp": 2.0}, "axis 'dp' has size 2.0"),
        ({"dp": True}, "axis 'dp' has size True"),
        ({"dp": -1, "tp": -1}, "more than one size is -1"),
    ],
)
def test_bad_sizes_are_refused_everywhere(axes: Any, text: str) -> None:
    with pytest.raises(mc.MeshError, match=text):
        mc.make_mesh(axes)

    def main() -> str:
        with pytest.raises(mc.MeshError, match=text):
            mc.make_mesh(axes)
        return "refused"

    assert mc.launch(main, ranks=2) == ["refused"] * 2


def wrong_size(axes: dict[str, int], ranks: list[int] | None = None) -> str:
    try:
        mc.make_mesh(axes, ranks=ranks)
    except mc.MeshError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("axes", "ranks", "text"),
    [
        ({"dp": 3}, None, "the mesh needs 3 ranks"),
        ({"dp": 8}, None, "the mesh needs 8 ranks"),
        ({"dp": -1, "tp": 3}, None, "a multiple of 3 ranks"),
        ({"dp": 2}, [0, 1, 2], "the mesh needs 2 ranks, ranks= names 3"),
        ({"dp": 2}, [0, 0], "ranks must be different"),
        ({"dp": 2}, [0, 4], "ranks must be different"),
        ({"dp": 2}, [0, -1], "ranks must be different"),
        ({"dp": -1}, [], "ranks must be different"),
        ({"dp": 2}, [False, True], "ranks must be different"),
        ({"dp": 1}, 5, "ranks is a list of ints, not 5"),
    ],
)
def test_sizes_must_agree_with_the_ranks(run4: Run, axes: dict[str, int], ranks: list[int] | None, text: str) -> None:
    assert all(text in said for said in run4(wrong_size, axes, ranks))


def bytes_of_a_mesh() -> float:
    """What each of some meshes keeps whose axes have been used once, as far as Python knows."""
    kept: list[mc.Mesh] = []

    def make(count: int) -> None:
        for _ in range(count):
            mesh = mc.make_mesh({"dp": 2, "tp": 2})
            for axis in ("dp", "tp"):
                mc.all_reduce(torch.ones(16), axis, mesh=mesh)
            kept.append(mesh)

    make(3)
    gc.collect()
    tracemalloc.start()
    try:
        make(20)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / 20
    finally:
        tracemalloc.stop()


def test_a_mesh_keeps_little(pool4: Any) -> None:
    """Records of calls, mailboxes and what calls them; not what no call has asked for yet."""
    most = 18_500 if sys.version_info >= (3, 11) else 20_500  # there each object has a dict
    assert max(pool4.run(bytes_of_a_mesh)) < most
