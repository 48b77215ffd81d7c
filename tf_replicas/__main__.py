"""Lists the programs, or runs one of the library: `python -m tf_replicas`.

  python -m tf_replicas
  python -m tf_replicas launch --ps=1 --workers=2 train.py

The first command lists the programs of the library and of its examples, the
second one runs one. The command `tf_replicas`, which the installation makes, is
the same as `python -m tf_replicas`.
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
  """Runs the command that the first argument names, or lists all programs.

  It lists the programs if the command line has no argument, and ends the
  process with exit status 2 if the first argument names no command.
  """
  if len(sys.argv) == 1:
    listing.print_programs(
      ["tf_replicas", "cifar10", "inception_mini", "experiments", "benchmarks"]
    )
    return
  name, *arguments = sys.argv[1:]
  if name not in _COMMANDS:
    print(
      f"error: the command must be one of {', '.join(_COMMANDS)}; without one,"
      f" the programs are listed. Received: {name}.",
      file=sys.stderr,
    )
    sys.exit(2)
  _COMMANDS[name](arguments)


if __name__ == "__main__":
  main()
