"""A device called "toy" in Python: its tensors lie on the CPU behind a wrapper, and a backend of its own moves them.

For tests of accelerators that are not CUDA. What it registers stays, so it belongs into a process of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
calls: list[str] = []
"""What the backend was asked for."""
dtypes_refused: set[torch.dtype] = set()
"""What the device has not."""


class Toy(Tensor):
    """Wraps a tensor of the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # results on the CPU are plain tensors

    # Views without a derivative are made anew in C++, where nobody knows what is wrapped.

    def detach(self) -> Toy:
        return wrap(self.raw.detach())

    def view(self, *shape: Any) -> Toy:
        return wrap(self.raw.view(*shape) if isinstance(shape[0], torch.dtype) else self.raw.reshape(*shape))


def wrap(raw: Tensor) -> Toy:
    res = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
    res.__class__ = Toy
    res.raw = raw
    return res


def raw_of(x: Any) -> Any:
    return x.raw if isinstance(x, Toy) else x


def on_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operation of the device: the CPU's, on what is wrapped."""
    if op is aten._copy_from.default:
        raw_of(args[1]).copy_(raw_of(args[0]))
        return args[1]
    wrappers = {id(x.raw): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Toy)}
    args, kwargs = pytree.tree_map(raw_of, (args, kwargs))
    to_cpu = False
    if kwargs.get("device") is not None:
        to_cpu = torch.device(kwargs["device"]).type == "cpu"
        kwargs["device"] = "cpu"
    if op is aten.view.default:
        op = torch.reshape  # the wrapper does not know the strides
    out = getattr(op, "overloadpacket", op)(*args, **kwargs)  # numbers among tensors come as numbers

    def dressed(y: Any) -> Any:
        if not isinstance(y, Tensor) or to_cpu:
            return y
        if y.dtype in dtypes_refused:
            raise TypeError(f"a toy tensor has no {y.dtype}")
        return wrappers[id(y)] if id(y) in wrappers else wrap(y)

    return pytree.tree_map(dressed, out)


class ToyCCL(dist.ProcessGroup):
    """Moves tensors of the device, and of the CPU, by gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "toyccl"

    def _do(self, name: str, *args: Any) -> Any:
        toys = [x for x in pytree.tree_leaves(args) if isinstance(x, Toy)]
        calls.append(f"{name} {'toy' if toys else 'cpu'}")
        return getattr(self.gloo, name)(*pytree.tree_map(raw_of, args))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("broadcast", tensors, opts or dist.BroadcastOptions())

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("reduce", tensors, opts or dist.ReduceOptions())

    def _allgather_base(self, out: Any, x: Any, opts: Any = None) -> Any:
        return self._do("_allgather_base", out, x)

    def _reduce_scatter_base(self, out: Any, x: Any, opts: Any = None) -> Any:
        return self._do("_reduce_scatter_base", out, x, opts or dist.ReduceScatterOptions())

    def alltoall_base(self, out: Any, x: Any, recv: Any, send: Any, opts: Any = None) -> Any:
        return self._do("alltoall_base", out, x, recv, send)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._do("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._do("recv", tensors, src, tag)


_kept: list[Any] = []


def register(backend: bool) -> None:
    """Make the device, and its backend if asked for, known to torch."""
    setup = torch.utils.backend_registration._setup_privateuseone_for_python_backend
    setup("toy")
    module: Any = torch.get_device_module("toy")
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    library = torch.library.Library("_", "IMPL")
    library.fallback(on_the_cpu, "PrivateUse1")
    _kept.append(library)
    if backend:
        dist.Backend.register_backend("toyccl", ToyCCL, devices=["toy"])
