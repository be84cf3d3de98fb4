"""What is wrong with a training loop, in words: the first step at which something is off, what, and most likely why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshcomm.errors import text
from meshcomm.verifying.blame.line import Blame
from meshcomm.verifying.report import Finding
from meshcomm.verifying.training import compare
from meshcomm.verifying.training.compare import Off
from meshcomm.verifying.training.seen import START, WHERE, Moment, Parts, Seen, Sent

_SMALL = {"gradient": 1e-4, "state": 1e-4, "parameter": 0.1}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class Again(Protocol):
    """What runs a loop once more: :class:`lines.Again`."""

    def blame(self, number: int) -> Blame:
        """Of the first thing in this step that is wrong."""

    def written(self, number: int, names: Sequence[str]) -> list[str]:
        """The lines that have written these."""

    def elsewhere(self, axis: str, number: int) -> tuple[dict[str, int], Sequence[Seen]] | None:
        """The loop on a mesh on which this axis has another size."""


def _dtypes(seen: Seen) -> Iterator[torch.dtype]:
    for moment in seen.moments.values():
        yield from (part.dtype for part in moment.parameters.values() if part is not None)
        if moment.loss is not None:
            yield moment.loss.dtype


class Judge:
    """Holds the ranks of one mesh against one rank."""

    def __init__(
        self, twin: Seen, ranks: Sequence[Seen], sizes: Mapping[str, int], after: str = "", again: Again | None = None
    ) -> None:
        """``after``: what has happened before the first step, such as a checkpoint that was loaded. ``again``: runs it
        once more, for a line, or to see whether a factor is one by chance.
        """
        self.twin, self.ranks, self.sizes, self.after, self.again = twin, ranks, sizes, after, again
        self.near = compare.nearness(_dtypes(twin))
        self.notes: list[str] = []

    def findings(self) -> list[Finding]:
        """Of the first step at which something is off."""
        for number in sorted(self.ranks[0].moments):
            found = self._at(number)
            if found:
                return found
        return []

    # ------------------------------------------------------------------------------------------------ one moment

    def _at(self, number: int) -> list[Finding]:
        right, here = self.twin.moments[number], [each.moments[number] for each in self.ranks]
        if number == min(self.ranks[0].moments):
            return self._start(number, right, here)
        found = self._updates(number, right, here) or self._results(number, right, here)
        return [*self._loss(number, right, here, bool(found)), *found]

    def _start(self, number: int, right: Moment, here: Sequence[Moment]) -> list[Finding]:
        kind = "checkpoint" if self.after else "start"
        offs = self._off(number, [each.parameters for each in here], right.parameters, "parameter")
        what = "parameters" if offs else "states of the optimiser"
        if not offs and self.after:
            offs = self._off(number, [each.states for each in here], right.states, "state")
        if not offs:
            return []
        if self.after:
            why = f"{what} that were loaded {self.after} are not those that were saved after step {number}"
            fix = "save what all ranks have between them, and load this rank's parts: parallel.checkpoint.save and load"
        else:
            why = "parameters differ from one rank's before the first step"
            fix = ("make the whole module under one seed and make it parallel then, or give all ranks the values of "
                   "one: parallel.load_full_state_dict, mc.broadcast")  # fmt: skip
        first = self.ranks[0]
        return [self._told(kind, (first.loads_at if self.after else "") or first.made_at, why, offs, fix)]

    def _updates(self, number: int, right: Moment, here: Sequence[Moment]) -> list[Finding]:
        counts = sorted({len(each.updates) for each in here})
        wanted = len(right.updates)
        if counts != [wanted]:
            line = next((update.line for each in [*here, right] for update in each.updates), "")
            said = " or ".join(map(str, counts))
            what = f"optimizer.step() was called {said} times in step {number}, {wanted} on one rank"
            fix = "one update for each batch, however its rows are shared out"
            return [self._finding("update", line, what, "", fix)]
        for at, update in enumerate(right.updates):
            gradients = [each.updates[at].gradients for each in here]
            offs = self._off(number, gradients, update.gradients, "gradient")
            if offs:
                return [self._gradient(number, at, offs, gradients, update.gradients, here, right)]
        return []

    def _results(self, number: int, right: Moment, here: Sequence[Moment]) -> list[Finding]:
        offs = self._off(number, [each.parameters for each in here], right.parameters, "parameter")
        line = next((update.line for each in here for update in each.updates), "")
        if offs:
            return [self._parameter(number, line, offs, right, here)]
        offs = self._off(number, [each.states for each in here], right.states, "state")
        if offs:
            what = f"states of the optimiser differ after step {number}, parameters and gradients do not"
            fix = "look for who writes optimizer.state besides optimizer.step()"
            return [self._told("optimizer", line, what, offs, fix)]
        return []

    def _off(self, number: int, ranks: Sequence[Parts], right: Parts, kind: str) -> list[Off]:
        last = (lambda name: name.rpartition(".")[2]) if kind == "state" else (lambda name: "")
        wholes = compare.wholes(right)
        offs = compare.differences(ranks, wholes, _SMALL[kind], last)
        if offs and kind != "gradient":
            masks = self._noise(number)
            left = compare.differences(
                [compare.without(parts, wholes, masks) for parts in ranks], wholes, _SMALL[kind], last
            )
            dropped = {off.name for off in offs} - {off.name for off in left}
            if dropped and kind == "parameter" and self._noise(number - 1):  # such as a mean of what they were added to
                trained = {name for update in self.twin.moments[number].updates for name in update.gradients}
                left = [off for off in left if off.name in trained or off.missing]
            if dropped and not left and kind == "parameter":
                names = ", ".join(map(repr, sorted(dropped)))
                self._note(f"{names}: gradients are zero but for rounding, of which the optimiser makes updates that "
                           "are others on each mesh: not compared, nor buffers that follow from them.")  # fmt: skip
            return left
        return offs

    def _noise(self, number: int) -> dict[str, Tensor]:
        """What has had no gradient but rounding in a step up to this one."""
        found: dict[str, Tensor] = {}
        for at, moment in self.twin.moments.items():
            for update in moment.updates if at <= number else ():
                for name, mask in compare.noise(compare.wholes(update.gradients), _SMALL["gradient"]).items():
                    found[name] = found[name] | mask if name in found else mask
        return found

    # ---------------------------------------------------------------------------------------------------- the loss

    def _loss(self, number: int, right: Moment, here: Sequence[Moment], more: bool) -> list[Finding]:
        wanted, losses = right.loss, [each.loss for each in here]
        if wanted is None or all(loss is None for loss in losses):
            if (wanted is None) != all(loss is None for loss in losses):
                self._note("losses were not compared: step gives none on some mesh.")
            return []
        got = [loss.double() for loss in losses if loss is not None]
        near = max(
            compare.tolerance(wanted.dtype), *(compare.tolerance(x.dtype) for x in losses if x is not None), 1e-7
        )
        size = max(wanted.abs().max().item(), 1e-30)
        if all(x.shape == wanted.shape and (x - wanted).abs().max().item() <= near * size for x in got):
            return []
        if all(x.shape == wanted.shape for x in got):
            mean = torch.stack(got).mean(0)
            if (mean - wanted).abs().max().item() <= near * size:
                self._note("step gives each rank's own loss; the mean over the ranks is that of one rank.")
                return []
            shares = [mean * math.prod(self.sizes[axis] for axis in axes) for axes in compare.subsets(self.sizes)]
            alike = all(torch.equal(x, got[0]) for x in got)
            if not more and not alike and any((x - wanted).abs().max().item() <= near * size for x in shares):
                self._note("step gives each rank's share of the loss; they add up to that of one rank.")
                return []
        factor = self._loss_factor(number)
        values = ", ".join(f"{x.tolist():.6g}" if not x.ndim else str(tuple(x.shape)) for x in got[:4])
        said = (
            f"{values}{', ...' if len(got) > 4 else ''}; {wanted.tolist():.6g} on one rank"
            if not wanted.ndim
            else values
        )
        known = factor is not None and (
            abs(factor) < 1e-9 or (factor > 0 and compare.axes_of(max(factor, 1 / factor), self.sizes, self.near))
        )
        why, fix = self._why_factor(factor, "the loss", number) if factor is not None and known else ("", "")
        blame = Blame() if self.again is None else self.again.blame(number)
        if blame.line:
            said, fix = "; ".join((said, *blame.told)), fix or blame.fix
        if not fix:
            fix = ("all that trained is right: look at what is returned" if not more and not self._later(number)
                   else "the parameters before it are right: look at the forward pass, for old copies of parameters, "
                        "batch norm of one rank's rows (parallel.convert_batch_norm), dropout, another "
                        "dtype, and the part of the batch that each rank takes")  # fmt: skip
        line = blame.line or self.ranks[0].steps_at
        return [self._finding("loss", line, f"the loss of step {number} is another one{why}", said, fix)]

    def _loss_factor(self, number: int) -> float | None:
        """All losses are so many times the one of one rank."""
        wanted, losses = self.twin.moments[number].loss, [each.moments[number].loss for each in self.ranks]
        got = [loss.double() for loss in losses if loss is not None]
        if wanted is None or not got or any(x.shape != wanted.shape for x in got):
            return None
        near = max(compare.tolerance(wanted.dtype), 1e-7)
        return compare.factor_of(torch.stack(got).flatten(), torch.stack([wanted.double()] * len(got)).flatten(), near)

    def _later(self, number: int) -> bool:
        """Whether the gradients of this step are other ones."""
        right, here = self.twin.moments[number], [each.moments[number] for each in self.ranks]
        return bool(self._updates(number, right, here))

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ----------------------------------------------------------------------------------------------- the gradients

    def _gradient(
        self, number: int, at: int, offs: list[Off], gradients: list[Parts], right: Parts, here: Sequence[Moment],
        twin: Moment,
    ) -> Finding:  # fmt: skip
        wholes, line = compare.wholes(right), here[offs[0].rank].updates[at].line
        what = f"gradients are other ones at optimizer.step() of step {number}"
        lacking = [off for off in offs if off.missing]
        if lacking:
            fix = "every rank differentiates the parameter that it has: mc.tie(loss, y) for what a rank does not use"
            return self._told("gradient", line, what, lacking, fix)
        clipped = self._clipped(offs, gradients, wholes)
        if clipped:
            fix = "parallel.clip_grad_norm(module, max_norm), by the norm of the whole model"
            return self._told("gradient", line, what + clipped, offs, fix)
        factor = compare.same_factor(offs)
        if factor is not None:
            why, fix = self._why_factor(factor, "the gradient", number)
            axes = self._following(factor, "the gradient", number)[0]
            sent = self._reductions(here, {axis for each in axes for axis in each}, right, offs)
            blamed = sent[-1].line if factor > 1 and axes and sent else line
            seen = f"; reduced at {self._lines(sent)}" if sent and axes else ""
            return self._told("gradient", blamed, what + why, offs, fix or "look at how the loss is scaled", seen)
        team = compare.unreduced(self.ranks, gradients, wholes, offs, self.sizes)
        if team:
            over = self._axes(team[0])
            fix = (f"mc.pvary what is replicated along {over} before it meets what differs, parallel.data_parallel, or "
                   f"all_reduce the gradients once")  # fmt: skip
            what += f": not reduced over {over}: the {team[1]} of the ranks' is right"
            return self._told("gradient", line, what, offs, fix)
        stale = self._stale(number, at, gradients, twin)
        if stale:
            return self._told("gradient", line, what + stale[0], offs, stale[1])
        untied = self._untied(offs)
        if untied:
            fix = "tie them again after the module was made parallel or copied, and before the optimiser is made"
            return self._told("gradient", self.ranks[0].made_at, what + untied, offs, fix)
        alike = self._alike(gradients, offs)
        blame = Blame() if self.again is None or not alike else self.again.blame(number)
        fix = ("ranks agree and no single factor is in it: where they have different numbers of rows or tokens, the "
               "mean of their means is not the mean: mc.weighted_mean(total, count, axis); or rows are used twice or "
               "not at all" if alike
               else "look for a missing mc.pvary with mc.check_vma('error') around the step")  # fmt: skip
        more = "; ".join(("", *blame.told)) if blame.line else ("" if alike else "; replicas disagree")
        return self._told("gradient", blame.line or line, what, offs, fix, more)

    def _untied(self, offs: Sequence[Off]) -> str:
        """Whether what is off is one parameter with several names on one rank, and several here."""
        names = {off.name for off in offs}
        for alias, name in self.twin.aliases.items():
            if {alias, name} <= names and any(alias in each.moments[max(each.moments)].parameters
                                              and alias not in each.aliases for each in self.ranks):  # fmt: skip
                return f": {alias!r} is {name!r} on one rank, and a parameter of its own here"
        return ""

    def _following(self, factor: float, what: str, number: int) -> tuple[list[tuple[str, ...]], str]:
        """The axes whose sizes make such a factor, and of which it follows the size on another mesh; and where not."""
        if factor <= 0:
            return [], ""
        choices = compare.axes_of(max(factor, 1 / factor), self.sizes, self.near)
        kept, seen = [], ""
        for axes in choices:
            other = None if self.again is None else self.again.elsewhere(axes[0], number)
            there, follows = None, factor
            if other is not None:
                judge = Judge(self.twin, other[1], other[0])
                there = judge._loss_factor(number) if what == "the loss" else judge._gradient_factor(number)
                more = other[0][axes[0]] / self.sizes[axes[0]]
                follows = factor * (more if factor > 1 else 1 / more)
            if other is None or there is None or compare.near_to(there, follows, self.near):
                kept.append(axes)
            else:
                alike = "and" if compare.near_to(there, factor, self.near) else f"{there:.4g} times it"
                seen = f", {alike} on {other[0]}{' too' * (alike == 'and')}: it does not follow the size of {axes[0]!r}"
        return kept, "" if kept else seen

    def _gradient_factor(self, number: int) -> float | None:
        """All gradients that are off are so many times those of one rank."""
        right, here = self.twin.moments[number], [each.moments[number] for each in self.ranks]
        for at, update in enumerate(right.updates):
            if any(len(each.updates) <= at for each in here):
                return None
            offs = self._off(number, [each.updates[at].gradients for each in here], update.gradients, "gradient")
            if offs:
                return compare.same_factor(offs)
        return 1.0

    def _why_factor(self, factor: float, what: str, number: int) -> tuple[str, str]:
        """What makes such a factor, and what to do."""
        if abs(factor) < 1e-9:
            fix = "nothing of the loss comes back to it: look for detach(), and for other ranks' part"
            return f": {what} is zero", fix
        said = f": {factor:.4g} times the right one"
        found, elsewhere = self._following(factor, what, number)
        more, less = (found, []) if factor > 1 else ([], found)
        if more or less:  # what it is but for rounding
            n = math.prod(self.sizes[axis] for axis in (more or less)[0])
            said = f": {n if more else 1 / n:.4g} times the right one"
        if more:
            fix = ("reduce once over each axis along which it varies: the adaptors and pvary have reduced gradients "
                   'already; with grads="mean" the loss is local, with grads="sum" reduce it yourself. The loss '
                   "of a microbatch that is not divided by their number has such a factor too")  # fmt: skip
            return f"{said}, reduced twice over {self._either(more)}", fix
        if less:
            said += f", a mean of what is a mean over {self._either(less)} already, or not summed over it"
            return said, 'divide once: with grads="sum" by the rows of all ranks, with grads="mean" by this rank\'s own'
        return said + elsewhere, "the same factor everywhere: look at how the loss, or what is accumulated, is scaled"

    def _clipped(self, offs: Sequence[Off], gradients: Sequence[Parts], right: Mapping[str, Tensor | None]) -> str:
        """Whether each rank has clipped by the norm of its own part."""
        norm, near = compare.norm_of_wholes(right), 1e-4
        near = max([near, *(compare.tolerance(x.dtype) / 10 for x in right.values() if x is not None)])
        by_rank = {rank: [off for off in offs if off.rank == rank] for rank in {off.rank for off in offs}}
        factors = {rank: compare.same_factor(group) for rank, group in by_rank.items()}
        norms = {rank: compare.norm_of(gradients[rank]) for rank in by_rank}
        if any(factor is None or factor < 1 for factor in factors.values()) or norm == 0:
            return ""
        if not any(abs(each - norm) <= near * norm for each in norms.values()):
            return ""
        if any(each > norm * (1 + near) for each in norms.values()):
            return ""
        return ": clipped by the local norm: each rank's part has the norm that the whole should have"

    def _stale(self, number: int, at: int, gradients: Sequence[Parts], twin: Moment) -> tuple[str, str] | None:
        before = self.twin.moments.get(number - 1)
        if at or before is None or not before.updates:
            return None
        last, now = compare.wholes(before.updates[-1].gradients), compare.wholes(twin.updates[0].gradients)
        if not compare.differences(gradients, last, _SMALL["gradient"]):
            return f": they are those of step {number - 1}", "optimizer.step() runs before the gradients are reduced"
        both: dict[str, Tensor | None] = {}
        for name, x in now.items():
            old = last.get(name)
            both[name] = None if x is None or old is None else x + old
        if not compare.differences(gradients, both, _SMALL["gradient"]):
            return f": those of step {number - 1} are still in them", "optimizer.zero_grad() on every rank, every step"
        return None

    def _alike(self, ranks: Sequence[Parts], offs: Sequence[Off]) -> bool:
        """Whether ranks that have the same part have it alike."""
        for name in {off.name for off in offs}:
            first: dict[tuple[tuple[int, ...], ...], Tensor] = {}
            for parts in ranks:
                part = parts.get(name)
                if part is not None:
                    x = compare.flat(part)
                    other = first.setdefault(tuple(offsets for offsets, _ in part.boxes), x)
                    if other.shape != x.shape or not torch.allclose(other, x, rtol=1e-6, atol=0):
                        return False
        return True

    def _reductions(
        self, here: Sequence[Moment], axes: set[str], right: Parts, offs: Sequence[Off]
    ) -> list[Sent]:  # fmt: skip
        """Of what is as large as one of these gradients, or larger; those of backward first."""
        parts = [right[off.name] for off in offs]
        least = min(math.prod(part.shape) * part.dtype.itemsize for part in parts if part is not None)
        found: dict[tuple[str, bool], Sent] = {}
        for moment in here:
            for sent in moment.sent:
                over = {sent.axis} if isinstance(sent.axis, str) else set(sent.axis)
                if sent.primitive in _REDUCING and over & axes and sent.line and sent.payload >= least:
                    found.setdefault((sent.line, sent.backward), sent)
        return sorted(found.values(), key=lambda sent: not sent.backward)

    @staticmethod
    def _lines(sent: Sequence[Sent]) -> str:
        return ", ".join(f"{each.line}{' (backward)' if each.backward else ''}" for each in sent[-3:])

    # ---------------------------------------------------------------------------------------------- the parameters

    def _parameter(
        self, number: int, line: str, offs: list[Off], right: Moment, here: Sequence[Moment]
    ) -> Finding:  # fmt: skip
        trained = {name for update in right.updates for name in update.gradients}
        buffers = [off for off in offs if off.name not in trained]
        if buffers:
            fix = ("statistics of a batch are those of all ranks: parallel.convert_batch_norm, or broadcast them once "
                   "at the end; averages of parameters come after optimizer.step(), alike on all ranks")  # fmt: skip
            what = f"buffers, or parameters that nothing trains, differ after step {number}"
            wrote = [] if self.again is None else self.again.written(number, [off.name for off in buffers])
            return self._told("parameter", wrote[-1] if wrote else line, what, buffers, fix)
        before_twin = compare.wholes(self.twin.moments[number - 1 if number else START].parameters)
        after_twin = compare.wholes(right.parameters)
        factors = set()
        for off in offs:
            part = here[off.rank].parameters.get(off.name)
            old, new = before_twin.get(off.name), after_twin.get(off.name)
            if part is None or old is None or new is None or off.missing:
                continue
            moved = compare.flat(part) - compare.flat_of(old, part)
            wanted = compare.flat_of(new - old, part)
            factor = compare.factor_of(moved, wanted, 1e-6)
            factors.add(None if factor is None else round(factor, 4) + 0.0)
        what = f"parameters differ after step {number}, whose gradients are right"
        if factors == {0.0}:
            held = {name for each in self.ranks for name in each.held}
            lost = [off for off in offs if off.name not in held and off.name in self.twin.held]
            what += ": optimizer.step() has not changed them" + (": the optimiser does not have them" if lost else "")
            fix = "make the optimiser after the module was made parallel, of module.parameters(); step on every rank"
            return self._told("parameter", line, what, lost or offs, fix)
        only = factors.pop() if len(factors) == 1 else None
        if only is not None:
            return self._told("parameter", line, f"{what}: the update is {only:g} times the right one", offs,
                              "the same learning rate and one optimizer.step() on every rank")  # fmt: skip
        fix = "look for what the optimiser does between ranks, and for who else writes parameters or its states"
        wrote = [] if self.again is None else self.again.written(number, [off.name for off in offs])
        others = [each for each in wrote if each != line]
        more = f"; written at {', '.join(others)} too" if others else ""
        return self._told("parameter", others[-1] if others else line, what, offs, fix, more)

    # ----------------------------------------------------------------------------------------------------- in words

    def _told(self, kind: str, line: str, what: str, offs: Sequence[Off], fix: str, more: str = "") -> Finding:
        names = list(dict.fromkeys(off.name for off in offs))
        ranks = sorted({off.rank for off in offs})
        worst = max(offs, key=lambda off: off.by)
        few = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        on = (
            "all ranks"
            if len(ranks) == len(self.ranks)
            else f"rank{'s'[: len(ranks) - 1]} " + ", ".join(map(str, ranks[:8]))
        )
        by = worst.missing or ("" if math.isinf(worst.by) else f"by up to {worst.by:.3g} in {worst.name!r}")
        if worst.factor is not None and compare.same_factor(offs) is None:
            by += f", {worst.factor:.4g} times the right one there"
        return self._finding(kind, line, what, f"{few} on {on}, {by}{more}".rstrip(", "), fix)

    def _finding(self, kind: str, line: str, what: str, got: str, fix: str) -> Finding:
        after = f", {self.after}" if self.after and kind != "checkpoint" else ""
        at = f" at {line}" if line else ""
        at = f", in what begins at {line}" if line and line in self._begins() else at
        return Finding(kind, line, text(WHERE, f"{what}, on {dict(self.sizes)}{after}{at}.", got=got, fix=fix))

    def _begins(self) -> tuple[str, ...]:
        """Lines at which something begins, and which are not wrong themselves."""
        first = self.ranks[0]
        return first.made_at, first.steps_at, first.loads_at

    @staticmethod
    def _axes(axes: Sequence[str]) -> str:
        return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))

    def _either(self, choices: Sequence[tuple[str, ...]]) -> str:
        return " or ".join(self._axes(axes) for axes in choices if len(axes) == len(choices[0]))
