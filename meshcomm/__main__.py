"""``python -m meshcomm``: the doctor; ``python -m meshcomm explain DIR``: what the dumps of the ranks say."""

from __future__ import annotations

import sys

from meshcomm.tools import doctor, explain

if __name__ == "__main__":
    wanted = sys.argv[1:]
    sys.exit(explain.main(wanted[1:]) if wanted[:1] == ["explain"] else doctor.main())
