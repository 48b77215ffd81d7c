"""Makes operations of a TensorFlow graph conditional, or puts them in order."""

import contextvars
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

# Tensors in any `tf.nest` structure.
_Tensors = TypeVar("_Tensors")
# TensorFlow does not replace a call of such a function by the function's ops.
_STAYS_WHOLE = {"_noinline": True}
# The graph of the function of the innermost `call_on` that is being traced.
_call_graph: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "call_graph", default=None
)


def done(*results: tf.Operation | tf.Tensor | None) -> tf.Tensor:
  """Returns a scalar tensor, True, that is computed after `results`.

  So operations become a tensor, which a branch of `tf.cond` has to return.

  Args:
    *results: Tensors and operations to wait for, in any structure. None, which
      eager operations return, is ignored.
  """
  pending = [r for r in tf.nest.flatten(results) if r is not None]
  with tf.control_dependencies(pending):
    return tf.constant(True)


def call_on(
  device: str, fn: Callable[[], _Tensors], after: Sequence[tf.Tensor] = ()
) -> _Tensors:
  """Runs all operations that `fn` creates as one operation on `device`.

  A loop or a conditional that runs on several tasks then needs fewer messages.
  For single operations, TensorFlow (2.21) sends two more in each iteration. One
  goes to their task: operations without inputs, such as constants, may run. One
  comes from their task: the stateful operations have ended. A single operation
  whose results are used needs neither. Its task receives the tensors that `fn`
  uses, and sends those that `fn` returns.

  The function of the call makes the handles of shared resources by itself
  (`enclosing_call`), so it does not get them from outside. So TensorFlow does
  not put the call in order with other operations that use the same resource,
  within a call or not: only the tensors that they get and return do.

  In eager mode, the operations are not joined. Nor are they on a device whose
  name has no job: it is in this process, so there are no messages to save.

  Args:
    device: The device.
    fn: Creates operations, and returns tensors in any structure. At least one
      of these tensors has to be an input of another operation, for example by
      `after` of another call: TensorFlow may leave out a call of whose results
      none is used, and control dependencies do not count. `fn` must have no
      control dependencies on tensors from outside, and no operations for other
      tasks.
    after: Tensors to wait for, besides those that `fn` uses.

  Returns:
    The tensors, on `device`.
  """
  is_in_this_process = "/job:" not in device
  if tf.executing_eagerly() or is_in_this_process:
    with tf.device(device), tf.control_dependencies(list(after)):
      return fn()

  def body(*unused: tf.Tensor) -> _Tensors:
    del unused
    token = _call_graph.set(current_graph())
    try:
      with tf.device(device):
        return fn()
    finally:
      _call_graph.reset(token)

  after = [*after, _anchor(device)]
  function: Any = tf.function(
    body, autograph=False, experimental_attributes=_STAYS_WHOLE
  ).get_concrete_function(*after)
  assert not function.graph.function_captures.control, "use `after`"
  elsewhere = _elsewhere(function.graph, device)
  assert not elsewhere, f"{device} may not know {elsewhere}"
  function.add_to_graph()
  with tf.device(device):
    # The call that Python makes would be a stateful operation.
    results = tf.raw_ops.PartitionedCall(
      args=[*after, *function.captured_inputs],
      Tout=[output.dtype for output in function.outputs],
      f=function,
    )
  for result, output in zip(results, function.outputs, strict=True):
    result.set_shape(output.shape)
  return tf.nest.pack_sequence_as(
    function.structured_outputs, results, expand_composites=True
  )


def _elsewhere(graph: tf.Graph, device: str) -> list[str]:
  """Lists devices of other tasks on which operations of `graph` must run.

  A task that runs the function of a call may not know the other tasks:
  in-graph, parameter servers do not know each other.

  Args:
    graph: The graph of a function. Its branches and loops are not searched.
    device: The device of the call.
  """

  def task_of(name: str) -> tf.DeviceSpec:
    spec = tf.DeviceSpec.from_string(name)
    return spec.replace(device_type=None, device_index=None)

  here = task_of(device)

  def is_elsewhere(name: str) -> bool:
    there = task_of(name)
    # Both orders are equal unless they set one part of the name differently.
    return here.make_merged_spec(there) != there.make_merged_spec(here)

  names = {operation.device for operation in graph.get_operations()}
  return sorted(filter(is_elsewhere, names))


def _anchor(device: str) -> tf.Tensor:
  """Returns a tensor on `device` that TensorFlow does not take for a constant.

  TensorFlow (2.21) computes a stateless call only once, and then keeps the
  results, if all its inputs are constants or if it has none. Each call of
  `call_on` gets an anchor of its own: see `_Handle` of `resources`.
  """
  with tf.init_scope(), tf.device(device):
    # A handle, since small numbers would become constants.
    return tf.raw_ops.VarHandleOp(shape=[], dtype=tf.bool, shared_name="anchor")


def enclosing_call() -> Any:
  """Returns the graph of the function that `call_on` is tracing.

  It may enclose the graph that is being traced, that of a branch for example.

  Returns:
    The graph; None outside of `call_on`, and where operations run eagerly.
  """
  call = _call_graph.get()
  if call is None or tf.executing_eagerly():
    return None
  graph: Any = current_graph()
  while graph is not call and graph is not None:
    graph = getattr(graph, "outer_graph", None)
  return graph


def stateless_calls() -> list[tf.Operation]:
  """Returns the calls of `call_on` in the graph that is being traced.

  Only what uses their results waits for them, although their functions may read
  variables. Calls in branches and loops are not included.
  """
  return [
    operation
    for operation in current_graph().get_operations()
    if operation.type == "PartitionedCall"
  ]


def run_if(condition: bool | tf.Tensor, fn: Callable[[], object]) -> tf.Tensor:
  """Runs the operations that `fn` builds, but only if `condition` is true.

  Args:
    condition: A bool scalar, which may be a tensor of the graph.
    fn: Builds operations, and returns those to wait for, or None.

  Returns:
    A bool scalar, equal to `condition`. A control dependency on this scalar
    waits for what `fn` returned.
  """
  return tf.cond(condition, lambda: done(fn()), lambda: tf.constant(False))


def current_graph() -> tf.Graph:
  """Returns the graph of the innermost function or branch being traced."""
  return tf.compat.v1.get_default_graph()


def require(
  condition: tf.Tensor, message: str, value: tf.Tensor
) -> tf.Operation | tf.Tensor:
  """Makes an op that fails at run time if a condition is False.

  It is a single op. `tf.debugging.Assert` makes a conditional of some twenty
  ops.

  Args:
    condition: bool scalar.
    message: The error message.
    value: The wrong value, which is added to the message.

  Returns:
    An op or tensor to use as a control dependency, to wait for the check.

  Raises:
    tf.errors.InvalidArgumentError: At run time, if the condition is False.
  """
  checked = tf.raw_ops.Assert(condition=condition, data=[message, value])
  return tf.constant(True) if checked is None else checked
