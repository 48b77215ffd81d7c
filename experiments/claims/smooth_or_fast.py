"""Compares synchronous training (smooth) with asynchronous training (fast).

  python -m experiments.claims.smooth_or_fast [--quick]
    [--num_seeds=1] [--output=DIR]

Trains the CIFAR-10 network (on the synthetic images) by both rules on real
clusters of 1 PS (parameter server) and 1, 2 and 4 workers on this machine,
always with the same number of examples. The workers are equal, or one is slower
(`slow_down`). Measures how the loss of the updates scatters, and the examples
per second. A synchronous update, of M gradients, has M times the learning rate
of an asynchronous update, of one gradient.
"""

import statistics
import tempfile
from collections.abc import Sequence

from experiments.support import claims
from experiments.support import programs

SLOWER = 5.0
BATCH_SIZE = 16
# With four times that there are but few jumps of the loss.
RATE = 0.005
RULES = ("sync", "async")
_WORKERS = (2, 4)
# Of how many losses the trend is the median.
_SMOOTHING = 9


def run(rule: str, workers: int, is_slow: bool, examples: int, seed: int):
  """Trains on a cluster, and returns a row for every update.

  Args:
    rule: One of `RULES`.
    workers: M, the number of workers.
    is_slow: Whether the last worker is slower than the others.
    examples: The number of examples to use.
    seed: The seed of the training.

  Returns:
    [seconds since the first update, examples so far, loss] of every update.
  """
  batches = workers if rule == "sync" else 1
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=workers)
    output = programs.train(
      "cifar10.distributed_train",
      [
        "--dataset=synthetic",
        f"--cluster_spec={spec}",
        f"--train_dir={directory}/run",
        f"--update={rule}",
        f"--batch_size={BATCH_SIZE}",
        # A mean of M gradients for M updates (Goyal et al. 2017).
        f"--learning_rate={RATE * batches}",
        f"--max_steps={examples // (batches * BATCH_SIZE)}",
        "--log_every_steps=1",
        f"--seed={seed}",
      ],
      {workers - 1: SLOWER} if is_slow else {},
    )
  lines = programs.logged(output)
  start = lines[0].when
  return [
    [
      round((line.when - start).total_seconds(), 3),
      line.step * batches * BATCH_SIZE,
      line.loss,
    ]
    for line in lines
  ]


def _name(rule: str, workers: int, is_slow: bool) -> str:
  others = "" if workers == 1 else ", one slow" if is_slow else ", equal"
  return f"{rule}, {workers} worker{'s' * (workers > 1)}{others}"


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with both rules and all settings of the cluster.

  With `is_quick`, it uses 2 equal workers only, and fewer examples. The result
  maps the name of each setting to the result of `run`.
  """
  examples = 6_400 if is_quick else 16_000
  settings = [("sync", 1, False)] + [
    (rule, workers, is_slow)
    for workers in _WORKERS
    for is_slow in (False, True)
    for rule in RULES
  ]
  return {
    _name(*setting): run(*setting, examples, seed)
    for setting in settings
    if not is_quick or setting[1:] == (_WORKERS[0], False)
  }


def roughness(rows: Sequence[Sequence[float]]) -> float:
  """Returns the mean distance of losses from their running median.

  The fifth of the losses that is farthest is left out, as a loss may jump once
  in a while where the learning rate is about as large as it may be.

  Args:
    rows: Rows as `run` returns them. Only the second half is used.
  """
  losses = [row[2] for row in rows[len(rows) // 2 :]]
  half = _SMOOTHING // 2
  distances = sorted(
    abs(losses[i] - statistics.median(losses[i - half : i + half + 1]))
    for i in range(half, len(losses) - half)
  )
  return statistics.fmean(distances[: len(distances) * 4 // 5])


def rate(rows: Sequence[Sequence[float]]) -> float:
  """Returns the examples per second after the first tenth of a training.

  Args:
    rows: Rows as `run` returns them.
  """
  begin, end = rows[len(rows) // 10], rows[-1]
  return (end[1] - begin[1]) / (end[0] - begin[0])


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def ratios(what, workers, is_slow):
    names = [_name(rule, workers, is_slow) for rule in ("async", "sync")]
    return [what(m[names[0]]) / what(m[names[1]]) for m in measurements]

  findings = []
  for workers in _WORKERS:
    if _name("sync", workers, False) in measurements[0]:
      findings += [
        claims.Finding(
          f"how the loss of an update scatters, asynchronous of synchronous,"
          f" {workers} equal workers (√{workers} ="
          f" {workers**0.5:.2f} if gradients were of the same variables)",
          ratios(roughness, workers, False),
          least=1.15,
        ),
        claims.Finding(
          "the last losses (median of a tenth), asynchronous of synchronous,"
          f" {workers} equal workers",
          ratios(_last_loss, workers, False),
        ),
        claims.Finding(
          "examples per second, asynchronous of synchronous,"
          f" {workers} equal workers",
          ratios(rate, workers, False),
        ),
      ]
    if _name("sync", workers, True) in measurements[0]:
      findings.append(
        claims.Finding(
          f"the same, {workers} workers of which one is 5 times slower",
          ratios(rate, workers, True),
          least=1.3,
        )
      )
  return findings


def _last_loss(rows) -> float:
  return statistics.median(row[2] for row in rows[-len(rows) // 10 :])


def draw(measurements: Sequence[dict]):
  """Draws the losses of both rules, over seconds and over examples."""
  names = list(measurements[0])
  groups = [n.removeprefix("async, ") for n in names if n.startswith("async")]
  figure, panels = claims.new_figure(
    9, 2.4 * len(groups), nrows=len(groups), ncols=2, squeeze=False
  )
  for row, group in enumerate(groups):
    for column, unit in enumerate(("seconds", "examples")):
      axes = panels[row][column]
      alone = measurements[0].get(_name("sync", 1, False), ())
      axes.plot(
        [r[column] for r in alone],
        [r[2] for r in alone],
        color="#BBBBBB",
        linewidth=0.9,
        label="1 worker" if alone else None,
      )
      for number, rule in enumerate(reversed(RULES)):
        rows = measurements[0][f"{rule}, {group}"]
        axes.plot(
          [r[column] for r in rows],
          [r[2] for r in rows],
          color=claims.COLORS[1 - number],
          linewidth=0.9,
          linestyle=("-", "--")[number],
          label=rule,
        )
      axes.locator_params(axis="x", nbins=6)
      axes.set_xlabel(unit)
      axes.set_ylabel("loss of an update")
      axes.set_title(group, fontsize="small")
      axes.legend(fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="smooth_or_fast",
  title="Synchronous is smooth, asynchronous is fast",
  claim=(
    "the loss of synchronous updates scatters less, for each is the mean of all"
    " workers; asynchronous training does not wait for a slow worker and uses"
    " more examples per second"
  ),
  source="Chen et al. 2016, section 2; Abadi et al. 2016, section 4.4",
  explanation=(
    "Every point is one update of the CIFAR-10 network. Left over seconds,"
    " right over the examples used. With equal workers both need about as long."
    " With one slow worker the synchronous curve (blue, dashed) is stretched"
    " over seconds, since all wait for it; the asynchronous one (orange) hardly"
    " is. Over examples the synchronous curve is smoother: an update is"
    " the mean of all workers' batches, at as many times the learning rate."
    " One worker alone is drawn in grey. The jumps, of both, are the rate's,"
    " which is about as large as it may be; the scatter leaves them out."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
