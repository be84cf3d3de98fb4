"""What the checker makes of writes into leaves: what is replicated and trained must not come to vary, whoever writes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.spmd.types.vma import marked

Case = Callable[[nn.Parameter, nn.Parameter], object]
"""``p`` is replicated, ``q`` is each rank's own."""


def place() -> Tensor:
    return 1.0 + mc.axis_index("dp")


def backward(p: Tensor, q: Tensor) -> None:
    mc.all_reduce((p * place() * q).sum(), "dp").backward()


def linear(axes: Any = ()) -> nn.Linear:
    return mc.mark_varying(nn.Linear(3, 1), axes)


def under_no_grad(write: Case) -> Case:
    def run(p: nn.Parameter, q: nn.Parameter) -> object:
        with torch.no_grad():
            return write(p, q)

    return run


def after_backward(write: Case) -> Case:
    def run(p: nn.Parameter, q: nn.Parameter) -> object:
        backward(p, q)
        return write(p, q)

    return run


def steps_with(name: str, **options: Any) -> Case:
    """A step with a gradient of another type than the parameter, which came in where nobody looked."""

    def run(p: nn.Parameter, q: nn.Parameter) -> object:
        backward(p, q)
        optimizer = getattr(torch.optim, name)([p, q], lr=0.1, **options)
        with mc.check_vma(False):
            p.grad = mc.mark_varying(p.grad * 2, "dp")
        return optimizer.step()

    return run


def set_data(p: nn.Parameter, q: nn.Parameter) -> None:
    p.data = q.detach().clone()


def put(x: Tensor, at: Any, value: Tensor) -> None:
    x[at] = value


def add(x: Tensor, y: Tensor) -> None:
    x += y


def averages(p: nn.Parameter, q: nn.Parameter) -> None:
    model = torch.optim.swa_utils.AveragedModel(linear())
    mc.mark_varying(model, ())
    model.update_parameters(linear("dp"))


def moving_average(p: nn.Parameter, q: nn.Parameter) -> None:
    mean = mc.mark_varying(copy.deepcopy(p), ())
    with torch.no_grad():
        mean.lerp_(p * place(), 0.1)


def a_part_of_one_memory(p: nn.Parameter, q: nn.Parameter) -> None:
    flat = torch.zeros(6)
    p.data = flat[:3]
    flat.mul_(place())
    p * 2


def clipped(**options: Any) -> Case:
    return after_backward(lambda p, q: nn.utils.clip_grad_norm_([p, q], 1.0, **options))


LEAF, GRADIENT = "into a leaf that requires grad and is invariant", "into the gradient of a leaf that is invariant"
REFUSED: dict[str, tuple[str, Case]] = {
    "copy_": (LEAF, under_no_grad(lambda p, q: p.copy_(q))),
    "mul_": (LEAF, under_no_grad(lambda p, q: p.mul_(place()))),
    "+=": (LEAF, under_no_grad(lambda p, q: add(p, q))),
    "[1] =": (LEAF, under_no_grad(lambda p, q: put(p, 1, q[1]))),
    "a mask": (LEAF, under_no_grad(lambda p, q: put(p, q > 1, torch.zeros(())))),
    "a view": (LEAF, under_no_grad(lambda p, q: p.view(-1)[1:].copy_(q[1:]))),
    "out=": (LEAF, under_no_grad(lambda p, q: torch.add(p, q, out=p))),
    "lerp_": (LEAF, under_no_grad(lambda p, q: p.lerp_(q, 0.5))),
    "index_add_": (LEAF, under_no_grad(lambda p, q: p.index_add_(0, torch.tensor([1]), q[:1]))),
    "masked_fill_": (LEAF, under_no_grad(lambda p, q: p.masked_fill_(q > 1, 0.0))),
    "_foreach_add_": (LEAF, under_no_grad(lambda p, q: torch._foreach_add_([p], [q]))),
    "_foreach_copy_": (LEAF, under_no_grad(lambda p, q: torch._foreach_copy_([p], [q]))),
    ".data.copy_": (LEAF, lambda p, q: p.data.copy_(q)),
    ".data.mul_": (LEAF, lambda p, q: p.data.mul_(place())),
    ".data[0] =": (LEAF, lambda p, q: put(p.data, 0, q.data[0])),
    ".data[:2].add_": (LEAF, lambda p, q: p.data[:2].add_(q.data[:2])),
    ".data =": (LEAF, set_data),
    ".detach().copy_": (LEAF, lambda p, q: p.detach().copy_(q)),
    "a view of .detach()": (LEAF, lambda p, q: p.detach().view(-1)[1:].mul_(q.detach()[1:])),
    "a part of one memory": ("a leaf that requires grad and is invariant, and the ranks", a_part_of_one_memory),
    "vector_to_parameters": (LEAF, lambda p, q: nn.utils.vector_to_parameters(q.detach(), [p])),
    "reset_parameters": (LEAF, lambda p, q: linear().reset_parameters()),
    "nn.init": (LEAF, lambda p, q: nn.init.normal_(p)),
    "moving average": (LEAF, moving_average),
    "AveragedModel": (LEAF, averages),
    "grad.mul_": (GRADIENT, after_backward(lambda p, q: p.grad.mul_(place()))),  # type: ignore[union-attr]
    "grad *=": (GRADIENT, after_backward(lambda p, q: p.grad.__imul__(place()))),  # type: ignore[union-attr]
    "grad[:1]": (GRADIENT, after_backward(lambda p, q: p.grad[:1].mul_(place()))),  # type: ignore[index]
    "grad.data": (GRADIENT, after_backward(lambda p, q: p.grad.data.mul_(place()))),  # type: ignore[union-attr]
    "grad.detach()": (GRADIENT, after_backward(lambda p, q: p.grad.detach().mul_(place()))),  # type: ignore[union-attr]
    "grad += noise": (GRADIENT, after_backward(lambda p, q: p.grad.add_(torch.randn(3)))),  # type: ignore[union-attr]
    "grad, foreach": (GRADIENT, after_backward(lambda p, q: torch._foreach_mul_([p.grad], [place()]))),
    "clip_grad_norm_": (GRADIENT, clipped()),
    "clip_grad_norm_, foreach": (GRADIENT, clipped(foreach=True)),
    "clip_grad_norm_, one by one": (GRADIENT, clipped(foreach=False)),
    "clip_grad_norm_, inf": (GRADIENT, clipped(norm_type=float("inf"))),
    ".grad =": ("a gradient of another type", after_backward(lambda p, q: setattr(p, "grad", q.detach()))),
    **{
        f"{name}{', '.join(['', *options])}": (LEAF, steps_with(name, **options))
        for name in ("SGD", "Adam", "AdamW", "Adagrad")
        for options in ({}, {"foreach": True}, {"fused": True})
    },
    "RMSprop": (LEAF, steps_with("RMSprop")),
    "SGD, momentum": (LEAF, steps_with("SGD", momentum=0.9)),
}


def in_check(case: Case, fetch: Callable[[nn.Parameter, nn.Parameter], Any] = lambda p, q: None) -> list[Any]:
    def run() -> Any:
        mesh = mc.make_mesh({"dp": 2})
        p = mc.mark_varying(nn.Parameter(torch.ones(3)), ())
        q = mc.mark_varying(nn.Parameter(torch.ones(3) * (mesh.rank + 1)), "dp")
        with mc.use_mesh(mesh), mc.check_vma():
            case(p, q)
        return fetch(p, q)

    return mc.launch(run, ranks=2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_varies_is_not_written_into_what_is_replicated_and_trained(name: str) -> None:
    what, case = REFUSED[name]
    with pytest.raises(mc.VaryingError, match=r"at test_vma_leaves\.py:\d+") as caught:
        in_check(case)
    assert what in str(caught.value)


def test_nor_by_load_state_dict() -> None:
    """torch puts the error into one of its own."""

    def load(p: nn.Parameter, q: nn.Parameter) -> None:
        linear().load_state_dict({"weight": q.detach()[None], "bias": q.detach()[:1]})

    with pytest.raises(RuntimeError, match=r"at test_vma_leaves\.py:\d+ writes what varies along 'dp' into a leaf"):
        in_check(load)


# ------------------------------------------------------------------------------------------------- what goes on working


def axes(x: Tensor) -> list[str] | None:
    found = marked(x)
    return None if found is None else sorted(found.axes)


def trained(name: str, **options: Any) -> Case:
    def run(p: nn.Parameter, q: nn.Parameter) -> None:
        optimizer = getattr(torch.optim, name)([p, q], lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)  # a gradient that is all zeros still has the type of its leaf
            backward(p, q)
            optimizer.step()

    return run


def clipped_rightly(p: nn.Parameter, q: nn.Parameter) -> None:
    backward(p, q)
    assert p.grad is not None
    assert q.grad is not None
    norm = (p.grad.square().sum() + mc.all_reduce(q.grad.square().sum(), "dp")).sqrt()
    for x in (p.grad, q.grad):
        x.div_(norm)


def scaled_elsewhere(p: nn.Parameter, q: nn.Parameter) -> None:
    """What is made of a gradient is another matter."""
    backward(p, q)
    assert p.grad is not None
    p.grad = mc.all_reduce(p.grad * place(), "dp")
    p.grad.clone().mul_(place())


def made_alike(p: nn.Parameter, q: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(mc.broadcast(q, "dp"))
        p.sub_(0.5)
    p.data.copy_(mc.all_reduce(q.detach(), "dp"))


def parts_that_begin_alike(p: nn.Parameter, q: nn.Parameter) -> None:
    with torch.no_grad():
        q.zero_()
        q.copy_(p)
        q.add_(place())
    q.data = q.data * 2


def made_equal(p: nn.Parameter, q: nn.Parameter) -> None:
    with torch.no_grad():
        q.copy_(mc.broadcast(q, "dp"))


def buffers(p: nn.Parameter, q: nn.Parameter) -> None:
    """What is not trained may hold anything."""
    buffer = torch.zeros(3)
    buffer.copy_(q.detach())
    norm = mc.mark_varying(nn.BatchNorm1d(3), ())
    norm(q.detach() * torch.arange(4.0)[:, None])


def drawn_when_made(p: nn.Parameter, q: nn.Parameter) -> None:
    """A new leaf may become each rank's own; one that was declared may not."""
    w = torch.empty(3, requires_grad=True)
    nn.init.normal_(w)
    mc.all_reduce((w * p).sum(), "dp").backward()
    assert axes(w) == ["dp"]


KEPT: dict[str, tuple[Case, list[str], list[str]]] = {
    **{
        f"{name}{', '.join(['', *options])}": (trained(name, **options), [], ["dp"])
        for name in ("SGD", "Adam")
        for options in ({}, {"foreach": True}, {"fused": True})
    },
    "clipped rightly": (clipped_rightly, [], ["dp"]),
    "scaled elsewhere": (scaled_elsewhere, [], ["dp"]),
    "made alike": (made_alike, [], ["dp"]),
    "parts that begin alike": (parts_that_begin_alike, [], ["dp"]),
    "made equal": (made_equal, [], []),
    "buffers": (buffers, [], ["dp"]),
    "drawn when made": (drawn_when_made, [], ["dp"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_writes_are_taken(name: str) -> None:
    case, *expected = KEPT[name]
    found = in_check(case, lambda p, q: (axes(p), axes(q), p.detach()))
    assert [list(each[:2]) for each in found] == [expected] * 2
    assert torch.equal(found[0][2], found[1][2])
