"""The mode that takes the place of torch's random functions under :func:`meshcomm.spmd.random.rng.rng`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshcomm import _torch
from meshcomm.collectives.agree import forks_open
from meshcomm.errors import fail
from meshcomm.layout.notation import Layout
from meshcomm.layout.shapes import fit
from meshcomm.runtime.process.accelerator import with_doubles
from meshcomm.spmd.random.parts import Part
from meshcomm.spmd.random.philox import Ahead, Stream
from meshcomm.watch import here

WHERE = "rng"
_MOST = 1024
"""Shapes of which the parts are remembered."""


# -------------------------------------------------------------------------------------------------- which part it is


class Rows(NamedTuple):
    """Which rows of this rank's batch a function is given that is called with some of them at a time."""

    start: int
    stop: int
    total: int


_rows: ContextVar[Rows | None] = ContextVar("meshcomm_rows", default=None)


class only_rows:  # noqa: N801
    """Inside, what is drawn of as many rows is what these rows of the whole batch would draw."""

    __slots__ = ("_before", "_rows")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        self._before = _rows.set(self._rows)

    def __exit__(self, *_: object) -> None:
        _rows.reset(self._before)


class Cut(NamedTuple):
    """How tensors are cut, and which part is this rank's."""

    text: str
    layout: Layout
    sizes: Mapping[str, int]
    place: Mapping[str, int]
    parts: dict[Any, Part]
    """Those of the shapes that were asked for, and of shapes with rows."""

    def part(self, shape: Sequence[int], func: Any, rows: Rows | None = None) -> Part:
        """Which part of a global tensor this rank draws, given the shape of that part; ``rows``: or that of these rows
        of it.
        """
        try:
            fitted = fit(WHERE, self.layout, shape, self.sizes, self.text)
        except ValueError as error:
            hint = "draw it under an rng with a layout of its own, write ... for what differs, or leave the context"
            raise type(error)(f"{error}\n  in: {called(func)}\n  or: {hint}") from None
        counts = fitted.parts(self.sizes)
        starts = []
        for dim, length in zip(fitted, shape, strict=True):
            index = 0
            for axis in dim.axes:
                index = index * self.sizes[axis] + self.place[axis]
            starts.append(index * length)
        whole = [length * count for length, count in zip(shape, counts, strict=True)]
        if rows is not None:
            starts[0] = starts[0] // shape[0] * rows.total + rows.start
            whole[0] = rows.total * counts[0]
        return Part(tuple(shape), tuple(whole), tuple(starts))

    def leaves_whole(self) -> bool:
        """Whether every rank has all of each tensor."""
        return all(self.sizes[axis] == 1 for axis in self.layout.axes)


def called(func: Any) -> str:
    """As it would be called."""
    name = getattr(func, "__name__", str(func))
    if getattr(F, name, None) is func:
        return f"F.{name}"
    if getattr(nn.init, name, None) is func:
        return f"nn.init.{name}"
    return f"torch.{name}" if getattr(torch, name, None) is func else f"Tensor.{name}"


# ---------------------------------------------------------------------------------------------------------- the mode


class Draws(TorchFunctionMode):
    """Sees every call of a torch function in its context."""

    def __init__(self, cut: Cut, key: int, handler_of: Callable[[Any], Handler | None]) -> None:
        """``handler_of`` gives what takes the place of a random function, and None for others."""
        super().__init__()
        self.cut, self.key, self.handler_of = cut, key, handler_of
        self._ahead = Ahead()
        self.count = 0
        self.forks = forks_open()
        self.source: FrameType | None = None  # who has called the function that is being replaced
        self.repeating: FrameType | None = None  # a function that rejects numbers and draws again
        self.attempt = 0
        self.checkpoints = _checkpoints(sys._getframe(1))
        self.rows = _rows.get()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = self.handler_of(func)
        # A fork_rng inside of this context has the say.
        if handler is None or forks_open() != self.forks:
            return func(*args, **kwargs)
        self.source = sys._getframe(1)
        try:
            return handler(self, func, args, kwargs)
        finally:
            self.source = None

    def in_init(self) -> str:
        """The name of the one of nn.init's functions that has called the function; "" for others."""
        frame = self.source
        return frame.f_code.co_name if frame is not None and frame.f_globals is _INIT else ""

    def stream(self, device: torch.device) -> Stream:
        """The numbers of the next draw."""
        if _checkpoints(self.source) > self.checkpoints:
            fail(
                WHERE,
                "a checkpointed function draws, and the context stands around the checkpoint.",
                got=f"layout {self.cut.text!r}",
                fix="enter mc.rng inside of the function: backward computes it again outside of this context, and "
                "would draw other numbers",
            )
        init = self.in_init()
        # Each rank draws again as often as its own numbers need; for what comes next that must count as one draw.
        if self.source is not None and self.source is self.repeating:
            self.attempt += 1
        else:
            self.attempt = 0
            self.count += 1
            self.repeating = self.source if "trunc_normal" in init else None
        if "orthogonal" in init and not self.cut.leaves_whole():
            fail(
                WHERE,
                "nn.init.orthogonal_ makes the part of each rank orthogonal, and not the global tensor.",
                got=f"layout {self.cut.text!r}; mesh {dict(self.cut.sizes)}",
                fix="make the global tensor under a layout that does not cut it, then mc.shard or mc.reshard it",
            )
        return Stream(self.key, self.count - 1, self.attempt, device, self._ahead)

    def draw(
        self, func: Any, shape: Sequence[int], device: torch.device, make: Callable[[Stream, Part], Tensor]
    ) -> Any:
        """A tensor of this shape, made of the numbers of the next draw; no mode sees how."""
        with _torch.without_modes():
            return self.made(func, shape, device, make)

    def made(
        self, func: Any, shape: Sequence[int], device: torch.device, make: Callable[[Stream, Part], Tensor]
    ) -> Tensor:
        """The same, for who has seen to that."""
        part, near = self.part(shape, func), with_doubles(device)
        y = make(self.stream(near), part)
        return y if near is device else y.to(device)

    def part(self, shape: Sequence[int], func: Any) -> Part:
        """Which part of a global tensor this rank draws, given the shape of that part."""
        key, parts, rows = tuple(shape), self.cut.parts, _rows.get()
        if rows is not self.rows:
            fail(
                WHERE,
                "a stage of a pipeline draws, and the context stands around the step: each stage would begin anew.",
                got=f"layout {self.cut.text!r}; {called(func)}",
                fix="enter mc.rng inside of the layers, with a seed for each: seed=(step, layer)",
            )
        if rows is not None and not (key and 0 < key[0] == rows.stop - rows.start):
            rows = None
        kind = key if rows is None else (key, rows)
        found = parts.get(kind)
        if found is None:
            if len(parts) >= _MOST:
                parts.clear()
            found = parts[kind] = self.cut.part(key, func, rows)
        return found

    def __exit__(self, *exc: Any) -> None:
        self.repeating = None
        super().__exit__(*exc)  # type: ignore[no-untyped-call]


_CHECKPOINT, _INIT = vars(torch.utils.checkpoint), vars(nn.init)


def _checkpoints(frame: FrameType | None) -> int:
    """How many frames of torch.utils.checkpoint have led here."""
    count = 0
    while frame is not None:
        count += frame.f_globals is _CHECKPOINT
        frame = frame.f_back
    return count


def noted_as_drawn(x: Tensor) -> Tensor:
    """Tell the checker of varying types that ``x`` was drawn."""
    if here.watcher is not None:
        here.watcher.drawn(x)
    return x


Handler = Callable[[Draws, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the place of a function: ``handler(draws, func, args, kwargs)``."""
