"""Train a small byte-level GPT with data and tensor parallelism, every communication in plain sight.

    python examples/train_gpt.py                          # four ranks inside this process
    torchrun --nproc-per-node 4 examples/train_gpt.py     # the same program, a process per rank
    mpiexec -n 4 python examples/train_gpt.py             # the same again
    python examples/train_gpt.py --mesh dp=1              # one rank: no collective communicates
    python examples/train_gpt.py --check                  # are losses and parameters those of one rank?

It reads Python's own documentation, so there is nothing to download. The mesh has two axes:

    dp   each index has its own rows of the batch    the loss is summed over dp, once
    tp   each index has its own heads and neurons    their outputs are summed over tp, in each layer

and one rule does the rest: what is replicated goes through ``pvary`` before it meets what differs between ranks.
For dp that is the parameters (in ``train``), for tp the activations (in ``attention`` and ``mlp``). The backward
of each ``pvary`` sums the gradient where it has to be summed, so that nothing here ever averages a gradient.

Shapes: b rows of the batch on this rank, s bytes of context, d width, h heads on this rank, k = d / all heads,
f neurons on this rank (4 d on all), v = 256 byte values.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import meshcomm as mc

Params = dict[str, Tensor]
CUT = {"qkv": 2, "proj": 0, "up": 1, "down": 0}  # the dim of a weight that is cut over tp; other weights are replicated
TEXT = "\n\n".join(topics[name] for name in sorted(topics)).encode()
TOLERANCE = 1e-9  # of --check
NUMBERS = {  # flag: default, least value, meaning
    "steps": (500, 1, "train up to this step"),
    "batch": (16, 1, "rows of the whole batch"),
    "context": (64, 1, "bytes that the model sees"),
    "width": (96, 1, "length of the vector of a byte"),
    "layers": (2, 1, "pairs of attention and MLP"),
    "heads": (4, 1, "attention heads in all"),
    "lr": (3e-3, 0.0, "learning rate"),
    "seed": (1, 0, "of model, batches and sample"),
    "sample": (300, 0, "bytes to write at the end"),
}

# ---- the model: a dict of tensors and a function ----


def initial_params(args: Namespace) -> Params:
    """The whole model. Random states differ between ranks; a generator of its own makes the same model on all."""
    d, k, dtype = args.width, args.width // args.heads, getattr(torch, args.dtype)
    rng = torch.Generator().manual_seed(args.seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=dtype) * std

    params = {"token": normal(256, d, std=0.02), "position": normal(args.context, d, std=0.02)}
    for i in range(args.layers):
        params[f"{i}.norm1"] = torch.ones(d, dtype=dtype)
        params[f"{i}.qkv"] = normal(3, d, args.heads, k, std=d**-0.5)
        params[f"{i}.proj"] = normal(args.heads, k, d, std=(2 * args.layers * d) ** -0.5)
        params[f"{i}.norm2"] = torch.ones(d, dtype=dtype)
        params[f"{i}.up"] = normal(d, 4 * d, std=d**-0.5)
        params[f"{i}.down"] = normal(4 * d, d, std=(8 * args.layers * d) ** -0.5)
    return params | {"norm": torch.ones(d, dtype=dtype)}


def forward(p: Params, ids: Tensor, layers: int) -> Tensor:
    """Logits of the next byte. Along tp, ids, x and logits are the same on every rank: invariant."""
    x = F.embedding(ids, p["token"]) + p["position"][: ids.shape[1]]  # b s -> b s d
    for i in range(layers):
        x = x + attention(norm(x, p[f"{i}.norm1"]), p[f"{i}.qkv"], p[f"{i}.proj"])
        x = x + mlp(norm(x, p[f"{i}.norm2"]), p[f"{i}.up"], p[f"{i}.down"])
    return norm(x, p["norm"]) @ p["token"].T  # b s v


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Layer norm without a bias."""
    return F.layer_norm(x, weight.shape, weight)


def attention(x: Tensor, qkv: Tensor, proj: Tensor) -> Tensor:
    """Causal attention: b s d -> b s d."""
    x = mc.pvary(x, "tp")  # the same x meets other heads on each rank
    q, k, v = torch.einsum("bsd,cdhk->cbhsk", x, qkv)  # each b h s k
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # b h s k
    return mc.all_reduce(torch.einsum("bhsk,hkd->bsd", y, proj), "tp")  # the sum over all heads


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The two layers between attentions: b s d -> b s d."""
    x = mc.pvary(x, "tp")  # the same x meets other neurons on each rank
    return mc.all_reduce(F.gelu(x @ up) @ down, "tp")  # b s d -> b s f -> b s d


# ---- between the whole model and this rank's part ----


def cut_dim(name: str) -> int | None:
    """Where the parameter is cut over tp; None if it is replicated."""
    return CUT.get(name.rpartition(".")[2])


def cut(whole: Params, device: torch.device) -> Params:
    """This rank's part of each tensor, in storage of its own."""
    parts = {}
    for name, x in whole.items():
        x, dim = x.to(device), cut_dim(name)
        parts[name] = x.clone() if dim is None else mc.shard(x, "tp", dim=dim)
    return parts


@torch.no_grad()
def join(parts: Params) -> Params:
    """The whole of each tensor, on every rank."""
    whole = {}
    for name, x in parts.items():
        dim = cut_dim(name)
        whole[name] = x.clone() if dim is None else mc.all_gather_invariant(x, "tp", dim=dim)
    return whole


# ---- training ----


def batch(data: Tensor, step: int, args: Namespace) -> Tensor:
    """This rank's rows of the step's batch, b s+1. All ranks draw the same whole batch and keep a slice each."""
    rng = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.context, (args.batch, 1), generator=rng)
    where = starts + torch.arange(args.context + 1)
    return mc.shard(data[where.to(data.device)], "dp")


def clip_gradients(params: Params, limit: float = 1.0) -> None:
    """Scale all gradients by one factor, to a global norm of at most limit.

    They are complete by now, and no rank may sum or average them again. Their norm is a quantity like any other: the
    squares of a cut tensor are summed over tp, where its parts are; those of a replicated one are there on each rank.
    """
    squares = {name: p.grad.square().sum() for name, p in params.items()}
    of_cut = sum(s for name, s in squares.items() if cut_dim(name) is not None)
    of_replicated = sum(s for name, s in squares.items() if cut_dim(name) is None)
    norm = (mc.all_reduce(of_cut, "tp") + of_replicated).sqrt()
    for p in params.values():
        p.grad *= (limit / norm).clamp(max=1.0)


def train(args: Namespace, device: torch.device, *, report: bool, save: bool) -> tuple[Tensor, Params]:
    """Train on the current mesh, whatever its sizes; give each step's loss and this rank's part of the model."""
    data = torch.tensor(list(TEXT), device=device)
    start, whole = (args.saved["step"], args.saved["params"]) if args.saved else (0, initial_params(args))
    params = {name: x.requires_grad_() for name, x in cut(whole, device).items()}
    adam = torch.optim.AdamW(params.values(), betas=(0.9, 0.95), weight_decay=0.01)
    for moment in ("exp_avg", "exp_avg_sq") if args.saved else ():
        for name, x in cut(args.saved[moment], device).items():
            adam.state[params[name]] |= {moment: x, "step": torch.tensor(float(start))}

    losses: list[float] = []
    began = time.perf_counter()
    for step in range(start, args.steps):
        adam.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 20)  # warm up
        rows = batch(data, step, args)
        logits = forward(mc.pvary(params, "dp"), rows[:, :-1], args.layers)  # the same params meet other rows: b s v
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        loss = mc.all_reduce(loss / (args.batch * args.context), "dp")  # a sum of my rows over the count of all
        loss.backward()
        clip_gradients(params)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        if report:
            rate = len(losses) * args.batch * args.context / (time.perf_counter() - began)
            show_progress(step + 1, args.steps, f"loss {losses[-1]:.4f}  {rate:,.0f} tokens/s", first=step == start)
        if save and (step + 1 == args.steps or (step + 1) % 100 == 0):
            save_checkpoint(args, step + 1, params, adam, write=report)
    return torch.tensor(losses, dtype=torch.float64, device=device), params


def show_progress(done: int, total: int, text: str, first: bool) -> None:
    """A bar that is drawn over itself on a terminal; about ten plain lines elsewhere."""
    bar = f"[{'#' * (30 * done // total):.<30}] {done}/{total}  {text}"
    if sys.stderr.isatty():
        print(f"\r{bar:<79}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif first or done == total or done % max(1, total // 10) == 0:
        print(bar, file=sys.stderr, flush=True)


def save_checkpoint(args: Namespace, step: int, params: Params, adam: torch.optim.AdamW, *, write: bool) -> None:
    """All ranks join the whole tensors, so that any other mesh can resume from them; the first one writes."""
    flags = {name: getattr(args, name) for name in (*NUMBERS, "dtype") if name not in ("steps", "sample")}
    content = {"step": step, "flags": flags, "params": join(params)}
    for moment in ("exp_avg", "exp_avg_sq"):
        content[moment] = join({name: adam.state[p][moment] for name, p in params.items()})
    if write:
        torch.save(content, args.out / "checkpoint.part")
        os.replace(args.out / "checkpoint.part", args.out / "checkpoint.pt")  # a reader sees the old or the new, whole


@torch.no_grad()
def generate(params: Params, args: Namespace, device: torch.device) -> str:
    """Write --sample bytes. Logits and seed are the same on all ranks, and so is every byte that they draw."""
    rng = torch.Generator().manual_seed(args.seed)
    ids = torch.tensor([list(b"The ")])  # 1 s
    for _ in range(args.sample):
        logits = forward(params, ids[:, -args.context :].to(device), args.layers)[0, -1]  # v
        chances = torch.softmax(logits.double().cpu() / 0.8, dim=-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=rng)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


# ---- the program ----


def main(args: Namespace) -> bool:
    """What each rank runs; false if --check found a difference."""
    mesh = mc.make_mesh(args.mesh)
    with mc.use_mesh(mesh):
        losses, params = train(args, mesh.device, report=mesh.rank == 0, save=True)
        text = generate(params, args, mesh.device)
        if mesh.rank == 0:
            print(text)
        return check(args, mesh, losses, join(params)) if args.check else True


def check(args: Namespace, mesh: mc.Mesh, losses: Tensor, params: Params) -> bool:
    """Each rank trains again, alone on a mesh of its own, and compares. The verdict is about the worst of them."""
    with mc.use_mesh(mc.make_mesh({"dp": 1, "tp": 1}, ranks=[mesh.rank])):
        alone_losses, alone = train(args, mesh.device, report=False, save=False)
        alone = join(alone)
    by_name = torch.stack([(x - alone[name]).abs().max() for name, x in params.items()])
    apart = torch.stack([(losses - alone_losses).abs().max(), by_name.max()])
    apart = mc.all_reduce(apart, ("dp", "tp"), op="max")
    equal = bool((apart <= TOLERANCE).all())  # not so for nan
    if mesh.rank == 0:
        print(f"check: {len(losses)} steps on {args.mesh} {'equal' if equal else 'DIFFER FROM'} those of one rank")
        print(f"check: largest difference of a loss {apart[0]:.1e}, of a parameter {apart[1]:.1e}; allowed {TOLERANCE}")
    return equal


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes in a text like "dp=2,tp=2"; an axis that is not named has size 1."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in ("dp", "tp"):
            raise ArgumentTypeError(f"unknown axis {axis!r} in {text!r}: there are dp and tp, as in dp=2,tp=2")
        if axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ArgumentTypeError(f"{part!r} in {text!r}: an axis has one size of at least 1, as in dp=2,tp=2")
        sizes[axis] = int(size)
    return sizes | {axis: 1 for axis in ("dp", "tp") if axis not in sizes}


def make_parser() -> ArgumentParser:
    """The flags, their defaults and meanings."""
    parser = ArgumentParser(description="Train a byte-level GPT on a mesh of data parallel and tensor parallel ranks.")
    parser.add_argument("--mesh", type=mesh_sizes, default="dp=2,tp=2", help="sizes of the axes: %(default)s")
    for name, (default, least, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(least), default=default, help=f"{text}: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="%(default)s")
    parser.add_argument("--check", action="store_true", help="fail unless one rank gets the same; 10 steps in float64")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of checkpoint.pt: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from checkpoint.pt, on any mesh, with its flags")
    return parser


def parse(argv: list[str] | None) -> Namespace:
    """The flags, with all that can be wrong with them found before anything runs."""
    parser = make_parser()
    args, saved = parser.parse_args(argv), None
    try:
        if args.resume:
            saved = torch.load(args.out / "checkpoint.pt", map_location="cpu", weights_only=True)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{'--resume' if args.resume else '--out'}: {error}")
    parser.set_defaults(**({"steps": 10, "dtype": "float64"} if args.check else {}))
    parser.set_defaults(saved=saved, **(saved["flags"] if saved else {}))
    args = parser.parse_args(argv)  # again, with these defaults

    for name, (_, least, _) in NUMBERS.items():
        if not getattr(args, name) >= least:
            parser.error(f"--{name} {getattr(args, name)} is less than {least}")
    dp, tp = args.mesh["dp"], args.mesh["tp"]
    for wrong, message in (
        (args.batch % dp, f"--batch {args.batch} is not a multiple of dp={dp} in --mesh"),
        (args.heads % tp, f"--heads {args.heads} is not a multiple of tp={tp} in --mesh"),
        (args.width % args.heads, f"--width {args.width} is not a multiple of --heads {args.heads}"),
        (args.context >= len(TEXT), f"--context {args.context} is more than the {len(TEXT)} bytes of text"),
        (args.check and args.dtype != "float64", f"--check is to {TOLERANCE}: {args.dtype} is too coarse, use float64"),
        (args.check and saved and saved["step"] >= args.steps, "--check has no step to compare: give more --steps"),
    ):
        if wrong:
            parser.error(message)
    for name in ("width", "layers", "heads", "context", "dtype") if saved else ():
        if getattr(args, name) != saved["flags"][name]:
            parser.error(f"--{name} is {saved['flags'][name]} in the checkpoint and cannot be {getattr(args, name)}")
    return args


def run(argv: list[str] | None = None) -> int:
    """Run main on all ranks, in this process or as one of a launcher's; the exit status."""
    args = parse(argv)
    return 0 if all(mc.launch(main, ranks=args.mesh["dp"] * args.mesh["tp"], args=(args,))) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors too small to be worth cutting further, and a launcher's ranks share the cores
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit("interrupted: --resume goes on from the last checkpoint, if one was written")
