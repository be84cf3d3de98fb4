"""Axes over several machines: ranks of one meet in shared memory, and each speaks to its peers on the others. The four ranks
of the pool say that they are on two machines; the tests marked thorough run on hosts of the rig.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import seeded
from hosts import ROOT, Hosts, needs_hosts
from oracle import tree
from test_transport import agree, bits, drawn, moved, reduced
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.start import world
from meshcomm.runtime.transports.hosts import link as links
from meshcomm.runtime.transports.hosts.arrangement import Arrangement, arrangement_of
from meshcomm.runtime.transports.hosts.link import HostsLink
from meshcomm.runtime.transports.hosts.parts import blocks_of, chunks_of, number_of
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.shared.words import code_of, said

BLOCKS = ((0, 1), (2, 3))
APART = ((0, 2), (1, 3))
"""Ranks by machine, where a tree over all of them is one over the machines, and where it is not."""
UNEVEN = ((0, 1), (2,), (3,))
WHERE = pytest.mark.parametrize("ranks", [BLOCKS, APART, UNEVEN], ids=["blocks", "apart", "uneven"])


@contextlib.contextmanager
def machines(ranks: tuple[tuple[int, ...], ...] = BLOCKS, block: int = 64) -> Iterator[None]:
    """Meshes that are made within are over several machines, and tensors of more bytes go in blocks."""
    state = world._state
    assert state is not None
    here = state.world
    assert here is not None
    assert here.neighbours is not None
    where = {rank: number for number, machine in enumerate(ranks) for rank in machine}
    addresses = tuple(each._replace(machine=f"{where[rank]}") for rank, each in enumerate(here.neighbours.addresses))
    state.world = here._replace(neighbours=here.neighbours._replace(addresses=addresses))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "_BLOCK", block)
            patch.setattr(links, "_ONE_STEP", 0)
            yield
    finally:
        state.world = here


def every_way(ranks: tuple[tuple[int, ...], ...]) -> None:
    with machines(ranks):
        mesh = mc.make_mesh({"a": 4})
        assert type(mesh.axis("a").link) is (ProcessLink if ranks == UNEVEN else HostsLink)
        for length, dtype in (
            (0, torch.float32),
            (1, torch.int16),
            (5, torch.float32),
            (67, torch.bfloat16),
            (33, torch.bool),
        ):
            agree(moved(length, dtype, 4), mesh, f"of {length} {dtype}")
            for op in ("max", "bor") if dtype == torch.bool else ("sum", "max"):
                agree(reduced(op, length, dtype, 4), mesh, f"{op} of {length} {dtype}")
        agree(reduced("mean", 33, torch.float64, 4), mesh, "mean")
        agree(reduced("product", 7, torch.complex64, 4), mesh, "product")


@WHERE
def test_values(pool4: Any, ranks: tuple[tuple[int, ...], ...]) -> None:
    pool4.run(every_way, ranks)


def every_bit(ranks: tuple[tuple[int, ...], ...]) -> None:
    """Those of the tree by index: at once and later, strided, 0-d, exact."""
    with machines(ranks):
        mesh = mc.make_mesh({"a": 4})
        for op in ("sum", "mean", "product"):
            for dtype in (torch.float32, torch.bfloat16):
                xs = [drawn(4 * 67, dtype, index) for index in range(4)]
                expected, x = tree(xs, op), xs[mesh.rank]
                works = [mc.all_reduce(x, "a", op, mesh=mesh, async_op=True) for _ in range(3)]
                mine = mc.reduce_scatter(x, "a", op=op, mesh=mesh)
                turned = mc.all_reduce(x.view(67, 4).t(), "a", op, mesh=mesh)
                one: Tensor = mc.all_reduce(x[3], "a", op, mesh=mesh)
                assert bits(mine) == bits(expected.chunk(4)[mesh.rank])
                assert bits(turned.t()) == bits(expected) == bits(mc.all_gather(mine, "a", mesh=mesh))
                assert bits(one) == bits(expected[3])
                assert one.shape == ()
                for work in works:
                    assert bits(work.wait()) == bits(expected)
        exact = mc.all_reduce(drawn(9, torch.float32, mesh.rank), "a", mesh=mesh, exact=True)
    flat = mc.all_reduce(drawn(9, torch.float32, mesh.rank), "a", mesh=mc.make_mesh({"a": 4}), exact=True)
    assert bits(exact) == bits(flat)


@WHERE
def test_bits(pool4: Any, ranks: tuple[tuple[int, ...], ...]) -> None:
    pool4.run(every_bit, ranks)


def loss_and_gradients(apart: bool) -> list[list[float]]:
    """Every collective that is in two levels, with its gradient, over two axes."""
    both = ("a", "b")
    with machines() if apart else contextlib.nullcontext():
        mesh = mc.make_mesh({"a": 2, "b": 2})
        assert not apart or type(mesh.axis(both).link) is HostsLink
    x = seeded((8, 6), torch.float64, mesh.rank).requires_grad_()
    total = mc.all_reduce(x.sin(), both, mesh=mesh)
    rows = mc.reduce_scatter(x * x, both, mesh=mesh)
    whole = mc.all_gather(mc.all_reduce(x[:2], "b", mesh=mesh).exp(), both, mesh=mesh)
    first = mc.broadcast(x.cos(), both, 1, mesh=mesh)
    loss = (total * x).sum() + (rows**3).sum() + (whole * whole).sum() + (first * x).sum()
    (grad,) = torch.autograd.grad(loss, x)
    return [[loss.item()], grad.flatten().tolist()]


def test_gradients_are_those_of_one_machine(pool4: Any) -> None:
    apart, together = pool4.run(loss_and_gradients, True), pool4.run(loss_and_gradients, False)
    assert apart == together == mc.launch(loss_and_gradients, ranks=4, args=(False,))


def links_of_axes() -> list[str]:
    with machines():
        mesh = mc.make_mesh({"dp": 2, "tp": 2})
        names = [type(mesh.axis(axis).link).__name__ for axis in ("dp", "tp", ("dp", "tp"), ("tp", "dp"))]
    for axis, x in (("tp", torch.ones(3)), ("dp", torch.ones(3)), (("tp", "dp"), torch.ones(3))):
        assert mc.all_reduce(x, axis, mesh=mesh)[0].item() == mesh.axis(axis).size
    return names


def test_each_axis_goes_as_far_as_it_must(pool4: Any) -> None:
    """Within a machine through shared memory alone, between machines over the wire, over both in two levels."""
    assert pool4.run(links_of_axes) == [["ProcessLink", "OneHostLink", "HostsLink", "HostsLink"]] * 4


def some_later() -> None:
    """Ranks wait for the same calls at once or later; their messages meet all the same."""
    with machines():
        mesh = mc.make_mesh({"a": 4})
    for turn in range(8):
        x = torch.arange(40.0) + mesh.rank
        calls = [mc.all_reduce, mc.all_gather, mc.reduce_scatter, functools.partial(mc.broadcast, src=2)]
        found = [call(x, "a", mesh=mesh, async_op=(turn + mesh.rank + i) % 3 == 0) for i, call in enumerate(calls)]
        got = [each.wait() if isinstance(each, mc.Work) else each for each in found]
        assert got[0].tolist() == [4.0 * i + 6 for i in range(40)]
        assert got[1].tolist() == [float(i + rank) for rank in range(4) for i in range(40)]
        assert got[2].tolist() == [4.0 * i + 6 for i in range(10 * mesh.rank, 10 * mesh.rank + 10)]
        assert got[3].tolist() == [i + 2.0 for i in range(40)]


def test_ranks_that_wait_at_once_and_later(pool4: Any) -> None:
    pool4.run(some_later)


def after_a_call_that_failed() -> None:
    """One rank does not make a call; the next one of the same shape is not taken for it."""
    with machines():
        mesh = mc.make_mesh({"a": 4}, timeout=1)
    if mesh.rank != 3:
        with pytest.raises(mc.CommError):
            mc.all_reduce(torch.ones(8), "a", mesh=mesh)
    mc.barrier("w", mesh=mc.make_mesh({"w": 4}))
    with contextlib.suppress(mc.CommError):
        assert mc.all_reduce(torch.full((8,), 2.0), "a", mesh=mesh).tolist() == [8.0] * 8


@pytest.mark.thorough
def test_a_call_that_failed_is_not_taken_for_the_next(pool4: Any) -> None:
    pool4.run(after_a_call_that_failed)


def under_guard_and_traced() -> None:
    with machines():
        mesh = mc.make_mesh({"a": 4})
        x = torch.ones(4)
        with mc.trace() as trace:
            work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
            assert mc.all_gather(x, "a", mesh=mesh).shape == (16,)
            assert work.wait().tolist() == [4.0] * 4
        assert [event.operation for event in trace.events] == ["all_reduce", "all_gather"]
        with pytest.raises(mc.CommError, match="all_reduce f32"):
            (mc.all_gather if mesh.rank == 2 else mc.all_reduce)(x, "a", mesh=mesh)


def test_the_guard_and_traces_see_one_call(guarded4: Any) -> None:
    guarded4.run(under_guard_and_traced)


# -------------------------------------------------------------------------------------------------- how it is decided


def test_arrangements() -> None:
    found = arrangement_of(["x", "x", "y", "y", "z", "z"])
    assert found == Arrangement(((0, 1), (2, 3), (4, 5)))
    assert found.aligned
    assert found.peers_of(3) == (1, 3, 5)
    assert found.host_of(4) == 2
    three = arrangement_of(["x"] * 3 + ["y"] * 3)
    assert three is not None
    assert three.in_order
    assert not three.aligned
    turned = arrangement_of(["x", "y", "x", "y"])
    assert turned is not None
    assert turned.hosts == ((0, 2), (1, 3))
    assert not turned.in_order
    for nothing in (["x"] * 4, ["x", "y"], ["x", "x", "y"], ["x", "x", "", ""], ["x"] * 33 + ["y"] * 33):
        assert arrangement_of(nothing) is None


def test_runs() -> None:
    assert [(run.start, run.stop) for run in chunks_of(5, 4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [(run.start, run.stop) for run in blocks_of(10, 40, 16)] == [(0, 4), (4, 8), (8, 10)]
    assert len(blocks_of(10**6, 4 * 10**6, 1)) == 256
    assert blocks_of(3, 12, 100) == [slice(0, 3)]


def test_what_part_a_call_is_stands_in_no_text() -> None:
    code = code_of("all_reduce", "sum", torch.float32)
    assert said(code, 500, number_of((65, 0, 0))) == said(code, 500, number_of((1, 255, 2000))) == said(code, 500, -1)
    assert said(code_of("broadcast", "", torch.float32), 500, 3) == "broadcast f32[500] (src=3)"


# --------------------------------------------------------------------------------------------------------- real hosts

SCRIPT = """
import torch, meshcomm as mc
from pathlib import Path

def sent():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])

mesh = mc.make_mesh({"a": -1})
n, length = mesh.size, 400_000
xs = [torch.randn(length, generator=torch.Generator().manual_seed(i)) for i in range(n)]
x = xs[mesh.rank]
for name, call, limit in (
    ("all_reduce", lambda: mc.all_reduce(x, "a", mesh=mesh), 1.0),
    ("reduce_scatter", lambda: mc.reduce_scatter(x, "a", mesh=mesh), 0.5),
    ("all_gather", lambda: mc.all_gather(x.chunk(n)[mesh.rank], "a", mesh=mesh), 0.5),
    ("broadcast", lambda: mc.broadcast(x, "a", 1, mesh=mesh), 1.0),
):
    found = []
    for _ in range(5):
        mc.barrier("a", mesh=mesh)
        before = sent()
        call()
        mc.barrier("a", mesh=mesh)
        found.append(sent() - before)
    print(mesh.rank, name, min(found[1:]) / (limit * x.nbytes))  # without what TCP has sent again
total = (xs[0] + xs[1]) + (xs[2] + xs[3])
assert torch.equal(mc.all_reduce(x, "a", mesh=mesh), total)
print(type(mesh.axis("a").link).__name__)
"""


@pytest.mark.thorough
def test_bytes_on_the_wire(tmp_path: Path) -> None:
    """At the interfaces it is what the limit says and less than a tenth more, in the best of a few calls."""
    needs_hosts()
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    with Hosts(2, rate="1gbit") as hosts:
        ranks = hosts.plain(2, str(script), GLOO_SOCKET_IFNAME="eth0")
        said = "".join(rank.communicate(timeout=200)[0] for rank in ranks)
    lines = [line.split() for line in said.splitlines()]
    assert lines.count(["HostsLink"]) == 4, said
    shares = [float(line[2]) for line in lines if len(line) == 3]
    assert len(shares) == 16, said
    assert max(shares) < 1.1, said


UNEQUAL = """
import torch, meshcomm as mc
from oracle import tree
from pathlib import Path

def sent():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])

mesh = mc.make_mesh({"a": 3, "b": 2})  # 0 1 | 2 | 3 4 5: of b the first and the last pair are on one host
xs = [torch.randn(60_000, generator=torch.Generator().manual_seed(i)) for i in range(6)]
x = xs[mesh.rank]
for axis, ranks in (("b", [mesh.rank & ~1, mesh.rank | 1]), ("a", range(mesh.rank % 2, 6, 2)), (("a", "b"), range(6))):
    total = tree([xs[i] for i in ranks], "sum")
    rows = total.view(len(ranks), -1)
    assert torch.equal(mc.all_reduce(x, axis, mesh=mesh), total)
    mine = mc.reduce_scatter(x.view(len(ranks), -1), axis, mesh=mesh)
    assert torch.equal(mc.all_gather(mine, axis, mesh=mesh).view_as(rows), rows)
    assert torch.equal(mc.broadcast(x, axis, 1, mesh=mesh), xs[ranks[1]])
    mc.barrier(("a", "b"), mesh=mesh)
    before = sent()
    mc.all_reduce(x, axis, mesh=mesh)
    if mesh.rank == 0:
        print(f"sent {(sent() - before) / x.nbytes:.1f}", flush=True)
    mc.barrier(("a", "b"), mesh=mesh)
mc.shutdown()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["plain", "torchrun"])
def test_three_hosts_that_have_not_as_many_ranks(tmp_path: Path, how: str) -> None:
    """Over all of them in one level, with the bits of the tree; an axis within a host sends nothing."""
    needs_hosts()
    script = tmp_path / "program.py"
    script.write_text(UNEQUAL)
    with Hosts(3) as hosts:
        start, path = hosts.plain if how == "plain" else hosts.torchrun, f"{ROOT}:{ROOT / 'tests'}"
        started = start((2, 1, 3), str(script), PYTHONPATH=path)
        texts = [each.communicate(timeout=200)[0] for each in started]
    said = "\n".join(texts)
    assert [each.returncode for each in started] == [0] * len(started), said
    within, between, over_all = (float(line.split()[1]) for line in said.splitlines() if line.startswith("sent "))
    assert within == 0.0, said
    assert min(between, over_all) > 0.0, said
