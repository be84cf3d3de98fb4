"""What is called otherwise elsewhere: the answers to who asks for a name that is not here.

The one table is docs/coming-from.md, which a wheel brings along. It is read when a name is missing, and not before.
"""

from __future__ import annotations

import difflib
import opcode
import re
import sys
import types
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

_HERE = Path(__file__).parent
_PAGES = (_HERE / "coming-from.md", _HERE.parent / "docs" / "coming-from.md")
"""In a wheel, in a checkout."""
_MOST = 4
"""How many answers one name gets."""


class Row(NamedTuple):
    """One call of another library, and what to write here."""

    section: str
    theirs: str
    ours: str
    """A line of code."""
    why: str
    """Why it is no call like theirs, if it is none."""


class Cells(NamedTuple):
    """One row of the page as it stands there."""

    section: str
    theirs: str
    ours: str


def page() -> str:
    """The text of docs/coming-from.md; nothing where it is missing."""
    return next((path.read_text(encoding="utf-8") for path in _PAGES if path.exists()), "")


def cells(text: str) -> list[Cells]:
    """The rows of its tables."""
    found, section, before = [], "", ""
    for line in text.splitlines():
        section = line[3:] if line.startswith("## ") else section
        if line.startswith("| ") and before.startswith("|"):  # not the head of the table
            found.append(Cells(section, *(cell.strip() for cell in line.strip("|").split(" | ", 1))))
        before = line
    return found


def code(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def lines(cell: str) -> list[str]:
    """The code on the right that is a line to write, and not a word of the text."""
    return [line for line in code(cell) if re.search(r"\b(mc|mesh)\.", line)]


@lru_cache(1)
def rows() -> tuple[Row, ...]:
    """Each call of the page with each line that answers it; one by one where there are as many of both."""
    found = []
    for section, left, right in cells(page()):
        theirs, ours = code(left), lines(right)
        why = _reason(right)
        pairs = list(zip(theirs, ours, strict=True)) if len(theirs) == len(ours) else []
        found += [Row(section, *pair, why) for pair in pairs or [(one, line) for one in theirs for line in ours]]
    return tuple(found)


def _reason(ours: str) -> str:
    """Why there is nothing to call, where the text says so before its first line of code."""
    if not ours.startswith(("there is", "there are", "nothing")):
        return ""
    said = re.split("[`;:]", ours.removeprefix("nothing: "))[0].strip(" ,")
    return f": {said}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _called(theirs: str) -> str:
    """``psum`` of ``lax.psum(x, "dp")``."""
    found = re.match(r"(?:\w+ = |@|with |from [\w.]+ import )?([\w.]+)", theirs)
    return _plain(found.group(1).rpartition(".")[2]) if found else ""


def answers(name: str) -> list[str]:
    """Lines of code, each with what it stands for; the best first."""
    wanted, own = _plain(name), _own()
    here = [f"{path}  # it is there" for path in (own.get(name), own.get(wanted)) if path is not None][:1]
    heads = [row for row in rows() if _called(row.theirs) == wanted]
    inside = [row for row in rows() if wanted in map(_plain, re.findall(r"\w+", re.sub(r'"[^"]*"', "", row.theirs)))]
    found = {row.ours: f"{_on_its_own(row.ours)}  # {row.theirs}{row.why}" for row in reversed(heads or inside)}
    theirs = list(reversed(found.values()))
    return (here + theirs if name in own or not heads else theirs + here)[:_MOST]


def _own() -> dict[str, str]:
    """Where each name of ours stands; by the name, and by what is left of it without case and underscores."""
    root: Any = sys.modules[__name__.partition(".")[0]]
    known = {name: f"mc.parallel.checkpoint.{name}" for name in ("save", "load", "latest")}
    known |= {name: f"mc.parallel.{name}" for name in root.parallel.__all__}
    known |= {name: f"mc.{name}" for name in root.__all__}
    return {_plain(name): path for name, path in known.items()} | known


def _on_its_own(line: str) -> str:
    """A line that needs no ``mesh``: the page has one."""
    return re.sub(r"(?<![\w.])mesh(?=\.)", "mc.current_mesh()", line)


def answer(name: str) -> str:
    """What to write in place of a missing name: lines to put behind an error."""
    found = answers(name)
    if not found:
        root: Any = sys.modules[__name__.partition(".")[0]]
        near = difflib.get_close_matches(name.lower(), root.__all__, 3)
        found = [f"mc.{each}  # is near" for each in near] or ["mc.__all__  # what there is"]
    return "".join(f"\n  {line}" for line in found)


def missing(module: str, name: str) -> AttributeError | ImportError:
    """The error for a name that a module does not have; for ``from module import name`` an ImportError, as Python would
    put one without an answer in place of any AttributeError.
    """
    if name.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    if _imports(sys._getframe(2)):
        return ImportError(f"cannot import name {name!r} from {module!r}{answer(name)}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{answer(name)}", name=name)


def _imports(frame: types.FrameType) -> bool:
    """Whether what runs there is the second half of ``from module import name``."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def layout_said_by(spec: object) -> str | None:
    """``"(dp dim0) dim1 ..."`` of ``PartitionSpec("dp", None)`` and of the same as a tuple or a list; None of what is
    none of these. Dims beyond the spec are not cut.
    """
    if not is_partition_spec(spec) and type(spec) not in (tuple, list):
        return None
    entries = list(cast("Iterable[object]", spec))
    axes = [() if each is None else tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in entries]
    if not all(isinstance(name, str) for names in axes for name in names):
        return None
    dims = [f"({' '.join((*names, f'dim{at}'))})" if names else f"dim{at}" for at, names in enumerate(axes)]
    return " ".join([*dims, "..."])


def is_partition_spec(spec: object) -> bool:
    """Whether it is one of JAX's, which is a tuple in old versions and none in new ones."""
    return type(spec).__name__ in ("P", "PartitionSpec") and isinstance(spec, Iterable)


_OF_MESHES = """
    get_group get_rank get_local_rank get_coordinate get_world_size mesh_dim_names mesh ndim device_type axis_sizes
    devices Get_rank Get_size Get_coords Get_topo Get_dim Sub Shift Split Dup
"""
OF_MESHES = frozenset(_OF_MESHES.split())
"""What meshes, groups and communicators have elsewhere."""


class _Missing:
    """An attribute that is not there, and says what is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, thing: object, owner: type) -> NoReturn:
        what = f"type object {owner.__name__!r}" if thing is None else f"{owner.__name__!r} object"
        raise AttributeError(f"{what} has no attribute {self._name!r}{answer(self._name)}")


class Answers:
    """A class whose objects say what to write in place of an attribute that others' have. Not by ``__getattr__``: with
    one, every attribute that is there takes longer.
    """

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_MESHES]


for _name in OF_MESHES:
    setattr(Answers, _name, _Missing(_name))
