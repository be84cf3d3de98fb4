"""Every error by its text, on every rank of both runtimes, and before anything is communicated."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc

Call = Callable[[mc.Mesh], Any]
F32 = torch.float32

# -------------------------------------------------------------------------------------------------- every function


def x() -> Tensor:
    return torch.ones(4, 4)


CALLS: dict[str, Callable[..., Any]] = {
    "pvary": lambda axis, **kw: mc.pvary(x(), axis, **kw),
    "all_reduce": lambda axis, **kw: mc.all_reduce(x(), axis, **kw),
    "all_gather": lambda axis, **kw: mc.all_gather(x(), axis, **kw),
    "all_gather_invariant": lambda axis, **kw: mc.all_gather_invariant(x(), axis, **kw),
    "shard": lambda axis, **kw: mc.shard(x(), axis, **kw),
    "reduce_scatter": lambda axis, **kw: mc.reduce_scatter(x(), axis, **kw),
    "all_to_all": lambda axis, **kw: mc.all_to_all(x(), axis, 0, 1, **kw),
    "all_to_all_ragged": lambda axis, **kw: mc.all_to_all_ragged(x(), torch.tensor([2, 2]), axis, **kw),
    "permute": lambda axis, **kw: mc.permute(x(), axis, [(0, 1)], **kw),
    "shift": lambda axis, **kw: mc.shift(x(), axis, **kw),
    "scan": lambda axis, **kw: mc.scan(x(), axis, **kw),
    "broadcast": lambda axis, **kw: mc.broadcast(x(), axis, **kw),
    "axis_index": lambda axis, **kw: mc.axis_index(axis, **kw),
    "axis_size": lambda axis, **kw: mc.axis_size(axis, **kw),
    "reduce": lambda axis, **kw: mc.reduce(x(), axis, **kw),
    "gather": lambda axis, **kw: mc.gather(x(), axis, **kw),
    "scatter": lambda axis, **kw: mc.scatter(x(), axis, like=torch.ones(2, 4), **kw),
    "argmax": lambda axis, **kw: mc.argmax(x(), axis, **kw),
    "argmin": lambda axis, **kw: mc.argmin(x(), axis, **kw),
    "send": lambda axis, **kw: mc.send(x(), axis, 1, **kw),
    "recv": lambda axis, **kw: mc.recv(axis, 1, shape=(2,), dtype=F32, **kw),
    "exchange": lambda axis, **kw: mc.exchange([], [], axis, **kw),
    "barrier": lambda axis, **kw: mc.barrier(axis, **kw),
}
TAKES_A_TREE = (
    "pvary", "all_reduce", "all_gather", "all_gather_invariant", "shard", "reduce_scatter", "all_to_all",
    "all_to_all_ragged", "permute", "shift", "scan", "broadcast",
)  # fmt: skip
EXTRA: dict[str, tuple[Any, ...]] = {"all_to_all": (0, 0), "permute": ([],), "send": (1,)}
TENSOR_FIRST = (*TAKES_A_TREE, "reduce", "gather", "send", "argmax", "argmin")


def test_the_table_knows_every_function_over_an_axis() -> None:
    """Those above the collectives, the two for seeds, and tie, which has no axis, have tables of their own."""
    functions = {name for name in mc.__all__ if getattr(mc, name).__module__.startswith("meshcomm.collectives.")}
    functions -= {"fork_rng", "sync_seed", "tie"}
    assert set(CALLS) == functions
    assert len(functions) == 23


# ------------------------------------------------------------------------------------------------- nothing is sent

PRIMITIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce", "gather", "scatter", "exchange",
    "barrier",
)  # fmt: skip


@contextlib.contextmanager
def silence(mesh: mc.Mesh) -> Iterator[None]:
    """No primitive of the links of this rank may be called."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("communicated before the error")

    links = [mesh.axis(axis).link for axis in ("a", "b", ("a", "b"))]
    for link in links:
        for primitive in PRIMITIVES:
            setattr(link, primitive, refuse)
    try:
        yield
    finally:
        for link in links:
            for primitive in PRIMITIVES:
                delattr(link, primitive)


def expect(call: Call, patterns: list[str], quiet: bool = True) -> None:
    """The call raises on this rank, says all of it, and the ranks go on together afterwards."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with silence(mesh) if quiet else contextlib.nullcontext(), pytest.raises(mc.MeshError) as caught:
        call(mesh)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} not in:\n{caught.value}"
    total = mc.all_reduce(torch.tensor(mesh.rank), ("a", "b"), mesh=mesh)
    assert total.item() == 6


def expect_named(table: str, name: str) -> None:
    call, *patterns = TABLES[table][name]
    expect(call, patterns)


AT = r"at a=\d, b=\d"
WHERE = r"mesh \{'a': 2, 'b': 2\}"


def of_every_function(kind: str) -> None:
    """One kind of error in every function, all in one run: processes are slow to start."""
    for name, call in CALLS.items():
        expect(lambda mesh, call=call: EVERYWHERE[kind][0](call, mesh), [f"^meshcomm.{name}: ", *EVERYWHERE[kind][1]])


EVERYWHERE: dict[str, tuple[Callable[[Callable[..., Any], mc.Mesh], Any], list[str]]] = {
    "unknown axis": (
        lambda call, mesh: call("z", mesh=mesh),
        [r"no axis 'z' in the mesh", r"got: axis 'z'; " + WHERE, r"fix: one of 'a', 'b', or a tuple"],
    ),
    "unknown in a tuple": (lambda call, mesh: call(("a", "z"), mesh=mesh), [r"no axis 'z'", r"got: axis \('a', 'z'\)"]),
    "repeated axis": (
        lambda call, mesh: call(("a", "b", "a"), mesh=mesh), [r"an axis is named twice", r"fix: name each axis once"],
    ),
    "no axis": (lambda call, mesh: call((), mesh=mesh), [r"no axis is named", WHERE, r"fix: one of 'a', 'b'"]),
    "an int as axis": (lambda call, mesh: call(0, mesh=mesh), [r"an axis is a name, not 0", r"fix: one of 'a', 'b'"]),
    "a list as axis": (lambda call, mesh: call(["a"], mesh=mesh), [r"an axis is a name, not \['a'\]"]),
    "no mesh": (
        lambda call, mesh: call("a"), [r"there is no mesh", r"fix: pass mesh=, or call inside `with mc.use_mesh\(mesh\):`"],
    ),
    "something else as mesh": (
        lambda call, mesh: call("a", mesh={"a": 2}), [r"mesh= is a dict", r"fix: pass a mesh made by mc.make_mesh"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EVERYWHERE)
def test_every_function_refuses(run4: Callable[..., list[Any]], kind: str) -> None:
    run4(of_every_function, kind)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "axis_size"])
def test_outside_a_rank(name: str) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with pytest.raises(mc.MeshError) as caught:
        CALLS[name]("a", mesh=mesh)
    assert re.search(
        rf"meshcomm.{name}: called outside a rank.\n  got: in-process {WHERE} .*\n"
        r"  fix: run it inside mc.launch\(fn, ranks=4\), or start with torchrun --nproc-per-node 4",
        str(caught.value),
    )


# ----------------------------------------------------------------------------------------------- what is no tensor

NO_TENSORS: dict[str, tuple[Any, str]] = {
    "a number": (3.0, r"x is not a tensor but float"),
    "None": (None, r"x is not a tensor but NoneType"),
    "None in a dict": ({"w": torch.ones(4, 4), "b": None}, r"x is not a tensor but NoneType[\s\S]*leaf: x\['b'\]$"),
    "a number deep down": (
        [torch.ones(4, 4), {"k": (torch.ones(4), 1)}],
        r"x is not a tensor but int[\s\S]*leaf: x\[1\]\['k'\]\[1\]$",
    ),
    "a string in a list": (["text"], r"x is not a tensor but str[\s\S]*leaf: x\[0\]$"),
}


def called(name: str, value: Any, mesh: mc.Mesh) -> Any:
    if name == "all_to_all_ragged":
        return mc.all_to_all_ragged(value, torch.tensor([2, 2]), "b", mesh=mesh)
    return getattr(mc, name)(value, "b", *EXTRA.get(name, ()), mesh=mesh)


def not_tensors(kind: str) -> None:
    value, pattern = NO_TENSORS[kind]
    names = TENSOR_FIRST if kind in ("a number", "None") else TAKES_A_TREE
    for name in names:
        call = lambda mesh, name=name: called(name, value, mesh)  # noqa: E731
        fix = "fix: pass a tensor"
        expect(call, [f"^meshcomm.{name}: {pattern}", WHERE, AT, fix])


@pytest.mark.parametrize("kind", NO_TENSORS)
def test_what_is_no_tensor(run4: Callable[..., list[Any]], kind: str) -> None:
    run4(not_tensors, kind)


def tree_without_tree() -> None:
    """Functions of one tensor refuse a tree of them."""
    for name in ("reduce", "gather", "send"):
        call = lambda mesh, name=name: called(name, [x()], mesh)  # noqa: E731
        expect(call, [f"^meshcomm.{name}: x is not a tensor but list"])


def test_functions_of_one_tensor_refuse_a_tree(run4: Callable[..., list[Any]]) -> None:
    run4(tree_without_tree)


def odd_tensors() -> None:
    for name in TENSOR_FIRST:

        def call(mesh: mc.Mesh, value: Any, name: str = name) -> Any:
            return called(name, value, mesh)

        meta, sparse = torch.ones(4, 4, device="meta"), torch.eye(4).to_sparse()
        expect(
            lambda mesh: call(mesh, meta),
            [
                f"^meshcomm.{name}: x is on the wrong device, meta",
                r"got: x f32\[4, 4\]; " + WHERE,
                AT,
                r"fix: .*move it to cpu",
            ],
        )
        expect(lambda mesh: call(mesh, sparse), [f"^meshcomm.{name}: x is a torch.sparse_coo tensor", r"to_dense\(\)"])
        if name in TAKES_A_TREE:
            expect(
                lambda mesh: call(mesh, {"deep": [x(), meta]}),
                [rf"^meshcomm.{name}: x is on the wrong", r"leaf: x\['deep'\]\[1\]$"],
            )


def test_wrong_device_and_layout(run4: Callable[..., list[Any]]) -> None:
    run4(odd_tensors)


# ------------------------------------------------------------------------------------------------- sizes and dims


def matrix(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


ALL = ("a", "b")
SIZES: dict[str, tuple[Any, ...]] = {
    "reduce_scatter does not divide": (
        lambda m: mc.reduce_scatter(matrix(8, 30), ALL, 1, mesh=m),
        r"^meshcomm.reduce_scatter: x.shape\[1\] = 30 is not divisible by axis \('a', 'b'\) \(size 4\)\.\n",
        r"  got: x f32\[8, 30\]; mesh \{'a': 2, 'b': 2\}; at a=\d, b=\d\n", r"  fix: pad dim 1 to 32, or pass sizes=$",
    ),
    "shard does not divide": (
        lambda m: mc.shard(matrix(3), "a", mesh=m),
        r"^meshcomm.shard: x.shape\[0\] = 3 is not divisible by axis 'a' \(size 2\)", r"pad dim 0 to 4, or pass sizes=", AT,
    ),
    "shard of a leaf does not divide": (
        lambda m: mc.shard({"w": matrix(4), "b": matrix(3)}, "a", mesh=m), r"^meshcomm.shard: .*shape\[0\] = 3 is not", r"x\['b'\]",
    ),
    "all_to_all does not divide": (
        lambda m: mc.all_to_all(matrix(3, 4), "a", 0, 1, mesh=m),
        r"^meshcomm.all_to_all: x.shape\[0\] = 3 is not divisible by axis 'a'", r"or pass send_sizes= and recv_sizes=",
    ),
    "dim too large": (
        lambda m: mc.all_gather(matrix(2, 3), "a", dim=2, mesh=m),
        r"^meshcomm.all_gather: dim=2 is not a dim of x\.", r"x f32\[2, 3\]", AT, r"fix: an int from -2 to 1",
    ),
    "dim too small": (lambda m: mc.shard(matrix(2, 4), "a", dim=-3, mesh=m), r"^meshcomm.shard: dim=-3 is not a dim of x"),
    "dim of a leaf": (
        lambda m: mc.all_gather([matrix(2, 3), matrix(2)], "a", dim=1, mesh=m), r"^meshcomm.all_gather: dim=1 is not a dim", r"x\[1\]",
    ),
    "dim no int": (lambda m: mc.all_gather(matrix(2), "a", dim="0", mesh=m), r"dim='0' is not a dim of x", r"fix: an int"),
    "dim a bool": (lambda m: mc.all_gather(matrix(2, 2), "a", dim=True, mesh=m), r"dim=True is not a dim of x"),
    "dim of 0-d": (lambda m: mc.shard(matrix(), "a", mesh=m), r"^meshcomm.shard: dim=0 is not a dim of x"),
    "reduce_scatter of 0-d": (lambda m: mc.reduce_scatter(matrix(), "a", mesh=m), r"dim=0 is not a dim of x"),
    "split_dim": (lambda m: mc.all_to_all(matrix(2, 2), "a", 2, 0, mesh=m), r"^meshcomm.all_to_all: split_dim=2 is not a dim"),
    "concat_dim": (lambda m: mc.all_to_all(matrix(2, 2), "a", 0, -3, mesh=m), r"concat_dim=-3 is not a dim of x"),
    "gather dim": (lambda m: mc.gather(matrix(2), "a", dim=1, mesh=m), r"^meshcomm.gather: dim=1 is not a dim of x"),
    "sizes too few": (
        lambda m: mc.all_gather(matrix(2), "b", sizes=[2], mesh=m),
        r"^meshcomm.all_gather: sizes has 1 lengths, axis 'b' has size 2", r"got: sizes=\[2\]", AT,
    ),
    "sizes of another dim": (
        lambda m: mc.all_gather(matrix(2), "b", sizes=[3, 3], mesh=m),
        r"sizes\[\d\] = 3, but x.shape\[0\] = 2 on that index", r"sizes=\(3, 3\)",
    ),
    "sizes that do not sum": (
        lambda m: mc.shard(matrix(5), "b", sizes=[2, 2], mesh=m),
        r"^meshcomm.shard: sizes sum to 4, x.shape\[0\] is 5", r"x f32\[5\]", r"sizes=\(2, 2\)",
    ),
    "scatter sizes that do not sum": (
        lambda m: mc.reduce_scatter(matrix(5), "b", sizes=[2, 2], mesh=m), r"^meshcomm.reduce_scatter: sizes sum to 4",
    ),
    "negative sizes": (
        lambda m: mc.shard(matrix(5), "b", sizes=[6, -1], mesh=m),
        r"sizes=\[6, -1\] is not a list of lengths", r"fix: one non-negative int per index of the axis",
    ),
    "sizes no list": (lambda m: mc.shard(matrix(4), "b", sizes=2, mesh=m), r"sizes=2 is not a list of lengths"),
    "send_sizes that do not sum": (
        lambda m: mc.all_to_all(matrix(4), "b", 0, 0, [1, 1], [1, 1], mesh=m),
        r"^meshcomm.all_to_all: send_sizes sum to 2, x.shape\[0\] is 4",
    ),
    "send_sizes alone": (
        lambda m: mc.all_to_all(matrix(4), "b", 0, 0, [2, 2], mesh=m),
        r"send_sizes without recv_sizes where split_dim and concat_dim are the same", r"fix: give both",
    ),
    "recv_sizes alone": (
        lambda m: mc.all_to_all(matrix(4), "b", 0, 0, recv_sizes=[2, 2], mesh=m), r"recv_sizes without send_sizes",
    ),
    "sizes to oneself": (
        lambda m: mc.all_to_all(matrix(4), "b", 0, 0, [2, 2], [1, 1], mesh=m),
        r"this rank sends 2 to itself and expects 1", r"fix: make both sizes at index \d the same",
    ),
    "recv_sizes of another dim": (
        lambda m: mc.all_to_all(matrix(4, 3), "b", 0, 1, recv_sizes=[2, 2], mesh=m), r"recv_sizes\[\d\] = 2, but x.shape\[1\] = 3",
    ),
}  # fmt: skip

PERMS: dict[str, tuple[Any, ...]] = {
    "destination twice": (
        lambda m: mc.permute(matrix(2), ALL, [(0, 1), (2, 1)], mesh=m),
        r"^meshcomm.permute: destination 1 stands twice in perm", r"perm=\[\(0, 1\), \(2, 1\)\]", AT, r"name each destination once",
    ),
    "source twice": (lambda m: mc.permute(matrix(2), ALL, [(3, 1), (3, 2)], mesh=m), r"source 3 stands twice in perm"),
    "out of range": (
        lambda m: mc.permute(matrix(2), "a", [(0, 2)], mesh=m),
        r"perm pair \(0, 2\) is out of range for axis 'a' \(size 2\)", r"indices along the axis",
    ),
    "negative": (lambda m: mc.permute(matrix(2), "a", [(-1, 0)], mesh=m), r"perm pair \(-1, 0\) is out of range"),
    "no pairs": (lambda m: mc.permute(matrix(2), "a", [0, 1], mesh=m), r"perm=\[0, 1\] is not made of pairs of ints"),
    "triples": (lambda m: mc.permute(matrix(2), "a", [(0, 1, 2)], mesh=m), r"is not made of pairs of ints"),
    "floats": (lambda m: mc.permute(matrix(2), "a", [(0.0, 1)], mesh=m), r"is not made of pairs of ints"),
    "no list": (lambda m: mc.permute(matrix(2), "a", 1, mesh=m), r"perm=1 is not made of pairs of ints"),
    "offset": (lambda m: mc.shift(matrix(2), "a", 1.5, mesh=m), r"^meshcomm.shift: offset=1.5 is not an int", AT),
    "offset a bool": (lambda m: mc.shift(matrix(2), "a", True, mesh=m), r"offset=True is not an int"),
    "wrap": (lambda m: mc.shift(matrix(2), "a", 1, 1, mesh=m), r"wrap=1 is not a bool"),
    "src": (
        lambda m: mc.broadcast(matrix(2), "a", src=2, mesh=m),
        r"^meshcomm.broadcast: src=2 is not an index along axis 'a' \(size 2\)", r"not a global rank", AT,
    ),
    "src negative": (lambda m: mc.broadcast(matrix(2), "a", src=-1, mesh=m), r"src=-1 is not an index"),
    "dst of reduce": (lambda m: mc.reduce(matrix(2), ALL, dst=4, mesh=m), r"dst=4 is not an index along axis \('a', 'b'\)"),
    "dst of gather": (lambda m: mc.gather(matrix(2), "a", dst=2.0, mesh=m), r"^meshcomm.gather: dst=2.0 is not an index"),
    "src of scatter": (lambda m: mc.scatter(None, "a", src=2, mesh=m), r"^meshcomm.scatter: src=2 is not an index"),
    "dst of send": (lambda m: mc.send(matrix(2), "a", 2, mesh=m), r"^meshcomm.send: dst=2 is not an index"),
    "src of recv": (lambda m: mc.recv("a", "0", shape=(), dtype=F32, mesh=m), r"^meshcomm.recv: src='0' is not an index"),
    "send to oneself": (
        lambda m: mc.send(matrix(2), "a", m.coordinate["a"], mesh=m), r"index \d is this rank itself", r"fix: use exchange",
    ),
    "recv from oneself": (
        lambda m: mc.recv("a", m.coordinate["a"], shape=(), dtype=F32, mesh=m), r"index \d is this rank itself",
    ),
}  # fmt: skip

INT, BOOL, COMPLEX = torch.int64, torch.bool, torch.complex64
DTYPES: dict[str, tuple[Any, ...]] = {
    f"{name} {op} of {dtype}": (
        lambda m, name=name, op=op, dtype=dtype: getattr(mc, name)(matrix(4, dtype=dtype), "a", op=op, mesh=m),
        rf"^meshcomm.{name}: op '{op}' is not defined for {dtype}", rf"got: x {short}\[4\]; " + WHERE, AT, fix,
    )
    for name in ("all_reduce", "reduce_scatter", "reduce")
    for op, dtype, short, fix in (
        ("sum", BOOL, "bool", r"fix: cast with x.int\(\), or use op='max' \(any\) or 'min' \(all\)"),
        ("mean", BOOL, "bool", r"fix: cast with x."),
        ("product", BOOL, "bool", r"fix: cast with x.int\(\)"),
        ("mean", INT, "i64", r"fix: cast with x.float\(\) first"),
        ("max", COMPLEX, "c64", r"complex numbers have no order"),
        ("min", COMPLEX, "c64", r"reduce x.abs\(\) or torch.view_as_real\(x\)"),
        ("band", F32, "f32", r"bitwise ops take integers and bool"),
        ("bxor", COMPLEX, "c64", r"bitwise ops take integers and bool"),
        ("bor", torch.bfloat16, "bf16", r"bitwise ops take integers and bool"),
    )
} | {
    "no such op": (
        lambda m: mc.all_reduce(matrix(2), "a", "avg", mesh=m),
        r"^meshcomm.all_reduce: no reduce op 'avg'", r"fix: one of 'sum', 'mean', 'max', 'min', 'product', 'band'", AT,
    ),
    "op no text": (lambda m: mc.reduce_scatter(matrix(2), "a", op=sum, mesh=m), r"no reduce op <built-in function sum>"),
    "op unhashable": (lambda m: mc.all_reduce(matrix(2), "a", ["sum"], mesh=m), r"no reduce op \['sum'\]"),
    "op of a leaf": (
        lambda m: mc.all_reduce({"w": matrix(2), "mask": matrix(2, dtype=BOOL)}, "a", mesh=m),
        r"op 'sum' is not defined for torch.bool", r"leaf: x\['mask'\]$",
    ),
    "float8": (lambda m: mc.all_reduce(matrix(2).to(torch.float8_e5m2), "a", mesh=m), r"'sum' is not defined for torch.float8_e5m2"),
    **{
        f"bucket_mb={value}": (
            lambda m, value=value: mc.all_reduce([matrix(2)], "a", mesh=m, bucket_mb=value),
            r"^meshcomm.all_reduce: bucket_mb=.* is not a positive number", AT,
        )
        for value in (0, -1, "25", True, float("nan"))
    },
    "bucket_mb of pvary": (lambda m: mc.pvary([matrix(2)], "a", mesh=m, bucket_mb=0), r"^meshcomm.pvary: bucket_mb=0 is not"),
}  # fmt: skip


def needs_gradient() -> Tensor:
    return matrix(4).requires_grad_()


def other(m: mc.Mesh) -> int:
    return 1 - m.coordinate["a"]


MESSAGES: dict[str, tuple[Any, ...]] = {
    **{
        name: (call, rf"^meshcomm.{where}: x requires grad, and this function has no backward", r"x f32\[4\]", AT, fix)
        for name, where, call, fix in (
            ("grad in reduce", "reduce", lambda m: mc.reduce(needs_gradient(), "a", mesh=m), r"fix: use all_reduce; or pass x.detach"),
            ("grad in gather", "gather", lambda m: mc.gather(needs_gradient(), "a", mesh=m), r"fix: use all_gather; or"),
            ("grad in send", "send", lambda m: mc.send(needs_gradient(), "a", other(m), mesh=m), r"fix: use permute or shift; or"),
            (
                "grad in exchange", "exchange", lambda m: mc.exchange([(needs_gradient(), other(m))], [], "a", mesh=m),
                r"fix: use permute or (shift|all_to_all)",
            ),
        )
    },
    "shape of recv": (lambda m: mc.recv("a", other(m), shape=4, dtype=F32, mesh=m), r"^meshcomm.recv: shape=4 is not a shape"),
    "negative shape": (lambda m: mc.recv("a", other(m), shape=(-1,), dtype=F32, mesh=m), r"shape=\(-1,\) is not a shape"),
    "dtype of recv": (lambda m: mc.recv("a", other(m), shape=(), dtype="float", mesh=m), r"dtype='float' is not a torch dtype"),
    "tag": (lambda m: mc.send(matrix(2), "a", other(m), tag=-1, mesh=m), r"^meshcomm.send: tag=-1 is not a tag", r"2\*\*30 - 1"),
    "sends no list": (lambda m: mc.exchange(matrix(2), [], "a", mesh=m), r"^meshcomm.exchange: sends is not a list of messages"),
    "recvs no list": (lambda m: mc.exchange([], 3, "a", mesh=m), r"recvs is not a list of messages", r"recvs int"),
    "send entry": (lambda m: mc.exchange([matrix(2)], [], "a", mesh=m), r"is not a message to send", r"fix: \(x, dst\)"),
    "recv entry": (lambda m: mc.exchange([], [(0,)], "a", mesh=m), r"\(0,\) is not a message to receive", r"\(src, shape, dtype\)"),
    "to oneself unmet": (
        lambda m: mc.exchange([(matrix(2), m.coordinate["a"], 5)], [], "a", mesh=m),
        r"a message from this rank to itself with tag 5 is never received",
    ),
    "from oneself unmet": (
        lambda m: mc.exchange([], [(m.coordinate["a"], (2,), F32)], "a", mesh=m),
        r"from this rank to itself nothing is sent with tag 0, f32\[2\] expected",
    ),
    "from oneself of another shape": (
        lambda m: mc.exchange([(matrix(3), m.coordinate["a"])], [(m.coordinate["a"], (2,), F32)], "a", mesh=m),
        r"f32\[3\] is sent with tag 0, f32\[2\] expected",
    ),
}  # fmt: skip

TABLES = {"sizes": SIZES, "perms": PERMS, "dtypes": DTYPES, "messages": MESSAGES}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, rows in TABLES.items() for name in rows])
def test_error(table: str, name: str) -> None:
    mc.launch(expect_named, ranks=4, args=(table, name))


def whole_table(table: str) -> None:
    for name in TABLES[table]:
        expect_named(table, name)


@pytest.mark.parametrize("table", TABLES)
def test_errors_on_processes(pool4: Any, table: str) -> None:
    pool4.run(whole_table, table)


# -------------------------------------------------------------------------------------------------------- scatter

SCATTERS: dict[str, tuple[Callable[[mc.Mesh, bool], Any], str, str]] = {
    "None on src": (lambda m, src: mc.scatter(None, "a", mesh=m), r"x is None on src \(0\)", r"src \(0\) has nothing to scatter"),
    "does not divide": (
        lambda m, src: mc.scatter(matrix(3) if src else None, "a", mesh=m),
        r"x.shape\[0\] = 3 is not divisible by axis 'a'", r"src \(0\) has nothing to scatter; its own error says why",
    ),
    "dim": (
        lambda m, src: mc.scatter(matrix(4) if src else None, "a", dim=1, mesh=m), r"dim=1 is not a dim of x", r"src \(0\) has nothing to scatter",
    ),
    "requires grad": (
        lambda m, src: mc.scatter(needs_gradient() if src else None, "a", mesh=m),
        r"x requires grad.*[\s\S]*use shard\(broadcast\(x\)\)", r"src \(0\) has nothing to scatter",
    ),
}  # fmt: skip


def scatters(name: str) -> None:
    """Only src knows its tensor: its error reaches the others in the message that they wait for."""
    call, on_src, elsewhere = SCATTERS[name]
    mesh = mc.make_mesh({"a": 2, "b": 2})
    src = mesh.coordinate["a"] == 0
    expect(lambda mesh: call(mesh, src), [r"^meshcomm.scatter: " + (on_src if src else elsewhere)], quiet=False)


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_raises_on_every_rank(run4: Callable[..., list[Any]], name: str) -> None:
    run4(scatters, name)


def scatter_from_many() -> None:
    """A tensor where None belongs is seen on that rank alone, but src has sent its header by then."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    if mesh.coordinate["a"] == 1:
        with pytest.raises(mc.MeshError, match=r"index 1 gives a tensor, but src is 0[\s\S]*fix: pass None there"):
            mc.scatter(matrix(4), "a", like=matrix(2), mesh=mesh)


def test_scatter_of_a_tensor_elsewhere(run4: Callable[..., list[Any]]) -> None:
    run4(scatter_from_many)


def scatter_like() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    if mesh.coordinate["a"] == 0:
        with silence(mesh), pytest.raises(mc.MeshError, match=r"like is f32\[3\], the slices are f32\[2\]"):
            mc.scatter(matrix(4), "a", like=matrix(3), mesh=mesh)
    with silence(mesh), pytest.raises(mc.MeshError, match=r"like is not a tensor but tuple"):
        mc.scatter(None, "a", src=1 - mesh.coordinate["a"], like=(2,), mesh=mesh)


def test_scatter_like_another(run4: Callable[..., list[Any]]) -> None:
    run4(scatter_like)


# -------------------------------------------------------------------------------------------------- launch and meshes

LAUNCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no ranks": (lambda: mc.launch(print, ranks=0), r"^meshcomm.launch: ranks=0 is not a positive int"),
    "negative ranks": (lambda: mc.launch(print, ranks=-2), r"ranks=-2 is not a positive int"),
    "ranks a bool": (lambda: mc.launch(print, ranks=True), r"ranks=True is not a positive int"),
    "ranks a float": (lambda: mc.launch(print, ranks=2.0), r"ranks=2.0 is not a positive int"),
    "fn no function": (lambda: mc.launch(3, ranks=2), r"fn is not callable but int"),
    "no such runtime": (
        lambda: mc.launch(print, ranks=2, runtime="threads"), r"no runtime 'threads'[\s\S]*'in-process' or 'processes'",
    ),
    "backend in-process": (
        lambda: mc.launch(print, ranks=2, backend="carrier-pigeon"),
        r"^meshcomm.launch: backend 'carrier-pigeon' is not available",
    ),
    "timeout in-process": (lambda: mc.launch(print, ranks=2, timeout=-3), r"timeout must be a positive number"),
    "guard in-process": (lambda: mc.launch(print, ranks=2, guard=1), r"guard must be True, False or None"),
    "mesh larger than the launch": (
        lambda: mc.launch(lambda: mc.make_mesh({"a": 4}), ranks=2),
        r"^meshcomm.make_mesh: the sizes do not agree: the mesh needs 4 ranks, mc.launch started 2",
    ),
    "mesh smaller than the launch": (
        lambda: mc.launch(lambda: mc.make_mesh({"a": 2}), ranks=4), r"the mesh needs 2 ranks, mc.launch started 4",
    ),
    "a mesh made for others": (
        lambda: mc.launch(lambda m=mc.make_mesh({"a": 2}): mc.all_reduce(x(), "a", mesh=m), ranks=4),
        r"a mesh made for 2 ranks is used among 4[\s\S]*fix: launch as many ranks as the mesh has",
    ),
    "use_mesh of a dict": (lambda: mc.use_mesh({"a": 2}), r"^meshcomm.use_mesh: expected a Mesh, got dict"),
    "rank outside": (lambda: mc.make_mesh({"a": 2}).rank, r"^meshcomm.mesh.rank: called outside a rank"),
    "coordinate outside": (lambda: mc.make_mesh({"a": 2}).coordinate, r"called outside a rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_launching(name: str) -> None:
    call, pattern = LAUNCHES[name]
    with pytest.raises(mc.MeshError, match=pattern):
        call()


def wrong_world() -> None:
    with pytest.raises(mc.MeshError, match=r"the sizes do not agree: the mesh needs 8 ranks, .* 4"):
        mc.make_mesh({"a": 8})
    with pytest.raises(mc.MeshError, match=r"ranks=2, but 4 ranks are running already[\s\S]*fix: ranks=4, or start 2"):
        mc.launch(print, ranks=2)


def test_sizes_against_the_world(run4: Callable[..., list[Any]]) -> None:
    run4(wrong_world)


def test_the_kinds_of_error() -> None:
    assert issubclass(mc.MeshError, ValueError)
    assert issubclass(mc.CommError, RuntimeError)
    assert issubclass(mc.VaryingError, RuntimeError)
    assert not issubclass(mc.CommError, mc.MeshError)


def test_a_mesh_error_shows_no_inner_error() -> None:
    with pytest.raises(mc.MeshError) as caught:
        mc.all_reduce([None], "a", mesh=mc.make_mesh({"a": 1}))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


MESH = mc.make_mesh({"a": 2})


KEEPING: dict[str, Callable[[], object]] = {
    "no mesh": lambda: mc.all_reduce(torch.ones(2), "a"),
    "an unknown axis": lambda: mc.all_reduce(torch.ones(2), "b", mesh=MESH),
    "a layout": lambda: mc.plan("a", "b c", mesh=MESH),
    "a rank that fails": lambda: mc.launch(lambda: mc.all_reduce(torch.ones(2), "b", mesh=MESH), ranks=2),
    "a rank with an error of its own": lambda: mc.launch(lambda: {}["x"], ranks=2),
    "shard_map": lambda: mc.shard_map(
        lambda x: mc.all_reduce(x, "b"), mesh=MESH, in_specs=("(a b)",), out_specs="b"
    )(torch.ones(4)),
    "an adaptor": lambda: mc.parallel.data_parallel(torch.nn.Linear(2, 2), "b", grads="mean", mesh=MESH),
    "a time-out": lambda: mc.launch(
        lambda: mc.axis_index("a", mesh=MESH) or mc.all_reduce(torch.ones(2), "a", mesh=MESH, timeout=1e-3), ranks=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPING)
def test_an_error_that_was_handled_keeps_nothing(name: str) -> None:
    """What the frames of its traceback have goes with it, and not when garbage is collected."""

    class Large:
        pass

    kept = []

    def step() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        KEEPING[name]()
        raise RuntimeError

    gc.disable()
    try:
        with contextlib.suppress(Exception):
            step()
        assert kept[0]() is None
    finally:
        gc.enable()
