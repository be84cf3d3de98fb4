"""What everything above the runtime needs of a group of ranks.

n = number of ranks in the group. Tensors are dense; results are always new storage. Indices are positions in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm._torch.transforms import lasting
from meshcomm.runtime.call import Call, Post, Want
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.pending import then

Empty = Callable[[Tensor, int], Tensor]
"""Makes a flat tensor like another one, of so many elements, for a result to lie in."""

REDUCE_OPS = ("sum", "mean", "max", "min", "product", "band", "bor", "bxor", "exact sum", "exact mean")


class Parts(NamedTuple):
    """1-d CPU tensors that stand one behind the other in what is reduced, as one of ``dtype``."""

    parts: Sequence[Tensor]
    dtype: torch.dtype
    factor: float = 1.0
    """What they are multiplied by on the way."""
    rows: int = 0
    """In how many rows they lie, if it is a tensor of two dims."""

    @property
    def shape(self) -> torch.Size:
        """Of all together."""
        total = sum(part.numel() for part in self.parts)
        return torch.Size((self.rows, total // self.rows) if self.rows else (total,))

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return self.shape.numel() * self.dtype.itemsize


class Primitives(Protocol):
    """The few that every collective is made of. Inside of ``call.for_later`` each gives a ``Pending`` where it would
    have to wait, and reads its inputs after the call too: they must not change until then, but see ``copies``.
    """

    def agree(self, values: Sequence[int], src: int | None = None, op: str = "") -> list[list[int]]:
        """Small numbers of the host, as many on each rank: those of every rank, of ``src`` alone, or reduced."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduce elementwise with ``op`` of REDUCE_OPS; NaN propagates through max and min."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack: ``[*s] -> [n, *s]``."""

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """Reduce and keep the own row: ``[n, *s] -> [*s]``."""

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Exchange runs of a 1-d tensor: ``[sum(send)] -> [sum(recv)]``."""

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """Send ``x`` to ``destination`` and give what came from ``source``, zeros where there is none."""

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The ``x`` of ``src``."""

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """As all_reduce, on ``dst`` alone."""

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """As all_gather, on ``dst`` alone."""

    def join(self, x: Tensor, dst: int) -> Tensor | None:
        """As gather, along dim 0, which is there."""

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """Row i of the ``[n, *s]`` that ``src`` holds goes to rank i; ``like`` has its shape, dtype and device."""

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """Send and receive a batch of messages; the tensors received, in the order of ``wants``."""

    def barrier(self) -> object:
        """Return (nothing of interest) when every rank has come."""

    def barrier_within(self, seconds: float) -> None:
        """Return when every rank has come; CommError on all of them that names the absent when the time is up."""


PRIMITIVES = tuple(name for name in vars(Primitives) if not name.startswith("_"))
"""Their names."""


class Link(Primitives, Protocol):
    """One rank's view of a group."""

    size: int
    index: int
    hooks: Sequence[Any]
    """Who is asked before each primitive; empty, and not looked at, while there are none: see hooks/stack.py."""
    watched: bool
    """Whether each call is announced first, and ``told.call`` of ``runtime/call.py`` is all of it."""
    briefly: bool
    """Whether it needs no announcement then, and makes the call by itself, of what ``told.call`` says of that."""
    hears: bool
    """Whether it looks into ``told.call`` at all, so that ranks that disagree are told so."""

    orders: dict[Any, list[list[int]]]
    """The buckets of the gradients of a tree, in the order in which these become ready, as all ranks of the group know.
    """

    ledger: Ledger
    """The calls that have a backward."""

    def connect(self) -> None:
        """All ranks of the group are here: make now what they would else make together at their first call."""

    def copies(self, name: str, x: Tensor) -> bool:
        """Whether the primitive ``name`` copies ``x`` at the call where it is waited for later."""

    def announce(self, call: Call) -> None:
        """A call begins, which its primitives belong to."""

    def refuse(self, where: str, why: str, axis: object) -> None:
        """This rank does not make the call ``where`` that the others may make, for it was wrong: tell who waits."""

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """Why tensors on ``device`` cannot be moved (``strict``: without a detour over another one), or None."""

    def tagged(self, device: torch.device) -> tuple[str, ...]:
        """Which calls may give tags to their messages, of tensors on ``device``."""

    def moves_beside(self, device: torch.device) -> bool:
        """Whether tensors on ``device`` move while it computes, and take nothing of what it computes with."""

    def traced(self) -> Link:
        """The same link in a form that compiles."""

    def takes_parts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it has ``sum_parts`` and ``scatter_parts`` of such tensors."""

    def sum_parts(self, x: Parts) -> Tensor:
        """all_reduce (sum) of what nobody has put together."""

    sum_now: Callable[..., Any]
    """``sum_now(link, x)``: all_reduce (sum), for who has seen that nobody hears it, no profiler either."""
    sums_clones: bool
    """Whether ``sum_now(link, x, hook)`` may sum what autograd's own ``clone`` has made of an ``x`` that requires grad,
    with ``hook`` before its gradient (see ``_torch.hooked``); None, and nothing is done, where that does not go.
    """

    exchange_now: Callable[[Any, Post | None, Want | None], list[Tensor] | None]
    """``exchange_now(link, post, want)``: ``exchange`` of one message that is sent, one that is received, or both, for
    who has seen that nobody hears it, no profiler either; None, and nothing was done, if it is to go the longer way.
    """

    def keep(self, want: Want, x: Tensor) -> None:
        """``x`` is what came for ``want``, and nobody got it: it is for who asks next, before what was kept so far."""

    def sum_told(self, x: Tensor, said: tuple[Any, ...]) -> Tensor:
        """all_reduce (sum), of a link that is told briefly: of what ``said`` says as ``told.call`` would."""

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """all_reduce of a tensor that nobody else has: its memory may become the result's."""

    def scatter_parts(self, x: Parts, op: str) -> Tensor:
        """``[n, k] -> [k]``: reduce_scatter of what they are together; the factor is 1."""

    def gather_flat(self, x: Tensor, empty: Empty | None = None) -> Tensor:
        """``[k, *s] -> [n * k, *s]``: all_gather, one behind the other. ``empty``: where the result may lie."""

    def scatter_flat(self, x: Tensor, op: str) -> Tensor:
        """``[n * k, *s] -> [k, *s]``: reduce_scatter of what lies so."""

    def swap_flat(self, x: Tensor) -> Tensor:
        """``[n * k, *s] -> [n * k, *s]``: all_to_all of what lies so; all ranks know that their runs are equal."""


def _sum(link: Any, x: Tensor) -> Tensor:
    return link.all_reduce(x, "sum")  # type: ignore[no-any-return]


def _not_now(link: Any, post: Post | None, want: Want | None) -> None:
    return None


def joined(rows: Tensor | None) -> Tensor | None:
    """One behind the other, where they are."""
    return None if rows is None else rows.flatten(0, 1).contiguous()


class Defaults:
    """What a transport says of itself unless it says something else, and what it does by its own primitives, so that
    whoever wants to know of those sees it.
    """

    watched = hears = briefly = sums_clones = False
    hooks: Sequence[Any] = ()
    sum_now: Callable[..., Any] = staticmethod(_sum)
    exchange_now: Callable[..., Any] = staticmethod(_not_now)

    def announce(self, call: Call) -> None:
        """Nobody listens; a rank that calls something else is a matter for the guard."""

    def refuse(self, where: str, why: str, axis: object) -> None:
        """Nobody is told; those who wait find out when their time is up."""

    def connect(self) -> None:
        """There is nothing."""

    def keep(self, want: Want, x: Tensor) -> None:
        """Nobody can be interrupted here and ask again; or what moves messages knows none that came before."""

    def copies(self, name: str, x: Tensor) -> bool:
        """The caller does."""
        return False

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """Every device will do."""
        return None

    def tagged(self, device: torch.device) -> tuple[str, ...]:
        """All that send or receive."""
        return "send", "recv", "exchange"

    def moves_beside(self, device: torch.device) -> bool:
        """No: the cores that compute copy, too."""
        return False

    def traced(self: Any) -> Any:
        """Itself: nothing of it compiles, or there is nothing to trace."""
        return self

    def takes_parts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """No."""
        return False

    def sum_parts(self, x: Parts) -> Tensor:
        """Nobody calls it."""
        raise NotImplementedError

    def sum_told(self, x: Tensor, said: tuple[Any, ...]) -> Tensor:
        """Nobody calls it."""
        raise NotImplementedError

    def scatter_parts(self, x: Parts, op: str) -> Tensor:
        """Nor this."""
        raise NotImplementedError

    def all_reduce_own(self: Any, x: Tensor, op: str) -> Any:
        """As any tensor."""
        return self.all_reduce(x, op)

    def agree(self: Any, values: Sequence[int], src: int | None = None, op: str = "") -> list[list[int]]:
        """As a tensor of the CPU, whichever device the ranks compute on: where the group has a backend of the CPU's
        nobody waits for an accelerator.
        """
        return lasting(_agreed, self, values, src, op)

    def gather_flat(self: Any, x: Tensor, empty: Empty | None = None) -> Any:
        """As any tensor."""
        return then(self.all_gather(x), lambda rows: rows.flatten(0, 1))

    def join(self: Any, x: Tensor, dst: int) -> Any:
        """As any rows."""
        return then(self.gather(x, dst), joined)

    def scatter_flat(self: Any, x: Tensor, op: str) -> Any:
        """As any tensor."""
        return self.reduce_scatter(x.reshape(self.size, x.shape[0] // self.size, *x.shape[1:]), op)

    def swap_flat(self: Any, x: Tensor) -> Any:
        """As any runs."""
        runs, shape = (x.numel() // self.size,) * self.size, x.shape
        if len(shape) == 1:
            return self.all_to_all(x, runs, runs)
        return then(self.all_to_all(x.reshape(-1), runs, runs), lambda got: got.view(shape))


def _agreed(link: Any, values: Sequence[int], src: int | None, op: str) -> list[list[int]]:
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    if src is not None:
        return then(link.broadcast(mine, src), lambda told: [_read(told)])
    if op:
        return then(link.all_reduce(mine, op), lambda told: [_read(told)])
    return then(link.all_gather(mine), _read)


def _read(told: Tensor) -> Any:
    return lasting(told.tolist)


class Place(Protocol):
    """Where the ranks of a mesh are, and what links them."""

    in_process: bool
    """Whether they are threads of this process."""

    def rank(self) -> int | None:
        """Who asks, in the world; None outside of it."""

    def world_size(self) -> int | None:
        """How many ranks the world has; None outside of it."""

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Names a mesh that is made now, alike on all of its ranks."""

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link of who asks to these ranks, for an axis of the mesh of this name."""

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """torch's group of these ranks."""

    def device(self) -> torch.device:
        """The device that who asks computes on."""
