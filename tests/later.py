"""Calls of a link that are waited for later, as a block: in the library it is a function, which Ctrl-C cannot miss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshcomm.runtime.call import told

__all__ = ["for_later"]


@contextmanager
def for_later() -> Iterator[None]:
    """What is called inside is begun, and waited for later."""
    before, told.later = told.later, True
    try:
        yield
    finally:
        told.later = before
