"""What every test shares: one thread per process, the skip of GPU tests, one pool of worker processes."""

from __future__ import annotations

import os

# Before torch is imported: ranks outnumber cores, and each process would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from meshcomm.runtime.workers import WorkerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator: torch.accelerator finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four gloo ranks in processes of their own, started by the first test that asks and kept to the end of the run."""
    with WorkerPool(4) as pool:
        yield pool
