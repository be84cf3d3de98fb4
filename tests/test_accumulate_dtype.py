"""accumulate_dtype: gradients of narrow parameters are added up over microbatches and ranks in a wider dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, data_parallel, fully_shard, no_sync, reduce_gradients

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
AXES = ("rep", "dp")
STEPS = 6


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.LayerNorm(3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def net(dtype: torch.dtype = BF16, sparse: bool = False) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(sparse).to(dtype)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    ids = torch.randint(5, (4,), generator=torch.Generator().manual_seed(4 * number + rank))
    return (model(ids) * torch.tensor([1.0, -3.0, 0.37], dtype=BF16)).square().sum()


def expected(grads: str, wide: torch.dtype, ranks: int = 4, sparse: bool = False) -> dict[str, Tensor]:
    """Of one rank: each microbatch of each rank by itself, as the numbers come, and added up in another dtype."""
    model = net(sparse=sparse)
    total: dict[str, Tensor] = {}
    for number in range(STEPS):
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, number, rank).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad.to(wide).to_dense() / (ranks if grads == "mean" else 1)
    return total


Way = Callable[[nn.Module, Callable[[int], Tensor]], None]


def last_outside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with no_sync(model):
        for number in range(STEPS - 1):
            loss(number).backward()
    loss(STEPS - 1).backward()


def all_inside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with no_sync(model):
        for number in range(STEPS):
            loss(number).backward()
    reduce_gradients(model)


def all_outside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    for number in range(STEPS):
        loss(number).backward()


def in_turn(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    for number in range(0, STEPS, 2):
        with no_sync(model):
            loss(number).backward()
        loss(number + 1).backward()


WAYS = [last_outside, all_inside, all_outside, in_turn]
KINDS = ["data", "sharded", "replicas", "param_dtype", "offload"]


def made(kind: str, grads: Any, wide: torch.dtype | None, sparse: bool = False, **options: Any) -> nn.Module:
    if kind == "data":
        return data_parallel(net(sparse=sparse), AXES, grads=grads, accumulate_dtype=wide, **options)
    if kind == "replicas":
        return fully_shard(net(), "dp", grads=grads, replica_axis="rep", accumulate_dtype=wide, **options)
    own = net(F32 if wide in (None, F32) else F64) if kind == "param_dtype" else net()
    if kind == "param_dtype":
        options["param_dtype"] = BF16
    return fully_shard(own, AXES, grads=grads, accumulate_dtype=wide, offload=kind == "offload", **options)


def gradients(kind: str, grads: str, way: Way, wide: torch.dtype | None, *rest: Any) -> Any:
    """This rank's, of each parameter that has any; and the norm."""
    mesh = mc.make_mesh({"rep": 2, "dp": 2})
    with mc.use_mesh(mesh):
        model = made(kind, grads, wide, *rest)
        way(model, lambda number: loss_of(model, number, mesh.rank))
        found = {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}
        if rest:
            return found, torch.cat([g.flatten() for g in found.values()]).norm()  # torch has no norm of sparse ones
        norm = clip_grad_norm(model, 1.0)
        clipped = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        for name, g in clipped.items():
            assert_close(g, found[name] * (1 / norm).to(g.dtype), rtol=1e-5, atol=1e-6)
        return found, norm


def joined(kind: str, of_ranks: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    ranks = {"data": 1, "replicas": 2}.get(kind, 4)
    found = {name: torch.cat([of[name].flatten() for of, _ in of_ranks[:ranks]]) for name in of_ranks[0][0]}
    return found, of_ranks[0][1]


def compared(kind: str, of_ranks: list[Any], grads: str, wide: torch.dtype, sparse: bool = False) -> None:
    found, norm = joined(kind, of_ranks)
    whole = expected(grads, wide, sparse=sparse)
    whole = {name: whole.get(name, torch.zeros(3, dtype=wide)).flatten() for name in found}
    assert found.keys() >= expected(grads, wide, ranks=1).keys()
    tolerance = 1e-12 if wide == F64 else 2e-6
    assert_close(found, whole, rtol=tolerance, atol=tolerance)
    assert_close(norm.double(), torch.cat([*whole.values()]).double().norm(), rtol=1e-5, atol=1e-6)


@pytest.mark.pairs
@pytest.mark.one_in(3)
@pytest.mark.parametrize("wide", [F32, F64])
@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_as_one_rank_that_adds_up_in_it(way: Way, kind: str, grads: str, wide: torch.dtype) -> None:
    compared(kind, mc.launch(gradients, ranks=4, args=(kind, grads, way, wide)), grads, wide)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["data", "sharded", "replicas", "param_dtype"])
def test_on_processes(pool4: Any, kind: str) -> None:
    for way in (last_outside, all_inside, all_outside):
        compared(kind, pool4.run(gradients, kind, "mean", way, F32), "mean", F32)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so also where it is asked for none
def test_sparse_gradients() -> None:
    for way in WAYS:
        compared("data", mc.launch(gradients, ranks=4, args=("data", "sum", way, F64, True)), "sum", F64, sparse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_they_are_rounded_each_time(kind: str) -> None:
    found, _ = joined(kind, mc.launch(gradients, ranks=4, args=(kind, "sum", last_outside, None)))
    name = "blocks.0.weight"
    assert (found[name].double() - expected("sum", F64)[name].flatten()).abs().max() > 1e-3


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("kind", KINDS)
def test_added_up_in_one_dtype_and_reduced_in_another(kind: str) -> None:
    """Rounded once per rank, not once per microbatch."""

    def main() -> Any:
        mesh = mc.make_mesh({"rep": 2, "dp": 2})
        with mc.use_mesh(mesh):
            model = made(kind, "sum", F32, reduce_dtype=BF16)
            with no_sync(model):
                for _ in range(256):  # of which bfloat16 would lose all after the first
                    (loss_of(model, 0, 0) * (1 if _ == 0 else 2**-9)).backward()
            reduce_gradients(model)
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, torch.zeros(())

    found, _ = joined(kind, mc.launch(main, ranks=4))
    model = net()
    loss_of(model, 0, 0).backward()
    for name in ("blocks.0.weight", "norm.weight"):
        g = model.get_parameter(name).grad
        assert g is not None
        assert found[name].dtype == F32
        assert_close(found[name], 4 * (1 + 255 / 512) * g.float().flatten(), rtol=2e-2, atol=1e-2)


def test_copies_and_modules_that_change() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"rep": 1, "dp": 2})
        with mc.use_mesh(mesh):
            for kind in ("data", "sharded", "replicas"):
                model = copy.deepcopy(made(kind, "sum", F32))
                for again in (model, copy.deepcopy(model), model.to(BF16)):
                    again.load_state_dict(again.state_dict(), assign=True)
                    loss_of(again, 0, mesh.rank).backward()
                    with no_sync(again):
                        loss_of(again, 0, mesh.rank).backward()
                    reduce_gradients(again)
                    assert {p.grad.dtype for p in again.parameters() if p.grad is not None} == {F32}
                model.double()
                model.zero_grad()
                loss_of(model, 0, mesh.rank).backward()
                assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F64}

    mc.launch(main, ranks=2)


def test_what_was_there_before_is_kept() -> None:
    def main() -> list[Any]:
        mesh = mc.make_mesh({"dp": 2})
        layer = nn.Linear(1, 1, bias=False, dtype=BF16)
        layer.weight.grad = torch.ones(1, 1, dtype=BF16)
        data_parallel(layer, "dp", grads="sum", accumulate_dtype=F32, mesh=mesh)
        layer(torch.full((1, 1), 2**-10, dtype=BF16)).sum().backward()
        assert layer.weight.grad is not None
        return [layer.weight.grad.item(), layer.weight.grad.dtype]

    assert mc.launch(main, ranks=2) == [[1 + 2**-9, F32]] * 2


@pytest.mark.parametrize("adaptor", [data_parallel, fully_shard])
def test_bad_dtypes(adaptor: Any) -> None:
    mesh = mc.make_mesh({"dp": 1})
    for bad in (torch.int32, "float32", torch.complex64, 32):
        with pytest.raises(mc.MeshError, match="accumulate_dtype=.* is not a"):
            adaptor(nn.Linear(2, 2), "dp", grads="sum", accumulate_dtype=bad, mesh=mesh)
    for own, wide in ((F32, BF16), (F64, F32), (torch.float16, BF16), (torch.complex64, F32)):
        module = nn.Sequential(nn.Linear(2, 2, dtype=own))
        with pytest.raises(mc.MeshError, match=r"has not all that .* has, which parameter '0.weight'"):
            adaptor(module, "dp", grads="sum", accumulate_dtype=wide, mesh=mesh)
        adaptor(module, "dp", grads="sum", mesh=mesh)  # nothing was done


def of_optimizer(
    name: str, adaptor: Any, options: dict[str, Any], shard: bool = False, wide: bool = True
) -> list[Tensor]:
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh):
        model = nn.Linear(4, 4, bias=False, dtype=BF16)
        nn.init.constant_(model.weight, 0.5)
        if adaptor is None and wide:
            model.weight.grad_dtype = F32
        make = getattr(torch.optim, name)
        early = make(model.parameters(), lr=0.01, **options) if name == "Muon" else None  # of slices torch makes none
        if adaptor is not None:
            adaptor(model, "dp", grads="mean", accumulate_dtype=F32)
        optimizer = early or make(model.parameters(), lr=0.01, **options)
        if shard:
            mc.parallel.shard_optimizer(optimizer, "dp")
        x = torch.tensor([[1.0, 2.0, 3.0, -1.0]], dtype=BF16)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) * torch.tensor([1.0, 2.0, 0.5, 0.25], dtype=BF16)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if name in ("LBFGS", "Adam"):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32 if wide else BF16}
        return [*mc.parallel.full_state_dict(model).values()] if adaptor else [model.weight.detach()]


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adafactor", "Muon", "LBFGS"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("adaptor", [data_parallel, fully_shard])
def test_optimizers(adaptor: Any, name: str) -> None:
    """As on one rank with such gradients, or with rounded ones where torch's step takes no others."""
    for options in [{"fused": True}, {}] if name in ("Adam", "AdamW") else [{}]:
        takes = not options and name not in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
        alone = mc.launch(of_optimizer, ranks=2, args=(name, None, options, False, takes))
        found = mc.launch(of_optimizer, ranks=2, args=(name, adaptor, options))
        assert_close(found, alone, rtol=2e-2, atol=1e-2)
    if adaptor is data_parallel and name != "LBFGS":
        assert_close(mc.launch(of_optimizer, ranks=2, args=(name, adaptor, {}, True)), found, rtol=0, atol=0)
