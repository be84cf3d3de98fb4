"""The private names of torch behind autograd's functions and graphs, and whether a transform is active: a part of
:mod:`meshcomm._torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._versions import find, has, lack
from meshcomm.errors import fail

__all__ = [
    "HOOKED",
    "function_of",
    "functorch_active",
    "hook_for_nodes",
    "hooked",
    "hooks_nodes",
    "keeps_tensors",
    "leaves_of_graph",
    "make_graphs",
    "nodes_of_graph",
    "not_users",
    "plain_apply",
    "saved_hooks_on_top",
    "shortened",
    "unwrapped",
]


_nodes = has("torch.autograd.Function._backward_cls", "backward of every collective takes some µs longer")


def shortened(kind: type[Function], *slots: str) -> type[Function]:
    """``kind``, which has forward and backward alone: in backward torch does not look for what else it might have, and
    its nodes keep these attributes without a dict.
    """
    if _nodes:
        node: Any = kind._backward_cls
        own = {"__slots__": slots, "__module__": node.__module__, "apply": kind.backward}
        kind._backward_cls = type(node.__name__, (node,), own)
    return kind


class _Old(Function):
    """A Function that torch refuses under a transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


_try_old: Callable[[Tensor], Tensor] = _Old.apply


def _functorch_refuses() -> bool:
    try:
        _try_old(torch.ones((), device="cpu"))
    except RuntimeError:
        return True
    return False


functorch_active: Callable[[], bool] = find(
    "torch._C._are_functorch_transforms_active", "every collective takes some µs longer", _functorch_refuses
)
"""Whether a torch.func transform is active."""

make_graphs: Callable[[bool], object] = find(
    "torch._C._set_grad_enabled", "each meeting of ranks of one process takes a µs longer", torch.set_grad_enabled
)
"""Switch grad mode on or off."""


_PLAIN = "torch.autograd.function._SingleLevelFunction"
_plain: Any = find(_PLAIN, "work that was begun outside of a torch.func transform cannot be waited for inside")


def plain_apply(cls: type[Function], *slots: str) -> Any:
    """``apply`` of a Function with forward and backward that looks for no transform: for :func:`outside_transforms`.
    ``slots``: as in :func:`shortened`.
    """
    if _plain is not None:
        plain: Any = type(cls.__name__, (_plain,), {name: vars(cls)[name] for name in ("forward", "backward")})
        return shortened(plain, *slots).apply

    def apply(*args: Any) -> Any:
        if functorch_active():
            fail("Work.wait", **lack(_PLAIN, "wait outside of the transform, or "))
        return cls.apply(*args)

    return apply


_IS_WRAPPED, _INNER = "torch._C._functorch.is_functorch_wrapped_tensor", "torch._C._functorch.get_unwrapped"
_UNDER_FUNC = "check_vma under torch.func is refused"
_is_wrapped: Any = find(_IS_WRAPPED, _UNDER_FUNC)
_inner: Any = find(_INNER, _UNDER_FUNC)


def unwrapped(x: Tensor) -> Tensor | None:
    """What a torch.func transform has wrapped in ``x``, or None."""
    if _is_wrapped is None or _inner is None:
        if functorch_active():
            fail("check_vma", **lack(f"{_IS_WRAPPED} or {_INNER}", "shard_map(check_vma=False), or "))
        return None
    return _inner(x) if _is_wrapped(x) else None


_HOOK_DICT = "torch.autograd.function.BackwardCFunction._register_hook_dict"
hooks_nodes = has(_HOOK_DICT, "a sum over an axis of what requires grad takes some µs longer")
"""Whether there is :func:`hooked`."""
HOOKED = "hooked by meshcomm"
"""In the metadata of a node: its gradient is not that of a view."""


def hook_for_nodes(hook: Callable[[Tensor | None], Tensor | None]) -> Tensor:
    """``hook``, in what nodes take it from at once; :meth:`Node.register_prehook` makes a dict and a handle each time.
    None, for no gradient, stays None.
    """
    holder = torch.zeros((), device="cpu", requires_grad=True)
    holder._backward_hooks = {0: hook}
    return holder


def hooked(x: Tensor, holder: Tensor) -> Tensor:
    """An alias of ``x``, which requires grad: its gradient goes through the hook in ``holder``, in passes that are
    differentiated again too. Nodes of C++ and nothing of Python before backward. For whom it is not handed on to:
    ``torch.autograd.grad`` takes the gradient of the alias itself behind the hook.
    """
    alias = x[...]
    node: Any = alias.grad_fn
    node._register_hook_dict(holder)
    node.metadata[HOOKED] = True
    return alias


def leaves_of_graph(roots: Sequence[Any]) -> list[Tensor]:
    """The leaves that a backward pass from these tensors (or edges of the graph) reaches."""
    found = [root for root in roots if isinstance(root, Tensor) and root.requires_grad and root.grad_fn is None]
    waiting: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    seen: set[Any] = {None}
    while waiting:  # as `nodes_of_graph` does it: each backward pass of ranks of one process does
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if following := node.next_functions:
                waiting += [other for other, _ in following]
            elif (leaf := getattr(node, "variable", None)) is not None:
                found.append(leaf)
    return found


def nodes_of_graph(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes that a backward pass from these tensors (or edges of the graph) reaches."""
    waiting: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def function_of(node: Any) -> type[Function] | None:
    """The Function that somebody wrote whose node of the graph this is; None for autograd's own."""
    return getattr(type(node), "_forward_cls", None)


_keep_tensors: dict[type, bool] = {}


def keeps_tensors(node: Any) -> bool:
    """Whether nodes of this type of autograd's own save tensors, which are gone after backward."""
    kind = type(node)
    if kind not in _keep_tensors:
        _keep_tensors[kind] = any(name.startswith("_raw_saved_") for name in dir(node))
    return _keep_tensors[kind]


_hooks_on_top: Any = find(
    "torch._C._autograd._top_saved_tensors_default_hooks", "fully_shard keeps gathered weights until backward: memory"
)


def saved_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pair of saved-tensor hooks that autograd would call now; those of a checkpoint switch its recomputation."""
    if _hooks_on_top is None:
        return _as_it_is, _as_it_is  # somebody may have some
    pair: Any = _hooks_on_top(True)
    return None if pair is None else (pair[0], pair[1])


def not_users(pack: Callable[..., Any]) -> None:
    """Make this saved-tensor hook known as no user's: torch 2.15 warns where those are around a selective checkpoint,
    and will have them see what that saves. It is only put up where there are no others.
    """
    hook: Any = pack
    hook._checkpoint_internal, hook._user_hooks = True, None


def _as_it_is(x: Any) -> Any:
    return x
