"""A training step of real models beside torch's own adaptors: decoder, encoder, vision model, mixture of experts.

    pip install 'meshcomm[models]'                    # transformers; nothing is downloaded, all numbers are random
    python -m benchmarks.models                       # some minutes
    python -m benchmarks.models --quick               # smaller and noisier
    python -m benchmarks.models --markdown            # the table of docs/benchmarks.md too

Forward and backward on processes of this machine over gloo, all candidates in turn in one run; a number is the median
over the steps of the slowest rank's time. "one rank" is the floor: each process computes the same rows alone, at the
same time as the others; of tensor parallelism the whole model, which is no floor but what it saves. Memory is the most
that is alive at once in a step of rank 0: tensors, as the dispatcher sees them, and of ours the pages that a rank lends
to others. What gloo has within a call is not seen, nor what is kept for the next result of a size: while memory is
counted none is, nor are results as small as those of these models; docs/benchmarks.md says what larger ones cost.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshcomm as mc
from benchmarks.common import options_of, print_markdown, print_table, run, steps_in_turns
from benchmarks.tracked import Tracked
from meshcomm.parallel import data_parallel, fully_shard, tensor_parallel

PLAIN, OURS = "one rank", "meshcomm"
DDP, FSDP, TP = "data parallel", "fully sharded", "tensor parallel"
TORCHS = {DDP: "DistributedDataParallel", FSDP: "fully_shard", TP: "parallelize_module"}

Step = Callable[[], object]


class Model(NamedTuple):
    """What is needed of one."""

    kind: str
    """Its class in transformers; its configuration is named alike."""
    config: Mapping[str, Any]
    plan: tuple[tuple[str, str], ...] = ()
    """What tensor parallelism cuts: patterns of names, and how."""
    image: int = 0


_LLAMA = (("*.[qkv]_proj", "column"), ("*.o_proj", "row"), ("*.gate_proj", "column"), ("*.up_proj", "column"),
          ("*.down_proj", "row"))  # fmt: skip


def models(width: int, layers: int) -> dict[str, Model]:
    """By name; each with ``layers`` blocks of ``width``."""
    both = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 256}
    gated = {"num_key_value_heads": 4, "intermediate_size": 3 * width, "max_position_embeddings": 128}
    wide = {"intermediate_size": 4 * width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "Llama": Model("LlamaForCausalLM", {**both, **gated}, _LLAMA),
        "BERT": Model("BertModel", {**both, **wide}),
        "ViT": Model("ViTModel", {**both, **wide, "image_size": 32, "patch_size": 8}, image=32),
        "Mixtral": Model("MixtralForCausalLM", {**both, **gated, **experts}),
    }


def built(model: Model) -> nn.Module:
    """The same on every rank."""
    library: Any = importlib.import_module("transformers")
    base = model.kind.removesuffix("ForCausalLM").removesuffix("Model")
    config = dict(model.config)
    if model.image:
        del config["vocab_size"]
    torch.manual_seed(0)
    made: nn.Module = getattr(library, model.kind)(getattr(library, f"{base}Config")(**config))
    return made


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The items of the longest list of modules."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and part[0].forward]
    return list(max(lists, key=lambda part: sum(p.numel() for p in part.parameters())))


def spread(model: Model, kind: str, who: str) -> nn.Module:
    """A candidate."""
    module = built(model)
    if who == PLAIN:
        return module
    if kind == DDP:
        if who == OURS:
            return data_parallel(module, "ranks", grads="mean")
        return DistributedDataParallel(module, find_unused_parameters=True)
    blocks = blocks_of(module)
    if kind == FSDP:
        if who == OURS:
            return fully_shard(module, "ranks", grads="mean", units=blocks)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            torch_fully_shard(block, mesh=mesh)
        return torch_fully_shard(module, mesh=mesh)
    if who == OURS:
        return tensor_parallel(module, {**dict(model.plan), "*": "replicated"}, axis="ranks")
    styles: dict[str, Any] = {"column": ColwiseParallel, "row": RowwiseParallel}
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    plan = {name: styles[style]() for pattern, style in model.plan for name in layers if fnmatchcase(name, pattern)}
    return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def step_of(model: Model, kind: str, who: str, rows: int, tokens: int, seed: int) -> Step:
    """Forward and backward."""
    module = spread(model, kind, who)
    generator = torch.Generator().manual_seed(seed)
    if model.image:
        given: dict[str, Tensor] = {"pixel_values": torch.randn(rows, 3, model.image, model.image, generator=generator)}
    else:
        given = {"input_ids": torch.randint(256, (rows, tokens), generator=generator)}
        if model.kind.endswith("CausalLM"):
            given["labels"] = given["input_ids"]
    parameters = list(module.parameters())

    def step() -> None:
        out = module(**given)
        loss = out.loss if "labels" in given else out.last_hidden_state.square().mean()
        loss.backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def peak_of(make: Callable[[], Step]) -> int:
    """The most bytes at once in a step after two others, parameters and all."""
    with Tracked() as seen:
        step = make()
        step()
        step()
        gc.collect()
        seen.restart()
        step()
    return seen.peak


def on_gloo(width: int, layers: int, rows: int, tokens: int, repeats: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By model and parallelism, of each candidate: seconds and bytes."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with mc.use_mesh(mc.make_mesh({"ranks": -1})) as mesh:
        for name, model in models(width, layers).items():
            for kind in (DDP, FSDP, *([TP] if model.plan else [])):
                seed = 0 if kind == TP else mesh.rank
                makers = {who: partial(step_of, model, kind, who, rows, tokens, seed)
                          for who in (PLAIN, OURS, TORCHS[kind])}  # fmt: skip
                peaks = {who: peak_of(make) for who, make in makers.items()}
                steps = {who: make() for who, make in makers.items()}
                seconds = steps_in_turns(steps, repeats)
                each = {who: {"seconds": seconds[who], "peak": peaks[who]} for who in steps}
                found.setdefault(name, {})[kind] = each
    return found


def report(found: Mapping[int, Mapping[str, Any]]) -> None:
    for ranks, of_ranks in found.items():
        rows = []
        for name, kinds in of_ranks.items():
            for kind, each in kinds.items():
                base = each[TORCHS[kind]]
                rows += [
                    [f"{name}, {kind}", who, f"{1e3 * one['seconds']:.1f}", f"{one['seconds'] / base['seconds']:.2f}",
                     f"{one['peak'] / 2**20:.2f}", f"{one['peak'] / base['peak']:.2f}"]
                    for who, one in each.items()
                ]  # fmt: skip
        print_table(f"A step on gloo, {ranks} processes", ["", "", "ms", "x torch's", "peak MiB", "x torch's"], rows)


def markdown(found: Mapping[int, Mapping[str, Any]]) -> None:
    """The table of docs/benchmarks.md: ours over torch's."""
    rows = []
    first = next(iter(found.values()))
    for name, kinds in first.items():
        for kind in kinds:
            cells = []
            for of_ranks in found.values():
                ours, theirs = (of_ranks[name][kind][who] for who in (OURS, TORCHS[kind]))
                cells += [f"{ours[what] / theirs[what]:.2f} ×" for what in ("seconds", "peak")]
            rows.append([f"{name}, over `{TORCHS[kind]}`", *cells])
    print_markdown(["", *(each for ranks in found for each in (f"{ranks} processes", "peak memory"))], rows)


def measure(options: Namespace) -> dict[str, Any]:
    width, layers, rows, tokens, repeats = (32, 2, 2, 16, 3) if options.quick else (128, 4, 4, 64, 20)
    given = (width, layers, rows, tokens, options.repeats or repeats)
    found = {ranks: mc.launch(on_gloo, ranks=ranks, args=given, runtime="processes")[0] for ranks in options.ranks}
    report(found)
    if options.markdown:
        markdown(found)
    return {"gloo": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("A training step of real models, ours beside torch's own.", markdown=True)
    parser.add_argument("--repeats", type=int, metavar="N", help="steps per number")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes on gloo (2 4)")
    if importlib.util.find_spec("transformers") is None:
        print("needs transformers: pip install 'meshcomm[models]'")
        return
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
