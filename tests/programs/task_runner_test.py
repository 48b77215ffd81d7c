"""Tests of `programs.task_runner`; the binaries' tests show the rest."""

import pytest
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.programs import run_options
from tf_replicas.programs import task_runner
from tf_replicas.rules import results


def staircase(seen: int) -> float:
  """Falls by a half every 100 examples."""
  return 0.5 ** (seen // 100)


@pytest.mark.parametrize(
  ("rate_fn", "seen", "limit", "expected"),
  [
    (None, 0, 7, 7),
    (lambda seen: 0.1, 0, 7, 7),
    (staircase, 0, 7, 4),  # At 0, 32, 64 and 96 examples.
    (staircase, 0, 3, 3),
    (staircase, 90, 7, 1),
    (lambda seen: 1.0 / (1 + seen), 0, 7, 1),
    (staircase, 0, 1, 1),
  ],
)
def test_updates_of_one_call_have_one_rate(rate_fn, seen, limit, expected):
  assert task_runner.updates_at_one_rate(rate_fn, seen, 32, limit) == expected


@pytest.mark.parametrize(
  ("message", "words"),
  [
    ("/a/file; No such file or directory", "TensorFlow failed in worker 1: "),
    (
      "Resource rules/x does not exist.",
      "worker 1 lost touch with the cluster",
    ),
  ],
)
def test_a_missing_file_is_no_lost_cluster(message, words):
  spec = cluster.parse({"cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]}})
  options = run_options.Options(spec, "run", cluster.Task("worker", 1))
  error = tf.errors.NotFoundError(None, None, message)
  assert task_runner._one_line(error, options).startswith(words)


def test_a_divergence_says_what_to_change():
  workload = run_options.Workload(
    replica_fn=None,
    optimizer_fn=None,
    learning_rate_fn=None,
    batch_size=8,
    divergence_advice="try --learning_rate=0.01 (0.1 was used)",
  )
  words = "^worker:1 computed .* not finite, .*; try --learning_rate=0.01 "
  with pytest.raises(results.NonFiniteGradientError, match=words):
    with task_runner._advising(workload):
      raise results.NonFiniteGradientError(1, 17, "worker:1")


def test_the_report_has_updates_without_a_replica():
  counts = [
    results.Counts(5, 0, (0, 0)),
    results.Counts(3, 1, (0, 0), straggler_wait_secs=2.0, missed=2),
  ]
  first, second = task_runner.report(counts, ["worker 0", "worker 1"])
  assert first.endswith("5 contributions applied, 0 refused (0 surplus)")
  assert second.endswith(
    "3 contributions applied, 1 refused (1 surplus); 2 updates made without it;"
    " updates waited 2.0 s for it alone"
  )
