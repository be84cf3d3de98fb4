"""What plans of tensor parallelism can say, each on a module like those that need it, against one rank in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    Block,
    Column,
    Cut,
    Row,
    Vocab,
    clip_grad_norm,
    fully_shard,
    tensor_parallel,
    whole_parameters,
)
from meshcomm.spmd.types.check_vma import check_vma, mark_varying

F64 = torch.float64
V, D, S, H = 24, 16, 8, 4
K = D // H


class Conv1D(nn.Module):
    """A linear layer whose weight lies the other way, and whose forward reads a count; known by its name."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of ``[b, s, heads * K]``; keys and values may have fewer heads."""
    q, k, v = (each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """One matrix for queries, and fewer heads of keys and values; sizes are read from a config that others have too."""

    def __init__(self, make: Any, kv_heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=H, kv_heads=kv_heads, name="fused")
        self.other = nn.Module()
        self.other.config = self.config  # type: ignore[assignment]
        self.norm = nn.LayerNorm(D)
        self.qkv = make(D, D + 2 * kv_heads * K)
        self.out = make(D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        q, k, v = self.qkv(self.norm(x)).split([heads * K, kv_heads * K, kv_heads * K], -1)
        return x + self.out(attended(q, k, v))


class Normed(nn.Module):
    """Norms of heads, a number for each head, and heads of keys that are fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, n) for n in (D, 2 * K, 2 * K, D))
        self.norm, self.sinks = nn.RMSNorm(K), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.norm(each.unflatten(-1, (-1, K))) for each in (self.q(x), self.k(x)))
        y = attended(q.flatten(2), k.flatten(2), self.v(x)).unflatten(-1, (-1, K))
        return x + self.o((y * self.sinks.sigmoid()[:, None]).flatten(2))


class OverHeads(nn.Module):
    """A norm over all heads at once, and one with a mean, of fewer heads."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norm_q, self.norm_k = self.Norm(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(attended(self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)))


class Experts(nn.Module):
    """All experts in one parameter, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(3, 2 * D, D) / 4), nn.Parameter(torch.randn(3, 2 * D))
        self.down, self.down_bias = nn.Parameter(torch.randn(3, D, D) / 4), nn.Parameter(torch.randn(3, D))

    def forward(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        gate, up = (torch.einsum("td,efd->tef", x, self.up) + self.up_bias).chunk(2, -1)
        y = torch.einsum("tef,edf->ted", F.silu(gate) * up, self.down) + self.down_bias
        return (y.gather(1, choice[..., None].expand(*choice.shape, D)) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, choice = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, choice, weights=weights).view_as(x)


class Relative(nn.Module):
    """A table that has something for each head, at each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.o = nn.Embedding(2 * S, H), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = self.table(at[:, None] - at + S).permute(2, 0, 1)
        q = self.q(x)
        return x + self.o(attended(q, q, q, bias[None]))


class Sloped(nn.Module):
    """What is added to scores comes from outside, for all heads of all rows: ``[b * h, 1, s]``."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.q, self.o = H, nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x: Tensor, residual: Tensor, slopes: Tensor | None = None) -> tuple[Tensor, None]:
            b, s, _ = x.shape
            q, k, v = self.q(x).view(b, s, self.heads, 3, K).unbind(-2)
            bias = None if slopes is None else slopes.view(b, self.heads, 1, s)
            return residual + self.o(attended(q.flatten(2), k.flatten(2), v.flatten(2), bias)), None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = self.Inner(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.arange(1, H + 1, dtype=x.dtype)[:, None] * torch.arange(x.shape[1])
        return self.inner(self.norm(x), x, slopes=slopes.repeat(len(x), 1)[:, None] / 9)[0]


class States(nn.Module):
    """As state spaces have it: channels are cut, and what all of them use is made of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.step, self.out = nn.Linear(D, 4 * D), nn.Linear(2 * D, 3 + 5), nn.Linear(2 * D, D)
        self.conv = nn.Conv1d(2 * D, 2 * D, 3, groups=2 * D, padding=1)
        self.spread, self.decay = nn.Linear(3, 2 * D), nn.Parameter(torch.rand(2 * D, 5))

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.inward(x).chunk(2, -1)
        y = F.silu(self.conv(y.mT).mT)
        step, state = self.step(y).split([3, 5], -1)
        step = step @ self.spread.weight.T + self.spread.bias  # read from outside
        return x + self.out(y * step * (state @ self.decay.T) * F.silu(gate))


class Attending(nn.Module):
    """Weights that stand in a layer, and are read by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Parameter(torch.randn(3 * D, D) / 4), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (D,), self.norm.weight, self.norm.bias)
        return F.linear(attended(*F.linear(x, self.qkv).chunk(3, -1)), self.out.weight, self.out.bias)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attending()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tables(nn.Module):
    """Embeddings that do something with what they look up, and heads that are the same weights."""

    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 3 * super().forward(input) + 1

    class Products(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.T + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = self.Scaled(V, D, padding_idx=2), nn.Embedding(V, D)
        self.up, self.down = nn.Linear(D, 2 * D), self.Products(2 * D, D)
        self.head, self.other = nn.Linear(D, V, bias=False), nn.Linear(D, V)
        self.head.weight, self.other.weight = self.rows.weight, self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = x.mean(-1).mul(99).abs().long() % V
        y = self.rows(ids) + self.wide(ids)
        y = y + self.down(F.gelu(self.up(y)))
        return torch.cat([x, self.head(y), self.other(y)], -1)


class Adapted(nn.Module):
    """A layer with an adapter beside it, as LoRA has it, and dropout before the adapter."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, 2 * D), nn.Linear(D, 3, bias=False), nn.Linear(3, 2 * D, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


class Adapters(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.a, self.b = Adapted(p), nn.Linear(2 * D, D), nn.Linear(2 * D, 3), nn.Linear(3, D)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return x + self.down(y) + self.b(self.a(y))


ADAPTERS = {"up.base": "column", "up.a": "replicated", "up.b": "column", "down": "row", "a": "row", "b": "replicated"}
DROPPED = {**ADAPTERS, "up": Block(), "up.a": "summed"}


def rest(**styles: Any) -> dict[str, Any]:
    return {**{name.replace("_", "."): style for name, style in styles.items()}, "*": "replicated"}


EXPERTS = {
    "experts": Block("enter", "leave", ("x", "choice", "weights")), "experts.up": Cut(1, 2),
    "experts.up_bias": Cut(-1, (D, D)), "experts.down": Cut(2), "experts.down_bias": "once", "*": "replicated",
}  # fmt: skip
OVER_HEADS = {"norm_*": Block("join", "part"), "[qkv]": "column", "o": "row", "*": "replicated"}
Case = tuple[Callable[[], nn.Module], Mapping[str, Any], Mapping[str, int]]


def fused(make: Any, kv_heads: int, n: int) -> Case:
    plan = {"qkv": Column((D, kv_heads * K, kv_heads * K), kv_heads=kv_heads), "out": "row", "*": "replicated"}
    divide = {"config.heads": n, "config.kv_heads": min(n, kv_heads)}
    return lambda: Fused(make, kv_heads), plan, divide


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs)


def conv1d(inputs: int, outputs: int) -> nn.Module:
    return Conv1D(outputs, inputs)


def case(name: str, n: int) -> Case:
    kind, _, number = name.partition(" ")
    if kind in ("linear", "conv1d"):
        return fused(linear if kind == "linear" else conv1d, int(number), n)
    return {
        "normed": (Normed, {"q": "column", "[kv]": Column(kv_heads=2), "o": "row", "norm": "summed", "sinks": Cut(0)}, {}),
        "mixture": (Mixture, EXPERTS, {}),
        "relative": (Relative, {"table": "column", "q": "column", "o": "row"}, {}),
        "sloped": (Sloped, {"inner": Block(None, divided={"slopes": (0, H)}), "*.q": "column", "*.o": "row",
                            "*": "replicated"}, {"inner.heads": n}),
        "sloped, entered": (Sloped, {"inner": Block(own=("residual",), divided={"slopes": (0, H)}), "*.q": "column",
                                     "*.o": "row", "*": "replicated"}, {"*.heads": n}),
        "states": (States, {"inward": Column(2), "conv": Cut(0), "step": Row(enter=True), "spread": Cut(0),
                            "decay": Cut(0), "out": "row"}, {"conv.groups": n}),
        "tables": (Tables, {"rows": "vocab", "head": Column(gather=True), "wide": Column(gather=True),
                            "other": Row(split=True), "up": "column", "down": "row"}, {}),
        "attending": (Around, {"inner": Block("enter", "leave"), "*.qkv": Cut(0, 3), "*.out.weight": Cut(1),
                               "*.out.bias": "once", "*.norm": "summed"}, {}),
        "over heads": (OverHeads, OVER_HEADS, {}),
        "adapters": (Adapters, ADAPTERS, {}),
        "adapters, entered": (Adapters, DROPPED, {}),
    }[name]  # fmt: skip


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def drawn(step: int, s: int = S) -> Tensor:
    return torch.randn(2, s, D, dtype=F64, generator=torch.Generator().manual_seed(step))


def trained(name: str, n: int, fsdp: bool = False, checkpoints: str = "") -> None:
    mesh = mc.make_mesh({"fsdp": 2, "tp": n} if fsdp else {"tp": n})
    make, plan, divide = case(name, n)
    alone, model = made(make), made(make)
    tensor_parallel(model, plan, axis="tp", divide=divide, mesh=mesh)
    if fsdp:
        fully_shard(model, "fsdp", grads="mean", mesh=mesh)
    steps = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-4) for each in (alone, model)]
    for step in range(3):
        xs = [drawn(step).requires_grad_() for _ in range(2)]
        losses = []
        for each, x in zip((alone, model), xs, strict=True):
            y = (
                torch.utils.checkpoint.checkpoint(each, x, use_reentrant=checkpoints == "reentrant")
                if checkpoints
                else each(x)
            )
            losses.append(y.square().sum())
            losses[-1].backward()
        assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-9)
        assert xs[0].grad is not None
        assert_close(xs[1].grad, xs[0].grad, rtol=1e-8, atol=1e-9)
        norms = [nn.utils.clip_grad_norm_(alone.parameters(), 0.5), clip_grad_norm(model, 0.5, mesh=mesh)]
        assert_close(norms[1], norms[0], rtol=1e-9, atol=1e-9)
        for each in steps:
            each.step()
            each.zero_grad()
    found = mc.parallel.full_state_dict(model) if fsdp else whole_parameters(model)
    for key, p in alone.named_parameters():
        assert_close(found[key], p.detach(), rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


FUSED = ["linear 4", "linear 2", "linear 1", "conv1d 4", "conv1d 2", "conv1d 1"]
OTHERS = [
    "normed",
    "mixture",
    "relative",
    "sloped",
    "sloped, entered",
    "states",
    "tables",
    "over heads",
    "adapters",
    "adapters, entered",
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_training_is_that_of_one_rank(name: str, n: int) -> None:
    mc.launch(trained, ranks=n, args=(name, n))


@pytest.mark.parametrize("name", ["conv1d 1", "normed", "mixture", "states", "tables", "over heads"])
def test_sharded_once_more(name: str) -> None:
    mc.launch(trained, ranks=4, args=(name, 2, True))


@pytest.mark.parametrize("checkpoints", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    "name", ["linear 1", "normed", "mixture", "sloped, entered", "states", "attending", "over heads"]
)
def test_computed_again(name: str, checkpoints: str) -> None:
    mc.launch(trained, ranks=2, args=(name, 2, False, checkpoints))


def all_on_processes() -> None:
    for name in ("conv1d 2", "normed", "mixture", "states", "tables"):
        trained(name, 4)


def test_on_processes(pool4: Any) -> None:
    pool4.run(all_on_processes)


def checked(name: str) -> None:
    mesh = mc.make_mesh({"tp": 2})
    make, plan, divide = case(name, 2)
    model = made(make)
    with mc.use_mesh(mesh), check_vma("error"):
        for p in model.parameters():
            mark_varying(p, ())
        tensor_parallel(model, plan, axis="tp", divide=divide)
        x = mark_varying(drawn(0), ())
        model(x).square().sum().backward()


@pytest.mark.parametrize("name", ["linear 4", "linear 1", "conv1d 1", *OTHERS])
def test_under_the_checker(name: str) -> None:
    """Every pvary is in its place, and none stands twice."""
    mc.launch(checked, ranks=2, args=(name,))


def mistaken(fsdp: bool) -> None:
    """Norms of heads that the plan calls replicated, after a parameter that has no gradient and never moves."""
    mesh = mc.make_mesh({"fsdp": 2, "tp": 2} if fsdp else {"tp": 2})
    make, plan, _ = case("normed", 2)
    model = made(make)
    model.idle = nn.Parameter(torch.ones(3))
    tensor_parallel(model, {**plan, "norm": "replicated", "idle": "replicated"}, axis="tp", mesh=mesh)
    if fsdp:
        fully_shard(model, "fsdp", grads="mean", mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for lr in (0.0, 0.01):  # a warm-up that begins with nothing
        opt.param_groups[0]["lr"] = lr
        model(drawn(0)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    model(drawn(0))


@pytest.mark.parametrize("fsdp", [False, True], ids=["tp", "fsdp x tp"])
def test_what_is_called_replicated_and_is_not(fsdp: bool) -> None:
    with pytest.raises(mc.MeshError, match=r"'norm.weight': whole, and no more the same on all ranks(.|\n)*'summed'"):
        mc.launch(mistaken, ranks=4 if fsdp else 2, args=(fsdp,))


# ------------------------------------------------------------------------------------------- a sequence that is cut


class Reads(nn.Module):
    """Attention that reads the shape of what it is given, by name, with a mask of that shape."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        b, s, _ = hidden.shape
        q, k, v = self.qkv(hidden).view(b, s, 3, -1).unbind(2)
        return self.o(attended(q, k, v, mask)), mask


class Decoder(nn.Module):
    """Positions and masks are made of the shape of what the table gives."""

    checkpointed = False

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), Reads()
            self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            y, _ = self.attention(hidden=self.norm1(hidden), mask=mask)
            hidden = hidden + y
            return hidden + self.mlp(self.norm2(hidden))

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.norm = nn.Embedding(V, D), nn.Embedding(2 * S, D), nn.LayerNorm(D)
        self.layers, self.head = nn.ModuleList(self.Layer() for _ in range(2)), nn.Linear(D, V, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.places(torch.arange(x.shape[1]))
        mask = torch.ones(x.shape[1], x.shape[1]).tril().log().to(x.dtype)
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return self.head(self.norm(x)[:, -4:])


DECODER: dict[str, Any] = {
    "table": Vocab(sequence=False), "head": Column(gather=True, sequence=False),
    "layers.0": Block("split"), "norm": Block(None, "gather"), "*norm*": "sequence",
    "*.attention": Block(), "*.qkv": Column(3), "*.o": "row", "*.mlp": Block(), "*.mlp.0": "column", "*.mlp.2": "row",
    "*": "replicated",
}  # fmt: skip


def in_sequence(n: int, fsdp: bool, checkpointed: bool) -> None:
    mesh = mc.make_mesh({"fsdp": 2, "tp": n} if fsdp else {"tp": n})
    alone, model = made(Decoder), made(Decoder)
    tensor_parallel(model, DECODER, axis="tp", sequence=True, mesh=mesh)
    if fsdp:
        fully_shard(model, "fsdp", grads="mean", mesh=mesh)
    model.checkpointed = checkpointed  # type: ignore[assignment]
    lengths: list[int] = []
    model.get_submodule("layers.1.norm1").register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    for length in (S, 3):  # with gradients off a sequence of any length will do, and what is not divisible is not cut
        ids = torch.arange(2 * length).view(2, length) % V
        with torch.no_grad():
            assert_close(model(ids), alone(ids), rtol=1e-9, atol=1e-9)
    assert lengths == [S // n, 3]
    steps = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-4) for each in (alone, model)]
    for step in range(3):
        ids = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(step))
        for each in (alone, model):
            each(ids).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(alone.parameters(), 0.5), clip_grad_norm(model, 0.5, mesh=mesh)]
        assert_close(norms[1], norms[0], rtol=1e-9, atol=1e-9)
        for opt in steps:
            opt.step()
            opt.zero_grad()
    found = mc.parallel.full_state_dict(model)
    for key, p in alone.named_parameters():
        assert_close(found[key], p.detach(), rtol=1e-9, atol=1e-9)
    if not fsdp and n > 1:
        with pytest.raises(mc.MeshError, match=r"block 'layers.0'.*has no sequence that axis 'tp'"):
            model(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(("n", "fsdp"), [(1, False), (2, False), (4, False), (2, True)])
def test_blocks_in_a_cut_sequence(n: int, fsdp: bool, checkpointed: bool) -> None:
    mc.launch(in_sequence, ranks=2 * n if fsdp else n, args=(n, fsdp, checkpointed))


def checked_in_sequence() -> None:
    mesh = mc.make_mesh({"tp": 2})
    model = made(Decoder)
    with mc.use_mesh(mesh), check_vma("error"):
        for p in model.parameters():
            mark_varying(p, ())
        tensor_parallel(model, DECODER, axis="tp", sequence=True)
        ids = mark_varying(torch.arange(2 * S).view(2, S) % V, ())
        model(ids).square().sum().backward()


def test_blocks_in_a_cut_sequence_under_the_checker() -> None:
    mc.launch(checked_in_sequence, ranks=2)


def experts_in_sequence() -> None:
    """The router sees a part of the sequence, the experts all of it."""
    mesh = mc.make_mesh({"tp": 2})
    alone, model = made(Mixture), made(Mixture)
    tensor_parallel(model, {**EXPERTS, "*": "sequence"}, axis="tp", sequence=True, mesh=mesh)
    x = drawn(0)
    mine = x.chunk(2, 1)[mesh.rank].clone().requires_grad_()
    y, expected = model(mine), alone(x)
    assert_close(y, expected.chunk(2, 1)[mesh.rank], rtol=1e-9, atol=1e-9)
    mc.all_reduce(y.square().sum(), "tp", mesh=mesh).backward()
    expected.square().sum().backward()
    for name in ("router.weight", "experts.down_bias"):
        assert_close(model.get_parameter(name).grad, alone.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


def test_experts_in_a_cut_sequence() -> None:
    mc.launch(experts_in_sequence, ranks=2)


class Crossed(nn.Module):
    """What is attended to is whole, and learned."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

        def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
            return self.o(attended(self.q(hidden), *self.kv(memory).chunk(2, -1)))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.memory = self.Inner(), nn.Parameter(torch.randn(2, 3, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, memory=self.memory)


def whole_in_sequence() -> None:
    mesh = mc.make_mesh({"tp": 2})
    alone, model = made(Crossed), made(Crossed)
    plan = {"inner": Block(whole=("memory",)), "*.q": "column", "*.kv": Column(2), "*.o": "row", "*": "replicated"}
    tensor_parallel(model, plan, axis="tp", sequence=True, mesh=mesh)
    x = drawn(0)
    y, expected = model(x.chunk(2, 1)[mesh.rank].clone()), alone(x)
    assert_close(y, expected.chunk(2, 1)[mesh.rank], rtol=1e-9, atol=1e-9)
    mc.all_reduce(y.square().sum(), "tp", mesh=mesh).backward()
    expected.square().sum().backward()
    assert_close(model.get_parameter("memory").grad, alone.get_parameter("memory").grad, rtol=1e-9, atol=1e-9)


def test_what_is_whole_where_the_sequence_is_cut() -> None:
    mc.launch(whole_in_sequence, ranks=2)


# ------------------------------------------------------------------------------------------------------- the module


def copied() -> None:
    mesh = mc.make_mesh({"tp": 2})
    for name in ("conv1d 2", "mixture", "sloped, entered"):
        make, plan, divide = case(name, 2)
        model = tensor_parallel(made(make), plan, axis="tp", divide=divide, mesh=mesh)
        twin, x = copy.deepcopy(model), drawn(0)
        assert_close(twin(x), model(x))
        twin(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())


def test_copies() -> None:
    mc.launch(copied, ranks=2)


def divided() -> None:
    mesh = mc.make_mesh({"tp": 2})
    make, plan, divide = case("linear 4", 2)
    model: Any = made(make)
    config = model.config
    tensor_parallel(model, plan, axis="tp", divide=divide, mesh=mesh)
    assert (model.config.heads, model.config.kv_heads, model.config.name) == (2, 2, "fused")
    assert model.other.config is config
    assert config.heads == H


def test_what_is_counted_in_an_object_that_others_have() -> None:
    mc.launch(divided, ranks=2)


def evaluated() -> None:
    """Torch's own layers read weights past the forward of their parts where gradients are off."""
    mesh = mc.make_mesh({"tp": 2})
    for activation in ("relu", "gelu"):
        for layers in (1, 2):
            layer = made(lambda: nn.TransformerEncoderLayer(D, H, 2 * D, 0.0, activation, batch_first=True))
            alone = nn.TransformerEncoder(layer, layers).eval()
            model = copy.deepcopy(alone)
            tensor_parallel(model, {"*.linear1": "column", "*.linear2": "row", "*": "replicated"}, axis="tp", mesh=mesh)
            for train in (False, True):
                with torch.set_grad_enabled(train):
                    x = mc.broadcast(drawn(0), "tp", mesh=mesh)
                    assert_close(model(x), alone(x), rtol=1e-9, atol=1e-9)


def test_layers_of_torch_in_evaluation() -> None:
    mc.launch(evaluated, ranks=2)


class Odd(nn.Module):
    """A forward of its own in layers that look like others."""

    class Normal(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, F.normalize(self.weight), self.bias)

    class Places(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.ones_like(input).cumsum(-1))

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.nf = nn.Parameter(torch.randn(D, D, 3)), D

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places, self.conv = self.Normal(D, D), self.Places(V, D), self.Conv1D()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def refused() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def wrong(text: str, module: nn.Module, plan: Any, **kw: Any) -> None:
        with pytest.raises(mc.MeshError, match=text):
            tensor_parallel(module, plan, axis="tp", mesh=mesh, **kw)

    for device in ("cpu", "meta"):
        with torch.device(device):
            odd = Odd()
        wrong("Normal has a forward of its own", odd, rest(linear="row"))
        wrong(r"Places has a forward of its own(.|\n)*Column\(gather=True\)", odd, rest(places="vocab"))
    wrong("belongs to a Conv1D, not a Linear or Conv1D", Odd(), rest(conv="row"))
    wrong("has no argument 'y'", Mixture(), {**EXPERTS, "experts": Block(inputs=("y",))})
    wrong("block 'experts' is inside of block '', and both enter", Mixture(), {**EXPERTS, "": Block()})
    wrong("has a value that is none", Mixture(), {**EXPERTS, "experts": Block("in")})  # type: ignore[arg-type]
    wrong("has a value that is none", Mixture(), {**EXPERTS, "experts": Block(inputs="x")})  # type: ignore[arg-type]
    wrong("'slopes', which has 3 heads,.* is not divisible", Sloped(), rest(inner=Block(divided={"slopes": (0, 3)})))
    wrong("and the sequence is not cut", Decoder(), {**DECODER})
    wrong("and the sequence is not cut", Mixture(), rest(router=Column(sequence=True)))
    wrong("but 'experts.down' has 3 dims", Mixture(), {**EXPERTS, "experts.down": Cut(3)})
    wrong("dim 0 of 'experts.down' of length 3 is not divisible", Mixture(), {**EXPERTS, "experts.down": Cut(0)})
    wrong("kv_heads=3.* cannot be divided", Fused(linear, 2), rest(qkv=Column((D, 2 * K, 2 * K), 3)))
    for device in ("cpu", "meta"):
        with torch.device(device):
            norms, sums = OverHeads(), nn.ModuleDict({"a": nn.PReLU(D)})
        for name in ("norm_q", "norm_k"):
            text = (
                rf"'{name}.weight' is cut(.|\n)*computes each feature from all(.|\n)*'{name}': Block\('join', 'part'\)"
            )
            wrong(text, norms, {name: Cut(0), "*": "replicated"})
        tensor_parallel(sums, {"a": Cut(0)}, axis="tp", mesh=mesh)
    heads = nn.ModuleDict({"a": nn.MultiheadAttention(D, H), "b": nn.Linear(D, D)})
    for pattern, style in (
        ("a.in_proj_weight", Cut(0, 3)),
        ("*.out_proj", "row"),
        ("*.out_proj", "column"),
        ("a", "column"),
    ):
        wrong("torch's MultiheadAttention is cut as a whole", heads, {pattern: style, "*": "replicated"})
    wrong("nothing is left for 'nobody'", Mixture(), {**EXPERTS, "nobody": Block()})
    wrong("no attribute that is an int is called 'config.head'", Fused(linear, 2), rest(), divide=["config.head"])
    wrong("config.heads = 4 is not divisible by 3", Fused(linear, 2), rest(), divide={"config.heads": 3})
    wrong("is not a pattern and a number", Fused(linear, 2), rest(), divide={"config.heads": 0})
    one = nn.ModuleDict({"a": nn.Linear(2, 2)})
    one["b"] = nn.Sequential(one["a"])
    wrong("one module with two names", one, {"b": Block(), "*": "replicated"})

    model = tensor_parallel(
        Mixture(), {**EXPERTS, "experts": Block("enter", "leave", ("x", "choice"))}, axis="tp", mesh=mesh
    )
    with pytest.raises(
        mc.MeshError, match=r"argument 'weights' needs a gradient(.|\n)*inputs=\('x', 'choice', 'weights'\)"
    ):
        model(torch.ones(1, 2, D))
    model = tensor_parallel(Sloped(), rest(inner=Block(None, divided={"slopes": (0, 8)})), axis="tp", mesh=mesh)
    with pytest.raises(mc.MeshError, match="'slopes' .* has not 8 heads along dim 0"):
        model(torch.ones(1, 2, D))


def dropped() -> None:
    """What differs between ranks is not taken for whole: refused, or the same sums of gradients on all ranks."""
    mesh = mc.make_mesh({"tp": 2})
    model = tensor_parallel(made(lambda: Adapters(0.5)), ADAPTERS, axis="tp", mesh=mesh)
    x = drawn(0).requires_grad_()
    with pytest.raises(mc.MeshError, match=r"whole after random numbers(.|\n)*Block\(\) around"):
        model(x)
    model.eval()(x).sum().backward()
    model = tensor_parallel(made(lambda: Adapters(0.5)), DROPPED, axis="tp", mesh=mesh)
    model(x).square().sum().backward()
    clip_grad_norm(model, 1.0, mesh=mesh)  # refuses gradients that differ between ranks
    both = mc.all_gather(model.get_parameter("up.a.weight").grad, "tp", mesh=mesh)  # type: ignore[type-var]
    assert torch.equal(*both.chunk(2))


def test_what_is_whole_and_drawn_between_a_column_and_its_row() -> None:
    mc.launch(dropped, ranks=2)


def test_errors_on_every_rank() -> None:
    mc.launch(refused, ranks=2)
