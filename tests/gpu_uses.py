"""What users do with a device, as programs of ranks: streams of their own, set_device, checkpoints, offload, leaves on two
devices. Run by test_gpu_uses.py on the accelerator, and on the CPU where there is none.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from gpu_programs import device, link_of_one, real, same
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import data_parallel, fully_shard
from meshcomm.parallel.checkpoint import load, save


def on(stream: Any) -> Any:
    """What is done inside goes on this stream; the CPU has none."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def mesh_here() -> mc.Mesh:
    """Of two ranks of this process, that compute on the device."""
    with torch.device(device()):
        return mc.make_mesh({"a": 2})


def own_streams() -> str:
    """A call is in order with the stream that is current, begun on one stream and waited for on another."""
    mc.init()
    mesh = mc.make_mesh({"a": 1})
    mesh.axis("a").link = link_of_one(mesh)
    first, second = [torch.cuda.Stream() if mesh.device.type == "cuda" else None for _ in range(2)]
    size = 1024 if first is not None else 16
    for later in (False, True):
        for _ in range(3):
            with on(first):
                x = torch.ones(size, size, device=mesh.device)
                for _ in range(10):
                    x = x @ x / size  # ones again, late
                if later:
                    work = mc.all_reduce(2 * x, "a", mesh=mesh, async_op=True)
                    more = mc.all_gather(3 * x, "a", mesh=mesh, async_op=True)
                    del x
                else:
                    y, z = mc.all_reduce(2 * x, "a", mesh=mesh), mc.all_gather(3 * x, "a", mesh=mesh)
            with on(second):
                if later:
                    y, z = work.wait(), more.wait()
                elif second is not None:
                    second.wait_stream(first)
                total = (y + z).sum()
                torch.full((size, size), 9.0, device=mesh.device)  # memory that is let go too early is taken by this
            assert total.item() == 5 * size * size
    return mesh.device.type


def own_device() -> list[Any]:
    """Each rank sets a device of its own, and finds it again after calls in which others had theirs."""
    mesh = mc.make_mesh({"a": 2})
    count = torch.accelerator.device_count() if device().type == "cuda" else 0
    index = mesh.rank % count if count else 0
    if count:
        torch.accelerator.set_device_index(index)
    x = torch.full((3,), 1.0 + mesh.rank, device=device())
    found = []
    for _ in range(3):
        y = mc.all_reduce(x, "a", mesh=mesh)
        found.append(
            (y.device == x.device, y.tolist(), torch.accelerator.current_device_index() == index if count else True)
        )
    return found


def model_of(where: torch.device, wide: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]).to(where, wide)


def step_of(model: nn.Module, adam: torch.optim.Optimizer, number: int, mesh: mc.Mesh | None) -> float:
    """One step on this rank's rows; the mean of the loss over all rows."""
    rows = torch.linspace(-1, 1, 8 * 16, dtype=real()).view(8, 16).roll(number, 0).to(device())
    rows = rows if mesh is None else rows.chunk(mesh.size)[mesh.rank]
    loss = (model(rows) - number).square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    loss = loss.detach()
    return float(loss if mesh is None else mc.all_reduce(loss, "a", "mean", mesh=mesh))


def expected(steps: int) -> list[float]:
    model = model_of(device(), real())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [step_of(model, adam, number, None) for number in range(steps)]


def checkpointed(offload: bool, folder: str) -> None:
    """Saved and put into a model that begins elsewhere: it goes on as the one on one rank, and shards stay where they are."""
    mesh = mesh_here()
    losses = []
    for part in range(2):
        model = model_of(device(), real())
        if part:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
        model = fully_shard(model, "a", grads="mean", units=["*"], offload=offload, mesh=mesh)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if part:
            load(folder, model, adam, mesh=mesh)
        losses += [step_of(model, adam, 2 * part + number, mesh) for number in range(2)]
        where = "cpu" if offload else device().type
        assert {p.device.type for p in model.parameters()} == {where}
        if offload and device().type == "cuda":
            assert all(p.is_pinned() for p in model.parameters() if p.numel())
        if not part:
            save(folder, model, adam, mesh=mesh)
    same(losses, expected(4), "losses")


def offloaded() -> None:
    """The numbers of one rank; weights are changed as soon as a pass has ended; what a load has replaced is pinned again."""
    mesh = mesh_here()
    found = []
    for sharded in (False, True):
        model = model_of(device(), real())
        if sharded:
            model = fully_shard(model, "a", grads="mean", units=["*"], offload=True, mesh=mesh)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for number in range(4):
            losses.append(step_of(model, adam, number, mesh if sharded else None))
            with torch.no_grad():
                model(torch.ones(1, 16, dtype=real(), device=device()))
                for p in model.parameters():
                    p.mul_(0.9)
            if number == 1 and sharded:
                state = {name: p.detach().clone() for name, p in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
                model(torch.ones(1, 16, dtype=real(), device=device()))
                adam_state = adam.state_dict()
                adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
                adam.load_state_dict(adam_state)
            if device().type == "cuda" and sharded:
                assert all(p.is_pinned() for p in model.parameters() if p.numel())
        found.append(losses)
    same(found[1], found[0], "losses")


def leaves_on_two_devices() -> None:
    """Gradients of a tree, of a model with a part on the CPU, and a reduction: each leaf stays on its device."""
    mesh = mesh_here()
    places = [torch.device("cpu"), device()]
    for _ in range(2):  # the first backward pass finds out the order
        tree = [torch.ones(4, dtype=real(), device=place, requires_grad=True) for place in places * 2]
        varied = mc.pvary(tree, "a", mesh=mesh, bucket_mb=1e-5)
        parts = [(leaf * (1 + mesh.rank) * (1 + at)).sum() for at, leaf in enumerate(varied)]
        sum(part.to(device()) for part in parts).backward()
        for at, leaf in enumerate(tree):
            assert leaf.grad is not None
            assert leaf.grad.device == leaf.device
            assert leaf.grad.eq(3.0 * (1 + at)).all()
    total = mc.all_reduce({"a": tree[0].detach(), "b": tree[1].detach()}, "a", "max", mesh=mesh)
    assert [total["a"].device, total["b"].device] == [leaf.device for leaf in tree[:2]]

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Linear(4, 4, dtype=real())
            self.there = nn.Linear(4, 1, dtype=real()).to(device())

        def forward(self, x: Tensor) -> Tensor:
            return self.there(self.here(x).to(device()))

    torch.manual_seed(0)
    plain = Parted()
    torch.manual_seed(0)
    model = data_parallel(Parted(), "a", grads="sum", mesh=mesh)
    rows = torch.linspace(0, 1, 16, dtype=real()).view(4, 4)
    for _ in range(2):
        for each, own in ((plain, rows), (model, rows.chunk(2)[mesh.rank])):
            each.zero_grad()
            each(own).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.device == p.device
        same(p.grad, q.grad)


def saved_and_loaded() -> None:
    """Both ways of keeping shards, each with a folder of its own."""
    for offload in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            mc.launch(checkpointed, ranks=2, args=(offload, folder))


def waits_of_the_host(missing: int) -> int:
    """How often the host waits in a backward pass in which that many leaves have no gradient."""
    mesh = mc.make_mesh({"a": 1})
    mesh.axis("a").link = link_of_one(mesh)
    waits = 0
    tree = [torch.ones(3, device=mesh.device, requires_grad=True) for _ in range(8)]
    for _ in range(2):
        varied = mc.pvary(tree, "a", mesh=mesh, bucket_mb=1e-5)
        loss = sum((leaf.sum() for leaf in varied[: 8 - missing]), torch.zeros((), device=mesh.device))
        torch.cuda.synchronize()
        with catching() as caught:
            torch.autograd.grad(loss, tree, allow_unused=True)
        waits = len(caught)
    return waits


@contextlib.contextmanager
def catching() -> Iterator[list[Any]]:
    """The host's waits, as torch warns of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def few_waits() -> list[int]:
    mc.init()
    return [waits_of_the_host(missing) for missing in (0, 2, 6)]
