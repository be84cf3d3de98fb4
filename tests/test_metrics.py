"""Reductions of many things: dicts of metrics, means over tokens, parameters in place, one collective per log line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.runtime.call import told
from meshcomm.runtime.transports.threads.transport import InProcessLink
from meshcomm.training.metrics import Metrics
from meshcomm.training.reductions import all_reduce_params, weighted_mean

Run = Callable[..., list[Any]]


# --------------------------------------------------------------------------------------------------- dicts of metrics


def mixed() -> dict[str, list[float]]:
    mesh = mc.make_mesh({"a": 4})
    r = mesh.rank
    line = {
        "loss": torch.tensor(1.5 + r),
        "seen": torch.tensor(10 * r),
        "half": torch.tensor([r, 1.0]).half(),
        "wide": torch.tensor(2.0**-60 * r).double(),
    }
    if r % 2:
        line = dict(reversed(line.items()))
    out = mc.all_reduce(line, "a", mesh=mesh)
    assert list(out) == list(line)
    assert all(out[name].dtype == line[name].dtype for name in line)
    top = mc.all_reduce(line, "a", "max", mesh=mesh)
    return {name: [out[name].double().sum().item(), top[name].double().sum().item()] for name in sorted(out)}


def test_a_dict_of_mixed_dtypes(run4: Run) -> None:
    want = {"half": [10.0, 4.0], "loss": [12.0, 4.5], "seen": [60.0, 30.0], "wide": [6 * 2.0**-60, 3 * 2.0**-60]}
    assert run4(mixed) == [want] * 4


def test_mean_of_integers_is_an_error_that_says_to_cast() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        line = {"loss": torch.tensor(1.0), "correct": [torch.tensor(3)]}
        with pytest.raises(
            mc.MeshError, match=r"(?s)'mean' is not defined for torch.int64.*x.float\(\).*leaf: x\['correct'\]\[0\]"
        ):
            mc.all_reduce(line, "a", "mean", mesh=mesh)
        with pytest.raises(mc.MeshError, match=r"(?s)not a tensor but float.*leaf: x\['lr'\]"):
            mc.all_reduce({"lr": 0.1}, "a", mesh=mesh)

    mc.launch(main, ranks=2)


# ------------------------------------------------------------------------------------------------------ weighted_mean


def token_mean() -> list[Any]:
    """The loss over tokens of ragged batches and its gradient, against one rank with all tokens."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    torch.manual_seed(0)
    batches = [torch.randn(k, 3, dtype=torch.float64) for k in (5, 1, 0, 3)]
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    whole = torch.cat(batches) @ weight
    expected = whole.square().mean()
    (gradient,) = torch.autograd.grad(expected, weight)

    mine = batches[mesh.rank]
    with mc.use_mesh(mesh):
        losses = (mine @ mc.pvary(weight, ("a", "b"))).square()
        loss = weighted_mean(losses.sum(), len(losses), ("a", "b"))
        loss.backward()
    assert_close(loss, expected)
    assert_close(weight.grad, gradient)
    return [loss.item()]


def test_the_mean_over_tokens(run4: Run) -> None:
    found = run4(token_mean)
    assert found == [found[0]] * 4


def classes() -> None:
    """Per class, per leaf, in every dtype; counts as tensors of ints, as floats, one for all."""
    mesh = mc.make_mesh({"a": 3})
    r = mesh.rank
    with mc.use_mesh(mesh):
        per_class = weighted_mean(torch.tensor([[r, 2.0 * r]]), torch.tensor([[1, r]]), "a")
        assert_close(per_class, torch.tensor([[3 / 3, 6 / 3]]))
        tree = weighted_mean(
            {"loss": torch.tensor(1.0 * r), "hits": torch.tensor(r)}, {"hits": 4, "loss": 0.5 * r}, "a"
        )
        assert {k: v.item() for k, v in tree.items()} == {"loss": 2.0, "hits": 0.25}
        assert tree["hits"].dtype == torch.float32
        both = weighted_mean([torch.ones(2) * r, torch.ones(()) * r], 2, "a")
        assert [x.tolist() for x in both] == [[0.5, 0.5], 0.5]
        half = weighted_mean(torch.tensor(300.0 * (r + 1)).bfloat16(), 257, "a")  # 257 is none of bfloat16's numbers
        assert half.dtype == torch.bfloat16
        assert half == torch.tensor(float(Fraction(300 + 600 + 900, 3 * 257))).bfloat16()
        exact = weighted_mean(torch.tensor(2**24 + r), 3, "a")
        assert exact == torch.tensor((3 * 2**24 + 3) / 9, dtype=torch.float64).float()
        assert weighted_mean(torch.zeros(()), 0, "a").isnan()
        assert weighted_mean(torch.tensor(1j), 1, "a") == 1j


def test_weighted_means() -> None:
    mc.launch(classes, ranks=3)


def learned_weights() -> Tensor:
    """Counts may require grad."""
    mesh = mc.make_mesh({"a": 2})
    w = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([5.0, 7.0], dtype=torch.float64)
    mine = mc.pvary(w, "a", mesh=mesh)[mesh.rank]
    weighted_mean(mine * x[mesh.rank], mine, "a", mesh=mesh).backward()
    return w.grad


def test_the_gradient_of_weights() -> None:
    w = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    ((w * torch.tensor([5.0, 7.0])).sum() / w.sum()).backward()
    for grad in mc.launch(learned_weights, ranks=2):
        assert_close(grad, w.grad)


def transformed() -> list[Any]:
    """grad, vmap, jvp and second derivatives are those of the sum over all ranks, divided by all counts."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.arange(3.0, dtype=torch.float64) + mesh.rank

    def mean(v: Tensor) -> Tensor:
        return weighted_mean((v**3).sum(), 1 + mesh.rank, "a", mesh=mesh)

    assert_close(torch.func.grad(mean)(x), 3 * x**2 / 10)
    _, tangent = torch.func.jvp(mean, (x,), (torch.ones_like(x),))
    batched = torch.func.vmap(mean)(torch.stack([x, 2 * x]))
    y = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(mean(y), y, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), y)
    assert_close(second, 6 * x / 10)
    return [tangent.item(), batched.tolist()]


def test_weighted_mean_under_transforms(run4: Run) -> None:
    every = [torch.arange(3.0, dtype=torch.float64) + rank for rank in range(4)]
    whole = sum((x**3).sum().item() for x in every) / 10
    slope = sum((3 * x**2).sum().item() for x in every) / 10
    for tangent, batched in run4(transformed):
        assert tangent == pytest.approx(slope)
        assert batched == pytest.approx([whole, 8 * whole])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: weighted_mean(torch.ones(()), 1, "z"), "meshcomm.weighted_mean: no axis 'z'"),
        (lambda: weighted_mean(1.0, 1, "a"), "total is not a tensor but float"),
        (lambda: weighted_mean({"x": [3]}, 1, "a"), r"(?s)total is not a tensor but int.*leaf: total\['x'\]\[0\]"),
        (lambda: weighted_mean(torch.ones(()), True, "a"), "count is bool"),
        (lambda: weighted_mean(torch.ones(()), None, "a"), "count is NoneType"),
        (lambda: weighted_mean(torch.ones(()), torch.ones((), dtype=torch.complex64), "a"), "count is torch.complex64"),
        (lambda: weighted_mean(torch.ones(2), torch.ones(3), "a"), r"count of shape \[3\] does not broadcast to total of shape \[2\]"),
        (lambda: weighted_mean(torch.ones(()), torch.ones(1), "a"), r"count of shape \[1\] does not broadcast to total of shape \[\]"),
        (lambda: weighted_mean({"x": torch.ones(1)}, {"y": 1}, "a"), "count has another structure than total"),
    ],
)  # fmt: skip
def test_arguments_of_weighted_mean(call: Callable[[], Any], text: str) -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2})), pytest.raises(mc.MeshError, match=text):
            call()

    mc.launch(main, ranks=2)


# -------------------------------------------------------------------------------------------------- all_reduce_params


def drifted() -> list[Any]:
    mesh = mc.make_mesh({"a": 4})
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for i, x in enumerate([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]):
            x.copy_(torch.arange(float(x.numel())).view(x.shape) + i + mesh.rank)
        model[1].num_batches_tracked.fill_(mesh.rank)
    held = [p.data_ptr() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    with mc.use_mesh(mesh):
        all_reduce_params(model.parameters(), "a", "mean", bucket_mb=1e-5)
        all_reduce_params((b for b in model.buffers() if b.is_floating_point()), "a", "mean")
        all_reduce_params([model[1].num_batches_tracked], "a", "max")
        assert all_reduce_params([], "a") is None
    assert held == [p.data_ptr() for p in model.parameters()]
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True)), "autograd knows"
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    return [x.tolist() for x in model.state_dict().values()]


def test_parameters_in_place(run4: Run) -> None:
    weight = (torch.arange(6.0).view(2, 3) + 1.5).tolist()
    mean, var = [5.5, 6.5], [6.5, 7.5]
    assert run4(drifted) == [[weight, [2.5, 3.5], [3.5, 4.5], [4.5, 5.5], mean, var, 3]] * 4


@pytest.mark.parametrize(
    ("params", "op", "text"),
    [
        (torch.ones(2), "sum", "meshcomm.all_reduce_params: params is a Tensor"),
        (3, "sum", "params is a int"),
        ([torch.ones(1), torch.tensor(3)], "mean", r"(?s)'mean' is not defined for torch.int64.*leaf: x\[1\]"),
        ([torch.ones(1), None], "sum", r"(?s)not a tensor but NoneType.*leaf: x\[1\]"),
        ([torch.ones(1)], "median", "no reduce op 'median'"),
    ],
)  # fmt: skip
def test_arguments_of_all_reduce_params(params: Any, op: str, text: str) -> None:
    def main() -> None:
        with pytest.raises(mc.MeshError, match=text):
            all_reduce_params(params, "a", op, mesh=mc.make_mesh({"a": 2}))

    mc.launch(main, ranks=2)


# ------------------------------------------------------------------------------------------------------------ Metrics

KINDS = {"loss": "mean", "tokens": "sum", "norm": "max", "lowest": "min", "never": "mean", "never max": "max"}


def feed(metrics: Metrics, rank: int, wrap: Callable[[float], Any]) -> list[tuple[str, float, float]]:
    given = []
    for step in range(rank):  # the first rank has nothing
        given += [
            ("loss", 0.1 * step + rank, 1.0 + step),
            ("tokens", 7.0 * rank, 1),
            ("norm", step - 3.0 * rank, 1),
            ("lowest", step - rank, 1),
        ]
    for i, (name, value, count) in enumerate(given):
        made = float if i % 3 == 2 else wrap  # numbers and tensors mix
        if KINDS[name] != "mean":
            metrics.add(name, made(value))
        elif i % 8:
            metrics.add_sum(name, made(value), wrap(count) if i % 2 else count)
        else:
            metrics.add(name, made(value / count), wrap(count) if rank % 2 else count)
    return given


def lines(kind: str) -> list[dict[str, float]]:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    wrap: Callable[[float], Any] = {
        "numbers": float,
        "tensors": lambda v: torch.tensor([v], dtype=torch.float64, requires_grad=True) * 1,
    }[kind]
    metrics, found = Metrics(KINDS), []
    for _ in range(2):
        feed(metrics, mesh.rank, wrap)
        found.append(metrics.reduce(("a", "b"), mesh=mesh, reset=False))
        assert metrics.reduce(("a", "b"), mesh=mesh) == pytest.approx(found[-1], nan_ok=True)
        assert metrics.reduce("b", mesh=mesh)["tokens"] == 0
    return found


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_metrics(run4: Run, kind: str) -> None:
    every = [entry for rank in range(4) for entry in feed(Metrics(KINDS), rank, float)]
    of = {name: [(value, count) for n, value, count in every if n == name] for name in KINDS}
    want = {
        "loss": math.fsum(v for v, _ in of["loss"]) / math.fsum(c for _, c in of["loss"]),
        "tokens": math.fsum(v for v, _ in of["tokens"]),
        "norm": max(v for v, _ in of["norm"]),
        "lowest": min(v for v, _ in of["lowest"]),
        "never": math.nan,
        "never max": math.nan,
    }
    for first, second in run4(lines, kind):
        assert list(first) == list(KINDS)
        assert first == pytest.approx(want, nan_ok=True, rel=1e-12)
        assert second == pytest.approx(want, nan_ok=True, rel=1e-12)


def test_numbers_and_tensors_of_one_metric() -> None:
    def mixed() -> dict[str, float]:
        metrics = Metrics(KINDS)
        for name, made in itertools.product(("loss", "tokens", "norm", "lowest"), (float, torch.tensor)):
            metrics.add(name, made(3.0 if made is float else 5.0))
        metrics.add_sum("loss", 10.0, 6)
        return metrics.reduce("a", mesh=mc.make_mesh({"a": 1}))

    [found] = mc.launch(mixed, ranks=1)
    assert [found[name] for name in ("loss", "tokens", "norm", "lowest")] == [18 / 8, 8.0, 5.0, 3.0]


def test_one_collective_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    meet = InProcessLink._meet

    def counted(self: InProcessLink, *args: Any) -> Any:
        calls.append(told.call.what)
        return meet(self, *args)

    monkeypatch.setattr(InProcessLink, "_meet", counted)

    def main() -> None:
        mesh, metrics = mc.make_mesh({"a": 2}), Metrics(KINDS)
        for _ in range(5):
            metrics.add("loss", torch.tensor(1.0), 3)
            metrics.reduce("a", mesh=mesh)

    mc.launch(main, ranks=2)
    assert len(calls) == 2 * (1 + 5)


def test_nan_is_seen_and_infinity_is_a_value() -> None:
    def main() -> dict[str, float]:
        mesh, metrics = mc.make_mesh({"a": 2}), Metrics({"m": "max", "t": "max", "i": "min"})
        metrics.add("m", math.nan if mesh.rank else 3)
        metrics.add("m", 5)
        metrics.add("t", torch.tensor([math.nan, 1.0][mesh.rank]))
        metrics.add("i", math.inf)
        return metrics.reduce("a", mesh=mesh)

    for found in mc.launch(main, ranks=2):
        assert math.isnan(found["m"])
        assert math.isnan(found["t"])
        assert found["i"] == math.inf


@pytest.mark.parametrize("wrap", [float, torch.tensor], ids=["numbers", "tensors"])
def test_a_mean_is_a_mean_and_a_sum_a_sum(wrap: Callable[[float], Any]) -> None:
    mesh = mc.make_mesh({"a": 1})
    metrics = Metrics({"acc": "mean"})
    metrics.add("acc", wrap(0.9), 32)
    assert metrics.reduce("a", mesh=mesh)["acc"] == pytest.approx(0.9)
    metrics.add("acc", wrap(0.5), 10)
    metrics.add("acc", 1.0, wrap(30.0))
    metrics.add_sum("acc", wrap(5.0), 10)
    metrics.add("acc", wrap(0.25))
    assert metrics.reduce("a", mesh=mesh)["acc"] == pytest.approx((5 + 30 + 5 + 0.25) / 51)
    metrics.add("acc", wrap(math.nan), wrap(0.0))  # a batch of nothing
    metrics.add("acc", wrap(2.0), 2)
    assert metrics.reduce("a", mesh=mesh)["acc"] == 2.0


def test_large_counts_are_exact() -> None:
    metrics = Metrics({"tokens": "sum"})
    metrics.add("tokens", 2**53 - 2)
    metrics.add("tokens", torch.tensor(1))
    assert metrics.reduce("a", mesh=mc.make_mesh({"a": 1})) == {"tokens": 2**53 - 1}


def different() -> str:
    mesh = mc.make_mesh({"a": 4})
    try:
        Metrics({"loss": "mean", **({"extra": "sum"} if mesh.rank == 1 else {})}).reduce("a", mesh=mesh)
    except (mc.MeshError, mc.CommError) as error:
        return str(error)
    return "nothing raised"


def test_ranks_with_other_metrics(run4: Run) -> None:
    for text in run4(different):
        assert "different calls" in text
        assert "metrics='loss'" in text
        assert "metrics='loss, extra'" in text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: Metrics({}), "meshcomm.Metrics: no metrics are named"),
        (lambda m: Metrics({"x": "median"}), "metric 'x' is of no kind 'median'"),
        (lambda m: Metrics(["x"]), "no metrics are named"),
        (lambda m: m.add("y", 1), "meshcomm.Metrics.add: no metric 'y'"),
        (lambda m: m.add("x", "1"), "value of 'x' is a str"),
        (lambda m: m.add("x", 1, None), "weight of 'x' is a NoneType"),
        (lambda m: m.add("x", torch.ones(2)), r"value of 'x' is not one real number but \[2\] of torch.float32"),
        (lambda m: m.add("x", torch.ones(1), [1]), "weight of 'x' is a list"),
        (lambda m: m.reduce("z", mesh=mc.make_mesh({"a": 1})), "meshcomm.Metrics.reduce: no axis 'z'"),
    ],
)
def test_arguments_of_metrics(call: Callable[[Metrics], Any], text: str) -> None:
    with pytest.raises(mc.MeshError, match=text):
        call(Metrics({"x": "mean"}))
