"""Modules that adaptors have spread, under the checker of varying types: training is that of one rank, in each mode."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel import (
    Cut,
    clip_grad_norm,
    data_parallel,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    tensor_parallel,
)

F64 = torch.float64
D, E, B, S = 4, 4, 4, 8
BOTH = ("a", "b")
EXPERTS = {"*.experts": "a"}
Way = Callable[[nn.Module], tuple[Any, str | None]]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, 8) / 2), nn.Parameter(torch.randn(E, 8, D) / 2)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        hidden = torch.tanh(parallel.grouped_matmul(rows, self.up, counts))
        return parallel.grouped_matmul(hidden, self.down, counts)


class Block(nn.Module):
    """Attention over a sequence that may be cut, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.router, self.experts = nn.Linear(D, E), Experts()
        self.cp: str | None = None
        self.ep, self.again = "one", False

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, -1, D // 2)).permute(2, 0, 3, 1, 4)
        seen = parallel.context_attention(*heads, axis=self.cp)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return checkpoint(self.mixed, x, use_reentrant=False) if self.again else self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, choice = self.router(rows).softmax(-1).topk(2)
        return x + parallel.experts(rows, choice, weight, self.experts, axis=self.ep, count=E).view_as(x)


def made(again: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block(), nn.Linear(D, 2)).to(F64)
    for part in (net[0], net[1]):
        part.again = again
    return net


def cut(net: Any, ep: str, cp: str | None = None) -> None:
    for block in (net[0], net[1]):
        block.ep, block.cp = ep, cp
        tensor_parallel(block.experts, {"*": Cut(0)}, axis=ep)


def by_axes(net: nn.Module) -> tuple[Any, str | None]:
    cut(net, "b")
    fully_shard(net, BOTH, grads="sum", axes=EXPERTS, units=[Block])
    return BOTH, None


def with_replicas(net: nn.Module) -> tuple[Any, str | None]:
    cut(net, "b")
    fully_shard(net, "a", grads="sum", replica_axis="b", axes=EXPERTS)
    return BOTH, None


def along_context(net: nn.Module) -> tuple[Any, str | None]:
    cut(net, "b", "b")
    fully_shard(net, BOTH, grads="sum", axes=EXPERTS, units=[Block])
    return "a", "b"


def in_data_parallel(net: nn.Module) -> tuple[Any, str | None]:
    cut(net, "b")
    data_parallel(net, BOTH, grads="sum", axes=EXPERTS)
    return BOTH, None


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def steps(net: nn.Module, x: Tensor, y: Tensor, over: Any) -> None:
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    for _ in range(2):
        sgd.zero_grad()
        loss = (net(x) - y).square().sum()
        (mc.all_reduce(loss, over) if over else loss).backward()
        clip_grad_norm(net, 50)
        sgd.step()


def alone() -> dict[str, Tensor]:
    with mc.use_mesh(mc.make_mesh({"one": 1})):
        net = made()
        steps(net, drawn(1, B, S, D), drawn(2, B, S, 2), None)
        return net.state_dict()


def trained(way: Way, mode: Any, marks: bool, inside: bool, again: bool) -> dict[str, Tensor] | None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        net = made(again)
        if marks:
            mc.mark_varying(net, ())
        with mc.check_vma(mode if inside else False):
            rows, cp = way(net)
        x, y = drawn(1, B, S, D), drawn(2, B, S, 2)
        if cp is not None:
            order = parallel.context_order(S, cp)
            x, y = (mc.shard(each[:, order], cp, 1) for each in (x, y))
        over = (*((rows,) if isinstance(rows, str) else rows), *(() if cp is None else (cp,)))
        x, y = mc.mark_varying((mc.shard(x, rows), mc.shard(y, rows)), over)
        with mc.check_vma(mode):
            load_full_state_dict(net, full_state_dict(net))
            steps(net, x, y, over)
            return full_state_dict(net, 0)


CASES = [
    (by_axes, "error", False, False, False),
    (by_axes, True, True, False, True),
    (with_replicas, "error", True, True, False),
    (along_context, True, False, True, False),
    (along_context, "error", False, False, True),
    (in_data_parallel, "error", False, False, False),
    (in_data_parallel, True, True, True, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_experts_and_context(case: Any) -> None:
    """Adaptors outside of the check and inside, with marks and without, computed again in backward or not."""
    found, *_ = mc.launch(trained, ranks=4, args=case)
    assert_close(found, alone(), rtol=1e-9, atol=1e-9)


def test_on_processes(pool4: Any) -> None:
    found, *_ = pool4.run(trained, *CASES[0])
    assert_close(found, alone(), rtol=1e-9, atol=1e-9)


def kinds_of(make: Callable[[nn.Module], Any], mark: Any, later: Any = None) -> list[Any]:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if mark is not None:
            mc.mark_varying(net, mark)
        make(net)
        if later is not None:
            mc.mark_varying(net, later)
        with mc.check_vma():
            return [*map(mc.varying_axes, (net[0].weight, net[0].bias, net[1].weight, net[1].bias))]


A, AB, I = frozenset("a"), frozenset("ab"), frozenset[str]()  # noqa: E741
PLAN: dict[str, Any] = {"0": "column", "1": "row"}


def cut_and_sharded(net: nn.Module) -> None:
    tensor_parallel(net, PLAN, axis="b")
    fully_shard(net, "a", grads="sum")


@pytest.mark.parametrize(
    ("make", "mark", "later", "expected"),
    [
        (cut_and_sharded, None, None, [AB, AB, AB, A]),
        (cut_and_sharded, (), None, [AB, AB, AB, A]),
        (cut_and_sharded, None, (), [AB, AB, AB, A]),
        (lambda net: fully_shard(net, "a", grads="sum"), "b", None, [AB, AB, AB, AB]),
        (lambda net: fully_shard(net, BOTH, grads="sum", axes={"0": "a"}), (), None, [AB, AB, AB, AB]),
        (lambda net: data_parallel(net, BOTH, grads="sum", axes={"0": "a"}), (), None, [frozenset("b")] * 2 + [I] * 2),
        (lambda net: data_parallel(net, BOTH, grads="sum"), None, None, [I] * 4),
    ],
)
def test_types_of_parameters(make: Any, mark: Any, later: Any, expected: list[Any]) -> None:
    """Who cuts a parameter says so, whatever was said of it before or after."""
    assert mc.launch(kinds_of, ranks=4, args=(make, mark, later)) == [expected] * 4


OTHERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "assigned": lambda net: (net.load_state_dict(net.state_dict(), assign=True), net)[1],
    "copied": copy.deepcopy,
    "converted": lambda net: net.to(torch.bfloat16).to(F64),
}


def with_other_parameters(make: Any, other: str, by_leaf: bool) -> list[float]:
    """What nobody has seen made stands where parts stood, and is said to be the same on all ranks."""
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(F64)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(p.bfloat16())
        make(net)
        torch.__future__.set_overwrite_module_params_on_conversion(other == "converted")
        try:
            net = OTHERS[other](net)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        mc.mark_varying([*net.parameters()] if by_leaf else net, ())
        x = mc.mark_varying(torch.ones(2, 4, dtype=F64, requires_grad=True), ())
        with mc.check_vma(True):
            net(x).square().sum().backward()
        assert x.grad is not None
        saved = io.BytesIO()
        torch.save(net[0].weight, saved)
        assert_close(torch.load(io.BytesIO(saved.getvalue())), net[0].weight)  # its notes are not saved
        return x.grad.tolist()


@pytest.mark.parametrize("other", OTHERS)
def test_parts_that_stand_where_others_stood(other: str) -> None:
    found = [
        mc.launch(with_other_parameters, ranks=4, args=(make, other, by_leaf))
        for make in (lambda net: tensor_parallel(net, PLAN, axis="b"), cut_and_sharded)
        for by_leaf in (False, True)
    ]
    expected, *_ = mc.launch(with_other_parameters, ranks=4, args=(lambda net: None, "assigned", False))
    for each, losses in zip(found, (1, 1, 2, 2), strict=True):  # fully_shard adds up the losses of its two ranks
        for mine in each:
            assert_close(torch.tensor(mine), losses * torch.tensor(expected), rtol=1e-12, atol=1e-12)


def refused(mode: Any) -> None:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        x = mc.mark_varying(torch.ones(2, 4), BOTH)
        for shard in (data_parallel, fully_shard):
            net: nn.Module = shard(nn.Linear(4, 4), "a", grads="sum")
            with (
                mc.check_vma(mode),
                pytest.raises(mc.VaryingError, match=r"unknown(?s:.)*mark_varying\(module, axes\)"),
            ):
                net(x)
        net = fully_shard(mc.mark_varying(nn.Linear(4, 4), ()), "a", grads="sum")
        with mc.check_vma("error"), pytest.raises(mc.VaryingError, match="along 'b', where others vary: a pvary is m"):
            net(x)


@pytest.mark.parametrize("mode", [True, "error"])
def test_what_nobody_has_said_is_unknown(mode: Any) -> None:
    """Along other axes than the adaptor's nothing is known of a parameter; what is known there is held against it."""
    mc.launch(refused, ranks=4, args=(mode,))


def transformed(mode: Any) -> None:
    with mc.use_mesh(mc.make_mesh({"a": 2})):
        torch.manual_seed(0)
        whole = nn.Linear(4, 1).to(F64)
        net = fully_shard(nn.Linear(4, 1).to(F64), "a", grads="sum")
        load_full_state_dict(net, whole.state_dict())
        params, both = dict(net.named_parameters()), drawn(3, 4, 4)
        x = mc.mark_varying(mc.shard(both, "a"), "a")
        with mc.check_vma(mode):
            loss = lambda p: torch.func.functional_call(net, p, (x,)).square().sum()  # noqa: E731
            found = torch.func.grad(loss)(params)["bias"]
            with torch.no_grad():
                assert mc.varying_axes(net(x)) == frozenset("a")
        whole(both).square().sum().backward()
        assert whole.bias.grad is not None
        if found.numel():
            assert_close(found, whole.bias.grad)


@pytest.mark.parametrize("mode", [True, "error"])
def test_a_bare_linear_and_transforms(mode: Any) -> None:
    mc.launch(transformed, ranks=2, args=(mode,))
