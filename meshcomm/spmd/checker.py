"""The checker of varying types: it sees each operation of a rank, and knows along which axes each value varies.

Where a value that requires grad and is invariant along an axis meets one that varies along it, a ``pvary`` is due: the
gradient that comes back is one rank's own, and that of the value is their sum. The checker inserts it, or refuses.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from meshcomm._torch import (
    at_trace_time,
    functorch_active,
    tree_flatten,
    tree_unflatten,
    unwrap_if_dead,
    unwrapped,
    version_of,
    view_again,
    watch_functions,
    without_modes,
)
from meshcomm.collectives import check
from meshcomm.collectives.reduce import pvary
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.errors import VaryingError, fail, names, shape_text
from meshcomm.layout.notation import parse_arrow
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.runtime.callsite import asked_in, call_site
from meshcomm.spmd.torch_rules import Kind, kind_of
from meshcomm.spmd.vma import (
    INVARIANT,
    Origin,
    Type,
    alike,
    also_written,
    behind,
    forget,
    join,
    made_like,
    marked,
    note,
    unmark,
    unseen_write,
    write,
    writes,
)
from meshcomm.watch import here
from meshcomm.work import Work

__all__ = ["Checker"]

WHERE = "check_vma"
_MARK = "mc.mark_varying(x, axes) says along which axes it varies, () for none"
_LATELY = 64
"""How many values a pvary is remembered for until the next backward; parameters are remembered all the time."""


_OFTEN = 8
"""A view with less than this part of its tensor is varied alone: the sum of the whole would send too much."""


class Checker(TorchFunctionMode):
    """Tracks what runs on this thread while it is entered, as the part of one rank of ``mesh``."""

    def __init__(self, mesh: Mesh, *, insert: bool) -> None:
        """``insert``: a missing pvary is made; otherwise it is an error."""
        super().__init__()
        self.mesh, self.insert = mesh, insert
        self._all = frozenset(mesh.axis_names)
        self._known: dict[int, tuple[Tensor, Type]] = {}
        self._always: OrderedDict[int, _Varied] = OrderedDict()
        self._lately: OrderedDict[int, _Varied] = OrderedDict()
        self._outer: list[Any] = []

    def __enter__(self) -> Checker:
        _watch_functions()
        self._outer.append(here.watcher)
        here.watcher = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        here.watcher = self._outer.pop()
        if not self._outer:
            self._always.clear()
            self._lately.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not looked at. Modes stay on: another checker may start inside."""
        outer, here.watcher = here.watcher, None
        try:
            yield
        finally:
            here.watcher = outer

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What runs inside is not looked at, and is seen by no other mode either."""
        with self.paused(), without_modes():
            yield

    # ------------------------------------------------------------------------------------------------- types of tensors

    def know(self, x: Tensor, axes: Iterable[str], what: str) -> None:
        """``x``, which is others' too, varies along these axes here."""
        kind = Type(dict.fromkeys(axes, Origin(what, leaf=True))) if axes else INVARIANT
        self._known[id(x)] = x, kind.seen(x.requires_grad)

    def type_of(self, x: Tensor) -> Type | None:
        """Along which axes ``x`` varies; None if that is unknown."""
        kind = marked(x)
        if kind is None:
            known = self._known.get(id(x))
            if known is not None:
                kind = known[1]
            else:
                other = behind(x)
                kind = None if other is None else self.type_of(other)
                if kind is None:
                    return None
        if not kind.axes <= self._all:  # over another mesh, whose axes lie anyhow
            return None
        return self._with_writes(x, kind) if writes.any else kind

    def _with_writes(self, x: Tensor, kind: Type) -> Type | None:
        """Its type, noted as ``kind``, with what was written into its storage through other tensors."""
        whole = also_written(x, kind)
        if isinstance(whole, Origin):
            return None
        if whole is not kind and _tracked(x) and torch.is_grad_enabled():
            base = x._base
            lacks = whole.axes - kind.axes if base is None else whole.axes - (marked(base) or kind).axes
            if lacks:
                self._out_of_graph(x, kind, lacks, str(whole.since[min(lacks)]))
        return whole

    def _out_of_graph(self, x: Tensor, kind: Type, axes: frozenset[str], by: str) -> NoReturn:
        self._refuse(
            f"a write into {_text(x)}",
            f"that varies along {names(sorted(axes))} went past the graph of a value that requires grad and is "
            "invariant: its gradient would be one rank's part.",
            f"{by}; the value {_along(kind)}",
            f"mc.pvary(x, {self._names(axes)!r}) before, or write into x itself, not through .detach() or .data",
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, evened: bool) -> Any:
        """Call it; with a pvary in place of an operand, it must not write into that."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not evened or "Output 0 of Pvary is a view" not in str(error):
                raise
            what = "changes an operand in place that requires grad and is invariant, where others vary."
            self._refuse(name, what, str(error).split(". ")[0], "pvary the operand before, or do it out of place")

    def _note(self, x: Tensor, kind: Type, of: Sequence[Tensor] = ()) -> None:
        """Note a type; ``of``: what was there before, of which ``x`` may be a view."""
        if self._known:
            self._known.pop(id(x), None)
        note(x, kind, self._known, of)

    def _note_all(self, result: Any, kind: Type, but: Sequence[Tensor] = ()) -> None:
        """Note the type of every tensor in a result that is none of those that were given."""
        if isinstance(result, Tensor):
            for x in but:
                if result is x:
                    return
            self._note(result, kind, but)
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._note_all(part, kind, but)

    def drawn(self, x: Tensor) -> None:
        """Note that ``x`` was drawn at random."""
        with without_modes():
            self._note(x, self._random("random numbers"))

    def _random(self, name: str) -> Type:
        axes = self._all if here.draws_along is None else here.draws_along & self._all
        return Type(dict.fromkeys(axes, Origin(name, str(call_site())))) if axes else INVARIANT

    def whole(self, where: str, x: Any, label: str) -> None:
        """Refuse a tensor that varies at all."""
        with without_modes():
            self._whole(where, x, label)

    def _whole(self, where: str, x: Any, label: str) -> None:
        kind = self.type_of(x)
        if kind is None:
            self._unknown(x, [x], where)
        if kind.axes:
            what = f"takes global tensors, and {label} varies along {names(sorted(kind.axes))}."
            self._refuse(where, what, f"{_text(x)}, {_along(kind)}", "call it with what is the same on every rank")

    def made_whole(self, x: Tensor, what: str) -> None:
        """Note that ``x`` is invariant along all axes."""
        with without_modes():
            self._note(x, INVARIANT.ends(self._all, Origin(what, str(call_site()))))

    def host_value(self, what: str) -> None:
        """Refuse a rank's place as a Python number."""
        fail(
            WHERE,
            f"{what} is a Python number that differs between ranks: nobody could see what varies with it.",
            got=f"at {call_site()}; mesh {self.mesh.shape}",
            fix="mc.axis_index(axis), a tensor that varies; torch.where in place of if",
            kind=VaryingError,
        )

    # ---------------------------------------------------------------------------------------------- operations of torch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if here.watcher is not self:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            _untraceable()
        kind = kind_of(func)
        if kind.getter:
            return self._get(kind, func, args)
        if kind.settles:  # the values stay
            if kind.name == "requires_grad_":
                self._own_leaf(args[0], args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
            return func(*args, **kwargs)
        operands: list[Tensor] = []
        _gather(args, operands)
        if kwargs:
            _gather(kwargs.values(), operands)
        if kind.parts:
            return self._parts(kind, func, args, kwargs, operands)
        if kind.silent is not None:
            return self._silent(kind, func, args, kwargs, operands)
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
            return self._each(kind, func, args, kwargs, operands)
        return self._special(kind, func, args, kwargs, operands)

    def _ordinary(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """What varies where any operand does."""
        if not operands:
            result = func(*args, **kwargs)
            if not (kind.from_data and args and _is_array(args[0])):
                self._note_all(result, INVARIANT)
            return result
        found = self._types(operands, kind.name)
        if found is None:
            return self._unseen(kind, func, args, kwargs, operands)
        whole, given = found[0], args
        if len(found) > 1:
            for each in found:
                if each is not whole:
                    whole = join(found, kind.name)
                    args, kwargs = self._evened(operands, found, whole, kind.name, args, kwargs)
                    break
        versions = _versions(operands)
        result = func(*args, **kwargs) if args is given else self._run(func, args, kwargs, kind.name, True)
        self._note_all(result, whole, operands)
        if versions != _versions(operands):
            self._changed(operands, versions, whole, kind.name, evened=args is not given)
        return result

    def _parts(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """torch's own collectives do not say what they write."""
        result = func(*args, **kwargs)
        whole = Type(dict.fromkeys(self._all, Origin(kind.name, str(call_site()))))
        for x in operands:
            self._written(x, whole)
        self._note_all(result, whole, operands)
        return result

    def _silent(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
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
                self._written(x, whole)
        return result

    def _unseen(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Tensor]
    ) -> Any:
        """What takes an unknown value gives unknown ones, in what it writes into, too."""
        versions = _versions(operands)
        result = func(*args, **kwargs)
        for x, before, after in zip(operands, versions, _versions(operands), strict=True):
            if before != after:
                self._unknown_in(x, operands, kind.name)
        return result

    def _unknown_in(self, x: Tensor, operands: Sequence[Tensor], name: str) -> None:
        """Something unknown was written into ``x``, which must not be taken for what it was."""
        if self.type_of(x) is None:
            return
        if x.requires_grad:
            self._unknown(next(y for y in operands if self.type_of(y) is None), operands, name)
        unseen_write(x, Origin(name, str(call_site())))

    def _types(self, operands: Sequence[Tensor], name: str) -> list[Type] | None:
        """The types of the operands; None if one is unknown and nothing requires grad."""
        found: list[Type] = []
        for x in operands:
            kind = marked(x)
            if kind is None or writes.any or not kind.axes <= self._all:
                kind = self.type_of(x)
            if kind is None:
                if torch.is_grad_enabled() and (functorch_active() or any(y.requires_grad for y in operands)):
                    self._unknown(x, operands, name)
                return None
            if kind.plain and x.requires_grad and not (x.is_leaf or _of_tracked(x) or functorch_active()):
                self._from_nowhere(x, name)
            found.append(kind)
        return found

    def _evened(
        self,
        operands: Sequence[Tensor],
        found: Sequence[Type],
        whole: Type,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        but: Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with a pvary of each operand that requires grad and does not vary as the others do."""
        others: dict[int, Tensor] = {}
        if torch.is_grad_enabled():
            for x, kind in zip(operands, found, strict=True):
                if len(kind.axes) != len(whole.axes) and x is not but and _differentiated(x):
                    others[id(x)] = self.vary(x, whole.axes - kind.axes, name, operands, found)
        if not others:
            return args, kwargs
        return _replaced(args, others), {key: _replaced(value, others) for key, value in kwargs.items()}

    def _special(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """Functions that write, draw, or take no more than the shape of an operand."""
        target: Any = kwargs.get("out")
        if kind.in_place and operands:
            target = operands[0]
        over = kind.overwrites or not kind.in_place
        over = over and isinstance(target, Tensor) and not (_tracked(target) or functorch_active())
        count = [x for x in operands if not _is_in(x, target)]
        if kind.fresh and operands and kwargs.get("requires_grad"):
            pass  # a leaf made for each rank's own
        elif kind.fresh or (kind.random and kind.name.endswith("_like")):
            count = operands[1:]
        elif kind.alike:
            count = operands[:1]
        elif kind.in_place and target is not None:
            count = operands[1:] if over else operands
        found = self._types(count, kind.name)
        if found is None:
            return self._unseen(kind, func, args, kwargs, operands)
        if kind.drops is not None and kind.drops(args, kwargs):
            found.append(self._dropped(kind, count, found))
        if kind.random:
            found.append(self._random(kind.name))
        whole = join(found, kind.name) if found else INVARIANT
        if isinstance(target, Tensor):
            self._make_room(target, whole, kind.name, operands)
        given = args
        args, kwargs = self._evened(
            count, found[: len(count)], whole, kind.name, args, kwargs, target if isinstance(target, Tensor) else None
        )
        versions = _versions(operands)
        result = func(*args, **kwargs)
        self._note_all(result, whole, operands)
        if kind.fresh and isinstance(result, Tensor):
            like = self.type_of(operands[0])
            if like is not None and like.axes:
                alike(result, like)
        if over:
            self._overwritten(target, whole)
        for x in operands:
            if _is_in(x, target) and not over:
                self._written(x, whole)
        if not kind.in_place and versions != _versions(operands):
            others = [i for i, x in enumerate(operands) if not _is_in(x, target)]
            self._changed(
                [operands[i] for i in others], [versions[i] for i in others], whole, kind.name, evened=args is not given
            )
        elif kind.in_place and versions[1:] != _versions(operands[1:]):
            self._changed(operands[1:], versions[1:], whole, kind.name, evened=args is not given)
        return result

    def _each(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """Functions of lists, element by element."""
        every = [*args, *kwargs.values()]
        rows = [arg for arg in every if isinstance(arg, (tuple, list)) and arg and isinstance(arg[0], Tensor)]
        if not rows:
            rows = [operands]
        single = [arg for arg in every if isinstance(arg, Tensor)] if rows != [operands] else []
        together = [[row[i] for row in rows if i < len(row)] + single for i in range(len(rows[0]))]
        kinds: list[Type | None] = []
        others: dict[int, Tensor] = {}
        for group in together:
            found = self._types(group, kind.name)
            whole = None if found is None else join(found, kind.name)
            kinds.append(whole)
            if found is None or whole is None or not torch.is_grad_enabled():
                continue
            for x, each in zip(group, found, strict=True):
                if len(each.axes) == len(whole.axes) or not _differentiated(x):
                    continue
                if kind.in_place and x is group[0]:
                    got = f"{_text(x)}, {_along(each)}, beside what varies along {names(sorted(whole.axes))}"
                    fix = f"mc.pvary it before, or do without {kind.name}"
                    self._refuse(kind.name, "writes what varies into a graph of what is invariant.", got, fix)
                others[id(x)] = self.vary(x, whole.axes - each.axes, kind.name, group, found)
        if others:
            args, kwargs = _replaced(args, others), {key: _replaced(value, others) for key, value in kwargs.items()}
        versions = [_versions(group) for group in together]
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)) and len(result) == len(together):
            for y, whole in zip(result, kinds, strict=True):
                if whole is not None:
                    self._note_all(y, whole, operands)
        elif isinstance(result, Tensor) and kinds[0] is not None:
            self._note_all(result, kinds[0], operands)
        for group, before, whole in zip(together, versions, kinds, strict=True):
            if kind.name.startswith("_fused_"):  # these do not count
                for x in group[: len(group) - len(single)]:
                    if whole is None:
                        self._unknown_in(x, group, kind.name)
                    elif (mine := self.type_of(x)) is None or mine.axes != whole.axes:
                        self._written(x, whole)
            elif before != (now := _versions(group)):
                if whole is not None:
                    self._changed(group, before, whole, kind.name)
                    continue
                for x, old, new in zip(group, before, now, strict=True):
                    if old != new:
                        self._unknown_in(x, group, kind.name)
        return result

    def _get(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property: x.T and the like have the type of x, and so has its gradient."""
        result = func(*args)
        if isinstance(result, Tensor) and result is not args[0] and kind.name != "_base":
            if kind.name == "grad" and marked(result) is not None:
                return result
            mine = self.type_of(args[0])
            if mine is not None:
                self._note(result, self._of_gradient(mine) if kind.name == "grad" else mine, (args[0],))
        return result

    def _of_gradient(self, kind: Type) -> Type:
        """The type of the gradient of a value: what is invariant has been summed by the backward of pvary."""
        axes = self._all - kind.axes
        return kind.ends(axes, Origin("backward", str(call_site()))) if axes else kind

    def _own_leaf(self, x: Tensor, begins: bool) -> None:
        """What was made in the image of something that varies, and becomes a leaf, is each rank's own."""
        if begins and not x.requires_grad and (like := made_like(x)) is not None and self.type_of(x) is not None:
            self._note(x, join([like, self.type_of(x) or like], "requires_grad_"), (x,))

    def _set(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        x, value = args[0], args[1] if len(args) > 1 else None
        if kind.name == "requires_grad":
            self._own_leaf(x, bool(value))
        if isinstance(value, Tensor) and kind.name in ("grad", "data"):
            mine, theirs = self.type_of(x), self.type_of(value)
            name = f"x.{kind.name} = ..."
            if theirs is None and mine is not None and x.requires_grad:
                self._unknown(value, [value], name)
            if kind.name == "grad" and mine is not None and theirs is not None and mine.axes != theirs.axes:
                got = f"x {_text(x)} {_along(mine)}; the gradient {_along(theirs)}"
                self._refuse(name, "sets a gradient of another type than x has.", got, "leave gradients alone")
            if kind.name == "data" and mine is not None and theirs is not None:
                if _tracked(x) and (lacks := theirs.axes - mine.axes):
                    self._out_of_graph(x, mine, lacks, f"{name} at {call_site()}")
                result = func(*args)
                self._note(x, theirs, (x,))
                return result
            if kind.name == "data":
                self._known.pop(id(x), None)
                unmark(x)
        return func(*args)

    def _host(self, kind: Kind, operands: Sequence[Tensor]) -> None:
        for x in operands:
            mine = self.type_of(x)
            if mine is None:
                self._unknown(x, operands, kind.name)
            if mine.axes and not asked_in("torch.nn.init"):  # trunc_normal_ draws until all fit: a rank's own affair
                self._refuse(
                    kind.name,
                    f"makes a Python value of a tensor that varies along {names(sorted(mine.axes))}.",
                    f"{_text(x)}, {_along(mine)}",
                    "reduce it first; torch.where in place of if; mc.axis_index(axis) for a rank's place",
                )

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
                f"x {_text(operands[0])}, {_along(mine)}",
                "draw alike: `with mc.rng(layout, seed=...)` or `with mc.fork_rng(axes)`; mc.pvary(x) before, if each "
                "rank shall drop its own",
            )
        return random

    # ------------------------------------------------------------------------------------------------- writing in place

    def _changed(
        self, operands: Sequence[Tensor], versions: Sequence[int], whole: Type, name: str, evened: bool = False
    ) -> None:
        """Which of the operands an operation has written into shows in their versions."""
        for x, before, after in zip(operands, versions, _versions(operands), strict=True):
            if before != after:
                mine = self.type_of(x)
                lacks = whole.axes - mine.axes if mine is not None else frozenset()
                if lacks and x.requires_grad and (evened or (_tracked(x) and not torch.is_grad_enabled())):
                    assert mine is not None
                    self._out_of_graph(x, mine, lacks, f"{name} at {call_site()}")
                self._written(x, whole)

    def _written(self, x: Tensor, kind: Type) -> None:
        """Values of a type were written into ``x``."""
        old = self.type_of(x)
        if old is not None:
            kind = join([kind, old], "a write in place")
            self._note(x, kind, (x,))
        if x._base is not None and (base := self.type_of(x._base)) is not None:
            self._note(x._base, join([base, kind], "a write in place"))
        self._spread(x, kind)

    @staticmethod
    def _spread(x: Tensor, kind: Type) -> None:
        """All that shares the memory of ``x`` varies, too."""
        if kind.axes:
            origin = Origin("a write in place", str(call_site()))
            write(x, Type(dict.fromkeys(kind.axes, origin)))

    def _overwritten(self, x: Tensor, kind: Type) -> None:
        """All values of ``x`` are now of a type, whatever they were."""
        if x._base is not None:
            self._written(x, kind)
            if self.type_of(x) is None:
                self._note(x, kind, (x,))
            return
        self._note(x, kind)
        forget(x)
        self._spread(x, kind)

    def _make_room(self, target: Tensor, whole: Type, name: str, operands: Sequence[Tensor]) -> None:
        """Before something that varies is written into what requires grad and is invariant: pvary of that, in place."""
        owner = target if target._base is None else target._base
        mine = self.type_of(owner) or self.type_of(target)
        if mine is None or not _tracked(owner):
            return
        missing = whole.axes - mine.axes
        if not missing:
            return
        if functorch_active():
            self._refuse(
                name,
                f"writes what varies along {names(sorted(missing))} into a value that is invariant, under a transform "
                "of torch.func: no pvary can be inserted there.",
                f"{_text(target)}, {_along(mine)}",
                f"write it out of place, or mc.pvary(x, {self._names(missing)!r}) before",
            )
        if not self.insert:
            self._due(target, missing, name, operands, [])
        with self._apart(), torch.enable_grad():
            _VaryInPlace.apply(owner, self._axis(missing))  # type: ignore[no-untyped-call]
        self._note(owner, mine.begins(missing, Origin(name, str(call_site()))))

    # ------------------------------------------------------------------------------------------------------------ pvary

    def vary(
        self, x: Tensor, axes: frozenset[str], name: str, operands: Sequence[Tensor] = (), found: Sequence[Type] = ()
    ) -> Tensor:
        """pvary of ``x``: the one that was made before, if ``x`` is what it was then."""
        if not self.insert:
            self._due(x, axes, name, operands, found)
        mine = self.type_of(x)
        assert mine is not None
        entry = self._remembered(x)
        made = entry.by.get(axes)
        if made is not None and unwrap_if_dead(made) is made:
            return made
        base = x._base
        if base is not None and self._stands_for(base, x, mine):
            y = view_again(x, self.vary(base, axes, name, operands, found))
        else:
            with self._apart():
                y = pvary(x, self._names(axes), mesh=self.mesh)
        self._note(y, mine.begins(axes, Origin(name, str(call_site()))))
        entry.by[axes] = y
        return y

    def _stands_for(self, base: Tensor, x: Tensor, mine: Type) -> bool:
        """Whether to vary ``base`` in place of its view ``x``, so that all views of it, such as the parts of one
        weight, cost one sum.
        """
        if not base.requires_grad or functorch_active() or _OFTEN * x.numel() < base.numel():
            return False
        whole = self.type_of(base)
        return whole is not None and whole.axes == mine.axes

    def _remembered(self, x: Tensor) -> _Varied:
        if isinstance(x, Parameter) or id(x) in self._known:
            store: OrderedDict[int, _Varied] = self._always
        else:  # it may have ended for everybody else
            store = self._lately
        entry = store.get(id(x))
        if entry is None or entry.x is not x or entry.version != _version(x):
            entry = store[id(x)] = _Varied(x)
        store.move_to_end(id(x))
        if len(self._lately) > _LATELY:
            self._lately.popitem(last=False)
        return entry

    def _names(self, axes: frozenset[str]) -> AxisName:
        ordered = tuple(axis for axis in self.mesh.axis_names if axis in axes)
        return ordered[0] if len(ordered) == 1 else ordered

    def _axis(self, axes: frozenset[str]) -> Axis:
        return self.mesh.axis(self._names(axes), WHERE)

    # ------------------------------------------------------------------------------------------------------ collectives

    def collective(self, fn: Any, x: Any, axis: AxisName, /, *args: Any, mesh: Mesh | None, **kwargs: Any) -> Any:
        """Call a public collective."""
        name = fn.__name__
        with self._apart():
            axes = self._axes_of(name, axis, mesh)
            leaves, form = tree_flatten(x)
            kinds: list[Type] = []
            if all(isinstance(leaf, Tensor) for leaf in leaves):
                op = args[_OP_AT[name]] if name in _OP_AT else "sum"
                for i, leaf in enumerate(leaves):
                    kind, leaves[i] = self._taken(name, leaf, axes, op)
                    kinds.append(kind)
                x = tree_unflatten(leaves, form)
            return self._given(name, fn(x, axis, *args, mesh=mesh, **kwargs), kinds, axes, leaves)

    def made(self, fn: Any, axis: AxisName, mesh: Mesh | None, /, *args: Any, **kwargs: Any) -> Any:
        """Call a collective that takes no tensor."""
        with self._apart():
            axes = self._axes_of(fn.__name__, axis, mesh)
            return self._given(fn.__name__, fn(*args, **kwargs), [], axes)

    def _axes_of(self, name: str, axis: AxisName, mesh: Mesh | None) -> frozenset[str]:
        along = check.axis_of(name, axis, mesh)
        if along.mesh is not self.mesh and (along.mesh.shape, along.mesh._ranks) != (self.mesh.shape, self.mesh._ranks):
            fail(name, "a collective over another mesh than the one that is checked.", got=f"{along.mesh}, {self.mesh}")
        return frozenset([along.name] if isinstance(along.name, str) else along.name)

    def _given(
        self, name: str, result: Any, kinds: Sequence[Type], axes: frozenset[str], of: Sequence[Any] = ()
    ) -> Any:
        """What a collective gives, with its types noted."""
        origin = Origin(name, str(call_site()))
        given = [_gives(name, kind, axes, self._all, origin) for kind in kinds or [INVARIANT]]

        def noted(result: Any) -> Any:
            with without_modes():
                for i, y in enumerate(tree_flatten(result)[0]):
                    if isinstance(y, Tensor):
                        self._note(y, given[min(i, len(given) - 1)], of)
            return result

        return result.then(noted) if isinstance(result, Work) else noted(result)

    def _taken(self, name: str, x: Tensor, axes: frozenset[str], op: str) -> tuple[Type, Tensor]:
        """One leaf of what a collective takes: its type, and itself or its pvary."""
        kind = self.type_of(x)
        if kind is None:
            self._unknown(x, [x], name)
        if name in ("pvary", "shard"):
            if name == "pvary" and not (x.is_floating_point() or x.is_complex()):
                return kind, x
            wrong = kind.axes & axes
            if wrong:
                fix = (
                    "leave it out" if name == "pvary" else "it is a part already; mc.reshard takes parts to other parts"
                )
                what = f"takes what is invariant along {names(sorted(axes))}; this varies along {names(sorted(wrong))}."
                self._refuse(name, what, f"x {_text(x)}, {_along(kind)}", fix)
            return kind, x
        missing = axes - kind.axes
        if not missing:
            return kind, x
        if name in ("all_reduce", "reduce_scatter", "reduce") and op not in ("mean", "max", "min", "band", "bor"):
            before = [kind.ended[axis] for axis in sorted(missing) if axis in kind.ended]
            if before or x.requires_grad:
                along = names(sorted(missing))
                was = f"; reduced already by {before[0]}" if before else ""
                self._refuse(
                    name,
                    f"reduces a value that is invariant along {along}: that multiplies it by the number of ranks.",
                    f"x {_text(x)}, {_along(kind)}{was}",
                    f"reduce each loss once over each axis along which it varies; if it is meant, mc.pvary(x, {along})",
                )
        if torch.is_grad_enabled() and _differentiated(x):
            x = self.vary(x, missing, name)
        return kind, x

    def laid_out(self, fn: Any, layouts: str, /, *operands: Tensor, mesh: Mesh | None, **kwargs: Any) -> Any:
        """Call a function whose types stand in a string of layouts."""
        with self._apart():
            return self._laid_out(fn, layouts, operands, mesh, kwargs)

    def _laid_out(
        self, fn: Any, layouts: str, operands: tuple[Tensor, ...], mesh: Mesh | None, kwargs: dict[str, Any]
    ) -> Any:
        name, where = fn.__name__, self.mesh if mesh is None else mesh
        if not all(isinstance(x, Tensor) for x in operands) or not isinstance(where, Mesh):
            return _of_layouts(fn, layouts, operands, mesh, kwargs)
        pattern = parse_arrow(name, layouts, where.shape, len(operands))
        spoken = frozenset(pattern.spoken)
        found = []
        for number, (x, layout) in enumerate(zip(operands, pattern.inputs, strict=True)):
            kind = self.type_of(x)
            if kind is None:
                self._unknown(x, operands, name)
            wrong = (kind.axes & spoken) - set(layout.axes)
            if wrong:
                along = names(sorted(wrong))
                what = f"operand {number} varies along {along}, and its layout {str(layout)!r} says that it does not."
                self._refuse(
                    name, what, f"{_text(x)}, {_along(kind)}", f"reduce it over {along}, or name it in its layout"
                )
            found.append(kind)
        rest = frozenset().union(*(kind.axes for kind in found)) - spoken
        inputs = list(operands)
        if torch.is_grad_enabled():
            for i, (x, kind, layout) in enumerate(zip(operands, found, pattern.inputs, strict=True)):
                missing = (frozenset(layout.axes) | rest) - kind.axes
                if missing and _differentiated(x):
                    inputs[i] = self.vary(x, missing, name, operands, found)
        result = _of_layouts(fn, layouts, inputs, mesh, kwargs)
        axes = frozenset(pattern.output.axes) | rest
        origin, known = Origin(name, str(call_site())), join(found, name).since
        whole = Type({axis: known.get(axis, origin) for axis in axes}, dict.fromkeys(spoken - axes, origin))

        def noted(y: Tensor) -> Tensor:
            with without_modes():
                if not any(y is x for x in operands):
                    self._note(y, whole)
            return y

        return result.then(noted) if isinstance(result, Work) else noted(result)

    # --------------------------------------------------------------------------------------- backward, custom functions

    def _backward(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gradients have the types of their values; what runs in backward is not looked at."""
        args, kwargs = self._seeded(kind, args, kwargs)
        here.watcher = None
        try:
            result = func(*args, **kwargs)
        finally:
            here.watcher = self
            if not (
                kwargs.get("retain_graph") or kwargs.get("create_graph") or len(args) > (3 if kind.gradients else 2)
            ):
                self._lately.clear()  # their graphs have ended
        if kind.gradients:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            for x, g in zip(inputs, result, strict=False):
                if isinstance(x, Tensor) and isinstance(g, Tensor) and (mine := self.type_of(x)) is not None:
                    self._note(g, self._of_gradient(mine))
        return result

    def _seeded(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a backward, with gradients of outputs that have their types."""
        place, name = (2, "grad_outputs") if kind.gradients else (1, kind.seeds)
        seeds = args[place] if len(args) > place else kwargs.get(name)
        ends = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
        if seeds is None or ends is None:
            return args, kwargs
        others: dict[int, Tensor] = {}
        for y, g in zip(_several(ends), _several(seeds), strict=False):
            if not isinstance(y, Tensor) or not isinstance(g, Tensor) or (mine := self.type_of(y)) is None:
                continue
            theirs = self.type_of(g)
            if theirs is None:
                self._unknown(g, [g], kind.name)
            if extra := theirs.axes - mine.axes:
                self._refuse(
                    kind.name,
                    f"is given a gradient that varies along {names(sorted(extra))}, of a value that does not.",
                    f"the value {_text(y)} {_along(mine)}; the gradient {_along(theirs)}",
                    "pvary the value before, or reduce the gradient",
                )
            if (g.requires_grad or _tracked(g)) and (lacks := mine.axes - theirs.axes):
                others[id(g)] = self.vary(g, lacks, kind.name)
        if others:
            args = tuple(_replaced(arg, others) if i == place else arg for i, arg in enumerate(args))
            kwargs = {key: _replaced(value, others) if key == name else value for key, value in kwargs.items()}
        return args, kwargs

    def function(self, cls: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom function of autograd: its backward takes care of what happens in its forward."""
        if cls is CheckpointFunction:
            return self._checkpoint(own, args)
        if cls.__module__ == CheckpointFunction.__module__:
            with self._apart():
                return own(cls, *args, **kwargs)
        if any(isinstance(arg, (Module, types.FunctionType, types.MethodType)) for arg in args):
            fix = (
                "torch.utils.checkpoint.checkpoint, or mc.check_vma(False) around it and mc.mark_varying of the result"
            )
            self._refuse(f"{cls.__name__}.apply", "takes a function, which it may call out of sight.", "", fix)
        with self._apart():
            operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            found = self._types(operands, cls.__name__)
            whole, given = join(found, cls.__name__) if found else INVARIANT, args
            if found:
                args, kwargs = self._evened(operands, found, whole, cls.__name__, args, kwargs)
            versions = _versions(operands)
            result = self._run(own, (cls, *args), kwargs, cls.__name__, args is not given)
            if found is not None:
                self._note_all(result, whole, operands)
                self._changed(operands, versions, whole, cls.__name__, evened=args is not given)
            else:
                for x, before, after in zip(operands, versions, _versions(operands), strict=True):
                    if before != after:
                        self._unknown_in(x, operands, cls.__name__)
        return result

    def _checkpoint(self, own: Any, args: tuple[Any, ...]) -> Any:
        """The reentrant checkpoint: the graph that counts is made in backward, by calling the function again."""
        run, preserve, *given = args
        kinds = self._kinds(given)
        found: list[Type | None] = []

        def tracked(*values: Any) -> Any:
            with without_modes():
                for value, kind in zip(values, kinds, strict=True):
                    if kind is not None and marked(value) is None:
                        self._note(value, kind)
            first = not found
            with self._watching() if first else self:
                result = run(*values)
            if first:
                found.extend(self._kinds(_several(result)))
            return result

        here.watcher = None
        try:
            result = own(CheckpointFunction, tracked, preserve, *given)
        finally:
            here.watcher = self
        with without_modes():
            for y, kind in zip(_several(result), found, strict=True):
                if kind is not None:
                    self._note(y, kind)
        return result

    def _kinds(self, values: Iterable[Any]) -> list[Type | None]:
        with without_modes():
            return [self.type_of(x) if isinstance(x, Tensor) else None for x in values]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Look again, where this is still among the modes."""
        here.watcher = self
        try:
            yield
        finally:
            here.watcher = None

    # --------------------------------------------------------------------------------------------------------- the ends

    def result(self, y: Tensor, axes: Sequence[str], label: str, spec: str) -> Tensor:
        """What a checked function returns, which may vary along these axes and must along no other."""
        with self._apart():
            return self._result(y, axes, label, spec)

    def _result(self, y: Tensor, axes: Sequence[str], label: str, spec: str) -> Tensor:
        kind = self.type_of(y)
        if kind is None:
            self._unknown(y, [y], f"the return of {label}")
        extra = kind.axes - set(axes)
        if extra:
            along = names(sorted(extra))
            since = "; ".join(f"along {axis!r} since {kind.since[axis]}" for axis in sorted(extra))
            fail(
                WHERE,
                f"{label} varies along {along}, which its spec {spec!r} does not name.",
                got=f"{label} {_text(y)}; it varies {since}",
                fix=f"reduce it over {along}, or name the axis in its spec",
                kind=VaryingError,
            )
        missing = frozenset(axes) - kind.axes
        if missing and torch.is_grad_enabled() and _differentiated(y):
            return self.vary(y, missing, f"the return of {label}")
        return y

    # ----------------------------------------------------------------------------------------------------------- errors

    def _refuse(self, name: str, what: str, got: str, fix: str) -> NoReturn:
        parts = [got] if got else []
        parts.append(f"mesh {self.mesh.shape}")
        fail(WHERE, f"{name} at {call_site()} {what}", got="; ".join(parts), fix=fix, kind=VaryingError)

    def _unknown(self, x: Tensor, operands: Sequence[Tensor], name: str) -> NoReturn:
        place = next((i for i, y in enumerate(operands) if y is x), 0)
        grad = ", requires grad" if x.requires_grad else ""
        fix = f"{_MARK}; or make it, or pass it, where it is seen"
        if isinstance(x, Parameter):
            fix = (
                "mc.mark_varying(module, axes) of the module that it is a parameter of, () for what is the same on all"
            )
        what, got = "a tensor that was made out of sight", f"operand {place}, {_text(x)}{grad}"
        if (kind := marked(x)) is not None:
            if isinstance(written := also_written(x, kind), Origin):
                what = f"a tensor into which {written} wrote one that was made out of sight"
            elif foreign := sorted(kind.axes - self._all):
                what = f"a tensor that varies along {names(foreign)} of another mesh"
        self._refuse(name, f"takes {what}: along which axes it varies is unknown.", got, fix)

    def _from_nowhere(self, x: Tensor, name: str) -> NoReturn:
        node = type(x.grad_fn).__name__
        self._refuse(
            name,
            f"takes the result of a custom autograd function, {node}, that was called out of sight.",
            f"{_text(x)}",
            "call it as MyFunction.apply(...), not through a name that `apply` was bound to before; or "
            "mc.mark_varying(its result, axes), after mc.pvary of its inputs",
        )

    def _due(
        self,
        x: Tensor,
        axes: frozenset[str],
        name: str,
        operands: Sequence[Tensor],
        found: Sequence[Type],
    ) -> NoReturn:
        """A pvary is missing."""
        along = names(sorted(axes))
        place = next((f"operand {i}" for i, y in enumerate(operands) if y is x), "x")
        others = [
            f"operand {i}, {_text(y)}, {_along(kind)}"
            for i, (y, kind) in enumerate(zip(operands, found, strict=False))
            if kind.axes & axes
        ]
        mine = self.type_of(x) or INVARIANT
        self._refuse(
            name,
            f"takes a value that requires grad and is invariant along {along}, where others vary: a pvary is missing.",
            "; ".join([f"{place}, {_text(x)}, {_along(mine)}", *others[:2]]),
            f"mc.pvary({place}, {self._names(axes)!r}) before; check_vma=True inserts it",
        )


# -------------------------------------------------------------------------------------------------------------- pieces


class _Varied:
    """What pvary made of a tensor, by axes."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.version = x, _version(x)
        self.by: dict[frozenset[str], Tensor] = {}


class _VaryInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return apply(rule_named("all_reduce"), g, ctx.axis, ("sum",)), None


@at_trace_time
def _untraceable() -> None:
    """An exception in traced code would only break the graph; this one is raised by the compiler."""
    fail(
        WHERE,
        "torch.compile cannot trace checked code.",
        fix="check_vma=False, or `with mc.check_vma(False)` around the call and mc.mark_varying of its result; in "
        "compiled code mc.pvary is written out",
        kind=VaryingError,
    )


_watching: list[bool] = []


def _watch_functions() -> None:
    if not _watching:
        _watching.append(True)
        watch_functions(_on_function)


def _on_function(cls: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    watcher = here.watcher
    if isinstance(watcher, Checker):
        return watcher.function(cls, own, args, kwargs)
    return own(cls, *args, **kwargs)


def _gather(values: Iterable[Any], into: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, (tuple, list)):
            _gather(value, into)
        elif isinstance(value, slice):
            _gather((value.start, value.stop, value.step), into)


def _replaced(value: Any, others: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, (tuple, list)):
        parts = [_replaced(part, others) for part in value]
        return parts if isinstance(value, list) else tuple(parts)  # a NamedTuple is a tuple for torch
    return value


def _is_in(x: Tensor, target: Any) -> bool:
    return any(x is y for y in _several(target)) if target is not None else False


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _tracked(x: Tensor) -> bool:
    """Whether ``x`` is a result in a graph."""
    if functorch_active():
        inner: Tensor | None = x
        while inner is not None:
            if inner.requires_grad:
                return True
            inner = unwrapped(inner)
        return False
    return x.requires_grad and not x.is_leaf


def _of_tracked(x: Tensor) -> bool:
    """Whether it came to require grad with what it is a view of."""
    return x._base is not None and x._base.requires_grad


def _is_array(data: Any) -> bool:
    """Whether it is somebody's memory, and no numbers of Python."""
    return hasattr(data, "__array_interface__") and getattr(data, "ndim", 0) > 0


def _differentiated(x: Tensor) -> bool:
    return x.requires_grad or (functorch_active() and (x.is_floating_point() or x.is_complex()))


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else version_of(x)


def _versions(operands: Sequence[Tensor]) -> list[int]:
    try:
        return [version_of(x) for x in operands]
    except RuntimeError:  # inference tensors do not count
        return [_version(x) for x in operands]


def _of_layouts(fn: Any, layouts: str, operands: Sequence[Tensor], mesh: Mesh | None, kwargs: dict[str, Any]) -> Any:
    """einsum takes the layouts first, reshard the tensor."""
    if fn.__name__ == "reshard":
        return fn(*operands, layouts, mesh=mesh, **kwargs)
    return fn(layouts, *operands, mesh=mesh, **kwargs)


_OP_AT = {"all_reduce": 0, "reduce_scatter": 1, "reduce": 1}
"""Where the reduce op stands behind the axis."""


def _gives(name: str, kind: Type, axes: frozenset[str], everything: frozenset[str], origin: Origin) -> Type:
    """The type of the result of a collective."""
    if name in ("all_reduce", "all_gather_invariant", "broadcast"):
        return kind.ends(axes, origin)
    if name in ("recv", "exchange", "scatter"):  # the sender's, which the receiver does not know
        return kind.begins(everything - kind.axes, origin)
    return kind.begins(axes - kind.axes, origin)


def _text(x: Tensor) -> str:
    return shape_text(x.dtype, x.shape)


def _along(kind: Type) -> str:
    if not kind.axes:
        return "invariant"
    return "varies " + ", ".join(f"along {axis!r} since {kind.since[axis]}" for axis in sorted(kind.axes))
