"""The private names of torch behind its compiler: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshcomm._torch.autograd import functorch_active
from meshcomm._versions import find

__all__ = [
    "at_trace_time",
    "computed_again",
    "copied_in_graph",
    "depends_on_data",
    "elementwise",
    "first_calls_unwatched",
    "in_graph",
    "in_one_graph",
    "let_into_graph",
    "out_of_graphs",
    "transformed_in_graph",
]


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


def copied_in_graph(x: Tensor) -> Tensor:
    """A dense copy that inductor makes. In place of a ``clone``, or a ``cat`` of one, it takes what was copied. Where a
    view of that is given to the user, and it is kept for backward too, backward writes over what the user has, for
    torch (2.11 to 2.15) believes that nobody else has what was kept.
    """
    raw = x.contiguous()
    if raw.is_floating_point() and raw.itemsize == 1:
        raw = raw.view(torch.uint8)
    y = torch.where(torch.ones((), dtype=torch.bool, device=x.device), raw, raw.new_zeros(()))
    return y if y.dtype == x.dtype else y.view(x.dtype)


_FRAMES = "torch._C._dynamo.eval_frame."
_set_strategy: Any = find(_FRAMES + "set_code_exec_strategy", "fully_shard imports all of the compiler")
_strategy: Any = find(_FRAMES + "_FrameExecStrategy", "fully_shard imports all of the compiler")
_action: Any = find(_FRAMES + "_FrameAction", "fully_shard imports all of the compiler")


def out_of_graphs(fn: F) -> F:
    """Have dynamo trace neither ``fn``, a plain function, nor what it calls: graphs end before it and begin after."""
    if _strategy is None or _action is None or _set_strategy is None:
        return torch.compiler.disable(fn)  # type: ignore[no-any-return]
    _set_strategy(fn.__code__, _strategy(_action.SKIP, _action.SKIP))
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return fn


@at_trace_time
def transformed_in_graph() -> bool:
    """Whether dynamo traces what is inside of a transform of ``torch.func``."""
    return functorch_active()


@at_trace_time
def in_one_graph() -> bool:
    """Whether dynamo traces what was compiled with ``fullgraph=True``."""
    try:  # where a graph is traced the compiler is there: nobody shall import it for this
        return bool(sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().one_graph)
    except (AttributeError, KeyError):  # nothing is traced, or torch has no such name any more: then graphs break
        return False


@at_trace_time
def first_calls_unwatched() -> bool:
    """Have torch not look whether custom operators give views of what they are given, in the first call of a compiled
    function: it does so in a dispatch mode, and functional collectives that gloo runs under one may end the process
    (SIGABRT, SIGSEGV; torch 2.13: a tensor's object in Python goes while a thread of gloo's uses the tensor).
    """
    config: Any = sys.modules.get("torch._functorch.config")  # where a graph is traced it is there
    known = hasattr(config, "check_custom_op_aliasing")
    if known:
        config.check_custom_op_aliasing = False
    return known


def depends_on_data(number: Any) -> bool:
    """Whether a number in a graph is one that nothing but data tells."""
    shapes: Any = sys.modules.get("torch.fx.experimental.symbolic_shapes")  # without it there is none
    return isinstance(number, torch.SymInt) and bool(shapes.free_unbacked_symbols(number))


@contextlib.contextmanager
def computed_again() -> Iterator[None]:
    """What is traced into a graph inside is not kept for its backward, which computes it again."""
    kept, _ = create_selective_checkpoint_contexts(_again)
    kept.ac_graph_id = 0  # of which region it is: torch compares them
    with kept:
        yield


def _again(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_kernel_of: Any = find(
    "torch.cuda.jiterator._create_jit_fn", "a maximum or minimum of floats on CUDA takes 7 kernels in place of 2"
)
_made: Any = None if _kernel_of is None else cache(_kernel_of)
_ran: set[tuple[str, torch.dtype, torch.device, int]] = set()
_failed: list[RuntimeError] = []


def elementwise(code: str, x: Tensor) -> Tensor | None:
    """What a function of one element, a template of C++, gives of each: in one kernel of CUDA's, which is compiled when
    it is used first; for who knows that no transform and no mode looks on. None where there is none: on other devices,
    and while a graph is captured that would be its first use.
    """
    if not x.is_cuda or _kernel_of is None or _failed or type(x) is not Tensor:
        return None
    key = code, x.dtype, x.device, x.data_ptr() % 32  # there is one for each alignment
    if key not in _ran and torch.cuda.is_current_stream_capturing():
        return None
    try:
        y: Tensor = _made(code)(x)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no compiler, or nowhere to put what it makes: there is another way, which is slower
        _failed.append(error)
        logging.getLogger("meshcomm").info("meshcomm: CUDA kernels cannot be compiled: %s", error)
        return None
    _ran.add(key)
    return y
