"""What the tests of the checker of varying types share: regions that are checked, and what it thinks of a tensor."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import watch
from meshcomm.runtime.call import Call
from meshcomm.runtime.transports.threads.transport import InProcessLink
from meshcomm.spmd.types.checker import Checker

F64 = torch.float64
Local = Callable[[Tensor, Tensor], Tensor]
N = 2
LINE = {"dp": N}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def rows() -> Tensor:
    return draw(2 * N, 3)


def weight() -> Tensor:
    return draw(3, 3, seed=1)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F64)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=F64)


@contextlib.contextmanager
def checked(mode: bool | str = True, axes: dict[str, int] | None = None) -> Iterator[mc.Mesh]:
    mesh = mc.make_mesh(axes or LINE)
    with mc.use_mesh(mesh), mc.check_vma(mode):
        yield mesh


def kind(x: Tensor) -> frozenset[str] | None:
    """The axes along which the checker thinks that ``x`` varies."""
    checker = watch.here.watcher
    assert isinstance(checker, Checker)
    found = checker.type_of(x)
    return None if found is None else found.axes


I, V = frozenset[str](), frozenset(["dp"])  # noqa: E741


def kind_or_none(x: Tensor) -> frozenset[str] | None:
    """The same where nothing is checked, too."""
    return None if watch.here.watcher is None else kind(x)


def on_ranks(fn: Callable[[], Any], mode: bool | str = True, axes: dict[str, int] | None = None) -> list[Any]:
    """What ``fn`` gives on each rank, run in a checked region."""

    def run() -> Any:
        with checked(mode, axes):
            return fn()

    size = 1
    for n in (axes or LINE).values():
        size *= n
    return mc.launch(run, ranks=size)


def mine(local: Local, mode: bool | str) -> Any:
    """Value and gradients on one rank."""
    mesh = mc.make_mesh(LINE)
    index = mesh.rank
    x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
    w = mc.mark_varying(weight().requires_grad_(), ())
    with mc.use_mesh(mesh), mc.check_vma(mode):
        y = mc.all_reduce(local(x, w), "dp")
        gx, gw = torch.autograd.grad(y, [x, w])
    return y.detach(), gx, gw


def right(local: Local) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the whole."""
    x, w = rows().requires_grad_(), weight().requires_grad_()
    parts = [local(part, w) for part in x.chunk(N)]
    y = torch.stack(parts).sum()
    gx, gw = torch.autograd.grad(y, [x, w])
    return y.detach(), gx, gw


def compare(found: list[Any], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    y, gx, gw = expected
    for index, (value, of_x, of_w) in enumerate(found):
        assert_close(value, y)
        assert_close(of_x, gx.chunk(N)[index])
        assert_close(of_w, gw)


def sq(y: Tensor) -> Tensor:
    return y.sin().square().sum()


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def own() -> Tensor:
    """Rows that vary."""
    return mc.axis_index("dp") + ones(2, 3)


def same() -> Tensor:
    return mc.mark_varying(weight().requires_grad_(), ())


def host(value: bool | int | float | None = None) -> Tensor:
    """Something whose type is unknown."""
    with mc.check_vma(False):
        return ones(3) * (1.0 if value is None else value)


def two() -> Tensor:
    return mc.axis_index("dp") + ones(2)


Heard = Counter[tuple[str, str]]
"""How often each collective was called, by name and axes."""

FREE = ("pvary", "shard")
"""Nothing is sent for them."""


@contextlib.contextmanager
def heard() -> Iterator[Heard]:
    """The collectives that rank 0 of the mesh calls; not what sends nothing."""
    calls: Heard = Counter()
    announce = InProcessLink.announce

    def listen(self: InProcessLink, call: Call) -> None:
        axis: Any = call.axis
        if call.what not in FREE and axis.mesh.rank == 0:
            names = axis.name if isinstance(axis.name, tuple) else (axis.name,)
            calls[call.what, " ".join(sorted(names))] += 1
        announce(self, call)

    InProcessLink.announce, InProcessLink.briefly = listen, False  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        InProcessLink.announce, InProcessLink.briefly = announce, True  # type: ignore[method-assign]


def counted(fn: Callable[[], Any]) -> int:
    """all_reduces per rank."""
    with heard() as calls:
        on_ranks(fn)
    return sum(times for (what, _), times in calls.items() if what == "all_reduce")


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4, dtype=F64), nn.Tanh(), nn.Linear(4, 2, dtype=F64))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(draw(*p.shape, seed=i))
    return net
