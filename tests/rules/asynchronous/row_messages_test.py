"""Counts what an asynchronous step with tables sends between tasks."""

import collections

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
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

_WORKER = 3
_ROWS, _COLUMNS = 100, 4


def _messages(num_tables):
  """Counts the tensors that one step sends, by (sender, receiver)."""
  home = tables.Home(stores.namespace(), 2, stores.device)
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
    device_of_task=stores.device,
    namespace=stores.namespace(),
  )
  rule = async_replicas.AsyncReplicasOptimizer(keras.optimizers.SGD(0.1), 1)
  rule.build(store, is_sparse=[True] * num_tables + [False])
  first = [tf.zeros([0, _COLUMNS])] * num_tables + [tf.ones([_COLUMNS, 1])]
  rule_base.create_or_resume(rule, store, first)
  loop = replica_loop.ReplicaLoop(
    rule, replica, iter(data), 0, stores.device(_WORKER)
  )
  step = tf.function(
    lambda state: loop.run_one(*state, is_preadmitted=False), autograph=False
  )
  with tf.device(stores.device(_WORKER)):
    state = tf.function(loop.begin, autograph=False)()
    context.enable_run_metadata()
    try:
      step(state)
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
      # The batches come from device 0 in this test.
      if node.op == "_Send" and "Iterator" not in str(node.input):
        ends = (node.attr[f"{end}_device"].s[-1:] for end in ("send", "recv"))
        names[tuple(map(int, ends))].add(node.attr["tensor_name"].s)
  return {ends: len(found) for ends, found in names.items()}


class RowMessagesTest(stores.TestCase):
  def test_gradients_of_all_tables_are_one_message_for_each_task(self):
    one = _messages(1)
    self.new_cluster()
    three = _messages(3)
    # A further table adds ids to, and rows from, each task; and nothing else.
    for task in (0, 1):
      for ends in ((_WORKER, task), (task, _WORKER)):
        self.assertEqual(three[ends] - one[ends], 2, (one, three))
    # The ids and the gradients; with these, the loss and other scalars.
    self.assertEqual(one[_WORKER, 0], 2)
    self.assertEqual(one[_WORKER, 1], 2)
    # The rows; whether an update is admitted is no matter of the replica.
    self.assertEqual(one[1, _WORKER], 1)


if __name__ == "__main__":
  absltest.main()
