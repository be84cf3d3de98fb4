"""Train on as many hosts as there are: when one dies, the others are started again and go on with the same batches.

    python examples/elastic.py                                       # two ranks in this process
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        --rdzv-conf last_call_timeout=5 examples/elastic.py --out SHARED       # on each of two hosts

``--out`` is in a file system that all hosts see. A host that dies, or whose cable is out, is noticed at the time-out:
all ranks that are left raise, torchrun starts them again on the hosts that come within last_call_timeout, and they go
on from the newest checkpoint. What a step computes does not depend on how many ranks there are:

    batch     rows of all ranks, in an order that follows from the epoch alone; the sampler's place is in the checkpoint
    loss      the mean over the batch, whichever rank has a row
    data      drawn by the number of a row, not by the rank that has it

So the losses are those of a run that nobody has interrupted, to the rounding of sums over other numbers of ranks. The
host of --rdzv-endpoint has torchrun's own store: without it nobody meets again.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.parallel import checkpoint, fully_shard

ROWS, WIDTH = 200, 16


def rows_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of these rows: each is drawn by its number alone, so that it is the same on any rank."""
    drawn = [
        torch.randn(2 * WIDTH, generator=torch.Generator().manual_seed(int(n)), dtype=torch.float64) for n in numbers
    ]
    x, noise = torch.stack(drawn).split(WIDTH, dim=1)
    return x, x.flip(1).sin() + 0.1 * noise


def main(args: Namespace) -> None:
    """What each rank runs, from the beginning or from the newest checkpoint."""
    mc.init(timeout=args.timeout)
    with mc.use_mesh(mc.make_mesh({"dp": -1})) as mesh:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, WIDTH)).double()
        fully_shard(net, "dp", grads="mean")
        adam = torch.optim.AdamW(net.parameters(), lr=0.01)
        sampler = mc.MeshBatchSampler(ROWS, args.batch, "dp", last="drop")
        done, folder = 0, args.out / "steps"
        if there := checkpoint.latest(folder, "dp"):
            found = checkpoint.load(there, net, adam)
            sampler.load_state_dict(found.extra)
            done = found.step or 0
        loader = torch.utils.data.DataLoader(torch.arange(ROWS), batch_sampler=sampler)
        while done < args.steps:
            for numbers in sampler.follow(loader):
                x, y = rows_of(numbers)
                # each rank's sum, as a part of the mean of all: right for ranks that have a row more than others, too
                loss = (net(x) - y).square().mean(1).sum() * mesh.size / args.batch
                adam.zero_grad()
                loss.backward()
                adam.step()
                done += 1
                write(args.out, done, mc.all_reduce(loss.detach(), "dp", "mean"), numbers)
                checkpoint.save(folder, net, adam, step=done, extra=sampler.state_dict(), keep=2)
                if done == args.steps:
                    break
                time.sleep(args.pause)


def write(out: Path, step: int, loss: Tensor, numbers: Tensor) -> None:
    """A line of this step, by one rank: how many ranks there were, the loss, and the rows of all."""
    rows = mc.all_gather_object(numbers.tolist(), "dp")
    if mc.current_mesh().rank == 0:
        line = {"step": step, "ranks": len(rows), "loss": loss.item(), "rows": [row for part in rows for row in part]}
        with (out / "losses.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"step {step:3}  {len(rows)} ranks  loss {loss.item():.6f}", flush=True)


def parse(given: list[str] | None = None) -> Namespace:
    """The flags."""
    parser = ArgumentParser(description="Train on as many hosts as there are, with the same batches.")
    parser.add_argument("--out", type=Path, default=Path("out/elastic"), help="folder that all see: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="in this process: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="in all, those of earlier starts too: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="rows of all ranks: %(default)s")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank: %(default)s")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps: %(default)s")
    found = parser.parse_args(given)
    found.out.mkdir(parents=True, exist_ok=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    flags = parse()
    if "RANK" in os.environ:  # torchrun: as many ranks as there are this time
        main(flags)
    else:
        mc.launch(main, ranks=flags.ranks, args=(flags,))
