"""full_state_dict, load_full_state_dict and checkpoints of modules that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    Column,
    checkpoint,
    clip_grad_norm,
    data_parallel,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    tensor_parallel,
)


class Net(nn.Module):
    """A matrix of two, a weight with two names, a buffer."""

    def __init__(self, layers: Any = ("0", "1", "2", "3")) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 8) for name in layers})
        self.back = nn.ModuleDict({name: nn.Linear(8, 4) for name in layers})
        if "0" in self.layers:
            self.table = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros(()))


def whole(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def stage(names: tuple[str, ...]) -> Net:
    """A part of the whole."""
    made, state = Net(names), whole().state_dict()
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    return made


PLAN: dict[str, Any] = {"layers.*": Column(2), "back.*": "row", "table": "replicated", "head": "replicated"}


def plain(net: Net) -> None:
    pass


def sharded(net: Net) -> None:
    fully_shard(net, "fs", grads="sum", replica_axis="rep")


def parallel(net: Net) -> None:
    tensor_parallel(net, {name: how for name, how in PLAN.items() if "0" in net.layers or "." in name}, axis="fs")
    data_parallel(net, "rep", grads="sum")


def both(net: Net) -> None:
    tensor_parallel(net, {name: how for name, how in PLAN.items() if "0" in net.layers or "." in name}, axis="rep")
    fully_shard(net, "fs", grads="sum")


WAYS = [plain, sharded, parallel, both]
MESH = {"pp": 2, "rep": 2, "fs": 2}


def in_stages(way: Callable[[Net], None], mesh: mc.Mesh) -> Net:
    net = stage(("0", "1") if mesh.coordinate["pp"] == 0 else ("2", "3"))
    way(net)
    return net


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("way", WAYS)
def test_stages_and_back(way: Callable[[Net], None], tmp_path: Path) -> None:
    """All that the ranks have between them, and each takes what it has of it."""
    expected = whole().state_dict()
    torch.save(whole(1).state_dict(), tmp_path / "state.pt")

    def main() -> list[Any]:
        mesh = mc.make_mesh(MESH)
        with mc.use_mesh(mesh):
            net = in_stages(way, mesh)
            found = [full_state_dict(net), full_state_dict(net, 3)]
            load_full_state_dict(net, whole(2).state_dict())
            found.append(full_state_dict(net))
            load_full_state_dict(net, tmp_path / "state.pt")
            return [*found, full_state_dict(net)]

    for rank, (all_have, one_has, second, first) in enumerate(mc.launch(main, ranks=8)):
        assert_close(all_have, dict(expected), rtol=0, atol=0)
        assert list(all_have) == [
            name
            for names in ("01", "23")
            for name in Net(names).state_dict()
            if name not in ("steps",) or names == "01"
        ]
        assert (one_has is None) == (rank != 3)
        assert_close(second, dict(whole(2).state_dict()), rtol=0, atol=0)
        assert_close(first, dict(whole(1).state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("way", [plain, sharded])
def test_stages_that_are_declared(way: Callable[[Net], None], tmp_path: Path) -> None:
    """Stages that ``mark_varying`` declares have one norm, and their states are one state."""
    alone = whole()
    for p in alone.parameters():
        p.grad = torch.full_like(p, 2.0)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)

    def main() -> Any:
        mesh = mc.make_mesh(MESH)
        with mc.use_mesh(mesh):
            net = in_stages(way, mesh)
            mc.mark_varying(net, "pp")
            for p in net.parameters():
                p.grad = torch.full_like(p, 2.0)
            found = clip_grad_norm(net, 1.0)
            load_full_state_dict(net, whole(1).state_dict())
            saved = checkpoint.save(tmp_path, net)
            again = in_stages(way, mesh)
            load_full_state_dict(again, saved)
            return found, full_state_dict(again)

    for found, state in mc.launch(main, ranks=8):
        assert_close(found, norm)
        assert_close(state, dict(whole(1).state_dict()), rtol=0, atol=0)


def trained(net: nn.Module) -> torch.optim.Optimizer:
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    return adam


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("way", [plain, sharded])
def test_checkpoints_of_stages(way: Callable[[Net], None], tmp_path: Path) -> None:
    """Back into stages, into other ones, and into one rank."""

    def main(load: bool, cut: int) -> Any:
        mesh = mc.make_mesh(MESH)
        with mc.use_mesh(mesh):
            names = "0123"[:cut] if mesh.coordinate["pp"] == 0 else "0123"[cut:]
            net = stage(tuple(names))
            way(net)
            adam = trained(net)
            if not load:
                checkpoint.save(tmp_path, net, adam)
                return full_state_dict(net)
            with torch.no_grad():
                for p in net.parameters():
                    p.zero_()
            adam.param_groups[0]["lr"] = 0.0
            adam.state.clear()
            checkpoint.load(tmp_path, net, adam)
            state = [x for of in adam.state.values() for x in (of["exp_avg"], of["exp_avg_sq"])]
            assert all(x.abs().sum() > 0 for x in state if x.numel() > 8)
            assert adam.param_groups[0]["lr"] == 0.1
            return full_state_dict(net)

    saved = mc.launch(main, ranks=8, args=(False, 2))
    for cut in (2, 3):
        assert_close(mc.launch(main, ranks=8, args=(True, cut)), saved, rtol=0, atol=0)
    net = whole()
    adam = trained(net)
    checkpoint.load(tmp_path, net, adam)
    assert_close(dict(net.state_dict()), saved[0], rtol=0, atol=0)
    load_full_state_dict(net, tmp_path)


def test_other_names_in_the_checkpoint(tmp_path: Path) -> None:
    """What no rank has is an error still, and so is what a rank lacks."""

    def main(names: list[str], save: bool) -> None:
        mesh = mc.make_mesh({"pp": 2})
        with mc.use_mesh(mesh):
            net = nn.ModuleDict({name: nn.Linear(1, 1) for name in names[mesh.rank]})
            if save:
                checkpoint.save(tmp_path, net)
            else:
                checkpoint.load(tmp_path, net)

    mc.launch(main, ranks=2, args=(["ab", "c"], True))
    mc.launch(main, ranks=2, args=(["c", "ab"], False))
    with pytest.raises(
        mc.MeshError, match=r"does not fit the module; not in the module: 'model.b.weight', 'model.b.bias'"
    ):
        mc.launch(main, ranks=2, args=(["a", "c"], False))
    with pytest.raises(mc.MeshError, match=r"not in the checkpoint: 'd.weight'"):
        mc.launch(main, ranks=2, args=(["ab", "cd"], False))


def test_missing_and_unexpected_names() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"pp": 2})
        with mc.use_mesh(mesh):
            net = nn.ModuleDict({"ab"[mesh.rank]: nn.Linear(1, 1, bias=False)})
            good = {name: torch.ones(1, 1) for name in ("a.weight", "b.weight")}
            load_full_state_dict(net, good)
            with pytest.raises(RuntimeError, match="Unexpected key.*c.weight"):
                load_full_state_dict(net, {**good, "c.weight": torch.ones(1, 1)})
            load_full_state_dict(net, {**good, "c.weight": torch.ones(1, 1)}, strict=False)
            with pytest.raises(mc.MeshError, match="is no tensor but float"):
                load_full_state_dict(net, {**good, "b.weight": 1.0})  # is another rank's too
            with pytest.raises(mc.MeshError, match="no file or folder 'nowhere'"):
                load_full_state_dict(net, "nowhere")

    mc.launch(main, ranks=2)


@pytest.mark.parametrize("what", ["full_state_dict", "save"])
@pytest.mark.parametrize("way", [plain, sharded])
def test_equal_names_of_stages_that_differ(way: Callable[[Net], None], what: str, tmp_path: Path) -> None:
    def main() -> None:
        mesh = mc.make_mesh(MESH)
        with mc.use_mesh(mesh):
            net = whole(mesh.coordinate["pp"])
            way(net)
            if what == "save":
                checkpoint.save(tmp_path, net)
            else:
                full_state_dict(net)

    with pytest.raises(
        mc.MeshError, match=r"'layers.0.weight' has other values on rank 4 of the mesh than on rank 0[^!]*other names"
    ):
        mc.launch(main, ranks=8)
    assert list(tmp_path.iterdir()) == []


def test_on_processes(pool4: Any, tmp_path: Path) -> None:
    def same(found: Any) -> bool:
        return all(torch.equal(found[name], x) for name, x in whole().state_dict().items())

    assert all(same(found) for found in pool4.run(stages_on_processes, str(tmp_path)))


def stages_on_processes(folder: str) -> dict[str, Tensor] | None:
    mesh = mc.make_mesh({"pp": 2, "fs": 2})
    with mc.use_mesh(mesh):
        net = stage(("0", "1") if mesh.coordinate["pp"] == 0 else ("2", "3"))
        fully_shard(net, "fs", grads="sum")
        checkpoint.save(folder, net)
        load_full_state_dict(net, whole(1).state_dict())
        load_full_state_dict(net, folder)
        return full_state_dict(net)


def test_replicas_with_roundings_between_them() -> None:
    def main(apart: float) -> None:
        mesh = mc.make_mesh({"dp": 2})
        with mc.use_mesh(mesh):
            net = whole()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(1 + apart * mesh.rank)
            full_state_dict(net)

    mc.launch(main, ranks=2, args=(1e-6,))
    with pytest.raises(mc.MeshError, match="has other values on rank 1"):
        mc.launch(main, ranks=2, args=(0.1,))
