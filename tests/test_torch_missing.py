"""A torch that lacks a private name costs speed, or one named feature, and never a crash."""

from __future__ import annotations

import collections
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_names
from cases import OLD
from conftest import PoolWith

import meshcomm as mc
from meshcomm import _torch, _trees, _versions

HERE = Path(__file__).resolve().parent

# What is refused without a name; everything else is right.
REFUSED = {
    "torch.autograd.forward_ad._current_level": {"forward_mode"},
    "torch._functorch.eager_transforms.JVP_NESTING": {"forward_mode"},
    "torch.autograd.forward_ad._set_fwd_grad_enabled": {"by_value"},
    "torch.Tensor._version": {"readme"},
    "torch._C.DisableTorchFunction": {"readme"},
    "torch.nn.Module._parameters": {"sharded"},
    "torch._C._DisableFuncTorch": {"transforms"},
    "torch._functorch.autograd_function.enable_single_level_autograd_function": {"transforms"},
    "torch._C._functorch.is_functorch_wrapped_tensor": {"checked_under_func"},
    "torch._C._functorch.get_unwrapped": {"checked_under_func"},
    "torch": {"readme"},
}
NAMES = [name for name, _ in _versions.known]


pytestmark = pytest.mark.timeout(600)  # the first test waits for a fork for each name


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name to what programs did without it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "torch_names.py"), str(tmp_path_factory.mktemp("compiled"))],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@pytest.mark.thorough
def test_with_all_names_every_program_is_right(without: dict[str, dict[str, Any]]) -> None:
    found = without[""]
    assert "import" not in found, found
    assert found.pop("known") == NAMES
    assert found.pop("lacking") == [name for name, _ in _versions.lacking]
    assert {name: told for name, told in found.items() if told != "right"} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*NAMES, "torch"])
def test_without(without: dict[str, dict[str, Any]], name: str) -> None:
    found = dict(without[name])
    assert "import" not in found, found["import"]
    known, lacking = found.pop("known"), found.pop("lacking")
    assert known == NAMES
    assert set(lacking) == {each for each in known if f"{each}.".startswith(f"{name}.")} | {
        each for each, _ in _versions.lacking
    }
    refused = {program for program, told in found.items() if told.startswith("refused: ")}
    assert {program: told for program, told in found.items() if told != "right" and program not in refused} == {}
    assert refused == REFUSED.get(name, set())
    for program in refused:
        text = found[program]
        assert any(f"has no {each}" in text or f" or {each}," in text for each in lacking), text
        assert f"a torch that meshcomm was tested with: {', '.join(_versions.TESTED)}" in text


def test_programs_are_those_of_names_that_are_looked_for() -> None:
    for start, programs in torch_names.USES.items():
        assert any(name.startswith(start) for name in NAMES), start
        assert set(programs) <= set(torch_names.PROGRAMS)


def test_all_that_are_tested_have_all_names() -> None:
    assert _versions.lacking == []


# ------------------------------------------------------------------------------------------------------ in processes


@pytest.fixture(scope="module")
def bare4() -> Iterator[PoolWith]:
    """Four ranks that send messages, whose torch lacks every private name of process groups."""
    with PoolWith(4, MESHCOMM_SHARED_MEMORY="0") as pool:
        pool.most_groups = 1000  # new ones would have all names
        pool.run(do_without)
        yield pool


def do_without() -> None:
    """They import meshcomm before they see a variable of ours: so what the search has found is changed."""
    for name, value in {"_GATHERS": False, "_SCATTERS": False, "_has_store": False, "_missing": ["_a_name"]}.items():
        assert hasattr(_torch.groups, name)
        setattr(_torch.groups, name, value)


def on_a_grid() -> list[Any]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, other = torch.arange(4.0) + 10 * mesh.rank, 1 - mesh.coordinate["tp"]
    with mc.use_mesh(mesh):
        return [
            mc.all_gather(x, ("tp", "dp") if _torch.groups._as_given else ("dp", "tp")).sum().item(),
            mc.reduce_scatter(x, "tp").tolist(),
            mc.reduce_scatter(x, "dp", op="max").tolist(),
            mc.all_reduce(x, ("dp", "tp")).tolist(),
            mc.broadcast(x, "dp").tolist(),
            mc.exchange([(x, other)], [(other, (4,), x.dtype)], "tp")[0].tolist(),
            mc.barrier("dp", timeout=200),
        ]


def test_groups_are_made_by_the_public_way(bare4: Any) -> None:
    assert bare4.run(on_a_grid) == mc.launch(on_a_grid, ranks=4)


def made_unequally() -> str:
    """Ranks 0 and 1 have made a group more than the others: names that count them would differ."""
    whole = mc.make_mesh({"all": 4})
    if whole.rank < 2:
        mc.make_mesh({"a": 2}, ranks=[0, 1])
    try:
        mesh = mc.make_mesh({"b": 2, "c": 2}, ranks=[3, 0, 1, 2])
        mc.all_reduce(torch.ones(1), "b", mesh=mesh)
    except mc.MeshError as error:
        return str(error)
    return "made"


@pytest.mark.skipif(
    OLD, reason="torch 2.11 lacks none of these names, and by its public way some ranks alone are refused"
)
def test_groups_that_the_public_way_cannot_make_are_refused(bare4: Any) -> None:
    for told in bare4.run(made_unequally):
        assert told.startswith("meshcomm.make_mesh: torch "), told
        assert "has no torch.distributed.distributed_c10d." in told
        assert "in the same order" in told


def test_compiling_is_refused_without_its_operations() -> None:
    name = "torch.ops._c10d_functional.all_reduce"
    with pytest.raises(mc.MeshError, match=rf"(?s)meshcomm.compile: torch .* has no {name}, which.*run without"):
        _torch.groups._Lacking("compile", name, "run without torch.compile, or ").all_gather_into_tensor(1)


# ------------------------------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.15.0", False), ("2.15.7+cu132", False), ("2.14.1", False), ("2.11.0+cpu", False), ("2.16.0", True),
        ("2.16.0.dev20261101+cpu", True), ("3.0.0", True), ("2.9.1", False), ("2.15.0a0+git1", False),
    ],
)  # fmt: skip
def test_a_torch_newer_than_the_newest_tested(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    line = _versions.untested()
    assert (line is not None) == newer
    if line is not None:
        assert (
            line
            == f"torch {version} is newer than {_versions.TESTED[-1]}, the newest that this meshcomm was tested with"
        )


def test_this_torch_is_not_newer() -> None:
    assert _versions.untested() is None


def makes_meshes() -> None:
    mc.make_mesh({"x": 2})
    mc.make_mesh({"y": 2})


@pytest.mark.parametrize("make", [makes_meshes, lambda: mc.launch(makes_meshes, ranks=2)])
def test_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[], object]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(_versions, "_said", [])
    monkeypatch.setattr(_versions, "lacking", [_versions.Name("torch._x", "speed")])
    with caplog.at_level(logging.WARNING):
        make()
    (said,) = [record for record in caplog.records if record.name == "meshcomm"]
    assert said.getMessage() == (
        f"meshcomm: torch 2.99.0 is newer than {_versions.TESTED[-1]}, the newest that this meshcomm was tested with; "
        "of torch's private names 1 are missing. `python -m meshcomm` says more."
    )


def test_nothing_is_said_of_this_torch(caplog: pytest.LogCaptureFixture) -> None:
    makes_meshes()
    assert [record for record in caplog.records if record.name == "meshcomm"] == []


# ------------------------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("tree", [
    {"b": 1, "a": [2, (3, None)]}, [], {}, 5, None, ((),), torch.max(torch.ones(2, 2), 1),
    collections.OrderedDict(x=1, y=[2]), collections.defaultdict(list, x=1),
    collections.namedtuple("N", "a b")(1, [2]), collections.deque([1, (2,)]),
])  # fmt: skip
def test_own_trees_are_as_those_of_torch(tree: Any) -> None:
    leaves, form = _trees.flatten(tree)
    theirs, spec = _torch.tree_flatten(tree)
    assert [str(x) for x in leaves] == [str(x) for x in theirs]
    again = _trees.unflatten(leaves, form)
    assert (type(again), str(again)) == (type(tree), str(_torch.tree_unflatten(theirs, spec)))
    mine = [path for path, _ in _trees.leaves_with_path(tree)]
    assert mine == [path for path, _ in _torch.tree_leaves_with_path(tree)]
    assert form == _trees.flatten(again)[1]


def test_own_trees_as_prefixes() -> None:
    form = _trees.flatten({"a": 0, "b": [0, 0]})[1]
    assert form.flatten_up_to({"b": [1, (2, 3)], "a": {"c": 4}}) == [{"c": 4}, 1, (2, 3)]
    for other in ({"a": 0}, {"a": 0, "b": (0, 0)}, {"a": 0, "b": [0]}, [0, [0, 0]], 5):
        with pytest.raises(ValueError, match="expected a"):
            form.flatten_up_to(other)
    with pytest.raises(ValueError, match="1 leaves too many"):
        _trees.unflatten([1, 2, 3, 4], form)


def test_names_are_looked_for_by_their_functions() -> None:
    """No function was left out: what is private stands in a text that is looked for."""
    assert {"torch.distributed.ProcessGroup._allgather_base", "torch.Tensor._version"} <= set(NAMES)
    assert _torch.groups.functional is torch.ops._c10d_functional
