"""The least that fully sharded blocks are in Python over torch's own parts: the floor of the host's time.

Per unit one raw gather, one node of autograd that parts it into parameters and packs their gradients, one raw
reduce_scatter, and one node, the same in each pass, that gives each parameter, a slice of the shard, its gradient;
weights that autograd saves are saved by place and gathered again. Nothing is checked, noted, told to others or gathered
ahead, and nothing is right but this one step.

With hooks of units alone, as fully_shard has them, it takes less: ``emptied``. Autograd saves the weights themselves,
whose memory is let go of after forward and filled before backward comes to the unit's result. Where it comes to the
unit by another way, by what a part has kept for the loss, it reads memory that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

_spans: list[tuple[int, int, Unit]] = []
"""From and to which address buffers lie that are open, and whose."""


class Unit:
    """Modules whose parameters are gathered together."""

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        places = {p: at for at, p in enumerate(params)}
        self.sites: list[tuple[Any, str, int, nn.Parameter]] = [
            (part._parameters, name, places[p], p)
            for part in module.modules()
            for name, p in part._parameters.items()
            if p is not None and p in places
        ]
        self.params, self.shapes = params, [torch.empty(p.shape) for p in params]
        ranks, self.total = dist.get_world_size(), sum(p.numel() for p in params)
        self.chunk = -(-self.total // ranks)
        self.zeros = torch.zeros(ranks * self.chunk - self.total)
        whole = torch.cat([*(p.detach().reshape(-1) for p in params), self.zeros])
        self.flat = whole.chunk(ranks)[dist.get_rank()].clone()
        self.widths = self.kept_of(params)
        for p, piece in zip(params, self.flat.split_with_sizes(self.widths), strict=True):
            p.data = piece
        self.token: Tensor = _shards(self, *params)
        self.again: Tensor | None = None
        self.gradient: Tensor | None = None
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def kept_of(self, params: Sequence[nn.Parameter]) -> list[int]:
        """How many elements of each this rank has; the last one has what is free behind it, too."""
        first, last = dist.get_rank() * self.chunk, (dist.get_rank() + 1) * self.chunk
        widths, start = [], 0
        for p in params:
            widths.append(max(0, min(start + p.numel(), last) - max(start, first)))
            start += p.numel()
        widths[-1] += self.chunk - sum(widths)
        return widths

    def gathered(self) -> Tensor:
        """The buffer."""
        group: Any = dist.group.WORLD
        buffer = torch.empty(self.chunk * dist.get_world_size())
        group._allgather_base(buffer, self.flat).wait()
        return buffer

    def before(self, *_: object) -> None:
        """Forward begins."""
        buffer, self.again = self.gathered(), None
        self.show(buffer)
        first = buffer.data_ptr()
        _spans.append((first, first + buffer.nbytes, self))

    def after(self, *_: Any) -> None:
        """It has ended."""
        self.hide()
        _spans.pop()

    def show(self, buffer: Tensor) -> None:
        """The module has whole parameters."""
        views = _weights(self.token, self, buffer)
        for table, name, at, _ in self.sites:
            table[name] = views[at]

    def hide(self) -> None:
        """It has its shards."""
        for table, name, _, p in self.sites:
            table[name] = p

    def release(self) -> None:
        """Backward has used them."""
        self.again = None


class Emptied(Unit):
    """With hooks of units alone."""

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        super().__init__(module, params)
        self.buffer = torch.empty(self.chunk * dist.get_world_size())
        self.storage = self.buffer.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.same = torch.empty(0).set_(self.storage, 0, self.buffer.shape, (1,))
        """Written to, of which autograd does not hear."""
        self.release()

    def fill(self, *_: object) -> None:
        """Gather."""
        group: Any = dist.group.WORLD
        self.storage.resize_(self.nbytes)
        group._allgather_base(self.same, self.flat).wait()

    def before(self, *_: object) -> None:
        """Forward begins."""
        self.fill()
        self.show(self.buffer)

    def after(self, *given: Any) -> None:
        """It has ended."""
        self.hide()
        self.release()
        given[-1].grad_fn.register_prehook(self.fill)

    def release(self) -> None:
        """The memory goes."""
        self.storage.resize_(0)


class _Shards(Function):
    @staticmethod
    def forward(ctx: Any, unit: Unit, *_: Tensor) -> Tensor:
        ctx.unit = unit
        return unit.flat.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        assert unit.gradient is not None
        return None, *unit.gradient.div_(dist.get_world_size()).split_with_sizes(unit.widths)


class _Weights(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, unit: Unit, buffer: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        parts: Any = torch._C._nn.unflatten_dense_tensors  # type: ignore[attr-defined]
        return tuple(parts(buffer[: unit.total], unit.shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        unit, group = ctx.unit, dist.group.WORLD
        unit.release()
        packed = torch.cat([*(g.reshape(-1) for g in gradients), unit.zeros])
        unit.gradient = torch.empty(unit.chunk)
        group._reduce_scatter_base(unit.gradient, packed, dist.ReduceScatterOptions()).wait()  # type: ignore[union-attr]
        return packed.new_empty(0), None, None


# Function.apply looks for torch.func first.
_shards: Any = super(Function, _Shards).apply  # type: ignore[misc]
_weights: Any = super(Function, _Weights).apply  # type: ignore[misc]


def _pack(x: Tensor) -> tuple[Any, ...]:
    place = x.data_ptr()
    for first, last, unit in _spans:
        if first <= place < last:
            return unit, x.size(), x.stride(), (place - first) // 4
    return None, x if x.is_leaf else x.detach(), x._version


def _unpack(saved: tuple[Any, ...]) -> Tensor:
    unit, x, rest, *offset = saved
    if unit is None:
        assert x._version == rest
        return x  # type: ignore[no-any-return]
    if unit.again is None:
        unit.again = unit.gathered()
    return unit.again.as_strided(x, rest, offset[0])  # type: ignore[no-any-return]


def sharded(model: nn.Module, parts: Sequence[nn.Module], kind: type[Unit] = Unit) -> list[Unit]:
    """A unit per part, and one of what is left, changed in place; float32, each parameter in one of them."""
    units = [kind(part, list(part.parameters())) for part in parts]
    inside = {p for part in parts for p in part.parameters()}
    return [*units, kind(model, [p for p in model.parameters() if p not in inside])]


def saved_by_place() -> torch.autograd.graph.saved_tensors_hooks:
    """Around forward."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
