"""The norm of all gradients of a module, however its parameters are cut, and clipping by it.

n = number of ranks of the mesh, a = number of its axes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather_invariant
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import axes_of_parts, checked_module, parts_of, ranks_with, widest_mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.process.accelerator import with_doubles
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.watch import here, paused

_WHERE = "clip_grad_norm"
_KNOWN = (None, torch.float32, torch.float64)
"""Dtypes of norms, the widest last; None: of no parameters."""


@Op("clip_grad_norm", "gradients as their parameters", composed=True)
def clip_grad_norm(
    module: nn.Module, max_norm: float | Tensor, norm_type: float = 2.0, *, mesh: Mesh | None = None
) -> Tensor:
    """Scale all gradients by one factor, so that their norm over the whole model is at most ``max_norm``.

    Every rank of the mesh calls it, with whatever it has of the model: a part of each parameter, a stage, nothing. How
    parameters are cut is known of what :func:`fully_shard` and :func:`tensor_parallel` have cut, in any order and
    nesting; of what was cut by hand, such as the stages of a pipeline, say it once by
    :func:`meshcomm.mark_varying(module, axes) <meshcomm.mark_varying>`, in a check of types or outside of one.

    Type: gradients as their parameters; the norm is invariant. A part counts once, a parameter with two names once, and
    what is the same on several ranks once. A parameter without a gradient counts as zero; gradients may be sparse.

    Args:
        module: on this rank; it may have no parameters.
        max_norm: the most that the norm shall be.
        norm_type: 2, another positive number, or ``inf``.
        mesh: of all ranks that have a part of the model; by default the largest of the current mesh and those of the
            adaptors.

    Returns: the norm before, ``[]``, the same bits on every rank; float32, or float64 if the module is on any rank.

    Cost: an all_gather of at most 2**a + 2 numbers per rank.

    Raises:
        MeshError: not a module; no mesh; a kind of norm that is not
            positive, a most that is negative or NaN. And on all ranks, where the mesh is on the CPU: gradients of what
            counts once that differ between the ranks that have it.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import clip_grad_norm, fully_shard
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(16, 1, bias=False), "fsdp", grads="mean", mesh=mesh)
        ...     model(torch.ones(1, 16)).sum().backward()
        ...     return f"{clip_grad_norm(model, 1.0).item():.3f}", f"{model.weight.grad[0].item():.3f}"
        >>> mc.launch(main, ranks=2)
        [('4.000', '0.250'), ('4.000', '0.250')]

    Source: ``torch.nn.utils.clip_grad_norm_``, which would take a norm of each rank's own, and is refused.
    """
    checked_module(_WHERE, module)
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        fail(_WHERE, f"norm_type={norm_type!r} is not positive.", fix="2.0, or math.inf")
    if not isinstance(max_norm, Tensor) and (not isinstance(max_norm, (int, float)) or not max_norm >= 0):
        fail(_WHERE, f"max_norm={max_norm!r} is not a norm.", fix="a number from 0 on")
    over = check.mesh_of(_WHERE, "", widest_mesh(module) if mesh is None else mesh)
    watcher = here.watcher
    with torch.no_grad():
        with paused():
            sums = _Sums(module, over, float(norm_type))
            total = sums.total()
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if watcher is not None:
            watcher.made_whole(total, _WHERE, over)
            watcher.made_whole(factor, _WHERE, over)
        for p in module.parameters():
            if p.grad is not None:
                p.grad.mul_(factor.to(p.grad.device, p.grad.real.dtype if p.grad.is_complex() else p.grad.dtype))
    return total


class _Sums:
    """This rank's sums of powers of gradients, by the axes along which their parameters are cut.

    In a table ``[2**a + 1]``: place ``k`` is of what is cut along the axes whose bits are in ``k``, and the last one of
    what is cut along axes of other meshes too, each rank's share of it.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, kind: float) -> None:
        self.mesh, self.kind = mesh, kind
        self.axes = mesh.axis_names
        self.parts = parts_of(module)
        self.device = mesh.device
        double = torch.float64 if with_doubles(self.device) == self.device else torch.float32
        self.table = torch.zeros(2 ** len(self.axes) + 1, dtype=double, device=self.device)
        self.dtype: torch.dtype | None = None
        lists: dict[tuple[int, float], list[Tensor]] = {}
        for _, p in module.named_parameters():
            if p.is_floating_point() or p.is_complex():
                own = torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32
                self.dtype = own if self.dtype in (None, torch.float32) else self.dtype
            if p.grad is not None and (g := _values_of(p.grad.detach())).numel():
                lists.setdefault(self._place(p), []).append(g)
        for (place, share), gradients in lists.items():
            norm = self._norm(gradients)
            if math.isinf(kind):
                self.table[place] = torch.maximum(self.table[place], norm)
            else:
                self.table[place] += norm**kind * share

    def _place(self, p: nn.Parameter) -> tuple[int, float]:
        """Where in the table it counts, and how much of it: what several ranks have, on each of them in part."""
        cut, elsewhere = axes_of_parts(p, self.parts.get(id(p), ()), self.mesh)
        unknown = cut.difference(self.axes)
        if unknown:
            what = f"a parameter of shape {list(p.shape)} was said to vary along {sorted(unknown)}."
            fail(_WHERE, what, got=f"mesh {self.mesh.shape}", fix="pass mesh=, the mesh that has all axes")
        copies = self.mesh.size / (elsewhere * math.prod(self.mesh.shape[axis] for axis in cut))
        if copies < 1:
            what = f"a parameter of shape {list(p.shape)} is cut in more parts than the mesh has ranks."
            fail(_WHERE, what, got=f"mesh {self.mesh.shape}", fix="pass mesh=, the mesh of all ranks")
        place = sum(2**at for at, axis in enumerate(self.axes) if axis in cut)
        return place if elsewhere == 1 else len(self.table) - 1, 1 / (copies * ranks_with(p))

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g, self.kind, dtype=_wide(g)).to(self.device, self.table.dtype)
                 for g in gradients]  # fmt: skip
        found: Tensor = torch.linalg.vector_norm(torch.stack(norms), self.kind)
        return found

    def total(self) -> Tensor:
        """The norm over all ranks."""
        own = torch.full((1,), _KNOWN.index(self.dtype), dtype=self.table.dtype, device=self.device)
        every, kinds = all_gather_invariant(torch.cat([self.table, own])[None], self.axes, mesh=self.mesh).split(
            [len(self.table), 1], 1
        )
        reads = self.device.type == "cpu" and not is_dry()  # on a device the host would have to wait
        if reads or (self.dtype is None and not is_dry()):  # for who has no parameters it may
            self.dtype = _KNOWN[int(kinds.max())]
        if reads:
            self._compare(every, 1e-2 if bool((kinds == _KNOWN.index(torch.float32)).any()) else 1e-6)
        total: Tensor = every.amax() if math.isinf(self.kind) else every.sum() ** (1 / self.kind)
        return total.to(self.dtype or torch.get_default_dtype())

    def _uncut(self, place: int) -> list[str]:
        return [axis for at, axis in enumerate(self.axes) if not place & 2**at]

    def _compare(self, every: Tensor, least: float) -> None:
        """What counts once is the same on all ranks that have it; ``least``: what is a difference."""
        grid = every.view(*self.mesh.shape.values(), -1)
        for place in range(len(self.table) - 1):
            of_place = grid[..., place]
            for axis in self._uncut(place):
                dim = self.axes.index(axis)
                low, high = of_place.amin(dim), of_place.amax(dim)
                odd = (high - low > least * high).nonzero()
                if len(odd):
                    self._differs(place, axis, low[tuple(odd[0])], high[tuple(odd[0])])

    def _differs(self, place: int, axis: str, low: Tensor, high: Tensor) -> None:
        cut = [name for name in self.axes if name not in self._uncut(place)]
        what = f"gradients of parameters {f'that are cut along {cut} alone' if cut else 'that are not cut'} differ"
        copies, power = math.prod(self.mesh.shape[name] for name in self._uncut(place)), 1 / self.kind
        least, most = (x.item() if math.isinf(self.kind) else (x.item() * copies) ** power for x in (low, high))
        fail(
            _WHERE,
            f"{what} between ranks along {axis!r}, where they count once.",
            got=f"norms from {least:.6g} to {most:.6g}; mesh {self.mesh.shape}",
            fix=f"mc.mark_varying(module, {axis!r}) if each rank has other weights there; else reduce gradients before",
        )


def _values_of(g: Tensor) -> Tensor:
    """All numbers of a gradient that may not be zero: of a sparse one each row once."""
    return g.coalesce().values() if g.layout is torch.sparse_coo else g


def _wide(g: Any) -> torch.dtype | None:
    """In which the norm is taken; a complex gradient's is its own."""
    if g.is_complex():
        return None
    return torch.float64 if g.dtype == torch.float64 else torch.float32
