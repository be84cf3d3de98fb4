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


def _of(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def built(head: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers' on a configuration of its own."""
    return lambda: _of(head)(_of(config)(**settings))


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _tokens(rows: int, *, labels: bool = True, first: int = 3) -> Batch:
    ids = torch.randint(first, VOCABULARY, (rows, LENGTH), generator=_draws())
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


def _masked_tokens(rows: int) -> Batch:
    """Of one that fills in: tokens and other ones as labels."""
    both = torch.randint(3, VOCABULARY, (2, rows, LENGTH), generator=_draws())
    return {"input_ids": both[0], "labels": both[1], "attention_mask": torch.ones_like(both[0])}


def _pairs(rows: int) -> Batch:
    """Of an encoder and a decoder."""
    return _masked_tokens(rows)


def _pictures(size: int, classes: int = 10) -> Callable[[int], Batch]:
    def rows_of(rows: int) -> Batch:
        draws = _draws()
        pictures = torch.randn(rows, 3, size, size, generator=draws, dtype=torch.float64)
        return {"pixel_values": pictures, "labels": torch.randint(classes, (rows,), generator=draws)}

    return rows_of


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = _SMALL | {"intermediate_size": 64}
_GROUPED = _WIDE | {"num_key_value_heads": 2, "max_position_embeddings": 32}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _decoder(name: str, **settings: Any) -> Model:
    made = built(f"{name}ForCausalLM", f"{name}Config", **settings)
    return Model(name, made, _tokens, "dense decoder", generates=True)


ZOO: tuple[Model, ...] = (
    _decoder("Llama", **_GROUPED),
    Model(
        "GPT-2",
        built("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4,
              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
        _tokens, "dense decoder", generates=True,
    ),
    Model(
        "BERT",
        built("BertForMaskedLM", "BertConfig", **_WIDE, **_STILL, max_position_embeddings=32),
        _masked_tokens, "encoder",
    ),
    Model(
        "T5",
        built("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2,
              num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
        _pairs, "encoder-decoder", generates=True,
    ),
    Model(
        "ViT",
        built("ViTForImageClassification", "ViTConfig", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
              intermediate_size=64, image_size=8, patch_size=4, num_labels=10, **_STILL),
        _pictures(8), "vision",
    ),
)  # fmt: skip


def named(name: str) -> Model:
    """The model of that name."""
    return next(model for model in ZOO if model.name == name)


__all__ = ["ZOO", "Batch", "F", "Model", "built", "named"]
