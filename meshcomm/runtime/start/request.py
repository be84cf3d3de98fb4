"""What ``init`` was asked for: its arguments, each checked by itself and then together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm.errors import fail
from meshcomm.runtime.start.launchers import LOOPBACK, Launcher, check_choice

GUARD = "MESHCOMM_GUARD"
"""The variable of the environment that is 1 where ranks shall compare their calls."""


@dataclass(eq=False, repr=False, match_args=False)  # what is not made takes no time at import
class Request:
    """init's arguments; None where nothing was said."""

    launcher: str | None = None
    backend: str | None = None
    init_method: str | None = None
    rank: int | None = None
    world_size: int | None = None
    store: Store | None = None
    port: int | None = None
    timeout: timedelta | None = None
    guard: bool | None = None

    def __post_init__(self) -> None:
        if self.store is not None and not isinstance(self.store, Store):
            fix = "such as torch.distributed.TCPStore(...)"
            fail("init", "store is no torch store.", got=repr(self.store), fix=fix)
        check_choice(self.launcher)
        if self.init_method == "env://":
            self.launcher, self.init_method = self.launcher or "pytorch", None
        _check_method(self.init_method)
        for name, low, high in (("rank", 0, None), ("world_size", 1, None), ("port", 1, 65535)):
            _check_count(name, getattr(self, name), low, high)
        switch("init", "guard", self.guard)
        self._check_together()

    @property
    def explicit(self) -> bool:
        """Says by itself where to meet, or who this process is."""
        return any(value is not None for value in (self.init_method, self.store, self.rank))

    def given(self) -> dict[str, Any]:
        """The arguments that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def who(self, found: Launcher | None) -> Launcher:
        """Who this process is: by the arguments, or by a launcher when only ``init_method`` or ``store`` was given."""
        if self.rank is not None and self.world_size is not None:
            return Launcher("explicit", self.rank, self.world_size, master_addr=LOOPBACK)
        if found is None:
            fail("init", "init_method= and store= need rank= and world_size= in a process without a launcher.")
        return found

    def _check_together(self) -> None:
        rank, size = self.rank, self.world_size
        if (rank is None) != (size is None):
            name, other = ("rank", "world_size") if size is None else ("world_size", "rank")
            fail("init", f"{name}= is given and {other}= is not.", fix="give both")
        if self.init_method is not None and self.store is not None:
            fail("init", "init_method= and store= both say where to meet.", fix="give one of them")
        if self.port is not None and (self.init_method is not None or self.store is not None):
            fail("init", "port= and init_method= or store= both say where to meet.", fix="give one of them")
        if rank is None or size is None:
            return
        if self.launcher is not None:
            fail("init", "launcher= and rank= both say who this process is.", fix="give one of them")
        if rank >= size:
            fail("init", "rank must be below world_size.", got=f"rank={rank}, world_size={size}")
        nowhere = self.init_method is None and self.store is None and self.port is None
        if nowhere and size > 1 and self.backend != "fake":
            fail("init", f"where do the {size} ranks meet?", fix="give init_method='tcp://host:port', store= or port=")


def _check_count(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"{low} or more" if high is None else f"between {low} and {high}"
        fail("init", f"{name} must be an int, {bounds}.", got=repr(value))


def switch(where: str, name: str, value: bool | None) -> bool | None:
    """An argument that is on, off, or left to others."""
    if value is not None and not isinstance(value, bool):
        fail(where, f"{name} must be True, False or None.", got=repr(value))
    return value


def guard_wanted(value: bool | None) -> bool:
    """``value``, or what the environment says."""
    if value is not None:
        return value
    found = os.environ.get(GUARD, "0")
    if found not in ("", "0", "1"):
        fail("init", f"{GUARD}={found!r} is not known.", fix="0 or 1, equal in all processes")
    return found == "1"


_LONGEST = timedelta(days=10_000).total_seconds()
"""What clocks of every kind can still count."""


def duration(where: str, timeout: float | timedelta | None) -> timedelta | None:
    """A time-out as a timedelta, in whichever of its forms it was given."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not good or not 0 < seconds <= _LONGEST:
        fail(where, "timeout must be a positive number of seconds, or a timedelta.", got=repr(timeout))
    return timedelta(seconds=seconds)


def _check_method(init_method: object) -> None:
    if isinstance(init_method, str) and init_method.startswith("tcp://"):
        host_port(init_method)
        return
    in_file = isinstance(init_method, str) and init_method.startswith("file://") and len(init_method) > len("file://")
    if init_method is not None and not in_file:
        fail("init", "init_method is tcp://host:port, file:///path or env://.", got=repr(init_method))


def host_port(method: str) -> tuple[str, int]:
    """The parts of ``tcp://host:port``."""
    host, colon, port = method.removeprefix("tcp://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        fail("init", "init_method has no host and port.", got=repr(method), fix="tcp://10.0.0.1:29400")
    return host.strip("[]"), int(port)
