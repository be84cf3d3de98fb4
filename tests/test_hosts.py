"""Several hosts: the rig itself, programs that are started on it, and what is told of ranks that cannot be reached."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, needs_hosts

pytestmark = pytest.mark.thorough

HEARD = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
print(len(got), flush=True)
"""
SAID = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=30).sendall(bytes(1 << 20))"


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    needs_hosts()


# ------------------------------------------------------------------------------------------------------------- the rig


def test_hosts_have_nothing_in_common_but_files_and_the_cable() -> None:
    with Hosts(2, networks=2) as hosts:
        seen = [
            host.run("sh", "-c", "hostname; getent ahostsv4 node0; ls /dev/shm; ls -d /proc/[0-9]*") for host in hosts
        ]
        assert [text.split()[0] for text in seen] == ["node0", "node1"]
        assert [text.split()[1] for text in seen] == ["127.0.1.1", hosts[0].address]
        assert all(text.count("/proc/") < 6 for text in seen)
        hosts[0].run("touch", "/dev/shm/mine")
        assert hosts[1].run("ls", "/dev/shm") == ""
        before = hosts[1].bytes()
        for index, way in enumerate(("plugged", "unplugged")):
            server = hosts[0].start("python3", "-c", HEARD)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            if way == "unplugged":
                hosts[0].unplug()
            client = hosts[1].start("python3", "-c", SAID, hosts[0].address)
            if way == "unplugged":
                time.sleep(0.5)
                assert client.poll() is None, client.communicate()[0]
                hosts[0].plug()
            assert server.communicate(timeout=60)[0] == f"{1 << 20}\n", index
            assert client.wait(30) == 0
        assert 2 << 20 < hosts[1].bytes()[1] - before[1] < 1.2 * (2 << 20)
        assert hosts[1].bytes(1)[1] < 10_000


def test_hosts_end_with_who_made_them(tmp_path: Path) -> None:
    script = "import sys, time, hosts; h = hosts.Hosts(2); p = h[0].start('sleep', '600'); print(h[0].run('readlink', '/proc/self/ns/pid'), flush=True); time.sleep(600)"
    made = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    space = made.stdout.readline().strip()
    assert space.startswith("pid:")
    assert list(_processes_of(space))
    made.send_signal(signal.SIGKILL)
    made.communicate(timeout=30)
    end = time.monotonic() + 30
    while list(_processes_of(space)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not list(_processes_of(space))


def _processes_of(space: str) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "ns/pid") == space:
                yield path.name
