"""The server that forks the ranks of pools, with what their programs need: imported once, and not by each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

from meshcomm.runtime.start import workers

__all__ = ["serve"]


def serve(modules: Sequence[str]) -> None:
    """Start it; who wants what the first step of an optimizer imports names ``warm`` last, and after it
    ``warm_compiler`` who compiles.
    """
    context = workers._context()
    if not isinstance(context, ForkServerContext):
        return
    context.set_forkserver_preload(["torch", "torch.distributed", "meshcomm.runtime.start.worker", *modules])
    path = os.pathsep.join(sys.path)  # the server itself does not look at the path it is given
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
