"""Fully sharded parameters: functions on pytrees, whose names are here, and ``fully_shard``, made of them."""

from meshcomm.parallel.fsdp.functions import FlatTree, apply, gather, shard

__all__ = ["FlatTree", "apply", "gather", "shard"]
