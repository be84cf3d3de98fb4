"""The arrows of import point down, nothing is hidden in a function, and private names of torch stand behind one door."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import meshcomm as mc

ROOT = Path(mc.__file__).parent
MODULES = sorted(
    ".".join(("meshcomm", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)

# From the bottom up; a module imports from its own row or a lower one.
LAYERS = [
    ("meshcomm.in_thread",),
    ("meshcomm.errors", "meshcomm.watch", "meshcomm.elsewhere"),
    ("meshcomm._versions", "meshcomm._trees"),
    ("meshcomm._torch",),
    ("meshcomm.pictures",),
    ("meshcomm.runtime",),
    ("meshcomm.launch",),
    ("meshcomm.axis",),
    ("meshcomm.mesh",),
    ("meshcomm.make_mesh",),
    ("meshcomm.limit",),
    ("meshcomm.work", "meshcomm.tracing"),
    ("meshcomm.collectives",),
    ("meshcomm.layout",),
    ("meshcomm.spmd",),
    ("meshcomm.objects",),
    ("meshcomm.training", "meshcomm.parallel"),
    ("meshcomm.dry",),
    ("meshcomm.verifying",),
    ("meshcomm.tools", "meshcomm.testing"),
    ("meshcomm.__main__",),
]
NARROW = {
    "meshcomm.launch": ("meshcomm.runtime", "meshcomm.errors"),
    "meshcomm.errors": (),
    "meshcomm.runtime.tracebacks": ("meshcomm.errors",),
    "meshcomm.pictures": ("meshcomm.pictures", "meshcomm.errors"),
    "meshcomm.elsewhere": (),
    "meshcomm._trees": (),
    "meshcomm._versions": (),
}
PRIVATE = tuple(module for module in MODULES if f"{module}.".startswith("meshcomm._torch."))
"""Where private names of torch stand."""
NARROW |= dict.fromkeys(PRIVATE, ("meshcomm._torch", "meshcomm._trees", "meshcomm._versions", "meshcomm.errors"))


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@cache
def tree_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(), str(file))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(module)))


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Every module that this one imports, with the line; ``from package import module`` counts as the module."""
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), node.lineno


def layer(module: str) -> int:
    return next(i for i, row in enumerate(LAYERS) for package in row if under(module, package))


def test_there_are_modules_and_each_has_a_layer() -> None:
    assert {"meshcomm.mesh", "meshcomm.collectives.reduce", "meshcomm.runtime.transports.threads.transport"} <= set(
        MODULES
    )
    for module in MODULES:
        if module != "meshcomm":
            assert layer(module) >= 0


def upward(module: str) -> Iterator[str]:
    for other, line in imports_of(module):
        if not under(other, "meshcomm"):
            continue
        if other == "meshcomm":
            yield f"{module}:{line} imports the package root"
        elif layer(other) > layer(module):
            yield f"{module}:{line} imports {other}, which is above it"
        elif module in NARROW and not any(under(other, package) for package in NARROW[module]):
            yield f"{module}:{line} imports {other}"


def offenders(rule: Callable[[str], Iterable[str]], modules: Iterable[str] = MODULES) -> str:
    """What breaks a rule in any module, a line each."""
    return "\n".join(found for module in modules for found in rule(module))


def test_imports_point_down() -> None:
    assert not offenders(upward, [module for module in MODULES if module != "meshcomm"])


def test_no_cycle() -> None:
    left = {m: {other for other, _ in imports_of(m) if under(other, "meshcomm")} for m in MODULES}
    while left:
        bottom = [module for module, needs in left.items() if not needs & set(left)]
        assert bottom, f"a cycle among {sorted(left)}"
        for module in bottom:
            del left[module]


def test_the_root_only_re_exports() -> None:
    """At once, or when asked for: then a type checker sees an import, and Python two functions."""
    body = tree_of("meshcomm").body
    assert isinstance(body[0], ast.Expr), "no docstring"
    for node in body[1:]:
        text = ast.unparse(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING":
            assert all(isinstance(inner, ast.ImportFrom) for inner in node.body), text
            assert ast.unparse(node.body[0]) == "from meshcomm import parallel as parallel", (
                "pyright knows no other way"
            )
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) == "not typing.TYPE_CHECKING", text
            assert [getattr(inner, "name", "") for inner in node.body] == ["__getattr__"], text
        elif isinstance(node, ast.With):
            assert ast.unparse(node.items[0]) == "_ToStay()", text
            assert all(isinstance(inner, ast.ImportFrom) for inner in node.body), text
        elif isinstance(node, ast.FunctionDef):
            assert node.name == "__dir__", text
        elif isinstance(node, ast.Import):
            assert text in ("import importlib", "import typing"), text
        elif isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) in ("__all__", "__version__", "_LATER"), text
        else:
            assert isinstance(node, ast.ImportFrom), text


def imported_for_type_checkers() -> dict[str, str]:
    """Name to module, as the root's ``if typing.TYPE_CHECKING:`` has them."""
    blocks = [node for node in tree_of("meshcomm").body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if node.module != "meshcomm"}


def test_type_checkers_see_what_is_imported_when_asked_for() -> None:
    later = vars(mc)["_LATER"]
    assert imported_for_type_checkers() == later
    assert set(later) < set(mc.__all__)
    for name, module in later.items():
        assert getattr(mc, name) is getattr(importlib.import_module(module), name)
    assert {"pvary", "__version__", *later} <= set(dir(mc))


def hidden_imports(module: str) -> Iterator[str]:
    for function in nodes_of(module):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    yield f"{module}:{node.lineno} imports in a function"


def test_no_import_hides_in_a_function() -> None:
    assert not offenders(hidden_imports)


ABOVE = (
    "tracing",
    "layout",
    "spmd",
    "objects",
    "training",
    "tools",
    "parallel",
    "verifying",
    "dry",
    "testing",
    "__main__",
)
"""What stands above the collectives is imported when it is first asked for."""

# What imports when it is first asked for, and what: DTensor takes a second and more.
LATE = {
    "meshcomm": {
        "meshcomm.elsewhere", "meshcomm.collectives.exchange.all_to_all", "meshcomm.collectives.exchange.permute", "meshcomm.collectives.exchange.ragged", "meshcomm.collectives.one_rank", "meshcomm.collectives.messages", "meshcomm.collectives.scan", "meshcomm.training.equal", "meshcomm.training.main_only", "meshcomm.training.metrics", "meshcomm.training.batches", "meshcomm.objects.objects", "meshcomm.objects.letters",
        "meshcomm.training.process", "meshcomm.training.reductions", "meshcomm.objects.results",
        "meshcomm.training.split_rows",
        "meshcomm.layout.dtensor", "meshcomm.layout.einsum", "meshcomm.layout.plan", "meshcomm.layout.reshard",
        "meshcomm.layout.shapes", "meshcomm.layout.show", "meshcomm.parallel", "meshcomm.spmd.types.check_vma", "meshcomm.spmd.random.rng",
        "meshcomm.verifying.report", "meshcomm.verifying.hangs.proof", "meshcomm.verifying.hangs.prove",
        "meshcomm.verifying.training.verify",
        "meshcomm.verifying.verify",
        "meshcomm.dry.hardware", "meshcomm.dry.planning.advice", "meshcomm.dry.planning.sweep", "meshcomm.dry.run",
        "meshcomm.spmd.shard_map.function", "meshcomm.tracing.budget", "meshcomm.tracing.event", "meshcomm.tracing.traces",
    },
    "meshcomm.dry.hardware": {"meshcomm.dry.measure"},
    "meshcomm.dry.planning.options": {"meshcomm.parallel.fsdp.choice_of_units"},
    "meshcomm.parallel": {"meshcomm.elsewhere"} | {
        f"meshcomm.parallel.{name}"
        for name in (
            "batch_norm", "clip", "context.attention", "context.order", "data.ddp", "data.micro_batches", "expert.balance", "expert.experts", "expert.grouped", "fsdp.module", "fsdp.state", "full_state",
            "optimizers.sharded", "pipeline.functional", "pipeline.schedule", "pipeline.split", "pipeline.step",
            "by_axes", "tensor.attention", "tensor.auto.auto_plan", "tensor.auto.found_plan", "tensor.chunked_loss", "tensor.functions", "tensor.losses", "tensor.module", "tensor.norms", "tensor.plan",
        )
    },
    "meshcomm.parallel.by_axes": {
        "meshcomm.parallel.tensor.auto.auto_plan", "meshcomm.parallel.tensor.module", "meshcomm.parallel.fsdp.module",
        "meshcomm.parallel.data.ddp",
    },
    "meshcomm.parallel.tensor.module": {"meshcomm.parallel.tensor.auto.auto_plan"},
    "meshcomm.parallel.tensor.auto.proof": {"meshcomm.parallel.tensor.module"},
    "meshcomm.spmd.shard_map.dtensors": {"meshcomm.layout.dtensor"},
    "meshcomm.runtime.groups": {"meshcomm.runtime.hooks.guard.setup"},
    "meshcomm.launch": {"meshcomm.runtime.start.workers"},
    "meshcomm.__main__": {"meshcomm.tools.hardware", "meshcomm.tools.verify"},
    "meshcomm.tools.verify": {"meshcomm.verifying.verify", "meshcomm.verifying.training.verify"},
    "meshcomm.testing.equal": {"meshcomm.verifying.verify", "meshcomm.verifying.training.verify"},
    "meshcomm.make_mesh": {"meshcomm.runtime.transports.threads.transport"},
}  # fmt: skip


def named_imports(module: str) -> Iterator[str]:
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes_of(module)}
    texts = {node.value for node in nodes_of(module) if isinstance(node, ast.Constant)}
    late = LATE.get(module, set())
    if names & {"__import__", "import_module"}:
        if texts & set(MODULES) != late or not late:
            yield f"{module} imports by name, and names {sorted(texts & set(MODULES))}"
        yield from (
            f"{module} imports {other} by name, which is above it"
            for other in late
            if not under(other, module) and layer(other) > layer(module)
        )


def test_few_import_by_name() -> None:
    assert not offenders(named_imports)


# --------------------------------------------------------------------------------------------------- private names


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def own_private_names() -> set[str]:
    """What meshcomm itself defines with an underscore: functions, classes, variables, attributes."""
    found = set()
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if hidden(name)} | {"_torch"}


STANDARD_LIBRARY = {"os._exit", "pickle._Unpickler", "sys._current_frames", "sys._getframe"}
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # documented, the underscore keeps clear of field names


def private_names(module: str) -> Iterator[str]:
    """Those of others, that it uses."""
    ours = own_private_names() | NAMED_TUPLES
    for node in nodes_of(module):
        place = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(hidden(part) for part in alias.name.split(".")):
                    yield f"{place} imports {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not under(node.module, "meshcomm"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            if any(hidden(part) for part in parts):
                yield f"{place} imports from {node.module}"
        elif isinstance(node, ast.Attribute) and hidden(node.attr):
            text = ast.unparse(node)
            if node.attr not in ours and text not in STANDARD_LIBRARY:
                yield f"{place} uses {text}"


def test_private_names_of_others_stand_in_one_file() -> None:
    assert not offenders(private_names, [module for module in MODULES if module not in PRIVATE])


def test_the_check_finds_private_names() -> None:
    """What it lets through elsewhere it finds in the one file."""
    assert "_allgather_base" in offenders(private_names, PRIVATE)
    nodes = [node for module in PRIVATE for node in nodes_of(module)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {"_allgather_base", "_current_level"} <= used
    assert "_allgather_base" not in own_private_names()


# ------------------------------------------------------------------------------------------------- chains and rooms


@cache
def needs(module: str) -> tuple[str, ...]:
    """The modules of meshcomm that this one imports, for type checkers too."""
    return tuple(sorted({other for other, _ in imports_of(module) if other in MODULES}))


@cache
def chain(module: str) -> tuple[str, ...]:
    """The longest way down from a module: each imports the next."""
    return (module, *max((chain(other) for other in needs(module)), key=len, default=()))


LONGEST = 17
"""How many files a change at the bottom of a chain may have to pass before it is at its top. It only goes down."""


def test_no_chain_of_imports_is_long() -> None:
    longest = max((chain(module) for module in MODULES if module != "meshcomm"), key=len)
    assert len(longest) <= LONGEST, "\n  -> ".join((f"{len(longest)} files", *longest))


ARROWS = {"start": {"health"}, "transports": {"health"}, "hooks": {"health"}, "health": set(), "process": set()}
"""Which room of runtime/ knows which. All know process/, what lies beside the rooms, and the protocol of transports."""
NOT_YET = {
    "hooks.guard.mail -> transports.shared.call",
    "hooks.guard.setup -> transports.process_group",
}  # fmt: skip
"""Arrows that are still to go."""


def runtime_room(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "runtime" and parts[2] in ARROWS else None


KNOW_ALL = ("meshcomm.runtime.groups", "meshcomm.runtime.identity")
"""Beside the rooms, and made of what lies in them: neither these nor what else lies beside them knows it."""


def wrong_arrows(module: str) -> Iterator[str]:
    mine = runtime_room(module)
    allowed = {None, "process", mine, *ARROWS.get(mine or "", ())}
    for other in needs(module) if under(module, "meshcomm.runtime") and module not in KNOW_ALL else ():
        arrow = f"{module} -> {other}".replace("meshcomm.runtime.", "")
        above = runtime_room(other) not in allowed and not other.endswith("transports.protocol")
        if other in KNOW_ALL or (above and arrow not in NOT_YET):
            yield arrow


def test_rooms_of_the_runtime_know_few_others() -> None:
    assert not offenders(wrong_arrows)


@cache
def privately_in(room: str) -> set[str]:
    """The private names that a room defines: of its modules, of its classes, and of their objects."""
    found = set()
    for module in MODULES:
        for node in nodes_of(module) if room_of(module) == room else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return {name for name in found if hidden(name)}


@cache
def room_of(module: str) -> str:
    """The room that a module lies in: runtime/hooks, with the guard that is a part of it, or tracing."""
    folder = module if ROOT.joinpath(*module.split(".")[1:]).is_dir() else module.rpartition(".")[0]
    return ".".join(folder.split(".")[:3])


TORCHS = {"_base", "_version", "_timeout"}
"""Attributes of tensors that torch documents, and one of NCCL's options that has no other name."""


@cache
def private_elsewhere(room: str) -> set[str]:
    everywhere = set().union(*(privately_in(other) for other in {room_of(module) for module in MODULES}))
    return everywhere - privately_in(room) - TORCHS - NAMED_TUPLES


def names_of_other_rooms(module: str) -> Iterator[str]:
    mine = room_of(module)
    others = private_elsewhere(mine)
    for node in nodes_of(module):
        used = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom) and room_of(str(node.module)) != mine:
            used = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES}
        for name in sorted(used & others):
            yield f"{module}: {name}"


def test_no_private_name_of_a_room_is_used_in_another() -> None:
    assert not offenders(names_of_other_rooms)


# The mesh knows its DeviceMesh; DTensor is a format of torch's own, and lives in one file.
FORMATS = {
    "meshcomm.mesh": {"torch.distributed", "torch.distributed.device_mesh"},  # whose groups a place has
    "meshcomm.verifying.hangs.outside": {"torch.distributed"},  # what a program asks of it: its rank
    "meshcomm.make_mesh": {"torch.distributed", "torch.distributed.device_mesh"},
    "meshcomm.layout.dtensor": {"torch.distributed.device_mesh", "torch.distributed.tensor"},
    "meshcomm.parallel.checkpoint.files": {
        f"torch.distributed.checkpoint.{name}"
        for name in ("default_planner", "filesystem", "metadata", "planner", "planner_helpers", "storage")
    },
}  # fmt: skip


def test_torch_distributed_is_used_in_the_process_runtime_only() -> None:
    """Nothing above the runtime communicates through torch.distributed."""
    for module in MODULES:
        if under(module, "meshcomm.runtime") or module in PRIVATE:
            continue
        used = {other for other, _ in imports_of(module) if under(other, "torch.distributed")}
        assert used <= FORMATS.get(module, set()), module


def test_nothing_imports_what_is_imported_when_asked_for() -> None:
    """Whatever imports DTensor at once brings it into every program; what stands lower, the layouts."""
    later = set(imported_for_type_checkers().values())
    assert later == LATE["meshcomm"] - {"meshcomm.parallel", "meshcomm.elsewhere"}
    for module in MODULES:
        if module != "meshcomm":
            others = {other for other, _ in imports_of(module)}
            assert "meshcomm.layout.dtensor" not in others, module
            above = module in later or any(under(module, f"meshcomm.{name}") for name in ABOVE)
            assert above or not later & others, module


# ------------------------------------------------------------------------------------------------------------ names


def test_all_of_the_root_is_complete() -> None:
    public = {name for name, value in vars(mc).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public <= set(mc.__all__)
    assert {*mc.__all__, "parallel", "__version__"} == set(dir(mc))
    assert list(mc.__all__) == sorted(mc.__all__)


@cache
def names_taken() -> dict[str, list[tuple[str, str]]]:
    """Module to (who imports from it, what)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for user in MODULES:
        for node in nodes_of(user):
            if isinstance(node, ast.ImportFrom):
                found.setdefault(str(node.module), []).extend((user, alias.name) for alias in node.names)
    return found


def wrongly_taken(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        return
    exported = getattr(module, "__all__", [])
    if len(set(exported)) != len(exported):
        yield f"{name} names something twice in __all__"
    yield from (f"{name}.__all__ names {each}" for each in exported if not hasattr(module, each))
    imported = {
        alias.asname or alias.name
        for node in nodes_of(name)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for user, taken in names_taken().get(name, []):
        if taken not in (*exported, "*") and (hidden(taken) or taken in imported or not hasattr(module, taken)):
            yield f"{user} imports {taken} of {name}, where it is private, or not at home"


def test_names_are_imported_from_where_they_are_at_home_and_public() -> None:
    """What begins with no underscore; what a file only passes on it says in its ``__all__``."""
    assert not offenders(wrongly_taken)


def test_every_module_is_found_by_the_import_system() -> None:
    """No folder lacks its __init__."""
    found = {module.name for module in pkgutil.walk_packages([str(ROOT)], "meshcomm.")}
    assert found | {"meshcomm"} == set(MODULES)


def test_every_module_says_what_it_is_for() -> None:
    assert not [module for module in MODULES if not ast.get_docstring(tree_of(module))]


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").exists()


HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.testing", "sympy",
    "pytest",
)  # fmt: skip


IMPORTS = """
import importlib, pkgutil, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func, "by", name)
        return func(*args, **(kwargs or {}))

before = set(sys.modules)
name = "meshcomm"
with Seen():
    import meshcomm
    print(*sorted(set(sys.modules) - before))
    for _, name, _ in pkgutil.walk_packages(meshcomm.__path__, "meshcomm."):
        if not name.endswith("__main__"):
            importlib.import_module(name)
"""


def test_importing_meshcomm_imports_nothing_heavy_and_computes_nothing() -> None:
    """What ``import meshcomm`` adds to ``import torch`` in a fresh interpreter; and what is imported later, in whatever
    mode the one who first asks for it is: a tensor that is made then would be a dry run's.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=280, check=True, cwd=ROOT.parent
    )
    first, *computed = done.stdout.splitlines()
    added = first.split()
    assert "meshcomm.collectives.reduce" in added
    assert not [module for module in added if any(under(module, heavy) for heavy in HEAVY)]
    assert computed == []


def rooms() -> Iterator[str]:
    """Every folder and module of the tree in ARCHITECTURE.md, as a path."""
    text = (ROOT.parent / "ARCHITECTURE.md").read_text().split("## The rooms", 1)[1].split("```")[1]
    parents: list[str] = []
    for line in text.strip("\n").split("\n"):
        name = line.split()[0]
        del parents[(len(line) - len(line.lstrip())) // 4 :]
        yield "/".join((*parents, name)).replace("//", "/")
        if name.endswith("/"):
            parents.append(name.rstrip("/"))


def test_the_tree_in_the_architecture_is_the_one_on_the_disk() -> None:
    files = {path.relative_to(ROOT.parent).as_posix() for path in ROOT.rglob("*.py") if path.name != "__init__.py"}
    folders = {f"{path.parent.relative_to(ROOT.parent).as_posix()}/" for path in ROOT.rglob("__init__.py")}
    assert sorted(rooms()) == sorted(files | folders)


def crowded() -> Iterator[str]:
    for folder in {path.parent for path in ROOT.rglob("*.py")}:
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if count > 14:
            yield f"{folder.relative_to(ROOT)} holds {count} modules"


def test_no_room_is_crowded() -> None:
    assert list(crowded()) == []
