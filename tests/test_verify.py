"""verify: right programs pass, wrong ones are found with the line to blame and what to write there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.start.workers import WorkerPool

DP = [{"dp": 2}]
F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, W = draw(6, 3), draw(3, 2, seed=1)
SPECS: dict[str, Any] = {"in_specs": ("(dp b) d", "d e"), "out_specs": ""}


def line_of(fn: Callable[..., Any]) -> str:
    """The one that ends in ``# here``."""
    lines, first = inspect.getsourcelines(fn)
    return (
        f"{Path(__file__).name}:{first + next(i for i, line in enumerate(lines) if line.endswith('# here' + chr(10)))}"
    )


def right(x: Tensor, w: Tensor) -> Tensor:
    return mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")


def lacks_pvary(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w  # here
    return mc.all_reduce(h.square().sum(), "dp")


def reduced_twice(x: Tensor, w: Tensor) -> Tensor:
    y = mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
    return mc.all_reduce(y, "dp")  # here


def mean_for_sum(x: Tensor, w: Tensor) -> Tensor:
    h = x @ mc.pvary(w, "dp")
    return mc.all_reduce(h.square().sum(), "dp", "mean")  # here


def not_reduced(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ mc.pvary(w, "dp")).square().sum()  # here
    return (y / 100).tanh()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    y = mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
    return y * mc.axis_size("dp")  # here


def by_chance(x: Tensor, w: Tensor) -> Tensor:
    y = mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
    return y * (2 if mc.axis_size("dp") > 1 else 1)  # here


def mean_of_part(x: Tensor, w: Tensor) -> Tensor:
    mean = x.mean(0)  # here
    return mc.all_reduce(((x - mean) @ mc.pvary(w, "dp")).square().sum(), "dp")


def hooked(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ mc.pvary(w, "dp")).sin()
    n = mc.axis_size("dp")
    h.register_hook(lambda g: g / n)
    return mc.all_reduce(h.square().sum(), "dp")


def stopped(x: Tensor, w: Tensor) -> Tensor:
    h = x @ mc.pvary(w, "dp")
    norm = mc.all_reduce(h.detach().square().sum(), "dp")  # here
    return mc.all_reduce(h.sum(), "dp") / norm


@pytest.mark.parametrize(
    ("fn", "kind", "said"),
    [
        (lacks_pvary, "vjp", r"the gradient of input 1 is off by .* on rank 0 of {'dp': 2}.*\n.*\n  fix: mc.pvary\(operand 1, 'dp'\)"),
        (reduced_twice, "value", r"got: 2 times the right one; .*\n  fix: leave all_reduce at .* out"),
        (mean_for_sum, "value", r"0.5 times the right one; .* a mean too much along it"),
        (not_reduced, "value", r"not yet reduced over 'dp', and tanh .*\n  fix: mc.all_reduce\(it, 'dp'\) after sum"),
        (scaled, "value", r"2 times the right one; .* right up to all_reduce at"),
        (by_chance, "value", r"2 times the right one; on {'dp': 3} it is 2 times, so that it is not the size of 'dp'"),
        (mean_of_part, "value", r"\n  fix: mc.all_reduce\(it, 'dp', 'mean'\) after mean at .*, before sub at"),
        (stopped, "finite differences", r"gradients right back to detach at .*, where they stop"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_line(fn: Callable[..., Any], kind: str, said: str) -> None:
    report = mc.verify(fn, X, W, **SPECS, meshes=DP)
    assert [(each.kind, each.line) for each in report.findings] == [(kind, line_of(fn))], report
    assert report.findings[0].lines[0] == line_of(fn)
    with pytest.raises(mc.VerifyError, match=said):
        report.check()


def test_a_right_program_passes_on_the_meshes_of_its_axes() -> None:
    report = mc.verify(right, X, W, **SPECS)
    assert report.check() is report
    assert report.ran[0].startswith("{'dp': 2}, {'dp': 3}: value, vjp, jvp, second in float64")
    with pytest.raises(AssertionError, match=r"^meshcomm.verify: the gradient of input 0 is off"):
        mc.verify(hooked, X, W, **SPECS).check()


def test_orders_of_the_ranks_and_what_they_share() -> None:
    """The report says why one order stands for all, and finds what depends on who comes first."""
    assert any("one order of the ranks stands for all" in note for note in mc.verify(right, X, W, **SPECS).notes)
    came: list[int] = []

    def who_comes_first(x: Tensor, w: Tensor) -> Tensor:
        came.append(len(came))
        y = right(x, w)
        return y + (0.0 if mc.axis_size("dp") == 1 else float(came[-1] % 2 == len(came)))

    report = mc.verify(who_comes_first, X, W, **SPECS, meshes=DP)
    assert any("shared Python state" in note for note in report.notes), report


def test_trees_modules_numbers_and_what_has_no_derivative() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))

    def step(batch: dict[str, Tensor], model: torch.nn.Module) -> dict[str, Any]:
        weights = {name: mc.pvary(x, "dp") for name, x in model.named_parameters()}
        with mc.rng("(dp b) d", seed=1):
            logits = torch.func.functional_call(model, weights, (batch["x"],))
        losses = torch.nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
        return {"loss": mc.all_reduce(losses, "dp") / 6, "best": logits.argmax(1), "more": None, "n": 3}

    out_specs = {"loss": "", "best": "(dp b)", "more": None, "n": None}
    batch = {"x": X.float(), "y": torch.arange(6) % 4}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    report = mc.verify(step, batch, model, in_specs=({"x": "(dp b) d", "y": "(dp b)"}, None), out_specs=out_specs)
    report.check()
    assert all(torch.equal(x, before[name]) and x.dtype == torch.float32 for name, x in model.state_dict().items())

    def without(batch: dict[str, Tensor], model: torch.nn.Module) -> dict[str, Any]:
        losses = torch.nn.functional.cross_entropy(model[0](batch["x"]), batch["y"], reduction="sum")  # type: ignore[index]  # here
        return {"loss": mc.all_reduce(losses, "dp") / 6, "best": batch["y"], "more": None, "n": 3}

    in_specs = ({"x": "(dp b) d", "y": "(dp b)"}, None)
    report = mc.verify(without, batch, model, in_specs=in_specs, out_specs=out_specs, meshes=DP)
    assert report.findings[0].line == line_of(without)
    assert "the gradient of 0.weight is off" in report.findings[0].text

    report = mc.verify(lambda x: (x > 0).sum(1), X, in_specs="(dp b) d", out_specs="(dp b)", dtypes=(torch.bfloat16,))
    assert report.ok
    assert any("no output depends differentiably on an input" in note for note in report.notes)


def test_a_twin_of_its_own_and_meshes_that_do_not_divide() -> None:
    def dense(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).square().sum()

    report = mc.verify(right, X[:4], W, **SPECS, twin=dense).check()
    assert report.notes[0].startswith("{'dp': 3} was skipped: dim 'b' of length 4 is not divisible")
    assert not mc.verify(right, X, W, **SPECS, twin=lambda x, w: 2 * dense(x, w)).ok
    sizes = []

    def noted(x: Tensor, w: Tensor) -> Tensor:
        sizes.append(mc.axis_size("dp"))
        return right(x, w)

    for twin, said in (
        (lambda x, w: [dense(x, w)], ": the twin returns another structure"),
        (lambda x, w: (dense(x, w), None), ": the twin returns another structure"),
        (lambda x, w: dense(x, w).view(1), ", output: '' has 0 dims, the tensor 1"),
        (lambda x, w: dense(x, w).float(), ": the twin returns another output"),
    ):
        with pytest.raises(mc.MeshError, match=rf"^meshcomm.verify{said}"):
            mc.verify(noted, X, W, **SPECS, twin=twin)
    assert set(sizes) == {1}  # before any mesh runs


def test_a_metric_beside_a_loss_is_no_stopped_gradient() -> None:
    def with_metrics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = right(x, w)
        with torch.no_grad():
            norm = mc.all_reduce(x.square().sum(), "dp").sqrt()
        return loss, loss.detach(), norm

    mc.verify(with_metrics, X, W, in_specs=SPECS["in_specs"], out_specs=("", "", ""), meshes=DP).check()


def test_gradients_that_are_stopped_everywhere() -> None:
    """A note says where; it is a finding where an input was said to require grad, or a twin has a gradient."""

    def all_of_it(x: Tensor, w: Tensor) -> Tensor:
        return right(x.detach(), w.detach())  # here

    def update(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            return right(x, w)

    def on_ranks(x: Tensor, w: Tensor) -> Tensor:
        return right(*(a.detach() if mc.axis_size("dp") > 1 else a for a in (x, w)))  # here

    asked, report = X.clone().requires_grad_(), mc.verify(all_of_it, X, W, **SPECS, meshes=DP).check()
    assert f"Gradients stop at detach at {line_of(all_of_it)}" in report.notes[0]
    assert mc.verify(update, asked, W, **SPECS, meshes=DP).ok
    for fn, x, twin, said in (
        (all_of_it, asked, None, "an input requires grad"),
        (all_of_it, X, lambda x, w: (x @ w).square().sum(), "on one device too"),
        (on_ranks, X, None, "zero everywhere"),
    ):
        report = mc.verify(fn, x, W, **SPECS, meshes=DP, twin=twin)
        assert [(each.kind, each.line) for each in report.findings] == [("vjp", line_of(fn))], report
        assert said in str(report)


def test_what_one_device_does_another_number_of_times_has_a_line() -> None:
    def backwards(x: Tensor, w: Tensor) -> Tensor:
        n, y = mc.axis_size("cp"), torch.zeros((), dtype=x.dtype)
        for step in range(n):
            y = y + x.unflatten(1, (n, -1))[:, (mc.axis_index("cp") + step) % n] @ w  # here
            w = mc.shift(w, "cp")
        return y

    def parted(x: Tensor, w: Tensor) -> Tensor:
        if mc.axis_index("cp"):
            w = w.flip(0)  # here
        return x @ mc.all_gather(w, "cp")

    specs = {"in_specs": ("(cp b) d", "(cp d) e"), "out_specs": "(cp b) e"}
    for fn, n in ((backwards, 3), (parted, 2)):
        report = mc.verify(fn, draw(6, 6), draw(6, 2), **specs, meshes={"cp": n})
        assert [(each.kind, each.line) for each in report.findings] == [("value", line_of(fn))], report


def test_a_ring_and_ranks_that_raise() -> None:
    def ring(x: Tensor, w: Tensor) -> Tensor:
        n, y = mc.axis_size("cp"), torch.zeros((), dtype=x.dtype)
        for step in range(n):
            block = x.unflatten(1, (n, -1))[:, (mc.axis_index("cp") - step) % n]
            y = y + block @ w
            w = mc.shift(w, "cp")
        return y

    specs = {"in_specs": ("(cp b) d", "(cp d) e"), "out_specs": "(cp b) e"}
    mc.verify(ring, draw(6, 6), draw(6, 2), **specs).check()

    def raises(x: Tensor) -> Tensor:
        if mc.axis_size("cp") > 1:
            x = x[:, :2]  # here
        return x @ x.mT

    report = mc.verify(raises, draw(6, 3), in_specs="(cp b) d", out_specs="(cp b) e", meshes={"cp": 2})
    assert [each.kind for each in report.findings] == ["value"]


def verified(rank_of: Callable[[], int]) -> tuple[bool, str, str]:
    wrong = mc.verify(lacks_pvary, X, W, **SPECS)
    return mc.verify(right, X, W, **SPECS).ok, wrong.findings[0].line, wrong.notes[-1]


def test_in_a_running_group_all_ranks_get_one_report() -> None:
    found = mc.launch(verified, ranks=2, args=(lambda: 0,))
    assert found == [(True, line_of(lacks_pvary), "{'dp': 3} was skipped: the group has 2 ranks.")] * 2


def on_processes() -> list[tuple[bool, str, str]]:
    return [
        (report.ok, *((each.line, each.text) for each in report.findings[:1]))
        for report in (mc.verify(fn, X, W, **SPECS, meshes=DP) for fn in (right, lacks_pvary, reduced_twice, hooked))
    ]


def test_on_processes_ranks_get_the_report_of_one_process(pool4: WorkerPool) -> None:
    """Two of four ranks run it, and all know; lines and factors are those that ranks of one process find."""
    here = on_processes()
    assert pool4.run(on_processes) == [here] * 4
    assert [line for _, *lines in here for line, _ in lines][:2] == [line_of(lacks_pvary), line_of(reduced_twice)]


class Doubled(torch.autograd.Function):
    """Twice as much; on a mesh its tangent is four times as much."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 2 * mc.axis_size("dp") * t


class Sine(torch.autograd.Function):
    """Its backward forgets on a mesh that it depends on x."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.detach() if mc.axis_size("dp") > 1 else x).cos()


def wrong_jvp(x: Tensor, w: Tensor) -> Tensor:
    h = Doubled.apply(x @ mc.pvary(w, "dp"))  # here
    return mc.all_reduce(h.square().sum(), "dp")


def wrong_second(x: Tensor, w: Tensor) -> Tensor:
    h = Sine.apply(x @ mc.pvary(w, "dp"))
    return mc.all_reduce(h.square().sum(), "dp")


def other_hook(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ mc.pvary(w, "dp")).sin()  # here
    if mc.axis_size("dp") > 1 and h.requires_grad:
        h.register_hook(lambda g: g + (g - g.detach()))
    return mc.all_reduce(h.square().sum(), "dp")


def test_a_wrong_tangent_or_second_derivative_alone_has_a_line() -> None:
    (tangent,) = mc.verify(wrong_jvp, X, W, **SPECS, meshes=DP).findings
    assert (tangent.kind, tangent.line) == ("jvp", line_of(wrong_jvp))
    assert "is 2 times the right one; 2 is the size of 'dp'" in tangent.text
    (forgotten,) = mc.verify(wrong_second, X, W, **SPECS, meshes=DP, derivatives=("vjp", "second")).findings
    at = inspect.getsourcelines(Sine.forward)[1] + 2
    assert (forgotten.kind, forgotten.line) == ("second", f"test_verify.py:{at}")
    (hook,) = mc.verify(other_hook, X, W, **SPECS, meshes=DP).findings
    assert (hook.kind, hook.line) == ("second", line_of(other_hook))


def in_a_ring(x: Tensor, w: Tensor) -> Tensor:
    n, y = mc.axis_size("cp"), torch.zeros((), dtype=x.dtype)
    for step in range(n):
        block = x.unflatten(1, (n, -1))[:, (mc.axis_index("cp") - step) % n]
        part = block @ w  # here
        if step and part.requires_grad:
            part.register_hook(lambda g: g / 2)
        y = y + part
        w = mc.shift(w, "cp")
    return y


def stage_of_wrong_gradients(ws: Tensor, h: Tensor) -> Tensor:
    for w in ws:
        h = torch.tanh(h @ w)  # here
        if mc.axis_size("pp") > 1 and h.requires_grad:
            h.register_hook(lambda g: 2 * g)
    return h


def stage_of_wrong_values(ws: Tensor, h: Tensor) -> Tensor:
    for w in ws:
        h = torch.tanh(h @ w)
        h = h * mc.axis_size("pp")  # here
        h = h + 0.1
    return h


@pytest.mark.thorough
def test_where_one_device_has_no_such_steps_each_ranks_part_is_nudged() -> None:
    """A ring, and stages of a pipeline, whose steps come another number of times."""
    specs = {"in_specs": ("(cp b) d", "(cp d) e"), "out_specs": "(cp b) e"}
    report = mc.verify(in_a_ring, draw(6, 6), draw(6, 2), **specs, meshes={"cp": 2})
    assert [(each.kind, each.line) for each in report.findings] == [("vjp", line_of(in_a_ring))], report
    assert "0.5 times the right one" in str(report)
    for stage, kind in ((stage_of_wrong_gradients, "vjp"), (stage_of_wrong_values, "value")):

        def piped(x: Tensor, ws: Tensor, stage: Any = stage) -> Any:
            return mc.parallel.pipeline(stage, ws, x, axis="pp")

        report = mc.verify(
            piped, draw(4, 2, 3), draw(4, 3, 3, seed=2), in_specs=("m b d", "(pp l) d e"), out_specs="m b e",
            meshes={"pp": 2},
        )  # fmt: skip
        assert [(each.kind, each.line) for each in report.findings] == [(kind, line_of(stage))], report


def cut_otherwise(x: Tensor, w: Tensor) -> Tensor:
    return mc.reduce_scatter(x @ w, "tp", 1)  # here


def stopped_on_ranks(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    norm = mc.all_reduce(h, "tp").square().sum()
    if mc.axis_size("tp") > 1:
        norm = norm.detach()  # here
    return mc.reduce_scatter(h, "tp", 0) / mc.pvary(norm, "tp")


def test_parts_of_another_layout_and_gradients_that_stop_on_ranks_alone() -> None:
    specs = {"in_specs": ("b (tp d)", "(tp d) e"), "out_specs": "(tp b) e", "meshes": {"tp": 2}}
    for fn, said in ((cut_otherwise, "not those that out_specs says"), (stopped_on_ranks, "gradients stop at detach")):
        (finding,) = mc.verify(fn, draw(4, 4), draw(4, 4, seed=1), **specs).findings
        assert finding.line == line_of(fn), finding
        assert said in finding.text
