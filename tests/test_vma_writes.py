"""Writes that the checker of varying types sees: into views and bases, and past remembered pvarys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from vma_twins import F64, LINE, Program, check, data, of_ranks, zeros

import meshcomm as mc
from meshcomm.spmd.types.grids import grid_of
from meshcomm.spmd.types.rules import at_once
from meshcomm.spmd.types.rules.torch_rules import kind_of
from meshcomm.spmd.types.vma import marked

# ------------------------------------------------------------------------------- a whole overwrite of a view or a base

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda z: z[2:],
    "narrow": lambda z: z.narrow(0, 2, 2),
    "select": lambda z: z.view(2, 2).select(0, 1),
    "of a view": lambda z: z.view(2, 2)[1:].view(2),
    "transposed": lambda z: z.view(2, 2).t()[:, 1],
    "diagonal": lambda z: z.view(2, 2).diagonal(),
    "as_strided": lambda z: z.as_strided((2,), (1,), 2),
    "unsqueezed": lambda z: z.unsqueeze(0)[0, 2:],
    "real": lambda z: torch.view_as_complex(z.view(2, 2)).real,
    "imag": lambda z: torch.view_as_complex(z.view(2, 2)).imag,
    "every second": lambda z: z[::2],
}

OVERWRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda v, s: v.copy_(s),
    "aten": lambda v, s: torch.ops.aten.copy_.default(v, s),
    "unbound": lambda v, s: torch.Tensor.copy_(v, s),
    "fill_": lambda v, s: v.fill_(s[0]),
    "zero_, add_": lambda v, s: v.zero_().add_(s),
    "zero_, +=": lambda v, s: v.zero_().__iadd__(s),
    "fill_, mul_": lambda v, s: v.fill_(1.0).mul_(s),
    "normal_, copy_": lambda v, s: v.normal_().copy_(s),
    "init, lerp_": lambda v, s: nn.init.zeros_(v).lerp_(s, 0.5),
    "setitem": lambda v, s: v.__setitem__(..., s),
    "zero_, index_copy_": lambda v, s: v.zero_().index_copy_(0, torch.tensor([0, 1]), s),
    "zero_, scatter_": lambda v, s: v.zero_().scatter_(0, torch.tensor([1, 0]), s),
    "zero_, masked_scatter_": lambda v, s: v.zero_().masked_scatter_(torch.tensor([True, True]), s),
    "zero_, addcmul_": lambda v, s: v.zero_().addcmul_(s, s),
    "foreach": lambda v, s: (torch._foreach_zero_([v]), torch._foreach_add_([v], [s])),
    "copy_, relu": lambda v, s: F.relu(v.copy_(s), inplace=True),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", OVERWRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_of_a_view_whose_base_varies(view: str, how: str) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        z = zeros(4)
        z[:2] = x
        OVERWRITES[how](VIEWS[view](z), s)
        return (z * x.repeat(2)).sum() + (VIEWS[view](z) * x).sum()

    check(program)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", OVERWRITES)
@pytest.mark.parametrize("view", ["slice", "transposed", "unsqueezed"])
def test_of_a_base_with_a_view_that_varies(view: str, how: str) -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        z = x.clone()
        v = {"slice": z[:2], "transposed": z.t(), "unsqueezed": z.unsqueeze(0)}[view]
        OVERWRITES[how](z, s)
        return (v * x).sum()

    check(program)


def whole_base(s: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    v = z[:1]
    z.copy_(s)
    return (v * x[:1]).sum()


def base_after_zero(s: Tensor, x: Tensor) -> Tensor:
    """Overwritten with what is invariant it is invariant, and the view is still not."""
    z = x.clone()
    v = z[:1]
    z.zero_()
    z += s
    return (v * x[:1]).sum()


def base_without_graph(s: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    v = z.view(1, 2)
    with torch.no_grad():
        z.copy_(s)
    z.mul_(s)
    return (v * x).sum()


def expanded(s: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    v = z.expand(3, 2)
    z.copy_(s)
    return (v * x).sum()


def declared_view(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(4)
    v = mc.mark_varying(z[:2], "dp")
    z.copy_(s.repeat(2))
    return (v * x).sum()


def by_rows(s: Tensor, x: Tensor) -> Tensor:
    z, total = zeros(3, 2), x.sum() * 0
    for i in range(3):
        z[i].copy_(x if i % 2 else s)
        total = total + (z[i] * x).sum()
    return total


def of_another_view(s: Tensor, x: Tensor) -> Tensor:
    """Both are in the graph of the pvary that is made in place of what they are views of."""
    z = s * 2.0
    z[:1].addcmul_(z[1:], x[:1])
    return (z * x).sum()


def of_another_view_once_varied(s: Tensor, x: Tensor) -> Tensor:
    z = s * 2.0
    before = (z * x).sum()
    z[:1] += z[1:]
    z.view(1, 2).add_(z.view(1, 2))
    return before + (z * x).sum()


def detached_alias(s: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    d = z.detach()
    v = d[:1]
    d.copy_(s)
    return (v * x[:1]).sum() + (d * x).sum()


def buffer_used_again(s: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    z.copy_(s)
    v = z[:1]
    return (z * x).sum() + (v * x[:1]).sum()


def two_buffers(s: Tensor, x: Tensor) -> Tensor:
    z = zeros(2, 2, 2)
    a, b = z[0], z[1]
    a[0].copy_(x)
    b[0].copy_(s)
    a[1].copy_(s)
    return (a * x).sum() + (b * x).sum()


@pytest.mark.parametrize(
    "program",
    [
        whole_base, base_after_zero, base_without_graph, expanded, declared_view, by_rows, detached_alias,
        buffer_used_again, two_buffers, of_another_view, of_another_view_once_varied,
    ],
)  # fmt: skip
def test_overwritten(program: Program) -> None:
    check(program)


def test_where_a_pvary_is_due_it_is_named() -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        z = zeros(4)
        z[:2] = x
        z[2:].copy_(s)
        return (z[2:] * x).sum()

    with pytest.raises(mc.VaryingError, match=r"copy_ at test_vma_writes.* invariant along 'dp', where others vary"):
        of_ranks(program, "error")


def test_a_buffer_without_views_is_invariant_again() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        z = x.detach().clone()
        z.copy_(w)
        return z * 2

    w = torch.ones(2, dtype=F64, requires_grad=True)
    fn = mc.shard_map(body, mesh=mc.make_mesh(LINE), in_specs=("(dp n)", "n"), out_specs="n")
    assert torch.autograd.grad(fn(data(), w).sum(), w)[0].tolist() == [2.0, 2.0]


# ------------------------------------------------------------------------------------- a pvary of what was another value

Sum = Callable[[Tensor], Tensor]
Training = Callable[[nn.Linear, Tensor, Sum], "list[Tensor]"]


def model() -> nn.Linear:
    made = nn.Linear(2, 2, bias=False, dtype=F64)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[0.3, -0.2], [0.5, 0.4]]))
    return made


def loss(m: nn.Module, x: Tensor, total: Sum) -> Tensor:
    return total(m(x).square().sum())


def results(m: nn.Linear, x: Tensor, total: Sum, first: Tensor) -> list[Tensor]:
    """A loss from before, one of now, and its gradient."""
    again = loss(m, x, total)
    return [first.detach(), again.detach(), torch.autograd.grad(again, m.weight)[0]]


def rank_trains(program: Training) -> list[Tensor]:
    with mc.use_mesh(mc.make_mesh(LINE)) as mesh:
        m = mc.mark_varying(model(), ())
        x = mc.mark_varying(data().detach().view(2, 2)[mesh.rank :][:1].clone(), "dp")
        with mc.check_vma():
            return program(m, x, lambda y: mc.all_reduce(y, "dp"))


def new_data(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    m.weight.data = m.weight.data * 2
    return results(m, x, total, first)


def data_transposed(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    """In the same memory."""
    first = loss(m, x, total)
    m.weight.data = m.weight.data.t()
    return results(m, x, total, first)


def data_out_of_sight(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    with mc.check_vma(False):
        m.weight.data = m.weight.data * 2
    return results(m, x, total, first)


def transposed_out_of_sight(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    with mc.check_vma(False):
        m.weight.data = m.weight.data.t()
    return results(m, x, total, first)


def written_out_of_sight(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    with mc.check_vma(False), torch.no_grad():
        m.weight.mul_(2)
    return results(m, x, total, first)


def from_a_vector(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    vector = nn.utils.parameters_to_vector(m.parameters()).detach() * 3
    nn.utils.vector_to_parameters(vector, m.parameters())
    return results(m, x, total, first)


def to_another_dtype(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    m.to(torch.float32)
    return results(m, x.float(), total, first)


def there_and_back(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    m.half().double()
    return results(m, x, total, first)


def state_loaded(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})
    return results(m, x, total, first)


def initialised_again(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    nn.init.constant_(m.weight, 0.3)
    return results(m, x, total, first)


def not_trained_for_a_while(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    m.weight.requires_grad_(False).mul_(2).requires_grad_(True)
    return results(m, x, total, first)


def set_to_another(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    first = loss(m, x, total)
    with torch.no_grad():
        m.weight.data = torch.ones(2, 2, dtype=F64)
        m.weight.data.mul_(3)
    return results(m, x, total, first)


def steps(m: nn.Linear, x: Tensor, total: Sum, step: Callable[[nn.Parameter], Any]) -> list[Tensor]:
    losses = []
    for _ in range(3):
        losses.append(loss(m, x, total))
        losses[-1].backward()
        step(m.weight)
        m.weight.grad = None
    return [*(each.detach() for each in losses), m.weight.detach()]


def gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def steps_by_new_data(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    def step(p: nn.Parameter) -> None:
        p.data = p.data - 0.1 * gradient(p)

    return steps(m, x, total, step)


def steps_on_data(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    return steps(m, x, total, lambda p: p.data.sub_(0.1 * gradient(p)))


def steps_in_backward(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.data = p.data - 0.1 * p.grad

    m.weight.register_post_accumulate_grad_hook(hook)
    return steps(m, x, total, lambda p: None)


def steps_in_backward_in_place(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.sub_(0.1 * p.grad)

    m.weight.register_post_accumulate_grad_hook(hook)
    return steps(m, x, total, lambda p: None)


def steps_of_optimizers(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    found: list[Tensor] = []
    for kwargs in ({}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, **kwargs)
        found += steps(m, x, total, lambda p, step=optimizer.step: step())  # type: ignore[misc]
    return found


def view_of_old_data(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    """It keeps the old memory, and its base has a new one."""
    row = m.weight[0]
    m.weight.data = m.weight.data * 2
    y = total((x * m.weight[0]).sum() + (x * row * row).sum())
    return [y.detach(), torch.autograd.grad(y, m.weight)[0]]


def detached_in_place(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    """The same object and version, and another place in the graph."""
    h = m.weight * 2
    first = total((x @ h).sum())
    h.detach_().requires_grad_()
    again = total((x @ h).sum())
    return [first.detach(), again.detach(), torch.autograd.grad(again, h)[0]]


def activation_with_new_data(m: nn.Linear, x: Tensor, total: Sum) -> list[Tensor]:
    h = m.weight.sum(0).detach().requires_grad_()
    first = total((x * h).sum())
    h.data = h.data * 2
    again = total((x * h * h).sum())
    return [first.detach(), again.detach(), torch.autograd.grad(again, h)[0]]


@pytest.mark.parametrize(
    "program",
    [
        new_data, data_transposed, data_out_of_sight, transposed_out_of_sight, written_out_of_sight, from_a_vector,
        to_another_dtype, there_and_back, state_loaded, initialised_again, not_trained_for_a_while, set_to_another,
        steps_by_new_data, steps_on_data, steps_in_backward, steps_in_backward_in_place, steps_of_optimizers,
        view_of_old_data, detached_in_place, activation_with_new_data,
    ],
)  # fmt: skip
def test_the_new_value_is_used(program: Training) -> None:
    right = program(model(), data().detach().view(2, 2), lambda y: y)
    for mine in mc.launch(rank_trains, ranks=2, args=(program,)):
        assert_close(mine, right)


@pytest.mark.parametrize("method", ["add_", "sub_", "mul_", "div_", "pow_", "__iadd__", "__imul__"])
def test_what_is_computed_in_place_of_one_type_is_told_to_all_that_have_the_memory(method: str) -> None:
    """The short way of operations in place, and where it may not be gone."""

    def main() -> list[Any]:
        with mc.use_mesh(mc.make_mesh({"dp": 2})), mc.check_vma():
            x, y = (mc.mark_varying(torch.rand(4) + 1, "dp") for _ in range(2))
            part = mc.mark_varying(x[:2], ())
            fresh, even = x * y, torch.ones(4)
            found = [mc.varying_axes(getattr(fresh, method)(y)), mc.varying_axes(fresh)]
            getattr(x, method)(y)
            found += [mc.varying_axes(part), mc.varying_axes(x.detach()), mc.varying_axes(x * even)]
            found.append(mc.varying_axes(getattr(even, method)(torch.ones(4))))
            found.append(mc.varying_axes(getattr(even, method)(x)))
            leaf = mc.mark_varying(torch.ones(4, requires_grad=True), ())
            with torch.no_grad(), pytest.raises(mc.VaryingError):
                getattr(leaf, method)(x)
            inner = leaf.detach()
            getattr(inner, method)(torch.ones(4))
            with pytest.raises(mc.VaryingError):
                getattr(inner, method)(x)
        return found

    varying, invariant = frozenset({"dp"}), frozenset()
    assert mc.launch(main, ranks=2) == [[*[varying] * 5, invariant, varying]] * 2


KINDS: dict[str, Callable[[], Tensor]] = {
    "varying": lambda: mc.mark_varying(torch.rand(4) + 1, "dp"),
    "invariant": lambda: torch.ones(4),
    "computed": lambda: torch.rand(4) + mc.axis_index("dp"),
    "unknown": lambda: torch.ones(4),
    "reduced": lambda: mc.all_reduce(mc.mark_varying(torch.ones(4), "dp"), "dp"),
    "of two dims": lambda: mc.mark_varying(torch.ones(3, 4), "dp")[0],
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "sparse": lambda: mc.mark_varying(torch.ones(4).to_sparse(), "dp"),
    "inference": lambda: torch.inference_mode()(lambda: torch.ones(4))(),
}

SHORT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum, dim": lambda x, y: x.sum(dim=0),
    "sum, dims": lambda x, y: torch.sum(x + y, dim=(0,), keepdim=True),
    "softmax": lambda x, y: F.softmax(x, dim=-1),
    "view": lambda x, y: x.view((2, 2)),
    "add, alpha": lambda x, y: torch.add(x, y, alpha=2),
    "add, other": lambda x, y: torch.add(x, other=y),
    "add, out": lambda x, y: torch.add(x, x, out=y),
    "overload, out": lambda x, y: torch.ops.aten.max.dim_max(x[None], 0, max=y, max_values=torch.ones(4).long()),
    "cat": lambda x, y: torch.cat([x, y], dim=0),
    "stack, of three": lambda x, y: torch.stack([x, y, x + y]),
    "index": lambda x, y: x[1],
    "index, slices": lambda x, y: x[None, 1:3][..., ::1],
    "parts": lambda x, y: x.split(2),
    "mT": lambda x, y: x.view(2, 2).mT,
    "real": lambda x, y: x.real,
    "as it is": lambda x, y: x.contiguous(),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=2),
    "through a view": lambda x, y: (x[:2], x.mul_(y), x[:2].mul_(y[:2]), x[1:])[::2],
    "max": lambda x, y: x.max(dim=0),
    "add_": lambda x, y: x.add_(y, alpha=2),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "clamp_": lambda x, y: x.clamp_(min=0.0, max=2.0),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 0.0),
    "copy_": lambda x, y: x.copy_(y, non_blocking=True),
    "copy_, of a list": lambda x, y: x[:2].copy_(y[:2]),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(2.0),
    "fill_, of a tensor": lambda x, y: x.fill_(y[0]),
    "setitem": lambda x, y: x.__setitem__(1, y[2]),
    "setitem, of a number": lambda x, y: x.__setitem__((slice(1, 3),), 2.0),
    "setitem, by a mask": lambda x, y: x.__setitem__(y > 1, x[0]),
    "one kernel": lambda x, y: (-x, x.exp() - 2.0, x * y, torch.relu(x + y)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", SHORT)
def test_the_short_way_notes_what_the_long_one_does(how: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs of kinds, twice in turn: the types of all that was there and of what came out, or the error."""

    def told(x: Tensor) -> Any:
        try:
            return mc.varying_axes(x)
        except mc.VaryingError as error:
            return str(error).split(" at ")[0]

    def of_pair(one: str, other: str) -> list[Any]:
        x, y = KINDS[one](), KINDS[other]()
        seen = [x.detach() if x.requires_grad else x.view(4) if one != "sparse" else x, y]
        with mc.check_vma(False):
            x, y = (torch.frombuffer(bytearray(16), dtype=torch.float32) if z == "unknown" else v
                    for z, v in ((one, x), (other, y)))  # fmt: skip
        found: list[Any] = []
        for _ in range(2):
            try:
                result = SHORT[how](x, y)
            except (mc.VaryingError, RuntimeError, TypeError) as error:
                found.append((type(error), str(error).split(" at ")[0]))
                break
            results = result if isinstance(result, tuple) else [] if result is None else [result]
            found += [told(z) for z in (*results, x, y, *seen)]
        return found

    def main() -> dict[tuple[str, str], list[Any]]:
        with mc.use_mesh(mc.make_mesh({"dp": 2})), mc.check_vma(), torch.set_grad_enabled(grad):
            return {(one, other): of_pair(one, other) for one in KINDS for other in KINDS}

    short = mc.launch(main, ranks=2)
    monkeypatch.setattr(at_once, "KINDS", AllLong())
    monkeypatch.setattr(grid_of(SimpleNamespace(shape={"dp": 2}, ranks=(0, 1))), "short", {})
    for mine, long in zip(short, mc.launch(main, ranks=2), strict=True):
        assert mine == long


class AllLong(dict[Any, Any]):
    """Functions as the checker reads them, none of which is seen at once."""

    def __missing__(self, func: Any) -> Any:
        return replace(kind_of(func), way=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("runs", [lambda x: x * torch.ones(3), lambda x: x.add_(torch.ones(3)), lambda x: x.view(5)])
def test_an_operation_that_fails_has_run_once(runs: Callable[[Tensor], Tensor]) -> None:
    """Its error is torch's, and no reason to try it another way."""

    def main() -> None:
        x = mc.mark_varying(torch.ones(4), "dp")
        counted = Counted()
        with counted, mc.use_mesh(mc.make_mesh({"dp": 2})), mc.check_vma(), pytest.raises(RuntimeError):
            runs(x)
        assert counted.failed == 1

    mc.launch(main, ranks=2)


class Counted(TorchDispatchMode):
    """How many operations have failed."""

    failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            self.failed += 1
            raise


def test_what_meets_something_wider_varies_since_its_own_line() -> None:
    """Of two lines with the same operation of the same types, time and again, each is the origin of its own result."""

    def main() -> None:
        x, w = mc.mark_varying(torch.ones(4), "dp"), mc.mark_varying(torch.ones(4), ())
        with mc.use_mesh(mc.make_mesh({"dp": 2})), mc.check_vma():
            for _ in range(3):
                one = x * w
                other = x * w
                lines = [
                    [int(str(origin).rsplit(":", 1)[1]) for origin in marked(y).since.values()] for y in (one, other)
                ]
                assert lines[1] == [lines[0][0] + 1]

    mc.launch(main, ranks=2)
