"""Local training with periodic exchanges: model and elastic averaging."""
