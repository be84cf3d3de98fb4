"""A step of a training loop, operation by operation: what was differentiated, and which line has written what."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from meshcomm._torch import version_hint
from meshcomm.runtime.callsite import call_site
from meshcomm.verifying.blame.trail import Followed, Trail


class WatchedStep(Trail):
    """Notes every step, what ``backward`` and ``autograd.grad`` are called of, writes to what a module has, and what
    is put in its place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._hooks = ExitStack()
        self._owners = {id(part): name for name, part in module.named_modules()}
        self._held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._versions = {name: version_hint(x) for name, x in self._held.items()}
        self._ends: list[int | None] = []
        self.written: dict[str, list[str]] = {}
        for name, x in self._held.items():
            self.given(name, x, frozenset())

    def __enter__(self) -> WatchedStep:
        super().__enter__()
        for heard in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            self._hooks.callback(heard(self._put).remove)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.close()
        super().__exit__(*exc)

    def _put(self, owner: nn.Module, name: str, x: Tensor | None) -> None:
        """Another tensor stands where one of the module's has stood."""
        full = ".".join(filter(None, (self._owners.get(id(owner), "?"), name)))
        if x is None or self._held.get(full, x) is x:
            return
        self._held[full], self._versions[full] = x, version_hint(x)
        self._wrote(full)
        if self.maker_of(x) is None:
            self.given(full, x, frozenset())

    def _wrote(self, name: str) -> None:
        lines, line = self.written.setdefault(name, []), str(call_site())
        lines += [] if line in lines else [line]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad or (getattr(func, "__name__", "") == "backward" and args):
            of = args[0] if args else (kwargs or {}).get("outputs")
            ends = [of] if isinstance(of, Tensor) else of if isinstance(of, (list, tuple)) else []
            self._ends += [self.maker_of(x) for x in ends if isinstance(x, Tensor)]
        result = super().__torch_function__(func, types, args, kwargs)
        for name, x in self._held.items():
            version = version_hint(x)
            if version != self._versions[name] or (func == _SET_DATA and args[0] is x):
                self._versions[name] = version
                self._wrote(name)
        return result

    def followed(self, loss: Any) -> Followed:
        """All of it; the outputs are what was differentiated, and the loss."""
        ends = [*self._ends, self.maker_of(loss) if isinstance(loss, Tensor) else None]
        return Followed(self.finished(), ends, [], self.calls)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
