"""Checkpoints that move between meshes, and between this library and torch's own parallelisms: save, load, latest."""

from meshcomm.parallel.checkpoint.in_background import Saving
from meshcomm.parallel.checkpoint.whole import Checkpoint, async_save, latest, load, save

__all__ = ["Checkpoint", "Saving", "async_save", "latest", "load", "save"]
