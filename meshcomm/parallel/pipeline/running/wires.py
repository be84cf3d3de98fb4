"""What goes from stage to stage: the tensors of a pytree and, once per change, how it looks.

::

    first time    row of 1024 bytes: the outline (shapes, dtypes, which leaves need gradients, what is no tensor)
                  the bytes that the row has no room for
    always        the tensors, in order; their gradients back

A message's tag says which stage it leaves, for which microbatch, and whether it is an outline, a forward or a gradient.

What is sent is kept until it is certain that it was taken: who sends what it makes later in its row than it takes this
has taken this. ::

    this rank   sends to action 3 of rank 1 ───┐         gets what action 5 of rank 1 makes: lets go of what it sent
    rank 1                                     3   4   5 ──┘
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.collectives.door import made
from meshcomm.collectives.messages import EXCHANGE
from meshcomm.errors import CommError, shape_text, text
from meshcomm.mesh import Axis
from meshcomm.objects.pickles import byte_view, pack, unpack
from meshcomm.runtime.call import Post, Want, told
from meshcomm.runtime.pending import then
from meshcomm.work import Work

OUTLINE, FORWARD, GRADIENT = range(3)
_KINDS = 4
_FIRST_TAG = 2**29
"""Tags of users' own messages over the axis are seldom as large."""
_ROW = 1024
_HEAD = struct.Struct("=q")


@dataclass(frozen=True)
class Leaf:
    """A tensor that goes from stage to stage: a leaf of a pytree itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants: bool
    """Whether a gradient comes back."""

    def __str__(self) -> str:
        return shape_text(self.dtype, self.shape)


class Outline(NamedTuple):
    """A pytree without the values of its tensors."""

    leaves: tuple[Any, ...]
    """:class:`Leaf` for each tensor, and whatever else there is as it is."""
    form: Any

    @property
    def tensors(self) -> list[Leaf]:
        """Those that travel."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @property
    def wanted(self) -> list[Leaf]:
        """Those of which gradients travel back."""
        return [leaf for leaf in self.tensors if leaf.wants]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree with these tensors."""
        given = iter(tensors)
        return _torch.tree_unflatten(
            [next(given) if isinstance(leaf, Leaf) else leaf for leaf in self.leaves], self.form
        )


def outline_of(tree: Any) -> tuple[Outline, list[Tensor]]:
    """How a pytree looks, and its tensors."""
    leaves, form = _torch.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    said = [Leaf(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves]  # fmt: skip
    return Outline(tuple(said), form), tensors


class Wires:
    """This rank's messages along the axis."""

    def __init__(self, axis: Axis, stages: int, microbatches: int) -> None:
        self.axis, self._stages, self._microbatches = axis, stages, microbatches
        self._most = 2 * axis.size
        """As many as a schedule that goes on steadily has on the way to one rank."""
        self._sent: dict[int, deque[tuple[int, Work[None]]]] = defaultdict(deque)
        """By rank: where in its row it takes each."""

    def tag(self, kind: int, stage: int, microbatch: int) -> int:
        """Of a message that leaves ``stage``."""
        return _FIRST_TAG + (stage * self._microbatches + microbatch) * _KINDS + kind

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int, taken: int) -> None:
        """Begin to; they stay as they are until :meth:`finish`. ``taken``: where in its row ``dst`` takes them."""
        posts: list[Post] = [(x.detach().resolve_conj().contiguous(), dst, tag) for x in tensors]
        if posts:
            kind = posts[0][0].dtype, tuple(posts[0][0].shape)
            work = made(
                EXCHANGE, (), self.axis, kind, True, lambda link: then(link.exchange(posts, []), lambda _: None)
            )
            self._sent[dst].append((taken, work))

    def receive(self, leaves: Sequence[Leaf], src: int, tag: int) -> Work[list[Tensor]]:
        """Begin to. Nobody's actions wait for what they have sent: it may be taken in the wait."""
        device = self.axis.mesh.device
        wants: list[Want] = [(src, leaf.shape, leaf.dtype, tag, device) for leaf in leaves]
        if not wants:
            return Work([])
        kind = wants[0][2], wants[0][1]
        work: Work[list[Tensor]] = made(
            EXCHANGE, (), self.axis, kind, True, lambda link: then(_asked(link, wants), list)
        )
        return work

    def send_outline(self, outline: Outline, dst: int, tag: int, taken: int) -> None:
        """It is read by who has not seen one like it."""
        data = pack(_torch.tree_unflatten(list(outline.leaves), outline.form), "what the stage gives")
        row = bytearray(_HEAD.pack(len(data))) + data[: _ROW - _HEAD.size]
        row += bytes(_ROW - len(row))
        rest = data[_ROW - _HEAD.size :]
        self.send([byte_view(row), *([byte_view(rest)] if rest else [])], dst, tag, taken)

    def receive_outline(self, src: int, tag: int) -> Outline:
        """Wait for one."""
        [row] = self.receive([Leaf((_ROW,), torch.uint8, False)], src, tag).wait()
        raw = bytes(row.cpu().numpy())
        [length] = _HEAD.unpack_from(raw)
        data = bytearray(raw[_HEAD.size : _HEAD.size + length])
        if len(data) < length:
            [rest] = self.receive([Leaf((length - len(data),), torch.uint8, False)], src, tag).wait()
            data += bytes(rest.cpu().numpy())
        leaves, form = _torch.tree_flatten(unpack(data, self.axis.mesh.device))
        return Outline(tuple(leaves), form)

    def proven(self, src: int, made: int) -> None:
        """What came was made at place ``made`` of the row of ``src``: let go of what it has taken until then."""
        sent = self._sent[src]
        for _ in range(len(sent)):
            taken, work = sent.popleft()
            if taken <= made:
                work.wait()  # it is over
            else:
                sent.append((taken, work))

    def forget_sent(self) -> None:
        """Let go of what the others have taken and nothing has proven, where looking costs nobody anything; but if it
        is little: each look is a thread's.
        """
        if self.axis.mesh.in_process:
            return
        for sent in self._sent.values():
            while len(sent) > self._most and sent[0][1].done():
                sent.popleft()[1].wait()

    def finish(self) -> None:
        """Until everything is sent."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].wait()


def _asked(link: Any, wants: Sequence[Want]) -> Any:
    told.takes = True
    try:
        return link.exchange([], wants)
    finally:
        told.takes = False


def refuse_change(stage: int, microbatch: int, was: Outline, now: Outline) -> None:
    """A stage gives something else than it has said it would: whoever comes after it waits for that."""
    pairs = [(a, b) for a, b in zip(was.leaves, now.leaves, strict=False) if a != b]
    if was.form == now.form and len(was.leaves) == len(now.leaves) and not pairs:
        return
    before, after = pairs[0] if pairs else (was.form, now.form)
    what = f"stage {stage} gives {after} for microbatch {microbatch}, and has given {before} for a batch like this."
    raise CommError(
        text("pipelined", what, fix="outputs whose shapes and dtypes follow from those of the inputs; or pad them")
    )
