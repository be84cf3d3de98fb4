"""``python -m meshcomm prove DIR``: whether the run whose ranks have saved their traces there can hang.

Merges the traces of all ranks (``t.save("DIR/rank0.json")``), and judges them as mc.prove_no_hang does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from meshcomm.errors import MeshError
from meshcomm.tracing.traces import Trace
from meshcomm.verifying.hangs.prove import prove_no_hang


def main(argv: Sequence[str] | None = None) -> int:
    """Print the proof: 0 where nothing hangs, 1 where something does or may, 2 without traces of all ranks."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm prove", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the ranks' traces are: each file that ends in .json")
    folder: Path = parser.parse_args(argv).folder
    files = sorted(folder.glob("*.json"))
    if not files:
        sys.stderr.write(f"no traces in {folder}\n")
        return 2
    try:
        proof = prove_no_hang(Trace.merge(files))
    except (MeshError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{proof}\n")
    sys.stdout.flush()
    return 0 if proof.ok else 1
