"""The last collectives of each rank: what is kept of them, the files on request and on SIGUSR1, and what they explain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime import callsite, recorder
from meshcomm.runtime.hooks.dumps import FOLDER, dump_collectives
from meshcomm.tools import explain

HERE = Path(__file__).name


def dump_of(folder: Path | str, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / f"rank{rank}.json").read_text())
    return content


def line_of(text: str) -> str:
    """``test_recorder.py:88``: where this stands in this file."""
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


# ------------------------------------------------------------------------------------------------------- the records


def some_calls(folder: str) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    log = mesh.axis("dp").link.log
    first, messages = log.begun, log.messages
    x = torch.ones(2, 3, requires_grad=True)
    mc.all_reduce(x, "dp", "max", mesh=mesh)
    mc.reduce_scatter(x, "dp", mesh=mesh).sum().backward()
    with torch.no_grad():
        work = mc.broadcast(x, "dp", 1, mesh=mesh, async_op=True)
    dump_collectives(folder)
    states = [call["state"] for call in dump_of(folder, mesh.rank)["calls"]]
    assert states[-4:] == ["completed", "completed", "completed", "begun"]
    work.wait()
    with contextlib.suppress(mc.CommError):
        mc.gather(torch.ones(1 + mesh.coordinate["dp"]), "dp", mesh=mesh)
    mc.exchange([(x.detach(), 1 - mesh.coordinate["dp"], 7)], [(1 - mesh.coordinate["dp"], (2, 3), x.dtype, 7)], "dp",
                mesh=mesh)  # fmt: skip
    assert (log.begun - first, log.messages - messages) == (5, 1)
    mc.barrier(("dp", "tp"), mesh=mesh)
    dump_collectives(folder)


def test_what_is_kept(run4: Callable[..., list[Any]], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run4(some_calls, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.json" for rank in range(4)]
    for rank in range(4):
        dump = dump_of(tmp_path, rank)
        assert (dump["format"], dump["rank"], dump["world_size"]) == (1, rank, 4)
        *_, one, two, three, four, five, six, last = dump["calls"]
        place = {"dp": rank // 2, "tp": rank % 2}
        group = dump["groups"][one["group"]]
        assert group["ranks"] == [rank % 2, 2 + rank % 2]
        assert {"name": "dp", "coordinate": place} in group["axes"]  # others may have named it before
        assert dump["groups"][last["group"]]["ranks"] == [0, 1, 2, 3]
        calls = (one, two, three, four, five)
        assert [call["what"] for call in calls] == [
            "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather",
        ]  # fmt: skip
        assert [call["op"] for call in calls[:3]] == ["max", "sum", ""]
        assert [call["number"] - one["number"] for call in calls] == [0, 1, 2, 3, 4]
        assert [call["all"] - one["all"] for call in (*calls, six, last)] == list(range(7))
        assert (one["dtype"], one["shape"]) == ("float32", [2, 3])
        assert (six["what"], six["number"]) == ("exchange", 0)
        assert six["root"] == [[[1 - rank // 2, 7]], [[1 - rank // 2, 7]]]
        assert five["state"] == ("failed" if rank < 2 or "in-process" in request.node.name else "completed")
        assert {call["state"] for call in (one, two, three, four, six, last)} == {"completed"}
        for call in (one, two, three, four):
            assert dump["wall"] - 100 < call["began"] <= call["ended"] <= dump["wall"]
        if "in-process" in request.node.name:
            assert one["site"] == line_of('mc.all_reduce(x, "dp", "max"')


@pytest.mark.parametrize(
    ("end", "state"),
    [(None, "begun"), (1.5, "completed"), ("ValueError: no", "failed"), (recorder.DROPPED, "dropped")],
    ids=str,
)
def test_the_word_for_how_a_call_ended(end: float | str | None, state: str) -> None:
    record: Any = [None] * 9
    record[recorder.ENDED] = end
    assert recorder.state_of(record) == state


def many() -> tuple[int, list[int]]:
    mesh = mc.make_mesh({"a": 4})
    log = mesh.axis("a").link.log
    for _ in range(recorder.MOST + 10):
        mc.all_reduce(torch.ones(1), "a", mesh=mesh)
    numbers = [record[recorder.NUMBER] for record in log.records]
    assert numbers == list(range(log.begun - recorder.MOST + 1, log.begun + 1))
    ring = recorder.ring()
    assert ring is not None
    return len(ring.calls()), numbers[:1]


def test_the_last_thousand(pool4: Any) -> None:
    assert {count for count, _ in pool4.run(many)} == {recorder.MOST}


def test_a_record_is_cheap() -> None:
    """A generous bound: it is a third of a microsecond on a machine that is not busy."""
    log, count = recorder.Log((0, 1), 0), 20_000
    x, best = torch.ones(3), 1.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            log.begin("all_reduce", "sum", x.dtype, x.shape)
        best = min(best, (time.perf_counter() - begin) / count)
    assert best < 2e-5
    assert len(log.records) == recorder.MOST


def failing() -> None:
    mesh = mc.make_mesh({"a": 2})
    mc.all_gather(torch.ones(2), "a", mesh=mesh)
    if mesh.rank == 0:
        mc.all_reduce(torch.ones(8), "a", mesh=mesh)
    else:
        mc.all_reduce(torch.ones(8), "a", "max", mesh=mesh)


def test_after_a_launch_the_records_of_its_ranks_are_there(tmp_path: Path) -> None:
    with pytest.raises(mc.CommError):
        mc.launch(failing, ranks=2)
    found = dump_collectives(tmp_path / "new")
    assert [path.name for path in found] == ["rank0.json", "rank1.json"]
    assert [call["state"] for call in dump_of(tmp_path / "new", 0)["calls"]] == ["completed", "failed"]
    before = [path.stat().st_ino for path in found]
    dump_collectives(tmp_path / "new")  # replaced at once, with nothing left beside
    assert [path.stat().st_ino for path in found] != before
    assert len(list((tmp_path / "new").iterdir())) == 2
    with pytest.raises(mc.MeshError, match="folder=3 is not a path"):
        dump_collectives(3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        dump_collectives(tmp_path / "file")


# -------------------------------------------------------------------------------------------------------- the signal


def signalled_once(pid: int, folder: Path) -> str:
    """The last call in the file that rank 0 writes when it gets the signal, of which a copy is kept, and its state."""
    file, end = folder / "rank0.json", time.monotonic() + 200
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    (folder / "then").mkdir(exist_ok=True)
    shutil.copy(file, folder / "then")  # it may write once more
    last = dump_of(folder / "then", 0)["calls"][-1]
    return f"{last['called']} {last['state']}"


def signalled(folder: str, variable: bool) -> str:
    """Rank 0 waits for rank 1, which sends it the signal, and comes when there is a file."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    if torch.distributed.get_rank() > 1:
        return ""
    os.environ[FOLDER] = folder
    pids = mc.all_gather_object(os.getpid(), "a", mesh=mesh)
    if mesh.rank == 0:
        mc.all_reduce(torch.ones(5), "a", mesh=mesh)  # which hangs
    else:
        while signalled_once(pids[0], Path(folder)) != "all_reduce begun":
            time.sleep(0.1)  # it is not there yet
        mc.all_reduce(torch.ones(5), "a", mesh=mesh)
    del os.environ[FOLDER]
    child = os.fork()
    if child == 0:  # it would be ended by the signal, as any process
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
    return "went on"


def hangs_at(folder: Path) -> None:
    dump = dump_of(folder / "then", 0)
    assert dump["why"] == "SIGUSR1"
    call = dump["calls"][-1]
    assert (call["called"], call["shape"], call["state"], call["ended"]) == ("all_reduce", [5], "begun", None)
    assert call["site"] == line_of("# which hangs")
    main = next(thread for thread in dump["threads"] if thread["main"])
    assert any(frame["in"] == "signalled" and frame["user"] for frame in main["frames"])


def test_a_signal_while_it_waits_in_shared_memory(pool4: Any, tmp_path: Path) -> None:
    assert pool4.run(signalled, str(tmp_path), True) == ["went on", "went on", "", ""]
    hangs_at(tmp_path)


def test_a_signal_while_it_waits_inside_of_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHCOMM_SHARED_MEMORY", "0")
    assert (
        mc.launch(signalled, ranks=2, args=(str(tmp_path), True), runtime="processes", timeout=280) == ["went on"] * 2
    )
    hangs_at(tmp_path)


OTHERS = """
    import faulthandler, os, signal, sys, time
    from meshcomm.runtime.hooks import dumps

    def mine(*_):
        print("mine", flush=True)

    def child(kind):
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{kind}.{name}", os.O_WRONLY | os.O_CREAT), fd)
        if kind == "python":
            signal.signal(signal.SIGUSR1, mine)
        if kind == "fault":
            faulthandler.register(signal.SIGUSR1, file=1)
        if kind == "ignored":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        dumps.listen(0, 1)
        dumps.listen(0, 1)
        if kind == "later":
            signal.signal(signal.SIGUSR1, mine)
        os.kill(os.getpid(), signal.SIGUSR1)
        end = time.monotonic() + (200 if kind == "free" else 0.2)
        while time.monotonic() < end and not os.path.getsize(f"{sys.argv[1]}/{kind}.err"):
            time.sleep(0.05)

    for kind in sys.argv[2:]:
        if os.fork() == 0:
            child(kind)
            os._exit(0)
        assert os.wait()[1] == 0, kind
"""


@pytest.mark.thorough
def test_handlers_of_the_program_stay(tmp_path: Path) -> None:
    """Whose ever they are; the folder without the variable is one that is printed, and nobody else's."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop(FOLDER, None)
    kinds = ("python", "fault", "ignored", "later", "free")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OTHERS), str(tmp_path), *kinds], env=environment, text=True,
        capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = {kind: (tmp_path / f"{kind}.out").read_text() for kind in kinds}
    err = {kind: (tmp_path / f"{kind}.err").read_text() for kind in kinds}
    assert {kind for kind in kinds if "mine" in out[kind]} == {"python", "later"}
    assert {kind for kind in kinds if "most recent call first" in out[kind]} == {"fault"}
    assert {kind for kind in kinds if err[kind]} == {"free"}
    found = re.search(r"meshcomm: rank 0: the last collectives: (\S+)\n", err["free"])
    assert found is not None, err
    path = Path(found[1])
    assert json.loads(path.read_text())["rank"] == 0
    assert path.is_relative_to(tmp_path)
    assert path.parent.stat().st_mode & 0o077 == 0


# --------------------------------------------------------------------------------------------------- the explanation


def explained(folder: Path, capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert explain.main([str(folder)]) == code
    return capsys.readouterr().out


def launched(fn: Callable[[mc.Mesh], Any], ranks: int, folder: Path, **axes: int) -> None:
    """Run it, which may fail, and write what its ranks have called."""

    def main() -> None:
        fn(mc.make_mesh(axes))

    with contextlib.suppress(mc.CommError):
        mc.launch(main, ranks=ranks)
    dump_collectives(folder)


def one_differs(mesh: mc.Mesh) -> None:
    axes = ("dp", "tp")
    mc.all_gather(torch.ones(2), "tp", mesh=mesh)
    mc.barrier(axes, mesh=mesh)
    if mesh.rank == 7:
        mc.all_reduce(torch.ones(8), axes, mesh=mesh)
    else:
        mc.all_gather(torch.ones(8), axes, mesh=mesh)


def test_the_first_call_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(one_differs, 8, tmp_path, dp=4, tp=2)
    told = explained(tmp_path, capsys, 1)
    verdict = told.splitlines()[-1]
    one, others = line_of("mc.all_reduce(torch.ones(8), axes"), line_of("mc.all_gather(torch.ones(8), axes")
    assert f"dp=3,tp=1 called all_reduce f32[8] (op='sum') at {one}; " in verdict
    assert re.search(
        rf"the other \d called all_gather f32\[8\] \(dim=0\) at {others}", verdict
    )  # that came before it was known
    assert verdict.startswith("axis ('dp', 'tp'), call 2: ")
    assert "axis 'tp', ranks 0, 1: all have completed 1 calls" in told
    assert re.search(r"  7 +dp=3,tp=1 +1 barrier +2 all_reduce f32\[8\] \(op='sum'\) failed", told)


def one_is_elsewhere(mesh: mc.Mesh) -> None:
    if mesh.rank != 2:
        mc.all_reduce(torch.ones(9), "a", mesh=mesh)


def test_a_rank_that_has_not_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(one_is_elsewhere, 4, tmp_path, a=4)
    site = line_of('mc.all_reduce(torch.ones(9), "a"')
    told = explained(tmp_path, capsys, 1).splitlines()[-1]
    assert told.startswith("axis 'a', call 1: ")
    assert "rank 2: has not come, and is in no collective; " in told
    assert f"the other 3 called all_reduce f32[9] (op='sum') at {site}" in told


def crossed(mesh: mc.Mesh) -> None:
    first, second = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
    mc.all_reduce(torch.ones(3), first, mesh=mesh)
    mc.all_reduce(torch.ones(3), second, mesh=mesh)


def test_axes_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(crossed, 4, tmp_path, dp=2, tp=2)
    told = explained(tmp_path, capsys, 1)
    verdict = told.splitlines()[-1]
    assert re.search(
        r"axis '(dp|tp)', call 1: .* called all_reduce f32\[3\] .* over '(dp|tp)' at \S+, and has not", verdict
    )


def agreeing(mesh: mc.Mesh) -> None:
    for _ in range(3):
        mc.all_reduce(torch.ones(3), "a", mesh=mesh)


def test_ranks_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(agreeing, 2, tmp_path, a=2)
    told = explained(tmp_path, capsys, 0)
    assert "axis 'a', ranks 0, 1: all have completed 3 calls" in told
    assert "no divergence" in told
    assert explain.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["diverged"], found["missing"], found["damaged"]) == (False, [], [])
    assert explain.main([str(tmp_path / "nowhere")]) == 2
    assert "no dumps in" in capsys.readouterr().err


def changed(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    dump = dump_of(folder, rank)
    change(dump)
    (folder / f"rank{rank}.json").write_text(json.dumps(dump))


def hang(call: dict[str, Any]) -> None:
    call.update(state="begun", ended=None)


def test_files_that_are_damaged_missing_old_or_begin_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(agreeing, 4, tmp_path, a=4)
    (tmp_path / "rank1.json").write_text((tmp_path / "rank1.json").read_text()[:-40])
    changed(tmp_path, 3, lambda dump: dump.update(format=99))
    told = explained(tmp_path, capsys, 0)  # the others have completed all
    assert "not readable: rank1.json: JSONDecodeError" in told
    assert "not readable: rank3.json: ValueError: format 99" in told
    assert "no dump of ranks 1, 3" in told
    for rank in (0, 2):
        changed(tmp_path, rank, lambda dump: hang(dump["calls"][-1]))
    told = explained(tmp_path, capsys, 1)
    assert re.search(r"a=0 and a=2 called all_reduce .*; the other 2: has left no dump", told)
    launched(agreeing, 2, tmp_path / "two", a=2)
    folder = tmp_path / "two"
    changed(folder, 0, lambda dump: hang(dump["calls"][-1]))

    def earlier(dump: dict[str, Any]) -> None:  # written before the last call, which the other one has begun since
        del dump["calls"][-1]
        dump["groups"][0]["begun"] -= 1
        dump["wall"] -= 500

    changed(folder, 1, earlier)
    told = explained(folder, capsys, 0)
    assert re.search(r"written within 5\d\d s of each other, not at one time", told)
    launched(agreeing, 2, folder, a=2)
    changed(folder, 0, lambda dump: dump.update(calls=dump["calls"][2:]))
    changed(folder, 1, lambda dump: dump["calls"][0].update(op="max"))  # which only rank 1 remembers
    assert "no divergence" in explained(folder, capsys, 0)
    changed(folder, 1, lambda dump: dump["calls"][2].update(op="max", words="all_reduce f32[3] (op='max')"))
    told = explained(folder, capsys, 1)
    assert "all_reduce f32[3] (op='max')" in told.splitlines()[-1]
    assert "axis 'a', call 3: " in told


def test_the_command(tmp_path: Path) -> None:
    launched(one_is_elsewhere, 4, tmp_path, a=4)
    done = subprocess.run(
        [sys.executable, "-m", "meshcomm", "explain", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1, done.stderr
    assert "axis 'a', call 1: " in done.stdout


def test_the_line_of_a_call_can_be_asked_for_later() -> None:
    spot, site = callsite.call_spot, callsite.call_site
    pairs = [(spot(0), site()), (
        spot(0), site(),
    )]  # fmt: skip
    for _ in range(2):
        pairs += (
            (spot(0), site()),
            *((spot(0), site()) for _ in range(2)),
            (lambda: (spot(0), site()))(),
        )
    pairs.append((spot(1), site()))
    assert [callsite.site_at(early) for early, _ in pairs] == [late for _, late in pairs]
    assert len({late.line for _, late in pairs}) == 6
