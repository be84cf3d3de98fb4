"""The results of a dataset that the ranks worked through in turns: in order again, whatever the lengths and the way."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import meshcomm as mc
from meshcomm.objects import results
from meshcomm.objects.results import collect_results
from meshcomm.runtime.start.workers import WorkerPool

Run = Callable[..., list[Any]]


def result(i: int) -> dict[str, Any]:
    return {"id": i, "box": torch.full((i % 3, 4), float(i)), "name": f"{i}" * i}


def same(found: list[Any], size: int) -> bool:
    return [(r["id"], r["name"]) for r in found] == [(i, str(i) * i) for i in range(size)] and all(
        torch.equal(r["box"], result(i)["box"]) for i, r in enumerate(found)
    )


def round_robin(folder: str | None) -> list[Any]:
    """Every length, padded as torch's sampler pads, unpadded and overfull; every axis and destination."""
    mesh, seen = mc.make_mesh({"a": 2, "b": 2}), []
    with mc.use_mesh(mesh):
        for axis in ("a", "b", ("a", "b"), ("b", "a")):
            n, me = mc.axis_size(axis), int(mc.axis_index(axis))
            for size in (0, 1, 3, 4, 9):
                dst = size % n
                plain = [result(i) for i in range(me, size, n)]
                sampler = DistributedSampler(range(max(size, 1)), n, me, shuffle=False)
                padded = [result(i) for i in sampler]
                for parts in (plain, padded, plain + [lambda: "padding that cannot even be pickled"] * me):
                    found = collect_results(parts, size, axis, dst, order="stride", tmpdir=folder)
                    assert (found is None) == (me != dst)
                    if found is not None:
                        assert same(found, size), (axis, size)
                        seen.append(len(found))
        assert collect_results((result(mesh.rank),), 4, ("a", "b"), device=mesh.device) is None or mesh.rank == 0
    return seen


def test_in_order_again() -> None:
    assert sum(len(seen) for seen in mc.launch(round_robin, ranks=4, args=(None,))) == 15 * (2 + 2 + 1 + 1)


def test_through_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    assert sum(len(seen) for seen in mc.launch(round_robin, ranks=4, args=(str(folder),))) == 15 * 6
    assert not list(folder.iterdir()), "nothing is left"


def over_processes(folder: str) -> None:
    mesh = mc.make_mesh({"a": 4})
    for way in (None, folder):
        found = collect_results(
            [result(i) for i in range(mesh.rank, 23, 4)], 23, "a", 3, order="stride", tmpdir=way, mesh=mesh
        )
        assert found is None if mesh.rank != 3 else same(found, 23)
    with pytest.raises(mc.MeshError, match="index 2: has 5 results, but 6 of the 23 samples are its own"):
        collect_results([0] * (5 + (mesh.rank < 2)), 23, "a", order="stride", mesh=mesh)


def test_over_processes(pool4: WorkerPool, tmp_path: Path) -> None:
    pool4.run(over_processes, str(tmp_path))
    assert not list(tmp_path.iterdir())


def failing(case: str, folder: str) -> str:
    mesh = mc.make_mesh({"a": 3})
    me = mesh.rank
    mine = list(range(me, 7, 3))
    calls: dict[str, Callable[[], Any]] = {
        "short": lambda: collect_results(mine[: -1 if me == 1 else None], 7, "a", order="stride", mesh=mesh),
        "type": lambda: collect_results(torch.ones(3) if me == 2 else mine, 7, "a", order="stride", mesh=mesh),
        "pickle": lambda: collect_results(
            [*mine[:-1], {"f": lambda: 0}] if me == 1 else mine, 7, "a", order="stride", mesh=mesh
        ),
        "file": lambda: collect_results(mine, 7, "a", order="stride", tmpdir=f"{folder}/file/sub", mesh=mesh),
        "size": lambda: collect_results(mine, 7 + (me == 2), "a", order="stride", mesh=mesh),
    }
    try:
        return repr(calls[case]())
    except (mc.MeshError, mc.CommError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "short",
            r"index 1: has 1 results, but 2 of the 7 samples are its own[\s\S]*fix: give each rank i samples i, i \+ 3",
        ),
        ("type", r"index 2: parts is a Tensor[\s\S]*fix: pass a list"),
        ("pickle", r"index 1: parts\[1\]\['f'\] is a lambda"),
        ("file", r"cannot write to tmpdir '.*/file/sub': "),
        ("size", r"ranks of one axis made different calls[\s\S]*size=7[\s\S]*size=8"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(case: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = mc.launch(failing, ranks=3, args=(case, str(tmp_path)))
    assert len(set(found)) == 1
    with pytest.raises(mc.MeshError, match=text):
        raise mc.MeshError(found[0])


def separate(folder: str) -> str:
    """Each rank has a folder of its own under one name, as on machines that share none."""
    mesh = mc.make_mesh({"a": 4})
    mine = f"{folder}/{mesh.rank}"
    try:
        collect_results([mesh.rank], 4, "a", 2, tmpdir=mine, mesh=mesh)
    except mc.MeshError as error:
        return str(error)
    return "nothing raised"


def test_folders_that_are_not_one(run4: Run, tmp_path: Path) -> None:
    for told in run4(separate, str(tmp_path)):
        assert "index 2: cannot read what index 0 wrote to tmpdir: No such file" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert not [left for path in tmp_path.iterdir() for left in path.iterdir()], "all clean up behind them"


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What dst does not see is an error on all, and nothing is left behind."""
    read = results._read

    def without_the_last(folder: Path, sizes: list[int]) -> Any:
        os.unlink(folder / str(len(sizes) - 1))
        return read(folder, sizes)

    def main() -> str:
        mesh = mc.make_mesh({"a": 2})
        with pytest.raises(mc.MeshError) as caught:
            collect_results([1], 2, "a", tmpdir=tmp_path, mesh=mesh)
        return str(caught.value)

    monkeypatch.setattr(results, "_read", without_the_last)
    for told in mc.launch(main, ranks=2):
        assert "index 0: cannot read what index 1 wrote to tmpdir: No such file" in told
        assert "fix: use a folder that all machines share" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"size": -1}, "size=-1 is not a number of samples"),
        ({"size": 2.0}, "size=2.0 is not a number"),
        ({"dst": 2}, "dst=2 is not an index"),
        ({"axis": "c"}, "no axis 'c'"),
        ({"order": "interleaved"}, r"order='interleaved' is no order[\s\S]*'stride' or 'contiguous'"),
        ({"device": "meta"}, "device='meta' is neither the CPU nor the mesh's device, cpu"),
        ({"device": "gpu?"}, r"device='gpu\?' is neither"),
    ],
)
def test_arguments(arguments: dict[str, Any], text: str) -> None:
    def main() -> None:
        with pytest.raises(mc.MeshError, match=text):
            collect_results(**{"parts": [1], "size": 2, "axis": "a", "mesh": mc.make_mesh({"a": 2}), **arguments})

    mc.launch(main, ranks=2)


def test_a_mesh_of_one(tmp_path: Path) -> None:
    mesh = mc.make_mesh({"a": 1})
    for folder in (None, tmp_path):
        assert collect_results([1, {"a": 2}, 3], 2, "a", tmpdir=folder, mesh=mesh) == [1, {"a": 2}]


# -------------------------------------------------------------------------------------------------------------- order


def in_runs(lengths: list[int], size: int, order: Any, padding: int = 0) -> list[int] | str | None:
    """Rank i has the samples after those of the ranks before it."""
    mesh = mc.make_mesh({"a": len(lengths)})
    before = sum(lengths[: mesh.rank])
    mine = list(range(before, before + lengths[mesh.rank]))
    try:
        return collect_results(mine + [-1] * padding, size, "a", order=order, mesh=mesh)
    except mc.MeshError as error:
        return str(error)


@pytest.mark.parametrize(
    ("lengths", "size", "order"),
    [
        ([3, 2], 5, "contiguous"),
        ([2, 2, 2], 6, "contiguous"),
        ([0, 5, 1], 6, "contiguous"),
        ([2, 2, 2], 4, "contiguous"),  # the last one is padding
        ([4, 1], 5, None),  # in turns they would be 3 and 2
        ([0, 0, 2], 2, None),
        ([1, 1, 1], 3, None),  # both orders are one
        ([1, 1, 0], 2, None),
        ([0, 0], 0, None),
        ([3], 3, None),
    ],
)
def test_runs_of_samples(lengths: list[int], size: int, order: Any) -> None:
    first, *others = mc.launch(in_runs, ranks=len(lengths), args=(lengths, size, order))
    assert first == list(range(size))
    assert others == [None] * len(others)


def test_runs_over_processes(pool4: WorkerPool) -> None:
    assert pool4.run(in_runs, [3, 0, 2, 4], 9, "contiguous")[0] == list(range(9))
    for told in pool4.run(in_runs, [3, 2, 2, 2], 9, None):
        assert "do not tell in which order they are" in told


@pytest.mark.parametrize(
    ("lengths", "size", "order", "text"),
    [
        (
            [3, 2],
            5,
            None,
            r"lengths of the ranks' results, 3, 2, do not tell[\s\S]*order='stride'[\s\S]*order='contiguous'",
        ),
        ([3, 3], 5, None, r"lengths of the ranks' results, 3, 3, do not tell"),
        ([2, 2, 2], 6, None, r"do not tell"),
        ([2, 1, 1], 4, None, r"do not tell"),
        ([3, 2], 6, "contiguous", r"the ranks have 5 results \(3, 2\), and there are 6 samples"),
        ([3, 2], 4, "contiguous", r"the ranks have 5 results \(3, 2\), and there are 4 samples"),
        ([1, 1], 4, None, r"the ranks have 2 results \(1, 1\), and there are 4 samples"),
        ([4, 1], 4, None, r"the ranks have 5 results"),
    ],
)
def test_an_order_is_never_guessed(lengths: list[int], size: int, order: Any, text: str) -> None:
    for told in mc.launch(in_runs, ranks=len(lengths), args=(lengths, size, order)):
        assert isinstance(told, str)
        assert re.search(text, told), told


def test_orders_that_differ_are_told() -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 2})
        with pytest.raises((mc.MeshError, mc.CommError)) as caught:
            collect_results([1], 2, "a", order=["stride", "contiguous"][mesh.rank], mesh=mesh)
        return str(caught.value)

    for told in mc.launch(main, ranks=2):
        assert "order='stride'" in told
        assert "order='contiguous'" in told
