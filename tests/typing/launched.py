"""launch with arguments and results, sweeps over meshes, errors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from typing_extensions import assert_type

import meshcomm as mc


@dataclass
class Config:
    width: int = 4
    runtime: Literal["in-process", "processes"] = "in-process"


@dataclass
class Result:
    rank: int
    total: float
    where: dict[str, int]


def body(config: Config, scale: float = 1.0) -> Result:
    mesh = mc.make_mesh({"dp": 2, "tp": -1}, timeout=timedelta(seconds=30))
    x = torch.full((config.width,), scale * mesh.rank)
    total = mc.all_reduce(x, mesh.axis_names, timeout=5, mesh=mesh)
    mc.barrier("dp", mesh=mesh)
    return Result(mesh.rank, total.sum().item(), mesh.coordinate)


def sweep(configs: list[Config]) -> dict[int, list[Result]]:
    found: dict[int, list[Result]] = {}
    for config in configs:
        results = mc.launch(body, ranks=4, args=(config,), kwargs={"scale": 2.0}, runtime=config.runtime, timeout=60)
        assert_type(results, list[Result])
        found[config.width] = results
    return found


def caught() -> str:
    try:
        mc.launch(lambda: mc.all_reduce(torch.ones(3), "nowhere", mesh=mc.make_mesh({"dp": 2})), ranks=2)
    except mc.MeshError as error:
        return str(error)
    except (mc.CommError, mc.VaryingError):
        raise
    return ""


def main() -> list[float]:
    found = sweep([Config(), Config(width=2)])
    assert mc.current_mesh() is None
    assert caught()
    return [result.total for results in found.values() for result in results]


if __name__ == "__main__":
    main()
