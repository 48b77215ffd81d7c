"""Calls a program's `train` in the tests' own process."""

import contextlib
import io
from collections.abc import Callable

from tf_replicas.programs import run_options


def train(
  train_fn: Callable[..., run_options.Outcome], *arguments, **options
) -> tuple[run_options.Outcome, str]:
  """Calls `train_fn`; returns the outcome and what was printed."""
  with contextlib.redirect_stdout(io.StringIO()) as output:
    outcome = train_fn(*arguments, **options)
  return outcome, output.getvalue()
