"""Data parallel training with DistributedDataParallel."""
