"""varying_axes, assert_varying and assert_invariant: types asked for, and values compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc

Run = Callable[..., list[Any]]
AXES = {"dp": 2, "tp": 2}

# ------------------------------------------------------------------------------------------------------------- types


def ask() -> None:
    mesh = mc.make_mesh(AXES)
    w = mc.mark_varying(nn.Linear(2, 2), ())
    x = mc.mark_varying(torch.ones(2), "dp", mesh=mesh)
    assert mc.varying_axes(x) == {"dp"}
    with mc.use_mesh(mesh):
        unseen = torch.ones(1)
        with mc.check_vma():
            y = w(x) * mc.axis_index("tp")
            assert mc.varying_axes(y) == {"dp", "tp"}
            assert mc.varying_axes(mc.all_reduce(y, "dp")) == {"tp"}
            assert mc.varying_axes(y[None].T) == {"dp", "tp"}
            assert mc.varying_axes(torch.zeros(2)) == frozenset()
            mc.assert_varying({"y": y, "more": [y.detach()]}, ("tp", "dp"))
            mc.assert_varying(w, ())
            with pytest.raises(
                mc.VaryingError, match=r"x\['y'\] varies along 'dp', 'tp', and not along 'dp'(?s:.)*since axis_index"
            ):
                mc.assert_varying({"y": y}, "dp")
            with pytest.raises(
                mc.VaryingError, match=r"varies along no axis, and not along 'dp'(?s:.)*not since all_reduce"
            ):
                mc.assert_varying(mc.all_reduce(y, ("dp", "tp")), "dp")
            with pytest.raises(mc.VaryingError, match="along which axes x is unknown|varies is unknown"):
                mc.varying_axes(unseen)
            assert mc.varying_axes(nn.Parameter(torch.ones(1))) == frozenset()
        assert mc.varying_axes(y) == {"dp", "tp"}  # afterwards, too
        assert mc.varying_axes(y[:1]) == {"dp", "tp"}
    with pytest.raises(mc.VaryingError, match="varies is unknown"):
        mc.varying_axes(torch.ones(2))


def test_types(run4: Run) -> None:
    run4(ask)


def ask_elsewhere() -> None:
    one, other = mc.make_mesh({"dp": 4}), mc.make_mesh({"dp": 2, "ep": 2})
    x = mc.mark_varying(torch.ones(2), "dp", mesh=one)
    half = mc.mark_varying(torch.ones(2), "ep", mesh=other)
    with mc.use_mesh(other):
        assert mc.varying_axes(x) == {"dp", "ep"}
        with mc.check_vma():
            assert mc.varying_axes(x) == {"dp", "ep"}
    with mc.use_mesh(one), pytest.raises(mc.VaryingError, match="unknown"):
        mc.varying_axes(half)


def test_types_on_another_mesh() -> None:
    mc.launch(ask_elsewhere, ranks=4)


# ------------------------------------------------------------------------------------------------------------ values


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Embedding(4, 2, dtype=torch.bfloat16))


def of_all_kinds(other: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(3, 4, generator=generator)
    kinds: dict[str, Any] = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "strided": real.t()[::2],
        "view": real[1:, 2],
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "complex": torch.complex(real, -real).conj(),
        "sparse": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "plain": [1, 2.5, "text", None, (True, b"bytes")],
    }
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.float16,
        torch.float8_e4m3fn,
    ):
        kinds[str(dtype)] = torch.ones(3).to(dtype)
    if other:
        for name, x in kinds.items():
            if isinstance(x, Tensor) and name not in ("empty", "sparse", "grad"):
                changed = x.clone().to(torch.float64 if x.dtype.is_floating_point else x.dtype)
                flat = changed.reshape(-1)
                flat[-1] = 0 if flat[-1] else 1
                kinds[name] = flat.view(x.shape).to(x.dtype)
        kinds["empty"] = torch.zeros(3, 0)
        kinds["sparse"] = torch.tensor([[0.0, 0.0], [2.0, 0.0]]).to_sparse()
        kinds["grad"] = torch.ones(2, dtype=torch.float64)
        kinds["plain"] = [1, 2.5, "text", None, (1, b"bytes")]
    return kinds


def told(tree: Any, axes: Any = ("dp", "tp")) -> str:
    with pytest.raises(mc.CommError) as caught:
        mc.assert_invariant(tree, axes)
    return str(caught.value)


def compare() -> None:
    mesh = mc.make_mesh(AXES)
    rank = mesh.rank
    with mc.use_mesh(mesh):
        net = model()
        mc.assert_invariant(net, ("dp", "tp"))
        mc.assert_invariant(net.state_dict(), "dp")
        mc.assert_invariant(of_all_kinds(), ("dp", "tp"))
        mc.assert_invariant([], "tp")
        with torch.no_grad():
            net[1].running_mean[1] += 1e-7 if rank == 2 else 0  # type: ignore[index, operator]
        said = told(net)
        assert "1 of 8 leaves differ along ('dp', 'tp')" in said
        assert "tree['1.running_mean'] (index 2)" in said
        mc.assert_invariant(net, "tp") if rank < 2 else told(net, "tp")
        assert "(indices 0, 1 and indices 2, 3)" in told({"x": rank // 2})
        assert "tree['y'] (index 0; not there: indices 1, 2, 3)" in told({"x": 1, "y": 1} if rank == 0 else {"x": 1})
        mc.assert_invariant({"x": 1, "y": 2} if rank == 0 else {"y": 2, "x": 1}, "dp")
        told({"x": 1, "y": 2} if rank == 0 else {"x": 2, "y": 1})
        assert "7 of 7" in told([torch.full((2,), rank + i) for i in range(7)])
        assert "and 2 more" in told([torch.full((2,), rank + i) for i in range(7)])
        mc.assert_invariant(torch.full((2,), rank // 2), "tp")  # along this axis alone


def test_values(run4: Run) -> None:
    run4(compare)


@pytest.mark.parametrize("name", of_all_kinds())
def test_each_kind_of_value_is_looked_at(name: str) -> None:
    def run() -> str:
        mesh = mc.make_mesh({"dp": 2})
        with mc.use_mesh(mesh):
            return told({"x": of_all_kinds(mesh.rank == 1)[name]}, "dp")

    assert all("tree['x']" in said for said in mc.launch(run, ranks=2))


def test_in_a_check_values_count_and_types_do_not() -> None:
    def run() -> None:
        mesh = mc.make_mesh({"dp": 2})
        index = mesh.rank
        with mc.use_mesh(mesh), mc.check_vma():
            x = mc.axis_index("dp") * 0  # varies, and is equal
            mc.assert_invariant(x, "dp")
            told(mc.axis_index("dp"), "dp")
            w = mc.mark_varying(torch.full((2,), float(index), requires_grad=True), ())  # does not vary, and differs
            told(w, "dp")
            mc.assert_invariant(nn.Parameter(torch.ones(2)), "dp")  # whatever its type
            mc.assert_varying(mc.all_reduce(x, "dp"), ())

    mc.launch(run, ranks=2)


def test_under_transforms_and_in_a_shard_map() -> None:
    def run() -> None:
        mesh = mc.make_mesh({"dp": 2})
        with mc.use_mesh(mesh):

            def loss(w: Tensor) -> Tensor:
                mc.assert_invariant(w, "dp")
                return w.square().sum()

            assert torch.func.grad(loss)(torch.ones(2)).tolist() == [2.0, 2.0]
            assert torch.func.vmap(loss)(torch.ones(2, 2)).tolist() == [2.0, 2.0]
            with torch.inference_mode():
                mc.assert_invariant(torch.ones(2), "dp")

    mc.launch(run, ranks=2)

    def body(x: Tensor, w: Tensor) -> Tensor:
        mc.assert_invariant(w, "dp")
        mc.assert_varying(x, "dp")
        return mc.all_reduce((x * w).sum(), "dp")

    w = torch.ones(2, requires_grad=True)
    fn = mc.shard_map(body, mesh=mc.make_mesh({"dp": 2}), in_specs=("(dp n)", "n"), out_specs="")
    assert torch.autograd.grad(fn(torch.arange(4.0), w), w)[0].tolist() == [2.0, 4.0]


def test_it_is_one_small_collective_where_all_is_well() -> None:
    def run() -> list[Any]:
        mesh = mc.make_mesh({"dp": 2})
        with mc.trace() as trace:
            mc.assert_invariant([torch.ones(1000), torch.ones(7)], "dp", mesh=mesh)
        return [(event.operation, event.shape, event.dtype) for event in trace.events]

    for events in mc.launch(run, ranks=2):
        assert events == [("all_gather", (3,), torch.int64)]
