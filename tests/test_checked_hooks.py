"""Hooks on gradients under the checker: what makes the gradient of an invariant value vary is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc

F64 = torch.float64
DATA = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
MESH = mc.make_mesh({"dp": 2})
Hook = Callable[[Tensor, Tensor], Callable[[Tensor], Any]]


def in_place(g: Tensor, x: Tensor) -> Tensor:
    return g.clone().mul_(x)


def changed(g: Tensor, x: Tensor) -> None:
    g.mul_(x)


VARYING: dict[str, Hook] = {
    "a factor": lambda s, x: lambda g: g * x,
    "a term": lambda s, x: lambda g: g + x,
    "a copy": lambda s, x: lambda g: in_place(g, x),
    "in place": lambda s, x: lambda g: changed(g, x),
    "a place": lambda s, x: lambda g: g * (1 + mc.axis_index("dp")),
    "a size": lambda s, x: lambda g: g * x[x > 2].shape[0],
    "noise": lambda s, x: lambda g: g + torch.randn_like(g),
    "a gate": lambda s, x: lambda g: torch.where(x > 2, g, 0),
}
ALIKE: dict[str, Hook] = {
    "a factor": lambda s, x: lambda g: g * 2,
    "of the value": lambda s, x: lambda g: 2 * g * (s.detach() == s.detach()),
    "in place": lambda s, x: lambda g: changed(g, torch.tensor(2.0, dtype=F64)),
    "reduced": lambda s, x: lambda g: g * 2 * mc.all_reduce(x * 0 + 0.5, "dp"),
    "clamped": lambda s, x: lambda g: 2 * g.clamp(-1e9, 1e9),
}


def gradient(hook: Hook, *, of_varying: bool = False) -> list[float]:
    def body(x: Tensor) -> Tensor:
        s, own = mc.all_reduce(x, "dp"), x.detach()
        if of_varying:
            x = x * 1
            x.register_hook(hook(s, own))
            return mc.all_reduce((x * own).sum(), "dp")
        s.register_hook(hook(s, own))
        return mc.all_reduce((s * own).sum(), "dp")

    whole = DATA.clone().requires_grad_()
    found = torch.autograd.grad(mc.shard_map(body, mesh=MESH, in_specs="(dp n)", out_specs="")(whole), whole)[0]
    return list(found.tolist())


@pytest.mark.parametrize("name", VARYING)
def test_what_makes_a_gradient_vary_is_refused(name: str) -> None:
    text = (
        r"a hook of register_hook at test_checked_hooks.py:\d+ .*gradient of a value that is invariant along 'dp' vary"
    )
    with pytest.raises(mc.VaryingError, match=text):
        gradient(VARYING[name])


@pytest.mark.parametrize("name", ALIKE)
def test_what_leaves_it_as_it_is_runs(name: str) -> None:
    assert gradient(ALIKE[name]) == [8.0, 12.0, 8.0, 12.0]


def test_the_gradient_of_what_varies_may_be_changed_by_what_varies() -> None:
    assert gradient(lambda s, x: lambda g: g * x, of_varying=True) == [1.0, 4.0, 9.0, 16.0]


def on_ranks(after: bool, alike: bool) -> list[float]:
    mesh = mc.make_mesh({"dp": 2})
    w = mc.mark_varying(torch.ones(2, dtype=F64, requires_grad=True), ())
    x = mc.mark_varying(DATA.view(2, 2)[mesh.rank], "dp")
    with mc.use_mesh(mesh), mc.check_vma():
        factor = mc.all_reduce(x, "dp") if alike else x

        def grown(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(factor)

        if after:
            w.register_post_accumulate_grad_hook(grown)
        else:
            w.register_hook(hook=lambda g: g * factor)
        loss = mc.all_reduce((w * x).sum(), "dp")
        if not alike:
            with pytest.raises(mc.VaryingError, match="a hook of register_.*hook at"):
                loss.backward()
            return []
        loss.backward()
    return list(w.grad.tolist())


@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_leaves(after: bool) -> None:
    assert mc.launch(on_ranks, ranks=2, args=(after, True)) == [[16.0, 36.0]] * 2
    assert mc.launch(on_ranks, ranks=2, args=(after, False)) == [[], []]


def test_a_hook_can_be_taken_away() -> None:
    def body(x: Tensor) -> Tensor:
        s = mc.all_reduce(x, "dp")
        s.register_hook(lambda g: g * x.detach()).remove()
        return mc.all_reduce((s * x.detach()).sum(), "dp")

    whole = DATA.clone().requires_grad_()
    y = mc.shard_map(body, mesh=MESH, in_specs="(dp n)", out_specs="")(whole)
    assert torch.autograd.grad(y, whole)[0].tolist() == [4.0, 6.0, 4.0, 6.0]
