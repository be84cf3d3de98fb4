"""Tracebacks of our errors end at the user's line.

The error itself keeps all its frames, for a debugger. What is left out is left out where it is shown: by Python at the
end of a program or a thread, by IPython, and by pytest. ``MESHCOMM_TRACEBACK=full`` leaves everything in.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from meshcomm.errors import OurError, made

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_TOLD = "(frames of meshcomm are left out; MESHCOMM_TRACEBACK=full shows them)\n"
_installed = False


def is_wanted() -> bool:
    """Whether frames are to be left out."""
    return os.environ.get("MESHCOMM_TRACEBACK", "") != "full"


def shorten() -> None:
    """Called where one of our errors is made: pytest leaves out frames of modules that say so."""
    if not is_wanted():
        return
    install()
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE):
            frame.f_globals["__tracebackhide__"] = True
        frame = frame.f_back


def install() -> None:
    """From now on our errors are shown so; before others put themselves in front, such as torch with its rank."""
    global _installed
    if _installed or not is_wanted():
        return
    _installed = True
    if sys.excepthook is sys.__excepthook__:  # else somebody else shows errors, in his own way
        sys.excepthook = _shown
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _shown_in_thread
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((OurError,), _shown_by_ipython)


def _shown(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    if _holds_ours(error) and is_wanted():
        sys.stderr.write(text(error))
    else:
        sys.__excepthook__(kind, error, frames)


def _shown_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and _holds_ours(args.exc_value) and is_wanted():
        name = args.thread.name if args.thread is not None else threading.get_ident()
        sys.stderr.write(f"Exception in thread {name}:\n{text(args.exc_value)}")
    else:
        threading.__excepthook__(args)


def _shown_by_ipython(
    shell: Any, kind: Any, error: BaseException, frames: TracebackType, tb_offset: Any = None
) -> None:
    """A traceback of fewer frames, coloured as all others are."""
    kept: TracebackType | None = None
    listed = []
    at: TracebackType | None = frames
    while at is not None:
        listed.append(at)
        at = at.tb_next
    files = [each.tb_frame.f_code.co_filename for each in listed]
    for index in reversed(users(files)):
        each = listed[index]
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    shell.showtraceback((kind, error.with_traceback(kept or frames), kept or frames), tb_offset=tb_offset)
    error.with_traceback(frames)


def _holds_ours(error: BaseException) -> bool:
    """Whether it is one of our errors, or a group of errors, such as of asyncio's tasks, with one of ours in it."""
    inside = getattr(error, "exceptions", ())
    return isinstance(error, OurError) or (isinstance(inside, tuple) and any(map(_holds_ours, inside)))


def text(error: BaseException) -> str:
    """What Python would print, of our errors without our frames in it and in those that led to it."""
    shown = traceback.TracebackException.from_exception(error)
    if not _holds_ours(error) or not is_wanted():
        return "".join(shown.format())
    left_out, todo, seen = False, [shown], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kept = users([frame.filename for frame in each.stack])
        if kept and len(kept) < len(each.stack):
            each.stack[:] = [each.stack[at] for at in kept]
            left_out = True
        todo += [
            inner for inner in (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())) if inner
        ]
    return "".join(shown.format()) + (_TOLD if left_out else "")


def users(files: list[str]) -> list[int]:
    """Which of these frames are shown: not ours, and none of torch's behind the last one that is neither's."""
    last = max((at for at, file in enumerate(files) if not file.startswith(_HERE) and _TORCH not in file), default=-1)
    return [at for at, file in enumerate(files[: last + 1]) if not file.startswith(_HERE)]


made.append(shorten)
