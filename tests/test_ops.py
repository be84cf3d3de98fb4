"""The table of functions that have to do with other ranks: nothing that communicates is missing in it, and what else is said of
them (docstrings, docs/types.md, oracle, wrong calls) says the same."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_calls import ROWS
from cases import CASES

import meshcomm as mc
from meshcomm import parallel
from meshcomm.collectives.rule import _rules
from meshcomm.runtime.ops import is_operation, op_named, operations, ops, talks
from meshcomm.runtime.transports.protocol import PRIMITIVES

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "meshcomm").rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


operations()  # imports all
RULED = {rule.op.name for rule in _rules.values()}
"""The differentiable ones."""


def public(space: Any, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and method, by the name that it has in errors."""
    for name in space.__all__:
        value = getattr(space, name)
        if inspect.ismodule(value):
            yield from public(value, f"{prefix}{name}.")
        elif inspect.isclass(value):
            methods = ((each, getattr(value, each)) for each in vars(value) if not each.startswith("_"))
            yield from ((f"{prefix}{name}.{each}", fn) for each, fn in methods if inspect.isroutine(fn))
        elif callable(value):
            yield prefix + name, value


PUBLIC = dict([*public(mc), *public(parallel)])


def label(fn: Callable[..., Any], name: str) -> str:
    """What a docstring says behind a label, in one line."""
    found = re.search(rf"^{name}: (.*?)(?=\n\n|\Z)", inspect.getdoc(fn) or "", re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


SILENT = re.compile(
    r"(that of )?none\b|nothing\b|a copy of|.*(no communication|nothing is (sent|communicated)|communicates? nothing)"
)
NOBODY_WAITS = {"split_rows": "the host waits for its own device"}


def test_every_public_function_that_communicates_has_an_op() -> None:
    """By what its docstring says of its cost, which every public function has to."""
    costly = {name for name, fn in PUBLIC.items() if (cost := label(fn, "Cost")) and not SILENT.match(cost)}
    assert {"all_reduce", "barrier", "row_linear", "Metrics.reduce", "checkpoint.save", "full_state_dict"} <= costly
    assert not {name for name in costly - set(NOBODY_WAITS) if not talks(name)}


def test_an_op_that_sends_nothing_says_so() -> None:
    quiet = [name for name, op in ops.items() if not op.communicates]
    assert {"pvary", "shard", "axis_index", "heads_of"} <= set(quiet)
    assert not [name for name in quiet if not SILENT.match(label(PUBLIC[name], "Cost"))]


def test_what_stands_aside_is_given_all_arguments_in_order() -> None:
    calls = [
        node
        for path in MODULES
        if "collectives" in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "aside"
    ]
    assert len(calls) >= 17
    for fn, *given in (list(map(ast.unparse, call.args)) for call in calls):
        assert given == list(inspect.signature(PUBLIC[fn]).parameters), fn


def test_every_op_is_a_public_function() -> None:
    """And the one that it is made of."""
    assert not [name for name, op in ops.items() if PUBLIC.get(name) is not op.fn]


def words(types: str) -> str:
    return re.sub(r"\bV\b", "varying", re.sub(r"\bI\b", "invariant", types))


def test_docstrings_begin_with_the_types() -> None:
    found = {name: label(PUBLIC[name], "Type") for name in ops}
    assert not [name for name, op in ops.items() if not found[name].startswith(words(op.types))]
    assert not [name for name, op in ops.items() if bool(op.types) != bool(found[name])]


def test_the_table_of_types_md_has_the_types() -> None:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| (\S.*?) \| ", (ROOT / "docs" / "types.md").read_text(), re.MULTILINE)
    assert {name: types for name, _, types in rows} == {
        name: ops[name].types.replace("->", "→").replace("``", "`") for name in RULED | {"tie"}
    }
    for name, given, _ in rows:
        taken = [re.split(r"[=]", each)[0].strip(" *") for each in given.split(",")]
        assert not [each for each in taken if each and each not in inspect.signature(PUBLIC[name]).parameters]


def test_every_differentiable_op_has_cases_of_its_types() -> None:
    """From cases.py follow the tests of values, gradients, transforms, works and compiled code."""
    assert {case.op for case in CASES} == RULED
    for case in CASES:
        assert (case.invariant_in, case.invariant_out) == (ops[case.op].takes == "I", ops[case.op].gives == "I"), (
            case.name
        )
    assert {name for name, op in ops.items() if op.takes in "VI" and op.gives == "I" and not op.composed} - RULED == {
        "broadcast_object", "all_gather_object",
    }  # fmt: skip


ALWAYS_RIGHT = {
    "init": "of a process: test_launchers", "main_only": "PLAIN", "make_mesh": "PLAIN", "Mesh.split": "PLAIN", "join": "test_ddp", "checkpoint.latest": "test_checkpoint",
}  # fmt: skip


def test_every_op_is_called_wrongly_somewhere() -> None:
    assert not {name for name in ops if name not in {row.function.removeprefix("parallel.") for row in ROWS}} - set(
        ALWAYS_RIGHT
    )


# ------------------------------------------------------------------------------------------------- names in the library


def constants(node: ast.AST) -> dict[str, str]:
    """What ``where = "all_gather"`` gives, in one function or in a module outside of functions."""
    inside = node.body if isinstance(node, ast.Module) else list(ast.walk(node))
    pairs = [
        (each.targets[0], each.value) for each in inside if isinstance(each, ast.Assign) and len(each.targets) == 1
    ]
    return {
        target.id: value.value
        for target, value in pairs
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


SAYING = {"axis_of": 0, "explain": 0, "begun": 0, "Courier": 0, "Team": 0, "Call": 0}
"""What takes the name of a public function, and as which argument."""
WORDS = {"a collective", "exchange of objects", "MeshBatchSampler"}


@functools.cache
def said(path: Path) -> list[tuple[str, ast.Call]]:
    """The names of public functions by which calls and errors go."""
    found = []
    outside = constants(nodes_of(path)[0])
    for scope in [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]:
        calls = [
            node for node in ast.walk(scope) if isinstance(node, ast.Call) and called(node) in SAYING and node.args
        ]
        known = outside | constants(scope) if calls else {}
        for node in calls:
            where = node.args[0]
            if isinstance(where, ast.Constant) and isinstance(where.value, str):
                found.append((where.value, node))
            elif isinstance(where, ast.Name) and where.id in known:
                found.append((known[where.id], node))
    return found


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


ELSEWHERE = {"is_main", "convert_batch_norm"}
"""They look up an axis, and nobody is asked."""


def test_every_name_that_stands_in_a_call_is_an_op() -> None:
    found = {name for path in MODULES for name, _ in said(path)}
    assert {"all_reduce", "collect_results", "checkpoint.load", "sync_batch_norm"} <= found
    assert not {name for name in found if op_named(name) is None} - WORDS - ELSEWHERE
    assert not [name for name in ELSEWHERE if not SILENT.match(label(PUBLIC[name], "Cost"))]


def test_what_is_compared_is_what_is_said() -> None:
    for path in MODULES:
        for name, call in said(path):
            if called(call) in ("Courier", "Team"):
                given = [each.arg for each in call.keywords]
                assert given in ([], list(ops[name].compared)) or None in given, name
    for name, op in ops.items():
        if op.primitive:
            assert op.primitive in PRIMITIVES
        if name in RULED:
            assert {*op.compared, *op.dims, *op.cuts} <= set(inspect.signature(PUBLIC[name]).parameters), name


def test_no_other_list_of_names() -> None:
    """Nowhere in the library do four names of collectives stand together, but in the rooms' exports."""
    known = {name for name, op in ops.items() if not op.composed}
    for path in MODULES:
        if path.name == "__init__.py" or path.parent.name == "tools":
            continue
        for node in nodes_of(path):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
                each = node.keys if isinstance(node, ast.Dict) else node.elts
                texts = {one.value for one in each if isinstance(one, ast.Constant) and isinstance(one.value, str)}
                assert len(texts & known) < 4 or texts <= set(PRIMITIVES), (path, texts)


def test_names_are_found_before_their_module_is_imported() -> None:
    """A budget may name what nothing has called yet."""
    assert is_operation("checkpoint.save")
    assert is_operation("permute")
    assert not is_operation("pvary"), "it sends nothing"
    assert not is_operation("weighted_mean"), "it is made of an all_reduce"
    assert not is_operation("nothing.of.this")
    assert not talks("nothing of this")


def test_arguments_by_name() -> None:
    assert ops["reduce"].arguments((1,), {"op": "max", "mesh": None}) == {"dst": 1, "op": "max", "mesh": None}
    assert ops["all_to_all"].arguments((0, 1, None, [2]), {})["recv_sizes"] == [2]


INTERRUPTED = """
import sys
import meshcomm as mc
from meshcomm.runtime.ops import Op, ops

def interrupt(frame, event, arg):
    if event == "return" and frame.f_code is Op.{where}.__code__ and "permute" in ops:
        raise KeyboardInterrupt

sys.setprofile(interrupt)
try:
    mc.permute
except KeyboardInterrupt:
    sys.setprofile(None)
    assert callable(mc.permute)
    try:
        Op("permute", types="V -> V")
    except AssertionError:
        print("once")
"""


@pytest.mark.parametrize("where", ["__post_init__", "__call__"])
def test_an_import_that_was_interrupted_can_be_made_again(where: str) -> None:
    program = INTERRUPTED.format(where=where)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout == "once\n", found.stderr
