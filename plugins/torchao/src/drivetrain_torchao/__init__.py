"""8-bit floating point training with torchao."""
