"""The notation of layouts: what is read, what is refused and where the caret stands, and what other notations make of it."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import einops
import pytest
import torch
from einops.parsing import ParsedExpression
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import meshcomm as mc
from meshcomm.layout.notation import Dim, Layout, expand, parse, parse_arrow, pointed
from meshcomm.layout.shapes import cut, fit
from meshcomm.runtime.start.workers import WorkerPool

MESH = {"dp": 2, "fsdp": 3, "tp": 4}


def mesh_of(**shape: int) -> mc.Mesh:
    return mc.make_mesh(shape)


def split(marked: str) -> tuple[str, int]:
    """``"b |_c"`` is the string ``"b _c"`` and the place 2."""
    assert marked.count("|") == 1
    return marked.replace("|", ""), marked.index("|")


def place_of(error: pytest.ExceptionInfo[mc.MeshError], text: str) -> int:
    """Where the caret stands under ``text``, which the error repeats."""
    lines = str(error.value).splitlines()
    at = lines.index(f"    {text}")
    found = re.fullmatch(r"    ( *)\^", lines[at + 1])
    assert found, lines[at + 1]
    return len(found[1])


# ------------------------------------------------------------------------------------------------------------ right

RIGHT = [
    ("", []),
    ("   ", []),
    ("b", [("b",)]),
    ("b s d", [("b",), ("s",), ("d",)]),
    ("(dp b) s (tp d)", [("dp", "b"), ("s",), ("tp", "d")]),
    ("(dp fsdp b) s", [("dp", "fsdp", "b"), ("s",)]),
    ("(tp dp b) s", [("tp", "dp", "b"), ("s",)]),
    ("  (  dp   b )s( tp d)  ", [("dp", "b"), ("s",), ("tp", "d")]),
    ("(dp b)(tp d)", [("dp", "b"), ("tp", "d")]),
    ("(b)", [("b",)]),
    ("1", [("1",)]),
    ("1 (tp d) 1", [("1",), ("tp", "d"), ("1",)]),
    ("...", [("...",)]),
    ("... (tp d)", [("...",), ("tp", "d")]),
    ("(dp b) ... d", [("dp", "b"), ("...",), ("d",)]),
    ("...(tp d)", [("...",), ("tp", "d")]),
    ("d0 d1 in_features h2o", [("d0",), ("d1",), ("in_features",), ("h2o",)]),
    ("β (tp δ)", [("β",), ("tp", "δ")]),
    ("for (tp in)", [("for",), ("tp", "in")]),
    ("axis", [("axis",)]),
    ("DP Tp", [("DP",), ("Tp",)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), RIGHT)
def test_what_is_read(text: str, parts: list[tuple[str, ...]]) -> None:
    expected = tuple(Dim(name, tuple(axes)) for *axes, name in parts)
    layout = parse("test", text, MESH)
    assert tuple(layout) == expected
    assert layout.names == tuple(dim.name for dim in expected)
    assert layout.axes == tuple(axis for dim in expected for axis in dim.axes)
    assert layout.parts(MESH) == tuple(math.prod(MESH[axis] for axis in dim.axes) for dim in expected)
    assert parse("test", str(layout), MESH) == layout


@pytest.mark.parametrize(("text", "parts"), RIGHT)
def test_each_dim_knows_its_place(text: str, parts: list[tuple[str, ...]]) -> None:
    layout = parse("test", text, MESH)
    assert len(layout.at) == len(parts)
    assert [text[at : at + len(name)] for at, (*_, name) in zip(layout.at, parts, strict=True)] == list(layout.names)
    assert sorted(set(layout.at)) == list(layout.at)


@pytest.mark.filterwarnings("ignore:It is discouraged")
@pytest.mark.parametrize("text", [text for text, _ in RIGHT])
def test_einops_composes_the_same(text: str) -> None:
    mine = [[*dim.axes, dim.name] for dim in parse("test", text, MESH)]
    composition = ParsedExpression(text).composition
    assert [["..."] if part == "…" else list(part) or ["1"] for part in composition] == mine


def test_warnings_of_einops_are_kept_from_the_user() -> None:
    """Warnings are errors in these tests; that einops has some to give shows that there is something to keep."""
    with pytest.warns(RuntimeWarning, match="keywords"):
        ParsedExpression("lambda")
    assert parse("test", "lambda", MESH).names == ("lambda",)


def test_all_layouts_of_two_dims_are_einops_patterns() -> None:
    """Every way to cut two dims over up to three axes, in every order."""
    seen = set()
    for count in range(4):
        for axes in itertools.permutations(MESH, count):
            for split_at in range(count + 1):
                text = f"({' '.join((*axes[:split_at], 'b'))}) ({' '.join((*axes[split_at:], 'd'))})"
                layout = parse("test", text, MESH)
                assert layout == (Dim("b", axes[:split_at]), Dim("d", axes[split_at:]))
                assert [list(part) for part in ParsedExpression(text).composition] == [
                    [*dim.axes, dim.name] for dim in layout
                ]
                seen.add(layout)
    assert len(seen) == 1 + 3 * 2 + 6 * 3 + 6 * 4


@pytest.mark.parametrize(
    ("text", "inputs", "output"),
    [
        ("b -> b", ["b"], "b"),
        ("->", [""], ""),
        ("b (tp s) h->b s (tp h)", ["b (tp s) h"], "b s (tp h)"),
        ("b d, d (tp f) -> b (tp f)", ["b d", "d (tp f)"], "b (tp f)"),
        ("b d, , d -> ", ["b d", "", "d"], ""),
        ("... d, d -> ...", ["... d", "d"], "..."),
        ("b b2, b -> b", ["b b2", "b"], "b"),
    ],
)
def test_what_is_read_with_an_arrow(text: str, inputs: list[str], output: str) -> None:
    pattern = parse_arrow("test", text, MESH)
    assert pattern == parse_arrow("test", text, MESH, len(inputs))
    assert [str(layout) for layout in pattern.inputs] == inputs
    assert str(pattern.output) == output
    assert pattern.text == text
    for layout in (*pattern.inputs, pattern.output):
        assert [text[at : at + len(name)] for at, name in zip(layout.at, layout.names, strict=True)] == list(
            layout.names
        )


def test_the_axes_spoken_of_are_those_of_all_layouts() -> None:
    assert parse_arrow("test", "b (tp s), (dp c) -> (tp b) c", MESH).spoken == ("tp", "dp")
    assert parse_arrow("test", "b -> b", MESH).spoken == ()


def test_an_ellipsis_is_expanded_from_the_last() -> None:
    layout = parse("test", "(dp b) ... d", MESH)
    assert expand(layout, 2).names == ("b", "...2", "...1", "d")
    assert expand(layout, 2).at == (4, 7, 7, 11)
    assert expand(layout, 0) == (Dim("b", ("dp",)), Dim("d"))
    assert expand(Layout([Dim("b")]), 3) == (Dim("b"),)


# ------------------------------------------------------------------------------------------------------------ wrong

PARENTHESES, AXIS, CLOSED, OPEN = "inside parentheses", "stands as a dim", "closed that was not", "is not closed"
UNKNOWN, LAST, NUMBER, UNDERSCORE = "not an axis of the mesh", "last name in parentheses", "only number", "underscore"

WRONG = [
    # parentheses
    ("(dp |(tp d))", PARENTHESES),
    ("|(b", OPEN),
    ("s |(dp b", OPEN),
    ("s |(", OPEN),
    ("(dp b) |(tp", OPEN),
    ("b|)", CLOSED),
    ("|)b(", CLOSED),
    ("(dp b)|) s", CLOSED),
    ("|()", "nothing in them"),
    ("b |(  ) s", "nothing in them"),
    # axes and dims
    ("b s |tp", AXIS),
    ("|dp b", AXIS),
    ("|dp", AXIS),
    ("b (|s d)", UNKNOWN),
    ("(|xp b)", UNKNOWN),
    ("(dp |xp b)", UNKNOWN),
    ("(|b dp)", UNKNOWN),
    ("(|DP b)", UNKNOWN),
    ("(|1 b)", UNKNOWN),
    ("(dp |1 b)", UNKNOWN),
    ("(|... b)", UNKNOWN),
    ("(|tp)", LAST),
    ("b (dp |tp)", LAST),
    ("(dp b) (tp |dp)", "mesh axis 'dp' stands twice"),
    ("(dp |dp b)", "mesh axis 'dp' stands twice"),
    ("(dp b) (|dp d)", "mesh axis 'dp' stands twice"),
    ("b s |b", "dim 'b' stands twice"),
    ("(dp b) (tp |b)", "dim 'b' stands twice"),
    ("(dp |...)", "cannot be cut"),
    ("(|1)", "cannot be cut"),
    ("(dp |1)", "cannot be cut"),
    # ellipses
    ("... b |...", "an ellipsis stands twice"),
    ("...|...", "an ellipsis stands twice"),
    ("b|...", "an ellipsis stands by itself"),
    ("...|b", "an ellipsis stands by itself"),
    ("b |.. s", "'.' means nothing"),
    ("...|. b", "'.' means nothing"),
    ("b |… s", "'…' means nothing"),
    # names and numbers
    ("|2", NUMBER),
    ("b |0 s", NUMBER),
    ("|16 b", NUMBER),
    ("(dp |2)", NUMBER),
    ("|01", NUMBER),
    ("b |- 1", "'-' means nothing"),
    ("b |2d", "'2d' is not a name"),
    ("|b² s", "'b²' is not a name"),
    ("|_", UNDERSCORE),
    ("b |_s", UNDERSCORE),
    ("b |s_ d", UNDERSCORE),
    ("(dp |_b)", UNDERSCORE),
    ("(|_dp b)", UNDERSCORE),
    # other characters
    ("b|, s", "a comma stands between"),
    ("b s |-> b", "an arrow leads from"),
    ("b|-s", "'-' means nothing"),
    ("b |* s", "'*' means nothing"),
    ("b |[s]", "'[' means nothing"),
    ("b|=s", "'=' means nothing"),
    ("b |'s'", '"\'" means nothing'),
    ("b |→ s", "'→' means nothing"),
    ("b|.s", "'.' means nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "what"), WRONG)
def test_what_is_wrong_is_pointed_at(marked: str, what: str) -> None:
    text, at = split(marked)
    with pytest.raises(mc.MeshError) as error:
        parse("reshard", text, MESH)
    message = str(error.value)
    assert what in message.splitlines()[0]
    assert message.startswith("meshcomm.reshard: ")
    assert place_of(error, text) == at
    assert f"\n  got: mesh {MESH}" in message
    assert re.search(r"\n  fix: \S", message)


WRONG_ARROWS = [
    ("b s|", 1, "there is no arrow"),
    ("|", 1, "there is no arrow"),
    ("b |=> b", 1, "there is no arrow"),
    ("b |→ b", 1, "there is no arrow"),
    ("b |- > b", 1, "there is no arrow"),
    ("b |> b", 1, "there is no arrow"),
    ("b -> s |-> b", 1, "2 arrows"),
    ("b ->|-> s", 1, "2 arrows"),
    ("b |--> s", 1, "'-' means nothing"),
    ("b ->|> s", 1, "'>' means nothing"),
    ("b|, d -> b d", 1, "2 layouts for 1 tensor."),
    ("b, d|, -> b d", 2, "3 layouts for 2 tensors"),
    ("b,|, d -> b d", 2, "3 layouts for 2 tensors"),
    ("b |-> b", 2, "1 layout for 2 tensors"),
    ("b, d -> b|, d", 2, "there is one result"),
    ("b, d -> b d|,", None, "there is one result"),
    ("b (|xp s) -> b s", 1, UNKNOWN),
    ("b s -> b (|xp s)", 1, UNKNOWN),
    ("b s, s |tp -> b", 2, AXIS),
    ("b, |(d -> b", 2, OPEN),
    ("|(b -> b)", 1, OPEN),
    ("b -> s |s", 1, "dim 's' stands twice"),
    ("b, d |d -> b", 2, "dim 'd' stands twice"),
    ("b -> (dp b) (|dp s)", 1, "mesh axis 'dp' stands twice"),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "inputs", "what"), WRONG_ARROWS)
def test_what_is_wrong_with_an_arrow_is_pointed_at(marked: str, inputs: int | None, what: str) -> None:
    text, at = split(marked)
    with pytest.raises(mc.MeshError) as error:
        parse_arrow("einsum", text, MESH, inputs)
    assert what in str(error.value).splitlines()[0]
    assert place_of(error, text) == at
    assert f"\n  got: mesh {MESH}" in str(error.value)
    assert re.search(r"\n  fix: \S", str(error.value))


def test_the_table_is_long_enough() -> None:
    texts = [marked for marked, _ in WRONG] + [marked for marked, _, _ in WRONG_ARROWS]
    assert len(set(texts)) == len(texts) >= 40


def test_one_string_can_be_right_on_one_mesh_and_wrong_on_another() -> None:
    assert parse("test", "(tp d)", {"tp": 2}).axes == ("tp",)
    with pytest.raises(mc.MeshError, match="'tp' is not an axis of the mesh") as error:
        parse("test", "(tp d)", {"dp": 2})
    assert place_of(error, "(tp d)") == 1
    assert "one of 'dp'" in str(error.value)


def test_wide_and_combining_characters_move_the_caret_by_what_they_take() -> None:
    with pytest.raises(mc.MeshError) as error:
        parse("test", "語言 s s", MESH)
    assert place_of(error, "語言 s s") == 7
    with pytest.raises(mc.MeshError) as error:
        parse("test", "e\u0301 s", MESH)
    assert place_of(error, "e\u0301 s") == 1
    assert pointed("what", "e\u0301 s", 3).endswith("\n      ^")


@pytest.mark.parametrize(("text", "shown", "at"), [("b\ts", "b s", 1), ("b\n", "b ", 1), ("b\u00a0s", "b s", 1)])
def test_other_spaces_are_refused_and_do_not_break_the_picture(text: str, shown: str, at: int) -> None:
    with pytest.raises(mc.MeshError, match="parted by spaces, not by") as error:
        parse("test", text, MESH)
    assert repr(text[at]) in str(error.value)
    assert place_of(error, shown) == at


@pytest.mark.parametrize("text", [None, 3, b"b s", ("b", "s"), ["b"], torch.ones(2)])
def test_what_is_no_string(text: object) -> None:
    for read in (parse, parse_arrow):
        with pytest.raises(mc.MeshError, match=f"a layout is a string, not {type(text).__name__}.") as error:
            read("test", text, MESH)
        assert f"got: mesh {MESH}" in str(error.value)


# ------------------------------------------------------------------------------------------------------------ shapes

SHAPES = [
    ({"tp": 1}, "(tp d)", (3,), (3,)),
    ({"tp": 4}, "", (), ()),
    ({"tp": 4}, "b (tp d)", (3, 8), (3, 2)),
    ({"dp": 2, "tp": 2}, "(dp b) s (tp d)", (4, 5, 6), (2, 5, 3)),
    ({"dp": 2, "fsdp": 3, "tp": 4}, "(dp fsdp b) (tp d)", (12, 4), (2, 1)),
    ({"dp": 2, "fsdp": 3, "tp": 4}, "(tp dp fsdp b)", (24,), (1,)),
    ({"dp": 2, "tp": 2}, "(dp b) ... (tp d)", (4, 5, 7, 6), (2, 5, 7, 3)),
    ({"dp": 2, "tp": 2}, "(dp b) ... (tp d)", (4, 6), (2, 3)),
    ({"dp": 2, "tp": 2}, "1 (dp b) 1", (1, 2, 1), (1, 1, 1)),
    ({"dp": 2, "tp": 2}, "(dp b) d", (0, 3), (0, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layout", "whole", "mine"), SHAPES)
def test_shapes_there_and_back(
    shape: dict[str, int], layout: str, whole: tuple[int, ...], mine: tuple[int, ...]
) -> None:
    mesh = mc.make_mesh(shape)
    assert mc.local_shape(layout, whole, mesh) == mine
    assert mc.global_shape(layout, mine, mesh) == whole
    assert mc.local_shape(layout, torch.empty(whole), mesh) == mine
    with mc.use_mesh(mesh):
        assert mc.local_shape(layout, list(whole)) == mine
        assert mc.global_shape(layout, torch.Size(mine)) == whole


WRONG_SHAPES = [
    ("(dp b) (tp |d)", (4, 5), "dim 'd' of length 5 is not divisible by tp=4", "pad it to 8"),
    ("(dp fsdp |b) s", (4, 5), "dim 'b' of length 4 is not divisible by dp=2 * fsdp=3", "pad it to 6"),
    ("b s |d", (4, 5), "has 3 dims, the tensor 2", "name no more dims"),
    ("b |s d", (4,), "has 3 dims, the tensor 1", "name no more dims"),
    ("|b", (), "has 1 dim, the tensor 0", "name no more dims"),
    ("b |s", (4, 5, 6), "has 2 dims, the tensor 3", "name every dim"),
    ("b ... |s", (4,), "has 2 dims or more, the tensor 1", "name no more dims"),
    ("b |1", (4, 5), "a dim called 1 has length 5", "give it a name"),
    ("... |1 b", (4, 5, 6), "a dim called 1 has length 5", "give it a name"),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "shape", "what", "fix"), WRONG_SHAPES)
def test_shapes_that_do_not_fit_are_pointed_at(marked: str, shape: tuple[int, ...], what: str, fix: str) -> None:
    text, at = split(marked)
    with pytest.raises(mc.MeshError) as error:
        mc.local_shape(text, shape, mc.make_mesh(MESH))
    message = str(error.value)
    assert what in message.splitlines()[0]
    assert place_of(error, text) == at
    assert f"shape {shape}; mesh {MESH}" in message
    assert f"\n  fix: {fix}" in message


@pytest.mark.parametrize("shape", [3, "ab", (2.0, 3), (2, -1), (True, 2), None])
def test_what_is_no_shape(shape: Any) -> None:
    for helper in (mc.local_shape, mc.global_shape):
        with pytest.raises(mc.MeshError, match="is not a shape"):
            helper("b s", shape, mc.make_mesh(MESH))


def test_a_layout_made_by_hand_is_refused_without_a_caret() -> None:
    with pytest.raises(mc.MeshError, match="has 1 dim, the tensor 2") as error:
        fit("test", Layout([Dim("b")]), (2, 3), MESH, "b")
    assert "^" not in str(error.value)
    with pytest.raises(mc.MeshError, match="not divisible by tp=4") as error:
        cut("test", Layout([Dim("d", ("tp",))]), (3,), MESH, "b -> ( tp  d)")
    assert place_of(error, "b -> ( tp  d)") == 11


def test_every_helper_wants_a_mesh() -> None:
    for call in (
        lambda mesh: mc.local_shape("b", (2,), mesh),
        lambda mesh: mc.global_shape("b", (2,), mesh),
        lambda mesh: mc.partition_spec("b", mesh),
        lambda mesh: mc.layout_of((None,), None, mesh),
        lambda mesh: mc.placements("b", mesh),
        lambda mesh: mc.layout_from((Replicate(),), None, mesh),
    ):
        with pytest.raises(mc.MeshError, match="there is no mesh"):
            call(None)
        with pytest.raises(mc.MeshError, match="mesh= is a dict"):
            call(MESH)


# ---------------------------------------------------------------------------------------------------- PartitionSpec

SPECS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("", "", ()),
    ("b s", "b s", (None, None)),
    ("(dp b) s (tp d)", "b s d", ("dp", None, "tp")),
    ("(dp fsdp b) s", "b s", (("dp", "fsdp"), None)),
    ("(tp dp b) (fsdp d)", "b d", (("tp", "dp"), "fsdp")),
    ("1 (tp d)", "1 d", (None, "tp")),
    ("(dp d0) d1", "d0 d1", ("dp", None)),
]


@pytest.mark.parametrize(("layout", "dims", "spec"), SPECS)
def test_partition_specs_there_and_back(layout: str, dims: str, spec: tuple[Any, ...]) -> None:
    mesh = mc.make_mesh(MESH)
    assert mc.partition_spec(layout, mesh) == spec
    assert mc.layout_of(spec, dims, mesh) == layout
    assert mc.partition_spec(mc.layout_of(spec, None, mesh), mesh) == spec


class Spec:
    """As JAX has it: with entries, and yet no tuple."""

    def __init__(self, *entries: Any) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self.entries


def test_partition_specs_that_say_the_same() -> None:
    mesh = mc.make_mesh(MESH)
    assert mc.layout_of((("dp",), None), mesh=mesh) == "(dp d0) d1"
    assert mc.layout_of([["dp", "tp"]], "b", mesh) == "(dp tp b)"
    assert mc.layout_of(((), "tp"), "b d", mesh) == "b (tp d)"
    assert mc.layout_of(("dp",), "b s d", mesh) == "(dp b) s d"
    assert mc.layout_of((), "b s d", mesh) == "b s d"
    assert mc.layout_of(Spec(("dp", "tp"), None), mesh=mesh) == "(dp tp d0) d1"


@pytest.mark.parametrize(
    ("spec", "dims", "what"),
    [
        ("dp", None, "a PartitionSpec is a tuple"),
        (None, None, "a PartitionSpec is a tuple"),
        ({"dp": 2}, None, "a PartitionSpec is a tuple"),
        ({"dp", "tp"}, None, "a PartitionSpec is a tuple"),
        (("xp",), None, "no axis 'xp' in the mesh"),
        ((2,), None, "no axis 2 in the mesh"),
        (((["dp"],),), None, r"no axis \['dp'\] in the mesh"),
        (("dp", "dp"), None, "the axis 'dp' stands twice"),
        ((("dp", "dp"),), None, "the axis 'dp' stands twice"),
        (("dp", None), "b", "1 name for 2 dims or more"),
        (("dp",), "", "0 names for 1 dim or more"),
        (("dp",), "(tp b)", "dims= names the dims"),
        (("dp",), "... b", "dims= names the dims"),
        (("dp",), "1", "a dim called 1 is cut over 'dp'"),
        (("dp",), "b b", "the dim 'b' stands twice"),
        (("dp",), 3, "a layout is a string, not int"),
    ],
)
def test_partition_specs_that_are_wrong(spec: Any, dims: Any, what: str) -> None:
    with pytest.raises(mc.MeshError, match=what):
        mc.layout_of(spec, dims, mc.make_mesh(MESH))


def test_an_ellipsis_has_no_partition_spec_and_no_placements() -> None:
    for helper in (mc.partition_spec, mc.placements):
        with pytest.raises(mc.MeshError, match="an ellipsis is any number of dims") as error:
            helper("(dp b) ... d", mc.make_mesh(MESH))
        assert place_of(error, "(dp b) ... d") == 7


def test_a_mesh_axis_called_as_a_dim_would_be() -> None:
    mesh = mc.make_mesh({"d0": 2})
    with pytest.raises(mc.MeshError, match="has the name that a dim would get"):
        mc.layout_of((None,), None, mesh)
    assert mc.layout_of(("d0",), "x", mesh) == "(d0 x)"


# ------------------------------------------------------------------------------------------------------- placements

PLACED: list[tuple[str, str, tuple[Placement, ...]]] = [
    ("", "", (Replicate(), Replicate(), Replicate())),
    ("b s", "b s", (Replicate(), Replicate(), Replicate())),
    ("(dp b) s (tp d)", "b s d", (Shard(0), Replicate(), Shard(2))),
    ("(tp b) (dp d)", "b d", (Shard(1), Replicate(), Shard(0))),
    ("b (dp fsdp tp d)", "b d", (Shard(1), Shard(1), Shard(1))),
    ("(dp tp b) (fsdp d)", "b d", (Shard(0), Shard(1), Shard(0))),
    ("1 (tp d)", "1 d", (Replicate(), Replicate(), Shard(1))),
]


@pytest.mark.parametrize(("layout", "dims", "placed"), PLACED)
def test_placements_there_and_back(layout: str, dims: str, placed: tuple[Placement, ...]) -> None:
    mesh = mc.make_mesh(MESH)
    found = mc.placements(layout, mesh)
    assert found == placed
    assert all(type(placement) in (Shard, Replicate) for placement in found)
    assert mc.layout_from(placed, dims, mesh) == layout
    ndim = len(dims.split())
    assert mc.placements(mc.layout_from(placed, ndim=ndim, mesh=mesh), mesh) == placed
    assert mc.layout_from(list(placed), dims, mesh, ndim) == layout


def test_dims_counted_from_the_last() -> None:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    assert mc.layout_from((Shard(0), Shard(-1)), "b s d", mesh) == "(dp b) s (tp d)"
    assert mc.layout_from((Shard(-2), Replicate()), mesh=mesh, ndim=2) == "(dp d0) d1"
    assert mc.layout_from((Shard(-2), Shard(0)), "b d", mesh) == "(dp tp b) d"


@pytest.mark.parametrize(("marked", "right"), [
    ("(|tp dp b)", "(dp tp b)"),
    ("s (dp |tp fsdp b)", "(dp fsdp tp b)"),
    ("(dp d) (|tp  fsdp b)", "(fsdp tp b)"),
])  # fmt: skip
def test_placements_know_the_order_of_the_mesh_only(marked: str, right: str) -> None:
    text, at = split(marked)
    with pytest.raises(mc.MeshError, match="over axes in the order of the mesh") as error:
        mc.placements(text, mc.make_mesh(MESH))
    assert place_of(error, text) == at
    assert f"fix: {right}" in str(error.value)
    assert f"got: mesh {MESH}" in str(error.value)


@pytest.mark.parametrize(
    ("placed", "dims", "ndim", "what"),
    [
        ("Shard(0)", None, None, "are no placements"),
        ((0, None), None, None, "are no placements"),
        (Shard(0), None, None, "are no placements"),
        ((Shard(0),), None, None, "1 placements for a mesh of 2 axes"),
        ((Shard(0),) * 3, None, None, "3 placements for a mesh of 2 axes"),
        ((Partial(), Shard(0)), None, None, "partial along 'dp'.*\n.*\n  fix: redistribute"),
        ((Shard(0), Partial("max")), None, None, "partial along 'tp'"),
        ((_StridedShard(0, split_factor=2), Shard(0)), None, None, "along 'dp' is neither Shard nor Replicate"),
        ((Shard(0), Shard(2)), "b d", None, "2 names for 3 dims or more"),
        ((Shard(0), Shard(0)), "b d", 3, "2 names for 3 dims"),
        ((Shard(0), Shard(0)), "b s d", 2, "3 names for 2 dims"),
        ((Shard(0), Shard(2)), None, 2, "'tp' cuts dim 2 of a tensor with 2 dims"),
        ((Shard(-3), Replicate()), "b d", None, "'dp' cuts dim -3 of a tensor with 2 dims"),
        ((Shard(-1), Replicate()), None, None, "counted from the last, of an unknown number"),
        ((Shard(0), Replicate()), "1 d", None, "a dim called 1 is cut over 'dp'"),
        ((Shard(0), Replicate()), None, -1, "ndim=-1 is not a number of dims"),
        ((Shard(0), Replicate()), "(tp b)", None, "dims= names the dims"),
    ],
)
def test_placements_that_no_layout_says(placed: Any, dims: Any, ndim: Any, what: str) -> None:
    with pytest.raises(mc.MeshError, match=what):
        mc.layout_from(placed, dims, mc.make_mesh({"dp": 2, "tp": 2}), ndim)


# ---------------------------------------------------------------------------------------------------------- DTensor


def part(x: Tensor, axes: Sequence[Sequence[str]], shape: dict[str, int], at: dict[str, int]) -> Tensor:
    """The oracle: cut each dim over its axes, one after the other, the major one first."""
    for dim, some in enumerate(axes):
        for axis in some:
            x = x.chunk(shape[axis], dim)[at[axis]]
    return x


CUTS: list[tuple[dict[str, int], str, list[list[str]]]] = [
    ({"dp": 2, "tp": 2}, "b d", [[], []]),
    ({"dp": 2, "tp": 2}, "(dp b) d", [["dp"], []]),
    ({"dp": 2, "tp": 2}, "b (dp d)", [[], ["dp"]]),
    ({"dp": 2, "tp": 2}, "(dp b) (tp d)", [["dp"], ["tp"]]),
    ({"dp": 2, "tp": 2}, "(tp b) (dp d)", [["tp"], ["dp"]]),
    ({"dp": 2, "tp": 2}, "(dp tp b) d", [["dp", "tp"], []]),
    ({"dp": 2, "tp": 2}, "b (dp tp d)", [[], ["dp", "tp"]]),
    ({"w": 4}, "(w b) d", [["w"], []]),
    ({"w": 4}, "b (w d)", [[], ["w"]]),
    ({"w": 4}, "b d", [[], []]),
]


def whole() -> Tensor:
    return torch.arange(8 * 12, dtype=torch.float64).view(8, 12)


def there_and_back(shape: dict[str, int], layout: str) -> tuple[Any, ...]:
    mesh = mc.make_mesh(shape)
    made = distribute_tensor(whole(), mesh.device_mesh, mc.placements(layout, mesh))
    mine, found = mc.from_dtensor(made, "b d", mesh)
    again = mc.to_dtensor(mine, layout, mesh)
    assert type(mine) is Tensor
    assert again.placements == made.placements
    assert again.shape == made.shape
    assert again.stride() == made.stride()
    assert again.device_mesh is mesh.device_mesh
    assert again.to_local().data_ptr() == mine.data_ptr() == made.to_local().data_ptr()
    assert tuple(mine.shape) == mc.local_shape(layout, whole(), mesh)
    return mesh.coordinate, made.to_local(), mine, found, again.full_tensor()


@pytest.mark.parametrize(("shape", "layout", "axes"), CUTS)
def test_dtensor_cuts_as_the_layout_says(
    pool4: WorkerPool, shape: dict[str, int], layout: str, axes: list[list[str]]
) -> None:
    for at, theirs, mine, found, again in pool4.run(there_and_back, shape, layout):
        expected = part(whole(), axes, shape, at)
        assert torch.equal(theirs, expected)
        assert torch.equal(mine, expected)
        assert found == layout
        assert torch.equal(again, whole())


@pytest.mark.parametrize("layout", ["(dp b) (tp d)", "(dp tp b) d", "b (tp dp d)"])
def test_einops_takes_a_global_tensor_apart_alike(layout: str) -> None:
    shape = {"dp": 2, "tp": 2}
    parts = einops.rearrange(whole(), f"{layout} -> dp tp b d", **shape)
    axes = [list(dim.axes) for dim in parse("test", layout, shape)]
    for dp, tp in itertools.product(range(2), range(2)):
        assert torch.equal(parts[dp, tp], part(whole(), axes, shape, {"dp": dp, "tp": tp}))


def ellipsis_and_ones() -> tuple[Any, ...]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x = torch.ones(1, 2, 3, 4)
    first = mc.to_dtensor(x, "... (tp d)", mesh)
    second = mc.to_dtensor(x, "1 (dp b) ...", mesh)
    last = mc.to_dtensor(torch.tensor(2.0), "", mesh)
    return [(tuple(d.shape), d.placements, mc.from_dtensor(d, mesh=mesh)[1]) for d in (first, second, last)]


def test_ellipses_ones_and_scalars(pool4: WorkerPool) -> None:
    for found in pool4.run(ellipsis_and_ones):
        assert found == [
            ((1, 2, 3, 8), (Replicate(), Shard(3)), "d0 d1 d2 (tp d3)"),
            ((1, 4, 3, 4), (Shard(1), Replicate()), "d0 (dp d1) d2 d3"),
            ((), (Replicate(), Replicate()), ""),
        ]


def product(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w) ** 3).sum() / 1000


def derivatives(loss: Tensor, x: Tensor, w: Tensor, total: Any) -> list[Tensor]:
    """First derivatives of the loss, and those of the sum of their squares."""
    first = torch.autograd.grad(loss, (x, w), create_graph=True)
    return [*first, *torch.autograd.grad(total(first), (x, w))]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)


def through_dtensors() -> tuple[dict[str, int], list[Tensor]]:
    """A product of which DTensor's own rules make partial gradients of both operands, and local tensors around it."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    at = mesh.coordinate
    x = part(inputs()[0], [["dp"], []], mesh.shape, at).clone().requires_grad_()
    w = part(inputs()[1], [[], ["tp"]], mesh.shape, at).clone().requires_grad_()
    y = mc.to_dtensor(x, "(dp b) d", mesh) @ mc.to_dtensor(w, "d (tp f)", mesh)
    mine, layout = mc.from_dtensor(y, "b f", mesh)
    assert layout == "(dp b) (tp f)"
    with mc.use_mesh(mesh):
        loss = mc.all_reduce((mine**3).sum(), ("dp", "tp")) / 1000

        def total(first: tuple[Tensor, ...]) -> Tensor:
            return mc.all_reduce((first[0] ** 2).sum(), "dp") + mc.all_reduce((first[1] ** 2).sum(), "tp")

        return at, [loss.detach(), *(g.detach() for g in derivatives(loss, x, w, total))]


def test_first_and_second_derivatives_flow_through(pool4: WorkerPool) -> None:
    shape = {"dp": 2, "tp": 2}
    x, w = (tensor.requires_grad_() for tensor in inputs())
    loss = product(x, w)
    expected = [loss, *derivatives(loss, x, w, lambda first: sum((g**2).sum() for g in first))]
    axes = [[], [["dp"], []], [[], ["tp"]], [["dp"], []], [[], ["tp"]]]
    for at, found in pool4.run(through_dtensors):
        for mine, theirs, some in zip(found, expected, axes, strict=True):
            torch.testing.assert_close(mine, part(theirs.detach(), some, shape, at))


def out_of_a_dtensor(layout: str) -> tuple[Any, ...]:
    """A leaf that is a DTensor; what is invariant along dp meets what differs there, by way of pvary."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    leaf = distribute_tensor(whole(), mesh.device_mesh, mc.placements(layout, mesh)).requires_grad_()
    with mc.use_mesh(mesh):
        mine, found = mc.from_dtensor(leaf, "b d")
        missing = tuple(axis for axis in mesh.axis_names if axis not in parse("test", found, mesh.shape).axes)
        if missing:
            mine = mc.pvary(mine, missing)
        mc.all_reduce((mine**2 * (1 + mesh.rank)).sum(), ("dp", "tp")).backward()
    assert isinstance(leaf.grad, DTensor)
    return leaf.grad.placements == leaf.placements, leaf.grad.full_tensor(), mesh.coordinate, leaf.grad.to_local()


@pytest.mark.parametrize(
    ("layout", "axes"), [("b d", [[], []]), ("(dp b) d", [["dp"], []]), ("b (tp d)", [[], ["tp"]])]
)
def test_the_gradient_of_what_is_replicated_is_replicated(
    pool4: WorkerPool, layout: str, axes: list[list[str]]
) -> None:
    shape = {"dp": 2, "tp": 2}
    expected = torch.zeros_like(whole())
    for dp, tp in itertools.product(range(2), range(2)):  # each rank's share of the sum, by hand
        share = part(expected, axes, shape, {"dp": dp, "tp": tp})
        share += 2 * part(whole(), axes, shape, {"dp": dp, "tp": tp}) * (1 + 2 * dp + tp)
    for same, gradient, at, mine in pool4.run(out_of_a_dtensor, layout):
        assert same
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(mine, part(expected, axes, shape, at))


def redistributed(placed: tuple[Placement, ...], async_op: bool) -> tuple[Any, ...]:
    """DTensor redistributes on the way, so that the gradient comes back in another layout than that of ``x``."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x = part(whole(), [["dp"], []], mesh.shape, mesh.coordinate).clone().requires_grad_()
    sent = mc.to_dtensor(x, "(dp b) d", mesh).redistribute(placements=placed, async_op=async_op)
    assert (type(sent.to_local()) is not Tensor) == async_op
    mine, layout = mc.from_dtensor(sent, "b d", mesh)
    assert type(mine) is Tensor
    with mc.use_mesh(mesh):
        loss = (mine**2).sum()
        axes = parse("test", layout, mesh.shape).axes
        (mc.all_reduce(loss, axes) if axes else loss).backward()
    return layout, mesh.coordinate, mine.detach(), x.grad


@pytest.mark.parametrize(
    ("placed", "async_op", "layout", "axes"),
    [
        ((Replicate(), Replicate()), True, "b d", [[], []]),
        ((Replicate(), Replicate()), False, "b d", [[], []]),
        ((Replicate(), Shard(0)), False, "(tp b) d", [["tp"], []]),
        ((Shard(1), Replicate()), False, "b (dp d)", [[], ["dp"]]),
    ],
)
def test_what_dtensor_redistributes_comes_back(
    pool4: WorkerPool, placed: tuple[Placement, ...], async_op: bool, layout: str, axes: list[list[str]]
) -> None:
    """With ``async_op`` the tensor inside is still under way, and is waited for."""
    shape = {"dp": 2, "tp": 2}
    for found, at, mine, gradient in pool4.run(redistributed, placed, async_op):
        assert found == layout
        assert torch.equal(mine, part(whole(), axes, shape, at))
        torch.testing.assert_close(gradient, 2 * part(whole(), [["dp"], []], shape, at))


def refused() -> list[str]:
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    other = mc.make_mesh({"a": 2, "b": 2})
    line = mc.make_mesh({"w": 4})
    turned = mc.make_mesh({"dp": 2, "tp": 2}, ranks=[0, 2, 1, 3])
    x = torch.ones(4, 6)
    placed = distribute_tensor(x, mesh.device_mesh, [Shard(0), Replicate()])
    uneven = distribute_tensor(torch.ones(5, 3), mesh.device_mesh, [Shard(0), Replicate()])
    twice = distribute_tensor(torch.ones(6, 3), mesh.device_mesh, [Shard(0), Shard(0)])
    partial = DTensor.from_local(x, mesh.device_mesh, [Partial(), Replicate()])
    texts = []
    for call in (
        lambda: mc.to_dtensor(x, "(tp dp b) d", mesh),
        lambda: mc.to_dtensor(x, "(dp b)", mesh),
        lambda: mc.to_dtensor(placed, "(dp b) d", mesh),
        lambda: mc.to_dtensor([1.0], "b", mesh),
        lambda: mc.to_dtensor(x.to("meta"), "(dp b) d", mesh),
        lambda: mc.from_dtensor(x, "b d", mesh),
        lambda: mc.from_dtensor(placed, "b", mesh),
        lambda: mc.from_dtensor(placed, "b d", other),
        lambda: mc.from_dtensor(placed, "b d", line),
        lambda: mc.from_dtensor(placed, "b d", turned),
        lambda: mc.from_dtensor(uneven, "b d", mesh),
        lambda: mc.from_dtensor(twice, "b d", mesh),
        lambda: mc.from_dtensor(partial, "b d", mesh),
        lambda: mc.from_dtensor(placed, "b d"),
    ):
        try:
            call()
            texts.append("nothing was raised")
        except mc.MeshError as error:
            texts.append(str(error))
    return texts


def test_what_is_refused_is_refused_on_every_rank(pool4: WorkerPool) -> None:
    expected = [
        "to_dtensor: DTensor cuts a dim over axes in the order of the mesh, and (tp dp b) has another.",
        "to_dtensor: '(dp b)' has 1 dim, the tensor 2.",
        "to_dtensor: x is a DTensor, not a rank's part.",
        "to_dtensor: x is a list, not a rank's part.",
        "to_dtensor: x is on meta, the mesh on cpu.",
        "from_dtensor: expected a DTensor, got Tensor.",
        "from_dtensor: 1 name for 2 dims.",
        "from_dtensor: the DTensor lies on another mesh",
        "from_dtensor: the DTensor lies on another mesh",
        "from_dtensor: the DTensor lies on another mesh",
        "from_dtensor: dim 0 of length 5 is cut unevenly into 2 parts.",
        "from_dtensor: dim 0 of length 6 is cut unevenly into 4 parts.",
        "from_dtensor: the tensor is partial along 'dp', which no layout says.",
        "from_dtensor: there is no mesh.",
    ]
    for texts in pool4.run(refused):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(f"meshcomm.{start}")


def over_torchs_own_mesh() -> tuple[str, bool]:
    """A DTensor over a DeviceMesh without names that torch made is one over the mesh with the same ranks."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    plain = torch.distributed.init_device_mesh("cpu", (2, 2))
    mine, layout = mc.from_dtensor(distribute_tensor(whole(), plain, [Shard(0), Shard(1)]), "b d", mesh)
    return layout, torch.equal(mine, part(whole(), [["dp"], ["tp"]], mesh.shape, mesh.coordinate))


def test_a_device_mesh_of_the_same_ranks_will_do(pool4: WorkerPool) -> None:
    assert pool4.run(over_torchs_own_mesh) == [("(dp b) (tp d)", True)] * 4


def test_dtensors_need_process_groups() -> None:
    mesh = mc.make_mesh({"tp": 2})

    def make() -> str:
        with pytest.raises(mc.MeshError, match="ranks in one process have no torch process groups") as error:
            mc.to_dtensor(torch.ones(2), "(tp d)", mesh)
        return str(error.value)

    assert len(set(mc.launch(make, ranks=2))) == 1


# ----------------------------------------------------------------------------------------------------------- import


@pytest.mark.thorough
def test_the_module_of_dtensor_is_imported_when_asked_for() -> None:
    program = """if True:
        import sys
        import meshcomm as mc
        heavy = "torch.distributed.tensor"
        assert heavy not in sys.modules
        later = ("from_dtensor", "layout_from", "placements", "to_dtensor")
        assert set(later) <= set(dir(mc)) and set(later) <= set(mc.__all__)
        assert not set(later) & set(vars(mc))
        assert heavy not in sys.modules
        mesh = mc.make_mesh({"tp": 2})
        mc.local_shape("b (tp d)", (2, 4), mesh), mc.partition_spec("b (tp d)", mesh)
        assert heavy not in sys.modules
        print(mc.placements("b (tp d)", mesh))
        assert heavy in sys.modules
        assert mc.placements is vars(mc)["placements"]
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(Shard(dim=1),)\n"


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'meshcomm' has no attribute 'redistribute'"):
        mc.redistribute  # noqa: B018
