"""One task of the clusters of `drivers_test`; see `cluster_task`."""

import sys

from tests.tasks import cluster_task  # First: it starts TensorFlow fast.

from tests.conformance import driver_suite  # isort: skip
from tests.support import word_model  # isort: skip


def answer(here: cluster_task.Here) -> None:
  """Answers the questions of the suite, as the chief or as another client."""
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
