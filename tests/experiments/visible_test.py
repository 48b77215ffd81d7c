"""Tests for partial_updates and overwrite_and_idle: how they judge."""

import functools
import math

import tensorflow as tf  # noqa: F401  # Its first import starts `uname`.
from absl.testing import absltest
from absl.testing import parameterized

from experiments import simulator
from experiments.claims import overwrite_and_idle
from experiments.claims import overwrite_and_idle_task
from experiments.claims import partial_updates
from experiments.claims import partial_updates_task
from experiments.claims import torn_elements_task
from experiments.simulator import compute_times
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import one_thread

try:
  import matplotlib
except ImportError:
  matplotlib = None


def _large(torn_by_tf=0.1, torn_by_rule=0.0):
  shares = dict.fromkeys(partial_updates.WAYS, torn_by_rule)
  shares |= dict.fromkeys(partial_updates.TF1_WAYS, torn_by_tf)
  return {
    way: {
      "num_reads": 1000,
      "torn": round(1000 * share),
      "changed": 500,
      "updates_per_sec": 20.0,
    }
    for way, share in shares.items()
  }


def _seen(neither, use_locking, snapshot_reads, in_whole=0.0, large=None):
  shares = dict(
    neither=neither, use_locking=use_locking, snapshot_reads=snapshot_reads
  )
  settings = {
    name: {
      "anywhere": share,
      "in_cut": share / 2,
      "in_whole": in_whole,
      "apart": 1.0,
      "reads_per_sec": 50.0,
      "updates_per_sec": 60.0,
    }
    for name, share in shares.items()
  }
  return {**settings, "large": large or _large()}


class TaskTest(parameterized.TestCase):
  """What the tasks of the experiments do with a rule of the library."""

  @parameterized.parameters(*overwrite_and_idle.WAYS.items())
  def test_a_turn_adds_one(self, way, options):
    del way
    task = overwrite_and_idle_task
    rule = task._rule(options or {})
    store = one_thread.build(rule, task._replica())
    turn = task._turn(store, None if options is None else rule, 0, 0.0)
    turn()
    turn()
    self.assertEqual(float(store.read()[0]), 2.0)
    rule.close()

  @parameterized.parameters(*partial_updates.SETTINGS.values())
  def test_reads_of_variables_that_rest(self, **options):
    rule = partial_updates_task._rule(options)
    store = one_thread.build(rule, partial_updates_task._replica())
    found = partial_updates_task._read(store, rule, 3)
    self.assertEqual(found["anywhere"], 0.0)
    self.assertEqual(found["updates_per_sec"], 0.0)
    rule.close()

  @parameterized.parameters(*partial_updates.WAYS.values())
  def test_adds_to_a_large_variable_and_reads_it(self, is_sparse, options):
    task = torn_elements_task
    rule = task._rule(options)
    store = one_thread.build(rule, task._replica([4, 2]))
    task._adder(store, rule, 0, is_sparse)()
    found = task._reader(store, rule, "snapshot_reads" in options)()
    self.assertEqual(found[0], [1.0, 1.0])
    rule.close()


class PartialUpdatesTest(parameterized.TestCase):
  def test_torn(self):
    """Whole, torn in the cut one, between two, and in one on one task."""
    ranges = [
      [[5, 5], [5, 5], [5, 5]],
      [[5, 6], [5, 5], [5, 5]],
      [[5, 5], [8, 8], [5, 5]],
      [[5, 5], [5, 5], [4, 5]],
    ]
    self.assertEqual(
      partial_updates.torn(ranges, ["cut", "large_0", "small_0"]),
      {"anywhere": 0.75, "in_cut": 0.25, "in_whole": 0.25, "apart": 3.0},
    )

  def test_only_one_variable_is_cut_and_the_tasks_hold_as_much(self):
    from tf_replicas.store import placement

    shards = placement.plan(
      [
        placement.VariableSpec(name, (size,), "float32", True)
        for name, size in partial_updates.SIZES.items()
      ],
      placement.Partitioned(2, partial_updates.MIN_SHARD_BYTES),
    )
    cut = {pieces[0].path for pieces in shards if len(pieces) > 1}
    self.assertEqual(cut, {"cut"})
    first, second = placement.bytes_per_task(shards, 2)
    self.assertEqual(first, second)

  @parameterized.parameters(
    (0.2, 0.2, 0.0, 0.0, claims.HOLDS),
    # Nothing was seen at all: the experiment would show nothing.
    (0.0, 0.2, 0.0, 0.0, claims.FAILS),
    # Locking helped the reader.
    (0.2, 0.0, 0.0, 0.0, claims.FAILS),
    # A snapshot was none.
    (0.2, 0.2, 1 / 2000, 0.0, claims.FAILS),
    # A variable on one task was not whole.
    (0.2, 0.2, 0.0, 1 / 2000, claims.FAILS),
  )
  def test_verdict(self, neither, locking, snapshot, in_whole, expected):
    findings = partial_updates.find(
      [_seen(neither, locking, snapshot, in_whole)]
    )
    self.assertEqual(claims.verdict(findings), expected)

  @parameterized.parameters(
    # The library's rule was torn.
    ((0.1, 0.001), claims.FAILS),
    # Not even TF1's variable was torn: that shows nothing about the library.
    ((0.0, 0.0), claims.FAILS),
  )
  def test_verdict_on_large_variables(self, torn, expected):
    findings = partial_updates.find([_seen(0.2, 0.2, 0.0, large=_large(*torn))])
    self.assertEqual(claims.verdict(findings), expected)

  def test_bound_on_what_was_never_seen(self):
    self.assertAlmostEqual(
      partial_updates.upper_bound(0, 1000), 0.003, places=4
    )

  def test_bound_on_what_was_seen(self):
    """With it, so few have a probability of 5%."""
    self.assertEqual(partial_updates.upper_bound(7, 7), 1.0)
    for count in (1, 3, 50):
      share = partial_updates.upper_bound(count, 100)
      few = sum(
        math.comb(100, k) * share**k * (1 - share) ** (100 - k)
        for k in range(count + 1)
      )
      self.assertAlmostEqual(few, 0.05, places=6)

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    shares, rates, large = partial_updates.draw([_seen(0.2, 0.1, 0.0)]).axes
    heights = sorted(bar.get_height() for bar in shares.patches)
    self.assertEqual(heights, [0.0] * 5 + [5.0, 10.0, 10.0, 20.0])
    self.assertLen(rates.patches, 6)
    ways = [*partial_updates.TF1_WAYS, *partial_updates.WAYS]
    self.assertLen(large.patches, len(ways))


@functools.cache
def _simulated(slowdown):
  """What would be measured if the slow worker were `slowdown` times slower."""
  cluster = simulator.Cluster(
    3,
    compute_times.Lognormal(0.2, 0.05),
    slowdown={2: slowdown},
    latency=0.001,
  )
  return {
    "writes": _written(),
    **{
      name: overwrite_and_idle.summary(_events(cluster, rule, num_steps))
      for name, rule, num_steps in (
        ("sync", simulator.Sync(), 40),
        ("async", simulator.Async(), 440),
      )
    },
  }


def _written(**changed):
  """What is left of 100 writes in each way."""
  left = dict.fromkeys(overwrite_and_idle.WAYS, 100.0)
  left |= {overwrite_and_idle.LITERAL: 30.0, **changed}
  return {
    way: {"writes": [45, 45, 10], "value": value} for way, value in left.items()
  }


def _events(cluster, rule, num_steps):
  run = simulator.simulate(cluster, rule, num_steps, records=True)
  return sorted(run.events, key=lambda event: event.start)


class OverwriteAndIdleTest(parameterized.TestCase):
  def test_writes_in_order_with_their_staleness(self):
    """Both read at 0; one writes, reads and writes before the other does."""
    events = [
      recorded_run.Event("worker:0", 0, "compute", 0.0, 0.5),
      recorded_run.Event("worker:2", 0, "compute", 0.1, 7.5),
      recorded_run.Event("worker:0", 0, "apply", 0.5, 1.0),
      recorded_run.Event("worker:0", 1, "compute", 1.0, 4.0),
      recorded_run.Event("worker:0", 1, "apply", 4.0, 5.0),
      recorded_run.Event("worker:2", 0, "apply", 7.5, 9.0),
    ]
    self.assertEqual(
      overwrite_and_idle.writes(events),
      [("worker:0", 0, 1.0), ("worker:0", 0, 5.0), ("worker:2", 2, 9.0)],
    )

  def test_staleness_is_that_of_the_run(self):
    cluster = simulator.Cluster(
      3, compute_times.Lognormal(0.2, 0.1), slowdown={2: 5.0}
    )
    run = simulator.simulate(cluster, simulator.Async(), 200)
    found = overwrite_and_idle.writes(_events(cluster, simulator.Async(), 200))
    self.assertEqual([w.staleness for w in found], run.staleness.tolist())

  def test_undone_by_hand(self):
    """1, 1/2, 1/4, 1/8, and 1/8 - 1/2: of 7/8 won 2/8 are lost."""
    order = [("worker:0", 0), ("worker:1", 0), ("worker:0", 0), ("worker:2", 3)]
    (path,) = overwrite_and_idle.paths(order, ["worker:2"], 0.5)
    self.assertEqual(path.tolist(), [1.0, 0.5, 0.25, 0.125, -0.375])
    self.assertAlmostEqual(overwrite_and_idle.undone([path]), 2 / 7)

  def test_small_steps_undo_nothing(self):
    """1, 0.9, 0.81, 0.729, and a tenth less: it only helps."""
    order = [("worker:0", 0), ("worker:1", 0), ("worker:0", 0), ("worker:2", 3)]
    rolled = overwrite_and_idle.paths(order, ["worker:2"], 0.1)
    self.assertEqual(overwrite_and_idle.undone(rolled), 0.0)

  def test_who_had_read_before_had_read_the_start(self):
    """The last but one had read first of all: 1, 1/2, 1/2 - 1/2, - 1/2."""
    order = [("worker:1", 0), ("worker:0", 0), ("worker:1", 2), ("worker:2", 2)]
    (path,) = overwrite_and_idle.paths(order, ["worker:2"], 0.5)
    self.assertEqual(path.tolist(), [1.0, 0.5, 0.0, -0.5])
    self.assertAlmostEqual(overwrite_and_idle.undone([path]), 0.5)

  def test_reads_before_the_record_are_left_out(self):
    order = [("worker:0", 0), ("worker:2", 3)]
    self.assertEmpty(overwrite_and_idle.paths(order, ["worker:2"], 0.5))
    self.assertEqual(overwrite_and_idle.undone([]), 0.0)

  def test_five_times_slower(self):
    """While it takes one turn the others take five each, and wait else."""
    m = _simulated(5.0)
    for task in overwrite_and_idle.FAST:
      self.assertAlmostEqual(m["sync"]["waiting"][task], 0.8, delta=0.03)
      self.assertAlmostEqual(m["async"]["waiting"][task], 0.0, delta=0.03)
    self.assertAlmostEqual(
      overwrite_and_idle.expected_waiting(m), 0.8, delta=0.03
    )
    slow, fast = (
      overwrite_and_idle.staleness(m, tasks)
      for tasks in ([overwrite_and_idle.SLOW], overwrite_and_idle.FAST)
    )
    self.assertAlmostEqual(slow, 10, delta=0.5)
    self.assertAlmostEqual(fast, 1.2, delta=0.1)

  @parameterized.parameters(5.0, 1.0)
  def test_the_speed_of_the_slow_worker_decides_nothing(self, slowdown):
    findings = overwrite_and_idle.find([_simulated(slowdown)])
    self.assertEqual(claims.verdict(findings), claims.HOLDS)

  @parameterized.parameters(
    # The literal write loses nothing.
    ({overwrite_and_idle.LITERAL: 100.0},),
    # The library loses one write.
    ({"add": 99.0},),
    ({"add, snapshot_reads": 99.0},),
  )
  def test_verdict_on_writes(self, changed):
    m = {**_simulated(5.0), "writes": _written(**changed)}
    findings = overwrite_and_idle.find([m])
    self.assertEqual(claims.verdict(findings), claims.FAILS)

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    sync, asynchronous, lost, _, ball, undone = overwrite_and_idle.draw(
      [_simulated(5.0)]
    ).axes
    self.assertLen(lost.patches, len(overwrite_and_idle.WAYS))
    grey = {axis: self._num_grey(axis) for axis in (sync, asynchronous)}
    self.assertGreater(grey[sync], 4)
    self.assertEqual(grey[asynchronous], 0)
    self.assertLen(ball.lines, 3)
    self.assertLen(undone.containers, 2)

  def _num_grey(self, axis):
    """The waits of the fast workers that are wide enough to be seen."""
    grey = matplotlib.colors.to_rgba("#DDDDDD")
    return sum(
      bar.get_facecolor() == grey and bar.get_width() > 0.1
      for bar in axis.patches
    )


if __name__ == "__main__":
  absltest.main()
