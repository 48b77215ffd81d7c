"""Layers on devices: one model over several devices, in micro-batches.

The cluster spec's `layers` says which layer computes on which device of a
tower. Model code never mentions a device:

    layers = model_parallel.place_layers(model, {"conv*": 0, "local*": 1})
    towers.Replica(
      variables, loss_fn, dataset_fn, devices, layers=layers, micro_batches=4
    )

1. `place_layers` wraps the `call` of every layer. Nothing changes until a
   `Pipeline` is entered; then a layer makes its ops on its own device.
2. Gradients are `tf.gradients`, which puts the gradient of each op on the
   device of the op; `tf.GradientTape` would not.
3. The batch is cut in equal parts, all in one graph, and while a device
   computes on one part, the next device computes on the part before (Huang et
   al. 2019, GPipe, section 2.2). A *stage* is a run of layers on one device.
   Every stage takes the parts in order, as without it a device would work on
   all of them at once and be done with all of them late. Only so many parts are
   under way (`parts_under_way`) that the devices stay busy: what the forward
   pass keeps is kept of these and not of all (Narayanan et al. 2019, PipeDream,
   section 3.2, with one set of weights).

Inside a `tf.function` ops with side effects wait for each other, so layers with
such ops (`tf.py_function`, say) are right but do not overlap.
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

import keras
import tensorflow as tf

from tf_replicas import placement

_entered: contextvars.ContextVar["Pipeline | None"] = contextvars.ContextVar(
  "pipeline", default=None
)


class Layer(NamedTuple):
  """A layer as far as its placement is concerned.

  Attributes:
    name: Its Keras name.
    device: The number of its device within a tower.
    weights: Its weights, trainable or not.
  """

  name: str
  device: int
  weights: tuple[placement.VariableSpec, ...]


class LayerPlacement:
  """Which layer of a model computes on which device; see `place_layers`.

  Attributes:
    layers: All of them, in the model's order.
    num_devices: Devices of one tower.
    num_of_path: Path of a variable -> number of its layer's device.
  """

  def __init__(self, layers: Sequence[Layer], num_of_path: Mapping[str, int]):
    self.layers = tuple(layers)
    self.num_devices = 1 + max((layer.device for layer in layers), default=0)
    self.num_of_path = dict(num_of_path)

  def towers(self, devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups N x D devices into N towers of D consecutive ones.

    Raises:
      ValueError: If they cannot be so grouped. No devices are no towers; only
        a model on several devices needs some.
    """
    size = self.num_devices
    if len(devices) % size or (size > 1 and not devices):
      raise ValueError(
        f"`devices` must be a multiple of {size}, the devices over which"
        f" `layers` spreads one tower. Received: {len(devices)}."
      )
    return [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]

  def table(self, devices: Sequence[str]) -> str:
    """Lays the placement out for people: each layer, each device.

    Args:
      devices: Those of all towers, as `towers` takes them.
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
  """The device number of each layer.

  The first pattern that matches decides, in the order of the document. A layer
  that none matches follows the one before it; those before the first match are
  on device 0.

  Args:
    layer_names: In the model's order.
    layers: Pattern, as in a shell (`conv*`), -> device number within a tower.

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
      reason = "other patterns come first" if matches else "it matches none"
      raise ValueError(
        "`layers` must decide with every pattern for one of"
        f" {', '.join(layer_names)}. Received: {pattern!r}: {reason}."
      )
  taken = set(numbers.values())
  idle = set(range(max(taken, default=-1) + 1)) - taken
  if idle:
    raise ValueError(
      "`layers` must leave no device without a layer. Received:"
      f" {dict(layers)}, which leaves {min(idle)}."
    )
  return numbers


def place_layers(
  model: keras.Model, layers: Mapping[str, int]
) -> LayerPlacement:
  """Lets the layers of a model run on the devices of a tower.

  Of any model, with any topology, whose `call` calls the layers in
  `model.layers`; a model inside it counts as one layer, and an input as none.
  It goes on working as before, on one device, wherever no `Pipeline` is
  entered. What is computed outside of all layers, such as the loss, runs on the
  last layer's device.

  Args:
    model: Built.
    layers: Pattern -> device number within a tower; see `assign`. Without any
      there is one device.

  Raises:
    ValueError: If the model is not built, or as `assign` does.
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


def _placed(call: Callable, layers: LayerPlacement, number: int) -> Callable:
  # Keras calls `self.call` inside of its own bookkeeping (masks, mixed
  # precision, losses) and took the signature at construction (seen in 3.15).
  @functools.wraps(call)
  def placed(*args, **kwargs):
    pipeline = _entered.get()
    if pipeline is None or pipeline.layers is not layers:
      return call(*args, **kwargs)
    return pipeline.run(number, lambda: call(*args, **kwargs))

  return placed


class Pipeline:
  """The devices of one tower while its parts are laid out in a graph."""

  def __init__(self, layers: LayerPlacement, devices: Sequence[str]):
    """Starts before the first part.

    Args:
      layers: The placement of the model.
      devices: `layers.num_devices` of them.
    """
    self.layers = layers
    self._devices = tuple(devices)
    # For each stage, its device and what its last layer made of a part.
    self._before: list[tuple[int, list[tf.Tensor]]] = []
    self._stages: list[tuple[int, list[tf.Tensor]]] = []

  def device_of(self, path: str) -> str:
    """The device of the layer that owns the variable."""
    last = self.layers.layers[-1].device
    return self._devices[self.layers.num_of_path.get(path, last)]

  @contextlib.contextmanager
  def part(self) -> Iterator[None]:
    """Within it, the model is called with the next part."""
    self._before, self._stages = self._stages, []
    token = _entered.set(self)
    try:
      with tf.device(self._devices[self.layers.layers[-1].device]):
        yield
    finally:
      _entered.reset(token)

  def run(self, number: int, call: Callable):
    """Runs a layer on device `number`, in its stage's turn."""
    turn = []
    if not self._stages or self._stages[-1][0] != number:
      if len(self._stages) < len(self._before):
        turn = self._before[len(self._stages)][1]
      self._stages.append((number, []))
    with tf.device(self._devices[number]), tf.control_dependencies(turn):
      outputs = call()
    self._stages[-1] = (number, _tensors(outputs))
    return outputs


def parts_under_way(num_devices: int) -> int:
  """How many parts a tower may have between input and last gradient.

  D parts keep D devices busy only if none ever waits. With 8 parts and devices
  of a fixed speed, 3 devices were 2.0 times as fast as one with 3 parts under
  way, and 2.3 times with 2 D - 1 = 5 of them, as without a limit; 2.4 times is
  the most (`benchmarks.pipeline`).
  """
  return 2 * num_devices - 1


def parts(
  batch: Sequence[tf.Tensor], count: int, name: str
) -> list[tuple[tf.Tensor, ...]]:
  """Cuts a batch along axis 0 into equal parts.

  Args:
    batch: Tensors with the examples along axis 0.
    count: How many parts.
    name: What the error calls `count`.

  Raises:
    ValueError: If it is known that the parts cannot be equal.
  """
  if count == 1:
    return [tuple(batch)]
  for x in batch:
    if x.shape.rank and x.shape[0] is not None and x.shape[0] % count:
      raise ValueError(
        f"`{name}` must divide the examples of a batch. Received: {count} for"
        f" {x.shape[0]} examples."
      )
  return list(zip(*(tf.split(x, count) for x in batch), strict=True))


def after(done: object, batch: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
  """The batch, but not before all tensors within `done` are computed."""
  with tf.control_dependencies(_tensors(done)):
    return tuple(tf.identity(x) for x in batch)


def _tensors(structure) -> list[tf.Tensor]:
  flat = tf.nest.flatten(structure, expand_composites=True)
  return [x for x in flat if tf.is_tensor(x)]
