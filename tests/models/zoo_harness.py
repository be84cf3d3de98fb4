"""Three steps of AdamW in float64 on one rank and on many, and how far their parameters are apart."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import zoo
import zoo_methods
import zoo_tensor
from torch import Tensor, nn
from zoo import Batch, Model
from zoo_methods import Method

import meshcomm as mc
from meshcomm import parallel

ROWS, STEPS, TOKENS = 8, 3, 4
"""Rows of a batch over all ranks; steps; tokens that are generated."""

Found = tuple[dict[str, Tensor], Tensor | None, float]
"""The whole state at the end, tokens of the first row if any are generated, the last loss."""


_lock, _inside = threading.Lock(), 0
_SINGLE = torch.float32
_NARROW = {"float32": torch.float32, "float": torch.float32}
_NARROWING = Tensor.float


@contextlib.contextmanager
def wide(method: Method) -> Iterator[None]:
    """Norms, softmaxes and angles that models compute in float32, whatever their parameters are, are float64 inside.

    Sums over rows would otherwise be rounded differently on one rank and on many.
    """
    global _inside
    if method.narrow:
        yield
        return
    with _lock:
        _inside += 1
        for name in _NARROW:
            setattr(torch, name, torch.float64)
        Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                for name, dtype in _NARROW.items():
                    setattr(torch, name, dtype)
                Tensor.float = _NARROWING  # type: ignore[method-assign]


def methods() -> dict[str, Method]:
    """All of them by name."""
    return {method.name: method for method in (*zoo_methods.METHODS, *zoo_tensor.TENSOR)}


def made(model: Model, method: Method) -> nn.Module:
    """A new one in training mode, in float64, equal wherever it is made."""
    torch.manual_seed(3)
    module = model.make().to(_SINGLE if method.narrow else torch.float64).train()
    method.prepare(module, model)
    return module


def _rows(batch: Batch, part: int, parts: int) -> Batch:
    """The rows of one of so many parts."""
    each = len(next(iter(batch.values()))) // parts
    return {name: x[part * each : (part + 1) * each] for name, x in batch.items()}


Drawn = tuple[int, Batch]
"""A batch, and the seed of what is drawn at random for it."""


def _micro_batches(batch: Batch, method: Method, index: int, count: int) -> list[Drawn]:
    """Those of one rank, each of which is its part of what one rank takes at once."""
    if method.narrow:
        batch = {name: x.to(_SINGLE) if x.is_floating_point() else x for name, x in batch.items()}
    parts = [_rows(_rows(batch, at, method.micro), index, count) for at in range(method.micro)]
    return [(100 * at + index, part) for at, part in enumerate(parts)]


@contextlib.contextmanager
def _around(method: Method, step: int, at: int) -> Iterator[None]:
    """What a forward runs in; without autocast's cache, which adds up the gradients of what is used twice in bfloat16."""
    with contextlib.ExitStack() as inside:
        if method.autocast is not None:
            inside.enter_context(torch.autocast("cpu", method.autocast, cache_enabled=False))
        if method.drawn:
            inside.enter_context(mc.rng(method.drawn, seed=(step, at)))
        yield


Loss = Callable[[nn.Module], Tensor]


def _loss(model: Model, method: Method, batch: Batch, step: int, at: int, parts: int, module: nn.Module) -> Tensor:
    """Of a batch that is one of so many parts."""
    with _around(method, step, at):
        return model.loss(module, batch) / parts


def _backward(module: nn.Module, loss: Loss) -> float:
    found = loss(module)
    found.backward()
    return found.item()


def _backward_narrowed(dtype: torch.dtype, module: nn.Module, loss: Loss) -> float:
    """On one rank what ``param_dtype`` does on many: a copy in that dtype, whose gradients are added up in the
    parameters' own."""
    narrow = copy.deepcopy(module)
    for param in narrow.parameters():
        param.data, param.grad = param.data.to(dtype), None
    value = _backward(narrow, loss)
    for param, found in zip(module.parameters(), narrow.parameters(), strict=True):
        if found.grad is not None:
            param.grad = found.grad.to(param.dtype) + (0 if param.grad is None else param.grad)
    for own, changed in zip(module.buffers(), narrow.buffers(), strict=True):
        own.copy_(changed)
    return value


class Ranks:
    """How those of a mesh train: what the steps of many and of one are made of."""

    def unsynced(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch after which others come."""
        return parallel.no_sync(module)

    def backward(self, module: nn.Module, loss: Loss) -> float:
        """Of a micro-batch."""
        return _backward(module, loss)

    def ready(self, module: nn.Module) -> None:
        """All micro-batches are done."""

    def clip(self, module: nn.Module, most: float) -> Any:
        """By the norm of the whole model."""
        return parallel.clip_grad_norm(module, most)


class Alone(Ranks):
    """One rank, which takes the rows of many one after the other where that makes a difference."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.found: list[list[Tensor | None]] = []

    def unsynced(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, module: nn.Module, loss: Loss) -> float:
        dtype = self.method.param_dtype
        value = _backward(module, loss) if dtype is None else _backward_narrowed(dtype, module, loss)
        if self.method.apart:
            self.found.append([param.grad for param in module.parameters()])
            for param in module.parameters():
                param.grad = None
        return value

    def ready(self, module: nn.Module) -> None:
        """Gradients are added up as ranks do it, in pairs and in pairs of pairs: in float32 the order is seen."""
        while len(self.found) > 1:
            pairs = zip(self.found[::2], self.found[1::2], strict=True)
            self.found = [
                [x if y is None else y if x is None else x + y for x, y in zip(*pair, strict=True)] for pair in pairs
            ]
        for param, grad in zip(module.parameters(), self.found.pop() if self.found else (), strict=False):
            param.grad = grad

    def clip(self, module: nn.Module, most: float) -> Any:
        return nn.utils.clip_grad_norm_(module.parameters(), most)


def trained(module: nn.Module, model: Model, method: Method, batches: list[Drawn], who: Ranks) -> float:
    """Train it in place; the last loss."""
    params = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    value = math.nan
    for step in range(STEPS):
        optimizer.zero_grad()
        for at, (seed, batch) in enumerate(batches):
            torch.manual_seed(1000 * step + seed)
            with who.unsynced(module) if at + 1 < len(batches) else contextlib.nullcontext():
                value = who.backward(module, functools.partial(_loss, model, method, batch, step, at, len(batches)))
        who.ready(module)
        if method.clip:
            who.clip(module, method.clip)
        optimizer.step()
    return value


def generated(module: nn.Module, model: Model, method: Method) -> Tensor | None:
    """Some tokens after a prompt, by a cache."""
    if not (method.generate and model.generates):
        return None
    batch = model.batch(ROWS)
    prompt = (
        {"input_ids": batch["input_ids"][:1, :4]}
        if "input_ids" in batch
        else {"input_features": batch["input_features"][:1]}
    )
    module.eval()
    with torch.no_grad():
        tokens: Tensor = module.generate(  # type: ignore[operator]
            **prompt, do_sample=False, use_cache=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS
        )
    return tokens


def on_one_rank(name: str, way: str) -> Found:
    """What a single rank comes to: kept, for methods that differ in their meshes alone."""
    method = methods()[way]
    parts = math.prod(method.axes[axis] for axis in method.data) if method.apart else 1
    alike = replace(method, name="", axes={}, apply=zoo_methods.nothing, data=(), fits=zoo_methods.always,
                    generate=not method.narrow, tolerance=0.0)  # fmt: skip
    return _on_one_rank(name, alike, parts)


@functools.lru_cache(maxsize=64)
def _on_one_rank(name: str, method: Method, parts: int) -> Found:
    model = zoo.named(name)
    with wide(method), mc.use_mesh(mc.make_mesh(dict.fromkeys(zoo_methods.AXES, 1))):
        module = made(model, method)
        batches = [drawn for index in range(parts) for drawn in _micro_batches(model.batch(ROWS), method, index, parts)]
        loss = trained(module, model, method, batches, Alone(method))
        return {key: x.detach() for key, x in module.state_dict().items()}, generated(module, model, method), loss


def on_this_rank(name: str, way: str) -> Found | None:
    """What this rank of many comes to: on the first of them, None on others."""
    with wide(methods()[way]):
        return _on_this_rank(zoo.named(name), methods()[way])


def _on_this_rank(model: Model, method: Method) -> Found | None:
    mesh = mc.make_mesh(method.axes)
    with mc.use_mesh(mesh):
        module = made(model, method)
        method.apply(module, model)
        index = count = 0
        for axis in method.data:
            index, count = index * mesh.shape[axis] + mesh.coordinate[axis], (count or 1) * mesh.shape[axis]
        batches = _micro_batches(model.batch(ROWS), method, index, count or 1)
        loss = trained(module, model, method, batches, Ranks())
        state = parallel.full_state_dict(module, dst=0)
        tokens = generated(module, model, method)
    return None if state is None else (state, tokens, loss)


def why_not(name: str, way: str) -> str:
    """Why this method cannot be asked of this model; empty: it can."""
    model, method = zoo.named(name), methods()[way]
    reason = method.fits(model.make(), model)
    if reason:
        return reason
    try:
        on_one_rank(name, way)
    except Exception as error:  # what the model itself cannot do is not asked of it
        return f"on one rank {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def apart(found: Found | None, name: str, way: str) -> float:
    """The largest difference from one rank's state; infinite where names, shapes or tokens differ."""
    assert found is not None
    (state, tokens, _), (expected, words, _) = found, on_one_rank(name, way)
    if state.keys() != expected.keys():
        raise AssertionError(f"other names: {sorted(state.keys() ^ expected.keys())[:6]}")
    if tokens is not None and not (words is not None and torch.equal(tokens, words)):
        raise AssertionError(
            f"other tokens: {tokens.tolist()}, on one rank {None if words is None else words.tolist()}"
        )
    most = 0.0
    for key, x in expected.items():
        if state[key].shape != x.shape or state[key].dtype != x.dtype:
            raise AssertionError(f"{key}: {state[key].dtype} {tuple(state[key].shape)}, not {x.dtype} {tuple(x.shape)}")
        if x.numel():
            most = max(most, (state[key].double() - x.double()).abs().max().item())
    return most


def in_process(name: str, way: str) -> float:
    """How far many ranks in this process and one rank are apart."""
    found = mc.launch(on_this_rank, ranks=methods()[way].ranks, args=(name, way))
    return apart(found[0], name, way)
