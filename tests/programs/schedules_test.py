"""Tests of `programs.schedules`."""

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies

from tf_replicas.programs import schedules

_COUNTS = strategies.integers(0, 2**40)
# A busy machine may take long for any example.
_NO_DEADLINE = hypothesis.settings(deadline=None)


@_NO_DEADLINE
@hypothesis.given(_COUNTS, strategies.integers(1, 2**40))
def test_a_share_is_of_numbers_and_tensors_alike(examples, length):
  share = schedules.share(examples, length)
  assert share == pytest.approx(min(1.0, examples / length), abs=1e-15)
  assert 0.0 <= share <= 1.0
  counted = schedules.share(tf.constant(examples, tf.int64), length)
  assert counted.dtype == tf.float64
  assert float(counted) == share


@pytest.mark.parametrize("examples", [-(2**40), -1, 0])
def test_a_share_of_nothing_done_is_nothing(examples):
  assert schedules.share(examples, 7) == 0.0


@_NO_DEADLINE
@hypothesis.given(strategies.integers(1, 2**40), _COUNTS)
def test_a_share_of_all_is_one_exactly(length, beyond):
  assert schedules.share(length + beyond, length) == 1.0
  assert schedules.share(beyond, 0) == 1.0


@pytest.mark.parametrize(
  "examples, expected", [(0, 1.0), (9, 1.0), (10, 0.5), (19, 0.5), (30, 0.125)]
)
def test_a_staircase_falls_at_each_length(examples, expected):
  assert schedules.staircase(examples, 0.5, 10) == expected
  assert float(schedules.staircase(tf.constant(examples), 0.5, 10)) == expected


def test_a_staircase_is_that_of_tf1():
  for step in (0, 1, 349, 350, 351, 10_000):
    theirs = tf.compat.v1.train.exponential_decay(
      1.0, tf.constant(step), 350, 0.94, staircase=True
    )()
    ours = schedules.staircase(step, 0.94, 350)
    assert ours == pytest.approx(float(theirs), rel=1e-6)


def test_examples_of_epochs_are_rounded():
  assert schedules.num_examples(0.25, 10) == 2
  assert schedules.num_examples(2.0, 50_000) == 100_000
