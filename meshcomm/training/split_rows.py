"""split_rows: the parts of a tensor whose lengths are in another one."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from meshcomm._torch import without_modes
from meshcomm.errors import fail, shape_text
from meshcomm.watch import here, paused

_WHERE = "split_rows"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def split_rows(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Split ``rows`` along dim 0 into as many parts as ``counts`` has entries, each as long as its entry says.

    ::

        rows [a b c d]  counts [1 3 0]  ->  [a]  [b c d]  []

    What ``rows.split(counts.tolist())`` does, without a number in the program: under :func:`check_vma` numbers that
    differ between ranks are refused, for nobody could see what varies with them. The number of parts is the same on
    every rank, their lengths need not be; ``part.shape[0]`` is followed as what it is.

    Type: each part varies along the axes of ``rows`` and of ``counts``.

    Args:
        rows: a tensor of at least one dim, such as tokens in the order of their experts.
        counts: how many rows each part has, ``[n]`` integers that add up to the rows; on any device.

    Returns: a tuple of n views of ``rows``, some perhaps empty.

    Backward: the gradients of the parts, concatenated; no communication. Where ``counts`` varies along an axis and
    ``rows`` does not, the :func:`pvary` that is due there sums the gradient.

    Cost: ``counts`` is read by the host, which waits for an accelerator, and breaks the graph under ``torch.compile``;
        nothing is sent or copied.

    Raises:
        MeshError: ``counts`` is no list of integers, has a negative entry, or does not add up to the rows.

    Example:
        >>> import torch, meshcomm as mc
        >>> tokens, expert = torch.arange(4.0), torch.tensor([2, 0, 0, 1])
        >>> parts = mc.split_rows(tokens[expert.argsort(stable=True)], torch.bincount(expert, minlength=3))
        >>> [(10.0**i * part).tolist() for i, part in enumerate(parts)]
        [[1.0, 2.0], [30.0], [0.0]]

    Source: the splitting by ``tokens_per_expert.tolist()`` in dropless mixtures of experts.
    """
    _checked(rows, counts)
    with paused(), without_modes():
        values, total = counts.tolist(), rows.shape[0]
    parts = values if here.watcher is None else here.watcher.numbers(counts, values, _WHERE)
    if any(value < 0 for value in values):
        _wrong(f"counts has {min(values)} among its entries.", rows, counts, "how many rows each part has, 0 or more")
    if sum(values) != total:
        fix = "counts that add up to the rows: torch.bincount(choice, minlength=n) of all that were sorted"
        _wrong(f"counts add up to {sum(values)}, and there are {total} rows.", rows, counts, fix)
    return rows.split(parts) if parts else ()


def _checked(rows: object, counts: object) -> None:
    if not isinstance(rows, Tensor) or not rows.dim():
        _wrong(f"rows is {_what(rows)}.", rows, counts, "a tensor of at least one dim")
    if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.dtype not in _INTEGERS:
        _wrong(f"counts is {_what(counts)}.", rows, counts, "a tensor of n integers: how many rows each part has")


def _what(x: object) -> str:
    with without_modes():
        return _text(x)


def _text(x: object) -> str:
    return shape_text(x.dtype, x.shape) if isinstance(x, Tensor) else f"no tensor but {type(x).__name__}"


def _wrong(what: str, rows: object, counts: object, fix: str) -> NoReturn:
    fail(_WHERE, what, got=f"rows {_what(rows)}; counts {_what(counts)}", fix=fix)
