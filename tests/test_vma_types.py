"""Which type the checker gives a result, and what writes and marks make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from vma_checks import LINE, I, N, V, host, kind, on_ranks, ones, own, same, zeros

import meshcomm as mc
from meshcomm.spmd.types.rules.torch_rules import READS, READS_ROWS, kind_of

TYPES: dict[str, tuple[Callable[[], Any], frozenset[str] | None]] = {
    "numbers": (lambda: torch.tensor([1.0, 2.0]), I),
    "a number of numpy": (lambda: torch.tensor(np.float64(1.0)), I),
    "a list of tensors": (lambda: torch.tensor([own().sum(), own().sum()]), V),
    "an array": (lambda: torch.tensor(np.ones(3)), None),
    "somebody's memory": (lambda: torch.from_numpy(np.ones(3)), None),
    "as_tensor of an array": (lambda: torch.as_tensor(np.ones(3)), None),
    "zeros_like": (lambda: torch.zeros_like(own()), I),
    "ones_like": (lambda: torch.ones_like(own()), I),
    "empty_like": (lambda: torch.empty_like(own()), I),
    "full_like": (lambda: torch.full_like(own(), 2.0), I),
    "new_zeros": (lambda: own().new_zeros(3), I),
    "new_ones": (lambda: own().new_ones(3), I),
    "new_full": (lambda: own().new_full((3,), 2.0), I),
    "new_empty": (lambda: own().new_empty(3), I),
    "a leaf like one that varies": (lambda: torch.zeros_like(own()).requires_grad_(), V),
    "a leaf of zeros": (lambda: zeros(3).requires_grad_(), I),
    "to": (lambda: zeros(3).to(own()), I),
    "to, varying": (lambda: own().to(zeros(3)), V),
    "type_as": (lambda: zeros(3).type_as(own()), I),
    "expand_as": (lambda: zeros(3).expand_as(own()), I),
    "view_as": (lambda: own().view_as(zeros(2, 3)), V),
    "an index of its own": (lambda: zeros(3)[mc.axis_index("dp")], V),
    "arange": (lambda: torch.arange(3), I),
    "detach": (lambda: own().detach(), V),
    "numel": (lambda: zeros(own().numel()), I),
    "overwritten": (lambda: own().zero_(), I),
    "copied over": (lambda: own().copy_(zeros(2, 3)), I),
    "copied into": (lambda: zeros(2, 3).copy_(own()), V),
    "a copied part": (lambda: own()[0].copy_(zeros(3))._base, V),
    "of unknown": (lambda: host() * 2, None),
    "into which unknown was written": (lambda: zeros(3).copy_(host()), None),
    "into which unknown was added": (lambda: zeros(3).add_(host()), None),
    "unknown, overwritten": (lambda: host().fill_(1.0), I),
    "a leaf that is initialised": (lambda: nn.init.ones_(nn.Parameter(torch.empty(3))), I),
    "a gradient": (lambda: torch.autograd.grad((same()[:2] * own()).sum(), own_leaf := same(), allow_unused=True)[0] or own_leaf, I),
    "random": (lambda: torch.rand(3), V),
    "like, random": (lambda: torch.rand_like(zeros(3)), V),
    "initialised at random": (lambda: nn.init.normal_(torch.empty(3)), V),
    "a shape of its own": (lambda: own()[own() > 1], V),
    "deepcopy": (lambda: copy.deepcopy(own()), V),
    "deepcopy of a buffer": (lambda: copy.deepcopy(zeros(3)), I),
    "transposed in place": (lambda: own().t_(), V),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_types_of_results(name: str) -> None:
    make, expected = TYPES[name]
    assert on_ranks(lambda: kind(make())) == [expected] * N


def test_metadata_in_place_writes_nothing() -> None:
    """What pvary gives shares the memory of what it takes."""

    def run() -> Any:
        w = same()
        y = mc.pvary(w.detach(), "dp")
        y.requires_grad_()
        y.detach().squeeze_().unsqueeze_(0)
        return kind(y), kind(w), kind(w.detach())

    assert on_ranks(run) == [(V, I, I)] * N


def test_what_is_written_is_found_by_a_later_check() -> None:
    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        buffer = mc.mark_varying(zeros(3), (), mesh=mesh)
        row = buffer[1:]
        with mc.use_mesh(mesh):
            with mc.check_vma():
                buffer.detach().copy_(own()[0])
            with mc.check_vma():
                found = kind(buffer), kind(row)
            mc.mark_varying(buffer, ())
            with mc.check_vma("error"):
                return *found, kind(buffer)

    assert mc.launch(run, ranks=N) == [(V, V, I)] * N


def test_a_marked_view_says_nothing_of_its_base() -> None:
    def run() -> Any:
        with mc.check_vma(False):
            base = ones(2, 3)
            a, b = base[0], base[1]
        mc.mark_varying(a, ())
        return kind(a), kind(a[1:]), kind(b), kind(base)

    assert on_ranks(run) == [(I, I, None, None)] * N


def test_marks_hold_for_the_object() -> None:
    def run() -> Any:
        x = zeros(3)
        assert mc.mark_varying(x, "dp") is x
        tree = mc.mark_varying({"a": [zeros(2), zeros(3)]}, ("dp",))
        module = mc.mark_varying(nn.BatchNorm1d(3), ())
        return kind(x), [kind(y) for y in tree["a"]], {kind(y) for y in [*module.parameters(), *module.buffers()]}

    assert on_ranks(run) == [(V, [V, V], {I})] * N


def test_mark_varying_refuses() -> None:
    mesh = mc.make_mesh(LINE)
    with pytest.raises(mc.MeshError, match="no axis 'tp'"):
        mc.mark_varying(zeros(1), "tp", mesh=mesh)
    with pytest.raises(mc.MeshError, match=r"x\['a'\] is no tensor but int"):
        mc.mark_varying({"a": 1}, ())
    with pytest.raises(mc.MeshError, match="axes=1"):
        mc.mark_varying(zeros(1), 1)  # type: ignore[arg-type]
    with pytest.raises(mc.MeshError, match="check_vma='yes'"), mc.check_vma("yes"):
        pass
    with pytest.raises(mc.MeshError, match=r"outside|mc\.launch"), mc.check_vma(mesh=mesh):
        pass


def test_what_writes_into_its_operands_is_not_taken_for_pure() -> None:
    """By torch's own schemas: what writes without a name that says so, too."""
    for func in (
        torch.fused_moving_avg_obs_fake_quant, torch.batch_norm, torch.embedding_renorm_, Tensor.add_, Tensor.__setitem__,
        torch.nn.functional.rrelu, torch.arange, torch.tensor, torch.nn.functional.threshold,
    ):  # fmt: skip
        assert kind_of(func).way not in (READS, READS_ROWS), func
    x, index = torch.ones(2), torch.tensor([0])
    for func, args, kwargs in (
        (torch.nn.functional.relu, (x, True), None),
        (torch.nn.functional.relu, (x,), {"inplace": True}),
        (torch.nn.functional.dropout, (x, 0.0, True, True), None),
        (torch.ones, (2,), {"requires_grad": True}),
        (torch.nn.functional.embedding, (index, x[:, None], None, 1.0), None),
        (torch.nn.functional.embedding, (index, x[:, None]), {"max_norm": 1.0}),
        (torch.zeros_like, (x,), {"requires_grad": True}),
        (Tensor.__getitem__, (x, x > 0.0), None),
        (torch.where, (x > 0.0,), None),
    ):
        unless = kind_of(func).unless
        assert unless is not None
        assert unless(args, kwargs), func
    for func in (
        torch.add,
        Tensor.mul,
        torch.relu,
        torch.matmul,
        Tensor.view,
        Tensor.transpose,
        Tensor.__getitem__,  # it has no schema, and only reads
        torch.nn.functional.gelu,
    ):
        assert kind_of(func).way in (READS, READS_ROWS), func


def test_every_function_of_torch_can_be_read() -> None:
    """``record_stream`` has an argument of a type that torch itself has no name for: it was a NameError under a check."""
    for func in {func for each in get_overridable_functions().values() for func in each} | {Tensor.record_stream}:
        assert kind_of(func).name
