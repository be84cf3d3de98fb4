"""What docs/faults.md promises of several hosts, done to two of them: cables out, hosts dead, slow or stopped.

On each host one process forks the ranks. Three worlds live through each fault at the same time: two ranks on each host,
which go in two levels, without the guard and with it, and one on each, over gloo alone.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import ROOT, Hosts, needs_hosts

pytestmark = pytest.mark.thorough

TIMEOUT = 4.0
ASKING = 6.0
"""Seconds after the time-out in which ranks ask each other, the store and the hosts what has become of all."""
WORLDS = {"two levels": (2, False), "guarded": (2, True), "gloo": (1, False)}
_numbers = itertools.count()


class Rig:
    """Two hosts, and who forks ranks on them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        run = sys.executable, str(ROOT / "tests" / "forked_ranks.py")
        self.forking = [host.start(*run, stdin=subprocess.PIPE) for host in hosts]

    def ranks_on(self, host: int) -> list[int]:
        """The processes that were forked there."""
        with_own_session = (pid for pid in self.hosts[host].processes() if os.getsid(pid) == pid)
        return [pid for pid in with_own_session if pid != self.forking[host].pid]

    def kill(self, host: int, number: signal.Signals) -> None:
        """All ranks of a host."""
        for pid in self.ranks_on(host):
            os.kill(pid, number)


class World:
    """Ranks on both hosts."""

    def __init__(self, rig: Rig, name: str, timeout: float) -> None:
        self.name, (self.on_each, guard) = name, WORLDS[name]
        number, size = next(_numbers), 2 * self.on_each
        self.stop, self.outs = rig.folder / f"stop{number}", [rig.folder / f"{number}.{rank}" for rank in range(size)]
        meet = {"WORLD_SIZE": str(size), "MASTER_ADDR": rig.hosts[0].address, "MASTER_PORT": str(29500 + number)}
        for rank, out in enumerate(self.outs):
            told = {"out": str(out), "stop": str(self.stop), "timeout": timeout, "guard": guard}
            pipe = rig.forking[rank // self.on_each].stdin
            assert pipe is not None
            pipe.write(json.dumps({**told, "environ": {"RANK": str(rank), **meet}}) + "\n")
            pipe.flush()

    def text(self, rank: int) -> str:
        """All that a rank has written."""
        return self.outs[rank].read_text() if self.outs[rank].exists() else ""

    def said(self, rank: int, word: str) -> dict[str, Any] | None:
        """What a rank has said with this word in it."""
        lines = self.text(rank).splitlines()
        return next((found for line in lines if line.startswith('{"at"') and word in (found := json.loads(line))), None)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    needs_hosts()
    with Hosts(2) as hosts:
        yield Rig(hosts, tmp_path_factory.mktemp("faults"))


def until(seen: Callable[[], object], seconds: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


def all_say(worlds: list[World], words: tuple[str, ...], hosts: tuple[int, ...], seconds: float) -> None:
    """Every rank on these hosts has said one of these words."""
    those = [(world, rank) for world in worlds for rank in range(len(world.outs)) if rank // world.on_each in hosts]

    def silent() -> list[str]:
        return [f"{w.name}: {w.text(r)[-300:]}" for w, r in those if not any(w.said(r, x) for x in words)]

    until(lambda: not silent(), seconds, silent)


def started(rig: Rig, timeout: float) -> list[World]:
    worlds = [World(rig, name, timeout) for name in WORLDS]
    all_say(worlds, ("runs",), (0, 1), 120)
    return worlds


def test_what_is_shorter_than_the_time_out_changes_nothing(rig: Rig) -> None:
    """A cable out, a link that flaps, an interface taken down, a host that stands still: one after the other."""
    worlds, second = started(rig, 60.0), rig.hosts[1]
    second.unplug()
    time.sleep(1.5)
    second.plug()
    for _ in range(4):
        time.sleep(0.2)
        second.unplug()
        time.sleep(0.2)
        second.plug()
    second.take_down()
    time.sleep(0.5)
    second.take_up()
    rig.kill(1, signal.SIGSTOP)
    time.sleep(1)
    rig.kill(1, signal.SIGCONT)
    for world in worlds:
        world.stop.touch()
    all_say(worlds, ("done", "error"), (0, 1), 60)
    for world in worlds:
        for rank in range(len(world.outs)):
            done = world.said(rank, "done")
            assert done is not None, world.text(rank)
            assert done["longest"] > 0.5  # it was in the middle of a call


@pytest.mark.parametrize("fault", ["cable", "dead", "store's host dead", "stopped", "killed"])
def test_what_is_longer_is_told_in_time_with_host_and_address(rig: Rig, fault: str) -> None:
    worlds, hosts = started(rig, TIMEOUT), rig.hosts
    bad = 0 if fault.startswith("store") else 1
    names = [f"node{host.index} ({host.address})" for host in hosts]
    began = time.time()
    if fault in ("cable", "dead", "store's host dead"):
        hosts[bad].unplug()
    if fault == "stopped":
        rig.kill(bad, signal.SIGSTOP)
    elif fault != "cable":
        rig.kill(bad, signal.SIGKILL)
    left = (0, 1) if fault == "cable" else (1 - bad,)
    try:
        all_say(worlds, ("done", "error"), left, 3 * (TIMEOUT + ASKING))
    finally:
        rig.kill(bad, signal.SIGCONT)
        hosts[bad].plug()
        for host in (0, 1):
            rig.kill(host, signal.SIGKILL)
    for world in worlds:
        for rank in range(len(world.outs)):
            here = rank // world.on_each
            if here not in left:
                continue
            said = world.said(rank, "error")
            assert said is not None, world.text(rank)
            at = f"{world.name}, rank {rank}, after {said['at'] - began:.1f} s: {said['text']}"
            assert said["error"] == "CommError", at
            soon = fault == "killed" and world.name != "guarded"
            assert said["at"] - began < (3.0 if soon else TIMEOUT + ASKING), at
            assert names[1 - here] in said["text"], at  # whom, and where
            if fault in ("cable", "dead", "store's host dead"):
                assert f"{names[here]} cannot reach {names[1 - here]}: " in said["text"], at
            else:
                assert "cannot reach" not in said["text"].replace("or cannot be reached", ""), at
