"""Fine-tune a Llama of ``transformers`` as it is, fully sharded and tensor parallel, and resume it on another mesh.

    pip install 'meshcomm[models]'                                 # transformers, which brings safetensors and tqdm
    python examples/finetune.py                                    # four ranks in this process, a minute
    torchrun --nproc-per-node 4 examples/finetune.py               # the same program, a process per rank
    python examples/finetune.py --model FOLDER                     # begins with the Llama that save_pretrained wrote

Run again, it goes on from its last checkpoint, with other --ranks and --tp; tp divides the heads of keys, 4 here.

The text is Python's own documentation, a byte a token, so there is nothing to download. Half of the steps run on a mesh
of fsdp=2 x tp=2 and end with a checkpoint; the other half twice: on that mesh, and on one of fsdp=4 alone that loads
the checkpoint. Their losses are the same numbers, and so are the bytes that the two models write at the end.

    tp     each index has its own heads and neurons     a line per kind of layer in ``PLAN``
    fsdp   each index has its own rows of the batch     and 1/n of every parameter, gradient and moment
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.parallel import Column, checkpoint, clip_grad_norm, full_state_dict, fully_shard, tensor_parallel

TEXT = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
TOLERANCE = 1e-5  # of losses: weights are float64, but Llama computes norms and losses in float32
PLAN: dict[str, Any] = {
    "*.embed_tokens": "vocab",
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "lm_head": Column(gather=True),
    "*": "replicated",
}


def transformers() -> Any:
    """The library; who has none hears how to get it."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        sys.exit("this example needs transformers: pip install 'meshcomm[models]'")


def model_of(args: Namespace) -> Any:
    """The whole model on one rank: that of the folder, or a small one whose weights are random and alike on all."""
    hf = transformers()
    if args.model:
        return hf.LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float64)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return hf.LlamaForCausalLM(config).double()


def parallel(args: Namespace) -> tuple[Any, torch.optim.AdamW]:
    """The same model, spread over the current mesh, and its optimizer."""
    model, ranks = model_of(args).train(), mc.axis_size("tp")
    if model.config.num_key_value_heads % ranks:
        sys.exit(f"tp={ranks} does not divide the {model.config.num_key_value_heads} heads of keys and values")
    tensor_parallel(model, PLAN, axis="tp")
    fully_shard(model, "fsdp", grads="mean", units=["model.layers.*"])
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def rows_of(step: int, args: Namespace) -> Tensor:
    """This rank's rows of the batch of a step, b s: all ranks draw the same batch and take a slice each."""
    starts = torch.randint(len(TEXT) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
    return mc.shard(TEXT[starts + torch.arange(args.context)], "fsdp")


def train(args: Namespace, model: Any, adam: torch.optim.AdamW, steps: range, what: str) -> list[float]:
    """The losses of these steps."""
    mesh, losses = mc.current_mesh(), []
    bar = importlib.import_module("tqdm").tqdm(steps, what, leave=True, mininterval=0.5, disable=mesh.rank != 0)
    for step in bar:
        adam.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 10)  # warm up
        rows = rows_of(step, args)
        loss = model(input_ids=rows, labels=rows).loss  # of this rank's rows: grads="mean" takes the mean of all
        adam.zero_grad()
        loss.backward()
        clip_grad_norm(model, 1.0)
        adam.step()
        losses.append(mc.all_reduce(loss.detach(), "fsdp", "mean").item())
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    return losses


@torch.no_grad()
def sample(model: Any, count: int) -> str:
    """What the model writes after a few bytes, the same on all ranks, which draw from equal random states."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        start = torch.tensor([list(b"The ")])
        ids = model.eval().generate(start, max_new_tokens=count, do_sample=True, temperature=0.6)
    model.train()
    return bytes(ids[0].tolist()).decode(errors="replace")


def main(args: Namespace) -> None:
    """What each rank runs."""
    folder = args.out / "steps"
    with mc.use_mesh(mc.make_mesh({"fsdp": -1, "tp": args.tp})) as mesh:
        model, adam = parallel(args)
        there = checkpoint.latest(folder, ("fsdp", "tp"))
        began = (checkpoint.load(there, model, adam).step or 0) if there else 0
        middle, end = began + args.steps // 2, began + args.steps
        first = train(args, model, adam, range(began, middle), f"on {mesh.shape}")
        saved = checkpoint.save(folder, model, adam, step=middle)
        straight = train(args, model, adam, range(middle, end), "and on it")
        text, whole = sample(model, args.sample), full_state_dict(model, 0)
        if whole is not None:  # for transformers, on any machine
            model.save_pretrained(args.out / "model", state_dict=whole)

    with mc.use_mesh(mc.make_mesh({"fsdp": -1, "tp": 1})) as other:  # the same ranks, another grid of them
        model, adam = parallel(args)
        checkpoint.load(saved, model, adam)
        resumed = train(args, model, adam, range(middle, end), f"resumed on {other.shape}")
        apart = max(abs(one - two) for one, two in zip(straight, resumed, strict=True))
        assert apart <= TOLERANCE, f"losses of the two meshes are {apart:.1e} apart"
        assert sample(model, args.sample) == text
        checkpoint.save(folder, model, adam, step=end, keep=2)

    if mesh.rank == 0:
        losses = first + straight
        print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}; losses of the two meshes are at most {apart:.1e} apart")
        print(f"checkpoints in {folder}, the model for transformers in {args.out / 'model'}\n\n{text}")


def parse(given: list[str] | None = None) -> Namespace:
    """The flags."""
    parser = ArgumentParser(description="Fine-tune a small Llama of transformers on two meshes, with one result.")
    parser.add_argument("--model", type=Path, help="a folder that save_pretrained has written; bytes are its tokens")
    parser.add_argument("--out", type=Path, default=Path("out/finetune"), help="folder of what is written: %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate: %(default)s")
    for name, default, text in (
        ("ranks", 4, "in this process, or those of the launcher"), ("tp", 2, "size of the axis tp of the first mesh"),
        ("steps", 160, "of the optimizer"), ("batch", 16, "rows of all ranks"), ("context", 96, "bytes of a row"),
        ("width", 64, "of the small model"), ("layers", 2, "of the small model"), ("sample", 200, "bytes to write"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}: %(default)s")
    found = parser.parse_args(given)
    if found.model and not found.model.is_dir():
        parser.error(f"--model: there is no folder {str(found.model)!r}")
    if found.steps < 2 or min(found.context, found.sample) < 1:
        parser.error("--steps is at least 2, half of them on each mesh; --context and --sample are at least 1")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors, and the ranks share the cores
    transformers()
    flags = parse()
    mc.launch(main, ranks=flags.ranks, args=(flags,))
