"""Adaptors within adaptors: what one has cut another may not take to be the same, in any order; what went before them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, data_parallel, full_state_dict, fully_shard, tensor_parallel

F64, ROWS, D = torch.float64, 8, 4
PLAN: dict[str, Any] = {"norm": "replicated", "up": "column", "down": "row"}
BOTH = ("a", "b")
Wrap = Callable[["Net"], object]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Has a part in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(D, D), Part(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.part(self.first(x)))
        return y


def ddp(axis: Any) -> Wrap:
    return lambda net: data_parallel(net, axis, grads="mean")


def shard(axis: Any, **more: Any) -> Wrap:
    return lambda net: fully_shard(net, axis, grads="mean", **more)


def split(net: Net) -> object:
    return tensor_parallel(net.part, PLAN, axis="b")


def inside(wrap: Callable[[Any], object]) -> Wrap:
    return lambda net: wrap(net.part)


def trained(data: tuple[str, ...], wraps: tuple[Wrap, ...]) -> list[dict[str, Tensor]]:
    """Whole parameters after three steps on a 2 x 2 mesh; each rank has the rows of its place along ``data``."""

    def main() -> dict[str, Tensor]:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        with mc.use_mesh(mesh):
            torch.manual_seed(0)
            net = Net().to(F64)
            for wrap in wraps:
                wrap(net)
            return learn(net, lambda x: mc.shard(x, data) if data else x, lambda: full_state_dict(net))

    return mc.launch(main, ranks=4)


def learn(net: nn.Module, rows: Callable[[Tensor], Tensor], state: Callable[[], Any]) -> dict[str, Tensor]:
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step), dtype=F64)
        adam.zero_grad()
        net(rows(x)).square().mean().backward()
        adam.step()
    return {name: x.detach().clone() for name, x in state().items()}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = Net().to(F64)
    return learn(net, lambda x: x, net.state_dict)


RIGHT: dict[str, tuple[tuple[str, ...], tuple[Wrap, ...]]] = {
    "tensor parallel in sharded": (("a",), (split, shard("a"))),
    "tensor parallel in a sharded unit": (("a",), (split, shard("a", units=["part"]))),
    "tensor parallel in data parallel": (("a",), (split, ddp("a"))),
    "data parallel, then tensor parallel in it": (("a",), (ddp("a"), split)),
    "data parallel in sharded": (BOTH, (inside(ddp(BOTH)), shard("a", replica_axis="b"))),
    "data parallel in data parallel": (BOTH, (ddp(BOTH), inside(ddp(BOTH)))),
    "sharded in sharded": (BOTH, (inside(shard("b", replica_axis="a")), shard(BOTH))),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("case", RIGHT)
def test_training_is_that_of_one_rank(case: str, one_rank: dict[str, Tensor]) -> None:
    for state in trained(*RIGHT[case]):
        assert_close(state, one_rank, rtol=0, atol=1e-9)


REFUSED: dict[str, tuple[str, tuple[Wrap, ...]]] = {
    "tensor, data": ("'up.weight' is cut along axis 'b' by tensor_parallel", (split, ddp(BOTH))),
    "tensor, sharded": ("'up.weight' is cut along axis 'b' by tensor_parallel", (split, shard(BOTH))),
    "tensor, replicas": ("be the same along axis 'b'", (split, shard("a", replica_axis="b"))),
    "tensor, tensor": (
        "and would be taken to be the same along axis 'b'",
        (split, lambda net: tensor_parallel(net, {"*": "replicated"}, axis="b")),
    ),
    "data, tensor": ("the module is part of one that is data parallel", (ddp(BOTH), split)),
    "data, sharded part": ("the module is part of one that is data parallel", (ddp(BOTH), inside(shard("a")))),
    "data, sharded": ("the module is data parallel", (ddp("a"), shard("b"))),
    "sharded part, data": ("the module's parameters are sharded", (inside(shard("b")), ddp("a"))),
    "sharded, tensor": ("the module's parameters are sharded", (shard("a"), split)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_cut_is_not_taken_to_be_the_same(case: str) -> None:
    text, wraps = REFUSED[case]
    with pytest.raises(mc.MeshError, match=text):
        trained((), wraps)


def test_a_part_says_what_was_made_of_it_with_what_is_around() -> None:
    def main() -> bool:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        with mc.use_mesh(mesh):
            net = Net()
            split(net)
            fully_shard(net, "a", grads="mean")
            kept = {name: x.clone() for name, x in net.part.state_dict().items()}
            mine = net.part.state_dict()
            net.part.load_state_dict(mine)
            for other in range(4):
                theirs = mc.broadcast_object(mine if mesh.rank == other else None, BOTH, other)
                if other != mesh.rank:
                    with pytest.raises(mc.MeshError, match="is a slice of another rank"):
                        net.part.load_state_dict(theirs)
            return all(torch.equal(kept[name], x) for name, x in net.part.state_dict().items())

    assert all(mc.launch(main, ranks=4))


# ------------------------------------------------------------------------------------------ before a module is wrapped


WAYS: dict[str, Callable[[Any], object]] = {
    "data_parallel": lambda net: data_parallel(net, "a", grads="mean"),
    "fully_shard": lambda net: fully_shard(net, "a", grads="mean"),
    "tensor_parallel": lambda net: tensor_parallel(net, PLAN, axis="a"),
    "both": lambda net: fully_shard(tensor_parallel(net, PLAN, axis="a"), "b", grads="mean"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_and_gradients_from_before(way: str) -> None:
    def main() -> float:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 1})):
            torch.manual_seed(0)
            net, x = Part(), torch.ones(3, D)
            loss = net(x).sum()  # somebody holds it
            loss.backward(retain_graph=True)
            if way == "data_parallel":
                net.zero_grad()
            WAYS[way](net)
            net(x).sum().backward()
            assert loss.requires_grad
            return float(clip_grad_norm(net, 1e9))

    torch.manual_seed(0)
    net = Part()
    net(torch.ones(3, D)).sum().backward()
    whole = float(nn.utils.clip_grad_norm_(net.parameters(), 1e9))
    for norm in mc.launch(main, ranks=2):
        assert norm == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("units", [None, ["part"], ["first", "part.up"]], ids=str)
def test_a_weight_that_hooks_make_of_others(units: list[str] | None) -> None:
    def normed() -> Net:
        torch.manual_seed(0)
        net = Net().to(F64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of the name
            weight_norm(net.part.up)
        return net

    def main() -> dict[str, Tensor]:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            net = fully_shard(normed(), "a", grads="mean", units=units)
            return learn(net, lambda x: mc.shard(x, "a"), lambda: full_state_dict(net))

    whole = normed()
    expected = learn(whole, lambda x: x, whole.state_dict)
    for state in mc.launch(main, ranks=2):
        assert_close(state, expected, rtol=0, atol=1e-9)
