"""Several hosts: the rig itself, programs that are started on it, and what is told of ranks that cannot be reached."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
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
    folders, links = f"hosts-{made.pid}-*", sorted(os.listdir("/sys/class/net"))
    assert list(Path(tempfile.gettempdir()).glob(folders))
    made.send_signal(signal.SIGKILL)
    made.communicate(timeout=30)
    end = time.monotonic() + 30
    while list(_processes_of(space)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not list(_processes_of(space))
    assert sorted(os.listdir("/sys/class/net")) == links
    with Hosts(1):
        assert not list(Path(tempfile.gettempdir()).glob(folders))


def _processes_of(space: str) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "ns/pid") == space:
                yield path.name


# ------------------------------------------------------------------------------------------------------------ launchers

PROGRAM = """
import os, socket, sys, torch, meshcomm as mc
mc.init(timeout=60)
mesh = mc.make_mesh({"all": -1})
total = mc.all_reduce(torch.tensor(mesh.rank + 1.0), "all", mesh=mesh)
mc.make_mesh({"dp": -1, "tp": 2}).rank  # axes within a host and between hosts
mc.barrier("all", mesh=mesh)  # who is slow may still set up an axis with who has come to its end
print(f"met: {mesh.rank} of {mesh.size} on {socket.gethostname()}, {total.item():g}, {os.environ.get('GLOO_SOCKET_IFNAME')}\\n", end="", flush=True)
"""


def met(started: list[subprocess.Popen[str]], interface: str, ranks: int = 4, timeout: float = 200) -> None:
    """All ranks are there, each half of them on a host, and have found this interface."""
    texts = [each.communicate(timeout=timeout)[0] for each in started]
    assert [each.returncode for each in started] == [0] * len(started), "\n".join(texts)
    found = sorted(line for text in texts for line in text.splitlines() if line.startswith("met: "))
    total = ranks * (ranks + 1) // 2
    expected = [f"met: {r} of {ranks} on node{2 * r // ranks}, {total}, {interface}" for r in range(ranks)]
    assert found == expected, "\n".join(texts)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_torchrun_as_installed(program: str) -> None:
    with Hosts(2) as hosts:
        met(hosts.torchrun(2, program), "eth0")


@pytest.mark.parametrize("kind", ["mpich", "openmpi"])
def test_mpiexec_with_a_host_file(program: str, kind: str) -> None:
    folder = os.environ.get(f"MESHCOMM_{kind.upper()}", "")
    mpiexec = Path(folder, "bin", "mpiexec")
    if not folder or not mpiexec.exists():
        pytest.skip(f"set MESHCOMM_{kind.upper()} to where bin/mpiexec of PyPI's {kind} is")
    with Hosts(2) as hosts:
        text = hosts.mpiexec(str(mpiexec), 2, program).communicate(timeout=200)[0]
        found = sorted(re.findall(r"met: (\d) of 4 on \w+, 10, eth0", text))
        assert found == ["0", "1", "2", "3"], text


def test_srun_over_a_slurmd_on_each_host(program: str) -> None:
    lacking = [tool for tool in ("munged", "slurmctld", "slurmd", "srun", "sinfo") if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)} (Debian: slurm-wlm, munge)")
    with Hosts(2) as hosts:
        met([hosts.srun(2, program)], "eth0")


def test_the_way_to_the_master_is_found(program: str) -> None:
    with Hosts(2, networks=2) as hosts:
        met(hosts.plain(1, program, to=hosts[0].addresses[3]), "eth1", ranks=2)  # IPv6 of the second network
    with Hosts(2, ipv4=False) as hosts:
        met(hosts.plain(1, program, to="node0"), "eth0", ranks=2)


def test_hosts_that_do_not_reach_each_other(program: str) -> None:
    """They meet by one network; over the other one, which is to be used, nobody answers."""
    with Hosts(2, networks=2) as hosts:
        hosts[1].unplug(1)
        began = time.monotonic()
        started = hosts.plain(2, program, GLOO_SOCKET_IFNAME="eth1")
        texts = [each.communicate(timeout=120)[0] for each in started]
        assert time.monotonic() - began < 60
        assert all(each.returncode == 1 for each in started)
        sides = [f"ranks 0, 1 (node0, {hosts[0].addresses[2]})", f"ranks 2, 3 (node1, {hosts[1].addresses[2]})"]
        for text in texts:
            assert f"{sides[0]} cannot reach {sides[1]}" in text or f"{sides[1]} cannot reach {sides[0]}" in text, text


def test_hosts_whose_interface_has_an_address_that_all_of_them_have(program: str) -> None:
    """As the first one, which gloo takes, it cannot be reached; beside the own one it harms nobody."""
    with Hosts(2, ipv6=False) as hosts:
        for host in hosts:
            host.run("ip", "addr", "add", "192.168.9.9/32", "dev", "eth0")
        met(hosts.plain(1, program), "eth0", ranks=2)
        for host in hosts:
            host.run("ip", "addr", "del", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        for each in hosts.plain(1, program, port=29501):
            text, _ = each.communicate(timeout=120)
            assert each.returncode == 1, text
            assert "cannot reach rank " in text, text
            assert "(both have this address, the first one of the interface)" in text, text


def test_the_doctor_tells_the_interfaces() -> None:
    with Hosts(2) as hosts:
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
        run = [sys.executable, "-m", "meshcomm"]
        started = [host.start(*run, RANK=str(host.index), **meet) for host in hosts]
        text = started[0].communicate(timeout=200)[0]
        assert started[1].wait(60) == 0
        four = [host.address for host in hosts]
        assert f"network     rank 0 on node0 eth0 ({four[0]}): it leads to node1 (" in text, text
        assert f"            rank 1 on node1 eth0 ({four[1]}): it leads to where the ranks meet\n" in text
        assert "nothing serious is wrong" in text
