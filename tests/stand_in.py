"""An accelerator that is not there: a module such as torch.cuda and the streams of torch.accelerator, in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshcomm.runtime.process import accelerator


class Tracker:
    """What waits until the device is used first, as torch.cuda has it."""

    def __init__(self) -> None:
        self.manual_seed_all_cb: Any = None
        self.manual_seed_cb: Any = None
        self.call_order: list[Any] = []


class Module:
    """Begins at its first use, with a generator of its own."""

    def __init__(self) -> None:
        self.begun = False
        self.generator = torch.Generator()
        self._lazy_seed_tracker = Tracker()

    def is_initialized(self) -> bool:
        return self.begun

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            for call, _ in filter(None, self._lazy_seed_tracker.call_order):
                call()

    def manual_seed(self, seed: int) -> None:
        if self.begun:
            self.generator.manual_seed(seed)
            return
        tracker = self._lazy_seed_tracker
        tracker.manual_seed_cb = (lambda: self.generator.manual_seed(seed), [])
        tracker.call_order = [tracker.manual_seed_all_cb, tracker.manual_seed_cb]

    def manual_seed_all(self, seed: int) -> None:
        if self.begun:
            self.generator.manual_seed(seed)
            return
        tracker = self._lazy_seed_tracker
        tracker.manual_seed_all_cb = (lambda: self.generator.manual_seed(seed), [])
        tracker.call_order = [tracker.manual_seed_cb, tracker.manual_seed_all_cb]

    def get_rng_state(self) -> torch.Tensor:
        self.begin()
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.begin()
        self.generator.set_state(state)

    def draw(self) -> float:
        """Use it."""
        self.begin()
        return torch.rand(1, generator=self.generator).item()


class Stream:
    """Notes for which streams it waits."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)

    def record_event(self, event: Any = None) -> Any:
        return event


class _Here(threading.local):
    stream: Stream


def stand_in(patch: pytest.MonkeyPatch) -> tuple[Module, Callable[[], Stream], Callable[[Stream], None]]:
    """The accelerator of this process: its module, this thread's stream, and what changes that."""
    module, here, first = Module(), _Here(), Stream("default")

    def stream(device: object = None) -> Stream:
        return getattr(here, "stream", first)

    def use(other: Stream) -> None:
        here.stream = other

    patch.setattr(accelerator, "module", lambda: module)
    patch.setattr(torch.accelerator, "current_stream", stream)
    patch.setattr(torch.accelerator, "set_stream", use)
    return module, stream, use
