"""Ranks that are killed, stopped, raise or go home, in real processes: every other one ends with an error that names the one,
nobody is left behind, nothing ends with SIGABRT, and training goes on from the last checkpoint to the same bits.

Most ranks here are forks of one interpreter (fault_programs.py) that runs the selected cases, three at a time, once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_programs
import pytest

import meshcomm as mc
from meshcomm.runtime.health import peers
from meshcomm.runtime.process import table

PROGRAMS = Path(__file__).with_name("fault_programs.py")
GLOO = {"MESHCOMM_SHARED_MEMORY": "0"}
GUARD = {"MESHCOMM_GUARD": "1"}
TRANSPORTS = {"shared": {}, "gloo": GLOO, "shared guarded": GUARD, "gloo guarded": {**GLOO, **GUARD}}
FOREVER, AT_ONCE = 60, 30
"""Seconds of a time-out that never comes, and within which an error has not waited for it: machines of tests are slow."""

Case = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------ the cases

WHAT: dict[str, tuple[str, dict[str, Any]]] = {
    "before": ("collective", {"moment": "before"}),
    "before later": ("collective", {"moment": "before", "form": "later"}),
    "in": ("collective", {"moment": "in", "length": 400_000}),
    "in later": ("collective", {"moment": "in", "form": "later"}),
    "after": ("collective", {"moment": "after"}),
    "before backward": ("backward", {"moment": "before"}),
    "in backward": ("backward", {"moment": "in"}),
    "recv": ("anything", {"name": "recv"}),
    "barrier": ("anything", {"name": "barrier"}),
    "object": ("anything", {"name": "object"}),
    "loop": ("loop", {}),
}

LOST: list[tuple[str, str, str, int]] = [
    ("shared", "SIGKILL", "before", 2),
    ("shared", "SIGKILL", "before", 0),
    ("shared", "SIGKILL", "in later", 2),
    ("shared", "SIGKILL", "after", 2),
    ("shared", "SIGKILL", "in backward", 1),
    ("shared", "SIGKILL", "recv", 1),
    ("shared", "raise", "before later", 2),
    ("shared", "raise", "in backward", 1),
    ("shared", "return", "before", 2),
    ("shared", "return", "object", 1),
    ("shared", "exit", "before", 1),
    ("gloo", "SIGKILL", "before later", 2),
    ("gloo", "SIGKILL", "before", 0),
    ("gloo", "SIGKILL", "in", 2),
    ("gloo", "SIGKILL", "after", 1),
    ("gloo", "SIGKILL", "before backward", 2),
    ("gloo", "raise", "before", 2),
    ("gloo", "raise", "in backward", 1),
    ("gloo", "return", "before later", 2),
    ("gloo", "return", "barrier", 1),
    ("shared guarded", "SIGKILL", "before later", 2),
    ("shared guarded", "raise", "in backward", 1),
    ("shared guarded", "return", "before", 2),
    ("gloo guarded", "SIGKILL", "in backward", 2),
    ("gloo guarded", "SIGKILL", "before", 0),
    ("gloo guarded", "raise", "before", 1),
    ("gloo guarded", "return", "before later", 2),
]
"""The transport, the fault, when, and which of three ranks: the others are told at once."""
BRIEFLY = [
    ("shared", "SIGKILL", "in backward", 1),
    ("shared guarded", "return", "before", 2),
]
"""What `make test` has of them."""


def lost_name(transport: str, fault: str, moment: str, victim: int) -> str:
    return f"{transport}, {fault} {moment}, rank {victim}"


CASES: dict[str, Case] = {}


def add(name: str, program: str, args: dict[str, Any] | None = None, **more: Any) -> str:
    CASES[name] = {"name": name, "program": program, "args": args or {}, "timeout": FOREVER, "limit": 100, **more}
    return name


for transport, fault, moment, victim in LOST:
    program, args = WHAT[moment]
    add(
        lost_name(transport, fault, moment, victim),
        program,
        args,
        fault=fault,
        victim=victim,
        env=TRANSPORTS[transport],
    )
for transport, env in TRANSPORTS.items():
    if "guarded" not in transport:
        add(f"{transport}, never", "collective", {"form": "never"}, fault="SIGKILL", victim=2, env=env)
        add(f"{transport}, loop SIGKILL", "loop", {}, victim=1, signals=[[1, "SIGKILL", 0.2]], env=env)
        add(
            f"{transport}, stopped for a while", "loop", {"seconds": 2}, victim=1, env=env,
            signals=[[1, "SIGSTOP", 0.2], [1, "SIGCONT", 1.7]],
        )  # fmt: skip
    add(
        f"{transport}, stopped",
        "loop",
        {},
        victim=1,
        timeout=4,
        env=env,
        signals=[[1, "SIGSTOP", 0.2], [1, "SIGCONT", 14]],
    )
PATIENCE = 15
add(
    "gloo guarded, the store stopped", "collective", {"moment": "before"}, fault="SIGSTOP", victim=0, timeout=PATIENCE,
    env=TRANSPORTS["gloo guarded"], continue_last=True,
)  # fmt: skip
for transport, env in TRANSPORTS.items():
    add(f"{transport}, late", "latecomer", fault="raise", victim=2, env=env)
add("one too few", "begin", absent=[2], timeout=3)
add("none to meet", "begin", absent=[0], timeout=3)
add("port", "begin", timeout=3)
add("killed while meeting", "begin", {"moment": "ready"}, fault="SIGKILL", victim=2)
add("stopped while meeting", "begin", {"moment": "group"}, fault="SIGSTOP", victim=0, timeout=2, continue_after=20)

TRAINED = {
    "fsdp, shared, SIGKILL backward": ("fsdp", {}, "SIGKILL", "backward", 1),
    "fsdp, gloo, SIGKILL rename": ("fsdp", GLOO, "SIGKILL", "rename", 0),
    "fsdp, shared, none full": ("fsdp", {}, "none", "full", 1),
    "ddp, shared, SIGKILL fsync": ("ddp", {}, "SIGKILL", "fsync", 1),
    "ddp, gloo, raise backward": ("ddp", GLOO, "raise", "backward", 1),
}
for how in ("fsdp", "ddp"):
    add(f"{how}, whole", "train", {"how": how, "folder": how}, ranks=2)
for name, (how, env, fault, moment, victim) in TRAINED.items():
    args = {"how": how, "moment": moment, "folder": name}
    add(name, "train", args, ranks=2, fault=fault, victim=victim, env=env)
    if fault != "none":
        add(f"{name}, resumed", "train", args, ranks=2, resumes=True, env=env, after=name)

# -------------------------------------------------------------------------------------------------------------- running

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """What came of the cases that the selected tests ask for."""
    wanted: set[str] = set()
    for item in request.session.items:
        if "name" in getattr(getattr(item, "callspec", None), "params", {}) and item.path == Path(__file__):
            name = item.callspec.params["name"]  # type: ignore[attr-defined]
            wanted |= {each for each in (name, f"{name}, resumed", f"{name.split(',')[0]}, whole") if each in CASES}
    folder = tmp_path_factory.mktemp("faults")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = [{**case, "base": str(folder)} for name, case in CASES.items() if name in wanted]
        for case in cases:
            if case["name"] == "port":
                case["port"] = taken.getsockname()[1]
        yield drive(cases, folder)


def drive(cases: list[Case], folder: Path) -> dict[str, Outcome]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS)], input=json.dumps(cases) + "\n", env=environ, cwd=folder, capture_output=True,
        text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {outcome["name"]: outcome for outcome in map(json.loads, done.stdout.splitlines())}


def ended_well(outcome: Outcome) -> None:
    """No rank hung, was left behind, or ended with SIGABRT."""
    assert outcome["hung"] == []
    assert not outcome["orphans"]
    assert not [code for code in outcome["codes"].values() if code in (-signal.SIGABRT, 128 + signal.SIGABRT)], outcome[
        "err"
    ]
    for text in outcome["err"].values():
        assert "terminate called" not in text
        assert "Fatal Python error" not in text


def others_told(outcome: Outcome, victim: int, words: str, within: float = AT_ONCE) -> None:
    """Every other rank has raised CommError that names the victim and says what to do, and has ended with exit code 1."""
    for rank in outcome["codes"]:
        if int(rank) != victim:
            assert outcome["codes"][rank] == 1
            error = outcome["errors"][rank]
            assert error["kind"] == "CommError"
            assert re.search(words, error["text"]), error["text"]
            assert "\n  fix: " in error["text"]
            assert error["after"] < within
            assert error["text"].splitlines()[0] in outcome["err"][rank]  # it is what the user sees


CODES = {"SIGKILL": -9, "raise": 1, "return": 0, "exit": 7}

# -------------------------------------------------------------------------------------------------- while communicating


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(lost_name(*each), marks=[] if each in BRIEFLY else pytest.mark.thorough) for each in LOST],
)
def test_a_rank_that_is_lost_is_named_at_once(outcomes: dict[str, Outcome], name: str) -> None:
    outcome, case = outcomes[name], CASES[name]
    victim, fault = case["victim"], case["fault"]
    ended_well(outcome)
    assert outcome["codes"][str(victim)] == CODES[fault]
    how = "has ended" if fault in ("SIGKILL", "exit") else "has left"
    others_told(outcome, victim, rf"(index {victim} {how}|rank {victim}\)? {how})")
    if fault == "raise":
        assert outcome["errors"][str(victim)] | {"after": 0, "at": 0, "seconds": 0} == {
            "kind": "ValueError", "text": f"boom on rank {victim}", "after": 0, "at": 0, "seconds": 0,
        }  # fmt: skip
        assert f"ValueError: boom on rank {victim}" in outcome["err"][str(victim)]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shared, raise before later, rank 2", "gloo, raise before, rank 2"])
def test_the_others_say_what_it_raised(outcomes: dict[str, Outcome], name: str) -> None:
    for rank in "01":
        assert "ValueError: boom on rank 2" in outcomes[name]["errors"][rank]["text"]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [f"{transport}, late" for transport in TRANSPORTS])
def test_who_ended_of_it_is_not_taken_for_the_cause(outcomes: dict[str, Outcome], name: str) -> None:
    ended_well(outcomes[name])
    others_told(outcomes[name], 2, r"(index 2|rank 2)\)? .*has left(?s:.*)ValueError: boom on rank 2")
    assert not re.search("(index|rank) 1 has (left|ended)", outcomes[name]["errors"]["0"]["text"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE)
    sign = f"{table.machine()}\t{child.pid}\t{table.began(child.pid)}"
    assert not peers.ended(sign)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert peers.ended(sign)
    child.wait()
    assert peers.ended(sign)


@pytest.mark.parametrize(
    "end", ["index 2 has ended (rank 2, process 7)", "a=2 (rank 2) has left the group: ValueError: no"]
)
@pytest.mark.parametrize(
    "unsaid", ["index 0 has left the group (rank 0, process 5)", "a=0 (rank 0) has left the group"]
)
def test_who_has_not_said_why_it_left_is_not_taken_for_the_cause_of_an_end_that_is_seen(end: str, unsaid: str) -> None:
    followed = f"{unsaid}: CommError: meshcomm.all_reduce: not all ranks will come."
    assert min([followed, unsaid, end], key=peers.distance) == end
    assert min([followed, unsaid], key=peers.distance) == unsaid


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shared, never", "gloo, never"])
def test_a_work_that_nobody_waits_for_does_not_hold_up_the_end(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    ended_well(outcome)
    for rank in "01":
        assert outcome["codes"][rank] in (0, 1)
        assert outcome["codes"][rank] == 0 or "neither sent nor received" in outcome["err"][rank]
        assert outcome["after"][rank] < AT_ONCE


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shared, loop SIGKILL", "gloo, loop SIGKILL"])
def test_a_rank_killed_at_any_moment(outcomes: dict[str, Outcome], name: str) -> None:
    ended_well(outcomes[name])
    others_told(outcomes[name], 1, r"(index|rank) 1 has ended")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shared, stopped for a while", "gloo, stopped for a while"])
def test_a_rank_stopped_within_the_time_out_changes_nothing(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    ended_well(outcome)
    assert set(outcome["codes"].values()) == {0}
    assert len({str(note["value"]) for note in outcome["value"].values()}) == 1  # as many rounds on each rank
    assert all(after > 1.5 for after in outcome["after"].values())  # it was


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [f"{transport}, stopped" for transport in TRANSPORTS])
def test_a_rank_stopped_past_the_time_out_is_named_then(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    ended_well(outcome)
    others_told(outcome, 1, r"rank 1\)?:? is stopped")
    assert all(outcome["errors"][rank]["after"] > 2 for rank in "02")
    # When it goes on it finds the others gone.
    assert outcome["codes"]["1"] == 1
    assert outcome["errors"]["1"]["kind"] == "CommError"


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gloo guarded, the store stopped"])
def test_a_store_that_is_stopped_is_waited_for_once(outcomes: dict[str, Outcome], name: str) -> None:
    """Those who end because of it do not wait for it once more."""
    outcome = outcomes[name]
    ended_well(outcome)
    others_told(outcome, 0, "the store of the process group does not answer(?s:.*)rank 0")
    for rank in "12":
        assert PATIENCE - 2 < outcome["errors"][rank]["after"] <= outcome["after"][rank] < 2 * PATIENCE


# --------------------------------------------------------------------------------------------------------- while meeting


MEETINGS = {
    "one too few": (2, r"(?s)only 2 of 3 ranks came within 3 s.*waits for rank 2.*as the world size says"),
    "none to meet": (0, "(?s)no answer from rank 0's store at 127.0.0.1.*start all ranks"),
    "port": (0, "(?s)no answer from rank 0's store.*another program has the port"),
    "killed while meeting": (2, "rank 2 (has )?ended"),
    "stopped while meeting": (
        0,
        "(rank 0 is stopped|no answer from rank 0|lost the other ranks|it serves the store|has ended)",
    ),
}
"""Who fails, and what the others say. The one that is stopped goes on when the time is up for all: whoever ends last may
see another one gone.
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MEETINGS)
def test_ranks_that_do_not_meet(outcomes: dict[str, Outcome], name: str) -> None:
    """A launcher that starts one too few, whichever; a port in use; a rank that fails in the middle of it."""
    victim, words = MEETINGS[name]
    ended_well(outcomes[name])
    others_told(outcomes[name], victim, words)
    if name == "port":
        first = outcomes[name]["errors"]["0"]
        assert first["kind"] == "CommError"
        assert re.search(r"(?s)rank 0 cannot serve port \d+.*another program has it.*MASTER_PORT", first["text"])


# -------------------------------------------------------------------------------------------------------- while training


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINED)
def test_training_resumes_from_the_last_checkpoint_to_the_same_bits(outcomes: dict[str, Outcome], name: str) -> None:
    how, _, fault, _, victim = TRAINED[name]
    failed, whole = outcomes[name], outcomes[f"{how}, whole"]
    resumed = failed if fault == "none" else outcomes[f"{name}, resumed"]
    for outcome in (failed, resumed, whole):
        ended_well(outcome)
    assert set(whole["codes"].values()) == set(resumed["codes"].values()) == {0}
    assert len(whole["value"]["0"]["value"]) == 146
    if fault == "none":  # the disk was full: all ranks are told so, and go on without this checkpoint
        assert len(failed["refused"]) == 2
        assert all("File too large" in note["text"] for note in failed["refused"].values())
    else:
        assert failed["codes"][str(victim)] == CODES[fault]
        others_told(failed, victim, rf"(index|rank) {victim} has (ended|left)")
        assert resumed["began"]["0"]["first"] == 1  # the checkpoint before, whole
    assert resumed["value"]["0"]["value"] == whole["value"]["0"]["value"]


# ------------------------------------------------------------------------------------------------------- under launchers


def nobody_is_left(folder: Path, ranks: int) -> None:
    """Of those that have noted their processes."""
    pids = [json.loads(path.read_text())["pid"] for path in folder.glob("ready.*")]
    assert len(pids) == ranks
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def torchrun(folder: Path, case: Case, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS.parent.parent)}
    with subprocess.Popen(
        [*command, str(PROGRAMS), json.dumps(case), str(folder)], env=environ, cwd=folder, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=280)
        finally:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    nobody_is_left(folder, 2)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.thorough
def test_torchrun_shows_the_rank_that_raised_as_the_cause(tmp_path: Path) -> None:
    case = {"program": "collective", "args": {"moment": "before"}, "fault": "raise", "victim": 1, "timeout": FOREVER}
    done = torchrun(tmp_path, case, "--max-restarts=0")
    assert done.returncode == 1
    tracebacks = re.findall(r"^\[rank(\d)\]: Traceback", done.stderr, re.MULTILINE)
    assert tracebacks[0] == "1", done.stderr
    assert "[rank1]: ValueError: boom on rank 1" in done.stderr
    cause = done.stderr.split("Root Cause (first observed failure):")[1]
    assert re.search(r"rank +: 1 ", cause), cause
    assert "ValueError: boom on rank 1" in cause
    told = json.loads((tmp_path / "error.0").read_text())
    assert re.search("index 1 has left the group.*ValueError: boom on rank 1", told["text"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fsdp, whole"])
def test_torchrun_restarts_the_ranks_and_training_resumes(
    outcomes: dict[str, Outcome], tmp_path: Path, name: str
) -> None:
    args = {"how": "fsdp", "moment": "backward"}
    case = {"program": "train", "args": args, "fault": "SIGKILL", "victim": 1, "timeout": FOREVER}
    done = torchrun(tmp_path, case, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "began.0").read_text())["first"] == 1
    assert json.loads((tmp_path / "value.0").read_text())["value"] == outcomes[name]["value"]["0"]["value"]


LAUNCHED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "raise in a training step": ("train", {"how": "ddp", "moment": "backward"}, "raise", "ValueError: boom on rank 1"),
    "SIGKILL in a backward pass": ("backward", {"moment": "in"}, "SIGKILL", "the process was ended by SIGKILL"),
    "gone home": ("collective", {"moment": "before"}, "go home", "index 1 did not come within 3 s"),
    "stopped": ("collective", {"moment": "before"}, "SIGSTOP", "index 1 did not come within 3 s: rank 1 is stopped"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("what", LAUNCHED)
def test_launch_shows_the_rank_that_failed(what: str, tmp_path: Path) -> None:
    program, args, fault, words = LAUNCHED[what]
    case = {"program": program, "args": args, "fault": fault, "victim": 1, "mesh timeout": 3 if "3 s" in words else 200}
    begun = time.monotonic()
    with pytest.raises(mc.CommError) as caught:
        mc.launch(fault_programs.launched, ranks=2, args=(case, str(tmp_path)), runtime="processes", timeout=280)
    assert time.monotonic() - begun < 200
    first = str(caught.value).split("\n", 1)[0]
    assert words in first
    if fault in ("raise", "SIGKILL"):
        assert first.startswith("meshcomm.launch: rank 1 failed in launched: ")
    if fault == "raise":
        assert isinstance(caught.value.__cause__, ValueError)
        assert "[rank 1] ValueError: boom on rank 1" in str(caught.value)
        assert "[rank 0]" not in str(caught.value)
    if fault == "go home":
        assert "done already: rank 1" in str(caught.value)
    nobody_is_left(tmp_path, 2)
