"""Tests for timeline: what is written down of a turn."""

import json
import pathlib
import tempfile

import tensorflow as tf
from absl.testing import parameterized

from tf_replicas.drivers import timeline
from tf_replicas.rules import step_token

# Microseconds of a day in 2026 whose fraction has leading zeros.
START = 1_790_000_000_000_041


def _events(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


class RecorderTest(tf.test.TestCase, parameterized.TestCase):
  def _directory(self):
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    return directory.name

  def _record(self, times, *, admitted=1, step=8, task="worker:0"):
    directory = pathlib.Path(self._directory(), "a", "timeline")
    recorder = timeline.Recorder(str(directory), "worker_0")

    @tf.function(autograph=False)
    def step_of(task, times):
      token = step_token.StepToken(
        admitted, tf.constant(step, tf.int64), tf.constant(-1, tf.int64), times
      )
      recorder.record_step(
        task,
        tf.constant(7, tf.int64),
        tf.constant(START / 1e6, tf.float64),
        tf.constant((START + 10) / 1e6, tf.float64),
        token,
        [tf.zeros([2])],
      )

    before = tf.timestamp()
    step_of(tf.constant(task), tf.constant(times, tf.int64))
    events = _events(directory / "worker_0.jsonl")
    for event in events:
      self.assertLessEqual(event["start"], event["end"])
      if event["kind"] == "read":
        self.assertGreater(event.pop("end"), before)
    return events

  def _event(self, kind, start, end=None, step=7):
    event = dict(task="worker:0", step=step, kind=kind)
    event["start"] = (START + start) / 1e6
    if end is not None:
      event["end"] = (START + end) / 1e6
    return event

  def test_a_turn_that_asked(self):
    times = [START + 13, START + 20, 0, START + 31]
    self.assertEqual(
      self._record(times),
      [
        self._event("compute", 0, 10),
        self._event("wait", 10, 13),
        self._event("hand_over", 13, 20),
        self._event("wait", 20, 31),
        self._event("read", 31, step=8),
      ],
    )

  def test_an_update_of_its_own_without_asking(self):
    times = [0, START + 20, START + 25, START + 31]
    self.assertEqual(
      self._record(times),
      [
        self._event("compute", 0, 10),
        self._event("hand_over", 10, 20),
        self._event("apply", 20, 25),
        self._event("wait", 25, 31),
        self._event("read", 31, step=8),
      ],
    )

  def test_a_refused_turn(self):
    self.assertEqual(
      self._record([0, 0, 0, START + 31], admitted=0),
      [
        self._event("compute", 0, 10),
        self._event("refused", 10, 31),
        self._event("read", 31, step=8),
      ],
    )

  def test_the_last_turn_reads_nothing(self):
    times = [0, START + 20, 0, START + 31]
    events = self._record(times, step=step_token.ENDED)
    self.assertEqual(
      [e["kind"] for e in events], ["compute", "hand_over", "wait"]
    )

  def test_clocks_that_differ(self):
    """The PS's is behind: nothing ends before it starts."""
    times = [0, START + 2, 0, START + 3]
    events = self._record(times)
    self.assertEqual(events[1], self._event("hand_over", 10, 10))
    self.assertEqual(events[2], self._event("wait", 2, 3))

  def test_an_update_of_several(self):
    directory = pathlib.Path(self._directory())
    recorder = timeline.Recorder(str(directory), "worker_0")
    recorder.record_update(4, 10.5, 11.25)
    recorder.record_update(5, 12.0, 11.0)
    self.assertEqual(
      _events(directory / "chief.jsonl"),
      [
        dict(task="chief", step=4, kind="apply", start=10.5, end=11.25),
        dict(task="chief", step=5, kind="apply", start=12.0, end=12.0),
      ],
    )


class StepTokenTest(tf.test.TestCase):
  def test_pack_and_unpack(self):
    times = step_token.pack_times(1e-6, 2e-6, 3e-6, START / 1e6)
    token = step_token.StepToken(1, tf.constant(5, tf.int64), -1, times)
    packed = step_token.LAYOUT.pack(token)
    self.assertAllEqual(packed, [1, 5, -1, 1, 2, 3, START])
    unpacked = step_token.LAYOUT.unpack(packed)
    self.assertAllEqual(unpacked.global_step, 5)
    self.assertAllEqual(unpacked.times, times)


if __name__ == "__main__":
  tf.test.main()
