"""One program for all ranks, written once: shard_map."""
