"""Parameters, gradients and optimizer state sharded over processes, with torch's fully_shard."""
