"""What the library knows of a thread: one object for all of it, for each takes time where a thread begins and where it
ends, and the ranks of one process are threads.
"""

from __future__ import annotations

import threading
from typing import Any


class InThread(threading.local):
    """A thread's own. Who gives one of these its meaning has it under a name of its own, with its types."""

    rank: Any = None
    """``local.rank`` of ``runtime/transports/threads/scheduler.py``."""
    call: Any = None
    """This one and the next five: ``told`` of ``runtime/call.py``."""
    later = False
    waits = False
    node: Any = None
    begun: Any = None
    takes = False

    def __init__(self) -> None:  # torch 2.11 compiles the attributes of the class in the place of a thread's own
        self.watcher: Any = None
        """This one and the next two: ``here`` of ``watch.py``."""
        self.draws_along: Any = None
        self.draws_over: Any = None
        self.mesh: Any = None
        """This one and all that follow: ``of_thread`` of ``runtime/transports/threads/eras.py``."""
        self.within = -1
        self.first = ""
        self.several = False
        self.body: Any = None
        self.eras: Any = None


in_thread = InThread()
