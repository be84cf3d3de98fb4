"""Every private name of torch that meshcomm uses, each behind a function of its own.

A new torch that moves one of them fails ``tests/test_torch_private.py``, and this file is where it is mended. Where a
name is missing its function takes a public way, slower or with less, or refuses the one feature that there is none for:
:mod:`meshcomm._versions` keeps the list. Those of process groups stand in :mod:`meshcomm._torch_groups`,
those of autograd in :mod:`meshcomm._torch_autograd`, kernels in :mod:`meshcomm._torch_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshcomm import _torch_autograd, _torch_groups, _torch_kernels, _trees
from meshcomm._torch_autograd import *  # noqa: F403 -- all of it, as __all__ says below
from meshcomm._torch_groups import *  # noqa: F403
from meshcomm._torch_kernels import *  # noqa: F403
from meshcomm._versions import find, has, lack
from meshcomm.errors import fail

__all__ = [
    "alive",
    "at_trace_time",
    "computed_again",
    "counts_uses",
    "dispatch_modes",
    "functorch_active",
    "in_graph",
    "in_one_graph",
    "let_into_graph",
    "of_tensor",
    "out_of_graphs",
    "outside_dispatch_modes",
    "outside_transforms",
    "own_parameters",
    "packed",
    "parted",
    "plain_apply",
    "plain_now",
    "profiler_on",
    "seeds_in_wait",
    "set_own_parameters",
    "set_seeds_in_wait",
    "tables_of",
    "transformed_in_graph",
    "tree_flatten",
    "tree_leaves_with_path",
    "tree_unflatten",
    "unwrap_if_dead",
    "unwrapped",
    "watch_capsules",
    "watch_functions",
    "watch_parameters",
    "watch_storages",
    "watch_swaps",
    "watch_total_norms",
    "without_memory",
    "without_modes",
]
__all__ += _torch_autograd.__all__
__all__ += _torch_groups.__all__
__all__ += _torch_kernels.__all__


_PARAMETERS = "torch.nn.Module._parameters"
_tables = has(_PARAMETERS, "fully_shard is refused", torch.nn.Module())


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module looks up the parameters that are its own and not its children's."""
    if _tables:
        return module._parameters
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def tables_of(module: torch.nn.Module) -> tuple[dict[str, Tensor | None], dict[str, torch.nn.Module | None]]:
    """The tables in which a module has its own parameters and its children; of a scripted or traced one they lead into
    its C++ part.
    """
    own = vars(module)
    if "_modules" in own:
        return own["_parameters"], own["_modules"]
    return module._parameters, module._modules  # type: ignore[return-value]  # traced


def set_own_parameters(module: torch.nn.Module, table: dict[str, torch.nn.Parameter | None]) -> None:
    """Have a module look them up in ``table``."""
    if not _tables:
        fail("fully_shard", **lack(_PARAMETERS, "mc.parallel.fsdp's functions, or "))
    module.__dict__["_parameters"] = table


def _as_it_is(x: Tensor) -> Tensor:
    return x


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

profiler_on: Callable[[], bool] = find(
    "torch.autograd._profiler_enabled", "torch's profiler does not show what collectives are called", lambda: False
)
"""Whether torch's profiler is on in this thread."""

unwrap_if_dead: Callable[[Tensor], Tensor] = find(
    "torch._C._functorch.unwrap_if_dead", "a tensor that has leaked out of a torch.func transform may fail", _as_it_is
)
"""The tensor in one that a transform has wrapped, if the transform has ended."""

_PLAIN = "torch.autograd.function._SingleLevelFunction"
_plain: Any = find(_PLAIN, "work that was begun outside of a torch.func transform cannot be waited for inside")


def plain_apply(cls: type[Function], *slots: str) -> Any:
    """``apply`` of a Function with forward and backward that looks for no transform: for :func:`outside_transforms`.
    ``slots``: as in :func:`shortened`.
    """
    if _plain is not None:
        plain: Any = type(cls.__name__, (_plain,), {name: vars(cls)[name] for name in ("forward", "backward")})
        return _torch_autograd.shortened(plain, *slots).apply

    def apply(*args: Any) -> Any:
        if functorch_active():
            fail("Work.wait", **lack(_PLAIN, "wait outside of the transform, or "))
        return cls.apply(*args)

    return apply


_OUT = "torch._C._DisableFuncTorch"
_SINGLE = "torch._functorch.autograd_function.enable_single_level_autograd_function"
_no_functorch: Any = find(_OUT, "collectives inside of torch.func transforms are refused")
_any_function: Any = find(_SINGLE, "collectives inside of torch.func transforms are refused")
_no_dispatch_modes: Any = find(
    "torch.utils._python_dispatch._disable_current_modes",
    "dispatch modes (selective checkpoints, fake tensors) see what the library does inside",
    contextlib.nullcontext,
)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Make plain tensors, whatever transform, tracing or inference mode the caller is in."""
    if _no_functorch is None or _any_function is None:
        if functorch_active():
            fail("torch.func", **lack(f"{_OUT} or {_SINGLE}", "call collectives outside of torch.func transforms, or "))
        with torch.inference_mode(False), _no_dispatch_modes():
            yield
        return
    with torch.inference_mode(False), _no_functorch(), _no_dispatch_modes(), _any_function():
        yield


_plainly = contextlib.nullcontext()
_depth_of_modes: Any = find(
    "torch._C._len_torch_dispatch_stack",
    "collectives of fully_shard and small draws of rng cost more, each call of a process group half a µs",
)
dispatch_modes: Callable[[], int] = _depth_of_modes or (lambda: 1)
"""How many modes see what torch is called for on this thread; one, where it does not tell."""


_fake_mode: Any = find(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "save_full_state_dict to a .pt file reserves address space for the whole",
    contextlib.nullcontext,
)


def without_memory() -> contextlib.AbstractContextManager[object]:
    """Tensors that are made inside have a shape, a dtype and a storage, and no memory."""
    mode: contextlib.AbstractContextManager[object] = _fake_mode()
    return mode


def plain_now() -> bool:
    """Whether what torch makes is plain tensors: no transform is active, and no dispatch mode."""
    return _depth_of_modes is not None and _depth_of_modes() == 0 and not functorch_active()


def outside_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    """What runs inside is seen by no dispatch mode of the user's: one that counts calls, as that of selective
    checkpoints does, must not count ours. Fake tensors stay fake, what traces goes on tracing, and a mode whose class
    has ``sees_meshcomm`` (it measures) goes on seeing.
    """
    if _depth_of_modes is not None and _depth_of_modes() == 0:
        return _plainly
    return _without_dispatch_modes()


@contextlib.contextmanager
def _without_dispatch_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        kinds = {mode: _kind_of(mode) for mode in stack.enter_context(_no_dispatch_modes()) or ()}
        if set(kinds.values()) <= {"", "FAKE"}:
            for mode, kind in kinds.items():
                if kind or getattr(mode, "sees_meshcomm", False):
                    stack.enter_context(mode)
        else:
            stack.close()
        yield


def _kind_of(mode: object) -> str:
    """Of a mode that is torch's own infrastructure: FAKE, PROXY, FUNCTIONAL; nothing for any other."""
    key = getattr(mode, "_mode_key", None)
    return "" if key is None else str(getattr(key, "name", key))


# ------------------------------------------------------------------------------------------------ watching operations


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


_has_tracker = has(
    "torch._utils._LazySeedTracker", "ranks of one process that seed an accelerator before its first use share the seed"
)


def seeds_in_wait(module: Any) -> tuple[Any, Any, list[Any]] | None:
    """The calls with which an accelerator that is not in use yet, of this module, will be seeded: for all of its
    devices, for one, and these in order. None where torch does not say.
    """
    tracker = getattr(module, "_lazy_seed_tracker", None) if _has_tracker else None
    return None if tracker is None else (tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order)


def set_seeds_in_wait(module: Any, seeds: tuple[Any, Any, list[Any]]) -> None:
    """Exchange them."""
    tracker = module._lazy_seed_tracker
    tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order = seeds


_UNSEEN = "torch._C.DisableTorchFunction"
_unseen: Any = find(_UNSEEN, "check_vma and rng are refused")


def alive(x: Tensor) -> Tensor:
    """``x``, or the innermost tensor in it that no ended torch.func transform has wrapped."""
    while (inner := unwrap_if_dead(x)) is not x:
        x = inner
    return x


def without_modes() -> contextlib.AbstractContextManager[None]:
    """What runs inside is seen by no mode and no subclass of tensors."""
    if _unseen is None:
        fail("check_vma", **lack(_UNSEEN, "shard_map(check_vma=False), or "))
    return _unseen()  # type: ignore[no-any-return]


def watch_functions(watch: Callable[..., Any]) -> None:
    """From now on ``MyFunction.apply(...)`` is ``watch(MyFunction, torch's own apply, args, kwargs)``: modes do not see
    the call, and autograd takes ``backward`` on trust.
    """
    descriptor: Any = Function.__dict__.get("apply")

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apply = super(Function, cls).apply if descriptor is None else descriptor.__get__(None, cls)
        return apply(*args, **kwargs)

    own = getattr(descriptor, "__func__", bound)  # since torch 2.15 it is written in C, and there is no function

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(cls, own, args, kwargs)

    apply.__wrapped__ = descriptor  # type: ignore[attr-defined]  # as functools.wraps does
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def watch_total_norms(look: Callable[[list[Tensor]], object]) -> None:
    """From now on ``look`` is called with the tensors of which ``torch.nn.utils`` is about to take the total norm,
    whoever has imported its functions before. Where torch has them in another shape nothing is seen.
    """
    if look in _lookers:
        return
    _lookers.append(look)
    home: Any = torch.nn.utils.clip_grad
    own = getattr(home, _GROUPING, None) if _groups_norms else None
    if own is None or len(_lookers) > 1:
        return

    def grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name == "_get_total_norm":
            for each in _lookers:
                each(tensors[0])
        return own(tensors, *args, **kwargs)

    setattr(home, _GROUPING, grouped)


_GROUPING = "_group_tensors_by_device_and_dtype"
_groups_norms = has(
    f"torch.nn.utils.clip_grad.{_GROUPING}", "torch's clip_grad_norm_ of cut parameters is not refused, and wrong"
)
_lookers: list[Callable[[list[Tensor]], object]] = []


def _tell_of(owner: Any, name: str, tell: Callable[..., object]) -> None:
    """From now on ``tell(result, *args, **kwargs)`` is called after each call of this function."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        tell(result, *args, **kwargs)
        return result

    setattr(owner, name, told)


def watch_storages(watch: Callable[[torch.UntypedStorage], object]) -> None:
    """From now on ``watch`` is called with each storage of a tensor into which another storage was copied: modes do not
    see that.
    """
    _tell_of(torch.UntypedStorage, "copy_", lambda result, to, *_, **__: watch(to) if of_tensor(to) else None)


def watch_capsules(watch: Callable[[Tensor], object]) -> None:
    """From now on ``watch`` is called with each tensor whose memory ``to_dlpack`` hands out: modes do not see that."""
    own: Any = getattr(torch.utils.dlpack, "to_dlpack", None)
    for place in (torch.utils.dlpack, torch):
        if own is not None and getattr(place, "to_dlpack", None) is own:
            _tell_of(place, "to_dlpack", lambda capsule, tensor: watch(tensor))


def watch_parameters(watch: Callable[[Parameter, Any], object]) -> None:
    """From now on ``watch(parameter, data)`` is called for each ``Parameter(data)``: modes do not see that."""
    _tell_of(Parameter, "__new__", lambda made, cls, data=None, *_, **__: watch(made, data))


def watch_swaps(watch: Callable[..., None]) -> None:
    """From now on ``torch.utils.swap_tensors(x, y)`` is ``watch(torch's own, x, y)``: modes do not see that, and torch
    refuses tensors that somebody refers to weakly.
    """
    own: Any = torch.utils.swap_tensors

    @functools.wraps(own)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        watch(own, t1, t2)

    torch.utils.swap_tensors = swap_tensors


_count_of: Any = find(
    "torch._C._storage_Use_Count",
    "deepcopy of a tensor under check_vma gives one of unknown type; memory of large results is not used again",
    None,
)


def counts_uses() -> bool:
    """Whether :func:`of_tensor` can tell."""
    return _count_of is not None


def of_tensor(storage: torch.UntypedStorage, besides: int = 0) -> bool:
    """Whether any tensor has this storage, ``besides`` so many: one that was just made, as by ``storage.clone()``, has
    none.
    """
    return _count_of is None or _count_of(storage._cdata) > 1 + besides


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


@contextlib.contextmanager
def computed_again() -> Iterator[None]:
    """What is traced into a graph inside is not kept for its backward, which computes it again."""
    kept, _ = create_selective_checkpoint_contexts(_again)
    kept.ac_graph_id = 0  # of which region it is: torch compares them
    with kept:
        yield


def _again(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


# --------------------------------------------------------------------------------- many tensors in one, and out of it


_MANY = "trees of many tensors take some µs longer for each"
_pack: Any = find("torch._C._nn.flatten_dense_tensors", _MANY)
_part: Any = find("torch._C._nn.unflatten_dense_tensors", _MANY)
_below: Any = find("torch._C._AutoDispatchBelowADInplaceOrView", _MANY)
_in_rows: Any = find("torch._chunk_cat", _MANY)


def packed(tensors: Sequence[Tensor], rows: int = 1) -> Tensor:
    """Two or more of one dtype as ``[rows, all]``, new: in row i slice i of the first dim of each, one behind the
    other. None is empty, if there are several rows.
    """
    return _pack(tensors).view(1, -1) if rows == 1 else _in_rows(tensors, 0, rows)  # type: ignore[no-any-return]


def parted(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What lies one behind the other, in the shapes of ``like``: in the memory of ``flat``, but tensors that to
    autograd have nothing to do with each other.
    """
    with _below():
        return _part(flat, like)  # type: ignore[no-any-return]


if None in (_pack, _part, _below, _in_rows):

    def packed(tensors: Sequence[Tensor], rows: int = 1) -> Tensor:
        """Two or more of one dtype as ``[rows, all]``, new: in row i slice i of the first dim of each."""
        return torch.cat([x.reshape(rows, x.numel() // rows) for x in tensors], 1)

    def parted(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What lies one behind the other, in the shapes of ``like``, in the memory of ``flat``."""
        with torch.no_grad():
            parts = flat.split([x.numel() for x in like])
            return tuple(part.view(x.shape).detach() for part, x in zip(parts, like, strict=True))


# --------------------------------------------------------------------------------------------------------- pytrees


_PYTREE = "torch.utils._pytree"
_COSTS = "trees are Python's containers only: what is registered with torch's pytrees is a leaf"
_pytree: Any = find(_PYTREE, _COSTS)
_flatten: Any = find(f"{_PYTREE}.tree_flatten", _COSTS)
_unflatten: Any = find(f"{_PYTREE}.tree_unflatten", _COSTS)
_leaf: Any = None if _flatten is None else _flatten(0)[1]
_with_path: Any = find(f"{_PYTREE}.tree_flatten_with_path", _COSTS)
_keystr: Any = find(f"{_PYTREE}.keystr", _COSTS)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree (``None`` is a leaf) and what is needed to build it again."""
    return ([tree], _leaf) if type(tree) is Tensor else _flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The pytree with these leaves."""
    return leaves[0] if spec is _leaf else _unflatten(leaves, spec)


def tree_leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with the text of the path to each, such as ``['layers'][0]``."""
    return [(_keystr(path), leaf) for path, leaf in _with_path(tree)[0]]


if None in (_flatten, _unflatten, _with_path, _keystr):
    tree_flatten, tree_leaves_with_path = _trees.flatten, _trees.leaves_with_path
    tree_unflatten = _trees.unflatten
