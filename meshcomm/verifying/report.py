"""What a report or a proof found, as a person reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import Self

from meshcomm.errors import HangError, VerifyError, raise_alone
from meshcomm.pictures.judged import Verdict, judged
from meshcomm.pictures.picture import Picture, Shown

__all__ = ["Finding", "Found", "Report"]

_LINES = re.compile(r"[\w.-]+\.\w+:\d+")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, of a :class:`Report`.

    ``print(finding)`` shows its text, which is made as all errors of the library: what is wrong and where on the mesh,
    what came, and what to write instead.

    Args:
        kind: what was compared, in a word: ``"value"``, ``"vjp"``, ``"jvp"``, ``"second"``, ...
        line: the line to blame, ``"train.py:33"``; empty where none is known.
        text: what a person reads.
    """

    kind: str
    line: str
    text: str

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines that it names, the one to blame first: where a reduction is lacking, what makes the value and what
        takes it.
        """
        named = (self.line, *_LINES.findall(self.text))
        return tuple(dict.fromkeys(line for line in named if line))

    def __str__(self) -> str:
        return self.text


class Found:
    """What a :class:`Report` and a :class:`Proof` have in common."""

    findings: Sequence[Finding]
    _raised: ClassVar[type[VerifyError | HangError]]
    """What :meth:`check` raises."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found. Notes, and what is unproven, are no findings."""
        return not self.findings

    def check(self) -> Self:
        """This one, if nothing was found.

        Cost: none; each rank judges its own.

        Raises:
            VerifyError: of a report, with the whole report as its text.
            HangError: of a proof, with the whole proof.
        """
        if not self.ok:
            raise_alone(self._raised(str(self)))
        return self

    def written(self, nothing: str, **lines: Sequence[str]) -> str:
        """The findings, or that there is ``nothing``; then lines, each behind its label, those that go on as far in."""
        told = [finding.text for finding in self.findings] or [nothing]
        for label, each in lines.items():
            told += [f"  {label}: " + line.replace("\n", "\n  " + " " * (len(label) + 2)) for line in each]
        return "\n".join(told)


@dataclass(frozen=True)
class Report(Found, Shown):
    """What :func:`verify` and :func:`verify_training` found.

    ``print(report)`` shows all of it: the findings, what was run, the notes; notebooks draw it, and
    ``report.picture().save("report.html")`` writes that.

    Args:
        name: the function that made it, as its texts begin: ``"verify"``.
        findings: what is wrong; none of a program that is right.
        notes: what is no error, and yet good to know: what was skipped, and why.
        ran: what was run, a line each.

    Example:
        >>> import meshcomm as mc
        >>> report = mc.Report(
        ...     "verify", [mc.Finding("vjp", "train.py:33", "meshcomm.verify: the gradient of input 1 is off.")]
        ... )
        >>> report.ok, report.findings[0].line
        (False, 'train.py:33')
        >>> print(mc.Report("verify", ran=["{'dp': 2}: value, vjp in float64"]))
        meshcomm.verify: nothing wrong was found.
          ran: {'dp': 2}: value, vjp in float64
    """

    name: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    ran: Sequence[str] = field(default=(), repr=False)
    _raised = VerifyError

    def picture(self) -> Picture:
        """Of it, as notebooks show it: ``.save("report.html")`` writes a file."""
        meshes = [(line, line.partition("}")[0] + "}") for line in self.ran]
        told = [(line, tuple(dict.fromkeys(each.kind for each in self.findings if mesh in each.text)))
                for line, mesh in meshes]  # fmt: skip
        rows = [Verdict(line, wrong) for line, wrong in told]
        title = f"meshcomm.{self.name}: {f'{len(self.findings)} found' if self.findings else 'nothing wrong was found'}"
        return judged(title, str(self), rows)

    def __str__(self) -> str:
        return self.written(f"meshcomm.{self.name}: nothing wrong was found.", ran=self.ran, note=self.notes)
