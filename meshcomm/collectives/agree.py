"""Small numbers of the host, on which ranks agree: no tensor is made, sent and read back for them but in the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshcomm.mesh import Axis
from meshcomm.runtime.call import Call, for_later
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.watch import paused


def agree(values: Sequence[int], axis: Axis, src: int | None = None, op: str = "") -> list[list[int]]:
    """The numbers of every rank along ``axis``, as many on each, in order of index; with ``src`` those of that index
    alone, with ``op`` one row in which they are reduced.
    """
    return for_later(False, _agree, values, axis, src, op)


def begin_to_agree(values: Sequence[int], axis: Axis, src: int | None = None, op: str = "") -> Any:
    """The same; or a Pending of it."""
    return for_later(True, _agree, values, axis, src, op)


def _agree(values: Sequence[int], axis: Axis, src: int | None, op: str) -> Any:
    with paused(), torch.no_grad():
        what = "broadcast" if src is not None else "all_reduce" if op else "all_gather"
        given = {"src": src} if src is not None else {"op": op} if op else {}
        call = Call(what, tuple(given.values()), tuple(given), None, axis, torch.int64, (len(values),))
        with calling(axis, call):
            return axis.link.agree(values, src, op)
