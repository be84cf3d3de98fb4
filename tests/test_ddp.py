"""Data parallelism against the unsharded model in float64, against torch's own, and what is sent for it."""

from __future__ import annotations

import contextlib
import copy
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel.batch_norm import SyncBatchNorm, convert_batch_norm, sync_batch_norm
from meshcomm.parallel.data.ddp import data_parallel, join
from meshcomm.parallel.data.micro_batches import no_sync
from meshcomm.spmd.types.check_vma import check_vma, mark_varying

F64 = torch.float64
MESHES: dict[Any, tuple[dict[str, int], Any]] = {
    2: ({"dp": 2}, "dp"),
    4: ({"dp": 4}, "dp"),
    "2x2": ({"replica": 2, "dp": 2}, ("replica", "dp")),
    1: ({"dp": 1}, "dp"),
}


class Net(nn.Module):
    """Layers, one of them used twice, a frozen one, one that nothing uses, and a buffer that counts."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=F64)
        self.mid = nn.Linear(8, 8, dtype=F64)
        self.again = self.mid
        self.frozen = nn.Linear(8, 8, dtype=F64).requires_grad_(False)
        self.unused = nn.Linear(3, 3, dtype=F64)
        self.down = nn.Linear(8, 2, bias=False, dtype=F64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        x = torch.tanh(self.up(x))
        return self.down(self.frozen(torch.tanh(self.again(torch.tanh(self.mid(x))))))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


def whole(steps: int = 3, rows: int = 8) -> Tensor:
    return torch.randn(steps, rows, 6, dtype=F64, generator=torch.Generator().manual_seed(5))


def seeded(make: Callable[[], nn.Module], seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return make()


def local(x: Tensor, mesh: mc.Mesh) -> Tensor:
    return x.chunk(mesh.size)[mesh.rank]


def same(a: nn.Module, b: nn.Module) -> None:
    """Parameters and their gradients."""
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        assert_close(p, q, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=lambda text: f"gradient of {name}: {text}")


@contextlib.contextmanager
def notes(mesh: mc.Mesh, axis: Any) -> Iterator[list[Any]]:
    """What the in-process link is told."""
    seen: list[Any] = []
    link = mesh.axis(axis).link
    listen = link.announce

    def announce(note: Any) -> None:
        seen.append(note)
        listen(note)

    link.announce, link.briefly = announce, False  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del vars(link)["announce"], vars(link)["briefly"]


# ---------------------------------------------------------------------------------------------------- training


def training(shape: dict[str, int], axis: Any, grads: Any) -> None:
    mesh = mc.make_mesh(shape)
    alone = seeded(Net)
    torch.manual_seed(100 + mesh.rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # made before
    names = [name for name, _ in model.named_parameters()]
    if mesh.rank == 0:
        model.load_state_dict(alone.state_dict())
    assert data_parallel(model, axis, grads=grads, mesh=mesh, bucket_mb=3e-4) is model
    same(model, alone)
    assert [name for name, _ in model.named_parameters()] == names
    other = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for x in whole():
        expected = alone(x).square().sum() / len(x)
        expected.backward()
        mine = local(x, mesh)
        loss = model(mine).square().sum()
        if grads == "sum":
            loss = mc.all_reduce(loss / len(x), axis, mesh=mesh)
            assert_close(loss, expected)
        else:
            loss = loss / len(mine)
        loss.backward()
        same(model, alone)
        assert model.unused.weight.grad is None
        assert model.frozen.weight.grad is None
        optimizer.step()
        other.step()
        same(model, alone)
        optimizer.zero_grad()
        other.zero_grad()
    assert model.calls == 3


@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.parametrize("size", list(MESHES))
def test_training_is_that_of_one_rank(size: Any, grads: str) -> None:
    shape, axis = MESHES[size]
    mc.launch(training, ranks=mc.make_mesh(shape).size, args=(shape, axis, grads))


# ------------------------------------------------------------------------------------- against torch's own


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4, dtype=F64), nn.BatchNorm1d(4, dtype=F64), nn.Linear(4, 2, dtype=F64))


def beside_torchs(kind: str) -> None:
    """The same steps with DistributedDataParallel in the same processes."""
    mesh = mc.make_mesh({"dp": 4})
    make: Callable[[], nn.Module] = Net
    if kind == "batch norm":
        make = Normed
    ours, inner = seeded(make), seeded(make, 1 if mesh.rank == 0 else 7)
    theirs = DistributedDataParallel(inner, bucket_cap_mb=1, find_unused_parameters=True)
    grads: Any = "sum" if kind == "sum" else "mean"
    data_parallel(ours, "dp", grads=grads, mesh=mesh, bucket_mb=3e-4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    accumulate = 2 if kind == "accumulated" else 1
    for step, x in enumerate(whole(steps=4)):
        mine = local(x, mesh)
        last = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else no_sync(ours):
            loss = ours(mine).square().mean()
            (mc.all_reduce(loss, "dp", "mean", mesh=mesh) if grads == "sum" else loss).backward()
        with contextlib.nullcontext() if last else theirs.no_sync():
            theirs(mine).square().mean().backward()
        same(ours, inner)
        if last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same(ours, inner)
    if mesh.rank == 0:
        assert_close(dict(ours.named_buffers()), dict(inner.named_buffers()))


@pytest.mark.parametrize("kind", ["sum", "mean", "accumulated", "batch norm"])
def test_equal_to_torchs(pool4: Any, kind: str) -> None:
    pool4.run(beside_torchs, kind)


def halves_on_processes() -> None:
    halves_on_the_way(mc.make_mesh({"dp": 4}))


def test_gradients_travel_as_bfloat16_on_processes(pool4: Any) -> None:
    pool4.run(halves_on_processes)


# ------------------------------------------------------------------------------------------------- accumulation


def accumulating(grads: Any, before: str) -> None:
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(Net), seeded(Net)
    data_parallel(model, "dp", grads=grads, mesh=mesh)
    scale = mesh.size if grads == "mean" else 1

    def backward(x: Tensor) -> None:
        (model(local(x, mesh)).square().sum() * scale).backward()
        alone(x).square().sum().backward()

    a, b, c = whole()
    if before == "reduced":
        backward(a)
    elif before == "zeros":
        for p in [*model.parameters(), *alone.parameters()]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    with no_sync(model):
        backward(a)
        with no_sync(model):
            backward(b)
    with pytest.raises(AssertionError):
        same(model, alone)
    backward(c)
    same(model, alone)
    backward(a)  # what was collected is not counted again
    same(model, alone)


@pytest.mark.parametrize("before", ["nothing", "zeros", "reduced"])
@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_micro_steps_without_reduction(grads: str, before: str) -> None:
    mc.launch(accumulating, ranks=2, args=(grads, before))


def sends_once() -> int:
    mesh = mc.make_mesh({"dp": 2})
    model = data_parallel(seeded(Net), "dp", grads="sum", mesh=mesh, buffers="leave")
    model(local(whole()[0], mesh)).sum().backward()  # learns the order
    with notes(mesh, "dp") as seen:
        with no_sync(model):
            for x in whole():
                model(local(x, mesh)).sum().backward()
        assert seen == []
        model.zero_grad()
        model(local(whole()[0], mesh)).sum().backward()
    return len([note for note in seen if note.what == "all_reduce"])


def test_micro_steps_send_nothing() -> None:
    assert mc.launch(sends_once, ranks=2) == [1, 1]


def collected_in_other_orders() -> None:
    """A forward pass without a backward pass between; a backward pass that waits meanwhile; one that runs twice."""
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(Net), seeded(Net)
    data_parallel(model, "dp", grads="sum", mesh=mesh)
    a, b, c = whole()
    with no_sync(model):
        model(local(a, mesh)).square().sum().backward()
    model(local(c, mesh))
    waiting = model(local(b, mesh)).square().sum()
    with no_sync(model):
        model(local(c, mesh)).square().sum().backward()
    waiting.backward(retain_graph=True)
    for x in (a, b, c):
        alone(x).square().sum().backward()
    same(model, alone)
    waiting.backward()
    alone(b).square().sum().backward()
    same(model, alone)


def test_micro_steps_in_other_orders() -> None:
    mc.launch(collected_in_other_orders, ranks=2)


def collected_for_the_unused() -> None:
    """A parameter that is used in the micro-steps only, and zero_grad between."""
    mesh = mc.make_mesh({"dp": 2})
    model = data_parallel(
        nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)}), "dp", grads="sum", mesh=mesh, methods=("get",)
    )
    a = lambda: model.get("a").sum()  # noqa: E731
    b = lambda: model.get("b").sum()  # noqa: E731
    with no_sync(model):
        (b() * (1 + mesh.rank)).backward()
    a().backward()
    assert model["a"].grad.tolist() == [2, 2]
    assert model["b"].grad.tolist() == [3, 3]
    model.zero_grad()
    with no_sync(model):
        b().backward()
    model.zero_grad()
    a().backward()
    assert model["a"].grad.tolist() == [2, 2]
    assert model["b"].grad is None


def test_what_was_collected_for_what_is_not_used() -> None:
    mc.launch(collected_for_the_unused, ranks=2)


# ------------------------------------------------------------------------------------------------ unused, uneven


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=F64) for _ in range(4))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for i in which:
            x = self.parts[i](x)
        return x


def branching(bucket_mb: float) -> None:
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(Branches), seeded(Branches)
    data_parallel(model, "dp", grads="sum", mesh=mesh, bucket_mb=bucket_mb)
    uses = [([0, 1], [1, 0]), ([0], [3]), ([3, 0], [0, 1]), ([1], [1])]
    for both in uses:
        for rank, which in enumerate(both):
            alone(torch.full((1, 2), 1.0 + rank, dtype=F64), which).square().sum().backward()
        model(torch.full((1, 2), 1.0 + mesh.rank, dtype=F64), both[mesh.rank]).square().sum().backward()
        same(model, alone)
        assert model.parts[2].weight.grad is None
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_ranks_that_use_other_parameters(bucket_mb: float) -> None:
    mc.launch(branching, ranks=2, args=(bucket_mb,))


def running_out(grads: Any, counts: list[int], with_step: bool) -> list[Tensor]:
    mesh = mc.make_mesh({"dp": len(counts)})
    model, alone = seeded(Net), seeded(Net)
    data_parallel(model, "dp", grads=grads, mesh=mesh, bucket_mb=3e-4)
    mine, other = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone))

    def step() -> None:
        mine.step()
        mine.zero_grad()

    data = whole(steps=4, rows=2 * mesh.size)
    for _ in range(2):  # two epochs: the optimiser's state matters
        with join(model, step=step if with_step else None):
            for x in data[: counts[mesh.rank]]:
                model(local(x, mesh)).square().sum().backward()
                step()
        for number, x in enumerate(data[: max(counts)]):
            rows = torch.cat([x.chunk(mesh.size)[rank] for rank, count in enumerate(counts) if number < count])
            loss = alone(rows).square().sum()
            (loss if grads == "sum" else loss / mesh.size).backward()
            other.step()
            other.zero_grad()
        if with_step or mesh.rank == counts.index(max(counts)):
            same(model, alone)
        if not with_step:
            break
    return [x.detach() for x in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("with_step", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize(
    ("grads", "counts"), [("sum", [1, 3]), ("mean", [3, 0]), ("sum", [2, 4, 1, 4]), ("sum", [0, 0])]
)
def test_ranks_that_run_out_of_data(grads: str, counts: list[int], with_step: bool) -> None:
    found = mc.launch(running_out, ranks=len(counts), args=(grads, counts, with_step))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_ranks_that_run_out_of_data_on_processes(pool4: Any) -> None:
    pool4.run(running_out, "mean", [2, 4, 1, 4], True)


def collected_and_done() -> None:
    """What a rank has collected when its data ends goes with the next reduction of the others."""
    mesh = mc.make_mesh({"dp": 2})
    model = data_parallel(seeded(lambda: nn.Linear(1, 1, bias=False)), "dp", grads="sum", mesh=mesh)
    with join(model, step=lambda: None):
        if mesh.rank == 0:
            with no_sync(model):
                model(torch.tensor([[5.0]])).sum().backward()
        else:
            model(torch.tensor([[1.0]])).sum().backward()
    assert model.weight.grad.item() == 6.0


def test_what_was_collected_when_data_ended() -> None:
    mc.launch(collected_and_done, ranks=2)


# -------------------------------------------------------------------------------------------------------- options


def halves_on_the_way(mesh: mc.Mesh) -> None:
    n = mesh.size
    model = nn.Linear(3, 1, bias=False)
    data_parallel(model, "dp", grads="mean", mesh=mesh, reduce_dtype=torch.bfloat16)
    x = torch.tensor([[1.0 + 2.0**-6, 1 + 2.0**-10, 3.0]]) + mesh.rank
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        halves = [(x - mesh.rank + rank).to(torch.bfloat16).double() for rank in range(n)]
        total = sum(halves).to(torch.bfloat16)
        expected = total.float() / n if n == 2 else (sum(halves) / n).to(torch.bfloat16).float()
        assert model.weight.grad.dtype == torch.float32
        assert_close(model.weight.grad, expected, rtol=2**-8, atol=0)
        assert model.weight.grad.equal(model.weight.grad.to(torch.bfloat16).float())
        exact = x - mesh.rank + (n - 1) / 2
        assert not model.weight.grad.equal(exact)


def compressed() -> None:
    mesh = mc.make_mesh({"dp": 2})
    halves_on_the_way(mesh)
    for dtype in (torch.bfloat16, None):
        model = data_parallel(nn.Linear(3, 1), "dp", grads="mean", mesh=mesh, reduce_dtype=dtype)
        with notes(mesh, "dp") as seen:
            model(torch.ones(1, 3)).sum().backward()
        assert {note.dtype for note in seen if note.what == "all_reduce"} == {dtype or torch.float32}


def test_gradients_travel_as_bfloat16() -> None:
    mc.launch(compressed, ranks=2)


def in_buckets(bucket_mb: float) -> int:
    mesh = mc.make_mesh({"dp": 2})
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    data_parallel(model, "dp", grads="sum", mesh=mesh, bucket_mb=bucket_mb)
    for _ in range(2):
        with notes(mesh, "dp") as seen:
            model(torch.ones(1, 16)).sum().backward()
    return len([note for note in seen if note.what == "all_reduce"])


@pytest.mark.parametrize(("kib", "count"), [(1, 6), (2, 3), (25000, 1)])
def test_the_number_of_buckets(kib: float, count: int) -> None:
    assert mc.launch(in_buckets, ranks=2, args=(kib / 1024,)) == [count, count]


def buffers(how: Any) -> list[float]:
    mesh = mc.make_mesh({"dp": 2})
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    model[0].running_mean.fill_(7.0 + mesh.rank)
    data_parallel(model, "dp", grads="mean", mesh=mesh, buffers=how)
    found = [model[0].running_mean.item()]
    rows = torch.tensor([[1.0], [3.0]]) * (1 + mesh.rank)
    model(rows)
    found.append(model[0].running_mean.item())
    model.eval()
    with notes(mesh, "dp") as seen:
        model(rows)
    assert seen == []
    return found


def test_buffers() -> None:
    assert mc.launch(buffers, ranks=2, args=("broadcast",)) == [[7.0, 2.0], [7.0, 2.0]]
    assert mc.launch(buffers, ranks=2, args=("leave",)) == [[7.0, 2.0], [7.0, 4.0]]


def buffers_of_who_goes_on() -> float:
    """Rank 0 has no data, and 1 has."""
    mesh = mc.make_mesh({"dp": 2})
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    data_parallel(model, "dp", grads="mean", mesh=mesh)
    with join(model, step=lambda: None):
        for _ in range(mesh.rank):
            model(torch.tensor([[4.0], [6.0]])).sum().backward()
    return model[0].running_mean.item()


def test_buffers_are_those_of_who_has_data() -> None:
    assert mc.launch(buffers_of_who_goes_on, ranks=2) == [5.0, 5.0]


class Masked(nn.Module):
    """A buffer that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.tensor([1.0, 0.0]))

    def forward(self) -> Tensor:
        return (self.weight * self.mask).sum()


def saved_buffers() -> None:
    mesh = mc.make_mesh({"dp": 2})
    model = data_parallel(Masked(), "dp", grads="sum", mesh=mesh)
    first, second = model(), model()  # between them the buffer is written
    (first + second).backward()
    assert model.weight.grad.tolist() == [4.0, 0.0]


def test_buffers_that_autograd_has_saved() -> None:
    mc.launch(saved_buffers, ranks=2)


# ------------------------------------------------------------------------------------------- a module as before


def as_before() -> None:
    mesh = mc.make_mesh({"dp": 2})
    model = seeded(Net)
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.up.register_forward_pre_hook(lambda *_: seen.append("up"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = list(model.parameters())
    data_parallel(model, "dp", grads="sum", mesh=mesh)
    assert type(model) is Net
    assert_close(dict(model.state_dict()), before)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    x = whole()[0]
    y = model(x)
    assert seen == ["up", "after"]
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    y.sum().backward()
    # Methods that are not named: the values are right, gradients are local.
    model.zero_grad()
    (model.encode(x).sum() * (1 + mesh.rank)).backward()
    mine = model.up.weight.grad
    everyone = mc.all_gather(mine[None], "dp", mesh=mesh)
    assert_close(everyone[1], 2 * everyone[0])
    # An error in the middle.
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5, dtype=F64))
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    # Nothing happens without gradients.
    with torch.no_grad(), notes(mesh, "dp") as told:
        model(x)
    assert told == []
    # A copy is a replica of its own.
    model.zero_grad()
    twin = copy.deepcopy(model)
    twin(x * (1 + mesh.rank)).sum().backward()
    assert model.up.weight.grad is None
    grads = mc.all_gather(twin.up.weight.grad[None], "dp", mesh=mesh)
    assert torch.equal(grads[0], grads[1])
    # Replaced after the fact.
    model.down = nn.Linear(8, 2, dtype=F64)
    with torch.no_grad():
        model.down.weight.fill_(1.0)
    model(x * (1 + mesh.rank)).sum().backward()
    grads = mc.all_gather(model.down.weight.grad[None], "dp", mesh=mesh)
    assert torch.equal(grads[0], grads[1])


def test_everything_else_is_as_before() -> None:
    mc.launch(as_before, ranks=2)


def named_methods() -> None:
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(Net), seeded(Net)
    data_parallel(model, "dp", grads="sum", mesh=mesh, methods=("forward", "encode"))
    x = whole()[0]
    model.encode(local(x, mesh)).square().sum().backward()
    alone.encode(x).square().sum().backward()
    same(model, alone)


def test_methods_by_name() -> None:
    mc.launch(named_methods, ranks=2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 4, num_layers=2, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.encode, x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(self.rest, x, use_reentrant=False)

    def rest(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(x)))


class Reentrant(nn.Module):
    """Layers, some of which are computed again in backward; ``how`` says which, and ``deep`` by checkpoints in one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.parts = nn.ModuleList(nn.Linear(6, 6, dtype=F64) for _ in range(4))
        self.norm = nn.LayerNorm(6, dtype=F64)

    def part(self, at: int, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.parts[at](x)))

    def again(self, at: int, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.part, at, x, use_reentrant=True)

    def mixed(self, x: Tensor, table: Tensor) -> Tensor:
        """A parameter that comes in from outside, as an argument that no checkpoint takes out of its graph."""
        return self.part(0, x) @ table

    def deep(self, x: Tensor) -> Tensor:
        return self.again(1, self.again(0, x))

    def forward(self, x: Tensor) -> Any:
        if self.how == "none":
            return self.part(1, self.part(0, x))
        if self.how == "all":
            return self.again(1, self.again(0, x.requires_grad_()))
        if self.how == "given":
            mixed = functools.partial(self.mixed, table=self.parts[2].weight)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(mixed, self.norm(x), use_reentrant=True)
            return self.part(1, x)
        if self.how == "deep":
            return {"found": torch.utils.checkpoint.checkpoint(self.deep, self.part(2, x), use_reentrant=True)}
        return [self.part(0, self.again(0, self.part(2, x)))]  # one of them in a checkpoint and outside


def summed(found: Any) -> Tensor:
    return next(iter(found.values() if isinstance(found, dict) else found)).square().sum()


def reentrant(how: str, grads: Any) -> None:
    mesh = mc.make_mesh({"dp": 4})
    model, alone = seeded(lambda: Reentrant(how)), seeded(lambda: Reentrant(how))
    data_parallel(model, "dp", grads=grads, mesh=mesh, bucket_mb=0.0001)
    share = 1 if grads == "sum" else 1 / 4
    for step, x in enumerate(whole(6)):
        rows = torch.stack([local(part, mesh) for part in x.chunk(2)])
        with no_sync(model) if step % 2 else contextlib.nullcontext():
            summed(model(rows[0].clone())).backward()
        summed(model(rows[1].clone())).backward()
        for part in x.chunk(2):
            for mine in part.chunk(4):
                (summed(alone(mine.clone())) * share).backward()
        same(model, alone)
        if step % 3:  # else more is added to what is there
            model.zero_grad()
            alone.zero_grad()
    assert model.parts[3].weight.grad is None


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", ["none", "some", "all", "given", "deep"])
def test_parts_are_computed_again_by_reentrant_checkpoints(run4: Any, how: str, grads: str) -> None:
    run4(reentrant, how, grads)


def switched(how: str, passes: int) -> None:
    """Checkpoints that are off at first; each graph is gone through twice, if ``passes`` is 2."""
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(lambda: Reentrant("none")), seeded(lambda: Reentrant("none"))
    data_parallel(model, "dp", grads="sum", mesh=mesh)

    def backward(of: nn.Module, x: Tensor) -> None:
        loss = summed(of(x.clone()))
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)

    for step, x in enumerate(whole(5)):
        model.how = alone.how = how if step in (1, 2, 4) else "none"
        with no_sync(model) if step == 2 else contextlib.nullcontext():
            backward(model, local(x, mesh)[None])
        for part in x.chunk(2):
            backward(alone, part[None])
        if step != 2:
            same(model, alone)
        if step == 3:
            model.zero_grad()
            alone.zero_grad()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["some", "all", "given", "deep"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_may_be_switched_on_later_and_gone_through_twice(how: str, passes: int) -> None:
    mc.launch(switched, 2, (how, passes))


def checkpoints_under_a_mean_over_more() -> None:
    mesh = mc.make_mesh({"dp": 1, "ep": 2})
    model = data_parallel(Reentrant("deep"), "dp", grads="mean", mean_over=("dp", "ep"), mesh=mesh)
    with pytest.raises(mc.MeshError, match="a reentrant checkpoint[\\s\\S]*use_reentrant=False"):
        model(torch.ones(2, 6, dtype=F64))


def test_reentrant_checkpoints_under_a_mean_over_more_are_refused() -> None:
    mc.launch(checkpoints_under_a_mean_over_more, 2)


def passes_apart() -> None:
    """Gradients that are there before, or come in a pass of their own, are none of a checkpoint's."""
    mesh = mc.make_mesh({"dp": 2})
    branches = data_parallel(seeded(Branches), "dp", grads="sum", mesh=mesh)
    x = torch.ones(1, 2, dtype=F64)
    first, second = branches(x, [0, 1]), branches(x, [2])
    first.sum().backward()
    second.sum().backward()
    branches(x, [3]).sum().backward()


def test_gradients_of_other_passes_are_not_refused() -> None:
    mc.launch(passes_apart, ranks=2)


def compiled() -> None:
    """Around the module and inside."""
    mesh = mc.make_mesh({"dp": 2})
    found = []
    for how in ("plain", "around", "inside"):
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 8, dtype=F64), nn.Tanh(), nn.Linear(8, 2, dtype=F64)))
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "inside" else model
        data_parallel(run, "dp", grads="mean", mesh=mesh)
        if how == "around":
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        run(local(whole()[0], mesh)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.thorough
def test_compiled_on_processes(pool2: Any) -> None:
    pool2.run(compiled)


def other_modules(make: Callable[[], nn.Module]) -> None:
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(make), seeded(make)
    data_parallel(model, "dp", grads="sum", mesh=mesh)
    for x in whole(steps=2):
        model(local(x, mesh)[None]).square().sum().backward()
        sum(alone(part[None]).square().sum() for part in x.chunk(2)).backward()  # type: ignore[union-attr]
        same(model, alone)


@pytest.mark.parametrize("make", [Recurrent, Checkpointed])
def test_other_kinds_of_modules(make: Callable[[], nn.Module]) -> None:
    mc.launch(other_modules, ranks=2, args=(make,))


def derivatives(grads: Any) -> None:
    """torch.autograd.grad, a gradient of a gradient, torch.func, per-sample gradients."""
    mesh = mc.make_mesh({"dp": 2})
    model, alone = seeded(Net), seeded(Net)
    model.counts = alone.counts = False  # which torch.func does not allow
    data_parallel(model, "dp", grads=grads, mesh=mesh, buffers="leave")
    n = mesh.size if grads == "mean" else 1
    x = whole()[0]
    mine = local(x, mesh)
    used = [name for name, p in alone.named_parameters() if p.requires_grad and not name.startswith("unused")]

    def pick(model: nn.Module) -> list[Tensor]:
        return [model.get_parameter(name) for name in used]

    found = torch.autograd.grad(model(mine).square().sum(), pick(model), create_graph=True)
    wanted = torch.autograd.grad(alone(x).square().sum(), pick(alone), create_graph=True)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a * n, b)
    sum((g * n).square().sum() for g in found).backward()  # type: ignore[union-attr]
    sum(g.square().sum() for g in wanted).backward()  # type: ignore[union-attr]
    for a, b in zip(pick(model), pick(alone), strict=True):
        assert_close(a.grad * n, b.grad)

    def loss(params: dict[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    params = {name: alone.get_parameter(name).detach() for name in used}
    found_tree = torch.func.grad(loss)(params, model, mine)
    wanted_tree = torch.func.grad(loss)(params, alone, x)
    for name in used:
        assert_close(found_tree[name] * n, wanted_tree[name])
    value, tangent = torch.func.jvp(lambda p: loss(p, model, mine), (params,), (params,))
    wanted_value, wanted_tangent = torch.func.jvp(lambda p: loss(p, alone, mine), (params,), (params,))
    assert_close((value, tangent), (wanted_value, wanted_tangent))


@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_derivatives_of_other_kinds(grads: str) -> None:
    mc.launch(derivatives, ranks=2, args=(grads,))


def checked(mode: bool | str, grads: Any) -> None:
    """The checker finds nothing to mend, and micro-steps come to the same sums."""
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh):
        model = seeded(lambda: nn.Linear(3, 1, bias=False))
        with check_vma(mode):
            mark_varying(model.weight, ())
            data_parallel(model, "dp", grads=grads)
            x = torch.ones(1, 3) + mc.axis_index("dp")
            with no_sync(model):
                model(x).sum().backward()
            loss = model(x).sum()
            (mc.all_reduce(loss, "dp") if grads == "sum" else loss).backward()
        assert model.weight.grad.tolist() == [[6.0 if grads == "sum" else 3.0] * 3]
        with no_sync(model):
            model(x).sum().backward()
        with check_vma(mode), pytest.raises(mc.MeshError, match="collected before cannot be reduced under check_vma"):
            model(x)


@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.parametrize("mode", [True, "error"])
def test_under_the_checker(mode: bool | str, grads: str) -> None:
    mc.launch(checked, ranks=2, args=(mode, grads))


# ---------------------------------------------------------------------------------------------------------- errors


def refused() -> None:
    mesh = mc.make_mesh({"dp": 2})
    kw: Any = {"grads": "sum", "mesh": mesh}
    for wrong, text in (
        ({"grads": "max"}, "grads='max' is none of 'sum', 'mean'"),
        ({"buffers": "keep"}, "buffers='keep' is none of"),
        ({"bucket_mb": 0}, "bucket_mb=0 is not a positive number"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8 is not a dtype"),
        ({"methods": ("forward", "walk")}, "no method 'walk'"),
        ({"methods": "forward"}, "is not a list of names"),
        ({"methods": ()}, "is not a list of names"),
    ):
        with pytest.raises(mc.MeshError, match=text):
            data_parallel(Net(), "dp", **{**kw, **wrong})
    with pytest.raises(mc.MeshError, match="no axis 'tp'"):
        data_parallel(Net(), "tp", **kw)
    with pytest.raises(mc.MeshError, match="not a torch.nn.Module but function"):
        data_parallel(F.relu, "dp", **kw)  # type: ignore[type-var]
    with pytest.raises(mc.MeshError, match="'weight' has no shape yet"):
        data_parallel(nn.LazyLinear(3), "dp", **kw)
    model = data_parallel(Net(), "dp", **kw)
    with pytest.raises(mc.MeshError, match="data parallel already"):
        data_parallel(model, "dp", **kw)
    with pytest.raises(mc.MeshError, match="neither data parallel nor sharded"), no_sync(Net()):
        pass
    with join(model), pytest.raises(mc.MeshError, match="a join inside a join"), join(model):
        pass
    normed = data_parallel(SyncBatchNorm(2, "dp", mesh=mesh), "dp", **kw)
    with pytest.raises(mc.MeshError, match="takes no part in a synchronised batch norm"), join(normed):
        pass
    with pytest.raises(
        mc.MeshError, match=r"differ between ranks.*\n.*'bias' .* on index 0; .* is a Linear on index 1"
    ):
        data_parallel(nn.Linear(2, 2, bias=mesh.rank == 0), "dp", **kw)
    with pytest.raises(mc.MeshError, match=r"differ between ranks.*\n.*weight' torch.float32 \(2, [23]\) on index"):
        data_parallel(nn.Linear(2 + mesh.rank, 2, bias=False), "dp", **kw)


def test_errors_on_every_rank() -> None:
    mc.launch(refused, ranks=2)


# ------------------------------------------------------------------------------------------------------ batch norm


def normalising(sizes: list[int], ndim: int, affine: bool, momentum: float | None) -> None:
    mesh = mc.make_mesh({"dp": len(sizes)})
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[ndim]
    alone = kind(3, affine=affine, momentum=momentum, dtype=F64)
    if affine:
        with torch.no_grad():
            alone.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
            alone.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
    model = convert_batch_norm(nn.Sequential(copy.deepcopy(alone)), "dp", mesh=mesh)
    assert type(model[0]) is SyncBatchNorm
    assert list(model[0].state_dict()) == list(alone.state_dict())
    data_parallel(model, "dp", grads="sum", mesh=mesh)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = 100 + torch.randn(sum(sizes), 3, *[2] * (ndim - 2), dtype=F64, generator=generator)
        g = torch.randn(x.shape, dtype=F64, generator=generator)
        mine, all_of_it = x.split(sizes)[mesh.rank].clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(mine), alone(all_of_it)
        assert_close(y, expected.split(sizes)[mesh.rank])
        (y * g.split(sizes)[mesh.rank]).sum().backward()
        (expected * g).sum().backward()
        assert_close(mine.grad, all_of_it.grad.split(sizes)[mesh.rank], rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
        if affine:
            assert_close(model[0].weight.grad, alone.weight.grad)
            assert_close(model[0].bias.grad, alone.bias.grad)
        assert_close(dict(model[0].named_buffers()), dict(alone.named_buffers()))
    model.eval()
    alone.eval()
    with notes(mesh, "dp") as seen:
        assert_close(model(x.split(sizes)[mesh.rank]), alone(x).split(sizes)[mesh.rank])
    assert seen == []


@pytest.mark.parametrize(
    ("sizes", "ndim", "affine", "momentum"),
    [([4, 4], 2, True, 0.1), ([5, 2, 0, 1], 4, True, 0.3), ([1, 1], 3, False, None), ([1, 3], 5, True, 0.1)],
)
def test_sync_batch_norm(sizes: list[int], ndim: int, affine: bool, momentum: float | None) -> None:
    mc.launch(normalising, ranks=len(sizes), args=(sizes, ndim, affine, momentum))


def normalising_halves() -> None:
    mesh = mc.make_mesh({"dp": 2})
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = sync_batch_norm(x.chunk(2)[mesh.rank], "dp", mesh=mesh)
    assert y.dtype == torch.bfloat16
    assert_close(
        y.float(), F.batch_norm(x.float(), None, None, training=True).chunk(2)[mesh.rank], rtol=1e-2, atol=1e-2
    )
    one = nn.BatchNorm1d(3)
    assert type(convert_batch_norm(one, "dp", mesh=mesh)) is SyncBatchNorm
    shared = convert_batch_norm(nn.Sequential(one, one), "dp", mesh=mesh)
    assert shared[0] is shared[1]
    with pytest.raises(mc.MeshError, match="x has 4 dims, and 2 or 3 were expected"):
        shared(torch.ones(2, 3, 1, 1))
    for wrong, text in (
        ({"x": torch.ones(3)}, "no dim of channels"),
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, "not floating point"),
        ({"weight": torch.ones(4)}, r"weight is not \[3\] but \[4\]"),
        ({"running_mean": torch.ones(3)}, "are given together"),
    ):
        with pytest.raises(mc.MeshError, match=text):
            sync_batch_norm(**{"x": torch.ones(2, 3), "axis": "dp", "mesh": mesh, **wrong})
    with pytest.raises(mc.MeshError, match="not a torch.nn.Module"):
        convert_batch_norm(3, "dp", mesh=mesh)  # type: ignore[type-var]


def test_sync_batch_norm_of_halves_and_errors() -> None:
    mc.launch(normalising_halves, ranks=2)


# ------------------------------------------------------------------------------------------------------- the example

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["ddp_basics.py"])
    runpy.run_path(str(EXAMPLES / "ddp_basics.py"), run_name="__main__")
    assert "function, module and one rank alone agree" in capsys.readouterr().out


def test_modules_that_are_alike_are_not_mixed_up() -> None:
    """Ranks that run two modules in other orders hear which, and a copy is the module that it was copied from."""

    def main(odd: bool) -> list[float]:
        mesh = mc.make_mesh({"dp": 2})
        one, other = (data_parallel(nn.Linear(2, 1), "dp", grads="sum", mesh=mesh) for _ in range(2))
        if mesh.rank:
            other = copy.deepcopy(other)
        x = torch.full((1, 2), 1.0 + mesh.rank)
        y = one(x) + 3 * other(x) if odd and mesh.rank else 3 * other(x) + one(x)
        y.sum().backward()
        return [one.weight.grad[0, 0].item(), other.weight.grad[0, 0].item()]

    assert mc.launch(main, ranks=2, args=(False,)) == [[3.0, 9.0]] * 2
    with pytest.raises(mc.CommError, match="all_reduce x of Linear, module 1 of the axis") as refused:
        mc.launch(main, ranks=2, args=(True,))
    assert "all_reduce x of Linear, module 2 of the axis" in str(refused.value)
