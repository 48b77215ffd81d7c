"""Finds how many distributed devices are as fast as eight in one machine.

  python -m experiments.claims.sixteen_or_eight [--quick]
    [--num_seeds=3] [--output=DIR]

Every device computes batches of one size. In one machine, eight towers (copies
of the model on devices) read the variables from the machine's memory, where the
mean of their gradients is computed. Distributed, every device has a machine of
its own, and the variables are on parameter servers. In neither case does
communication overlap with computing.

Only what is measured on real processes is judged: one network, "tutorial, K40",
with links of 1 and 10 Gbit/s. Parameters and rate of the links are both a
fifth, so that transfers take as long. Each task is a host of its own in a
private network, which needs root, and computing is replaced by waiting
(`timed_training`). All other networks and bandwidths are simulated.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments import simulator
from experiments.claims import validation
from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import timed_training
from tf_replicas.cluster import private_network

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
  """Returns the batches per second of devices in synchronous training.

  Args:
    num_devices: The number of devices, each of which is a replica.
    megabytes: The size of the parameters in MB; gradients are as large.
    secs: The median compute time of a batch, in seconds.
    bandwidth: The bandwidth of each device's and each PS task's link, bytes/s.
    num_ps: The number of PS tasks (parameter servers).
    latency: The seconds that a message takes, one way.
    num_steps: The number of steps that are simulated.
    seed: The seed of the compute times.
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
  """Returns the batches per second of eight towers in one machine.

  Args:
    **case: Arguments of `rate`: the model, the number of steps and the seed.
  """
  return rate(LOCAL, bandwidth=LOCAL_BANDWIDTH, num_ps=1, latency=1e-6, **case)


def needed(num_ps_of, *, gigabits: float, **case) -> int:
  """Finds how many distributed devices are as fast as eight in one machine.

  Args:
    num_ps_of: Maps the number of devices to the number of PS tasks (parameter
      servers).
    gigabits: The bandwidth of each link, in Gbit/s.
    **case: Arguments of `rate`: the model, the number of steps and the seed.

  Returns:
    The least number of devices. `MOST` + 1 means that not even `MOST` devices
    are enough.
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


# What is measured: Gbit/s, the number of PS tasks, and the numbers of devices.
MEASURED = "tutorial, K40"
MEASURED_COUNTS = (
  (1, 1, (4, 8, 16)),
  (1, 4, (8, 12, 16, 20, 24)),
  (10, 4, (8, 12, 16)),
)
# The one on which the verdict rests.
_JUDGED = f"10 Gbit/s, 4 PS, {CLAIMED} devices"
_SCALE = 5
_STEPS = 25


def measured_rate(
  num_devices: int, num_ps: int, *, gigabits: float | None, seed: int
) -> float:
  """Measures the batches per second of real processes.

  Args:
    num_devices: The number of devices, each of which is a replica.
    num_ps: The number of PS tasks.
    gigabits: The bandwidth of each link, in Gbit/s. None: all devices are in
      one machine. Then nothing is sent over a limited link, and there is a
      single parameter.
    seed: The seed of the compute times.
  """
  megabytes, secs, _ = NETWORKS[MEASURED]
  events = timed_training.train_by(
    simulator.Sync(),
    compute_times.Lognormal(secs, SIGMA),
    num_devices,
    _STEPS,
    seed=seed,
    num_ps=num_ps,
    num_elements=round(megabytes * 1e6 / 4 / _SCALE) if gigabits else 1,
    mbit_per_sec=1000 * gigabits / _SCALE if gigabits else None,
  )
  return num_devices * validation.step_rate(events)


def measure_real(seed: int) -> dict | None:
  """Measures real processes; returns None where the network is not permitted.

  Args:
    seed: The seed of the compute times.

  Returns:
    `local`, the batches per second of eight devices in one machine; and for
    each bandwidth and number of PS tasks and devices, `measured` and
    `simulated`.
  """
  if private_network.obstacle():
    return None
  megabytes, secs, _ = NETWORKS[MEASURED]
  found: dict = {
    "local": measured_rate(LOCAL, 1, gigabits=None, seed=seed),
  }
  for gigabits, num_ps, counts in MEASURED_COUNTS:
    for count in counts:
      found[f"{gigabits} Gbit/s, {num_ps} PS, {count} devices"] = {
        "measured": measured_rate(count, num_ps, gigabits=gigabits, seed=seed),
        "simulated": rate(
          count,
          megabytes=megabytes,
          secs=secs,
          bandwidth=gigabits * GIGABIT,
          num_ps=num_ps,
          latency=LATENCY,
          num_steps=400,
          seed=seed,
        ),
      }
  return found


SERVERS = {
  "1 PS": lambda count: 1,
  "a PS beside every device": lambda count: count,
}


def measure(is_quick: bool, seed: int) -> dict:
  """Finds the devices needed for real networks and for a grid of cases.

  The grid is over bandwidth and model size.

  With `is_quick`, it simulates fewer cases and steps. The result has the
  numbers of devices by case, for `find` and `draw`.
  """
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
    "real": None if is_quick else measure_real(seed),
  }


def _mxnet_epoch(case: dict) -> float:
  """Simulates a published training; returns the seconds of one epoch.

  The epoch has 50,000 images, on 5 machines with 2 GPUs each. Published: 6.9 s
  with 512 images per machine and 1 Gbit/s Ethernet, and 71 s on one GPU with
  256 images. A machine hands over one gradient for both GPUs.

  Args:
    case: Arguments of `rate`: the number of steps and the seed.
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
  """Returns the measured numbers of the claim, with the claimed bounds."""
  findings = [
    claims.Finding(
      f"{name}, simulated: devices that equal {LOCAL} in one machine"
      f" ({MOST + 1}: even {MOST} are not enough)",
      [m["networks"][name] for m in measurements],
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
  real = [r for m in measurements if (r := m.get("real")) is not None]
  for name in real[0] if real else ():
    if name == "local":
      continue
    findings += [
      claims.Finding(
        f"{MEASURED}, {name}: measured batches/s, divided by those of"
        f" {LOCAL} in one machine",
        [r[name]["measured"] / r["local"] for r in real],
        most=1.0 if name == _JUDGED else math.inf,
      ),
      claims.Finding(
        f"{MEASURED}, {name}: simulated batches/s, divided by the measured",
        [r[name]["simulated"] / r[name]["measured"] for r in real],
      ),
    ]
  findings.append(
    claims.Finding(
      "MXNet on 10 GTX 980: simulated epoch, divided by the published 6.9 s"
      " (MXNet overlaps communication and computing)",
      [m["mxnet_epoch"] / 6.9 for m in measurements],
    )
  )
  return findings


def draw(measurements: Sequence[dict]):
  """Draws maps of how many distributed devices equal eight in one machine."""
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
  """Draws a line in the map for the model size of each real network.

  Args:
    axis: The axes with the map.
    measurement: The result of `measure`.
  """
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
    "One network was measured on real processes, with devices that wait"
    " instead of computing, and on links of limited rate. Parameters and links"
    " are a fifth of those of the network, so transfers take as long. The"
    f" verdict rests on whether {CLAIMED} of these devices equal eight in one"
    " machine, with 4 PS tasks and 10 Gbit/s. All tasks share the processors of"
    " one machine, which slows many of them down, so the measured rates are"
    " lower limits. A value above 1 shows that so many devices are enough, and"
    " a value below 1 shows nothing. With 1 Gbit/s, 16 devices were not as"
    " fast, so these values are not judged. All other numbers"
    " are simulated, with compute times of 2016 from publications, and rest on"
    " assumed bandwidths: those of the network, and 10 GB/s that the eight in"
    " one machine share. The table says how far the simulator is from each"
    " measured rate. One simulated number is compared with a published one:"
    " MXNet trained on 10 GTX 980 in 5 machines with a network of 1 Gbit/s, and"
    " the simulated epoch is more than a third longer than the published one"
    " (the last number of the table). The simulator does not overlap"
    " communication with computing, as MXNet does."
    f" So simulated counts near {CLAIMED}, such as those of Inception v3, may"
    " lie on either side of it. Distributed devices send parameters and"
    " gradients over a network, which is slower than the memory of one"
    " machine. How much this costs depends on the number of bytes per second"
    " of computing, on the bandwidth, and on the number of parameter servers"
    " that share the traffic. With one parameter server, the traffic grows"
    " with the number of devices and its link does not, so that no number of"
    " devices may be enough. With a parameter server beside every device, the"
    " number of links grows too. So the number in the claim describes a model"
    " and a network, not distributed training as such. Fewer than eight"
    " devices are enough if the network is faster than the bandwidth that is"
    " assumed within one machine."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
