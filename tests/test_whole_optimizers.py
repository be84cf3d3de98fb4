"""LBFGS, Adafactor and Muon over parameters that are cut, and LBFGS over losses that differ: against one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    Column,
    checkpoint,
    data_parallel,
    full_state_dict,
    fully_shard,
    shard_optimizer,
    tensor_parallel,
)

F64 = torch.float64
Make = Callable[[nn.Module], Optimizer]
How = Callable[[nn.Module], object]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
KINDS: dict[str, Make] = {
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), 0.5, max_iter=5, history_size=4),
    "LBFGS wolfe": lambda m: torch.optim.LBFGS(
        m.parameters(), max_iter=6, history_size=3, line_search_fn="strong_wolfe"
    ),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.1, weight_decay=0.1),
    "Adafactor each": lambda m: torch.optim.Adafactor(m.parameters(), 0.1, foreach=False),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], 0.1),
}
WAYS: dict[str, tuple[dict[str, int], How]] = {
    "dp": ({"dp": 2}, lambda m: data_parallel(m, "dp", grads="mean")),
    "fsdp": ({"dp": 3}, lambda m: fully_shard(m, "dp", grads="mean")),
    "fsdp whole": ({"dp": 2}, lambda m: fully_shard(m, "dp", grads="mean", whole=True)),
    "hsdp": ({"dp": 2, "r": 2}, lambda m: fully_shard(m, "dp", grads="mean", replica_axis="r")),
    "tp": ({"tp": 2}, lambda m: columns(m)),
    "dp x tp": ({"dp": 2, "tp": 2}, lambda m: data_parallel(columns(m), "dp", grads="mean")),
    "fsdp x tp": ({"dp": 2, "tp": 2}, lambda m: fully_shard(columns(m), "dp", grads="mean")),
}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16, dtype=F64), nn.GLU(), nn.Linear(8, 1, dtype=F64))


def columns(module: nn.Module) -> nn.Module:
    return tensor_parallel(module, {"0": Column(2), "2": "row"}, axis="tp")


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=generator, dtype=F64)
    return x, x.sin().sum(1, keepdim=True)


def closure_of(module: nn.Module, optimizer: Optimizer, axes: tuple[str, ...] = ()) -> Callable[[], Tensor]:
    x, y = rows()
    if axes:
        x, y = (mc.shard(each, axes) for each in (x, y))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (module(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    return closure


def alone(kind: str, steps: int = 3) -> tuple[dict[str, Tensor], list[float]]:
    module = net()
    optimizer = KINDS[kind](module)
    closure = closure_of(module, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(steps)]  # type: ignore[arg-type]
    return module.state_dict(), losses


def on_a_mesh(kind: str, way: str) -> None:
    sizes, how = WAYS[way]
    state, losses = alone(kind)
    mesh = mc.make_mesh(sizes)
    axes = tuple(axis for axis in sizes if axis != "tp")
    with mc.use_mesh(mesh):
        module = net()
        optimizer = KINDS[kind](module)  # before it is cut: of a slice Muon would say that it is no matrix
        how(module)
        closure = closure_of(module, optimizer, axes)
        found = [optimizer.step(closure) for _ in range(3)]
        assert_close(full_state_dict(module), state, rtol=1e-8, atol=1e-10)
        if kind.startswith("LBFGS"):
            assert [float(x) for x in found] == pytest.approx(losses, rel=1e-9)  # type: ignore[arg-type]
            kept = next(iter(optimizer.state.values()))
            assert type(kept["d"]) is Tensor
            assert kept["d"].numel() == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_muon) if kind == "Muon" else kind for kind in KINDS])
def test_against_one_rank(kind: str, way: str) -> None:
    sizes, _ = WAYS[way]
    mc.launch(on_a_mesh, ranks=torch.Size(sizes.values()).numel(), args=(kind, way))


@pytest.mark.parametrize("kind", ["LBFGS wolfe", "Adafactor"])
@pytest.mark.parametrize("way", ["hsdp", "fsdp x tp"])
def test_on_processes(kind: str, way: str, pool4: Any) -> None:
    pool4.run(on_a_mesh, kind, way)


@needs_muon
def test_muon_by_columns_after_it_was_cut() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"tp": 2})):
            module = columns(net())
            optimizer = KINDS["Muon"](module)
            for _ in range(3):
                optimizer.step(closure_of(module, optimizer))  # type: ignore[arg-type]
            assert_close(full_state_dict(module), alone("Muon")[0], rtol=1e-8, atol=1e-10)
            assert optimizer.state[module[0].weight]["momentum_buffer"].shape == (8, 6)  # type: ignore[index]

    mc.launch(main, ranks=2)


def test_groups_schedules_and_frozen_ones() -> None:
    def trained(how: How, axes: tuple[str, ...]) -> dict[str, Tensor]:
        module = net()
        module[2].bias.requires_grad_(False)  # type: ignore[index]
        names = dict(module.named_parameters())
        optimizer = torch.optim.Adafactor(
            [{"params": [names["0.weight"]], "lr": 0.2}, {"params": [names["0.bias"]]}], 0.1
        )
        how(module)
        optimizer.add_param_group({"params": [names["2.weight"], names["2.bias"]]})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            closure_of(module, optimizer, axes)()
            optimizer.step()
            schedule.step()
        return full_state_dict(module)  # type: ignore[return-value]

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"dp": 2})):
            found = trained(lambda m: fully_shard(m, "dp", grads="mean"), ("dp",))
            assert_close(found, trained(lambda m: data_parallel(m, "dp", grads="mean"), ("dp",)), rtol=1e-9, atol=1e-11)

    mc.launch(main, ranks=2)


@pytest.mark.parametrize("kind", ["Adafactor", pytest.param("Muon", marks=needs_muon)])
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    """From one mesh to another and to one rank, in the middle."""

    def main(sizes: dict[str, int], how: How, begin: int) -> None:
        with mc.use_mesh(mc.make_mesh(sizes)):
            module = net()
            optimizer = KINDS[kind](module)
            how(module)
            if begin:
                checkpoint.load(tmp_path / str(begin), module, optimizer)
            optimizer.step(closure_of(module, optimizer))  # type: ignore[arg-type]
            checkpoint.save(tmp_path / str(begin + 1), module, optimizer)
            if begin == 3:
                assert_close(full_state_dict(module), alone(kind, 4)[0], rtol=1e-8, atol=1e-10)

    fsdp: How = lambda m: fully_shard(m, "dp", grads="mean")  # noqa: E731
    mc.launch(main, ranks=3, args=({"dp": 3}, fsdp, 0))
    mc.launch(main, ranks=4, args=({"dp": 2, "tp": 2}, lambda m: fully_shard(columns(m), "dp", grads="mean"), 1))
    mc.launch(main, ranks=1, args=({"dp": 1}, fsdp, 2))
    mc.launch(main, ranks=2, args=({"tp": 2}, columns, 3))


def test_what_is_refused() -> None:
    class Own(torch.optim.LBFGS):
        pass

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"dp": 2, "r": 2})):
            module = fully_shard(net(), "dp", grads="mean", replica_axis="r")
            optimizer = Own(module.parameters())
            with pytest.raises(mc.MeshError, match=r"Own derives from LBFGS[\s\S]*fix: "):
                optimizer.step(closure_of(module, optimizer))
            other = torch.optim.Adafactor(module.parameters())
            with pytest.raises(mc.MeshError, match=r"is cut along axis 'dp' by fully_shard, and Adafactor looks at"):
                shard_optimizer(other, "r")
            with pytest.raises(TypeError, match="closure"):
                torch.optim.LBFGS(module.parameters()).step()  # type: ignore[call-arg]

    mc.launch(main, ranks=4)
