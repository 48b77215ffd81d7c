"""What `benchmarks.bandwidth` trains, and how fast a step could be at best."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

WORKERS = 2
# The name of a measurement in which nothing is sent.
COMPUTING = "computing alone"


class Kind(NamedTuple):
  """One kind of training that is measured.

  Attributes:
    kind: The first argument of `benchmarks.bandwidth_task`.
    is_async: Whether an update has the batch of one worker.
    is_of_commit: Whether the library is that of the other commit.
    is_ours: Whether it is this library at all.
    is_beside: Whether there are 2 PS tasks with half of the parameters each,
      beside the workers on their hosts, instead of 1 PS task on its own host.
  """

  kind: str
  is_async: bool = False
  is_of_commit: bool = False
  is_ours: bool = True
  is_beside: bool = False

  @property
  def is_peer(self) -> bool:
    """Whether the library of this tree is compared with it."""
    return self.is_of_commit or not self.is_ours


KINDS: dict[str, Kind] = {
  "between-graph": Kind("between_graph,sync,float32"),
  "between-graph bfloat16": Kind("between_graph,sync,bfloat16"),
  "in-graph": Kind("in_graph,sync,float32"),
  "in-graph bfloat16": Kind("in_graph,sync,bfloat16"),
  "between-graph commit": Kind("between_graph,sync,float32", is_of_commit=True),
  "in-graph commit": Kind("in_graph,sync,float32", is_of_commit=True),
  "between-graph bfloat16 commit": Kind(
    "between_graph,sync,bfloat16", is_of_commit=True
  ),
  "async between-graph commit": Kind(
    "between_graph,async,float32", is_async=True, is_of_commit=True
  ),
  "between-graph PS beside": Kind("between_graph,sync,float32", is_beside=True),
  "between-graph PS beside bfloat16": Kind(
    "between_graph,sync,bfloat16", is_beside=True
  ),
  "TF1 SyncReplicasOptimizer": Kind("tf1", is_ours=False),
  "MultiWorkerMirroredStrategy": Kind("mirrored", is_ours=False),
  "async between-graph": Kind("between_graph,async,float32", is_async=True),
  "async between-graph bfloat16": Kind(
    "between_graph,async,bfloat16", is_async=True
  ),
  "async in-graph": Kind("in_graph,async,float32", is_async=True),
  "async in-graph bfloat16": Kind("in_graph,async,bfloat16", is_async=True),
  "ParameterServerStrategy": Kind("strategy", is_async=True, is_ours=False),
}


class Network(NamedTuple):
  """What has to be known of a network.

  Attributes:
    parameters: The number of its parameters.
    batch: The number of images in the batch of a worker.
  """

  parameters: int
  batch: int


def transferring_secs(kind: Kind, network: Network, mbit_per_sec: int) -> float:
  """Returns how long the link of the PS task needs for the bytes of a step.

  These are the parameters for all replicas, and the gradients of all replicas,
  sent one after the other. (A link may also send and receive at once.)
  """
  size = 2 if kind.kind.endswith("bfloat16") else 4
  count = 2 * WORKERS * network.parameters * size
  return count * 8 / (mbit_per_sec * 1e6)


def shares_of_least_time(
  rounds: Sequence[Mapping[str, Mapping[str, float]]],
  name: str,
  network: Network,
  mbit_per_sec: int,
) -> list[float]:
  """Divides the time of a step by the least time that it could take.

  The least time is the longer one of computing alone and transferring alone.

  Args:
    rounds: For each round, what was measured at one rate of the links, by name
      of the kind: at least `images_per_sec`.
    name: The name of the kind, a key of `KINDS`.
    network: The network.
    mbit_per_sec: The rate of the links.

  Returns:
    The quotient of each round.
  """
  images = WORKERS * network.batch
  transferring = transferring_secs(KINDS[name], network, mbit_per_sec)
  return [
    images
    / turns[name]["images_per_sec"]
    / max(images / turns[COMPUTING]["images_per_sec"], transferring)
    for turns in rounds
  ]
