"""Every private name of torch that meshcomm uses, each behind a function of its own.

A new torch that moves one of them fails ``tests/test_torch_private.py`` and this file is where it is mended.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_active
from torch._C._functorch import unwrap_if_dead
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function as _any_function,
)
from torch.autograd import forward_ad
from torch.distributed import (  # type: ignore[attr-defined]
    Store,
    distributed_c10d,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "alive",
    "allgather_base",
    "at_trace_time",
    "backward_pass",
    "current_node",
    "default_store",
    "dual_level_open",
    "forward_ad_shared",
    "forward_ad_state",
    "forward_mode_on",
    "functional",
    "functorch_active",
    "has_sequence_numbers",
    "in_graph",
    "leaves_of_graph",
    "let_into_graph",
    "new_group",
    "next_sequence_number",
    "outside_transforms",
    "own_parameters",
    "path_text",
    "primal_of",
    "reduce_scatter_base",
    "saved_hooks_on_top",
    "sequence_number",
    "set_forward_ad_state",
    "set_own_parameters",
    "set_sequence_number",
    "tree_flatten",
    "tree_leaves_with_path",
    "tree_unflatten",
    "unwrap_if_dead",
    "unwrapped",
    "version_of",
    "view_again",
    "watch_backward",
    "watch_functions",
    "watch_total_norms",
    "without_modes",
]


# --------------------------------------------------------------------------------------------------- process groups


def allgather_base(group: dist.ProcessGroup, out: Tensor, x: Tensor) -> dist.Work:
    """Gather into one buffer; the public ``all_gather_into_tensor`` costs some µs more of Python."""
    return group._allgather_base(out, x)


def reduce_scatter_base(
    group: dist.ProcessGroup, out: Tensor, x: Tensor, options: dist.ReduceScatterOptions
) -> dist.Work:
    """Reduce and scatter from one buffer to one buffer."""
    return group._reduce_scatter_base(out, x, options)


def default_store() -> Store:
    """The store over which the default process group met."""
    store: Store = distributed_c10d._get_default_store()
    return store


def new_group(ranks: Sequence[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group of ``ranks`` in the order given; only its members call.

    The public ``dist.new_group`` either needs every rank of the world, or derives the group's name from the number of
    groups that this rank has made before, which differs between ranks once groups are made when first used.
    """
    world = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    backend, store = world.pg_map[default]
    bound = default.bound_device_id
    if (
        bound is not None
    ):  # a bound device makes NCCL split the default communicator, which waits for every rank of the world
        default.bound_device_id = None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            name,  # type: ignore[arg-type]  # a NewType of str in some versions
            timeout=timeout,
            group_desc=name,
        )
    finally:
        if bound is not None:
            default.bound_device_id = bound
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


functional: Any = torch.ops._c10d_functional
"""The collectives that trace in one graph and that inductor buckets and overlaps."""


# ------------------------------------------------------------------------------------------------------- autograd


def dual_level_open() -> bool:
    """Whether a forward-mode level is open: a dual tensor has ``requires_grad=False`` and would lose its tangent."""
    return forward_ad._current_level >= 0


def forward_ad_state() -> tuple[int, int]:
    """The forward-mode bookkeeping that torch keeps per process and not per thread."""
    return forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_ad_state(state: tuple[int, int]) -> None:
    """Put back what :func:`forward_ad_state` gave."""
    forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextlib.contextmanager
def forward_ad_shared() -> Iterator[None]:
    """Let several threads, of which one runs at a time, each hold forward-mode level 0 open.

    The level itself is one per process, and closing it wipes every tangent in it. So the first thread to enter opens
    it and the last one to leave closes it; what a thread sees as its current level is exchanged by
    :func:`set_forward_ad_state`.
    """
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


def forward_mode_on() -> contextlib.AbstractContextManager[None]:
    """Let operations carry tangents, in the ``jvp`` of a Function too."""
    return forward_ad._set_fwd_grad_enabled(True)


def primal_of(x: Tensor) -> Tensor:
    """``x`` without its tangent of the innermost level; those of outer levels stay."""
    primal: Tensor = forward_ad.unpack_dual(x, level=0).primal
    return primal


def version_of(x: Tensor) -> int:
    """How often ``x`` has been changed in place."""
    return x._version


def view_again(x: Tensor, base: Tensor) -> Tensor:
    """The view of ``base`` that ``x`` is of its own."""
    return x._view_func(base)  # type: ignore[attr-defined, no-any-return]


def backward_pass() -> int:
    """Which backward pass of autograd is running on this thread: one inside of another has a number of its own."""
    return torch._C._current_graph_task_id()


def current_node() -> Any:
    """The node that autograd runs on this thread; None outside of a backward, or where torch does not tell."""
    ask = getattr(torch._C, "_current_autograd_node", None)
    return None if ask is None else ask()


def next_sequence_number() -> int:
    """The number that autograd will give to the next node that this thread makes."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return 0 if ask is None else int(ask())


def sequence_number(node: Any) -> int:
    """The number of a node; -1 where torch does not tell."""
    ask = getattr(node, "_sequence_nr", None)
    return -1 if ask is None else int(ask())


def has_sequence_numbers() -> bool:
    """Whether the order in which autograd runs ready nodes can be set."""
    return hasattr(torch.autograd.function.BackwardCFunction, "_set_sequence_nr")


def set_sequence_number(node: Any, number: int) -> None:
    """Have autograd run ``node``, when ready, before nodes with lower numbers; without that call nothing changes."""
    if has_sequence_numbers():
        node._set_sequence_nr(number)


@contextlib.contextmanager
def watch_backward(watch: Callable[[Sequence[Any], Sequence[Any], bool], object]) -> Iterator[None]:
    """While this is open, call ``watch(roots, inputs, whether leaves accumulate)`` before each pass of autograd;
    without the function that starts them, nothing is called.
    """
    start: Any = getattr(torch.autograd, "_engine_run_backward", None)
    if start is None:
        yield
        return

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
    seen: set[Any] = set()
    waiting: list[Any] = []
    for root in roots:
        node = root.grad_fn if isinstance(root, Tensor) else root.node
        if node is not None:
            waiting.append(node)
        elif isinstance(root, Tensor) and root.requires_grad:
            yield root
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions if following is not None]


def saved_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pair of saved-tensor hooks that autograd would call now; those of a checkpoint switch its recomputation."""
    pair: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if pair is None else (pair[0], pair[1])


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module looks up the parameters that are its own and not its children's."""
    return module._parameters


def set_own_parameters(module: torch.nn.Module, table: dict[str, torch.nn.Parameter | None]) -> None:
    """Have a module look them up in ``table``."""
    module.__dict__["_parameters"] = table


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Make plain tensors, whatever transform, tracing or inference mode the caller is in."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes(), _any_function():
        yield


# ------------------------------------------------------------------------------------------------ watching operations


def unwrapped(x: Tensor) -> Tensor | None:
    """What a torch.func transform has wrapped in ``x``, or None."""
    functorch = torch._C._functorch
    return functorch.get_unwrapped(x) if functorch.is_functorch_wrapped_tensor(x) else None


def alive(x: Tensor) -> Tensor:
    """``x``, or the innermost tensor in it that no ended torch.func transform has wrapped."""
    while (inner := unwrap_if_dead(x)) is not x:
        x = inner
    return x


def without_modes() -> contextlib.AbstractContextManager[None]:
    """What runs inside is seen by no mode and no subclass of tensors."""
    return torch._C.DisableTorchFunction()


def watch_functions(watch: Callable[..., Any]) -> None:
    """From now on ``MyFunction.apply(...)`` is ``watch(MyFunction, torch's own apply, args, kwargs)``: modes do not see
    the call, and autograd takes ``backward`` on trust.
    """
    descriptor = torch.autograd.Function.__dict__["apply"]

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(None, cls)(*args, **kwargs)

    own = getattr(descriptor, "__func__", bound)  # since torch 2.15 it is written in C, and there is no function

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(cls, own, args, kwargs)

    apply.__wrapped__ = descriptor  # type: ignore[attr-defined]  # as functools.wraps does
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def watch_total_norms(look: Callable[[list[Tensor]], object]) -> None:
    """From now on ``look`` is called with the tensors of which ``torch.nn.utils`` is about to take the total norm,
    whoever has imported its functions before. Where torch has them in another shape nothing is seen.
    """
    if look in _lookers:
        return
    _lookers.append(look)
    home: Any = torch.nn.utils.clip_grad
    own = getattr(home, _GROUPING, None)
    if own is None or len(_lookers) > 1:
        return

    def grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name == "_get_total_norm":
            for each in _lookers:
                each(tensors[0])
        return own(tensors, *args, **kwargs)

    setattr(home, _GROUPING, grouped)


_GROUPING = "_group_tensors_by_device_and_dtype"
_lookers: list[Callable[[list[Tensor]], object]] = []


# ------------------------------------------------------------------------------------------------------- compiling
# torch.compiler's own decorators import all of the compiler, a second and more, into programs that never compile.

F = TypeVar("F", bound=Callable[..., Any])
_waiting: list[Callable[..., Any]] = []


def at_trace_time(fn: F) -> F:
    """Have dynamo call ``fn`` while it traces and take the result as a constant, as ``assume_constant_result`` does."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def in_graph(fn: F) -> F:
    """Have dynamo make one node of ``fn``, as ``allow_in_graph`` does, once :func:`let_into_graph` was traced."""
    _waiting.append(fn)
    return fn


@at_trace_time
def let_into_graph() -> bool:
    """Call before a function that is decorated with :func:`in_graph`."""
    while _waiting:
        torch.compiler.allow_in_graph(_waiting.pop())
    return True


# --------------------------------------------------------------------------------------------------------- pytrees


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree (``None`` is a leaf) and what is needed to build it again."""
    return pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The pytree with these leaves."""
    return pytree.tree_unflatten(leaves, spec)


def tree_leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with the text of the path to each, such as ``['layers'][0]``."""
    return [(path_text(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def path_text(path: tuple[Any, ...]) -> str:
    """``['w'][0]`` for a path of keys."""
    keystr: Callable[[tuple[Any, ...]], str] = pytree.keystr
    return keystr(path)
