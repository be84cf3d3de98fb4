"""How a process was started: tables of environments, and the real launchers where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshcomm.errors import CommError, MeshError
from meshcomm.runtime.start import devices, launchers, rendezvous, world
from meshcomm.runtime.start.launchers import Launcher, detect, expand_nodes, expand_tasks
from meshcomm.runtime.start.workers import run_processes

ROOT = Path(__file__).parent.parent
PYTORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
SLURM_ONE_NODE = {**SLURM, "SLURM_NODEID": "0", "SLURM_LOCALID": "5", "SLURM_STEP_NODELIST": "gpu07",
                  "SLURM_STEP_TASKS_PER_NODE": "6"}  # fmt: skip
PORT = launchers.derived_port("17.0.0")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher's variables, and no world before or after."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_")) or name in {*PYTORCH, *MASTER}:
            monkeypatch.delenv(name)
    world.shutdown()
    yield monkeypatch
    world.shutdown()


# ------------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="plain"),
        pytest.param(
            {**PYTORCH, **MASTER}, Launcher("pytorch", 1, 4, 1, 2, 0, "10.0.0.7", 4000), id="torchrun"
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, Launcher("pytorch", 0, 1, None, None, None, None, None), id="by hand"
        ),
        pytest.param(OPENMPI, Launcher("openmpi", 2, 4, 2, 4, 0, "127.0.0.1", None, "prterun-host-17@1"), id="openmpi"),
        pytest.param(
            {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "a"},
            Launcher("openmpi", 2, 4, 2, 3, None, "a", launchers.derived_port("prterun-host-17@1"), "prterun-host-17@1"),
            id="openmpi on several nodes",
        ),
        pytest.param(MPICH, Launcher("mpich", 3, 4, 3, 4, 0, "127.0.0.1", None), id="mpich"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launcher("mpich", 0, 2), id="mpich gforker"),
        pytest.param({**MPICH, **MASTER}, Launcher("mpich", 3, 4, 3, 4, 0, "10.0.0.7", 4000), id="mpich with a master"),
        pytest.param(SLURM, Launcher("slurm", 5, 6, 1, 2, 2, "gpu07", PORT, "17.0.0"), id="slurm"),
        pytest.param(
            SLURM_ONE_NODE, Launcher("slurm", 5, 6, 5, 6, 0, "127.0.0.1", None, "17.0.0"), id="slurm on one node"
        ),
        pytest.param({**SLURM, **MASTER}, Launcher("slurm", 5, 6, 1, 2, 2, "10.0.0.7", 4000, "17.0.0"), id="slurm, master"),
        pytest.param({**SLURM, "SLURM_STEP_ID": ""}, None, id="a batch script has tasks but no step"),
        pytest.param({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None, id="an interactive step has one task"),
        pytest.param({**SLURM, **PYTORCH, **MASTER}, Launcher("pytorch", 1, 4, 1, 2, 0, "10.0.0.7", 4000), id="RANK first"),
        pytest.param({**SLURM, **OPENMPI}, Launcher("openmpi", 2, 4, 2, 4, 0, "127.0.0.1", None, "prterun-host-17@1"),
                     id="mpi before slurm"),
        pytest.param({**OPENMPI, **MPICH}, Launcher("openmpi", 2, 4, 2, 4, 0, "127.0.0.1", None, "prterun-host-17@1"),
                     id="openmpi before mpich"),
        pytest.param({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"},
                     Launcher("slurm", 5, 6, 1, 2, 2, "gpu07", PORT, "17.0.0"), id="srun --mpi=pmi2"),
        pytest.param({**SLURM, "WORLD_SIZE": "6"}, Launcher("slurm", 5, 6, 1, 2, 2, "gpu07", PORT, "17.0.0"),
                     id="WORLD_SIZE exported by a Slurm script"),
    ],
)  # fmt: skip
def test_detect(environ: dict[str, str], expected: Launcher | None) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "only", "message"),
    [
        ({"RANK": "0"}, None, "RANK is set and WORLD_SIZE is not.*got: RANK=0.*unset RANK"),
        ({"WORLD_SIZE": "2"}, None, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None, "RANK is not an integer.*RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "RANK must be below WORLD_SIZE.*RANK=2, WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, None, "RANK must be at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, None, "WORLD_SIZE must be at least 1"),
        ({**PYTORCH, "LOCAL_RANK": "2"}, None, "LOCAL_RANK must be below LOCAL_WORLD_SIZE"),
        ({**PYTORCH, "LOCAL_WORLD_SIZE": "5"}, None, "LOCAL_WORLD_SIZE is greater than the number of ranks, 4"),
        ({**PYTORCH, "MASTER_PORT": "70000"}, None, "MASTER_PORT must be between 1 and 65535"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, None, "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_SIZE": "2"}, None, "PMI_SIZE is set and PMI_RANK is not"),
        ({**MPICH, "MPI_LOCALRANKID": "one"}, None, "MPI_LOCALRANKID is not an integer"),
        ({**SLURM, "SLURM_PROCID": "6"}, None, "SLURM_PROCID must be below SLURM_STEP_NUM_TASKS"),
        ({**SLURM, "SLURM_PROCID": ""}, None, "SLURM_STEP_NUM_TASKS is set and SLURM_PROCID is not"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1-"}, None, "unbalanced brackets"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[x]"}, None, "a Slurm node list that cannot be read"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, None, "tasks per node that cannot be read"),
        (
            OPENMPI,
            "pytorch",
            "launcher='pytorch', but this process was not started by it.*RANK and WORLD_SIZE.*torchrun",
        ),
        (PYTORCH, "mpi", "looked for OMPI_COMM_WORLD_RANK.*PMI_RANK and PMI_SIZE.*mpiexec -n 2"),
        (PYTORCH, "slurm", "looked for SLURM_STEP_ID.*srun -n 2"),
        ({}, "mpirun", "launcher='mpirun' is not known.*'pytorch', 'mpi', 'slurm'"),
    ],
)
def test_detect_errors(environ: dict[str, str], only: str | None, message: str) -> None:
    with pytest.raises(MeshError, match=f"(?s){message}"):
        detect(environ, only)


def test_detect_only() -> None:
    assert detect({**PYTORCH, **MPICH}, "mpi") == detect(MPICH)
    assert detect({**PYTORCH, **SLURM}, "slurm") == detect(SLURM)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("vm", ["vm"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("r[1-2]n[3,4].x", ["r1n3.x", "r1n4.x", "r2n3.x", "r2n4.x"]),
    ],
)
def test_expand_nodes(text: str, expected: list[str]) -> None:
    assert expand_nodes(text) == expected


def test_expand_tasks() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]


def test_derived_ports_stay_out_of_the_ephemeral_range() -> None:
    ports = {launchers.derived_port(f"{job}.0.0") for job in range(500)}
    assert all(15000 <= port < 30000 for port in ports)
    assert len(ports) > 450


# ------------------------------------------------------------------------------------------------------- real launchers

PROGRAM = """
import json, pathlib, sys
import torch
import meshcomm as mc
from meshcomm.training import process
from meshcomm.runtime.start import world

ASK = (
    process.rank, process.world_size, process.local_rank, process.local_world_size, process.node_rank, process.device,
    process.backend, process.is_distributed, process.is_main, process.get_dist_info,
)
before = [str(ask()) for ask in ASK]
sums = []
for _ in range(2):
    mesh = mc.make_mesh({"dp": -1})
    sums += mc.all_reduce(torch.tensor([mesh.rank + 1.0]), "dp", mesh=mesh).tolist()
    here = world.current()
    assert before == [str(ask()) for ask in ASK], "what was known before init is what came of it"
    mc.shutdown()
    assert before == [str(ask()) for ask in ASK]
mc.make_mesh({"dp": -1})  # The third world is not shut down.
assert before[9] == str((here.rank, here.size)), before
line = [sums, here.rank, here.size, here.local_rank, here.local_world_size, here.node_rank, str(here.device)]
pathlib.Path(sys.argv[1], f"rank{here.rank}").write_text(json.dumps(line))
"""


def launched(tmp_path: Path, command: list[str], ranks: int, **environ: str) -> None:
    """Every rank of the command has met the others three times, and knows its place."""
    script, out = tmp_path / "program.py", tmp_path / "out"
    script.write_text(PROGRAM)
    out.mkdir()
    done = subprocess.run(
        [*command, sys.executable, str(script), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    total = ranks * (ranks + 1) / 2
    lines = sorted(json.loads(path.read_text()) for path in out.iterdir())
    device = [torch.device("cpu"), torch.device("cuda", 0)][torch.accelerator.is_available()].type
    assert [line[:6] for line in lines] == [[[total, total], r, ranks, r, ranks, 0] for r in range(ranks)]
    assert all(line[6].startswith(device) for line in lines)


def installed(variable: str, package: str) -> str:
    """mpiexec of the wheel that was installed in the folder named by ``variable``."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"set {variable} to a virtual environment (or pip --target folder) with PyPI's {package}")
    found = Path(folder, "bin", "mpiexec")
    if not found.exists():
        pytest.skip(f"no bin/mpiexec in {variable}={folder}")
    return str(found)


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    launched(
        tmp_path,
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"],
        2,
    )


@pytest.mark.thorough
def test_mpich(tmp_path: Path) -> None:
    launched(tmp_path, [installed("MESHCOMM_MPICH", "mpich"), "-n", "2"], 2)


@pytest.mark.thorough
def test_mpich_behind_a_shell(tmp_path: Path) -> None:
    shell = tmp_path / "shell.sh"
    shell.write_text('"$@"\ntrue\n')
    launched(tmp_path, [installed("MESHCOMM_MPICH", "mpich"), "-n", "2", "sh", str(shell)], 2)


@pytest.mark.thorough
def test_openmpi(tmp_path: Path) -> None:
    command = [installed("MESHCOMM_OPENMPI", "openmpi"), "--oversubscribe", "-n", "2"]
    launched(tmp_path, command, 2, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


@pytest.mark.thorough
def test_srun(tmp_path: Path) -> None:
    if not os.environ.get("SLURM_CONF") or shutil.which("srun") is None:
        pytest.skip("needs srun, and SLURM_CONF set to a cluster's configuration")
    launched(tmp_path, ["srun", "-n", "2"], 2)


# ------------------------------------------------------------------------------------------------------ init's arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guard": "yes"}, "guard must be True, False or None"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"timeout": timedelta(seconds=-1)}, "timeout must be a positive number"),
        ({"timeout": "5"}, "timeout must be a positive number.*got: '5'"),
        ({"timeout": float("inf")}, "timeout must be a positive number"),
        ({"launcher": "mpirun"}, "launcher='mpirun' is not known"),
        ({"launcher": "pytorch"}, "not started by it"),
        ({"launcher": "mpi", "rank": 0, "world_size": 2, "port": 1}, "launcher= and rank= both say who"),
        ({"rank": 0}, "rank= is given and world_size= is not"),
        ({"world_size": 2}, "world_size= is given and rank= is not"),
        ({"rank": 2, "world_size": 2, "port": 4000}, "rank must be below world_size.*rank=2, world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank must be an int, 0 or more"),
        ({"rank": 0, "world_size": True}, "world_size must be an int, 1 or more"),
        ({"rank": 0, "world_size": 2}, "where do the 2 ranks meet"),
        ({"rank": 0, "world_size": 2, "port": 0}, "port must be an int, between 1 and 65535"),
        ({"init_method": "tcp://host", "rank": 0, "world_size": 2}, "init_method has no host and port.*tcp://10.0.0.1"),
        ({"init_method": "udp://h:1"}, "init_method is tcp://host:port, file:///path or env://"),
        ({"init_method": "tcp://127.0.0.1:4000"}, "need rank= and world_size= in a process without a launcher"),
        ({"init_method": "env://"}, "launcher='pytorch', but this process was not started by it"),
        (
            {"init_method": "file:///tmp/x", "store": dist.HashStore(), "rank": 0, "world_size": 1},
            "both say where to meet",
        ),
        ({"init_method": "tcp://a:1", "port": 1, "rank": 0, "world_size": 2}, "both say where to meet"),
        ({"init_method": "file:///no/such/folder/x", "rank": 0, "world_size": 2}, "folder of init_method's file"),
        ({"backend": "carrier-pigeon"}, "backend 'carrier-pigeon' is not available.*here: gloo"),
        ({"backend": 3}, "backend must be a string"),
    ],
)
def test_arguments(plain: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=f"(?s)meshcomm.init: .*{message}"):
        world.init(**arguments)
    assert not dist.is_initialized()


def test_a_plain_process_is_a_world_of_one_without_a_group(plain: pytest.MonkeyPatch) -> None:
    world.init()
    world.init()
    assert world.current() is None
    assert world.ensure() is None
    assert not world.under_launcher()
    assert not dist.is_initialized()
    with pytest.raises(MeshError, match="(?s)already initialised otherwise: port.*a plain process.*mc.shutdown"):
        world.init(port=4000)
    world.shutdown()
    world.shutdown()


def test_a_solo_group_is_not_a_launch(plain: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    world.on_shutdown(lambda: seen.append(dist.is_initialized()))
    group = world.solo_process_group()
    assert group.size() == 1
    assert world.solo_process_group() is group
    del group
    here = world.current()
    assert here is not None
    assert (here.rank, here.size) == (0, 1)
    assert world.ensure() is None
    assert not world.under_launcher()
    world.shutdown()
    assert seen == [True]
    assert not dist.is_initialized()


def test_one_rank_of_a_launcher(plain: pytest.MonkeyPatch) -> None:
    hook = sys.excepthook
    plain.setenv("RANK", "0")
    plain.setenv("WORLD_SIZE", "1")
    plain.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert world.under_launcher()
    here = world.ensure()
    assert here is not None
    assert (here.rank, here.size, here.local_rank, here.timeout) == (0, 1, 0, timedelta(minutes=5))
    world.init(launcher="pytorch", rank=None, timeout=300)
    for given, name in [({"timeout": 10}, "timeout"), ({"rank": 0, "world_size": 2, "port": 1}, "world_size, port")]:
        with pytest.raises(MeshError, match=f"already initialised otherwise: {name}"):
            world.init(**given)
    world.shutdown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert sys.excepthook is hook
    assert world.current() is None


def test_a_group_destroyed_by_somebody_else_is_forgotten(plain: pytest.MonkeyPatch) -> None:
    world.init(rank=0, world_size=1)
    assert world.current() is not None
    dist.destroy_process_group()
    assert world.current() is None
    world.init(rank=0, world_size=1)
    assert world.current() is not None


def test_half_of_a_master(plain: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        plain.setenv(name, value)
    with pytest.raises(
        MeshError, match="(?s)MASTER_PORT not set: where do the 2 ranks meet.*started by pytorch, rank 0"
    ):
        world.init()


def test_the_fake_backend_needs_no_peers(plain: pytest.MonkeyPatch) -> None:
    world.init(backend="fake", rank=3, world_size=8)
    here = world.ensure()
    assert here is not None
    assert (here.rank, here.size, here.backend) == (3, 8, "fake")


# ----------------------------------------------------------------------------------------------------- ranks that do not meet


def test_too_few_ranks(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        CommError, match="(?s)only 1 of 3 ranks came within 0.5 s.*rank 0 waits for rank 1, 2.*timeout="
    ):
        world.init(init_method=f"file://{tmp_path}/meeting", rank=0, world_size=3, timeout=0.5)
    assert not dist.is_initialized()
    assert world.current() is None


def test_too_few_ranks_of_a_local_launcher(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in MPICH.items():
        plain.setenv(name, value)
    with pytest.raises(
        CommError, match="(?s)rank 0 of this launch did not appear on this machine within 0.3 s.*MASTER_ADDR"
    ):
        world.init(timeout=0.3)
    plain.setenv("PMI_RANK", "0")
    plain.setenv("MPI_LOCALRANKID", "0")
    with pytest.raises(CommError, match="only 1 of 4 ranks came"):
        world.init(timeout=0.3)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir())  # The address goes, also after a failure.


def test_a_meeting_place_open_to_others(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {**MPICH, "PMI_RANK": "0"}.items():
        plain.setenv(name, value)
    folder = tmp_path / f"meshcomm-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    plain.setattr(rendezvous, "_stores", {})
    with pytest.raises(MeshError, match="open to other users"):
        world.init(timeout=0.3)


def test_a_port_in_use(plain: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=f"(?s)rank 0 cannot serve port {port}.*MASTER_PORT"):
            world.init(port=port, rank=0, world_size=2, timeout=1)


def test_nobody_at_the_port(plain: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CommError, match=f"(?s)no answer from rank 0's store at 127.0.0.1:{port} within 1 s.*start all"):
        world.init(init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=1)


def meet(callers: list[tuple[int, int]]) -> list[str]:
    """What comes of (rank, size) callers that meet in one store at a time."""
    limit = timedelta(seconds=100)
    server = rendezvous.loopback_server(limit)
    outcomes = [""] * len(callers)

    def call(number: int, rank: int, size: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit)
        try:
            _, cards = rendezvous.join(store, rank, size, f"card {rank}", limit)
            outcomes[number] = "; ".join(cards)
        except (MeshError, CommError) as error:
            outcomes[number] = str(error)

    threads = [threading.Thread(target=call, args=(n, *caller)) for n, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_meetings_in_one_store_do_not_mix() -> None:
    assert meet([(0, 2), (1, 2)]) == ["card 0; card 1"] * 2
    for outcome in meet([(0, 2), (0, 2)]):
        assert "two processes are rank 0 of 2" in outcome
    for outcome in meet([(0, 2), (1, 3)]):
        assert "world sizes differ" in outcome


@pytest.mark.thorough
def test_an_attempt_that_lost_a_rank_does_not_disturb_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts its ranks again with the same store."""
    limit = timedelta(seconds=20)
    server = rendezvous.loopback_server(limit)

    def call(rank: int, limit: timedelta, cards: list[list[str]]) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit)
        cards.append(rendezvous.join(store, rank, 2, f"card {rank}", limit)[1])

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(CommError, match="(?s)only 1 of 2 ranks came within 0.5 s.*rank 0 waits for rank 1"):
        call(0, timedelta(seconds=0.5), [])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    cards: list[list[str]] = []
    threads = [threading.Thread(target=call, args=(rank, limit, cards)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cards == [["card 0", "card 1"]] * 2


# --------------------------------------------------------------------------------------- every way to meet, with two ranks


def total() -> float:
    here = world.current()
    assert here is not None
    x = torch.tensor([here.rank + 1.0])
    dist.all_reduce(x)
    return float(x)


def every_way(folder: str, port: int) -> list[tuple[str, float]]:
    here = world.current()
    assert here is not None
    rank, seen = here.rank, [("workers", total())]
    server = dist.FileStore(f"{folder}/given", 2)
    ways: dict[str, dict[str, Any]] = {
        "file": {"init_method": f"file://{folder}/meeting"},
        "tcp": {"init_method": f"tcp://127.0.0.1:{port}"},
        "port": {"port": port},
        "store": {"store": server},
    }
    for name, way in ways.items():
        for _ in range(2):
            world.shutdown()
            assert not dist.is_initialized()
            world.init(**way, rank=rank, world_size=2, timeout=200)
            seen.append((name, total()))
    return seen


@pytest.mark.thorough
def test_every_way_to_meet_twice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ways = ["workers", *(name for name in ("file", "tcp", "port", "store") for _ in range(2))]
    for seen in run_processes(every_way, 2, (str(tmp_path), port), timeout=250):
        assert seen == [(name, 3.0) for name in ways]


def adopts(folder: str) -> tuple[bool, int, float]:
    here = world.current()
    assert here is not None
    rank, gone = here.rank, []
    world.shutdown()
    dist.init_process_group("gloo", init_method=f"file://{folder}/foreign", rank=rank, world_size=2)
    assert world.under_launcher()
    with pytest.raises(
        MeshError, match="(?s)already initialised by something else.*timeout.*init\\(\\) without arguments"
    ):
        world.init(timeout=5)
    world.init(backend="gloo")
    world.init()
    here = world.current()
    assert here is not None
    world.on_shutdown(lambda: gone.append(dist.is_initialized()))
    found = here.adopted, here.rank, total()
    world.shutdown()
    assert gone == [True]
    assert dist.is_initialized()
    assert world.ensure() is not None  # Adopted again.
    dist.destroy_process_group()
    assert world.current() is None
    return found


@pytest.mark.thorough
def test_adoption(tmp_path: Path) -> None:
    assert run_processes(adopts, 2, (str(tmp_path),), timeout=250) == [(True, 0, 3.0), (True, 1, 3.0)]


# ------------------------------------------------------------------------------------------------------ device and backend


def card(host: str, *seen: str, local_rank: int | None = None) -> devices.Card:
    return devices.Card(host, local_rank, seen)


def test_place_among_machines() -> None:
    cards = [card("b"), card("a"), card("b"), card("a"), card("a")]
    places = [devices.place(cards, rank, "cpu") for rank in range(5)]
    assert [(p.local_rank, p.local_world_size, p.node_rank) for p in places] == [
        (0, 2, 0), (0, 3, 1), (1, 2, 0), (1, 3, 1), (2, 3, 1),
    ]  # fmt: skip
    assert {p.device for p in places} == {torch.device("cpu")}


def test_each_rank_gets_an_accelerator_of_its_own() -> None:
    two = [card("a", ":0", ":1"), card("a", ":0", ":1")]
    assert [devices.place(two, rank, "cuda").device for rank in range(2)] == [torch.device("cuda", i) for i in range(2)]
    own = [card("a", "GPU-1", local_rank=0), card("a", "GPU-2", local_rank=1)]
    assert [devices.place(own, rank, "cuda").device.index for rank in range(2)] == [0, 0]


@pytest.mark.parametrize("rank", range(3))
def test_a_shared_accelerator_is_refused_on_every_rank(rank: int) -> None:
    cards = [card("a", "GPU-1"), card("b", "GPU-2"), card("b", "GPU-2")]
    message = "(?s)ranks 1 and 2 would share one cuda device.*local_world_size 2, 1 cuda device.*backend='gloo'"
    with pytest.raises(MeshError, match=message):
        devices.place(cards, rank, "cuda")
    with pytest.raises(MeshError, match="rank 0 sees no cuda device.*\n.*backend='gloo'"):
        devices.place([card("a"), *cards], rank, "cuda")


class Devices:
    """A process that sees devices in the order of the environment, with ids or without."""

    def __init__(self, shown: str, ids: bool) -> None:
        self.shown, self.ids = shown.split(","), ids

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{self.shown[index]}") if self.ids else SimpleNamespace()


@pytest.mark.parametrize("ids", [True, False], ids=["uuid", "no uuid"])
@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("0,1", "1,0", True), ("0,1", "0,1", False), ("1,0", "1,0", False), ("0,1", "2,3", False), ("0,1", "1,2", False),
        ("2,3", "3,2", True), ("5", "5", True), ("5", "6", False), ("0, 1", "2,3", False), ("0,1", "2, 0", True),
    ],
)  # fmt: skip
def test_devices_in_another_order_are_told_apart_by_what_they_are(
    monkeypatch: pytest.MonkeyPatch, ids: bool, first: str, second: str, shared: bool
) -> None:
    """Of rank 0 its first is taken, of rank 1 its second, or its only one."""
    cards = []
    for rank, shown in enumerate((first, second)):
        seen = shown.replace(" ", "")
        monkeypatch.setenv("XX_VISIBLE_DEVICES", shown)
        monkeypatch.setattr(torch, "get_device_module", lambda kind, seen=seen: Devices(seen, ids))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda seen=seen: len(seen.split(",")))
        cards.append(devices.Card.mine(rank, "cuda"))
        assert devices.Card(*json.loads(json.dumps(cards[-1]))).devices == list(cards[-1].devices)
    taken = [shown.replace(" ", "").split(",") for shown in (first, second)]
    assert shared == (taken[0][0] == taken[1][-1])
    if shared:
        with pytest.raises(MeshError, match="ranks 0 and 1 would share one cuda device"):
            devices.place(cards, 0, "cuda")
    else:
        devices.place(cards, 0, "cuda")


@pytest.mark.parametrize(("others", "shared"), [(None, True), ("GPU-1,GPU-0", True), ("GPU-1,GPU-2", False)])
def test_a_device_that_the_environment_calls_otherwise_is_known_by_its_id(
    monkeypatch: pytest.MonkeyPatch, others: str | None, shared: bool
) -> None:
    """Rank 0 sees "0,1" and takes the first; rank 1 sees ids, or all there are."""
    cards = []
    seen_by = ("0,1", "1,0" if others is None else others.replace("GPU-", ""))
    for rank, (shown, seen) in enumerate(zip(("0,1", others), seen_by, strict=True)):
        monkeypatch.delenv("XX_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("XX_VISIBLE_DEVICES", shown)
        monkeypatch.setattr(torch, "get_device_module", lambda kind, seen=seen: Devices(seen, ids=True))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        cards.append(devices.Card.mine(rank, "cuda"))
    if shared:
        with pytest.raises(MeshError, match="ranks 0 and 1 would share one cuda device"):
            devices.place(cards, 0, "cuda")
    else:
        devices.place(cards, 0, "cuda")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: ("cuda", "nccl"))
    both = "cpu:gloo,cuda:nccl"
    assert devices.choose_backend(None) == (both, "cuda")
    assert devices.choose_backend("nccl") == (both, "cuda")
    assert devices.choose_backend("gloo") == ("gloo", "cpu")
    assert devices.choose_backend("cuda:nccl") == ("cuda:nccl", "cuda")
    assert devices.choose_backend("cpu:gloo") == ("cpu:gloo", "cpu")
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    assert devices.choose_backend(None) == ("gloo", "cpu")
    with pytest.raises(MeshError, match="backend 'nccl'"):
        devices.choose_backend("nccl")
