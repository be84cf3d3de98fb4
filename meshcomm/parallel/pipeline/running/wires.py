"""What goes from stage to stage: the tensors of a pytree and, once per change, how it looks.

::

    first time    row of 1024 bytes: the outline (shapes, dtypes, which leaves need gradients, what is no tensor)
                  the bytes that the row has no room for
    always        the tensors, in order; their gradients back

A message's tag says which stage it leaves, for which microbatch, and whether it is an outline, a forward or a gradient;
and after how many passes that failed, for what these have sent may still be on its way. Tensors go without
envelopes where all ranks say, before a pass, that they can (:class:`Terms`).

What is sent is kept until it is certain that it was taken: who sends what it makes later in its row than it takes this
has taken this. ::

    this rank   sends to action 3 of rank 1 ───┐         gets what action 5 of rank 1 makes: lets go of what it sent
    rank 1                                     3   4   5 ──┘
"""

from __future__ import annotations

import contextlib
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import Axis
from meshcomm.collectives.door import made
from meshcomm.collectives.messages import EXCHANGE
from meshcomm.errors import CommError, fail, few, shape_text, text
from meshcomm.objects.pickles import byte_view, pack, unpack
from meshcomm.runtime.call import Post, Want, told
from meshcomm.runtime.recorder import noted
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.runtime.transports.gloo import carrier as carriers
from meshcomm.runtime.transports.gloo.carrier import Carrier
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.work import Work, let_go

OUTLINE, FORWARD, GRADIENT = range(3)
_KINDS = 4
_FIRST_TAG = 2**29
"""Tags of users' own messages over the axis are seldom as large."""
_LAST_TAG = 2**30
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


@dataclass(frozen=True)
class Outline:
    """A pytree without the values of its tensors."""

    leaves: tuple[Any, ...]
    """:class:`Leaf` for each tensor, and whatever else there is as it is."""
    form: Any

    @cached_property
    def tensors(self) -> list[Leaf]:
        """Those that travel."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @cached_property
    def wanted(self) -> list[Leaf]:
        """Those of which gradients travel back."""
        return [leaf for leaf in self.tensors if leaf.wants]

    def __str__(self) -> str:
        return few([str(leaf) for leaf in self.leaves]) if self.leaves else "nothing"

    def is_of(self, leaves: Sequence[Any], form: Any) -> bool:
        """Whether a pytree of tensors alone looks so."""
        if len(leaves) != len(self.tensors) or len(leaves) != len(self.leaves) or form != self.form:
            return False
        return all(
            isinstance(x, Tensor) and x.shape == leaf.shape and x.dtype == leaf.dtype and x.requires_grad == leaf.wants
            for x, leaf in zip(leaves, self.tensors, strict=True)
        )

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree with these tensors."""
        given = iter(tensors)
        return _torch.tree_unflatten(
            [next(given) if isinstance(leaf, Leaf) else leaf for leaf in self.leaves], self.form
        )


def outline_of(tree: Any, known: Outline | None = None) -> tuple[Outline, list[Tensor]]:
    """How a pytree looks, and its tensors. ``known``: how it may be expected to look."""
    leaves, form = _torch.tree_flatten(tree)
    if known is not None and known.is_of(leaves, form):
        return known, leaves
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    said = [Leaf(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves]  # fmt: skip
    return Outline(tuple(said), form), tensors


Coming = Work[list[Tensor]] | carriers.Coming


class _Passes:
    failed = 0
    """How many have failed in this process, or in another one that has told of them."""


class Terms(NamedTuple):
    """What ranks agree on for the messages of one pass: each says what it can, and all do what all can. A profiler or a
    trace on one rank changes how the messages of all ranks go, and never those of one side alone.
    """

    form: int
    """Of the carrier; 0 where messages have envelopes."""
    failed: int
    """Passes before this one that have failed somewhere; what these ranks have sent then is left where it is."""

    @classmethod
    def met(cls, every: Sequence[Sequence[int]]) -> Terms:
        """``every``: what each rank has said."""
        forms = {form for form, _ in every}
        return cls(forms.pop() if len(forms) == 1 else 0, max(failed for _, failed in every))


def carrier_along(axis: Axis) -> Carrier | None:
    """Of this rank, as long as nobody looks at its messages one by one."""
    link = axis.link
    if isinstance(link, ProcessLink) and axis.mesh.device.type == "cpu" and not _torch.profiler_on():
        return link.carrier(noted(None, "exchange", axis, None, ()))
    return None


def terms_of(carrier: Carrier | None) -> Terms:
    """What this rank says."""
    return Terms(0 if carrier is None else carrier.form, _Passes.failed)


class Wires:
    """This rank's messages along the axis, in one pass."""

    def __init__(self, axis: Axis, stages: int, microbatches: int, terms: Terms, carrier: Carrier | None) -> None:
        """``carrier``: the one that this rank's own terms told of."""
        self.axis, self._microbatches, self._failed = axis, microbatches, terms.failed
        most = (_LAST_TAG - _FIRST_TAG) // (stages * microbatches * _KINDS)
        self._first_tag = _FIRST_TAG + terms.failed % most * stages * microbatches * _KINDS
        self._most = 2 * axis.size
        """As many as a schedule that goes on steadily has on the way to one rank."""
        self._sent: dict[int, deque[tuple[int, Coming]]] = defaultdict(deque)
        """By rank: where in its row it takes each."""
        self._carrier = carrier if terms.form else None

    def tag(self, kind: int, stage: int, microbatch: int) -> int:
        """Of a message that leaves ``stage``."""
        return self._first_tag + (stage * self._microbatches + microbatch) * _KINDS + kind

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int, taken: int, *, agreed: bool = True) -> None:
        """Begin to; they stay as they are until they are sent. ``taken``: where in its row ``dst`` takes them;
        ``agreed``: it knows their shapes and dtypes.
        """
        if not tensors:
            return
        if self._carrier is not None and not all(x.is_cpu for x in tensors):
            places = sorted({str(x.device) for x in tensors})
            fix = "return y.cpu() from the stage, or make the mesh on the device"
            fail(
                "pipelined",
                "a stage gives tensors that are not where its mesh is.",
                got=f"{', '.join(places)}; cpu",
                fix=fix,
            )
        going = [x.detach().resolve_conj().contiguous() for x in tensors]
        work: Coming
        if agreed and self._carrier is not None:
            work = self._carrier.take(going, dst, tag)
        else:
            work = self._exchange([(x, dst, tag) for x in going], [], (going[0].dtype, tuple(going[0].shape)))
        self._sent[dst].append((taken, work))

    def receive(self, leaves: Sequence[Leaf], src: int, tag: int, *, agreed: bool = True) -> Coming:
        """Begin to. Nobody's actions wait for what they have sent: it may be taken in the wait."""
        if not leaves:
            return Work([])
        if agreed and self._carrier is not None:
            return self._carrier.bring([(leaf.shape, leaf.dtype) for leaf in leaves], src, tag)
        device = self.axis.mesh.device
        wants: list[Want] = [(src, leaf.shape, leaf.dtype, tag, device) for leaf in leaves]
        return self._exchange([], wants, (leaves[0].dtype, leaves[0].shape))

    def _exchange(self, posts: list[Post], wants: list[Want], kind: tuple[Any, Any]) -> Work[list[Tensor]]:
        told.takes = True
        try:
            work: Work[list[Tensor]] = made(
                EXCHANGE, (), self.axis, kind, True, lambda link: link.exchange(posts, wants)
            )
        finally:
            told.takes = False
        return work

    def send_outline(self, outline: Outline, dst: int, tag: int, taken: int) -> None:
        """It is read by who has not seen one like it."""
        data = pack(_torch.tree_unflatten(list(outline.leaves), outline.form), "what the stage gives")
        row = bytearray(_HEAD.pack(len(data))) + data[: _ROW - _HEAD.size]
        row += bytes(_ROW - len(row))
        rest = data[_ROW - _HEAD.size :]
        with _torch.outside_transforms():
            self.send([byte_view(row), *([byte_view(rest)] if rest else [])], dst, tag, taken, agreed=False)

    def receive_outline(self, src: int, tag: int) -> Outline:
        """Wait for one."""
        with _torch.outside_transforms():
            [row] = self.receive([Leaf((_ROW,), torch.uint8, False)], src, tag, agreed=False).wait()
            raw = bytes(row.cpu().numpy())
            [length] = _HEAD.unpack_from(raw)
            data = bytearray(raw[_HEAD.size : _HEAD.size + length])
            if len(data) < length:
                wanted = [Leaf((length - len(data),), torch.uint8, False)]
                [rest] = self.receive(wanted, src, tag, agreed=False).wait()
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

    @contextlib.contextmanager
    def until_sent(self, asked: Mapping[Any, Coming]) -> Iterator[None]:
        """Around a pass: afterwards everything is sent. Where it fails, the next one takes nothing of what is on its
        way, and nobody waits for that, nor for what was ``asked`` for.
        """
        try:
            yield
            for sent in self._sent.values():
                while sent:
                    sent.popleft()[1].wait()
        except BaseException:
            if not is_dry():  # a dry run begins again until it has what others send
                _Passes.failed = max(_Passes.failed, self._failed + 1)
            for work in [*asked.values(), *(work for sent in self._sent.values() for _, work in sent)]:
                if isinstance(work, Work):
                    let_go(work)
            raise


def refuse_change(stage: int, microbatch: int, was: Outline, now: Outline) -> None:
    """A stage gives something else than it has said it would: whoever comes after it waits for that."""
    pairs = [(a, b) for a, b in zip(was.leaves, now.leaves, strict=False) if a != b]
    if was.form == now.form and len(was.leaves) == len(now.leaves) and not pairs:
        return
    before, after = pairs[0] if pairs else (was.form, now.form)
    what = f"stage {stage} gives {after} for microbatch {microbatch}, and has given {before} for a batch like this."
    fix = "outputs whose shapes and dtypes follow from those of the inputs; or pad them"
    if pairs and not isinstance(before, Leaf) and not isinstance(after, Leaf):
        fix = "as a tensor what changes from batch to batch: torch.as_tensor(x)"
    raise CommError(text("pipelined", what, fix=fix))
