"""Files of transformers: loaded on one mesh, saved, loaded by transformers, loaded on another mesh, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import full_state_dict, fully_shard, load_full_state_dict, tensor_parallel

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra `models`"),
    pytest.mark.filterwarnings("default"),  # what others warn of is not ours
]

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DECODER: dict[str, Any] = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.gate_proj": "column", "*.up_proj": "column",
                           "*.down_proj": "row", "*": "replicated"}  # fmt: skip

# Name of the head, of the configuration, its settings, and a plan for tensor_parallel where one is tried.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, DECODER),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, DECODER),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}, DECODER),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, None),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "head_dim": 8}, None),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}, None),
    "BERT": ("BertForMaskedLM", "BertConfig", {**SMALL, "max_position_embeddings": 32}, None),
    "T5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, None),
    "BART": ("BartForConditionalGeneration", "BartConfig",
             {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32}, None),
    "ViT": ("ViTForImageClassification", "ViTConfig",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
             "patch_size": 4}, None),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig",
               {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, None),
}  # fmt: skip


def made(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    head, config, settings, _ = FAMILIES[family]
    found: nn.Module = getattr(transformers, head)(getattr(transformers, config)(**settings))
    return found


def spread(module: nn.Module, mesh: mc.Mesh, family: str) -> None:
    plan = FAMILIES[family][3]
    if mesh.shape.get("tp", 1) > 1 and plan:
        tensor_parallel(module, plan, axis="tp")
    if "fsdp" in mesh.shape:
        fully_shard(module, "fsdp", grads="mean", replica_axis="replica" if "replica" in mesh.shape else None)


def meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return made(family)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in module.state_dict().items()}


def same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = made(family)
    with torch.no_grad():
        for x in alone.parameters():
            x.add_(torch.randn_like(x) / 8)
    expected = state_of(alone)
    alone.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")  # type: ignore[operator]
    kind = type(alone)

    def first() -> None:
        mesh = mc.make_mesh({"fsdp": 2, "tp": 2})
        with mc.use_mesh(mesh):
            module = meta(family)
            spread(module, mesh, family)
            load_full_state_dict(module, tmp_path / "theirs")
            buffers = dict(alone.named_buffers())
            for name, x in module.named_buffers():
                assert torch.equal(x, buffers[name]), name
            state = full_state_dict(module, 0)
            if state is not None:
                same(state, expected)
                module.save_pretrained(tmp_path / "ours", state_dict=state, max_shard_size="20KB")  # type: ignore[operator]

    def second() -> dict[str, Tensor]:
        mesh = mc.make_mesh({"replica": 2, "fsdp": 1, "tp": 2})
        with mc.use_mesh(mesh):
            module = meta(family)
            spread(module, mesh, family)
            load_full_state_dict(module, tmp_path / "ours")
            return full_state_dict(module)

    mc.launch(first, ranks=4)
    same(state_of(kind.from_pretrained(tmp_path / "ours")), expected)  # type: ignore[attr-defined]
    for found in mc.launch(second, ranks=4):
        same(found, expected)


def test_a_model_without_its_head(tmp_path: Path) -> None:
    """The file's names begin with those of the model around it, and there is more in it."""
    made("Llama").save_pretrained(tmp_path)  # type: ignore[operator]

    def main() -> None:
        mesh = mc.make_mesh({"fsdp": 2})
        module = fully_shard(made("Llama").model, "fsdp", grads="mean", mesh=mesh)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\): 'lm_head.weight'"):
            load_full_state_dict(module, tmp_path)
        assert load_full_state_dict(module, tmp_path, strict=False) == ([], ["lm_head.weight"])
        inside = {"state_dict": made("Llama").state_dict(), "epoch": 1}
        with pytest.raises(RuntimeError, match=r"stands under 'state_dict' there: state\['state_dict'\]"):
            load_full_state_dict(fully_shard(made("Llama"), "fsdp", grads="mean", mesh=mesh), inside)

    mc.launch(main, ranks=2)


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def lora(seed: int) -> Any:
        torch.manual_seed(0)
        module = made("Llama")
        torch.manual_seed(seed)
        return peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))

    lora(1).save_pretrained(tmp_path / "theirs")
    expected = peft.get_peft_model_state_dict(lora(1))

    def main() -> None:
        mesh = mc.make_mesh({"fsdp": 2})
        module = fully_shard(lora(2), "fsdp", grads="mean", mesh=mesh)
        with pytest.raises(RuntimeError, match="Missing key.*embed_tokens"):
            load_full_state_dict(module, tmp_path / "theirs")
        load_full_state_dict(module, tmp_path / "theirs", strict=False)
        with pytest.raises(mc.MeshError, match=r"as a slice[^!]*fix: state = full_state_dict\(module, 0\)"):
            module.save_pretrained(tmp_path / "slices")
        state = full_state_dict(module, 0)
        if state is not None:
            same(peft.get_peft_model_state_dict(module, state_dict=state), expected)
            module.save_pretrained(tmp_path / "ours", state_dict=state)

    mc.launch(main, ranks=2)
    torch.manual_seed(0)
    same(peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(made("Llama"), tmp_path / "ours")), expected)


def test_from_pretrained_of_what_is_cut(tmp_path: Path) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"fsdp": 2})
        module = fully_shard(made("Llama"), "fsdp", grads="mean", mesh=mesh)
        with pytest.raises(
            mc.MeshError, match=r"it would make another module[^!]*load_full_state_dict\(module, folder"
        ):
            module.from_pretrained(tmp_path)  # type: ignore[operator]

    mc.launch(main, ranks=2)
