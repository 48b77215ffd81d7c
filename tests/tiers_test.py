"""Every test is in one tier, by what its code does; those of `unit` stay so."""

import functools
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support import binaries
from tests.support import tiers
from tests.support import trials
from tf_replicas.cluster import local_cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run():
  subprocess.run([sys.executable, "-c", ""], check=True)


def _fork():
  if not os.fork():
    os._exit(0)


def _spawn():
  process = multiprocessing.get_context("spawn").Process(target=print)
  process.start()
  process.join()


@pytest.mark.parametrize(
  "start",
  [_run, _fork, _spawn, functools.partial(os.system, "true")],
  ids=["subprocess", "fork", "multiprocessing", "shell"],
)
def test_a_unit_test_starts_no_process(guard, start):
  with pytest.raises(tiers.ProcessStarted, match="tier `unit` starts no"):
    start()
  assert len(guard.refused) == 1
  guard.refused.clear()


def test_others_may_start_processes(guard):
  """This one is a `program`."""
  assert not guard.is_up
  _run()


def _freeze(process):
  process.kill()


class _Case:
  refuse = functools.partial(binaries.refuse, "cifar10.train")

  def _help(self):
    return binaries.run("cifar10.train", "--help")

  def by_a_method(self):
    return self._help()

  def by_a_partial(self):
    self.refuse("words")

  def by_nothing(self):
    return binaries.logged_steps("")


def _cluster():
  return trials.Trial("periodic", {}, pathlib.Path())


def _frozen_cluster(spec):
  tasks = local_cluster.LocalCluster(spec, None, log_dir="")
  _freeze(tasks)


def _frozen_program():
  with trials.running(["true"]) as process:
    _freeze(process)


@pytest.mark.parametrize(
  ("function", "tier"),
  [
    (_Case.by_nothing, "unit"),
    (_freeze, "unit"),  # Of what others have started.
    (_run, "program"),
    (_Case.by_a_method, "program"),
    (_Case.by_a_partial, "program"),
    (_cluster, "cluster"),
    (_frozen_cluster, "faults"),
    (_frozen_program, "faults"),
  ],
)
def test_a_tier_follows_from_the_code(function, tier):
  assert tiers.of_functions([function], _Case) == tier


def test_every_test_has_one_tier(request):
  for item in request.session.items:
    marks = {mark.name for mark in item.iter_markers()}
    assert len(marks & tiers.TIERS.keys()) == 1, item.nodeid


@pytest.mark.parametrize(
  "name", [*tiers.EXCEPTIONS, *tiers.QUICK, *tiers.LONG_SECS]
)
def test_what_is_listed_exists(name):
  path, *parts = name.partition("[")[0].split("::")
  text = (ROOT / path).read_text(encoding="utf-8")
  for part in parts:
    assert re.search(rf"^ *(class|def) {part}", text, re.MULTILINE), part
