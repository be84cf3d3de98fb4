"""Live memory of one rank of a dry run: what is there at once, at which line it is most, and of what it consists.

::

    an operation gives a tensor  ──  of a storage that is not known  ──  a _Piece: bytes, what it is, the line
    a later operation shows what a piece is after all (a Parameter, its .grad, a state)  ──  its part changes
    the storage dies (its last tensor, or a graph's)  ──  bytes are free again

Counted are storages, not tensors: views share theirs. What a piece is shows while the program goes on, so the parts of
the peak are added up when the run has ended.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshcomm import _torch
from meshcomm.dry.workspaces import workspace
from meshcomm.runtime.callsite import Spot, called_at, is_ours, site_at
from meshcomm.runtime.transports.dry.world import DryWorld, dry_world

__all__ = ["PARTS", "LiveMemory", "Peak", "most_of"]

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buckets", "other")
"""Of what the memory of a rank consists."""
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _GATHERED, _BUCKETS, _OTHER = PARTS
_NAME = "_meshcomm_piece"
_BLOCK = 512
"""Bytes of which an accelerator's allocator gives whole multiples."""
_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@dataclass(frozen=True)
class Peak:
    """The most memory that a rank of a dry run has at once on one kind of device.

    Args:
        bytes: of all storages that are there.
        parts: what they are; the values add up to ``bytes``.

            * ``parameters``: modules' own, as they are cut;
            * ``gradients``: in ``.grad``, or on the way there;
            * ``optimizer``: states, and what a step makes while it runs;
            * ``activations``: what forward computes and keeps, and what backward computes of it;
            * ``gathered``: whole parameters of sharded ones;
            * ``buckets``: gradients that are put together to be reduced;
            * ``other``: inputs, buffers, and what is made of neither parameters nor activations.
        line: where in the program the peak is reached, ``"train.py:41"``; of backward that of the operation whose
            backward it is, ``"train.py:41, in backward"``.
        operation: of torch's that makes it, ``"aten::mm"``.
        lines: the bytes by the lines that made them, most first.
        device: ``"cpu"``, ``"cuda"``.
        rank: whose it is.
    """

    bytes: int
    parts: Mapping[str, int]
    line: str
    operation: str
    lines: Mapping[str, int]
    device: str
    rank: int

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {_mib(size)}" for name, size in self.parts.items() if size)
        where = f" at {self.line} ({self.operation})" if self.line else ""
        return f"peak memory of {self.device} on rank {self.rank}: {_mib(self.bytes)} MiB{where}: {shares or 'none'}"


def most_of(ranks: Sequence[Mapping[str, Peak]]) -> dict[str, Peak]:
    """Of each kind of device the rank that has most on it; nothing on the CPU where there is none at all."""
    found: dict[str, Peak] = {}
    for peaks in ranks:
        for name, peak in peaks.items():
            if name not in found or peak.bytes > found[name].bytes:
                found[name] = peak
    return found or {"cpu": Peak(0, dict.fromkeys(PARTS, 0), "", "", {}, "cpu", 0)}


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


class _Piece(weakref.ref[torch.UntypedStorage]):
    """A storage while it is there."""

    __slots__ = ("born", "died", "nbytes", "part", "said", "site")
    born: int
    died: int | None
    nbytes: int
    said: int
    """Bytes that the storage says it has."""
    part: str
    site: str | Spot | None


class _Device:
    """The pieces on one kind of device."""

    def __init__(self) -> None:
        self.now = self.most = self.clock = self.at = self.alive = 0
        self.pieces: list[_Piece] = []
        self.site: Any = None
        self.operation = ""

    def add(self, piece: _Piece, operation: str) -> None:
        """One more; whether there never was as much is seen."""
        self.clock += 1
        piece.born, piece.died = self.clock, None
        self.alive += 1
        self.now += piece.nbytes
        if self.now > self.most:
            if len(self.pieces) > 2 * self.alive + _MANY:  # those that were gone before have no part in it
                self.pieces = [each for each in self.pieces if each.died is None]
            self.most, self.at, self.site, self.operation = self.now, self.clock, piece.site, operation
        self.pieces.append(piece)

    def free(self, piece: _Piece) -> None:
        """Its storage is there no more."""
        if piece.died is None:
            self.clock += 1
            piece.died = self.clock
            self.alive -= 1
            self.now -= piece.nbytes

    def at_most(self) -> list[_Piece]:
        """What was there at the peak."""
        return [each for each in self.pieces if each.born <= self.at and (each.died is None or each.died > self.at)]


_MANY = 4096


class LiveMemory:
    """What is alive of what a rank has made."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._lines: dict[int, Spot] = {}
        """Of the nodes of autograd, by number: the user's line that made them."""
        self._stepping = False

    @property
    def now(self) -> dict[str, int]:
        """Bytes by kind of device."""
        return {name: device.now for name, device in self._devices.items()}

    def peaks(self, rank: int) -> dict[str, Peak]:
        """By kind of device."""
        return {name: _peak(name, device, rank) for name, device in self._devices.items()}

    @contextmanager
    def watching(self, world: DryWorld) -> Iterator[None]:
        """What optimizers do inside is known as theirs."""

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if dry_world() is world:
                self._stepping = True
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        self._know(p)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if dry_world() is world:
                self._stepping = False
                for x in _tensors(list(optimizer.state.values())):
                    _mark(x, _OPTIMIZER)

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation that was done."""
        operands, results = _tensors((args, kwargs)), (result,) if isinstance(result, Tensor) else _tensors(result)
        backward = _torch.backward_pass() != -1
        node = _torch.current_node() if backward else None
        graph = torch.is_grad_enabled()
        spot: Spot | None = None
        if graph and not backward:
            spot, _ = _frames()
            self._lines.setdefault(_torch.next_sequence_number() - 1, spot)
        for x in operands:
            if isinstance(x, Parameter) and x.is_leaf:
                self._know(x)
        adds = node is not None and node.name().endswith("AccumulateGrad")
        name = _torch.operation_name(func)
        if node is not None and node.name().endswith(_OF_TORCH) and (name in _IN_PLACE or _adds_up(name, operands)):
            self._written_over(operands[0])
        own = _LARGER.get(name, _nothing)(operands)
        for x in (*results, *operands[:1]) if adds else results:
            storage = _storage(x)
            if storage is None:
                continue
            piece: _Piece | None = getattr(storage, _NAME, None)
            nbytes = int(storage.nbytes())
            if piece is None or piece.said != nbytes:
                if piece is None and (not nbytes or _is_of_outside(func, operands)):
                    continue
                self._add(func, operands, x, storage, own, backward, node, graph)
                piece = getattr(storage, _NAME)
            if adds:
                piece.part = _GRADIENTS
        self._see_workspace(func, args, operands, results)

    def hold(self, x: Tensor) -> None:
        """What was made with memory, and by no operation: a random state, which a checkpoint keeps."""
        storage, device = x.untyped_storage(), self._devices.setdefault(x.device.type, _Device())
        piece: Any = _Piece(storage, device.free)
        piece.said = piece.nbytes = int(storage.nbytes())
        piece.part, (piece.site, _) = _OTHER, _frames()
        storage._meshcomm_piece = piece  # type: ignore[attr-defined]
        device.add(piece, "a random state")

    def _written_over(self, x: Tensor) -> None:
        """What is made next lies where ``x`` does."""
        piece: _Piece | None = getattr(_storage(x), _NAME, None)
        if piece is not None:
            self._devices[x.device.type].free(piece)

    def _see_workspace(
        self, func: Any, args: Sequence[Any], operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """What a kernel takes while it runs."""
        nbytes = workspace(func, args, operands, results) if results else 0
        storage = _storage(results[0]) if nbytes else None
        made: _Piece | None = getattr(storage, _NAME, None)
        if made is None or storage is None:
            return
        device, piece, name = self._devices[results[0].device.type], _Piece(storage), _torch.operation_name(func)
        piece.nbytes, piece.part, piece.site = nbytes, _ACTIVATIONS, made.site
        device.add(piece, name)
        device.free(piece)

    def _add(
        self, func: Any, operands: Sequence[Tensor], x: Tensor, storage: Any, own: int, backward: bool, node: Any,
        graph: bool,
    ) -> None:  # fmt: skip
        device = self._devices.setdefault(x.device.type, _Device())
        before: _Piece | None = getattr(storage, _NAME, None)
        piece = _Piece(storage, device.free)
        spot, ours = _frames()
        piece.site = spot
        if backward and not graph:
            known = self._lines.get(_torch.sequence_number(node)) if node is not None else None
            piece.site = called_at(site_at(known or spot), backward=True)
        piece.said = int(storage.nbytes())
        piece.nbytes = _given(max(piece.said, own), x)
        piece.part = before.part if before is not None else self._part(operands, ours, backward, graph)
        if before is not None:
            device.free(before)
        storage._meshcomm_piece = piece
        device.add(piece, _torch.operation_name(func))

    def _part(self, operands: Sequence[Tensor], ours: Sequence[tuple[str, str]], backward: bool, graph: bool) -> str:
        """What a new piece is, as far as it is known when it is made."""
        if self._stepping and not backward and not graph:
            return _OPTIMIZER
        for file, name in ours:
            if (part := _BY_PLACE.get((file, name))) is not None:
                return part
        if backward:
            return _BUCKETS if any(file in _REDUCING for file, _ in ours) else _ACTIVATIONS
        parts = {_part_of(x) for x in operands}
        if parts == {_PARAMETERS} and any(each in _GATHERS for each in ours):
            return _GATHERED
        if parts & {_ACTIVATIONS, _GATHERED} or any(x.requires_grad and _part_of(x) != _PARAMETERS for x in operands):
            return _ACTIVATIONS
        return _ACTIVATIONS if _PARAMETERS in parts and (graph or len(parts) > 1) else _OTHER

    def _know(self, p: Tensor) -> None:
        if _part_of(p) != _GATHERED:
            _mark(p, _PARAMETERS)
        if p.grad is not None:
            _mark(p.grad, _GRADIENTS)


def _nothing(operands: Sequence[Tensor]) -> int:
    return 0


def _all_losses(operands: Sequence[Tensor]) -> int:
    shape: Sequence[int] = torch.broadcast_shapes(*(x.shape for x in operands[:2]))
    return math.prod(shape) * operands[0].itemsize


def _as_given(operands: Sequence[Tensor]) -> int:
    return operands[0].nbytes


_LARGER = {"aten::im2col": _as_given, "aten::col2im": _as_given} | {
    f"aten::{name}": _all_losses for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
}
"""Results whose memory is larger than they are: the mean or sum of losses, which lies where a loss for each element
was; and what was made as large as what it is made of, to be shrunk.
"""
_IN_PLACE = frozenset(f"aten::{name}" for name in ("scatter_add", "scatter", "index_add", "index_put"))
"""What autograd's own backwards do in the zeros that they have made, where tensors have memory."""
_OF_TORCH = "Backward0", "Backward1", "Backward2"


def _references(operands: Sequence[Any]) -> int:
    """How many Python has to the first one."""
    x = operands[0]
    return sys.getrefcount(x)


def _unheld() -> int:
    args = object(), object()
    return _references([*args]) + 1


_UNHELD = _unheld()
"""As many as there are to an operand that nobody has but who is called with it, and autograd."""


def _adds_up(name: str, operands: Sequence[Tensor]) -> bool:
    """Whether gradients of one value are added up: in the memory of the first one, where nobody else has that."""
    if name != "aten::add" or len(operands) != 2 or torch.is_grad_enabled():
        return False
    if _references(operands) > _UNHELD:  # a Function of the program's, or a hook, keeps it
        return False
    x, y = operands
    return (
        x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and not _torch.of_tensor(x.untyped_storage(), 1)
    )


_BY_PLACE = {
    ("parallel/fsdp/groups.py", "gather"): _GATHERED,
    ("parallel/fsdp/groups.py", "packed"): _BUCKETS,
    ("parallel/fsdp/groups.py", "scatter"): _GRADIENTS,
    ("parallel/fsdp/groups.py", "brought"): _GRADIENTS,
}
"""What is made in a function of the library's."""
_LINK = "runtime/transports/dry/link.py"
_GATHERS = ((_LINK, "all_gather"), (_LINK, "gather_flat"))
_REDUCING = ("collectives/trees/overlap.py", "parallel/data/replica.py", "parallel/data/spread.py")


def _frames() -> tuple[Spot, list[tuple[str, str]]]:
    """The innermost instruction of the user's, and the library's functions inside of it: file and name."""
    ours, frame = [], sys._getframe(2)
    while is_ours(file := frame.f_code.co_filename) and (outer := frame.f_back) is not None:
        if file.startswith(_HERE):
            ours.append((file[len(_HERE) :].replace(os.sep, "/"), frame.f_code.co_name))
        frame = outer
    return (frame.f_code, frame.f_lasti), ours


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """Its memory, if it would have some."""
    if x.layout is not torch.strided or not _torch.is_without_memory(x) or x.device.type == "meta":
        return None
    return x.untyped_storage()


def _is_of_outside(func: Any, operands: Sequence[Tensor]) -> bool:
    """Whether the result is a view of what was made outside of the run."""
    return bool(operands) and _torch.gives_views(func) and "lift_fresh" not in _torch.operation_name(func)


def _given(nbytes: int, x: Tensor) -> int:
    """Bytes that the device's allocator gives."""
    return nbytes if x.device.type == "cpu" else -(-nbytes // _BLOCK) * _BLOCK


def _part_of(x: Tensor) -> str:
    storage = _storage(x)
    return getattr(getattr(storage, _NAME, None), "part", _OTHER)


def _mark(x: Tensor, part: str) -> None:
    storage = _storage(x)
    piece = getattr(storage, _NAME, None)
    if piece is not None:
        piece.part = part


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in _torch.tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _peak(name: str, device: _Device, rank: int) -> Peak:
    parts, lines = dict.fromkeys(PARTS, 0), dict[str, int]()
    for piece in device.at_most():
        parts[piece.part] += piece.nbytes
        line = _line(piece.site)
        lines[line] = lines.get(line, 0) + piece.nbytes
    ordered = dict(sorted(lines.items(), key=lambda pair: -pair[1]))
    return Peak(device.most, parts, _line(device.site), device.operation, ordered, name, rank)


def _line(site: Any) -> str:
    return "" if site is None else site if isinstance(site, str) else str(site_at(site))
