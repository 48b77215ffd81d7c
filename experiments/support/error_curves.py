"""Measures the error of update rules over virtual time, and draws it.

The network, its data and the cost of an exchange are those of the race
(`race_task`); an event clock (`event_clock`) gives the times.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from experiments.simulator import compute_times
from experiments.support import claims


def measure(
  rules: Mapping[str, Mapping[str, object]],
  *,
  workers: int,
  rate: float,
  times: Sequence[float],
  compute: Callable[[], compute_times.Draws],
  seed: int,
) -> dict[str, dict]:
  """Trains by every rule for an equal virtual time.

  Args:
    rules: Maps the name of each rule to fields of `UpdateSettings`.
    workers: The number of replicas.
    rate: The learning rate.
    times: The virtual times at which the error is measured, ascending.
    compute: Makes the compute times of the replicas, the same for all rules.
    seed: The seed of the weights and of the order of the examples.

  Returns:
    Maps each rule to `errors` (the share of wrong test pictures) and `updates`,
    each with one number per time. A training that diverges has the error 0.9
    from then on, which is that of guessing.
  """
  from experiments.support import event_clock
  from experiments.support import race_task
  from tf_replicas.programs import update_options
  from tf_replicas.rules import results

  task = race_task.Task()
  rows = {}
  for name, settings in rules.items():
    contestant = race_task.Contestant(
      name, update_options.UpdateSettings(**settings)
    )
    training = event_clock.Training(
      contestant.rule(workers, rate),
      task.replica,
      batches_shape=[race_task.NUM_BATCHES, race_task.BATCH_SIZE],
      exchange_secs=race_task.EXCHANGE_SECS,
    )
    training.start(
      task.values(seed), race_task.batches(workers, seed), compute()
    )
    errors, updates = [], []
    try:
      for time in times:
        training.advance(time)
        point = training.point()
        errors.append(round(1 - task.precision(point.values), 6))
        updates.append(point.updates)
      training.finish()
    except results.NonFiniteGradientError:
      left = len(times) - len(errors)
      errors += [0.9] * left
      updates += updates[-1:] * left
    training.close()
    rows[name] = {"errors": errors, "updates": updates}
  return rows


def measure_rates(
  rules: Mapping[str, Mapping[str, object]], rates: Sequence[float], **more
) -> dict[str, dict[str, dict]]:
  """Calls `measure` for each learning rate.

  Returns:
    Maps the text of each rate to the result of `measure`.
  """
  return {str(rate): measure(rules, rate=rate, **more) for rate in rates}


def last_error(rows: Mapping[str, Mapping], rule: str) -> float:
  """Returns the mean of the last three errors of a rule.

  Args:
    rows: The result of `measure`.
    rule: The name of the rule.
  """
  return float(np.mean(rows[rule]["errors"][-3:]))


def best_rate(measurements: Sequence[Mapping], rule: str) -> float:
  """Returns the rate with the smallest mean of `last_error` over all seeds.

  Args:
    measurements: One for each seed; `rates` has the result of `measure_rates`.
    rule: The name of the rule.
  """
  return min(
    map(float, measurements[0]["rates"]),
    key=lambda rate: np.mean(
      [last_error(m["rates"][str(rate)], rule) for m in measurements]
    ),
  )


def time_to(
  times: Sequence[float], errors: Sequence[float], error: float
) -> float:
  """Returns the first time from which the error is at most `error` three times.

  It is the last time if that does not happen.
  """
  is_low = np.asarray(errors) <= error
  lows = is_low[:-2] & is_low[1:-1] & is_low[2:]
  return float(times[int(np.argmax(lows))] if lows.any() else times[-1])


def draw(
  axes, times: Sequence[float], curves: Mapping[str, np.ndarray]
) -> None:
  """Draws medians over the seeds as lines, and ranges as bands.

  Args:
    axes: The axes of matplotlib.
    times: The virtual times.
    curves: Maps each label to errors, [seeds, times].
  """
  for number, (label, errors) in enumerate(curves.items()):
    color = claims.COLORS[number % len(claims.COLORS)]
    axes.plot(
      times,
      np.median(errors, axis=0),
      color=color,
      marker=claims.MARKERS[number % len(claims.MARKERS)],
      markevery=max(1, len(times) // 10),
      label=label,
    )
    axes.fill_between(
      times, errors.min(0), errors.max(0), color=color, alpha=0.15
    )
  axes.set_yscale("log")
  axes.set_xlabel("virtual time (mean times of a batch)")
  axes.set_ylabel("share of wrong test pictures")
  axes.legend(frameon=False)
  axes.grid(alpha=0.3)
