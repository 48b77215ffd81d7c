"""Trains a model with tables by `fit`: python tables_task.py ARGUMENTS

A table is an `Embedding` whose rows are on the parameter servers. ARGUMENTS is
a JSON object: `optimizer` (a class of Keras), `rate`, `train_dir`, `rule`
(settings of `Sync`; with `asynchronous`, of `Async`), `partition`, and
arguments of `fit`. With `use_ema`, the optimizer keeps moving averages, which
are the weights after the training. With `min_table_bytes`, the layers are those
of Keras, and `fit` makes a table of the larger one. With `loads_rows`, a
callback loads the tables after each epoch. The chief exports the model to the
directory `exported` in `train_dir`, and prints one line of JSON.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tf_replicas.cluster import environment
from tf_replicas.drivers import cluster_status

ROWS, COLUMNS, EXAMPLES = 1500, 4, 96
FIRST = keras.initializers.RandomNormal(stddev=0.5, seed=11)


def data():
  """Makes ids of a few rows of both tables, and numbers to predict."""
  rng = np.random.default_rng(5)
  users = rng.choice([0, 1, 2, 5, 1100, 1499], EXAMPLES)
  words = rng.integers(0, 40, (EXAMPLES, 3))
  y = rng.normal(size=(EXAMPLES, 1)).astype("float32")
  return {"users": users, "words": words}, y


class DenseGradients(keras.Model):
  """A Keras model that makes all its gradients dense.

  Keras 3.15 does not sum rows of the same index before it squares them, so that
  Adagrad with an ordinary embedding is not what it is with dense gradients.
  """

  def train_step(self, data):
    """Makes one update as Keras does, but with dense gradients."""
    x, y = data
    with tf.GradientTape() as tape:
      y_pred = self(x, training=True)
      loss = self.compute_loss(x=x, y=y, y_pred=y_pred, training=True)
    gradients = tape.gradient(loss, self.trainable_variables)
    dense = [tf.convert_to_tensor(g) for g in gradients]
    self.optimizer.apply(dense, self.trainable_variables)
    return self.compute_metrics(x, y, y_pred)


def build(
  optimizer: str,
  rate: float,
  embedding=tf_replicas.Embedding,
  model_class=keras.Model,
  use_ema: bool = False,
  **arguments,
) -> keras.Model:
  """Builds a model with two embedding tables, one of which is used twice.

  Args:
    optimizer: Name of the class of the Keras optimizer.
    rate: The learning rate.
    embedding: Class of the embedding layers.
    model_class: Class of the model.
    use_ema: Whether the optimizer keeps moving averages of the weights.
    **arguments: Further arguments of the first embedding layer.
  """
  users = keras.Input([], dtype="int64", name="users")
  words = keras.Input([3], dtype="int64", name="words")
  shared = embedding(
    ROWS, COLUMNS, embeddings_initializer=FIRST, name="user_rows", **arguments
  )
  other = embedding(40, COLUMNS, embeddings_initializer=FIRST, name="word_rows")
  pooled = keras.layers.GlobalAveragePooling1D()
  hidden = keras.layers.Concatenate()(
    [shared(users), pooled(other(words)), pooled(shared(words))]
  )
  kernel = keras.initializers.GlorotUniform(seed=12)
  out = keras.layers.Dense(1, kernel_initializer=kernel, name="out")(hidden)
  model = model_class({"users": users, "words": words}, out)
  kind = getattr(keras.optimizers, optimizer)
  ema = {"use_ema": True, "ema_momentum": 0.5} if use_ema else {}
  model.compile(kind(rate, **ema), "mse", metrics=["mae"])
  return model


class Evaluation(keras.callbacks.Callback):
  """A Keras callback that predicts in the chief before the training ends.

  The rows of the tables are then still on the parameter servers.
  """

  def __init__(self, loads_rows: bool):
    """Initializes the callback, which has made no prediction yet.

    Args:
      loads_rows: Whether to load all rows into the model after each epoch.
    """
    super().__init__()
    self._loads_rows = loads_rows
    self.predicted = None
    self.rows_by_status = {}

  def on_epoch_end(self, epoch, logs=None):
    """Loads the rows, which must not disturb later epochs."""
    if self._loads_rows:
      tf_replicas.load_tables(self.model)

  def on_train_end(self, logs=None):
    """Predicts with table rows that are looked up on the parameter servers."""
    x, _ = data()
    self.predicted = self.model.predict(x, verbose=0)
    role = environment.role(os.environ)
    if role is not None and role[0].num_tasks("ps"):
      reader = cluster_status.ClusterReader(role[0], timeout_secs=60)
      self.rows_by_status = {
        task.task: task.row_updates
        for task in reader.read().serving
        if task.task.startswith("ps")
      }
      reader.close()


def main(arguments: dict) -> None:
  """Trains a model with tables, loads the tables and prints the results."""
  optimizer, rate = arguments.pop("optimizer"), arguments.pop("rate")
  layer = {"partition": arguments.pop("partition", "modulo")}
  if "min_table_bytes" in arguments:
    layer = {"embedding": keras.layers.Embedding}
  layer["use_ema"] = use_ema = arguments.pop("use_ema", False)
  settings = arguments.pop("rule", {})
  policies = settings.pop("asynchronous", None)
  rule = (
    tf_replicas.Sync(**settings)
    if policies is None
    else tf_replicas.Async(*policies, **settings)
  )
  x, y = data()
  if bad := arguments.pop("bad_id", None):
    x["users"][:] = bad
  evaluation = Evaluation(arguments.pop("loads_rows", False))
  history = tf_replicas.fit(
    lambda: build(optimizer, rate, **layer),
    x,
    y,
    shuffle=False,
    rule=rule,
    callbacks=[evaluation],
    verbose=0,
    **arguments,
  )
  model = history.model
  refused = ""
  if history.contributions:
    try:
      model(x)
    except RuntimeError as error:
      refused = str(error)
  train_dir = arguments["train_dir"]
  tf_replicas.export(
    model,
    train_dir,
    f"{train_dir}/exported",
    averaged=use_ema,
    max_shard_bytes=10_000,
  )
  tf_replicas.load_tables(model, train_dir, averaged=use_ema)
  # The rows in the checkpoint are those that the chief looked up.
  np.testing.assert_allclose(
    model.predict(x, verbose=0), evaluation.predicted, rtol=1e-5, atol=1e-6
  )
  result = {
    "layers": [type(layer).__module__ for layer in model.layers],
    "history": history.history,
    "weights": [np.asarray(w).tolist() for w in model.get_weights()],
    "refused": refused,
    "predicted": evaluation.predicted.tolist(),
    "counts": {
      name: [counts.applied, counts.refused]
      for name, counts in history.contributions.items()
    },
    "row_updates": history.row_updates,
    "rows_by_status": evaluation.rows_by_status,
  }
  print("RESULT", json.dumps(result))


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
