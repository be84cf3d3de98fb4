"""Whether a plan is right: the small copy is cut by it, and what it gives and its gradients are held against the whole.

whole     y, and dy/dp of every parameter, on this rank alone
cut       the same over the axis, in evaluation, in float64 if the copy has not too many parameters
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.axis import AxisName
from meshcomm.collectives.broadcast import take_from
from meshcomm.errors import MeshError
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.parallel.tensor.auto.example_inputs import Given
from meshcomm.parallel.tensor.auto.flow import tensors
from meshcomm.parallel.tensor.state import known_of
from meshcomm.runtime.transports.threads.scheduler import World, current_rank

_CLOSE = 1e-4
"""Layers compute some things in float32; what is wrong is off by more."""


def _adaptor() -> Any:
    """What is proved, and what asks for proofs: of the two one is asked for by name."""
    return importlib.import_module("meshcomm.parallel.tensor.module")


class Proof:
    """Tries plans."""

    def __init__(self, module: nn.Module, example: Given, axis: AxisName, mesh: Mesh) -> None:
        self.module, self.example, self.axis, self.mesh = module, example, axis, mesh
        self.size = mesh.size_of(axis)
        self.apart = mesh.in_process and current_rank() is None  # nobody else is there: ranks are started for it
        self.tried: dict[str, str] = {}
        if not self.apart:
            take_from(0, list(module.buffers()), mesh.axis(axis))
        with _same_draws():
            self.outputs, self.grads = _run(copy.deepcopy(module), example)
            self.written = _written(copy.deepcopy(module), example)

    def why_wrong(self, styles: Mapping[str, Any], divide: Mapping[str, int], sequence: bool = False) -> str:
        """Empty: it is right."""
        key = repr((styles, sorted(divide.items()), sequence))
        if key not in self.tried:
            self.tried[key] = self._why_wrong(styles, divide, sequence)
        return self.tried[key]

    def _why_wrong(self, styles: Mapping[str, Any], divide: Mapping[str, int], sequence: bool) -> str:
        if self.apart:
            with _same_draws():
                found = World(self.size, None).run(
                    lambda: self._try("auto", make_mesh({"auto": self.size}), styles, divide, sequence)
                )
        else:
            with _same_draws():
                here = self._try(self.axis, self.mesh, styles, divide, sequence)
            found = all_gather_object(here, self.axis, mesh=self.mesh)
        return next(filter(None, found), "")

    def _try(
        self, axis: AxisName, mesh: Mesh, styles: Mapping[str, Any], divide: Mapping[str, int], sequence: bool
    ) -> str:
        """On one rank. What fails does so for shapes, which are the same on all of them."""
        module = copy.deepcopy(self.module)
        try:
            _adaptor().tensor_parallel(module, styles, axis=axis, sequence=sequence, divide=divide, mesh=mesh)
            outputs, grads = _run(module, self.example)
            written = _written(module, self.example)
        except (MeshError, RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if [x.shape for x in written] != [x.shape for x in self.written] or not all(
            _close(x, y, 0.0) for x, y in zip(written, self.written, strict=True)
        ):
            return "its results are others with a cache"
        return self._apart(module, outputs, grads)

    def _apart(self, module: nn.Module, outputs: list[Tensor], grads: dict[str, Tensor]) -> str:
        """What differs from the whole."""
        if [x.shape for x in outputs] != [x.shape for x in self.outputs]:
            return "its results have other shapes"
        for x, y in zip(outputs, self.outputs, strict=True):
            if not _close(x, y, 0.0):
                return f"its results are off by {_off(x, y):.1e}"
        state = known_of(module)
        assert state is not None
        most = max((float(x.norm()) for x in self.grads.values()), default=0.0)
        for name, whole in self.grads.items():
            expected = state.part(name, whole) if name in state.cuts else whole
            if name not in grads or not _close(grads[name], expected, 1e-6 * most):
                return f"the gradient of {name} is wrong"
        return ""


def _close(x: Tensor, y: Tensor, floor: float) -> bool:
    return x.shape == y.shape and bool((x - y).norm() <= _CLOSE * y.norm() + floor)


def _off(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm().clamp_min(1e-30))


def floats_of(result: Any) -> list[Tensor]:
    """What a model gives."""
    return [x for x in tensors(result) if x.is_floating_point()]


def _run(module: nn.Module, example: Given) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and gradients of a sum of them with weights of their own."""
    with torch.enable_grad():
        outputs = floats_of(module(*example[0], **example[1]))
        draws = torch.Generator("cpu").manual_seed(5)
        loss = [
            (x * torch.randn(x.shape, generator=draws, dtype=torch.float64, device="cpu").to(x.device, x.dtype)).sum()
            for x in outputs if x.requires_grad
        ]  # fmt: skip
        sum(loss[1:], loss[0]).backward()
    zeros: Callable[[Tensor], Tensor] = torch.zeros_like
    grads = {name: zeros(p) if p.grad is None else p.grad for name, p in module.named_parameters() if p.requires_grad}
    return [x.detach() for x in outputs], grads


def _written(module: nn.Module, example: Given) -> list[Tensor]:
    """Of one that cannot keep a cache with gradients: the results without them, with the cache that it keeps then."""
    if "use_cache" not in example[1]:
        return []
    with torch.no_grad():
        return floats_of(module(*example[0], **{**example[1], "use_cache": True}))


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been run."""
    states = [torch.get_rng_state()]
    module = torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    if module is not None:
        states.append(module.get_rng_state())
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1])


def placed(example: Given, device: torch.device, dtype: torch.dtype) -> Given:
    """The same for a copy of that dtype."""

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(device, dtype) if x.is_floating_point() else x.to(device)
        if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
            return type(x)(moved(each) for each in x)
        return {key: moved(each) for key, each in x.items()} if type(x) is dict else x

    return tuple(moved(x) for x in example[0]), {name: moved(x) for name, x in example[1].items()}
