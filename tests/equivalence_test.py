"""N replicas with B examples each equal one with N * B, on real processes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import trials
from tests.tasks import cluster_task

REPLICAS = 3
STEPS = 6


def _document(is_in_graph):
  return trials.document(
    2,
    REPLICAS,
    chief=int(is_in_graph),
    placement="partitioned",
    min_shard_bytes=64,
  )


def _reference(optimizer_name, clip_norm):
  """Losses and variables of one process with the whole batch."""
  variables, loss_fn = cluster_task.equivalence_model()
  *trained, unused = variables
  optimizer = cluster_task.equivalence_optimizer(optimizer_name)
  losses, norms = [], []
  data = cluster_task.equivalence_data(STEPS + 5, REPLICAS)
  for words, labels in list(zip(*data, strict=True))[:STEPS]:
    with tf.GradientTape() as tape:
      parameters = [tf.convert_to_tensor(v) for v in variables]
      tape.watch(parameters)
      loss = loss_fn(parameters, np.concatenate(words), np.concatenate(labels))
    gradients = tape.gradient(loss, parameters[:-1])
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    norms.append(float(tf.linalg.global_norm(gradients)))
    if clip_norm is not None:
      gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
    optimizer.apply(gradients, trained)
    losses.append(float(loss))
  values = {v.path: v.numpy() for v in trained}
  return losses, norms, values, unused.numpy()


@pytest.mark.parametrize(
  ("replication", "optimizer", "clip_norm"),
  [
    ("between_graph", "momentum", 0.5),
    pytest.param("between_graph", "adam", None, marks=pytest.mark.exhaustive),
    pytest.param("in_graph", "momentum", None, marks=pytest.mark.exhaustive),
    ("in_graph", "adam", 0.5),
  ],
)
def test_three_replicas_equal_one(
  start_trial, replication, optimizer, clip_norm
):
  trial = start_trial(
    "equivalence",
    _document(replication == "in_graph"),
    replication=replication,
    steps=STEPS,
    optimizer=optimizer,
    clip_mean_norm=clip_norm,
  )
  losses, norms, values, unused = _reference(optimizer, clip_norm)
  trial.await_success()
  report = trial.report()
  state = report["state"]

  # The setting is what it is meant to be.
  assert report["is_sparse"] == [True] + [False] * 5
  assert max(report["num_shards"]) == 2
  assert clip_norm is None or max(norms) > clip_norm

  np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
  for path, value in values.items():
    np.testing.assert_allclose(
      state[f"variables/{path}"], value, rtol=1e-4, atol=1e-6, err_msg=path
    )
  assert [applied for applied, _, _ in report["counts"]] == [STEPS] * REPLICAS
  assert report["refused"] == [0] * REPLICAS
  assert state["examples_seen"] == STEPS * REPLICAS * cluster_task.BATCH

  # A variable that nobody uses, its slots and its average stay as they were.
  np.testing.assert_array_equal(state["variables/unused"], unused)
  np.testing.assert_array_equal(state["averages/unused"], unused)
  own = [n for n in state if n.startswith("slots/") and "unused" in n]
  assert len(own) == (1 if optimizer == "momentum" else 2)
  for name in own:
    np.testing.assert_array_equal(state[name], np.zeros_like(unused))
