"""Examples per second on this machine, against a single process.

  python -m benchmarks.throughput [--rounds=3] [--batch_size=64] [--workers=2]
    [--update=async]

1 PS and N workers of the CIFAR-10 binary on synthetic images, both drivers,
beside one process with all cores and the same global batch; in turn, so that
all of them meet the same noise. The ratio within a round is what counts. With
asynchronous updates TensorFlow's own come along: as its tutorial has them, with
our local response normalization, and with every variable fetched once a step
too.
"""

import re
import statistics
import tempfile

from absl import app
from absl import flags

from experiments import programs

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 3, "How often each is measured")
flags.DEFINE_integer("batch_size", 64, "Images of one replica's batch")
flags.DEFINE_integer("workers", 2, "Replicas")
flags.DEFINE_enum("update", "sync", ["sync", "async"], "The update rule")
flags.DEFINE_integer("steps", 200, "Steps that are measured, after 50 others")

_WARM_UP_STEPS = 50


def single_process() -> float:
  """Examples/sec of the plain loop."""
  sizes = [FLAGS.batch_size * FLAGS.workers, _WARM_UP_STEPS, FLAGS.steps]
  output = programs.output("benchmarks.single_process", *map(str, sizes))
  return float(re.search(r"examples_per_sec ([\d.]+)", output).group(1))


def plain_async(*more: str) -> float:
  """Examples/sec of TensorFlow's own strategy."""
  with tempfile.TemporaryDirectory() as directory:
    steps = [n * FLAGS.workers for n in (_WARM_UP_STEPS, FLAGS.steps)]
    output = programs.output(
      "benchmarks.plain_async",
      programs.write_spec(directory, workers=FLAGS.workers),
      *map(str, [FLAGS.batch_size, *steps]),
      *more,
    )
  return float(re.search(r"examples_per_sec ([\d.]+)", output).group(1))


def cluster(replication: str) -> float:
  """Examples/sec of the binary after the warm-up, from its own log line."""
  # An asynchronous update has one batch.
  per_step = 1 if FLAGS.update == "sync" else FLAGS.workers
  warm_up = _WARM_UP_STEPS * per_step
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=FLAGS.workers)
    # The last log line covers exactly the steps after the warm-up.
    output = programs.output(
      "cifar10.distributed_train",
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      f"--batch_size={FLAGS.batch_size}",
      f"--replication={replication}",
      f"--update={FLAGS.update}",
      f"--max_steps={warm_up + FLAGS.steps * per_step}",
      f"--log_every_steps={warm_up}",
    )
  rates = re.findall(r"\(([\d.]+) examples/sec; ([\d.]+) sec/batch\)", output)
  # The first window holds the start.
  return statistics.harmonic_mean(float(rate) for rate, _ in rates[1:])


def main(argv: list[str]) -> None:
  del argv
  measures = {
    "single process": single_process,
    "between-graph": lambda: cluster("between_graph"),
    "in-graph": lambda: cluster("in_graph"),
  }
  if FLAGS.update == "async":
    measures["ParameterServerStrategy"] = plain_async
    measures["with our normalization"] = lambda: plain_async("ours")
    measures["and reading once"] = lambda: plain_async("once")
  names = list(measures)
  print(f"{'round':6}" + "".join(f"{name:>26}" for name in names))
  ratios = {name: [] for name in names}
  for number in range(FLAGS.rounds):
    rates = [measure() for measure in measures.values()]
    cells = []
    for name, rate in zip(names, rates, strict=True):
      ratios[name].append(rate / rates[0])
      cells.append(f"{rate:.0f}/s ({rate / rates[0]:.2f})")
    print(f"{number:<6}" + "".join(f"{c:>26}" for c in cells), flush=True)
  for name in names[1:]:
    values = ratios[name]
    print(
      f"{name}: {statistics.median(values):.3f} of a single process"
      f" (median of {len(values)}, {min(values):.3f} to {max(values):.3f})"
    )


if __name__ == "__main__":
  app.run(main)
