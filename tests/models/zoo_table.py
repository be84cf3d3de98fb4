"""Every model of the zoo by every method, as a table: how far its parameters are from one rank's after three steps.

    python tests/models/zoo_table.py                                   # all: make test-models
    python tests/models/zoo_table.py --model T5 --method fsdp          # those with these words in their names
    python tests/models/zoo_table.py --write                           # and into docs/zoo.md, model by model, beside what is there
    python tests/models/zoo_table.py --write --missing                 # only what does not stand there yet
    python tests/models/zoo_table.py --add FILE                        # what an earlier run has printed, with nothing run

It ends with status 1 if a case is further away than its method allows, or fails. Of each model it says how long it took; a case
takes some 0.3 s of an idle core, ranks and the one rank together.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zoo
import zoo_harness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
MARK = "<!-- from here on tests/models/zoo_table.py writes -->"
COLUMNS = 7


@dataclass(frozen=True)
class Cell:
    """What came of a model by a method."""

    model: str
    method: str
    said: str
    """The difference, why it cannot be asked, or the error."""
    ok: bool
    seconds: float = 0.0


def tried(name: str, way: str) -> Cell:
    """One case."""
    method = zoo_harness.methods()[way]
    begin = time.perf_counter()  # of the one rank, too, which methods share
    try:
        reason = zoo_harness.why_not(name, way)
        if reason:
            return Cell(name, way, f"({reason})", ok=True)
        difference = zoo_harness.in_process(name, way)
        return Cell(name, way, f"{difference:.0e}", difference <= method.tolerance, time.perf_counter() - begin)
    except Exception as error:
        deepest = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        said = f"{type(error).__name__}: {text} ({Path(deepest.filename).name}:{deepest.lineno})"
        return Cell(name, way, said, ok=False, seconds=time.perf_counter() - begin)


def tried_all(asked: tuple[str, Sequence[str]]) -> list[Cell]:
    """One model by some methods."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    name, ways = asked
    return [tried(name, way) for way in ways]


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="a part of the name; may be given several times")
    parser.add_argument("--method", action="append", default=[], help="the same of methods")
    parser.add_argument("--exact", action="store_true", help="names as a whole")
    parser.add_argument("--write", action="store_true", help="into docs/zoo.md")
    parser.add_argument("--missing", action="store_true", help="only what docs/zoo.md has not")
    parser.add_argument("--add", action="append", default=[], help="a file with tables, to be written with nothing run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models at a time")
    return parser.parse_args()


def chosen(names: Sequence[str], parts: Sequence[str], exact: bool) -> list[str]:
    """Those that were asked for."""
    fits = (lambda name, part: name == part) if exact else (lambda name, part: part.lower() in name.lower())
    return [name for name in names if not parts or any(fits(name, part) for part in parts)]


def shown(cell: Cell) -> str:
    """In a table."""
    return "-" if cell.said.startswith("(") else cell.said if cell.ok else "**fails**"


def tables(found: dict[tuple[str, str], str]) -> list[str]:
    """As Markdown: a row per model, a column per method, a few methods each."""
    models = [model.name for model in zoo.ZOO if any(name == model.name for name, _ in found)]
    ways = [way for way in zoo_harness.methods() if any(other == way for _, other in found)]
    lines = []
    for start in range(0, len(ways), COLUMNS):
        some = ways[start : start + COLUMNS]
        lines += ["", "| | " + " | ".join(some) + " |", "|---" * (len(some) + 1) + "|"]
        lines += [f"| {model} | " + " | ".join(found.get((model, way), "") for way in some) + " |" for model in models]
    return lines


def read(text: str) -> dict[tuple[str, str], str]:
    """The cells of all tables in a text."""
    found, ways = {}, list[str]()
    for line in text.splitlines():
        name, *values = [each.strip() for each in line.strip("|").split("|")] if line.startswith("|") else [""]
        if not name:
            ways = values
        elif len(values) == len(ways) and name != "---":
            found |= {(name, way): value for way, value in zip(ways, values, strict=True) if value}
    return found


def write(new: dict[tuple[str, str], str]) -> None:
    """Into the page, where what stands there of other cases stays."""
    page = PAGE.read_text()
    head, _, rest = page.partition(MARK)
    PAGE.write_text(head + MARK + "\n" + "\n".join(tables(read(rest) | new)) + "\n")


def left(models: Sequence[str], ways: Sequence[str], there: Container[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """What is to be run, without what is there: by model."""
    missing = [(name, [way for way in ways if (name, way) not in there]) for name in models]
    return [(name, some) for name, some in missing if some]


def told(found: Sequence[Cell]) -> None:
    """While it runs: what came of a model, and how long it took."""
    seconds = sum(cell.seconds for cell in found)
    print(f"{found[0].model}: {sum(cell.ok for cell in found)} of {len(found)}, {seconds:.1f} s", file=sys.stderr)
    for cell in found:
        if not cell.ok or cell.said.startswith("(on one rank"):
            print(f"    {cell.method}: {cell.said}", file=sys.stderr, flush=True)


def main() -> int:
    """Run them and print the table."""
    asked = options()
    if asked.add:
        write({key: value for path in asked.add for key, value in read(Path(path).read_text()).items()})
        return 0
    models = chosen([model.name for model in zoo.ZOO], asked.model, asked.exact)
    ways = chosen(list(zoo_harness.methods()), asked.method, asked.exact)
    begin = time.perf_counter()
    there = read(PAGE.read_text().partition(MARK)[2]) if asked.missing else {}
    asked_for = left(models, ways, there)
    cells: dict[tuple[str, str], Cell] = {}
    with get_context("spawn").Pool(max(1, min(asked.jobs, len(asked_for))), maxtasksperchild=10) as pool:
        for found in pool.imap_unordered(tried_all, asked_for):
            new = {(cell.model, cell.method): cell for cell in found}
            cells |= new
            told(found)
            if asked.write:
                write({key: shown(cell) for key, cell in new.items()})
    said = {key: shown(cell) for key, cell in cells.items()}
    print(*tables(said), sep="\n")
    failed = sum(not cell.ok for cell in cells.values())
    asked_of = sum(not cell.said.startswith("(") for cell in cells.values())
    each = sum(cell.seconds for cell in cells.values()) / max(1, asked_of)
    taken = f"{time.perf_counter() - begin:.0f} s, {each:.2f} s of each process a case"
    print(f"\n{asked_of - failed} of {asked_of} cases as one rank, in {taken}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
