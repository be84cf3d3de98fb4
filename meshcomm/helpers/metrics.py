"""Numbers that a training loop adds up on its rank and reduces once per log line."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.collectives import check
from meshcomm.errors import fail, likely, names
from meshcomm.helpers.parcels import Courier
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.runtime.protocol import Note

__all__ = ["Metrics"]

KINDS = ("mean", "sum", "max", "min")
_START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
_STEPS: dict[str, Any] = {"mean": torch.add, "sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Metrics:
    """Means, sums and extremes that grow on each rank without communication, and one collective per log line.

    Every rank makes it with the same names, and calls :meth:`reduce` together with the others; which of them have added
    something in between is their own matter. Values on an accelerator stay there until then: nothing waits for the
    device before the log line.

    Args:
        kinds: name to "mean", "sum", "max" or "min".

    Raises:
        MeshError: no names; an unknown kind.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     metrics = mc.Metrics({"loss": "mean", "tokens": "sum", "norm": "max"})
        ...     for step in range(1 + mesh.rank):
        ...         metrics.add("loss", torch.tensor(3.0), count=2)
        ...         metrics.add("tokens", 2)
        ...         metrics.add("norm", float(step))
        ...     return metrics.reduce("dp", mesh=mesh)
        >>> mc.launch(main, ranks=2)[0]
        {'loss': 1.5, 'tokens': 6.0, 'norm': 1.0}

    Source: meters of training loops; ``torchmetrics``' states and their reductions.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        if not isinstance(kinds, Mapping) or not kinds:
            fail("Metrics", "no metrics are named.", got=repr(kinds), fix='such as {"loss": "mean", "tokens": "sum"}')
        for name, kind in kinds.items():
            if not isinstance(name, str) or kind not in KINDS:
                fail("Metrics", f"metric {name!r} is of no kind {kind!r}.", fix=f"one of {names(KINDS)}")
        self._kinds = dict(kinds)
        self._agreed: set[Any] = set()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._numbers = {name: [_START[kind], 0.0] for name, kind in self._kinds.items()}  # of the host
        self._tensors: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: float | Tensor, count: float | Tensor = 1) -> None:
        """Take a value in, on this rank alone.

        Args:
            name: one of the names given.
            value: a number or a tensor with one element. For a mean it is the sum over what ``count`` counts.
            count: how many it is the sum of.

        Raises:
            MeshError: no such metric; not one number.
        """
        if not isinstance(name, str) or name not in self._kinds:
            fail("Metrics.add", f"no metric {name!r}.", fix=f"one of {names(self._kinds)}{likely(name, self._kinds)}")
        if isinstance(value, Tensor) or isinstance(count, Tensor):
            self._add_tensors(name, value, count)
            return
        for what, number in (("value", value), ("count", count)):
            _checked_number(what, name, number)
        held, kind = self._numbers[name], self._kinds[name]
        held[1] += count
        if kind in ("mean", "sum"):
            held[0] += value
        elif math.isnan(value) or math.isnan(held[0]):
            held[0] = math.nan
        else:
            held[0] = (max if kind == "max" else min)(held[0], value)

    def _add_tensors(self, name: str, value: object, count: object) -> None:
        device = next(x.device for x in (value, count) if isinstance(x, Tensor))
        mine = [_one("value", name, value, device), _one("count", name, count, device)]
        held = self._tensors.get(name)
        if held is None:
            self._tensors[name] = [x.clone() for x in mine]
            return
        mine = [x.to(held[0].device) for x in mine]
        self._tensors[name] = [_STEPS[self._kinds[name]](held[0], mine[0]), held[1] + mine[1]]

    def reduce(self, axis: AxisName, *, mesh: Mesh | None = None, reset: bool = True) -> dict[str, float]:
        """The values over all ranks of ``axis``.

        Args:
            axis: a name, or a tuple of names: all axes along which the data differ.
            mesh: the current mesh by default.
            reset: whether to begin anew afterwards.

        Returns: name to float, the same on every rank; NaN for a mean or an extreme that nobody has added to.

        Cost: one all_gather of 16 bytes per metric and rank; the first time along an axis another one, of a kilobyte,
        by which ranks that made it with other names find out.

        Raises:
            MeshError: no such axis; on all ranks: other names or kinds on one of them.
        """
        ax = check.axis_of("Metrics.reduce", axis, mesh)
        with _torch.outside_transforms(), torch.no_grad():
            mine = self._packed(ax)
            self._agree(ax)
            if ax.link.watched:
                ax.link.announce(Note("Metrics.reduce", tuple(self._kinds.items()), tuple(self._kinds), None, ax))
            rows = ax.link.all_gather(mine)
            total, count = rows.cpu().unbind(-1)  # [n, metrics]
            found = {
                name: _whole(kind, total[:, i], float(count[:, i].sum()))
                for i, (name, kind) in enumerate(self._kinds.items())
            }
        if reset:
            self.reset()
        return found

    def _agree(self, axis: Axis) -> None:
        """Once per axis: a rank that has other metrics would send another length."""
        if axis.key not in self._agreed:
            digest = zlib.crc32(repr(sorted(self._kinds.items())).encode())
            Courier("Metrics.reduce", axis, metrics=", ".join(self._kinds), digest=digest).meet()
            self._agreed.add(axis.key)

    def _packed(self, axis: Axis) -> Tensor:
        """float64 ``[metrics, 2]`` on a device that the axis moves: values and counts."""
        device = axis.mesh.device
        rows = torch.tensor([self._numbers[name] for name in self._kinds], dtype=torch.float64, device=device)
        if not self._tensors:
            return rows
        order = list(self._kinds)
        places = [order.index(name) for name in self._tensors]
        added = torch.stack([torch.stack(held).to(device) for held in self._tensors.values()])
        for at, name, row in zip(places, self._tensors, added, strict=True):
            rows[at] = torch.stack([_STEPS[self._kinds[name]](rows[at, 0], row[0]), rows[at, 1] + row[1]])
        return rows

    def __repr__(self) -> str:
        return f"Metrics({self._kinds})"


def _checked_number(what: str, name: str, number: Any) -> float:
    if not isinstance(number, (int, float, Integral)):
        fail("Metrics.add", f"{what} of {name!r} is a {type(number).__name__}.", fix="a number or a tensor")
    try:
        return float(number)
    except OverflowError:
        fail(
            "Metrics.add", f"{what} of {name!r} is an int too large for a float.", fix="a number that a float can hold"
        )


def _one(what: str, name: str, value: object, device: torch.device) -> Tensor:
    """One number as a float64 scalar that nothing else changes."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            fail(
                "Metrics.add",
                f"{what} of {name!r} is not one real number but {list(value.shape)} of {value.dtype}.",
                fix="reduce it here first, with .sum() and its count for a mean",
            )
        if value.is_meta or value.layout is not torch.strided:
            kind = "on the meta device" if value.is_meta else f"a {value.layout} tensor"
            fail("Metrics.add", f"{what} of {name!r} is {kind}, and holds no value.", fix="a number or a dense tensor")
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.full((), _checked_number(what, name, value), dtype=torch.float64, device=device)


def _whole(kind: str, values: Tensor, count: float) -> float:
    if kind == "sum":
        return float(values.sum())
    if count == 0:
        return math.nan
    return float(values.sum()) / count if kind == "mean" else float(values.max() if kind == "max" else values.min())
