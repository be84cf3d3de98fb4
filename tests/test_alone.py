"""A plain process, nothing initialised, a mesh of size 1: every function gives what it gives on an axis of size 1 of a real launch."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.objects.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from meshcomm.objects.results import collect_results
from meshcomm.runtime.start import world
from meshcomm.training.equal import assert_invariant
from meshcomm.training.main_only import main_only
from meshcomm.training.metrics import Metrics
from meshcomm.training.reductions import all_reduce_params, weighted_mean

X = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 1


def reduced_in_place() -> Tensor:
    x = X.clone()
    all_reduce_params([x], "one")
    return x


def metrics() -> dict[str, float]:
    held = Metrics({"loss": "mean", "most": "max"})
    held.add("loss", X.sum(), 6)
    held.add("most", 3)
    return held.reduce("one")


# Name to a call along the axis "one" of the current mesh.
CALLS: dict[str, Callable[[], Any]] = {
    "pvary": lambda: mc.pvary(X, "one"),
    "all_reduce": lambda: [
        mc.all_reduce({"x": X, "n": torch.tensor(3)}, "one"),
        mc.all_reduce(X, "one", "max"),
        mc.all_reduce(X, "one", "mean"),
    ],
    "all_gather": lambda: [
        mc.all_gather(X, "one", 1),
        mc.all_gather(torch.tensor(3), "one"),
        mc.all_gather(X, "one", sizes=[2]),
    ],
    "all_gather_invariant": lambda: mc.all_gather_invariant(X, "one", -1),
    "shard": lambda: [mc.shard(X, "one"), mc.shard(X, "one", 1, sizes=[3])],
    "reduce_scatter": lambda: [mc.reduce_scatter(X, "one", 1), mc.reduce_scatter(X, "one", 1, "product")],
    "all_to_all": lambda: [mc.all_to_all(X, "one", 0, 1), mc.all_to_all(X, "one", 0, 0, [2], [2])],
    "all_to_all_ragged": lambda: [
        mc.all_to_all_ragged(X, torch.tensor([2]), "one"),
        mc.all_to_all_ragged(X, torch.tensor([[2, 0]]), "one", most=3),
    ],
    "permute": lambda: [mc.permute(X, "one", [(0, 0)]), mc.permute(X, "one", [])],
    "tie": lambda: mc.tie(X, X),
    "scan": lambda: [mc.scan(X, "one"), mc.scan(X, "one", exclusive=True)],
    "shift": lambda: [mc.shift(X, "one", 3), mc.shift(X, "one", wrap=False)],
    "broadcast": lambda: mc.broadcast(X, "one"),
    "reduce": lambda: mc.reduce(X, "one"),
    "gather": lambda: mc.gather(X, "one", dim=1),
    "scatter": lambda: [mc.scatter(X, "one"), mc.scatter(X, "one", like=X)],
    "send": lambda: refused(lambda: mc.send(X, "one", 0)),
    "recv": lambda: refused(lambda: mc.recv("one", 0, shape=(2,), dtype=torch.float32)),
    "exchange": lambda: [mc.exchange([(X, 0)], [(0, (2, 3), torch.float64)], "one"), mc.exchange([], [], "one")],
    "barrier": lambda: [mc.barrier("one"), mc.barrier("one", timeout=1)],
    "axis_index": lambda: mc.axis_index("one"),
    "argmax": lambda: mc.argmax(X, "one"),
    "argmin": lambda: mc.argmin(X, "one"),
    "send_object": lambda: refused(lambda: mc.send_object(X, "one", 0)),
    "recv_object": lambda: refused(lambda: mc.recv_object("one", 0)),
    "axis_size": lambda: mc.axis_size("one"),
    "wait": lambda: mc.wait(
        [mc.all_reduce(X, "one", async_op=True), mc.gather(X, "one", async_op=True).then(lambda y: y.sum())]
    ),
    "reshard": lambda: mc.reshard(X, "(one a) b -> a (one b)"),
    "einsum": lambda: mc.einsum("(one a) b, b c -> (one a) c", X, X.t()),
    "shard_map": lambda: mc.shard_map(torch.sin, in_specs="(one a) b", out_specs="(one a) b", check_vma=False)(X),
    "plan": lambda: str(mc.plan("(one a) b -> a (one b)", (2, 3))),
    "show": lambda: str(mc.show("(one a) b", (2, 3))).splitlines()[0],  # under it are ranks of the world
    "local_shape": lambda: mc.local_shape("(one a) b", (2, 3)),
    "global_shape": lambda: mc.global_shape("(one a) b", (2, 3)),
    "broadcast_object": lambda: broadcast_object({"x": X}, "one"),
    "all_gather_object": lambda: all_gather_object({"x": X}, "one"),
    "gather_object": lambda: gather_object("a", "one"),
    "scatter_object": lambda: scatter_object(["a"], "one"),
    "collect_results": lambda: collect_results([1, 2, 3], 2, "one"),
    "weighted_mean": lambda: weighted_mean({"x": X}, 2, "one"),
    "all_reduce_params": reduced_in_place,
    "Metrics": metrics,
    "MeshBatchSampler.follow": lambda: list((s := mc.MeshBatchSampler(3, 2, "one", shuffle=False)).follow(s)),
    "assert_invariant": lambda: assert_invariant({"x": X}, "one"),
    "main_only": lambda: main_only(axis="one", broadcast=True)(lambda: 3)(),
    "sync_seed": lambda: type(importlib.import_module("meshcomm.collectives.agree").sync_seed("one")),
}
DIFFERENTIABLE = (
    "pvary",
    "all_gather",
    "all_gather_invariant",
    "shard",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "shift",
    "broadcast",
    "reshard",
    "einsum",
    "weighted_mean",
)


def refused(call: Callable[[], Any]) -> str:
    """No message to oneself, on axes of size 1 as on others."""
    with pytest.raises(mc.MeshError) as caught:
        call()
    return str(caught.value).split("\n")[0]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")):
            monkeypatch.delenv(name)
    world.shutdown()
    yield
    assert world.current() is None, "no process group was made"


def on_an_axis_of_one(call: Callable[[], Any]) -> list[Any]:
    def main() -> Any:
        with mc.use_mesh(mc.make_mesh({"others": 2, "one": 1})):
            return call()

    return mc.launch(main, ranks=2)


def same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, Tensor):
        assert (mine.dtype, mine.shape, mine.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            same(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)
    else:
        assert mine == theirs


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_on_an_axis_of_one(name: str) -> None:
    with mc.use_mesh(mc.make_mesh({"one": 1})):
        mine = CALLS[name]()
    for theirs in on_an_axis_of_one(CALLS[name]):
        same(mine, theirs)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_new_storage(name: str) -> None:
    if name in ("pvary", "shard_map"):
        return
    with mc.use_mesh(mc.make_mesh({"one": 1})):
        found = CALLS[name]()
    for part in torch.utils._pytree.tree_leaves(found):
        if isinstance(part, Tensor):
            assert part.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an axis of size 1 of a launch; of second order too."""

    def gradients() -> list[Tensor]:
        x = X.clone().requires_grad_()
        globals()["X"] = x
        try:
            found = CALLS[name]()
        finally:
            globals()["X"] = x.detach()
        leaves = [y for y in torch.utils._pytree.tree_leaves(found) if isinstance(y, Tensor) and y.is_floating_point()]
        (dx,) = torch.autograd.grad(sum((y * y).sum() * (i + 1) for i, y in enumerate(leaves)), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        return [dx.detach(), ddx]

    with mc.use_mesh(mc.make_mesh({"one": 1})):
        mine = gradients()
    assert mine[0].abs().sum() > 0
    for theirs in on_an_axis_of_one(gradients):
        same(mine, theirs)


def test_every_function_is_called() -> None:
    """All that take an axis or a layout; what makes meshes and ranks is called by the tests themselves."""
    around = {"init", "shutdown", "launch", "make_mesh", "current_mesh", "check_vma", "mark_varying", "use_mesh"}
    around |= {"varying_axes", "assert_varying", "verify_training", "prove_no_hang"}
    dtensors = {"from_dtensor", "to_dtensor", "layout_from", "placements", "layout_of", "partition_spec"}  # below
    rank_free = {
        "split_rows",
        "rank",
        "world_size",
        "local_rank",
        "local_world_size",
        "node_rank",
        "backend",
        "device",
        "is_distributed",
        "is_dry",
        "is_main",
        "get_dist_info",
    }
    functions = {name for name in mc.__all__ if inspect.isfunction(getattr(mc, name))}
    seeds, proofs = {"fork_rng", "rng"}, {"verify"}
    assert functions - around - dtensors - rank_free - seeds - proofs - {
        "trace",
        "comm_budget",
        "dump_collectives",
        "dry_run",
        "hardware",
        "sweep",
    } <= set(CALLS)


def test_mesh_and_layout_questions() -> None:
    mesh = mc.make_mesh({"dp": -1, "tp": 1})
    assert (mesh.shape, mesh.rank, mesh.coordinate, mesh.size) == ({"dp": 1, "tp": 1}, 0, {"dp": 0, "tp": 0}, 1)
    assert mesh.device == torch.get_default_device()
    mc.init()
    with mc.use_mesh(mesh):
        assert mc.current_mesh() is mesh
        assert mc.all_gather(X, ("tp", "dp")).shape == (2, 3)
    assert mc.launch(lambda: mc.make_mesh({"dp": -1}).size, ranks=1) == [1]
    mc.shutdown()


def test_torch_s_own_mesh() -> None:
    """DeviceMesh and DTensor need a process group; a group of one is made for them, and goes with shutdown."""
    mesh = mc.make_mesh({"dp": 1})
    device_mesh = mesh.device_mesh
    assert device_mesh.mesh_dim_names == ("dp",)
    again = mc.Mesh.from_device_mesh(device_mesh)
    assert (again.shape, again.rank) == ({"dp": 1}, 0)
    assert torch.equal(mc.all_reduce(X, "dp", mesh=again), X)
    dt = mc.to_dtensor(X, "(dp a) b", mesh=mesh)
    assert torch.equal(dt.to_local(), X)
    part, layout = mc.from_dtensor(dt, "a b", mesh=mesh)
    assert torch.equal(part, X)
    assert layout == "(dp a) b"
    del dt, part, again, device_mesh
    world.shutdown()
