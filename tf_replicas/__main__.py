"""Lists the programs, or runs one of the library: `python -m tf_replicas`.

  python -m tf_replicas
  python -m tf_replicas launch --ps=1 --workers=2 train.py

The first command lists the programs of the library and of its examples. The
second command runs the program `launch`. After an installation, the command
`tf_replicas` does the same as `python -m tf_replicas`.
"""

import sys

from tf_replicas.programs import listing
from tf_replicas.programs import manifests
from tf_replicas.programs import script_launcher
from tf_replicas.programs import status_report

_COMMANDS = {
  "launch": script_launcher.main,
  "kubernetes": manifests.main,
  "status": status_report.main,
}


def main() -> None:
  """Runs the program that the first argument names.

  Without arguments, it lists all programs. If the first argument is not the
  name of a program that it can run, it ends the process with exit status 2.
  """
  if len(sys.argv) == 1:
    listing.print_programs(
      ["tf_replicas", "cifar10", "inception_mini", "experiments", "benchmarks"]
    )
    return
  name, *arguments = sys.argv[1:]
  if name not in _COMMANDS:
    print(
      f"error: the command must be one of {', '.join(_COMMANDS)}; without a"
      " command, all programs are listed, including those of the examples."
      f" Received: {name}.",
      file=sys.stderr,
    )
    sys.exit(2)
  _COMMANDS[name](arguments)


if __name__ == "__main__":
  main()
