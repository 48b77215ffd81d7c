"""Installs the library and the training binaries."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
  r'^__version__ = "(.+)"$',
  (ROOT / "tf_replicas" / "__init__.py").read_text(encoding="utf-8"),
  re.MULTILINE,
).group(1)

setuptools.setup(
  name="tf-replicas",
  version=VERSION,
  description=(
    "Replicated training with TensorFlow, synchronous to asynchronous, on one"
    " machine or many"
  ),
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.10",
  packages=setuptools.find_packages(
    include=["tf_replicas*", "cifar10*", "inception_mini*", "experiments*"]
  ),
  package_data={"tf_replicas": ["py.typed", "cluster/*.json"]},
  install_requires=[
    # Private names are used (in `tf_replicas.runtime`); tested with these.
    "tensorflow>=2.21,<2.22",
    "keras>=3.15,<4",
    "numpy",
    "absl-py",
    "tensorflow-datasets>=4.9.10",
    # tensorflow-datasets 4.9.10 imports it without declaring it.
    "importlib_resources",
    # Reads and shows the summaries; tensorflow 2.21 no longer installs it.
    "tensorboard>=2.20",
    "tqdm",
    # Writes the manifests for Kubernetes.
    "pyyaml",
  ],
  extras_require={
    "test": [
      "pytest>=8",
      "pytest-timeout",
      "pytest-xdist",
      "hypothesis",
      "jsonschema",
      # Libraries that are trained with, in tests and examples.
      "dm-sonnet",
      "tf-keras",
      "ruff",
      "kubernetes-validate",
      "cloudpickle>=3",
      "matplotlib",
      "nbclient",
      "ipykernel",
      "basedpyright==1.40.2",  # The baseline is of this version.
    ],
    # `LocalTraining` sends functions by it.
    "notebook": ["cloudpickle>=3"],
    "plots": ["matplotlib"],
    # `mkdocs build`; ruff formats the signatures.
    "docs": ["mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "ruff"],
  },
)
