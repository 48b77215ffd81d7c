"""Tests for replica.model_parallel, and of towers that use it."""

import functools
import os
import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from cifar10 import model as cifar10_model
from tests.support import stores
from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica

IN_2 = {"conv*": 0, "local*": 1}
IN_3 = {"conv1": 0, "conv2": 1, "local*": 2}
# The image goes back to the first device.
BACK = {"conv1": 0, "conv2": 1, "local*": 0}
DEVICES = [stores.device(i) for i in range(4)]


class AssignTest(parameterized.TestCase):
  def test_unmatched_follow_their_predecessor(self):
    names = ["scale", "conv1", "pool1", "conv2", "flatten", "local3", "out"]
    self.assertEqual(
      model_parallel.assign(names, {"conv*": 0, "local*": 1}),
      dict(zip(names, [0, 0, 0, 0, 0, 1, 1], strict=True)),
    )
    self.assertEqual(
      model_parallel.assign(names, {"conv?": 1, "flatten": 0}),
      dict(zip(names, [0, 1, 1, 1, 0, 0, 0], strict=True)),
    )

  def test_first_match_wins(self):
    self.assertEqual(
      model_parallel.assign(["a1", "a2"], {"a2": 1, "a*": 0}),
      {"a1": 0, "a2": 1},
    )

  def test_no_patterns_no_layers(self):
    self.assertEqual(model_parallel.assign(["a", "b"], {}), {"a": 0, "b": 0})
    self.assertEqual(model_parallel.assign([], {}), {})

  @parameterized.parameters(
    ({"a": 0, "fc*": 1}, r"layers a, b\. Received: 'fc\*': it matches none\."),
    ({"*": 0, "b": 1}, r"Received: 'b': earlier patterns match"),
    (
      {"a": 0, "b": 2},
      r"on every device\. Received: .*where device 1 has none\.",
    ),
    ({"*": 1}, "device 0 has none"),
  )
  def test_mistakes(self, layers, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      model_parallel.assign(["a", "b"], layers)
    self.assertNotIn("\n", str(caught.exception))


def _cifar10():
  model = cifar10_model.build(seed=1)
  paths = [v.path for v in model.trainable_variables]

  def loss_fn(parameters, images, labels):
    named = dict(zip(paths, parameters, strict=True))
    return cifar10_model.total_loss(model, named, images, labels)[0]

  return model, loss_fn


def _images():
  images = np.random.default_rng(2).normal(size=[8, 24, 24, 3])
  return tf.constant(images, tf.float32), tf.range(8)


def _compute(replica, batch, *args):
  """One gradient inside a `tf.function`; and the function's graph."""
  values = [tf.convert_to_tensor(v) for v in replica.variables]
  fn = tf.function(lambda p, b: replica.gradients(p, b, *args))
  graph = fn.get_concrete_function(values, batch).graph
  return fn(values, batch), graph


def _cifar10_replica(layers, devices=(), **kwargs):
  model, loss_fn = _cifar10()
  if layers is not None:
    kwargs["layers"] = model_parallel.place_layers(model, layers)
  return model_replica.Replica(
    model.trainable_variables, loss_fn, lambda *_: None, devices, **kwargs
  )


@functools.cache
def _unsplit():
  result, _ = _compute(_cifar10_replica(None), _images())
  return result


def _assert_same(test, ours, theirs, tolerance=1e-5):
  np.testing.assert_allclose(ours.loss, theirs.loss, rtol=tolerance)
  test.assertEqual(int(ours.num_examples), int(theirs.num_examples))
  for a, b in zip(ours.gradients, theirs.gradients, strict=True):
    np.testing.assert_allclose(
      tf.convert_to_tensor(a), tf.convert_to_tensor(b), atol=tolerance
    )


def _ancestors(op):
  """All ops that must run before `op`."""
  seen, todo = set(), [op]
  while todo:
    current = todo.pop()
    before = [x.op for x in current.inputs] + list(current.control_inputs)
    todo += [x for x in before if x not in seen]
    seen.update(before)
  return seen


def _ops(graph, kind, device=None):
  return [
    op
    for op in graph.get_operations()
    if op.type == kind and device in (None, op.device)
  ]


def _last_of_parts(graph):
  """Of each part, the op that ends it: the gradient of the first kernel."""
  kernels = _ops(graph, "Conv2DBackpropFilter")
  return [op for op in kernels if "conv1" in op.name]


class Cifar10Test(stores.TestCase):
  """Split = unsplit; the network's own test numbers are elsewhere."""

  @parameterized.product(layers=[IN_2, IN_3, BACK], micro_batches=[1, 2, 4])
  def test_loss_and_gradients_as_unsplit(self, layers, micro_batches):
    devices = DEVICES[: 1 + max(layers.values())]
    replica = _cifar10_replica(layers, devices, micro_batches=micro_batches)
    result, _ = _compute(replica, _images())
    _assert_same(self, result, _unsplit())

  @parameterized.parameters(({},), (None,))
  def test_micro_batches_on_one_device(self, layers):
    replica = _cifar10_replica(layers, micro_batches=4)
    result, graph = _compute(replica, _images())
    _assert_same(self, result, _unsplit())
    # One after the other: the memory is that of one.
    last = _last_of_parts(graph)
    self.assertLen(last, 4)
    self.assertContainsSubset(last[:3], _ancestors(last[3]))

  @parameterized.parameters(1, 2)
  def test_towers_of_two_devices(self, micro_batches):
    replica = _cifar10_replica(IN_2, DEVICES, micro_batches=micro_batches)
    self.assertEqual(replica.towers(), [tuple(DEVICES[:2]), tuple(DEVICES[2:])])
    result, graph = _compute(replica, _images())
    _assert_same(self, result, _unsplit())
    for device in DEVICES:
      conv = 2 * micro_batches if device in DEVICES[::2] else 0
      self.assertLen(_ops(graph, "Conv2D", device), conv)
      self.assertLen(_ops(graph, "Conv2DBackpropFilter", device), conv)

  def test_scaled_loss(self):
    replica = _cifar10_replica(IN_2, DEVICES[:2])
    result, _ = _compute(replica, _images(), lambda loss: 8.0 * loss)
    scaled = result._replace(gradients=[g / 8.0 for g in result.gradients])
    _assert_same(self, scaled, _unsplit())

  def test_in_a_loop_as_when_replicas_give_several_batches(self):
    replica = _cifar10_replica(IN_2, DEVICES[:2], micro_batches=2)
    expected = _unsplit()
    values = [tf.convert_to_tensor(v) for v in replica.variables]
    zeros = [tf.zeros_like(v) for v in values]

    @tf.function
    def two():
      def body(i, *sums):
        gradients = replica.gradients(values, _images()).gradients
        return i + 1, *(a + b for a, b in zip(sums, gradients, strict=True))

      return tf.while_loop(lambda i, *_: i < 2, body, [0, *zeros])[1:]

    for ours, theirs in zip(two(), expected.gradients, strict=True):
      np.testing.assert_allclose(ours / 2.0, theirs, atol=1e-5)


def _in_python(fn, x, *args):
  *tensors, is_first = (x, *args)
  y = tf.numpy_function(
    lambda *values: fn(*values, is_first), tensors, x.dtype, stateful=False
  )
  return tf.ensure_shape(y, x.shape)


class GraphTest(stores.TestCase):
  def test_every_op_is_on_its_layers_device(self):
    replica = _cifar10_replica(IN_2, DEVICES[:2], micro_batches=2)
    _, graph = _compute(replica, _images())
    first, second = DEVICES[:2]
    expected = {
      "Conv2D": first,
      "Conv2DBackpropInput": first,
      "Conv2DBackpropFilter": first,
      "MaxPool": first,
      "MaxPoolGrad": first,
      "Rsqrt": first,
      "SparseSoftmaxCrossEntropyWithLogits": second,
      "L2Loss": second,
    }
    for kind, device in expected.items():
      self.assertNotEmpty(_ops(graph, kind))
      self.assertEqual({op.device for op in _ops(graph, kind)}, {device}, kind)
    for op in graph.get_operations():
      layer = op.name.removeprefix("gradients/").partition("_1")[0]
      if layer.startswith("local"):
        self.assertEqual(op.device, second, op.name)
    # Neither is a mean computed elsewhere than its gradients.
    for gradient, variable in zip(
      graph.structured_outputs.gradients, replica.variables, strict=True
    ):
      is_first = variable.path.startswith("conv")
      mean = gradient.op.inputs[0].op  # Of the function's output.
      self.assertEqual(mean.device, first if is_first else second)

  def test_a_run_computes_where_the_graph_says(self):
    """TensorFlow's own partitions, after its optimizers."""
    replica = _cifar10_replica(IN_3, DEVICES[:3], micro_batches=2)
    values = stores.numpy([*replica.variables, *_images()])
    _, traced = _compute(replica, _images())
    with tf.Graph().as_default() as graph:
      tf.graph_util.import_graph_def(traced.as_graph_def(), name="")
    metadata = tf.compat.v1.RunMetadata()
    config = tf.compat.v1.ConfigProto(device_count={"CPU": stores.NUM_DEVICES})
    with tf.compat.v1.Session(graph=graph, config=config) as session:
      session.run(
        [g.name for g in traced.structured_outputs.gradients],
        {x.name: value for x, value in zip(traced.inputs, values, strict=True)},
        options=tf.compat.v1.RunOptions(output_partition_graphs=True),
        run_metadata=metadata,
      )
    found = {
      kind: {
        node.device[-1]
        for partition in metadata.partition_graphs
        for node in partition.node
        if kind in node.op  # Also within `_MklNativeFusedConv2D`.
      }
      for kind in ("Conv2D", "Conv2DBackpropFilter", "MaxPoolGrad", "Softmax")
    }
    self.assertEqual(
      found,
      {
        "Conv2D": {"0", "1"},
        "Conv2DBackpropFilter": {"0", "1"},
        "MaxPoolGrad": {"0", "1"},
        "Softmax": {"2"},
      },
    )

  def test_devices_can_overlap(self):
    """Nothing makes a device wait for what it does not need."""
    replica = _cifar10_replica(IN_2, DEVICES[:2], micro_batches=4)
    _, graph = _compute(replica, _images())
    conv = [op for op in _ops(graph, "Conv2D") if op.name.startswith("conv2")]
    loss = _ops(graph, "SparseSoftmaxCrossEntropyWithLogits")
    last = _last_of_parts(graph)
    self.assertEqual([len(conv), len(loss), len(last)], [4, 4, 4])
    on_second = {op for op in graph.get_operations() if op.device == DEVICES[1]}
    parameters = {op for op in on_second if op.type == "Identity"}

    # While device 1 computes part 0, device 0 computes part 1.
    self.assertEmpty(_ancestors(conv[1]) & on_second - parameters)
    self.assertNotIn(conv[1], _ancestors(loss[0]))
    # While device 0 goes back through part 0, device 1 computes part 1.
    self.assertNotIn(last[0], _ancestors(loss[1]))
    self.assertNotIn(loss[1], _ancestors(last[0]))
    # The parts take turns, and no fourth is under way.
    self.assertIn(conv[0], _ancestors(conv[1]))
    self.assertNotIn(loss[0], _ancestors(conv[2]))
    self.assertIn(last[0], _ancestors(conv[3]))
    self.assertNotIn(loss[1], _ancestors(conv[3]))

  @absltest.skipIf(os.cpu_count() < 2, "two threads wait for each other")
  def test_devices_do_overlap(self):
    """Each of two devices finds the other one at work."""
    meetings = [threading.Barrier(2, timeout=60) for _ in range(2)]

    def meeting(x, is_first):
      # The second device meets with part 0, the first with part 1.
      number = int(x[0, 0])
      if number == (1 if is_first else 0):
        meetings[0].wait()
      return x

    def meeting_gradient(x, gradient, is_first):
      # And on the way back the other way round.
      number = int(x[0, 0])
      if number == (0 if is_first else 1):
        meetings[1].wait()
      return gradient

    class Meet(keras.layers.Layer):
      def call(self, x):
        is_first = self.name == "first"

        @tf.custom_gradient
        def meet(x):
          def gradient(upstream):
            return _in_python(meeting_gradient, x, upstream, is_first)

          return _in_python(meeting, x, is_first), gradient

        return meet(x)

    inputs = keras.Input([1])
    x = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
    model = keras.Model(inputs, Meet(name="second")(Meet(name="first")(x)))
    placed = model_parallel.place_layers(model, {"second": 1})

    def loss_fn(parameters, x):
      outputs, _ = model.stateless_call(parameters, [], x)
      return tf.reduce_mean(tf.square(outputs))

    replica = model_replica.Replica(
      model.trainable_variables,
      loss_fn,
      lambda *_: None,
      DEVICES[:2],
      layers=placed,
      micro_batches=2,
    )
    result, _ = _compute(replica, (tf.constant([[0.0], [1.0]]),))
    self.assertEqual(float(result.loss), 0.5)
    self.assertEqual([m.broken for m in meetings], [False, False])
    self.assertEqual(float(result.gradients[0][0, 0]), 1.0)


def _topology(dtype="float32"):
  """Two inputs, a skip connection, state, seeds, losses, nested outputs."""
  keras.utils.set_random_seed(5)
  layers = keras.layers
  a = keras.Input([6, 6, 3], name="a")
  b = keras.Input([5], name="b")
  x = layers.Conv2D(4, 3, padding="same", name="in", dtype=dtype)(a)
  y = layers.BatchNormalization(name="bn1", dtype=dtype)(x)
  y = layers.Conv2D(4, 3, padding="same", name="mid", dtype=dtype)(y)
  y = layers.BatchNormalization(name="bn2", dtype=dtype)(y)
  y = layers.Add(name="skip", dtype=dtype)([x, y])
  y = layers.Dropout(0.5, seed=3, name="drop", dtype=dtype)(y)
  y = layers.GlobalAveragePooling2D(name="gap", dtype=dtype)(y)
  z = layers.Dense(
    4, name="side", dtype=dtype, activity_regularizer="l2", use_bias=False
  )(b)
  z = layers.Concatenate(name="cat", dtype=dtype)([y, z])
  out = layers.Dense(3, name="out", dtype="float32")(z)
  aux = layers.Dense(2, name="aux", dtype="float32", kernel_regularizer="l2")(y)
  return keras.Model({"a": a, "b": b}, {"out": out, "aux": [aux, y]})


SPREAD = {"in": 0, "mid": 1, "skip": 2, "side": 0, "cat": 1, "aux": 2}


class TopologyTest(stores.TestCase):
  def _inputs(self):
    return {
      "a": tf.random.stateless_normal([4, 6, 6, 3], [1, 1]),
      "b": tf.random.stateless_normal([4, 5], [2, 2]),
    }

  def _run(self, model, pipeline, training):
    trainable = [tf.convert_to_tensor(v) for v in model.trainable_variables]
    states = [tf.convert_to_tensor(v) for v in model.non_trainable_variables]

    @tf.function
    def run(trainable, states, inputs):
      def call():
        return model.stateless_call(
          trainable, states, inputs, training=training, return_losses=True
        )

      if pipeline is None:
        outputs, updates, losses = call()
      else:
        with pipeline.part():
          outputs, updates, losses = call()
      total = tf.add_n(
        [
          tf.reduce_sum(tf.square(tf.cast(x, tf.float32)))
          for x in tf.nest.flatten([outputs, losses])
        ]
      )
      return outputs, updates, losses, tf.gradients(total, trainable)

    return run(trainable, states, self._inputs())

  @parameterized.product(
    dtype=["float32", "mixed_float16", "mixed_bfloat16"], training=[True, False]
  )
  def test_as_unsplit(self, dtype, training):
    model = _topology(dtype)
    expected = self._run(model, None, training)
    layers = model_parallel.place_layers(model, SPREAD)
    pipeline = model_parallel.Pipeline(layers, DEVICES[:3])
    result = self._run(model, pipeline, training)
    tf.nest.assert_same_structure(result, expected)
    for ours, theirs in zip(
      tf.nest.flatten(result), tf.nest.flatten(expected), strict=True
    ):
      self.assertEqual(ours.dtype, theirs.dtype)
      np.testing.assert_allclose(
        tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32), atol=1e-5
      )
    # Statistics and seeds did change, and the losses are three.
    changed = [
      np.any(np.asarray(new) != np.asarray(old))
      for new, old in zip(result[1], model.non_trainable_variables, strict=True)
    ]
    self.assertEqual(any(changed), training)
    self.assertLen(result[2], 2)

  def test_a_placed_model_works_alone_as_before(self):
    model = _topology()
    before = model(self._inputs(), training=False)
    placed = model_parallel.place_layers(model, SPREAD)
    self.assertEqual(placed.num_devices, 3)
    after = model(self._inputs(), training=False)
    tf.nest.map_structure(np.testing.assert_array_equal, after, before)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    after = copy(self._inputs(), training=False)
    tf.nest.map_structure(np.testing.assert_array_equal, after, before)

  def test_masks_recurrence_and_sparse_gradients(self):
    layers = [
      keras.Input([7], dtype="int32"),
      keras.layers.Embedding(11, 4, mask_zero=True, name="embed"),
      keras.layers.GRU(5, return_sequences=True, seed=1, name="gru1"),
      keras.layers.GRU(5, seed=1, name="gru2"),
      keras.layers.Dense(1, name="out"),
    ]
    model = keras.Sequential(layers)

    def loss_fn(parameters, words, labels):
      states = [v.value for v in model.non_trainable_variables]
      y, _ = model.stateless_call(parameters, states, words, training=True)
      return tf.reduce_mean(tf.square(y[:, 0] - labels))

    def dataset_fn(num_shards, shard_index, start_example):
      del num_shards, shard_index, start_example
      return tf.data.Dataset.from_tensors(batch)

    words = np.random.default_rng(0).integers(0, 11, [6, 7]).astype("int32")
    words[:, 5:] = 0
    batch = (tf.constant(words), tf.range(6.0))
    replica = functools.partial(
      model_replica.Replica, model.trainable_variables, loss_fn, dataset_fn
    )
    expected, _ = _compute(replica(), batch)
    placed = model_parallel.place_layers(model, {"embed": 0, "gru2": 1})
    for micro_batches in (1, 3):
      split = replica(DEVICES[:2], layers=placed, micro_batches=micro_batches)
      result, graph = _compute(split, batch)
      _assert_same(self, result, expected)
      self.assertIsInstance(result.gradients[0], tf.IndexedSlices)
      self.assertEqual(
        model_replica.sparsity(split), model_replica.sparsity(replica())
      )
      loops = [op for op in graph.get_operations() if "While" in op.type]
      self.assertEqual({op.device for op in loops}, set(DEVICES[:2]))

  def test_two_placements_of_one_model(self):
    """An entered pipeline moves layers by its own placement alone."""
    model, loss_fn = _cifar10()
    for layers in (IN_2, IN_3):
      placed = model_parallel.place_layers(model, layers)
      replica = model_replica.Replica(
        model.trainable_variables,
        loss_fn,
        lambda *_: None,
        DEVICES[1 : 1 + placed.num_devices],
        layers=placed,
      )
      result, graph = _compute(replica, _images())
      _assert_same(self, result, _unsplit())
      used = {op.device for op in graph.get_operations() if op.device}
      self.assertEqual(used, set(replica.devices))


class TableTest(stores.TestCase):
  def test_table(self):
    model, _ = _cifar10()
    placed = model_parallel.place_layers(model, IN_2)
    self.assertEqual(
      placed.table(["GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
      """\
layer             parameters      bytes  device
conv1                  4,864   19.0 KiB  GPU:0, GPU:2
pool1                      0        0 B  GPU:0, GPU:2
norm1                      0        0 B  GPU:0, GPU:2
conv2                102,464  400.2 KiB  GPU:0, GPU:2
norm2                      0        0 B  GPU:0, GPU:2
pool2                      0        0 B  GPU:0, GPU:2
flatten                    0        0 B  GPU:0, GPU:2
local3               885,120    3.4 MiB  GPU:1, GPU:3
local4                73,920  288.8 KiB  GPU:1, GPU:3
softmax_linear         1,930    7.5 KiB  GPU:1, GPU:3

419.2 KiB of weights on GPU:0, GPU:2
  3.7 MiB of weights on GPU:1, GPU:3
Balance: 1.80 (max/mean bytes per device)""",
    )

  def test_without_patterns_there_is_one_device(self):
    model, _ = _cifar10()
    placed = model_parallel.place_layers(model, {})
    self.assertEqual(placed.num_devices, 1)
    self.assertEqual(placed.towers(["a", "b"]), [("a",), ("b",)])
    self.assertEqual(placed.towers([]), [])

  @parameterized.parameters(0, 1, 3)
  def test_devices_that_make_no_towers(self, num_devices):
    with self.assertRaisesRegex(
      ValueError, f"`devices` must be a multiple of 2.*: {num_devices}"
    ):
      _cifar10_replica(IN_2, DEVICES[:num_devices])

  def test_model_that_is_not_built(self):
    model = keras.Sequential([keras.layers.Dense(1)], name="mine")
    with self.assertRaisesRegex(ValueError, "must be built.*'mine'"):
      model_parallel.place_layers(model, {})

  def test_pattern_of_an_input(self):
    with self.assertRaisesRegex(ValueError, "'images': it matches none"):
      _cifar10_replica({"images": 0, "local*": 1}, DEVICES[:2])


class PartsTest(stores.TestCase):
  def test_unequal(self):
    with self.assertRaisesRegex(
      ValueError, "`micro_batches` must divide.*: 3 for 8 examples"
    ):
      _compute(_cifar10_replica(None, micro_batches=3), _images())

  def test_too_few(self):
    with self.assertRaisesRegex(ValueError, "`micro_batches` .*: 0"):
      _cifar10_replica(None, micro_batches=0)


if __name__ == "__main__":
  absltest.main()
