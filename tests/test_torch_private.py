"""One test per private name of torch behind ``meshcomm._torch``: a torch that moves one fails here and not in users' hands."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import math
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.process import reuse
from meshcomm.runtime.transports import dtypes


def test_this_file_knows_every_name() -> None:
    tests = {name.removeprefix("test_name_") for name in globals() if name.startswith("test_name_")}
    assert tests == set(_torch.__all__)


# --------------------------------------------------------------------------------------------------- process groups


def gathers() -> None:
    mc.init()
    group = dist.group.WORLD
    assert group is not None
    rank, out = dist.get_rank(), torch.empty(8)
    _torch.allgather_base(group, out, torch.full((2,), float(rank)), AllgatherOptions()).wait()
    assert_close(out, torch.arange(4.0).repeat_interleave(2))
    getattr(group, _torch.gather_method)(
        rows := torch.empty(8, 3), torch.full((2, 3), float(rank)), AllgatherOptions()
    ).wait()
    assert_close(rows, out.view(8, 1).expand(8, 3))


def stores() -> bytes:
    mc.init()
    store = _torch.default_store()
    if dist.get_rank() == 3:
        store.set("a test's", "value")
    return store.get("a test's")


def test_name_default_store(pool4: Any) -> None:
    assert pool4.run(stores) == [b"value"] * 4


def test_name_allgather_base(pool4: Any) -> None:
    pool4.run(gathers)


test_name_gather_method = test_name_allgather_base


def scatters() -> None:
    mc.init()
    group = dist.group.WORLD
    assert group is not None
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX
    out = torch.empty(2)
    _torch.reduce_scatter_base(group, out, torch.arange(8.0) + dist.get_rank(), options).wait()
    assert_close(out, torch.arange(8.0).view(4, 2)[dist.get_rank()] + 3)
    rows = torch.empty(2, 1)
    getattr(group, _torch.scatter_method)(rows, torch.arange(8.0).view(8, 1) + dist.get_rank(), options).wait()
    assert_close(rows.view(2), out)


def test_name_reduce_scatter_base(pool4: Any) -> None:
    pool4.run(scatters)


test_name_scatter_method = test_name_reduce_scatter_base


def groups() -> None:
    """Of some ranks, in an order of their own, made by its members alone, with others before it on some ranks only."""
    mc.init()
    rank = dist.get_rank()
    if rank in (0, 2):
        pair = _torch.new_group((2, 0), "test_pair", timedelta(seconds=30))
        assert (pair.rank(), pair.size()) == ((2, 0).index(rank), 2)
    if rank in (3, 1, 0):
        three = _torch.new_group((3, 1, 0), "test_three", timedelta(seconds=30))
        assert dist.get_process_group_ranks(three) == [3, 1, 0]
        assert three.group_name == "test_three"
        x = torch.tensor([float(rank)])
        options = dist.BroadcastOptions()
        options.rootRank = 1
        three.broadcast([x], options).wait()
        assert x.item() == 1.0


def batches() -> None:
    mc.init()
    group, rank = dist.group.WORLD, dist.get_rank()
    out = torch.empty(2)
    todo = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), group=group, group_peer=(rank + 1) % 4),
        dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % 4),
    ]
    for work in _torch.begin_messages(todo):
        work.wait()
    assert out.tolist() == [(rank - 1) % 4] * 2


def test_name_begin_messages(pool4: Any) -> None:
    """In a group of a class of somebody's own too: tests/test_devices.py."""
    pool4.run(batches)


def test_name_seeds_in_wait() -> None:
    """torch.cuda has no beginning here; its tracker is there all the same."""
    torch.cuda.manual_seed_all(5)
    every, one, order = _torch.seeds_in_wait(torch.cuda) or pytest.fail("torch.cuda has none")
    assert callable(every[0])
    assert order == [one, every]
    assert _torch.seeds_in_wait(torch) is None


def test_name_set_seeds_in_wait() -> None:
    before = _torch.seeds_in_wait(torch.cuda)
    assert before is not None
    torch.cuda.manual_seed(6)
    assert _torch.seeds_in_wait(torch.cuda) != before
    _torch.set_seeds_in_wait(torch.cuda, before)
    assert _torch.seeds_in_wait(torch.cuda) == before


def test_name_end_backend() -> None:
    """Of NCCL's there is none here: tests/test_gpu.py."""
    ended: list[torch.device] = []

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            return type("Backend", (), {"abort": lambda _: ended.append(device)})()

    group: Any = Group()
    _torch.end_backend(group, torch.device("cuda"))
    assert ended == [torch.device("cuda")]
    assert all(hasattr(dist.ProcessGroup, name) for name in ("_get_backend", "abort"))


def what_moves(device: str) -> list[str]:
    mc.init()
    group = dist.group.WORLD
    assert group is not None
    found = _torch.backend_for(group, torch.device(device))
    methods = ("allreduce", "alltoall_base", "broadcast", _torch.gather_method, _torch.scatter_method)
    assert all(hasattr(found, name) for name in methods)
    found.allreduce([x := torch.ones(1)], dist.AllreduceOptions()).wait()
    own: Any = type("Own", (), {})()
    assert _torch.backend_for(own, torch.device("cpu")) is own
    return [type(found).__name__, str(x.item())]


def test_name_backend_for(pool4: Any) -> None:
    assert pool4.run(what_moves, "cpu") == [["ProcessGroupGloo", "4.0"]] * 4
    assert pool4.run(what_moves, "meta") == [["ProcessGroup", "4.0"]] * 4  # it has none for that


def test_name_new_group(pool4: Any) -> None:
    pool4.run(groups)


def test_name_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend has communicators to make, as NCCL: for this process' device, and before anything is sent."""
    connected: list[torch.device] = []

    class Group:
        backend: Any = SimpleNamespace(supports_splitting=True, eager_connect_single_device=connected.append)

        def size(self) -> int:
            return 2

        def _get_backend(self, device: torch.device) -> Any:
            if self.backend is None:
                raise RuntimeError("No backend type associated with device type toy")
            return self.backend

    group: Any = Group()
    card, config = torch.device("cuda", 3), ["cpu:gloo,cuda:nccl"]
    # A thread has a device of its own, and looking for it begins to use it.
    monkeypatch.delattr(torch.accelerator, "current_device_index")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config[0])
    _torch.connect(group, card)  # of somebody's own
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    _torch.connect(group, torch.device("cpu"))
    config[0] = "cpu:gloo,cuda:gloo"
    _torch.connect(group, card)
    assert not connected
    for config[0] in ("cpu:gloo,cuda:nccl", "nccl"):
        _torch.connect(group, card)
    assert connected == [card, card]
    for backend in (None, SimpleNamespace(supports_splitting=False)):
        group.backend = backend
        _torch.connect(group, card)
    assert len(connected) == 2
    assert hasattr(torch._C._distributed_c10d.Backend, "eager_connect_single_device")
    for name, there in product(("_comm_ptr", "_is_initialized"), (0, 1)):  # NCCL's would make a second one
        connected.clear()
        group.backend = SimpleNamespace(
            supports_splitting=True, eager_connect_single_device=connected.append, **{name: lambda there=there: there}
        )
        assert _torch.is_to_connect(group, card) is not bool(there)
        _torch.connect(group, card)
        assert len(connected) == 1 - there


def test_name_is_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``connect``."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "nccl")
    other: Any = SimpleNamespace(size=lambda: 2)
    assert not _torch.is_to_connect(other, torch.device("cuda", 0))


def test_name_shares_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, shares in (
        ("nccl", True),
        ("cpu:gloo,cuda:nccl", True),
        ("gloo", False),
        ("cpu:gloo,xpu:xccl", False),
    ):
        assert _torch.shares_communicators(backend) is shares
    monkeypatch.setattr(_torch.groups, "_sets", False)
    assert not _torch.shares_communicators("nccl")


def limits() -> str:
    mc.init()
    group = _torch.new_group((0, 1, 2, 3), "test_limits", timedelta(seconds=300))
    _torch.set_limit(group, timedelta(seconds=0.3))
    if dist.get_rank():
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.allreduce([torch.ones(1)]).wait()
    return str(caught.value)


def test_name_set_limit(pool4: Any) -> None:
    assert "imed out" in pool4.run(limits)[0]


def test_name_options_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's NCCL where it is built with it, else of a stand-in."""
    if not hasattr(dist, "ProcessGroupNCCL"):
        kind = SimpleNamespace(Options=lambda is_high_priority_stream: SimpleNamespace(**locals()))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    for backend in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
        options = _torch.options_for(backend, timedelta(seconds=7))
        assert (options.is_high_priority_stream, options._timeout) == (True, timedelta(seconds=7))
    assert _torch.options_for("gloo", timedelta(seconds=7)) is None
    assert _torch.options_for("cpu:gloo,xpu:xccl", timedelta(seconds=7)) is None
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    assert _torch.options_for("nccl", timedelta(seconds=7)) is None


def new_groups(folder: str) -> list[int]:
    """The sizes of the groups that are connected: that of all ranks at init, those of axes with a mesh."""
    seen: list[int] = []
    mc.init()
    rank = dist.get_rank()
    mc.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for place in (_torch, _torch.groups):
            patch.setattr(place, "connect", lambda group, device: seen.append(group.size()))
        mc.init(init_method=f"file://{folder}/all", rank=rank, world_size=4, timeout=200)
        mc.make_mesh({"a": 2, "b": 2})
    return seen


def test_groups_are_connected_while_all_of_their_ranks_are_there(tmp_path: Any) -> None:
    found = mc.launch(new_groups, 4, args=(str(tmp_path),), runtime="processes", timeout=280)
    assert found == [[4, 2, 2]] * 4


FUNCTIONAL = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "wait_tensor",
)  # fmt: skip


def functional_ops() -> None:
    mc.init()
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    name, f = group.group_name, _torch.functional
    x = torch.arange(4.0) + rank
    assert_close(f.wait_tensor(f.all_reduce(x, "sum", name)), 4 * torch.arange(4.0) + 6)
    assert_close(f.wait_tensor(f.all_gather_into_tensor(x[:1], 4, name)), torch.arange(4.0))
    assert_close(f.wait_tensor(f.reduce_scatter_tensor(x, "max", 4, name)), torch.tensor([rank + 3.0]))
    assert_close(f.wait_tensor(f.all_to_all_single(x, [1] * 4, [1] * 4, name)), torch.arange(4.0) + rank)
    assert_close(f.wait_tensor(f.broadcast(x, 2, name)), torch.arange(4.0) + 2)


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_functional_op_exists(op: str) -> None:
    assert callable(getattr(_torch.functional, op))


def test_name_functional(pool4: Any) -> None:
    pool4.run(functional_ops)


# ------------------------------------------------------------------------------------------------------- autograd


def test_name_functorch_active() -> None:
    found: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        found.append(_torch.functorch_active())
        return x.sum()

    assert not _torch.functorch_active()
    grad(fn)(torch.ones(2))
    vmap(fn)(torch.ones(2, 2))
    jvp(fn, (torch.ones(2),), (torch.ones(2),))
    assert found == [True] * 3
    assert not _torch.functorch_active()


def test_name_profiler_on() -> None:
    assert not _torch.profiler_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert _torch.profiler_on()
    assert not _torch.profiler_on()


def test_name_unwrap_if_dead() -> None:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    grad(fn)(torch.tensor([1.0, 2.0]))
    plain = _torch.unwrap_if_dead(kept[0])
    assert plain.tolist() == [1.0, 2.0]
    x = torch.ones(1)
    assert _torch.unwrap_if_dead(x) is x


def test_name_dual_level_open() -> None:
    assert not _torch.dual_level_open()
    with forward_ad.dual_level():
        assert _torch.dual_level_open()
    jvp(lambda x: [x, None][int(not _torch.dual_level_open())], (torch.ones(1),), (torch.ones(1),))
    assert not _torch.dual_level_open()


def test_name_forward_ad_state() -> None:
    assert _torch.forward_ad_state() == (-1, 0)
    with forward_ad.dual_level():
        assert _torch.forward_ad_state() == (0, 0)
    found = []
    jvp(lambda x: [x, found.append(_torch.forward_ad_state())][0], (torch.ones(1),), (torch.ones(1),))
    assert found == [(0, 1)]


def test_name_set_forward_ad_state() -> None:
    with forward_ad.dual_level():
        inside = _torch.forward_ad_state()
        _torch.set_forward_ad_state((-1, 0))
        assert not _torch.dual_level_open()
        _torch.set_forward_ad_state(inside)
        dual = forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0))
        assert forward_ad.unpack_dual(dual * 2).tangent.item() == 6.0
    assert _torch.forward_ad_state() == (-1, 0)


def test_name_version_of() -> None:
    x = torch.zeros(2)
    before = _torch.version_of(x)
    x.add_(1)
    assert _torch.version_of(x) > before


def test_name_versions_of() -> None:
    xs = [torch.zeros(2) for _ in range(3)]
    before = _torch.versions_of(xs)
    for x in xs:
        x.add_(1)
        assert _torch.versions_of(xs) > before
        before = _torch.versions_of(xs)


def test_name_version_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2).add_(1)
    assert _torch.version_hint(x) == _torch.version_of(x) > 0
    monkeypatch.setattr(_torch.views, "_sees_writes", False)
    assert _torch.version_hint(x) == 0
    with pytest.raises(mc.MeshError, match=r"has no torch.Tensor._version, which seeing changes in place needs"):
        _torch.views._no_versions(x)  # what version_of is then


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, order: list[str]) -> Tensor:
        ctx.note = name, order
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        name, order = ctx.note
        order.append(name)
        return g, None, None


def backward_order(first: int | None) -> list[str]:
    x, order = torch.ones(1, requires_grad=True), list[str]()
    early = Noted.apply(x, "early", order)
    late = Noted.apply(x, "late", order)
    if first is not None:
        _torch.set_sequence_number(early.grad_fn, first)
    (early + late).sum().backward()
    return order


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[int], inside: bool) -> Tensor:
        ctx.seen, ctx.inside = seen, inside
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(_torch.backward_pass())
        if ctx.inside:
            with torch.enable_grad():
                Passes.apply(torch.ones(1, requires_grad=True), ctx.seen, False).sum().backward()
            ctx.seen.append(_torch.backward_pass())
        return g, None, None


def test_name_backward_context() -> None:
    """That of the thread which called the pass; on those of autograd in tests/test_devices.py."""
    mine: ContextVar[int] = ContextVar("mine")
    mine.set(5)
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(_torch.backward_context()))
    y.sum().backward()
    assert [each and each.get(mine) for each in seen] == [5 if _stashes() else None]
    assert _torch.backward_context() is None


def _stashes() -> bool:
    return "_stash_obj_in_tls" in inspect.getsource(torch.autograd.graph)  # since torch 2.13 or so


def test_name_backward_pass() -> None:
    seen: list[int] = []
    assert _torch.backward_pass() == -1
    y = Passes.apply(Passes.apply(torch.ones(1, requires_grad=True), seen, False), seen, True).sum()
    y.backward(retain_graph=True)
    first, inner, again, last = seen
    assert first == again == last
    assert inner != first
    y.backward()
    assert seen[4] not in seen[:4]
    assert _torch.backward_pass() == -1


def test_name_current_node() -> None:
    seen: list[Any] = []
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda g: seen.append(_torch.current_node()))
    assert _torch.current_node() is None
    y.sum().backward()
    assert [node._sequence_nr() for node in seen] == [y.grad_fn._sequence_nr()]  # type: ignore[union-attr]


def test_without_the_private_names_no_node_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch.backward, "_current_node", None)
    monkeypatch.setattr(_torch.backward, "_next_number", None)
    assert (_torch.current_node(), _torch.next_sequence_number()) == (None, 0)
    with mc.use_mesh(mc.make_mesh({"dp": 1})):
        y = mc.pvary(torch.ones(1, requires_grad=True), "dp")
    y.sum().backward()
    assert mc.current_mesh() is None


def test_name_next_sequence_number() -> None:
    number = _torch.next_sequence_number()
    y = torch.ones(1, requires_grad=True) * 2
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == number
    assert _torch.next_sequence_number() > number


def test_name_sequence_number() -> None:
    x = torch.ones(1, requires_grad=True)
    first, second = (x * 2).grad_fn, (x * 3).grad_fn
    assert 0 <= _torch.sequence_number(first) < _torch.sequence_number(second)
    assert _torch.sequence_number(object()) == -1


def test_name_alive() -> None:
    kept: list[Tensor] = []
    grad(lambda x: grad(lambda y: (kept.append(y), (x * y).sum())[1])(x).sum())(torch.ones(2))
    assert _torch.unwrapped(kept[0]) is not None
    assert _torch.unwrapped(_torch.alive(kept[0])) is None
    plain = torch.ones(1)
    assert _torch.alive(plain) is plain


def test_name_set_sequence_number() -> None:
    assert backward_order(None) == ["late", "early"]
    assert backward_order(2**62) == ["early", "late"]


def test_name_hooked() -> None:
    """The gradient goes through the hook also where it is differentiated again, and nobody else finds the hook."""
    seen: list[Tensor | None] = []
    holder = _torch.hook_for_nodes(lambda g: seen.append(g) or (None if g is None else g * 5))
    x = torch.ones(2, requires_grad=True)
    y = _torch.hooked(x, holder).clone()
    y.register_hook(lambda g: g + 1)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    assert g.tolist() == [5.0 * (2 + 1)] * 2
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [5.0 * (2 * 5 + 1)] * 2
    _torch.hooked(x, holder).clone().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    assert len(seen) == 3
    assert len(holder._backward_hooks) == 1  # type: ignore[arg-type]


def test_name_carries_tangents() -> None:
    assert _torch.carries_tangents()
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        _torch.carry_tangents(False)
        try:
            assert not _torch.carries_tangents()
            y = x + 1
        finally:
            _torch.carry_tangents(True)
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is None
        assert torch.autograd.forward_ad.unpack_dual(x + 1).tangent is not None


test_name_carry_tangents = test_name_carries_tangents


def test_name_is_view() -> None:
    x = torch.ones(2)
    assert [_torch.is_view(y) for y in (x, x.view(1, 2), x.view(2).detach())] == [False, True, False]


def test_name_hooks_nodes() -> None:
    assert _torch.hooks_nodes == hasattr(torch.ones(1, requires_grad=True).clone().grad_fn, "_register_hook_dict")


def test_name_hook_for_nodes() -> None:
    """It goes with what it holds."""

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    holder = _torch.hook_for_nodes(lambda g, held=held: g)  # type: ignore[misc]
    held.holder = holder  # type: ignore[attr-defined]
    y = _torch.hooked(torch.ones(2, requires_grad=True), holder).clone()
    del held, holder, y
    gc.collect()
    assert gone() is None


def test_name_HOOKED() -> None:  # noqa: N802
    node: Any = _torch.hooked(torch.ones(2, requires_grad=True), _torch.hook_for_nodes(lambda g: g)).grad_fn
    assert node.metadata == {_torch.HOOKED: True}


def test_name_has_sequence_numbers() -> None:
    node = Noted.apply(torch.ones(1, requires_grad=True), "", []).grad_fn
    assert _torch.has_sequence_numbers() == hasattr(node, "_set_sequence_nr")


def test_name_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = torch.ones(2, requires_grad=True), []

    def hook(g: Tensor) -> None:
        seen.append(_torch.after_backward(lambda: seen.append(x.grad is not None)))

    (y := 2 * x).register_hook(hook)
    y.sum().backward()
    assert seen == [True, True]  # asked for, and called when all was done
    monkeypatch.setattr(_torch.backward, "_after_backward", None)
    (y := 2 * x).register_hook(hook)
    y.sum().backward()
    assert seen[2:] == [False]


def test_name_watch_backward() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[tuple[int, int, bool]] = []
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with _torch.watch_backward(lambda roots, inputs, accumulates: seen.append((len(roots), len(inputs), accumulates))):
        (x * y).sum().backward()
        torch.autograd.backward([(x * y).sum(), x.sum()], inputs=[x])
        torch.autograd.grad((x * y).sum(), [x, y])
    assert seen == [(1, 0, True), (2, 1, True), (1, 2, False)]
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]


def test_watch_backward_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.autograd._engine_run_backward
    monkeypatch.setattr(_torch.backward, "_engine", None)
    with _torch.watch_backward(lambda *_: pytest.fail("called")):
        assert torch.autograd._engine_run_backward is own


def test_name_generator_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    torch.empty(5).normal_(generator=one)
    mine, others = _torch.generator_cells(one), _torch.generator_cells(other)
    assert mine is not None
    assert others is not None
    others[:] = mine
    assert other.initial_seed() == 3
    assert torch.equal(other.get_state(), one.get_state())
    assert torch.equal(torch.randn(900, generator=other), torch.randn(900, generator=one))
    for name, value in {"_WORDS": 600, "_BEFORE": 12, "_FARTHEST": 30}.items():  # of a torch that keeps them otherwise
        with monkeypatch.context() as patch:
            patch.setattr(_torch.random, name, value)
            assert _torch.generator_cells(one) is None
    monkeypatch.setattr(_torch.random, "_CDATA", False)
    assert _torch.generator_cells(one) is None


def test_name_leaves_of_graph() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    frozen = torch.ones(2)
    found = list(_torch.leaves_of_graph([(x * y + x.detach() * frozen).sum(), y, frozen, x.sum()]))
    assert {id(each) for each in found} == {id(x), id(y)}
    edge = torch.autograd.graph.get_gradient_edge((x * 2).sum())
    assert [each is x for each in _torch.leaves_of_graph([edge])] == [True]


def test_name_nodes_of_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge((x * 2).sum())
    names = [type(each).__name__ for each in _torch.nodes_of_graph([edge, torch.ones(1)])]
    assert names == ["SumBackward0", "MulBackward0", "AccumulateGrad"]


def test_name_function_of() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    x = torch.ones(2, requires_grad=True)
    assert _torch.function_of(Twice.apply(x).grad_fn) is Twice
    assert _torch.function_of((x * 2).grad_fn) is None


def test_name_attention_of_linears() -> None:
    whole = torch.nn.functional.multi_head_attention_forward
    heard = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            inside = _torch.attention_of_linears(func)
            with self if inside else contextlib.nullcontext():
                return (inside or func)(*args, **(kwargs or {}))

    layer, x = torch.nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    expected = layer(x, x, x)
    with Mode():
        found = layer(x, x, x)
    torch.testing.assert_close(found, expected)
    assert heard.count(whole) == 1
    assert heard.count(torch.nn.functional.linear) == 2
    assert _torch.attention_of_linears(torch.nn.functional.linear) is None


def test_name_keeps_tensors() -> None:
    x = torch.ones(2, requires_grad=True)
    assert [_torch.keeps_tensors(y.grad_fn) for y in (x * x, x.exp(), x.view(2, 1), x + x)] == [
        True,
        True,
        False,
        False,
    ]


def test_name_watch_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    looker = functools.partial(seen.append, "begun")
    monkeypatch.setattr(_torch.backward, "_checkpoint_lookers", [])

    class CheckpointFunction(torch.autograd.Function):  # somebody else's
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    for _ in range(2):
        _torch.watch_checkpoints(looker)
    x = torch.ones(1, requires_grad=True)
    CheckpointFunction.apply(checkpoint(torch.sin, x, use_reentrant=True)).backward()
    assert seen == ["begun"] * 2
    assert x.grad == 2 * x.cos()
    checkpoint(torch.sin, x, use_reentrant=False)
    assert len(seen) == 2


def test_name_forward_ad_shared() -> None:
    """Two holders of one level: the first to leave does not wipe the other's tangents."""
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    with _torch.forward_ad_shared():
        first = forward_ad.dual_level()
        first.__enter__()
        one = _torch.forward_ad_state()
        dual = forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0))
        _torch.set_forward_ad_state((-1, 0))  # the other thread's turn
        with forward_ad.dual_level():
            other = forward_ad.make_dual(torch.ones(1), torch.full((1,), 5.0))
            assert forward_ad.unpack_dual(other * 2).tangent.item() == 10.0
        assert _torch.forward_ad_state() == (-1, 0)
        _torch.set_forward_ad_state(one)
        assert forward_ad.unpack_dual(dual * 2).tangent.item() == 6.0
        first.__exit__(None, None, None)
        assert not _torch.dual_level_open()
    assert (forward_ad.enter_dual_level, forward_ad.exit_dual_level) == (enter, leave)
    with forward_ad.dual_level():
        fresh = torch.ones(1)
        assert forward_ad.unpack_dual(fresh).tangent is None


class Square(torch.autograd.Function):
    """As a Function with a saved input has to be for jvp of jvp."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        with _torch.forward_mode_on():
            return 2 * _torch.primal_of(ctx.saved_tensors[0]) * t


def test_name_has_tangent() -> None:
    x = torch.ones(2)
    assert not _torch.has_tangent(x)
    with forward_ad.dual_level():
        assert _torch.has_tangent(forward_ad.make_dual(x, x))
        assert not _torch.has_tangent(x)
        assert not _torch.has_tangent(torch.ones(2, dtype=torch.int64))

    def body(x: Tensor) -> Tensor:
        assert _torch.has_tangent(x)
        assert not _torch.has_tangent(x.detach())
        return x

    torch.func.jvp(body, (x,), (x,))


INNER: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda body: torch.func.grad(lambda v: body(v).sum())(torch.ones(2)),
    "jvp": lambda body: jvp(body, (torch.ones(2),), (torch.ones(2),)),
    "vmap": lambda body: torch.func.vmap(body)(torch.ones(3, 2)),
    "vjp of a vmap": lambda body: torch.func.vjp(torch.func.vmap(body), torch.ones(3, 2)),
    "a vmap in a grad": lambda body: torch.func.grad(lambda u: torch.func.vmap(body)(torch.stack([u, u])).sum())(
        torch.ones(2)
    ),
}


@pytest.mark.parametrize("inner", INNER)
def test_tangents_of_an_outer_level_are_heard_of(inner: str) -> None:
    asked = []

    def outer(w: Tensor) -> Tensor:
        constant = torch.ones(2)

        def body(v: Tensor) -> Tensor:
            asked.extend(
                [
                    _torch.has_tangent(w),
                    _torch.has_tangent(w * v),
                    not _torch.has_tangent(constant),
                    not _torch.has_tangent(w.detach()),
                    not _torch.has_tangent(torch.ones(2, dtype=torch.int64)),
                    inner == "jvp" or not _torch.has_tangent(v),
                ]
            )
            return v * w

        INNER[inner](body)
        return w

    jvp(outer, (torch.ones(2),), (torch.ones(2),))
    assert asked
    assert all(asked), asked
    if inner == "jvp":  # torch refuses it in a dual level
        return
    asked.clear()
    with forward_ad.dual_level():
        outer(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert asked
    assert all(asked), asked


def test_name_forward_mode_on() -> None:
    def first(x: Tensor) -> Tensor:
        return jvp(lambda x: Square.apply(x.sin()), (x,), (torch.ones(2),))[1]

    x = torch.tensor([1.0, 2.0])
    assert_close(first(x), (2 * x).sin())
    assert_close(jvp(first, (x,), (torch.ones(2),))[1], 2 * (2 * x).cos())


def test_name_primal_of() -> None:
    x = torch.ones(2)
    with forward_ad.dual_level():
        primal = _torch.primal_of(forward_ad.make_dual(x, torch.ones(2)))
        assert forward_ad.unpack_dual(primal).tangent is None
    assert_close(primal, x)
    assert_close(_torch.primal_of(x), x)


class Listed(TorchDispatchMode):
    """Which operations it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_name_dispatch_modes() -> None:
    assert _torch.dispatch_modes() == 0
    with Listed():
        assert _torch.dispatch_modes() == 1


def test_name_function_modes() -> None:
    assert _torch.function_modes() == 0
    with torch.device("meta"):
        assert _torch.function_modes() == 1


def test_name_outside_dispatch_modes() -> None:
    class Measures(Listed):
        sees_meshcomm = True

    with FakeTensorMode(), Listed() as noted, Measures() as measures:
        with _torch.outside_dispatch_modes():
            x = torch.ones(2).neg()
        x.abs()
    assert type(x) is FakeTensor
    assert (noted.seen, measures.seen) == (["abs"], ["ones", "neg", "abs"])

    def traced(x: Tensor) -> Tensor:
        with _torch.outside_dispatch_modes():
            return x.neg()

    assert "neg" in make_fx(traced)(torch.ones(2)).code
    assert _torch.outside_dispatch_modes() is _torch.outside_dispatch_modes()  # nothing is made where there is no mode


def test_name_out_of_graphs() -> None:
    seen = []

    def inner() -> None:
        seen.append(torch.compiler.is_compiling())

    @_torch.out_of_graphs
    def outer() -> None:
        seen.append(torch.compiler.is_compiling())
        inner()

    @torch.compile(backend="eager")
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        outer()
        return y * 2

    assert fn(torch.ones(2)).tolist() == [4.0, 4.0]
    assert seen == [False, False]


def test_name_lasting() -> None:
    def make(n: int) -> Tensor:
        return torch.ones(n)

    for mode in (contextlib.nullcontext, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")):
        with mode():
            x = _torch.lasting(make, 2)
        assert type(x) is Tensor
        assert not x.is_inference()
        assert x.tolist() == [1, 1]
    kept: list[Tensor] = []
    vmap(lambda x: x + (kept.append(_torch.lasting(make, 3)) or 1))(torch.zeros(2))
    assert kept[0].add_(1).tolist() == [2, 2, 2]


def test_name_plain_now() -> None:
    assert _torch.plain_now()
    with FakeTensorMode():
        assert not _torch.plain_now()
    assert not vmap(lambda x: x + _torch.plain_now())(torch.zeros(2)).any()
    assert _torch.plain_now()


@pytest.mark.parametrize("grad", [False, True])
def test_outside_transforms_leaves_grad_mode_as_it_is(grad: bool) -> None:
    with torch.set_grad_enabled(grad), _torch.outside_transforms():
        assert torch.is_grad_enabled() == grad


def test_name_outside_transforms() -> None:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        with _torch.outside_transforms():
            kept.append(torch.tensor(2.0))
        return (x * kept[-1]).sum()

    jvp(grad(fn), (torch.ones(2),), (torch.ones(2),))
    with torch.inference_mode():
        fn(torch.ones(2))
    # Each serves later where a wrapped or an inference tensor would raise.
    for constant in kept:
        x = torch.ones(2, requires_grad=True)
        (g,) = torch.autograd.grad((x * x * constant).sum(), x, create_graph=True)
        assert_close(torch.autograd.grad((g * constant).sum(), x)[0], torch.full((2,), 8.0))


# ------------------------------------------------------------------------------------------------------- compiling


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_name_copied_in_graph(dtype: torch.dtype) -> None:
    """What it is for is in test_compile.py: results on one rank."""
    for x in (torch.tensor(1.0), torch.arange(6.0).view(2, 3).t(), torch.empty(0, 2)):
        x = x.to(dtype)
        y = _torch.copied_in_graph(x)
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert y.tolist() == x.tolist()
        assert not x.numel() or y.data_ptr() != x.data_ptr()


@_torch.at_trace_time
def constant_of(text: str) -> int:
    return len([ord(letter) for letter in sorted(text)])


def test_name_at_trace_time() -> None:
    compiled = torch.compile(lambda x: x * constant_of("four"), fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 4.0


@_torch.in_graph
def opaque(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError
    return x * 3


def compiled_opaque(x: Tensor) -> Tensor:
    _torch.let_into_graph()
    return opaque(x) + 1


def test_name_in_graph() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    y = torch.compile(compiled_opaque, fullgraph=True, backend=backend)(torch.ones(1))
    assert y.item() == 4.0
    assert "opaque" in graphs[0], graphs


def test_name_let_into_graph() -> None:
    assert _torch.let_into_graph() is True
    assert _torch.let_into_graph() is True  # with nothing left to do


def test_name_depends_on_data() -> None:
    found: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        known = [node.meta["example_value"] for node in graph.graph.nodes if "example_value" in node.meta]
        found.append([_torch.depends_on_data(x.shape[0]) for x in known if isinstance(x, Tensor)])
        return graph

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compiler.reset()
        torch.compile(lambda x: x.nonzero() + 1, fullgraph=True, dynamic=True, backend=backend)(torch.ones(3))
    assert found == [[False, True, True]]
    assert not _torch.depends_on_data(3)


def test_name_first_calls_unwatched() -> None:
    watched: list[bool] = []

    @torch.library.custom_op("meshcomm_tests::plus_one", mutates_args=())
    def plus_one(x: Tensor) -> Tensor:
        watched.append("__torch_dispatch__" in [frame.name for frame in traceback.extract_stack()])
        return x + 1

    plus_one.register_fake(torch.empty_like)

    def call() -> None:
        torch.compiler.reset()
        assert torch.compile(lambda x: plus_one(x), fullgraph=True, backend="aot_eager")(torch.ones(1)).item() == 2.0

    config: Any = importlib.import_module("torch._functorch.config")
    known = hasattr(config, "check_custom_op_aliasing")
    with config.patch(check_custom_op_aliasing=True) if known else contextlib.nullcontext():
        call()
        assert _torch.first_calls_unwatched() is known
        call()
    assert watched == [known, False]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_name_in_one_graph(fullgraph: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + _torch.in_one_graph(), fullgraph=fullgraph, backend="eager")
    assert compiled(torch.zeros(1)).item() == fullgraph
    assert not _torch.in_one_graph()


def test_name_transformed_in_graph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x * (2 + _torch.transformed_in_graph()), fullgraph=True, backend="eager")
    assert compiled(torch.ones(())).item() == 2.0
    inside = torch.compile(torch.func.grad(lambda x: x * (2 + _torch.transformed_in_graph())), backend="eager")
    assert inside(torch.ones(())).item() == 3.0


@_torch.in_graph
def tripled_again(x: Tensor) -> Tensor:
    with _torch.computed_again():
        return x * 3


def test_name_computed_again() -> None:
    """The product is no output of forward, and backward makes it again."""
    texts: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        texts.append(graph.code)
        return make_boxed_func(graph)

    def fn(x: Tensor) -> Tensor:
        _torch.let_into_graph()
        return tripled_again(x).exp().sin()

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x = torch.ones(2, requires_grad=True)
    torch.compile(fn, fullgraph=True, backend=backend)(x).sum().backward()
    assert_close(x.grad, torch.full((2,), 3 * math.exp(3) * math.cos(math.exp(3))))
    assert ", 3)" in texts[1], texts


# --------------------------------------------------------------------------------- many tensors in one, and out of it

MANY = [torch.arange(6.0).view(2, 3).t(), torch.ones(()), torch.ones(0, 2), torch.ones(1).expand(3), torch.arange(2.0)]


def test_name_packed() -> None:
    assert _torch.packed(MANY).tolist() == [[0, 3, 1, 4, 2, 5, 1, 1, 1, 1, 0, 1]]
    flipped = torch.tensor([1j, 2.0]).conj()
    assert _torch.packed([flipped, flipped.resolve_conj()]).tolist() == [[-1j, 2, -1j, 2]]
    assert _torch.packed([flipped, flipped.resolve_conj()], 2).tolist() == [[-1j, -1j], [2, 2]]
    assert _torch.packed([torch.arange(8.0).view(2, 4).t(), torch.arange(2.0)], 2).tolist() == [
        [0, 4, 1, 5, 0],
        [2, 6, 3, 7, 1],
    ]


def test_name_parted() -> None:
    whole = torch.arange(12.0, requires_grad=True)
    parts = _torch.parted(whole, MANY)
    assert [part.shape for part in parts] == [x.shape for x in MANY]
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == whole.tolist()
    assert all(part.data_ptr() == whole.data_ptr() + 4 * at for part, at in zip(parts[:2], (0, 6), strict=True))
    assert not any(part.requires_grad or part._is_view() for part in parts)
    weight = torch.ones(3, 2, requires_grad=True)
    parts[0].mul_(weight)  # no business of the others'
    assert [part.requires_grad for part in parts[:2]] == [True, False]


def test_name_parted_in_shape() -> None:
    like = [torch.empty(2, 3), torch.empty(2, 0, 4), torch.empty(5), torch.empty(0)]
    whole = torch.arange(11.0)
    parts = _torch.parted_in_shape(whole, like, [1, 3])
    assert [part.shape for part in parts] == [x.shape for x in like]
    assert torch.cat([part.reshape(-1) for part in parts]).equal(whole)
    assert parts[2].data_ptr() == whole[6:].data_ptr()


def test_name_apart() -> None:
    whole = torch.arange(11.0, requires_grad=True)
    parts = _torch.apart(whole, [6, 0, 5], [(0, torch.empty(()).expand(2, 3)), (1, torch.empty(()).expand(2, 0, 4))])
    assert [part.shape for part in parts] == [(2, 3), (2, 0, 4), (5,)]
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == whole.tolist()
    assert [parts[0].data_ptr(), parts[2].data_ptr()] == [whole.data_ptr(), whole.data_ptr() + 4 * 6]
    assert not any(part.requires_grad or part._is_view() for part in parts)
    parts[0].mul_(torch.ones(3, requires_grad=True))  # no business of the others'
    assert [part.requires_grad for part in parts] == [True, False, False]
    assert [whole._version, *[part._version for part in parts]] == [0, 1, 0, 0]


# --------------------------------------------------------------------------------------------------------- pytrees

TREE = {"w": [torch.zeros(1), (None, 3)], "b": torch.ones(2)}


def test_name_tree_flatten() -> None:
    leaves, _ = _torch.tree_flatten(TREE)
    assert [type(leaf) for leaf in leaves] == [Tensor, type(None), int, Tensor]


def test_name_tree_unflatten() -> None:
    leaves, spec = _torch.tree_flatten(TREE)
    again = _torch.tree_unflatten(leaves, spec)
    assert again["w"][1] == (None, 3)
    assert again["b"] is TREE["b"]


def test_name_tree_leaves_with_path() -> None:
    found = _torch.tree_leaves_with_path(TREE)
    assert [path for path, _ in found] == ["['w'][0]", "['w'][1][0]", "['w'][1][1]", "['b']"]
    assert [leaf for _, leaf in found][1:3] == [None, 3]


def test_name_saved_hooks_on_top() -> None:
    assert _torch.saved_hooks_on_top() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _torch.saved_hooks_on_top() == (pack, unpack)
    assert _torch.saved_hooks_on_top() is None


def test_name_not_users() -> None:
    """Warnings are errors here: torch 2.15 warns where a user's hooks are around a checkpoint that saves some results."""
    seen: list[Tensor] = []
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(3, requires_grad=True)

    def pack(y: Tensor) -> Tensor:
        seen.append(y)
        return y

    def saved(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    _torch.not_users(pack)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        y = checkpoint(lambda x: torch.sin(w @ x), x * 1, use_reentrant=False, context_fn=contexts)
        (y * y).sum().backward()
    assert any(each is y for each in seen)
    assert torch.allclose(x.grad, (2 * torch.sin(w @ x) * torch.cos(w @ x)) @ w)


class Table(dict[str, Any]):
    """Counts the looks into it."""

    looks = 0

    def __getitem__(self, name: str) -> Any:
        self.looks += 1
        return super().__getitem__(name)


def test_name_own_parameters() -> None:
    outer = torch.nn.Sequential(torch.nn.Linear(2, 1))
    assert not _torch.own_parameters(outer)
    assert _torch.own_parameters(outer[0]) == {"weight": outer[0].weight, "bias": outer[0].bias}


def test_name_tables_of() -> None:
    """Of a scripted and of a traced part too, whose forward takes what is put into the table."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DeprecationWarning, and since torch 2.15 a FutureWarning
        modules = plain, torch.jit.script(plain), torch.jit.trace(plain, torch.ones(2))
    for module in modules:
        _, children = _torch.tables_of(module)
        table, _ = _torch.tables_of(children["0"])
        own, other = table["weight"], 2 * plain[0].weight
        table["weight"] = other
        assert module(torch.ones(2)).item() == pytest.approx(other.sum().item())
        assert table["weight"] is other
        table["weight"] = own
        assert children["0"].weight is own is plain[0].weight


def test_name_set_own_parameters() -> None:
    """The module looks into the new table, and takes names and parameters from its items."""
    layer = torch.nn.Linear(2, 1)
    table = Table(_torch.own_parameters(layer))
    _torch.set_own_parameters(layer, table)
    layer(torch.ones(2))
    assert table.looks == 2
    assert [name for name, _ in layer.named_parameters()] == list(layer.state_dict()) == ["weight", "bias"]
    assert table.looks == 2


# ------------------------------------------------------------------------------------------------ watching operations


def test_name_unwrapped() -> None:
    x = torch.ones(2)
    seen: list[Any] = []

    def fn(y: Tensor) -> Tensor:
        seen.append((_torch.unwrapped(y), _torch.unwrapped(x)))
        return y.sum()

    grad(fn)(x)
    vmap(fn)(x[None])
    assert seen[0][0] is x
    assert seen[1][0] is not None
    assert seen[1][0].shape == (1, 2)
    assert [outer for _, outer in seen] == [None, None]


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g


@pytest.mark.parametrize("without", [False, True])
def test_name_plain_apply(monkeypatch: pytest.MonkeyPatch, without: bool) -> None:
    """Under a transform it makes a node outside of it."""
    if without:
        monkeypatch.setattr(_torch.autograd, "_plain", None)
    w, made, apply = torch.ones(2, requires_grad=True), list[Tensor](), _torch.plain_apply(Thrice)

    def fn(z: Tensor) -> Tensor:
        with _torch.outside_transforms():
            made.append(apply(w))
        return (z * made[-1]).sum()

    fn(torch.ones(2))
    if without:
        with pytest.raises(mc.MeshError, match=r"(?s)Work.wait: torch .* has no torch\..*_SingleLevelFunction"):
            grad(fn)(torch.ones(2))
    else:
        assert_close(grad(fn)(torch.ones(2)), w)
    for y in made:
        assert_close(torch.autograd.grad(y.sum(), w)[0], torch.full((2,), 3.0))


@pytest.mark.parametrize("without", [False, True])
def test_name_shortened(monkeypatch: pytest.MonkeyPatch, without: bool) -> None:
    """Forward, backward, derivatives of backward, a graph that is kept, and the attributes are as they were."""
    monkeypatch.setattr(_torch.autograd, "_nodes", not without)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor, ctx.more = factor, "any"
            ctx.save_for_backward(x)
            return factor * x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            return g * 3 * ctx.factor * x**2, None

    name = Scaled._backward_cls.__name__  # type: ignore[attr-defined]
    assert _torch.shortened(Scaled, "factor") is Scaled
    apply: Any = super(torch.autograd.Function, Scaled).apply  # type: ignore[misc]
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = apply(x, 2.0)
    assert y.grad_fn.name() == name
    assert type(y.grad_fn).__module__ == "torch.autograd.function"
    assert y.grad_fn.factor == 2.0
    assert vars(y.grad_fn) == ({"factor": 2.0, "more": "any"} if without else {"more": "any"})
    for _ in range(2):
        assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.tensor([6.0, 24.0]))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_close(torch.autograd.grad(g.sum(), x)[0], torch.tensor([12.0, 24.0]))
    assert torch.autograd.gradcheck(lambda x: apply(x, 2.0), x.detach().double().requires_grad_())


def test_name_view_again() -> None:
    x = torch.arange(6.0).view(2, 3)
    other = torch.arange(6.0, 12.0).view(2, 3).requires_grad_()
    for view in (x.T, x[1], x.unbind(1)[2], x[:, 1:].T, x.chunk(2)[1]):
        again = _torch.view_again(view, other.view(6))  # the base is flat
        assert again.shape == view.shape
        assert torch.equal(again, view + 6)
        assert again.requires_grad


class Counting(TorchFunctionMode):
    """Counts what it sees."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_name_without_modes() -> None:
    x = torch.ones(2)
    with Counting() as mode:
        x + x
        with _torch.without_modes():
            x + x
            torch.zeros(2)
        x + x
    assert mode.seen == 2


def test_name_watch_total_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are seen, under a name that was imported before too; clipping by a number, or by a given norm, is none."""
    home = torch.nn.utils.clip_grad
    monkeypatch.setattr(
        home, _torch.watching._GROUPING, getattr(home, _torch.watching._GROUPING)
    )  # put back at the end
    monkeypatch.setattr(_torch.watching, "_lookers", [])
    seen: list[int] = []
    p, total = torch.nn.Parameter(torch.ones(2)), torch.nn.utils.get_total_norm
    p.grad = torch.ones(2)

    def look(tensors: list[Tensor]) -> None:
        seen.extend(map(id, tensors))

    _torch.watch_total_norms(look)
    _torch.watch_total_norms(look)
    torch.nn.utils.clip_grad_value_([p], 1.0)
    torch.nn.utils.clip_grads_with_norm_([p], 1.0, torch.tensor(1.0))
    assert seen == []
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    total([p.grad])
    assert seen == [id(p.grad)] * 2


def test_without_total_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has it in another shape nothing is seen."""
    monkeypatch.setattr(_torch.watching, "_GROUPING", "no_such_name")
    monkeypatch.setattr(_torch.watching, "_lookers", [])
    _torch.watch_total_norms(lambda tensors: None)
    assert not hasattr(torch.nn.utils.clip_grad, "no_such_name")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def test_name_watch_operations() -> None:
    seen: list[tuple[str, int]] = []
    with _torch.watch_operations(lambda func, args, result: seen.append((_torch.operation_name(func), len(args)))):
        torch.arange(torch.tensor(2))
    torch.ones(2)
    assert ("aten::_local_scalar_dense", 1) in seen
    assert "aten::ones" not in dict(seen)


def test_name_watch_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors; the storage of a copy has no tensor yet."""
    monkeypatch.setattr(torch.UntypedStorage, "copy_", torch.UntypedStorage.copy_)  # put back at the end
    seen: list[torch.UntypedStorage] = []
    _torch.watch_storages(seen.append)
    x, y = torch.zeros(2), torch.ones(2)
    x.untyped_storage().copy_(y.untyped_storage().clone())
    assert (x.tolist(), [each is x.untyped_storage() for each in seen]) == ([1, 1], [True])
    monkeypatch.setattr(_torch.watching, "_count_of", None)
    y.untyped_storage().clone()
    assert len(seen) == 2


def test_name_of_tensor() -> None:
    x = torch.ones(2)
    storage = x.untyped_storage()
    assert _torch.of_tensor(storage)
    view = x[1:]
    del x
    assert _torch.of_tensor(storage)
    del view
    assert not _torch.of_tensor(storage)


def test_name_counts_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be told no memory of results is kept."""
    assert _torch.counts_uses()
    monkeypatch.setattr(_torch.watching, "_count_of", None)
    assert not _torch.counts_uses()
    reserve = reuse.Reserve()
    for _ in range(3):
        assert reserve.empty((2**20,), torch.empty(0)).numel() == 2**20
    assert reserve.held == 0


def test_name_watch_capsules(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (torch.utils.dlpack, torch):
        monkeypatch.setattr(place, "to_dlpack", getattr(place, "to_dlpack", None), raising=False)
    seen: list[torch.Tensor] = []
    _torch.watch_capsules(seen.append)
    x = torch.ones(2)
    assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).tolist() == [1, 1]
    assert [each is x for each in seen] == [True]


def test_name_watch_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of lazy modules are made in another way, and are not seen before they have a shape."""
    monkeypatch.setattr(torch.nn.Parameter, "__new__", torch.nn.Parameter.__new__)  # put back at the end
    seen: list[Any] = []
    _torch.watch_parameters(lambda made, data: seen.append((made, data)))
    x = torch.ones(2)
    made = torch.nn.Parameter(x, requires_grad=False)
    assert (type(made), made.requires_grad, made.data_ptr() == x.data_ptr()) == (torch.nn.Parameter, False, True)
    assert [(y is made, data is x) for y, data in seen] == [(True, True)]
    assert torch.nn.LazyLinear(2).weight is not None
    assert copy.deepcopy(made).tolist() == torch.nn.Parameter(data=x).tolist() == [1, 1]
    assert len(seen) == 4  # a lazy module begins as one of size 0


def test_name_watch_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils, "swap_tensors", torch.utils.swap_tensors)
    seen: list[Any] = []

    def watch(own: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        own(x, y)
        seen.append((x, y))

    _torch.watch_swaps(watch)
    x, y = torch.zeros(2), torch.ones(3)
    torch.utils.swap_tensors(x, y)
    assert (x.tolist(), y.tolist(), len(seen)) == ([1, 1, 1], [0, 0], 1)


def test_name_watch_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by way of ``.apply`` are seen, and stay what they are."""
    function = torch.autograd.Function
    monkeypatch.setattr(function, "apply", function.__dict__["apply"])  # put back at the end
    seen: list[Any] = []

    def watch(cls: Any, own: Any, args: Any, kwargs: Any) -> Any:
        seen.append(cls)
        return own(cls, *args, **kwargs)

    _torch.watch_functions(watch)
    x = torch.ones(2, requires_grad=True)
    y = Doubled.apply(x)
    y.sum().backward()
    assert x.grad is not None
    assert (y.tolist(), x.grad.tolist(), seen) == ([2, 2], [2, 2], [Doubled])
    assert jvp(lambda x: 3 * x, (x.detach(),), (x.detach(),))[1].tolist() == [3, 3]


# -------------------------------------------------------------------------------------------------------- attention


def attention() -> tuple[list[Tensor], Tensor]:
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[3] = False
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 6, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)], seen


def kernel() -> _torch.AttentionKernel:
    (q, k, v), seen = attention()
    found = _torch.attention_kernel(_torch.Attention(q, k, v, seen, False, 0.3))
    assert isinstance(found, _torch.AttentionKernel)
    return found


def test_name_elementwise(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On CUDA: tests/test_gpu_uses.py."""
    module: Any = _torch.compiling
    code = dtypes.FLIPPED
    x = torch.ones(3)
    assert _torch.elementwise(code, x) is None, "the CPU has no kernels that are made when they are called"
    assert module._kernel_of(code).kernel_name == "meshcomm_flipped"  # as torch reads it
    device = SimpleNamespace(is_cuda=True, dtype=x.dtype, device=torch.device("cuda", 0), data_ptr=lambda: 64)
    capturing, told = [False], []  # type: list[bool], list[Any]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(module, "Tensor", SimpleNamespace)
    monkeypatch.setattr(module, "_ran", set())
    monkeypatch.setattr(module, "_failed", [])
    monkeypatch.setattr(module, "_made", lambda code: lambda x: told.append(x) or "flipped")
    capturing[0] = True
    assert _torch.elementwise(code, device) is None, "it would be compiled while a graph is captured"
    capturing[0] = False
    assert _torch.elementwise(code, device) == "flipped"
    capturing[0] = True
    assert _torch.elementwise(code, device) == "flipped"
    monkeypatch.setattr(module, "_made", lambda code: lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        _torch.elementwise(code, device)
    monkeypatch.setattr(module, "_made", lambda code: lambda x: (_ for _ in ()).throw(RuntimeError("no compiler")))
    with caplog.at_level("INFO", "meshcomm"):
        assert _torch.elementwise(code, device) is None
    assert "no compiler" in caplog.text
    monkeypatch.setattr(module, "_made", lambda code: pytest.fail("it is asked once"))
    assert _torch.elementwise(code, device) is None


def test_name_Attention() -> None:  # noqa: N802
    (q, k, v), seen = attention()
    assert tuple(_torch.Attention(q, k, v, seen, False, 0.3)) == (q, k, v, seen, False, 0.3)


def test_name_attention_kernel() -> None:
    (q, k, v), _ = attention()
    for given, why in (
        ((q, k[:, :, :0], v[:, :, :0]), "that would end the process"),
        ((q, k, v[..., :3]), "values narrower than keys"),
        ([x.to("meta") for x in (q, k, v)], "no kernel of a device without memory"),
    ):
        assert _torch.attention_kernel(_torch.Attention(*given, None, False, 0.3)) is None, why


def test_name_settings_of_torch() -> None:
    first, dtype = _torch.settings_of_torch(), torch.get_default_dtype()
    assert _torch.without_levels(first) == first == _torch.settings_of_torch()
    assert _torch.settings._flash() is torch.backends.cuda.flash_sdp_enabled()  # type: ignore[attr-defined]
    assert first[0] is dtype
    changes: dict[str, Any] = {
        "math alone": lambda: sdpa_kernel(SDPBackend.MATH),
        "flash alone": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        "efficient alone": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        "cudnn alone": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
        "anomalies, NaN": lambda: torch.autograd.detect_anomaly(check_nan=True),
        "forward mode": forward_ad.dual_level,
    }
    seen = {"none": first}
    for name, change in changes.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with change():
                seen[name] = _torch.settings_of_torch()
                _torch.settle_torch(first)
                assert _torch.settings_of_torch() == first, name
                _torch.settle_torch(seen[name])
                assert _torch.settings_of_torch() == seen[name], name
        assert _torch.settings_of_torch() == first, name
    assert len(set(map(str, seen.values()))) == len(seen)
    assert _torch.without_levels(seen["forward mode"]) == first
    torch.set_default_dtype(torch.float64)
    try:
        assert _torch.settings_of_torch() == (torch.float64, *first[1:])
    finally:
        _torch.settle_torch(first)
    assert torch.get_default_dtype() is dtype


test_name_settle_torch = test_name_settings_of_torch
test_name_without_levels = test_name_settings_of_torch


def test_name_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Through(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def asked() -> list[str]:
        found = [_torch.default_device().type]
        with torch.device("meta"):
            found.append(_torch.default_device().type)
            with Through():
                found.append(_torch.default_device().type)
        torch.set_default_device("meta")
        try:
            found.append(_torch.default_device().type)
        finally:
            torch.set_default_device(None)
        return [*found, _torch.default_device().type]

    assert asked() == ["cpu", "meta", "meta", "meta", "cpu"]
    monkeypatch.setattr(_torch.transforms, "function_modes", lambda: 1)
    assert asked() == ["cpu", "meta", "meta", "meta", "cpu"]


def test_name_make_graphs() -> None:
    with torch.enable_grad():
        _torch.make_graphs(False)
        assert not torch.is_grad_enabled()
        _torch.make_graphs(True)
        assert torch.is_grad_enabled()


def test_name_attention_order() -> None:
    order, others = _torch.attention_order(), _torch.attention_of_others()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert _torch.attention_order()[:2] == [int(SDPBackend.MATH), int(SDPBackend.FLASH_ATTENTION)]
        assert not _torch.attention_of_others()
        _torch.set_attention_order(order)
        _torch.set_attention_of_others(True)
        assert (_torch.attention_order(), _torch.attention_of_others()) == (order, True)
    assert (_torch.attention_order(), _torch.attention_of_others()) == (order, others)


test_name_set_attention_order = test_name_attention_order
test_name_attention_of_others = test_name_attention_order
test_name_set_attention_of_others = test_name_attention_order


def test_name_AttentionKernel() -> None:  # noqa: N802
    (q, k, v), seen = attention()
    out, lse = kernel().forward(_torch.Attention(q, k, v, seen, False, 0.3))
    z = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~seen, -math.inf)
    p = torch.softmax(z, -1).masked_fill(~seen, 0)
    assert_close(out, p @ v.repeat_interleave(2, 1))
    assert_close(lse, z.logsumexp(-1))
    causal = kernel().forward(_torch.Attention(q, k, v, None, True, 0.3))
    triangle = torch.ones_like(seen).tril()
    assert_close(causal, kernel().forward(_torch.Attention(q, k, v, triangle, False, 0.3)))


def test_its_backward() -> None:
    (q, k, v), seen = attention()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    z = (leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 0.3).masked_fill(~seen, -1e30)
    y = torch.softmax(z, -1).masked_fill(~seen, 0) @ leaves[2].repeat_interleave(2, 1)
    g = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y).cos()
    of = _torch.Attention(q, k, v, seen, False, 0.3)
    out, lse = kernel().forward(of)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    assert_close(kernel().backward(of, g, out, lse), torch.autograd.grad(y, leaves, g))


def test_name_without_memory() -> None:
    with _torch.without_memory():
        x = torch.empty(2**40, device="cpu")
    assert type(x) is FakeTensor
    assert x.untyped_storage().nbytes() == 2**42


def test_name_is_known_here() -> None:
    """Of a device that torch is not built for, a tensor without memory that needs a gradient ends the process."""
    assert _torch.is_known_here("cpu")
    assert _torch.is_known_here("meta")
    assert not all(map(_torch.is_known_here, ("cuda", "xpu")))


def test_name_is_without_memory() -> None:
    with _torch.without_memory():
        x = torch.empty(3)
        w = nn.Parameter(x)
    assert [_torch.is_without_memory(each) for each in (x, w, torch.empty(3))] == [True, True, False]


def test_name_named_arguments() -> None:
    x = torch.ones(2)
    assert _torch.named_arguments(torch.ops.aten.add.Tensor, (x, 3), {"alpha": 2}) == {
        "self": x,
        "other": 3,
        "alpha": 2,
    }


def test_name_kind_of() -> None:
    with _torch.without_memory():
        x = torch.empty(3)
        w = nn.Parameter(x)
    each = (x, w, torch.empty(3), nn.Parameter(torch.empty(3)))
    assert [_torch.kind_of(y) for y in each] == [Tensor, nn.Parameter, Tensor, nn.Parameter]


def test_name_places_like() -> None:
    with _torch.without_memory():
        x, y = torch.empty(6), torch.empty(6)
    place_of = _torch.places_like(x)
    assert place_of(x[2:]) == place_of(x.view(2, 3)) + 8
    assert abs(place_of(x) - place_of(y)) > 2**60
    assert _torch.places_like(torch.empty(1)) is Tensor.data_ptr


def test_name_memory_of() -> None:
    with _torch.without_memory():
        x, y = torch.empty(6), torch.empty(6)
    z = torch.empty(6)
    assert _torch.memory_of(x) == _torch.memory_of(x[2:]) != _torch.memory_of(y)
    assert _torch.memory_of(z[2:]) == z.data_ptr()


def test_name_handled_without_memory() -> None:
    heard: list[str] = []

    def handle(func: Any, args: Any, kwargs: Any, go: Any) -> Any:
        heard.append(_torch.operation_name(func))
        return 7.0 if heard[-1] == "aten::_local_scalar_dense" else go()

    with _torch.handled_without_memory(handle):
        x = torch.ones(2, 3) @ torch.ones(3, 2)
        assert x.sum().item() == 7.0
    assert x.sum().item() == 7.0  # as long as there are such tensors
    assert x.shape == (2, 2)
    assert "aten::mm" in heard


def test_name_operation_name() -> None:
    assert _torch.operation_name(torch.ops.aten.add_.Tensor) == "aten::add_"


def test_name_written_by() -> None:
    x, y, out = torch.ones(1), torch.ones(1), torch.ones(1)
    assert _torch.written_by(torch.ops.aten.add_.Tensor, (x, y), {}) == [x]
    assert _torch.written_by(torch.ops.aten.add.out, (x, y), {"out": out}) == [out]
    assert _torch.written_by(torch.ops.aten.add.Tensor, (x, y), {}) == []


def test_name_gives_views() -> None:
    assert _torch.gives_views(torch.ops.aten.view.default)
    assert not _torch.gives_views(torch.ops.aten.mm.default)


def test_name_UnknownSizeError() -> None:  # noqa: N802
    with _torch.without_memory(), pytest.raises(_torch.UnknownSizeError):
        torch.ones(3).nonzero()


def test_name_watch_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scaler has found of the gradients of an optimizer may be changed before it is read."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(scaler, _torch.watching._UNSCALE, getattr(scaler, _torch.watching._UNSCALE))  # put back
    monkeypatch.setattr(_torch.watching, "_agreeing", [])
    seen: list[Any] = []

    def agree(optimizer: torch.optim.Optimizer, own: Tensor, found: dict[torch.device, Tensor]) -> None:
        seen.append((optimizer, own.item(), {device.type: x.item() for device, x in found.items()}))
        for x in found.values():
            x.fill_(1)

    _torch.watch_unscaled(agree)
    _torch.watch_unscaled(agree)
    p = torch.nn.Parameter(torch.ones(2))
    sgd, made = torch.optim.SGD([p], lr=1.0), scaler("cpu", init_scale=4.0)
    made.scale(p.sum()).backward()
    made.step(sgd)
    made.update()
    assert seen == [(sgd, 0.0, {"cpu": 0.0})]
    assert p.tolist() == [1.0, 1.0]
    assert made.get_scale() == 2.0


def test_without_what_unscales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has it no more nothing is asked."""
    monkeypatch.setattr(_torch.watching, "_unscales", False)
    monkeypatch.setattr(_torch.watching, "_agreeing", [])
    _torch.watch_unscaled(lambda optimizer, own, found: None)
    assert _torch.watching._agreeing == []
