"""Traces and budgets: each primitive with its bytes and its line, forward and backward, on both runtimes; axes are left as they were."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from benchmarks import tracing
from meshcomm.axis import all_axes
from meshcomm.parallel import data_parallel, fully_shard, tensor_parallel
from meshcomm.runtime.start.workers import WorkerPool
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.tracing import record
from meshcomm.tracing.budget import comm_budget
from meshcomm.tracing.event import TraceEvent, bytes_text
from meshcomm.tracing.traces import Trace, trace

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).name
Run4 = Callable[..., list[Any]]
GRID = {"dp": 2, "tp": 2}


def links() -> list[Any]:
    """The links of all axes of this process, or of this rank in it."""
    rank = current_rank()
    axes = all_axes() if rank is None else rank.axes.values()
    return [axis.link for axis in axes]


def nothing_is_left() -> None:
    assert not [link for link in links() if link.hooks or hasattr(link, "without_hooks")]


def line_of(text: str) -> str:
    """``test_trace.py:88`` of the one line of this file that ends so."""
    found = [at for at, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.rstrip().endswith(text)]
    assert len(found) == 1, text
    return f"{HERE}:{found[0]}"


# ------------------------------------------------------------------------------------------- what each operation is

X = 12 * 8  # bytes of what each rank gives below: [12] of float64
CALLS: dict[str, tuple[Callable[[], Any], str, list[int], list[int]]] = {
    # name: the call, its primitive, and by index along the axis of four: payload, wire
    "all_reduce": (lambda: mc.all_reduce(x12(), "t"), "all_reduce", [X] * 4, [144] * 4),
    "all_gather": (lambda: mc.all_gather(x12(), "t"), "all_gather", [X] * 4, [3 * X] * 4),
    "all_gather_invariant": (lambda: mc.all_gather_invariant(x12(), "t"), "all_gather", [X] * 4, [3 * X] * 4),
    "reduce_scatter": (lambda: mc.reduce_scatter(x12(), "t"), "reduce_scatter", [X] * 4, [72] * 4),
    "all_to_all": (lambda: mc.all_to_all(x12(), "t", 0, 0), "all_to_all", [X] * 4, [72] * 4),
    "permute": (lambda: mc.permute(x12(), "t", [(0, 1), (2, 2)]), "permute", [X, 0, X, 0], [X, X, 0, 0]),
    "shift": (lambda: mc.shift(x12(), "t", wrap=False), "permute", [X, X, X, 0], [X] * 4),
    "broadcast": (lambda: mc.broadcast(x12(), "t", src=1), "broadcast", [0, X, 0, 0], [X] * 4),
    "reduce": (lambda: mc.reduce(x12(), "t", dst=1), "reduce", [X] * 4, [X] * 4),
    "gather": (lambda: mc.gather(x12(), "t", dst=1), "gather", [X] * 4, [X, 3 * X, X, X]),
    "scatter": (lambda: scatter12(), "scatter", [0, X, 0, 0], [24, 72, 24, 24]),
    "exchange": (lambda: neighbours(), "exchange", [X, 0, 0, 0], [X, X, 0, 0]),
    "barrier": (lambda: mc.barrier("t"), "barrier", [0] * 4, [0] * 4),
}


def x12() -> Tensor:
    return torch.ones(12, dtype=torch.float64)


def scatter12() -> Tensor:
    like = torch.empty(3, dtype=torch.float64)
    return mc.scatter(x12() if mc.current_mesh().rank == 1 else None, "t", src=1, like=like)  # type: ignore[union-attr]


def neighbours() -> None:
    rank = mc.current_mesh().rank  # type: ignore[union-attr]
    sends = [(x12(), 1), (x12(), 0)][:1] if rank == 0 else []
    mc.exchange(sends, [(0, (12,), torch.float64)] if rank == 1 else [], "t")


def each_operation() -> list[tuple[str, list[TraceEvent]]]:
    found = []
    with mc.use_mesh(mc.make_mesh({"t": 4})):
        for name, (call, *_) in CALLS.items():
            with trace() as t:
                call()
            found.append((name, list(t.events)))
    return found


def test_each_operation_has_its_name_and_bytes(run4: Run4) -> None:
    for rank, found in enumerate(run4(each_operation)):
        for name, events in found:
            _, primitive, payload, wire = CALLS[name]
            (event,) = events
            assert (event.operation, event.primitive, event.axis, event.size) == (name, primitive, "t", 4)
            assert (event.payload, event.wire) == (payload[rank], wire[rank]), f"{name} on rank {rank}"
            assert (event.rank, event.place, event.backward, event.asynchronous) == (rank, f"t={rank}", False, False)
            assert event.site is not None
            assert event.site.file == __file__
            assert event.end is not None
            assert event.issue == pytest.approx(event.duration)
            assert 0 <= event.start <= event.end < 60
            assert (event.wait, event.error) == (0, None)


def own_ways() -> list[tuple[Any, ...]]:
    """What a transport does in ways of its own in place of a primitive is traced as that."""
    found = []
    with mc.use_mesh(mc.make_mesh({"t": 4})):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            x, scalar = torch.ones(8, 3, dtype=dtype), torch.ones((), dtype=dtype)
            with trace() as t:
                mc.all_gather(x, "t")
                mc.all_gather(scalar, "t")
                mc.all_to_all(x, "t", 0, 0)
                mc.all_to_all(x.T.contiguous().T, "t", 0, 1)
                mc.all_to_all(x, "t", 0, 0, async_op=True).wait()
                mc.all_to_all(x, "t", 0, 0, [2] * 4, [2] * 4)
                mc.shift(scalar, "t")
                if dtype != torch.bool:
                    mc.reduce_scatter(x, "t")
                    mc.reduce_scatter(x[:, :0], "t", async_op=True).wait()
            width = dtype.itemsize
            found.append([(e.primitive, e.shape, e.payload / width, e.wire / width, e.asynchronous) for e in t.events])
    return found


def test_what_goes_a_way_of_its_own_is_seen_as_the_primitive(run4: Run4) -> None:
    swapped = "all_to_all", (24,), 24, 18
    expected = [
        ("all_gather", (8, 3), 24, 72, False),
        ("all_gather", (1,), 1, 3, False),
        (*swapped, False),
        (*swapped, False),
        (*swapped, True),
        (*swapped, False),
        ("permute", (), 1, 1, False),
        ("reduce_scatter", (4, 2, 3), 24, 18, False),
        ("reduce_scatter", (4, 2, 0), 0, 0, True),
    ]
    for found in run4(own_ways):
        *numbers, of_bool = found
        assert numbers == [expected] * 3
        assert of_bool == expected[:7]


def test_an_event_says_what_it_is() -> None:
    def main() -> list[str]:
        with mc.use_mesh(mc.make_mesh(GRID)), trace() as t:
            mc.all_reduce(torch.ones(2, 3), ("tp", "dp"))  # said
            mc.barrier("dp")  # came
        return [str(event) for event in t.events]

    reduced, met = mc.launch(main, ranks=4)[2]
    assert reduced == f"all_reduce f32[2, 3] (op='sum') over ('tp', 'dp') at {line_of('# said')}"
    assert met == f"barrier over 'dp' at {line_of('# came')}"


def bucketed() -> tuple[Any, ...]:
    mesh = mc.make_mesh({"t": 4})
    with mc.use_mesh(mesh), trace() as t:
        tree = {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(2, dtype=torch.float64)}
        mc.all_reduce(tree, "t")
        mc.all_reduce({"a": torch.ones(2**18), "b": torch.ones(2**18)}, "t", bucket_mb=1)
        mc.all_gather_object("x" * 5000, "t")
        mc.pvary(torch.ones(3), "t")
        mc.shard(torch.ones(4), "t")
    return [(e.operation, e.primitive, e.shape, e.payload) for e in t.events], t.summary()


def test_buckets_and_objects_are_what_they_are_made_of(run4: Run4) -> None:
    for events, summary in run4(bucketed):
        assert events[:4] == [
            ("all_reduce", "all_reduce", (1, 8), 32),
            ("all_reduce", "all_reduce", (1, 2), 16),
            ("all_reduce", "all_reduce", (1, 2**18), 2**20),
            ("all_reduce", "all_reduce", (1, 2**18), 2**20),
        ]
        assert [event[:2] for event in events[4:]] == [("all_gather_object", "all_gather")] * 3
        assert sum(event[3] for event in events[4:]) > 5000
        assert summary == "3 all_gather_object over t, 4 all_reduce over t"


# ----------------------------------------------------------------------------------------------- backward and lines


def backwards() -> tuple[list[tuple[str, str, bool, str]], list[str]]:
    with mc.use_mesh(mc.make_mesh({"t": 4})), trace() as t:
        w = torch.ones(4, requires_grad=True)
        x = mc.pvary(w, "t")  # vary
        y = mc.all_gather(x, "t")  # gather
        z = mc.all_reduce(y, "t", "max")  # reduce
        z.sum().backward()  # go back
    summary = [t.summary(backward=way) for way in (False, True)]
    assert [len(t.table(backward=way).splitlines()) for way in (False, True, None)] == [3, 4, 6]
    assert t.totals(backward=False)["t"].calls == t.count("all_reduce", backward=True) == 2
    return [(e.operation, str(e.axis), e.backward, str(e.site)) for e in t.events], summary


def test_backward_is_seen_with_the_line_of_its_forward(run4: Run4) -> None:
    lines = {name: line_of(f"# {name}") for name in ("vary", "gather", "reduce", "go back")}
    for events, summary in run4(backwards):
        assert summary == ["1 all_gather over t, 1 all_reduce over t", "2 all_reduce over t, 1 reduce_scatter over t"]
        assert events == [
            ("all_gather", "t", False, lines["gather"]),
            ("all_reduce", "t", False, lines["reduce"]),
            ("all_reduce", "t", True, lines["reduce"]),  # how many attain the largest
            ("reduce_scatter", "t", True, lines["gather"]),
            ("all_reduce", "t", True, lines["vary"]),
        ]


def test_where_forward_was_not_traced_it_is_the_line_of_backward() -> None:
    def main() -> list[Any]:
        with mc.use_mesh(mc.make_mesh({"t": 2})):
            w = torch.ones(4, requires_grad=True)
            y = mc.pvary(w, "t").sum()
            with trace() as t:
                y.backward()  # alone
            with trace() as tree:
                mc.pvary({"w": w}, "t")["w"].sum().backward()  # as a tree
        return [(str(e.site), e.backward) for e in (*t.events, *tree.events)]

    for events in mc.launch(main, ranks=2):
        assert events == [(line_of("# alone"), True), *[(line_of("# as a tree"), True)] * 2]


def test_double_backward_keeps_the_line() -> None:
    def main() -> list[Any]:
        with mc.use_mesh(mc.make_mesh({"t": 2})), trace() as t:
            x = torch.ones(2, requires_grad=True)
            y = mc.all_gather(x * x, "t")  # twice
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            torch.autograd.grad(g.sum(), x)
        return [(e.operation, e.backward, str(e.site)) for e in t.events]

    for events in mc.launch(main, ranks=2):
        assert [event[0] for event in events].count("all_gather") >= 2
        assert {event[2] for event in events} == {line_of("# twice")}
        assert [event[1] for event in events] == [False] + [True] * (len(events) - 1)


def test_transforms_are_seen() -> None:
    def main() -> dict[str, Any]:
        x = torch.ones(3, 2)
        found = {}
        with mc.use_mesh(mc.make_mesh({"t": 2})):
            run: Any = lambda y: mc.all_reduce(y, "t")  # noqa: E731
            for name, call in {
                "vmap": lambda: torch.func.vmap(run)(x),
                "grad": lambda: torch.func.grad(lambda y: run(mc.pvary(y, "t")).sum())(x),
                "jvp": lambda: torch.func.jvp(run, (x,), (x,)),
            }.items():
                with trace() as t:
                    call()
                found[name] = [(e.operation, e.shape, e.backward) for e in t.events]
        return found

    for found in mc.launch(main, ranks=2):
        assert found["vmap"] == [("all_reduce", (3, 2), False)]
        assert found["grad"] == [("all_reduce", (3, 2), False), ("all_reduce", (3, 2), True)]
        assert found["jvp"] == [("all_reduce", (3, 2), False)] * 2


# ---------------------------------------------------------------------------------------------------- asynchronous


def overlapping() -> tuple[list[TraceEvent], list[TraceEvent], dict[str, Any]]:
    mesh = mc.make_mesh(GRID)
    with mc.use_mesh(mesh):
        before = mc.all_reduce(torch.ones(4), "tp", async_op=True)
        with trace() as t:
            before.wait()  # was begun before
            works = [mc.all_reduce(torch.ones(4), "dp", async_op=True) for _ in range(2)]
            other = mc.shift(torch.ones(4), "tp", async_op=True)
            for work in (*works, other):
                work.wait()
            left = mc.all_gather(torch.ones(4), "dp", async_op=True)
            so_far = list(t.events)
        after = list(t.events)
        assert torch.equal(left.wait(), torch.ones(8))
        assert list(t.events) == after
    path = f"overlap-{mesh.rank}.json"
    try:
        t.save(path)
        written = json.loads(Path(path).read_text())
    finally:
        os.remove(path)
    return so_far, after, written


def test_works(run4: Run4, tmp_path: Path) -> None:
    for rank, (so_far, events, written) in enumerate(run4(overlapping)):
        assert [e.operation for e in events] == ["all_reduce", "all_reduce", "shift", "all_gather"]
        assert [e.operation for e in so_far] == [e.operation for e in events]
        assert all(e.asynchronous for e in events)
        for event in events[:3]:
            assert event.issue is not None
            assert event.end is not None
            assert event.duration is not None
            assert 0 < event.issue + event.wait <= event.duration + 1e-6
        left = events[3]
        assert left.issue is not None
        assert (left.end, left.duration, left.wait, left.error) == (None, None, 0, None)
        assert overlap_of(written, rank)


def slices_of(file: dict[str, Any], kind: str = "collective") -> list[dict[str, Any]]:
    return [each for each in file["traceEvents"] if each.get("cat") == kind]


def overlap_of(file: dict[str, Any], rank: int) -> bool:
    """A process of the rank's; a track per axis, and one more for what overlaps on it; slices nest."""
    names = {(e["tid"], e["args"]["name"]) for e in file["traceEvents"] if e["name"] == "thread_name"}
    assert [name for _, name in sorted(names)] == ["dp", "dp #2", "tp"]
    (process,) = [e for e in file["traceEvents"] if e["name"] == "process_name"]
    assert process["args"]["name"] == f"rank {rank} (dp={rank // 2}, tp={rank % 2})"
    assert {e["pid"] for e in file["traceEvents"]} == {rank + 1}
    tracks = {name: tid for tid, name in names}
    on = {name: [e["name"] for e in slices_of(file) if e["tid"] == tid] for name, tid in tracks.items()}
    assert on == {"dp": ["all_reduce", "all_gather"], "dp #2": ["all_reduce"], "tp": ["shift"]}
    nested(file)
    assert len(slices_of(file, "issue")) == 4
    return True


def nested(file: dict[str, Any]) -> None:
    """Viewers need slices of one track to lie inside of each other or apart."""
    tracks: dict[tuple[int, int], list[Any]] = {}
    for each in file["traceEvents"]:
        if each["ph"] == "X":
            assert each["dur"] >= 0
            tracks.setdefault((each["pid"], each["tid"]), []).append(each)
    for track in tracks.values():
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in track]
        for a, (start, end) in enumerate(spans):
            for other, last in spans[a + 1 :]:
                apart = other >= end - 1e-3 or start >= last - 1e-3
                inside = (other >= start - 1e-3 and last <= end + 1e-3) or (
                    start >= other - 1e-3 and end <= last + 1e-3
                )
                assert apart or inside


def test_one_that_fails_has_an_end_and_an_error() -> None:
    def main() -> list[Any]:
        mesh = mc.make_mesh({"t": 2})
        with mc.use_mesh(mesh):
            with trace() as t, pytest.raises(mc.CommError):
                mc.all_reduce(torch.ones(2 + mesh.rank), "t")
            nothing_is_left()
        return [(e.error, e.end is not None) for e in t.events]

    assert mc.launch(main, ranks=2) == [[("CommError", True)]] * 2


def test_a_wait_that_runs_out_is_no_end() -> None:
    def main() -> Any:
        mesh = mc.make_mesh({"t": 2})
        with mc.use_mesh(mesh), trace() as t:
            if mesh.rank == 1:
                mc.recv("t", 0, shape=(1,), dtype=torch.float32)
            work = mc.all_reduce(torch.ones(2), "t", async_op=True)
            if mesh.rank == 0:
                with pytest.raises(mc.CommError, match="not done"):
                    work.wait(timeout=0.01)
                early = t.events[0]
                mc.send(torch.ones(1), "t", 1)
            else:
                early = None
            work.wait()
        return early, t.events

    (early, events), _ = mc.launch(main, ranks=2)
    assert early.end is None
    assert early.wait > 0
    assert events[0].end is not None
    assert events[0].wait >= early.wait
    assert events[1].operation == "send"


# ----------------------------------------------------------------------------------------------- where it listens


def test_around_a_launch_it_hears_every_rank() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh(GRID)):
            mc.all_reduce(torch.ones(4), "dp")
            with trace() as mine:
                mc.all_reduce(torch.ones(4), "tp")
            assert mine.summary() == "1 all_reduce over tp"
            assert {e.rank for e in mine.events} == {mc.current_mesh().rank}  # type: ignore[union-attr]

    with trace() as t:
        mc.launch(main, ranks=4)
    assert sorted((e.rank, str(e.axis)) for e in t.events) == [(r, a) for r in range(4) for a in ("dp", "tp")]
    assert t.count() == 2
    assert t.count("all_reduce", "tp") == t.count(rank=3, axis="tp") == 1
    assert t.count(rank=4) == t.count("shift") == 0
    assert t.summary() == "1 all_reduce over dp, 1 all_reduce over tp"


def test_around_shard_map_it_hears_forward_and_backward() -> None:
    mesh = mc.make_mesh({"dp": 2})
    w, x = torch.ones(3, requires_grad=True), torch.ones(4, 3)
    loss = mc.shard_map(
        lambda w, x: mc.all_reduce((x @ w).sum(), "dp"), mesh=mesh, in_specs=("d", "(dp b) d"), out_specs=""
    )
    with trace() as forward:
        y = loss(w, x)
    with trace() as backward:
        y.backward()
    assert forward.summary() == "1 all_reduce over dp"
    assert backward.count("all_reduce", "dp", backward=True) == 1
    assert {e.rank for e in backward.events} == {0, 1}


def test_traces_nest_and_each_hears_all() -> None:
    def main() -> list[int]:
        with mc.use_mesh(mc.make_mesh({"t": 2})):
            with trace() as outer:
                mc.barrier("t")
                with trace() as inner:
                    mc.barrier("t")
                    mc.all_reduce(torch.ones(2), ("t",))
                mc.barrier("t")
            nothing_is_left()
            mc.barrier("t")
        return [outer.count("barrier"), inner.count("barrier"), outer.count("all_reduce"), inner.count()]

    assert mc.launch(main, ranks=2) == [[3, 1, 1, 2]] * 2
    nothing_is_left()


def crossing() -> tuple[int, int, bool]:
    """Two traces of which neither lies inside of the other, on two threads of a process."""
    mesh = mc.make_mesh({"t": 4})
    axis = mesh.axis("t")
    before = axis.link
    first, second = trace(), trace()
    first.__enter__()
    mc.barrier("t", mesh=mesh)
    entered = threading.Thread(target=second.__enter__)
    entered.start()
    entered.join()
    mc.barrier("t", mesh=mesh)
    first.__exit__(None, None, None)
    mc.barrier("t", mesh=mesh)
    second.__exit__(None, None, None)
    return first.count(), second.count(), axis.link is before


def test_traces_may_cross(pool4: WorkerPool) -> None:
    assert pool4.run(crossing) == [(2, 2, True)] * 4


def restored() -> None:
    mesh = mc.make_mesh({"t": 4})
    axis = mesh.axis("t")
    link = axis.link
    with pytest.raises(ZeroDivisionError), trace() as t:  # noqa: PT012
        assert axis.link is link  # the same, with somebody who is asked before each primitive
        assert [type(hook) for hook in link.hooks] == [record.Recorder]
        mc.barrier("t", mesh=mesh)
        raise ZeroDivisionError
    assert (axis.link is link, t.count()) == (True, 1)
    fresh = mc.make_mesh({"a": 2, "b": 2})
    with trace() as t:
        made = mc.make_mesh({"a": 2, "b": 2})
        mc.all_reduce({"x": torch.ones(2)}, "a", mesh=made, async_op=True).wait()
        mc.all_reduce(torch.ones(2), ("b", "a"), mesh=fresh)
    assert t.summary() == "1 all_reduce over a, 1 all_reduce over b,a"
    nothing_is_left()


def test_everything_is_as_before(run4: Run4) -> None:
    run4(restored)


def test_off_means_that_nothing_is_in_the_path() -> None:
    """The very objects that were there, and no code of the tracer in a call."""

    def main() -> set[str]:
        mesh = mc.make_mesh({"t": 2})
        with trace():
            mc.all_reduce(torch.ones(2), "t", mesh=mesh)
        names = set()

        def look(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                names.add(frame.f_code.co_filename)

        sys.setprofile(look)
        mc.all_reduce(torch.ones(2), "t", mesh=mesh)
        sys.setprofile(None)
        return names

    for files in mc.launch(main, ranks=2):
        assert any(file.endswith("threads/transport.py") for file in files)
        assert not [file for file in files if "tracing" in file or file.endswith("wrapped.py")]


def test_an_axis_of_one_rank_is_silent() -> None:
    mesh = mc.make_mesh({"one": 1})
    with trace() as t:
        mc.all_reduce(torch.ones(3), "one", mesh=mesh)
    assert t.events == ()
    assert str(t) == "nothing was communicated"
    assert t.summary() == "nothing"
    assert t.totals() == {}


def on_threads() -> list[tuple[str, int]]:
    """Two threads over two axes at the same time: each event has its own name and place."""
    mesh = mc.make_mesh(GRID)
    with trace() as t:

        def work(axis: str, call: Any) -> None:
            for _ in range(20):
                call(torch.ones(2), axis, mesh=mesh)

        other = threading.Thread(target=work, args=("dp", mc.all_reduce))
        other.start()
        work("tp", mc.all_gather)
        other.join()
    return sorted({(f"{e.operation} {e.axis}", t.count(e.operation, e.axis)) for e in t.events})


def test_threads_of_a_process(pool4: WorkerPool) -> None:
    assert pool4.run(on_threads) == [[("all_gather tp", 20), ("all_reduce dp", 20)]] * 4


# ------------------------------------------------------------------------------------------- modules, one rank alone


def trained(traced: str) -> tuple[list[Tensor], list[str]]:
    """Three steps of DDP and FSDP, traced on no rank, one or all: the same gradients."""
    mesh = mc.make_mesh({"dp": 4})
    said, gradients = [], []
    with mc.use_mesh(mesh):
        for make in (
            lambda m: data_parallel(m, "dp", grads="mean"),
            lambda m: data_parallel(m, "dp", grads="sum"),
            lambda m: fully_shard(m, "dp", grads="mean"),
        ):
            torch.manual_seed(0)
            model = make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
            for _ in range(3):
                t = trace()
                if traced == "all" or (traced == "one" and mesh.rank == 1):
                    with t:
                        model(torch.full((2, 8), 1.0 + mesh.rank)).sum().backward()
                    said.append(t.summary())
                else:
                    model(torch.full((2, 8), 1.0 + mesh.rank)).sum().backward()
            gradients += [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, said


def test_one_rank_may_trace_alone(pool4: WorkerPool) -> None:
    """What it sends is the same, on the way that it takes without."""
    none, one, all_of_them = (pool4.run(trained, how) for how in ("none", "one", "all"))
    assert [said for _, said in none] == [[]] * 4
    # The first step learns the order of the gradients, for models like it too, and compares their norms, of each model.
    steps = ["1 all_gather over dp, 1 all_reduce over dp, 1 broadcast over dp"] + ["1 all_reduce over dp"] * 2
    steps += ["1 all_gather over dp, 1 all_reduce over dp"] + ["1 all_reduce over dp"] * 2
    # Which parameters were used travels once per step.
    steps += ["1 all_gather over dp, 1 all_reduce over dp, 1 reduce_scatter over dp"] * 3
    assert [said for _, said in one] == [[], steps, [], []]
    assert [said for _, said in all_of_them] == [steps] * 4
    for rank in range(4):
        for others in (one, all_of_them):
            assert all(torch.equal(a, b) for a, b in zip(none[rank][0], others[rank][0], strict=True))


def test_one_rank_of_a_process_may_trace_alone() -> None:
    """Ranks in one process compare what they call, pytrees leaf by leaf: a trace changes none of it."""

    def main() -> list[str]:
        mesh = mc.make_mesh({"t": 2})
        tree = {"a": torch.ones(2), "b": torch.ones(3)}
        t = trace()
        with mc.use_mesh(mesh), t if mesh.rank == 0 else nullcontext():
            for _ in range(2):
                mc.all_reduce(tree, "t", async_op=mesh.rank == 0)
                work = mc.all_reduce(tree, "t", async_op=True)
                mc.all_reduce(torch.ones(2), "t")
                work.wait()
        return [str(event.shape) for event in t.events]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a work that nobody waits for
        assert mc.launch(main, ranks=2) == [["(1, 5)", "(1, 5)", "(2,)"] * 2, []]


def test_a_tensor_parallel_mlp_within_its_budget() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"tp": 2})
        with mc.use_mesh(mesh):
            model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
            tensor_parallel(model, {"0": "column", "1": "row"}, axis="tp")
            x = torch.ones(4, 8, requires_grad=True)
            with comm_budget(tp="2 all_reduce") as t:
                model(x).sum().backward()
            assert [t.count("all_reduce", "tp", backward=way) for way in (False, True)] == [1, 1]

    mc.launch(main, ranks=2)


# ------------------------------------------------------------------------------------------------- tables and files


def small() -> Trace:
    """Two ranks, of which one does more."""

    def main() -> None:
        mesh = mc.make_mesh({"dp": 2, "tp": 1})
        with mc.use_mesh(mesh):
            mc.all_reduce(torch.ones(256), "dp")  # both
            if mesh.rank == 1:
                mc.send(torch.ones(3), "dp", 0)  # one
            else:
                mc.recv("dp", 1, shape=(3,), dtype=torch.float32)  # other
            for _ in range(3):
                mc.barrier("dp")  # thrice

    with trace() as t:
        mc.launch(main, ranks=2)
    return t


def test_the_table() -> None:
    lines = small().table().splitlines()
    assert lines[0].split() == ["operation", "axis", "way", "calls", "ranks", "payload", "wire", "ms", "waited", "at"]
    rows = {line.split()[0]: line for line in lines[1:]}
    pattern = r"all_reduce  dp    forward +1 +2 +1024 B +1024 B +\d+\.\d{3} +"
    assert re.fullmatch(pattern + re.escape(line_of("# both")), rows["all_reduce"])
    assert re.search(r"send +dp +forward +1 +1 +12 B +12 B", rows["send"])
    assert re.search(r"recv +dp +forward +1 +1 +0 B +12 B", rows["recv"])
    assert re.search(r"barrier +dp +forward +3 +2 +0 B +0 B", rows["barrier"])
    assert all(line == line.rstrip() for line in lines)
    places = [line.index(HERE) for line in lines[1:]]
    assert len(set(places)) == 1
    assert lines[0].index("at", 40) == places[0]


def test_totals_are_those_of_the_rank_with_most() -> None:
    t = small()
    assert {axis: sums[:3] for axis, sums in t.totals().items()} == {"dp": (5, 1036, 1036)}
    assert t.totals(rank=0)["dp"][:3] == (5, 1024, 1036)
    assert t.totals(rank=7) == {}
    assert t.table(rank=0) != t.table()
    assert re.search(r"^dp: 5 calls, payload 1036 B, wire 1036 B, \d", str(t), re.MULTILINE)
    assert t.summary(rank=1) == "1 all_reduce over dp, 3 barrier over dp, 1 send over dp"
    assert repr(t) == f"<Trace closed: {t.summary()}>"
    assert repr(trace()) == "<Trace not entered: nothing>"


def test_bytes_in_words() -> None:
    assert [bytes_text(n) for n in (0, 9999, 10240, 25 * 2**20, 2**40)] == [
        "0 B", "9999 B", "10.0 KiB", "25.0 MiB", "1024.0 GiB",
    ]  # fmt: skip


def test_events_do_not_change() -> None:
    event = small().events[0]
    with pytest.raises(AttributeError):
        event.payload = 0  # type: ignore[misc]


def test_a_file_gives_the_events_back(tmp_path: Path) -> None:
    t = small()
    t.save(tmp_path / "trace.json")
    file = json.loads((tmp_path / "trace.json").read_text())
    nested(file)
    assert {e["args"]["name"] for e in file["traceEvents"] if e["name"] == "process_name"} == {
        "rank 0 (dp=0, tp=0)", "rank 1 (dp=1, tp=0)",
    }  # fmt: skip
    assert {e["ph"] for e in file["traceEvents"]} == {"M", "X"}
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in file["traceEvents"])
    (sent,) = [e for e in slices_of(file) if e["name"] == "send"]
    assert (sent["args"]["axis"], sent["args"]["x"], sent["args"]["payload"]) == ("dp", None, 12)
    again = Trace.merge([tmp_path / "trace.json"])
    assert set(again.events) == set(t.events)
    assert again.began == t.began
    assert again.seconds == pytest.approx(t.seconds, abs=1e-6)
    assert again.totals() == t.totals()
    assert pickle.loads(pickle.dumps(t)).events == t.events


def merged(folder: str) -> tuple[str, int, bool]:
    mesh = mc.make_mesh(GRID)
    with mc.use_mesh(mesh):
        with trace() as t:
            mc.all_reduce(torch.ones(4), ("dp", "tp"))
            work = mc.shift(torch.ones(4), "tp", async_op=True)
        work.wait()
        t.save(os.path.join(folder, f"rank{mesh.rank}.json"))
        whole = Trace.merge(mc.all_gather_object(t, ("dp", "tp")))
        mc.barrier(("dp", "tp"))
        files = Trace.merge([os.path.join(folder, f"rank{rank}.json") for rank in range(4)])
        mine = [e.start + whole.began for e in whole.events if e.rank == mesh.rank]
        near = all(abs(a - (e.start + t.began)) < 1e-4 for a, e in zip(mine, t.events, strict=True))
    assert {name: set(ranks) for name, ranks in whole.launches.items()} == {whole.events[0].launch: {0, 1, 2, 3}}
    assert whole.events[0].launch
    return whole.summary(), len(whole.events), near and set(whole.events) == set(files.events)


def test_ranks_are_merged(run4: Run4, tmp_path: Path) -> None:
    summary = "1 all_reduce over dp,tp, 1 shift over tp"
    assert run4(merged, str(tmp_path)) == [(summary, 8, True)] * 4
    Trace.merge(sorted(tmp_path.glob("*.json"))).save(tmp_path / "all.json")
    file = json.loads((tmp_path / "all.json").read_text())
    assert {e["pid"] for e in slices_of(file)} == {1, 2, 3, 4}
    nested(file)
    assert Trace.merge([]).events == ()


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"traceEvents": [], "otherData": {"made by": "somebody"}}')
    (tmp_path / "none.json").write_text("no json")
    for wrong, match in (
        ([tmp_path / "no.json"], "no.json' is no trace of meshcomm"),
        ([tmp_path / "none.json"], "none.json' is no trace of meshcomm, or one that was not written to its end"),
        (tmp_path / "no.json", "expected several traces or files"),
        (3, "expected several traces or files, got int"),
        ([3], "expected a trace or a file, got int"),
    ):
        with pytest.raises(mc.MeshError, match=match):
            Trace.merge(wrong)  # type: ignore[arg-type]
    with trace() as t:
        with pytest.raises(mc.MeshError, match="a trace is open"):
            Trace.merge([t])
        with pytest.raises(mc.MeshError, match="a trace that is open cannot be pickled"):
            pickle.dumps(t)
    with pytest.raises(mc.MeshError, match="a trace is entered once"), t:
        pass
    with pytest.raises(mc.MeshError, match="no operation 'all_reduse'"):
        t.count("all_reduse")
    nothing_is_left()


# ---------------------------------------------------------------------------------------------------------- compile

COMPILED = """
import sys, threading, warnings
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import meshcomm as mc
from meshcomm.tracing.budget import comm_budget
from meshcomm.tracing.traces import trace

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = mc.make_mesh({"dp": 4})
x = torch.ones(3, requires_grad=True)

def compiled(call):
    return torch.compile(lambda x: call(x, "dp", mesh=mesh) + 1, backend="aot_eager", fullgraph=True)

def warned(call, **how):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with trace() as t:
            call(x)
    return t, [str(each.message) for each in found if "meshcomm" in str(each.message)]

f, g, h = compiled(mc.all_reduce), compiled(mc.all_gather), compiled(mc.shift)
with torch.compiler.set_stance("force_eager"):
    t, said = warned(h)
    assert (t.summary(), t.compiled, said) == ("1 shift over dp", (), []), (t, said)
f(x).sum().backward()  # compiled before there is a trace
for again in range(2):
    t, said = warned(f)
    assert t.summary() == "nothing" and t.compiled == ("dp",)
    assert len(said) == 1 and "may have communicated over 'dp'" in said[0] and "force_eager" in said[0], said
assert str(t).endswith("not recorded: compiled graphs over dp")
f(x).sum().backward()
try:
    with warnings.catch_warnings(), comm_budget(dp="any"):
        warnings.simplefilter("error")
        g(x)
except mc.MeshError as error:
    assert "called a function that torch.compile compiled, whose communication is not seen" in str(error)
else:
    sys.exit("a budget let a compiled function pass")

# autograd goes on in a thread of its own when backward passes lie too deep inside of each other
threads = set()

class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        threads.add(threading.get_ident())
        with torch.enable_grad():
            y = Deep.apply(x, ctx.depth - 1) if ctx.depth else mc.all_gather(x, "dp", mesh=mesh)
            y.sum().backward()
        return g, None

with warnings.catch_warnings(), trace() as t:
    warnings.simplefilter("ignore")
    Deep.apply(x, 70).sum().backward()
assert len(threads) == 2
assert [(e.operation, e.backward) for e in t.events] == [("all_gather", True), ("reduce_scatter", True)]
print("done")
"""


@pytest.mark.thorough
def test_compiled_functions_are_said_to_be_missed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=280, cwd=ROOT, env=os.environ
    )
    assert done.stdout == "done\n", done.stderr


# ----------------------------------------------------------------------------------------------------------- budgets


def norm(x: Tensor) -> Tensor:
    return mc.all_reduce(x.square().sum(), "tp").sqrt()


def test_a_budget_that_is_kept_and_one_that_is_not() -> None:
    def main() -> list[str]:
        said = []
        with mc.use_mesh(mc.make_mesh(GRID)):
            x = torch.ones(2)
            assert comm_budget(tp="1 all_reduce", bytes=4)(norm)(x) == 2
            assert comm_budget(tp="7 all_reduce, 2 shift")(norm)(x) == 2
            assert comm_budget({("dp", "tp"): 0, ...: "any"})(norm)(x) == 2
            for budget in (
                comm_budget(tp="nothing"), comm_budget(), comm_budget(dp="9 all_reduce"), comm_budget(tp=0),
                comm_budget(tp="1 all_gather"), comm_budget(tp="1 all_reduce", bytes=3), comm_budget(bytes=3),
                comm_budget({...: 0, "dp": ...}),
            ):  # fmt: skip
                with pytest.raises(AssertionError) as error:
                    budget(norm)(x)
                said.append(str(error.value))
        nothing_is_left()
        return said

    for said in mc.launch(main, ranks=4):
        assert len(said) == 8
        for rank_or_bytes in said:
            assert rank_or_bytes.startswith("meshcomm.comm_budget: norm() communicated more than its budget.\n  got: ")
            assert rank_or_bytes.count("all_reduce  tp    forward") == 1
        assert all(re.search(r"tp: 1 all_reduce on rank \d, allowed nothing\n", said[i]) for i in (0, 1, 2, 3, 7))
        assert re.search(r"tp: 1 all_reduce on rank \d, allowed 1 all_gather\n", said[4])
        for i in (5, 6):
            assert re.search(r"got: bytes: 4 B on the wire of rank \d, allowed 3 B\n", said[i])


def test_the_message_shows_lines_that_go_beyond_only() -> None:
    def main() -> str:
        with mc.use_mesh(mc.make_mesh(GRID)):
            with pytest.raises(AssertionError) as error, comm_budget(tp="1 all_reduce, 1 any", dp="any"):  # noqa: PT012
                mc.all_gather(torch.ones(2), "tp")  # allowed
                mc.barrier("dp")  # free
                for _ in range(3):
                    mc.all_reduce(torch.ones(2), "tp")  # thrice
            return str(error.value)

    (text, *_) = mc.launch(main, ranks=4)
    assert "the with block communicated more than its budget" in text
    assert "tp: 1 all_gather, 3 all_reduce on rank 0, allowed 1 all_reduce, 1 any" in text
    assert "barrier" not in text
    assert re.search(r"all_reduce +tp +forward +3 +1 ", text)


def test_the_worst_rank_counts() -> None:
    mesh = mc.make_mesh({"t": 3})

    def ring(messages: int) -> None:
        def main() -> None:
            for _ in range(messages):
                if mesh.rank == 1:
                    mc.send(torch.ones(2), "t", 2, mesh=mesh)
                if mesh.rank == 2:
                    mc.recv("t", 1, shape=(2,), dtype=torch.float32, mesh=mesh)

        mc.launch(main, ranks=3)

    budget = comm_budget(t="2 send, 2 recv", bytes=16)
    budget(ring)(2)
    with pytest.raises(AssertionError, match=r"t: 3 (send|recv) on rank [12], allowed 2 recv, 2 send; bytes: 24 B"):
        budget(ring)(3)


def test_forward_alone() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"t": 2})):
            x = torch.ones(2, requires_grad=True)

            def step() -> None:
                mc.all_gather(mc.pvary(x, "t"), "t").sum().backward()

            comm_budget(t="1 all_gather", backward=False, bytes=8)(step)()
            comm_budget(t="1 all_gather, 1 reduce_scatter, 1 all_reduce")(step)()
            with pytest.raises(AssertionError, match="1 all_gather, 1 all_reduce, 1 reduce_scatter on rank"):
                comm_budget(t="1 all_gather", bytes=8)(step)()

    mc.launch(main, ranks=2)


def budgeted_on_processes() -> str:
    mesh = mc.make_mesh(GRID)
    with mc.use_mesh(mesh):
        with comm_budget({"dp,tp": "1 barrier"}, dp="1 all_reduce"):
            mc.all_reduce(torch.ones(2), "dp")
            mc.barrier(("dp", "tp"))
        try:
            with comm_budget(tp="1 all_reduce"):
                mc.all_reduce(torch.ones(2), "tp")
                mc.all_reduce(torch.ones(2), ("dp", "tp"))
        except AssertionError as error:
            return str(error)
    return "nothing was said"


def test_a_tuple_is_an_axis_of_its_own(run4: Run4) -> None:
    for rank, said in enumerate(run4(budgeted_on_processes)):
        assert f"got: dp,tp: 1 all_reduce on rank {rank}, allowed nothing\n" in said


def test_what_the_function_raises_comes_first() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"t": 2})), pytest.raises(ZeroDivisionError), comm_budget(t=0):  # noqa: PT012
            mc.barrier("t")
            raise ZeroDivisionError

    mc.launch(main, ranks=2)


def test_functions_keep_what_they_are() -> None:
    @comm_budget()
    def f(x: int, *, y: int = 2) -> int:
        """Doc."""
        return x + y

    @comm_budget()
    async def g(x: int) -> int:
        await asyncio.sleep(0)
        return x

    assert (f(1, y=3), f.__name__, f.__doc__) == (4, "f", "Doc.")
    assert asyncio.run(g(5)) == 5
    with pytest.raises(mc.MeshError, match="steps is not a function that can be budgeted"):

        @comm_budget()
        def steps() -> Any:
            yield 1


def test_one_budget_for_many_calls_at_once() -> None:
    """On all ranks of a process, that change over in the middle of it; also inside of itself."""
    budget = comm_budget(t="2 all_reduce")
    mesh = mc.make_mesh({"t": 4})

    @budget
    def inner() -> float:
        return mc.all_reduce(torch.ones(()), "t", mesh=mesh).item()

    @budget
    def outer() -> float:
        with budget as t:
            found = inner() + inner()
        assert t.count() == 2
        return found

    assert mc.launch(outer, ranks=4) == [8.0] * 4


def test_a_trace_may_be_checked_later() -> None:
    t = small()
    comm_budget(dp="1 all_reduce, 3 barrier, 1 send, 1 recv").check(t)
    with pytest.raises(AssertionError, match="the step communicated more than its budget"):
        comm_budget(dp="1 all_reduce, 3 barrier, 1 send").check(t, "the step")


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: comm_budget(tp="2 all_reduse"), "no operation 'all_reduse'.*one of 'all_gather'"),
    (lambda: comm_budget(tp="all_reduce"), "the budget of 'tp' cannot be read.*'all_reduce'"),
    (lambda: comm_budget(tp="two all_reduce"), "cannot be read"),
    (lambda: comm_budget(tp="-1 all_reduce"), "cannot be read"),
    (lambda: comm_budget(tp="1.5 all_reduce"), "cannot be read"),
    (lambda: comm_budget(tp="2 all_reduce;"), "cannot be read"),
    (lambda: comm_budget(tp="2 all_reduce,"), "cannot be read"),
    (lambda: comm_budget(tp=""), "cannot be read"),
    (lambda: comm_budget(tp="1 shift, 2 shift"), "names shift twice"),
    (lambda: comm_budget(tp=-1), "the budget of 'tp' cannot be read.*-1"),
    (lambda: comm_budget(tp=True), "the budget of 'tp' cannot be read.*True"),
    (lambda: comm_budget(tp=1.5), "cannot be read"),  # type: ignore[arg-type]
    (lambda: comm_budget(tp=None), "cannot be read"),  # type: ignore[arg-type]
    (lambda: comm_budget({...: "some"}), "the budget of '...' cannot be read"),
    (lambda: comm_budget("tp"), "axes='tp' is not a mapping"),  # type: ignore[arg-type]
    (lambda: comm_budget({1: 0}), "1 is not an axis"),
    (lambda: comm_budget({"dp,": 0}), "'dp,' is not an axis"),
    (lambda: comm_budget({(): 0}), r"\(\) is not an axis"),
    (lambda: comm_budget({("dp", "dp"): 0}), "is not an axis"),
    (lambda: comm_budget({"tp": 0}, tp=0), "axis 'tp' is named twice"),
    (lambda: comm_budget({"dp,tp": 0, ("dp", "tp"): 0}), "axis 'dp,tp' is named twice"),
    (lambda: comm_budget(bytes=-1), "bytes=-1 is not a number of bytes"),
    (lambda: comm_budget(bytes=float("nan")), "bytes=nan is not a number"),
    (lambda: comm_budget(bytes="1 MiB"), "bytes='1 MiB' is not a number"),  # type: ignore[arg-type]
    (lambda: comm_budget(bytes=True), "bytes=True is not a number"),
    (lambda: comm_budget(backward=1), "backward=1 is not a bool"),  # type: ignore[arg-type]
    (lambda: comm_budget()(3), "3 is not a function that can be budgeted"),  # type: ignore[type-var]
]


@pytest.mark.parametrize(("make", "match"), BAD)
def test_a_budget_that_cannot_be_read_is_an_error_where_it_stands(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(mc.MeshError, match="(?s)" + match):
        make()


def test_a_recorder_that_somebody_keeps_is_silent() -> None:
    def main() -> int:
        mesh = mc.make_mesh({"t": 2})
        with trace() as t:
            kept: Any = mesh.axis("t").link
        assert not kept.hooks
        kept.barrier()
        return len(t.events)

    assert mc.launch(main, ranks=2) == [0, 0]


# ------------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.thorough
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """No times are judged."""
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.tracing", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "after / never" in done.stdout
    found = json.loads(path.read_text())["all_reduce"]
    assert set(found) == {"8 in-process ranks together", "the fake backend"}
    for times in found.values():
        assert set(times) == set(tracing.MODES)
        assert all(set(took) == set(tracing.STATES) and min(took.values()) > 0 for took in times.values())


# ------------------------------------------------------------------------------------- around processes that are started


def abroad(x: Tensor) -> int:
    mesh = mc.make_mesh({"a": 2})
    w = torch.ones(8, requires_grad=True)
    y = mc.all_reduce(mc.pvary(w, "a", mesh=mesh) * x, "a", mesh=mesh)
    y.sum().backward()
    return mesh.rank


def test_what_started_processes_do_counts() -> None:
    with (
        pytest.raises(AssertionError, match=r"a: 2 all_reduce on rank 0, allowed nothing"),
        mc.comm_budget(a="nothing") as outer,
        mc.trace() as t,
    ):
        assert mc.launch(abroad, ranks=2, args=(torch.ones(8),), runtime="processes") == [0, 1]
    assert t.summary() == "2 all_reduce over a"
    for backward in (False, True):
        assert [t.count("all_reduce", "a", backward=backward, rank=rank) for rank in (0, 1)] == [1, 1]
    assert t.totals()["a"].payload == 64
    assert all(event.site is not None and event.site.file == __file__ for event in t.events)
    assert all(0 <= event.start <= t.seconds for event in t.events)
    assert len(outer.events) == len(t.events) == 4
    mc.comm_budget(a="2 all_reduce", bytes=64).check(t)
    mc.comm_budget(a="1 all_reduce", backward=False).check(t)


def held_by_a_trace() -> list[str]:
    """The primitives of which a trace keeps what they were given."""
    mesh, held = mc.make_mesh({"t": 2}), []
    whole, other = (torch.ones(8) if mesh.rank == 0 else None), 1 - mesh.rank
    calls: dict[str, Callable[[Tensor], object]] = {
        "all_reduce": lambda x: mc.all_reduce(x, "t"),
        "all_gather, later": lambda x: mc.all_gather(x, "t", async_op=True).wait(),
        "reduce_scatter": lambda x: mc.reduce_scatter(x, "t"),
        "all_to_all": lambda x: mc.all_to_all(x, "t", 0, 0),
        "permute": lambda x: mc.shift(x, "t"),
        "scatter": lambda x: mc.scatter(whole, "t", src=0, like=x),
        "exchange": lambda x: mc.exchange([(x, other)], [(other, (4,), x.dtype)], "t"),
    }
    with mc.use_mesh(mesh), mc.trace() as t:
        for name, call in calls.items():
            x = torch.ones(4)
            ref = weakref.ref(x)
            call(x)
            del x
            held += [name] * (ref() is not None)
        assert len(t.events) == len(calls)
    return held


def test_a_trace_keeps_no_tensor() -> None:
    assert mc.launch(held_by_a_trace, ranks=2) == [[], []]
