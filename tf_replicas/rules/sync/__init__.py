"""Synchronous updates from exactly N contributions."""
