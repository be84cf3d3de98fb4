"""Python objects along an axis: what arrives, where, in how many pieces, and what happens when something cannot go."""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.objects import parcels, pickles
from meshcomm.objects.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from meshcomm.runtime.start.workers import WorkerPool

Run = Callable[..., list[Any]]
Point = namedtuple("Point", "x y")
EVERYTHING = [
    None, 7, "text", b"bytes", {"a": [1, (2.5, {3})]}, Point(1, [2]), OrderedDict(b=1, a=2), range(3), 10**40, float("inf"), ..., int, "",
    [], torch.float16, torch.Size([2]),
]  # fmt: skip


class Holder:
    """An object with a state of its own."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


class Named(Tensor):
    """A tensor that is still one dense tensor."""


class Unreadable:
    """Pickles, and cannot be read anywhere but where it says."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return refuse, (self.rank,)


def refuse(rank: int) -> None:
    if mc.current_mesh().rank != rank:
        raise RuntimeError("not here\nat all")


def grid() -> mc.Mesh:
    return mc.make_mesh({"a": 2, "b": 2})


# ------------------------------------------------------------------------------------------------------ what arrives


def all_four() -> list[Any]:
    """Along both axes, in both orders, from and to every index."""
    mesh, seen = grid(), []
    with mc.use_mesh(mesh):
        for axis in ("a", "b", ("a", "b"), ("b", "a")):
            n, me = mc.axis_size(axis), int(mc.axis_index(axis))
            assert all_gather_object(("from", me, "x" * 3000 * me), axis) == [
                ("from", i, "x" * 3000 * i) for i in range(n)
            ]
            for end in range(n):
                assert broadcast_object({"me": me}, axis, end) == {"me": end}
                got = gather_object([me], axis, end)
                assert got == ([[i] for i in range(n)] if me == end else None)
                assert scatter_object([i * 11 for i in range(n)] if me == end else None, axis, end) == 11 * me
        order = all_gather_object(mesh.rank, ("b", "a"))
        seen = [broadcast_object(x, "a") for x in EVERYTHING]
    return [order, seen]


def test_every_object_arrives(run4: Run) -> None:
    for order, seen in run4(all_four):
        assert order == [0, 2, 1, 3]
        assert seen == EVERYTHING


def tensors() -> None:
    mesh = grid()
    x = torch.arange(6.0).view(2, 3)
    sent = {
        "strided": x.t(), "one": x[1:2, 2:], "scalar": torch.tensor(3), "empty": torch.empty(0, 4), "conj": torch.tensor([1 + 2j]).conj(),
        "bool": x > 2, "half": x.bfloat16(), "fp8": x.to(torch.float8_e4m3fn), "u32": torch.tensor([2**32 - 1], dtype=torch.uint32),
        "neg": torch.complex(x, x).conj().imag, "expanded": x[:1].expand(5, 3), "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, 5, device="meta"),
    }  # fmt: skip
    got = all_gather_object(sent if mesh.rank == 3 else None, ("a", "b"), mesh=mesh)[3]
    assert got.keys() == sent.keys()
    for name, y in got.items():
        y0 = sent[name]
        assert (y.dtype, y.shape, y.device, y.layout) == (y0.dtype, y0.shape, y0.device, y0.layout), name
        if name != "meta":
            dense, dense0 = y.to_dense(), y0.to_dense()
            assert torch.equal(dense.to(torch.complex128), dense0.to(torch.complex128)), name
    got["strided"].zero_()
    assert x[1, 2] == 5, "new storage"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, whenever a sparse tensor is unpickled
def test_tensors_keep_value_dtype_and_shape(run4: Run) -> None:
    run4(tensors)


def modules() -> None:
    """Modules, tied weights, attributes, subclasses and who requires grad."""
    mesh = grid()
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].weight.is_special = "yes"
    held = {
        "model": model,
        "same": model[0].weight,
        "tied": model.state_dict(),
        "frozen": nn.Parameter(torch.ones(1), False),
    }
    held["named"] = torch.ones(2).as_subclass(Named)
    want = [p.detach().clone() for p in model.parameters()]
    got = broadcast_object(held, ("a", "b"), 2, mesh=mesh)
    weight = got["model"][0].weight
    assert weight is got["same"]
    assert (weight.is_special, weight.requires_grad, got["frozen"].requires_grad) == ("yes", True, False)
    assert type(got["named"]) is Named
    tied = got["tied"]["0.weight"]
    assert tied is not weight
    with torch.no_grad():
        weight.fill_(7)
    assert (tied == 7).all()
    y = got["model"](torch.ones(4, 2))
    y.sum().backward()
    assert weight.grad is not None
    if mesh.rank == 2:
        for p, w in zip(model.parameters(), want, strict=True):
            assert torch.equal(p.detach(), w), "what was sent is left alone"


def test_modules(run4: Run) -> None:
    run4(modules)


def arrays() -> None:
    np = pytest.importorskip("numpy")
    mesh = grid()
    frozen = np.arange(3000)
    frozen.flags.writeable = False
    sent = [np.arange(5000.0).reshape(50, 100).T, frozen, np.float32(2), np.arange(4)]
    got = all_gather_object(sent, "b", mesh=mesh)[1]
    for a, b in zip(got, sent, strict=True):
        assert (a == b).all()
        assert a.dtype == b.dtype
    got[0][0, 0] = 9  # writable as it was
    assert not got[1].flags.writeable


def test_arrays(run4: Run) -> None:
    run4(arrays)


def test_the_device_of_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on the sender's accelerator is made on the receiver's device, and the CPU's stays there."""
    assert pickles.unpack(pickles.pack(torch.ones(2)), torch.device("meta")).device.type == "cpu"
    monkeypatch.setattr(pickles, "_is_elsewhere", lambda x: "device")
    held = {"x": torch.ones(2), "w": nn.Parameter(torch.ones(3))}
    got = pickles.unpack(pickles.pack(held), torch.device("meta"))
    assert {x.device.type for x in got.values()} == {"meta"}
    assert isinstance(got["w"], nn.Parameter)


@pytest.mark.gpu
def test_the_device_of_a_receiver_that_has_one() -> None:
    def main() -> list[str]:
        x = torch.arange(4.0, device=torch.accelerator.current_accelerator())
        got = all_gather_object([x, x.cpu(), nn.Parameter(x)], "a", mesh=mc.make_mesh({"a": 2}))
        assert all(y.tolist() == [0, 1, 2, 3] for y in got[1])
        return [y.device.type for y in got[0]]

    kind = torch.accelerator.current_accelerator().type
    with torch.device(kind):
        assert mc.launch(main, ranks=2) == [[kind, "cpu", kind]] * 2
    assert mc.launch(main, ranks=2) == [["cpu"] * 3] * 2  # ranks that compute on the CPU


# -------------------------------------------------------------------------------------------------------- in chunks


def chunks(most: int) -> int:
    """Lengths around the size of a chunk, even and uneven."""
    mesh = grid()
    axis, me, calls = ("a", "b"), mesh.rank, 0
    link = mesh.axis(axis).link
    original = type(link).all_gather

    for unit in (most // 4, most):
        for lengths in ([unit] * 4, [unit - 1, unit + 1, 0, 3 * unit], [0, 0, 9 * unit, 1]):
            want = [
                torch.randint(256, (k,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
                for i, k in enumerate(lengths)
            ]
            for got in (all_gather_object(want[me], axis, mesh=mesh), gather_object(want[me], axis, 3, mesh=mesh)):
                if got is not None:
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
                    calls += 1
            assert torch.equal(scatter_object(want if me == 1 else None, axis, 1, mesh=mesh), want[me])
            assert torch.equal(broadcast_object(want[me], axis, 2, mesh=mesh), want[2])
    assert type(link).all_gather is original
    return calls


def test_large_objects_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "_CHUNK", 2**14)
    monkeypatch.setattr(parcels, "_FEW", 2**10)
    monkeypatch.setattr(parcels, "_ROOM", 500)
    largest = 0
    move = parcels.Courier._move

    def watched(self: Any, x: Tensor, primitive: Any, out: Tensor) -> None:
        nonlocal largest
        largest = max(largest, x.numel(), out.numel())
        move(self, x, primitive, out)

    monkeypatch.setattr(parcels.Courier, "_move", watched)
    assert mc.launch(chunks, ranks=4, args=(2**14,)) == [6, 6, 6, 12]
    assert 2**13 < largest <= 2**14


def test_large_objects_over_processes(pool4: WorkerPool) -> None:
    assert pool4.run(chunks, 2**18) == [6, 6, 6, 12]


# ------------------------------------------------------------------------------------------------- what cannot be sent

CULPRITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: lambda: 0, r"obj is a lambda of test_objects\.py:\d+"),
    (lambda: {"x": [1, {"f": threading.Lock()}]}, r"obj\['x'\]\[1\]\['f'\] is a lock, which cannot be pickled: cannot pickle"),
    (lambda: Holder(a=Holder(b=(1, (i for i in ())))), r"obj\.a\.b\[1\] is a generator"),
    (lambda: Slots({"g": iter(lambda: 0, 1)}), r"obj\.part\['g'\]"),
    (lambda: Point(0, [lambda: 0]), r"obj\.y\[0\] is a lambda"),
    (lambda: functools.partial(max, key=lambda x: x), r"obj\.keywords\['key'\] is a lambda"),
    (lambda: Holder(run=lambda: 0).__dict__, r"obj\['run'\]"),
    (lambda: {(lambda: 0): 1}, r"obj\.keys\(<function .*\) is a lambda"),
    (lambda: {frozenset([lambda: 0])}, r"obj\{frozenset\(.*\}\{<function .*\} is a lambda"),
    (lambda: [mc.make_mesh({"x": -1})], r"obj\[0\] is a Mesh.*a mesh belongs to its process"),
    (lambda: {"loss": (torch.ones(2, requires_grad=True) * 2)}, r"obj\['loss'\] is a Tensor.*graph of autograd.*detach"),
    (lambda: nn.Sequential(nn.Linear(1, 1), Hooked()), r"obj\._modules\['1'\].*\['f'\] is a lambda"),
    (lambda: type("Local", (), {})(), r"obj.*class Local|obj is a Local"),
]  # fmt: skip


class Hooked(nn.Module):
    """A module with something that does not go."""

    def __init__(self) -> None:
        super().__init__()
        self.extras = {"f": lambda: 0}


def culprit(number: int, rank: int) -> str:
    mesh = grid()
    obj = CULPRITS[number][0]() if mesh.rank == rank else {"fine": mesh.rank}
    with mc.use_mesh(mesh):
        try:
            all_gather_object(obj, ("a", "b"))
        except mc.MeshError as error:
            mc.barrier(("a", "b"))
            assert all_gather_object(mesh.rank, ("a", "b")) == [0, 1, 2, 3], "the ranks go on together"
            return str(error)
    return "nothing raised"


@pytest.mark.parametrize("number", range(len(CULPRITS)))
def test_the_path_to_the_culprit_on_every_rank(number: int) -> None:
    found = mc.launch(culprit, ranks=4, args=(number, 2))
    assert len(set(found)) == 1
    pattern = CULPRITS[number][1]
    assert re.match(rf"(?s)meshcomm\.all_gather_object: index 2: .*{pattern}.*\n  fix: leave it out", found[0]), found[
        0
    ]


def test_the_culprit_over_processes(pool4: WorkerPool) -> None:
    for found in pool4.run(culprit, 1, 1):
        assert "index 1: obj['x'][1]['f'] is a lock, which cannot be pickled" in found


def one_sided(name: str) -> str:
    mesh = grid()
    axis, me = ("a", "b"), mesh.rank
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: broadcast_object(lambda: 0, axis, 3),
        "gather": lambda: gather_object((lambda: 0) if me == 1 else 1, axis, 0),
        "scatter": lambda: scatter_object([1, 2, [lambda: 0], 4] if me == 3 else None, axis, 3),
        "few": lambda: scatter_object([1, 2] if me == 3 else None, axis, 3),
        "none": lambda: scatter_object(None, axis, 3),
        "two": lambda: scatter_object([1, 2, 3, 4] if me in (0, 3) else None, axis, 3),
        "src": lambda: broadcast_object(1, axis, 7 if me == 2 else 0),
        "unreadable": lambda: broadcast_object(Unreadable(1), axis),
        "unreadable where it goes": lambda: gather_object(Unreadable(1), axis, 2),
    }
    with mc.use_mesh(mesh):
        try:
            return repr(calls[name]())
        except (mc.MeshError, mc.CommError) as error:
            mc.barrier(axis)
            return str(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broadcast", "index 3: obj is a lambda"),
        ("gather", "index 1: obj is a lambda"),
        ("scatter", r"index 3: objs\[2\]\[0\] is a lambda"),
        ("few", "index 3: objs has 2 objects for 4 ranks"),
        ("none", "index 3: objs on src is a NoneType: pass a list of 4 objects"),
        ("two", "index 0: objs is given, but src is 3: pass None elsewhere"),
        ("unreadable", r"index 0, 2, 3: what came cannot be unpickled here: RuntimeError: not here\."),
        ("src", r"different calls[\s\S]*broadcast_object \(src=0\)[\s\S]*broadcast_object \(src=7\)"),
        ("unreadable where it goes", "index 2: what came cannot be unpickled here: RuntimeError: not here"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(name: str, text: str) -> None:
    found = mc.launch(one_sided, ranks=4, args=(name,))
    assert len(set(found)) == 1
    with pytest.raises(mc.MeshError, match=text):
        raise mc.MeshError(found[0])


def differing(mesh: mc.Mesh) -> str:
    try:
        broadcast_object(1, "a", src=mesh.rank, mesh=mesh)
    except (mc.MeshError, mc.CommError) as error:
        return str(error)
    return "nothing raised"


def differing_processes() -> list[str]:
    mesh = mc.make_mesh({"a": 4})
    found = [differing(mesh)]
    try:
        all_gather_object(1, "a", mesh=mesh) if mesh.rank == 3 else gather_object(1, "a", mesh=mesh)
    except mc.MeshError as error:
        found.append(str(error))
    try:
        broadcast_object(1, "a", src=9 if mesh.rank == 1 else 0, mesh=mesh)
    except mc.MeshError as error:
        found.append(str(error))
    return found


def test_ranks_that_call_otherwise() -> None:
    for told in mc.launch(lambda: differing(mc.make_mesh({"a": 2})), ranks=2):
        assert "different calls" in told
        assert "rank 0 called broadcast_object (src=0)" in told
        assert "test_objects.py" in told


def test_ranks_that_call_otherwise_over_processes(pool4: WorkerPool) -> None:
    for src, kind, outside in pool4.run(differing_processes):
        assert "broadcast_object(src=0) on index 0, 2, 3; broadcast_object(src=9) on index 1" in outside
        assert "the ranks along 'a' made different calls" in src
        assert "broadcast_object(src=0) on index 0; broadcast_object(src=1) on index 1" in src
        assert "gather_object(dst=0) on index 0, 1, 2; all_gather_object() on index 3" in kind


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: broadcast_object(1, "c"), "meshcomm.broadcast_object: no axis 'c'"),
        (lambda: broadcast_object(1, "a", 2), "src=2 is not an index along axis 'a'"),
        (lambda: gather_object(1, "a", True), "dst=True is not an index"),
        (lambda: scatter_object([1, 2], "a", -1), "src=-1 is not an index"),
        (lambda: all_gather_object(1, ("a", "a")), "an axis is named twice"),
    ],
)
def test_arguments(call: Callable[[], Any], text: str) -> None:
    def main() -> str:
        with mc.use_mesh(grid()), pytest.raises(mc.MeshError, match=text):
            call()
        return "raised"

    assert mc.launch(main, ranks=4) == ["raised"] * 4


# ----------------------------------------------------------------------------------------------------- around a call


def test_gradient_modes_and_transforms_around_a_call() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            (y,) = {all_gather_object([x * 2, x], "a", mesh=mesh)[0][0]}
        assert not y.requires_grad
        with torch.inference_mode():
            z = broadcast_object({"z": torch.ones(2) * 3}, "a", mesh=mesh)["z"]
        assert not z.is_inference()
        (z * x[:2]).sum().backward()

        def f(v: Tensor) -> Tensor:
            return (v * broadcast_object(2.0 + mesh.rank, "a", 1, mesh=mesh)).sum()

        assert torch.func.grad(f)(torch.ones(2)).tolist() == [3.0, 3.0]
        with torch.device("meta"):
            assert broadcast_object(torch.ones(2, device="cpu"), "a", mesh=mesh).sum() == 2

    mc.launch(main, ranks=2)


def test_a_mesh_of_one() -> None:
    mesh = mc.make_mesh({"a": 1})
    sent = {"x": torch.ones(2), "big": list(range(1000))}
    for got in (
        broadcast_object(sent, "a", mesh=mesh),
        all_gather_object(sent, "a", mesh=mesh)[0],
        gather_object(sent, "a", mesh=mesh)[0],
        scatter_object([sent], "a", mesh=mesh),
    ):
        assert got["big"] == sent["big"]
        assert torch.equal(got["x"], sent["x"])
        assert got["x"].data_ptr() != sent["x"].data_ptr()
    with pytest.raises(mc.MeshError, match="obj is a lambda"):
        broadcast_object(lambda: 0, "a", mesh=mesh)
