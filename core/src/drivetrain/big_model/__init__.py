"""Models larger than memory: device maps, loading, offload."""
