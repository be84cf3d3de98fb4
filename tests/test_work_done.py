"""Works that are polled, and works that nobody waits for."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.work import Work

if TYPE_CHECKING:
    pass
from works import BIG, F32, ROOT, Run4, awaited, data, equal, go, line_of, mesh4, mesh22, shuffled, warm

# -------------------------------------------------------------------------------------------------------------- done


def every_kind(mesh: mc.Mesh, x: Tensor) -> list[Work[Any]]:
    r = mesh.rank
    k: dict[str, Any] = {"mesh": mesh, "async_op": True}
    return [
        mc.all_reduce(x, "a", **k),
        mc.all_reduce(x, "a", "max", **k),
        mc.all_gather(x, "a", **k),
        mc.reduce_scatter(x, "a", **k),
        mc.all_to_all(x, "a", 0, 0, **k),
        mc.shift(x, "a", **k),
        mc.permute(x, "a", [(1, 2)], **k),
        mc.broadcast(x, "a", 1, **k),
        mc.all_gather({"x": x, "y": x.double()}, "a", **k),
        mc.reduce(x, "a", 3, **k),
        mc.gather(x, "a", 0, **k),
        mc.scatter(x if r == 2 else None, "a", 2, like=x[: len(x) // 4], **k),
        mc.exchange([(x, (r + 1) % 4)], [((r - 1) % 4, tuple(x.shape), x.dtype)], "a", **k),
        mc.barrier("a", **k),
    ]


def all_poll() -> None:
    """Nobody waits before everything is done."""
    mesh = mesh4()
    for x in (data(8, seed=mesh.rank), data(BIG // 4, seed=mesh.rank)):
        works = every_kind(mesh, x)
        works.append(works[0].then(torch.sum))
        for i in shuffled(list(range(len(works))), mesh.rank):
            while not works[i].done():
                pass
        assert all(work.done() for work in works)
        equal(works[0].wait(), mc.all_reduce(x, "a", mesh=mesh), "all_reduce")
        mc.wait(works)


def test_done_becomes_true_without_a_wait(run4: Run4) -> None:
    run4(all_poll)


def a_chain_of_polls() -> int:
    """Each rank polls for a message of the one before it, which polls too."""
    mesh = mesh4()
    r = mesh.rank
    work = mc.recv("a", (r - 1) % 4, shape=(), dtype=torch.int64, mesh=mesh, async_op=True)
    if r == 0:
        mc.send(torch.tensor(1), "a", 1, mesh=mesh, async_op=True).wait()
    while not work.done():
        pass
    got = int(work.wait().item())
    if r:
        sending = mc.send(torch.tensor(got + 1), "a", (r + 1) % 4, mesh=mesh, async_op=True)
        while not sending.done():
            pass
        sending.wait()
    return got


def test_polling_ranks_let_each_other_go_on(run4: Run4) -> None:
    assert run4(a_chain_of_polls) == [4, 1, 2, 3]


def polls_for_ever(others: str) -> None:
    mesh = mc.make_mesh({"a": 3})
    if mesh.rank and others == "return":
        return
    if mesh.rank and others == "wait":
        mc.recv("a", 0, shape=(1,), dtype=F32, mesh=mesh)
    work = mc.recv("a", (mesh.rank + 1) % 3, shape=(1,), dtype=F32, tag=3, mesh=mesh, async_op=True)
    while not work.done():
        pass


@pytest.mark.parametrize(
    ("others", "state"),
    [("return", "has returned"), ("wait", r"waits in recv.*f32\[1\] over 'a'"), ("poll", "is running")],
    ids=lambda value: value.split()[0],
)
def test_polling_for_ever_is_a_deadlock(others: str, state: str) -> None:
    with pytest.raises(mc.CommError, match="deadlock: ranks poll a Work for ever") as caught:
        mc.launch(polls_for_ever, ranks=3, args=(others,))
    assert "fix: every rank of an axis" in str(caught.value)
    for rank in (1, 2):
        assert re.search(rf"  rank {rank} {state}", str(caught.value)), str(caught.value)


def polls_for_one_with_patience() -> float:
    """Rank 0 does nothing but poll, so the time-out of rank 1 runs out, and it comes."""
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        work = mc.all_reduce(torch.ones(1), "a", mesh=mesh, async_op=True)
        while not work.done():
            pass
        mc.send(torch.ones(1), "a", 1, mesh=mesh)
        return work.wait().item()
    message = mc.recv("a", 0, shape=(1,), dtype=F32, mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        message.wait(1e6)
    total = mc.all_reduce(torch.ones(1), "a", mesh=mesh).item()
    return total + message.wait().item()


def test_a_time_out_runs_out_while_others_poll() -> None:
    assert mc.launch(polls_for_one_with_patience, ranks=2) == [2.0, 3.0]


def logs_its_turns(log: list[tuple[int, str]]) -> None:
    mesh = mesh4()
    log.append((mesh.rank, "comes"))
    works = every_kind(mesh, data(8, seed=mesh.rank))
    log.append((mesh.rank, "has begun"))
    mc.wait(works)
    log.append((mesh.rank, "goes"))


def test_the_call_returns_before_the_peers_come() -> None:
    log: list[tuple[int, str]] = []
    mc.launch(logs_its_turns, ranks=4, args=(log,))
    assert log[:8] == [(rank, what) for rank in range(4) for what in ("comes", "has begun")]
    assert sorted(log[8:]) == [(rank, "goes") for rank in range(4)]


def first_comer(elements: int) -> None:
    """Rank 0 has begun everything before any other rank begins anything."""
    mesh = mesh4()
    warm(mesh)
    x = data(elements, seed=mesh.rank)
    if mesh.rank:
        go(mesh)
    works = every_kind(mesh, x)
    if not mesh.rank:
        go(mesh)
    equal(works[0].wait(), mc.all_reduce(x, "a", mesh=mesh), "all_reduce")
    mc.wait(works)


@pytest.mark.parametrize("elements", [8, BIG // 4])
def test_the_call_does_not_wait_for_its_peers(run4: Run4, elements: int) -> None:
    run4(first_comer, elements)


def first_large() -> None:
    """Nor where no large tensor has gone over the axis before."""
    mesh = mesh22()
    mc.barrier(("b", "a"), mesh=mesh)
    if mesh.rank:
        go(mesh, ("b", "a"))
    work = mc.all_reduce(torch.ones(BIG), ("b", "a"), mesh=mesh, async_op=True)
    if not mesh.rank:
        go(mesh, ("b", "a"))
    assert work.wait()[-1].item() == 4


def test_the_first_large_one_does_not_wait_for_its_peers_either(run4: Run4) -> None:
    run4(first_large)


def one_calls_synchronously(elements: int) -> None:
    """It has nothing to do meanwhile."""
    mesh = mesh4()
    x = data(elements, seed=mesh.rank)
    for fn in (mc.all_reduce, mc.all_gather, mc.reduce_scatter, mc.shift, mc.broadcast):
        for odd in range(4):
            y = fn(x, "a", mesh=mesh) if mesh.rank == odd else fn(x, "a", mesh=mesh, async_op=True).wait()
            equal(y, fn(x, "a", mesh=mesh), f"{fn.__name__} on rank {mesh.rank}")


@pytest.mark.parametrize("elements", [8, BIG // 4])
def test_one_rank_may_call_synchronously(run4: Run4, elements: int) -> None:
    run4(one_calls_synchronously, elements)


# ---------------------------------------------------------------------------------------------------------- dropped


def dropped(kind: str, elements: int) -> list[tuple[str, int, str, str]]:
    """Rank 0 drops its work; the others are none the worse, nor is what comes after. Gives the warnings of rank 0."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    x = data(elements, seed=r)
    expected = mc.all_gather(x, "a", mesh=mesh) if kind == "in a tree" else mc.all_reduce(x, "a", mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:  # no change-over in here: warnings are caught for the process
        warnings.simplefilter("always")
        if kind == "dropped":
            work: Any = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True)  # dropped
        elif kind == "looked at":
            work = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True)  # looked at
            repr(work)
            work.then  # noqa: B018
        elif kind == "followed":
            work = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True).then(torch.sum).then(float)  # followed
        elif kind == "in a tree":
            work = [{"x": mc.all_gather({"x": x.clone()}, "a", mesh=mesh, async_op=True)}]  # in a tree
        if r == 0:
            del work
            gc.collect()
    junk = [torch.full((elements,), 1e9) for _ in range(8)]
    if r:
        y = mc.wait(work)
        y = y[0]["x"]["x"] if kind == "in a tree" else y
        equal(y, float(expected.sum()) if kind == "followed" else expected, f"{kind} on rank {r}")
    equal(mc.all_gather(x, "a", mesh=mesh, async_op=True).wait(), mc.all_gather(x, "a", mesh=mesh), "afterwards")
    del junk
    return [(Path(each.filename).name, each.lineno, each.category.__name__, str(each.message)) for each in caught]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("elements", [3, BIG], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["dropped", "looked at", "followed", "in a tree"])
def test_one_dropped_warns_with_the_line_that_made_it(run4: Run4, kind: str, elements: int) -> None:
    first, *others = run4(dropped, kind, elements)
    assert others == [[], [], []]
    ((name, line, category, text),) = first
    assert (name, line, category) == (Path(__file__).name, line_of(kind, __file__), "RuntimeWarning")
    op, shape = ("all_gather", "") if kind == "in a tree" else ("all_reduce", rf" f32\[{elements}\]")
    where = rf"{op}{shape}.* over 'a' at test_work_done\.py:{line}"
    assert re.fullmatch(rf"meshcomm\.{op}: the Work of {where} was dropped and never waited for", text), text


def test_the_warning_comes_out_of_a_launch() -> None:
    def drops() -> None:
        mc.all_reduce(torch.ones(2), "a", mesh=mesh4(), async_op=True)  # in a launch

    with pytest.warns(RuntimeWarning, match="dropped and never waited for") as caught:
        mc.launch(drops, ranks=4)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line_of("in a launch", __file__))] * 4


def begun_at() -> list[str]:
    mesh = mesh4()
    works = every_kind(mesh, data(8, seed=mesh.rank))
    told = [repr(work) for work in works]
    mc.wait(works)
    return told


def test_each_work_knows_the_line_that_made_it() -> None:
    """However many functions of the library stand between."""
    code = every_kind.__code__
    places = {line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno + 2}
    for told in mc.launch(begun_at, ranks=4):
        found = [int(re.search(r" at test_work_done\.py:(\d+)", each)[1]) for each in told]  # type: ignore[index]
        assert found == sorted(set(found))
        assert set(found) <= places


def not_dropped() -> list[str]:
    """Waited for in one way or another, or done when it was made."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)

    def begin() -> Work[Tensor]:
        return mc.all_reduce(x, "a", mesh=mesh, async_op=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin().wait()
        mc.wait([begin()])
        begin().then(torch.sum).wait()
        asyncio.run(awaited(begin()))
        mc.pvary(x, "a", mesh=mesh, async_op=True)
        mc.shard(x, "a", mesh=mesh, async_op=True)
        if mesh.rank == 0:
            work = begin()
            with pytest.raises(mc.CommError):
                work.wait(0.001)
            del work
            go(mesh)
        else:
            go(mesh)
            begin().wait()
        gc.collect()
    return [str(each.message) for each in caught]


def test_no_warning_where_somebody_has_waited(pool4: Any) -> None:
    """Not in-process, where warnings are caught for all ranks at once."""
    assert pool4.run(not_dropped) == [[]] * 4


def dropped_messages() -> None:
    """A message that was to be received is received, and the next one is the next one's."""
    mesh = mesh4()
    if mesh.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mc.recv("a", 1, shape=(4,), dtype=F32, mesh=mesh, async_op=True)
            mc.send(data(4), "a", 2, mesh=mesh, async_op=True)
            gc.collect()
        junk = [torch.full((4,), 1e9) for _ in range(8)]
        go(mesh)
        assert mc.recv("a", 1, shape=(4,), dtype=F32, mesh=mesh).tolist() == [2.0] * 4
        del junk
    else:
        go(mesh)
    if mesh.rank == 1:
        for value in (1.0, 2.0):
            mc.send(torch.full((4,), value), "a", 0, mesh=mesh)
    if mesh.rank == 2:
        equal(mc.recv("a", 0, shape=(4,), dtype=F32, mesh=mesh), data(4), "what was sent")
    mc.barrier("a", mesh=mesh)


def test_dropped_messages_are_sent_and_received_all_the_same(run4: Run4) -> None:
    run4(dropped_messages)


HARNESS = """
import ast, os, signal, sys, tempfile
import torch
import meshcomm as mc

def fork(programs, ranks):
    running = {}
    for name, program in programs.items():
        folder = tempfile.mkdtemp()
        running[name] = folder, []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                signal.alarm(250)  # one that hangs ends with -14
                out = os.open(folder + "/" + str(rank), os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return program, folder, rank
            running[name][1].append(child)
    found = {}
    for name, (folder, children) in running.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        found[name] = codes, [open(folder + "/" + str(rank)).read() for rank in range(ranks)]
    print(found, flush=True)
    os._exit(0)

program, folder, rank = fork(ast.literal_eval(sys.stdin.read()), 3)
mc.init(init_method="file://" + folder + "/meeting", rank=rank, world_size=3, timeout=30)
mesh = mc.make_mesh({"a": 3})
mc.all_reduce(torch.ones(1 << 18), "a", mesh=mesh, async_op=True).wait()
mc.barrier("a", mesh=mesh)
exec(compile(program, "program.py", "exec"))
"""
"""Each program on three ranks of its own, which end as any script does; prints its exit codes and what it wrote."""


def ends(programs: dict[str, str], tmp_path: Path, **environ: str) -> dict[str, tuple[list[int], list[str]]]:
    script = tmp_path / "harness.py"
    script.write_text(HARNESS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **environ}
    done = subprocess.run(
        [sys.executable, str(script)], input=repr(programs), env=environ, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[int], list[str]]] = ast.literal_eval(done.stdout)
    return found


DROPPED_AT_THE_END = {
    "small": "work = mc.all_reduce(torch.ones(5), 'a', mesh=mesh, async_op=True)",
    "many": "works = [fn(torch.ones(1 << 18), 'a', mesh=mesh, async_op=True) for fn in (mc.all_reduce, mc.all_gather, mc.shift) * 3]",
    "never joined": "if rank == 0: work = mc.all_gather(torch.ones(5), 'a', mesh=mesh, async_op=True)",
    "large, never joined": "if rank == 0: work = mc.all_reduce(torch.ones(1 << 18), 'a', mesh=mesh, async_op=True)",
}
RECV = "work = mc.recv('a', (rank + 1) % 3, shape=(2,), dtype=torch.float32, mesh=mesh, async_op=True)"
PEER_DIES = """
import threading
if rank == 1:
    for other in (0, 2):  # both have begun their works
        mc.recv("a", other, shape=(1,), dtype=torch.float32, mesh=mesh)
    os._exit(3)
works = [
    mc.all_reduce(torch.ones(5), "a", mesh=mesh, async_op=True),
    mc.all_reduce(torch.ones(1 << 18), "a", mesh=mesh, async_op=True),
    mc.all_gather(torch.ones(1 << 18), "a", mesh=mesh, async_op=True),
    mc.recv("a", 1, shape=(2,), dtype=torch.float32, mesh=mesh, async_op=True),
]
def wait(work, found):
    try:
        work.wait()
        found.append("a result")
    except mc.CommError as error:
        found.append(error)
lists = [[] for _ in works]
threads = [threading.Thread(target=wait, args=(work, found)) for work, found in zip(works, lists) for _ in range(2)]
for thread in threads:
    thread.start()
mc.send(torch.ones(1), "a", 1, mesh=mesh)
for thread in threads:
    thread.join()
for work, found in zip(works, lists):
    wait(work, found)
    assert work.done()
    assert len(set(map(id, found))) == 1, found
    print(str(found[0]).split(chr(10))[0])
"""


@pytest.mark.thorough
def test_works_under_way_at_the_end_of_the_program(tmp_path: Path) -> None:
    """No rank aborts or hangs; a message that can no longer come is said to be missing."""
    messages = {
        "not asked for": RECV,
        "polled": RECV + "; work.done()",
        "waited out": RECV + "\ntry: work.wait(0.05)\nexcept mc.CommError: pass",
    }
    found = ends({**DROPPED_AT_THE_END, **messages, "a peer dies": PEER_DIES}, tmp_path)
    for name in (*DROPPED_AT_THE_END, *messages):
        codes, texts = found[name]
        assert codes == [0, 0, 0], found[name]
        assert name == "waited out" or "was dropped and never waited for" in texts[0], found[name]
    found |= ends(messages, tmp_path, MESHCOMM_SHARED_MEMORY="0")  # over gloo a process cannot end in the midst of one
    for name in messages:
        codes, texts = found[name]
        assert 1 in codes, found[name]
        for code, text in zip(codes, texts, strict=True):
            # 0: its peer was gone before, and with it the message.
            assert code == 0 or (code == 1 and "ends while a message is neither sent nor received" in text), found[name]
    codes, texts = found["a peer dies"]
    assert codes == [0, 3, 0], found["a peer dies"]
    for text in (texts[0], texts[2]):
        lines = text.splitlines()
        assert len(lines) == 4, text
        assert all(re.match(r"meshcomm\.\w+: the transport failed: ", line) for line in lines), text
