"""Installs the library. `pyproject.toml` has the metadata."""

import setuptools

setuptools.setup()
