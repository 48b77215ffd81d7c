"""Spreads the layers of one model over several devices, in micro-batches.

The cluster spec's `layers` maps layers to the devices of a *tower*, one copy of
the model's computation. Model code never mentions a device:

    layers = model_parallel.place_layers(model, {"conv*": 0, "local*": 1})
    model_replica.Replica(
      variables, loss_fn, dataset_fn, devices, layers=layers, micro_batches=4
    )

1. `place_layers` wraps the `call` of every layer. Inside a `Pipeline` a layer
   creates its ops on its own device; elsewhere nothing changes.
2. Gradients are computed by `tf.gradients`, which puts the gradient of an op on
   the device of the op; `tf.GradientTape` does not.
3. The batch is split into equal parts, all in one graph. While a device
   computes one part, the next device computes the part before (Huang et al.
   2019, GPipe, section 2.2). A *stage* is a run of layers on one device. Every
   stage processes the parts in order; otherwise a device would interleave all
   parts and finish all of them late. At most `parts_under_way` parts are in
   flight, just enough to keep the devices busy, so that activations are stored
   for these parts only (Narayanan et al. 2019, PipeDream, section 3.2, with a
   single version of the weights).

Inside a `tf.function`, ops with side effects run in order, so layers with such
ops (`tf.py_function`, say) give correct results but do not overlap.
"""

import contextlib
import contextvars
import fnmatch
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import TypeAlias
from typing import TypeVar

import keras
import tensorflow as tf

from tf_replicas.store import placement

# Tensors in any `tf.nest` structure, with the examples along axis 0.
Batch: TypeAlias = (
  tf.Tensor
  | tf.RaggedTensor
  | tf.SparseTensor
  | Sequence["Batch"]
  | Mapping[str, "Batch"]
)
# What a layer returns: tensors in any `tf.nest` structure.
_Outputs = TypeVar("_Outputs")

_entered: contextvars.ContextVar["Pipeline | None"] = contextvars.ContextVar(
  "pipeline", default=None
)


class Layer(NamedTuple):
  """A layer of a model, and the device on which it runs.

  Attributes:
    name: The layer's Keras name.
    device: The index of the layer's device within a tower, the devices of one
      copy of the model.
    weights: The layer's weights, trainable or not.
  """

  name: str
  device: int
  weights: tuple[placement.VariableSpec, ...]


class LayerPlacement:
  """The assignment of a model's layers to the devices of a tower.

  A tower is one copy of the model's computation. `place_layers` makes this
  object.

  Attributes:
    layers: All layers, in the model's order.
    num_devices: The number of devices of one tower.
    num_of_path: Maps the path of a variable to the device index of its layer.
  """

  def __init__(self, layers: Sequence[Layer], num_of_path: Mapping[str, int]):
    self.layers = tuple(layers)
    self.num_devices = 1 + max((layer.device for layer in layers), default=0)
    self.num_of_path = dict(num_of_path)

  def towers(self, devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups N x D devices into N towers of D consecutive devices.

    A tower is one copy of the model's computation. D is `num_devices`.

    Args:
      devices: The devices of all towers.

    Returns:
      The devices of each tower; empty if there are no devices.

    Raises:
      ValueError: If the number of devices is not a multiple of D, or if there
        are none and the model is spread over several devices.
    """
    size = self.num_devices
    if len(devices) % size or (size > 1 and not devices):
      raise ValueError(
        f"`devices` must be a multiple of {size} devices, and at least {size}:"
        f" `layers` spreads a tower over {size}. Received: {len(devices)}."
      )
    return [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]

  def table(self, devices: Sequence[str]) -> str:
    """Formats a table of all layers with their devices and sizes.

    Args:
      devices: The devices of all towers (copies of the model), in order.

    Returns:
      Lines of text, without a final newline.
    """
    towers = self.towers(devices)
    names = [", ".join(t[i] for t in towers) for i in range(self.num_devices)]
    width = max(len(layer.name) for layer in self.layers)
    lines = [f"{'layer':{width}}  {'parameters':>12}  {'bytes':>9}  device"]
    loads = [0] * self.num_devices
    for layer in self.layers:
      num_bytes = sum(spec.num_bytes for spec in layer.weights)
      loads[layer.device] += num_bytes
      lines.append(
        f"{layer.name:{width}}  {sum(s.size for s in layer.weights):>12,}"
        f"  {placement.human_bytes(num_bytes):>9}  {names[layer.device]}"
      )
    lines.append("")
    for name, load in zip(names, loads, strict=True):
      lines.append(f"{placement.human_bytes(load):>9} of weights on {name}")
    lines.append(
      f"Balance: {placement.balance(loads):.2f} (max/mean bytes per device)"
    )
    return "\n".join(lines)


def assign(
  layer_names: Sequence[str], layers: Mapping[str, int]
) -> dict[str, int]:
  """Maps the layers of a model to devices, by patterns for their names.

  The first matching pattern decides, in the order of `layers`. A layer that
  matches no pattern gets the device of the layer before it; layers before the
  first match get device 0.

  Args:
    layer_names: The names, in the model's order.
    layers: Maps shell patterns (`conv*`) to device indices within a tower, one
      copy of the model.

  Returns:
    The device index of every layer name.

  Raises:
    ValueError: If a pattern decides for no layer, or a device has no layer.
  """
  numbers, used, number = {}, set(), 0
  for name in layer_names:
    for pattern in layers:
      if fnmatch.fnmatchcase(name, pattern):
        number = layers[pattern]
        used.add(pattern)
        break
    numbers[name] = number
  for pattern in layers:
    if pattern not in used:
      matches = fnmatch.filter(layer_names, pattern)
      reason = "it matches none"
      if matches:
        reason = "earlier patterns match the same layers"
      raise ValueError(
        "Every pattern of `layers` must place at least one of the layers"
        f" {', '.join(layer_names)}. Received: {pattern!r}: {reason}."
      )
  taken = set(numbers.values())
  idle = set(range(max(taken, default=-1) + 1)) - taken
  if idle:
    raise ValueError(
      "`layers` must place a layer on every device. Received:"
      f" {dict(layers)}, where device {min(idle)} has none."
    )
  return numbers


def place_layers(
  model: keras.Model, layers: Mapping[str, int]
) -> LayerPlacement:
  """Makes the layers of a model run on several devices.

  A tower is one copy of the model's computation, on its device or devices.

  The model may have any topology if its `call` calls the layers in
  `model.layers`; a nested model counts as one layer, and inputs do not count.
  The devices apply where a replica computes gradients; elsewhere the model
  works as before. Computations outside of all layers, such as the loss, run on
  the last layer's device.

  Args:
    model: A built Keras model; the `call` of its layers is replaced.
    layers: Maps shell patterns for names of layers (`conv*`) to device indices
      within a tower. The first matching pattern decides. A layer that matches
      no pattern gets the device of the layer before it. Empty for one device.

  Returns:
    The device of every layer.

  Raises:
    ValueError: If the model is not built, a pattern decides for no layer, or a
      device has no layer.
  """
  if not model.built:
    raise ValueError(f"`model` must be built. Received: {model.name!r}.")
  # Functional models skip their inputs' `call`.
  found = [
    x for x in model.layers if not isinstance(x, keras.layers.InputLayer)
  ]
  numbers = assign([layer.name for layer in found], layers)
  num_of_path = {}
  for layer in found:
    for variable in layer.variables:
      num_of_path.setdefault(variable.path, numbers[layer.name])
  result = LayerPlacement(
    [
      Layer(x.name, numbers[x.name], tuple(placement.from_variables(x.weights)))
      for x in found
    ],
    num_of_path,
  )
  if result.num_devices > 1:
    for layer in found:
      layer.call = _placed(layer.call, result, numbers[layer.name])
  return result


def _placed(
  call: Callable[..., _Outputs], layers: LayerPlacement, number: int
) -> Callable[..., _Outputs]:
  # `call` and not `__call__`: Keras 3.15 handles masks, mixed precision and
  # losses around it, and has read the signature of `call` at construction.
  @functools.wraps(call)
  def placed(*args, **kwargs) -> _Outputs:
    pipeline = _entered.get()
    if pipeline is None or pipeline.layers is not layers:
      return call(*args, **kwargs)
    return pipeline.run(number, lambda: call(*args, **kwargs))

  return placed


class Pipeline:
  """Builds the graph of a model whose layers are on several devices.

  A batch is split into parts, so that the devices work on different parts at
  the same time.
  """

  def __init__(self, layers: LayerPlacement, devices: Sequence[str]):
    """Initializes the pipeline.

    To build the graph, the caller enters the context `part` for each part of a
    batch, and calls the model there.

    Args:
      layers: The device of each layer of the model.
      devices: The `layers.num_devices` devices of the tower, one copy of the
        model.
    """
    self.layers = layers
    self._devices = tuple(devices)
    # For each stage, its device and the outputs of its last layer, in the
    # previous part and in this one.
    self._before: list[tuple[int, list[tf.Tensor]]] = []
    self._stages: list[tuple[int, list[tf.Tensor]]] = []

  def device_of(self, path: str) -> str:
    """Returns the device of the layer that owns a variable.

    Args:
      path: The path of the variable. If no layer owns it, the device of the
        last layer is returned.
    """
    last = self.layers.layers[-1].device
    return self._devices[self.layers.num_of_path.get(path, last)]

  @contextlib.contextmanager
  def part(self) -> Iterator[None]:
    """Returns the context in which to call the model with a part of the batch.

    It is to be entered once per part, in the order of the parts.
    """
    self._before, self._stages = self._stages, []
    token = _entered.set(self)
    try:
      with tf.device(self._devices[self.layers.layers[-1].device]):
        yield
    finally:
      _entered.reset(token)

  def run(self, number: int, call: Callable[[], _Outputs]) -> _Outputs:
    """Runs a layer on its device, for the present part of the batch.

    A stage is a sequence of consecutive layers on one device. The layer waits
    until the previous part of the batch has passed the whole stage to which the
    layer belongs.

    Args:
      number: Index of the device within the tower, one copy of the model.
      call: Calls the layer.

    Returns:
      The outputs of the layer.
    """
    previous: list[tf.Tensor] = []
    if not self._stages or self._stages[-1][0] != number:
      if len(self._stages) < len(self._before):
        previous = self._before[len(self._stages)][1]
      self._stages.append((number, []))
    with tf.device(self._devices[number]), tf.control_dependencies(previous):
      outputs = call()
    self._stages[-1] = (number, _tensors(outputs))
    return outputs


def parts_under_way(num_devices: int) -> int:
  """Returns how many parts of a batch a tower may process at the same time.

  A tower is one copy of a model, whose layers are on D devices. The result is
  2 D - 1, since D parts do not keep D devices busy. In a measurement with 8
  parts per batch on D = 3 emulated devices of fixed speed, the speed relative
  to one device was 2.0 with 3 parts at the same time, and 2.3 with 5 parts or
  without a limit. The theoretical maximum is 2.4 (`benchmarks.pipeline`).

  Args:
    num_devices: D, the number of devices of the tower.
  """
  return 2 * num_devices - 1


def parts(batch: Batch, count: int, name: str) -> list[Batch]:
  """Splits a batch along axis 0 into equal parts.

  Args:
    batch: Tensors with the examples along axis 0.
    count: The number of parts.
    name: The name of `count` in the error message.

  Returns:
    `count` batches of the same structure.

  Raises:
    ValueError: If the batch size is static and no multiple of `count`.
  """
  if count == 1:
    return [batch]
  tensors = tf.nest.flatten(batch)
  for x in tensors:
    if x.shape.rank and x.shape[0] is not None and x.shape[0] % count:
      raise ValueError(
        f"`{name}` must divide the number of examples in a batch. Received:"
        f" {count} for {x.shape[0]} examples."
      )
  splits = [tf.split(x, count) for x in tensors]
  return [
    tf.nest.pack_sequence_as(batch, part) for part in zip(*splits, strict=True)
  ]


def after(
  done: Sequence[tf.Tensor | tf.IndexedSlices | None], batch: Batch
) -> Batch:
  """Delays a batch until given tensors are computed.

  This limits how many parts of a batch are processed at the same time.

  Args:
    done: The tensors to wait for.
    batch: The batch.

  Returns:
    A copy of `batch`, which is available only after the tensors.
  """
  with tf.control_dependencies(_tensors(done)):
    return tf.nest.map_structure(tf.identity, batch)


def _tensors(structure: object) -> list[tf.Tensor]:
  """Returns all tensors within any `tf.nest` structure, as a flat list."""
  flat = tf.nest.flatten(structure, expand_composites=True)
  return [x for x in flat if tf.is_tensor(x)]
