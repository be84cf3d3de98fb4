"""``python -m meshcomm``: the doctor."""

from __future__ import annotations

import sys

from meshcomm.helpers.doctor import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
