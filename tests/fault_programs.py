"""Programs in which a rank fails, and who starts them: ranks that are forks of one interpreter that has imported torch.

Each rank ends as any script does: what it raises goes through the interpreter's own end. Two ways to run this file:

    python fault_programs.py                 cases as JSON on stdin, what came of each of them as a line of JSON on stdout
    python fault_programs.py CASE FOLDER     one rank that a launcher has started
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm import parallel
from meshcomm.runtime.start import rendezvous, world

Case = dict[str, Any]

AT_ONCE = 3
"""How many cases run at the same time: most of them wait."""


class GoneHomeError(Exception):
    """A function that returns."""


class Rank:
    """What a program knows of its own case."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case, self.rank, self.folder = case, rank, folder
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.is_victim = rank == case.get("victim") and not case.get("resumes") and attempt == case.get("attempt", 0)

    def note(self, name: str, **what: Any) -> None:
        """For the one who checks; whole, or not there."""
        draft = self.folder / f".{name}.{self.rank}"
        draft.write_text(json.dumps({"at": time.monotonic(), **what}))
        draft.rename(self.folder / f"{name}.{self.rank}")

    def fail(self) -> None:
        """The case's fault, if this rank is the one."""
        if not self.is_victim:
            return
        self.note("fault")
        fault = self.case["fault"]
        if fault == "raise":
            raise ValueError(f"boom on rank {self.rank}")
        if fault == "return":
            raise SystemExit(0)
        if fault == "go home":
            raise GoneHomeError
        if fault == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, fault))
        if fault == "SIGTERM":
            time.sleep(60)

    def join(self) -> mc.Mesh:
        """The mesh, after a first collective over it."""
        if "mesh timeout" in self.case:
            mesh = mc.make_mesh({"a": -1}, timeout=self.case["mesh timeout"])
        else:
            mc.init(timeout=self.case["timeout"])
            mesh = mc.make_mesh({"a": -1})
        assert mc.all_reduce(torch.ones(2), "a", mesh=mesh).tolist() == [mesh.size] * 2
        self.note("ready", pid=os.getpid())
        return mesh


# ------------------------------------------------------------------------------------------------------------- programs


def collective(here: Rank, form: str = "sync", moment: str = "before", length: int = 1000) -> list[float]:
    """The victim fails before, in or after a collective that all call."""
    mesh = here.join()
    x = torch.full((length,), mesh.rank + 1.0)
    total = mesh.size * (mesh.size + 1) / 2
    if form == "never":  # the others have read what this rank gave to the first collective
        for rank in range(mesh.size):
            wait_for(here.folder / f"ready.{rank}")
    if moment == "before":
        here.fail()
    if moment == "in" and here.is_victim:
        begun = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        here.fail()
        return begun.wait()[:1].tolist()
    if form == "sync":
        found = mc.all_reduce(x, "a", mesh=mesh)
    else:
        works = [mc.all_reduce(x, "a", mesh=mesh, async_op=True) for _ in range(2)]
        if form == "never":
            here.works = works  # type: ignore[attr-defined]
            return []
        time.sleep(0.2)
        found = mc.wait(works)[1]
    assert found.unique().tolist() == [total]
    if moment == "after":
        here.fail()
        mc.all_reduce(x, "a", mesh=mesh)
    return found[:1].tolist()


def backward(here: Rank, moment: str = "before") -> list[float]:
    """The victim fails between forward and backward, or in the middle of a backward pass with two collectives."""
    mesh = here.join()
    x = torch.ones(3, requires_grad=True)
    y = mc.all_gather(mc.all_gather(x, "a", mesh=mesh) * 2, "a", mesh=mesh)
    if moment == "before":
        here.fail()
    if moment == "in":
        y.register_hook(lambda _: here.fail())
    y.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def anything(here: Rank, name: str = "shift") -> list[float]:
    """Other collectives than the first."""
    mesh = here.join()
    x = torch.ones(mesh.size)
    here.fail()
    calls: dict[str, Callable[[], Tensor]] = {
        "shift": lambda: mc.shift(x, "a", mesh=mesh),
        "recv": lambda: mc.recv("a", here.case["victim"], shape=(3,), dtype=torch.float32, mesh=mesh),
        "all_to_all": lambda: mc.all_to_all(x, "a", 0, 0, mesh=mesh),
        "barrier": lambda: mc.barrier("a", mesh=mesh) or x,
        "object": lambda: mc.all_gather_object(3, "a", mesh=mesh) and x,
    }
    return calls[name]().tolist()


def loop(here: Rank, seconds: float = 60, length: int = 300_000) -> list[float]:
    """Large collectives without a pause, into the middle of which signals come from outside."""
    mesh = here.join()
    x = torch.arange(length, dtype=torch.float64)
    end, count = time.monotonic() + seconds, 0
    while True:
        count += 1
        stop = mc.all_reduce(torch.tensor(float(time.monotonic() > end)), "a", "max", mesh=mesh)
        y, work = mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x[:1000], "a", mesh=mesh, async_op=True)
        assert torch.equal(y, mesh.size * x)
        assert torch.equal(work.wait(), x[:1000].repeat(mesh.size))
        if stop.item():
            return [count]


def latecomer(here: Rank) -> list[float]:
    """Rank 0 comes when the victim has raised and the other one, which waited for it, has ended of that."""
    mesh = here.join()
    if mesh.rank == 0:
        pid = json.loads(wait_for(here.folder / "ready.1"))["pid"]
        wait_for(here.folder / "error.1")
        while (
            os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        ):
            time.sleep(0.01)
    here.fail()
    return mc.all_reduce(torch.ones(2), "a", mesh=mesh).tolist()


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


class Net(nn.Module):
    """Three layers; the hook is called in the middle of each backward pass."""

    def __init__(self, hook: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if x.requires_grad:
            x.register_hook(lambda _: self.hook() and None)
        return torch.dropout(self.last(x), 0.3, True)


def batch(step: int) -> Tensor:
    """Of this rank, which is in the random state: a resumed run must have restored it."""
    return torch.randn(5, 6) + step


def train(here: Rank, how: str = "fsdp", moment: str = "", folder: str = "run") -> list[float]:
    """Four steps with a checkpoint after each; the victim fails in the second one."""
    checkpoint = importlib.import_module("meshcomm.parallel.checkpoint")
    at, steps = 2, 4
    mesh = here.join()
    now = [0]

    def fail(what: str) -> None:
        if now[0] == at and moment == what:
            here.fail()

    net = Net(lambda: fail("backward"))
    if how == "fsdp":
        parallel.fully_shard(net, "a", grads="mean", units=["first", "second"], mesh=mesh)
    else:
        parallel.data_parallel(net, "a", grads="mean", mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    torch.manual_seed(100 + mesh.rank)
    run = str(Path(here.case.get("base", here.folder), folder))
    first = 0
    if checkpoint.latest(run, "a", mesh=mesh) is not None:
        first = checkpoint.load(run, net, optimizer, mesh=mesh).step or 0
    here.note("began", first=first)
    for step in range(first, steps):
        now[0] = step + 1
        fail("forward")
        loss = net(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for function in ("fsync", "rename", "mkdir"):
            if now[0] == at and moment == function and here.is_victim:
                _fail_in(here, function)
        with _short_of_disk(now[0] == at and moment == "full" and here.is_victim):
            try:
                checkpoint.save(run, net, optimizer, step=now[0], mesh=mesh)
            except mc.MeshError as error:
                here.note("refused", text=str(error))
    whole = parallel.full_state_dict(net, mesh=mesh) if how == "fsdp" else net.state_dict()
    if mesh.rank:
        return []
    return [value for x in whole.values() for value in x.flatten().tolist()]


def _fail_in(here: Rank, function: str, module: Any = os) -> None:
    call = getattr(module, function)

    def fails(*args: Any, **kwargs: Any) -> Any:
        setattr(module, function, call)
        here.fail()
        return call(*args, **kwargs)

    setattr(module, function, fails)


@contextlib.contextmanager
def _short_of_disk(really: bool) -> Any:
    if not really:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def begin(here: Rank, moment: str = "never") -> list[float]:
    """The victim fails before or in the meeting of the ranks."""
    if moment == "before":
        here.fail()
    elif moment != "never" and here.is_victim:
        module, name = {"go": (rendezvous, "_await"), "group": (world, "_make_group"), "ready": (rendezvous, "agreed")}[
            moment
        ]
        _fail_in(here, name, module)
    mesh = here.join()
    return mc.all_reduce(torch.ones(1), "a", mesh=mesh).tolist()


PROGRAMS: dict[str, Callable[..., list[float]]] = {
    each.__name__: each for each in (collective, backward, anything, loop, latecomer, train, begin)
}


def perform(here: Rank) -> None:
    """The program of the case; what it raises is written down on the way."""
    begun = time.monotonic()
    try:
        value = PROGRAMS[here.case["program"]](here, **here.case.get("args", {}))
    except BaseException as error:
        here.note("error", kind=type(error).__name__, text=str(error), seconds=time.monotonic() - begun)
        raise
    here.note("value", value=value, seconds=time.monotonic() - begun)


# --------------------------------------------------------------------------------------------------------------- driver


def launched(case: Case, folder: str) -> list[float]:
    """The same on a rank of ``mc.launch``."""
    here = Rank(case, mc.rank(), Path(folder))
    try:
        return PROGRAMS[case["program"]](here, **case["args"])
    except GoneHomeError:
        return []


def free_port() -> int:
    """Nobody's now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class Running:
    """A case whose ranks have been started; in the children ``rank`` is not None."""

    def __init__(self, case: Case) -> None:
        self.case, self.folder = case, Path(tempfile.mkdtemp(prefix="faults-", dir=Path.cwd()))
        self.began = time.monotonic()
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.hung: list[int] = []
        self.signals = [list(each) for each in case.get("signals", [])]
        self.pids: dict[int, int] = {}
        self.rank: int | None = None
        size = case.get("ranks", 3)
        port = case.get("port") or free_port()
        os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for rank in [each for each in range(size) if each not in case.get("absent", [])]:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, next(iter(self.pids.values()), 0))
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(self.folder / f"{name}.{rank}", os.O_CREAT | os.O_WRONLY), number)
                os.environ.update(case.get("env", {}), RANK=str(rank))
                self.rank = rank
                return
            self.pids[rank] = pid
            with contextlib.suppress(OSError):  # the child does it too: whoever is first
                os.setpgid(pid, next(iter(self.pids.values())))


def main() -> tuple[Rank, bool] | None:
    """The driver's life; in each of its children what that one shall do."""
    waiting: list[Case] = json.loads(sys.stdin.readline())
    running: list[Running] = []
    gc.freeze()  # or each child goes through all that was imported when it ends
    while waiting or running:
        ready = [case for case in waiting if case.get("after") not in pending(waiting, running)]
        while ready and len(running) < AT_ONCE:
            waiting.remove(case := ready.pop(0))
            if case["program"] == "train":
                importlib.import_module("meshcomm.parallel.checkpoint")
                importlib.import_module("torch._dynamo")  # by the first step of an optimizer, in each rank
                gc.freeze()
            new = Running(case)
            if new.rank is not None:
                return Rank(new.case, new.rank, new.folder), True
            running.append(new)
        for each in list(running):
            if step(each):
                running.remove(each)
                sys.stdout.write(json.dumps(outcome(each)) + "\n")
                sys.stdout.flush()
        time.sleep(0.01)
    return None


def pending(waiting: list[Case], running: list[Running]) -> set[str]:
    """The names of the cases that are not over."""
    return {case["name"] for case in waiting} | {each.case["name"] for each in running}


def step(each: Running) -> bool:
    """Reap, send what is due, end what takes too long; whether all ranks have ended."""
    now = time.monotonic()
    for rank, pid in each.pids.items():
        if rank in each.codes:
            continue
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            each.codes[rank], each.ended[rank] = os.waitstatus_to_exitcode(status), now
    ready = [path.stat().st_mtime for path in each.folder.glob("ready.*")]
    if each.signals and (len(ready) == len(each.pids) or each.signals[0][2] < 0):
        # Each: the rank, the signal, and so many seconds after all were ready.
        wall = time.time()
        while each.signals and wall - max(ready, default=wall) >= each.signals[0][2]:
            rank, number, _ = each.signals.pop(0)
            if rank not in each.codes:
                Rank(each.case, rank, each.folder).note("fault" if number != "SIGCONT" else "continued")
                os.kill(each.pids[rank], getattr(signal, number))
    fault = each.folder / f"fault.{each.case.get('victim')}"
    after = each.case.get("continue_after")
    if after is not None and fault.exists() and now - json.loads(fault.read_text())["at"] > after:
        each.case["continue_after"] = None
        os.kill(each.pids[each.case["victim"]], signal.SIGCONT)
    if (
        each.case.get("continue_last")
        and len(each.codes) == len(each.pids) - 1
        and each.case["victim"] not in each.codes
    ):
        os.kill(each.pids[each.case["victim"]], signal.SIGCONT)
    if now - each.began > each.case.get("limit", 40):
        for rank, pid in each.pids.items():
            if rank not in each.codes:
                each.hung.append(rank)
                os.kill(pid, signal.SIGKILL)
                each.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                each.ended[rank] = now
    return len(each.codes) == len(each.pids)


def outcome(each: Running) -> dict[str, Any]:
    """What came of it: exit codes, what each rank has noted, what it printed, who is left."""
    orphans = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(next(iter(each.pids.values())), signal.SIGKILL)
        orphans = True
    notes: dict[str, dict[str, Any]] = {}
    for path in each.folder.iterdir():
        name, _, rank = path.name.partition(".")
        if name and rank.isdigit():
            text = path.read_text()
            notes.setdefault(name, {})[rank] = text if name in ("out", "err") else json.loads(text)
    fault = [note["at"] for note in notes.get("fault", {}).values()]
    since = min(fault) if fault else each.began
    return {
        "name": each.case["name"], "codes": each.codes, "hung": each.hung, "orphans": orphans, "folder": str(each.folder),
        "after": {rank: round(at - since, 2) for rank, at in each.ended.items()},
        "errors": {rank: {**note, "after": round(note["at"] - since, 2)} for rank, note in notes.get("error", {}).items()},
        **{name: notes.get(name, {}) for name in ("value", "out", "err", "began", "refused", "ready")},
    }  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        perform(Rank(json.loads(sys.argv[1]), int(os.environ["RANK"]), Path(sys.argv[2])))
    else:
        found = main()
        if found is not None:
            perform(found[0])
