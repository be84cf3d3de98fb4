"""Data, fully sharded and tensor parallelism at once, with dropout: ten steps of training are those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, relu, scaled_dot_product_attention
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    Column,
    clip_grad_norm,
    data_parallel,
    full_state_dict,
    fully_shard,
    tensor_parallel,
    vocab_cross_entropy,
)

F64 = torch.float64
B, S, D, H, V = 8, 8, 16, 4, 24
PLAN: dict[str, Any] = {
    "token": "vocab", "position": "split", "*.qkv": Column(parts=3), "*.proj": "row", "*.up": "column", "*.down": "row",
    "*norm*": "sequence", "head": "column",
}  # fmt: skip
Drop = Callable[[Tensor, int], Tensor]


class Block(nn.Module):
    """Drops elements of what it adds to the residual stream."""

    def __init__(self, number: int, drop: Drop) -> None:
        super().__init__()
        self.number, self.drop = number, drop
        self.norm1, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (-1, D // H)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)), 2 * self.number)
        return x + self.drop(self.down(relu(self.up(self.norm2(x)))), 2 * self.number + 1)


class Model(nn.Module):
    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.Sequential(*(Block(number, drop) for number in range(2)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Dropping:
    """A tenth of the elements of the whole residual stream, the same on every mesh."""

    def __init__(self, layout: str) -> None:
        self.layout, self.step = layout, 0

    def __call__(self, x: Tensor, place: int) -> Tensor:
        with mc.rng(self.layout, seed=(3, self.step, place)):
            return dropout(x, 0.1)


def seeded(drop: Drop) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(drop).to(F64)


def tokens(step: int) -> Tensor:
    return torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, drop: Dropping, loss_of: Callable[[Tensor], Tensor], clip: Callable[[], Tensor], steps: int = 10
) -> list[tuple[float, float]]:
    """The losses and the norms of the gradients."""
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    found = []
    for drop.step in range(steps):
        loss = loss_of(tokens(drop.step))
        adam.zero_grad()
        loss.backward()
        found.append((loss.item(), clip().item()))
        adam.step()
    return found


@functools.cache
def alone() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    mesh = mc.make_mesh({"one": 1})
    with mc.use_mesh(mesh):
        drop = Dropping("(one b) s d")
        model = seeded(drop)

        def loss(rows: Tensor) -> Tensor:
            return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

        found = train(model, drop, loss, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        return found, {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_mesh(axes: dict[str, int]) -> tuple[list[tuple[float, float]], dict[str, Tensor] | None]:
    mesh = mc.make_mesh(axes)
    rows_over = tuple(axis for axis in axes if axis != "tp")
    with mc.use_mesh(mesh):
        drop = Dropping(f"({' '.join(rows_over)} b) (tp s) d" if "tp" in axes else f"({' '.join(rows_over)} b) s d")
        model = seeded(drop)
        if "tp" in axes:
            tensor_parallel(model, PLAN, axis="tp", sequence=True)
        if "fsdp" in axes:
            replica = "replica" if "replica" in axes else None
            fully_shard(model, "fsdp", grads="sum", replica_axis=replica, units=[Block])
        else:
            data_parallel(model, "dp", grads="sum")

        def loss(rows: Tensor) -> Tensor:
            mine = mc.shard(rows, rows_over)
            logits, target = model(mine[:, :-1]), mine[:, 1:]
            if "tp" in axes:
                each = vocab_cross_entropy(logits, target, axis="tp", reduction="sum")
            else:
                each = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            return mc.all_reduce(each, rows_over) / (B * S)

        def clip() -> Tensor:
            return clip_grad_norm(model, 0.5)

        found = train(model, drop, loss, clip)
        return found, full_state_dict(model)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2}, {"fsdp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "fsdp": 2, "tp": 2},
        *(pytest.param(axes, marks=pytest.mark.thorough)
          for axes in ({"replica": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 4})),
    ],
    ids=lambda axes: " x ".join(f"{name}={size}" for name, size in axes.items()),
)  # fmt: skip
def test_ten_steps_are_those_of_one_rank(axes: dict[str, int]) -> None:
    expected, parameters = alone()
    ranks = 1
    for size in axes.values():
        ranks *= size
    results = mc.launch(on_mesh, ranks=ranks, args=(axes,))
    for found, _ in results:
        assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-11)
    state = results[0][1]
    assert state is not None
    assert_close(state, parameters, rtol=1e-8, atol=1e-10)


def test_ten_steps_on_processes(pool4: Any) -> None:
    expected, parameters = alone()
    found, state = pool4.run(on_mesh, {"fsdp": 2, "tp": 2})[0]
    assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-11)
    assert_close(state, parameters, rtol=1e-8, atol=1e-10)


def test_dropout_makes_a_difference() -> None:
    """Or the masks would not have to agree."""
    drop = Dropping("(one b) s d")
    with mc.use_mesh(mc.make_mesh({"one": 1})):
        model, ids = seeded(drop), tokens(0)[:, :-1]
        first, again = model(ids), model(ids)
        drop.step = 1
        other = model(ids)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
