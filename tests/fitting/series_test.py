"""What a further training sends to the workers; clusters: cluster_test."""

import pickle
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fitting import models
from tf_replicas.fitting import keras_fit
from tf_replicas.fitting import series

_X = np.ones([8, 5], "float32")


def _sent(**given):
  call = series._pickled("fit", keras_fit.fit, given)
  function, found = pickle.loads(call)
  assert function is keras_fit.fit
  return found


def test_functions_with_what_they_use():
  weights = [np.full([2], 3.0)]
  made = _sent(model_fn=lambda: weights, x=_X)
  np.testing.assert_array_equal(made["model_fn"](), weights)
  np.testing.assert_array_equal(made["x"], _X)


def test_a_model_with_its_weights():
  model = models.CASES["momentum"].model_fn()
  made = _sent(model_fn=lambda: model)["model_fn"]()
  for one, other in zip(model.get_weights(), made.get_weights(), strict=True):
    np.testing.assert_array_equal(one, other)
  assert made.loss.name == model.loss.name


def _data_set():
  data = tf.data.Dataset.from_tensor_slices({"a": _X, "b": np.arange(8)})
  data = data.shuffle(8, seed=1).map(lambda d: (d["a"] * 2.0, d["b"])).batch(3)
  return data.repeat(2)


def test_data_sets():
  """They shuffle as a new one, wherever they were used before."""
  data, new = _data_set(), _data_set()
  list(data)
  made = _sent(x=data)["x"]
  again = _sent(x=data)["x"]
  assert made.element_spec == data.element_spec
  first, *others = (
    [[np.asarray(t) for t in batch] for batch in d] for d in (new, made, again)
  )
  for found in others:
    for one, other in zip(first, found, strict=True):
      for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def _calling_python():
  return tf.data.Dataset.from_generator(
    lambda: iter([1.0]), output_signature=tf.TensorSpec([])
  )


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: (n for n in range(3)), "generator"),
    (_calling_python, r"calls Python code \(.*PyFunc"),
    (lambda: tf.data.Dataset.range(2).map(_with_table()), "cannot be sent"),
  ],
)
def test_refuses_what_cannot_be_sent(make, words):
  with pytest.raises(TypeError, match=words) as caught:
    _sent(model_fn=lambda: 3, x=make(), y=None)
  message = str(caught.value)
  assert "\n" not in message
  assert message.startswith(
    "`x` of a second `fit` must be what cloudpickle can pickle"
  )
  assert "pass a function of `tf.distribute.InputContext`" in message


def _with_table():
  layer = keras.layers.IntegerLookup(vocabulary=[1, 2])
  return lambda n: layer(n[tf.newaxis])


def test_refuses_too_much(monkeypatch):
  monkeypatch.setattr(series, "_MAX_BYTES", 1000)
  with pytest.raises(ValueError, match="at most 1000 bytes.*most.* in `y`"):
    _sent(x=_X, y=np.ones([2000]))


def test_names_a_missing_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "cloudpickle", None)
  with pytest.raises(ImportError, match=r"pip install cloudpickle"):
    _sent(x=_X)
