"""On the accelerator: ranks of one process with backward and random states of their own, and NCCL on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, grid
from oracle import Oracle
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

pytestmark = pytest.mark.gpu
F64 = torch.float64
CASES64 = [case for case in CASES if F64 in case.dtypes]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def same(actual: Any, expected: Any, what: str = "") -> None:
    assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def weighted(y: Tensor) -> Tensor:
    return (y.sin() * torch.arange(1, y.numel() + 1, dtype=F64, device=y.device).view(y.shape)).sum()


def on_device(axis: Any) -> None:
    """Values and gradients of two orders equal those of the same ranks on the CPU."""
    mesh = mc.make_mesh(grid((2, 2)))
    oracle, here = Oracle(mesh.shape), device()
    for case in CASES64:
        found = []
        for place in (torch.device("cpu"), here):
            x = case.inputs(oracle, axis, F64)[mesh.rank].to(place).requires_grad_()
            y = case.call(x, axis, mesh)
            assert y.device == place
            (g,) = torch.autograd.grad(weighted(y), x, create_graph=True)
            (gg,) = torch.autograd.grad(weighted(g), x)
            found.append([each.detach().cpu() for each in (y, g, gg)])
        same(found[1], found[0], f"{case.name} over {axis!r} on rank {mesh.rank}")


@pytest.mark.parametrize("axis", ["a", ("b", "a")], ids=str)
def test_every_collective_with_two_derivatives(axis: Any) -> None:
    mc.launch(on_device, ranks=4, args=(axis,))


def trained(place: torch.device) -> list[Tensor]:
    """A tensor-parallel model whose layers wait for each other in backward."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    make = torch.Generator().manual_seed(mesh.coordinate["tp"])
    weights = [torch.randn(4, 4, generator=make, dtype=F64).to(place).requires_grad_() for _ in range(6)]
    x = torch.full((3, 4), 0.1 * (1 + mesh.coordinate["dp"]), dtype=F64, device=place)
    with mc.use_mesh(mesh):
        for w in weights:
            x = x + mc.all_reduce((mc.pvary(x, "tp") @ mc.pvary(w, "dp")).tanh(), "tp")
        loss = mc.all_reduce(x.square().mean(), "dp", "mean")
    loss.backward()
    return [loss.detach().cpu(), *(w.grad.cpu() for w in weights if w.grad is not None)]


def test_a_deep_backward_does_not_lock() -> None:
    expected = mc.launch(trained, ranks=4, args=(torch.device("cpu"),))
    found = mc.launch(trained, ranks=4, args=(device(),))
    assert len(found[0]) == 7
    for rank in range(4):
        same(found[rank], expected[rank], f"rank {rank}")


def draws() -> list[list[float]]:
    mesh = mc.make_mesh({"a": 4})
    found = []
    for _ in range(3):
        found.append(torch.rand(3, device=device()).tolist())
        mc.barrier("a", mesh=mesh)
    return found


def test_random_states_of_the_device_differ_and_come_back() -> None:
    torch.manual_seed(5)
    torch.rand(1, device=device())  # in use before the launch
    before = torch.get_device_module(device()).get_rng_state()
    first, again = (mc.launch(draws, ranks=4) for _ in range(2))
    assert first == again
    assert len({tuple(row) for rank in first for row in rank}) == 12
    after = torch.get_device_module(device()).get_rng_state()
    same(after, before)


def seeded_draws(meet: bool) -> list[list[float]]:
    mesh = mc.make_mesh({"a": 3})
    torch.manual_seed(mesh.rank)
    found = []
    for _ in range(3):
        found.append(torch.rand(2, device=device()).tolist())
        if meet:
            mc.barrier("a", mesh=mesh)
    return found


def test_a_change_over_does_not_disturb_the_devices_random_numbers() -> None:
    assert mc.launch(seeded_draws, ranks=3, args=(True,)) == mc.launch(seeded_draws, ranks=3, args=(False,))


def default_device() -> list[str]:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(2)
    return [
        mesh.device.type,
        x.device.type,
        mc.all_reduce(x, "a", mesh=mesh).device.type,
        mc.axis_index("a", mesh=mesh).device.type,
    ]


def test_the_default_device_is_taken_over() -> None:
    kind = device().type
    with torch.device(device()):
        assert mc.launch(default_device, ranks=2) == [[kind] * 4] * 2


def mixed_devices() -> None:
    """A tree with leaves on both devices; a message that lands on the mesh's device."""
    mesh = mc.make_mesh({"a": 2})
    tree = {"cpu": torch.ones(2) * mesh.rank, "device": torch.ones(3, device=device()) * mesh.rank}
    result = mc.all_reduce(tree, "a", mesh=mesh)
    assert result["cpu"].device.type == "cpu"
    assert result["device"].device == device()
    same([leaf.cpu() for leaf in result.values()], [torch.ones(2), torch.ones(3)])


def test_leaves_on_two_devices() -> None:
    mc.launch(mixed_devices, ranks=2)


def autocast_in_ranks() -> list[torch.dtype]:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(4, 4, device=device())
    mc.barrier("a", mesh=mesh)
    return [(x @ x).dtype]


def test_autocast_of_the_device_is_taken_over() -> None:
    with torch.autocast(device().type, dtype=torch.bfloat16):
        assert mc.launch(autocast_in_ranks, ranks=2) == [[torch.bfloat16]] * 2
    assert mc.launch(autocast_in_ranks, ranks=2) == [[torch.float32]] * 2


# ------------------------------------------------------------------------------------------------- processes, one rank


def one_rank() -> list[str]:
    """A mesh of one, and a group of one that is really asked: every primitive, on the device and on the CPU."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    oracle = Oracle(mesh.shape)
    for case in CASES64:
        x = case.inputs(oracle, "a", F64)[0]
        for place in (torch.device("cpu"), mesh.device):
            y = case.call(x.to(place), "a", mesh)
            assert y.device.type == place.type
            same(y.cpu(), case.reference(oracle, [x], "a")[0], case.name)
    flag = torch.ones(3, device=mesh.device)
    dist.all_reduce(flag)
    return [mesh.device.type, dist.get_backend_config()]


@pytest.fixture
def nccl() -> Callable[..., list[Any]]:
    if device().type != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    return lambda fn, *args: mc.launch(fn, ranks=1, args=args, runtime="processes", timeout=60)


def test_one_rank_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    ((kind, backends),) = nccl(one_rank)
    assert kind == "cuda"
    assert "nccl" in backends
    assert "cpu:gloo" in backends


def link_of_one() -> None:
    """The primitives by NCCL itself, which a mesh of one never calls."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    group_link = mc.runtime.processes.link_of((0,))  # type: ignore[attr-defined]
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


def test_the_primitives_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    nccl(link_of_one)


# --------------------------------------------------------------------------------------------------------------- later


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
        xs = [torch.randn(4, 3, dtype=F64).to(here).requires_grad_() for _ in calls]
        ys = [call(x, **({"async_op": True} if later else {})) for call, x in zip(calls, xs, strict=True)]
        if later:
            ys = [y.wait() for y in reversed(ys)][::-1]
        grads = torch.autograd.grad(sum(weighted(y) for y in ys), xs)
        found.append([each.detach().cpu() for each in (*ys, *grads)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("axis", ["a", ("b", "a")], ids=str)
def test_works_of_ranks_in_one_process(axis: Any) -> None:
    mc.launch(later_on_device, ranks=4, args=(axis,))


def sums_during_backward() -> None:
    """pvary of a tree on the device, twice, for the first pass finds out the order."""
    mesh = mc.make_mesh({"a": 2})
    torch.manual_seed(0)
    tree = {f"w{i}": torch.randn(8, 8, dtype=F64).to(device()).requires_grad_() for i in range(6)}
    x = torch.full((3, 8), 1.0 + mesh.rank, dtype=F64, device=device())
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


def test_sums_during_backward() -> None:
    mc.launch(sums_during_backward, ranks=2)


def later_on_one_rank() -> None:
    """NCCL's own works through a link that a mesh of one never uses: waits order streams, time-outs do not end it."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    link = mc.runtime.processes.link_of((0,)).later()  # type: ignore[attr-defined]
    x = torch.randn(1 << 20, device=mesh.device)
    busy = torch.randn(4096, 4096, device=mesh.device)
    for _ in range(20):
        busy = (busy @ busy).tanh()
    pending = [link.all_reduce(x, "sum"), link.all_gather(x), link.broadcast(x, 0), link.all_reduce(x, "mean")]
    assert not pending[0].done()  # the host is ahead of the device
    values = [each.wait(None) for each in pending]
    assert not torch.cuda.current_stream().query()  # and the waits have not held it up
    pending[-1].wait(60.0)
    for value in values:
        assert_close(value.view(-1), x)
    assert all(each.done() for each in pending)


def test_works_on_nccl(nccl: Callable[..., list[Any]]) -> None:
    nccl(later_on_one_rank)
