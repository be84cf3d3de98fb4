"""Names in files that are not those of the module: which they are, and how files of ``transformers`` are read and
written, in which tensors have other names than in the model, or are kept in other pieces.

A model of that library says how its files are read: names that have changed, experts that are stacked, matrices that
are joined or cut. Its own functions do it here; a tensor that is made of several is whole in memory for a moment.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.errors import described, fail, names
from meshcomm.parallel.checkpoint.parts import without_wrappers
from meshcomm.parallel.global_places import Box, Kind, part_of
from meshcomm.parallel.weights.full_files import Lot
from meshcomm.parallel.weights.whole_tensors import COUNTER, Given, Renamed, Whole, whole_of

_MAPPING, _CORE = "transformers.conversion_mapping", "transformers.core_model_loading"


def as_named(where: str, module: nn.Module, source: Whole, known: Collection[str]) -> Whole:
    """``source`` with the module's own names, where its library says how; ``known``: those of all ranks."""
    for adapter in getattr(module, "peft_config", ()):  # its files are without the adapter's name
        theirs = {name: name.replace(f".{adapter}", "", 1) for name in known if f".{adapter}" in name}
        found = {name: other for name, other in theirs.items() if name not in source.names and other in source.names}
        if found:
            source = Renamed(source, {**{name: name for name in source.names if name not in found.values()}, **found})
    mapping, core = sys.modules.get(_MAPPING), sys.modules.get(_CORE)
    prefix = getattr(module, "base_model_prefix", None)
    if not isinstance(prefix, str) or mapping is None or core is None or {*known} <= {*source.names}:
        return source
    try:
        transforms = mapping.get_model_conversion_mapping(module)
        return Converted(where, module, source, known, transforms, core)
    except AttributeError as error:  # another version of it
        fail(where, "transformers does not say how its files are named.", got=described(error),
             fix="save_pretrained(..., save_original_format=False)")  # fmt: skip


def _ignored(module: nn.Module, what: str) -> list[re.Pattern[str]]:
    """Patterns of names that a model of that library says may be ``"missing"``, or ``"unexpected"``."""
    patterns = getattr(module, f"_keys_to_ignore_on_load_{what}", None)
    return [re.compile(pattern) for pattern in patterns or () if isinstance(pattern, str)]


class Converted(Renamed):
    """Tensors of a file under the names of the model."""

    def __init__(
        self, where: str, module: Any, source: Whole, known: Collection[str], transforms: Sequence[Any], core: Any
    ) -> None:
        self._where, self._module, theirs = where, module, dict[str, str]()
        renamings = [each for each in transforms if isinstance(each, core.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        there = dict.fromkeys(known, True)
        for name in sorted(source.names, key=core.dot_natural_key):
            ours, pattern = core.rename_source_key(name, renamings, converters, module.base_model_prefix, there)
            if ours not in there and name in there:
                ours, pattern = core.rename_source_key(name, [], [], module.base_model_prefix, there)
            if pattern is None:
                theirs[ours] = name
            else:
                groups.setdefault(ours, (of_pattern[pattern], []))[1].append((name, pattern))
        super().__init__(source, theirs)
        self._group_of: dict[str, tuple[str, Any, list[tuple[str, str]]]] = {}
        self._kinds: dict[str, Kind] = {}
        self._last: tuple[str, Mapping[str, Tensor]] = "", {}
        for first, (converter, members) in groups.items():
            made = self._convert(first, converter, members, meta=True)
            for name, x in made.items():
                self._group_of[name] = first, converter, members
                self._kinds[name] = Kind(tuple(x.shape), x.dtype)
        self.names = [*theirs, *self._group_of]

    def _convert(self, first: str, converter: Any, members: list[tuple[str, str]], meta: bool) -> dict[str, Tensor]:
        mapping = copy.deepcopy(converter)
        for name, pattern in members:
            kind = self._source.kind(name)
            if kind is None:
                fail(self._where, f"{name!r} is no tensor.")
            x = torch.empty(kind.shape, dtype=kind.dtype, device="meta") if meta else whole_of(self._source, name)
            mapping.add_tensor(first, name, pattern, x)
        try:
            made = mapping.convert(first, model=self._module, config=self._module.config)
        except Exception as error:
            got = f"{described(error)}; of {names([name for name, _ in members[:4]])}"
            fail(self._where, f"transformers does not make {first!r} of what is in the file.", got=got)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    def kind(self, name: str) -> Kind | None:
        """Of a tensor."""
        return self._kinds[name] if name in self._kinds else super().kind(name)

    def plain(self, name: str) -> Any:
        """The value."""
        return whole_of(self, name) if name in self._kinds else super().plain(name)

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy; of tensors that are made together the last ones are kept until others are asked for."""
        if name not in self._group_of:
            super().fill(name, boxes)
            return
        first, converter, members = self._group_of[name]
        if self._last[0] != first:
            self._last = "", {}
            self._last = first, self._convert(first, converter, members, meta=False)
        for box in boxes:
            box.view.copy_(part_of(self._last[1][name], box.offsets, box.sizes))

    def close(self) -> None:
        """Close the files."""
        self._last = "", {}
        super().close()


def in_files(where: str, module: nn.Module, kinds: Mapping[str, Kind]) -> list[Lot]:
    """How ``save_pretrained`` of the module's library would write these tensors; as they are where it has none."""
    left_out = {*(getattr(module, "_keys_to_ignore_on_save", None) or ())}
    kinds = {name: kind for name, kind in kinds.items() if name not in left_out}
    converters = _converters(module)
    if converters is None:
        return [Lot([name], {name: kind}, None) for name, kind in kinds.items()]
    core = sys.modules[_CORE]
    lots: dict[str, list[str]] = {}
    for name in sorted(kinds, key=core.dot_natural_key):
        ours, pattern = core.apply_converters(name, converters)
        lots.setdefault(name if pattern is None else f"{ours} of several", []).append(name)
    found = []
    for sources in lots.values():
        given = {name: torch.empty(kinds[name].shape, dtype=kinds[name].dtype, device="meta") for name in sources}
        try:
            made = core.revert_weight_conversion(module, given)
        except Exception as error:
            got = f"{described(error)}; of {names(sources[:4])}"
            fail(where, "transformers does not make of the module's tensors what is in its files.", got=got)
        kept = len(made) == 1 and next(iter(made.values())) is given[sources[0]]
        convert = None if kept else functools.partial(core.revert_weight_conversion, module)
        found.append(Lot(sources, {name: Kind(tuple(x.shape), x.dtype) for name, x in made.items()}, convert))
    return found


def _converters(module: nn.Module) -> list[Any] | None:
    """What makes tensors of files of several of the module's, or several of one; None where names are kept, too."""
    mapping, core = sys.modules.get(_MAPPING), sys.modules.get(_CORE)
    prefix = getattr(module, "base_model_prefix", None)
    if mapping is None or core is None or not isinstance(prefix, str) or getattr(module, "peft_config", None):
        return None
    try:
        transforms = getattr(module, "_weight_conversions", None)
        if transforms is None:
            found = mapping.get_model_conversion_mapping(module, add_legacy=False)
            transforms = [each for each in found if not isinstance(each, core.PrefixChange)]
        back = [each.reverse_transform() for each in transforms[::-1]]
        return [each for each in back if isinstance(each, core.WeightConverter)] if back else None
    except AttributeError:  # another version of it, whose from_pretrained knows the model's own names, too
        return None


# ----------------------------------------------------------------------------------------------------- what is missing


class Unfit(NamedTuple):
    """Names that one side lacks, as torch's ``load_state_dict`` tells them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def unfit(module: nn.Module, source: Whole, groups: Mapping[str, Sequence[str]]) -> Unfit:
    """Names in the module alone, and in the source alone; ``groups``: of all ranks."""
    there, known = {*source.names}, {*groups}
    for each in groups.values():
        known.update(each)
    missing = [name for name, others in groups.items() if not there & {name, *others}
               and not name.endswith(COUNTER) and not _any(_ignored(module, "missing"), name)]  # fmt: skip
    odd = [name for name in source.names if name not in known and not _any(_ignored(module, "unexpected"), name)]
    return Unfit(missing, odd)


def union(every: Sequence[Unfit]) -> Unfit:
    """What any rank lacks, or has too much."""
    missing, odd = zip(*every, strict=True)
    return Unfit(list(dict.fromkeys(itertools.chain(*missing))), list(dict.fromkeys(itertools.chain(*odd))))


def refuse_names(where: str, module: nn.Module, given: Whole, found: Unfit) -> None:
    """RuntimeError, as of ``load_state_dict``; ``given``: under its own names."""
    missing, odd = found
    if missing or odd:
        said = [f"Missing key(s): {_few(missing)}."] if missing else []
        said += [f"Unexpected key(s): {_few(odd)}."] if odd else []
        fix = _deeper(missing, odd, given) or _renamed(missing, odd)
        fix = fix or "the state_dict of this module on one rank; or strict=False"
        fail(where, f"the names are not those of {type(module).__name__}. {' '.join(said)}", fix=fix, kind=RuntimeError)


def _deeper(missing: Sequence[str], odd: Sequence[str], given: Whole) -> str:
    """What to do, if all that is missing is in a mapping that stands in the one that was given."""
    for name in given.names if missing and odd and isinstance(given, Given) else ():
        inner = given.plain(name)
        inside = [each for each in inner if isinstance(each, str)] if isinstance(inner, Mapping) else []
        if {*missing} <= {*map(without_wrappers, inside)}:
            return f"the state_dict stands under {name!r} there: state[{name!r}]; of a file, torch.load(path)[{name!r}]"
    return ""


def _few(found: Sequence[str], most: int = 8) -> str:
    return names(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _any(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _renamed(missing: Sequence[str], odd: Sequence[str]) -> str:
    """What to do, if all that is missing is there under a prefix, or without one."""
    for here, there in ((missing, {*odd}), (odd, {*missing})):
        for name in there if here else ():
            prefix = name.removesuffix(here[0])
            if prefix.endswith(".") and name != prefix and all(f"{prefix}{each}" in there for each in here):
                if here is missing:
                    way = f"{{name.removeprefix({prefix!r}): x for name, x in state.items()}}"
                    *outer, last = prefix[:-1].split(".")
                    return f"names begin with {prefix!r} there: {way}" + (
                        "" if outer else f", or load into torch.nn.ModuleDict({{{last!r}: module}})"
                    )
                return f"load into its part: load_full_state_dict(module.{prefix[:-1]}, ...)"
    return ""
