"""einsum on layouts against torch.einsum of the global tensors in float64, values and gradients, and what is sent for it."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

Run = Callable[..., list[Any]]
LENGTHS = {"b": 4, "s": 8, "d": 8, "f": 16, "h": 4, "k": 8, "m": 8, "n": 8, "e": 4, "v": 16}


def dims_of(side: str) -> list[tuple[tuple[str, ...], str]]:
    """Axes and name of each dim, read here once more."""
    found = []
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group: list[str] | None = []
        elif word == ")":
            assert group
            found.append((tuple(group[:-1]), group[-1]))
            group = None
        elif "group" in locals() and group is not None:
            group.append(word)
        else:
            found.append(((), word))
    return found


def part(x: Tensor, side: str, mesh: mc.Mesh) -> Tensor:
    shape, place = mesh.shape, mesh.coordinate
    for dim, (axes, _) in enumerate(dims_of(side)):
        for axis in axes:
            x = x.chunk(shape[axis], dim)[place[axis]]
    return x.clone(memory_format=torch.contiguous_format)


def plain(spec: str) -> str:
    """torch's own way to write it."""
    left, right = spec.split("->")
    return (
        ",".join("".join(name for _, name in dims_of(side)) for side in left.split(","))
        + "->"
        + "".join(name for _, name in dims_of(right))
    )


def drawn(side: str, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [1 if name == "1" else LENGTHS[name] for _, name in dims_of(side)]
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def listener(log: list[str], name: str, listen: Callable[..., None]) -> Callable[..., None]:
    def announce(note: Any) -> None:
        if note.what not in ("pvary", "shard"):
            log.append(f"{note.what} {name}")
        listen(note)

    return announce


@contextlib.contextmanager
def logged(mesh: mc.Mesh) -> Iterator[list[str]]:
    """What the in-process links are told, with the axes; not what communicates nothing."""
    log: list[str] = []
    links = {}
    for name in mesh.axis_names:
        link = mesh.axis(name).link
        if mesh.axis(name).size > 1:
            links[name] = link, link.announce
            link.announce = listener(log, name, link.announce)  # type: ignore[method-assign]
            link.briefly = False
    try:
        yield log
    finally:
        for link, before in links.values():
            link.announce, link.briefly = before, True  # type: ignore[method-assign]


def against_torch(
    spec: str, mesh: mc.Mesh, dtype: torch.dtype = torch.float64, ring: bool | None = False
) -> tuple[list[str], list[str]]:
    """Value and gradients; gives the collectives forwards and backwards (in-process)."""
    left, right = spec.split("->")
    sides = left.split(",")
    wholes = [drawn(side, seed, dtype).requires_grad_() for seed, side in enumerate(sides)]
    expected = torch.einsum(plain(spec), *wholes)
    g = drawn(right, 99, dtype)
    wanted = torch.autograd.grad(expected, wholes, g)
    mine = [part(x.detach(), side, mesh).requires_grad_() for x, side in zip(wholes, sides, strict=True)]
    with logged(mesh) as forward:
        y = mc.einsum(spec, *mine, mesh=mesh, ring=ring)
    assert_close(y, part(expected.detach(), right, mesh), msg=lambda text: f"{spec}: {text}")
    with logged(mesh) as backward:
        found = torch.autograd.grad(y, mine, part(g, right, mesh))
    for number, (a, b, side) in enumerate(zip(found, wanted, sides, strict=True)):
        assert_close(a, part(b, side, mesh), msg=lambda text, n=number: f"{spec}, gradient of operand {n}: {text}")
    return forward, backward


MEGATRON: dict[str, tuple[list[str], list[str]]] = {
    # Column parallel: f is the identity forwards and an all_reduce backwards.
    "b s d, d (tp f) -> b s (tp f)": ([], ["all_reduce tp"]),
    # Row parallel: g is an all_reduce forwards and the identity backwards.
    "b s (tp f), (tp f) d -> b s d": (["all_reduce tp"], []),
    # The same with sequence parallelism: g-bar and its inverse.
    "b (tp s) d, d (tp f) -> b s (tp f)": (["all_gather tp"], ["reduce_scatter tp"]),
    "b s (tp f), (tp f) d -> b (tp s) d": (["reduce_scatter tp"], ["all_gather tp"]),
    # Vocabulary parallel logits, and data parallelism: each sums the gradient of what is replicated.
    "(dp b) s d, (tp v) d -> (dp b) s (tp v)": ([], ["all_reduce tp", "all_reduce dp"]),
    "(dp b) s d, d f -> (dp b) s f": ([], ["all_reduce dp"]),
    "(dp b) s (tp f), (tp f) d -> (dp b) s d": (["all_reduce tp"], ["all_reduce dp"]),
    # Weights cut over dp are gathered and their gradients scattered: fully sharded data parallelism.
    "(dp b) s d, (dp d) f -> (dp b) s f": (["all_gather dp"], ["reduce_scatter dp"]),
}


def megatron() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    for spec, (forward, backward) in MEGATRON.items():
        found = against_torch(spec, mesh)
        assert (found[0], sorted(found[1])) == (forward, sorted(backward)), spec


def test_the_collectives_are_those_that_megatron_issues() -> None:
    mc.launch(megatron, ranks=4)


MORE = [
    "(dp m) (tp k), (dp k) (tp n) -> (dp m) (tp n)",
    "m (dp tp k), (dp tp k) n -> m n",
    "m (dp tp k), (tp dp k) n -> m n",
    "m (dp tp k), (dp tp k) n -> (dp tp m) n",
    "m (dp tp k), (dp tp k) n -> (tp dp m) n",
    "m (dp tp k), (dp tp k) n -> (dp m) (tp n)",
    "m (dp k), k (dp n) -> (dp m) n",
    "m (tp k), k n -> m n",
    "m k, k n -> (tp m) n",
    "m k, k n -> (tp m) (dp n)",
    "(tp m) k, (tp n) k -> m n",
    "(tp m) k, (tp n) k -> (tp m) n",
    "b s h d, b k h d -> b h s k",
    "(dp b) s (tp h) d, (dp b) k (tp h) d -> (dp b) (tp h) s k",
    "(dp b) (tp h) s k, (dp b) k (tp h) d -> (dp b) s (tp h) d",
    "b (tp s) h d, b k h d -> b h (tp s) k",
    "(tp e) m, (tp e) m k -> (tp e) k",
    "m (tp k), m (tp k) -> ",
    "(tp m), (dp n) -> (tp m) (dp n)",
    "(tp m) k -> m",
    "(tp m) k -> k",
    "(tp m) k -> (tp k)",
    "(dp tp m) k -> (tp k)",
    "(dp m) k -> k (dp m)",
    "(tp m) k, n -> k n",
    "(tp m) k, n -> (tp k) n",
    "(tp m) k, (tp n) -> k n",
    "m (tp k), (tp k) n, n (dp b) -> m (dp b)",
    "m k, n -> ",
    " , m -> m",
    "(tp m), -> m",
]


def more(dtype: torch.dtype) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    for spec in [*MORE, *MEGATRON]:
        against_torch(spec, mesh, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_values_and_gradients(dtype: torch.dtype) -> None:
    """Of complex numbers the gradient is conjugated."""
    mc.launch(more, ranks=4, args=(dtype,))


RINGS: dict[str, tuple[list[str], list[str]]] = {
    "b (tp s) d, d (tp f) -> b s (tp f)": (["shift tp"] * 3, ["shift tp"] * 3),
    "b s (tp f), (tp f) d -> b (tp s) d": (["shift tp"] * 3, ["shift tp"] * 3),
    "b (tp d), d (tp f) -> b (tp f)": (["shift tp"] * 3, ["shift tp"] * 3),
    "(tp m) k, k (tp n) -> m (tp n)": (["shift tp"] * 3, ["shift tp"] * 3),
    # Nothing to take apart: the same as without.
    "b s d, d (tp f) -> b s (tp f)": ([], ["all_reduce tp"]),
    "b s (tp f), (tp f) d -> b s d": (["all_reduce tp"], []),
}


def rings() -> None:
    mesh = mc.make_mesh({"tp": 4})
    for spec, expected in RINGS.items():
        assert against_torch(spec, mesh, ring=True) == expected, spec


def test_round_a_ring() -> None:
    """Pieces go round while others are multiplied: the values and gradients are those of the collective."""
    mc.launch(rings, ranks=4)


def every_ring() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    for spec in [*MORE, *MEGATRON]:
        against_torch(spec, mesh, ring=True)


def test_a_ring_wherever_it_may_be_asked_for() -> None:
    mc.launch(every_ring, ranks=4)


AUTOMATIC = "b (tp s) d, d (tp f) -> b s (tp f)", "b s (tp f), (tp f) d -> b (tp s) d"


def limits(least: int, work: int) -> Any:
    """Of the pieces that go round by themselves."""
    module = importlib.import_module("meshcomm.layout.einsum")  # beside it stands the function
    return mock.patch.multiple(module, _LEAST_BYTES=least, _LEAST_WORK=work)


def chosen(beside: bool) -> list[set[str]]:
    """What a trace has of products that choose by themselves, on a transport that moves bytes ``beside`` or does not."""
    mesh, seen = mc.make_mesh({"tp": 4}), []
    mesh.axis("tp").link.moves_beside = lambda device: beside  # type: ignore[method-assign]
    for spec in AUTOMATIC:
        sides = spec.split("->")[0].split(",")
        mine = [part(drawn(side, n), side, mesh).requires_grad_() for n, side in enumerate(sides)]
        with mc.trace() as t:
            ys = [mc.einsum(spec, *mine, mesh=mesh)]
        seen.append({event.operation for event in t.events})
        ys += [mc.einsum(spec, *mine, mesh=mesh, ring=ring) for ring in (False, True)]
        first, *others = ([y.detach(), *torch.autograd.grad(y.square().sum(), mine)] for y in ys)
        for other in others:
            assert_close(other, first)
    return seen


def chosen_alone(beside: bool, least: int, work: int) -> list[set[str]]:
    with limits(least, work):
        return chosen(beside)


ONCE, ROUND = [{"all_gather"}, {"reduce_scatter"}], [{"shift"}, {"shift"}]
"""What they send."""


@pytest.mark.parametrize(
    ("beside", "least", "work", "expected"),
    [(False, 1, 1, ONCE), (True, 1, 1, ROUND), (True, 4096, 1, ONCE), (True, 1, 5, ONCE)],
    ids=["on the cores", "beside them", "small pieces", "little to do"],
)
def test_the_choice_of_a_ring(beside: bool, least: int, work: int, expected: Any, pool4: Any) -> None:
    """The same on all ranks, and values and gradients are those of the other way."""
    with limits(least, work):
        assert mc.launch(chosen, ranks=4, args=(beside,)) == [expected] * 4
    assert pool4.run(chosen_alone, beside, least, work) == [expected] * 4


def on_processes() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    for spec in [*MORE[::3], *MEGATRON]:
        left, right = spec.split("->")
        wholes = [drawn(side, seed) for seed, side in enumerate(left.split(","))]
        mine = [part(x, side, mesh) for x, side in zip(wholes, left.split(","), strict=True)]
        for ring in (False, True):
            y = mc.einsum(spec, *mine, mesh=mesh, ring=ring)
            assert_close(y, part(torch.einsum(plain(spec), *wholes), right, mesh))


def test_on_processes(pool4: Any) -> None:
    pool4.run(on_processes)


def random_specs(count: int, seed: int) -> list[str]:
    """Two operands and a result with any dims cut over any axes, as long as lengths divide."""
    draw, specs = random.Random(seed), []

    def write(names: list[str]) -> str:
        axes = [axis for axis in draw.sample(["dp", "tp", "ep"], 3) if draw.random() < 0.6] if names else []
        over: dict[str, list[str]] = {name: [] for name in names}
        for axis in axes:
            over[draw.choice(names)].append(axis)
        return " ".join(f"({' '.join((*over[name], name))})" if over[name] else name for name in names)

    for _ in range(count):
        a, b = (draw.sample(["m", "k", "n", "d"], draw.randint(1, 3)) for _ in range(2))
        both = list(dict.fromkeys([*a, *b]))
        out = draw.sample(both, draw.randint(0, min(3, len(both))))
        specs.append(f"{write(a)}, {write(b)} -> {write(out)}")
    return specs


def any_specs(seed: int) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2, "ep": 2})
    for spec in random_specs(30, seed):
        against_torch(spec, mesh)


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_layouts(seed: int) -> None:
    mc.launch(any_specs, ranks=8, args=(seed,))


def cheaper() -> None:
    """Few rows are gathered rather than many sums reduced."""
    mesh = mc.make_mesh({"tp": 4})
    with logged(mesh) as log:
        mc.einsum("b (tp k), k n -> b n", torch.ones(1, 2), torch.ones(8, 400), mesh=mesh)
    assert log == ["all_gather_invariant tp"]
    log.clear()
    with logged(mesh) as log:
        mc.einsum("b (tp k), k n -> b n", torch.ones(64, 200), torch.ones(800, 1), mesh=mesh)
    assert log == ["all_reduce tp"]


def test_a_gathered_operand_when_that_is_cheaper() -> None:
    mc.launch(cheaper, ranks=4)


def kinds() -> None:
    mesh = mc.make_mesh({"tp": 4})
    x, w = torch.arange(8).view(2, 4), torch.arange(8).view(4, 2)
    y = mc.einsum("b (tp k), (tp k) d -> b d", x[:, mesh.rank, None], w[mesh.rank, None], mesh=mesh)
    assert torch.equal(y, x @ w)
    z = mc.einsum("1 b 1, b d -> d 1", torch.ones(1, 4, 1), torch.ones(4, 2), mesh=mesh)
    assert z.tolist() == [[4.0], [4.0]]
    batch, weight = torch.randn(2, 3, 4), torch.randn(4, 8)
    y = mc.einsum("... d, d (tp f) -> ... (tp f)", batch, weight.chunk(4, 1)[mesh.rank], mesh=mesh)
    assert_close(y, (batch @ weight).chunk(4, -1)[mesh.rank])
    ids = torch.tensor([3, -1])
    assert mc.einsum("b, b -> ", ids, ids, mesh=mesh).item() == 10


def test_kinds_of_tensors(run4: Run) -> None:
    run4(kinds)


def transformed() -> None:
    mesh = mc.make_mesh({"tp": 4})
    w = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = w.chunk(4, 1)[mesh.rank]

    def f(x: Tensor) -> Tensor:
        return mc.all_reduce((mc.einsum("b d, d (tp f) -> b (tp f)", x, mine, mesh=mesh) ** 3).sum(), "tp", mesh=mesh)

    def whole(x: Tensor) -> Tensor:
        return ((x @ w) ** 3).sum()

    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_close(torch.func.grad(f)(x), torch.func.grad(whole)(x))
    assert_close(
        torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum())(x),
        torch.func.grad(lambda x: (torch.func.grad(whole)(x) ** 2).sum())(x),
    )
    xs = torch.stack([x, 2 * x])
    assert_close(torch.func.vmap(f)(xs), torch.stack([whole(x), whole(2 * x)]))
    assert_close(torch.func.jvp(f, (x,), (x,))[1], torch.func.jvp(whole, (x,), (x,))[1])


def test_transforms(run4: Run) -> None:
    run4(transformed)


def block(mesh: mc.Mesh, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = mc.einsum("b (tp s) d, d (tp f) -> b s (tp f)", x, a, mesh=mesh).relu()
    y = mc.einsum("b s (tp f), (tp f) d -> b (tp s) d", h, b, mesh=mesh)
    return mc.reshard(y, "b (tp s) d -> b s (tp d)", mesh=mesh)


def compiled() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(mesh.coordinate["tp"])
    shapes = [(2, 4, 4), (4, 8), (8, 4)]
    args = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    found = []
    for f in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = f(mesh, *args)
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    assert_close(found[1], found[0])


@pytest.mark.thorough
def test_compiled(pool4: Any) -> None:
    """The plan is made while tracing; the graph is one."""
    pool4.run(compiled)


WRONG: dict[str, tuple[Callable[[mc.Mesh], Any], str]] = {
    "operands": (lambda m: mc.einsum("b d, d f -> b f", torch.ones(2, 2), mesh=m), r"2 layouts for 1 tensor"),
    "lengths": (
        lambda m: mc.einsum("b (tp d), (tp d) f -> b f", torch.ones(2, 2), torch.ones(3, 2), mesh=m),
        r"dim 'd' has length 8 in operand 0, 12 in operand 1",
    ),
    "result": (lambda m: mc.einsum("b d, d f -> b g", torch.ones(2, 2), torch.ones(2, 2), mesh=m), r"'g' of the result stands in no operand"),
    "repeated": (lambda m: mc.einsum("b b -> b", torch.ones(2, 2), mesh=m), r"'b' stands twice"),
    "not divisible": (
        lambda m: mc.einsum("b d, d f -> b (tp f)", torch.ones(2, 2), torch.ones(2, 6), mesh=m), r"'f' of length 6 is not divisible by tp"
    ),
    "dtypes": (lambda m: mc.einsum("b d, d f -> b f", torch.ones(2, 2), torch.ones(2, 2).double(), mesh=m), "operands of different dtypes"),
    "dims": (lambda m: mc.einsum("b d, d f -> b f", torch.ones(2), torch.ones(2, 2), mesh=m), "'b d' has 2 dims, the tensor 1"),
    "no tensor": (lambda m: mc.einsum("b d, d f -> b f", torch.ones(2, 2), 3.0, mesh=m), "operand 1 is not a tensor but float"),  # type: ignore[arg-type]
    "no string": (lambda m: mc.einsum(torch.ones(2), torch.ones(2), mesh=m), "a layout is a string, not Tensor"),  # type: ignore[arg-type]
    "ring": (lambda m: mc.einsum("m -> m", torch.ones(2), mesh=m, ring=1), "ring=1 is neither True nor False"),  # type: ignore[arg-type]
    "ellipsis": (lambda m: mc.einsum("... d -> d", torch.ones(2, 2), mesh=m), "an ellipsis of an operand is not in the result"),
}  # fmt: skip


def all_wrong() -> None:
    mesh = mc.make_mesh({"tp": 4})
    for call, message in WRONG.values():
        with pytest.raises(mc.MeshError, match=message):
            call(mesh)
    assert mc.all_reduce(torch.ones(1), "tp", mesh=mesh).item() == 4


def test_errors(run4: Run) -> None:
    run4(all_wrong)
