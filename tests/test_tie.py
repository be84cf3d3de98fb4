"""tie: what counts as used; and what is said where something does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import work as works

Run = Callable[..., list[Any]]
F64 = torch.float64
INF, NAN = float("inf"), float("nan")


def test_the_value_stays_bit_for_bit_in_new_storage() -> None:
    for x in (
        torch.tensor([0.0, -0.0, INF, NAN, 1e-45]),
        torch.tensor(-0.0, dtype=F64),
        torch.zeros(0, 3),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([1 + 2j, complex(-0.0, INF)]),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ):
        y = mc.tie(x, torch.tensor([NAN, INF]), torch.tensor(1j), torch.zeros(0), None, "text", 3)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.contiguous().view(torch.uint8).equal(x.contiguous().view(torch.uint8)) if x.ndim else y == x
        assert not y.requires_grad
        assert x.numel() == 0 or y.data_ptr() != x.data_ptr()


def test_the_gradient_goes_to_x_and_zeros_to_the_others() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    others = {"a": torch.tensor([NAN, INF], requires_grad=True), "b": [torch.ones((), dtype=F64, requires_grad=True)]}
    others["c"] = torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)
    y = mc.tie(x, others, torch.ones(0, requires_grad=True))
    found = torch.autograd.grad(y.square().sum(), [x, others["a"], others["b"][0], others["c"]])
    assert_close(found[0], 2 * x.detach())
    for g, other in zip(found[1:], [others["a"], others["b"][0], others["c"]], strict=True):
        assert torch.equal(g, torch.zeros_like(other))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,)])
def test_complex_others_of_a_real_value(shape: tuple[int, ...]) -> None:
    """However many elements it has: their numbers are pairs."""
    x = torch.ones(shape, dtype=F64, requires_grad=True)
    others = [torch.ones(each, dtype=torch.complex128, requires_grad=True) for each in ((), (2,), (0, 2))]
    y = mc.tie(x * 3, others[0], others[1].conj(), others[2] * 2)
    found = torch.autograd.grad(y.sum(), [x, *others], create_graph=True)
    assert_close(found[0], torch.full(shape, 3.0, dtype=F64))
    assert all(torch.equal(g, torch.zeros_like(other)) for g, other in zip(found[1:], others, strict=True))


def test_what_needs_no_gradient_needs_one_tied_to_what_does() -> None:
    w = torch.ones(3, requires_grad=True)
    y = mc.tie(torch.ones(2), w * 2)
    assert y.requires_grad
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], torch.zeros(3))
    with torch.no_grad():
        assert not mc.tie(torch.ones(2), w).requires_grad
        assert mc.tie(torch.ones(2, dtype=torch.int64), w).dtype == torch.int64
    assert mc.tie(torch.tensor([True]), torch.ones(1), torch.ones(1, dtype=torch.int64)).tolist() == [True]


def test_trees() -> None:
    w = torch.ones(2, requires_grad=True)
    y = mc.tie({"a": torch.ones(1), "b": (torch.zeros(2, 2), w)}, w * 3)
    assert list(y) == ["a", "b"]
    assert y["a"].requires_grad
    assert y["b"][0].requires_grad
    assert torch.equal(torch.autograd.grad(y["b"][1].sum() + y["a"].sum(), w)[0], torch.ones(2))


def test_every_derivative() -> None:
    x, o = torch.randn(3, dtype=F64), torch.randn(2, 2, dtype=F64)
    f = lambda x, o: (mc.tie(x * x, o.sin()) ** 2).sum()  # noqa: E731
    want = 4 * x**3
    assert_close(grad(f, (0, 1))(x, o), (want, torch.zeros_like(o)))
    assert_close(vjp(f, x, o)[1](torch.ones((), dtype=F64)), (want, torch.zeros_like(o)))
    t = torch.randn(3, dtype=F64)
    assert_close(jvp(f, (x, o), (t, o)), (f(x, o), (want * t).sum()))
    xs, many = torch.randn(5, 3, dtype=F64), torch.randn(5, 2, 2, dtype=F64)
    assert_close(vmap(grad(f))(xs, many), 4 * xs**3)
    assert_close(vmap(mc.tie, (None, 0))(x, many), x.expand(5, 3))
    assert_close(grad(lambda x: grad(f)(x, o).sum())(x), 12 * x**2)
    a, b = x.clone().requires_grad_(), o.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: mc.tie(a * a, b), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: mc.tie(a * a * a, b), (a, b))


def used_on_one(used: bool) -> list[float]:
    """A ring in which index 0 does not use what it received, but for the tie."""
    mesh = mc.make_mesh({"pp": 4})
    with mc.use_mesh(mesh):
        w = torch.full((2,), 1.0 + mesh.rank, dtype=F64, requires_grad=True)
        y = mc.shift(w * w, "pp")
        loss = (y * y).sum() if mesh.rank else mc.tie(w.sum(), y) if used else w.sum()
        loss.backward()
        assert w.grad is not None
        return w.grad.tolist()


def nothing_on_one(swap: bool) -> None:
    """What has no elements on one rank is tied: it takes part in the second derivatives of the others."""
    mesh = mc.make_mesh({"a": 4})
    with mc.use_mesh(mesh):
        counts = torch.tensor([0, 0, 3, 0])
        x = torch.arange(1.0, 4.0, dtype=F64).requires_grad_()
        there, theirs = mc.all_to_all_ragged(x * x, counts, "a")
        tied = mc.tie(there.new_zeros(0) if not len(there) and swap else there * there, there)
        back, _ = mc.all_to_all_ragged(tied, theirs, "a")
        (g,) = torch.autograd.grad((back**2).sum(), x, create_graph=True)
        assert_close(g, 8 * x**7)
        (second,) = torch.autograd.grad((g**2).sum(), x)
        assert_close(second, 896 * x**13)


@pytest.mark.parametrize("swap", [False, True])
def test_what_is_empty_takes_part_in_second_derivatives(run4: Run, swap: bool) -> None:
    run4(nothing_on_one, swap)


def test_tied_ranks_run_the_backward(run4: Run) -> None:
    # The gradient of y * y with y = w * w of the rank before: 4 w^3, and of w on index 0.
    assert run4(used_on_one, True) == [[1.0 + 4.0] * 2, [4 * 8.0] * 2, [4 * 27.0] * 2, [0.0] * 2]


def test_nothing_is_sent_or_counted() -> None:
    def main() -> int:
        mesh = mc.make_mesh({"a": 2})
        y = mc.all_reduce(torch.ones(2), "a", mesh=mesh)
        with mc.trace() as t:
            mc.tie(torch.ones(2), y)
        return len(t.events)

    assert mc.launch(main, ranks=2) == [0, 0]


# ---------------------------------------------------------------------------------------------------------- its type


@pytest.mark.parametrize("mode", [True, "error"])
def test_its_type_is_that_of_x(mode: Any) -> None:
    mesh = mc.make_mesh({"dp": 2})
    x, w = torch.randn(4, dtype=F64), torch.randn(4, dtype=F64, requires_grad=True)

    def body(x: Tensor, w: Tensor) -> Tensor:
        same = mc.tie(w * 2, x)  # invariant: it may go out so, and no pvary is made
        mine = mc.tie(x * 3, w)
        return mc.all_reduce((mc.pvary(same, "dp") * mc.all_gather(mine, "dp")).sum(), "dp", "mean")

    run = mc.shard_map(body, mesh=mesh, in_specs=("(dp n)", "n"), out_specs="", check_vma=mode)
    (g,) = torch.autograd.grad(run(x, w), w)
    assert_close(g, 6 * x)
    out = mc.shard_map(lambda x, w: mc.tie(w, x), mesh=mesh, in_specs=("(dp n)", "n"), out_specs="n", check_vma=mode)
    assert_close(out(x, w), w)
    with pytest.raises(mc.VaryingError, match="varies along 'dp'"):
        mc.shard_map(lambda x, w: mc.tie(x, w), mesh=mesh, in_specs=("(dp n)", "n"), out_specs="n", check_vma=mode)(
            x, w
        )


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mc.tie(None), r"^meshcomm\.tie: x is not a tensor but NoneType"),
        (lambda: mc.tie([torch.ones(1), 2.0]), r"^meshcomm\.tie: x\[1\] is not a tensor but float"),
        (lambda: mc.tie(torch.arange(3), torch.ones(1, requires_grad=True)), r"integers or bools carries no gradient"),
        (lambda: mc.tie(torch.ones(1), works.Work(torch.ones(1))), r"a Work among the others[\s\S]*fix: wait for it"),
    ],
)
def test_bad_calls(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(mc.MeshError, match=said):
        call()


RECEIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: mc.shift(x, "a"),
    "permute": lambda x: mc.permute(x, "a", [(i, (i + 1) % 4) for i in range(4)]),
    "all_to_all": lambda x: mc.all_to_all(x, "a", 0, 0),
    "all_gather": lambda x: mc.all_gather(x, "a"),
    "reduce_scatter": lambda x: mc.reduce_scatter(x, "a"),
    "pvary": lambda x: mc.pvary(x, "a"),
    "shard": lambda x: mc.shard(x, "a"),
}


def pruned(name: str, how: str) -> str:
    """A rank that does not use what it received, and goes on."""
    mesh = mc.make_mesh({"a": 4})
    with mc.use_mesh(mesh):
        w = torch.ones(4, requires_grad=True)
        y = RECEIVED[name](w * 2)
        if how == "detach":
            loss = (y.detach() if mesh.rank == 1 else y).sum() + w.sum()
        elif how == "tie":
            loss = mc.tie(w.sum(), y) if mesh.rank == 1 else y.sum()
        else:
            loss = w.sum() if mesh.rank == 1 else y.sum()
        try:
            loss.backward()
            if how == "goes on":
                mc.all_reduce(w.detach(), "a", "max")
        except mc.CommError as error:
            return str(error)
    return ""


def pruned_and_met(name: str, how: str) -> str:
    """The ranks count alike again after it."""
    text = pruned(name, how)
    mc.barrier("a", timeout=60, mesh=mc.make_mesh({"a": 4}))
    return text


def judge(told: list[str], *, all_ranks: bool) -> None:
    for rank, text in enumerate(told):
        if rank != 1 or all_ranks:
            assert "in backward" in text, (rank, text)
            assert "mc.tie(loss, y)" in text, (rank, text)


@pytest.mark.parametrize("name", RECEIVED)
@pytest.mark.parametrize("how", ["if", "detach", "goes on"])
def test_a_pruned_backward_is_named_in_process(name: str, how: str) -> None:
    judge(mc.launch(pruned, ranks=4, args=(name, how)), all_ranks=how == "goes on")


@pytest.mark.parametrize("name", RECEIVED)
def test_tied_it_is_none(name: str) -> None:
    assert mc.launch(pruned, ranks=4, args=(name, "tie")) == [""] * 4


@pytest.mark.parametrize(("name", "how"), [("shift", "if"), ("all_to_all", "goes on")])
def test_a_pruned_backward_is_named_under_guard(guarded4: Any, name: str, how: str) -> None:
    judge(guarded4.run(pruned_and_met, name, how), all_ranks=how == "goes on")


def waited_for() -> str:
    """Rank 1 comes only when the others have given up."""
    usual, short = mc.make_mesh({"a": 4}), mc.make_mesh({"a": 4}, timeout=2)
    w = torch.ones(4, requires_grad=True)
    mc.barrier("a", mesh=usual)  # however late one of them begins
    y, text = mc.all_gather(w * 2, "a", mesh=short), ""
    if usual.rank != 1:
        with pytest.raises(mc.CommError) as caught:
            y.sum().backward()
        text = str(caught.value)
    mc.barrier("a", mesh=usual)
    if usual.rank == 1:
        mc.reduce_scatter(torch.ones(16), "a", mesh=short)
    assert mc.all_reduce(torch.ones(1), "a", mesh=short, timeout=60).item() == 4
    return text


def test_a_pruned_backward_is_named_when_the_time_is_up(pool4: Any) -> None:
    judge(pool4.run(waited_for), all_ranks=False)


def test_a_difference_outside_of_backward_says_nothing_of_it() -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 2})
        try:
            mc.shift(torch.ones(1), "a", mesh=mesh) if mesh.rank else mc.all_reduce(torch.ones(1), "a", mesh=mesh)
        except mc.CommError as error:
            return str(error)
        return ""

    assert all(text and "backward" not in text for text in mc.launch(main, ranks=2))
