"""Python objects between ranks: metrics, names of files, samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_type

import meshcomm as mc


@dataclass
class Sample:
    name: str
    score: float


@mc.main_only(broadcast=True)
def config() -> dict[str, float]:
    return {"lr": 0.1}


@mc.main_only
def shown(text: str) -> None:
    print(text)


def rank() -> list[Sample] | None:
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh):
        me = mesh.coordinate["dp"]
        assert_type(mc.broadcast_object("name" if me == 0 else None, "dp"), str | None)
        assert_type(mc.all_gather_object(me, "dp"), list[int])
        assert_type(mc.gather_object(Sample("a", 1.0), "dp", dst=1), list[Sample] | None)
        assert_type(mc.scatter_object([1, 2] if me == 0 else None, "dp"), int)
        lr = config()
        assert_type(lr, dict[str, float])
        parts = [Sample(f"{me}.{at}", float(at)) for at in range(2)]
        everything = mc.collect_results(parts, 4, "dp", order="contiguous")
        assert_type(everything, list[Sample] | None)
        mean = mc.weighted_mean(torch.tensor(3.0), 2, "dp")
        assert_type(mean, Tensor)
        assert_type(mc.gather(torch.ones(2), "dp"), Tensor | None)
        x = torch.ones(2)
        if me == 0:
            mc.send(x, "dp", 1)
        else:
            assert_type(mc.recv("dp", 0, shape=(2,), dtype=torch.float32), Tensor)
        (came,) = mc.exchange([(x, 1 - me)], [(1 - me, x.shape, x.dtype)], "dp")
        assert_type(came, Tensor)
        rank_of, size = mc.get_dist_info()
        shown(f"{rank_of} of {size}: {came.tolist()}")
        return everything


def main() -> list[list[Sample] | None]:
    return mc.launch(rank, ranks=2)


if __name__ == "__main__":
    main()
