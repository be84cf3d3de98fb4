"""The kinds of layers that can be cut into columns or rows: which dim of their weight is that of the outputs, and which
that of the inputs.

    Linear      weight [out, in]       x @ weight.T + bias
    Conv1D      weight [in, out]       x @ weight + bias        GPT-2's, which is no convolution; known by its name
    Conv1d      weight [out, in, 1]    weight @ x + bias        torch's, of single places: x is [..., in, s]
    Embedding   weight [rows, out]     weight[ids]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm import _torch


class Kind(NamedTuple):
    """A kind of layer."""

    name: str
    outputs: int
    """The dim of the weight along which its outputs are; of a bias it is the only one."""
    inputs: int | None
    """The dim along which its inputs are."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    """What it does without its bias."""
    counts: tuple[str, ...] = ()
    """Its attributes that say how many outputs there are, and that its forward reads."""
    features: int = -1
    """The dim of what goes in and comes out along which the features are."""

    def dim_of(self, name: str) -> int:
        """The dim of the outputs of a parameter."""
        return self.outputs if name == "weight" else 0

    def along_features(self, bias: Tensor) -> Tensor:
        """A bias, to be added to what comes out."""
        return bias if self.features == -1 else bias.view(-1, *(1,) * (-1 - self.features))


_LINEAR = Kind("Linear", 0, 1, F.linear)
_CONV1D = Kind("Conv1D", 1, 0, torch.matmul, ("nf",))
_CONVOLUTION = Kind("Conv1d of kernel 1", 0, 1, F.conv1d, features=-2)
_EMBEDDING = Kind("Embedding", 1, None, lambda ids, weight: F.embedding(ids, weight))


def kind_of(module: nn.Module) -> Kind | None:
    """What kind of layer it is, also one with a forward of its own."""
    if isinstance(module, nn.Linear):
        return _LINEAR
    if isinstance(module, nn.Embedding):
        return _EMBEDDING
    if isinstance(module, nn.Conv1d):
        same = module.stride == (1,) and module.padding in ((0,), "valid", "same") and module.groups == 1
        return (
            _CONVOLUTION
            if same and module.kernel_size == (1,) and _torch.kind_of(module.weight) is nn.Parameter
            else None
        )
    return None if _conv1d(module) is None else _CONV1D


def is_as_known(module: nn.Module) -> bool:
    """Whether it has the forward of its kind, and none of its own."""
    known = next((kind for kind in (nn.Linear, nn.Embedding, nn.Conv1d) if isinstance(module, kind)), None)
    return type(module).forward is getattr(known or _conv1d(module), "forward", None)


@torch.no_grad()
def does_as_known(module: nn.Module, kind: Kind, *, rows: bool) -> bool:
    """Whether it has the forward of its kind, or one of its own that does the same: it is asked on a few numbers.

    ``rows``: whether it is enough that each result follows from one row of the table.
    """
    if is_as_known(module):
        return True
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not weight.numel():
        return False
    if weight.is_meta:
        with _with_numbers(module):
            return does_as_known(module, kind, rows=rows)
    own: Callable[..., object] = module.forward
    try:
        if rows:
            ids = torch.arange(6, device=weight.device).view(2, 3) % weight.shape[0]
            alone = [own(each.view(1, 1)) for each in ids.flatten()]
            found = own(ids)
            expected = torch.cat([x.view(1, -1) for x in alone if isinstance(x, Tensor)])
            return isinstance(found, Tensor) and found.shape[:-1] == ids.shape and _close(found.flatten(0, 1), expected)
        x = torch.linspace(-1, 1, 2 * weight.shape[kind.inputs or 0], device=weight.device).sin().to(weight.dtype)
        x = x.view(1, 2, -1).transpose(-1, kind.features)
        bias = getattr(module, "bias", None)
        y = kind.multiply(x, weight)
        found = own(x)
        return (
            isinstance(found, Tensor)
            and found.shape == y.shape
            and _close(found, y if bias is None else y + kind.along_features(bias))
        )
    except Exception:  # whatever it wants, it is not what its kind is given
        return False


@contextlib.contextmanager
def _with_numbers(module: nn.Module) -> Iterator[None]:
    """A layer on the meta device with numbers in its parameters and buffers, of which neighbours share their memory: of
    a large table no more is there than a row and a column."""

    def numbers(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype, device="cpu")
        places = torch.arange(1 + sum(size - 1 for size in x.shape), device="cpu", dtype=torch.float64)
        return (0.5 + places.mul(7.7).sin() / 4).to(x.dtype).as_strided(x.shape, (1,) * x.ndim)

    own = vars(module)
    before = {name: own[name] for name in ("_parameters", "_buffers")}
    try:
        for name, table in before.items():
            own[name] = {key: numbers(x) if isinstance(x, Tensor) and x.is_meta else x for key, x in table.items()}
        yield
    finally:
        own.update(before)


@torch.no_grad()
def mixes_features(module: nn.Module, length: int, parts: int) -> bool:
    """Whether it has one number for each of so many features, and computes a part of them from others too, as a norm
    does: it is asked on a few numbers. What wants other inputs is not known to."""
    own = vars(module)
    table: dict[str, Tensor | None] = own["_parameters"]
    given = [p for p in table.values() if p is not None]
    if parts == 1 or own["_buffers"] or own["_modules"] or not given or any(p.shape != (length,) for p in given):
        return False
    device = torch.device("cpu") if given[0].is_meta else given[0].device
    x = torch.linspace(-1, 1, 2 * length, device=device).sin().to(given[0].dtype).view(1, 2, length)
    here = length // parts
    other = torch.cat([2 * x[..., :here], x[..., here:]], -1)
    own["_parameters"] = {name: p if p is None else torch.ones(length, dtype=p.dtype, device=device)
                          for name, p in table.items()}  # fmt: skip
    try:
        before, after = (module.forward(each) for each in (x, other))
    except Exception:  # whatever it wants, it is not one input
        return False
    finally:
        own["_parameters"] = table
    known = isinstance(before, Tensor) and before.shape == x.shape
    return known and not _close(before[..., here:], after[..., here:])


def _close(x: Tensor, y: Tensor) -> bool:
    most = 1e-10 if x.dtype == torch.float64 else 1e-4 if x.dtype == torch.float32 else 3e-2
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=most, atol=most * float(y.abs().amax()))


def _conv1d(module: nn.Module) -> type | None:
    """The class of that name, if it looks like it: others have the name too."""
    weight = getattr(module, "weight", None)
    outputs = getattr(module, "nf", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] != outputs:
        return None
    return next((kind for kind in type(module).__mro__ if kind.__name__ == "Conv1D"), None)
