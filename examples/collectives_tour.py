"""A tour of the collectives: what each takes and gives, rank by rank, its type and its gradient.

    python examples/collectives_tour.py                    # four ranks in this process
    python examples/collectives_tour.py --ranks 3 shift    # other ranks, some stops
    torchrun --nproc-per-node 4 examples/collectives_tour.py

Every table shows x and y = f(x) on each rank, then a gradient g of y and the gradient dx that backward makes of it.
Along an axis a value is invariant (one logical value, the same on every rank, and so is its gradient) or varying (each
rank has its own). Backward is the transpose: the tour checks at each stop that <f(x), g> = <x, dx>, in which what is
invariant is counted once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshcomm as mc

I, V = "invariant", "varying"  # noqa: E741


@dataclass
class Stop:
    """A differentiable collective: how it is written, its type, what its backward is, and the call itself."""

    code: str
    takes: str
    gives: str
    backward: str
    call: Callable[[Tensor, mc.Mesh], Tensor]

    @property
    def name(self) -> str:
        """Of the function."""
        return self.code.split("(")[0]


def counts(mesh: mc.Mesh) -> Tensor:
    """Two rows to the next rank, none to the one after it, one to each other, this rank among them."""
    of_zero = torch.tensor([1, 2, 0, *[1] * (mesh.size - 3)] if mesh.size > 2 else [1, *[1] * (mesh.size - 1)])
    return of_zero.roll(mesh.rank)


# n = size of the axis. Every rank's x has n elements; that of rank r counts from 10 r where it varies.
STOPS = [
    Stop('pvary(x, "r")', I, V, "all_reduce(g)", lambda x, m: mc.pvary(x, "r", mesh=m)),
    Stop('all_reduce(x, "r")', V, I, "pvary(g): no communication", lambda x, m: mc.all_reduce(x, "r", mesh=m)),
    Stop('all_reduce(x, "r", "mean")', V, I, "pvary(g) / n", lambda x, m: mc.all_reduce(x, "r", "mean", mesh=m)),
    Stop(
        'all_reduce(x, "r", "max")', V, I, "pvary(g) where the maximum is attained, in equal shares",
        lambda x, m: mc.all_reduce(x, "r", "max", mesh=m),
    ),
    Stop('all_gather(x, "r")', V, V, "reduce_scatter(g)", lambda x, m: mc.all_gather(x, "r", mesh=m)),
    Stop(
        'all_gather_invariant(x, "r")', V, I, "shard(g): the own slice, no communication",
        lambda x, m: mc.all_gather_invariant(x, "r", mesh=m),
    ),
    Stop('shard(x, "r")', I, V, "all_gather_invariant(g)", lambda x, m: mc.shard(x, "r", mesh=m)),
    Stop('reduce_scatter(x, "r")', V, V, "all_gather(g)", lambda x, m: mc.reduce_scatter(x, "r", mesh=m)),
    Stop(
        'all_to_all(x, "r", 0, 0)', V, V, "all_to_all(g), dims exchanged",
        lambda x, m: mc.all_to_all(x, "r", 0, 0, mesh=m),
    ),
    Stop(
        'all_to_all_ragged(x, counts, "r")[0]', V, V, "the rows of g back to where they came from",
        lambda x, m: mc.all_to_all_ragged(x, counts(m), "r", mesh=m)[0],
    ),
    Stop(
        'permute(x, "r", [(0, n - 1)])', V, V, "permute(g) by the inverse; what nobody sends or gets is zero",
        lambda x, m: mc.permute(x, "r", [(0, m.size - 1)], mesh=m),
    ),
    Stop('shift(x, "r", 1)', V, V, "shift(g, -1)", lambda x, m: mc.shift(x, "r", 1, mesh=m)),
    Stop(
        'shift(x, "r", 1, wrap=False)', V, V, "shift(g, -1, wrap=False)",
        lambda x, m: mc.shift(x, "r", 1, wrap=False, mesh=m),
    ),
    Stop(
        'broadcast(x, "r", src=0)', V, I, "pvary(g) on src, zeros elsewhere",
        lambda x, m: mc.broadcast(x, "r", 0, mesh=m),
    ),
]  # fmt: skip


def to_and_from_one_rank(x: Tensor, mesh: mc.Mesh) -> list[tuple[str, Any]]:
    """What has no backward: a rank that holds nothing has no graph."""
    n, me = mesh.size, mesh.rank
    after, before = (me + 1) % n, (me - 1) % n
    done: list[tuple[str, Any]] = [
        ('reduce(x, "r", dst=0)', mc.reduce(x, "r", 0, mesh=mesh)),
        ('gather(x, "r", dst=0)', mc.gather(x, "r", 0, mesh=mesh)),
        ('scatter(x if rank == 0 else None, "r", src=0)', mc.scatter(x if me == 0 else None, "r", 0, mesh=mesh)),
    ]
    if n > 1:
        got = None
        if me == 0:
            mc.send(x, "r", dst=n - 1, mesh=mesh)
        elif me == n - 1:
            got = mc.recv("r", src=0, shape=x.shape, dtype=x.dtype, mesh=mesh)
        done.append(('send(x, "r", dst=n - 1) on rank 0, recv("r", src=0) on the last', got))
    (got,) = mc.exchange([(x, after)], [(before, x.shape, x.dtype)], "r", mesh=mesh)
    done.append(('exchange([(x, next)], [(previous, shape, dtype)], "r")', got))
    done.append(('barrier("r")', mc.barrier("r", mesh=mesh)))
    done.append(('axis_index("r")', mc.axis_index("r", mesh=mesh)))
    done.append(('axis_size("r")', mc.axis_size("r", mesh=mesh)))
    done.append(('argmax(x, "r")', mc.argmax(x, "r", mesh=mesh)))
    done.append(('argmin(x, "r")', mc.argmin(x, "r", mesh=mesh)))
    return done


def objects(mesh: mc.Mesh) -> list[tuple[str, Any]]:
    """Whatever can be pickled."""
    mine = {"rank": mesh.rank}
    everything = [f"for {i}" for i in range(mesh.size)] if mesh.rank == 0 else None
    return [
        ('broadcast_object({"rank": rank}, "r")', mc.broadcast_object(mine, "r", mesh=mesh)),
        ('all_gather_object({"rank": rank}, "r")', mc.all_gather_object(mine, "r", mesh=mesh)),
        ('gather_object({"rank": rank}, "r", dst=0)', mc.gather_object(mine, "r", mesh=mesh)),
        ('scatter_object(["for 0", ...] if rank == 0 else None, "r")', mc.scatter_object(everything, "r", mesh=mesh)),
    ]


def several_axes(mesh: mc.Mesh) -> list[tuple[str, Any]]:
    """A tuple of axes is one axis, the first one major, in the order written."""
    x = torch.tensor([float(mesh.rank)], device=mesh.device)
    tree = {"loss": x, "seen": [x]}
    return [
        *(
            (f"all_gather(x, {axis!r})", mc.all_gather(x, axis, mesh=mesh))
            for axis in ("a", "b", ("a", "b"), ("b", "a"))
        ),
        ("all_reduce({'loss': x, 'seen': [x]}, ('a', 'b'))", mc.all_reduce(tree, ("a", "b"), mesh=mesh)),
    ]


# ----------------------------------------------------------------------------------------------------------- the rows


def visit(stop: Stop, mesh: mc.Mesh) -> list[Tensor]:
    """x, y, g and dx of this rank."""
    n, me = mesh.size, mesh.rank
    x = torch.arange(float(n), device=mesh.device) + (10.0 * me if stop.takes == V else 0)
    x.requires_grad_()
    y = stop.call(x, mesh)
    g = torch.arange(1.0, y.numel() + 1, device=mesh.device) + (10.0 * me if stop.gives == V else 0)
    (dx,) = torch.autograd.grad(y, x, g)
    return [x.detach(), y.detach(), g, dx]


def inner(a: Tensor, b: Tensor, kind: str, mesh: mc.Mesh) -> Tensor:
    """The inner product of two logical values."""
    own = a @ b
    return mc.all_reduce(own, "r", mesh=mesh) if kind == V else own


def agrees(stop: Stop, mesh: mc.Mesh) -> bool:
    """<f(x), g> = <x, dx>, where f is linear; a maximum is, as far as its derivative goes."""
    x, y, g, dx = visit(stop, mesh)
    left, right = inner(y, g, stop.gives, mesh), inner(x, dx, stop.takes, mesh)
    return bool(torch.allclose(left, right))


def shown(value: Any) -> str:
    """A tensor as its numbers; containers as they are."""
    if isinstance(value, Tensor):
        numbers = [f"{number:g}" for number in value.reshape(-1).tolist()]
        return f"[{' '.join(numbers)}]" if value.ndim else numbers[0]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Columns of equal width, one row per rank."""
    lines = [["", *heads], *([f"rank {i}", *row] for i, row in enumerate(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def tour(wanted: list[str]) -> list[str]:
    """The lines of the tour on rank 0, nothing elsewhere."""
    mesh = mc.make_mesh({"r": -1})
    lines = [f"{mesh.size} ranks; x, y: forward; g, dx: backward. n = {mesh.size}."]
    for stop in STOPS:
        if wanted and stop.name not in wanted:
            continue
        good = agrees(stop, mesh)
        rows = mc.gather_object([shown(value) for value in visit(stop, mesh)], "r", mesh=mesh)
        lines += ["", f"{stop.code}   {stop.takes} -> {stop.gives}   backward: {stop.backward}"]
        lines += [*table(["x", "y", "g", "dx"], rows or []), f"  <f(x), g> = <x, dx>: {'yes' if good else 'NO'}"]
    x = torch.arange(float(mesh.size), device=mesh.device) + 10 * mesh.rank
    parts = [("To and from one rank, without a gradient", to_and_from_one_rank(x, mesh)), ("Objects", objects(mesh))]
    if mesh.size % 2 == 0 and mesh.size > 2:
        grid = mc.make_mesh({"a": 2, "b": mesh.size // 2})
        parts.append((f"Several axes: {grid.shape}, x = [rank]", several_axes(grid)))
    for title, done in parts:
        kept = [(code, value) for code, value in done if not wanted or code.split("(")[0] in wanted]
        lines += ["", title] if kept else []
        for code, value in kept:
            rows = mc.gather_object([shown(value)], "r", mesh=mesh)
            lines += ["", code, *table(["result"], rows or [])]
    return lines if mesh.rank == 0 else []


def main() -> int:
    """Take the tour, and print it once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="NAME", help="collectives to visit; all of them by default")
    parser.add_argument("--ranks", type=int, default=4, help="how many in this process; a launcher has its own number")
    asked = parser.parse_args()
    ranks = mc.world_size() if mc.is_distributed() else asked.ranks
    lines = mc.launch(tour, ranks=ranks, args=(asked.wanted,))[0]
    if lines:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
