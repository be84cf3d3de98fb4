"""What a model does with a row of blocks, seen once while it runs: in which order they are called, with what, what each
costs, and which parameters what comes out of each part depends on.

input -> [ before ] -> h0 -> block 0 -> h1 -> block 1 -> h2 -> [ behind ] -> output

Each h is cut off from what made it, so that autograd's graph of the next one says what that part alone needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshcomm import _torch
from meshcomm.errors import described
from meshcomm.parallel.tensor.auto.example_inputs import Given, examples_of


@dataclass
class Seen:
    """A row of blocks as a model calls them."""

    blocks: list[nn.Module]
    costs: list[float]
    """Of the parts: what is before, with the first block; the other blocks; what is behind the last one."""
    needed: list[set[int]]
    """For each part the ids of the parameters that what comes out of it depends on."""
    called: dict[int, set[int]]
    """For each module, by id, in which parts it is called."""
    given: Given
    output: Any
    widths: list[int | None]
    """For each block of how many elements the tuple is that it gives; None: it gives a tensor."""


class _Row:
    """Who listens to the blocks of one row."""

    def __init__(self, blocks: Sequence[nn.Module], flops: FlopCounterMode) -> None:
        self.blocks, self.flops = list(blocks), flops
        self.calls = 0
        self.called: dict[int, set[int]] = {}
        self.chained = True
        self.gave: Any = None
        self.marks: list[int] = []
        self.needed: list[set[int]] = []
        self.widths: list[int | None] = []

    def note(self, part: nn.Module) -> None:
        """A module is called."""
        self.called.setdefault(id(part), set()).add(self.calls)

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """It is called: the order, and what it is given."""
        right = self.calls < len(self.blocks) and block is self.blocks[self.calls]
        name = "" if args else next((k for k, v in kwargs.items() if isinstance(v, Tensor)), "")
        x = args[0] if args else kwargs.get(name)
        self.chained &= right and isinstance(x, Tensor) and (self.calls == 0 or x is self.gave)
        self.marks.append(self.flops.get_total_flops())
        if not self.chained or not isinstance(x, Tensor):
            return None
        if not self.calls:
            self.needed.append(_parameters_of(x))
            x = _cut(x)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

    def after(self, block: nn.Module, args: Any, output: Any) -> Any:
        """It is done: what it gives is cut off."""
        self.calls += 1
        self.marks.append(self.flops.get_total_flops())
        first = output[0] if isinstance(output, tuple) and output else output
        self.chained &= isinstance(first, Tensor)
        if not self.chained:
            return None
        self.needed.append(_parameters_of(output))
        self.widths.append(len(output) if isinstance(output, tuple) else None)
        self.gave = _cut(first)
        return (self.gave, *output[1:]) if isinstance(output, tuple) else self.gave

    def seen(self, sizes: Mapping[int, int], given: Given, output: Any) -> Seen | None:
        """None: they are not in a row. ``sizes``: of parameters, by id."""
        if not self.chained or self.calls != len(self.blocks):
            return None
        first, *blocks = self.needed
        needed = [first | blocks[0], *blocks[1:], _parameters_of(output)]
        ends = [0, *self.marks[1::2], self.flops.get_total_flops()]
        costs = [float(b - a + sum(sizes.get(each, 0) for each in own))
                 for a, b, own in zip(ends, ends[1:], needed, strict=False)]  # fmt: skip
        return Seen(self.blocks, costs, needed, self.called, given, output, self.widths)


def _cut(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() or x.is_complex() else x.detach()


def _parameters_of(value: Any) -> set[int]:
    """The ids of the leaves that it depends on."""
    found: set[int] = set()
    seen: set[Any] = set()
    left: list[Any] = [x.grad_fn if x.grad_fn is not None else x for x in tensors_of(value)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, Tensor):
            found.add(id(node))
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        left += [after for after, _ in node.next_functions]
    return found


def depends_on(value: Any, leaf: Tensor) -> bool:
    """Whether anything of the value does."""
    return id(leaf) in _parameters_of(value)


@contextlib.contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Evaluating, with all parameters wanting gradients; afterwards, and for random numbers, as it was."""
    modes = {part: part.training for part in model.modules()}
    wants = {p: p.requires_grad for p in model.parameters()}
    with torch.random.fork_rng(devices=[]):
        try:
            for part in modes:
                part.training = False
            for p in wants:
                p.requires_grad_(p.is_floating_point() or p.is_complex())
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode
            for p, want in wants.items():
                p.requires_grad_(want)


def look(model: nn.Module, rows: Sequence[Sequence[nn.Module]], example: Any, where: str) -> Seen | str:
    """The first of the rows that is one, as the model calls it; if there is none, or no example fits, why."""
    why = "no example of what it takes is known"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sizes = {id(p): p.numel() for p in model.parameters()}
    for args, kwargs in examples_of(model, example, where):
        given: Given = _on(device, args), _on(device, kwargs)
        listeners: list[_Row] = []
        handles = []

        def note(part: nn.Module, args: Any, listeners: list[_Row] = listeners) -> None:
            for row in listeners:
                row.note(part)

        try:
            with as_found(model), torch.enable_grad(), FlopCounterMode(display=False) as flops:
                handles += [part.register_forward_pre_hook(note) for part in model.modules()]
                for blocks in rows:
                    listeners.append(row := _Row(blocks, flops))
                    for block in blocks:
                        handles.append(block.register_forward_pre_hook(row.before, with_kwargs=True))
                        handles.append(block.register_forward_hook(row.after))
                output = model(*given[0], **given[1])
                found = [row.seen(sizes, given, output) for row in listeners]
        except Exception as error:  # it is not called so: another example may fit
            if example is not None:
                raise
            why = f"called with an example it fails: {described(error)}"
            continue
        finally:
            for handle in handles:
                handle.remove()
        chosen = next((each for each in found if each is not None), None)
        if chosen is not None:
            return chosen
        why = "none is called block by block, each once, with what the one before gives as its first argument"
    return why


def _on(device: torch.device, value: Any) -> Any:
    return mapped(lambda x: x.to(device), value)


def mapped(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The pytree with other tensors."""
    leaves, spec = _torch.tree_flatten(tree)
    return _torch.tree_unflatten([fn(x) if isinstance(x, Tensor) else x for x in leaves], spec)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a pytree, those of what a model of transformers gives, too."""
    found: list[Tensor] = []
    for leaf in _torch.tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping) or is_dataclass(leaf):
            found += tensors_of([*(leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values())])
    return found
