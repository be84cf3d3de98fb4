"""split_stages: the stages together are the model, by values, gradients and names; and what cannot be cut is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import MeshError, parallel
from meshcomm.parallel import split_stages

D, WORDS = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """As people write them: it looks at the shape of its tokens, and adds positions of its own."""

    def __init__(self, tied: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(16, D))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        _, length = ids.shape
        x = self.embed(ids) * self.scale + self.position[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class SkippingGPT(GPT):
    """What the embedding gives is used again behind the blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))  # type: ignore[no-any-return]


class Crossed(GPT):
    """Not a row: something happens between the blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * 2
        return self.head(x)  # type: ignore[no-any-return]


class Wrong(GPT):
    """Stages could not know what the embedding gives, and autograd does not say that they need it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = x.detach().abs().mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=2, layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Sequential": (lambda: nn.Sequential(nn.Embedding(WORDS, D), nn.Sequential(Block(), Block()), Block()), 3),
    "GPT": (GPT, 3),
    "tied": (lambda: GPT(tied=True), 5),
    "used again": (SkippingGPT, 3),
    "transformers": (llama, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_stages_together_are_the_model(name: str) -> None:
    torch.manual_seed(0)
    make, n = MODELS[name]
    model = make().double()
    ids = torch.randint(0, WORDS, (2, 6))
    stages = split_stages(model, n)
    assert len(stages) == n
    whole = model(ids)
    x: Any = ids
    for stage in stages:
        x = stage(x)
    ours, theirs = (getattr(each, "logits", each) for each in (x, whole))
    assert torch.equal(ours, theirs)
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(theirs.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(ours.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True)
    for ours_of_one, theirs_of_one in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_of_one, theirs_of_one, rtol=1e-12, atol=1e-12)

    names = [key for stage in stages for key in stage.state_dict()]
    assert {*names} == {*model.state_dict()}
    twice = {"embed.weight"} if name == "used again" else set()
    assert {key for key in names if names.count(key) > 1} == twice
    for key, tensor in ((key, tensor) for stage in stages for key, tensor in stage.state_dict(keep_vars=True).items()):
        assert tensor is model.state_dict(keep_vars=True)[key], "nothing is copied"
    assert all(list(stage.parameters()) for stage in stages)


def test_ties_are_named() -> None:
    first, *between, last = split_stages(GPT(tied=True), 4)
    assert first.tied_parameters == {"embed.weight": "embed.weight"}
    assert last.tied_parameters == {"head.weight": "embed.weight"}
    assert not any(stage.tied_parameters for stage in between)
    assert [stage.tied_parameters for stage in split_stages(GPT(), 2)] == [{}, {}]


def test_stages_are_even() -> None:
    parts = nn.Sequential(*(nn.Linear(4, width) for width in (4,) * 6))
    assert [len(stage) for stage in split_stages(parts, 3)] == [2, 2, 2]  # type: ignore[arg-type]
    assert [len(stage) for stage in split_stages(parts, 2, [1, 1, 1, 1, 1, 5])] == [5, 1]  # type: ignore[arg-type]
    wide = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [len(stage) for stage in split_stages(wide, 2)] == [2, 3]  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was() -> None:
    model = GPT()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stages = split_stages(model, 3)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.blocks[0].training
    assert model.blocks[1].training
    assert [name for name, p in stages[2].named_parameters() if not p.requires_grad] == ["head.weight"]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    stages[1].eval()
    assert not model.blocks[2].training


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(tied=True)
    assert [len(list(stage.parameters())) for stage in split_stages(model, 2)]


@pytest.mark.parametrize(
    ("make", "said"), [(Crossed, "none is called block by block"), (Wrong, "gives something else")]
)
def test_what_cannot_be_cut_is_said(make: type[nn.Module], said: str) -> None:
    with pytest.raises(MeshError, match=said):
        split_stages(make(), 2)


def test_what_to_do_with_an_encoder_and_a_decoder() -> None:
    model = nn.Transformer(D, 2, 2, 2, 8, batch_first=True)
    with pytest.raises(MeshError, match="hand on its hidden values and the decoder's tokens"):
        split_stages(model, 2, example=(torch.ones(1, 3, D), torch.ones(1, 2, D)))


class Listless(GPT):
    """The forward stands on the object, as who patches a model leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = super().forward


def spread(model: nn.Module, adaptor: str, ranks: int = 1) -> nn.Module:
    mesh = mc.make_mesh({"a": ranks})
    if adaptor == "tensor_parallel":
        return parallel.tensor_parallel(model, {"*": "replicated"}, axis="a", mesh=mesh)
    if adaptor == "fully_shard":
        return parallel.fully_shard(model, "a", grads="mean", mesh=mesh)
    return parallel.data_parallel(model, "a", grads="mean", mesh=mesh)


@pytest.mark.parametrize("make", [GPT, MODELS["Sequential"][0]], ids=["GPT", "Sequential"])
@pytest.mark.parametrize("adaptor", ["tensor_parallel", "fully_shard", "data_parallel"])
def test_adaptors_come_after(adaptor: str, make: Callable[[], nn.Module]) -> None:
    """Each stage would run the whole model, or reduce nothing, and nobody would be told."""
    with pytest.raises(MeshError, match="has been spread by an adaptor[\\s\\S]*around each stage"):
        split_stages(spread(make(), adaptor), 2)


def test_a_forward_of_the_object_is_refused() -> None:
    with pytest.raises(MeshError, match="has a forward that is not its class's"):
        split_stages(Listless(), 2)


def test_stages_share_no_hooks() -> None:
    """Of the parts that several stages have a copy of, each has its own."""
    inside = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    first, second = split_stages(nn.Sequential(inside), 2)
    heard: list[str] = []
    first[0].register_forward_hook(lambda *_: heard.append("first"))
    second(first(torch.ones(1, D)))
    assert heard == ["first"]


def test_a_stage_has_a_plan() -> None:
    """It is looked at on what the stage before gives."""
    torch.manual_seed(0)
    model, ids = GPT().double(), torch.randint(0, WORDS, (2, 6))
    first, second = split_stages(model, 2)
    wanted = second(first(ids))
    mesh = mc.make_mesh({"tp": 1})
    for stage in (first, second):
        parallel.tensor_parallel(stage, "auto", axis="tp", mesh=mesh)
    torch.testing.assert_close(second(first(ids)), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adaptor", ["fully_shard", "data_parallel", "tensor_parallel"])
def test_adaptors_reach_the_parameters_of_the_model_itself(adaptor: str) -> None:
    """``position`` stands in no part of it, and in the first stage."""

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        first, second = (spread(stage, adaptor, ranks=2) for stage in split_stages(GPT().double(), 2))
        loss = second(first(ids)).square().mean()
        loss.backward()
        for stage in (first, second):
            for p in stage.parameters():
                p.data, p.grad = p.grad, None
        return loss.detach(), parallel.full_state_dict(first) | parallel.full_state_dict(second)

    torch.manual_seed(0)
    model, ids = GPT().double(), torch.arange(12).view(2, 6)
    loss = model(ids).square().mean()
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for mine, grads in mc.launch(gradients, ranks=2):
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close({name: grads[name] for name in wanted}, wanted, rtol=1e-12, atol=1e-12)


def test_what_two_stages_have_is_cut_once() -> None:
    first, last = split_stages(GPT(tied=True), 2)
    mesh = mc.make_mesh({"tp": 2})

    def program() -> None:
        mine = copy.deepcopy([first, last])
        for stage, plan in zip(mine, ({"embed": "vocab"}, {"head": "column"}), strict=True):
            parallel.tensor_parallel(stage, {**plan, "*": "replicated"}, axis="tp", mesh=mesh)

    with pytest.raises(MeshError, match="'head.weight' has been cut by tensor_parallel as 'embed.weight'"):
        mc.launch(program, ranks=2)
