"""mean_over: experts, whose tokens come from more ranks than their gradients are reduced over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import data_parallel, fully_shard, no_sync, reduce_gradients
from meshcomm.parallel.cut_parameters import places_of
from meshcomm.parallel.global_places import Place

F64 = torch.float64
ROWS, D = 16, 4
BOTH = ("fs", "ep")


class Net(nn.Module):
    """A dense layer and an expert per index of ``ep``, each of which gets an even share of the rows of every rank."""

    def __init__(self, own: int | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.dense = nn.Linear(D, D).to(F64)
            every = [nn.Linear(D, D).to(F64) for _ in range(2)]
        self.own = own
        self.experts = nn.ModuleList(every if own is None else [every[own]])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        if self.own is not None:
            sent = mc.all_to_all(x, "ep", 0, 0)
            return mc.all_to_all(self.experts[0](sent), "ep", 0, 0)
        parts = x.unflatten(0, (4, 2, -1))  # by rank, and by expert
        return torch.stack([expert(parts[:, at]) for at, expert in enumerate(self.experts)], 1).flatten(0, 2)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, D, dtype=F64, generator=generator) for _ in range(3)]


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().sum(-1).mean()
    return loss


def steps(net: nn.Module, parts: list[Tensor]) -> None:
    """SGD, for AdamW would not see a factor."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in parts:
        sgd.zero_grad()
        loss_of(net, x).backward()
        sgd.step()


def alone() -> list[dict[str, Tensor]]:
    net = Net(None)
    steps(net, batches())
    return [part.state_dict() for part in (net.dense, *net.experts)]


def said(net: Net) -> None:
    fully_shard(net.experts, "fs", grads="mean", mean_over=BOTH)
    data_parallel(net.dense, BOTH, grads="mean")


def in_another_order(net: Net) -> None:
    data_parallel(net.dense, BOTH, grads="mean")
    data_parallel(net.experts[0], "fs", grads="mean", mean_over=("ep", "fs"))


def known_from_around(net: Net) -> None:
    data_parallel(net.experts[0], "fs", grads="mean")
    fully_shard(net, BOTH, grads="mean", ignore=["experts.*"])


def known_from_around_later(net: Net) -> None:
    fully_shard(net, BOTH, grads="mean", ignore=["experts.*"])
    data_parallel(net.experts[0], "fs", grads="mean")


def known_from_around_sharded(net: Net) -> None:
    fully_shard(net, BOTH, grads="mean", ignore=["experts.*"])
    fully_shard(net.experts, "fs", grads="mean")


def kept_over_replicas(net: Net) -> None:
    fully_shard(net.experts, "fs", grads="mean", mean_over=BOTH)
    fully_shard(net.dense, "fs", grads="mean", replica_axis="ep")


def named(net: Net) -> None:
    fully_shard(net, BOTH, grads="mean", axes={"experts": "fs"})


def named_in_data_parallel(net: Net) -> None:
    data_parallel(net, BOTH, grads="mean", axes={"experts.*": "fs"}, bucket_mb=1e-4)


def marked(net: Net) -> None:
    mc.mark_varying(net.experts, "ep")
    fully_shard(net, "fs", grads="mean", replica_axis="ep")


def marked_in_data_parallel(net: Net) -> None:
    mc.mark_varying(net.experts, "ep")
    data_parallel(net, BOTH, grads="mean")


def sharded_over_none(net: Net) -> None:
    fully_shard(net, "ep", grads="mean", replica_axis="fs", axes={"experts": ()})


WAYS = [
    named,
    named_in_data_parallel,
    marked,
    marked_in_data_parallel,
    sharded_over_none,
    said,
    in_another_order,
    known_from_around,
    known_from_around_later,
    known_from_around_sharded,
    kept_over_replicas,
]


def whole(net: nn.Module, part: nn.Module, axis: Any) -> dict[str, Tensor]:
    """However it is cut, if it is."""
    places, found = places_of(net), {}
    for name, p in part.named_parameters():
        spread = places.get(id(p), Place(p.shape)).of(p)
        both = torch.zeros(2, *spread.shape, dtype=F64)  # the values, and who has them
        for box in spread.boxes:
            at = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            both[0][at], both[1][at] = box.view, 1
        total = mc.all_reduce(both, axis)
        found[name] = total[0] / total[1]
    return found


def on_mesh(way: Any) -> tuple[int, list[dict[str, Tensor]]]:
    mesh = mc.make_mesh({"fs": 2, "ep": 2})
    with mc.use_mesh(mesh):
        net = Net(mesh.coordinate["ep"])
        way(net)
        steps(net, [mc.shard(x, BOTH) for x in batches()])
        with torch.no_grad():
            found = [whole(net, net.dense, BOTH), whole(net, net.experts[0], "fs")]
        return mesh.coordinate["ep"], found


@pytest.mark.parametrize("way", WAYS)
def test_three_steps_are_those_of_one_rank(way: Any) -> None:
    dense, *experts = alone()
    for own, found in mc.launch(on_mesh, ranks=4, args=(way,)):
        assert_close(found[0], dict(dense), rtol=1e-9, atol=1e-9)
        assert_close(found[1], dict(experts[own]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [named, marked_in_data_parallel])
def test_on_processes(pool4: Any, way: Any) -> None:
    dense, *experts = alone()
    for own, found in pool4.run(on_mesh, way):
        assert_close(found[0], dict(dense), rtol=1e-9, atol=1e-9)
        assert_close(found[1], dict(experts[own]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("maker", [data_parallel, fully_shard])
@pytest.mark.parametrize("collected", [False, True])
def test_a_share_of_the_mean(maker: Any, collected: bool) -> None:
    """In every way in which gradients are reduced."""
    mesh = mc.make_mesh({"fs": 2, "ep": 4})

    def main() -> float:
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        maker(net, "fs", grads="mean", mean_over=BOTH, mesh=mesh)
        for at in range(2):
            if collected:
                with no_sync(net):
                    net(torch.ones(1, 1)).sum().backward()
            else:
                net(torch.ones(1, 1)).sum().backward()
            if at:
                reduce_gradients(net)
        return net.weight.grad.sum().item() if net.weight.grad is not None else 0.0

    found = mc.launch(main, ranks=8)
    assert max(found) == 0.5
    assert set(found) <= {0.0, 0.5}


def marked_on_one_rank() -> None:
    mesh = mc.make_mesh({"fs": 2, "ep": 2})
    with mc.use_mesh(mesh):
        net = Net(0)
        if mesh.rank == 2:
            mc.mark_varying(net.experts, "ep")
        with pytest.raises(mc.MeshError, match="go over other axes on one rank"):
            data_parallel(net, BOTH, grads="sum")


def test_marks_that_differ_are_said_on_all_ranks() -> None:
    mc.launch(marked_on_one_rank, ranks=4)


def test_transforms() -> None:
    mesh = mc.make_mesh({"fs": 2, "ep": 4})

    def main() -> float:
        net = nn.Linear(1, 1, bias=False)
        data_parallel(net, "fs", grads="mean", mean_over=BOTH, mesh=mesh)
        loss = lambda p: torch.func.functional_call(net, p, (torch.ones(1, 1),)).sum()  # noqa: E731
        found: float = torch.func.grad(loss)(dict(net.named_parameters()))["weight"].item()
        return found

    assert mc.launch(main, ranks=8) == [0.25] * 8


def sent(x: Tensor, how: str) -> Tensor:
    if how == "later":
        return mc.all_to_all(x, "ep", 0, 0, async_op=True).wait()
    if how == "tree":
        return mc.all_to_all([x], "ep", 0, 0)[0]
    x = mc.all_to_all(x, BOTH if how == "both" else "fs" if how == "known" else "ep", 0, 0)
    if how == "moved":
        return x.view(2, 2, D).transpose(0, 1).reshape(4, D)[torch.tensor([3, 0, 1, 2])]
    return torch.tanh(x) if how == "computed" else x


SENT = {"plain": "'ep'", "later": "'ep'", "tree": "'ep'", "moved": "'ep'", "both": r"\('fs', 'ep'\)"}


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("maker", [data_parallel, fully_shard])
@pytest.mark.parametrize("how", [*SENT, "known", "computed"])
def test_who_does_not_say_what_the_mean_is_over(maker: Any, how: str) -> None:
    """Is refused where tokens have just come from ranks that are not averaged over; once it was said, it is not."""

    def main(said: dict[str, Any]) -> None:
        with mc.use_mesh(mc.make_mesh({"fs": 2, "ep": 2})):
            net = Net(0)
            maker(net.experts[0], "fs", **said)
            with torch.no_grad():
                net.experts[0](torch.ones(4, D, dtype=F64))
            net.experts[0](sent(net.dense(torch.ones(4, D, dtype=F64)), how)).sum().backward()

    for said in ({"grads": "sum"}, {"grads": "mean", "mean_over": "fs"}, {"grads": "mean", "mean_over": BOTH}):
        mc.launch(main, ranks=4, args=(said,))
    if how not in SENT:
        mc.launch(main, ranks=4, args=({"grads": "mean"},))
        return
    with pytest.raises(mc.MeshError, match=f"come by all_to_all over axis {SENT[how]}") as refused:
        mc.launch(main, ranks=4, args=({"grads": "mean"},))
    assert "mean_over=('fs', 'ep')" in str(refused.value)
    assert "mean_over='fs'" in str(refused.value)
