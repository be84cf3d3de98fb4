"""What the site has beside the pages in docs/: README as its first page, and a page for each public name.

docs/*.md  --------------------------------->  a page each
README.md  ---- links turned to the site --->  index
meshcomm.__all__, parallel's ...  --------->   api/NAME.rst, written here, read by autodoc
                                                 docstrings: "Args:" and the other labels become fields
calls of fail(...) in the sources  -------->   api/texts-ROOM.rst: every error's text with its cure
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.addnodes import toctree as toctree_node
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

import meshcomm as mc
from meshcomm.pictures.picture import Picture

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
API = DOCS / "api"
SOURCES = "https://github.com/meshcomm/meshcomm/blob/main"
LABELS = ("Type", "Args", "Returns", "Backward", "Cost", "Raises", "Example", "Source")
MODULES = (
    "meshcomm",
    "meshcomm.parallel",
    "meshcomm.parallel.fsdp",
    "meshcomm.parallel.checkpoint",
    "meshcomm.testing",
)
# The rooms in the order in which one learns them; what a room is for, its own docstring says.
ROOMS = (
    "",
    "collectives",
    "layout",
    "spmd",
    "parallel",
    "objects",
    "training",
    "tracing",
    "verifying",
    "testing",
    "dry",
    "runtime",
)
WHOLE = "The mesh, the ranks, works and errors"

# ---------------------------------------------------------------------------------------------- a page per public name


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with its module, and what it is."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield f"{module.__name__}.{name}", value


def room_of(value: Any) -> str:
    """The folder below meshcomm/ in which it is written; "" for the files beside the folders."""
    inside = value.__module__.split(".")[1:]
    return inside[0] if len(inside) > 1 else ""


def title_of(room: str) -> str:
    """What a room is for, by its own docstring."""
    doc = inspect.getdoc(importlib.import_module(f"meshcomm.{room}")) if room else WHOLE
    return (doc or room).splitlines()[0].rstrip(".").replace("``", "")


def directive(path: str, value: Any) -> str:
    """The autodoc directive of one name."""
    if inspect.isclass(value):
        return f".. autoclass:: {path}\n   :members:\n   :show-inheritance:\n"
    if not callable(value):
        return f".. autodata:: {path}\n"
    return f".. autofunction:: {path}\n"


def without_overloads(app: Sphinx) -> None:
    """A function is shown with its own signature; its overloads are for type checkers."""
    for module in {value.__module__ for _, value in public() if callable(value)}:
        if module.startswith("meshcomm"):
            analyzer = ModuleAnalyzer.for_module(module)
            analyzer.analyze()
            analyzer.overloads.clear()


def write_api(app: Sphinx) -> None:
    """api/*.rst, those that changed only, so that a second build reads little."""
    API.mkdir(exist_ok=True)
    wanted: dict[Path, str] = {}
    rooms: dict[str, list[tuple[str, str, Any]]] = {room: [] for room in ROOMS}
    for path, value in public():
        page = path.removeprefix("meshcomm.")
        heading = page + ("()" if inspect.isfunction(value) else "")
        wanted[API / f"{page}.rst"] = f"{heading}\n{'=' * len(heading)}\n\n{directive(path, value)}"
        rooms[room_of(value)].append((page, heading, value))
    lines = [
        "Reference",
        "=========",
        "",
        "Every public name, with shapes, types, backward, cost, errors and an example that runs.",
        "",
    ]
    for room, found in rooms.items():
        lines += [title_of(room), "-" * len(title_of(room)), "", ".. toctree::", "   :hidden:", ""]
        lines += [f"   {page}" for page, _, _ in found]
        lines += ["", ".. list-table::", "   :widths: 30 70", ""]
        for page, heading, value in found:
            lines += [f"   * - :doc:`{heading} <{page}>`", f"     - {first_sentence(value)}"]
        lines.append("")
    wanted[API / "index.rst"] = "\n".join(lines)
    wanted |= texts()
    for old in set(API.glob("*.rst")) - set(wanted):
        old.unlink()
    for file, text in wanted.items():
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def first_sentence(value: Any) -> str:
    """Of its docstring."""
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:]) ", paragraph)[0].rstrip(":")


# ------------------------------------------------------------------------------------------------------ texts of errors

RAISES = {"fail", "explain", "text", "late_text"}


def worded(node: ast.expr) -> str:
    """What an expression says, with ... for what is only known when it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(worded, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return worded(node.left) + worded(node.right)
    return "..."


def texts_in(file: Path) -> Iterator[tuple[str, str, str, int]]:
    """Of each error that a file can raise: the function, if it is one alone, what is wrong, the cure, and the line."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        said = [worded(each) for each in node.args[:2]]
        cure = next((worded(each.value) for each in node.keywords if each.arg == "fix"), "")
        if called in RAISES and len(said) == 2 and len(re.findall("[a-z]{2,}", said[1])) > 2:
            yield said[0], said[1], cure, node.lineno


def escaped(text: str) -> str:
    """Without what reStructuredText takes for its own."""
    return re.sub(r"([*`|\\_<>])", r"\\\1", text)


def texts() -> dict[Path, str]:
    """Pages of all texts, by room: each is a heading, so that the search finds it by its words and leads to it."""
    package = ROOT / "meshcomm"
    pages: dict[Path, str] = {}
    for room in ROOMS:
        title = "Texts: " + title_of(room)
        lines = [title, "=" * len(title), ""]
        for file in sorted((package / room).rglob("*.py") if room else package.glob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            for where, what, cure, line in texts_in(file):
                heading = escaped(re.sub(r"(\.\.\.)+", "...", " ".join(what.split())))
                lines += [heading, "-" * len(heading), ""]
                if where != "...":
                    lines.append(f":Raised by: ``{where}``")
                if cure.strip(". "):
                    lines.append(f":Cure: {escaped(' '.join(cure.split()))}")
                lines += [f":Source: `{path}, line {line} <{SOURCES}/{path}#L{line}>`__", ""]
        pages[API / f"texts-{room or 'mesh'}.rst"] = "\n".join(lines)
    listed = "\n".join(f"   {page.stem}" for page in pages)
    title = "All texts"
    intro = (
        "Every error, by what it says; ``...`` stands for what differs. Those met most are explained in :doc:`/errors`."
    )
    pages[API / "texts.rst"] = f"{title}\n{'=' * len(title)}\n\n{intro}\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"
    return pages


# --------------------------------------------------------------------------------------------------------- docstrings


def as_fields(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The labels at a docstring's own level become reStructuredText's fields, arguments and errors a list in theirs."""
    text = "\n".join(lines)
    head, *parts = re.split(rf"(?m)^({'|'.join(LABELS)}):[ \n]", text)
    if not parts:
        return
    made = [head.rstrip(), ""]
    for label, body in zip(parts[::2], parts[1::2], strict=True):
        inner = inspect.cleandoc(body if label in ("Args", "Raises", "Example") else "    " + body.lstrip())
        if label in ("Args", "Raises"):
            inner = entries(inner)
        made += [f":{label}:", *(f"    {line}".rstrip() for line in inner.splitlines()), ""]
    lines[:] = "\n".join(made).splitlines()


def entries(body: str) -> str:
    """``x: what it is`` as an entry of a list."""
    named = re.sub(r"(?m)^(\w+(?:, \*{0,2}\w+)*):(?= |$)", lambda found: f"* ``{found[1]}``:", body)
    return re.sub(r"(?m)^(?!\* )(?=\S)", "  ", re.sub(r"(?m)^    ", "  ", named)) if named != body else body


# -------------------------------------------------------------------------------------------------------------- links


def to_sources(text: str) -> str:
    """Links to files that are no pages of the site."""
    return re.sub(r"\]\((?:\.\./)?([A-Z]+\.md|examples/[^)]*|benchmarks/[^)]*)\)", rf"]({SOURCES}/\1)", text)


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """README in place of the first page's mark, and links to sources."""
    if page == "index":
        readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
        source[0] = source[0].replace("<!-- README -->", readme)
    source[0] = to_sources(re.sub(r"(?ms)^```python\n(.*?)^```\n", with_pictures, source[0]))


def with_pictures(block: re.Match[str]) -> str:
    """A program with what it shows under it, drawn now."""
    if "mc.show(" not in block[1]:
        return block[0]
    shown: list[str] = []

    def show(*what: Any, **how: Any) -> Picture:
        picture = mc.show(*what, **how)
        shown.append(picture.svg)
        return picture

    program = block[1].replace("mc.show(", "show(")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, "docs", "exec"), {"show": show, "__name__": "__main__"})
    drawn = "".join(f"<p>{each}</p>\n" for each in shown)
    return f"{block[0]}\n```{{raw}} html\n{drawn}```\n"


def in_another_module(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """``:func:`all_gather``` from a page of meshcomm.parallel leads to meshcomm's, and the other way round."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    for module in MODULES:
        target = f"{module}.{node['reftarget'].lstrip('.')}"
        if target in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)
    return None


def titles_beside(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """The tree beside a page shows titles, and is made of them alone: not of all headings of all pages for each."""
    made = context["toctree"]

    def toctree(**how: Any) -> str:
        with mock.patch.object(app.env, "tocs", titles_of(app.env)):
            return str(made(**how))

    context["toctree"] = toctree


@functools.cache
def titles_of(env: BuildEnvironment) -> dict[str, nodes.bullet_list]:
    """Each page's contents, cut to its title and the pages under it."""
    cut = {page: toc.deepcopy() for page, toc in env.tocs.items()}
    for toc in cut.values():
        for entry in toc.children:
            if len(entry) > 1:
                entry[1][:] = list(entry.findall(toctree_node))
    return cut


def setup(app: Sphinx) -> dict[str, Any]:
    """What sphinx calls first."""
    app.connect("builder-inited", write_api)
    app.connect("builder-inited", without_overloads)
    app.connect("autodoc-process-docstring", as_fields)
    app.connect("source-read", read)
    app.connect("missing-reference", in_another_module)
    app.connect("html-page-context", titles_beside, priority=400)  # before furo asks for the tree
    return {"version": mc.__version__, "parallel_read_safe": True, "parallel_write_safe": True}
