"""Tests for rules.asynchronous.own_update: gradients sent and applied."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules.asynchronous import own_update
from tf_replicas.rules.asynchronous import staleness as staleness_lib
from tf_replicas.runtime import packing
from tf_replicas.runtime import waiting
from tf_replicas.store import applier
from tf_replicas.store import inner_optimizer

SGD = keras.optimizers.SGD
TWO = {"a": np.float32([1.0, 2.0]), "b": np.float32([3.0])}


def _attach(store, inner, num_replicas, policy, **options):
  options = {
    "use_locking": False,
    "snapshot_reads": False,
    "gradients_per_update": 1,
    **options,
  }
  update = applier.Applier(store, inner, variable_averages=None, clip_norm=None)
  return own_update.OwnUpdate(
    store, update, num_replicas=num_replicas, policy=policy, **options
  )


class Client:
  """A store, and what its replicas do with it.

  What `Applications` would count is counted here: `pending`, and one update
  after the other in the global step.
  """

  def __init__(
    self,
    inner=None,
    *,
    values=TWO,
    num_replicas=2,
    num_tasks=2,
    policies=(),
    wire_dtype=None,
    is_chief=True,
    **options,
  ):
    self.paths = list(values)
    specs = [
      stores.spec(
        path,
        value.shape,
        dtype=value.dtype.name,
        trainable=not path.startswith("moving"),
      )
      for path, value in values.items()
    ]
    self.store = stores.attach(
      specs, num_tasks, stores.cut(num_tasks), wire_dtype
    )
    optimizer = inner_optimizer.InnerOptimizer(inner or SGD(1.0))
    self.update = _attach(
      self.store,
      optimizer,
      num_replicas,
      staleness_lib.combine(policies),
      **options,
    )
    with tf.device(stores.device(0)):
      self.pending = stores.namespace().variable("pending", [], tf.int64)
    if is_chief:
      for index, value in enumerate(values.values()):
        self.store.assign(index, value)
      self.update.initialize()
      self.pending.assign(0)
    optimizer.build(self.store, is_chief=is_chief)
    if is_chief:
      self.store.start()
    self._apply = tf.function(self._apply_one, autograph=False)
    self._pull = tf.function(self.update.pull, autograph=False)

  def _apply_one(self, replica, version, staleness, gradients):
    def finish(is_update):
      one = tf.cast(is_update, tf.int64)
      self.pending.assign((1 - one) * (self.pending.read_value() + 1))
      self.store.global_step.assign_add(one)
      return tf.stack([one, self.store.global_step.read_value()])

    parts, _ = self.update.send(self.update.pack(gradients))
    return self.update(replica, parts, version, staleness, self.pending, finish)

  def apply(self, gradients, replica=0, version=0, staleness=0):
    """Whether that made an update."""
    (is_update, _), _, _ = self.apply_timed(
      gradients, replica, version, staleness
    )
    return bool(is_update)

  def apply_timed(self, gradients, replica=0, version=0, staleness=0):
    finished, arrived_at, applied_at = self._apply(
      _int(replica), _int(version), _int(staleness), gradients
    )
    return finished.numpy(), float(arrived_at), float(applied_at)

  def pull(self, replica=0):
    """The global step, and a list for every variable."""
    token, values = self._pull(_int(replica))
    return int(token.global_step), [value.numpy().tolist() for value in values]

  def values(self):
    return [value.tolist() for value in stores.numpy(self.store.read())]


def _int(value):
  return tf.constant(value, tf.int64)


def _grads(a, b):
  return [tf.constant(a, tf.float32, [2]), tf.constant(b, tf.float32, [1])]


def _slices(rows, values):
  return tf.IndexedSlices(
    tf.constant(values, tf.float32)[:, None],
    tf.constant(rows),
    tf.constant([4, 1]),
  )


class Halting:
  """Plain descent that halts within each update, after the first variable.

  Attributes:
    begun: A queue of as many elements as updates have begun.
  """

  def __init__(self):
    with tf.device(stores.device(0)):
      self.begun = stores.namespace().queue("begun", [tf.bool])
      self._go = stores.namespace().queue("go", [tf.bool])

  def apply(self, gradients, variables):
    values = [variable.read_value() for variable in variables]
    news = [v - g for v, g in zip(values, gradients, strict=True)]
    variables[0].assign(news[0])
    with tf.control_dependencies(news):
      begun = self.begun.enqueue([tf.constant(True)])
    with tf.control_dependencies([begun]):
      go = self._go.dequeue()
    with tf.control_dependencies(go):
      for variable, new in zip(variables, news, strict=True):
        variable.assign(new)

  def num_begun(self):
    return int(self.begun.size())

  def await_begun(self, count):
    waiting.await_value(
      lambda: self.num_begun() >= count,
      timeout_secs=background.DEADLINE_SECS,
      what=f"{count} updates to begin",
      poll_secs=0.01,
    )

  def go_on(self, count):
    for _ in range(count):
      self._go.enqueue([tf.constant(True)])

  def close(self):
    self._go.close()


class TestCase(background.TestCase):
  def _halting(self):
    inner = Halting()
    self.addCleanup(inner.close)
    return inner

  def _saved_during_an_update(self, inner, client):
    """What is saved when an update is half made: a save waits for it."""
    update = self.call(client.apply, _grads(1.0, 1.0))
    inner.await_begun(1)
    save = self.call(client.store.state)
    self.assert_waits(save)
    inner.go_on(1)
    self.assertTrue(update.result())
    state = save.result()
    self.assertEqual(int(state["global_step"]), 1)
    return state


class SendTest(TestCase):
  def _send(self, client, gradients):
    """By task what arrived; of slices (indices, values)."""

    def plain(part):
      if isinstance(part, tf.IndexedSlices):
        return part.indices, part.values
      return part

    @tf.function(autograph=False)
    def send():
      arrived, _ = client.update.send(client.update.pack(gradients))
      return [[plain(part) for part in parts] for parts in arrived]

    return send()

  def test_every_task_gets_its_own_shards(self):
    client = Client(
      values={"a": np.zeros([4], "float32"), "b": np.zeros([2, 2], "float32")}
    )
    arrived = self._send(
      client,
      [tf.constant([1.0, 2.0, 3.0, 4.0]), tf.constant([[5.0, 6], [7, 8]])],
    )
    got = [[part.numpy().tolist() for part in parts] for parts in arrived]
    self.assertEqual(
      got, [[[1.0, 2.0], [[5.0, 6.0]]], [[3.0, 4.0], [[7.0, 8.0]]]]
    )

  def test_what_is_not_there_is_not_sent(self):
    client = Client(num_tasks=1)
    ((a, b),) = self._send(client, [None, tf.constant([2.0])])
    self.assertIsNone(a)
    self.assertEqual(b.numpy().tolist(), [2.0])

  # `tf.is_tensor` is true of `tf.IndexedSlices` too (TensorFlow 2.21), so that
  # `pack` takes them for dense, and whole variables of zeros travel.
  def test_rows_go_to_the_task_that_has_them(self):
    client = Client(values={"table": np.zeros([4, 1], "float32")})
    arrived = self._send(client, [_slices([3, 0, 2, 3], [1.0, 2.0, 4.0, 8.0])])
    got = [
      (indices.numpy().tolist(), values.numpy().tolist())
      for ((indices, values),) in arrived
    ]
    self.assertEqual(got, [([0], [[2.0]]), ([1, 0, 1], [[1.0], [4.0], [8.0]])])

  def test_large_and_small_ones_of_several_dtypes_keep_their_places(self):
    size = packing.SMALL_BYTES
    values = {
      "small": np.zeros([2, 2], "float32"),
      "large": np.zeros([size], "float32"),
      "double": np.zeros([3], "float64"),
      "scalar": np.zeros([], "float32"),
      "double_too": np.zeros([1], "float64"),
    }
    client = Client(values=values, num_tasks=1)
    gradients = [
      tf.constant(np.arange(v.size).reshape(v.shape) + k, v.dtype)
      for k, v in enumerate(values.values())
    ]
    (parts,) = self._send(client, gradients)
    for part, gradient in zip(parts, gradients, strict=True):
      self.assertEqual(part.dtype, gradient.dtype)
      np.testing.assert_array_equal(part, gradient)

  def test_they_arrive_as_the_dtype_of_their_variable(self):
    client = Client(num_tasks=1)
    ((a, b),) = self._send(
      client, [tf.cast(g, "float16") for g in _grads(3, 4)]
    )
    self.assertEqual([a.dtype, b.dtype], [tf.float32] * 2)
    self.assertEqual(a.numpy().tolist(), [3.0, 3.0])

  @parameterized.named_parameters(
    ("dense", lambda: tf.fill([4, 1], 257.0)),
    ("sparse", lambda: _slices(range(4), [257.0] * 4)),
  )
  def test_wire_dtype_rounds_on_the_way_only(self, gradient):
    """257 is 256 in bfloat16."""
    client = Client(
      values={"table": np.zeros([4, 1], "float32")},
      num_tasks=1,
      wire_dtype="bfloat16",
    )
    ((part,),) = self._send(client, [gradient()])
    if isinstance(part, tuple):
      _, part = part
    self.assertEqual(part.dtype, tf.float32)
    self.assertEqual(part.numpy().tolist(), [[256.0]] * 4)

  def test_statistics_come_after_what_is_trained(self):
    values = {"moving": np.float32([1.0]), "a": np.float32([2.0])}
    client = Client(values=values, num_tasks=1)
    ((a, moving),) = self._send(client, [tf.ones([1]), tf.zeros([1])])
    self.assertEqual([a.numpy(), moving.numpy()], [[1.0], [0.0]])

  @parameterized.parameters(0, 1)
  def test_they_arrive_on_the_task_of_their_variable(self, task):
    client = Client()

    @tf.function(autograph=False)
    def send(gradients):
      parts, _ = client.update.send(client.update.pack(gradients))
      self.assertNotEmpty(parts[task])
      for part in parts[task]:
        self.assertEndsWith(part.device.upper(), stores.device(task).upper())
      return parts

    send(_grads(1.0, 1.0))


class ApplyTest(TestCase):
  @parameterized.product(
    use_locking=[True, False], snapshot_reads=[True, False]
  )
  def test_one_set_of_gradients_is_one_update(
    self, use_locking, snapshot_reads
  ):
    client = Client(
      SGD(0.5), use_locking=use_locking, snapshot_reads=snapshot_reads
    )
    self.assertTrue(client.apply(_grads([2.0, 4.0], 6.0)))
    self.assertEqual(client.values(), [[0.0, 0.0], [0.0]])
    self.assertTrue(client.apply(_grads([0.0, 2.0], -2.0), replica=1))
    self.assertEqual(client.values(), [[0.0, -1.0], [1.0]])
    self.assertEqual(int(client.store.global_step), 2)

  def test_what_has_no_gradient_is_left_alone(self):
    client = Client(SGD(1.0, momentum=0.5))
    client.apply(_grads(1.0, 1.0))
    client.apply([None, tf.constant([0.0])])
    # Only `b` moves on by its momentum.
    self.assertEqual(client.values(), [[0.0, 1.0], [1.5]])

  def test_the_rate_is_that_of_the_version(self):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
      [1], [1.0, 0.25]
    )
    client = Client(SGD(schedule))
    for version, expected in ((1, 2.0), (2, 1.75), (0, 0.75)):
      client.apply(_grads(0.0, 1.0), version=version)
      self.assertEqual(client.values()[1], [expected])

  def test_rows_that_occur_twice_add_up(self):
    client = Client(
      values={"table": np.zeros([4, 1], "float32")}, use_locking=True
    )
    client.apply([_slices([3, 0, 3], [1.0, 2.0, 4.0])])
    self.assertEqual(client.values(), [[[-2.0], [0.0], [0.0], [-5.0]]])

  def test_a_task_may_have_none_of_the_rows(self):
    client = Client(values={"table": np.zeros([4, 1], "float32")})
    client.apply([_slices([1], [1.0])])
    self.assertEqual(client.values(), [[[0.0], [-1.0], [0.0], [0.0]]])

  def test_statistics_are_moved_whatever_the_policy(self):
    """A move is old - new; neither the rate nor a factor is for it."""
    client = Client(
      SGD(0.5),
      values={**TWO, "moving": np.float32([8.0])},
      policies=[
        staleness_lib.staleness_aware(),
        staleness_lib.delay_compensated(0.25),
      ],
    )
    client.pull(0)
    client.apply([*_grads(0.0, 4.0), tf.constant([1.0])], staleness=4)
    self.assertEqual(client.values(), [[1.0, 2.0], [2.5], [7.0]])

  def test_two_clients_update_the_same_variables(self):
    ours, theirs = Client(SGD(0.5)), Client(SGD(0.5), is_chief=False)
    ours.apply(_grads(1.0, 0.0))
    theirs.apply(_grads(0.0, 2.0), replica=1)
    self.assertEqual(ours.values(), [[0.5, 1.5], [2.0]])
    self.assertEqual(theirs.values(), ours.values())

  def test_times_are_in_order(self):
    inner = self._halting()
    client = Client(inner, num_tasks=1)
    call = self.call(client.apply_timed, _grads(1.0, 1.0))
    inner.await_begun(1)
    self.assert_waits(call)
    inner.go_on(1)
    _, arrived_at, applied_at = call.result()
    self.assertGreater(arrived_at, 0.0)
    # It was halted in between.
    self.assertGreater(applied_at - arrived_at, background.WATCH_SECS / 2)

  @parameterized.product(
    snapshot_reads=[True, False], gradients_per_update=[1, 2]
  )
  def test_note_is_taken_when_the_update_is_made(
    self, snapshot_reads, gradients_per_update
  ):
    inner = self._halting()
    client = Client(
      inner,
      num_tasks=1,
      snapshot_reads=snapshot_reads,
      gradients_per_update=gradients_per_update,
    )
    for _ in range(gradients_per_update - 1):
      client.apply(_grads(1.0, 1.0))
    call = self.call(client.apply, _grads(1.0, 1.0))
    inner.await_begun(1)
    self.assert_waits(call)
    self.assertEqual(int(client.store.global_step), 0)
    inner.go_on(1)
    self.assertTrue(call.result())
    self.assertEqual(int(client.store.global_step), 1)


class PolicyTest(TestCase):
  @parameterized.parameters((0, 1.0), (1, 1.0), (4, 0.25))
  def test_the_factor_is_that_of_the_staleness(self, staleness, factor):
    client = Client(SGD(1.0), policies=[staleness_lib.staleness_aware()])
    client.apply(_grads(0.0, 2.0), staleness=staleness)
    self.assertEqual(client.values()[1], [3.0 - 2.0 * factor])

  def test_the_factor_is_of_one_update_only(self):
    client = Client(SGD(1.0), policies=[staleness_lib.staleness_aware()])
    client.apply(_grads(0.0, 2.0), staleness=4)
    client.apply(_grads(0.0, 2.0), staleness=0)
    self.assertEqual(client.values()[1], [0.5])

  def test_gradients_are_compensated_by_what_their_replica_read(self):
    client = Client(SGD(0.5), policies=[staleness_lib.delay_compensated(0.25)])
    client.pull(0)
    client.pull(1)
    client.apply(_grads(1.0, 2.0), replica=0)
    self.assertEqual(client.values(), [[0.5, 1.5], [2.0]])
    client.pull(0)
    # g + g g (now - read) / 4: a moved by -0.5 and b by -1 since 1 read.
    client.apply(_grads(2.0, 2.0), replica=1)
    self.assertEqual(client.values(), [[-0.25, 0.75], [1.5]])
    # And since 0 read by -0.75 and -0.5: 2 - 0.75 and 4 - 2.
    client.apply(_grads(2.0, 4.0), replica=0)
    self.assertEqual(client.values(), [[-0.875, 0.125], [0.5]])


class PullTest(TestCase):
  @parameterized.product(
    snapshot_reads=[True, False],
    policies=[(), (staleness_lib.delay_compensated(0.5),)],
  )
  def test_step_and_whole_variables(self, snapshot_reads, policies):
    client = Client(snapshot_reads=snapshot_reads, policies=policies)
    self.assertEqual(client.pull(1), (0, [[1.0, 2.0], [3.0]]))
    client.apply(_grads(1.0, 2.0), replica=1)
    self.assertEqual(client.pull(1), (1, [[0.0, 1.0], [1.0]]))

  def test_wire_dtype_rounds_what_is_read(self):
    values = {"a": np.float32([257.0])}
    client = Client(values=values, num_tasks=1, wire_dtype="bfloat16")
    self.assertEqual(client.pull(), (0, [[256.0]]))
    self.assertEqual(client.values(), [[257.0]])

  def test_a_snapshot_waits_for_an_update_under_way(self):
    inner = self._halting()
    client = Client(inner, num_tasks=1, snapshot_reads=True)
    update = self.call(client.apply, _grads(1.0, 1.0))
    inner.await_begun(1)
    read = self.call(client.pull, 1)
    self.assert_waits(read)
    inner.go_on(1)
    self.assertTrue(update.result())
    self.assertEqual(read.result(), (1, [[0.0, 1.0], [2.0]]))

  def test_with_snapshots_a_save_waits_for_an_update_under_way(self):
    inner = self._halting()
    client = Client(inner, num_tasks=1, snapshot_reads=True)
    state = self._saved_during_an_update(inner, client)
    self.assertEqual(state["variables/a"].numpy().tolist(), [0.0, 1.0])
    self.assertEqual(state["variables/b"].numpy().tolist(), [2.0])

  def test_other_reads_see_half_an_update(self):
    """Without snapshots nobody waits; one variable is new, the other old."""
    inner = self._halting()
    client = Client(inner, num_tasks=1, use_locking=True)
    update = self.call(client.apply, _grads(1.0, 1.0))
    inner.await_begun(1)
    read = self.call(client.pull, 1)
    self.assertEqual(read.result(), (0, [[0.0, 1.0], [3.0]]))
    inner.go_on(1)
    self.assertTrue(update.result())


class LockingTest(TestCase):
  @parameterized.parameters({"use_locking": True}, {"snapshot_reads": True})
  def test_updates_exclude_each_other(self, **options):
    inner = self._halting()
    client = Client(inner, num_tasks=1, **options)
    calls = [self.call(client.apply, _grads(1.0, 1.0), r) for r in (0, 1)]
    inner.await_begun(1)
    for call in calls:
      self.assert_waits(call)
    self.assertEqual(inner.num_begun(), 1)
    inner.go_on(2)
    for call in calls:
      call.result()
    self.assertEqual(inner.num_begun(), 2)
    self.assertEqual(client.values(), [[-1.0, 0.0], [1.0]])

  def test_without_locks_they_do_not(self):
    """Both read before either writes: one update is lost."""
    inner = self._halting()
    client = Client(inner, num_tasks=1)
    calls = [self.call(client.apply, _grads(1.0, 1.0), r) for r in (0, 1)]
    inner.await_begun(2)
    inner.go_on(2)
    for call in calls:
      call.result()
    self.assertEqual(client.values()[1], [2.0])
    self.assertEqual(int(client.store.global_step), 2)


class SumTest(TestCase):
  def test_every_third_set_applies_the_mean(self):
    client = Client(SGD(0.5), gradients_per_update=3)
    flags = []
    for a, b in ((3.0, 0.0), (0.0, 6.0)):
      flags.append(client.apply(_grads(a, b)))
      self.assertEqual(client.values(), [[1.0, 2.0], [3.0]])
    flags.append(client.apply(_grads(3.0, 3.0), replica=1))
    self.assertEqual(flags, [False, False, True])
    # (3 + 0 + 3) / 3 = 2 and (0 + 6 + 3) / 3 = 3, times 0.5.
    self.assertEqual(client.values(), [[0.0, 1.0], [1.5]])

  def test_the_next_sum_begins_at_zero(self):
    client = Client(SGD(1.0), gradients_per_update=2)
    gradients = (4.0, 2.0, 0.0, 6.0)
    flags = [client.apply(_grads(0.0, b)) for b in gradients]
    self.assertEqual(flags, [False, True, False, True])
    # 3 - (4 + 2) / 2 - (0 + 6) / 2.
    self.assertEqual(client.values(), [[1.0, 2.0], [-3.0]])

  def test_the_factor_is_of_each_set_and_not_of_statistics(self):
    client = Client(
      SGD(1.0),
      values={"b": np.float32([3.0]), "moving": np.float32([8.0])},
      gradients_per_update=2,
      policies=[staleness_lib.staleness_aware()],
    )
    client.apply([tf.constant([4.0]), tf.constant([2.0])], staleness=4)
    client.apply([tf.constant([1.0]), tf.constant([4.0])], staleness=0)
    # 3 - (4 / 4 + 1) / 2 and 8 - (2 + 4) / 2.
    self.assertEqual(client.values(), [[2.0], [5.0]])

  def test_each_set_is_compensated_when_it_is_added(self):
    client = Client(
      SGD(1.0),
      gradients_per_update=2,
      policies=[staleness_lib.delay_compensated(0.25)],
    )
    client.pull(0)
    client.pull(1)
    for _ in range(2):
      client.apply(_grads(0.0, 1.0), replica=0)
    self.assertEqual(client.values()[1], [2.0])
    client.pull(0)
    client.apply(_grads(0.0, 2.0), replica=1)  # 2 + 4 (2 - 3) / 4 = 1.
    client.apply(_grads(0.0, 3.0), replica=0)  # As it is.
    self.assertEqual(client.values()[1], [0.0])

  def test_what_has_no_gradient_in_any_set_is_left_alone(self):
    client = Client(SGD(1.0), gradients_per_update=2)
    for _ in range(2):
      client.apply([None, tf.constant([1.0])])
    self.assertEqual(client.values(), [[1.0, 2.0], [2.0]])

  def test_a_set_without_a_gradient_adds_nothing(self):
    client = Client(SGD(1.0), gradients_per_update=2)
    client.apply([None, tf.constant([1.0])])
    client.apply(_grads(1.0, 1.0))
    self.assertEqual(client.values(), [[0.5, 1.5], [2.0]])

  # Which variables are updated is asked of the last set alone.
  def test_the_last_set_may_be_without_a_gradient(self):
    client = Client(SGD(1.0), gradients_per_update=2)
    client.apply(_grads(1.0, 1.0))
    client.apply([None, tf.constant([1.0])])
    self.assertEqual(client.values(), [[0.5, 1.5], [2.0]])

  def test_initialize_forgets_what_was_summed(self):
    client = Client(SGD(1.0), gradients_per_update=2)
    client.apply(_grads(8.0, 8.0))
    client.update.initialize()
    client.apply(_grads(0.0, 2.0))
    self.assertEqual(client.values(), [[1.0, 2.0], [2.0]])

  @parameterized.parameters((2, 1.0), (4, 2.25))
  def test_a_sum_is_restored_for_the_same_number_only(
    self, per_update, expected
  ):
    client = Client(SGD(1.0), gradients_per_update=2)
    client.apply(_grads(0.0, 1.0))
    saved = {k: v.numpy() for k, v in client.store.state().items()}
    self.new_cluster()
    resumed = Client(SGD(1.0), gradients_per_update=per_update)
    resumed.store.load_state(saved)
    resumed.pending.assign(per_update - 1)  # One more is enough.
    self.assertTrue(resumed.apply(_grads(0.0, 3.0)))
    # 3 - (1 + 3) / 2, and 3 - 3 / 4.
    self.assertEqual(resumed.values()[1], [expected])

  def test_what_is_saved_is_no_half_update(self):
    """The sum and its number are of one moment; so a save waits."""
    inner = self._halting()
    client = Client(inner, num_tasks=1, gradients_per_update=2)
    client.apply(_grads(1.0, 1.0))
    state = self._saved_during_an_update(inner, client)
    self.assertEqual(state["variables/b"].numpy().tolist(), [2.0])

  @parameterized.parameters((1, True), (1, False), (3, False))
  def test_nothing_is_lost_where_all_apply_at_once(
    self, per_update, use_locking
  ):
    client = Client(
      SGD(1.0),
      num_replicas=3,
      use_locking=use_locking,
      gradients_per_update=per_update,
    )

    def train(replica):
      return [client.apply(_grads(1.0, 3.0), replica) for _ in range(20)]

    flags = sum(background.run_all(train, 3), [])
    count = 60 // per_update
    self.assertEqual(flags.count(True), count)
    self.assertEqual(client.values()[0], [1.0 - count, 2.0 - count])
    self.assertEqual(client.values()[1], [3.0 - 3.0 * count])


if __name__ == "__main__":
  absltest.main()
