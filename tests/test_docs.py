"""The programs of README and docs run as they stand, and every public function says all that a reader needs, in one order."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import meshcomm as mc
from meshcomm.collectives.rule import _rules
from meshcomm.runtime.ops import operations

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

# ------------------------------------------------------------------------------------------------- README and docs/*.md


class Fence(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    line: int
    """Where it begins."""
    text: str


def fences(page: Path) -> list[Fence]:
    found: list[tuple[str, int, list[str]]] = []
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                found.append((line.strip().strip("`").split(" ")[0], number + 1, []))
        elif inside:
            found[-1][2].append(line)
    assert not inside, f"a fence of {page.name} is not closed"
    return [Fence(page, language, line, textwrap.dedent("\n".join(lines)) + "\n") for language, line, lines in found]


def with_it(difference: Fence, sign: str = "+") -> Fence:
    """The program that a ``diff`` ends in; with "-" the one it begins with."""
    taken = [line[1:] if line[:1] in (sign, " ") else "" for line in difference.text.splitlines()]
    return difference._replace(text="\n".join(taken) + "\n")


FENCES = [fence for page in PAGES for fence in fences(page)]
DIFFERENCES = [fence for fence in FENCES if fence.language == "diff"]
PROGRAMS = [fence for fence in FENCES if fence.language in ("python", "py", "pycon")] + [
    with_it(each) for each in DIFFERENCES
]


def test_the_readme_is_one_screen_for_each_kind_of_reader() -> None:
    assert len(README.read_text().splitlines()) <= 175
    headings = re.findall(r"^## (.*)$", README.read_text(), re.MULTILINE)
    assert headings[2] == "One call for a model"
    assert [each for each in headings if each.startswith("I ")] == [
        "I use DDP or FSDP", "I know JAX", "I use Megatron", "I come from MPI",
    ]  # fmt: skip


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = re.findall(r"\]\((docs/[\w-]+\.md)", README.read_text())
    assert set(linked) == {f"docs/{page.name}" for page in PAGES if page != README and page.stem != "index"}


def test_what_a_difference_begins_with_is_a_program_of_torch_alone(tmp_path: Path) -> None:
    """Under torchrun's environment, one rank on gloo."""
    assert DIFFERENCES
    for difference in DIFFERENCES:
        program = with_it(difference, "-")
        assert "meshcomm" not in program.text
        environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        done = subprocess.run(
            [sys.executable, "-c", program.text],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not done.returncode, done.stderr


def test_the_readme_has_code_within_its_first_60_words() -> None:
    before = README.read_text().split("```", 1)[0]
    assert PROGRAMS
    assert len(re.findall(r"\w+", re.sub(r"[#*`|]", " ", before))) <= 60


def test_the_readme_begins_with_a_shard_map_and_no_pvary() -> None:
    first = next(fence.text for fence in PROGRAMS if fence.page == README)
    assert 'in_specs=("(dp b) d", "d (tp f)", "(tp f) d")' in first
    assert "pvary" not in first
    assert "check_vma" not in first


def test_no_python_stands_in_another_fence() -> None:
    """It would not be run."""
    others = [fence.text for fence in FENCES if fence not in PROGRAMS and fence not in DIFFERENCES]
    assert not [block for block in others if re.search(r"^\s*(import|from) \w|\bmc\.\w+\(|>>>", block, re.MULTILINE)]


def leads_nowhere(page: Path, target: str, heading: str) -> bool:
    there = (page.parent / target) if target else page
    if not there.exists() or not heading:
        return not there.exists()
    titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
    return heading[1:] not in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_links_lead_somewhere() -> None:
    """Those to files beside the page, and to headings."""
    links = [(page, *found) for page in PAGES for found in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text())]
    assert links
    assert not [
        f"{page.name}: {target}{heading}" for page, target, heading in links if leads_nowhere(page, target, heading)
    ]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fence", PROGRAMS, ids=lambda fence: f"{fence.page.name}-line-{fence.line}")
def test_program(
    fence: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a namespace of its own, in an empty folder; it prints what the comments under its ``print``s promise."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    page, line, block = fence.page, fence.line, fence.text
    if fence.language == "pycon" or block.lstrip().startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(block, namespace, f"{page.name}:{line}", str(page), line - 1)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(example, out=report.append)
        assert not runner.failures, "".join(report)
        assert runner.tries
    else:
        # Blank lines in front make the lines of a traceback those of the page.
        exec(compile("\n" * (line - 1) + block, str(page), "exec", dont_inherit=True), namespace)
        promised = [
            text[2:]
            for comments in re.findall(r"^ *print\(.*\n((?:# .*\n)*)", block, re.MULTILINE)
            for text in comments.splitlines()
        ]
        assert capsys.readouterr().out.splitlines() == promised
        assert promised or page == README


def test_the_rule_stands_in_these_words() -> None:
    words = " ".join(re.sub(r"[*_>`]", "", (ROOT / "docs" / "types.md").read_text()).split())
    rule = (
        "What is replicated goes through pvary before it meets anything that differs between ranks: sharded data, a rank index, "
        "per-rank randomness, a collective that takes V. Reduce each loss exactly once over each axis along which it varies, and "
        "over no other. Never touch the gradients afterwards."
    )
    assert rule in words


# -------------------------------------------------------------------------------------------------------- docstrings

LABELS = ["Type", "Args", "Returns", "Backward", "Cost", "Raises", "Example"]
operations()  # imports all
COLLECTIVES = sorted({rule.op.name for rule in _rules.values()})
ONE_RANK = ["reduce", "gather", "scatter", "send", "recv", "exchange"]
# What a label would be about does not exist there.
LACKING: dict[str, set[str]] = {
    "send": {"Returns"},
    "send_object": {"Returns"},
    "axis_index": set(),
    "axis_size": {"Type", "Backward"},
    "barrier": {"Type", "Returns", "Backward"},
    "make_mesh": {"Type", "Backward"},
    "launch": {"Type", "Backward", "Cost"},
    "init": {"Type", "Backward"},
    "dry_run": {"Type", "Backward"},
    "hardware": {"Type", "Backward"},
    "sweep": {"Type", "Backward"},
    "is_dry": {"Type", "Args", "Backward", "Raises"},
    "trace": {"Type", "Args", "Backward"},
    "dump_collectives": {"Type", "Backward"},
    "shutdown": {"Type", "Args", "Returns", "Backward", "Cost", "Raises"},
    "wait": {"Type", "Backward", "Cost"},
    "plan": {"Type", "Backward"},
    "check_vma": {"Backward"},
    "mark_varying": {"Backward"},
    "varying_axes": {"Backward"},
    "assert_varying": {"Returns", "Backward"},
    "assert_invariant": {"Returns", "Backward"},
    "current_mesh": {"Type", "Args", "Returns", "Backward", "Cost", "Raises"},
    "is_main": {"Type", "Backward"},
    "main_only": {"Type", "Backward"},
    "verify_training": {"Type", "Backward"},
    "verify": {"Type", "Backward"},
    "prove_no_hang": {"Type", "Backward"},
}
LACKING |= {
    name: {"Type", "Args", "Backward"}
    for name in (
        "backend", "device", "get_dist_info", "is_distributed", "local_rank", "local_world_size", "node_rank", "rank",
        "world_size",
    )
}  # fmt: skip
FUNCTIONS = [name for name in mc.__all__ if inspect.isfunction(getattr(mc, name))]


def sections(doc: str) -> list[str]:
    """The labels that begin a line of the docstring's own level."""
    return [label for label in re.findall(r"^(\w+):", inspect.cleandoc(doc), re.MULTILINE) if label in LABELS]


def test_docstrings_have_their_labels_in_order() -> None:
    found = {name: sections(getattr(mc, name).__doc__ or "") for name in FUNCTIONS}
    assert found == {name: [each for each in LABELS if each not in LACKING.get(name, set())] for name in FUNCTIONS}


def test_every_collective_is_held_to_all_labels() -> None:
    """The table of exceptions does not grow over the collectives."""
    assert not set(COLLECTIVES) & set(LACKING)
    assert set(LACKING) <= set(FUNCTIONS), set(LACKING) - set(FUNCTIONS)
    assert set(COLLECTIVES) | set(ONE_RANK) <= set(FUNCTIONS)


def arguments(name: str) -> list[str]:
    """Those that the docstring names."""
    doc = inspect.cleandoc(getattr(mc, name).__doc__)
    args = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    documented = re.findall(r"^    (\w+(?:, \w+)*):", args.group(1), re.MULTILINE) if args else []
    return [part for entry in documented for part in entry.split(", ")]


def test_docstrings_name_every_argument() -> None:
    found = {name: arguments(name) for name in FUNCTIONS}
    assert found == {name: list(inspect.signature(getattr(mc, name)).parameters) for name in FUNCTIONS}


def test_prose_stands_before_the_first_list() -> None:
    """A sentence at the docstring's own level would be read, on the site, as more of the list above it."""

    def after_a_list(name: str) -> list[str]:
        doc = inspect.cleandoc(getattr(mc, name).__doc__)
        lists = re.findall(r"^(?:Args|Raises):\n(.*?)(?=^(?:\w+):|\Z)", doc, re.MULTILINE | re.DOTALL)
        return [line for each in lists for line in each.splitlines() if re.match(r"\S", line)]

    assert {name: after_a_list(name) for name in FUNCTIONS if after_a_list(name)} == {}


def test_docstrings_have_a_picture_of_the_ranks() -> None:
    picture = r"rank 0 .*->|->.*\n.*rank 0|rank 0 .*\n.*rank 1 .*->"
    drawn = [*COLLECTIVES, "reduce", "gather", "scatter"]
    assert not [name for name in drawn if not re.search(picture, getattr(mc, name).__doc__)]


def test_classes_and_their_members_are_documented() -> None:
    members = [
        (f"{name}.{member}", getattr(kind, member))
        for name, kind in vars(mc).items()
        if inspect.isclass(kind) and name in mc.__all__
        for member, value in vars(kind).items()
        if not member.startswith("_") and (callable(value) or isinstance(value, (property, staticmethod, classmethod)))
    ]
    assert len(members) > 10
    assert not [name for name, member in members if not inspect.getdoc(member)]
    assert not [name for name in mc.__all__ if inspect.isclass(getattr(mc, name)) and not getattr(mc, name).__doc__]


def test_examples_are_run() -> None:
    """pytest collects the docstrings of the package: each function's example is a doctest, or points to one."""
    parser = doctest.DocTestParser()
    for name in FUNCTIONS:
        doc = getattr(mc, name).__doc__
        example = doc.split("Example:")[1] if "Example:" in doc else ""
        assert parser.get_examples(doc) or re.search(r"see :func:`\w+`", example), name
