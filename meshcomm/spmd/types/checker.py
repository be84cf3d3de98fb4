"""The checker of varying types: it sees each operation of a rank, and knows along which axes each value varies.

Where a value that requires grad and is invariant along an axis meets one that varies along it, a ``pvary`` is due: the
gradient that comes back is one rank's own, and that of the value is their sum. The checker inserts it, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from meshcomm._torch import without_modes
from meshcomm.errors import VaryingError, fail, names
from meshcomm.layout.notation import Layout
from meshcomm.spmd.types.core import WHERE
from meshcomm.spmd.types.rules.at_once import AtOnce
from meshcomm.spmd.types.rules.attributes import Attributes
from meshcomm.spmd.types.rules.collectives import Collectives
from meshcomm.spmd.types.rules.foreach import Foreach
from meshcomm.spmd.types.rules.functions import Functions, watch_all
from meshcomm.spmd.types.rules.operands import (
    differentiated,
    text_of,
)
from meshcomm.spmd.types.sizes.operations import Sizes
from meshcomm.spmd.types.sizes.varying_numbers import Varying
from meshcomm.watch import here


class Checker(Functions, Attributes, Sizes, Collectives, Foreach, AtOnce):
    """Tracks what runs on this thread while it is entered, as the part of one rank of a mesh."""

    # torch looks this up at each operation, by a name that it makes anew and that no cache of Python's has: where it
    # stands in the first class, no other one is asked.
    __torch_function__ = AtOnce.__torch_function__

    def __enter__(self) -> Self:
        watch_all()
        return super().__enter__()

    def result(self, y: Tensor, layout_of: Callable[[Tensor], Layout], label: str) -> tuple[Tensor, Layout]:
        """What a checked function returns, which may vary along the axes of its layout and must along no other; and
        that layout.
        """
        outer, here.watcher = here.watcher, None  # as `_apart` does it, which takes longer
        try:
            with without_modes():
                layout = layout_of(y)
                return self._result(y, layout.axes, label, layout), layout
        finally:
            here.watcher = outer

    def plain_result(self, value: object, label: str) -> None:
        """What a checked function returns beside tensors, which must be the same everywhere."""
        if isinstance(value, Varying):
            self._refuse(
                f"the return of {label}",
                f"is a size that depends on data and varies along {names(sorted(value.kind.axes))}.",
                str(value),
                "torch.tensor([n]), whose spec names the axis; or the sum: mc.all_reduce(torch.tensor(n), axis)",
            )

    def _result(self, y: Tensor, axes: Sequence[str], label: str, spec: Layout) -> Tensor:
        kind = self.type_of(y)
        if kind is None:
            self._unknown(y, [y], f"the return of {label}")
        if not kind.axes and not axes:
            return y
        extra = kind.axes.difference(axes)
        if extra:
            along = names(sorted(extra))
            since = "; ".join(f"along {axis!r} since {kind.since[axis]}" for axis in sorted(extra))
            fail(
                WHERE,
                f"{label} varies along {along}, which its spec {str(spec)!r} does not name.",
                got=f"{label} {text_of(y)}; it varies {since}",
                fix=f"reduce it over {along}, or name the axis in its spec",
                kind=VaryingError,
            )
        missing = frozenset(axes) - kind.axes
        if missing and torch.is_grad_enabled() and differentiated(y):
            return self.vary(y, missing, f"the return of {label}")
        return y
