"""Random programs over a (2, 2) mesh of processes for as long as one likes: nothing grows, and no number is wrong.

    python tests/soak.py                 # two minutes
    python tests/soak.py --minutes 60
    python tests/soak.py --seconds 20 --leak memory,thread      # must say so
    python tests/soak.py --guard off --only calls --rounds 4000     # 2 million small calls, 20,000 large ones

Two sets of four processes take turns, one of them under guard, where programs with a mistake in them are run too. A round
is a random program (collectives at once and later, trees, objects, messages, gradients) or a few steps of training, a
checkpoint, meshes that are made and dropped, large tensors; or, if asked for, many calls in a row. Every value is
compared with the oracle, or with what one process computes alone. Now and then all processes count what they hold; the
exit code is 1 if a count grows, a number is wrong or a rank fails.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import soak_rounds
import torch
from fuzz_breaks import broken_of
from fuzz_judge import judged, right
from fuzz_programs import Rolled, program_of
from served import serve
from soak_rounds import LEAKS, ROUNDS

import meshcomm as mc
from meshcomm.runtime.start.request import GUARD
from meshcomm.runtime.start.workers import WorkerPool

MESHES: list[dict[str, int]] = [{"a": 2, "b": 2}, {"a": 2, "b": 2}, {"a": 4}]
SLACK = {
    "rss MiB": 16.0, "shared MiB": 16.0, "/dev/shm MiB": 16.0, "mappings": 40, "descriptors": 10, "shared memories": 10, "threads": 1, "tensors": 200, "axes": 20,
    "meshes": 8, "objects / 1000": 40, "keys at the store": 20,
}  # fmt: skip
"""How much a count may grow, where that is not nothing: each group keeps its last thousand calls, the guard the words for
some thousands, and a process lends memory of every size that it has needed at one time; of small segments the last one
that came back is lent first, so that all 64 have been seen only after some hundred rounds, and each keeps what it was
last read as: some 200 tensors.
"""


class Crew:
    """Four processes, and what they have said of themselves."""

    def __init__(self, name: str, pool: WorkerPool) -> None:
        self.name, self.pool = name, pool
        self.seen: list[list[dict[str, float]]] = []

    def measure(self) -> None:
        self.seen.append(self.pool.run(soak_rounds.measured))

    def growth(self) -> list[str]:
        """What has grown: of the last quarter of what was seen the least is above all of the first."""
        quarter = max(2, len(self.seen) // 4)
        if len(self.seen) < 2 * quarter:
            return []
        lines = []
        for rank in range(4):
            for name in self.seen[0][rank]:
                series = [each[rank][name] for each in self.seen]
                first, last = series[:quarter], series[-quarter:]
                if min(last) > max(first) + SLACK.get(name, 0):
                    rise = median(last) - median(first)
                    lines.append(f"{self.name} rank {rank}: {name} grew by {rise:g}, from {first} to {last}")
        return lines

    def line(self) -> str:
        """The latest counts; of each the largest of the ranks."""
        latest = self.seen[-1]
        counts = {name: max(each[name] for each in latest) for name in latest[0]}
        return ", ".join(f"{name} {count:.6g}" for name, count in counts.items())


@contextlib.contextmanager
def crews(guard: str) -> Iterator[list[Crew]]:
    """One set of processes without the guard and one under it; what they inherit says which."""
    with contextlib.ExitStack() as stack:
        found = []
        for name, switch in (("plain", "off"), ("guarded", "on")):
            if guard in (switch, "both"):
                os.environ[GUARD] = str(int(switch == "on"))
                pool = stack.enter_context(WorkerPool(4, timeout=300))
                pool.run(mc.rank)
                found.append(Crew(name, pool))
        os.environ.pop(GUARD, None)
        yield found


def one_round(crew: Crew, kind: str, seed: int, folder: str) -> None:
    """Raises what is wrong."""
    if kind == "program":
        program = program_of(Rolled(seed), MESHES)
        right(program, crew.pool.run(soak_rounds.on_rank, program.light()))
    elif kind == "broken":
        program, broken = broken_of(Rolled(seed), MESHES)
        if broken is not None:
            judged(program, broken, crew.pool.run(soak_rounds.with_error, program.light(), broken))
    else:
        crew.pool.run(ROUNDS[kind], seed, folder)


def kinds_of(crew: Crew, options: Namespace) -> list[str]:
    """What this crew does in turn: programs for the most part. Many calls fill for a long time what is kept of calls, and
    are made only if they are asked for.
    """
    mistakes = "broken" if crew.name == "guarded" else "program"
    turn = [kind for kind in ROUNDS if kind != "calls" for kind in ("program", "program", mistakes, "program", kind)]
    only = options.only.split(",") if options.only else turn
    return [kind for kind in (*turn, "calls") if kind in only]


def soak(options: Namespace, folder: str) -> list[str]:
    """What is wrong, line by line."""
    leaks = [kind for kind in options.leak.split(",") if kind]
    with crews(options.guard) as both:
        for crew in both:
            for number, kind in enumerate(2 * sorted(set(kinds_of(crew, options)))):
                one_round(crew, kind, options.seed + number, folder)
            crew.pool.run(soak_rounds.warm_up, options.tracemalloc)
        begin, number, mark = time.monotonic(), 0, 0.0
        while True:
            seconds = time.monotonic() - begin
            part = number / options.rounds if options.rounds else seconds / options.seconds
            if part >= mark:
                mark = part + 1 / options.intervals
                for crew in both:
                    crew.measure()
                    print(f"{seconds:7.1f} s, {number} rounds, {crew.name}: {crew.line()}", flush=True)
            if part >= 1:
                break
            crew = both[number // 4 % len(both)]
            kinds, seed = kinds_of(crew, options), options.seed + number
            kind = kinds[(number // (4 * len(both)) * 4 + number % 4) % len(kinds)]
            try:
                one_round(crew, kind, seed, folder)
                if leaks:
                    crew.pool.run(soak_rounds.leak, leaks)
            except Exception as error:
                again = f"--guard {'on' if crew.name == 'guarded' else 'off'} --only {kind} --seed {seed} --rounds 1"
                return [f"round {number}, again with {again}: {type(error).__name__}: {error}"]
            number += 1
        if options.tracemalloc:
            print("\n".join(line for crew in both for line in crew.pool.run(soak_rounds.allocated)[0]))
        return [line for crew in both for line in crew.growth()]


def options_of(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long, after the warm-up")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--intervals", type=int, default=24, help="how often the processes are counted in that time")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rounds", type=int, default=0, help="so many rounds, however long they take")
    parser.add_argument("--guard", choices=("both", "on", "off"), default="both", help="which processes to run")
    parser.add_argument("--only", default="", help=f"kinds of rounds: program, broken, {', '.join(ROUNDS)}")
    parser.add_argument(
        "--tracemalloc", action="store_true", help="show in the end what rank 0 has allocated, and where"
    )
    parser.add_argument("--leak", default="", help=f"what to do wrong on purpose: {', '.join(LEAKS)}")
    options = parser.parse_args(argv)
    options.seconds = 60 * options.minutes if options.seconds is None else options.seconds
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    torch.set_num_threads(1)
    serve(["soak_rounds", "warm"])
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(options, folder)
    for line in wrong:
        print(line)
    print("something is wrong" if wrong else "nothing has grown, and every number was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
