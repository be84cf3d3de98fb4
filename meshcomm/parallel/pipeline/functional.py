"""pipeline: microbatches go through the stages along an axis, each rank one stage, as a function.

Three stages, four microbatches; step by step what a rank computes, and what is sent after it::

    step        0    1    2    3    4    5
    rank 0      a    b    c    d    .    .
    rank 1      .    a    b    c    d    .        > to the next rank, between steps: a permute of those
    rank 2      .    .    a    b    c    d          that have something
    sent          >    >>   >>   >>   >

Backward is the transpose, the same picture read from right to left. All ranks take part in every permute and in its
transposes, in one order, whatever they compute: what comes in is tied to what is sent next, what is differentiated to
the first, and the result to the last, so that no rank's graph leaves one out.

Two ways to compute a step. Plainly, a rank calls its stage for its own microbatches alone. In a graph that is compiled,
and where the checker may put a pvary into a stage, all ranks do the same: each calls its stage in every step, on a
microbatch of x where it has none, whose result goes nowhere.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshcomm._torch import dual_level_open, functorch_active, tree_flatten, tree_leaves_with_path
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.broadcast import broadcast
from meshcomm.collectives.check import differentiable
from meshcomm.collectives.exchange.permute import permute
from meshcomm.collectives.messages import nothing_of, tie
from meshcomm.collectives.place import axis_index
from meshcomm.collectives.reduce import pvary
from meshcomm.collectives.trees import buckets
from meshcomm.errors import MeshError, shape_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.pipeline.closed import closed
from meshcomm.runtime.ops import Op
from meshcomm.watch import here

_WHERE = "pipeline"

Leaves = list[Tensor]


@Op(_WHERE, "I -> I", composed=True)
def pipeline(
    fn: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    *,
    axis: AxisName,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Microbatches through stages that lie on the ranks along ``axis``, one after the other.

    ::

        rank 0  a b c d . .
        rank 1  . a b c d .   ->   [fn2(fn1(fn0(a))), ... of b, of c, of d], on all ranks
        rank 2  . . a b c d

    ``pipelined`` trains modules, by a schedule; this is a function, differentiated by whoever calls it, as
    often as wanted. With ``loss`` the last rank reduces each microbatch when it comes out, and what all ranks get is
    one number.

    Type: invariant -> invariant, of params that vary: x and targets are the same on all ranks, and each has its stage.

    Args:
        fn: ``fn(params, h)`` gives what the next stage takes: the tree, shapes and dtypes of ``h``, which are those
            of a microbatch. It must not communicate along ``axis``.
        params: of this rank's stage: tensors, a pytree of them or a module, as ``shard_map`` cuts them by
            ``"(pp l) d e"``. Derivatives by torch.autograd.grad, of higher order and under torch.func reach what is
            here, in x and in targets; ``backward()`` reaches what ``fn`` and ``loss`` close over too.
        x: ``[m, ...]``, m microbatches, or a pytree of such; integers are carried along.
        axis: a name, or a tuple of names.
        loss: ``loss(h, target)`` of what comes out of the last stage and one entry of targets, ``loss(h)`` without
            targets; gives a float ``[]``.
        targets: ``[m, ...]``, or a pytree of such.
        remat: compute each stage again in backward, in place of keeping what it has computed
            (torch.utils.checkpoint). Not under torch.func.
        mesh: the current mesh by default.

    Returns: ``[m, ...]`` as x, new storage; with ``loss`` their mean ``[]``, of the floating dtype of x, float32 at
        least. Where gradients are on it requires grad.

    Backward: the permutes the other way round; a gradient of x or targets is summed over ``axis``.

    Cost: forward and backward m messages of a microbatch from each rank to its neighbour, in m + n - 2 turns; a
        broadcast of the result. n - 1 of m + n - 1 turns a rank has nothing to do. Each rank keeps what its stage
        saves of all microbatches; with ``remat`` its inputs alone. An all_gather of four ints before.

    Raises:
        MeshError: x or targets that are no tensors of m microbatches each, or differ between ranks in shape, dtype or
            number; fn that gives another tree, shape or dtype than it takes, or communicates along ``axis``; a loss
            that is no float ``[]``; targets without loss; remat under torch.func; no such axis.
        CommError: not every rank came in time; a stage failed on another rank; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm import parallel
        >>> mesh = mc.make_mesh({"pp": 2})
        >>> def main():
        ...     w = torch.tensor([2.0, 5.0])[mesh.rank].requires_grad_()
        ...     x = torch.tensor([[1.0], [3.0]])
        ...     loss = parallel.pipeline(lambda w, h: w * h, w, x, axis="pp", loss=torch.sum, mesh=mesh)
        ...     loss.backward()
        ...     return loss.item(), w.grad.item()
        >>> mc.launch(main, ranks=2)
        [(20.0, 10.0), (20.0, 4.0)]

    Source: GPipe (Huang et al., 2019); pipelines by ``ppermute`` in JAX.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    run = _checked(fn, params, x, ax, loss, targets, remat)
    plain = not torch.compiler.is_compiling()
    if plain and ax.size > 1:
        _same(run)
    run = run._replace(x=_varied(run.x, ax), targets=_varied(run.targets, ax))
    value = _by_turns(run) if plain and here.watcher is None else _all_at_once(run)
    found: Any = broadcast(value if loss is None else value[0], ax.name, ax.size - 1, mesh=ax.mesh)
    return buckets.rebuild(found, run.form) if loss is None else found


class _Run(NamedTuple):
    """What was asked for, and found to be right."""

    fn: Callable[[Any, Any], Any]
    params: Any
    x: Leaves
    form: Any
    m: int
    axis: Axis
    loss: Callable[..., Tensor] | None
    targets: Leaves
    targets_form: Any
    remat: bool

    def microbatches(self) -> list[Leaves]:
        """One after the other."""
        return [list(each) for each in zip(*(leaf.unbind() for leaf in self.x), strict=True)]

    def anchor(self) -> Leaves:
        """What is differentiated, as far as a rank knows: its part in the first permute belongs to all of it."""
        found = [*self.x, *self.targets]
        for part in tree_flatten((self.fn, self.params))[0]:
            found += list(part.parameters()) if isinstance(part, nn.Module) else [part]
        return [leaf for leaf in found if isinstance(leaf, Tensor)] + self.leaf()

    def leaf(self) -> Leaves:
        """One of nobody's, where somebody may call backward: one of two neighbours may be frozen, which takes part."""
        if torch.compiler.is_compiling() or functorch_active() or dual_level_open() or not torch.is_grad_enabled():
            return []
        return [torch.zeros((), device=self.axis.mesh.device, requires_grad=True)]

    def stage(self, h: Leaves) -> Leaves:
        """What this rank's stage makes of a microbatch."""
        given = buckets.rebuild(h, self.form)
        call = functools.partial(checkpoint, self.fn, use_reentrant=False) if self.remat else self.fn
        made = call(self.params, given)
        leaves = _of_stage(made, self.axis)
        if _paths(made) != _paths(given):
            what = f"fn takes {_paths(given)} and gives {_paths(made)}."
            _wrong(what, self.axis, "what the next stage takes: the same tree")
        if [_kind(leaf) for leaf in leaves] != [_kind(leaf) for leaf in h]:
            what = f"fn takes {_text(h)} and gives {_text(leaves)}."
            _wrong(what, self.axis, "what the next stage takes: the same shapes and dtypes")
        return leaves

    def ended(self, h: Leaves, at: int) -> Leaves:
        """What is made of what came out of the last stage."""
        if self.loss is None:
            return h
        target = [leaf[at] for leaf in self.targets]
        given = (buckets.rebuild(target, self.targets_form),) if target else ()
        found = self.loss(buckets.rebuild(h, self.form), *given)
        if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
            got = shape_text(found.dtype, found.shape) if isinstance(found, Tensor) else type(found).__name__
            _wrong(f"loss gives {got}.", self.axis, "a float [], such as the mean over the microbatch")
        return [found.to(_wide(self.x))]

    def joined(self, results: Sequence[Leaves]) -> Leaves:
        """Of all microbatches."""
        found = [torch.stack(each) for each in zip(*results, strict=True)]
        return found if self.loss is None else [found[0].mean()]

    def handed_on(self, made: Leaves, step: int) -> Leaves | None:
        """What the neighbour made in this step; None after the last one."""
        pairs = [(at, at + 1) for at in range(self.axis.size - 1) if 0 <= step - at < self.m]
        if not pairs:
            return None
        if len(made) == 1:  # no bucket is packed
            return [permute(made[0], self.axis.name, pairs, mesh=self.axis.mesh)]
        return permute(made, self.axis.name, pairs, mesh=self.axis.mesh)


def _by_turns(run: _Run) -> Leaves:
    """What this rank knows of the result: all on the last one."""
    mine, last = run.axis.index, run.axis.size - 1
    microbatches = run.microbatches()
    nothing = [torch.zeros_like(leaf) for leaf in microbatches[0]]
    carried, results = _bound(nothing, run.anchor()), []
    for step in range(run.m + last):
        at, made = step - mine, nothing
        if 0 <= at < run.m:
            with closed(_WHERE, run.axis):
                made = run.stage(carried if mine else microbatches[at])
                if mine == last:
                    results.append(run.ended(made, at))
                    made = nothing
        carried = run.handed_on(_tied(made, carried), step) or carried
    if results:
        return _bound(run.joined(results), carried)
    if run.loss is None:
        return _bound([torch.zeros_like(leaf) for leaf in run.x], carried)
    return _bound([torch.zeros((), dtype=_wide(run.x), device=run.x[0].device)], carried)


def _all_at_once(run: _Run) -> Leaves:
    """The same of a rank that does what all do, whatever its index: its graph is theirs."""
    index, last = axis_index(run.axis.name, mesh=run.axis.mesh), run.axis.size - 1
    microbatches = run.microbatches()
    carried, results = _tied(microbatches[0], run.leaf()), []
    for step in range(run.m + last):
        idle = (index == 0) | (step < index) | (step >= index + run.m)
        given = [
            torch.where(idle.to(own.device), own, come)
            for own, come in zip(microbatches[min(step, run.m - 1)], carried, strict=True)
        ]
        made = run.stage(given)
        if step >= last:
            # A loss of what is no output may have no derivative: the others' is not asked for one.
            mine = (index == last).to(made[0].device)
            results.append(run.ended([torch.where(mine, leaf, leaf.detach()) for leaf in made], step - last))
        carried = run.handed_on(_tied(made, carried), step) or carried
    return _tied(run.joined(results), carried)


# ------------------------------------------------------------------------------------------- what holds it together


def _tied(leaves: Leaves, others: Leaves) -> Leaves:
    """Them, such that backward goes on to the others."""
    return [tie(leaf, *others) if differentiable(leaf) else leaf for leaf in leaves]


def _varied(leaves: Leaves, axis: Axis) -> Leaves:
    return [pvary(leaf, axis.name, mesh=axis.mesh) if differentiable(leaf) else leaf for leaf in leaves]


def _bound(leaves: Leaves, others: Leaves) -> Leaves:
    """Them, such that gradients of every order depend on the others, as they would not where a rank's part is constant
    or linear: higher derivatives go through the permutes of the lower ones and of forward, on all ranks or on none.
    """
    others = [other for other in others if differentiable(other)]

    def bound(leaf: Tensor) -> Tensor:
        if not others or not differentiable(leaf):
            return leaf
        one = 1 + torch.cat([nothing_of(other, leaf) for other in others]).exp().sum()  # of no elements
        flat = leaf.reshape(-1, 1)
        return torch.cat([flat[:1].clone() * one, flat[1:]]).view(leaf.shape)  # the clone alone is kept for backward

    return [bound(leaf) for leaf in leaves]


# ----------------------------------------------------------------------------------------------- what can be wrong


def _checked(fn: Any, params: Any, x: Any, axis: Axis, loss: Any, targets: Any, remat: Any) -> _Run:
    if not callable(fn):
        _wrong(f"fn is not a function but {type(fn).__name__}.", axis, "fn(params, h) gives what the next stage takes")
    if loss is not None and not callable(loss):
        _wrong(f"loss is not a function but {type(loss).__name__}.", axis, "loss(h, target) gives a float []")
    if loss is None and targets is not None:
        _wrong("targets without loss.", axis, "loss=, a function of what comes out and of a target")
    if not isinstance(remat, bool):
        _wrong(f"remat={remat!r} is not a bool.", axis, "True or False")
    if remat and functorch_active():
        _wrong("remat=True under a torch.func transform.", axis, "leave it out there: torch saves nothing under it")
    leaves, form, *_ = buckets.leaves_of(_WHERE, x, axis)
    if not leaves:
        _wrong("x has no tensors.", axis, "[m, ...], or a pytree of such")
    m = leaves[0].shape[0] if leaves[0].ndim else 0
    _as_many(leaves, m, "x", axis)
    if targets is None:
        return _Run(fn, params, leaves, form, m, axis, loss, [], None, remat)
    of_targets, targets_form, *_ = buckets.leaves_of(_WHERE, targets, axis)
    _as_many(of_targets, m, "targets", axis)
    return _Run(fn, params, leaves, form, m, axis, loss, of_targets, targets_form, remat)


def _as_many(leaves: Leaves, m: int, name: str, axis: Axis) -> None:
    if not m or any(not leaf.ndim or leaf.shape[0] != m for leaf in leaves):
        wanted = f"[{m}, ...], as many as x has" if m and name == "targets" else "[m, ...], m at least 1"
        _wrong(f"{name} is {_text(leaves)}, and its first dim is that of microbatches.", axis, wanted)


def _same(run: _Run) -> None:
    """All ranks ask for the same."""
    asked = {
        "the shapes or dtypes of x": _text(run.x), "the number of microbatches": run.m,
        "the shapes or dtypes of targets": _text(run.targets), "whether there is a loss": run.loss is not None,
        "whether gradients are on": torch.is_grad_enabled(),
    }  # fmt: skip
    mine = [zlib.crc32(repr(value).encode()) for value in asked.values()]
    every = agree(mine, run.axis)
    for at, (name, value) in enumerate(asked.items()):
        others = [index for index, row in enumerate(every) if row[at] != every[0][at]]
        if others:
            what = f"ranks differ in {name}: index {others[0]} and index 0 along axis {run.axis.name!r}."
            raise MeshError(f"meshcomm.{_WHERE}: {what}\n  got: {value} at index {run.axis.index}")


def _of_stage(made: Any, axis: Axis) -> Leaves:
    """The leaves of what fn gives."""
    try:
        return buckets.leaves_of(_WHERE, made, axis)[0]
    except MeshError as error:
        raise MeshError(str(error).replace(": x", ": what fn gives, x,", 1)) from None


def _paths(tree: Any) -> list[str]:
    """Where its leaves are."""
    return [""] if isinstance(tree, Tensor) else sorted(path for path, _ in tree_leaves_with_path(tree))


def _wide(leaves: Leaves) -> torch.dtype:
    """The dtype of the loss, which all ranks know without one."""
    wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    return torch.float64 if wide else torch.float32


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return leaf.dtype, leaf.shape, leaf.device


def _text(leaves: Leaves) -> str:
    return ", ".join(shape_text(leaf.dtype, leaf.shape) for leaf in leaves)


def _wrong(what: str, axis: Axis, fix: str) -> NoReturn:
    check.explain(_WHERE, what, axis, fix=fix)
