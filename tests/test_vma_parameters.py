"""Parameters that are made, copied, swapped or given other memory while the checker of varying types looks.

A program is written once. Its right numbers are those of the same program without the checker, with each ``pvary``
where it belongs (``vary``), which is left out where the checker looks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from vma_twins import F64, LINE

import meshcomm as mc

Change = Callable[[Tensor], Tensor]
Program = Callable[[nn.Parameter, Tensor, Change], Sequence[Any]]
"""Of a replicated parameter, of data that vary, and of what varies a value that is invariant."""

DATA = torch.tensor([[1.3, -0.7, 2.1, 0.4], [-1.2, 3.3, 0.9, -2.2]], dtype=F64)


def total(y: Tensor) -> Tensor:
    return mc.all_reduce(y.sin().sum(), "dp")


def replicated(*shape: int) -> nn.Linear:
    torch.manual_seed(sum(shape))
    return mc.mark_varying(nn.Linear(*shape, dtype=F64), ())


def a_new_one(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(w.detach() * 2)
    total(vary(q) * vary(w) * x).backward()
    return q.grad, w.grad


def of_varying_values(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(x)
    total(vary(w) * q).backward()
    return q.grad, w.grad


def of_a_buffer(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    z = torch.zeros(4, dtype=F64)
    q = nn.Parameter(z, requires_grad=False)
    z.copy_(x)
    total(vary(w) * q).backward()
    return (w.grad,)


def frozen_and_thawed(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(torch.ones(4, dtype=F64), requires_grad=False)
    q.copy_(x)
    q.requires_grad_(True)
    total(vary(w) * q).backward()
    return q.grad, w.grad


def in_the_image_of_what_varies(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(torch.zeros_like(x))
    total(vary(w) * x + q).backward()
    torch.optim.SGD([q, w], 0.1).step()
    return q, w


def zeros_are_replicated(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(torch.zeros(4, dtype=F64))
    total(vary(w) * x + vary(q)).backward()
    torch.optim.Adam([q, w], 0.1).step()
    return q, w


def put_in_place_of_another(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m = replicated(4, 1)
    before = total(vary(m.weight) * x)
    m.weight = nn.Parameter(m.weight.detach() * 5)
    total(vary(m.weight) * x).backward()
    return before, m.weight.grad


def assigned(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m, other = replicated(4, 2), replicated(4, 2)
    before = total(vary(m.weight) @ x)
    m.load_state_dict({key: value * 2 for key, value in other.state_dict().items()}, assign=True)
    total(vary(m.weight) @ x).backward()
    return before, m.weight.grad


def assigned_varying(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m = replicated(4, 1)
    m.load_state_dict({"weight": x[None].clone(), "bias": x[:1].clone()}, assign=True)
    total(m(vary(w)) * vary(w)).backward()
    return w.grad, m.weight.grad


def copied(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m, k = copy.deepcopy(replicated(4, 2)), copy.deepcopy(w)
    total(vary(m.weight) @ (x * vary(k))).backward()
    return m.weight.grad, k.grad


def copied_varying(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    k = copy.deepcopy(nn.Parameter(x.clone()))
    total(vary(w) * k).backward()
    return w.grad, k.grad


def averaged(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m = replicated(4, 1)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    mean = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=ema, use_buffers=True)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        total(vary(m.weight) * x).backward()
        optimizer.step()
        mean.update_parameters(m)
        found.append(total(vary(mean.module.weight) * x))
    return found


def normed(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m = nn.utils.parametrizations.weight_norm(replicated(4, 3))
    named = dict(m.named_parameters())
    total(torch.func.functional_call(m, {key: vary(p) for key, p in named.items()}, x)).backward()
    return [p.grad for p in named.values()]


def lists_and_dicts(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    some = nn.ParameterList([w.detach() * k for k in (1.0, 2.0)])
    other = nn.ParameterDict({"a": w.detach() * 3})
    total(vary(some[0]) * x * vary(other["a"]) + vary(some[1]) * x).backward()
    return [p.grad for p in (*some, other["a"])]


def memories_exchanged(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(w.detach() * 3)
    before = total(vary(w) * x + vary(q) * x * x)
    w.data, q.data = q.data, w.data
    after = total(vary(w) * x + vary(q) * x * x)
    after.backward()
    return before, after, w.grad, q.grad


def swapped(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(w.detach() * 3)
    before = total(vary(w) * x)
    torch.utils.swap_tensors(w, q)
    after = total(vary(w) * x)
    after.backward()
    return before, after, w.grad


def swapped_with_what_varies(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q = nn.Parameter(x * 2)
    with torch.no_grad():
        before = total(vary(w) * q)
    torch.utils.swap_tensors(w, q)
    after = total(w * vary(q) * vary(q))
    after.backward()
    return before, after, w.grad, q.grad


def swapped_by_torch(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m, other = replicated(4, 2), replicated(4, 2)
        before = total(vary(m.weight) @ x)
        m.load_state_dict({key: value * 2 for key, value in other.state_dict().items()})
        m.to(torch.float32)
        after = total(vary(m.weight) @ x.float())
        after.backward()
        return before, after, m.weight.grad
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def lazy(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m = nn.LazyLinear(2, bias=False, dtype=F64)
    m(torch.zeros(1, 4, dtype=F64))
    with torch.no_grad():
        m.weight.copy_(torch.stack([w, w * 2]))
    total(vary(m.weight) @ x).backward()
    return (m.weight.grad,)


def one_flat_gradient(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m, flat, start = replicated(4, 2), torch.zeros(10, dtype=F64), 0
    for p in m.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    for _ in range(2):
        total(vary(m.weight) @ x + vary(m.bias)).backward()
        flat.mul_(0.5)
    torch.optim.SGD(m.parameters(), 0.1).step()
    return m.weight, flat, total(vary(flat[:4]) * x)


def one_flat_parameter(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    m, flat, start = replicated(4, 2), torch.zeros(10, dtype=F64), 0
    for p in m.parameters():
        flat[start : start + p.numel()].copy_(p.detach().view(-1))
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    before = total(vary(m.weight) @ x)
    flat.mul_(2)
    after = total(vary(m.weight) @ x + vary(m.bias))
    after.backward()
    return before, after, m.weight.grad


RIGHT: list[Program] = [
    a_new_one, of_varying_values, of_a_buffer, frozen_and_thawed, in_the_image_of_what_varies, zeros_are_replicated,
    put_in_place_of_another, assigned, assigned_varying, copied, copied_varying, averaged, normed, lists_and_dicts,
    memories_exchanged, swapped, swapped_with_what_varies, swapped_by_torch, lazy, one_flat_gradient, one_flat_parameter,
]  # fmt: skip


def found_by(program: Program, mode: bool) -> list[Any]:
    def main() -> list[Tensor]:
        mesh = mc.make_mesh(LINE)
        with mc.use_mesh(mesh):
            x = mc.mark_varying(DATA[mesh.rank].clone(), "dp")
            w = mc.mark_varying(nn.Parameter(torch.tensor([0.5, -1.1, 0.8, 1.7], dtype=F64)), ())
            with mc.check_vma(mode):
                found = program(w, x, (lambda y: y) if mode else (lambda y: mc.pvary(y, "dp")))
            return [y.detach().clone() for y in found]

    return mc.launch(main, ranks=2)


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_right(program: Program) -> None:
    assert_close(found_by(program, True), found_by(program, False))


def another_name(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    nn.Parameter(w.data, requires_grad=False).mul_(x)
    return ()


def of_the_same_memory(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    with torch.no_grad():
        nn.Parameter(w.detach()).add_(x)
    return ()


def swapped_before(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    q, other = nn.Parameter(w.detach() * 3), w.detach()
    torch.utils.swap_tensors(w, q)
    other.mul_(x)  # the memory that is q's now
    return ()


def flat_gradient(w: nn.Parameter, x: Tensor, vary: Change) -> Sequence[Any]:
    flat = torch.zeros(8, dtype=F64)
    w.grad = flat[:4]
    total(w * x).backward()
    flat[:4].mul_(x)
    torch.optim.SGD([w], 0.1).step()
    return ()


REFUSED: list[Program] = [another_name, of_the_same_memory, swapped_before, flat_gradient]


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused(program: Program) -> None:
    """The ranks would drift apart."""
    with pytest.raises(mc.VaryingError, match=r"at test_vma_parameters\.py:\d+ .*invariant"):
        found_by(program, True)
