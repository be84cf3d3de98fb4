"""What a dry run says of a plan is what a run of it does: each event on each rank, with its bytes and its line."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import _torch, parallel

D, WORDS = 8, 11
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "embed": "replicated", "head": "replicated"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module, optimizer: Any = None) -> None:
    """Two steps, for the order of gradients and the regathers of the second are known from the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    for _ in range(2):
        ids = torch.randint(WORDS, (4, 6))
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        parallel.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def cut() -> nn.Module:
    return parallel.tensor_parallel(Net(), {**PLAN, "blocks.*.norm": "replicated"}, axis="tp")


def sharded(model: nn.Module, units: Any = ("blocks.*",), **more: Any) -> nn.Module:
    return parallel.fully_shard(model, "fsdp", grads="mean", units=units, **more)


def sequence() -> None:
    model: Any = parallel.tensor_parallel(Net(), {**PLAN, "blocks.*.norm": "sequence"}, axis="tp", sequence=True)
    h = mc.shard(model.embed(torch.randint(WORDS, (4, 6))), "tp", dim=1)
    for block in model.blocks:
        h = block(h)
    h.sum().backward()


def context() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    parallel.context_attention(q, k, v, axis="cp", heads_axis="u").sum().backward()


def experts(capacity: int | None = None) -> None:
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 4, requires_grad=True)
    choice = torch.arange(16).reshape(8, 2) % 4
    experts_of(choice, x, w, capacity)


def experts_of(choice: Tensor, x: Tensor, w: Tensor, capacity: int | None) -> None:
    def fn(rows: Tensor, n: Tensor) -> Tensor:
        return parallel.grouped_matmul(rows, w, n)

    y = parallel.experts(x, choice, torch.rand(8, 2), fn, axis="ep", count=4, capacity=capacity)
    y.sum().backward()


def pipeline(schedule: str, chunks: int = 1) -> None:
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(chunks)]
    if chunks == 1:
        sharded(stages[0], units=None)
    step = parallel.pipelined(stages, "pp", loss=F.mse_loss, microbatches=4, grads="mean", schedule=schedule)
    x = torch.randn(8, 4)
    step(x, x)


def given_where_needed() -> None:
    """The batch on the first stage and on the last one alone."""
    at, last = mc.current_mesh().coordinate["pp"], mc.axis_size("pp") - 1  # type: ignore[union-attr]
    step = parallel.pipelined(nn.Linear(4, 4).double(), "pp", loss=F.mse_loss, microbatches=4, grads="mean")
    for rows in (8, 6):
        x = torch.randn(rows, 4, dtype=torch.float64)
        loss = step(x if at == 0 else None, x if at == last else None)
        mc.all_reduce(loss, "pp", "mean")
    step.evaluate(x if at == 0 else None)
    tokens = (torch.randint(9, (6, 5)) > 0).sum(1)  # nobody knows how many count
    step(x if at == 0 else None, x if at == last else None, weights=tokens)


def loaded() -> None:
    """On the meta device, then given the values of the whole."""
    with torch.device("meta"):
        model: nn.Module = Net()
    sharded(model)
    parallel.load_full_state_dict(model, copy.deepcopy(Net()).state_dict())
    train(model)


def vocabulary(checked: bool = False) -> None:
    """Ids are looked at in a real run alone."""
    model = parallel.tensor_parallel(nn.Sequential(nn.Embedding(8, D)), {"0": "vocab"}, axis="tp")
    with mc.check_vma(True) if checked else contextlib.nullcontext():
        model(torch.arange(24).reshape(4, 6) % 8).sum().backward()


def split() -> parallel.PipelineStep:
    """Stages of a model whose last layer is its embedding: of the three ranks the first and the last one share it."""
    model = Net()
    model.head.weight = model.embed.weight
    stages = parallel.split_stages(model, 3, example=torch.zeros(2, 6, dtype=torch.int64))
    step = parallel.pipelined(
        stages[mc.current_mesh().coordinate["pp"]],  # type: ignore[union-attr]
        "pp",
        loss=lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten()),
        microbatches=2,
        grads="mean",
    )
    ids = torch.randint(WORDS, (4, 6))
    step(ids, ids)
    return step


def functional() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    parallel.pipeline(lambda p, h: torch.tanh(h @ p), w, torch.randn(4, 3, 4), axis="pp").sum().backward()


def calls() -> None:
    """Collectives by themselves, works, what ranks agree on, objects and messages."""
    other = 1 - mc.current_mesh().coordinate["dp"]  # type: ignore[union-attr]
    x = torch.randn(4, 4, requires_grad=True)
    z = mc.all_to_all(mc.reduce_scatter(mc.all_gather(mc.all_reduce(x, "dp"), "tp"), "tp"), "dp", 0, 1)
    work = mc.all_reduce(mc.all_reduce(mc.shift(z, "tp"), ("dp", "tp"), "mean"), "dp", async_op=True)
    (work.wait().sum() + mc.broadcast(x, "tp").sum()).backward()
    flat = x.detach()
    mc.sync_seed("dp"), mc.barrier("tp"), mc.reduce(flat, "dp"), mc.gather(flat, "dp"), mc.scan(flat, "tp")
    mc.scatter(None if other == 0 else flat, "dp")  # its shape is known to the first rank alone
    mc.exchange([(flat, other)], [(other, (4, 4), torch.float32)], "dp")
    mc.assert_invariant({"ones": torch.ones(3), "two": 2}, ("dp", "tp"))
    told = "hello" if mc.rank() < 2 else None
    assert mc.broadcast_object(told, "dp") == "hello"
    assert len(mc.all_gather_object({"a": 1}, "dp")) == 2


PLANS: dict[str, tuple[dict[str, int], Callable[[], Any]]] = {
    "dp": ({"dp": 3}, lambda: train(parallel.data_parallel(Net(), "dp", grads="mean", bucket_mb=0.001))),
    "fsdp": ({"fsdp": 2}, lambda: train(sharded(Net(), param_dtype=torch.bfloat16))),
    "hsdp, tp": ({"rep": 2, "fsdp": 2, "tp": 2}, lambda: train(sharded(cut(), replica_axis="rep"))),
    "sequence": ({"tp": 2}, sequence),
    "context": ({"u": 2, "cp": 2}, context),
    "experts": ({"ep": 2}, experts),
    "capacity": ({"ep": 2}, lambda: experts(capacity=2)),
    "1f1b, fsdp": ({"pp": 2, "fsdp": 2}, lambda: pipeline("1f1b")),
    "interleaved": ({"pp": 2}, lambda: pipeline("interleaved", 2)),
    "pipeline": ({"pp": 2}, functional),
    "batch at the ends": ({"pp": 3}, given_where_needed),
    "loaded": ({"fsdp": 2}, loaded),
    "vocabulary": ({"tp": 2}, vocabulary),
    "vocabulary, checked": ({"tp": 2}, lambda: vocabulary(checked=True)),
    "split": ({"pp": 3}, split),
    "calls": ({"dp": 2, "tp": 2}, calls),
}


def rows(trace: mc.Trace, rank: int) -> list[tuple[Any, ...]]:
    """Its events, without times."""
    return [
        (e.called, e.primitive, e.axis, e.size, e.place, e.dtype, e.shape, e.payload, e.wire, str(e.site), e.way, e.asynchronous)
        for e in trace.events
        if e.rank == rank
    ]  # fmt: skip


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("name", PLANS)
def test_events_are_those_of_a_run(name: str) -> None:
    shape, fn = PLANS[name]
    mesh = mc.make_mesh(shape)

    def main() -> None:
        with mc.use_mesh(mesh):
            fn()

    with mc.trace() as ran:
        mc.launch(main, ranks=mesh.size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry = mc.dry_run(fn, shape, ranks=None)
    assert ran.events
    for rank in range(mesh.size):
        assert rows(dry.trace, rank) == rows(ran, rank)
    routed = name in ("experts", "capacity", "batch at the ends")
    assert bool(dry.host_reads) is routed is not dry.ok  # what the library reads for itself needs no answer
    assert not mc.is_dry()


@pytest.mark.thorough
def test_a_rank_of_thousands() -> None:
    shape = {"rep": 64, "fsdp": 16, "tp": 8}
    run = mc.dry_run(lambda: train(sharded(cut(), replica_axis="rep")), shape, ranks=[0, 8191])
    assert {(e.rank, e.place) for e in run.trace.events} == {
        (0, "rep=0, fsdp=0, tp=0"),
        (8191, "rep=63, fsdp=15, tp=7"),
    }
    assert {e.size for e in run.trace.events if e.axis == "rep"} == {64}


@pytest.mark.thorough
@pytest.mark.parametrize("cut", [True, False])
def test_parameters_of_stages_have_the_names_that_they_have_in_a_run(cut: bool) -> None:
    """With the number of the stage where two stages have the same: stages of one model have not."""

    def own() -> list[str]:
        loss = F.mse_loss
        step = split() if cut else parallel.pipelined(nn.Linear(4, 4), "pp", loss=loss, microbatches=1, grads="sum")
        return [name for name, _ in step.named_parameters()]

    def main() -> list[str]:
        with mc.use_mesh(mesh):
            return own()

    mesh, found = mc.make_mesh({"pp": 3}), list[list[str]]()
    ran = mc.launch(main, ranks=3)
    for rank in range(3):
        mc.dry_run(lambda: found.append(own()), {"pp": 3}, ranks=[rank])
        assert found[-1] == ran[rank]
    assert ("embed.weight" in ran[0]) is cut


def test_budgets_hold_in_a_dry_run() -> None:
    @mc.comm_budget(dp="1 all_reduce")
    def step() -> None:
        for _ in range(count):
            mc.all_reduce(torch.ones(4), "dp")

    count = 1
    mc.dry_run(step, {"dp": 1000})
    count = 2
    with pytest.raises(AssertionError, match="dp: 2 all_reduce on rank 0, allowed 1 all_reduce"):
        mc.dry_run(step, {"dp": 1000})


def test_values_of_the_program_are_known_and_others_are_given() -> None:
    seen: list[Any] = []

    def main() -> None:
        count = torch.tensor(2.0)
        count += torch.arange(3).sum()
        seen.append(count.item())
        count.add_(torch.randn(()))  # nobody knows
        known_to_none = [count, torch.randn(3), torch.randn(()) > 0, mc.all_reduce(torch.ones(()), "dp")]
        seen.extend(x.tolist() for x in known_to_none)

    before = torch.get_rng_state()
    run = mc.dry_run(main, {"dp": 4})
    assert seen == [5.0, 0.0, [0.0] * 3, False, 0.0]
    assert [(read.line.partition(":")[0], read.count) for read in run.host_reads] == [("test_dry_run.py", 6)]
    assert torch.equal(torch.get_rng_state(), before)
    line = run.host_reads[0].line
    for given, expected in (
        (1, [1.0, [1.0] * 3, True, 1.0]),
        ({line: [1, 2, 3]}, [1.0, [2.0, 3.0, 1.0], True, 3.0]),
        (lambda at, dtype: 7 if at == line and dtype is torch.float32 else 0, [7.0, [7.0] * 3, False, 7.0]),
    ):
        seen.clear()
        mc.dry_run(main, {"dp": 4}, host_values=given)
        assert seen == [5.0, *expected]


def test_numbers_that_are_printed_are_read() -> None:
    seen: list[str] = []

    def main() -> None:
        loss = torch.randn(3, requires_grad=True).sum()
        seen.extend([f"{loss:.3f}", f"{loss:>5.1f}", f"{torch.tensor(2.5):.2f}"])

    run = mc.dry_run(main, {"dp": 4}, host_values=1.5)
    assert seen == ["1.500", "  1.5", "2.50"]
    assert run.host_reads[0].count == 2


@pytest.mark.parametrize(
    ("capacity", "given", "sent"), [(None, None, 4), (None, 4, 4), (3, None, 3), (3, 2, 2), (0, None, 0)]
)
def test_a_router_that_nobody_knows(capacity: int | None, given: int | None, sent: int) -> None:
    """16 rows of a rank for 4 experts of which 2 are here: each gets 4 of them, where nothing else is said."""

    def main() -> None:
        x, w = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 4, requires_grad=True)
        experts_of(torch.rand(8, 4).topk(2).indices, x, w, capacity)

    run = mc.dry_run(main, {"ep": 2}, host_values=given)
    assert run.host_reads
    assert run.ok is (given is not None)
    assert [each.kind for each in run.findings] == ["guessed"] * (given is None)
    assert all("host_values={'test_dry_run.py:" in each.text for each in run.findings)
    assert {e.shape for e in run.trace.events if e.dtype is torch.float32} == {(4 * sent * 4,)}


def test_axes_of_a_dry_run_end_with_it() -> None:
    kept: list[Any] = []

    def main() -> None:
        mc.all_reduce(torch.ones(2), "dp")
        kept.append(mc.current_mesh())

    mc.dry_run(main, {"dp": 1000}, ranks=[999])
    with mc.trace() as t:
        pass
    assert kept
    assert 999 not in t.ranks


def test_gradients_that_are_reduced_later_are_there() -> None:
    """Without them an optimiser would have no states: of stages that are data parallel too they are reduced once."""

    def main() -> None:
        model = parallel.data_parallel(nn.Linear(4, 4), "dp", grads="mean")
        with parallel.no_sync(model):
            model(torch.randn(2, 4)).sum().backward()
        parallel.reduce_gradients(model)
        assert all(p.grad is not None for p in model.parameters())

    mc.dry_run(main, {"dp": 2})


def test_optimizers_count_their_steps() -> None:
    def main() -> None:
        w = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.Adam([w], lr=0.1)
        for _ in range(3):
            w.sum().backward()
            optimizer.step()
        steps.append(optimizer.state[w]["step"].item())

    steps: list[float] = []
    assert not mc.dry_run(main, {"dp": 2}).host_reads
    assert steps == [3.0]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("factor", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        self.factor = self.factor * 2
        assert self.factor.item() == 2 ** self.batches.item() > 1
        y: Tensor = self.norm(self.layer(x)) * self.factor
        return y


@pytest.mark.parametrize("name", ["data_parallel", "fully_shard", "sharded with replicas"])
def test_buffers_that_are_sent_are_known(name: str) -> None:
    """The others count as this rank does; torch's batch norm divides by how many batches there were."""

    def main() -> None:
        model = Counted()
        if name == "data_parallel":
            parallel.data_parallel(model, "dp", grads="mean")
        else:
            parallel.fully_shard(model, "dp", grads="mean", replica_axis=None if name == "fully_shard" else "rep")
        for _ in range(3):
            model(torch.randn(4, 4)).square().mean().backward()
        assert (model.batches.item(), model.norm.num_batches_tracked.item()) == (3, 3)

    assert not mc.dry_run(main, {"rep": 2, "dp": 8}).host_reads


def test_what_another_rank_sends_is_not_taken_for_known() -> None:
    """A rank that is not the sender has not its own value."""

    def main() -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("count", torch.tensor(1 if mc.make_mesh({"dp": 3}).rank else 0))
        parallel.data_parallel(model, "dp", grads="mean")
        assert model.count.item() == 0

    for rank in range(3):
        mc.dry_run(main, {"dp": 3}, ranks=(rank,))


@pytest.mark.parametrize("adaptor", [parallel.data_parallel, parallel.fully_shard])
def test_a_step_whose_calls_depend_on_values_is_refused(adaptor: Callable[..., Any]) -> None:
    def main() -> None:
        model = adaptor(nn.Linear(4, 4), "dp", grads="mean")
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    with pytest.raises(mc.MeshError, match="how often a step of LBFGS calls its closure depends on values"):
        mc.dry_run(main, {"dp": 8})


def test_modules_change_their_dtype() -> None:
    def main() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16)
        parallel.data_parallel(model, "dp", grads="mean")(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
        found.append({p.grad.dtype for p in model.parameters() if p.grad is not None})

    found: list[Any] = []
    run = mc.dry_run(main, {"dp": 64})
    assert found == [{torch.bfloat16}]
    assert run.trace.totals()["dp"].payload >= 2 * (4 * 4 + 3 * 4)


def test_who_this_process_is() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"all": -1})
        inner = mc.launch(lambda: mc.is_dry(), ranks=6)
        found.append((mc.rank(), mc.world_size(), mesh.coordinate, mc.axis_size("pair"), inner, mc.is_dry()))

    found: list[Any] = []
    mc.dry_run(main, mc.make_mesh({"a": 3, "b": 2}, names={"pair": ("a", "b")}), ranks=[4])
    assert found == [(4, 6, {"all": 4}, math.prod((3, 2)), [True], True)]


def test_tensors_are_told_apart_and_copied() -> None:
    """By numbers that stand for addresses; copies are of the same classes, and those of views of one storage share
    theirs.
    """

    def main() -> None:
        x, layer = torch.arange(8.0), nn.Linear(2, 2)
        first, second = x[:4], x[4:]
        copied = copy.deepcopy({"halves": [first, second], "layer": layer, "count": torch.tensor(3.0)})
        own, other = copied["halves"]
        assert (second.data_ptr() - first.data_ptr(), other.data_ptr() - own.data_ptr()) == (16, 16)
        assert len({each.data_ptr() for each in (x, own, layer.weight, copied["layer"].weight)}) == 4
        assert isinstance(copied["layer"].weight, nn.Parameter)
        assert copied["layer"].weight.requires_grad
        assert copied["count"].item() == 3.0
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)(torch.randn(3, 2, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = mc.dry_run(main, {"dp": 2})
    assert run.ok
    assert run.peak_bytes > 0


def test_storages_that_are_put_into_tensors_are_freed() -> None:
    """torch remembers what operations were given, and would keep them."""

    def main() -> None:
        for _ in range(3):
            torch.empty(0).set_(torch.empty(1000).untyped_storage(), 0, (10, 100), ())

    assert mc.dry_run(main, {"dp": 2}).peak_bytes == 4000


def test_a_plan_is_found_outside() -> None:
    """What proves it has values, on ranks of its own, and is no part of what this rank communicates."""

    def program(device: str) -> str:
        with torch.device(device):
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        mc.parallel.tensor_parallel(model, "auto", axis="tp")
        return f"{tuple(model[0].weight.shape)}, {tuple(model[2].weight.shape)}"  # type: ignore[union-attr]

    for device in ("cpu", "meta"):
        seen: list[str] = []
        run = mc.dry_run(lambda device=device, seen=seen: seen.append(program(device)), {"dp": 2, "tp": 4})
        assert seen == ["(4, 8), (8, 4)"]
        assert {event.axis for event in run.trace.events} <= {"tp"}


NOT_BUILT_FOR = next(kind for kind in ("cuda", "xpu") if not _torch.is_known_here(kind))


def under_a_device() -> None:
    with torch.device(NOT_BUILT_FOR):
        nn.Linear(2, 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.randn(3, device=NOT_BUILT_FOR, requires_grad=True).square().sum().backward(),
        lambda: torch.tensor([1.0], device=NOT_BUILT_FOR),
        lambda: torch.zeros_like(torch.ones(3), device=NOT_BUILT_FOR),
        lambda: torch.ones(3).to(NOT_BUILT_FOR),
        lambda: nn.Linear(2, 2).to(NOT_BUILT_FOR),
        lambda: torch.ones(3).new_empty(3, device=NOT_BUILT_FOR),
        under_a_device,
    ],
)
def test_a_device_for_which_torch_is_not_built_is_refused(fn: Callable[[], object]) -> None:
    """Autograd would end the process."""
    with pytest.raises(
        mc.MeshError, match=r"test_dry_run.py:\d+ (makes|moves) a tensor .* not built.\n  fix: device=mesh.device"
    ):
        mc.dry_run(fn, {"dp": 2})
