"""Saves that are interrupted, that meet another job's, that the disk has no room for; files that are damaged."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.serialization import set_crc32_options
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.objects.parcels import Courier
from meshcomm.parallel import full_state_dict, fully_shard
from meshcomm.parallel.checkpoint import async_save, latest, load, save
from meshcomm.parallel.checkpoint.files import Root, Writer
from meshcomm.runtime.health import peers

# Torch says so where it reads and writes on one rank.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def left_by(root: Path, sign: str, step: int, *, days: float = 0) -> Path:
    """What a process that was signed so is writing, or has left."""
    machine, pid, began = sign.split("\t")
    folder = root / f".partial-step-{step:08d}-{zlib.crc32(machine.encode()):08x}-{pid}-{began}-{step:08x}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"half")
    for path in (folder / "__0_0.distcp", folder):
        os.utime(path, (time.time() - 86400 * days,) * 2)
    return folder


def ended_process() -> str:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{peers.sign().split(chr(9))[0]}\t{process.pid}\t1"


@contextlib.contextmanager
def living_process() -> Iterator[str]:
    program = "import sys; from meshcomm.runtime.health import peers; print(peers.sign(), flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


@pytest.mark.thorough
def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    """Swept is what is one's own, or left by the dead; of another machine's, what is old."""
    with living_process() as alive:
        writing = left_by(tmp_path, alive, 3, days=2)
        elsewhere = left_by(tmp_path, "another machine\t1\t1", 4)
        unknown = tmp_path / ".partial-step-00000007"
        unknown.mkdir()
        for sign, days in ((ended_process(), 0), (peers.sign(), 0), ("another machine\t1\t2", 2)):
            left_by(tmp_path, sign, 5 if days else 6 + len(os.listdir(tmp_path)), days=days)
        assert save(tmp_path, linear()) == str(tmp_path / "step-00000005")
        assert set(os.listdir(tmp_path)) == {writing.name, elsewhere.name, unknown.name, "step-00000005"}
        with pytest.raises(
            mc.MeshError, match=r"(?s)another job is saving a checkpoint of step 3 to .*another step or"
        ):
            save(tmp_path, linear(), step=3)
        save(tmp_path, linear(), step=4)  # it may be this job before it came to this machine
        assert writing.exists()
    save(tmp_path, linear(), step=3)
    assert not writing.exists()


JOB = r"""
import sys, torch
from meshcomm.parallel.checkpoint import save
for step in map(int, sys.argv[2:]):
    print(save(sys.argv[1], torch.nn.Linear(8, 8), step=None if step < 0 else step), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("numbered", [True, False])
def test_jobs_that_save_into_one_folder_lose_nothing(tmp_path: Path, numbered: bool) -> None:
    steps = [[str(2 * i + job if numbered else -1) for i in range(6)] for job in range(2)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path), *mine], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for mine in steps
    ]  # fmt: skip
    told = [job.communicate(timeout=280) for job in jobs]
    assert [error for _, error in told] == ["", ""]
    saved = sorted(name for out, _ in told for name in out.split())
    assert saved == [str(tmp_path / f"step-{step:08d}") for step in range(12)]
    assert sorted(os.listdir(tmp_path)) == [Path(name).name for name in saved]
    assert Root(str(tmp_path)).steps() == list(range(12))


def test_the_latest_one_for_all_is_the_first_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, linear(), step=step)
    mesh = mc.make_mesh({"x": 2, "y": 2})
    everybody = Root.steps
    monkeypatch.setattr(Root, "steps", lambda self: everybody(self)[: 1 + (mesh.rank or 0)])  # that of each file system

    def program() -> list[str]:
        asked = latest(tmp_path), latest(tmp_path, ("x", "y"), mesh=mesh), latest(tmp_path, "x", mesh=mesh)
        return [Path(str(path)).name[-1] for path in asked]

    assert mc.launch(program, ranks=4) == [["1", "1", "1"], ["2", "1", "2"], ["2", "1", "1"], ["2", "1", "2"]]
    with pytest.raises(mc.MeshError, match="checkpoint.latest: no axis 'z'"):
        mc.launch(lambda: latest(tmp_path, "z", mesh=mesh), ranks=4)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_file_changes_nothing(tmp_path: Path, sums: bool, size: int) -> None:
    """On no rank, also where another one's file is the damaged one; the optimiser neither."""

    def trained(seed: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
        for p in net.parameters():
            nn.init.constant_(p, seed)
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.step()
        return net, optimizer

    def saving() -> None:
        save(tmp_path, *trained(1.0), mesh=mc.make_mesh({"x": size}))

    def loading() -> str:
        net, optimizer = trained(2.0)
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        with pytest.raises(mc.MeshError) as caught:
            load(tmp_path, net, optimizer, mesh=mc.make_mesh({"x": size}))
        assert_close(net.state_dict(), before[0], rtol=0, atol=0)
        assert_close(optimizer.state_dict()["state"], before[1]["state"], rtol=0, atol=0)
        return str(caught.value)

    set_crc32_options(sums)
    try:
        mc.launch(saving, ranks=size)
    finally:
        set_crc32_options(True)
    (folder,) = tmp_path.glob("step-*")
    *_, last = sorted(folder.glob("*.distcp"))
    data = bytearray(last.read_bytes())
    if sums:
        value = next(trained(1.0)[0].parameters()).detach().flatten()[0].item()
        data[data.rindex(torch.full((16,), value).numpy().tobytes()) + 3] ^= 1
    else:
        at = data.rindex(b"PK\x01\x02")
        data[at : at + 30] = bytes(30)
    last.write_bytes(data)
    for text in mc.launch(loading, ranks=size):
        assert last.name in text
        assert "damaged" in text


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python 3.13 tells of torch's own writer
def test_a_full_disk_is_told_in_the_systems_words(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mount: {mount.stderr.strip()}")
    try:
        for count, layer in ((100, linear()), (1500, nn.Linear(1500, 1500))):
            mesh = mc.make_mesh({"x": 2})
            if count == 100:
                mc.launch(lambda: save(tmp_path, layer, step=1, mesh=mesh), ranks=2)
                continue
            with pytest.raises(
                mc.MeshError, match="(?s)checkpoint.save: (index 0: )?OSError: .*No space left on device"
            ):
                mc.launch(lambda: save(tmp_path, layer, step=2, mesh=mesh), ranks=2)
        assert os.listdir(tmp_path) == ["step-00000001"]
        assert load(tmp_path, linear()).step == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_keep_and_what_interrupted_saves_have_left(tmp_path: Path) -> None:
    left_by(tmp_path, ended_process(), 1)
    (tmp_path / "step-00000099").mkdir()  # no table: not finished
    (tmp_path / "mine.txt").write_text("stays")
    assert latest(tmp_path) is None

    def program() -> list[list[str]]:
        mesh, layer, seen = mc.make_mesh({"x": 2}), nn.Linear(4, 4).requires_grad_(False), []
        nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
        for step in (1, 2, 10, 3):
            save(tmp_path, layer, step=step, keep=2, mesh=mesh)
            seen.append(sorted(os.listdir(tmp_path)))
        return seen

    names = [
        sorted([f"step-{each:08d}" for each in kept] + ["mine.txt"])
        for kept in ([1, 99], [1, 2, 99], [2, 10, 99], [3, 10, 99])
    ]
    assert mc.launch(program, ranks=2)[0] == names
    assert latest(tmp_path) == str(tmp_path / "step-00000010")


def background(folder: str) -> None:
    """On each rank: bits of the moment of the call, and a disk that is full on one of them."""
    mesh = mc.make_mesh({"x": -1})
    with mc.use_mesh(mesh):
        net = fully_shard(nn.Linear(6, 4), "x", grads="sum")
        adam = torch.optim.AdamW(net.parameters())
        saved = []
        for step in (1, 2):
            net(torch.ones(2, 6)).sum().backward()
            adam.step()
            saved.append((full_state_dict(net), adam.state_dict()["state"][0]["step"].item()))
            saving = async_save(folder, net, adam, step=step, rank_extra=mesh.rank)
        net(torch.ones(2, 6)).sum().backward()
        adam.step()
        found = load(folder, net, adam)  # waits for what is under way
        assert (found.step, found.rank_extra, saving.done()) == (2, mesh.rank, True)
        for step, (whole, count) in enumerate(saved, 1):
            load(os.path.join(folder, f"step-{step:08d}"), net, adam)
            assert_close(full_state_dict(net), whole, rtol=0, atol=0)
            assert adam.state_dict()["state"][0]["step"].item() == count
        full = async_save(folder, net, adam, step=FULL)
        with pytest.raises(mc.MeshError, match=rf"index 1: step {FULL} was not saved: OSError:.* No space left"):
            save(folder, net, adam, step=10)
        with pytest.raises(mc.MeshError, match="was not saved"):
            full.wait()
        last = async_save(folder, net, adam, keep=2)
        assert last.wait() == last.wait() == last.path == os.path.join(folder, "step-00000003")
        assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
        assert not [name for name in os.listdir(last.path) if "done" in name]


FULL = 77


def written(self: Writer, *args: object) -> object:
    time.sleep(0.05)
    if self._rank == 1 and self._folder.endswith(f"{FULL}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return _WRITE(self, *args)


_WRITE: Any = Writer.write


@pytest.mark.parametrize("runtime", ["in-process", "processes"])
def test_saves_in_the_background(
    runtime: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "in-process":
        monkeypatch.setattr(Writer, "write", written)
        mc.launch(background, 2, args=(str(tmp_path),))
    else:
        request.getfixturevalue("pool4").run(background_of_a_process, str(tmp_path))


def background_of_a_process(folder: str) -> None:
    Writer.write = written  # type: ignore[method-assign, assignment]
    try:
        background(folder)
    finally:
        Writer.write = _WRITE  # type: ignore[method-assign]


def test_saves_of_what_was_saved_before_meet_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, met = Courier.meet, list[int]()

    def counted(self: Courier, *args: Any) -> object:
        met.append(self.axis.index)
        return meet(self, *args)

    def program() -> list[int]:
        layer, rank, counts = nn.Linear(3, 2), mc.rank(), list[int]()
        nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        extra = {"seen": [0], "at": torch.zeros(2)}

        def begun(**given: Any) -> Any:
            before = met.count(rank)
            saving = async_save(tmp_path, layer, sgd, extra=extra, **given)
            counts.append(met.count(rank) - before)
            return saving

        for step in (1, 2, 3):
            saving = begun(step=step)
            layer.weight.data += 1
            extra["seen"][0] += 1
            extra["at"] += 1
            if step < 3:
                saving.wait()
        mc.barrier("ranks")
        while not saving.succeeded():
            time.sleep(0.001)
        mc.barrier("ranks")
        begun()  # the next step; the last one was not waited for
        found = load(tmp_path, layer, sgd)
        assert (found.step, found.extra["seen"], found.extra["at"].tolist()) == (4, [3], [3.0, 3.0])
        assert torch.equal(layer.weight.data, torch.full((2, 3), 4.0))
        load(f"{tmp_path}/step-00000002", layer, sgd)
        assert torch.equal(layer.weight.data, torch.full((2, 3), 2.0))
        layer.weight.data += rank  # on one rank alone
        with pytest.raises(mc.MeshError, match="'weight' has other values on rank 1 of the mesh than on rank 0"):
            begun().wait()
        layer.weight.data -= rank
        assert begun().wait().endswith("step-00000005")
        sgd.add_param_group({"params": [extra["at"].requires_grad_()]})
        with pytest.raises(mc.MeshError, match="parameters that are not the module's"):
            begun()
        return counts

    monkeypatch.setattr(Courier, "meet", counted)

    def on_a_mesh() -> list[int]:
        with mc.use_mesh(mc.make_mesh({"ranks": 2})):
            return program()

    for counts in mc.launch(on_a_mesh, ranks=2):
        assert counts[1:5] == [1, 1, 1, 1], counts


@pytest.mark.thorough
def test_a_process_that_is_killed_while_it_saves_and_one_that_ends(tmp_path: Path) -> None:
    program = """
import os, signal, sys, threading, time, torch
from meshcomm.parallel.checkpoint import async_save, save
from meshcomm.parallel.checkpoint.files import Root
save(sys.argv[1], torch.nn.Linear(4, 4), step=1)
if sys.argv[2] == "killed":
    Root.publish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
async_save(sys.argv[1], torch.nn.Linear(4, 4), step=2)
"""
    for how, steps in (("killed", [1]), ("ended", [1, 2])):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path / how), how], capture_output=True, text=True)
        assert (done.returncode == 0) is (how == "ended"), done.stderr
        assert Root(str(tmp_path / how)).steps() == steps
        save(tmp_path / how, linear(), step=9)  # and what was left goes
        assert len(os.listdir(tmp_path / how)) == len(steps) + 1
