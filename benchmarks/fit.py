"""`tf_replicas.fit` against the loop of its driver, on 1 PS and 2 workers.

  python -m benchmarks.fit [--rounds=5] [--output=FILE]

Both train the same compiled model with the same data, in turn: once by `fit`
without callbacks that look at batches, once by calling `driver.step` alone.
Printed are the ratios of their updates per second, of all epochs but the first,
and the 95% interval of their geometric mean. The raw numbers go to `FILE`.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import ratios

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", None, "For the raw numbers, as JSON")

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def updates_per_sec(mode: str) -> float:
  """One measurement: `mode` is "fit" or "loop"."""
  result = subprocess.run(
    [
      *(sys.executable, "-m", "tf_replicas.launch", "--workers=2"),
      *(str(_ROOT / "benchmarks" / "fit_task.py"), mode),
    ],
    cwd=_ROOT,
    env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  if result.returncode:
    raise RuntimeError(result.stdout + result.stderr)
  (rate,) = re.findall(r"updates/sec ([\d.]+)", result.stdout)
  return float(rate)


def main(argv: list[str]) -> None:
  del argv
  rounds = []
  for number in range(_ROUNDS.value):
    modes = ["fit", "loop"] if number % 2 else ["loop", "fit"]
    rates = {mode: updates_per_sec(mode) for mode in modes}
    rounds.append(rates)
    print(
      f"round {number}: fit {rates['fit']:.2f}, loop {rates['loop']:.2f},"
      f" ratio {rates['fit'] / rates['loop']:.3f}",
      flush=True,
    )
  mean, low, high = ratios.interval([r["fit"] / r["loop"] for r in rounds])
  print(f"fit / loop: {mean:.3f} (95%: {low:.3f} to {high:.3f})")
  if _OUTPUT.value:
    text = json.dumps({"rounds": rounds}, indent=2)
    pathlib.Path(_OUTPUT.value).write_text(text, encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
