"""reshard: every layout to every other one against the global tensor, gradients included; its plans against the best that there is."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import Oracle
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import assert_type

import meshcomm as mc
from meshcomm.layout.shapes import local_shape

Run = Callable[..., list[Any]]
State = tuple[tuple[str, ...], ...]
NAMES = ("x", "y", "z")


def states(axes: tuple[str, ...], dims: int) -> Iterator[State]:
    """Every way to cut ``dims`` dims over some of the axes."""
    for count in range(len(axes) + 1):
        for some in itertools.permutations(axes, count):
            for where in itertools.product(range(dims), repeat=count):
                if list(where) == sorted(where):  # the others are the same with the axes in another order
                    state: list[tuple[str, ...]] = [()] * dims
                    for axis, dim in zip(some, where, strict=True):
                        state[dim] += (axis,)
                    yield tuple(state)


def write(state: State) -> str:
    return " ".join(f"({' '.join((*axes, name))})" if axes else name for axes, name in zip(state, NAMES, strict=False))


def part(x: Tensor, state: State, shape: dict[str, int], place: dict[str, int]) -> Tensor:
    """A rank's part of a global tensor, by cutting dims once per axis."""
    for dim, axes in enumerate(state):
        for axis in axes:
            x = x.chunk(shape[axis], dim)[place[axis]]
    return x


def every_pair(shape: dict[str, int], length: tuple[int, ...], later: bool = False) -> int:
    """Values and gradients of all pairs of layouts; a loss whose gradient differs everywhere."""
    mesh = mc.make_mesh(shape)
    place, count = mesh.coordinate, 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, dtype=torch.float64, generator=generator)
    g = torch.randn(length, dtype=torch.float64, generator=generator)
    everything = list(dict.fromkeys(states(tuple(shape), len(length))))
    for source in everything:
        for target in everything:
            local = part(x, source, shape, place).clone().requires_grad_()
            text = f"{write(source)} -> {write(target)}"
            y = (
                mc.reshard(local, text, mesh=mesh, async_op=True).wait()
                if later
                else mc.reshard(local, text, mesh=mesh)
            )
            assert torch.equal(y, part(x, target, shape, place)), text
            (found,) = torch.autograd.grad(y, local, part(g, target, shape, place))
            assert torch.equal(found, part(g, source, shape, place)), text
            count += 1
    return count


@pytest.mark.parametrize(
    ("shape", "length"),
    [({"a": 2, "b": 2}, (4, 4, 8)), pytest.param({"a": 2, "b": 4}, (8, 8, 8), marks=pytest.mark.thorough)],
    ids=str,
)
def test_every_layout_to_every_other_one(shape: dict[str, int], length: tuple[int, ...]) -> None:
    counts = mc.launch(every_pair, ranks=math.prod(shape.values()), args=(shape, length))
    assert counts == [19 * 19] * len(counts)


def test_on_processes(pool4: Any) -> None:
    assert pool4.run(every_pair, {"a": 2, "b": 2}, (4, 4)) == [11 * 11] * 4


def test_every_layout_to_every_other_one_later(run4: Run) -> None:
    assert run4(every_pair, {"a": 2, "b": 2}, (4, 4), True) == [11 * 11] * 4


def three_axes() -> None:
    shape = {"a": 2, "b": 2, "c": 2}
    mesh = mc.make_mesh(shape)
    x = torch.arange(8.0 * 8).view(8, 8).double()
    everything = list(dict.fromkeys(states(tuple(shape), 2)))
    pairs = [(p, q) for p in everything for q in everything]
    for source, target in pairs[::37]:
        text = f"{write(source)} -> {write(target)}"
        y = mc.reshard(part(x, source, shape, mesh.coordinate).contiguous(), text, mesh=mesh)
        assert torch.equal(y, part(x, target, shape, mesh.coordinate)), text


def test_three_axes() -> None:
    mc.launch(three_axes, ranks=8)


# --------------------------------------------------------------------------------------------------------- plans


def best(source: State, target: State, shape: dict[str, int], length: tuple[int, ...], limit: int) -> int | None:
    """The fewest elements that any rank must send, if fewer than ``limit``: by trying sequences of collectives on the parts
    themselves, numbered elements, with no idea of layouts.
    """
    oracle, n = Oracle(shape), math.prod(shape.values())
    places = [dict(zip(shape, place, strict=True)) for place in itertools.product(*map(range, shape.values()))]
    x = torch.arange(math.prod(length)).view(length)
    begin, goal = ([part(x, state, shape, place) for place in places] for state in (source, target))
    groups: list[str | tuple[str, ...]] = [*shape]
    groups += [axes for count in range(2, len(shape) + 1) for axes in itertools.permutations(shape, count)]

    def key(xs: list[Tensor]) -> tuple[Any, ...]:
        return tuple((tuple(x.shape), tuple(x.flatten().tolist())) for x in xs)

    def size(axes: str | tuple[str, ...]) -> int:
        return math.prod(shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def moves(xs: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        mine = xs[0].numel()
        dims = range(xs[0].ndim)
        for axes in groups:
            k = size(axes)
            for dim in dims:
                if mine * k <= x.numel():
                    yield (k - 1) * mine, oracle.all_gather(xs, axes, dim)
                if xs[0].shape[dim] % k == 0:
                    yield 0, oracle.shard(xs, axes, dim)
                    for other in dims:
                        if other != dim:
                            yield (k - 1) * mine // k, oracle.all_to_all(xs, axes, dim, other)
        if mine < limit:  # any exchange of whole parts among all
            for order in itertools.permutations(range(n)):
                yield mine, [xs[at] for at in order]

    needed = [set(x.flatten().tolist()) for x in goal]

    def missing(xs: list[Tensor]) -> int:
        """What some rank has yet to receive: in each of these steps all ranks receive as much as they send."""
        return max(len(need.difference(x.flatten().tolist())) for need, x in zip(needed, xs, strict=True))

    wanted, ticket = key(goal), itertools.count()
    queue, seen = [(0, next(ticket), begin)], set()
    while queue:
        cost, _, xs = heapq.heappop(queue)
        now = key(xs)
        if now == wanted:
            return cost
        if now in seen:
            continue
        seen.add(now)
        for more, ys in moves(xs):
            if cost + more + missing(ys) < limit and key(ys) not in seen:
                heapq.heappush(queue, (cost + more, next(ticket), ys))
    return None


def test_no_sequence_of_collectives_sends_less() -> None:
    shape, length = {"a": 2, "b": 2}, (4, 4)
    mesh = mc.make_mesh(shape)
    everything = list(dict.fromkeys(states(tuple(shape), 2)))
    # The search may use all axes, a plan only those that are spoken of.
    pairs = [
        (p, q) for p in everything for q in everything if {axis for axes in (*p, *q) for axis in axes} == set(shape)
    ]
    for source, target in pairs:
        found = mc.plan(f"{write(source)} -> {write(target)}", length, mesh)
        if found.bytes_sent:
            assert best(source, target, shape, length, found.bytes_sent // 4) is None, str(found)


PLANS = {
    "b (tp s) h d -> b s (tp h) d": (["all_to_all"], 3 / 4),
    "b (tp s) h d -> b s h d": (["all_gather_invariant"], 3),
    "b s h d -> b (tp s) h d": ([], 0),
    "(dp tp b) s h d -> b s h d": (["all_gather_invariant"], 7),
    "(dp tp b) s h d -> (dp b) s h d": (["all_gather_invariant"], 3),
    "(dp tp b) s h d -> b (dp tp s) h d": (["all_to_all"], 7 / 8),
    "(dp tp b) s h d -> (tp dp b) s h d": (["permute"], 1),
    "(dp tp b) s h d -> (dp b) (tp s) h d": (["all_to_all"], 3 / 4),
    "(dp b) s (tp h) d -> (dp b) (tp s) h d": (["all_to_all"], 3 / 4),
    "b s h d -> d h s b": ([], 0),
    "b (tp s) h d -> d (tp h) s b": (["all_to_all"], 3 / 4),
}
"""The collectives, and the elements sent as a multiple of what a rank has at first."""


@pytest.mark.parametrize("text", PLANS)
def test_plans(text: str) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 4})
    collectives, times = PLANS[text]
    shape = (8, 16, 8, 4)
    found = mc.plan(text, shape, mesh, dtype=torch.float64)
    assert list(found.collectives) == collectives, str(found)
    first = math.prod(local_shape(text.split("->")[0], shape, mesh))
    assert found.bytes_sent == 8 * times * first
    assert sum(found.bytes_by_axes.values()) == found.bytes_sent
    assert f"{found.bytes_sent:,} bytes sent per rank" in str(found)
    assert len(str(found).splitlines()) == 1 + len(found.steps) + (found.order != (0, 1, 2, 3))


def seen_calls() -> None:
    """What a plan says is what is done."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    link = mesh.axis("tp").link
    log: list[str] = []
    link.announce, before = (lambda note: (log.append(note.what), before(note))), link.announce  # type: ignore[func-returns-value, method-assign]
    link.briefly = False
    x = torch.zeros(2, 4, 6)
    mc.reshard(x, "b (tp s) h -> b s (tp h)", mesh=mesh)
    mc.reshard(x, "b (tp s) h -> b s h", mesh=mesh)
    assert log == ["all_to_all", "all_gather_invariant"]


def test_a_reshard_issues_its_plan() -> None:
    mc.launch(seen_calls, ranks=4)


# ------------------------------------------------------------------------------------------- kinds and transforms


def kinds() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    rank = mesh.rank
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        whole = torch.arange(16).view(4, 4).to(dtype)
        mine = whole.view(2, 2, 4)[rank // 2]
        assert torch.equal(mc.reshard(mine, "(a x) y -> x (a y)", mesh=mesh), whole[:, 2 * (rank // 2) :][:, :2])
    x = torch.randn(3, 4, dtype=torch.float64)
    assert mc.reshard(x, "x y -> x y", mesh=mesh) is x
    y = mc.reshard(x, "x y -> y x", mesh=mesh)
    assert torch.equal(y, x.T)
    scalar = torch.tensor(3.0)
    assert mc.reshard(scalar, " -> ", mesh=mesh) is scalar
    z = torch.randn(1, 4, 1, 2)
    assert mc.reshard(z, "1 (a x) 1 y -> 1 x 1 (a y)", mesh=mesh).shape == (1, 8, 1, 1)
    batch = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(mc.reshard(batch, "... x -> ... (a x)", mesh=mesh), batch.chunk(2, -1)[rank // 2])
    assert torch.equal(mc.reshard(batch[0, 0], "... x -> ... (b x)", mesh=mesh), batch[0, 0].chunk(2, -1)[rank % 2])


def test_kinds_of_tensors(run4: Run) -> None:
    run4(kinds)


def transformed() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = torch.randn(2, 4, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return mc.reshard(x, "(a x) y -> x (a y)", mesh=mesh)

    batch = torch.randn(3, 2, 4, dtype=torch.float64)
    assert_close(torch.func.vmap(f)(batch), torch.stack([f(each) for each in batch]))
    (g,) = torch.func.vjp(f, x)[1](f(x))
    assert_close(g, x)
    y = f(x.requires_grad_())
    first = torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]
    assert_close(first, 3 * x.detach() ** 2)
    assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


def test_transforms_and_second_derivatives(run4: Run) -> None:
    run4(transformed)


# ----------------------------------------------------------------------------------------------------------- later

SEVERAL = "(a b x) y -> x (a y)"
"""Two steps that communicate: what is spread over b is gathered, and what is cut over a is moved."""
LATER = [
    SEVERAL,
    "(a x) y -> x (a y)",
    "(a x) y -> y x",
    "x y -> (b x) y",
    "(a b x) y -> (b a x) y",
    "(a b x) y -> (b x) (a y)",
]


def in_flight() -> None:
    """Many are under way at once, and x is changed meanwhile; values, gradients and second derivatives are the same."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    generator = torch.Generator().manual_seed(mesh.rank)
    xs = [torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in LATER]
    if mesh.rank == 0:
        assert len(mc.plan(SEVERAL, (16, 4), mesh).collectives) == 2

    def of(later: bool) -> list[Tensor]:
        mine = [x * 1 for x in xs]
        if later:
            works = [mc.reshard(x, text, mesh=mesh, async_op=True) for x, text in zip(mine, LATER, strict=True)]
            with torch.no_grad():
                for x, text in zip(mine, LATER, strict=True):
                    if "x y ->" not in text[:6]:
                        x.detach().mul_(0)
            ys = mc.wait(works)
            assert [work.done() for work in works] == [True] * len(works)
            assert all(work.wait() is y for work, y in zip(works, ys, strict=True))
        else:
            ys = [mc.reshard(x, text, mesh=mesh) for x, text in zip(mine, LATER, strict=True)]
        first = torch.autograd.grad(sum((y**3).sum() for y in ys), xs, create_graph=True)
        return [*ys, *first, *torch.autograd.grad(sum((g**2).sum() for g in first), xs)]

    found, expected = of(True), of(False)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_many_are_under_way(run4: Run) -> None:
    run4(in_flight)


def from_grad_to_no_grad() -> None:
    """The steps that are left to the wait run in the modes of the call."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
    with torch.no_grad():
        y = work.wait()
    assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))
    with torch.no_grad():
        work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
    assert not work.wait().requires_grad
    with torch.inference_mode():
        work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
    assert work.wait().is_inference()
    work = mc.reshard(x.detach(), SEVERAL, mesh=mesh, async_op=True)
    with torch.inference_mode():
        assert not work.wait().is_inference()
    work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True).then(lambda y: y.sum())
    assert_close(torch.autograd.grad(work.wait(), x)[0], torch.ones_like(x))
    batch = torch.randn(3, 4, 4, dtype=torch.float64)
    found = torch.func.vmap(lambda x: mc.reshard(x, SEVERAL, mesh=mesh, async_op=True).wait())(batch)
    assert_close(found, torch.stack([mc.reshard(each, SEVERAL, mesh=mesh) for each in batch]))


def test_modes_and_transforms_of_works(run4: Run) -> None:
    run4(from_grad_to_no_grad)


def before_the_others() -> list[int]:
    """The call returns before any other rank makes it: what it is about is appended when the rank comes to it."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    seen.append(mesh.rank)
    x = torch.full((4, 4), float(mesh.rank))
    work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
    before = list(seen)
    work.wait()
    return before


seen: list[int] = []


def test_the_first_step_is_begun_and_not_waited_for() -> None:
    seen.clear()
    assert mc.launch(before_the_others, ranks=4) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def steps_in_order() -> None:
    """What the call begins, and what is left to the wait."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    log: list[str] = []

    def listener(name: str, listen: Callable[..., None]) -> Callable[..., None]:
        return lambda note: (log.append(f"{note.what} {name}"), listen(note))[1]  # type: ignore[func-returns-value]

    for axis in ("a", "b", ("a", "b")):
        link = mesh.axis(axis).link
        link.announce = listener(" ".join(axis), link.announce)  # type: ignore[method-assign]
        link.briefly = False
    work = mc.reshard(torch.zeros(4, 4), SEVERAL, mesh=mesh, async_op=True)
    begun = list(log)
    work.wait()
    planned = [f"{step.op} {' '.join(step.axes)}" for step in mc.plan(SEVERAL, (16, 4), mesh).steps if step.elements]
    assert begun == planned[:1]
    assert log == planned


def test_a_work_takes_the_steps_of_the_plan() -> None:
    mc.launch(steps_in_order, ranks=4)


def late() -> None:
    """Time that runs out loses nothing, in the first step and in a later one."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    x = torch.arange(16.0).view(4, 4) + 100 * mesh.rank
    expected = mc.reshard(x, SEVERAL, mesh=mesh)
    work = None
    if mesh.rank == 0:
        work = mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
        with pytest.raises(mc.CommError, match=r"reshard: not done after[\s\S]*f32\[4, 4\] over"):
            work.wait(timeout=0)
        mc.send(torch.ones(1), ("a", "b"), 3, mesh=mesh)
    elif mesh.rank == 3:
        mc.recv(("a", "b"), 0, shape=(1,), dtype=torch.float32, mesh=mesh)
    work = work or mc.reshard(x, SEVERAL, mesh=mesh, async_op=True)
    assert torch.equal(work.wait(timeout=60), expected)


def test_time_that_runs_out(run4: Run) -> None:
    """Rank 3 of four begins when rank 0 has given up once."""
    run4(late)


def dropped() -> list[str]:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mc.reshard(torch.ones(4, 4), SEVERAL, mesh=mesh, async_op=True)
        gc.collect()
    mc.all_reduce(torch.ones(1), ("a", "b"), mesh=mesh)
    return [str(each.message) for each in caught]


def test_a_work_that_is_dropped_warns_once(run4: Run) -> None:
    for messages in run4(dropped):
        (message,) = messages
        assert message.startswith("meshcomm.reshard: the Work of reshard f32[4, 4] over ")
        assert " at test_reshard.py:" in message
        assert "was dropped and never waited for" in message


def compiled_works() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    torch.compiler.reset()

    def fn(x: Tensor) -> Tensor:
        work = mc.reshard(x.sin(), SEVERAL, mesh=mesh, async_op=True)
        return work.wait().cos()

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    found = torch.compile(fn, fullgraph=True, backend="aot_eager")(x)
    assert_close(found, fn(x))
    assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(fn(x).sum(), x))


@pytest.mark.thorough
def test_works_compile(pool4: Any) -> None:
    pool4.run(compiled_works)


def nothing_to_send() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2, "one": 1})
    x = torch.randn(4, 4)
    same = mc.reshard(x, "x y -> x y", mesh=mesh, async_op=True)
    assert same.done()
    assert same.wait() is x
    assert torch.equal(mc.reshard(x, "x y -> y x", mesh=mesh, async_op=True).wait(), x.T)
    cut = mc.reshard(x, "x y -> x (a y)", mesh=mesh, async_op=True)
    assert cut.done()
    assert torch.equal(cut.wait(), x.chunk(2, 1)[mesh.coordinate["a"]])
    assert torch.equal(mc.reshard(x, "(one x) y -> x (one y)", mesh=mesh, async_op=True).wait(), x)
    assert mc.reshard(torch.ones(0, 4), SEVERAL, mesh=mesh, async_op=True).wait().shape == (0, 2)
    assert_type(mc.reshard(x, "x y -> x y", mesh=mesh, async_op=True), mc.Work[Tensor])
    assert_type(mc.reshard(x, "x y -> x y", mesh=mesh), Tensor)
    with pytest.raises(mc.MeshError, match="the sides have other dims"):
        mc.reshard(x, "x y -> x z", mesh=mesh, async_op=True)


def test_works_of_plans_that_send_nothing(run4: Run) -> None:
    run4(nothing_to_send)


# ------------------------------------------------------------------------------------------------- under the checker


@pytest.mark.parametrize("later", [False, True])
def test_types_are_those_of_the_layouts(later: bool) -> None:
    """What comes out invariant meets a part of a weight: its gradient is summed, in both ways."""
    mesh = mc.make_mesh({"a": 2, "b": 2})

    @mc.shard_map(mesh=mesh, in_specs=("(a b x) y", "y (a z)"), out_specs=("x (a y)", "x (a z)"), check_vma=True)
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        moved = mc.reshard(x.sin(), SEVERAL, async_op=True) if later else mc.reshard(x.sin(), SEVERAL)
        whole = mc.reshard(x, "(a b x) y -> x y", async_op=True) if later else mc.reshard(x, "(a b x) y -> x y")
        y, z = mc.wait((moved, whole))
        return y.cos(), z @ w

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((8, 4), (4, 6)))
    found, expected = fn(x, w), (x.sin().cos(), x @ w)
    assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum() + (z**3).sum(), (x, w)) for y, z in (found, expected)]
    assert_close(grads[0], grads[1])


def test_a_layout_that_is_not_so_is_refused() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})

    @mc.shard_map(mesh=mesh, in_specs="(b x) y", out_specs="x y")
    def fn(x: Tensor) -> Tensor:
        return mc.reshard(x, "x y -> (b x) y")

    with pytest.raises(
        mc.VaryingError, match=r"operand 0 varies along 'b', and its layout 'x y' says that it does not"
    ):
        fn(torch.ones(4, 4))


# --------------------------------------------------------------------------------------------------------- errors

WRONG: dict[str, tuple[Callable[[mc.Mesh], Any], str]] = {
    "other dims": (lambda m: mc.reshard(torch.ones(4, 4), "x y -> x z", mesh=m), "the sides have other dims: 'x', 'y'; 'x', 'z'"),
    "more dims": (lambda m: mc.reshard(torch.ones(4, 4), "x y -> x y z", mesh=m), "the sides have other dims"),
    "rank of the tensor": (lambda m: mc.reshard(torch.ones(4), "x y -> x (a y)", mesh=m), "'x y' has 2 dims, the tensor 1"),
    "not divisible": (
        lambda m: mc.reshard(torch.ones(4, 3), "(a x) y -> x (a y)", mesh=m),
        r"dim 'y' of length 3 is not divisible by a=4[\s\S]*global shape \(16, 3\)[\s\S]*pad it to 4",
    ),
    "unknown axis": (lambda m: mc.reshard(torch.ones(4, 3), "(tp x) y -> x y", mesh=m), r"'tp' is not an axis of the mesh"),
    "no arrow": (lambda m: mc.reshard(torch.ones(4, 3), "(a x) y", mesh=m), "there is no arrow"),
    "two inputs": (lambda m: mc.reshard(torch.ones(4, 3), "(a x) y, x -> x y", mesh=m), "2 layouts for 1 tensor"),
    "not a string": (lambda m: mc.reshard(torch.ones(4, 3), ("x", "y"), mesh=m), "a layout is a string, not tuple"),  # type: ignore[arg-type]
    "not a tensor": (lambda m: mc.reshard([1.0], "x -> (a x)", mesh=m), "x is not a tensor but list"),  # type: ignore[arg-type]
    "a 1 that is longer": (lambda m: mc.reshard(torch.ones(4, 2), "x 1 -> (a x) 1", mesh=m), "a dim called 1 has length 2"),
    "ellipsis on one side": (lambda m: mc.reshard(torch.ones(4, 2), "... y -> x y", mesh=m), "an ellipsis stands on one side only"),
    "plan of no shape": (lambda m: mc.plan("x -> (a x)", "x", m), "is not a shape"),  # type: ignore[arg-type]
    "plan of no dtype": (lambda m: mc.plan("x -> (a x)", (4,), m, dtype="f32"), "dtype='f32' is not a dtype"),  # type: ignore[arg-type]
}  # fmt: skip


def all_wrong() -> None:
    mesh = mc.make_mesh({"a": 4})
    for call, message in WRONG.values():
        with pytest.raises(mc.MeshError, match=message):
            call(mesh)
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4


def test_errors(run4: Run) -> None:
    run4(all_wrong)


def test_no_mesh() -> None:
    with pytest.raises(mc.MeshError, match="there is no mesh"):
        mc.reshard(torch.ones(2), "x -> x")
