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
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Mesh
from meshcomm.objects.parcels import Courier
from meshcomm.runtime.call import Call
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.ops import Op
from meshcomm.runtime.process.accelerator import with_doubles

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
        ...         metrics.add("loss", 1.5, weight=2)  # the mean of two; of a sum add_sum("loss", 3.0, 2)
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

    def add(self, name: str, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Take a value in, on this rank alone.

        Args:
            name: one of the names given.
            value: a number or a tensor with one element. For a mean, the mean of a batch: ``add("acc", 0.9, 32)``.
            weight: of how many it is the mean; of nothing it counts as nothing, NaN too. Only a mean has one.

        Raises:
            MeshError: no such metric; not one number; a negative weight, or one for a sum or an extreme.
        """
        kind = self._kind("Metrics.add", name)
        if kind != "mean" and (isinstance(weight, Tensor) or weight != 1):
            what = f"a weight for {name!r}, of kind {kind!r}."
            fail("Metrics.add", what, got=f"weight={weight!r}", fix="only a mean has one: leave it out")
        if isinstance(value, Tensor) or isinstance(weight, Tensor):
            mine, by = self._on_one_device("Metrics.add", name, value=value, weight=weight)
            self._add_tensors(name, mine if kind != "mean" else torch.where(by == 0, 0.0, mine * by), by)
            return
        mean = _checked_number("Metrics.add", "value", name, value)
        share = _checked_number("Metrics.add", "weight", name, weight)
        if share < 0:
            fail("Metrics.add", f"weight={weight!r} of {name!r} is negative.", fix="how many it is the mean of")
        self._add_numbers(name, value if kind != "mean" or share == 1 else mean * share if share else 0.0, weight)

    def add_sum(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Take a sum in, on this rank alone, for a mean: ``add_sum("loss", losses.sum(), losses.numel())``.

        Args:
            name: one of those that are means.
            total: a number or a tensor with one element.
            count: how many it is the sum of.

        Raises:
            MeshError: no such metric, or no mean; not one number.
        """
        kind = self._kind("Metrics.add_sum", name)
        if kind != "mean":
            fail("Metrics.add_sum", f"{name!r} is of kind {kind!r}, and has no count.", fix=f"add({name!r}, total)")
        if isinstance(total, Tensor) or isinstance(count, Tensor):
            self._add_tensors(name, *self._on_one_device("Metrics.add_sum", name, total=total, count=count))
            return
        for what, number in (("total", total), ("count", count)):
            _checked_number("Metrics.add_sum", what, name, number)
        self._add_numbers(name, total, count)

    def _kind(self, where: str, name: object) -> str:
        if not isinstance(name, str) or name not in self._kinds:
            fail(where, f"no metric {name!r}.", fix=f"one of {names(self._kinds)}{likely(name, self._kinds)}")
        return self._kinds[name]

    def _add_numbers(self, name: str, value: float, count: float) -> None:
        held, kind = self._numbers[name], self._kinds[name]
        held[1] += count
        if kind in ("mean", "sum"):
            held[0] += value
        elif math.isnan(value) or math.isnan(held[0]):
            held[0] = math.nan
        else:
            held[0] = (max if kind == "max" else min)(held[0], value)

    def _on_one_device(self, where: str, name: str, **numbers: object) -> list[Tensor]:
        device = with_doubles(next(x.device for x in numbers.values() if isinstance(x, Tensor)))
        return [_one(where, what, name, number, device) for what, number in numbers.items()]

    def _add_tensors(self, name: str, value: Tensor, count: Tensor) -> None:
        held = self._tensors.get(name)
        if held is None:
            self._tensors[name] = [value.clone(), count.clone()]
            return
        device, step = held[0].device, _STEPS[self._kinds[name]]
        self._tensors[name] = [step(held[0], value.to(device)), held[1] + count.to(device)]

    @Op("Metrics.reduce", compared=("metrics", "digest"))
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
            mine = self._packed()
            self._agree(ax)
            given = tuple(self._kinds.items()), tuple(self._kinds)
            with calling(ax, Call("Metrics.reduce", *given, None, ax, mine.dtype, mine.shape)):
                rows = ax.link.agree(mine.view(torch.int64).flatten().tolist())  # the bits of each number
            total, count = torch.tensor(rows, device="cpu").view(torch.float64).view(-1, *mine.shape).unbind(-1)
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

    def _packed(self) -> Tensor:
        """float64 ``[metrics, 2]`` of the host: values and counts. It waits for a device once."""
        rows = torch.tensor([self._numbers[name] for name in self._kinds], dtype=torch.float64, device="cpu")
        if not self._tensors:
            return rows
        order = list(self._kinds)
        places = [order.index(name) for name in self._tensors]
        device = next(iter(self._tensors.values()))[0].device
        added = torch.stack([torch.stack(held).to(device) for held in self._tensors.values()]).cpu()
        for at, name, row in zip(places, self._tensors, added, strict=True):
            rows[at] = torch.stack([_STEPS[self._kinds[name]](rows[at, 0], row[0]), rows[at, 1] + row[1]])
        return rows

    def __repr__(self) -> str:
        return f"Metrics({self._kinds})"


def _checked_number(where: str, what: str, name: str, number: Any) -> float:
    if not isinstance(number, (int, float, Integral)):
        fail(where, f"{what} of {name!r} is a {type(number).__name__}.", fix="a number or a tensor")
    try:
        return float(number)
    except OverflowError:
        fail(where, f"{what} of {name!r} is an int too large for a float.", fix="a number that a float can hold")


def _one(where: str, what: str, name: str, value: object, device: torch.device) -> Tensor:
    """One number as a float64 scalar that nothing else changes."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            fail(
                where,
                f"{what} of {name!r} is not one real number but {list(value.shape)} of {value.dtype}.",
                fix="reduce it here first; for a mean, add_sum(name, x.sum(), x.numel())",
            )
        if value.is_meta or value.layout is not torch.strided:
            kind = "on the meta device" if value.is_meta else f"a {value.layout} tensor"
            fail(where, f"{what} of {name!r} is {kind}, and holds no value.", fix="a number or a dense tensor")
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.full((), _checked_number(where, what, name, value), dtype=torch.float64, device=device)


def _whole(kind: str, values: Tensor, count: float) -> float:
    if kind == "sum":
        return float(values.sum())
    if count == 0:
        return math.nan
    return float(values.sum()) / count if kind == "mean" else float(values.max() if kind == "max" else values.min())
