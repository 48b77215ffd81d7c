"""Tests of `--check_gpu`: which ops of the programs have no GPU kernel."""

import json
import re

import pytest

from tests.inception_mini import binaries_test
from tests.support import binaries

# Two workers, the first with two towers. The parameter server has a GPU too.
SPEC = {
  "cluster": {"ps": ["localhost:0"], "worker": ["localhost:0"] * 2},
  "devices": {
    "ps": {"gpus": [0]},
    "worker:0": {"gpus": [0, 1]},
    "worker:1": {"gpus": [0, 1]},
  },
}
FLAGS = {
  "cifar10": ("--dataset=synthetic", "--batch_size=4", "--learning_rate=0.05"),
  "inception_mini": binaries_test.SMALL,
}
