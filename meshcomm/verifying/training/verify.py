"""verify_training: a training loop on meshes against the same loop on one rank."""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from meshcomm.errors import fail, text
from meshcomm.launch import launch
from meshcomm.parallel.checkpoint.whole import load, save
from meshcomm.runtime.callsite import CallSite, is_ours
from meshcomm.runtime.ops import Op
from meshcomm.runtime.start import world
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.verifying.report import Finding, Report
from meshcomm.verifying.training.dropout import dropout_findings
from meshcomm.verifying.training.findings import Judge
from meshcomm.verifying.training.lines import Again
from meshcomm.verifying.training.runs import Job, Make, Save, default_dtype, train, train_in_process
from meshcomm.verifying.training.seen import WHERE, Moment, Seen

Runtime = Literal["in-process", "processes"]


@Op("verify_training", composed=True)
def verify_training(
    make: Make,
    batches: Sequence[Any],
    steps: int = 3,
    meshes: Sequence[Mapping[str, int]] | Mapping[str, int] | None = None,
    *,
    twin: Make | None = None,
    checkpoint: bool | tuple[Save, Save] = True,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    runtime: Runtime = "in-process",
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Whether a training loop on each of these meshes is the one on one rank.

    ``make(mesh)`` gives a module, its optimiser and a step. It runs on every rank of each mesh, which is the current
    one, and on a mesh whose axes all have size 1: that is the twin. After each step each rank's part of every
    parameter, buffer and state of the optimiser is held against the twin's, and so are the losses, and each gradient as
    ``optimizer.step()`` finds it. Half way the loop is saved, and another mesh goes on from there.

    A finding names the first step at which something is off, the parameters, the ranks, the factor (2.0: reduced
    twice; 1/n: a mean of means), the line, and what to write instead.

    Args:
        make: ``mesh -> (module, optimizer, step)``. The module may be made parallel in any way, by the adaptors or by
            hand; ``step(batch)`` takes the whole batch, cuts its own part out (``mc.shard(x, "dp")``), trains one step,
            ``optimizer.step()`` included, and gives the loss: a tensor, a number, or None. ``make`` runs under a
            seed of its own, the same on all ranks.
        batches: of global values, equal on every rank; pytrees. Used in turn, one a step. What changes from step to
            step besides, such as a learning rate, goes in here too.
        steps: how many.
        meshes: a mapping of axis names to sizes, or a list of them.
        twin: what is right, where it is not ``make`` on a mesh of ones: a plain loop, whose parameters have the same
            names.
        checkpoint: whether the loop is saved half way by ``parallel.checkpoint`` and goes on from there on the next
            mesh of the list, or on one rank; or ``(save, load)``, functions of ``(path, module, optimizer)`` of yours.
        dtype: what torch's default is meanwhile, and what floating tensors of the batches are cast to: in float64
            rounding is far smaller than what is wrong. None: as they are.
        seed: for what ``make`` draws.
        runtime: as in :func:`launch`; "processes" pickles ``make`` and the batches.
        progress: is told in a line what runs.

    Returns: a :class:`Report`; ``.check()`` raises what it found. Kinds of findings: "loss", "gradient", "parameter",
    "optimizer", "update" (another number of updates), "start", "checkpoint", "dropout", "seed" (``make`` does not make
    the same twice, or the loss is not finite on one rank, so that nothing can be compared), and "error", of a mesh on
    which the loop fails.

    Cost: each mesh runs ``steps`` steps, and the half of them again; one rank runs them twice. A loop that is wrong
        runs once more up to the step in question, for the line, and on a mesh of at most 16 ranks on which an axis has
        another size, where a factor equals its size.

    Raises:
        MeshError: before anything runs: not callable, no batches, no steps, meshes that are none; before any step: make
            gives something else than a module, an optimiser and a function.
        Exception: what the loop raises on one rank.

    Example:
        >>> import torch, meshcomm as mc
        >>> def make(mesh):
        ...     model = torch.nn.Linear(4, 1)
        ...     mc.parallel.data_parallel(model, "dp", grads="mean")
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        ...     def step(x):
        ...         sgd.zero_grad()
        ...         loss = model(mc.shard(x, "dp")).square().sum()  # a mean was meant
        ...         loss.backward()
        ...         sgd.step()
        ...
        ...     return model, sgd, step
        >>> report = mc.verify_training(make, [torch.ones(4, 4)], meshes={"dp": 2})
        >>> print(report.findings[0].text.partition(" at optimizer")[0], report.findings[0].text.count("0.5 times"))
        meshcomm.verify_training: gradients are other ones 1
    """
    sizes = _checked(make, batches, steps, meshes, twin, checkpoint, dtype, seed, runtime)
    tell = progress or (lambda line: None)
    kept = checkpoint if isinstance(checkpoint, tuple) else (save, load)
    job = Job(make, batches, {}, seed, dtype, *kept, 0, steps)
    findings: list[Finding] = []
    notes: list[str] = []
    ran: list[str] = []
    twins: dict[tuple[str, ...], tuple[Seen, bool]] = {}
    for at, mesh in enumerate(sizes):
        ones = dict.fromkeys(mesh, 1)
        if tuple(ones) not in twins:
            tell(f"one rank: {steps} steps, twice")
            twins[tuple(ones)] = _twin(replace(job, make=twin or make, sizes=ones), runtime, findings, notes)
            if any(finding.kind == "seed" for finding in findings):
                break
        right, draws = twins[tuple(ones)]
        following = sizes[(at + 1) % len(sizes)]
        onto = following if at + 1 < len(sizes) or (len(sizes) > 1 and {*following} == {*mesh}) else ones
        alone = replace(job, make=twin or make, sizes=ones, without_draws=draws)
        one_mesh(replace(job, sizes=mesh, without_draws=draws), alone, right, onto, bool(checkpoint), runtime,
                 findings, notes, ran, tell)  # fmt: skip
    return Report(WHERE, findings, notes, ran)


def one_mesh(
    job: Job, twin: Job, right: Seen, onto: Mapping[str, int], saves: bool, runtime: Runtime, findings: list[Finding],
    notes: list[str], ran: list[str], tell: Callable[[str], object],
) -> None:  # fmt: skip
    """One mesh from the first step on, and another one from half way on, unless the first one is wrong."""
    half = max(1, job.last // 2)

    def judge(job: Job, seen: Sequence[Seen], after: str = "") -> Judge:
        return Judge(right, seen, job.sizes, after, Again(job, twin, lambda job: _launched(job, "in-process")))

    with tempfile.TemporaryDirectory() as folder:
        tell(f"{dict(job.sizes)}: {job.last} steps")
        if saves:
            job = replace(job, half=half, folder=f"{folder}/checkpoint")
        failed: list[Finding] = []
        seen = _run(job, runtime, failed)
        unsaved = replace(job, half=-1)
        for less in (unsaved,) * saves + (replace(unsaved, last=1),) * (job.last > 1):
            if seen is None:  # what cannot be saved, or not be used by the next step, may be what a wrong step has made
                saves, seen, job = False, _run(less, runtime, []), less
        if seen is None:
            findings += failed
            return
        found = _judged(judge(job, seen), seen, job, findings, notes)
        ran.append(f"{dict(job.sizes)}: {job.last} steps")
        findings += [] if found else failed
        if not saves or found:
            return
        after = f"after a checkpoint of {dict(job.sizes)}"
        tell(f"{dict(onto)}: {job.last - half} steps {after}")
        later = replace(job, sizes=onto, first=half, half=-1)
        seen = _run(later, runtime, findings, after)
        if seen is not None:
            _judged(judge(later, seen, after), seen, later, findings, notes)
            ran.append(f"{dict(onto)}: {job.last - half} steps {after}")


def _judged(judge: Judge, seen: Sequence[Seen], job: Job, findings: list[Finding], notes: list[str]) -> bool:
    found = judge.findings()
    if job.without_draws:
        found += dropout_findings(seen, job.sizes)
    findings += found
    notes += [note for note in judge.notes if note not in notes]
    return bool(found)


def _twin(job: Job, runtime: Runtime, findings: list[Finding], notes: list[str]) -> tuple[Seen, bool]:
    """What one rank sees, and whether it draws random numbers of its own."""
    (first,) = _launched(job, runtime)
    draws = first.drew
    if draws:
        job = replace(job, without_draws=True)
        (first,) = _launched(job, runtime)
    (again,) = _launched(job, runtime)
    drawn = sorted({(each.what, each.line) for moment in first.moments.values() for each in moment.drawn})
    for what, line in drawn:
        hidden = what.split()[0] in ("dropout", "alpha_dropout") or "dropout" in what
        more = (
            "the loop was run without it, and masks were judged apart"
            if hidden
            else "results may differ for that alone"
        )
        note = f"{what} at {line} is drawn by each rank for itself, outside of mc.rng: {more}."
        notes += [] if note in notes else [note]
    number = next((n for n, moment in first.moments.items() if _overflows(moment)), None)
    if number is not None:
        what = f"the loss of step {number}, or a gradient, is not finite on one rank, so that nothing can be compared."
        fix = "dtype=torch.float64, or an optimiser whose eps is not zero in this dtype"
        findings.append(Finding("seed", first.steps_at, text(WHERE, what, fix=fix)))
        return first, draws
    judge = Judge(first, [again], job.sizes)
    unlike = judge.findings()
    if unlike:
        what = "two runs on one rank are not the same, so that nothing can be compared"
        head = unlike[0].text.split("\n")
        got = head[0].partition(": ")[2] + (f"; {head[1].partition('got: ')[2]}" if len(head) > 1 else "")
        fix = "make everything of torch's random numbers, which have a seed here, or of numbers that do not change"
        findings.append(Finding("seed", unlike[0].line, text(WHERE, f"{what}.", got=got, fix=fix)))
    return first, draws


def _overflows(moment: Moment) -> bool:
    """Whether its loss, or a gradient, is not finite."""
    parts = (part for update in moment.updates for part in update.gradients.values() if part is not None)
    numbers = [box for part in parts for _, box in part.boxes] + ([] if moment.loss is None else [moment.loss])
    return not all(bool(x.isfinite().all()) for x in numbers)


def _launched(job: Job, runtime: Runtime) -> list[Seen]:
    ranks = math.prod(job.sizes.values())
    if runtime == "processes" and ranks > 1:
        return launch(train_in_process, ranks, (job,), runtime=runtime)
    with default_dtype(job.dtype):
        return launch(train, ranks, (job,))


def _run(job: Job, runtime: Runtime, findings: list[Finding], after: str = "") -> list[Seen] | None:
    try:
        return _launched(job, runtime)
    except Exception as error:
        line = _line_of(error)
        what = f"the loop fails on {dict(job.sizes)}{f', {after}' if after else ''}, and not on one rank."
        said = f"{type(error).__name__}: {error}"
        findings.append(Finding("error", line, text(WHERE, what, got=said, fix=f"see {line}" if line else "")))
        return None


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's in a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    return str(CallSite(frames[-1].filename, frames[-1].lineno or 0)) if frames else ""


# ---------------------------------------------------------------------------------------------------- what was given


def _checked(
    make: object, batches: object, steps: object, meshes: object, twin: object, checkpoint: object, dtype: object,
    seed: object, runtime: object,
) -> list[dict[str, int]]:  # fmt: skip
    for name, fn in {"make": make, "twin": twin}.items():
        if not callable(fn) and not (name == "twin" and fn is None):
            fail(WHERE, f"{name} is not callable but {type(fn).__name__}.",
                 fix="a function of a mesh that gives module, optimizer and step")  # fmt: skip
    if not isinstance(batches, Sequence) or isinstance(batches, str) or not batches:
        fail(
            WHERE, "batches is no list of batches.", got=type(batches).__name__, fix="a list with a batch for each step"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        fail(
            WHERE, f"steps={steps!r} is not a positive int.", fix="2 or more: later steps see what the first have left"
        )
    if not isinstance(checkpoint, bool) and not (
        isinstance(checkpoint, tuple) and len(checkpoint) == 2 and all(map(callable, checkpoint))
    ):
        fail(WHERE, f"checkpoint={checkpoint!r} is no bool and no pair of functions.",
             fix="True, False, or (save, load), functions of (path, module, optimizer)")  # fmt: skip
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        fail(WHERE, f"dtype={dtype!r} is no floating dtype.", fix="torch.float64, torch.float32 or None")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        fail(WHERE, f"seed={seed!r} is no int from 0 to 2**31 - 1.", fix="seed=0")
    if runtime not in ("in-process", "processes"):
        fail(WHERE, f"no runtime {runtime!r}.", fix="'in-process' or 'processes'")
    found = checked_meshes(WHERE, meshes)
    if current_rank() is not None or world.under_launcher():
        fail(WHERE, "it starts ranks of its own, and this is one.", fix="call it outside of mc.launch and torchrun")
    return found


def checked_meshes(where: str, meshes: object) -> list[dict[str, int]]:
    """A list of mappings of axis names to sizes, smallest first."""
    fix = 'meshes={"dp": 2, "tp": 2}, or a list of such'
    if isinstance(meshes, Mapping):
        meshes = [meshes]
    if not isinstance(meshes, Sequence) or isinstance(meshes, str) or not meshes:
        what = (
            "make is given a mesh, and nothing says of which axes." if meshes is None else "meshes is no list of them."
        )
        fail(where, what, got=repr(meshes), fix=fix)
    for mesh in meshes:
        good = isinstance(mesh, Mapping) and mesh and all(
            isinstance(name, str) and name.isidentifier() and isinstance(size, int) and not isinstance(size, bool)
            and size > 0 for name, size in mesh.items()
        )  # fmt: skip
        if not good:
            fail(where, "a mesh is a mapping of axis names to positive sizes.", got=repr(mesh), fix=fix)
    return sorted((dict(mesh) for mesh in meshes), key=lambda mesh: math.prod(mesh.values()))
