"""PartitionSpecs where layouts are taken: understood, or answered with the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.elsewhere import layout_said_by


class PartitionSpec:
    """JAX's since 0.8: entries, and no tuple."""

    def __init__(self, *entries: Any) -> None:
        self.entries = entries

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Older(tuple[Any, ...]):
    """JAX's before, a tuple."""

    def __new__(cls, *entries: Any) -> Any:
        return super().__new__(cls, entries)


Older.__name__ = "PartitionSpec"
KINDS = pytest.mark.parametrize("P", [PartitionSpec, Older], ids=["now", "before"])


@KINDS
def test_what_it_says(P: Any) -> None:  # noqa: N803
    assert layout_said_by(P("dp", None)) == "(dp dim0) dim1 ..."
    assert layout_said_by(P(("dp", "tp"), None, "pp")) == "(dp tp dim0) dim1 (pp dim2) ..."
    assert layout_said_by(P()) == "..."
    assert layout_said_by(("dp", None)) == "(dp dim0) dim1 ..."
    assert layout_said_by(P(object())) is None
    assert layout_said_by("dp") is None
    assert layout_said_by(3) is None


@KINDS
@pytest.mark.parametrize("mode", [True, "error", False])
def test_shard_map(P: Any, mode: Any) -> None:  # noqa: N803
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x, w = torch.randn(4, 3), {"w": torch.randn(3, 6)}

    def fn(x: Any, weights: Any) -> Any:
        y = x @ weights["w"]
        assert y.shape == (2, 3)
        return y, {"sum": mc.all_reduce(y.sum(), ("dp", "tp"))}

    specs = {"in_specs": (P("dp"), {"w": P(None, "tp")}), "out_specs": (P("dp", "tp"), P())}
    y, total = mc.shard_map(fn, mesh=mesh, check_vma=mode, **specs)(x, w)
    torch.testing.assert_close(y, x @ w["w"])
    torch.testing.assert_close(total["sum"], y.sum())
    assert torch.equal(
        mc.shard_map(torch.sin, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=mode)(x), x.sin()
    )
    with mc.use_mesh(mesh):
        assert torch.equal(mc.shard_map(torch.sin, in_specs=[P("dp")], out_specs=P("dp"), check_vma=mode)(x), x.sin())


@KINDS
def test_where_one_layout_is_taken(P: Any) -> None:  # noqa: N803
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    for spec in (P("dp", None), ("dp", None)):
        assert mc.local_shape(spec, (4, 3), mesh) == (2, 3)
        assert mc.global_shape(spec, (4, 3), mesh) == (8, 3)
        assert mc.layout_of(spec, "a b", mesh) == "(dp a) b"

    def drawn(layout: Any) -> Any:
        with mc.use_mesh(mesh), mc.rng(layout, seed=0):
            return torch.rand(2, 2)

    for mine, other in zip(mc.launch(drawn, 4, (P("dp", "tp"),)), mc.launch(drawn, 4, ("(dp a) (tp b)",)), strict=True):
        assert torch.equal(mine, other)


X = torch.ones(4, 4)
MESH = mc.make_mesh({"dp": 1, "tp": 1})
ANSWERED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reshard": (lambda spec: mc.reshard(X, spec, mesh=MESH), r"write it as 'dim0 dim1 \.\.\. -> \(dp dim0\) dim1 \.\.\.'"),
    "plan": (lambda spec: mc.plan(spec, (4, 4), MESH), r"write it as 'dim0 dim1 \.\.\. -> \(dp dim0\) dim1 \.\.\.'"),
    "einsum": (lambda spec: mc.einsum(spec, X, mesh=MESH), r"write it as 'dim0 dim1 \.\.\. -> \(dp dim0\) dim1 \.\.\.'"),
    "placements": (lambda spec: mc.placements(spec, MESH), r"write it as '\(dp dim0\) dim1 \.\.\.'"),
    "shard": (lambda spec: mc.shard(X, spec, mesh=MESH), r"the layout is '\(dp dim0\) dim1 \.\.\.', for mc.reshard"),
    "all_gather": (lambda spec: mc.all_gather(X, spec, mesh=MESH), r"the layout is '\(dp dim0\) dim1 \.\.\.', for mc.reshard"),
}  # fmt: skip


@pytest.mark.parametrize("where", ANSWERED)
def test_elsewhere_it_is_answered_with_the_layout(where: str) -> None:
    call, said = ANSWERED[where]
    for spec in (PartitionSpec("dp", None), Older("dp", None), ("dp", None)):
        with pytest.raises(mc.MeshError, match=said) as caught:
            call(spec)
        answer = str(caught.value).rpartition("write it as ")[2].strip("'")
        if "->" in answer:
            assert call(answer) is not None, "the answer is right"


def test_an_axis_alone_as_a_layout() -> None:
    """In JAX a spec may be the name of an axis: here it is the name of a dim, and refused."""
    with pytest.raises(mc.MeshError, match=r'which is P\("dp"\): "\(dp dim0\) \.\.\."'):
        mc.shard_map(torch.sin, mesh=mc.make_mesh({"dp": 2}), in_specs=("dp",), out_specs="...")
