"""JAX-style functional SPMD for PyTorch: pure, differentiable collectives over named mesh axes."""

import importlib
import typing

from meshcomm.collectives.exchange import all_to_all, permute, shift
from meshcomm.collectives.gather import all_gather, all_gather_invariant, shard
from meshcomm.collectives.one_rank import barrier, exchange, gather, recv, reduce, scatter, send
from meshcomm.collectives.place import axis_index, axis_size
from meshcomm.collectives.reduce import all_reduce, broadcast, pvary, reduce_scatter
from meshcomm.collectives.seeds import fork_rng, sync_seed
from meshcomm.errors import CommError, MeshError, VaryingError
from meshcomm.launch import launch
from meshcomm.mesh import Mesh, current_mesh, make_mesh, use_mesh
from meshcomm.runtime.world import init, shutdown
from meshcomm.work import Work, wait

if typing.TYPE_CHECKING:
    from meshcomm.layout.dtensor import from_dtensor, layout_from, placements, to_dtensor
    from meshcomm.layout.einsum import einsum
    from meshcomm.layout.plan import Plan, plan
    from meshcomm.layout.reshard import reshard
    from meshcomm.layout.shapes import global_shape, layout_of, local_shape, partition_spec
    from meshcomm.spmd.check_vma import check_vma, mark_varying
    from meshcomm.spmd.rng import rng
    from meshcomm.spmd.shard_map import shard_map

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Mesh",
    "MeshError",
    "Plan",
    "VaryingError",
    "Work",
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "check_vma",
    "current_mesh",
    "einsum",
    "exchange",
    "fork_rng",
    "from_dtensor",
    "gather",
    "global_shape",
    "init",
    "launch",
    "layout_from",
    "layout_of",
    "local_shape",
    "make_mesh",
    "mark_varying",
    "partition_spec",
    "permute",
    "placements",
    "plan",
    "pvary",
    "recv",
    "reduce",
    "reduce_scatter",
    "reshard",
    "rng",
    "scatter",
    "send",
    "shard",
    "shard_map",
    "shift",
    "shutdown",
    "sync_seed",
    "to_dtensor",
    "use_mesh",
    "wait",
]

# What stands above the collectives is imported when it is first asked for; DTensor, which some needs, takes a second.
_LATER = {
    "Plan": "meshcomm.layout.plan",
    "check_vma": "meshcomm.spmd.check_vma",
    "einsum": "meshcomm.layout.einsum",
    "from_dtensor": "meshcomm.layout.dtensor",
    "global_shape": "meshcomm.layout.shapes",
    "layout_from": "meshcomm.layout.dtensor",
    "layout_of": "meshcomm.layout.shapes",
    "local_shape": "meshcomm.layout.shapes",
    "mark_varying": "meshcomm.spmd.check_vma",
    "partition_spec": "meshcomm.layout.shapes",
    "placements": "meshcomm.layout.dtensor",
    "plan": "meshcomm.layout.plan",
    "reshard": "meshcomm.layout.reshard",
    "rng": "meshcomm.spmd.rng",
    "shard_map": "meshcomm.spmd.shard_map",
    "to_dtensor": "meshcomm.layout.dtensor",
}

if not typing.TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
