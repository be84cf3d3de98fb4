"""Each row of the table in docs/running.md of what works in one runtime only is run on both."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import as_compiling
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.start import by_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "running.md"
LIMIT = 100.0
SEEN: list[int] = []


def mesh_of_2() -> mc.Mesh:
    return mc.make_mesh({"dp": 2})


def device_mesh() -> Any:
    return tuple(mesh_of_2().device_mesh.shape)


def torch_distributed() -> float:
    mesh_of_2()
    x = torch.ones(())
    dist.all_reduce(x)
    return x.item()


def compiled() -> list[float]:
    mesh = mesh_of_2()
    doubled = torch.compile(lambda x: mc.all_reduce(x, "dp", mesh=mesh) * 2, backend="eager", fullgraph=True)
    result: Tensor = doubled(torch.ones(2))
    return result.tolist()


def in_a_thread() -> float:
    mesh, told = mesh_of_2(), []

    def body() -> None:
        try:
            told.append(mc.all_reduce(torch.ones(()), "dp", mesh=mesh).item())
        except mc.MeshError as error:
            told.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(told[0], mc.MeshError):
        raise told[0]
    return told[0]


def different() -> None:
    mesh = mesh_of_2()
    mc.all_reduce(torch.ones(2 + mesh.rank), "dp", mesh=mesh)


def patience() -> float:
    mesh = mesh_of_2()
    if mesh.rank == 0:
        return mc.all_reduce(torch.ones(()), "dp", mesh=mesh, timeout=0.5).item()
    threading.Event().wait(2)
    return mc.all_reduce(torch.ones(()), "dp", mesh=mesh).item()


def alone() -> None:
    mesh = mesh_of_2()
    if mesh.rank == 0:
        mc.barrier("dp", mesh=mesh)


def raises() -> None:
    raise ZeroDivisionError(mesh_of_2().rank)


def count() -> int:
    mesh = mesh_of_2()
    SEEN.append(mesh.rank)
    mc.barrier("dp", mesh=mesh)
    return len(SEEN)


def with_graph() -> Tensor:
    mesh_of_2()
    return torch.ones((), requires_grad=True) * 2


def not_a_value() -> mc.Mesh:
    return mesh_of_2()


def on_processes(fn: Callable[[], Any], limit: float = LIMIT) -> Any:
    return mc.launch(fn, ranks=2, runtime="processes", timeout=limit)


def caught(kind: type[BaseException], words: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
    with pytest.raises(kind, match=words or None) as told:
        run(*args, **kwargs)
    return told.value


def row_device_mesh() -> None:
    told = str(caught(mc.MeshError, "no torch process groups", mc.launch, device_mesh, ranks=2))
    assert all(name in told for name in ("mc.reshard", "mc.einsum", "mc.parallel", "runtime='processes'"))
    assert on_processes(device_mesh) == [(2,), (2,)]


def row_torch_distributed() -> None:
    caught(ValueError, "not been initialized", mc.launch, torch_distributed, ranks=2)
    assert on_processes(torch_distributed) == [2.0, 2.0]


def row_compiled() -> None:
    caught(Exception, as_compiling("torch.compile does not work on in-process ranks"), mc.launch, compiled, ranks=2)
    assert on_processes(compiled) == [[4.0, 4.0]] * 2


def row_in_a_thread() -> None:
    caught(mc.MeshError, "called outside a rank", mc.launch, in_a_thread, ranks=2)
    assert on_processes(in_a_thread) == [2.0, 2.0]


def row_different() -> None:
    told = str(caught(mc.CommError, "different calls", mc.launch, different, ranks=2))
    assert told.count("test_runtimes_table.py") == 2
    caught(mc.CommError, "different things", on_processes, different)


def row_deadlock() -> None:
    caught(mc.CommError, "deadlock", mc.launch, alone, ranks=2)
    caught(mc.CommError, "did not (end|come) within|has ended|is over", on_processes, alone, 15)


def row_patience() -> None:
    assert mc.launch(patience, ranks=2) == [2.0, 2.0]
    caught(mc.CommError, "did not come within", on_processes, patience)


def row_raises() -> None:
    caught(ZeroDivisionError, "", mc.launch, raises, ranks=2)
    assert isinstance(caught(mc.CommError, "ZeroDivisionError", on_processes, raises).__cause__, ZeroDivisionError)


def row_arguments() -> None:
    SEEN.clear()
    assert mc.launch(count, ranks=2) == [2, 2]
    assert on_processes(count) == [1, 1]


def row_lambdas() -> None:
    assert mc.launch(lambda: 3, ranks=2) == [3, 3]
    if not by_value.is_there():
        caught(mc.MeshError, "cloudpickle", mc.launch, lambda: 3, ranks=2, runtime="processes")
    else:
        assert mc.launch(lambda: 3, ranks=2, runtime="processes") == [3, 3]


def row_results() -> None:
    assert [mesh.shape["dp"] for mesh in mc.launch(not_a_value, ranks=2)] == [2, 2]
    told = caught(mc.CommError, "the result, of type Mesh, cannot be sent back", on_processes, not_a_value)
    assert isinstance(told.__cause__, mc.MeshError)


def row_graph() -> None:
    assert not any(y.is_leaf for y in mc.launch(with_graph, ranks=2))
    assert all(y.is_leaf and y.requires_grad for y in on_processes(with_graph))


ROWS: dict[str, Callable[[], None] | None] = {
    "`mesh.device_mesh`": row_device_mesh,
    "`torch.distributed` beside": row_torch_distributed,
    "a collective in code": row_compiled,
    "a collective in a thread": row_in_a_thread,
    "more GPUs": None,  # tests of the GPU
    "ranks that call different": row_different,
    "ranks that wait": row_deadlock,
    "`timeout=`": row_patience,
    "a rank raises": row_raises,
    "arguments and globals": row_arguments,
    "lambdas": row_lambdas,
    "results that": row_results,
    "a result with": row_graph,
}


SLOW = (row_compiled, row_deadlock)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=pytest.mark.thorough if run in SLOW else ())
        for start, run in ROWS.items()
        if run is not None
    ],
)
def test_the_row(start: str) -> None:
    run = ROWS[start]
    assert run is not None
    run()


def test_all_rows_are_run() -> None:
    table = PAGE.read_text().split("## What works in one runtime only", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([^|]+?) \|.*\|.*\|$", table, re.MULTILINE)
    assert len(rows) == len(ROWS), rows
    for row, start in zip(rows, ROWS, strict=True):
        assert row.startswith(start)


def leaves(code: int | None) -> int:
    mesh = mesh_of_2()
    mc.barrier("dp", mesh=mesh)
    if mesh.rank == 1:
        raise SystemExit(code)
    return mesh.rank


@pytest.mark.parametrize("runtime", ["in-process", "processes"])
def test_a_rank_that_exits_well_has_returned(runtime: Any) -> None:
    for code in (0, None):
        assert mc.launch(leaves, ranks=2, args=(code,), runtime=runtime, timeout=LIMIT) == [0, None]
