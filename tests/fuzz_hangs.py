"""Whether prove_no_hang and the runtime agree on broken programs: a sweep.

    python tests/fuzz_hangs.py 0 1500

Each seed draws a program with a mistake in it. It runs on ranks of this process, where a hang is stopped and said; its
trace is judged. One that is proven runs in 20 more orders of the ranks. The same program without its mistake is to be
proven.
"""

from __future__ import annotations

import sys
from collections import Counter

from fuzz_breaks import Break, broken_of, follow
from fuzz_programs import Rolled
from fuzz_steps import Program, Run

import meshcomm as mc
from meshcomm.runtime.transports.threads.orders import Order, ordered

MESHES = [{"a": 2}, {"a": 2, "b": 2}, {"a": 3}, {"a": 4}]
ORDERS = 20


def hangs(program: Program, broken: Break | None) -> bool:
    """Whether it does not get to its end."""

    def main() -> None:
        mesh = mc.make_mesh(program.axes)
        follow(Run(program, program.sent(mesh.rank), mesh), broken)

    try:
        mc.launch(main, program.size)
    except mc.CommError:
        return True
    return False


def told(program: Program, broken: Break | None) -> tuple[bool, mc.Proof]:
    """Whether it hangs, and what the judge says of its trace."""
    with mc.trace() as t:
        failed = hangs(program, broken)
    return failed, mc.prove_no_hang(t)


def proven(proof: mc.Proof) -> bool:
    """An order is none of the runtime's."""
    return all(finding.kind == "order" for finding in proof.findings)


def sweep(first: int, last: int) -> Counter[str]:
    """How many of each outcome."""
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        program, broken = broken_of(Rolled(seed), MESHES)
        if broken is None:
            continue
        try:
            failed, proof = told(program, broken)
        except Exception as error:  # the mistake itself, on one rank: nothing to be judged
            counts[f"raises {type(error).__name__}"] += 1
            continue
        whole, right = told(program, None)
        counts["whole, ends and is proven" if proven(right) and not whole else "WHOLE, REFUSED"] += 1
        counts["broken"] += 1
        counts[f"{'hang' if failed else 'end'}, {'proven' if proven(proof) else 'not proven'}"] += 1
        if proven(proof) is failed:
            print(seed, broken, proof, sep="\n")
        if proven(proof):
            for order in range(ORDERS):
                with ordered(Order(f"{seed}, {order}")):
                    again = hangs(program, broken)
                counts["orders"] += 1
                counts["orders that hang"] += again
                if again:
                    print(seed, "hangs in order", order)
    return counts


if __name__ == "__main__":
    for what, count in sorted(sweep(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{what}: {count}")
