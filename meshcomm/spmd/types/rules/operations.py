"""What the checker of varying types makes of an operation of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from meshcomm._torch import (
    functorch_active,
    version_of,
)
from meshcomm.errors import names
from meshcomm.runtime.callsite import asked_in, call_site
from meshcomm.spmd.types.core import untraceable
from meshcomm.spmd.types.foreign_memory import lend
from meshcomm.spmd.types.grids import ANYWHERE
from meshcomm.spmd.types.rules.operands import (
    along_of,
    differentiated,
    gather,
    is_among,
    is_array,
    of_tracked,
    replaced,
    text_of,
    tracked,
    version,
    versions_of,
)
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.rules.writes import Writes, is_new
from meshcomm.spmd.types.seen_changes import NOTED_AT, saw
from meshcomm.spmd.types.sizes.ragged import untouched
from meshcomm.spmd.types.sizes.size_rules import may_size
from meshcomm.spmd.types.sizes.varying_numbers import made
from meshcomm.spmd.types.vma import (
    INVARIANT,
    NAME,
    Origin,
    Type,
    alike,
    join,
    note,
    writes,
)

Args = tuple[Any, ...]
Named = dict[str, Any]


class Operations(Writes):
    """Sees every operation: what varies where any operand does, unless the rules say otherwise."""

    def _operation(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """The long way: whatever the operation is, and whatever its operands are."""
        if is_compiling():  # of what is traced no types are known: it comes here
            untraceable()
        kwargs = kwargs or {}
        if made.any and not (untouched(args) and (not kwargs or untouched(kwargs.values())) and not functorch_active()):
            return self._sized(kind, func, args, kwargs)
        if not kind.ordinary or (kwargs and kwargs.get("out") is not None):
            if kind.asks and not kwargs and (len(args) == 1 or type(args[1]) is int):
                return func(*args)
            return self._get(kind, func, args) if kind.getter else self._typed(kind, func, args, kwargs)
        operands: list[Tensor] = []
        gather(args, Tensor, operands)
        if kwargs:
            gather(kwargs.values(), Tensor, operands)
        if kind.sized and len(operands) >= kind.sized and may_size(kind.name, args):
            return self._sized(kind, func, args, kwargs)
        return self._ordinary(kind, func, args, kwargs, operands)

    def _typed(self, kind: Kind, func: Any, args: Args, kwargs: Named, also: Sequence[Tensor] | None = None) -> Any:
        """Call it, and note the types of what it gives.

        also: what stands for sizes among the arguments; None if nobody has looked for them.
        """
        if kind.getter:
            return self._get(kind, func, args)
        if kind.settles:  # the values stay
            if kind.in_place:
                return self._settle(kind, func, args, kwargs)
            if kind.hooks:
                args = self._hooked(kind.name, (*args, *kwargs.values()))
                kwargs = {}
            elif len(args) > 1 and isinstance(args[1], Tensor) and kind.name in ("size", "stride"):
                self._host(kind, args[1:])
            return func(*args, **kwargs)
        operands: list[Tensor] = []
        gather(args, Tensor, operands)
        if kwargs:
            gather(kwargs.values(), Tensor, operands)
        if also is None:
            if kind.sized and len(operands) >= kind.sized and may_size(kind.name, args):
                return self._sized(kind, func, args, kwargs)
        else:
            operands += also
        if kind.parts:
            return self._parts(kind, func, args, kwargs, operands)
        if kind.silent is not None:
            return self._silent(kind, func, args, kwargs, operands)
        if kind.shares:
            result = self._ordinary(kind, func, args, kwargs, operands)
            self._shares(operands[0])
            return result
        if kind.ordinary and not (kwargs and kwargs.get("out") is not None):
            return self._ordinary(kind, func, args, kwargs, operands)
        if kind.host:
            self._host(kind, operands)
            return func(*args, **kwargs)
        if kind.runs_backward:
            return self._backward(kind, func, args, kwargs)
        if kind.setter:
            return self._set(kind, func, args)
        if kind.each:
            return self._each(kind, func, args, kwargs, operands, also or ())
        return self._special(kind, func, args, kwargs, operands, also or ())

    def _settle(self, kind: Kind, func: Any, args: Args, kwargs: Named) -> Any:
        """What changes how a tensor is seen counts as a change of it."""
        x = args[0]
        if kind.name == "requires_grad_":
            self._own_leaf(x, args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        before = version(x)
        result = func(*args, **kwargs)
        if before != (after := version(x)):
            saw(x, before, after)
        return self._counted(result) if kind.name == "requires_grad_" else result

    def _ordinary(self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: list[Tensor]) -> Any:
        """What varies where any operand does."""
        if not operands:
            result = func(*args, **kwargs)
            if not (kind.from_data and args and is_array(args[0])):
                self._note_all(result, INVARIANT)
            return self._counted(result) if kwargs and kwargs.get("requires_grad") else result
        versions: list[int] = []
        found = self._types(operands, kind.name, versions)
        if found is None:
            return self._unseen(kind, func, args, kwargs, operands)
        whole, given = found[0], args
        for each in found:
            if each.sort is not whole.sort:
                whole = self._join_here(tuple(found), kind.name)
                args, kwargs = self._evened(operands, found, whole, kind.name, args, kwargs)
                break
        result = func(*args, **kwargs) if args is given else self._run(func, args, kwargs, kind.name, True)
        if type(result) is Tensor and whole.grid is not None and not self._known:
            for x in operands:  # as _note_all does it, for what is asked most often
                if result is x:
                    break
            else:
                note(result, whole, (), operands)
        else:
            self._note_all(result, whole, operands)
        if versions != versions_of(operands):
            self._changed(operands, versions, whole, kind.name, evened=args is not given)
        return result

    def _parts(self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: list[Tensor]) -> Any:
        """torch's own collectives do not say what they write."""
        versions = versions_of(operands)
        result = func(*args, **kwargs)
        whole = Type(dict.fromkeys(self._all, Origin(kind.name, call_site())))
        self._saw(operands, versions)
        for x in operands:
            self._written(x, whole, kind.name)
        self._note_all(result, whole, operands)
        return result

    def _silent(self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: list[Tensor]) -> Any:
        """What writes into some operands without counting that as a change of them."""
        assert kind.silent is not None
        into = kind.silent(args, kwargs)
        found = self._types(operands, kind.name)
        result = self._ordinary(kind, func, args, kwargs, operands)
        whole = None if found is None else join(found, kind.name)
        for x in into:
            if whole is None:
                self._unknown_in(x, operands, kind.name)
            else:
                self._written(x, whole, kind.name)
        return result

    def _unseen(self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: Sequence[Tensor]) -> Any:
        """What takes an unknown value gives unknown ones, in what it writes into, too."""
        versions = versions_of(operands)
        result = func(*args, **kwargs)
        self._unknown_in_changed(operands, versions, kind.name)
        return result

    def _types(self, operands: Sequence[Tensor], name: str, versions: list[int] | None = None) -> list[Type] | None:
        """The types of the operands; None if one is unknown and nothing requires grad.

        versions: a list to which theirs are added, as they are before the operation.
        """
        found: list[Type] = []
        grid, slow = self.grid, writes.any
        for x in operands:
            try:
                at = version_of(x)
            except RuntimeError:  # an inference tensor does not count
                at = -1
            if versions is not None:
                versions.append(at)
            kind: Type | None = getattr(x, NAME, None)  # as marked and type_of do it, for what is asked most often
            if (
                type(kind) is not Type
                or slow
                or (at and at != getattr(x, NOTED_AT, 0))
                or (kind.grid is not grid and kind.grid is not ANYWHERE)
            ):
                kind = self.type_of(x)
            if kind is None:
                if torch.is_grad_enabled() and (functorch_active() or any(y.requires_grad for y in operands)):
                    self._unknown(x, operands, name)
                return None
            if kind.plain and x.requires_grad and not (x.is_leaf or of_tracked(x) or functorch_active()):
                self._from_nowhere(x, name)
            found.append(kind)
        return found

    def _evened(
        self,
        operands: Sequence[Tensor],
        found: Sequence[Type],
        whole: Type,
        name: str,
        args: Args,
        kwargs: Named,
        but: Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with a pvary of each operand that requires grad and does not vary as the others do."""
        others: dict[int, Tensor] = {}
        if whole.axes and torch.is_grad_enabled():
            for x, kind in zip(operands, found, strict=True):
                if len(kind.axes) != len(whole.axes) and x is not but and differentiated(x):
                    others[id(x)] = self.vary(x, whole.axes - kind.axes, name, operands, found)
        if not others:
            return args, kwargs
        return replaced(args, others), {key: replaced(value, others) for key, value in kwargs.items()}

    def _special(
        self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: list[Tensor], also: Sequence[Tensor]
    ) -> Any:
        """Functions that write, draw, or take no more than the shape of an operand."""
        target: Any = operands[0] if kind.in_place and operands else kwargs.get("out")
        into = isinstance(target, Tensor)
        over = into and (kind.overwrites or not kind.in_place) and not (functorch_active() or tracked(target))
        if kind.alike:
            count = [*operands[:1], *also]
        elif kind.in_place and operands:
            count = operands[1:] if over else operands
        elif (kind.fresh and not kwargs.get("requires_grad")) or (kind.random and kind.name.endswith("_like")):
            count = operands[1:]
        else:  # of what is fresh and requires grad, too: a leaf made for each rank's own
            count = [x for x in operands if not is_among(x, target)]
        found = self._types(count, kind.name)
        if found is None:
            return self._unseen(kind, func, args, kwargs, operands)
        if kind.drops is not None and kind.drops(args, kwargs):
            found.append(self._dropped(kind, count, found))
        if kind.random:
            found.append(self._random(kind.name))
        if into:
            found += self._kept(target, count)
        whole = self._join_here(tuple(found), kind.name) if found else INVARIANT
        given = args
        if whole.axes:
            if into:
                if not (kind.random and is_new(target)):
                    self._stays(target, whole, kind.name)
                room = self._make_room(target, whole, kind.name, operands)
                if room is not None:  # views of it among the operands are in the graph of that pvary
                    beside = zip(count, found, strict=False)
                    found = [whole if x is room or x._base is room else each for x, each in beside]
            args, kwargs = self._evened(
                count, found[: len(count)], whole, kind.name, args, kwargs, target if into else None
            )
        versions = versions_of(operands)
        result = func(*args, **kwargs)
        now = self._saw(operands, versions)
        if result is not target or not into:
            self._note_all(result, whole, operands)
        if kind.fresh and isinstance(result, Tensor):
            like = self.type_of(operands[0])
            if like is not None and like.axes:
                alike(result, like)
        if over:
            self._overwritten(target, whole)
        elif into:
            self._written(target, whole)
        elif target is not None:
            for x in operands:
                if is_among(x, target):
                    self._written(x, whole)
        if not kind.in_place and versions != now:
            others = [i for i, x in enumerate(operands) if not is_among(x, target)]
            self._changed(
                [operands[i] for i in others], [versions[i] for i in others], whole, kind.name, evened=args is not given
            )
        elif kind.in_place and versions[1:] != now[1:]:
            self._changed(operands[1:], versions[1:], whole, kind.name, evened=args is not given)
        return result

    def _each(
        self, kind: Kind, func: Any, args: Args, kwargs: Named, operands: list[Tensor], also: Sequence[Tensor]
    ) -> Any:
        """Functions of lists, element by element."""
        every = [*args, *kwargs.values()]
        rows = [arg for arg in every if isinstance(arg, (tuple, list)) and arg and isinstance(arg[0], Tensor)]
        if not rows:
            rows = [operands]
        single = [*(arg for arg in every if isinstance(arg, Tensor)), *also] if rows != [operands] else []
        together = [[row[i] for row in rows if i < len(row)] + single for i in range(len(rows[0]))]
        kinds: list[Type | None] = []
        others: dict[tuple[int, int], Tensor] = {}
        each_found = [self._types(group, kind.name) for group in together]
        beside = self._beside_all(single, each_found, kind.name)
        for i, (group, found) in enumerate(zip(together, each_found, strict=True)):
            kept = self._kept(group[0], group[1:]) if kind.in_place else []
            whole = None if found is None else join([*found, *kept, *beside], kind.name)
            kinds.append(whole)
            if kind.in_place and whole is not None:
                self._stays(group[0], whole, kind.name)
            if found is None or whole is None or not torch.is_grad_enabled():
                continue
            for x, each in zip(group, found, strict=True):
                if len(each.axes) == len(whole.axes) or not differentiated(x):
                    continue
                if kind.in_place and x is group[0]:
                    got = f"{text_of(x)}, {along_of(each)}, beside what varies along {names(sorted(whole.axes))}"
                    fix = f"mc.pvary it before, or do without {kind.name}"
                    self._refuse(kind.name, "writes what varies into a graph of what is invariant.", got, fix)
                others[i, id(x)] = self.vary(x, whole.axes - each.axes, kind.name, group, found)
        if others:  # the same tensor may stand beside others elsewhere
            args, kwargs = (
                tuple(self._evened_row(x, others) for x in args),
                {key: self._evened_row(x, others) for key, x in kwargs.items()},
            )
        versions = [versions_of(group) for group in together]
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)) and len(result) == len(together):
            for y, whole in zip(result, kinds, strict=True):
                if whole is not None:
                    self._note_all(y, whole, operands)
        elif isinstance(result, Tensor) and kinds[0] is not None:
            self._note_all(result, kinds[0], operands)
        for group, before, whole in zip(together, versions, kinds, strict=True):
            if kind.name.startswith("_fused_"):  # these do not count
                self._saw(group, before)
                for x in group[: len(group) - len(single)]:
                    if whole is None:
                        self._unknown_in(x, group, kind.name)
                    elif (mine := self.type_of(x)) is None or mine.axes != whole.axes:
                        self._written(x, whole, kind.name)
            elif before == versions_of(group):
                continue
            elif whole is not None:
                self._changed(group, before, whole, kind.name)
            else:
                self._unknown_in_changed(group, before, kind.name)
        return result

    def _beside_all(self, single: Sequence[Tensor], found: Sequence[list[Type] | None], name: str) -> list[Type]:
        """What all elements are joined with, where one tensor stands beside each: its pvary does so, too."""
        if not torch.is_grad_enabled() or not any([differentiated(x) for x in single]):  # noqa: C419 -- as in join
            return []
        known = [kind for each in found if each is not None for kind in each]
        return [join(known, name)] if known else []

    @staticmethod
    def _evened_row(row: Any, others: dict[tuple[int, int], Tensor]) -> Any:
        """The argument of a function of lists, with others, by place and id, in place of its tensors."""
        if isinstance(row, (tuple, list)):
            parts = [others.get((i, id(x)), x) for i, x in enumerate(row)]
            return parts if isinstance(row, list) else tuple(parts)
        return others.get((0, id(row)), row)

    def _host(self, kind: Kind, operands: Sequence[Tensor]) -> None:
        for x in operands:
            mine = self.type_of(x)
            if mine is None:
                self._unknown(x, operands, kind.name)
            if mine.axes and not asked_in("torch.nn.init"):  # trunc_normal_ draws until all fit: a rank's own affair
                self._refuse(
                    kind.name,
                    f"makes a Python value of a tensor that varies along {names(sorted(mine.axes))}.",
                    f"{text_of(x)}, {along_of(mine)}",
                    "reduce it first; torch.where in place of if; mc.axis_index(axis) for a rank's place",
                )
            if kind.lends:
                lend(x)

    def _dropped(self, kind: Kind, operands: Sequence[Tensor], found: Sequence[Type]) -> Type:
        """Each rank drops its own, so the value must be its own."""
        random = self._random(kind.name)
        mine = join(found, kind.name)
        same = random.axes - mine.axes
        if same:
            along = names(sorted(same))
            self._refuse(
                kind.name,
                f"draws other numbers on each rank along {along}, along which its input is invariant.",
                f"x {text_of(operands[0])}, {along_of(mine)}",
                "draw alike: `with mc.rng(layout, seed=...)` or `with mc.fork_rng(axes)`; mc.pvary(x) before, if each "
                "rank shall drop its own",
            )
        return random
