"""Tests for rules.sync.contributions: replicas as threads, no update rule.

A call that waits runs in a thread, with a deadline. What the chief has noted is
read from the ledger, so that every test knows who came first.
"""

import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules import protocol
from tf_replicas.rules import step_token
from tf_replicas.rules.sync import chief_recovery
from tf_replicas.rules.sync import contributions
from tf_replicas.rules.sync import gradient_queues
from tf_replicas.rules.sync import ledger
from tf_replicas.rules.sync import quorum
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

COMPUTING, WAITING, ADMITTED, DELIVERED, LOST, _ = map(int, protocol.Status)
KIND = protocol.MessageType
ENDED = step_token.ENDED
NAN, INF = float("nan"), float("inf")
DEADLINE_SECS = background.DEADLINE_SECS
APPLIED, UNUSED, LATE_BY_1 = ledger.Column


def _store(num_tasks=1, wire_dtype=None):
  """Two variables, `w` and `v`."""
  specs = [stores.spec("w", [2]), stores.spec("v", [3])]
  return stores.attach(specs, num_tasks, wire_dtype=wire_dtype)


def _attach(store, num_replicas, num_places):
  """The contributions of a training; every call is another client."""
  return contributions.Contributions(
    store,
    num_replicas=num_replicas,
    quorum=quorum.Quorum(num_places, num_places),
    is_sparse=[False, False],
  )


def _travels_after(wait):
  """Gradients offered inside travel once `wait(replica)` is there."""
  put = gradient_queues.GradientQueues.put

  def wait_and_put(queues, replica, tag, packed):
    with tf.control_dependencies([wait(replica)]):
      return put(queues, replica, tag, packed)

  return mock.patch.object(gradient_queues.GradientQueues, "put", wait_and_put)


class Call(background.Call):
  """A blocking call of a replica or the chief, in a thread of its own."""

  def ends(self):
    """Whether it ends, in whatever way."""
    self._thread.join(DEADLINE_SECS)
    return not self._thread.is_alive()

  def release(self):
    """What an offer was told: (admitted, global step)."""
    release = self.result()
    return int(release.admitted), int(release.global_step)

  def step(self):
    """The global step that an offer was released to."""
    return int(self.result().global_step)


class Chief:
  """The chief's half of a training, without variables to update."""

  def __init__(self, training, num_replicas, num_places):
    self.side = _attach(training.store, num_replicas, num_places)
    self._store = training.store
    self._start = training.start
    self._collecting = tf.function(self.side.collect, autograph=False)
    self._finishing = tf.function(self._finish, autograph=False)
    self._ending = tf.function(self.side.end_replicas, autograph=False)

  def start_collect(self):
    return self._start(self._collecting)

  def collect(self):
    return self.start_collect().result()

  def start_end(self):
    return self._start(self._ending)

  def _finish(self, collected):
    sums = {}
    for task in range(self._store.num_tasks):
      for (position, _), total in zip(
        self._store.contributed_shards(task),
        self.side.take_sums(task, self.side.read_accepted()),
        strict=True,
      ):
        sums[self._store.specs[position].path] = total
    with tf.control_dependencies(list(sums.values())):
      step = self._store.advance(collected.step, collected.examples)
    with tf.control_dependencies([step]):
      self.side.release_all(step)
      return sums

  def finish(self, collected):
    """Ends the step, without an update; returns the sum of `w`."""
    assert int(collected.kind) == KIND.DELIVERED, collected
    sums = self._start(lambda: self._finishing(collected)).result()
    first, second = np.broadcast_to(sums["w"], [2])
    assert first == second
    return float(first)

  def step(self):
    return self.finish(self.collect())


class Training:
  """One training in its own resource container; tests use it by turns.

  To trace its functions takes longer than a test. At the end of a test it is
  emptied; if that fails it is closed, and the next test makes another.

  Attributes:
    store: The variables.
    chief: The first chief.
    successor: Another client that has not begun.
    replicas: The contributions as replicas see them.
    gates: A queue per replica: what slow gradients wait for.
    calls: All that were started.
  """

  def __init__(self, num_replicas, num_places, **store):
    """Every one attaches for itself."""
    self.store = _store(**store)
    self.chief = Chief(self, num_replicas, num_places)
    self.successor = Chief(self, num_replicas, num_places)
    self.replicas = _attach(self.store, num_replicas, num_places)
    with tf.device(stores.device(0)):
      self.gates = [
        stores.namespace().queue(f"gate/{r}", [tf.bool])
        for r in range(num_replicas)
      ]
    self._offering = tf.function(self._traced, autograph=False)
    self.calls = []

  def start(self, call):
    self.calls.append(Call(call))
    return self.calls[-1]

  def _traced(
    self,
    replica,
    gradients,
    step,
    loss,
    examples,
    is_slow,
    preadmitted_tag=None,
  ):
    def pass_gate(replica):
      return tf.cond(
        is_slow,
        lambda: resources.switch(
          replica, self.gates, lambda gate: gate.dequeue()[0]
        ),
        lambda: True,
      )

    with _travels_after(pass_gate):
      return self.replicas.offer(
        replica,
        gradients,
        local_step=step,
        loss=loss,
        num_examples=examples,
        preadmitted_tag=preadmitted_tag,
      )

  def offer(
    self,
    replica,
    gradients,
    step=0,
    loss=0.0,
    examples=0,
    preadmitted_tag=None,
    is_slow=False,
  ):
    arguments = [
      tf.constant(replica, tf.int64),
      gradients,
      tf.constant(step, tf.int64),
      tf.constant(loss),
      tf.constant(examples, tf.int64),
      tf.constant(is_slow),
    ]
    if preadmitted_tag is not None:
      arguments.append(tf.identity(preadmitted_tag))
    return self.start(lambda: self._offering(*arguments))

  def begin(self, step):
    self.store.load_state({"examples_seen": 0, "global_step": step})
    self.chief.side.initialize()

  def empty(self):
    """Ends all calls; whether they ended."""
    calls, self.calls = self.calls, []
    ending = self.chief.start_end()
    for _ in calls:
      for gate in self.gates:
        gate.enqueue([tf.constant(True)])
    # That one is answered says that to wake it is not too early.
    calls.append(self.offer(0, [tf.zeros([2]), None]))
    ended = all(call.ends() for call in calls)
    self.chief.side.wake()
    ended &= ending.ends()
    for gate in self.gates:
      while int(gate.size()):
        gate.dequeue()
    self.calls = []
    return ended

  def close(self):
    self.replicas.close()
    for gate in self.gates:
      gate.close()


_trainings = {}
_options = {"disable_meta_optimizer": False}


def setUpModule():
  """To optimize the functions takes longer than to run them."""
  _options.update(tf.config.optimizer.get_experimental_options())
  off = {"disable_meta_optimizer": True}
  tf.config.optimizer.set_experimental_options({**_options, **off})


def tearDownModule():
  tf.config.optimizer.set_experimental_options(_options)
  for training in _trainings.values():
    training.close()
  _trainings.clear()


class Case(stores.TestCase):
  def begin(self, num_replicas, num_places, *, step=0, **store):
    """An empty training at `step`."""
    key = num_replicas, num_places, *store.items()
    training = _trainings.pop(key, None)
    if training is None:
      training = Training(num_replicas, num_places, **store)
    training.begin(step)
    self.training = training
    self.store = training.store
    self.chief = training.chief
    self.replicas = training.replicas
    self.addCleanup(self._put_back, key)

  def _put_back(self, key):
    try:
      is_empty = self.training.empty()
    except tf.errors.OpError:  # The test has closed it.
      is_empty = False
    if is_empty:
      _trainings[key] = self.training
    else:
      self.training.close()

  def offer(
    self,
    replica,
    value,
    *,
    step=0,
    v=None,
    loss=0.0,
    examples=1,
    preadmitted_tag=None,
    is_slow=False,
  ):
    """Starts an offer: the gradient of `w` is `value` everywhere.

    Args:
      replica: Whose.
      value: A number.
      step: Of the variables that it was computed from.
      v: The same for `v`, which has no gradient if not given.
      loss, examples, preadmitted_tag: As `Contributions.offer` takes them.
      is_slow: Whether its gradients, once admitted, wait for `let_travel`.
    """
    gradients = [tf.fill([2], float(value)), None]
    if v is not None:
      gradients[1] = tf.fill([3], float(v))
    return self.training.offer(
      replica, gradients, step, loss, examples, preadmitted_tag, is_slow
    )

  def let_travel(self, replica):
    self.training.gates[replica].enqueue([tf.constant(True)])

  def tag(self, replica):
    return int(self.chief.side.snapshot().tag[replica])

  def statuses(self):
    return self.chief.side.snapshot().status.tolist()

  def counts(self, column):
    return self.chief.side.snapshot().counts[:, column].tolist()

  def await_status(self, *expected):
    """Until the ledger says so of the replicas."""
    deadline = time.monotonic() + DEADLINE_SECS
    while (found := self.statuses()) != list(expected):
      if time.monotonic() > deadline:
        self.fail(f"waited for {expected}; the ledger says {found}")
      time.sleep(0.01)

  def await_tag_after(self, replica, tag):
    """Until the ledger has noted a newer offer of the replica."""
    deadline = time.monotonic() + DEADLINE_SECS
    while self.tag(replica) == tag:
      if time.monotonic() > deadline:
        self.fail("the offer was not noted")
      time.sleep(0.01)

  def serve_all(self):
    """The chief answers what is in the inbox now, and no more."""
    self.chief.side.wake()
    self.assertEqual(int(self.chief.collect().kind), KIND.WAKE)

  def start_in_order(self, *offers):
    """Two replicas hold one place: the first is on its way, others wait.

    Returns the call of `collect`, and those of the offers.
    """
    collecting, calls = self.chief.start_collect(), []
    expected = [COMPUTING] * self.chief.side.num_replicas
    for number, (replica, value) in enumerate(offers):
      calls.append(self.offer(replica, value, is_slow=number == 0))
      expected[replica] = WAITING if number else ADMITTED
      self.await_status(*expected)
    return collecting, *calls


class AdmissionTest(Case):
  def test_the_sum_is_of_all_when_every_replica_is_needed(self):
    self.begin(2, 2, num_tasks=2)
    first = self.offer(0, 1, loss=0.5, examples=3)
    collecting = self.chief.start_collect()
    self.await_status(DELIVERED, COMPUTING)
    self.assertTrue(collecting.waits())
    second = self.offer(1, 10, loss=1.5, examples=4)
    collected = collecting.result()
    self.assertEqual(int(collected.kind), KIND.DELIVERED)
    self.assertEqual(int(collected.step), 0)
    self.assertEqual(int(collected.examples), 7)
    self.assertEqual(float(collected.loss), 1.0)
    self.assertTrue(first.waits())
    self.assertEqual(self.chief.finish(collected), 11)
    self.assertEqual(first.release(), (1, 1))
    self.assertEqual(second.release(), (1, 1))
    self.assertEqual(self.counts(APPLIED), [1, 1])

  def test_examples_and_losses_are_of_one_step(self):
    self.begin(1, 1)
    for step, (loss, examples) in enumerate([(4.0, 5), (2.0, 3)]):
      call = self.offer(0, 1, step=step, loss=loss, examples=examples)
      collected = self.chief.collect()
      self.assertEqual(float(collected.loss), loss)
      self.assertEqual(int(collected.examples), examples)
      self.chief.finish(collected)
      self.assertEqual(call.release(), (1, step + 1))

  def test_with_a_ticket_nobody_has_to_ask(self):
    self.begin(2, 2)
    calls = [self.offer(r, 1) for r in (0, 1)]
    self.assertEqual(self.chief.step(), 2)
    # Already now both have a place in the next step.
    self.assertEqual(self.statuses(), [ADMITTED, ADMITTED])
    tickets = [call.result().preadmitted_tag for call in calls]
    for call in calls:
      admitted, delivered, _, released = call.result().times.numpy()
      self.assertBetween(admitted, 1, delivered)
      self.assertLessEqual(delivered, released)
    calls = [self.offer(r, 10, preadmitted_tag=tickets[r]) for r in (0, 1)]
    self.assertEqual(self.chief.step(), 20)
    for call in calls:
      self.assertEqual(call.release(), (1, 2))
      admitted, delivered, _, released = call.result().times.numpy()
      self.assertEqual(admitted, step_token.NEVER)
      self.assertBetween(delivered, 1, released)
    self.assertEqual(self.counts(APPLIED), [2, 2])

  def test_surplus_waits_for_the_end_of_the_step_and_none_of_it_travels(self):
    self.begin(3, 2)
    collecting = self.chief.start_collect()
    calls = [self.offer(r, 10**r, is_slow=True) for r in (0, 1)]
    self.await_status(ADMITTED, ADMITTED, COMPUTING)
    surplus = self.offer(2, 100)
    self.await_status(ADMITTED, ADMITTED, WAITING)
    self.let_travel(1)
    self.await_status(ADMITTED, DELIVERED, WAITING)
    self.assertTrue(surplus.waits())
    self.let_travel(0)
    self.assertEqual(self.chief.finish(collecting.result()), 11)
    self.assertEqual([c.release() for c in calls], [(1, 1), (1, 1)])
    self.assertEqual(surplus.release(), (0, 1))
    # A backup has no preadmitted_tag, and neither have those that it stands by.
    for call in [*calls, surplus]:
      self.assertEqual(int(call.result().preadmitted_tag), -1)
    admitted, delivered, _, released = surplus.result().times.numpy()
    self.assertEqual(
      (admitted, delivered), (step_token.NEVER, step_token.NEVER)
    )
    self.assertGreater(released, 0)
    self.assertEqual(self.counts(APPLIED), [1, 1, 0])
    self.assertEqual(self.counts(UNUSED), [0, 0, 1])
    self.assertEqual(self.statuses(), [COMPUTING] * 3)

  def test_what_is_refused_sends_no_gradients(self):
    """Its gate is never opened: it could not hear of its release."""
    self.begin(2, 1, step=3)
    collecting = self.chief.start_collect()
    late = self.offer(1, 100, step=1, is_slow=True)
    self.assertEqual(late.release(), (0, 3))
    used = self.offer(0, 1, step=3, is_slow=True)
    self.await_status(ADMITTED, COMPUTING)
    surplus = self.offer(1, 100, step=3, is_slow=True)
    self.await_status(ADMITTED, WAITING)
    self.let_travel(0)
    self.assertEqual(self.chief.finish(collecting.result()), 1)
    self.assertEqual(surplus.release(), (0, 4))
    self.assertEqual(used.release(), (1, 4))

  def test_an_offer_from_older_variables_is_refused_at_once(self):
    self.begin(2, 2, step=5)
    collecting = self.chief.start_collect()
    for step in (4, 3, chief_recovery.INCONSISTENT):
      call = self.offer(1, 100, step=step)
      # The step is still open, and has places.
      self.assertEqual(call.release(), (0, 5))
      self.assertEqual(int(call.result().preadmitted_tag), -1)
    self.assertTrue(collecting.waits())
    # From the variables of now it is as good as any.
    calls = [self.offer(1, 10, step=5), self.offer(0, 1, step=5)]
    self.assertEqual(self.chief.finish(collecting.result()), 11)
    self.assertEqual([c.release() for c in calls], [(1, 6), (1, 6)])
    for late, expected in (
      (1, 1),
      (2, 1),
      (3, 0),
      (5 - chief_recovery.INCONSISTENT, 1),
    ):
      self.assertEqual(self.counts(LATE_BY_1 + late - 1), [0, expected])
    self.assertEqual(self.counts(UNUSED), [0, 0])

  def test_one_replica_fills_several_places_where_there_are_more(self):
    self.begin(1, 3)
    collecting = self.chief.start_collect()
    told, preadmitted_tag = [], None
    for value in (1, 2):
      call = self.offer(0, value, preadmitted_tag=preadmitted_tag)
      told.append(call.release())
      preadmitted_tag = call.result().preadmitted_tag
      self.assertGreater(int(preadmitted_tag), 0)
    self.assertTrue(collecting.waits())
    call = self.offer(0, 4, preadmitted_tag=preadmitted_tag)
    self.assertEqual(self.chief.finish(collecting.result()), 7)
    self.assertEqual([*told, call.release()], [(1, 0), (1, 0), (1, 1)])
    self.assertEqual(self.counts(APPLIED), [3])

  def test_a_replica_has_one_place_in_a_step_also_after_a_restart(self):
    self.begin(3, 2)
    collecting = self.chief.start_collect()
    first = self.offer(0, 1)
    self.await_status(DELIVERED, COMPUTING, COMPUTING)
    second = self.offer(0, 100)
    self.await_status(WAITING, COMPUTING, COMPUTING)
    self.assertEqual(first.step(), 0)  # It is let go: it was replaced.
    self.assertTrue(collecting.waits())
    self.assertTrue(second.waits())
    other = self.offer(2, 10)
    # What the first process had delivered stays in.
    self.assertEqual(self.chief.finish(collecting.result()), 11)
    self.assertEqual(other.release(), (1, 1))
    self.assertEqual(second.release(), (0, 1))
    self.assertEqual(self.counts(APPLIED), [1, 0, 1])
    self.assertEqual(self.counts(UNUSED), [1, 0, 0])

  def test_who_kept_the_others_waiting_is_noted(self):
    self.begin(2, 2)
    collecting = self.chief.start_collect()
    self.offer(1, 1)
    self.await_status(COMPUTING, DELIVERED)
    time.sleep(0.3)
    self.offer(0, 1)
    self.chief.finish(collecting.result())
    held_up = self.chief.side.snapshot().held_up
    self.assertGreater(held_up[0], 0.29)
    self.assertEqual(held_up[1], 0)

  def test_the_number_of_the_replica_may_be_known_before_it_runs(self):
    self.begin(2, 1)

    @tf.function(autograph=False)
    def offer():
      return self.replicas.offer(
        1,
        [tf.ones([2]), None],
        local_step=tf.constant(0, tf.int64),
        loss=tf.constant(0.0),
        num_examples=tf.constant(1),
      )

    call = self.training.start(offer)
    self.assertEqual(self.chief.step(), 1)
    self.assertEqual(call.release(), (1, 1))
    self.assertEqual(self.counts(APPLIED), [0, 1])

  def test_which_variables_have_a_gradient_from_anyone(self):
    self.begin(2, 2)
    first, second = self.offer(0, 1), self.offer(1, 1, v=5)
    collected = self.chief.collect()
    self.assertEqual(collected.present.numpy().tolist(), [True, True])
    self.chief.finish(collected)
    # Of the next step it is found anew.
    tickets = [call.result().preadmitted_tag for call in (first, second)]
    for replica, preadmitted_tag in enumerate(tickets):
      self.offer(replica, 1, step=1, preadmitted_tag=preadmitted_tag)
    collected = self.chief.collect()
    self.assertEqual(collected.present.numpy().tolist(), [True, False])


class LossTest(Case):
  def test_the_place_of_who_is_lost_goes_to_who_waits(self):
    self.begin(2, 1)
    collecting, lost, other = self.start_in_order((0, 100), (1, 1))
    self.chief.side.declare_lost(0, self.tag(0))
    collected = collecting.result()
    self.assertEqual(self.statuses(), [LOST, DELIVERED])
    self.assertEqual(self.chief.finish(collected), 1)
    self.assertEqual(other.release(), (1, 1))
    self.assertEqual(self.counts(APPLIED), [0, 1])
    self.assertEqual(self.counts(UNUSED), [1, 0])
    # It lives, and its gradients arrive: they are nobody's.
    self.let_travel(0)
    self.assertEqual(lost.release()[0], 0)
    call = self.offer(0, 10, step=1)
    self.assertEqual(self.chief.step(), 10)
    self.assertEqual(call.release(), (1, 2))

  def test_what_is_void_neither_fills_a_place_nor_names_a_variable(self):
    self.begin(2, 1)
    collecting = self.chief.start_collect()
    lost = self.offer(0, 100, v=100, loss=8.0, examples=8, is_slow=True)
    self.await_status(ADMITTED, COMPUTING)
    other = self.offer(1, 1, loss=2.0, examples=2, is_slow=True)
    self.await_status(ADMITTED, WAITING)
    self.chief.side.declare_lost(0, self.tag(0))
    self.await_status(LOST, ADMITTED)
    self.let_travel(0)  # First of all.
    self.assertEqual(lost.release(), (0, 0))
    self.assertTrue(collecting.waits())
    self.let_travel(1)
    collected = collecting.result()
    self.assertEqual(collected.present.numpy().tolist(), [True, False])
    self.assertEqual(int(collected.examples), 2)
    self.assertEqual(float(collected.loss), 2)
    self.assertEqual(self.chief.finish(collected), 1)
    self.assertEqual(other.release(), (1, 1))

  def test_who_has_offered_anew_is_not_lost(self):
    """The chief saw an older offer than the ledger has."""
    self.begin(2, 1)
    collecting, first, other = self.start_in_order((0, 1), (1, 100))
    self.chief.side.declare_lost(0, self.tag(0) - 1)
    self.chief.side.wake()
    self.assertEqual(int(collecting.result().kind), KIND.WAKE)
    self.assertEqual(self.statuses(), [ADMITTED, WAITING])
    self.let_travel(0)
    self.assertEqual(self.chief.step(), 1)
    self.assertEqual(first.release(), (1, 1))
    self.assertEqual(other.release(), (0, 1))

  def test_who_waits_for_the_chief_is_not_lost(self):
    self.begin(3, 2)
    collecting = self.chief.start_collect()
    delivered = self.offer(1, 10)
    self.await_status(COMPUTING, DELIVERED, COMPUTING)
    admitted = self.offer(0, 1, is_slow=True)
    self.await_status(ADMITTED, DELIVERED, COMPUTING)
    waiting = self.offer(2, 100)
    self.await_status(ADMITTED, DELIVERED, WAITING)
    for replica in (1, 2):
      self.chief.side.declare_lost(replica, self.tag(replica))
    self.chief.side.wake()
    self.assertEqual(int(collecting.result().kind), KIND.WAKE)
    self.assertEqual(self.statuses(), [ADMITTED, DELIVERED, WAITING])
    self.let_travel(0)
    self.assertEqual(self.chief.step(), 11)
    self.assertEqual(admitted.release(), (1, 1))
    self.assertEqual(delivered.release(), (1, 1))
    self.assertEqual(waiting.release(), (0, 1))

  @parameterized.parameters(True, False)
  def test_the_successor_of_a_replica_has_its_place(self, is_declared):
    """It has a preadmitted_tag, which it will not use."""
    self.begin(2, 2)
    calls = [self.offer(r, 1) for r in (0, 1)]
    self.chief.step()
    preadmitted_tag = calls[0].result().preadmitted_tag
    collecting = self.chief.start_collect()
    if is_declared:
      self.chief.side.declare_lost(1, self.tag(1))
      self.await_status(ADMITTED, LOST)
    successor = self.offer(1, 10, step=1)
    stayed = self.offer(0, 1, step=1, preadmitted_tag=preadmitted_tag)
    self.assertEqual(self.chief.finish(collecting.result()), 11)
    self.assertEqual(successor.release(), (1, 2))
    self.assertEqual(stayed.release(), (1, 2))
    self.assertEqual(self.counts(APPLIED), [2, 2])

  def test_a_process_that_waits_is_let_go_when_its_successor_offers(self):
    self.begin(2, 1)
    collecting, lost, old = self.start_in_order((0, 100), (1, 50))
    tag = self.tag(1)
    new = self.offer(1, 1)
    self.await_tag_after(1, tag)
    self.assertEqual(old.release(), (0, 0))
    self.assertTrue(new.waits())
    # What comes now is for the new one.
    self.chief.side.declare_lost(0, self.tag(0))
    self.assertEqual(self.chief.finish(collecting.result()), 1)
    self.assertEqual(new.release(), (1, 1))
    self.let_travel(0)
    self.serve_all()
    self.assertEqual(lost.release()[0], 0)

  def test_the_older_process_delivers_after_its_successor(self):
    self.begin(1, 1)
    collecting = self.chief.start_collect()
    old = self.offer(0, 100, is_slow=True)
    self.await_status(ADMITTED)
    new = self.offer(0, 1)
    self.assertEqual(self.chief.finish(collecting.result()), 1)
    self.assertEqual(new.release(), (1, 1))
    self.let_travel(0)  # Its gradients come before those of the next step.
    self.assertTrue(old.waits())
    self.serve_all()
    self.assertEqual(old.release()[0], 0)
    call = self.offer(
      0, 10, step=1, preadmitted_tag=new.result().preadmitted_tag
    )
    self.assertEqual(self.chief.step(), 10)
    self.assertEqual(call.release(), (1, 2))
    self.assertEqual(self.counts(APPLIED), [2])


class NonfiniteTest(Case):
  def test_it_is_reported_and_refused_before_it_travels(self):
    self.begin(2, 1)
    for offered in (
      {"value": NAN},
      {"value": INF},
      {"value": 100, "loss": NAN},
      {"value": 100, "loss": -INF},
      {"value": 100, "v": NAN},
    ):
      with self.subTest(**offered):
        bad = self.offer(1, **offered, is_slow=True)  # The gate stays shut.
        collected = self.chief.collect()
        self.assertEqual(int(collected.kind), KIND.NONFINITE)
        self.assertEqual(int(collected.replica), 1)
        self.assertEqual(int(collected.step), 0)
        self.assertEqual(bad.release(), (0, ENDED))
    # Nothing of it is in the sum.
    good = self.offer(0, 1)
    self.assertEqual(self.chief.step(), 1)
    self.assertEqual(good.release(), (1, 1))
    self.assertEqual(self.counts(APPLIED), [1, 0])

  def test_it_is_found_as_well_when_nobody_asks(self):
    self.begin(2, 2)
    calls = [self.offer(r, 1) for r in (0, 1)]
    self.chief.step()
    tickets = [call.result().preadmitted_tag for call in calls]
    good = self.offer(0, 1, step=1, preadmitted_tag=tickets[0])
    collecting = self.chief.start_collect()
    self.await_status(DELIVERED, ADMITTED)
    bad = self.offer(1, NAN, step=1, preadmitted_tag=tickets[1])
    collected = collecting.result()
    self.assertEqual(int(collected.kind), KIND.NONFINITE)
    self.assertEqual(int(collected.replica), 1)
    self.assertEqual(bad.step(), ENDED)
    self.assertTrue(good.waits())  # It is not its fault.
    self.assertEqual(self.counts(APPLIED), [1, 1])

  def test_what_is_finite_here_and_not_where_it_arrives(self):
    """The largest number of 16 bits is 65504."""
    self.begin(1, 1, wire_dtype="float16")
    self.offer(0, 1e5)
    self.assertEqual(int(self.chief.collect().kind), KIND.NONFINITE)
    self.offer(0, 6e4)
    self.assertEqual(self.chief.step(), 6e4)


class EndTest(Case):
  def test_to_wake_ends_the_wait_and_forgets_nothing(self):
    self.begin(2, 2)
    collecting = self.chief.start_collect()
    first = self.offer(0, 1, loss=3.0, examples=5)
    self.await_status(DELIVERED, COMPUTING)
    self.assertTrue(collecting.waits())
    self.replicas.wake()
    self.assertEqual(int(collecting.result().kind), KIND.WAKE)
    self.assertTrue(first.waits())
    second = self.offer(1, 10, loss=1.0, examples=5)
    collected = self.chief.collect()
    self.assertEqual(float(collected.loss), 2)
    self.assertEqual(int(collected.examples), 10)
    self.assertEqual(self.chief.finish(collected), 11)
    self.assertEqual(first.release(), (1, 1))
    self.assertEqual(second.release(), (1, 1))

  def test_a_complete_step_is_collected_again_without_a_message(self):
    """The chief could not use what it collected, and asks once more."""
    self.begin(1, 1)
    self.offer(0, 1, examples=6)
    for _ in range(2):
      collected = self.chief.collect()
      self.assertEqual(int(collected.kind), KIND.DELIVERED)
      self.assertEqual(int(collected.examples), 6)
    self.assertEqual(self.chief.finish(collected), 1)

  def test_when_it_is_closed_everybody_hears_of_it(self):
    self.begin(2, 2)
    collecting = self.chief.start_collect()
    delivered = self.offer(0, 1)
    self.await_status(DELIVERED, COMPUTING)
    self.chief.side.close()
    for call in (collecting, delivered):
      with self.assertRaises(tf.errors.OutOfRangeError):
        call.result()
    with self.assertRaises(
      (tf.errors.OutOfRangeError, tf.errors.CancelledError)
    ):
      self.offer(1, 1).result()
    with self.assertRaises(tf.errors.OutOfRangeError):
      self.chief.collect()

  def test_release_replica_ends_one_replica_and_not_its_next_offer(self):
    """There is no chief yet."""
    self.begin(2, 2)
    first, other = self.offer(0, 100), self.offer(1, 1)
    deadline = time.monotonic() + DEADLINE_SECS
    while first.waits() and time.monotonic() < deadline:
      self.replicas.release_replica(0)  # It may not have asked yet.
    self.assertEqual(first.release(), (0, ENDED))
    self.assertTrue(other.waits())
    self.replicas.release_replica(0)  # Nobody waits: it is for nobody.
    again = self.offer(0, 10)
    self.assertTrue(again.waits())
    self.assertEqual(self.chief.step(), 11)
    self.assertEqual(again.release(), (1, 1))
    self.assertEqual(other.release(), (1, 1))

  def test_the_end_is_told_to_who_waits_and_to_who_comes(self):
    self.begin(4, 2)
    collecting, admitted, waiting, surplus = self._three_of_four()
    self.chief.side.wake()
    collecting.result()
    unread = self.offer(3, 1)
    self.assertTrue(unread.waits())
    ending = self.chief.start_end()
    for call in (waiting, surplus, unread):
      self.assertEqual(call.step(), ENDED)
    self.assertEqual(surplus.release()[0], 0)
    self.assertEqual(unread.release()[0], 0)
    self.assertEqual(self.offer(3, 1).release(), (0, ENDED))
    self.let_travel(0)
    self.assertEqual(admitted.step(), ENDED)
    self.assertTrue(ending.waits())
    self.chief.side.wake()
    ending.result()
    # A training may go on after that, with an empty ledger.
    self.chief.side.initialize(keep_counts=True)
    calls = [self.offer(r, 10**r) for r in (1, 3)]
    self.assertEqual(self.chief.step(), 1010)
    self.assertEqual([c.release() for c in calls], [(1, 1), (1, 1)])

  def _three_of_four(self):
    """Replica 0 is admitted, 1 has delivered and 2 is surplus."""
    collecting = self.chief.start_collect()
    admitted = self.offer(0, 1, is_slow=True)
    self.await_status(ADMITTED, COMPUTING, COMPUTING, COMPUTING)
    delivered = self.offer(1, 1)
    self.await_status(ADMITTED, DELIVERED, COMPUTING, COMPUTING)
    surplus = self.offer(2, 1)
    self.await_status(ADMITTED, DELIVERED, WAITING, COMPUTING)
    return collecting, admitted, delivered, surplus

  def test_to_have_waked_the_chief_before_does_not_end_the_ending(self):
    self.begin(1, 1)
    self.chief.side.wake()
    ending = self.chief.start_end()
    self.assertTrue(ending.waits())
    self.assertEqual(self.offer(0, 1).release(), (0, ENDED))
    self.chief.side.wake()
    ending.result()


class SuccessionTest(Case):
  def _succeed(self, is_restored=False):
    """A second chief begins; returns the first."""
    first, self.chief = self.chief, self.training.successor
    self.chief.side.begin_anew(is_restored=is_restored)
    return first

  def test_what_was_delivered_to_an_earlier_chief_is_void(self):
    self.begin(2, 2)
    collecting = self.chief.start_collect()
    old = self.offer(0, 100, v=100, loss=9.0, examples=9)
    self.await_status(DELIVERED, COMPUTING)
    self._succeed()
    self.assertEqual(old.release(), (0, 0))
    self.assertEqual(self.statuses(), [COMPUTING, COMPUTING])
    self.assertEqual(self.counts(UNUSED), [1, 0])
    calls = [self.offer(r, 10**r, loss=1.0, examples=1) for r in (0, 1)]
    collected = self.chief.collect()
    self.assertEqual(int(collected.examples), 2)
    self.assertEqual(float(collected.loss), 1)
    self.assertEqual(collected.present.numpy().tolist(), [True, False])
    self.assertEqual(self.chief.finish(collected), 11)
    self.assertEqual([c.release() for c in calls], [(1, 1), (1, 1)])
    self.assertEqual(int(collecting.result().kind), KIND.WAKE)

  def test_who_waited_for_an_earlier_chief_offers_anew(self):
    self.begin(2, 1)
    _, admitted, waiting = self.start_in_order((0, 100), (1, 50))
    self._succeed()
    self.assertEqual(waiting.release(), (0, 0))
    self.assertEqual(self.counts(UNUSED), [1, 1])
    call = self.offer(1, 1)
    self.assertEqual(self.chief.step(), 1)
    self.assertEqual(call.release(), (1, 1))
    # What was admitted by the earlier chief is void when it arrives.
    self.let_travel(0)
    self.assertEqual(admitted.release()[0], 0)
    call = self.offer(0, 10, step=1)
    self.assertEqual(self.chief.step(), 10)
    self.assertEqual(call.release(), (1, 2))
    self.assertEqual(self.counts(APPLIED), [1, 1])
    self.assertEqual(self.counts(UNUSED), [1, 1])

  def test_what_was_computed_before_a_restore_is_refused(self):
    """Even if its step fits: the training has come to this step again."""
    self.begin(3, 1)
    _, admitted, waiting = self.start_in_order((0, 100), (1, 50))
    self._succeed(is_restored=True)
    self.assertEqual(waiting.release(), (0, 0))
    collecting = self.chief.start_collect()
    computed_before = self.offer(2, 200)
    self.assertEqual(computed_before.release(), (0, 0))
    self.let_travel(0)  # Void, and 0 reads the variables anew, as 1 did.
    self.assertEqual(admitted.release(), (0, 0))
    call = self.offer(0, 1)
    self.assertEqual(self.chief.finish(collecting.result()), 1)
    self.assertEqual(call.release(), (1, 1))
    call = self.offer(2, 100, step=1)
    self.assertEqual(self.chief.step(), 100)
    self.assertEqual(call.release(), (1, 2))

  def test_an_earlier_chief_leaves_the_messages_to_the_new_one(self):
    self.begin(1, 1)
    earlier = self.chief.start_collect()
    self.assertTrue(earlier.waits())
    first = self._succeed()
    collecting = self.chief.start_collect()
    self.assertTrue(collecting.waits())
    call = self.offer(0, 1)  # The earlier call, which waits longer, has it.
    self.assertEqual(int(earlier.result().kind), KIND.WAKE)
    self.assertEqual(self.chief.finish(collecting.result()), 1)
    self.assertEqual(call.release(), (1, 1))
    # Once more it does not even wait, and takes nothing.
    self.assertEqual(int(first.collect().kind), KIND.WAKE)

  def test_an_earlier_chiefs_ending_ends_nobody_any_more(self):
    self.begin(1, 1)
    ending = self.chief.start_end()
    self.assertEqual(self.offer(0, 100).step(), ENDED)
    self._succeed()
    call = self.offer(0, 1)
    self.assertEqual(self.chief.step(), 1)
    self.assertEqual(call.release(), (1, 1))
    ending.result()

  @parameterized.parameters(True, False)
  def test_counts_are_kept_if_asked_for(self, keeps):
    self.begin(2, 2)
    collecting = self.chief.start_collect()
    self.offer(0, 1)
    self.await_status(DELIVERED, COMPUTING)
    time.sleep(0.1)
    self.offer(1, 1)
    self.chief.finish(collecting.result())
    self.chief.side.initialize(keep_counts=keeps)
    self.assertEqual(self.statuses(), [COMPUTING, COMPUTING])
    self.assertEqual(self.counts(APPLIED), [1, 1] if keeps else [0, 0])
    held_up = self.chief.side.snapshot().held_up[1]
    self.assertEqual(held_up > 0.09, keeps)
    self.assertEqual(held_up == 0, not keeps)


class SumsTest(stores.TestCase):
  """What gradient_queues_test leaves out."""

  def _queues(self, specs, num_tasks=1, **more):
    names = ("wire_dtype",)
    store = stores.attach(
      specs, num_tasks, **{k: more.pop(k) for k in names if k in more}
    )
    return gradient_queues.GradientQueues(
      store, 3, [False] * len(specs), **more
    )

  def _put(self, queues, replica, *values):
    def put():
      packed = queues.pack([tf.fill([2], v) for v in values])
      queues.put(replica, tf.constant(7, tf.int64), packed)

    tf.function(put, autograph=False)()

  def _take(self, queues, replicas, task=0):
    accepted = tf.constant([(r, 7) for r in replicas], tf.int64)
    take = tf.function(
      lambda: queues.take_sums(task, accepted), autograph=False
    )
    return [total.numpy().tolist() for total in take()]

  @parameterized.named_parameters(
    ("of_all", False, (0, 1), [3, 3 + 5]),
    ("of_the_first_replica", True, (1, 0), [3, 3 * 2]),
    ("of_the_first_that_is_in_it", True, (2, 1), [6, 5 * 2]),
  )
  def test_statistics(self, is_chiefs, replicas, expected):
    specs = [
      stores.spec("moving", [2], trainable=False),
      stores.spec("w", [2]),
    ]
    queues = self._queues(specs, has_chief_statistics=is_chiefs)
    for replica in replicas:
      # First gradients, 1, 2 and 4; then statistics.
      self._put(queues, replica, 2.0**replica, 3.0 + 2 * replica)
    self.assertEqual(
      self._take(queues, replicas), [[number] * 2 for number in expected]
    )

  def test_a_task_without_variables_has_no_sums(self):
    queues = self._queues([stores.spec("w", [2])], num_tasks=2)
    self._put(queues, 0, 1.0)
    sums = [self._take(queues, [0], task) for task in range(2)]
    self.assertEqual(sums, [[[1, 1]], []])

  @parameterized.parameters("bfloat16", "float16")
  def test_what_travels_is_rounded_and_its_sum_is_not(self, dtype):
    """In 16 bits 1 / 3 is another number, and in bfloat16 256 + 1 is 256."""
    queues = self._queues([stores.spec("w", [2])], wire_dtype=dtype)
    for replica, value in enumerate((1 / 3, 256.0, 1.0)):
      self._put(queues, replica, value)
    third = {"bfloat16": 171 / 512, "float16": 1365 / 4096}[dtype]
    expected = float(np.float32(third + 257))
    self.assertEqual(self._take(queues, [2, 1, 0]), [[expected] * 2])


class DeletedTest(stores.TestCase):
  """The chief deletes the variables and queues of a training."""

  @parameterized.parameters(None, 5)
  def test_a_replica_that_goes_on_fails_and_does_not_wait(self, admitted_tag):
    specs = [stores.spec("w", [2])]
    store = parameter_store.ParameterStore(
      specs,
      placement.plan(specs, placement.GreedyByBytes(1)),
      num_tasks=1,
      # A name with a job, for which a replica makes its calls.
      device_of_task=lambda _: "/job:localhost/replica:0/task:0/device:CPU:0",
      namespace=stores.namespace(),
    )
    chief, replica = (
      contributions.Contributions(
        store, num_replicas=1, quorum=quorum.Quorum(1, 1), is_sparse=[False]
      )
      for _ in range(2)
    )
    chief.initialize()

    @tf.function(autograph=False)
    def offer():
      return replica.offer(
        0,
        [tf.ones([2])],
        local_step=tf.constant(0, tf.int64),
        loss=tf.constant(1.0),
        num_examples=tf.constant(1),
        preadmitted_tag=(
          None if admitted_tag is None else tf.constant(admitted_tag, tf.int64)
        ),
      )

    offer.get_concrete_function()
    for shared in (chief._taker, chief._inbox, *chief._replies._queues):
      tf.raw_ops.DestroyResourceOp(resource=shared._handle)
    call = Call(offer)
    self.assertTrue(call.ends())
    with self.assertRaises(tf.errors.OpError):
      call.result()


if __name__ == "__main__":
  absltest.main()
