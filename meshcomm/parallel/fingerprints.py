"""A few numbers of a tensor, by which ranks tell whether they have the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import is_without_memory
from meshcomm.runtime.process.accelerator import with_doubles

_SAMPLES = 32
_AT_ONCE = 2**19
"""Numbers."""
_SINGLE = 1e-12, 1e18
"""Norms between which squares of single precision neither vanish nor overflow."""


class Fingerprint(NamedTuple):
    """Of a tensor: how far apart equal ones may be, a norm, and some elements."""

    least: float
    norm: float
    size: int
    samples: tuple[float, ...]


@torch.no_grad()
def fingerprint_of(x: Tensor) -> Fingerprint:
    """Reads all of ``x`` once; what has no memory is as any other of its size."""
    flat = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    least = 1e-6 if flat.dtype == torch.float64 else 1e-3 if flat.dtype.itemsize > 2 else 5e-2
    if not flat.is_floating_point() or flat.dtype.itemsize == 1:
        least = 0.0
    if is_without_memory(x):
        return Fingerprint(least, 0.0, x.numel(), ())
    norm = _norm(flat)
    if not flat.numel():
        return Fingerprint(least, 0.0, 0, ())
    at = _places(flat.numel()).to(flat.device)
    dense = flat.is_contiguous() or not flat.ndim
    picked = flat.view(-1)[at] if dense else flat[tuple(torch.unravel_index(at, flat.shape))]
    return Fingerprint(least, norm.item(), flat.numel(), tuple(picked.to("cpu", torch.float64).tolist()))


@functools.lru_cache(64)
def _places(count: int) -> Tensor:
    return torch.linspace(0, count - 1, _SAMPLES, dtype=torch.float64, device="cpu").round().long()


def _norm(x: Tensor) -> Tensor:
    """In double precision, some MiB of it at a time, in one place: what is looked at may be most of what there is room
    for. In single precision first, which takes a third: equal ones have equal norms in that, too, where it has room.
    """
    if x.dtype == torch.float32:
        quick: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in _parts(x)]))
        if _SINGLE[0] < quick.item() < _SINGLE[1]:
            return quick
    place, exact = with_doubles(x.device), not x.is_floating_point() or x.dtype.itemsize == 1
    number = torch.float64 if exact or place == x.device else torch.float32
    room = torch.empty(min(x.numel(), _AT_ONCE), dtype=number, device=place if exact else x.device)
    norms = [torch.linalg.vector_norm(room[: part.numel()].view(part.shape).copy_(part)) for part in _parts(x)]
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _parts(x: Tensor) -> Iterator[Tensor]:
    if x.numel() <= _AT_ONCE:
        yield x
    else:
        rows = max(_AT_ONCE * x.shape[0] // x.numel(), 1)
        for part in x.split(rows):
            yield from _parts(part[0] if rows == 1 and x.ndim > 1 else part)


def differ(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether they are of other values, and not of the same ones with some roundings between them."""
    if one.size != other.size:
        return True
    high = max(one.norm, other.norm)
    if abs(one.norm - other.norm) > one.least * high:
        return True
    usual = high / max(one.size, 1) ** 0.5
    return any(
        abs(a - b) > one.least * max(abs(a), abs(b), usual) for a, b in zip(one.samples, other.samples, strict=True)
    )
