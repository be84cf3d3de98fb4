"""Tensor and sequence parallelism against the unsharded model in float64: loss, gradients, steps, and what is sent."""

from __future__ import annotations

import contextlib
import copy
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
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    column_linear,
    enter,
    heads_of,
    leave,
    parallel_attention,
    row_linear,
    sequence_layer_norm,
    sequence_rms_norm,
    vocab_cross_entropy,
    vocab_embedding,
)
from meshcomm.parallel.data.ddp import data_parallel
from meshcomm.parallel.fsdp.module import fully_shard
from meshcomm.parallel.tensor.module import tensor_parallel, whole_parameters
from meshcomm.parallel.tensor.plan import Column
from meshcomm.spmd.types.check_vma import check_vma, mark_varying

F64 = torch.float64
Run = Callable[..., list[Any]]
V, D, S, H = 24, 16, 8, 4


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert actual is not None, what
    assert expected is not None, what
    assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


@contextlib.contextmanager
def sent(mesh: mc.Mesh, axis: str) -> Iterator[list[str]]:
    """The collectives that this rank's in-process link is told, but for what communicates nothing."""
    seen: list[str] = []
    link = mesh.axis(axis).link
    listen = link.announce

    def announce(note: Any) -> None:
        if note.what not in ("pvary", "shard"):
            seen.append(note.what)
        listen(note)

    link.announce, link.briefly = announce, False  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del vars(link)["announce"], vars(link)["briefly"]


# ----------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """As in GPT-2: one matrix for q, k and v, and constants where the sizes are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = H, D
        self.norm1, self.norm2 = nn.LayerNorm(D, dtype=F64), nn.LayerNorm(D, dtype=F64)
        self.qkv, self.proj = nn.Linear(D, 3 * D, dtype=F64), nn.Linear(D, D, dtype=F64)
        self.up, self.down = nn.Linear(D, 4 * D, dtype=F64), nn.Linear(4 * D, D, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).split(self.width, -1)
        b, s, _ = q.shape
        q, k, v = (each.view(b, s, self.heads, D // H).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, self.width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """With a head that is the embedding."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D, dtype=F64), nn.Embedding(S, D, dtype=F64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D, dtype=F64), nn.Linear(D, V, bias=False, dtype=F64)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


GPT_PLAN: dict[str, Any] = {
    "token": "vocab", "head": "column", "position": "replicated", "*.qkv": Column(3), "*.proj": "row", "*.up": "column",
    "*.down": "row", "*norm*": "replicated",
}  # fmt: skip
GPT_SEQUENCE = {**GPT_PLAN, "position": "split", "*norm*": "sequence"}


class Llama(nn.Module):
    """Matrices of their own, groups of heads, RMS norms, no biases but one."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        k = D // H
        self.embed, self.head = nn.Embedding(V, D, padding_idx=3, dtype=F64), nn.Linear(D, V, dtype=F64)
        self.wq, self.wo = nn.Linear(D, D, bias=False, dtype=F64), nn.Linear(D, D, bias=False, dtype=F64)
        self.wk, self.wv = nn.Linear(D, kv_heads * k, dtype=F64), nn.Linear(D, kv_heads * k, bias=False, dtype=F64)
        self.w1, self.w3 = nn.Linear(D, 3 * D, bias=False, dtype=F64), nn.Linear(D, 3 * D, bias=False, dtype=F64)
        self.w2 = nn.Linear(3 * D, D, dtype=F64)
        self.norms = nn.ModuleList(nn.RMSNorm(D, eps=1e-6, dtype=F64) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.norms[0](x)
        q, k, v = (w(y).unflatten(-1, (-1, D // H)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return self.head(self.norms[2](x))


def llama_plan(kv_heads: int, sequence: bool) -> dict[str, Any]:
    return {
        "w[kv]": Column(kv_heads=kv_heads), "w[q13]": "column", "w[o2]": "row", "embed": "vocab", "head": "column",
        "norms": "sequence" if sequence else "replicated",
    }  # fmt: skip


def seeded(make: Callable[[], nn.Module], seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return make()


def same(model: nn.Module, alone: nn.Module, what: str) -> None:
    """Parameters, and their gradients put together as the parameters are."""
    values = whole_parameters(model)
    before = [p.data for p in model.parameters()]
    gradients = []
    for p in model.parameters():
        p.data, kept = (torch.zeros_like(p) if p.grad is None else p.grad), p.data
        gradients.append(kept)
    wholes = whole_parameters(model)
    for p, kept in zip(model.parameters(), before, strict=True):
        p.data = kept
    for name, p in alone.named_parameters():
        close(values[name], p.detach(), f"{what}: {name}")
        close(wholes[name], torch.zeros_like(p) if p.grad is None else p.grad, f"{what}: gradient of {name}")


def training(shape: dict[str, int], which: str, sequence: bool, checkpointed: bool = False) -> None:
    """Ids are cut over dp; three steps of AdamW."""
    mesh = mc.make_mesh(shape)
    dp = mesh.shape.get("dp", 1)
    if which == "gpt":
        make: Callable[[], nn.Module] = GPT
        plan = GPT_SEQUENCE if sequence else GPT_PLAN
        divide: list[str] = ["*.heads", "*.width"]
    else:
        kv_heads = int(which[-1])
        make, plan, divide = lambda: Llama(kv_heads), llama_plan(kv_heads, sequence), []
    alone = seeded(make)
    model = seeded(make, 1 if mesh.rank == 0 else 100 + mesh.rank)  # the first rank's count
    names, objects = list(model.state_dict()), list(model.parameters())
    # The gradient of a bias of keys is zero but for rounding: Adam with a small eps would make a step of it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    tensor_parallel(model, plan, axis="tp", sequence=sequence, divide=divide, mesh=mesh)
    if dp > 1:
        data_parallel(model, "dp", grads="sum", mesh=mesh)
    model.checkpointed = checkpointed
    assert list(model.state_dict()) == names
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    for step in range(3):
        rows = torch.randint(V, (4, S + 1), generator=torch.Generator().manual_seed(step))
        ids, target = rows[:, :-1], rows[:, 1:].clone()
        target[0, 2] = -100
        expected = F.cross_entropy(alone(ids).flatten(0, 1), target.flatten(), reduction="sum")
        expected.backward()
        at = mesh.coordinate.get("dp", 0)
        logits = model(ids.chunk(dp)[at])
        assert logits.shape[-1] == V // mesh.shape["tp"]
        loss = vocab_cross_entropy(logits, target.chunk(dp)[at], axis="tp", reduction="sum", mesh=mesh)
        if dp > 1:
            loss = mc.all_reduce(loss, "dp", mesh=mesh)
        close(loss, expected, "loss")
        loss.backward()
        same(model, alone, f"step {step}")
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    same(model, alone, "at the end")


MESHES = [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}]
CASES = [
    *((shape, which) for which in ("gpt", "llama 1") for shape in MESHES),
    ({"tp": 4}, "llama 2"),
    ({"tp": 4}, "llama 4"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("shape", "which"), CASES, ids=str)
def test_training_is_that_of_one_rank(shape: dict[str, int], which: str, sequence: bool) -> None:
    mc.launch(training, ranks=mc.make_mesh(shape).size, args=(shape, which, sequence))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_with_checkpointed_blocks(sequence: bool) -> None:
    mc.launch(training, ranks=2, args=({"tp": 2}, "gpt", sequence, True))


def sharded(which: str) -> None:
    """Each part sharded once more over fsdp; weights are whole in their layer's forward only."""
    mesh = mc.make_mesh({"fsdp": 2, "tp": 2})
    make: Callable[[], nn.Module] = GPT if which == "gpt" else lambda: Llama(1)
    plan, divide = (GPT_SEQUENCE, ["*.heads", "*.width"]) if which == "gpt" else (llama_plan(1, True), [])
    alone, model = seeded(make), seeded(make)
    tensor_parallel(model, plan, axis="tp", sequence=True, divide=divide, mesh=mesh)
    fully_shard(model, "fsdp", grads="sum", units=[Block] if which == "gpt" else None, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    for step in range(4):
        rows = torch.randint(V, (4, S + 1), generator=torch.Generator().manual_seed(step))
        expected = F.cross_entropy(alone(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        mine = rows.chunk(2)[mesh.coordinate["fsdp"]]
        loss = vocab_cross_entropy(model(mine[:, :-1]), mine[:, 1:], axis="tp", reduction="sum", mesh=mesh)
        loss = mc.all_reduce(loss, "fsdp", mesh=mesh)
        close(loss, expected, f"loss of step {step}")
        for each, value in ((optimizer, loss), (other, expected)):
            value.backward()
            each.step()
            each.zero_grad()
    with pytest.raises(mc.MeshError, match="call tensor_parallel before fully_shard"):
        tensor_parallel(
            fully_shard(nn.Linear(2, 2), "fsdp", grads="sum", mesh=mesh), {"*": "column"}, axis="tp", mesh=mesh
        )
    with pytest.raises(mc.MeshError, match=r"pass fully_shard\(..., replica_axis=\)"):
        data_parallel(model, "fsdp", grads="sum", mesh=mesh)


@pytest.mark.parametrize("which", ["gpt", "llama"])
def test_sharded_once_more(which: str) -> None:
    mc.launch(sharded, ranks=4, args=(which,))


def all_on_processes() -> None:
    training({"dp": 2, "tp": 2}, "gpt", True)
    training({"tp": 4}, "llama 2", False)


def test_on_processes(pool4: Any) -> None:
    pool4.run(all_on_processes)


def compiled() -> None:
    """In one graph."""
    mesh = mc.make_mesh({"tp": 2})
    model = seeded(lambda: Llama(1))
    tensor_parallel(model, llama_plan(1, True), axis="tp", sequence=True, mesh=mesh)
    ids = torch.arange(2 * S).view(2, S) % V
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        vocab_cross_entropy(run(ids), ids, axis="tp", mesh=mesh).backward()
        found.append([p.grad for p in model.parameters()])
    assert_close(found[1], found[0])


@pytest.mark.thorough
def test_compiled_on_processes(pool2: Any) -> None:
    pool2.run(compiled)


# ------------------------------------------------------------------------------------------------------- what is sent


def counted(sequence: bool, which: str) -> tuple[list[str], list[str]]:
    mesh = mc.make_mesh({"tp": 2})
    if which == "gpt":
        model = tensor_parallel(
            GPT(),
            GPT_SEQUENCE if sequence else GPT_PLAN,
            axis="tp",
            sequence=sequence,
            divide=["*.heads", "*.width"],
            mesh=mesh,
        )
    else:
        model = tensor_parallel(Llama(2), llama_plan(2, sequence), axis="tp", sequence=sequence, mesh=mesh)
    ids = torch.zeros(1, S, dtype=torch.int64)
    model(ids).sum().backward()  # learns the order of the gradients that go together
    with sent(mesh, "tp") as forward:
        y = model(ids).sum()
    with sent(mesh, "tp") as backward:
        y.backward()
    return forward, backward


def test_what_is_sent() -> None:
    """As Megatron-LM: per block two sums each way, or two gathers and two scatters; q, k and v enter once."""
    ((forward, backward), _) = mc.launch(counted, ranks=2, args=(False, "gpt"))
    assert forward == ["all_reduce"] * 5  # the embedding, and two blocks
    assert backward == ["all_reduce"] * 5  # the head, and two blocks
    ((forward, backward), _) = mc.launch(counted, ranks=2, args=(True, "gpt"))
    assert forward == ["reduce_scatter", *["all_gather", "reduce_scatter"] * 4, "all_gather"]
    assert sorted(backward) == sorted(
        [*["all_gather"] * 5, "all_gather_invariant", *["reduce_scatter"] * 5, "all_reduce"]
    )
    ((forward, backward), _) = mc.launch(counted, ranks=2, args=(False, "llama"))
    assert forward == ["all_reduce"] * 3
    assert backward == ["all_reduce"] * 3
    ((forward, backward), _) = mc.launch(counted, ranks=2, args=(True, "llama"))
    assert forward == ["reduce_scatter", *["all_gather", "reduce_scatter"] * 2, "all_gather"]
    assert sorted(backward) == sorted([*["all_gather"] * 3, *["reduce_scatter"] * 3, "all_reduce"])


def held() -> list[int]:
    mesh = mc.make_mesh({"tp": 4})
    model = tensor_parallel(GPT(), GPT_PLAN, axis="tp", divide=["*.heads", "*.width"], mesh=mesh)
    storage = sum(p.untyped_storage().nbytes() for p in model.parameters())
    return [storage, 8 * sum(p.numel() for p in model.parameters())]


def test_each_rank_holds_its_part_alone() -> None:
    whole = sum(p.numel() for name, p in GPT().named_parameters() if "norm" not in name and "position" not in name)
    rows = sum(p.numel() for name, p in GPT().named_parameters() if name.endswith(("proj.bias", "down.bias")))
    kept = sum(p.numel() for name, p in GPT().named_parameters() if "norm" in name or "position" in name)
    for storage, used in mc.launch(held, ranks=4):
        assert storage == used == 8 * ((whole - rows) // 4 + rows + kept)


# -------------------------------------------------------------------------------------------------------- the module


def from_a_seed(tp: int) -> dict[str, Tensor]:
    mesh = mc.make_mesh({"tp": tp})
    torch.manual_seed(5 + 10 * mesh.rank)  # the others' do not count
    return whole_parameters(tensor_parallel(GPT(), GPT_PLAN, axis="tp", divide=["*.heads", "*.width"], mesh=mesh))


def test_a_seed_gives_the_same_model_on_any_mesh() -> None:
    torch.manual_seed(5)
    expected = dict(GPT().named_parameters())
    for tp in (1, 2, 4):
        for found in mc.launch(from_a_seed, ranks=tp, args=(tp,)):
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.fused = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 12, dtype=F64)
        self.count, self.hooked = 8, 0

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fused(self.up(x)).split([8, 4], -1)
        return a[..., :4] * b


def gathering() -> None:
    mesh = mc.make_mesh({"tp": 2})
    alone = seeded(Gathered)
    model = copy.deepcopy(alone)
    model.fused.register_forward_hook(lambda *_: setattr(model, "hooked", model.hooked + 1))
    plan: dict[str, Any] = {"up": Column(gather=True), "fused": Column(parts=(8, 4), gather=True)}
    tensor_parallel(model, plan, axis="tp", mesh=mesh)
    twin = copy.deepcopy(model)
    x = drawn(3, 4, seed=0)
    mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = model(mine), alone(whole)
    close(y, expected, "y")
    y.square().sum().backward()
    expected.square().sum().backward()
    close(mine.grad, whole.grad, "gradient of x")
    same(model, alone, "gathered")
    assert model.hooked == 1
    assert twin.up.weight.grad is None
    close(twin(x), expected.detach(), "a copy")
    with torch.no_grad():
        twin.up.weight.zero_()
        twin.up.bias.zero_()
        close(model(x), expected.detach(), "the copied")
        close(twin(x), (alone.fused.bias[:4] * alone.fused.bias[8:]).expand(3, 4), "the changed copy")


def test_outputs_that_are_gathered_and_copies() -> None:
    mc.launch(gathering, ranks=2)


def a_layer_alone() -> None:
    """A layer that is called outside of the module's forward; gradients are the same."""
    mesh = mc.make_mesh({"tp": 2})
    alone = seeded(lambda: Llama(1))
    model = copy.deepcopy(alone)
    tensor_parallel(model, llama_plan(1, True), axis="tp", sequence=True, mesh=mesh)
    x = drawn(2, S, D, seed=1)
    expected = alone.wk(alone.norms[0](x)).square().sum()
    y = model.wk(model.norms[0](x.chunk(2, 1)[mesh.rank]))
    (y.square().sum() / 2).backward()  # both ranks have the one head
    expected.backward()
    same(model, alone, "alone")


class Dropping(nn.Module):
    """Behind a decorator."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.ones_like(x))


def test_random_numbers_behind_a_decorator_differ_from_the_first_forward_on() -> None:
    def program() -> Tensor:
        mesh = mc.make_mesh({"tp": 2})
        model = nn.Sequential(nn.Linear(4, 128), Dropping(), nn.Linear(128, 4))
        tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp", mesh=mesh)
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda _, args, y: seen.append(y))
        model(torch.ones(1, 4))
        return seen[0]

    first, second = mc.launch(program, 2)
    assert not torch.equal(first, second)


def test_a_layer_alone() -> None:
    mc.launch(a_layer_alone, ranks=2)


def refused() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def wrong(text: str, plan: Any, module: Any = None, **kw: Any) -> None:
        model = GPT() if module is None else module
        before = {name: p.clone() for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
        with pytest.raises(mc.MeshError, match=text):
            tensor_parallel(model, plan, **{"axis": "tp", "mesh": mesh, **kw})
        for name, p in before.items():  # and nothing was done
            if not p.is_meta:
                assert torch.equal(model.get_parameter(name), p)

    rest = {"*": "replicated"}
    wrong("does not name 'token.weight', 'position.weight'", {"*.qkv": "column"})
    wrong("does not name 'head.weight'", {name: style for name, style in GPT_PLAN.items() if name != "head"})
    wrong(r"nothing is left for '\*.gate'", {"*.gate": "column", **rest})
    wrong(r"nothing is left for '\*.qkv'", {"*": "replicated", "*.qkv": "column"})
    wrong("has no style but 'rows'", {"*": "rows"})
    wrong("not a mapping", ["*"])
    wrong("'sequence', and the sequence is not cut", {"*": "sequence"})
    wrong("'split', and the sequence is not cut", {"*": "split"})
    wrong("belongs to a LayerNorm, not a Linear", {"norm": "column", **rest})
    wrong("belongs to a Linear, not a Embedding", {"*.up": "vocab", **rest})
    wrong("are one parameter, cut in two ways", {"token": "vocab", **rest})
    wrong("parameters of two styles", {"*.up.weight": "column", **rest})
    wrong(
        "dim 0 of '0.weight' of length 3 is not divisible by axis 'tp'", {"0": "column"}, nn.Sequential(nn.Linear(2, 3))
    )
    wrong("dim 1 of '0.weight' of length 3 is not divisible", {"0": "row"}, nn.Sequential(nn.Linear(3, 2)))
    wrong("has not 5 equal parts", {"0": Column(5)}, nn.Sequential(nn.Linear(2, 6)))
    wrong(r"length 3 \(a part of 6\) is not divisible", {"0": Column(2)}, nn.Sequential(nn.Linear(2, 6)))
    wrong("do not sum to its length 6", {"0": Column((4, 4))}, nn.Sequential(nn.Linear(2, 6)))
    wrong("kv_heads=3.* cannot be divided", {"0": Column(kv_heads=3)}, nn.Sequential(nn.Linear(2, 6)))
    wrong("are not gathered", {"0": Column(kv_heads=1, gather=True)}, nn.Sequential(nn.Linear(2, 6)))
    wrong("max_norm", {"0": "vocab"}, nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))
    wrong("no attribute that is an int is called", GPT_PLAN, divide=["*.head"])
    wrong("attribute count = 3 is not divisible", {"*": "replicated"}, odd(), divide=["count"])
    wrong("divide='x' is not a list", GPT_PLAN, divide="x")
    wrong("sequence=1 is neither", GPT_PLAN, sequence=1)
    wrong("no axis 'dp'", GPT_PLAN, axis="dp")
    wrong("not a torch.nn.Module but int", GPT_PLAN, module=3)
    done = tensor_parallel(nn.Linear(2, 2), {"*": "replicated"}, axis="tp", mesh=mesh)
    wrong("tensor parallel already", rest, done)
    with pytest.raises(mc.MeshError, match="the module is not tensor parallel"):
        whole_parameters(GPT())


def odd() -> nn.Module:
    module = nn.Linear(2, 2)
    module.count = 3
    return module


def test_errors_on_every_rank() -> None:
    mc.launch(refused, ranks=2)


def checked(mode: bool | str, sequence: bool) -> None:
    mesh = mc.make_mesh({"tp": 2})
    model, alone = seeded(GPT), seeded(GPT)
    plan = GPT_SEQUENCE if sequence else GPT_PLAN
    ids = torch.arange(2 * S).view(2, S) % V
    with mc.use_mesh(mesh), check_vma(mode):
        for p in model.parameters():
            mark_varying(p, ())
        tensor_parallel(model, plan, axis="tp", sequence=sequence, divide=["*.heads", "*.width"])
        mark_varying(ids, ())
        vocab_cross_entropy(model(ids), ids, axis="tp").backward()
    F.cross_entropy(alone(ids).flatten(0, 1), ids.flatten()).backward()
    same(model, alone, "checked")


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("mode", [True, "error"])
def test_under_the_checker(mode: bool | str, sequence: bool) -> None:
    """Every pvary is in its place."""
    mc.launch(checked, ranks=2, args=(mode, sequence))


def mistaken() -> None:
    """Norms of a cut sequence that the plan calls replicated."""
    mesh = mc.make_mesh({"tp": 2})
    model = GPT()
    ids = torch.zeros(2, S, dtype=torch.int64)
    with mc.use_mesh(mesh), check_vma("error"):
        for p in model.parameters():
            mark_varying(p, ())
        tensor_parallel(
            model, {**GPT_SEQUENCE, "*norm*": "replicated"}, axis="tp", sequence=True, divide=["*.heads", "*.width"]
        )
        mark_varying(ids, ())
        with pytest.raises(mc.VaryingError, match="a pvary is missing"):
            model(ids)


def test_the_checker_finds_a_mistake_in_the_plan() -> None:
    mc.launch(mistaken, ranks=2)


# --------------------------------------------------------------------------------------------------------- functions


def cut(x: Tensor, mesh: mc.Mesh, dim: int) -> Tensor:
    return x.detach().chunk(mesh.shape["tp"], dim)[mesh.coordinate["tp"]].clone().requires_grad_()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def an_mlp(sequence: bool) -> None:
    mesh = mc.make_mesh({"tp": 4})
    x, w1, b1, w2, b2 = (
        leaf(drawn(*shape, seed=i)) for i, shape in enumerate([(2, 8, 4), (12, 4), (12,), (4, 12), (4,)])
    )
    expected = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    expected.square().sum().backward()
    with mc.use_mesh(mesh):
        mine = cut(x, mesh, 1) if sequence else leaf(x)
        v1, c1, v2, c2 = cut(w1, mesh, 0), cut(b1, mesh, 0), cut(w2, mesh, 1), leaf(b2)
        h = F.gelu(column_linear(mine, v1, c1, axis="tp", sequence=sequence))
        y = row_linear(h, v2, c2, axis="tp", sequence=sequence)
        close(y, cut(expected, mesh, 1) if sequence else expected, "y")
        loss = y.square().sum()
        (mc.all_reduce(loss, "tp") if sequence else loss).backward()
        for found, whole, dim in (
            (mine, x, 1 if sequence else None),
            (v1, w1, 0),
            (c1, b1, 0),
            (v2, w2, 1),
            (c2, b2, None),
        ):
            assert whole.grad is not None
            close(found.grad, whole.grad if dim is None else cut(whole.grad, mesh, dim), f"gradient {whole.shape}")


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_column_and_row(sequence: bool) -> None:
    mc.launch(an_mlp, ranks=4, args=(sequence,))


def attending(kv_heads: int, sequence: bool) -> None:
    mesh = mc.make_mesh({"tp": 4})
    k = 2
    x = leaf(drawn(2, 8, 8, seed=0))
    wq, wo = leaf(drawn(8 * k, 8, seed=1)), leaf(drawn(8, 8 * k, seed=4))
    wk, wv = leaf(drawn(kv_heads * k, 8, seed=2)), leaf(drawn(kv_heads * k, 8, seed=3))
    heads = [F.linear(x, w).unflatten(-1, (-1, k)).transpose(1, 2) for w in (wq, wk, wv)]
    heads[1:] = [each.repeat_interleave(8 // kv_heads, 1) for each in heads[1:]]
    scores = (heads[0] @ heads[1].transpose(-1, -2) / k**0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    expected = F.linear((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2), wo)
    expected.square().sum().backward()
    with mc.use_mesh(mesh):
        mine = cut(x, mesh, 1) if sequence else leaf(x)
        q, o = cut(wq, mesh, 0), cut(wo, mesh, 1)
        pair = [leaf(w) if kv_heads < 4 else cut(w, mesh, 0) for w in (wk, wv)]
        used = [heads_of(mc.pvary(w, "tp"), kv_heads, axis="tp") if kv_heads < 4 else w for w in pair]
        y = parallel_attention(mine, q, *used, o, axis="tp", heads=8, kv_heads=kv_heads, sequence=sequence)
        close(y, cut(expected, mesh, 1) if sequence else expected, "y")
        loss = y.square().sum()
        (mc.all_reduce(loss, "tp") if sequence else loss).backward()
        close(q.grad, cut(wq.grad, mesh, 0), "q")  # type: ignore[arg-type]
        close(o.grad, cut(wo.grad, mesh, 1), "out")  # type: ignore[arg-type]
        close(mine.grad, cut(x.grad, mesh, 1) if sequence else x.grad, "x")  # type: ignore[arg-type]
        for found, whole in zip(pair, (wk, wv), strict=True):
            assert whole.grad is not None
            close(found.grad, whole.grad if kv_heads < 4 else cut(whole.grad, mesh, 0), "k, v")


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_attention(kv_heads: int, sequence: bool) -> None:
    mc.launch(attending, ranks=4, args=(kv_heads, sequence))


def embedding(sequence: bool, padding_idx: int | None) -> None:
    mesh = mc.make_mesh({"tp": 2})
    table = leaf(drawn(6, 3, seed=0))
    ids = torch.tensor([[0, 5, 3, 3], [2, 2, 1, 4]])
    g = drawn(2, 4, 3, seed=1)
    expected = F.embedding(ids, table, padding_idx)
    (expected * g).sum().backward()
    mine = cut(table, mesh, 0)
    y = vocab_embedding(ids, mine, axis="tp", padding_idx=padding_idx, sequence=sequence, mesh=mesh)
    close(y, cut(expected, mesh, 1) if sequence else expected, "y")
    (y * (cut(g, mesh, 1) if sequence else g)).sum().backward()
    close(mine.grad, cut(table.grad, mesh, 0), "table")  # type: ignore[arg-type]


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_vocab_embedding(sequence: bool, padding_idx: int | None) -> None:
    mc.launch(embedding, ranks=2, args=(sequence, padding_idx))


def entropy(reduction: Any, smoothing: float) -> None:
    mesh = mc.make_mesh({"tp": 2})
    logits = leaf(100 * drawn(2, 5, 6, seed=0))
    target = torch.tensor([[0, 5, 3, -1, 2], [1, 4, 4, -1, 0]])
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction=reduction, ignore_index=-1, label_smoothing=smoothing
    )
    mine = cut(logits, mesh, 2)
    with sent(mesh, "tp") as seen:
        loss = vocab_cross_entropy(
            mine, target, axis="tp", reduction=reduction, ignore_index=-1, label_smoothing=smoothing, mesh=mesh
        )
    assert seen == ["all_reduce", "all_reduce"]
    close(loss.flatten() if reduction == "none" else loss, expected, "loss")
    weights = drawn(10, seed=3) if reduction == "none" else torch.ones((), dtype=F64)
    with sent(mesh, "tp") as seen:
        (found,) = torch.autograd.grad((loss.flatten() * weights).sum(), mine, create_graph=True)
    assert seen == []
    (wanted,) = torch.autograd.grad((expected.flatten() * weights).sum(), logits, create_graph=True)
    close(found, cut(wanted, mesh, 2), "gradient")
    (again,) = torch.autograd.grad(mc.all_reduce(found.square().sum(), "tp", mesh=mesh), mine)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), logits)
    close(again, cut(wanted, mesh, 2), "second derivative")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocab_cross_entropy(reduction: str, smoothing: float) -> None:
    mc.launch(entropy, ranks=2, args=(reduction, smoothing))


def of_halves() -> None:
    mesh = mc.make_mesh({"tp": 2})
    logits = drawn(3, 8, seed=0).to(torch.bfloat16)
    loss = vocab_cross_entropy(logits.chunk(2, 1)[mesh.rank], torch.tensor([1, 7, 0]), axis="tp", mesh=mesh)
    assert loss.dtype == torch.float32
    assert_close(loss, F.cross_entropy(logits.float(), torch.tensor([1, 7, 0])))


def test_entropy_of_halves() -> None:
    mc.launch(of_halves, ranks=2)


def norms() -> None:
    mesh = mc.make_mesh({"tp": 2})
    x, w, b = leaf(drawn(2, 4, 6, seed=0)), leaf(drawn(6, seed=1)), leaf(drawn(6, seed=2))
    expected = F.layer_norm(x, (6,), w, b) + F.rms_norm(x, (6,), w, 1e-3)
    expected.square().sum().backward()
    mine, v, c = cut(x, mesh, 1), leaf(w), leaf(b)
    y = sequence_layer_norm(mine, v, c, axis="tp", mesh=mesh) + sequence_rms_norm(
        mine, v, axis="tp", eps=1e-3, mesh=mesh
    )
    close(y, cut(expected, mesh, 1), "y")
    mc.all_reduce(y.square().sum(), "tp", mesh=mesh).backward()
    close(mine.grad, cut(x.grad, mesh, 1), "x")  # type: ignore[arg-type]
    close(v.grad, w.grad, "weight")
    close(c.grad, b.grad, "bias")
    plain = sequence_layer_norm(mine, axis="tp", mesh=mesh) + sequence_rms_norm(mine, axis="tp", mesh=mesh)
    close(plain, cut(F.layer_norm(x, (6,)) + F.rms_norm(x, (6,)), mesh, 1), "without weights")


def test_norms_of_a_cut_sequence() -> None:
    mc.launch(norms, ranks=2)


def refused_functions() -> None:
    mesh = mc.make_mesh({"tp": 2})
    kw: Any = {"axis": "tp", "mesh": mesh}
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    ids, table = torch.tensor([0, 1]), torch.ones(2, 3)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("there is no dim of the sequence", lambda: enter(torch.ones(2), "tp", sequence=True, mesh=mesh)),
        ("there is no dim of the sequence", lambda: leave(torch.ones(2), "tp", sequence=True, mesh=mesh)),
        (r"weight \[3, 5\] does not fit x.shape\[-1\] = 4", lambda: column_linear(x, torch.ones(3, 5), **kw)),
        (r"bias \[4\] does not fit weight \[3, 4\]", lambda: row_linear(x, w, torch.ones(4), **kw)),
        ("is not divisible by axis", lambda: row_linear(torch.ones(3, 4), w, sequence=True, **kw)),
        ("ids are not integers", lambda: vocab_embedding(ids.double(), table, **kw)),
        ("id 4 is not in a vocabulary of 4", lambda: vocab_embedding(ids + 3, table, **kw)),
        ("id -1 is not in a vocabulary of 4", lambda: vocab_embedding(ids - 1, table, **kw)),
        ("id 9 is not in a vocabulary of 8", lambda: vocab_cross_entropy(x, torch.tensor([9, -100]), **kw)),
        (r"target \[3\] does not fit", lambda: vocab_cross_entropy(x, torch.tensor([0, 0, 0]), **kw)),
        ("reduction='max' is none of", lambda: vocab_cross_entropy(x, ids, reduction="max", **kw)),
        ("label_smoothing=2 is not from 0 to 1", lambda: vocab_cross_entropy(x, ids, label_smoothing=2, **kw)),
        ("3 heads do not divide axis 'tp'", lambda: heads_of(torch.ones(6), 3, **kw)),
        ("3 heads and 3 of keys", lambda: parallel_attention(x, w, w, w, w, heads=3, **kw)),
        (r"k \[3, 4\] is not \[1, 4\]", lambda: parallel_attention(x[None], torch.ones(2, 4), w, w, w, heads=4, kv_heads=2, **kw)),
        (r"shape \[3\] is not \[4\]", lambda: sequence_layer_norm(x, torch.ones(3), **kw)),
        (r"shape \[3\] is not \[4\]", lambda: sequence_rms_norm(x, torch.ones(3), **kw)),
    ]  # fmt: skip
    for text, call in calls:
        with pytest.raises(mc.MeshError, match=text):
            call()


def test_errors_of_functions_on_every_rank() -> None:
    mc.launch(refused_functions, ranks=2)


# ------------------------------------------------------------------------------------------------------- the example

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.thorough
def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["transformer_basics.py"])
    runpy.run_path(str(EXAMPLES / "transformer_basics.py"), run_name="__main__")
    assert "those of one rank, and so are all parameters" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- what has entered before


class Pair(nn.Module):
    """Two layers take the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(D, 2 * D, dtype=F64), nn.Linear(D, 2 * D, dtype=F64)
        self.last = nn.Linear(2 * D, D, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(
            self.body, x * 2, use_reentrant=False
        )  # what is new is of the mode
        return y

    def body(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x) * self.gate(x).tanh())
        return y


def pair_of(sequence: bool) -> tuple[Pair, Pair]:
    torch.manual_seed(0)
    alone = Pair()
    plan = {"first": "column", "gate": "column", "last": "row"}
    return alone, tensor_parallel(copy.deepcopy(alone), plan, axis="tp", sequence=sequence)


def in_inference_mode(sequence: bool) -> None:
    mesh = mc.make_mesh({"tp": 2})
    with mc.use_mesh(mesh):
        alone, net = pair_of(sequence)
        x = drawn(1, S, D, seed=1)
        part = (lambda x: mc.shard(x, "tp", dim=1)) if sequence else (lambda x: x)
        for mode in (torch.inference_mode, torch.no_grad, contextlib.nullcontext, torch.inference_mode):
            with mode():
                close(net(part(x)), part(alone(x)), mode.__name__)


@pytest.mark.parametrize("sequence", [False, True])
def test_inference_mode(sequence: bool) -> None:
    mc.launch(in_inference_mode, ranks=2, args=(sequence,))


def after_a_checkpoint() -> None:
    """What backward has computed again is not kept after it, nor by a copy."""
    mesh = mc.make_mesh({"tp": 2})
    with mc.use_mesh(mesh):
        alone, net = pair_of(sequence=False)
        x = drawn(3, D, seed=2)
        for model in (alone, net):
            model(x.requires_grad_()).square().sum().backward()
        assert [each._entered for each in vars(net).values() if hasattr(each, "_entered")] == [None]
        net.first(x)  # by itself
        close(copy.deepcopy(net)(x), alone(x), "copy")


def test_what_has_entered_a_part_that_a_checkpoint_computes_again_is_not_kept() -> None:
    mc.launch(after_a_checkpoint, ranks=2)
