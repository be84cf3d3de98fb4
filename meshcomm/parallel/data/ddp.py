"""Data parallelism: the parameters are the same on all ranks and meet other data on each: ``pvary``, and its transpose.

    forward     pvary(params, "dp")      nothing is sent
    backward    all_reduce(gradients)    in buckets, while the rest of the backward pass runs

n = size of the axis.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshcomm import _torch, watch
from meshcomm._torch import dual_level_open, functorch_active, version_of
from meshcomm.collectives import buckets, check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.overlap import How, sums_alone, vary_tree
from meshcomm.collectives.reduce import pvary, with_gradient_over
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.parallel.cut_parameters import checked_module, know, refuse_overlap
from meshcomm.parallel.data.means import Mean, checked_mean, mean_of
from meshcomm.parallel.stand_ins import Around, Site, leaves_of, refuse_sliced, seen_as, sites_of, take_from
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.scheduler import claim

__all__ = ["Replica", "data_parallel", "join", "replica_of"]

M = TypeVar("M", bound=nn.Module)
Grads = Literal["sum", "mean"]

_WHERE = "data_parallel"
_HERE = "_meshcomm_data_parallel"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@Op("data_parallel", "parameters and buffers invariant", composed=True)
def data_parallel(
    module: M,
    axis: AxisName,
    *,
    grads: Grads,
    bucket_mb: float = 25,
    mesh: Mesh | None = None,
    reduce_dtype: torch.dtype | None = None,
    buffers: Literal["broadcast", "leave"] = "broadcast",
    methods: Sequence[str] = ("forward",),
    mean_over: AxisName | None = None,
) -> M:
    """Train ``module`` on other data on each rank of ``axis``: its gradients are reduced over the axis.

    ::

        rank 0  loss(w, rows 0)      w.grad = g0 + g1    (sum)
        rank 1  loss(w, rows 1)  ->  w.grad = g0 + g1

    The module is changed in place: its parameters and buffers take the values of index 0, and while one of its
    ``methods`` runs, its parameters are seen through :func:`meshcomm.pvary`. Everything else is as it was: the
    parameters themselves and their names, so that optimisers (made before or after), hooks and ``state_dict`` work as
    they did, and methods that are not named. What is done with the parameters elsewhere, such as a penalty, is local.

    Type: parameters and buffers invariant; what goes into the module and what comes out varying.

    Args:
        module: the same on every rank but for the values. Frozen parameters, parameters that stand in several places
            or that some ranks or all do not use, and dtypes that differ are fine; so is one that is tensor parallel.
        axis: a name, or a tuple of names.
        grads: "sum": gradients are summed; reduce the loss once yourself, the library's rule. "mean": they are
            averaged; the loss is local, as DistributedDataParallel has it.
        bucket_mb: gradients are reduced together up to this many MiB.
        mesh: the current mesh by default; it is kept.
        reduce_dtype: gradients travel in it, such as ``torch.bfloat16``, which halves the bytes of float32; on the
            CPU they are added up in float32. Not under ``torch.func`` and in compiled code, where they travel as
            they are.
        buffers: "broadcast": after each forward pass of training that is not under :func:`no_sync`, buffers take the
            values of index 0. "leave": each rank keeps its own.
        methods: the names of the methods that use the parameters and whose gradients are reduced.
        mean_over: the axes over whose ranks the loss is a mean, where these are not the ones that gradients are reduced
            over: of experts, the axes of the tokens that all_to_all brings, ``("dp", "ep")``. By default those of the
            module around this one that is parallel over more axes, or ``axis``. Where neither
            says it, and an input has just come by all_to_all over another axis, that is an error.

    Returns: ``module``.

    Backward: one all_reduce per bucket. A parameter that no rank has used gets no gradient; one that some have used
        counts as zero on the others. Under ``torch.no_grad()`` nothing is done, and nothing sent.

    Cost: at the start one broadcast of parameters and buffers; per step 2 (n-1)/n times the bytes of the gradients
        per rank, and a broadcast of the buffers.

    Raises:
        MeshError: not a module; no such axis, ``grads``, ``buffers`` or method; a module that is data parallel or
            sharded already; a parameter that ``tensor_parallel`` has cut along ``axis``; parameters or buffers that
            have other names, shapes or dtypes on another rank (said on all ranks); a lazy parameter that has no shape
            yet; embeddings with sparse gradients; a tensor on a device that the mesh cannot move.

    A part of the module under ``torch.utils.checkpoint`` needs ``use_reentrant=False``: the other kind computes
    again outside of the module's forward, where parameters are themselves, and its gradients would stay local. That is
    an error in the first backward pass, if a parameter outside of the checkpoints gets its gradient first.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import data_parallel
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def step():
        ...     model = data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="mean", mesh=mesh)
        ...     model(torch.tensor([[1.0 + mesh.rank]])).sum().backward()
        ...     return model.weight.grad.item()
        >>> mc.launch(step, ranks=2)
        [1.5, 1.5]

    Source: DistributedDataParallel; Goyal et al., 2017.
    """
    checked_module(_WHERE, module)
    ax = check.axis_of(_WHERE, axis, mesh)
    _checked("grads", grads, ("sum", "mean"))
    checked_mean(_WHERE, grads, ax.mesh, mean_over)
    _checked("buffers", buffers, ("broadcast", "leave"))
    buckets.checked_size(_WHERE, bucket_mb, ax)
    if reduce_dtype not in (None, *_FLOATS):
        fail(_WHERE, f"reduce_dtype={reduce_dtype!r} is not a dtype that gradients can travel in.", fix=names(_FLOATS))
    claim(module, _WHERE)
    if _HERE in vars(module):
        fail(_WHERE, "the module is data parallel already.", fix="name all axes at once: axis=('dp', 'replica')")
    refuse_sliced(_WHERE, module, "pass fully_shard(..., replica_axis=)")
    refuse_overlap(_WHERE, module, ax)
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            fail(_WHERE, f"{path!r} has sparse gradients, which are not reduced.", fix="sparse=False")
    if isinstance(methods, str) or not isinstance(methods, Collection) or not methods:
        fail(_WHERE, f"methods={methods!r} is not a list of names.", fix="('forward',)")
    for name in methods:
        if not isinstance(name, str) or not callable(getattr(module, name, None)):
            fail(_WHERE, f"the module has no method {name!r}.", got=type(module).__name__)
    state = Replica(module, ax.mesh, ax.name, grads, bucket_mb, reduce_dtype, buffers == "broadcast")
    state.make_equal()
    for name in methods:
        setattr(module, name, Around(state.call, getattr(module, name)))
    setattr(module, _HERE, state)
    know(module, _told, copies=ax.name)
    state.mean = mean_of(module, grads, ax.mesh, (ax.name,), mean_over)
    return module


def _told(module: nn.Module) -> tuple[Mesh, list[Any]] | None:
    """Nothing is cut, but there is a mesh."""
    state = replica_of(module)
    return None if state is None else (state.mesh, [])


@Op("join", composed=True)
@contextlib.contextmanager
def join(module: nn.Module, step: Callable[[], object] | None = None) -> Iterator[None]:
    """Let ranks run out of data at different times: who is done contributes zero until all are.

    ::

        with join(model, step=step):            def step():
            for rows in my_batches:                 optimizer.step()
                loss(model(rows)).backward()        optimizer.zero_grad()
                step()

    At the end of the block a rank goes on, for each forward and backward pass of those that are not done, to take part
    in the reductions, and then calls ``step``. So parameters and the optimiser's state stay the same on all ranks.
    With ``grads="mean"`` sums are divided by n, however many ranks are left.

    Args:
        module: one that :func:`data_parallel` gave; each of its forward passes is followed by one backward pass.
        step: what a rank does after each backward pass. None: nothing; after the block parameters and buffers take
            the values of the first of the ranks that were done last, but an optimiser's state differs.

    Cost: one all_gather of n numbers more per step.

    Raises:
        MeshError: another module; a join inside a join; a synchronised batch norm in the module.

    Other collectives of the module over the same axis are not made by who is done.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import data_parallel, join
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def train():
        ...     model = data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="sum", mesh=mesh)
        ...     torch.nn.init.ones_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        ...     def step():
        ...         sgd.step()
        ...         sgd.zero_grad()
        ...
        ...     with join(model, step=step):
        ...         for x in [1.0, 2.0, 1.0][: 1 + 2 * mesh.rank]:
        ...             model(torch.tensor([[x]])).sum().backward()
        ...             step()
        ...     return round(model.weight.item(), 4)
        >>> mc.launch(train, ranks=2)
        [0.5, 0.5]

    Source: torch's ``Join``, which leaves the optimisers of those that are done behind.
    """
    state = replica_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        fail("join", "the module is not data parallel.", got=type(module).__name__, fix="the one data_parallel gave")
    if step is not None and not callable(step):
        fail("join", f"step is not callable but {type(step).__name__}.", fix="a function of nothing, or None")
    if state.joined:
        fail("join", "a join inside a join of the same module.", fix="one join around the whole loop")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        fail("join", "who is done takes no part in a synchronised batch norm.", fix="do without one of the two")
    state.joined, state.last = True, list(range(state.axis.size))
    try:
        yield
        state.shadow(step)
    finally:
        state.joined = False


def replica_of(module: nn.Module) -> Replica | None:
    """What is known of a module that :func:`data_parallel` was given."""
    found = vars(module).get(_HERE)
    return found if isinstance(found, Replica) else None


def _checked(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        fail(_WHERE, f"{name}={value!r} is none of {names(known)}.", fix=f"one of them{likely(value, known)}")


# ----------------------------------------------------------------------------------------------- a replicated module


class Replica:
    """What is known of a module that is data parallel."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        axis: AxisName,
        grads: Grads,
        bucket_mb: float,
        dtype: torch.dtype | None,
        buffers: bool,
    ) -> None:
        self.module, self.mesh, self.name, self.grads, self.bucket_mb = module, mesh, axis, grads, bucket_mb
        self.dtype, self.buffers = dtype, buffers
        ledger = self.axis.link.ledger
        ledger.modules += 1
        self.whose = f"{type(module).__name__}, module {ledger.modules} of the axis"
        self.inside = self.joined = self.collected = self.seen = False
        self.syncs = True
        self.mean: Mean | None = None
        self.passes = [-2, -2]  # the latest backward pass that reduced, and that collected
        self.last: list[int] = []  # the indices that were not done when last heard of

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self.name, _WHERE)

    # ------------------------------------------------------------------------------------------------ equal values

    def make_equal(self) -> None:
        """Parameters and buffers take the values of index 0."""
        here: dict[str, Tensor] = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, x in here.items():
            if nn.parameter.is_lazy(x):
                fail(_WHERE, f"{name!r} has no shape yet.", fix="run the module once before")
            check.tensor(_WHERE, x, self.axis, repr(name))
        self._compare(here)
        self._copy_from(0, list(here.values()))

    def _compare(self, here: Mapping[str, Tensor]) -> None:
        lines = [f"{name} {x.dtype} {tuple(x.shape)} {x.requires_grad}" for name, x in here.items()]
        counts = [count for [count] in agree([len(lines)], self.axis)]
        if counts == [len(lines)] * len(counts):
            first, *rest = agree([zlib.crc32(line.encode()) for line in lines], self.axis)
            others = [at for at, mark in enumerate(first) if any(marks[at] != mark for marks in rest)]
            if not others:
                return
            what = f"on one rank, {lines[others[0]]!r} on index {self.axis.index}"
        else:
            what = f"{counts} of them on the ranks"
        fail(_WHERE, "parameters or buffers differ between ranks in more than values.", got=what)

    def _copy_from(self, src: int, tensors: Sequence[Tensor]) -> None:
        if self.axis.size > 1:
            take_from(src, tensors, self.axis, self.bucket_mb)

    # ---------------------------------------------------------------------------------------------------- a method

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method with the parameters varied, if it is not called by another one."""
        func = functorch_active() or dual_level_open()
        if self.inside or not (torch.is_grad_enabled() or func):
            return method(*args, **kwargs)
        if self.mean is not None and not (self.seen or func or torch.compiler.is_compiling()):
            self.seen = True
            self.mean.look(_WHERE, args)
        if not self.syncs:
            if torch.compiler.is_compiling():
                fail(
                    "no_sync", "gradients are not collected in compiled code.", fix="compile what is inside the module"
                )
            return self._alone(method, args, kwargs)
        if self.joined:
            self._speak(True)
        sites = sites_of(self.module)
        leaves = leaves_of(sites, func)
        varied = self._varied(leaves)
        with self._seen_as(sites, leaves, varied):
            result = method(*args, **kwargs)
        if self.buffers and self.module.training and not func:
            self._send_buffers()
        return result

    @contextlib.contextmanager
    def _seen_as(self, sites: Sequence[Site], leaves: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, a method runs, and sees these values of the leaves."""
        self.inside = True
        try:
            with seen_as(sites, dict(zip(map(id, leaves), values, strict=True))):
                yield
        finally:
            self.inside = False

    def _alone(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method whose gradients stay on this rank."""
        sites = sites_of(self.module)
        leaves = [] if functorch_active() or dual_level_open() else leaves_of(sites, transformed=False)
        own = _Own.apply(self, *leaves) if leaves else ()  # type: ignore[no-untyped-call]
        with self._seen_as(sites, leaves, own):
            return method(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As :func:`meshcomm.parallel.no_sync`.

        Meanwhile each ``.grad`` is this rank's own; with ``grads="sum"`` what was in it before is divided among the
        ranks, so that it counts once.
        """
        if watch.here.watcher is not None:
            yield  # a gradient that is one rank's own has no type: each micro-step is reduced, to the same sums
            return
        before, self.syncs = self.syncs, False
        if before:
            self.collect()
        try:
            yield
        finally:
            self.syncs = before

    def reduce_collected(self) -> None:
        """What is in ``.grad`` and was not reduced is, by all ranks."""
        if not self.collected:
            return
        leaves = leaves_of(sites_of(self.module), transformed=False)
        with torch.no_grad():
            how = How(self.grads, self.dtype, _Collected(self, leaves), whose=self.whose)
            sums = sums_alone(leaves, self.axis, self.bucket_mb, how, all_do=True)
        for p, g in zip(leaves, sums, strict=True):
            if g is not None:
                p.grad = g

    def apart(self, collecting: bool) -> None:
        """A gradient that is reduced, and one that is not, cannot be told from each other once they are added up."""
        mine = _torch.backward_pass()
        if self.passes[not collecting] == mine:
            fail(
                "no_sync",
                "one backward pass has gradients that were collected under no_sync and others that are reduced.",
                fix="a backward pass for each, that of no_sync first",
            )
        self.passes[collecting] = mine

    def _varied(self, leaves: list[Tensor]) -> list[Tensor]:
        if not leaves:
            return []
        plain = not (torch.compiler.is_compiling() or functorch_active() or dual_level_open())
        if plain and watch.here.watcher is None:
            varied = vary_tree(leaves, self.axis, self.bucket_mb, self._how(leaves))
            return varied if self.share == 1 else [with_gradient_over(x, self.axis, 1 / self.share) for x in varied]
        if plain and self.collected:
            fail("no_sync", "gradients that were collected before cannot be reduced under check_vma.")
        varied = pvary(leaves, self.name, mesh=self.mesh, bucket_mb=self.bucket_mb)
        n = self.axis.size / self.share
        return varied if self.grads == "sum" else [with_gradient_over(x, self.axis, n) for x in varied]

    @property
    def share(self) -> float:
        """By what averages are multiplied."""
        return 1.0 if self.mean is None else self.mean.share

    def _how(self, leaves: Sequence[Tensor]) -> How:
        look = functools.partial(_watched, self, leaves)
        return How(self.grads, self.dtype, _Collected(self, leaves), look, self.whose)

    def collect(self) -> None:
        """From now on ``.grad`` is this rank's own part."""
        if self.grads == "sum" and not self.collected:
            with torch.no_grad():
                for p in self.module.parameters():
                    if p.grad is not None:
                        p.grad = p.grad / self.axis.size
        self.collected = True

    def _send_buffers(self) -> None:
        tensors = list(self.module.buffers())
        if tensors and self.syncs:
            self._copy_from(self.last[0] if self.joined else 0, tensors)

    # ------------------------------------------------------------------------------------------------- running out

    def _speak(self, goes_on: bool) -> None:
        """Say whether this rank has data left, and hear who has."""
        found = [index for index, [has_data] in enumerate(agree([goes_on], self.axis)) if has_data]
        if found:
            self.last = found
        else:
            self.joined = False

    def shadow(self, step: Callable[[], object] | None) -> None:
        """Take part in what those do that have data left, until none has."""
        while True:
            self._speak(False)
            if not self.joined:
                break
            if self.buffers and self.module.training:
                self._send_buffers()
            leaves = leaves_of(sites_of(self.module), transformed=False)
            with torch.no_grad():
                sums = sums_alone(leaves, self.axis, self.bucket_mb, self._how(leaves))
            if step is not None:
                for p, g in zip(leaves, sums, strict=True):
                    if g is not None:
                        p.grad = g if p.grad is None else p.grad + g
                step()
        if step is None:
            self._copy_from(self.last[0], [*self.module.parameters(), *self.module.buffers()])


def _watched(state: Replica, leaves: Sequence[Tensor]) -> Callable[[int], None]:
    """Finds a gradient that came to a leaf, during a backward pass, on another way than its own."""
    state.apart(collecting=False)

    def seen() -> list[tuple[Tensor | None, int]]:
        return [(g, 0 if g is None else version_of(g)) for g in (leaf.grad for leaf in leaves)]

    before = seen()

    def look(at: int) -> None:
        g, (old, version) = leaves[at].grad, before[at]
        if g is not None and (g is not old or version_of(g) != version):
            fail(
                _WHERE,
                "a parameter has got a gradient of this rank's own while the module's backward pass ran.",
                got=f"parameter of shape {list(leaves[at].shape)}",
                fix="torch.utils.checkpoint inside of the module needs use_reentrant=False",
            )

    return look


class _Collected:
    """Gives what was collected for each leaf, once, to the first backward pass: from then on it is on its way."""

    def __init__(self, state: Replica, leaves: Sequence[Tensor]) -> None:
        self.state, self.leaves = state, leaves
        self.taken: set[int] = set()

    def __call__(self, at: int) -> Tensor | None:
        if not self.taken:
            if not self.state.collected:
                return None
            self.state.collected = False
        if at in self.taken:
            return None
        self.taken.add(at)
        g, self.leaves[at].grad = self.leaves[at].grad, None
        return g


class _Own(Function):
    """Leaves whose gradients stay on this rank, and make what is in ``.grad`` its own part when they come."""

    @staticmethod
    def forward(ctx: Any, state: Replica, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.state.apart(collecting=True)
        ctx.state.collect()
        share = ctx.state.share
        return None, *(gs if share == 1 else [None if g is None else g * share for g in gs])
