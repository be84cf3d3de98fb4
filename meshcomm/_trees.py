"""Pytrees, for a torch without ``torch.utils._pytree``: Python's containers and torch's named results, as torch takes
them. What somebody has registered with torch is a leaf here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_DICTS = (dict, OrderedDict, defaultdict)
_ROWS = (list, tuple, deque, torch.Size)


@dataclass(frozen=True)
class Form:
    """What is left of a tree without its leaves; a leaf's kind is None."""

    kind: type | None
    context: Any
    children: tuple[Form, ...]

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """The parts of ``tree`` that stand where this form has leaves."""
        if self.kind is None:
            return [tree]
        kind, context, parts = _taken_apart(tree)
        if (kind, _comparable(kind, context), len(parts)) != (
            self.kind, _comparable(self.kind, self.context), len(self.children),
        ):  # fmt: skip
            raise ValueError(f"expected a {self.kind.__name__}, not {tree!r}")
        if kind in _DICTS:
            parts = [tree[key] for key in _keys(self.context)]
        return [found for form, part in zip(self.children, parts, strict=True) for found in form.flatten_up_to(part)]


_LEAF = Form(None, None, ())


def _taken_apart(tree: Any) -> tuple[type | None, Any, list[Any]]:
    kind = type(tree)
    if kind in _DICTS:
        context = (tree.default_factory, list(tree)) if kind is defaultdict else list(tree)
        return kind, context, list(tree.values())
    if kind in _ROWS or (issubclass(kind, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_fields"))):
        return kind, None, list(tree)
    return None, None, []


def _keys(context: Any) -> list[Any]:
    return context[1] if isinstance(context, tuple) else context  # type: ignore[no-any-return]


def _comparable(kind: type | None, context: Any) -> Any:
    return set(_keys(context)) if kind in _DICTS else context


def flatten(tree: Any) -> tuple[list[Any], Form]:
    """The leaves (``None`` is one), and the form."""
    kind, context, parts = _taken_apart(tree)
    if kind is None:
        return [tree], _LEAF
    found = [flatten(part) for part in parts]
    return [leaf for leaves, _ in found for leaf in leaves], Form(kind, context, tuple(form for _, form in found))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The tree with these leaves."""
    given = iter(leaves)
    tree = _built(given, spec)
    left = list(given)
    if left:
        raise ValueError(f"{len(left)} leaves too many")
    return tree


def _built(leaves: Iterator[Any], form: Form) -> Any:
    if form.kind is None:
        return next(leaves)
    kind: Callable[..., Any] = form.kind
    parts = [_built(leaves, child) for child in form.children]
    if form.kind in _DICTS:
        pairs = dict(zip(_keys(form.context), parts, strict=True))
        return defaultdict(form.context[0], pairs) if form.kind is defaultdict else kind(pairs)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def leaves_with_path(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves with the text of the path to each, such as ``['layers'][0]``."""
    kind, context, parts = _taken_apart(tree)
    if kind is None:
        return [(path, tree)]
    steps: list[str]
    if kind in _DICTS:
        steps = [f"[{key!r}]" for key in _keys(context)]
    elif hasattr(kind, "_fields"):
        steps = [f".{name}" for name in kind._fields]
    else:
        steps = [f"[{i}]" for i in range(len(parts))]
    return [found for step, part in zip(steps, parts, strict=True) for found in leaves_with_path(part, path + step)]
