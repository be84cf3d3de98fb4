"""JAX-style functional SPMD for PyTorch: pure, differentiable collectives over named mesh axes."""

from meshcomm.collectives.exchange import all_to_all, permute, shift
from meshcomm.collectives.gather import all_gather, all_gather_invariant, shard
from meshcomm.collectives.one_rank import barrier, exchange, gather, recv, reduce, scatter, send
from meshcomm.collectives.place import axis_index, axis_size
from meshcomm.collectives.reduce import all_reduce, broadcast, pvary, reduce_scatter
from meshcomm.errors import CommError, MeshError, VaryingError
from meshcomm.launch import launch
from meshcomm.mesh import Mesh, current_mesh, make_mesh, use_mesh
from meshcomm.runtime.world import init, shutdown
from meshcomm.work import Work, wait

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Mesh",
    "MeshError",
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
    "current_mesh",
    "exchange",
    "gather",
    "init",
    "launch",
    "make_mesh",
    "permute",
    "pvary",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shard",
    "shift",
    "shutdown",
    "use_mesh",
    "wait",
]
