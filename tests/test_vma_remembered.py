"""The checker makes one pvary of a value for as long as the program has it: a second one would be one more sum in backward,
which ranks would not have in common that have done different things meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vma_checks import counted, on_ranks

import meshcomm as mc
from meshcomm.spmd.types.sizes import varying_numbers

MANY = 100


def place() -> Tensor:
    return mc.axis_index("dp") + torch.ones(3)


def leaf(value: float = 1.0) -> Tensor:
    return mc.mark_varying(torch.full((3,), float(value), requires_grad=True), ())


def local_backward() -> None:
    own = mc.mark_varying(torch.ones(3, requires_grad=True), "dp")
    (own * place()).sum().backward()


def others_are_made() -> None:
    for _ in range(MANY):
        leaf() * place()


def some_are_used(values: list[Tensor]) -> None:
    for x in values[: MANY // 2]:
        x * place()
    others_are_made()


BESIDE: dict[str, Callable[[list[Tensor]], Any]] = {
    "nothing": lambda values: None,
    "others are made": lambda values: others_are_made(),
    "some are used": some_are_used,
    "a backward of its own": lambda values: local_backward(),
    "both": lambda values: (local_backward(), some_are_used(values)),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaves": lambda w: w,
    "results": lambda w: w * 2,
    "views": lambda w: (w * 2)[:],
    "views of leaves": lambda w: w.view(3),
}


def sums(beside: Callable[[list[Tensor]], Any], make: Callable[[Tensor], Tensor], how_many: int) -> list[Any]:
    """Values that are used before and after what rank 0 does beside, and the gradients of their leaves."""
    leaves = [leaf(i) for i in range(how_many)]
    values = [make(w) for w in leaves]
    loss = torch.zeros(())
    for x in values:
        loss = loss + (x * place()).sum()
    with mc.check_vma(False):
        first = mc.current_mesh().coordinate["dp"] == 0
    if first:
        beside(values)
    for x in values:
        loss = loss + (x * place()).sum()
    mc.all_reduce(loss, "dp").backward()
    return [w.grad.tolist() for w in leaves if w.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how_many", [1, 60, MANY])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_one_rank_does_beside_changes_no_sum(beside: str, how_many: int, kind: str) -> None:
    found = on_ranks(lambda: sums(BESIDE[beside], KINDS[kind], how_many))
    each = 2.0 * (1 + 2) * (1 if "leaves" in kind else 2)
    assert found == [[[each] * 3] * how_many] * len(found)


def test_each_of_many_is_summed_once() -> None:
    assert counted(lambda: sums(BESIDE["nothing"], KINDS["leaves"], MANY)) == MANY + 1


def test_nothing_is_held_that_nobody_else_has() -> None:
    def run() -> list[int]:
        checker: Any = mc.watch.here.watcher
        made = []
        for _ in range(2 * MANY):
            w = leaf()
            h = w * 2
            (h * place(), w * place())
            made += [weakref.ref(w), weakref.ref(h)]
        alive = sum(each() is not None for each in made)
        kept = [leaf() for _ in range(MANY)]
        for x in kept:
            x * place()
        held = len(checker._pvaried)
        del kept, x, w, h
        local_backward()
        return [alive, held - len(checker._lately) >= MANY - 64, len(checker._pvaried)]

    for alive, all_kept, left in on_ranks(run):
        assert alive <= 2 * 64
        assert all_kept
        assert left == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_program_has_is_remembered(kind: str) -> None:
    def run() -> int:
        checker: Any = mc.watch.here.watcher
        values = [KINDS[kind](leaf()) for _ in range(MANY)]
        for x in values:
            x * place()
        others_are_made()
        local_backward()
        return sum(id(x) in checker._pvaried for x in values)

    assert on_ranks(run) == [MANY] * 2


def in_a_step(beside: int, held: list[weakref.ref[Tensor]]) -> int:
    """How many of the last step's are there when those of this one are; the function has its own until it ends."""
    before, w = list(held), leaf()
    kept = [leaf() for _ in range(beside)]
    results = [w * i for i in range(10)]
    loss = torch.stack([(x * place()).sum() for x in [*kept, *results]]).sum()
    held[:] = map(weakref.ref, results)
    alive = sum(each() is not None for each in before)
    loss.backward()
    return alive


def other_steps(held: list[weakref.ref[Tensor]]) -> int:
    """How many are there after a step, once something else is done."""
    in_a_step(0, held)
    for _ in range(20):
        w = torch.ones(3).requires_grad_()
        w.grad = torch.ones(3)
        torch.optim.SGD([w], lr=0.1).step()
    return sum(each() is not None for each in held)


@pytest.mark.parametrize("sizes", [False, True], ids=["", "sizes that depend on data"])
@pytest.mark.parametrize("beside", [0, 30, MANY])
def test_what_a_step_has_made_ends_before_the_next_one_has_made_more(
    beside: int, sizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varying_numbers.made, "any", sizes)

    def run() -> list[int]:
        held: list[weakref.ref[Tensor]] = []
        return [*[in_a_step(beside, held) for _ in range(4)], other_steps(held)]

    assert on_ranks(run) == [[0] * 5] * 2


def gradients(w: Tensor, steps: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], list[Tensor]], own: Any) -> Any:
    x = (torch.arange(3.0) + mc.axis_index("dp")).requires_grad_()
    return steps(w, mc.mark_varying(x, "dp"), own)


def second_backward(w: Tensor, x: Tensor, own: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = mc.all_reduce((own(w) * x).exp().sum(), "dp")
    first = torch.autograd.grad(loss, [w, x], retain_graph=True)
    w.data = torch.full((3,), 0.3)
    return [*first, *torch.autograd.grad(loss, [w, x])]


def backward_after(w: Tensor, x: Tensor, own: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = mc.all_reduce((own(w) * x).exp().sum(), "dp")
    w.data = torch.full((3,), 0.3)
    return [*torch.autograd.grad(loss, [w, x])]


def forward_again(w: Tensor, x: Tensor, own: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = (own(w) * x).exp().sum()
    w.data = torch.full((3,), 0.3)
    return [*torch.autograd.grad(mc.all_reduce(loss + (own(w) * x).sum(), "dp"), [w, x]), loss.detach()]


def before_it_varies(w: Tensor, x: Tensor, own: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = mc.all_reduce((own(w * w) * x).exp().sum(), "dp")
    w.data = torch.full((3,), 0.3)
    return [*torch.autograd.grad(loss, [w, x])]


def written_in_place(w: Tensor, x: Tensor, own: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = mc.all_reduce((own(w) * x).exp().sum(), "dp")
    w.data.copy_(torch.full((3,), 0.3))
    return [*torch.autograd.grad(loss, [w, x])]


@pytest.mark.parametrize("make", [nn.Parameter, lambda x: x.requires_grad_()], ids=["parameter", "leaf"])
@pytest.mark.parametrize("steps", [second_backward, backward_after, forward_again, before_it_varies, written_in_place])
def test_other_data_does_in_backward_what_it_does_with_a_pvary_by_hand(steps: Any, make: Any) -> None:
    def weight() -> Tensor:
        return mc.mark_varying(make(torch.tensor([0.5, -0.25, 0.125])), ())

    inserted = on_ranks(lambda: gradients(weight(), steps, lambda x: x))
    by_hand = on_ranks(lambda: gradients(weight(), steps, lambda x: mc.pvary(x, "dp")), mode=False)
    assert all(
        torch.equal(x, y) for one, other in zip(inserted, by_hand, strict=True) for x, y in zip(one, other, strict=True)
    )
