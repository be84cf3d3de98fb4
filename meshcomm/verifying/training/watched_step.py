"""A step of a training loop, operation by operation: what was differentiated, and which line has written what."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshcomm._torch import version_hint
from meshcomm.runtime.callsite import call_site
from meshcomm.verifying.blame.trail import Followed, Trail


class WatchedStep(Trail):
    """Notes every step of this thread, what ``backward()`` is called of, and writes to what a module has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._versions = {name: version_hint(x) for name, x in self._held.items()}
        self._ends: list[int | None] = []
        self.written: dict[str, list[str]] = {}
        for name, x in self._held.items():
            self.given(name, x, frozenset())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "backward" and args and isinstance(args[0], Tensor):
            self._ends.append(self.maker_of(args[0]))
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
