"""What the checker of varying types remembers of operations, and of the pvarys that it made: each time it is as if all
were looked at again.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from vma_fresh_programs import FRESH_PROGRAMS
from vma_pair_programs import PAIR_PROGRAMS
from vma_short_programs import PROGRAMS as SHORT_PROGRAMS
from vma_short_programs import Own, of, weight

import meshcomm as mc
from meshcomm.spmd.types.grids import ANY, Grid, grid_of
from meshcomm.spmd.types.rules import at_once, foreach, in_place
from meshcomm.spmd.types.rules.foreach import Foreach
from meshcomm.spmd.types.rules.short import Short, Shorts
from meshcomm.spmd.types.rules.torch_rules import kind_of
from meshcomm.spmd.types.sizes import varying_numbers
from meshcomm.spmd.types.vma import Type, marked

SHAPE = {"dp": 2, "tp": 2}
PROGRAMS = SHORT_PROGRAMS | FRESH_PROGRAMS | PAIR_PROGRAMS


class AllLong(dict[Any, Any]):
    """Functions as the checker reads them, none of which is seen at once."""

    def __missing__(self, func: Any) -> Any:
        return replace(kind_of(func), way=0)


@pytest.fixture(autouse=True)
def _nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have made says nothing here."""
    for module in (at_once, foreach, in_place):
        monkeypatch.setattr(module, "lent", {})
    monkeypatch.setattr(varying_numbers.made, "any", False)
    monkeypatch.setattr(grid(), "short", {})
    monkeypatch.setattr(grid(), "written", frozenset())


def grid() -> Grid:
    return grid_of(SimpleNamespace(shape=SHAPE, ranks=(0, 1, 2, 3)))


def in_ranks(run: Callable[[], Any]) -> list[Any]:
    def main() -> Any:
        with mc.use_mesh(mc.make_mesh(SHAPE)):
            return run()

    return mc.launch(main, ranks=4)


def told(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    try:
        return mc.varying_axes(x), x.requires_grad, x.detach().clone()
    except (mc.VaryingError, RuntimeError) as error:  # of one of many
        return str(error).split(" at ")[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_if_all_were_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            try:
                return [told(x) for x in PROGRAMS[name]()]
            except (mc.VaryingError, RuntimeError) as error:
                return [type(error), str(error).split(" at ")[0]]

    short = in_ranks(run)
    assert any(grid().short.values()), "nothing was remembered"
    monkeypatch.setattr(at_once, "KINDS", AllLong())
    monkeypatch.setattr(Foreach, "_each_at_once", lambda *_: in_place.NOT_SEEN)
    monkeypatch.setattr(grid(), "short", {})
    long = in_ranks(run)
    assert not any(grid().short.values())
    for mine, other in zip(short, long, strict=True):
        assert len(mine) == len(other)
        assert type not in map(type, mine), mine
        for one, two in zip(mine, other, strict=True):
            if isinstance(one, tuple) and len(one) == 3:
                assert one[:2] == two[:2]
                assert_close(one[2], two[2], rtol=0, atol=0, equal_nan=True)
            else:
                assert one == two


def test_none_of_these_is_refused() -> None:
    """Else the test above would compare two errors."""

    def run() -> list[str]:
        refused = []
        with mc.check_vma():
            for name, program in PROGRAMS.items():
                try:
                    program()
                except (mc.VaryingError, RuntimeError) as error:
                    refused.append(f"{name}: {error}")
        return refused

    assert in_ranks(run) == [[]] * 4


def test_gradients_of_several_types_at_one_place() -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            x, leaves, found = of("dp"), [weight(), of("dp").requires_grad_(), of("tp").requires_grad_()], []
            for _ in range(3):
                for w in leaves:
                    (w * x).sum().backward()
                    found.append([mc.varying_axes(w.grad), (w.grad.add_(w.grad) * 1.0).shape])  # type: ignore[union-attr, arg-type]
                    w.grad = None
            return found

    assert in_ranks(run) == [[[set(), (4,)], [{"dp"}, (4,)], [{"tp"}, (4,)]] * 3] * 4


def test_what_is_written_again_and_has_other_memory_meanwhile() -> None:
    def run() -> None:
        x, by, y = of("dp"), of("dp"), of(())
        with mc.check_vma(), torch.no_grad():
            for _ in range(5):
                x.mul_(by)
            with torch._C.DisableTorchFunction():
                x.data = y
            x.mul_(by)
            with pytest.raises(mc.VaryingError, match="item.*makes a Python value of a tensor that varies along 'dp'"):
                y[0].item()

    in_ranks(run)


def test_what_has_no_gradient_is_noted_so() -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            x, w = of("dp") * 1.0, weight()
            for _ in range(4):
                y = x * w
            with torch.no_grad():
                z = x * w
                met = x * of("tp")  # it says where
            return [each is not None and each.plain for each in (marked(y), marked(z), marked(met))]

    assert in_ranks(run) == [[False, True, True]] * 4


def test_what_is_given_back_of_what_was_written_into_is_noted() -> None:
    """Where an operand is of a subclass, that is another tensor."""

    def run() -> list[Any]:
        with mc.check_vma(), torch.no_grad():
            w, n = weight().detach().clone().requires_grad_(), of(()).as_subclass(Own) * 1.0
            given = [w.addcmul_(n, n) for _ in range(4)]
            return [each is not w and marked(each) is not None for each in given]

    assert in_ranks(run) == [[True] * 4] * 4


Rows = Callable[..., Tensor]
ROWS: dict[str, tuple[Rows, Rows]] = {
    "cat": (lambda x, w, u: torch.cat([x, x, w]), lambda x, w, u: torch.cat([x, x, w, u])),
    "stack": (lambda x, w, u: torch.stack((x, x, w), 0), lambda x, w, u: torch.stack((x, x, w, w, u), 0)),
    "block_diag": (lambda x, w, u: torch.block_diag(x, x, w), lambda x, w, u: torch.block_diag(x, x, w, u)),
    "layer_norm": (lambda x, w, u: torch.layer_norm(x, (4,), w), lambda x, w, u: torch.layer_norm(x, (4,), w, u)),
    "another place": (
        lambda x, w, u: torch.layer_norm(x, (4,), w),
        lambda x, w, u: torch.layer_norm(x, (4,), None, w) * u,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_lengths(name: str) -> None:
    """The third one alone is to be varied, and then more beside it are, of the same type."""
    few, many = ROWS[name]

    def loss(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return (many(x, w, u) * x[0]).sum()

    def run() -> Any:
        with mc.check_vma():
            x, w, u = of("dp"), weight(), weight()
            for _ in range(4):
                few(x, w, u)
            return torch.autograd.grad(loss(x, w, u), (w, u))

    one, two = (torch.arange(1.0, 5.0, requires_grad=True) for _ in range(2))
    parts = [loss(torch.arange(1.0, 5.0) + 0.5 * i, one, two) for i in range(2)]
    expected = torch.autograd.grad(parts[0] + parts[1], (one, two))
    for found in in_ranks(run):
        assert_close(found, expected)


LISTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "beside two": lambda x, n, w: torch._foreach_mul([x, n], [w, w]),
    "in both rows": lambda x, n, w: torch._foreach_add([w, w], [n, x]),
    "several": lambda x, n, w: torch._foreach_addcmul([n, w], [w, x], [n, n], value=0.5),
    "in place": lambda x, n, w: into(n, x, lambda z: torch._foreach_add_(z, [w, w])),
    "in place, one beside all": lambda x, n, w: into(n, x, lambda z: torch._foreach_mul_(z, w.sum())),
}


def into(n: Tensor, x: Tensor, write: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    z = [n * 1.0, x * 1.0]
    write(z)
    return z


@pytest.mark.parametrize("name", LISTS)
def test_the_same_leaf_beside_what_varies_and_what_does_not(name: str) -> None:
    def loss(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        one, two = LISTS[name](x, n, w)
        return ((one + two) * x).sum()

    def run() -> Any:
        with mc.check_vma():
            x, n, w = of("dp"), of(()), weight()
            return torch.autograd.grad(loss(x, n, w), w)

    w = torch.arange(1.0, 5.0, requires_grad=True)
    parts = [loss(torch.arange(1.0, 5.0) + 0.5 * i, torch.arange(1.0, 5.0), w) for i in range(2)]
    expected = torch.autograd.grad(parts[0] + parts[1], w)
    for found in in_ranks(run):
        assert_close(found, expected)


def test_two_of_a_list_have_the_same_memory_and_other_types() -> None:
    """What was written into both is in all of that."""

    def run() -> list[Any]:
        found = []
        with mc.check_vma():
            for into in (torch._foreach_add_, lambda a, b: torch._foreach_add_(a[::-1], b[::-1])):
                x = of(()) * 1.0
                one, two = (mc.mark_varying(x.detach(), axis) for axis in ("dp", "tp"))
                into([one, two], [of("dp"), of("tp")])
                found += [mc.varying_axes(each) for each in (x, one, two)]
        return found

    assert in_ranks(run) == [[{"dp", "tp"}] * 6] * 4


def test_data_that_is_set_leaves_the_graph_as_it_varies() -> None:
    """It has had its pvary: another one would sum the gradient twice."""

    def run() -> Any:
        with mc.check_vma():
            x, n, w = of("dp"), of(()), weight()
            y = w * x
            y.data = n * 1.0
            return mc.varying_axes(y), torch.autograd.grad((y * x).sum(), w)[0].tolist()

    squares = [2 * a * a + a + 0.25 for a in (1.0, 2.0, 3.0, 4.0)]
    assert in_ranks(run) == [({"dp"}, squares)] * 4


class Scale(torch.autograd.Function):
    """What it gives is of types that meet there, neither of which has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * w.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, g * x


def test_a_custom_function_out_of_sight_whose_result_was_seen() -> None:
    apply: Any = super(torch.autograd.Function, Scale).apply

    def run() -> None:
        with mc.check_vma():
            x, w = of("dp"), weight()
            for _ in range(3):
                y = apply(x, w)
            with pytest.raises(mc.VaryingError, match="mul .* ScaleBackward, that was called out of sight"):
                y * w

    in_ranks(run)


def test_what_is_remembered_of_a_type_is_whole_when_others_see_it() -> None:
    """Ranks of one process have types in common: one may look at any line of another one."""
    kind = Type({})
    seen: list[Type] = []

    def look(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is Type.seen.__code__:
            if event == "line" and kind._twin is not None:
                seen.append(kind._twin)
                assert kind._twin.plain
                assert kind._twin._twin is kind
            return look
        return None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        kind.seen(False)
    finally:
        sys.settrace(before)
    assert seen


def test_lasting_notes_hold_no_tensors() -> None:
    """What is remembered for the next checks are types."""

    def run() -> bool:
        with mc.check_vma():
            for program in PROGRAMS.values():
                program()
        return True

    assert all(in_ranks(run))
    kinds = {
        type(each)
        for key in grid().short
        if type(key) is tuple
        for part in key[1:]
        for each in (part if type(part) is tuple else (part,))
    }
    assert kinds <= {Type, type(None)}


def test_the_last_pvary_is_forgotten_with_the_value() -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            x, w = of("dp"), weight()
            checker: Any = mc.watch.here.watcher

            def held() -> list[int]:
                return [len(checker._pvaried), len(checker._lately), len(checker._newest)]

            for _ in range(3):
                y = x * w
            found = [held()]
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            found.append(held())
            y = x * w
            del w
            y.sum().backward()
            return [*found, held()]

    assert in_ranks(run) == [[[1, 1, 1], [1, 0, 0], [0, 0, 0]]] * 4


def test_a_leaf_is_noted_as_one_from_when_it_is_one() -> None:
    with mc.use_mesh(mc.make_mesh({"x": 1})), mc.check_vma():
        w = torch.ones(2).detach().requires_grad_()
        noted = marked(w)
        assert noted is not None
        assert not noted.plain
        v = torch.ones(2)
        v.requires_grad = True
        noted = marked(v)
        assert noted is not None
        assert not noted.plain
        w.requires_grad_(False)
        assert not (w * 1.0).requires_grad


@torch.library.custom_op("meshcomm_tests_short::layer_norm", mutates_args=())
def with_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return x - x.mean(), x.mean()


@torch.library.custom_op("meshcomm_tests_short::zeros_like", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_an_operator_of_somebody_else_has_the_name_of_one_of_torchs() -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            x = of("dp")
            given = [y for _ in range(4) for y in (*with_mean(x), doubled(x))]
            return [mc.varying_axes(y) for y in given]

    assert in_ranks(run) == [[{"dp"}] * 12] * 4


def test_who_has_read_before_what_was_written_takes_nothing_back() -> None:
    """Ranks of one process have in common what is remembered, and one may go on anywhere in what another one does."""
    now = object()
    read = iter([frozenset({"dp"}), frozenset()])

    class There(Grid):
        written = property(lambda self: next(read), lambda self, value: None)  # type: ignore[assignment]

    class Here(Shorts):
        grid = There(SHAPE, (0, 1, 2, 3))

    class Seen(Short):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "wide_one" and late:
                looks._looks(self, late.pop())

    late: list[object] = []
    looks, short = Here(), Seen(kind_of(torch.nn.functional.relu), [Type({})], Type({}), Here.grid)
    late.append(object())
    assert looks._looks(short, now)
    assert (short.looked, short.wide_one) == (now, True)


def test_what_is_asked_again_and_of_a_size_that_varies() -> None:
    def run() -> list[Any]:
        with mc.check_vma():
            x = of("dp", 2, 2)
            known = [x.size(0), x.size(0), x.size(-1), x.dim(), x.dim(), tuple(x.size()), x.size(dim=1)]
            assert x.is_same_size(x)
            with pytest.raises(mc.VaryingError, match="size.*makes a Python value of a tensor that varies"):
                x.size(mc.axis_index("dp"))  # type: ignore[call-overload]
            return known

    assert in_ranks(run) == [[2, 2, 2, 2, 2, (2, 2), 2]] * 4


def test_what_was_saved_with_a_type_has_none() -> None:
    with mc.use_mesh(mc.make_mesh({"x": 1})):
        x = pickle.loads(pickle.dumps(mc.mark_varying(torch.ones(2), "x")))
        with mc.check_vma():
            for _ in range(3):
                assert x.size(0) == 2
                y, z = x * x, torch.addcmul(torch.ones(2), x, x)
        for each in (x, y, z):
            with pytest.raises(mc.VaryingError, match="unknown"), mc.check_vma():
                mc.varying_axes(each)


def test_what_was_written_on_one_mesh_is_looked_for_on_all() -> None:
    """Also on one that is made later."""
    with mc.use_mesh(mc.make_mesh({"one": 1})), mc.check_vma():
        first = grid_of(mc.current_mesh())  # type: ignore[arg-type]
        mc.mark_varying(torch.ones(2), "one").mul_(mc.mark_varying(torch.ones(2), "one"))
        assert "one" in first.written
    mc.shutdown()
    with mc.use_mesh(mc.make_mesh({"of_no_other_test": 1})):
        assert grid_of(mc.current_mesh()).written == ANY  # type: ignore[arg-type]


def test_a_type_is_the_same_each_time_that_it_is_made_in_one_place() -> None:
    """Else nothing of what is remembered would be found in the next step."""

    def types() -> list[Type | None]:
        @mc.shard_map(in_specs=("b", "(dp b)"), out_specs="")
        def loss(w: Tensor, x: Tensor) -> Tensor:
            checker: Any = mc.watch.here.watcher
            found.append(checker.type_of(x))
            return mc.all_reduce((x * w).sum(), "dp")

        found: list[Type | None] = []
        for _ in range(3):
            loss(torch.ones(4, requires_grad=True), torch.ones(4)).backward()
        return found

    with mc.use_mesh(mc.make_mesh({"dp": 1})):
        one, two, three = types()
    assert one is two is three is not None
