"""What a proof found, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshcomm.errors import VerifyError, raise_alone
from meshcomm.pictures.judged import Verdict, judged
from meshcomm.pictures.picture import Picture, Shown

__all__ = ["Finding", "Report", "labelled"]


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

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report(Shown):
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

    @property
    def ok(self) -> bool:
        """Whether nothing was found. Notes are no findings."""
        return not self.findings

    def check(self) -> Report:
        """This report, if nothing was found.

        Cost: none; each rank judges its own report.

        Raises:
            VerifyError: with the whole report as its text.
        """
        if not self.ok:
            raise_alone(VerifyError(str(self)))
        return self

    def picture(self) -> Picture:
        """Of it, as notebooks show it: ``.save("report.html")`` writes a file."""
        meshes = [(line, line.partition("}")[0] + "}") for line in self.ran]
        told = [(line, tuple(dict.fromkeys(each.kind for each in self.findings if mesh in each.text)))
                for line, mesh in meshes]  # fmt: skip
        rows = [Verdict(line, wrong) for line, wrong in told]
        title = f"meshcomm.{self.name}: {f'{len(self.findings)} found' if self.findings else 'nothing wrong was found'}"
        return judged(title, str(self), rows)

    def __str__(self) -> str:
        head = [finding.text for finding in self.findings] or [f"meshcomm.{self.name}: nothing wrong was found."]
        return "\n".join((*head, *labelled("ran", self.ran), *labelled("note", self.notes)))


def labelled(label: str, lines: Sequence[str]) -> list[str]:
    """Lines behind a word, those that go on as far in."""
    return [f"  {label}: " + line.replace("\n", "\n  " + " " * (len(label) + 2)) for line in lines]
