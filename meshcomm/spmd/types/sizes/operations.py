"""What the checker of varying types makes of sizes that depend on data.

The sizes of what ``nonzero``, a mask or ``unique`` give are numbers that differ between ranks. They come back as
numbers that know it: computed with, they stay so; in an operation they vary as a tensor does; as plain numbers they are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm._torch import functorch_active
from meshcomm.errors import names
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.rules.operands import gather, is_among, mapped, text_of
from meshcomm.spmd.types.rules.operations import Operations
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.sizes.ragged import (
    Ragged,
    Rows,
    carried_within,
    differing,
    fresh,
    note_ragged,
    number_of,
    ragged_of,
    shapes_elsewhere,
    standing_for,
    tensors_of,
)
from meshcomm.spmd.types.sizes.size_rules import ASKS, INDEXED, LIKE, counts_parts, source_of, takes_ints
from meshcomm.spmd.types.sizes.varying_numbers import COUNTS, Varying, plain, varying
from meshcomm.spmd.types.vma import Origin, Type, join


class Sizes(Operations):
    """Follows sizes from what decides them to where they are asked for."""

    def _sized(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that may have to do with sizes that depend on data."""
        numbers: list[Varying] = []
        operands: list[Tensor] = []
        for values in (args, kwargs.values()):
            gather(values, Varying, numbers)
            gather(values, Tensor, operands)
        if kind.name.startswith("sym_") and not operands:
            return func(*args, **kwargs)
        if kind.setter and len(args) > 1 and isinstance(args[1], Tensor):
            if kind.name == "data":
                note_ragged(args[0], ragged_of(args[1]))
            return self._typed(kind, func, args, kwargs, ())
        ragged = [r for x in operands if (r := ragged_of(x)) is not None]
        if ragged and kind.name in ASKS and operands[0] is args[0] and ragged_of(args[0]) is not None:
            return self._asked(kind, func, args, kwargs)
        deciding: list[Type] = [number.kind for number in numbers]
        pictured, named, source = self._pictured(kind, args, kwargs, deciding)
        if not deciding and not ragged:
            result = self._typed(kind, func, args, kwargs, ())
            if functorch_active():
                carried_within(result, operands, kind.name)
            return result
        self._countable(kind, args, kwargs)
        kinds = [number.kind for number in numbers]
        if kind.name in LIKE:
            kinds += [r.kind for r in ragged]
        also = [standing_for(each) for each in kinds]
        if numbers:
            args, kwargs = plain(args), plain(kwargs)
        result = self._typed(kind, func, args, kwargs, also)
        results = tensors_of(result)
        if results or kind.settles:
            whole = join([*deciding, *(r.kind for r in ragged)], kind.name)
            with self._apart():
                self._shaped(kind, func, pictured, named, results, operands, source, whole)
        return result

    def numbers(self, x: Tensor, values: list[int], where: str) -> list[Any]:
        """The entries of ``x``, which are these, as sizes that know along which axes they vary."""
        with self._apart():
            if (ragged := ragged_of(x)) is not None and ragged.dims(x.shape):
                self._plainly(where, x, ragged, "counts of which every rank has as many, one for each part")
            kind = self._deciding(x)
            return values if kind is None else [varying(value, COUNTS, kind) for value in values]

    def _asked(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sizes: those that differ are numbers that know it."""
        x, ragged = args[0], ragged_of(args[0])
        assert ragged is not None
        found = func(*args, **kwargs)
        if x.shape == () or not ragged.dims(x.shape):
            return found
        if kind.name == "__len__":
            if 0 in ragged.dims(x.shape):
                self._plainly(
                    "len()", x, ragged, "x.shape[0], a number that is followed, where len() must give a plain one"
                )
            return found
        others: list[Any] = []
        for shape in ragged.shapes:
            try:
                twin = None if shape is None else torch.empty(shape, dtype=x.dtype, device="meta")
                others.append(None if twin is None else func(twin, *args[1:], **kwargs))
            except RuntimeError:  # larger than any memory
                others.append((-1,) * len(found) if isinstance(found, tuple) else -1)
        if not isinstance(found, tuple):
            return _number(found, others, ragged.kind)
        parts = [_number(n, [o and o[i] for o in others], ragged.kind) for i, n in enumerate(found)]
        return torch.Size(parts) if isinstance(found, torch.Size) else tuple(parts)

    def _plainly(self, what: str, x: Tensor, ragged: Ragged, fix: str) -> NoReturn:
        along = names(sorted(ragged.kind.axes))
        since = "; ".join(str(ragged.kind.since[axis]) for axis in sorted(ragged.kind.axes))
        self._refuse(
            what,
            f"gives a plain number of what depends on data: the size of a tensor that varies along {along}.",
            f"{text_of(x)}, its size varies since {since}",
            fix,
        )

    def _countable(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """How many results there are must not depend on data."""
        fix = "mc.split_rows(x, counts), x.tensor_split(n), whose number of parts is known; or an operation on all of x"
        for size in args[1:] if kind.name in _COUNTED else ():
            if isinstance(size, Tensor) and size.dim() == 0 and (mine := self._deciding(size)) is not None:
                size = varying(int(size), COUNTS, mine)
            if isinstance(size, Varying):
                size._refuse(f"the number of parts, or of dims, of {kind.name}", fix)
        dim = counts_parts(kind.name, args, kwargs)
        x = args[0] if args else None
        ragged = ragged_of(x) if isinstance(x, Tensor) and dim is not None else None
        if ragged is not None and dim is not None and x is not None and dim % x.dim() in ragged.dims(x.shape):
            self._plainly(f"{kind.name}, or iterating,", x, ragged, fix)

    # -------------------------------------------------------------------------------------------------- what decides

    def _pictured(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], deciding: list[Type]
    ) -> tuple[Sequence[Any], dict[str, Any], Any]:
        """The arguments with numbers in place of tensors that decide sizes, whose types are added to a list."""
        source = source_of(kind.name, args, kwargs)
        if source is not None:
            mine = self._deciding(source.of)
            if mine is None:
                source = None
            else:
                deciding.append(mine)
        first = takes_ints(kind.name)
        if first is not None:
            each = _Numbers(self, deciding)
            if kind.name in ("narrow", "narrow_copy") and len(args) == 4:  # from where on is no size
                return [args[0], args[1], 0, each(args[3])], kwargs, source
            return [*args[:first], *mapped(each, args[first:])], mapped(each, kwargs), source
        if kind.name in INDEXED and len(args) > 1:
            return [args[0], self._index(args[1], deciding), *args[2:]], kwargs, source
        return args, kwargs, source

    def _deciding(self, x: Tensor) -> Type | None:
        """The type of what decides sizes: unknown may differ anywhere. None: it is the same everywhere."""
        mine = self.type_of(x)
        if mine is None:
            unknown = Origin("a tensor that was made out of sight", call_site())
            return Type(dict.fromkeys(self._all, unknown), grid=self.grid)
        return mine if mine.axes else None

    def _index(self, index: Any, deciding: list[Type]) -> Any:
        """An index: masks select who knows how many, slices are as long as their ends say."""
        if isinstance(index, tuple):
            return tuple(part for each in index for part in _several(self._index(each, deciding), each))
        if isinstance(index, list):  # of an operator
            return [part for each in index for part in _several(self._index(each, deciding), each)]
        if isinstance(index, Tensor):
            if index.dtype in (torch.bool, torch.uint8):
                mine = self._deciding(index)
                if mine is None:
                    rows = varying(0, [int(index.count_nonzero())] * 3, Type({}))
                else:
                    deciding.append(mine)
                    rows = number_of(mine)
                return (Rows(rows),) * index.dim() if index.dim() != 1 else Rows(rows)
            return 0 if index.dim() == 0 else index
        if isinstance(index, Varying):
            return 0
        if isinstance(index, slice):
            ends: list[Any] = [index.start, index.stop, index.step]
            kinds = [end.kind for end in ends if isinstance(end, Varying)]
            tensors = [self._deciding(end) for end in ends if isinstance(end, Tensor)]
            kinds += [each for each in tensors if each is not None]
            deciding += kinds
            return Rows(number_of(join(kinds, "a slice"))) if kinds else index
        return index

    # --------------------------------------------------------------------------------------------------- the results

    def _shaped(
        self,
        kind: Kind,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
        operands: Sequence[Tensor],
        source: Any,
        whole: Type,
    ) -> None:
        """Note the sizes of results."""
        out = kwargs.get("out")
        own = [i for i, y in enumerate(results) if is_among(y, out) or not is_among(y, list(operands))]
        if kind.settles or kind.name.startswith("resize"):
            if results and kind.name.endswith("_"):
                y = results[0]
                note_ragged(y, fresh(y.shape, range(y.dim()), whole))
            return
        if all(results[i].dim() == 0 for i in own):
            return
        inputs = [x for x in operands if ragged_of(x) is not None]
        if source is not None:
            for i in own:
                y = results[i]
                dims = {dim % y.dim() for dim in source.dims(i, y)} if y.dim() else set()
                if inputs and any(x.dim() == y.dim() for x in inputs):
                    dims |= differing(y, inputs, operands)
                note_ragged(y, fresh(y.shape, dims, whole))
            return
        if kind.name in _SPLITS and isinstance(args[1], (tuple, list)) and len(args[1]) == len(results):
            self._split(args, kwargs, results, inputs, whole)
            return
        shapes = [None] * 3 if kind.name == "grad" else shapes_elsewhere(func, args, kwargs, len(results))
        for i in own:
            y = results[i]
            if not y.dim():
                continue
            others = [each[i] if each is not None and len(each[i]) == y.dim() else None for each in shapes]
            if sum(other is not None for other in others) < 2:
                note_ragged(y, fresh(y.shape, _guessed(kind, y, args, inputs, operands), whole))
                continue
            found = Ragged(others, whole)
            note_ragged(y, found if found.dims(y.shape) else None)

    def _split(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
        inputs: Sequence[Tensor],
        whole: Type,
    ) -> None:
        """The parts are as long as they were said to be, whatever they are parts of."""
        dim = int(args[2] if len(args) > 2 else kwargs.get("dim", 0)) % results[0].dim()
        rest = differing(results[0], inputs) - {dim} if inputs else set()
        for y, length in zip(results, args[1], strict=True):
            ragged = fresh(y.shape, rest, whole)
            shapes = (
                [list(y.shape) for _ in COUNTS] if ragged is None else [list(shape or ()) for shape in ragged.shapes]
            )
            if isinstance(length, Varying):
                for shape, other in zip(shapes, length.others, strict=True):
                    shape[dim] = 0 if other is None else int(other)
            note_ragged(y, Ragged([tuple(shape) for shape in shapes], whole))


_COUNTED = frozenset(
    "split unsafe_split chunk unsafe_chunk tensor_split hsplit vsplit dsplit flatten squeeze".split()  # noqa: SIM905
)
"""Give as many parts, or dims, as they are told."""

_SPLITS = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")


class _Numbers:
    """Gives a number for a tensor that stands for a size, and what is none as it is."""

    def __init__(self, sizes: Sizes, deciding: list[Type]) -> None:
        self.sizes, self.deciding, self.count = sizes, deciding, 0

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dim() or value.is_floating_point():
                return value
            mine = self.sizes._deciding(value)
            if mine is None:
                return int(value)
            self.deciding.append(mine)
            self.count += 1
            return number_of(mine, self.count)
        return value


def _several(value: Any, of: Any) -> tuple[Any, ...]:
    """A mask of several dims is as many indices."""
    return value if isinstance(value, tuple) and isinstance(of, Tensor) else (value,)


def _number(here: Any, others: Sequence[Any], kind: Type) -> Any:
    known = [other for other in others if other is not None]
    return here if all(other == here for other in known) else varying(here, others, kind)


def _guessed(
    kind: Kind, y: Tensor, args: Sequence[Any], inputs: Sequence[Tensor], operands: Sequence[Tensor]
) -> Sequence[int]:
    """The dims that may differ, where it could not be computed."""
    if kind.name in ("view", "reshape", "expand"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(sizes) == y.dim():
            return [i for i, size in enumerate(sizes) if isinstance(size, Varying) or size == -1]
    return sorted(differing(y, inputs, operands))
