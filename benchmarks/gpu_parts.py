"""The parts of benchmarks/gpu.py: each is given where it runs, and gives what it found, as JSON has it; what is in
``failed`` has failed. All of them run on the CPU too, small, as a rehearsal.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshcomm as mc
from benchmarks.bandwidth import FACTORS
from benchmarks.peers import floors_of
from meshcomm.parallel import data_parallel, fully_shard
from meshcomm.runtime import groups

AXIS = "ranks"
ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "MESHCOMM_", "PYTORCH_", "OMP_")


class Place(NamedTuple):
    """Where a part runs."""

    ranks: int
    on_gpu: bool


Facts = dict[str, Any]


def processes(fn: Callable[..., Any], place: Place, *args: Any, seconds: float = 240) -> list[Any]:
    """What ``fn(place, *args)`` gives on each rank, one process each: on NCCL where there are GPUs."""
    return mc.launch(
        fn, ranks=place.ranks, args=(place, *args), runtime="processes", timeout=seconds,
        backend=None if place.on_gpu else "gloo",
    )  # fmt: skip


def mesh_of(place: Place) -> mc.Mesh:
    """All ranks. One alone asks its backend too, which a mesh of one would not."""
    mc.init()
    mesh = mc.make_mesh({AXIS: place.ranks})
    if place.ranks == 1:
        mesh.axis(AXIS).link = groups.link_of((0,), None, mesh._identity, (AXIS,))
    return mesh


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of(fn: Callable[[], object], device: torch.device, times: int) -> tuple[float, float]:
    """Of one call: as the device's events say, and what the host spent on it."""
    for _ in range(3 if device.type == "cuda" else 1):
        fn()
    synchronize(device)
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(times):
            fn()
        took = (time.perf_counter() - begun) / times
        return took, took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    begun = time.perf_counter()
    for _ in range(times):
        fn()
    host = (time.perf_counter() - begun) / times
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / times, host


# ------------------------------------------------------------------------------------------------------------- machine


def machine(place: Place) -> Facts:
    """Names and versions."""
    count = torch.cuda.device_count() if place.on_gpu else 0
    properties = [torch.cuda.get_device_properties(at) for at in range(count)]
    return {
        "gpus": [
            {"name": each.name, "GiB": round(each.total_memory / 2**30, 1), "capability": f"{each.major}.{each.minor}"}
            for each in properties
        ],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "meshcomm": mc.__version__,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _said("nvidia-smi", "topo", "-m"),
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def tests(place: Place) -> Facts:
    """Those with the marker ``gpu``; without a GPU they skip."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        what = ["tests"] if place.on_gpu else ["tests/test_gpu.py"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *what,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            return {"failed": {"pytest": (done.stdout + done.stderr)[-4000:]}}
        return outcomes(report)


def outcomes(report: Path) -> Facts:
    """What a report of pytest's says: how many passed, why the others did not."""
    found: Facts = {"passed": 0, "skipped": Counter(), "failed": {}}
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if bad is not None:
            found["failed"][f"{case.get('classname')}.{case.get('name')}"] = (bad.text or "")[-3000:]
        elif skipped is not None:
            found["skipped"][skipped.get("message") or ""] += 1
        else:
            found["passed"] += 1
    return found


# ------------------------------------------------------------------------------------------------- collectives, kernels


def collectives(place: Place) -> Facts:
    """Beside torch's own calls and, the floor, its C++ calls with their results made: the device's time and the host's,
    in µs, and what of the bandwidth is used.
    """
    return {"rows": processes(time_collectives, place)[0]}


def time_collectives(place: Place) -> list[Facts]:
    """One rank's part."""
    mesh = mesh_of(place)
    n, device, rows = place.ranks, mesh.device, []
    group = dist.group.WORLD
    assert group is not None
    floors = floors_of(n, 0, group)
    for size in (2**12, 2**20, 2**26) if place.on_gpu else (2**12,):
        count = size // 4 // n * n
        x = torch.full((count,), 1.0 + mesh.rank, device=device)
        for name, (ours, theirs) in calls(x, mesh).items():
            mine, host = seconds_of(ours, device, 20 if place.on_gpu else 2)
            beside, beside_host = seconds_of(theirs, device, 20 if place.on_gpu else 2)
            factor = FACTORS.get(name.split()[0], lambda n: 1.0)(n)
            rows.append({
                "call": name, "bytes": 4 * count, "us": round(1e6 * mine, 1), "host us": round(1e6 * host, 1),
                "torch us": round(1e6 * beside, 1), "torch host us": round(1e6 * beside_host, 1),
                "busbw GB/s": round(4e-9 * count / mine * factor, 2),
            })  # fmt: skip
            if name in floors:
                floor, floor_host = seconds_of(partial(floors[name], x), device, 20 if place.on_gpu else 2)
                rows[-1] |= {"floor us": round(1e6 * floor, 1), "floor host us": round(1e6 * floor_host, 1)}
    return rows


def calls(x: Tensor, mesh: mc.Mesh) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Ours, and what a user of torch.distributed would write."""
    n, k = mesh.size, {"mesh": mesh}
    wide, narrow = x.new_empty(n * x.numel()), x.new_empty(x.numel() // n)
    # torch 2.13 has renamed two; the old names warn there.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    maximum = dist.ReduceOp.MAX
    return {
        "all_reduce": (lambda: mc.all_reduce(x, AXIS, **k), lambda: dist.all_reduce(x.clone())),
        "all_reduce later": (
            lambda: mc.all_reduce(x, AXIS, **k, async_op=True).wait(),
            lambda: dist.all_reduce(x.clone(), async_op=True).wait(),
        ),
        "all_reduce max": (lambda: mc.all_reduce(x, AXIS, "max", **k), lambda: dist.all_reduce(x.clone(), maximum)),
        "all_gather": (lambda: mc.all_gather(x, AXIS, **k), lambda: gather(wide, x)),
        "reduce_scatter": (lambda: mc.reduce_scatter(x, AXIS, **k), lambda: scatter(narrow, x)),
        "all_to_all": (
            lambda: mc.all_to_all(x, AXIS, 0, 0, **k), lambda: dist.all_to_all_single(torch.empty_like(x), x),
        ),
        "broadcast": (lambda: mc.broadcast(x, AXIS, **k), lambda: dist.broadcast(x.clone(), 0)),
    }  # fmt: skip


def kernels(place: Place) -> Facts:
    """What one call starts on the device, by name: of rank 0."""
    return processes(count_kernels, place)[0]


def count_kernels(place: Place) -> Facts:
    """One rank's part. On the CPU torch's operations stand for kernels."""
    mesh = mesh_of(place)
    device, k = mesh.device, {"mesh": mesh}
    x, half = torch.ones(2**16, device=device), torch.ones(2**16, device=device, dtype=torch.bfloat16)
    tree = [torch.ones(2**10, device=device) for _ in range(8)]
    what: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: mc.all_reduce(x, AXIS, **k),
        "all_reduce of a tree": lambda: mc.all_reduce(tree, AXIS, **k),
        "all_reduce max, float32": lambda: mc.all_reduce(x, AXIS, "max", **k),
        "all_reduce max, bfloat16": lambda: mc.all_reduce(half, AXIS, "max", **k),
    }
    kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * place.on_gpu]
    found: Facts = {}
    for name, call in what.items():
        call()
        synchronize(device)
        with torch.profiler.profile(activities=kinds) as seen:
            call()
            synchronize(device)
        wanted = torch.autograd.DeviceType.CUDA if place.on_gpu else torch.autograd.DeviceType.CPU
        names = Counter(str(event.name)[:80] for event in seen.events() if event.device_type == wanted)
        found[name] = {"count": sum(names.values()), "names": names}
    return found


# ---------------------------------------------------------------------------------------------------------- steps


class Size(NamedTuple):
    """Of a model and its batch."""

    width: int
    layers: int
    rows: int


def size_of(place: Place) -> Size:
    """Parameters of 268 MB in float32, or very few."""
    return Size(2048, 16, 256) if place.on_gpu else Size(16, 3, 4)


def model_of(size: Size, device: torch.device) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(7)
    layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.width, size.width), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def batch_of(size: Size, mesh: mc.Mesh, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch, and this rank's rows."""
    whole = torch.randn(size.rows * mesh.size, size.width, generator=torch.Generator().manual_seed(step))
    return whole.to(mesh.device), whole.chunk(mesh.size)[mesh.rank].to(mesh.device)


def wrapped(kind: str, size: Size, mesh: mc.Mesh) -> nn.Module:
    """A model under one way of training it."""
    model, k = model_of(size, mesh.device), {"grads": "mean", "mesh": mesh}
    if kind == "data_parallel":
        return data_parallel(model, AXIS, **k)
    if kind.startswith("fully_shard"):
        return fully_shard(model, AXIS, units=["*"], offload=kind.endswith("offload"), **k)
    if kind == "torch DDP":
        return DistributedDataParallel(model)
    if kind == "torch fully_shard":
        theirs = init_device_mesh(mesh.device.type, (mesh.size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                torch_fully_shard(layer, mesh=theirs)
        torch_fully_shard(model, mesh=theirs)
    return model


KINDS = ("one rank", "data_parallel", "torch DDP", "fully_shard", "fully_shard, offload", "torch fully_shard")


def steps_of(kind: str, size: Size, mesh: mc.Mesh) -> tuple[list[float], float, float, float]:
    """The losses of three steps on all rows, then the seconds of a step as the device and the host count them, and the
    most MiB of the device.
    """
    gc.collect()  # the model before this one
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if mesh.device.type == "cuda" else 0
    model = wrapped(kind, size, mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [batch_of(size, mesh, number) for number in range(4)]  # a copy of pageable memory waits for the device

    def step(number: int) -> Tensor:
        whole, mine = batches[number]
        loss = model(whole if kind == "one rank" else mine).square().mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        return loss.detach()

    losses = []
    for number in range(3):
        loss = step(number)
        losses.append(float(loss if kind == "one rank" else mc.all_reduce(loss, AXIS, "mean", mesh=mesh)))
    device, host = seconds_of(lambda: step(3), mesh.device, 20 if mesh.device.type == "cuda" else 1)
    peak = torch.cuda.max_memory_allocated() - before if mesh.device.type == "cuda" else 0
    return losses, device, host, round(peak / 2**20, 1)


def training(place: Place) -> Facts:
    """Steps beside torch's own; the losses must be those of one rank that has all rows."""
    found: Facts = {"kinds": processes(train, place)[0], "failed": {}}
    expected = torch.tensor(found["kinds"]["one rank"]["losses"])
    for kind, facts in found["kinds"].items():
        if not torch.allclose(torch.tensor(facts["losses"]), expected, rtol=1e-3, atol=1e-5):
            found["failed"][kind] = f"losses {facts['losses']}, expected {expected.tolist()}"
    return found


def train(place: Place) -> Facts:
    """One rank's part."""
    mesh, size, found = mesh_of(place), size_of(place), {}
    for kind in KINDS:
        losses, device, host, peak = steps_of(kind, size, mesh)
        found[kind] = {
            "losses": losses,
            "ms": round(1e3 * device, 2),
            "host ms": round(1e3 * host, 2),
            "peak MiB": peak,
        }
    return found


def memory(place: Place) -> Facts:
    """The most MiB that a bucket's sum takes beside the gradients: one copy of it, and not two."""
    return processes(peak_of_a_tree, place)[0]


def peak_of_a_tree(place: Place) -> Facts:
    """One rank's part."""
    mesh = mesh_of(place)
    count, leaves = (2**20 if place.on_gpu else 2**8), 16
    tree = [torch.ones(count, device=mesh.device) for _ in range(leaves)]
    whole = leaves * count * 4 / 2**20
    mc.all_reduce(tree, AXIS, mesh=mesh, bucket_mb=2 * whole)
    if not place.on_gpu:
        return {"MiB of the tree": whole, "most MiB beside it": None, "failed": {}}
    synchronize(mesh.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = mc.all_reduce(tree, AXIS, mesh=mesh, bucket_mb=2 * whole)
    synchronize(mesh.device)
    most = (torch.cuda.max_memory_allocated() - before) / 2**20
    del result
    wrong = {"a tree": f"{most:.0f} MiB beside {whole:.0f}"} if most > 1.2 * whole else {}
    return {"MiB of the tree": whole, "most MiB beside it": round(most, 1), "failed": wrong}


# ----------------------------------------------------------------------------------------------------- graph, hang


def graph(place: Place) -> Facts:
    """A step with collectives in a CUDA graph: replayed with new numbers it gives what the step gives without."""
    return {"failed": {f"rank {at}": each for at, each in enumerate(processes(capture, place)) if each}}


def capture(place: Place) -> list[str]:
    """One rank's part: what differs."""
    mesh = mesh_of(place)
    k = {"mesh": mesh}
    x = torch.ones(64, 64, device=mesh.device)
    what: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: mc.all_reduce(x @ x, AXIS, **k),
        "max": lambda: mc.all_reduce(x - mesh.rank, AXIS, "max", **k),
        "max of bfloat16": lambda: mc.all_reduce((x - mesh.rank).bfloat16(), AXIS, "max", **k),
        "tree": lambda: torch.stack(mc.all_reduce([x, 2 * x], AXIS, **k)),
        "gathered": lambda: mc.all_gather(x, AXIS, **k).tanh(),
        "scattered": lambda: mc.reduce_scatter(x.repeat(mesh.size, 1), AXIS, **k),
        "shifted": lambda: mc.shift(x + mesh.rank, AXIS, **k),
    }
    wrong = []
    for name, step in what.items():
        step()  # communicators are made, and what is looked up
        replay, result = captured(step, mesh.device)
        for number in (2.0, 3.0):
            x.fill_(number)
            replay()
            synchronize(mesh.device)
            if not torch.equal(result(), step()):
                wrong.append(f"{name} with {number}")
    return wrong


def captured(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """What runs it again, and what gives its result; on the CPU nothing is captured."""
    if device.type != "cuda":
        return (lambda: None), step
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        result = step()
    return recorded.replay, lambda: result


_SECONDS = float(os.environ.get("MESHCOMM_GPU_PATIENCE", "8"))


def hang(place: Place) -> Facts:
    """A call that not all ranks make: the others are told who is missing, and the run ends in time."""
    if place.ranks == 1:
        told, took = _ended(lambda: mc.launch(leave_alone, ranks=2, args=(place, None), timeout=60))
        return _judged({"two ranks of one process": told}, took)
    with tempfile.TemporaryDirectory() as folder:
        told, took = _ended(lambda: processes(leave_alone, place, folder, seconds=120))
        said = {path.name: path.read_text() for path in Path(folder).iterdir()}
    others = [f"rank {rank}" for rank in range(place.ranks) if rank != 1]
    return {**_judged({who: said.get(who, "") for who in others}, took), "how the run ended": told}


def leave_alone(place: Place, folder: str | None) -> None:
    """Rank 1 does not call; what the others are told goes into a file."""
    if folder is None:
        mesh = mc.make_mesh({AXIS: 2})
    else:
        mc.init()
        mesh = mc.make_mesh({AXIS: place.ranks}, timeout=_SECONDS)
    x = torch.ones(4, device=mesh.device)
    mc.all_reduce(x, AXIS, mesh=mesh)
    if mesh.rank == 1:
        time.sleep(3 * _SECONDS if folder is not None else 0)
        return
    begun = time.monotonic()
    try:
        y = mc.all_reduce(x, AXIS, mesh=mesh)
        synchronize(y.device)
    except BaseException as error:
        if folder is not None:
            said = f"after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}"
            (Path(folder) / f"rank {mesh.rank}").write_text(said)
        raise


def _ended(run: Callable[[], object]) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:4000], time.monotonic() - begun
    return "", time.monotonic() - begun


def _judged(texts: dict[str, str], took: float) -> Facts:
    failed = {who: said or "was not told" for who, said in texts.items() if "CommError" not in said}
    return {"told": texts, "seconds": round(took, 1), "failed": failed}


PARTS: dict[str, Callable[[Place], Facts]] = {
    "machine": machine,
    "tests": tests,
    "collectives": collectives,
    "kernels": kernels,
    "memory": memory,
    "graph": graph,
    "training": training,
    "hang": hang,
}


if __name__ == "__main__":
    print(json.dumps(machine(Place(1, torch.cuda.is_available())), indent=1))
