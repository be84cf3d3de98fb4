"""check_vma and mark_varying: varying types tracked through any code of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.nn import Module

from meshcomm._torch import tree_leaves_with_path
from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.runtime.axis_names import written_out
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.checker import Checker
from meshcomm.spmd.types.grids import grid_of
from meshcomm.spmd.types.leaf_numbers import next_time, numbered
from meshcomm.spmd.types.seen_changes import moment
from meshcomm.spmd.types.told import as_told, tell_again
from meshcomm.spmd.types.vma import INVARIANT, Origin, Type, declare
from meshcomm.watch import here, watched_by

Tree = TypeVar("Tree")
Mode = bool | Literal["error"]


def checked_mode(where: str, mode: object) -> Mode:
    """``mode``, if it is one."""
    if isinstance(mode, bool):
        return mode
    if mode == "error":
        return "error"
    fail(
        where,
        f"check_vma={mode!r}.",
        fix='True inserts each missing pvary, "error" refuses where one is missing, False does not look',
    )


@contextlib.contextmanager
def check_vma(mode: Mode = True, *, mesh: Mesh | None = None) -> Iterator[None]:
    """Track along which axes each value varies, in the code of a rank that runs inside.

    Where a value that requires grad and is invariant along an axis meets one that varies along it, a :func:`pvary` is
    due, or its gradient is one rank's part of what it should be. With True it is inserted, once for all uses of a
    value, and does in backward what one that is written there does: what was computed with it keeps its numbers,
    whatever is put into ``x.data`` afterwards. With "error" the operation is refused.

    Type: known are what is made inside (numbers of Python are taken to be the same on every rank), what
    :func:`mark_varying` declares, and what was seen by an earlier check. An operation varies along the axes of its
    operands; random functions along all axes, unless drawn under :func:`rng` or :func:`fork_rng`; collectives as their
    tables say; sizes that depend on data, which are ``torch.SymInt``, as these data; ``zeros_like`` and the like are
    invariant, unless they are leaves that require grad, which vary as what they are like. A gradient has the type of
    its value: that of what is invariant is the sum over the ranks, wherever
    it is asked for; an ``nn.Parameter(x)`` has the type of x. Anything else is unknown, such as what is made of an
    array, by another thread or by compiled code, or was changed in place out of sight (``set_``, ``z.real = x``,
    TorchScript), and is refused where it requires grad or meets what does.

    Args:
        mode: True, "error", or False: what runs inside is not looked at, and what it makes is unknown.
        mesh: the current mesh by default; its axes are tracked.

    Returns: a context manager. :func:`shard_map` has the same as an argument.

    Cost: the checks take some microseconds per operation and communicate nothing; an inserted pvary costs what
        :func:`pvary` does.

    Raises:
        MeshError: no mesh; entered outside of a rank; no such mode.
        VaryingError: inside, with the line: a missing pvary under "error"; ``mesh.rank``, ``mesh.coordinate`` and
            ``.item()``, ``bool()`` and the like of a value that varies; ``len()``, ``range()`` or ``if`` of a size
            that does; dropout that each rank draws for itself of a value that is invariant; a sum over an axis along
            which a loss is reduced already; pvary or shard of what
            varies; a tensor of unknown type that requires grad.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def grad():
        ...     w = mc.mark_varying(torch.ones(2, requires_grad=True), ())
        ...     with mc.use_mesh(mesh), mc.check_vma():
        ...         x = 1.0 + mc.axis_index("dp")
        ...         mc.all_reduce((w * x).sum(), "dp").backward()
        ...     return w.grad.tolist()
        >>> mc.launch(grad, ranks=2)
        [[3.0, 3.0], [3.0, 3.0]]

    Source: ``check_vma`` of ``jax.shard_map``.
    """
    if checked_mode("check_vma", mode) is False:
        outer = here.watcher
        try:
            with watched_by(None):
                yield
        finally:
            if isinstance(outer, Checker):
                outer.passed = moment()
        return
    where = check.mesh_of("check_vma", "", mesh)
    where.own_index()  # outside of a rank: say so
    with Checker(where, insert=mode is True):
        yield


def checked_axes(where: str, axes: Any, mesh: Mesh | None) -> tuple[str, ...]:
    """``axes`` as a tuple, if they are names of axes; of this mesh, if there is one."""
    given = (axes,) if isinstance(axes, str) else axes
    if not isinstance(given, (tuple, list)) or not all(isinstance(axis, str) for axis in given):
        fail(where, f"axes={axes!r}.", fix="a name, or a tuple of names; () for what is the same on every rank")
    if mesh is None:
        return tuple(given)
    written = written_out(given, mesh.names)
    unknown = [axis for axis in written if axis not in mesh.axis_names]
    if unknown:
        fail(where, f"no axis {names(unknown)}.", got=f"mesh {mesh.shape}", fix=f"one of {names(mesh.shape)}")
    return written


def mark_varying(x: Tree, axes: str | tuple[str, ...], *, mesh: Mesh | None = None) -> Tree:
    """Declare along which axes a value varies; nothing is communicated or computed.

    For :func:`check_vma`, of tensors that it has not seen: parameters, batches, what libraries made.

    Type: exactly as declared. It holds for the tensor object, in all later checks; ``()`` is invariant along all axes.
    Along an axis along which an adaptor has cut a parameter, before or after, that varies, whatever is declared.
    Outside of checks it is remembered too: :func:`meshcomm.parallel.clip_grad_norm` goes by it.

    Args:
        x: a tensor, a pytree of them, or a module, whose parameters and buffers are meant.
        axes: a name, or a tuple of names.
        mesh: where the names are looked up; the current mesh by default, and nowhere if there is none.

    Returns: ``x`` itself.

    Cost: none.

    Raises:
        MeshError: no such axis; a leaf that is not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> batch = mc.mark_varying(torch.ones(8, 3), "dp")
        >>> model = mc.mark_varying(torch.nn.Linear(3, 3), ())

    Source: the ``vma`` of a ``jax.ShapeDtypeStruct``; ``jax.lax.pcast``.
    """
    where = current_mesh() if mesh is None else check.mesh_of("mark_varying", "", mesh)
    given = checked_axes("mark_varying", axes, where)
    site = str(call_site())
    origin = Origin("mark_varying", site, leaf=True)
    grid = None if where is None else grid_of(where)
    kind = Type(dict.fromkeys(given, origin), grid=grid) if given else INVARIANT
    tree: Any = x
    if isinstance(x, Module):
        tell_again(x)
        tree = [*x.parameters(), *x.buffers()]
    name = next_time(f"mark_varying at {site}")
    for path, leaf in tree_leaves_with_path(tree):
        if not isinstance(leaf, Tensor):
            fail("mark_varying", f"x{path} is no tensor but {type(leaf).__name__}.", fix="a tensor, pytree or module")
        declare(leaf, kind)
        as_told(leaf)
        numbered(leaf, kind.axes, f"{name}{path}")
    return x
