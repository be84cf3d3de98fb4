"""What collectives cost a device beside the communication: kernels, copies, and times that the host waits for it. Counted on
the CPU, on a group that is told to leave all to its backend, as it does where that is NCCL.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm import _torch
from meshcomm.collectives.trees import overlap
from meshcomm.parallel import data_parallel, fully_shard, no_sync, reduce_gradients
from meshcomm.parallel.fsdp.buffers import offload
from meshcomm.parallel.fsdp.groups import Group
from meshcomm.runtime.transports import dtypes

aten = torch.ops.aten
COPIES = {
    aten.clone.default: "clone",
    aten.cat.default: "cat",
    aten.cat.out: "cat",
    aten.copy_.default: "copy",
    aten._to_copy.default: "cast",
}
FREE = {"view", "_unsafe_view", "split", "split_with_sizes", "detach", "empty", "new_empty", "empty_like", "as_strided", "slice",
        "select", "unsqueeze", "alias", "expand", "t", "transpose", "lift_fresh"}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts what is copied, by size, and every operation that would start a kernel."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least
        self.copies: Counter[str] = Counter()
        self.names: list[str] = []
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.reads += func in (aten._local_scalar_dense.default, aten.is_nonzero.default)
        if func.namespace == "aten" and isinstance(result, Tensor) and result.numel() >= self.least:
            if func in COPIES:
                self.copies[COPIES[func]] += 1
            if name not in FREE and not (name == "view" or name.startswith("view_as")):
                self.names.append(name)
        return result


@contextlib.contextmanager
def as_on_a_device(mesh: mc.Mesh, *axes: Any) -> Iterator[None]:
    """Leave all that these axes do with tensors to the backend, as for those that lie on an accelerator; dispatch modes see
    what the library does in backward too.
    """
    links = [mesh.axis(axis).link for axis in axes]
    outside, _torch.outside_dispatch_modes = _torch.outside_dispatch_modes, contextlib.nullcontext
    try:
        for link in links:
            link._on_gloo = False
        yield
    finally:
        _torch.outside_dispatch_modes = outside
        for link in links:
            link._on_gloo = True


# ----------------------------------------------------------------------------------------------- buckets are copied once

N = 1000


def leaves(rank: int, *, grad: bool = False) -> dict[str, Tensor]:
    return {name: torch.full((N,), float(at + rank), requires_grad=grad) for at, name in enumerate("uvw")}


def no_alias(tree: dict[str, Tensor], results: dict[str, Tensor], rank: int) -> None:
    """Results are their own, and what was given is as it was."""
    for at, name in enumerate("uvw"):
        assert results[name].untyped_storage().data_ptr() != tree[name].untyped_storage().data_ptr()
        assert tree[name].detach().eq(at + rank).all()


def copies_of_a_tree(op: str, later: bool, joins: int) -> None:
    mesh = mc.make_mesh({"a": 4})
    with as_on_a_device(mesh, "a"):
        tree = leaves(mesh.rank)
        with Kernels(N) as seen:
            result = mc.all_reduce(tree, "a", op, mesh=mesh, async_op=later)
            result = result.wait() if later else result
        assert seen.copies == {"cat": joins}, seen.copies
        no_alias(tree, result, mesh.rank)
        for at, name in enumerate("uvw"):
            assert result[name].eq((4 * at + 6) / (4 if op == "mean" else 1)).all(), name
        x = tree["u"]
        with Kernels(N) as alone:  # a tensor of the user's is copied, and reduced there
            y = mc.all_reduce(x, "a", op, mesh=mesh)
        assert alone.copies == {"clone": 1}, alone.copies
        assert y.eq(1.5 if op == "mean" else 6).all()
        assert x.eq(mesh.rank).all()


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_bucket_is_copied_once(gloo4: Any, op: str, later: bool) -> None:
    gloo4.run(copies_of_a_tree, op, later, 1)


def a_needed_value_stays() -> None:
    """What the derivative needs is not reduced in place, nor is what a hook may look at after it."""
    mesh = mc.make_mesh({"a": 4})
    with as_on_a_device(mesh, "a"):
        for op, slope in (("product", 0.0), ("max", 1.0)):
            tree = leaves(mesh.rank, grad=True)
            found = mc.all_reduce(tree, "a", op, mesh=mesh)
            got = torch.autograd.grad(sum(y.sum() for y in found.values()), list(tree.values()))
            top = mesh.rank == 3
            for at, (name, g) in enumerate(zip("uvw", got, strict=True)):
                others = [rank + at for rank in range(4) if rank != mesh.rank]
                expected = torch.tensor(others).prod() if op == "product" else slope * top
                assert g.eq(expected).all(), (op, name)
            no_alias(tree, found, mesh.rank)
        tree = leaves(mesh.rank, grad=True)
        total = mc.all_reduce(tree, "a", mesh=mesh)
        (g,) = torch.autograd.grad(sum((y * y).sum() for y in total.values()), tree["v"], create_graph=True)
        assert g.eq(2 * 10).all()
        no_alias(tree, total, mesh.rank)


def test_a_value_that_is_needed_stays(gloo4: Any) -> None:
    gloo4.run(a_needed_value_stays)


def copies_of_gradients(reduce_dtype: torch.dtype | None) -> None:
    """The second pass, in which the order is known and buckets go early."""
    mesh = mc.make_mesh({"a": 4})
    with as_on_a_device(mesh, "a"):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).to(torch.bfloat16 if reduce_dtype else None)
        model = data_parallel(model, "a", grads="sum", reduce_dtype=reduce_dtype, mesh=mesh)
        x = torch.full((2, 32), 1.0 + mesh.rank, dtype=model[0].weight.dtype)
        for _ in range(2):
            model.zero_grad()
            loss = model(x).sum()
            with Kernels(3 * 32 * 32) as seen:
                loss.backward()
        # One to join them; what came is cast back where it was summed in another dtype.
        assert seen.copies == {"cat": 1, **({"cast": 1} if reduce_dtype else {})}, seen.copies


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
def test_gradients_of_data_parallelism_are_copied_once(gloo4: Any, reduce_dtype: torch.dtype | None) -> None:
    gloo4.run(copies_of_gradients, reduce_dtype)


def copies_of_shards() -> None:
    mesh = mc.make_mesh({"replica": 2, "dp": 2})
    with as_on_a_device(mesh, "replica", "dp"):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(64, 64), "dp", grads="mean", replica_axis="replica", mesh=mesh)
        x = torch.full((2, 64), 1.0 + mesh.rank)
        loss = model(x).sum()
        with Kernels(64 * 64 // 2) as seen:
            loss.backward()
        assert seen.copies["clone"] == 0, seen.copies
        assert seen.copies["cat"] == 1, seen.copies
        assert model.weight.grad is not None
        assert torch.allclose(model.weight.grad, torch.full((), 2 * (1 + 2 + 3 + 4) / 4)), model.weight.grad


def test_gradients_of_shards_are_copied_once(gloo4: Any) -> None:
    gloo4.run(copies_of_shards)


def one_rank() -> None:
    mesh = mc.make_mesh({"a": 1})
    tree = leaves(0)
    with Kernels(N) as seen:
        result = mc.all_reduce(tree, "a", mesh=mesh)
    assert seen.copies == {"cat": 1}
    no_alias(tree, result, 0)


def test_one_rank_copies_once_too() -> None:
    one_rank()


def copies_here() -> None:
    """On the transports of the CPU, which may have to move bytes to where others read them."""
    mesh = mc.make_mesh({"a": 4})
    tree = leaves(mesh.rank)
    with Kernels(3 * N) as seen:
        result = mc.all_reduce(tree, "a", mesh=mesh, async_op=True).wait()
    assert (seen.copies["cat"], seen.copies["clone"], seen.copies["copy"] <= 1) == (1, 0, True), seen.copies
    no_alias(tree, result, mesh.rank)
    assert [result[name][0].item() for name in "uvw"] == [6, 10, 14]


@pytest.mark.parametrize("where", ["gloo4", "pool4"])
def test_later_on_the_cpu(request: pytest.FixtureRequest, where: str) -> None:
    request.getfixturevalue(where).run(copies_here)


def test_later_in_process() -> None:
    """Ranks take turns, so that a mode of one would see what the others do."""

    def main() -> list[float]:
        mesh = mc.make_mesh({"a": 4})
        tree = leaves(mesh.rank)
        result = mc.all_reduce(tree, "a", mesh=mesh, async_op=True).wait()
        no_alias(tree, result, mesh.rank)
        return [result[name][0].item() for name in "uvw"]

    assert mc.launch(main, ranks=4) == [[6, 10, 14]] * 4


# ------------------------------------------------------------------------------------------- the host waits once for all


def reads_of_missing(missing: int, mixed: bool) -> list[int]:
    """How often backward reads numbers of a device, when this many leaves have no gradient on any rank but one."""
    mesh = mc.make_mesh({"a": 4})
    with as_on_a_device(mesh, "a"):
        names = [f"w{at}" for at in range(8)]
        tree = {name: torch.ones(3, dtype=torch.float64 if mixed and at % 2 else torch.float32, requires_grad=True)
                for at, name in enumerate(names)}  # fmt: skip
        for _ in range(2):  # the first pass finds out the order
            varied = mc.pvary(tree, "a", mesh=mesh, bucket_mb=1e-5)
            used = names[: 8 - missing] + (names[-1:] if mesh.rank == 2 and missing else [])
            loss = sum((varied[name].double().sum() * (1 + mesh.rank) for name in used), torch.zeros(()))
            lists: list[int] = []
            tolist: Callable[[Tensor], Any] = Tensor.tolist
            Tensor.tolist = lambda x: (lists.append(x.numel()), tolist(x))[1]  # type: ignore[method-assign]
            try:
                with Kernels() as seen:
                    found = torch.autograd.grad(loss, list(tree.values()), allow_unused=True)
            finally:
                Tensor.tolist = tolist  # type: ignore[method-assign]
        for at, g in enumerate(found):
            if at < 8 - missing:
                assert g is not None
                assert g.eq(10).all()
            elif at == 7:
                assert g is not None
                assert g.eq(3).all()
            else:
                assert g is None, at
        return [seen.reads, len(lists)]


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "two"])
def test_leaves_without_a_gradient_cost_one_wait_in_all(gloo4: Any, mixed: bool) -> None:
    assert gloo4.run(reads_of_missing, 0, mixed) == [[0, 0]] * 4
    for missing in (2, 6):
        assert gloo4.run(reads_of_missing, missing, mixed) == [[0, 1]] * 4


def test_what_is_made_in_a_capture_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there when the graph has run, and not before."""
    made: list[tuple[Any, ...]] = []
    waits: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(capturing))
    monkeypatch.setattr(overlap, "_new_flags", lambda *args: made.append(args))
    monkeypatch.setattr(overlap, "_kept_flags", functools.lru_cache(overlap._kept_flags.__wrapped__))
    monkeypatch.setattr(overlap, "stream_of", lambda x: stream)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        for _ in range(2):
            overlap._flags(True, 3, torch.float32, torch.device("cuda", 0))
    assert len(made) == 3
    assert waits == [False]  # what is kept may be used on another stream next


# ---------------------------------------------------------------------------------------------------- maxima of floats


def in_order(x: Tensor, op: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Floats as integers of the same order, in the plainest way, and the way back."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    ints = torch.int64 if wide == torch.float64 else torch.int32
    info = torch.iinfo(ints)

    def flip(bits: Tensor) -> Tensor:
        return torch.where(bits < 0, bits ^ info.max, bits)

    bits = torch.where(x.isnan(), info.max if op == "max" else info.min, flip(x.to(wide).view(ints)))
    return bits, lambda bits: flip(bits).view(wide).to(x.dtype)


def patterns(dtype: torch.dtype) -> Tensor:
    """Every one of 16 bits; of more bits, every kind of number and of NaN, and many others."""
    width, ints = dtype.itemsize * 8, {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if width == 16:
        return torch.arange(2**16, dtype=torch.int32).to(ints).view(dtype)
    info, limits = torch.iinfo(ints), torch.finfo(dtype)
    drawn = torch.randint(info.min, info.max, (10_000,), dtype=ints, generator=torch.Generator().manual_seed(3)).view(
        dtype
    )
    numbers = [0.0, float("inf"), limits.max, limits.tiny, limits.smallest_normal, 5e-324, 1.0]
    infinity = torch.tensor(float("inf"), dtype=dtype).view(ints).item()
    nans = torch.tensor(
        [infinity + 1, info.max, infinity + (1 << (width // 4)), -1, info.min + infinity + 1], dtype=ints
    )
    return torch.cat([drawn, torch.tensor(numbers, dtype=dtype), -torch.tensor(numbers, dtype=dtype), nans.view(dtype)])


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def compiled(folder: Path, code: str) -> Callable[[Tensor], Tensor]:
    """What CUDA's compiler makes of this template on a device, made by that of this machine, for the CPU."""
    (name,) = re.findall(r"T (\w+)\(T bits", code)
    lines = [code]
    for width in (32, 64):
        lines.append(
            f'extern "C" void run{width}(const int{width}_t* x, int{width}_t* y, long n) '
            f"{{ for (long i = 0; i < n; i++) y[i] = {name}<int{width}_t>(x[i]); }}"
        )
    source = folder / f"{name}.cpp"
    source.write_text("#include <cstdint>\n" + "\n".join(lines))
    library = source.with_suffix(".so")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))

    def run(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        y = torch.empty_like(x)
        fn = getattr(loaded, f"run{8 * x.element_size()}")
        fn(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
        return y

    return run


@pytest.fixture
def in_one_kernel(tmp_path: Path) -> Callable[[str, Tensor], Tensor]:
    """In the place of what makes kernels for a device."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = functools.cache(functools.partial(compiled, tmp_path))
    return lambda code, x: made(code)(x)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_ordered_by_kernels_bit_for_bit(
    dtype: torch.dtype, op: str, in_one_kernel: Callable[[str, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a rank may not have that another one has, or not yet."""
    clothes = dtypes.dress(op, dtype)
    assert clothes is not None
    monkeypatch.setattr(dtypes, "_can_look_up", lambda x: False)
    x, ints = patterns(dtype), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = clothes.on(x)
    floats = clothes.off(bits).view(ints)
    codes: list[str] = []
    monkeypatch.setattr(dtypes, "elementwise", lambda code, x: codes.append(code) or in_one_kernel(code, x))
    with Kernels():
        clothes.off(clothes.on(x))
    assert not codes, "a mode would not see it"
    monkeypatch.setattr(dtypes, "plain_now", lambda: True)
    with Kernels(1) as seen:
        assert torch.equal(clothes.on(x), bits)
        assert torch.equal(clothes.off(bits).view(ints), floats)
    assert len(codes) == 2, codes
    assert set(seen.names) <= {"_to_copy", "equal"}  # the test's


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_ordered_bit_for_bit(dtype: torch.dtype, op: str) -> None:
    """By look-up and by arithmetic, which ranks may mix; NaN, both zeros and what is not normal included."""
    x = patterns(dtype)
    clothes = dtypes.dress(op, dtype)
    assert clothes is not None
    expected, back = in_order(x, op)
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for way in (None, lambda x: False):
        with pytest.MonkeyPatch.context() as patch:
            if way is not None:
                patch.setattr(dtypes, "_can_look_up", way)
            bits = clothes.on(x)
            assert torch.equal(bits, expected)
            assert torch.equal(clothes.off(bits).view(ints), back(expected).view(ints))
            assert torch.equal(clothes.on(x.view(-1, 1)[:, 0][::2].reshape(-1)), expected[::2])
            assert clothes.off(clothes.on(x[:4].view(2, 2))).shape == (2, 2)
            assert clothes.off(clothes.on(x[:1].view(()))).shape == ()
            assert clothes.off(clothes.on(x[:0])).shape == (0,)
            assert torch.equal(x.view(ints), patterns(dtype).view(ints))


def kernels_of_maxima(dtype: torch.dtype) -> list[list[str]]:
    mesh = mc.make_mesh({"a": 4})
    found = []
    with as_on_a_device(mesh, "a"):
        x = torch.arange(8).to(dtype) * (-1) ** mesh.rank
        x[7] = float("nan") if mesh.rank == 2 else 1
        x[6] = -0.0 if mesh.rank else 0.0
        for op in ("max", "min"):
            mc.all_reduce(x, "a", op, mesh=mesh)  # what is looked up is made once
            with Kernels(1) as seen:
                y = mc.all_reduce(x, "a", op, mesh=mesh)
            found.append(seen.names)
            expected = [0.0, *(i if op == "max" else -i for i in range(1, 6))]
            assert y[:6].tolist() == expected
            assert y[7].isnan()
            assert y[6] == 0
            assert y[6].signbit().item() == (op == "min")
    return found


@pytest.mark.parametrize(("dtype", "most"), [*zip(FLOATS, [6, 4, 7, 7], strict=True)], ids=str)
def test_a_maximum_takes_few_kernels(gloo4: Any, dtype: torch.dtype, most: int) -> None:
    for names in gloo4.run(kernels_of_maxima, dtype)[0]:
        assert len(names) == most, names


def kernels_of_the_slope() -> list[str]:
    mesh = mc.make_mesh({"a": 4})
    nan = float("nan")
    with as_on_a_device(mesh, "a"):
        x = torch.tensor([1.0, float(mesh.rank), nan, nan if mesh.rank == 1 else 9.0, -0.0 if mesh.rank else 0.0])
        x.requires_grad_()
        y = mc.all_reduce(x, "a", "max", mesh=mesh)
        g = torch.ones(5)
        with Kernels(1) as seen:
            (found,) = torch.autograd.grad(y, x, g)
        assert found.tolist() == [0.25, float(mesh.rank == 3), 0.25, float(mesh.rank == 1), 0.25]
    return seen.names


def test_those_that_attain_a_maximum_share_its_gradient_in_few_kernels(gloo4: Any) -> None:
    names = gloo4.run(kernels_of_the_slope)[0]
    assert len(names) == 7, names  # equal, NaN, or, as a number; a copy that is summed; its share, times the gradient


# ------------------------------------------------------------------------------------------------------------ offload


class Bus:
    """Stands for what copies between the CPU and a device, in the order of a stream, while the host goes on: what comes back
    is there when somebody has waited, and what leaves must be the same until then.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pins = 0
        self.under_way: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.gathers = False

    def begun(self, x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        self.log.append("copy")
        if self.gathers:
            self.under_way.append((x, x.detach().clone(), None))
            return x.to(dtype, copy=True)
        y = torch.full_like(x, float("nan"))
        self.under_way.append((x, x.detach().clone(), y))
        return y

    def mark(self, _: torch.device) -> Any:
        return self

    def synchronize(self) -> None:
        self.log.append("wait")
        for x, before, y in self.under_way:
            assert torch.equal(x, before), "changed while it was copied"
            if y is not None:
                y.copy_(before)
        self.under_way.clear()

    def pin(self, shard: Tensor) -> Tensor:
        self.pins += 1
        return shard.clone()


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    """A CPU whose tensors are copied to a device that is the CPU."""
    found = Bus()
    there, back = offload.Copies.there, offload.Copies.back

    def to_the_device(self: offload.Copies, *args: Any) -> Tensor:
        found.gathers = True
        try:
            return there(self, *args)
        finally:
            found.gathers = False

    monkeypatch.setattr(offload.Copies, "there", to_the_device)
    monkeypatch.setattr(offload, "_is_elsewhere", lambda x, device: True)
    for name in ("begun", "mark", "pin"):
        monkeypatch.setattr(offload, f"_{name}", getattr(found, name))
    adopt, brought = Group.adopt, Group.brought

    def adopted(self: Group, shard: Tensor) -> None:
        adopt(self, shard)
        self._as_it_is = False

    def on_the_way(self: Group, total: Tensor) -> Tensor:
        return back(self.owner.copies, brought(self, total), self.shard.device)

    monkeypatch.setattr(Group, "adopt", adopted)
    monkeypatch.setattr(Group, "brought", on_the_way)
    return found


class Asks(TorchDispatchMode):
    """Whether the host is to go on while tensors are copied to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            self.found.append(kwargs.get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_goes_on_while_shards_are_copied(dtype: torch.dtype) -> None:
    with Asks() as asks:
        y = offload._begun(torch.ones(3), torch.device("meta"), dtype)
    assert (y.device.type, y.dtype, asks.found) == ("meta", dtype, [True])


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


def offloaded(mesh: mc.Mesh, **how: Any) -> nn.Sequential:
    return fully_shard(layers(), "a", grads="mean", units=["*"], offload=True, mesh=mesh, **how)


def numbers_of(model: nn.Sequential, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses and gradients; the optimiser, and who averages weights, change parameters as soon as they may."""
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        loss = model(torch.full((2, 8), 1.0 + step)).square().mean()
        loss.backward()
        if step < steps - 1:
            sgd.step()
            sgd.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            model(torch.ones(1, 8))
            for p in model.parameters():
                p.mul_(0.5)
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("can_call_back", [True, False], ids=["called back", "not"])
def test_offloaded_numbers_are_those_of_one_rank(
    bus: Bus, can_call_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_call_back:
        monkeypatch.setattr(_torch.backward, "_after_backward", None)
    expected = numbers_of(layers())
    found = numbers_of(offloaded(mc.make_mesh({"a": 1})))
    assert found[0] == pytest.approx(expected[0])
    for mine, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine.view_as(other), other)
    assert not bus.under_way


def test_the_host_waits_once_a_pass(bus: Bus) -> None:
    model = offloaded(mc.make_mesh({"a": 1}))
    assert bus.pins == 3
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        bus.log.clear()
        loss = model(x).sum()
        assert bus.log == ["copy"] * 3 + ["wait"]
        bus.log.clear()
        loss.backward()
        assert bus.log == ["copy"] * 6 + ["wait"]  # each weight again, then its gradient
    bus.log.clear()
    torch.autograd.grad(model(x).sum(), x)  # gathers again, and gives no gradient to a parameter
    assert bus.log[4:] == ["copy"] * 3 + ["wait"]
    assert not bus.under_way


def test_a_forward_that_fails_leaves_no_copy(bus: Bus) -> None:
    model = offloaded(mc.make_mesh({"a": 1}))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not bus.under_way


def test_shards_are_pinned_after_loads_and_copies(bus: Bus) -> None:
    model = offloaded(mc.make_mesh({"a": 1}))
    state = {name: p.detach().clone() for name, p in model.state_dict().items()}
    assert bus.pins == 3
    model.load_state_dict(state)  # in place
    model(torch.ones(1, 8))
    assert bus.pins == 3
    model.load_state_dict(state, assign=True)
    model(torch.ones(1, 8))
    assert bus.pins == 6
    model.double()
    model(torch.ones(1, 8, dtype=torch.float64))
    assert bus.pins == 9
    copied = copy.deepcopy(model)
    assert bus.pins == 12
    copied(torch.ones(1, 8, dtype=torch.float64))


def collected(model: nn.Sequential) -> list[Tensor]:
    with no_sync(model):
        model(torch.ones(2, 8)).sum().backward()
    reduce_gradients(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_that_were_collected_come_too(bus: Bus) -> None:
    found = collected(offloaded(mc.make_mesh({"a": 1})))
    model = layers()
    model(torch.ones(2, 8)).sum().backward()
    for mine, p in zip(found, model.parameters(), strict=True):
        assert p.grad is not None
        assert torch.allclose(mine.view_as(p.grad), p.grad)
