"""pvary of a pytree: the gradients are summed bucket by bucket while the rest of the backward pass runs.

n = number of leaves in a bucket.

Source: the buckets of DistributedDataParallel; that they are rebuilt in the order of the first pass is its idea too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm import _torch
from meshcomm._torch import dual_level_open, functorch_active, in_graph, let_into_graph
from meshcomm.axis import Axis, axis_with_key
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.rule import apply, refuse_in_process, rule_named
from meshcomm.collectives.trees import bucket_sizes, buckets
from meshcomm.runtime.call import for_later
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.pending import Pending, settled
from meshcomm.runtime.process.accelerator import stream_of, take_over
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.runtime.transports.protocol import Parts


class How(NamedTuple):
    """How the gradients of a tree are summed."""

    op: str = "sum"
    """Or "mean"."""
    dtype: torch.dtype | None = None
    """In which they travel; their own by default."""
    before: Callable[[int], Tensor | None] | None = None
    """Gives, once, what this rank has collected before for the leaf at a place: it is added to the gradient."""
    around: Callable[[], Callable[[int], object]] | None = None
    """Called when a backward pass brings the first gradients: of one leaf in the first pass for a tree, of a bucket
    later. What it gives is called at the end, with each place for which no rank had a gradient.
    """
    late: Callable[[], bool] | None = None
    """Whether no sum is to start before a backward pass has brought all gradients."""
    inside: Callable[[], bool] | None = None
    """Whether the backward pass that runs is one inside of another, which is to sum what this one brings."""
    whose: str = ""
    """Of whom the tree is, in the words of all ranks: what others add up is not to be mixed with it."""
    rows: frozenset[int] = frozenset()
    """The places of leaves whose gradients are sparse: they are summed at the end, each by itself."""
    result: torch.dtype | None = None
    """Of the sums, and in which they travel where ``dtype`` says nothing; that of the leaf by default."""
    some: tuple[int, ...] = ()
    """The places of the leaves that need a gradient, where not all do: ranks that need others are told so."""


_SUM = How()


def vary_tree(leaves: list[Tensor], axis: Axis, bucket_mb: float, how: How = _SUM) -> list[Tensor]:
    """The same values, whose gradients are summed over ``axis``; under transforms and in a graph as ``How()`` says."""
    if torch.compiler.is_compiling():
        refuse_in_process("pvary", axis)
        let_into_graph()
        return list(_vary_in_graph(leaves, axis.index_tensor, axis.key, bucket_mb))
    if functorch_active() or dual_level_open():
        return list(_one_node(axis, bucket_mb, *leaves))
    needy = [at for at, leaf in enumerate(leaves) if leaf.requires_grad] if torch.is_grad_enabled() else []
    if leaves and len(needy) == len(leaves):
        return _vary(leaves, axis, bucket_mb, how)
    varied = [leaf.view_as(leaf) for leaf in leaves]
    if needy:
        how = how._replace(some=tuple(needy))
        for at, leaf in zip(needy, _vary([leaves[at] for at in needy], axis, bucket_mb, how), strict=True):
            varied[at] = leaf
    return varied


def sums_alone(
    leaves: list[Tensor], axis: Axis, bucket_mb: float, how: How = _SUM, *, all_do: bool = False
) -> list[Tensor | None]:
    """What backward gives on a rank that has no gradient for any of the leaves, when the others run theirs; or, where
    ``all_do`` this, of what they have collected before.
    """
    sums = _Sums(leaves, axis, bucket_mb, how)
    sums.learning = sums.learning and not all_do  # nobody has seen an order
    return sums.finish([True] * len(leaves))


# -------------------------------------------------------------------------------------------- sums during backward
# Autograd runs the ready node with the highest number first, by default the one made last: a node at the top of the
# step would run after all layers. So nodes with a high number take the gradients as they become ready, bucket by
# bucket, and start the sums; a node with a low number waits for all sums when nothing else is left. Between them goes
# an empty tensor, never an unfinished sum.
#
# Buckets start in one order on all ranks, whatever the order in which their gradients become ready on each. The first
# backward pass for a tree finds out that order, starts nothing early, and the ranks agree on what index 0 saw.

_AT_ONCE = 2**62
_AT_LAST = 0


class _First(threading.local):
    """Uses up autograd's first number on this thread, so that all of the user's are above ``_AT_LAST``: compared with
    them it must not come out in one way on one rank and in another way on another.
    """

    def __init__(self) -> None:
        with _torch.outside_transforms(), torch.enable_grad():  # whoever imports this
            torch.zeros(1, requires_grad=True, device="cpu").view(1)
        self.number = _AT_LAST


_last = _First()


@_torch.out_of_graphs
def _vary(leaves: list[Tensor], axis: Axis, bucket_mb: float, how: How) -> list[Tensor]:
    sums = _Sums(leaves, axis, bucket_mb, how)
    token: Tensor = _wait(sums, *leaves)
    _torch.set_sequence_number(token.grad_fn, _last.number)
    varied = list(leaves)
    nodes = [[at] for at in range(len(leaves))] if sums.learning else [*sums.buckets, *([at] for at in how.rows)]
    for node in nodes:
        parts: tuple[Tensor, ...] = _start(token, sums, node, [leaves[at] for at in node])
        _torch.set_sequence_number(parts[0].grad_fn, _AT_ONCE)
        for at, part in zip(node, parts, strict=True):
            varied[at] = part
    return varied


class _Sums:
    """The gradients of the leaves of a tree on their way.

    Behind those of the n leaves of a bucket go n numbers, 1 where this rank has a gradient: a leaf that no rank has one
    for gets none, as it would alone.
    """

    def __init__(self, leaves: list[Tensor], axis: Axis, bucket_mb: float, how: How) -> None:
        self.axis, self.how = axis, how
        self.kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        self._bucket_mb, self._key = bucket_mb, (bucket_mb, how.rows, *self.kinds)
        known: list[list[int]] | None = axis.link.orders.get(self._key)
        self.learning = known is None
        if known is None:
            check.checked_size("pvary", bucket_mb, axis)
            known = self._grouped(range(len(leaves))[::-1])  # a guess: the last layers are ready first
        self.buckets = known
        self._passes: dict[int, _Pass] = {}
        self._lock = threading.RLock()
        """Autograd has a thread for each kind of device, and the leaves may be on several."""
        self._mixed = any(device != self.kinds[0][2] for *_, device in self.kinds)

    def _grouped(self, order: Sequence[int]) -> list[list[int]]:
        """The buckets of leaves whose gradients come in this order."""
        dense = [at for at in order if at not in self.how.rows]
        kinds = [self.kinds[at][1:] for at in dense]
        sizes = [self.kinds[at][0].numel() * self.kinds[at][1].itemsize for at in dense]
        return [[dense[at] for at in group] for group in bucket_sizes.grouped(kinds, sizes, self._bucket_mb)]

    def ready(self, places: list[int], gs: Sequence[Tensor | None]) -> bool:
        """Take gradients, and start the buckets whose turn it is, unless somebody differentiates the sums or looks for
        NaN on the way. Whether they are the first ones of a backward pass.
        """
        with self._lock:
            return self._take(places, gs)

    def _take(self, places: list[int], gs: Sequence[Tensor | None]) -> bool:
        number = _torch.backward_pass()
        now = self._passes.get(number)
        is_first = now is None
        if now is None:
            now = self._passes[number] = _Pass()
            inside = self.how.inside is not None and self.how.inside()
            now.without = None if inside or self.how.around is None else self.how.around()
            now.late = self.learning or (self.how.late is not None and self.how.late())
        now.take(places, gs)
        if self._mixed:
            now.streams.update((at, stream_of(g)) for at, g in zip(places, gs, strict=True) if g is not None)
        if not (now.late or torch.is_grad_enabled() or torch.is_anomaly_enabled()):
            while len(now.totals) < len(self.buckets) and self.buckets[len(now.totals)][0] in now.seen:
                self._start(now, later=True)
            now.read_what_has_come()
        return is_first

    def _start(self, now: _Pass, later: bool) -> None:
        axis, bucket = self.axis, self.buckets[len(now.totals)]
        dtype = self.how.dtype or self.how.result or self.kinds[bucket[0]][1]
        parts, flags = [], []
        for at in bucket:
            shape, own, device = self.kinds[at]
            g = self._own_gradient(now, at)
            flags.append(g is not None)
            parts.append(torch.zeros(shape.numel(), dtype=own, device=device) if g is None else g.reshape(-1))
        device = parts[0].device
        runs = [(True, len(flags))] if all(flags) else [(there, len(list(run))) for there, run in groupby(flags)]
        parts += [_flags(there, count, dtype, device) for there, count in runs]
        link, shape = axis.link, torch.Size((sum(part.numel() for part in parts),))
        tree: tuple[Any, ...] = ()
        if (self.how.whose or self.how.some) and (link.watched or (link.hears and device.type == "cpu")):
            whose = self.how.whose or f"leaves {list(self.how.some)} of a tree"
            tree = ((f" of {whose}, bucket {len(now.totals)}", dtype, tuple(shape)),)
        rule = rule_named("all_reduce")

        def begin() -> None:
            if link.takes_parts(device, dtype):
                share = 1 / axis.size if self.how.op == "mean" else 1.0
                call = rule.noted((self.how.op,), dtype, shape, tree)._replace(needs_grad=False, axis=axis)
                with calling(axis, call):
                    now.totals.append(link.sum_parts(Parts(parts, dtype, share)))
            else:
                now.totals.append(apply(rule.for_own, _joined(parts, dtype), axis, (self.how.op,), tree))

        for_later(later, begin)

    def _own_gradient(self, now: _Pass, at: int) -> Tensor | None:
        """What this rank has for a leaf, with what it has collected before."""
        g, before = now.gradients.pop(at, None), self.how.before
        if g is not None and (stream := now.streams.get(at)) is not None:
            take_over(g, stream)
        if before is not None and not torch.is_grad_enabled() and (more := before(at)) is not None:
            g = more if g is None else g.to(more.dtype) + more
            now.seen[at] = True
        return g

    def finish(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """The sums of the needed leaves, in their order."""
        later = not (torch.is_grad_enabled() or torch.is_anomaly_enabled())
        now = self._passes.pop(_torch.backward_pass(), None) or _Pass()
        if self.how.inside is not None and self.how.inside():
            return [now.gradients.get(at) for at in range(len(self.kinds))]
        while len(now.totals) < len(self.buckets):
            if any(needed[at] for at in self.buckets[len(now.totals)]):
                self._start(now, later)
            else:
                now.totals.append(None)
        for total in now.totals:  # all that others may wait for comes before all that this rank waits for
            if isinstance(total, Pending):
                total.meet()
        sums: list[Tensor | None] = [None] * len(self.kinds)
        parts = {at: part for at, part in enumerate(map(self._parts, self.buckets, now.totals)) if part}
        has = self._gradients_of([(self.buckets[number], flags) for number, (*_, flags) in parts.items()], now.seen)
        for number, (*found, _) in parts.items():
            for at, part in zip(self.buckets[number], found, strict=True):
                if at in has:
                    sums[at] = part
        for at in sorted(self.how.rows):
            if needed[at]:
                sums[at] = self._sum_of_rows(now, at)
        if now.without is not None:
            for at, total in enumerate(sums):
                if total is None and needed[at]:
                    now.without(at)
        if self.learning and self._key not in self.axis.link.orders:
            self._agree([*now.seen, *(at for at in range(len(sums)) if at not in now.seen)])
        return sums

    def _sum_of_rows(self, now: _Pass, at: int) -> Tensor | None:
        over = self.axis.size if self.how.op == "mean" else 1
        shape, own, device = self.kinds[at]
        kind = shape, self.how.result or own, device
        return _sum_of_rows(self._own_gradient(now, at), kind, self.axis, over, self.how.dtype)

    def _parts(self, bucket: list[int], total: Any) -> Sequence[Tensor]:
        """The sums of the leaves of a bucket, and the flags behind them; nothing if it was not started."""
        if total is None:
            return ()
        whole: Tensor = settled(total)
        dtype = self.how.result or self.kinds[bucket[0]][1]
        if whole.dtype != dtype:
            whole = whole.to(dtype)
        return buckets.parted(whole, (*[self.kinds[at][0] for at in bucket], torch.Size((len(bucket),))))

    def _gradients_of(self, buckets: list[tuple[list[int], Tensor]], seen: dict[int, bool]) -> set[int]:
        """The leaves that any rank has a gradient for. What this one has none for is asked at once: the host waits for
        a device one time, however many leaves there are.
        """
        asked: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        for bucket, flags in buckets:
            if not all(seen.get(at) for at in bucket):
                asked.setdefault(flags.device, []).append((bucket, flags))
        has = {at for bucket, _ in buckets for at in bucket if seen.get(at)}
        for some in () if is_dry() else asked.values():  # where the others are as this rank, they have no more
            told = torch.cat([flags.detach() != 0 for _, flags in some]).tolist()
            places = [at for bucket, _ in some for at in bucket]
            has |= {at for at, is_there in zip(places, told, strict=True) if is_there}
        return has

    def _agree(self, seen: list[int]) -> None:
        """Keep the buckets in the order that index 0 has seen."""
        [order] = agree(seen, self.axis, 0)
        if len(self.axis.link.orders) >= _MOST_ORDERS:
            self.axis.link.orders.clear()
        self.axis.link.orders[self._key] = self._grouped(order)


def _flags(there: bool, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """That many leaves with a gradient, or without: what is made of numbers of the host's would wait for a device. What
    is made while a graph of a device's is captured is there when that has run, and is not kept.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_new_flags if capturing else _kept_flags)(there, count, dtype, device)


def _new_flags(there: bool, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((count,), float(there), dtype=dtype, device=device)


@lru_cache(1000)
def _kept_flags(there: bool, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For use on any stream, so they are there when this returns."""
    flags = _torch.lasting(_new_flags, there, count, dtype, device)
    if (stream := stream_of(flags)) is not None:
        stream.synchronize()
    return flags


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One behind the other in ``dtype``, copied once."""
    if all(part.dtype == dtype for part in parts):
        return torch.cat(list(parts))
    if torch.is_grad_enabled() or parts[0].is_complex():
        return torch.cat([part.to(dtype) for part in parts])
    out = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=parts[0].device)
    return torch.cat(list(parts), out=out)


def _sum_of_rows(
    g: Tensor | None,
    kind: tuple[torch.Size, torch.dtype, torch.device],
    axis: Axis,
    over: int = 1,
    travels: torch.dtype | None = None,
) -> Tensor | None:
    """The sum of sparse gradients of a leaf, as embeddings have them, divided by ``over``: with each row that any rank
    has, or dense where one of them is; None where none has a gradient. Each rank receives the rows of the others, in
    the dtype ``travels``. ``kind``: the leaf's shape, dtype and device.
    """
    shape, dtype, device = kind
    is_dense = g is not None and not g.is_sparse
    if g is not None:
        g = (g.to_sparse(1) if is_dense else g).to(dtype).coalesce()  # equal rows are added up in it
    counts, dense = zip(*agree([-1 if g is None else len(g.values()), is_dense], axis), strict=True)
    if max(counts) < 0:
        return None
    sizes = tuple(max(count, 0) for count in counts)
    if g is None:
        rows, values = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, *shape[1:], device=device)
    else:
        rows, values = g.indices()[0], g.values()
    values = values.to(travels or dtype)
    if sum(sizes):
        gather = rule_named("all_gather")
        rows, values = apply(gather, rows, axis, (0, sizes)), apply(gather, values, axis, (0, sizes))
    values = (values if over == 1 else values / over).to(dtype)
    total = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
    return total.to_dense() if any(dense) else total.coalesce()


class _Pass:
    """One backward pass: what has come, and what has been started, bucket after bucket."""

    def __init__(self) -> None:
        self.seen: dict[int, bool] = {}  # in the order in which they came: whether there was a gradient
        self.gradients: dict[int, Tensor] = {}  # until they are on their way: their memory is used again
        self.totals: list[Any] = []
        self.streams: dict[int, torch.Stream | None] = {}  # on which they came, where another thread may start the sum
        self.without: Callable[[int], object] | None = None
        self.late = False
        self._read = 0

    def take(self, places: list[int], gs: Sequence[Tensor | None]) -> None:
        """What has become ready."""
        for at, g in zip(places, gs, strict=True):
            self.seen[at] = g is not None
            if g is not None:
                self.gradients[at] = g

    def read_what_has_come(self) -> None:
        """Add up what all ranks have written, while it is fresh in the processor's caches."""
        while self._read < len(self.totals):
            total = self.totals[self._read]
            if isinstance(total, Pending) and not total.read_early():
                return
            self._read += 1


_MOST_ORDERS = 1000


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, sums: _Sums, *xs: Tensor) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return xs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.finish(ctx.needs_input_grad[1:])


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, sums: _Sums, places: list[int], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.sums, ctx.places = sums, places
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in xs])  # which may be written in place, as leaves may

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        is_first = ctx.sums.ready(ctx.places, gs)
        return torch.empty(0, device=ctx.sums.kinds[0][2]) if is_first else None, None, None, None


# Function.apply looks for torch.func, which `vary_tree` does: 3 of 10 µs.
_wait: Any = super(Function, _torch.shortened(_Wait, "sums")).apply  # type: ignore[misc]
_start: Any = super(Function, _torch.shortened(_Start, "places", "sums")).apply  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------- one node for a tree


class _OneNode(Function):
    """pvary of many tensors where autograd's order is not ours to choose: under transforms and in a graph."""

    @staticmethod
    def forward(axis: Axis, bucket_mb: float, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.axis, ctx.bucket_mb = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:
        needed = [i for i in range(len(gs)) if ctx.needs_input_grad[2 + i]]
        results: list[Tensor | None] = [None] * len(gs)
        for i, total in zip(needed, _sum_tree([gs[i] for i in needed], ctx.axis, ctx.bucket_mb), strict=True):
            results[i] = total
        return None, None, *results

    @staticmethod
    def jvp(ctx: Any, _axis: None, _bucket_mb: None, *ts: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply(rule_named("pvary"), t, ctx.axis) for t in ts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], axis: Axis, bucket_mb: float, *xs: Tensor) -> tuple[Any, Any]:
        return tuple(vary_tree(list(xs), axis, bucket_mb)), in_dims[2:]


_one_node: Callable[..., tuple[Tensor, ...]] = _OneNode.apply


def _sum_tree(leaves: list[Tensor], axis: Axis, bucket_mb: float) -> list[Tensor]:
    rule = rule_named("all_reduce")
    return buckets.in_buckets("pvary", leaves, axis, bucket_mb, lambda flat, *_: apply(rule, flat, axis, ("sum",)))


@in_graph
def _vary_in_graph(leaves: list[Tensor], index: Tensor, key: str, bucket_mb: float) -> tuple[Tensor, ...]:
    return _one_node(axis_with_key(key).traced(index), bucket_mb, *leaves)
