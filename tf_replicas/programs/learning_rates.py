"""The default learning rate of a rule, a batch and a number of replicas.

A recipe's rate is for synchronous updates of the recipe's own batch. With
smaller batches, or with gradients of variables that others have changed since,
gradient descent may diverge at that rate. So the default of `--learning_rate`
follows from how training is run. A rate that is given is used as it is.
"""

from typing import NamedTuple

from tf_replicas.programs import run_options
from tf_replicas.programs import update_options


class Default(NamedTuple):
  """A default learning rate, and what it follows from.

  Attributes:
    rate: The rate.
    recipe: The name of the recipe.
    recipe_rate: Its rate.
    recipe_batch: The examples of an update that it is for; None: any number.
    batch: The examples in the gradient of a step.
    staleness: See `update_options.expected_staleness`.
    step: What kind of step this is, such as "async updates".
  """

  rate: float
  recipe: str
  recipe_rate: float
  recipe_batch: int | None
  batch: int
  staleness: float
  step: str


def scaled(
  rate: float,
  *,
  batch: int,
  recipe_batch: int | None,
  staleness: float,
  is_divided: bool = False,
) -> float:
  """A rate for smaller batches, and for stale gradients.

      rate * min(1, batch / recipe_batch) / (1 + staleness)

  The mean gradient of k times fewer examples has k times the variance, and
  gets a k times smaller rate: the linear scaling rule (Krizhevsky 2014, "One
  weird trick", section 5; Goyal et al. 2017, section 2.1). A larger batch does
  not get a larger rate: that needs a warm-up, and has its limits.

  Gradient descent along a curvature c with gradients that are s updates old is
  stable below the rate 2 sin(pi / (4 s + 2)) / c: 2 / c with s = 0, 1 / c with
  1, 0.45 / c with 3 (Levin & May 1976). So the rate is divided by 1 + s, as in
  Zhang et al. 2015, "Staleness-aware async-SGD", section 3.

  Args:
    rate: The recipe's.
    batch: The examples in the gradient.
    recipe_batch: The examples that `rate` is for; None: any number.
    staleness: s.
    is_divided: Whether the update rule itself divides the rate by s from 1 on.

  Returns:
    The rate.
  """
  share = min(1.0, batch / recipe_batch) if recipe_batch else 1.0
  divisor = 1.0 + staleness
  if is_divided:
    divisor /= max(1.0, staleness)
  return rate * share / divisor


def default(
  options: run_options.Options,
  *,
  recipe: str,
  rate: float,
  recipe_batch: int | None,
  batch_size: int,
  is_scaled_later: bool = False,
) -> Default:
  """The default learning rate of a run.

  Args:
    options: How it is run.
    recipe: The name of the recipe.
    rate: Its rate.
    recipe_batch: The examples of an update that it is for; None: any number.
    batch_size: The examples of one tower's batch.
    is_scaled_later: Whether the rate will be multiplied by the batches in an
      update.

  Returns:
    The rate, with what it follows from.
  """
  found = []
  for step in options.optimizer_steps(batch_size):
    batch = batch_size if is_scaled_later else step.num_examples
    chosen = scaled(
      rate,
      batch=batch,
      recipe_batch=recipe_batch,
      staleness=step.staleness,
      is_divided="staleness_aware" in options.update.all_rules,
    )
    found.append(
      Default(
        chosen, recipe, rate, recipe_batch, batch, step.staleness, step.name
      )
    )
  return min(found)


def describe(default: Default, rate: float) -> str:
  """The line that says which rate a run has, and why.

  Args:
    default: The default.
    rate: The rate that is used.
  """
  line = f"learning rate {rate:.4g}"
  if rate != default.rate:
    line += f", as given; the default is {default.rate:.4g}"
  fresh = "fresh gradients"
  if default.recipe_batch:
    fresh = f"{default.recipe_batch} examples and {fresh}"
  return (
    f"{line} ({default.step} of {default.batch} examples, expected staleness"
    f" {default.staleness:.3g}; {default.recipe} has {default.recipe_rate:.4g}"
    f" for {fresh})"
  )


def advice(
  default: Default,
  rate: float,
  update: update_options.UpdateSettings,
  *others: str,
) -> str:
  """What to change after a training has diverged, as one line.

  Args:
    default: The default.
    rate: The rate that was used.
    update: The update rule, and what is clipped.
    *others: Other flags that may help, such as `--warmup_epochs`.
  """
  better = default.rate if rate > default.rate else rate / 3
  line = f"try --learning_rate={better:.3g} ({rate:.4g} was used)"
  lines = [line]
  if update.clip_norm is None and update.clip_replica_norm is None:
    # The rules that exchange copies apply no mean gradient.
    is_local = update.is_periodic
    lines.append("--clip_replica_norm=1" if is_local else "--clip_norm=1")
  lines += others
  if default.staleness:
    lines.append("--update=sync")
  return ", or ".join(lines)
