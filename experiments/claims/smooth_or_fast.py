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
from collections.abc import Callable
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
# In a point of the curves, at least: two synchronous updates of four workers.
POINT_EXAMPLES = 128
EXAMPLES = 9_600
# Where only the speed matters.
SLOW_EXAMPLES = 2_400
# Of a curve in the picture.
_DRAWN_POINTS = 75


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
    asynchronous one has a row for all updates since the chief looked last.
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


def points(rows: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
  """Merges rows until each point has at least `POINT_EXAMPLES` examples.

  Args:
    rows: Rows as `run` returns them. A row's loss is the mean over all examples
      since the row before.

  Returns:
    (mean loss, number of examples) of each point, in order. If a row has more
    examples, its point has more, too.
  """
  found, before, total = [], 0.0, 0.0
  begin = 0.0
  for _, end, loss in rows:
    total += loss * (end - before)
    before = end
    if end - begin >= POINT_EXAMPLES:
      found.append((total / (end - begin), end - begin))
      begin, total = end, 0.0
  return found


def scatter(
  losses: Sequence[tuple[float, float]],
  middle: Callable[[np.ndarray], float] = np.mean,
) -> float:
  """Returns the standard deviation of the mean loss of `POINT_EXAMPLES`.

  It is computed from the differences of neighbors, all of them, jumps too. The
  trend changes little from one point to the next. The variance of a mean is
  taken to be inversely proportional to its number of examples, so that points
  with more examples do not count as smoother.

  Args:
    losses: (mean loss, number of examples) of each point. Only the second half
      is used.
    middle: Computes one number from the squared differences. A standard
      deviation comes from their mean.
  """
  means, examples = np.transpose(losses[len(losses) // 2 :])
  shares = POINT_EXAMPLES / examples
  squares = np.diff(means) ** 2 / (shares[:-1] + shares[1:])
  return float(np.sqrt(middle(squares)))


def rows_alone(rows: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
  """Returns a point for each row, as if all had `POINT_EXAMPLES` examples.

  Args:
    rows: Rows as `run` returns them.
  """
  return [(row[2], POINT_EXAMPLES) for row in rows]


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
          "scatter of the mean loss of"
          f" {POINT_EXAMPLES} examples, asynchronous divided by synchronous,"
          f" {workers} equal workers",
          ratios(lambda rows: scatter(points(rows)), workers, False),
          least=1.0,
        ),
        claims.Finding(
          "the same with the median of the squared differences, on which jumps"
          f" of the loss have little effect, {workers} equal workers",
          ratios(lambda rows: scatter(points(rows), np.median), workers, False),
        ),
        claims.Finding(
          "the same with a point per log line, whatever its number of examples"
          f" (averaging alone can give up to √{workers} = {workers**0.5:.2f})",
          ratios(lambda rows: scatter(rows_alone(rows)), workers, False),
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
  means, examples = np.transpose(points(rows))
  is_last = np.cumsum(examples) > 0.9 * examples.sum()
  return float(np.average(means[is_last], weights=examples[is_last]))


def draw(measurements: Sequence[dict]):
  """Draws losses over examples, and the time that the examples took.

  Lines are medians over the seeds, and bands are the ranges.
  """
  workers = [n for n in _WORKERS if _name("sync", n, False) in measurements[0]]
  figure, panels = claims.new_figure(
    12, 2.8 * len(workers), nrows=len(workers), ncols=3, squeeze=False
  )
  count = len(measurements)
  seeds = f"median and range of {count} seeds" if count > 1 else "one seed"
  for (left, *others), number in zip(panels, workers, strict=True):
    kinds = ("equal workers", f"workers, one {SLOWER:.0f} times slower")
    for rule, color, style, width in zip(
      RULES, claims.COLORS, ("--", "-"), (1.8, 1.0), strict=False
    ):
      look = {"color": color, "linestyle": style}
      name = _name(rule, number, False)
      curves = [np.transpose(points(m[name])) for m in measurements]
      _draw_band(
        left,
        [(np.cumsum(examples), means) for means, examples in curves],
        label=rule,
        linewidth=width,
        **look,
      )
      for axes, is_slow in zip(others, (False, True), strict=True):
        name = _name(rule, number, is_slow)
        if name in measurements[0]:
          curves = [np.transpose(m[name]) for m in measurements]
          _draw_band(
            axes,
            [(examples, secs) for secs, examples, _ in curves],
            most=SLOW_EXAMPLES,
            label=rule,
            linewidth=width,
            **look,
          )
    left.set_title(f"{number} equal workers: loss", fontsize="small")
    left.set_ylabel(f"mean loss of {POINT_EXAMPLES} examples")
    for axes, kind in zip(others, kinds, strict=True):
      axes.set_title(f"{number} {kind}: time", fontsize="small")
      axes.set_ylabel("seconds")
    top = max(axes.get_ylim()[1] for axes in others)
    for axes in others:
      axes.set_ylim(0, top)
    for axes in (left, *others):
      axes.set_xlabel("examples")
      axes.locator_params(axis="x", nbins=6)
      if axes.lines:
        axes.legend(fontsize="small", loc="best")
  figure.suptitle(f"Lines and bands: {seeds}", fontsize="medium")
  return figure


def _draw_band(axes, curves, *, most=np.inf, **look) -> None:
  """Draws the median of some curves, and a band from the least to the most.

  The curves have points at different places, so they are interpolated.

  Args:
    axes: The axes to draw on.
    curves: The numbers of examples, and the values there, of each curve.
    most: The largest number of examples that is drawn.
    **look: Arguments of `plot` for the median.
  """
  begin = max(x[0] for x, _ in curves)
  end = min(most, *(x[-1] for x, _ in curves))
  grid = np.linspace(begin, end, _DRAWN_POINTS)
  values = np.array([np.interp(grid, x, y) for x, y in curves])
  axes.plot(grid, np.median(values, axis=0), **look)
  axes.fill_between(
    grid,
    values.min(axis=0),
    values.max(axis=0),
    color=look["color"],
    alpha=0.15,
    linewidth=0,
  )


CLAIM = claims.Claim(
  name="smooth_or_fast",
  title="Synchronous is smooth, asynchronous is fast",
  claim=(
    "the loss of synchronous training scatters less; asynchronous training does"
    " not wait for a slow worker, and processes more examples per second"
  ),
  source="Chen et al. 2016, section 2; Abadi et al. 2016, section 4.4",
  explanation=(
    "The left plots show the loss of the CIFAR-10 network, for equal workers."
    " Lines are medians over the seeds, and bands are the ranges. Every point"
    f" is the mean loss of at least {POINT_EXAMPLES} examples. (An"
    " asynchronous training has a log line for all updates since the chief"
    " looked last, so some of its points have more; in the part that is"
    " judged, up to about twice as many.) This matters: a synchronous update"
    " of 4 workers uses 4 batches and an asynchronous update uses one, so the"
    " mean loss of a synchronous update scatters half as much even if the"
    " variables are the same. The scatter in the table is computed from the"
    f" differences between neighboring points, and scaled to {POINT_EXAMPLES}"
    " examples. The seeds disagree about which loss scatters more, also if the"
    " median of the squared differences is used instead of the mean, so that"
    " jumps of the loss hardly count. The other plots show how long the"
    " examples took. With one slow worker, every update of synchronous training"
    " waits for this worker."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
