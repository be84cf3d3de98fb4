"""The state_dict of a module whose parameters are cut: it says what it is, and only what fits is taken back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import (
    checkpoint,
    data_parallel,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    tensor_parallel,
)


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    return made.double()


PLAN = {"0": "column", "2": "row", "3": "replicated"}


def sharded(seed: int = 0) -> nn.Module:
    return fully_shard(net(seed), "a", grads="sum", replica_axis="b")


def two_units(seed: int = 0) -> nn.Module:
    return fully_shard(net(seed), ("a", "b"), grads="sum", units=["0", "2"])


def whole_matrices(seed: int = 0) -> nn.Module:
    return fully_shard(net(seed), "a", grads="sum", whole=True)


def parallel(seed: int = 0) -> nn.Module:
    return tensor_parallel(net(seed), PLAN, axis="a")


def both(seed: int = 0) -> nn.Module:
    return fully_shard(tensor_parallel(net(seed), PLAN, axis="b"), "a", grads="sum")


def with_a_part(seed: int = 0) -> nn.Module:
    made = net(seed)
    fully_shard(made[0], "b", grads="sum")
    return fully_shard(made, "a", grads="sum")


WAYS = [sharded, two_units, whole_matrices, parallel, both, with_a_part]
every_way = pytest.mark.parametrize("way", WAYS)
Way = Callable[..., nn.Module]


def ranks(main: Callable[..., Any], *args: Any) -> list[Any]:
    def each() -> Any:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            return main(*args)

    return mc.launch(each, ranks=4)


def swapped(x: Any) -> Any:
    """What the rank has that stands elsewhere along the axis a."""
    return mc.all_gather_object(x, "a")[1 - mc.current_mesh().coordinate["a"]]


def refused(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except mc.MeshError as error:
        return str(error)
    return ""


@pytest.mark.one_in(2, alike=True)
@every_way
def test_own_slices_come_back(way: Way, tmp_path: Path) -> None:
    """As they are, copied, without their metadata, and by way of a file."""

    def main() -> list[Any]:
        ours, found = way(), []
        file = tmp_path / f"{mc.current_mesh().rank}.pt"
        torch.save(ours.state_dict(), file)
        expected = full_state_dict(ours)
        for state in (
            ours.state_dict(),
            copy.deepcopy(ours.state_dict()),
            {name: x.clone() for name, x in ours.state_dict().items()},
            torch.load(file, weights_only=True),
        ):
            other = way(1)
            other.load_state_dict(state)
            found.append(full_state_dict(other))
        assert all(set(one) == set(expected) for one in found)
        return [expected, *found]

    for expected, *found in ranks(main):
        assert_close(found, [expected] * 4, rtol=0, atol=0)
        assert_close(expected, dict(net().state_dict()), rtol=0, atol=0)


@every_way
def test_slices_of_another_rank_are_refused(way: Way, tmp_path: Path) -> None:
    """And nothing is changed, by way of a file too."""

    def main() -> tuple[str, str]:
        ours = way()
        rank = mc.current_mesh().rank
        torch.save(ours.state_dict(), tmp_path / f"{rank}.pt")
        theirs = torch.load(tmp_path / f"{swapped(rank)}.pt", weights_only=True)
        other = way(1)
        before = copy.deepcopy(other.state_dict())
        said = refused(lambda: other.load_state_dict(theirs))
        assert_close(dict(other.state_dict()), dict(before), rtol=0, atol=0)
        inner = nn.ModuleDict({"inner": other})
        outer = nn.ModuleDict({"inner": ours}).state_dict()
        inner.load_state_dict(outer)
        return said, refused(lambda: other.load_state_dict(theirs, strict=False))

    for rank, (said, again) in enumerate(ranks(main)):
        here, there = rank // 2, 1 - rank // 2
        assert said == again
        assert "is a slice of another rank, or of another mesh" in said
        assert "load_full_state_dict" in said
        if way in (sharded, parallel):
            assert f"index {there} of 2 along axis 'a'" in said.split("here is")[0]
            assert f"index {here} of 2 along axis 'a'" in said.split("here is")[1]


@every_way
def test_whole_tensors_are_refused_and_the_way_is_said(way: Way) -> None:
    def main() -> list[str]:
        ours = way()
        whole = net(1).state_dict()
        before = copy.deepcopy(ours.state_dict())
        found = [refused(lambda: ours.load_state_dict(whole)), refused(lambda: ours.load_state_dict(dict(whole)))]
        assert_close(dict(ours.state_dict()), dict(before), rtol=0, atol=0)
        load_full_state_dict(ours, whole)
        assert_close(full_state_dict(ours), dict(whole), rtol=0, atol=0)
        return found

    for found in ranks(main):
        for said in found:
            assert "is whole, of shape [" in said
            assert "load_full_state_dict" in said


@every_way
def test_a_part_says_the_same(way: Way, tmp_path: Path) -> None:
    """Asked by itself, or by a module around it that is none of ours; its copy and its file too."""

    def main() -> None:
        ours, other = way(), way(1)
        file = tmp_path / f"{mc.current_mesh().rank}.pt"
        torch.save(ours[2].state_dict(), file)
        before = copy.deepcopy(other.state_dict())
        for mine in (
            ours[2].state_dict(),
            copy.deepcopy(ours)[2].state_dict(),
            torch.load(file, weights_only=True),
        ):
            said = refused(lambda mine=mine: other[2].load_state_dict(swapped([mine])[0]))
            assert "weight' is a slice of another rank, or of another mesh" in said
            other[2].load_state_dict(mine)
            other.load_state_dict(before)
        if way is not whole_matrices:
            assert "is whole, of shape [4, 8]" in refused(lambda: other[2].load_state_dict(net()[2].state_dict()))
        around, theirs = nn.Sequential(ours[0], ours[2]), nn.Sequential(other[0], other[2])
        assert "is a slice of another rank" in refused(
            lambda: theirs.load_state_dict(swapped([around.state_dict()])[0])
        )
        theirs.load_state_dict(around.state_dict())
        assert_close(dict(theirs.state_dict()), dict(around.state_dict()), rtol=0, atol=0)
        prefixed = ours[2].state_dict(prefix="2.")
        assert "'2.weight' is a slice of another rank" in refused(
            lambda: nn.ModuleDict({"2": other[2]}).load_state_dict(swapped([prefixed])[0])
        )

    ranks(main)


def test_slices_for_a_part_that_is_whole() -> None:
    """Beside what is cut another way, and under another name of the axis."""

    def main() -> tuple[str, ...]:
        ours = parallel()
        sequence = tensor_parallel(net(), {"0": "replicated", "2": "replicated", "*": "replicated"}, axis="a")
        lengths = tensor_parallel(net(), {"0": "column", "2": "row", "*": "replicated"}, axis=("a", "b"))
        renamed = fully_shard(net(1), "b", grads="sum")
        theirs = fully_shard(net(), "a", grads="sum")
        place = mc.current_mesh().coordinate
        said = refused(lambda: renamed.load_state_dict(theirs.state_dict()))
        assert bool(said) == (place["a"] != place["b"])
        return (
            refused(lambda: sequence.load_state_dict(ours.state_dict())),
            refused(lambda: lengths.load_state_dict(ours.state_dict())),
        )

    for whole, other in ranks(main):
        assert "'0.weight' is a slice (a part of dim 0, index" in whole
        assert "the parameter here is whole" in whole
        assert "of 2 along axis 'a'" in other
        assert "of 4 along axis ('a', 'b')" in other


@pytest.mark.one_in(2, alike=True)
@every_way
def test_copies_averages_and_wrappers(way: Way) -> None:
    def main() -> None:
        ours = way()
        averaged = torch.optim.swa_utils.AveragedModel(ours)
        averaged.update_parameters(ours)
        twin = copy.deepcopy(ours)
        twin.load_state_dict(averaged.module.state_dict())
        again = torch.optim.swa_utils.AveragedModel(way(1))
        again.load_state_dict(averaged.state_dict())
        assert_close(full_state_dict(again.module), full_state_dict(ours), rtol=0, atol=0)
        theirs = swapped([(ours.state_dict(), averaged.state_dict())])[0]
        assert refused(lambda: twin.load_state_dict(theirs[0]))
        assert refused(lambda: again.load_state_dict(theirs[1]))
        del ours
        twin.load_state_dict(twin.state_dict())

    ranks(main)


def test_copies_that_replicas_have_are_taken() -> None:
    def main() -> None:
        ours = data_parallel(parallel(), "b", grads="sum")
        place = mc.current_mesh().coordinate
        for made in (ours, sharded()):
            other = mc.all_gather_object(made.state_dict(), "b")[1 - place["b"]]
            made.load_state_dict(other)

    ranks(main)


def test_names_that_wrappers_change() -> None:
    """Checkpointed blocks, names with the prefix of a wrapper, weights with two names."""

    def main() -> None:
        made = net()
        made[0] = checkpoint_wrapper(made[0])
        ours = fully_shard(made, "a", grads="sum")
        ours.load_state_dict(ours.state_dict())
        said = refused(lambda: ours.load_state_dict(swapped([ours.state_dict()])[0]))
        assert "'0.weight' is a slice of another rank" in said
        wrapped = nn.ModuleDict({"module": sharded()})
        state = wrapped.state_dict()
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
        sharded(1).load_state_dict(state)
        assert refused(lambda: sharded(1).load_state_dict(swapped([state])[0]))
        tied = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
        tied["two"].weight = tied["one"].weight
        fully_shard(tied, "a", grads="sum")
        tied.load_state_dict(tied.state_dict())
        state = OrderedDict(tied.state_dict())
        state["two.weight"] = torch.ones(4, 4)
        assert "'two.weight' is whole" in refused(lambda: tied.load_state_dict(state))

    ranks(main)


def test_a_state_dict_needs_no_rank() -> None:
    """Nor a mesh that is still in use: what a launch has left is still a module."""
    for way in (sharded, parallel):
        ours = ranks(way)[0]
        ours.load_state_dict(ours.state_dict())
        assert "is whole" in refused(lambda ours=ours: ours.load_state_dict(net().state_dict()))


def test_other_errors_stay_torchs() -> None:
    def main() -> None:
        ours = sharded()
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict({})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            ours.load_state_dict({**ours.state_dict(), "more": torch.ones(1)})
        with pytest.raises(RuntimeError, match="expected torch.Tensor"):
            ours.load_state_dict({**ours.state_dict(), "0.bias": 3})
        with pytest.raises(RuntimeError, match="size mismatch for 3.running_mean"):
            ours.load_state_dict({**ours.state_dict(), "3.running_mean": torch.ones(1)})

    ranks(main)


def test_checkpoints_go_on(tmp_path: Path) -> None:
    def main() -> Any:
        checkpoint.save(tmp_path, both())
        other = parallel(1)
        checkpoint.load(tmp_path, other)
        return full_state_dict(other)

    for found in ranks(main):
        assert_close(found, dict(net().state_dict()), rtol=0, atol=0)


class Hub(nn.Module):
    """Has what models of hubs have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def save_pretrained(self, folder: Path, main: bool = True, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, folder)


@pytest.mark.parametrize(
    "way",
    [
        lambda net: fully_shard(net, "a", grads="sum"),
        lambda net: tensor_parallel(net, {"up": "column", "down": "row"}, axis="a"),
        lambda net: copy.deepcopy(fully_shard(net, "a", grads="sum")),
    ],
)
def test_files_for_others_are_whole(way: Way, tmp_path: Path) -> None:
    """save_pretrained writes no slices."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = Hub()
    expected = copy.deepcopy(alone.state_dict())

    def main() -> None:
        ours: Any = way(copy.deepcopy(alone))
        file = tmp_path / f"{mc.current_mesh().rank}"
        for call in (
            lambda: ours.save_pretrained(file),
            lambda: ours.save_pretrained(file, True, ours.state_dict()),
            lambda: ours.save_pretrained(file, state_dict=dict(ours.state_dict())),
        ):
            said = refused(call)
            assert "save_pretrained: 'up.weight' would be written as a slice" in said
            assert "full_state_dict" in said
            assert not file.exists()
        ours.save_pretrained(file, state_dict=full_state_dict(ours))
        assert_close(torch.load(file, weights_only=True), dict(expected), rtol=0, atol=0)

    ranks(main)
    data = mc.launch(lambda: data_parallel(Hub(), "x", grads="sum", mesh=mc.make_mesh({"x": 1})), ranks=1)[0]
    data.save_pretrained(tmp_path / "data")
