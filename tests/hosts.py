"""Several hosts on one machine: each with network, processes, host name, mounts, ``/dev/shm`` and ``/etc/hosts`` of its own.

    host 0              host 1              host n-1
    eth0 10.77.0.1      eth0 10.77.0.2      eth0 10.77.0.n       fd77::1, fd77::2, ...
      | tbf               | tbf               | tbf
      p0 ---------------- p1 ---------------- p(n-1)             a bridge, in a network of its own: the switch
    eth1 10.78.0.1 ...                                           with ``networks=2`` a second one beside it

A host is a process, the first of its namespaces, and nothing has a name outside of it: when it ends all processes of the
host end, and its interfaces with them. It ends with who has made it, however that ends. So nothing stays behind, and any
number of these may be there side by side.

    with Hosts(2, rate="1gbit") as hosts:
        first = hosts[0].start("python", "program.py", RANK="0", MASTER_ADDR=hosts[0].address)
        hosts[1].unplug()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_FOLDER = "hosts-"
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
_NETWORKS = ("10.77.0", "10.78.0"), ("fd77:", "fd78:")
_TOLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "OMPI_",
    "PMI",
    "MPI_",
    "SLURM_",
    "GLOO_",
    "NCCL_",
    "TP_",
    "TORCHELASTIC",
)
_SLURM = """
ClusterName=hosts
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={own}/slurmctld.log
SlurmdLogFile={own}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
DebugFlags=NO_CONF_HASH
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
"""A configuration for each host, for its own sockets and folders."""
_FIRST = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
"""The first process of a host: what has lost its parent is its child, and leaves no trace when it ends."""


@functools.cache
def missing() -> str:
    """Why there can be no hosts here; empty if there can be."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (iproute2, util-linux)"
    try:
        with Hosts(2, rate="1gbit", networks=1) as hosts:
            hosts[1].run("true")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        return f"namespaces cannot be made here: {(said or str(error)).strip()}"
    return ""


def needs_hosts() -> None:
    """Skip the test where there can be none."""
    if missing():
        pytest.skip(missing())


class Hosts(Sequence["Host"]):
    """``n`` hosts on one switch, or on two.

    Args:
        n: how many.
        rate: of each host's cable, both ways, as tc writes it (``1gbit``); None: as fast as the machine.
        networks: 1 or 2 interfaces per host, each in a network of its own.
        loopback: a host's own name means 127.0.1.1 on it, as Debian's installer leaves it; else its address. The
            others' names are their addresses.
        ipv4, ipv6: which kinds of addresses there are.
        domain: what comes before the number in names.
    """

    def __init__(
        self,
        n: int,
        *,
        rate: str | None = None,
        networks: int = 1,
        loopback: bool = True,
        ipv4: bool = True,
        ipv6: bool = True,
        domain: str = "node",
    ) -> None:
        self._closing = contextlib.ExitStack()
        self._hosts: list[Host] = []
        with contextlib.ExitStack() as undone:
            undone.enter_context(self._closing)
            _sweep()
            prefix = f"{_FOLDER}{os.getpid()}-"
            self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
            switch = _first(self._closing, "switch", None)
            for network in range(networks):
                _in(switch, "ip", "link", "add", f"br{network}", "up", "type", "bridge", "forward_delay", "0")
            for index in range(n):
                kinds = [kind for kind, wanted in (("4", ipv4), ("6", ipv6)) if wanted]
                host = Host(index, f"{domain}{index}", networks, kinds)
                names = self._folder / f"hosts.{index}"
                names.write_text(self._names(index, n, domain, loopback, host))
                host.first = _first(self._closing, host.name, names)
                host.connect(switch, rate)
                self._hosts.append(host)
            undone.pop_all()

    @staticmethod
    def _names(index: int, n: int, domain: str, loopback: bool, kind: Host) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for other in range(n):
            if other == index and loopback:
                lines.append(f"127.0.1.1 {domain}{other}")
            else:
                there = Host(other, "", kind.networks, kind.kinds)
                lines += [f"{address} {domain}{other}" for address in there.addresses[: len(kind.kinds)]]
        return "\n".join(lines) + "\n"

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        for host in self._hosts:
            host.end()

    def torchrun(
        self, ranks: int | Sequence[int], script: str, *args: str, port: int = 29500, to: str = "", nnodes: str = "",
        restarts: int = 0, **environ: str,
    ) -> list[subprocess.Popen[str]]:  # fmt: skip
        """On each host a torchrun of ``ranks`` ranks, or of as many as there stand for it, which meet by its own rendezvous on the first host; ``to``: by
        which of its addresses or names; ``nnodes`` where it is not the number of hosts; ``restarts``: how often.
        """
        to = to or self[0].address
        end = f"[{to}]:{port}" if ":" in to else f"{to}:{port}"
        where = [
            f"--nnodes={nnodes or len(self)}",
            f"--max-restarts={restarts}",
            "--rdzv-backend=c10d",
        ]
        run = [sys.executable, "-m", "torch.distributed.run", *where, f"--rdzv-endpoint={end}", "--rdzv-id=hosts"]
        # torchrun itself does not know an address for its own where the host's name means loopback.
        serves = [f"--rdzv-conf=is_host={int(host is self[0])},join_timeout=120,last_call_timeout=3" for host in self]
        each = [f"--nproc-per-node={count}" for count in self._counts(ranks)]
        return [
            host.start(*run, many, here, script, *args, **environ)
            for host, many, here in zip(self, each, serves, strict=True)
        ]

    def plain(
        self, ranks: int | Sequence[int], script: str, *args: str, port: int = 29500, to: str = "", **environ: str
    ) -> list[subprocess.Popen[str]]:
        """On each host ``ranks`` processes, or as many as there stand for it, with RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT alone.
        """
        there = [host for host, count in zip(self, self._counts(ranks), strict=True) for _ in range(count)]
        meet = {
            "WORLD_SIZE": str(len(there)),
            "MASTER_ADDR": to or self[0].address,
            "MASTER_PORT": str(port),
            **environ,
        }
        return [host.start(sys.executable, script, *args, RANK=str(rank), **meet) for rank, host in enumerate(there)]

    def _counts(self, ranks: int | Sequence[int]) -> Sequence[int]:
        return [ranks] * len(self) if isinstance(ranks, int) else ranks

    def mpiexec(self, mpiexec: str, ranks: int, script: str, *args: str, port: int = 29500) -> subprocess.Popen[str]:
        """MPICH's or Open MPI's, with a host file, in the first host's network; in place of ssh an agent enters hosts."""
        agent, listed, first = self._folder / "agent", self._folder / "listed", str(_inside(self[0].first))
        cases = [f"{'|'.join([host.name, *host.addresses])}) pid={_inside(host.first)};;" for host in self]
        enter = 'exec nsenter --target "$pid" --net --pid --uts --ipc --mount sh -c "$*"'
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "host=$1; shift", 'case "$host" in', *cases]
        agent.write_text("\n".join([*lines, "esac", enter, ""]))
        agent.chmod(0o755)
        count = ["-n", str(ranks * len(self))]
        environ = _environ({"MASTER_ADDR": self[0].address, "MASTER_PORT": str(port)})
        if "openmpi" in mpiexec:
            listed.write_text("".join(f"{host.address} slots={ranks}\n" for host in self))
            handed = [
                word
                for name in ("MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "OMP_NUM_THREADS", "TMPDIR")
                for word in ("-x", name)
            ]
            how = [
                "--hostfile",
                str(listed),
                "--prtemca",
                "plm_ssh_agent",
                str(agent),
                "--prtemca",
                "prte_if_include",
                "eth0",
                "--allow-run-as-root",
                *handed,
            ]
        else:
            listed.write_text("".join(f"{host.address}:{ranks}\n" for host in self))
            how = ["-f", str(listed), "-launcher", "ssh", "-launcher-exec", str(agent), "-iface", "eth0"]
        started = subprocess.Popen(
            ["nsenter", "--target", first, "--net", "--uts", mpiexec, *count, *how, sys.executable, script, *args],
            env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent,
        )  # fmt: skip
        self._closing.callback(_ended, started)
        return started

    def srun(self, ranks: int, script: str, *args: str) -> subprocess.Popen[str]:
        """On the first host, over a Slurm of which each host has a munged and a slurmd, and the first one the slurmctld."""
        folder, first = self._folder / "slurm", self[0]
        key, line = os.urandom(1024), "NodeName={0.name} NodeAddr={0.address} CPUs={1} State=UNKNOWN\n"
        nodes = "".join(line.format(host, ranks) for host in self)
        (folder / "state").mkdir(parents=True)
        self._folder.chmod(0o755)  # munged looks at who may write on the way to its socket
        for host in self:
            own, munge = folder / host.name, folder / host.name / "munge"
            munge.mkdir(mode=0o700, parents=True)
            (munge / "key").write_bytes(key)
            (munge / "key").chmod(0o400)
            (own / "slurm.conf").write_text(_SLURM.format(folder=folder, own=own, first=first, nodes=nodes))
            files = [
                f"--{name}={munge}/{name.split('-')[0]}" for name in ("key-file", "pid-file", "log-file", "seed-file")
            ]
            host.run("munged", *files, f"--socket={munge}/socket", "--num-threads=2", "--force")
        confs = {host: {"SLURM_CONF": str(folder / host.name / "slurm.conf")} for host in self}
        first.start("slurmctld", "-D", "-f", confs[first]["SLURM_CONF"])
        for host in self:
            host.start("slurmd", "-D", "-f", confs[host]["SLURM_CONF"], "-N", host.name)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):  # slurmctld does not answer yet
                if first.run("sinfo", "-h", "-N", "-o", "%T", **confs[first]).split() == ["idle"] * len(self):
                    break
            if time.monotonic() > end:
                raise TimeoutError("".join(path.read_text()[-2000:] for path in folder.glob("**/*.log")))
            time.sleep(0.2)
        many = ["-N", str(len(self)), f"--ntasks-per-node={ranks}", "-n", str(ranks * len(self))]
        return first.start("srun", *many, sys.executable, script, *args, **confs[first])

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)


class Host:
    """One of them."""

    first: subprocess.Popen[str]
    switch: subprocess.Popen[str]

    def __init__(self, index: int, name: str, networks: int, kinds: list[str]) -> None:
        self.index, self.name, self.networks, self.kinds = index, name, networks, kinds
        four = [f"{net}.{index + 1}" for net in _NETWORKS[0][:networks]]
        six = [f"{net}:{index + 1:x}" for net in _NETWORKS[1][:networks]]
        wanted = [each for kind, each in (("4", four), ("6", six)) if kind in kinds]
        self.addresses = [each[network] for network in range(networks) for each in wanted]
        """Of the first interface IPv4 and IPv6, as far as there are, then of the second."""
        self.interfaces = [f"eth{network}" for network in range(networks)]
        self._started: list[subprocess.Popen[str]] = []

    @property
    def address(self) -> str:
        """The first one."""
        return self.addresses[0]

    def connect(self, switch: subprocess.Popen[str], rate: str | None) -> None:
        """Cables to the switch, addresses and rates."""
        self.switch = switch
        for network, interface in enumerate(self.interfaces):
            port = self._port(network)
            mine, its = str(_inside(self.first)), str(_inside(switch))
            _run("ip", "link", "add", interface, "netns", mine, "type", "veth", "peer", "name", port, "netns", its)
            _in(switch, "ip", "link", "set", port, "master", f"br{network}", "up")
            each = len(self.kinds)
            for address in self.addresses[each * network : each * (network + 1)]:
                sixth = ":" in address
                what = (f"{address}/64", "nodad") if sixth else (f"{address}/24",)
                _in(self.first, "ip", "addr", "add", *what, "dev", interface)
            _in(self.first, "ip", "link", "set", interface, "up")
            if rate is not None:
                self.limit(rate, network)

    def _port(self, network: int) -> str:
        return f"p{self.index}.{network}"

    # ------------------------------------------------------------------------------------------------------- programs

    def command(self, *command: str, folder: Path | None = None) -> list[str]:
        """What to run on this machine for ``command`` to run on the host."""
        where = ["env", "-C", str(folder or ROOT)]
        kinds = ["--net", "--pid", "--uts", "--ipc", "--mount"]
        return ["nsenter", "--target", str(_inside(self.first)), *kinds, *where, *command]

    def start(
        self, *command: str, folder: Path | None = None, stdin: int = subprocess.DEVNULL, **environ: str
    ) -> subprocess.Popen[str]:
        """A program on the host, whose stdout and stderr are one pipe. Variables of launchers are not handed on."""
        started = subprocess.Popen(
            self.command(*command, folder=folder), env=_environ(environ), text=True, stdin=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(started)
        return started

    def end(self) -> None:
        """Its namespaces have ended: so have its programs."""
        for each in self._started:
            each.wait(30)
            for pipe in (each.stdin, each.stdout):
                if pipe is not None:
                    pipe.close()

    def run(self, *command: str, timeout: float = 60, folder: Path | None = None, **environ: str) -> str:
        """What a program on the host prints; CalledProcessError if it fails."""
        return _run(*self.command(*command, folder=folder), env=_environ(environ), timeout=timeout)

    # ------------------------------------------------------------------------------------------------------- the cable

    def limit(self, rate: str, network: int = 0, *, latency: str = "200ms", burst: str = "64kb") -> None:
        """So many bits a second, both ways."""
        how = ("root", "tbf", "rate", rate, "latency", latency, "burst", burst)
        _in(self.first, "tc", "qdisc", "replace", "dev", self.interfaces[network], *how)
        _in(self.switch, "tc", "qdisc", "replace", "dev", self._port(network), *how)

    def unplug(self, *networks: int) -> None:
        """The cable of a network, or of all: who sends hears nothing, neither here nor there."""
        for network in networks or range(self.networks):
            _in(self.switch, "ip", "link", "set", self._port(network), "down")

    def plug(self, *networks: int) -> None:
        """In again."""
        for network in networks or range(self.networks):
            _in(self.switch, "ip", "link", "set", self._port(network), "up")

    def take_down(self, network: int = 0) -> None:
        """The interface, by hand on this host: who sends here learns at once that there is no way."""
        _in(self.first, "ip", "link", "set", self.interfaces[network], "down")

    def take_up(self, network: int = 0) -> None:
        """The interface again, with its addresses."""
        interface, each = self.interfaces[network], len(self.kinds)
        _in(self.first, "ip", "link", "set", interface, "up")
        for address in self.addresses[each * network : each * (network + 1)]:
            if ":" in address:  # IPv6's are forgotten when an interface goes down
                _in(self.first, "ip", "addr", "replace", f"{address}/64", "dev", interface, "nodad")

    def bytes(self, network: int = 0) -> tuple[int, int]:
        """Received and sent on an interface since it was made, headers and all."""
        for line in Path(f"/proc/{_inside(self.first)}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == self.interfaces[network]:
                fields = counts.split()
                return int(fields[0]), int(fields[8])
        raise LookupError(self.interfaces[network])

    # -------------------------------------------------------------------------------------------------------- its life

    def die(self) -> None:
        """As without power: nothing that it has not yet sent is sent, no connection is closed."""
        self.unplug()
        os.kill(_inside(self.first), signal.SIGKILL)
        self.first.wait(30)

    def crash(self) -> None:
        """All its processes are killed; its network is there for a moment longer, and closes their connections."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """All its processes stand still; its network answers."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """They go on."""
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)

    def processes(self) -> list[int]:
        """By their numbers on this machine; without the first."""
        space = os.readlink(f"/proc/{_inside(self.first)}/ns/pid")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns/pid") == space and int(path.name) != _inside(self.first):
                    found.append(int(path.name))
        return found


# ------------------------------------------------------------------------------------------------------------ namespaces


def _first(closing: contextlib.ExitStack, name: str, names: Path | None) -> subprocess.Popen[str]:
    """The first process of new namespaces: what names it ends with it, and it with us."""
    mounts = f"mount --bind '{names}' /etc/hosts" if names is not None else "true"
    script = f"""
        set -e
        hostname '{name}'
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        {mounts}
        ip link set lo up
        exec '{sys.executable}' -S -c "$0"
    """
    spaces = ["--net", "--pid", "--uts", "--ipc", "--mount-proc", "--mount", "--fork", "--kill-child"]
    made = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", textwrap.dedent(script), _FIRST], text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_end_with_parent, start_new_session=True,
    )  # fmt: skip
    closing.callback(_ended, made)
    assert made.stdout is not None
    assert made.stderr is not None
    if made.stdout.readline() != "up\n":
        made.kill()
        raise subprocess.CalledProcessError(made.wait(30), "unshare", stderr=made.stderr.read())
    return made


def _sweep() -> None:
    """Folders of those who were killed, which are all that they leave."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = path.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _ended(made: subprocess.Popen[str]) -> None:
    made.kill()  # the kernel kills unshare's child, by --kill-child, and all that child's namespace has
    made.wait(30)
    for pipe in (made.stdout, made.stderr):
        if pipe is not None:
            pipe.close()


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _inside(made: subprocess.Popen[str]) -> int:
    """The child of unshare: the one in the new namespaces."""
    found = getattr(made, "inside", None)
    if found is None:
        found = int(Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()[0])
        made.inside = found  # type: ignore[attr-defined]
    return found


def _environ(more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_TOLD)}
    # Hosts have a /tmp of their own. Here they see this machine's, as a file system that they share: it has the tests'
    # files, and maybe Python itself.
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": "/dev/shm", **more}


def _in(made: subprocess.Popen[str], *command: str) -> str:
    """In the network of these namespaces."""
    return _run("nsenter", "--target", str(_inside(made)), "--net", *command)


def _run(*command: str, env: dict[str, str] | None = None, timeout: float = 60) -> str:
    return subprocess.run(
        command, env=env, check=True, timeout=timeout, text=True, stdin=subprocess.DEVNULL, capture_output=True
    ).stdout
