"""The table of processes of this machine, where the system shows it (proc(5)); elsewhere there is no telling."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def boot() -> str:
    """Of this machine, since it was started last. Raises OSError where there is none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Equal where numbers of processes mean the same; empty where there is no telling."""
    with contextlib.suppress(OSError):
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def fields(pid: int) -> list[str]:
    """What is written of a process from the state on, the third field of /proc/PID/stat; nothing if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def parent(pid: int) -> int:
    """Who has started it; 0 if it is gone."""
    found = fields(pid)
    return int(found[1]) if len(found) > 1 else 0


def began(pid: int) -> int:
    """When: tells processes with one number, one after the other, apart; 0 if it is gone."""
    found = fields(pid)
    return int(found[19]) if len(found) > 19 else 0
