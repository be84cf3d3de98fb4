"""Every example of the library is proven, and every adaptor on thousands of ranks of which a few run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import meshcomm as mc

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch, **numbers: int) -> Any:
    """The module, with fewer steps than it has."""
    spec = importlib.util.spec_from_file_location(f"proven_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    for number, value in numbers.items():
        assert hasattr(module, number)
        monkeypatch.setattr(module, number, value)
    return module


def test_the_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    tour = example("collectives_tour", monkeypatch)
    proof = mc.prove_no_hang(lambda: tour.tour([]), {"all": 2})
    assert proof.ok, str(proof)


@pytest.mark.parametrize("name", ["ddp_basics", "fsdp_basics"])
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = example(name, monkeypatch, STEPS=2)
    assert mc.prove_no_hang(page.main, {"all": 2}).check()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("transformer_basics", {"replica": 2, "fsdp": 2, "tp": 2}),
        ("long_context", {"dp": 1, "cp": 2, "sp": 2}),
        ("mixture_of_experts", {"dp": 1, "ep": 2}),
    ],
)
def test_training(name: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    page = example(name, monkeypatch, STEPS=1)
    assert mc.prove_no_hang(lambda: page.train(mc.current_mesh()), shape).check()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv"])
def test_pipelines_have_messages_under_way_and_nothing_else(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = example("pipeline", monkeypatch, STEPS=1)
    proof = mc.prove_no_hang(lambda: page.train(mc.current_mesh(), schedule), {"pp": 2, "dp": 1})
    assert {finding.kind for finding in proof.findings} <= {"order"}
    assert all("messages wait for each other" in finding.text for finding in proof.findings)


def test_train_gpt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt = example("train_gpt", monkeypatch)
    small = [
        "--steps",
        "1",
        "--width",
        "8",
        "--layers",
        "1",
        "--heads",
        "2",
        "--context",
        "8",
        "--batch",
        "4",
        "--sample",
        "2",
    ]
    args = gpt.parse([*small, "--mesh", "dp=2,tp=2", "--out", str(tmp_path)])
    assert mc.prove_no_hang(lambda: gpt.main(args), args.mesh).check()


@pytest.mark.thorough
def test_finetune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two meshes, with a checkpoint between them."""
    pytest.importorskip("transformers")
    tune = example("finetune", monkeypatch)
    small = ["--sample", "8", "--context", "24", "--width", "32", "--batch", "8"]
    args = tune.parse(["--steps", "2", "--out", str(tmp_path), *small])
    assert mc.prove_no_hang(lambda: tune.main(args), {"all": 4}).check()


def test_elastic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elastic = example("elastic", monkeypatch)
    for steps in ("2", "3"):  # the second time it begins with the checkpoint of the first
        args = elastic.parse(["--steps", steps, "--out", str(tmp_path)])
        assert mc.prove_no_hang(lambda: elastic.main(args), {"all": 2}).check()


@pytest.mark.thorough
def test_plan_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of the model of which it plans, on as many ranks as it does: of each class one, for they have no memory."""
    page = example("plan_a_cluster", monkeypatch)
    proof = mc.prove_no_hang(lambda: list(page.train(1)), {"rep": 4, "fsdp": 8, "tp": 8}, ranks="classes")
    assert proof.check().classes


def test_each_example_is_proven_here() -> None:
    source = Path(__file__).read_text()
    assert [page.stem for page in sorted(EXAMPLES.glob("*.py")) if f'"{page.stem}"' not in source] == []


# --------------------------------------------------------------------------------------------- adaptors, on many ranks


def trained(spread: Any, *given: Any, **more: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    spread(model, *given, **more)
    model(torch.ones(2, 4)).sum().backward()
    mc.parallel.clip_grad_norm(model, 1.0)


def both() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    mc.parallel.tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
    trained(lambda _: mc.parallel.fully_shard(model, "fsdp", grads="mean", replica_axis="dp"))


def zero() -> None:
    model = nn.Linear(4, 4)
    adam = mc.parallel.shard_optimizer(torch.optim.Adam(model.parameters()), "dp")
    mc.parallel.data_parallel(model, "dp", grads="mean")(torch.ones(2, 4)).sum().backward()
    adam.step()


def piped() -> None:
    stage = mc.parallel.data_parallel(nn.Linear(4, 4), "dp", grads="mean")
    mc.parallel.pipelined(stage, "pp", loss=nn.functional.mse_loss, microbatches=3, grads="mean")(
        torch.ones(6, 4), torch.ones(6, 4)
    )


def ring() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    mc.parallel.context_attention(q, k, v, axis="cp").sum().backward()
    if mc.is_main():
        print(end="")


def routed() -> None:
    w = torch.randn(2, 4, 4, requires_grad=True)
    choice = torch.arange(8).reshape(8, 1)
    mc.parallel.experts(
        torch.randn(8, 4),
        choice,
        torch.rand(8, 1),
        lambda x, n: mc.parallel.grouped_matmul(x, w, n),
        axis="ep",
        count=8,
    ).sum().backward()


PLANS: dict[str, tuple[Any, dict[str, int], list[int]]] = {
    "hsdp x tp": (both, {"dp": 25, "fsdp": 8, "tp": 4}, [0, 4]),
    "ddp": (lambda: trained(mc.parallel.data_parallel, "dp", grads="mean"), {"dp": 1000}, [0]),
    "zero": (zero, {"dp": 6, "rep": 50}, [0, 50, 100, 150, 200, 250]),
    "pipeline": (piped, {"dp": 40, "pp": 3}, [0, 1, 2]),
    "ring": (ring, {"dp": 30, "cp": 4}, [0, 1, 2, 3, 4]),
    "experts": (routed, {"dp": 30, "ep": 4}, [0, 1, 2, 3]),
}


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("name", PLANS)
def test_a_few_ranks_stand_for_the_rest(name: str) -> None:
    fn, shape, ranks = PLANS[name]
    proof = mc.prove_no_hang(fn, shape, ranks=ranks)
    assert {finding.kind for finding in proof.findings} <= ({"order"} if name == "pipeline" else set()), str(proof)
    assert f"run were {', '.join(map(str, ranks))};" in proof.ran[1]
    if len(ranks) > 1:
        with pytest.raises(mc.MeshError, match=r"is equal to none of ranks=[\s\S]*fix: ranks="):
            mc.prove_no_hang(fn, shape, ranks=ranks[1:])
