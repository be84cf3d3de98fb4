"""What a rank has seen of a training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.verifying.blame.trail import Followed
from meshcomm.verifying.training.draws import Drawn

WHERE = "verify_training"
START = -1
"""The step that stands for what was made."""


class Part(NamedTuple):
    """What one rank has of a global tensor: copies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], Tensor], ...]
    """Where each begins in the global tensor, and what is there."""


Parts = dict[str, Part | None]
"""By name; None: a parameter that has no gradient."""


class Update(NamedTuple):
    """One call of ``optimizer.step()``."""

    line: str
    gradients: Parts


class Sent(NamedTuple):
    """A collective of a step."""

    primitive: str
    axis: Any
    payload: int
    line: str
    backward: bool


@dataclass
class Moment:
    """What one rank has after one step."""

    loss: Tensor | None = None
    updates: list[Update] = field(default_factory=list)
    parameters: Parts = field(default_factory=dict)
    states: Parts = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    followed: Followed | None = None
    """Where it was asked for: all that happened, and which of it was differentiated or given as the loss."""
    written: dict[str, list[str]] = field(default_factory=dict)
    """Then too: the lines that have written each parameter or buffer, by name."""


@dataclass
class Seen:
    """What one rank has seen."""

    place: dict[str, int]
    moments: dict[int, Moment] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Parameters that require grad and that the optimiser has."""
    made_at: str = ""
    """The line at which ``make`` begins; nothing where it is no Python function."""
    steps_at: str = ""
    """And that of the step."""
    loads_at: str = ""
    """And that of what loads a checkpoint, where it is the user's."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of parameters that have another one too, and that one."""
    drew: bool = False
    """Whether a step has taken random numbers of the rank's own."""
