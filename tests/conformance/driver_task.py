"""Runs one task of the clusters that `drivers_test` starts.

The arguments are those of `tests.tasks.cluster_task`.
"""

import sys

from tests.tasks import cluster_task  # First: it starts TensorFlow fast.

from tests.conformance import driver_suite  # isort: skip
from tests.support import word_model  # isort: skip


def answer(here: cluster_task.Here) -> None:
  """Plays the part of this task: uses its driver and reports what that does.

  The chief reports the result of `ask_chief`. Another task runs a replica.

  Args:
    here: This task.
  """
  driver = here.driver(
    word_model.replica, lambda: driver_suite.rule(here.num_replicas)
  )
  if driver.is_chief:
    fails = here.options["fails"]
    here.report(driver_suite.ask_chief(driver, fails=fails))
    here.mark("over")
    return
  answers = {"role_error": driver_suite.error_of(driver.step)}
  with driver:
    try:
      answers["returned"] = driver.run_replica()
    except RuntimeError as error:
      answers["error"] = str(error)
  here.report(answers, "follower")


if __name__ == "__main__":
  cluster_task.main(sys.argv[1:], globals())
