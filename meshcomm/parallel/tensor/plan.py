"""The plan of a tensor parallel module: which of its parameters are cut how, by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from meshcomm.collectives import check
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Axis

WHERE = "tensor_parallel"
_STYLES = ("column", "row", "vocab", "replicated", "sequence", "split")


class Column(NamedTuple):
    """A linear layer of whose outputs each rank computes a part, if there is more to say than ``"column"``."""

    parts: int | tuple[int, ...] = 1
    """Several matrices in one, each of which is cut: how many equal ones, or their lengths; 3 for q, k and v."""
    kv_heads: int | None = None
    """The heads of keys or values, which may be fewer than ranks: then ranks share them, and each has the weight."""
    gather: bool = False
    """Whether the outputs are gathered again, so that code that follows sees all of them."""


Style = str | Column


class Named(NamedTuple):
    """A parameter at a place in the module, and what the plan says of it."""

    path: str
    owner: nn.Module
    name: str
    value: Tensor
    style: Style


def styles_of(module: nn.Module, plan: Mapping[str, Style], sequence: bool) -> list[Named]:
    """Every parameter at every place with its style."""
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        fail(WHERE, "the plan is not a mapping of patterns to styles.", got=repr(plan), fix='{"*.up": "column", ...}')
    for pattern, style in plan.items():
        if not isinstance(style, Column) and style not in _STYLES:
            fix = f"one of {names(_STYLES)}, or a Column(...){likely(style, _STYLES)}"
            fail(WHERE, f"{pattern!r} has no style but {style!r}.", fix=fix)
        if isinstance(style, Column):
            _check_column(style)
        if style in ("sequence", "split") and not sequence:
            fail(WHERE, f"{pattern!r} is {style!r}, and the sequence is not cut.", fix="pass sequence=True")
    found: list[Named] = []
    missing: list[str] = []
    used: set[str] = set()
    for path, value in module.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(value):
            fail(WHERE, f"{path!r} has no shape yet.", fix="run the module once before")
        place, _, name = path.rpartition(".")
        fits = next((each for each in plan if _names(each, path)), None)
        if fits is None:
            missing.append(path)
        else:
            used.add(fits)
            found.append(Named(path, module.get_submodule(place), name, value, plan[fits]))
    if missing:
        fail(
            WHERE,
            f"the plan does not name {names(missing[:8])}{' and others' if len(missing) > 8 else ''}.",
            got=f"patterns {names(plan)}",
            fix='name each parameter; "replicated" for what is whole on all ranks',
        )
    idle = [pattern for pattern in plan if pattern not in used]
    if idle:
        known = [path for path, _ in module.named_modules() if path]
        fail(
            WHERE,
            f"nothing is left for {names(idle)}.",
            got=f"modules {names(known[:12])}",
            fix="see the order of the plan",
        )
    return found


def _check_column(how: Column) -> None:
    """What does not depend on the layer."""
    lengths = how.parts if isinstance(how.parts, tuple) else (how.parts,)
    good = lengths and all(check.whole_number(length) and length > 0 for length in lengths)
    good = good and (how.kv_heads is None or (check.whole_number(how.kv_heads) and how.kv_heads > 0))
    if not good or not isinstance(how.gather, bool):
        fix = "parts: an int or lengths, from 1 on; kv_heads: an int from 1 on, or None; gather: True or False"
        fail(WHERE, f"{how} has a value that is none.", fix=fix)


def _names(pattern: str, path: str) -> bool:
    """Whether it names the parameter or a module that holds it."""
    while path:
        if fnmatchcase(path, pattern):
            return True
        path = path.rpartition(".")[0]
    return False


def divided(module: nn.Module, divide: Sequence[str], axis: Axis) -> Iterator[tuple[nn.Module, str, int]]:
    """The attributes of which each rank has a part, by patterns of their names: whose, which, and the part."""
    if isinstance(divide, str) or not isinstance(divide, Collection):
        fail(WHERE, f"divide={divide!r} is not a list of patterns.", fix="such as ['*.attn.heads']")
    for pattern in divide:
        count = 0
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if check.whole_number(value) and fnmatchcase(f"{path}.{name}".lstrip("."), pattern):
                    if value % axis.size:
                        indivisible(f"attribute {'.'.join([path, name]).lstrip('.')} = {value}", axis)
                    count += 1
                    yield part, name, value // axis.size
        if not count:
            fix = "the name of an attribute, with the path of its module; or leave it out"
            fail(WHERE, f"divide: no attribute that is an int is called {pattern!r}.", fix=fix)


def indivisible(what: str, axis: Axis) -> NoReturn:
    """Fail: the axis does not divide it."""
    what = f"{what} is not divisible by axis {axis.name!r} (size {axis.size})."
    check.explain(WHERE, what, axis, fix="another size of the axis, or 'replicated'")
