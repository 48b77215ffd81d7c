"""Parameter stores inside the test's own process.

Logical CPU devices stand in for the PS tasks. Shared resources outlive a test,
so every test gets a namespace of its own.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

NUM_DEVICES = 4
_current: resources.Namespace | None = None

tf.config.set_logical_device_configuration(
  tf.config.list_physical_devices("CPU")[0],
  [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
)


def device(task: int) -> str:
  """What stands in for PS task `task`."""
  return f"/device:CPU:{task}"


def spec(path, shape, *, dtype="float32", trainable=True):
  return placement.VariableSpec(path, tuple(shape), dtype, trainable)


class TestCase(parameterized.TestCase):
  """Every test has a namespace of its own; see `namespace`."""

  def setUp(self):
    super().setUp()
    self.new_cluster()

  def new_cluster(self):
    """Takes a new namespace, as if all servers had just started."""
    global _current
    _current = resources.new_namespace("test")


def namespace() -> resources.Namespace:
  """The namespace of the test, or of what follows its last `new_cluster`."""
  return _current


def attach(specs, num_tasks=1, policy=None, wire_dtype=None):
  """A store of these variables, without values; greedy unless told."""
  if policy is None:
    policy = placement.GreedyByBytes(num_tasks)
  return parameter_store.ParameterStore(
    specs,
    placement.plan(specs, policy),
    num_tasks=num_tasks,
    device_of_task=device,
    wire_dtype=wire_dtype,
    namespace=namespace(),
  )


def create(values, num_tasks=1, policy=None):
  """A store that holds `values`, arrays by path; all of them trainable."""
  specs = [
    spec(path, np.shape(value), dtype=np.asarray(value).dtype.name)
    for path, value in values.items()
  ]
  store = attach(specs, num_tasks, policy)
  for index, value in enumerate(values.values()):
    store.assign(index, value)
  store.start()
  return store


def cut(num_tasks):
  """A policy that cuts whatever can be cut, one shard per task."""
  return placement.Partitioned(num_tasks, min_shard_bytes=1)


def numpy(tensors):
  return [np.asarray(t) for t in tensors]
