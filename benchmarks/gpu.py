"""What a person with GPUs runs once and sends back: one file of facts. docs/gpu.md says what each part means.

    make test-gpu                                  # PYTHON=python3: with an interpreter that has torch
    python -m benchmarks.gpu --out gpu-facts.json  # the same
    python -m benchmarks.gpu --only training,hang
    python -m benchmarks.gpu --rehearse            # every part on the CPU, small, where there is no GPU
    python -m benchmarks.gpu --show gpu-facts.json # what such a file says, as tables of docs/gpu.md

Each part is a program of its own with a time limit, so that one that hangs or is aborted leaves the others alone. The
exit status is 0 if all parts passed, 1 if one has not, 2 if there is no GPU, and then no file is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NO_TORCH = "no torch in {}: {}\n  fix: make test-gpu, which makes an environment; or PYTHON= one that has torch"
NO_GPU = """no GPU: torch {} finds no CUDA device here.
  fix: run it where nvidia-smi lists one, with a torch that is built for CUDA
  fix: --rehearse runs every part on the CPU instead (make test-gpu ARGS=--rehearse)"""
LIMITS = {
    "machine": 120,
    "tests": 1800,
    "collectives": 600,
    "kernels": 300,
    "memory": 300,
    "graph": 300,
    "training": 600,
    "hang": 300,
}
"""The parts in their order, and the seconds that each may take."""
_ANSWER = "the facts of this part: "


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    given = _options(argv)
    if given.show:
        show(json.loads(given.show.read_text()))
        return 0
    try:
        import torch  # noqa: PLC0415 - it may not be there, and then that is to be said
    except ImportError as error:
        print(NO_TORCH.format(sys.executable, error), file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (gpus or given.rehearse):
        print(NO_GPU.format(torch.__version__), file=sys.stderr)
        return 2
    ranks = given.ranks or (2 if given.rehearse else gpus)
    if given.part:
        from benchmarks import gpu_parts  # noqa: PLC0415 - who only starts the parts needs nothing of them

        print(_ANSWER + json.dumps(gpu_parts.PARTS[given.part](gpu_parts.Place(ranks, not given.rehearse))))
        return 0
    return _all(given, ranks)


def _options(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("gpu-facts.json"), help="the file of facts (%(default)s)")
    parser.add_argument("--only", default="", help="parts, with commas between: " + ", ".join(LIMITS))
    parser.add_argument("--ranks", type=int, default=0, help="processes; one per GPU by default")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    parser.add_argument("--show", type=Path, help="print the tables of such a file")
    parser.add_argument("--part", choices=LIMITS, help="run this one here, and print what it finds")
    given = parser.parse_args(argv)
    given.only = [name for name in given.only.split(",") if name] or list(LIMITS)
    unknown = [name for name in given.only if name not in LIMITS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: {', '.join(LIMITS)}")
    return given


def _all(given: Namespace, ranks: int) -> int:
    facts: dict[str, Any] = {"rehearsal": given.rehearse, "ranks": ranks, "commit": _commit(), "parts": {}}
    for name in given.only:
        print(f"{name}: ", end="", flush=True)
        found = facts["parts"][name] = _part(name, ranks, given.rehearse)
        given.out.write_text(json.dumps(facts, indent=1) + "\n")  # what was found is kept, whatever comes
        print(f"{found['state']} in {found['seconds']:.0f} s", flush=True)
        if found["state"] != "passed":
            print("  " + "\n  ".join(found["output"].splitlines()[-15:]), flush=True)
    failed = [name for name, found in facts["parts"].items() if found["state"] != "passed"]
    print(
        f"{given.out}: " + (f"failed: {', '.join(failed)}; send this file" if failed else "all passed; send this file")
    )
    return int(bool(failed))


def show(facts: dict[str, Any]) -> None:
    """Where it was, which parts passed, and the tables of times."""
    parts = {name: each["found"] for name, each in facts["parts"].items()}
    if machine := parts.get("machine"):
        gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
        versions = f"torch {machine['torch']}, NCCL {machine['nccl']}, Python {machine['python']}"
        print(f"{gpus}; {versions}, {facts['ranks']} ranks")
    for name, each in facts["parts"].items():
        print(f"{name}: {each['state']} in {each['seconds']:.0f} s")
    if collectives := parts.get("collectives"):
        columns = ("us", "torch us", "floor us", "host us", "torch host us", "floor host us")
        _table(
            ("call", "bytes", *columns),
            [[row["call"], row["bytes"], *map(row.get, columns)] for row in collectives["rows"]],
        )
    if training := parts.get("training"):
        columns = ("ms", "host ms", "peak MiB")
        _table(("step", *columns), [[kind, *map(each.get, columns)] for kind, each in training["kinds"].items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    print()
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |")


def _part(name: str, ranks: int, rehearse: bool) -> dict[str, Any]:
    """Whether it passed, how long it took, what it found; if it failed, the end of what it said."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--ranks", str(ranks)]
    begun = time.monotonic()
    process = subprocess.Popen(
        command + ["--rehearse"] * rehearse,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": _path()},
        start_new_session=True,  # so that all that it has started can be ended
    )
    try:
        said, _ = process.communicate(timeout=LIMITS[name])
        state = "passed" if process.returncode == 0 else f"failed (exit status {process.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        state = f"failed (took longer than {LIMITS[name]} s)"
    except BaseException:  # interrupted: nothing of it goes on
        os.killpg(process.pid, 9)
        raise
    answers = [line for line in said.splitlines() if line.startswith(_ANSWER)]
    found = json.loads(answers[-1].removeprefix(_ANSWER)) if answers else {}
    if found.get("failed"):
        state = f"failed ({len(found['failed'])} of it)"
    output = "" if state == "passed" else said[-8000:]
    return {"state": state, "seconds": round(time.monotonic() - begun, 1), "found": found, "output": output}


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _commit() -> str:
    """Of the checkout, if it is one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
