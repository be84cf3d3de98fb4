"""Works: started, waited for, in lists and dicts, with flags that are known only at run time."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import meshcomm as mc
from meshcomm import Work


def overlapped(shards: list[Tensor], x: Tensor) -> Tensor:
    gathering: Work[Tensor] = mc.all_gather(shards[0], "fsdp", async_op=True)
    for at in range(len(shards)):
        w = gathering.wait()
        if at + 1 < len(shards):
            gathering = mc.all_gather(shards[at + 1], "fsdp", async_op=True)
        x = x @ w
    return x


def reduced(x: Tensor, later: bool) -> Tensor:
    y = mc.all_reduce(x, "fsdp", async_op=later)
    assert_type(y, Tensor | Work[Tensor])
    return y.wait() if isinstance(y, Work) else y


def tree(x: Tensor, later: bool) -> dict[str, Tensor]:
    y = mc.broadcast({"x": x}, "fsdp", src=1, async_op=later)
    return mc.wait(y)


def collected(xs: list[Tensor]) -> Tensor:
    works = [mc.all_reduce(x, "fsdp", async_op=True) for x in xs]
    assert_type(works, list[Work[Tensor]])
    done = mc.wait(works)
    assert_type(done, list[Tensor])
    named = mc.wait({"sum": mc.all_reduce(xs[0], "fsdp", async_op=True)}, timeout=10)
    assert_type(named, dict[str, Tensor])
    first, second = mc.wait((mc.shift(xs[0], "fsdp", async_op=True), mc.reduce(xs[1], "fsdp", async_op=True)))
    assert_type(first, Tensor)
    assert_type(second, Tensor | None)
    return torch.stack(done).sum() + named["sum"].sum() + first.sum() + (0 if second is None else second.sum())


async def awaited(x: Tensor) -> Tensor:
    y = await mc.all_to_all(x, "fsdp", 0, 1, async_op=True)
    z = await mc.reshard(y, "a (fsdp b) -> a b", async_op=True)
    return z


def rank() -> float:
    mesh = mc.make_mesh({"fsdp": 2})
    with mc.use_mesh(mesh):
        x = torch.ones(2, 2)
        total = mc.all_reduce(x, "fsdp", async_op=True).then(lambda y: float(y.sum()))
        assert_type(total, Work[float])
        assert_type(total.done(), bool)
        value = overlapped([torch.ones(1, 2), torch.ones(1, 2)], x).sum()
        value = value + reduced(x, mesh.rank >= 0).sum() + tree(x, False)["x"].sum() + collected([x, x])
        return float(value) + total.wait()


def main() -> list[float]:
    return mc.launch(rank, ranks=2)


if __name__ == "__main__":
    main()
