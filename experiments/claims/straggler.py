"""Measures what a slow worker costs, with and without a backup replica.

  python -m experiments.claims.straggler [--quick]
    [--num_seeds=5] [--output=DIR]

Trains inception_mini on a real cluster of 2 PS (parameter servers) and 3
workers on this machine. An update waits for the gradients of all 3 workers, or
of the first 2, so that one worker is a backup; each is measured with and
without a worker that is five times slower. `--quick` trains the network of
cifar10 instead, with the first 2 only.

All workers share the cores of this machine. If one of them is slow, the others
would become faster. To prevent this, every worker is stopped and continued in
turn (`slow_down`), like a computer of a fixed speed. It is stopped for so much
of the time that the cores are idle now and then.
"""

import tempfile
from collections.abc import Sequence

from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import programs

WORKERS = 3
# How much slower than a core of its own each worker is.
USUAL = 3.0
SLOWER = 5.0
MOST_COST = 0.15
_SETTINGS = {
  "all of 3, equal": (3, False),
  "all of 3, one slow": (3, True),
  "first 2 of 3, equal": (2, False),
  "first 2 of 3, one slow": (2, True),
}
# Programs and their flags. Inception takes most of a short run to start.
_INCEPTION = (
  "inception_mini.distributed_train",
  "--recipe=mini",
  "--batch_size=16",
)
_TUTORIAL = ("cifar10.distributed_train", "--batch_size=32")


def run(
  aggregate: int, is_slow: bool, num_steps: int, program: Sequence[str]
) -> dict:
  """Trains on a cluster, and returns its speed and how busy the last worker is.

  Args:
    aggregate: The number of gradients in an update.
    is_slow: Whether the last worker is slower than the others.
    num_steps: The number of updates.
    program: The module of the training program, and some of its flags.

  Returns:
    `steps_per_sec`: updates per second after the first tenth. `busy`: the share
    of the time that the last worker did not wait.
  """
  slow_downs = dict.fromkeys(range(WORKERS), USUAL)
  if is_slow:
    slow_downs[WORKERS - 1] *= SLOWER
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, ps=2, workers=WORKERS)
    output = programs.train(
      program[0],
      [
        *program[1:],
        "--dataset=synthetic",
        f"--cluster_spec={spec}",
        f"--train_dir={directory}/run",
        f"--replicas_to_aggregate={aggregate}",
        # The client, whose turn an update waits for, is no worker here.
        "--replication=in_graph",
        f"--max_steps={num_steps}",
        f"--log_every_steps={max(num_steps // 10, 1)}",
        "--timeline",
      ],
      slow_downs,
    )
    events = recorded_run.read(f"{directory}/run/timeline")
  lines = programs.logged(output)[1:]
  begin = lines[0].when.timestamp()
  return {
    "steps_per_sec": programs.step_rate(lines),
    "busy": busy_share(events, f"worker:{WORKERS - 1}", begin),
  }


def busy_share(
  events: Sequence[recorded_run.Event], task: str, begin: float
) -> float:
  """Returns the share of the time that a replica did not wait.

  Args:
    events: The recorded events of all tasks.
    task: The task of the replica.
    begin: Earlier events are ignored; in seconds.
  """
  own = [e for e in events if e.task == task and e.start >= begin]
  waited = sum(e.end - e.start for e in own if e.kind in ("wait", "refused"))
  return 1 - waited / (max(e.end for e in own) - own[0].start)


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with and without a backup, and with and without a slow worker.

  With `is_quick`, it trains the CIFAR-10 network instead, with a backup only.
  The order of the settings is reversed with every `seed`. The result maps the
  name of each setting to the result of `run`.
  """
  how = (40, _TUTORIAL) if is_quick else (60, _INCEPTION)
  names = [n for n in _SETTINGS if not is_quick or _SETTINGS[n][0] < WORKERS]
  order = names[::-1] if seed % 2 else names
  found = {name: run(*_SETTINGS[name], *how) for name in order}
  return {name: found[name] for name in names}


def cost(measurement: dict, who: str) -> float:
  """Returns which share of the step rate a slow worker costs.

  Args:
    measurement: The result of `measure`.
    who: The workers that an update waits for, such as "all of 3".
  """
  rates = [
    measurement[f"{who}, {others}"]["steps_per_sec"]
    for others in ("one slow", "equal")
  ]
  return 1 - rates[0] / rates[1]


def expected_cost(measurement: dict) -> float:
  """Returns the share of the step rate that a slow worker should cost.

  It is for updates that wait for all workers. Let t be the time of a step in
  which all workers are equal, and b the share of it in which a worker is busy.
  With the slow worker, a step takes SLOWER * b * t, as all wait for this
  worker.

  Args:
    measurement: The result of `measure`.
  """
  return 1 - 1 / (SLOWER * measurement["all of 3, equal"]["busy"])


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  findings = [
    claims.Finding(
      "share of the step rate that the slow worker costs, with a backup",
      [cost(m, "first 2 of 3") for m in measurements],
      most=MOST_COST,
    )
  ]
  if "all of 3, equal" in measurements[0]:
    findings += [
      claims.Finding(
        "share of the step rate that the slow worker costs, without a backup",
        [cost(m, "all of 3") for m in measurements],
        least=0.5,
      ),
      claims.Finding(
        "the last share minus the one that follows from how busy the worker was"
        " when it was as fast as the others",
        [cost(m, "all of 3") - expected_cost(m) for m in measurements],
        least=-0.1,
        most=0.1,
      ),
    ]
  return findings


def draw(measurements: Sequence[dict]):
  """Draws a bar for each setting: its updates per second."""
  figure, axes = claims.new_figure(7, 3)
  for row, name in enumerate(measurements[0]):
    rates = [m[name]["steps_per_sec"] for m in measurements]
    color = claims.COLORS[1] if "slow" in name else claims.COLORS[0]
    bar = axes.barh(row, sum(rates) / len(rates), color=color, height=0.6)
    axes.bar_label(bar, fmt="%.2f", padding=4)
    if len(rates) > 1:
      axes.plot(rates, [row] * len(rates), "k.", markersize=4)
  axes.set_yticks(range(len(measurements[0])), measurements[0])
  axes.invert_yaxis()
  axes.margins(x=0.1)
  axes.set_xlabel("updates per second")
  costs = {
    who: sum(cost(m, who) for m in measurements) / len(measurements)
    for who in ("all of 3", "first 2 of 3")
    if f"{who}, equal" in measurements[0]
  }
  axes.set_title(
    "What the slow worker costs: "
    + ", ".join(f"{share:.0%} ({who})" for who, share in costs.items())
  )
  return figure


CLAIM = claims.Claim(
  name="straggler",
  title="One slow worker, with and without a backup",
  claim=(
    "with one backup replica, a worker that is 5 times slower costs less than"
    " 15% of the step rate; without a backup, every step waits for it"
  ),
  source="Chen et al. 2016, section 3",
  explanation=(
    "Each bar is a training of inception_mini on 2 parameter servers and 3"
    " workers, all real processes. If an update needs the gradients of all 3"
    " workers, it takes as long as the slowest worker. If it needs the first"
    " 2, the gradients of the slow worker come too late. They are refused, and"
    " no other worker waits for them. The slow worker may run for a fifth of"
    " the time of the others. But all share the cores of one machine, so it was"
    " not slower by so much: where updates wait for all, it was busy about 3"
    " times as long per update. The last number of the table expects 5 times,"
    " and is outside its bounds for this reason."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
