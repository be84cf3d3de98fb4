"""shard_map as a decorator and as a function; specs as strings, trees of them, and JAX's tuples."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import meshcomm as mc

mesh = mc.make_mesh({"dp": 2, "tp": 2})


@mc.shard_map(mesh=mesh, in_specs=("(dp b) d", "d (tp f)", "(tp f) d"), out_specs="(dp b) d")
def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return mc.all_reduce(torch.relu(x @ up) @ down, "tp")


def stats(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    y = x @ weights["w"]
    return y, {"mean": mc.all_reduce(y.mean(), ("dp", "tp"), "mean")}


@mc.shard_map(mesh=mesh, in_specs=("(dp b) d",), out_specs="", check_vma="error")
def total(x: Tensor) -> Tensor:
    return mc.all_reduce(x.sum(), "dp")


sharded_stats = mc.shard_map(
    stats, mesh=mesh, in_specs=("(dp b) d", {"w": "d (tp f)"}), out_specs=("(dp b) (tp f)", {"mean": ""})
)


def doubled(z: Tensor) -> Tensor:
    return 2 * z


def loss(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = mlp(x, up, down)
    assert_type(y, Tensor)
    return y.square().mean()


def main() -> float:
    x, up, down = torch.randn(4, 8), torch.randn(8, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    loss(x, up, down).backward()
    found = sharded_stats(x, {"w": up.detach()})
    assert_type(found, tuple[Tensor, dict[str, Tensor]])
    twice = mc.shard_map(doubled, mesh=mesh, in_specs=("(dp b) d",), out_specs="(dp b) d", check_vma=False)
    assert_type(twice(x), Tensor)
    return float(found[0].sum() + found[1]["mean"] + twice(x).sum() + total(x))


if __name__ == "__main__":
    main()
