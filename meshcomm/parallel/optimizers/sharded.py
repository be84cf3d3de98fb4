"""shard_optimizer: parameters whole on every rank, of the optimiser's states a part on each (ZeRO stage 1).

::

    gradients, the same on all ranks     g0 g1 | g2 g3
    rank 0: step of its elements         p0 p1 |           states of p0 p1
    rank 1                                     | p2 p3     states of p2 p3
    all_gather of the parameters         p0 p1 | p2 p3

The optimiser stays the object that it is, with whole parameters in its groups. For the length of a step a stand-in of
the same class takes its place, whose parameters are this rank's parts of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.gather import all_gather_invariant
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.alike import lines_of, refuse_others
from meshcomm.parallel.cut_parameters import parts_among
from meshcomm.parallel.fingerprints import fingerprint_of
from meshcomm.parallel.optimizers.gradient_dtypes import put_gradient
from meshcomm.parallel.optimizers.shares import WHERE, Cut, Shares, know_shares, params_of, shares_of
from meshcomm.parallel.optimizers.stand_in import evaluated, stand_in, write_back
from meshcomm.runtime.ops import Op
from meshcomm.watch import paused

O = TypeVar("O", bound=Optimizer)  # noqa: E741
_BUCKET = 25 * 2**20
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]
)
"""Optimisers whose steps treat each number by itself. What derives from them may not."""
_MARK = "meshcomm_slices"


@Op("shard_optimizer", composed=True, communicates=False)
def shard_optimizer(optimizer: O, axis: AxisName, *, cut: Cut | None = None, mesh: Mesh | None = None) -> O:
    """Keep 1/n of the optimiser's states on each rank; parameters and gradients stay whole.

    ::

        rank 0   g -> step of its part of p \\
                                             all_gather -> p
        rank 1   g -> step of its part of p /

    The optimiser stays what it is: its class, its groups of whole parameters, its hooks; schedulers,
    ``add_param_group``, ``zero_grad``, closures, ``clip_grad_norm``, ``GradScaler`` and settings such as ``foreach``
    and ``fused`` work on it as before. A step gives the parameters the bits that it would give them without: an
    optimiser of torch's that treats each number by itself makes the same operations on a part.

    Gradients must be the same on all ranks of the axis when ``step`` is called, as after a backward of a
    :func:`data_parallel` module. It may be called before the module's adaptors or after them, and in the middle of a
    run: states that are there are cut.

    ``optimizer.state`` and ``state_dict()`` have this rank's parts, flat, for this rank; ``load_state_dict`` takes them
    back, or a ``state_dict`` of the optimiser as it was, whose tensors are whole, and refuses another rank's.
    :mod:`meshcomm.parallel.checkpoint` saves them as whole ones, in pieces, and loads them on another number of ranks,
    into sharded optimisers and others.

    Args:
        optimizer: changed in place; of parameters that are the same on all ranks along ``axis``. They may be cut along
            others.
        axis: a name, or a tuple of names: the ranks that keep a part each.
        cut: "elements": each rank has as many numbers as every other one, wherever tensors begin and end. "tensors":
            each tensor is one rank's, for optimisers that look at whole ones (Adafactor, Muon, LAMB). By default the
            first for optimisers of torch's that treat each number by itself, the second for all others. One that looks
            at all parameters at once, as those do that find their rate by themselves, is not to be sharded.
        mesh: the current mesh by default.

    Returns: ``optimizer``.

    Cost: nothing at the call. Each step: an all_gather of the parameters that have a gradient, in buckets of 25 MiB, of
    which each rank receives (n-1)/n; a bucket is there twice meanwhile. With the all_reduce of
    :func:`data_parallel` that is 3 (n-1)/n of the parameters per rank and step, where a reduce_scatter of gradients
    would make 2 (n-1)/n of it. That is not done here: gradients stay whole and the same on all ranks, for clipping, for
    ``GradScaler`` and for who reads ``.grad``, and ``python -m benchmarks.optimizers`` showed no shorter step of
    training by it on gloo (1.10 to 1.19 of torch's ``ZeroRedundancyOptimizer``, here 0.98 to 1.11).
    ``fully_shard(regather=False)`` is that way: no whole gradients, and parameters gathered once per step. Before the
    first step, and after new parameters, two numbers per rank.

    Raises:
        MeshError: no such axis; not an optimiser, or one that is sharded already; LBFGS, whose step is of all
            parameters at once; ``differentiable=True``; parameters that are cut along ``axis``, or with "tensors" along
            any; a ``cut`` that is neither. In ``step``, on all ranks: parameters that differ between them; an optimizer
            of another class or other settings (looked for before the steps 1, 2, 4 and so on); a sparse gradient. In
            ``load_state_dict``: states of other parts.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import data_parallel, shard_optimizer
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     model = data_parallel(torch.nn.Linear(64, 2, bias=False), "dp", grads="mean", mesh=mesh)
        ...     optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), "dp", mesh=mesh)
        ...     model(torch.ones(1, 64)).sum().backward()
        ...     optimizer.step()
        ...     return model.weight.shape, optimizer.state[model.weight]["exp_avg"].shape
        >>> mc.launch(main, ranks=2)
        [(torch.Size([2, 64]), torch.Size([64])), (torch.Size([2, 64]), torch.Size([64]))]

    Source: ZeRO stage 1; torch's ``ZeroRedundancyOptimizer``.
    """
    ax = check.axis_of(WHERE, axis, mesh)
    if not isinstance(optimizer, Optimizer):
        fail(WHERE, f"optimizer is not a torch.optim.Optimizer but {type(optimizer).__name__}.", fix="an optimizer")
    if shares_of(optimizer) is not None:
        fail(WHERE, "the optimizer is sharded already.", fix="once; over several axes: a tuple of names")
    if cut not in (None, "elements", "tensors"):
        fail(WHERE, f"cut={cut!r}.", fix='"elements", "tensors", or None: by the class of the optimizer')
    if isinstance(optimizer, torch.optim.LBFGS):
        what = "LBFGS has one state of all parameters, and no parts of it."
        fail(WHERE, what, fix="fully_shard the module: LBFGS keeps parts of it then")
    _Steps(optimizer, ax, cut or ("elements" if type(optimizer) in _ELEMENTWISE else "tensors")).watch(optimizer)
    return optimizer


class _Steps:
    """The steps of an optimiser whose states are cut, and what its ``state_dict`` says."""

    def __init__(self, optimizer: Optimizer, axis: Axis, cut: Cut) -> None:
        self.mesh: Mesh = axis.mesh
        self._name = axis.name
        if any(group.get("differentiable") for group in optimizer.param_groups):
            fail(WHERE, "differentiable=True: a step of parts has no derivative.", fix="the optimizer as it is")
        self._kind = type(optimizer).__name__
        self.shares = Shares(axis.own_part("how many elements of a state a rank keeps"), axis.size, cut, self._refuse)
        self._agreed: tuple[int, ...] = ()
        """The parameters of which all ranks have said that they have the same."""
        self._steps = 0
        self._under_way: list[tuple[Tensor, Tensor]] = []
        """In a step the parts of parameters, and these."""
        self.shares.add_new(optimizer)

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self._name, WHERE)

    def watch(self, optimizer: Optimizer) -> None:
        """Take part in its steps and states."""
        know_shares(optimizer, self.shares)
        with torch.no_grad():
            self._cut_states(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._say)
        optimizer.register_load_state_dict_pre_hook(self._check)
        optimizer.register_load_state_dict_post_hook(self._cut_states)

    def _refuse(self, params: Sequence[Tensor]) -> None:
        if any(_torch.kind_of(p) not in (Tensor, torch.nn.Parameter) for p in params):
            odd = next(type(p).__name__ for p in params if _torch.kind_of(p) not in (Tensor, torch.nn.Parameter))
            fail(WHERE, f"a parameter is a {odd}.", fix="plain tensors")
        axis = self.axis
        for parts in parts_among(params).values():
            for part in parts:
                if self.shares.cut == "tensors" and part.size > 1:
                    what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}, and {self._kind} looks at"
                    fail(WHERE, f"{what} whole tensors.", fix="without shard_optimizer, or AdamW")
                if part.size > 1 and len({*axis.own_ranks} & {*part.mesh.axis(part.axis).own_ranks}) > 1:
                    what = f"{part.name!r} is cut along axis {part.axis!r} by {part.maker}, and so are its states."
                    fail(WHERE, what, fix="without shard_optimizer; or an axis along which parameters are the same")

    # ------------------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook: another optimiser makes the step."""
        rest, named = evaluated(args, kwargs)
        self.shares.add_new(optimizer)
        params = list(params_of(optimizer))
        self._agree(params, any(p.grad is not None and p.grad.layout is not torch.strided for p in params))
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._agree_on_settings(optimizer)
        self._under_way = []
        groups = [list(self._parts_of(group["params"])) for group in optimizer.param_groups]
        states = [(part, optimizer.state[p]) for part, p in self._under_way if p in optimizer.state]
        return (stand_in(optimizer, groups, states), *rest), named

    def _parts_of(self, params: Iterable[Tensor]) -> Iterator[Tensor]:
        for p in params:
            if self.shares.is_kept(p):
                part = self.shares.part(p.detach(), p)
                part.requires_grad_(p.requires_grad)
                put_gradient(part, None if p.grad is None else self.shares.part(p.grad.detach(), p))
                self._under_way.append((part, p))
                yield part

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook: what it has made is everybody's."""
        other: Optimizer = args[0]
        parts, self._under_way = {id(p): part for part, p in self._under_way}, []
        for p in params_of(optimizer):
            part = parts.get(id(p))
            if part is not None and other.state.get(part):
                optimizer.state[p] = other.state[part]
        write_back(optimizer, other)
        if self.axis.size > 1:
            for bucket in _buckets([p for p in params_of(optimizer) if p.grad is not None and p.numel()]):
                self._gather(bucket, parts)

    def _gather(self, params: Sequence[Tensor], parts: Mapping[int, Tensor]) -> None:
        """The new values of parameters, of one dtype and on one device."""
        ranges = [self.shares.ranges_of(p) for p in params]
        mine = [parts[id(p)].detach().reshape(-1) for p in params if id(p) in parts]
        sizes = [sum(last - first for first, last in of_rank) for of_rank in zip(*ranges, strict=True)]
        with paused():
            flat = torch.cat(mine) if mine else params[0].new_empty(0)
            found = all_gather_invariant(flat, self._name, sizes=sizes, mesh=self.mesh)
            pieces = found.split([last - first for of_rank in zip(*ranges, strict=True) for first, last in of_rank])
        here = self.axis.own_index
        for at, p in enumerate(params):
            found_of = pieces[at :: len(params)]
            if p.is_contiguous():
                flat, kept = p.detach().view(-1), parts.get(id(p))
                place_of = _torch.places_like(flat)
                in_place = kept is not None and place_of(kept) == place_of(flat) + ranges[at][here][0] * p.itemsize
                for rank, ((first, last), piece) in enumerate(zip(ranges[at], found_of, strict=True)):
                    if last > first and not (in_place and rank == here):  # its own is there already
                        flat[first:last].copy_(piece)
            else:
                p.detach().copy_(torch.cat(found_of).view(p.shape))

    def _agree(self, params: Sequence[Tensor], sparse: bool) -> None:
        """All ranks have equal parameters, whose values are compared once, and no sparse gradients."""
        if sparse:
            fail(WHERE, "a gradient is sparse.", fix="an embedding with sparse=False")
        known = tuple(map(id, params))
        fix = "data_parallel(module, ...), or parameters of the same values in the same order on each rank"
        what = "parameters of the optimizer have other shapes or dtypes on other ranks, or no gradients there."
        refuse_others(WHERE, what, [*lines_of(params), f"new: {known != self._agreed}"], self.axis, fix)
        if self._agreed == known:
            return
        self._agreed = known
        rows = agree([_number([fingerprint_of(p) for p in params])], self.axis)
        if any(row != rows[0] for row in rows):
            self._agreed = ()
            fail(WHERE, "parameters of the optimizer have other values on other ranks.", fix=fix)

    def _agree_on_settings(self, optimizer: Optimizer) -> None:
        """All ranks make the same step: of parts that were made by others nobody could tell afterwards."""
        mine = [{key: _plain(x) for key, x in group.items() if key != "params"} | {"parameters": len(group["params"])}
                for group in optimizer.param_groups]  # fmt: skip
        rows = agree([_number([self._kind, self.shares.cut]), _number(mine)], self.axis)
        for at, what in enumerate(
            ("of another class, or cut in another way", "in other groups or with other settings")
        ):
            if len({row[at] for row in rows}) > 1:
                self._steps -= 1
                got = f"here {self._kind}, cut={self.shares.cut!r}" if at == 0 else f"here {mine}"[:600]
                fix = "the same optimizer on each rank; a schedule that follows a loss takes its mean: mc.all_reduce"
                fail(WHERE, f"the optimizer is {what} on other ranks.", got=got, fix=fix)

    # ------------------------------------------------------------------------------------------------------ states

    @torch.inference_mode(False)
    @torch.no_grad()
    def _cut_states(self, optimizer: Optimizer) -> None:
        """States of whole parameters become those of parts."""
        for p, state in list(optimizer.state.items()):
            if not self.shares.is_kept(p):
                del optimizer.state[p]
            elif not self.shares.is_whole(p):
                optimizer.state[p] = {
                    key: self.shares.part(x, p).clone() if isinstance(x, Tensor) and x.shape == p.shape else x
                    for key, x in state.items()
                }

    def _mark(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"cut": self.shares.cut, "parts": [self.shares.range_of(p) for p in params_of(optimizer)]}

    def _say(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """A hook of ``state_dict``."""
        self.shares.add_new(optimizer)
        state[_MARK] = self._mark(optimizer)

    def _check(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """A hook of ``load_state_dict``, before anything is changed."""
        self.shares.add_new(optimizer)
        fix = (
            "what this rank's state_dict gave, or that of an optimizer that is not sharded; or checkpoint.save and load"
        )
        mark = state.get(_MARK)
        if mark is not None:
            if {key: [*map(tuple, x)] if key == "parts" else x for key, x in mark.items()} != self._mark(optimizer):
                fail(WHERE, "the states are of other parts than this rank has.", fix=fix)
            return
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, params_of(optimizer), strict=False):
            for key, x in state["state"].get(number, {}).items():
                if isinstance(x, Tensor) and x.ndim and x.shape != p.shape and self.shares.cut == "elements":
                    what = f"{key!r} of a parameter of shape {list(p.shape)} has shape {list(x.shape)}"
                    fail(WHERE, f"{what}, and nothing says of which part it is.", fix=fix)


def _buckets(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one dtype and device, up to so many bytes."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in params:
        bucket = open_ones.setdefault((p.dtype, p.device), [])
        bucket.append(p)
        if sum(each.nbytes for each in bucket) >= _BUCKET:
            yield open_ones.pop((p.dtype, p.device))
    yield from open_ones.values()


def _plain(value: Any) -> Any:
    """What a setting is, where that can be written in the same way on every rank."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _number(value: Any) -> int:
    """Of 48 bits, for equal values the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")
