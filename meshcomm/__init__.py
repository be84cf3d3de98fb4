"""JAX-style functional SPMD for PyTorch: pure, differentiable collectives over named mesh axes."""

import importlib
import typing

from meshcomm.runtime.process.garbage import ToStay as _ToStay

with _ToStay():  # what is imported here may be what makes one fall due, of all that torch has
    from meshcomm.collectives.agree import fork_rng, sync_seed
    from meshcomm.collectives.broadcast import broadcast
    from meshcomm.collectives.gather import all_gather, all_gather_invariant, shard
    from meshcomm.collectives.place import argmax, argmin, axis_index, axis_size
    from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
    from meshcomm.errors import CommError, HangError, MeshError, VaryingError, VerifyError
    from meshcomm.launch import launch
    from meshcomm.make_mesh import make_mesh
    from meshcomm.mesh import Mesh, current_mesh, use_mesh
    from meshcomm.runtime.hooks.dumps import dump_collectives
    from meshcomm.runtime.start.world import init, shutdown
    from meshcomm.runtime.transports.dry.world import is_dry
    from meshcomm.work import Work, wait

if typing.TYPE_CHECKING:
    from meshcomm import parallel as parallel
    from meshcomm.collectives.exchange.all_to_all import all_to_all
    from meshcomm.collectives.exchange.permute import permute, shift
    from meshcomm.collectives.exchange.ragged import all_to_all_ragged
    from meshcomm.collectives.messages import exchange, recv, send, tie
    from meshcomm.collectives.one_rank import barrier, gather, reduce, scatter
    from meshcomm.collectives.scan import scan
    from meshcomm.dry.hardware import Hardware, hardware
    from meshcomm.dry.planning.advice import Advice
    from meshcomm.dry.planning.sweep import Sweep, sweep
    from meshcomm.dry.run import DryRun, dry_run
    from meshcomm.layout.dtensor import from_dtensor, layout_from, placements, to_dtensor
    from meshcomm.layout.einsum import einsum
    from meshcomm.layout.plan import Plan, plan
    from meshcomm.layout.reshard import reshard
    from meshcomm.layout.shapes import global_shape, layout_of, local_shape, partition_spec
    from meshcomm.layout.show import show
    from meshcomm.objects.letters import recv_object, send_object
    from meshcomm.objects.objects import all_gather_object, broadcast_object, gather_object, scatter_object
    from meshcomm.objects.results import collect_results
    from meshcomm.spmd.random.rng import rng
    from meshcomm.spmd.shard_map.function import shard_map
    from meshcomm.spmd.types.check_vma import check_vma, mark_varying
    from meshcomm.tracing.budget import comm_budget
    from meshcomm.tracing.event import TraceEvent
    from meshcomm.tracing.traces import Trace, trace
    from meshcomm.training.batches import MeshBatchSampler
    from meshcomm.training.equal import assert_invariant, assert_varying, varying_axes
    from meshcomm.training.main_only import main_only
    from meshcomm.training.metrics import Metrics
    from meshcomm.training.process import (
        backend,
        device,
        get_dist_info,
        is_distributed,
        is_main,
        local_rank,
        local_world_size,
        node_rank,
        rank,
        world_size,
    )
    from meshcomm.training.reductions import all_reduce_params, weighted_mean
    from meshcomm.training.split_rows import split_rows
    from meshcomm.verifying.hangs.proof import Proof
    from meshcomm.verifying.hangs.prove import prove_no_hang
    from meshcomm.verifying.report import Finding, Report
    from meshcomm.verifying.training.verify import verify_training
    from meshcomm.verifying.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "CommError",
    "DryRun",
    "Finding",
    "HangError",
    "Hardware",
    "Mesh",
    "MeshBatchSampler",
    "MeshError",
    "Metrics",
    "Plan",
    "Proof",
    "Report",
    "Sweep",
    "Trace",
    "TraceEvent",
    "VaryingError",
    "VerifyError",
    "Work",
    "all_gather",
    "all_gather_invariant",
    "all_gather_object",
    "all_reduce",
    "all_reduce_params",
    "all_to_all",
    "all_to_all_ragged",
    "argmax",
    "argmin",
    "assert_invariant",
    "assert_varying",
    "axis_index",
    "axis_size",
    "backend",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check_vma",
    "collect_results",
    "comm_budget",
    "current_mesh",
    "device",
    "dry_run",
    "dump_collectives",
    "einsum",
    "exchange",
    "fork_rng",
    "from_dtensor",
    "gather",
    "gather_object",
    "get_dist_info",
    "global_shape",
    "hardware",
    "init",
    "is_distributed",
    "is_dry",
    "is_main",
    "launch",
    "layout_from",
    "layout_of",
    "local_rank",
    "local_shape",
    "local_world_size",
    "main_only",
    "make_mesh",
    "mark_varying",
    "node_rank",
    "partition_spec",
    "permute",
    "placements",
    "plan",
    "prove_no_hang",
    "pvary",
    "rank",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "reshard",
    "rng",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "shard",
    "shard_map",
    "shift",
    "show",
    "shutdown",
    "split_rows",
    "sweep",
    "sync_seed",
    "tie",
    "to_dtensor",
    "trace",
    "use_mesh",
    "varying_axes",
    "verify",
    "verify_training",
    "wait",
    "weighted_mean",
    "world_size",
]

# What stands above the collectives, and what few programs need of these, is imported when it is first asked for;
# DTensor, which some needs, takes a second.
_LATER = {
    name: module
    for module, names in {
        "meshcomm.collectives.exchange.all_to_all": "all_to_all",
        "meshcomm.collectives.exchange.permute": "permute shift",
        "meshcomm.collectives.exchange.ragged": "all_to_all_ragged",
        "meshcomm.collectives.messages": "exchange recv send tie",
        "meshcomm.collectives.one_rank": "barrier gather reduce scatter",
        "meshcomm.collectives.scan": "scan",
        "meshcomm.dry.hardware": "Hardware hardware",
        "meshcomm.dry.planning.advice": "Advice",
        "meshcomm.dry.planning.sweep": "Sweep sweep",
        "meshcomm.dry.run": "DryRun dry_run",
        "meshcomm.layout.dtensor": "from_dtensor layout_from placements to_dtensor",
        "meshcomm.layout.einsum": "einsum",
        "meshcomm.layout.plan": "Plan plan",
        "meshcomm.layout.reshard": "reshard",
        "meshcomm.layout.shapes": "global_shape layout_of local_shape partition_spec",
        "meshcomm.layout.show": "show",
        "meshcomm.objects.letters": "recv_object send_object",
        "meshcomm.objects.objects": "all_gather_object broadcast_object gather_object scatter_object",
        "meshcomm.objects.results": "collect_results",
        "meshcomm.spmd.random.rng": "rng",
        "meshcomm.spmd.shard_map.function": "shard_map",
        "meshcomm.spmd.types.check_vma": "check_vma mark_varying",
        "meshcomm.tracing.budget": "comm_budget",
        "meshcomm.tracing.event": "TraceEvent",
        "meshcomm.tracing.traces": "Trace trace",
        "meshcomm.training.equal": "assert_invariant assert_varying varying_axes",
        "meshcomm.training.main_only": "main_only",
        "meshcomm.training.batches": "MeshBatchSampler",
        "meshcomm.training.metrics": "Metrics",
        "meshcomm.training.process": (
            "backend device get_dist_info is_distributed is_main local_rank local_world_size node_rank rank world_size"
        ),
        "meshcomm.training.reductions": "all_reduce_params weighted_mean",
        "meshcomm.training.split_rows": "split_rows",
        "meshcomm.verifying.hangs.proof": "Proof",
        "meshcomm.verifying.hangs.prove": "prove_no_hang",
        "meshcomm.verifying.report": "Finding Report",
        "meshcomm.verifying.training.verify": "verify_training",
        "meshcomm.verifying.verify": "verify",
    }.items()
    for name in names.split()
}

if not typing.TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name):
        if name == "parallel":
            return importlib.import_module("meshcomm.parallel")
        if name not in _LATER:
            raise importlib.import_module("meshcomm.elsewhere").missing(__name__, name)
        with _ToStay():
            value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "parallel"]
