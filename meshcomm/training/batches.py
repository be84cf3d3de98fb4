"""MeshBatchSampler: which rows of a dataset this rank has in each step.

::

    order of the epoch, the same on all ranks        5 2 0 7 | 3 6 1 4 | 8 9        batch=4, rows of all ranks in a step
    index 0 of 2                                     5 2     | 3 6     | 8
    index 1                                              0 7 |     1 4 |   9

One behind the other, what the ranks have in a step is the same whatever their number is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.random_state import mixed

T = TypeVar("T")
Last = Literal["short", "drop", "wrap"]
_LASTS: tuple[Last, ...] = ("short", "drop", "wrap")
_WHERE = "MeshBatchSampler"
_SAME = ("size", "batch", "shuffle", "seed", "last")
"""What a state must agree in with who takes it, else its place in an epoch is one among other rows."""


class MeshBatchSampler(Sampler[list[int]]):
    """The rows of each step that are this rank's, for ``torch.utils.data.DataLoader(..., batch_sampler=)``.

    A batch is what all ranks along ``axis`` have together in a step. Its rows, and those of every other step of every
    epoch, are the same for any number of ranks, so that a run that goes on with more or fewer of them, in the middle of
    an epoch too, sees each row as often as it would have.

    Args:
        size: how many rows the dataset has, the same on every rank.
        batch: how many rows all ranks have in a step; where the axis does not divide it, some ranks have one more.
        axis: a name, or a tuple of names: all axes along which the data differ.
        shuffle: whether each epoch has an order of its own, which follows from ``seed`` and the epoch alone.
        seed: an int, the same on every rank.
        last: what becomes of the rows that are too few for a whole batch at the end. "short": a batch of them; that
            there is no rank without any is checked here. "drop": they are left out of this epoch. "wrap": the first
            rows of the epoch fill it up, and count twice.
        mesh: the current mesh by default; it is kept.

    Raises:
        MeshError: no such axis; no positive numbers; fewer rows in a batch than ranks; an unknown ``last``; with
            "short" a last batch of fewer rows than ranks.

    Cost: nothing is sent by making it.

    ``len`` is the number of batches in an epoch. ``epoch`` and ``done``, the batches of it that were used, are where it
    stands; :meth:`follow` counts them, and a loader that reads ahead does not.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     sampler = mc.MeshBatchSampler(10, 4, "dp", shuffle=False, mesh=mesh)
        ...     loader = torch.utils.data.DataLoader(torch.arange(10), batch_sampler=sampler)
        ...     return [rows.tolist() for rows in sampler.follow(loader)]
        >>> for rows in mc.launch(main, ranks=2):
        ...     print(rows)
        [[0, 1], [4, 5], [8]]
        [[2, 3], [6, 7], [9]]

    Source: ``torch.utils.data.DistributedSampler``; the state of torchdata's ``StatefulDataLoader``.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        axis: AxisName,
        *,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "short",
        mesh: Mesh | None = None,
    ) -> None:
        ax = check.axis_of(_WHERE, axis, mesh)
        for name, value in (("size", size), ("batch", batch)):
            if not check.whole_number(value) or value < 1:
                check.explain(_WHERE, f"{name}={value!r} is no number of rows.", ax, fix="1 or more")
        if not check.whole_number(seed):
            check.explain(_WHERE, f"seed={seed!r} is not an int.", ax, fix="an int that is the same on every rank")
        if last not in _LASTS:
            what = f"last={last!r} is none of {names(_LASTS)}{likely(last, _LASTS)}."
            check.explain(_WHERE, what, ax, fix="one of them")
        rest = size % batch
        if batch < ax.size or (last == "drop" and size < batch):
            what = f"batches of {batch} of {size} rows, for {ax.size} ranks."
            check.explain(_WHERE, what, ax, fix="batch= is of all ranks together, a row or more for each")
        if last == "short" and 0 < rest < ax.size:
            what = f"the last batch has {rest} of {size} rows, for {ax.size} ranks."
            check.explain(_WHERE, what, ax, fix='last="drop", last="wrap", or another batch=')
        self.size, self.batch, self.shuffle, self.seed, self.last = size, batch, bool(shuffle), seed, last
        self.mesh: Mesh = ax.mesh
        self._axis = axis
        self.epoch = self.done = 0
        self._read = self._followed = False

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self._axis, _WHERE)

    def __len__(self) -> int:
        whole, rest = divmod(self.size, self.batch)
        return whole + (rest > 0 and self.last != "drop")

    def __iter__(self) -> Iterator[list[int]]:
        """The rows of this rank, from where the epoch stands."""
        self._read = True
        return self._rows(self.epoch, self.done)

    def _rows(self, epoch: int, done: int) -> Iterator[list[int]]:
        order, axis = self.order(epoch), self.axis
        for number in range(done, len(self)):
            yield self._share(order, number, axis)

    def _share(self, order: Tensor, number: int, axis: Axis) -> list[int]:
        """This rank's rows of a batch."""
        with _torch.outside_transforms(), _torch.without_modes():
            rows = order[number * self.batch : (number + 1) * self.batch]
            if self.last == "wrap" and len(rows) < self.batch:
                rows = torch.cat([rows, order.repeat(-(-self.batch // self.size))[: self.batch - len(rows)]])
            even = len(rows) % axis.size == 0
            index = axis.own_part("which rows of a batch a rank has") if even else axis.index
            begin, end = (at * len(rows) // axis.size for at in (index, index + 1))
            return rows[begin:end].tolist()

    def order(self, epoch: int) -> Tensor:
        """The rows of an epoch in their order, of all ranks, int64 ``[size]``."""
        with _torch.outside_transforms(), _torch.without_modes():
            if not self.shuffle:
                return torch.arange(self.size, device="cpu")
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            return torch.randperm(self.size, generator=generator, device="cpu")

    @Op("MeshBatchSampler.follow", composed=True)
    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """Give what a loader of these rows gives, and count it as used; at the end the next epoch begins.

        ::

            for epoch in range(sampler.epoch, 3):
                for x, y in sampler.follow(loader):
                    ...

        Args:
            batches: the loader, or whatever else has been made of this sampler and gives one thing per batch.

        Returns: an iterator over the rest of the epoch. A batch counts as used once it was given, so that a state that
            is saved while it is worked on, or later, goes on with the next. Who takes the last batch of an epoch and
            asks for no more has ended the epoch, too.

        Cost: before the first batch an all_gather of seven numbers: every rank stands at the same place of the same
            rows.

        Raises:
            MeshError: on every rank, if they do not, with what differs.
        """
        self.epoch, self.done = self._next()
        self._agree()
        self._followed = True
        for batch in batches:
            self.done += 1
            yield batch
        self.epoch, self.done = self.epoch + 1, 0

    def _next(self) -> tuple[int, int]:
        """The epoch of the next batch, and its place in it."""
        return (self.epoch + 1, 0) if self.done >= len(self) else (self.epoch, self.done)

    def _agree(self) -> None:
        mine = self.state_dict(checked=False)
        rows = agree([_LASTS.index(each) if name == "last" else each % 2**62 for name, each in mine.items()], self.axis)
        for at, name in enumerate(mine):
            if len({row[at] for row in rows}) > 1:
                found = ", ".join(repr(_LASTS[row[at]] if name == "last" else row[at]) for row in rows[:8])
                fail(_WHERE, f"{name} differs between ranks.", got=found, fix="the same on each; load one state on all")

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, at its first batch."""
        if not check.whole_number(epoch) or epoch < 0:
            fail(_WHERE, f"epoch {epoch!r}.", fix="0 or more")
        self.epoch, self.done, self._read = epoch, 0, False

    def state_dict(self, *, checked: bool = True) -> dict[str, Any]:
        """Where it stands, plain data, the same on every rank: for ``checkpoint.save(..., extra=)``."""
        if checked and self._read and not self._followed:
            fail(
                _WHERE,
                "it was read, and nobody has counted which batches were used.",
                fix="for batch in sampler.follow(loader)",
            )
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        return given | dict(zip(("epoch", "done"), self._next(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was, on any number of ranks.

        Raises:
            MeshError: it is of another size, batch, order or end, by which other rows would stand at its place.
        """
        mine = self.state_dict(checked=False)
        if not isinstance(state, Mapping) or state.keys() != mine.keys():
            fail(_WHERE, "this is no state of a MeshBatchSampler.", got=repr(state)[:200], fix="its state_dict()")
        other = [name for name in _SAME if state[name] != mine[name]]
        if other:
            got = ", ".join(f"{name} {mine[name]!r} here, {state[name]!r} in the state" for name in other)
            fail(_WHERE, f"the state is of another {' and '.join(other)}.", got=got, fix="make it with the same")
        self.epoch, self.done = int(state["epoch"]), int(state["done"])
