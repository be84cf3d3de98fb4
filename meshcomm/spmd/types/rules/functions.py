"""What the checker of varying types makes of a backward pass, of hooks on gradients, which run in it, and of custom
functions of autograd.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import Function
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from meshcomm._torch import (
    tree_flatten,
    watch_capsules,
    watch_functions,
    watch_parameters,
    watch_storages,
    watch_swaps,
    without_modes,
)
from meshcomm.errors import names
from meshcomm.mesh import current_mesh, use_mesh
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.foreign_memory import lend
from meshcomm.spmd.types.reachable import Reachable, package_of
from meshcomm.spmd.types.rules.operands import (
    along_of,
    replaced,
    several,
    text_of,
    tracked,
    version,
    versions_of,
)
from meshcomm.spmd.types.rules.operations import Operations
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.seen_changes import moment, noted_at, saw
from meshcomm.spmd.types.sizes.ragged import carried, guessed, without_numbers
from meshcomm.spmd.types.vma import (
    INVARIANT,
    Origin,
    Type,
    join,
    marked,
    swap_notes,
    unknown_in,
)
from meshcomm.watch import Watcher, here, watched_by


class Functions(Operations):
    """Gradients have the types of their values, and a hook must leave them so; a custom function takes care of its own
    backward.
    """

    def _backward(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gradients have the types of their values; what runs in backward is not looked at."""
        args, kwargs = self._seeded(kind, args, kwargs)
        try:
            with watched_by(None):
                result = func(*args, **kwargs)
        finally:
            self.passed = moment()
            self._grown()
            if not (
                kwargs.get("retain_graph") or kwargs.get("create_graph") or len(args) > (3 if kind.gradients else 2)
            ):
                self._forget_lately()  # their graphs have ended
        if kind.gradients:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            for x, g in zip(inputs, result, strict=False):
                if isinstance(x, Tensor) and isinstance(g, Tensor) and (mine := self.type_of(x)) is not None:
                    self._note(g, self._of_gradient(mine))
                    carried(x, g)
        return result

    def _grown(self) -> None:
        """A backward adds to gradients that leaves had before, such as views of one flat buffer."""
        for key, (x, g) in list(self._growing.items()):
            if x.grad is not g:
                del self._growing[key]
            elif (before := noted_at(g)) != (after := version(g)) and (mine := self.type_of(x)) is not None:
                saw(g, before, after)
                self._written(g, self._of_gradient(mine))

    def _seeded(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a backward, with gradients of outputs that have their types."""
        place, name = (2, "grad_outputs") if kind.gradients else (1, kind.seeds)
        seeds = args[place] if len(args) > place else kwargs.get(name)
        ends = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
        if seeds is None or ends is None:
            return args, kwargs
        others: dict[int, Tensor] = {}
        for y, g in zip(several(ends), several(seeds), strict=False):
            if not isinstance(y, Tensor) or not isinstance(g, Tensor) or (mine := self.type_of(y)) is None:
                continue
            theirs = self.type_of(g)
            if theirs is None:
                self._unknown(g, [g], kind.name)
            if extra := theirs.axes - mine.axes:
                self._refuse(
                    kind.name,
                    f"is given a gradient that varies along {names(sorted(extra))}, of a value that does not.",
                    f"the value {text_of(y)} {along_of(mine)}; the gradient {along_of(theirs)}",
                    "pvary the value before, or reduce the gradient",
                )
            if (g.requires_grad or tracked(g)) and (lacks := mine.axes - theirs.axes):
                others[id(g)] = self.vary(g, lacks, kind.name)
        if others:
            args = tuple(replaced(arg, others) if i == place else arg for i, arg in enumerate(args))
            kwargs = {key: replaced(value, others) if key == name else value for key, value in kwargs.items()}
        return args, kwargs

    def _hooked(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of register_hook and the like, with a hook that is looked at while it runs."""
        x, hook = args[0], args[-1]
        mine = self.type_of(x)
        if len(args) != 2 or not callable(hook) or mine is None or not mine.axes < self._all:
            return args
        if package_of(hook) in _LIBRARIES:
            return args
        after = name == "register_post_accumulate_grad_hook"
        return x, self._watched(hook, self._of_gradient(mine), f"{name} at {call_site()}", after)

    def _watched(self, hook: Callable[[Tensor], Any], kind: Type, where: str, after: bool) -> Callable[[Tensor], Any]:
        @functools.wraps(hook, updated=())
        def watched(x: Tensor) -> Any:
            g = x.grad if after else x
            if g is None:
                return hook(x)
            with self:
                with without_modes():
                    self._note(g, kind)
                result = hook(x)
                with without_modes():
                    for changed in (g, x.grad if after else result):
                        self._left(changed, kind, where)
            return result

        return watched

    def _left(self, g: Any, kind: Type, where: str) -> None:
        """A gradient after a hook."""
        theirs = self.type_of(g) if isinstance(g, Tensor) else None
        if theirs is not None and (extra := theirs.axes - kind.axes):
            self._refuse(
                f"a hook of {where}",
                f"makes the gradient of a value that is invariant along {names(sorted(extra))} vary along it.",
                f"the gradient {text_of(g)}, {along_of(theirs)}",
                "multiply in forward, where a pvary is inserted; or reduce what it is changed by",
            )

    # ----------------------------------------------------------------------------------------------- custom functions

    def function(self, cls: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom function of autograd: its backward takes care of what happens in its forward."""
        if cls is CheckpointFunction:
            return self._checkpoint(own, args)
        if cls.__module__ == CheckpointFunction.__module__:
            with self._apart():
                return own(cls, *args, **kwargs)
        if any(isinstance(arg, (Module, types.FunctionType, types.MethodType)) for arg in args):
            fix = (
                "torch.utils.checkpoint.checkpoint, or mc.check_vma(False) around it and mc.mark_varying of the result"
            )
            self._refuse(f"{cls.__name__}.apply", "takes a function, which it may call out of sight.", "", fix)
        with self._apart():
            args, kwargs, also = without_numbers(args, kwargs)
            operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)] + also
            name, run = cls.__name__, functools.partial(own, cls)
            found = self._types(operands, name)
            if found is None:
                return self._unseen(Kind(name), run, args, kwargs, operands)
            kinds = found + self._beside(cls, args, kwargs, operands)
            whole, given = join(kinds, name) if kinds else INVARIANT, args
            args, kwargs = self._evened(operands, found, whole, name, args, kwargs)
            versions = versions_of(operands)
            result = self._run(run, args, kwargs, name, args is not given)
            self._note_all(result, whole, operands)
            guessed(result, operands, name)
            self._changed(operands, versions, whole, name, evened=args is not given)
        return result

    def _beside(
        self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Tensor]
    ) -> list[Type]:
        """The types of what a custom function takes and autograd does not see, inside of its arguments, in closures,
        defaults, globals and attributes of the class: no gradient goes there, and what comes back to the others varies
        with it.
        """
        known, found = {id(x) for x in operands}, []
        for x in _others(Reachable(list(args), dict(kwargs)), known):
            kind = self.type_of(x)
            if kind is None and torch.is_grad_enabled() and any(y.requires_grad for y in operands):
                self._unknown(x, [x], cls.__name__)
            found.append(kind)
        if package_of(cls) not in _LIBRARIES:
            found += [self.type_of(x) for x in _others(Reachable(*_parts(cls)), known)]
        return [kind for kind in found if kind is not None and kind.axes]

    def _checkpoint(self, own: Any, args: tuple[Any, ...]) -> Any:
        """The reentrant checkpoint: the graph that counts is made in backward, by calling the function again."""
        run, preserve, *given = args
        current = current_mesh()
        kinds = self._kinds(given)
        found: list[Type | None] = []
        inside: list[Any] = []

        def tracked(*values: Any) -> Any:
            with without_modes():
                for value, kind, before in zip(values, kinds, given, strict=True):
                    if kind is not None and marked(value) is None:
                        self._note(value, kind)
                        carried(before, value)
            first = not found  # then this is among the modes, and has only to look
            with (
                watched_by(cast(Watcher, self)) if first else self,
                use_mesh(self.mesh if current is None else current),
            ):
                result = run(*values)
            if first:
                inside.extend(several(result))
                found.extend(self._kinds(inside))
            return result

        with watched_by(None):
            result = own(CheckpointFunction, tracked, preserve, *given)
        with without_modes():
            for y, kind, before in zip(several(result), found, inside, strict=True):
                if kind is not None:
                    self._note(y, kind)
                    carried(before, y)
        return result

    def _kinds(self, values: Iterable[Any]) -> list[Type | None]:
        with without_modes():
            return [self.type_of(x) if isinstance(x, Tensor) else None for x in values]


_LIBRARIES = ("torch", "meshcomm")
"""Hooks of these know what they do, and custom functions say it themselves."""


def _parts(cls: Any) -> Iterator[Any]:
    """The methods of a custom function, and what stands beside them in the class."""
    for base in cls.__mro__:
        if base is Function:
            return
        for name in vars(base):
            value = getattr(cls, name, None)
            if isinstance(value, types.FunctionType) or not name.startswith("__"):
                yield value


def _others(reachable: Reachable, known: set[int]) -> list[Tensor]:
    return [x for _, x in reachable.tensors.values() if id(x) not in known]


_watching: list[bool] = []


def watch_all() -> None:
    """Have calls of custom functions seen, from the first time on."""
    if not _watching:
        _watching.append(True)
        watch_functions(_on_function)
        watch_parameters(_on_parameter)
        watch_storages(_on_storage)
        watch_capsules(lend)
        watch_swaps(_on_swap)


def _on_storage(storage: UntypedStorage) -> None:
    if here.watcher is not None:
        unknown_in(storage, Origin("UntypedStorage.copy_", call_site()))


def _on_parameter(made: Tensor, data: Any) -> None:
    watcher = here.watcher
    if isinstance(watcher, Functions) and isinstance(data, Tensor):
        watcher.parameter(made, data)


def _on_swap(own: Any, x: Tensor, y: Tensor) -> None:
    if isinstance(here.watcher, Functions):
        here.watcher.forget_varied((x, y))
    swap_notes(own, x, y)


def _on_function(cls: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    watcher = here.watcher
    if isinstance(watcher, Functions):
        return watcher.function(cls, own, args, kwargs)
    return own(cls, *args, **kwargs)
