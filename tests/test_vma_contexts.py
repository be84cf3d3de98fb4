"""Checked regions in one another, in threads, in compiled code, with gradients off, and on processes."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from cases import OLD
from test_check_vma import PROGRAMS, Scale
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from vma_checks import (
    LINE,
    I,
    N,
    V,
    checked,
    compare,
    heard,
    kind,
    on_ranks,
    ones,
    own,
    right,
    rows,
    same,
    sq,
    weight,
    zeros,
)

import meshcomm as mc
from meshcomm import watch
from meshcomm.spmd.types.checker import Checker
from meshcomm.spmd.types.vma import marked

# ------------------------------------------------------------------------------------------- contexts, threads, compiler


@pytest.mark.parametrize("inside", [True, False])
def test_reentrant_checkpoint(inside: bool) -> None:
    """Computed again in backward, in the region or behind it."""

    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        index = mesh.rank
        x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
        w = mc.mark_varying(weight().requires_grad_(), ())
        with mc.use_mesh(mesh), mc.check_vma():
            y = checkpoint(lambda x, w: torch.tanh(x @ w) @ w, x, w, use_reentrant=True)
            assert kind(y) == V
            loss = mc.all_reduce(sq(y), "dp")
            if inside:
                loss.backward()
            checker = watch.here.watcher
        if not inside:
            loss.backward()
        assert watch.here.watcher is None
        assert isinstance(checker, Checker)
        assert not checker._lately
        return loss.detach(), x.grad, w.grad

    compare(mc.launch(run, ranks=N), right(lambda x, w: sq(torch.tanh(x @ w) @ w)))


def test_checks_in_checks() -> None:
    def run() -> None:
        mesh = mc.make_mesh(LINE)
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = own(), same()
            outer = watch.here.watcher
            with mc.check_vma("error"):
                assert kind(x) == V
                with pytest.raises(mc.VaryingError, match="a pvary is missing"):
                    x @ w
            with mc.check_vma(False):
                assert watch.here.watcher is None
                y = x @ mc.pvary(w, "dp")
                assert mesh.rank in range(N)
            assert watch.here.watcher is outer
            with pytest.raises(mc.VaryingError, match="made out of sight"):
                y.sum()
            assert kind(x @ w) == V
            with pytest.raises(KeyError), mc.check_vma("error"):
                raise KeyError
            with pytest.raises(KeyError), mc.check_vma(False):
                raise KeyError
            assert watch.here.watcher is outer
        assert watch.here.watcher is None

    mc.launch(run, ranks=N)


def test_shard_map_in_a_check() -> None:
    """Its function is checked as well."""

    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        loss = mc.shard_map(
            lambda x, w: mc.all_reduce(sq(x @ w), "dp"), mesh=mesh, in_specs=("(dp b) d", "d f"), out_specs=""
        )
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = mc.mark_varying(rows(), ()), same()
            y = loss(x, w)
            assert kind(y) == I
            (g,) = torch.autograd.grad(y, w)
            assert kind(g) == I
            with pytest.raises(mc.VaryingError, match="takes global tensors, and x varies along 'dp'"):
                loss(own(), w)
            assert kind(own()) == V
        return g

    _, _, expected = right(lambda x, w: sq(x @ w))
    for g in mc.launch(run, ranks=N):
        assert_close(g, expected)


def test_no_grad_and_inference_mode() -> None:
    def run() -> None:
        x, w = own(), same()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = x @ w
                z = zeros(3)
                z += y[0]
                assert kind(y) == kind(z) == V
                assert kind(mc.all_reduce(y, "dp")) == I
                with pytest.raises(mc.VaryingError, match="item"):
                    y.sum().item()

    with heard() as calls:
        on_ranks(run)
    assert calls == {("all_reduce", "dp"): 2}


def test_a_mesh_of_one() -> None:
    def run() -> Any:
        x, w = mc.mark_varying(rows(), "dp"), same()
        y = mc.all_reduce(sq(x @ w), "dp")
        (g,) = torch.autograd.grad(y, w)
        with pytest.raises(mc.VaryingError, match="reduced already"):
            mc.all_reduce(y, "dp")
        return g

    w = weight().requires_grad_()
    (expected,) = torch.autograd.grad(sq(rows() @ w), w)
    for mode in (True, False):
        if mode is True:
            assert_close(on_ranks(run, mode, {"dp": 1})[0], expected)


def test_threads_of_their_own() -> None:
    """A check is its thread's."""

    def run() -> None:
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append((watch.here.watcher, ones(2) + ones(2))))
        worker.start()
        worker.join()
        assert found[0][0] is None
        assert kind(found[0][1]) is None
        assert kind(ones(2) + ones(2)) == I

    on_ranks(run)


def test_saved_copied_and_pickled() -> None:
    def run() -> None:
        x, w = own(), mc.mark_varying(nn.Parameter(ones(3)), ())
        file = io.BytesIO()
        torch.save({"x": x, "w": w, "y": x * w}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert isinstance(loaded["w"], nn.Parameter)
        with mc.check_vma(False):
            assert_close(loaded["x"], x)
            assert_close(pickle.loads(pickle.dumps(x)), x)
        assert kind(copy.deepcopy(x)) == V
        assert kind(mc.mark_varying(loaded["w"], ())) == I
        assert kind(mc.mark_varying(copy.deepcopy(w), ())) == I

    on_ranks(run)
    assert marked(pickle.loads(pickle.dumps(mc.mark_varying(ones(2), "dp")))) is None


BACKENDS = ["eager", "aot_eager"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_is_refused(backend: str) -> None:
    if OLD:
        pytest.skip("torch 2.11's dynamo ends the process where it is called in a mode on a thread of its own")
    compiled = torch.compile(lambda x, w: x @ w, backend=backend)

    def run() -> None:
        mesh = mc.make_mesh(LINE)
        assert_close(compiled(ones(2, 3), ones(3, 3)), 3 * ones(2, 3))  # also what was compiled before
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = own(), same()
            with pytest.raises(
                Exception, match=r"torch\.compile cannot trace checked code(?s:.)*mc\.check_vma\(False\)"
            ):
                compiled(x, w)
            with mc.check_vma(False):
                y = compiled(x, mc.pvary(w, "dp"))
            mc.mark_varying(y, "dp")
            (g,) = torch.autograd.grad(mc.all_reduce(y.sum(), "dp"), w)
        assert_close(g, (ones(2, 3) * 3).T @ ones(2, 3))

    mc.launch(run, ranks=N)


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_collective_alone_is_not_compiled() -> None:
    """The compiler leaves it as it is, what is known of a call of it included."""
    if OLD:
        pytest.skip("torch 2.11's dynamo ends the process where it is called in a mode on a thread of its own")

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Any:
        return mc.all_reduce(x, "dp")

    with mc.use_mesh(mc.make_mesh({"dp": 1})), mc.check_vma():
        for i in range(4):
            y = compiled(mc.mark_varying(ones(3) * i, "dp"))
            assert kind(y) == I
            assert_close(y, ones(3) * i)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_check_in_compiled_code_is_refused(fullgraph: bool) -> None:
    @torch.compile(backend="eager", fullgraph=fullgraph)
    def compiled(x: Tensor, w: Tensor) -> Tensor:
        with mc.check_vma():
            return x @ w

    refused = "cannot trace checked code|check_vma|Unexpected type .*meshcomm.mesh.Mesh"  # the last in torch 2.11

    def run() -> None:
        x, w = mc.mark_varying(rows(), "dp"), same()
        with mc.use_mesh(mc.make_mesh(LINE)), pytest.raises(Exception, match=refused):
            compiled(x, w)

    mc.launch(run, ranks=N)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_functions_compile_after_a_check() -> None:
    on_ranks(lambda: Scale.apply(own(), same()))  # type: ignore[no-untyped-call]
    x, w = rows().requires_grad_(), weight()
    compiled = torch.compile(lambda x, w: sq(Scale.apply(x, w)), backend="eager", fullgraph=True)  # type: ignore[no-untyped-call]
    assert_close(torch.autograd.grad(compiled(x, w), x)[0], torch.autograd.grad(sq(x @ w), x)[0])


# ------------------------------------------------------------------------------------------------------------- processes

ON_PROCESSES = ["product", "setitem", "a custom function", "checkpoint"]


def all_on_a_process() -> list[Any]:
    mesh = mc.make_mesh({"dp": 2, "rest": 2})
    index = mesh.coordinate["dp"]
    found = []
    for name in ON_PROCESSES:
        x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
        w = mc.mark_varying(weight().requires_grad_(), ())
        with mc.use_mesh(mesh), mc.check_vma():
            y = mc.all_reduce(PROGRAMS[name](x, w), "dp")
            found.append((index, y.detach(), *torch.autograd.grad(y, [x, w])))
    return found


def test_on_processes(pool4: Any) -> None:
    for found in pool4.run(all_on_a_process):
        for name, (index, y, of_x, of_w) in zip(ON_PROCESSES, found, strict=True):
            expected = right(PROGRAMS[name])
            assert_close(y, expected[0])
            assert_close(of_x, expected[1].chunk(N)[index])
            assert_close(of_w, expected[2])


def sent_typed(given: Tensor) -> Any:
    with checked(axes={"dp": 4}):
        assert kind(given) is None  # what it was elsewhere says nothing of what it is here
        return own() + mc.mark_varying(given, ())[0]


def test_typed_tensors_between_processes(pool4: Any) -> None:
    for index, x in enumerate(pool4.run(sent_typed, mc.mark_varying(ones(2, 3), "dp", mesh=mc.make_mesh(LINE)))):
        assert marked(x) is None
        assert_close(x, ones(2, 3) + index + 1)
