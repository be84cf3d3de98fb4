"""A plan that cuts activations along the sequence too, made of one that does not.

whole | layers.0 splits .. cut: norms, dropout, residual stream .. the last layer gathers | whole
                            `-- attention, feed-forward: gathered where they begin, or at their columns --'

Where a block has to begin is not known: attention that reads shapes enters as a module, other products by columns.
Ways are tried in turn, all of them proved.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshcomm.parallel.tensor.auto.flow import Flow, Leaf, tensors
from meshcomm.parallel.tensor.auto.regions import Candidate, Region, common, named_arguments, needs_grad
from meshcomm.parallel.tensor.auto.small_copy import SmallCopy
from meshcomm.parallel.tensor.plan import Block, Column, Row, Vocab

_MOST = 32
"""Ways that are tried."""
Picked = list[tuple[Region, Candidate]]
_LONG: dict[Any, Column | Row | Vocab] = {"column": Column(), "row": Row(), "vocab": Vocab()}


class Stack(NamedTuple):
    """A list of layers between whose ends the sequence is cut; or one module."""

    path: str
    first: str
    last: str
    tables: bool = False
    """All of a module, from tables whose result is cut to heads that gather what they take."""

    def item(self, path: str) -> str | None:
        """The one of its layers that a path is in."""
        if self.first == self.path:
            return self.path
        inside = f"{self.path}." if self.path else ""
        return inside + path[len(inside) :].split(".")[0] if path.startswith(inside) else None


WHOLE, FROM_TABLES = Stack("", "", ""), Stack("", "", "", tables=True)


def stacks_of(module: nn.Module, flow: Flow, picked: Picked, n: int) -> tuple[list[list[Stack]], dict[str, str]]:
    """What is tried in turn: the outermost lists of layers that are given activations, each of them with what is cut;
    the whole module, as where a residual stream goes past its layers. And those lists whose sequence so many ranks do
    not divide, which are left as they are.
    """
    paths = [[path for path in candidate.styles if "." in path or path] for _, candidate in picked]
    found: list[Stack] = []
    odd: dict[str, str] = {}
    for path, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or any(each.item(path) for each in found):
            continue
        names = [".".join(filter(None, (path, name))) for name, _ in part.named_children()]
        stack = Stack(path, names[0], names[-1]) if names else None
        length = 0 if stack is None else _length_of(stack.first, module, flow)
        if stack is None or not length:
            continue
        if any(len({stack.item(each) for each in of}) == 1 and stack.item(of[0]) for of in paths if of):
            if length % n:
                odd[path] = f"a sequence of {length}, which {n} ranks do not divide"
            else:
                found.append(stack)
    length = _length_of("", module, flow)
    if length % n:
        odd[""] = f"a sequence of {length}, which {n} ranks do not divide"
    whole = [] if length % n or odd else [WHOLE] if length else [FROM_TABLES]
    return [each for each in (found, whole) if each], odd


def _arguments(path: str, module: nn.Module, flow: Flow) -> list[tuple[str, Any]]:
    """What a module was called with, in the order in which its forward has it."""
    part = module.get_submodule(path)
    order = list(inspect.signature(part.forward).parameters)
    given = dict(named_arguments(part, flow.given.get(path, {})))
    return sorted(given.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order))


def _length_of(path: str, module: nn.Module, flow: Flow) -> int:
    """Of the sequence that a module is given; 0: it is given no activations."""
    x = next((x for _, given in _arguments(path, module, flow)[:1] for x in tensors(given)), None)
    return x.shape[-2] if x is not None and x.is_floating_point() and x.ndim >= 3 else 0


def ends_of(stacks: Sequence[Stack]) -> dict[str, Block]:
    """Where the cut begins and ends."""
    found: dict[str, Block] = {}
    for each in stacks:
        if each.tables:
            continue
        if each.first == each.last:
            found[each.first] = Block("split", "gather")
        else:
            found |= {each.first: Block("split"), each.last: Block(None, "gather")}
    return found


def ends_in(module: nn.Module, small: SmallCopy, stacks: Sequence[Stack]) -> dict[str, Block]:
    """The same of the whole model, whose lists are longer."""
    of_model = []
    for path, part in module.named_modules(remove_duplicate=False):
        stack = next((each for each in stacks if each.path == small.place_of(path)), None)
        if stack is not None:
            alone = stack.first == stack.path
            names = [path] if alone else [".".join(filter(None, (path, name))) for name, _ in part.named_children()]
            of_model.append(Stack(path, names[0], names[-1], stack.tables))
    return ends_of(of_model)


class Ways:
    """In which a plan may be cut along the sequence."""

    def __init__(self, module: nn.Module, flow: Flow, picked: Picked, stacks: Sequence[Stack]) -> None:
        self.module, self.flow, self.picked, self.stacks = module, flow, picked, stacks
        self.leaves = {leaf.path: leaf for leaf in flow.leaves}
        self.ends = ends_of(stacks)
        self.outer: set[Any] = set()  # of what comes to the layers from elsewhere, such as an encoder
        for stack in stacks:
            given = _arguments(stack.first, module, flow)[1:]
            self.outer.update(_source(each) for _, x in given for each in tensors(x) if each.requires_grad)

    def tried(self) -> Iterator[list[Candidate]]:
        """One after the other; those of one kind of region are cut alike."""
        kinds: dict[Any, list[list[Candidate]]] = {}
        for region, candidate in self.picked:
            kinds.setdefault(region.key, []).append(list(self._options(candidate)))
        counts = [range(min(map(len, options))) for options in kinds.values()]
        for choice in itertools.islice(itertools.product(*counts), _MOST):
            chosen = dict(zip(kinds, choice, strict=True))
            at = {key: iter(options) for key, options in kinds.items()}
            yield [next(at[region.key])[chosen[region.key]] for region, _ in self.picked]

    def _options(self, candidate: Candidate) -> Iterator[Candidate]:
        leaves = [self.leaves[path] for path in candidate.styles if path in self.leaves]
        stack = next((each for each in self.stacks for leaf in leaves if each.item(leaf.path) is not None), None)
        if stack is not None and stack.tables and "vocab" in candidate.styles.values():
            yield candidate
            return
        enters = any(how.before == "enter" for how in candidate.blocks.values())
        if stack is None and (enters or "heads" in candidate.styles.values()):
            yield _left_whole(candidate)  # which cannot be said of a part of a plan
            return
        if stack is None:
            yield candidate._replace(styles={path: _uncut(style) for path, style in candidate.styles.items()})
            return
        if enters:
            yield candidate
            return
        linear = [leaf for leaf in leaves if leaf.linear]
        if linear and not any(isinstance(candidate.styles[leaf.path], Row) or candidate.styles[leaf.path] == "row"
                              for leaf in linear):  # fmt: skip
            yield _left_whole(candidate)  # no row would cut it again
            return
        around = common([leaf.path for leaf in linear])
        hosts = dict.fromkeys(host for leaf in linear for host in leaf.hosts)
        inside = [place for place in dict.fromkeys((around, *hosts)) if place not in self.ends]
        entered = [each for place in inside for each in self._entered(candidate, place)]
        plain = self._at_columns(candidate, linear)
        yield from (*entered, plain) if hosts else (plain, *entered)

    def _entered(self, candidate: Candidate, place: str) -> Iterator[Candidate]:
        """Gathered where this module begins; what comes from elsewhere is whole, or has something for each head and is
        this rank's own part.
        """
        given = _arguments(place, self.module, self.flow)
        rest = [(name, x) for name, x in given[1:] if needs_grad(x)]
        whole = tuple(name for name, x in rest if any(_source(each) in self.outer for each in tensors(x)))
        divided = candidate.blocks.get(place, Block()).divided
        inside = f"{place}." if place else ""
        summed = {path: "summed" for path, _ in self.module.named_parameters(remove_duplicate=False)
                  if path.startswith(inside) and not self._said(candidate, path)}  # fmt: skip
        for among in dict.fromkeys((whole, ())):
            own = tuple(name for name, _ in rest if name not in among)
            block = Block("enter", None, tuple(name for name, _ in given[:1]), among, own, divided)
            yield candidate._replace(blocks={**candidate.blocks, place: block}, styles={**candidate.styles, **summed})

    def _said(self, candidate: Candidate, path: str) -> bool:
        while path:
            if path in candidate.styles or path in candidate.blocks:
                return True
            path = path.rpartition(".")[0]
        return False

    def _at_columns(self, candidate: Candidate, leaves: Sequence[Leaf]) -> Candidate:
        """Gathered by the columns, if what they take is cut."""
        whole = [leaf.path for leaf in leaves if leaf.inputs and leaf.inputs[0] in self.outer]
        return candidate._replace(styles=candidate.styles | {path: _uncut(candidate.styles[path]) for path in whole})

    def whole(self, styles: Mapping[str, Any]) -> dict[str, Any]:
        """A plan of exact names: what is whole between the ends is used on a part of the sequence."""
        tables = {path for path, leaf in self.leaves.items() if leaf.table and self.stacks[0].tables}
        joined = {path for path, how in styles.items() if isinstance(how, Block) and how.before == "join"}
        made = {**styles}
        for path, style in styles.items():
            within = any(path.startswith(f"{each}.") for each in joined)
            if style == "replicated" and not within and any(each.item(path) is not None for each in self.stacks):
                made[path] = "split" if path.rpartition(".")[0] in tables else "sequence"
        return {**made, **self.ends}


def _source(x: Tensor) -> Any:
    """What a tensor is known by: where it was computed, or itself."""
    return id(x) if x.grad_fn is None else x.grad_fn


def _left_whole(candidate: Candidate) -> Candidate:
    return candidate._replace(styles={}, blocks={}, divide={})


def _uncut(style: Any) -> Any:
    """A style of a layer outside of what is cut along the sequence."""
    style = _LONG.get(style, style) if isinstance(style, str) else style
    return style._replace(sequence=False) if isinstance(style, (Column, Row, Vocab)) else style


def first_right(
    ways: Sequence[Ways], assembled: Callable[[list[Candidate]], tuple[dict[str, Any], dict[str, int]]],
    why_wrong: Callable[[dict[str, Any], dict[str, int]], str],
) -> tuple[Ways | None, list[Candidate], tuple[dict[str, Any], dict[str, int]], str]:  # fmt: skip
    """The first way that is right; or why none is."""
    first = ""
    for each in ways:
        for picked in each.tried():
            styles, divide = assembled(picked)
            styles = each.whole(styles)
            why = why_wrong(styles, divide)
            if not why:
                return each, picked, (styles, divide), ""
            first = first or why
    return None, [], ({}, {}), first or "nothing in it is known to have a sequence"
