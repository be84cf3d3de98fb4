"""What the judge says of the logs of all ranks, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshcomm.errors import HangError
from meshcomm.verifying.hangs.agree import meetings_of
from meshcomm.verifying.hangs.log import Log
from meshcomm.verifying.hangs.paper import WAITING, findings_of
from meshcomm.verifying.report import Finding, Found

__all__ = ["Proof", "judged"]

_ORDER = (
    "order: it does not hang on gloo, on shared memory and in one process. It may where calls over several"
    " communicators run one after the other, as NCCL's do (NCCL User Guide, Using multiple NCCL communicators"
    " concurrently)."
)
_MESSAGES = (
    "order: messages that a rank begins one after the other are one batch on the backends of accelerators, so that they"
    " do not hold each other up there; elsewhere nothing does."
)


@dataclass(frozen=True)
class Proof(Found):
    """What :func:`prove_no_hang` found.

    ``print(proof)`` shows all of it: the findings, what was judged, what it does not cover.

    Args:
        findings: what hangs or may, of kind ``"mismatch"`` (ranks of an axis make different calls), ``"unmatched"`` (a
            call or message that has no other side), ``"deadlock"`` (ranks that wait in a circle), ``"order"`` (they
            would, if every call blocked until it is over). None of a program that is proven.
        unproven: lines on which what a rank does next can depend on more than what was judged: a tensor read on the
            host, ``done()``, a time-out. With other data or at another time it may go a way that was not judged.
        ran: what was judged, a line each.
        notes: what is no error, and yet good to know.
        classes: the ranks that ran, where each stands for those that are equal to it; none where all ran.

    Example:
        >>> import meshcomm as mc
        >>> proof = mc.Proof([mc.Finding("deadlock", "train.py:33", "meshcomm.prove_no_hang: messages wait ...")])
        >>> proof.ok, proof.findings[0].kind, proof.unproven
        (False, 'deadlock', ())
    """

    findings: Sequence[Finding] = ()
    unproven: Sequence[str] = ()
    ran: Sequence[str] = field(default=(), repr=False)
    notes: Sequence[str] = ()
    classes: Sequence[int] = ()
    _raised = HangError

    def __str__(self) -> str:
        nothing = "meshcomm.prove_no_hang: nothing hangs."
        if self.classes:
            nothing = (
                "meshcomm.prove_no_hang: proven for classes of ranks: nothing hangs if those are equal that seem so."
            )
        return self.written(nothing, ran=self.ran, unproven=self.unproven, note=self.notes)


def judged(logs: Mapping[int, Log], unproven: Sequence[str] = (), ran: Sequence[str] = ()) -> Proof:
    """Whether ranks that do this can hang. A rank has a log if it may call, were it empty."""
    meetings = meetings_of(logs)
    findings = meetings.findings
    stuck = findings_of(logs, meetings, blocking=False)
    orders = [] if stuck else findings_of(logs, meetings, blocking=True)
    alone = [WAITING in finding.text for finding in orders]
    notes = [*([] if all(alone) else [_ORDER]), *([_MESSAGES] if any(alone) else [])]
    return Proof((*findings, *stuck, *orders), tuple(dict.fromkeys(unproven)), tuple(ran), tuple(notes))
