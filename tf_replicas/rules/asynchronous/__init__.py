"""Contains the rule for asynchronous updates, and staleness policies."""
