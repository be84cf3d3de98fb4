"""A parallel attention block in einops' notation, its plan, and what it sends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import assert_type

import meshcomm as mc


def attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    heads = mc.einsum("(dp b) (tp s) d, c d (tp h) k -> c (dp b) s (tp h) k", x, qkv)
    q, k, v = heads.transpose(2, 3).unbind()
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return mc.einsum("(dp b) s (tp h) k, (tp h) k d -> (dp b) (tp s) d", y, out)


def ulysses(q: Tensor) -> Tensor:
    return mc.reshard(q, "b (tp s) h k -> b s (tp h) k")


@mc.comm_budget(tp="1 all_to_all")
def budgeted(q: Tensor) -> Tensor:
    return ulysses(q)


def rank() -> tuple[int, ...]:
    mesh = mc.make_mesh({"dp": 1, "tp": 2})
    with mc.use_mesh(mesh):
        x, qkv, out = torch.randn(2, 2, 8), torch.randn(3, 8, 2, 4), torch.randn(2, 4, 8)
        with mc.trace() as t:
            y = attention(x, qkv, out)
            budgeted(torch.randn(1, 2, 2, 4))
        assert_type(t.count("all_gather"), int)
        assert_type(t.events, tuple[mc.TraceEvent, ...])
        plan = mc.plan("b (tp s) d -> b s (tp d)", (2, 4, 8), mesh)
        assert_type(plan, mc.Plan)
        assert_type(mc.partition_spec("(dp b) s (tp d)"), tuple[str | tuple[str, ...] | None, ...])
        assert_type(mc.layout_of(("dp", None, "tp"), "b s d"), str)
        assert_type(mc.local_shape("(dp b) s (tp d)", (4, 2, 8)), tuple[int, ...])
        later = mc.reshard(y, "(dp b) (tp s) d -> (dp b) s d", async_op=True)
        assert_type(later, mc.Work[Tensor])
        return tuple(later.wait().shape)


def main() -> list[tuple[int, ...]]:
    return mc.launch(rank, ranks=2)


if __name__ == "__main__":
    main()
