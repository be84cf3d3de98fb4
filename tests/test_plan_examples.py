"""What auto_plan gives a model to look at it, where nobody says what; and models that keep what they computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import auto_plan

D, V = 16, 24


class Tokens(nn.Module):
    """Its norm is made before its table, whose rows are what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(D), nn.Embedding(V, D)
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(self.tokens(input_ids))).relu())
        return y


class Adapted(nn.Module):
    """Passes on what it is given, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Tokens()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class Frames(nn.Module):
    """Spectra with the frames first, or, with ``input_values``, those of an audio transformer."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.first, self.up, self.down = nn.Conv1d(6, D, 3), nn.Linear(D, 32), nn.Linear(32, D)

    def read(self, frames: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.first(frames.transpose(1, 2)).transpose(1, 2)).relu())
        return y


class Heard(Frames):
    def forward(self, input_features: Tensor) -> Tensor:
        return self.read(input_features)


class Seen(Frames):
    def forward(self, input_values: Tensor) -> Tensor:
        return self.read(input_values)


class Keeps(nn.Module):
    """Has its last state as an attribute, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.state = nn.Linear(D, 32), nn.Linear(32, D), None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.down(self.up(x).relu())
        y: Tensor = self.state * 2
        return y


def test_what_is_given() -> None:
    mesh = mc.make_mesh({"tp": 2})
    models: list[tuple[nn.Module, str]] = [
        (Adapted(), "base_model."),
        (Heard(input_feat_per_channel=6, max_source_positions=8), ""),
        (Seen(max_length=12, num_mel_bins=6), ""),
        (Keeps(), ""),
    ]
    for model, path in models:
        plan = auto_plan(model, "tp", mesh=mesh)
        assert (plan[f"{path}up"], plan[f"{path}down"]) == ("column", "row"), (type(model).__name__, plan)
    assert models[-1][0].state is None


def test_a_model_that_has_run() -> None:
    """What it keeps of its last call, with the graph of it, cannot be copied, and stays."""
    model = Keeps()
    model(torch.ones(2, D))
    before = model.state
    assert auto_plan(model, "tp", mesh=mc.make_mesh({"tp": 2}))["up"] == "column"
    assert model.state is before
