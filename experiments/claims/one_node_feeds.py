"""Measures what it costs if one node hands out the data to all workers.

  python -m experiments.claims.one_node_feeds [--quick]
    [--num_seeds=2] [--output=DIR]

TF1's in-graph examples read the data in the client and fed them to the workers.
Here one client drives 1, 2 and 4 workers, each a process of its own, by one
graph (a `tf.function`). A worker computes the gradient of a convolution for a
batch. The batches are made either in the client or in each worker: the graphs
differ only in the device of these operations. Measures the bytes that the
client sends (needs `ss`), and the steps per second. Both are measured in turns
on the same processes. All tasks are on the loopback device; then each is a host
of its own in a private network with links of 1 Gbit/s, which needs root.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence

from experiments.support import claims
from experiments.support import programs
from tf_replicas.cluster import private_network

WORKERS = (1, 2, 4)
_LINK_MBIT = 1000.0
_ON_LINKS = ", links of 1 Gbit/s"
PLACES = ("client", "workers")
BATCH_SHAPE = (64, 32, 32, 3)
# float32.
BATCH_BYTES = 4 * 64 * 32 * 32 * 3


def measure(is_quick: bool, seed: int) -> dict:
  """Makes steps with the data of the client and with those of the workers.

  With `is_quick`, it uses 2 workers on the loopback device only, and a shorter
  time. `seed` is not used. The result maps the number of workers, with the
  links if they are limited, to `steps_per_sec` and `client_bytes`, the bytes
  that the client sends per step, for each of `PLACES`.
  """
  del seed
  found = {}
  has_links = not is_quick and private_network.obstacle() is None
  for mbit, suffix in ((None, ""), (_LINK_MBIT, _ON_LINKS))[: 1 + has_links]:
    for workers in (2,) if is_quick else WORKERS:
      with tempfile.TemporaryDirectory() as directory:
        programs.run_tasks(
          "experiments.claims.one_node_feeds_task",
          [2.0 if is_quick else 8.0],
          document={
            "ps": ["localhost:0"] * workers,
            "worker": ["localhost:0"],
          },
          directory=directory,
          mbit_per_sec=mbit,
        )
        path = pathlib.Path(directory, "found.json")
        found[f"{workers}{suffix}"] = json.loads(
          path.read_text(encoding="utf-8")
        )
  return found


def _count_of(name: str) -> int:
  """Returns the number of workers from a name in the result of `measure`."""
  return int(name.partition(",")[0])


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  numbers = list(measurements[0])
  most = max(map(_count_of, numbers))

  def sent(workers, place):
    num_bytes = _count_of(workers) * BATCH_BYTES
    return [m[workers][place]["client_bytes"] / num_bytes for m in measurements]

  def relative_rate(workers):
    return [
      m[workers]["client"]["steps_per_sec"]
      / m[workers]["workers"]["steps_per_sec"]
      for m in measurements
    ]

  findings = []
  for workers in numbers:
    count = _count_of(workers)
    links = workers.removeprefix(str(count))
    plural = f"{count} worker{'s' * (count != 1)}{links}"
    findings += [
      claims.Finding(
        f"{plural}, data made in the client: bytes that it sends per step,"
        " divided by those of all batches",
        sent(workers, "client"),
      ),
      claims.Finding(
        f"{plural}, data made in the workers: the same",
        sent(workers, "workers"),
      ),
      claims.Finding(
        f"{plural}: steps per second with data from the client, divided by"
        " those with data from the workers",
        relative_rate(workers),
        **({"most": 0.9} if count == most else {}),
      ),
    ]
  return findings


def draw(measurements: Sequence[dict]):
  """Draws the bytes that the client sends, and the step rate, over workers."""
  figure, (left, right) = claims.new_figure(9, 3.8, ncols=2)
  for links, style in (("", "-"), (_ON_LINKS, "--")):
    names = [n for n in measurements[0] if n == f"{_count_of(n)}{links}"]
    counts = list(map(_count_of, names))
    if not names:
      continue
    for place, color, marker in zip(
      PLACES, claims.COLORS, claims.MARKERS, strict=False
    ):
      for axes, field, scale in (
        (left, "client_bytes", 1e-6),
        (right, "steps_per_sec", 1.0),
      ):
        rows = [
          [m[n][place][field] * scale for n in names] for m in measurements
        ]
        axes.plot(
          counts,
          [sum(column) / len(column) for column in zip(*rows, strict=True)],
          marker=marker,
          linestyle=style,
          color=color,
          label=f"data made in the {place}{links}",
        )
  left.set_ylabel("MB per step that the client sends")
  right.set_ylabel("steps per second")
  for axes in (left, right):
    axes.set_xticks(WORKERS)
    axes.set_xlabel("workers")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
  left.legend(fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="one_node_feeds",
  title="In-graph: the data are handed out by one node",
  claim=(
    "if one client sends the data to the workers, training with several"
    " workers is slower than with data that the workers make themselves"
  ),
  source="a common objection to in-graph replication in TF1",
  explanation=(
    "One client drives all workers by one graph. In one kind of run, the"
    " batches are made in the client and sent to the workers, as in TF1's"
    " examples with `feed_dict`. In the other kind, the same operations run on"
    " the workers. This library's in-graph driver works in this way: the"
    " workers read their own data. The left plot shows the bytes that the"
    " client sends per step. They follow from where the batches are made, so"
    " they are not judged. The right plot shows the speed. All processes share"
    " the cores of one machine. They use its loopback device (solid lines), or"
    " each has a link of 1 Gbit/s (dashed lines). The speed with the largest"
    " number of workers is judged. It depends on how much is computed per byte:"
    " here, the gradient of one convolution. The client makes the batches as"
    " well as sending them. On the loopback device, this may be the whole"
    " difference; on the links, sending takes most of a step."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
