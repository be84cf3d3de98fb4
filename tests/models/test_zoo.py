"""A sample of the zoo: `make test-models` runs all of it and prints the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_harness
import zoo_table

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra `models`"),
    pytest.mark.filterwarnings("default"),  # what others warn of is not ours
]

SAMPLE = [
    ("Llama", "fsdp"),
    ("GPT-2", "dp, accumulated"),
    ("T5", "fsdp, selective checkpoints"),
    ("Bert", "hsdp, clipped"),
    ("ViT", "hsdp"),
    ("T5", "hsdp, dropout by mc.rng"),
    ("OPT", "fsdp, autocast"),
    ("GPTNeoX", "fsdp, param_dtype"),
    ("Llama", "tp of four"),
    ("GPT-2", "tp, sequence"),
    ("T5", "dp x tp"),
    ("ViT", "fsdp x tp"),
    ("Olmo2", "fsdp x tp"),
    ("Llama", "replica x fsdp x tp"),
    ("GPT-2", "fsdp x tp, sequence, checkpoints"),
    ("Llama", "tp, auto"),
    ("T5", "tp, auto"),
]

ON_PROCESSES = [
    ("Llama", "hsdp, clipped"),
    ("T5", "fsdp, accumulated"),
    ("Bert", "hsdp, dropout by mc.rng"),
    ("Llama", "fsdp, param_dtype"),
    ("GPT-2", "fsdp x tp"),
    ("Llama", "tp of four"),
    ("T5", "dp x tp"),
]


@pytest.mark.parametrize(("model", "method"), SAMPLE, ids=[" ".join(case) for case in SAMPLE])
def test_parameters_are_those_of_one_rank(model: str, method: str) -> None:
    assert not zoo_harness.why_not(model, method)
    assert zoo_harness.in_process(model, method) < zoo_harness.methods()[method].tolerance


@pytest.mark.parametrize(("model", "method"), ON_PROCESSES, ids=[" ".join(case) for case in ON_PROCESSES])
def test_parameters_are_those_of_one_rank_on_processes(pool4: Any, model: str, method: str) -> None:
    found = pool4.run(zoo_harness.on_this_rank, model, method)[0]
    assert zoo_harness.apart(found, model, method) < zoo_harness.methods()[method].tolerance


def test_a_layer_that_starts_otherwise_is_seen() -> None:
    state, tokens, loss = zoo_harness.on_one_rank("LSTM", "dp")
    moved = {name: x + 1e-7 * torch.ones_like(x) for name, x in state.items()}
    assert zoo_harness.apart((state, tokens, loss), "LSTM", "dp") == 0.0
    assert zoo_harness.apart((moved, tokens, loss), "LSTM", "dp") > 5e-8
    assert zoo_harness.on_one_rank("LSTM", "fsdp")[0] is state  # one for all that differ in their meshes alone
    assert zoo_harness.on_one_rank("LSTM", "dp, half frozen")[0] is not state


def test_the_table_is_written_model_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "zoo.md"
    page.write_text(f"above\n{zoo_table.MARK}\n")
    monkeypatch.setattr(zoo_table, "PAGE", page)
    zoo_table.write({("LSTM", "dp"): "1e-15", ("LSTM", "tp"): "-"})
    zoo_table.write({("Llama", "dp"): "2e-15", ("LSTM", "dp"): "3e-15"})
    there = zoo_table.read(page.read_text())
    assert there == {("LSTM", "dp"): "3e-15", ("LSTM", "tp"): "-", ("Llama", "dp"): "2e-15"}
    assert page.read_text().startswith("above\n")
    assert zoo_table.left(["Llama", "LSTM"], ["dp", "tp"], there) == [("Llama", ["tp"])]


def test_a_case_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise ValueError("no such luck")

    monkeypatch.setattr(zoo_harness, "in_process", fails)
    cell = zoo_table.tried("LSTM", "dp")
    assert not cell.ok
    assert "ValueError: no such luck (test_zoo.py:" in cell.said
