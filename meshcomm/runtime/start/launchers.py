"""How was this process started? A pure function of the environment, with one answer per launcher that we know.

    torchrun, or anything that sets RANK and WORLD_SIZE      -> "pytorch"
    mpiexec of Open MPI, of MPICH and its descendants        -> "openmpi", "mpich"
    srun                                                     -> "slurm"
    none of them                                             -> None: a plain process

Nothing here opens a socket or a file: that is ``world``'s part.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from meshcomm.errors import fail

CHOICES = ("pytorch", "mpi", "slurm")
LOOPBACK = "127.0.0.1"

Environ = Mapping[str, str]


class _Variables(NamedTuple):
    """What a launcher tells each process, by the names of its variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    """Of which the first that is set counts."""
    node: str = ""


VARIABLES = {
    "pytorch": _Variables(
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",), "GROUP_RANK"
    ),
    # OMPI_COMM_WORLD_NODE_RANK is no number of a node (it counts processes of all jobs on a node): not used.
    "openmpi": _Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # Intel MPI, MVAPICH and Cray MPICH share these.
    "mpich": _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",)),
    "slurm": _Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", ()),
}
"""The launchers, in the order in which they are looked for; Slurm's sizes take more than a name, see ``_slurm``."""

_WANTED = {
    "pytorch": "RANK and WORLD_SIZE",
    "mpi": "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (Open MPI), PMI_RANK and PMI_SIZE (MPICH)",
    "slurm": "SLURM_STEP_ID, SLURM_PROCID and SLURM_STEP_NUM_TASKS or SLURM_NTASKS greater than 1",
}
_STARTERS = {
    "pytorch": "torchrun --nproc-per-node 2 script.py",
    "mpi": "mpiexec -n 2 python script.py",
    "slurm": "srun -n 2 python script.py",
}


class Launcher(NamedTuple):
    """One process's place in a launch. ``None`` stands for what the launcher does not tell.

    ``job`` tells launches that run at the same time apart, as far as the environment does.
    """

    name: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job: str = ""

    @property
    def one_node(self) -> bool:
        """All ranks are known to be on this machine."""
        return self.local_world_size == self.world_size

    @property
    def unset(self) -> str:
        """``MASTER_ADDR and MASTER_PORT``, or one of them: what ranks need to meet and nobody has said."""
        if self.name != "pytorch" and self.local_world_size in (None, self.world_size):
            return ""
        places = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
        return " and ".join(name for name, value in places.items() if value is None)


def detect(environ: Environ, only: str | None = None) -> Launcher | None:
    """The launcher that started this process, or None in a plain process.

    Args:
        environ: the environment, ``os.environ`` as a rule.
        only: look for this launcher alone ("pytorch", "mpi" or "slurm") and raise if it is not there.

    Raises:
        MeshError: a variable that is no integer, out of range, or set without its companion; ``only`` not found.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}).rank
        1
        >>> detect({}) is None
        True
    """
    check_choice(only)
    for name in VARIABLES:
        if only in (None, choice(name)) and (found := _slurm(environ) if name == "slurm" else _told(environ, name)):
            return found
    # One of RANK and WORLD_SIZE alone starts nothing, and is a mistake where no other launcher explains it.
    _pair(environ, "RANK", "WORLD_SIZE", strict=True)
    if only is not None:
        fail(
            "init",
            f"launcher={only!r}, but this process was not started by it.",
            got=f"none of the variables it sets: looked for {_WANTED[only]}",
            fix=f"start with `{_STARTERS[only]}`, or leave launcher= out.",
        )
    return None


def check_choice(launcher: str | None) -> None:
    """Raise MeshError for a launcher that nobody knows."""
    if launcher is not None and launcher not in CHOICES:
        fix = f"one of {', '.join(map(repr, CHOICES))}, or None to look"
        fail("init", f"launcher={launcher!r} is not known.", fix=fix)


def choice(name: str) -> str:
    """What ``init`` calls the launcher of this name."""
    return "mpi" if name in ("openmpi", "mpich") else name


def _told(environ: Environ, name: str) -> Launcher | None:
    """By a launcher that sets one variable for each thing that it tells.

    WORLD_SIZE alone is common in Slurm scripts, so a half is left to the other launchers.
    """
    known = VARIABLES[name]
    pair = _pair(environ, known.rank, known.size, strict=name != "pytorch")
    if pair is None:
        return None
    local_rank, local_size = _local(environ, known.local_rank, known.local_size, pair[1])
    if name == "mpich" and local_rank is None:
        # srun --mpi=pmi2 sets PMI_RANK too; Slurm's own variables then say more.
        slurm = _slurm(environ)
        if slurm is not None and (slurm.rank, slurm.world_size) == pair:
            return slurm
    node = _integer(environ, known.node, low=0) if known.node else 0 if local_size == pair[1] else None
    job = next((environ[each] for each in known.job if environ.get(each)), "")
    return _with_master(environ, Launcher(name, *pair, local_rank, local_size, node, job=job))


def _slurm(environ: Environ) -> Launcher | None:
    """A task of a Slurm step. A batch script has SLURM_NTASKS but no step; an interactive step has one task."""
    if not environ.get("SLURM_STEP_ID"):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = _integer(environ, size_name, low=1)
    if size is None or size == 1:
        return None
    rank = _integer(environ, "SLURM_PROCID", low=0)
    if rank is None:
        fail("init", f"{size_name} is set and SLURM_PROCID is not.", got=f"{size_name}={size}", fix="start with srun.")
    _in_range(environ, "SLURM_PROCID", rank, size_name, size)
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    node = _integer(environ, "SLURM_NODEID", low=0)
    local_size = tasks[node] if node is not None and node < len(tasks) else size if len(nodes) == 1 else None
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    # The step's first node, for SLURM_LAUNCH_NODE_IPADDR is srun's own, maybe a login node.
    host = LOOPBACK if local_size == size else nodes[0] if nodes else None
    local_rank = _integer(environ, "SLURM_LOCALID", low=0)
    return _with_master(environ, Launcher("slurm", rank, size, local_rank, local_size, node, host, job=job))


def _with_master(environ: Environ, launcher: Launcher) -> Launcher:
    """Add where to meet: MASTER_ADDR and MASTER_PORT win; on one machine without a port, ``world`` finds a free one."""
    address = environ.get("MASTER_ADDR") or launcher.master_addr or (LOOPBACK if launcher.one_node else None)
    port = _integer(environ, "MASTER_PORT", low=1, high=65535)
    if port is None and launcher.name != "pytorch" and launcher.job and not launcher.one_node:
        port = derived_port(launcher.job)
    return launcher._replace(master_addr=address, master_port=port)


def derived_port(job: str) -> int:
    """A port that all ranks of a job compute alike, below the range (32768 and up) that Linux hands out by itself."""
    return 15000 + zlib.crc32(job.encode()) % 15000


def _local(environ: Environ, rank_name: str, size_name: str, world: int) -> tuple[int | None, int | None]:
    """Local rank and size, where the launcher tells them."""
    rank = _integer(environ, rank_name, low=0)
    size = _integer(environ, size_name, low=1)
    if size is not None and size > world:
        fail("init", f"{size_name} is greater than the number of ranks, {world}.", got=f"{size_name}={size}")
    if rank is not None and size is not None:
        _in_range(environ, rank_name, rank, size_name, size)
    return rank, size


def _pair(environ: Environ, rank_name: str, size_name: str, *, strict: bool) -> tuple[int, int] | None:
    """(rank, size), None when neither is set; one without the other raises when strict."""
    present = [name for name in (rank_name, size_name) if environ.get(name)]
    if not present:
        return None
    if len(present) == 1:
        if not strict:
            return None
        missing = size_name if present == [rank_name] else rank_name
        fail(
            "init",
            f"{present[0]} is set and {missing} is not.",
            got=f"{present[0]}={environ[present[0]]}",
            fix=f"set both, or unset {present[0]} for a plain process.",
        )
    rank, size = _integer(environ, rank_name, low=0), _integer(environ, size_name, low=1)
    assert rank is not None
    assert size is not None
    _in_range(environ, rank_name, rank, size_name, size)
    return rank, size


def _in_range(environ: Environ, rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        fail(
            "init",
            f"{rank_name} must be below {size_name}.",
            got=f"{rank_name}={environ[rank_name]}, {size_name}={size}",
        )


def _integer(environ: Environ, name: str, *, low: int, high: int | None = None) -> int | None:
    """The variable as an integer in [low, high], None when unset or empty."""
    raw = environ.get(name)
    if not raw:
        return None
    try:
        value = int(raw)
    except ValueError:
        fail("init", f"{name} is not an integer.", got=f"{name}={raw!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        fail("init", f"{name} must be {bounds}.", got=f"{name}={raw}")
    return value


def expand_nodes(text: str) -> list[str]:
    """Slurm's node list written out.

    Example:
        >>> expand_nodes("node[01-03,7],gpu5")
        ['node01', 'node02', 'node03', 'node7', 'gpu5']
    """
    if text.count("[") != text.count("]"):
        fail("init", "a Slurm node list with unbalanced brackets.", got=repr(text))
    return [host for part in re.split(r",(?![^\[]*\])", text) if part for host in _expand_part(part)]


def _expand_part(part: str) -> list[str]:
    """``a[1-2]b[3,4]`` is a product: the last bracket varies fastest."""
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    head, inner, tail = found.groups()
    return [head + number + rest for number in _expand_ranges(inner, part) for rest in _expand_part(tail)]


def _expand_ranges(inner: str, part: str) -> list[str]:
    numbers: list[str] = []
    for piece in inner.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if found is None:
            fail("init", "a Slurm node list that cannot be read.", got=repr(part))
        first, last = found.group(1), found.group(2) or found.group(1)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Slurm's tasks per node written out.

    Example:
        >>> expand_tasks("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for piece in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if found is None:
            fail("init", "a Slurm list of tasks per node that cannot be read.", got=repr(text))
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts
