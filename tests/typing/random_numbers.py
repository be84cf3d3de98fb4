"""Random numbers: of a layout, shared over an axis, agreed seeds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import meshcomm as mc


def weights(mesh: mc.Mesh) -> Tensor:
    with mc.rng("d (tp f)", seed=0, mesh=mesh):
        return torch.randn(4, 2)


def dropped(x: Tensor) -> Tensor:
    with mc.fork_rng("tp"):
        return nn.functional.dropout(x, 0.5)


def rank() -> tuple[int, float]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    with mc.use_mesh(mesh):
        seed = mc.sync_seed(("dp", "tp"))
        assert_type(seed, int)
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(3, generator=generator)
        index = mc.axis_index("tp")
        assert_type(index, Tensor)
        assert_type(mc.axis_size("tp"), int)
        mc.assert_invariant({"x": x}, ("dp", "tp"))
        with mc.check_vma(True):
            y = mc.pvary(mc.mark_varying(x, ()), "tp") * mc.axis_index("tp")
            assert_type(mc.varying_axes(y), frozenset[str])
        own = mc.mark_varying(torch.rand(2), "dp")
        assert_type(own, Tensor)
        return seed, (dropped(y * index).sum() + weights(mesh).sum() + own.sum()).item()


def main() -> list[tuple[int, float]]:
    return mc.launch(rank, ranks=4)


if __name__ == "__main__":
    main()
