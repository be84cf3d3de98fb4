"""How the models of the zoo are cut over an axis ``tp``: plans by hand, by name of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshcomm.parallel import Block, Column, Cut, Row, Vocab

Styles = dict[str, Any]
Plan = tuple[Styles, Mapping[str, int]]
"""The plan, and what is divided by how much."""

HEAD = Column(gather=True, sequence=False)
REST: Styles = {"*": "replicated"}


def _kv(module: nn.Module) -> int:
    config: Any = module.config
    return int(config.num_key_value_heads)


def _llama(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Llama and those of its form: norms of queries and keys, gates, experts, sinks, low-rank adaptors."""
    kv = _kv(module)
    routers = {"*.mlp.gate": "sequence", "*.router": "sequence"} if sequence else {}
    styles: Styles = {
        "*embed_tokens": Vocab(sequence=False), "*lm_head": HEAD, "*.lora_A": "replicated",
        "*.self_attn.q_proj": "column", "*.self_attn.[kv]_proj": Column(kv_heads=kv), "*.self_attn.o_proj": "row",
        "*.self_attn.[qk]_norm": "summed", "*.self_attn.sinks": Cut(0),
        "*.experts": Block("enter", "leave", ("hidden_states", "top_k_index", "top_k_weights")),
        "*.experts.gate_up_proj": Cut(1, 2), "*.experts.down_proj": Cut(2),
        "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row", **routers,
        **_along(sequence, "*.self_attn"), **REST,
    }  # fmt: skip
    return styles, {"*.self_attn.num_key_value_groups": max(1, tp // kv)}


def _olmo(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Norms of queries and keys over all heads at once."""
    styles, divide = _llama(module, tp, sequence)
    norms: Styles = {"*.self_attn.[qk]_norm": Block("join", "part"), "*.self_attn.[qk]_norm.*": "replicated"}
    return {**norms, **{pattern: style for pattern, style in styles.items() if pattern not in norms}}, divide


def _deepseek(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Heads are made of what all of them share: attention is a block, and what is whole in it is summed."""
    styles: Styles = {
        "*.self_attn": Block(), "*.self_attn.q_b_proj": "column", "*.self_attn.kv_b_proj": "column",
        "*.q_a_*": "summed", "*.kv_a_*": "summed",
    }  # fmt: skip
    return {**styles, **_llama(module, tp, sequence)[0]}, {"*.self_attn.num_heads": tp}


def _gpt_oss(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Pairs of gate and up stand beside each other; biases of experts."""
    styles, divide = _llama(module, tp, sequence)
    experts = {
        "*.experts": Block("enter", "leave", ("hidden_states", "router_indices", "routing_weights")),
        "*.experts.gate_up_proj": Cut(2), "*.experts.gate_up_proj_bias": Cut(1),
        "*.experts.down_proj": Cut(1), "*.experts.down_proj_bias": "once",
    }  # fmt: skip
    return {**experts, **{pattern: style for pattern, style in styles.items() if pattern not in experts}}, divide


def _along(sequence: bool, *blocks: str, first: str = "model.layers.0", last: str = "model.norm") -> Styles:
    """From one module to another activations are cut along the sequence; these blocks see all of it."""
    if not sequence:
        return {}
    gathers: Styles = {block: Block() for block in blocks}
    norms = {"*layernorm": "sequence", "*layernorm.*": "sequence", f"{last}.*": "sequence"}
    return {first: Block("split"), last: Block(None, "gather"), **gathers, **norms}


def _phi3(module: nn.Module, tp: int, sequence: bool) -> Plan:
    config: Any = module.config
    kv, heads = _kv(module), config.num_attention_heads
    each = config.hidden_size // heads
    styles: Styles = {
        "*embed_tokens": Vocab(sequence=False), "lm_head": HEAD,
        "*.qkv_proj": Column((heads * each, kv * each, kv * each), kv_heads=kv), "*.o_proj": "row",
        "*.gate_up_proj": Column(2), "*.down_proj": "row",
        **_along(sequence, "*.self_attn", "*.mlp"), **REST,
    }  # fmt: skip
    shared = max(1, tp // kv)
    divide = {"*.self_attn.num_key_value_groups": shared, "*.self_attn.config.num_attention_heads": tp}
    return styles, {**divide, "*.self_attn.num_key_value_heads": tp // shared}


def _gpt2(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.wte": Vocab(sequence=False), "lm_head": HEAD, "*.c_attn": Column(3), "*.c_proj": "row", "*.c_fc": "column",
        **REST,
    }  # fmt: skip
    if sequence:
        styles = {"transformer.h.0": Block("split"), "transformer.ln_f": Block(None, "gather"), "*.ln_*": "sequence",
                  "*.attn": Block(), "*.mlp": Block(), **styles}  # fmt: skip
    return styles, {"*.attn.num_heads": tp, "*.attn.split_size": tp}


def _neox(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.embed_in": Vocab(sequence=False), "lm_head": HEAD,
        "*.query_key_value": "column", "*.attention.dense": "row",
        "*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row",
        **_along(sequence, "*.attention", "*.mlp", first="gpt_neox.layers.0", last="gpt_neox.final_layer_norm"), **REST,
    }  # fmt: skip
    return styles, {}


def _bloom(module: nn.Module, tp: int, sequence: bool) -> Plan:
    heads = int(module.config.n_head)  # type: ignore[union-attr, arg-type]
    before = "enter" if sequence else None
    styles: Styles = {
        "*.word_embeddings": Vocab(sequence=False), "lm_head": HEAD,
        "*.self_attention": Block(before, own=("residual",), divided={"alibi": (0, heads)}),
        "*.query_key_value": "column", "*.self_attention.dense": "row",
        "*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row",
        **REST,
    }  # fmt: skip
    if sequence:
        styles = {"transformer.h.0": Block("split"), "transformer.ln_f": Block(None, "gather"),
                  "transformer.ln_f.*": "sequence", "*.input_layernorm": "sequence",
                  "*.post_attention_layernorm": "sequence", **styles}  # fmt: skip
    return styles, {"*.self_attention.num_heads": tp}


def _falcon(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """One head of keys and values for all; attention and what follows it side by side."""
    config: Any = module.config
    each = config.hidden_size // config.num_attention_heads
    fused = Column((config.hidden_size, each, each), kv_heads=1) if config.multi_query else "column"
    styles: Styles = {
        "*.word_embeddings": Vocab(sequence=False), "lm_head": HEAD, "*.query_key_value": fused,
        "*.self_attention.dense": "row", "*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row",
        **REST,
    }  # fmt: skip
    if sequence:
        styles = {"transformer.h.0": Block("split"), "transformer.ln_f": Block(None, "gather"),
                  "*.self_attention": Block(), "*layernorm": "sequence", "*ln_f.*": "sequence", **styles}  # fmt: skip
    return styles, {"*.self_attention.num_heads": tp}


def _opt(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.embed_tokens": Vocab(sequence=False), "lm_head": HEAD, "*.[qkv]_proj": "column", "*.out_proj": "row",
        "*.fc1": "column", "*.fc2": "row",
        **REST,
    }  # fmt: skip
    if sequence:
        styles = {"*.layers.0": Block("split"), "*.decoder.final_layer_norm": Block(None, "gather"),
                  "*.self_attn": Block(), "*layer_norm": "sequence", "*layer_norm.*": "sequence", **styles}  # fmt: skip
    return styles, {"*.self_attn.num_heads": tp}


def _bert(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """BERT, RoBERTa and DeBERTa: a block is a part of its parent's, and the head has a bias that stands twice."""
    styles: Styles = {
        "*.word_embeddings": Vocab(sequence=False), "*.decoder": HEAD,
        "cls.predictions.bias": Cut(0), "lm_head.bias": Cut(0),
        "*.self.query": "column", "*.self.key": "column", "*.self.value": "column", "*.attention.output.dense": "row",
        "*.self.*_proj": "column", "*.self.[qv]_bias": Cut(0),
        "*.intermediate.dense": "column", "*.output.dense": "row",
        **REST,
    }  # fmt: skip
    if sequence:
        styles = {"*.encoder": Block("split", "gather"), "*.attention.self": Block(), "*.intermediate": Block(),
                  "*.encoder.*.LayerNorm": "sequence", **styles}  # fmt: skip
    counts = ("num_attention_heads", "all_head_size")
    return styles, {f"*.self.{count}": tp for count in counts}


def _albert(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.word_embeddings": Vocab(sequence=False), "*.decoder": HEAD, "predictions.bias": Cut(0),
        "*.attention.query": "column", "*.attention.key": "column", "*.attention.value": "column",
        "*.attention.dense": "row", "*.ffn": "column", "*.ffn_output": "row",
        **REST,
    }  # fmt: skip
    return styles, {}


def _t5(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "shared": Vocab(sequence=False), "*.embed_tokens": Vocab(sequence=False), "lm_head": HEAD,
        "*.relative_attention_bias": "column", "*.[qkv]": "column", "*.o": "row", "*.wi*": "column", "*.wo": "row",
        **REST,
    }  # fmt: skip
    return styles, {"*.n_heads": tp, "*.inner_dim": tp}


def _bart(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """The table is cut along its width, and so is the head, which is the table."""
    styles: Styles = {
        "*shared": Column(gather=True), "*.embed_tokens": Column(gather=True), "lm_head": Row(split=True),
        "*.[qkv]_proj": "column", "*.out_proj": "row", "*.fc1": "column", "*.fc2": "row",
        **REST,
    }  # fmt: skip
    return styles, {}


def _whisper(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.embed_tokens": "vocab", "proj_out": HEAD,
        "*.[qkv]_proj": "column", "*.out_proj": "row", "*.fc1": "column", "*.fc2": "row",
        **REST,
    }  # fmt: skip
    return styles, {"*_attn.num_heads": tp}


def _vit(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Also Swin, whose biases of positions have something for each head, and Segformer, which convolves between."""
    styles: Styles = {
        "*.attention.[qkv]_proj": "column", "*.attention.o_proj": "row", "*.fc1": "column", "*.fc2": "row",
        "*.relative_position_bias_table": Cut(1), "*.dwconv.dwconv": Cut(0),
        **REST,
    }  # fmt: skip
    convolves = any(path.endswith(".dwconv.dwconv") for path, _ in module.named_modules())
    return styles, {"*.dwconv.dwconv.groups": tp} if convolves else {}


def _convnext(module: nn.Module, tp: int, sequence: bool) -> Plan:
    return {"*.pwconv1": "column", "*.pwconv2": "row", **REST}, {}


def _clip(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.token_embedding": "vocab", "*.self_attn.[qkv]_proj": "column", "*.self_attn.out_proj": "row",
        "*.fc1": "column", "*.fc2": "row", "*_projection": Column(gather=True),
        **REST,
    }  # fmt: skip
    return styles, {}


def _wav2vec2(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.[qkv]_proj": "column", "*.out_proj": "row", "*.intermediate_dense": "column", "*.output_dense": "row",
        "lm_head": HEAD,
        **REST,
    }  # fmt: skip
    return styles, {}


def _lstm(module: nn.Module, tp: int, sequence: bool) -> Plan:
    return {"embedding": "vocab", "head": HEAD, **REST}, {}


def _mamba(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Channels are cut; what steps and states are made of is summed, and used by each rank with its own channels."""
    styles: Styles = {
        "*.embeddings": Vocab(sequence=False), "lm_head": HEAD,
        "*.in_proj": Column(2), "*.conv1d": Cut(0), "*.x_proj": Row(enter=True), "*.dt_proj": Cut(0),
        "*.A_log": Cut(0), "*.D": Cut(0), "*.out_proj": "row",
        **REST,
    }  # fmt: skip
    return styles, {"*.conv1d.groups": tp, "*.mixer.intermediate_size": tp}


def _mamba2(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """Groups are cut, and all that belongs to them."""
    mixer: Any = next(part for path, part in module.named_modules() if path.endswith(".mixer"))
    inner, states, heads = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size, mixer.num_heads
    styles: Styles = {
        "*.embeddings": Vocab(sequence=False), "lm_head": HEAD,
        "*.in_proj": Column((inner, inner, states, states, heads)), "*.conv1d": Cut(0, (inner, states, states)),
        "*.mixer.norm": Cut(0), "*.mixer.A_log": Cut(0), "*.mixer.D": Cut(0), "*.mixer.dt_bias": Cut(0),
        "*.out_proj": "row",
        **REST,
    }  # fmt: skip
    counts = ("intermediate_size", "conv_dim", "num_heads", "n_groups", "conv1d.groups")
    return styles, {f"*.mixer.{count}": tp for count in counts}


def _rwkv(module: nn.Module, tp: int, sequence: bool) -> Plan:
    """States of the attention are made by the whole model, of a length that its config has: it stays whole."""
    return {"*.embeddings": "vocab", "head": HEAD, "*.feed_forward.key": "column", "*.feed_forward.value": "row",
            **REST}, {}  # fmt: skip


def _modernbert(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*.tok_embeddings": Vocab(sequence=False), "decoder": HEAD, "*.Wqkv": Column(3), "*.Wi": Column(2),
        "*.Wo": "row",
        **REST,
    }  # fmt: skip
    return styles, {}


def _phi(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles: Styles = {
        "*embed_tokens": Vocab(sequence=False), "lm_head": HEAD, "*.[qkv]_proj": "column", "*.self_attn.dense": "row",
        "*.fc1": "column", "*.fc2": "row",
        **_along(sequence, "*.self_attn", "*.mlp", last="model.final_layernorm"), **REST,
    }  # fmt: skip
    return styles, {}


def _marian(module: nn.Module, tp: int, sequence: bool) -> Plan:
    styles, divide = _bart(module, tp, sequence)
    return {**styles, "*shared": "vocab", "*.embed_tokens": "vocab", "lm_head": HEAD}, divide


PLANS: dict[str, Callable[[nn.Module, int, bool], Plan]] = {
    **dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Gemma", "Gemma2", "Gemma3", "Mixtral", "Qwen3Moe", "Llama with LoRA"), _llama),
    "Phi": _phi, "Phi3": _phi3, "GPT-2": _gpt2, "GPTNeoX": _neox, "Bloom": _bloom, "Falcon": _falcon, "OPT": _opt,
    **dict.fromkeys(("Olmo2", "Olmoe"), _olmo), "DeepseekV3": _deepseek, "GptOss": _gpt_oss,
    **dict.fromkeys(("BERT", "Bert", "Roberta", "Deberta", "DebertaV2"), _bert), "Albert": _albert,
    "ModernBert": _modernbert, "T5": _t5, "Bart": _bart, "Marian": _marian, "Whisper": _whisper,
    **dict.fromkeys(("ViT", "Swin", "Segformer"), _vit), "ConvNext": _convnext,
    "CLIP": _clip, "SigLIP": _clip, "Wav2Vec2": _wav2vec2, "Hubert": _wav2vec2,
    "Mamba": _mamba, "Mamba2": _mamba2, "Rwkv": _rwkv, "LSTM": _lstm,
}  # fmt: skip

NOT_IN_FOUR = ("Swin", "Segformer", "Mamba2", "Olmoe")
"""With two heads in the first stage, two groups, or norms over heads that ranks would share."""

IN_SEQUENCES = (_llama, _olmo, _gpt_oss, _deepseek, _phi, _phi3, _gpt2, _neox, _bloom, _falcon, _opt, _bert)
"""Of which the sequence is cut too."""


def plan_of(name: str, module: nn.Module, tp: int, sequence: bool = False) -> Plan:
    """A plan that names nothing that the module has not."""
    styles, divide = PLANS[name](module, tp, sequence)
    return fitting(module, styles), {pattern: by for pattern, by in divide.items() if by > 1}


def fitting(module: nn.Module, styles: Styles) -> Styles:
    """Those patterns for which something is left: of families some have what others have not."""
    modules = [path for path, _ in module.named_modules(remove_duplicate=False)]
    left = [path for path, _ in module.named_parameters(remove_duplicate=False)]
    kept: Styles = {}
    for pattern, style in styles.items():
        if isinstance(style, Block):
            if any(fnmatchcase(path, pattern) for path in modules):
                kept[pattern] = style
            continue
        named = [path for path in left if any(fnmatchcase(prefix, pattern) for prefix in _beginnings(path))]
        if named:
            kept[pattern] = style
            left = [path for path in left if path not in named]
    return kept


def _beginnings(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[: at + 1]) for at in range(len(names))]
