"""What a process has one of, and programs change for a while: each rank of one process has its own.

Who changes it keeps what was there, and puts that back in the end. Where ranks change over meanwhile one would put back
what another one had set, and so it would stay, after the launch too::

    rank 0   redirect_stdout(a) ──► all_reduce ───────────────────────────────────► the end: stdout
    rank 1                              redirect_stdout(b), over a ──► all_reduce ────► the end: a
"""

from __future__ import annotations

import logging
import sys
import warnings
from operator import is_
from typing import Any

from meshcomm._torch.settings import settings_of_torch, settle_torch, without_levels

Settings = tuple[Any, ...]
"""The filters of warnings and who shows them, where is written to, and torch's."""

_warnings: Any = vars(warnings)
_logging: Any = vars(logging)
_SHOWS = "_showwarnmsg_impl"
"""Who is handed a warning, which ``catch_warnings`` exchanges together with the two that have a public name."""
_CAPTURED = "_warnings_showwarning"
"""Whom ``logging.captureWarnings`` has taken the place of, and will put back."""
_OF_WARNINGS = slice(4)


def settings_now() -> Settings:
    """What they are."""
    try:
        return (
            warnings.filters, warnings.showwarning, _warnings[_SHOWS], _logging[_CAPTURED],
            sys.stdout, sys.stderr, settings_of_torch(),
        )  # fmt: skip
    except (AttributeError, KeyError):  # somebody may have taken a stream away
        shows = warnings.filters, warnings.showwarning, _warnings[_SHOWS], _logging.get(_CAPTURED)
        return *shows, getattr(sys, "stdout", None), getattr(sys, "stderr", None), settings_of_torch()


def alike(one: Settings, other: Settings) -> bool:
    """Whether they are the same; neither lists of filters nor streams are because they are equal."""
    return one[0] is other[0] and one[4] is other[4] and one[5] is other[5] and one == other


def at_first(callers: Settings) -> Settings:
    """Those with which a rank begins."""
    *others, of_torch = callers
    first = without_levels(of_torch)
    return callers if first == of_torch else (*others, first)


def settle(wanted: Settings, found: Settings) -> None:
    """Make ``wanted`` the settings, which are ``found``."""
    if not all(map(is_, wanted[_OF_WARNINGS], found[_OF_WARNINGS])):
        _settle_warnings(*wanted[_OF_WARNINGS])
    sys.stdout, sys.stderr, of_torch = wanted[_OF_WARNINGS.stop :]
    if of_torch != found[-1]:
        settle_torch(of_torch)


def _settle_warnings(filters: Any, shown: Any, shows: Any, captured: Any) -> None:
    _logging[_CAPTURED] = captured
    _warnings.update({"filters": filters, "showwarning": shown, _SHOWS: shows})
    with warnings.catch_warnings():  # says that filters have changed: what was shown once is known until then
        pass
