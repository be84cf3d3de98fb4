"""The loops of the libraries that are named, one after the other: under torchrun, ``-m tests.loops accelerate lightning``."""

from __future__ import annotations

import importlib
import json
import sys

import meshcomm as mc
from tests.loops.common import WAYS

mesh = mc.make_mesh({"dp": -1})
for library in sys.argv[1:]:
    loop = importlib.import_module(f"tests.loops.with_{library}")
    for way in WAYS:
        state = mc.parallel.full_state_dict(loop.trained(way, mesh), 0)
        if state is not None:
            weights = {name: x.flatten().tolist() for name, x in state.items()}
            print("WEIGHTS", json.dumps([library, way, weights]), flush=True)
mc.shutdown()
