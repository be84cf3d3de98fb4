"""What listens and where, who can read what, and that nothing in a file is run."""

from __future__ import annotations

import ast
import glob
import io
import json
import os
import pickle
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import meshcomm as mc
from meshcomm.objects import results
from meshcomm.parallel.checkpoint import load, save
from meshcomm.parallel.checkpoint.pickles import Name, Record, read_pickle
from meshcomm.parallel.full_state import full_state_dict
from meshcomm.runtime.process import memory
from meshcomm.runtime.start import rendezvous, world
from meshcomm.runtime.start.workers import run_processes

ROOT = Path(mc.__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
Run = Callable[..., list[Any]]

# ------------------------------------------------------------------------------------------------------ what listens


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        children.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(text.split()[0]))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def sockets(pids: list[int]) -> set[str]:
    """The inodes of their sockets."""
    found = set()
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                found.add(os.readlink(path))
            except OSError:
                continue
    return {link[8:-1] for link in found if link.startswith("socket:[")}


def address(text: str) -> str:
    """As it stands in /proc/net/tcp: words in the machine's byte order."""
    words = bytes.fromhex(text.split(":")[0])
    there = b"".join(words[i : i + 4][:: 1 if sys.byteorder == "big" else -1] for i in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(there) == 4 else socket.AF_INET6, there)


def listening(pids: list[int], inherited: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """The addresses at which these processes can be reached: by TCP, by UDP, and at sockets of Unix."""
    mine, found = sockets(pids) - inherited, []
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        table = Path(f"/proc/net/{kind}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == state and fields[9] in mine:
                found.append(address(fields[1]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & 0x10000 and fields[6] in mine:
            found.append(fields[7] if len(fields) > 7 else "unix")
    return found


def outside(found: list[str]) -> list[str]:
    """Those that others can reach: other machines, or other users at a Unix socket."""
    odd = []
    for place in found:
        folder = os.path.dirname(place)
        mode = os.stat(folder).st_mode if place.startswith("/") else 0
        if not (place.startswith("127.") or place == "::1" or (mode and not mode & 0o077)):
            odd.append(place)
    return odd


@LINUX
def test_the_search_finds_what_is_open_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with (
        socket.create_server(("", 0)),
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as open_to_all,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        abstract.bind(f"\0meshcomm-test-{os.getpid()}")
        open_to_all.bind(str(tmp_path / "socket"))
        abstract.listen()
        open_to_all.listen()
        datagrams.bind(("", 0))
        found = outside(listening([os.getpid()]))
    wanted = ["0.0.0.0", "0.0.0.0", str(tmp_path / "socket"), f"@meshcomm-test-{os.getpid()}"]
    assert sorted(found) == sorted(wanted)


def talk(size: int) -> None:
    """Over all ranks and over an axis of one."""
    mesh = mc.make_mesh({"a": size, "b": 1})
    x = mc.pvary(torch.ones(3), ("a", "b"), mesh=mesh)
    assert mc.all_reduce(x, "a", mesh=mesh)[0] == size
    mc.broadcast_object("x", ("a", "b"), mesh=mesh)
    assert dist.is_initialized()
    mc.barrier("a", mesh=mesh)


def every_way(folder: str, ports: list[int], parent: int) -> dict[str, list[str]]:
    """What listens in this process after it has met the other one in each way; and first in the whole launch. Stores
    stay open until the process ends.
    """
    here = world.current()
    assert here is not None
    rank, ports, seen = here.rank, list(ports), {}
    launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    mpich = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
    who = {"rank": rank, "world_size": 2}
    ways: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "launch": ({}, {}),
        "file": ({}, {"init_method": f"file://{folder}/meeting", **who}),
        "tcp": ({}, {"init_method": f"tcp://127.0.0.1:{ports.pop()}", **who}),
        "port": ({}, {"port": ports.pop(), **who}),
        "store": ({}, {"store": dist.FileStore(f"{folder}/given", 2), **who}),
        "guard": ({}, {"init_method": f"tcp://localhost:{ports.pop()}", "guard": True, **who}),
        "mpiexec": (mpich, {}),
        "address": ({**launcher, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.pop())}, {}),
        "localhost": ({**launcher, "MASTER_ADDR": "localhost", "MASTER_PORT": str(ports.pop())}, {}),
        "host": ({**launcher, "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(ports.pop())}, {}),
    }
    for name, (variables, arguments) in ways.items():
        with set_to(variables):
            if name != "launch":
                world.init(**arguments, timeout=200)
            talk(2)
            seen[name] = listening(tree(parent) if name == "launch" else [os.getpid()])
            mc.barrier("all", mesh=mc.make_mesh({"all": 2}))
            world.shutdown()
        if name == "localhost":
            before = len(listening([os.getpid()]))
            world.solo_process_group()
            seen["alone"] = listening([os.getpid()])
            assert len(seen["alone"]) > before
            world.shutdown()
            seen["adopted"] = adopted(folder, rank)
    return seen


@contextmanager
def set_to(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not there otherwise, for a while."""
    assert not set(variables) & set(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def free_ports(count: int) -> list[int]:
    """So many at once, and so different ones."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.mark.thorough
@LINUX
def test_on_one_machine_everything_listens_on_loopback(tmp_path: Path) -> None:
    """Or where the launcher has put rank 0, if it is told that all ranks are here."""
    own = {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    for seen in run_processes(every_way, 2, (str(tmp_path), free_ports(6), os.getpid()), timeout=250):
        assert len(seen) == 12
        for way, found in seen.items():
            assert found, way
            assert set(outside(found)) <= (own if way == "host" else set()), way


def adopted(folder: str, rank: int) -> list[str]:
    """A group of somebody else, who has it where he likes, and what is added when this library makes one of it."""
    with set_to({"GLOO_SOCKET_IFNAME": "lo"}):
        dist.init_process_group("gloo", init_method=f"file://{folder}/foreign", rank=rank, world_size=2)
    before = len(listening([os.getpid()]))
    local = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    with set_to(local):
        mesh = mc.make_mesh({"a": 2}, timeout=200)
        mc.barrier("a", mesh=mesh)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        found = listening([os.getpid()])
        mc.barrier("a", mesh=mesh)
        world.shutdown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    dist.destroy_process_group()
    assert len(found) > before
    return found


RANK = """
import json, os, pathlib, sys
sys.path.insert(0, sys.argv[2])
import test_security
import meshcomm as mc
inherited = test_security.sockets([os.getpid()])  # from the launcher
mc.init(timeout=200)
test_security.talk(2)
pathlib.Path(sys.argv[1], f"rank{mc.make_mesh({'a': -1}).rank}").write_text(json.dumps(
    test_security.listening(test_security.tree(os.getpid()), inherited)))
mc.barrier("a", mesh=mc.make_mesh({"a": -1}))
mc.shutdown()
"""


def mpiexec(variable: str) -> list[str]:
    """Of the wheel in the folder that the variable names."""
    folder = os.environ.get(variable, "")
    if not Path(folder, "bin", "mpiexec").exists() or not folder:
        pytest.skip(f"set {variable} to where bin/mpiexec is")
    return [str(Path(folder, "bin", "mpiexec"))]


@pytest.mark.thorough
@LINUX
@pytest.mark.parametrize("launcher", ["torchrun", "mpich", "openmpi", "srun"])
def test_ranks_of_a_launcher_listen_on_loopback(launcher: str, tmp_path: Path) -> None:
    """What the launcher itself opens is its own affair: torchrun's store listens everywhere, as do the mpiexecs'."""
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    elif launcher == "srun":
        if not os.environ.get("SLURM_CONF") or shutil.which("srun") is None:
            pytest.skip("needs srun, and SLURM_CONF set to a cluster's configuration")
        command = ["srun", "-n", "2"]
    else:
        more = ["--oversubscribe"] if launcher == "openmpi" else []
        command = [*mpiexec(f"MESHCOMM_{launcher.upper()}"), *more, "-n", "2"]
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [*command, sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "out"), str(ROOT / "tests")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
             "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()]
    assert len(told) == 2
    for found in told:
        assert found
        assert not outside(found)


@pytest.mark.parametrize(("host", "one_machine", "expected"), [
    ("localhost", False, "127.0.0.1"), ("127.0.0.1", False, "127.0.0.1"), ("127.0.0.2", False, "127.0.0.2"),
    ("::1", False, "::1"), ("192.0.2.17", False, "192.0.2.17"), ("0.0.0.0", True, None), ("::", False, None),
    ("a name", True, "its own"), ("a name", False, None), ("no-such-host.invalid", True, None), ("no-such-host.invalid", False, None),
])  # fmt: skip
def test_a_store_is_served_at_what_was_named(host: str, one_machine: bool, expected: str | None) -> None:
    """A name alone may mean another address on another machine: then it is served at all of ours."""
    if host == "a name":
        host = socket.gethostname()
        expected = expected and str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    assert rendezvous._address(host, one_machine) == expected


def test_an_address_that_is_not_ours_is_served_at_all_of_ours() -> None:
    """One that another machine forwards from."""
    (port,) = free_ports(1)
    with rendezvous._listener(port, "192.0.2.254") as listener:
        assert listener.getsockname()[:2] in (("::", port), ("0.0.0.0", port))
    with rendezvous._listener(port, "127.0.0.1") as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


# -------------------------------------------------------------------------------------------------- who can read what


def as_nobody(script: str) -> int:
    """Exit status of a shell script of another user."""
    nobody = 65534
    return subprocess.run(["/bin/sh", "-c", script], user=nobody, group=nobody, extra_groups=(), capture_output=True,
                          timeout=280, check=False, cwd="/").returncode  # fmt: skip


@LINUX
@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_reach_neither_memory_nor_meeting_places(monkeypatch: pytest.MonkeyPatch) -> None:
    made = memory.create(memory.PAGE)
    try:
        path = f"/proc/{os.getpid()}/fd/{made.fd}"
        assert subprocess.run(["/bin/sh", "-c", f"head -c 1 {path}"], capture_output=True, check=False).returncode == 0
        assert as_nobody("true") == 0
        assert as_nobody(f"head -c 1 {path}") != 0
        assert as_nobody(f": >> {path}") != 0
    finally:
        os.close(made.fd)
    folder = rendezvous._private_folder()
    (folder / "test").write_text("x")
    assert as_nobody(f"ls {folder}") != 0
    assert as_nobody(f"cat {folder / 'test'}") != 0
    (folder / "test").unlink()


def test_where_ranks_of_one_machine_meet_belongs_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = rendezvous._private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((mc.MeshError, FileExistsError), match="open to other users|exists"):
        rendezvous._private_folder()


def test_results_in_files_are_this_users_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are pickles: one that somebody has put in the place of another is not unpickled."""
    read, modes = results._read, []
    bang = tmp_path / "bang"
    bad = pickle.dumps(Bomb(str(bang)))

    def meddled(folder: Path, sent: list[tuple[int, bytes]]) -> Any:
        modes.append((stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE((folder / "1").stat().st_mode)))
        size = sent[1][0]
        if how == "bytes":
            (folder / "1").write_bytes((bad + b"." * size)[:size])
        elif how == "link":
            (folder / "1").rename(folder / "other")
            (folder / "1").symlink_to(folder / "other")
        elif how == "pipe":
            (folder / "1").unlink()
            os.mkfifo(folder / "1")
        return read(folder, sent)

    def main() -> Any:
        mesh = mc.make_mesh({"a": 2})
        try:
            return mc.collect_results(["x" * 500], 2, "a", tmpdir=tmp_path / "shared", mesh=mesh)
        except mc.MeshError as error:
            return str(error)

    monkeypatch.setattr(results, "_read", meddled)
    texts = {"bytes": "what index 1 wrote to tmpdir has been changed", "link": "cannot read what index 1 wrote",
             "pipe": "bytes to tmpdir, 0 are there"}  # fmt: skip
    for how, text in texts.items():  # noqa: B007  # meddled() reads it
        for told in mc.launch(main, ranks=2):
            assert text in told
    how = "not at all"
    assert mc.launch(main, ranks=2) == [["x" * 500] * 2, None]
    assert set(modes) == {(0o700, 0o600)}
    assert not bang.exists()


# ------------------------------------------------------------------------------------------------- pickles read as data


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


KNOWN = {"torch.Size", "torch.float32"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_it_is(protocol: int) -> None:
    shared = ["é", "x" * 300, -1, 255, 65535, 2**31 - 1, -(2**31), 2**40, -(2**63), True, False, None, 1.5, ()]
    value = {"a": [shared, shared, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], 7: {}, "many": list(range(2000)),
             "deep": {str(i): {"k": i} for i in range(1500)}}  # fmt: skip
    found = read_pickle(pickle.dumps(value, protocol), ())
    assert found == value
    assert found["a"][0] is found["a"][1]
    size, dtype = read_pickle(pickle.dumps([torch.Size([2, 3]), torch.float32], protocol), KNOWN)
    assert (type(size), size.name, tuple(size.args[0])) == (Record, "torch.Size", (2, 3))
    assert (type(dtype), dtype.text) == (Name, "torch.float32")


@pytest.mark.parametrize(("data", "text"), [
    (b"", "no pickle, or cut short"),
    (b"PK\x03\x04", "a step 0x50, which does not belong"),
    (b"cposix\nsystem\n(S'true'\ntR.", "posix.system does not belong"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system does not belong"),
    (b"\x80\x04\x8c\x05torch\x8c\x0chub.download\x93.", "torch.hub.download does not belong"),
    (b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)R\x8c\x01x\x93.", "requires str"),
    (b"\x80\x04\x8c\x01x)R.", "it calls what is no name"),
    (b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}b.", "puts something into what is no Record"),
    (b"\x80\x04}))s.", "a key that is a tuple"),
    (b"\x80\x04]\x8c\x01xs.", "puts something into what is no dict|no pickle"),
    (b"\x80\x02]r\xff\xff\xff\xffh\x00.", "no pickle, or cut short|Memo value not found"),
    (b"\x80\x02\x8b\xff\xff\xff\x7f.", "a step 0x8b"),
    (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "no pickle, or cut short"),
    (b"\x80\x09.", "unsupported pickle protocol: 9"),
    (b"\x80\x04((((.", "no pickle, or cut short"),
    (b"\x80\x04N0.", "a step 0x30"),
    (b"\x80\x04h\x05.", "Memo value not found"),
    (b"Vx\n.", "a step 0x56"),
    (b"\x80\x05\x82\x01.", "a step 0x82"),
    (b"Pid\n.", "a step 0x50"),
])  # fmt: skip
def test_what_is_no_plain_data_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=text):
        read_pickle(data, KNOWN)


def test_whatever_the_bytes_are_nothing_runs_and_nothing_else_is_raised(tmp_path: Path) -> None:
    """Cut at each byte, and with some bytes changed."""
    draws = random.Random(3)
    good = pickle.dumps({"a": [torch.Size([1, 2]), torch.float32, "x" * 300, 1.5, 2**40], "b": ({"c": 1}, True)})
    bad = pickle.dumps([Bomb(str(tmp_path / "bang")), {"a": 1}], 2)
    cases = [good[:end] for end in range(len(good))]
    for _ in range(3000):
        data = bytearray(draws.choice((good, bad)))
        for _ in range(draws.randint(1, 4)):
            data[draws.randrange(len(data))] = draws.randrange(256)
        cases.append(bytes(data))
    refused = 0
    for case in cases:
        try:
            read_pickle(case, KNOWN)
        except pickle.UnpicklingError:
            refused += 1
    assert len(good) <= refused < len(cases)
    assert not (tmp_path / "bang").exists()


# ------------------------------------------------------------------------------------------------------- checkpoints


def net() -> nn.Module:
    """Something to load into."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def table_of(folder: Path) -> Any:
    """As torch reads it."""
    return pickle.loads((folder / ".metadata").read_bytes())


def written(folder: Path, table: Any) -> None:
    """The table instead of the one that is there."""
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def place_of(table: Any, name: str) -> Any:
    """Where a part of this name is."""
    return next(info for index, info in table.storage_data.items() if index.fqn == name)


def in_place(folder: Path, name: str, data: bytes) -> None:
    """Other bytes for what has this name."""
    table = table_of(folder)
    info = place_of(table, name)
    info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)
    (folder / "__9_0.distcp").write_bytes(data)
    written(folder, table)


def saved(value: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save makes of it, packed otherwise."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, plain)
    if compression == zipfile.ZIP_STORED:
        return plain.getvalue()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return packed.getvalue()


def laughs() -> bytes:
    """A pickle of a few hundred bytes with a key of 2**61 parts: whoever hashes it never ends."""
    doubled = b"".join(b"h" + bytes([i]) + pickle.TUPLE2 + pickle.MEMOIZE for i in range(60))
    return b"\x80\x04}K\x01K\x02" + pickle.TUPLE2 + pickle.MEMOIZE + doubled + b"Ns."


def hostile(folder: Path, bang: Path, case: str) -> None:
    """Make a good checkpoint a bad one."""
    table, bomb = table_of(folder), Bomb(str(bang))
    info, entry = place_of(table, "model.0.weight"), table.state_dict_metadata["model.0.weight"]
    if case == "table":
        (folder / ".metadata").write_bytes(pickle.dumps(bomb))
    elif case == "old pickle":
        (folder / ".metadata").write_bytes(pickle.dumps(bomb, 0))
    elif case == "path":
        table.planner_data["model.0.weight"] = ("model", bomb)
    elif case == "offset":
        entry.chunks[0].offsets = bomb
    elif case == "plain":
        in_place(folder, "meshcomm.step", saved(bomb))
    elif case == "tensor":
        in_place(folder, "model.0.weight", saved({"x": bomb}))
    elif case == "old file":
        data = io.BytesIO()
        torch.save(bomb, data, _use_new_zipfile_serialization=False)
        in_place(folder, "meshcomm.extra", data.getvalue())
    elif case == "laughs":
        (folder / ".metadata").write_bytes(laughs())
    elif case == "memory":
        (folder / ".metadata").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    elif case == "bomb of zeros":
        in_place(folder, "meshcomm.extra", saved(torch.zeros(2**22), zipfile.ZIP_DEFLATED))
    elif case == "other class":
        table.state_dict_metadata["model.0.weight"] = table.storage_meta
    elif case == "not a table":
        (folder / ".metadata").write_bytes(pickle.dumps(table.storage_meta))
    elif case == "outside":
        info.relative_path = "../../secret"
    elif case == "absolute":
        info.relative_path = "/etc/passwd"
    elif case == "folder":
        info.relative_path = ".."
    elif case == "negative":
        info.offset = -1
    elif case == "beyond":
        info.length = 2**62
    elif case == "negative size":
        entry.chunks[0].sizes = torch.Size([-1, 8])
    elif case == "huge":
        table.state_dict_metadata["optim.state.0.weight.exp_avg"].size = torch.Size([2**31, 2**31, 2**31])
    elif case in ("empty", "half empty"):  # there are fewer bytes than elements; or fewer than in all of them
        name = "optim.state.0.weight.exp_avg"
        many = 2**40 if case == "empty" else place_of(table, name).length // 2
        table.state_dict_metadata[name].size = torch.Size([many])
        table.state_dict_metadata[name].chunks[0].sizes = torch.Size([many])
        table.state_dict_metadata[name].chunks[0].offsets = torch.Size([0])
        (index,) = (index for index in table.storage_data if index.fqn == name)
        object.__setattr__(index, "offset", torch.Size([0]))
    elif case == "dims":
        entry.chunks[0].offsets = torch.Size([0, 0, 0])
    elif case == "over the edge":
        entry.chunks[0].offsets = torch.Size([1, 0])
    elif case == "overlap":
        half = type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([4, 8]))
        entry.chunks[:] = [half, half]
    elif case == "hole":
        entry.chunks[0].sizes = torch.Size([4, 8])
    elif case == "nowhere":
        table.storage_data = {index: each for index, each in table.storage_data.items() if each is not info}
    elif case == "compressed":
        info.transform_descriptors = ["zstd"]
    elif case == "swapped":
        other = place_of(table, "model.1.weight")
        info.offset, info.length, other.offset, other.length = other.offset, other.length, info.offset, info.length
    elif case == "pipe":
        (folder / "__0_0.distcp").unlink()
        os.mkfifo(folder / "__0_0.distcp")
    elif case == "cut":
        (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-100])
    if table_changed(case):
        written(folder, table)


def table_changed(case: str) -> bool:
    """The others have been written."""
    return case not in ("table", "old pickle", "plain", "tensor", "old file", "laughs", "memory", "bomb of zeros",
                        "not a table", "pipe", "cut")  # fmt: skip


CASES = {
    "table": "mkdir does not belong", "old pickle": "mkdir does not belong",
    "path": "mkdir does not belong", "offset": "mkdir does not belong",
    "plain": "Weights only load failed", "tensor": "Weights only load failed",
    "old file": "'__9_0.distcp' in .* is damaged",
    "laughs": "a key that is a tuple", "memory": "a dict is no table of contents",
    "bomb of zeros": "is damaged.*it is compressed", "other class": "StorageMeta is no TensorStorageMetadata",
    "not a table": "StorageMeta is no Metadata",
    "outside": "'model.0.weight' is not in a file of the checkpoint", "absolute": "is not in a file of the checkpoint",
    "folder": "is not in a file of the checkpoint",
    "negative": "an offset is -1", "beyond": "is missing or cut short", "negative size": "the size of a box is -1",
    "huge": "its size is", "empty": "has not all of 'optim.state.0.weight.exp_avg'",
    "half empty": "has not all of 'optim.state.0.weight.exp_avg'", "dims": "a box of .* dims",
    "over the edge": r"a box of .* at \[1, 0\] in a tensor of",
    "overlap": "boxes that overlap", "hole": "has not all of 'model.0.weight'",
    "nowhere": "does not say where 'model.0.weight' is", "compressed": "is compressed",
    "swapped": "not what the table says it is", "pipe": "is missing or cut short", "cut": "is missing or cut short",
}  # fmt: skip


FEW = ("table", "plain", "tensor", "huge", "laughs", "outside", "cut")
"""Those that are tried in processes too: what each rank finds is told to the others in one way."""


def loads(folder: str, cases: tuple[str, ...]) -> dict[str, tuple[str, bool]]:
    """The error of each case, and whether the module is as it was."""
    mesh, told = mc.make_mesh({"a": -1}), {}
    for case in cases:
        module = net()
        before = [p.detach().clone() for p in module.parameters()]
        try:
            load(Path(folder, case), module, torch.optim.AdamW(module.parameters()), mesh=mesh)
            told[case] = "nothing raised", False
        except mc.MeshError as error:
            told[case] = str(error), all(map(torch.equal, before, module.parameters()))
    assert mc.all_reduce(mc.pvary(torch.ones(()), "a", mesh=mesh), "a", mesh=mesh) == mesh.size
    load(Path(folder, "good"), module, torch.optim.AdamW(module.parameters()), mesh=mesh)
    return told


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint and all the bad ones that are made of it."""
    root = tmp_path_factory.mktemp("hostile")
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    save(root / "good", module, optimizer, step=3, extra={"a": 1}, mesh=mc.make_mesh({"a": 1}))
    table = table_of(root / "good" / "step-00000003")
    assert table.state_dict_metadata
    for case in CASES:
        shutil.copytree(root / "good", root / case)
        hostile(root / case / "step-00000003", root / "bang", case)
    return root


def test_a_hostile_checkpoint_is_an_error_on_all_ranks(
    run4: Run, folders: Path, request: pytest.FixtureRequest
) -> None:
    """In both runtimes: nothing runs, nobody hangs, and what could be told before is told before."""
    inside = "in-process" in request.node.name
    for told in run4(loads, str(folders), tuple(CASES) if inside else FEW):
        for case, text in ((case, CASES[case]) for case in told):
            assert re.search(text, told[case][0], re.DOTALL), (case, told[case][0])
            assert told[case][1] or case in ("tensor", "swapped"), f"{case} has changed the module"
    assert not (folders / "bang").exists()


def test_torch_itself_would_have_run_it(folders: Path) -> None:
    """The markers are real ones."""
    bang = folders / "bang"
    assert not bang.exists()
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(folders / "table" / "step-00000003").read_metadata()
    assert bang.exists()
    bang.rmdir()


def test_a_file_may_be_a_link(folders: Path, tmp_path: Path) -> None:
    """As tools make them that keep one copy of many."""
    shutil.copytree(folders / "good", tmp_path / "here")
    file = tmp_path / "here" / "step-00000003" / "__0_0.distcp"
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    module = net()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    found = load(tmp_path / "here", module)
    assert (found.step, found.extra) == (3, {"a": 1})
    state = full_state_dict(module)
    assert state is not None
    assert state["0.weight"].abs().sum() > 0


def test_a_table_that_is_a_pipe_is_none(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "good", tmp_path / "here")
    table = tmp_path / "here" / "step-00000003" / ".metadata"
    table.unlink()
    os.mkfifo(table)
    with pytest.raises(mc.MeshError, match="there is no finished checkpoint"):
        load(tmp_path / "here", net())


# ----------------------------------------------------------------------------------------------------- what code does

DANGEROUS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.spawnl", "os.execv", "os.execvp",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "torch.load",
    "torch.jit.load", "torch.hub.load", "numpy.load", "yaml.load", "subprocess.run", "subprocess.Popen",
    "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.getoutput", "tempfile.mktemp",
    "ctypes.CDLL", "importlib.import_module", "tarfile.open", "shutil.unpack_archive",
}  # fmt: skip
HERE = {
    ("meshcomm/__init__.py", "importlib.import_module"): "names of its own, when first asked for",
    ("meshcomm/__main__.py", "importlib.import_module"): "a tool of its own, when it is asked for",
    ("meshcomm/dry/hardware.py", "importlib.import_module"): "what measures this machine, where that is wanted",
    (
        "meshcomm/dry/planning/options.py",
        "importlib.import_module",
    ): "the units of a program that has called fully_shard",
    ("meshcomm/tools/verify.py", "importlib.import_module"): "proofs of functions, where one is wanted",
    ("meshcomm/testing/equal.py", "importlib.import_module"): "the proof that is asserted, of two",
    ("meshcomm/parallel/__init__.py", "importlib.import_module"): "names of its own, when first asked for",
    ("meshcomm/parallel/by_axes.py", "importlib.import_module"): "adaptors, which it names",
    ("meshcomm/parallel/tensor/module.py", "importlib.import_module"): "plans that are found, where one is wanted",
    ("meshcomm/parallel/tensor/auto/proof.py", "importlib.import_module"): "the adaptor that cuts the small copy",
    ("meshcomm/spmd/shard_map/dtensors.py", "importlib.import_module"): "one name of its own",
    ("meshcomm/launch.py", "importlib.import_module"): "what starts processes, where some are wanted",
    ("meshcomm/make_mesh.py", "importlib.import_module"): "the ranks of one process, where there are some",
    ("meshcomm/runtime/groups.py", "importlib.import_module"): "the guard, where it is wanted",
    ("meshcomm/objects/pickles.py", "pickle.loads"): "bytes of a peer of this launch",
    (
        "meshcomm/runtime/start/worker.py",
        "pickle.loads",
    ): "bytes of the parent, of the worker, of itself: through a pipe",
    ("meshcomm/runtime/process/boxes.py", "ctypes.CDLL"): "futex, by the C library that is loaded already",
    ("meshcomm/runtime/start/worker.py", "ctypes.CDLL"): "prctl of the C library that is loaded already",
    ("meshcomm/runtime/start/network.py", "ctypes.CDLL"): "getifaddrs of the C library that is loaded already",
    ("meshcomm/parallel/checkpoint/pickles.py", "pickle._Unpickler"): "without the steps that import, call or change",
    ("meshcomm/parallel/checkpoint/reader.py", "torch.load"): "weights_only=True",
    ("meshcomm/parallel/weights/whole_tensors.py", "torch.load"): "weights_only=True",
    ("examples/train_gpt.py", "torch.load"): "weights_only=True",
    ("examples/finetune.py", "importlib.import_module"): "transformers and tqdm",
}


WORDS = re.compile(r"\b(" + "|".join(sorted({name.rpartition(".")[2] for name in DANGEROUS})) + r")\b")


def used(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Dangerous names in a program, called or handed on; under whatever name they were imported."""
    if not WORDS.search(text):
        return
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, _, rest = ast.unparse(node).partition(".")
            full = names.get(first, first) + ("." + rest if rest else "")
            if full in DANGEROUS:
                yield full, node


FILES = {path: path.read_text() for folder in ("meshcomm", "examples", "benchmarks")
         for path in sorted((ROOT / folder).rglob("*.py"))}  # fmt: skip


def test_what_could_run_code_stands_in_known_places() -> None:
    found = set()
    for path, text in FILES.items():
        name = path.relative_to(ROOT).as_posix()
        for full, node in used(text):
            if name.startswith("benchmarks/") and full in (
                "subprocess.run",
                "subprocess.Popen",
                "importlib.import_module",
            ):
                continue
            assert (name, full) in HERE, f"{name}:{getattr(node, 'lineno', 0)} uses {full}"
            found.add((name, full))
    assert found == set(HERE), "the table has what is no longer there"


def test_shells_and_unpicklers_are_not_asked_for() -> None:
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)) if re.search(r"shell=|weights_only=|torch\.load\(", text) else ():
            if not isinstance(node, ast.Call):
                continue
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert given.get("shell", "False") == "False", f"{path}:{node.lineno}"
            assert given.get("weights_only", "True") == "True", f"{path}:{node.lineno}"
            if ast.unparse(node.func) == "torch.load":
                assert given.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_the_check_finds_other_names() -> None:
    program = (
        "import pickle as p\nfrom os import system as s\nimport torch\np.loads(x)\ns(x)\nmap(eval, x)\ntorch.load(x)\n"
    )
    assert sorted(full for full, _ in used(program)) == ["eval", "os.system", "pickle.loads", "torch.load"]


# -------------------------------------------------------------------------------------------------------- SECURITY.md

POLICY = (ROOT / "SECURITY.md").read_text()


def test_the_policy_names_every_variable_of_our_own() -> None:
    texts = [text for path, text in FILES.items() if path.is_relative_to(ROOT / "meshcomm")]
    own = {name for text in texts for name in re.findall(r'"(MESHCOMM_[A-Z_]+)"', text)}
    assert {"MESHCOMM_GUARD", "MESHCOMM_SHARED_MEMORY"} <= own
    for name in own:
        assert name in POLICY, name


def test_the_policy_tells_how_to_report_and_nothing_made_up() -> None:
    assert "private" in POLICY
    assert "@" not in POLICY
