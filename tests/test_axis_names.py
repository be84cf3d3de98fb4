"""A name for several axes is the tuple of them: whatever takes the one gives the same bits with the other."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel import checkpoint

SHAPE = {"dp": 1, "efsdp": 2, "ep": 2}
WHOLE, PARTS = "fsdp", ("efsdp", "ep")
Ways = list[Any]


def mesh4() -> mc.Mesh:
    return mc.make_mesh(SHAPE, names={WHOLE: PARTS})


def mine(mesh: mc.Mesh, *shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(100 * seed + mesh.rank)
    return torch.randn(*shape, generator=made, dtype=torch.float64)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


COLLECTIVES: dict[str, Callable[[Tensor, Any], Any]] = {
    "pvary": lambda x, a: mc.pvary(x, a),
    "all_reduce": lambda x, a: mc.all_reduce(x, a),
    "reduce_scatter": lambda x, a: mc.reduce_scatter(x, a),
    "all_gather": lambda x, a: mc.all_gather(x, a),
    "all_gather_invariant": lambda x, a: mc.all_gather_invariant(x, a),
    "shard": lambda x, a: mc.shard(x, a),
    "all_to_all": lambda x, a: mc.all_to_all(x, a, 0, 1),
    "all_to_all_ragged": lambda x, a: mc.all_to_all_ragged(x, torch.tensor([2, 2, 2, 2]), a),
    "permute": lambda x, a: mc.permute(x, a, [(0, 3), (3, 0)]),
    "shift": lambda x, a: mc.shift(x, a),
    "broadcast": lambda x, a: mc.broadcast(x, a, 2),
    "scan": lambda x, a: mc.scan(x, a),
    "reduce": lambda x, a: mc.reduce(x, a, 1),
    "gather": lambda x, a: mc.gather(x, a, 1),
    "scatter": lambda x, a: mc.scatter(x if mc.axis_index(a) == 1 else None, a, 1),
    "argmax": lambda x, a: mc.argmax(x, a),
    "axis_index": lambda x, a: mc.axis_index(a),
    "axis_size": lambda x, a: mc.axis_size(a),
    "barrier": lambda x, a: mc.barrier(a),
    "exchange": lambda x, a: mc.exchange([(x, (int(mc.axis_index(a)) + 1) % 4)],
                                         [((int(mc.axis_index(a)) - 1) % 4, x.shape, x.dtype)], a),
    "objects": lambda x, a: mc.all_gather_object(x.sum().item(), a),
    "broadcast_object": lambda x, a: mc.broadcast_object(x.sum().item(), a, 3),
    "weighted_mean": lambda x, a: mc.weighted_mean(x, 2, a),
    "with another": lambda x, a: mc.all_gather(x, ("dp", *a) if isinstance(a, tuple) else ("dp", a)),
    "sync_batch_norm": lambda x, a: parallel.SyncBatchNorm(4, a).double()(x),
    "context_attention": lambda x, a: parallel.context_attention(*x.view(3, 1, 1, 2, 4)[:, ..., :2].unbind(), axis=a)
    if x.numel() == 24 else parallel.context_attention(*(x.view(1, 1, 8, 4),) * 3, axis=a),
    "experts": lambda x, a: parallel.experts(x, torch.arange(8)[:, None], torch.ones(8, 1).double(),
                                             lambda rows, counts: 2 * rows, axis=a, count=8),
    "async": lambda x, a: mc.all_gather(x, a, async_op=True).wait(),
}  # fmt: skip


def collectives(name: str) -> bool:
    mesh = mesh4()
    with mc.use_mesh(mesh):
        given = mine(mesh, 8, 4)
        if name in ("pvary", "all_gather_invariant", "shard", "scatter") and name != "all_gather_invariant":
            given = torch.ones(8, 4, dtype=torch.float64)
        found = []
        for axis in (WHOLE, PARTS):
            x = given.clone().requires_grad_(name not in ("reduce", "gather", "scatter", "argmax", "exchange"))
            y = COLLECTIVES[name](x, axis)
            gradient = None
            first = y[0] if isinstance(y, tuple) else y
            if isinstance(first, Tensor) and first.requires_grad:
                (gradient,) = torch.autograd.grad((first * first.detach().cos()).sum(), x)
            found.append((y, gradient))
        return same(*found)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_over_the_name_is_one_over_the_tuple(run4: Callable[..., list[Any]], name: str) -> None:
    assert run4(collectives, name) == [True] * 4


LAYOUTS = [
    "({} b) s -> b ({} s)", "({} b) s -> b s", "b s -> ({} b) s", "(dp {} b) s -> b (dp {} s)",
    "({} b) s -> (ep b) (efsdp s)", "(ep efsdp b) s -> ({} b) s",
]  # fmt: skip


def layouts(text: str) -> bool:
    mesh = mesh4()
    x = mine(mesh, 8, 8) if "(" in text.split("->")[0] else torch.ones(8, 8, dtype=torch.float64)
    found = []
    with mc.use_mesh(mesh):
        for name in (WHOLE, " ".join(PARTS)):
            leaf = x.clone().requires_grad_()
            how = text.replace("{}", name)
            y = mc.reshard(leaf, how)
            later = mc.reshard(x, how, async_op=True).wait()
            z = mc.einsum(f"({name} b) d, d f -> ({name} b) f", x, torch.ones(8, 2, dtype=torch.float64))
            w = mc.einsum(f"b ({name} d), ({name} d) f -> b f", x, x)
            with mc.rng(f"({name} b) d", seed=1):
                drawn = torch.rand(2, 3)
            (gradient,) = torch.autograd.grad((y * y.detach().sin()).sum(), leaf)
            sizes = mc.local_shape(f"({name} b)", (8,)), mc.global_shape(f"({name} b)", (2,)), mc.placements(
                f"({name} b)")  # fmt: skip
            moved = mc.plan(how, (32, 32)), mc.partition_spec(f"({name} b)"), mc.layout_of((tuple(name.split()),), "b")
            found.append((y, later, z, w, drawn, gradient, *sizes, moved[0].steps, *moved[1:]))
            moved[0].picture()
    return same(*found)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_with_the_name_is_one_with_its_axes(run4: Callable[..., list[Any]], text: str) -> None:
    assert run4(layouts, text) == [True] * 4


def shard_mapped(check: Any) -> bool:
    mesh = mesh4()
    x = torch.arange(32.0, dtype=torch.float64).view(8, 4)
    found = []
    for name in (WHOLE, PARTS):
        text = name if isinstance(name, str) else " ".join(name)

        def fn(x: Tensor, w: Tensor, name: Any = name) -> tuple[Tensor, Tensor]:
            w = mc.pvary(w, name)
            y = x @ w
            assert set(mc.varying_axes(y)) == set(PARTS) if check is not False else True
            if check is not False:
                mc.assert_varying(y, name)
            return y, mc.all_reduce(y.square().sum(), name)

        run = mc.shard_map(fn, mesh=mesh, in_specs=(f"({text} b) d", "d f"), out_specs=(f"({text} b) f", ""),
                           check_vma=check)  # fmt: skip
        leaf, w = x.clone().requires_grad_(), torch.ones(4, 2, dtype=torch.float64).requires_grad_()
        y, total = run(leaf, w)
        found.append((y, total, torch.autograd.grad(total + y.sum(), (leaf, w))))
    return same(*found)


@pytest.mark.parametrize("check", [True, "error", False])
def test_specs_of_shard_map(run4: Callable[..., list[Any]], check: Any) -> None:
    assert run4(shard_mapped, check) == [True] * 4


def test_shard_map_of_one_controller() -> None:
    mesh = mesh4()
    x = torch.arange(8.0)
    for _ in range(2):  # the axes are kept from one run to the next
        y = mc.shard_map(lambda x: mc.all_gather(x, ("dp", WHOLE)) + mc.all_reduce(x.sum(), WHOLE), mesh=mesh,
                         in_specs=f"({WHOLE} b)", out_specs=f"(dp {WHOLE} b)")(x)  # fmt: skip
        assert torch.equal(y, (x + 28).repeat(4))


def declared() -> None:
    mesh = mesh4()
    early = mc.mark_varying(torch.ones(3), WHOLE)  # before there is a mesh
    with mc.use_mesh(mesh):
        late = mc.mark_varying(torch.ones(3), WHOLE)
        assert set(mc.varying_axes(early)) == set(mc.varying_axes(late)) == set(PARTS)
        with mc.check_vma("error"):
            for x in (early, late):
                assert set(mc.varying_axes(x + x)) == set(PARTS)
                mc.assert_varying(x, PARTS)
                mc.assert_varying(mc.all_reduce(x, "ep"), "efsdp")
                mc.assert_varying(mc.all_reduce(x, WHOLE), ())
        mc.assert_invariant(torch.ones(2), WHOLE)
        with mc.fork_rng(WHOLE, seed=3):
            one = torch.rand(2)
        with mc.fork_rng(PARTS, seed=3):
            assert torch.equal(one, torch.rand(2))
        with mc.fork_rng((), seed=3):
            mc.assert_invariant(torch.rand(2), WHOLE)


def test_the_checker_knows_the_axes_alone(run4: Callable[..., list[Any]]) -> None:
    run4(declared)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def adapted(kind: str, axis: Any) -> nn.Module:
    model: nn.Module = small()
    if kind == "fully_shard":
        return parallel.fully_shard(model, axis, grads="mean")
    if kind == "replicas":
        return parallel.fully_shard(model, "dp", replica_axis=axis, grads="mean", mean_over=("dp", *axis)
                                    if isinstance(axis, tuple) else ("dp", axis))  # fmt: skip
    if kind == "tensor_parallel":
        return parallel.tensor_parallel(model, {"0": "column", "2": "row"}, axis=axis)
    return parallel.data_parallel(model, axis, grads="mean")


def trained(kind: str, folder: str) -> bool:
    mesh = mesh4()
    x = torch.ones(3, 8, dtype=torch.float64) if kind == "tensor_parallel" else mine(mesh, 3, 8)
    found, models = [], []
    with mc.use_mesh(mesh):
        for axis in (WHOLE, PARTS):
            model = adapted(kind, axis)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model(x).square().mean().backward()  # what is sent once
            optimizer.zero_grad()
            with mc.trace() as t:
                model(x).square().mean().backward()
                norm = parallel.clip_grad_norm(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.append(
                (model(x), norm, sorted(t.summary().split(", ")), [p.detach().clone() for p in model.parameters()])
            )
            models.append((model, optimizer))
        for (source, its), (target, other) in (models, models[::-1]):
            checkpoint.save(folder, source, its)
            with torch.no_grad():
                for p in target.parameters():
                    p.zero_()
            checkpoint.load(folder, target, other)
            found.append(([p.detach().clone() for p in target.parameters()],))
    return same(found[0], found[1]) and same(found[2], found[3]) and same(found[2][0], found[0][3])


@pytest.mark.parametrize("kind", ["fully_shard", "replicas", "tensor_parallel", "data_parallel"])
def test_adaptors_and_their_checkpoints(run4: Callable[..., list[Any]], kind: str, tmp_path: Path) -> None:
    assert run4(trained, kind, str(tmp_path / "c")) == [True] * 4


def by_axes() -> tuple[str, ...]:
    mesh = mc.make_mesh({"fsdp": 4}).split("fsdp", efsdp=2, ep=2)
    model = parallel.parallelize(small(), mesh, grads="sum")
    other = parallel.parallelize(small(), mesh4(), grads="sum", axes={WHOLE: "data"})
    return (*parallel.parallel_calls(model), *parallel.parallel_calls(other))


def test_parallelize_knows_the_parts_by_the_name() -> None:
    one, two = mc.launch(by_axes, ranks=4)[0]
    assert "('efsdp', 'ep')" in one
    assert one.startswith("fully_shard")
    assert two.startswith("data_parallel")
    assert "('dp', 'efsdp', 'ep')" in two


def counted(folder: str) -> None:
    mesh = mesh4()
    x = torch.ones(4)
    with mc.use_mesh(mesh), mc.trace() as t:
        mc.all_reduce(x, WHOLE)
        mc.all_reduce(x, PARTS)
        mc.all_reduce(x, ("dp", WHOLE))
        mc.all_reduce(x, "ep")
    assert list(t.totals()) == [PARTS, ("dp", *PARTS), "ep"]
    t.save(f"{folder}/{mesh.rank}.json")
    for one in (t, mc.Trace.merge([t]), mc.Trace.merge([f"{folder}/{mesh.rank}.json"]), pickle.loads(pickle.dumps(t))):
        assert one.count("all_reduce", WHOLE) == one.count("all_reduce", PARTS) == 2
        assert one.count("all_reduce", ("dp", WHOLE)) == 1
    with mc.use_mesh(mesh):
        for axis in (WHOLE, PARTS):
            with mc.comm_budget({axis: "1 all_reduce"}):
                mc.all_reduce(x, WHOLE)
            with pytest.raises(AssertionError, match="efsdp,ep: 1 all_reduce"), mc.comm_budget({axis: "nothing"}):
                mc.all_reduce(x, WHOLE)
        with pytest.raises(AssertionError, match="ep: 1 all_reduce"), mc.comm_budget(fsdp="1 all_reduce"):
            mc.all_reduce(x, "ep")
        with pytest.raises(mc.MeshError, match="one axis"), mc.comm_budget({WHOLE: "nothing", PARTS: "nothing"}):
            mc.all_reduce(x, WHOLE)


def test_traces_and_budgets_list_the_axes(run4: Callable[..., list[Any]], tmp_path: Path) -> None:
    run4(counted, str(tmp_path))


def views() -> None:
    coarse = mc.make_mesh({"fsdp": 4}, timeout=60)
    fine, again = coarse.split("fsdp", efsdp=2, ep=-1), coarse.split("fsdp", efsdp=2, ep=2)
    assert (fine.shape, fine.ranks, fine.timeout) == ({"efsdp": 2, "ep": 2}, coarse.ranks, coarse.timeout)
    assert fine.coordinate == {"efsdp": fine.rank // 2, "ep": fine.rank % 2}
    assert list(fine.coordinate) == list(fine.axis_names) == ["efsdp", "ep"]
    assert fine.axis("fsdp") is fine.axis(("efsdp", "ep"))
    assert fine.size_of("fsdp") == 4
    x = torch.tensor([float(coarse.rank)])
    later = [mc.all_gather(x + i, "fsdp", mesh=mesh, async_op=True) for i, mesh in enumerate((coarse, fine, again))]
    order = [later[i] for i in ((2, 0, 1) if coarse.rank % 2 else (0, 1, 2))]
    for work in order:
        work.wait()
    for i, work in enumerate(later):
        assert work.wait().tolist() == [0.0 + i, 1 + i, 2 + i, 3 + i]
    if coarse.rank % 2:  # each has its own sequence of calls
        mc.wait(
            [
                w := mc.all_reduce(x, "fsdp", mesh=fine, async_op=True),
                v := mc.all_reduce(x, "fsdp", mesh=again, async_op=True),
            ]
        )
    else:
        mc.wait(
            [
                v := mc.all_reduce(x, "fsdp", mesh=again, async_op=True),
                w := mc.all_reduce(x, "fsdp", mesh=fine, async_op=True),
            ]
        )
    assert w.wait().item() == v.wait().item() == 6


def test_a_split_mesh_has_its_own_sequence_of_calls(run4: Callable[..., list[Any]]) -> None:
    run4(views)


def with_torch() -> None:
    mesh = mesh4()
    theirs = mesh.device_mesh
    assert theirs.mesh_dim_names == ("dp", "efsdp", "ep")
    back = mc.Mesh.from_device_mesh(theirs, names={WHOLE: PARTS})
    assert back.shape == mesh.shape
    assert back.names == mesh.names
    assert mc.all_reduce(torch.ones(1), WHOLE, mesh=back).item() == 4
    placed = mc.to_dtensor(torch.ones(2, 2), f"({WHOLE} b) s", mesh)
    assert placed.shape == (8, 2)
    assert mc.from_dtensor(placed, "b s", mesh)[1] == "(efsdp ep b) s"
    with pytest.raises(mc.MeshError, match="neighbours"):
        mc.Mesh.from_device_mesh(theirs, names={WHOLE: ("dp", "ep")})


def test_torchs_mesh_has_the_axes(pool4: Any) -> None:
    pool4.run(with_torch)


def compiled() -> bool:
    mesh = mesh4()
    found = []
    for axis in (WHOLE, PARTS):
        text = axis if isinstance(axis, str) else " ".join(axis)

        def fn(x: Tensor, axis: Any = axis, text: str = text) -> Tensor:
            y = mc.all_reduce(x, axis, mesh=mesh)
            y = mc.reshard(y, f"b s -> b ({text} s)", mesh=mesh)
            return mc.einsum(f"b ({text} s) -> b", y, mesh=mesh)

        x = mine(mesh, 2, 4)
        found.append((fn(x), torch.compile(fn, backend="aot_eager", fullgraph=True)(x)))
    return same(*found) and same(*found[0])


@pytest.mark.thorough
def test_it_compiles(pool4: Any) -> None:
    assert pool4.run(compiled) == [True] * 4


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: mc.make_mesh({"a": 2, "b": 2}, names={"x": ("a", "c")}), "'c', which is no axis"),
    "an axis's": (lambda: mc.make_mesh({"a": 2, "b": 2}, names={"a": ("a", "b")}), "'a' is an axis already"),
    "overlapping": (lambda: mc.make_mesh({"a": 2, "b": 2, "c": 1}, names={"x": ("a", "b"), "y": ("b", "c")}),
                    "axis 'b' is in 'x' and 'y'"),
    "twice": (lambda: mc.make_mesh({"a": 2, "b": 2}, names={"x": ("a", "a")}), "axis 'a' is in 'x' twice"),
    "apart": (lambda: mc.make_mesh({"a": 2, "b": 2, "c": 1}, names={"x": ("a", "c")}), "not neighbours"),
    "minor first": (lambda: mc.make_mesh({"a": 2, "b": 2}, names={"x": ("b", "a")}), r"\('a', 'b'\)"),
    "a string": (lambda: mc.make_mesh({"a": 2}, names={"x": "a"}), "no tuple"),  # type: ignore[dict-item]
    "none": (lambda: mc.make_mesh({"a": 2}, names={"x": ()}), "no tuple"),
    "an int": (lambda: mc.make_mesh({"a": 2}, names={"x": (0,)}), "no axis"),  # type: ignore[dict-item]
    "a list": (lambda: mc.make_mesh({"a": 2}, names=["x"]), "no mapping"),  # type: ignore[arg-type]
    "false": (lambda: mc.make_mesh({"a": 2}, names=0), "no mapping"),  # type: ignore[arg-type]
    "no identifier": (lambda: mc.make_mesh({"a": 2}, names={"x y": ("a",)}), "identifier"),
    "split: size": (lambda: mc.make_mesh({"a": 8}).split("a", b=2, c=3), "do not multiply to 8"),
    "split: rest": (lambda: mc.make_mesh({"a": 8}).split("a", b=3, c=-1), "do not multiply to 8"),
    "split: two": (lambda: mc.make_mesh({"a": 8}).split("a", b=-1, c=-1), "more than one"),
    "split: zero": (lambda: mc.make_mesh({"a": 8}).split("a", b=0, c=-1), "size 0"),
    "split: none": (lambda: mc.make_mesh({"a": 8}).split("a"), "mapping"),
    "split: unknown": (lambda: mc.make_mesh({"a": 8}).split("q", b=8), "no axis 'q'"),
    "split: a list": (lambda: mc.make_mesh({"a": 8}).split(["a"], b=8), "no axis"),  # type: ignore[arg-type]
    "split: itself": (lambda: mc.make_mesh({"a": 8}).split("a", a=2, c=4), "the name 'a' already"),
    "split: taken": (lambda: mc.make_mesh({"a": 8, "b": 1}).split("a", b=2, c=4), "the name 'b' already"),
    "split: again": (lambda: mc.make_mesh({"a": 8}).split("a", b=2, c=4).split("c", d=2, e=2), "a part of 'a'"),
    "split: a name": (lambda: mc.make_mesh({"a": 8}).split("a", b=2, c=4).split("a", d=2, e=4), "several axes"),
    "layout: both": (lambda: mc.local_shape("(fsdp b) (ep s)", (8, 8), mesh4()), "'ep' is used twice"),
    "layout: both, part first": (lambda: mc.local_shape("(ep b) (fsdp s)", (8, 8), mesh4()), "'ep' is used twice"),
    "layout: a dim": (lambda: mc.local_shape("fsdp s", (8, 8), mesh4()), "is a mesh axis and stands as a dim"),
    "layout: last": (lambda: mc.local_shape("(dp fsdp)", (8,), mesh4()), "is a mesh axis"),
    "layout: length": (lambda: mc.local_shape("(fsdp b) s", (6, 8), mesh4()), "not divisible"),
    "spec: both": (lambda: mc.layout_of(("fsdp", "ep"), "b s", mesh4()), "'ep' stands twice"),
    "spec: unknown": (lambda: mc.layout_of((("q",),), "b", mesh4()), "no axis 'q'"),
    "axis: both": (lambda: mesh4().size_of(("fsdp", "ep")), "named twice"),
    "axis: unknown": (lambda: mesh4().size_of("fsd"), "'fsdp'"),
    "axes: both": (lambda: mc.launch(lambda: parallel.parallelize(
        small(), mesh4(), grads="sum", axes={"fsdp": "fsdp", "ep": "data"}), ranks=4), "'ep' is a part of 'fsdp'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(mc.MeshError, match=said):
        call()


def test_a_name_is_of_its_mesh_alone() -> None:
    """The same string on meshes that are equal but for their names."""
    plain, named = mc.make_mesh(SHAPE), mesh4()
    other = mc.make_mesh(SHAPE, names={WHOLE: ("dp", "efsdp")})
    for _ in range(2):  # nothing is remembered for another mesh
        assert mc.local_shape(f"({WHOLE} b)", (8,), named) == (2,)
        assert mc.local_shape(f"({WHOLE} b)", (8,), other) == (4,)
        with pytest.raises(mc.MeshError, match="not an axis"):
            mc.local_shape(f"({WHOLE} b)", (8,), plain)

    def moved(mesh: mc.Mesh) -> tuple[int, ...]:
        return tuple(mc.reshard(torch.ones(8), f"b -> ({WHOLE} b)", mesh=mesh).shape)

    assert mc.launch(lambda: (moved(named), moved(other), moved(named)), ranks=4) == [((2,), (4,), (2,))] * 4


def test_it_is_printed_and_copied() -> None:
    mesh = mesh4()
    assert repr(mesh) == "Mesh({'dp': 1, 'efsdp': 2, 'ep': 2}, names={'fsdp': ('efsdp', 'ep')})"
    assert mesh.names == {WHOLE: PARTS}
    assert mc.make_mesh(SHAPE).names == {}
    assert mesh.shape == SHAPE
    assert pickle.loads(pickle.dumps(mesh.shape)) == SHAPE
    plan = mc.plan(f"({WHOLE} b) s -> b s", (8, 8), mesh)
    assert copy.deepcopy(plan) == plan
    assert "efsdp" in str(plan)
    mc.show(f"({WHOLE} b) s", (8, 8), mesh)
    with contextlib.suppress(KeyError):
        mesh.shape[WHOLE]
        raise AssertionError("a name for several is no axis of the shape")


def test_one_rank() -> None:
    mesh = mc.make_mesh({"fsdp": 1}).split("fsdp", efsdp=1, ep=-1)
    assert mc.all_reduce(torch.ones(2), "fsdp", mesh=mesh).tolist() == [1, 1]
