"""Time-outs of meshes and of single calls: who gives up when, what is said then, and that the group goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import as_compiling
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from meshcomm.collectives import one_rank
from meshcomm.runtime.health import hosts, lateness

SOON = 0.05
LONG = 60.0


def _send_or_receive(mesh: mc.Mesh, **limit: Any) -> Any:
    """Rank 0 receives from rank 1."""
    if mesh.rank == 0:
        return mc.recv("a", 1, shape=(2,), dtype=torch.float32, mesh=mesh, **limit)
    return mc.send(torch.ones(2), "a", 0, mesh=mesh, **limit) if mesh.rank == 1 else None


def _exchange(mesh: mc.Mesh, **limit: Any) -> Any:
    """With a tag of its own: else it takes the place of a receive that was given up."""
    others = [i for i in range(mesh.size) if i != mesh.rank]
    posts = [(torch.tensor(mesh.rank), i, 1) for i in others]
    return mc.exchange(posts, [(i, (), torch.int64, 1) for i in others], "a", mesh=mesh, **limit)


def _scatter(mesh: mc.Mesh, like: Tensor | None, **limit: Any) -> Tensor:
    return mc.scatter(torch.arange(8.0) if mesh.rank == 1 else None, "a", 1, like=like, mesh=mesh, **limit)


X = torch.arange(8.0)
TREE = {"w": torch.ones(3), "b": [torch.ones(5), torch.ones((), dtype=torch.int64)]}
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda mesh, **limit: mc.all_reduce(X, "a", mesh=mesh, **limit),
    "all_reduce of a tree": lambda mesh, **limit: mc.all_reduce(TREE, "a", mesh=mesh, bucket_mb=1e-5, **limit),
    "all_gather": lambda mesh, **limit: mc.all_gather(X, "a", mesh=mesh, **limit),
    "all_gather_invariant": lambda mesh, **limit: mc.all_gather_invariant(X, "a", mesh=mesh, **limit),
    "reduce_scatter": lambda mesh, **limit: mc.reduce_scatter(X, "a", mesh=mesh, **limit),
    "all_to_all": lambda mesh, **limit: mc.all_to_all(X, "a", 0, 0, mesh=mesh, **limit),
    "permute": lambda mesh, **limit: mc.permute(X, "a", [(1, 0), (0, 1)], mesh=mesh, **limit),
    "shift": lambda mesh, **limit: mc.shift(X, "a", mesh=mesh, **limit),
    "scan": lambda mesh, **limit: mc.scan(X, "a", mesh=mesh, **limit),
    "broadcast": lambda mesh, **limit: mc.broadcast(X, "a", 1, mesh=mesh, **limit),
    "reduce": lambda mesh, **limit: mc.reduce(X, "a", mesh=mesh, **limit),
    "gather": lambda mesh, **limit: mc.gather(X, "a", mesh=mesh, **limit),
    "scatter": lambda mesh, **limit: _scatter(mesh, torch.empty(8 // mesh.size), **limit),
    "scatter without like": lambda mesh, **limit: _scatter(mesh, None, **limit),
    "send and recv": _send_or_receive,
    "exchange": _exchange,
}


# ------------------------------------------------------------------------------------------------------ single calls


def in_time() -> None:
    mesh = mc.make_mesh({"a": -1})
    for name, call in CALLS.items():
        assert repr(call(mesh, timeout=timedelta(seconds=LONG))) == repr(call(mesh)), name


def test_calls_that_end_in_time_give_what_they_give_without(run4: Any) -> None:
    run4(in_time)


def gradients() -> list[float]:
    mesh = mc.make_mesh({"a": 4})
    x = torch.full((4,), float(mesh.rank + 1), requires_grad=True)
    y = mc.reduce_scatter(x * x, "a", mesh=mesh, timeout=LONG)
    mc.all_gather(y, "a", mesh=mesh, timeout=LONG).mul(torch.arange(4.0)).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()  # type: ignore[no-any-return]


def test_derivatives(run4: Any) -> None:
    assert run4(gradients) == [[2 * (rank + 1) * 4 * i for i in range(4)] for rank in range(4)]


def as_without(profiled: bool) -> None:
    """A call with a time-out is one that waits, to autograd, to a trace and to the profiler."""
    with mc.use_mesh(mc.make_mesh({"a": 4})):
        for op in ("sum", "max"):
            nodes, gradients, lines, ranges = ([] for _ in range(4))
            for more in ({}, {"timeout": LONG}):
                x = torch.arange(4.0, requires_grad=True)
                seen = profile(activities=[ProfilerActivity.CPU], acc_events=True) if profiled else nullcontext()
                with seen, mc.trace() as t:
                    y = mc.all_reduce(x * (1 + mc.axis_index("a")), "a", op, **more)  # forward
                    tree = mc.all_gather({"x": x, "n": torch.arange(2)}, "a", **more)
                    (y.sum() + tree["x"].square().sum()).backward()
                    mc.gather(x.detach(), "a", **more)
                nodes.append([len(node.next_functions) for node in (y.grad_fn, y.grad_fn.next_functions[0][0])])
                gradients.append(x.grad.tolist())
                lines.append([(e.operation, e.backward, e.asynchronous, str(e.site)) for e in t.events])
                if profiled:
                    ranges.append(sorted(event.name for event in seen.events() if event.name.startswith("meshcomm.")))
            for with_and_without in (nodes, gradients, lines, ranges)[: 4 if profiled else 3]:
                assert with_and_without[0] == with_and_without[1]


def test_a_call_with_a_time_out_is_one_that_waits(pool4: Any) -> None:
    pool4.run(as_without, True)
    mc.launch(as_without, ranks=4, args=(False,))


def given_up() -> dict[str, str]:
    """Rank 0 gives up every call; the others make them later, and get what it has given."""
    mesh, other = mc.make_mesh({"a": 4}), mc.make_mesh({"all": 4})
    told = {}
    if mesh.rank == 0:
        for name, call in CALLS.items():
            begin = time.monotonic()
            with pytest.raises(mc.CommError) as caught:
                call(mesh, timeout=SOON)
            told[name] = f"{time.monotonic() - begin:.2f} {caught.value}"
    mc.barrier("all", timeout=LONG, mesh=other)
    if mesh.rank:
        for name, call in CALLS.items():
            if name != "scatter without like":
                call(mesh)
            else:  # of its two steps rank 0 has made the first
                one_rank._scatter_header(X if mesh.rank == 1 else None, mesh.axis("a"), 1, 0, False)
    for _ in range(2):
        assert mc.all_reduce(torch.ones(2), "a", mesh=mesh, timeout=LONG).tolist() == [4, 4]
        mc.barrier("a", mesh=mesh)
    link = mesh.axis("a").link
    assert len(link.mail.open) <= 1
    assert not link.mail.dropped
    return told


def test_calls_that_are_given_up(pool4: Any) -> None:
    told, *nothing = pool4.run(given_up)
    assert nothing == [{}, {}, {}]
    assert told.keys() == CALLS.keys()
    for name, text in told.items():
        seconds, _, text = text.partition(" ")
        assert float(seconds) < LONG / 2
        where = "recv" if name == "send and recv" else name.split()[0]
        assert re.match(rf"meshcomm\.{where}: ind(ex|ices) [\d, ]+ did not come within 0\.0\d+ s\.", text), text
        assert re.search(r"over 'a' at test_timeouts.py:\d+, here a=0, ", text)
        assert re.search(r"since \d\d:\d\d:\d\d \(", text)
        assert "arrived: rank 0" in text
        assert "the call was given up" in text
    assert "all_reduce f32[8] (op='sum') over 'a' at test_timeouts.py:" in told["all_reduce"]
    assert re.search(r"not arrived: rank 2: (it has (not )?made|its last call)", told["all_reduce"]), told
    assert re.search(r"indices 1, 2, 3 did not come", told["all_gather"])
    assert "index 1 did not come" in told["broadcast"]  # it waits for nobody else


def given_up_over_gloo(late: int, turns: int) -> list[int]:
    """All but one rank give up every call that waits for it; it makes them later, and the group goes on. Of two axes
    between the same ranks one has torch's group, and the other sends what it moves as messages. With two turns each
    call goes over one of them.
    """
    first, second = mc.make_mesh({"a": 4}), mc.make_mesh({"a": 4})
    other, counts = mc.make_mesh({"all": 4}), []
    for turn, mesh in enumerate((first, second)):
        mc.all_reduce(X, "a", mesh=mesh)
        gave_up = []
        for name, call in list(CALLS.items())[turn % turns :: turns]:
            if name == "scatter without like" or (name, late) == ("send and recv", 0):  # of two steps; of nobody's
                continue
            if mesh.rank != late:
                said = ""
                try:
                    call(mesh, timeout=SOON)
                except mc.CommError as error:
                    said = str(error)
                assert not said or "did not come within" in said, said
                gave_up += [name] if said else []
            mc.barrier("all", timeout=LONG, mesh=other)
            if mesh.rank == late:
                call(mesh)
            assert mc.all_reduce(torch.ones(2), "a", mesh=mesh, timeout=LONG).tolist() == [4, 4], name
            mc.barrier("a", mesh=mesh)
        counts.append(len(gave_up))
    return counts


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("late", "turns"), [(1, 2), *(pytest.param(i, 1, marks=pytest.mark.thorough) for i in (0, 1, 3))]
)
def test_calls_that_are_given_up_over_gloo(gloo4: Any, late: int, turns: int) -> None:
    counts = gloo4.run(given_up_over_gloo, late, turns)
    assert counts.pop(late) == [0, 0]
    assert all(min(each) >= 8 // turns for each in counts), counts


def alone_in_process() -> str:
    mesh = mc.make_mesh({"a": 2})
    text = ""
    if mesh.rank == 0:
        mc.all_reduce(X, "a", mesh=mesh)
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(X, "a", "max", mesh=mesh, timeout=LONG)
        text = str(caught.value)
        mc.send(X, "a", 1, mesh=mesh)
    else:
        mc.all_reduce(X, "a", mesh=mesh)
        mc.recv("a", 0, shape=(8,), dtype=torch.float32, mesh=mesh)
        assert torch.equal(mc.all_reduce(X, "a", "max", mesh=mesh), X)  # with what rank 0 has brought
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 2
    return text


def test_among_the_ranks_of_one_process_no_time_passes() -> None:
    begin = time.monotonic()
    text, _ = mc.launch(alone_in_process, ranks=2)
    assert time.monotonic() - begin < LONG / 2
    assert "meshcomm.all_reduce: index 1 did not come within 60 s." in text
    assert re.search(r"all_reduce f32\[8\] \(op='max'\) over 'a' at \S+, here a=0, call 2 of a group of 2", text)
    assert "last completed: this rank all_reduce f32[8] (op='sum'), call 1" in text


def test_the_ranks_of_one_process_are_not_on_other_hosts(request: pytest.FixtureRequest) -> None:
    """Though the process is a rank of a world that is on several: their numbers are not its own."""
    request.addfinalizer(hosts.forget)
    hosts.placed(0, [hosts.Place(name, name, "10.0.0.1", "", 0) for name in ("node0", "node1")], None)
    assert hosts.where(1) == "on node1 (10.0.0.1)"
    text, _ = mc.launch(alone_in_process, ranks=2)
    assert "meshcomm.all_reduce: index 1 did not come within 60 s." in text
    assert "node1" not in text


# ------------------------------------------------------------------------------------------------------- bad values

BAD = (0, -1, float("nan"), float("inf"), True, "5", timedelta(0), timedelta(seconds=-1), [1])


@pytest.mark.parametrize("name", CALLS)
def test_time_outs_that_are_none(name: str) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        for bad in BAD:
            with pytest.raises(mc.MeshError, match="timeout must be a positive number of seconds, or a timedelta") as e:
                CALLS[name](mesh, timeout=bad)
            assert repr(bad) in str(e.value)
        with pytest.raises(mc.MeshError, match="timeout= with async_op=True.*\n.*wait of the work"):
            CALLS[name](mesh, timeout=1, async_op=True)

    mc.launch(main, ranks=2)


@pytest.mark.parametrize("bad", BAD)
def test_a_mesh_with_a_time_out_that_is_none(bad: Any) -> None:
    with pytest.raises(mc.MeshError, match="make_mesh: timeout must be a positive number of seconds"):
        mc.make_mesh({"a": 2}, timeout=bad)


def test_transforms_and_compiled_code_have_the_time_out_of_the_mesh() -> None:
    mesh = mc.make_mesh({"a": 1}, timeout=5)

    def call(x: Tensor) -> Tensor:
        return mc.all_reduce(x, "a", mesh=mesh, timeout=5).sum()

    for transform in (torch.func.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(mc.MeshError, match="compiled code or under a torch.func transform(.|\n)*make_mesh"):
            transform(call)(torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2))
    with pytest.raises(Exception, match=as_compiling("compiled code or under a torch.func transform")):
        torch.compile(call, backend="eager", fullgraph=True)(torch.ones(2))


def test_under_the_checker_of_varying_types() -> None:
    mesh = mc.make_mesh({"a": 2})

    def part(x: Tensor) -> Tensor:
        return mc.all_reduce(mc.all_gather(x, "a", mesh=mesh, timeout=5), "a", "max", mesh=mesh, timeout=5)

    y = mc.shard_map(part, mesh=mesh, in_specs="(a d)", out_specs="d")(torch.arange(4.0))
    assert y.tolist() == [0, 1, 2, 3]


# ----------------------------------------------------------------------------------------------------------- meshes


def meshes() -> tuple[str, int]:
    usual, same = mc.make_mesh({"a": 4}), mc.make_mesh({"a": 4}, timeout=None)
    short, again = mc.make_mesh({"a": 4}, timeout=0.5), mc.make_mesh({"a": 4}, timeout=timedelta(seconds=0.5))
    links = [mesh.axis("a").link for mesh in (usual, same, short, again)]
    assert len({link.name for link in links}) == 4
    assert links[0].base is links[1].base
    assert links[2].base is links[3].base
    assert links[0].base is not links[2].base
    assert (links[0].mail.timeout, links[2].mail.timeout) == (300.0, 0.5)
    assert usual.timeout is None
    assert short.timeout == timedelta(seconds=0.5)
    text = ""
    mc.barrier("a", mesh=usual)  # however late one of them begins
    mc.all_gather(X, "a", mesh=short, timeout=LONG)
    if usual.rank == 3:
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(X, "a", mesh=short)
        text = str(caught.value)
    mc.barrier("a", mesh=usual)
    if usual.rank != 3:
        mc.all_reduce(X, "a", mesh=short, timeout=LONG)
    assert mc.all_reduce(torch.ones(1), "a", mesh=short, timeout=LONG).item() == 4
    assert dist.get_process_group_ranks(links[2].base) == [0, 1, 2, 3]
    return text, len(links[2].mail.dropped)


def test_a_mesh_with_a_time_out_of_its_own(pool4: Any) -> None:
    *_, (text, _) = pool4.run(meshes)
    assert "meshcomm.all_reduce: indices 0, 1, 2 did not come within 0.5 s." in text
    assert re.search(r"over 'a' at test_timeouts.py:\d+, here a=3, call 2 of a group of 4", text)
    assert "not arrived: rank 1: its last call here is number 1, all_gather f32[8]" in text
    assert "last completed: this rank all_gather f32[8] (dim=0), call 1" in text


def test_in_process_meshes_take_one() -> None:
    mesh = mc.make_mesh({"a": 2}, timeout=3)
    assert mesh.timeout == timedelta(seconds=3)
    assert mc.launch(lambda: mc.all_reduce(torch.ones(1), "a", mesh=mesh).item(), ranks=2) == [2, 2]
    alone = mc.make_mesh({"a": 1}, timeout=3)
    assert mc.all_reduce(torch.ones(1), "a", mesh=alone, timeout=1).item() == 1


# ------------------------------------------------------------------------------------------------ without shared memory


def over_sockets() -> list[str]:
    mesh, short = mc.make_mesh({"a": 2}), mc.make_mesh({"b": 2}, timeout=4)
    assert not hasattr(type(mesh.axis("a").link), "mail")
    told = []
    lateness._GRACE = lateness._LEAST = LONG  # however much later the time of the other one is up
    mc.all_gather(X, "a", mesh=mesh)
    mc.barrier("b", mesh=short)
    wait = mc.broadcast if mesh.rank == 0 else partial(mc.recv, shape=(3,), dtype=torch.float32)
    given = (X, "a", 1) if mesh.rank == 0 else ("a", 0)
    with pytest.raises(mc.CommError) as caught:  # both wait, each in another call
        wait(*given, mesh=mesh, timeout=2)  # type: ignore[operator]
    told.append(str(caught.value))
    mc.send(torch.ones(3), "a", 1, mesh=mesh) if mesh.rank == 0 else mc.broadcast(X, "a", 1, mesh=mesh)
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh, timeout=LONG).item() == 2
    if mesh.rank == 0:
        lateness._GRACE = 0.1
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(X, "b", mesh=short)
        told.append(str(caught.value))
    mc.barrier("a", mesh=mesh)
    return told


@pytest.mark.thorough
def test_over_sockets_ranks_whose_time_is_up_tell_each_other_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCOMM_SHARED_MEMORY", "0")
    (first, mesh_time), (second,) = mc.launch(over_sockets, ranks=2, runtime="processes", timeout=280)
    assert "meshcomm.broadcast: index 1 did not come within 2 s." in first
    assert re.search(
        r"not arrived: rank 1: its time was up in recv f32\[3\] .*over 'a' at test_timeouts.py:\d+, since \d\d:", first
    )
    assert re.search(r"last completed: rank 1 barrier.* over 'b', call 1", first)
    assert "meshcomm.recv: index 0 did not come within 2 s." in second
    assert re.search(r"its time was up in broadcast f32\[8\] \(src=1\).* over 'a' at \S+, call 2", second)
    assert re.search(r"meshcomm\.all_reduce: index 1 did not come within \d+(\.\d+)? s", mesh_time)
    assert re.search(r"all_reduce f32\[8\] \(op='sum'\) over 'b' at \S+, here b=0, call 2 of a group of 2", mesh_time)
    assert "rank 1: it does not answer" in mesh_time
