"""Each differentiable collective with arguments worth testing: what the matrix, gradients, transforms and compile have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import Oracle
from torch import Tensor

import meshcomm as mc

__all__ = ["BY_NAME", "CASES", "MESHES", "SHARES", "Case", "as_compiling", "grid", "seeded"]

MESHES = [(1,), (2,), (4,), (2, 2), (2, 4), (2, 2, 2)]

INTS = (torch.int64,)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
COMPLEX = (torch.complex64,)
ALL = (*FLOATS, *INTS, torch.bool, *COMPLEX)
NUMBERS = (*FLOATS, *INTS, *COMPLEX)
ORDERED = (*FLOATS, *INTS, torch.bool)


OLD = torch.__version__.startswith("2.11.")


def as_compiling(text: str) -> str:
    """What is said where this error comes up while torch compiles: 2.11 tells its kind alone."""
    return rf"{text}|raised exception MeshError" if OLD else text


def grid(shape: Sequence[int]) -> dict[str, int]:
    return dict(zip("abc", shape))  # noqa: B905  # as many names as lengths


def seeded(shape: Sequence[int], dtype: torch.dtype, *seed: int, powers: bool = False) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype; with ``powers`` ±1 and ±2, whose products are."""
    generator = torch.Generator().manual_seed(sum((value + 1) * 1009**place for place, value in enumerate(seed)))

    def draw() -> Tensor:
        if powers:
            signs = torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1
            return signs * (torch.randint(0, 2, tuple(shape), generator=generator) + 1)
        return torch.randint(-4, 5, tuple(shape), generator=generator)

    if dtype == torch.bool:
        return draw() > 0
    if dtype.is_complex:
        real = {torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return torch.complex(draw().to(real), draw().to(real))
    return draw().to(dtype)


def nothing(n: int, index: int = 0) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """One collective with its arguments for an axis of size n."""

    name: str
    op: str
    shape: Callable[[int, int], tuple[int, ...]]  # of the input of an index of the axis
    kwargs: Callable[[int], dict[str, Any]] = nothing  # equal on all ranks
    own: Callable[[int, int], dict[str, Any]] = nothing  # differing between ranks
    dtypes: tuple[torch.dtype, ...] = ALL
    invariant_in: bool = False
    invariant_out: bool = False
    linear: bool = True
    powers: bool = False

    def call(self, x: Any, axis: Any, mesh: mc.Mesh) -> Any:
        """The library's, on one rank."""
        place = mesh.axis(axis)
        kwargs = self.kwargs(place.size) | self.own(place.size, place.index)
        return getattr(mc, self.op)(x, axis, **kwargs, mesh=mesh)

    def reference(self, oracle: Oracle, xs: list[Tensor], axis: Any) -> list[Tensor]:
        """The oracle's, on all ranks."""
        n = oracle.axis_size(axis)
        own = [self.own(n, index) for index in range(n)]
        kwargs = self.kwargs(n) | ({"own": own} if any(own) else {})
        return getattr(oracle, self.op)(xs, axis, **kwargs)

    def inputs(self, oracle: Oracle, axis: Any, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """What every rank puts in; one object where it is invariant."""
        n = oracle.axis_size(axis)

        def make(rank: int) -> Tensor:
            return seeded(self.shape(n, oracle.index(rank, axis)), dtype, rank, seed, powers=self.powers)

        return oracle.spread(make, axis if self.invariant_in else ())


def same(*shape: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda n, index: shape


def uneven(n: int) -> list[int]:
    """A length per index, among them a zero where there are three or more."""
    return [(3 * index + 1) % 4 if n > 2 else index + 1 for index in range(n)]


def traffic(n: int) -> list[list[int]]:
    """How many rows index i sends to index j; nothing on some ways."""
    return [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]


def crossed(n: int) -> list[tuple[int, int]]:
    """A perm with a rank that gets nothing and one that sends nothing, to itself for n = 1."""
    return [(0, 0)] if n == 1 else [(i, (i + 1) % n) for i in range(n - 1)][::-1]


CASES = [
    Case("pvary", "pvary", same(3, 2), invariant_in=True),
    *(
        Case(
            f"all_reduce-{op}", "all_reduce", same(3, 2), lambda n, op=op: {"op": op}, dtypes=dtypes,
            invariant_out=True, linear=op in ("sum", "mean"), powers=op == "product",
        )
        for op, dtypes in {
            "sum": NUMBERS, "mean": (*FLOATS, *COMPLEX), "max": ORDERED, "min": ORDERED, "product": NUMBERS,
            "band": (*INTS, torch.bool), "bor": (*INTS, torch.bool), "bxor": (*INTS, torch.bool),
        }.items()
    ),
    *(
        case
        for op, invariant in (("all_gather", False), ("all_gather_invariant", True))
        for case in (
            Case(op, op, same(2, 3), invariant_out=invariant),
            Case(f"{op}-dim-1", op, same(2, 3), lambda n: {"dim": -1}, invariant_out=invariant),
            Case(f"{op}-middle", op, same(2, 3, 2), lambda n: {"dim": 1}, invariant_out=invariant),
            Case(f"{op}-0-d", op, same(), invariant_out=invariant),
            Case(
                f"{op}-sizes", op, lambda n, i: (2, uneven(n)[i]), lambda n: {"dim": 1, "sizes": uneven(n)},
                invariant_out=invariant,
            ),
        )
    ),
    Case("shard", "shard", lambda n, i: (2 * n, 3), invariant_in=True),
    Case("shard-dim-1", "shard", lambda n, i: (3, n), lambda n: {"dim": -1}, invariant_in=True),
    Case(
        "shard-sizes", "shard", lambda n, i: (2, sum(uneven(n))), lambda n: {"dim": 1, "sizes": uneven(n)},
        invariant_in=True,
    ),
    *(
        Case(
            f"reduce_scatter-{op}", "reduce_scatter", lambda n, i: (2 * n, 3), lambda n, op=op: {"op": op},
            dtypes=dtypes, linear=op in ("sum", "mean"), powers=op == "product",
        )
        for op, dtypes in {
            "sum": NUMBERS, "mean": (*FLOATS, *COMPLEX), "max": ORDERED, "min": ORDERED, "product": NUMBERS,
            "bxor": (*INTS, torch.bool),
        }.items()
    ),
    Case("reduce_scatter-middle", "reduce_scatter", lambda n, i: (2, n, 2), lambda n: {"dim": 1}, dtypes=NUMBERS),
    *(
        Case(
            f"reduce_scatter-sizes-{op}", "reduce_scatter", lambda n, i: (2, sum(uneven(n))),
            lambda n, op=op: {"dim": -1, "op": op, "sizes": uneven(n)},
            dtypes=FLOATS, linear=op in ("sum", "mean"), powers=op == "product",
        )
        for op in ("sum", "mean", "max", "product")
    ),
    Case("all_to_all", "all_to_all", lambda n, i: (2 * n, 3), lambda n: {"split_dim": 0, "concat_dim": 0}),
    Case("all_to_all-0-1", "all_to_all", lambda n, i: (2 * n, 3), lambda n: {"split_dim": 0, "concat_dim": 1}),
    Case("all_to_all-2-0", "all_to_all", lambda n, i: (2, 3, n), lambda n: {"split_dim": -1, "concat_dim": 0}),
    Case(
        "all_to_all-sizes", "all_to_all", lambda n, i: (2, sum(traffic(n)[i])),
        lambda n: {"split_dim": 1, "concat_dim": 1},
        lambda n, i: {"send_sizes": traffic(n)[i], "recv_sizes": [row[i] for row in traffic(n)]},
    ),
    Case(
        "all_to_all-sizes-0-1", "all_to_all", lambda n, i: (sum(uneven(n)), i + 1),
        lambda n: {"split_dim": 0, "concat_dim": 1},
        lambda n, i: {"send_sizes": uneven(n), "recv_sizes": list(range(1, n + 1))},
    ),
    Case("permute", "permute", same(2, 3), lambda n: {"perm": crossed(n)}),
    Case("permute-nobody", "permute", same(3), lambda n: {"perm": []}),
    Case("shift", "shift", same(2, 3)),
    Case("shift-back-2", "shift", same(2, 3), lambda n: {"offset": -2}),
    Case("shift-no-wrap", "shift", same(2, 3), lambda n: {"offset": 1, "wrap": False}),
    Case("shift-no-wrap-back", "shift", same(2), lambda n: {"offset": -1, "wrap": False}),
    *(
        Case(
            f"scan-{op}{'-exclusive' * exclusive}{'-reverse' * reverse}", "scan", same(2, 3),
            lambda n, how={"op": op, "exclusive": exclusive, "reverse": reverse}: how,
            dtypes=(*INTS, torch.bool) if op in ("max", "min") and exclusive else dtypes, linear=op == "sum", powers=op == "product",
        )
        for op, dtypes in {"sum": NUMBERS, "max": ORDERED, "min": ORDERED, "product": NUMBERS, "bxor": (*INTS, torch.bool)}.items()
        for exclusive, reverse in ((False, False), (True, False), (True, True))
        if op in ("sum", "max", "product") or not reverse
    ),
    Case("broadcast", "broadcast", same(2, 3), invariant_out=True),
    Case("broadcast-last", "broadcast", same(3), lambda n: {"src": n - 1}, invariant_out=True),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)

SHARES = [
    pytest.param([case.name for case in CASES[at::2]], marks=pytest.mark.thorough if at else [], id=f"share{at}")
    for at in range(2)
]
"""Their names in two shares, for tests that take long: `make test` has the first one, with every operation."""
assert {case.op for case in CASES[::2]} == {case.op for case in CASES}
