"""GPT as Megatron-LM of 2021 trained it, for dry runs: nothing of it is ever in memory.

What the source says: fp16, sequences of 2048 tokens, 51,200 words, every layer computed again in backward, tensor
parallelism without cut sequences, a vocabulary that is cut, gradients reduced at the end of a step. Attention is that
of its time: scores as a tensor, and one kernel for scale, mask and softmax. b rows, s tokens, d width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import parallel

SOURCE = "Megatron-LM, images/cases_april2021.png, and examples/academic_paper_scripts/sc21/run_table_1.sh"
WORDS, SEQUENCE = 51200, 2048
PLAN = {
    "layers.*.qkv": parallel.Column(3), "layers.*.out": "row", "layers.*.up": "column", "layers.*.down": "row",
    "layers.*.norm?": "replicated", "norm1": "replicated", "places": "replicated", "words": "vocab", "top": "column",
}  # fmt: skip


class Case(NamedTuple):
    """A row of the table."""

    model: str
    layers: int
    width: int
    heads: int
    tensor: int
    gpus: int
    batch: int
    """Of all GPUs."""
    rows: int
    """Of a microbatch."""
    published: float
    """teraFLOP/s of each GPU, by the source's own formula."""

    @property
    def flops(self) -> float:
        """Of a step, of all GPUs, by that formula (arXiv 2104.04473, equation 3)."""
        ends = 1 + SEQUENCE / (6 * self.width) + WORDS / (16 * self.layers * self.width)
        return 96 * self.batch * SEQUENCE * self.layers * self.width**2 * ends


CASES = (
    Case("1.7B", 24, 2304, 24, 1, 32, 512, 16, 137),
    Case("3.6B", 30, 3072, 32, 2, 64, 512, 16, 138),
    Case("7.5B", 36, 4096, 32, 4, 128, 512, 16, 142),
    Case("18B", 40, 6144, 48, 8, 256, 1024, 8, 135),
)
"""Those of the table's rows that have no pipeline."""


class Layer(nn.Module):
    """b s d -> b s d."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.head, self.norm1, self.norm2 = d // heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of all pairs, then two layers."""
        b, s, _ = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, 2)
        q, k, v = (w.unflatten(2, (-1, self.head)).transpose(1, 2).flatten(0, 1) for w in parts)
        scores = F.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.1)
        y = (scores @ v).unflatten(0, (b, -1)).transpose(1, 2).reshape(b, s, -1)
        x = x + F.dropout(self.out(y), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class GPT(nn.Module):
    """b s -> b s V / tp."""

    def __init__(self, case: Case, layers: int) -> None:
        super().__init__()
        d = case.width
        self.words, self.places = nn.Embedding(WORDS, d), nn.Embedding(SEQUENCE, d)
        self.layers = nn.ModuleList(Layer(d, case.heads) for _ in range(layers))
        self.norm1, self.top = nn.LayerNorm(d), nn.Linear(d, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Each layer is computed again in backward."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        y: Tensor = self.top(self.norm1(x))
        return y


def step_of(case: Case, layers: int) -> Callable[[], Iterator[None]]:
    """Two steps; the second one counts."""

    def main() -> Iterator[None]:
        model: nn.Module = parallel.tensor_parallel(GPT(case, layers).half(), PLAN, axis="tp")
        parallel.data_parallel(model, "dp", grads="mean")
        halves = list(model.parameters())
        wholes = [nn.Parameter(p.detach().float()) for p in halves]
        adam = torch.optim.AdamW(wholes, fused=True)
        turns = case.batch * case.tensor // case.gpus // case.rows
        for _ in range(2):
            yield
            for turn in range(turns):
                with parallel.no_sync(model) if turn + 1 < turns else contextlib.nullcontext():
                    ids = torch.randint(WORDS, (case.rows, SEQUENCE))
                    parallel.vocab_cross_entropy(model(ids).float(), ids, axis="tp").backward()
            parallel.clip_grad_norm(model, 1.0)
            for whole, half in zip(wholes, halves, strict=True):
                assert half.grad is not None
                whole.grad, half.grad = half.grad.float(), None
            adam.step()
            with torch.no_grad():
                for whole, half in zip(wholes, halves, strict=True):
                    half.copy_(whole)
        yield

    return main


def foretold(case: Case) -> float:
    """teraFLOP/s of each GPU, by the source's formula."""
    mesh = {"dp": case.gpus // case.tensor, "tp": case.tensor}
    found = mc.dry_run(step_of(case, 2), mesh, hardware=mc.hardware("a100")).seconds
    more = mc.dry_run(step_of(case, 4), mesh, hardware=mc.hardware("a100")).seconds
    seconds = found + (case.layers - 2) * (more - found) / 2
    return case.flops / seconds / case.gpus / 1e12
