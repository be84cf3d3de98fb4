"""Tensors on devices that a group's backends cannot move, and accelerators that are not CUDA: found, used, gone around."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy_device

import meshcomm as mc
from meshcomm.collectives.trees import overlap
from meshcomm.objects.objects import all_gather_object
from meshcomm.parallel.fingerprints import Fingerprint, differ, fingerprint_of
from meshcomm.parallel.stand_ins import become
from meshcomm.runtime import groups
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.start import devices, world
from meshcomm.runtime.transports import detour, dtypes
from meshcomm.spmd.shard_map.assemble import _alike
from meshcomm.training.process import device

HAS_TOY = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
needs_toy = pytest.mark.skipif(not HAS_TOY, reason="this torch has no devices in Python")


def everything(mesh: mc.Mesh, where: Any) -> dict[str, Any]:
    """Every collective on tensors that lie there, and where and what their results are."""
    n, me = mesh.size, mesh.rank
    x = (torch.arange(4.0) + 10 * me).to(where)
    other = n - 1 - me
    with mc.use_mesh(mesh):
        found: dict[str, Any] = {
            "sum": mc.all_reduce(x, "a"), "max": mc.all_reduce(x, "a", "max"), "int16": mc.all_reduce(torch.ones(2, dtype=torch.int16).to(where), "a"),
            "gather": mc.all_gather(x, "a"), "invariant": mc.all_gather_invariant(x, "a"), "scatter": mc.reduce_scatter(x, "a"),
            "swap": mc.all_to_all(x, "a", 0, 0), "shift": mc.shift(x, "a"), "permute": mc.permute(x, "a", [(0, n - 1)]),
            "broadcast": mc.broadcast(x, "a", 1), "reduce": mc.reduce(x, "a", 1), "to one": mc.gather(x, "a", 1),
            "from one": mc.scatter(x if me == 0 else None, "a", like=x[: 4 // n]), "work": mc.all_reduce(x, "a", async_op=True).wait(),
            "later": mc.shift(x, "a", async_op=True).wait(), "large": mc.all_reduce(torch.ones(2**18).to(where), "a")[:1],
            "tree": mc.all_reduce({"x": x, "cpu": torch.ones(1)}, "a")["x"],
        }  # fmt: skip
        (found["message"],) = mc.exchange([(x.cpu(), other)], [(other, (4,), torch.float32)], "a")
        mc.barrier("a")
        mc.barrier("a", timeout=200)
        objects = all_gather_object({"x": x}, "a")
    out = {name: None if y is None else (y.device.type, y.cpu().tolist()) for name, y in found.items()}
    out["object"] = (objects[0]["x"].device.type, objects[1]["x"].cpu().tolist())
    assert x.cpu().tolist() == [10.0 * me + i for i in range(4)]
    return out


def rejoined(folder: str, name: str, **options: Any) -> int:
    """This process, out of its world and in a new one."""
    here = world.current()
    assert here is not None
    rank = here.rank
    world.shutdown()
    mc.init(init_method=f"file://{folder}/{name}", rank=rank, world_size=2, timeout=200, **options)
    return rank


def around(folder: str) -> list[Any]:
    """Gloo does not know the device."""
    toy_device.register(backend=False)
    rank = rejoined(folder, "gloo", backend="gloo")
    mesh = mc.make_mesh({"a": 2})
    assert mesh.device.type == "cpu"
    assert isinstance(mesh.axis("a").link, groups.DetouredOneHostLink)
    plain, odd = everything(mesh, "cpu"), everything(mesh, "toy")
    world.shutdown()
    os.environ["MESHCOMM_SHARED_MEMORY"] = "0"
    mc.init(init_method=f"file://{folder}/messages", rank=rank, world_size=2, timeout=200, backend="gloo")
    mesh = mc.make_mesh({"a": 2}, strict=True)
    assert type(mesh.axis("a").link) is detour.DetouredLink
    with pytest.raises(
        mc.MeshError,
        match=r"(?s)meshcomm.all_reduce: x is on the wrong device, toy:0.*moves tensors on .*cpu.*move it to cpu",
    ):
        mc.all_reduce(torch.ones(2).to("toy"), "a", mesh=mesh)
    again = everything(mc.make_mesh({"a": 2}), "toy")
    return [plain, odd, again]


@needs_toy
def test_around_what_the_backend_cannot_move(tmp_path: Any) -> None:
    for plain, odd, again in mc.launch(around, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=280):
        assert odd == again
        for name, value in plain.items():
            if value is None:
                assert odd[name] is None, name
                continue
            # A message arrives on the mesh's device, an object's tensors on that of the receiver.
            home = "cpu" if name in ("message", "object") else "toy"
            assert odd[name] == (home, value[1]), name


def found_by_torch(folder: str) -> list[Any]:
    """A device and a backend that torch knows of, and nobody else."""
    toy_device.register(backend=True)
    here = world.current()
    assert here is not None
    os.environ["TOY_VISIBLE_DEVICES"] = str(here.rank)  # each process has one of its own
    world.shutdown()
    assert devices.accelerator() == ("toy", "toyccl")
    assert "toyccl" in devices.backends()
    rank = here.rank
    mc.init(init_method=f"file://{folder}/toy", rank=rank, world_size=2, timeout=200)
    now = world.current()
    assert now is not None
    assert (now.backend, now.device.type) == ("cpu:gloo,toy:toyccl", "toy")
    mesh = mc.make_mesh({"a": 2})
    assert mesh.device.type == device().type == "toy"
    assert not isinstance(mesh.axis("a").link, detour.DetouredLink)
    found = everything(mesh, "toy")
    moved = set(toy_device.calls)
    assert {"allreduce toy", "_allgather_base toy", "alltoall_base toy", "broadcast toy", "reduce toy"} <= moved, moved
    return [found, everything(mesh, "cpu")]


@needs_toy
def test_an_accelerator_and_its_backend_are_found_by_torch(tmp_path: Any) -> None:
    for odd, plain in mc.launch(found_by_torch, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=280):
        for name, value in plain.items():
            if value is not None:
                home = {"message": "toy", "object": "toy"}.get(name, "toy")
                assert odd[name] == (home, value[1]), name


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        ("cpu:gloo,cuda:nccl", False),
        ("cuda:nccl", True),
        ("cpu:gloo", False),
        ("cpu:gloo,cuda:gloo", False),
        ("fake", False),
    ],
)
def test_which_groups_need_detours(config: str, lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert detour.lacks_a_way(config) == lacking
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert detour.lacks_a_way(config) == (lacking or config == "cpu:gloo")


def without_values() -> None:
    mesh = mc.make_mesh({"a": 4})
    with pytest.raises(mc.MeshError, match="x is on the wrong device, meta"):
        mc.all_reduce(torch.ones(2, device="meta"), "a", mesh=mesh)
    assert not mesh.strict


def test_tensors_without_values_go_nowhere(run4: Any) -> None:
    run4(without_values)


def test_strict_is_a_bool() -> None:
    assert mc.make_mesh({"a": 1}, strict=True).strict
    with pytest.raises(mc.MeshError, match="strict=1 is not a bool"):
        mc.make_mesh({"a": 1}, strict=1)  # type: ignore[arg-type]


def gpu_around(folder: str) -> list[Any]:
    here = world.current()
    assert here is not None
    rank = here.rank
    world.shutdown()
    mc.init(init_method=f"file://{folder}/gloo", rank=rank, world_size=2, backend="cpu:gloo", timeout=60)
    mesh, kind = mc.make_mesh({"a": 2}), torch.accelerator.current_accelerator().type
    return [everything(mesh, "cpu"), everything(mesh, kind), kind]


@pytest.mark.gpu
def test_around_on_a_real_accelerator(tmp_path: Any) -> None:
    for plain, odd, kind in mc.launch(
        gpu_around, ranks=2, args=(str(tmp_path),), runtime="processes", backend="gloo", timeout=280
    ):
        for name, value in plain.items():
            if value is not None:
                assert odd[name] == ("cpu" if name in ("message", "object") else kind, value[1]), name


# ------------------------------------------------------------------------------------------------ the default device

FACTORIES = (
    "empty|empty_strided|zeros|ones|full|tensor|as_tensor|scalar_tensor|arange|linspace|eye|rand|randn|randint|randperm"
)


def unplaced(path: Path) -> list[str]:
    """Where a tensor is made wherever the user's default device is."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch" and re.fullmatch(FACTORIES, call.func.attr)
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]  # fmt: skip


@pytest.mark.thorough
def test_no_tensor_of_the_library_is_made_wherever_the_default_device_is() -> None:
    assert not [each for path in Path(mc.__file__).parent.rglob("*.py") for each in unplaced(path)]


def under_a_default_device() -> None:
    """What the library makes for itself stays on the CPU: in a process in which nothing was asked of it before."""
    mesh = mc.make_mesh({"dp": 1})
    with torch.device("meta"):
        made = mc.launch(lambda: torch.ones(1).device.type, ranks=2)
        drawn = mc.launch(lambda: torch.randn(2, device="cpu").tolist(), ranks=2)
        assert made == ["meta", "meta"]
        assert drawn[0] != drawn[1]
        w = torch.nn.Parameter(torch.linspace(0, 1, 6, device="cpu"))
        assert fingerprint_of(w).samples
        order = mc.MeshBatchSampler(10, 2, "dp", shuffle=True, mesh=mesh).order(0)
        assert sorted(order.tolist()) == list(range(10))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="cpu"))
        mc.parallel.fully_shard(model, "dp", grads="mean", mesh=mesh)
        model(torch.ones(2, 4, device="cpu")).sum().backward()
        found = mc.verify(
            lambda x: mc.all_reduce(x.sum(), "dp"),
            torch.ones(4, device="cpu"),
            in_specs="(dp b)",
            out_specs="",
            meshes=[{"dp": 2}],
        )
        assert found.ok, found


@pytest.mark.thorough
def test_what_the_library_makes_for_itself_stays_on_the_cpu() -> None:
    command = [sys.executable, "-c", "import test_devices as t; t.under_a_default_device()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------- a thread of autograd's own


class Again(torch.autograd.Function):
    """As a checkpoint: calls a function again in backward, on the thread that autograd has for the device of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, fn: Any) -> torch.Tensor:
        ctx.w, ctx.fn = w.detach(), fn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        w = ctx.w.requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(w).sum()
        return g, torch.autograd.grad(y, w)[0], None


def on_autograds_thread(folder: str) -> list[Any]:
    """Backward of what lies on a device runs on another thread than forward did, beside one with another mesh."""
    toy_device.register(backend=False)
    rank = rejoined(folder, "gloo", backend="gloo")
    mesh, other = mc.make_mesh({"a": 2}), mc.make_mesh({"a": 2})
    threads: set[str] = set()
    go, ready = threading.Event(), threading.Event()

    def beside() -> None:
        x = torch.ones(1, requires_grad=True)
        with mc.use_mesh(other):
            for _ in range(200):
                x = x * 1
            ready.set()
            go.wait(200)

    def part(w: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        with mc.rng("d", seed=3):
            y = F.dropout(mc.pvary(w, "a") * (1 + rank), 0.5)
        with mc.use_mesh(other):
            y = mc.all_reduce(y, "a")
        assert mc.current_mesh() is mesh
        return (mc.all_reduce(y.exp(), "a"), mc.shift(y, "a"))[0]

    def gradient(place: str, inside: bool) -> list[float]:
        w = torch.full((8,), 0.1).requires_grad_()
        x = torch.ones(2).requires_grad_()
        with mc.use_mesh(mesh):
            loss = Again.apply(x.to(place), w, part).to("cpu").sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert w.grad is not None
        return w.grad.tolist()

    found = [[gradient("cpu", inside), gradient("toy", inside)] for inside in (False, True)]
    thread = threading.Thread(target=beside)
    thread.start()
    ready.wait(200)
    try:  # numbers of nodes say nothing now: what is current where backward was called does
        found += [[gradient("cpu", True), gradient("toy", True)]]
    finally:
        go.set()
        thread.join()
    return [found, sorted(threads)]


@needs_toy
def test_what_backward_calls_again_on_autograds_thread_is_as_on_the_cpu(tmp_path: Any) -> None:
    """With the current mesh, random numbers and collectives."""
    ranks = mc.launch(on_autograds_thread, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=280)
    for found, threads in ranks:
        assert len(threads) == 2, "backward did not run on a thread of its own"
        for on_cpu, on_device in found:
            assert on_cpu == on_device
            assert any(on_cpu)


def tree_on_two_devices(folder: str) -> list[Any]:
    """Gradients of leaves on the CPU come on one thread, those of leaves on the device on another one."""
    toy_device.register(backend=False)
    rank = rejoined(folder, "gloo", backend="gloo")
    mesh = mc.make_mesh({"a": 2})
    threads: set[int] = set()
    real = overlap._Sums.ready

    def ready(self: Any, *args: Any) -> None:
        threads.add(threading.get_ident())
        real(self, *args)

    overlap._Sums.ready = ready  # type: ignore[method-assign]
    found = []
    for other in ("cpu", "toy"):
        start = [torch.full((8,), 0.1 * (i + 1)).requires_grad_() for i in range(8)]
        rows = []
        for _ in range(6):
            leaves = [x.to(other) if i % 2 else x for i, x in enumerate(start)]
            varied = mc.pvary(leaves, "a", mesh=mesh, bucket_mb=1e-5)
            total = torch.stack([(x.to("cpu") * (i + 1 + rank)).sum() for i, x in enumerate(varied)]).sum()
            rows.append([g.tolist() for g in torch.autograd.grad(total, start)])
        found.append(rows)
    return [*found, len(threads)]


@needs_toy
def test_pvary_of_leaves_on_two_devices(tmp_path: Any) -> None:
    for on_cpu, on_both, threads in mc.launch(
        tree_on_two_devices, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=280
    ):
        assert threads == 2
        assert on_cpu == on_both == [[[2.0 * (i + 1) + 1] * 8 for i in range(8)]] * 6


def doubles_of(mesh: mc.Mesh, where: str) -> list[Any]:
    """What the library computes in float64, of tensors that lie there."""
    me, found = mesh.rank, []
    x = torch.tensor([0.1, 1e8, -0.3, -1e8]).mul(me + 1).to(where)
    with mc.use_mesh(mesh):
        found += [mc.all_reduce(x, "a", exact=True), mc.reduce_scatter(x, "a", op="mean", exact=True)]
        counts = torch.tensor([2**24 + me, 3]).to(where)
        found += [mc.weighted_mean(counts, 2, "a"), mc.weighted_mean(x.sum(), torch.tensor(3).to(where), "a")]
        assert {y.device.type for y in found} == {where}
        metrics = mc.Metrics({"loss": "mean", "tokens": "sum", "most": "max"})
        for _ in range(2):
            metrics.add("loss", x[0], counts[1])
            metrics.add("tokens", counts[0])
            metrics.add("most", x[1])
        found.append(metrics.reduce("a"))
        module = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.5)
        module.register_buffer("seen", torch.tensor([5, 7]))
        module.to(where)
        found += [fingerprint_of(each) for each in (*module.parameters(), module.seen)]
        with mc.rng("d", seed=3):
            found.append(torch.nn.functional.dropout(torch.ones(8).to(where), 0.5))
    found.append(_alike(x, x * (1 + 1e-7)))
    return [y.to("cpu").tolist() if isinstance(y, torch.Tensor) else y for y in found]


def without_doubles(folder: str) -> list[Any]:
    """On a device that refuses float64, as Metal does."""
    toy_device.register(backend=False)
    rejoined(folder, "gloo", backend="gloo")
    toy_device.dtypes_refused.add(torch.float64)
    accelerator.NO_DOUBLES.add("toy")
    with pytest.raises(TypeError, match="float64"):
        torch.ones(1).to("toy", torch.float64)
    mesh = mc.make_mesh({"a": 2})
    return [doubles_of(mesh, "cpu"), doubles_of(mesh, "toy")]


@needs_toy
def test_a_device_without_float64(tmp_path: Any) -> None:
    """The exact sums and counts are those of the CPU; a norm may be rounded as float32."""
    for on_cpu, on_device in mc.launch(
        without_doubles, ranks=2, args=(str(tmp_path),), runtime="processes", timeout=280
    ):
        for one, other in zip(on_cpu, on_device, strict=True):
            if isinstance(one, Fingerprint):
                assert not differ(one, other)
            else:
                assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_leaf_of_another_shape_needs_no_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, dtype, **kw: made.append(dtype) or empty(*shape, dtype=dtype, **kw)
    )
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    become(p, torch.zeros(2, dtype=dtype))
    assert (p.shape, p.dtype) == ((2,), dtype)
    assert len(made) == 1
    assert made[0] not in (dtype, torch.float64)


def exact_without_float64() -> None:
    """As ranks of one process reduce."""
    toy_device.register(backend=False)
    toy_device.dtypes_refused.add(torch.float64)
    accelerator.NO_DOUBLES.add("toy")
    rows = [torch.tensor([0.1, 1e8, -0.3, -1e8]).mul(rank + 1) for rank in range(3)]
    for op in ("exact sum", "exact mean"):
        on_cpu, on_device = dtypes.fold(op, rows), dtypes.fold(op, [row.to("toy") for row in rows])
        assert on_device.device.type == "toy"
        assert on_cpu.tolist() == on_device.to("cpu").tolist()


@pytest.mark.thorough
@needs_toy
def test_exact_sums_of_ranks_of_one_process_without_float64() -> None:
    command = [sys.executable, "-c", "import test_devices as t; t.exact_without_float64()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
