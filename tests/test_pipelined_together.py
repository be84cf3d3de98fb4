"""pipelined with every adaptor inside, against the model on one rank; states that move between pipelines."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshcomm as mc
from meshcomm import parallel

D, V = 4, 11
F64 = torch.float64
PLAN = {"*.up": "column", "*.down": "row", "*": "replicated"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 8), nn.Linear(8, D)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Model(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def made() -> Model:
    torch.manual_seed(0)
    return Model().to(F64)


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randint(V, (8, 3), generator=drawn), torch.randint(V, (8, 3), generator=drawn)


def loss(y: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(y.mT, ids)


def step_of(mesh: mc.Mesh, schedule: str, how: str = "", *, copies: bool = True, **given: Any) -> parallel.PipelineStep:
    """The stages of this rank; ``copies``: with parameters of their own."""
    n, rank = mesh.shape["pp"], mesh.coordinate["pp"]
    v = 1 if schedule in ("1f1b", "zb-h1") else 2
    stages = parallel.split_stages(made(), n * v)
    mine = [stages[rank], stages[2 * n - 1 - rank]] if schedule == "zbv" else stages[rank::n]
    mine = [copy.deepcopy(stage) if copies else stage for stage in mine]
    for stage in mine:
        if "tp" in mesh.shape:
            parallel.tensor_parallel(stage, PLAN, axis="tp", mesh=mesh)
        if how == "fsdp":
            parallel.fully_shard(stage, "dp", grads="mean", mesh=mesh)
        if how == "dp":
            parallel.data_parallel(stage, "dp", grads="mean", mesh=mesh)
    return parallel.pipelined(
        mine, "pp", loss=loss, microbatches=4, grads="mean", schedule=schedule, mesh=mesh, **given
    )


def equals_one_rank(shape: dict[str, int], schedule: str, how: str, holds: bool, remat: bool = False) -> None:
    mesh = mc.make_mesh(shape)
    step, whole = step_of(mesh, schedule, how, remat=remat), made()
    adams = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (step, whole)]
    at, n = mesh.coordinate.get("dp", 0), shape.get("dp", 1)
    for number in range(5):
        ids, next_ids = batch(number)
        mine = [each.chunk(n)[at] for each in (ids, next_ids)]
        with mc.trace() as seen, parallel.gathered(step) if holds else contextlib.nullcontext():
            step(*mine)
        loss(whole(ids), next_ids).backward()
        norms = parallel.clip_grad_norm(step, 0.1, mesh=mesh), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        torch.testing.assert_close(*norms, rtol=1e-9, atol=1e-9)
        for adam in adams:
            adam.step()
            if number != 2:  # gradients add up
                adam.zero_grad()
    units = sum(event.operation == "reduce_scatter" and event.axis == "dp" for event in seen.events)
    sums = sum(event.operation == "all_reduce" and event.axis == "dp" and event.payload > 64 for event in seen.events)
    gathers = sum(event.operation == "all_gather" and event.axis == "dp" for event in seen.events)
    assert (units > 0, sums) == ((how == "fsdp"), len(step.stages) if how == "dp" else 0)
    if holds:  # and the tied parameter, if its ranks have cut it in other ways
        assert units <= gathers <= units + 1
    found = parallel.full_state_dict(step, mesh=mesh)
    torch.testing.assert_close(found, dict(whole.state_dict()), rtol=1e-9, atol=1e-9)


CASES = [
    ({"pp": 2, "dp": 2, "tp": 2}, "zbv", "fsdp", True),
    ({"pp": 2, "dp": 2, "tp": 2}, "interleaved", "dp", False),
    ({"pp": 2, "dp": 2}, "zb-h1", "fsdp", False, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_five_steps_in_process(case: Any) -> None:
    ranks = 8 if "tp" in case[0] else 4
    mc.launch(equals_one_rank, ranks=ranks, args=case)


def test_five_steps_on_processes(pool4: Any) -> None:
    pool4.run(equals_one_rank, {"pp": 2, "dp": 2}, "1f1b", "fsdp", True)


def moves(path: str) -> None:
    """From four stages to four on two ranks, and back as whole tensors; optimisers, too."""
    four, two = mc.make_mesh({"pp": 4}), mc.make_mesh({"dp": 2, "pp": 2})
    old, new = step_of(four, "1f1b"), step_of(two, "interleaved")
    adams = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (old, new)]

    def train(number: int, *which: int) -> None:
        for each in which:
            (old, new)[each](*batch(number))
            adams[each].step()
            adams[each].zero_grad()

    train(0, 0)
    parallel.checkpoint.save(path, old, adams[0], mesh=four)
    parallel.checkpoint.load(path, new, adams[1], mesh=two)
    train(1, 0, 1)
    found = [parallel.full_state_dict(each, mesh=mesh) for each, mesh in ((old, four), (new, two))]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    made().load_state_dict(found[0])
    parallel.load_full_state_dict(new, made().state_dict(), mesh=two)
    torch.testing.assert_close(parallel.full_state_dict(new, mesh=two), dict(made().state_dict()))


def test_states_move(tmp_path: Path) -> None:
    mc.launch(moves, ranks=4, args=(str(tmp_path),))


def tied_move(path: str) -> None:
    """The embedding and the head are on two ranks, then on one, then on two."""
    mesh, found = mc.make_mesh({"pp": 2}), []
    for at, schedule in enumerate(("interleaved", "zbv", "interleaved")):
        step = step_of(mesh, schedule, copies=False)
        adam = torch.optim.AdamW(step.parameters(), lr=0.01)
        for number in range(2):
            if number and at:
                parallel.checkpoint.load(path, step, adam, mesh=mesh)
            elif number:
                parallel.checkpoint.save(path, step, adam, mesh=mesh)
            step(*batch(number))
            adam.step()
            adam.zero_grad()
        found.append(parallel.full_state_dict(step, mesh=mesh))
        if at < 2:  # the next one takes what this one has taken
            parallel.checkpoint.load(path, step, adam, mesh=mesh)
            parallel.checkpoint.save(path, step, adam, mesh=mesh)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-9, atol=1e-9)


def test_states_of_tied_stages_move(tmp_path: Path) -> None:
    mc.launch(tied_move, ranks=2, args=(str(tmp_path),))


class Places(nn.Module):
    """The gradient of the token is a part of that of the places, where there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.zeros(1, 2, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x[:, None]], 1) + self.places


def collects() -> list[Any]:
    mesh = mc.make_mesh({"dp": 2})
    model = parallel.data_parallel(Places(), "dp", grads="mean", mesh=mesh)
    with parallel.no_sync(model):
        for _ in range(3):
            (model(torch.ones(1, D)) * torch.arange(1.0, 9).view(2, D)).sum().backward()
    parallel.reduce_gradients(model)
    return [p.grad.view(-1)[:D].tolist() for p in model.parameters() if p.grad is not None]


def test_gradients_that_share_memory_are_added_up_once() -> None:
    assert mc.launch(collects, ranks=2) == [[[3.0, 6.0, 9.0, 12.0]] * 2] * 2


def has_both_ends() -> None:
    """The embedding is in two stages of a rank."""
    mesh = mc.make_mesh({"pp": 2, "dp": 2})
    stages, rank, whole = parallel.split_stages(made(), 4), mesh.coordinate["pp"], made()
    mine = [parallel.data_parallel(stages[at], "dp", grads="sum", mesh=mesh) for at in (rank, 3 - rank)]
    step = parallel.pipelined(mine, "pp", loss=loss, microbatches=2, grads="mean", schedule="zbv", mesh=mesh)
    both = batch(0)
    for _ in range(2):
        step(*(each.chunk(2)[mesh.coordinate["dp"]] for each in both))
        (2 * loss(whole(both[0]), both[1])).backward()
    expected = dict(whole.named_parameters())
    for name, p in step.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-9, atol=1e-9)
    with mc.check_vma(mesh=mesh), pytest.raises(mc.MeshError, match="step under check_vma"):
        step(*both)


def test_a_parameter_of_two_stages_of_a_rank_is_reduced_once() -> None:
    mc.launch(has_both_ends, ranks=4)
