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
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from meshcomm._torch import (
    functorch_active,
    tree_flatten,
    tree_unflatten,
    unwrap_if_dead,
    version_of,
    watch_functions,
    without_modes,
)
from meshcomm.collectives import check
from meshcomm.collectives.reduce import pvary
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.errors import VaryingError, fail, names, shape_text
from meshcomm.layout.notation import parse_arrow
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.torch_rules import Kind, kind_of
from meshcomm.spmd.vma import INVARIANT, Origin, Type, also_written, join, marked, note, noted, write
from meshcomm.watch import here
from meshcomm.work import Work

__all__ = ["Checker"]

WHERE = "check_vma"
_MARK = "mc.mark_varying(x, axes) says along which axes it varies, () for none"
_LATELY = 64
"""How many results a pvary is remembered for; leaves are remembered all the time."""


class Checker(TorchFunctionMode):
    """Tracks what runs on this thread while it is entered, as the part of one rank of ``mesh``."""

    def __init__(self, mesh: Mesh, *, insert: bool) -> None:
        """``insert``: a missing pvary is made; otherwise it is an error."""
        super().__init__()
        self.mesh, self.insert = mesh, insert
        self._all = frozenset(mesh.axis_names)
        self._known: dict[int, tuple[Tensor, Type]] = {}
        self._leaves: dict[int, _Varied] = {}
        self._lately: OrderedDict[int, _Varied] = OrderedDict()
        self._writes = False
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
            self._leaves.clear()
            self._lately.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not looked at, and is seen by no other mode either."""
        outer, here.watcher = here.watcher, None
        try:
            with without_modes():
                yield
        finally:
            here.watcher = outer

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
            kind = noted(x) if known is None else known[1]
            if kind is None:
                return None
        return also_written(x, kind) if self._writes else kind

    def _note(self, x: Tensor, kind: Type) -> None:
        self._known.pop(id(x), None)
        note(x, kind, self._known)

    def _note_all(self, result: Any, kind: Type, but: Sequence[Tensor] = ()) -> None:
        """Note the type of every tensor in a result that is none of those that were given."""
        if isinstance(result, Tensor):
            if not any(result is x for x in but):
                self._note(result, kind)
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
        kind = kind_of(func)
        if kind.getter:
            return self._get(kind, func, args)
        if torch.compiler.is_compiling():
            fail(WHERE, "torch.compile cannot trace checked code.", fix="check_vma=False and mc.pvary in compiled code")
        operands: list[Tensor] = []
        _gather(args, operands)
        if kwargs:
            _gather(kwargs.values(), operands)
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
            self._note_all(result, INVARIANT)
            return result
        found = self._types(operands, kind.name)
        if found is None:
            return func(*args, **kwargs)
        whole = found[0] if len(found) == 1 else join(found, kind.name)
        if len(found) > 1:
            args, kwargs = self._evened(operands, found, whole, kind.name, args, kwargs)
        versions = _versions(operands)
        result = func(*args, **kwargs)
        if type(result) is Tensor and not any(result is x for x in operands):
            self._note(result, whole)
        else:
            self._note_all(result, whole, operands)
        if versions != (now := _versions(operands)):
            for x, before, after in zip(operands, versions, now, strict=True):
                if before != after:
                    self._written(x, whole)
        return result

    def _types(self, operands: Sequence[Tensor], name: str) -> list[Type] | None:
        """The types of the operands; None if one is unknown and nothing requires grad."""
        found: list[Type] = []
        for x in operands:
            kind = self.type_of(x)
            if kind is None:
                if torch.is_grad_enabled() and (functorch_active() or any(y.requires_grad for y in operands)):
                    self._unknown(x, operands, name)
                return None
            if kind.plain and x.requires_grad and not (x.is_leaf or x._base is not None or functorch_active()):
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
        count = [x for x in operands if not _is_in(x, target)]
        if kind.fresh or (kind.random and kind.name.endswith("_like")):
            count = operands[1:]
        elif kind.alike:
            count = operands[:1]
        elif kind.in_place and target is not None:
            count = operands
        found = self._types(count, kind.name)
        if found is None:
            return func(*args, **kwargs)
        if kind.drops is not None and kind.drops(args, kwargs):
            found.append(self._dropped(kind, count, found))
        if kind.random:
            found.append(self._random(kind.name))
        whole = join(found, kind.name) if found else INVARIANT
        if isinstance(target, Tensor):
            self._make_room(target, whole, kind.name, operands)
        args, kwargs = self._evened(
            count, found[: len(count)], whole, kind.name, args, kwargs, target if isinstance(target, Tensor) else None
        )
        result = func(*args, **kwargs)
        self._note_all(result, whole, operands)
        for x in operands:
            if _is_in(x, target):
                self._written(x, whole)
        return result

    def _each(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """Functions of lists, element by element."""
        rows = [arg for arg in args if isinstance(arg, (tuple, list)) and arg and isinstance(arg[0], Tensor)]
        if not rows:
            rows = [operands]
        single = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, Tensor)] if rows != [operands] else []
        together = [[row[i] for row in rows if i < len(row)] + single for i in range(len(rows[0]))]
        kinds: list[Type | None] = []
        for group in together:
            found = self._types(group, kind.name)
            kinds.append(None if found is None else join(found, kind.name))
            if found is not None and torch.is_grad_enabled():
                for x, each in zip(group, found, strict=True):
                    if len(each.axes) != len(kinds[-1].axes) and _differentiated(x):  # type: ignore[union-attr]
                        fix = f"pvary what is invariant before, or do without {kind.name}"
                        self._refuse(kind.name, "mixes types in lists of tensors that require grad.", "", fix)
        versions = [_versions(group) for group in together]
        result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)) and len(result) == len(together):
            for y, whole in zip(result, kinds, strict=True):
                if whole is not None:
                    self._note_all(y, whole, operands)
        elif isinstance(result, Tensor) and kinds[0] is not None:
            self._note_all(result, kinds[0], operands)
        for group, before, whole in zip(together, versions, kinds, strict=True):
            for x, old, new in zip(group, before, _versions(group), strict=True):
                if old != new and whole is not None:
                    self._written(x, whole)
        return result

    def _get(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property: x.T and the like have the type of x, and so has its gradient."""
        result = func(*args)
        if isinstance(result, Tensor) and result is not args[0] and kind.name != "_base":
            mine = self.type_of(args[0])
            if mine is not None:
                self._note(result, mine)
        return result

    def _set(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        x, value = args[0], args[1] if len(args) > 1 else None
        if isinstance(value, Tensor):
            mine, theirs = self.type_of(x), self.type_of(value)
            if kind.name == "grad" and mine is not None and theirs is not None and mine.axes != theirs.axes:
                got = f"x {_text(x)} {_along(mine)}; the gradient {_along(theirs)}"
                self._refuse(
                    "x.grad = ...", "sets a gradient of another type than x has.", got, "leave gradients alone"
                )
            if kind.name == "data" and theirs is not None:
                self._note(x, theirs)
        return func(*args)

    def _host(self, kind: Kind, operands: Sequence[Tensor]) -> None:
        for x in operands:
            mine = self.type_of(x)
            if mine is None:
                self._unknown(x, operands, kind.name)
            if mine.axes:
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

    def _written(self, x: Tensor, kind: Type) -> None:
        """Values of a type were written into ``x``."""
        old = self.type_of(x)
        self._note(x, kind if old is None else join([kind, old], "a write in place"))
        if x._base is not None and (base := self.type_of(x._base)) is not None:
            self._note(x._base, join([base, kind], "a write in place"))
        if kind.axes:
            self._writes = True
            write(x, kind)

    def _make_room(self, target: Tensor, whole: Type, name: str, operands: Sequence[Tensor]) -> None:
        """Before something that varies is written into what requires grad and is invariant: pvary of that, in place."""
        owner = target if target._base is None else target._base
        mine = self.type_of(owner) or self.type_of(target)
        if mine is None or not torch.is_grad_enabled() or not owner.requires_grad or owner.is_leaf:
            return
        missing = whole.axes - mine.axes
        if not missing:
            return
        if not self.insert or functorch_active():
            self._due(target, missing, name, operands, [], ", and out of place")
        with self.paused():
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
        with self.paused():
            y = pvary(x, self._names(axes), mesh=self.mesh)
        self._note(y, mine.begins(axes, Origin(name, str(call_site()))))
        entry.by[axes] = y
        return y

    def _remembered(self, x: Tensor) -> _Varied:
        store: dict[int, _Varied] = self._leaves if x.is_leaf else self._lately
        entry = store.get(id(x))
        if entry is None or entry.x is not x or entry.version != _version(x):
            entry = store[id(x)] = _Varied(x)
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
        with self.paused():
            axes = self._axes_of(name, axis, mesh)
            leaves, form = tree_flatten(x)
            kinds: list[Type] = []
            if all(isinstance(leaf, Tensor) for leaf in leaves):
                op = args[_OP_AT[name]] if name in _OP_AT else "sum"
                for i, leaf in enumerate(leaves):
                    kind, leaves[i] = self._taken(name, leaf, axes, op)
                    kinds.append(kind)
                x = tree_unflatten(leaves, form)
            return self._given(name, fn(x, axis, *args, mesh=mesh, **kwargs), kinds, axes)

    def made(self, fn: Any, axis: AxisName, mesh: Mesh | None, /, *args: Any, **kwargs: Any) -> Any:
        """Call a collective that takes no tensor."""
        with self.paused():
            axes = self._axes_of(fn.__name__, axis, mesh)
            return self._given(fn.__name__, fn(*args, **kwargs), [], axes)

    def _axes_of(self, name: str, axis: AxisName, mesh: Mesh | None) -> frozenset[str]:
        along = check.axis_of(name, axis, mesh)
        if along.mesh is not self.mesh and (along.mesh.shape, along.mesh._ranks) != (self.mesh.shape, self.mesh._ranks):
            fail(name, "a collective over another mesh than the one that is checked.", got=f"{along.mesh}, {self.mesh}")
        return frozenset([along.name] if isinstance(along.name, str) else along.name)

    def _given(self, name: str, result: Any, kinds: Sequence[Type], axes: frozenset[str]) -> Any:
        """What a collective gives, with its types noted."""
        origin = Origin(name, str(call_site()))
        given = [_gives(name, kind, axes, self._all, origin) for kind in kinds or [INVARIANT]]

        def noted(result: Any) -> Any:
            with without_modes():
                for i, y in enumerate(tree_flatten(result)[0]):
                    if isinstance(y, Tensor):
                        self._note(y, given[min(i, len(given) - 1)])
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
        with self.paused():
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
        here.watcher = None
        try:
            result = func(*args, **kwargs)
        finally:
            here.watcher = self
        if kind.gradients:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            for x, g in zip(inputs, result, strict=False):
                if isinstance(x, Tensor) and isinstance(g, Tensor) and (mine := self.type_of(x)) is not None:
                    self._note(g, mine)
        return result

    def function(self, cls: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom function of autograd: its backward takes care of what happens in its forward."""
        if cls is CheckpointFunction:
            return self._checkpoint(own, args)
        if cls.__module__ == CheckpointFunction.__module__:
            with self.paused():
                return own(cls, *args, **kwargs)
        if any(isinstance(arg, (Module, types.FunctionType, types.MethodType)) for arg in args):
            fix = (
                "torch.utils.checkpoint.checkpoint, or mc.check_vma(False) around it and mc.mark_varying of the result"
            )
            self._refuse(f"{cls.__name__}.apply", "takes a function, which it may call out of sight.", "", fix)
        with self.paused():
            operands: list[Tensor] = []
            _gather([*args, *kwargs.values()], operands)
            found = self._types(operands, cls.__name__)
            whole = join(found, cls.__name__) if found else INVARIANT
            if found:
                args, kwargs = self._evened(operands, found, whole, cls.__name__, args, kwargs)
            result = own(cls, *args, **kwargs)
            if found is not None:
                self._note_all(result, whole, operands)
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
        with self.paused():
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
        self._refuse(
            name,
            "takes a tensor that was made out of sight: along which axes it varies is unknown.",
            f"operand {place}, {_text(x)}{grad}",
            f"{_MARK}; or make it, or pass it, where it is seen",
        )

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
        extra: str = "",
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
            f"mc.pvary({place}, {self._names(axes)!r}) before{extra}; check_vma=True inserts it",
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
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, others) for part in value)
    return value


def _is_in(x: Tensor, target: Any) -> bool:
    return any(x is y for y in _several(target)) if target is not None else False


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _differentiated(x: Tensor) -> bool:
    return x.requires_grad or (functorch_active() and (x.is_floating_point() or x.is_complex()))


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else version_of(x)


def _versions(operands: Sequence[Tensor]) -> list[int]:
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
