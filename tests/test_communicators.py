"""When the process groups of an axis, and with them NCCL's communicators, come into being, and how many there are."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stand_in import stand_in

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.health import peers
from meshcomm.runtime.recorder import Log
from meshcomm.runtime.transports import turns
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.turns import Family, Pool

CARD = torch.device("cuda", 3)
USUAL, OTHER, THIRD = (timedelta(seconds=seconds) for seconds in (20, 10, 15))


class Group:
    """Of torch's, with a communicator or without."""

    def __init__(self, name: str, limit: timedelta, connected: bool) -> None:
        self.name, self.limit, self.connected = name, limit, connected


class Torch:
    """What is asked of torch, by all ranks: they are threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[Group] = []
        store = dist.HashStore()
        patch.setattr(_torch, "default_store", lambda: store)
        patch.setattr(_torch, "new_group", self.new_group)
        patch.setattr(_torch, "is_to_connect", lambda group, device: not group.connected)
        patch.setattr(_torch, "connect", self.connect)
        patch.setattr(_torch, "set_limit", lambda group, limit: setattr(group, "limit", limit))
        patch.setattr(peers, "account", lambda ranks, closed=False: "")

    def new_group(self, ranks: Any, name: str, limit: timedelta, device: torch.device | None = None) -> Group:
        assert device in (None, CARD)
        self.made.append(Group(name, limit, device is not None))
        return self.made[-1]

    def connect(self, group: Group, device: torch.device) -> None:
        assert device == CARD
        assert not group.connected
        group.connected = True

    def communicators(self) -> int:
        return len({group.name for group in self.made if group.connected})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def on_two_ranks(program: Callable[[int], Any]) -> list[Any]:
    """As threads; what they raise is their result."""
    found: list[Any] = [None, None]

    def live(rank: int) -> None:
        try:
            found[rank] = program(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def pool_of(rank: int, first: Any = None) -> Pool:
    return Pool((0, 1), rank, USUAL, "here", first, CARD)


# ------------------------------------------------------------------------------------------------------- how many


def test_axes_with_other_time_outs_use_the_same_communicators_one_after_the_other(asked: Torch) -> None:
    def program(rank: int) -> list[tuple[str, timedelta]]:
        pool, seen = pool_of(rank), []
        for number, limit in enumerate((OTHER, THIRD, OTHER, THIRD)):
            turn: Any = Family(pool, limit, f"here {limit}").turn(f"axis {number}")
            seen.append((turn.group.name, turn.group.limit))
            del turn
            meet(f"{number}", rank)
        return seen

    first, second = on_two_ranks(program)
    assert first == second
    assert [limit for _, limit in first] == [OTHER, THIRD, OTHER, THIRD]
    assert asked.communicators() <= 2  # the first rank may have looked before the other had told


def meet(at: str, rank: int) -> None:
    store = _torch.default_store()
    store.set(f"met {at} {rank}", "")
    store.get(f"met {at} {1 - rank}")


def test_a_mesh_with_a_time_out_of_its_own_alone_has_one_communicator(asked: Torch) -> None:
    def program(rank: int) -> Any:
        family = Family(pool_of(rank), OTHER, "here other")
        return family, family.turn("a")

    for family, turn in on_two_ranks(program):
        assert turn.group.connected
        assert not family.base.connected, "it only carries messages"
        assert (family.base.limit, turn.group.limit) == (OTHER, OTHER)
    assert asked.communicators() == 1


def test_what_other_axes_use_too_keeps_its_time_out(asked: Torch) -> None:
    """The first group of the ranks carries the messages of all their axes; it may be the world's, in which others call."""

    def program(rank: int) -> Any:
        pool = pool_of(rank)
        usual = Family(pool, USUAL, "here")
        other = Family(pool, OTHER, "here other")
        turn = other.turn("a")
        assert turn.group is not usual.base
        del turn
        meet("gone", rank)
        last: Any = usual.turn("b")
        assert last.group is usual.base
        return usual.base, last.group

    for base, group in on_two_ranks(program):
        assert base.limit == USUAL
        assert group.limit == USUAL


def test_a_group_gets_the_usual_time_out_back(asked: Torch) -> None:
    def program(rank: int) -> list[timedelta]:
        pool, seen = pool_of(rank), []
        usual, other = Family(pool, USUAL, "here"), Family(pool, OTHER, "here other")
        held: Any = usual.turn("first")
        for number in range(6):
            turn: Any = (usual if number % 2 else other).turn(f"axis {number}")
            assert turn.group is not held.group
            seen.append(turn.group.limit)
            del turn
            meet(f"{number}", rank)
        return seen

    first, second = on_two_ranks(program)
    assert first == second == [OTHER, USUAL] * 3


# ----------------------------------------------------------------------------------------------------------- when


def test_an_adopted_group_is_connected_when_all_ranks_have_come(asked: Torch) -> None:
    world: Any = [Group("world", USUAL, False) for _ in range(2)]

    def program(rank: int) -> Any:
        time.sleep(0.2 * rank)
        family = Family(pool_of(rank, world[rank]), USUAL, "here")
        assert family.base.connected  # type: ignore[attr-defined]
        return family.turn("a").group is world[rank]

    assert on_two_ranks(program) == [True, True]
    assert asked.made == []


def test_who_comes_alone_is_told_who_does_not(asked: Torch) -> None:
    limit = timedelta(seconds=0.2)
    with pytest.raises(mc.CommError, match=r"index 1 did not come to set up a process group within 0\.\d+ s"):
        Family(Pool((0, 1), 0, limit, "here", None, CARD), limit, "here")
    world: Any = Group("world", limit, False)
    with pytest.raises(mc.CommError, match=r"index 1 did not come"):
        Family(Pool((0, 1), 0, limit, "there", world, CARD), limit, "there")
    assert not world.connected
    assert asked.made == []


def test_a_graph_cannot_make_a_communicator(asked: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *_ = stand_in(monkeypatch)
    captures = [False]
    monkeypatch.setattr(type(module), "is_current_stream_capturing", lambda self: captures[0], raising=False)
    module.begin()
    pool: Any = Pool((0,), 0, USUAL, "here", None, CARD)
    captures[0] = True
    said = r"(?s)no communicator yet, and none can be made while a CUDA graph is captured.*the same call once, before"
    with pytest.raises(mc.MeshError, match=said):
        Family(pool, USUAL, "here")
    captures[0] = False
    family = Family(pool, USUAL, "here")
    captures[0] = True
    held = family.turn("a")
    assert held.group is family.base  # it is there
    for _ in range(2):
        with pytest.raises(mc.MeshError, match=said):
            family.turn("b")
    captures[0] = False
    assert family.turn("b").group is not family.base
    assert len(pool._uses) == len(asked.made) == 2  # who asks again is given the same


def test_a_mesh_connects_its_axes_where_nccl_moves_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for config, wanted in (("cpu:gloo,cuda:nccl", 1), ("nccl", 1), ("gloo", 0), ("cpu:gloo,xpu:xccl", 0)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        group: Any = object()
        link = ProcessLink(group, (0, 1), 0, Log((0, 1), 0), "a")
        link.makers["turn"] = lambda: taken.append("") or turns.Turn(group, [])  # type: ignore[func-returns-value]
        link.connect()
        link.connect()
        assert len(taken) == wanted, config
        taken.clear()


def connected_axes() -> tuple[list[str], list[str]]:
    mc.init()
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessLink, "connect", lambda self: seen.append(self.name.split(": ")[1].split(" over ")[0]))
        mesh = mc.make_mesh({"a": 2, "b": 2})
        at_once = list(seen)
        mesh.axis(("b", "a"))
    return at_once, seen[len(at_once) :]


def test_make_mesh_connects_while_all_ranks_are_there(pool4: mc.WorkerPool) -> None:
    for at_once, later in pool4.run(connected_axes):
        assert at_once == ["a", "b"]
        assert later == []  # who looks at an axis waits for nobody


def some_of_a_tuple() -> str:
    mc.init()
    mesh, usual = mc.make_mesh({"a": 2, "b": 2}, timeout=1.5), mc.make_mesh({"all": 4})
    mc.barrier("all", mesh=usual)  # however late one of them begins
    if mesh.rank in (1, 2):
        time.sleep(2.5)
        return ""
    with pytest.raises(mc.CommError) as caught:
        mc.exchange([(torch.ones(1), 3 - mesh.rank)], [(3 - mesh.rank, (1,), torch.float32)], ("a", "b"), mesh=mesh)
    return str(caught.value)


def test_a_first_message_over_a_tuple_says_who_is_not_there(pool4: mc.WorkerPool) -> None:
    """torch said that a key of a store was not there, and no more."""
    found = pool4.run(some_of_a_tuple)
    for rank in (0, 3):
        assert "indices 1, 2 did not come to set up a process group within 1.5" in found[rank]
        assert "the first call over an axis" in found[rank]


def other_time_outs() -> list[tuple[bool, float]]:
    """On gloo, as if its groups were as large as NCCL's."""
    mc.init()
    made: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        new = _torch.new_group

        def new_group(ranks: Any, name: str, limit: timedelta, device: torch.device | None = None) -> Any:
            made.append(device is not None)
            return new(ranks, name, limit, device)

        patch.setattr(_torch, "shares_communicators", lambda backend: True)
        patch.setattr(_torch, "new_group", new_group)
        for seconds in (31, 32, 33, 34):
            mesh = mc.make_mesh({"a": 4}, timeout=seconds)
            group = mesh.axis("a").link.group  # type: ignore[attr-defined]
            x = torch.ones(1)
            group.allreduce([x]).wait()
            assert x.item() == 4
            assert mc.all_reduce(torch.ones(2), "a", mesh=mesh).tolist() == [4.0, 4.0]
            mc.barrier("a", mesh=mesh)
            del mesh, group
            gc.collect()
    return made  # type: ignore[return-value]


def test_real_groups_take_another_time_out(pool4: mc.WorkerPool) -> None:
    for made in pool4.run(other_time_outs):
        assert made.count(False) == 4  # carry messages alone
        assert 1 <= made.count(True) <= 3
