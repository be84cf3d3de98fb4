"""Parallel programs with every pvary left out: what the checker of varying types makes of them.

``vma_programs.py`` has the programs as an expert writes them. Their values and gradients are compared with those of the
same functions of whole tensors.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import OLD
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map
from vma_checks import Heard, heard
from vma_programs import BY_NAME, PROGRAMS, Program, Tree, Vary, draw

import meshcomm as mc

Run = Callable[..., list[Any]]
NAMES = list(BY_NAME)
IN_NEED = [each.name for each in PROGRAMS if each.needs_pvary]
RANKS = {each.name: math.prod(each.axes.values()) for each in PROGRAMS}


def left_out(x: Tree, axis: Any, /) -> Tree:
    """Stands for a pvary that nobody wrote."""
    return x


def one_by_one(x: Tree, axis: Any, /) -> Tree:
    """pvary without buckets: each tensor is a collective of its own in backward."""
    found: Tree = tree_map(lambda leaf: mc.pvary(leaf, axis), x)
    return found


VERSIONS: dict[str, tuple[Vary, Any]] = {
    "expert": (mc.pvary, False),
    "left out": (left_out, True),
    "expert, inserting": (mc.pvary, True),
    "expert, refusing": (mc.pvary, "error"),
}
OTHERS: dict[str, tuple[Vary, Any]] = {
    "expert, one by one": (one_by_one, False),
    "left out, unchecked": (left_out, False),
}
TWICE = ("expert", "left out")
"""Whose second derivatives are compared, too."""


def tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in tree_leaves(tree):
        found += x.parameters() if isinstance(x, nn.Module) else [x] if isinstance(x, Tensor) else []
    return found


def given_of(args: Any) -> list[Tensor]:
    return [x for x in tensors(args) if x.requires_grad]


def mixed(outputs: list[Tensor]) -> Tensor:
    """One number of all outputs, with factors that are no round ones."""
    live = [y for y in outputs if y.requires_grad]
    return torch.stack([(y * draw(*y.shape, seed=70 + i, grad=False)).sum() for i, y in enumerate(live)]).sum()


def outcome(
    fn: Callable[..., Any], args: tuple[Any, ...], by_backward: bool, twice: bool, calls: Heard | None = None
) -> tuple[list[list[Tensor]], Heard, Heard]:
    """Values, gradients with respect to all inputs, and ``twice``: the gradients of a function of these. With them the
    ``calls`` that there were after the values and after the gradients.
    """
    given, outputs = given_of(args), tensors(fn(*args))
    forward = Counter(calls or {})
    if by_backward:
        mixed(outputs).backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
        return [[y.detach() for y in outputs], gradients], forward, Counter(calls or {})
    first = torch.autograd.grad(mixed(outputs), given, create_graph=twice)
    both = Counter(calls or {})
    live = [g for g in first if g.requires_grad]
    second: list[Tensor] = []
    if live:
        curves = torch.autograd.grad(torch.stack([g.square().sum() for g in live]).sum(), given, allow_unused=True)
        second = [torch.zeros_like(x) if c is None else c for x, c in zip(given, curves, strict=True)]
    return [[x.detach() for x in each] for each in (outputs, first, second)], forward, both


@functools.cache
def whole(name: str, twice: bool) -> list[list[Tensor]]:
    """What the function of whole tensors gives."""
    program = BY_NAME[name]
    return outcome(program.whole, program.inputs(), program.on_ranks, twice)[0]


def compare(name: str, mine: list[list[Tensor]], twice: bool) -> None:
    right = whole(name, twice)
    for what, found, expected in zip(
        ("value", "gradient", "second derivative")[: len(right)], mine, right, strict=True
    ):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            where = f"{name}, {what} {i}: "
            assert_close(a, b, rtol=1e-9, atol=1e-9, msg=where.__add__)


def check(name: str, pv: Vary, check_vma: Any) -> None:
    """On ranks, the program gives what the function of whole tensors gives."""
    program = BY_NAME[name]
    compare(name, outcome(program.make(pv, check_vma), program.inputs(), program.on_ranks, False)[0], False)


def everywhere(program: Program, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Where the program can run: outside of ranks if it can."""
    return mc.launch(fn, ranks=RANKS[program.name], args=args) if program.on_ranks else [fn(*args)]


class Ran(NamedTuple):
    """A program and what came of it."""

    on_ranks: list[list[list[Tensor]]]
    """Values and gradients; outside of ranks of one."""
    forward: Heard
    backward: Heard
    """The collectives of either. Outside of ranks the forward runs once more in the backward, which does not count;
    recomputation by checkpoint does. On ranks both are counted as the backward, with what shard_map sends for its outputs.
    """


@functools.cache
def ran(name: str, version: str) -> Ran:
    """One run for all that is to be known of it."""
    program, (pv, check_vma) = BY_NAME[name], (VERSIONS | OTHERS)[version]
    twice = version in TWICE and not program.once
    with heard() as calls:
        found = everywhere(
            program, lambda: outcome(program.make(pv, check_vma), program.inputs(), program.on_ranks, twice, calls)
        )
    if program.on_ranks:
        return Ran([each for each, _, _ in found], Counter(), calls)
    ((result, forward, both),) = found
    again = Counter({call: count for call, count in forward.items() if call[0] != "broadcast"})
    assert forward + again <= both  # the order of buckets, which is broadcast, is kept with the axes from run to run
    return Ran([result], forward, both - forward - forward)


def test_there_are_enough_of_them() -> None:
    assert len(BY_NAME) == len(PROGRAMS) >= 50
    assert len(IN_NEED) >= 49
    assert {tuple(each.axes.values()) for each in PROGRAMS} == {(4,), (2, 2), (2, 2, 2)}


def all_right(name: str, version: str) -> None:
    for mine in ran(name, version).on_ranks:
        compare(name, mine, version in TWICE and not BY_NAME[name].once)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_whole(name: str, version: str) -> None:
    all_right(name, version)


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("name", IN_NEED)
def test_unchecked_they_are_wrong_without_pvary(name: str) -> None:
    """Or else the programs would prove nothing."""
    with pytest.raises((AssertionError, mc.VaryingError), match="not close|differs along"):
        all_right(name, "left out, unchecked")


# ------------------------------------------------------------------------------------------------------------- refused


def run(program: Program, pv: Vary, check_vma: Any) -> None:
    """Forwards, and backwards too where the forward knows nothing of gradients."""
    outputs = tensors(program.make(pv, check_vma)(*program.inputs()))
    if program.on_ranks:
        mixed(outputs).backward()


def refused(name: str) -> None:
    program = BY_NAME[name]
    with pytest.raises(mc.VaryingError) as caught:
        run(program, left_out, "error")
    named = [axis for axis in program.axes if repr(axis) in str(caught.value).split("\n")[0]]
    assert named, f"no axis in the first line of {caught.value}"
    assert set(named) <= set(program.lacks), caught.value


@pytest.mark.parametrize("name", IN_NEED)
def test_refused_by_the_name_of_the_axis(name: str) -> None:
    if name in ("checkpointed_blocks", "transformer_over_three_axes") and OLD:
        pytest.skip("torch 2.11 leaves the hooks of a checkpoint that was interrupted to the collection of garbage")
    everywhere(BY_NAME[name], refused, name)


# -------------------------------------------------------------------------------------------------------------- counts

ONE_WEIGHT_IN_PARTS = {"multi_query_attention"}
"""Programs whose expert makes a pvary of each part of a weight."""


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("name", NAMES)
def test_inserted_are_as_many_as_an_expert_writes(name: str) -> None:
    """As the expert's with a pvary per tensor. A pvary of a tree puts tensors into buckets, which the checker does not:
    fewer all_reduces, and a broadcast in the first backward that fixes the order of buckets.
    """
    expert, inserted, in_buckets = ran(name, "expert, one by one"), ran(name, "left out"), ran(name, "expert")
    assert inserted.forward == expert.forward
    assert inserted.backward.keys() == expert.backward.keys()
    assert inserted.backward <= expert.backward  # fewer where the parts of one weight go through one pvary
    if name not in ONE_WEIGHT_IN_PARTS:
        assert inserted.backward == expert.backward
    kept = {
        call: number for call, number in (in_buckets.forward + in_buckets.backward).items() if call[0] != "broadcast"
    }
    assert Counter(kept) <= expert.forward + expert.backward


def calls_of(text: str) -> Heard:
    """``"all_reduce tp, 4 all_reduce dp"``"""
    found: Heard = Counter()
    for part in filter(None, text.split(", ")):
        words = part.split(" ")
        number = int(words.pop(0)) if words[0].isdigit() else 1
        found[words[0], " ".join(words[1:])] += number
    return found


EXPERT: dict[str, tuple[str, str]] = {
    "column_and_row_parallel_mlp": ("all_reduce tp", "all_reduce tp, 3 all_reduce dp"),
    # q, k and v share the sum over tp of the gradient of what they come from; each weight has one over dp.
    "attention_with_heads_over_tp": ("all_reduce tp", "all_reduce tp, 4 all_reduce dp"),
    "sequence_parallel_mlp": ("all_gather tp, reduce_scatter tp", "all_gather tp, reduce_scatter tp, all_reduce tp"),
    "fully_sharded": ("all_gather fsdp, all_reduce fsdp", "reduce_scatter fsdp"),
    # One for a weight that is used twice.
    "tied_embedding": ("4 all_reduce tp, all_reduce dp", "all_reduce tp, 2 all_reduce dp"),
    "pipeline": ("6 shift pp, all_reduce pp", "5 shift pp, all_reduce pp"),
}


@pytest.mark.parametrize("name", EXPERT)
def test_the_expert_is_one(name: str) -> None:
    """What the numbers above are compared with."""
    expert = ran(name, "expert, one by one")
    assert [expert.forward, expert.backward] == [calls_of(text) for text in EXPERT[name]]


# ------------------------------------------------------------------------------------------------------------ on ranks


def check_all(names: list[str], version: str) -> None:
    for name in names:
        check(name, *VERSIONS[version])


@pytest.mark.parametrize("ranks", [4, 8])
def test_on_ranks_of_one_process(ranks: int) -> None:
    mc.launch(check_all, ranks=ranks, args=([name for name in NAMES if RANKS[name] == ranks], "left out"))


ON_PROCESSES = [
    "attention_with_heads_over_tp", "writes_into_a_buffer", "module_closed_over", "data_parallel", "ring_attention",
    "mixture_of_experts", "tied_embedding", "clipped_gradients", "reentrant_checkpointed_blocks",
]  # fmt: skip


@pytest.mark.parametrize("version", ["expert", "left out"])
def test_on_processes(pool4: Any, version: str) -> None:
    pool4.run(check_all, ON_PROCESSES, version)


def refused_all(names: list[str]) -> None:
    for name in names:
        refused(name)


def test_refused_on_every_rank(run4: Run) -> None:
    """Each rank says so before it waits for another one."""
    run4(refused_all, ["fully_sharded_with_prefetch", "training_steps_by_func_grad", *ON_PROCESSES])
