"""Whose fault it is: the line to blame for a value or a gradient that is wrong.

::

    a value is wrong        walk back from the output through what is wrong, to the step whose operands are right
    a gradient is wrong     the checker says where a pvary is missing; else walk on from the input through the
                            gradients that are wrong, to the step whose own gradient is right
    a tangent is wrong      as a value, of the tangents that forward mode gives the steps
    a second derivative     of the gradient of an output as a value, of the gradients of steps; else as a gradient

What is right is known where the steps of the ranks and of the twin belong together, and a value of the ranks is a part
of the twin's, or adds up to it. Where they do not, as in rings and pipelines, values that the twin has too are known by
their numbers, and gradients by what a nudge of one rank's part does (nudges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.errors import CommError
from meshcomm.mesh import Mesh
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.verifying.blame.line import Blame, look_at
from meshcomm.verifying.blame.partings import first_of, first_parting, lines_in, one_line_of
from meshcomm.verifying.blame.states import UNKNOWN, State, is_part, state_of
from meshcomm.verifying.blame.trail import Followed, Step, is_reduction, paired, stop_of
from meshcomm.verifying.compare import explained, times

Nudged = Callable[["Sequence[Followed]", "Sequence[int]"], "tuple[int, float | None] | None"]


class Story:
    """The steps of all ranks beside those of the twin."""

    def __init__(
        self, mesh: Mesh, ranks: Sequence[Followed], other: Followed, kind: str = "vjp", *, moved: bool = False
    ) -> None:
        """``other``: the steps of one device. ``kind``: what is wrong, as in :data:`derivatives.KINDS`. ``moved``:
        values may be in another order.
        """
        self.mesh, self.kind, self.ranks, self.other, self.moved = mesh, kind, ranks, other, moved
        self.noun = {"jvp": "tangent", "second": "second derivative"}.get(kind, "")
        self.steps: Sequence[Step] = self.ranks[0].steps
        self.pairs = paired([rank.steps for rank in self.ranks], self.other.steps)
        self.takers: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            for j in step.of:
                self.takers.setdefault(j, []).append(i)
        self._values: dict[int, State] = {}
        self._gradients: dict[int, State] = {}

    def value(self, i: int) -> State:
        """Of the result of a step."""
        if i not in self._values:
            j, mine = self.pairs.get(i), [rank.steps[i].value for rank in self.ranks]
            self._values[i] = (
                UNKNOWN if j is None else state_of(mine, self.other.steps[j].value, self.mesh, moved=self.moved)
            )
        return self._values[i]

    def gradient(self, i: int) -> State:
        """Of the gradient of the result of a step."""
        if i not in self._gradients:
            self._gradients[i] = self._gradient(i)
        return self._gradients[i]

    def _gradient(self, i: int) -> State:
        j = self.pairs.get(i)
        if j is None:
            return UNKNOWN
        return self._handed_on(i, j, [rank.steps[i].gradient for rank in self.ranks], self.other.steps[j].gradient)

    def back(self, i: int, k: int) -> State:
        """Of what the step ``k`` adds to the gradient of the result of a step that it takes."""
        j, to = self.pairs.get(k), self.pairs.get(i)
        if j is None or to is None:
            return UNKNOWN
        found = [rank.steps[k].back.get(i) for rank in self.ranks]
        return self._handed_on(i, to, found, self.other.steps[j].back.get(to))

    def _handed_on(self, i: int, j: int, found: Sequence[Tensor | None], right: Tensor | None) -> State:
        """Of gradients of the result of a step ``i``, which is ``j`` on one device, or of parts of them."""
        if all(g is None for g in found) and right is None:
            return State("right")
        whole = torch.zeros_like(self.other.steps[j].value) if right is None else right
        parts = [
            torch.zeros_like(rank.steps[i].value) if g is None else g
            for rank, g in zip(self.ranks, found, strict=True)
        ]  # fmt: skip
        of = [rank.steps[i].value for rank in self.ranks], self.other.steps[j].value
        return state_of(parts, whole, self.mesh, along=self._shared_along(i), of=of if self.typed else None)

    def _shared_along(self, i: int) -> frozenset[str] | None:
        """The axes along which the gradients of a value add up to the twin's; each part of a sum has all of it."""
        if not self.typed:
            return None
        along, state = self.steps[i].along or frozenset(), self.value(i)
        return along - set(state.over) if state.by == "sum" else along

    @cached_property
    def typed(self) -> bool:
        """Whether the axes are known along which values vary: along all others the ranks have the same."""
        if self.noun:  # steps have other values then
            return False
        places = coordinates(self.mesh)
        firsts = {axis: [places.index(place | {axis: 0}) for place in places] for axis in self.mesh.axis_names}
        for i in self.pairs:
            along, mine = self.steps[i].along, [rank.steps[i].value for rank in self.ranks]
            if along is None:
                return False
            same = [at for axis, at in firsts.items() if axis not in along]
            if not all(torch.equal(mine[first], x) for at in same for first, x in zip(at, mine, strict=True)):
                return False
        return True

    # ------------------------------------------------------------------------------------------------- values

    def blame_value(self, output: int) -> Blame:
        """Walk back from an output that is wrong."""
        end = self.ranks[0].outputs[output]
        if end is None:
            return Blame()
        state = self.value(end)
        if state.name == "partial":
            return self._lacking(end, state)
        if state.name == "right" and not self.noun:
            step = self.steps[end]
            told = f"{step.name} gives parts of what is right, but not those that out_specs says"
            return Blame(step.line, (told,), f"another dim, or order of axes, in {step.name}, or in out_specs")
        return self._wrong_on_the_way(end)

    def blame_first(self) -> Blame:
        """Of the first output that something wrong goes before; nothing where all is right, or nothing is known."""
        for end in self.ranks[0].outputs:
            if end is not None and self.pairs and self._wrong_before(end):
                return self._wrong_on_the_way(end)
        return Blame()

    def _wrong_on_the_way(self, end: int) -> Blame:
        """The first step on the way to this one that is wrong, and whose operands are right."""
        todo, seen, found = [end], {end}, []
        while todo:
            i = todo.pop()
            before = [j for j in self.steps[i].of if self.value(j).name in ("wrong", "unknown")]
            if self.value(i).name == "wrong" and not any(self._wrong_before(j) for j in before):
                found.append(i)
                continue
            for j in before:
                if j not in seen:
                    seen.add(j)
                    todo.append(j)
        if not found:
            return self._by_numbers(end) or self._around(end)
        i = min(found)
        step = self.steps[i]
        if any(self.value(j).name == "unknown" for j in step.of):
            within = self._by_numbers(end)
            if within is not None:
                return within
        if (
            is_reduction(step) and step.reduction == "sum" and not self.moved
        ):  # of what it takes the mean would be right
            of = [j for j in step.of if self.value(j).by == "mean"]
            if of:
                return self._of_another_size(of[0])
        parts = [(j, self.value(j)) for j in step.of if self.value(j).name == "partial"]
        if parts and not step.axis:
            return self._lacking(*parts[0], used=step.name)
        state = self.value(i)
        told = [self._gives(step, state)]
        told += [
            f"what it takes, of {self._first_of(j).name}, has to be reduced by {each.by!r}" for j, each in parts[:1]
        ]
        why = explained(state.factor, self._sizes(step))
        told += [why] if why else []
        told += self._right_up_to(i)
        return Blame(step.line, tuple(told), self._instead(step, state))

    def _gives(self, step: Step, state: State = UNKNOWN) -> str:
        if self.noun:
            return f"result right; the {self.noun} of {step.name} is {_wrongly(state)} the right one"
        return f"{step.name} gives {_wrongly(state)} what is right"

    def _by_numbers(self, end: int) -> Blame | None:
        """The first step, on the way to ``end``, whose operands are among what one device has on their lines, and its
        result is not: for lines that run another number of times there. What no gradient comes to, as in the idle turns
        of a pipeline, counts for nothing.
        """
        there: dict[tuple[str, str], list[Tensor]] = {}
        for step in self.other.steps:
            there.setdefault(step.key[:2], []).append(step.value)
        known: dict[tuple[int, int], bool] = {}

        def among(rank: int, i: int) -> bool:
            if (rank, i) not in known:
                step, place = self.ranks[rank].steps[i], coordinates(self.mesh)[rank]
                known[rank, i] = any(is_part(step.value, x, self.mesh, place) for x in there.get(step.key[:2], ()))
            return known[rank, i]

        ranks = range(len(self.ranks))
        todo, seen = [(rank, end) for rank in ranks], {(rank, end) for rank in ranks}
        found: list[tuple[int, int]] = []
        while todo:
            rank, i = todo.pop()
            step = self.ranks[rank].steps[i]
            of = [(other, j) for j in step.of for other in (ranks if step.axis else (rank,))]
            before = [(r, j) for r, j in of if not among(r, j) and self._counts(r, j)]
            if not before and not step.axis and step.of and differentiable(step.value):
                found.append((rank, i))
            todo += [each for each in before if each not in seen]
            seen |= set(before)
        if not found:
            return None
        rank, i = min(found, key=lambda each: (each[1], each[0]))
        step = self.ranks[rank].steps[i]
        told = f"on rank {rank} {step.name} gives what it gives nowhere on one device, of what is there too"
        return Blame(step.line, (told,), look_at(step, self.ranks[rank].steps))

    def _counts(self, rank: int, i: int) -> bool:
        step = self.ranks[rank].steps[i]
        if not differentiable(step.value):
            return False
        return not step.live or (step.gradient is not None and bool(step.gradient.any()))

    def _around(self, end: int) -> Blame:
        """Where the steps begin that one device has not, or has another number of times, on the way to ``end``."""
        if not self.pairs:
            return self._parting()
        todo, seen = [end], {end}
        while todo:
            before = [j for j in self.steps[todo.pop()].of if j not in seen]
            seen |= set(before)
            todo += before
        first = [
            i for i in sorted(seen)
            if self.value(i).name == "unknown" and not any(self.value(j).name == "unknown" for j in self.steps[i].of)
        ]  # fmt: skip
        if not first:
            return Blame("", self._right_up_to(end))
        step = self.steps[first[0]]
        told = f"from {step.name} on steps are others than on one device, or come another number of times"
        return Blame(step.line, (told, *self._right_up_to(first[0])))

    def _parting(self) -> Blame:
        """The first step that is another one on another rank."""
        for i in range(min(len(rank.steps) for rank in self.ranks)):
            steps = [rank.steps[i] for rank in self.ranks]
            if len({step.key for step in steps}) > 1:
                other = next(rank for rank, step in enumerate(steps) if step.key != steps[0].key)
                known = {step.key for step in self.other.steps}
                at = min(steps, key=lambda step: (step.key in known, sum(each.key == step.key for each in steps)))
                said = f"rank 0: {steps[0].name}; rank {other}: {steps[other].name}"
                return Blame(at.line, (f"the ranks do different things from here on: {said}",))
        return Blame()

    def _of_another_size(self, i: int) -> Blame:
        """What a sum takes and of which the mean would be right."""
        state = self.value(i)
        while before := [j for j in self.steps[i].of if self.value(j) == state]:
            i = before[0]
        wrong = [j for j in self.steps[i].of if self.value(j).name == "wrong"]
        if wrong:
            return self._wrong_on_the_way(wrong[0])
        step, n = self.steps[i], torch.Size([self.mesh.shape[axis] for axis in state.over]).numel()
        told = (f"{step.name} gives {n} times what is to be summed up over {_axis_text(state.over)}",)
        why = explained(float(n), self._sizes(step))
        return Blame(step.line, (*told, *([why] if why else []), *self._right_up_to(i)), self._instead(step, state))

    def blame_error(self, error: Exception) -> Blame:
        """Where the ranks part, of an error between them; else the first step that is other than on one device."""
        if isinstance(error, CommError):
            line, parting = one_line_of(str(error)), first_parting([rank.calls for rank in self.ranks])
            if line:
                return Blame(line)
            named = lines_in(str(error))
            if parting is not None:
                return Blame(parting.line if parting.sure else first_of([parting.line, *named]), (parting.told,))
            return Blame(next(iter(named), ""))
        for i in range(min(len(rank.steps) for rank in self.ranks)):
            if len({rank.steps[i].key for rank in self.ranks}) > 1:
                break
            if self._is_other(i) and not any(map(self._is_other, self.steps[i].of)):
                told = f"{self.steps[i].name} gives what is no part of what it gives there"
                return Blame(self.steps[i].line, (told, *self._right_up_to(i)))
        return Blame()

    def _is_other(self, i: int) -> bool:
        """Whether it is wrong, or has a shape that no part has."""
        state = self.value(i)
        return state.name == "wrong" or (i in self.pairs and state is UNKNOWN and self.steps[i].value.numel() > 0)

    def _wrong_before(self, i: int) -> bool:
        """Whether anything that this was made of is wrong, as far as is known."""
        todo, seen = [i], {i}
        while todo:
            at = todo.pop()
            name = self.value(at).name
            if name == "wrong":
                return True
            if name == "unknown":
                todo += [j for j in self.steps[at].of if j not in seen]
                seen |= set(self.steps[at].of)
        return False

    def _first_of(self, i: int) -> Step:
        """The first step on the way to this one whose value is what this one's is."""
        while before := [j for j in self.steps[i].of if self.value(j) == self.value(i)]:
            i = before[0]
        return self.steps[i]

    def _lacking(self, i: int, state: State, used: str = "") -> Blame:
        step, over = self._first_of(i), _axis_text(state.over)
        if self.noun:
            return Blame(step.line, (self._gives(step), f"it is not reduced over {over}"), self._instead(step, state))
        told = f"{step.name} gives what is not yet reduced over {over}" + (f", and {used} takes it" if used else "")
        how = {"": "", "sum": ""}.get(state.by, f", {state.by.removeprefix('a')!r}")
        fix = f"mc.all_reduce(it, {over}{how}) after {step.name}" + (f", before {used}" if used else "")
        return Blame(step.line, (told,), fix)

    def _right_up_to(self, i: int) -> tuple[str, ...]:
        """The last collective before a step that gives what is right."""
        known = [j for j in range(i) if self.steps[j].axis and self.value(j).name == "right"]
        return (f"right up to {self.steps[known[-1]].name}",) if known else ()

    def _sizes(self, step: Step) -> list[tuple[str, int]]:
        first = [axis for axis in step.axis.split(",") if axis in self.mesh.shape]
        return [(axis, self.mesh.shape[axis]) for axis in dict.fromkeys([*first, *self.mesh.axis_names])]

    def _instead(self, step: Step, state: State) -> str:
        if self.noun:
            return (
                f"look at the {'jvp' if self.kind == 'jvp' else 'backward, and what differentiates it,'} of {step.name}"
            )
        if is_reduction(step) and all(self.value(j).name == "right" for j in step.of):
            return f"leave {step.name} out: what it takes is reduced already"
        return look_at(step, self.steps)

    # ---------------------------------------------------------------------------------------------- gradients

    def blame_second(self, label: str) -> Blame:
        """Of a second derivative by an input: those of gradients go before, of which it is made."""
        for at, end in enumerate(self.ranks[0].outputs):
            if end is not None and self.value(end).name == "wrong":
                return self.blame_value(at)
        return self.blame_gradient(label)

    def _by_nudges(self, start: int, nudged: Nudged) -> Blame | None:
        """The last step after ``start`` whose gradient is not what a nudge of it does."""
        if any([step.key for step in rank.steps] != [step.key for step in self.steps] for rank in self.ranks):
            return None
        after = {start}
        for i, step in enumerate(self.steps):
            if after & set(step.of):
                after.add(i)
        wrong = nudged(self.ranks, sorted(after))
        if wrong is None:
            return None
        at, factor = wrong
        takers = [self.steps[k] for k in self.takers.get(at, ())]
        if not takers:
            return None
        step = next((each for each in takers if each.axis), takers[0])
        of = State("wrong", factor=factor)
        told = [f"result right; gradients right back to {step.name}, which hands on {_wrongly(of)} the right one"]
        why = explained(factor, self._sizes(step))
        told += [why] if why else []
        return Blame(step.line, (*told, "so a nudge of each rank's part says"), f"look at the backward of {step.name}")

    def blame_gradient(self, label: str, nudged: Nudged | None = None) -> Blame:
        """Walk on from an input whose gradient is wrong. ``nudged``: what bisects by nudges."""
        start = next((i for i, step in enumerate(self.steps) if step.key[:2] == ("", label)), None)
        if start is None:
            return Blame()
        stop = self._stop_on_ranks(start)
        if stop is not None:
            told = f"result right; gradients stop at {stop.name}, and not on one device"
            return Blame(stop.line, (told,), f"look at {stop.name}")
        by_nudges = None if nudged is None or not self._is_hidden(start) else self._by_nudges(start, nudged)
        return by_nudges or self._by_parts(start) or self._back_to(start)

    def _by_parts(self, start: int) -> Blame | None:
        """The last step whose own gradient is right, and which adds something else to those of its operands."""
        if not self.typed:
            return None
        todo, seen, found = [start], {start}, []
        while todo:
            i = todo.pop()
            for k in self.takers.get(i, ()):
                if self.back(i, k).name not in ("wrong", "partial"):
                    continue
                if self.gradient(k).name == "right":
                    found.append((k, i))
                elif k not in seen:
                    seen.add(k)
                    todo.append(k)
        if not found:
            return None
        k, i = max(found)
        return self._hands_on(k, self.back(i, k))

    def right_back_to(self, label: str) -> str:
        """The first collective after an input whose gradient is right, where there is one; else the first step."""
        start = next((i for i, step in enumerate(self.steps) if step.key[:2] == ("", label)), None)
        after = set() if start is None else {start}
        for i, step in enumerate(self.steps):
            if after & set(step.of):
                after.add(i)
        right = [i for i in sorted(after) if self.steps[i].live and self.gradient(i).name == "right"]
        found = next((i for i in right if self.steps[i].axis), next(iter(right), None))
        return "" if found is None else self.steps[found].name

    def _stop_on_ranks(self, start: int) -> Step | None:
        """A step, on the way from an input to an output, at which gradients stop, and which one device has not."""
        after, before = {start}, {end for end in self.ranks[0].outputs if end is not None}
        for i, step in enumerate(self.steps):
            if after & set(step.of):
                after.add(i)
        for i in reversed(range(len(self.steps))):
            if i in before:
                before |= set(self.steps[i].of)
        for i in sorted(after & before):
            step = self.steps[i]
            stops = not step.live and differentiable(step.value) and any(self.steps[j].live for j in step.of)
            if stops and self.pairs and step.key[:2] not in {other.key[:2] for other in self.other.steps}:
                return step
        return None

    def _is_hidden(self, start: int) -> bool:
        """Whether there are steps after it, with a gradient, of which one device says nothing."""
        todo, seen = [start], {start}
        while todo:
            i = todo.pop()
            if self.steps[i].live and self.gradient(i) is UNKNOWN:
                return True
            after = [k for k in self.takers.get(i, ()) if k not in seen]
            seen |= set(after)
            todo += after
        return False

    def _back_to(self, start: int) -> Blame:
        todo, seen, found = [start], {start}, []
        while todo:
            i = todo.pop()
            after = [k for k in self.takers.get(i, ()) if self.gradient(k).name != "right" and k not in seen]
            if not any(self.gradient(k).name == "wrong" for k in self.takers.get(i, ())):
                found.append(i)
            seen |= set(after)
            todo += after
        known = [i for i in found if self.gradient(i).name in ("wrong", "partial")]
        if not known:
            return Blame()
        own = [i for i in known if not any(self.steps[k].reduction == "mean" for k in self.takers.get(i, ()))]
        known = own or known  # what a mean hands on to what is the same on all ranks is a share of it
        wrong = [i for i in known if self.gradient(i).name == "wrong"]
        i = max(wrong or known)
        takers = [k for k in self.takers.get(i, ()) if self.steps[k].gradient is not None] or self.takers.get(i, [])
        if not takers:
            stop = stop_of(self.steps, {i: self.other.steps[j] for i, j in self.pairs.items()})
            if stop is None:
                return Blame("", ("no gradient comes back to it",))
            return Blame(stop.line, (f"result right; gradients stop at {stop.name}",), f"look at {stop.name}")
        k = next((k for k in takers if self.steps[k].axis), takers[0])
        return self._hands_on(k, self.gradient(i))

    def _hands_on(self, k: int, state: State) -> Blame:
        """Blame of a step that hands on what is wrong."""
        step = self.steps[k]
        told = [f"result right; gradients right back to {step.name}, which hands on {_wrongly(state)} the right one"]
        if self.noun:
            told = [f"result right, and the gradient; second derivatives right back to {step.name}"]
        why = explained(state.factor, self._sizes(step))
        fix = f"look at the backward of {step.name}"
        if state.name == "partial":
            told = [
                f"result right; the gradient that {step.name} hands on is one rank's own along {_axis_text(state.over)}"
            ]
            fix = f"mc.pvary(its operand, {_axis_text(state.over)}) before {step.name}"
        return Blame(step.line, (*told, *([why] if why else [])), fix)


def _wrongly(state: State) -> str:
    return "something else than" if state.factor is None else times(state.factor)


def _axis_text(over: tuple[str, ...]) -> str:
    return repr(over[0] if len(over) == 1 else over)
