"""split_stages: a model cut into stages that are as even as they can be, with the names of its parameters kept.

Sequential                     1 | 2 3 | 4              its parts, nested ones too
anything with a list           [embed 0] 1 | 2 3 | 4 [norm head]      what is before the first block goes with it;
of blocks in a row                                      what is behind the last one is a part of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshcomm.errors import fail, few
from meshcomm.parallel.later_values import refuse_lazy
from meshcomm.parallel.pipeline.blocks import look
from meshcomm.parallel.pipeline.partial import PartialModel, by_hand, copy_of, proved

WHERE = "split_stages"


def split_stages(
    model: nn.Module, n: int, costs: Sequence[float] | None = None, *, example: Any = None
) -> list[nn.Module]:
    """Cut a model into ``n`` stages of a pipeline, in order, as even as they can be.

        embed  block block block block  norm head         n = 3
        [ stage 0         ][ stage 1  ][ stage 2 ]

    Each stage is an ordinary module of one argument, which is what the stage before gives. Its parameters are the
    model's own, nothing is copied, under the names that they have in the model: so that ``full_state_dict`` and
    checkpoints of a pipeline are those of the whole model, and of any other pipeline of it.

    What is cut: an ``nn.Sequential``, nested ones too, between its parts; any other model, such as a decoder of
    transformers, between the blocks of an ``nn.ModuleList`` or ``nn.Sequential`` in it, if each is called once, with
    what the one before gave as its first argument. There, a stage runs the model's own forward, in which blocks of
    others do nothing, and stops behind its last block; what the model was called with travels along. What is before
    the blocks or behind them and asks for a parameter has it: one that several stages have, as a tied embedding, is
    tied by name (``stage.tied_parameters``), and ``pipelined`` adds up its gradients.
    Where two stages of one rank have it, as "zbv" places the first and the last, give ``fully_shard`` and
    ``tensor_parallel`` a ``copy.deepcopy`` of each: a parameter is cut once.
    Adaptors come after: ``tensor_parallel(stage, "auto", ...)`` knows what a stage is called with.

    Type: as the model's
    Args:
        model: on every rank the same one; on the meta device, too.
        n: how many stages: ranks of the axis times stages of each. Stages r, r + n/v, ... are index r's.
        costs: a number for each part, in the order of the model. By default the floating point operations of its
            forward on ``example``, which are the same on every rank, and its parameters.
        example: something the model can be called with: a tensor, a tuple of arguments, or a dict of them by name. By
            default a few tokens, or rows, as the model's first layers want them.
    Returns: the ``n`` stages. That of a model of several arguments takes a tuple of them, or a dict.
    Backward: none of its own
    Cost: one forward of the example, and another one by the stages, whose result must be the model's; no communication
    Raises:
        MeshError: fewer parts than stages; ``costs`` that are none; no row of blocks; a model that cannot be cut there,
            or that an adaptor has spread already.
    Example:
        >>> import torch
        >>> from meshcomm.parallel import split_stages
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> first, second = split_stages(model, 2)
        >>> list(second.state_dict())
        ['2.weight', '2.bias', '3.weight', '3.bias']
        >>> x = torch.ones(1, 4)
        >>> torch.equal(second(first(x)), model(x))
        True
    """
    if not isinstance(model, nn.Module):
        fail(WHERE, f"model is not a torch.nn.Module but {type(model).__name__}.", fix="the whole model")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        fail(WHERE, f"n={n!r} is no number of stages.", fix="1 or more")
    refuse_lazy(WHERE, (*model.named_parameters(), *model.named_buffers()))
    stages = _of_sequential(model, n, costs, example) if _plain(model) else _of_blocks(model, n, costs, example)
    _tie(model, stages)
    return stages


# ---------------------------------------------------------------------------------------------------------- Sequential


def _plain(part: nn.Module) -> bool:
    """Whether it does nothing but call its children in turn."""
    return isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward


def _leaves(part: nn.Module, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    for name, child in vars(part)["_modules"].items():
        if _plain(child) and len(child):
            yield from _leaves(child, (*path, name))
        else:
            yield (*path, name), child


def _of_sequential(model: nn.Module, n: int, costs: Any, example: Any) -> list[nn.Module]:
    parts = list(_leaves(model))
    names = [".".join(path) for path, _ in parts]
    _enough(names, n)
    if costs is None:
        seen = look(model, [[child for _, child in parts]], example, WHERE)
        costs = [_size(child) for _, child in parts] if isinstance(seen, str) else seen.costs[:-1]
    made: list[nn.Module] = []
    for first, last in _balanced(_numbers(costs, names), n):
        made.append(_kept(model, {path for path, _ in parts[first:last]}))
    return made


def _size(part: nn.Module) -> float:
    return 1.0 + sum(p.numel() for p in part.parameters())


def _kept(part: nn.Module, paths: set[tuple[str, ...]]) -> nn.Module:
    """A Sequential of those of its parts alone, under their names."""
    made = copy_of(part)
    kept = {}
    for name, child in vars(part)["_modules"].items():
        below = {path[1:] for path in paths if path[0] == name}
        if below:
            kept[name] = child if () in below else _kept(child, below)
    vars(made)["_modules"] = kept
    return made


# -------------------------------------------------------------------------------------------------------------- blocks


def _of_blocks(model: nn.Module, n: int, costs: Any, example: Any) -> list[nn.Module]:
    rows = [
        list(part.children())
        for part in model.modules()
        if (isinstance(part, nn.ModuleList) or _plain(part)) and len(list(part.children())) > 1
    ]
    rows.sort(key=lambda row: -sum(map(_size, row)))
    seen = look(model, rows, example, WHERE) if rows else "it has no list of modules"
    if isinstance(seen, str):
        fail(
            WHERE,
            f"{type(model).__name__} has no row of blocks between which it can be cut: {seen}.",
            fix=f"an nn.Sequential of its parts; or example=, if it takes other arguments; or {by_hand(model)}",
        )
    names = {id(part): name for name, part in model.named_modules()}
    parts = [names[id(block)] for block in seen.blocks]
    parts = [f"all before {parts[0]}, with it", *parts[1:], f"all behind {parts[-1]}"]
    _enough(parts, n)
    cuts = _balanced(_numbers(seen.costs if costs is None else costs, parts), n)
    stages: list[nn.Module] = [PartialModel(model, seen, first, last) for first, last in cuts]
    proved(model, stages, seen, WHERE)
    return stages


def _tie(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Say on each stage which of its parameters others have, too: under which name all know it."""
    named = {id(p): name for name, p in model.named_parameters()}
    own = [{id(p) for p in stage.parameters()} for stage in stages]
    shared = {each for at, ids in enumerate(own) for each in ids if any(each in other for other in own[:at])}
    for stage in stages:
        ties = {name: named[id(p)] for name, p in stage.named_parameters() if id(p) in shared}
        vars(stage)["tied_parameters"] = ties


# --------------------------------------------------------------------------------------------------------- even stages


def _enough(parts: Sequence[str], n: int) -> None:
    if len(parts) < n:
        fail(WHERE, f"{n} stages of {len(parts)} parts.", got=few(parts), fix=f"n={len(parts)} or less")


def _numbers(costs: Any, parts: Sequence[str]) -> list[float]:
    try:
        numbers = [float(cost) for cost in costs]
    except (TypeError, ValueError):
        fail(WHERE, f"costs={costs!r:.60} are no numbers.", fix=f"one for each of {few(parts)}")
    if len(numbers) != len(parts):
        fail(WHERE, f"{len(numbers)} costs for {len(parts)} parts.", got=few(parts), fix="one for each part")
    if any(not 0 <= number < float("inf") for number in numbers):
        fail(WHERE, f"costs={costs!r:.60} are not finite, or negative.", fix="what each part takes, in any unit")
    return numbers


def _balanced(costs: Sequence[float], n: int) -> list[tuple[int, int]]:
    """Where the stages begin and end, so that the largest one is as small as can be, and they are even."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * count]
    for _ in range(n):
        after: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            found = []
            for begin in range(end):
                before = best[begin]
                if before is not None:
                    own = total[end] - total[begin]
                    found.append((max(before[0], own), before[1] + own * own, (*before[2], end)))
            after[end] = min(found, default=None)
        best = after
    chosen = best[count]
    assert chosen is not None
    return list(zip((0, *chosen[2]), chosen[2], strict=False))
