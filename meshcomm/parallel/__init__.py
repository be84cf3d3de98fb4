"""Data, fully sharded and tensor parallelism, composed of the collectives.

``fsdp`` has the functions on pytrees of parameters, ``checkpoint`` saves and loads; both are modules.
"""

import importlib
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from meshcomm.parallel import checkpoint as checkpoint
    from meshcomm.parallel import fsdp as fsdp
    from meshcomm.parallel.batch_norm import SyncBatchNorm as SyncBatchNorm
    from meshcomm.parallel.batch_norm import convert_batch_norm as convert_batch_norm
    from meshcomm.parallel.batch_norm import sync_batch_norm as sync_batch_norm
    from meshcomm.parallel.by_axes import parallel_calls as parallel_calls
    from meshcomm.parallel.by_axes import parallelize as parallelize
    from meshcomm.parallel.clip import clip_grad_norm as clip_grad_norm
    from meshcomm.parallel.context.attention import context_attention as context_attention
    from meshcomm.parallel.context.order import context_order as context_order
    from meshcomm.parallel.data.ddp import data_parallel as data_parallel
    from meshcomm.parallel.data.ddp import join as join
    from meshcomm.parallel.data.micro_batches import gathered as gathered
    from meshcomm.parallel.data.micro_batches import no_sync as no_sync
    from meshcomm.parallel.data.micro_batches import reduce_gradients as reduce_gradients
    from meshcomm.parallel.expert.balance import balance as balance
    from meshcomm.parallel.expert.experts import experts as experts
    from meshcomm.parallel.expert.grouped import grouped_matmul as grouped_matmul
    from meshcomm.parallel.fsdp.module import fully_shard as fully_shard
    from meshcomm.parallel.fsdp.state import Piece as Piece
    from meshcomm.parallel.fsdp.state import counts as counts
    from meshcomm.parallel.fsdp.state import pieces as pieces
    from meshcomm.parallel.full_state import full_state_dict as full_state_dict
    from meshcomm.parallel.full_state import load_full_state_dict as load_full_state_dict
    from meshcomm.parallel.full_state import save_full_state_dict as save_full_state_dict
    from meshcomm.parallel.optimizers.sharded import shard_optimizer as shard_optimizer
    from meshcomm.parallel.pipeline.functional import pipeline as pipeline
    from meshcomm.parallel.pipeline.schedule import Schedule as Schedule
    from meshcomm.parallel.pipeline.split import split_stages as split_stages
    from meshcomm.parallel.pipeline.step import PipelineStep as PipelineStep
    from meshcomm.parallel.pipeline.step import pipelined as pipelined
    from meshcomm.parallel.tensor.attention import parallel_attention as parallel_attention
    from meshcomm.parallel.tensor.auto.auto_plan import auto_plan as auto_plan
    from meshcomm.parallel.tensor.auto.found_plan import TensorPlan as TensorPlan
    from meshcomm.parallel.tensor.chunked_loss import linear_cross_entropy as linear_cross_entropy
    from meshcomm.parallel.tensor.functions import column_linear as column_linear
    from meshcomm.parallel.tensor.functions import enter as enter
    from meshcomm.parallel.tensor.functions import heads_of as heads_of
    from meshcomm.parallel.tensor.functions import leave as leave
    from meshcomm.parallel.tensor.functions import row_linear as row_linear
    from meshcomm.parallel.tensor.functions import vocab_embedding as vocab_embedding
    from meshcomm.parallel.tensor.losses import vocab_cross_entropy as vocab_cross_entropy
    from meshcomm.parallel.tensor.module import tensor_parallel as tensor_parallel
    from meshcomm.parallel.tensor.module import whole_parameters as whole_parameters
    from meshcomm.parallel.tensor.norms import sequence_layer_norm as sequence_layer_norm
    from meshcomm.parallel.tensor.norms import sequence_rms_norm as sequence_rms_norm
    from meshcomm.parallel.tensor.plan import Block as Block
    from meshcomm.parallel.tensor.plan import Column as Column
    from meshcomm.parallel.tensor.plan import Cut as Cut
    from meshcomm.parallel.tensor.plan import Row as Row
    from meshcomm.parallel.tensor.plan import Vocab as Vocab

# Imported when first asked for: each program needs a part, and checkpoints need DTensor, which takes a second.
_MODULES = ("checkpoint", "fsdp")
_LATER = {
    name: module
    for module, names in {
        "meshcomm.parallel.batch_norm": "SyncBatchNorm convert_batch_norm sync_batch_norm",
        "meshcomm.parallel.clip": "clip_grad_norm",
        "meshcomm.parallel.context.attention": "context_attention",
        "meshcomm.parallel.context.order": "context_order",
        "meshcomm.parallel.data.ddp": "data_parallel join",
        "meshcomm.parallel.data.micro_batches": "gathered no_sync reduce_gradients",
        "meshcomm.parallel.expert.balance": "balance",
        "meshcomm.parallel.expert.experts": "experts",
        "meshcomm.parallel.expert.grouped": "grouped_matmul",
        "meshcomm.parallel.fsdp.module": "fully_shard",
        "meshcomm.parallel.fsdp.state": "Piece counts pieces",
        "meshcomm.parallel.full_state": "full_state_dict load_full_state_dict save_full_state_dict",
        "meshcomm.parallel.optimizers.sharded": "shard_optimizer",
        "meshcomm.parallel.pipeline.functional": "pipeline",
        "meshcomm.parallel.pipeline.schedule": "Schedule",
        "meshcomm.parallel.pipeline.split": "split_stages",
        "meshcomm.parallel.pipeline.step": "PipelineStep pipelined",
        "meshcomm.parallel.tensor.auto.auto_plan": "auto_plan",
        "meshcomm.parallel.tensor.auto.found_plan": "TensorPlan",
        "meshcomm.parallel.by_axes": "parallel_calls parallelize",
        "meshcomm.parallel.tensor.attention": "parallel_attention",
        "meshcomm.parallel.tensor.chunked_loss": "linear_cross_entropy",
        "meshcomm.parallel.tensor.functions": "column_linear enter heads_of leave row_linear vocab_embedding",
        "meshcomm.parallel.tensor.losses": "vocab_cross_entropy",
        "meshcomm.parallel.tensor.module": "tensor_parallel whole_parameters",
        "meshcomm.parallel.tensor.norms": "sequence_layer_norm sequence_rms_norm",
        "meshcomm.parallel.tensor.plan": "Block Column Cut Row Vocab",
    }.items()
    for name in names.split()
}

__all__ = [*_MODULES, *_LATER]

if not typing.TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name):
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _LATER:
            raise importlib.import_module("meshcomm.elsewhere").missing(__name__, name)
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value

    class _Parallel(types.ModuleType):
        """``pipeline`` is the function, also when Python has imported the room of this name, and would set it here."""

        @property
        def pipeline(self):
            return importlib.import_module("meshcomm.parallel.pipeline.functional").pipeline

        @pipeline.setter
        def pipeline(self, room):
            pass

        def __reduce__(self):  # of functions that are sent to other processes by value it is a global
            return importlib.import_module, (self.__name__,)

    sys.modules[__name__].__class__ = _Parallel


def __dir__() -> list[str]:
    return list(__all__)
