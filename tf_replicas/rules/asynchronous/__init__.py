"""Asynchronous updates, with or without a bound on staleness."""
