"""Modules on the meta device: cut first, loaded then; what has no values does not run, and is not saved."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    checkpoint,
    data_parallel,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    tensor_parallel,
)


class Norm(nn.Module):
    """Parameters and buffers, one of which is in no state_dict."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("frequencies", torch.arange(float(size)), persistent=False)
        self.register_buffer("kept", torch.arange(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.frequencies


class Net(nn.Module):
    """As models of transformers are: one weight with two names, and a method that initialises a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.norm = Norm(8)
        self.batch = nn.BatchNorm1d(8)
        self.table = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(self.batch(x)))

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, Norm):
            part.frequencies.copy_(torch.arange(float(len(part.frequencies))))
            nn.init.ones_(part.weight)


class Silent(Net):
    """Nothing makes its buffer again."""

    def _init_weights(self, part: nn.Module) -> None:
        pass


def on_meta(kind: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return kind()


def state() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return dict(Net().state_dict())


PLAN: dict[str, Any] = {"layers.*.0": "column", "layers.*.2": "row", "*": "replicated"}
WAYS: dict[str, Any] = {
    "nothing": lambda net: None,
    "dp": lambda net: data_parallel(net, "a", grads="sum"),
    "fsdp": lambda net: fully_shard(net, "a", grads="sum"),
    "hsdp": lambda net: fully_shard(net, "a", grads="sum", replica_axis="b"),
    "offload": lambda net: fully_shard(net, "a", grads="sum", offload=True),
    "whole": lambda net: fully_shard(net, "a", grads="sum", whole=True),
    "bfloat16": lambda net: fully_shard(net, "a", grads="sum", param_dtype=torch.bfloat16),
    "tp": lambda net: tensor_parallel(net, PLAN, axis="b"),
    "dp x tp": lambda net: data_parallel(tensor_parallel(net, PLAN, axis="b"), "a", grads="sum"),
    "fsdp x tp": lambda net: fully_shard(tensor_parallel(net, PLAN, axis="b"), "a", grads="sum"),
    "replica x fsdp x tp": lambda net: fully_shard(
        tensor_parallel(net, PLAN, axis="b"), "a", grads="sum", replica_axis="c"
    ),
}


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("way", WAYS)
def test_cut_then_loaded(way: str, tmp_path: Path) -> None:
    given = state()
    alone = Net()
    alone.load_state_dict(given)
    alone.eval()
    x = torch.arange(8).view(8)
    torch.save(given, tmp_path / "state.pt")

    def main() -> None:
        mesh = mc.make_mesh({"c": 2, "a": 2, "b": 2})
        with mc.use_mesh(mesh):
            net = on_meta()
            objects = list(map(id, net.parameters()))
            frozen = net.get_parameter("layers.0.0.bias").requires_grad_(False)
            WAYS[way](net)
            if way != "nothing":
                with pytest.raises(
                    mc.MeshError, match=r"12 of its parameters have no values yet.*\n.*\n.*load_full_state"
                ):
                    net(x)
                for move in (lambda: net.to("cpu"), lambda: net.to_empty(device="cpu")):
                    with pytest.raises(
                        mc.MeshError, match="on the meta device: there is nothing to move.*\n.*\n.*load"
                    ):
                        move()
            with pytest.raises(mc.MeshError, match="has no values yet"):
                full_state_dict(net)
            with pytest.raises(mc.MeshError, match="there are no values for 1 tensors[^!]*'norm.weight'"):
                load_full_state_dict(net, {k: v for k, v in given.items() if k != "norm.weight"}, strict=False)
            adam = torch.optim.SGD(net.parameters(), lr=1.0)
            twin = copy.deepcopy(net)
            if way != "nothing":
                with pytest.raises(mc.MeshError, match="have no values yet"):
                    twin(x)
            for each in (net, twin):
                load_full_state_dict(each, tmp_path / "state.pt")
                assert_close(full_state_dict(each), given, rtol=0, atol=0)
                assert_close(each.norm.frequencies, torch.arange(8.0))
                if way != "bfloat16":
                    assert_close(each.eval()(x), alone(x))
            assert list(map(id, net.parameters())) == objects
            assert not frozen.requires_grad
            assert not any(p.is_meta for p in net.parameters())
            if way != "bfloat16":  # torch has no batch norm of it with buffers of float32
                net(x).sum().backward()
                adam.step()

    mc.launch(main, ranks=8)


@pytest.mark.parametrize("way", ["dp", "fsdp", "tp"])
def test_buffers_that_nobody_makes(way: str) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        with mc.use_mesh(mesh):
            net = on_meta(Silent)
            WAYS[way](net)
            with pytest.raises(
                mc.MeshError, match=r"1 buffers are on the meta[^!]*'norm.frequencies'[^!]*part.frequencies = val"
            ):
                load_full_state_dict(net, state())
            assert net.norm.frequencies.is_meta
            net.norm.frequencies = torch.zeros(8)
            load_full_state_dict(net, state())
            assert_close(full_state_dict(net), state(), rtol=0, atol=0)

    mc.launch(main, ranks=4)


def test_part_by_part() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        net = fully_shard(on_meta(), "fs", grads="sum", mesh=mesh)
        given = state()
        for name, part in net.named_children():
            if name != "head":  # which has its values from the table
                with pytest.raises(mc.MeshError, match="no values yet"):
                    net(torch.arange(8))
            inner = {key.removeprefix(f"{name}."): x for key, x in given.items() if key.startswith(f"{name}.")}
            if name == "norm":
                part.frequencies = torch.arange(8.0)
            load_full_state_dict(part, inner)
        net.eval()(torch.arange(8))
        assert_close(full_state_dict(net), given, rtol=0, atol=0)

    mc.launch(main, ranks=2)


def test_slices_and_checkpoints_are_values(tmp_path: Path) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        full = Net()
        full.load_state_dict(state())
        net = fully_shard(full, "fs", grads="sum", mesh=mesh)
        folder = checkpoint.save(tmp_path, net)
        for path in (tmp_path, folder):
            again = fully_shard(on_meta(), "fs", grads="sum", mesh=mesh)
            load_full_state_dict(again, path)
            assert_close(full_state_dict(again), state(), rtol=0, atol=0)
            assert_close(again(torch.arange(8)), net(torch.arange(8)))
        other = fully_shard(on_meta(), "fs", grads="sum", mesh=mesh)
        other.norm.frequencies, other.norm.kept = torch.arange(8.0), torch.arange(8)
        for name, x in net.batch.named_buffers():
            setattr(other.batch, name, x.clone())
        other.load_state_dict(net.state_dict())
        assert_close(other(torch.arange(8)), net(torch.arange(8)))

    mc.launch(main, ranks=2)


def test_what_can_be_initialised_is() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fs": 2})
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4))
        fully_shard(net, "fs", grads="sum", mesh=mesh)
        net(torch.ones(1, 4))
        load_full_state_dict(net, {"0.weight": torch.ones(4, 4), "0.bias": torch.zeros(4)})
        assert net(torch.ones(1, 4)).tolist() == [[4.0] * 4]

    mc.launch(main, ranks=2)


class Peak(threading.Thread):
    """Bytes that this process had more, at its fullest, than at first: of its own, and pages of files that are mapped."""

    def __enter__(self) -> Peak:
        self.over, self.first = threading.Event(), self._now()
        self.own = self.mapped = 0
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(0.0005):
            own, mapped = self._now()
            self.own, self.mapped = max(self.own, own - self.first[0]), max(self.mapped, mapped - self.first[1])

    def _now(self) -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        known = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines) if "kB" in rest
        }
        return known["RssAnon"] + known["RssShmem"], known["RssFile"]


class Tower(nn.Module):
    """64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))
        self.scale = nn.Parameter(torch.ones(1))  # so that nothing is initialised


def load_a_tower(path: str, way: str) -> tuple[int, int]:
    mesh = mc.make_mesh({"a": 4})
    load_full_state_dict(nn.Linear(1, 1), nn.Linear(1, 1).state_dict())  # what is imported when it is first called
    with torch.device("meta"):
        tower = Tower()
    with Peak() as peak, mc.use_mesh(mesh):
        if way == "fsdp":
            fully_shard(tower, "a", grads="sum")
        else:
            tensor_parallel(tower, {"layers.*": way, "*": "replicated"}, axis="a")
        load_full_state_dict(tower, path)
    return peak.own, peak.mapped


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory in use from /proc")
@pytest.mark.parametrize("way", ["fsdp", "column", "row"])
@pytest.mark.parametrize("form", ["safetensors", "shards", "pt"])
def test_no_rank_holds_the_whole(pool4: Any, form: str, way: str, tmp_path: Path) -> None:
    """A model of 64 MiB on four ranks: a rank keeps 16 of them."""
    path = tmp_path / f"model.{form}"
    state = dict(Tower().state_dict())
    if form == "pt":
        torch.save(state, path)
    else:
        save = pytest.importorskip("safetensors.torch").save_file
        if form == "shards":
            (path := tmp_path).mkdir(exist_ok=True)
            parts = {f"part-{at}.safetensors": list(state)[at::4] for at in range(4)}
            for name, inner in parts.items():
                save({key: state[key] for key in inner}, path / name)
            table = {key: name for name, inner in parts.items() for key in inner}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        else:
            save(state, path)
    load = pool4.run(load_a_tower, str(path), way)
    print(form, way, [(round(own / 2**20, 1), round(mapped / 2**20, 1)) for own, mapped in load])
    for own, mapped in load:
        assert own < 2**24 + 2**23  # what it keeps, and one layer of 4 MiB with what goes with it
        assert mapped < (2**26 + 2**23 if form == "pt" else 2**25)  # of torch's files they stay until the end


PLAN_OF_TWO: dict[str, Any] = {"0": "column", "2": "row"}
ADAPTORS: dict[str, Callable[[nn.Module], object]] = {
    "data_parallel": lambda m: data_parallel(m, "a", grads="mean"),
    "fully_shard": lambda m: fully_shard(m, "a", grads="mean"),
    "tensor_parallel": lambda m: tensor_parallel(m, PLAN_OF_TWO, axis="a"),
}


def two_layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_what_is_made_in_inference_mode_trains_outside_of_it(adaptor: str, tmp_path: Path) -> None:
    """Adaptors, values that come later, and states of optimisers that a checkpoint has."""
    one = two_layers()
    states = torch.optim.AdamW(one.parameters(), lr=0.1)
    a_step(one, states)
    folder = str(tmp_path)
    checkpoint.save(folder, one, states)
    for _ in range(2):
        a_step(one, states)

    def main(meta: bool) -> dict[str, Tensor]:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            with torch.device("meta") if meta else contextlib.nullcontext():
                model = two_layers()
            with torch.inference_mode():
                ADAPTORS[adaptor](model)
                if meta:
                    load_full_state_dict(model, two_layers().state_dict())
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                checkpoint.load(folder, model, optimizer)
            for _ in range(2):
                a_step(model, optimizer)
            state = full_state_dict(model)
            assert state is not None
            return state

    for meta in (False, True):
        for state in mc.launch(main, ranks=2, args=(meta,)):
            assert_close(state, dict(one.state_dict()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("adaptor", ["data_parallel", "tensor_parallel"])
def test_a_model_that_was_made_in_inference_mode_is_served_in_it(adaptor: str) -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2})), torch.inference_mode():
            model, whole = two_layers(), two_layers()
            ADAPTORS[adaptor](model)
            for _ in range(2):
                assert_close(model(torch.ones(2, 4)), whole(torch.ones(2, 4)))

    mc.launch(main, ranks=2)
