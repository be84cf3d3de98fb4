"""The threads of ranks of one process: kept from one run to the next, and nobody can tell."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import decimal
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm.runtime.transports.threads import carriers

RANKS = 4
KEPT = sys.version_info < (3, 13)
"""Later ones do not show what they keep for a thread."""
THREADS = threading.local()
PRIVATE = weakref.WeakKeyDictionary[threading.Thread, str]()
LEFT: list[Any] = []
OF_CONTEXT = contextvars.ContextVar("OF_CONTEXT", default=-1)
x = torch.ones(RANKS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch's, without which no thread is kept; and none is there of another test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    carriers.end_kept()
    yield
    carriers.end_kept()
    LEFT.clear()
    PRIVATE.clear()
    torch.set_num_threads(before)


def run(body: Callable[[], object] = lambda: None) -> list[int]:
    """The numbers that the system has for the threads of a run."""

    def on_rank() -> int:
        body()
        return threading.get_native_id()

    return mc.launch(on_rank, ranks=RANKS)


def test_threads_are_kept() -> None:
    first = run()
    assert (run() == first) == KEPT
    assert mc.launch(threading.get_native_id, ranks=2) != first[:2]
    assert [thread for thread in threading.enumerate() if thread.name.startswith("meshcomm rank")] == []


def test_shard_map_and_launch_have_the_same_ones() -> None:
    mesh, found = mc.make_mesh({"a": RANKS}), []

    def body(x: Tensor) -> Tensor:
        found.append(threading.get_native_id())
        return x * 2

    twice = mc.shard_map(body, mesh=mesh, in_specs="(a b)", out_specs="(a b)")
    assert torch.equal(twice(x), 2 * x)
    first, found[:] = list(found), []
    assert torch.equal(twice(x + 1), 2 * x + 2)
    assert (found == first) == KEPT
    assert (run() == found) == KEPT


def test_derivatives_are_numbered_as_on_new_threads() -> None:
    """Numbers of nodes say in which order backward goes through a graph: of a launch they may meet the caller's."""
    mesh, found = mc.make_mesh({"a": RANKS}), []

    def body(x: Tensor) -> Tensor:
        found.append(threading.get_native_id())
        return x * x

    square = mc.shard_map(body, mesh=mesh, in_specs="(a b)", out_specs="(a b)")
    square(x.clone().requires_grad_())
    first, found[:] = list(found), []
    square(x.clone().requires_grad_())
    assert (found == first) == KEPT

    def number() -> int:
        y = x.clone().requires_grad_() * 2
        return int(y.grad_fn._sequence_nr())  # type: ignore[union-attr]

    fresh = mc.launch(number, ranks=RANKS)
    assert fresh == mc.launch(number, ranks=RANKS)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def enter(context: Any) -> Callable[[], object]:
    """Which is never left, and which nobody takes away."""

    def body() -> None:
        made = context()
        LEFT.append(made)
        made.__enter__()

    return body


def lower_priority() -> None:
    os.nice(1)


LEAVES: dict[str, Callable[[], object]] = {
    "inference mode": enter(torch.inference_mode),
    "autocast": enter(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "a dtype of autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "no cache of autocast": lambda: torch.set_autocast_cache_enabled(False),
    "a function mode": enter(FunctionMode),
    "a dispatch mode": enter(DispatchMode),
    "no torch functions": enter(torch._C.DisableTorchFunction),
    "hooks on what is saved": enter(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    "no hooks on what is saved": enter(lambda: torch.autograd.graph.disable_saved_tensors_hooks("no")),
    "no tangents": lambda: torch._C._set_fwd_grad_enabled(False),
    "tiny numbers": lambda: torch.set_flush_denormal(True),
    "a signal's mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
    "another kind": lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
    "a priority": lower_priority,
    "a trace": lambda: sys.settrace(lambda *_: None),
    "a profiler": lambda: sys.setprofile(lambda *_: None),
    "hooks on generators": lambda: sys.set_asyncgen_hooks(firstiter=lambda _: None),
    "origins of coroutines": lambda: sys.set_coroutine_origin_tracking_depth(2),
    "the thread": lambda: LEFT.append(threading.current_thread()),
    "an attribute of the thread": lambda: setattr(threading.current_thread(), "mine", 1),
    "the name of the thread": lambda: setattr(threading.current_thread(), "name", "mine"),
    "a key": lambda: PRIVATE.setdefault(threading.current_thread(), "mine"),
}
if len(os.sched_getaffinity(0)) > 1:
    LEAVES["a core"] = lambda: os.sched_setaffinity(0, range(os.cpu_count() or 1))


@pytest.mark.parametrize("what", LEAVES)
def test_a_thread_that_is_not_as_new_ends(what: str) -> None:
    first = run()

    def leaves() -> None:
        if threading.current_thread().name.endswith("2"):
            LEAVES[what]()

    assert (run(leaves) == first) == KEPT
    assert not set(run()) & set(first)
    for left in LEFT:
        assert not isinstance(left, threading.Thread) or not left.is_alive()


def of_the_thread() -> dict[str, Any]:
    """What is forgotten without ending the thread, as it is found; then it is changed."""
    found = {
        "a value": getattr(THREADS, "value", "nothing"),
        "grad": torch.is_grad_enabled(),
        "precision": decimal.getcontext().prec,
        "device": torch.get_default_device(),
        "sets a loop": True,
    }
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        found["sets a loop"] = False
    THREADS.value = "mine"
    decimal.setcontext(decimal.Context(prec=3))
    torch.set_grad_enabled(False)
    with torch.device("meta"):
        pass
    return found


def test_what_python_keeps_is_dropped_and_the_thread_stays() -> None:
    found: list[Any] = []
    first = run(lambda: found.append(of_the_thread()))
    assert (run(lambda: found.append(of_the_thread())) == first) == KEPT
    assert found == [found[0]] * 8
    assert (found[0]["a value"], found[0]["grad"]) == ("nothing", True)


def drawn() -> tuple[float, ...]:
    """Of all kinds of numbers, between which other ranks draw theirs."""
    mesh = mc.make_mesh({"a": RANKS})
    found = [torch.rand(()).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)]
    mc.barrier("a", mesh=mesh)
    return *found, torch.randn(()).item(), float(np.random.normal()), random.random(), random.gauss(0, 1)


def test_random_numbers_are_those_of_new_threads() -> None:
    torch.manual_seed(5)
    new = mc.launch(drawn, ranks=RANKS)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert mc.launch(drawn, ranks=RANKS) == new
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    torch.manual_seed(6)
    assert not set(mc.launch(drawn, ranks=RANKS)) & set(new)


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
        OF_CONTEXT.get(),
    )


CALLERS: dict[str, Callable[[], Any]] = {
    "as it is": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "meta": lambda: torch.device("meta"),
}


def test_modes_are_those_of_the_caller_of_each_run() -> None:
    for _ in range(2):
        for number, (what, context) in enumerate(CALLERS.items()):
            token = OF_CONTEXT.set(number)
            with context():
                assert mc.launch(modes, ranks=RANKS) == [modes()] * RANKS, what
            OF_CONTEXT.reset(token)
    first = run()
    assert (run() == first) == KEPT


def test_an_event_loop_ends_with_its_rank() -> None:
    """Python up to 3.11 remembers the loop of a thread beside what the thread keeps."""

    async def nothing() -> bool:
        return asyncio.get_running_loop().is_running()

    for _ in range(3):
        assert mc.launch(lambda: asyncio.run(nothing()), ranks=RANKS) == [True] * RANKS

    def outside() -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return "no loop"

    assert mc.launch(outside, ranks=RANKS) == ["no loop"] * RANKS


GONE: list[int] = []


class Dropped:
    def __del__(self) -> None:
        GONE.append(threading.get_native_id())


def test_values_of_a_rank_end_with_it() -> None:
    """Before the run is over, on the rank's own thread."""

    def body() -> None:
        THREADS.thing = Dropped()

    GONE.clear()
    first = run(body)
    assert sorted(GONE) == sorted(first)


def test_nothing_of_a_run_is_held() -> None:
    class Thing:
        pass

    thing = Thing()
    seen = weakref.ref(thing)
    run(lambda held=thing: None)  # type: ignore[misc]
    del thing
    gc.collect()
    assert seen() is None


SETTINGS: dict[str, Callable[[], Callable[[], object]]] = {
    "torch's threads": lambda: (torch.set_num_threads(2), lambda: torch.set_num_threads(1))[1],
    "tiny numbers": lambda: (torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False))[1],
    "size of stacks": lambda: (threading.stack_size(1 << 20), lambda: threading.stack_size(0))[1],
    "a tracer": lambda: (threading.settrace(lambda *_: None), lambda: threading.settrace(None))[1],  # type: ignore[arg-type]
    "a profiler": lambda: (threading.setprofile(lambda *_: None), lambda: threading.setprofile(None))[1],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_caller_with_other_settings_has_new_threads(what: str) -> None:
    first, put_back = run(), SETTINGS[what]()
    try:
        assert not set(run()) & set(first)
    finally:
        put_back()


def test_who_profiles_threads_sees_those_of_ranks_alone() -> None:
    """No trial is made meanwhile; a proof would take its threads for the program's."""
    carriers._trial.cache_clear()
    seen: set[str] = set()

    def begun(*_: Any) -> None:
        sys.setprofile(None)
        seen.add(threading.current_thread().name)

    threading.setprofile(begun)
    try:
        run()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert seen == {f"meshcomm rank {index}" for index in range(RANKS)}


def test_signals_are_masked_as_by_the_caller() -> None:
    """Of now; and a thread that waits for a run takes none, which would end the process."""
    found: list[set[int]] = []
    ask = lambda: found.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # noqa: E731
    first = run(ask)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        os.kill(os.getpid(), signal.SIGUSR1)  # for the threads that wait, were they to take it
        assert signal.sigtimedwait([signal.SIGUSR1], 10) is not None
        assert (run(ask) == first) == KEPT
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert found == [set()] * RANKS + [{signal.SIGUSR1}] * RANKS


def test_none_is_kept_after_an_error() -> None:
    first = run()

    def fails() -> None:
        if threading.current_thread().name.endswith("1"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fails)
    again = run()
    assert not set(again) & set(first)
    assert (run() == again) == KEPT


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_a_fork_finds_none_that_waits() -> None:
    before = threads_of_process()
    first = run()
    assert threads_of_process() == before + RANKS * KEPT
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if len(run()) == RANKS else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert threads_of_process() == before
    assert not set(run()) & set(first)


def test_a_program_ends_while_threads_wait() -> None:
    program = "import torch; torch.set_num_threads(1); import meshcomm as mc; print(mc.launch(lambda: 1, ranks=3))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 1, 1]\n", "")


def test_a_python_whose_threads_cannot_be_made_as_new_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "_trial", lambda: None)
    first = run()
    assert not set(run()) & set(first)


def test_two_runs_at_once_are_still_refused() -> None:
    run()
    with pytest.raises(mc.MeshError, match="launch"):
        mc.launch(lambda: threading.Thread(target=lambda: None) and _in_a_thread(run), ranks=2)


def _in_a_thread(call: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_what_ctypes_says_of_signals_is_what_python_says() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        mask = ctypes.create_string_buffer(carriers._mask())
        assert mask.raw[(signal.SIGUSR2 - 1) // 8] >> ((signal.SIGUSR2 - 1) % 8) & 1
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
