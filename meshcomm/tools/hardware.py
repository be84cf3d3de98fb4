"""``python -m meshcomm hardware FILE``: measure this machine, or, under a launcher, the machines of a launch.

    python -m meshcomm hardware machine.json
    torchrun --nnodes 2 --nproc-per-node 8 ... -m meshcomm hardware cluster.json

Then mc.hardware("cluster.json") is what mc.dry_run takes as hardware=.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from meshcomm.dry.hardware import hardware
from meshcomm.errors import MeshError
from meshcomm.runtime.start import world


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was measured, and write the file; 2 for what cannot be measured or written."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm hardware", description=__doc__)
    parser.add_argument("file", type=Path, help="where it is written, as JSON")
    file: Path = parser.parse_args(argv).file
    try:
        found = hardware()
        here = world.current()
        if here is None or here.rank == 0:
            found.save(file)
            sys.stdout.write(f"{found}\nmc.hardware({str(file)!r}) reads it\n")
            sys.stdout.flush()
    except (MeshError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
