"""The tests that every update rule must pass, in one process.

An update rule decides when and how gradients change the variables. A rule is
tested by adding one line to `registry.RULES`. Replicas are threads that share
variables, and the test's own thread is the chief. Every wait has a deadline.
"""

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.support import background
from tests.support import stores
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules import step_token

# No wait of a test is that long if all is well.
DEADLINE_SECS = 90.0
# The examples of one batch, and the loss's derivative by each element.
BATCH, GRADIENT = 3, 0.5
FIRST_RATE, LATER_RATE = 0.125, 0.25
PATH = "w"
NUM_ELEMENTS = 4
# The global step at which a second client takes over, and the last one.
TAKEN_OVER, LAST = 3, 6
_ALWAYS = 10**9
_CLOSED = (tf.errors.OutOfRangeError, tf.errors.CancelledError)


@dataclasses.dataclass(frozen=True)
class RuleCase:
  """An update rule, for the tests that every update rule must pass.

  A contribution is what a replica sends for one update, such as a gradient.

  Attributes:
    make: Maps a new Keras optimizer to a new rule.
    per_update: Number of contributions in one update.
    batches: Number of batches in one contribution.
    contributions: Largest number of contributions that one call of the rule's
      `contribute` makes.
    drops: Whether a contribution of each replica may be dropped without being
      counted, as happens when another rule takes over.
    has_lockstep: Whether the drivers `OneMachine` and `Mirrored` can use the
      rule.
  """

  make: Callable[[keras.optimizers.Optimizer], rule_base.UpdateRule]
  per_update: int = 1
  batches: int = 1
  contributions: int = 1
  drops: bool = False
  has_lockstep: bool = False

  def rule(self) -> rule_base.UpdateRule:
    """Makes a new update rule around a new optimizer."""
    return self.make(keras.optimizers.SGD(FIRST_RATE))


def _loss(parameters, x):
  return tf.reduce_sum(parameters[0]) * tf.reduce_mean(x)


def _no_dataset(num_shards, index, start):
  raise NotImplementedError("The suite makes batches by itself.")


def _variable() -> tf.Variable:
  return tf.Variable(tf.ones([NUM_ELEMENTS]), name=PATH)


class _Batches:
  """An iterator over the batches of one replica.

  After a given number of batches, all further ones have the value NaN.
  """

  def __init__(self, counts: tf.Variable, good: tf.Tensor, index: tf.Tensor):
    self._counts, self._good, self._index = counts, good, index

  def __next__(self) -> tuple[tf.Tensor]:
    is_this = tf.range(len(self._good), dtype=tf.int64) == self._index
    counts = self._counts.assign_add(tf.cast(is_this, tf.int64))
    is_good = tf.gather(counts, self._index) <= self._good[self._index]
    return (tf.fill([BATCH], tf.where(is_good, GRADIENT, float("nan"))),)


class Training:
  """A client (a process that trains) with its replicas, played by threads.

  Attributes:
    rule: The update rule.
    store: The variables of the rule, on two PS tasks.
    updates: All updates that `run_to` and `run_on` made.
    tokens: For each replica, the tokens that it received, in order. A token is
      the rule's answer to a contribution, such as a gradient.
  """

  def __init__(
    self, case: RuleCase, *, is_resumed=False, good=None, store=None, name=None
  ):
    """Builds the update rule, and begins a new training or continues one.

    Args:
      case: The rule to build.
      is_resumed: Whether another client (another `Training`) began the
        training.
      good: Maps the number of a replica to the number of its finite batches.
        Other replicas have finite batches only.
      store: The variables; None for those of the test's namespace.
      name: Name of a namespace for the rule's own variables; None for that of
        `store`.
    """
    self.rule = case.rule()
    self.store = store or attach()
    namespace = name and self.store.namespace.child(name)
    self.rule.build(self.store, is_sparse=[False], namespace=namespace)
    if store is None:
      assert self.store.is_initialized() == is_resumed
      rule_base.create_or_resume(
        self.rule, self.store, [tf.ones([NUM_ELEMENTS])]
      )
      self.rule.start()
    else:
      self.rule.create([tf.ones([NUM_ELEMENTS])], resumed=False)
    count = self.rule.total_num_replicas
    self.updates: list[results.Update] = []
    self.tokens: list[list[step_token.StepToken]] = [[] for _ in range(count)]
    self._replica = model_replica.Replica([_variable()], _loss, _no_dataset)
    self._drawn = tf.Variable(tf.zeros([count], tf.int64))
    self._good = tf.constant(
      [(good or {}).get(i, _ALWAYS) for i in range(count)], tf.int64
    )
    # All replicas share a trace: their number is a tensor.
    self._begin = tf.function(
      lambda index: self._loop(index).begin(), autograph=False
    )
    self._offer, self._hand_over = (
      tf.function(
        lambda index, *carried, is_preadmitted=is_preadmitted: self._loop(
          index
        ).run_one(*carried, is_preadmitted=is_preadmitted),
        autograph=False,
      )
      for is_preadmitted in (False, True)
    )
    self._threads: list[threading.Thread] = []
    self._errors: list[Exception] = []

  def _loop(self, index: tf.Tensor) -> replica_loop.ReplicaLoop:
    batches = _Batches(self._drawn, self._good, index)
    return replica_loop.ReplicaLoop(
      self.rule, self._replica, batches, index, device=None
    )

  def start(self, *which: int) -> None:
    """Starts the threads of replicas, which then train.

    Args:
      *which: The numbers of the replicas; all replicas if none are given.
    """
    for index in which or range(self.rule.total_num_replicas):
      thread = threading.Thread(
        target=self._contribute, args=(index,), daemon=True
      )
      thread.start()
      self._threads.append(thread)

  def _contribute(self, index: int) -> None:
    number = tf.constant(index, tf.int64)
    try:
      packed, *state = self._begin(number)
      while True:
        (token,) = step_token.LAYOUT.unpack_rows(packed.numpy()[None])
        self.tokens[index].append(token)
        if token.global_step == step_token.ENDED:
          return
        has_tag = token.preadmitted_tag != step_token.NO_TAG
        step = self._hand_over if has_tag else self._offer
        packed, *state = step(number, packed, *state)
    except _CLOSED:
      pass
    except Exception as error:  # The test's thread raises it.
      self._errors.append(error)
      self.rule.interrupt()

  def run_to(self, step: int) -> None:
    """Makes updates until the global step is `step`, and none after that."""
    self.rule.stop_at(step)
    while self.global_step() < step or self.last_step() < step:
      self.run_on()

  def run_on(self) -> None:
    """Calls `apply_updates` of the rule once, and keeps its results.

    An error of a replica, or of the rule, is raised.
    """
    deadline = threading.Timer(DEADLINE_SECS, self.rule.close)
    deadline.start()
    try:
      self.updates += self.rule.apply_updates()
    except results.Interrupted:
      self.raise_errors()
    finally:
      deadline.cancel()

  def last_step(self) -> int:
    """Returns the global step after the last update that this client saw."""
    return self.updates[-1].global_step if self.updates else 0

  def raise_errors(self) -> None:
    """Raises the first error of a replica's thread, if there is any."""
    if self._errors:
      raise self._errors[0]

  def end(self, replicas: "Training") -> None:
    """Ends replicas as a driver does at the end of a training.

    Args:
      replicas: The client (a `Training`) whose threads are the replicas. It may
        be another than this one, which then has taken over the training.
    """
    ending = background.Call(self.rule.end_replicas)
    replicas.join()
    while ending.is_alive():
      self.rule.interrupt()
      ending.waits()
    ending.result()

  def join(self) -> None:
    """Waits until the threads of this client's replicas have ended."""
    for thread in self._threads:
      thread.join(DEADLINE_SECS)
    self.raise_errors()
    assert not any(t.is_alive() for t in self._threads), "a replica waits"

  def values(self) -> np.ndarray:
    """Returns the value of the model's only variable."""
    (value,) = stores.numpy(self.store.read())
    return value

  def global_step(self) -> int:
    """Returns the number of updates made so far."""
    return int(self.store.read_global_step())


def attach():
  """Returns the parameter store of the test's namespace, on two PS tasks."""
  specs = [stores.spec(PATH, [NUM_ELEMENTS])]
  return stores.attach(specs, 2, stores.cut(2))


class Life(NamedTuple):
  """What a test observed in one training that a second client took over.

  A client is a process that trains, played by a `Training`.

  Attributes:
    updates: All updates, of the first and of the second client.
    tokens: For each replica, the tokens that it received, in order. A token is
      the rule's answer to a contribution, such as a gradient.
    began: What `status` of the rule returned before the first contribution.
    stopped: What `status` returned when the last update was made.
    counts: What `counts` returned when all replicas had ended.
    resumed_at: The global step that the second client found.
    step: The global step when all replicas had ended.
    examples: The number of examples of all updates, when all replicas had
      ended.
    values: The value of the variable when all replicas had ended.
    neighbors: The global step, the counts and the values of a training in
      another namespace, and the counts of a rule in another namespace of the
      same store.
  """

  updates: list[results.Update]
  tokens: list[list[step_token.StepToken]]
  began: results.StepStatus
  stopped: results.StepStatus
  counts: list[results.Counts]
  resumed_at: int
  step: int
  examples: int
  values: np.ndarray
  neighbors: tuple[int, list[results.Counts], np.ndarray, list[results.Counts]]


def live(case: RuleCase, new_namespace: Callable[[], None]) -> Life:
  """Trains with an update rule, beside two other trainings that do nothing.

  A client is a process that trains, played by a `Training`. The first client
  trains to the global step `TAKEN_OVER`. A second client takes over from it,
  and trains to `LAST`. The replicas remain threads of the first client.

  Args:
    case: The update rule.
    new_namespace: Begins another namespace of shared variables.

  Returns:
    What was observed.
  """
  neighbor = Training(case)
  new_namespace()
  first = Training(case)
  sibling = Training(case, store=attach(), name="sibling")
  first.rule.trace_ahead()
  began = first.rule.status()
  first.start()
  first.run_to(TAKEN_OVER)
  # The others end; that must not be noticed here.
  seen = neighbor.global_step(), neighbor.rule.counts(), neighbor.values()
  seen = *seen, sibling.rule.counts()
  neighbor.rule.close()
  sibling.rule.close()
  second = Training(case, is_resumed=True)
  resumed_at = second.global_step()
  second.rule.set_learning_rate(LATER_RATE)
  second.run_to(LAST)
  stopped = second.rule.status()
  second.end(first)
  life = Life(
    updates=[*first.updates, *second.updates],
    tokens=first.tokens,
    began=began,
    stopped=stopped,
    counts=second.rule.counts(),
    resumed_at=resumed_at,
    step=second.global_step(),
    examples=int(second.store.examples_seen),
    values=second.values(),
    neighbors=seen,
  )
  second.rule.close()
  return life


def error_after_close(rule: rule_base.UpdateRule) -> Exception | None:
  """Returns the error that `apply_updates` raises after `close` of a rule.

  Updates and interrupts from before `close` may be reported first. None means
  that there is no error in 100 calls.
  """
  rule.close()
  for _ in range(100):
    try:
      rule.apply_updates()
    except results.Interrupted:
      pass
    except tf.errors.OpError as error:
      return error
  return None


class Interface:
  """A mixin class with checks of the methods of update rules and drivers."""

  def assert_implements(self, made: object, interface: type) -> None:
    """Checks that an object implements every abstract method of an interface.

    Args:
      made: The object.
      interface: The abstract class, which must be a base of the object's class.
    """
    self.assertIsInstance(made, interface)
    for name in sorted(interface.__abstractmethods__):
      self.assertIsNot(
        getattr(type(made), name), getattr(interface, name), name
      )

  def assert_hides_no_method(self, made: object) -> None:
    """Checks that no attribute of an object hides a method of its class.

    Args:
      made: The object.
    """
    hidden = [n for n in vars(made) if callable(getattr(type(made), n, None))]
    self.assertEmpty(hidden)


class RuleSuite(Interface):
  """A mixin class with the tests that every update rule must pass.

  A subclass is a `stores.TestCase` and defines `case`, the rule to test.
  """

  case: RuleCase
  _life: Life | None = None

  def training(self, **options) -> Training:
    """Makes a `Training` with the rule, which is closed when the test ends.

    Args:
      **options: Further arguments of `Training`.
    """
    made = Training(self.case, **options)
    self.addCleanup(made.rule.close)
    return made

  @property
  def life(self) -> Life:
    """What was observed in one training, which several tests share.

    The training is run at the first access.
    """
    if type(self)._life is None:
      type(self)._life = live(self.case, self.new_cluster)
    return self._life

  # The interface.

  def test_implements_every_member(self):
    rule = self.case.rule()
    self.assert_implements(rule, rule_base.UpdateRule)
    self.assertIsInstance(rule.name, str)
    self.assertGreaterEqual(rule.total_num_replicas, 1)
    self.assertGreaterEqual(rule.replicas_to_aggregate, 1)
    self.assertBetween(rule.accepted_fraction, 1e-9, 1.0)
    self.assertIn(rule.wire_dtype, (None, *rule_base.WIRE_DTYPES))
    self.assertIsInstance(rule.preadmits, bool)

  def test_no_attribute_hides_a_method(self):
    rule = self.case.rule()
    rule.build(attach())
    self.assert_hides_no_method(rule)

  def test_signature_is_json_and_depends_on_settings_alone(self):
    first, second = (dict(self.case.rule().signature()) for _ in range(2))
    self.assertEqual(first, second)
    self.assertEqual(json.loads(json.dumps(first)), first)

  def test_in_lockstep_or_the_reason(self):
    rule, store = self.case.rule(), stores.attach([stores.spec(PATH, [2])])
    if self.case.has_lockstep:
      update = rule.in_lockstep(store)
      self.assertIsInstance(update, rule_base.LockstepUpdate)
      self.assertIs(update.rule, rule)
    else:
      with self.assertRaisesRegex(ValueError, "parameter servers"):
        rule.in_lockstep(store)

  # One life.

  def test_global_step_counts_the_updates(self):
    steps = [update.global_step for update in self.life.updates]
    self.assertEqual(steps, sorted(steps))
    if self.case.per_update == 1:  # Else a part of an update may be reported.
      self.assertLen(set(steps), len(steps))
    self.assertEqual(steps[-1], LAST)

  def test_no_update_after_the_step_to_stop_at(self):
    """Checks that replicas make no update beyond the step to stop at.

    They have time to do so until they are ended.
    """
    self.assertEqual(self.life.resumed_at, TAKEN_OVER)
    self.assertEqual(self.life.step, LAST)

  def test_every_update_is_told_once(self):
    examples = LAST * self.case.per_update * self.case.batches * BATCH
    self.assertEqual(self.life.examples, examples)
    told = sum(update.num_examples for update in self.life.updates)
    self.assertEqual(told, examples)
    self.assertTrue(np.isfinite([u.loss for u in self.life.updates]).all())

  def test_learning_rate_from_the_next_update_on(self):
    for update in self.life.updates:
      is_first = update.global_step <= TAKEN_OVER
      rate = FIRST_RATE if is_first else LATER_RATE
      self.assertAlmostEqual(update.learning_rate, rate)

  def test_counts_add_up_to_what_was_contributed(self):
    counts = self.life.counts
    self.assertLen(counts, len(self.life.tokens))
    applied = sum(count.applied for count in counts)
    self.assertEqual(applied, LAST * self.case.per_update)
    for count, (_, *tokens) in zip(counts, self.life.tokens, strict=True):
      if count.staleness:
        self.assertEqual(sum(count.staleness), count.applied)
      # What was handed over after the last update is not counted.
      told = [t for t in tokens if t.global_step != step_token.ENDED]
      admitted = sum(token.admitted for token in told)
      # A fast replica may bring most batches of a step.
      most = self.case.per_update * (admitted + 1)
      if self.case.contributions > 1:
        self.assertBetween(count.applied, admitted, most)
        continue
      self.assertEqual(count.applied, admitted)
      # A new chief, or a new rule, drops what is under way without a count.
      most_dropped = 1 + self.case.drops
      unused = len(told) - admitted
      self.assertBetween(count.refused, unused - most_dropped, unused)

  def test_status_has_one_entry_for_each_replica(self):
    for status in (self.life.began, self.life.stopped):
      self.assertLen(status.replicas, len(self.life.tokens))
      self.assertBetween(status.received, 0, status.needed)
      for replica in status.replicas:
        self.assertIsInstance(replica, results.ReplicaStatus)
    for replica in self.life.began.replicas:
      self.assertEqual(replica.tag, -1)

  def test_every_replica_hears_that_training_ended(self):
    for tokens in self.life.tokens:
      self.assertEqual(tokens[-1].global_step, step_token.ENDED)

  def test_a_replica_never_goes_back(self):
    for tokens in self.life.tokens:
      steps = [token.global_step for token in tokens[:-1]]
      self.assertEqual(steps, sorted(steps))

  def test_the_variables_were_updated(self):
    self.assertTrue(np.isfinite(self.life.values).all())
    self.assertTrue((self.life.values < 1.0).all())

  def test_other_namespaces_do_not_meet_it(self):
    step, counts, values, siblings = self.life.neighbors
    self.assertEqual(step, 0)
    np.testing.assert_array_equal(values, np.ones(NUM_ELEMENTS))
    for count in (*counts, *siblings):
      self.assertEqual((count.applied, count.refused), (0, 0))

  # What ends a wait.

  def test_a_value_that_is_not_finite_names_the_replica(self):
    last = self.case.rule().total_num_replicas - 1
    training = self.training(good={last: 2 * self.case.batches})
    training.start()
    with self.assertRaises(results.NonFiniteGradientError) as raised:
      while True:
        training.run_on()
    self.assertEqual(raised.exception.replica, last)
    self.assertGreaterEqual(raised.exception.global_step, 0)
    training.rule.close()
    training.join()
    self.assertTrue(np.isfinite(training.values()).all())

  def test_interrupt_close_and_release_end_a_wait(self):
    training = self.training()
    waiting = background.Call(training.rule.apply_updates)
    training.rule.interrupt()
    with self.assertRaises(results.Interrupted):
      waiting.result()
    # A replica whose chief is lost.
    training.start(0)
    while not (told := training.tokens[0]) or told[-1].global_step >= 0:
      training.raise_errors()
      training.rule.release_replica(0)
    training.join()
    # Cancelled, if there is something left to answer.
    self.assertIsInstance(error_after_close(training.rule), _CLOSED)
