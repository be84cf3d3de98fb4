"""Dropout in tensor parallel modules: what is whole drops alike on all ranks, what is cut differently, and what is
computed again drops the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.parallel import Column, data_parallel, fully_shard, tensor_parallel, whole_parameters
from meshcomm.parallel.tensor.streams import _scrambled, _unscrambled

F64 = torch.float64
D, H, S, V = 8, 4, 8, 12
RATE = 0.3

Masks = list[Tensor]


class Drop(nn.Module):
    """Notes what it drops, or drops what it is told; the dim is the one that is cut, if any."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim, self.p = dim, RATE
        self.drawn: Masks = []
        self.given: Iterator[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = F.dropout(torch.ones_like(x), self.p) if self.given is None else next(self.given)
        self.drawn.append(mask.detach())
        return x * mask


class Block(nn.Module):
    """Drops attention weights, hidden features, and what it adds to the residual stream."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        stream = 1 if sequence else None
        self.norm1, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.drop_weights, self.drop_hidden = Drop(1), Drop(2)
        self.drop1, self.drop2 = Drop(stream), Drop(stream)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.drop_weights((q @ k.transpose(-1, -2)).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, core: Callable[..., Any] | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, D // H)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.drop1(self.proj(self.attend(q, k, v) if core is None else core(self.attend, q, k, v)))
        return x + self.drop2(self.down(self.drop_hidden(F.gelu(self.up(self.norm2(x))))))


def of_core(*args: Any, reentrant: bool) -> Any:
    return checkpoint(*args, use_reentrant=reentrant)


class Model(nn.Module):
    def __init__(self, sequence: bool = False, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        self.drop = Drop(1 if sequence else None)
        self.blocks = nn.ModuleList(Block(sequence) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        for block in self.blocks:
            if self.how.startswith("block"):
                x = checkpoint(block, x, use_reentrant=self.how == "block, reentrant")
            elif self.how.startswith("core"):
                x = block(x, lambda *args: of_core(*args, reentrant=self.how == "core, reentrant"))
            elif self.how.startswith("both"):
                x = checkpoint(lambda x, block=block: F.dropout(block(x), 0.0), x, use_reentrant=False)
            else:
                x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


PLAN: dict[str, Any] = {
    "token": "vocab", "*.qkv": Column(3), "*.proj": "row", "*.up": "column", "*.down": "row",
    "head": Column(gather=True), "*": "replicated",
}  # fmt: skip
SEQUENCE = {"position": "split", "*norm*": "sequence", **{name: style for name, style in PLAN.items() if name != "*"}}


def seeded(*args: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(*args).to(F64)


def ids() -> Tensor:
    return torch.randint(V, (2, S), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return (y * torch.arange(V, dtype=F64)).square().mean()


def drops(model: nn.Module) -> list[Drop]:
    return [part for part in model.modules() if isinstance(part, Drop)]


def on_ranks(axes: dict[str, int], sequence: bool, how: str, steps: int = 2) -> Any:
    """Losses, gradients as one rank would have them, masks of the forward passes."""
    mesh = mc.make_mesh(axes)
    with mc.use_mesh(mesh):
        model = seeded(sequence, how)
        tensor_parallel(model, SEQUENCE if sequence else PLAN, axis="tp", sequence=sequence)
        if "dp" in axes:
            data_parallel(model, "dp", grads="mean")
        losses, masks = [], []
        for _ in range(steps):
            loss = loss_of(model, ids())
            masks.append([drop.drawn.copy() for drop in drops(model)])
            loss.backward()
            losses.append(loss.item())
            for drop, of_forward in zip(drops(model), masks[-1], strict=True):
                again = drop.drawn[len(of_forward) :]
                assert all(torch.equal(a, b) for a, b in zip(of_forward, again, strict=bool(again)))
                drop.drawn.clear()
            torch.rand(3 * mesh.rank)  # other programs draw on one rank alone
        for p in model.parameters():
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        return losses, whole_parameters(model), masks


def alone(masks: list[list[Masks]], sequence: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = seeded(sequence), []
    for of_step in masks:
        for drop, given in zip(drops(model), of_step, strict=True):
            drop.given = iter(given)
        loss = loss_of(model, ids())
        loss.backward()
        losses.append(loss.item())
    return losses, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def put_together(found: list[Any], sequence: bool) -> list[list[Masks]]:
    """The masks of one rank, after a look at how those of the ranks differ."""
    kinds, whole = [drop.dim for drop in drops(seeded(sequence))], []
    for step in range(len(found[0][2])):
        of_step = []
        for at, dim in enumerate(kinds):
            each = [rank[2][step][at] for rank in found]
            calls = []
            for call in zip(*each, strict=True):
                if dim is None:
                    assert all(torch.equal(call[0], other) for other in call[1:])
                    calls.append(call[0])
                else:
                    assert not any(torch.equal(call[0], other) for other in call[1:])
                    calls.append(torch.cat(call, dim))
            of_step.append(calls)
        whole.append(of_step)
    flat = [mask for of_step in whole for calls in of_step for mask in calls]
    assert not any(torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i] if a.shape == b.shape)
    return whole


def compare(found: list[Any], sequence: bool) -> None:
    losses, gradients = alone(put_together(found, sequence), sequence)
    for of_rank, state, _ in found:
        assert_close(of_rank, losses, rtol=1e-9, atol=1e-12)
        assert_close(state, gradients, rtol=1e-9, atol=1e-10)


HOW = ["", "block", "block, reentrant", "core", "core, reentrant", "both"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_what_is_dropped(how: str, sequence: bool) -> None:
    compare(mc.launch(on_ranks, ranks=2, args=({"tp": 2}, sequence, how)), sequence)


def test_what_is_dropped_on_processes(pool4: Any) -> None:
    pool4.run(torch.seed)  # whatever a test before has seeded
    found = pool4.run(on_ranks, {"dp": 2, "tp": 2}, False, "block")
    for at in (0, 2):
        put_together(found[at : at + 2], False)
        assert found[at][0] == found[at + 1][0]
    assert found[0][0] != found[2][0]


def test_other_data_ranks_drop_other_things() -> None:
    found = mc.launch(on_ranks, ranks=4, args=({"dp": 2, "tp": 2}, False, ""))
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]


def test_it_follows_from_the_seed_and_eval_draws_nothing() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def main() -> list[float]:
        with mc.use_mesh(mesh):
            model = tensor_parallel(seeded(), PLAN, axis="tp")
            losses = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                losses += [loss_of(model, ids()).item(), loss_of(model, ids()).item()]
            model.eval()
            before = torch.get_rng_state()
            losses += [loss_of(model, ids()).item(), loss_of(model, ids()).item()]
            assert torch.equal(before, torch.get_rng_state())
            return losses

    first, second = mc.launch(main, ranks=2)
    assert first == second
    a, b, c, d, e, f, g, h = first
    assert (a, b) == (c, d)
    assert len({a, b, e, f}) == 4
    assert g == h


def test_two_modules_and_a_checkpoint_around() -> None:
    """The default generator is all that there is to put back."""
    mesh = mc.make_mesh({"tp": 2})

    def main(again: bool) -> tuple[float, Tensor]:
        with mc.use_mesh(mesh):
            one, two = (tensor_parallel(seeded(), PLAN, axis="tp") for _ in range(2))
            torch.manual_seed(3)
            x = one(ids())
            loss = checkpoint(two, x.argmax(-1), use_reentrant=False) if again else two(x.argmax(-1))
            (loss.square().mean() + x.square().mean()).backward()
            return loss.sum().item(), two.blocks[0].up.weight.grad

    for (loss, g), (other, h) in zip(
        mc.launch(main, ranks=2, args=(True,)), mc.launch(main, ranks=2, args=(False,)), strict=True
    ):
        assert loss == other
        assert_close(g, h, rtol=0, atol=0)


class Functional(nn.Module):
    """Random functions of all kinds, called by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rand(x.shape[0], 1).round()
        h = F.dropout(self.up(x), 0.5, self.training)
        h = h * torch.rand_like(h) + torch.empty_like(h).bernoulli_(0.5)
        heads = h.view(2, -1, 4, 1)
        h = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view_as(h)
        self.inner = h.detach()
        return F.dropout(self.down(h), 0.5) + torch.randn(4)


def test_functions() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def main() -> list[tuple[Tensor, Tensor | None]]:
        with mc.use_mesh(mesh):
            model = Functional()
            tensor_parallel(model, {"up": "column", "down": "row"}, axis="tp")
            return [(model(torch.ones(8, 4)).detach(), model.inner) for _ in range(2)]

    first, second = mc.launch(main, ranks=2)
    for (y, h), (z, k) in zip(first, second, strict=True):
        assert torch.equal(y, z)
        assert h is not None
        assert k is not None
        assert not torch.equal(h, k)


def test_what_draws_and_does_not_look_like_it() -> None:
    """From the second step on."""
    mesh = mc.make_mesh({"tp": 2})
    hidden = [F.dropout]

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.mask = nn.Linear(4, 8), nn.Linear(8, 4), torch.ones(1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            self.mask = hidden[0](torch.ones_like(h))
            y: Tensor = hidden[0](self.down(h * self.mask))
            return y

    def main() -> list[tuple[Tensor, Tensor]]:
        with mc.use_mesh(mesh):
            model = tensor_parallel(Sly(), {"up": "column", "down": "row"}, axis="tp")
            return [(model(torch.ones(8, 4)).detach(), model.mask) for _ in range(3)]

    first, second = mc.launch(main, ranks=2)
    assert all(torch.equal(y, z) for (y, _), (z, _) in zip(first, second, strict=True))
    assert [torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True)] == [True, False, False]


def test_what_does_not_draw_leaves_the_generator_alone() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def main() -> bool:
        with mc.use_mesh(mesh), torch.random.fork_rng():
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 4))
            before = torch.get_rng_state()
            tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
            model(torch.ones(2, 4))
            return torch.equal(before, torch.get_rng_state())

    assert mc.launch(main, ranks=2) == [True, True]


def test_an_interrupted_forward() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def main() -> list[Tensor]:
        with mc.use_mesh(mesh):
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
            tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
            model(torch.ones(2, 4))
            hook = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4))
            hook.remove()
            return [model(torch.ones(2, 4)).detach(), torch.rand(2)]

    first, second = mc.launch(main, ranks=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("way", ["checked", "sharded", "fork_rng", "rng"])
def test_together_with(way: str) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})

    def main() -> tuple[float, Tensor]:
        with mc.use_mesh(mesh):
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5)).to(F64)
            tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
            if way == "sharded":
                fully_shard(model, "dp", grads="mean")
            elif way == "checked":
                mc.mark_varying(model, ())
                for at, name in ((0, "weight"), (0, "bias"), (2, "weight")):
                    mc.mark_varying(getattr(model[at], name), "tp")
            around = {
                "checked": lambda: mc.check_vma("error"), "fork_rng": lambda: mc.fork_rng("dp"),
                "rng": lambda: mc.rng("(dp b) d", seed=1),
            }.get(way, nullcontext)  # fmt: skip
            with around():
                x = torch.ones(3, 4, dtype=F64)
                if way == "checked":
                    x = mc.pvary(x, "dp")
                    model = data_parallel(model, "dp", grads="sum")
                loss = model(x).square().sum()
                if way == "checked":
                    loss = mc.all_reduce(loss, "dp")
                loss.backward()
            return loss.item(), model[2].bias.grad

    found = mc.launch(main, ranks=4)
    for one, other in ((0, 1), (2, 3)):
        assert found[one][0] == found[other][0]
        assert torch.equal(found[one][1], found[other][1])
    assert way == "checked" or found[0][0] != found[2][0]


def test_scrambled_bits_come_back() -> None:
    seen = {_scrambled(bits, index) for bits in (0, 1, 2**40 - 1) for index in (-1, 0, 1, 7)}
    assert len(seen) == 12
    for index in (-1, 0, 1, 1000):
        for bits in (0, 1, 12345678901, 2**40 - 1):
            assert _unscrambled(_scrambled(bits, index), index) == bits


# ------------------------------------------------------------------------------------------------- as on one rank


class Named(nn.Module):
    """Says how what it drops lies."""

    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.residual = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), residual

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        with mc.rng("b (tp f)", seed=(step, 0)):
            hidden = F.dropout(torch.tanh(self.up(x)), RATE)
        if self.residual:
            with mc.rng("b d", seed=(step, 1)):
                x = F.dropout(x, RATE)
        y = self.down(hidden)
        with mc.rng("b d", seed=(step, 2)):
            return x + F.dropout(y, RATE)


def three_steps(size: int, residual: bool, again: bool) -> tuple[list[float], dict[str, Tensor]]:
    with mc.use_mesh(mc.make_mesh({"tp": size})), torch.random.fork_rng():
        torch.manual_seed(0)
        model = tensor_parallel(Named(residual).to(F64), {"up": "column", "down": "row"}, axis="tp")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            x = torch.randn(3, D, dtype=F64, generator=torch.Generator().manual_seed(step))
            y = checkpoint(model, x, step, use_reentrant=False) if again else model(x, step)
            loss = y.square().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
        return losses, whole_parameters(model)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_named_draws_are_those_of_one_rank(size: int, residual: bool, again: bool) -> None:
    """Of what is cut, of what is whole, and of what is whole between a column and a row."""
    (alone,) = mc.launch(three_steps, ranks=1, args=(1, residual, again))
    for losses, params in mc.launch(three_steps, ranks=size, args=(size, residual, again)):
        assert_close(losses, alone[0], rtol=1e-12, atol=1e-12)
        assert_close(params, alone[1], rtol=1e-12, atol=1e-12)


def test_named_draws_are_those_of_one_rank_on_processes(pool4: Any) -> None:
    (alone,) = mc.launch(three_steps, ranks=1, args=(1, True, True))
    for found in pool4.run(three_steps, 4, True, True):
        assert_close(found, alone, rtol=1e-12, atol=1e-12)


def test_what_is_whole_and_drawn_between_a_column_and_a_row_is_seen_by_the_checker() -> None:
    class Beside(Named):
        def forward(self, x: Tensor, step: int = 0) -> Tensor:
            hidden = torch.tanh(self.up(x))
            beside = F.dropout(x, RATE)
            y: Tensor = self.down(hidden)
            return beside + y

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"tp": 2})), mc.check_vma(True):
            model = tensor_parallel(Beside().to(F64), {"up": "column", "down": "row"}, axis="tp")
            x = mc.mark_varying(torch.ones(3, D, dtype=F64), ())
            model(x)

    with pytest.raises(mc.VaryingError, match="dropout"):
        mc.launch(main, ranks=2)
