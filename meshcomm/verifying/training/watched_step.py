"""A step of a training loop, operation by operation: what was differentiated, and which line has written what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshcomm._torch import version_hint
from meshcomm.runtime.callsite import call_site
from meshcomm.verifying.blame.trail import Followed, Trail


class WatchedStep(Trail):
    """Notes every step, what ``backward`` and ``autograd.grad`` are called of, and writes to what a module has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._versions = {name: version_hint(x) for name, x in self._held.items()}
        self._ends: list[int | None] = []
        self.written: dict[str, list[str]] = {}
        for name, x in self._held.items():
            self.given(name, x, frozenset())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad or (getattr(func, "__name__", "") == "backward" and args):
            of = args[0] if args else (kwargs or {}).get("outputs")
            ends = [of] if isinstance(of, Tensor) else of if isinstance(of, (list, tuple)) else []
            self._ends += [self.maker_of(x) for x in ends if isinstance(x, Tensor)]
        result = super().__torch_function__(func, types, args, kwargs)
        for name, x in self._held.items():
            if (version := version_hint(x)) != self._versions[name]:
                self._versions[name] = version
                lines = self.written.setdefault(name, [])
                line = str(call_site())
                lines += [] if line in lines else [line]
        return result

    def followed(self, loss: Any) -> Followed:
        """All of it; the outputs are what was differentiated, and the loss."""
        ends = [*self._ends, self.maker_of(loss) if isinstance(loss, Tensor) else None]
        return Followed(self.finished(), ends, [], self.calls)
