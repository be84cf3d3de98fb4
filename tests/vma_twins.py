"""Programs of one rank and what they are without ranks.

A program is a function of ``s``, which is invariant and requires grad, and of ``x``, which varies and does not. Its
result varies and is summed over the ranks; a wrong type of anything in between is a wrong gradient of ``s`` that nothing
else would notice. Right is what the same function gives with each part of the data, added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

F64 = torch.float64
LINE = {"dp": 2}
Program = Callable[[Tensor, Tensor], Tensor]
DATA = [1.0, 2.0, 3.0, 4.0]


def data() -> Tensor:
    return torch.tensor(DATA, dtype=F64, requires_grad=True)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F64)


def of_whole(h: Program) -> tuple[Tensor, Tensor]:
    """Its value and gradient without ranks."""
    given = data()
    parts = given.chunk(2)
    s = parts[0] + parts[1]
    total = h(s, parts[0].detach()) + h(s, parts[1].detach())
    return total, torch.autograd.grad(total, given)[0]


def of_ranks(h: Program, mode: Any = True) -> tuple[Tensor, Tensor]:
    given = data()
    fn = mc.shard_map(
        lambda x: mc.all_reduce(h(mc.all_reduce(x, "dp"), x.detach()), "dp"),
        mesh=mc.make_mesh(LINE),
        in_specs="(dp n)",
        out_specs="",
        check_vma=mode,
    )
    total = fn(given)
    return total, torch.autograd.grad(total, given)[0]


def check(h: Program) -> None:
    for mine, right in zip(of_ranks(h), of_whole(h), strict=True):
        assert_close(mine, right, msg=lambda text: f"{h.__name__}: {text}")


def refused(h: Program, match: str) -> None:
    """It is refused, with the line, and what is refused would have been a program."""
    of_whole(h)
    with pytest.raises(mc.VaryingError, match=match) as caught:
        of_ranks(h)
    assert f"{h.__code__.co_filename.rsplit('/', 1)[-1]}:" in str(caught.value)
