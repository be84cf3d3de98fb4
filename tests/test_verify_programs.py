"""The prover, proven: programs drawn at random pass, and each kind of mistake in them is found on its line.

``python tests/verify_programs.py`` runs as many as one likes.
"""

from __future__ import annotations

import pytest
from fuzz_breaks import KINDS
from fuzz_verified import drawn, outcome, verified
from verify_programs import MISTAKES, Drawn, blamed, broken


def test_right_programs_pass() -> None:
    for seed in range(4):
        Drawn(seed).verified().check()


def on_its_line(mistake: str, seed: int, lines: list[str], at: int) -> None:
    report = Drawn(seed).verified(lines, "drawn.py")
    assert not report.ok, "\n".join(lines)
    assert blamed(report, lines, at, "drawn.py"), f"{lines[at]}: {report}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_on_its_line(mistake: str) -> None:
    found = next((seed, wrong) for seed in range(30) if (wrong := broken(Drawn(seed), mistake, seed)) is not None)
    on_its_line(mistake, found[0], *found[1])


@pytest.mark.parametrize(
    ("mistake", "seed"),
    [
        ("a hook", 2),  # of two that take a value the one hands on what is wrong
        ("a hook", 6),  # beside a mean, of whose gradient each rank has a share
        ("a hook", 17),  # on one rank's part of a sum, whose gradient is that of the sum
        ("a wrong backward", 4),
        ("all_gather", 0),  # as an all_gather_invariant it makes all gradients right
        ("all_gather", 17),
    ],
)
def test_a_wrong_gradient_is_blamed_on_who_hands_it_on(mistake: str, seed: int) -> None:
    wrong = broken(Drawn(seed), mistake, seed)
    assert wrong is not None
    on_its_line(mistake, seed, *wrong)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # works of programs that have failed
def test_breakages_of_the_fuzzer_are_found_on_their_line() -> None:
    """One of each kind; `python tests/fuzz_verified.py 0 600` runs as many as one likes."""
    left = set(KINDS)
    for seed in range(2000):
        program, broken = drawn(seed)
        if broken is None or broken.kind not in left or broken.kind == "swap":  # which may be harmless
            continue
        assert verified(program, None).ok
        assert outcome(program, broken) == "the line", (seed, broken)
        left.remove(broken.kind)
        if left == {"swap"}:
            return
    raise AssertionError(left)
