"""What a process sees of its machine and its launch, and what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from meshcomm import _versions
from meshcomm.errors import MeshError, few
from meshcomm.runtime.process import neighbours
from meshcomm.runtime.start import devices, network, world
from meshcomm.runtime.start.launchers import Launcher, detect

_SWITCH = neighbours.SWITCH
_SHOWN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", _SWITCH,
    _versions.WITHOUT,
)  # fmt: skip
_VERSIONS = ("meshcomm", "torch", "python", "nccl", "backends", "backend")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be."""

    serious: bool
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{'wrong' if self.serious else 'mind'}: {self.what}\n    fix: {self.fix}"


@dataclass(frozen=True)
class Facts:
    """What one process sees."""

    meshcomm: str
    torch: str
    python: str
    platform: str
    host: str
    cores: int
    nccl: str | None
    backends: list[str]
    backend: str
    """What ``init`` would choose."""
    accelerator: str | None
    devices: list[str]
    launcher: dict[str, Any] | None
    launcher_error: str | None
    interfaces: list[str]
    resolves: bool | None
    """Whether MASTER_ADDR has an address; None where there is none."""
    network: str = ""
    """The interface of gloo's, its address, and why it is this one."""
    variables: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    """Private names of torch that are not there, and what that costs."""
    untested: str | None = None
    """What is to say of a torch that is newer than all that were tested."""

    @property
    def ranks(self) -> int:
        """How many the launch has."""
        return 1 if self.launcher is None else int(self.launcher["world_size"])

    @property
    def ranks_here(self) -> int:
        """How many of them this machine has, as far as the launcher tells."""
        return 1 if self.launcher is None else self.launcher["local_world_size"] or 1


def look(environ: Mapping[str, str] | None = None) -> Facts:
    """What this process sees. Starts nothing and sends nothing, but asks for MASTER_ADDR's address."""
    variables = os.environ if environ is None else environ
    error, found = None, None
    try:
        found = detect(variables)
    except MeshError as wrong:
        error = str(wrong)
    kind, master = None, variables.get("MASTER_ADDR") or (None if found is None else found.master_addr)
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        kind = None if current is None else current.type
    return Facts(
        meshcomm=_version("meshcomm"),
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        nccl=_nccl(),
        backends=devices.backends(),
        backend=devices.choose_backend(None)[0],
        accelerator=kind,
        devices=_device_names(kind),
        launcher=None if found is None else found._asdict(),
        launcher_error=error,
        interfaces=_interfaces(),
        resolves=_resolves(master),
        network="" if found is None else network.told(variables, master, found.one_node, world.interface()),
        variables={
            name: variables[name]
            for name in _SHOWN
            if name in variables and not (name == network.GLOO and world.interface())
        },
        lacking=dict(_versions.lacking),
        untested=_versions.untested(),
    )


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "not installed: found by its path"


def _nccl() -> str | None:
    """Ranks with different ones wait for each other for ever."""
    with contextlib.suppress(AttributeError, RuntimeError, OSError):
        if torch.cuda.is_available():
            return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def _device_names(kind: str | None) -> list[str]:
    if kind is None:
        return []
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [str(name(index)) for index in range(torch.accelerator.device_count())]


def _interfaces() -> list[str]:
    with contextlib.suppress(OSError, AttributeError):
        return [name for _, name in socket.if_nameindex()]
    return []


def _resolves(host: str | None) -> bool | None:
    if not host:
        return None
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- findings


def findings(facts: Facts) -> list[Finding]:
    """What is wrong with what one process sees, worst first."""
    found: list[Finding] = []
    if facts.launcher_error is not None:
        what, _, rest = facts.launcher_error.removeprefix("meshcomm.init: ").partition("\n")
        fix = rest.partition("fix: ")[2] or "start with torchrun, mpiexec or srun, which set all of them"
        found.append(Finding(True, what, fix))
    for look_at in (_meeting, _accelerators, _network, _surroundings, _torch):
        found += look_at(facts)
    return sorted(found, key=lambda each: not each.serious)


def _meeting(facts: Facts) -> Iterator[Finding]:
    if facts.launcher is None or facts.ranks == 1:
        return
    launcher = Launcher(**facts.launcher)
    if launcher.unset:
        what = f"{launcher.unset} not set: the {facts.ranks} ranks do not know where to meet"
        fix = "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, equal in all processes"
        yield Finding(True, what, fix)
    elif facts.resolves is False:
        what = f"MASTER_ADDR, {launcher.master_addr!r}, has no address here"
        yield Finding(True, what, "set it to a name or an address of rank 0's machine that this one knows")


def _accelerators(facts: Facts) -> Iterator[Finding]:
    count, kind = len(facts.devices), facts.accelerator
    own = kind is not None and f"{kind}:" in facts.backend
    if own and facts.ranks_here > count:
        what = f"{facts.ranks_here} ranks on this machine and {count} {kind} device(s), which ranks cannot share"
        fix = "start fewer ranks per machine, or mc.init(backend='gloo') to put all ranks on the CPU"
        yield Finding(True, what, fix)
    if kind is not None and not own:
        what = f"torch sees {count} {kind} device(s) and has no backend of theirs: ranks compute on the CPU"
        yield Finding(False, what, "install a build of torch with their backend (nccl, xccl, ...)")
    if kind is None and facts.variables.get("CUDA_VISIBLE_DEVICES") == "":
        yield Finding(False, "CUDA_VISIBLE_DEVICES is empty: torch sees no GPU", "unset it to use them")


def _network(facts: Facts) -> Iterator[Finding]:
    """Interfaces that are named and are not here. NCCL takes beginnings of names, = for whole ones, ^ for not these."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.variables.get(variable, "")
        if not value or value.startswith("^") or not facts.interfaces:
            continue
        nccl = variable.startswith("NCCL") and not value.startswith("=")
        for name in value.removeprefix("=").split(","):
            if not any(each == name or (nccl and each.startswith(name)) for each in facts.interfaces):
                what = f"{variable} names {name!r}, which is no network interface here"
                yield Finding(True, what, f"unset it, or name one of {', '.join(facts.interfaces)}")


def _surroundings(facts: Facts) -> Iterator[Finding]:
    tasks, step = facts.variables.get("SLURM_NTASKS", ""), facts.variables.get("SLURM_STEP_ID")
    if facts.launcher is None and not step and tasks.isdigit() and int(tasks) > 1:
        what = f"Slurm has given {tasks} tasks, but this process was started without srun: it is alone"
        yield Finding(False, what, "start it with srun")
    local = facts.ranks_here
    if local > 1 and "OMP_NUM_THREADS" not in facts.variables:
        what = f"OMP_NUM_THREADS is not set: each of {local} ranks starts a thread for each of {facts.cores} core(s)"
        yield Finding(False, what, f"export OMP_NUM_THREADS={max(1, facts.cores // local)}")
    if facts.variables.get(_SWITCH) == "0":
        yield Finding(False, f"{_SWITCH}=0: ranks of one machine send messages instead of sharing memory", "unset it")


def _torch(facts: Facts) -> Iterator[Finding]:
    fix = f"install a torch that was tested: {', '.join(_versions.TESTED)}"
    if facts.untested is not None:
        yield Finding(False, facts.untested, f"{fix}; or go on, and see what is said of missing names")
    by_cost: dict[str, list[str]] = {}
    for name, costs in facts.lacking.items():
        by_cost.setdefault(costs, []).append(name)
    for costs, names in by_cost.items():
        yield Finding(False, f"torch {facts.torch} has no {', '.join(names)}: {costs}", fix)


def differences(every: Sequence[Facts]) -> list[Finding]:
    """What the ranks of one launch see differently and should not."""
    found = []
    for name in _VERSIONS:
        seen: dict[str, list[int]] = {}
        for rank, facts in enumerate(every):
            seen.setdefault(str(getattr(facts, name)), []).append(rank)
        if len(seen) > 1:
            told = "; ".join(f"{value} on rank {few(ranks)}" for value, ranks in seen.items())
            found.append(
                Finding(True, f"the ranks have different {name}: {told}", "start all ranks from one environment")
            )
    return found
