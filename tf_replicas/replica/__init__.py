"""Model replicas and their towers, which compute gradients."""
