"""Trains in all ways of `experiments.claims.linear_scaling`, by `fit`.

That experiment starts this script with the launcher, once per number of
workers. The chief writes what it found.
"""

import json
import pathlib
import sys

import keras
import numpy as np

import tf_replicas
from experiments.claims import linear_scaling
from experiments.support import small_network


def _model(way: str, num_replicas: int, seed: int) -> keras.Model:
  """Builds and compiles the network.

  Args:
    way: One of `linear_scaling.WAYS`: the rate of one replica; k times this
      rate; or with a warm-up, in which the rate rises linearly during the first
      epoch from that of one replica to k times as much (Goyal et al. 2017,
      section 2.2).
    num_replicas: k, the number of replicas.
    seed: The seed of the initial weights.
  """
  rate = linear_scaling.RATE
  if way == linear_scaling.WAYS[1]:
    rate *= num_replicas
  elif way == linear_scaling.WAYS[2]:
    rate = keras.optimizers.schedules.PolynomialDecay(
      rate,
      linear_scaling.WARM_UP_EPOCHS
      * linear_scaling.NUM_EXAMPLES
      // (linear_scaling.BATCH_SIZE * num_replicas),
      rate * num_replicas,
    )
  model = small_network.build(seed)
  model.compile(
    keras.optimizers.SGD(rate, momentum=small_network.MOMENTUM),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
  )
  return model


def main(path: str, num_replicas: int, epochs: int, seed: int) -> None:
  """Trains in all ways, and writes losses and precisions to a JSON file.

  Args:
    path: The path of the file.
    num_replicas: k, the number of workers.
    epochs: The number of epochs.
    seed: The seed of the initial weights and of the order of the examples.
  """
  train, test = (
    [np.array(part) for part in small_network.read(split)]
    for split in ("train", "test")
  )
  images, labels = (part[: linear_scaling.NUM_EXAMPLES] for part in train)
  found = {}
  for way in linear_scaling.WAYS[: 1 if num_replicas == 1 else None]:
    history = tf_replicas.fit(
      lambda way=way: _model(way, num_replicas, seed),
      images,
      labels,
      batch_size=linear_scaling.BATCH_SIZE * num_replicas,
      epochs=epochs,
      rule=tf_replicas.Sync(),
      start_timeout_secs=300.0,
      seed=seed,
      verbose=0,
    )
    results = history.model.evaluate(*test, verbose=0, return_dict=True)
    found[way] = {
      "losses": [small_network.finite(x) for x in history.history["loss"]],
      "precision": float(results["accuracy"]),
    }
  pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
  main(sys.argv[1], *map(int, sys.argv[2:]))
