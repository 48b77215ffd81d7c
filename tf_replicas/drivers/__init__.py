"""Decides which process runs what, and detects tasks that are lost."""
