"""Schedules in which the weights' half of a backward fills the time in which a rank would wait (Qi et al. 2023, 2024).

zb-h1                                       zbv: rank 0 has the first and the last of four stages
rank 0  F0 F1 .. D0 W0 F2 D1 W1 D2 W2       rank 0  F0.0 F0.1 F0.2 F1.0 D1.0 W1.0 F1.1 D1.1 W1.1 D0.0 W0.0 F1.2 ..
rank 1  .. F0 D0 F1 D1 W0 F2 D2 W1 W2       rank 1  .... F0.0 F1.0 F0.1 F1.1 D1.0 W1.0 F0.2 D0.0 W0.0 F1.2 D1.1 ..

What is written down is the order of F and D of each rank. The W, which nobody else needs, are put in by running it on
paper: where the rank would wait, and before an F for which as much is alive already as may be.
"""

from __future__ import annotations

from meshcomm.parallel.pipeline.actions import Action, Stages, Table, needs


def zero_bubble_1f1b(ranks: int, microbatches: int) -> Table:
    """1F1B's order; as many are alive on every rank as 1F1B has on the first one, ``ranks``."""
    rows = []
    for rank in range(ranks):
        row = [Action("F", 0, at) for at in range(min(ranks - rank - 1, microbatches))]
        for at in range(microbatches):
            ahead = at + ranks - rank - 1
            row += [Action("F", 0, ahead)] if ahead < microbatches else []
            row.append(Action("D", 0, at))
        rows.append(row)
    return _with_weights(rows, Stages(ranks, 1, "loop"), ranks)


def zero_bubble_v(ranks: int, microbatches: int) -> Table:
    """Two chunks, the second on the way back, so that the last stage is on the first rank; as much is alive on every
    rank as 1F1B has on the first one, ``2 * ranks`` halves.

    Rank r does forwards of chunk 0 until the first microbatch has come back to it, one of chunk 1 and one of chunk 0 in
    turn until its backward has, then forwards and backwards of chunk 1 until that has been at the last rank and is here
    again; from there on everything in turn.
    """
    rows = []
    for rank in range(ranks):
        wanted = ["F0"] * (2 * (ranks - rank) - 1) + ["F1", "F0"] * rank + ["F1", "D1"] * (ranks - rank)
        wanted += ["F0", "D0", "F1", "D1"] * microbatches
        done = dict.fromkeys(wanted, 0)
        row = []
        for each in wanted:
            if done[each] < microbatches:
                row.append(Action(each[0], int(each[1]), done[each]))
                done[each] += 1
        rows.append(row)
    return _with_weights(rows, Stages(ranks, 2, "v"), 2 * ranks)


def _with_weights(rows: list[list[Action]], stages: Stages, most: int) -> Table:
    """F and D of each rank in this order, and each W as early as it costs nothing, step by step, an action each."""
    made: list[list[Action]] = [[] for _ in rows]
    owed: list[list[Action]] = [[] for _ in rows]
    alive, at = [0] * len(rows), [0] * len(rows)
    done: set[tuple[int, str, int, int]] = set()
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        ended = []
        for rank, row in enumerate(rows):
            action = row[at[rank]] if at[rank] < len(row) else None
            full = action is not None and action.kind == "F" and alive[rank] >= most
            if action is not None and not full and done.issuperset(needs(rank, action, stages)):
                made[rank].append(action)
                at[rank] += 1
                alive[rank] += action.kind == "F"
                owed[rank] += [Action("W", *action[1:])] if action.kind == "D" else []
                ended.append((rank, "F" if action.kind == "F" else "B", *action[1:]))
            elif owed[rank]:
                made[rank].append(owed[rank].pop(0))
                alive[rank] -= 1
        done.update(ended)
    return tuple((*row, *late) for row, late in zip(made, owed, strict=True))
