"""How many distributed devices equal eight in one machine; simulated.

  python -m experiments.claims.sixteen_or_eight [--quick]
    [--num_seeds=3] [--output=DIR]

Every device computes batches of the same size. In one machine eight towers read
the variables from its memory and their mean is taken there; distributed, every
device has a machine of its own and the variables are on parameter servers.
Communication does not overlap with computing in either.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments import simulator
from experiments.simulator import compute_times
from experiments.support import claims

LOCAL = 8
CLAIMED = 16
# Looked for up to here; more means never, or not soon.
MOST = 256
GIGABIT = 1e9 / 8
# What memory and bus of one machine carry, bytes/s; a PCIe 3 slot has 16e9.
LOCAL_BANDWIDTH = 10e9
LATENCY = 1e-4
# Compute times differ by 5% from batch to batch.
SIGMA = 0.05

BANDWIDTHS = (1, 2.5, 10, 25, 40, 100)
MEGABYTES = (3, 10, 30, 100, 300, 1000)
# Network -> (MB of parameters, seconds of a batch, where that is from).
NETWORKS = {
  "tutorial, K40": (4.3, 0.30, "docstring of cifar10_multi_gpu_train.py"),
  "small Inception, GTX 980": (6.6, 0.36, "MXNet's CIFAR-10 example"),
  "Inception v3, K40": (95.0, 1.65, "Abadi et al. 2016, as fitted"),
}


def rate(
  num_devices: int,
  *,
  megabytes: float,
  secs: float,
  bandwidth: float,
  num_ps: int,
  latency: float,
  num_steps: int,
  seed: int,
) -> float:
  """Batches per second of `num_devices`, fully synchronous.

  Args:
    num_devices: One replica each.
    megabytes: Of the parameters; gradients are as large.
    secs: Median compute time of a batch.
    bandwidth: Of each device's and each PS task's link, bytes/s.
    num_ps: PS tasks.
    latency: Seconds.
    num_steps: How many are simulated.
    seed: Of the compute times.
  """
  cluster = simulator.Cluster(
    num_devices,
    compute_times.Lognormal(secs, SIGMA),
    num_ps=num_ps,
    read_bytes=megabytes * 1e6,
    replica_bandwidth=bandwidth,
    ps_bandwidth=bandwidth,
    latency=latency,
  )
  result = simulator.simulate(cluster, simulator.Sync(), num_steps, seed=seed)
  return result.throughput


def local_rate(**case) -> float:
  """Batches per second of eight towers in one machine."""
  return rate(LOCAL, bandwidth=LOCAL_BANDWIDTH, num_ps=1, latency=1e-6, **case)


def needed(num_ps_of, *, gigabits: float, **case) -> int:
  """The smallest number of distributed devices that is as fast.

  Args:
    num_ps_of: Called with the number of devices, returns that of PS tasks.
    gigabits: Of each link, Gbit/s.
    **case: As `rate` has it.

  Returns:
    At most `MOST` + 1, which means that not even `MOST` are enough.
  """
  goal = local_rate(**case)

  def is_enough(count):
    return goal <= rate(
      count,
      bandwidth=gigabits * GIGABIT,
      num_ps=num_ps_of(count),
      latency=LATENCY,
      **case,
    )

  low, high = 1, MOST + 1
  while low < high:
    middle = (low + high) // 2
    if middle > MOST or is_enough(middle):
      high = middle
    else:
      low = middle + 1
  return high


SERVERS = {
  "1 PS": lambda count: 1,
  "a PS beside every device": lambda count: count,
}


def measure(is_quick: bool, seed: int) -> dict:
  """Break-even for the networks, and over bandwidth and model size."""
  case = {"num_steps": 20 if is_quick else 60, "seed": seed}
  bandwidths = BANDWIDTHS[::2] if is_quick else BANDWIDTHS
  sizes = MEGABYTES[::2] if is_quick else MEGABYTES
  return {
    "gigabits": list(bandwidths),
    "megabytes_per_sec": list(sizes),
    "networks": {
      f"{name}, {gigabits} Gbit/s, {servers}": needed(
        num_ps_of, gigabits=gigabits, megabytes=size, secs=secs, **case
      )
      for name, (size, secs, _) in NETWORKS.items()
      for gigabits in (1, 10)
      for servers, num_ps_of in SERVERS.items()
    },
    "needed": {
      servers: [
        [
          needed(num_ps_of, gigabits=g, megabytes=size, secs=1.0, **case)
          for g in bandwidths
        ]
        for size in sizes
      ]
      for servers, num_ps_of in SERVERS.items()
    },
    "mxnet_epoch": _mxnet_epoch(case),
  }


def _mxnet_epoch(case: dict) -> float:
  """Seconds of an epoch of 50,000 images on 5 machines with 2 GPUs each.

  Published: 6.9 s with 512 images per machine and 1 Gbit/s Ethernet, and 71 s
  on one GPU with 256. A machine hands over one gradient for both GPUs.
  """
  size, secs, _ = NETWORKS["small Inception, GTX 980"]
  batches = rate(
    5,
    megabytes=size,
    secs=secs,
    bandwidth=GIGABIT,
    num_ps=5,
    latency=LATENCY,
    **case,
  )
  return 50_000 / (512 * batches)


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """What the claim says in numbers."""
  findings = [
    claims.Finding(
      f"{name}: devices that equal {LOCAL} in one machine ({MOST + 1}: not even"
      f" {MOST})",
      [m["networks"][name] for m in measurements],
      least=CLAIMED + 1,
    )
    for name in measurements[0]["networks"]
  ]
  findings += [
    claims.Finding(
      f"{servers}: share of bandwidths and model sizes where it takes more than"
      f" {CLAIMED}",
      [
        float(np.mean(np.array(m["needed"][servers]) > CLAIMED))
        for m in measurements
      ],
    )
    for servers in SERVERS
  ]
  findings.append(
    claims.Finding(
      "MXNet on 10 GTX 980: epoch, of the published 6.9 s (which overlaps"
      " communication and computing)",
      [m["mxnet_epoch"] / 6.9 for m in measurements],
    )
  )
  return findings


def draw(measurements: Sequence[dict]):
  """A map of the break-even for each way to place the PS tasks."""
  figure, axes = claims.new_figure(11, 5.2, ncols=2)
  first = measurements[0]
  for axis, servers in zip(axes, SERVERS, strict=True):
    table = np.median([m["needed"][servers] for m in measurements], axis=0)
    image = axis.imshow(
      np.log2(table),
      origin="lower",
      cmap="cividis_r",
      vmin=3,
      vmax=math.log2(MOST),
      aspect="auto",
    )
    for (row, column), count in np.ndenumerate(table):
      words = f"{count:.0f}" if count <= MOST else f"> {MOST}"
      axis.text(
        column,
        row,
        words,
        ha="center",
        va="center",
        color="white" if count > 40 else "black",
        weight="bold" if count > CLAIMED else "normal",
      )
    _place_networks(axis, first)
    axis.set_xticks(range(len(first["gigabits"])), first["gigabits"])
    sizes = first["megabytes_per_sec"]
    axis.set_yticks(range(len(sizes)), sizes)
    axis.set_xlabel("bandwidth of each link (Gbit/s)")
    axis.set_ylabel("model size (MB) per second of computing a batch")
    axis.set_title(servers)
  bar = figure.colorbar(image, ax=axes, ticks=range(3, 9))
  bar.ax.set_yticklabels([str(2**k) for k in range(3, 9)])
  bar.set_label(f"distributed devices that equal {LOCAL} in one machine")
  figure.suptitle(f"Bold: more than {CLAIMED}, as claimed")
  return figure


def _place_networks(axis, measurement: dict) -> None:
  """Lines for how large real networks are."""
  sizes = np.log(measurement["megabytes_per_sec"])
  for name, (size, secs, _) in NETWORKS.items():
    row = np.interp(np.log(size / secs), sizes, np.arange(len(sizes)))
    axis.axhline(row, color="black", linestyle=":")
    axis.text(
      len(measurement["gigabits"]) - 0.55,
      row,
      name,
      ha="right",
      va="center",
      fontsize=7,
      bbox={"facecolor": "white", "pad": 1.5, "linewidth": 0.5},
    )


CLAIM = claims.Claim(
  name="sixteen_or_eight",
  title="Sixteen distributed devices or eight in one machine",
  claim=(
    "It takes more than 16 distributed devices to equal 8 devices in one"
    " machine."
  ),
  source=(
    "an answer of 2016 on Stack Overflow, 'tensorflow: difference between multi"
    " GPUs and distributed tensorflow'; hardware and network not stated"
  ),
  explanation=(
    "Distributed devices send parameters and gradients over a network, which is"
    " slower than the memory of one machine. How much that costs depends on how"
    " many bytes there are for each second of computing, on the bandwidth, and"
    " on how many parameter servers share the traffic. With a single one,"
    " traffic grows with the devices while its link does not, and no number of"
    " devices may be enough; with one beside every device the links grow along."
    " So the number in the claim is a property of a model and a network, not of"
    " distributed training. Fewer than eight are enough where the network is"
    " faster than the 10 GB/s that the eight are assumed to share."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
