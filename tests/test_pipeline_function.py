"""parallel.pipeline against the stages one after the other on one rank: values and derivatives of every kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel

Run = Callable[..., list[Any]]
F64 = torch.float64
D = 3


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def stage(w: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w)


def square(h: Tensor, target: Tensor) -> Tensor:
    return (h - target).square().mean()


def whole(w: Tensor, x: Tensor, targets: Tensor | None = None) -> Tensor:
    for each in w:
        x = stage(each, x)
    return x if targets is None else square(x, targets)


class Case:
    """This rank's stage, and all of them."""

    def __init__(self, m: int) -> None:
        self.mesh = mc.make_mesh({"pp": -1})
        self.r, self.n = self.mesh.rank, self.mesh.size
        self.w, self.x, self.t = drawn(0, self.n, D, D), drawn(1, m, 2, D), drawn(2, m, 2, D)

    def piped(self, w: Tensor, x: Tensor, targets: Tensor | None = None, **how: Any) -> Tensor:
        loss = None if targets is None else square
        found: Tensor = parallel.pipeline(stage, w, x, axis="pp", loss=loss, targets=targets, mesh=self.mesh, **how)
        return found

    def total(self, mine: Tensor) -> Tensor:
        return mc.all_reduce(mine, "pp", mesh=self.mesh)


def thrice(run: Callable[..., Tensor], leaves: tuple[Tensor, ...], total: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The value, and derivatives up to the third, of which each is of the squares of those before it."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    found = [y := run(*leaves)]
    s = y.sum()  # a cotangent that is constant: nothing of the value is in the first derivative
    for _ in range(3):
        first, *others = torch.autograd.grad(s, leaves, create_graph=True)
        found += [first, *others]
        s = total(first.square().sum()) + sum(each.square().sum() for each in others)
    return found


def every_order(m: int, with_loss: bool, remat: bool) -> None:
    case = Case(m)
    given = (case.x, case.t) if with_loss else (case.x,)
    mine = thrice(lambda *leaves: case.piped(*leaves, remat=remat), (case.w[case.r], *given), case.total)
    all_ = thrice(whole, (case.w, *given), lambda s: s)
    each = len(given) + 1
    for at in range(1, len(all_), each):
        all_[at] = all_[at][case.r]
    assert_close(mine, all_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("ranks", "m"), [(1, 2), (2, 1), (4, 2), (3, 5)])
@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "outputs"])
def test_every_order(ranks: int, m: int, with_loss: bool) -> None:
    mc.launch(every_order, ranks=ranks, args=(m, with_loss, ranks == 3))


def test_every_order_on_processes(pool4: Any) -> None:
    pool4.run(every_order, 3, True, True)


def transforms() -> None:
    case = Case(3)
    w, x, t, r = case.w[case.r], case.x, case.t, case.r

    def ours(w: Tensor, x: Tensor) -> Tensor:
        return case.piped(w, x, t)

    def alone(w: Tensor, x: Tensor) -> Tensor:
        return whole(w, x, t)

    grad = torch.func.grad
    mine, all_ = grad(ours, (0, 1))(w, x), grad(alone, (0, 1))(case.w, x)
    assert_close(mine, (all_[0][r], all_[1]), rtol=1e-10, atol=1e-10)
    twice = [grad(lambda x, f=f, w=w: grad(f, 1)(w, x).square().sum())(x) for f, w in ((ours, w), (alone, case.w))]
    assert_close(*twice, rtol=1e-10, atol=1e-10)
    tw, tx = drawn(3, *case.w.shape), drawn(4, *x.shape)
    for along in ((tw, tx), (tw, 0 * tx), (0 * tw, tx)):
        mine = torch.func.jvp(ours, (w, x), (along[0][r], along[1]))
        assert_close(mine, torch.func.jvp(alone, (case.w, x), along), rtol=1e-10, atol=1e-10)
    many = drawn(5, 4, *x.shape)
    mine, all_ = (torch.func.vmap(grad(f, (0, 1)), (None, 0))(w, many) for f, w in ((ours, w), (alone, case.w)))
    assert_close(mine, (all_[0][:, r], all_[1]), rtol=1e-10, atol=1e-10)
    with pytest.raises(mc.MeshError, match=r"remat=True under a torch.func transform"):
        grad(lambda w: case.piped(w, x, t, remat=True))(w)


def test_transforms() -> None:
    mc.launch(transforms, ranks=3)


def test_transforms_on_processes(pool4: Any) -> None:
    pool4.run(transforms)


def ranks_that_differ() -> None:
    """A stage that is frozen, one that ignores what it gets, a head that only the last rank has."""
    case = Case(2)
    r, n, x, t = case.r, case.n, case.x, case.t
    for frozen in range(n):
        w = case.w[r].clone().requires_grad_(r != frozen)
        every = [each.clone().requires_grad_(at != frozen) for at, each in enumerate(case.w)]
        case.piped(w, x, t).backward()
        whole(every, x, t).backward()  # type: ignore[arg-type]
        assert_close(w.grad, every[r].grad, rtol=1e-10, atol=1e-10)
    for deaf in range(n):
        w = case.w[r].clone().requires_grad_()
        loss = parallel.pipeline(
            lambda w, h, deaf=deaf: stage(w, torch.ones_like(h) if r == deaf else h),
            w, x, axis="pp", loss=square, targets=t, mesh=case.mesh,
        )  # fmt: skip
        (found,) = torch.autograd.grad(loss, w)
        assert (found == 0).all() == (r < deaf)
    head = nn.Linear(D, D, dtype=F64)
    module = nn.Linear(D, D, dtype=F64)
    loss = parallel.pipeline(
        lambda _, h: module(h), None, x, axis="pp", loss=lambda h, t: square(head(h), t), targets=t, mesh=case.mesh
    )
    loss.backward()
    assert (head.weight.grad is not None) == (r == n - 1)
    assert module.weight.grad is not None
    with torch.no_grad():
        assert not case.piped(case.w[r], x, t).requires_grad


def test_ranks_that_differ(run4: Run) -> None:
    run4(ranks_that_differ)


def trees() -> None:
    case = Case(3)
    x = {"h": case.x.clone(), "ids": torch.arange(6).view(3, 2), "more": (drawn(6, 3, 2, D).float(),)}

    def fn(w: Tensor, h: dict[str, Any]) -> dict[str, Any]:  # in another order
        more = h["more"][0]
        return {"more": (more * 2,), "ids": h["ids"] + 1, "h": stage(w, h["h"]) + more}

    def run(fully: bool) -> tuple[Any, ...]:
        h = {**x, "h": x["h"].clone().requires_grad_(), "more": (x["more"][0].clone().requires_grad_(),)}  # type: ignore[attr-defined]
        w = (case.w if fully else case.w[case.r]).clone().requires_grad_()
        y: Any = h
        if fully:
            for each in w:
                y = fn(each, y)
        else:
            y = parallel.pipeline(fn, w, h, axis="pp", mesh=case.mesh)
        g = torch.autograd.grad(y["h"].square().sum() + y["more"][0].sum(), (w, h["h"], h["more"][0]))
        return y, g[0][case.r] if fully else g[0], *g[1:]

    assert_close(run(False), run(True))


def test_trees(run4: Run) -> None:
    run4(trees)


def test_under_a_checker() -> None:
    """Bias and head are closed over and invariant: each gets one pvary, at the same place on all ranks."""
    mesh = mc.make_mesh({"dp": 2, "pp": 3})
    given = drawn(0, 3, D, D), drawn(1, D), drawn(2, D, D), drawn(3, 2, 4, D), drawn(4, 2, 4, D)

    def piped(w: Tensor, b: Tensor, head: Tensor, x: Tensor, t: Tensor, vary: bool = False) -> Tensor:
        if vary:
            w, b, head = mc.pvary(w, "dp"), mc.pvary(b, ("dp", "pp")), mc.pvary(head, ("dp", "pp"))
        loss = parallel.pipeline(
            lambda w, h: torch.tanh(h @ w[0] + b), w, x, axis="pp", loss=lambda h, t: square(h @ head, t), targets=t
        )
        assert mc.varying_axes(loss) == {"dp"}
        return mc.all_reduce(loss, "dp", "mean")

    def alone(w: Tensor, b: Tensor, head: Tensor, x: Tensor, t: Tensor) -> Tensor:
        for each in w:
            x = torch.tanh(x @ each + b)
        return square(x @ head, t)

    specs = "(pp l) d e", "d", "d e", "m (dp b) d", "m (dp b) d"
    found = []
    for run in (
        alone,
        mc.shard_map(piped, mesh=mesh, in_specs=specs, out_specs=""),
        mc.shard_map(
            lambda *leaves: piped(*leaves, vary=True), mesh=mesh, in_specs=specs, out_specs="", check_vma="error"
        ),
    ):
        leaves = [leaf.clone().requires_grad_() for leaf in given]
        found.append([y := run(*leaves), *torch.autograd.grad(y, leaves)])
    assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
    assert_close(found[2], found[0], rtol=1e-10, atol=1e-10)


def compiled(backend: str = "aot_eager") -> None:
    case = Case(3)
    found = []
    for run in (case.piped, torch.compile(case.piped, fullgraph=True, backend=backend)):
        w, x = case.w[case.r].clone().requires_grad_(), case.x.clone().requires_grad_()
        loss = run(w, x, case.t, remat=run is not case.piped)
        loss.backward()
        found.append([loss.detach(), w.grad, x.grad])
    assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
def test_compiled(pool4: Any) -> None:
    pool4.run(compiled)


@pytest.mark.thorough
def test_compiled_by_inductor(pool2: Any) -> None:
    pool2.run(compiled, "inductor")


def half_precision() -> None:
    """The loss is float32 on all ranks, and what a stage computes in bfloat16 comes so."""
    case = Case(2)
    w, x = case.w[case.r].bfloat16().requires_grad_(), case.x.bfloat16()
    loss = parallel.pipeline(stage, w, x, axis="pp", loss=lambda h: h.sum(), mesh=case.mesh)
    loss.backward()
    assert (loss.dtype, w.grad is not None and w.grad.dtype) == (torch.float32, torch.bfloat16)
    outputs = case.piped(w, x)
    assert outputs.dtype == torch.bfloat16
    assert_close(outputs.sum((1, 2)).mean(dtype=torch.float32), loss, rtol=2e-2, atol=2e-2)


def test_the_function_is_had_whatever_was_imported_first() -> None:
    """Its package is called so too, and whoever imports from there sets the attribute of the package above."""
    code = "from meshcomm import parallel; parallel.Schedule; import meshcomm.parallel.pipeline.named; "
    subprocess.run(
        [sys.executable, "-c", code + "assert callable(parallel.pipeline) and 'function' in repr(parallel.pipeline)"],
        check=True,
    )
    assert callable(parallel.pipeline)


def test_half_precision() -> None:
    mc.launch(half_precision, ranks=3)


def test_what_is_sent() -> None:
    def main() -> list[str]:
        case = Case(3)
        with mc.trace() as trace:
            case.piped(case.w[case.r].clone().requires_grad_(), case.x, case.t).backward()
        return [event.operation for event in trace.events]

    n, m = 2, 3
    turns = ["permute"] * (m + n - 2)
    assert mc.launch(main, ranks=n) == [["all_gather", *turns, "broadcast", *turns]] * n


WRONG: dict[str, tuple[Callable[[Case, Tensor], Any], str]] = {
    "a pvary": (lambda case, h: h * mc.pvary(case.x[0, 0], "pp", mesh=case.mesh), "a stage communicates along axis 'pp'"),
    "axes of which it is one": (lambda case, h: mc.all_reduce(h, ("one", "pp"), mesh=case.mesh), "a stage communicates"),
    "another shape": (lambda case, h: h[:1], r"fn takes f64\[2, 3\] and gives f64\[1, 3\]"),
    "another dtype": (lambda case, h: h.float(), r"fn takes f64\[2, 3\] and gives f32\[2, 3\]"),
    "another tree": (lambda case, h: (h,), r"fn takes \[''\] and gives \['\[0\]'\]"),
    "nothing": (lambda case, h: None, "what fn gives, x, is not a tensor but NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_stages_that_are_wrong(what: str) -> None:
    fn, words = WRONG[what]

    def main() -> None:
        case = Case(2)
        case.mesh = mc.make_mesh({"one": 1, "pp": 2})
        parallel.pipeline(lambda _, h: fn(case, h), None, case.x, axis="pp", mesh=case.mesh)

    with pytest.raises(mc.MeshError, match=words):
        mc.launch(main, ranks=2)


def test_a_stage_may_ask_where_it_is() -> None:
    def main() -> list[float]:
        mesh = mc.make_mesh({"pp": 2})
        x = torch.zeros(2)
        y = parallel.pipeline(lambda _, h: h + mc.axis_index("pp") + mc.axis_size("pp"), None, x, axis="pp", mesh=mesh)
        assert mc.all_reduce(torch.ones(()), "pp", mesh=mesh) == 2
        return y.tolist()  # type: ignore[no-any-return]

    def run() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"pp": 2})):
            return main()

    assert mc.launch(run, ranks=2) == [[5.0, 5.0]] * 2


def test_ranks_that_ask_for_other_things(run4: Run) -> None:
    def main(what: str) -> str:
        case = Case(3)
        odd = case.r == 2
        x = {"m": case.x[: 3 - odd], "shape": case.x[:, : 2 - odd], "dtype": case.x.to(torch.float32 if odd else F64)}
        how: dict[str, Any] = {"loss": torch.sum} if what == "loss" and odd else {}
        with pytest.raises(mc.MeshError, match="ranks differ in") as found:
            parallel.pipeline(stage, case.w[case.r], x.get(what, case.x), axis="pp", mesh=case.mesh, **how)
        return str(found.value).split("\n")[0]

    for what, words in {
        "m": "the shapes",
        "shape": "the shapes",
        "dtype": "the shapes",
        "loss": "whether there is a loss",
    }.items():
        assert all(words in each and "index 2 and index 0" in each for each in run4(main, what))
