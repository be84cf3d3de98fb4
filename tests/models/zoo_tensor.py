"""How the models of the zoo are trained with tensor parallelism: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo import Model
from zoo_methods import Method, checkpointed, fsdp, half_frozen, has_checkpoints
from zoo_plans import IN_SEQUENCES, NOT_IN_FOUR, PLANS, plan_of

from meshcomm import current_mesh, parallel

Apply = Callable[[nn.Module, Model], Any]


def tp(module: nn.Module, model: Model) -> None:
    """By the plan of the model."""
    styles, divide = plan_of(model.name, module, current_mesh().shape["tp"])  # type: ignore[union-attr]
    parallel.tensor_parallel(module, styles, axis="tp", divide=divide)


def auto(module: nn.Module, model: Model) -> None:
    """By a plan that is found."""
    parallel.tensor_parallel(module, "auto", axis="tp")


NOT_FOUND = {
    "ResNet": "nothing but convolutions", "U-Net": "nothing but convolutions",
    "Mamba": "weights that kernels read", "Mamba2": "weights that kernels read",
}  # fmt: skip
"""What auto_plan refuses, and why."""


def has_auto(module: nn.Module, model: Model) -> str:
    """Whether one is found."""
    return NOT_FOUND.get(model.name, "")


NOT_IN_SEQUENCES = {
    "Albert": "attention and its residual stream are one module", "Rwkv": "tokens take from those before them",
    "ViT": "five tokens", "Dinov2": "five tokens", "ViLT": "thirteen tokens of both", "Wav2Vec2": "39 frames",
    "Hubert": "39 frames", "LSTM": "no list of layers",
    "ConvNext": "pictures between layers", "Segformer": "pictures between layers", "Swin": "windows of pictures",
    "Llama with LoRA": "generate() of a part of what is cut",
}  # fmt: skip
"""Where none is found that cuts the sequence, and why."""


def has_auto_in_sequences(module: nn.Module, model: Model) -> str:
    """Whether one is found that cuts the sequence."""
    return NOT_FOUND.get(model.name) or NOT_IN_SEQUENCES.get(model.name, "")


def in_sequences(module: nn.Module, model: Model) -> None:
    """With activations between the blocks cut along the sequence."""
    styles, divide = plan_of(model.name, module, current_mesh().shape["tp"], sequence=True)  # type: ignore[union-attr]
    parallel.tensor_parallel(module, styles, axis="tp", sequence=True, divide=divide)


def auto_in_sequences(module: nn.Module, model: Model) -> None:
    """By a plan that is found, with activations cut along the sequence."""
    parallel.tensor_parallel(module, "auto", axis="tp", sequence=True)


def _then(first: Apply, second: Apply) -> Apply:
    def both(module: nn.Module, model: Model) -> None:
        first(module, model)
        second(module, model)

    return both


def _dp(module: nn.Module, model: Model) -> None:
    parallel.convert_batch_norm(module, "dp")
    parallel.data_parallel(module, "dp", grads="mean")


def _hsdp(module: nn.Module, model: Model) -> None:
    parallel.convert_batch_norm(module, ("dp", "fsdp"))
    parallel.fully_shard(module, "fsdp", grads="mean", replica_axis="dp")


def has_plan(module: nn.Module, model: Model) -> str:
    """Whether there is one."""
    return "" if model.name in PLANS else "no plan by hand"


def _in_four(module: nn.Module, model: Model) -> str:
    return has_plan(module, model) or ("two heads or groups for four ranks" if model.name in NOT_IN_FOUR else "")


def _has_sequences(module: nn.Module, model: Model) -> str:
    if model.name in ("Llama with LoRA", "Deberta", "DebertaV2"):
        return "no plan with a cut sequence"
    return has_plan(module, model) or ("" if PLANS[model.name] in IN_SEQUENCES else "no plan with a cut sequence")


def _checkpoints(module: nn.Module, model: Model) -> str:
    return has_plan(module, model) or has_checkpoints(module, model)


def _checkpoints_in_sequences(module: nn.Module, model: Model) -> str:
    return _has_sequences(module, model) or has_checkpoints(module, model)


TP, TP4, DP_TP = {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}
FSDP_TP, REPLICA_FSDP_TP = {"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}
_reentrant, _other = checkpointed(use_reentrant=True), checkpointed(use_reentrant=False)

TENSOR: tuple[Method, ...] = (
    Method("tp", TP, tp, (), fits=has_plan, generate=True),
    Method("tp of four", TP4, tp, (), fits=_in_four, generate=True),
    Method("tp, sequence", TP, in_sequences, (), fits=_has_sequences, generate=True),
    Method("tp, auto", TP, auto, (), fits=has_auto, generate=True),
    Method("tp, auto, sequence", TP, auto_in_sequences, (), fits=has_auto_in_sequences, generate=True),
    Method("tp of four, auto", TP4, auto, (), fits=has_auto, generate=True),
    Method("fsdp x tp, auto", FSDP_TP, _then(auto, fsdp), ("fsdp",), fits=has_auto, clip=0.1, generate=True),
    Method("dp x tp", DP_TP, _then(tp, _dp), ("dp",), fits=has_plan, micro=2, clip=0.1),
    Method("fsdp x tp", FSDP_TP, _then(tp, fsdp), ("fsdp",), fits=has_plan, clip=0.1, generate=True),
    Method("replica x fsdp x tp", REPLICA_FSDP_TP, _then(tp, _hsdp), ("dp", "fsdp"), fits=has_plan, clip=0.1),
    Method("tp, reentrant checkpoints", TP, tp, (), _reentrant, _checkpoints),
    Method("fsdp x tp, checkpoints", FSDP_TP, _then(tp, fsdp), ("fsdp",), _other, _checkpoints),
    Method("fsdp x tp, sequence, checkpoints", FSDP_TP, _then(in_sequences, fsdp), ("fsdp",), _other,
           _checkpoints_in_sequences, clip=0.1),
    Method("tp, half frozen", TP, tp, (), half_frozen, has_plan),
)  # fmt: skip
