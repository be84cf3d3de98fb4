"""A sample of the zoo: `make test-models` runs all of it and prints the table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import zoo_harness

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
]


@pytest.mark.parametrize(("model", "method"), SAMPLE, ids=[" ".join(case) for case in SAMPLE])
def test_parameters_are_those_of_one_rank(model: str, method: str) -> None:
    assert zoo_harness.in_process(model, method) < zoo_harness.methods()[method].tolerance


@pytest.mark.parametrize(("model", "method"), [("Llama", "hsdp, clipped"), ("T5", "fsdp, accumulated")])
def test_parameters_are_those_of_one_rank_on_processes(pool4: Any, model: str, method: str) -> None:
    run: Callable[..., list[Any]] = pool4.run
    found = run(zoo_harness.on_this_rank, model, method)[0]
    assert zoo_harness.apart(found, model, method) < zoo_harness.methods()[method].tolerance
