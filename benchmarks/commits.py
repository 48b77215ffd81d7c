"""Checks out another commit of this repository, for comparisons."""

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[pathlib.Path]:
  """Context that provides the root directory of a tree of `commit`."""
  git = ["git", "-C", str(ROOT), "worktree"]
  with tempfile.TemporaryDirectory() as directory:
    tree = pathlib.Path(directory, "tree")
    subprocess.run(
      [*git, "add", "--quiet", "--detach", tree, commit], check=True
    )
    try:
      yield tree
    finally:
      subprocess.run([*git, "remove", "--force", tree], check=True)
