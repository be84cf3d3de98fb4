"""What one call of a shard_map leaves for the next one over the same mesh, which nobody must be able to tell, and what
it must not leave: anything of its threads.
"""

import contextvars
import gc
import sys
import threading
import weakref

import pytest
import torch

import meshcomm as mc
from meshcomm.in_thread import InThread
from meshcomm.runtime import recorder
from meshcomm.runtime.transports.threads.scheduler import local

RANKS = 4


@pytest.fixture
def mesh():
    return mc.make_mesh({"a": 2, "b": 2})


def over(mesh, body, check_vma=False, out_specs=""):
    """``body`` of this rank's part of a tensor of one number per rank."""
    return mc.shard_map(body, mesh=mesh, in_specs="(a b n)", out_specs=out_specs, check_vma=check_vma)


def summed(x):
    return mc.all_reduce(mc.all_reduce(x.sum(), "a"), "b")


X = torch.arange(4.0)


# ------------------------------------------------------------------------------------------------------ the threads

_local = threading.local()
_context = contextvars.ContextVar("_context", default="new")


@pytest.mark.parametrize("run", ["shard_map", "launch"])
def test_a_rank_finds_nothing_of_the_threads_before(mesh, run):
    """Python's and torch's, and what is in no table that could be emptied: how this thread's processor treats the
    smallest numbers, for which torch has no getter. That is why threads are not used again.
    """
    found, threads = [], []

    def body(x=None):
        tiny = torch.tensor(2.0**-1060, dtype=torch.float64) * 1.0
        found.append(
            (
                getattr(_local, "kept", "new"), _context.get(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
                torch.is_inference_mode_enabled(), torch.get_num_threads(), tiny.item() != 0, mc.current_mesh() is mesh,
            )
        )  # fmt: skip
        threads.append(threading.current_thread())
        _local.kept = "old"
        _context.set("old")
        torch.set_grad_enabled(False)
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        torch.set_flush_denormal(True)
        mc.use_mesh(mc.make_mesh({"other": RANKS})).__enter__()
        return torch.zeros(())

    def call():
        if run == "launch":
            mc.launch(body, ranks=RANKS)
        else:
            over(mesh, body)(X)

    for _ in range(3):
        call()
    expected = ("new", "new", True, False, False, torch.get_num_threads(), True, run == "shard_map")
    assert found == [expected] * (3 * RANKS)
    assert len({id(each) for each in threads}) == 3 * RANKS
    assert not any(each.is_alive() for each in threads)
    assert not hasattr(_local, "kept")
    assert _context.get() == "new"


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_rank_makes_one_object_of_its_thread(mesh, check_vma, monkeypatch):
    """Each costs its thread time, where it begins and where it ends."""
    made, total = [], over(mesh, summed, check_vma)

    def noting(cls, own):
        def init(self, *args, **kwargs):
            made.append(cls)
            own(self, *args, **kwargs)

        return init

    total(X)
    modules = [module for name, module in sys.modules.items() if name.startswith("meshcomm.")]
    for cls in {type(each) for module in modules for each in vars(module).values()}:
        if issubclass(cls, threading.local):
            monkeypatch.setattr(cls, "__init__", noting(cls, cls.__init__))
    total(X)
    assert made == [InThread] * RANKS


def test_one_thread_keeps_what_torch_cannot_tell():
    """The program behind the sentence above: a thread that is used again computes other bits."""
    tiny, bits = torch.tensor(2.0**-1060, dtype=torch.float64), []

    def first_and_second_use():
        bits.append((tiny * 1.0).item())
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush them")
        bits.append((tiny * 1.0).item())

    thread = threading.Thread(target=first_and_second_use)
    thread.start()
    thread.join()
    assert bits == [2.0**-1060, 0.0]
    assert (tiny * 1.0).item() != 0


# ------------------------------------------------------------------------------------------------------ the axes


def axes_of(mesh):
    return None if mesh.kept is None else [id(axis) for axes in mesh.kept.axes for axis in axes.values()]


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_axes_of_a_run_are_those_of_the_run_before(mesh, check_vma):
    total = over(mesh, summed, check_vma)
    assert mesh.kept is None
    assert total(X) == 6
    first = axes_of(mesh)
    assert len(set(first)) == 2 * RANKS
    for factor in (2, 3):
        assert total(factor * X) == 6 * factor
        assert axes_of(mesh) == first
    x = X.clone().requires_grad_()
    total(x).backward()
    assert x.grad.tolist() == [1, 1, 1, 1]
    assert axes_of(mesh) == first


def test_the_compiler_that_looks_at_frames_does_not_have_an_axis(mesh):
    """It goes on looking after a failure, and counts of references that cross a call are higher then."""

    def fails_to_compile(x):
        raise ValueError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        torch.compile(fails_to_compile, backend="eager", fullgraph=True)(X)
    assert over(mesh, summed)(X) == 6
    assert mesh.kept is not None


def test_another_function_finds_axes_that_are_new_to_it(mesh):
    over(mesh, summed)(X)
    mine = over(mesh, lambda x: mc.all_gather(mc.shift(x, "b", 1), ("a", "b"), 0), out_specs="n")
    assert mine(X).tolist() == [1, 0, 3, 2]
    assert over(mesh, summed)(X) == 6
    assert mine(X).tolist() == [1, 0, 3, 2]


def test_the_log_of_a_run_is_its_own(mesh):
    total = over(mesh, summed)
    for _ in range(3):
        total(X)
        rings = recorder.rings_inside()
        assert sorted(rings) == list(range(RANKS))
        for ring in rings.values():
            calls = ring.calls()
            assert [record[recorder.NUMBER] for _, record in calls] == [1, 1]
            assert [str(log) for log, _ in calls] == ["'a'", "'b'"]
    mc.launch(lambda: mc.all_reduce(X, "c", mesh=mc.make_mesh({"c": RANKS})), ranks=RANKS)
    total(X)
    assert [str(log) for log, _ in recorder.rings_inside()[0].calls()] == ["'a'", "'b'"]


def test_a_trace_hears_a_run_whose_axes_were_there(mesh):
    total = over(mesh, summed)
    total(X)
    for _ in range(2):
        with mc.trace() as t:
            total(X)
        assert sum(event.operation == "all_reduce" for event in t.events) == 2 * RANKS
        assert mesh.kept is None  # somebody had heard of them
        total(X)
        assert mesh.kept is not None


def fails(x):
    summed(x)
    if mc.axis_index("a") == 1:
        raise ValueError("on purpose")
    return summed(x)


stash = []


def keeps_an_axis(x):
    stash.append(mc.current_mesh().axis("a"))
    return summed(x)


def keeps_a_work(x):
    stash.append(mc.all_reduce(x, "a", async_op=True))
    return summed(x)


def keeps_a_graph(x):
    y = mc.reduce_scatter(mc.all_gather(x, "b", 0).clone().requires_grad_(), "b", 0)
    stash.append(y)
    return summed(x)


def makes_a_mesh(x):
    inner = mc.make_mesh({"all": RANKS})
    return mc.all_reduce(x.sum(), "all", mesh=inner)


@pytest.mark.parametrize("body", [keeps_an_axis, keeps_a_work, keeps_a_graph, makes_a_mesh])
def test_axes_that_somebody_may_know_are_made_again(mesh, body):
    stash.clear()
    over(mesh, summed)(X)
    assert over(mesh, body)(X) == 6
    assert mesh.kept is None
    assert over(mesh, summed)(X) == 6
    for each in stash:
        if isinstance(each, mc.Work):
            each._claimed = True  # nobody is to be warned
    stash.clear()


def test_ranks_go_at_once_when_their_run_has_ended(mesh):
    found = []

    def body(x):
        found.append(weakref.ref(local.rank))
        return summed(x)

    gc.collect()
    gc.disable()
    try:
        over(mesh, body)(X)
        mc.launch(lambda: found.append(weakref.ref(local.rank)), ranks=3)
        assert [each for ref in found if (each := ref()) is not None] == []
    finally:
        gc.enable()
    assert len(found) == RANKS + 3


def test_after_an_error_all_is_new(mesh):
    total = over(mesh, summed)
    total(X)
    with pytest.raises(ValueError, match="on purpose"):
        over(mesh, fails)(X)
    assert mesh.kept is None
    assert total(X) == 6


def test_a_graph_of_another_run_is_refused_as_ever(mesh):
    """A backward in a later call, of what an earlier one has left, is that of ranks that have ended."""
    stash.clear()
    over(mesh, keeps_a_graph)(X)
    kept, found = list(stash), [weakref.ref(y) for y in stash]  # what is reached in another way is an input

    def later(x):
        found[mc.current_mesh().own_index()]().sum().backward()
        return summed(x)

    stash.clear()
    with pytest.raises(mc.MeshError, match="outside of that rank"):
        over(mesh, later)(X)
    del kept


def test_nothing_else_is_kept(mesh):
    seen = []

    def body(x):
        y = summed(x)
        seen.extend(map(weakref.ref, (x, y)))
        return y

    total = over(mesh, body)
    result = total(X)
    del result
    assert mesh.kept is not None
    assert not any(ref() is not None for ref in seen)


def test_the_mesh_goes_with_its_axes():
    def use():
        mesh = mc.make_mesh({"a": 2, "b": 2})
        over(mesh, summed)(X)
        return weakref.ref(mesh), [weakref.ref(axis) for each in mesh.kept.axes for axis in each.values()]

    mesh, axes = use()
    gc.collect()
    assert mesh() is None
    assert not any(axis() is not None for axis in axes)
