"""All tables of the docs and all budgets, of one run of the programs that print them, one after the other.

    python -m benchmarks.all                        # half an hour on an idle machine, which it should be
    python -m benchmarks.all --quick                # some minutes, noisier: whether all of them run
    python -m benchmarks.all --only overhead --only guard
    python -m benchmarks.all --json out.json        # what each of them has found, and all budgets

What each program prints goes to stderr as it comes. At the end stdout has, for each file of the docs, its tables as
Markdown, to be pasted there; and a table of all budgets, and which of them hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Budget, machine, options_of, print_budgets, print_machine, say, write

ROOT = Path(__file__).resolve().parents[1]


class Program(NamedTuple):
    """One program, what it is told, and which file has its tables."""

    arguments: tuple[str, ...] = ()
    docs: str = ""


MARKDOWN = ("--markdown",)
PROGRAMS = {
    "overhead": Program(MARKDOWN, "docs/benchmarks.md, what a call costs the host"),
    "collectives": Program(
        ("--runtime", "processes", "-b", "1K", "-e", "4M", "-f", "16", *MARKDOWN),
        "docs/benchmarks.md, how fast bytes move",
    ),
    "train_step": Program(MARKDOWN, "docs/benchmarks.md, training steps"),
    "models": Program(MARKDOWN, "docs/benchmarks.md, real models"),
    "guard": Program(MARKDOWN, "docs/guard.md, what it costs"),
    "checker": Program(),
    "tracing": Program(),
    "functions": Program(),
    "overlap": Program(),
    "context": Program(),
    "experts": Program(),
    "optimizers": Program(),
    "checkpoints": Program(),
    "pipeline": Program(),
    "compiled": Program(),
    "growth": Program(),
    "verify": Program(),
    "hangs": Program(),
    "hosts": Program(),
    "startup": Program(MARKDOWN, "docs/benchmarks.md, start-up"),
}


def ran(name: str, arguments: Sequence[str], quick: bool) -> tuple[int, list[str], dict[str, Any]]:
    """Its exit status, the lines of its Markdown, and what it has found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(path), *["--quick"] * quick]
        given = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        lines = []
        with subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip("\n"))
                lines.append(line.rstrip("\n"))
        found = json.loads(path.read_text()) if path.exists() else {}
    return process.returncode, tables_in(lines), found


def tables_in(lines: Sequence[str]) -> list[str]:
    """The Markdown tables among them, with a line between two."""
    kept: list[str] = []
    for line in lines:
        if line.startswith("|"):
            kept.append(line)
        elif kept and kept[-1]:
            kept.append("")
    return kept


def budgets_in(found: Any) -> Iterator[Budget]:
    """All that stand anywhere in it."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "budgets":
                yield from (Budget(*(each[name] for name in Budget._fields)) for each in value)
            else:
                yield from budgets_in(value)
    elif isinstance(found, list):
        for value in found:
            yield from budgets_in(value)


def measure(options: Namespace) -> int:
    """Run them, say what is to be said; how many have failed."""
    info = machine()
    print_machine(info)
    results: dict[str, Any] = {}
    tables: dict[str, list[str]] = {}
    failed = []
    for name in options.only or PROGRAMS:
        program = PROGRAMS[name]
        say(f"\n{'=' * 20} {name}")
        status, markdown, results[name] = ran(name, program.arguments, options.quick)
        if program.docs:
            tables[program.docs] = markdown
        if status:
            failed.append(f"{name} (exit status {status})")
    for docs, lines in tables.items():
        print(f"\n{docs}\n")
        print("\n".join(lines).rstrip())
    budgets = list(budgets_in(results))
    if budgets:
        print_budgets(budgets)
        held = sum(budget.verdict.startswith("holds") for budget in budgets)
        print(f"\n{held} of {len(budgets)} hold")
    write(options.json, {"machine": info, "programs": results})
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of("All tables of the docs and all budgets.")
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="this program; may be given several times")
    return int(bool(measure(parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main())
