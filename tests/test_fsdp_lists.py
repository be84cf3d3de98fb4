"""fully_shard of a list: modules that are one unit, gathered by the first that runs, kept until the last one has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    data_parallel,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    no_sync,
    reduce_gradients,
)

RANKS, WIDTH, WORDS = 2, 8, 11


class Tied(nn.Module):
    """Its head is its table, or is not called."""

    def __init__(self, headless: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(WORDS, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.head, self.headless = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False), headless
        self.head.weight = self.table.weight
        self.norm.weight.requires_grad_(not frozen)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.middle:
            x = x + layer(x).relu()
        x = self.norm(x)
        return x if self.headless else self.head(x)


def model(**options: bool) -> Tied:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tied(**options).double()


def batch(step: int, index: int) -> Tensor:
    return (torch.arange(6) * 5 + step + 3 * index) % WORDS


def train(net: nn.Module, among: range) -> None:
    adam = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        adam.zero_grad()
        (sum(net(batch(step, index)).logsumexp(-1).mean() for index in among) / len(among)).backward()
        with torch.no_grad():
            net(batch(step, 0))
        adam.step()


def listed(state: Any, options: Any, fsdp: Any, ranks: int = RANKS) -> list[int]:
    mesh = mc.make_mesh({"fs": ranks})
    net, said = model(**options), {"axis": "fs", "grads": "mean", "mesh": mesh, **fsdp}
    fully_shard([net.table, net.norm, net.head], **said)
    fully_shard(net, **said)
    train(net, range(mesh.rank, mesh.rank + 1))
    assert_close(full_state_dict(net), state, rtol=0, atol=1e-12)
    load_full_state_dict(net, state)
    assert_close(full_state_dict(net), state, rtol=0, atol=0)
    with mc.trace() as seen:
        net(batch(0, mesh.rank)).sum().backward()
    calls = [event.operation for event in seen.events]
    return [calls.count("all_gather"), calls.count("reduce_scatter")]


@pytest.mark.parametrize(
    ("options", "fsdp", "expected"),
    [
        ({}, {}, [2 + 1, 2]),  # the list, also in backward, and the model itself
        ({}, {"regather": False}, [2, 2]),
        ({"headless": True}, {}, [2 + 1, 2]),
        ({"frozen": True}, {}, [4 + 1, 2]),  # what is frozen goes by itself
    ],
)
def test_a_list_is_one_unit(options: Any, fsdp: Any, expected: list[int]) -> None:
    alone = model(**options)
    train(alone, range(RANKS))
    assert mc.launch(listed, RANKS, args=(alone.state_dict(), options, fsdp)) == [expected] * RANKS


def test_processes(pool4: Any) -> None:
    alone = model()
    train(alone, range(4))
    assert pool4.run(listed, alone.state_dict(), {}, {}, 4) == [[2 + 1, 2]] * 4


def pair() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU()).double(), nn.Linear(8, 4).double()


def rows(index: int) -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).sin().view(3, 4) + index


def alone_in_a_list() -> None:
    """With no module around them: backward between them, under no_sync, one of them alone, twice."""
    mesh = mc.make_mesh({"fs": RANKS})
    ends = pair()
    assert fully_shard(ends, "fs", grads="mean", mesh=mesh) is ends
    first, last = ends
    wanted = pair()
    x = rows(mesh.rank)
    with mc.trace() as seen:
        last(first(x)).square().sum().backward()
    assert [event.operation for event in seen.events] == ["all_gather", "reduce_scatter", "all_reduce"]
    y = first(x)
    y.sum().backward()
    last(y.detach()).sum().backward()
    with no_sync(first):
        last(first(x) + first(-x)).sum().backward()
    reduce_gradients(last)
    for index in range(RANKS):
        here = rows(index)
        between = wanted[0](here)
        losses = [
            wanted[1](between).square().sum(),
            between.sum(),
            wanted[1](between.detach()).sum(),
            wanted[1](wanted[0](here) + wanted[0](-here)).sum(),
        ]
        (torch.stack(losses).sum() / RANKS).backward()
    for module, twin in zip(ends, wanted, strict=True):
        for p in [*module.parameters(), *twin.parameters()]:
            assert p.grad is not None
            with torch.no_grad():
                p.copy_(p.grad)
        assert_close(full_state_dict(module), twin.state_dict(), rtol=0, atol=1e-12)


def test_alone() -> None:
    mc.launch(alone_in_a_list, RANKS)


def written() -> None:
    """What a part has written to what was gathered is refused, and is not there the next time."""
    mesh = mc.make_mesh({"fs": RANKS})
    first, last = pair()
    wanted = first(rows(0))
    fully_shard([first, last], "fs", grads="mean", mesh=mesh)
    with torch.no_grad():
        writes = first[0].register_forward_hook(lambda module, *_: nn.init.zeros_(module.weight) * 0)
        with pytest.raises(mc.MeshError, match="written in place"):
            first(rows(0))
        writes.remove()
        assert_close(first(rows(0)), wanted.detach())


def test_written() -> None:
    mc.launch(written, RANKS)


def refused() -> None:
    said: dict[str, Any] = {"axis": "fs", "grads": "mean", "mesh": mc.make_mesh({"fs": RANKS})}
    one, around = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    spread = data_parallel(nn.Linear(2, 2), "fs", grads="mean", mesh=said["mesh"])
    done, half = fully_shard(nn.Linear(2, 2), **said), nn.Linear(2, 2)
    fully_shard([nn.Linear(2, 2), half], **said)
    for odd, text in [
        ([one, one], "0 and 1 of the list are one"),
        ([around, around[0]], "0 and 1 of the list are one"),
        ([], "no modules"),
        ([one, 1], "not a torch.nn"),
        ([one, done], "is sharded already"),
        ([one, spread], "data parallel"),
        (nn.Sequential(half), "'0' was sharded in one list with a Linear that is no part"),
    ]:
        with pytest.raises(mc.MeshError, match=text):
            fully_shard(odd, **said)  # type: ignore[type-var]


def test_refused() -> None:
    mc.launch(refused, RANKS)
