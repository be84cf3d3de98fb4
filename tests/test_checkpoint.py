"""Checkpoints: any mesh to any other, torch's own reader and writer as the oracle, resumption bit for bit, accidents."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel.checkpoint import latest, load, save
from meshcomm.parallel.data.ddp import data_parallel
from meshcomm.parallel.fsdp.module import fully_shard
from meshcomm.parallel.fsdp.state import pieces
from meshcomm.parallel.full_state import full_state_dict
from meshcomm.parallel.global_places import Place
from meshcomm.parallel.tensor.module import tensor_parallel
from meshcomm.parallel.tensor.plan import Column
from meshcomm.runtime.start.workers import WorkerPool

# Torch says so where it reads and writes on one rank.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
F64 = torch.float64
D = 8


class Net(nn.Module):
    """With a matrix that is three, odd sizes, a parameter of no dims, a buffer, and dropout."""

    def __init__(self, seed: int = 0, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, D, dtype=F64)
        self.qkv = nn.Linear(D, 3 * D, dtype=F64)
        self.proj = nn.Linear(D, D, dtype=F64)
        self.scale = nn.Parameter(torch.randn((), dtype=F64))
        self.odd = nn.Linear(D, 3, dtype=F64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.drop = nn.Dropout(p)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.odd(self.drop(x + self.scale * self.proj(q * k.tanh() + v)))


def optimizer_of(net: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    decay = [p for name, p in net.named_parameters() if "weight" in name]
    plain = [p for name, p in net.named_parameters() if "weight" not in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.05}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    loss: Tensor = net(ids).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(kind: str, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    """The reference: one rank that knows of no mesh."""
    net = Net()
    optimizer = optimizer_of(net, kind)
    for at in range(steps):
        step_of(net, optimizer, torch.arange(6)[at:])
    return net, optimizer


PLAN = {"embed": "vocab", "qkv": Column(3), "proj": "row", "*": "replicated"}
PLANS = {
    "one": {"rank": 1},
    "dp4": {"dp": 4},
    "fsdp4": {"fsdp": 4},
    "whole": {"fsdp": 4},
    "hsdp": {"replica": 2, "fsdp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "fsdp2 tp2": {"fsdp": 2, "tp": 2},
    "replica2 fsdp2 tp2": {"replica": 2, "fsdp": 2, "tp": 2},
}


def spread(how: str, seed: int = 0, p: float = 0.0) -> tuple[Net, mc.Mesh]:
    """The model on a mesh, with other values than the reference has."""
    mesh = mc.make_mesh(PLANS[how])
    net = Net(seed + 100, p)
    if "tp" in how:
        tensor_parallel(net, PLAN, axis="tp", mesh=mesh)
    if "fsdp" in how or how in ("whole", "hsdp"):
        replica = "replica" if "replica" in PLANS[how] else None
        units = ["qkv", "proj"]
        fully_shard(net, "fsdp", grads="sum", units=units, replica_axis=replica, whole=how == "whole", mesh=mesh)
    elif "dp" in how:
        data_parallel(net, "dp", grads="sum", mesh=mesh)
    return net, mesh


def ranks_of(how: str) -> int:
    return math.prod(PLANS[how].values())


def own_part(how: str, net: Net, mesh: mc.Mesh, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a global tensor, cut here by hand."""
    x = whole
    if "tp" in how:
        at = mesh.coordinate["tp"]
        if name == "embed.weight":
            x = x.chunk(2, 0)[at]
        elif name.startswith("qkv"):
            x = torch.cat([part.chunk(2, 0)[at] for part in x.chunk(3, 0)], 0)
        elif name == "proj.weight":
            x = x.chunk(2, 1)[at]
    if "fsdp" in how or how in ("whole", "hsdp"):
        _, start, stop, kept_whole = pieces(net)[name]
        flat = x.reshape(-1)[start:stop]
        x = flat.view(x.shape) if kept_whole and stop > start else flat
    return x


def states_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[p]) for name, p in net.named_parameters()}


def same(actual: Any, expected: Any, what: str) -> None:
    """Bit for bit, dtypes too."""
    assert type(actual) is type(expected), what
    if isinstance(actual, Tensor):
        assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")
    else:
        assert actual == expected, what


def check_against(how: str, net: Net, mesh: mc.Mesh, optimizer: Any, reference: tuple[Net, Any]) -> None:
    there, expected = dict(reference[0].named_parameters()), states_of(*reference)
    for name, p in net.named_parameters():
        same(p.detach(), own_part(how, net, mesh, name, there[name].detach()), name)
        for key, value in optimizer.state[p].items():
            whole = expected[name][key]
            part = whole if key == "step" else own_part(how, net, mesh, name, whole)
            same(value, part, f"{name} {key}")
        assert set(optimizer.state[p]) == set(expected[name])
    same(net.seen, reference[0].seen, "seen")
    for mine, theirs in zip(optimizer.param_groups, reference[1].param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def by_torch(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}


def read_by_torch(folder: str, kind: str) -> tuple[Net, Any]:
    """A checkpoint as torch's own loader puts it into a plain module."""
    net = Net(7)
    optimizer = optimizer_of(net, kind)
    state = by_torch(net, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])
    return net, optimizer


def compare(actual: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    for (name, x), y in zip(actual[0].state_dict().items(), expected[0].state_dict().values(), strict=True):
        same(x, y, name)
    mine, theirs = states_of(*actual), states_of(*expected)
    for name in mine:
        assert set(mine[name]) == set(theirs[name])
        for key in mine[name]:
            same(mine[name][key], theirs[name][key], f"{name} {key}")


# -------------------------------------------------------------------------------------------------------------- boxes


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (3, 1, 2, 2)])
def test_a_flat_slice_is_these_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        x = whole.reshape(-1)[start:stop].clone()
        spread_ = Place(shape, start, stop, cut=True).of(x)
        assert len(spread_.boxes) <= max(2 * len(shape) - 1, 1)
        seen = []
        for offsets, sizes, view in spread_.boxes:
            there = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            assert torch.equal(view, there)
            assert view.numel() == 0 or view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            seen += there.flatten().tolist()
        assert sorted(seen) == list(range(start, stop))


def test_cuts_of_cuts_and_slices_of_them() -> None:
    """Rows in two matrices over 2, then columns over 3, then rows again over 2, then flat slices over 5."""
    whole = torch.arange(24 * 6).reshape(24, 6)
    seen: list[int] = []
    for i, j, k in itertools.product(range(2), range(3), range(2)):
        first = torch.cat([part.chunk(2, 0)[i] for part in whole.split([8, 16], 0)], 0)
        second = first.chunk(3, 1)[j]
        third = torch.cat([part.chunk(2, 0)[k] for part in second.split([6, 6], 0)], 0)
        bounds = [0, 1, 4, 5, 11, third.numel()]
        for start, stop in itertools.pairwise(bounds):
            place = Place(third.shape, start, stop)
            place.cut(0, (6, 6), 2, k)
            place.cut(1, (6,), 3, j)
            place.cut(0, (8, 16), 2, i)
            assert place.shape == (24, 6)
            for offsets, sizes, view in place.of(third.reshape(-1)[start:stop].clone()).boxes:
                there = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
                assert torch.equal(view, there)
                seen += there.flatten().tolist()
    assert sorted(seen) == list(range(whole.numel()))


# ----------------------------------------------------------------------------------------------- from mesh to mesh


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize(("how", "kind"), [*((how, "adamw") for how in PLANS), ("fsdp2 tp2", "sgd"), ("fsdp4", "sgd")])
def test_torch_writes_and_reads_what_any_mesh_reads_and_writes(how: str, kind: str, tmp_path: Path) -> None:
    reference = trained(kind)
    theirs = str(tmp_path / "torch")
    dcp.save(by_torch(*reference), checkpoint_id=theirs, no_dist=True)

    def program() -> str:
        net, mesh = spread(how)
        optimizer = optimizer_of(net, kind)
        with mc.use_mesh(mesh):
            found = load(theirs, net, optimizer)
            assert (found.step, found.extra, found.same_mesh) == (None, None, False)
            check_against(how, net, mesh, optimizer, reference)
            return save(tmp_path / "ours", net, optimizer, step=3)

    folders = mc.launch(program, ranks=ranks_of(how))
    assert set(folders) == {str(tmp_path / "ours" / "step-00000003")}
    compare(read_by_torch(folders[0], kind), reference)
    files = os.listdir(folders[0])
    assert len([name for name in files if name.endswith(".distcp")]) == ranks_of(how)
    written = sum(os.path.getsize(os.path.join(folders[0], name)) for name in files)
    assert written < 3 * sum(os.path.getsize(os.path.join(theirs, name)) for name in os.listdir(theirs)) + 2**17


@pytest.mark.parametrize(("source", "target"), [("fsdp4", "dp2 tp2"), ("dp4", "fsdp2 tp2"), ("fsdp2 tp2", "one")])
def test_from_mesh_to_mesh(source: str, target: str, tmp_path: Path) -> None:
    """Trained on one, and the values that it has there are those on the other one."""

    def before() -> dict[str, Tensor] | None:
        net, mesh = spread(source)
        optimizer = optimizer_of(net)
        with mc.use_mesh(mesh):
            for at in range(2):
                step_of(net, optimizer, torch.arange(6)[at:])
            save(tmp_path, net, optimizer, extra={"at": 2})
            return full_state_dict(net)

    whole = mc.launch(before, ranks=ranks_of(source))[0]
    assert whole is not None
    reference = Net(3), None
    theirs = optimizer_of(reference[0])
    found = load(tmp_path, reference[0], theirs)
    assert found.extra == {"at": 2}
    for name, x in reference[0].state_dict().items():
        same(whole[name], x, name)
    assert theirs.state[reference[0].odd.bias]["exp_avg"].abs().sum() > 0

    def after() -> None:
        net, mesh = spread(target)
        optimizer = optimizer_of(net)
        load(tmp_path, net, optimizer, mesh=mesh)
        check_against(target, net, mesh, optimizer, (reference[0], theirs))

    mc.launch(after, ranks=ranks_of(target))


def test_what_the_optimiser_has_is_replaced(tmp_path: Path) -> None:
    """States that were not there go, settings come back, and a rate that is a tensor stays the one it is."""
    net = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.5, 0.6))
    save(tmp_path / "before", net, optimizer)
    step_of(net, optimizer, torch.ones(1, 2))
    assert len(optimizer.state) == 2
    rate.fill_(0.1)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    load(tmp_path / "before", net, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    other = torch.optim.AdamW(net.parameters(), lr=0.25)
    load(tmp_path / "before", net, other)
    same(other.param_groups[0]["lr"], torch.tensor(0.5), "rate")


def test_where_others_have_put_it(tmp_path: Path) -> None:
    reference = trained("adamw")
    dcp.save(reference[0].state_dict(), checkpoint_id=tmp_path / "top", no_dist=True)
    dcp.save({"app": by_torch(*reference), "step": 3}, checkpoint_id=tmp_path / "app", no_dist=True)

    def program() -> None:
        net, mesh = spread("fsdp2 tp2")
        load(tmp_path / "top", net, keys=("", "optim"), mesh=mesh)
        for name, p in net.named_parameters():
            same(p.detach(), own_part("fsdp2 tp2", net, mesh, name, reference[0].get_parameter(name).detach()), name)
        again, mesh = spread("fsdp2 tp2")
        optimizer = optimizer_of(again)
        load(tmp_path / "app", again, optimizer, keys=("app.model", "app.optim"), mesh=mesh)
        check_against("fsdp2 tp2", again, mesh, optimizer, reference)

    mc.launch(program, ranks=4)


# --------------------------------------------------------------------------- beside torch's own, and on processes


def torch_spread(how: str) -> nn.Module:
    net = Net(50)
    if how == "fsdp4":
        mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        torch_fully_shard(net.qkv, mesh=mesh)
        return torch_fully_shard(net, mesh=mesh, ignored_params={net.scale})
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(net, mesh["tp"], {"qkv": ColwiseParallel(), "proj": RowwiseParallel()})
    return torch_fully_shard(net, mesh=mesh["fsdp"], ignored_params={net.scale})


def whole_of(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def on_processes(folder: str) -> dict[str, bool]:
    """Each writes what the others read: torch's own parallelisms, and this library's, the reference in between."""
    done = {}
    reference = trained("adamw")
    expected = states_of(*reference)
    for how in ("fsdp4", "fsdp2 tp2"):
        net, mesh = spread(how)
        optimizer = optimizer_of(net)
        load(f"{folder}/reference", net, optimizer, mesh=mesh)
        check_against(how, net, mesh, optimizer, reference)
        ours = save(f"{folder}/ours {how}", net, optimizer, step=1, mesh=mesh)

        theirs = torch_spread(how)
        their_optimizer = optimizer_of(theirs)
        state = by_torch(theirs, their_optimizer)
        dcp.load(state, checkpoint_id=ours)
        set_model_state_dict(theirs, state["model"])
        set_optimizer_state_dict(theirs, their_optimizer, state["optim"])
        for name, p in theirs.named_parameters():
            same(whole_of(p.detach()), reference[0].get_parameter(name).detach(), name)
            for key, value in their_optimizer.state[p].items():
                same(whole_of(value), expected[name][key], f"{name} {key}")
        written = f"{folder}/theirs {how}"
        dcp.save(by_torch(theirs, their_optimizer), checkpoint_id=written)
        save(f"{folder}/theirs through us {how}", theirs, their_optimizer, step=1, mesh=mesh)

        for source in (written, f"{folder}/theirs through us {how}"):
            again, mesh = spread(how, seed=5)
            optimizer = optimizer_of(again)
            load(source, again, optimizer, mesh=mesh)
            check_against(how, again, mesh, optimizer, reference)
        back = torch_spread(how)
        back_optimizer = optimizer_of(back)
        load(f"{folder}/ours {how}", back, back_optimizer, mesh=mesh)  # into DTensors, by this library
        for name, p in back.named_parameters():
            same(whole_of(p.detach()), reference[0].get_parameter(name).detach(), name)
            for key, value in back_optimizer.state[p].items():
                same(whole_of(value), expected[name][key], f"{name} {key}")
        done[how] = True
    return done


@pytest.mark.thorough
def test_torchs_own_parallelisms_and_processes(pool4: WorkerPool, tmp_path: Path) -> None:
    reference = trained("adamw")
    save(tmp_path / "reference", *reference)
    assert pool4.run(on_processes, str(tmp_path)) == [{"fsdp4": True, "fsdp2 tp2": True}] * 4

    def in_process() -> None:  # what processes have written
        net, mesh = spread("fsdp2 tp2")
        optimizer = optimizer_of(net)
        found = load(tmp_path / "ours fsdp2 tp2", net, optimizer, mesh=mesh)
        assert found.same_mesh
        check_against("fsdp2 tp2", net, mesh, optimizer, reference)

    mc.launch(in_process, ranks=4)


# ------------------------------------------------------------------------------------------------------- resumption


def draws() -> list[float]:
    """Of every generator of this rank."""
    return [torch.rand(()).item(), random.random(), float(np.random.normal()), float(np.random.rand())]


def run(how: str, folder: Path, kind: str, first: int, last: int) -> Any:
    """Steps ``first`` to ``last``, with random batches and dropout; a checkpoint after each is asked for and changes
    nothing.
    """
    net, mesh = spread(how, p=0.5)
    optimizer = optimizer_of(net, kind)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    own = mesh.rank // mesh.shape.get("tp", 1)  # along tp all draw the same
    torch.manual_seed(10 + own)
    random.seed(20 + own)
    np.random.seed(30 + own)
    seen = 0
    if first:
        found = load(folder / "run", net, optimizer, mesh=mesh)
        assert (found.step, found.same_mesh) == (first, True)
        scheduler.load_state_dict(found.extra["scheduler"])
        seen = found.rank_extra
    out = []
    for at in range(first, last):
        ids = torch.randint(6, (3,))
        loss = step_of(net, optimizer, ids)
        scheduler.step()
        seen += int(ids.sum()) + random.randrange(9)
        out.append((loss.item(), seen, draws()))
        if at + 1 in (3, last):
            name = "run" if last == 3 else f"other {first}"
            save(folder / name, net, optimizer, step=at + 1, extra={"scheduler": scheduler.state_dict()},
                 rank_extra=seen, mesh=mesh)  # fmt: skip
    end = [p.detach().clone() for p in net.parameters()]
    states = [value for p in net.parameters() for _, value in sorted(optimizer.state[p].items())]
    return out, [*end, *states], [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("how", "kind", "runtime"), [
    ("fsdp4", "adamw", "in-process"), ("dp2 tp2", "sgd", "in-process"), ("one", "adamw", "in-process"),
    ("fsdp2 tp2", "adamw", "processes"),
])  # fmt: skip
def test_resumed_training_is_the_uninterrupted_one(
    how: str, kind: str, runtime: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ranks = ranks_of(how)

    def launch(first: int, last: int) -> list[Any]:
        if runtime == "processes":
            found: list[Any] = request.getfixturevalue("pool4").run(run, how, tmp_path, kind, first, last)
            return found
        return mc.launch(run, ranks=ranks, args=(how, tmp_path, kind, first, last))

    whole, half, rest = launch(0, 6), launch(0, 3), launch(3, 6)
    assert len({tuple(draw) for result in whole for _, _, draw in result[0]}) == 6 * ranks // (2 if "tp" in how else 1)
    assert whole[0][2][0] != 0.05  # the schedule has changed the rate
    for rank in range(ranks):
        assert whole[rank][0] == half[rank][0] + rest[rank][0]
        for x, y in zip(whole[rank][1], rest[rank][1], strict=True):
            same(x, y, f"rank {rank}")
        assert whole[rank][2] == rest[rank][2]


def test_random_states_stay_where_they_are_on_another_mesh_or_if_told(tmp_path: Path) -> None:
    def writes() -> None:
        net, mesh = spread("fsdp4")
        save(tmp_path, net, extra=mesh.rank, rank_extra=mesh.rank, mesh=mesh)

    mc.launch(writes, ranks=4)

    def reads(how: str, put_back: bool) -> tuple[bool, Any]:
        net, mesh = spread(how)
        torch.rand(3)
        before = torch.get_rng_state()
        found = load(tmp_path, net, random=put_back, mesh=mesh)
        assert found.extra == 0  # the first one's
        return torch.equal(torch.get_rng_state(), before), found.rank_extra

    assert mc.launch(reads, ranks=4, args=("fsdp4", True)) == [(False, rank) for rank in range(4)]
    assert mc.launch(reads, ranks=4, args=("fsdp4", False)) == [(True, rank) for rank in range(4)]
    assert mc.launch(reads, ranks=4, args=("dp2 tp2", True)) == [(True, None)] * 4


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {"n": None, 1: [True, 2, 2.5, 1j, "x", b"y", (), {}], "t": torch.arange(3), "big": 2**200,
             "types": (torch.float16, torch.Size([2])), "counts": Counter("aab")}  # fmt: skip
    layer = nn.Linear(1, 1)
    save(tmp_path, layer, extra=extra)
    found = load(tmp_path, layer).extra
    assert torch.equal(found.pop("t"), extra.pop("t"))
    assert found == extra
    assert type(found["counts"]) is Counter


# ------------------------------------------------------------------------------------------------- shared and extra


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.extra: Any = {"list": [1, {"t": torch.arange(2)}], "n": 3}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_shared_parameters_and_extra_state(tmp_path: Path) -> None:
    def program() -> dict[str, Tensor] | None:
        mesh = mc.make_mesh({"fsdp": 2})
        net = fully_shard(Tied(), "fsdp", grads="sum", mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters())
        step_of(net, optimizer, torch.arange(5))
        save(tmp_path, net, optimizer, mesh=mesh)
        kept = full_state_dict(net, 0, shared="drop", mesh=mesh)
        full = full_state_dict(net, 1, mesh=mesh)
        assert (kept is None, full is None) == ((False, True) if mesh.rank == 0 else (True, False))
        assert kept is None or list(kept) == ["embed.weight", "head.bias"]
        return full

    full = mc.launch(program, ranks=2)[1]
    assert full is not None
    folder = latest(tmp_path)
    assert folder is not None
    table = dcp.FileSystemReader(folder).read_metadata()
    one = [info for index, info in table.storage_data.items() if index.fqn == "model.embed.weight"]
    two = [info for index, info in table.storage_data.items() if index.fqn == "model.head.weight"]
    assert one
    assert one == two  # stored once
    net = Tied()
    net.extra = None
    optimizer = torch.optim.AdamW(net.parameters())
    load(tmp_path, net, optimizer)
    assert net.head.weight is net.embed.weight
    same(net.embed.weight.detach(), full["head.weight"], "tied")
    assert net.extra["n"] == 3
    assert torch.equal(net.extra["list"][1]["t"], torch.arange(2))
    state = {name: torch.zeros_like(x) for name, x in net.state_dict().items() if isinstance(x, Tensor)}
    dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
    same(state["head.weight"], full["embed.weight"], "torch's")
    same(state["embed.weight"], full["embed.weight"], "torch's")
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    same(nested["model"]["head.weight"], full["head.weight"], "in one file")
    assert nested["optim"]["param_groups"][0]["params"] == ["embed.weight", "head.bias"]
    assert nested["model"]["_extra_state"]["n"] == 3


@pytest.mark.parametrize("how", ["dp4", "whole", "fsdp2 tp2"])
def test_full_state_dict_is_fit_for_safetensors(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rules: tensors that are dense, contiguous, whole and not in each other's memory, by names that are strings."""
    monkeypatch.setattr("meshcomm.parallel.full_state._BATCH", 2000)

    def program() -> Any:
        net, mesh = spread(how)
        found = full_state_dict(net, 0, mesh=mesh)
        assert (found is None) == (mesh.rank > 0)
        return found, {name: p.detach().clone() for name, p in net.named_parameters()}

    results = mc.launch(program, ranks=4)
    found = results[0][0]
    assert list(found) == list(Net().state_dict())
    memory = [x.untyped_storage().data_ptr() for x in found.values()]
    assert len(set(memory)) == len(memory)
    for x in found.values():
        assert type(x) is Tensor
        assert x.is_contiguous()
        assert x.device.type == "cpu"
        assert x.untyped_storage().nbytes() == x.nbytes
        assert not x.requires_grad
    Net(4).load_state_dict(found)

    def check() -> None:
        net, mesh = spread(how)
        for name, p in net.named_parameters():  # the same seed: the same values as before
            same(p.detach(), own_part(how, net, mesh, name, found[name]), name)

    mc.launch(check, ranks=4)


# ------------------------------------------------------------------------------------------------------ bad input


def errors(ranks: int, do: Callable[[], Any]) -> str:
    """The same error on every rank."""

    def program() -> str:
        with pytest.raises(mc.MeshError) as caught:
            do()
        return str(caught.value)

    texts = [text.replace(f"; at x={rank}", "") for rank, text in enumerate(mc.launch(program, ranks=ranks))]
    assert len(set(texts)) == 1, texts
    return texts[0]


def linear(n: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return fully_shard(nn.Linear(4, n, dtype=dtype), "x", grads="sum")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.eye(2).to_sparse())


def halves() -> nn.Module:
    return fully_shard(nn.Linear(4, 4, bias=False), "x", grads="sum")


@pytest.fixture
def two() -> Any:
    with mc.use_mesh(mc.make_mesh({"x": 2})) as mesh:
        yield mesh


def test_bad_arguments(two: mc.Mesh, tmp_path: Path) -> None:
    for match, do in {
        "module is not a torch.nn.Module but dict": lambda: save(tmp_path, {}),  # type: ignore[arg-type]
        "optimizer is not a torch.optim.Optimizer but str": lambda: save(tmp_path, linear(), "adam"),  # type: ignore[arg-type]
        "step=-1 is not a number from 0 on": lambda: save(tmp_path, linear(), step=-1),
        "keep=0 is not a number from 1 on": lambda: save(tmp_path, linear(), keep=0),
        "path=3 is no path": lambda: save(3, linear()),  # type: ignore[arg-type]
        "path='' is no path": lambda: load("", linear()),
        "keys=('a',) are not two names": lambda: load(tmp_path, linear(), keys=("a",)),  # type: ignore[arg-type]
        "shared='x' is neither": lambda: full_state_dict(linear(), shared="x"),
        "dst=2 is not an index": lambda: full_state_dict(linear(), dst=2),
        "extra['f'][0] is a function": lambda: save(tmp_path, linear(), extra={"f": [errors]}),
        "extra has a key": lambda: save(tmp_path, linear(), extra={(1,): 2}),
        "index 0: extra is a Generator": lambda: save(tmp_path, linear(), extra=None if two.rank else torch.Generator()),
        "index 1: rank_extra is a set": lambda: save(tmp_path, linear(), rank_extra={1} if two.rank else 1),
        "has 1 parameters that are not the module's": lambda: save(
            tmp_path, linear(), torch.optim.SGD([nn.Parameter(torch.ones(2))])
        ),
        "'weight' has no values yet": lambda: save(tmp_path, nn.Linear(2, 2, device="meta")),
        "do not have each element of these tensors once; 'model.weight' (8 of 16)": lambda: save(
            tmp_path, halves(), mesh=mc.make_mesh({"y": 1}, ranks=[two.rank])
        ),
        "a Tensor of layout torch.sparse_coo is no dense tensor": lambda: save(tmp_path, Sparse()),
        "'model.weight' is f32[2, 2] on one rank, f32[4, 2] on rank 1 of the mesh": lambda: save(tmp_path, nn.Linear(2, 2 + 2 * two.rank)),
    }.items():  # fmt: skip
        text = errors(2, do)
        assert match in text, text

    def alone(rank: int) -> None:
        net = linear()
        if two.rank == rank:
            save(tmp_path, net, mesh=mc.make_mesh({"y": 1}, ranks=[rank]))

    for rank, missing in enumerate(("bias", "weight")):  # of which this rank has nothing, and no other one is asked
        with pytest.raises(mc.MeshError, match=rf"do not have each element of these tensors once; 'model.{missing}'\."):
            mc.launch(alone, ranks=2, args=(rank,))
    with pytest.raises(mc.CommError, match="made different calls"):
        mc.launch(lambda: save(tmp_path, linear(), step=two.rank), ranks=2)
    assert os.listdir(tmp_path) == []


def test_a_part_of_a_module_that_was_spread_as_a_whole(two: mc.Mesh, tmp_path: Path) -> None:
    """It knows how it is cut, as the whole does."""

    def of(spread_it: Callable[[nn.Module], Any]) -> None:
        def do(mesh: mc.Mesh) -> list[Tensor]:
            with mc.use_mesh(mesh), torch.random.fork_rng():
                torch.manual_seed(0)
                net = nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4))
                whole = net[0][0].weight.detach().clone()
                spread_it(net)
                folder = save(tmp_path, net[0])
                with torch.no_grad():
                    net[0][0].weight.zero_()
                load(folder, net[0])
                fresh = nn.Sequential(nn.Linear(4, 4, bias=False))
                load(folder, fresh)
                return [whole, fresh[0].weight.detach(), full_state_dict(net[0])["0.weight"]]

        for whole, fresh, back in mc.launch(do, ranks=2, args=(two,)):
            assert torch.equal(whole, fresh)
            assert torch.equal(whole, back)

    of(lambda net: fully_shard(net, "x", grads="sum"))
    of(lambda net: tensor_parallel(net, {"0.0": "column", "*": "replicated"}, axis="x"))


def test_a_step_that_is_there_is_not_written_over(two: mc.Mesh, tmp_path: Path) -> None:
    mc.launch(lambda: save(tmp_path, linear(), step=4), ranks=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000004").iterdir()}
    text = errors(2, lambda: save(tmp_path, linear(), step=4))
    assert "there is a checkpoint of step 4 already" in text
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000004").iterdir()} == before
    mc.launch(lambda: save(tmp_path, linear()), ranks=2)
    assert latest(tmp_path) == str(tmp_path / "step-00000005")


def test_what_does_not_fit_changes_nothing(two: mc.Mesh, tmp_path: Path) -> None:
    def writes() -> None:
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        save(tmp_path / "full", net, optimizer)
        save(tmp_path / "bare", net)

    mc.launch(writes, ranks=2)
    (tmp_path / "none").mkdir()
    full = tmp_path / "full"

    def tries(path: Path, make: Callable[[], nn.Module], optim: Callable[[Any], Any] | None = None, **more: Any) -> str:
        def do() -> None:
            net = make()
            before = [p.detach().clone() for p in net.parameters()]
            optimizer = None if optim is None else optim(net)
            states = torch.get_rng_state()
            try:
                load(path, net, optimizer, **more)
            finally:
                assert all(torch.equal(p, x) for p, x in zip(net.parameters(), before, strict=True))
                assert optimizer is None or not optimizer.state
                assert torch.equal(torch.get_rng_state(), states)

        return errors(2, do)

    adam = lambda net: torch.optim.AdamW(net.parameters())  # noqa: E731
    assert "there is no finished checkpoint in" in tries(tmp_path / "none", linear)
    assert "there is no finished checkpoint in" in tries(tmp_path / "nowhere", linear)
    assert "'model.weight' is f32[4, 4] in the checkpoint and f32[6, 4] here; 'model.bias'" in tries(
        full, lambda: linear(6)
    )
    assert "f32[4, 4] in the checkpoint and f64[4, 4] here" in tries(full, lambda: linear(dtype=F64))
    both = tries(full, lambda: nn.Sequential(nn.Linear(4, 4)))
    assert "not in the checkpoint: '0.weight', '0.bias'; not in the module: 'model.weight', 'model.bias'" in both
    assert "not in the module: 'model.bias'" in tries(full, lambda: nn.Linear(4, 4, bias=False))
    assert "the checkpoint has no state of an optimiser" in tries(tmp_path / "bare", linear, adam)
    other = tries(full, linear, lambda net: torch.optim.SGD(net.parameters()))
    assert "the checkpoint is of another kind of optimiser" in other
    assert "'betas'" in other
    assert "'momentum'" in other
    split = tries(full, linear, lambda net: torch.optim.AdamW([{"params": [p]} for p in net.parameters()]))
    assert "no group of the optimiser in the checkpoint has the same parameters as 'weight'" in split
    assert "not in the checkpoint: 'weight', 'bias'" in tries(full, linear, keys=("app.model", "optim"))


class Factored(torch.optim.SGD):
    """Keeps a row of each matrix."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(3)


def test_a_state_that_is_cut_who_knows_how(two: mc.Mesh, tmp_path: Path) -> None:
    def do() -> None:
        net = linear()
        optimizer = Factored(net.parameters())
        optimizer.step()
        save(tmp_path, net, optimizer)

    assert "nothing is known of how 'optim.state.weight.row' is cut" in errors(2, do)

    def whole() -> Any:
        net = data_parallel(nn.Linear(4, 4), "x", grads="sum")
        optimizer = Factored(net.parameters())
        optimizer.step()
        save(tmp_path, net, optimizer)
        other = Factored(net.parameters())
        load(tmp_path, net, other)
        return other.state[net.weight]["row"]

    assert torch.equal(mc.launch(whole, ranks=2)[1], torch.zeros(3))


# ---------------------------------------------------------------------------------------------- what files may do


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_loading_runs_no_code(tmp_path: Path) -> None:
    layer, bang = nn.Linear(2, 2), tmp_path / "bang"
    before = layer.weight.detach().clone()
    save(tmp_path / "a", layer)
    table = Path(str(latest(tmp_path / "a"))) / ".metadata"
    good = table.read_bytes()

    table.write_bytes(pickle.dumps(Bomb(bang)))
    with pytest.raises(mc.MeshError, match=r"cannot be read: UnpicklingError: posix.mkdir does not belong"):
        load(tmp_path / "a", layer)
    known = pickle.loads(good)
    known.planner_data["x"] = Bomb(bang)
    table.write_bytes(pickle.dumps(known))
    with pytest.raises(mc.MeshError, match=r"posix.mkdir does not belong"):
        load(tmp_path / "a", layer)
    table.write_bytes(pickle.dumps([1]))
    with pytest.raises(mc.MeshError, match="a list is no table"):
        load(tmp_path / "a", layer)
    table.write_bytes(good[:50])
    with pytest.raises(mc.MeshError, match="cannot be read"):
        load(tmp_path / "a", layer)

    known = pickle.loads(good)
    index = next(index for index in known.storage_data if index.fqn == "model.weight")
    known.storage_data[index].relative_path = "../../secret"
    table.write_bytes(pickle.dumps(known))
    with pytest.raises(mc.MeshError, match="'model.weight' is not in a file of the checkpoint"):
        load(tmp_path / "a", layer)

    optimizer = torch.optim.SGD(layer.parameters())
    state = {"model": layer.state_dict(), "optim": get_optimizer_state_dict(layer, optimizer)}
    state["optim"]["param_groups"][0]["lr"] = Bomb(bang)  # type: ignore[call-overload,index]
    dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(mc.MeshError, match="UnpicklingError: Weights only load failed"):
        load(tmp_path / "b", layer, torch.optim.SGD(layer.parameters()))
    assert not bang.exists()
    assert torch.equal(layer.weight, before)
    dcp.load({"optim": {"param_groups": [{"lr": 0}]}}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert bang.exists()  # it would have gone off


def test_files_that_are_missing_short_or_of_something_else(two: mc.Mesh, tmp_path: Path) -> None:
    mc.launch(lambda: save(tmp_path, linear()), ranks=2)
    folder = Path(str(latest(tmp_path)))
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    text = errors(2, lambda: load(tmp_path, linear()))
    assert "'__0_0.distcp'" in text
    assert "is missing or cut short" in text
    file.unlink()
    assert "is missing or cut short" in errors(2, lambda: load(tmp_path, linear()))
    table = pickle.loads((folder / ".metadata").read_bytes())
    at = next(
        info
        for index, info in table.storage_data.items()
        if index.fqn == "model.weight" and info.relative_path == file.name
    )
    other = folder / "x"
    torch.save(torch.zeros(3), other)
    body = other.read_bytes()
    assert len(body) <= at.length + 4096
    file.write_bytes(data[: at.offset] + body + bytes(max(0, len(data) - at.offset - len(body))))
    at.length = len(body)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    text = errors(2, lambda: load(tmp_path, linear()))
    assert "the file is not what the table says it is: a part of 'model.weight'" in text


def test_a_bit_that_has_turned(tmp_path: Path) -> None:
    layer = nn.Linear(64, 64)
    save(tmp_path, layer)
    (file,) = Path(str(latest(tmp_path))).glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(layer.weight.detach().numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(mc.MeshError, match=r"file '__0_0.distcp' in .* is damaged"):
        load(tmp_path, layer)


class Bare(nn.Module):
    """Of nothing but parameters without dims and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.b = nn.Parameter(torch.arange(3.0))


def test_no_dims_and_no_elements(tmp_path: Path) -> None:
    """NAdam has a state without dims beside the number of steps."""

    def of(size: int, first: bool) -> Any:
        mesh = mc.make_mesh({"x": size})
        net = fully_shard(Bare(), "x", grads="sum", mesh=mesh)
        optimizer = torch.optim.NAdam(net.parameters())
        if first:
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            save(tmp_path, net, optimizer, mesh=mesh)
        else:
            load(tmp_path, net, optimizer, mesh=mesh)
        shapes = [{key: tuple(x.shape) for key, x in optimizer.state[p].items()} for p in net.parameters()]
        return full_state_dict(net, mesh=mesh), shapes, [dict(optimizer.state[p]) for p in net.parameters()]

    (whole, _, states), *_ = mc.launch(of, ranks=1, args=(1, True))
    parts = mc.launch(of, ranks=3, args=(3, False))
    for name, x in parts[0][0].items():
        same(x, whole[name], name)
    assert {shapes[0]["mu_product"] for _, shapes, _ in parts} == {()}
    assert sorted(shapes[0]["exp_avg"] for _, shapes, _ in parts) == [(0,), (0,), (1,)]
    for _, _, mine in parts:
        same(mine[0]["mu_product"], states[0]["mu_product"], "mu_product")
        same(mine[0]["step"], states[0]["step"], "step")


# ------------------------------------------------------------------------------------------------------- accidents


KILLED = r"""
import os, resource, signal, sys, torch
import meshcomm as mc
from meshcomm.parallel.checkpoint import latest, load, save
from meshcomm.parallel.fsdp.module import fully_shard

root, count = sys.argv[1], 0

def program(value, step):
    mesh = mc.make_mesh({"x": 2})
    net = torch.nn.Linear(64, 64)
    torch.nn.init.constant_(net.weight, value)
    fully_shard(net, "x", grads="sum", mesh=mesh)
    if step is not None:
        save(root, net, step=step, extra=value, mesh=mesh)
    else:
        extra = load(root, net, mesh=mesh).extra
        assert (net.weight == extra).all()
        return extra

def dying(name, function, at):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    setattr(os, name, call)

def child(do):
    pid = os.fork()
    if pid == 0:
        try:
            do()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(3)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

assert child(lambda: mc.launch(program, ranks=2, args=(1.0, 1))) == 0
good, killed, at = 1.0, 0, 0
while True:
    at += 1
    def dies():
        for name in ("fsync", "mkdir", "rename"):
            dying(name, getattr(os, name), at)
        mc.launch(program, ranks=2, args=(good + 1, int(good) + 1))
    status = child(dies)
    def checks():
        found = mc.launch(program, ranks=2, args=(0.0, None))
        assert found in ([good] * 2, [good + 1] * 2), found
        os._exit(int(found[0]))
    now = float(os.WEXITSTATUS(child(checks)))
    assert now in (good, good + 1), now
    if status == 0:
        assert now == good + 1
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    good = now
assert killed >= 5, killed
assert not [name for name in os.listdir(root) if name.startswith(".")], os.listdir(root)

def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    def tries():
        try:
            program(100.0, 100)
        except mc.MeshError as error:
            return str(error)
    texts = mc.launch(tries, ranks=2)
    assert texts[0] == texts[1] and "meshcomm.checkpoint.save" in texts[0], texts
    assert "File too large" in texts[0] or "writ" in texts[0], texts

before = sorted(os.listdir(root))
assert child(full) == 0
assert sorted(os.listdir(root)) == before
assert child(checks) == int(good + 1) << 8
print("killed", killed)
"""


@pytest.mark.thorough
def test_killed_at_every_step_and_a_disk_that_is_full(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], capture_output=True, text=True,
                          timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("killed ")


def test_a_rank_that_cannot_write_leaves_nothing_behind(
    two: mc.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mc.launch(lambda: save(tmp_path, linear(), step=1), ranks=2)
    fsync, calls = os.fsync, [0, 0]

    def fails(handle: Any) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails)
    for at in range(1, 5):
        calls[:] = [0, at]
        text = errors(2, lambda: save(tmp_path, linear(), step=2))
        assert "No space left on device" in text
        assert os.listdir(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    mc.launch(lambda: save(tmp_path, linear(), step=2), ranks=2)


def test_the_names_of_wrappers_are_left_out(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.ModuleDict(
        {"_orig_mod": nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))}
    )  # as torch.compile names it
    assert list(wrapped.state_dict()) != list(net.state_dict())
    save(tmp_path, wrapped, torch.optim.Adam(wrapped.parameters()))
    load(tmp_path, net, torch.optim.Adam(net.parameters()))
    for x, y in zip(wrapped.parameters(), net.parameters(), strict=True):
        same(x.detach(), y.detach(), "parameter")
