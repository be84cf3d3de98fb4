"""Tracebacks of our errors end at the user's line; the error keeps all its frames; other errors are shown as ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime import tracebacks

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = "(frames of meshcomm are left out; MESHCOMM_TRACEBACK=full shows them)"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of this project show all frames (conftest.py); these are about leaving some out."""
    monkeypatch.delenv("MESHCOMM_TRACEBACK", raising=False)


def wrong() -> torch.Tensor:
    return mc.all_reduce(torch.ones(2), "tp", mesh=mc.make_mesh({"dp": 1}))


def in_backward() -> None:
    mesh = mc.make_mesh({"dp": 2})

    def main() -> None:
        x = torch.ones(2, requires_grad=True)
        y = mc.all_gather(x, "dp", mesh=mesh)
        if mesh.rank == 0:
            y.sum().backward()

    mc.launch(main, ranks=2)


def launched() -> None:
    mc.launch(wrong, ranks=1)


def varies() -> None:
    f = mc.shard_map(lambda x: x.sum(), mesh=mc.make_mesh({"dp": 2}), in_specs="(dp b)", out_specs="")
    f(torch.ones(4))


def chained() -> None:
    try:
        wrong()
    except mc.MeshError as error:
        raise mc.CommError("because of it") from error


def lines_of(text: str) -> list[tuple[str, str]]:
    """File and function of each frame."""
    frames = [line.split(", ") for line in text.splitlines() if line.startswith("  File ")]
    return [(parts[0][8:-1], parts[2][3:]) for parts in frames]


@pytest.mark.parametrize(
    ("program", "last"),
    [(wrong, "wrong"), (launched, "wrong"), (in_backward, "main"), (varies, "varies"), (chained, "chained")],
)
def test_the_last_frame_is_the_users(program: object, last: str) -> None:
    with pytest.raises((mc.MeshError, mc.CommError, mc.VaryingError)) as caught:
        program()  # type: ignore[operator]
    shown = tracebacks.text(caught.value)
    frames = lines_of(shown)
    assert not [file for file, _ in frames if file.startswith(str(ROOT / "meshcomm"))]
    assert frames[-1] == (__file__, last)
    assert shown.rstrip().endswith(LEFT_OUT)
    assert str(caught.value).splitlines()[0] in shown
    everything = [entry.path for entry in caught.traceback]
    assert program is chained or [path for path in everything if str(path).startswith(str(ROOT / "meshcomm"))]


def test_all_frames_are_there_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCOMM_TRACEBACK", "full")
    with pytest.raises(mc.MeshError) as caught:
        wrong()
    shown = tracebacks.text(caught.value)
    assert [file for file, _ in lines_of(shown) if file.startswith(str(ROOT / "meshcomm"))]
    assert LEFT_OUT not in shown


def test_other_errors_are_shown_as_ever() -> None:
    try:
        mc.launch(lambda: 1 / 0, ranks=1)
    except ZeroDivisionError as error:
        shown = tracebacks.text(error)
    assert [file for file, _ in lines_of(shown) if file.startswith(str(ROOT / "meshcomm"))]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of errors came with Python 3.11")
@pytest.mark.parametrize("deep", [1, 2])
def test_so_are_ours_in_a_group_of_errors(deep: int) -> None:
    with pytest.raises(mc.MeshError) as caught:
        wrong()
    error: BaseException = caught.value
    for _ in range(deep):
        error = ExceptionGroup("tasks", [error, ValueError("another")])  # noqa: F821
    shown = tracebacks.text(error)
    assert all(words in shown for words in ("no axis 'tp'", "another", LEFT_OUT))
    assert str(ROOT / "meshcomm") not in shown


def test_an_error_without_a_users_frame_keeps_its_own() -> None:
    assert tracebacks.text(mc.MeshError("alone")) == "meshcomm.errors.MeshError: alone\n"


def test_a_thread_says_it_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        wrong()
    except mc.MeshError as error:
        thread = threading.current_thread()
        tracebacks._shown_in_thread(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
    said = capsys.readouterr().err
    assert said.startswith(f"Exception in thread {thread.name}:\nTraceback")
    assert lines_of(said)[-1] == (__file__, "wrong")


PROGRAM = """
import torch
import meshcomm as mc

def main():
    mesh = mc.make_mesh({"dp": -1})
    mc.all_reduce(torch.ones(2), "tp", mesh=mesh)

main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["alone", "torchrun", "someone else's hook"])
def test_a_script_ends_so(launcher: str, tmp_path: Path) -> None:
    """Under torchrun the process group's hook writes the rank in front of each line; another hook is left alone."""
    script = tmp_path / "script.py"
    hook = "import sys\nsys.excepthook = lambda *error: print('mine', error[0].__name__, file=sys.stderr)\n"
    script.write_text((hook if launcher.startswith("someone") else "") + PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if launcher == "torchrun" else []
    done = subprocess.run([sys.executable, *run, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode
    if launcher.startswith("someone"):
        assert done.stderr == "mine MeshError\n"
        return
    mark = "[rank0]: " if launcher == "torchrun" else ""
    own = [line.removeprefix(mark) for line in done.stderr.splitlines() if line.startswith(mark)]
    frames = lines_of("\n".join(own))
    assert [frame for frame in frames if frame[0] == str(script)] == [(str(script), "<module>"), (str(script), "main")]
    assert not [file for file, _ in frames if file.startswith(str(ROOT / "meshcomm"))]
    assert f"{mark}{LEFT_OUT}" in done.stderr.splitlines()


@pytest.mark.thorough
def test_ipython_shows_it_so_too(tmp_path: Path) -> None:
    cells = PROGRAM.replace("\nmain()\n", "\n\nmain()\nmain()\nmc.launch(lambda: 1 / 0, ranks=1)\n")
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt", "--colors=NoColor"],
        input=cells, env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    first, second, other = done.stdout.split("Traceback (most recent call last)")[1:]
    for shown in (first, second):
        assert "in main()" in shown
        assert "MeshError: meshcomm.all_reduce: no axis 'tp'" in shown
        assert str(ROOT / "meshcomm") not in shown
    assert str(ROOT / "meshcomm") in other
