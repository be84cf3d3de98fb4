"""verify_training: loops that are right on every mesh, and wrong ones, each caught and named."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import meshcomm as mc
from meshcomm import parallel
from meshcomm.verifying.training.watched_step import WatchedStep

D, H, ROWS = 4, 8, 8
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Any]]
Make = Callable[[mc.Mesh], Made]
DP = {"dp": 2}
drawn = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(ROWS, D, generator=drawn), torch.randn(ROWS, D, generator=drawn)) for _ in range(4)]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))


def data_axes(mesh: mc.Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis in ("dp", "fsdp", "replica"))


def spread(model: nn.Module, mesh: mc.Mesh, grads: str = "mean") -> nn.Module:
    if "tp" in mesh.shape:
        parallel.tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
    if "fsdp" in mesh.shape:
        replica = "replica" if "replica" in mesh.shape else None
        parallel.fully_shard(model, "fsdp", grads=grads, replica_axis=replica)
    elif "dp" in mesh.shape:
        parallel.data_parallel(model, "dp", grads=grads)
    return model


def squared(model: nn.Module, batch: Any) -> Tensor:
    x, target = batch
    return (model(x) - target).square().mean()


def mine(batch: Any, mesh: mc.Mesh) -> Any:
    return tuple(mc.shard(x, data_axes(mesh)) for x in batch)


def adaptors(mesh: mc.Mesh) -> Made:
    """Any mesh, local losses, clipping, accumulation over two microbatches."""
    model = spread(mlp(), mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(batch: Any) -> Tensor:
        adam.zero_grad()
        total = torch.zeros(())
        for part in zip(*(x.chunk(2) for x in mine(batch, mesh)), strict=True):
            loss = squared(model, part) / 2
            loss.backward()
            total = total + loss.detach()
        parallel.clip_grad_norm(model, 0.1)
        adam.step()
        return mc.all_reduce(total, data_axes(mesh), "mean") if data_axes(mesh) else total

    return model, adam, step


def stages(mesh: mc.Mesh) -> Made:
    layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))
    layers[3].weight = layers[0].weight  # of two stages
    parts = parallel.split_stages(layers, mesh.shape["pp"])
    mine_ = copy.deepcopy(parts[mesh.coordinate["pp"]])
    if "dp" in mesh.shape:
        parallel.data_parallel(mine_, "dp", grads="mean")
    run = parallel.pipelined(mine_, "pp", loss=nn.functional.mse_loss, microbatches=2, grads="mean")
    sgd = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Any) -> Tensor:
        sgd.zero_grad()
        loss = run(*mine(batch, mesh)) if data_axes(mesh) else run(*batch)
        sgd.step()
        return loss

    return run, sgd, step


def experts(mesh: mc.Mesh) -> Made:
    """Experts along the axis of the data; a router."""
    n, at, count = mesh.shape["ep"], mesh.coordinate["ep"], 4
    router, bank = nn.Linear(D, count), torch.randn(count, D, D)
    own = count // n
    module = nn.Module()
    module.router = parallel.data_parallel(router, "ep", grads="sum")
    module.experts = nn.ParameterDict({str(i): nn.Parameter(bank[i].clone()) for i in range(at * own, at * own + own)})

    def body(rows: Tensor, counts: Any) -> Tensor:
        runs = rows.split([int(c) for c in counts])
        return torch.cat([run @ w for run, w in zip(runs, module.experts.values(), strict=True)])

    adam = torch.optim.Adam(module.parameters(), lr=0.01)

    def step(batch: Any) -> Tensor:
        x, target = (mc.shard(each, "ep") for each in batch)
        adam.zero_grad()
        weight, choice = module.router(x).softmax(-1).topk(2)
        y = parallel.experts(x, choice, weight, body, axis="ep", count=count)
        loss = mc.all_reduce((y - target).square().sum(), "ep") / (ROWS * D)
        loss.backward()
        adam.step()
        return loss.detach()

    return module, adam, step


class Dropping(nn.Module):
    """Masks of the whole activations, the same on every mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.number = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        with mc.rng("(dp b) d", seed=(1, self.number)):
            return self.layers[2](dropout(self.layers[:2](x), 0.5))


def drops(mesh: mc.Mesh) -> Made:
    model = parallel.data_parallel(Dropping(), "dp", grads="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Tensor:
        model.number, *data = batch
        sgd.zero_grad()
        loss = squared(model, mine(data, mesh))
        loss.backward()
        sgd.step()
        return loss.detach()

    return model, sgd, step


def closures(mesh: mc.Mesh) -> Made:
    """Gradients are there when the closure has run."""
    model = spread(mlp(), mesh)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(batch: Any) -> Any:
        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss = squared(model, mine(batch, mesh))
            loss.backward()
            return loss

        return lbfgs.step(closure)

    return model, lbfgs, step


RIGHT: list[tuple[Make, Any]] = [
    (adaptors, [{"dp": 2}, {"dp": 4}]), (adaptors, {"fsdp": 2, "tp": 2}), (adaptors, {"replica": 2, "fsdp": 2}),
    (stages, {"pp": 2, "dp": 2}), (experts, {"ep": 2}), (closures, DP),
]  # fmt: skip


@pytest.mark.parametrize(("make", "meshes"), RIGHT, ids=lambda case: getattr(case, "__name__", str(case)))
def test_right_loops(make: Make, meshes: Any) -> None:
    report = mc.verify_training(make, BATCHES, meshes=meshes)
    assert report.check().ok
    assert len(report.ran) == 2 * (len(meshes) if isinstance(meshes, list) else 1)
    assert "1 steps after a checkpoint" in str(report) or "2 steps after a checkpoint" in str(report)


def test_dropout_under_rng_is_compared() -> None:
    batches = [(number, *batch) for number, batch in enumerate(BATCHES)]
    report = mc.verify_training(drops, batches, meshes={"dp": 2}).check()
    assert report.notes == ["step gives each rank's own loss; the mean over the ranks is that of one rank."]


def shares(mesh: mc.Mesh) -> Made:
    """Each rank's share of the loss; a bias before a norm, whose gradient is rounding, of which Rprop takes the sign."""
    model = nn.Sequential(nn.Linear(D, H), nn.BatchNorm1d(H), nn.Linear(H, D))
    parallel.data_parallel(parallel.convert_batch_norm(model, "dp"), "dp", grads="sum")
    rprop = torch.optim.Rprop(model.parameters(), lr=0.01)

    def step(batch: Any) -> Tensor:
        x, target = mine(batch, mesh)
        rprop.zero_grad()
        loss = (model(x) - target).square().sum() / (ROWS * D)
        loss.backward()
        rprop.step()
        return loss.detach()

    return model, rprop, step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_of_which_an_optimiser_makes_updates(dtype: torch.dtype) -> None:
    report = mc.verify_training(shares, BATCHES, 4, {"dp": 2}, dtype=dtype).check()
    assert any(note.startswith("'0.bias': gradients are zero but for rounding") for note in report.notes)
    assert any("they add up to that of one rank" in note for note in report.notes)


def sharded_states(mesh: mc.Mesh) -> Made:
    model = parallel.data_parallel(mlp(), "dp", grads="mean")
    adam = parallel.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), "dp")

    def step(batch: Any) -> Tensor:
        adam.zero_grad()
        loss = squared(model, mine(batch, mesh))
        loss.backward()
        adam.step()
        return loss.detach()

    return model, adam, step


def test_states_that_are_cut_go_on_from_a_checkpoint_on_twice_as_many_ranks() -> None:
    assert len(mc.verify_training(sharded_states, BATCHES, meshes=[DP, {"dp": 4}]).check().ran) == 4


def test_a_loss_that_is_not_finite_is_said_to_be_none_that_can_be_compared() -> None:
    large = by_hand(over("mean"), lambda model, batch, mesh: 1e6 * squared(model, mine(batch, mesh)))
    (finding,) = mc.verify_training(large, BATCHES, meshes=DP, dtype=torch.float16).findings
    assert finding.kind == "seed"
    assert "is not finite on one rank" in finding.text


def test_in_bfloat16_rounding_is_no_finding() -> None:
    mc.verify_training(adaptors, BATCHES, 4, {"fsdp": 2}, dtype=torch.bfloat16).check()


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_in_bfloat16_factors_are_those_but_for_rounding(seed: int) -> None:
    report = mc.verify_training(twice, BATCHES, meshes=DP, dtype=torch.bfloat16, checkpoint=False, seed=seed)
    assert ": 2 times the right one, reduced twice over 'dp'" in str(report)


# ------------------------------------------------------------------------------------------------------- wrong ones


def by_hand(
    reduce: Callable[[list[nn.Parameter], mc.Mesh], None],
    loss: Callable[[nn.Module, Any, mc.Mesh], Tensor] = lambda model, batch, mesh: squared(model, mine(batch, mesh)),
    lr: float = 0.1,
) -> Make:
    """A loop whose gradients are reduced by hand."""

    def make(mesh: mc.Mesh) -> Made:
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)

        def step(batch: Any) -> Tensor:
            sgd.zero_grad()
            value = loss(model, batch, mesh)
            value.backward()
            with torch.no_grad():
                reduce(list(model.parameters()), mesh)
            sgd.step()
            return mc.all_reduce(value.detach(), data_axes(mesh), "mean")

        return model, sgd, step

    return make


def over(op: Any, times: int = 1) -> Callable[[list[nn.Parameter], mc.Mesh], None]:
    def reduce(params: list[nn.Parameter], mesh: mc.Mesh) -> None:
        for p in params:
            for _ in range(times):
                p.grad = mc.all_reduce(p.grad, "dp", op)

    return reduce


def nothing(params: list[nn.Parameter], mesh: mc.Mesh) -> None:
    pass


def half_of_it(params: list[nn.Parameter], mesh: mc.Mesh) -> None:
    over("mean")(params[:2], mesh)


def late(params: list[nn.Parameter], mesh: mc.Mesh) -> None:
    """The first gradients are there one step later."""
    over("mean")(params, mesh)
    if mesh.size > 1:
        for p in params:
            kept = getattr(p, "kept", None)
            p.kept = p.grad
            p.grad = p.grad if kept is None else kept


def piled(params: list[nn.Parameter], mesh: mc.Mesh) -> None:
    over("mean")(params, mesh)
    if mesh.size > 1:
        for p in params:
            kept = getattr(p, "kept", 0)
            p.kept = p.grad
            p.grad = p.grad + kept


def twice(mesh: mc.Mesh) -> Made:
    """The adaptor reduces, and so does the loop."""
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        for p in model.parameters():
            p.grad = mc.all_reduce(p.grad, "dp")  # once too often
        sgd.step()

    return model, sgd, step


def uneven(model: nn.Module, batch: Any, mesh: mc.Mesh) -> Tensor:
    """The mean of means over unlike numbers of rows."""
    cuts = [1, ROWS - 1] if mesh.size == 2 else [ROWS]
    return squared(model, [x.split(cuts)[mesh.rank] for x in batch])


def unmeant(mesh: mc.Mesh) -> Made:
    """A local mean with an adaptor that takes sums."""
    model = spread(mlp(), mesh, "sum")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        (squared(model, mine(batch, mesh)) / mesh.shape["dp"] ** 2).backward()
        sgd.step()

    return model, sgd, step


def same_masks(mesh: mc.Mesh) -> Made:
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)

    def step(batch: Any) -> None:
        x, target = mine(batch, mesh)
        sgd.zero_grad()
        (dropout(model(x), 0.5) - target).square().mean().backward()  # drops here
        sgd.step()

    return model, sgd, step


def other_masks(mesh: mc.Mesh) -> Made:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        x, target = batch
        sgd.zero_grad()
        (dropout(model(x), 0.5) - target).square().mean().backward()  # drops here
        sgd.step()

    return model, sgd, step


def local_norm(mesh: mc.Mesh) -> Made:
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad.mul_(0.01 / norm)
        sgd.step()

    return model, sgd, step


def old_optimizer(mesh: mc.Mesh) -> Made:
    """Its parameters are those of a copy, from before."""
    model = mlp()
    whole = copy.deepcopy(model) if mesh.size > 1 else model
    spread(model, mesh)
    stale = torch.optim.SGD(whole.parameters(), lr=0.1)
    known = torch.optim.SGD(model.parameters(), lr=0.0 if mesh.size > 1 else 0.1)

    def step(batch: Any) -> None:
        known.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        known.step()
        stale.step() if stale.param_groups[0]["params"][0].grad is not None and whole is not model else None

    return model, known, step


def frozen_part(mesh: mc.Mesh) -> Made:
    model = spread(mlp(), mesh)
    some = list(model.parameters())[: 2 if mesh.size > 1 else 4]
    sgd = torch.optim.SGD(some, lr=0.1)

    def step(batch: Any) -> None:
        model.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        sgd.step()

    return model, sgd, step


def old_copy(mesh: mc.Mesh) -> Made:
    """The forward pass reads a copy that is one step old."""
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    old = copy.deepcopy(model)

    def step(batch: Any) -> Tensor:
        sgd.zero_grad()
        loss = squared(model, mine(batch, mesh))
        loss.backward()
        sgd.step()
        return squared(old, mine(batch, mesh)) if mesh.size > 1 else loss

    return model, sgd, step


def accumulated(mesh: mc.Mesh) -> Made:
    """Divided by all microbatches of all ranks, and then meant over the ranks."""
    model = spread(mlp(), mesh)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        adam.zero_grad()
        count = 2 * mesh.shape["fsdp"]
        for part in zip(*(x.chunk(2) for x in mine(batch, mesh)), strict=True):
            (squared(model, part) / count).backward()
        adam.step()

    return model, adam, step


def own_values(mesh: mc.Mesh) -> Made:
    with mc.fork_rng("dp", seed=1):
        return by_hand(over("mean"))(mesh)


def other_count(mesh: mc.Mesh) -> Made:
    model, adam, step = adaptors(mesh)

    def more(batch: Any) -> Any:
        loss = step(batch)
        if mesh.size > 1:
            adam.step()
        return loss

    return model, adam, more


def faster(mesh: mc.Mesh) -> Made:
    return by_hand(over("mean"), lr=0.1 * mesh.size)(mesh)


def fails(mesh: mc.Mesh) -> Made:
    model, adam, _ = adaptors(mesh)
    return model, adam, lambda batch: mc.shard(torch.ones(3), "dp")  # does not divide


def undivided(mesh: mc.Mesh) -> Made:
    """Two microbatches on every mesh but that of one rank: their number is that of the ranks by chance."""
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        count = 2 if mesh.size > 1 else 1
        for part in zip(*(x.chunk(count) for x in mine(batch, mesh)), strict=True):
            squared(model, part).backward()
        sgd.step()

    return model, sgd, step


def untied(mesh: mc.Mesh) -> Made:
    """Two layers with one weight, on one rank alone."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    model[2].weight = model[0].weight if mesh.size == 1 else nn.Parameter(model[0].weight.detach().clone())
    model = spread(model, mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        sgd.step()

    return model, sgd, step


WRONG: list[tuple[Make, dict[str, int], str, str]] = [
    (by_hand(nothing), DP, "gradient", "not reduced over 'dp': the mean of the ranks' is right"),
    (by_hand(half_of_it), DP, "gradient", "'2.bias' on all ranks"),
    (by_hand(over("sum")), DP, "gradient", "2 times the right one, reduced twice over 'dp', on {'dp': 2} at test_verify"),
    (twice, DP, "gradient", "2 times the right one, reduced twice over 'dp'"),
    (by_hand(over("mean"), uneven), DP, "gradient", "the mean of their means is not the mean: mc.weighted_mean"),
    (unmeant, DP, "gradient", "0.5 times the right one, a mean of what is a mean over 'dp'"),
    (same_masks, DP, "dropout", "drops the same elements on ranks whose activations differ"),
    (other_masks, DP, "dropout", "drops other elements on ranks whose activations are the same"),
    (local_norm, {"fsdp": 2}, "gradient", "clipped by the local norm"),
    (by_hand(late), DP, "gradient", "they are those of step 0"),
    (by_hand(piled), DP, "gradient", "those of step 0 are still in them"),
    (old_optimizer, DP, "parameter", "optimizer.step() has not changed them"),
    (frozen_part, DP, "parameter", "has not changed them: the optimiser does not have them"),
    (old_copy, DP, "loss", "the loss of step 1 is another one"),
    (accumulated, {"fsdp": 2}, "gradient", "0.5 times the right one"),
    (own_values, DP, "start", "before the first step"),
    (other_count, DP, "update", "called 2 times in step 0, 1 on one rank"),
    (faster, DP, "parameter", "the update is 2 times the right one"),
    (undivided, DP, "gradient", "2 times the right one, and on {'dp': 4} too: it does not follow the size of 'dp'"),
    (untied, DP, "gradient", "'2.weight' is '0.weight' on one rank, and a parameter of its own here"),
    (fails, DP, "error", "the loop fails on {'dp': 2}, and not on one rank"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0].__name__}-{case[3][:30]}")
def test_wrong_loops_are_named(case: Any) -> None:
    make, mesh, kind, said = case
    report = mc.verify_training(make, BATCHES, meshes=mesh, checkpoint=False)
    assert said in str(report), report
    assert kind in [finding.kind for finding in report.findings]
    assert all(finding.line for finding in report.findings), report


def test_the_line_that_reduces_twice_is_blamed() -> None:
    (finding,) = mc.verify_training(twice, BATCHES, meshes=DP, checkpoint=False).findings
    lines = Path(__file__).read_text().splitlines()
    assert (
        finding.line == f"test_verify_training.py:{1 + next(i for i, x in enumerate(lines) if '# once too often' in x)}"
    )


def masked(mesh: mc.Mesh) -> Made:
    """A mean over this rank's tokens of a sequence in zigzag; the mean of the ranks' is another one."""
    model = parallel.data_parallel(mlp(), "cp", grads="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    order = parallel.context_order(ROWS, "cp")

    def step(batch: Any) -> Tensor:
        x, target = (mc.shard(each[order], "cp") for each in batch)
        sgd.zero_grad()
        counted = (target > 0.5).double()
        loss = (counted * (model(x) - target)).square().sum() / counted.sum()  # here
        loss.backward()
        sgd.step()
        return loss.detach()

    return model, sgd, step


def own_rows(mesh: mc.Mesh) -> Made:
    """A buffer of this rank's rows."""
    model = mlp()
    model.register_buffer("seen", torch.zeros(D))
    spread(model, mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        sgd.zero_grad()
        squared(model, mine(batch, mesh)).backward()
        sgd.step()
        model.seen += mine(batch, mesh)[0].mean(0)  # here

    return model, sgd, step


def summed_up(mesh: mc.Mesh) -> Made:
    model, sgd, step = closures(mesh)
    return model, sgd, lambda batch: mc.all_reduce(step(batch).detach(), "dp")  # here


def pulled_back(mesh: mc.Mesh) -> Made:
    """Weights that somebody writes besides the optimiser."""
    model, sgd, step = by_hand(over("mean"))(mesh)

    def more(batch: Any) -> Any:
        loss = step(batch)
        with torch.no_grad():
            model[0].weight.mul_(1 - 0.1 * mesh.coordinate["dp"])  # here
        return loss

    return model, sgd, more


def replaced(mesh: mc.Mesh) -> Made:
    """Weights in whose place others are put."""
    model, sgd, step = by_hand(over("mean"))(mesh)

    def more(batch: Any) -> Any:
        loss = step(batch)
        model[0].weight = nn.Parameter(model[0].weight * (1 - 0.1 * mesh.coordinate["dp"]))  # here
        sgd.param_groups[0]["params"][0] = model[0].weight
        return loss

    return model, sgd, more


def other_memory(mesh: mc.Mesh) -> Made:
    """Weights that are given other values by their memory."""
    model, sgd, step = by_hand(over("mean"))(mesh)

    def more(batch: Any) -> Any:
        loss = step(batch)
        model[0].weight.data = model[0].weight.data * (1 - 0.1 * mesh.coordinate["dp"])  # here
        return loss

    return model, sgd, more


def other_buffer(mesh: mc.Mesh) -> Made:
    model, sgd, _ = own_rows(mesh)

    def more(batch: Any) -> None:
        loss = squared(model, mine(batch, mesh))
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        model.seen = mine(batch, mesh)[0].mean(0)  # here

    return model, sgd, more


@pytest.mark.parametrize(
    ("make", "mesh", "kind"),
    [
        (masked, {"cp": 2}, "loss"),
        (own_rows, DP, "parameter"),
        (summed_up, DP, "loss"),
        (pulled_back, DP, "parameter"),
        (replaced, DP, "parameter"),
        (other_memory, DP, "parameter"),
        (other_buffer, DP, "parameter"),
    ],
)
def test_the_line_within_the_step_is_named(make: Make, mesh: dict[str, int], kind: str) -> None:
    report = mc.verify_training(make, BATCHES, meshes=mesh, checkpoint=False)
    lines, first = inspect.getsourcelines(make)
    at = first + next(i for i, line in enumerate(lines) if line.endswith("# here\n"))
    assert (report.findings[0].kind, report.findings[0].line) == (kind, f"{Path(__file__).name}:{at}"), report


def saved_by(rank: int) -> Callable[..., None]:
    def save(path: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if mc.rank() == rank:
            torch.save([p.detach() for p in module.parameters()], path)

    return save


def loaded(path: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for p, x in zip(module.parameters(), torch.load(path), strict=True):
            p.copy_(x)


def clipped_by_its_own_norm(mesh: mc.Mesh) -> Made:
    """Over tp replicas part in the first step, so that neither a checkpoint nor a second step can be made."""
    model = spread(mlp(), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Tensor:
        sgd.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(norm)
        sgd.step()
        return loss

    return model, sgd, step


def test_what_keeps_a_loop_from_going_on_is_found_in_the_step_before() -> None:
    (found,) = mc.verify_training(clipped_by_its_own_norm, BATCHES, meshes={"tp": 2}).findings
    assert found.kind == "gradient"
    assert "of step 0" in found.text
    assert "replicas disagree" in found.text


def shifted_within_a_part(mesh: mc.Mesh) -> Made:
    model = parallel.data_parallel(nn.Sequential(nn.Embedding(7, D), nn.Linear(D, 7)), "dp", grads="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Tensor:
        sgd.zero_grad()
        ids = mc.shard(batch, "dp", dim=1)
        after = ids.roll(-1, 1)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), after.flatten())
        loss.backward()
        sgd.step()
        return mc.all_reduce(loss.detach(), "dp", "mean")

    return model, sgd, step


def divided_twice(mesh: mc.Mesh) -> Made:
    model = parallel.data_parallel(mlp(), "dp", grads="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Tensor:
        sgd.zero_grad()
        loss = squared(model, mine(batch, mesh))
        loss = loss / mc.axis_size("dp")
        loss.backward()
        sgd.step()
        return mc.all_reduce(loss.detach(), "dp", "mean")

    return model, sgd, step


@pytest.mark.parametrize(
    ("make", "batches", "text"),
    [
        (shifted_within_a_part, [torch.randint(7, (2, 8), generator=drawn)], "its indices or mask, which come of"),
        (divided_twice, BATCHES, "what it takes, of div at"),
    ],
)
def test_the_line_that_makes_what_is_blamed_is_named_too(make: Make, batches: list[Any], text: str) -> None:
    lines, start = inspect.getsourcelines(make)
    at = start + next(i for i, line in enumerate(lines) if "roll" in line or "axis_size" in line)
    found = mc.verify_training(make, batches, meshes=DP, steps=1).findings[0]
    assert text in found.text
    assert f"{Path(__file__).name}:{at}" in found.text


def test_checkpoints_are_those_of_all_ranks_and_have_all_that_there_is() -> None:
    report = mc.verify_training(by_hand(over("mean")), BATCHES, meshes=DP, checkpoint=(saved_by(0), loaded))
    (finding,) = report.findings  # a momentum, which is not in the file
    assert (finding.kind, finding.line) == ("checkpoint", f"{Path(__file__).name}:{loaded.__code__.co_firstlineno}")
    assert "states of the optimiser that were loaded after a checkpoint of {'dp': 2} are not those" in finding.text

    def each_its_own(mesh: mc.Mesh) -> Made:
        model, sgd, step = by_hand(over("mean"))(mesh)
        sgd.param_groups[0]["momentum"] = 0.0
        return model, sgd, step

    assert mc.verify_training(each_its_own, BATCHES, meshes=DP, checkpoint=(saved_by(0), loaded)).check().ok

    def sharded(mesh: mc.Mesh) -> Made:
        model = parallel.fully_shard(nn.Linear(D, D, bias=False), "fsdp", grads="mean")
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), adaptors(mesh)[2])

    both = [{"fsdp": 2}, {"fsdp": 2}]  # from one mesh of two to another one: every rank gets the part of rank 1
    found = mc.verify_training(sharded, BATCHES, meshes=both, checkpoint=(saved_by(1), loaded)).findings
    assert found[0].kind == "checkpoint"
    assert "parameters that were loaded after a checkpoint of {'fsdp': 2} are not those that were saved" in str(
        found[0]
    )
    assert "'weight' on rank 0, by up to" in str(found[0])


def test_a_make_that_makes_others_each_time_says_so() -> None:
    counts = iter(range(100))

    def make(mesh: mc.Mesh) -> Made:
        model, adam, step = adaptors(mesh)
        with torch.no_grad():
            next(model.parameters()).add_(next(counts))
        return model, adam, step

    report = mc.verify_training(make, BATCHES, meshes=DP)
    (finding,) = report.findings
    assert finding.kind == "seed"
    assert "two runs on one rank are not the same, so that nothing can be compared" in finding.text
    assert not report.ran


def test_a_dense_twin_shows_what_is_wrong_on_every_mesh() -> None:
    def dense(mesh: mc.Mesh) -> Made:
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

        def step(batch: Any) -> Tensor:
            sgd.zero_grad()
            loss = squared(model, batch)
            loss.backward()
            sgd.step()
            return loss

        return model, sgd, step

    assert mc.verify_training(by_hand(over("mean")), BATCHES, meshes=DP, twin=dense).check().ok
    unscaled = by_hand(over("mean"), lambda model, batch, mesh: 3 * squared(model, mine(batch, mesh)))
    assert mc.verify_training(unscaled, BATCHES, meshes=DP).ok
    report = mc.verify_training(unscaled, BATCHES, meshes=DP, twin=dense)
    assert "3 times the right one, on {'dp': 2}" in str(report)


@pytest.mark.thorough
def test_processes() -> None:
    report = mc.verify_training(adaptors, BATCHES, 2, DP, runtime="processes", checkpoint=False)
    assert report.check().ran == ["{'dp': 2}: 2 steps"]


def test_progress() -> None:
    said: list[str] = []
    mc.verify_training(by_hand(over("mean")), BATCHES, 2, DP, progress=said.append).check()
    assert said == [
        "one rank: 2 steps, twice", "{'dp': 2}: 2 steps", "{'dp': 1}: 1 steps after a checkpoint of {'dp': 2}",
    ]  # fmt: skip


BAD: list[tuple[dict[str, Any], str]] = [
    ({"make": 3}, "make is not callable but int"),
    ({"make": lambda mesh: mlp()}, "make gives no module, optimizer and step"),
    ({"make": lambda mesh: (mlp(), 1, print)}, "the optimizer that make gives is no torch Optimizer"),
    ({"make": lambda mesh: (adaptors(mesh)[:2], None)}, "the module that make gives|gives no module"),
    ({"make": lambda mesh: (*adaptors(mesh)[:2], None)}, "the step that make gives is not callable"),
    ({"make": lambda mesh: (*adaptors(mesh)[:2], lambda batch: "loss")}, "step gives no loss"),
    ({"batches": []}, "batches is no list of batches"),
    ({"batches": iter(BATCHES)}, "batches is no list of batches"),
    ({"steps": 0}, "steps=0 is not a positive int"),
    ({"meshes": None}, "nothing says of which axes"),
    ({"meshes": []}, "meshes is no list"),
    ({"meshes": {"dp": 0}}, "a mesh is a mapping of axis names to positive sizes"),
    ({"meshes": [{"d p": 2}]}, "a mesh is a mapping"),
    ({"twin": 1}, "twin is not callable"),
    ({"checkpoint": (print,)}, "no pair of functions"),
    ({"dtype": torch.int64}, "no floating dtype"),
    ({"seed": -1}, "no int from 0"),
    ({"runtime": "threads"}, "no runtime"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[1][:40])
def test_wrong_arguments(case: Any) -> None:
    given, said = case
    right: dict[str, Any] = {"make": adaptors, "batches": BATCHES, "meshes": DP}
    with pytest.raises(mc.MeshError, match=said):
        mc.verify_training(**(right | given))


def test_not_within_a_rank() -> None:
    with pytest.raises(mc.MeshError, match="it starts ranks of its own, and this is one"):
        mc.launch(lambda: mc.verify_training(adaptors, BATCHES, meshes=DP), 2)


def _backward_of_list(loss: Tensor, weight: Tensor) -> None:
    torch.autograd.backward([loss])


def _grad_by_name(loss: Tensor, weight: Tensor) -> None:
    torch.autograd.grad(outputs=[loss], inputs=[weight])


def _grad(loss: Tensor, weight: Tensor) -> None:
    torch.autograd.grad(loss, weight)


@pytest.mark.parametrize("differentiate", [_backward_of_list, _grad_by_name, _grad], ids=lambda f: f.__name__)
def test_a_watched_step_notes_what_autograd_is_asked_for(differentiate: Callable[[Tensor, Tensor], None]) -> None:
    module = torch.nn.Linear(3, 2)
    with WatchedStep(module) as steps:
        loss = module(torch.ones(1, 3)).square().sum()
        differentiate(loss, module.weight)
    ends = steps.followed(loss).outputs
    assert ends[0] is not None
    assert ends == [ends[-1]] * 2
