"""What was found on the small copy, said of the whole model: in patterns of names, and in a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshcomm.parallel.tensor.auto.found_plan import Line, TensorPlan
from meshcomm.parallel.tensor.auto.regions import Candidate
from meshcomm.parallel.tensor.auto.small_copy import SmallCopy
from meshcomm.parallel.tensor.kinds.products import kind_of
from meshcomm.parallel.tensor.plan import Block, Column, Cut, Row, Style, Vocab


def general(path: str, most: int = 99) -> str:
    """With a star for each number, or the first ones."""
    found = []
    for name in path.split("."):
        starred = name.isdigit() and most > 0
        most -= starred
        found.append("*" if starred else name)
    return ".".join(found)


def _named(pattern: str, path: str) -> bool:
    while path:
        if fnmatchcase(path, pattern):
            return True
        path = path.rpartition(".")[0]
    return False


def _named_in(paths: Collection[str], path: str) -> bool:
    """Whether it, or what it is a part of, is one of these."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path in paths


def _within(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def plan_for(
    module: nn.Module, small: SmallCopy, found: tuple[dict[str, Any], dict[str, int]], picked: list[Candidate],
    notes: Mapping[str, str], n: int, ends: Mapping[str, Block] | None = None,
) -> TensorPlan:  # fmt: skip
    """The plan of the whole model; ``ends``: where in it activations begin and end to be cut along the sequence."""
    styles, divide = found
    params = [path for path, _ in module.named_parameters(remove_duplicate=False)]
    modules = [path for path, _ in module.named_modules(remove_duplicate=False)]
    of_params = {path: styles[small.place_of(path)] for path in params}
    of_modules = {path: styles[place] for path in modules
                  if isinstance(styles.get(place := small.place_of(path)), Block)}  # fmt: skip
    if ends is not None:  # in the copy other layers stand at the ends
        of_modules = {path: how for path, how in of_modules.items() if not _is_end(how)} | dict(ends)
    plan: dict[str, Style | Block] = dict(_blocks(of_modules, modules))
    plan |= _params(module, of_params)
    over: dict[str, int] = {}
    for path in modules:
        place = small.place_of(path)
        for name, by in divide.items():
            around, _, _ = name.rpartition(".")
            inner = around.removesuffix(".config") if around.endswith(".config") or around == "config" else around
            if inner == place and by > 1:
                over[".".join(filter(None, (path, name[len(inner) :].lstrip("."))))] = by
    lines = tuple(_lines(module, small, plan, of_params, of_modules, picked, notes, n, ends is not None))
    return TensorPlan(plan, divide=_divided(over, modules, module), lines=lines)


def _is_end(how: Block) -> bool:
    return how.before == "split" or how.after == "gather"


def _blocks(exact: Mapping[str, Block], modules: list[str]) -> Iterator[tuple[str, Block]]:
    groups: dict[str, list[str]] = {}
    for path in exact:
        groups.setdefault(general(path), []).append(path)
    for pattern, paths in groups.items():
        same = all(exact.get(path) == exact[paths[0]] for path in modules if fnmatchcase(path, pattern))
        yield from [(pattern, exact[paths[0]])] if same else [(path, exact[path]) for path in paths]


def _divided(exact: dict[str, int], modules: list[str], module: nn.Module) -> dict[str, int]:
    groups: dict[str, list[str]] = {}
    for path in exact:
        groups.setdefault(general(path), []).append(path)
    made: dict[str, int] = {}
    for pattern, paths in groups.items():
        name = pattern.rpartition(".")[2]
        every = [f"{path}.{name}".lstrip(".") for path, part in module.named_modules() if name in vars(part)]
        fits = [path for path in every if fnmatchcase(path, pattern)]
        same = len({exact[path] for path in paths}) == 1 and set(fits) <= set(paths)
        made |= {pattern: exact[paths[0]]} if same else {path: exact[path] for path in paths}
    return made


def _layer(module: nn.Module, path: str, of_params: Mapping[str, Any]) -> str:
    """The layer that a parameter belongs to, if all of it has one style; else the parameter."""
    around, _, _ = path.rpartition(".")
    if of_params[path] == "heads":
        return _attention(module, around) or path
    inside = [each for each in of_params if each.rpartition(".")[0] == around]
    whole = around and not any(each.startswith(f"{around}.") and each not in inside for each in of_params)
    return around if whole and all(of_params[each] == of_params[path] for each in inside) else path


def _attention(module: nn.Module, path: str) -> str:
    """The path of torch's attention of which this is the path, or that of its ``out_proj``."""
    return path if isinstance(module.get_submodule(path), nn.MultiheadAttention) else path.rpartition(".")[0]


def _params(module: nn.Module, of_params: Mapping[str, Style]) -> dict[str, Style]:
    """Patterns for all that is not replicated, and a star at the end; where one would name too much, exact names."""
    left = dict.fromkeys(_layer(module, path, of_params) for path, style in of_params.items() if style != "replicated")
    plan: dict[str, Style] = {}
    for most in (99, 2, 1, 0):
        groups: dict[str, list[str]] = {}
        for layer in left:
            groups.setdefault(general(layer, most), []).append(layer)
        for pattern, layers in groups.items():
            if not any(layer in left for layer in layers):
                continue  # a star before has named them, with the same style
            covered = {path: style for path, style in of_params.items() if _named(pattern, path)}
            if not most or len(set(map(repr, covered.values()))) == 1:
                plan[pattern] = next(iter(covered.values()))
                for layer in [each for each in left if _named(pattern, each)]:
                    del left[layer]
    if any(style == "replicated" for style in of_params.values()):
        plan["*"] = "replicated"
    return plan


# -------------------------------------------------------------------------------------------------------- the table


def style_text(style: Any) -> str:
    """A style with what differs from the defaults."""
    if isinstance(style, (Column, Row, Vocab, Cut, Block)):
        base = Cut(style.dim) if isinstance(style, Cut) else type(style)()
        plain = base._asdict()
        said = [
            f"{key}={value!r}" for key, value in style._asdict().items() if key == "dim" or value != plain[key]
        ]  # fmt: skip
        return f"{type(style).__name__}({', '.join(said)})"
    return str(style)


def _lines(
    module: nn.Module, small: SmallCopy, plan: Mapping[str, Any], of_params: Mapping[str, Any],
    of_modules: Mapping[str, Block], picked: list[Candidate], notes: Mapping[str, str], n: int, sequence: bool,
) -> Iterator[Line]:  # fmt: skip
    """One for each pattern, and one for each thing that stays whole and was asked about."""
    entering = set().union(*(each.entering for each in picked)) if picked else set()
    ran = {path for each in picked for path in each.styles if path not in each.idle}
    params = dict(module.named_parameters(remove_duplicate=False))
    bytes_of = max((p.element_size() for p in params.values() if p.is_floating_point()), default=4)
    once, all_ = (n - 1) / n * bytes_of, 2 * (n - 1) / n * bytes_of
    left = dict.fromkeys(params)
    for pattern, style in plan.items():
        if isinstance(style, Block):
            paths = [path for path in of_modules if fnmatchcase(path, pattern)]
            what, sent = _sent_of_block(style, module.get_submodule(paths[0]), once, all_, sequence)
            yield Line(pattern, len(paths), style_text(style), "", what, sent * len(paths), "")
            continue
        mine = [path for path in left if _named(pattern, path)]
        for path in mine:
            del left[path]
        if pattern == "*":
            numbers = sum(params[path].numel() for path in mine)
            yield Line(pattern, len({path.rpartition(".")[0] for path in mine}), "replicated", "",
                       "", 0.0, f"{numbers} numbers on every rank")  # fmt: skip
            continue
        layers: dict[str, str] = {}
        for path in mine:
            layers.setdefault(path.rpartition(".")[0], path)
            if path.endswith("weight"):
                layers[path.rpartition(".")[0]] = path
        if style == "heads":
            layers = {place: path for place, path in layers.items() if _attention(module, place) == place}
        path = next(iter(layers.values()))
        if style in ("sequence", "split"):
            said = "gradients summed once a step" if style == "sequence" else "input's gradient gathered"
            yield Line(pattern, len(layers), style, "", said, 0.0, "")
            continue
        blocks = [around for around, how in of_modules.items() if how.before == "enter"]
        running = [place for place, of in layers.items() if _named_in(ran, small.place_of(of))]
        made = [
            _sent(style, module.get_submodule(place), once, all_, small.place_of(place) in entering
                  and not any(_within(place, around) for around in blocks), sequence)
            for place in running
        ]  # fmt: skip
        same = next(
            (each for each, p in params.items() if p is params[path] and _named_in(ran, small.place_of(each))), ""
        )
        note = "" if running else f"is {same.rpartition('.')[0]}" if same else "does not run"
        yield Line(pattern, len(layers), style_text(style), _cut(style, module, path, params[path]),
                   made[0][0] if made else "", sum(sent for _, sent in made), note)  # fmt: skip
    whole: dict[tuple[str, str], int] = {}
    for name, note in notes.items():
        whole[general(name), note or ""] = whole.get((general(name), note or ""), 0) + 1
    for (pattern, note), layers_of in whole.items():
        yield Line(pattern, layers_of, "whole", "", "", 0.0, note)


def _cut(style: Any, module: nn.Module, path: str, p: Any) -> str:
    kind = kind_of(module.get_submodule(path.rpartition(".")[0]))
    dim = None
    if isinstance(style, Cut):
        dim = style.dim
    elif kind is not None and (style in ("column",) or isinstance(style, Column)):
        dim = kind.dim_of(path.rpartition(".")[2])
        if isinstance(style, Column) and style.kv_heads is not None and not isinstance(style.parts, tuple):
            return f"dim {dim} of {p.shape[dim]} as used, weight whole"
    elif kind is not None and (style == "row" or isinstance(style, Row)):
        dim = kind.inputs
    elif style == "vocab" or isinstance(style, Vocab):
        dim = 0
    elif style == "heads":
        heads: Any = module.get_submodule(_attention(module, path.rpartition(".")[0]))
        return f"{heads.num_heads} heads"
    return "" if dim is None else f"dim {dim} of {p.shape[dim]}"


_SUMMED = "input's gradient summed", "sum of outputs"
_IN_SEQUENCE = "input gathered, its gradient scattered", "sum of outputs, scattered"


def _sent(style: Any, part: nn.Module, once: float, all_: float, enters: bool, sequence: bool) -> tuple[str, float]:
    kind = kind_of(part)
    entered, left = _IN_SEQUENCE if sequence and getattr(style, "sequence", None) is not False else _SUMMED
    if style == "heads" and isinstance(part, nn.MultiheadAttention):
        return f"{entered}, {left}", 2 * all_ * part.embed_dim
    if kind is None:
        return "", 0.0
    weight: Any = part.weight
    out = weight.shape[kind.outputs]
    inner = weight.shape[kind.inputs] if kind.inputs is not None else 0
    if style == "column" or isinstance(style, Column):
        back = all_ * inner if enters else 0.0
        said = [entered] if enters and inner else []
        if isinstance(style, Column) and style.gather:
            return ", ".join(["outputs gathered", *said]), once * out + back
        return ", ".join(said), back
    if style == "row" or isinstance(style, Row):
        if isinstance(style, Row) and style.split:
            return f"{left}, input's gradient gathered", all_ * out + once * inner
        return left, all_ * out
    if style == "vocab" or isinstance(style, Vocab):
        return left.replace("outputs", "rows"), all_ * out
    return "", 0.0


def _sent_of_block(how: Block, part: nn.Module, once: float, all_: float, sequence: bool) -> tuple[str, float]:
    width: Callable[[], int] = lambda: max(  # noqa: E731
        (p.shape[-1] for p in itertools.islice(part.parameters(), 8)), default=0
    )
    if how.before == "join":
        return "features gathered, and their gradient", 2 * once * width()
    first = next((each for each in part.modules() if kind_of(each) is not None), None)
    kind = None if first is None else kind_of(first)
    weight: Any = None if first is None else first.weight
    inner = int(weight.shape[kind.inputs or 0]) if kind is not None else min(
        (p.shape[-1] for p in part.parameters() if p.ndim == 3), default=0)  # fmt: skip
    said, sent = [], 0.0
    entered, left = _IN_SEQUENCE if sequence else _SUMMED
    if how.before == "enter":
        said.append(entered)
        sent += all_ * inner
    if how.after == "leave":
        said.append(left)
        sent += all_ * inner
    if how.before == "split":
        said.append("input's gradient gathered")
        sent += once * inner
    if how.after == "gather":
        said.append("output gathered")
        sent += once * inner
    if how.divided:
        said.append(f"{', '.join(how.divided)} divided")
    return ", ".join(said), sent
