"""MeshBatchSampler: which rows a rank has, against the order of one rank; states that go on elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import meshcomm as mc
from meshcomm import MeshBatchSampler
from meshcomm.parallel import checkpoint, data_parallel

Run = Callable[..., list[Any]]
Rows = list[list[int]]


def epochs(count: int, state: dict[str, Any] | None, stop: int | None, given: dict[str, Any]) -> tuple[Rows, Any]:
    """The rows of this rank in up to ``stop`` steps of so many epochs, and the state then."""
    ranks = given.pop("ranks")
    mesh = mc.make_mesh({"dp": ranks})
    found: Rows = []
    with mc.use_mesh(mesh):
        sampler = MeshBatchSampler(axis="dp", **given)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(torch.arange(given["size"]), batch_sampler=sampler)
        while sampler.epoch < count:
            for rows in sampler.follow(loader):
                found.append(rows.tolist())
                if len(found) == stop:
                    return found, sampler.state_dict()
        return found, sampler.state_dict()


def steps(count: int, ranks: int, state: Any = None, stop: int | None = None, **given: Any) -> tuple[Rows, Any]:
    """What all ranks have in each step, one behind the other."""
    told = mc.launch(lambda: epochs(count, state, stop, {"ranks": ranks, **given}), ranks=ranks)
    assert all(other == told[0][1] for _, other in told)
    return [list(itertools.chain(*parts)) for parts in zip(*(rows for rows, _ in told), strict=True)], told[0][1]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("last", ["short", "drop", "wrap"])
@pytest.mark.parametrize(("size", "batch"), [(24, 8), (28, 8), (31, 7), (5, 5), (6, 4)])
def test_the_same_rows_for_any_number_of_ranks(size: int, batch: int, last: str, ranks: int) -> None:
    if last == "short" and 0 < size % batch < ranks:
        with pytest.raises(mc.MeshError, match=rf"the last batch has {size % batch} of {size} rows, for {ranks} ranks"):
            steps(1, ranks, size=size, batch=batch, last=last)
        return
    found, state = steps(3, ranks, size=size, batch=batch, last=last, seed=5)
    assert found == steps(3, 1, size=size, batch=batch, last=last, seed=5)[0]
    assert state["epoch"] == 3
    length = len(found) // 3
    assert length == (size // batch if last == "drop" else -(-size // batch))
    seen = [list(itertools.chain(*found[at : at + length])) for at in range(0, len(found), length)]
    assert seen[0] != seen[1]
    for rows in seen:
        assert len(set(rows)) == min(size, len(rows)) == (size - size % batch if last == "drop" else size)
        assert len(rows) == (length * batch if last == "wrap" else len(set(rows)))


def test_without_shuffling() -> None:
    assert steps(2, 2, size=6, batch=4, shuffle=False)[0] == [[0, 1, 2, 3], [4, 5]] * 2
    assert steps(1, 2, size=3, batch=8, shuffle=False, last="wrap")[0] == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("stop", range(1, 9))
def test_going_on_with_other_ranks(stop: int) -> None:
    given: dict[str, Any] = {"size": 22, "batch": 6, "last": "short"}
    whole, _ = steps(2, 1, **given)
    first, state = steps(2, 4, stop=stop, **given)
    rest, _ = steps(2, 2, state, **given)
    assert first + rest == whole
    assert len(first) == stop


def test_on_processes(pool4: Any) -> None:
    given = {"ranks": 4, "size": 22, "batch": 8, "last": "wrap"}
    told = pool4.run(epochs, 2, None, None, given)
    found = [list(itertools.chain(*parts)) for parts in zip(*(rows for rows, _ in told), strict=True)]
    assert found == steps(2, 1, size=22, batch=8, last="wrap")[0]


def test_workers_that_read_ahead_are_not_counted() -> None:
    mesh = mc.make_mesh({"dp": 1})
    sampler = MeshBatchSampler(40, 4, "dp", mesh=mesh)
    loader = DataLoader(
        torch.arange(40), batch_sampler=sampler, num_workers=1, prefetch_factor=4, multiprocessing_context="forkserver"
    )
    given = []
    for rows in sampler.follow(loader):
        given += rows.tolist()
        if len(given) == 12:
            break
    assert sampler.state_dict()["done"] == 3
    again = MeshBatchSampler(40, 4, "dp", mesh=mesh)
    again.load_state_dict(sampler.state_dict())
    for rows in again.follow(DataLoader(torch.arange(40), batch_sampler=again)):
        given += rows.tolist()
    assert given == sampler.order(0).tolist()
    assert (again.epoch, again.done) == (1, 0)


def test_who_asks_for_no_more_than_there_is_has_ended_the_epoch() -> None:
    mesh = mc.make_mesh({"dp": 1})
    sampler = MeshBatchSampler(8, 4, "dp", mesh=mesh)
    loader = DataLoader(torch.arange(8), batch_sampler=sampler)
    for epoch in range(2):
        given = [rows for _, rows in zip(range(2), sampler.follow(loader), strict=False)]  # range ends first
        assert torch.cat(given).tolist() == sampler.order(epoch).tolist()
        assert (sampler.state_dict()["epoch"], sampler.state_dict()["done"]) == (epoch + 1, 0)


def test_in_a_checkpoint(tmp_path: Path) -> None:
    def main(ranks: int, stop: int | None) -> Rows:
        mesh, found = mc.make_mesh({"dp": ranks}), []
        with mc.use_mesh(mesh):
            model = data_parallel(nn.Linear(1, 1), "dp", grads="mean")
            sampler = MeshBatchSampler(12, 4, "dp")
            if stop is None:
                sampler.load_state_dict(checkpoint.load(tmp_path / "at", model).extra["data"])
            for rows in sampler.follow(DataLoader(torch.arange(12), batch_sampler=sampler)):
                found.append(rows.tolist())
                if len(found) == stop:
                    checkpoint.save(tmp_path / "at", model, extra={"data": sampler.state_dict()})
                    break
        return found

    first, rest = mc.launch(main, ranks=2, args=(2, 2)), mc.launch(main, ranks=4, args=(4, None))
    seen = [row for ranks in (first, rest) for rank in ranks for step in rank for row in step]
    assert sorted(seen) == list(range(12))


def test_ranks_that_stand_elsewhere_are_told() -> None:
    def main(what: str) -> str:
        mesh = mc.make_mesh({"dp": 2})
        odd = mesh.rank == 1
        with mc.use_mesh(mesh):
            sampler = MeshBatchSampler(
                8, 4, "dp", seed=int(odd and what == "seed"), last="drop" if odd and what == "last" else "short"
            )
            if odd and what == "epoch":
                sampler.set_epoch(1)
            try:
                next(iter(sampler.follow(DataLoader(torch.arange(8), batch_sampler=sampler))))
            except mc.MeshError as error:
                return str(error)
        return ""

    for what, found in (("seed", "0, 1"), ("epoch", "0, 1"), ("last", "'short', 'drop'")):
        for text in mc.launch(main, ranks=2, args=(what,)):
            assert f"meshcomm.MeshBatchSampler: {what} differs between ranks.\n  got: {found}" in text


def test_states_that_do_not_fit() -> None:
    mesh = mc.make_mesh({"dp": 1})
    sampler = MeshBatchSampler(8, 4, "dp", mesh=mesh)
    state = sampler.state_dict()
    assert state == {"size": 8, "batch": 4, "shuffle": True, "seed": 0, "last": "short", "epoch": 0, "done": 0}
    with pytest.raises(
        mc.MeshError, match=r"the state is of another size and seed.\n  got: size 9 here, 8 in the state"
    ):
        MeshBatchSampler(9, 4, "dp", seed=1, mesh=mesh).load_state_dict(state)
    with pytest.raises(mc.MeshError, match="no state of a MeshBatchSampler"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(mc.MeshError, match=r"epoch -1"):
        sampler.set_epoch(-1)
    list(sampler)
    with pytest.raises(mc.MeshError, match=r"nobody has counted(.|\n)*sampler.follow\(loader\)"):
        sampler.state_dict()
    sampler.set_epoch(3)
    assert sampler.state_dict()["epoch"] == 3
    assert len(sampler) == 2


def test_under_the_checker() -> None:
    def main() -> list[int]:
        mesh = mc.make_mesh({"dp": 2})
        with mc.use_mesh(mesh), mc.check_vma("error"):
            sampler = MeshBatchSampler(8, 4, "dp")
            return [row for rows in sampler for row in rows]

    assert sorted(itertools.chain(*mc.launch(main, ranks=2))) == list(range(8))
