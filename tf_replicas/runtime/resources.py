"""Makes variables, queues and locks that processes share by their names.

The objects live on parameter servers. TensorFlow 2 gives every eager variable
and queue an anonymous name, so that no other client (a process that trains) can
find it. The resource manager of a device keeps a resource with an explicit
`shared_name`, and every client finds it there (seen in TensorFlow 2.21). Only
the package `runtime` uses `tf.raw_ops` and private names of TensorFlow.

A name identifies one object per device and `Namespace`. Code outside this
package creates shared resources only by the methods of a namespace.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Generic
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops import resource_variable_ops

from tf_replicas.runtime import control_flow

# Tensors in any `tf.nest` structure.
_Tensors = TypeVar("_Tensors")
_Choice = TypeVar("_Choice")
# Valid names of a resource container in TensorFlow 2.21, except for names that
# start with a dot. Underscores are not valid.
_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-/]*")


@dataclasses.dataclass(frozen=True)
class Namespace:
  """Scope of the names of shared resources: variables, queues and locks.

  Clients (processes that train) with equal namespaces share resources of equal
  names. Resources of different namespaces are separate, even on one device. A
  restarted training uses a new generation, which cannot reach what earlier
  generations left behind: variables, queues with elements, waiting dequeues,
  held locks.

  Each pair of name and generation is one resource container of TensorFlow; name
  "" with generation 0 is the default container. Checkpoints do not depend on
  namespaces: `path` of a variable has neither container nor prefix.

  Attributes:
    name: The name of the training: an ASCII letter or digit, followed by
      letters, digits, dots, hyphens and slashes; or empty.
    generation: An integer, at least 0, that tells apart the restarts of one
      training.
    prefix: Prefix of all names within the container, which `child` extends.
  """

  name: str = ""
  generation: int = 0
  prefix: str = ""

  def __post_init__(self):
    """Checks the name and the generation of the namespace.

    Raises:
      ValueError: If the name or the generation is not valid.
    """
    if self.name and not _VALID_NAME.fullmatch(self.name):
      raise ValueError(
        "The name of a namespace must start with an ASCII letter or digit and"
        " consist of letters, digits, `.`, `-` and `/`."
        f" Received: {self.name!r}."
      )
    is_count = isinstance(self.generation, int) and self.generation >= 0
    if not is_count or isinstance(self.generation, bool):
      raise ValueError(
        "The generation of a namespace must be an integer from 0 on."
        f" Received: {self.generation!r}."
      )

  @property
  def container(self) -> str:
    """Name of the TensorFlow resource container: `<name>/<generation>`.

    It is "" for the default container, and begins with "." if `name` is empty
    and `generation` is not 0.
    """
    if not self.name and not self.generation:
      return ""
    # Unique: no name starts with a dot, and the generation has no slash.
    return f"{self.name or '.'}/{self.generation}"

  def child(self, prefix: str) -> "Namespace":
    """Returns a namespace that puts `prefix/` in front of its names.

    The prefix of this namespace, if any, comes first. Both namespaces use one
    resource container of TensorFlow.
    """
    return dataclasses.replace(self, prefix=f"{self.prefix}{prefix}/")

  def variable(
    self,
    name: str,
    shape: Sequence[int],
    dtype: tf.DType | str,
    trainable: bool = False,
    constraint: Callable[[tf.Variable], tf.Tensor] | None = None,
  ) -> "SharedVariable":
    """Creates, or finds, the variable `name` on the current device.

    Args:
      name: The variable's name, which is also its `path`.
      shape: The variable's static shape.
      dtype: The variable's dtype.
      trainable: Whether gradient tapes watch the variable.
      constraint: Maps the variable to the value that optimizers assign after an
        update, as the optimizers of Keras do. None: no constraint.

    Returns:
      The variable. It has no value until some client (a process that trains)
      assigns one.
    """
    return SharedVariable(
      name=name,
      shape=shape,
      dtype=dtype,
      trainable=trainable,
      shared_name=self.prefix + name,
      container=self.container,
      constraint=constraint,
    )

  def queue(self, name: str, dtypes: Sequence[tf.DType]) -> "Queue":
    """Creates, or finds, the queue `name` on the current device.

    Args:
      name: The name of the queue in this namespace.
      dtypes: The dtypes of the components of an element. The shapes of
        components may differ between elements.
    """
    return Queue(self.prefix + name, dtypes, self.container)

  def mutex(self, name: str) -> "Mutex":
    """Creates, or finds, the lock `name` on the current device.

    It is a lock of this namespace, which other processes find by its name.
    """
    return Mutex(self.prefix + name, self.container)

  def variable_creator(
    self,
    place: Callable[[str], tuple[str, str]],
    created: list[tf.Variable],
    stays_there: Callable[[str], bool] = lambda name: False,
  ) -> Callable[..., tf.Variable]:
    """Makes a creator of shared variables for `tf.variable_creator_scope`.

    Args:
      place: Maps the requested name to (name in this namespace, device).
      created: A list to which every new variable is appended.
      stays_there: Maps a name in this namespace to whether the variable is too
        large for this process. If so, its initial value must be given by a
        function, which is called on the variable's device.

    Returns:
      The creator. It assigns a variable's initial value, unless some client (a
      process that trains) has already assigned a value.
    """

    def create(next_creator: object, **kwargs) -> tf.Variable:
      del next_creator
      value: Any = kwargs["initial_value"]
      name, device = place(kwargs.get("name") or "variable")
      if callable(value) and stays_there(name):
        variable = self._create_there(name, device, value, kwargs.get("dtype"))
        created.append(variable)
        return variable
      # An optimizer may give a tensor of the function that it is traced in.
      if tf.is_tensor(value) and tf.get_static_value(value) is not None:
        value = tf.get_static_value(value)
      with tf.init_scope():
        value = tf.convert_to_tensor(
          value() if callable(value) else value, dtype=kwargs.get("dtype")
        )
      with tf.device(device):
        variable = self.variable(name, value.shape, value.dtype)
      with tf.init_scope():  # Optimizers may create slots inside a function.
        if not variable.is_initialized():
          variable.assign(value)
      created.append(variable)
      return variable

    return create

  def _create_there(
    self,
    name: str,
    device: str,
    value_fn: Callable[[], Any],
    dtype: tf.DType | str | None,
  ) -> Any:
    """Creates a variable whose first value is computed on the same device.

    So the value never enters this process, for which it may be too large. If
    some client has already assigned a value, that value is kept.

    Args:
      name: The variable's name in this namespace.
      device: The device of the variable.
      value_fn: Returns the first value; called in a function on `device`.
      dtype: The dtype of the variable; None: that of the value.

    Raises:
      ValueError: If the variable does not fit into the memory of its task.
    """

    def value():
      return tf.convert_to_tensor(value_fn(), dtype=dtype)

    with tf.init_scope():
      (spec,) = (
        tf.function(value, autograph=False).get_concrete_function().outputs
      )
      with tf.device(device):
        variable = self.variable(name, spec.shape, spec.dtype)
      if not variable.is_initialized():
        check_room({device: variable.num_bytes}, name)

        @tf.function(autograph=False)
        def assign() -> tf.Tensor:
          with tf.device(device):
            variable.assign(value(), read_value=False)
          return tf.constant(True)

        # A call of the function itself would warn of many traces.
        assign.get_concrete_function()()
    return variable


DEFAULT_NAMESPACE = Namespace()
_incarnations = itertools.count()


def new_namespace(name: str = "") -> Namespace:
  """Makes a new namespace, for a training within this process.

  No other process can find the resources of this namespace.

  Args:
    name: The name of the training; need not be unique.

  Raises:
    ValueError: If `name` is not a valid name of a `Namespace`.
  """
  Namespace(name)  # Checks the name without the prefix.
  prefix = "this-process"
  return Namespace(f"{prefix}/{name}" if name else prefix, next(_incarnations))


# The attribute of a graph that maps a `_Handle` to its tensor in the graph.
_HANDLES = "_tf_replicas_handles"
# The `shared_name` of resources that only their handles refer to.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


class LocalVariable(resource_variable_ops.BaseResourceVariable):
  """Variable of the current device that lives as long as one execution.

  It is to be made inside a `tf.function`. Every execution of this function has
  a variable of its own.

  Attributes:
    is_assigned: Whether a method that assigns was called after the constructor.
  """

  def __init__(self, value: tf.Tensor, *, name: str, trainable: bool):
    """Makes the variable, with `value` as its first value."""
    data = handle_data_util.create_handle_data(value.shape, value.dtype)
    new = tf.raw_ops.VarHandleOp(
      shape=value.shape, dtype=value.dtype, shared_name=_ANONYMOUS
    )
    handle_data_util.set_handle_data(new, data)
    first = tf.raw_ops.AssignVariableOp(resource=new, value=value)
    # Ops that take only the shape of a variable do not wait for assignments.
    with tf.control_dependencies([first]):
      handle = tf.identity(new)
    handle_data_util.set_handle_data(handle, data)
    super().__init__(
      name=name,
      shape=value.shape,
      dtype=value.dtype,
      handle=handle,
      handle_name=name,
      unique_id=f"local_{id(self)}",
      trainable=trainable,
      in_graph_mode=False,
      synchronization=tf.VariableSynchronization.AUTO,
      aggregation=tf.VariableAggregation.NONE,
    )
    self.is_assigned = False

  def assign(self, *args: Any, **kwargs: Any) -> Any:
    """Assigns a value, as `tf.Variable.assign` does."""
    self.is_assigned = True
    return super().assign(*args, **kwargs)

  def assign_add(self, *args: Any, **kwargs: Any) -> Any:
    """Adds to the value, as `tf.Variable.assign_add` does."""
    self.is_assigned = True
    return super().assign_add(*args, **kwargs)

  def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
    """Subtracts from the value, as `tf.Variable.assign_sub` does."""
    self.is_assigned = True
    return super().assign_sub(*args, **kwargs)


class _Handle:
  """The handle of a resource that all clients share by its name.

  Clients are the processes that train.

  Attributes:
    device: The device of the resource.
    eager: The handle as an eager tensor.
  """

  def __init__(self, make: Callable[[], tf.Tensor]):
    """Makes the handle, on the current device.

    Args:
      make: Makes an operation that creates or finds the resource, and returns
        the handle.
    """
    self._make = make
    with tf.init_scope():
      self.eager = make()
    self.device: str = self.eager.device

  def here(self) -> tf.Tensor:
    """Returns the handle for the operation that is being made.

    Within `control_flow.call_on`, it is a handle that the function of the call
    makes by itself. If two calls in a loop took one handle from outside of the
    loop, TensorFlow (2.21) would send their task a message in each iteration.
    """
    graph = control_flow.enclosing_call()
    if graph is None:
      return self.eager
    if not hasattr(graph, _HANDLES):
      setattr(graph, _HANDLES, {})
    handles: dict[_Handle, tf.Tensor] = getattr(graph, _HANDLES)
    if self not in handles:
      with (
        graph.as_default(),
        tf.device(self.device),
        tf.control_dependencies(None),
      ):
        handles[self] = self._make()
    return handles[self]


class SharedVariable(resource_variable_ops.BaseResourceVariable):
  """Variable of the current device that all clients share by its name.

  Clients are the processes that train. The constructor creates the resource or
  attaches to it. The resource has no value until some client assigns one, and
  outlives its clients. Apart from that, a `SharedVariable` behaves like a
  `tf.Variable`: optimizers, `tf.function` and reads work as usual. It is made
  by `Namespace.variable`.

  Attributes:
    path: The variable's name in the namespace; Keras reads this attribute.
  """

  # The metaclass of TensorFlow 2.21 takes positional arguments as those of
  # `tf.Variable`.
  def __init__(
    self,
    *,
    name: str,
    shape: Sequence[int],
    dtype: tf.DType | str,
    trainable: bool,
    shared_name: str,
    container: str,
    constraint: Callable[[tf.Variable], tf.Tensor] | None = None,
  ):
    shape = tf.TensorShape(shape)
    dtype = tf.as_dtype(dtype)

    def make_handle() -> tf.Tensor:
      handle = tf.raw_ops.VarHandleOp(
        shape=shape, dtype=dtype, shared_name=shared_name, container=container
      )
      # `VarHandleOp` does not set shape and dtype of an eager handle.
      handle_data_util.set_handle_data(
        handle, handle_data_util.create_handle_data(shape, dtype)
      )
      return handle

    self._resource = _Handle(make_handle)
    super().__init__(
      name=name,
      shape=shape,
      dtype=dtype,
      handle=self._resource.eager,
      handle_name=name,
      unique_id=f"{container}:{shared_name}",
      trainable=trainable,
      constraint=constraint,
      in_graph_mode=False,
      synchronization=tf.VariableSynchronization.AUTO,
      aggregation=tf.VariableAggregation.NONE,
    )
    self.path = name

  @property
  def handle(self) -> tf.Tensor:
    """The handle of the resource, for the operation that is being made."""
    return self._resource.here()

  @property
  def device(self) -> str:
    """The name of the variable's device."""
    return self._resource.device

  @property
  def num_bytes(self) -> int:
    """Number of bytes of the variable's value."""
    return (self.shape.num_elements() or 0) * self.dtype.size

  def gather(self, rows: tf.Tensor) -> tf.Tensor:
    """Reads some rows of the variable, on the variable's device.

    Gradient tapes do not record this read, and a `tf.function` that is traced
    does not count the variable among those that it uses.

    Args:
      rows: int64 [n], the indices of the rows.

    Returns:
      The rows, of shape [n, *shape[1:]].
    """
    with tf.device(self.device):
      found = tf.raw_ops.ResourceGather(
        resource=self.handle, indices=rows, dtype=self.dtype
      )
      return tf.ensure_shape(found, [None, *self.shape.as_list()[1:]])

  def count_up(self) -> tf.Tensor:
    """Increases the variable, an integer scalar, by 1 in one operation.

    To be used inside a `tf.function` (see `remote_reader`). Of several calls at
    the same time, no two return the same number.

    Returns:
      The value before.
    """
    return tf.raw_ops.ResourceCountUpTo(
      resource=self.handle, limit=self.dtype.max, T=self.dtype
    )

  def is_initialized(self, name: str | None = None) -> tf.Tensor:
    """Returns a bool scalar: whether some client has assigned a value.

    Clients are the processes that train and share the variable.

    Args:
      name: Not used; `tf.Variable` has this argument.
    """
    return tf.raw_ops.VarIsInitializedOp(resource=self.handle)

  def read_value(self) -> tf.Tensor:
    """Returns the value of the variable.

    Outside of a `tf.function`, the value of a variable on another task is
    copied to this process, by the call of a function. If that task is dead, the
    call fails at once. (Without the function, the second eager read from a dead
    task hangs in TensorFlow 2.21.)
    """
    if tf.inside_function() or not self._is_remote:
      return super().read_value()
    flush_assignments([self])
    return self._fetch()

  @functools.cached_property
  def _is_remote(self) -> bool:
    there = tf.DeviceSpec.from_string(self.device)
    here = tf.DeviceSpec.from_string(this_device())
    return (there.job, there.task) != (here.job, here.task)

  @functools.cached_property
  def _fetch(self) -> "RemoteReader[tf.Tensor]":
    return RemoteReader(super().read_value)

  def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
    if tf.inside_function() or not self._is_remote:
      return super()._read_variable_op(no_copy)
    return self.read_value()


class RemoteReader(Generic[_Tensors]):
  """A function that reads tensors of other tasks into this process.

  If a task that it needs has died, a call fails at once. (Eager reads may hang
  in TensorFlow 2.21.) A call may miss eager assignments that were made just
  before it, unless `flush_assignments` is called between.
  """

  def __init__(self, read: Callable[[], _Tensors]):
    """Stores the function `read`, which is traced at the first call.

    Args:
      read: Returns tensors, of other tasks too, in any structure.
    """
    here = this_device()

    @tf.function(autograph=False)
    def fetch() -> _Tensors:
      tensors = read()
      with tf.device(here):
        return tf.nest.map_structure(tf.identity, tensors)

    self._fetch = fetch

  def trace(self) -> Callable[[], _Tensors]:
    """Traces the function that reads, unless it is traced already.

    Returns:
      The traced function.
    """
    with tf.device(None):
      return self._traced

  @functools.cached_property
  def _traced(self) -> Callable[[], _Tensors]:
    return self._fetch.get_concrete_function()

  def __call__(self) -> _Tensors:
    """Reads the tensors, and returns copies of them in this process."""
    traced = self.trace()
    with tf.device(None):
      return traced()


def remote_reader(read: Callable[[], _Tensors]) -> RemoteReader[_Tensors]:
  """Makes a reader that copies the tensors of `read` to this process.

  Args:
    read: Returns tensors, of other tasks too, in any structure.

  Returns:
    A function without arguments that returns the copies. It fails at once if a
    task that it needs has died.
  """
  return RemoteReader(read)


def this_device() -> str:
  """Returns the full name of a CPU device of this process.

  In a process that uses devices of a whole cluster, the short name
  `/device:CPU:0` may mean that of another task.
  """
  with tf.init_scope(), tf.device(None):
    return tf.constant(0).device


class Queue:
  """FIFO queue of the current device that all clients share by its name.

  Clients are the processes that train. A queue is made by `Namespace.queue`.
  All methods may be used inside a `tf.function`. `dequeue`, which blocks, may
  be used only inside: an eager op that blocks on a remote task also blocks the
  eager ops of all other clients on that task.

  Attributes:
    device: The device of the queue.
  """

  def __init__(self, name: str, dtypes: Sequence[tf.DType], container: str):
    self._dtypes = list(dtypes)
    self._resource = _Handle(
      lambda: tf.raw_ops.FIFOQueueV2(
        component_types=self._dtypes,
        shapes=[],
        capacity=-1,
        container=container,
        shared_name=name,
      )
    )
    self.device = self._resource.device

  @property
  def _handle(self) -> tf.Tensor:
    return self._resource.here()

  def enqueue(self, components: Sequence[tf.Tensor]) -> tf.Operation | None:
    """Appends one element to the queue.

    Args:
      components: One tensor per dtype of the queue.

    Returns:
      The op that appends the element, if called inside a `tf.function`; else
      None.

    Raises:
      tf.errors.CancelledError: At run time, if the queue is closed.
    """
    with tf.device(self.device):
      return tf.raw_ops.QueueEnqueueV2(
        handle=self._handle, components=list(components)
      )

  def dequeue(self) -> list[tf.Tensor]:
    """Waits until the queue has an element, removes it, and returns it.

    Returns:
      One tensor per dtype of the queue.

    Raises:
      tf.errors.OutOfRangeError: At run time, if the queue is closed and empty.
    """
    with tf.device(self.device):
      return list(
        tf.raw_ops.QueueDequeueV2(
          handle=self._handle, component_types=self._dtypes
        )
      )

  def size(self) -> tf.Tensor:
    """Returns the number of elements in the queue, an int32 scalar."""
    with tf.device(self.device):
      return tf.raw_ops.QueueSizeV2(handle=self._handle)

  def close(self) -> None:
    """Closes the queue for all processes.

    From now on, `enqueue` fails. `dequeue` takes the elements that are left; if
    there are none, it fails, even if it was already waiting for one.
    """
    with tf.device(self.device):
      tf.raw_ops.QueueCloseV2(handle=self._handle, cancel_pending_enqueues=True)


class QueueArray:
  """Several queues of one task; a tensor chooses one of them at run time.

  That takes the same number of ops for any number of queues. (The function
  `switch` could choose a queue too, but makes ops for every queue.)
  """

  def __init__(self, queues: Sequence[Queue]):
    """Stores the handles of the queues in one tensor, on their task.

    Args:
      queues: The queues, at least one, with elements of the same dtypes.
    """
    self.device = queues[0].device
    with tf.init_scope(), tf.device(self.device):
      self._handles = tf.raw_ops.Pack(values=[q._handle for q in queues])

  def enqueue(
    self, index: tf.Tensor, components: Sequence[tf.Tensor]
  ) -> tf.Operation | None:
    """Appends one element to one of the queues.

    Args:
      index: Integer scalar, the position of the queue among those given to the
        constructor.
      components: One tensor per dtype of the queue.

    Returns:
      The op that appends the element, if called inside a `tf.function`; else
      None.

    Raises:
      tf.errors.CancelledError: At run time, if the queue is closed.
    """
    with tf.device(self.device):
      return tf.raw_ops.QueueEnqueueV2(
        handle=tf.gather(self._handles, index), components=list(components)
      )


class Mutex:
  """Lock of the current device that all clients share by its name.

  Clients are the processes that train. A lock is made by `Namespace.mutex`, and
  used inside a `tf.function`. If a call of the function ends early, as when its
  client dies, the locks that the call holds are released.

  Attributes:
    device: The device of the lock.
  """

  def __init__(self, name: str, container: str):
    self._resource = _Handle(
      lambda: tf.raw_ops.MutexV2(container=container, shared_name=name)
    )
    self.device = self._resource.device

  def hold(
    self,
    body: Callable[[], _Tensors],
    after: Sequence[tf.Tensor] = (),
  ) -> _Tensors:
    """Runs the operations that `body` creates while the lock is held.

    Args:
      body: Creates ops, and returns tensors in any structure. The lock is
        released when all of its stateful ops, and its calls of
        `control_flow.call_on`, have ended.
      after: Tensors to wait for before the lock is acquired, such as inputs of
        `body` that come from another task.

    Returns:
      Copies of the tensors, on the device of the caller.
    """

    def whole() -> _Tensors:
      results = body()
      if calls := control_flow.stateless_calls():
        with tf.device(self.device), tf.control_dependencies(calls):
          # Stateful, so that it is waited for, and by it the calls.
          tf.raw_ops.Assert(condition=True, data=[0])
      return results

    with tf.device(self.device):
      with tf.control_dependencies(list(after)):
        lock = tf.raw_ops.MutexLock(mutex=self._resource.here())
      with tf.control_dependencies([lock]):
        # The call of a function ends when all of its stateful ops have ended.
        results = tf.function(whole, autograph=False)()
      with tf.control_dependencies(tf.nest.flatten(results)):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([released]):
      return tf.nest.map_structure(tf.identity, results)


def check_room(needed: Mapping[str, int], what: str) -> None:
  """Checks that large variables fit into the memory of their tasks.

  On systems other than Linux nothing is checked.

  Args:
    needed: The number of bytes to be allocated, by device.
    what: What needs the memory, for the error message.

  Raises:
    ValueError: If a task has less memory available.
  """
  for device, num_bytes in needed.items():
    free = _available_bytes(device)
    if 0 <= free < num_bytes:
      raise ValueError(
        f"{what} needs {num_bytes / 2**30:.1f} GiB of memory on {device}, where"
        f" {free / 2**30:.1f} GiB are available: use more parameter servers,"
        " machines with more memory, or fewer rows."
      )


def _available_bytes(device: str) -> int:
  """Returns how many bytes of memory are free on the machine of a device.

  Args:
    device: A device, which may belong to another task.

  Returns:
    The number of bytes; -1 if it is not known, as on systems without /proc.
  """
  try:
    text = bytes(_memory_reader(device, this_device())().numpy()).decode()
  except tf.errors.NotFoundError:
    return -1
  found = re.search(r"MemAvailable:\s*(\d+) kB", text)
  return int(found[1]) * 1024 if found else -1


@functools.cache
def _memory_reader(device: str, here: str) -> RemoteReader[tf.Tensor]:
  """Makes a function that reads /proc/meminfo on the machine of a task.

  The result is cached for each pair of arguments, so that the function is
  traced only once.

  Args:
    device: A device of the task.
    here: `this_device()`. It changes when this process joins a cluster, and
      the function must then be traced again.
  """
  del here

  @tf.function(autograph=False)
  def read() -> tf.Tensor:
    with tf.device(device):
      return read_text("/proc/meminfo")

  return remote_reader(read)


def read_text(path: str) -> tf.Tensor:
  """Reads a text file of the current device's machine, as a string scalar.

  Unlike `tf.io.read_file`, it also reads files of /proc, whose size is 0.

  Args:
    path: The path of the file.
  """
  return tf.data.TextLineDataset(path).reduce(
    tf.constant(""), lambda text, line: tf.strings.join([text, line, "\n"])
  )


def copy_here(tensor: tf.Tensor) -> tf.Tensor:
  """Copies a tensor to the current device, before any other op uses it.

  The copy saves transfers: TensorFlow 2.21 sends the inputs of a conditional
  once per branch, taken or not, from the device of the input. An identity op
  would not help, as TensorFlow optimizes it away.

  Args:
    tensor: The tensor, on any device.
  """
  return tf.raw_ops.Snapshot(input=tensor)


class Scalars:
  """Scalars that are sent to another task as one vector.

  The caller sends `vector`; `split` makes scalars of the copy that arrives.

  Attributes:
    vector: float64 [n], the n scalars that are tensors, on the device where
      they were joined. Python numbers are not sent.
  """

  def __init__(self, *scalars: tf.Tensor | float):
    """Joins the scalars, on the current device.

    Args:
      *scalars: Tensors of any dtype, with integers below 2**53, or Python
        numbers. At least one is a tensor.
    """
    self._scalars = scalars
    tensors = [tf.cast(x, tf.float64) for x in scalars if tf.is_tensor(x)]
    self.vector = tf.stack(tensors)

  def split(self, vector: tf.Tensor | None) -> list[Any]:
    """Splits a copy of `vector`, on the current device.

    Args:
      vector: The copy.

    Returns:
      All scalars in the order of the constructor's arguments: tensors of the
      original dtypes, and the Python numbers as they are.
    """
    landed = iter(tf.unstack(vector))
    return [
      tf.cast(next(landed), x.dtype) if tf.is_tensor(x) else x
      for x in self._scalars
    ]


def transfer_scalars(device: str, *scalars: tf.Tensor | float) -> list[Any]:
  """Copies scalars to `device` as one tensor, which needs one remote call.

  Args:
    device: The device.
    *scalars: Tensors of any dtype, with integers below 2**53, or Python
      numbers, which are not sent.

  Returns:
    The scalars in the same order: tensors of the same dtypes on `device`, and
    the Python numbers as they are.
  """
  if not any(tf.is_tensor(x) for x in scalars):
    return list(scalars)
  joined = Scalars(*scalars)
  with tf.device(device):
    return joined.split(copy_here(joined.vector))


def switch(
  index: int | tf.Tensor,
  choices: Sequence[_Choice],
  use: Callable[[_Choice], _Tensors],
) -> _Tensors:
  """Applies a function to one of several objects, which an index chooses.

  The index may be a tensor, which decides at run time.

  Args:
    index: An int, or an integer scalar.
    choices: Any objects, such as the queues of the replicas.
    use: Creates ops for one object, and returns tensors. Structure and dtypes
      of the tensors must be equal for all objects.

  Returns:
    The tensors for `choices[index]`.
  """
  if isinstance(index, int):
    return use(choices[index])
  branches = [lambda choice=choice: use(choice) for choice in choices]
  return tf.switch_case(tf.cast(index, tf.int32), branches)


def clear(namespace: Namespace, address: str) -> None:
  """Deletes the resources of a namespace on a task, and so frees its memory.

  No client (a process that trains) may use these resources any more.

  Args:
    namespace: A namespace with a name.
    address: The address of the task, "host:port".

  Raises:
    tf.errors.OpError: If the task does not answer.
  """
  target = f"grpc://{address}"
  tf.compat.v1.Session.reset(target, containers=[namespace.container])


def flush_assignments(
  variables: Iterable[tf.Variable | SharedVariable],
) -> None:
  """Waits until functions can see the eager assignments of this client.

  A client is a process that trains. TensorFlow 2.21 sends eager ops to a remote
  task by a separate stream, which the next function call of this client may
  overtake (seen in 3 to 80 of 100 calls on a busy machine).

  Args:
    variables: Variables on the devices concerned; one per device is enough.
  """
  for variable in {v.device: v for v in variables}.values():
    variable.is_initialized().numpy()
