"""Imported after ``warm`` by the server that forks the ranks of pools, where some of them compile: what inductor imports and
looks up for its first graph, patterns and what the processor can do, takes each rank over a second otherwise.

A graph without gradients, in this thread alone: a fork has no thread of a compiler, of a bar, or of the engine of autograd.
"""

from __future__ import annotations

import contextlib
import gc

import torch
import torch._inductor.config

torch.hub.tqdm.monitor_interval = 0
# Without a C++ compiler those who compile are told.
with contextlib.suppress(Exception), torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
    torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(8))
torch._dynamo.reset()
gc.collect()
gc.freeze()
