"""What is known of a module that is data parallel: how it sees its parameters, and what its gradients come to.

A method runs with the parameters seen through ``pvary``; under ``no_sync`` through a node that leaves the gradients on
this rank, where the next backward pass that reduces takes them from; in a ``join`` who is done reduces zeros.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshcomm import _torch, watch
from meshcomm._torch import dual_level_open, functorch_active, version_of
from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.broadcast import take_from
from meshcomm.collectives.reduce import pvary, with_gradient_over
from meshcomm.collectives.trees.overlap import How, sums_alone, vary_tree
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.alike import refuse_other_modules
from meshcomm.parallel.computed_later import refuse_later
from meshcomm.parallel.cut_parameters import cut_along, know
from meshcomm.parallel.data.computed_again import follow, look_for_checkpoints, running, tensors_of
from meshcomm.parallel.data.means import Mean
from meshcomm.parallel.data.same_gradients import compare, heard, wait_for_gradients
from meshcomm.parallel.data.spread import Over, Spread
from meshcomm.parallel.fewer_axes import Fewer
from meshcomm.parallel.later_values import has_no_values, make_room, refuse_lazy
from meshcomm.parallel.optimizers.gradient_dtypes import gradients_in
from meshcomm.parallel.stand_ins import Site, leaves_of, seen_as, sites_of
from meshcomm.watch import paused

Grads = Literal["sum", "mean"]
WHERE = "data_parallel"
_NONE: Mapping[int, Fewer] = {}
HERE = "_meshcomm_data_parallel"
"""Where it stands among the attributes of its module."""


def replica_of(module: nn.Module) -> Replica | None:
    """What is known of a module that :func:`data_parallel` was given."""
    found = vars(module).get(HERE)
    return found if isinstance(found, Replica) else None


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
        fewer: Mapping[int, Fewer] = _NONE,
        ignored: Collection[int] = (),
    ) -> None:
        """``fewer``: by id what is known of parameters and buffers that go over fewer axes; ``ignored``: the ids of
        those that stay as they are.
        """
        self.module, self.mesh, self.name, self.grads, self.bucket_mb = module, mesh, axis, grads, bucket_mb
        self.dtype, self.buffers = dtype, buffers
        self.accumulates: torch.dtype | None = None
        """In which dtype gradients are added up, if not in that of the parameter."""
        ledger = self.axis.link.ledger
        ledger.modules += 1
        self.whose = f"{type(module).__name__}, module {ledger.modules} of the axis"
        self.inside = self.joined = self.collected = self.seen = False
        self.sparse = [
            part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        ]
        self.spread = Spread(module, Over(mesh, axes_in(self.axis.name), WHERE), fewer, ignored)
        self.syncs = True
        self.again: bool | None = None
        """Parts are computed again in backward; None: no method has run yet."""
        self.set_aside = -2  # the backward pass for which gradients are
        self.mean: Mean | None = None
        self.compared = False  # the gradients of the ranks
        wait_for_gradients(self)
        self.passes = [-2, -2]  # the latest backward pass that reduced, and that collected
        self.last: list[int] = []  # the indices that were not done when last heard of

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Of a copy."""
        vars(self).update(kept)
        know(self.module, self.mesh)

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self.name, WHERE)

    # ------------------------------------------------------------------------------------------------ equal values

    def make_equal(self) -> None:
        """Parameters and buffers take the values of index 0, where they have any."""
        here = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        here = self.spread.without_ignored(here)
        refuse_lazy(WHERE, here.items())
        for name, x in here.items():
            if not x.is_meta:
                check.tensor(WHERE, x, self.axis, repr(name))
        values, named = list(here.values()), list(here.items())
        self.spread.refuse_others(WHERE)
        for over, at in self.spread.lists(values):
            refuse_other_modules(WHERE, self.module, [named[place] for place in at], over.axis)
        for x in here.values():
            if x.is_meta and isinstance(x, nn.Parameter):
                make_room(x, self.mesh.device)
        self._take_from(0, [x for x in values if not has_no_values(x)])

    def _take_from(self, src: int, tensors: Sequence[Tensor]) -> None:
        """Have the values of an index, along the axes along which they are the same."""
        for over, at in self.spread.lists(tensors):
            take_from(src, [tensors[place] for place in at], over.axis, self.bucket_mb)

    # ---------------------------------------------------------------------------------------------------- a method

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method with the parameters varied, if it is not called by another one."""
        func = functorch_active() or dual_level_open()
        if self.inside or not (torch.is_grad_enabled() or func):
            return method(*args, **kwargs)
        if self.mean is not None and not (self.seen or func or torch.compiler.is_compiling()):
            self.seen = True
            self.mean.look(WHERE, args)
        if not self.syncs:
            if torch.compiler.is_compiling():
                fail(
                    "no_sync", "gradients are not collected in compiled code.", fix="compile what is inside the module"
                )
            return self._alone(method, args, kwargs)
        if self.joined:
            self._speak(True)
        sites = self._sites()
        leaves = leaves_of(sites, func)
        self._widen(leaves, func)
        varied = self._varied(leaves)
        with self._seen_as(sites, leaves, varied):
            result = method(*args, **kwargs)
        refuse_later(WHERE, self.module, result, lambda: leaves_of(sites, transformed=False))
        if self.again and not (func or torch.compiler.is_compiling()):
            self._follow(leaves, result, collects=False)
        if self.buffers and self.module.training and not func:
            self.send_buffers()
        return result

    def _sites(self) -> list[Site]:
        """Where parameters stand that are the same on several ranks."""
        return self.spread.known(sites_of(self.module))

    def _widen(self, leaves: Sequence[Tensor], transformed: bool) -> None:
        """Gradients of the leaves have the dtype in which they are added up; a copy of a parameter does not know it."""
        if self.accumulates is not None and not (transformed or torch.compiler.is_compiling()):
            for leaf in leaves:
                gradients_in(self.accumulates, leaf)

    @contextlib.contextmanager
    def _seen_as(self, sites: Sequence[Site], leaves: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, a method runs, and sees these values of the leaves."""
        if self.again is None and not torch.compiler.is_compiling():
            self.again = False
            look_for_checkpoints()
        self.inside = True
        try:
            with running(self), seen_as(sites, dict(zip(map(id, leaves), values, strict=True))):
                yield
        finally:
            self.inside = False

    def _alone(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method whose gradients stay on this rank."""
        sites = self._sites()
        leaves = [] if functorch_active() or dual_level_open() else leaves_of(sites, transformed=False)
        self._widen(leaves, transformed=False)
        own = _Own.apply(self, *leaves) if leaves else ()  # type: ignore[no-untyped-call]
        with self._seen_as(sites, leaves, own):
            result = method(*args, **kwargs)
        refuse_later(WHERE, self.module, result, lambda: leaves_of(sites, transformed=False))
        if self.again and leaves:
            self._follow(leaves, result, collects=True)
        return result

    def computes_again(self) -> None:
        """A reentrant checkpoint begins in the module: its part will be computed again, outside of its methods."""
        if watch.here.watcher is None and not (functorch_active() or dual_level_open()):
            if self._shares(leaves_of(self._sites(), transformed=False)) != {1.0}:
                what = "a reentrant checkpoint in a module whose loss is a mean over other axes than those it is on."
                fail(WHERE, what, fix="checkpoints of torch's with use_reentrant=False")
            self.again = True

    def _follow(self, leaves: Sequence[Tensor], result: Any, collects: bool) -> None:
        """Be there in backward, where parts are computed again."""
        if self.again and watch.here.watcher is None:
            follow(self, leaves, tensors_of(result), collects)

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
        leaves = leaves_of(self._sites(), transformed=False)
        sums = self._sums_alone(leaves, all_do=True)
        for p, g in zip(leaves, sums, strict=True):
            if g is not None:
                p.grad = g

    def apart(self, collecting: bool) -> bool:
        """A gradient that is reduced, and one that is not, cannot be told from each other once they are added up. True
        where a backward pass begins.
        """
        mine = _torch.backward_pass()
        if self.passes[not collecting] == mine:
            fail(
                "no_sync",
                "one backward pass has gradients that were collected under no_sync and others that are reduced.",
                fix="a backward pass for each, that of no_sync first",
            )
        begins = self.passes[collecting] != mine
        self.passes[collecting] = mine
        if begins:
            heard(self)
        return begins

    def look_after(self, leaves: Sequence[Tensor]) -> None:
        """Compare the gradients of the ranks when the first backward pass that leaves any has ended."""
        if not self.compared and self.axis.size > 1 and not self.joined and not torch.is_grad_enabled():
            _torch.after_backward(functools.partial(self._compare_gradients, leaves))

    def look_before_step(self, params: Container[int]) -> None:
        """An optimiser steps, and nothing was reduced: gradients are the same if nothing is wrong, but of slices."""
        leaves = leaves_of(self._sites(), transformed=False)
        has_some = any(id(leaf) in params and leaf.grad is not None for leaf in leaves)
        if not leaves or (has_some and not self.joined):
            heard(self)
            if has_some and self.axis.size > 1 and not self.compared:  # else it may be of another rank, or another mesh
                cut = cut_along(self.module, self.axis)
                whole = [leaf for leaf in leaves if id(leaf) not in cut]
                with paused(), torch.no_grad():
                    self._compare_gradients(whole)

    def _compare_gradients(self, leaves: Sequence[Tensor]) -> None:
        names = {id(p): name for name, p in self.module.named_parameters()}
        for over, at in self.spread.lists(leaves):
            mine = [leaves[place] for place in at]
            called = [names.get(id(leaf), "a parameter") for leaf in mine]
            self.compared |= over.axis.size > 1 and compare(WHERE, called, mine, over.axis)

    def _varied(self, leaves: list[Tensor]) -> list[Tensor]:
        varied, collected = list(leaves), _Collected(self, leaves)
        plain = not (torch.compiler.is_compiling() or functorch_active() or dual_level_open())
        lists = self.spread.lists(leaves)
        if plain and watch.here.watcher is None:
            for over, at in lists:
                share = self.share(over)
                mine = vary_tree([leaves[place] for place in at], over.axis, self.bucket_mb, self._how(collected, at))
                for place, x in zip(at, mine, strict=True):
                    varied[place] = x if share == 1 else with_gradient_over(x, self.axis, 1 / share)
            return varied
        if plain and self.collected:
            fail("no_sync", "gradients that were collected before cannot be reduced under check_vma.")
        for over, at in lists:
            mine, n = [leaves[place] for place in at], 1.0
            if over.axes:
                mine, n = pvary(mine, over.axis.name, mesh=self.mesh, bucket_mb=self.bucket_mb), float(over.axis.size)
            n /= self.share(over)
            for place, x in zip(at, mine, strict=True):
                varied[place] = x if self.grads == "sum" else with_gradient_over(x, self.axis, n)
        return varied

    def share(self, over: Over) -> float:
        """By what averages over these axes are multiplied."""
        return 1.0 if self.mean is None else self.mean.share(over.axes)

    def _shares(self, leaves: Sequence[Tensor]) -> set[float]:
        return {self.share(over) for over, _ in self.spread.lists(leaves)}

    def _sums_alone(self, leaves: list[Tensor], *, all_do: bool) -> list[Tensor | None]:
        """What was collected, reduced; with nothing of a backward pass."""
        found: list[Tensor | None] = [None] * len(leaves)
        collected = _Collected(self, leaves)
        with torch.no_grad():
            for over, at in self.spread.lists(leaves):
                how = self._how(collected, at)
                how = how._replace(around=None) if all_do else how
                mine = [leaves[place] for place in at]
                sums = sums_alone(mine, over.axis, self.bucket_mb, how, all_do=all_do)
                for place, total in zip(at, sums, strict=True):
                    found[place] = total
        return found

    def _how(self, collected: _Collected, at: Sequence[int]) -> How:
        """How gradients are summed of those of the leaves that go over the same axes."""
        leaves = [collected.leaves[place] for place in at]
        look = functools.partial(_watched, self, leaves, collected.leaves)
        ids = {id(_torch.own_parameters(part)["weight"]) for part in self.sparse}
        rows = frozenset(at for at, leaf in enumerate(leaves) if id(leaf) in ids) if ids else frozenset()
        return How(
            self.grads,
            self.dtype,
            functools.partial(_collected_at, collected, at) if self.spread.fewer else collected,
            look,
            self._late,
            self._inside,
            self.whose,
            rows,
            self.accumulates,
        )

    def _late(self) -> bool:
        return self.again is True

    def _inside(self) -> bool:
        return self.set_aside not in (-2, _torch.backward_pass())

    def collect(self) -> None:
        """From now on ``.grad`` is this rank's own part."""
        if self.grads == "sum" and not self.collected:
            with torch.no_grad():
                leaves = leaves_of(self._sites(), transformed=False)
                for over, at in self.spread.lists(leaves):
                    for p in (leaves[place] for place in at):
                        if p.grad is not None:
                            p.grad = p.grad / over.axis.size
        self.collected = True

    def send_buffers(self) -> None:
        """Buffers take the values of index 0."""
        tensors = list(self.spread.without_ignored(dict(self.module.named_buffers())).values())
        if tensors and self.syncs:
            self._take_from(self.last[0] if self.joined else 0, tensors)

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
                self.send_buffers()
            leaves = leaves_of(self._sites(), transformed=False)
            sums = self._sums_alone(leaves, all_do=False)
            if step is not None:
                for p, g in zip(leaves, sums, strict=True):
                    if g is not None:
                        p.grad = g if p.grad is None else p.grad + g
                step()
        if step is None:
            self._take_from(self.last[0], [*self.module.parameters(), *self.module.buffers()])


def _watched(state: Replica, leaves: Sequence[Tensor], every: Sequence[Tensor]) -> Callable[[int], None]:
    """Finds a gradient that came to a leaf, during a backward pass, on another way than its own."""
    if state.apart(collecting=False):
        state.look_after(every)

    def seen() -> list[tuple[Tensor | None, int]]:
        return [(g, 0 if g is None else version_of(g)) for g in (leaf.grad for leaf in leaves)]

    before = seen()

    def look(at: int) -> None:
        g, (old, version) = leaves[at].grad, before[at]
        if g is not None and (g is not old or version_of(g) != version):
            fail(
                WHERE,
                "a parameter has got a gradient of this rank's own while the module's backward pass ran.",
                got=f"parameter of shape {list(leaves[at].shape)}",
                fix="torch.utils.checkpoint(..., use_reentrant=False) for what a Function runs again in its backward",
            )

    return look


def _collected_at(collected: _Collected, places: Sequence[int], at: int) -> Tensor | None:
    return collected(places[at])


class _Collected:
    """Gives what was collected for each leaf, once, to the next backward pass: from then on it is on its way."""

    def __init__(self, state: Replica, leaves: Sequence[Tensor]) -> None:
        self.state, self.leaves = state, leaves
        self.number = -2
        self.taken: set[int] = set()

    def __call__(self, at: int) -> Tensor | None:
        if (number := _torch.backward_pass()) != self.number:  # another one through the same graph
            self.number, self.taken = number, set()
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
        ctx.shares = [1.0] * len(leaves)
        for over, at in state.spread.lists(leaves):
            for place in at:
                ctx.shares[place] = state.share(over)
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.state.apart(collecting=True)
        ctx.state.collect()
        if (dtype := ctx.state.accumulates) is not None:
            gs = tuple(None if g is None else g.to(dtype) for g in gs)
        return None, *[
            g if g is None or share == 1 else g * share for g, share in zip(_own(gs), ctx.shares, strict=True)
        ]


def _own(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each with memory of its own, such as one that is a part of another: a next one may be added to it where it is."""
    seen: set[int] = set()
    found: list[Tensor | None] = []
    for g in gradients:
        at = 0 if g is None or g.layout != torch.strided else _torch.memory_of(g)
        found.append(g.clone() if g is not None and at and at in seen else g)
        seen.add(at)
    return found
