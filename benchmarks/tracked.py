"""What a piece of code keeps in memory and communicates, as the dispatcher sees it: nothing is estimated."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tracked"]

SENDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "all_gather", "all_reduce", "all_to_all")


class Tracked(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside, the most there were at once, and the collectives of
    process groups with the bytes of what each takes. Numbers of the host that links agree on go unseen:
    of fully_shard one message a step, which parameters have gradients.
    """

    sees_meshcomm = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.bytes = 0
        self.collectives: Counter[str] = Counter()
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @property
    def now(self) -> int:
        """Of what is alive; added up each time, for a storage may be emptied while it is."""
        return sum(storage.nbytes() for storage in self._seen)

    def restart(self) -> None:
        """Forget what was, but not what is alive."""
        self.peak, self.bytes = self.now, 0
        self.collectives.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._seen.add(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and any(word in name for word in SENDS):
            self.collectives[name.split("::")[1].strip("_").removesuffix("_base")] += 1
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.bytes += max((x.numel() * x.element_size() for x in given), default=0)
        return result
