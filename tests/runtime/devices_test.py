"""Tests for runtime.devices."""

import os
import subprocess
import sys
import textwrap
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tf_replicas
from tf_replicas.runtime import devices

FAKE_GPUS = [
  tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(3)
]


def _run(program):
  """Runs a program in a process of its own, without GPUs; returns its output.

  TensorFlow's devices are initialized once per process.
  """
  environ = dict(os.environ)
  environ["CUDA_VISIBLE_DEVICES"] = "-1"
  environ["PYTHONPATH"] = os.pathsep.join(sys.path)
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=300,
    env=environ,
  )
  assert result.returncode == 0, result.stderr
  return result.stdout


class ConfigureTest(parameterized.TestCase):
  """What is asked of TensorFlow, on a machine that seems to have 3 GPUs."""

  def setUp(self):
    super().setUp()
    fakes = {
      "list_physical_devices": mock.Mock(return_value=FAKE_GPUS),
      "set_visible_devices": mock.Mock(),
      "set_soft_device_placement": mock.Mock(),
      "set_logical_device_configuration": mock.Mock(),
    }
    self.enter_context(mock.patch.multiple(tf.config, **fakes))
    self.visible = fakes["set_visible_devices"]
    self.soft_placement = fakes["set_soft_device_placement"]
    self.logical = fakes["set_logical_device_configuration"]
    self.memory_growth = self.enter_context(
      mock.patch.object(tf.config.experimental, "set_memory_growth")
    )

  def test_its_public_name(self):
    self.assertIs(tf_replicas.devices, devices)

  @parameterized.parameters(
    (None, FAKE_GPUS),
    ([], []),
    ([0], FAKE_GPUS[:1]),
    ([1, 2], FAKE_GPUS[1:]),
    ([2, 0], [FAKE_GPUS[0], FAKE_GPUS[2]]),
  )
  def test_only_the_named_gpus_are_visible(self, gpus, expected):
    devices.configure(gpus)
    self.visible.assert_called_once_with(expected, "GPU")
    self.assertEqual(
      self.memory_growth.mock_calls, [mock.call(gpu, True) for gpu in expected]
    )
    self.soft_placement.assert_called_once_with(True)
    self.logical.assert_not_called()

  def test_memory_growth_can_be_off(self):
    devices.configure([1], memory_growth=False)
    self.memory_growth.assert_called_once_with(FAKE_GPUS[1], False)

  def test_rehearsal_hides_the_gpus(self):
    devices.configure([0, 7], num_emulated=2)
    self.visible.assert_called_once_with([], "GPU")
    self.memory_growth.assert_not_called()
    self.logical.assert_called_once()

  @parameterized.parameters(([3],), ([0, 5],), ([-1],))
  def test_refuses_a_gpu_that_does_not_exist(self, gpus):
    with self.assertRaises(ValueError) as caught:
      devices.configure(gpus)
    self.assertEqual(
      str(caught.exception),
      "`gpus` must be among [0, 1, 2], the GPUs of this machine. Received:"
      f" {gpus}. To use CPU devices instead, give --emulate_gpus.",
    )
    self.visible.assert_not_called()

  def test_refuses_a_gpu_twice(self):
    message = r"`gpus` must be distinct. Received: \[1, 1\]."
    with self.assertRaisesRegex(ValueError, message):
      devices.configure([1, 1])

  def test_refuses_negative_num_emulated(self):
    with self.assertRaisesRegex(ValueError, "must not be negative. .*: -1"):
      devices.configure([], num_emulated=-1)


class ConfigureProcessTest(absltest.TestCase):
  """What TensorFlow makes of it."""

  def test_no_gpus(self):
    output = _run("""
      import tensorflow as tf
      from tf_replicas import devices

      try:
        devices.configure([0, 1])
      except ValueError as error:
        print(error)
      devices.configure([])
      print([d.name for d in tf.config.list_logical_devices()])
      print(tf.config.get_soft_device_placement())
      # Initialized by now, but as asked.
      devices.configure([])
      devices.configure(None, num_emulated=1)
      try:
        devices.configure([0, 1], num_emulated=2)
      except RuntimeError as error:
        print(error)
    """)
    self.assertEqual(
      output.splitlines(),
      [
        "`gpus` must be empty, as TensorFlow finds no GPU on this machine."
        " Received: [0, 1]. To use CPU devices instead, give --emulate_gpus.",
        "['/device:CPU:0']",
        "True",
        "`configure` must be called before the first tensor or variable, which"
        " initializes TensorFlow's devices. Received: gpus=[0, 1],"
        " num_emulated=2, memory_growth=True, after they were initialized with"
        " other settings.",
      ],
    )

  def test_towers_run_on_emulated_gpus(self):
    output = _run("""
      import tensorflow as tf
      from tf_replicas import devices

      gpus = [1, 2, 5]
      devices.configure(gpus, num_emulated=len(gpus))
      for device in devices.tower_devices(gpus, emulate=True):
        with tf.device(device):
          print(tf.Variable(1.0).device)
      devices.configure(gpus, num_emulated=len(gpus))
    """)
    host = "/job:localhost/replica:0/task:0/device:CPU:"
    self.assertEqual(output.split(), [host + "0", host + "1", host + "2"])


class TowerDevicesTest(parameterized.TestCase):
  @parameterized.parameters(
    ([0], False, ["/device:GPU:0"]),
    ([1, 2], False, ["/device:GPU:0", "/device:GPU:1"]),
    ([1, 2], True, ["/device:CPU:0", "/device:CPU:1"]),
    # As the spec orders them: the first tower on the machine's GPU 5.
    ([5, 2], False, ["/device:GPU:1", "/device:GPU:0"]),
    ([3, 1, 2], True, ["/device:CPU:2", "/device:CPU:0", "/device:CPU:1"]),
    ([], False, ["/device:CPU:0"]),
    ([], True, ["/device:CPU:0"]),
  )
  def test_without_a_cluster(self, gpus, emulate, expected):
    self.assertEqual(devices.tower_devices(gpus, emulate=emulate), expected)

  def test_of_a_task(self):
    self.assertEqual(
      devices.tower_devices([1, 2], emulate=False, job="worker", task=1),
      [
        "/job:worker/task:1/device:GPU:0",
        "/job:worker/task:1/device:GPU:1",
      ],
    )
    self.assertEqual(
      devices.tower_devices([], emulate=False, job="chief"),
      ["/job:chief/task:0/device:CPU:0"],
    )


if __name__ == "__main__":
  absltest.main()
