"""Functions, arguments and results as bytes for other processes: by name where they have one, else by value.

A function of a module travels as the name under which the other process imports it. A lambda, a function inside of
another one, and all that a notebook, a prompt or a script read from stdin defines have no such name: cloudpickle, where
it is installed, sends their code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

INSTALL = "pip install cloudpickle (the extra meshcomm[notebooks]), which sends code by value"


def dumps(value: Any) -> bytes:
    """As bytes that ``pickle.loads`` reads in another process."""
    try:
        if main_can_be_imported() or cloudpickle is None:
            return pickle.dumps(value)
    except Exception:
        if cloudpickle is None:
            raise
    data: bytes = cloudpickle.dumps(value)
    return data


def is_there() -> bool:
    """Whether what has no name can be sent."""
    return cloudpickle is not None


def main_can_be_imported() -> bool:
    """Whether another process can run the main module again, to find what it defines: it is a file or a module."""
    main = sys.modules["__main__"]
    return bool(main.__spec__) or os.path.isfile(getattr(main, "__file__", None) or "")


@contextlib.contextmanager
def main_left_alone() -> Iterator[None]:
    """Processes that start in here do not look for a main module that no file holds, such as ``<stdin>``."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or main_can_be_imported():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
