"""What every replica did when: one line per thing done, in files.

Each line is a JSON object; `start` and `end` are seconds since 1970:

    {"task": "worker:0", "step": 7, "kind": "compute", "start": …, "end": …}

* `read`: from the release until all parameters are there.
* `compute`: until the gradients are there; of a rule with local steps the
  whole period, and where a replica gives several batches to a step all of them
  up to the last gradient.
* `wait`: for the verdict on what was offered, for a gate, for the release.
* `hand_over`: until all bytes of the gradients are on the PS tasks.
* `apply`: an update; in the timeline of the task `chief` where it is made of
  several contributions, else in that of the replica.
* `refused`: from the gradients to the answer that they are not wanted.

Computing and reading are timed by the replica's clock, the rest by that of PS
task 0. `experiments.timeline` shows such files; there and in
`experiments.simulator` they say which cluster behaves like the recorded one.
"""

import json
import os
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import releases

# The task whose timeline has the updates of several contributions.
CHIEF = "chief"
# In this order, a turn of a replica; what did not happen is left out.
_TURN = ("compute", "wait", "hand_over", "apply", "wait", "refused", "read")


class Recorder:
  """Writes the timelines of one process.

  Lines are appended, each turn's at once, so that several processes may share a
  file and one that is killed leaves whole lines.
  """

  def __init__(self, directory: str, name: str):
    """Prepares the file `directory`/`name`.jsonl.

    Args:
      directory: Is made if it is not there; on the machine that computes.
      name: Of the replicas that share a file.
    """
    self._directory = directory
    self._stream = "file://" + os.path.join(
      os.path.abspath(directory), name + ".jsonl"
    )
    prepare(directory)

  @tf.autograph.experimental.do_not_convert
  def record_turn(
    self,
    task: str | tf.Tensor,
    step: tf.Tensor,
    began: tf.Tensor,
    computed: tf.Tensor,
    release: releases.Release,
    state: Sequence[tf.Tensor],
  ) -> None:
    """Writes down one turn; to be used inside a `tf.function`.

    Args:
      task: Whose; a string, or a tensor of one.
      step: int64 scalar, the global step that was contributed to.
      began: float64 scalar, seconds since 1970: it began to compute.
      computed: float64 scalar, seconds: it had the last gradients.
      release: What it heard.
      state: The tensors that it goes on with.
    """
    times = releases.Times(*tf.unstack(release.times))
    is_used = release.admitted > 0
    never = tf.zeros([], tf.int64)
    own = tf.stack([began, computed, releases.now(*state)])
    began, computed, arrived = tf.unstack(releases.microseconds(own))
    handed = tf.maximum(times.delivered, times.applied)
    spans = [
      (began, computed),
      (computed, times.admitted),
      (tf.maximum(computed, times.admitted), times.delivered),
      (times.delivered, times.applied),
      (handed, tf.where(is_used, times.released, never)),
      (computed, tf.where(is_used, never, times.released)),
      (times.released, tf.where(release.global_step < 0, never, arrived)),
    ]
    starts, ends = (tf.stack(column) for column in zip(*spans, strict=True))
    steps = [step] * (len(spans) - 1) + [release.global_step]
    lines = tf.strings.join(
      [
        '{"task": "',
        task,
        '", "step": ',
        tf.strings.as_string(tf.stack(steps)),
        ', "kind": "',
        tf.constant(_TURN),
        '", "start": ',
        _seconds(starts),
        ', "end": ',
        # Two machines' clocks may differ.
        _seconds(tf.maximum(starts, ends)),
        "}",
      ]
    )
    lines = tf.boolean_mask(lines, (starts != never) & (ends != never))
    text = tf.strings.reduce_join(lines, separator="\n")
    tf.print(text, output_stream=self._stream)

  def record_update(self, step: int, began: float, ended: float) -> None:
    """Writes down an update of several contributions.

    Args:
      step: The global step before it.
      began: Seconds since 1970: all its contributions were there.
      ended: Seconds since 1970: it was made.
    """
    ended = max(began, ended)  # Clocks can be set.
    event = dict(task=CHIEF, step=step, kind="apply", start=began, end=ended)
    path = os.path.join(self._directory, f"{CHIEF}.jsonl")
    with open(path, "a", encoding="utf-8") as file:
      file.write(json.dumps(event) + "\n")


def directory_of(train_dir: str) -> str:
  """Where the timelines of a training are."""
  return os.path.join(train_dir, "timeline")


def prepare(directory: str) -> None:
  """Makes it; also for the task that only computes there."""
  os.makedirs(directory, exist_ok=True)


def _seconds(microseconds: tf.Tensor) -> tf.Tensor:
  """As decimal numbers."""
  whole = tf.strings.as_string(microseconds // 1_000_000)
  rest = tf.strings.as_string(microseconds % 1_000_000, width=6, fill="0")
  return tf.strings.join([whole, ".", rest])
