"""Measures how several parameter servers (PS) share the traffic.

  python -m experiments.claims.sharding [--quick]
    [--num_seeds=1] [--output=DIR]

Trains the CIFAR-10 network on real clusters of 1, 2 and 4 PS and 2 workers on
this machine, once with whole variables, and once with large variables cut into
pieces of 64 KiB or more. For comparison, it trains in one process that holds
the variables on its own CPU. Counts the bytes of every connection (needs `ss`).
"""

import tempfile
from collections.abc import Sequence

from experiments.support import claims
from experiments.support import programs
from experiments.support import traffic

WORKERS = 2
BATCH_SIZE = 16
# The weights of the first fully connected layer.
LARGEST = 4 * 2304 * 384
_WARM_UP_STEPS = 10
# (PS tasks, how the variables are dealt to them)
_SETTINGS = (
  (1, "greedy"),
  (2, "greedy"),
  (2, "partitioned"),
  (4, "greedy"),
  (4, "partitioned"),
)
_QUICK_SETTINGS = _SETTINGS[:3]
_ONE_PROCESS = "one process"


def _name(num_ps: int, placement: str) -> str:
  return f"{num_ps} PS" if num_ps == 1 else f"{num_ps} PS, {placement}"


def run(num_ps: int, placement: str, num_steps: int) -> dict:
  """Trains on a cluster, and returns step rate and bytes per step of each PS.

  Args:
    num_ps: The number of PS tasks (parameter servers).
    placement: How the variables are placed on them: `greedy` (whole) or
      `partitioned` (large ones are cut).
    num_steps: The number of steps that are measured.
  """
  last = _WARM_UP_STEPS + num_steps
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(
      directory, ps=num_ps, workers=WORKERS, placement=placement
    )
    measured = traffic.measure(
      [
        f"--cluster_spec={spec}",
        f"--train_dir={directory}/run",
        "--dataset=synthetic",
        f"--batch_size={BATCH_SIZE}",
        # Some more, for all tasks must be there when it is looked at.
        f"--max_steps={last + 10}",
        "--log_every_steps=1",
      ],
      first=_WARM_UP_STEPS,
      last=last,
    )
  return {
    "steps_per_sec": measured.steps_per_sec,
    "ps_bytes": [measured.of(f"ps {task}") for task in range(num_ps)],
    "worker_bytes": measured.bytes_per_step.get(("worker 0", "worker 1"), 0),
  }


def run_one_process(num_steps: int) -> float:
  """Returns the steps per second of a training in one process.

  It uses as many examples per step as the clusters, and has the variables on
  its CPU.

  Args:
    num_steps: The number of steps that are measured.
  """
  with tempfile.TemporaryDirectory() as directory:
    output = programs.output(
      "cifar10.multi_gpu_train",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      f"--num_gpus={WORKERS}",
      "--emulate_gpus",
      f"--batch_size={BATCH_SIZE}",
      f"--max_steps={_WARM_UP_STEPS + num_steps}",
      f"--log_every_steps={_WARM_UP_STEPS}",
    )
  return programs.step_rate(programs.logged(output)[1:])


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with all numbers of PS tasks and placements, and in one process.

  With `is_quick`, it uses 1 and 2 PS tasks only, and fewer steps. `seed` is not
  used. The result maps the name of each setting to the result of `run`.
  """
  del seed
  num_steps = 30 if is_quick else 60
  settings = _QUICK_SETTINGS if is_quick else _SETTINGS
  measured = {_name(*setting): run(*setting, num_steps) for setting in settings}
  measured[_ONE_PROCESS] = {
    "steps_per_sec": run_one_process(num_steps),
    "ps_bytes": [],
  }
  return measured


def busiest(measurement: dict, num_ps: int, placement: str) -> float:
  """Returns the traffic of the busiest PS task, as a share of a single one's.

  Args:
    measurement: The result of `measure`.
    num_ps: The number of PS tasks.
    placement: How the variables are placed on them.
  """
  alone = measurement[_name(*_SETTINGS[0])]["ps_bytes"]
  return max(measurement[_name(num_ps, placement)]["ps_bytes"]) / alone[0]


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  # Every parameter to every worker, and every gradient back.
  must_be = 2 * WORKERS * traffic.PARAMETER_BYTES
  names = [n for n in measurements[0] if n != _ONE_PROCESS]
  findings = [
    claims.Finding(
      f"bytes per step of all PS tasks, divided by what must be sent: {name}",
      [sum(m[name]["ps_bytes"]) / must_be for m in measurements],
      least=0.98,
      most=1.05,
    )
    for name in names
  ]
  for num_ps in (2, 4):
    if _name(num_ps, "greedy") not in names:
      continue
    findings += [
      claims.Finding(
        f"bytes of the busiest of {num_ps} PS tasks, divided by those of a"
        " single one: large variables cut",
        [busiest(m, num_ps, "partitioned") for m in measurements],
        most=1.1 / num_ps,
      ),
      claims.Finding(
        f"the same for {num_ps} PS tasks, whole variables",
        [busiest(m, num_ps, "greedy") for m in measurements],
        least=0.95 * LARGEST / traffic.PARAMETER_BYTES,
      ),
    ]
  single = names[0]
  findings += [
    claims.Finding(
      f"steps per second, divided by those with {single}: {name}",
      [
        m[name]["steps_per_sec"] / m[single]["steps_per_sec"]
        for m in measurements
      ],
    )
    for name in (*names[1:], _ONE_PROCESS)
  ]
  return findings


def draw(measurements: Sequence[dict]):
  """Draws the bytes per step of each parameter server, and the step rates."""
  figure, (left, right) = claims.new_figure(9, 3.6, ncols=2, sharey=True)
  names = list(measurements[0])
  for row, name in enumerate(names):
    begin = 0.0
    for task in range(len(measurements[0][name]["ps_bytes"])):
      loads = [m[name]["ps_bytes"][task] / 1e6 for m in measurements]
      width = sum(loads) / len(loads)
      left.barh(
        row,
        width,
        left=begin,
        height=0.6,
        color=claims.COLORS[task],
        edgecolor="white",
        label=f"PS {task}" if name == names[-2] else None,
      )
      begin += width
    rates = [m[name]["steps_per_sec"] for m in measurements]
    right.barh(row, sum(rates) / len(rates), height=0.6, color="#777777")
    if len(rates) > 1:
      right.plot(rates, [row] * len(rates), "k.", markersize=4)
  left.set_yticks(range(len(names)), names)
  left.invert_yaxis()
  left.set_xlabel("MB per step, in and out")
  left.set_title(
    "Traffic (greedy: whole variables; partitioned: large ones are cut)",
    fontsize="small",
  )
  # Beside the last row, which has no bar.
  left.legend(fontsize="x-small", loc="lower left", ncols=4)
  right.set_xlabel("updates per second, all on this machine")
  right.set_title("Speed", fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="sharding",
  title="Several parameter servers share the traffic, if variables are cut",
  claim=(
    "if large variables are cut into pieces, each of k parameter servers"
    " carries 1/k of the traffic; if variables are whole, the server of the"
    " largest variable carries all of its traffic"
  ),
  source="Dean et al. 2012, section 4.1; TF1 `fixed_size_partitioner`",
  explanation=(
    "The left plot shows what each parameter server sends and receives in a"
    " step of two workers, counted on its connections. Every parameter is sent"
    " to every worker, and every worker sends its gradient. Most of this"
    " network is one matrix, so if it is not cut, more servers help little."
    " The right plot shows the step rate on this machine, where all servers"
    " share two cores and no link is slow. In one process, nothing is sent."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
