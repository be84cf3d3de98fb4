"""The private names of torch behind views of tensors and changes of them in place: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import Tensor

from meshcomm._versions import find, has, lack
from meshcomm.errors import fail

__all__ = [
    "is_view",
    "version_hint",
    "version_of",
    "versions_of",
    "view_again",
]


_VERSION = "torch.Tensor._version"

_sees_writes = has(
    _VERSION, "check_vma, fully_shard and data_parallel are refused; a leaf that two ranks of one process write is not"
)


def _no_versions(x: Tensor) -> int:
    where = "check_vma, fully_shard, data_parallel"
    fail(where, **lack(_VERSION, "shard_map(check_vma=False), or ", needs="seeing changes in place"))


version_of: Callable[[Tensor], int] = operator.attrgetter("_version") if _sees_writes else _no_versions
"""How often a tensor has been changed in place. (A function of Python around it would cost as much again.)"""


def versions_of(tensors: Sequence[Tensor]) -> int:
    """What their versions add up to: another number once one of them has been changed in place."""
    return sum(map(version_of, tensors))


def version_hint(x: Tensor) -> int:
    """The same for who can do without: 0 where torch does not tell, as of what was made in inference mode."""
    try:
        return x._version if _sees_writes else 0
    except RuntimeError:
        return 0


is_view: Callable[[Tensor], bool] = find(
    "torch.Tensor._is_view", "results of collectives are taken for views: each costs a µs more", lambda x: True
)
"""Whether a tensor is a view of another one to autograd, which then refuses some writes to it."""

_VIEWS = "torch.Tensor._view_func"
_views = has(_VIEWS, "views as another dtype, and of conjugates, are refused by check_vma where they need a pvary")


def view_again(x: Tensor, base: Tensor) -> Tensor:
    """The view of ``base`` that ``x`` is of its own."""
    if _views:
        return x._view_func(base)  # type: ignore[attr-defined, no-any-return]
    own = x._base
    assert own is not None
    before, now = ((y.stride(), y.dtype, y.is_conj(), y.is_neg()) for y in (own, base))
    if before != now or now[1:] != (x.dtype, x.is_conj(), x.is_neg()):
        fail("check_vma", **lack(_VIEWS, "pvary the tensor before the view is taken, or "))
    return base.as_strided(x.shape, x.stride(), x.storage_offset() - own.storage_offset() + base.storage_offset())
