"""Resumes a training under another update rule, on another cluster.

    python examples/resume.py --train_dir=RUN --rule=sync --max_steps=100
    python -m tf_replicas.launch --ps=1 --workers=2 \\
        examples/resume.py --train_dir=RUN --rule=async --max_steps=200

The first command trains for 100 steps. The second command continues at step
100. Variables, moving averages and the state of Adam come from the checkpoint
of the first; only the update rule is new.
"""

import argparse

import keras
import tensorflow as tf

import tf_replicas


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples; no example is used twice."""
  seeds = tf.data.Dataset.counter(start // 32 + index, num_shards)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


def replica_fn() -> tf_replicas.Replica:
  """Makes a replica: the model, the loss and the data of one worker."""
  model = keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(32, activation="relu", name="hidden"),
      keras.layers.Dense(3, name="output"),
    ],
    name="classifier",  # Checkpoints know the variables by their names.
  )
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  return tf_replicas.keras_replica(model, loss, dataset_fn)


rules = {
  "sync": tf_replicas.Sync(),
  "async": tf_replicas.Async("bounded_staleness", max_staleness=4),
}
parser = argparse.ArgumentParser()
parser.add_argument("--train_dir", required=True)
parser.add_argument("--rule", choices=rules, default="sync")
parser.add_argument("--max_steps", type=int, default=100)
options = parser.parse_args()

trained = tf_replicas.run(
  replica_fn,
  lambda: keras.optimizers.Adam(0.01),
  rule=rules[options.rule],
  variable_averages=tf_replicas.MovingAverages(0.99),
  train_dir=options.train_dir,
  max_steps=options.max_steps,
  log_every_steps=50,
)
# From here on there is only the chief.
print(f"step {trained.global_step}, loss: {trained.loss:.3f}")
