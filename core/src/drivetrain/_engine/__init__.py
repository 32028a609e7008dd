"""From a request to running objects: resolve, prepare, accumulate."""
