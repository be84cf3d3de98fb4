"""What the checker of varying types makes of a collective: what it takes, and what it gives."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from meshcomm._torch import (
    functorch_active,
    tree_flatten,
    tree_unflatten,
    without_modes,
)
from meshcomm.axis import AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.layout.notation import parse_arrow
from meshcomm.mesh import Mesh, current_mesh
from meshcomm.runtime.callsite import call_site, known_files, outermost, site_of
from meshcomm.runtime.ops import Op, ops
from meshcomm.spmd.types.core import Core
from meshcomm.spmd.types.grids import grid_of
from meshcomm.spmd.types.rules.operands import (
    along_of,
    differentiated,
    gather,
    text_of,
)
from meshcomm.spmd.types.seen_changes import NOTED_AT
from meshcomm.spmd.types.sizes.ragged import collected, differing, fresh, note_ragged, ragged_of
from meshcomm.spmd.types.sizes.varying_numbers import Varying, made, plain
from meshcomm.spmd.types.vma import (
    INVARIANT,
    NAME,
    Origin,
    Type,
    join,
    nothing_wider_in,
    one_of,
    writes,
)
from meshcomm.watch import by_name, here, told_of_call
from meshcomm.work import Work, looked_at

_MOST = 1024
"""Types of results that are remembered."""


class _Way:
    """How a public collective is called with all its arguments in order."""

    __slots__ = ("cuts", "mesh", "op", "run")

    def __init__(self, fn: Any) -> None:
        code = fn.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.op = ops[fn.__name__]
        self.mesh = names.index("mesh")
        """Which one of them is the mesh."""
        self.cuts = tuple(map(names.index, self.op.cuts)) if names[:2] == ("x", "axis") else None
        """Which ones say what is this rank's own size; None: it does not begin with a tensor and an axis."""
        in_order = code.replace(co_argcount=len(names), co_kwonlyargcount=0)
        self.run = FunctionType(in_order, fn.__globals__, fn.__name__, None, fn.__closure__)
        """It, with none of them by name: to give them so takes as long as all else here."""


class _Given(NamedTuple):
    """What a collective makes of what is of some type, where it is called by one instruction."""

    kind: Type
    origin: Origin
    code: CodeType
    """That of the instruction: as long as it is held, no other one has its id."""
    fits: bool
    """It takes what is of that type as it is."""


_ways: dict[Any, _Way] = {}
_axes_in: dict[AxisName, frozenset[str]] = {}
"""By what an axis is called."""


class Collectives(Core):
    """Calls the public collectives, and the functions whose types stand in a string of layouts."""

    def called(self, fn: Any, args: tuple[Any, ...], /) -> Any:
        """Call a public collective, of which these are all arguments in order. Where it was called before with a tensor
        of this type, which it takes as it is, nothing is looked at but what may have changed.
        """
        if is_dynamo_compiling():  # which would go into what follows
            return told_of_call(self, fn, args)
        way = _ways.get(fn)
        if way is None:
            way = _ways[fn] = _Way(fn)
        x, mesh = args[0], args[way.mesh]
        if mesh is None and (mesh := current_mesh()) is self.mesh:
            args = *args[: way.mesh], mesh, *args[way.mesh + 1 :]
        if (
            way.cuts is None
            or ((sort := type(x)) is not Tensor and sort is not Parameter)
            or mesh is not self.mesh
            or made.any
            or functorch_active()
        ):
            return told_of_call(self, fn, args)
        for i in way.cuts:
            if args[i] is not None:
                return told_of_call(self, fn, args)
        op, grid, outer = way.op, self.grid, None
        kind: Any = getattr(x, NAME, None)
        axes: Any = _axes_in.get(mesh.axis(args[1], op.name).name)
        known, frame = known_files, sys._getframe(2)  # that of the public function
        while known[(code := frame.f_code).co_filename] and (outer := frame.f_back) is not None:
            frame = outer  # as `outermost` does it
        found = grid.given.get((kind, op, axes, id(code), frame.f_lasti))
        del frame, outer  # as long as it runs, nothing holds the user's variables
        if found is None or not found.fits:
            return told_of_call(self, fn, args)
        here.watcher = None  # as `_apart` does it, which takes longer
        try:
            with without_modes():
                try:
                    at = x._version
                except RuntimeError:  # an inference tensor does not count
                    at = 0
                if (at and at != getattr(x, NOTED_AT, 0)) or (
                    writes.any and not grid.written <= kind.axes and not nothing_wider_in(x, kind, grid)
                ):
                    given = by_name(fn, args, 2)
                    return self._collective(fn, x, args[1], (), given.pop("mesh"), given)
                result = way.run(*args)
                if isinstance(result, Work):
                    return looked_at(result, partial(self._note_one, op, found, axes, x))
                self._note_one(op, found, axes, x, result)
                return result
        finally:
            here.watcher = self  # type: ignore[assignment]

    def _note_one(self, op: Op, found: _Given, axes: frozenset[str], x: Tensor, y: Any) -> None:
        """Note the type of what a collective has made of ``x``."""
        if type(y) is not Tensor or made.any or y._base is not None:
            self._note_given(op, (found.kind,), found.origin, axes, (x,), {}, y)
            return
        if self._known:
            self._known.pop(id(y), None)
        kind = found.kind
        y._meshcomm_type = kind if kind.plain != y.requires_grad else kind.seen(kind.plain)  # type: ignore[attr-defined]
        try:  # as note does it
            if at := y._version:
                y._meshcomm_version = at  # type: ignore[attr-defined]
        except RuntimeError:
            pass

    def collective(self, fn: Any, x: Any, axis: AxisName, /, *args: Any, mesh: Mesh | None, **kwargs: Any) -> Any:
        """Call a public collective."""
        outer, here.watcher = here.watcher, None  # as `_apart` does it, which takes longer
        try:
            with without_modes():
                return self._collective(fn, x, axis, args, mesh, kwargs)
        finally:
            here.watcher = outer

    def _collective(
        self, fn: Any, x: Any, axis: AxisName, args: tuple[Any, ...], mesh: Mesh | None, kwargs: dict[str, Any]
    ) -> Any:
        op = ops[fn.__name__]
        numbers: list[Varying] = []
        if made.any:
            gather((args, kwargs), Varying, numbers)
            args, kwargs = plain(args), plain(kwargs)
        axes = self._axes_of(op.name, axis, mesh)
        named = op.arguments(args, kwargs) if args else kwargs
        if numbers:
            x = self._told(op, x, join([number.kind for number in numbers], op.name), axes)
        if isinstance(x, Tensor):
            kind, x = self._taken(op, x, axes, named)
            kinds, leaves = [kind], [x]
        else:
            kinds, (leaves, form) = [], tree_flatten(x)
            if all(isinstance(leaf, Tensor) for leaf in leaves):
                for i, leaf in enumerate(leaves):
                    kind, leaves[i] = self._taken(op, leaf, axes, named)
                    kinds.append(kind)
                x = tree_unflatten(leaves, form)
        return self._given(op, fn(x, axis, *args, mesh=mesh, **kwargs), kinds, axes, leaves, named)

    def _told(self, op: Op, x: Any, sizes: Type, axes: frozenset[str]) -> Any:
        """What is cut where numbers say varies along their axes as well, beside those of the collective."""
        leaves, form = tree_flatten(x)
        for i, leaf in enumerate(leaves):
            kind = self.type_of(leaf) if isinstance(leaf, Tensor) else None
            missing = frozenset() if kind is None else sizes.axes - kind.axes - axes
            if kind is None or not missing:
                continue
            if torch.is_grad_enabled() and differentiated(leaf):
                leaves[i] = self.vary(leaf, missing, op.name)
            else:
                leaves[i] = leaf.view_as(leaf)
                self._note(leaves[i], join([kind, sizes], op.name), (leaf,))
        return tree_unflatten(leaves, form)

    def made(self, fn: Any, axis: AxisName, mesh: Mesh | None, /, *args: Any, **kwargs: Any) -> Any:
        """Call a collective that takes no tensor."""
        with self._apart():
            axes = self._axes_of(fn.__name__, axis, mesh)
            return self._given(ops[fn.__name__], fn(*plain(args), **plain(kwargs)), [], axes)

    def tied(self, fn: Any, x: Any, others: Any, /) -> Any:
        """Call what gives the values and types of ``x``."""
        with self._apart():
            result = fn(x, *others)
            given, taken = (tree_flatten(tree)[0] for tree in (result, x))
            for y, leaf in zip(given, taken, strict=True):
                kind = self.type_of(leaf)
                if kind is None:
                    self._unknown(leaf, [leaf], fn.__name__)
                self._note(y, kind, (leaf,))
            return result

    def _axes_of(self, name: str, axis: AxisName, mesh: Mesh | None) -> frozenset[str]:
        along = check.axis_of(name, axis, mesh)
        if along.mesh is not self.mesh:
            self._same_mesh(name, along.mesh)
        found = _axes_in.get(along.name)
        if found is None:
            found = _axes_in[along.name] = one_of(frozenset(axes_in(along.name)))
        return found

    def _same_mesh(self, name: str, mesh: Mesh) -> None:
        if grid_of(mesh) is not self.grid:
            fail(
                name,
                "a collective over another mesh than the one that is checked.",
                got=f"{mesh} of ranks {list(mesh.ranks)}; checked is {self.mesh} of ranks {list(self.mesh.ranks)}",
                fix="`with mc.check_vma(mesh=...)` of that mesh around it: a value has a type there, too, if it is "
                "the same on whole axes",
            )

    def _given(
        self,
        op: Op,
        result: Any,
        kinds: Sequence[Type],
        axes: frozenset[str],
        of: Sequence[Any] = (),
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """What a collective gives, with its types noted."""
        frame = outermost(sys._getframe(2))  # no user's function is called between it and this one
        place = op, axes, id(frame.f_code), frame.f_lasti
        known, given = self.grid.given, []
        for kind in kinds or (INVARIANT,):
            key = kind, *place
            found = known.get(key)
            if found is None:  # remembered by the instruction, for types say where they come from
                if len(known) >= _MOST:
                    known.clear()
                found = known[key] = _given_of(op, kind, axes, self._all, frame)
            given.append(found.kind)
            origin = found.origin
        del frame  # what is noted later must not hold the user's variables
        if isinstance(result, Work):
            return looked_at(result, partial(self._note_given, op, given, origin, axes, of, named))
        if type(result) is not Tensor or made.any or op.cuts:
            self._note_given(op, given, origin, axes, of, named, result)
        else:
            self._note(result, given[0], of)
        return result

    def _note_given(
        self,
        op: Op,
        given: Sequence[Type],
        origin: Origin,
        axes: frozenset[str],
        of: Sequence[Any],
        named: Mapping[str, Any],
        result: Any,
    ) -> None:
        for i, y in enumerate((result,) if isinstance(result, Tensor) else tree_flatten(result)[0]):
            if isinstance(y, Tensor):
                self._note(y, given[min(i, len(given) - 1)], of)
                if made.any or op.cuts:
                    x = of[i] if i < len(of) and isinstance(of[i], Tensor) else None
                    collected(op, x, y, origin, axes, named)

    def _taken(self, op: Op, x: Tensor, axes: frozenset[str], named: Mapping[str, Any]) -> tuple[Type, Tensor]:
        """One leaf of what a collective takes: its type, and itself or its pvary."""
        kind, name = self.type_of(x), op.name
        if kind is None:
            self._unknown(x, [x], name)
        if op.takes == "I":
            if name == "pvary" and not (x.is_floating_point() or x.is_complex()):
                return kind, x
            wrong = kind.axes & axes
            if wrong:
                fix = (
                    "leave it out" if name == "pvary" else "it is a part already; mc.reshard takes parts to other parts"
                )
                what = f"takes what is invariant along {names(sorted(axes))}; this varies along {names(sorted(wrong))}."
                self._refuse(name, what, f"x {text_of(x)}, {along_of(kind)}", fix)
            return kind, x
        missing = axes - kind.axes
        if not missing:
            return kind, x
        if op.reduces and named.get("op", "sum") not in ("mean", "max", "min", "band", "bor"):
            before = [kind.ended[axis] for axis in sorted(missing) if axis in kind.ended]
            if before or x.requires_grad:
                along = names(sorted(missing))
                was = f"; reduced already by {before[0]}" if before else ""
                self._refuse(
                    name,
                    f"reduces a value that is invariant along {along}: that multiplies it by the number of ranks.",
                    f"x {text_of(x)}, {along_of(kind)}{was}",
                    f"reduce each loss once over each axis along which it varies; if it is meant, mc.pvary(x, {along})",
                )
        if torch.is_grad_enabled() and differentiated(x):
            x = self.vary(x, missing, name)
        return kind, x

    def gathered(self, name: str, whole: Sequence[Tensor], of: Sequence[Tensor], axes: AxisName, mesh: Mesh, /) -> None:
        """Note that ``whole`` were gathered of these leaves: each rank uses its own, and their gradients are summed."""
        with without_modes():
            along = self._axes_of(name, axes, mesh) if axes else frozenset[str]()
            origin = Origin(name, call_site())
            for y, x in zip(whole, of, strict=True):
                kind = self.type_of(x)
                if kind is not None:
                    begun = along - kind.axes
                    self._note(y, kind.begins(begun, origin) if begun else kind)
                elif y.requires_grad:
                    self._unknown(x, [x], name)

    def joined(self, name: str, fn: Any, operands: Sequence[Tensor], axis: AxisName, mesh: Mesh | None, /) -> Any:
        """Call what gives tensors that vary along the axes of all that it takes."""
        with self._apart():
            axes = self._axes_of(name, axis, mesh) if axis else frozenset()
            kinds = []
            for x in operands:
                kind = self.type_of(x)
                if kind is None:
                    self._unknown(x, operands, name)
                kinds.append(kind)
            found = join(kinds, name)
            begun = axes - found.axes
            whole = found.begins(begun, Origin(name, call_site())) if begun else found
            inputs = list(operands)
            if torch.is_grad_enabled():
                for i, (x, kind) in enumerate(zip(operands, kinds, strict=True)):
                    missing = whole.axes - kind.axes
                    if missing and differentiated(x):
                        inputs[i] = self.vary(x, missing, name, operands, kinds)
            result = fn(*inputs)
            for y in tree_flatten(result)[0]:
                self._note(y, whole)
            return result

    def laid_out(self, fn: Any, layouts: str, /, *operands: Tensor, mesh: Mesh | None, **kwargs: Any) -> Any:
        """Call a function whose types stand in a string of layouts."""
        with self._apart():
            return self._laid_out(fn, layouts, operands, mesh, kwargs)

    def _laid_out(
        self, fn: Any, layouts: str, operands: tuple[Tensor, ...], mesh: Mesh | None, kwargs: dict[str, Any]
    ) -> Any:
        name = fn.__name__
        where = check.mesh_of(name, "", mesh)
        self._same_mesh(name, where)
        if not all(isinstance(x, Tensor) for x in operands):
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
                    name, what, f"{text_of(x)}, {along_of(kind)}", f"reduce it over {along}, or name it in its layout"
                )
            found.append(kind)
        rest = frozenset().union(*(kind.axes for kind in found)) - spoken
        inputs = list(operands)
        if torch.is_grad_enabled():
            for i, (x, kind, layout) in enumerate(zip(operands, found, pattern.inputs, strict=True)):
                missing = (frozenset(layout.axes) | rest) - kind.axes
                if missing and differentiated(x):
                    inputs[i] = self.vary(x, missing, name, operands, found)
        result = _of_layouts(fn, layouts, inputs, mesh, kwargs)
        axes = frozenset(pattern.output.axes) | rest
        origin, known = Origin(name, call_site()), join(found, name).since
        whole = Type({axis: known.get(axis, origin) for axis in axes}, dict.fromkeys(spoken - axes, origin))

        def noted(y: Tensor) -> Tensor:
            with without_modes():
                if not any(y is x for x in operands):
                    self._note(y, whole)
                    if inputs := [x for x in operands if ragged_of(x) is not None]:
                        sizes = join([ragged.kind for x in inputs if (ragged := ragged_of(x)) is not None], name)
                        note_ragged(y, fresh(y.shape, differing(y, inputs), sizes))
            return y

        return result.then(noted) if isinstance(result, Work) else noted(result)


def _of_layouts(fn: Any, layouts: str, operands: Sequence[Tensor], mesh: Mesh | None, kwargs: dict[str, Any]) -> Any:
    """einsum takes the layouts first, reshard the tensor."""
    if fn.__name__ == "reshard":
        return fn(*operands, layouts, mesh=mesh, **kwargs)
    return fn(layouts, *operands, mesh=mesh, **kwargs)


def _given_of(op: Op, kind: Type, axes: frozenset[str], everything: frozenset[str], frame: FrameType) -> _Given:
    origin = Origin(op.name, site_of(frame))
    fits = kind.axes.isdisjoint(axes) if op.takes == "I" else axes <= kind.axes
    return _Given(_gives(op, kind, axes, everything, origin), origin, frame.f_code, fits)


def _gives(op: Op, kind: Type, axes: frozenset[str], everything: frozenset[str], origin: Origin) -> Type:
    """The type of the result of a collective."""
    if op.gives == "I":
        return kind.ends(axes, origin)
    begun = (everything if op.others else axes) - kind.axes  # of others: the sender's, which the receiver does not know
    return kind.begins(begun, origin) if begun else kind
