"""Tests of what the roles decide; what they do, the binaries' tests show."""

import pytest
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import program
from tf_replicas import roles


def staircase(seen: int) -> float:
  """Falls by a half every 100 examples."""
  return 0.5 ** (seen // 100)


@pytest.mark.parametrize(
  ("rate_fn", "seen", "most", "expected"),
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
def test_updates_of_one_call_have_one_rate(rate_fn, seen, most, expected):
  assert roles.updates_at_one_rate(rate_fn, seen, 32, most) == expected


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
  options = program.Options(spec, cluster.Task("worker", 1), "", 1)
  error = tf.errors.NotFoundError(None, None, message)
  assert roles._words(error, options).startswith(words)
