"""verify: a program held against its twin on one device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshcomm._torch import tree_flatten
from meshcomm.collectives.check import differentiable
from meshcomm.errors import MeshError, described, fail, shape_text, text
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.spmd.shard_map.specs import in_strings
from meshcomm.verifying import meshes as sizes
from meshcomm.verifying.asked import dtypes_of, fits, group_size, in_order, kinds_of
from meshcomm.verifying.blame.checker import refused
from meshcomm.verifying.blame.followed import follow
from meshcomm.verifying.blame.instead import gathered_as_one
from meshcomm.verifying.blame.line import Blame
from meshcomm.verifying.blame.nudges import last_wrong
from meshcomm.verifying.blame.partings import is_own, line_of
from meshcomm.verifying.blame.story import Story
from meshcomm.verifying.blame.told import story_of
from meshcomm.verifying.blame.trail import stop_of
from meshcomm.verifying.compare import Difference, difference, explained, scale_of, times
from meshcomm.verifying.derivatives import KINDS, Derived, Reference, job_of, reference_of
from meshcomm.verifying.finite import held_against_differences
from meshcomm.verifying.program import WHERE, OnRank, Program, in_group
from meshcomm.verifying.report import Finding, Report
from meshcomm.verifying.schedules import Heard, runs_alike

__all__ = ["verify"]


@Op("verify", composed=True)
def verify(
    fn: Callable[..., Any],
    *inputs: Any,
    in_specs: Any,
    out_specs: Any,
    meshes: Any = None,
    twin: Callable[..., Any] | None = None,
    derivatives: Sequence[str] = KINDS,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    schedules: int = 4,
    seed: int = 0,
) -> Report:
    """Hold a program of one rank against the same program on one device: values, and derivatives of two orders.

    ::

        global inputs ──► twin ───────────────────► value, gradient, tangent, second derivative
              │ in_specs                                        │ out_specs, in_specs
              ▼                                                 ▼ the part of each rank
        parts on ranks ─► fn, as it is written ───► equal?   else: the line to blame, the factor, what to write

    Cotangents and tangents are global values that are drawn once, and each rank takes its own part, so what a rank
    gives must be its own part of what the twin gives. That one rule covers a missing :func:`pvary`, what is reduced
    twice or not at all, a loss that is scaled wrongly, and an output that is not what its layout says.

    Args:
        fn: the function of one rank's parts, as for :func:`shard_map`; it is run as it is written, with no checker
            that mends it. Tensors that require grad and that it closes over, parameters of modules too, are inputs
            that are invariant along every axis. What it draws at random has to be drawn under :func:`rng`.
        inputs: the global values that it takes: pytrees of tensors, modules, anything else. Derivatives are taken by
            those tensors that require grad, and by all that can be differentiated if none does. Nothing of the
            user's is changed.
        in_specs: a layout per input, or one for all; for a pytree a tree of layouts, as in :func:`shard_map`. None is
            no tensor. A mapping gives them by the names of the parameters.
        out_specs: the layouts of what it returns, likewise.
        meshes: on which meshes, each a mapping of axis names to sizes, or a :class:`Mesh`; an axis of the specs that
            one lacks has size 1. None: each axis of the specs at sizes 2 and 3, and each pair of them at 2 x 2; those
            that do not divide the inputs are skipped, which the report says. Smallest first, and no further than to
            the first on which something is wrong.
        twin: the same function of global values, without a mesh. None: ``fn`` itself on a mesh of ones, whose
            gradient is then held against finite differences.
        derivatives: which of ``"vjp"``, ``"jvp"`` and ``"second"``, the VJP of the VJP, beside the value.
        dtypes: in which dtypes; floating point inputs and what is closed over are cast. Tolerances follow from them:
            4 eps^(2/3) of the largest element.
        schedules: in how many drawn orders the ranks of the smallest mesh take turns, where what is heard (``done()``,
            time-outs, threads, Python objects that ranks share) can make a result depend on it; else in one more. 0:
            none. In a running group none is drawn.
        seed: of all that is drawn.

    Returns: a :class:`Report`, the same on every rank. ``.check()`` raises what it found.

    Cost: outside of ranks all of them run in this process. In a running group, of processes or threads, the first
        ranks of it run each mesh that is small enough, and learn what all have.

    Raises:
        MeshError: before anything runs: specs of another structure than the inputs; no layout; meshes that are no
            meshes, or that do not divide the inputs. Before any mesh runs: a twin whose outputs are others, in number,
            shape or dtype, than those of ``fn`` on one device.
        Exception: what ``fn`` raises on one device. What it raises on a mesh alone is a finding.

    Example:
        >>> import torch, meshcomm as mc
        >>> def loss(x, w):
        ...     return mc.all_reduce((x @ w).square().sum(), "dp")
        >>> x, w = torch.randn(6, 3), torch.randn(3, 2)
        >>> report = mc.verify(loss, x, w, in_specs=("(dp b) d", "d e"), out_specs="")
        >>> report.ok, report.findings[0].kind
        (False, 'vjp')
        >>> def mended(x, w):
        ...     return mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
        >>> mc.verify(mended, x, w, in_specs=("(dp b) d", "d e"), out_specs="").ok
        True

    Source: JAX's ``check_grads`` to the second order; the adjoint tests of spmd_types; here against the same program
        on another mesh.
    """
    call = _Call(fn, inputs, in_specs, out_specs, meshes, twin, derivatives, dtypes, schedules, seed)
    call.checked()
    return call.run()


class _Call:
    """One call: what was asked for, and what is known so far."""

    def __init__(
        self, fn: Any, inputs: tuple[Any, ...], in_specs: Any, out_specs: Any, meshes: Any, twin: Any,
        derivatives: Any, dtypes: Any, schedules: Any, seed: Any,
    ) -> None:  # fmt: skip
        if not callable(fn):
            fail(WHERE, f"fn is not callable but {type(fn).__name__}.", fix="a function of one rank's parts")
        if twin is not None and not callable(twin):
            fail(WHERE, f"twin is not callable but {type(twin).__name__}.", fix="the same function of global values")
        self.fn, self.inputs, self.twin, self.seed = fn, inputs, twin, seed
        if isinstance(schedules, bool) or not isinstance(schedules, int) or schedules < 0:
            fail(
                WHERE, f"schedules={schedules!r} is no number of runs.", fix="how many orders of the ranks; 0 for none"
            )
        self.schedules = schedules
        self.kinds = kinds_of(derivatives)
        self.dtypes = dtypes_of(dtypes)
        if isinstance(seed, bool) or not isinstance(seed, int):
            fail(WHERE, f"seed={seed!r} is not an int.", fix="an int")
        self.in_specs = in_order(fn, in_strings(in_specs), len(inputs))
        self.out_specs = in_strings(out_specs)
        self.axes = sizes.axes_of((self.in_specs, self.out_specs), WHERE)
        self.notes: list[str] = []
        self.ran: list[str] = []
        self.findings: list[Finding] = []
        self.heard: Heard | None = None
        if meshes is None and not self.axes:
            fail(
                WHERE,
                "no axis stands in the specs, and meshes is None.",
                fix='meshes=[{"dp": 2}], or layouts with axes',
            )
        asked = sizes.of_axes(self.axes) if meshes is None else sizes.given(meshes, WHERE)
        ones = dict.fromkeys([*(axis for shape in asked for axis in shape), *self.axes], 1)
        self.ones = ones
        self.shapes = [shape | {axis: 1 for axis in ones if axis not in shape} for shape in asked]
        self.exact = meshes is not None

    def checked(self) -> None:
        """All that can be wrong before anything runs; meshes that do not fit are skipped where nobody named them."""
        program = self.program(self.dtypes[0])
        fitting, world = [], group_size()
        for shape in self.shapes:
            total = torch.Size(shape.values()).numel()
            if world is not None and total > world:
                self.notes.append(f"{_named(shape)} was skipped: the group has {world} ranks.")
                continue
            try:
                fits(program, shape)
                fitting.append(shape)
            except MeshError as error:
                if self.exact:
                    raise
                self.notes.append(f"{_named(shape)} was skipped: {_said(error)}")
        if not fitting:
            fail(WHERE, "none of the meshes can be run.", got="; ".join(self.notes), fix="inputs that they divide")
        self.shapes = fitting

    def program(self, dtype: torch.dtype) -> Program:
        """The function with its inputs in one dtype."""
        return Program(self.fn, self.inputs, self.in_specs, self.out_specs, twin=self.twin, dtype=dtype, seed=self.seed)

    def run(self) -> Report:
        """All dtypes, all meshes; no further than to what is wrong."""
        for dtype in self.dtypes:
            self.in_dtype(self.program(dtype))
            if self.findings:
                break
        return Report(WHERE, tuple(self.findings), tuple(dict.fromkeys(self.notes)), tuple(self.ran))

    def in_dtype(self, program: Program) -> None:
        """All meshes in one dtype."""
        began = time.perf_counter()
        ones = program.mesh(self.ones)
        reference = reference_of(program, ones, self.kinds)
        if self.twin is not None:
            _of_one_structure(reference, ones)
        kinds = self.known(reference, ones)
        if self.twin is None and "vjp" in kinds and program.dtype == torch.float64:
            wrong = held_against_differences(reference, ones)
            if wrong:
                self.findings.append(wrong)
        for shape in self.shapes:
            if self.findings:
                return
            self.on_mesh(reference, shape, program.mesh(shape), ones, kinds)
        if not self.findings and self.schedules and not in_group():
            self.in_any_order(reference, kinds)
        name = str(program.dtype).removeprefix("torch.")
        took = time.perf_counter() - began
        self.ran.append(
            f"{', '.join(map(_named, self.shapes))}: {', '.join(('value', *kinds))} in {name}; {took:.2g} s"
        )

    def smallest(self) -> Mapping[str, int] | None:
        """The mesh on which the ranks run in other orders too."""
        return next((shape for shape in self.shapes if any(n > 1 for n in shape.values())), None)

    def ran_on(self, program: Program, shape: Mapping[str, int], mesh: Mesh, job: Any) -> list[Derived]:
        """What the job gives on each rank; of the smallest mesh it is heard on what it can depend."""
        if not self.schedules or in_group() or shape is not self.smallest():
            return program.run(mesh, job)
        self.heard = Heard(self.fn)
        return self.heard.run(lambda: program.run(mesh, job), lambda found: [[*each.result.tensors] for each in found])

    def in_any_order(self, reference: Reference, kinds: Sequence[str]) -> None:
        """The smallest mesh, whoever of the ranks goes first."""
        shape = self.smallest()
        if shape is None:
            return
        program, mesh = reference.program, reference.program.mesh(shape)
        made, self.heard = self.heard, None
        for wanted in ((), ("vjp",)):  # gradients where the values say that an order may count
            job = job_of(reference.directions, [kind for kind in kinds if kind in wanted])

            def run(job: Callable[[OnRank], Derived] = job) -> list[list[Tensor]]:
                return [[*each.result.tensors, *each.by.get("vjp", ())] for each in program.run(mesh, job)]

            found = runs_alike(
                run, self.fn, schedules=self.schedules, seed=self.seed, where=WHERE, on=_named(shape),
                made=None if wanted else made,
            )  # fmt: skip
            if found.findings or not any("can depend on the order" in note for note in found.notes):
                break
        self.findings += found.findings
        self.notes += found.notes

    def known(self, reference: Reference, ones: Mesh) -> list[str]:
        """The derivatives that the twin has; the report says which it has not, and what proves nothing."""
        derived = reference.derived
        for kind, why in derived.failed.items():
            self.notes.append(f"{_KIND[kind]} was not compared: {why}")
        kinds = [kind for kind in self.kinds if kind in derived.by and kind not in derived.failed]
        if derived.draws:
            self.notes.append(_DRAWS)
        if self.kinds and not reference.program.targets:
            self.notes.append("nothing can be differentiated: no input is a floating point tensor.")
        elif self.kinds and not derived.live:
            self.stopped(reference, ones)
            return []
        for i, leaf in enumerate(reference.program.targets):
            if "vjp" in kinds and not derived.by["vjp"][i].any() and leaf.value.numel():
                self.notes.append(f"the gradient of {leaf.label} is zero everywhere.")
        return kinds

    def stopped(self, reference: Reference, ones: Mesh) -> None:
        """No output has a gradient: a note, or a finding where an input was said to require grad, and is detached."""
        what = "no output depends differentiably on an input, as autograd has it"
        cotangents = reference.directions.cotangents
        stop = None
        if self.twin is None and cotangents:
            stop = stop_of(reference.program.run(ones, lambda rank: follow(rank, cotangents))[0].steps)
        asked = any(isinstance(x, Tensor) and x.requires_grad for x in tree_flatten(self.inputs)[0])
        if stop is not None and asked and not stop.off and set(self.kinds) & {"vjp", "second"}:
            got = f"gradients stop at {stop.name}; an input requires grad"
            fix = "mend it; if it is meant, derivatives=(), or inputs that do not require grad"
            self.findings.append(Finding("vjp", stop.line, text(WHERE, f"{what}.", got=got, fix=fix)))
            return
        where = "A detach, or torch.no_grad?" if stop is None else f"Gradients stop at {stop.name}."
        self.notes.append(f"{what}: the values alone were compared. {where}")

    # ------------------------------------------------------------------------------------------- on one mesh

    def on_mesh(
        self, reference: Reference, shape: Mapping[str, int], mesh: Mesh, ones: Mesh, kinds: Sequence[str]
    ) -> None:
        """Run it there and compare; what is found is added."""
        program = reference.program
        try:
            found = self.ran_on(program, shape, mesh, job_of(reference.directions, kinds))
        except Exception as error:
            self.findings.append(_raised(error, shape, reference, mesh, ones))
            return
        forms = [each.result.form for each in found]
        right = reference.derived.result.form
        if any(form != right for form in forms):
            rank = next(i for i, form in enumerate(forms) if form != right)
            what = f"the outputs are others on rank {rank} of {_named(shape)}."
            self.findings.append(Finding("value", "", text(WHERE, what, got=f"{forms[rank]}; on one device {right}")))
            return
        for kind in ("value", *kinds):
            wrong = list(differences(reference, found, mesh, kind))
            if wrong:
                self.findings.append(_explained(reference, mesh, ones, kind, wrong))
                return


_MOST_RANKS = 16
_DRAWS = "random numbers are drawn outside of mc.rng, which are others on each rank and on one device."
_KIND = {"vjp": "the VJP", "jvp": "the JVP", "second": "the VJP of the VJP", "value": "the value"}


def differences(
    reference: Reference, found: Sequence[Derived], mesh: Mesh, kind: str
) -> Iterable[tuple[int, Difference]]:
    """What is off: which value, and how on the first rank where it is."""
    expected, places = reference.expected(kind), coordinates(mesh)
    scale = scale_of(leaf.value for leaf in expected) or scale_of(leaf.value for leaf in reference.program.cut)
    program = reference.program
    parts = [program.parts(mesh, expected, place) for place in places]
    for i, leaf in enumerate(expected):
        of = scale_of([leaf.value])
        for rank, each in enumerate(found):
            values = each.result.tensors if kind == "value" else each.by[kind]
            wrong = difference(leaf.label, rank, values[i], parts[rank][i], scale, of=of)
            if wrong is not None:
                yield i, wrong
                break
    if kind == "value":
        right = reference.derived.result.rest
        for rank, each in enumerate(found):
            for (label, got), (_, want) in zip(each.result.rest, right, strict=True):
                if not _same(got, want):
                    yield -1, Difference(label, rank, float("nan"), f"{got!r} where {want!r} is right", None)


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return a is b


def _of_one_structure(reference: Reference, ones: Mesh) -> None:
    """MeshError where the twin gives other outputs than fn does on one device, or other shapes or dtypes; fn need not
    run there: what it gives on a mesh is held against the twin's then.
    """
    twin = reference.derived.result
    try:
        mine = reference.program.run(ones, lambda rank: rank(rank.targets))[0]
    except Exception:
        return
    if mine.form != twin.form:
        fail(WHERE, "the twin returns another structure.", got=f"fn: {mine.form}; twin: {twin.form}",
             fix="the outputs of fn, as global values, in the same tree")  # fmt: skip
    for label, x, y in zip(mine.labels, mine.tensors, twin.tensors, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            got = f"fn on one device: {shape_text(x.dtype, x.shape)}; twin: {shape_text(y.dtype, y.shape)}"
            fail(WHERE, f"the twin returns another {label}.", got=got, fix="the same shapes and dtypes")


def _explained(
    reference: Reference, mesh: Mesh, ones: Mesh, kind: str, wrong: Sequence[tuple[int, Difference]]
) -> Finding:
    i, first = wrong[0]
    blame = _blamed(reference, mesh, ones, kind, i, first)
    sizes_of = [(axis, n) for axis, n in mesh.shape.items() if n > 1]
    why = explained(first.factor, sizes_of)
    chance = _by_chance(reference, mesh, kind, i, first) if why else ""
    if chance:
        blame, why = blame._replace(told=(chance, *(each for each in blame.told if each != why))), ""
    told = [first.said, *([why] if why and why not in blame.told else []), *blame.told]
    if kind != "value" and not any(each.startswith("result right") for each in blame.told):
        told.insert(1, "result right")
    if len(wrong) > 1:
        told.append("wrong too: " + ", ".join(each.label for _, each in wrong[1:4]))
    off = "" if first.off != first.off else f" by {first.off:.2g}"
    what = f"{first.label} is off{off} on rank {first.rank} of {_named(mesh.shape)}."
    return Finding(kind, blame.line, text(WHERE, what, got="; ".join(told), fix=blame.fix))


def _by_chance(reference: Reference, mesh: Mesh, kind: str, i: int, first: Difference) -> str:
    """What the factor is on a mesh on which the axis of its size has another one, if it does not follow it there."""
    program, factor = reference.program, first.factor
    axis = next((axis for axis, n in mesh.shape.items() if explained(factor, [(axis, n)])), None)
    if axis is None or factor is None or i < 0:
        return ""
    n, world = mesh.shape[axis], group_size()
    for size in (2 * n, n + 1, n - 1):
        shape = {**mesh.shape, axis: size}
        if size < 2 or torch.Size(shape.values()).numel() > (_MOST_RANKS if world is None else world):
            continue
        with contextlib.suppress(Exception):  # it does not divide, or fn does not run there
            fits(program, shape)
            other = program.mesh(shape)
            found = program.run(other, job_of(reference.directions, [kind] if kind != "value" else []))
            wrong = dict(differences(reference, found, other, kind)).get(i)
            there = 1.0 if wrong is None else wrong.factor
            wanted = factor * (size / n) ** (round(math.log(factor, n)) if factor > 0 else 0)
            if there is None or abs(there - wanted) < 1e-3 * wanted:
                return ""
            return f"on {_named(shape)} it is {times(there)}, so that it is not the size of {axis!r}"
    return ""


def _blamed(reference: Reference, mesh: Mesh, ones: Mesh, kind: str, i: int, first: Difference) -> Blame:
    program, found = reference.program, None
    if program.twin is not None:
        alone = _on_one(reference, ones, kind, i)
        if alone is not None or mesh.size == 1:
            return alone or Blame(fix="mend fn or its twin: on one device they differ")
    if kind == "vjp":
        with contextlib.suppress(Exception):  # the other ways to blame a line stand without it
            instead = gathered_as_one(reference, mesh)
            if instead is not None:
                return instead
    if kind != "value":
        found = refused(program, mesh)
    if found is not None and kind == "vjp":
        with contextlib.suppress(Exception):  # what the checker says stands without it
            back = story_of(reference, ones, mesh).right_back_to(program.targets[i].label)
            found = found._replace(told=(*([f"gradients right back to {back}"] if back else []), *found.told))
    if found is None:
        try:
            found = _followed(reference, story_of(reference, ones, mesh, kind), kind, i)
        except Exception as error:
            found = Blame("", (f"its steps could not be followed: {described(error)}",))
    if kind == "value" and (found is None or not found.line):
        also = refused(program, mesh)
        if also is not None:
            found = also
    return found or Blame()


def _followed(reference: Reference, story: Story, kind: str, i: int) -> Blame | None:
    """Whose fault it is by the steps of the ranks; ``i``: which value of this kind is wrong."""
    ends = [at for at, leaf in enumerate(reference.outputs) if differentiable(leaf.value)]
    targets = reference.program.targets
    if kind == "value":
        return story.blame_value(i) if i >= 0 else None
    if kind == "jvp":
        return story.blame_value(ends[i])
    if kind == "vjp":
        return story.blame_gradient(targets[i].label, partial(last_wrong, reference, story.mesh))
    return story.blame_value(ends[i - len(targets)]) if i >= len(targets) else story.blame_second(targets[i].label)


def _on_one(reference: Reference, ones: Mesh, kind: str, i: int) -> Blame | None:
    """Whether the function differs from its twin on one device too, and where its gradients stop there."""
    if i < 0:
        return None
    program = reference.program
    try:
        found = program.run(ones, job_of(reference.directions, [kind] if kind != "value" else []))[0]
        got = found.result.tensors if kind == "value" else found.by[kind]
        right = [leaf.value for leaf in reference.expected(kind)]
        if difference("", 0, got[i], right[i], scale_of(right), of=scale_of([right[i]])) is None:
            return None
        stop = None
        if kind != "value" and not got[i].any():
            stop = stop_of(program.run(ones, lambda rank: follow(rank, reference.directions.cotangents))[0].steps)
    except Exception:  # it need not run on one device
        return None
    told = ("on one device too, so that it is no mistake of communication",)
    if stop is not None:
        return Blame(stop.line, (*told, f"gradients stop at {stop.name}"), f"mend {stop.name}, or the twin")
    return Blame("", told, "mend fn or its twin: on one device they differ")


def _raised(error: Exception, shape: Mapping[str, int], reference: Reference, mesh: Mesh, ones: Mesh) -> Finding:
    """What fn raises on a mesh alone."""
    blame, line = Blame(), line_of(error)
    if not is_own(error):
        with contextlib.suppress(Exception):  # then the line of the error has to do
            blame = story_of(reference, ones, mesh, to_error=True).blame_error(error)
    what = f"{_named(shape)} raises {type(error).__name__}, and one device does not."
    got = "; ".join((str(error).replace("\n", "\n       "), *blame.told))
    return Finding("error", blame.line or line, text(WHERE, what, got=got, fix=blame.fix))


def _named(shape: Mapping[str, int]) -> str:
    """``{'dp': 2}``: axes of one rank are left out."""
    return str({axis: n for axis, n in shape.items() if n > 1} or dict(shape))


def _said(error: Exception) -> str:
    """What is wrong, without who says so."""
    return str(error).partition(": ")[2].partition("\n")[0]
