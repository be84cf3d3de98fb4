"""Wrong calls over the whole public API: of which function, what is wrong, the call, and the text of its error.

``ROWS`` run on the ranks of a 2 x 2 mesh ``{"a": 2, "b": 2}``, inside ``use_mesh``; ``PLAIN`` in a process of no launch.
"""

from __future__ import annotations

import contextlib
import io
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import meshcomm as mc
from meshcomm import _torch, parallel
from meshcomm.parallel import Column, checkpoint, fsdp
from meshcomm.runtime.transports.algorithms import PacketLink
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.runtime.transports.threads.transport import InProcessLink
from meshcomm.tracing.budget import comm_budget

__all__ = [
    "FEW_WRONG", "ONE_WRONG", "PEER", "PLAIN", "ROWS", "WRONG_RANK", "Here", "Outcome", "Row", "Together", "one_wrong", "outcome",
    "outcomes", "runs_on", "silent", "works",
]  # fmt: skip


class Here:
    """What calls are made with, on one rank; made together with the other ranks."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.mesh = mc.make_mesh({"a": 2, "b": 2})
        self.a, self.b = self.mesh.coordinate["a"], self.mesh.coordinate["b"]
        self.replicated = parallel.data_parallel(linear(), "a", grads="sum", mesh=self.mesh)
        self.sharded = parallel.fully_shard(linear(), "a", grads="sum", mesh=self.mesh)
        self.parallel = parallel.tensor_parallel(two_layers(), {"0": "column", "1": "row"}, axis="a", mesh=self.mesh)
        self.shards, self.tree = fsdp.shard({"w": x(32)}, "a", mesh=self.mesh)
        self.in_processes = current_rank() is None
        self.unnamed: Any = init_device_mesh("cpu", (2, 2)) if self.in_processes else None

    @property
    def other(self) -> int:
        """The other index along ``a``."""
        return 1 - self.a


class Row(NamedTuple):
    """One wrong call."""

    function: str
    cause: str
    call: Callable[[Here], Any]
    text: str
    """A regular expression that the error's text matches somewhere."""
    kind: type[Exception] = mc.MeshError
    told: bool = False
    """The ranks tell each other what is wrong, so that a call that is wrong on one of them is an error on all."""
    bare: bool = False
    """There is no current mesh."""
    where: str = ""
    """"in-process" or "processes", where it makes sense in one of them alone."""


ROWS: list[Row] = []
PLAIN: list[Row] = []


def bad(function: str, cause: str, call: Callable[[Here], Any], text: str, **more: Any) -> None:
    """A row for ranks."""
    ROWS.append(Row(function, cause, call, text, **more))


def plain(function: str, cause: str, call: Callable[[], Any], text: str, **more: Any) -> None:
    """A row for a process that is no rank."""
    PLAIN.append(Row(function, cause, lambda _: call(), text, **more))


# ------------------------------------------------------------------------------------------------------ to call with


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def in_vmap(call: Callable[[Tensor], object]) -> object:
    return torch.func.vmap(lambda x: (call(x), x)[1])(torch.ones(2, 4))


def in_jvp(call: Callable[[Tensor], object]) -> object:
    return torch.func.jvp(lambda x: (call(x), x)[1], (torch.ones(4),), (torch.ones(4),))


def in_outer_jvp(call: Callable[[Tensor], object]) -> object:
    """The tangent is of an outer level, which the inner ones hide."""
    one = torch.ones(4)

    def outer(w: Tensor) -> Tensor:
        def inner(v: Tensor) -> Tensor:
            call(w)
            return (v * w).sum()

        return torch.func.grad(inner)(one)

    return torch.func.jvp(outer, (one,), (one,))


def in_dual_level(call: Callable[[Tensor], object]) -> object:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(torch.ones(4), torch.ones(4)))


def needs_gradient() -> Tensor:
    return x(4).requires_grad_()


def linear(*size: int) -> nn.Linear:
    return nn.Linear(*(size or (4, 4)))


def lazy_buffers() -> nn.Sequential:
    return nn.Sequential(linear(), nn.LazyBatchNorm1d(affine=False))


def two_layers() -> nn.Sequential:
    return nn.Sequential(linear(4, 8), linear(8, 4))


class Own(Tensor):
    """Its data is not one dense tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("looked at")


def own() -> Tensor:
    return Tensor._make_wrapper_subclass(Own, (4,))  # type: ignore[attr-defined]


def round_and_round() -> list[Any]:
    tree: list[Any] = [x(2)]
    tree.append(tree)
    return tree


def meta(*shape: int) -> Tensor:
    return torch.ones(shape or (4,), device="meta")


def sparse() -> Tensor:
    return torch.eye(4).to_sparse()


nan, inf = math.nan, math.inf
HUGE = 2**63
CYRILLIC = "\u0430"  # looks like the a that is meant

AT = r"at a=\d, b=\d"
MESH = r"mesh \{'a': 2, 'b': 2\}"

# fmt: off
# ------------------------------------------------------------------------------------- an axis, in all that take one

AXIS: dict[str, Callable[[Any], Any]] = {
    "pvary": lambda axis: mc.pvary(x(4), axis),
    "all_reduce": lambda axis: mc.all_reduce(x(4), axis),
    "all_gather": lambda axis: mc.all_gather(x(4), axis),
    "all_gather_invariant": lambda axis: mc.all_gather_invariant(x(4), axis),
    "shard": lambda axis: mc.shard(x(4), axis),
    "reduce_scatter": lambda axis: mc.reduce_scatter(x(4), axis),
    "all_to_all": lambda axis: mc.all_to_all(x(4, 4), axis, 0, 1),
    "all_to_all_ragged": lambda axis: mc.all_to_all_ragged(x(4), torch.tensor([2, 2]), axis),
    "permute": lambda axis: mc.permute(x(4), axis, [(0, 1)]),
    "shift": lambda axis: mc.shift(x(4), axis),
    "scan": lambda axis: mc.scan(x(4), axis),
    "broadcast": lambda axis: mc.broadcast(x(4), axis),
    "axis_index": mc.axis_index,
    "argmax": lambda axis: mc.argmax(x(4), axis),
    "argmin": lambda axis: mc.argmin(x(4), axis),
    "axis_size": mc.axis_size,
    "reduce": lambda axis: mc.reduce(x(4), axis),
    "gather": lambda axis: mc.gather(x(4), axis),
    "scatter": lambda axis: mc.scatter(x(4), axis, like=x(2)),
    "send": lambda axis: mc.send(x(4), axis, 1),
    "recv": lambda axis: mc.recv(axis, 1, shape=(2,), dtype=torch.float32),
    "exchange": lambda axis: mc.exchange([], [], axis),
    "send_object": lambda axis: mc.send_object(1, axis, 1),
    "recv_object": lambda axis: mc.recv_object(axis, 1),
    "barrier": mc.barrier,
    "sync_seed": mc.sync_seed,
    "fork_rng": lambda axis: mc.fork_rng(axis).__enter__(),
    "is_main": mc.is_main,
    "main_only": lambda axis: mc.main_only(axis=axis, broadcast=True)(int)(),
    "broadcast_object": lambda axis: mc.broadcast_object(1, axis),
    "all_gather_object": lambda axis: mc.all_gather_object(1, axis),
    "gather_object": lambda axis: mc.gather_object(1, axis),
    "scatter_object": lambda axis: mc.scatter_object([1, 2], axis),
    "collect_results": lambda axis: mc.collect_results([1], 1, axis),
    "weighted_mean": lambda axis: mc.weighted_mean(x(), 1, axis),
    "assert_invariant": lambda axis: mc.assert_invariant(x(4), axis),
    "all_reduce_params": lambda axis: mc.all_reduce_params([x(4)], axis),
    "Metrics.reduce": lambda axis: mc.Metrics({"loss": "mean"}).reduce(axis),
    "data_parallel": lambda axis: parallel.data_parallel(linear(), axis, grads="sum"),
    "fully_shard": lambda axis: parallel.fully_shard(linear(), axis, grads="sum"),
    "tensor_parallel": lambda axis: parallel.tensor_parallel(two_layers(), {"*": "column"}, axis=axis),
    "auto_plan": lambda axis: parallel.auto_plan(two_layers(), axis),
    "convert_batch_norm": lambda axis: parallel.convert_batch_norm(nn.BatchNorm1d(2), axis),
    "sync_batch_norm": lambda axis: parallel.sync_batch_norm(x(4, 2), axis),
    "SyncBatchNorm": lambda axis: parallel.SyncBatchNorm(2, axis),
    "enter": lambda axis: parallel.enter(x(4, 2), axis),
    "leave": lambda axis: parallel.leave(x(4, 2), axis),
    "column_linear": lambda axis: parallel.column_linear(x(4), x(2, 4), axis=axis),
    "row_linear": lambda axis: parallel.row_linear(x(4), x(2, 4), axis=axis),
    "vocab_embedding": lambda axis: parallel.vocab_embedding(torch.tensor([1]), x(4, 2), axis=axis),
    "vocab_cross_entropy": lambda axis: parallel.vocab_cross_entropy(x(1, 4), torch.tensor([1]), axis=axis),
    "linear_cross_entropy": lambda axis: parallel.linear_cross_entropy(x(1, 4), x(2, 4), torch.tensor([1]), axis=axis),
    "context_attention": lambda axis: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis=axis),
    "balance": lambda axis: parallel.balance(x(2), torch.tensor([0, 1]), axis, rate=0.1),
    "experts": lambda axis: parallel.experts(x(2, 3), torch.tensor([[0], [1]]), x(2, 1), lambda rows, counts: rows, axis=axis, count=4),
    "pipelined": lambda axis: parallel.pipelined(linear(), axis, loss=nn.functional.mse_loss, microbatches=2, grads="mean"),
    "context_order": lambda axis: parallel.context_order(8, axis),
    "pipeline": lambda axis: parallel.pipeline(lambda w, h: h * w, x(3), x(2, 3), axis=axis),
    "heads_of": lambda axis: parallel.heads_of(x(4), 1, axis=axis),
    "parallel_attention": lambda axis: parallel.parallel_attention(
        x(1, 2, 4), x(2, 4), x(2, 4), x(2, 4), x(4, 2), axis=axis, heads=2
    ),
    "sequence_layer_norm": lambda axis: parallel.sequence_layer_norm(x(4, 2), axis=axis),
    "sequence_rms_norm": lambda axis: parallel.sequence_rms_norm(x(4, 2), axis=axis),
    "fsdp.shard": lambda axis: fsdp.shard({"w": x(4)}, axis),
}  # fmt: skip
OTHER_AXES: list[tuple[str, Any, str]] = [
    ("an axis that looks like another", CYRILLIC, r"no axis '\u0430' in the mesh[\s\S]*CYRILLIC SMALL LETTER A"),
    ("a list as axis", ["a"], r"an axis is a name, not \['a'\]"),
    ("a set of axes", {"a"}, r"an axis is a name, not \{'a'\}"),
    ("an axis twice", ("a", "b", "a"), r"an axis is named twice"),
    ("a tuple in a tuple", (("a",), "b"), r"an axis is a name, not \('a',\)"),
    ("a misspelt axis", ("a", "bb"), r"no axis 'bb' in the mesh[\s\S]*; did you mean 'b'\?"),
    ("an int as axis", 0, r"an axis is a name, not 0"),
    ("an empty name as axis", "", r"no axis '' in the mesh"),
]  # fmt: skip

for i, (name, over) in enumerate(AXIS.items()):
    unknown = rf"^meshcomm\..*: no axis 'z' in the mesh\.\n  got: axis .*{MESH}\n  fix: one of 'a', 'b', or a tuple"
    bad(name, "no such axis", lambda h, over=over: over("z"), unknown)
    cause, axis, said = OTHER_AXES[i % len(OTHER_AXES)]  # each of them in some functions
    bad(name, cause, lambda h, over=over, axis=axis: over(axis), said)
for name in ("all_reduce", "barrier", "reduce", "sync_seed", "main_only", "gather_object", "data_parallel", "enter"):
    bad(name, "no mesh", lambda h, over=AXIS[name]: over("a"), r"there is no mesh\.[\s\S]*fix: pass mesh=, or", bare=True)

# ----------------------------------------------------------------------------------------------- the collectives' own

TENSORS: list[tuple[str, str, Callable[[], Any], str]] = [
    ("all_reduce", "a number", lambda: 3.0, r"x is not a tensor but float"),
    ("shift", "None", lambda: None, r"x is not a tensor but NoneType"),
    ("all_gather", "an array", lambda: np.ones(4), r"x is not a tensor but ndarray[\s\S]*fix: .*torch.as_tensor"),
    ("pvary", "a generator", lambda: linear().parameters(), r"x is not a tensor but generator[\s\S]*fix: .*list\("),
    ("broadcast", "a module", linear, r"x is not a tensor but Linear"),
    ("all_reduce", "a set", lambda: {"x"}, r"x is not a tensor but set"),
    ("shard", "None in a dict", lambda: {"w": x(4), "b": None}, r"x is not a tensor but NoneType[\s\S]*leaf: x\['b'\]$"),
    ("permute", "a number deep down", lambda: [x(4), {"k": (x(4), 1)}], r"x is not a tensor but int[\s\S]*leaf: x\[1\]\['k'\]\[1\]$"),
    ("pvary", "a string in a list", lambda: [x(4), "text"], r"x is not a tensor but str[\s\S]*leaf: x\[1\]$"),
    ("all_reduce", "a tree in itself", round_and_round, r"x contains itself"),
    ("all_reduce", "on meta", meta, r"x is on the wrong device, meta[\s\S]*move it to cpu"),
    ("all_gather", "a leaf on meta", lambda: [x(4), meta()], r"x is on the wrong device[\s\S]*leaf: x\[1\]$"),
    ("reduce_scatter", "sparse", sparse, r"x is a torch.sparse_coo tensor[\s\S]*fix: .*to_dense\(\)"),
    ("shift", "sparse rows", lambda: quiet(lambda: torch.eye(4).to_sparse_csr()), r"x is a torch.sparse_csr tensor"),
    ("all_reduce", "quantized", lambda: quiet(lambda: torch.quantize_per_tensor(x(4), 1, 0, torch.qint8)), r"x is a quantized tensor[\s\S]*dequantize"),
    ("all_gather", "nested", lambda: quiet(lambda: torch.nested.nested_tensor([x(2), x(3)])), r"x is a nested tensor[\s\S]*to_padded"),
    ("broadcast", "jagged", lambda: torch.nested.nested_tensor([x(2), x(3)], layout=torch.jagged), r"x is a NestedTensor, whose data"),
    ("all_reduce", "a subclass", own, r"x is a Own, whose data is not one dense tensor"),
    ("gather", "a tree", lambda: [x(4)], r"x is not a tensor but list"),
    ("reduce", "a dict", lambda: {"x": x(4)}, r"x is not a tensor but dict"),
]  # fmt: skip
WITH: dict[str, Callable[[Any], Any]] = {
    "pvary": lambda y: mc.pvary(y, "a"),
    "all_reduce": lambda y: mc.all_reduce(y, "a"),
    "all_gather": lambda y: mc.all_gather(y, "a"),
    "shard": lambda y: mc.shard(y, "a"),
    "reduce_scatter": lambda y: mc.reduce_scatter(y, "a"),
    "permute": lambda y: mc.permute(y, "a", [(0, 1)]),
    "shift": lambda y: mc.shift(y, "a"),
    "scan": lambda y: mc.scan(y, "a"),
    "broadcast": lambda y: mc.broadcast(y, "a"),
    "gather": lambda y: mc.gather(y, "a"),
    "reduce": lambda y: mc.reduce(y, "a"),
}  # fmt: skip


def quiet(make: Callable[[], Tensor]) -> Tensor:
    """Torch warns of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


for name, cause, make, said in TENSORS:
    bad(name, cause, lambda h, name=name, make=make: WITH[name](make()), rf"^meshcomm\.{name}: {said}")

bad("all_reduce", "a mesh of another kind", lambda h: mc.all_reduce(x(4), "a", mesh={"a": 2}), r"mesh= is a dict[\s\S]*fix: pass a mesh made by")
bad("all_reduce", "no such op", lambda h: mc.all_reduce(x(4), "a", "avg"), r"no reduce op 'avg'[\s\S]*one of 'sum', 'mean'")
bad("all_reduce", "an op that is no text", lambda h: mc.all_reduce(x(4), "a", sum), r"no reduce op <built-in function sum>")
bad("all_reduce", "an op that cannot be hashed", lambda h: mc.all_reduce(x(4), "a", ["sum"]), r"no reduce op \['sum'\]")
bad("all_reduce", "the sum of bool", lambda h: mc.all_reduce(x(4).bool(), "a"), r"op 'sum' is not defined for torch.bool[\s\S]*x.int\(\)")
bad("all_reduce", "the mean of integers", lambda h: mc.all_reduce(x(4).int(), "a", "mean"), r"'mean' is not defined for torch.int32")
bad("all_reduce", "the maximum of complex", lambda h: mc.all_reduce(x(4).cfloat(), "a", "max"), r"complex numbers have no order")
bad("all_reduce", "bits of floats", lambda h: mc.all_reduce(x(4), "a", "bxor"), r"bitwise ops take integers and bool")
bad("all_reduce", "float8", lambda h: mc.all_reduce(x(4).to(torch.float8_e5m2), "a"), r"'sum' is not defined for torch.float8")
bad("all_reduce", "bool in a tree", lambda h: mc.all_reduce({"w": x(4), "m": x(4).bool()}, "a"), r"leaf: x\['m'\]$")
bad("all_reduce", "a bucket of NaN", lambda h: mc.all_reduce([x(4)], "a", bucket_mb=nan), r"bucket_mb=nan is not a positive number")
bad("all_gather", "a bucket of nothing", lambda h: mc.all_gather([x(4)], "a", bucket_mb=0), r"bucket_mb=0 is not a positive")
bad("pvary", "a bucket of text", lambda h: mc.pvary([x(4)], "a", bucket_mb="25"), r"bucket_mb='25' is not a positive")
bad("broadcast", "a bucket of True", lambda h: mc.broadcast([x(4)], "a", bucket_mb=True), r"bucket_mb=True is not a positive")
bad("shift", "a negative bucket", lambda h: mc.shift([x(4)], "a", bucket_mb=-inf), r"bucket_mb=-inf is not a positive")

bad("all_gather", "a dim beyond the last", lambda h: mc.all_gather(x(2, 3), "a", dim=2), r"dim=2 is not a dim of x[\s\S]*f32\[2, 3\][\s\S]*from -2 to 1")
bad("shard", "a dim before the first", lambda h: mc.shard(x(2, 4), "a", dim=-3), r"dim=-3 is not a dim of x")
bad("all_gather", "a dim of text", lambda h: mc.all_gather(x(2), "a", dim="0"), r"dim='0' is not a dim of x")
bad("reduce_scatter", "a dim of True", lambda h: mc.reduce_scatter(x(2, 2), "a", dim=True), r"dim=True is not a dim of x")
bad("gather", "a dim of 0.0", lambda h: mc.gather(x(2), "a", dim=0.0), r"dim=0.0 is not a dim of x")
bad("all_gather_invariant", "a dim of NaN", lambda h: mc.all_gather_invariant(x(2), "a", dim=nan), r"dim=nan is not a dim")
bad("all_gather_invariant", "a dim in a tensor", lambda h: mc.all_gather_invariant(x(2), "a", dim=torch.tensor(0)), r"dim=tensor\(0\) is not a dim")
bad("shard", "a huge dim", lambda h: mc.shard(x(2), "a", dim=HUGE), rf"dim={HUGE} is not a dim of x")
bad("shard", "no dims", lambda h: mc.shard(x(), "a"), r"dim=0 is not a dim of x[\s\S]*x has none")
bad("all_gather", "a dim that one leaf has not", lambda h: mc.all_gather([x(2, 3), x(2)], "a", dim=1), r"dim=1 is not a dim[\s\S]*leaf: x\[1\]")
bad("all_to_all", "a split_dim beyond", lambda h: mc.all_to_all(x(2, 2), "a", 2, 0), r"split_dim=2 is not a dim of x")
bad("all_to_all", "a concat_dim of None", lambda h: mc.all_to_all(x(2, 2), "a", 0, None), r"concat_dim=None is not a dim of x")

bad("shard", "does not divide", lambda h: mc.shard(x(3), "a"), r"x.shape\[0\] = 3 is not divisible by axis 'a' \(size 2\)[\s\S]*pad dim 0 to 4, or pass sizes=")
bad("reduce_scatter", "does not divide", lambda h: mc.reduce_scatter(x(8, 30), ("a", "b"), 1), r"= 30 is not divisible by axis \('a', 'b'\) \(size 4\)[\s\S]*to 32")
bad("all_to_all", "does not divide", lambda h: mc.all_to_all(x(3, 4), "a", 0, 1), r"= 3 is not divisible[\s\S]*send_sizes= and recv_sizes=")
bad("all_gather", "too few sizes", lambda h: mc.all_gather(x(2), "b", sizes=[2]), r"sizes has 1 lengths, axis 'b' has size 2")
bad("all_gather", "sizes of another tensor", lambda h: mc.all_gather(x(2), "b", sizes=(3, 3)), r"sizes\[\d\] = 3, but x.shape\[0\] = 2")
bad("shard", "sizes that do not sum", lambda h: mc.shard(x(5), "b", sizes=[2, 2]), r"sizes sum to 4, x.shape\[0\] is 5[\s\S]*sizes=\(2, 2\)")
bad("reduce_scatter", "sizes that do not sum", lambda h: mc.reduce_scatter(x(5), "b", sizes=[5, 5]), r"sizes sum to 10, x.shape\[0\] is 5")
bad("shard", "a negative size", lambda h: mc.shard(x(5), "b", sizes=[6, -1]), r"sizes=\[6, -1\] is not a list of lengths")
bad("shard", "NaN in the sizes", lambda h: mc.shard(x(4), "b", sizes=[2, nan]), r"sizes=\[2, nan\] is not a list of lengths")
bad("all_gather", "sizes of text", lambda h: mc.all_gather(x(2), "b", sizes="22"), r"sizes='22' is not a list of lengths")
bad("all_gather", "sizes of bytes", lambda h: mc.all_gather(x(2), "b", sizes=b"\x02\x02"), r"is not a list of lengths")
bad("all_gather_invariant", "sizes from a generator", lambda h: mc.all_gather_invariant(x(2), "b", sizes=(2 for _ in range(2))), r"is not a list of lengths")
bad("all_gather_invariant", "sizes in a tensor", lambda h: mc.all_gather_invariant(x(2), "b", sizes=torch.tensor([2, 2])), r"is not a list of lengths[\s\S]*\.tolist\(\)")
bad("shard", "a set of sizes", lambda h: mc.shard(x(4), "b", sizes={1, 3}), r"is not a list of lengths")
bad("all_gather", "huge sizes", lambda h: mc.all_gather(x(2), "b", sizes=[HUGE, HUGE]), r"sizes=\[9223372036854775808, .* is not a list of lengths")
bad("all_gather", "sizes that are too much together", lambda h: mc.all_gather(x(2), "b", sizes=[2**62, 2**62]), r"sizes=\[.*\] is not a list of lengths[\s\S]*2\*\*63")
bad("all_to_all", "send_sizes that do not sum", lambda h: mc.all_to_all(x(4), "b", 0, 0, [1, 1], [1, 1]), r"send_sizes sum to 2, x.shape\[0\] is 4")
bad("all_to_all", "send_sizes alone", lambda h: mc.all_to_all(x(4), "b", 0, 0, [2, 2]), r"send_sizes without recv_sizes[\s\S]*give both")
bad("all_to_all", "another size to oneself", lambda h: mc.all_to_all(x(4), "b", 0, 0, [2, 2], [1, 1]), r"sends 2 to itself and expects 1")
bad("all_to_all", "recv_sizes of another dim", lambda h: mc.all_to_all(x(4, 3), "b", 0, 1, recv_sizes=[2, 2]), r"recv_sizes\[\d\] = 2, but x.shape\[1\] = 3")
bad("all_to_all", "True in recv_sizes", lambda h: mc.all_to_all(x(4), "b", 0, 0, [2, 2], [True, 2]), r"recv_sizes=\[True, 2\] is not a list of lengths")

bad("permute", "a destination twice", lambda h: mc.permute(x(2), ("a", "b"), [(0, 1), (2, 1)]), r"destination 1 stands twice in perm[\s\S]*name each destination once")
bad("permute", "a source twice", lambda h: mc.permute(x(2), ("a", "b"), [(3, 1), (3, 2)]), r"source 3 stands twice in perm")
bad("permute", "beyond the axis", lambda h: mc.permute(x(2), "a", [(0, 2)]), r"perm pair \(0, 2\) is out of range for axis 'a' \(size 2\)")
bad("permute", "a negative index", lambda h: mc.permute(x(2), "a", [(-1, 0)]), r"perm pair \(-1, 0\) is out of range")
bad("permute", "destinations alone", lambda h: mc.permute(x(2), "a", [1, 0]), r"perm=\[1, 0\] is not made of pairs of ints")
bad("permute", "a dict", lambda h: mc.permute(x(2), "a", {0: 1, 1: 0}), r"perm=\{0: 1, 1: 0\} is not made of pairs[\s\S]*fix: .*\.items\(\)")
bad("permute", "a dict of pairs", lambda h: mc.permute(x(2), "a", {(0, 1): 2}), r"perm=.* is not made of pairs")
bad("permute", "a perm of text", lambda h: mc.permute(x(2), "a", ["01", "10"]), r"is not made of pairs of ints")
bad("permute", "floats", lambda h: mc.permute(x(2), "a", [(0.0, 1.0)]), r"is not made of pairs of ints")
bad("permute", "None as perm", lambda h: mc.permute(x(2), "a", None), r"perm=None is not made of pairs of ints")
bad("permute", "pairs without end", lambda h: mc.permute(x(2), "a", iter(lambda: (0, 1), None)), r"source 0 stands twice")
bad("scan", "exclusive of text", lambda h: mc.scan(x(2), "a", exclusive="no"), r"exclusive='no' is not a bool")
bad("scan", "reverse of 1", lambda h: mc.scan(x(2), "a", reverse=1), r"reverse=1 is not a bool")
bad("scan", "a mean", lambda h: mc.scan(x(2), "a", "mean"), r"no reduce op 'mean'[\s\S]*axis_index")
bad("scan", "an op that is none", lambda h: mc.scan(x(2), "a", "add"), r"no reduce op 'add'")
bad("scan", "a sum of bools", lambda h: mc.scan(x(2, dtype=torch.bool), "a"), r"op 'sum' is not defined for torch.bool")
bad("shift", "half an offset", lambda h: mc.shift(x(2), "a", 1.5), r"offset=1.5 is not an int")
bad("shift", "an offset of NaN", lambda h: mc.shift(x(2), "a", nan), r"offset=nan is not an int")
bad("shift", "an offset of True", lambda h: mc.shift(x(2), "a", True), r"offset=True is not an int")
bad("shift", "wrap of text", lambda h: mc.shift(x(2), "a", 1, "no"), r"wrap='no' is not a bool")
bad("broadcast", "src beyond the axis", lambda h: mc.broadcast(x(2), "a", src=2), r"src=2 is not an index along axis 'a' \(size 2\)[\s\S]*not a global rank")
bad("broadcast", "a negative src", lambda h: mc.broadcast(x(2), "a", src=-1), r"src=-1 is not an index")
bad("broadcast", "src of None", lambda h: mc.broadcast(x(2), "a", src=None), r"src=None is not an index")

# --------------------------------------------------------------------------------------------------- to and from one

bad("reduce", "dst beyond the axis", lambda h: mc.reduce(x(2), ("a", "b"), dst=4), r"dst=4 is not an index along axis \('a', 'b'\)")
bad("reduce", "needs a gradient", lambda h: mc.reduce(needs_gradient(), "a"), r"x requires grad, and this function has no backward[\s\S]*fix: use all_reduce; or pass x.detach")
bad("reduce", "of a batch", lambda h: in_vmap(lambda x: mc.reduce(x, "a")), r"x is batched by torch.func.vmap, and this function has no rule for that")
bad("reduce", "has a tangent", lambda h: in_jvp(lambda x: mc.reduce(x, "a")), r"x has a tangent, and this function has no forward mode")
bad("reduce", "has a tangent of an outer level", lambda h: in_outer_jvp(lambda x: mc.reduce(x, "a")), r"x has a tangent, and this function has no forward mode")
bad("reduce", "has a tangent in a dual level", lambda h: in_dual_level(lambda x: mc.reduce(x, "a")), r"x has a tangent, and this function has no forward mode[\s\S]*; or pass x.detach")
bad("reduce", "the product of bool", lambda h: mc.reduce(x(2).bool(), "a", op="product"), r"op 'product' is not defined for torch.bool")
bad("gather", "dst of text", lambda h: mc.gather(x(2), "a", dst="0"), r"dst='0' is not an index")
bad("gather", "needs a gradient", lambda h: mc.gather(needs_gradient(), "a"), r"x requires grad[\s\S]*fix: use all_gather; or")
bad("gather", "of a batch", lambda h: in_vmap(lambda x: mc.gather(x, "a")), r"x is batched by torch.func.vmap, and this function has no rule for that")
bad("gather", "has a tangent", lambda h: in_jvp(lambda x: mc.gather(x, "a")), r"x has a tangent, and this function has no forward mode")
bad("gather", "has a tangent of an outer level", lambda h: in_outer_jvp(lambda x: mc.gather(x, "a")), r"x has a tangent, and this function has no forward mode")
bad("gather", "has a tangent in a dual level", lambda h: in_dual_level(lambda x: mc.gather(x, "a")), r"x has a tangent, and this function has no forward mode[\s\S]*; or pass x.detach")
bad("scatter", "src beyond the axis", lambda h: mc.scatter(None, "a", src=2), r"src=2 is not an index")
bad("scatter", "later without like", lambda h: mc.scatter(None, "a", async_op=True), r"async_op=True without like=[\s\S]*fix: pass like= on all ranks")
bad("scatter", "like is a shape", lambda h: mc.scatter(None, "a", src=h.other, like=(2,)), r"like is not a tensor but tuple")
bad("scatter", "like on meta", lambda h: mc.scatter(None, "a", src=h.other, like=meta()), r"like is on the wrong device, meta")
bad("scatter", "a tensor beside src", lambda h: mc.scatter(x(4), "a", src=h.other, like=x(2)), r"index \d gives a tensor, but src is \d[\s\S]*pass None there")
bad("scatter", "None on src", lambda h: mc.scatter(None, "a"), r"x is None on src \(0\)|src \(0\) has nothing to scatter", told=True)
bad("scatter", "does not divide", lambda h: mc.scatter(None if h.a else x(3), "a"), r"x.shape\[0\] = 3 is not divisible|nothing to scatter", told=True)
bad("send", "to oneself", lambda h: mc.send(x(2), "a", h.a), r"index \d is this rank itself[\s\S]*use exchange")
bad("send", "dst beyond the axis", lambda h: mc.send(x(2), "a", 2), r"dst=2 is not an index")
bad("send", "needs a gradient", lambda h: mc.send(needs_gradient(), "a", h.other), r"x requires grad[\s\S]*fix: use permute or shift; or")
bad("send", "of a batch", lambda h: in_vmap(lambda x: mc.send(x, "a", h.other)), r"x is batched by torch.func.vmap, and this function has no rule for that")
bad("send", "has a tangent", lambda h: in_jvp(lambda x: mc.send(x, "a", h.other)), r"x has a tangent, and this function has no forward mode")
bad("send", "has a tangent of an outer level", lambda h: in_outer_jvp(lambda x: mc.send(x, "a", h.other)), r"x has a tangent, and this function has no forward mode")
bad("send", "has a tangent in a dual level", lambda h: in_dual_level(lambda x: mc.send(x, "a", h.other)), r"x has a tangent, and this function has no forward mode[\s\S]*; or pass x.detach")
bad("send", "a negative tag", lambda h: mc.send(x(2), "a", h.other, tag=-1), r"tag=-1 is not a tag[\s\S]*2\*\*30 - 1")
bad("send", "a tag too large", lambda h: mc.send(x(2), "a", h.other, tag=2**30), r"tag=1073741824 is not a tag")
bad("recv", "from oneself", lambda h: mc.recv("a", h.a, shape=(), dtype=torch.float32), r"index \d is this rank itself")
bad("recv", "src of text", lambda h: mc.recv("a", "0", shape=(), dtype=torch.float32), r"src='0' is not an index")
bad("recv", "a number as shape", lambda h: mc.recv("a", h.other, shape=4, dtype=torch.float32), r"shape=4 is not a shape")
bad("recv", "a negative length", lambda h: mc.recv("a", h.other, shape=(-1,), dtype=torch.float32), r"shape=\(-1,\) is not a shape")
bad("recv", "NaN as length", lambda h: mc.recv("a", h.other, shape=(nan,), dtype=torch.float32), r"shape=\(nan,\) is not a shape")
bad("recv", "text as shape", lambda h: mc.recv("a", h.other, shape="", dtype=torch.float32), r"shape='' is not a shape")
bad("recv", "a huge length", lambda h: mc.recv("a", h.other, shape=(HUGE,), dtype=torch.float32), r"shape=\(9223372036854775808,\) is too large")
bad("recv", "lengths whose product is huge", lambda h: mc.recv("a", h.other, shape=(2**40, 2**40), dtype=torch.int8), r"shape=\(.*\) is too large[\s\S]*bytes")
bad("recv", "the name of a dtype", lambda h: mc.recv("a", h.other, shape=(), dtype="float"), r"dtype='float' is not a torch dtype")
bad("recv", "half a tag", lambda h: mc.recv("a", h.other, shape=(), dtype=torch.float32, tag=0.5), r"tag=0.5 is not a tag")
bad("exchange", "sends in a tensor", lambda h: mc.exchange(x(2), [], "a"), r"sends is not a list of messages")
bad("exchange", "recvs are a number", lambda h: mc.exchange([], 3, "a"), r"recvs is not a list of messages[\s\S]*recvs int")
bad("exchange", "a message without dst", lambda h: mc.exchange([x(2)], [], "a"), r"is not a message to send[\s\S]*fix: \(x, dst\)")
bad("exchange", "a want without shape", lambda h: mc.exchange([], [(0,)], "a"), r"\(0,\) is not a message to receive[\s\S]*\(src, shape, dtype\)")
bad("exchange", "to oneself unmet", lambda h: mc.exchange([(x(2), h.a, 5)], [], "a"), r"to itself with tag 5 is never received")
bad("exchange", "from oneself unmet", lambda h: mc.exchange([], [(h.a, (2,), torch.float32)], "a"), r"to itself nothing is sent with tag 0")
bad("exchange", "another shape from oneself", lambda h: mc.exchange([(x(3), h.a)], [(h.a, (2,), torch.float32)], "a"), r"f32\[3\] is sent with tag 0, f32\[2\] expected")
bad("exchange", "needs a gradient", lambda h: mc.exchange([(needs_gradient(), h.other)], [], "a"), r"x requires grad[\s\S]*permute or")
bad("exchange", "of a batch", lambda h: in_vmap(lambda x: mc.exchange([(x, h.other)], [], "a")), r"x is batched by torch.func.vmap, and this function has no rule for that")
bad("exchange", "has a tangent", lambda h: in_jvp(lambda x: mc.exchange([(x, h.other)], [], "a")), r"x has a tangent, and this function has no forward mode")
bad("exchange", "has a tangent of an outer level", lambda h: in_outer_jvp(lambda x: mc.exchange([(x, h.other)], [], "a")), r"x has a tangent, and this function has no forward mode")
bad("exchange", "has a tangent in a dual level", lambda h: in_dual_level(lambda x: mc.exchange([(x, h.other)], [], "a")), r"x has a tangent, and this function has no forward mode[\s\S]*; or pass x.detach")
bad("barrier", "a time-out of 0", lambda h: mc.barrier("a", 0), r"timeout must be a positive number of seconds")
bad("barrier", "a time-out of NaN", lambda h: mc.barrier("a", nan), r"timeout must be a positive[\s\S]*got: nan")
bad("barrier", "a time-out without end", lambda h: mc.barrier("a", inf), r"timeout must be a positive[\s\S]*got: inf")
bad("barrier", "a time-out of text", lambda h: mc.barrier("a", "1"), r"timeout must be a positive[\s\S]*got: '1'")
bad("barrier", "a huge time-out", lambda h: mc.barrier("a", 1e300), r"timeout must be a positive[\s\S]*got: 1e\+300")
bad("barrier", "a time-out for later", lambda h: mc.barrier("a", 1.0, async_op=True), r"timeout= with async_op=True[\s\S]*to the wait of the work")

for name, call, said in (
    ("all_reduce", lambda: mc.all_reduce(x(2), "a", timeout=nan), r"timeout must be a positive number of seconds[\s\S]*got: nan"),
    ("all_gather", lambda: mc.all_gather(x(2), "a", timeout="1"), r"timeout must be a positive[\s\S]*got: '1'"),
    ("shift", lambda: mc.shift(x(2), "a", timeout=0), r"timeout must be a positive[\s\S]*got: 0"),
    ("permute", lambda: mc.permute(x(2), "a", [(0, 1)], timeout=-inf), r"timeout must be a positive[\s\S]*got: -inf"),
    ("exchange", lambda: mc.exchange([], [], "a", timeout=10**400), r"timeout must be a positive"),
    ("make_mesh", lambda: mc.make_mesh({"a": 4}, timeout=True), r"timeout must be a positive[\s\S]*got: True"),
):
    bad(name, "a time-out that is none", lambda h, call=call: call(), rf"^meshcomm.{name}: {said}")
bad("broadcast", "a time-out for later", lambda h: mc.broadcast(x(2), "a", timeout=1, async_op=True), r"timeout= with async_op=True")
bad("recv", "a time-out for later", lambda h: mc.recv("a", h.other, shape=(), dtype=torch.int8, timeout=1, async_op=True), r"timeout= with async_op=True")

# ------------------------------------------------------------------------------------------------------------- works


def a_work(h: Here) -> mc.Work[Tensor]:
    return mc.pvary(x(2), "a", async_op=True)


bad("Work.wait", "a negative time-out", lambda h: a_work(h).wait(-1), r"timeout=-1 is not a number of seconds")
bad("Work.wait", "a time-out of NaN", lambda h: a_work(h).wait(nan), r"timeout=nan is not a number of seconds")
bad("Work.wait", "a time-out of text", lambda h: a_work(h).wait("1"), r"timeout='1' is not a number of seconds")
bad("Work.then", "no function", lambda h: a_work(h).then(3), r"fn is not callable but int")
bad("wait", "a time-out of True", lambda h: mc.wait([a_work(h)], True), r"timeout=True is not a number of seconds")
bad("wait", "a tree in itself", lambda h: mc.wait(round_and_round()), r"the tree contains itself")
bad("wait", "a time-out in a tensor", lambda h: mc.wait(a_work(h), x()), r"timeout=tensor\(1.\) is not a number of seconds")

# ------------------------------------------------------------------------------------------------------------ meshes

SIZES: list[tuple[str, Any, str]] = [
    ("a list", [("a", 4)], r"a mesh needs a mapping of axis names to sizes"),
    ("no axes", {}, r"a mesh needs a mapping of axis names to sizes"),
    ("a name with a space", {"d p": 4}, r"axis name 'd p' is not an identifier"),
    ("no name", {"": 4}, r"axis name '' is not an identifier"),
    ("a name that is an int", {0: 4}, r"axis name 0 is not an identifier"),
    ("a size of 0", {"a": 0}, r"axis 'a' has size 0[\s\S]*fix: a positive int, or one -1"),
    ("a negative size", {"a": -2}, r"axis 'a' has size -2"),
    ("a size of True", {"a": True, "b": 4}, r"axis 'a' has size True"),
    ("a size of 4.0", {"a": 4.0}, r"axis 'a' has size 4.0"),
    ("a size of NaN", {"a": nan}, r"axis 'a' has size nan"),
    ("a size of text", {"a": "4"}, r"axis 'a' has size '4'"),
    ("two sizes of -1", {"a": -1, "b": -1}, r"more than one size is -1"),
    ("sizes that do not agree", {"a": 8}, r"the sizes do not agree: the mesh needs 8 ranks, .* 4"),
    ("sizes that do not divide", {"a": 3, "b": -1}, r"the sizes do not agree: the mesh needs a multiple of 3 ranks"),
    ("a huge size", {"a": HUGE}, r"the sizes do not agree: the mesh needs 9223372036854775808 ranks"),
]  # fmt: skip
for cause, axes, said in SIZES:
    bad("make_mesh", cause, lambda h, axes=axes: mc.make_mesh(axes), rf"^meshcomm.make_mesh: {said}")
RANKS: list[tuple[str, Any]] = [
    ("a rank twice", [0, 0]), ("a rank that is not there", [0, 4]), ("a negative rank", [0, -1]), ("a rank of True", [0, True]),
    ("a rank of text", "01"), ("a set of ranks", {0, 1}), ("too many ranks", [0, 1, 2]), ("no ranks", []),
]  # fmt: skip
for cause, ranks in RANKS:
    said = r"^meshcomm.make_mesh: (ranks must be different ranks|ranks is a list of ints|the sizes do not agree)"
    bad("make_mesh", cause, lambda h, ranks=ranks: mc.make_mesh({"a": 2}, ranks=ranks), said)
bad("make_mesh", "strict of text", lambda h: mc.make_mesh({"a": 4}, strict="no"), r"strict='no' is not a bool")
plain("make_mesh", "more ranks than there can be", lambda: mc.make_mesh({"a": 2**40, "b": 2**40}), r"ranks in one process")
bad("dump_collectives", "a number as folder", lambda h: mc.dump_collectives(3), r"^meshcomm.dump_collectives: folder=3 is not")
bad("dump_collectives", "no folder", lambda h: mc.dump_collectives(""), r"^meshcomm.dump_collectives: folder='' is not a path")
plain("make_mesh", "no axes", lambda: mc.make_mesh({}), r"a mesh needs a mapping")
bad("Mesh.axis", "no such axis", lambda h: h.mesh.axis("c"), r"^meshcomm.mesh.axis: no axis 'c'")
bad("Mesh.axis", "a set of axes", lambda h: h.mesh.axis({"a", "b"}), r"an axis is a name, not \{")
bad("Mesh.axis", "None", lambda h: h.mesh.axis(None), r"an axis is a name, not None")
bad("Mesh.size_of", "no such axis", lambda h: h.mesh.size_of("A"), r"^meshcomm.mesh.size_of: no axis 'A'[\s\S]*did you mean 'a'\?")
bad("Mesh.size_of", "no axis at all", lambda h: h.mesh.size_of(()), r"no axis is named")
bad("Mesh.device_mesh", "in-process", lambda h: h.mesh.device_mesh, r"ranks in one process have no torch process groups", where="in-process")
bad("Mesh.from_device_mesh", "a mesh of ours", lambda h: mc.Mesh.from_device_mesh(h.mesh), r"expected a torch DeviceMesh, got Mesh")
bad("Mesh.from_device_mesh", "no names", lambda h: mc.Mesh.from_device_mesh(h.unnamed), r"the DeviceMesh has no names[\s\S]*mesh_dim_names=", where="processes")
plain("Mesh.rank", "outside of a rank", lambda: mc.make_mesh({"a": 2}).rank, r"^meshcomm.mesh.rank: called outside a rank")
plain("Mesh.coordinate", "outside of a rank", lambda: mc.make_mesh({"a": 2}).coordinate, r"called outside a rank")
bad("use_mesh", "a dict", lambda h: mc.use_mesh({"a": 2}), r"^meshcomm.use_mesh: expected a Mesh, got dict")
bad("use_mesh", "None", lambda h: mc.use_mesh(None), r"expected a Mesh, got NoneType")
for name in ("all_reduce", "axis_index", "barrier", "broadcast_object", "data_parallel", "leave", "sync_seed", "fsdp.shard"):
    plain(name, "outside of a rank", lambda over=AXIS[name]: on_a_mesh(lambda: over("a")), r"called outside a rank[\s\S]*mc.launch\(fn, ranks=2\)")


def on_a_mesh(call: Callable[[], Any]) -> Any:
    with mc.use_mesh(mc.make_mesh({"a": 2})):
        return call()


def of_another_launch() -> Any:
    (mesh,) = mc.launch(lambda: mc.make_mesh({"a": 1}), ranks=1)
    return mc.launch(lambda: mc.all_reduce(x(2), "a", mesh=mesh), ranks=2)


plain("all_reduce", "a mesh of another launch", of_another_launch, r"a mesh made for 1 ranks? is used among 2")

# ---------------------------------------------------------------------------------------------------- init and launch

INIT: list[tuple[str, dict[str, Any], str]] = [
    ("no such launcher", {"launcher": "pbs"}, r"launcher='pbs' is not known[\s\S]*one of 'pytorch'"),
    ("a launcher that is no text", {"launcher": ["mpi"]}, r"launcher=\['mpi'\] is not known"),
    ("a backend that is no text", {"backend": 3}, r"(backend must be a string|already initialised otherwise: backend)"),
    ("no such method", {"init_method": "http://host:1"}, r"init_method is tcp://host:port, file:///path or env://"),
    ("a method without port", {"init_method": "tcp://host"}, r"init_method has no host and port[\s\S]*tcp://10"),
    ("a method that is an int", {"init_method": 29500}, r"init_method is tcp://host:port"),
    ("a negative rank", {"rank": -1, "world_size": 2}, r"rank must be an int, 0 or more"),
    ("a rank of True", {"rank": True, "world_size": 2}, r"rank must be an int"),
    ("a rank without world_size", {"rank": 0}, r"rank= is given and world_size= is not"),
    ("a world of nobody", {"rank": 0, "world_size": 0}, r"world_size must be an int, 1 or more"),
    ("a rank beyond the world", {"rank": 2, "world_size": 2, "port": 1}, r"rank must be below world_size"),
    ("nowhere to meet", {"rank": 0, "world_size": 2}, r"where do the 2 ranks meet"),
    ("a port of 0", {"port": 0}, r"port must be an int, between 1 and 65535"),
    ("a port too large", {"port": 65536}, r"port must be an int, between 1 and 65535"),
    ("a port of text", {"port": "29500"}, r"port must be an int"),
    ("a store that is none", {"store": "host:1", "rank": 0, "world_size": 2}, r"store is no torch store"),
    ("two places to meet", {"port": 1, "init_method": "tcp://h:1", "rank": 0, "world_size": 2}, r"port= and init_method= or store= both say where to meet"),
    ("a launcher and a rank", {"launcher": "mpi", "rank": 0, "world_size": 2, "port": 1}, r"launcher= and rank= both say who this process is"),
    ("a time-out of 0", {"timeout": 0}, r"timeout must be a positive number of seconds"),
    ("a time-out of NaN", {"timeout": nan}, r"timeout must be a positive number[\s\S]*got: nan"),
    ("a huge time-out", {"timeout": 10**400}, r"timeout must be a positive number"),
    ("a time-out of True", {"timeout": True}, r"timeout must be a positive number[\s\S]*got: True"),
    ("a guard of text", {"guard": "yes"}, r"guard must be True, False or None"),
]  # fmt: skip
for cause, kwargs, said in INIT:
    bad("init", cause, lambda h, kwargs=kwargs: mc.init(**kwargs), rf"^meshcomm.init: {said}")
bad("init", "another world than there is", lambda h: mc.init(backend="nccl"), r"already initialised otherwise: backend", where="processes")

bad("launch", "other ranks than there are", lambda h: mc.launch(print, ranks=2), r"ranks=2, but 4 ranks are running already")
LAUNCH: list[tuple[str, Callable[[], Any], str]] = [
    ("no ranks", lambda: mc.launch(print, ranks=0), r"ranks=0 is not a positive int"),
    ("ranks of True", lambda: mc.launch(print, ranks=True), r"ranks=True is not a positive int"),
    ("ranks of NaN", lambda: mc.launch(print, ranks=nan), r"ranks=nan is not a positive int"),
    ("ranks of text", lambda: mc.launch(print, ranks="2"), r"ranks='2' is not a positive int"),
    ("more ranks than there can be", lambda: mc.launch(print, ranks=2**40), r"ranks=1099511627776 is more than"),
    ("no function", lambda: mc.launch(None, ranks=2), r"fn is not callable but NoneType"),
    ("args of text", lambda: mc.launch(print, 2, "ab"), r"args='ab'.* not a sequence and a mapping"),
    ("args in a set", lambda: mc.launch(print, 2, {1}), r"args=\{1\}.* not a sequence and a mapping"),
    ("kwargs in a list", lambda: mc.launch(print, 2, (), [1]), r".*kwargs=\[1\] are not a sequence and a mapping"),
    ("kwargs that are no names", lambda: mc.launch(print, 2, (), {1: 2}), r".*kwargs=\{1: 2\} are not a sequence and a mapping"),
    ("no such runtime", lambda: mc.launch(print, ranks=2, runtime="threads"), r"no runtime 'threads'[\s\S]*'in-process' or 'processes'"),
    ("a runtime that is None", lambda: mc.launch(print, ranks=2, runtime=None), r"no runtime None"),
    ("no such backend", lambda: mc.launch(print, ranks=2, backend="pigeon"), r"backend 'pigeon' is not available"),
    ("a backend that is no text", lambda: mc.launch(print, ranks=2, backend=3), r"backend must be a string"),
    ("a time-out of text", lambda: mc.launch(print, ranks=2, timeout="3"), r"timeout must be a positive number"),
    ("a guard of 1", lambda: mc.launch(print, ranks=2, guard=1), r"guard must be True, False or None"),
    ("a time-out of NaN", lambda: mc.launch(print, ranks=2, runtime="processes", timeout=nan), r"timeout must be a positive number"),
    ("a function that cannot be sent", lambda: mc.launch(threading.Lock().acquire, ranks=2, runtime="processes"), r".* cannot be sent to other processes"),
]  # fmt: skip
for cause, call, said in LAUNCH:
    plain("launch", cause, call, rf"^meshcomm.launch: {said}")
for cause, shown in {"a number": 7, "no shape": "a b"}.items():
    plain("show", cause, lambda shown=shown: mc.show(shown), r"^meshcomm.show: (there is no picture of a|the layout .* needs)")

# ------------------------------------------------------------------------------------------------ objects and helpers

bad("broadcast_object", "src beyond the axis", lambda h: mc.broadcast_object(1, "a", src=2), r"src=2 is not an index", told=True)
bad("broadcast_object", "cannot be pickled", lambda h: mc.broadcast_object({"f": lambda: 1}, "a"), r"\['f'\]", told=True)
bad("all_gather_object", "a tensor with a graph", lambda h: mc.all_gather_object([needs_gradient() * 2], "a"), r"obj\[0\].*graph", told=True)
bad("gather_object", "a negative dst", lambda h: mc.gather_object(1, "a", dst=-1), r"dst=-1 is not an index", told=True)
bad("gather_object", "a lock", lambda h: mc.gather_object([threading.Lock()], "a"), r"obj\[0\].*lock", told=True)
bad("scatter_object", "too few objects", lambda h: mc.scatter_object(None if h.a else [1], "a"), r"objs has 1 objects for 2 ranks", told=True)
bad("scatter_object", "text in place of a list", lambda h: mc.scatter_object(None if h.a else "ab", "a"), r"objs on src is a str", told=True)
bad("scatter_object", "objects beside src", lambda h: mc.scatter_object([1, 2], "a"), r"objs is given, but src is 0", told=True)
bad("collect_results", "a negative size", lambda h: mc.collect_results([1], -1, "a"), r"size=-1 is not a number of samples", told=True)
bad("collect_results", "a size of NaN", lambda h: mc.collect_results([1], nan, "a"), r"size=nan is not a number of samples", told=True)
bad("send_object", "to oneself", lambda h: mc.send_object(1, "a", h.a), r"index \d is this rank itself")
bad("send_object", "dst beyond the axis", lambda h: mc.send_object(1, "a", 2), r"dst=2 is not an index")
bad("send_object", "a negative tag", lambda h: mc.send_object(1, "a", h.other, tag=-1), r"tag=-1 is not a tag")
bad("recv_object", "a src that is no int", lambda h: mc.recv_object("a", "0"), r"src='0' is not an index")
bad("argmax", "complex numbers", lambda h: mc.argmax(x(4).cfloat(), "a"), r"complex numbers have no order")
bad("all_to_all_ragged", "counts of another length", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([4]), "a"), r"counts is i64\[1\][\s\S]*integers \[2\] or \[2, e\]")
bad("all_to_all_ragged", "counts of floats", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([2.0, 2.0]), "a"), r"counts is f32\[2\]")
bad("all_to_all_ragged", "a list of counts", lambda h: mc.all_to_all_ragged(x(4), [2, 2], "a"), r"counts is not a tensor but list")
bad("all_to_all_ragged", "counts that do not sum", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([2, 1]), "a"), r"counts add up to 3, and there are 4 rows")
bad("all_to_all_ragged", "a negative count", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([5, -1]), "a"), r"counts has -1 among its entries")
bad("all_to_all_ragged", "leaves of other lengths", lambda h: mc.all_to_all_ragged((x(4), x(3)), torch.tensor([2, 2]), "a"), r"counts add up to 4, and there are 3 rows")
bad("all_to_all_ragged", "too many for one", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([1, 3]), "a", most=2), r"3 rows go to index 1, more than most=2")
bad("all_to_all_ragged", "a negative most", lambda h: mc.all_to_all_ragged(x(4), torch.tensor([2, 2]), "a", most=-1), r"most=-1 is not a number of rows")
bad("all_to_all_ragged", "no rows", lambda h: mc.all_to_all_ragged(x(), torch.tensor([1, 0]), "a"), r"x has no rows")
bad("argmin", "a list", lambda h: mc.argmin([x(4)], "a"), r"x is not a tensor but list")
bad("collect_results", "too few results", lambda h: mc.collect_results([], 4, "a", order="stride"), r"has 0 results, but 2 of the 4 samples", told=True)
bad("collect_results", "an order that is none", lambda h: mc.collect_results([1], 2, "a", order="rank"), r"order='rank' is no order", told=True)
bad("collect_results", "lengths that do not tell", lambda h: mc.collect_results([1, 2], 4, "a"), r"do not tell in which order", told=True)
bad("collect_results", "parts of text", lambda h: mc.collect_results("ab", 4, "a"), r"parts is a str", told=True)
bad("collect_results", "a device that is not there", lambda h: mc.collect_results([1], 2, "a", device="xpu"), r"device='xpu' is neither the CPU", told=True)
bad("collect_results", "a device of None", lambda h: mc.collect_results([1], 2, "a", device=None), r"device=None is neither the CPU", told=True)
bad("collect_results", "a folder that is an int", lambda h: mc.collect_results([1], 2, "a", tmpdir=3), r"tmpdir=3 is no path", told=True)
bad("collect_results", "a folder with a zero byte", lambda h: mc.collect_results([1], 2, "a", tmpdir="a\0b"), r"cannot write to tmpdir", told=True)
bad("collect_results", "a file as folder", lambda h: mc.collect_results([1], 2, "a", tmpdir=__file__), r"cannot write to tmpdir", told=True)
bad("weighted_mean", "no total", lambda h: mc.weighted_mean(None, 1, "a"), r"total is not a tensor but NoneType")
bad("weighted_mean", "a count of text", lambda h: mc.weighted_mean(x(), "3", "a"), r"count is str")
bad("weighted_mean", "a count of None", lambda h: mc.weighted_mean(x(), None, "a"), r"count is NoneType")
bad("weighted_mean", "a complex count", lambda h: mc.weighted_mean(x(), x().cfloat(), "a"), r"count is torch.complex64")
bad("weighted_mean", "a huge count", lambda h: mc.weighted_mean(x(), 10**400, "a"), r"count is .*too large")
bad("weighted_mean", "counts of another shape", lambda h: mc.weighted_mean(x(2), x(3), "a"), r"\[3\] does not broadcast to total of shape \[2\]")
bad("weighted_mean", "counts of another structure", lambda h: mc.weighted_mean([x(), x()], {"n": 1, "m": 2}, "a"), r"count has another structure than total")
bad("all_reduce_params", "one tensor", lambda h: mc.all_reduce_params(x(2), "a"), r"params is a Tensor[\s\S]*module.parameters\(\)")
bad("all_reduce_params", "a module", lambda h: mc.all_reduce_params(linear(), "a"), r"params is a Linear")
bad("all_reduce_params", "None among them", lambda h: mc.all_reduce_params([x(2), None], "a"), r"not a tensor but NoneType[\s\S]*leaf: x\[1\]")
bad("all_reduce_params", "no such op", lambda h: mc.all_reduce_params([x(2)], "a", "average"), r"no reduce op 'average'")
bad("all_reduce_params", "the mean of integers", lambda h: mc.all_reduce_params([x(2).long()], "a", "mean"), r"'mean' is not defined for torch.int64")
bad("MeshBatchSampler", "no rows", lambda h: mc.MeshBatchSampler(0, 4, "a"), r"size=0 is no number of rows")
bad("MeshBatchSampler", "a batch of text", lambda h: mc.MeshBatchSampler(8, "4", "a"), r"batch='4' is no number of rows")
bad("MeshBatchSampler", "a seed of floats", lambda h: mc.MeshBatchSampler(8, 4, "a", seed=1.5), r"seed=1.5 is not an int")
bad("MeshBatchSampler", "no such end", lambda h: mc.MeshBatchSampler(8, 4, "a", last="dorp"), r"last='dorp' is none of(.|\n)*did you mean 'drop'")
bad("MeshBatchSampler", "fewer rows than ranks", lambda h: mc.MeshBatchSampler(8, 1, "a"), r"batches of 1 of 8 rows, for \d ranks")
bad("MeshBatchSampler", "no such axis", lambda h: mc.MeshBatchSampler(8, 4, "z"), r"no axis 'z'")
bad(
    "MeshBatchSampler.follow", "other seeds", lambda h: next((s := mc.MeshBatchSampler(8, 4, "a", seed=h.mesh.coordinate["a"])).follow(s)),
    r"MeshBatchSampler: seed differs between ranks", told=True,
)  # fmt: skip
bad("Metrics", "no names", lambda h: mc.Metrics({}), r"no metrics are named")
bad("Metrics", "a list", lambda h: mc.Metrics(["loss"]), r"no metrics are named")
bad("Metrics", "no such kind", lambda h: mc.Metrics({"loss": "average"}), r"metric 'loss' is of no kind 'average'[\s\S]*one of 'mean'")
bad("Metrics", "a kind that cannot be hashed", lambda h: mc.Metrics({"loss": ["mean"]}), r"is of no kind \['mean'\]")


def metrics() -> mc.Metrics:
    return mc.Metrics({"loss": "mean", "most": "max"})


ADDED: list[tuple[str, tuple[Any, ...], str]] = [
    ("no such metric", ("acc", 1.0), r"no metric 'acc'[\s\S]*one of 'loss', 'most'"),
    ("a name that cannot be hashed", (["loss"], 1.0), r"no metric \['loss'\]"),
    ("a value of text", ("loss", "1.0"), r"value of 'loss' is a str"),
    ("no value", ("loss", None), r"value of 'loss' is a NoneType"),
    ("several values", ("loss", x(2)), r"value of 'loss' is not one real number but \[2\]"),
    ("a complex value", ("loss", x().cfloat()), r"value of 'loss' is not one real number but \[\] of torch.complex64"),
    ("a weight of text", ("loss", 1.0, "2"), r"weight of 'loss' is a str"),
    ("a huge value", ("loss", 10**400), r"value of 'loss' is .*too large"),
    ("a value on meta", ("loss", meta().sum()), r"value of 'loss' .*holds no value"),
]  # fmt: skip
ADDED += [
    ("a weight for an extreme", ("most", 1.0, 2), r"a weight for 'most', of kind 'max'[\s\S]*fix: only a mean has one"),
    ("a negative weight", ("loss", 1.0, -1), r"weight=-1 of 'loss' is negative"),
]
bad("Metrics.add_sum", "no such metric", lambda h: metrics().add_sum("acc", 1.0, 2), r"^meshcomm.Metrics.add_sum: no metric 'acc'")
bad("Metrics.add_sum", "an extreme", lambda h: metrics().add_sum("most", 1.0, 2), r"'most' is of kind 'max', and has no count[\s\S]*fix: add\('most', total\)")
bad("Metrics.add_sum", "a count of text", lambda h: metrics().add_sum("loss", 1.0, "2"), r"count of 'loss' is a str")
for cause, args, said in ADDED:
    bad("Metrics.add", cause, lambda h, args=args: metrics().add(*args), rf"^meshcomm.Metrics.add: {said}")
bad("prove_no_hang", "no trace", lambda h: mc.prove_no_hang(3), r"expected a trace or a function, got int")
bad("prove_no_hang", "no mesh", lambda h: mc.prove_no_hang(print), r"a mesh is a mapping of axis names to sizes")
bad("prove_no_hang", "a size of 0", lambda h: mc.prove_no_hang(print, {"a": 0}), r"axis 'a' has size 0")
bad("prove_no_hang", "a rank that is not there", lambda h: mc.prove_no_hang(print, {"a": 2}, [2]), r"rank 2 is not on the mesh")
bad("prove_no_hang", "within a rank", lambda h: mc.prove_no_hang(print, {"a": 2}), r"it starts ranks of its own")
bad("verify_training", "no function", lambda h: mc.verify_training(3, [x(4)], meshes={"a": 2}), r"make is not callable but int")
bad("verify_training", "within a rank", lambda h: mc.verify_training(linear, [x(4)], meshes={"a": 2}), r"it starts ranks of its own")
plain("verify_training", "no module", lambda: mc.verify_training(lambda mesh: 3, [x(4)], meshes={"a": 2}), r"make gives no module, optimizer and step")
bad("main_only", "an axis in place of a function", lambda h: mc.main_only("a"), r"fn is not callable but str[\s\S]*main_only\(axis=...\)")
bad("main_only", "broadcast of text", lambda h: mc.main_only(broadcast="yes"), r"broadcast='yes' is not a bool")
bad("main_only", "its result cannot be pickled", lambda h: mc.main_only(axis="a", broadcast=True)(threading.Lock)(), r"lock", told=True)
for cause, given, said in (
    ("no function", lambda: mc.verify(3, x(4), in_specs="(a n)", out_specs="n"), r"fn is not callable but int"),
    ("a twin that is none", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", twin=3), r"twin is not callable but int"),
    ("too many specs", lambda: mc.verify(abs, x(4), in_specs=("(a n)", "n"), out_specs="n"), r"in_specs has 2 specs for 1 inputs"),
    ("names of others", lambda: mc.verify(lambda y: y, x(4), in_specs={"z": "(a n)"}, out_specs="n"), r"in_specs does not name the inputs"),
    ("a spec of another tree", lambda: mc.verify(abs, x(4), in_specs=({"k": "(a n)"},), out_specs="n"), r"in_specs\[0\] is not a prefix of input"),
    ("no layout", lambda: mc.verify(abs, x(4), in_specs=3, out_specs="n"), r"a spec is neither a layout nor None but int"),
    ("no axes at all", lambda: mc.verify(abs, x(4), in_specs="n", out_specs="n"), r"no axis stands in the specs"),
    ("meshes that are none", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", meshes=3), r"meshes=3 are no meshes"),
    ("a mesh that is none", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", meshes=[2]), r"2 in meshes= is no mesh"),
    ("a size of 0", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", meshes={"a": 0}), r"has no size that can be run"),
    ("what does not divide", lambda: mc.verify(abs, x(3), in_specs="(a n)", out_specs="(a n)", meshes={"a": 2}), r"dim 'n' of length 3 is not divisible"),
    ("derivatives of others", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", derivatives=("grad",)), r"derivatives=\('grad',\)"),
    ("dtypes of ints", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", dtypes=(torch.int64,)), r"dtypes=\(torch.int64,\)"),
    ("half a seed", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", seed=0.5), r"seed=0.5 is not an int"),
    ("no number of orders", lambda: mc.verify(abs, x(4), in_specs="(a n)", out_specs="n", schedules=-1), r"schedules=-1 is no number of runs"),
):
    bad("verify", cause, lambda h, given=given: given(), said)
bad("fork_rng", "half a seed", lambda h: mc.fork_rng("a", seed=0.5).__enter__(), r"seed=0.5 is not an int")
bad("fork_rng", "a seed of True", lambda h: mc.fork_rng("a", seed=True).__enter__(), r"seed=True is not an int")
bad("rng", "no seed in a tuple", lambda h: mc.rng("(a d)", seed=()).__enter__(), r"seed=\(\) is not an int")
bad("rng", "a seed of NaN", lambda h: mc.rng("(a d)", seed=nan).__enter__(), r"seed=nan is not an int")
bad("rng", "a layout that is none", lambda h: mc.rng("(a", seed=0).__enter__(), r"a parenthesis is not closed")
bad("rng", "no layout", lambda h: mc.rng(None, seed=0).__enter__(), r"a layout is a string, not NoneType")
bad("rng", "a tensor of other dims", lambda h: drawn("(a d)", lambda: torch.rand(2, 2)), r"has 1 dim, the tensor 2")
bad("rng", "a permutation", lambda h: drawn("(a d)", lambda: torch.randperm(4)), r"randperm")


def drawn(layout: str, draw: Callable[[], Any]) -> Any:
    with mc.rng(layout, seed=0):
        return draw()


# ----------------------------------------------------------------------------------------------------------- layouts

LAYOUTS: list[tuple[str, Any, str]] = [
    ("a list as layout", ["a", "b"], r"a layout is a string, not list"),
    ("bytes as layout", b"(a b) -> b", r"a layout is a string, not bytes"),
    ("no arrow", "(a d)", r"there is no arrow[\s\S]*\^[\s\S]*from -> to"),
    ("another arrow", "(a d) => d", r"there is no arrow"),
    ("two arrows", "(a d) -> d -> d", r"2 arrows instead of one"),
    ("a misspelt axis", "(aa d) -> d", r"'aa' is not an axis of the mesh[\s\S]*did you mean 'a'\?"),
    ("an axis that looks like another", f"({CYRILLIC} d) -> d", r"is not an axis of the mesh"),
    ("an axis as a dim", "a -> d", r"'a' is a mesh axis and stands as a dim"),
    ("an axis last", "(d a) -> d", r"is not an axis of the mesh; in parentheses all but the last are"),
    ("an axis twice", "(a d) (a f) -> d f", r"the mesh axis 'a' stands twice"),
    ("a dim twice", "(a d) d -> d d", r"the dim 'd' stands twice"),
    ("not closed", "(a d -> d", r"a parenthesis is not closed"),
    ("nested parentheses", "((a d)) -> d", r"parentheses inside parentheses"),
    ("a number", "(a d) 3 -> d 3", r"1, for a dim of length 1, is the only number"),
    ("an underscore", "(a _) -> _", r"underscore"),
    ("other dims", "(a d) -> e", r"the sides have other dims: 'd'; 'e'"),
    ("two tensors", "(a d), e -> d", r"2 layouts for 1 tensor"),
    ("two results", "(a d) -> d, d", r"there is one result"),
    ("an ellipsis on one side", "... (a d) -> d", r"an ellipsis stands on one side only"),
    ("too many dims", "(a d) e f -> d e f", r"has 3 dims, the tensor"),
    ("a long dim called 1", "1 -> 1", r"a dim called 1 has length"),
]  # fmt: skip
for i, (cause, layouts, said) in enumerate(LAYOUTS):
    if i % 3 != 1:
        bad("reshard", cause, lambda h, layouts=layouts: mc.reshard(x(4), layouts), rf"^meshcomm.reshard: [\s\S]*{said}")
    if i % 3 != 0:
        bad("plan", cause, lambda h, layouts=layouts: mc.plan(layouts, (4,)), rf"^meshcomm.plan: [\s\S]*{said}")
bad("reshard", "not a tensor", lambda h: mc.reshard([x(4)], "(a d) -> d"), r"x is not a tensor but list")
bad("reshard", "on meta", lambda h: mc.reshard(meta(), "(a d) -> d"), r"x is on the wrong device, meta")
bad("reshard", "does not divide", lambda h: mc.reshard(x(3), "d -> (a d)"), r"dim 'd' of length 3 is not divisible by a=2[\s\S]*pad it to 4")
bad("plan", "a shape of text", lambda h: mc.plan("(a d) -> d", ""), r"'' is not a shape")
bad("plan", "a negative length", lambda h: mc.plan("(a d) -> d", (-4,)), r"\(-4,\) is not a shape")
bad("plan", "NaN as length", lambda h: mc.plan("(a d) -> d", (nan,)), r"\(nan,\) is not a shape")
bad("plan", "the name of a dtype", lambda h: mc.plan("(a d) -> d", (4,), dtype="float32"), r"dtype='float32' is not a dtype")
bad("tie", "None", lambda h: mc.tie(None), r"^meshcomm\.tie: x is not a tensor but NoneType")
bad("tie", "a leaf that is none", lambda h: mc.tie([x(2), 2.0]), r"^meshcomm\.tie: x\[1\] is not a tensor but float")
bad("tie", "integers", lambda h: mc.tie(torch.arange(3), x(1).requires_grad_()), r"integers or bools carries no gradient[\s\S]*fix: tie a")
bad("tie", "a work", lambda h: mc.tie(x(1), mc.Work(x(1))), r"a Work among the others[\s\S]*fix: wait for it")
bad("local_shape", "does not divide", lambda h: mc.local_shape("(a b d)", (6,)), r"dim 'd' of length 6 is not divisible by a=2 \* b=2")
bad("local_shape", "bytes as shape", lambda h: mc.local_shape("d", b"\x04"), r"is not a shape")
bad("local_shape", "a generator as shape", lambda h: mc.local_shape("d", (4 for _ in range(1))), r"is not a shape")
bad("local_shape", "an arrow", lambda h: mc.local_shape("d -> d", (4,)), r"an arrow leads from one layout to another")
bad("global_shape", "other dims", lambda h: mc.global_shape("(a d) e", (4,)), r"has 2 dims, the tensor 1")
bad("global_shape", "True as length", lambda h: mc.global_shape("(a d)", (True,)), r"\(True,\) is not a shape")
bad("partition_spec", "an ellipsis", lambda h: mc.partition_spec("(a d) ..."), r"an ellipsis is any number of dims")
bad("partition_spec", "a comma", lambda h: mc.partition_spec("(a d), e"), r"a comma stands between the layouts")
bad("layout_of", "text", lambda h: mc.layout_of("a"), r"a PartitionSpec is a tuple, not 'a'")
bad("layout_of", "None", lambda h: mc.layout_of(None), r"a PartitionSpec is a tuple, not None")
bad("layout_of", "no such axis", lambda h: mc.layout_of(("a", "c")), r"no axis 'c' in the mesh")
bad("layout_of", "an entry that is a dict", lambda h: mc.layout_of(({"a": 1},)), r"no axis \{'a': 1\}")
bad("layout_of", "an axis twice", lambda h: mc.layout_of(("a", ("b", "a"))), r"the axis 'a' stands twice")
bad("layout_of", "too few names", lambda h: mc.layout_of(("a", None), "d"), r"1 name for 2 dims or more")
bad("layout_of", "names in a list", lambda h: mc.layout_of(("a",), ["d"]), r"a layout is a string, not list")
bad("placements", "an order that is not the mesh's", lambda h: mc.placements("(b a d)"), r"DTensor cuts a dim over axes in the order of the mesh")
bad("placements", "an ellipsis", lambda h: mc.placements("(a d) ..."), r"an ellipsis is any number of dims")
bad("layout_from", "text", lambda h: mc.layout_from("SR"), r"'SR' are no placements")
bad("layout_from", "too few", lambda h: mc.layout_from((Shard(0),)), r"1 placements for a mesh of 2 axes")
bad("layout_from", "a partial one", lambda h: mc.layout_from((Partial(), Replicate())), r"the tensor is partial along 'a'")
bad("layout_from", "a dim from the last", lambda h: mc.layout_from((Shard(-1), Replicate())), r"a dim is counted from the last")
bad("layout_from", "a dim beyond", lambda h: mc.layout_from((Shard(2), Replicate()), ndim=2), r"'a' cuts dim 2 of a tensor with 2 dims")
bad("layout_from", "a negative number of dims", lambda h: mc.layout_from((Shard(0), Replicate()), ndim=-1), r"ndim=-1 is not a number of dims")
bad("to_dtensor", "not a tensor", lambda h: mc.to_dtensor([1.0], "(a d)"), r"x is a list, not a rank's part")
bad("to_dtensor", "other dims", lambda h: mc.to_dtensor(x(4), "(a d) e"), r"has 2 dims, the tensor 1")
bad("to_dtensor", "in-process", lambda h: mc.to_dtensor(x(4), "(a d)"), r"ranks in one process have no torch process groups", where="in-process")
bad("to_dtensor", "on meta", lambda h: mc.to_dtensor(meta(), "(a d)"), r"x is on meta, the mesh on cpu", where="processes")
bad("from_dtensor", "a plain tensor", lambda h: mc.from_dtensor(x(4)), r"expected a DTensor, got Tensor")
bad("from_dtensor", "too few names", lambda h: mc.from_dtensor(mc.to_dtensor(x(2, 2), "(a d) e"), "d"), r"1 name for 2 dims", where="processes")

for cause, call, said in (
    ("sizes of another product", lambda: mc.make_mesh({"fsdp": 8}).split("fsdp", a=2, b=3), "do not multiply to 8"),
    ("no such axis", lambda: mc.make_mesh({"fsdp": 8}).split("dp", a=2, b=4), "no axis 'dp'"),
    ("a name that is taken", lambda: mc.make_mesh({"fsdp": 8}).split("fsdp", fsdp=2, b=4), "has the name 'fsdp' already"),
    ("a part of a name", lambda: mc.make_mesh({"fsdp": 8}).split("fsdp", a=2, b=4).split("b", c=2, d=2), "is a part of 'fsdp'"),
):
    plain("Mesh.split", cause, call, rf"^meshcomm.Mesh.split: .*{said}")
plain("make_mesh", "names that overlap", lambda: mc.make_mesh({"a": 2, "b": 2, "c": 2}, names={"x": ("a", "b"), "y": ("b", "c")}), r"axis 'b' is in 'x' and 'y'")
plain("make_mesh", "a name of axes that are apart", lambda: mc.make_mesh({"a": 2, "b": 2, "c": 2}, names={"x": ("a", "c")}), r"not neighbours")

bad("einsum", "no operands", lambda h: mc.einsum("i d -> i"), r"1 layout for 0 tensors")
bad("einsum", "too few operands", lambda h: mc.einsum("i d, d -> i", x(2, 2)), r"2 layouts for 1 tensor")
bad("einsum", "a list as layouts", lambda h: mc.einsum(["i d", "d"], x(2, 2), x(2)), r"a layout is a string, not list")
bad("einsum", "an operand that is none", lambda h: mc.einsum("i d, d -> i", x(2, 2), 3.0), r"operand 1 is not a tensor but float")
bad("einsum", "other dtypes", lambda h: mc.einsum("i d, d -> i", x(2, 2), x(2).double()), r"operands of different dtypes")
bad("einsum", "bool", lambda h: mc.einsum("i d, d -> i", x(2, 2).bool(), x(2).bool()), r"operands of torch.bool")
bad("einsum", "other lengths", lambda h: mc.einsum("i (a d), d -> i", x(2, 2), x(2)), r"dim 'd' has length 4 in operand 0, 2 in operand 1")
bad("einsum", "a result from nowhere", lambda h: mc.einsum("i d, d -> e", x(2, 2), x(2)), r"dim 'e' of the result stands in no operand")
bad("einsum", "a result that does not divide", lambda h: mc.einsum("i d, d -> (a i)", x(3, 2), x(2)), r"dim 'i' of length 3 is not divisible")
bad("einsum", "the trace", lambda h: mc.einsum("d d -> d", x(2, 2)), r"the dim 'd' stands twice")
bad("einsum", "ring of 1", lambda h: mc.einsum("i d, d -> i", x(2, 2), x(2), ring=1), r"ring=1 is neither True nor False")
bad("einsum", "sparse", lambda h: mc.einsum("i d, d -> i", sparse(), x(4)), r"operand 0 is a torch.sparse_coo tensor")

# ------------------------------------------------------------------------------------------- varying types, shard_map

bad("check_vma", "no such mode", lambda h: mc.check_vma("warn").__enter__(), r"check_vma='warn'[\s\S]*True inserts")
bad("check_vma", "a mode of 1", lambda h: mc.check_vma(1).__enter__(), r"check_vma=1")
bad("check_vma", "a mesh of another kind", lambda h: mc.check_vma(mesh=("a",)).__enter__(), r"mesh= is a tuple")
bad("mark_varying", "no such axis", lambda h: mc.mark_varying(x(2), "c"), r"no axis 'c'[\s\S]*one of 'a', 'b'")
bad("mark_varying", "axes of None", lambda h: mc.mark_varying(x(2), None), r"axes=None")
bad("mark_varying", "a set of axes", lambda h: mc.mark_varying(x(2), {"a"}), r"axes=\{'a'\}")
bad("split_rows", "rows that are left", lambda h: mc.split_rows(x(4), torch.tensor([1, 2])), r"counts add up to 3, and there are 4 rows")
bad("split_rows", "a negative count", lambda h: mc.split_rows(x(4), torch.tensor([5, -1])), r"counts has -1 among its entries")
bad("split_rows", "a list of counts", lambda h: mc.split_rows(x(4), [4]), r"counts is no tensor but list")
bad("grouped_matmul", "rows of one dim", lambda h: parallel.grouped_matmul(x(3), x(2, 4, 4), torch.tensor([1, 2])), r"rows are no matrix of floats")
bad("grouped_matmul", "another width", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 3, 4), torch.tensor([1, 2])), r"weights are no matrices for these rows")
bad("grouped_matmul", "fewer counts than matrices", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 4, 4), torch.tensor([3])), r"counts are not one number for each matrix")
bad("grouped_matmul", "rows that are left", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 4, 4), torch.tensor([1, 1])), r"counts add up to 2, and there are 3 rows")
bad("grouped_matmul", "a negative count", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 4, 4), torch.tensor([4, -1])), r"counts has -1 among its entries")
bad("grouped_matmul", "a negative count in float64", lambda h: parallel.grouped_matmul(x(3, 4).double(), x(2, 4, 4).double(), torch.tensor([4, -1])), r"counts has -1 among its entries")
bad("grouped_matmul", "two dtypes", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 4, 4).double(), torch.tensor([1, 2])), r"rows and weights are of two dtypes")
bad("grouped_matmul", "a list of counts", lambda h: parallel.grouped_matmul(x(3, 4), x(2, 4, 4), [1, 2]), r"counts is no tensor but list")
bad("varying_axes", "not a tensor", lambda h: mc.varying_axes([x(2)]), r"x is no tensor but list")
bad("assert_varying", "no such axis", lambda h: mc.assert_varying(x(2), "c"), r"no axis 'c'[\s\S]*one of 'a', 'b'")
bad("assert_varying", "axes of None", lambda h: mc.assert_varying(x(2), None), r"axes=None")
bad("assert_varying", "not a tensor", lambda h: mc.assert_varying([mc.mark_varying(x(2), ()), 3], ()), r"x\[1\] is no tensor but int")
bad("assert_invariant", "an object", lambda h: mc.assert_invariant({"a": object()}, "a"), r"tree\['a'\] cannot be compared: it is object")
bad("assert_invariant", "on meta", lambda h: mc.assert_invariant(x(2).to("meta"), "a"), r"a meta tensor has no values")
bad("mark_varying", "not a tensor", lambda h: mc.mark_varying([x(2), 3], "a"), r"x\[1\] is no tensor but int")


def mapped(*args: Any, fn: Callable[..., Any] = lambda y: y, **kwargs: Any) -> Any:
    return mc.shard_map(fn, **({"in_specs": ("(a d)",), "out_specs": "(a d)"} | kwargs))(*(args or (x(4),)))


bad("shard_map", "no function", lambda h: mc.shard_map(3, in_specs="d", out_specs="d"), r"fn is not callable but int")
bad("shard_map", "a spec that is no text", lambda h: mapped(in_specs=(0,)), r"in_specs\[0\] is neither a layout nor None but int")
bad("shard_map", "a layout that is none", lambda h: mapped(in_specs=("(a d",), mesh=h.mesh), r"a parenthesis is not closed")
bad("shard_map", "a misspelt axis", lambda h: mapped(out_specs="(ab d)"), r"'ab' is not an axis of the mesh")
bad("shard_map", "too many specs", lambda h: mapped(in_specs=("d", "d")), r"in_specs has 2 specs for 1 arguments")
bad("shard_map", "too few specs", lambda h: mapped(x(4), x(4), fn=torch.add), r"in_specs has 1 specs for 2 arguments")
bad("shard_map", "a spec for nobody", lambda h: mapped(in_specs={"y": "d", "z": "d"}), r"in_specs names 'z', which are no parameters")
bad("shard_map", "an argument without spec", lambda h: mapped(in_specs={"z": "d"}), r"in_specs has no spec for 'y'")
bad("shard_map", "too many arguments", lambda h: mapped(x(4), x(4)), r"too many positional arguments", kind=TypeError)
bad("shard_map", "other dims", lambda h: mapped(in_specs=("(a d) e",)), r"has 2 dims, the tensor 1")
bad("shard_map", "does not divide", lambda h: mapped(x(3)), r"shard_map, y: dim 'd' of length 3 is not divisible by a=2")
bad("shard_map", "a spec for no tensor", lambda h: mapped(3.0), r"y is no tensor but float, and its spec is '\(a d\)'")
bad("shard_map", "None for a tensor", lambda h: mapped(in_specs=(None,)), r"the spec of y is None, but it is a tensor")
bad("shard_map", "another structure", lambda h: mapped({"k": x(4)}, in_specs=({"j": "d"},)), r"is not a prefix of y")
bad("shard_map", "other outputs", lambda h: mapped(out_specs=("(a d)", "(a d)")), r"out_specs is not a prefix of output")
bad("shard_map", "an output of other dims", lambda h: mapped(fn=lambda y: y.sum()), r"output: '\(a d\)' has 1 dim, the tensor 0")
bad("shard_map", "an output that is none", lambda h: mapped(fn=lambda y: 3), r"output is no tensor but int")
bad("shard_map", "an output that varies", lambda h: mapped(out_specs="d"), r"varies along 'a'", kind=mc.VaryingError)
bad("shard_map", "no such check_vma", lambda h: mapped(check_vma="yes"), r"check_vma='yes'")
bad("shard_map", "a mesh of another kind", lambda h: mapped(mesh={"a": 2}), r"mesh= is a dict")
bad("shard_map", "in another one", lambda h: mapped(fn=lambda y: mapped(y)), r"inside of another|another shard_map")

# ------------------------------------------------------------------------------------- data and fully sharded parallel


def ddp(module: Any = None, axis: Any = "a", **kwargs: Any) -> Any:
    return parallel.data_parallel(linear() if module is None else module, axis, **({"grads": "sum"} | kwargs))


bad("data_parallel", "not a module", lambda h: ddp(3), r"module is not a torch.nn.Module but int")
bad("data_parallel", "no such grads", lambda h: ddp(grads="average"), r"grads='average' is none of 'sum', 'mean'")
bad("data_parallel", "no grads", lambda h: parallel.data_parallel(linear(), "a"), r"grads", kind=TypeError)
bad("data_parallel", "no such buffers", lambda h: ddp(buffers="keep"), r"buffers='keep' is none of")
bad("data_parallel", "a bucket of NaN", lambda h: ddp(bucket_mb=nan), r"bucket_mb=nan is not a positive number")
bad("data_parallel", "an integer dtype", lambda h: ddp(reduce_dtype=torch.int32), r"reduce_dtype=torch.int32 is not a dtype")
bad("data_parallel", "the name of a dtype", lambda h: ddp(reduce_dtype="bfloat16"), r"reduce_dtype='bfloat16' is not a dtype")
bad("data_parallel", "sums of integers", lambda h: ddp(accumulate_dtype=torch.int32), r"accumulate_dtype=torch.int32 is not a dtype")
bad("data_parallel", "sums that lose digits", lambda h: ddp(accumulate_dtype=torch.bfloat16), r"accumulate_dtype=torch.bfloat16 has not all that torch.float32 has")
bad("data_parallel", "methods of text", lambda h: ddp(methods="forward"), r"methods='forward' is not a list of names")
bad("data_parallel", "no such method", lambda h: ddp(methods=["encode"]), r"the module has no method 'encode'")
bad("data_parallel", "a method that is no name", lambda h: ddp(methods=[3]), r"no method 3")
bad("data_parallel", "methods that are a number", lambda h: ddp(methods=3), r"methods=3 is not a list of names")
bad("data_parallel", "twice", lambda h: ddp(h.replicated, "b"), r"the module is data parallel already")
bad("data_parallel", "of a sharded one", lambda h: ddp(h.sharded, "b"), r"the module's parameters are sharded")
bad("data_parallel", "lazy buffers", lambda h: ddp(lazy_buffers()), r"'1.running_mean' has no shape yet")
bad("data_parallel", "lazy", lambda h: ddp(nn.LazyLinear(2)), r"'weight' has no shape yet[\s\S]*run the module once before")
bad("data_parallel", "max_norm", lambda h: ddp(nn.Embedding(4, 2, max_norm=1.0)), r"has max_norm: each rank would scale")
bad("no_sync", "another module", lambda h: parallel.no_sync(linear()).__enter__(), r"Linear is neither data parallel nor sharded")
bad("reduce_gradients", "another module", lambda h: parallel.reduce_gradients(linear()), r"Linear is neither data parallel nor sharded")
bad("no_sync", "None", lambda h: parallel.no_sync(None).__enter__(), r"NoneType is neither data parallel nor sharded")
bad("gathered", "another module", lambda h: parallel.gathered(linear()).__enter__(), r"Linear is not fully sharded")
bad("gathered", "None", lambda h: parallel.gathered(None).__enter__(), r"NoneType is not fully sharded")
bad("join", "another module", lambda h: parallel.join(linear()).__enter__(), r"the module is not data parallel")
bad("join", "a number", lambda h: parallel.join(3).__enter__(), r"the module is not data parallel[\s\S]*got: int")
bad("join", "a step that is no function", lambda h: parallel.join(h.replicated, step=3).__enter__(), r"step is not callable but int")
bad("join", "in a join", lambda h: joined(h.replicated), r"a join inside a join[\s\S]*fix: one join")


def joined(module: nn.Module) -> Any:
    with contextlib.suppress(mc.CommError):
        module_state = vars(module)["_meshcomm_data_parallel"]
        module_state.joined = True
    try:
        return parallel.join(module).__enter__()
    finally:
        module_state.joined = False


def sharded(module: Any = None, axis: Any = "a", **kwargs: Any) -> Any:
    return parallel.fully_shard(two_layers() if module is None else module, axis, **({"grads": "sum"} | kwargs))


FSDP: list[tuple[str, dict[str, Any], str]] = [
    ("no such grads", {"grads": "avg"}, r"grads='avg'[\s\S]*\"sum\" if you reduce"),
    ("no such unit", {"units": "blocks.*"}, r"units: 'blocks.\*' is no part of the module"),
    ("units that are a number", {"units": 3}, r"units=3 is not"),
    ("a unit that is a number", {"units": [3]}, r"units: 'int' is no part"),
    ("a module of another model", {"units": [linear()]}, r"units: 'Linear' is no part"),
    ("no such replica axis", {"replica_axis": "c"}, r"no axis 'c'"),
    ("the replica axis is the axis", {"replica_axis": "a"}, r"axis 'a' and replica_axis 'a' have 'a' in common"),
    ("a replica axis with the axis", {"replica_axis": ("b", "a")}, r"axis 'a' and replica_axis \('b', 'a'\) have 'a' in common"),
    ("a negative prefetch", {"prefetch": -1}, r"prefetch=-1 is not a number of units"),
    ("a prefetch of True", {"prefetch": True}, r"prefetch=True is not a number of units"),
    ("parameters of integers", {"param_dtype": torch.int32}, r"param_dtype=torch.int32 is not a floating dtype"),
    ("the name of a dtype", {"reduce_dtype": "bf16"}, r"reduce_dtype='bf16' is not a floating dtype"),
    ("sums of integers", {"accumulate_dtype": torch.int32}, r"accumulate_dtype=torch.int32 is not a floating dtype"),
    ("sums that lose digits", {"accumulate_dtype": torch.bfloat16}, r"accumulate_dtype=torch.bfloat16 has not all that torch.float32 has"),
    ("no such whole unit", {"whole": ["blocks"]}, r"whole: 'blocks' matches nothing"),
    ("whole of a number", {"whole": 3}, r"whole=3 is not"),
    ("nothing to ignore", {"ignore": ["wte"]}, r"ignore: 'wte' matches nothing"),
    ("ignore of text", {"ignore": "bias"}, r"ignore='bias' is not a list of patterns"),
    ("no such method", {"methods": ["encode"]}, r"methods: 'encode' matches nothing"),
    ("methods of text", {"methods": "encode"}, r"methods='encode' is not a list"),
    ("an init that is no function", {"init": 0.02}, r"init is not callable but float"),
    ("offload of text", {"offload": "cpu"}, r"offload='cpu' is not a bool"),
    ("sync of None", {"sync": None}, r"sync=None is not a bool"),
    ("regather of 1", {"regather": 1}, r"regather=1 is not a bool"),
    ("a mean over no axis", {"mean_over": "tp", "grads": "mean"}, r"no axis 'tp'"),
    ("a mean of sums", {"mean_over": ("a", "b")}, r"mean_over=\('a', 'b'\) with grads='sum'"),
]  # fmt: skip
AXES: list[tuple[str, dict[str, Any], str]] = [
    ("axes that are a number", {"axes": 3}, r"axes=3 is not a mapping of patterns to axes"),
    ("axes of nothing", {"axes": {"wte": "a"}}, r"axes: 'wte' names nothing"),
    ("axes that the mesh has not", {"axes": {"*": "c"}}, r"no axis 'c'"),
    ("axes that the module has not", {"axes": {"*": "b"}}, r"axes: '\*' goes over 'b', and the module over 'a'"),
]  # fmt: skip
for cause, kwargs, said in AXES:
    bad("data_parallel", cause, lambda h, kwargs=kwargs: ddp(**kwargs), rf"^meshcomm.data_parallel: {said}")
bad("data_parallel", "nothing to ignore", lambda h: ddp(ignore=["wte"]), r"ignore: 'wte' matches nothing")
bad("data_parallel", "ignore of text", lambda h: ddp(ignore="bias"), r"ignore='bias' is not a list of patterns")
for adaptor, make in {"data_parallel": ddp, "fully_shard": sharded}.items():
    what = r"all parameters were said to vary along 'a'"
    bad(adaptor, "varying", lambda h, make=make: make(mc.mark_varying(linear(), "a")), what)
for cause, kwargs, said in FSDP + AXES:
    bad("fully_shard", cause, lambda h, kwargs=kwargs: sharded(**kwargs), rf"^meshcomm.fully_shard: {said}")
bad("fully_shard", "not a module", lambda h: sharded([x(4)]), r"module is not a torch.nn.Module but Tensor")
bad("fully_shard", "twice", lambda h: sharded(h.sharded, "b"), r"'the module' is sharded already")
bad("fully_shard", "lazy", lambda h: sharded(nn.LazyLinear(2)), r"'(weight|bias)' has no shape yet[\s\S]*run the module once before")
bad("fully_shard", "lazy buffers", lambda h: sharded(lazy_buffers()), r"'1.running_mean' has no shape yet")
bad("counts", "another module", lambda h: parallel.counts(linear()), r"this Linear is not sharded")
bad("pieces", "not a module", lambda h: parallel.pieces({}), r"this dict is not sharded")
bad("shard_optimizer", "no optimizer", lambda h: parallel.shard_optimizer(linear(), "a"), r"not a torch.optim.Optimizer but Linear")
bad("shard_optimizer", "no such axis", lambda h: parallel.shard_optimizer(torch.optim.SGD(linear().parameters()), "c"), r"no axis 'c'")
bad("shard_optimizer", "an unknown cut", lambda h: parallel.shard_optimizer(torch.optim.SGD(linear().parameters()), "a", cut="rows"), r"cut='rows'")
bad("shard_optimizer", "lazy", lambda h: parallel.shard_optimizer(torch.optim.SGD(nn.LazyLinear(2).parameters()), "a"), r"a parameter has no shape yet[\s\S]*run the module once before")
bad("shard_optimizer", "LBFGS", lambda h: parallel.shard_optimizer(torch.optim.LBFGS(linear().parameters()), "a"), r"LBFGS has one state")
bad("clip_grad_norm", "no module", lambda h: parallel.clip_grad_norm([x(2)], 1.0), r"module is not a torch.nn.Module but list")
bad("clip_grad_norm", "a mesh that is none", lambda h: parallel.clip_grad_norm(linear(), 1.0, mesh="b"), r"mesh= is a str")
CLIP: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("a norm of NaN", (nan,), {}, r"max_norm=nan is not"),
    ("a negative norm", (-1.0,), {}, r"max_norm=-1.0 is not"),
    ("a norm of text", ("1",), {}, r"max_norm='1' is not"),
    ("the norm 0", (1.0, 0), {}, r"norm_type=0 is not positive"),
    ("the norm NaN", (1.0, nan), {}, r"norm_type=nan is not positive"),
    ("the norm of a name", (1.0, "inf"), {}, r"norm_type='inf' is not positive"),
]  # fmt: skip
for cause, args, kwargs, said in CLIP:
    bad("clip_grad_norm", cause, lambda h, args=args, kwargs=kwargs: parallel.clip_grad_norm(h.sharded, *args, **kwargs), said)
bad("save_full_state_dict", "another module", lambda h: parallel.save_full_state_dict([], "x"), r"module is not a torch.nn.Module but list")
bad("save_full_state_dict", "no path", lambda h: parallel.save_full_state_dict(linear(), 3), r"path=3 is no path")
bad("save_full_state_dict", "no size", lambda h: parallel.save_full_state_dict(linear(), "x", max_shard_size="5 pounds"), r"max_shard_size='5 pounds' is no size")
bad("load_full_state_dict", "another module", lambda h: parallel.load_full_state_dict([], {}), r"module is not a torch.nn.Module but list")
bad("load_full_state_dict", "no mapping", lambda h: parallel.load_full_state_dict(h.sharded, None), r"state is neither a mapping nor a path", told=True)
bad("load_full_state_dict", "another shape", lambda h: parallel.load_full_state_dict(h.sharded, {"weight": x(2)}), r"'weight' has shape \(2,\), the parameter \(4, 4\)", told=True)
bad("load_full_state_dict", "a list for a tensor", lambda h: parallel.load_full_state_dict(h.sharded, {"weight": [1.0]}), r"'weight' is no tensor but list", told=True)
bad("fsdp.shard", "no parameters", lambda h: fsdp.shard({}, "a"), r"there are no parameters")
bad("fsdp.shard", "None among them", lambda h: fsdp.shard({"w": None}, "a"), r"not a tensor but NoneType[\s\S]*x\['w'\]")
bad("fsdp.shard", "no such replica axis", lambda h: fsdp.shard(x(4), "a", replica_axis="c"), r"no axis 'c'")
bad("fsdp.shard", "the replica axis is the axis", lambda h: fsdp.shard(x(4), "a", replica_axis="a"), r"have 'a' in common")
bad("fsdp.gather", "another tree", lambda h: fsdp.gather(h.shards, {"w": x(32)}), r"expected the FlatTree that fsdp.shard gave, not dict")
bad("fsdp.gather", "a shard alone", lambda h: fsdp.gather(h.shards[0], h.tree), r"expected the list of 1 shards")
bad("fsdp.gather", "shards of another tree", lambda h: fsdp.gather([x(3)], h.tree), r"a shard of this tree is a tensor of shape \(16,\)[\s\S]*got: shape \(3,\)")
bad("fsdp.apply", "no function", lambda h: fsdp.apply(3, h.shards, h.tree), r"fn is not callable but int")
bad("fsdp.apply", "no shards", lambda h: fsdp.apply(len, [], h.tree), r"expected the list of 1 shards")

# ---------------------------------------------------------------------------------------------------- tensor parallel

bad("parallelize", "not a module", lambda h: parallel.parallelize([linear()], h.mesh, grads="sum"), r"module is not a torch.nn.Module but list")
bad("parallelize", "axes that are not known", lambda h: parallel.parallelize(two_layers(), h.mesh, grads="sum"), r"what axis 'a' of the mesh [\s\S]*is for is not known")
bad("parallel_calls", "another module", lambda h: parallel.parallel_calls(linear()), r"was not given to parallelize")
bad("auto_plan", "not a module", lambda h: parallel.auto_plan([linear()], "a"), r"module is not a torch.nn.Module but list")
bad("auto_plan", "unsure of text", lambda h: parallel.auto_plan(two_layers(), "a", unsure="maybe"), r"unsure='maybe'")
bad("auto_plan", "an example of a number", lambda h: parallel.auto_plan(two_layers(), "a", example=3), r"example is of type int")
bad("auto_plan", "an example that does not fit", lambda h: parallel.auto_plan(two_layers(), "a", example=x(2, 3)), r"it fails on example")
bad("auto_plan", "nothing to cut", lambda h: parallel.auto_plan(nn.Conv2d(3, 4, 3), "a"), r"nothing in the module can be cut")
bad("auto_plan", "lazy", lambda h: parallel.auto_plan(nn.LazyLinear(4), "a"), r"'weight' has no shape yet")


def cut(plan: Any, module: Any = None, **kwargs: Any) -> Any:
    return parallel.tensor_parallel(two_layers() if module is None else module, plan, **({"axis": "a"} | kwargs))


TP: list[tuple[str, Any, dict[str, Any], str]] = [
    ("a plan of text", "column", {}, r"the plan is not a mapping of patterns to styles"),
    ("a plan of numbers", {0: "column"}, {}, r"the plan is not a mapping of patterns"),
    ("no such style", {"*": "col"}, {}, r"'\*' has no style but 'col'[\s\S]*did you mean 'column'\?"),
    ("a style that cannot be hashed", {"*": ["column"]}, {}, r"'\*' has no style but \['column'\]"),
    ("a parameter that is not named", {"0": "column"}, {}, r"the plan does not name '1.weight', '1.bias'"),
    ("a pattern for nothing", {"*": "column", "h.*": "row"}, {}, r"nothing is left for 'h.\*'"),
    ("two styles of one layer", {"*.weight": "column", "*.bias": "replicated"}, {}, r"a layer has parameters of two styles"),
    ("sequence of text", {"*": "column"}, {"sequence": "yes"}, r"sequence='yes' is neither True nor False"),
    ("a norm without sequence", {"*": "sequence"}, {}, r"'\*' is 'sequence', and the sequence is not cut"),
    ("divide of text", {"*": "column"}, {"divide": "heads"}, r"divide='heads' is not a list of patterns"),
    ("divide of a number", {"*": "column"}, {"divide": 3}, r"divide=3 is not a list of patterns"),
    ("nothing to divide", {"*": "column"}, {"divide": ["heads"]}, r"no attribute that is an int is called 'heads'"),
    ("parts that do not divide", {"*": Column(3)}, {}, r"'0.weight' of length 8 has not 3 equal parts"),
    ("no parts", {"*": Column(0)}, {}, r"parts=0.* has a value that is none"),
    ("parts that do not sum", {"*": Column((2, 2))}, {}, r"parts \(2, 2\) of '0.weight' do not sum to its length 8"),
    ("parts of text", {"*": Column("3")}, {}, r"parts='3'"),
    ("a negative part", {"*": Column((12, -4))}, {}, r"parts=\(12, -4\).* has a value that is none"),
    ("half a head", {"*": Column(kv_heads=0.5)}, {}, r"kv_heads=0.5"),
    ("no heads", {"*": Column(kv_heads=0)}, {}, r"kv_heads=0"),
    ("gather of text", {"*": Column(gather="yes")}, {}, r"gather='yes'"),
]  # fmt: skip
for cause, plan_of, kwargs, said in TP:
    bad("tensor_parallel", cause, lambda h, plan_of=plan_of, kwargs=kwargs: cut(plan_of, **kwargs), rf"^meshcomm.tensor_parallel: [\s\S]*{said}")
bad("tensor_parallel", "not a module", lambda h: cut({}, [linear()]), r"module is not a torch.nn.Module but list")
bad("tensor_parallel", "twice", lambda h: cut({"*": "column"}, h.parallel), r"the module is tensor parallel already")
bad("tensor_parallel", "of a sharded one", lambda h: cut({"*": "column"}, h.sharded), r"the module's parameters are sharded")
bad("tensor_parallel", "a norm as a column", lambda h: cut({"*": "column"}, nn.LayerNorm(4)), r"belongs to a LayerNorm, not a Linear")
bad("tensor_parallel", "does not divide", lambda h: cut({"": "column", "*": "column"}, nn.Sequential(linear(4, 3))), r"of length 3 is not divisible by axis 'a'|nothing is left")
bad("tensor_parallel", "lazy buffers", lambda h: cut({"*": "column"}, lazy_buffers()), r"'1.running_mean' has no shape yet")
bad("tensor_parallel", "lazy", lambda h: cut({"*": "column"}, nn.Sequential(nn.LazyLinear(4))), r"'0.weight' has no shape yet")
bad("whole_parameters", "another module", lambda h: parallel.whole_parameters(linear()), r"the module is not tensor parallel")
bad("whole_parameters", "a number", lambda h: parallel.whole_parameters(3), r"the module is not tensor parallel[\s\S]*got: int")

ids = torch.tensor([1, 0])
FUNCTIONS: list[tuple[str, str, Callable[[], Any], str]] = [
    ("enter", "a list to gather", lambda: parallel.enter([1.0], "a", sequence=True), r"x is not a tensor but list"),
    ("enter", "no sequence", lambda: parallel.enter(x(4), "a", sequence=True), r"there is no dim of the sequence"),
    ("leave", "a sequence that does not divide", lambda: parallel.leave(x(3, 4), "a", sequence=True), r"= 3 is not divisible"),
    ("leave", "bool", lambda: parallel.leave(x(3, 4).bool(), "a"), r"'sum' is not defined for torch.bool"),
    ("column_linear", "a weight that does not fit", lambda: parallel.column_linear(x(4), x(2, 3), axis="a"), r"weight \[2, 3\] does not fit x.shape\[-1\] = 4"),
    ("column_linear", "a bias that does not fit", lambda: parallel.column_linear(x(4), x(2, 4), x(3), axis="a"), r"bias \[3\] does not fit weight"),
    ("column_linear", "a weight that is a module", lambda: parallel.column_linear(x(4), linear(), axis="a"), r"weight is not a tensor but Linear"),
    ("column_linear", "another dtype", lambda: parallel.column_linear(x(4, 4), x(2, 4).double(), axis="a", sequence=True), r"weight is torch.float64, x is torch.float32"),
    ("row_linear", "a list", lambda: parallel.row_linear([1.0], x(2, 1), axis="a"), r"x is not a tensor but list"),
    ("row_linear", "another dtype", lambda: parallel.row_linear(x(4), x(2, 4).half(), axis="a"), r"weight is torch.float16, x is torch.float32"),
    ("row_linear", "on meta", lambda: parallel.row_linear(meta(4), x(2, 4), axis="a"), r"x is on the wrong device, meta"),
    ("vocab_embedding", "ids of floats", lambda: parallel.vocab_embedding(x(2), x(4, 2), axis="a"), r"ids are not integers"),
    ("vocab_embedding", "ids in a list", lambda: parallel.vocab_embedding([1], x(4, 2), axis="a"), r"ids is not a tensor but list"),
    ("vocab_embedding", "an id too large", lambda: parallel.vocab_embedding(torch.tensor([8]), x(4, 2), axis="a"), r"id 8 is not in a vocabulary of 8"),
    ("vocab_embedding", "a negative id", lambda: parallel.vocab_embedding(torch.tensor([-1]), x(4, 2), axis="a"), r"id -1 is not in a vocabulary"),
    ("vocab_embedding", "a table of one dim", lambda: parallel.vocab_embedding(ids, x(4), axis="a"), r"weight \[4\] is not \[v/n, d\]"),
    ("vocab_embedding", "padding beyond the table", lambda: parallel.vocab_embedding(ids, x(4, 2), axis="a", padding_idx=8), r"padding_idx=8 is not"),
    ("vocab_embedding", "padding of True", lambda: parallel.vocab_embedding(ids, x(4, 2), axis="a", padding_idx=True), r"padding_idx=True is not"),
    ("vocab_cross_entropy", "another target", lambda: parallel.vocab_cross_entropy(x(3, 4), ids, axis="a"), r"target \[2\] does not fit the logits"),
    ("vocab_cross_entropy", "target in a list", lambda: parallel.vocab_cross_entropy(x(2, 4), [1, 0], axis="a"), r"target is not a tensor but list"),
    ("vocab_cross_entropy", "target of floats", lambda: parallel.vocab_cross_entropy(x(2, 4), x(2), axis="a"), r"not integers"),
    ("vocab_cross_entropy", "a target too large", lambda: parallel.vocab_cross_entropy(x(2, 4), ids + 8, axis="a"), r"is not in a vocabulary of 8"),
    ("vocab_cross_entropy", "integer logits", lambda: parallel.vocab_cross_entropy(x(2, 4).long(), ids, axis="a"), r"logits are not floating point"),
    ("vocab_cross_entropy", "no vocabulary", lambda: parallel.vocab_cross_entropy(x(2, 0), ids, axis="a"), r"is not in a vocabulary of 0"),
    ("vocab_cross_entropy", "no such reduction", lambda: parallel.vocab_cross_entropy(x(2, 4), ids, axis="a", reduction="avg"), r"reduction='avg' is none of"),
    ("vocab_cross_entropy", "smoothing of NaN", lambda: parallel.vocab_cross_entropy(x(2, 4), ids, axis="a", label_smoothing=nan), r"label_smoothing=nan is not from 0 to 1"),
    ("vocab_cross_entropy", "smoothing of text", lambda: parallel.vocab_cross_entropy(x(2, 4), ids, axis="a", label_smoothing="0"), r"label_smoothing='0' is not"),
    ("linear_cross_entropy", "another target", lambda: parallel.linear_cross_entropy(x(3, 4), x(2, 4), ids, axis="a"), r"target \[2\] does not fit the rows of x"),
    ("linear_cross_entropy", "x in a list", lambda: parallel.linear_cross_entropy([1.0], x(2, 4), ids, axis="a"), r"x is not a tensor but list"),
    ("linear_cross_entropy", "a weight of another width", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 3), ids, axis="a"), r"weight \[2, 3\] does not fit x.shape\[-1\] = 4"),
    ("linear_cross_entropy", "a bias of another length", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids, bias=x(3), axis="a"), r"bias \[3\] does not fit weight \[2, 4\]"),
    ("linear_cross_entropy", "another dtype", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4).half(), ids, axis="a"), r"weight is torch.float16, x is torch.float32"),
    ("linear_cross_entropy", "integers", lambda: parallel.linear_cross_entropy(x(2, 4).long(), x(2, 4), ids, axis="a"), r"x is not floating point"),
    ("linear_cross_entropy", "target of floats", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), x(2), axis="a"), r"not integers"),
    ("linear_cross_entropy", "a target too large", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids + 4, axis="a"), r"is not in a vocabulary of 4"),
    ("linear_cross_entropy", "no such reduction", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids, axis="a", reduction="avg"), r"reduction='avg' is none of"),
    ("linear_cross_entropy", "smoothing of NaN", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids, axis="a", label_smoothing=nan), r"label_smoothing=nan is not from 0 to 1"),
    ("linear_cross_entropy", "no rows at a time", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids, axis="a", rows=0), r"rows=0 is no number of rows"),
    ("linear_cross_entropy", "rows of True", lambda: parallel.linear_cross_entropy(x(2, 4), x(2, 4), ids, axis="a", rows=True), r"rows=True is no number of rows"),
    ("context_attention", "three dims", lambda: parallel.context_attention(*[x(2, 4, 2)] * 3, axis="a"), r"q is f32\[2, 4, 2\][\s\S]*floats \[b, h, s, e\]"),
    ("context_attention", "integers", lambda: parallel.context_attention(*[x(1, 2, 4, 2).long()] * 3, axis="a"), r"q is i64\[1, 2, 4, 2\]"),
    ("context_attention", "a list", lambda: parallel.context_attention([1.0], *[x(1, 2, 4, 2)] * 2, axis="a"), r"q is not a tensor but list"),
    ("context_attention", "another dtype", lambda: parallel.context_attention(x(1, 2, 4, 2), *[x(1, 2, 4, 2).half()] * 2, axis="a"), r"q, k and v are torch.float32, torch.float16"),
    ("context_attention", "another width", lambda: parallel.context_attention(x(1, 2, 4, 2), *[x(1, 2, 4, 3)] * 2, axis="a"), r"do not fit"),
    ("context_attention", "heads that do not divide", lambda: parallel.context_attention(x(1, 3, 4, 2), *[x(1, 2, 4, 2)] * 2, axis="a"), r"2 heads of k do not divide 3 of q"),
    ("context_attention", "heads that heads_axis does not divide", lambda: parallel.context_attention(*[x(1, 3, 4, 2)] * 3, heads_axis="a"), r"heads_axis 'a' \(size 2\) does not divide 3 heads"),
    ("context_attention", "one axis twice", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", heads_axis=("b", "a")), r"have 'a' in common"),
    ("context_attention", "an odd length in zigzag", lambda: parallel.context_attention(*[x(1, 2, 3, 2)] * 3, axis="a"), r"3 places of each index along 'a' are not two chunks[\s\S]*contiguous"),
    ("context_attention", "zigzag that is not causal", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", causal=False, order="zigzag"), r"zigzag. without causal"),
    ("context_attention", "an order that is none", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", order="striped"), r"order='striped' is no order"),
    ("context_attention", "causal of 1", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", causal=1), r"causal=1 is not a bool"),
    ("context_attention", "fewer keys and causal", lambda: parallel.context_attention(x(1, 2, 4, 2), *[x(1, 2, 2, 2)] * 2, axis="a"), r"4 queries and 2 keys, and causal"),
    ("context_attention", "documents of another length", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", documents=ids), r"documents is i64\[2\][\s\S]*integers \[4\] or \[1, 4\]"),
    ("context_attention", "documents of floats", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", documents=x(4)), r"documents is f32\[4\]"),
    ("context_attention", "documents in a list", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", documents=[0] * 4), r"documents is not a tensor but list"),
    ("context_attention", "a mask that is a tensor", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", mask=x(4, 4)), r"mask is not a function but Tensor"),
    ("context_attention", "a mask of floats", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", mask=lambda i, j: (i - j).float()), r"gives f32\[2, 3\][\s\S]*bool \[2, 3\]"),
    ("context_attention", "a mask turned around", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", mask=lambda i, j: (i >= j).mT), r"gives bool\[3, 2\]"),
    ("context_attention", "a scale of text", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", scale="1"), r"scale='1' is not a number"),
    ("context_attention", "a scale of infinity", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", scale=float("inf")), r"scale=inf is not a number"),
    ("context_attention", "regather of text", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", regather="no"), r"regather='no' is not a bool"),
    ("context_attention", "return_lse of 1", lambda: parallel.context_attention(*[x(1, 2, 4, 2)] * 3, axis="a", return_lse=1), r"return_lse=1 is not a bool"),
    ("pipeline", "fn of a number", lambda: parallel.pipeline(3, None, x(2, 3), axis="a"), r"fn is not a function but int"),
    ("pipeline", "a number in x", lambda: parallel.pipeline(lambda w, h: h, None, [x(2, 3), 3], axis="a"), r"x is not a tensor but int[\s\S]*leaf: x\[1\]"),
    ("pipeline", "x without dims", lambda: parallel.pipeline(lambda w, h: h, None, x(), axis="a"), r"x is f32\[\], and its first dim is that of microbatches"),
    ("pipeline", "no microbatches", lambda: parallel.pipeline(lambda w, h: h, None, x(0, 3), axis="a"), r"x is f32\[0, 3\][\s\S]*m at least 1"),
    ("pipeline", "leaves of other numbers", lambda: parallel.pipeline(lambda w, h: h, None, [x(2, 3), x(3)], axis="a"), r"x is f32\[2, 3\], f32\[3\], and its first dim"),
    ("pipeline", "x of nothing", lambda: parallel.pipeline(lambda w, h: h, None, [], axis="a"), r"x has no tensors"),
    ("pipeline", "targets without a loss", lambda: parallel.pipeline(lambda w, h: h, None, x(2, 3), axis="a", targets=x(2)), r"targets without loss"),
    ("pipeline", "targets of other numbers", lambda: parallel.pipeline(lambda w, h: h, None, x(2, 3), axis="a", loss=torch.sum, targets=x(3)), r"targets is f32\[3\][\s\S]*as many as x has"),
    ("pipeline", "loss of a number", lambda: parallel.pipeline(lambda w, h: h, None, x(2, 3), axis="a", loss=3), r"loss is not a function but int"),
    ("pipeline", "remat of a number", lambda: parallel.pipeline(lambda w, h: h, None, x(2, 3), axis="a", remat=1), r"remat=1 is not a bool"),
    ("experts", "three dims", lambda: parallel.experts(x(2, 2, 3), ids.view(2, 1), x(2, 1), lambda rows, counts: rows, axis="a", count=4), r"x is f32\[2, 2, 3\][\s\S]*flatten"),
    ("experts", "choices of other rows", lambda: parallel.experts(x(3, 3), ids.view(2, 1), x(2, 1), lambda rows, counts: rows, axis="a", count=4), r"choice is i64\[2, 1\][\s\S]*integers \[3, k\]"),
    ("experts", "choices of one dim", lambda: parallel.experts(x(2, 3), ids, x(2), lambda rows, counts: rows, axis="a", count=4), r"choice is i64\[2\]"),
    ("experts", "weights of another shape", lambda: parallel.experts(x(2, 3), ids.view(2, 1), x(2), lambda rows, counts: rows, axis="a", count=4), r"weight is f32\[2\]"),
    ("experts", "a choice beyond", lambda: parallel.experts(x(2, 3), ids.view(2, 1) + 4, x(2, 1), lambda rows, counts: rows, axis="a", count=4), r"choice \d is not one of 4 experts"),
    ("experts", "a negative choice", lambda: parallel.experts(x(2, 3), ids.view(2, 1) - 9, x(2, 1), lambda rows, counts: rows, axis="a", count=4), r"choice -\d is not one of 4 experts"),
    ("experts", "a count that does not divide", lambda: parallel.experts(x(2, 3), ids.view(2, 1), x(2, 1), lambda rows, counts: rows, axis="a", count=5), r"count=5 experts are not as many for each index"),
    ("experts", "a negative capacity", lambda: parallel.experts(x(2, 3), ids.view(2, 1), x(2, 1), lambda rows, counts: rows, axis="a", count=4, capacity=-1), r"capacity=-1 is not a number of rows"),
    ("experts", "fn of None", lambda: parallel.experts(x(2, 3), ids.view(2, 1), x(2, 1), None, axis="a", count=4), r"fn is not a function but NoneType"),
    ("balance", "two dims", lambda: parallel.balance(x(2, 2), ids, "a", rate=0.1), r"bias is f32\[2, 2\]"),
    ("balance", "choices of floats", lambda: parallel.balance(x(2), x(2), "a", rate=0.1), r"choice is torch.float32"),
    ("balance", "a choice beyond", lambda: parallel.balance(x(2), ids + 4, "a", rate=0.1), r"choice \d is not one of 2 experts"),
    ("balance", "a rate of text", lambda: parallel.balance(x(4), ids, "a", rate="slow"), r"rate='slow' is not a number"),
    ("pipelined", "grads of another kind", lambda: parallel.pipelined(linear(), "a", loss=max, microbatches=2, grads="average"), r"grads='average'"),
    ("pipelined", "no loss", lambda: parallel.pipelined(linear(), "a", loss=None, microbatches=2, grads="mean"), r"loss is not callable but NoneType"),
    ("pipelined", "no microbatches", lambda: parallel.pipelined(linear(), "a", loss=max, microbatches=0, grads="mean"), r"microbatches=0 is not a number"),
    ("pipelined", "no modules", lambda: parallel.pipelined([1], "a", loss=max, microbatches=2, grads="mean"), r"no list of modules but list"),
    ("pipelined", "no stages", lambda: parallel.pipelined([], "a", loss=max, microbatches=2, grads="mean"), r"stages is an empty list"),
    ("pipelined", "remat of 1", lambda: parallel.pipelined(linear(), "a", loss=max, microbatches=2, grads="mean", remat=1), r"remat=1 is not a bool"),
    ("context_order", "a length that does not fit", lambda: parallel.context_order(6, "a"), r"a sequence of 6 cannot be cut into 4 chunks[\s\S]*pad it to 8"),
    ("context_order", "a length of text", lambda: parallel.context_order("8", "a"), r"length='8' is not a length"),
    ("context_order", "an order that is none", lambda: parallel.context_order(8, "a", "ring"), r"order='ring' is no order"),
    ("heads_of", "no heads", lambda: parallel.heads_of(x(4), 0, axis="a"), r"0 heads do not divide axis 'a'"),
    ("heads_of", "more heads than ranks", lambda: parallel.heads_of(x(4), 4, axis="a"), r"4 heads do not divide axis 'a'"),
    ("heads_of", "a weight of no dims", lambda: parallel.heads_of(x(), 1, axis="a"), r"weight has no dims"),
    ("heads_of", "a list", lambda: parallel.heads_of([1.0], 1, axis="a"), r"weight is not a tensor but list"),
    ("sequence_layer_norm", "a weight that does not fit", lambda: parallel.sequence_layer_norm(x(2, 4), x(3), axis="a"), r"a parameter of shape \[3\] is not \[4\]"),
    ("sequence_layer_norm", "no dims", lambda: parallel.sequence_layer_norm(x(), axis="a"), r"x has no dims"),
    ("sequence_layer_norm", "a bias in a list", lambda: parallel.sequence_layer_norm(x(2, 4), None, [0.0] * 4, axis="a"), r"is not a tensor but list"),
    ("sequence_layer_norm", "eps of text", lambda: parallel.sequence_layer_norm(x(2, 4), axis="a", eps="1e-5"), r"eps='1e-5' is not"),
    ("sequence_rms_norm", "a list", lambda: parallel.sequence_rms_norm([1.0], axis="a"), r"x is not a tensor but list"),
    ("sequence_rms_norm", "a weight that does not fit", lambda: parallel.sequence_rms_norm(x(2, 4), x(4, 1), axis="a"), r"is not \[4\]"),
    ("sequence_rms_norm", "integers", lambda: parallel.sequence_rms_norm(x(2, 4).long(), axis="a"), r"x is not floating point"),
    ("sync_batch_norm", "one dim", lambda: parallel.sync_batch_norm(x(4), "a"), r"x has no dim of channels"),
    ("sync_batch_norm", "integers", lambda: parallel.sync_batch_norm(x(4, 2).int(), "a"), r"x is not floating point"),
    ("sync_batch_norm", "a weight that does not fit", lambda: parallel.sync_batch_norm(x(4, 2), "a", weight=x(3)), r"weight is not \[2\] but \[3\]"),
    ("sync_batch_norm", "a weight in a list", lambda: parallel.sync_batch_norm(x(4, 2), "a", weight=[1.0, 1.0]), r"weight is not a tensor but list"),
    ("sync_batch_norm", "a mean without variance", lambda: parallel.sync_batch_norm(x(4, 2), "a", running_mean=x(2)), r"running_mean and running_var are given together"),
    ("sync_batch_norm", "momentum of None", lambda: parallel.sync_batch_norm(x(4, 2), "a", running_mean=x(2), running_var=x(2), momentum=None), r"momentum=None is not"),
    ("sync_batch_norm", "momentum of NaN", lambda: parallel.sync_batch_norm(x(4, 2), "a", running_mean=x(2), running_var=x(2), momentum=nan), r"momentum=nan is not"),
    ("sync_batch_norm", "eps of text", lambda: parallel.sync_batch_norm(x(4, 2), "a", eps="small"), r"eps='small' is not"),
    ("convert_batch_norm", "not a module", lambda: parallel.convert_batch_norm([nn.BatchNorm1d(2)], "a"), r"module is not a torch.nn.Module but list"),
    ("convert_batch_norm", "lazy", lambda: parallel.convert_batch_norm(nn.Sequential(linear(), nn.LazyBatchNorm1d()), "a"), r"'1' is still a LazyBatchNorm1d, which becomes another module with its first batch[\s\S]*run the module once before"),
    ("convert_batch_norm", "lazy itself", lambda: parallel.convert_batch_norm(nn.LazyBatchNorm2d(affine=False), "a"), r"the module is still a LazyBatchNorm2d, which"),
    ("SyncBatchNorm", "an image for a sequence", lambda: parallel.convert_batch_norm(nn.BatchNorm1d(2), "a")(x(1, 2, 3, 3)), r"x has 4 dims, and 2 or 3 were expected"),
]  # fmt: skip
for name, cause, call, said in FUNCTIONS:
    bad(name, cause, lambda h, call=call: call(), rf"^meshcomm\..*{said}")


def attend(y: Any = None, q: Any = None, k: Any = None, out: Any = None, **kwargs: Any) -> Any:
    given = (x(1, 2, 4) if y is None else y, x(2, 4) if q is None else q, x(2, 4) if k is None else k, x(2, 4))
    return parallel.parallel_attention(*given, x(4, 2) if out is None else out, **({"axis": "a", "heads": 2} | kwargs))


ATTENTION: list[tuple[str, dict[str, Any], str]] = [
    ("no heads", {"heads": 0}, r"heads=0 is not a positive int"),
    ("heads that do not divide", {"heads": 3}, r"3 heads and 3 of keys and values cannot be divided"),
    ("half a head", {"heads": 2.5}, r"heads=2.5 is not a positive int"),
    ("no heads of keys", {"kv_heads": 0}, r"kv_heads=0 is not a positive int"),
    ("keys that do not fit", {"k": x(3, 4)}, r"k \[3, 4\] is not \[2, 4\]"),
    ("queries of one dim", {"q": x(8)}, r"q \[8\] is not"),
    ("an output that does not fit", {"out": x(4, 3)}, r"out \[4, 3\]"),
    ("a list", {"y": [1.0]}, r"x is not a tensor but list"),
    ("no batch", {"y": x(4)}, r"x \[4\] is not \[b, s, d\]"),
]  # fmt: skip
for cause, kwargs, said in ATTENTION:
    bad("parallel_attention", cause, lambda h, kwargs=kwargs: attend(**kwargs), rf"^meshcomm.parallel_attention: [\s\S]*{said}")

# ---------------------------------------------------------------------------------- schedules (all of test_schedules.py)

plain("Schedule", "no such schedule", lambda: parallel.Schedule.of("zb-v", 2, 1, 4), r"did you mean 'zbv'\?")
plain("Schedule", "an action twice", lambda: parallel.Schedule([["F0.0", "B0.0", "F0.0"]]), r"rank 0 repeats F0\.0")

# ------------------------------------------------------------------------------------------- stages (on no rank: it sends nothing)

STAGES: list[tuple[str, Callable[[], Any], str]] = [
    ("a list", lambda: parallel.split_stages([linear()], 1), r"model is not a torch.nn.Module but list"),
    ("no stages", lambda: parallel.split_stages(two_layers(), 0), r"n=0 is no number of stages"),
    ("more stages than parts", lambda: parallel.split_stages(two_layers(), 3), r"3 stages of 2 parts"),
    ("costs of other parts", lambda: parallel.split_stages(two_layers(), 2, [1.0]), r"1 costs for 2 parts"),
    ("lazy", lambda: parallel.split_stages(nn.Sequential(linear(), nn.LazyLinear(2)), 2), r"'1.weight' has no shape yet"),
    ("lazy buffers", lambda: parallel.split_stages(lazy_buffers(), 2), r"'1.running_mean' has no shape yet"),
    ("a negative cost", lambda: parallel.split_stages(two_layers(), 2, [1.0, -1.0]), r"not finite, or negative"),
    ("costs of text", lambda: parallel.split_stages(two_layers(), 2, "ab"), r"are no numbers"),
    ("one layer", lambda: parallel.split_stages(linear(), 2), r"Linear has no row of blocks[\s\S]*it has no list of modules"),
]  # fmt: skip
for cause, call, said in STAGES:
    plain("split_stages", cause, call, rf"^meshcomm.split_stages: [\s\S]*{said}")

# ------------------------------------------------------------------------------------------------------------- budgets

BUDGETS: list[tuple[str, Callable[[], Any], str]] = [
    ("a list", lambda: comm_budget(["1 all_reduce"]), r"axes=\['1 all_reduce'\] is not a mapping"),
    ("no number", lambda: comm_budget(a="all_reduce"), r"the budget of 'a' cannot be read"),
    ("a negative number", lambda: comm_budget(a=-1), r"the budget of 'a' cannot be read"),
    ("no such operation", lambda: comm_budget(a="1 psum"), r"no operation 'psum'"),
    ("an operation twice", lambda: comm_budget(a="1 all_reduce, 2 all_reduce"), r"the budget of 'a' names all_reduce twice"),
    ("no axis", lambda: comm_budget({3: "nothing"}), r"3 is not an axis"),
    ("an axis twice", lambda: comm_budget({"a": 1}, a=1), r"axis 'a' is named twice"),
    ("bytes of NaN", lambda: comm_budget(bytes=nan), r"bytes=nan is not a number of bytes"),
    ("backward of text", lambda: comm_budget(backward="no"), r"backward='no' is not a bool"),
    ("no function", lambda: comm_budget()(3), r"3 is not a function that can be budgeted"),
]  # fmt: skip
for cause, call, said in BUDGETS:
    bad("comm_budget", cause, lambda h, call=call: call(), rf"^meshcomm.comm_budget: {said}")

# ------------------------------------------------------------------------------------------------------------ dry runs


def outside() -> None:
    """A program whose module is there already, with memory."""
    _MADE(torch.ones(1, 2))


_MADE = nn.Linear(2, 2)


DRY_RUNS: list[tuple[str, Callable[[], Any], str]] = [
    ("no mesh", lambda: mc.dry_run(int, {}), r"a mesh is a mapping of axis names to sizes"),
    ("a size of -1", lambda: mc.dry_run(int, {"dp": -1}), r"axis 'dp' has size -1"),
    ("too many ranks", lambda: mc.dry_run(int, {"dp": 2**21}), r"2097152 ranks are more than 1048576"),
    ("no function", lambda: mc.dry_run(cast(Any, 3), {"dp": 2}), r"fn is not callable but int"),
    ("a rank beyond the mesh", lambda: mc.dry_run(int, {"dp": 2}, ranks=[2]), r"rank 2 is not on the mesh"),
    ("a rank twice", lambda: mc.dry_run(int, {"dp": 2}, ranks=[1, 1]), r"are not different ints"),
    ("a module from outside", lambda: mc.dry_run(outside, {"dp": 2}), r"a parameter that was made outside of the dry run"),
    ("a size that depends on values", lambda: mc.dry_run(lambda: torch.randn(3).nonzero(), {"dp": 2}), r"result of nonzero at "),
    ("text as a value", lambda: mc.dry_run(lambda: torch.randn(()).item(), {"dp": 2}, host_values=cast(Any, "a")),
     r"host_values gives 'a' for bad_calls.py"),
    ("nan as an int", lambda: mc.dry_run(lambda: torch.randint(3, ()).item(), {"dp": 2}, host_values=nan),
     r"host_values gives nan for bad_calls.py:\d+, where torch.int64 is read"),
    ("in a dry run", lambda: mc.dry_run(lambda: mc.dry_run(int, {"dp": 2}), {"dp": 2}), r"called inside of a dry run"),
    ("an array of values", lambda: mc.dry_run(lambda: torch.randn(3).numpy(), {"dp": 2}), r"x.numpy\(\) at bad_calls.py:\d+ wants the values"),
    ("where a storage lies", lambda: mc.dry_run(lambda: torch.randn(3).untyped_storage().data_ptr(), {"dp": 2}),
     r"bad_calls.py:\d+ asks where a storage lies"),
    ("a file of values", lambda: mc.dry_run(lambda: torch.save(torch.randn(3), io.BytesIO()), {"dp": 2}), r"is pickled, or saved"),
    ("a program of arguments", lambda: mc.dry_run(cast(Any, lambda rows: rows), {"dp": 2}), r"fn is called without arguments, and has some.*'rows'"),
    ("bytes that nobody sends", lambda: mc.dry_run(lambda: mc.rank() or mc.recv_object("dp", 1), {"dp": 2}), r"receives bytes from rank 1 that"),
]  # fmt: skip
for cause, call, said in DRY_RUNS:
    plain("dry_run", cause, call, rf"^meshcomm.dry_run: [\s\S]*{said}")


HARDWARE: list[tuple[str, Callable[[], Any], str]] = [
    ("no name", lambda: mc.hardware("h1000"), r"no machine is called 'h1000', and there is no such file"),
    ("a number", lambda: mc.hardware(cast(Any, 3)), r"3 is no name"),
    ("a file of something else", lambda: mc.hardware(__file__), r"'.*bad_calls.py' cannot be read"),
    ("no such field", lambda: mc.hardware("h100", bandwidth=1e12), r"there is no 'bandwidth'"),
    ("negative", lambda: mc.hardware("h100", memory_bandwidth=-1.0), r"memory_bandwidth=-1.0 makes no sense"),
    ("zero", lambda: mc.hardware("h100", flops={"bfloat16": 0}), r"flops\['bfloat16'\]=0 makes no sense"),
    ("not a number", lambda: mc.hardware("h100", memory=float("nan")), r"memory=nan makes no sense"),
    ("TFLOP/s", lambda: mc.hardware("h100", flops={"bfloat16": 989}), r"flops\['bfloat16'\]=989 is less than any machine does"),
    ("GFLOP/s", lambda: mc.hardware("h100", flops=dict.fromkeys(mc.hardware("h100").flops, 989e3)), r"is more than flops = 9.89e\+05"),
    ("no dtype", lambda: mc.hardware("h100", flops={"bf16": 1e15}), r"'bf16' is no dtype"),
    ("microseconds", lambda: mc.hardware("h100", within=(1.9, 3.7e11)), r"within.latency=1.9 is more than a second"),
    ("half a link", lambda: mc.hardware("h100", within=3.7e11), r"is no link"),
    ("a link above memory", lambda: mc.hardware("h100", between=(0, 5e12)), r"between.bandwidth = 5e\+12 is more than memory_bandwidth"),
    ("too efficient", lambda: mc.hardware("h100", product_efficiency=1.5), r"product_efficiency=1.5 is more than all"),
    ("made by hand", lambda: mc.dry_run(int, {"dp": 2}, hardware=replace(mc.hardware("h100"), memory_bandwidth=-1.0)),
     r"memory_bandwidth=-1.0 makes no sense"),
    ("gigabytes", lambda: mc.hardware("h100", memory=80), r"memory=80 is less than any machine has"),
    ("gigabytes of a link", lambda: mc.hardware("h100", within=(1e-6, 370)), r"within.bandwidth=370 is less than any machine has"),
    ("ahead as text", lambda: mc.hardware("h100", ahead="yes"), r"ahead='yes' is not a bool"),
    ("sources in a list", lambda: mc.hardware("h100", sources=["a"]), r"sources=\['a'\] is no mapping"),
    ("no rank on a node", lambda: mc.hardware("h100", ranks_per_node=0), r"ranks_per_node=0 makes no sense"),
]  # fmt: skip
for cause, call, said in HARDWARE:
    plain("hardware", cause, call, rf"^meshcomm.hardware: [\s\S]*{said}")

FORETOLD: list[tuple[str, Callable[[], Any], str]] = [
    ("no hardware", lambda: mc.dry_run(int, {"dp": 2}, hardware=cast(Any, "h100")), r"hardware='h100' is none"),
    ("nodes that are not full", lambda: mc.dry_run(int, {"dp": 12}, hardware=mc.hardware("h100")), r"12 ranks do not fill nodes of 8"),
    ("seconds of no machine", lambda: mc.dry_run(int, {"dp": 2}).seconds, r"nothing is known of times"),
    ("an axis that is none", lambda: mc.dry_run(int, {"dp": 2}, hardware=mc.hardware("h100")).exposed("tp"), r"there is no axis 'tp'"),
]  # fmt: skip
for cause, call, said in FORETOLD:
    plain("dry_run", cause, call, rf"^meshcomm.dry_run: [\s\S]*{said}")



def advised(fn: Callable[..., Any] = lambda batch=2: torch.ones(batch).sum(), **given: Any) -> Any:
    """Advice on a program of one argument."""
    return mc.dry_run(fn, {"dp": 2}, hardware=mc.hardware("h100")).advice(**given)


ADVICE: list[tuple[str, Callable[[], Any], str]] = [
    ("no such argument", lambda: advised(changes={"more": {"rows": 4}}), r"changes\['more'\]: fn cannot be called so: .*'rows'"),
    ("no mapping of changes", lambda: advised(changes={"more": 4}), r"changes=\{'more': 4\} are none"),
    ("no kind", lambda: advised(kinds=["faster"]), r"kinds=\['faster'\] are not known"),
    ("tokens of zero", lambda: advised(tokens=0), r"tokens=0 makes no sense"),
]  # fmt: skip
for cause, call, said in ADVICE:
    plain("DryRun.advice", cause, call, rf"^meshcomm.DryRun.advice: [\s\S]*{said}")

H100 = mc.hardware("h100")
SWEEPS: list[tuple[str, Callable[[], Any], str]] = [
    ("no function", lambda: mc.sweep(cast(Any, 3), [{"dp": 2}], H100), r"fn is not callable but int"),
    ("one mesh", lambda: mc.sweep(int, cast(Any, {"dp": 2}), H100), r"meshes=\{'dp': 2\} are no list of meshes"),
    ("no meshes", lambda: mc.sweep(int, [], H100), r"there are no meshes"),
    ("a size of 0", lambda: mc.sweep(int, [{"dp": 8}, {"dp": 0}], H100), r"axis 'dp' has size 0"),
    ("a name as hardware", lambda: mc.sweep(int, [{"dp": 2}], cast(Any, "h100")), r"hardware='h100' is none"),
    ("no hardware", lambda: mc.sweep(int, [{"dp": 2}], []), r"hardware=\[\] is none"),
    ("negative tokens", lambda: mc.sweep(int, [{"dp": 2}], H100, tokens=lambda mesh: -mesh["dp"]), r"tokens=-2 makes no sense"),
    ("layers out of order", lambda: mc.sweep(int, [{"dp": 2}], H100, layers=(4, 2, 32)), r"layers=\(4, 2, 32\) are not in order"),
    ("two layers", lambda: mc.sweep(int, [{"dp": 2}], H100, layers=cast(Any, (4, 2))), r"layers=\(4, 2\) are no three numbers"),
    ("a rank beyond the mesh", lambda: mc.sweep(int, [{"dp": 2}], H100, ranks=[4]), r"rank 4 is not on the mesh"),
    ("in a dry run", lambda: mc.dry_run(lambda: mc.sweep(int, [{"dp": 2}], H100), {"dp": 2}), r"called inside of a dry run"),
    ("a file of no kind", lambda: mc.sweep(int, [{"dp": 2}], H100).save("meshes.xls"), r"ends in none of"),
]  # fmt: skip
for cause, call, said in SWEEPS:
    plain("sweep", cause, call, rf"^meshcomm.(sweep|show): [\s\S]*{said}")

# -------------------------------------------------------------------------------------------------------- checkpoints

SAVE: list[tuple[str, Callable[[Here], Any], str, bool]] = [
    ("a path of 3", lambda h: checkpoint.save(3, linear()), r"path=3 is no path", False),
    ("no path", lambda h: checkpoint.save("", linear()), r"path='' is no path", False),
    ("a path of bytes", lambda h: checkpoint.save(b"here", linear()), r"path=b'here' is no path", False),
    ("a path with a zero byte", lambda h: checkpoint.save("a\0b", linear()), r"path='a\\x00b' is no path", False),
    ("not a module", lambda h: checkpoint.save(h.folder, {"w": x(2)}), r"module is not a torch.nn.Module but dict", False),
    ("not an optimiser", lambda h: checkpoint.save(h.folder, linear(), torch.optim.SGD), r"optimizer is not a torch.optim.Optimizer but type", False),
    ("a negative step", lambda h: checkpoint.save(h.folder, linear(), step=-1), r"step=-1 is not a number from 0 on", False),
    ("a step of NaN", lambda h: checkpoint.save(h.folder, linear(), step=nan), r"step=nan is not a number", False),
    ("nothing to keep", lambda h: checkpoint.save(h.folder, linear(), keep=0), r"keep=0 is not a number from 1 on", False),
    ("an extra with code", lambda h: checkpoint.save(h.folder, linear(), extra={"f": print}), r"extra\['f'\]", True),
    ("an extra of a rank with an object", lambda h: checkpoint.save(h.folder, linear(), rank_extra=[object()]), r"rank_extra\[0\]", True),
    ("an optimiser of another model", lambda h: checkpoint.save(h.folder, linear(), torch.optim.SGD(linear().parameters(), 1.0)), r"optimi[sz]er|param", True),
    ("parameters on meta", lambda h: checkpoint.save(h.folder, nn.Linear(2, 2, device="meta")), r"'weight' has no values yet", True),
    ("lazy buffers", lambda h: checkpoint.save(h.folder, lazy_buffers()), r"'1.running_mean' has no shape yet", True),
    ("a file as folder", lambda h: checkpoint.save(__file__, linear()), r"is no folder", True),
]  # fmt: skip
for cause, call_it, said, told in SAVE:
    bad("checkpoint.save", cause, call_it, rf"^meshcomm.checkpoint.save: [\s\S]*{said}", told=told)
bad("checkpoint.async_save", "a path of 3", lambda h: checkpoint.async_save(3, linear()), r"path=3 is no path")
bad("checkpoint.async_save", "a negative step", lambda h: checkpoint.async_save(h.folder, linear(), step=-1), r"step=-1 is not a number from 0 on")
bad("checkpoint.async_save", "an extra with code", lambda h: checkpoint.async_save(h.folder, linear(), extra=print), r"extra is a builtin", told=True)
bad("checkpoint.load", "no checkpoint", lambda h: checkpoint.load(h.folder, linear()), r"there is no finished checkpoint", told=True)
bad("checkpoint.load", "keys of text", lambda h: checkpoint.load(h.folder, linear(), keys="model"), r"keys='model' are not two names")
bad("checkpoint.load", "a path of None", lambda h: checkpoint.load(None, linear()), r"path=None is no path")
bad("checkpoint.load", "not a module", lambda h: checkpoint.load(h.folder, None), r"module is not a torch.nn.Module but NoneType")
bad("checkpoint.latest", "a path of 3", lambda h: checkpoint.latest(3), r"path=3 is no path")
bad("full_state_dict", "not a module", lambda h: parallel.full_state_dict({}), r"module is not a torch.nn.Module but dict")
bad("full_state_dict", "lazy buffers", lambda h: parallel.full_state_dict(lazy_buffers()), r"'1.running_mean' has no shape yet", told=True)
bad("full_state_dict", "shared by name", lambda h: parallel.full_state_dict(linear(), shared="keep"), r"shared='keep' is neither 'copy' nor 'drop'")
bad("full_state_dict", "dst beyond the mesh", lambda h: parallel.full_state_dict(linear(), dst=4), r"dst=4 is not an index")

# fmt: on
# ---------------------------------------------------------------------------------------------------------- how to run

PRIMITIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce", "gather", "scatter", "exchange",
    "barrier", "barrier_within", "sum_told",
)  # fmt: skip
_here = threading.local()  # ranks of one process are threads


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Where ``_here.count`` is set, primitives of all links and the making of process groups are counted there."""
    places: list[tuple[Any, str, Any]] = [(_torch, "new_group", _torch.new_group)]
    kinds: list[Any] = [InProcessLink, PacketLink]
    for kind in kinds:
        kinds += kind.__subclasses__()
        places += [(kind, name, vars(kind)[name]) for name in PRIMITIVES if name in vars(kind)]
    for owner, name, own_one in places:
        setattr(owner, name, _counted(own_one))
    try:
        yield
    finally:
        for owner, name, own_one in places:
            setattr(owner, name, own_one)


def _counted(primitive: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "count", None) is not None:
            _here.count += 1
        return primitive(*args, **kwargs)

    return counted


class Outcome(NamedTuple):
    """What came of a row on one rank."""

    kind: str
    is_kind: bool
    text: str
    primitives: int
    """How many were called."""


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    outer, mc.mesh.of_thread.mesh = mc.mesh.of_thread.mesh, None
    try:
        yield
    finally:
        mc.mesh.of_thread.mesh = outer


def outcome(row: Row, h: Here) -> Outcome:
    """Make the call."""
    _here.count = 0
    try:
        with _without_mesh() if row.bare else contextlib.nullcontext():
            given = row.call(h)
    except Exception as error:
        return Outcome(type(error).__name__, isinstance(error, row.kind), str(error), _here.count)
    else:
        return Outcome("nothing", False, f"gave {type(given).__name__}", _here.count)
    finally:
        _here.count = None


def runs_on(row: Row, here: str) -> bool:
    """Whether it makes sense there."""
    return row.where in ("", here)


def outcomes(folder: str) -> Mapping[int, Outcome]:
    """What comes of each row, by its number; after each of them the ranks reduce something together."""
    h = Here(folder)
    found = {}
    with silent() if h.in_processes else contextlib.nullcontext(), mc.use_mesh(h.mesh):
        for number, row in enumerate(ROWS):
            if not runs_on(row, "processes" if h.in_processes else "in-process"):
                continue
            found[number] = outcome(row, h)
            try:
                assert mc.all_reduce(torch.tensor(h.mesh.rank), ("a", "b")).item() == 6
            except (AssertionError, mc.CommError) as error:
                raise AssertionError(f"after {row.function}, {row.cause}: {error}") from None
    return found


# ------------------------------------------------------------------------------------------------------ wrong on one

WAITS = (
    "all_reduce", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "all_to_all_ragged", "permute", "shift", "broadcast", "reduce",
    "gather", "barrier", "sync_seed", "main_only", "weighted_mean", "all_reduce_params", "Metrics.reduce", "data_parallel",
    "fully_shard", "tensor_parallel", "sync_batch_norm", "leave", "row_linear", "vocab_embedding", "vocab_cross_entropy",
    "auto_plan", "context_attention", "linear_cross_entropy", "parallel_attention",
)  # fmt: skip
"""Functions in which ranks wait for each other; ``AXIS`` has a right call of each."""
WRONG_RANK, PEER = 1, 3
"""Who makes the wrong call, and who waits for it along ``a``."""

ONE_WRONG = [
    n
    for n, row in enumerate(ROWS)
    if row.function in WAITS and row.kind is mc.MeshError and not (row.told or row.where)
]
"""All rows of these that one rank can make alone."""
_of_function = {name: [n for n in ONE_WRONG if ROWS[n].function == name] for name in WAITS}
FEW_WRONG = sorted(n for numbers in _of_function.values() for n in {numbers[0], numbers[-1]})
"""Of each function the first and the last."""


class Together(NamedTuple):
    """What came of a wrong call of one rank, on each rank."""

    first: Outcome
    """Of the wrong call, or of the right one on the other ranks."""
    seconds: float
    after: str
    """What is wrong afterwards."""


def one_wrong(folder: str, chosen: list[int]) -> dict[int, Together]:
    """Rank 1 makes the wrong call, the others the right one over ``a``; then all meet, and go on."""
    h = Here(folder)
    found = {}
    with mc.use_mesh(h.mesh):
        for number in chosen:
            row = ROWS[number]
            if h.mesh.rank != WRONG_RANK:
                row = row._replace(call=lambda h, right=AXIS[row.function]: right("a"), bare=False)
            began = time.monotonic()
            first = outcome(row, h)
            seconds = time.monotonic() - began
            for axis in ("a", "b", ("a", "b")):  # whoever has waited in vain comes too, and all calls count alike again
                mc.barrier(axis, timeout=60)
            found[number] = Together(first, seconds, works())
    return found


def works() -> str:
    """What is wrong with collectives over all axes."""
    for axis, expected in (("a", 2), ("b", 2), (("a", "b"), 4)):
        got = mc.all_reduce(x(1), axis).item()
        if got != expected:
            return f"{got} over {axis!r}"
    return ""
