"""What tests do on an accelerator, in functions that any device runs: ``test_gpu.py`` runs them on the one that is there,
``test_gpu_programs.py`` on the CPU, so that they do not rot where there is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, grid
from later import for_later
from oracle import Oracle
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.collectives.trees import overlap
from meshcomm.runtime import groups, recorder
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.process import accelerator

_ON_CPU: list[torch.dtype] = []


@contextmanager
def on_the_cpu(real: torch.dtype) -> Iterator[None]:
    """The CPU is the device, whose floats are these."""
    _ON_CPU.append(real)
    try:
        yield
    finally:
        _ON_CPU.pop()


def device() -> torch.device:
    """The accelerator that these run on."""
    if _ON_CPU:
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def real() -> torch.dtype:
    """The widest floats that it has: Metal has no float64."""
    return _ON_CPU[-1] if _ON_CPU else torch.float32 if device().type == "mps" else torch.float64


def cases() -> list[Any]:
    """All that take such floats."""
    return [case for case in CASES if real() in case.dtypes]


def same(actual: Any, expected: Any, what: str = "") -> None:
    close = 1e-12 if real() == torch.float64 else 1e-4
    assert_close(actual, expected, rtol=close, atol=close, msg=lambda text: f"{what}: {text}")


def weighted(y: Tensor) -> Tensor:
    return (y.sin() * torch.arange(1, y.numel() + 1, dtype=real(), device=y.device).view(y.shape)).sum()


def on_device(axis: Any) -> None:
    """Values and gradients of two orders equal those of the same ranks on the CPU."""
    mesh = mc.make_mesh(grid((2, 2)))
    oracle, here = Oracle(mesh.shape), device()
    for case in cases():
        found = []
        for place in (torch.device("cpu"), here):
            x = case.inputs(oracle, axis, real())[mesh.rank].to(place).requires_grad_()
            y = case.call(x, axis, mesh)
            assert y.device == place
            (g,) = torch.autograd.grad(weighted(y), x, create_graph=True)
            (gg,) = torch.autograd.grad(weighted(g), x)
            found.append([each.detach().cpu() for each in (y, g, gg)])
        same(found[1], found[0], f"{case.name} over {axis!r} on rank {mesh.rank}")


def trained(place: torch.device) -> list[Tensor]:
    """A tensor-parallel model whose layers wait for each other in backward."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    make = torch.Generator().manual_seed(mesh.coordinate["tp"])
    weights = [torch.randn(4, 4, generator=make, dtype=real()).to(place).requires_grad_() for _ in range(6)]
    x = torch.full((3, 4), 0.1 * (1 + mesh.coordinate["dp"]), dtype=real(), device=place)
    with mc.use_mesh(mesh):
        for w in weights:
            x = x + mc.all_reduce((mc.pvary(x, "tp") @ mc.pvary(w, "dp")).tanh(), "tp")
        loss = mc.all_reduce(x.square().mean(), "dp", "mean")
    loss.backward()
    return [loss.detach().cpu(), *(w.grad.cpu() for w in weights if w.grad is not None)]


def draws() -> list[list[float]]:
    mesh = mc.make_mesh({"a": 4})
    found = []
    for _ in range(3):
        found.append(torch.rand(3, device=device()).tolist())
        mc.barrier("a", mesh=mesh)
    return found


def seeded_draws(meet: bool) -> list[list[float]]:
    mesh = mc.make_mesh({"a": 3})
    torch.manual_seed(mesh.rank)
    found = []
    for _ in range(3):
        found.append(torch.rand(2, device=device()).tolist())
        if meet:
            mc.barrier("a", mesh=mesh)
    return found


def default_device() -> list[str]:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(2)
    return [
        mesh.device.type,
        x.device.type,
        mc.all_reduce(x, "a", mesh=mesh).device.type,
        mc.axis_index("a", mesh=mesh).device.type,
    ]


def mixed_devices() -> None:
    """A tree with leaves on both devices; a message that lands on the mesh's device."""
    mesh = mc.make_mesh({"a": 2})
    tree = {"cpu": torch.ones(2) * mesh.rank, "device": torch.ones(3, device=device()) * mesh.rank}
    result = mc.all_reduce(tree, "a", mesh=mesh)
    assert result["cpu"].device.type == "cpu"
    assert result["device"].device == device()
    same([leaf.cpu() for leaf in result.values()], [torch.ones(2), torch.ones(3)])


def autocast_in_ranks() -> list[torch.dtype]:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(4, 4, device=device())
    mc.barrier("a", mesh=mesh)
    return [(x @ x).dtype]


def one_rank() -> list[str]:
    """A mesh of one, and a group of one that is really asked: every primitive, on the device and on the CPU."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    oracle = Oracle(mesh.shape)
    for case in cases():
        x = case.inputs(oracle, "a", real())[0]
        for place in (torch.device("cpu"), mesh.device):
            y = case.call(x.to(place), "a", mesh)
            assert y.device.type == place.type
            same(y.cpu(), case.reference(oracle, [x], "a")[0], case.name)
    flag = torch.ones(3, device=mesh.device)
    dist.all_reduce(flag)
    return [mesh.device.type, dist.get_backend_config()]


_LINKS: list[Any] = []


def link_of_one(mesh: mc.Mesh) -> Any:
    """A link to itself, which is really asked: a mesh of one has none."""
    if not _LINKS:
        _LINKS.append(groups.link_of((0,), None, mesh._identity, ("a",)))
    return _LINKS[0]


def primitives_of_one() -> str:
    """The primitives by the backend itself, which a mesh of one never calls."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    group_link = link_of_one(mesh)
    x = torch.tensor([[1.0, -2.0, float("nan")]], device=mesh.device)
    for op in ("sum", "max", "min", "product"):
        assert_close(group_link.all_reduce(x, op), x, equal_nan=True)
        assert_close(group_link.reduce_scatter(x, op), x[0], equal_nan=True)
    bits = torch.tensor([6, 3], device=mesh.device)
    for op in ("band", "bor", "bxor"):
        assert_close(group_link.all_reduce(bits, op), bits)
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16, torch.float64):
        y = torch.ones(4, device=mesh.device).to(dtype)
        assert_close(group_link.all_gather(y), y[None])
        assert_close(group_link.all_to_all(y, [4], [4]), y)
        assert_close(group_link.permute(y, 0, 0), y)
        assert_close(group_link.broadcast(y, 0), y)
        assert_close(group_link.gather(y, 0), y[None])
        assert_close(group_link.scatter(y[None], y, 0), y)
    group_link.barrier()
    return mesh.device.type


def later_on_device(axis: Any) -> None:
    """Works on the device, waited for in another order: values and gradients are those of the calls at once."""
    mesh = mc.make_mesh(grid((2, 2)))
    here = device()
    calls: list[Callable[..., Any]] = [
        lambda x, **kw: mc.all_reduce(x, axis, mesh=mesh, **kw),
        lambda x, **kw: mc.all_gather(x, axis, mesh=mesh, **kw),
        lambda x, **kw: mc.shift(x, axis, mesh=mesh, **kw),
        lambda x, **kw: mc.all_reduce(x, axis, "max", mesh=mesh, **kw),
    ]
    found = []
    for later in (False, True):
        torch.manual_seed(mesh.rank)
        xs = [torch.randn(4, 3, dtype=real()).to(here).requires_grad_() for _ in calls]
        ys = [call(x, **({"async_op": True} if later else {})) for call, x in zip(calls, xs, strict=True)]
        if later:
            ys = [y.wait() for y in reversed(ys)][::-1]
        grads = torch.autograd.grad(sum(weighted(y) for y in ys), xs)
        found.append([each.detach().cpu() for each in (*ys, *grads)])
    assert all(map(torch.equal, *found))


def sums_during_backward() -> None:
    """pvary of a tree on the device, twice, for the first pass finds out the order."""
    mesh = mc.make_mesh({"a": 2})
    torch.manual_seed(0)
    tree = {f"w{i}": torch.randn(8, 8, dtype=real()).to(device()).requires_grad_() for i in range(6)}
    x = torch.full((3, 8), 1.0 + mesh.rank, dtype=real(), device=device())
    for _ in range(2):
        found = []
        for together in (True, False):
            varied = mc.pvary(tree, "a", mesh=mesh, bucket_mb=1e-3) if together else {}
            h = x
            for name, w in tree.items():
                h = (h @ (varied[name] if together else mc.pvary(w, "a", mesh=mesh))).tanh()
            found.append(torch.autograd.grad(h.square().sum(), list(tree.values())))
        for one, other in zip(*found, strict=True):
            same(one.cpu(), other.cpu())


def later_on_one_rank() -> str:
    """The backend's own works through a link that a mesh of one never uses: waits order streams, time-outs do not end it."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    link, on_device = link_of_one(mesh), mesh.device.type == "cuda"
    x = torch.randn(1 << 20, device=mesh.device)
    link.all_reduce(x, "sum")  # warm: the first call makes the communicator, for which the host waits
    busy = torch.randn(4096 if on_device else 4, 4096 if on_device else 4, device=mesh.device)
    (busy @ busy).tanh()  # and this one loads kernels
    if on_device:
        torch.cuda.synchronize()
    for _ in range(20):
        busy = (busy @ busy).tanh()
    with for_later():
        pending = [link.all_reduce(x, "sum"), link.all_gather(x), link.broadcast(x, 0), link.all_reduce(x, "mean")]
    if on_device:
        assert not pending[0].done()  # the host is ahead of the device
    values = [each.wait(None) if isinstance(each, Pending) else each for each in pending]
    if on_device:
        assert not torch.cuda.current_stream().query()  # and the waits have not held it up
        pending[-1].wait(60.0)
    for value in values:
        assert_close(value.view(-1), x)
    assert all(each.done() for each in pending if isinstance(each, Pending))
    return mesh.device.type


def device_and_stream() -> list[Any]:
    """Where a rank of this process begins, and what it gives, made on a stream of its own."""
    mesh = mc.make_mesh({"a": 2})
    begins = [torch.accelerator.current_device_index(), torch.accelerator.current_stream()]
    torch.accelerator.set_stream(torch.Stream(device()))
    x = torch.ones(1 << 20, device=device())
    for _ in range(50):
        x = (x * 1.01).sin()
    return [*begins, mc.all_reduce(x, "a", mesh=mesh)]


def seeded_in_a_new_process() -> list[Any]:
    """Two launches, the first of which is the first to use the device."""
    kind = torch.accelerator.current_accelerator()  # device() would begin it
    assert kind is not None
    assert not torch.get_device_module(kind).is_initialized()
    return [mc.launch(draws, ranks=4) for _ in range(2)]


def recomputed() -> str:
    """Checkpoints with the current mesh, random numbers and works, on the thread that autograd has for the device."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})

    def part(x: Tensor) -> Tensor:
        with mc.rng("b", seed=1):
            x = torch.nn.functional.dropout(mc.pvary(x, "a").sin(), 0.5)
        return mc.all_reduce(x, "a", async_op=True).wait()

    for reentrant in (False, True):
        found = []
        for place in (torch.device("cpu"), mesh.device):
            x = torch.linspace(0, 1, 16).to(place).requires_grad_()
            with mc.use_mesh(mesh):
                y = checkpoint(part, x, use_reentrant=reentrant)
            y.square().sum().backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
        assert_close(found[1], found[0])
    return mesh.device.type


def axis_of_one() -> Any:
    """An axis of one rank whose link is really asked."""
    axis = copy.copy(mc.make_mesh({"a": 1}).axis("a"))
    axis.link = link_of_one(axis.mesh)
    return axis


def tree_on_two_devices() -> str:
    """pvary of leaves on the CPU and on the device, in two threads of autograd's; the first pass finds out the order."""
    mc.init()
    axis = axis_of_one()
    places = [torch.device("cpu"), axis.mesh.device] * 4
    leaves = [torch.full((64, 64), 0.01 * (i + 1)).to(place).requires_grad_() for i, place in enumerate(places)]
    for _ in range(10):
        varied = overlap.vary_tree(leaves, axis, 1e-3)
        total = torch.stack([(x.sin().sum() * (i + 1)).cpu() for i, x in enumerate(varied)]).sum()
        for i, (x, g) in enumerate(zip(leaves, torch.autograd.grad(total, leaves), strict=True)):
            assert g.device == x.device
            assert_close(g, x.detach().cos() * (i + 1))
    return str(axis.mesh.device.type)


def on_several_streams() -> str:
    """Works begun on one stream and waited for on another; their memory is given away meanwhile."""
    mc.init()
    axis = axis_of_one()
    link, where = axis.link, axis.mesh.device
    x = torch.ones(1 << 20, device=where)
    link.all_reduce(x, "sum")
    others = [torch.Stream(where) for _ in range(3)] if where.type == "cuda" else [None] * 3
    for number in range(20):
        with for_later():
            work = link.all_reduce(x * number, "sum")
        with accelerator.on(others[number % 3]):
            y = work.wait(None) if isinstance(work, Pending) else work
            del work
            for _ in range(20):
                y = y + 1
            total = y.sum()
        del y
        spoiled = [torch.full((1 << 20,), -1.0, device=where) for _ in range(4)]
        del spoiled
        with accelerator.on(others[number % 3]):
            assert total.item() == (number + 20) * (1 << 20)
    return str(where.type)


def queued_on_the_device() -> str:
    """What the device has not come through is queued; its own backlog is nobody's lateness."""
    mc.init()
    axis = axis_of_one()
    link, where = axis.link, axis.mesh.device
    x = torch.ones(1000, device=where)
    link.all_reduce(x, "sum")
    if where.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9))  # about a second
    link.all_reduce(x, "sum")
    state = recorder.state_of(link.log.last)
    with for_later():
        work = link.all_reduce(x, "max")
    assert state == ("queued" if where.type == "cuda" else "completed")
    if where.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9))
        with for_later():
            late = link.all_reduce(x, "sum")
        assert_close(late.wait(0.2), x)  # though the device comes to it after a second
    assert_close(work.wait(None) if isinstance(work, Pending) else work, x)
    if where.type == "cuda":
        torch.cuda.synchronize()
    assert all(recorder.state_of(record) == "completed" for record in link.log.records if record[recorder.THREAD])
    return str(where.type)


def given_up() -> str:
    """A backend that is ended refuses what comes after, and the device goes on. To be the last one in its process."""
    mc.init()
    axis = axis_of_one()
    link, where = axis.link, axis.mesh.device
    x = torch.ones(1000, device=where)
    link.all_reduce(x, "sum")
    if where.type == "cuda":
        link.end_backend("all_reduce", where)
        for call in (lambda: link.all_reduce(x, "sum"), lambda: link.all_gather(x), lambda: link.broadcast(x, 0)):
            with pytest.raises(mc.CommError, match="was given up"):
                call()
    assert x.sum().item() == 1000
    return str(where.type)
