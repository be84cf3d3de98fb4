"""What one rank sees of a training loop: its parts of all that is compared, step by step.

::

    made        start                         parameters, as boxes of the global ones (checkpoint/parts.py)
    step k      at each optimizer.step()      gradients, and the line that called it
                at the end                    the loss, parameters, states of the optimiser
    half way    a checkpoint, which another mesh loads and goes on from
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshcomm._torch import tree_flatten, tree_unflatten
from meshcomm.errors import fail
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh, use_mesh
from meshcomm.parallel.checkpoint.parts import collect, dotted, named
from meshcomm.parallel.global_places import Spread
from meshcomm.runtime.callsite import CallSite, call_site, is_ours
from meshcomm.tracing.traces import trace
from meshcomm.verifying.training.draws import watched
from meshcomm.verifying.training.seen import START, WHERE, Moment, Part, Parts, Seen, Sent, Update
from meshcomm.verifying.training.watched_step import WatchedStep

Make = Callable[[Mesh], tuple[nn.Module, Optimizer, Callable[[Any], Any]]]
Save = Callable[[str, nn.Module, Optimizer], object]


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    make: Make
    batches: Sequence[Any]
    sizes: Mapping[str, int]
    seed: int
    dtype: torch.dtype | None
    save: Save
    load: Save
    first: int
    last: int
    """Steps ``first`` to ``last`` - 1."""
    half: int = START
    """Save after so many steps."""
    folder: str = ""
    """Where; with ``first`` it is loaded from there."""
    without_draws: bool = False
    """Whether dropout is let through, and only looked at."""
    follow: int = START
    """Which step is watched operation by operation."""


def train(job: Job) -> Seen:
    """One rank's run; who launches it has set the default dtype, which is one for all threads."""
    mesh = make_mesh(job.sizes)
    with use_mesh(mesh):
        module, optimizer, step = made(job, mesh)
        seen = Seen(dict(mesh.coordinate))
        seen.made_at, seen.steps_at = line_of(job.make), line_of(step)
        seen.loads_at = "" if is_ours(getattr(job.load, "__code__", train.__code__).co_filename) else line_of(job.load)
        names = named(module)
        seen.aliases = dict(names.aliases)
        has = {id(p) for group in optimizer.param_groups for p in group["params"]}
        seen.held = tuple(dict.fromkeys(names.first[id(p)] for p in module.parameters()
                                        if p.requires_grad and id(p) in has))  # fmt: skip
        if job.first:
            job.load(job.folder, module, optimizer)
        start = Moment()
        start.parameters, start.states = everything(module, optimizer)
        seen.moments[START if not job.first else job.first - 1] = start
        state = torch.get_rng_state()
        for number in range(job.first, job.last):
            seen.moments[number] = one_step(job, module, optimizer, step, number)
            if number + 1 == job.half:
                job.save(job.folder, module, optimizer)
        seen.drew = not torch.equal(state, torch.get_rng_state())
    return seen


def line_of(fn: object) -> str:
    """Where a function begins."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return "" if code is None else str(CallSite(code.co_filename, code.co_firstlineno))


def train_in_process(job: Job) -> Seen:
    """The same in a process of its own."""
    with default_dtype(job.dtype):
        return train(job)


def one_step(job: Job, module: nn.Module, optimizer: Optimizer, step: Callable[[Any], Any], number: int) -> Moment:
    """Take it, and look."""
    moment = Moment()

    def before_update(_: Any, args: Any, kwargs: Any) -> Any:
        line = str(call_site())
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # after the optimiser itself
        if closure is None:
            moment.updates.append(Update(line, gradients(module)))
            return None
        moment.updates.append(Update(line, {}))  # of what a closure makes, when it is called first
        at = len(moment.updates) - 1

        def heard() -> Any:
            loss = closure()
            if not moment.updates[at].gradients:
                moment.updates[at] = Update(line, gradients(module))
            return loss

        return ((args[0], heard, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": heard})

    batch = as_dtype(copy.deepcopy(job.batches[number % len(job.batches)]), job.dtype)
    hook = optimizer.register_step_pre_hook(before_update)
    steps = WatchedStep(module) if number == job.follow else None
    try:
        with trace() as traced, watched(moment.drawn, job.without_draws), steps or contextlib.nullcontext():
            loss = step(batch)
    finally:
        hook.remove()
    if steps is not None:
        moment.followed, moment.written = steps.followed(loss), steps.written
    moment.sent = [Sent(event.primitive, event.axis, event.payload, str(event.site or ""), event.backward)
                   for event in traced.events]  # fmt: skip
    moment.loss = checked_loss(loss)
    moment.parameters, moment.states = everything(module, optimizer)
    return moment


def made(job: Job, mesh: Mesh) -> tuple[nn.Module, Optimizer, Callable[[Any], Any]]:
    """What ``make`` gives under the seed, on all ranks alike; what the rank draws afterwards is its own, unless
    ``make`` sets a seed.
    """
    own, seed = torch.get_rng_state(), 0x5EED_0000_0000 + job.seed
    torch.manual_seed(seed)
    given: Any = job.make(mesh)
    if torch.initial_seed() == seed:
        torch.set_rng_state(own)
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        got = f"{type(given).__name__}" + (f" of {len(given)}" if isinstance(given, (tuple, list)) else "")
        fail(WHERE, "make gives no module, optimizer and step.", got=got, fix="return module, optimizer, step")
    module, optimizer, step = given
    kinds = {"module": (module, nn.Module), "optimizer": (optimizer, Optimizer)}
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            fail(WHERE, f"the {name} that make gives is no torch {kind.__name__}.", got=type(value).__name__,
                 fix="return module, optimizer, step")  # fmt: skip
    if not callable(step):
        fail(WHERE, "the step that make gives is not callable.", got=type(step).__name__,
             fix="a function of a batch that trains one step and gives its loss")  # fmt: skip
    return module, optimizer, step


def checked_loss(loss: Any) -> Tensor | None:
    """As a tensor on the CPU."""
    if loss is None:
        return None
    if isinstance(loss, (int, float)):
        return torch.tensor(loss, dtype=torch.float64, device="cpu")
    if not isinstance(loss, Tensor):
        fail(WHERE, "step gives no loss.", got=type(loss).__name__, fix="a tensor, a number, or None")
    return loss.detach().to("cpu", copy=True)


def gradients(module: nn.Module) -> Parts:
    """Of the parameters that require any, by name."""
    here = named(module)
    found: Parts = {
        here.first[id(p)]: None if p.grad is None else copied(here.place(p).of(p.grad))
        for p in module.parameters()
        if p.requires_grad
    }
    return _with_aliases(found, here.aliases)


def _with_aliases(found: Parts, aliases: Mapping[str, str]) -> Parts:
    """A parameter with several names under each of them: stages of a pipeline have some of them."""
    more: Parts = {}
    for alias, name in aliases.items():
        for key, part in found.items():
            if key == name or key.startswith(f"{name}."):
                more[alias + key[len(name) :]] = part
    return found | more


def everything(module: nn.Module, optimizer: Optimizer) -> tuple[Parts, Parts]:
    """Parameters and buffers, and the states of the optimiser, as this rank has them."""
    found = collect(module, optimizer)
    parameters: Parts = {}
    states: Parts = {}
    for path, spread in found.tensors.items():
        if path[0] == "model":
            parameters[dotted(path[1:])] = copied(spread)
        else:
            states[dotted(path[2:] if path[1] == "state" else path[1:])] = copied(spread)
    aliases = {alias.partition(".")[2]: name.partition(".")[2] for alias, name in found.aliases.items()}
    return _with_aliases(parameters, aliases), _with_aliases(states, aliases)


def copied(spread: Spread) -> Part:
    """Copies of the boxes that a rank has."""
    boxes = [(tuple(box.offsets), box.view.detach().to("cpu", copy=True)) for box in spread.boxes]
    return Part(tuple(spread.shape), spread.dtype, tuple(boxes))


def as_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    """With floating tensors in this dtype."""
    leaves, spec = tree_flatten(batch)
    if dtype is not None:
        leaves = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    return tree_unflatten(leaves, spec)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """torch's for new tensors, which is one for all threads."""
    before = torch.get_default_dtype()
    if dtype is None or dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
