"""Whether what ranks have got is what it should be."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_breaks import Break, Outcome, foreseen
from fuzz_steps import SMOOTH, Program, gradients_of
from torch import Tensor

__all__ = ["judged", "right"]


def close(actual: Tensor, expected: Tensor, exact: bool, what: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if exact and expected.dtype not in SMOOTH:
        assert torch.equal(actual.resolve_conj(), expected.resolve_conj()), f"{what}: {actual} is not {expected}"
        return
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    off, size = (actual.to(wide) - expected.to(wide)).norm(), expected.to(wide).norm()
    relative = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.complex64: 1e-4}.get(expected.dtype, 1e-9)
    assert off <= relative * (1 + size), f"{what}: {actual} is not {expected}"


def right(program: Program, results: list[Any]) -> None:
    gradients = gradients_of(program)
    for rank, (values, found) in enumerate(results):
        for i, (value, xs) in enumerate(zip(values, program.shards, strict=True)):
            close(value, xs[rank].detach(), True, f"value {i} on rank {rank}")
        for i, (g, gs) in enumerate(zip(found, gradients, strict=True)):
            close(g, gs[rank], False, f"gradient {i} on rank {rank}")


def judged(program: Program, broken: Break, outcomes: list[Outcome]) -> None:
    """Who cannot finish has raised, who has finished is right, and all work together again."""
    paper = foreseen(program, broken)
    for rank, outcome in enumerate(outcomes):
        assert outcome.again == "right", f"rank {rank}: {outcome.again}"
        if paper.exact and outcome.error:
            assert rank not in paper.finished, f"rank {rank} could finish, but raised: {outcome.error}"
        if paper.exact and not outcome.error:
            assert rank in paper.finished, f"rank {rank} cannot have finished"
        if outcome.values is not None and paper.trusted:
            for i, value in enumerate(outcome.values):
                if value is not None:
                    close(value, program.shards[i][rank].detach(), True, f"value {i} on rank {rank}")
    if broken.kind not in ("skip", "return"):  # there the rank's own part of the graph is another one
        gradients = gradients_of(program)
        for rank, outcome in enumerate(outcomes):
            for i, g in enumerate(outcome.gradients or ()):
                close(g, gradients[i][rank], False, f"gradient {i} on rank {rank}")
    if len(paper.finished) < program.size:
        assert any(outcome.error for outcome in outcomes), "nobody has raised"
