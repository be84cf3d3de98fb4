"""What ranks of one process may share: data, constants and what is frozen; not what two of them train or write."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import parallel

TRAINED = r"(?s)a leaf is shared by ranks that train it.*gradients on ranks \d and \d.*copy\.deepcopy it, inside"
WRITTEN = r"(?s)a leaf is written that ranks share.*written on rank \d, used on rank \d.*copy\.deepcopy it, inside"


def mesh_of(n: int = 2) -> mc.Mesh:
    return mc.make_mesh({"dp": n})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()


def batch(mesh: mc.Mesh) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) + (mesh.rank or 0)


# -------------------------------------------------------------------------------------------------------- that train it


def backward(net: nn.Module) -> None:
    mesh = mesh_of()
    mc.all_reduce(net(batch(mesh)).sum(), "dp", mesh=mesh).backward()


def backward_first(net: nn.Module) -> None:
    """No collective before, nor one in the graph."""
    net(batch(mesh_of())).sum().backward()


def by_hand(net: nn.Module) -> None:
    """DDP as many write it."""
    mesh = mesh_of()
    net(batch(mesh)).sum().backward()
    for p in net.parameters():
        p.grad = mc.all_reduce(p.grad, "dp", "mean", mesh=mesh)


def with_pvary(net: nn.Module) -> None:
    mesh = mesh_of()
    weights = mc.pvary(dict(net.named_parameters()), "dp", mesh=mesh)
    y = torch.func.functional_call(net, weights, batch(mesh))
    mc.all_reduce(y.sum(), "dp", mesh=mesh).backward()


def some_inputs(net: nn.Module) -> None:
    mesh = mesh_of()
    y = mc.all_reduce(net(batch(mesh)).sum(), "dp", mesh=mesh)
    torch.autograd.backward([y], inputs=list(net.parameters())[:1])


def in_a_checkpoint(net: nn.Module) -> None:
    mesh = mesh_of()
    x = batch(mesh).requires_grad_()
    mc.all_reduce(checkpoint(net, x, use_reentrant=True).sum(), "dp", mesh=mesh).backward()


def last_layer(net: nn.Module) -> None:
    mesh = mesh_of()
    y = net[2](copy.deepcopy(net[:2])(batch(mesh)))
    mc.all_reduce(y.sum(), "dp", mesh=mesh).backward()


PROGRAMS = [backward, backward_first, by_hand, with_pvary, some_inputs, in_a_checkpoint, last_layer]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_made_outside_and_trained_by_two_ranks_is_refused(program: Callable[[nn.Module], None]) -> None:
    with pytest.raises(mc.MeshError, match=TRAINED):
        mc.launch(program, ranks=2, args=(model(),))
    mc.launch(lambda: program(model()), ranks=2)
    net = model()
    mc.launch(lambda: program(copy.deepcopy(net)), ranks=2)
    assert all(p.grad is None for p in net.parameters())


class Holder:
    net = model()

    def step(self) -> None:
        backward(self.net)


BOX: dict[str, nn.Module] = {}


def made_by_the_first() -> None:
    mesh = mesh_of()
    if mesh.rank == 0:
        BOX["net"] = model()
    mc.barrier("dp", mesh=mesh)
    backward(BOX["net"])


def test_however_it_is_reached() -> None:
    ways: list[Callable[[], Any]] = [
        Holder().step, functools.partial(backward, model()), functools.partial(backward, net=model()), made_by_the_first,
        lambda net=model(): backward(net), lambda: [backward(each) for each in [Holder.net]],
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(mc.MeshError, match=TRAINED):
            mc.launch(way, ranks=2)


def test_what_was_computed_outside_leads_to_its_leaves() -> None:
    w = torch.ones(3, requires_grad=True)
    h = w * 2
    with pytest.raises(mc.MeshError, match=TRAINED):
        mc.launch(lambda: mc.all_reduce(h.sum(), "dp", mesh=mesh_of()).backward(retain_graph=True), ranks=2)


# ------------------------------------------------------------------------------------------------------ that make it parallel


WRAPS: list[Callable[..., Any]] = [
    lambda net, mesh: parallel.data_parallel(net, "dp", grads="mean", mesh=mesh),
    lambda net, mesh: parallel.fully_shard(net, "dp", grads="mean", mesh=mesh),
    lambda net, mesh: parallel.tensor_parallel(net, {"0": "column", "2": "row"}, axis="dp", mesh=mesh),
    lambda net, mesh: parallel.data_parallel(net.requires_grad_(False), "dp", grads="mean", mesh=mesh),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_module_that_two_ranks_make_parallel_is_refused(wrap: Callable[..., Any]) -> None:
    net = model()
    with pytest.raises(mc.MeshError, match=r"(?s)parallel|fully_shard: a module is shared by ranks.*of ranks 0 and 1"):
        mc.launch(lambda: wrap(net, mesh_of()), ranks=2)
    mc.launch(lambda: wrap(model(), mesh_of()), ranks=2)


# -------------------------------------------------------------------------------------------------------------- that write it


def steps(w: Tensor, update: Callable[[Tensor, Tensor], object], count: int = 2) -> Tensor:
    mesh = mesh_of()
    for _ in range(count):
        loss = mc.all_reduce((mc.pvary(w, "dp", mesh=mesh) * (1.0 + mesh.rank)).square().sum(), "dp", mesh=mesh)
        (g,) = torch.autograd.grad(loss, w)
        new = update(w, g)
        w = new if isinstance(new, Tensor) else w
        mc.barrier("dp", mesh=mesh)
    return w.detach()


def in_place(w: Tensor, g: Tensor) -> None:
    with torch.no_grad():
        w -= 0.1 * g


def by_an_optimizer(w: Tensor, g: Tensor) -> None:
    w.grad = g
    torch.optim.SGD([w], lr=0.1).step()
    w.grad = None


def copied(w: Tensor, g: Tensor) -> None:
    with torch.no_grad():
        w.copy_(w - 0.1 * g)


@pytest.mark.parametrize("update", [in_place, by_an_optimizer, copied])
@pytest.mark.parametrize("count", [1, 2])
def test_a_leaf_that_is_written_in_place_is_refused(update: Callable[[Tensor, Tensor], object], count: int) -> None:
    with pytest.raises(mc.MeshError, match=WRITTEN):
        mc.launch(steps, ranks=2, args=(torch.ones(3, requires_grad=True), update, count))
    mc.launch(lambda: steps(torch.ones(3, requires_grad=True), update, count), ranks=2)


# -------------------------------------------------------------------------------------------------------- what may be shared


def test_what_is_only_read_may_be_shared() -> None:
    """Also what is differentiated, the way of JAX: each rank has a gradient of its own and makes new weights."""
    w = torch.ones(3, requires_grad=True)
    first, second = mc.launch(lambda: steps(w, lambda w, g: (w - 0.1 * g).detach().requires_grad_()), ranks=2)
    assert torch.equal(first, second)
    assert torch.equal(w, torch.ones(3))

    frozen, data = model().requires_grad_(False), torch.ones(2, 3, dtype=torch.float64)

    def main() -> float:
        mesh = mesh_of()
        own = nn.Linear(1, 1).double()
        loss = mc.all_reduce(own(frozen(data)).sum(), "dp", mesh=mesh)
        loss.backward()
        return loss.item()

    mc.launch(main, ranks=2)


def test_one_rank_may_train_what_another_one_has() -> None:
    net = model()
    mc.launch(lambda: mesh_of().rank or net(batch(mesh_of())).sum().backward(), ranks=2)
    assert all(p.grad is not None for p in net.parameters())
    # and another launch is another matter
    mc.launch(lambda: mesh_of().rank and net(batch(mesh_of())).sum().backward(), ranks=2)


def test_shard_map_shares_what_it_closes_over() -> None:
    net, mesh = model(), mesh_of()
    fn = mc.shard_map(lambda x: net(x), mesh=mesh, in_specs="(dp b) d", out_specs="(dp b) d")
    x = torch.randn(4, 3, dtype=torch.float64)
    fn(x).sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).sum().backward()
    for a, b in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


def test_outside_of_launches_nothing_is_watched() -> None:
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    mc.launch(lambda: None, ranks=2)
    with pytest.raises(ValueError, match="boom"):
        mc.launch(lambda: (_ for _ in ()).throw(ValueError("boom")), ranks=2)
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]
