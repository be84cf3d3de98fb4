"""Plans that are found: modules of many forms, none of which says how it is cut, against one rank in float64."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    Block,
    Column,
    Cut,
    Row,
    TensorPlan,
    Vocab,
    auto_plan,
    full_state_dict,
    fully_shard,
    tensor_parallel,
    whole_parameters,
)

F64 = torch.float64
V, D, S, H = 24, 16, 6, 4
K = D // H


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of ``[b, h, s, k]``; keys and values may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


class EachHead(nn.Module):
    """A norm of heads that has numbers of its own for each of them, as Cohere's and Chameleon's."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, K))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.layer_norm(x, (K,))


class Attention(nn.Module):
    """Queries, keys and values apart; ``kv`` heads of keys; norms of heads, or of all of them, or none."""

    def __init__(self, kv: int = H, norm: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, D), nn.Linear(D, kv * K), nn.Linear(D, kv * K), nn.Linear(D, D)
        self.norms = nn.ModuleList()
        if norm:
            lengths = (K, K) if norm == "head" else (D, kv * K)
            made = [EachHead(H), EachHead(kv)] if norm == "each" else [nn.RMSNorm(length) for length in lengths]
            self.norms.extend(made)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norm == "all":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (each.unflatten(-1, (-1, K)) for each in (q, k, v))
        if self.norm == "each":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.norm == "head":
            q, k = self.norms[0](q), self.norms[1](k)
        return self.o(attended(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Counted(nn.Module):
    """nanoGPT's: sizes are read from the input, and the heads from a number."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.n_head, self.n_embd = H, D

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, s, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, c))  # type: ignore[no-any-return]


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    return around


class Decorated(Attention):
    """What its forward reads stands behind a decorator, as in the T5 of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = H

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.n_heads, K)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(attended(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """One matrix: three parts, parts of their lengths, or heads with their own q, k and v one after the other."""

    def __init__(self, kv: int = H, interleaved: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.interleaved = H, kv, interleaved
        self.qkv, self.out = nn.Linear(D, D + 2 * kv * K), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y, heads, kv = self.qkv(x), self.num_heads, self.num_kv_heads
        if self.interleaved:
            q, k, v = y.unflatten(-1, (heads, 3 * K)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = y.split([heads * K, kv * K, kv * K], -1)
            q, k, v = (each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v))
        return self.out(attended(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Biased(Attention):
    """With a table of positions that has something for each head, and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.sinks = nn.Embedding(2 * S, H), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, K)).transpose(1, 2) for each in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        bias = self.table((at[:, None] - at).clamp(-S, S - 1) + S).permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) + bias
        sink = self.sinks.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        return self.o((torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Latent(nn.Module):
    """Heads of keys and values are made of what all of them share, of which a part is used as it is (DeepSeek's)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up, self.o = (
            nn.Linear(D, D + H),
            nn.Linear(D, 8 + 1),
            nn.Linear(8, 2 * D),
            nn.Linear(D, D),
        )
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, K + 1)).transpose(1, 2)
        low, shared = self.down(x).split([8, 1], -1)
        k, v = self.up(self.norm(low)).unflatten(-1, (-1, 2 * K)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        return self.o(attended(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 32), nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class InOne(nn.Module):
    """Gate and up in one matrix: halves, or in turn."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.both, self.down, self.in_turn = nn.Linear(D, 64), nn.Linear(32, D), in_turn

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.in_turn else y.chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """All of them in two parameters, weighted by a router."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, 2 * 32, D) / 4), nn.Parameter(torch.randn(3, D, 32) / 4)

        def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
            gate, up = torch.einsum("b s d, e f d -> e b s f", hidden, self.up).chunk(2, -1)
            return torch.einsum("e b s f, e d f, b s e -> b s d", F.silu(gate) * up, self.down, weights)

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), Experts.Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x).softmax(-1))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, forward: nn.Module) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(D), attention
        self.after, self.feed_forward = nn.LayerNorm(D), forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        found: Tensor = x + self.feed_forward(self.after(x))
        return found


class AsBert(nn.Module):
    """The feed-forward's output stands before attention's, whose name ends as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 32)
        self.output = nn.ModuleDict({"dense": nn.Linear(32, D)})
        self.attention = Attention()
        self.attention.output, self.attention.o = nn.ModuleDict({"dense": self.attention.o}), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention.output["dense"](self.attention(x))  # type: ignore[index]
        found: Tensor = x + self.output["dense"](F.gelu(self.up(x)))
        return found


class Decoder(nn.Module):
    """A table, layers, and a head that may be the table."""

    def __init__(
        self, attention: Callable[[], nn.Module], forward: Callable[[], nn.Module], tied: bool = False, places: int = 8
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(places, D)
        self.layers = nn.ModuleList(Layer(attention(), forward()) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, D), nn.Linear(D, 4))


def torchs(kind: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    return layer if kind == "layer" else nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class Convolved(nn.Module):
    """All of its products are convolutions of single places, whose features come before the places."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv1d(D, D, 1) for _ in range(4))
        self.up, self.down = nn.Conv1d(D, 32, 1), nn.Conv1d(32, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        q, k, v = (each(x).unflatten(1, (-1, K)).transpose(2, 3) for each in (self.q, self.k, self.v))
        x = x + self.o(attended(q, k, v).flatten(2).transpose(1, 2))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (plain, {"0": "column", "2": "row", "4": "column", "5": "row"}),
    "separate": (lambda: Decoder(Attention, Gated), {"layers.*.attention.q": "column", "layers.*.attention.o": "row"}),
    "tied": (lambda: Decoder(Attention, Gated, tied=True), {"tokens": "vocab", "head": Column(gather=True)}),
    "more places than tokens": (lambda: Decoder(Attention, Gated, places=250), {"tokens": "vocab", "*": "replicated"}),
    "decorated": (lambda: Decoder(Decorated, Gated), {"layers.*.attention.q": "column", "layers.*.attention.o": "row"}),
    "few heads": (lambda: Decoder(lambda: Attention(2), Gated), {"layers.*.feed_forward.down": "row"}),
    "one head of keys": (lambda: Decoder(lambda: Attention(1), Gated), {"layers.*.attention.k": Column(kv_heads=1)}),
    "norms of heads": (lambda: Decoder(lambda: Attention(2, "head"), Gated), {"layers.*.attention.norms.*": "summed"}),
    "norms of each head": (lambda: Decoder(lambda: Attention(2, "each"), Gated),
                           {"layers.*.attention.k": "column", "layers.*.attention.norms.*": Cut(0)}),
    "norms over heads": (lambda: Decoder(lambda: Attention(H, "all"), Gated),
                         {"layers.*.attention.norms.*": Block("join", "part")}),
    "counted": (lambda: Decoder(Counted, Gated),
                {"layers.*.attention.c_attn": Column(gather=True), "layers.*.attention.c_proj": Row(split=True)}),
    "fused": (lambda: Decoder(Fused, Gated), {"layers.*.attention.qkv": Column(3)}),
    "fused, few heads": (lambda: Decoder(lambda: Fused(2), Gated), {"layers.*.attention.out": "row"}),
    "interleaved": (lambda: Decoder(lambda: Fused(interleaved=True), Gated), {"layers.*.attention.qkv": "column"}),
    "tables and sinks": (lambda: Decoder(Biased, Gated),
                         {"layers.*.attention.table": "column", "layers.*.attention.sinks": Cut(0)}),
    "latent": (lambda: Decoder(Latent, Gated), {"layers.*.attention.up": "column", "layers.*.attention.down": "summed"}),
    "gate and up in halves": (lambda: Decoder(Attention, lambda: InOne(False)), {"layers.*.feed_forward.both": Column(2)}),
    "gate and up in turn": (lambda: Decoder(Attention, lambda: InOne(True)), {"layers.*.feed_forward.both": "column"}),
    "experts": (lambda: Decoder(Attention, Experts), {"layers.*.feed_forward.experts.up": Cut(1, 2)}),
    "a name in another": (lambda: nn.Sequential(AsBert(), AsBert(), AsBert()), {"*.output.dense": "row"}),
    "torch's layer": (lambda: torchs("layer"), {"linear1": "column", "linear2": "row", "self_attn": "heads"}),
    "torch's encoder": (lambda: torchs("encoder"), {"layers.*.linear1": "column", "layers.*.self_attn": "heads"}),
    "convolutions of places": (Convolved, {"q": "column", "o": "row", "up": "column", "down": "row"}),
}  # fmt: skip
"""How it is made, and what its plan says among other things."""


def batch_of(module: nn.Module) -> Tensor:
    draws = torch.Generator().manual_seed(3)
    if isinstance(module, Decoder):
        return torch.randint(V, (4, S), generator=draws)
    return torch.randn(4, S, D, generator=draws, dtype=F64)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = MODELS[name][0]().to(F64)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn_like(p)
    return module


def trained(module: nn.Module, x: Tensor) -> None:
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        module(x).square().mean().backward()
        optimiser.step()


def on_one_rank(name: str) -> dict[str, Tensor]:
    module = made(name)
    trained(module, batch_of(module))
    return {key: p.detach() for key, p in module.named_parameters()}


def on_this_rank(name: str, ranks: int, plan: TensorPlan | None = None) -> tuple[TensorPlan, dict[str, Tensor]]:
    """Trained by a plan that is found here, or by this one."""
    mesh = mc.make_mesh({"tp": ranks})
    module = made(name)
    plan = plan or auto_plan(module, "tp", mesh=mesh)
    tensor_parallel(module, plan, axis="tp", mesh=mesh)
    trained(module, batch_of(module))
    return plan, whole_parameters(module)


def in_sequence(name: str, ranks: int, plan: TensorPlan) -> tuple[dict[str, Tensor], set[int]]:
    """And the lengths of what the norms of the layers are given."""
    mesh = mc.make_mesh({"tp": ranks})
    module = made(name)
    tensor_parallel(module, plan, axis="tp", sequence=True, mesh=mesh)
    lengths: set[int] = set()
    for path, part in module.named_modules():
        if path.rpartition(".")[2] in ("before", "after", "norm1", "norm2"):
            part.register_forward_hook(lambda _, args, y: lengths.add(y.shape[1]))
    trained(module, of_eight(module))
    return whole_parameters(module), lengths


def of_eight(module: nn.Module) -> Tensor:
    """Rows whose sequence ranks divide."""
    x = batch_of(module)
    return torch.cat([x, x[:, :2]], 1)


SEQUENCES: dict[str, dict[str, Any]] = {
    "few heads": {"layers.*.before": "sequence", "layers.*.after": "sequence", "layers.2": Block(None, "gather"),
                  "layers.0": Block("split"), "tokens": Vocab(sequence=False)},
    "counted": {"layers.*.attention": Block("enter", None, ("x",)), "head": Column(gather=True, sequence=False)},
    "norms over heads": {"layers.*.attention.norms.*": Block("join", "part")},
    "tables and sinks": {"layers.*.attention.table": "column"},
    "latent": {"layers.*.attention.down": "summed"},
    "experts": {"layers.*.feed_forward.router": "sequence"},
    "torch's layer": {"": Block("split", "gather"), "norm1": "sequence"},
    "torch's encoder": {"layers.*.norm1": "sequence", "layers.2": Block(None, "gather")},
}  # fmt: skip
"""What a plan with a cut sequence says among other things."""


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in SEQUENCES), ("few heads", 4), ("experts", 4)])
def test_a_cut_sequence_that_finds_itself(name: str, ranks: int) -> None:
    module = made(name)
    plan = auto_plan(module, "tp", sequence=True, mesh=mc.make_mesh({"tp": ranks}))
    found, lengths = mc.launch(in_sequence, ranks, (name, ranks, plan))[0]
    trained(module, of_eight(module))
    for key, p in module.named_parameters():
        assert_close(found[key], p.detach(), rtol=0, atol=1e-8)
    assert lengths == {8 // ranks}
    assert {pattern: plan.get(pattern) for pattern in SEQUENCES[name]} == SEQUENCES[name]


class Encoded(nn.Module):
    """What is encoded goes to each layer, past those before it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
            self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
            self.feed_forward = Gated()

        def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
            q, memory = self.q(self.norms[0](x)), self.kv(encoded)
            q, k, v = (each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, *memory.chunk(2, -1)))
            x = x + self.o(attended(q, k, v).flatten(2))
            return x + self.feed_forward(self.norms[1](x))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(D, D)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(x[:, :5]).tanh()
        for layer in self.layers:
            x = layer(x, encoded)
        return x


class Placed(nn.Module):
    """One table of positions for the attention of all layers, with something for each head (MPNet's)."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.attention, self.feed_forward = nn.LayerNorm(D), Placed.Attention(), Gated()

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            x = x + self.attention(self.before(x), bias)
            return x + self.feed_forward(x)  # type: ignore[no-any-return]

    class Attention(Attention):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (each(x).view(b, s, -1, K).transpose(1, 2) for each in (self.q, self.k, self.v))
            return self.o(attended(q, k, v, bias).reshape(b, s, -1))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(V, D), nn.Embedding(16, H)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        x, bias = self.tokens(ids), self.table((at[:, None] - at) % 16).permute(2, 0, 1)
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Residual(nn.Module):
    """A residual stream that goes past the modules in its lists, from a table to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(8, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), Gated()) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Residual, Placed])
def test_what_is_made_of_tables(kind: type[nn.Module]) -> None:
    """A sequence that is cut from a table to a head; a table of heads for all layers."""

    def program() -> tuple[TensorPlan, float]:
        mesh = mc.make_mesh({"tp": 2})
        torch.manual_seed(0)
        module, x = kind().to(F64), torch.randint(V, (4, 8), generator=torch.Generator().manual_seed(3))
        alone = copy.deepcopy(module)
        plan = auto_plan(module, "tp", sequence=True, mesh=mesh)
        tensor_parallel(module, plan, axis="tp", sequence=True, mesh=mesh)
        trained(module, x)
        trained(alone, x)
        found = whole_parameters(module)
        return plan, max(float((found[key] - p).detach().abs().max()) for key, p in alone.named_parameters())

    plan, apart = mc.launch(program, 2)[0]
    assert apart < 1e-8
    expected: dict[str, Any] = {
        "table": "column",
        "layers.*.attention": Block("enter", None, ("x",), (), ("bias",)),
    }
    if kind is Residual:
        expected = {"tokens": "vocab", "places": "split", "norm": "sequence", "head": Column(gather=True)}
    assert {pattern: plan.get(pattern) for pattern in expected} == expected


def test_no_cut_sequence_where_none_is_right() -> None:
    said = refused(Convolved(), sequence=True)
    assert "no plan with sequence=True that computes the same was found" in said
    assert "sequence=False" in said
    said = refused(Decoder(Attention, Gated), sequence=True, example=torch.zeros(2, 5, dtype=torch.int64))
    assert "layers: a sequence of 5, which 2 ranks do not divide" in said


def test_what_comes_from_elsewhere_is_not_cut() -> None:
    def program() -> tuple[TensorPlan, float]:
        mesh = mc.make_mesh({"tp": 2})
        torch.manual_seed(0)
        module, x = Encoded().to(F64), torch.randn(2, 8, D, dtype=F64)
        alone = copy.deepcopy(module)
        plan = auto_plan(module, "tp", sequence=True, example=torch.randn(3, 10, D), mesh=mesh)
        tensor_parallel(module, plan, axis="tp", sequence=True, mesh=mesh)
        trained(module, x)
        trained(alone, x)
        found = whole_parameters(module)
        return plan, max(float((found[key] - p).detach().abs().max()) for key, p in alone.named_parameters())

    plan, apart = mc.launch(program, 2)[0]
    assert apart < 1e-8
    assert (plan["layers.0"], plan["layers.*.kv"]) == (Block("split"), Column(2, sequence=False))


IN_FOUR = (
    "plain",
    "few heads",
    "norms of heads",
    "norms over heads",
    "fused, few heads",
    "tables and sinks",
    "experts",
)


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in MODELS), *((name, 4) for name in IN_FOUR)])
def test_what_is_trained_is_that_of_one_rank(name: str, ranks: int) -> None:
    plan = auto_plan(made(name), "tp", mesh=mc.make_mesh({"tp": ranks}))
    _, found = mc.launch(on_this_rank, ranks, (name, ranks, plan))[0]
    for key, p in on_one_rank(name).items():
        assert_close(found[key], p, rtol=0, atol=1e-8)
    if not (ranks == 4 and name in ("few heads", "fused, few heads")):
        for pattern, style in MODELS[name][1].items():
            assert plan.get(pattern) == style or (style == "column" and plan.get(pattern) == Column()), (pattern, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "fused", "latent", "counted"])
def test_on_processes(name: str, pool4: Any) -> None:
    found = pool4.run(on_this_rank, name, 4)[0][1]
    for key, p in on_one_rank(name).items():
        assert_close(found[key], p, rtol=0, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["separate", "experts"])
def test_the_same_plan_on_and_off_ranks(name: str) -> None:
    outside = auto_plan(made(name), "tp", mesh=mc.make_mesh({"tp": 2}))
    for found, _ in mc.launch(on_this_rank, 2, (name, 2)):
        assert (dict(found), found.divide, found.lines) == (dict(outside), outside.divide, outside.lines)


def test_under_fully_shard_and_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> dict[str, Tensor]:
        mesh = mc.make_mesh({"fsdp": 2, "tp": 2})
        with mc.use_mesh(mesh):
            module = made("separate")
            tensor_parallel(module, "auto", axis="tp")
            fully_shard(module, "fsdp", grads="mean")
            x = batch_of(module).chunk(2)[mesh.coordinate["fsdp"]]
            trained(module, x)
            return full_state_dict(module)  # type: ignore[return-value]

    found = mc.launch(program, 4)[0]
    for key, p in on_one_rank("separate").items():
        assert_close(found[key], p, rtol=0, atol=1e-8)
    said = capsys.readouterr().out
    assert said.count("tensor_parallel(..., axis='tp'):") == 1  # by one rank
    assert "layers.*.attention.o" in said
    assert "a rank sends per token and step" in said


class TextAndPicture(nn.Module):
    """Has a configuration, and wants both, as its forward says when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=32, image_size=8, num_channels=3)
        self.words, self.patches = nn.Embedding(32, 8), nn.Conv2d(3, 8, 4, 4)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None) -> Tensor:
        if input_ids is None or pixel_values is None:
            raise ValueError("both")
        x = torch.cat([self.words(input_ids), self.patches(pixel_values).flatten(2).transpose(1, 2)], 1)
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def test_tokens_are_tried_together_with_pictures() -> None:
    plan = auto_plan(TextAndPicture(), "tp", mesh=mc.make_mesh({"tp": 2}))
    assert (plan["words"], plan["up"], plan["down"]) == ("vocab", "column", "row")


def test_the_model_stays_as_it_is() -> None:
    module = made("separate")
    before, state = {name: p.clone() for name, p in module.named_parameters()}, torch.get_rng_state()
    auto_plan(module, "tp", mesh=mc.make_mesh({"tp": 2}))
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert len(module.layers) == 3  # type: ignore[arg-type]
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Decoder(Attention, Gated)
    plan = auto_plan(module, "tp", mesh=mc.make_mesh({"tp": 2}))
    assert dict(plan) == dict(auto_plan(made("separate"), "tp", mesh=mc.make_mesh({"tp": 2})))
    assert all(p.is_meta for p in module.parameters())


class Scaled(nn.Embedding):
    """With a forward of its own, and a number that no file has."""

    def __init__(self) -> None:
        super().__init__(V, D, padding_idx=3)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        scale: Any = self.scale
        return super().forward(ids) * scale.to(self.weight.dtype)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Single(nn.Module):
    """An operation that has no float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == F64:
            raise RuntimeError("got Double")
        return x.relu()


def own_forwards() -> nn.Module:
    """Layers that do what theirs do in a way of their own."""
    return nn.Sequential(Scaled(), OwnLinear(D, 2 * D), Single(), OwnLinear(2 * D, D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_of_their_own_on_the_meta_device_without_float64(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        module = own_forwards().to(dtype)
    mesh = mc.make_mesh({"tp": 2})
    plan = auto_plan(module, "tp", mesh=mesh)

    def cut() -> list[tuple[int, ...]]:
        with torch.device("meta"):
            made = own_forwards().to(dtype)
        tensor_parallel(made, plan, axis="tp", mesh=mesh)
        assert all(x.is_meta for x in [*made.parameters(), *made.buffers()])
        return [tuple(p.shape) for p in made.parameters()]

    assert mc.launch(cut, ranks=2)[1] == [(V // 2, D), (D, D), (D,), (D, D), (D,)]


@pytest.mark.thorough
def test_bytes_of_the_table_are_those_that_are_sent() -> None:
    """Of all but the gradients of what ranks share, which are sent once per step."""

    def program(name: str) -> tuple[float, float]:
        mesh = mc.make_mesh({"tp": 2})
        module = made(name)
        plan = auto_plan(module, "tp", mesh=mesh)
        tensor_parallel(module, plan, axis="tp", mesh=mesh)
        x = batch_of(module)
        with mc.trace() as t:
            module(x).square().mean().backward()
        sent = sum(event.wire for event in t.events)
        return sum(line.bytes for line in plan.lines) * x.shape[0] * x.shape[1], sent

    for name in ("plain", "separate", "tied", "fused", "counted", "gate and up in halves"):
        said, sent = mc.launch(program, 2, (name,))[0]
        assert said == pytest.approx(sent), name


class Odd(nn.Module):
    """A matrix that is no layer that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight @ self.weight.T + torch.eye(D), x.mT).mT


def refused(module: nn.Module, **how: Any) -> str:
    with pytest.raises(mc.MeshError) as caught:
        auto_plan(module, "tp", mesh=mc.make_mesh({"tp": 2}), **how)
    return str(caught.value)


def test_what_is_not_understood_is_refused_by_name() -> None:
    module = Decoder(Attention, Odd)
    said = refused(module)
    assert "not sure of 'layers.0.feed_forward', 'layers.1.feed_forward'" in said
    assert "a Odd, which is no layer that is known" in said
    assert "unsure='whole'" in said
    plan = auto_plan(module, "tp", mesh=mc.make_mesh({"tp": 2}), unsure="whole")
    assert plan["layers.*.attention.o"] == "row"
    assert any(line.style == "whole" and line.pattern == "layers.*.feed_forward" for line in plan.lines)


def test_layers_that_stay_whole_have_one_line_for_all_of_a_kind() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Module()
            self.own.weight = nn.Parameter(torch.randn(D, D))
            self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.down(self.up(x).relu()) + x @ self.own.weight
            return found

    module = nn.Sequential(Odd(), Odd())
    plan = auto_plan(module, "tp", unsure="whole", mesh=mc.make_mesh({"tp": 2}))
    assert [(line.pattern, line.layers) for line in plan.lines if line.style == "whole"] == [("*.own", 2)]


def test_what_is_wrong_is_said() -> None:
    assert "nothing in the module can be cut" in refused(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    assert "the axis of 2 divides it not" in refused(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5)))
    assert "example=" in refused(nn.Bilinear(2, 3, 4))
    assert "it fails on example" in refused(plain(), example=torch.zeros(3, 5))
    assert "example is of type int" in refused(plain(), example=3)
    assert "unsure='maybe'" in refused(plain(), unsure="maybe")
    assert "'0.weight' has no shape yet" in refused(nn.Sequential(nn.LazyLinear(4)))
    assert "sequence=3" in refused(plain(), sequence=3)


def test_a_plan_is_edited_and_passed_on() -> None:
    plan = auto_plan(made("fused"), "tp", mesh=mc.make_mesh({"tp": 2}))
    plan["layers.*.feed_forward.gate"] = plan["layers.*.feed_forward.up"] = Column(gather=True)
    plan["layers.*.feed_forward.down"] = Row(split=True)
    again = pickle.loads(pickle.dumps(plan))
    assert (dict(again), again.divide, again.lines) == (dict(plan), plan.divide, plan.lines)

    def program() -> dict[str, Tensor]:
        mesh = mc.make_mesh({"tp": 2})
        module = made("fused")
        tensor_parallel(module, again, axis="tp", mesh=mesh)
        trained(module, batch_of(module))
        return whole_parameters(module)

    found = mc.launch(program, 2)[0]
    for key, p in on_one_rank("fused").items():
        assert_close(found[key], p, rtol=0, atol=1e-8)


class Shares(nn.Module):
    """A table that others call under their own names, as encoders and decoders do, and nobody under this one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, 8)
        self.left, self.right = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.left.weight = self.right.weight = self.shared.weight
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(self.left(ids) + self.right(ids.flip(1)))))
        return found


def test_a_table_that_does_not_run_sends_nothing() -> None:
    plan = auto_plan(Shares(), "tp", mesh=mc.make_mesh({"tp": 2}))
    assert {plan[name] for name in ("shared", "left", "right")} == {"vocab"}
    lines = {line.pattern: line for line in plan.lines}
    assert (lines["shared"].bytes, lines["shared"].gathered, lines["shared"].note) == (0.0, "", "is left")
    assert lines["left"].bytes == lines["right"].bytes > 0
    assert lines["left"].note == ""
