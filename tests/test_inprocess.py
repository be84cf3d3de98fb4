"""Ranks in one process: deterministic, each with its own random state, and quick to say who called what where."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import gc
import inspect
import io
import logging
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.transports.threads import meeting_link, meetings, numpy_state, random_state, scheduler, twister
from meshcomm.runtime.transports.threads.rank_thread import RankThread


def mesh_of(n: int) -> mc.Mesh:
    return mc.make_mesh({"a": n})


def line_of(mark: str) -> int:
    """The line of this file that ends in the comment ``# mark``."""
    lines, start = inspect.getsourcelines(inspect.getmodule(line_of))
    return next(i for i, line in enumerate(lines, max(start, 1)) if line.rstrip().endswith(f"# {mark}"))


# ---------------------------------------------------------------------------------------------------- deterministic


def training() -> list[float]:
    mesh = mc.make_mesh({"a": 2, "b": 4})
    torch.manual_seed(mesh.coordinate["a"])
    w = torch.randn(8, 3, requires_grad=True)
    found = []
    for _ in range(3):
        x = torch.randn(5, 8) + float(np.random.rand()) + random.random()
        y = mc.all_reduce((x @ mc.pvary(w, "b", mesh=mesh)).tanh(), "b", mesh=mesh)
        loss = mc.all_reduce(mc.all_gather(y, "a", mesh=mesh).square().mean(), ("a", "b"), "mean", mesh=mesh)
        (g,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w -= 0.1 * g
        found += [loss.item(), *w.flatten().tolist()]
    return found


def test_two_runs_are_bitwise_equal() -> None:
    torch.manual_seed(11)
    assert mc.launch(training, ranks=8) == mc.launch(training, ranks=8)


def order_of_turns() -> list[tuple[int, int]]:
    mesh = mesh_of(4)
    for step in range(3):
        seen.append((step, mesh.rank))
        mc.barrier("a", mesh=mesh)
    return list(seen)


seen: list[tuple[int, int]] = []


def test_ranks_take_turns_in_the_same_order_every_time() -> None:
    runs = []
    for _ in range(3):
        seen.clear()
        mc.launch(order_of_turns, ranks=4)
        runs.append(list(seen))
    assert runs[0] == runs[1] == runs[2]
    assert [step for step, _ in runs[0]] == sorted([0, 1, 2] * 4)


def test_results_come_in_order_of_rank() -> None:
    assert mc.launch(lambda: mesh_of(64).rank, ranks=64) == list(range(64))


def sixty_four() -> tuple[float, list[float]]:
    mesh = mc.make_mesh({"a": 4, "b": 16})
    x = torch.tensor([float(mesh.rank)], requires_grad=True)
    y = mc.all_reduce(mc.all_gather(x * x, "b", mesh=mesh).sum(), ("b", "a"), mesh=mesh)
    y.backward()
    assert x.grad is not None
    return y.item(), x.grad.tolist()


def test_64_ranks() -> None:
    total = 16 * sum(rank * rank for rank in range(64))
    assert mc.launch(sixty_four, ranks=64) == [(total, [32.0 * rank]) for rank in range(64)]


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    mc.launch(sixty_four, ranks=64)
    with pytest.raises(ZeroDivisionError):
        mc.launch(raises_on_rank_2, ranks=4)
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


OF_A_THREAD, OF_A_CONTEXT = threading.local(), contextvars.ContextVar("OF_A_CONTEXT", default="nothing")


def what_threads_keep() -> dict[str, Any]:
    """What a thread has for itself, as it is found; then it is changed."""
    x = torch.ones(1, requires_grad=True)
    hooked: list[Tensor] = []
    (x * x).sum()
    found: dict[str, Any] = {
        "name": threading.current_thread().name,
        "local": getattr(OF_A_THREAD, "value", "nothing"),
        "context": OF_A_CONTEXT.get(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "device": torch.get_default_device(),
        "modes": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        "tiny": torch.tensor(1e-39).mul(1.0).item() > 0,
        "signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "kind": os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None,
        "trace": sys.gettrace() is None,
        "error": sys.exc_info(),
    }
    OF_A_THREAD.value = threading.current_thread().name = "mine"
    OF_A_CONTEXT.set("mine")
    torch.set_default_device("meta")
    torch.autograd.graph.saved_tensors_hooks(lambda x: hooked.append(x), lambda _: x).__enter__()
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    torch.inference_mode().__enter__()
    torch.set_flush_denormal(True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    mc.barrier("a", mesh=mesh_of(4))
    return found


def test_a_rank_finds_nothing_of_another_ranks_thread() -> None:
    """Of another launch's neither: each is a new one, which inherits of the caller's and of no rank's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        found = [each for _ in range(3) for each in mc.launch(what_threads_keep, ranks=4)]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert [each.pop("name") for each in found] == 3 * [f"meshcomm rank {index}" for index in range(4)]
    assert all(each == found[0] for each in found)
    assert (found[0]["local"], found[0]["context"], found[0]["grad"], found[0]["tiny"]) == (
        *2 * ("nothing",),
        True,
        True,
    )
    assert found[0]["signals"] == {signal.SIGUSR1}


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_system_that_starts_no_more_threads(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run end, the caller is told, and the next launch finds nothing of it."""
    start, before, ran = threading.Thread.start, set(threading.enumerate()), []
    left = [None] * started

    def limited(thread: threading.Thread) -> None:
        if isinstance(thread, RankThread):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            mc.launch(lambda: ran.append(1), ranks=4)
    assert not ran
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile
    assert mc.launch(sixty_four, ranks=64)


def test_threads_are_traced_as_others_are() -> None:
    """What a debugger asks of new threads is asked of ranks too."""
    seen: set[str] = set()

    def trace(*_: Any) -> None:
        seen.add(threading.current_thread().name)

    threading.settrace(trace)
    try:
        mc.launch(lambda: None, ranks=3)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert {f"meshcomm rank {index}" for index in range(3)} <= seen


# ---------------------------------------------------------------------------------------------- settings of the process


def settings() -> dict[str, Any]:
    kernels = torch.backends.cuda
    return {
        "warnings": warnings.filters[0], "all warnings": warnings.filters, "shown": warnings.showwarning,
        "stdout": id(getattr(sys, "stdout", None)), "stderr": sys.stderr, "dtype": torch.empty(0).dtype,
        "kernels": [kernels.flash_sdp_enabled(), kernels.math_sdp_enabled(), kernels.mem_efficient_sdp_enabled()],
        "order of kernels": _torch.attention_order(), "kernels of others": _torch.attention_of_others(),
    }  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def filtered(action: Any) -> Iterator[None]:
    with warnings.catch_warnings(record=action == "always"):
        warnings.simplefilter(action)
        yield


class Unlike(io.StringIO):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nobody is to ask")

    __hash__ = io.StringIO.__hash__


@contextlib.contextmanager
def without_stdout() -> Iterator[None]:
    before = sys.stdout
    del sys.stdout
    try:
        yield
    finally:
        sys.stdout = before


@contextlib.contextmanager
def captured() -> Iterator[None]:
    shown = warnings.showwarning
    logging.captureWarnings(True)
    try:
        assert warnings.showwarning is not shown
        yield
    finally:
        logging.captureWarnings(False)


SETTINGS: dict[str, Callable[[int], Any]] = {
    "filters": lambda rank: filtered(["ignore", "always", "error"][rank]),
    "filters alike": lambda rank: warnings.catch_warnings(),
    "captured by logging": lambda rank: captured(),
    "stdout": lambda rank: contextlib.redirect_stdout(io.StringIO()),
    "stderr": lambda rank: contextlib.redirect_stderr(io.StringIO()),
    "default dtype": lambda rank: default_dtype([torch.float64, torch.bfloat16, torch.float32][rank]),
    "stdout that is equal to none": lambda rank: contextlib.redirect_stdout(Unlike()),
    "no stdout": lambda rank: without_stdout(),
    "attention": lambda rank: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH][rank]),
    "attention of others": lambda rank: sdpa_kernel([SDPBackend.OVERRIDEABLE, SDPBackend.MATH][rank % 2]),
    "order of attention": lambda rank: sdpa_kernel([*SDPBackend.__members__.values()][1 + rank : 4], set_priority=True),
}


def within(name: str) -> None:
    mesh, found = mesh_of(3), settings()
    mc.barrier("a", mesh=mesh)
    with SETTINGS[name](mesh.rank):
        inside = settings()
        for _ in range(2):
            mc.barrier("a", mesh=mesh)
            assert settings() == inside
            assert warnings.filters is inside["all warnings"]
    assert settings() == found
    mc.barrier("a", mesh=mesh)
    assert settings() == found
    assert warnings.filters is found["all warnings"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_changes_settings_of_the_process_for_itself(name: str) -> None:
    before = settings()
    mc.launch(within, ranks=3, args=(name,))
    assert settings() == before
    assert warnings.filters is before["all warnings"]


def test_what_captures_warnings_for_good_in_a_rank_does_not_in_the_caller() -> None:
    for _ in range(2):
        mc.launch(lambda: logging.captureWarnings(True), ranks=3)
        with captured():
            pass


def fails_within(name: str) -> None:
    mesh = mesh_of(3)
    with SETTINGS[name](mesh.rank):
        mc.barrier("a", mesh=mesh)
        if mesh.rank == 1:
            raise ValueError("rank 1")
        mc.barrier("a", mesh=mesh)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_after_an_error_are_the_callers(name: str) -> None:
    before = settings()
    with pytest.raises(ValueError, match="rank 1"):
        mc.launch(fails_within, ranks=3, args=(name,))
    assert settings() == before


def leaves_changed(ends: bool) -> list[Any]:
    mesh, seen = mesh_of(3), [torch.get_default_dtype(), sys.stdout, torch.is_anomaly_enabled()]
    seen += [torch.rand(()).item(), forward_ad._current_level]
    if mesh.rank == 0:  # no other rank has begun
        torch.set_default_dtype(torch.float64)
        sys.stdout = io.StringIO()
        torch.set_anomaly_enabled(True)
        if not ends:
            with forward_ad.dual_level():
                mc.barrier("a", mesh=mesh)
                assert forward_ad._current_level == 0
            assert torch.get_default_dtype() is torch.float64
            assert torch.is_anomaly_enabled()
            assert sys.stdout is not seen[1]
    elif not ends:
        mc.barrier("a", mesh=mesh)
    return [*seen, torch.get_default_dtype(), torch.is_anomaly_enabled()]


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_who_begins_or_goes_on_finds_nothing_of_what_a_rank_leaves_changed(ends: bool) -> None:
    stdout, before = sys.stdout, settings()
    torch.manual_seed(2)
    found = mc.launch(leaves_changed, ranks=3, args=(ends,))
    assert [each[-2:] for each in found] == [[torch.float64, True], *[[torch.float32, False]] * 2]
    for dtype, shown, seeks, _, level, *_ in found:
        assert (dtype, seeks, level) == (torch.float32, False, -1)
        assert shown is stdout
    assert len({each[3] for each in found}) == 3
    assert sys.stdout is stdout
    assert settings() == before
    assert not torch.is_anomaly_enabled()
    assert forward_ad._current_level == -1


# ----------------------------------------------------------------------------------------------------- random states


def draws() -> dict[str, float]:
    mesh = mesh_of(4)
    found = {"torch": torch.rand(()).item(), "numpy": float(np.random.rand()), "random": random.random()}
    mc.barrier("a", mesh=mesh)  # others draw before this rank goes on
    return found | {"torch 2": torch.rand(()).item(), "numpy 2": float(np.random.rand()), "random 2": random.random()}


def test_every_rank_draws_its_own_numbers() -> None:
    found = mc.launch(draws, ranks=4)
    for name in found[0]:
        assert len({rank[name] for rank in found}) == 4, name


def test_random_numbers_follow_the_seed_and_the_rank() -> None:
    torch.manual_seed(3)
    first, again = (mc.launch(draws, ranks=4) for _ in range(2))
    assert first == again
    torch.manual_seed(4)
    other = mc.launch(draws, ranks=4)
    assert not {rank["torch"] for rank in first} & {rank["torch"] for rank in other}
    assert not {rank["numpy"] for rank in first} & {rank["numpy"] for rank in other}
    assert not {rank["random"] for rank in first} & {rank["random"] for rank in other}


def interleaved(meet: bool) -> list[float]:
    mesh = mesh_of(3)
    torch.manual_seed(mesh.rank)
    np.random.seed(mesh.rank)
    random.seed(mesh.rank)
    found = []
    for _ in range(4):
        found += [torch.rand(()).item(), float(np.random.rand()), random.random()]
        if meet:
            mc.barrier("a", mesh=mesh)
    return found


def test_a_change_over_does_not_disturb_a_ranks_random_numbers() -> None:
    assert mc.launch(interleaved, ranks=3, args=(True,)) == mc.launch(interleaved, ranks=3, args=(False,))


def draws_of_python(meet: bool) -> list[float]:
    mesh = mesh_of(3)
    found = []
    for count in (1, 2, 700, 1):  # normal numbers are made in pairs, words in batches of 624
        found += [random.gauss(0, 1), *(random.random() for _ in range(count)), random.getrandbits(70)]
        if meet:
            mc.barrier("a", mesh=mesh)
    random.seed(mesh.rank)
    mc.barrier("a", mesh=mesh)
    return [*found, random.gauss(0, 1)]


def draws_of_torch(meet: bool) -> list[float]:
    mesh = mesh_of(3)
    found = []
    for count in (1, 2, 700, 1):
        found += torch.empty(count).normal_().tolist() + torch.rand(count).tolist()  # one of a pair is kept
        found += [torch.empty(1, dtype=dtype).normal_().item() for dtype in (torch.float64, torch.float32)]
        if meet:
            mc.barrier("a", mesh=mesh)
    state = torch.get_rng_state()
    torch.manual_seed(mesh.rank)
    found += [*torch.randn(40).tolist(), torch.initial_seed()]
    if meet:
        mc.barrier("a", mesh=mesh)
    torch.set_rng_state(state)
    if meet:
        mc.barrier("a", mesh=mesh)
    return [*found, *torch.randn(3).tolist()]


def draws_of_numpy(meet: bool) -> list[float]:
    mesh = mesh_of(3)
    found = []
    for count in (1, 2, 700, 1):  # normal numbers are made in pairs: one of a pair is kept
        found += [*np.random.randn(count).tolist(), float(np.random.rand()), float(np.random.standard_t(3))]
        if meet:
            mc.barrier("a", mesh=mesh)
    state = np.random.get_state()
    np.random.seed(mesh.rank)
    found += [float(np.random.randn()), float(np.random.binomial(50, 0.4)), float(np.random.randint(2**31))]
    if meet:
        mc.barrier("a", mesh=mesh)
    found += [float(np.random.randn())]
    np.random.set_state(state)
    if meet:
        mc.barrier("a", mesh=mesh)
    return [*found, float(np.random.randn())]


@pytest.mark.parametrize("copied", [True, False])
def test_numpys_random_numbers_are_those_of_each_rank(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numpy_state.second_normal(np.random) is not None
    if not copied:
        monkeypatch.setattr(random_state, "_kept_by_numpy", None)
    expected = mc.launch(draws_of_numpy, ranks=3, args=(False,))
    for _ in range(2):
        assert mc.launch(draws_of_numpy, ranks=3, args=(True,)) == expected


@pytest.mark.parametrize("rand", [lambda: 0.5, np.random.RandomState(1).rand], ids=["function", "of another"])
def test_numpys_own_state_is_found_where_its_functions_were_replaced(
    rand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found once is written to for as long as the process lives."""
    monkeypatch.setattr(np.random, "rand", rand)
    found = numpy_state.second_normal.__wrapped__(np.random)
    np.random.seed(0)
    np.random.randn()
    assert found[0] == 1
    assert any(each is np.random.mtrand.rand.__self__ for each in gc.get_referents(found.obj.__dict__))
    np.random.randn()
    assert found[0] == 0


def test_a_numpy_that_keeps_its_second_normal_number_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_state, "_memory", lambda state, start: memoryview(bytearray(240))[start:])
    assert numpy_state.second_normal.__wrapped__(np.random) is None


@pytest.mark.parametrize("copied", [True, False])
def test_torchs_random_numbers_are_those_of_each_rank(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch, of_python = twister.memory()
    assert of_torch is not None
    torch.manual_seed(5)
    whole = mc.launch(draws_of_torch, ranks=3, args=(False,))
    if not copied:
        monkeypatch.setattr(twister, "memory", lambda: (None, of_python))
    torch.manual_seed(5)
    expected = [torch.empty(1).normal_().item(), *torch.rand(2).tolist(), *torch.empty(2).normal_().tolist()]
    torch.manual_seed(5)
    found = [torch.empty(1).normal_().item(), *torch.rand(2).tolist()]
    assert mc.launch(draws_of_torch, ranks=3, args=(True,)) == whole
    assert [*found, *torch.empty(2).normal_().tolist()] == expected
    assert len({tuple(each) for each in whole}) == 3


@pytest.mark.parametrize("copied", [True, False])
def test_pythons_random_numbers_are_those_of_each_rank(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch, of_python = twister.memory()
    assert of_python is not None or sys.implementation.name != "cpython"
    whole = mc.launch(draws_of_python, ranks=3, args=(False,))
    if not copied:
        monkeypatch.setattr(twister, "memory", lambda: (of_torch, None))
    random.seed(5)
    expected = [random.gauss(0, 1), random.random(), random.gauss(0, 1)]
    random.seed(5)
    found = [random.gauss(0, 1)]
    assert mc.launch(draws_of_python, ranks=3, args=(True,)) == whole
    assert [*found, random.random(), random.gauss(0, 1)] == expected
    assert len({tuple(each) for each in whole}) == 3


def test_a_python_that_keeps_random_numbers_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert twister._copies()
    cells = [bytearray(twister._SIZE) for _ in range(2)]
    monkeypatch.setattr(twister, "_cells", lambda _: memoryview(cells[0]))
    assert not twister._copies()
    monkeypatch.setattr(twister, "_SIZE", 2000)
    assert not twister._copies()


def in_a_new_process(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


FIRST_DRAW = """
import importlib.util, sys, torch, meshcomm as mc
def main():
    mesh, found = mc.make_mesh({"a": 3}), []
    if mesh.rank == 0:
        importlib.util.find_spec("numpy.random")  # which loads nothing
    mc.barrier("a", mesh=mesh)
    for asks in (1, 0, 2):  # rank 1 is the first to ask for random numbers of numpy
        if mesh.rank == asks:
            from numpy.random import rand
            found += rand(700).tolist()[-2:]
        mc.barrier("a", mesh=mesh)
    with mc.fork_rng("a", mesh=mesh, seed=1):
        return found, __import__("numpy").random.randn(3).tolist()
LOADED
torch.manual_seed(3)
found = mc.launch(main, ranks=3)
import numpy as np
own, again = np.random.get_bit_generator(), mc.launch(main, ranks=3)
assert own is np.random.get_bit_generator() and found == again
assert not [each for each in sys.meta_path if "meshcomm.runtime" in type(each).__module__]
seeds = {repr(own.seed_seq.entropy)} | {rank[0][0] for rank in found}
assert len(seeds) == 4
print(found)
"""


@pytest.mark.thorough
def test_numpy_is_asked_for_random_numbers_by_a_rank_first() -> None:
    """As where it had been asked before the launch; the caller keeps what numpy began with."""
    late, early = (in_a_new_process(FIRST_DRAW.replace("LOADED", line)) for line in ("", "import numpy.random"))
    assert late == early
    assert len({tuple(rank[1]) for rank in late}) == 3


FORKED_FIRST = """
import torch, meshcomm as mc
def main():
    mesh = mc.make_mesh({"a": 2})
    LOADED
    with mc.fork_rng("a", mesh=mesh, seed=1):
        inside = __import__("numpy").random.rand(2).tolist()
    return inside, __import__("numpy").random.rand(2).tolist()
torch.manual_seed(3)
print(mc.launch(main, ranks=2))
"""


@pytest.mark.thorough
def test_numpy_is_asked_for_random_numbers_under_fork_rng_first() -> None:
    late, early = (in_a_new_process(FORKED_FIRST.replace("LOADED", line)) for line in ("", "import numpy.random"))
    assert late == early


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_numpys_generators_are_those_of_their_seed(seed: int) -> None:
    fast, plain = numpy_state.seeded(np.random, seed), np.random.MT19937(seed)
    again = pickle.loads(pickle.dumps(fast))
    assert numpy_state._fast(np.random) is not None
    assert fast.random_raw(1500).tolist() == plain.random_raw(1500).tolist() == again.random_raw(1500).tolist()
    assert type(again.seed_seq) is np.random.SeedSequence
    assert again.seed_seq.entropy == seed
    assert fast.seed_seq.generate_state(624).tolist() == plain.seed_seq.generate_state(624).tolist()
    assert fast.spawn(2)[1].random_raw() == plain.spawn(2)[1].random_raw()


def test_a_numpy_that_seeds_in_another_way_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = numpy_state._constants()
    monkeypatch.setattr(numpy_state, "_constants", lambda: [constants[0], constants[1] + 2])
    assert numpy_state._fast.__wrapped__(np.random) is None


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_callers_random_states_are_as_they_were(fails: bool) -> None:
    def now() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    expected = now()
    seed()
    with contextlib.suppress(ZeroDivisionError):
        mc.launch(raises_on_rank_2 if fails else draws, ranks=4)
    assert now() == expected


def dropout_masks() -> Tensor:
    mesh = mesh_of(4)
    return mc.all_gather(torch.nn.functional.dropout(torch.ones(1, 64)), "a", mesh=mesh)


def test_dropout_differs_between_ranks() -> None:
    masks = mc.launch(dropout_masks, ranks=4)[0]
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


# -------------------------------------------------------------------------------------------------------- mismatches


def call_op(x: Tensor, mesh: mc.Mesh) -> None:
    if mesh.rank == 2:
        mc.all_gather(x, "a", mesh=mesh)  # op, rank 2
    else:
        mc.all_reduce(x, "a", mesh=mesh)  # op, others


def call_shape(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_reduce(x[: 1 if mesh.rank == 1 else 4], "a", mesh=mesh)


def call_dtype(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_reduce(x.int() if mesh.rank == 3 else x, "a", mesh=mesh)


def call_reduce_op(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_reduce(x, "a", "max" if mesh.rank == 0 else "min", mesh=mesh)


def call_mean(x: Tensor, mesh: mc.Mesh) -> None:
    mc.reduce_scatter(x, "a", op="mean" if mesh.rank == 0 else "sum", mesh=mesh)


def call_dim(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_gather(x.view(2, 2), "a", dim=mesh.rank // 2, mesh=mesh)


def call_split(x: Tensor, mesh: mc.Mesh) -> None:
    send = [1, 1, 1, 1] if mesh.rank != 1 else [1, 1, 0, 2]
    mc.all_to_all(x, "a", 0, 0, send_sizes=send, recv_sizes=[1, 1, 1, 1], mesh=mesh)


def call_src(x: Tensor, mesh: mc.Mesh) -> None:
    mc.broadcast(x, "a", src=mesh.rank // 2, mesh=mesh)


def call_perm(x: Tensor, mesh: mc.Mesh) -> None:
    mc.permute(x, "a", [(0, 1)] if mesh.rank else [(1, 0)], mesh=mesh)


def call_offset(x: Tensor, mesh: mc.Mesh) -> None:
    mc.shift(x, "a", 1 if mesh.rank else 2, mesh=mesh)


def call_sizes(x: Tensor, mesh: mc.Mesh) -> None:
    mc.reduce_scatter(x, "a", sizes=[1, 1, 1, 1] if mesh.rank else [1, 2, 1, 0], mesh=mesh)


def call_gradient(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_reduce(x.clone().requires_grad_(mesh.rank == 1), "a", mesh=mesh)


def call_tree(x: Tensor, mesh: mc.Mesh) -> None:
    mc.all_reduce([x, x] if mesh.rank == 3 else [x], "a", mesh=mesh)


def call_dst(x: Tensor, mesh: mc.Mesh) -> None:
    mc.reduce(x, "a", dst=mesh.rank % 2, mesh=mesh)


def call_barrier(x: Tensor, mesh: mc.Mesh) -> None:
    if mesh.rank:
        mc.barrier("a", mesh=mesh)
    else:
        mc.gather(x, "a", mesh=mesh)


MISMATCHES: dict[str, tuple[Callable[[Tensor, mc.Mesh], None], list[str]]] = {
    "op": (
        call_op,
        [
            r"ranks 0, 1 called all_reduce f32\[4\] \(op='sum'\) over 'a' at test_inprocess.py:{op, others}",
            r"rank 2 called all_gather f32\[4\] \(dim=0\) over 'a' at test_inprocess.py:{op, rank 2}",
        ],
    ),
    "shape": (call_shape, [r"rank 0 called all_reduce f32\[4\] \(op='sum'\)", r"rank 1 called .* f32\[1\]"]),
    "dtype": (call_dtype, [r"ranks 0, 1, 2 called \w+ f32\[4\]", r"rank 3 called \w+ i32\[4\]"]),
    "reduce op": (call_reduce_op, [r"rank 0 called all_reduce .*\(op='max'\)", r"rank 1 called all_reduce .*\(op='min'\)"]),
    "mean or sum": (call_mean, [r"reduce_scatter f32\[4\] \(dim=0, op='mean'\)", r"reduce_scatter f32\[4\] \(dim=0, op='sum'\)"]),
    "dim": (call_dim, [r"ranks 0, 1 called all_gather .*\(dim=0\)", r"rank 2 called all_gather .*\(dim=1\)"]),
    "split": (call_split, [r"index 1 sends 0 elements to index 2, which expects 1", r"rank.* called all_to_all"]),
    "src": (call_src, [r"broadcast f32\[4\] \(src=0\)", r"broadcast f32\[4\] \(src=1\)"]),
    "perm": (call_perm, [r"permute f32\[4\] \(perm=\(\(1, 0\),\)\)", r"permute f32\[4\] \(perm=\(\(0, 1\),\)\)"]),
    "offset": (call_offset, [r"rank 0 called shift .*\(offset=2, wrap=True\)", r"rank 1 called shift .*\(offset=1, wrap=True\)"]),
    "sizes": (call_sizes, [r"sizes=\(1, 2, 1, 0\)", r"sizes=\(1, 1, 1, 1\)"]),
    "needs a gradient": (
        call_gradient,
        [r"rank 0 called all_reduce f32\[4\] \(op='sum'\) over", r"rank 1 called .* that needs a gradient over 'a'"],
    ),
    "leaves of a tree": (call_tree, [r"ranks 0, 1, 2 called \w+ x\[0\] f32\[4\] .*over", r"rank 3 called \w+ x\[0\] f32\[4\], x\[1\] f32\[4\]"]),
    "dst": (call_dst, [r"reduce .*\(op='sum', dst=0\)", r"reduce .*\(op='sum', dst=1\)"]),
    "barrier": (call_barrier, [r"rank 0 called gather f32\[4\] \(dst=0, dim=0\)", r"rank 1 called barrier over"]),
}  # fmt: skip


def mismatched(kind: str) -> None:
    MISMATCHES[kind][0](torch.ones(4), mesh_of(4))


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_names_ranks_and_calls(kind: str) -> None:
    with pytest.raises(mc.CommError, match=r"ranks of one axis made different calls") as caught:
        mc.launch(mismatched, ranks=4, args=(kind,))
    for pattern in MISMATCHES[kind][1]:
        for mark in re.findall(r"\{(.*?)\}", pattern):
            if "," in mark:
                pattern = pattern.replace(f"{{{mark}}}", str(line_of(mark)))
        assert re.search(pattern, str(caught.value)), f"{pattern} not in:\n{caught.value}"


def other_calls_from_one_line(rounds: int) -> list[float]:
    """As many shapes as there are rounds, each three times in a row, from a line that is one for all of them."""
    mesh, found = mesh_of(4), []
    for i in range(3 * rounds):
        found.append(mc.all_reduce(torch.full((i // 3 + 1,), float(mesh.rank)), "a", mesh=mesh).sum().item())
    return found


@pytest.mark.parametrize("kept", [64, 2])
def test_calls_are_known_again_by_their_line(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_link, "_KEPT", kept)
    monkeypatch.setattr(meetings, "_KEPT", kept)
    expected = [6.0 * (i // 3 + 1) for i in range(15)]
    assert mc.launch(other_calls_from_one_line, ranks=4, args=(5,)) == [expected] * 4


def differs_in_the_end(how: str) -> None:
    """From one line the ranks make a call three times, and then one of them makes another one."""
    mesh = mesh_of(4)
    for i in range(4):
        other = i == 3 and mesh.rank == 2
        x = torch.ones(4, dtype=torch.float64 if other and how == "dtype" else torch.float32)
        x.requires_grad_(other and how == "grad")
        mc.all_reduce(
            x[: 3 if other and how == "shape" else 4], "a", "max" if other and how == "op" else "sum", mesh=mesh
        )


@pytest.mark.parametrize("how", ["dtype", "grad", "shape", "op"])
def test_a_call_that_is_known_is_told_from_another_one(how: str) -> None:
    with pytest.raises(mc.CommError, match=r"ranks of one axis made different calls.*\n.*ranks? .*\n.*ranks? "):
        mc.launch(differs_in_the_end, ranks=4, args=(how,))


def usable_afterwards(kind: str) -> tuple[bool, float]:
    mesh = mesh_of(4)
    try:
        MISMATCHES[kind][0](torch.ones(4), mesh)
        raised = False
    except mc.CommError:
        raised = True
    x = torch.ones(2, requires_grad=True)
    y = mc.all_reduce(x * mesh.rank, "a", mesh=mesh).sum()
    y.backward()
    assert_close(x.grad, torch.full((2,), float(mesh.rank)), rtol=0, atol=0)
    return raised, y.item()


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_caught_mismatch_is_raised_on_every_rank_and_leaves_the_group_usable(kind: str) -> None:
    assert mc.launch(usable_afterwards, ranks=4, args=(kind,)) == [(True, 12.0)] * 4


def mismatch_in_backward() -> None:
    """The forward is the same everywhere; one rank's graph lacks the collective."""
    mesh = mesh_of(2)
    x = torch.ones(2, requires_grad=True)
    y = mc.pvary(x, "a", mesh=mesh)
    if mesh.rank == 0:
        y.sum().backward()
    else:
        mc.all_reduce(torch.ones(3), "a", mesh=mesh)


def test_a_mismatch_in_backward() -> None:
    with pytest.raises(mc.CommError, match=r"rank 0 called all_reduce f32\[2\] \(op='sum'\) over 'a' at"):
        mc.launch(mismatch_in_backward, ranks=2)


def other_axis() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    mc.all_reduce(torch.ones(3), "b" if mesh.rank == 3 else "a", mesh=mesh)


def other_order() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    mc.all_gather(torch.ones(3), ("b", "a") if mesh.rank == 3 else ("a", "b"), mesh=mesh)


@pytest.mark.parametrize(
    ("body", "patterns"),
    [
        (
            other_axis,
            [r"rank 1 waits in all_reduce.* over 'a'", r"rank 3 waits in all_reduce.* over 'b'"],
        ),
        (
            other_order,
            [r"rank 0 waits in all_gather.* over \('a', 'b'\)", r"rank 3 waits in all_gather.* over \('b', 'a'\)"],
        ),
    ],
    ids=["another axis", "another order"],
)  # fmt: skip
def test_another_axis(body: Callable[[], None], patterns: list[str]) -> None:
    with pytest.raises(mc.CommError) as caught:
        mc.launch(body, ranks=4)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern} not in:\n{caught.value}"


# --------------------------------------------------------------------------------------------------------- deadlocks


def returns_early() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    if mesh.rank != 2:
        mc.reduce_scatter(torch.ones(2, 3, dtype=torch.float64), "a", mesh=mesh)  # stuck


def test_a_rank_that_returns_early() -> None:
    with pytest.raises(mc.CommError, match=r"deadlock: no rank can go on") as caught:
        mc.launch(returns_early, ranks=4)
    text = str(caught.value)
    place = f"at test_inprocess.py:{line_of('stuck')}"
    assert f"rank 0 waits in reduce_scatter f64[2, 3] (dim=0, op='sum') over 'a' {place}" in text
    for rank in (1, 2, 3):
        assert f"  rank {rank} has returned" in text
    assert "fix: every rank of an axis must make the same calls" in text


def crossed() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    first, second = ("a", "b") if mesh.rank in (0, 3) else ("b", "a")
    mc.all_reduce(torch.ones(1), first, mesh=mesh)  # first
    mc.all_reduce(torch.ones(1), second, mesh=mesh)


def test_axes_taken_in_another_order_name_every_rank() -> None:
    with pytest.raises(mc.CommError, match=r"deadlock") as caught:
        mc.launch(crossed, ranks=4)
    line = line_of("first")
    for rank, axis in enumerate("abba"):
        expected = f"  rank {rank} waits in all_reduce f32[1] (op='sum') over '{axis}' at test_inprocess.py:{line}"
        assert expected in str(caught.value)


def caught_deadlock() -> str:
    mesh = mesh_of(3)
    if mesh.rank == 1:
        return "left"
    try:
        mc.barrier("a", mesh=mesh)
    except mc.CommError:
        return "told"
    return "went on"


def test_every_rank_that_waits_is_told_of_a_deadlock() -> None:
    assert mc.launch(caught_deadlock, ranks=3) == ["told", "left", "told"]


# -------------------------------------------------------------------------------------------------------- exceptions


class OddError(Exception):
    """Takes two arguments, so that an error rebuilt from its text would not do."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)
        self.second = second


def raises_on_rank_2() -> None:
    mesh = mesh_of(4)
    mc.barrier("a", mesh=mesh)
    if mesh.rank == 2:
        1 / 0  # noqa: B018
    mc.barrier("a", mesh=mesh)
    raise AssertionError("a rank went on")


def test_an_exception_in_one_rank_ends_the_launch() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        mc.launch(raises_on_rank_2, ranks=4)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "raises_on_rank_2" in frames
    assert "raised by rank 2 of 4" in "".join(getattr(caught.value, "__notes__", ["raised by rank 2 of 4"]))


def raises_odd() -> None:
    raise OddError("why", mesh_of(2).rank)


def test_the_exception_is_the_ranks_own() -> None:
    with pytest.raises(OddError) as caught:
        mc.launch(raises_odd, ranks=2)
    assert caught.value.second == 0


def cleans_up() -> None:
    mesh = mesh_of(3)
    try:
        if mesh.rank == 1:
            raise OddError("first", 1)
        mc.barrier("a", mesh=mesh)
    except Exception:
        ended.append((mesh.rank, "caught"))
        raise
    finally:
        ended.append((mesh.rank, "finally"))


ended: list[tuple[int, str]] = []


def test_the_other_ranks_are_ended_and_run_their_finally() -> None:
    ended.clear()
    with pytest.raises(OddError, match="first"):
        mc.launch(cleans_up, ranks=3)
    assert sorted(ended) == [(0, "finally"), (1, "caught"), (1, "finally")]  # rank 2 had not begun


def stubborn() -> None:
    """Ranks that catch everything and go on calling collectives do not keep a failed launch alive."""
    mesh = mesh_of(3)
    if mesh.rank == 1:
        raise OddError("enough", 1)
    for _ in range(50):
        with contextlib.suppress(Exception):
            mc.barrier("a", mesh=mesh)


def test_a_rank_that_suppresses_exceptions_ends_too() -> None:
    with pytest.raises(OddError, match="enough"):
        mc.launch(stubborn, ranks=3)


def stops(signal: type[BaseException]) -> None:
    if mesh_of(2).rank == 1:
        raise signal(3)
    mc.barrier("a", mesh=mesh_of(2))


@pytest.mark.parametrize("signal", [SystemExit, KeyboardInterrupt])
def test_exits_and_interrupts_reach_the_caller(signal: type[BaseException]) -> None:
    with pytest.raises(signal):
        mc.launch(stops, ranks=2, args=(signal,))


def cause_beside_deadlock() -> None:
    mesh = mesh_of(3)
    if mesh.rank == 0:
        mc.barrier("a", mesh=mesh)
    raise OddError("cause", mesh.rank)


def test_the_cause_is_raised_and_not_what_follows_from_it() -> None:
    with pytest.raises(OddError, match="cause"):
        mc.launch(cause_beside_deadlock, ranks=3)


def test_a_launch_works_after_one_that_failed() -> None:
    with pytest.raises(ZeroDivisionError):
        mc.launch(raises_on_rank_2, ranks=4)
    assert mc.launch(lambda: mc.all_reduce(torch.ones(()), "a", mesh=mesh_of(4)).item(), ranks=4) == [4.0] * 4


class Interrupted:
    """A lock: Ctrl-C comes when it has just been taken, and the second time nobody is left who could release it."""

    def __init__(self, lock: threading.Lock, times: int = 0) -> None:
        self.lock, self.times, self.release = lock, times, lock.release

    def acquire(self) -> None:
        assert self.lock.acquire(timeout=10), "nobody releases it"
        self.times += 1
        if self.times == 1:
            raise KeyboardInterrupt


def test_an_interrupt_that_comes_together_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler.World.run

    def run(world: Any, *args: Any) -> Any:
        world._ended = Interrupted(world._ended)
        return made(world, *args)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.World, "run", run)
        with pytest.raises(KeyboardInterrupt):
            mc.launch(lambda: mc.barrier("a", mesh=mesh_of(3)), ranks=3)
    assert mc.launch(lambda: mesh_of(2).rank, ranks=2) == [0, 1]


def test_an_interrupt_while_the_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def main() -> None:
        while True:
            mc.barrier("a", mesh=mesh_of(3))

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mc.launch(main, ranks=3)
    for thread in threading.enumerate():
        if thread.name.startswith("meshcomm rank"):
            thread.join(10)
            assert not thread.is_alive()
    assert mc.launch(lambda: mesh_of(2).rank, ranks=2) == [0, 1]


# ------------------------------------------------------------------------------------------- what the ranks take over


def modes() -> dict[str, Any]:
    mesh = mesh_of(2)
    mc.barrier("a", mesh=mesh)
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype of a product": product.dtype,
        "device": str(torch.get_default_device()),
        "mesh": mc.current_mesh(),
    }


@pytest.mark.parametrize(
    ("context", "changed"),
    [
        (contextlib.nullcontext, {}),
        (torch.no_grad, {"grad": False}),
        (torch.inference_mode, {"grad": False, "inference": True}),
        (
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            {"autocast": True, "dtype of a product": torch.bfloat16},
        ),
        (lambda: torch.device("meta"), {"device": "meta"}),
    ],
    ids=["as it is", "no_grad", "inference_mode", "autocast", "default device"],
)
def test_the_callers_modes_hold_in_every_rank(context: Callable[[], Any], changed: dict[str, Any]) -> None:
    usual = {
        "grad": True, "inference": False, "autocast": False, "dtype of a product": torch.float32, "device": "cpu",
        "mesh": None,
    }  # fmt: skip
    body = modes_without_communication if "device" in changed else modes
    with context():
        found = mc.launch(body, ranks=2)
    assert found == [usual | changed] * 2
    assert mc.launch(modes, ranks=2) == [usual] * 2


def modes_without_communication() -> dict[str, Any]:
    """A tensor on meta cannot be moved."""
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return {
        "grad": True, "inference": False, "autocast": False, "dtype of a product": product.dtype,
        "device": str(torch.get_default_device()), "mesh": None,
    }  # fmt: skip


def test_the_current_mesh_holds_in_every_rank() -> None:
    mesh = mesh_of(2)
    with mc.use_mesh(mesh):
        found = mc.launch(lambda: (mc.current_mesh() is mesh, mc.all_reduce(torch.ones(()), "a").item()), ranks=2)
    assert found == [(True, 2.0)] * 2
    assert mc.current_mesh() is None


def a_mode_of_ones_own() -> list[bool]:
    """A rank that changes its modes changes them for itself only."""
    mesh = mesh_of(2)
    found = []
    with torch.set_grad_enabled(mesh.rank == 1), mc.use_mesh(mesh) if mesh.rank else contextlib.nullcontext():
        for _ in range(2):
            mc.barrier("a", mesh=mesh)
            found += [torch.is_grad_enabled(), mc.current_mesh() is mesh]
    return found


def test_a_rank_changes_modes_for_itself() -> None:
    assert mc.launch(a_mode_of_ones_own, ranks=2) == [[False] * 4, [True] * 4]


def trains_after_inference() -> None:
    """What a mesh keeps from its first use in inference mode, or under a transform, serves training later."""
    mesh = mesh_of(2)
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        mc.broadcast(torch.ones(2), "a", src=1, mesh=mesh)
    mc.broadcast(x * (mesh.rank + 1), "a", src=1, mesh=mesh).sum().backward()
    assert_close(x.grad, torch.full((2,), 2.0 * mesh.rank), rtol=0, atol=0)
    y = mc.broadcast(x, "a", mesh=mesh).square().sum() + mc.all_reduce(x, "a", "product", mesh=mesh).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.square().sum().backward()
    assert mc.axis_index("a", mesh=mesh).is_inference() is False


def beside_one_in_forward_mode() -> Any:
    """Rank 1, of which the others know nothing; they sum zeros where it sums tangents."""
    mesh, x = mesh_of(4), torch.ones(2)
    if mesh.rank == 1:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(mc.all_reduce(forward_ad.make_dual(x, x * 5), "a", mesh=mesh))
    y, tangent = mc.all_reduce(x, "a", mesh=mesh), mc.all_reduce(torch.zeros(2), "a", mesh=mesh)
    assert forward_ad._current_level == -1
    return y, tangent


def test_a_rank_is_in_forward_mode_for_itself() -> None:
    for y, tangent in mc.launch(beside_one_in_forward_mode, ranks=4):
        assert_close(y, torch.full((2,), 4.0))
        assert_close(tangent, torch.full((2,), 5.0))


def beside_one_in_inference_mode(last: int) -> list[bool]:
    mesh, x = mesh_of(4), torch.ones(4, 2)
    with torch.inference_mode(mesh.rank == last):
        found = [mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh), mc.shift(x, "a", mesh=mesh)]
        found += [mc.reduce_scatter(x, "a", mesh=mesh), *mc.all_reduce([x, x], "a", mesh=mesh)]
    return [y.is_inference() for y in found]


@pytest.mark.parametrize("last", [0, 3])
def test_a_rank_in_inference_mode_has_no_part_in_what_others_get(last: int) -> None:
    for rank, found in enumerate(mc.launch(beside_one_in_inference_mode, ranks=4, args=(last,))):
        assert rank == last or not any(found)


def without_graphs_beside_inference_mode(last: int, numel: int) -> None:
    """What one rank brings requires grad, and nobody's grad mode is on; the one that comes last is in inference mode."""
    mesh, rows = mesh_of(4), numel // 4
    leaf = torch.full((numel,), 2.0, requires_grad=mesh.rank == 1)
    x, around = leaf * 1, ((mesh.rank + 1) % 4, (mesh.rank - 1) % 4)
    with torch.inference_mode(mesh.rank == last), torch.no_grad():
        found: list[Any] = [mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh)]
        found += [mc.reduce_scatter(x, "a", op="max", mesh=mesh), mc.all_to_all(x, "a", 0, 0, mesh=mesh)]
        found += [mc.reduce(x, "a", mesh=mesh), mc.gather(x, "a", 1, mesh=mesh), mc.broadcast(x, "a", 1, mesh=mesh)]
        found += [mc.scatter(x if mesh.rank == 1 else None, "a", 1, like=x.new_empty(rows), mesh=mesh)]
        found += mc.exchange([(x, around[0])], [(around[1], (numel,), x.dtype)], "a", mesh=mesh)
        found += mc.exchange([(x, around[0])], [(around[1], (numel,), x.dtype)], "a", mesh=mesh, async_op=True).wait()
    numbers = [None if y is None else (y.numel(), y.unique().item()) for y in found]
    reduced, gathered = ((numel, 8.0) if mesh.rank == 0 else None), ((4 * numel, 2.0) if mesh.rank == 1 else None)
    kept, row = (numel, 2.0), (rows, 2.0)
    assert numbers == [(numel, 8.0), (4 * numel, 2.0), row, kept, reduced, gathered, kept, row, kept, kept]
    assert not any(y is not None and y.requires_grad for y in found)
    assert mesh.rank == last or not any(y is not None and y.is_inference() for y in found)


@pytest.mark.parametrize("numel", [8, 2**18], ids=["small", "in memory that was used before"])
@pytest.mark.parametrize("last", [0, 3])
def test_a_rank_in_inference_mode_makes_no_graphs_for_others(last: int, numel: int) -> None:
    for _ in range(2):
        mc.launch(without_graphs_beside_inference_mode, ranks=4, args=(last, numel))


def trains_after_a_transform() -> None:
    mesh = mesh_of(2)
    x = torch.ones(2)
    loss = lambda x: mc.broadcast(x * x, "a", src=1, mesh=mesh).sum()  # noqa: E731
    assert_close(jvp(grad(loss), (x,), (x,))[1], torch.full((2,), 2.0 * mesh.rank))
    assert_close(vmap(grad(loss))(torch.ones(3, 2)), torch.full((3, 2), 2.0 * mesh.rank))
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert_close(leaf.grad, torch.full((2,), 2.0 * mesh.rank))


@pytest.mark.parametrize("body", [trains_after_inference, trains_after_a_transform])
def test_the_first_use_of_an_axis_leaves_no_trace(body: Callable[[], None]) -> None:
    mc.launch(body, ranks=2)


# -------------------------------------------------------------------------------------------------- launches in ranks


def nested() -> Any:
    mesh = mesh_of(2)
    inner = mc.launch(lambda: mc.all_reduce(torch.tensor(mesh.rank), "a", mesh=mesh).item(), ranks=2)
    with pytest.raises(mc.MeshError, match=r"ranks=3, but 2 ranks are running already"):
        mc.launch(lambda: None, ranks=3)
    return inner


def test_a_launch_inside_a_rank_runs_once_on_that_rank() -> None:
    assert mc.launch(nested, ranks=2) == [[1], [1]]


def test_a_mesh_may_be_closed_over_and_used_by_two_launches() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    for _ in range(2):
        assert mc.launch(lambda: mc.all_reduce(mesh.rank + torch.ones(()), "b", mesh=mesh).item(), ranks=4) == [
            3,
            3,
            7,
            7,
        ]


def two_meshes() -> list[float]:
    """Equal groups by different meshes and names, one after another and mixed."""
    one, two = mc.make_mesh({"a": 4}), mc.make_mesh({"x": 2, "y": 2})
    found = []
    for i in range(3):
        x = torch.tensor(float(one.rank + i), requires_grad=True)
        y = mc.all_reduce(x, "a", mesh=one) * mc.all_reduce(x, ("x", "y"), mesh=two) + mc.all_reduce(
            x, ("a",), mesh=one
        )
        y.backward()
        assert x.grad is not None
        found += [y.item(), x.grad.item()]
    return found


def test_two_meshes_of_the_same_ranks() -> None:
    expected = [value for total in (6.0, 10.0, 14.0) for value in (total * total + total, 2 * total + 1)]
    assert mc.launch(two_meshes, ranks=4) == [expected] * 4


def overlapping() -> list[int]:
    """Meshes of different subsets of the ranks, of which two share a rank."""
    me = mesh_of(4).rank
    left, right = mc.make_mesh({"l": 2}, ranks=[0, 1]), mc.make_mesh({"r": 3}, ranks=[3, 2, 1])
    found = []
    for _ in range(2):
        if me in (0, 1):
            found += mc.all_gather(torch.tensor([me]), "l", mesh=left).tolist()
        if me in (1, 2, 3):
            found += mc.all_gather(torch.tensor([me]), "r", mesh=right).tolist()
    return found


def test_overlapping_subsets() -> None:
    assert mc.launch(overlapping, ranks=4) == [[0, 1] * 2, [0, 1, 3, 2, 1] * 2, [3, 2, 1] * 2, [3, 2, 1] * 2]


# ------------------------------------------------------------------------------------------------ derivatives at once


def forward_modes() -> None:
    """Every rank is inside jvp, or holds a dual level open, while the others run."""
    mesh = mesh_of(4)
    x, t = torch.tensor([1.0, 2.0]) * (mesh.rank + 1), torch.tensor([1.0, -1.0])
    y, tangent = jvp(lambda x: mc.all_reduce((x * x).sin(), "a", mesh=mesh), (x,), (t,))
    rows = torch.arange(1.0, 5.0)[:, None] * torch.tensor([1.0, 2.0])
    assert_close(tangent, (2 * rows * t * (rows * rows).cos()).sum(0))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t * mesh.rank)
        for _ in range(3):
            dual = mc.shift(dual * 2, "a", mesh=mesh)
        mc.barrier("a", mesh=mesh)
        assert_close(forward_ad.unpack_dual(dual).tangent, t * 8 * ((mesh.rank - 3) % 4))
    assert forward_ad.unpack_dual is not None
    assert_close(y, (rows * rows).sin().sum(0))


def test_forward_mode_in_all_ranks_at_once() -> None:
    mc.launch(forward_modes, ranks=4)
    with forward_ad.dual_level():  # and the caller's bookkeeping is as it was
        assert forward_ad.unpack_dual(forward_ad.make_dual(torch.ones(1), torch.ones(1))).tangent is not None


def mixed_modes() -> None:
    """One rank under jvp, one under vmap, others plain: levels do not leak to the rank that runs next."""
    mesh = mesh_of(3)
    for _ in range(3):
        if mesh.rank == 0:
            jvp(lambda x: x * mc.all_reduce(x, "a", mesh=mesh), (torch.ones(2),), (torch.zeros(2),))
            mc.all_reduce(torch.ones(2), "a", mesh=mesh)
        else:
            # jvp sends the value and then its tangent.
            mc.all_reduce(torch.ones(2), "a", mesh=mesh)
            assert not torch._C._are_functorch_transforms_active()
            mc.all_reduce(torch.ones(2), "a", mesh=mesh)
            assert forward_ad._current_level == -1
            mc.all_reduce(torch.ones(2), "a", mesh=mesh)


def test_a_transform_in_one_rank_is_not_seen_by_another() -> None:
    mc.launch(mixed_modes, ranks=3)


def hooked() -> list[int]:
    """Hooks on gradients run in the rank whose graph it is."""
    mesh = mesh_of(3)
    found: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = mc.pvary(x, "a", mesh=mesh)
    y.register_hook(lambda g: found.append(mesh.rank))
    mc.all_gather(y, "a", mesh=mesh).sum().backward()
    return found


def test_hooks_run_in_their_rank() -> None:
    assert mc.launch(hooked, ranks=3) == [[0], [1], [2]]


# ------------------------------------------------------------------------------------------------------ outside ranks


def results() -> Tensor:
    mesh = mesh_of(2)
    return mc.all_gather(torch.ones(1, requires_grad=True), "a", mesh=mesh)


def test_backward_outside_of_its_rank_says_so() -> None:
    y = mc.launch(results, ranks=2)[0]
    with pytest.raises(mc.MeshError, match=r"called for rank 0 outside of that rank[\s\S]*fix: run backward\(\)"):
        y.sum().backward()


def other_thread() -> str:
    mesh = mesh_of(2)
    found: list[str] = []

    def call() -> None:
        try:
            mc.all_reduce(torch.ones(1), "a", mesh=mesh)
        except mc.MeshError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_a_rank_starts_is_not_the_rank() -> None:
    assert all("outside a rank" in text for text in mc.launch(other_thread, ranks=2))


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    """A launch leaves grad mode, current mesh and threads as they were, whatever the test did."""
    yield
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert mc.current_mesh() is None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("meshcomm rank")]


# ------------------------------------------------------------------------------- what several ranks must not get wrong


def keys_in_another_order() -> dict[str, float]:
    mesh = mesh_of(2)
    tree = {"a": torch.ones(2), "b": torch.full((2,), 10.0)}
    if mesh.rank == 1:
        tree = {"b": tree["b"], "a": tree["a"]}
    done = mc.all_reduce(tree, "a", mesh=mesh)
    assert list(done) == list(tree)
    return {key: leaf[0].item() for key, leaf in done.items()}


def test_dicts_that_were_filled_in_different_orders_meet_by_key() -> None:
    assert mc.launch(keys_in_another_order, ranks=2) == [{"a": 2.0, "b": 20.0}] * 2


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(2)}),
        ({"a": torch.ones(2)}, {"c": torch.ones(2)}),
        ([torch.ones(2, 3)], [torch.ones(3, 2)]),
    ],
    ids=["lengths", "keys", "shapes"],
)
def test_trees_that_fill_the_same_bucket_but_differ_are_told_apart(left: Any, right: Any) -> None:
    def main() -> None:
        mesh = mesh_of(2)
        with pytest.raises(mc.CommError, match=r"rank 0 called all_reduce[\s\S]*rank 1 called all_reduce"):
            mc.all_reduce(right if mesh.rank else left, "a", mesh=mesh)

    mc.launch(main, ranks=2)


def test_an_all_to_all_of_other_shapes_with_as_many_elements_is_told() -> None:
    def main() -> None:
        mesh = mesh_of(2)
        with pytest.raises(mc.CommError, match=r"f32\[2, 4\][\s\S]*f32\[4, 2\]"):
            mc.all_to_all(torch.ones(4, 2) if mesh.rank else torch.ones(2, 4), "a", 0, 0, mesh=mesh)

    mc.launch(main, ranks=2)


def test_a_message_brings_no_graph_of_its_sender() -> None:
    def main() -> bool:
        mesh = mesh_of(2)
        if mesh.rank == 0:
            with torch.no_grad():
                mc.send(torch.ones(2, requires_grad=True), "a", dst=1, mesh=mesh)
            return False
        return mc.recv("a", src=0, shape=(2,), dtype=torch.float32, mesh=mesh).requires_grad

    assert mc.launch(main, ranks=2) == [False, False]


def test_numpys_second_normal_number_is_the_callers_own() -> None:
    np.random.seed(0)
    expected = np.random.randn(2)
    np.random.seed(0)
    first = np.random.randn()
    mc.launch(lambda: np.random.randn(3), ranks=2)
    assert [first, np.random.randn()] == expected.tolist()


def test_a_second_launch_at_the_same_time_is_refused() -> None:
    said: list[str] = []

    def inner() -> None:
        try:
            mc.launch(lambda: None, ranks=2)
        except mc.MeshError as error:
            said.append(str(error))

    def main() -> None:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    mc.launch(main, ranks=1)
    assert "another launch is running" in said[0]


@pytest.mark.parametrize(("args", "kwargs"), [(5, None), ("text", None), ((), [1])])
def test_arguments_of_a_wrong_kind(args: Any, kwargs: Any) -> None:
    with pytest.raises(mc.MeshError, match="are not a sequence and a mapping"):
        mc.launch(lambda: None, 2, args, kwargs)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads to cores")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_forked_in_a_rank_may_use_all_cores() -> None:
    def scheduled() -> tuple[int, int]:
        return len(os.sched_getaffinity(0)), os.sched_getscheduler(0)

    def main() -> tuple[tuple[int, int], bytes]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, repr(scheduled()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return scheduled(), os.read(read, 30)

    before = scheduled()
    [(inside, forked)] = mc.launch(main, ranks=1)
    assert inside == ((1, os.SCHED_BATCH) if torch.get_num_threads() == 1 else before)
    assert forked.decode() == repr(before)
    assert scheduled() == before


def transposed(op: str) -> tuple[int, ...]:
    """The strides of what a transposed tensor becomes."""
    x = torch.arange(6.0).view(2, 3).T
    results = {
        "shift": lambda mesh: mc.shift(x, "a", mesh=mesh),
        "broadcast": lambda mesh: mc.broadcast(x, "a", mesh=mesh),
        "all_reduce": lambda mesh: mc.all_reduce(x, "a", "max", mesh=mesh),
    }
    return results[op](mc.make_mesh({"a": 4})).stride()


@pytest.mark.parametrize("op", ["shift", "broadcast", "all_reduce"])
def test_results_are_dense_on_both_runtimes(run4: Callable[..., list[Any]], op: str) -> None:
    assert run4(transposed, op) == [(2, 1)] * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    mesh = mc.make_mesh({"a": 1})
    with pytest.raises(mc.MeshError, match="x is a nested tensor"):
        mc.all_reduce(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a", mesh=mesh)


def results_of_flat_calls(shape: tuple[int, ...], strided: bool) -> dict[str, Any]:
    mesh = mesh_of(3)
    x = torch.arange(float(math.prod(shape))).view(shape) + 100 * mesh.rank
    x = x.mT.contiguous().mT if strided and x.ndim > 1 else x
    calls = {
        "all_reduce": lambda: mc.all_reduce(x, "a", mesh=mesh),
        "all_gather": lambda: mc.all_gather(x, "a", mesh=mesh),
        "reduce_scatter": lambda: mc.reduce_scatter(x, "a", mesh=mesh),
        "all_to_all": lambda: mc.all_to_all(x, "a", 0, 0, mesh=mesh),
        "broadcast": lambda: mc.broadcast(x, "a", 1, mesh=mesh),
        "shift": lambda: mc.shift(x, "a", mesh=mesh),
    }
    found = {}
    for name, call in calls.items():
        for again in range(2):  # the second one is known
            y = call()
            size = y.untyped_storage().nbytes(), y.numel() * y.itemsize
            found[f"{name} {again}"] = y.tolist(), y.stride(), y._base is None or not y.numel(), size[0] == size[1]
            y.fill_(-1.0)  # nobody else has it
    mc.barrier("a", mesh=mesh)
    return found


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("shape", [(6,), (3, 2), (6, 2, 1), (3, 1, 4), (0,), (3, 0)], ids=str)
def test_each_rank_has_results_of_its_own(shape: tuple[int, ...], strided: bool) -> None:
    every = mc.launch(results_of_flat_calls, ranks=3, args=(shape, strided))
    xs = [torch.arange(float(math.prod(shape))).view(shape) + 100 * rank for rank in range(3)]
    whole, rows = sum(xs[1:], xs[0]), [x.chunk(3) if shape[0] else [x] * 3 for x in xs]
    for rank, found in enumerate(every):
        expected = {
            "all_reduce": whole, "all_gather": torch.cat(xs), "broadcast": xs[1], "shift": xs[rank - 1],
            "reduce_scatter": whole.chunk(3)[rank] if shape[0] else whole,
            "all_to_all": torch.cat([row[rank] for row in rows]),
        }  # fmt: skip
        for name, y in expected.items():
            for again in range(2):
                seen = found[f"{name} {again}"]
                assert seen == (y.tolist(), y.contiguous().stride(), True, True), (name, again, rank)


def runs_that_differ() -> list[str]:
    mesh, told = mesh_of(2), []
    for _ in range(2):
        with pytest.raises(mc.CommError) as error:
            mc.all_to_all(torch.ones(4 + 2 * mesh.rank), "a", 0, 0, mesh=mesh)
        told.append(str(error.value))
    return told


def test_equal_runs_that_are_not_those_of_the_others() -> None:
    for told in mc.launch(runs_that_differ, ranks=2):
        assert len(told) == 2
        assert all("2" in each and "3" in each for each in told)


def written_where_grad_is_on(numel: int) -> list[bool]:
    mesh, w = mesh_of(2), torch.full((), 2.0, requires_grad=True)
    seen = []
    for shape in (numel,), (2, numel // 2):
        x = torch.ones(shape)
        for y in mc.all_gather(x, "a", mesh=mesh), mc.all_to_all(x, "a", 0, 0, mesh=mesh):
            seen += [y._base is None, bool((y.mul_(w) == 2).all()), y.requires_grad]
    return seen


@pytest.mark.parametrize("numel", [8, 2**20], ids=["small", "large"])
def test_a_result_may_be_written_where_grad_is_on(numel: int) -> None:
    """What was a view of something that was made without grad would refuse that."""
    for _ in range(2):  # memory of results is used again
        assert mc.launch(written_where_grad_is_on, ranks=2, args=(numel,)) == [[True] * 12] * 2


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 5), (2**18, 2**18), (0, 0)], ids=str)
def test_ranks_may_say_sizes_where_others_have_equal_runs(lengths: tuple[int, int], who: int) -> None:
    """Whoever comes last. ``lengths``: of the run between the ranks, and of the one that who says sizes keeps."""
    equal, sizes = [lengths[0]] * 2, [*lengths] if who else [*lengths[::-1]]

    def main() -> list[Tensor]:
        mesh = mesh_of(2)
        given = (sizes, sizes) if mesh.rank == who else ()
        x = torch.arange(2.0 * sum(sizes if given else equal)).view(-1, 2) + 1e6 * mesh.rank
        return [x, *(mc.all_to_all(x, "a", 0, 0, *given, mesh=mesh) for _ in range(2))]

    every = mc.launch(main, ranks=2)
    runs = [x.split(sizes if rank == who else equal) for rank, (x, *_) in enumerate(every)]
    for rank, (_, *found) in enumerate(every):
        for y in found:
            assert_close(y, torch.cat([run[rank] for run in runs]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "shapes"), [("all_gather", [(1, 2, 2), (2, 2)]), ("reduce_scatter", [(1, 2, 2, 1), (2, 2)])]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_shapes_that_differ_and_move_as_equal_ones(name: str, shapes: list[tuple[int, ...]], swapped: bool) -> None:
    def main() -> str:
        mesh = mesh_of(2)
        with pytest.raises(mc.CommError, match="ranks of one axis made different calls") as error:
            getattr(mc, name)(torch.ones(shapes[mesh.rank ^ swapped]), "a", 1, mesh=mesh)
        return str(error.value)

    for told in mc.launch(main, ranks=2):
        assert all(str(list(shape)).replace(" ", "") in told.replace(" ", "") for shape in shapes)


def test_an_interrupt_while_the_callers_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settle, times = scheduler.settle, []

    def main() -> None:
        torch.set_default_dtype(torch.float64)
        torch.rand(3)
        mc.barrier("a", mesh=mesh_of(2))

    def interrupted(*given: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            times.append(given)
            if len(times) == 1:
                raise KeyboardInterrupt
        settle(*given)

    before, seed = settings(), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mc.launch(main, ranks=2)
    assert len(times) == 2
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), seed)
    assert mc.launch(lambda: mesh_of(2).rank, ranks=2) == [0, 1]
