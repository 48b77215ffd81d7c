"""Makes the tables of README and docs that come from stored benchmarks.

`experiments.tables` writes them into the pages. Each public function reads
files of `experiments/results/`, and returns the lines of a table in Markdown.
"Median (smallest to largest)" is over the rounds of a benchmark.
"""

import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import bandwidth_kinds
from benchmarks import ratios

_RESULTS = (
  pathlib.Path(__file__).resolve().parents[1] / "experiments" / "results"
)
_CORES = 2
_ONE = "a single process"
_TF1 = "TF1 SyncReplicasOptimizer"
_STRATEGY = "ParameterServerStrategy"
_MIRRORED = "MultiWorkerMirroredStrategy"
# The networks of `benchmarks.bandwidth`.
_NETWORKS = {
  "cifar10": "tutorial's network",
  "inception_mini": "`inception_mini`",
}


def _read(name: str) -> Any:
  path = _RESULTS / f"{name}.json"
  return json.loads(path.read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """Returns the lines of a table."""
  lines = [head, ["---"] * len(head), *rows]
  return ["| " + " | ".join(map(str, row)) + " |" for row in lines]


def _interval(values: Sequence[float], digits: int = 2) -> str:
  """Formats the geometric mean of ratios, and its 95% interval."""
  return _in_words(ratios.interval(values), digits)


def _in_words(interval: Sequence[float], digits: int) -> str:
  """Formats a mean and the ends of its interval."""
  mean, low, high = (f"{x:.{digits}f}" for x in interval)
  return f"{mean} ({low} to {high})"


def _goal(goal: float, found: Sequence[float]) -> str:
  """Names a goal, and says whether it was reached.

  A goal is reached or missed if the whole 95% interval of the geometric mean
  over the rounds is above or below it.

  Args:
    goal: The least ratio.
    found: The ratio of each round.
  """
  _, low, high = ratios.interval(found)
  words = "reached" if low >= goal else "missed" if high < goal else "not shown"
  return f"Goal {goal}: **{words}**"


def _three_digits(value: float) -> str:
  """Formats a number with three significant digits."""
  return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


# How fast a training step could be.

_FLOORS = {"synchronous": "floor", "asynchronous": "floor_async"}
_PARTS = ("time", "processor time", "cores idle")
_KINDS = ("between-graph", "in-graph")


def floor() -> list[str]:
  """Returns how long the parts of a step take (`benchmarks.floor`)."""
  medians = [_read(result)["medians"] for result in _FLOORS.values()]
  names = {
    "one process": "one process, with updates and moving averages",
    "computing": "2 processes that compute gradients, and send nothing",
  }
  for kind in _KINDS:
    names |= {
      f"training, {kind}": f"training, {kind}",
      f"transferring, {kind}": f"the same cluster without computing, {kind}",
      f"floor, {kind}": f"floor, {kind}",
    }
  return _table(
    ["", *(f"{rule}: {what}" for rule in _FLOORS for what in _PARTS)],
    [
      [words, *itertools.chain(*(_times(kinds[name]) for kinds in medians))]
      for name, words in names.items()
    ],
  )


def _times(found: Mapping[str, float]) -> list[str]:
  """Formats the times of a step, and how much of it the cores are idle."""
  idle = 1 - found["cpu_millis"] / (_CORES * found["millis"])
  return [
    f"{found['millis']:.1f} ms",
    f"{found['cpu_millis']:.1f} ms",
    f"{idle:.0%}",
  ]


def floor_ratios() -> list[str]:
  """Returns how near training comes to its floor (`benchmarks.floor`)."""
  rows = []
  for rule, result in _FLOORS.items():
    data = _read(result)
    for kind in _KINDS:
      training, lowest = f"training, {kind}", f"floor, {kind}"
      found = [
        turn[lowest]["millis"] / turn[training]["millis"]
        for turn in data["rounds"]
      ]
      spreads = [
        ratios.spread_in_words(data["ratios_of_rates"][f"{one} / {other}"])
        for one, other in (
          (training, lowest),
          (training, "one process"),
          (lowest, "one process"),
        )
      ]
      spreads[0] += f". {_goal(0.97, found)}"
      rows.append([f"{rule}, {kind}", *spreads])
  return _table(
    ["", "training / floor", "training / one process", "floor / one process"],
    rows,
  )


# Limited bandwidth.


def _rounds(data: Mapping, network: str, rate: str) -> list[dict[str, Any]]:
  """Returns what each round measured, by kind, at one rate of the links."""
  return [
    {name: turns[rate] for name, turns in found.items()}
    for found in data["networks"][network]["rounds"]
  ]


def _images(rounds: Sequence[Mapping], name: str) -> list[float]:
  return [turns[name]["images_per_sec"] for turns in rounds]


def bandwidth() -> list[str]:
  """Returns the rates of all kinds of training (`benchmarks.bandwidth`)."""
  data = _read("bandwidth")
  other = data["other_commit"]
  names = {
    "between-graph": "synchronous, between-graph",
    "in-graph": "synchronous, in-graph",
    "between-graph bfloat16": "between-graph, bfloat16 on the wire",
    "in-graph bfloat16": "in-graph, bfloat16 on the wire",
    "between-graph PS beside": "between-graph, 2 PS, one beside each worker",
    "between-graph PS beside bfloat16": "the same, bfloat16 on the wire",
    "between-graph commit": f"between-graph at commit {other}",
    "in-graph commit": f"in-graph at commit {other}",
    _TF1: "TF1's `SyncReplicasOptimizer`",
    _MIRRORED: f"`{_MIRRORED}` (ring all-reduce)",
    "async between-graph": "asynchronous, between-graph",
    "async in-graph": "asynchronous, in-graph",
    "async between-graph bfloat16": (
      "asynchronous, between-graph, bfloat16 on the wire"
    ),
    "async in-graph bfloat16": "asynchronous, in-graph, bfloat16 on the wire",
    _STRATEGY: f"`{_STRATEGY}` (asynchronous)",
  }
  columns = [(n, r) for n in _NETWORKS for r in ("1000", "200", "50")]
  return _table(
    ["", *(f"{_NETWORKS[network]}, {rate}" for network, rate in columns)],
    [
      [
        words,
        *(
          _three_digits(
            statistics.median(_images(_rounds(data, network, rate), name))
          )
          for network, rate in columns
        ),
      ]
      for name, words in names.items()
    ],
  )


def least_time() -> list[str]:
  """Returns the time of a step, divided by the least (`benchmarks.bandwidth`).

  With 200 Mbit/s, and synchronous training with one PS task.
  """
  data = _read("bandwidth")

  def cell(network, name):
    shares = bandwidth_kinds.shares_of_least_time(
      _rounds(data, network, "200"), name, _network(data, network), 200
    )
    return ratios.in_words(shares)

  return _table(
    ["step / least time", *_NETWORKS.values()],
    [
      [f"{kind}, {dtype}", *(cell(n, kind + suffix) for n in _NETWORKS)]
      for dtype, suffix in (("float32", ""), ("bfloat16", " bfloat16"))
      for kind in ("between-graph", "in-graph")
    ],
  )


def _network(data: Mapping, name: str) -> bandwidth_kinds.Network:
  found = data["networks"][name]
  return bandwidth_kinds.Network(found["parameters"], found["batch"])


def overlap() -> list[str]:
  """Returns what packs of limited size have changed (`results/overlap.json`).

  With 200 Mbit/s, for `inception_mini`, between-graph.
  """
  data = _read("overlap")
  rounds = _rounds(data, "inception_mini", "200")
  network = _network(data, "inception_mini")

  def least(name):
    if name.startswith("async"):
      return ""
    return ratios.in_words(
      bandwidth_kinds.shares_of_least_time(rounds, name, network, 200)
    )

  return _table(
    [
      "",
      f"rate / rate at commit {data['other_commit']}",
      "step / least time",
      f"the same at commit {data['other_commit']}",
    ],
    [
      [
        words,
        ratios.in_words(_quotients(rounds, name, f"{name} commit")),
        least(name),
        least(f"{name} commit"),
      ]
      for name, words in {
        "between-graph": "synchronous, float32",
        "between-graph bfloat16": "synchronous, bfloat16 on the wire",
        "async between-graph": "asynchronous, float32",
      }.items()
    ],
  )


def _quotients(
  rounds: Sequence[Mapping], first: str, second: str
) -> list[float]:
  """Divides the rates of two kinds of training in each round."""
  return [
    one / other
    for one, other in zip(
      _images(rounds, first), _images(rounds, second), strict=True
    )
  ]


def bandwidth_peers() -> list[str]:
  """Compares with peers and an earlier commit (`benchmarks.bandwidth`).

  With 200 Mbit/s.
  """
  data = _read("bandwidth")
  sync, bf16 = "between-graph", "between-graph bfloat16"
  beside = "between-graph PS beside"
  rows = [
    ("ours, between-graph / TF1's `SyncReplicasOptimizer`", sync, _TF1),
    ("ours, in-graph / TF1's `SyncReplicasOptimizer`", "in-graph", _TF1),
    (
      "ours, between-graph, with bfloat16 on the wire / TF1's"
      " `SyncReplicasOptimizer`, which can send only float32",
      *(bf16, _TF1),
    ),
    (
      f"`{_MIRRORED}` / ours, between-graph, PS on a host of its own",
      *(_MIRRORED, sync),
    ),
    (
      f"ours, between-graph, 2 PS, one beside each worker / `{_MIRRORED}`",
      *(beside, _MIRRORED),
    ),
    ("the same, ours with bfloat16", f"{beside} bfloat16", _MIRRORED),
    (
      "ours, between-graph, 2 PS, one beside each worker / ours with one PS on"
      " a host of its own",
      *(beside, sync),
    ),
    (
      f"ours, between-graph / the same at commit {data['other_commit']}",
      *(sync, f"{sync} commit"),
    ),
    (
      f"ours, in-graph / the same at commit {data['other_commit']}",
      *("in-graph", "in-graph commit"),
    ),
  ]
  for kind in ("between-graph", "in-graph"):
    for words, suffix in (("", ""), (" with bfloat16", " bfloat16")):
      rows.append(
        (
          f"ours, asynchronous, {kind}{words} / `{_STRATEGY}`",
          f"async {kind}{suffix}",
          _STRATEGY,
        )
      )

  def cell(network: str, first: str, second: str) -> str:
    found = _quotients(_rounds(data, network, "200"), first, second)
    text = ratios.in_words(found)
    if second == f"{first} commit":
      text += f". {_goal(1.3, found)}"
    return text

  return _table(
    ["first / second", *_NETWORKS.values()],
    [
      [what, *(cell(network, first, second) for network in _NETWORKS)]
      for what, first, second in rows
    ],
  )


# Scale.


def scale() -> list[str]:
  """Returns the costs of a step by the number of tasks (`benchmarks.scale`)."""
  rows = []
  for found in _read("scale")["clusters"]:
    used = found["cpu_secs_per_step"]
    times = [found["secs_per_step"], used["chief"], used["other_worker"]]
    rows.append(
      [
        found["ps"],
        found["workers"],
        *(f"{1e3 * secs:.2f}" for secs in (*times, used["ps_0"])),
        f"{max(found['mib'].values()):.0f} MiB",
      ]
    )
  return _table(
    [
      "PS tasks",
      "workers",
      "time of a step in ms",
      "processor time in ms: chief",
      "another worker",
      "the first PS task",
      "largest task",
    ],
    rows,
  )


# Tables with many rows.


def embedding() -> list[str]:
  """Returns the updates per second of `benchmarks.embedding`."""
  rounds = _read("embedding")["updates_per_sec"]
  return _table(
    ["", "updates per second: median (smallest to largest)"],
    [
      [words, _whole_range([r[name] for r in rounds])]
      for name, words in {
        "asynchronous": "asynchronous, one batch per update",
        "strategy": f"`{_STRATEGY}`, one batch per update",
        "one process": "one process with both cores, one batch per update",
        "synchronous": "synchronous, two batches per update",
        "TF1": "TF1's `SyncReplicasOptimizer`, two batches per update",
      }.items()
    ],
  )


def _whole_range(values: Sequence[float]) -> str:
  at = ratios.spread(values)
  return f"{at['median']:.0f} ({at['min']:.0f} to {at['max']:.0f})"


def embedding_ratios() -> list[str]:
  """Returns the ratios of `benchmarks.embedding`."""
  document = _read("embedding")
  rounds, commit = document["updates_per_sec"], document["other_commit"]

  def quotients(first, second):
    return [r[first] / r[second] for r in rounds]

  against = quotients("asynchronous", "strategy")
  updates = quotients("synchronous", "asynchronous")
  goals = [_goal(1.2, against), _goal(0.7, updates)]
  return _table(
    ["ratio", "geometric mean over the rounds (95% interval)"],
    [
      [f"asynchronous / `{_STRATEGY}`. {goals[0]}", _interval(against)],
      [
        "asynchronous / one process",
        _interval(quotients("asynchronous", "one process")),
      ],
      [
        "synchronous / TF1's `SyncReplicasOptimizer`",
        _interval(quotients("synchronous", "TF1")),
      ],
      [
        f"synchronous / asynchronous, by updates. {goals[1]}",
        _interval(updates),
      ],
      [
        "the same by examples, since a synchronous update has two batches",
        _interval([2 * quotient for quotient in updates]),
      ],
      *(
        [
          f"{kind} / the same at commit {commit}",
          _interval(quotients(kind, f"{kind} at the commit")),
        ]
        for kind in ("asynchronous", "synchronous")
      ),
    ],
  )


def embedding_cpu() -> list[str]:
  """Returns the processor time of each task in `benchmarks.embedding`."""
  rounds = _read("embedding")["cpu_ms_per_update"]
  head = ["", "PS 0", "PS 1", "worker 1", "worker 0", "chief", "in all"]
  tasks = ["ps 0", "ps 1", "worker 1", "worker 0", "chief 0"]
  rows = []
  for name, words in {
    "asynchronous": "asynchronous, one batch per update",
    "synchronous": "synchronous, two batches per update",
    "strategy": f"`{_STRATEGY}`, one batch",
    "TF1": "TF1's `SyncReplicasOptimizer`, two batches",
    "one process": "one process, one batch",
  }.items():
    used = {
      task: statistics.median(r[name][task] for r in rounds)
      for task in rounds[0][name]
    }
    cells = [f"{used[task]:.1f}" if task in used else "" for task in tasks]
    rows.append([words, *cells, f"{sum(used.values()):.1f}"])
  return _table(head, rows)


# Before and now.


def before_and_now() -> list[str]:
  """Compares with commit 0490651 (`benchmarks.against_commit`)."""
  rounds = _read("against_0490651")["rounds"]
  return _table(
    ["what", "rounds", "ratio"],
    [
      [
        words,
        len(rounds[name]),
        _interval([r["this"] / r["other"] for r in rounds[name]], digits=3),
      ]
      for name, words in {
        "between_graph": ("examples/sec of the CIFAR-10 binary, between-graph"),
        "in_graph": "the same, in-graph",
        "small_between_graph": "steps/sec of a small model, between-graph",
        "small_in_graph": "the same, in-graph",
      }.items()
    ],
  )


# Other speeds.


def _command(data: Mapping[str, Any]) -> str:
  """Returns the stored command without `--output`, and its date."""
  words = [w for w in data["command"].split() if not w.startswith("--output")]
  processor = data["machine"].split(",")[0]
  return f"`{' '.join(words)}` ({data['date'][:10]}, {processor})"


class _Ratios:
  """The stored ratios of a benchmark.

  Attributes:
    data: The content of its file.
  """

  def __init__(self, name: str):
    self.data = _read(name)

  def of(self, first: str, second: str) -> str:
    """Formats the ratio of two rates."""
    return ratios.spread_in_words(self.data["ratios"][f"{first} / {second}"])

  def both(self, second: str, suffix: str = "") -> str:
    """Formats the ratios of both drivers to another rate."""
    return ", ".join(
      f"{kind} {self.of(kind + suffix, second)}"
      for kind in ("between-graph", "in-graph")
    )

  def goal(self, goal: float, first: str, second: str) -> str:
    """Names a goal of a ratio, and says whether it was reached."""
    rounds = self.data.get("rounds") or self.data["steps_per_sec"]
    return _goal(goal, [rates[first] / rates[second] for rates in rounds])

  def median(self, first: str, second: str) -> float:
    return self.data["ratios"][f"{first} / {second}"]["median"]

  def rate(self, name: str) -> str:
    return f"{self.data['examples_per_sec'][name]['median']:,.0f}/s"


def other_speeds() -> list[str]:
  """Returns the ratios of the benchmarks that have no table of their own."""
  rows = [
    row
    for part in (_asynchronous, _small_model, _one_machine, _parts)
    for row in part()
  ]
  return _table(["what", "command", "rounds", "result"], rows)


def _asynchronous() -> Iterable[list[object]]:
  found = _Ratios("throughput_async")
  command, count = _command(found.data), len(found.data["rounds"])
  yield [
    "Asynchronous, 2 workers with batches of 128, so that an update has as many"
    " images as an update of one process: examples/sec, divided by those of one"
    f" process with both cores and batches of 128 ({found.rate(_ONE)})."
    f" {found.goal(0.85, 'between-graph', _ONE)}",
    command,
    count,
    found.both(_ONE),
  ]
  normal = "with our normalization"
  yield [
    "The same examples/sec, divided by those of TensorFlow's own asynchronous"
    f" training: `{_STRATEGY}`, `ClusterCoordinator` and Keras, as in its"
    " tutorial, without moving averages."
    f" {found.goal(1.2, 'between-graph', _STRATEGY)}",
    "the same",
    count,
    found.both(_STRATEGY),
  ]
  yield [
    "The same, if TensorFlow uses our local response normalization (LRN)."
    f" {found.goal(1.1, 'between-graph', normal)}",
    "the same",
    count,
    found.both(normal),
  ]
  yield [
    "The same, if TensorFlow also fetches each variable only once per step",
    "the same",
    count,
    found.both("and reading once"),
  ]


def _small_model() -> Iterable[list[object]]:
  found = _Ratios("small_model")
  millis = found.data["millis_per_step"][_TF1]
  for what, suffix, command in (
    (
      "Small model, ten updates per call, as the programs make them between two"
      " log lines: steps/sec, divided by those of TF1's `SyncReplicasOptimizer`"
      f" ({millis['min']:.1f} to {millis['max']:.1f} ms per step)."
      f" {found.goal(1.5, 'between-graph', _TF1)}",
      "",
      _command(found.data),
    ),
    (
      "The same with one update per call, as with `--log_every_steps=1`",
      ", one per call",
      "the same",
    ),
  ):
    yield [
      what,
      command,
      len(found.data["steps_per_sec"]),
      found.both(_TF1, suffix),
    ]


def _one_machine() -> Iterable[list[object]]:
  found = _Ratios("one_machine")
  command, count = _command(found.data), len(found.data["rounds"])
  yield [
    "One machine, batches of 128: examples/sec of two towers, divided by those"
    f" of one device on the same cores ({found.rate('one device')})",
    command,
    count,
    found.of("towers", "one device"),
  ]
  yield [
    "Examples/sec of one device, divided by those of `keras.Model.fit`",
    "the same",
    count,
    f"{found.of('one device', 'fit')} against Keras without XLA, which may be"
    " due to TensorFlow's slower LRN;"
    f" {found.of('one device', 'fit auto')} against its default,"
    ' `jit_compile="auto"`',
  ]
  yield [
    "Examples/sec of two towers of 64 images, divided by those of TensorFlow's"
    " strategies on the same devices, with our LRN and moving averages. For"
    " `CentralStorageStrategy`:"
    f" {found.goal(1.0, 'towers', 'CentralStorageStrategy').lower()}",
    "the same",
    count,
    f"`CentralStorageStrategy` {found.of('towers', 'CentralStorageStrategy')},"
    f" `MirroredStrategy` {found.of('towers', 'MirroredStrategy')}",
  ]
  alone = "input on one core"
  yield [
    "Examples/sec of the input pipeline alone, on one core, divided by those of"
    " the training on one device",
    "the same",
    count,
    f"{1 / found.median('one device', alone):.0f} ({found.rate(alone)})",
  ]


def _parts() -> Iterable[list[object]]:
  shares = _read("normalization")
  parts = [
    f"{words} {at['median']:.1%} ({at['min']:.1%} to {at['max']:.1%})"
    for words, at in (
      ("ours", shares["share_of_normalization"]["ours"]),
      ("TensorFlow's", shares["share_of_normalization"]["TensorFlow's"]),
    )
  ]
  yield [
    "Share of LRN in the time of a gradient step",
    _command(shares),
    len(shares["millis_per_step"]["ours"]),
    ", ".join(parts),
  ]
  found = _Ratios("timeline")
  yield [
    "`--timeline`: examples/sec with it, divided by those without",
    _command(found.data),
    len(found.data["examples_per_sec"]),
    found.of("with a timeline", "without"),
  ]
  rows = _read("pipeline")
  split = rows["cifar10"]
  yield [
    "Two stages on two devices, with one thread per operation: examples/sec,"
    " divided by those of the same network on one device",
    _command(rows),
    len(split["unsplit"]["examples_per_sec"]),
    ", ".join(
      f"{name} {ratios.spread_in_words(row['ratio'])}"
      for name, row in split.items()
      if name != "unsplit"
    ),
  ]
  yield [
    "The same on devices that wait for fixed times instead of computing (and"
    " what is possible at most)",
    "the same",
    len(split["unsplit"]["examples_per_sec"]),
    ", ".join(
      f"{name} {row['ratio']['median']:.2f} ({row['at_most']:.2f})"
      for name, row in rows["fixed_speed"].items()
      if name.startswith("2 ") and " 1 " not in name
    ),
  ]


# Links in both directions.


def two_way() -> list[str]:
  """Returns what a link carries in both directions (`benchmarks.two_way`)."""
  rows = []
  senders = {"one way": "the server", "two ways": "both sides"}
  for name, found in _read("two_way")["share_of_rate"].items():
    clients, ways = name.split(", ")
    cells = [
      ratios.in_words(found[where]) if max(found[where]) else "nothing is sent"
      for where in ("at_clients", "at_server")
    ]
    rows.append([clients.split()[0], senders[ways], *cells])
  head = ["connections", "who sends", "at the clients", "at the server"]
  return _table(head, rows)


# Lost updates.


def lost_updates() -> list[str]:
  """Returns what updates without locks lose (`benchmarks.lost_updates`)."""
  data = _read("lost_updates")
  rows = []
  for name, words in {
    "sgd": "gradient descent",
    "momentum": "momentum",
    "adam": "Keras' Adam",
  }.items():
    shares = {
      how: [
        max(map(round, run[f"{name}, {how}"].values())) / data["updates"]
        for run in data["lost_updates"]
      ]
      for how in ("locking", "no locking")
    }
    rows.append(
      [
        words,
        *(
          f"{min(found):.1%} to {max(found):.1%}" if max(found) else "none"
          for found in shares.values()
        ),
      ]
    )
  return _table(["optimizer", "with `--use_locking`", "without"], rows)


# Traffic.

_WIRE = {
  "--steps=30": "between-graph",
  "--steps=20 --replication=in_graph": "in-graph",
  "--steps=20 --ps=2 --workers=3 --replicas_to_aggregate=2": (
    "2 PS, 3 workers, one of them a backup"
  ),
  "--steps=40 -- --wire_dtype=bfloat16": "bfloat16 on the wire",
  "--steps=40 -- --wire_dtype=bfloat16 --update=async": (
    "the same, asynchronous"
  ),
  "--steps=300 -- --update=async": "asynchronous",
  "--steps=300 -- --update=async --refresh_every=4": (
    "asynchronous, variables refreshed every 4 steps"
  ),
}


def _wire() -> dict[str, list[dict[str, Any]]]:
  """Returns the runs of `benchmarks.wire` by their arguments."""
  runs: dict[str, list[dict[str, Any]]] = {}
  for run in _read("wire")["runs"]:
    words = run["command"].split()[3:]
    kept = [word for word in words if not word.startswith("--output")]
    runs.setdefault(" ".join(kept), []).append(run)
  return runs


def _range(values: Sequence[float], digits: int = 2) -> str:
  low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
  return low if low == high else f"{low} to {high}"


def traffic() -> list[str]:
  """Returns the bytes on the connections of the PS (`benchmarks.wire`)."""
  rows, runs_by_arguments = [], _wire()
  for arguments, words in _WIRE.items():
    runs = runs_by_arguments[arguments]
    rows.append(
      [
        words,
        f"`python -m benchmarks.wire {arguments}`",
        len(runs),
        _range([run["from_ps_to_all_workers"] for run in runs]),
        _range([run["from_all_workers_to_ps"] for run in runs]),
        _range([_elsewhere(run) for run in runs], digits=3),
      ]
    )
  head = ["", "command", "runs", "out", "in", "all other connections"]
  return _table(head, rows)


def _elsewhere(run: Mapping[str, Any]) -> float:
  """Returns the share of bytes that pass between other tasks."""
  return sum(
    share
    for name, share in run["share_of_parameter_bytes"].items()
    if {name.split()[0], name.split()[-2]} != {"ps", "worker"}
  )


def _each_way() -> str:
  """Returns the range of the connections of a worker, between-graph."""
  return _range(
    [
      share
      for run in _wire()["--steps=30"]
      for share in run["share_of_parameter_bytes"].values()
    ]
  )


# README.


def readme() -> list[str]:
  """Returns the medians of the most important ratios."""
  sync, later = _Ratios("throughput_sync"), _Ratios("throughput_async")
  small, one = _Ratios("small_model"), _Ratios("one_machine")
  kind, normal = "between-graph", "with our normalization"
  rows = [
    (
      "Synchronous, 2 workers: examples/sec against one process with both"
      " cores",
      f"{sync.median(kind, _ONE):.2f};"
      f" in-graph {sync.median('in-graph', _ONE):.2f}",
      "throughput",
    ),
    (
      "Asynchronous, 2 workers: the same",
      f"{later.median(kind, _ONE):.2f};"
      f" in-graph {later.median('in-graph', _ONE):.2f}",
      "throughput --update=async",
    ),
    (
      f"Asynchronous: examples/sec against TensorFlow's `{_STRATEGY}`",
      f"{later.median(kind, _STRATEGY):.2f}; {later.median(kind, normal):.2f}"
      " if it uses our faster local response normalization too",
      "throughput --update=async",
    ),
    (
      "Small model: steps/sec against TF1's `SyncReplicasOptimizer`",
      f"{small.of(kind, _TF1)} if one call makes ten updates,"
      f" {small.of(kind + ', one per call', _TF1)} if it makes one",
      "small_model",
    ),
    (
      "One device, ours without XLA: examples/sec against `keras.Model.fit`",
      f"{one.median('one device', 'fit'):.2f} if Keras has no XLA either (its"
      " local response normalization is slower);"
      f" {one.median('one device', 'fit auto'):.2f} with XLA, Keras' default",
      "one_machine",
    ),
    (
      "Bytes per step between one worker and the parameter server, divided by"
      " the size of the parameters",
      f"{_each_way()} each way",
      "wire --steps=30",
    ),
  ]
  return _table(
    ["what", "ratio", "command"],
    [
      [what, ratio, f"`python -m benchmarks.{command}`"]
      for what, ratio, command in rows
    ],
  )


# Faults.


# The number of rounds, and the largest difference of equivalent trainings.
_ROUNDS, _MARGIN = 10, 0.05


def of_losses(
  kinds: Mapping[str, Sequence[Mapping[str, Any]]], untrained: float
) -> list[str]:
  """Returns a table of what `benchmarks.equivalence` has found.

  Args:
    kinds: The rounds of each kind of training.
    untrained: The loss of the untrained network.
  """
  rows = []
  for kind, rounds in kinds.items():
    plain = [pair["undisturbed"] for pair in rounds]
    faults = [pair["with_fault"] for pair in rounds]
    row = [kind.replace("_", "-").replace("/", ", "), len(rounds)]
    row += [f"{statistics.mean(losses):.3f}" for losses in (plain, faults)]
    if len(rounds) >= _ROUNDS:
      learned = [[untrained - x for x in losses] for losses in (faults, plain)]
      found = ratios.of_means(*learned)
      row += [f"{statistics.mean(learned[1]):.3f}"]
      is_within = 1 - _MARGIN <= found[1] and found[2] <= 1 + _MARGIN
      row += [_in_words(found, 4), "yes" if is_within else "no"]
    else:
      row += ["too few rounds", "", ""]
    rows.append(row)
  head = [
    *["driver, rule", "rounds", "mean loss undisturbed", "with a fault"],
    *["learned, undisturbed", "ratio with a fault (95% interval)"],
    f"within {_MARGIN:.0%}",
  ]
  return _table(head, rows)


def equivalence() -> list[str]:
  """Returns the losses with and without faults (`benchmarks.equivalence`)."""
  result = _read("equivalence")
  return of_losses(result["kinds"], result["untrained"])


def _blocks() -> list[list[str]]:
  text = (_RESULTS / "faults.md").read_text(encoding="utf-8")
  return [block.splitlines() for block in text.split("\n\n")]


def fault_runs() -> list[str]:
  """Returns how many cells `benchmarks.fault_matrix` has run."""
  return _blocks()[0]


def faults() -> list[str]:
  """Returns what `benchmarks.fault_matrix` has found, by role and fault."""
  return _blocks()[1]
