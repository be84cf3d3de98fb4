"""Functions with options, fully_shard and its like, that a dry run may call with others than the program gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from meshcomm.runtime.transports.dry.world import dry_world

__all__ = ["has_options"]

Given = ParamSpec("Given")
R = TypeVar("R")


def has_options(fn: Callable[Given, R]) -> Callable[Given, R]:
    """Decorate it: a dry run that wants to know what it is given, or to give it something else, is asked."""

    @functools.wraps(fn)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> R:
        world = dry_world()
        heard = None if world is None else world.options
        if world is None or heard is None:
            return fn(*args, **kwargs)
        world.options = None  # what it calls itself is as it is
        try:
            result: R = heard(fn, args, kwargs)
        finally:
            world.options = heard
        return result

    return run
