"""What a piece of code keeps in memory and communicates, as the dispatcher sees it: nothing is estimated."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshcomm.runtime.process import lending

__all__ = ["Tracked"]

SENDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "all_gather", "all_reduce", "all_to_all")


def lent() -> int:
    """Bytes of the pages of shared memory that are there for what this process lends to others. What others lend is
    theirs: it would count once per rank otherwise, and by its capacity, of which no more is there than was written.
    """
    room: Any = lending.room
    memories = {segment.fd for segment in [*room._segments, *room._small]}
    return sum(512 * os.fstat(fd).st_blocks for fd in memories)


def _wraps(kind: type) -> bool:
    """Whether tensors of this class are made of others, as a DTensor is: its own storage has no memory, but says the
    bytes of the whole tensor.
    """
    return hasattr(kind, "__tensor_flatten__")


class Tracked(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside and of what is lent, the most there were at once, and
    the collectives of process groups with the bytes of what each takes. What gloo allocates within a call goes unseen,
    and numbers of the host that links agree on: of fully_shard one message a step, which parameters have gradients.
    """

    sees_meshcomm = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.bytes = 0
        self.collectives: Counter[str] = Counter()
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._before = lent()

    @property
    def now(self) -> int:
        """Of what is alive; added up each time, for a storage may be emptied while it is."""
        return sum(storage.nbytes() for storage in self._seen) + lent() - self._before

    def restart(self) -> None:
        """Forget what was, but not what is alive."""
        self.peak, self.bytes = self.now, 0
        self.collectives.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_wraps, types)):
            return NotImplemented  # what it does with those inside comes here next
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type != "meta" and not _wraps(type(x)):
                storage = x.untyped_storage()
                if storage.resizable():  # otherwise it is mapped
                    self._seen.add(storage)
        self.peak = max(self.peak, self.now)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and any(word in name for word in SENDS):
            self.collectives[name.split("::")[1].strip("_").removesuffix("_base")] += 1
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.bytes += max((x.numel() * x.element_size() for x in given), default=0)
        return result
