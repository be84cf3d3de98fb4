"""One text per call, whoever says it: a mismatch, a deadlock, a time-out, the guard, a dump, a trace, a work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime.call import Call
from meshcomm.runtime.hooks.dumps import dump_collectives
from meshcomm.runtime.words import Words
from meshcomm.tools import explain
from meshcomm.tracing.traces import trace

WORDS = "all_reduce f32[5] (op='max')"
HERE = Path(__file__).name
X = torch.ones(5)


def line() -> str:
    at = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the call"))
    return f"{WORDS} over 'a' at {HERE}:{at}"


def call(mesh: mc.Mesh, **how: Any) -> Any:
    return mc.all_reduce(X, "a", "max", mesh=mesh, **how)  # the call


def refused(fn: Any) -> str:
    with pytest.raises(mc.CommError) as caught:
        fn()
    return str(caught.value)


def ways(folder: str) -> dict[str, str]:
    """What this rank is told in each way."""
    mesh = mc.make_mesh({"a": 4})
    found = {}
    with trace() as traced:
        call(mesh)
    (event,) = traced.events
    found["trace"] = str(event)
    work = call(mesh, async_op=True)
    found["work"] = repr(work)
    work.wait()
    dump_collectives(folder)
    last = json.loads((Path(folder) / f"rank{mesh.rank}.json").read_text())["calls"][-1]
    found["dump"] = f"{last['words']} over 'a' at {last['site']}"
    if mesh.rank == 0:
        found["time-out"] = refused(lambda: call(mesh, timeout=0.2))
    mc.barrier("a", mesh=mesh, timeout=60)
    found["mismatch"] = refused(lambda: mc.barrier("a", mesh=mesh) if mesh.rank == 3 else call(mesh))
    mc.barrier("a", mesh=mesh, timeout=60)
    return found


def agree(found: list[dict[str, str]]) -> None:
    for rank, each in enumerate(found):
        assert {*each} == {"trace", "work", "dump", "mismatch", *(["time-out"] if rank == 0 else [])}
        for way, text in each.items():
            assert line() in text, f"{way}: {text}"


def test_ranks_of_one_process(tmp_path: Path) -> None:
    agree(mc.launch(ways, ranks=4, args=(str(tmp_path),)))

    def crossed() -> None:
        mesh = mc.make_mesh({"a": 2})
        if mesh.rank == 0:
            call(mesh)

    assert line() in refused(lambda: mc.launch(crossed, ranks=2))
    dump_collectives(tmp_path / "stuck")
    assert any(
        line().replace(" over 'a'", "") in text
        for text in explain.Explanation(*explain.read(tmp_path / "stuck")).lines()
    )


def test_processes_under_guard(guarded4: Any, tmp_path: Path) -> None:
    agree(guarded4.run(ways, str(tmp_path)))


def late(folder: str) -> dict[str, str]:
    mesh = mc.make_mesh({"a": 4})
    found = {}
    if mesh.rank == 0:
        found["time-out"] = refused(lambda: call(mesh, timeout=0.2))
        work = call(mesh, async_op=True)
        dump_collectives(folder)
        last = json.loads((Path(folder) / "rank0.json").read_text())["calls"][-1]
        found["dump"] = f"{last['words']} over 'a' at {last['site']}"
        found["work"] = repr(work)
        found["late"] = refused(lambda: work.wait(0.1))
        (Path(folder) / "told").touch()
    else:
        while not (Path(folder) / "told").exists():
            time.sleep(0.01)
        call(mesh)
        work = call(mesh, async_op=True)
    work.wait()
    return found


def test_processes_that_share_memory(pool4: Any, tmp_path: Path) -> None:
    found = pool4.run(late, str(tmp_path))[0]
    assert {*found} == {"time-out", "dump", "work", "late"}
    for way, text in found.items():
        assert line() in text, f"{way}: {text}"


def test_a_call_is_the_same_for_others() -> None:
    x = Call("all_to_all", (0,), ("dim",), False, None, torch.float32, (4,), moved=("a",), send=(1, 3), recv=(2, 2))
    assert x.text == "all_to_all f32[4] (dim=0, sending [1, 3] and receiving [2, 2] elements)"
    assert Words.read(x.words.write()) == x.words
    assert x.agrees(x._replace(needs_grad=None, send=(4, 0)))
    assert not x.agrees(x._replace(needs_grad=True))
    assert not x.agrees(x._replace(moved=("b",)))
    assert x.digest == x._replace(needs_grad=True).digest != x._replace(given=(1,)).digest
    assert str(Call("barrier")) == "barrier over '?'"
