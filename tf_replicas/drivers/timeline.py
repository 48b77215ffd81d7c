"""Writes timelines: files that record what each replica did at which time.

Each line is one activity: a JSON object with `start` and `end` in seconds since
1970. A *token* is the answer of the update rule that lets a replica continue.

    {"task": "worker:0", "step": 7, "kind": "compute", "start": …, "end": …}

The kinds of activities are:

* `read`: a replica reads the parameters. It starts when the token arrives, and
  ends when all parameters have arrived.
* `compute`: the replica computes the gradients. If it processes several batches
  before it sends anything, the activity includes all of them.
* `wait`: the replica waits. It waits for the answer to an offer of gradients,
  for slower replicas (bounded staleness), or for the token.
* `hand_over`: the replica sends gradients. It ends when all bytes are on the PS
  tasks.
* `apply`: an update is made. An update from gradients of several replicas is in
  the timeline of the task `chief`. An update from gradients of one replica is
  in that of the replica.
* `refused`: the replica waits for an answer that refuses its gradients.

`compute` and `read` are timed by the replica's clock, the other activities by
that of PS task 0. `experiments.timeline` shows such files, and
`experiments.simulator` fits a simulated cluster to them.
"""

import json
import os
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.rules import step_token

# The task name of updates that are made of several contributions.
CHIEF = "chief"
# The activities of a step, in order; those that did not happen are left out.
_STEP = ("compute", "wait", "hand_over", "apply", "wait", "refused", "read")


class Recorder:
  """Writes the timelines of one process: what each replica does when.

  All lines of a step are appended by one write. So several processes may write
  to one file, and a process that is killed leaves only complete lines.
  """

  def __init__(self, directory: str, name: str):
    """Prepares the file `directory`/`name`.jsonl.

    Args:
      directory: A directory on the machine of the replica; made if missing.
      name: The file's name, without extension.
    """
    self._directory = directory
    self._stream = "file://" + os.path.join(
      os.path.abspath(directory), name + ".jsonl"
    )
    prepare(directory)

  @tf.autograph.experimental.do_not_convert
  def record_step(
    self,
    task: str | tf.Tensor,
    step: tf.Tensor,
    began: tf.Tensor,
    computed: tf.Tensor,
    token: step_token.StepToken,
    state: Sequence[tf.Tensor],
  ) -> None:
    """Records what a replica did in one step, inside a `tf.function`.

    Args:
      task: The name of the replica; a string or a string tensor.
      step: int64 scalar, the global step for which the gradients were computed.
      began: float64 scalar, the time at which the computation began, in seconds
        since 1970.
      computed: float64 scalar, the time at which the gradients were computed.
      token: The token that ended the step: the update rule's answer to the
        gradients. It has the times at which they were admitted, delivered and
        applied.
      state: The state of the update rule after the step. The step ends when
        these tensors have arrived.
    """
    times = step_token.Times(*tf.unstack(token.times))
    is_used = token.admitted > 0
    never = tf.zeros([], tf.int64)
    own = tf.stack([began, computed, step_token.now(*state)])
    began, computed, arrived = tf.unstack(step_token.microseconds(own))
    handed = tf.maximum(times.delivered, times.applied)
    spans = [
      (began, computed),
      (computed, times.admitted),
      (tf.maximum(computed, times.admitted), times.delivered),
      (times.delivered, times.applied),
      (handed, tf.where(is_used, times.released, never)),
      (computed, tf.where(is_used, never, times.released)),
      (times.released, tf.where(token.global_step < 0, never, arrived)),
    ]
    starts, ends = (tf.stack(column) for column in zip(*spans, strict=True))
    steps = [step] * (len(spans) - 1) + [token.global_step]
    lines = tf.strings.join(
      [
        '{"task": "',
        task,
        '", "step": ',
        tf.strings.as_string(tf.stack(steps)),
        ', "kind": "',
        tf.constant(_STEP),
        '", "start": ',
        _seconds(starts),
        ', "end": ',
        # The clocks of two machines may differ.
        _seconds(tf.maximum(starts, ends)),
        "}",
      ]
    )
    lines = tf.boolean_mask(lines, (starts != never) & (ends != never))
    text = tf.strings.reduce_join(lines, separator="\n")
    tf.print(text, output_stream=self._stream)

  def record_update(self, step: int, began: float, ended: float) -> None:
    """Records one update that was made of several replicas' gradients.

    Args:
      step: The global step before the update.
      began: The time at which the last gradients had arrived, in seconds since
        1970.
      ended: The time at which the update was made.
    """
    ended = max(began, ended)  # Clocks can be set.
    event = dict(task=CHIEF, step=step, kind="apply", start=began, end=ended)
    path = os.path.join(self._directory, f"{CHIEF}.jsonl")
    with open(path, "a", encoding="utf-8") as file:
      file.write(json.dumps(event) + "\n")


def directory_of(train_dir: str) -> str:
  """Returns the directory of a training's timelines, within `train_dir`.

  Timelines are files that record what each replica did when.
  """
  return os.path.join(train_dir, "timeline")


def prepare(directory: str) -> None:
  """Makes the directory for timelines on this machine, if it is missing."""
  os.makedirs(directory, exist_ok=True)


def _seconds(microseconds: tf.Tensor) -> tf.Tensor:
  """Formats int64 microseconds as strings with a decimal number of seconds."""
  whole = tf.strings.as_string(microseconds // 1_000_000)
  rest = tf.strings.as_string(microseconds % 1_000_000, width=6, fill="0")
  return tf.strings.join([whole, ".", rest])
