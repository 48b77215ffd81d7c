"""Compares the examples per second of a cluster with a single process.

  python -m benchmarks.throughput [--rounds=3] [--update_images=128]
    [--workers=2] [--update=async] [--output=FILE]

The cluster is 1 PS (parameter server) and N workers of the CIFAR-10 program on
this machine, with synthetic images and both drivers. The single process has all
cores, and equally many images in an update. A synchronous update takes a part
of these images from each worker, an asynchronous one takes all from one worker.
All take turns, so that they meet the same noise; every second round has the
reverse order. The ratio within a round is what counts. With asynchronous
updates, TensorFlow's own `ParameterServerStrategy` is measured too: as its
tutorial has it; with this project's local response normalization; with each
variable fetched once a step too; and with as many threads in each process as
this project uses.
"""

import re
import tempfile

from absl import app
from absl import flags

from benchmarks import ratios
from benchmarks import stored
from experiments.support import programs

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "rounds", 3, "The number of rounds, in each of which all are measured"
)
flags.DEFINE_integer("update_images", 128, "The number of images in an update")
flags.DEFINE_integer("workers", 2, "The number of workers")
flags.DEFINE_enum("update", "sync", ["sync", "async"], "The update rule")
flags.DEFINE_integer(
  "steps", 200, "The number of updates that are measured, after 50 others"
)
flags.DEFINE_string("output", None, "Where to write the results, as JSON")

_WARM_UP_STEPS = 50
_ONE = "a single process"


def single_process() -> float:
  """Returns the examples/sec of a plain training loop in one process."""
  sizes = [FLAGS.update_images, _WARM_UP_STEPS, FLAGS.steps]
  output = programs.output("benchmarks.single_process", *map(str, sizes))
  return float(re.search(r"examples_per_sec ([\d.]+)", output).group(1))


def plain_async(*more: str) -> float:
  """Returns the examples/sec of TensorFlow's own `ParameterServerStrategy`.

  Args:
    *more: `ours`, `once` or `threads`: what is improved in its program.
  """
  with tempfile.TemporaryDirectory() as directory:
    output = programs.output(
      "benchmarks.plain_async",
      programs.write_spec(directory, workers=FLAGS.workers),
      *map(str, [FLAGS.update_images, _WARM_UP_STEPS, FLAGS.steps]),
      *more,
    )
  return float(re.search(r"examples_per_sec ([\d.]+)", output).group(1))


def cluster(replication: str) -> float:
  """Returns the examples/sec of the CIFAR-10 program after the warm-up.

  Args:
    replication: `between_graph` or `in_graph`.
  """
  batches = FLAGS.workers if FLAGS.update == "sync" else 1
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=FLAGS.workers)
    # Log lines after the first cover the updates after the warm-up.
    output = programs.output(
      "cifar10.distributed_train",
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      f"--batch_size={FLAGS.update_images // batches}",
      f"--replication={replication}",
      f"--update={FLAGS.update}",
      f"--max_steps={_WARM_UP_STEPS + FLAGS.steps}",
      f"--log_every_steps={_WARM_UP_STEPS}",
    )
  return programs.examples_per_sec(output)


def main(argv: list[str]) -> None:
  del argv
  measures = {
    _ONE: single_process,
    "between-graph": lambda: cluster("between_graph"),
    "in-graph": lambda: cluster("in_graph"),
  }
  if FLAGS.update == "async":
    measures["ParameterServerStrategy"] = plain_async
    measures["with our normalization"] = lambda: plain_async("ours")
    measures["and reading once"] = lambda: plain_async("once")
    measures["and our threads"] = lambda: plain_async("threads")
  names = list(measures)
  print(f"{'round':6}" + "".join(f"{name:>26}" for name in names))
  rounds = []
  for number in range(FLAGS.rounds):
    order = names if number % 2 else names[::-1]
    rates = {name: measures[name]() for name in order}
    cells = [f"{rates[n]:.0f}/s ({rates[n] / rates[_ONE]:.2f})" for n in names]
    print(f"{number:<6}" + "".join(f"{c:>26}" for c in cells), flush=True)
    rounds.append(rates)
  pairs = [(name, _ONE) for name in names[1:]]
  pairs += [(ours, theirs) for theirs in names[3:] for ours in names[1:3]]
  results = {
    "ratios": ratios.compare(rounds, pairs),
    "examples_per_sec": {
      name: ratios.spread([rates[name] for rates in rounds]) for name in names
    },
    "rounds": rounds,
  }
  stored.write(FLAGS.output, results)


if __name__ == "__main__":
  app.run(main)
