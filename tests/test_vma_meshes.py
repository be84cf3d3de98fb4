"""Types speak of the axes of one mesh: what the checker makes of a value on another mesh over the same ranks, or some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.spmd.types.grids import grid_of

F64 = torch.float64


def line() -> mc.Mesh:
    return mc.make_mesh({"dp": 4})


def grid() -> mc.Mesh:
    return mc.make_mesh({"dp": 2, "ep": 2})


def half() -> mc.Mesh:
    return mc.make_mesh({"dp": 2}, ranks=[0, 1] if mc.rank() < 2 else [2, 3])


def weight() -> Tensor:
    return mc.mark_varying(torch.ones((), dtype=F64, requires_grad=True), ())


def own(mesh: mc.Mesh, axis: str = "dp") -> Tensor:
    """1, 2, ... along an axis."""
    return mc.mark_varying(torch.tensor(mesh.coordinate[axis] + 1.0, dtype=F64), axis, mesh=mesh)


def checked(mesh: mc.Mesh) -> Any:
    return mc.check_vma(True, mesh=mesh)


def mean(x: Tensor, mesh: mc.Mesh) -> None:
    """Its mean over all axes, and backward."""
    mc.all_reduce(x.sum(), mesh.axis_names, "mean", mesh=mesh).backward()


def marked_on_one() -> Any:
    w, x, other = weight(), own(line()), grid()
    with checked(other):
        mean(w * x, other)
    return w.grad


def made_on_one() -> Any:
    w, one, other = weight(), line(), grid()
    with checked(one):
        x = 1.0 + mc.axis_index("dp", mesh=one)
    with checked(other):
        mean(w * x, other)
    return w.grad


def marked_by_name_and_used_on_one() -> Any:
    w, one, other = weight(), line(), grid()
    x = mc.mark_varying(torch.tensor(one.rank + 1.0, dtype=F64), "dp")
    with checked(one):
        x * 1
    with checked(other):
        mean(w * x, other)
    return w.grad


def a_graph_over_both() -> Any:
    w, one, other = weight(), line(), grid()
    x = own(one)
    with checked(one):
        h = w * x
    with checked(other):
        mean(h, other)
    return w.grad


def one_check_in_the_other() -> Any:
    w, one, other = weight(), line(), grid()
    x = own(one)
    with checked(one):
        h = w * x
        with checked(other):
            y = mc.all_reduce(h, ("dp", "ep"), "mean", mesh=other)
        y.backward()
    return w.grad


def there_and_back() -> Any:
    w, one, other = weight(), line(), grid()
    x = own(one)
    with checked(other):
        h = w * x
    with checked(one):
        mean(h, one)
    return w.grad


def made_twice() -> Any:
    w, one, other = weight(), line(), line()
    x = own(one)
    with checked(other):
        mean(w * x, one)
    return w.grad


def permuted() -> Any:
    """What is the major axis there is called tp here."""
    w, one = weight(), mc.make_mesh({"dp": 2, "tp": 2})
    other, x = mc.make_mesh({"tp": 2, "dp": 2}), 2 * own(one) - 0.5
    x = mc.mark_varying(x, "dp", mesh=one)
    with checked(other):
        mc.all_reduce(w * x, "tp", "mean", mesh=other).backward()
    return w.grad


def an_axis_of_one_more() -> Any:
    w, x, other = weight(), own(line()), mc.make_mesh({"dp": 4, "tp": 1})
    with checked(other):
        mean(w * x, other)
    return w.grad


def by_einsum() -> Any:
    w, x, other = weight(), own(line()), grid()
    with checked(other):
        (mc.einsum("(dp ep a) ->", (w * x).view(1), mesh=other) / 4).backward()
    return w.grad


def by_reshard() -> Any:
    w, x, other = weight(), own(line()), grid()
    with checked(other):
        (mc.reshard((w * x).view(1), "(dp ep a) -> a", mesh=other).sum() / 4).backward()
    return w.grad


def by_gather() -> Any:
    w, x, other = weight(), own(line()), grid()
    with checked(other):
        mean(mc.all_gather((w * x).view(1), ("dp", "ep"), mesh=other) / 4, other)
    return w.grad


def an_optimizer() -> Any:
    """The step, on another mesh than the gradient."""
    w, one, other = weight(), line(), grid()
    x = own(one)
    with checked(one):
        mean(w * x, one)
    with checked(other):
        torch.optim.SGD([w], lr=1.0).step()
    return 1 - w.detach()


RIGHT = [
    marked_on_one, made_on_one, marked_by_name_and_used_on_one, a_graph_over_both, one_check_in_the_other,
    there_and_back, made_twice, permuted, an_axis_of_one_more, by_einsum, by_reshard, by_gather, an_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("program", RIGHT, ids=lambda fn: fn.__name__)
def test_the_same_ranks_have_the_same_value(program: Callable[[], Tensor]) -> None:
    assert [g.item() for g in mc.launch(program, ranks=4)] == [2.5] * 4


def test_a_part_of_the_ranks() -> None:
    def run() -> float:
        w, x, part = weight(), own(line()), half()
        with checked(part):
            mean(w * x, part)
        assert w.grad is not None
        return w.grad.item()

    assert mc.launch(run, ranks=4) == [1.5, 1.5, 3.5, 3.5]


# ------------------------------------------------------------------------------------------------------------- refused


def on(where: Callable[[], mc.Mesh], use: Callable[[Tensor, Tensor], object]) -> Callable[[], None]:
    """What was typed on a line of ranks, used where another mesh is checked."""

    def run() -> None:
        x, w, mesh = own(line()), weight(), where()
        with mc.use_mesh(mesh), mc.check_vma():
            use(w, x)

    return run


def within(use: Callable[[Tensor, Tensor, mc.Mesh], object]) -> Callable[[], None]:
    """Another mesh where a line is checked."""

    def run() -> None:
        one, other, w = line(), grid(), weight()
        x = own(one)
        with mc.use_mesh(one), mc.check_vma():
            use(w, x, other)

    return run


def with_other_sizes() -> None:
    w, x = weight(), own(mc.make_mesh({"dp": 2, "tp": 2}))
    with checked(mc.make_mesh({"dp": 4, "tp": 1})):
        w * x


def from_a_part() -> None:
    w, x = weight(), own(half())
    with checked(line()):
        w * x


def a_sum_over_a_part() -> None:
    w, part, whole = weight(), half(), line()
    x = own(part)
    with checked(part):
        h = mc.all_reduce(w * x, "dp", mesh=part)
    with checked(whole):
        h * mc.axis_index("dp", mesh=whole)


def a_graph_over_all_on_a_part() -> None:
    w, part, whole = weight(), half(), line()
    x = own(whole)
    with checked(whole):
        h = mc.all_reduce(w * x, "dp", mesh=whole)
    with checked(part):
        h * x


def a_gradient_over_a_part() -> None:
    w, part, whole = weight(), half(), line()
    optimizer, x = torch.optim.SGD([w], lr=1.0), own(part)
    with checked(part):
        mean(w * x, part)
        assert w.grad is not None
    with checked(whole):
        optimizer.step()


def permuted_by_name() -> None:
    w, one, other = weight(), mc.make_mesh({"dp": 2, "tp": 2}), mc.make_mesh({"tp": 2, "dp": 2})
    x = own(one)
    with checked(other):
        mc.all_reduce(w * x, "dp", mesh=other)


def permuted_in_one_check() -> None:
    one, other = mc.make_mesh({"dp": 2, "tp": 2}), mc.make_mesh({"tp": 2, "dp": 2})
    x = own(one)
    with checked(one):
        mc.all_reduce(x, "dp", mesh=other)


def written_through_other_names() -> None:
    one, other, buffer = line(), grid(), torch.zeros(2, dtype=F64)
    with checked(one):
        alias = buffer.detach()
        alias.copy_(mc.axis_index("dp", mesh=one).double().expand(2))
    with checked(other):
        weight() * buffer


def a_shard_map_over_a_part() -> None:
    whole, part = line(), half()
    fn = mc.shard_map(lambda x: mc.all_reduce(x.sum(), "dp"), mesh=part, in_specs="(dp a)", out_specs="")
    x = mc.mark_varying(torch.ones(2, dtype=F64, requires_grad=True), ())
    with checked(whole):
        fn(x) * mc.axis_index("dp", mesh=whole)


UNKNOWN, OTHER = "on another mesh", "a collective over another mesh than the one that is checked"
REFUSED: dict[str, tuple[str, Callable[[], None]]] = {
    "reduced over one of two axes": ("varies along", on(grid, lambda w, x: mc.all_reduce(w * x, "dp").item())),
    "pvary": ("this varies along 'ep'", on(grid, lambda w, x: mc.pvary(x, "ep"))),
    "reshard": (
        "its layout 'a' says that it does not|parts",
        on(grid, lambda w, x: mc.reshard(x.view(1), "a -> (ep a)")),
    ),
    "all_reduce": (OTHER, within(lambda w, x, mesh: mc.all_reduce(w * x, "dp", mesh=mesh))),
    "pvary, mesh=": (OTHER, within(lambda w, x, mesh: mc.pvary(w, "ep", mesh=mesh))),
    "axis_index": (OTHER, within(lambda w, x, mesh: mc.axis_index("dp", mesh=mesh))),
    "einsum, mesh=": (OTHER, within(lambda w, x, mesh: mc.einsum("(dp a) ->", x.view(1), mesh=mesh))),
    "reshard, mesh=": (OTHER, within(lambda w, x, mesh: mc.reshard(x.view(1), "(dp a) -> a", mesh=mesh))),
    "with other sizes": (UNKNOWN, with_other_sizes),
    "from a part": (UNKNOWN, from_a_part),
    "a sum over a part": (UNKNOWN, a_sum_over_a_part),
    "a graph over all on a part": (UNKNOWN, a_graph_over_all_on_a_part),
    "a gradient over a part": (UNKNOWN, a_gradient_over_a_part),
    "permuted, by name": ("invariant along 'dp'", permuted_by_name),
    "permuted, in one check": (OTHER, permuted_in_one_check),
    "written through other names": ("is unknown", written_through_other_names),
    "a shard_map over a part": (UNKNOWN, a_shard_map_over_a_part),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_type_there_is_refused(name: str) -> None:
    what, program = REFUSED[name]
    with pytest.raises((mc.VaryingError, mc.MeshError), match=what):
        mc.launch(program, ranks=4)


def under_another_current_mesh() -> None:
    one, other = line(), grid()
    with mc.use_mesh(one), mc.check_vma(), mc.use_mesh(other):
        mc.einsum("(dp a) ->", own_part())


def own_part() -> Tensor:
    with mc.check_vma(False):
        return mc.mark_varying(torch.ones(1, dtype=F64), "dp")


def test_the_current_mesh_is_another_one_than_the_checked() -> None:
    with pytest.raises(mc.MeshError, match=OTHER):
        mc.launch(under_another_current_mesh, ranks=4)


# ---------------------------------------------------------------------------------------------------------- the table


def moved(shape: dict[str, int], axes: str, to: dict[str, int], ranks: list[int] | None = None) -> Any:
    size = 1
    for n in shape.values():
        size *= n
    found = grid_of(mc.make_mesh(shape)).moved(
        frozenset(axes.split()), grid_of(mc.make_mesh(to, ranks=ranks if ranks is not None else range(size)))
    )
    return None if found is None else (" ".join(sorted(found.axes)), found.closed)


def test_along_which_axes_of_another_mesh() -> None:
    cube, square = {"a": 2, "b": 2, "c": 2}, {"x": 4, "y": 2}
    assert moved(cube, "a b", square) == ("x", True)
    assert moved(cube, "c", square) == ("y", True)
    assert moved(cube, "a b c", square) == ("x y", True)
    assert moved(cube, "", square) == ("", True)
    assert moved(cube, "a", square) is None  # half of x
    assert moved(square, "x", cube) == ("a b", True)
    assert moved(cube, "a", {"c": 2, "b": 2, "a": 2}) == ("c", True)
    assert moved(cube, "a", {"y": 2}, [0, 4]) == ("y", False)
    assert moved(cube, "a b c", {"y": 2}, [0, 4]) == ("y", True)
    assert moved(cube, "a", {"y": 4}, [0, 1, 2, 3]) == ("", True)
    assert moved({"a": 4}, "a", {"a": 1}, [0]) == ("a", True)
    assert moved({"a": 2}, "a", {"a": 4}, [0, 1, 2, 3]) is None


def test_equal_meshes_are_one_grid() -> None:
    assert grid_of(mc.make_mesh({"a": 2, "b": 1})) is grid_of(mc.make_mesh({"a": 2, "b": 1}))
    assert grid_of(mc.make_mesh({"a": 2, "b": 1})) is not grid_of(mc.make_mesh({"b": 1, "a": 2}))
    assert grid_of(mc.make_mesh({"a": 2}, ranks=[0, 1])) is not grid_of(mc.make_mesh({"a": 2}, ranks=[1, 0]))
