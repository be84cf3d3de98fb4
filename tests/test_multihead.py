"""torch's MultiheadAttention whose heads are cut, the style "heads", against the whole one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import auto_plan, full_state_dict, fully_shard, tensor_parallel
from meshcomm.parallel.tensor.state import known_of

F64 = torch.float64
D, H, B, L, S = 16, 4, 3, 5, 6


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(D, H, dtype=F64, **options)
    for p in made.parameters():
        nn.init.normal_(p, 0, 0.4)
    return made


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


PADDING = torch.arange(S).expand(B, S) > torch.tensor([[3], [S], [4]])
CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)

Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "as it is": ({}, {}),
    "batch first, weights of each head": ({"batch_first": True}, {"average_attn_weights": False}),
    "no weights, causal": ({"batch_first": True, "bias": False}, {"need_weights": False, "attn_mask": CAUSAL}),
    "bias of keys, padding": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}),
    "other widths, a mask for each head": (
        {"kdim": 10, "vdim": 12, "batch_first": True},
        {"attn_mask": drawn(B * H, L, S), "key_padding_mask": PADDING.double() * -2, "average_attn_weights": False},
    ),
    "no batch": ({"add_zero_attn": True}, {"attn_mask": drawn(H, L, S)}),
}


def given(name: str, options: dict[str, Any]) -> list[Tensor]:
    widths = D, options.get("kdim", D), options.get("vdim", D)
    if name == "no batch":
        return [drawn(length, width) for length, width in zip((L, S, S), widths, strict=True)]
    rows = [drawn(B, length, width) for length, width in zip((L, S, S), widths, strict=True)]
    return rows if options.get("batch_first") else [x.transpose(0, 1) for x in rows]


def run(module: nn.MultiheadAttention, name: str, inputs: list[Tensor]) -> tuple[Any, ...]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    y, weights = module(*inputs, **CASES[name][1])
    loss = (y * drawn(*y.shape)).sum()
    if weights is not None:
        loss = loss + (weights * drawn(*weights.shape)).sum()
    loss.backward()
    return y, weights, [x.grad for x in inputs], {key: p.grad for key, p in module.named_parameters()}


def on_this_rank(name: str, ranks: int) -> tuple[Any, ...]:
    options = CASES[name][0]
    module = tensor_parallel(attention(**options), {"*": "heads"}, axis="tp", mesh=mc.make_mesh({"tp": ranks}))
    *rest, grads = run(module, name, given(name, options))
    state = known_of(module)
    assert state is not None
    return *rest, {key: state.whole(key, g) for key, g in grads.items()}


@pytest.mark.parametrize("name", CASES)
def test_is_that_of_one_rank(name: str) -> None:
    ranks = 4 if name == "as it is" else 2
    expected = run(attention(**CASES[name][0]), name, given(name, CASES[name][0]))
    for found in mc.launch(on_this_rank, ranks, (name, ranks)):
        assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_processes(pool4: Any) -> None:
    name = "bias of keys, padding"
    expected = run(attention(**CASES[name][0]), name, given(name, CASES[name][0]))
    for found in pool4.run(on_this_rank, name, 4):
        assert_close(found, expected, rtol=1e-10, atol=1e-10)


def transformer() -> nn.Transformer:
    torch.manual_seed(1)
    return nn.Transformer(D, H, 1, 1, 32, 0.0, batch_first=True, dtype=F64)


def loss_of(module: nn.Module, index: int) -> Tensor:
    x = drawn(4, L, D)[2 * index : 2 * index + 2]
    y: Tensor = module(x, x.flip(1), src_key_padding_mask=(torch.arange(L) > 3).expand(2, L))
    return y.square().mean()


def cut_and_sharded() -> dict[str, Tensor]:
    mesh = mc.make_mesh({"fs": 2, "tp": 2})
    module = transformer()
    x = drawn(2, L, D)
    plan = auto_plan(module, "tp", example=(x, x), mesh=mesh)
    assert [plan[f"{each}.layers.*.{part}"] for each, part in WHERE] == ["heads"] * 3, plan
    tensor_parallel(module, plan, axis="tp", mesh=mesh)
    fully_shard(module, "fs", grads="mean", mesh=mesh)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        loss_of(module, mesh.coordinate["fs"]).backward()
        optimiser.step()
    module.eval()
    with torch.no_grad():
        loss_of(module, 0)
    return full_state_dict(module)


WHERE = [("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "multihead_attn")]


def test_a_transformer_of_torchs() -> None:
    alone = transformer()
    optimiser = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        (sum(loss_of(alone, index) for index in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimiser.step()
    assert_close(mc.launch(cut_and_sharded, 4)[0], dict(alone.state_dict()), rtol=0, atol=1e-10)


class Other(nn.MultiheadAttention):
    """One with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def refused() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def wrong(text: str, module: nn.Module, plan: Any, **options: Any) -> None:
        with pytest.raises(mc.MeshError, match=text):
            tensor_parallel(copy.deepcopy(module), plan, axis="tp", mesh=mesh, **options)

    wrong("belongs to a Linear, not a MultiheadAttention", nn.Linear(2, 2), {"*": "heads"})
    wrong("belongs to a Other", Other(D, H), {"*": "heads"})
    wrong("the number of heads of '', 3, is not divisible", nn.MultiheadAttention(D - 1, 3), {"*": "heads"})
    wrong("has the sequence first", attention(), {"*": "heads"}, sequence=True)
    for half in ({"in_proj*": "heads", "*": "replicated"}, {"out_proj": "heads", "*": "replicated"}):
        wrong("MultiheadAttention is cut as a whole", attention(), half)
    wrong("'weight' is 'column', but belongs to a Conv1d", nn.Conv1d(4, 4, 3), {"*": "column"})
    places = nn.Conv1d(4, 4, 1)
    wrong("a Conv1d has the sequence last", places, {"*": "column"}, sequence=True)
    module = tensor_parallel(attention(), {"*": "heads"}, axis="tp", mesh=mesh)
    with pytest.raises(mc.MeshError, match="is_causal=True without attn_mask"):
        module(*given("as it is", {}), is_causal=True)
    odd: list[tuple[str, dict[str, Tensor]]] = [  # each would be broadcast, or added to the scores
        (r"key_padding_mask has shape \(6, 3\)", {"key_padding_mask": PADDING.t().contiguous()}),
        (r"attn_mask has shape \(1, 6\)", {"attn_mask": CAUSAL[:1]}),
        ("key_padding_mask has dtype torch.uint8", {"key_padding_mask": PADDING.to(torch.uint8)}),
    ]
    for text, masks in odd:
        with pytest.raises(mc.MeshError, match=text):
            module(*given("as it is", {}), **masks)
    query, key, value = given("as it is", {})
    with pytest.raises(mc.MeshError, match="batch and length do not go together"):
        module(query, key[:, :1], value[:, :1])


def test_what_is_wrong_is_said() -> None:
    mc.launch(refused, 2)
