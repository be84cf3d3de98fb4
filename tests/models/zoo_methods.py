"""How the models of the zoo are trained: one row each. Those with tensor parallelism stand in a file beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from zoo import Model

from meshcomm import parallel


def nothing(module: nn.Module, model: Model) -> None:
    """Leave it as it is."""


def always(module: nn.Module, model: Model) -> str:
    """It can be asked of any."""
    return ""


@dataclass(frozen=True)
class Method:
    """A way of training, on ranks and on one rank alone."""

    name: str
    axes: Mapping[str, int] = field(hash=False)
    """The mesh, eight ranks at most."""
    apply: Callable[[nn.Module, Model], Any]
    """Make it parallel, on every rank, under ``use_mesh``."""
    data: Sequence[str]
    """The axes over which rows are spread, as they follow each other in the mesh."""
    prepare: Callable[[nn.Module, Model], Any] = nothing
    """Before that, and of the one rank too."""
    fits: Callable[[nn.Module, Model], str] = always
    """Why it cannot be asked of this one; empty: it can."""
    micro: int = 1
    """Micro-batches of a step, all but the last without synchronisation."""
    clip: float = 0.0
    apart: bool = False
    """One rank takes the rows of each of many by themselves: where random numbers or rounding depend on who has which."""
    autocast: torch.dtype | None = None
    """The forward runs under it."""
    param_dtype: torch.dtype | None = None
    """What parameters are gathered and used in."""
    drawn: str = ""
    """A layout under which random numbers are drawn; empty: as torch draws them."""
    generate: bool = False
    """Tokens after training as one rank's, with a cache."""
    tolerance: float = 1e-8

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        ranks = 1
        for size in self.axes.values():
            ranks *= size
        return ranks

    @property
    def narrow(self) -> bool:
        """Parameters are of float32, and not of float64."""
        return self.autocast is not None or self.param_dtype is not None


def dp(module: nn.Module, model: Model) -> None:
    """Data parallel, batch norms over all rows."""
    parallel.convert_batch_norm(module, "dp")
    parallel.data_parallel(module, "dp", grads="mean", bucket_mb=0.01)


def fsdp(module: nn.Module, model: Model, **options: Any) -> None:
    """Sharded, units as the library chooses them."""
    parallel.convert_batch_norm(module, "fsdp")
    parallel.fully_shard(module, "fsdp", grads="mean", **options)


def hsdp(module: nn.Module, model: Model) -> None:
    """Sharded, with replicas."""
    parallel.convert_batch_norm(module, ("dp", "fsdp"))
    parallel.fully_shard(module, "fsdp", grads="mean", replica_axis="dp")


def checkpointed(**options: Any) -> Callable[[nn.Module, Model], None]:
    """By the switch that models of transformers have."""
    return lambda module, model: module.gradient_checkpointing_enable(options)  # type: ignore[operator]


def has_checkpoints(module: nn.Module, model: Model) -> str:
    """Of transformers' only some have the switch."""
    return "" if getattr(module, "supports_gradient_checkpointing", False) else "has no gradient checkpointing"


def _products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _selected() -> Any:
    return create_selective_checkpoint_contexts(_products)


def half_frozen(module: nn.Module, model: Model) -> None:
    """The parts that the model names, or the first half of all parameters."""
    params = list(module.named_parameters())
    for number, (name, param) in enumerate(params):
        param.requires_grad_(not (name.startswith(tuple(model.frozen)) if model.frozen else number < len(params) // 2))


def with_dropout(module: nn.Module, model: Model) -> None:
    """A tenth of whatever can be dropped."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.1)


def with_any_dropout(module: nn.Module, model: Model) -> None:
    """The same, with attention that does not draw inside of one operation of torch."""
    if hasattr(module, "set_attn_implementation"):
        module.set_attn_implementation("eager")  # type: ignore[operator]
    with_dropout(module, model)


def no_drawing_inside(module: nn.Module, model: Model) -> str:
    """What draws inside of one operation of torch is refused under ``mc.rng``; what has no rows wants a layout of its own."""
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        return "torch draws inside of it"
    return (
        "drops positions, which have no rows" if any(hasattr(part, "pos_dropout") for part in module.modules()) else ""
    )


def no_batch_norm(module: nn.Module, model: Model) -> str:
    """Statistics over all rows do not go with rows by themselves."""
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    return "has norms of the batch" if norms else ""


def adds_up_as_one(module: nn.Module, model: Model) -> str:
    """Of a layer that runs several times one rank would add up the gradients in bfloat16, and units do it in float32;
    and what is float32 between blocks is not, where units cast their inputs."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", "")
    if getattr(config, "residual_in_fp32", False) or kind in ("olmo2", "vilt"):  # sines; how likely answers are
        return "units cast what one rank keeps in float32"
    return no_batch_norm(module, model) or ("one rank adds up in bfloat16" if model.repeats else "")


def fine_units(module: nn.Module, model: Model) -> None:
    """Sharded, the parts of each block by themselves."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    parts = [part for each in lists for block in each for part in block.children()]
    known = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d)
    chosen = [part for part in parts if isinstance(part, known) or any(isinstance(x, known) for x in part.children())]
    fsdp(module, model, units=[part for part in chosen if not isinstance(part, nn.ModuleList | nn.ModuleDict)])


def half(module: nn.Module, model: Model) -> None:
    """Sharded, gathered and used in bfloat16."""
    fsdp(module, model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


AXES = ("dp", "fsdp", "tp")
DP, FSDP, HSDP = {"dp": 2}, {"fsdp": 4}, {"dp": 2, "fsdp": 2}
_reentrant, _other = checkpointed(use_reentrant=True), checkpointed(use_reentrant=False)
_selective = checkpointed(use_reentrant=False, context_fn=_selected)

METHODS: tuple[Method, ...] = (
    Method("dp", DP, dp, ("dp",), generate=True),
    Method("fsdp", FSDP, fsdp, ("fsdp",), generate=True),
    Method("hsdp", HSDP, hsdp, ("dp", "fsdp"), generate=True),
    Method("dp, reentrant checkpoints", DP, dp, ("dp",), _reentrant, has_checkpoints),
    Method("dp, checkpoints", DP, dp, ("dp",), _other, has_checkpoints),
    Method("fsdp, reentrant checkpoints", FSDP, fsdp, ("fsdp",), _reentrant, has_checkpoints),
    Method("fsdp, checkpoints", FSDP, fsdp, ("fsdp",), _other, has_checkpoints),
    Method("fsdp, selective checkpoints", FSDP, fsdp, ("fsdp",), _selective, has_checkpoints),
    Method("dp, accumulated", DP, dp, ("dp",), micro=2, clip=0.1),
    Method("fsdp, accumulated", FSDP, fsdp, ("fsdp",), micro=2, clip=0.1),
    Method("hsdp, clipped", HSDP, hsdp, ("dp", "fsdp"), clip=0.1),
    Method("dp, half frozen", DP, dp, ("dp",), half_frozen),
    Method("fsdp, half frozen", FSDP, fsdp, ("fsdp",), half_frozen),
    Method("fsdp, units by hand", FSDP, fine_units, ("fsdp",)),
    Method("dp, dropout", DP, dp, ("dp",), with_dropout, no_batch_norm, apart=True),
    Method("fsdp, dropout", FSDP, fsdp, ("fsdp",), with_dropout, no_batch_norm, apart=True),
    Method("dp, dropout by mc.rng", DP, dp, ("dp",), with_any_dropout, no_drawing_inside, drawn="(dp b) ..."),
    Method("fsdp, dropout by mc.rng", FSDP, fsdp, ("fsdp",), with_any_dropout, no_drawing_inside,
           drawn="(fsdp b) ..."),
    Method("hsdp, dropout by mc.rng", HSDP, hsdp, ("dp", "fsdp"), with_any_dropout, no_drawing_inside,
           drawn="(dp fsdp b) ..."),
    Method("dp, autocast", DP, dp, ("dp",), fits=no_batch_norm, apart=True, autocast=torch.bfloat16),
    Method("fsdp, autocast", FSDP, fsdp, ("fsdp",), fits=no_batch_norm, apart=True, autocast=torch.bfloat16),
    Method("fsdp, param_dtype", FSDP, half, ("fsdp",), fits=adds_up_as_one, apart=True, param_dtype=torch.bfloat16),
)  # fmt: skip
