"""``python -m meshcomm verify module:function``: a program or a training loop held against one rank.

Three kinds of functions: one of a rank's parts (--in "(dp b) d=8,4" --out ""), one that makes a training loop
(--batches module:name), and one that calls meshcomm.verify itself and gives the report.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from meshcomm.errors import MeshError, fail, names
from meshcomm.verifying.report import Report

_WHERE = "verify"
_USUAL = [{"dp": 2}]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report: 0 where nothing was found, 1 where something was, 2 for what cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm verify", description=__doc__)
    parser.add_argument("function", help="module:function, or file.py:function")
    parser.add_argument("--mesh", action="append", help="such as dp=2,tp=4; several are several meshes")
    parser.add_argument(
        "--in", dest="inputs", action="append", help="an input: its layout and global sizes, (dp b) d=8,4"
    )
    parser.add_argument("--out", action="append", help="the layout of a result, such as '(dp b) d'")
    parser.add_argument("--batches", help="module:name of a list of batches, or of a function that gives one")
    parser.add_argument("--steps", type=int, default=3, help="of a training loop (3)")
    parser.add_argument("--schedules", type=int, default=4, help="orders of the ranks that are tried (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--html", type=Path, help="write the report there too: .html, .svg or .txt")
    parser.add_argument("--quiet", action="store_true", help="do not say on stderr what runs")
    asked = parser.parse_args(argv)
    try:
        if asked.html is not None and asked.html.suffix not in (".html", ".svg", ".txt"):
            fail(_WHERE, f"--html {asked.html} ends in none of .html, .svg, .txt.", fix="report.html")
        meshes = [parsed_mesh(each) for each in asked.mesh or ()]
        report = _report(asked, meshes)
    except MeshError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    sys.stdout.flush()
    if asked.html is not None:
        report.picture().save(asked.html)
    return 0 if report.ok else 1


def _report(asked: argparse.Namespace, meshes: list[dict[str, int]]) -> Report:
    fn = found(asked.function)
    if not callable(fn):
        fail(_WHERE, f"{asked.function} is not callable but {type(fn).__name__}.", fix="name a function")
    if asked.batches is not None:
        batches = found(asked.batches)
        batches = list(batches() if callable(batches) else batches)
        loops: Any = importlib.import_module("meshcomm.verifying.training.verify")  # and a function nothing of it
        sizes = loops.checked_meshes(_WHERE, meshes or _USUAL)
        report_of_loop: Report = loops.verify_training(
            fn, batches, asked.steps, sizes, seed=asked.seed, progress=_progress(asked.quiet)
        )
        return report_of_loop
    if asked.inputs is not None or asked.out is not None:
        if asked.inputs is None or asked.out is None:
            fail(_WHERE, "--in and --out come together.", fix="a layout for each input and each result")
        layouts, inputs = zip(
            *(drawn_input(each, at + asked.seed) for at, each in enumerate(asked.inputs)), strict=True
        )
        out: Any = asked.out[0] if len(asked.out) == 1 else tuple(asked.out)
        proofs: Any = importlib.import_module("meshcomm.verifying.verify")  # a training loop needs nothing of it
        found_out: Report = proofs.verify(
            fn,
            *inputs,
            in_specs=layouts,
            out_specs=out,
            meshes=meshes or None,
            schedules=asked.schedules,
            seed=asked.seed,
        )
        return found_out
    given = _taken(fn, {"meshes": meshes or None, "seed": asked.seed})
    if given is None:
        fail(
            _WHERE,
            f"{asked.function} takes arguments that nothing gives.",
            got=f"{asked.function}{inspect.signature(fn)}",
            fix="--in and --out for a function of parts, --batches module:name for a training loop's make(mesh), "
            "or name a function that calls mc.verify and gives the report",
        )
    report: Any = fn(**given)
    if not isinstance(report, Report):
        fail(_WHERE, f"{asked.function} gives no report but {type(report).__name__}.",
             fix="return mc.verify(...) or mc.verify_training(...)")  # fmt: skip
    return report


def _taken(fn: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any] | None:
    """What it takes of what is offered; None if it wants more."""
    parameters = inspect.signature(fn).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {name for name, each in parameters.items() if each.default is each.empty and each.kind not in several}
    return {name: offered[name] for name in parameters if name in offered} if wanted <= set(offered) else None


def _progress(quiet: bool) -> Callable[[str], object]:
    began = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"[{time.monotonic() - began:6.1f} s] {line}\n")

    return say


def parsed_mesh(text: str) -> dict[str, int]:
    """``dp=2,tp=4`` as a mapping."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if not name.isidentifier() or not size.isdigit() or int(size) < 1 or name in sizes:
            fail(_WHERE, f"{text!r} is no mesh.", got=repr(part), fix="such as --mesh dp=2,tp=4")
        sizes[name] = int(size)
    return sizes


def drawn_input(text: str, seed: int) -> tuple[str, Tensor]:
    """``(dp b) d=8,4``: the layout, and random numbers of these global sizes."""
    layout, _, sizes = text.rpartition("=")
    lengths = [each.strip() for each in sizes.split(",")] if sizes.strip() else []
    if "=" not in text or not all(each.isdigit() for each in lengths):
        fail(_WHERE, f"--in {text!r} is no layout with sizes.", fix="such as --in '(dp b) d=8,4'")
    numbers = torch.Generator().manual_seed(seed)
    return layout.strip(), torch.randn(
        [int(each) for each in lengths], generator=numbers, dtype=torch.float64, device="cpu"
    )


def found(text: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        fail(_WHERE, f"{text!r} is no module:function.", fix="such as train:make, or train.py:make")
    module: Any = _from_file(place) if place.endswith(".py") else _module(place, text)
    for part in name.split("."):
        if not hasattr(module, part):
            known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            fail(_WHERE, f"no {part!r} in {place!r}.", got=text, fix=f"one of {names(known[:8])}" if known else "")
        module = getattr(module, part)
    return module


def _module(name: str, text: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return cast(ModuleType, pkgutil.resolve_name(name + ":"))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    except ImportError as error:
        fail(_WHERE, f"{name!r} cannot be imported: {error}.", got=text)
    fail(
        _WHERE, f"no module {name!r} here.", got=text, fix="run it where the module is, or name the file: train.py:make"
    )


def _from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        fail(_WHERE, f"no file {path!r}.", fix="a path to a Python file")
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return module
