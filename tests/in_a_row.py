"""Programs one after the other, each as ``__main__`` with its own output: what torchrun starts where one start is to do for all.

    torchrun ... tests/in_a_row.py FOLDER '[["a name", ["program.py", "--flag"]], ...]'

What all ranks write goes to FOLDER/NAME.out and .err, and how each rank has ended to FOLDER/NAME.RANK.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import meshcomm as mc


def code_of(argv: list[str]) -> int:
    """What a program of this name and these flags ends with."""
    sys.argv[:] = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path, programs: list[tuple[str, list[str]]]) -> None:
    for name, argv in programs:
        for number, kind in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{name}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
        code = code_of(argv)
        sys.stdout.flush()
        mc.shutdown()
        (folder / f"{name}.{os.environ['RANK']}").write_text(str(code))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
