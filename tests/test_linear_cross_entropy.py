"""The last layer and its loss together: against torch's cross_entropy of the whole logits, on one rank and on several.

The oracle has all logits in float64; ours has some rows of them at a time, and each rank its part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import column_linear, linear_cross_entropy, vocab_cross_entropy
from tests.test_fsdp import Live

F64 = torch.float64
ROWS, WIDTH, WORDS = 7, 5, 12
TARGET = torch.tensor([1, 2, -100, 11, 0, 5, 6])
Run = Callable[..., list[Any]]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def parts(bias: bool) -> list[Tensor]:
    return [drawn(ROWS, WIDTH, seed=0), drawn(WORDS, WIDTH, seed=1), *([drawn(WORDS, seed=2)] if bias else [])]


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), TARGET, **options)


def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return linear_cross_entropy(x, weight, TARGET, bias=bias, **options)


def derivatives(f: Callable[..., Tensor], given: Sequence[Tensor], orders: int) -> list[Tensor]:
    """The value and the gradients of each order, each of a sum of powers of those before."""
    leaves = [x.clone().requires_grad_() for x in given]
    found = [f(*leaves)]
    total = found[0].pow(2).sum()
    for _ in range(orders):
        g = torch.autograd.grad(total, leaves, create_graph=True)
        total = sum((part.pow(3).sum() for part in g), torch.zeros((), dtype=F64))
        found += g
    return found


@pytest.mark.parametrize("rows", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_three_derivatives(reduction: str, smoothing: float, bias: bool, rows: int | None) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    found = derivatives(lambda *given: ours(*given, rows=rows, **options), parts(bias), 3)
    wanted = derivatives(lambda *given: oracle(*given, **options), parts(bias), 3)
    for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        assert_close(mine, other, msg=lambda text, number=number: f"{number}: {text}")


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_what_needs_no_gradient(frozen: tuple[int, ...]) -> None:
    found, wanted = ([x.requires_grad_(i not in frozen) for i, x in enumerate(parts(True))] for _ in range(2))
    for given, loss in ((found, ours(*found, rows=2)), (wanted, oracle(*wanted))):
        needed = [x for x in given if x.requires_grad]
        first = torch.autograd.grad(loss, needed, create_graph=True)
        sum((part.square().sum() for part in first), torch.zeros((), dtype=F64)).backward()
    for mine, other in zip(found, wanted, strict=True):
        assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_transforms(which: int) -> None:
    given = parts(True)

    def of(f: Callable[..., Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
        return lambda part: f(*(part if i == which else x for i, x in enumerate(given)), **options)

    mine, other, at = of(ours, rows=3), of(oracle), given[which]
    wanted = hessian(other)(at)
    assert wanted.abs().max() > 0.01
    assert_close(grad(mine)(at), grad(other)(at))
    assert_close(jvp(mine, (at,), (at.cos(),)), jvp(other, (at,), (at.cos(),)))
    for inner in (jacfwd, jacrev):
        for outer in (jacfwd, jacrev):
            assert_close(outer(inner(mine))(at), wanted)
    batch = torch.stack([at, at.sin(), 2 * at])
    assert_close(vmap(mine)(batch), torch.stack([other(one) for one in batch]))
    assert_close(vmap(grad(mine))(batch), torch.stack([grad(other)(one) for one in batch]))


def test_targets_of_a_batch() -> None:
    x, table = drawn(3, 6, WIDTH, seed=2), drawn(WORDS, WIDTH, seed=1)
    ids = torch.arange(18).view(3, 6) % WORDS
    ids[1, :4] = -100

    def of(f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        return vmap(grad(f), (0, None, 0))(x, table, ids)

    found = of(lambda x, w, y: linear_cross_entropy(x, w, y, rows=4, reduction="sum"))
    assert_close(found, of(lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction="sum")))
    ids[2, 3] = WORDS
    with pytest.raises(mc.MeshError, match=f"id {WORDS} is not in a vocabulary of {WORDS}"):
        of(lambda x, w, y: linear_cross_entropy(x, w, y))


def test_tied_weights_and_shapes() -> None:
    table = drawn(WORDS, WIDTH, seed=1).requires_grad_()
    ids = torch.arange(6).view(2, 3)
    loss = linear_cross_entropy(table[ids], table, ids, rows=2)
    wanted = F.cross_entropy(F.linear(table[ids], table).flatten(0, 1), ids.flatten())
    assert_close(loss, wanted)
    assert_close(*(torch.autograd.grad(one, table)[0] for one in (loss, wanted)))
    one = linear_cross_entropy(table[0], table, torch.tensor(3), reduction="none")
    assert_close(one, F.cross_entropy(F.linear(table[0], table), torch.tensor(3)))
    none = linear_cross_entropy(table[:0], table, torch.empty(0, dtype=torch.long), reduction="sum")
    assert none == 0
    none.backward()
    ignored = linear_cross_entropy(table[:2], table, torch.tensor([-1, -1]), ignore_index=-1, reduction="sum")
    assert ignored == 0
    assert torch.autograd.grad(ignored, table)[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_in_float32(dtype: torch.dtype) -> None:
    x, weight = (part.to(dtype).requires_grad_() for part in parts(False))
    loss = linear_cross_entropy(x, weight, TARGET, rows=2)
    assert loss.dtype == torch.float32
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    wanted = oracle(*wide)
    assert_close(loss.double(), wanted, rtol=0.01, atol=0.01)
    loss.backward()
    wanted.backward()
    for mine, other in zip((x, weight), wide, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        assert_close(mine.grad.double(), other.grad, rtol=0.03, atol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_cross_entropy(x.detach().float(), weight.detach().double(), TARGET)
    assert mixed.dtype == torch.float32
    assert_close(mixed.double(), wanted.detach(), rtol=0.02, atol=0.02)


def test_the_logits_are_never_there() -> None:
    rows, width, words = 2048, 64, 8192
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    target = torch.randint(0, words, (rows,))
    logits = rows * words * 4
    with Live() as live:
        linear_cross_entropy(x, weight, target).backward()
    assert live.peak < 0.7 * logits
    with Live() as live:
        linear_cross_entropy(x, weight, target, rows=64).backward()
    assert live.peak < 0.3 * logits
    with Live() as live:
        grad(lambda x: linear_cross_entropy(x, weight.detach(), target, rows=64))(x.detach())
    assert live.peak < 0.3 * logits
    with Live() as live:
        F.cross_entropy(F.linear(x, weight), target).backward()
    assert live.peak > 2 * logits


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_in_one_graph() -> None:
    given, wanted = ([x.requires_grad_() for x in parts(True)] for _ in range(2))
    torch.compile(lambda *given: ours(*given, rows=3), fullgraph=True, backend="aot_eager")(*given).backward()
    oracle(*wanted).backward()
    for mine, other in zip(given, wanted, strict=True):
        assert_close(mine.grad, other.grad)


# ------------------------------------------------------------------------------------------------------ on several ranks


def cut(reduction: str, smoothing: float, sequence: bool) -> bool:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    me = mesh.coordinate["tp"]
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    whole = [part.requires_grad_() for part in parts(True)]
    whole[0] = torch.cat([whole[0], whole[0].detach()[:1]]).detach().requires_grad_()
    target = torch.cat([TARGET, TARGET[:1]])
    x, weight, bias = (part.detach().clone() for part in whole)
    x = (x.chunk(2)[me] if sequence else x).clone().requires_grad_()
    weight, bias = (part.chunk(2)[me].clone().requires_grad_() for part in (weight, bias))
    given = {"axis": "tp", "mesh": mesh, **options}
    found = linear_cross_entropy(x, weight, target, bias=bias, sequence=sequence, rows=3, **given)
    apart = vocab_cross_entropy(
        column_linear(x, weight, bias, axis="tp", sequence=sequence, mesh=mesh), target, **given
    )
    wanted = F.cross_entropy(F.linear(*whole), target, **options)
    assert_close(found, wanted)
    assert_close(found, apart)
    mine = torch.autograd.grad(found.square().sum(), (x, weight, bias), create_graph=True)
    other = torch.autograd.grad(wanted.square().sum(), whole, create_graph=True)
    expected = [part.chunk(2)[me] if i or sequence else part for i, part in enumerate(other)]
    for one, two in zip(mine, expected, strict=True):
        assert_close(one, two)
    second = torch.autograd.grad(mc.all_reduce(mine[1].pow(3).sum(), "tp", mesh=mesh), weight)
    assert_close(second[0], torch.autograd.grad(other[1].pow(3).sum(), whole[1])[0].chunk(2)[me])
    return True


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_vocabulary_in_parts(run4: Run, reduction: str, smoothing: float, sequence: bool) -> None:
    assert all(run4(cut, reduction, smoothing, sequence))


def test_the_checker_follows_it() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, weight = parts(False)

    @mc.shard_map(mesh=mesh, in_specs=("t d", "(tp v) d", "t"), out_specs="", check_vma="error")
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, axis="tp", rows=2, label_smoothing=0.1)

    given, wanted = ([part.clone().requires_grad_() for part in (x, weight)] for _ in range(2))
    loss(*given, TARGET).backward()
    oracle(*wanted, label_smoothing=0.1).backward()
    for mine, other in zip(given, wanted, strict=True):
        assert_close(mine.grad, other.grad)


def over_tokens() -> tuple[Tensor, Tensor]:
    """Two microbatches on each of two ranks, of 1, 2, 3 and 4 tokens."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    with mc.use_mesh(mesh):
        batches = [[1, 2], [3, 4]][mesh.coordinate["dp"]]
        weight = drawn(WORDS, WIDTH, seed=1)
        mine = weight.chunk(2)[mesh.coordinate["tp"]].clone().requires_grad_()
        count = mc.all_reduce(torch.tensor(sum(batches)), "dp")
        losses = []
        for n in batches:
            x, target = drawn(n, WIDTH, seed=n), torch.arange(n)
            shared = mc.pvary(mine, "dp")
            loss = linear_cross_entropy(x, shared, target, axis="tp", reduction="sum")
            losses.append(mc.all_reduce(loss, "dp") / count)
            losses[-1].backward()
        assert mine.grad is not None
        return torch.stack(losses).sum().detach(), mine.grad


def test_the_mean_over_the_tokens_of_all(run4: Run) -> None:
    weight = drawn(WORDS, WIDTH, seed=1).requires_grad_()
    x, target = (
        torch.cat(part)
        for part in zip(*((drawn(n, WIDTH, seed=n), torch.arange(n)) for n in (1, 2, 3, 4)), strict=True)
    )
    wanted = F.cross_entropy(F.linear(x, weight), target)
    wanted.backward()
    assert weight.grad is not None
    for rank, (loss, g) in enumerate(run4(over_tokens)):
        assert_close(loss, wanted.detach())
        assert_close(g, weight.grad.chunk(2)[rank % 2])
