"""Programs drawn at random: valid ones equal the oracle, broken ones raise on every rank that cannot finish.

What ranks get is compared with the oracle in :mod:`fuzz_judge`. After an error that was caught all ranks meet in a barrier
with a time-out along each axis in use, and go on: that is all that a program has to do, in both runtimes.

MESHCOMM_FUZZ=long draws forty times as many programs, other ones each time; MESHCOMM_FUZZ_TIMES any multiple.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from fuzz_breaks import (
    KINDS,
    Break,
    UserError,
    axes_of,
    broken_of,
    broken_programs,
    foreseen,
    run_broken,
    works_again,
)
from fuzz_judge import judged, right
from fuzz_programs import Rolled, program_of, programs
from fuzz_steps import Program, Step, run, run_backward
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.start.request import GUARD
from meshcomm.runtime.start.workers import WorkerPool

LONG = os.environ.get("MESHCOMM_FUZZ", "ci") == "long"
TIMES = float(os.environ.get("MESHCOMM_FUZZ_TIMES", "40" if LONG else "1"))

pytestmark = pytest.mark.timeout(0 if TIMES > 1 else 120)

MESHES: list[dict[str, int]] = [
    {"a": 2}, {"a": 1}, {"a": 3}, {"a": 2, "b": 2}, {"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 3},
    {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 1, "c": 2}, {"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 1, "c": 3},
]  # fmt: skip
BROKEN_MESHES = [mesh for mesh in MESHES if mesh["a"] > 1]
FOUR: list[dict[str, int]] = [{"a": 4}, {"a": 2, "b": 2}]


def examples(count: int, *, processes: bool = False) -> settings:
    """On processes a failure is made simpler in the long profile only: each try may take a time-out."""
    phases = [phase for phase in Phase if LONG or not (processes and phase in (Phase.shrink, Phase.explain))]
    return settings(
        phases=phases,
        max_examples=max(1, round(count * TIMES)),
        derandomize=not LONG,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def on_rank(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    mesh = mc.make_mesh(program.axes)
    xs = program.sent(mesh.rank)
    values = run(program, xs, mesh)
    return [value.detach() for value in values], run_backward(program, xs, values, mesh)


@examples(50)
@given(program=programs(MESHES))
def test_valid(program: Program) -> None:
    right(program, mc.launch(on_rank, ranks=program.size, args=(program,)))


@pytest.mark.thorough
@examples(50)
@given(program=programs(MESHES))
def test_more_that_are_valid(program: Program) -> None:
    right(program, mc.launch(on_rank, ranks=program.size, args=(program,)))


@examples(50)
@given(example=broken_programs(BROKEN_MESHES))
def test_broken(example: tuple[Program, Break]) -> None:
    program, broken = example
    judged(program, broken, mc.launch(run_broken, ranks=program.size, args=(program, broken)))


@pytest.mark.thorough
@examples(50)
@given(example=broken_programs(BROKEN_MESHES))
def test_more_that_are_broken(example: tuple[Program, Break]) -> None:
    program, broken = example
    judged(program, broken, mc.launch(run_broken, ranks=program.size, args=(program, broken)))


def fresh(program: Program) -> str:
    return works_again(mc.make_mesh(program.axes), axes_of(program))


@examples(20)
@given(example=broken_programs(BROKEN_MESHES))
def test_broken_and_not_caught(example: tuple[Program, Break]) -> None:
    """The launch raises the user's own error, or what a rank was told; the next one works."""
    program, broken = example
    try:
        mc.launch(run_broken, ranks=program.size, args=(program, broken), kwargs={"caught": False})
        assert not foreseen(program, broken).exact or len(foreseen(program, broken).finished) == program.size
    except UserError:
        assert broken.kind == "user error"
    except mc.MeshError:
        assert broken.kind != "user error"
    except mc.CommError:
        assert broken.kind not in ("user error", "argument", "argument everywhere")
    assert mc.launch(fresh, ranks=program.size, args=(program,)) == ["right"] * program.size


# --------------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def guarded4() -> Iterator[WorkerPool]:
    """Four processes under guard. A run that takes as long as the time-out is an error."""
    with pytest.MonkeyPatch.context() as patch, WorkerPool(4, timeout=200) as pool:
        patch.setenv(GUARD, "1")
        pool.run(mc.rank)
        yield pool


@examples(20, processes=True)
@given(program=programs(FOUR))
def test_valid_on_processes(pool4: WorkerPool, program: Program) -> None:
    right(program, pool4.run(on_rank, program.light()))


@examples(8, processes=True)
@given(program=programs(FOUR))
def test_valid_under_guard(guarded4: WorkerPool, program: Program) -> None:
    right(program, guarded4.run(on_rank, program.light()))


@pytest.mark.thorough
@examples(8, processes=True)
@given(example=broken_programs(FOUR))
def test_broken_under_guard(guarded4: WorkerPool, example: tuple[Program, Break]) -> None:
    program, broken = example
    judged(program, broken, guarded4.run(run_broken, program.light(), broken))


# ---------------------------------------------------------------------------------------------------- of the fuzzer


def test_the_programs_have_everything_in_them() -> None:
    steps = [step for seed in range(150) for step in program_of(Rolled(seed), MESHES).events if isinstance(step, Step)]
    assert {step.op for step in steps} >= {
        "pvary", "all_reduce", "all_gather", "all_gather_invariant", "shard", "reduce_scatter", "all_to_all", "permute", "shift",
        "broadcast", "reduce", "gather", "scatter", "exchange", "send", "barrier", "all_gather_object", "broadcast_object",
        "gather_object", "scatter_object",
    }  # fmt: skip
    assert {step.form for step in steps} == {"plain", "strided", "transposed", "conjugate"}
    assert {step.tree for step in steps} == {"", "list", "dict", "nested"}
    assert any(step.later and step.tree for step in steps)
    assert any("traffic" in step.kwargs for step in steps)
    assert any("sizes" in step.kwargs for step in steps)
    assert {("a", "b"), ("b", "a")} <= {step.axis for step in steps}


def test_the_programs_fail_in_every_way() -> None:
    mistakes = [broken_of(Rolled(seed), BROKEN_MESHES)[1] for seed in range(300)]
    assert {broken.kind for broken in mistakes if broken is not None} == set(KINDS)


def wrong_sum(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    values, gradients = on_rank(program)
    return [value + 1 if value.dtype.is_floating_point else value for value in values], gradients


def test_a_wrong_number_is_found() -> None:
    found = expected = 0
    for seed in range(20):
        program = program_of(Rolled(seed), FOUR)
        expected += any(xs[0].dtype.is_floating_point and xs[0].numel() > 0 for xs in program.shards)
        try:
            right(program, mc.launch(wrong_sum, ranks=4, args=(program,)))
        except AssertionError:
            found += 1
    assert found == expected > 5


def test_an_object_of_no_elements_in_strides() -> None:
    """Found by these programs."""

    def main() -> list[torch.Size]:
        x = torch.empty(2, 2)[:0, ::2].reshape(-1)
        strided = torch.stack([x, x], -1)[..., 0]
        assert strided.stride() == (2,)
        return [each.shape for each in mc.all_gather_object(strided, "a", mesh=mc.make_mesh({"a": 2}))]

    assert mc.launch(main, ranks=2) == [[torch.Size([0])] * 2] * 2
