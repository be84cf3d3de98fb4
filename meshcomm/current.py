"""The current mesh: that of the innermost ``with use_mesh(...)`` in this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from meshcomm import _torch
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.runtime.transports.threads import eras
from meshcomm.runtime.transports.threads.scheduler import carry_over


class _Local(threading.local):
    mesh: Mesh | None = None
    within = -1
    """The backward pass in which it became the current one, if it did in one."""
    first = -1
    """The key of the first mesh that was current in this thread."""
    several = False
    """Whether another one was, too: only then may a graph be of another mesh than the current one."""


_local = _Local()


class use_mesh:  # noqa: N801  # reads as a verb, as torch.no_grad does
    """``with use_mesh(mesh):`` functions called without ``mesh=`` use this mesh, in this thread and in ranks launched
    in it.

    Example:
        >>> import meshcomm as mc
        >>> with mc.use_mesh(mc.make_mesh({"dp": 1})) as mesh:
        ...     mc.axis_size("dp"), mc.current_mesh() is mesh
        (1, True)
    """

    def __init__(self, mesh: Mesh) -> None:
        if not isinstance(mesh, Mesh):
            fail("use_mesh", f"expected a Mesh, got {type(mesh).__name__}.", fix="mc.make_mesh({...})")
        self._mesh = mesh
        self._outer: list[tuple[Mesh | None, int]] = []

    def __enter__(self) -> Mesh:
        self._outer.append((_local.mesh, _local.within))
        begin(self._mesh)
        return self._mesh

    def __exit__(self, *exc: object) -> None:
        _local.mesh, _local.within = self._outer.pop()
        if not torch.compiler.is_compiling():
            eras.begin(_local.mesh)


def begin(mesh: Mesh) -> None:
    """``mesh`` is the current one of this thread."""
    _set_current(mesh)
    if not torch.compiler.is_compiling():
        _local.within = _torch.backward_pass()
        eras.begin(mesh)


def _set_current(mesh: Mesh | None) -> None:
    _local.mesh = mesh
    if mesh is not None and mesh.key != _local.first:
        _local.several, _local.first = _local.first >= 0, mesh.key


def current_mesh() -> Mesh | None:
    """The mesh of the innermost ``with use_mesh(...)`` in this thread, or None. What a backward calls again finds the
    one that was current when its graph was made.

    Example:
        >>> import meshcomm as mc
        >>> with mc.use_mesh(mc.make_mesh({"dp": 1})):
        ...     mc.current_mesh()
        Mesh({'dp': 1})
    """
    mesh = _local.mesh
    if (mesh is None or _local.several) and not torch.compiler.is_compiling():
        number = _torch.backward_pass()
        if number >= 0 and (mesh is None or number != _local.within):
            return cast("Mesh | None", eras.of_current_node() or mesh or eras.of_caller())
    return mesh


def _capture_current() -> Callable[[], None] | None:
    return None if _local.mesh is None else partial(_set_current, _local.mesh)


carry_over(_capture_current)
