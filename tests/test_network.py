"""Which interface ranks of several hosts are told to use, and how it is found that they do not reach each other."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from meshcomm.errors import CommError
from meshcomm.runtime.health import hosts
from meshcomm.runtime.start import network, rendezvous
from meshcomm.runtime.start.network import Address, Door, Seat, choose

TWO = [Address("docker0", "172.17.0.1"), Address("eth0", "127.9.0.1"), Address("eth1", "127.9.1.1")]
THERE = Seat("there", "node1", "127.9.1.2", [Address("eth1", "127.9.1.2")])


@pytest.mark.parametrize(
    ("leads", "environ", "expected"),
    [
        ("127.9.1.1", {}, "eth1"),
        ("127.9.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}, None),
        ("127.9.0.1", {"NCCL_SOCKET_IFNAME": "eth1"}, "eth1"),
        ("127.9.0.1", {"NCCL_SOCKET_IFNAME": "=eth"}, None),
        ("127.9.0.1", {"NCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ("127.9.0.1", {"NCCL_SOCKET_IFNAME": "^docker,eth0"}, "eth1"),
        ("127.9.0.1", {"TP_SOCKET_IFNAME": "eth1"}, "eth1"),
        ("", {}, "eth0"),
        ("172.17.0.1", {}, "docker0"),
    ],
)
def test_the_interface(leads: str, environ: dict[str, str], expected: str | None) -> None:
    mine = Seat("here", "node0", leads, TWO)
    found = choose(mine, [mine, THERE], environ)
    assert (None if found is None else found.interface) == expected


def test_the_interface_to_where_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of rank 0 its own name leads nowhere."""
    monkeypatch.setattr(network, "source", {"127.9.1.2": "127.9.1.1"}.get)
    mine = Seat("here", "node0", "", TWO)
    assert choose(mine, [mine, THERE], {}) == ("eth1", "it leads to node1 (127.9.1.2)")
    unknown = THERE._replace(leads="")
    assert choose(mine, [mine, unknown], {}) == ("eth1", "it leads to node1 (127.9.1.2)")


def test_one_machine_takes_loopback() -> None:
    mine = Seat("here", "node0", "127.9.0.1", TWO)
    found = choose(mine, [mine, mine], {})
    assert found is not None
    assert found.interface == "lo"
    assert network.bound("lo") == "127.0.0.1"


def test_addresses_are_those_of_the_system() -> None:
    found = network.addresses()
    assert Address("lo", "127.0.0.1") in found
    assert {each.interface for each in found} <= {name for _, name in socket.if_nameindex()}
    assert network.source("127.0.0.1") == network.source("no-such-host.invalid") == ""
    seat = Seat.mine("host", "127.0.0.1")
    assert Seat.read(json.loads(json.dumps(seat))) == seat


def test_who_does_not_answer() -> None:
    door, other = Door("127.0.0.1"), Door("127.0.0.1")
    nobody = Door("203.0.113.9")
    assert "nothing can listen there" in nobody.error
    strange = json.dumps([*json.loads(door.write())[:2], "00" * 16, ""])
    doors = {0: door.write(), 1: other.write(), 2: nobody.write(), 3: strange}
    assert network.try_all(doors, 0, 5) == {2: nobody.error, 3: "something else answers there"}
    other.close()
    assert network.try_all(doors, 0, 5)[1] == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = json.dumps(["127.0.0.1", silent.getsockname()[1], "00" * 16, ""])
        assert network.try_all({5: mute}, 0, 0.2) == {5: "no answer within 0.2 s"}
    door.close()


def test_every_rank_is_told(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Four ranks, two on each host; the second host listens where nobody is."""
    request.addfinalizer(hosts.forget)
    seats = [Seat("a", "node0", "", []), Seat("b", "node1", "", [])]
    seats = [seats[0], seats[0], seats[1], seats[1]]
    for second, expected in (("127.0.0.1", None), ("203.0.113.9", "ranks 2, 3 (node1, 203.0.113.9)")):
        store, told = HashStore(), dict[int, str]()
        monkeypatch.setattr(network, "bound", lambda name: name)

        def run(rank: int, store: HashStore = store, told: dict[int, str] = told, second: str = second) -> None:
            try:
                at = second if rank > 1 else "127.0.0.1"
                rendezvous.reached(store, rank, seats, at, timedelta(seconds=20))
                told[rank] = ""
            except CommError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(told) == [0, 1, 2, 3]
        if expected is None:
            assert set(told.values()) == {""}
        else:
            assert all(f"cannot reach {expected}: nothing can listen there" in text for text in told.values()), told
