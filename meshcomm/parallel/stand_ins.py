"""Running a module's methods with other tensors in place of its parameters, which themselves stay where they are."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.errors import fail


class Seen(dict[str, "nn.Parameter | None"]):
    """A module's table of parameters: iterated over it gives these; ``see`` says as what some are read."""

    def __init__(self, table: Mapping[str, nn.Parameter | None], see: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__(table)
        self.see = see

    unseen: Any = dict.__getitem__
    """What is registered under a name."""

    def __getitem__(self, name: str) -> Any:
        p, see = super().__getitem__(name), self.see.get(name)
        return p if see is None or p is None else see(p)


PLAIN_TABLES = (dict, OrderedDict, Seen)
"""Of parameters. Another kind shows slices to who iterates, and what they are slices of to the module's forward."""


def refuse_sliced(where: str, module: nn.Module, fix: str) -> None:
    """MeshError for a module whose parameters are slices."""
    tables = [_torch.tables_of(part)[0] for part in module.modules()]
    if any(isinstance(table, dict) and type(table) not in PLAIN_TABLES for table in tables):
        fail(where, "the module's parameters are sharded: each rank has slices of them.", fix=fix)


def refuse_renormalised(where: str, module: nn.Module) -> None:
    """MeshError for embeddings that write to their weights in forward, on each rank to the rows that it has seen."""
    for path, part in module.named_modules():
        bounded = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
        if bounded and part.weight.requires_grad:
            what = f"{path or 'the module'!r} has max_norm: each rank would scale the rows that it has seen."
            fail(where, what, fix="max_norm=None, and bound the rows after the optimizer's step")


def become(p: Tensor, values: Tensor) -> None:
    """Give a leaf other values, also of another shape."""
    if p.shape != values.shape:
        # Where a graph from before is still held (a loss, the weight of weight_norm), so is the node that gradients of
        # p come to, and it wants the old shape for ever: torch makes another one when the dtype changes.
        other = torch.float32 if p.dtype != torch.float32 else torch.float16
        p.data = torch.empty(0, dtype=other, device=p.device)
    p.data = values


class Site(NamedTuple):
    """Where a parameter stands: in the dict of parameters of a module."""

    module: nn.Module
    table: dict[str, Tensor | None]
    name: str
    value: Tensor

    def registered(self) -> object:
        """What is there now; of a sharded module the slice, whatever it shows."""
        if isinstance(self.table, dict):
            return dict.get(self.table, self.name)
        return self.table[self.name] if self.name in self.table else None  # noqa: SIM401  # scripted ones have no get

    def put(self, x: Tensor) -> None:
        """Have it there."""
        if isinstance(self.table, dict):
            dict.__setitem__(self.table, self.name, x)
        else:
            self.table[self.name] = x


class Around:
    """``call(method, args, kwargs)`` in place of a method; it is copied with its module."""

    def __init__(self, call: Callable[[Callable[..., Any], Any, Any], Any], own: Callable[..., Any]) -> None:
        self.call, self.own = call, own
        functools.update_wrapper(self, own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.call(self.own, args, kwargs)


def around_innermost(method: Callable[..., Any]) -> Around | None:
    """Of those around a method the one that calls it; None: there are none."""
    found: Around | None = None
    while isinstance(method, Around):
        found, method = method, method.own
    return found


def sites_of(module: nn.Module) -> list[Site]:
    """Every place at which a parameter stands, each time anew: a module may have been changed."""
    found, parts, seen = [], [module], {module}
    while parts:
        part = parts.pop()
        table, children = _torch.tables_of(part)
        if table:
            found += [Site(part, table, name, p) for name, p in table.items() if p is not None]
        if children:
            for inner in reversed(children.values()):
                if inner is not None and inner not in seen:
                    seen.add(inner)
                    parts.append(inner)
    return found


def leaves_of(sites: Sequence[Site], transformed: bool) -> list[Tensor]:
    """Each parameter that a gradient may be asked for, once."""
    found: dict[int, Tensor] = {}
    for site in sites:
        p = site.value
        if (p.requires_grad or transformed) and (p.is_floating_point() or p.is_complex()):
            found[id(p)] = p
    return list(found.values())


@contextlib.contextmanager
def seen_as(sites: Sequence[Site], values: Mapping[int, Tensor]) -> Iterator[None]:
    """Let modules see other tensors in place of their parameters."""
    changed = []
    for site in sites:  # a compiler takes no name that a comprehension gives to what is around it
        x = values.get(id(site.value))
        if x is not None:
            changed.append((site, x))
    recurrent = list({site.module: None for site, _ in changed if isinstance(site.module, nn.RNNBase)})
    told = not torch.compiler.is_compiling()
    try:
        for site, x in changed:
            site.put(x)
            if told and vars(site.value):
                show_attributes(site.value, x)
        _fill_recurrent(recurrent)
        yield
    finally:
        for site, x in changed:
            if site.registered() is x:  # and was not replaced meanwhile
                site.put(site.value)
        _fill_recurrent(recurrent)


@_torch.out_of_graphs
def show_attributes(p: Tensor, x: Tensor) -> None:
    """What a user has set on a parameter is seen on what stands in its place."""
    for name, value in vars(p).items():
        if not name.startswith("_meshcomm"):
            vars(x)[name] = value


def _fill_recurrent(modules: Sequence[nn.Module]) -> None:
    """Recurrent modules keep a list of their weights beside the parameters."""
    for module in modules:
        kept = vars(module)
        kept["_flat_weights"] = [getattr(module, name, None) for name in kept["_flat_weights_names"]]


def follow_recurrent(module: nn.RNNBase) -> None:
    """Of slices, have that list made anew from the whole parameters in each forward, and keep none of them after it."""
    _forget(module)
    vars(module)["flatten_parameters"] = _leave_as_it_is
    module.register_forward_hook(_forget, always_call=True)


def _forget(module: nn.Module, *_: Any) -> None:
    """Put the slices into the list, and mark it as one that the next forward makes again: a hook."""
    kept, table = vars(module), _torch.own_parameters(module)
    names = kept["_flat_weights_names"]
    kept["_flat_weights"] = [dict.get(table, name) for name in names]
    kept["_flat_weight_refs"] = [weakref.ref(module)] * len(names)


def _leave_as_it_is() -> None:
    """In place of ``flatten_parameters``: neither slices nor views of what was gathered go into a buffer of cuDNN's."""
