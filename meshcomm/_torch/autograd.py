"""The private names of torch behind autograd, and whether a transform is active: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from meshcomm._versions import find, has, lack
from meshcomm.errors import fail

__all__ = [
    "HOOKED",
    "after_backward",
    "backward_context",
    "backward_pass",
    "carries_tangents",
    "carry_tangents",
    "current_node",
    "dual_level_open",
    "forward_ad_shared",
    "forward_ad_state",
    "forward_mode_on",
    "function_of",
    "functorch_active",
    "has_sequence_numbers",
    "hook_for_nodes",
    "hooked",
    "hooks_nodes",
    "is_view",
    "keeps_tensors",
    "leaves_of_graph",
    "next_sequence_number",
    "nodes_of_graph",
    "plain_apply",
    "primal_of",
    "saved_hooks_on_top",
    "sequence_number",
    "set_forward_ad_state",
    "set_sequence_number",
    "shortened",
    "unwrapped",
    "version_hint",
    "version_of",
    "versions_of",
    "view_again",
    "watch_backward",
    "watch_checkpoints",
]


_IN_TLS = "torch._C._is_key_in_tls"
_is_in_tls: Any = find(
    _IN_TLS, "a checkpoint on an accelerator may not find its mesh where several threads have meshes"
)


def backward_context() -> Context | None:
    """The context variables of the thread that called the backward pass, on a thread of autograd's too; None outside of
    one, or where torch does not keep them.
    """
    if _is_in_tls is None or not _is_in_tls("context"):
        return None
    found = torch._C._get_obj_in_tls("context")
    return found if isinstance(found, Context) else None


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


def _one() -> Tensor:
    return torch.ones((), device="cpu")


_LEVEL = "torch.autograd.forward_ad._current_level"
_NESTING = "torch._functorch.eager_transforms.JVP_NESTING"
_LEVELS = "forward mode (jvp, dual tensors) is refused on ranks of one process"

_shares_levels = has(_NESTING, _LEVELS)

if has(_LEVEL, f"{_LEVELS}, and every collective takes some µs longer"):

    def dual_level_open() -> bool:
        """Whether a forward-mode level is open: a dual tensor needs no grad, and would lose its tangent."""
        return forward_ad._current_level >= 0
else:

    def dual_level_open() -> bool:
        """Whether a forward-mode level is open."""
        one = _one()
        return forward_ad.unpack_dual(one).primal is not one  # where none is, nothing is unpacked

    _shares_levels = False

eager_transforms: Any = torch._functorch.eager_transforms if _shares_levels else None


def forward_ad_state() -> tuple[int, int]:
    """The forward-mode bookkeeping that torch keeps per process and not per thread."""
    return (forward_ad._current_level, eager_transforms.JVP_NESTING) if _shares_levels else (-1, 0)


def set_forward_ad_state(state: tuple[int, int]) -> tuple[int, int]:
    """Put back what :func:`forward_ad_state` gave, and give what it would give now."""
    if not _shares_levels:
        return state
    before = forward_ad._current_level, eager_transforms.JVP_NESTING
    if before != state:
        forward_ad._current_level, eager_transforms.JVP_NESTING = state
    return before


@contextlib.contextmanager
def forward_ad_shared() -> Iterator[None]:
    """Let several threads, of which one runs at a time, each hold forward-mode level 0 open.

    The level itself is one per process, and closing it wipes every tangent in it. So the first thread to enter opens
    it and the last one to leave closes it; what a thread sees as its current level is exchanged by
    :func:`set_forward_ad_state`.
    """
    if not _shares_levels:
        with _no_levels():
            yield
        return
    enter: Any
    leave: Any
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    holders = 0

    def enter_shared() -> int:
        nonlocal holders
        if forward_ad._current_level >= 0:
            return int(enter())  # nested in this thread: torch's own error
        holders += 1
        if holders == 1:
            return int(enter())
        forward_ad._current_level = 0
        return 0

    def leave_shared(*, level: int | None = None) -> None:
        nonlocal holders
        if holders > 1 and forward_ad._current_level == 0 and level in (None, 0):
            forward_ad._current_level = -1
        else:
            leave(level=level)
        holders -= 1

    before = forward_ad_state()
    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_shared, leave_shared
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
        set_forward_ad_state(before)


@contextlib.contextmanager
def _no_levels() -> Iterator[None]:
    """Threads cannot share a level, so none of them opens one."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        fail("launch", **lack(f"{_LEVEL} or {_NESTING}", 'runtime="processes", or '))

    enter: Any = forward_ad.enter_dual_level
    forward_ad.enter_dual_level = refused
    try:
        yield
    finally:
        forward_ad.enter_dual_level = enter


_CARRIES = "ranks of one process of which some are in forward mode may meet an error of torch's"
carries_tangents: Callable[[], bool] = find("torch._C._is_fwd_grad_enabled", _CARRIES, lambda: False)
"""Whether operations of this thread carry tangents."""
carry_tangents: Callable[[bool], object] = find("torch._C._set_fwd_grad_enabled", _CARRIES, lambda on: None)
"""Have them do so, or not."""

_TANGENTS = "torch.autograd.forward_ad._set_fwd_grad_enabled"
_set_tangents: Any = find(_TANGENTS, "jvp of collectives that depend on the value (max, product, ...) is refused")


def forward_mode_on() -> contextlib.AbstractContextManager[None]:
    """Let operations carry tangents, in the ``jvp`` of a Function too."""
    if _set_tangents is None:
        fail("jvp", **lack(_TANGENTS, "backward mode (torch.func.vjp), or "))
    return _set_tangents(True)  # type: ignore[no-any-return]


def primal_of(x: Tensor) -> Tensor:
    """``x`` without its tangent of the innermost level; those of outer levels stay."""
    primal: Tensor = forward_ad.unpack_dual(x, level=0).primal
    return primal


_VERSION = "torch.Tensor._version"

_sees_writes = has(
    _VERSION, "check_vma, fully_shard and data_parallel are refused; a leaf that two ranks of one process write is not"
)


def _no_versions(x: Tensor) -> int:
    where = "check_vma, fully_shard, data_parallel"
    fail(where, **lack(_VERSION, "shard_map(check_vma=False), or ", needs="seeing changes in place"))


version_of: Callable[[Tensor], int] = operator.attrgetter("_version") if _sees_writes else _no_versions
"""How often a tensor has been changed in place. (A function of Python around it would cost as much again.)"""


def versions_of(tensors: Sequence[Tensor]) -> int:
    """What their versions add up to: another number once one of them has been changed in place."""
    return sum(map(version_of, tensors))


def version_hint(x: Tensor) -> int:
    """The same for who can do without: 0 where torch does not tell."""
    return x._version if _sees_writes else 0


is_view: Callable[[Tensor], bool] = find(
    "torch.Tensor._is_view", "results of collectives are taken for views: each costs a µs more", lambda x: True
)
"""Whether a tensor is a view of another one to autograd, which then refuses some writes to it."""

_VIEWS = "torch.Tensor._view_func"
_views = has(_VIEWS, "views as another dtype, and of conjugates, are refused by check_vma where they need a pvary")


def view_again(x: Tensor, base: Tensor) -> Tensor:
    """The view of ``base`` that ``x`` is of its own."""
    if _views:
        return x._view_func(base)  # type: ignore[attr-defined, no-any-return]
    own = x._base
    assert own is not None
    before, now = ((y.stride(), y.dtype, y.is_conj(), y.is_neg()) for y in (own, base))
    if before != now or now[1:] != (x.dtype, x.is_conj(), x.is_neg()):
        fail("check_vma", **lack(_VIEWS, "pvary the tensor before the view is taken, or "))
    return base.as_strided(x.shape, x.stride(), x.storage_offset() - own.storage_offset() + base.storage_offset())


_current_pass: Any = find(
    "torch._C._current_graph_task_id", "some µs of each collective in backward; on CUDA one backward inside of another"
)
_STARTS = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}


def _pass_on_the_stack() -> int:
    """The backward pass that this thread is in, as far as its stack tells: autograd runs nodes of the CPU on the thread
    that has called it, and those of a device on a thread of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    last = frame
    while frame is not None:
        if frame.f_code in _STARTS:
            return id(frame)
        last, frame = frame, frame.f_back
    assert last is not None
    return 0 if last.f_globals.get("__name__") == Function.__module__ else -1


backward_pass: Callable[[], int] = _pass_on_the_stack if _current_pass is None else _current_pass
"""Which backward pass of autograd is running on this thread: one inside of another has a number of its own; or -1."""

_can_order = has(
    "torch.autograd.function.BackwardCFunction._set_sequence_nr", "sums of gradients do not overlap with backward"
)


_ERAS = "what a backward calls again does not find the mesh that its forward had: pass mesh="
_current_node: Any = find("torch._C._current_autograd_node", _ERAS)
_tells_number = has("torch.autograd.function.BackwardCFunction._sequence_nr", _ERAS)
_next_number: Any = find("torch._C._autograd._get_sequence_nr", _ERAS)


def current_node() -> Any:
    """The node that autograd runs on this thread; None outside of a backward, or where torch does not tell."""
    return None if _current_node is None else _current_node()


def next_sequence_number() -> int:
    """The number that autograd will give to the next node that this thread makes."""
    return 0 if _next_number is None else int(_next_number())


def sequence_number(node: Any) -> int:
    """The number of a node; -1 where torch does not tell."""
    return int(node._sequence_nr()) if _tells_number and hasattr(node, "_sequence_nr") else -1


def has_sequence_numbers() -> bool:
    """Whether the order in which autograd runs ready nodes can be set."""
    return _can_order


def set_sequence_number(node: Any, number: int) -> None:
    """Have autograd run ``node``, when ready, before nodes with lower numbers; without that call nothing changes."""
    if has_sequence_numbers():
        node._set_sequence_nr(number)


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


_after_backward: Any = find(
    "torch.autograd.Variable._execution_engine.queue_callback", "offloaded shards are copied while the host waits"
)


def after_backward(fn: Callable[[], object]) -> bool:
    """Have ``fn`` called when the backward pass that runs on this thread has ended; False where torch cannot."""
    if _after_backward is None:
        return False
    _after_backward(fn)
    return True


_engine: Any = find(
    "torch.autograd._engine_run_backward", "a leaf that two ranks of one process train is not refused, but shared"
)


def watch_checkpoints(look: Callable[[], object]) -> None:
    """From now on ``look`` is called where a reentrant checkpoint begins: torch's, those of others that have its name,
    and reversible layers, which do the same; of those that are there already. Again, for those that have come since.
    """
    if look not in _checkpoint_lookers:
        _checkpoint_lookers.append(look)
    kinds: list[Any] = list(torch.autograd.Function.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__name__ in ("CheckpointFunction", "_ReversibleFunction") and kind not in _watched_checkpoints:
            _watched_checkpoints.add(kind)
            kind.forward = staticmethod(_looked_at(kind.forward))


def _looked_at(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for look in _checkpoint_lookers:
            look()
        return own(*args, **kwargs)

    return forward


_checkpoint_lookers: list[Callable[[], object]] = []
_watched_checkpoints: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def watch_backward(watch: Callable[[Sequence[Any], Sequence[Any], bool], object]) -> Iterator[None]:
    """While this is open, call ``watch(roots, inputs, whether leaves accumulate)`` before each pass of autograd;
    without the function that starts them, nothing is called.
    """
    if _engine is None:
        yield
        return
    start: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # which somebody else may watch

    def watched(roots: Any, *args: Any, **kwargs: Any) -> Any:
        watch(roots, args[3] if len(args) > 3 else (), kwargs.get("accumulate_grad", False))
        return start(roots, *args, **kwargs)

    engine: Any = torch.autograd
    engine._engine_run_backward = watched
    try:
        yield
    finally:
        engine._engine_run_backward = start


def leaves_of_graph(roots: Sequence[Any]) -> Iterator[Tensor]:
    """The leaves that a backward pass from these tensors (or edges of the graph) reaches."""
    yield from (root for root in roots if isinstance(root, Tensor) and root.requires_grad and root.grad_fn is None)
    for node in nodes_of_graph(roots):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


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


def _as_it_is(x: Any) -> Any:
    return x
