"""Parameter-server resources that several clients reach by one name.

TensorFlow 2 gives every eager variable and queue an anonymous name, so that no
second client can find it; a resource made with an explicit `shared_name` lives
in the resource manager of its device and is found there by every client (seen
to work on TensorFlow 2.21). Only this module and `workarounds` touch
`tf.raw_ops` and TensorFlow's private parts.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops import resource_variable_ops

_Tensors = TypeVar("_Tensors")


class SharedVariable(resource_variable_ops.BaseResourceVariable):
  """A variable of the current device that all clients share by its name.

  Making it creates the resource or attaches to it; it holds no value until
  some client assigns one, and it outlives every client. It is a `tf.Variable`
  in all other respects: optimizers, `tf.function` and reads work as usual.

  Attributes:
    path: The name, under the attribute that Keras reads.
  """

  # Positional arguments would be taken for those of `tf.Variable` by its
  # metaclass (TensorFlow 2.21).
  def __init__(
    self,
    *,
    name: str,
    shape: Sequence[int],
    dtype: tf.DType | str,
    trainable: bool = False,
  ):
    shape = tf.TensorShape(shape)
    dtype = tf.as_dtype(dtype)
    with tf.init_scope():
      handle = tf.raw_ops.VarHandleOp(
        shape=shape, dtype=dtype, shared_name=name, container=""
      )
      # An eager handle made by hand knows neither shape nor type.
      handle_data_util.set_handle_data(
        handle, handle_data_util.create_handle_data(shape, dtype)
      )
    super().__init__(
      name=name,
      shape=shape,
      dtype=dtype,
      handle=handle,
      handle_name=name,
      unique_id=name,
      trainable=trainable,
      in_graph_mode=False,
      synchronization=tf.VariableSynchronization.AUTO,
      aggregation=tf.VariableAggregation.NONE,
    )
    self.path = name

  def is_initialized(self, name: str | None = None) -> tf.Tensor:
    """Whether some client has assigned a value: a scalar bool tensor."""
    return tf.raw_ops.VarIsInitializedOp(resource=self.handle)

  def read_value(self) -> tf.Tensor:
    """The value; where it is read eagerly, on a device of this process.

    An eager read from a task that has died may hang (TensorFlow 2.21: the
    second one, in its copy from there); a function fails at once.
    """
    if tf.inside_function() or not self._is_remote:
      return super().read_value()
    await_assigned([self])
    return self._fetch()

  @functools.cached_property
  def _is_remote(self) -> bool:
    there = tf.DeviceSpec.from_string(self.handle.device)
    here = tf.DeviceSpec.from_string(this_device())
    return (there.job, there.task) != (here.job, here.task)

  @functools.cached_property
  def _fetch(self) -> Callable[[], tf.Tensor]:
    return reader(super().read_value)

  def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
    if tf.inside_function() or not self._is_remote:
      return super()._read_variable_op(no_copy)
    return self.read_value()


def reader(read: Callable[[], _Tensors]) -> Callable[[], _Tensors]:
  """A function that brings to this process what `read` reads elsewhere.

  It fails at once if a task that it needs has died; see `SharedVariable`. What
  was assigned eagerly it may not see yet; see `await_assigned`.

  Args:
    read: Returns tensors, in any structure.

  Returns:
    The function. Its `trace` traces it, and reads nothing.
  """
  here = this_device()

  @tf.function(autograph=False)
  def fetch():
    tensors = read()
    with tf.device(here):
      return tf.nest.map_structure(tf.identity, tensors)

  @functools.cache
  def traced():
    with tf.device(None):
      return fetch.get_concrete_function()

  def bring():
    with tf.device(None):
      return traced()()

  bring.trace = traced
  return bring


def this_device() -> str:
  """A CPU of this process, whichever device is in use.

  In a client of a cluster `/device:CPU:0` may be another task's.
  """
  with tf.init_scope(), tf.device(None):
    return tf.constant(0).device


def variable_creator(
  place: Callable[[str], tuple[str, str]],
  created: list[tf.Variable],
) -> Callable[..., tf.Variable]:
  """A `tf.variable_creator_scope` creator that makes shared variables.

  Args:
    place: Maps the name an optimizer asks for to (shared name, device).
    created: Takes every variable made, in order.

  Returns:
    A creator. What it makes is initialised only if no client had done so.
  """

  def create(next_creator, **kwargs) -> tf.Variable:
    del next_creator
    value = kwargs["initial_value"]
    with tf.init_scope():
      value = tf.convert_to_tensor(
        value() if callable(value) else value, dtype=kwargs.get("dtype")
      )
    shared_name, device = place(kwargs.get("name") or "variable")
    with tf.device(device):
      variable = SharedVariable(
        name=shared_name, shape=value.shape, dtype=value.dtype
      )
    with tf.init_scope():  # Optimizers may make slots inside a function.
      if not variable.is_initialized():
        variable.assign(value)
    created.append(variable)
    return variable

  return create


class Queue:
  """A first-in first-out queue of the current device, shared by its name.

  Every method is usable inside a `tf.function`, and the blocking ones
  (`dequeue`) should be used only there: a blocking op that runs eagerly on a
  remote task holds up every other client's eager ops on it.

  Attributes:
    device: Where it lives.
  """

  def __init__(self, name: str, dtypes: Sequence[tf.DType]):
    self._dtypes = list(dtypes)
    with tf.init_scope():
      self._handle = tf.raw_ops.FIFOQueueV2(
        component_types=self._dtypes,
        shapes=[],
        capacity=-1,
        container="",
        shared_name=name,
      )
    self.device = self._handle.device

  def enqueue(self, components: Sequence[tf.Tensor]) -> tf.Operation | None:
    """Appends one element; `CancelledError` once the queue is closed."""
    with tf.device(self.device):
      return tf.raw_ops.QueueEnqueueV2(
        handle=self._handle, components=list(components)
      )

  def dequeue(self) -> list[tf.Tensor]:
    """Takes one element; waits for it; `OutOfRangeError` once closed."""
    with tf.device(self.device):
      return list(
        tf.raw_ops.QueueDequeueV2(
          handle=self._handle, component_types=self._dtypes
        )
      )

  def size(self) -> tf.Tensor:
    """The number of elements: a scalar int32 tensor."""
    with tf.device(self.device):
      return tf.raw_ops.QueueSizeV2(handle=self._handle)

  def close(self) -> None:
    """Refuses further elements; releases all who wait, of every client."""
    with tf.device(self.device):
      tf.raw_ops.QueueCloseV2(handle=self._handle, cancel_pending_enqueues=True)


class Mutex:
  """A lock of the current device, shared by its name.

  To be used inside a `tf.function`. A step that ends early, as that of a dead
  client does, gives back the locks it held.

  Attributes:
    device: Where it lives.
  """

  def __init__(self, name: str):
    with tf.init_scope():
      self._handle = tf.raw_ops.MutexV2(container="", shared_name=name)
    self.device = self._handle.device

  def hold(
    self,
    body: Callable[[], list | dict],
    after: Sequence[tf.Tensor] = (),
  ) -> list | dict:
    """`body()`, run while nobody else holds this lock.

    Args:
      body: Builds ops, and returns tensors, in a list or by name; all of its
        stateful ops are over before the lock is given back. They are returned
        on the device of the caller.
      after: Tensors to wait for before the lock is asked for, such as those
        that come from another task and that `body` needs.
    """
    with tf.device(self.device):
      with tf.control_dependencies(list(after)):
        lock = tf.raw_ops.MutexLock(mutex=self._handle)
      with tf.control_dependencies([lock]):
        # Not just the ops: a call is over when all its stateful ops are.
        results = tf.function(body, autograph=False)()
      with tf.control_dependencies(tf.nest.flatten(results)):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([released]):
      return tf.nest.map_structure(tf.identity, results)


def land(tensor: tf.Tensor) -> tf.Tensor:
  """The same on the present device, before anything is made of it.

  A branch is taken where its input was made, which is then sent for every
  branch, taken or not, and an identity is optimised away (TensorFlow 2.21).
  """
  return tf.raw_ops.Snapshot(input=tensor)


def land_scalars(device: str, *scalars) -> list:
  """Scalars on `device`: they cross together, since each tensor is a call.

  Args:
    device: Where to.
    *scalars: Tensors of any dtype, integers below 2**53; what is known when
      this is traced need not be sent.

  Returns:
    Tensors of the same dtypes; what was no tensor as it is.
  """
  tensors = [x for x in scalars if tf.is_tensor(x)]
  if not tensors:
    return list(scalars)
  packed = tf.stack([tf.cast(x, tf.float64) for x in tensors])
  with tf.device(device):
    landed = iter(tf.unstack(land(packed)))
    return [
      tf.cast(next(landed), x.dtype) if tf.is_tensor(x) else x for x in scalars
    ]


def select(
  index: int | tf.Tensor, choices: Sequence, use: Callable[..., tf.Tensor]
) -> tf.Tensor:
  """`use(choices[index])`; the index may be a tensor, the choices not."""
  if isinstance(index, int):
    return use(choices[index])
  branches = [lambda choice=choice: use(choice) for choice in choices]
  return tf.switch_case(tf.cast(index, tf.int32), branches)


def shared_variable(
  name: str, shape: Sequence[int], dtype: tf.DType | str
) -> SharedVariable:
  """A `SharedVariable` that is not trained."""
  return SharedVariable(name=name, shape=shape, dtype=dtype)


def await_assigned(variables: Iterable[tf.Variable]) -> None:
  """Waits until what was assigned outside of functions can be read in them.

  TensorFlow 2.21 sends eager ops to a remote task on a stream of their own,
  which the next function, called by the same client, may overtake (seen in 3
  to 80 of 100 calls on a busy machine).

  Args:
    variables: On the devices concerned; one of each is asked.
  """
  for variable in {v.device: v for v in variables}.values():
    variable.is_initialized().numpy()
