"""What the checker of varying types knows and says: the types of tensors, the pvarys that it has made, its errors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from meshcomm._torch import (
    at_trace_time,
    functorch_active,
    unwrap_if_dead,
    version_of,
    view_again,
    without_modes,
)
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.errors import VaryingError, fail, names
from meshcomm.mesh import Mesh
from meshcomm.runtime.axis_names import written_out
from meshcomm.runtime.callsite import call_site, outermost
from meshcomm.spmd.types.grids import ANYWHERE, Grid, grid_of
from meshcomm.spmd.types.leaf_numbers import whose
from meshcomm.spmd.types.remembered import Remembered
from meshcomm.spmd.types.rules.operands import (
    along_of,
    differentiated,
    same_place,
    text_of,
    tracked,
    version,
)
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.seen_changes import (
    NOTED_AT,
    accounted,
    by_hand,
    declared_at,
    moment,
    noted_at,
    saw,
    stamp,
)
from meshcomm.spmd.types.sizes.ragged import carried
from meshcomm.spmd.types.vma import (
    INVARIANT,
    NAME,
    Origin,
    Type,
    also_written,
    behind,
    in_spite,
    marked,
    note,
    nothing_wider_in,
    writes,
)
from meshcomm.watch import here

WHERE = "check_vma"
_MARK = "mc.mark_varying(x, axes) says along which axes it varies, () for none"
_MOST = 1024
"""Types that are remembered by the places where they are made."""
_OFTEN = 8
"""A view with less than this part of its tensor is varied alone: the sum of the whole would send too much."""


class Core(Remembered, TorchFunctionMode):
    """Tracks what runs on this thread while it is entered, as the part of one rank of ``mesh``."""

    def __init__(self, mesh: Mesh, *, insert: bool, grid: Grid | None = None) -> None:
        """``insert``: a missing pvary is made; otherwise it is an error. ``grid``: the mesh's, if it is known."""
        super().__init__()
        self.mesh, self.insert = mesh, insert
        self.grid = grid_of(mesh) if grid is None else grid
        self._all = self.grid.axes
        self._joined, self._short = self.grid.joined, self.grid.short  # a step is checked by a checker of its own
        self._known: dict[int, tuple[Tensor, Type, int]] = {}
        self._growing: dict[int, tuple[Tensor, Tensor]] = {}
        self._outer: list[tuple[Any, dict[str, Any]]] = []
        self._thread: dict[str, Any] = {"watcher": None}
        """What is known of the thread that has entered it last: ``here``, which is asked at each operation."""
        self._entered = self.passed = moment()

    def __enter__(self) -> Self:
        if not self._outer:
            self._entered = moment()
        self._outer.append((here.watcher, self._thread))
        here.watcher, self._thread = self, vars(here)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        here.watcher, self._thread = self._outer.pop()
        if not self._outer:
            if self._pvaried:
                self._forget_all()
            self._growing.clear()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What runs inside is not looked at, and is seen by no other mode either."""
        outer, here.watcher = here.watcher, None
        try:
            with without_modes():
                yield
        finally:
            here.watcher = outer

    # ------------------------------------------------------------------------------------------------- types of tensors

    def know(self, x: Tensor, kind: Type, what: str) -> None:
        """``x``, which is others' too, is of this type here."""
        self._known[id(x)] = x, kind.seen(x.requires_grad), version(x)
        in_spite(x)
        self._given_as[id(x)] = x, len(self._given_as), what

    def own(self, x: Tensor, kind: Type, what: str) -> None:
        """``x``, which is nobody else's, is of this type."""
        note(x, kind)
        self._given_as[id(x)] = x, len(self._given_as), what

    def type_of(self, x: Tensor) -> Type | None:
        """Along which axes ``x`` varies; None if that is unknown."""
        kind: Type | None = getattr(x, NAME, None)  # as marked, version and noted_at do it: this is asked often
        if type(kind) is not Type:
            kind = self._type_elsewhere(x)
            if kind is None:
                return None
        else:
            try:
                at = version_of(x)
            except RuntimeError:  # an inference tensor does not count
                at = 0
            if at and at != getattr(x, NOTED_AT, 0) and self._changed_unseen(x):
                return None
        if kind.grid is not self.grid and kind.grid is not ANYWHERE:
            kind = self._moved(x, kind)
            if kind is None:
                return None
        if not writes.any or nothing_wider_in(x, kind, self.grid):
            return kind
        return self._with_writes(x, kind)

    def _type_elsewhere(self, x: Tensor) -> Type | None:
        """The type of a tensor on which none is noted."""
        known = self._known.get(id(x))
        if known is None:
            other = behind(x)
            return None if other is None else self.type_of(other)
        return None if version(x) != known[2] and self._changed_unseen(x) else known[1]

    def _moved(self, x: Tensor, kind: Type) -> Type | None:
        """The type, on this mesh, of what was typed on another one, or by names alone; None if it has none here."""
        if kind.grid is None:
            axes = frozenset(written_out(kind.axes, self.mesh.names))
            if not axes <= self._all:
                return None
            return kind.placed_on(self.grid) if axes == kind.axes else kind.moved(self.grid, axes)
        found = kind.grid.moved(kind.axes, self.grid)
        if found is None or not (found.closed or not differentiated(x)):
            return None
        return kind.moved(self.grid, found.axes)

    def _changed_unseen(self, x: Tensor) -> bool:
        """Whether ``x``, changed in place since its type was noted, was changed out of sight."""
        if functorch_active():
            return False
        known = self._known.get(id(x))
        at, since = (noted_at(x), declared_at(x)) if known is None else (known[2], self._entered)
        if not accounted(x, at, since, self._entered, self.passed):
            return True
        if known is not None:
            self._known[id(x)] = x, known[1], version(x)
        else:
            stamp(x)
            if since:
                by_hand(x)
        return False

    def _with_writes(self, x: Tensor, kind: Type) -> Type | None:
        """Its type, noted as ``kind``, with what was written into its storage through other tensors."""
        whole = also_written(x, kind, self.grid)
        if isinstance(whole, Origin):
            return None
        if whole is not kind and tracked(x) and torch.is_grad_enabled():
            base = x._base
            lacks = whole.axes - kind.axes if base is None else whole.axes - (marked(base) or kind).axes
            if lacks:
                self._out_of_graph(x, kind, lacks, str(whole.since[min(lacks)]))
        if whole is not kind and x.requires_grad and x.is_leaf and not functorch_active():
            along = sorted(whole.axes - kind.axes)
            self._refuse(
                f"a write into {text_of(x)}",
                f"through other tensors that have its memory has brought in what varies along {names(along)}: it is a "
                "leaf that requires grad and is invariant, and the ranks would differ from then on.",
                f"{whole.since[along[0]]}; the leaf {along_of(kind)}",
                f"reduce it over {names(along)} first; mc.mark_varying(x, axes), if each rank shall have its own",
            )
        return whole

    def _out_of_graph(self, x: Tensor, kind: Type, axes: frozenset[str], by: str) -> NoReturn:
        self._refuse(
            f"a write into {text_of(x)}",
            f"that varies along {names(sorted(axes))} went past the graph of a value that requires grad and is "
            "invariant: its gradient would be one rank's part.",
            f"{by}; the value {along_of(kind)}",
            f"mc.pvary(x, {self._names(axes)!r}) before, or write into x itself, not through .detach() or .data",
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, evened: bool) -> Any:
        """Call it; with a pvary in place of an operand, it must not write into that."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if evened:
                self._not_into_varied(error, name)
            raise

    def _not_into_varied(self, error: RuntimeError, name: str) -> None:
        """Say it in our words, if that is what is wrong."""
        if "Output 0 of Pvary" in str(error):
            what = "changes an operand in place that requires grad and is invariant, where others vary."
            self._refuse(name, what, str(error).split(". ")[0], "pvary the operand before, or do it out of place")

    def _note(self, x: Tensor, kind: Type, of: Sequence[Tensor] = ()) -> None:
        """Note a type; ``of``: what was there before, of which ``x`` may be a view."""
        if self._known:
            self._known.pop(id(x), None)
        if kind.grid is None and (kind.since or kind.ended):
            kind.placed_on(self.grid)
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
            saw(x, noted_at(x), version(x))
            self._note(x, self._random("random numbers"))

    def _random(self, name: str) -> Type:
        axes = self._drawn_along()
        return self._begun_here(name, axes) if axes else INVARIANT

    def _begun_here(self, name: str, axes: frozenset[str]) -> Type:
        """The type of what varies along these axes since here."""
        return self._here(name, axes, lambda origin: Type(dict.fromkeys(axes, origin)))

    def _here(self, name: str, of: object, make: Callable[[Origin], Type]) -> Type:
        """The type that is made ``of`` something here: the same one each time."""
        frame = outermost(sys._getframe(1))
        place = id(frame.f_code), frame.f_lasti, name, of
        found = self.grid.here.get(place)
        if found is None:
            if len(self.grid.here) >= _MOST:
                self.grid.here.clear()
            found = self.grid.here[place] = frame.f_code, make(Origin(name, call_site())).placed_on(self.grid)
        return found[1]

    def _draws_own(self, kind: Type) -> bool:
        """Whether what is of this type is of the same one when each rank mixes its own random numbers into it."""
        axes = self._drawn_along()
        return axes <= kind.axes and (not kind.leaf or len(axes) == len(kind.axes))

    def _drawn_along(self) -> frozenset[str]:
        if here.draws_along is None:
            return self._all
        if here.draws_over is None or (grid := grid_of(here.draws_over)) is self.grid:
            return here.draws_along & self._all
        found = grid.moved(here.draws_along, self.grid)
        return self._all if found is None else found.axes

    def whole(self, where: str, x: Any, label: str, mesh: Mesh) -> None:
        """Refuse a tensor that varies at all, on ``mesh``."""
        with without_modes():
            self._whole(where, x, label, mesh)

    def _whole(self, where: str, x: Any, label: str, mesh: Mesh) -> None:
        kind = self.type_of(x)
        if not set(mesh.ranks) <= set(self.mesh.ranks):
            fail(where, "called over more ranks than are checked.", got=f"{mesh}; checked are those of {self.mesh}")
        if kind is None:
            self._unknown(x, [x], where)
        if kind.axes:
            what = f"takes global tensors, and {label} varies along {names(sorted(kind.axes))}."
            self._refuse(where, what, f"{text_of(x)}, {along_of(kind)}", "call it with what is the same on every rank")

    def made_whole(self, x: Tensor, what: str, mesh: Mesh) -> None:
        """Note that ``x`` is invariant along all axes of ``mesh``."""
        with without_modes():
            ended = dict.fromkeys(mesh.axis_names, Origin(what, call_site()))
            self._note(x, Type({}, ended, grid=grid_of(mesh)))

    def _sized(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that may have to do with sizes that depend on data."""
        raise NotImplementedError

    def _hooked(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of register_hook and the like, with a hook that is looked at while it runs."""
        raise NotImplementedError

    def _backward(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward pass."""
        raise NotImplementedError

    def _get(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property."""
        raise NotImplementedError

    def _set(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property that is set."""
        raise NotImplementedError

    def _own_leaf(self, x: Tensor, begins: bool) -> None:
        """What becomes a leaf that requires grad, if it begins to."""
        raise NotImplementedError

    def host_value(self, what: str) -> None:
        """Refuse a rank's place as a Python number."""
        fail(
            WHERE,
            f"{what} is a Python number that differs between ranks: nobody could see what varies with it.",
            got=f"at {call_site()}; mesh {self.mesh.shape}",
            fix="mc.axis_index(axis), a tensor that varies; torch.where in place of if",
            kind=VaryingError,
        )

    # ------------------------------------------------------------------------------------------------------------ pvary

    def vary(
        self, x: Tensor, axes: frozenset[str], name: str, operands: Sequence[Tensor] = (), found: Sequence[Type] = ()
    ) -> Tensor:
        """pvary of ``x``: the one that was made before, if ``x`` is what it was then and lies where it lay."""
        if not self.insert:
            self._due(x, axes, name, operands, found)
        entry = self._remembered(x)
        made = entry.by.get(axes)
        if made is not None and unwrap_if_dead(made) is made and same_place(x, made):
            return made
        mine = self.type_of(x)
        assert mine is not None
        base, y = x._base, None
        if base is not None and self._stands_for(base, x, mine):
            y = view_again(x, self.vary(base, axes, name, operands, found))
        if y is None or not same_place(x, y):  # a view of what its base was before x.data = ...
            outer, here.watcher = here.watcher, None  # as `_apart` does it, which takes longer
            try:
                with without_modes():
                    y = self._varied(x, axes)
            finally:
                here.watcher = outer
        self._note(y, _begun(mine, axes, Origin(name, call_site()), self.grid))
        carried(x, y)
        entry.put(axes, y)
        entry.wrapped = entry.wrapped or functorch_active()
        return y

    def _varied(self, x: Tensor, axes: frozenset[str]) -> Tensor:
        given = self._given_as.get(id(x))
        leaf = whose(x, axes, None if given is None or given[0] is not x else given[1:])
        axis = self._axis(axes)
        check.tensor("pvary", x, axis)
        if leaf is None:
            return apply(rule_named("pvary"), x, axis)
        # In backward the ranks compare whether they all sum the gradient of the same one.
        return apply(rule_named("pvary, of a leaf"), x, axis, (leaf,))

    def _stands_for(self, base: Tensor, x: Tensor, mine: Type) -> bool:
        """Whether to vary ``base`` in place of its view ``x``, so that all views of it, such as the parts of one
        weight, cost one sum.
        """
        if not base.requires_grad or functorch_active() or _OFTEN * x.numel() < base.numel():
            return False
        whole = self.type_of(base)
        return whole is not None and whole.axes == mine.axes

    def _names(self, axes: frozenset[str]) -> AxisName:
        found = self.grid.named.get(axes)
        if found is None:
            ordered = tuple(axis for axis in self.grid.shape if axis in axes)
            found = self.grid.named[axes] = ordered[0] if len(ordered) == 1 else ordered
        return found

    def _axis(self, axes: frozenset[str]) -> Axis:
        return self.mesh.axis(self._names(axes), WHERE)

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
        what, got = "a tensor that was made out of sight", f"operand {place}, {text_of(x)}{grad}"
        place_of_change = x if marked(x) is not None or x._base is None else x._base
        if self._changed_since(place_of_change):
            what = "a tensor that was changed out of sight"
        elif (kind := marked(x)) is not None:
            if isinstance(written := also_written(x, kind, self.grid), Origin):
                what = f"a tensor into which {written} wrote one that was made out of sight"
            elif kind.grid is not None and kind.grid is not self.grid:
                along = f"varies along {names(sorted(kind.axes))}" if kind.axes else "is invariant"
                what = f"a tensor that {along} on another mesh, {kind.grid.shape} of ranks {list(kind.grid.ranks)}"
            elif foreign := sorted(kind.axes - self._all):
                what = f"a tensor that varies along {names(foreign)} of another mesh"
        self._refuse(name, f"takes {what}: along which axes it varies is unknown.", got, fix)

    def _changed_since(self, x: Tensor) -> bool:
        known = self._known.get(id(x))
        at = known[2] if known is not None else noted_at(x) if marked(x) is not None else version(x)
        return version(x) not in (-1, at) and self._changed_unseen(x)

    def _from_nowhere(self, x: Tensor, name: str) -> NoReturn:
        node = type(x.grad_fn).__name__
        self._refuse(
            name,
            f"takes the result of a custom autograd function, {node}, that was called out of sight.",
            f"{text_of(x)}",
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
            f"operand {i}, {text_of(y)}, {along_of(kind)}"
            for i, (y, kind) in enumerate(zip(operands, found, strict=False))
            if kind.axes & axes
        ]
        mine = self.type_of(x) or INVARIANT
        self._refuse(
            name,
            f"takes a value that requires grad and is invariant along {along}, where others vary: a pvary is missing.",
            "; ".join([f"{place}, {text_of(x)}, {along_of(mine)}", *others[:2]]),
            f"mc.pvary({place}, {self._names(axes)!r}) before; check_vma=True inserts it",
        )


@functools.lru_cache(maxsize=4096)
def _begun(kind: Type, axes: frozenset[str], origin: Origin, grid: Grid) -> Type:
    """The type of what is made to vary along these axes too: the same one each time that it is made in one place."""
    return kind.begins(axes, origin).placed_on(grid)


@at_trace_time
def untraceable() -> None:
    """An exception in traced code would only break the graph; this one is raised by the compiler."""
    fail(
        WHERE,
        "torch.compile cannot trace checked code.",
        fix="check_vma=False, or `with mc.check_vma(False)` around the call and mc.mark_varying of its result; in "
        "compiled code mc.pvary is written out",
        kind=VaryingError,
    )
