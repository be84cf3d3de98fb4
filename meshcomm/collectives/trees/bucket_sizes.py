"""Which leaves of a pytree go together: buckets of one dtype and device, closed once they have so many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def groups_of(leaves: Sequence[Tensor], bucket_mb: float, *, alike: bool = False) -> list[list[int]]:
    """Positions of the leaves that go together: see :func:`grouped`. ``alike``: they are known to be of one dtype, and
    on one device.
    """
    one_kind = alike or len({(leaf.dtype, leaf.device) for leaf in leaves}) == 1  # dynamo knows no attrgetter in a set
    if one_kind and sum(map(Tensor.numel, leaves)) * leaves[0].element_size() <= bucket_mb * 2**20:
        return [list(range(len(leaves)))]
    sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
    return grouped([(leaf.dtype, leaf.device) for leaf in leaves], sizes, bucket_mb)


def grouped(
    kinds: Sequence[tuple[torch.dtype, torch.device]], sizes: Sequence[int], bucket_mb: float
) -> list[list[int]]:
    """Positions of what goes together, of leaves of these bytes: a bucket of a kind takes leaves until it has
    ``bucket_mb`` MiB; what is larger than that goes alone.
    """
    limit = bucket_mb * 2**20
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for at, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        bucket, filled = filling.get(kind, ([], 0))
        if bucket and (filled >= limit or size > limit):
            bucket, filled = [], 0
        if not bucket:
            full.append(bucket)
        bucket.append(at)
        filling[kind] = bucket, filled + size
    return full
