"""From one layout to another."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from meshcomm import _torch, watch
from meshcomm.collectives import check
from meshcomm.collectives.exchange.all_to_all import all_to_all
from meshcomm.collectives.exchange.permute import permute
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.layout.notation import parse_arrow
from meshcomm.layout.plan import plan_of, sides_of
from meshcomm.layout.search import Step
from meshcomm.layout.shapes import of_graph
from meshcomm.mesh import Mesh, mesh_with_key
from meshcomm.runtime.axis_names import key_of, sizes_with_key
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import Pending
from meshcomm.work import Source, Work, begun


@overload
def reshard(x: Tensor, layouts: str, *, mesh: Mesh | None = None, async_op: Literal[False] = False) -> Tensor: ...
@overload
def reshard(x: Tensor, layouts: str, *, mesh: Mesh | None = None, async_op: Literal[True]) -> Work[Tensor]: ...
@overload
def reshard(x: Tensor, layouts: str, *, mesh: Mesh | None = None, async_op: bool) -> Tensor | Work[Tensor]: ...
@Op("reshard", "as the string says", composed=True)
def reshard(x: Tensor, layouts: str, *, mesh: Mesh | None = None, async_op: bool = False) -> Tensor | Work[Tensor]:
    """Take this rank's part of a global tensor in one layout to its part in another.

    ::

        "b (tp s) h -> b s (tp h)"

        rank 0  x[:, :s/2, :]      x[:, :, :h/2]
        rank 1  x[:, s/2:, :]  ->  x[:, :, h/2:]

    A layout is einops' notation in which parentheses hold mesh axes and the dim that is cut over them, major first:
    ``"(dp b) s (tp d)"``. Along an axis that stands anywhere in the string, a side that does not name it is invariant;
    axes that stand nowhere are left as they are. The dims of the two sides may stand in different orders.

    Type: as the string says. The gradient of a side has the layout of that side.

    Args:
        x: this rank's part, with one dim for each of the left side's.
        layouts: ``"src -> dst"``.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once. The first step that communicates is begun; what comes
            after it happens in the wait, so that works of plans of more than one such step must be waited for in the
            same order on every rank.

    Returns: this rank's part in the layout on the right, new storage; ``x`` itself (a view where dims are moved) if
        nothing has to be sent or cut.

    Backward: the arrow turned round. What comes out invariant and is used with what varies goes through :func:`pvary`.

    Cost: the cheapest sequence of all_to_all, all_gather, local cuts and exchanges of whole parts that there is, in
    bytes sent per rank; :func:`plan` shows it.

    Raises:
        MeshError: layouts that are none; other dims on the two sides; a dim that its axes do not divide; not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def columns():
        ...     rows = torch.arange(2) + 2 * mesh.rank  # of [[0, 1], [2, 3]]
        ...     return mc.reshard(rows[None], "(tp r) c -> r (tp c)", mesh=mesh).tolist()
        >>> mc.launch(columns, ranks=2)
        [[[0], [2]], [[1], [3]]]

    Source: einops; the layouts of Mesh TensorFlow; array redistribution by portable collectives (Zhang et al., 2021).
    """
    if watch.here.watcher is not None:
        return watch.here.watcher.laid_out(reshard, layouts, x, mesh=mesh, async_op=async_op)  # type: ignore[no-any-return]
    where = "reshard"
    over = check.mesh_of(where, "", mesh)
    check.tensor(where, x, over.axis(over.axis_names[0], where))
    if torch.compiler.is_compiling():
        steps, order = _planned_at_trace_time(layouts, of_graph(x.shape), over.key)
    else:
        steps, order = _planned(layouts, tuple(x.shape), over.key)
    if async_op:
        return _begun(x, steps, order, over)
    return _ordered(take(x, steps, over), order)


def _ordered(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """``x`` with its dims as on the right side."""
    return x if order == tuple(range(x.ndim)) else x.permute(order)


def _planned(layouts: str, shape: tuple[int, ...], mesh: str) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The steps, and where each dim of the result is then, for a local shape on the mesh with this key."""
    sizes = key_of(mesh_with_key(mesh).shape)
    if type(layouts) is str and all([type(length) is int for length in shape]):  # noqa: C419 -- half of a generator's time
        return _planned_once(layouts, shape, sizes)
    return _planned_once.__wrapped__(layouts, shape, sizes)


@functools.lru_cache(4096)
def _planned_once(
    layouts: str, shape: tuple[int, ...], axes: tuple[tuple[str, Any], ...]
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    where, sizes = "reshard", sizes_with_key(axes)
    pattern = parse_arrow(where, layouts, sizes, 1)
    source, _ = sides_of(where, pattern, shape, sizes)
    whole = tuple(math.prod(pair) for pair in zip(shape, source.parts(sizes), strict=True))
    found = plan_of(where, pattern, whole, sizes, 1)
    return found.steps, found.order


@_torch.at_trace_time
def _planned_at_trace_time(layouts: str, shape: tuple[int, ...], mesh: str) -> Any:
    steps, order = _planned(layouts, shape, mesh)
    return tuple(tuple(step) for step in steps), order  # of types that a graph may hold


def take(x: Tensor, steps: Sequence[Step], mesh: Mesh) -> Tensor:
    """Take the steps of a plan."""
    for step in steps:
        x = _taken(x, step, mesh, False)
    return x


def _taken(x: Tensor, step: Step, mesh: Mesh, async_op: Any) -> Any:
    op, axes, dim, to, perm, elements, _ = step
    if op == "shard":
        return shard(x, axes, dim, mesh=mesh)
    if op == "all_gather_invariant":
        return all_gather_invariant(x, axes, dim, mesh=mesh, async_op=async_op)
    if op == "all_to_all":
        return all_to_all(x, axes, to, dim, mesh=mesh, async_op=async_op)
    return permute(x, axes, perm, mesh=mesh, async_op=async_op) if elements else x


# ------------------------------------------------------------------------------------------------------------- later


def _begun(x: Tensor, steps: Sequence[Step], order: tuple[int, ...], mesh: Mesh) -> Work[Tensor]:
    """The work of a plan, its first step begun."""
    if torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open():
        return Work(_ordered(take(x, steps, mesh), order))  # a transform may be over when the work is waited for
    first = next((step for step in steps if _communicates(step)), None)
    if first is None:
        return Work(_ordered(take(x, steps, mesh), order))
    axis = mesh.axis(first.axes[0] if len(first.axes) == 1 else first.axes, "reshard")
    return begun("reshard", axis, x, _OnTheWay(x, steps, order, mesh))


def _communicates(step: Step) -> bool:
    return step.op in ("all_gather_invariant", "all_to_all") or (step.op == "permute" and step.elements > 0)


class _OnTheWay(Pending):
    """A tensor between two steps of a plan."""

    __slots__ = ("_mesh", "_order", "_rest", "_under_way")

    def __init__(self, x: Tensor, steps: Sequence[Step], order: tuple[int, ...], mesh: Mesh) -> None:
        self._order, self._mesh = order, mesh
        self._under_way: Tensor | Source = x
        self._rest = list(steps)
        self._go_on(x)

    def _go_on(self, x: Tensor) -> None:
        """Cut as far as the next step that communicates, and begin that."""
        while self._rest:
            step = self._rest.pop(0)
            if _communicates(step):
                self._under_way = Source(_taken(x, step, self._mesh, True))
                return
            x = _taken(x, step, self._mesh, False)
        self._under_way = x

    def wait(self, timeout: float | None) -> Tensor:
        """Take the rest of the steps, all within the time."""
        with watch.paused():  # what is between two layouts has no type
            return self._wait(None if timeout is None else time.monotonic() + timeout)

    def _wait(self, end: float | None) -> Tensor:
        while isinstance(work := self._under_way, Source):
            self._go_on(work.wait(None if end is None else max(0.0, end - time.monotonic())))
        return _ordered(work, self._order)

    def done(self) -> bool:
        """Of the step under way: those after it are begun by a wait only, in the same order on every rank."""
        return not isinstance(self._under_way, Source) or self._under_way.done()

    def abandon(self) -> None:
        """Give up the step under way."""
        if isinstance(self._under_way, Source):
            self._under_way.abandon()
