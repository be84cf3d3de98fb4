"""What a checkpoint puts back: values into a module and its optimiser, and the random states of a rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.errors import fail, names, shape_text
from meshcomm.parallel.checkpoint.parts import Named, Path, dotted, named, optimized, state_names
from meshcomm.parallel.checkpoint.reader import Reader
from meshcomm.parallel.global_places import Place, Spread
from meshcomm.parallel.optimizers.shares import WHOLE_STATES, is_kept
from meshcomm.runtime.process import accelerator

EXTRA = "_extra_state"
_NOT_SETTINGS = ("params", "param_names")


class Leaf(NamedTuple):
    """A value inside a nested one: a tensor may yet have to be read."""

    tail: Path
    value: Any


def names_of_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of an optimiser."""
    here = named(module)
    return [[name for name, _ in optimized(here, group["params"])] for group in optimizer.param_groups]


class Restoring:
    """What is to be read where; nothing is changed before :meth:`read`, and all that can be wrong is said before."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.where = reader, reader.where
        self._wanted: list[tuple[str, Spread]] = []
        self._commits: list[Callable[[], None]] = []
        self._files: Any = {}
        self.unused: dict[str, set[str]] = {}
        """What the checkpoint has and this rank has no use for, of the module and of the optimiser."""

    # --------------------------------------------------------------------------------------------------- the module

    def module(self, module: nn.Module, root: Path) -> None:
        """All that the module's ``state_dict`` has, which stands below ``root``."""
        here, clean = named(module), state_names(module)
        aliases: dict[str, list[str]] = {}
        for alias, name in here.aliases.items():
            aliases.setdefault(name, []).append(alias)
        missing: list[str] = []
        wrong: list[str] = []
        used: set[str] = set()
        for given, x in module.state_dict().items():
            name = clean(given)
            if given.rpartition(".")[2] == EXTRA:
                used |= self._extra_state(module, given, (*root, name))
                continue
            if name in here.aliases:
                used.add(dotted((*root, name)))
                continue
            keys = [dotted((*root, each)) for each in (name, *aliases.get(name, ()))]
            key = next((key for key in keys if self.reader.tensor(key) is not None), None)
            if not isinstance(x, Tensor):
                fail(
                    self.where,
                    f"{name!r} in the module's state_dict is a {type(x).__name__}, which nothing takes back.",
                )
            if key is None:
                missing.append(name)
                continue
            used.add(key)
            p = here.params.get(name)
            target = Spread.whole(x) if p is None else here.place(p).of(p)
            self._tensor(key, target, wrong)
        odd = [key for key, path in self.reader.paths.items() if root and path[: len(root)] == root and key not in used]
        self._refuse("module", missing, odd, wrong)

    def _extra_state(self, module: nn.Module, given: str, at: Path) -> set[str]:
        owner = module.get_submodule(given.rpartition(".")[0])
        leaves = self._leaves(at)
        if not leaves:
            fail(self.where, f"the checkpoint has no {dotted(at)!r}.", got=self.reader.folder)
        self._commits.append(lambda: owner.set_extra_state(built(leaves)))
        return {dotted((*at, *leaf.tail)) for leaf in leaves}

    def _tensor(self, key: str, target: Spread, wrong: list[str]) -> None:
        stored = self.reader.tensor(key)
        assert stored is not None
        dtype = stored.properties.dtype
        if stored.size != target.shape or dtype != target.dtype:
            there = shape_text(dtype, stored.size)
            wrong.append(f"{key!r} is {there} in the checkpoint and {shape_text(target.dtype, target.shape)} here")
        else:
            self._wanted.append((key, target))

    def _refuse(self, what: str, missing: Sequence[str], odd: Sequence[str], wrong: Sequence[str]) -> None:
        self.unused[what] = set(odd)
        if missing or wrong:
            said = [f"not in the checkpoint: {names(missing[:4])}{_more(missing)}"] if missing else []
            said += self._said_of(what, odd) + (["; ".join(wrong[:4]) + _more(wrong)] if wrong else [])
            fail(self.where, f"the checkpoint does not fit the {what}; {'; '.join(said)}.", got=self.reader.folder)

    def _said_of(self, what: str, odd: Sequence[str]) -> list[str]:
        return [f"not in the {what}: {names(odd[:4])}{_more(odd)}"] if odd else []

    def refuse_unused(self, every: Sequence[Mapping[str, set[str]]]) -> None:
        """What no rank has a use for; ``every``: of each rank what it has none for."""
        for what in self.unused:
            common = set.intersection(*(set(unused.get(what, ())) for unused in every))
            said = self._said_of(what, [key for key in self.reader.paths if key in common] or sorted(common))
            if said:
                fail(self.where, f"the checkpoint does not fit the {what}; {said[0]}.", got=self.reader.folder)

    def _leaves(self, at: Path) -> list[Leaf]:
        """What stands below a path, or at it: plain data at once, tensors with room for what will be read."""
        found = []
        for key, path in self.reader.paths.items():
            if path[: len(at)] == at:
                stored = self.reader.tensor(key)
                if stored is None:
                    found.append(Leaf(path[len(at) :], self.reader.plain(key)))
                else:
                    stored = self.reader.backed(key)
                    room = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
                    self._wanted.append((key, Spread.whole(room)))
                    found.append(Leaf(path[len(at) :], room))
        return found

    # ------------------------------------------------------------------------------------------------ the optimiser

    def optimizer(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        root: Path,
        together: Sequence[Sequence[str]],
        same: Mapping[str, str],
    ) -> None:
        """State by the parameters' names, settings by the groups that have them; ``together``: on all ranks.
        ``same``: from other names of a parameter to the one that counts; stages of a pipeline that have it may be on
        one rank in the run that saved, and on several here.
        """
        here = named(module)
        groups = self._groups(root)
        if not groups:
            got = f"{self.reader.folder}; {dotted(root)!r}"
            fail(self.where, "the checkpoint has no state of an optimiser.", got=got, fix="load the module alone")
        states: dict[str, list[tuple[Path, str]]] = {}
        for key, path in self.reader.paths.items():
            if path[: len(root) + 1] == (*root, "state") and len(path) > len(root) + 2:
                name, tail = str(path[len(root) + 1]), path[len(root) + 2 :]
                known = states.setdefault(same.get(name, name), [])
                if all(tail != other for other, _ in known):  # stages that share a parameter have it under two names
                    known.append((tail, key))
        own = {name: states.get(same.get(name, name), []) for name in here.first.values()}
        scalars = self._scalars(here, own)
        used: set[str] = set()
        wrong: list[str] = []
        for number, group in enumerate(optimizer.param_groups):
            settings = self._settings(same, groups, group, together[number])
            self._commits.append(lambda group=group, settings=settings: _set(group, settings))  # type: ignore[misc]
            for name, p in optimized(here, group["params"]):
                place, shape = here.place_of_state(optimizer, p)
                like = [(tail, key, tail not in scalars) for tail, key in own[name]]
                used.add(same.get(name, name))
                kept = is_kept(optimizer, p)
                leaves = [self._state(*each, p, (place, shape), settings, wrong) for each in like if kept]
                self._commits.append(lambda p=p, leaves=leaves: _set_state(optimizer, p, leaves))  # type: ignore[misc]
        self._refuse("optimiser", [], [name for name in states if name not in used], wrong)

    def _groups(self, root: Path) -> list[dict[str, Any]]:
        tree = built(self._leaves((*root, "param_groups")))
        groups = tree if isinstance(tree, list) else []
        if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
            fail(self.where, "the groups of the optimiser in the checkpoint do not name their parameters.")
        return groups

    def _settings(
        self,
        same: Mapping[str, str],
        groups: Sequence[Mapping[str, Any]],
        group: Mapping[str, Any],
        ours: Sequence[str],
    ) -> dict[str, Any]:
        """Those of the one group that has the same parameters."""
        wanted = {same.get(name, name) for name in ours}
        fitting = [each for each in groups if {same.get(name, name) for name in each["params"]} == wanted]
        if len(fitting) != 1:
            of = [name for each in groups for name in each["params"]]
            odd = [name for name in ours if name not in of]
            what = f"no group of the optimiser in the checkpoint has the same parameters as {names(ours[:3])}"
            got = f"{len(groups)} groups" + (f", none with {names(odd[:4])}" if odd else "")
            fix = "make the same groups of parameters as in the run that saved"
            fail(self.where, what + _more(ours, 3) + ".", got=got, fix=fix)
        settings = {key: value for key, value in fitting[0].items() if key not in _NOT_SETTINGS}
        lacking = [key for key in group if key not in settings and key not in _NOT_SETTINGS]
        odd = [key for key in settings if key not in group and key != "initial_lr"]
        if lacking and odd:
            fail(self.where, "the checkpoint is of another kind of optimiser.",
                 got=f"it has {names(odd[:4])}, and not {names(lacking[:4])}")  # fmt: skip
        return settings

    def _scalars(self, here: Named, states: Mapping[str, Sequence[tuple[Path, str]]]) -> set[Path]:
        """States that have no dims though their parameter has, so that they are no part of one that has none either."""
        found: set[Path] = {("step",)}
        for name, entries in states.items():
            p = here.params.get(name)
            if p is not None and here.place(p).shape:
                known = [(tail, self.reader.tensor(key)) for tail, key in entries]
                found |= {tail for tail, stored in known if stored is not None and not stored.size}
        return found

    @torch.inference_mode(False)  # tensors that are made in it are of no use outside of it
    @torch.no_grad()
    def _state(
        self, tail: Path, key: str, may_be_cut: bool, p: Tensor, at: tuple[Place, tuple[int, ...]],
        settings: Mapping[str, Any], wrong: list[str],
    ) -> Leaf:  # fmt: skip
        place, shape = at
        stored = self.reader.tensor(key)
        if stored is None:
            return Leaf(tail, self.reader.plain(key))
        stored = self.reader.backed(key)
        size, dtype = stored.size, stored.properties.dtype
        of_whole = tail[-1] in WHOLE_STATES
        if size == place.shape and may_be_cut and not of_whole:
            like = p.detach()
            room = torch.zeros_like(like, dtype=dtype) if like.shape == shape else like.new_zeros(shape, dtype=dtype)
            self._tensor(key, place.of(room), wrong)
            return Leaf(tail, room)
        if size and place.is_cut and not of_whole:
            wrong.append(f"{key!r} {shape_text(dtype, size)} is not shaped like its parameter {list(place.shape)}")
        on_device = tail[-1] != "step" or settings.get("capturable") or settings.get("fused")  # where torch has it
        room = torch.empty(size, dtype=dtype, device=p.device if on_device else "cpu")
        self._wanted.append((key, Spread.whole(room)))
        return Leaf(tail, room)

    # ------------------------------------------------------------------------------------------------------ at last

    def plan(self) -> None:
        """Find everything in the files."""
        self._files = self.reader.plan(self._wanted)

    def check(self) -> None:
        """See that what will be read is whole: nothing is changed before."""
        self.reader.check(self._files)

    @torch.no_grad()
    def read(self) -> None:
        """Read, and then change what is no tensor."""
        self.reader.read(self._files)
        for commit in self._commits:
            commit()


def _more(items: Sequence[object], shown: int = 4) -> str:
    return f" and {len(items) - shown} more" if len(items) > shown else ""


def built(leaves: Sequence[Leaf]) -> Any:
    """Nested dicts and lists of values by path."""
    if len(leaves) == 1 and not leaves[0].tail:
        return leaves[0].value
    inner: dict[str | int, list[Leaf]] = {}
    for tail, value in leaves:
        inner.setdefault(tail[0], []).append(Leaf(tail[1:], value))
    if inner and all(isinstance(key, int) for key in inner):
        return [built(inner[key]) for key in sorted(inner, key=int)]
    return {key: built(each) for key, each in inner.items()}


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        known = group.get(key)
        if isinstance(known, Tensor):  # a compiled step may hold it
            known.copy_(torch.as_tensor(value, device=known.device))
        else:
            group[key] = value


def _set_state(optimizer: torch.optim.Optimizer, p: Tensor, leaves: Sequence[Leaf]) -> None:
    if leaves:
        optimizer.state[p] = built(leaves)
    else:
        optimizer.state.pop(p, None)


# ----------------------------------------------------------------------------------------------------- random states


def random_states() -> dict[str, Any]:
    """Of this rank: torch's on the CPU and on the accelerator in use, Python's, and numpy's; as plain data."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = _numpy()
    if numpy is not None:
        found["numpy"] = _listed(numpy.get_state(legacy=False))
    device = accelerator.in_use()
    if device is not None:
        found["device"] = device.get_rng_state()
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on where they were."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy, device = _numpy(), accelerator.in_use()
    if numpy is not None and "numpy" in states:
        numpy.set_state(states["numpy"])
    if device is not None and "device" in states:
        device.set_rng_state(states["device"])


def _listed(value: Any) -> Any:
    """Arrays of numbers as lists."""
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
