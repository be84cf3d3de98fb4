"""Which mesh for an 8-B model on 256 GPUs? Planned on a laptop: no GPU, no other ranks, no memory.

    python examples/plan_a_cluster.py                                  # 256 H100
    python examples/plan_a_cluster.py --gpus 64 --on h200 --out plan.svg

``train`` is the program that would run on the cluster; it finds its mesh as the current one. ``mc.sweep`` runs it dry
on each mesh, as one rank, on a machine of data sheets: seconds, memory, and what is waited for. Layers are all alike,
so two and four of them run, and the line through both says what 32 take. Then ``advice`` tries which option helps most.
The cluster takes in one sequence of 8192 tokens per GPU and step, whatever the mesh. b rows, s tokens, d width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, fully_shard, tensor_parallel

S, D, HEADS, KV, HIDDEN, V, LAYERS = 8192, 4096, 32, 8, 14336, 128256, 32
TP = {f"layers.*.{name}": "column" for name in ("q", "k", "v", "gate", "up")} | {
    "layers.*.out": "row", "layers.*.down": "row", "layers.*.norm?": "replicated", "embed": "replicated",
    "norm": "replicated", "head": "replicated",
}  # fmt: skip


class Layer(nn.Module):
    """b s d -> b s d."""

    def __init__(self) -> None:
        super().__init__()
        kv = KV * D // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(*io, bias=False) for io in ((D, D), (D, kv), (D, kv), (D, D)))
        self.gate, self.up, self.down = (nn.Linear(*io, bias=False) for io in ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D)))

    def forward(self, x: Tensor) -> Tensor:
        """Attention of grouped queries, then SwiGLU."""
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(2, (-1, D // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(HEADS // KV, 1) for each in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """b s -> b s V."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(layers)), nn.RMSNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits; each layer is computed again in backward."""
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def drawn(part: nn.Module) -> None:
    """First values of a part, once it is cut."""
    for param in part.parameters(recurse=False):
        nn.init.normal_(param, std=0.02) if param.ndim > 1 else nn.init.ones_(param)


def train(layers: int = LAYERS) -> Iterator[None]:
    """Two steps of one rank; the second one counts."""
    mesh = mc.current_mesh().shape
    with torch.device("meta"):
        model: nn.Module = Llama(layers)
    model = tensor_parallel(model, TP, axis="tp")
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = fully_shard(model, "fsdp", replica_axis="rep", grads="mean", init=drawn, **dtypes)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        yield
        ids = torch.randint(V, (mesh["tp"], S))  # ranks along tp have the same rows
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        clip_grad_norm(model, 1.0)
        adam.step()
        adam.zero_grad()
    yield


def meshes(gpus: int) -> list[dict[str, int]]:
    """rep x fsdp x tp: tp within a node; shards of a node, of eight nodes, of all."""
    found = []
    for tp in (1, 2, 4, 8):
        for fsdp in sorted({min(size, gpus // tp) for size in (8, 64, gpus)} - {0}):
            found.append({"rep": gpus // (fsdp * tp), "fsdp": fsdp, "tp": tp})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Which mesh for an 8-B model?")
    parser.add_argument("--gpus", type=int, default=256, help="how many (%(default)s)")
    parser.add_argument("--on", default="h100", help="a100, h100, h200, b200, or a file of hardware (%(default)s)")
    parser.add_argument("--out", default="", help="a file for the picture: .svg, .html, .txt; or .csv, .json")
    parser.add_argument("--few", type=int, default=2, help="so many layers run, and twice as many (%(default)s)")
    flags = parser.parse_args()
    machine = mc.hardware(flags.on)
    depth = (flags.few, 2 * flags.few, LAYERS)
    found = mc.sweep(train, meshes(flags.gpus), machine, tokens=flags.gpus * S, layers=depth)
    print(f"{found}\n\n{found.picture()}\n")
    run = mc.dry_run(lambda: train(depth[1]), found.best.mesh, hardware=machine)
    print(f"{depth[1]} layers on {found.best}, {run.advice(kinds=['program'])}")
    if flags.out:
        found.save(flags.out)
