"""Collectives that are one call of a backend, over one in Python that moves tensors of the CPU by gloo: the library leaves
them to it, as it does to NCCL. Values, gradients, storage and records are as where the library moves tensors itself.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import OLD
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.runtime.recorder import state_of

RANKS = 4
calls: list[str] = []
"""What the backend was asked for."""
lengths: list[tuple[int, int]] = []
"""How many runs each all_to_all was told of."""


class Passes(dist.ProcessGroup):
    """Hands all on to gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "passes"

    def _do(self, name: str, *args: Any) -> Any:
        calls.append(name)
        return getattr(self.gloo, name)(*args)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("broadcast", tensors, opts or dist.BroadcastOptions())

    def _allgather_base(self, out: Any, x: Any, opts: Any = None) -> Any:
        return self._do("_allgather_base", out, x)

    def _reduce_scatter_base(self, out: Any, x: Any, opts: Any = None) -> Any:
        return self._do("_reduce_scatter_base", out, x, opts or dist.ReduceScatterOptions())

    def alltoall_base(self, out: Any, x: Any, recv: Any, send: Any, opts: Any = None) -> Any:
        lengths.append((len(recv), len(send)))
        return self._do("alltoall_base", out, x, recv, send)


def collectives(mesh: mc.Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: mc.all_reduce(x, "a", mesh=mesh),
        "broadcast": lambda x: mc.broadcast(x, "a", 2, mesh=mesh),
        "shift": lambda x: mc.shift(x, "a", mesh=mesh),
        "shift without wrap": lambda x: mc.shift(x, "a", wrap=False, mesh=mesh),
        "permute": lambda x: mc.permute(x, "a", ring, mesh=mesh),
        "all_gather 0": lambda x: mc.all_gather(x, "a", mesh=mesh),
    }
    for op in ("mean", "max"):
        found |= {
            f"all_reduce, {op}": lambda x, op=op: mc.all_reduce(x, "a", op, mesh=mesh),
            f"reduce_scatter, {op}": lambda x, op=op: mc.reduce_scatter(x, "a", op=op, mesh=mesh),
        }
    for dim in (0, -1):
        found |= {
            f"all_gather {dim}": lambda x, dim=dim: mc.all_gather(x, "a", dim, mesh=mesh),
            f"all_gather_invariant {dim}": lambda x, dim=dim: mc.all_gather_invariant(x, "a", dim, mesh=mesh),
            f"reduce_scatter {dim}": lambda x, dim=dim: mc.reduce_scatter(x, "a", dim, mesh=mesh),
            f"all_to_all {dim}": lambda x, dim=dim: mc.all_to_all(x, "a", dim, dim, mesh=mesh),
            f"all_to_all {dim}, {-1 - dim}": lambda x, dim=dim: mc.all_to_all(x, "a", dim, -1 - dim, mesh=mesh),
            f"shard {dim}": lambda x, dim=dim: mc.shard(x, "a", dim, mesh=mesh),
        }
    return found


def inputs(me: int) -> dict[str, Tensor]:
    """Whole numbers: sums are exact in any order."""
    flat = torch.arange(16.0) + 3 * me
    made = {str(dtype)[6:]: flat.to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}
    made |= {str(dtype)[6:]: flat.to(dtype) for dtype in (torch.int32, torch.uint8, torch.int16, torch.complex64)}
    made |= {"2-d": flat.view(4, 4), "3-d": torch.arange(32.0).view(4, 2, 4) + me, "one row": flat.view(1, 16)}
    made |= {"transposed": flat.view(4, 4).T, "every other": torch.arange(32.0)[::2] + me, "empty": torch.ones(0, 4)}
    made |= {
        "bool": (flat % 3).bool(),
        "conjugated": torch.complex(flat, flat).conj(),
        "one wide": flat.view(16, 1).short(),
    }
    made |= {"large halves": (flat + 2.0**15).half(), "a number": torch.tensor(me, dtype=torch.int16)}
    made |= {"turned": torch.complex(flat, flat).conj().imag, "turned and dense": (flat * 1j).conj()[:4].imag}
    made |= {"expanded": torch.full((1,), float(me)).expand(8), "parameter": torch.nn.Parameter(flat.clone())}
    return made


def found(mesh: mc.Mesh) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, fn in collectives(mesh).items():
        for kind, x in inputs(mesh.rank).items():
            before, read = x.detach().clone(), [x]
            try:
                with torch.no_grad():
                    y = fn(x)
            except mc.MeshError as error:  # a dim that does not divide, a dtype without such a sum
                out[f"{name} {kind}"] = str(error).split("\n")[0]
                continue
            assert_close(x.detach(), before, rtol=0, atol=0)
            assert type(y) is Tensor
            assert not y.requires_grad
            assert y.is_contiguous() or name.startswith("all_to_all"), (name, kind)
            assert y.numel() == 0 or y.untyped_storage().data_ptr() != read[0].untyped_storage().data_ptr()
            out[f"{name} {kind}"] = y
            with torch.inference_mode():
                assert_close(fn(x), y, rtol=0, atol=0)
            assert_close(collectives(mesh)[name](x.detach()), y, rtol=0, atol=0)
    x = inputs(mesh.rank)["2-d"].requires_grad_()
    for name, fn in collectives(mesh).items():
        (g,) = torch.autograd.grad((fn(x) ** 2).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad((g * g).sum(), x)
        out |= {f"gradient of {name}": g.detach(), f"second derivative of {name}": gg}
        y = fn(x)
        (at_y,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)  # what the others sum is not in it
        out[f"derivative of the gradient at the result of {name}"] = torch.autograd.grad(at_y.sum(), x)[0]
        out[f"tangent of {name}"] = torch.func.jvp(fn, (x.detach(),), (x.detach() + 1,))[1]
    return out


def in_backward_of_sums(mesh: mc.Mesh) -> dict[str, Any]:
    """What programs do to a sum, whose gradient goes through autograd's own nodes where a backend sums copies."""
    whole = torch.arange(8.0).view(2, 4) + mesh.rank
    x, seen = whole.clone().requires_grad_(), []
    y = mc.all_reduce(x, "a", mesh=mesh)
    y.register_hook(lambda g: g * 3)
    y.retain_grad()
    z = (y * y).sum()
    z.backward(retain_graph=True)
    z.backward()
    out: dict[str, Any] = {"twice, hooked": x.grad, "retained": y.grad}
    y = mc.all_reduce(x, "a", mesh=mesh)
    y *= 2
    (y * y).sum().backward()
    out["written to"] = x.grad
    y = mc.all_reduce(x.T[1:], "a", mesh=mesh)
    with mc.trace() as trace:  # around backward alone
        (y**3).sum().backward()
    out |= {"of a view": x.grad, "traced": [(each.op, each.primitive) for each in trace.events]}
    (g,) = torch.autograd.grad(mc.all_reduce((x + 1j) ** 2, "a", mesh=mesh).abs().sum(), x)
    out["complex"] = g
    with mc.trace():
        y = mc.all_reduce(x, "a", mesh=mesh)
    out["begun in a trace"] = torch.autograd.grad((y**2).sum(), x)[0]
    summed = torch.utils.checkpoint.checkpoint(
        lambda x: mc.all_reduce(x**2, "a", mesh=mesh) ** 2, x, use_reentrant=False
    )
    out["checkpoint"] = torch.autograd.grad(summed.sum(), x)[0]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> None:
            seen.append(g)

    y = mc.all_reduce(x, "a", mesh=mesh)
    (Nothing.apply(y).sum() + 0 * x.sum()).backward(inputs=[x])
    assert len(seen) == 1
    assert_close(x.detach(), whole, rtol=0, atol=0)
    return out


def extremes(mesh: mc.Mesh) -> None:
    """NaN is one, and zeros have their signs."""
    nan, inf = float("nan"), torch.inf
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.tensor([mesh.rank, nan if mesh.rank == 2 else 0.0, -inf if mesh.rank else 1.0], dtype=dtype)
        for op, expected in (("max", [3.0, nan, 1.0]), ("min", [0.0, nan, -inf])):
            for y in (
                mc.all_reduce(x, "a", op, mesh=mesh),
                mc.all_reduce(x.view(3, 1).T, "a", op, mesh=mesh)[0],
                mc.reduce_scatter(x.expand(RANKS, 3), "a", op=op, mesh=mesh)[0],
            ):
                assert_close(y, torch.tensor(expected, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    for values in ([0.0, -0.0, -0.0, -0.0], [-0.0, -0.0, -0.0, 0.0], [-0.0] * 4, [0.0] * 4, [-0.0, -1.0, -2.0, 0.0]):
        for op, sign in (("max", all), ("min", any)):
            x = torch.full((4,), values[mesh.rank])
            negative = sign(math.copysign(1, value) < 0 for value in values)
            for call in (mc.all_reduce, mc.reduce_scatter):
                assert bool(call(x, "a", op=op, mesh=mesh)[0].signbit()) == negative, (values, op)


def wherever_it_lies(mesh: mc.Mesh) -> None:
    """How a tensor lies on one rank is no reason to call something else there, nor is that it is waited for later."""
    rank = mesh.rank
    for op, dtypes in REDUCED.items():
        for dtype in dtypes:
            everyone = torch.stack([torch.arange(16).view(4, 4) + i for i in range(RANKS)])
            x = everyone[rank].to(dtype)
            x = x.mT.contiguous().mT if rank == 1 else torch.cat([x, x], 1)[:, :4] if rank == 2 else x
            whole = everyone.amax(0) if op == "max" else everyone.sum(0) / (RANKS if op == "mean" else 1)
            for call, expected in ((mc.all_reduce, whole), (mc.reduce_scatter, whole[rank : rank + 1])):
                calls.clear()
                assert_close(call(x, "a", op=op, mesh=mesh), expected.to(dtype), rtol=0, atol=0)
                made, given = list(calls), x.clone()
                assert mc.all_gather_object(made, "a", mesh=mesh) == [made] * RANKS
                later = call(given, "a", op=op, mesh=mesh, async_op=True)
                given.fill_(9)
                assert_close(later.wait(), expected.to(dtype), rtol=0, atol=0)


REDUCED = {
    "sum": (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int16, torch.complex64),
    "mean": (torch.float32, torch.bfloat16, torch.complex64),
    "max": (torch.float32, torch.bfloat16, torch.int64, torch.uint8),
}
METHODS = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
    "broadcast": "broadcast", "shift": "alltoall_base", "permute": "alltoall_base", "all_to_all": "alltoall_base",
}  # fmt: skip
"""What the backend is asked for, by the first word of a name."""
MOVES = ("all_gather 0", "all_to_all 0", "broadcast", "shift", "permute")


def in_other_calls(mesh: mc.Mesh) -> list[str]:
    """What is not one call of the backend, noted once."""
    log: Any = mesh.axis("a").link.log  # type: ignore[attr-defined]
    plain = ("float32", "bfloat16", "int64", "2-d", "3-d", "uint8")
    asked = [(name, each) for name in (*MOVES, "all_reduce", "reduce_scatter 0") for each in plain]
    asked += [(name, each) for name in MOVES for each in ("bool", "int16", "complex64", "one wide")]  # as bytes
    asked += [(f"{name} -1", "one row") for name in ("all_gather", "reduce_scatter", "all_to_all")]
    for name in ("all_reduce", "reduce_scatter"):
        asked += [(f"{name}, max", each) for each in ("int64", "uint8", "bool")]
        asked += [(f"{name}, mean", each) for each in ("float32", "2-d", "bfloat16", "complex64")]
    missed = []
    for name, kind in asked:
        method = METHODS[name.replace(",", "").split()[0]]
        calls.clear()
        seen = log.begun
        collectives(mesh)[name](inputs(mesh.rank)[kind])
        if calls != [method] or log.begun != seen + 1 or state_of(log.last) != "completed":
            missed.append(f"{name} {kind}: {calls}")
    return missed


def both_ways(folder: str) -> list[str]:
    mesh = mc.make_mesh({"a": RANKS})
    rank, sums = mesh.rank, in_backward_of_sums(mesh)
    by_us = found(mesh) | sums
    mc.shutdown()
    dist.Backend.register_backend("passes", Passes, devices=["cpu"])
    mc.init(init_method=f"file://{folder}/passes", rank=rank, world_size=RANKS, timeout=200, backend="passes")
    mesh = mc.make_mesh({"a": RANKS})
    by_it = found(mesh) | in_backward_of_sums(mesh)
    assert by_us.keys() == by_it.keys()
    for name, value in by_us.items():
        if isinstance(value, Tensor):
            assert_close(by_it[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert by_it[name] == value, name
    with mc.trace() as seen:
        by_it = found(mesh)
    assert all(torch.equal(by_us[name], value) for name, value in by_it.items() if isinstance(value, Tensor))
    assert {"all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"} <= {
        each.primitive for each in seen.events
    }
    # Who gives no lengths may call something else than who gives them: how a tensor lies is no reason.
    kinds = ("float32", "2-d", "transposed", "every other", "turned", "turned and dense", "expanded", "parameter")
    for way in (contextlib.nullcontext, mc.trace):
        with way():
            lengths.clear()
            for kind in kinds:
                mc.all_to_all(inputs(rank)[kind], "a", 0, 0, mesh=mesh)
                mc.all_to_all(inputs(rank)[kind], "a", 0, 0, mesh=mesh, async_op=True).wait()
            assert lengths == [(0, 0)] * 2 * len(kinds), lengths
    extremes(mesh)
    wherever_it_lies(mesh)
    missed = in_other_calls(mesh)
    mc.shutdown()
    dist.Backend.register_backend("itself", dist.ProcessGroupGloo, devices=["cpu"])  # in C++, as NCCL's
    mc.init(init_method=f"file://{folder}/itself", rank=rank, world_size=RANKS, timeout=200, backend="itself")
    mesh = mc.make_mesh({"a": RANKS})
    by_it = found(mesh) | in_backward_of_sums(mesh)
    for name, value in by_us.items():
        if "all_reduce" in name or name in sums:
            assert torch.equal(by_it[name], value) if isinstance(value, Tensor) else by_it[name] == value, name
    y = mc.all_reduce(torch.ones(4, 4, requires_grad=True), "a", mesh=mesh)
    assert type(y.grad_fn).__name__ == "CloneBackward0"
    return missed


@pytest.mark.thorough
def test_one_call_of_the_backend(tmp_path: Any) -> None:
    assert mc.launch(both_ways, ranks=RANKS, args=(str(tmp_path),), runtime="processes", timeout=280) == [[]] * RANKS


SEEN = """
import gc, sys, weakref, torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
import meshcomm as mc
from meshcomm.parallel.data.means import _came_over

class Listed(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", rank=0, world_size=4)
mesh, seen, x = mc.make_mesh({"a": 4}), [], torch.ones(4, 4)
calls = {
    "allreduce_": lambda **how: mc.all_reduce(x, "a", mesh=mesh, **how),
    "broadcast_": lambda **how: mc.broadcast(x, "a", mesh=mesh, **how),
    "allgather_base": lambda **how: mc.all_gather(x, "a", mesh=mesh, **how),
    "reduce_scatter_base": lambda **how: mc.reduce_scatter(x, "a", mesh=mesh, **how),
    "alltoall_base_": lambda **how: mc.all_to_all(x, "a", 0, 0, mesh=mesh, **how),
}
# The functions of ours that start and wait run: each takes as long as a tenth of a small copy.
MOST = {"allreduce_": 13, "broadcast_": 14, "allgather_base": 16, "reduce_scatter_base": 16, "alltoall_base_": 15}
for name, call in calls.items():
    for _ in range(2):  # the way found first is not the way for ever
        plain = call()
        with Listed():
            assert call().equal(plain) and call(async_op=True).wait().equal(plain)
        assert sum(name in each for each in seen) == 2, (name, seen)
        seen.clear()
        with profile() as watched:
            call()
        assert any(f"c10d::" in event.name and name in event.name for event in watched.events()), name

def traced(mesh):
    with FakeTensorMode() as mode:
        mc.all_reduce(torch.ones(3, requires_grad=True), "a", mesh=mesh)
    return weakref.ref(mode)

for name, call in calls.items():
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code) if event == "call" else None)
    call(async_op=True).wait()
    sys.setprofile(None)
    ours = [code.co_name for code in seen if "/meshcomm/" in code.co_filename.replace("\\\\", "/")]
    assert len(ours) <= MOST[name], (name, ours)

brought = mc.all_to_all(x.clone().requires_grad_(), "a", 0, 0, mesh=mesh)
assert [axis.name for axis in _came_over((brought[:].clone(),))] == ["a"]
assert not [*_came_over((mc.all_reduce(brought, "a", mesh=mesh),))]  # a sum is more than moved, whatever its nodes are

other = mc.make_mesh({"a": 4})
gone = traced(other)
gc.collect()
assert gone() is None

class Copies:
    "What it does to the result are operations of torch's."
    def allreduce(self, tensors, options):
        tensors[0].copy_(tensors[0].detach() * 2)

mc.all_reduce(x, "a", mesh=other)
other.axis("a").link._near[None] = Copies()
leaf = torch.ones(3, requires_grad=True)
y = mc.all_reduce(leaf, "a", mesh=other)
assert y.tolist() == [2.0] * 3 and torch.autograd.grad(y.sum(), leaf)[0].tolist() == [1.0] * 3
mc.shutdown()
dist.destroy_process_group()
try:
    mc.all_reduce(x, "a", mesh=mesh)
except mc.MeshError as error:
    assert "shut down" in str(error) or "is gone" in str(error), error
else:
    raise AssertionError("no error")
"""


@pytest.mark.thorough
@pytest.mark.skipif(OLD, reason="the fake backend of torch 2.11 leaves what a reduce_scatter gives unwritten")
def test_who_looks_at_torch_s_operations_sees_those_of_collectives() -> None:
    """Else they go by another way, which is shorter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SEEN], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
