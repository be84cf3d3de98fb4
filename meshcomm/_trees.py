"""Pytrees: a walk of lists, tuples and dicts of tensors, for torch's own takes some µs a leaf; and all of them for a
torch whose own are not where they were: Python's containers and torch's named results, as torch takes them. What
somebody has registered with torch is a leaf there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

Walked = Any
"""None: a leaf. (list or tuple or dict, the keys of a dict, where among its parts each of these has its own, or None if
they are in that order, the parts): forms, or how many leaves::

    {"b": x, "a": [y, z, z]}   leaves [y, z, z, x]   form (dict, ("b", "a"), (1, 0), ((list, None, None, 3), None))
"""
_TENSORS, _WALKED = frozenset({Tensor, Parameter}), frozenset({list, tuple, dict})
_FEW = 8  # parts that are looked at one by one as fast as all at once


def walk(tree: Any, leaves: list[Any]) -> Walked:
    """The form of a tree, and its leaves into ``leaves``: dicts in order of their keys, so that ranks agree on it.
    LookupError where something is neither a tensor nor a list, a tuple or a dict.
    """
    kind = type(tree)
    keys = places = None
    parts: Any = tree
    if kind is dict:
        keys = tuple(tree)
        known = _named.get(keys)
        order, places = _in_order(keys) if known is None else known
        parts = tree.values() if places is None else list(map(tree.__getitem__, order))
    elif kind not in _WALKED:
        raise LookupError
    if len(tree) > _FEW and set(map(type, parts)) <= _TENSORS:
        leaves.extend(parts)
        return kind, keys, places, len(parts)
    forms: list[Walked] = []
    for part in parts:
        of = type(part)
        if of in _TENSORS or (of not in _WALKED and isinstance(part, Tensor)):
            leaves.append(part)
            forms.append(None)
        else:
            forms.append(walk(part, leaves))
    return kind, keys, places, tuple(forms)


_named: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[int, ...] | None]] = {}
"""What is known of some keys that are all names: others may be equal, as 1 and True are, and not the same."""
_MOST_NAMED = 100


def _in_order(keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...] | None]:
    """The keys in order, and where in it each of them is, or None if it is theirs."""
    names = set(map(type, keys)) == {str}
    order = tuple(sorted(keys) if names else sorted(keys, key=sortable))
    at = {key: place for place, key in enumerate(order)}
    found = order, None if keys == order else tuple(at[key] for key in keys)
    if names:
        if len(_named) >= _MOST_NAMED:
            _named.clear()
        _named[keys] = found
    return found


def rebuilt(form: Walked, leaves: Iterator[Any]) -> Any:
    """The tree that :func:`walk` went through, with these leaves."""
    kind, keys, places, forms = form
    if type(forms) is int:
        parts = list(islice(leaves, forms))
    else:
        parts = []
        for each in forms:
            parts.append(next(leaves) if each is None else rebuilt(each, leaves))
    if kind is dict:
        return dict(zip(keys, parts if places is None else map(parts.__getitem__, places)))  # noqa: B905 - felt
    return parts if kind is list else tuple(parts)


def sortable(key: object) -> tuple[str, Any]:
    """By what keys of any kind are put in order."""
    return type(key).__name__, key if isinstance(key, (str, int, float, bytes)) else repr(key)


# ------------------------------------------------------------------------------------------- without torch's pytrees

_DICTS = (dict, OrderedDict, defaultdict)
_ROWS = (list, tuple, deque, torch.Size)


class Form(NamedTuple):
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
