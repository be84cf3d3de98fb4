"""Ranks whose parts have other lengths are told which dim, how long on each rank, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshcomm as mc

Calls = dict[str, Callable[[int], Any]]
ONES = torch.ones
GATHERS: Calls = {
    "all_gather": lambda r: mc.all_gather(ONES(2 + r % 2, 3), "a"),
    "all_gather along dim 1": lambda r: mc.all_gather(ONES(3, 2 + r % 2), "a", 1),
    "all_gather along the last dim": lambda r: mc.all_gather(ONES(3, 2 + r % 2), "a", -1),
    "all_gather_invariant": lambda r: mc.all_gather_invariant(ONES(2 + r % 2, 3), "a"),
    "all_gather with a gradient": lambda r: mc.all_gather(ONES(2 + r % 2, 3, requires_grad=True), "a"),
    "all_gather of one dim": lambda r: mc.all_gather(ONES(2 + r % 2), "a"),
    "gather": lambda r: mc.gather(ONES(2 + r % 2, 3), "a"),
    "a tree": lambda r: mc.all_gather({"x": ONES(2), "y": ONES(2 + r % 2, 3)}, "a"),
    "later": lambda r: mc.all_gather(ONES(2 + r % 2, 3), "a", async_op=True).wait(),
}
SAID = {
    "all_gather along dim 1": "dim 1",
    "all_gather along the last dim": "dim 1",
}


def told(name: str) -> str:
    mesh, texts = mc.make_mesh({"a": 4}), list[str]()
    with mc.use_mesh(mesh):
        for call in (lambda: GATHERS[name](mesh.rank), lambda: mc.barrier("a", timeout=60)):
            try:
                call()
            except mc.CommError as error:  # of a gather who waits for nobody is told when all have met
                texts.append(str(error))
    return "".join(texts)


def judge(texts: list[str], dim: str = "dim 0", fix: str = "sizes=[2, 3, 2, 3]") -> None:
    for text in texts:
        assert f"lengths of {dim}: 2 on indices 0, 2, 3 on indices 1, 3" in text, text
        assert fix in text, text


@pytest.mark.parametrize("name", GATHERS)
def test_lengths_are_told_in_process(name: str) -> None:
    judge(mc.launch(told, ranks=4, args=(name,)), SAID.get(name, "dim 0"))


@pytest.mark.parametrize("name", GATHERS)
def test_lengths_are_told_among_processes(pool4: Any, name: str) -> None:
    judge(pool4.run(told, name), SAID.get(name, "dim 0"))


@pytest.mark.parametrize("name", ["all_gather along dim 1", "a tree"])
def test_lengths_are_told_under_guard(guarded4: Any, name: str) -> None:
    judge(guarded4.run(told, name), SAID.get(name, "dim 0"))


OTHERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "reduce_scatter": (lambda r: mc.reduce_scatter(ONES(4 + 4 * (r == 1), 3), "a"), "lengths of dim 0: 4 on"),
    "all_to_all": (lambda r: mc.all_to_all(ONES(4 + 4 * (r == 1), 3), "a", 0, 1), "fix: send_sizes= and recv_sizes="),
    "another dim": (
        lambda r: mc.all_gather(ONES(2, 3 + (r == 1)), "a"),
        "lengths of dim 1: 3 on indices 0, 2, 3, 4 on index 1",
    ),
    "no rows": (lambda r: mc.all_gather(ONES(2 * (r > 0), 3), "a"), "fix: pass sizes=[0, 2, 2, 2] on every rank"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name: str) -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 4})
        with mc.use_mesh(mesh), pytest.raises(mc.CommError) as caught:
            OTHERS[name][0](mesh.rank)
        return str(caught.value)

    for text in mc.launch(main, ranks=4):
        assert OTHERS[name][1] in text, text


@pytest.mark.parametrize("axis", ["b", ("a", "b"), ("b", "a")])
def test_indices_are_those_of_the_axis(axis: Any) -> None:
    def main() -> bool:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        with mc.use_mesh(mesh):
            sizes = [int(i) for i in mc.all_gather(mesh.rank + 1 + torch.zeros(1, dtype=torch.int64), axis)]
            with pytest.raises(mc.CommError) as caught:
                mc.all_gather(ONES(mesh.rank + 1, 2), axis)
            return f"sizes={sizes}" in str(caught.value)

    assert all(mc.launch(main, ranks=4))


def test_another_call_is_told_at_once() -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 3})
        try:
            if mesh.rank == 2:
                mc.all_reduce(ONES(2), "a", mesh=mesh)
            else:
                mc.all_gather(ONES(2 + mesh.rank), "a", mesh=mesh)
        except mc.CommError as error:
            return str(error)
        return ""

    for text in mc.launch(main, ranks=3):
        assert "rank 2 called all_reduce" in text
        assert "sizes" not in text


def test_a_rank_that_does_not_come() -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 3})
        try:
            return "" if mesh.rank == 2 else str(mc.all_gather(ONES(2 + mesh.rank), "a", mesh=mesh))
        except mc.CommError as error:
            return str(error)

    *waiting, gone = mc.launch(main, ranks=3)
    assert gone == ""
    assert all("deadlock" in text and "rank 2 has returned" in text for text in waiting)
