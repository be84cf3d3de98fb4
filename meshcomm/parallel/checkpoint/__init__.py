"""Checkpoints that move between meshes, and between this library and torch's own parallelisms: save, load, latest."""

from meshcomm.parallel.checkpoint.whole import Checkpoint, latest, load, save

__all__ = ["Checkpoint", "latest", "load", "save"]
