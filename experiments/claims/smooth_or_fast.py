"""Compares synchronous training (smooth) with asynchronous training (fast).

  python -m experiments.claims.smooth_or_fast [--quick]
    [--num_seeds=3] [--output=DIR]

Trains the CIFAR-10 network (on the synthetic images) by both rules on real
clusters of 1 PS (parameter server) and 2 and 4 workers on this machine, always
with the same number of examples. The workers are equal, or one is slower
(`slow_down`). A synchronous update, of M gradients, has M times the learning
rate of an asynchronous update, of one gradient.

Measures the examples per second, and how the loss scatters. The mean loss of
many batches scatters less than that of one batch, whatever the rule is. So the
rules are compared by points that are all means over the same number of
examples, and no point is left out.
"""

import tempfile
from collections.abc import Sequence

import numpy as np

from experiments.support import claims
from experiments.support import programs

SLOWER = 5.0
BATCH_SIZE = 16
# With four times that there are but few jumps of the loss.
RATE = 0.005
RULES = ("sync", "async")
_WORKERS = (2, 4)
# Of each point that is compared: two synchronous updates of four workers.
POINT_EXAMPLES = 128
EXAMPLES = 9_600
# Where only the speed matters.
SLOW_EXAMPLES = 2_400


def run(rule: str, workers: int, is_slow: bool, examples: int, seed: int):
  """Trains on a cluster, and returns a row for every log line.

  Args:
    rule: One of `RULES`.
    workers: M, the number of workers.
    is_slow: Whether the last worker is slower than the others.
    examples: The number of examples to use.
    seed: The seed of the training.

  Returns:
    [seconds since the first row, examples so far, mean loss of the updates
    since the row before]. A synchronous training has a row per update. An
    asynchronous one has a row for all updates since the chief looked last,
    mostly one or two.
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
  return f"{rule}, {workers} workers, {'one slow' if is_slow else 'equal'}"


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with both rules and all settings of the cluster.

  With `is_quick`, it uses 2 equal workers only, and fewer examples. The result
  maps the name of each setting to the result of `run`.
  """
  return {
    _name(rule, workers, is_slow): run(
      rule,
      workers,
      is_slow,
      SLOW_EXAMPLES if is_slow else EXAMPLES // (2 if is_quick else 1),
      seed,
    )
    for workers in _WORKERS
    for is_slow in (False, True)
    for rule in RULES
    if not is_quick or (workers, is_slow) == (_WORKERS[0], False)
  }


def points(rows: Sequence[Sequence[float]]) -> np.ndarray:
  """Returns mean losses over equal numbers of examples.

  A row's loss counts for all examples since the row before. If they belong to
  two points, each of them gets its share.

  Args:
    rows: Rows as `run` returns them.

  Returns:
    float64 [n], the mean loss of each `POINT_EXAMPLES` examples, in order.
  """
  _, ends, losses = np.transpose(np.array(rows, dtype=float))
  starts = np.concatenate([[0.0], ends[:-1]])
  sums = np.concatenate([[0.0], np.cumsum(losses * (ends - starts))])
  edges = np.arange(0, ends[-1] + 1, POINT_EXAMPLES)
  at_edges = np.interp(edges, np.concatenate([[0.0], ends]), sums)
  return np.diff(at_edges) / POINT_EXAMPLES


def scatter(losses: np.ndarray) -> float:
  """Returns the standard deviation of losses around their trend.

  It is computed from the differences of neighbors, all of them, jumps too. Only
  the second half is used, where the trend is flat.

  Args:
    losses: float64 [n].
  """
  differences = np.diff(losses[len(losses) // 2 :])
  return float(np.sqrt(np.mean(differences**2) / 2))


def update_losses(rows: Sequence[Sequence[float]]) -> np.ndarray:
  """Returns the loss of each row: float64 [n].

  Args:
    rows: Rows as `run` returns them.
  """
  return np.array([row[2] for row in rows])


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
          "scatter of the loss, asynchronous divided by synchronous, points of"
          f" {POINT_EXAMPLES} examples each, {workers} equal workers",
          ratios(lambda rows: scatter(points(rows)), workers, False),
          least=1.15,
        ),
        claims.Finding(
          "the same without making the numbers of examples equal, where"
          " averaging alone gives about"
          f" √{workers} = {workers**0.5:.2f}",
          ratios(lambda rows: scatter(update_losses(rows)), workers, False),
        ),
        claims.Finding(
          "loss of the last tenth of the examples, asynchronous divided by"
          f" synchronous, {workers} equal workers",
          ratios(_last_loss, workers, False),
        ),
        claims.Finding(
          "examples per second, asynchronous divided by synchronous,"
          f" {workers} equal workers",
          ratios(rate, workers, False),
        ),
      ]
    if _name("sync", workers, True) in measurements[0]:
      findings.append(
        claims.Finding(
          "examples per second, asynchronous divided by synchronous,"
          f" {workers} workers, one of them {SLOWER:.0f} times slower",
          ratios(rate, workers, True),
          least=1.3,
        )
      )
  return findings


def _last_loss(rows) -> float:
  losses = points(rows)
  return float(np.mean(losses[-(len(losses) // 10) :]))


def draw(measurements: Sequence[dict]):
  """Draws losses over examples, and the time that the examples took."""
  workers = [n for n in _WORKERS if _name("sync", n, False) in measurements[0]]
  figure, panels = claims.new_figure(
    9, 2.8 * len(workers), nrows=len(workers), ncols=2, squeeze=False
  )
  for (left, right), number in zip(panels, workers, strict=True):
    for rule, colour, style in zip(
      RULES, claims.COLOURS, ("--", "-"), strict=False
    ):
      look = {"color": colour, "linestyle": style}
      losses = points(measurements[0][_name(rule, number, False)])
      left.plot(
        POINT_EXAMPLES * np.arange(1, len(losses) + 1),
        losses,
        label=rule,
        linewidth=0.9,
        **look,
      )
      for is_slow, width in ((False, 0.9), (True, 2.0)):
        rows = measurements[0].get(_name(rule, number, is_slow), ())
        if rows:
          right.plot(
            [row[1] for row in rows if row[1] <= SLOW_EXAMPLES],
            [row[0] for row in rows if row[1] <= SLOW_EXAMPLES],
            label=f"{rule}, {'one slow' if is_slow else 'equal'}",
            linewidth=width,
            **look,
          )
    left.set_title(f"{number} equal workers", fontsize="small")
    left.set_ylabel(f"mean loss of {POINT_EXAMPLES} examples")
    right.set_title(f"{number} workers", fontsize="small")
    right.set_ylabel("seconds")
    for axes in (left, right):
      axes.set_xlabel("examples")
      axes.locator_params(axis="x", nbins=6)
      axes.legend(fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="smooth_or_fast",
  title="Synchronous is smooth, asynchronous is fast",
  claim=(
    "the loss of synchronous training scatters less; asynchronous training does"
    " not wait for a slow worker, and uses more examples per second"
  ),
  source="Chen et al. 2016, section 2; Abadi et al. 2016, section 4.4",
  explanation=(
    "The left plots show the loss of the CIFAR-10 network, for equal workers."
    f" Every point of the curves is the mean loss of {POINT_EXAMPLES} examples."
    " This matters: a synchronous update of 4 workers uses 4 batches and an"
    " asynchronous update uses one, so the mean loss of a synchronous update"
    " scatters half as much even if the variables are the same. The right plots"
    " show how long the examples took. With equal workers, both rules take"
    " about as long. With one slow worker, synchronous training takes longer,"
    " because every update waits for this worker."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
