"""Models as their authors wrote them, small and of random numbers: one row each, nothing is downloaded.

Add a row to ``ZOO``; ``make test-models`` trains it by each method of ``zoo_methods.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Rows along the first dimension of each tensor."""

VOCABULARY, LENGTH, WIDTH = 64, 8, 32

Settings = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model of the zoo."""

    name: str
    make: Callable[[], nn.Module]
    """A new one, of random numbers as they come."""
    batch: Callable[[int], Batch]
    """So many rows, the same in each call."""
    kind: str
    loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch).loss
    """The mean over rows, each of which counts alike."""
    generates: bool = False
    """Has ``generate``."""
    units: Sequence[str] | None = None
    """What ``fully_shard`` gathers by itself where a method names units by hand; None: as it chooses them."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """For ``tensor_parallel``; empty: "auto"."""
    frozen: Sequence[str] = ()
    """Beginnings of names of parameters for the methods that freeze a part; none: the first half of all."""
    repeats: bool = False
    """A layer runs several times."""


def _of(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def built(head: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers' on a configuration of its own."""
    return lambda: _of(head)(_of(config)(**settings))


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _tokens(rows: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=_draws())
    return {"input_ids": ids, "labels": ids}


def _pairs(rows: int) -> Batch:
    """Tokens, and other ones as labels: of one that fills in, of an encoder and a decoder."""
    both = torch.randint(3, VOCABULARY, (2, rows, LENGTH), generator=_draws())
    return {"input_ids": both[0], "labels": both[1], "attention_mask": torch.ones_like(both[0])}


def _pictures(size: int, labels: Callable[[int, torch.Generator], Tensor] | None = None) -> Callable[[int], Batch]:
    def rows_of(rows: int) -> Batch:
        draws = _draws()
        pictures = torch.randn(rows, 3, size, size, generator=draws, dtype=torch.float64)
        found = torch.randint(CLASSES, (rows,), generator=draws) if labels is None else labels(rows, draws)
        return {"pixel_values": pictures, "labels": found}

    return rows_of


def _sounds(rows: int) -> Batch:
    draws = _draws()
    sounds = torch.randn(rows, 400, generator=draws, dtype=torch.float64)
    return {"input_values": sounds, "labels": torch.randint(3, VOCABULARY, (rows, 4), generator=draws)}


def _spectra(rows: int) -> Batch:
    draws = _draws()
    spectra = torch.randn(rows, 8, 16, generator=draws, dtype=torch.float64)
    return {"input_features": spectra, "labels": torch.randint(3, VOCABULARY, (rows, LENGTH), generator=draws)}


def _captions(rows: int) -> Batch:
    """Pictures with their texts."""
    return {"input_ids": _tokens(rows)["input_ids"], "pixel_values": _pictures(8)(rows)["pixel_values"]}


def _questions(rows: int) -> Batch:
    """The same, and how likely each answer is."""
    return {**_captions(rows), "labels": torch.rand(rows, CLASSES, generator=_draws(), dtype=torch.float64)}


def _matched(model: nn.Module, batch: Batch) -> Tensor:
    """Rows by themselves: contrast with others would need those of all ranks."""
    found = model(**batch)
    return (1 - F.cosine_similarity(found.text_embeds, found.image_embeds)).mean() + found.text_embeds.square().mean()


class Tagger(nn.Module):
    """An LSTM in both directions between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embedding(input_ids))[0])
        return found


def _tagged(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class Level(nn.Module):
    """Two convolutions with norms of the batch."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.GroupNorm(2, outer)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norms[1](self.second(F.silu(self.norms[0](self.first(x)))))
        return F.silu(found)


class UNet(nn.Module):
    """Down and up again, with what was there on the way down beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Level(3, 8), Level(8, 16)])
        self.middle = Level(16, 16)
        self.up = nn.ModuleList([Level(32, 8), Level(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        found: Tensor = self.head(x)
        return found


def _drawn_over(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["pixel_values"]) - batch["pixel_values"].flip(-1)).square().mean()


def _with_lora() -> nn.Module:
    """Low-rank adaptors beside the products of a decoder that itself stands still."""
    peft: Any = importlib.import_module("peft")
    how = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(built("LlamaForCausalLM", "LlamaConfig", **_GROUPED)(), how)
    return adapted


CLASSES = 10
_ENDS: Settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **_ENDS,
}
_WIDE: Settings = {**_SMALL, "intermediate_size": 64, "max_position_embeddings": 32}
_GROUPED: Settings = {**_WIDE, "num_key_value_heads": 2, "head_dim": 8}
_STILL: Settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SEEN: Settings = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GPT2: Settings = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, **_ENDS}
_BOTH: Settings = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "decoder_start_token_id": 1,
    "forced_eos_token_id": None, **_ENDS,
}  # fmt: skip
_HEARD: Settings = {
    **_WIDE, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}  # fmt: skip
_TEXT: Settings = {**_SEEN, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **_ENDS}
_SIGHT: Settings = {**_SEEN, "image_size": 8, "patch_size": 4}


def _decoder(name: str, kind: str = "dense decoder", **settings: Any) -> Model:
    made = built(f"{name}ForCausalLM", f"{name}Config", **settings)
    return Model(name, made, _tokens, kind, generates=True)


def _mixture(name: str, **settings: Any) -> Model:
    # Its other kinds of experts have no float64.
    return _decoder(name, "mixture decoder", **{**_GROUPED, "experts_implementation": "eager", **settings})


def _fills_in(name: str, repeats: bool = False, **settings: Any) -> Model:
    return Model(name, built(f"{name}ForMaskedLM", f"{name}Config", **settings), _pairs, "encoder", repeats=repeats)


def _two(name: str, head: str, **settings: Any) -> Model:
    return Model(name, built(head, f"{name}Config", **settings), _pairs, "encoder-decoder", generates=True)


def _sees(name: str, size: int, **settings: Any) -> Model:
    made = built(f"{name}ForImageClassification", f"{name}Config", num_labels=CLASSES, **settings)
    return Model(name, made, _pictures(size), "vision")


def _hears(name: str, **settings: Any) -> Model:
    return Model(name, built(f"{name}ForCTC", f"{name}Config", **settings), _sounds, "audio")


ZOO: tuple[Model, ...] = (
    _decoder("Llama", **_GROUPED),
    Model("GPT-2", built("GPT2LMHeadModel", "GPT2Config", **_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
          _tokens, "dense decoder", generates=True),
    _decoder("Qwen2", **_GROUPED),
    _decoder("Qwen3", **_GROUPED),
    _decoder("Mistral", **_GROUPED, sliding_window=4),
    _decoder("Granite", **_GROUPED),
    _decoder("Gemma", **_GROUPED),
    _decoder("Gemma2", **_GROUPED, sliding_window=4, query_pre_attn_scalar=8),
    _decoder("Phi3", **_WIDE, num_key_value_heads=2),
    _decoder("Phi", **_WIDE),
    _decoder("GPTNeoX", **_WIDE),
    _decoder("OPT", **_SMALL, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0),
    _decoder("Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4, hidden_dropout=0.0,
             attention_dropout=0.0, **_ENDS),
    _decoder("Falcon", **_SMALL, hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("Olmo2", **_GROUPED | {"num_key_value_heads": 4}),
    _mixture("Mixtral", num_local_experts=4),
    _mixture("Olmoe", num_experts=4, num_experts_per_tok=2),
    _mixture("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    _mixture("DeepseekV3", num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
             n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
             qk_nope_head_dim=4, v_head_dim=8, head_dim=4),
    _mixture("Dots1", num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
             moe_intermediate_size=32, first_k_dense_replace=1, max_window_layers=2),
    _mixture("Phimoe", num_local_experts=4, router_jitter_noise=0.0),
    _mixture("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    _fills_in("Bert", **_WIDE, **_STILL),
    _fills_in("Roberta", **{**_WIDE, "pad_token_id": 1}, **_STILL),
    _fills_in("Deberta", **_WIDE, **_STILL, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
    _fills_in("DebertaV2", **_WIDE, **_STILL, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
    _fills_in("Albert", repeats=True, **_WIDE, **_STILL, embedding_size=16),
    _fills_in("ModernBert", **_WIDE, cls_token_id=1, sep_token_id=2),
    _two("T5", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2,
         num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
    _two("Bart", "BartForConditionalGeneration", **_BOTH, max_position_embeddings=32),
    _two("Marian", "MarianMTModel", **_BOTH, max_position_embeddings=32),
    Model("Whisper", built("WhisperForConditionalGeneration", "WhisperConfig", **{**_BOTH, "suppress_tokens": None},
          num_mel_bins=8, max_source_positions=8, max_target_positions=16), _spectra, "encoder-decoder",
          generates=True),
    _sees("ViT", 8, **_SIGHT, **_STILL),
    _sees("Dinov2", 8, **_SIGHT | {"mlp_ratio": 2}, **_STILL),
    _sees("Swin", 16, image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
          drop_path_rate=0.0),
    _sees("ResNet", 16, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"),
    _sees("ConvNext", 16, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2),
    Model("Segformer", built("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=CLASSES, num_encoder_blocks=2,
          depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2],
          num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16, classifier_dropout_prob=0.0,
          drop_path_rate=0.0),
          _pictures(16, lambda rows, draws: torch.randint(CLASSES, (rows, 16, 16), generator=draws)), "vision"),
    Model("U-Net", UNet, _pictures(8), "vision", _drawn_over),
    _hears("Wav2Vec2", **_HEARD),
    _hears("Hubert", **_HEARD),
    _decoder("Mamba", "state space", **_SMALL, state_size=4, expand=2, conv_kernel=4),
    _decoder("Mamba2", "state space", **_SMALL | {"num_heads": 4}, head_dim=16, state_size=8, expand=2, n_groups=2,
             chunk_size=4),
    _decoder("Rwkv", "state space", **_SMALL, context_length=16, rescale_every=0),  # else it writes to its weights
    Model("LSTM", Tagger, _pairs, "recurrent", _tagged),
    Model("CLIP", built("CLIPModel", "CLIPConfig", text_config=_TEXT, vision_config=_SIGHT, projection_dim=16), _captions,
          "two towers", _matched),
    Model("SigLIP", built("SiglipModel", "SiglipConfig", text_config=_TEXT, vision_config=_SIGHT), _captions,
          "two towers", _matched),
    Model("ViLT", built("ViltForQuestionAnswering", "ViltConfig", **_TEXT, **_STILL, image_size=8, patch_size=4,
          num_labels=CLASSES), _questions, "two towers"),
    Model("Llama with LoRA", _with_lora, _tokens, "adapted", generates=True),
)  # fmt: skip


def named(name: str) -> Model:
    """The model of that name."""
    return next(model for model in ZOO if model.name == name)
