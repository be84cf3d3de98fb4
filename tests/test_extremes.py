"""argmax and argmin: the index along an axis that has the largest or smallest value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc

Run = Callable[..., list[Any]]
AXES: list[Any] = ["a", "b", ("a", "b"), ("b", "a")]
nan, inf = float("nan"), float("inf")
VALUES: dict[str, list[Any]] = {
    "ties": [[1.0, 5.0, 2.0], [1.0, 5.0, 3.0], [0.0, 5.0, 3.0], [1.0, 4.0, 3.0]],
    "nan": [[nan, 1.0, inf], [2.0, nan, -inf], [nan, nan, 0.0], [3.0, 2.0, inf]],
    "scalar": [3.0, 1.0, 3.0, 2.0],
    "empty": [[], [], [], []],
    "two dims": [[[1.0, 2.0], [3.0, 4.0]], [[4.0, 3.0], [2.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[9.0, -9.0], [3.0, 4.0]]],
}  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def cases() -> list[tuple[str, torch.dtype]]:
    return [(name, dtype) for name in VALUES for dtype in DTYPES if name != "nan" or dtype.is_floating_point]


def places() -> list[Any]:
    mesh, found = mc.make_mesh({"a": 2, "b": 2, "one": 1}), []
    with mc.use_mesh(mesh):
        for name, dtype in cases():
            x = torch.tensor(VALUES[name][mesh.rank]).to(dtype)
            before = x.clone()
            for axis in AXES:
                for fn in (mc.argmax, mc.argmin):
                    y = fn(x, axis)
                    assert (y.dtype, y.shape) == (torch.int64, x.shape)
                    found.append(y.tolist())
            assert torch.equal(torch.nan_to_num(x.float()), torch.nan_to_num(before.float()))
            assert not mc.argmax(x, "one").any()
        x = torch.arange(6.0).view(2, 3).t() * (1 - 2 * (mesh.rank % 2))
        assert torch.equal(mc.argmax(x, "b"), (x.abs() * 0).long()), "strided"
        w = torch.ones(2, requires_grad=True)
        assert not mc.argmin(w * mesh.rank, "a").requires_grad
    return found


def test_against_torch(run4: Run) -> None:
    """Ties go to the lowest index, and NaN wins, as in torch."""
    ranks = {"a": [[0, 2], [1, 3]], "b": [[0, 1], [2, 3]], ("a", "b"): [[0, 1, 2, 3]], ("b", "a"): [[0, 2, 1, 3]]}
    for rank, found in enumerate(run4(places)):
        got = iter(found)
        for name, dtype in cases():
            for axis in AXES:
                group = next(group for group in ranks[axis] if rank in group)
                stack = torch.stack([torch.tensor(VALUES[name][r]).to(dtype) for r in group])
                stack = stack.double() if not dtype.is_floating_point else stack
                for fn in (torch.argmax, torch.argmin):
                    expected = fn(stack, 0) if stack.numel() else torch.zeros(stack.shape[1:], dtype=torch.int64)
                    assert next(got) == expected.tolist(), (name, dtype, axis, fn)


def test_under_vmap_and_a_checker() -> None:
    def main() -> Any:
        mesh = mc.make_mesh({"a": 2})
        with mc.use_mesh(mesh):
            x = torch.tensor([[1.0, 2.0], [3.0, 0.0]]) * (1 if mesh.rank else -1)
            batched = torch.func.vmap(lambda row: mc.argmax(row, "a"))(x)
            with mc.check_vma("error"):
                y = mc.argmin(mc.mark_varying(x, "a"), "a")
                assert mc.varying_axes(y) == frozenset()
        return batched.tolist(), y.tolist()

    assert mc.launch(main, ranks=2) == [([[1, 1], [1, 0]], [[0, 0], [0, 0]])] * 2


def compiled() -> list[int]:
    mesh = mc.make_mesh({"a": 2, "b": 2})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def fn(x: Tensor) -> Tensor:
        return mc.argmax(x, "a", mesh=mesh)

    return fn(torch.tensor([1.0, 5.0]) * (mesh.rank - 1)).tolist()


@pytest.mark.thorough
def test_compiled(pool4: Any) -> None:
    assert pool4.run(compiled) == [[1, 1]] * 4


def test_which_sends_what() -> None:
    def main() -> str:
        mesh = mc.make_mesh({"a": 2})
        with mc.trace() as trace:
            mc.argmax(torch.ones(3), "a", mesh=mesh)
        return trace.summary()

    assert mc.launch(main, ranks=2) == ["2 all_reduce over a"] * 2
