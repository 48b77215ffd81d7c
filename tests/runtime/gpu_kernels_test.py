"""Tests for runtime.gpu_kernels, with GPUs that need not exist."""

import itertools

import pytest
import tensorflow as tf

from tf_replicas.runtime import gpu_kernels

# Functions of earlier tests may live on, so each test names another GPU.
_numbers = itertools.count(7)


@pytest.fixture
def gpu():
  return f"/device:GPU:{next(_numbers)}"


def _scan(gpu, function, *signature):
  """Scans `function` as it is traced; it must live until then."""
  traced = tf.function(function, autograph=False)
  concrete = traced.get_concrete_function(*signature)
  found = gpu_kernels.scan(lambda device: device.endswith(gpu))
  assert concrete is not None
  return found


def _kinds(found):
  return {(f.op, f.types, f.count) for f in found.fallbacks}


def test_ops_of_a_model_have_kernels(gpu):
  def step(image, kernel):
    with tf.device(gpu):
      hidden = tf.nn.conv2d(image, kernel, 1, "SAME")
      return tf.reduce_sum(tf.nn.relu(hidden))

  found = _scan(
    gpu, step, tf.TensorSpec([1, 4, 4, 1]), tf.TensorSpec([3, 3, 1, 2])
  )
  assert found.num_ops >= 3 and found.num_functions == 1
  assert not found.fallbacks


def test_an_op_and_a_dtype_without_a_kernel(gpu):
  def step(text, numbers):
    with tf.device(gpu):
      joined = tf.strings.join([text, text])
      return joined, tf.matmul(numbers, numbers, name="layer/product")

  found = _scan(
    gpu, step, tf.TensorSpec([], tf.string), tf.TensorSpec([2, 2], tf.int64)
  )
  assert _kinds(found) >= {("StringJoin", "", 1), ("MatMul", "T=int64", 1)}
  examples = [f.example for f in found.fallbacks if f.op == "MatMul"]
  assert examples == ["layer/product"]


def test_bodies_and_called_functions_count(gpu):
  @tf.function(autograph=False)
  def called(text):
    return tf.strings.upper(text)

  def step(text, count):
    def body(i, text):
      text = tf.cond(i > 1, lambda: tf.strings.lower(text), lambda: text)
      return i + 1, called(text)

    with tf.device(gpu):
      return tf.while_loop(lambda i, _: i < count, body, [0, text])

  found = _scan(
    gpu, step, tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int32)
  )
  kinds = {kind for kind in _kinds(found) if kind[0].startswith("String")}
  assert kinds == {("StringUpper", "", 1), ("StringLower", "", 1)}


def test_what_is_not_for_the_gpu_does_not_count(gpu):
  def step(text):
    joined = tf.strings.join([text, text])
    with tf.device(gpu):
      with tf.device("/device:CPU:0"):
        joined = tf.strings.upper(joined)
      data = tf.data.Dataset.from_tensors(joined).map(tf.strings.lower)
      return data.reduce(0, lambda total, text: total + tf.strings.length(text))

  ops = {f.op for f in _scan(gpu, step, tf.TensorSpec([], tf.string)).fallbacks}
  assert not {op for op in ops if op.startswith("String")}


def test_a_build_without_gpu_kernels_is_refused(monkeypatch):
  gpu_kernels.check_build()
  monkeypatch.setattr(gpu_kernels, "_GPU_KINDS", ("DEFAULT",))
  with pytest.raises(RuntimeError, match="built with CUDA.* Received: Tensor"):
    gpu_kernels.check_build()
