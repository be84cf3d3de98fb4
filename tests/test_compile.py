"""torch.compile(fullgraph=True) on processes: the eager result and gradients on every rank. Compiling is slow: few, broad cases.

Most are compiled without generating code; test_compile_training.py has inductor's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BY_NAME, CASES, OLD, as_compiling, grid
from oracle import Oracle
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, vmap
from torch.testing import assert_close

import meshcomm as mc

F64 = torch.float64

NAMES = [
    "pvary", "all_reduce-sum", "all_reduce-mean", "all_reduce-max", "all_reduce-product", "all_gather", "all_gather-sizes",
    "all_gather_invariant-dim-1", "shard", "shard-sizes", "reduce_scatter-sum", "reduce_scatter-middle", "reduce_scatter-product",
    "reduce_scatter-sizes-max", "all_to_all-0-1", "all_to_all-sizes", "permute", "shift", "shift-no-wrap", "broadcast-last",
    "scan-sum-exclusive", "scan-product", "scan-max",
]  # fmt: skip


def close(actual: Any, expected: Any, what: str) -> None:
    assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def compiled(fn: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, dynamic=False)


def value_and_gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = fn(leaf)
    (g,) = torch.autograd.grad((y * torch.arange(1, y.numel() + 1, dtype=F64).view(y.shape).cos()).sum(), leaf)
    return y.detach(), g


def forward_and_backward(calls: list[tuple[str, Any]]) -> None:
    """Each collective over its axis, all of them in one graph."""
    mesh = mc.make_mesh(grid((2, 2)))
    oracle = Oracle(mesh.shape)
    cases = [(BY_NAME[name], axis) for name, axis in calls]
    xs = [case.inputs(oracle, axis, F64)[mesh.rank] / 3 for case, axis in cases]

    def fn(xs: list[Tensor]) -> list[Tensor]:
        return [case.call(x.sin(), axis, mesh).tanh() for x, (case, axis) in zip(xs, cases, strict=True)]

    def run(fn: Callable[[list[Tensor]], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        leaves = [x.clone().requires_grad_() for x in xs]
        ys = fn(leaves)
        total = sum((y * torch.arange(1, y.numel() + 1, dtype=F64).view(y.shape).cos()).sum() for y in ys)
        return [(y.detach(), g) for y, g in zip(ys, torch.autograd.grad(total, leaves), strict=True)]

    for (name, axis), found, expected in zip(calls, run(compiled(fn)), run(fn), strict=True):
        close(found, expected, f"{name} over {axis!r} on rank {mesh.rank}")


@pytest.mark.thorough
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_equals_eager(pool4: Any, op: str) -> None:
    """Along one axis, and the first along a tuple too."""
    names = [name for name in NAMES if BY_NAME[name].op == op]
    assert names
    pool4.run(forward_and_backward, [(name, "b") for name in names] + [(names[0], ("b", "a"))])


# --------------------------------------------------------------------------------------------------- other dtypes


def moved_dtypes() -> None:
    mesh = mc.make_mesh({"a": 2})

    def fn(flags: Tensor, small: Tensor, z: Tensor) -> list[Tensor]:
        return [
            mc.all_gather(flags, "a", mesh=mesh),
            mc.shift(small, "a", mesh=mesh),
            mc.all_reduce(small, "a", "max", mesh=mesh),
            mc.all_reduce(flags, "a", "bor", mesh=mesh),
            mc.all_reduce(z, "a", mesh=mesh),
            mc.broadcast(z, "a", 1, mesh=mesh),
            mc.all_reduce(z.real, "a", "max", mesh=mesh),
            mc.axis_index("a", mesh=mesh),
        ]

    r = mesh.rank
    inputs = torch.tensor([r == 1, r > 0]), torch.tensor([r, -r], dtype=torch.int16), torch.tensor([r + 1j, 2 - r * 1j])
    close(compiled(fn)(*inputs), fn(*inputs), f"rank {r}")


@pytest.mark.thorough
def test_other_dtypes(pool2: Any) -> None:
    pool2.run(moved_dtypes)


# ------------------------------------------------------------------------------------------------- whole programs


def trees() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})

    def fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        p = mc.pvary(params, ("a", "b"), mesh=mesh)
        hidden = mc.all_gather({"h": (x @ p["w"]).tanh(), "rest": [x]}, "b", mesh=mesh)
        return mc.all_reduce(hidden["h"].sum() * p["b"].sum() + hidden["rest"][0].mean(), ("b", "a"), "mean", mesh=mesh)

    def run(fn: Callable[..., Tensor]) -> list[Tensor]:
        params = {"w": torch.linspace(0, 1, 6, dtype=F64).view(2, 3), "b": torch.ones(3, dtype=F64)}
        for leaf in params.values():
            leaf.requires_grad_()
        loss = fn(params, torch.full((4, 2), 1.0 + mesh.rank, dtype=F64))
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in params.values())]  # type: ignore[list-item]

    close(run(compiled(fn)), run(fn), f"rank {mesh.rank}")


@pytest.mark.thorough
def test_pytrees_and_tuples(pool4: Any) -> None:
    pool4.run(trees)


def rank_dependent() -> None:
    """What differs between ranks is data in the graph: no rank's constants fold a collective away."""
    mesh = mc.make_mesh({"a": 2})

    def fn(x: Tensor) -> Tensor:
        here = mc.axis_index("a", mesh=mesh)
        masked = torch.where(here == 1, mc.shift(x * here, "a", mesh=mesh), 0)
        first = mc.broadcast(masked + x, "a", src=1, mesh=mesh)
        return mc.all_reduce(first * here, "a", "mean", mesh=mesh)

    x = torch.tensor([1.0, 2.0], dtype=F64) + mesh.rank
    close(value_and_gradient(compiled(fn), x), value_and_gradient(fn, x), f"rank {mesh.rank}")


@pytest.mark.thorough
def test_a_rank_dependent_program(pool2: Any) -> None:
    pool2.run(rank_dependent)


def stages() -> None:
    """Ranks that get nothing, and ranks that send nothing, take part in each shift all the same."""
    mesh = mc.make_mesh({"pp": 4})

    def fn(x: Tensor) -> Tensor:
        for step in range(3):
            x = mc.shift((x + step).sin(), "pp", wrap=False, mesh=mesh)
        x = mc.permute(x + mesh.axis("pp").size, "pp", [(3, 0), (0, 2)], mesh=mesh)
        return mc.all_gather(x, "pp", mesh=mesh)

    x = torch.tensor([0.5, -2.0], dtype=F64) * (1 + mesh.rank)
    close(compiled(fn)(x), fn(x), f"value on rank {mesh.rank}")
    close(value_and_gradient(compiled(fn), x), value_and_gradient(fn, x), f"gradient on rank {mesh.rank}")


@pytest.mark.thorough
def test_ranks_without_a_source(pool4: Any) -> None:
    pool4.run(stages)


def graphs() -> int:
    """The number of operations in this rank's graphs, forward and backward."""
    mesh = mc.make_mesh({"a": 4})
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    both = aot_autograd(fw_compiler=backend, bw_compiler=backend)
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        y = mc.broadcast(x * mc.axis_index("a", mesh=mesh), "a", mesh=mesh)
        return mc.all_reduce(mc.permute(y * x, "a", [(0, 3), (3, 1)], mesh=mesh), "a", "product", mesh=mesh)

    torch.compile(fn, fullgraph=True, backend=both)(torch.ones(2, dtype=F64, requires_grad=True)).sum().backward()
    return sum("_c10d_functional" in name and "wait" not in name for name in seen)


@pytest.mark.thorough
def test_ranks_have_the_same_collectives_in_their_graphs(pool4: Any) -> None:
    counts = pool4.run(graphs)
    assert len(set(counts)) == 1
    assert counts[0] >= 5


def first_call() -> None:
    """Its collectives are not run in a mode of torch's that looks for views: gloo's may end the process there."""
    mesh = mc.make_mesh({"a": 2})
    config: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "check_custom_op_aliasing"):
        return
    with config.patch(check_custom_op_aliasing=True):
        y = compiled(lambda x: mc.all_gather(x, "a", mesh=mesh))(torch.ones(2))
        assert y.tolist() == [1.0] * 4
        assert not config.check_custom_op_aliasing


def test_the_first_call_is_not_watched_on_gloo(pool2: Any) -> None:
    pool2.run(first_call)


def beside_eager() -> str:
    """Rank 0 alone compiles: on the CPU it meets nobody. What the others say when their time is up."""
    mesh = mc.make_mesh({"a": -1}, timeout=2.5)  # which has a group of its own

    def fn(x: Tensor) -> Tensor:
        return mc.all_reduce(x.sin(), "a", mesh=mesh)

    mc.barrier("a", mesh=mesh)
    said = ""
    try:
        (compiled(fn) if mesh.rank == 0 else fn)(torch.ones(3))
    except RuntimeError as error:
        said = str(error)
    mc.barrier("w", mesh=mc.make_mesh({"w": -1}))
    return said


@pytest.mark.parametrize("kind", ["pool2", "gloo4"])
def test_beside_an_eager_one(request: pytest.FixtureRequest, kind: str) -> None:
    first, *others = request.getfixturevalue(kind).run(beside_eager)
    assert first
    for said in others:
        assert "it has compiled calls over this axis" in said, said


def any_length() -> list[Any]:
    """Rank 1 has a graph for any length, the others one for each."""
    mesh = mc.make_mesh({"a": -1}, timeout=20)
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        return mc.all_reduce(x.sin(), "a", mesh=mesh).tanh()

    run = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=mesh.rank == 1)
    return [run(torch.arange(float(length))).tolist() for length in (3, 5, 30000, 30001, 4)]


@pytest.mark.parametrize("kind", ["gloo4", "guarded4"])
def test_graphs_for_any_length_meet_others(request: pytest.FixtureRequest, kind: str) -> None:
    found = request.getfixturevalue(kind).run(any_length)
    assert all(each == found[0] for each in found)


def planned_for_any_length() -> None:
    """What is planned for a shape, where rank 1 has graphs for any shape, of meshes that are new to compiled code."""
    torch._dynamo.reset()
    halves = mc.shard_map(lambda y: mc.pvary(y, "a") / 2, in_specs="b d", out_specs="b d", check_vma=False)

    def fn(x: Tensor, w: Tensor, mesh: mc.Mesh) -> tuple[Tensor, ...]:
        whole = mc.reshard(x * mc.axis_size("a", mesh=mesh), "b (a d) -> b d", mesh=mesh)
        return mc.einsum("b (a d), (a d) f -> b f", x, w, mesh=mesh), halves(whole)

    index = mc.make_mesh({"a": -1}).rank
    run = torch.compile(fn, backend="eager", fullgraph=True, dynamic=index == 1)
    for mesh in [mc.make_mesh({"a": -1}, timeout=20) for _ in range(2)]:
        for rows in (2, 5):
            x = torch.arange(rows * 3, dtype=F64).view(rows, 3) + index
            w = torch.ones(3, 4, dtype=F64) * (index + 1)
            with mc.use_mesh(mesh):
                close(run(x, w, mesh), fn(x, w, mesh), f"{rows} rows on rank {index}")


def lengths_of_graphs() -> None:
    """Lengths that a call is given, where rank 1 has graphs for any."""
    mesh = mc.make_mesh({"a": -1}, timeout=20)
    n, index = mesh.size, mesh.rank
    torch._dynamo.reset()

    def fn(x: Tensor, sizes: list[int]) -> list[Tensor]:
        whole = mc.all_gather(x * 2, "a", sizes=sizes, mesh=mesh)
        mine = mc.reduce_scatter(whole, "a", sizes=sizes, mesh=mesh)
        return [whole, mine, mc.all_to_all(whole, "a", 0, 0, sizes, [x.shape[0]] * n, mesh=mesh)]

    run = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=index == 1)
    for sizes in ([3] * n, [4, 2, 5, 3][:n], [5] * n):
        x = torch.arange(sizes[index] * 2, dtype=F64).view(-1, 2) + index
        close(run(x, sizes), fn(x, sizes), f"{sizes} on rank {index}")


def test_lengths_of_graphs_for_any_length(gloo4: Any) -> None:
    gloo4.run(lengths_of_graphs)


def test_plans_of_graphs_for_any_length(gloo4: Any) -> None:
    gloo4.run(planned_for_any_length)


def lengths_by_data() -> None:
    """Of a length that depends on data, the ranks whose graph is for one input alone know that it is small."""
    mesh = mc.make_mesh({"a": -1}, timeout=20)
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        return mc.all_reduce(x[x > 0], "a", mesh=mesh)

    x = torch.arange(-3, 5, dtype=F64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=mesh.rank == 1)
        close(run(x), x[4:] * mesh.size, f"rank {mesh.rank}")


def test_lengths_that_depend_on_data(gloo4: Any) -> None:
    gloo4.run(lengths_by_data)


def summed(backend: str, dtype: torch.dtype) -> None:
    """Small ones at once, large ones in parts, of lengths that the ranks do not divide and that no graph knows; inductor
    makes code of the large ones.
    """
    mesh = mc.make_mesh({"a": 4})

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        ops = ("mean" if backend == "inductor" else "sum", "product")  # a mean is a sum first
        sums = [mc.all_reduce(x, "a", op, mesh=mesh) for op in ops]
        return *sums, mc.reduce_scatter(x[: x.shape[0] // 4 * 4], "a", mesh=mesh)

    torch._dynamo.reset()  # what was compiled of it for another case counts towards how often it may be
    run = torch.compile(fn, fullgraph=True, backend=backend, dynamic=True)  # the length may be any
    for length in (70_001, 70_003) if backend == "inductor" else (7, 70_001, 70_003, 9):
        x = torch.randn(length, dtype=F64, generator=torch.Generator().manual_seed(mesh.rank)).to(dtype)
        for i, (y, eager) in enumerate(zip(run(x), fn(x), strict=True)):
            assert torch.equal(y, eager), f"{i} of {length} {dtype} on rank {mesh.rank}"


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "dtype"), [("aot_eager", torch.bfloat16), ("inductor", torch.float32)])
def test_sums_have_the_bits_of_eager_ones(pool4: Any, backend: str, dtype: torch.dtype) -> None:
    pool4.run(summed, backend, dtype)


# ------------------------------------------------------------------------------------------------------ transforms


def transforms() -> None:
    mesh = mc.make_mesh({"a": 2})

    def loss(x: Tensor) -> Tensor:
        return mc.all_reduce(mc.all_gather(x.sin(), "a", mesh=mesh).square().sum(), "a", "mean", mesh=mesh)

    def penalty(x: Tensor) -> Tensor:
        return grad(lambda x: mc.all_reduce(x**2, "a", mesh=mesh).tanh().sum())(x).square().sum()

    x = torch.tensor([0.3, -0.7], dtype=F64) * (1 + mesh.rank)
    batch = torch.stack([x, 2 * x, x - 1])
    for name, fn, given in (
        ("grad", grad(loss), x),
        ("vmap", vmap(lambda x: mc.reduce_scatter(x.repeat(2), "a", mesh=mesh)), batch),
        ("vmap over columns", vmap(lambda x: mc.all_gather(x, "a", mesh=mesh), in_dims=1), batch),
        ("vmap of grad", vmap(grad(loss)), batch),
        ("grad of grad", grad(penalty), x),
    ):
        close(compiled(fn)(given), fn(given), f"{name} on rank {mesh.rank}")


@pytest.mark.thorough
def test_transforms_inside_compile(pool2: Any) -> None:
    pool2.run(transforms)


def compiled_batches() -> None:
    """A collective under a transform that is outside of compile's reach: value of the batch, not of one of it."""
    mesh = mc.make_mesh({"a": 2})
    x = torch.arange(6, dtype=F64).view(3, 2) + mesh.rank
    fn = compiled(lambda x: vmap(vmap(lambda v: mc.all_reduce(v, "a", "max", mesh=mesh)))(x))
    close(fn(x), torch.arange(6, dtype=F64).view(3, 2) + 1, f"rank {mesh.rank}")


@pytest.mark.thorough
def test_nested_vmap(pool2: Any) -> None:
    pool2.run(compiled_batches)


# ------------------------------------------------------------------------------------------------------- shard_map


class Parallel(torch.nn.Module):
    """Its parameters are reached by the function of the shard_map, which closes over it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 3, dtype=F64))


def mapped(backend: str) -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    module = Parallel()

    @mc.shard_map(
        mesh=mesh if backend == "inductor" else None,
        in_specs=("(dp b) d", {"up": "d (tp f)", "down": "(tp f) d"}, None),
        out_specs=("(dp b) d", ""),
        check_vma=False,
    )
    def local(x: Tensor, weights: dict[str, Tensor], power: int = 2) -> tuple[Tensor, Tensor]:
        scale = mc.pvary(module.scale, ("dp", "tp"))
        hidden = torch.tanh((mc.pvary(x, "tp") * scale) @ mc.pvary(weights["up"], "dp"))
        y = mc.all_reduce(hidden @ mc.pvary(weights["down"], "dp"), "tp")
        return y, mc.all_reduce((y**power).sum(), "dp")

    def whole(x: Tensor, weights: dict[str, Tensor], power: int = 2) -> tuple[Tensor, Tensor]:
        y = torch.tanh((x * module.scale) @ weights["up"]) @ weights["down"]
        return y, (y**power).sum()

    def run(fn: Callable[..., Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 3), (3, 8), (8, 3)]
        x, up, down = (torch.randn(s, dtype=F64, generator=generator).requires_grad_() for s in shapes)
        y, loss = fn(x.sin(), {"up": up, "down": down}, power=3)
        leaves = [x, up, down, *module.parameters()]
        return [y, loss, *torch.autograd.grad(loss + y.cos().sum(), leaves)]

    expected = run(whole)
    within = local if backend == "inductor" else lambda *args, **more: local(*args, **more)
    with mc.use_mesh(mesh):
        close(run(local), expected, f"eager on rank {mesh.rank}")
        close(run(compiled(within, backend)), expected, f"compiled on rank {mesh.rank}")


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_shard_map(pool4: Any, backend: str) -> None:
    pool4.run(mapped, backend)


def compiled_within() -> None:
    """The other way round: what stands inside of the shard_map is compiled."""
    mesh = mc.make_mesh({"tp": 2})
    block = compiled(lambda x, w: mc.all_reduce((mc.pvary(x, "tp") @ w).tanh().sum(1), "tp"))
    fn = mc.shard_map(block, mesh=mesh, in_specs=("b d", "d (tp f)"), out_specs="b", check_vma=False)
    x = torch.linspace(-1, 1, 6, dtype=F64).view(2, 3).requires_grad_()
    w = torch.linspace(0, 2, 24, dtype=F64).view(3, 8).requires_grad_()
    found, expected = fn(x, w), (x @ w).tanh().sum(1)
    close(found, expected, f"rank {mesh.rank}")
    close(
        torch.autograd.grad(found.square().sum(), (x, w)),
        torch.autograd.grad(expected.square().sum(), (x, w)),
        f"gradients on rank {mesh.rank}",
    )


@pytest.mark.thorough
def test_compiled_within_shard_map(pool2: Any) -> None:
    pool2.run(compiled_within)


def specs_that_do_not_fit() -> None:
    mesh = mc.make_mesh({"tp": 2})
    fn = mc.shard_map(lambda x: x, mesh=mesh, in_specs="(tp b)", out_specs="(tp b)", check_vma=False)
    with pytest.raises(Exception, match=r"dim 'b' of length 5 is not divisible by tp=2"):
        compiled(fn)(torch.ones(5))
    with pytest.raises(Exception, match=r"'\(tp b\)' has 1 dim, the tensor 2"):
        compiled(fn)(torch.ones(4, 4))


@pytest.mark.thorough
def test_specs_that_do_not_fit_while_compiling(pool2: Any) -> None:
    pool2.run(specs_that_do_not_fit)


# ---------------------------------------------------------------------------------------------- meshes and in-process


def first_used_in_compile() -> None:
    """An axis, and a tuple of axes, that no eager call has set up before; and the current mesh."""
    mesh = mc.make_mesh({"x": 2, "y": 2})
    with mc.use_mesh(mesh):
        fn = compiled(lambda x: mc.all_gather(mc.all_reduce(x, "x"), ("y", "x")))
        found = fn(torch.tensor([float(mesh.rank)]))
    close(found, torch.tensor([2.0, 2.0, 4.0, 4.0]), f"rank {mesh.rank}")


@pytest.mark.thorough
def test_an_axis_first_used_in_compiled_code(pool4: Any) -> None:
    pool4.run(first_used_in_compile)


def unknown_axis() -> None:
    mesh = mc.make_mesh({"a": 4})
    with pytest.raises(Exception, match=as_compiling(r"no axis 'z' in the mesh")):
        compiled(lambda x: mc.all_reduce(x, "z", mesh=mesh))(torch.ones(2))
    with pytest.raises(Exception, match=as_compiling(r"x.shape\[0\] = 3 is not divisible by axis 'a'")):
        compiled(lambda x: mc.shard(x, "a", mesh=mesh))(torch.ones(3))


def test_errors_while_compiling(pool4: Any) -> None:
    pool4.run(unknown_axis)


def in_process(name: str) -> None:
    mesh = mc.make_mesh({"a": 2})
    calls = {
        "all_reduce": lambda x: mc.all_reduce(x, "a", mesh=mesh),
        "pvary of a tree": lambda x: mc.pvary([x], "a", mesh=mesh)[0],
    }
    with pytest.raises(
        Exception,
        match=as_compiling(r"torch.compile does not work on in-process ranks[\s\S]*run the program on processes"),
    ):
        compiled(calls[name])(torch.ones(2))
    assert mc.all_reduce(torch.ones(()), "a", mesh=mesh).item() == 2.0


@pytest.mark.skipif(OLD, reason="torch 2.11 may end the process where a thread compiles after an error in another one")
@pytest.mark.parametrize("name", ["all_reduce", "pvary of a tree"])
def test_in_process_ranks_refuse(name: str) -> None:
    mc.launch(in_process, ranks=2, args=(name,))


def test_a_mesh_of_one_compiles() -> None:
    mesh = mc.make_mesh({"a": 1})

    def fn(x: Tensor) -> Tensor:
        return mc.all_reduce(mc.all_gather(mc.shift(x, "a", mesh=mesh) * 2, "a", mesh=mesh), "a", "product", mesh=mesh)

    x = torch.tensor([1.0, 3.0], dtype=F64)
    close(value_and_gradient(compiled(fn), x), value_and_gradient(fn, x), "one rank")


COPYING: dict[str, Callable[[Tensor, mc.Mesh], Tensor]] = {  # each has its own copy, or that of an axis of one rank
    "all_reduce": lambda y, mesh: mc.all_reduce(y, "a", mesh=mesh),
    "all_to_all": lambda y, mesh: mc.all_to_all(y, "a", 0, 1, mesh=mesh),
    "shard-sizes": lambda y, mesh: mc.shard(y, "a", sizes=[4], mesh=mesh),
    "scan": lambda y, mesh: mc.scan(y, "a", mesh=mesh),
    "tie": lambda y, mesh: mc.tie(y, mesh.axis("a").index_tensor),
    "tie-more": lambda y, mesh: mc.tie(y, y.sum()),
}


@pytest.mark.thorough
def test_on_one_rank_backward_leaves_results_alone() -> None:
    """A copy of what is kept for backward, seen otherwise: inductor takes what is kept for it, and writes over it."""
    mesh = mc.make_mesh({"a": 1})

    def fn(x: Tensor, w: Tensor) -> list[tuple[Tensor, Tensor]]:
        kept = [torch.tanh((at + 1) * (x @ w)) @ w.T for at in range(len(COPYING))]
        return [(call(y, mesh).view(-1), (y**3).sum()) for y, call in zip(kept, COPYING.values(), strict=True)]

    x, w = (torch.randn(shape, dtype=F64).requires_grad_() for shape in ((4, 3), (3, 8)))
    found = compiled(fn, "inductor")(x, w)
    before = [y.detach().clone() for y, _ in found]
    loss = sum((part + y.cos().sum() for y, part in found), torch.zeros(()))
    torch.autograd.grad(loss, (x, w))
    assert [name for name, y, (now, _) in zip(COPYING, before, found, strict=True) if not y.equal(now)] == []


def tied() -> None:
    """What counts as used is so in a graph: its backward is in it."""
    mesh = mc.make_mesh({"pp": 2})

    def step(w: Tensor) -> Tensor:
        y = mc.shift(w * w, "pp", mesh=mesh)
        return mc.tie(w.sum() * 2, y, {"more": [y.sum()]})

    w = torch.ones(2, requires_grad=True)
    for run in (step, compiled(step)):
        (g,) = torch.autograd.grad(run(w), w)
        assert g.tolist() == [2.0, 2.0]


@pytest.mark.thorough
def test_tied(pool2: Any) -> None:
    pool2.run(tied)


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # of the compiler, which looks for gradients where it may not
def test_graphs_that_end_in_a_data_parallel_module() -> None:
    """What ranks of one process do together goes into no graph, and runs as it is."""

    def main() -> list[Tensor]:
        mesh = mc.make_mesh({"dp": 2})
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        mc.parallel.data_parallel(net, "dp", grads="mean", mesh=mesh)
        whole = torch.arange(12, dtype=F64).view(4, 3) / 8
        run = torch.compile(net, backend="eager") if compiled else net
        for _ in range(2):
            run(whole[2 * mesh.rank :][:2]).square().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    compiled = False
    expected = mc.launch(main, ranks=2)
    compiled = True
    assert_close(mc.launch(main, ranks=2), expected, rtol=0, atol=1e-12)
