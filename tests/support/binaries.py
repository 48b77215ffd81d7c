"""Helpers that the tests of the CIFAR-10 binaries share."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np

from cifar10 import model
from tf_replicas.session import checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOG_LINE = re.compile(
  r"^(?:\[\w+ \d\] )?[-\d]+ [:.\d]+: step (\d+), loss = ([\d.]+) "
  r"\([\d.]+ examples/sec; [\d.]+ sec/batch\); learning rate [\d.e-]+"
  r"(?:; (?:\d+ days?, )?\d+:\d\d:\d\d left to step \d+)?$",
  re.MULTILINE,
)
# Messages of TensorFlow, such as "E0000 00:00:17 1 cuda_platform.cc:51] ...".
_OF_TENSORFLOW = re.compile(
  r"[IWEF]\d{4} [\d:.]+|[:.\d]+: [IWEF] |absl::|cuInit|oneDNN|Socket closed"
  r"|OUT_OF_RANGE|rebuild TensorFlow"
)
TEST_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def command(module: str, *flags: str) -> list[str]:
  """Returns the command line of a binary, given as a module name and flags."""
  return [sys.executable, "-m", module, *flags]


def environ() -> dict[str, str]:
  """Returns environment variables that hide GPUs and name no cluster."""
  variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
  variables.pop("TF_CONFIG", None)
  return variables


def run(
  module: str, *flags: str, timeout: float = 300
) -> subprocess.CompletedProcess:
  """Runs a binary to its end, and returns its exit status and its output."""
  return subprocess.run(
    command(module, *flags),
    cwd=ROOT,
    env=environ(),
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def succeed(module: str, *flags: str, timeout: float = 300) -> str:
  """Runs a binary that must end with status 0, and returns its stdout."""
  result = run(module, *flags, timeout=timeout)
  assert result.returncode == 0, result.stdout + result.stderr
  assert "Traceback" not in result.stderr
  return result.stdout


def refuse(module: str, words: str, *flags: str, status: int = 2) -> None:
  """Runs a binary that must end with one line of error on stderr.

  Args:
    module: The module name of the binary.
    words: Text that the line must contain.
    *flags: The flags of the binary.
    status: The exit status that the binary must have.
  """
  result = run(module, *flags, timeout=300)
  assert result.returncode == status, result.stdout + result.stderr
  (error,) = result.stderr.splitlines()
  assert error.startswith("error: ")
  assert words in error


def assert_tidy(output: str) -> None:
  """Checks that `output` has no lines of TensorFlow and no line twice.

  Lines such as "waiting for the chief: 10 s so far", which several tasks print
  on a slow machine, may be there twice.
  """
  lines = [re.sub(r"^\[\w+ \d\] ", "", line) for line in output.splitlines()]
  assert not [line for line in lines if _OF_TENSORFLOW.search(line)], output
  told = [
    line for line in lines if line.strip(" -") and " s so far" not in line
  ]
  assert len(set(told)) == len(told), output


def logged_steps(output: str) -> list[int]:
  """Returns the global steps of all log lines in `output`."""
  return [int(step) for step, _ in LOG_LINE.findall(output)]


def save_checkpoint(train_dir, *, seed: int, average_seed: int) -> str:
  """Writes a checkpoint of an untrained network, and returns its path.

  Args:
    train_dir: Directory of the checkpoint.
    seed: Seed of the weights.
    average_seed: Seed of another network, whose weights are saved as the moving
      averages.
  """
  values = {"global_step": np.int64(7)}
  for prefix, number in (("variables", seed), ("averages", average_seed)):
    for weight in model.build(seed=number).weights:
      values[f"{prefix}/{weight.path}"] = weight.numpy()
  return checkpoints.save(train_dir, values)


def make_record_files(data_dir: pathlib.Path) -> None:
  """Makes CIFAR-10 files in the layout of the official binary version.

  The test images are random noise whose labels take turns. The training files
  have the right size but hold zeros only.
  """
  size, number = 3073, 10_000
  records = np.random.default_rng(0).integers(
    0, 256, [number, size], dtype=np.uint8
  )
  records[:, 0] = np.arange(number) % 10
  for name in TEST_FILES[:-1]:  # Holes of the file system.
    with open(data_dir / name, "wb") as file:
      file.truncate(number * size)
  (data_dir / TEST_FILES[-1]).write_bytes(records.tobytes())
