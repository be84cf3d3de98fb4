"""shard_map: a function of one rank's parts, called with global tensors."""
