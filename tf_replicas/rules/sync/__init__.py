"""Contains the rule for synchronous updates from N sets of gradients."""
