"""Imported last by the server that forks the ranks of pools: what a process pays once is paid there, not by each of them.

torch imports its compiler at the first step of an optimizer or the first ``vmap``, and scripts functions at the first
``jvp``: two seconds of each rank of each pool. Nothing here starts a thread or the engine of autograd.
"""

from __future__ import annotations

import faulthandler
import gc
import warnings

import torch
import torch._dynamo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))
gc.collect()
gc.freeze()

# A rank that ends by a signal says where it was, in what pytest shows as this test's stderr.
faulthandler.enable()
