"""Where in the user's code a collective was called."""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from meshcomm._torch.backward import backward_pass

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_EINOPS = os.path.join(os.path.dirname(_TORCH), "einops")
_OTHERS = (*(path + os.sep for path in (_HERE, _TORCH, _EINOPS)), contextlib.__file__)


class _Known(dict[str, bool]):
    """Whether a file is one of the others: asked for each frame of a call, of few files."""

    def __missing__(self, path: str) -> bool:
        if len(self) >= _MOST_FILES:
            self.clear()
        found = self[path] = path.startswith(_OTHERS)
        return found


_MOST_FILES = 10_000
known_files = _Known()
"""Whose call is felt looks here by itself, see :func:`call_spot`."""


def is_ours(path: str) -> bool:
    """Whether this is a file of this library, of torch or of einops, or that of context managers."""
    return known_files[path]


class CallSite(NamedTuple):
    """A file and a line; ``str`` gives ``train.py:88``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def call_site() -> CallSite:
    """The innermost frame that is neither this library's nor torch's nor einops' nor a context manager's."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType) -> CallSite:
    """The same, of a thread that is in this frame."""
    known = known_files  # as `outermost` does it, without its call
    while known[file := frame.f_code.co_filename] and (outer := frame.f_back) is not None:
        frame = outer
    return tuple.__new__(CallSite, (file, frame.f_lineno))  # half of what its own way costs


def outermost(frame: FrameType) -> FrameType:
    """The innermost frame from this one on that is the user's: that of :func:`call_site`."""
    while known_files[frame.f_code.co_filename] and (outer := frame.f_back) is not None:
        frame = outer
    return frame


Spot = tuple[CodeType, int]
"""An instruction of a function. To say in which line it stands takes as long as the function is."""


def call_spot(depth: int) -> Spot:
    """:func:`call_site`, if nobody may ever ask: :func:`site_at` says the line. ``depth``: how many frames out from
    here are surely not the user's.
    """
    known, frame = known_files, sys._getframe(depth)  # as `outermost` does it, without its call
    while known[(code := frame.f_code).co_filename] and (outer := frame.f_back) is not None:
        frame = outer
    return code, frame.f_lasti


def site_at(spot: Spot) -> CallSite:
    """In which line it stands."""
    code, place = spot
    found = _sites.get((id(code), place))
    if found is None:
        line = next((line for first, last, line in code.co_lines() if first <= place < last), None)
        if len(_sites) >= _MOST_FILES:
            _sites.clear()
        found = _sites[id(code), place] = code, CallSite(code.co_filename, line or code.co_firstlineno)
    return found[1]


_sites: dict[tuple[int, int], tuple[CodeType, CallSite]] = {}
"""Those that were asked for: of a trace there may be a million, of few."""


def called_in(frame: FrameType) -> tuple[str, CallSite] | None:
    """The public function that a thread is in, and the user's line; None if it is in none."""
    public, outer = "", frame
    while is_ours(outer.f_code.co_filename):
        name = outer.f_code.co_name
        public = public if name.startswith(("<", "_")) else name
        if outer.f_back is None:
            return None
        outer = outer.f_back
    return (public, CallSite(outer.f_code.co_filename, outer.f_lineno)) if outer is not frame else None


def in_backward() -> bool:
    """Whether autograd's backward makes the call."""
    return backward_pass() != -1


def called_at(site: CallSite, *, backward: bool) -> str:
    """The line in words, and whether backward makes the call."""
    return f"{site}{_IN_BACKWARD if backward else ''}"


_IN_BACKWARD = ", in backward"
_HINT = (
    "  in backward: a rank whose loss does not depend on what a collective gave it (shift, permute, pvary, ...), or"
    " that has detached it, has no backward of that call, and the others wait for it\n"
    "  fix: on that rank loss = mc.tie(loss, y): what the collective gave counts as used"
)


def hinted(text: str, *, backward: bool = False) -> str:
    """What went wrong between calls, with the usual reason if one of them was made by a backward."""
    return f"{text}\n{_HINT}" if (backward or _IN_BACKWARD in text) and _HINT not in text else text


def asked_in(module: str) -> bool:
    """Whether the innermost frame that is not this library's is one of ``module``; ``torch.`` is any of torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE + os.sep):
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return name == module or (module.endswith(".") and name.startswith(module))
