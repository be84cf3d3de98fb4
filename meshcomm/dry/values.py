"""Which values a dry run knows after all, and what it answers where the program reads one that it does not know.

::

    torch.tensor(0.0), zeros, ones, arange, ...   known: made of the program's own numbers, however often they are
                                                  changed by known ones; small, and a copy with memory goes along
    torch.randn, torch.empty, collectives         unknown, and all that is made of them
    torch.bincount, counts of rows that come      as many for each, or what host_values says, and the line is listed
    x.item(), x.tolist(), bool(x), torch.equal    known values as they are; else host_values, and the line is listed
    x.nonzero(), x[mask], torch.unique            unknown: how large they are is a value, so a MeshError
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm._torch import (
    is_without_memory,
    operation_name,
    outside_transforms,
    tree_flatten,
    tree_unflatten,
    written_by,
)
from meshcomm.errors import MeshError, fail, shape_text
from meshcomm.runtime.callsite import CallSite, call_site, is_ours
from meshcomm.runtime.transports.dry.places import KNOWN

__all__ = ["HostRead", "HostValues", "Values"]

HostValues = float | bool | Mapping[str, Any] | Callable[[str, torch.dtype], Any] | None
"""What is read on the host where a dry run has no value: one number, line to a number or to those that are read there
in turn, or a function of the line and the dtype.
"""

_MANY = 20_000
"""Reads at one line of what nobody knows: a loop that ends by a value does not end by a guess."""
_MOST = 4096
"""Elements of what is known."""
_MAKERS = frozenset(
    ("zeros", "ones", "full", "arange", "scalar_tensor", "eye", "linspace", "lift_fresh", "lift_fresh_copy")
)
"""What makes values of the program's own numbers alone."""
_UNSET = ("empty", "new_empty")


@dataclass(frozen=True)
class HostRead:
    """A line at which a dry run's program reads a value that is not known.

    Args:
        line: ``"train.py:33"``.
        count: how many numbers were read there.
        value: the last one that was given.
        guessed: whether ``host_values`` said nothing of the line.
    """

    line: str
    count: int
    value: Any
    guessed: bool = False

    @property
    def kind(self) -> str:
        """As a finding: ``"guessed"``, or ``"given"``, which is none."""
        return "guessed" if self.guessed else "given"

    @property
    def text(self) -> str:
        """As a finding, in a line."""
        what = f"{self.line} reads {self.count} values that a dry run has not; {self.kind}: {self.value!r}"
        return f"meshcomm.dry_run: {what}; fix: host_values={{{self.line!r}: ...}}, what a real run reads there"

    def __str__(self) -> str:
        return f"{self.line}: {self.count} read, {self.kind} {self.value!r}"


class _Shadow:
    """The values of a tensor without memory, of the storage for which they were computed."""

    __slots__ = ("storage", "values")

    def __init__(self, x: Tensor, values: Tensor) -> None:
        self.values, self.storage = values, weakref.ref(x.untyped_storage())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shadow:
        """It is that of this storage alone; what copies a tensor has made the copy's."""
        return self


class Values:
    """What is known in one run, and what was read."""

    def __init__(self, given: HostValues) -> None:
        self._given = given
        self._reads: dict[CallSite, list[Any]] = {}
        self._turns: dict[str, Iterator[Any]] = {}

    @property
    def reads(self) -> tuple[HostRead, ...]:
        """Line by line, in the order in which they first read."""
        return tuple(HostRead(str(site), *read) for site, read in self._reads.items())

    # --------------------------------------------------------------------------------------------- what is known

    def of(self, x: Tensor) -> Tensor | None:
        """The values of ``x``, if they are known."""
        if not is_without_memory(x):
            return x if x.numel() <= _MOST and not _is_spoiled(x) and x.layout is torch.strided else None
        shadow: _Shadow | None = getattr(x, KNOWN, None)
        if shadow is None or shadow.storage() is not x.untyped_storage() or shadow.values.shape != x.shape:
            return None
        return None if _is_spoiled(shadow.values) else shadow.values

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the same with what is known, or forget what is written to with what is not."""
        name = operation_name(func).removeprefix("aten::")
        operands = _tensors((args, kwargs))
        if not operands or name in _MAKERS:
            if name in _MAKERS and isinstance(result, Tensor) and result.numel() <= _MOST:
                with torch.inference_mode(False):
                    values = operands[0].clone() if operands else func(*args, **{**kwargs, "device": "cpu"})
                setattr(result, KNOWN, _Shadow(result, values))
            return
        if any(isinstance(x, Parameter) and not is_without_memory(x) for x in operands):
            what = f"a parameter that was made outside of the dry run is used at {call_site()}."
            fail("dry_run", what, fix="make the module inside of fn: there it takes no memory")
        changes = written_by(func, args, kwargs)
        if not changes and not any(hasattr(x, KNOWN) or not is_without_memory(x) for x in operands):
            return
        known = [self.of(x) for x in operands]
        random = torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_UNSET)
        if random or any(x is None for x in known):
            for x in _tensors(changes):
                if (values := self.of(x)) is not None:
                    values.untyped_storage().meshcomm_unknown = True  # type: ignore[attr-defined]
            return
        if all(not is_without_memory(x) for x in operands) and changes:
            return  # done already, where it lies
        twins = dict(zip(map(id, operands), known, strict=True))

        def twin(x: Any) -> Any:
            return twins[id(x)] if isinstance(x, Tensor) else torch.device("cpu") if isinstance(x, torch.device) else x

        given, form = tree_flatten((args, kwargs))
        positional, named = tree_unflatten(list(map(twin, given)), form)
        made = func(*positional, **named)
        for x, values in zip(tree_flatten(result)[0], tree_flatten(made)[0], strict=True):
            if isinstance(x, Tensor) and is_without_memory(x) and values.numel() <= _MOST:
                setattr(x, KNOWN, _Shadow(x, values))

    def suppose(self, x: Tensor, values: Tensor, sure: int | None = None) -> None:
        """``x``, which nobody knows, is from now on what ``host_values`` says, or ``values`` if they are known. At
        index ``sure`` it is these in any case.
        """
        known = self.of(values)
        if known is None or not is_without_memory(x) or not 0 < known.numel() <= _MOST or self.of(x) is not None:
            return
        rows = [[self.answer(x.dtype, one) for one in row] for row in known.reshape(known.shape[0], -1).tolist()]
        with torch.inference_mode(False), outside_transforms():
            taken = torch.tensor(rows, dtype=x.dtype, device="cpu").reshape(known.shape)
            if sure is not None:
                taken[sure] = known[sure]
        setattr(x, KNOWN, _Shadow(x, taken))

    # ------------------------------------------------------------------------------------------- what is read

    def read(self, x: Tensor) -> Any:
        """One number."""
        values = self.of(x)
        return self.answer(x.dtype) if values is None else values.item()

    def answer(self, dtype: torch.dtype, supposed: Any = 0) -> Any:
        """A number that nobody knows, at the user's line: what is given, else ``supposed``."""
        site = call_site()
        given, line = self._given, str(site)
        if isinstance(given, Mapping):
            given = given.get(line)
            if isinstance(given, Sequence) and given:
                given = next(self._turns.setdefault(line, itertools.cycle(given)))
        elif callable(given):
            given = given(line, dtype)
        guessed = given is None
        given = supposed if guessed else given
        if not isinstance(given, (bool, int, float, complex)):
            fix = 'a number; {"train.py:33": number or list of numbers}; or a function (line, dtype) -> number'
            fail("dry_run", f"host_values gives {given!r} for {line}.", fix=fix)
        kind: Any = complex if dtype.is_complex else float if dtype.is_floating_point else int
        try:
            value = bool(given) if dtype is torch.bool else kind(given)
        except (TypeError, ValueError, OverflowError):
            fix = f"a number that one of {str(dtype).removeprefix('torch.')} can be"
            fail("dry_run", f"host_values gives {given!r} for {line}, where {dtype} is read.", fix=fix)
        count, _, before = self._reads.get(site, (0, None, False))
        self._reads[site] = [count + 1, value, guessed or before]
        if guessed and count >= _MANY:
            what = f"{line} has read {count} values that nobody knows, {value!r} each time: a loop that no value ends."
            fail("dry_run", what, fix=f"host_values={{{line!r}: [...]}} of a dry run, the numbers that are read there; "
                 "or end it by another number where mc.is_dry()")  # fmt: skip
        return value


def refuse_unknown_size(func: Any, args: tuple[Any, ...]) -> NoReturn:
    """How large a result is depends on values."""
    given = ", ".join(shape_text(x.dtype, x.shape) for x in _tensors(args))
    fail(
        "dry_run",
        f"how large the result of {operation_name(func).removeprefix('aten::')} at {call_site()} is depends on values,"
        " which a dry run has not.",
        got=given,
        fix="torch.where in place of a mask as an index; a capacity; or another way where mc.is_dry()",
    )


DEVICE_FIX = "device=mesh.device, which is the CPU here; or a torch that is built for it: no such device is needed"


def refuse_device(device: torch.device) -> NoReturn:
    """One that this build of torch does not know."""
    what = f"{call_site()} makes a tensor on {device.type}, for which this torch ({torch.__version__}) is not built."
    fail("dry_run", what, fix=DEVICE_FIX)


def of_memory(error: RuntimeError) -> MeshError | None:
    """What torch says where the memory of a tensor without memory is wanted, in our words and with the line."""
    told = next((told for said, told in _MEMORY_WANTED.items() if said in str(error)), None)
    if told is None:
        return None
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    at = next((CallSite(*call) for call in reversed(calls) if not is_ours(call[0])), "fn")
    what, fix = told
    return MeshError(f"meshcomm.dry_run: {what.format(at)}.\n  fix: {fix}")


_MEMORY_WANTED = {
    "PyTorch is not linked with support": (
        "{} moves a tensor to a device for which this torch is not built",
        DEVICE_FIX,
    ),
    "numpy() is not supported": (
        "x.numpy() at {} wants the values of a tensor, which a dry run has not",
        "x.tolist() gives host_values; or another way where mc.is_dry()",
    ),
    "Cannot access data pointer": (
        "{} asks where a storage lies, which a dry run has not in memory",
        "x.data_ptr() of a tensor tells them apart; or another way where mc.is_dry()",
    ),
}
"""What torch says: what was wrong, at which line, and what to do."""


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _is_spoiled(x: Tensor) -> bool:
    return hasattr(x.untyped_storage(), "meshcomm_unknown")
