"""On real GPUs, where there are any: they compute, and what a CPU does."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.support import binaries

pytestmark = pytest.mark.skipif(
  not tf.config.list_physical_devices("GPU"),
  reason="TensorFlow finds no GPU on this machine",
)

# Enough for the loss to fall: a GPU that learns nothing would fail.
STEPS = 60
FLAGS = (
  "--dataset=synthetic",
  "--batch_size=32",
  f"--max_steps={STEPS}",
  "--log_every_steps=1",
)
# Prints where variables are, and the most memory that GPU 0 has held.
PROGRAM = """
import keras
import tensorflow as tf
from cifar10 import config
from cifar10 import workload
from tf_replicas.drivers import one_machine
from tf_replicas.programs import update_options
from tf_replicas.runtime import devices

devices.configure([0])
made = workload.make(config.Config(dataset="synthetic", batch_size=32))
towers = devices.tower_devices([0], emulate=False)
driver = one_machine.OneMachine(
  lambda: made.replica_fn(towers),
  lambda: made.optimizer_fn(
    update_options.rule_fn(update_options.UpdateSettings(), 1)
  ),
)
for _ in range(3):
  driver.step()
devices_used = {v.device for v in driver.store.variables(0)}
print(devices_used, tf.config.experimental.get_memory_info("GPU:0")["peak"])
"""


def _losses(train_dir, *flags, **environ):
  result = subprocess.run(
    binaries.command(
      "cifar10.train", *FLAGS, f"--train_dir={train_dir}", *flags
    ),
    cwd=binaries.ROOT,
    env={**os.environ, **environ},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return [float(loss) for _, loss in binaries.LOG_LINE.findall(result.stdout)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_computes_what_a_cpu_does(tmp_path, dtype):
  on_gpu = _losses(tmp_path / "gpu", f"--compute_dtype={dtype}")
  on_cpu = _losses(tmp_path / "cpu", CUDA_VISIBLE_DEVICES="")
  assert len(on_gpu) == STEPS
  # Rounding errors grow from step to step.
  assert on_gpu[:5] == pytest.approx(on_cpu[:5], rel=0.03)
  last = [sum(losses[-10:]) / 10 for losses in (on_gpu, on_cpu)]
  assert last[0] == pytest.approx(last[1], abs=0.03)
  # It falls by 0.05 on a CPU.
  assert last[0] < sum(on_gpu[:5]) / 5 - 0.03


def test_towers_on_the_gpu_and_variables_on_the_cpu():
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=binaries.ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  where, _, peak = result.stdout.splitlines()[-1].rpartition(" ")
  assert "CPU:0" in where and "GPU" not in where
  # The activations of 32 images alone have more.
  assert int(peak) > 32 * 24 * 24 * 64 * 4
