"""The plan of a tensor parallel module: which of its parameters are cut how, by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, NoReturn

from torch import Tensor, nn

from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.errors import fail, likely, names
from meshcomm.parallel.cut_parameters import named_by
from meshcomm.parallel.later_values import refuse_lazy

WHERE = "tensor_parallel"


class Column(NamedTuple):
    """A layer of whose outputs each rank computes a part, if there is more to say than ``"column"``."""

    parts: int | tuple[int, ...] = 1
    """Several matrices in one, each of which is cut: how many equal ones, or their lengths; 3 for q, k and v."""
    kv_heads: int | None = None
    """The heads of keys or values, which may be fewer than ranks: then ranks share them, and each has the weight. Of
    several parts it is the first one that has all heads, and the others these. The gradients of what is shared are
    summed over the axis."""
    gather: bool = False
    """Whether the outputs are gathered again, so that code that follows sees all of them: by an all_gather_invariant,
    which sends nothing in backward; inside of a block that enters by an all_gather, whose backward is a
    reduce_scatter."""
    sequence: bool | None = None
    """Whether what goes in is cut along the sequence; by default as the whole module has it."""


class Row(NamedTuple):
    """A layer of whose inputs each rank has a part, if there is more to say than ``"row"``."""

    split: bool = False
    """Whether what goes in is whole, so that each rank takes its part of it first. In backward its gradient is
    gathered."""
    enter: bool = False
    """Whether the sum is used by each rank with its own part of other weights, as that of a column is not; its gradient
    is summed then, by one all_reduce more."""
    sequence: bool | None = None
    """Whether each rank keeps a part of the sequence; by default as the whole module has it."""


class Vocab(NamedTuple):
    """An ``Embedding`` of which each rank has some rows, if there is more to say than ``"vocab"``."""

    sequence: bool | None = None
    """Whether each rank keeps a part of the sequence; by default as the whole module has it."""


class Cut(NamedTuple):
    """A parameter of any module that is cut along a dim; the module does what it did, with this rank's part."""

    dim: int
    parts: int | tuple[int, ...] = 1
    """Several pieces along it, each of which is cut: how many equal ones, or their lengths."""


class Block(NamedTuple):
    """What is done where a module begins and ends, whatever is inside; its pattern names modules, not parameters."""

    before: Literal["enter", "split", "join"] | None = "enter"
    """``"enter"``: its inputs are used by each rank with its own part of the weights; where the sequence is cut they
    are gathered first. Columns inside of it enter no more. ``"split"``: its inputs are whole, and each rank takes its
    part of the sequence. ``"join"``: its inputs are what a column gave, and are gathered along the last dim, such as
    those of a norm over all heads."""
    after: Literal["leave", "gather", "part"] | None = None
    """``"leave"``: its result is this rank's part of a sum. ``"gather"``: its result is cut along the sequence, and
    gathered. ``"part"``: its result is whole, and each rank goes on with its part of the last dim."""
    inputs: tuple[str, ...] = ()
    """The names of the arguments of its forward of which this is said; by default the first one."""
    whole: tuple[str, ...] = ()
    """The names of arguments that are whole also where the sequence is cut: they enter, and are not gathered."""
    own: tuple[str, ...] = ()
    """The names of arguments that are this rank's own part already: they stay as they are."""
    divided: Mapping[str, tuple[int, int]] = {}
    """Arguments that have something for each head: by name a dim, and the number of heads of all ranks. Each rank takes
    what belongs to its own."""


Style = str | Column | Row | Vocab | Cut
_SHORT: dict[str, Column | Row | Vocab] = {"column": Column(), "row": Row(), "vocab": Vocab()}
OF_PARAMETERS = ("replicated", "sequence", "summed", "once")
"""What is said of single parameters, whatever their module is; so is :class:`Cut`."""
_STYLES = (*_SHORT, *OF_PARAMETERS, "split", "heads")


class Named(NamedTuple):
    """A parameter at a place in the module, and what the plan says of it."""

    path: str
    owner: nn.Module
    name: str
    value: Tensor
    style: Style


class Read(NamedTuple):
    """A plan, read for a module."""

    params: list[Named]
    """Every parameter at every place with its style."""
    blocks: list[tuple[str, nn.Module, Block]]
    """Every module at every place of which the plan says something."""


def read(module: nn.Module, plan: Mapping[str, Style | str | Block], sequence: bool) -> Read:
    """What the plan says of a module."""
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        fail(WHERE, "the plan is not a mapping of patterns to styles.", got=repr(plan), fix='{"*.up": "column", ...}')
    blocks = {pattern: style for pattern, style in plan.items() if isinstance(style, Block)}
    styles = {pattern: _style(pattern, style, sequence) for pattern, style in plan.items() if pattern not in blocks}
    for pattern, block in blocks.items():
        _check_block(pattern, block, sequence)
    found: list[Named] = []
    missing: list[str] = []
    used: set[str] = set()
    refuse_lazy(WHERE, (*module.named_parameters(), *module.named_buffers()))
    for path, value in module.named_parameters(remove_duplicate=False):
        place, _, name = path.rpartition(".")
        fits = next((each for each in styles if named_by(each, path)), None)
        if fits is None:
            missing.append(path)
        else:
            used.add(fits)
            found.append(Named(path, module.get_submodule(place), name, value, styles[fits]))
    if missing:
        fail(
            WHERE,
            f"the plan does not name {names(missing[:8])}{' and others' if len(missing) > 8 else ''}.",
            got=f"patterns {names(styles)}",
            fix='name each parameter; "replicated" for what is whole on all ranks',
        )
    around: list[tuple[str, nn.Module, Block]] = []
    for path, part in module.named_modules(remove_duplicate=False):
        fits = next((each for each in blocks if fnmatchcase(path, each)), None)
        if fits is not None:
            used.add(fits)
            around.append((path, part, blocks[fits]))
    idle = [pattern for pattern in plan if pattern not in used]
    if idle:
        known = [path for path, _ in module.named_modules() if path]
        fail(
            WHERE,
            f"nothing is left for {names(idle)}.",
            got=f"modules {names(known[:12])}",
            fix="see the order of the plan",
        )
    return Read(found, around)


def _style(pattern: str, given: Any, sequence: bool) -> Style:
    style = _SHORT.get(given, given) if isinstance(given, str) else given
    if not isinstance(style, (Column, Row, Vocab, Cut)) and style not in _STYLES:
        fix = f"one of {names(_STYLES)}, or a Column(...), Row, Vocab, Cut or Block{likely(style, _STYLES)}"
        fail(WHERE, f"{pattern!r} has no style but {style!r}.", fix=fix)
    if isinstance(style, (Column, Cut)):
        _check_parts(style)
    if isinstance(style, (Column, Row, Vocab)):
        _check_switches(style, sequence)
    if style in ("sequence", "split") and not sequence:
        fail(WHERE, f"{pattern!r} is {style!r}, and the sequence is not cut.", fix="pass sequence=True")
    return style


def _check_parts(how: Column | Cut) -> None:
    """What does not depend on the layer."""
    lengths = how.parts if isinstance(how.parts, tuple) else (how.parts,)
    good = lengths and all(check.whole_number(length) and length > 0 for length in lengths)
    if isinstance(how, Column):
        good = good and (how.kv_heads is None or (check.whole_number(how.kv_heads) and how.kv_heads > 0))
        fix = "parts: an int or lengths, from 1 on; kv_heads: an int from 1 on, or None; gather: True or False"
    else:
        good, fix = good and check.whole_number(how.dim), "dim: an int; parts: an int or lengths, from 1 on"
    if not good:
        fail(WHERE, f"{how} has a value that is none.", fix=fix)


def _check_switches(how: Column | Row | Vocab, sequence: bool) -> None:
    given = how._asdict()
    wrong = [name for name in ("gather", "split", "enter") if name in given and not isinstance(given[name], bool)]
    if wrong or not (how.sequence is None or isinstance(how.sequence, bool)):
        fix = "gather, split, enter: True or False; sequence: True, False or None"
        fail(WHERE, f"{how} has a value that is none.", fix=fix)
    if how.sequence and not sequence:
        fail(WHERE, f"{how}, and the sequence is not cut.", fix="pass sequence=True")


def _check_block(pattern: str, how: Block, sequence: bool) -> None:
    inputs = all(
        isinstance(given, tuple) and all(isinstance(name, str) for name in given)
        for given in (how.inputs, how.whole, how.own)
    )
    divided = isinstance(how.divided, Mapping) and all(
        isinstance(each, tuple) and len(each) == 2 and all(check.whole_number(number) for number in each)
        for each in how.divided.values()
    )
    known = how.before in ("enter", "split", "join", None) and how.after in ("leave", "gather", "part", None)
    if not (known and inputs and divided):
        fix = (
            "before: 'enter', 'split', 'join' or None; after: 'leave', 'gather', 'part' or None; inputs, whole, own: "
            "tuples of names; divided: for names (dim, heads)"
        )
        fail(WHERE, f"{pattern!r}: {how} has a value that is none.", fix=fix)
    if (how.before == "split" or how.after == "gather") and not sequence:
        fail(WHERE, f"{pattern!r} is {how}, and the sequence is not cut.", fix="pass sequence=True")


def lengths_of(path: str, length: int, parts: int | tuple[int, ...], axis: Axis, dim: int) -> tuple[int, ...]:
    """The lengths of the parts of a dim, each of which the axis divides."""
    if isinstance(parts, int):
        if length % parts:
            fail(WHERE, f"{path!r} of length {length} has not {parts} equal parts.", fix="the lengths of the parts")
        parts = (length // parts,) * parts
    if sum(parts) != length:
        what = f"parts {parts} of {path!r} do not sum to its length {length}."
        fail(WHERE, what, fix="the lengths of all parts")
    for each in parts:
        if each % axis.size:
            part = "" if len(parts) == 1 else f" (a part of {length})"
            indivisible(f"dim {dim} of {path!r} of length {each}{part}", axis)
    return parts


# ----------------------------------------------------------------------------------------------------- what is counted


def divided(
    module: nn.Module, divide: Sequence[str] | Mapping[str, int], axis: Axis
) -> Iterator[tuple[nn.Module, str, Any]]:
    """The attributes of which each rank has a part, by patterns of their names: whose, which, and what it is then.

    One of an object that a module has, such as ``"*.attn.config.heads"``, comes as a copy of that object: others that
    have the object keep it as it was.
    """
    if isinstance(divide, str) or not isinstance(divide, Collection):
        fail(WHERE, f"divide={divide!r} is not a list of patterns.", fix="such as ['*.attn.heads']")
    by = divide if isinstance(divide, Mapping) else dict.fromkeys(divide, axis.size)
    copies: dict[tuple[nn.Module, str], Any] = {}
    for pattern, number in by.items():
        if not isinstance(pattern, str) or not check.whole_number(number) or number < 1:
            what = f"divide: {pattern!r}: {number!r} is not a pattern and a number from 1 on."
            fail(WHERE, what, fix="such as ['*.heads']")
        count = 0
        for path, part in module.named_modules():
            for name, value in list(vars(part).items()):
                here = f"{path}.{name}".lstrip(".")
                if check.whole_number(value) and fnmatchcase(here, pattern):
                    count += 1
                    yield part, name, _over(here, value, number, axis)
                elif pattern.split(".")[-2:-1] == [name] and not isinstance(value, (nn.Module, Tensor)):
                    for inner, counted in list(getattr(value, "__dict__", {}).items()):
                        if check.whole_number(counted) and fnmatchcase(f"{here}.{inner}", pattern):
                            count += 1
                            own = copies.setdefault((part, name), copy(value))
                            setattr(own, inner, _over(f"{here}.{inner}", counted, number, axis))
                            yield part, name, own
        if not count:
            fix = "the name of an attribute, with the path of its module; or leave it out"
            fail(WHERE, f"divide: no attribute that is an int is called {pattern!r}.", fix=fix)


def _over(name: str, value: int, number: int, axis: Axis) -> int:
    if value % number:
        if number == axis.size:
            indivisible(f"attribute {name} = {value}", axis)
        fail(WHERE, f"attribute {name} = {value} is not divisible by {number}.", fix="another number for it in divide")
    return value // number


def indivisible(what: str, axis: Axis) -> NoReturn:
    """Fail: the axis does not divide it."""
    what = f"{what} is not divisible by axis {axis.name!r} (size {axis.size})."
    check.explain(WHERE, what, axis, fix="another size of the axis, or 'replicated'")
