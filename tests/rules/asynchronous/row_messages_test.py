"""Counts what steps with tables send between tasks."""

import collections
import threading

import keras
import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.eager import context

from tests.support import stores
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import embeddings
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

_WORKER = 3
_ROWS, _COLUMNS = 100, 4
# What a step in a loop sends between a replica and 2 PS tasks.
_OF_A_REPLICA = {
  # Whether the loop goes on, the ids, and the gradients.
  (_WORKER, 0): 3,
  (_WORKER, 1): 3,
  # The rows; the reply, together with the variables.
  (0, _WORKER): 2,
  (1, _WORKER): 1,
}


def _device(number):
  """Names a device as that of another task is named: with a job."""
  return f"/job:localhost/replica:0/task:0/device:CPU:{number}"


class _Training:
  """A training of one replica on the worker's device, with 2 PS tasks."""

  def __init__(self, kind, num_tables):
    home = tables.Home(stores.namespace(), 2, _device)
    with tables.home(home):
      every = [
        embeddings.Table(_ROWS, _COLUMNS, name=f"table_{i}")
        for i in range(num_tables)
      ]
    kernel = tf.Variable(tf.ones([_COLUMNS, 1]), name="kernel")

    def loss_fn(parameters, ids):
      rows = [embeddings.lookup(table, ids) for table in every]
      return tf.reduce_sum(sum(rows) @ parameters[-1])

    variables = [*(table.variable for table in every), kernel]
    data = tf.data.Dataset.from_tensors(tf.constant([1, 2, 3])).repeat()
    replica = model_replica.Replica(variables, loss_fn, lambda *_: data)
    specs = placement.from_variables(variables)
    store = parameter_store.ParameterStore(
      specs,
      placement.plan(specs, placement.GreedyByBytes(2)),
      num_tasks=2,
      device_of_task=_device,
      namespace=stores.namespace(),
    )
    self.rule = kind(keras.optimizers.SGD(0.1), 1)
    self.rule.build(store, is_sparse=[True] * num_tables + [False])
    first = [tf.zeros([0, _COLUMNS])] * num_tables
    rule_base.create_or_resume(
      self.rule, store, [*first, tf.ones([_COLUMNS, 1])]
    )
    self._loop = replica_loop.ReplicaLoop(
      self.rule, replica, iter(data), 0, _device(_WORKER)
    )
    with tf.device(_device(_WORKER)):
      self.state = tf.function(self._loop.begin, autograph=False)()

  def step(self, *, is_preadmitted):
    """Makes one step outside of a loop."""
    run = tf.function(
      lambda state: self._loop.run_one(*state, is_preadmitted=is_preadmitted),
      autograph=False,
    )
    with tf.device(_device(_WORKER)):
      self.state = run(self.state)

  def run(self, count, *, is_preadmitted):
    """Makes `count` steps in a loop."""
    run = tf.function(
      lambda state: self._loop.run_many(
        tf.constant(count), *state, is_preadmitted=is_preadmitted
      ),
      autograph=False,
    )
    with tf.device(_device(_WORKER)):
      made, *self.state = run(self.state)
    assert int(made) == count, made


def _messages(run):
  """Counts the tensors that each run of a function sends.

  In this test, the batches come from the device of PS task 0. What the worker
  sends and gets for them is not counted.

  Args:
    run: Runs one function that runs on 3 devices.

  Returns:
    A dict from (sender, receiver) to the number of tensors.
  """
  context.enable_run_metadata()
  try:
    run()
    metadata = context.export_run_metadata()
  finally:
    context.disable_run_metadata()
  (graphs,) = [
    found.partition_graphs
    for found in metadata.function_graphs
    if len(found.partition_graphs) > 2
  ]
  names = collections.defaultdict(set)
  for graph in graphs:
    for node in graph.node:
      ends = tuple(
        int(node.attr[f"{end}_device"].s[-1:] or -1) for end in ("send", "recv")
      )
      if node.op == "_Send" and not _is_of_batches(node, ends):
        names[ends].add(node.attr["tensor_name"].s)
  return {ends: len(found) for ends, found in names.items()}


def _is_of_batches(node, ends):
  """Returns whether a message has to do with the iterator, or with the loop.

  Those of the loop are sent once, not in each iteration, or because the
  iterator is in the loop.
  """
  name = str(node.input)
  outside = ["Iterator", "exit", "Func/while/cond", "merge", "Assert"]
  if 0 in ends:
    outside.append("loop_body_control")
  return any(part in name for part in outside)


class RowMessagesTest(stores.TestCase):
  def test_gradients_of_all_tables_are_one_message_for_each_task(self):
    def count(num_tables):
      training = _Training(async_replicas.AsyncReplicasOptimizer, num_tables)
      return _messages(lambda: training.step(is_preadmitted=False))

    one = count(1)
    self.new_cluster()
    three = count(3)
    # A further table adds ids to, and rows from, each task; and nothing else.
    for task in (0, 1):
      for ends in ((_WORKER, task), (task, _WORKER)):
        self.assertEqual(three[ends] - one[ends], 2, (one, three))
    # The ids and the gradients; with these, the loss and other scalars.
    self.assertEqual(one[_WORKER, 0], 2)
    self.assertEqual(one[_WORKER, 1], 2)
    # The rows; whether an update is admitted is no matter of the replica.
    self.assertEqual(one[1, _WORKER], 1)

  def test_an_asynchronous_step_in_a_loop_needs_eleven(self):
    training = _Training(async_replicas.AsyncReplicasOptimizer, 1)
    found = _messages(lambda: training.run(2, is_preadmitted=False))
    # The decision on the gradients; that they are applied.
    self.assertEqual(found, {**_OF_A_REPLICA, (0, 1): 1, (1, 0): 1})

  def test_a_synchronous_step_in_a_loop_needs_ten(self):
    training = _Training(sync_replicas.SyncReplicasOptimizer, 1)
    chief = threading.Thread(
      target=lambda: [training.rule.apply_updates() for _ in range(3)]
    )
    chief.start()
    training.step(is_preadmitted=False)
    found = _messages(lambda: training.run(2, is_preadmitted=True))
    chief.join()
    # The gradients have arrived.
    self.assertEqual(found, {**_OF_A_REPLICA, (1, 0): 1})


if __name__ == "__main__":
  absltest.main()
