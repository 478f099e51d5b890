"""The replication check: what a step may do, found in its jaxpr."""
