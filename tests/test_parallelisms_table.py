"""Each line of the table of docs/parallelisms.md is run: its values, and the collectives that it issues forward and backward.
So is the transformer block of the guide."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_einsum import against_torch, dims_of, part
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "parallelisms.md"
GUIDE = DOCS / "layouts.md"
AXES = ("dp", "fsdp", "tp", "cp", "ep", "pp")
F64 = torch.float64


class Row(NamedTuple):
    """One line of the table."""

    parallelism: str
    line: str
    forward: list[str]
    backward: list[str]

    @property
    def call(self) -> ast.Call:
        """The call of meshcomm in it, which what follows it may be applied to."""
        calls = [node for node in ast.walk(ast.parse(self.line, mode="eval")) if isinstance(node, ast.Call)]
        return next(call for call in calls if re.fullmatch(r"mc\.\w+", ast.unparse(call.func)))

    @property
    def name(self) -> str:
        return ast.unparse(self.call.func)[3:]

    @property
    def texts(self) -> list[str]:
        """The strings that it passes."""
        return [arg.value for arg in self.call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]

    @property
    def operands(self) -> list[str]:
        """The variable of each tensor that it passes."""
        tensors = [arg for arg in self.call.args if not isinstance(arg, ast.Constant)]
        return [next(n.id for n in ast.walk(arg) if isinstance(n, ast.Name) and n.id != "mc") for arg in tensors]

    @property
    def mesh(self) -> dict[str, int]:
        """Two ranks along each axis that it names."""
        return {axis: 2 for axis in AXES if re.search(rf"\b{axis}\b", self.line)}


def collectives(cell: str) -> list[str]:
    return [] if cell == "nothing" else cell.split(", ")


def rows() -> list[Row]:
    table = PAGE.read_text().split("| parallelism | the line |")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [Row(name, line.strip("`"), collectives(fwd), collectives(bwd)) for name, line, fwd, bwd in cells]


ROWS = rows()


def test_the_table_has_every_parallelism() -> None:
    words = " ".join(row.parallelism for row in ROWS)
    for word in (
        "data",
        "FSDP",
        "HSDP",
        "column",
        "row",
        "sequence",
        "Ulysses",
        "ring",
        "expert",
        "pipeline",
        "vocabulary",
    ):
        assert word in words
    for row in ROWS:
        ast.parse(row.line, mode="eval")


def listener(log: list[str], axes: tuple[str, ...], listen: Callable[..., None]) -> Callable[..., None]:
    def announce(note: Any) -> None:
        if note.what not in ("pvary", "shard"):  # which communicate nothing
            log.append(f"{note.what} {' '.join(axes)}")
        listen(note)

    return announce


@contextlib.contextmanager
def issued(mesh: mc.Mesh) -> Iterator[list[str]]:
    """What the links of all axes, and of all tuples of them, are told."""
    log: list[str] = []
    links = []
    for count in range(1, len(mesh.axis_names) + 1):
        for axes in itertools.permutations(mesh.axis_names, count):
            link = mesh.axis(axes[0] if count == 1 else axes).link
            links.append((link, link.announce))
            link.announce = listener(log, axes, link.announce)  # type: ignore[method-assign]
            link.briefly = False
    try:
        yield log
    finally:
        for link, before in links:
            link.announce, link.briefly = before, True  # type: ignore[method-assign]


def run(row: Row) -> tuple[list[str], list[str]]:
    """The collectives of a line, forward and in the backward of every operand."""
    mesh = mc.make_mesh(row.mesh)
    sides = row.texts[0].split("->")[0].split(",") if "->" in row.texts[0] else ["b s d"]
    variables: dict[str, Any] = {"mc": mc}
    for name, side in zip(row.operands, sides, strict=True):
        lengths = [4 if not axes else 4 // 2 ** len(axes) for axes, _ in dims_of(side)]
        variables[name] = torch.randn(lengths, dtype=F64, requires_grad=True)
    with mc.use_mesh(mesh):
        with issued(mesh) as forward:
            y = eval(compile(row.line, PAGE.name, "eval"), variables)
        with issued(mesh) as backward:
            torch.autograd.grad(y.sum(), [variables[name] for name in row.operands])
    return list(forward), list(backward)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.parallelism)
def test_the_collectives_are_those_of_the_table(row: Row) -> None:
    for forward, backward in mc.launch(run, ranks=2 ** len(row.mesh), args=(row,)):
        assert forward == row.forward
        assert backward == row.backward


def moved(row: Row) -> None:
    """A reshard against the parts of the global tensor, forward and backward."""
    mesh = mc.make_mesh(row.mesh)
    source, target = row.texts[0].split("->")
    names = [name for _, name in dims_of(source)]
    whole, g = (torch.arange(4.0 ** len(names), dtype=F64).view([4] * len(names)) * k for k in (1, -3))
    order = [names.index(name) for _, name in dims_of(target)]
    x = part(whole, source, mesh).clone().requires_grad_()
    y = mc.reshard(x, row.texts[0], mesh=mesh)
    assert torch.equal(y, part(whole.permute(order), target, mesh))
    assert torch.equal(torch.autograd.grad(y, x, part(g.permute(order), target, mesh))[0], part(g, source, mesh))


def shifted(row: Row) -> None:
    """To the next rank, and the gradient back; in a pipeline zeros come in at the ends."""
    mesh = mc.make_mesh(row.mesh)
    (axis,) = row.mesh
    wrap = "wrap=False" not in row.line
    i = mesh.coordinate[axis]
    x = torch.tensor([1.0 + i], dtype=F64, requires_grad=True)
    with mc.use_mesh(mesh):
        y = eval(compile(row.line, PAGE.name, "eval"), {"mc": mc, row.operands[0]: x})
    assert y.item() == (2.0 - i if wrap or i == 1 else 0.0)
    (g,) = torch.autograd.grad(y, x, torch.tensor([10.0 + i], dtype=F64))
    assert g.item() == (11.0 - i if wrap or i == 0 else 0.0)


def gathered(row: Row) -> None:
    """The shards of a weight, each of which several ranks have."""
    mesh = mc.make_mesh(row.mesh)
    whole = torch.arange(8.0, dtype=F64).view(4, 2)
    x = whole.chunk(2)[mesh.coordinate["fsdp"]].clone().requires_grad_()
    with mc.use_mesh(mesh):
        y = eval(compile(row.line, PAGE.name, "eval"), {"mc": mc, row.operands[0]: x})
    assert torch.equal(y, whole)
    (g,) = torch.autograd.grad(y, x, torch.full((4, 2), 10.0**mesh.rank, dtype=F64))
    assert torch.equal(g, torch.full((2, 2), 1111.0, dtype=F64))


def multiplied(row: Row) -> None:
    against_torch(row.texts[0], mc.make_mesh(row.mesh))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.parallelism)
def test_values_and_gradients(row: Row) -> None:
    check = {"einsum": multiplied, "reshard": moved, "shift": shifted, "all_gather": gathered}[row.name]
    mc.launch(check, ranks=2 ** len(row.mesh), args=(row,))


def loss(row: Row) -> tuple[Tensor, Tensor]:
    """The line of the vocabulary's loss as it is meant: the logarithm of a sum of exponentials."""
    mesh = mc.make_mesh(row.mesh)
    whole = torch.randn(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    mine = whole.chunk(2, -1)[mesh.rank].clone().requires_grad_()
    with mc.use_mesh(mesh):
        y = eval(compile(row.line, PAGE.name, "eval"), {"mc": mc, "logits": mine})
    assert_close(y, whole.logsumexp(-1))
    assert_close(torch.autograd.grad(y.sum(), mine)[0], whole.softmax(-1).chunk(2, -1)[mesh.rank])
    return y, mine


def test_the_loss_over_a_vocabulary_that_is_cut() -> None:
    (row,) = [row for row in ROWS if "logits.exp()" in row.line]
    assert len(mc.launch(loss, ranks=2, args=(row,))) == 2


# ------------------------------------------------------------------------------------------------- the guide's block


def block_of_the_guide(source: str) -> tuple[list[str], list[str]]:
    program: dict[str, Any] = {}
    exec(compile(source, "layouts.md", "exec"), program)
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    cut = "(dp b) (tp s) d"
    p = {name: part(w.detach(), program["layouts"][name], mesh).requires_grad_() for name, w in program["p"].items()}
    x = part(program["x"], cut, mesh).requires_grad_()
    with mc.use_mesh(mesh):
        with issued(mesh) as forward:
            y = program["block"](x, p)
        with issued(mesh) as backward:
            torch.autograd.grad(y.sum(), [x, *p.values()])
    return list(forward), list(backward)


def test_the_block_of_the_guide_costs_what_its_picture_says() -> None:
    """And an all_reduce for the gradient of each of the six weights."""
    text = GUIDE.read_text()
    (source,) = [found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def block(" in found]
    source = source.split("mesh = mc.make_mesh")[0]  # without the run
    lines = [re.search(rf"^{way} +(.*)$", text, re.MULTILINE) for way in ("forward", "backward")]
    pictured = [[word for word in line.group(1).split() if word != "nothing"] for line in lines if line]
    for forward, backward in mc.launch(block_of_the_guide, ranks=4, args=(source,)):
        assert forward == [f"{op} tp" for op in pictured[0]]
        activations = [op for op in backward if not op.startswith("all_reduce")]
        assert activations == [f"{op} tp" for op in reversed(pictured[1])]
        weights = [op for op in backward if op.startswith("all_reduce")]
        assert sorted(weights) == ["all_reduce dp"] * 4 + ["all_reduce dp tp"] * 2
