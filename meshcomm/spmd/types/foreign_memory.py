"""Memory that more than one storage may have: numpy's, another library's, a buffer's.

A tensor whose array was handed out, or that somebody else's memory was made of, is remembered here as long as it lives,
so that a write through another tensor of the same memory is noted on it, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from meshcomm.spmd.types.seen_changes import storage_of

lent: dict[int, weakref.ref[torch.UntypedStorage]] = {}
"""By id, the storages of which others may have the memory; empty nearly always."""


def lend(x: Tensor) -> None:
    """Others may have the memory of ``x`` from now on."""
    storage = storage_of(x)
    if storage is None or id(storage) in lent:
        return
    key = id(storage)
    lent[key] = weakref.ref(storage, lambda _: lent.pop(key, None))


def lend_foreign(x: Tensor) -> None:
    """Others may have the memory of ``x``, if torch has not allocated it."""
    storage = storage_of(x)
    if storage is not None and not storage.resizable():
        lend(x)


def any_lent() -> bool:
    """Whether others have any memory."""
    return bool(lent)


def with_the_same_memory(storage: torch.UntypedStorage) -> Iterator[torch.UntypedStorage]:
    """All other storages that are known to lie over the memory of this one, in part or as a whole."""
    if not lent:
        return
    start = storage.data_ptr()
    for each in list(lent.values()):
        other = each()
        if other is None or other is storage or other.device != storage.device:
            continue
        if other.data_ptr() < start + storage.nbytes() and start < other.data_ptr() + other.nbytes():
            yield other
