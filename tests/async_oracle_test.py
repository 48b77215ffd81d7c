"""Asynchronous rules on real processes, against plain Python.

Two scalars on two parameter servers, two workers whose gradients depend on what
they read and when. A script says who acts next, and each worker awaits its
turn. `Simulator` says what must come of it; it knows nothing of TensorFlow.
"""

import dataclasses

import ml_dtypes
import pytest

from tests.support import trials

NAMES = ("a", "b")
VALUES = {"a": 1.0, "b": -2.0}
# Worker w's gradient of value v is SLOPES[w][v] * (value - TARGETS[w][v]).
SLOPES = ((0.5, 0.75), (1.25, 0.25))
TARGETS = ((3.0, 0.7), (-1.0, 0.3))

# Gradients of variables that are 0 to 3 updates old.
STALE = (
  (0, "pull"),
  (1, "pull"),
  (0, "apply"),
  (1, "apply"),
  (1, "apply"),
  (0, "pull"),
  (0, "apply"),
  (1, "apply"),
  (1, "pull"),
  (0, "apply"),
  (1, "apply"),
)
# Steps as the drivers make them.
STEPS = (
  (0, "pull"),
  (1, "pull"),
  (0, "step"),
  (1, "step"),
  (1, "step"),
  (0, "step"),
  (1, "step"),
  (0, "step"),
  (0, "step"),
  (1, "step"),
)
# Whoever is first waits for the other, and is first to read the next time.
TOGETHER = (
  (0, "pull"),
  (1, "pull"),
  (0, "apply_to_gate"),
  (1, "apply"),
  (1, "pull"),
  (0, "join"),
  (0, "pull"),
  (1, "apply_to_gate"),
  (0, "apply"),
  (0, "pull"),
  (1, "join"),
)
# Nobody reads anew before the other's update is made.
TO_THE_END = (
  (0, "pull"),
  (1, "pull"),
  (0, "apply_to_gate"),
  (1, "apply_to_gate"),
  (0, "open_training"),
  (0, "join"),
  (1, "join"),
)
# One ahead is let through, two ahead is not.
ONE_AHEAD = (
  (0, "pull"),
  (1, "pull"),
  (0, "apply"),
  (0, "pull"),
  (0, "apply_to_gate"),
  (1, "apply"),
  (0, "join"),
  (1, "pull"),
  (1, "apply"),
  (1, "apply"),
  (1, "apply_to_gate"),
  (0, "apply"),
  (1, "join"),
)
HALF_AN_UPDATE = (
  (0, "pull"),
  (0, "apply_half"),
  (1, "pull"),
  (0, "open_training"),
  (0, "join"),
  (1, "apply"),
)
# If the read did not wait, it would see the half, as the one above does.
WHOLE_UPDATES = (
  (0, "pull"),
  (0, "apply_half"),
  (1, "begin_pull"),
  (0, "open_training"),
  (0, "join"),
  (1, "join"),
  (1, "apply"),
)


@dataclasses.dataclass(frozen=True)
class Rule:
  """What to do, and by which rule.

  Attributes:
    script: Pairs of a worker and what it does next; see `async_task.Actor`.
    policies: Arguments of the policies in use, by name.
    options: Other arguments of `AsyncReplicasOptimizer`.
    rate: The learning rate.
    momentum: That of the inner optimizer.
    is_held: Whether worker 0's updates of `b` wait to be let go.
  """

  script: tuple = STALE
  policies: dict = dataclasses.field(default_factory=dict)
  options: dict = dataclasses.field(default_factory=dict)
  rate: float = 0.25
  momentum: float = 0.0
  is_held: bool = False


RULES = {
  "plain": Rule(),
  "momentum": Rule(momentum=0.75, options={"use_locking": True}),
  "drop_stale": Rule(policies={"drop_stale": [1]}),
  "staleness_aware": Rule(policies={"staleness_aware": []}, momentum=0.75),
  "delay_compensated": Rule(policies={"delay_compensated": [0.5]}),
  "softsync": Rule(
    policies={"staleness_aware": []},
    options={"gradients_per_update": 2},
    momentum=0.75,
  ),
  "bounded_by_0": Rule(TOGETHER, policies={"bounded_staleness": [0]}),
  "bounded_to_the_end": Rule(
    TO_THE_END, policies={"bounded_staleness": [0]}, is_held=True
  ),
  "bounded_by_1": Rule(ONE_AHEAD, policies={"bounded_staleness": [1]}),
  "refresh_every": Rule(STEPS, options={"refresh_every": 2}),
  "wire_dtype": Rule(options={"wire_dtype": "bfloat16"}),
  "half": Rule(HALF_AN_UPDATE, is_held=True),
  "snapshot_reads": Rule(
    WHOLE_UPDATES, options={"snapshot_reads": True}, is_held=True
  ),
}


class Simulator:
  """What a script leads to, one action after the other.

  Attributes:
    read: By worker: the step and the values that it read last.
    applied: By worker: the staleness of each gradient that was applied.
    dropped: By worker: that of each that was refused.
    running: Workers whose updates are under way while the script goes on.
  """

  def __init__(self, rule: Rule):
    self._rule = rule
    self._values = dict(VALUES)
    self._velocity = dict.fromkeys(NAMES, 0.0)
    self._sums = dict.fromkeys(NAMES, 0.0)
    self._pending = 0
    self._step = self._examples = 0
    self.read = [None, None]
    self._then = [None, None]  # The values at that time, before they travelled.
    self._uses = [0, 0]
    self._clocks = [0, 0]
    self._at_gate = []
    self._done = [0, 0]  # How often each came to the second gate.
    self._half = None
    self._is_reading = False
    self.applied = [[], []]
    self.dropped = [[], []]
    self.running = set()

  def state(self):
    """As the parameter servers have it."""
    kinds = {"variables": self._values}
    if self._rule.momentum:
      kinds["slots/sgd/momentum"] = self._velocity
    state = {"global_step": self._step, "examples_seen": self._examples}
    if not self._rule.is_held:  # Else it is wrapped, and not of Keras.
      state["optimizer/began.sgd"] = 0
    if self._per_update > 1:
      kinds[f"sums_{self._per_update}"] = self._sums
      state[f"async/pending_{self._per_update}"] = self._pending
    for kind, values in kinds.items():
      state |= {f"{kind}/{name}": values[name] for name in NAMES}
    return state

  @property
  def _per_update(self):
    return self._rule.options.get("gradients_per_update", 1)

  def _on_the_wire(self, value):
    if "wire_dtype" in self._rule.options:
      return float(ml_dtypes.bfloat16(value))
    return value

  # The actions.

  def pull(self, worker):
    values = {n: self._on_the_wire(v) for n, v in self._values.items()}
    self.read[worker] = (self._step, values)
    self._then[worker] = dict(self._values)
    self._uses[worker] = 0

  def apply(self, worker):
    if self._rule.policies.get("bounded_staleness") != [0]:
      return self._apply_now(worker)
    self._clocks[worker] += 1
    self._at_gate.append(worker)
    for other in list(self._at_gate):
      if self._clocks[other] == min(self._clocks):
        self._at_gate.remove(other)
        self._apply_now(other)
        if other != worker:
          self.running.add(other)

  @property
  def has_half(self):
    """Whether an update has changed `a`, but not yet `b`."""
    return self._half is not None

  def step(self, worker):
    self._uses[worker] += 1
    self._apply_now(worker)
    if self._uses[worker] == self._rule.options.get("refresh_every", 1):
      self.pull(worker)

  def apply_to_gate(self, worker):
    self.apply(worker)
    (max_lead,) = self._rule.policies["bounded_staleness"]
    is_ahead = self._done[worker] - min(self._done) > max_lead
    assert worker in self._at_gate or is_ahead

  def apply_half(self, worker):
    self.apply(worker)
    assert self._half

  def begin_pull(self, worker):
    assert self._half  # An update holds the lock; `join` reads.
    self._is_reading = True

  def open_training(self, worker):
    gradients, self._half = self._half, None
    self._make_update(worker, gradients)
    self._examples += 1
    self.running.add(worker)

  def join(self, worker):
    self.running.discard(worker)
    if worker == 1 and self._is_reading:
      self._is_reading = False
      self.pull(worker)

  def _apply_now(self, worker):
    policies = self._rule.policies
    step, values = self.read[worker]
    staleness = self._step + self.has_half - step
    if staleness > policies.get("drop_stale", [staleness])[0]:
      self.dropped[worker].append(staleness)
      return
    factor = 1.0
    if "staleness_aware" in policies:
      factor = 1.0 / max(staleness, 1)
    gradients = {}
    for name, slope, target in zip(
      NAMES, SLOPES[worker], TARGETS[worker], strict=True
    ):
      gradient = self._on_the_wire(slope * (values[name] - target))
      if "delay_compensated" in policies:
        (variance,) = policies["delay_compensated"]
        change = self._values[name] - self._then[worker][name]
        gradient += variance * gradient**2 * change
      gradients[name] = gradient
    self.applied[worker].append(staleness)
    if self._per_update == 1:
      held = self._make_update(worker, gradients, factor)
      self._examples += not held
      return
    self._examples += 1
    for name in NAMES:
      self._sums[name] += factor * gradients[name]
    self._pending += 1
    if self._pending == self._per_update:
      means = {n: total / self._per_update for n, total in self._sums.items()}
      self._sums = dict.fromkeys(NAMES, 0.0)
      self._pending = 0
      self._make_update(worker, means)

  def _make_update(self, worker, gradients, factor=1.0):
    """Of `a` alone if it is held up; whether it is."""
    is_held = self._rule.is_held and worker == 0 and len(gradients) > 1
    if is_held:
      self._half = {"b": gradients.pop("b")}
    for name, gradient in gradients.items():
      velocity = self._rule.momentum * self._velocity[name]
      velocity -= self._rule.rate * factor * gradient
      self._velocity[name] = velocity
      self._values[name] += velocity
    if not is_held:
      self._done[worker] += 1
      self._step += 1
    return is_held


def _close(expected):
  return pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def trial(start_trial):
  document = {
    "cluster": {"ps": ["localhost:0"] * 2, "worker": ["localhost:0"] * 2},
    "variables": {"on": "ps", "placement": "round_robin"},
  }
  trial = start_trial(
    "follow_scripts",
    document,
    program=trials.ROOT / "tests" / "tasks" / "async_task.py",
    rules={name: dataclasses.asdict(rule) for name, rule in RULES.items()},
    values=VALUES,
    slopes=SLOPES,
    targets=TARGETS,
  )
  trial.await_success()
  return trial


@pytest.mark.parametrize("name", RULES)
def test_real_processes_do_as_plain_python(trial, name):
  rule = RULES[name]
  reports = [trial.report(f"worker_{worker}")[name] for worker in (0, 1)]
  simulator = Simulator(rule)
  for turn, (worker, action) in enumerate(rule.script):
    getattr(simulator, action)(worker)
    where = f"turn {turn}: {action} of worker {worker}"
    found = reports[worker]["done"][str(turn)]
    if rule.options.get("snapshot_reads") and simulator.has_half:
      assert found["state"] is None, where  # It waits for the update.
    elif not simulator.running:
      assert found["state"] == _close(simulator.state()), where
    if action != "begin_pull":
      step, values = simulator.read[worker]
      assert found["read"] == _close([step, *values.values()]), where
  counts = reports[0]["counts"]
  applied = [_expand(row) for row, _ in counts]
  assert [_expand([0, *late]) for _, late in counts] == simulator.dropped
  if rule.policies.get("bounded_staleness") == [0]:
    # Of two that a gate lets go at once either may be the first.
    assert [len(a) for a in applied] == [len(a) for a in simulator.applied]
    assert sum(map(sum, applied)) == sum(map(sum, simulator.applied))
  else:
    assert applied == [sorted(row) for row in simulator.applied]


def test_assignments_are_seen_by_the_next_function(trial):
  """Else a step could be made with the learning rate of the one before."""
  assert trial.report("worker_0")["overtaken"] == []


def _expand(histogram):
  """[1, 0, 2] -> [0, 2, 2]."""
  return [value for value, n in enumerate(histogram) for _ in range(n)]


def test_zero_bound_is_synchronous():
  """The oracle itself: all gradients are of the same values, in each round."""
  simulator = Simulator(RULES["bounded_by_0"])
  for worker, action in TOGETHER:
    getattr(simulator, action)(worker)
  for position, name in enumerate(NAMES):
    value = VALUES[name]
    for _ in range(2):
      gradients = [
        slopes[position] * (value - targets[position])
        for slopes, targets in zip(SLOPES, TARGETS, strict=True)
      ]
      value -= 0.25 * sum(gradients)
    assert simulator.state()[f"variables/{name}"] == pytest.approx(value)


def test_rules_differ():
  """What tells one rule from another shows in where its script ends."""
  ends = {}
  for name, rule in RULES.items():
    simulator = Simulator(rule)
    for worker, action in rule.script:
      getattr(simulator, action)(worker)
    ends[name] = tuple(simulator.state().values())
  assert len(set(ends.values())) == len(RULES)
