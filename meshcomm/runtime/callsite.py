"""Where in the user's code a collective was called."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch

__all__ = ["CallSite", "call_site"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class CallSite(NamedTuple):
    """A file and a line; ``str`` gives ``train.py:88``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def call_site() -> CallSite:
    """The innermost frame that is neither this library's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
