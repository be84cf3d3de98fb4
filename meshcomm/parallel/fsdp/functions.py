"""Fully sharded parameters, as functions: each rank keeps a slice, and ``all_gather`` makes them whole to be used.

n = size of the axis, p = number of elements of all parameters.

:func:`meshcomm.parallel.fsdp.module.fully_shard` is the same for an ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.reduce import pvary
from meshcomm.collectives.trees import buckets
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.fsdp import gathered_again, in_graphs
from meshcomm.parallel.fsdp.buffers.flat_buffers import Layout
from meshcomm.runtime.ops import Op
from meshcomm.work import Work

T = TypeVar("T")


class FlatTree:
    """Where the leaves of a pytree of parameters lie in flat shards. Made by :func:`shard`.

    Parameters of one dtype, and of those the ones that need a gradient, lie one behind the other in one buffer,
    which is cut in n equal chunks wherever the cuts fall.
    """

    def __init__(
        self, leaves: list[Tensor], structure: Any, axis: AxisName, replica_axis: AxisName | None, mesh: Mesh
    ) -> None:
        self.axis, self.replica_axis, self.mesh = axis, replica_axis, mesh
        self._structure = structure
        kinds: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
        for at, leaf in enumerate(leaves):
            kinds.setdefault((leaf.dtype, leaf.device, leaf.requires_grad), []).append(at)
        self._groups = list(kinds.values())
        ranks = mesh.size_of(axis, "fsdp.shard")
        self.layouts = [Layout([leaves[at].shape for at in group], ranks) for group in self._groups]

    def cut(self, leaves: list[Tensor]) -> list[Tensor]:
        """This rank's shards."""
        index = check.axis_of("fsdp.shard", self.axis, self.mesh).index
        shards = []
        for group, layout in zip(self._groups, self.layouts, strict=True):
            members = [leaves[at] for at in group]
            with torch.no_grad():
                own = layout.stored_of(members, index)
            shards.append(own.requires_grad_(members[0].requires_grad))
        return shards

    def check(self, where: str, shards: Any) -> list[Tensor]:
        """They are this tree's."""
        if not isinstance(shards, (list, tuple)) or len(shards) != len(self.layouts):
            fail(
                where, f"expected the list of {len(self.layouts)} shards that fsdp.shard gave.", got=repr(type(shards))
            )
        for shard, layout in zip(shards, self.layouts, strict=True):
            if not isinstance(shard, Tensor) or tuple(shard.shape) != (layout.chunk,):
                got = f"shape {tuple(shard.shape)}" if isinstance(shard, Tensor) else type(shard).__name__
                fail(where, f"a shard of this tree is a tensor of shape ({layout.chunk},).", got=got)
        return list(shards)

    def rebuild(self, buffers: list[Tensor]) -> Any:
        """The tree of views of gathered buffers."""
        return self.tree_of(map(Layout.views, self.layouts, buffers))

    def tree_of(self, views: Iterable[Iterable[Tensor]]) -> Any:
        """The tree of the leaves of each shard."""
        leaves: list[Any] = [None] * sum(len(group) for group in self._groups)
        for group, mine in zip(self._groups, views, strict=True):
            for at, leaf in zip(group, mine, strict=True):
                leaves[at] = leaf
        return buckets.rebuild(leaves, self._structure)


@Op("fsdp.shard", "I -> V", communicates=False, composed=True)
def shard(
    params: Any, axis: AxisName, *, replica_axis: AxisName | None = None, mesh: Mesh | None = None
) -> tuple[list[Tensor], FlatTree]:
    """Cut a pytree of parameters into this rank's flat shards.

    ::

        w [a b c], v [d e f g]      rank 0  [a b c 0]     (padded, so that parameters begin at whole addresses)
                                    rank 1  [d e f g]

    Type: invariant -> varying. The shards are new leaves: no gradient goes back to ``params``.

    Args:
        params: a pytree of tensors of any shapes and dtypes, equal on every rank.
        axis: a name, or a tuple of names: the ranks that keep a slice each.
        replica_axis: ranks along it keep the same slice (HSDP); their gradients are summed.
        mesh: the current mesh by default.

    Returns: the shards, one ``[k]`` per dtype (and per whether the parameters need a gradient, as the shard then does),
    for the optimiser and ``torch.func``; and the :class:`FlatTree` that :func:`gather` and :func:`apply` need.

    Backward: none.

    Cost: none. Memory: p/n elements.

    Raises:
        MeshError: no such axis; a replica axis that has a part of the other one; a leaf is not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import fsdp
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     shards, tree = fsdp.shard({"w": torch.arange(16.0)}, "fsdp", mesh=mesh)
        ...     return shards[0].tolist()[:2], fsdp.gather(shards, tree)["w"].sum().item()
        >>> mc.launch(main, ranks=2)
        [([0.0, 1.0], 120.0), ([8.0, 9.0], 120.0)]

    Source: ZeRO stage 3; the flat parameter of FairScale's FSDP.
    """
    where = "fsdp.shard"
    ax = check.axis_of(where, axis, mesh)
    if replica_axis is not None:
        check.apart(where, ax, replica_axis, "replica_axis")
        check.axis_of(where, replica_axis, mesh)
    leaves, structure, *_ = buckets.leaves_of(where, params, ax)
    if not leaves:
        fail(where, "there are no parameters.", got=repr(params), fix="a tensor, or a pytree of tensors")
    tree = FlatTree(leaves, structure, axis, replica_axis, ax.mesh)
    return tree.cut(leaves), tree


@overload
def gather(shards: list[Tensor], tree: FlatTree, *, async_op: Literal[False] = False) -> Any: ...
@overload
def gather(shards: list[Tensor], tree: FlatTree, *, async_op: Literal[True]) -> Work[Any]: ...
@Op("fsdp.gather", "varying -> varying along the axis", composed=True)
def gather(shards: list[Tensor], tree: FlatTree, *, async_op: bool = False) -> Any:
    """Make the parameters whole: ``all_gather(pvary(shard, replica_axis), axis)`` and views of the result.

    ::

        rank 0  [a b c 0]      w [a b c], v [d e f g]
        rank 1  [d e f g]  ->  w [a b c], v [d e f g]

    Type: varying -> varying along the axis, invariant -> varying along the replica axis.

    Args:
        shards: what :func:`shard` gave, or has become of it.
        tree: what :func:`shard` gave with it.
        async_op: give a :class:`meshcomm.Work` at once; gather the next layer's parameters while this one computes.

    Returns: the pytree, whose leaves are views of one buffer per dtype.

    Backward: reduce_scatter (sum) over the axis, all_reduce over the replica axis. Of every order, and under
    ``torch.func``.

    Cost: each rank receives (n-1)/n of p elements, forward and backward.

    Raises:
        MeshError: shards that are not of this tree.

    Example: see :func:`shard`.

    Source: the forward of ZeRO stage 3.
    """
    works = _gathered("fsdp.gather", shards, tree, async_op)
    return works.then(tree.rebuild) if async_op else tree.rebuild(works)


def _checked(where: str, shards: list[Tensor], tree: FlatTree) -> list[Tensor]:
    if not isinstance(tree, FlatTree):
        what = f"expected the FlatTree that fsdp.shard gave, not {type(tree).__name__}."
        fail(where, what, fix="shards, tree = fsdp.shard(...)")
    return tree.check(where, shards)


def _rebuilt_in_graph(where: str, shards: list[Tensor], tree: FlatTree) -> Any:
    checked = _checked(where, shards, tree)
    axis = check.axis_of(where, tree.axis, tree.mesh)
    replica = None if tree.replica_axis is None else check.axis_of(where, tree.replica_axis, tree.mesh)
    lies = zip(checked, tree.layouts, strict=True)
    return tree.tree_of([in_graphs.whole([x], axis, layout, replica) for x, layout in lies])


def _gathered(where: str, shards: list[Tensor], tree: FlatTree, async_op: bool = False) -> Any:
    checked = _checked(where, shards, tree)
    if tree.replica_axis is not None:
        checked = [pvary(each, tree.replica_axis, mesh=tree.mesh) for each in checked]
    if async_op:
        return all_gather(checked, tree.axis, mesh=tree.mesh, async_op=True)
    return [all_gather(each, tree.axis, mesh=tree.mesh) for each in checked]


@Op("fsdp.apply", "as :func:`gather`", composed=True)
def apply(
    fn: Callable[..., T], shards: list[Tensor], tree: FlatTree, *args: Any, regather: bool = True, **kwargs: Any
) -> T:
    """Call ``fn(params, *args, **kwargs)`` with the parameters made whole, and keep them no longer than that.

    Type: as :func:`gather`.

    Args:
        fn: takes the pytree of parameters first.
        shards: what :func:`shard` gave, or has become of it.
        tree: what :func:`shard` gave with it.
        args: for ``fn``.
        regather: backward gathers again what ``fn`` used, instead of autograd's keeping it. Under ``torch.func``,
            inside the region of a checkpoint and without gradients there is nothing to replace. In compiled code it
            is the graph of backward that gathers.
        kwargs: for ``fn``.

    Returns: what ``fn`` returns.

    Backward: as :func:`gather`; with ``regather`` one all_gather more, before it.

    Cost: as :func:`gather`; with ``regather`` (n-1)/n of p elements more in backward. Memory between forward and
    backward: p elements without, none with ``regather``.

    Raises:
        MeshError: shards that are not of this tree.
        RuntimeError: backward, if the shards have been changed in place since.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import fsdp
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     shards, tree = fsdp.shard({"w": torch.ones(16, requires_grad=True)}, "fsdp", mesh=mesh)
        ...     y = fsdp.apply(lambda params, x: (params["w"] * x).sum(), shards, tree, 1.0 + mesh.rank)
        ...     mc.all_reduce(y, "fsdp", mesh=mesh).backward()
        ...     return shards[0].grad.tolist()[:2]
        >>> mc.launch(main, ranks=2)
        [[3.0, 3.0], [3.0, 3.0]]

    Source: the reshard of FSDP after forward.
    """
    where = "fsdp.apply"
    if not callable(fn):
        fail(where, f"fn is not callable but {type(fn).__name__}.", fix="fn(params, *args), then shards and tree")
    if regather and torch.compiler.is_compiling() and torch.is_grad_enabled() and not _torch.transformed_in_graph():
        return fn(_rebuilt_in_graph(where, shards, tree), *args, **kwargs)
    buffers = _gathered(where, shards, tree)
    plain = not (torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open())
    if not (regather and plain and torch.is_grad_enabled()):
        return fn(tree.rebuild(buffers), *args, **kwargs)
    versions = [_torch.version_of(each) for each in shards]

    def fetch() -> list[Tensor]:
        if [_torch.version_of(each) for each in shards] != versions:
            gathered_again.changed(where)
        found: list[Tensor] = _gathered(where, [each.detach() for each in shards], tree)
        return found

    weights = gathered_again.Again(fetch)
    hooks = gathered_again.enter()
    gathered_again.open_places(weights, buffers)
    try:
        return fn(tree.rebuild(buffers), *args, **kwargs)
    finally:
        gathered_again.close(weights)
        gathered_again.leave(hooks)
