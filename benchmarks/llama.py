"""Llama 3 as it was published, for dry runs: nothing of it is ever in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PLAN = {
    "layers.*.wq": "column", "layers.*.wk": "column", "layers.*.wv": "column", "layers.*.wo": "row",
    "layers.*.w1": "column", "layers.*.w3": "column", "layers.*.w2": "row",
    "layers.*.attention_norm": "replicated", "layers.*.ffn_norm": "replicated", "norm": "replicated",
    "embedding": "replicated", "output": "replicated",
}  # fmt: skip
"""Tensor parallelism of all layers."""


class Size(NamedTuple):
    """Of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    words: int = 128256


SIZES = {
    "8B": Size(32, 4096, 32, 8, 14336),
    "70B": Size(80, 8192, 64, 8, 28672),
    "405B": Size(126, 16384, 128, 8, 53248),
}


class Layer(nn.Module):
    """Attention with groups of queries, and SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.head = size.width, size.width // size.heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = (nn.Linear(d, size.kv_heads * self.head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(d, size.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.hidden, d, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """[b, s, d] to the same."""
        b, s, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (w(h).view(b, s, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (rotated(q, rotation), rotated(k, rotation), v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, s, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Places, as angles: [b, s, h, e]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).to(x.dtype)


class Llama(nn.Module):
    """``again``: every how many layers one computes its activations again in backward; 0: none."""

    def __init__(self, size: Size, layers: int, again: int) -> None:
        super().__init__()
        self.again = again
        self.embedding = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] to [b, s, words]."""
        x = self.embedding(tokens)
        angles = (tokens.shape[1], self.layers[0].head // 2)  # type: ignore[operator]
        rotation = torch.empty(angles, dtype=torch.complex64, device=tokens.device)  # type: ignore[arg-type]
        for number, layer in enumerate(self.layers):
            if self.again and number % self.again == 0:
                x = checkpoint(layer, x, rotation, use_reentrant=False)
            else:
                x = layer(x, rotation)
        return self.output(self.norm(x))
