"""Tests for programs.run_options: what can run, and what is said of it."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import cluster
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options

WORKERS = {"worker": ["h0:1", "h1:1"]}
PS = {"ps": ["h2:1"], **WORKERS}


def _options(document, **more):
  if "replicas_to_aggregate" in more:
    number = more.pop("replicas_to_aggregate")
    more["update"] = update_options.UpdateSettings(replicas_to_aggregate=number)
  return run_options.Options(cluster.parse(document), "run", **more)


def _one(gpus=None, on="cpu", **more):
  devices = {} if gpus is None else {"worker": {"gpus": gpus}}
  document = {"cluster": {}, "devices": devices, "variables": {"on": on}}
  return _options(document, **more)


def _mirrored(**more):
  document = {"cluster": WORKERS, "variables": {"on": "mirrored"}}
  return _options({**document, **more.pop("document", {})}, **more)


def _updated(**settings):
  return _options(
    {"cluster": PS}, update=update_options.UpdateSettings(**settings)
  )


def _workload(batch_size=8):
  return run_options.Workload(
    replica_fn=None,
    optimizer_fn=None,
    learning_rate_fn=None,
    batch_size=batch_size,
  )


class JoiningTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"cluster": PS}, {"replication": "in_graph"}, "workers to in_graph"),
    ({"cluster": PS}, {}, "may wait for at most 2 gradients"),
  )
  def test_refuses(self, document, more, words):
    spec = cluster.parse(document).admit(3)
    with self.assertRaisesRegex(cluster.ClusterError, words):
      run_options.Options(spec, "run", **more)

  def test_all_that_may_join_are_replicas(self):
    spec = cluster.parse({"cluster": PS}).admit(3)
    update = update_options.UpdateSettings(("async",))
    options = run_options.Options(spec, "run", update=update)
    self.assertLen(options.replicas, 3)


class OneMachineSpecTest(parameterized.TestCase):
  @parameterized.parameters((0, None), (1, (0,)), (4, (0, 1, 2, 3)))
  def test_towers(self, num_gpus, gpus):
    spec = run_options.one_machine_spec(num_gpus)
    self.assertFalse(spec.is_distributed)
    self.assertEqual(spec.gpus(spec.chief), gpus)
    self.assertEqual(spec.variables.on, "cpu")

  def test_refuses_a_negative_number(self):
    with self.assertRaisesRegex(cluster.ClusterError, "negative.*: -1"):
      run_options.one_machine_spec(-1)


class CheckTest(parameterized.TestCase):
  def _refused(self, words, options_fn, *arguments, **more):
    with self.assertRaisesRegex(cluster.ClusterError, words) as caught:
      options_fn(*arguments, **more)
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.parameters(([0],), ([0, 1, 2],), (None,))
  def test_layers_need_whole_towers(self, gpus):
    layers = {"layers": {"conv*": 0, "local*": 1}}
    devices = {} if gpus is None else {"worker": {"gpus": gpus}}
    document = {"cluster": {}, "devices": devices, **layers}
    self._refused("`layers`.*multiple of 2", _options, document)

  def test_a_tower_has_as_many_devices_as_its_layers(self):
    devices = {"worker": {"gpus": [0, 1, 2, 3]}}
    layers = {"conv*": 0, "local*": 1}
    options = _options({"cluster": {}, "devices": devices, "layers": layers})
    self.assertEqual(options.num_towers, 2)

  @parameterized.parameters("cpu", "mirrored")
  def test_one_process_runs(self, on):
    _one(on=on)
    _one([0, 1], on, task=cluster.Task("worker", 0))
    _one([0, 1], on, replication=run_options.IN_GRAPH)
    _one([0, 1], on, replicas_to_aggregate=1)

  def test_mirrored_workers_run(self):
    _mirrored()
    _mirrored(replicas_to_aggregate=2)
    gpus = {"devices": {"worker": {"gpus": [0, 1]}}}
    _mirrored(document=gpus)

  def test_parameter_servers_run(self):
    for replication in (run_options.BETWEEN_GRAPH, run_options.IN_GRAPH):
      _options({"cluster": PS}, replication=replication)

  def test_cpu_of_several_workers(self):
    words = "must be 'ps' or 'mirrored' for a cluster"
    self._refused(words, _options, {"cluster": WORKERS})

  def test_mirrored_from_one_client(self):
    words = "need `--replication=between_graph`"
    self._refused(words, _mirrored, replication=run_options.IN_GRAPH)

  @parameterized.parameters(1, 3)
  def test_backup_workers_without_parameter_servers(self, number):
    words = f"every replica, 2 in all. Received: {number}"
    self._refused(words, _mirrored, replicas_to_aggregate=number)
    self._refused("every replica, 1 in all", _one, replicas_to_aggregate=2)

  def test_mirrored_workers_of_different_size(self):
    gpus = {"worker:0": {"gpus": [0, 1]}, "worker:1": {"gpus": [0]}}
    words = "Received: 2 of worker 0, 1 of worker 1"
    self._refused(words, _mirrored, document={"devices": gpus})

  def test_stand_ins_for_several_gpus_of_a_mirrored_worker(self):
    gpus = {"devices": {"worker": {"gpus": [0, 1]}}}
    words = "one GPU per worker. Received: 2 GPUs"
    self._refused(words, _mirrored, document=gpus, emulate_gpus=True)

  def test_gpus_of_a_client_that_does_not_train(self):
    document = {
      "cluster": {"chief": ["h3:1"], **PS},
      "devices": {"chief": {"gpus": [0]}, "worker": {"gpus": [0]}},
    }
    words = r"`devices.chief.gpus` must be \[\] with --rep.*Received: \[0\]"
    self._refused(words, _options, document, replication=run_options.IN_GRAPH)
    self.assertLen(_options(document).replicas, 3)

  @parameterized.parameters(
    ("keep_checkpoints", 0),
    ("log_every_steps", -1),
    ("lost_after_secs", 1.0),
    ("checkpoint_every_secs", float("nan")),
    ("replication", "in_between"),
  )
  def test_settings_out_of_range(self, name, value):
    with self.assertRaisesRegex(
      cluster.ClusterError, f"`{name}` must be .*{value!r}"
    ):
      dataclasses.replace(_one(), **{name: value})

  def test_layers_of_a_mirrored_replica(self):
    document = {
      "devices": {"worker": {"gpus": [0, 1]}},
      "variables": {"on": "mirrored"},
      "layers": {"conv*": 0, "local*": 1},
    }
    self._refused("`layers` must be absent", _options, document)

  @parameterized.named_parameters(
    ("plain", {"rules": ("async",)}),
    ("locked", {"rules": ("async",), "use_locking": True}),
    ("ssp", {"rules": ("bounded_staleness",), "max_staleness": 0}),
    (
      "combined",
      {
        "rules": ("softsync", "staleness_aware", "drop_stale"),
        "softsync_n": 1,
        "max_staleness": 3,
      },
    ),
    ("wire", {"wire_dtype": "float16"}),
    ("average", {"rules": ("model_average",), "replicas_to_aggregate": 1}),
    (
      "elastic",
      {
        "rules": ("elastic_average",),
        "period": 5,
        "moving_rate": 0.1,
        "rho": 0.5,
      },
    ),
    (
      "one_after_the_other",
      {
        "rules": ("bounded_staleness",),
        "max_staleness": 1,
        "then_update": ("sync",),
        "switch_at_step": 10,
        "replicas_to_aggregate": 1,
      },
    ),
    (
      "when_refused",
      {
        "then_update": ("async",),
        "switch_when_refused": 0.5,
        "use_locking": True,
        "replicas_to_aggregate": 1,
      },
    ),
    ("when_slow", {"then_update": ("async",), "switch_when_slow": 0.5}),
  )
  def test_update_rules_run(self, settings):
    _updated(**settings)

  @parameterized.named_parameters(
    (
      "unknown",
      "must be one of sync, async.*'hogwild'",
      {"rules": ("hogwild",)},
    ),
    ("none", "must be one of sync, async", {"rules": ()}),
    ("two", "Received: 'sync,async'", {"rules": ("sync", "async")}),
    ("missing", "needs `--max_staleness`", {"rules": ("drop_stale",)}),
    (
      "unused",
      "`--softsync_n` is for `--update=softsync`. Received: --update=async",
      {"rules": ("async",), "softsync_n": 1},
    ),
    (
      "odd",
      "divide.*, 2. Received: 3",
      {"rules": ("softsync",), "softsync_n": 3},
    ),
    (
      "sync_locked",
      "`--use_locking` is for `--update=async` or .* --update=sync",
      {"use_locking": True},
    ),
    (
      "sync_old",
      "`--refresh_every` is for `--update=async` or ",
      {"refresh_every": 4},
    ),
    (
      "periodic_wire",
      "`--wire_dtype` is for `--update=sync` or `async` or",
      {"rules": ("elastic_average",), "wire_dtype": "float16"},
    ),
    (
      "periodic_locked",
      "`--snapshot_reads` is for `--update=async` or .*model_average",
      {"rules": ("model_average",), "snapshot_reads": True},
    ),
    ("sync_period", "`--period` is for", {"period": 5}),
    (
      "model_moving",
      "`--moving_rate` is for `--update=elastic_average`",
      {"rules": ("model_average",), "moving_rate": 0.1},
    ),
    (
      "then_when",
      "needs one of `--switch_at_step`, .*--then_update=async, none",
      {"then_update": ("async",)},
    ),
    (
      "then_what",
      "none of them may be given. .*--switch_at_step=7",
      {"switch_at_step": 7},
    ),
    (
      "then_both",
      "needs one of .*--switch_at_step=7 --switch_when_refused=0.5",
      {
        "then_update": ("async",),
        "switch_at_step": 7,
        "switch_when_refused": 0.5,
      },
    ),
    (
      "then_slow",
      "needs `--update=sync` without backups.* --update=async",
      {
        "rules": ("async",),
        "then_update": ("sync",),
        "switch_when_slow": 0.5,
      },
    ),
    (
      "then_alike",
      "must go from sync to asynchronous.*Received: async, then drop_stale",
      {
        "rules": ("async",),
        "then_update": ("drop_stale",),
        "max_staleness": 1,
        "switch_at_step": 7,
      },
    ),
    (
      "then_slow_of_some",
      "needs `--update=sync` without backups.* --update=sync with backups",
      {
        "then_update": ("async",),
        "switch_when_slow": 0.5,
        "replicas_to_aggregate": 1,
      },
    ),
    (
      "then_refused_by_nobody",
      "needs `--update=drop_stale`, or sync.*--update=sync without backups",
      {"then_update": ("async",), "switch_when_refused": 0.5},
    ),
    (
      "then_all_refused",
      r"`switch_when_refused` must be in \[0, 1\). Received: 1.0",
      {
        "then_update": ("async",),
        "switch_when_refused": 1.0,
        "replicas_to_aggregate": 1,
      },
    ),
    (
      "rho",
      r"`rho` must be in \[0, inf\). Received: nan",
      {"rules": ("elastic_average",), "rho": float("nan")},
    ),
    (
      "compensation",
      r"`delay_compensation` must be in \[0, inf\). Received: inf",
      {"rules": ("delay_compensated",), "delay_compensation": float("inf")},
    ),
    (
      "then_two",
      "`--then_update` must be one of",
      {"then_update": ("sync", "async"), "switch_at_step": 7},
    ),
    (
      "then_periodic",
      "may name only these rules if both are given: sync.*model_average",
      {"then_update": ("model_average",), "switch_at_step": 7},
    ),
    (
      "average_of_more",
      "must be at most the number of replicas, 2, .*model_average. Rec.*: 3",
      {"rules": ("model_average",), "replicas_to_aggregate": 3},
    ),
    (
      "then_more",
      "must be at most the number of replicas, 2, .*sync, then async",
      {
        "then_update": ("async",),
        "switch_at_step": 7,
        "replicas_to_aggregate": 3,
      },
    ),
    (
      "moving_too_far",
      r"`moving_rate` must be in \(0, 1\]. Received: 1.5",
      {"rules": ("elastic_average",), "moving_rate": 1.5},
    ),
    (
      "not_moving",
      r"`moving_rate` must be in \(0, 1\]. Received: 0",
      {"rules": ("elastic_average",), "moving_rate": 0.0},
    ),
    (
      "aggregated",
      "is for `--update=sync` or `model_average`. Received: --update=async",
      {"rules": ("async",), "replicas_to_aggregate": 1},
    ),
  )
  def test_update_rules_that_do_not(self, words, settings):
    self._refused(words, _updated, **settings)

  @parameterized.parameters(
    ({}, 16),
    ({"rules": ("async",)}, 8),
    ({"rules": ("softsync",), "softsync_n": 1}, 16),
    ({"rules": ("model_average",)}, 1600),
    ({"rules": ("elastic_average",), "period": 5}, 40),
  )
  def test_examples_of_an_update(self, settings, expected):
    self.assertEqual(_updated(**settings).effective_batch(8), expected)

  @parameterized.parameters(
    ({}, 1.0),
    ({"replicas_to_aggregate": 1}, 0.5),
    ({"replicas_to_aggregate": 4}, 1.0),
    ({"rules": ("async",)}, 1.0),
  )
  def test_how_many_batches_are_used(self, settings, expected):
    self.assertEqual(_updated(**settings).used_share, expected)

  def test_examples_of_two_rules_are_not_counted_together(self):
    update = update_options.UpdateSettings(
      then_update=("async",), switch_at_step=7
    )
    options = _options({"cluster": PS}, update=update)
    words = "needs `--max_steps`.*--update=sync, then async"
    self._refused(words, run_options.check_length, options, 8, None)
    run_options.check_length(options, 8, 100)

  def test_parts_of_a_batch_are_equal(self):
    options = _one(micro_batches=3)
    words = "`--micro_batches` must divide the batch of 8. Received: 3"
    self._refused(words, run_options.check_length, options, 8, 100)
    run_options.check_length(options, 9, 100)

  def test_update_rules_need_parameter_servers(self):
    update = update_options.UpdateSettings(rules=("async",))
    self._refused("need variables on parameter", _one, [0, 1], update=update)


class DescribeTest(absltest.TestCase):
  def test_one_device(self):
    self.assertEqual(
      run_options.describe(_one(), _workload()),
      "one process, variables on cpu: updates from 1 tower of batch 8:"
      " effective batch 8",
    )

  def test_towers(self):
    words = run_options.describe(_one([0, 1, 2]), _workload())
    self.assertIn("3 towers of batch 8: effective batch 24", words)

  def test_mirrored(self):
    words = run_options.describe(_one([0, 1], "mirrored"), _workload())
    self.assertIn("mirrored: updates from 2 replicas of batch 8", words)
    self.assertIn("effective batch 16", words)

  def test_mirrored_workers(self):
    gpus = {"devices": {"worker": {"gpus": [0, 1]}}}
    options = _mirrored(document=gpus)
    words = run_options.describe(options, _workload())
    self.assertEqual(
      run_options.describe_cluster(options.spec),
      "cluster: worker 0 at h0:1, worker 1 at h1:1",
    )
    self.assertNotIn("cluster:", words)
    self.assertIn("updates from 4 replicas of batch 8", words)
    self.assertIn("effective batch 32", words)

  def test_backup_workers(self):
    options = _options({"cluster": PS}, replicas_to_aggregate=1)
    words = run_options.describe(options, _workload())
    self.assertEqual(
      words,
      "replication: between_graph; 2 replicas with 1 tower of batch 8 each;"
      " sync updates of 1 contribution: effective batch 8",
    )

  def test_replicas_and_towers(self):
    for replicas, towers, batch_size, expected in (
      (1, 1, None, "1 replica with 1 tower; async updates of 1 contribution"),
      (2, 1, None, "; 2 replicas with 1 tower each; async updates"),
      (2, 2, 16, "; 2 replicas with 2 towers of batch 16 each; async updates"),
      (1, 2, 16, "; 1 replica with 2 towers of batch 16; async updates"),
    ):
      line = run_options.describe_updates(
        "in_graph",
        update_options.UpdateSettings(rules=("async",)),
        replicas,
        num_towers=towers,
        batch_size=batch_size,
      )
      self.assertStartsWith(line, "replication: in_graph; ")
      self.assertIn(expected, line)

  def test_one_rule_after_the_other(self):
    update = update_options.UpdateSettings(
      then_update=("async",), switch_at_step=7
    )
    words = run_options.describe(
      _options({"cluster": PS}, update=update), _workload()
    )
    self.assertIn("; sync, then async updates of 2 contributions:", words)


if __name__ == "__main__":
  absltest.main()
