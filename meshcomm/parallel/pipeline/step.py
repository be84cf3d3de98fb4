"""pipelined: stages of a model on the ranks of an axis, run by a schedule.

    rank 0   stage 0   F0 F1 .. .. B0 .. B1        activations forward, gradients back, by messages that the ranks
    rank 1   stage 1   .. F0 B0 F1 B1 .. ..        post ahead; gradients of weights are reduced once, at the end

n = ranks of the axis, v = stages of each, m = microbatches.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.errors import MeshError, fail, held, names
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.parallel.checkpoint.parts import stand_in, ties_of
from meshcomm.parallel.cut_parameters import know
from meshcomm.parallel.data.micro_batches import reduced_once
from meshcomm.parallel.data.replica import Grads
from meshcomm.parallel.optimizers.over_parts import watch_steps
from meshcomm.parallel.pipeline.running.executor import Batch, Pass, Ran, Stages
from meshcomm.parallel.pipeline.running.microbatches import joined, rows_from, rows_of, shares_of, spans
from meshcomm.parallel.pipeline.running.tied import Ties
from meshcomm.parallel.pipeline.running.wires import Outline, Terms, Wires, carrier_along, terms_of
from meshcomm.parallel.pipeline.schedule import Schedule
from meshcomm.parallel.weights.names_in_files import Unfit
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.options import has_options
from meshcomm.runtime.transports.dry.world import is_dry, said_by, said_by_each
from meshcomm.runtime.transports.threads.scheduler import claim
from meshcomm.spmd.random.draws import Rows
from meshcomm.spmd.types.grids import grid_of
from meshcomm.spmd.types.told import as_told
from meshcomm.spmd.types.vma import Origin, Type, declare, declared
from meshcomm.watch import here, paused

WHERE = "pipelined"
_KINDS_KNOWN = 32
"""Of batches whose outlines are remembered."""
_FLOAT, _BITS = struct.Struct("=d"), struct.Struct("=q")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@Op("pipelined", "the loss invariant along ``axis``", composed=True)
@has_options
def pipelined(
    stages: nn.Module | Sequence[nn.Module],
    axis: AxisName,
    *,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    grads: Grads,
    schedule: str | Schedule | Sequence[Sequence[Any]] = "1f1b",
    remat: bool = False,
    mesh: Mesh | None = None,
) -> PipelineStep:
    """Train a model whose stages are on the ranks of ``axis``, microbatch after microbatch, by a schedule.

    ::

        rank 0  stage 0   F0 F1 .. .. B0 .. B1
        rank 1  stage 1   .. F0 B0 F1 B1 .. ..

    What it gives is called with a batch, as a forward and a backward pass would be::

        step = pipelined(stage, "pp", loss=F.cross_entropy, microbatches=8, grads="mean")
        optimizer = torch.optim.AdamW(step.parameters())
        for x, y in batches:
            loss = step(x, y)  # on every rank; x is needed by the first stage, y by the last one
            parallel.clip_grad_norm(step, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A stage is an ordinary module of one argument. What it gives, a tensor or a pytree of tensors and plain data, is
    given to the next one. Parameters that several stages have are named by ``stage.tied_parameters``, from names in the
    stage to a name that all of them know, as :func:`split_stages` does: they have the value of the first of these, and
    each the gradients of all.

    Random numbers, those of dropout, are drawn from each rank's own state in the order of its actions: the same seed
    and schedule draw the same again, with ``remat`` too; another schedule, or number of ranks, draws others. Layers
    that enter :func:`meshcomm.rng` themselves, with a seed of their own and of the step, draw for the rows of a
    microbatch what one rank draws for these rows of its batch, whatever the stages, microbatches and schedule; around
    the step it is refused. With ``torch.amp.GradScaler``, ``loss`` scales what it gives, and ``scaler.scale`` is called
    of any tensor once before on ranks without a loss: all of them skip a step, or none.

    Type: the loss invariant along ``axis``; parameters varying along it.

    Args:
        stages: the module, or the list of the v modules, that this rank has, in the order of the model: stages r,
            r + n, ... on index r; of "zbv" r and 2n - 1 - r. Data parallel, sharded and tensor parallel before.
        axis: a name, or a tuple of names.
        loss: ``loss(output, target)`` of a microbatch, a tensor of one element; called on the last stage.
        microbatches: m: rows along dim 0 are divided as evenly as can be, and a batch of fewer rows into as many.
        grads: "mean": the loss and the gradients are means over the microbatches, each by its rows; "sum": sums. Over
            data axes they are what the adaptors make of them: the loss is that of this rank's own batch.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", a :class:`Schedule` or a table of one.
        remat: keep the input of a stage alone, and compute the rest again in backward.
        mesh: the current mesh by default; it is kept.

    Returns: a :class:`PipelineStep`, a module whose parameters are those of the stages, under their names; where two
        stages have the same name, behind ``stages.0.`` and so on.

    Backward: part of the step: afterwards each ``.grad`` is what one rank with the whole model has. Gradients add up
        over steps as torch's do. A stage of whose output the loss does not depend has zeros, where one rank has None
        (an optimiser's weight decay counts for the one and not for the other). Those of data parallel and sharded
        stages are reduced once per stage and step.

    Cost: per microbatch and stage the bytes of what it gives, and of its gradients back; per step numbers to agree on
        the batch, and a broadcast of the loss. Memory: ``step.schedule.peak`` microbatches.

    Raises:
        MeshError: no such axis; no modules, not the same number on all ranks, or not as many as the schedule wants;
            ``microbatches``, ``grads``, ``loss``, ``remat`` or a schedule that are none, or differ between ranks.
            From a step, on every rank and before anything runs: a batch that is missing where it is needed, without
            rows, or of other lengths; weights that do not fit; ``check_vma``.
        CommError: a stage gives other shapes or dtypes than it did for a batch like this; another rank has failed.
        A step that has failed on all ranks, each of which has caught that, can be followed by others: what it has sent
        is not taken by them. What it has added to gradients stays.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import pipelined
        >>> mesh = mc.make_mesh({"pp": 2})
        >>> def main():
        ...     torch.manual_seed(mesh.rank)
        ...     stage = torch.nn.Linear(4, 4)
        ...     mse = torch.nn.functional.mse_loss
        ...     step = pipelined(stage, "pp", loss=mse, microbatches=2, grads="mean", mesh=mesh)
        ...     return step(torch.ones(4, 4), torch.zeros(4, 4)).ndim, stage.weight.grad.shape
        >>> mc.launch(main, ranks=2)
        [(0, torch.Size([4, 4])), (0, torch.Size([4, 4]))]

    Source: GPipe (Huang et al., 2019); 1F1B of PipeDream (Narayanan et al., 2019) and Megatron; zero bubble (Qi et al.,
    2023).
    """
    ax = check.axis_of(WHERE, axis, mesh)
    if grads not in ("sum", "mean"):
        fail(WHERE, f"grads={grads!r}.", fix='"mean" for the mean over microbatches, "sum" for their sum')
    if not callable(loss):
        fail(WHERE, f"loss is not callable but {type(loss).__name__}.", fix="a function of output and target")
    if not check.whole_number(microbatches) or microbatches < 1:
        fail(WHERE, f"microbatches={microbatches!r} is not a number of microbatches.", fix="1 or more")
    if not isinstance(remat, bool):
        fail(WHERE, f"remat={remat!r} is not a bool.", fix="True or False")
    own = [stages] if isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList) else stages
    if not isinstance(own, (list, tuple, nn.ModuleList)) or not all(isinstance(each, nn.Module) for each in own):
        fail(
            WHERE, f"stages is no module and no list of modules but {type(stages).__name__}.", fix="this rank's stages"
        )
    if not len(own):
        fail(WHERE, "stages is an empty list.", fix="at least one on each rank; nn.Identity() where nothing is to do")
    counts = [count for [count] in agree([len(own)], ax)]
    if len({*counts}) > 1:
        fail(
            WHERE,
            f"each rank has the same number of stages, and these have {counts}.",
            fix="split_stages(model, ranks * stages of each); nn.Identity() where there is nothing to do",
        )
    problem = ""
    with held():
        try:
            plan = Schedule.of(schedule, ax.size, len(own), int(microbatches))
        except MeshError as error:
            problem = str(error)
    if any(wrong for [wrong] in agree([int(bool(problem))], ax)):
        _raise_everywhere(problem, ax)
    said = hashlib.blake2b(repr((plan.table, plan.placement, grads, remat)).encode(), digest_size=8).digest()
    every = agree([int.from_bytes(said, "little", signed=True), int(microbatches)], ax)
    if any(each != every[0] for each in every):
        what = "schedule, microbatches, grads or remat are not the same on all ranks."
        fail(WHERE, what, got=f"here {plan!r}, grads={grads!r}, remat={remat}", fix="the same on every rank")
    for each in own:
        claim(each, WHERE)
    return PipelineStep(list(own), ax, plan, loss, grads, remat)


class PipelineStep(nn.Module):
    """What :func:`pipelined` gives: called with a batch it runs a training step on it."""

    schedule: Schedule
    """The one that is followed: ``.table``, ``.bubble``, ``.peak``."""
    ran: tuple[Ran, ...]
    """The actions of this rank in its last pass, with when each began and ended."""
    peak: int
    """How many microbatches were alive at once on this rank in its last pass, those of all its stages together."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        axis: Axis,
        schedule: Schedule,
        loss: Callable[[Any, Any], Tensor],
        grads: Grads,
        remat: bool,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.schedule, self.ran, self.peak = schedule, (), 0
        self._mesh, self._axis, self._grads = axis.mesh, axis.name, grads
        self._fixed = Stages(tuple(stages), schedule, axis.index, loss, remat)
        self._numbers = [schedule.stage(axis.index, chunk) for chunk in range(schedule.chunks)]
        self._last = schedule.ranks * schedule.chunks - 1
        self._known: dict[Any, dict[tuple[int, int], Outline]] = {}
        self._failed = 0
        """As many passes had failed, of this or another pipeline, when that was learnt."""
        self._prefixes = self._named(axis)
        self._ties = Ties(stages, self._numbers, axis)
        own = [x for stage in stages for x in (*stage.parameters(), *stage.buffers())]
        self._stand_in = [] if any(True for _ in self.stages.parameters()) else [stand_in(axis.mesh.device)]
        for x in (*own, *self._stand_in):
            along = {*declared(x), *axes_in(axis.name)}
            declare(x, Type(dict.fromkeys(sorted(along), Origin(WHERE, leaf=True)), grid=grid_of(axis.mesh)))
            as_told(x)
        know(self, axis.mesh)
        watch_steps()

    # ------------------------------------------------------------------------------------------------------- a batch

    def forward(self, x: Any = None, targets: Any = None, *, weights: Any = None) -> Tensor:
        """One step: forward and backward of all microbatches; under ``torch.no_grad()`` forward alone.

        Args:
            x: the batch, where the first stage is: a tensor or a pytree, whose tensors have a row for each sample; what
                has no dims, or is no tensor, goes to every microbatch. None where it is not needed.
            targets: the same, where the last stage is. None on all ranks: ``loss(output, None)``.
            weights: with ``grads="mean"``, where the last stage is: how much each microbatch's mean counts, or each
                row: numbers of tokens. By default its rows. One that counts 0 counts for nothing, even where its
                mean, of no tokens, is no number (but for a loss with parameters of its own); its activations are.

        Returns: the loss, ``[]``, detached, the same on every rank of the axis.
        """
        run = self._begin(x, targets, weights, evaluates=False)
        with run.wires.until_sent(run.asked), contextlib.ExitStack() as ends:
            if run.trains:
                ends.enter_context(self._ties.added_up())
                ends.enter_context(reduced_once(self.stages))
            run.run()
        self._end(run)
        if run.batch.wants:
            _send_back(x, run)
        with torch.no_grad():
            return self._told(run.total)

    @torch.no_grad()
    def evaluate(self, x: Any = None) -> Any:
        """The outputs of the model for a batch, on the last stage; None elsewhere. Whether modules train stays as it
        is: ``step.eval()`` is for you to call.
        """
        run = self._begin(x, None, None, evaluates=True)
        with run.wires.until_sent(run.asked):
            run.run()
        self._end(run)
        return joined([run.outputs[at] for at in range(run.batch.parts)]) if run.outputs else None

    def _begin(self, x: Any, targets: Any, weights: Any, *, evaluates: bool) -> Pass:
        """All ranks agree on the batch; errors are raised by all of them."""
        if here.watcher is not None:
            what = "a pipeline's step under check_vma: each rank runs its stage at other times than the others."
            fail(WHERE, what, fix="with mc.check_vma(False): around the step; parallel.pipeline is one that is checked")
        axis = self._mesh.axis(self._axis, WHERE)
        first, last = 0 in self._numbers, self._last in self._numbers
        problem, said, cuts = "", [-1, -1, 0], []
        with held():
            try:
                said = [rows_of(x, "x"), rows_of(targets, "targets"), self._kind_of(x) if first else 0]
                if first and said[0] < 0:
                    fail(WHERE, "x is not given where the first stage is.", fix="step(x, targets) with the whole batch")
                if 0 in said[:2]:
                    fail(WHERE, "a batch without rows.", fix="leave it out on all ranks")
                if weights is not None and (evaluates or self._grads == "sum"):
                    fail(WHERE, 'weights are of means: grads is "sum".', fix='grads="mean", or multiply in the loss')
                if last and weights is not None:
                    rows = said[1] if said[1] >= 0 else said[0]
                    if rows < 0:
                        fail(WHERE, "weights without targets.", fix="step(x, targets, weights=)")
                    shares_of(weights, spans(rows, self.schedule.microbatches), rows)
            except MeshError as error:
                problem = str(error)
        trains = torch.is_grad_enabled()
        needs = hash(tuple(p.requires_grad for p in self._all_parameters())) if trains else 0
        modes = [int(evaluates), int(trains), int(bool(problem)), int(last and targets is not None)]
        own = hash((self.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(axis.mesh.device.type)))
        # A dry run of another rank has the number of rows from where the first stage is.
        with paused(), said_by(self.schedule.place(0)[0]) if is_dry() else contextlib.nullcontext():
            carrier = carrier_along(axis)
            every = agree([*modes, *said, needs, own, *terms_of(carrier)], axis)
        terms = Terms.met([each[9:] for each in every])
        if terms.failed != self._failed:  # ranks may not have learnt the same
            self._known.clear()
            self._failed = terms.failed
        self._refuse(problem, every, axis)
        rows = max(each[4] for each in every)
        cuts = spans(rows, self.schedule.microbatches)
        count = len(cuts)
        kind = (rows, *((*each[:2], *each[6:9]) for each in every))
        wants = (
            trains
            and first
            and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _torch.tree_flatten(x)[0])
        )
        shares = shares_of(weights if last else None, cuts, rows) if self._grads == "mean" else [1.0] * count
        batch = Batch(
            count,
            [rows_from(x, cut) for cut in cuts] if first else (),
            [rows_from(targets, cut) for cut in cuts] if last and not evaluates else (),
            shares,
            [Rows(*cut, rows) for cut in cuts],
            wants,
        )
        wires = Wires(axis, self._last + 1, self.schedule.microbatches, terms, carrier)
        return Pass(self._fixed, wires, kind, self._known.pop(kind, {}), batch)

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        """In order, some more than once."""
        for part in self.stages.modules():
            yield from (p for p in vars(part)["_parameters"].values() if p is not None)

    def _kind_of(self, x: Any) -> int:
        leaves, form = _torch.tree_flatten(x)
        seen = [(tuple(leaf.shape[1:]), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in leaves]  # fmt: skip
        return hash((repr(form), *seen))

    def _refuse(self, problem: str, every: Sequence[Sequence[int]], axis: Axis) -> None:
        if any(each[2] for each in every):
            _raise_everywhere(problem, axis)
        if is_dry():  # the others say what this rank says, and have other stages
            return
        if len({tuple(each[:2]) for each in every}) > 1:
            what = "ranks have begun different passes: step and evaluate, or with gradients and without."
            fail(WHERE, what, fix="the same call on every rank, in the same grad mode")
        for name, at in (("x", 4), ("targets", 5)):
            lengths = {each[at] for each in every if each[at] >= 0}
            if len(lengths) > 1:
                got = f"rows of {name}: {[each[at] for each in every]}; -1: not given"
                fail(WHERE, f"ranks have batches of different lengths for {name}.", got=got, fix="the same whole batch")
        rows = {max(each[at] for each in every) for at in (4, 5)} - {-1}
        if len(rows) > 1:
            got = f"x {max(each[4] for each in every)} rows, targets {max(each[5] for each in every)}"
            fail(WHERE, "x and targets are not of the same length.", got=got, fix="a row of each for each sample")
        given = any(each[5] >= 0 for each in every)
        if given and not any(each[3] for each in every) and not every[0][0]:
            what = "targets are given, and not where the last stage is."
            fail(WHERE, what, fix="step(x, targets) there too, or on every rank")

    def _end(self, run: Pass) -> None:
        """What is known from now on: a pass that has failed leaves nothing."""
        self.ran, self.peak = tuple(run.ran), run.peak
        self._known[run.kind] = run.known
        if len(self._known) > _KINDS_KNOWN:
            self._known.pop(next(iter(self._known)))

    def _told(self, total: Tensor | None) -> Tensor:
        """The loss of the last stage, on all ranks."""
        axis = self._mesh.axis(self._axis, WHERE)
        src = self.schedule.place(self._last)[0]
        if is_dry():  # the number is nobody's; its dtype is known where the last stage is
            with said_by(src):
                _, dtype = agree([0, 0 if total is None else _DTYPES.index(total.dtype)], axis, src)[0]
            return torch.zeros((), dtype=_DTYPES[dtype], device=axis.mesh.device)
        said = [0, 0] if total is None else [_as_bits(total.item()), _DTYPES.index(total.dtype)]
        bits, dtype = agree(said, axis, src)[0]
        return torch.tensor(_of_bits(bits), dtype=_DTYPES[dtype], device=axis.mesh.device)

    # --------------------------------------------------------------------------------------------------------- names

    def _named(self, axis: Axis) -> list[str]:
        """What stands before the names of each stage: nothing, if no two stages have the same."""
        own = [[name for name, _ in stage.named_parameters() if name not in ties_of(stage)] for stage in self.stages]
        seen: set[str] = set()
        twice = False
        with said_by_each():
            every = all_gather_object(own, axis.name, mesh=axis.mesh)
        for of_rank in every:
            for found in of_rank:
                twice |= not seen.isdisjoint(found)
                seen.update(found)
        return [f"stages.{number}." if twice else "" for number in self._numbers]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this rank's stages; where these have none one without elements, which no other method gives: so each
        rank has an optimiser, and may skip a step when the others do.
        """
        yield from super().parameters(recurse)
        yield from self._stand_in

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the stages, under the names that they have in the model."""
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        for stage, name in zip(self.stages, self._prefixes, strict=True):
            outer = f"{prefix}.{name}" if prefix else name
            yield from stage.named_modules(memo, outer.removesuffix("."), remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """A module of this rank's stages, by its name in the model."""
        for stage, name in zip(self.stages, self._prefixes, strict=True):
            path = f"{target}."
            if path.startswith(name):
                with contextlib.suppress(AttributeError):
                    return stage.get_submodule(path.removeprefix(name).removesuffix("."))
        raise AttributeError(f"this rank's stages have no module {target!r}")

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The states of this rank's stages."""
        found: Any = {} if destination is None else destination
        for stage, name in zip(self.stages, self._prefixes, strict=True):
            for key, value in stage.state_dict(prefix=prefix + name, keep_vars=keep_vars).items():
                found[key] = value
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take the states of this rank's stages."""
        missing: list[str] = []
        used: set[str] = set()
        for stage, name in zip(self.stages, self._prefixes, strict=True):
            wanted = [name + key for key in stage.state_dict(keep_vars=True)]
            own = {key.removeprefix(name): state_dict[key] for key in wanted if key in state_dict}
            missing += [key for key in wanted if key not in state_dict]
            used.update(wanted)
            if not (strict and missing):
                stage.load_state_dict(own, strict=False, assign=assign)
        unexpected = [key for key in state_dict if key not in used]
        if strict and (missing or unexpected):
            what = (
                f"of this rank's stages {names(missing) or 'none'} are missing, {names(unexpected) or 'none'} unknown"
            )
            raise RuntimeError(f"meshcomm.pipelined: {what}.")
        return Unfit(missing, unexpected)


def _as_bits(x: float) -> int:
    found: int = _BITS.unpack(_FLOAT.pack(x))[0]
    return found


def _of_bits(x: int) -> float:
    found: float = _FLOAT.unpack(_BITS.pack(x))[0]
    return found


def _raise_everywhere(problem: str, axis: Axis) -> NoReturn:
    """What is wrong here, or else on the first rank where something is."""
    with paused():
        said = all_gather_object(problem, axis.name, mesh=axis.mesh)
    index, text = next((at, each) for at, each in enumerate(said) if each)
    raise MeshError(problem or f"{text}\n  at: index {index} of axis {axis.name!r}")


def _send_back(x: Any, run: Pass) -> None:
    """The gradients of the batch, which has come of something."""
    leaves = [leaf for leaf in _torch.tree_flatten(x)[0]
              if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]  # fmt: skip
    parts = [run.input_gradients[at] for at in range(run.batch.parts)]
    pairs = [
        (leaf, torch.cat(of_leaf) if leaf.ndim else torch.stack(of_leaf).sum(0))
        for leaf, of_leaf in zip(leaves, zip(*parts, strict=True), strict=True)
        if leaf.requires_grad
    ]
    torch.autograd.backward([leaf for leaf, _ in pairs], [g for _, g in pairs])
