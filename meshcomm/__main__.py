"""``python -m meshcomm``: the doctor; ``explain DIR``: what the ranks' dumps say; ``prove DIR``: what traces do;
``verify module:function``: whether a program is what it is on one rank; ``hardware FILE``: how fast this machine is.
"""

from __future__ import annotations

import importlib
import sys

from meshcomm.tools import doctor, explain, prove

if __name__ == "__main__":
    wanted = sys.argv[1:]
    if wanted[:1] == ["verify"]:  # the others need no module of it
        sys.exit(importlib.import_module("meshcomm.tools.verify").main(wanted[1:]))
    if wanted[:1] == ["hardware"]:
        sys.exit(importlib.import_module("meshcomm.tools.hardware").main(wanted[1:]))
    asked = {"explain": explain.main, "prove": prove.main}.get(wanted[0]) if wanted else None
    sys.exit(doctor.main() if asked is None else asked(wanted[1:]))
