"""A stage of a model that has a forward of its own: it runs that forward, on a part of the blocks.

          embed     block 0   block 1   block 2   block 3   norm, head
stage 1   zeros     hidden    hidden    runs      stops here, with what block 2 gave
          (stubs)   (skipped: they hand on what stage 0 sent)

What needs no parameters, masks and the like, is computed again on every stage from what the model was called with.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.errors import MeshError, described, fail
from meshcomm.parallel.cut_parameters import is_spread
from meshcomm.parallel.pipeline.blocks import Seen, as_found, depends_on, mapped, tensors_of
from meshcomm.parallel.tensor.auto.example_inputs import Given, remember


class _Reached(Exception):  # noqa: N818  # nothing is wrong
    """The last block of a stage is done."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class _Received:
    """What the stage before has sent, while a forward runs."""

    x: Tensor | None = None
    device: torch.device


class Skipped(nn.Module):
    """In place of a block of another stage; before the own ones it hands on what was received."""

    def __init__(self, block: nn.Module, received: _Received, width: int | None) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if not name.startswith("_") and name != "training"}
        vars(self).update(plain)  # models ask their blocks of which kind they are
        vars(self)["_skipped"] = (received, width)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In the form in which the block would give it."""
        received, width = vars(self)["_skipped"]
        return received.x if width is None else (received.x, *[None] * (width - 1))


class Stub(nn.Module):
    """In place of a module of another stage, such as an embedding: zeros of the shape that it would give."""

    def __init__(self, part: nn.Module, received: _Received) -> None:
        super().__init__()
        memo: dict[int, Any] = {id(p): nn.Parameter(_meta(p), p.requires_grad) for p in part.parameters()}
        memo |= {id(x): _meta(x) for x in part.buffers()}
        vars(self)["_stub"] = (copy.deepcopy(part, memo), received)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stub"][0], name)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computed on the meta device."""
        twin, received = vars(self)["_stub"]
        args, kwargs = mapped(_meta, (args, kwargs))
        return mapped(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=received.device), twin(*args, **kwargs))


def _meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


class PartialModel(nn.Module):
    """A stage: those of a model's parts that are ``first`` to ``last``, the last one excluded.

    Its argument is, on the first stage, what the model takes: one argument, a tuple of them, or a dict by name;
    elsewhere what the stage before gives: hidden values, and the arguments of the model.
    """

    tied_parameters: dict[str, str]

    def __init__(self, model: nn.Module, seen: Seen, first: int, last: int) -> None:
        super().__init__()
        count, blocks = len(seen.blocks), seen.blocks
        received = _Received()
        needed = _needed(model, seen, first, last)
        others = {
            id(block): Skipped(block, received, seen.widths[at])
            for at, block in enumerate(blocks) if not first <= at < last
        }  # fmt: skip
        own = {id(block): block for at, block in enumerate(blocks) if first <= at < last}
        root = _part_of(model, {**others, **own}, needed, {}, received, first > 0)
        _show(root, self)
        self.training = model.training
        vars(self)["_partial"] = (root, received, blocks[last - 1] if last <= count else None, first == 0)

    def forward(self, x: Any) -> Any:
        """Run the model's forward, as far as this stage goes."""
        root, received, end, begins = vars(self)["_partial"]
        args, kwargs = _arguments(x) if begins else x[1:]
        root.training = self.training
        _show(self, root)  # an adaptor may have put another table of parameters in the place of the one they had
        handle = end.register_forward_hook(_stop) if end is not None else None
        received.x = None if begins else x[0]
        received.device = next((p.device for p in self.parameters()), torch.device("cpu"))
        try:
            return root.forward(*args, **kwargs)
        except _Reached as reached:
            output = reached.output
            return output[0] if isinstance(output, tuple) else output, args, kwargs
        finally:
            received.x = None
            if handle is not None:
                handle.remove()


def _show(source: nn.Module, target: nn.Module) -> None:
    """The same tables are those of both."""
    tables = vars(source)
    vars(target).update({name: tables[name] for name in _TABLES})


_TABLES = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"


def _stop(block: nn.Module, args: Any, output: Any) -> None:
    raise _Reached(output)


def _arguments(x: Any) -> Given:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def _needed(model: nn.Module, seen: Seen, first: int, last: int) -> set[tuple[int, int]]:
    """Which parameters of which modules a stage has, both by id: those that its parts depend on, in the modules that
    they call, or, where they call none that has it, in all.
    """
    holders: dict[int, list[int]] = {}
    for part in model.modules():
        for p in part.parameters(recurse=False):
            holders.setdefault(id(p), []).append(id(part))
    found: set[tuple[int, int]] = set()
    for at in range(first, last):
        for of in seen.needed[at] & holders.keys():
            called = [each for each in holders[of] if at in seen.called.get(each, ())]
            found |= {(each, of) for each in called or holders[of]}
    if last > len(seen.blocks):  # and what nothing depends on
        used = set().union(*seen.needed) | {id(p) for block in seen.blocks for p in block.parameters()}
        found |= {(each, of) for of, all_of_them in holders.items() if of not in used for each in all_of_them}
    return found


def _part_of(
    part: nn.Module,
    blocks: Mapping[int, nn.Module],
    needed: set[tuple[int, int]],
    made: dict[int, nn.Module],
    received: _Received,
    later: bool,
) -> nn.Module:
    """The part without what other stages have; ``later``: it is no part of the first stage."""
    if id(part) in blocks:
        return blocks[id(part)]
    if id(part) in made:
        return made[id(part)]
    inside = [*part.modules()]
    around = any(id(each) in blocks for each in inside)
    own = [(id(each), id(p)) for each in inside for p in each.parameters(recurse=False)]
    if not around and own and needed.isdisjoint(own):
        made[id(part)] = Stub(part, received)
        return made[id(part)]
    if not around and own and needed.issuperset(own):
        return part
    made[id(part)] = new = copy_of(part)
    direct = vars(part)["_parameters"]
    elsewhere = {name: p for name, p in direct.items() if p is not None and (id(part), id(p)) not in needed}
    vars(new)["_parameters"] = {name: p for name, p in direct.items() if name not in elsewhere}
    for name, p in elsewhere.items():
        vars(new)[name] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    vars(new)["_buffers"] = dict(vars(part)["_buffers"])
    if later:  # the first stage has them in its state
        vars(new)["_non_persistent_buffers_set"] = set(vars(part)["_buffers"])
    children = vars(part)["_modules"].items()
    vars(new)["_modules"] = {
        name: None if child is None else _part_of(child, blocks, needed, made, received, later)
        for name, child in children
    }
    return new


def copy_of(part: nn.Module) -> nn.Module:
    """Another module of the same parts. What runs the one that it was made for would run the whole model."""
    if "forward" in vars(part) or is_spread(part):
        what = "has been spread by an adaptor" if is_spread(part) else "has a forward that is not its class's"
        fail(
            "split_stages",
            f"a {type(part).__name__} that is to be cut {what}, which knows of all of it and not of a part.",
            fix="split_stages(model, n) of the model as it was made; then tensor_parallel, fully_shard or data_parallel"
            " around each stage",
        )
    made = copy.copy(part)
    vars(made).update({name: copy.copy(kept) for name, kept in vars(part).items() if _HOOKS.fullmatch(name)})
    return made


_HOOKS = re.compile(r"_.*hooks.*")
"""Tables of a module's hooks, which a shallow copy would share: what one stage is told others would do, too."""


def by_hand(model: nn.Module) -> str:
    """What to do with a model that is not cut here."""
    two = isinstance(model, nn.Transformer) or getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    more = (
        "the first stages have the encoder's blocks and hand on its hidden values and the decoder's tokens; the others"
        " have the decoder's blocks and hand the encoder's output on with their own"
        if two
        else "beside the hidden values a stage hands on what later blocks need, such as the mask or the position bias"
    )
    return f"cut it by hand: stages are ordinary modules of one argument, which may be a tuple or a dict; {more}"


def proved(model: nn.Module, stages: Sequence[nn.Module], seen: Seen, where: str) -> None:
    """Run the stages, one after the other, on the example: they must give what the model gives."""
    args, kwargs = seen.given
    fix = by_hand(model)
    try:
        with as_found(model), torch.enable_grad():
            x: Any = kwargs if kwargs and not args else args
            for at, stage in enumerate(stages):
                if at:
                    x = (x[0].detach().requires_grad_(), *x[1:])
                given, x = x, stage(x)
                remember(stage, given)
                if at and not depends_on(x, given[0]):
                    what = f"what stage {at} gives does not depend on what stage {at - 1} has given"
                    fail(where, f"{type(model).__name__} cannot be cut between its blocks: {what}.", fix=fix)
    except MeshError:
        raise
    except Exception as error:
        fail(where, f"{type(model).__name__} cannot be cut between its blocks: {described(error)}", fix=fix)
    ours, whole = tensors_of(x), tensors_of(seen.output)
    same = len(ours) == len(whole) and all(a.shape == b.shape for a, b in zip(ours, whole, strict=True))
    if not same or not all(_close(a, b) for a, b in zip(ours, whole, strict=True)):
        what = "what is computed before its blocks is used in another way than as their first argument"
        fail(where, f"{type(model).__name__}, cut between its blocks, gives something else: {what}.", fix=fix)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether they are, as far as can be told of what may have no values."""
    if a.is_meta or _torch.is_without_memory(a):
        return True
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=1e3 * torch.finfo(a.dtype).eps, atol=1e3 * torch.finfo(a.dtype).eps))
