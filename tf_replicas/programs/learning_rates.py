"""Computes the default learning rate from update rule, batch and replicas.

A *recipe* is a set of settings with which a model is known to train well. Its
learning rate is for synchronous updates with the batch size of the recipe. With
smaller batches, or with *stale* gradients (computed from variables that have
changed since), gradient descent may diverge at that rate. So the default of
`--learning_rate` is lower there. A rate that the user gives is not changed.

The *staleness* of a gradient is the number of updates between reading the
variables and applying the gradient.
"""

from typing import NamedTuple

from tf_replicas.programs import run_options
from tf_replicas.programs import update_options


class Default(NamedTuple):
  """A default learning rate, and what it was computed from.

  Attributes:
    rate: The default learning rate.
    recipe: The name of the recipe.
    recipe_rate: The learning rate of the recipe.
    recipe_batch: The number of examples in an update of the recipe; None if
      `recipe_rate` is for any number.
    batch: The number of examples in the gradient that an optimizer step of this
      training applies.
    staleness: The expected staleness of a gradient, in updates.
    step: The kind of optimizer step, such as "async updates".
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
  """Lowers a learning rate for smaller batches and for stale gradients.

      rate * min(1, batch / recipe_batch) / (1 + staleness)

  Smaller batches: the mean gradient of k times fewer examples has k times the
  variance, and gets a k times smaller rate. This is the linear scaling rule
  (Krizhevsky 2014, "One weird trick", section 5; Goyal et al. 2017, section
  2.1). A larger batch does not get a larger rate, since that needs a warm-up,
  and does not work for every size.

  Stale gradients: gradient descent along a curvature c with gradients that are
  s updates old is stable below the rate 2 sin(pi / (4 s + 2)) / c. That is
  2 / c for s = 0, 1 / c for s = 1 and 0.45 / c for s = 3 (Levin & May 1976). So
  the rate is divided by 1 + s, as in Zhang et al. 2015, "Staleness-aware
  async-SGD", section 3.

  Args:
    rate: The learning rate of the recipe.
    batch: The number of examples in the gradient.
    recipe_batch: The number of examples in an update of the recipe; None if
      `rate` is for any number.
    staleness: The s above, in updates.
    is_divided: Whether the update rule also divides the rate by max(1, s). Then
      the result is multiplied by max(1, s).

  Returns:
    The learning rate to use.
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
  """Computes the default learning rate of a training.

  Args:
    options: How to run the training.
    recipe: The name of the recipe.
    rate: The learning rate of the recipe.
    recipe_batch: The number of examples in an update of the recipe; None if
      `rate` is for any number.
    batch_size: The number of examples in the batch of one tower (a copy of the
      model).
    is_scaled_later: Whether the caller multiplies the result by the number of
      batches in an update.

  Returns:
    The default rate, and what it was computed from. If the training has several
    kinds of optimizer steps, the one with the lowest rate.
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
  """Returns a line that says which learning rate is used, and why.

  Args:
    default: The default learning rate of the training.
    rate: The learning rate that is used.
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
  """Returns a line that says what to change after a training has diverged.

  Args:
    default: The default learning rate of the training.
    rate: The learning rate that was used.
    update: The settings of the update rule that were used.
    *others: Other changes to suggest, such as "a longer --warmup_epochs".
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
