"""Assertions for tests: a program, or a training loop, is what it is on one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshcomm.verifying.report import Report
from meshcomm.verifying.training.runs import Make


def assert_parallel_equal(
    fn: Callable[..., Any], *inputs: Any, in_specs: Any, out_specs: Any, meshes: Any = None, **how: Any
) -> Report:
    """AssertionError unless ``fn`` on the ranks of each mesh gives, with all derivatives, what it gives on one device.

    Args:
        fn: a function of one rank's parts.
        inputs: global values.
        in_specs: how they lie on the mesh.
        out_specs: how what it gives does.
        meshes: as of :func:`meshcomm.verify`, and so is all of ``how``.

    Returns: the report, whose notes say what was skipped.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.testing import assert_parallel_equal
        >>> def norm(x):
        ...     return mc.all_reduce((x * x).sum(), "dp")
        >>> assert_parallel_equal(norm, torch.randn(6, 2), in_specs="(dp b) d", out_specs="", meshes={"dp": 2}).ok
        True
    """
    proofs: Any = importlib.import_module("meshcomm.verifying.verify")  # what the other one needs stays out
    found: Report = proofs.verify(fn, *inputs, in_specs=in_specs, out_specs=out_specs, meshes=meshes, **how)
    return found.check()


def assert_training_equal(
    make: Make,
    batches: Sequence[Any],
    steps: int = 3,
    meshes: Sequence[Mapping[str, int]] | Mapping[str, int] | None = None,
    **how: Any,
) -> Report:
    """AssertionError unless the training loop on each mesh is that of one rank: :func:`meshcomm.verify_training`."""
    proofs: Any = importlib.import_module("meshcomm.verifying.training.verify")
    found: Report = proofs.verify_training(make, batches, steps, meshes, **how)
    return found.check()
