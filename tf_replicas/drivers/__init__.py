"""Which process runs what: the drivers, serving tasks, heartbeats."""
