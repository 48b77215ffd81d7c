"""Tests of `cifar10.import_tf1`, against the tutorial's graph of TF1."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import eval as eval_lib
from cifar10 import import_tf1
from cifar10 import inputs
from cifar10 import model
from cifar10 import sources
from cifar10 import train
from tests.support import binaries
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation

tf1 = tf.compat.v1

STEP = 500
NETWORK = "must be of the tutorial's network:"


def tutorial_logits(images, flat_size=2304, dtype=tf.float32):
  """The tutorial's `inference`, op by op, in the default graph."""

  def variable(name, shape):
    return tf1.get_variable(name, shape, dtype, use_resource=False)

  def conv(x, name, shape):
    with tf1.variable_scope(name):
      kernel = variable("weights", shape)
      x = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME")
      return tf.nn.relu(tf.nn.bias_add(x, variable("biases", shape[-1:])))

  def norm(x):
    return tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)

  def pool(x):
    return tf1.nn.max_pool(x, [1, 3, 3, 1], [1, 2, 2, 1], "SAME")

  def dense(x, name, shape):
    with tf1.variable_scope(name):
      return tf.matmul(x, variable("weights", shape)) + variable(
        "biases", shape[-1:]
      )

  x = norm(pool(conv(images, "conv1", [5, 5, 3, 64])))
  x = pool(norm(conv(x, "conv2", [5, 5, 64, 64])))
  x = tf.reshape(x, [-1, flat_size])
  x = tf.nn.relu(dense(x, "local3", [flat_size, 384]))
  x = tf.nn.relu(dense(x, "local4", [384, 192]))
  return dense(x, "softmax_linear", [192, 10])


def save(
  path,
  *,
  images=None,
  step_dtype=tf.int64,
  version=tf1.train.SaverDef.V2,
  write_step=STEP,
  has_averages=True,
  without=(),
  **network,
):
  """Saves random variables and other averages, as TF1 would.

  Returns:
    The path, and the logits of `images` by the variables and by the averages.
  """
  generator = np.random.default_rng(0)
  with tf.Graph().as_default(), tf1.Session() as session:
    if images is None:  # Logits are not computed, but the graph needs a shape.
      images = np.zeros([1, 24, 24, 3], "float32")
    dtype = network.get("dtype", tf.float32)
    logits = tutorial_logits(tf.constant(images, dtype), **network)
    step = tf1.get_variable(
      "global_step",
      [],
      step_dtype,
      tf1.constant_initializer(STEP),
      trainable=False,
      use_resource=False,
    )
    averages = tf1.train.ExponentialMovingAverage(0.9, step)
    average = averages.apply(tf1.trainable_variables())
    # In this order: with TF 2.21, averages do not wait for their variables.
    session.run(tf1.variables_initializer(tf1.trainable_variables()))
    session.run(tf1.global_variables_initializer())

    def randomize():
      for v in tf1.trainable_variables():
        scale = 1.0 if v.shape.rank == 1 else np.prod(v.shape[:-1]) ** -0.5
        v.load(generator.normal(0.0, scale, v.shape), session)

    randomize()
    session.run(average)
    randomize()
    saved = [
      v
      for v in tf1.global_variables()
      if v.op.name not in without
      and (has_averages or not v.op.name.endswith("ExponentialMovingAverage"))
    ]
    saver = tf1.train.Saver(saved, write_version=version)
    path = saver.save(session, str(path), write_step)
    outputs = [session.run(logits)]
    if has_averages and not without:
      tf1.train.Saver(averages.variables_to_restore()).restore(session, path)
      outputs.append(session.run(logits))
  return path, outputs


@pytest.fixture(scope="module")
def images():
  """Of a size for which local response normalization matters."""
  x = np.random.default_rng(1).normal(0.0, 10.0, [5, 24, 24, 3])
  return x.astype("float32")


@pytest.fixture(scope="module")
def tf1_run(tmp_path_factory, images):
  """The directory of a TF1 training, and its logits."""
  directory = tmp_path_factory.mktemp("tf1")
  _, outputs = save(directory / "model.ckpt", images=images)
  return directory, outputs


def our_logits(kind, values, images):
  """Of our network with the arrays of this kind."""
  network = model.build()
  arrays = {
    name.removeprefix(f"{kind}/"): value
    for name, value in values.items()
    if name.startswith(f"{kind}/")
  }
  evaluation.load_into_keras(network, arrays)
  return network(images).numpy()


def test_logits_are_those_of_the_tf1_graph(tf1_run, images):
  directory, (raw, averaged) = tf1_run
  values = import_tf1.read(directory)
  assert (values["global_step"], values["global_step"].dtype) == (STEP, "int64")
  assert np.abs(raw - averaged).max() > 1.0
  for kind, expected in (("variables", raw), ("averages", averaged)):
    logits = our_logits(kind, values, images)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize(
  "options",
  [
    {"version": tf1.train.SaverDef.V1},
    {"step_dtype": tf.float32},  # As of `cifar10_multi_gpu_train.py`.
    {"without": ("global_step",)},  # As in 2015.
    {"dtype": tf.float16},  # By `--use_fp16`.
  ],
)
def test_reads_what_releases_of_the_tutorial_wrote(options, tmp_path):
  path, _ = save(tmp_path / "model.ckpt", **options)
  assert path == str(tmp_path / f"model.ckpt-{STEP}")
  values = import_tf1.read(path)
  assert values["global_step"] == STEP
  assert len(values) == 2 * len(import_tf1.NAMES) + 1
  first = tf.train.load_checkpoint(path).get_tensor("conv1/weights")
  np.testing.assert_array_equal(values["variables/conv1/kernel"], first)


def test_averages_may_be_missing(tmp_path):
  path, _ = save(tmp_path / "model.ckpt", has_averages=False)
  values = import_tf1.read(path)
  assert len(values) == len(import_tf1.NAMES) + 1


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"without": ("conv2/biases",)},
      f"{NETWORK} conv2/biases is not in the checkpoint",
    ),
    (
      {"without": ("local4/weights/ExponentialMovingAverage",)},
      f"{NETWORK} local4/weights/ExponentialMovingAverage is not in the"
      " checkpoint",
    ),
    (
      {"flat_size": 1152, "has_averages": False},
      f"{NETWORK} local3/weights has shape [1152, 384] in the checkpoint and"
      " [2304, 384] in the model",
    ),
    (
      {"without": ("global_step",), "write_step": None},
      "must have a global_step, or a name that ends in -STEP",
    ),
  ],
)
def test_another_network_is_one_line(options, message, tmp_path):
  path, _ = save(tmp_path / "model.ckpt", **options)
  with pytest.raises(checkpoints.CheckpointError) as error:
    import_tf1.read(path)
  assert str(error.value) == f"checkpoint {path} {message}"


def test_a_missing_or_damaged_checkpoint_is_one_line(tf1_run, tmp_path):
  with pytest.raises(checkpoints.MissingCheckpointError, match="No checkpoint"):
    import_tf1.read(tmp_path)
  with pytest.raises(checkpoints.MissingCheckpointError, match="are missing"):
    import_tf1.read(tmp_path / "model.ckpt-7")
  copy = shutil.copytree(tf1_run[0], tmp_path / "copy")
  for path in copy.glob("*.index"):
    path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(checkpoints.CheckpointError, match="is damaged"):
    import_tf1.read(copy / f"model.ckpt-{STEP}")


def test_nothing_is_overwritten(tf1_run):
  with pytest.raises(FileExistsError, match="`train_dir` must hold no check"):
    import_tf1.import_checkpoint(tf1_run[0], tf1_run[0])


def test_evaluation_takes_the_averages_and_training_goes_on(
  tf1_run, tmp_path, capsys
):
  binaries.succeed(
    "cifar10.import_tf1",
    f"--checkpoint={tf1_run[0]}",
    f"--train_dir={tmp_path}",
    "--batch_size=16",
  )
  settings = config.Config(
    "synthetic",
    train_dir=str(tmp_path),
    batch_size=16,
    max_steps=STEP + 2,
    learning_rate=1e-4,  # The weights are random, and the loss is large.
  )
  matrix = eval_lib.evaluate(settings, str(tmp_path / "eval"))
  expected = np.zeros([10, 10], np.int64)
  averages = import_tf1.read(tf1_run[0])
  for images, labels in inputs.eval_batches(sources.find("synthetic"), 1000):
    predictions = our_logits("averages", averages, images).argmax(axis=1)
    np.add.at(expected, (labels.numpy(), predictions), 1)
  np.testing.assert_array_equal(matrix, expected)

  assert train.train(settings).global_step == STEP + 2
  output = capsys.readouterr().out
  assert f"restored {tmp_path}/model.ckpt-{STEP}" in output
  saved = checkpoints.read(checkpoints.latest(tmp_path))
  assert saved["examples_seen"] == (STEP + 2) * 16
