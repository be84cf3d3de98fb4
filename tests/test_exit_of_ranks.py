"""Processes whose ranks are threads end cleanly, whatever these do then: C++ aborts when it calls Python in a thread and the
interpreter is gone. Each program runs in a fork of one interpreter that has imported torch and started no thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import meshcomm as mc
from meshcomm.runtime.transports.threads import rank_thread

ROOT = Path(__file__).parent.parent

HARNESS = """
import json, os, signal, sys, threading, time
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
import meshcomm as mc

class Slow:  # to end it lets others run, as whatever waits does
    def __del__(self): time.sleep(0.2)

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slow = Slow()
        return x * 1
    @staticmethod
    def backward(ctx, g): return g

class Fails(Kept):
    @staticmethod
    def backward(ctx, g): raise ValueError("in backward")

class Inner(Kept):
    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = g.detach().requires_grad_()
            return torch.autograd.grad((Kept.apply(x) + Fails.apply(x)).sum(), x)[0]

class Calls(TorchFunctionMode):
    def __torch_function__(self, fn, types, args=(), kwargs=None): return fn(*args, **(kwargs or {}))

class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, fn, types, args=(), kwargs=None): return fn(*args, **(kwargs or {}))

def failed(how):
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh), mc.check_vma():
        x = mc.pvary(torch.ones(3, requires_grad=True), "dp")
        loss = mc.all_reduce((Kept.apply(x) + how.apply(x)).sum(), "dp")
        del x
        try: loss.backward()
        except ValueError: pass

began = threading.Event()

def computes():
    began.set()
    x = y = torch.randn(300, 300)
    while True: y = torch.tanh(y @ x)

def differentiates():
    began.set()
    x = torch.ones(3, requires_grad=True)
    while True:
        y = x * 1
        y.register_hook(lambda g: g * 1)
        y.sum().backward()

def communicates():
    began.set()
    mesh, x = mc.make_mesh({"dp": 2}), torch.ones(3, requires_grad=True)
    while True:
        y = x * 1
        y.register_hook(lambda g: mc.all_reduce(g, "dp", mesh=mesh) / 2)
        y.sum().backward()

def goes_on():
    began.set()
    x = torch.randn(300, 300)
    while True:
        try: torch.tanh(x @ x)
        except BaseException: pass

def stop_twice():
    def kill():
        began.wait(60)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=kill, daemon=True).start()

def behind(body):
    threading.Thread(target=lambda: mc.launch(body, 2), daemon=True).start()
    began.wait(60)
    time.sleep(0.2)

codes = {}
for name, program in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        exec(program)
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(codes))
    sys.stdout.flush()
    os._exit(0)
"""

ENDS = {
    "what is left of a backward that failed": ("mc.launch(failed, 2, (Fails,))", 0),
    "of one inside of another": ("mc.launch(failed, 2, (Inner,))", 0),
    "a mode of functions that nobody has left": ("mc.launch(lambda: Calls().__enter__() and None, 2)", 0),
    "a mode of operations that nobody has left": ("mc.launch(lambda: Ops().__enter__() and None, 2)", 0),
    "hooks that nobody has left": (
        "mc.launch(lambda: torch.autograd.graph.saved_tensors_hooks(Slow, id).__enter__(), 2)",
        0,
    ),
    "Ctrl-C twice, in operations": ("stop_twice(); mc.launch(computes, 2)", -2),
    "Ctrl-C twice, in backward": ("stop_twice(); mc.launch(differentiates, 2)", -2),
    "Ctrl-C twice, and it goes on": ("stop_twice(); mc.launch(goes_on, 2)", 1),
    "a launch behind, in operations": ("behind(computes)", 0),
    "a launch behind, in backward": ("behind(differentiates); sys.exit(3)", 3),
    "a launch behind, in a collective in backward": ("behind(communicates); sys.exit(3)", 3),
    "a launch behind that goes on": ("behind(goes_on)", 1),
}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, int], str]:
    """The exit code of each program, and what all of them have said."""
    programs = json.dumps({name: program for name, (program, _) in ENDS.items()})
    run = subprocess.run(
        [sys.executable, "-c", HARNESS, programs], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    codes: dict[str, int] = json.loads(run.stdout)
    return codes, run.stderr


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends(found: tuple[dict[str, int], str], name: str) -> None:
    codes, said = found
    assert codes[name] == ENDS[name][1], said
    assert "terminate called" not in said


def test_ctrl_c_again_ends_a_rank_that_comes_to_no_collective() -> None:
    """And the next launch finds nothing of it."""
    program = "\n".join(
        [
            'HARNESS = HARNESS.split("codes = {}")[0]',
            "exec(HARNESS)",
            "stop_twice()",
            "try: mc.launch(computes, 2)",
            "except KeyboardInterrupt: print([each.name for each in threading.enumerate() if 'rank' in each.name])",
            "print(mc.launch(lambda: mc.make_mesh({'dp': 2}).rank, 2))",
        ]
    )
    run = subprocess.run(
        [sys.executable, "-c", f"HARNESS = {HARNESS!r}\n{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == "[]\n[0, 1]\n", run.stderr


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="elsewhere nobody can tell which threads there are")
def test_a_later_thread_that_has_the_number_of_a_rank_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives numbers again: each exit would have taken half a minute, and ended with code 1."""
    monkeypatch.setattr(rank_thread, "_returned", [])
    numbers = mc.launch(threading.get_native_id, 2)
    monkeypatch.setattr(rank_thread, "_TASKS", str(tmp_path))
    for number in numbers:
        (tmp_path / str(number)).mkdir()
    left = []
    for began in ("1", "9" * 12):  # in ticks
        for number in numbers:
            (tmp_path / str(number) / "stat").write_text(f"{number} (a) name) S {'0 ' * 18}{began} 0 0")
        left.append(len(rank_thread._ending()))
    assert left == [2, 0]
