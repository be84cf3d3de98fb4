"""Pictures: what they say is held against what each rank really has; SVG is well formed; files have the form they end in."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import meshcomm as mc
from meshcomm.pictures.grid import MOST
from meshcomm.pictures.timeline import Bar, timeline

LAYOUTS = [
    ("(a x) (b y)", (4, 6), {"a": 2, "b": 2}),
    ("(b x) (a y)", (4, 6), {"a": 2, "b": 2}),
    ("(a b x) y", (8, 3), {"a": 2, "b": 2}),
    ("(b a x) y", (8, 3), {"a": 2, "b": 2}),
    ("x (b y)", (4, 6), {"a": 3, "b": 2}),
    ("(b x) y", (4, 6), {"a": 3, "b": 2}),
    ("(a x)", (6,), {"a": 3}),
    ("x y", (4, 6), {"a": 2, "b": 2}),
    ("x (a y) z (b w)", (2, 4, 3, 2), {"a": 2, "b": 2}),
    ("(a x) (b y) (c z)", (4, 4, 4), {"a": 2, "b": 2, "c": 2}),
    ("... (a x)", (2, 3, 4), {"a": 2}),
    ("", (), {"a": 2}),
]


def words(svg: str) -> list[str]:
    """The letters of a drawing, which must be well formed for that."""
    return [each.text or "" for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def boxes(text: str) -> list[tuple[set[str], set[int]]]:
    """Of a layout's picture each part: its slices, and its ranks."""
    found: list[tuple[set[str], set[int]]] = []
    for grid in text.split("\n\n"):
        title, *lines = grid.splitlines()
        fixed = set(re.findall(r"\w+ \d+:\d+", title.rsplit("[", 1)[1])) if title.endswith("]") else set()
        columns: list[str] = []
        for line in lines:
            cells = re.findall(r"\w+ \d+:\d+|ranks? [\d ]*\d", line)
            ranks = [cell for cell in cells if cell.startswith("rank")]
            if not ranks:
                columns = cells
                continue
            row = {cell for cell in cells if not cell.startswith("rank")}
            for at, each in enumerate(ranks):
                found.append((fixed | row | ({columns[at]} if columns else set()), set(map(int, each.split()[1:]))))
    return found


@pytest.mark.parametrize(("layout", "shape", "sizes"), LAYOUTS)
def test_each_part_is_drawn_where_its_ranks_have_it(layout: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Against reshard: rank by rank what it really has of the numbers 0, 1, 2, ..."""
    mesh = mc.make_mesh(sizes)
    whole = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    names = [each.strip("()").split()[-1] for each in re.findall(r"\([^)]*\)|\S+", layout)]
    plain = " ".join(names)

    def main() -> torch.Tensor:
        return mc.reshard(whole, f"{plain} -> {layout}", mesh=mesh)

    parts = mc.launch(main, ranks=mesh.size)
    picture = mc.show(layout, shape, mesh)
    seen: set[int] = set()
    for slices, ranks in boxes(str(picture)):
        part = whole
        for each in slices:
            name, places = each.split(" ")
            first, last = map(int, places.split(":"))
            part = part.narrow(names.index(name) - len(names), first, last - first)
        for rank in ranks:
            assert torch.equal(parts[rank], part), (rank, slices)
        seen |= ranks
    assert seen == set(range(mesh.size))
    assert {each for each in words(picture.svg) if each.startswith("rank")} == set(
        re.findall(r"ranks? \d+(?: \d+)*", "\n".join(str(picture).splitlines()[1:]))
    )


def test_a_mesh_has_each_rank_at_its_place() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 3, "c": 2})
    text = str(mc.show(mesh))
    second = text.split("[a=1]")[1]
    row = next(line for line in second.splitlines() if "b=2" in line)
    assert row.split() == ["b=2", "10", "11"]
    assert [each for each in words(mesh._repr_html_()) if each.isdigit()] == [str(rank) for rank in range(12)]


def test_a_mesh_of_some_ranks_shows_these() -> None:
    def main() -> str:
        return str(mc.show(mc.make_mesh({"a": 2}, ranks=[3, 1])))

    assert mc.launch(main, ranks=4)[0].splitlines()[-1].split() == ["3", "1"]


def test_many_ranks_are_not_all_drawn() -> None:
    text = str(mc.show(mc.make_mesh({"a": 1000})))
    assert len(text.splitlines()[-1].split()) == MOST
    assert text.split()[-1] == "999"
    assert str(mc.show("x y", (2, 3), mc.make_mesh({"a": 1000}))).splitlines()[1].strip() == "all ranks"
    assert len(mc.show("(a x) y", (2000, 3), mc.make_mesh({"a": 1000})).svg) < 20_000


def test_a_plan_has_a_picture_of_each_step() -> None:
    plan = mc.plan("(a x) (b y) -> x y", (4, 8), mc.make_mesh({"a": 2, "b": 2}))
    text = str(mc.show(plan))
    assert len(re.findall(r"^\(a x\) \(b y\)$|^x \(b y\)$|^x y$", text, re.MULTILINE)) == 1 + len(plan.steps)
    assert [int(each) for each in re.findall(r"(\d+) bytes sent", text)] == [
        step.elements * plan.itemsize for step in plan.steps
    ]
    assert str(mc.show("(a x) (b y) -> x y", (4, 8), mc.make_mesh({"a": 2, "b": 2}))) == text
    assert len(words(plan._repr_html_())) > 10


def test_a_trace_has_a_lane_per_rank_and_axis() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        mc.all_reduce(torch.ones(4), "a", mesh=mesh)
        mc.all_gather(torch.ones(4), "b", mesh=mesh)

    with mc.trace() as t:
        mc.launch(main, ranks=4)
    text = str(mc.show(t))
    assert [line.split("  |")[0] for line in text.splitlines()[:8]] == [f"rank {r} {a}" for r in range(4) for a in "ab"]
    assert all("a" in line.split("|")[1] for line in text.splitlines()[0:8:2])
    assert text.splitlines()[-1] == "a all_reduce, b all_gather"
    assert {"all_reduce", "all_gather", "rank 3 b"} <= set(words(t._repr_html_()))


def test_an_empty_trace_is_drawn_too() -> None:
    with mc.trace() as t:
        pass
    assert str(mc.show(t)) == "nothing was communicated"
    ET.fromstring(mc.show(t).svg)


def test_files_have_the_form_that_they_end_in(tmp_path: Path) -> None:
    picture = mc.show("(a x)", (4,), mc.make_mesh({"a": 2}))
    for ending, begins in ((".svg", "<svg "), (".html", "<!doctype html>"), (".txt", str(picture))):
        picture.save(tmp_path / f"p{ending}")
        assert (tmp_path / f"p{ending}").read_text().startswith(begins)
    for wrong in (tmp_path / "p.png", 7):
        with pytest.raises(mc.MeshError, match=r"svg, .html or .txt|says the form"):
            picture.save(wrong)  # type: ignore[arg-type]


def test_letters_of_the_user_cannot_leave_their_place() -> None:
    drawn = timeline([Bar("<b>", "<script>", 0.0, 1.0, "a & b")], 1.0, "<title>").svg
    assert "<script>" not in drawn
    ET.fromstring(drawn)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda mesh: mc.show("(a x)", None, mesh), "needs a shape"),
        (lambda mesh: mc.show("(a x)", (3,), mesh), "not divisible"),
        (lambda mesh: mc.show("(b x)", (4,), mesh), "not an axis"),
        (lambda mesh: mc.show("(a x)", (4, 4), mesh), "1 dim"),
        (lambda mesh: mc.show(7, (4,), mesh), "no picture of a int"),
        (lambda mesh: mc.show("(a x)", (4,)), "no mesh"),
        (lambda mesh: mc.show("(a x) -> y", (4,), mesh), "other dims"),
    ],
)
def test_wrong_calls(call: object, text: str) -> None:
    with pytest.raises(mc.MeshError, match=text):
        call(mc.make_mesh({"a": 2}))  # type: ignore[operator]
