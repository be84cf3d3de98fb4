"""Three steps of AdamW in float64 on one rank and on many, and how far their parameters are apart."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
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
    if method.autocast is not None:
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
    module = model.make().to(torch.float64 if method.autocast is None else _SINGLE).train()
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
    if method.autocast is not None:
        batch = {name: x.to(_SINGLE) if x.is_floating_point() else x for name, x in batch.items()}
    parts = [_rows(_rows(batch, at, method.micro), index, count) for at in range(method.micro)]
    return [(100 * at + index, part) for at, part in enumerate(parts)]


@contextlib.contextmanager
def _autocast(method: Method) -> Iterator[None]:
    if method.autocast is None:
        yield
    else:
        with torch.autocast("cpu", method.autocast):
            yield


def trained(
    module: nn.Module, model: Model, method: Method, batches: list[Drawn], clip: Callable[[nn.Module, float], Any],
    unsynced: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
) -> float:  # fmt: skip
    """Train it in place; the last loss."""
    params = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    value = math.nan
    for step in range(STEPS):
        optimizer.zero_grad()
        for at, (seed, batch) in enumerate(batches):
            torch.manual_seed(1000 * step + seed)
            with unsynced(module) if at + 1 < len(batches) else contextlib.nullcontext():
                with _autocast(method):
                    loss = model.loss(module, batch) / len(batches)
                loss.backward()
            value = loss.item()
        if method.clip:
            clip(module, method.clip)
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


@functools.lru_cache(maxsize=64)
def on_one_rank(name: str, way: str) -> Found:
    """What a single rank comes to."""
    with wide(methods()[way]):
        return _on_one_rank(zoo.named(name), methods()[way])


def _on_one_rank(model: Model, method: Method) -> Found:
    module = made(model, method)

    def clip(module: nn.Module, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(module.parameters(), most)

    count = math.prod(method.axes[axis] for axis in method.data) if method.apart else 1
    batches = [drawn for index in range(count) for drawn in _micro_batches(model.batch(ROWS), method, index, count)]
    loss = trained(module, model, method, batches, clip, lambda _: contextlib.nullcontext())
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
        loss = trained(module, model, method, batches, parallel.clip_grad_norm, parallel.no_sync)
        state = parallel.full_state_dict(module, dst=0)
        tokens = generated(module, model, method)
    return None if state is None else (state, tokens, loss)


def why_not(name: str, way: str) -> str:
    """Why this method cannot be asked of this model; empty: it can."""
    model, method = zoo.named(name), methods()[way]
    return method.fits(model.make(), model)


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
