"""Who a process is, with nothing initialised too; what one rank does for all; a barrier that names the absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm as mc
from meshcomm.runtime.start import devices, world
from meshcomm.training import process
from meshcomm.training.main_only import main_only

Run = Callable[..., list[Any]]

TWO_NODES = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
             "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}  # fmt: skip
THREE_NODES = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[007,09-10]", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
LAUNCHERS = ("OMPI_", "PMI", "MPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher's variables, and no world before or after."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    world.shutdown()
    yield monkeypatch
    world.shutdown()


def told() -> tuple[Any, ...]:
    ask = (process.rank, process.world_size, process.local_rank, process.local_world_size, process.node_rank)
    return (
        *(question() for question in ask),
        process.backend(),
        str(process.device()),
        process.is_distributed(),
        process.is_main(),
    )


def test_a_plain_process(plain: pytest.MonkeyPatch) -> None:
    assert told() == (0, 1, 0, 1, 0, None, "cpu", False, True)
    assert process.get_dist_info() == (0, 1)
    with torch.device("meta"):
        assert process.device().type == "meta"
    mesh = mc.make_mesh({"dp": 1})
    assert process.is_main("dp", mesh=mesh)
    mesh.device_mesh  # noqa: B018  # makes a process group of one, for torch's sake
    assert dist.is_initialized()
    assert told() == (0, 1, 0, 1, 0, None, "cpu", False, True)


def test_ranks_of_a_launch(run4: Run) -> None:
    in_process = [(r, 4, r, 4, 0, "in-process", "cpu", True, r == 0) for r in range(4)]
    processes = [(r, 4, r, 4, 0, "gloo", "cpu", True, r == 0) for r in range(4)]
    assert run4(told) in (in_process, processes)


def test_a_launch_within_one_process_comes_before_everything(plain: pytest.MonkeyPatch) -> None:
    def inside() -> tuple[Any, ...]:
        for name, value in TWO_NODES.items():
            plain.setenv(name, value)
        return told()[:2]

    assert mc.launch(inside, ranks=2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TWO_NODES, (5, 8, 1, 4, 1)),
        (THREE_NODES, (6, 7, 0, 1, 2)),
        ({**THREE_NODES, "SLURM_PROCID": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}, (4, 7, 1, 3, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, 0)),
    ],
    ids=["torchrun on two nodes", "srun on three", "another of its nodes", "alone"],
)
def test_before_init_the_launcher_tells(
    plain: pytest.MonkeyPatch, environ: dict[str, str], expected: tuple[int, ...]
) -> None:
    for name, value in environ.items():
        plain.setenv(name, value)
    assert told() == (*expected, "gloo", "cpu", True, expected[0] == 0) or torch.accelerator.is_available()
    assert told()[:5] == expected
    assert not dist.is_initialized(), "asking starts nothing"


def test_before_init_on_an_accelerator(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(devices, "accelerator", lambda: ("cuda", "nccl"))
    plain.setattr(torch.accelerator, "device_count", lambda: 4)
    for name, value in {**TWO_NODES, "LOCAL_RANK": "3"}.items():
        plain.setenv(name, value)
    assert (process.backend(), str(process.device())) == ("cpu:gloo,cuda:nccl", "cuda:3")


def test_what_the_launcher_does_not_tell(plain: pytest.MonkeyPatch) -> None:
    for name, value in OPENMPI.items():
        plain.setenv(name, value)
    assert (process.rank(), process.world_size(), process.local_rank()) == (3, 4, 1)
    with pytest.raises(mc.MeshError, match=r"(?s)meshcomm.node_rank: .*has not told.*fix: call mc.init\(\) first"):
        process.node_rank()
    plain.delenv("OMPI_COMM_WORLD_LOCAL_RANK")
    plain.delenv("OMPI_COMM_WORLD_LOCAL_SIZE")
    for question in (process.local_rank, process.local_world_size):
        with pytest.raises(mc.MeshError, match=f"meshcomm.{question.__name__}: "):
            question()
    plain.setattr(devices, "accelerator", lambda: ("cuda", "nccl"))
    with pytest.raises(mc.MeshError, match=r"meshcomm.device: "):
        process.device()
    plain.setenv("OMPI_COMM_WORLD_SIZE", "")
    with pytest.raises(mc.MeshError, match="OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not"):
        process.rank()


def test_a_group_of_somebody_else(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        assert told() == (0, 1, 0, 1, 0, "cpu:gloo,cuda:gloo", "cpu", True, True) or told()[:2] == (0, 1)
        assert process.is_distributed()
    finally:
        dist.destroy_process_group()
    assert not process.is_distributed()


def test_initialised_again(plain: pytest.MonkeyPatch) -> None:
    for size in (8, 4):
        world.init(backend="fake", rank=3, world_size=size)
        assert process.get_dist_info() == (3, size)
        world.shutdown()
        assert process.get_dist_info() == (0, 1)


def test_main_along_an_axis() -> None:
    def main() -> list[bool]:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            return [process.is_main(axis) for axis in (None, "a", "b", ("b", "a"))]

    t, f = True, False
    assert mc.launch(main, ranks=4) == [[t, t, t, t], [f, t, f, f], [f, f, t, f], [f, f, f, f]]


# ---------------------------------------------------------------------------------------------------------- main_only


@main_only
def alone(seen: list[int]) -> str:
    """Does it."""
    seen.append(process.rank())
    return "done"


def test_others_get_none_at_once() -> None:
    seen: list[int] = []
    assert mc.launch(alone, ranks=3, args=(seen,)) == ["done", None, None]
    assert seen == [0]
    assert alone([]) == "done"
    assert (alone.__name__, alone.__doc__) == ("alone", "Does it.")


def shared() -> list[Any]:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    ran: list[str] = []

    def work(what: str, *, rank: int) -> dict[str, Any]:
        ran.append(what)
        return {"by": rank, "x": torch.ones(2)}

    found = []
    with mc.use_mesh(mesh):
        for axis in (None, "a", ("b", "a")):
            fn = main_only(axis=axis, broadcast=True)(work)
            found.append(fn(repr(axis), rank=mesh.rank)["by"])
        found.append(main_only(axis="b")(work)("quiet", rank=mesh.rank) is not None)
    return [found, ran]


def test_the_result_is_shared(run4: Run) -> None:
    assert run4(shared) == [
        [[0, 0, 0, True], ["None", "'a'", "('b', 'a')", "quiet"]],
        [[0, 1, 0, False], ["'a'"]],
        [[0, 0, 0, True], ["quiet"]],
        [[0, 1, 0, False], []],
    ]


def test_as_a_context() -> None:
    options = main_only(broadcast=True)  # one object for all ranks of the process, nested in itself

    def main() -> list[Any]:
        with mc.use_mesh(mc.make_mesh({"a": 3})) as mesh:
            with options as outer:
                if outer:
                    outer.result = ["outer", mesh.rank]
                with options as inner:
                    inner.result = ["inner", mesh.rank]
            with main_only() as quiet:
                quiet.result = mesh.rank
        return [bool(outer), outer.result, inner.result, quiet.result]

    assert mc.launch(main, ranks=3) == [[r == 0, ["outer", 0], ["inner", 0], r] for r in range(3)]


def failing(case: str) -> str:
    mesh = mc.make_mesh({"a": 3})

    @main_only(broadcast=True, mesh=mesh)
    def fn() -> Any:
        if case == "function":
            raise KeyError("gone")
        return lambda: 0

    try:
        if case in ("function", "pickle"):
            fn()
        with main_only(axis="a", broadcast=True, mesh=mesh) as main:
            if main and case == "main":
                raise KeyError("gone")
            if not main and case == "others":
                raise OSError(f"full {mesh.rank}")
    except (mc.MeshError, KeyError, OSError) as error:
        mc.barrier("a", mesh=mesh)
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.mark.parametrize(
    ("case", "own", "text"),
    [
        ("function", {0: "KeyError: 'gone'"}, "MeshError: meshcomm.main_only: index 0: raised KeyError: 'gone'."),
        ("main", {0: "KeyError: 'gone'"}, "MeshError: meshcomm.main_only: index 0: raised KeyError: 'gone'."),
        ("pickle", {}, "MeshError: meshcomm.main_only: index 0: result is a lambda"),
        (
            "others", {1: "OSError: full 1", 2: "OSError: full 2"},
            "MeshError: meshcomm.main_only: index 1: raised OSError: full 1; index 2: raised OSError: full 2.",
        ),
    ],
)  # fmt: skip
def test_what_one_rank_raises_is_raised_on_all(case: str, own: dict[int, str], text: str) -> None:
    for rank, found in enumerate(mc.launch(failing, ranks=3, args=(case,))):
        if rank in own:
            assert found == own[rank], "its own error"
        else:
            assert found.startswith(text)


def test_without_broadcast_an_error_is_the_main_rank_s_own() -> None:
    @main_only
    def fn() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fn()
    with pytest.raises(ZeroDivisionError), main_only():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: main_only("dp"), "fn is not callable but str"),  # type: ignore[call-overload]
        (lambda: main_only(broadcast=1), "broadcast=1 is not a bool"),  # type: ignore[call-overload]
        (lambda: main_only(broadcast=True)(print)(), "meshcomm.main_only: there is no mesh"),
        (lambda: main_only(axis="z", mesh=mc.make_mesh({"a": 1}))(print)(), "meshcomm.is_main: no axis 'z'"),
        (
            lambda: main_only(axis="z", broadcast=True, mesh=mc.make_mesh({"a": 1}))(print)(),
            "meshcomm.main_only: no axis 'z'",
        ),
    ],
)
def test_arguments_of_main_only(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(mc.MeshError, match=text):
        call()


# ------------------------------------------------------------------------------------------ a barrier with a time-out


def late_one() -> list[str]:
    """Index 2 of the middle barrier comes when the others have given up; it is told, and all go on together."""
    mesh = mc.make_mesh({"a": 4})
    heard = []
    for limit in (5, 0.2, timedelta(seconds=5)):
        try:
            if limit == 0.2 and mesh.rank == 2:
                mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
            mc.barrier("a", timeout=limit, mesh=mesh)
            heard.append("all here")
        except mc.CommError as error:
            heard.append(str(error))
            if mesh.rank == 0:
                mc.send(torch.ones(1), "a", 2, mesh=mesh)
    return heard


def test_a_barrier_names_the_absent_on_all_ranks(run4: Run) -> None:
    for first, second, third in run4(late_one):
        assert (first, third) == ("all here", "all here")
        assert second.startswith(
            "meshcomm.barrier: not everybody came within 0.2 s.\n  got: absent: index 2 (rank 2)\n  fix: "
        )


def two_absent() -> str:
    mesh = mc.make_mesh({"b": 2, "a": 2})
    if mesh.rank in (1, 2):
        return "elsewhere"
    try:
        mc.barrier(("a", "b"), 0.1, mesh=mesh)
    except mc.CommError as error:
        return str(error).split("\n")[1].strip()
    return "all here"


def test_several_absent_along_a_tuple_of_axes() -> None:
    """Indices along the axis as written, and ranks of the world."""
    gone = "got: absent: index 1 (rank 2), index 2 (rank 1)"
    assert mc.launch(two_absent, ranks=4) == [gone, "elsewhere", "elsewhere", gone]


def subgroups(times: int) -> int:
    """Barriers of several groups side by side; the store keeps nothing of those that are over but the last."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    for _ in range(times):
        for axis in ("b", "a", ("a", "b")):
            mc.barrier(axis, 20, mesh=mesh)
    return times


def test_barriers_of_groups(run4: Run) -> None:
    assert run4(subgroups, 3) == [3] * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"timeout": "5"}, "timeout must be a positive number"),
        ({"timeout": 5, "async_op": True}, "timeout= with async_op=True"),
        ({"axis": "z"}, "no axis 'z'"),
    ],
)
def test_arguments_of_barrier(arguments: dict[str, Any], text: str) -> None:
    def main() -> None:
        with pytest.raises(mc.MeshError, match=f"meshcomm.barrier: {text}"):
            mc.barrier(**{"axis": "a", "mesh": mc.make_mesh({"a": 2}), **arguments})

    mc.launch(main, ranks=2)


def on_a_plain_process() -> None:
    mc.barrier("a", 1, mesh=mc.make_mesh({"a": 1}))


def test_a_barrier_of_one() -> None:
    on_a_plain_process()


def timeout_on_some() -> None:
    mesh = mc.make_mesh({"a": 2})
    mc.barrier("a", 5.0 if mesh.rank else None, mesh=mesh)


def test_a_time_out_on_some_ranks_only() -> None:
    with pytest.raises(mc.CommError, match=r"different calls[\s\S]*barrier over[\s\S]*barrier \(timeout=5.0\) over"):
        mc.launch(timeout_on_some, ranks=2)


def adopted_twice(folder: str) -> list[str]:
    """A group that is adopted anew counts its barriers on, for its store remembers those before."""
    here = world.current()
    assert here is not None
    rank, heard = here.rank, []
    world.shutdown()
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=3)
    for _ in range(2):
        mesh = mc.make_mesh({"a": 3})
        mc.barrier("a", 20, mesh=mesh)
        if rank == 1:  # comes when it is too late
            mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
        with pytest.raises(mc.CommError) as caught:
            mc.barrier("a", 0.3, mesh=mesh)
        heard.append(str(caught.value).split("\n")[1].strip())
        if rank == 0:
            mc.send(torch.ones(1), "a", 1, mesh=mesh)
        mc.shutdown()
    dist.destroy_process_group()
    return heard


def test_barriers_of_a_group_of_somebody_else(tmp_path: Path) -> None:
    found = mc.launch(adopted_twice, ranks=3, args=(str(tmp_path),), runtime="processes", timeout=280)
    assert found == [["got: absent: index 1 (rank 1)"] * 2] * 3
