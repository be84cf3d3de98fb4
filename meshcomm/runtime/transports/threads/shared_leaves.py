"""Parameters that several ranks of one process hold: only what none of them trains or writes may be shared.

A model that is made outside of the function that ranks run is one object for all of them. Where two ranks' gradients
come together in it, or one writes it under the others' eyes, the numbers are those of no parallel program.

    rank 0   backward: w is mine             step: writes w
    rank 1                     backward: w is another one's -> error
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn

from meshcomm._torch.autograd import functorch_active, leaves_of_graph
from meshcomm._torch.backward import watch_backward
from meshcomm._torch.views import version_hint
from meshcomm.errors import fail, shape_text


class _Known:
    """A leaf, and which ranks have used it for what."""

    def __init__(self, x: Tensor, gone: Callable[[Any], object]) -> None:
        self.ref = weakref.ref(x, gone)
        self.ranks: set[int] = set()
        self.trained_by: int | None = None
        self.written_by: int | None = None
        self.version = version_hint(x)


class SharedLeaves:
    """What the ranks of one launch know of the leaves that they differentiate."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.shared: list[_Known] = []
        """Those of several ranks: nobody may write them."""

    def watched(self, rank: Callable[[], int | None]) -> AbstractContextManager[None]:
        """While this is open, each backward pass tells of its leaves; ``rank()``: whose code is running, or None."""

        def watch(roots: Sequence[Any], inputs: Sequence[Any], accumulates: bool) -> None:
            me = rank()
            if me is not None and not functorch_active():
                for x in inputs or leaves_of_graph(roots):
                    if isinstance(x, Tensor) and x.is_leaf:
                        self._use(x, me, accumulates)

        return watch_backward(watch)

    def claim(self, module: nn.Module, rank: int, where: str) -> None:
        """``module`` is made parallel by this rank, and then is its own."""
        holder = self._held.setdefault(module, rank)
        if holder != rank:
            self._refuse(where, "a module is shared by ranks", f"{type(module).__name__}, of ranks {holder} and {rank}")
        for name, x in module.named_parameters():
            if x.is_meta:  # it gets memory of its own, by a swap, which a weak reference stands in the way of
                continue
            self._use(x, rank, x.requires_grad, f"{name} ", where)

    def look(self, rank: int) -> None:
        """Before the turn of ``rank`` ends: has it written what others hold?"""
        for known in self.shared:
            x = known.ref()
            if x is not None and version_hint(x) != known.version:
                known.version = version_hint(x)
                self._refuse_write(x, rank, known.ranks)

    def _use(self, x: Tensor, rank: int, accumulates: bool, name: str = "", where: str = "launch") -> None:
        known = self._known.get(id(x))
        if known is None or known.ref() is not x:
            place, table = id(x), self._known
            known = table[place] = _Known(x, lambda ref: table.pop(place, None))
        if version_hint(x) != known.version:
            known.version, known.written_by = version_hint(x), next(iter(known.ranks))
        others = known.ranks - {rank}
        if others and known.written_by is not None:
            self._refuse_write(x, known.written_by, known.ranks | {rank})
        if accumulates:
            if known.trained_by not in (None, rank):
                who = f"ranks {known.trained_by} and {rank}"
                self._refuse(where, "a leaf is shared by ranks that train it", f"{name}{_text(x)}, gradients on {who}")
            known.trained_by = rank
        known.ranks.add(rank)
        if others and known not in self.shared:
            self.shared.append(known)

    def _refuse_write(self, x: Tensor, rank: int, ranks: Iterable[int]) -> NoReturn:
        who = ", ".join(map(str, sorted(set(ranks) - {rank})))
        self._refuse(
            "launch", "a leaf is written that ranks share", f"{_text(x)}, written on rank {rank}, used on rank {who}"
        )

    def _refuse(self, where: str, what: str, got: str) -> NoReturn:
        fail(
            where,
            f"{what}: it is one object for all of them, such as is made outside of the function that they run.",
            got=got,
            fix="make it, or copy.deepcopy it, inside of the function; what no rank trains or writes may be shared",
        )


def _text(x: Tensor) -> str:
    return shape_text(x.dtype, x.shape)
