"""Trains a two-tower recommender with tables on the parameter servers.

One tower has a vector for each user, the other a vector for each item.

Alone:         python examples/recommender/train.py --train_dir=DIR
As a cluster:  python -m tf_replicas.launch --ps=2 --workers=2
                 examples/recommender/train.py --train_dir=DIR

The program trains on a synthetic log of clicks, and may export the model. It
prints the AUC (area under the ROC curve) of the model, and the AUC of the true
probabilities, which is the best possible.
"""

import argparse

import clicks
import keras
import numpy as np

import tf_replicas

parser = argparse.ArgumentParser()
parser.add_argument("--train_dir", required=True, help="for checkpoints")
parser.add_argument("--export_dir", help="where to export the model")
parser.add_argument("--num_users", type=int, default=1000)
parser.add_argument("--num_items", type=int, default=300)
parser.add_argument("--num_impressions", type=int, default=200_000)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
COLUMNS = 8


def model_fn() -> keras.Model:
  """Makes a compiled model that predicts whether a user clicks on an item.

  The model has a vector and a bias for each user and for each item. The score
  is the dot product of both vectors plus both biases.
  """

  def tower(name: str, count: int):
    ids = keras.Input([], dtype="int32", name=name)
    vector = tf_replicas.Embedding(count, COLUMNS, name=f"{name}_vectors")(ids)
    bias = tf_replicas.Embedding(
      count, 1, embeddings_initializer="zeros", name=f"{name}_bias"
    )(ids)
    return ids, vector, bias

  user, user_vector, user_bias = tower("user", options.num_users)
  item, item_vector, item_bias = tower("item", options.num_items)
  product = keras.layers.Dot(axes=1)([user_vector, item_vector])
  score = keras.layers.Add()([product, user_bias, item_bias])
  click = keras.layers.Activation("sigmoid")(score)
  model = keras.Model({"user": user, "item": item}, click)
  optimizer = keras.optimizers.Adagrad(0.3, initial_accumulator_value=1e-4)
  model.compile(optimizer, "binary_crossentropy")
  return model


def inputs(log: clicks.Log) -> dict[str, np.ndarray]:
  """Returns the inputs of the model for the impressions in a log."""
  return {"user": log.users, "item": log.items}


sizes = options.num_users, options.num_items
train = clicks.make(*sizes, options.num_impressions, seed=1)
test = clicks.make(*sizes, options.num_impressions // 4, seed=2)

history = tf_replicas.fit(
  model_fn,
  inputs(train),
  train.clicks[:, None],
  batch_size=512,
  epochs=options.epochs,
  train_dir=options.train_dir,
  verbose=2,
)
# From here on there is only the chief. It exports the tables in blocks of rows,
# but to evaluate the model, it loads all rows.
model = history.model
if options.export_dir:
  tf_replicas.export(model, options.train_dir, options.export_dir)
tf_replicas.load_tables(model, options.train_dir)
predicted = model.predict(inputs(test), batch_size=8192, verbose=0)[:, 0]
print(
  f"AUC of the generator: {clicks.auc(test.clicks, test.probabilities):.4f}"
)
print(f"AUC: {clicks.auc(test.clicks, predicted):.4f}")
