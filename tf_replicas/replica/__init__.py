"""Contains model replicas, which compute gradients on one or more devices."""
