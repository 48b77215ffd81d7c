"""Makes parameter stores (variables on PS tasks) inside the test's process.

Logical CPU devices stand in for the PS tasks. Shared variables outlive a test,
so every test gets a namespace, a scope for their names, of its own.
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
  """Returns the logical CPU device that stands in for PS task `task`."""
  return f"/device:CPU:{task}"


def spec(path, shape, *, dtype="float32", trainable=True):
  return placement.VariableSpec(path, tuple(shape), dtype, trainable)


class TestCase(parameterized.TestCase):
  """Base class of tests that use parameter stores in their own process.

  Every test gets a new namespace, a scope for the names of shared variables,
  which `namespace` returns.
  """

  def setUp(self):
    super().setUp()
    self.new_cluster()

  def new_cluster(self):
    """Begins a new namespace, in which no shared variable exists yet.

    For the test, this is as if all servers had just started.
    """
    global _current
    _current = resources.new_namespace("test")


def namespace() -> resources.Namespace:
  """Returns the namespace (scope of shared variables' names) of the test.

  After a call of `new_cluster`, this is the namespace that the call began.
  """
  return _current


def attach(specs, num_tasks=1, policy=None, wire_dtype=None):
  """Returns a parameter store whose variables have no values yet.

  Args:
    specs: The names, shapes and dtypes of the variables.
    num_tasks: Number of PS tasks, for which CPU devices stand in.
    policy: Places variables on tasks; None for `GreedyByBytes`.
    wire_dtype: Dtype in which parameters are sent; None for their own.
  """
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
  """Returns a parameter store whose variables have values.

  Args:
    values: The values, arrays by the paths of the variables. All variables are
      trainable.
    num_tasks: Number of PS tasks, for which CPU devices stand in.
    policy: Places variables on tasks; None for `GreedyByBytes`.
  """
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
  """Returns a placement policy that cuts all variables into shards.

  A variable gets one shard for each task, as far as its size allows.
  """
  return placement.Partitioned(num_tasks, min_shard_bytes=1)


def numpy(tensors):
  return [np.asarray(t) for t in tensors]
