"""Writes shards of TFRecords: in parallel, each wholly or not at all.

A shard is written under a temporary name and renamed when it is finished, so
one that lies under its own name is complete, and a build that was interrupted
goes on where it was. What a subset is made of is recorded beside its shards;
a build of something else is refused.
"""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from inception_mini import image_folders
from inception_mini import image_processing
from inception_mini import records

_PLAN = "{subset}.plan.json"
_TEMPORARY = "{path}.tmp"
_LOCK = ".build.lock"
_SHARD = re.compile(r"\w+-\d{5}-of-\d{5}")
_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG"}


class BuildError(Exception):
  """Shards cannot be written there; the message is one line."""


class Interrupted(Exception):
  """A build was interrupted; finished shards stay."""


class Summary(NamedTuple):
  """What a subset's shards hold.

  Attributes:
    num_examples: In all shards.
    num_skipped: Files that could not be read, in this build or before.
    num_kept: Shards that were there already.
    num_written: Shards written now.
  """

  num_examples: int
  num_skipped: int
  num_kept: int
  num_written: int


def write(
  subset: str,
  directory: str,
  files: Sequence[image_folders.File],
  *,
  fingerprint: str,
  num_shards: int,
  num_threads: int,
  on_image: Callable[[int], None] = lambda number: None,
  on_skip: Callable[[str, str], None] = lambda path, reason: None,
  on_shard: Callable[[str, int], None] = lambda name, number: None,
) -> Summary:
  """Writes a subset's missing shards.

  Args:
    subset: `train` or `validation`.
    directory: Where to; it is made if need be.
    files: In the order in which they are divided among the shards.
    fingerprint: Tells these files from others.
    num_shards: How many shards make up the subset.
    num_threads: Shards written at a time.
    on_image: Told of images that are done with; called by any thread.
    on_skip: Told path and reason of a file left out; called by any thread.
    on_shard: Told name and number of examples of a finished shard.

  Raises:
    BuildError: If the directory holds shards of something else, or another
      build is at work there.
    Interrupted: On Ctrl-C, after the threads have ended.
    OSError: If a shard cannot be written, or files are there no more.
  """
  os.makedirs(directory, exist_ok=True)
  with _locked(directory):
    names = [
      records.shard_name(subset, i, num_shards) for i in range(num_shards)
    ]
    _claim(subset, directory, fingerprint, num_shards, len(files))
    _remove_unfinished(subset, directory)
    bounds = [len(files) * i // num_shards for i in range(num_shards + 1)]
    kept, todo = 0, []
    for i, name in enumerate(names):
      part = files[bounds[i] : bounds[i + 1]]
      path = os.path.join(directory, name)
      if os.path.exists(path):
        kept += 1
        on_image(len(part))
      else:
        todo.append((path, part))
    stop = threading.Event()

    def write_one(job):
      path, part = job
      count = _write_shard(path, part, stop, on_image, on_skip)
      on_shard(os.path.basename(path), count)

    _in_threads(write_one, todo, num_threads, stop)
    counts = [
      records.count_records(os.path.join(directory, name)) for name in names
    ]
  return Summary(sum(counts), len(files) - sum(counts), kept, len(todo))


def are_in(directory: str) -> bool:
  """Whether a directory holds a finished shard of any subset."""
  return any(_SHARD.fullmatch(name) for name in os.listdir(directory))


def encode(file: image_folders.File) -> bytes:
  """Makes the record of a file, whose bytes stay as they are.

  Raises:
    ValueError: With the reason, if it is no image that can be decoded.
    OSError: If it was there when files were looked for, and is not now.
  """
  try:
    with open(file.path, "rb") as stream:
      encoded = stream.read()
  except OSError as error:
    if file.state is not None and not isinstance(error, PermissionError):
      raise  # It was there; the disk, and all that follows, may be gone.
    raise ValueError(error.strerror) from None
  formats = [f for head, f in _SIGNATURES.items() if encoded.startswith(head)]
  if not formats:
    raise ValueError("neither JPEG nor PNG" if encoded else "empty")
  try:
    image = image_processing.decode(tf.constant(encoded))
  except tf.errors.InvalidArgumentError as error:
    # The op's name comes first, and the call stack's node last.
    reason = error.message.splitlines()[0].rpartition("}} ")[2]
    raise ValueError(reason.partition(" [Op:")[0][:200]) from None
  return records.serialize(
    encoded,
    file_format=formats[0],
    height=image.shape[0],
    width=image.shape[1],
    label=file.label,
    text=file.text,
    filename=os.path.basename(file.path),
  )


def _write_shard(path, files, stop, on_image, on_skip) -> int:
  """Writes one shard; the number of examples in it."""
  temporary = _TEMPORARY.format(path=path)
  count = 0
  with tf.io.TFRecordWriter(temporary) as writer:
    for file in files:
      if stop.is_set():
        raise Interrupted
      try:
        serialized = encode(file)
      except ValueError as error:
        on_skip(file.path, str(error))
      else:
        writer.write(serialized)
        count += 1
      on_image(1)
  # Only what is on the disk gets the name.
  with open(temporary, "rb") as stream:
    os.fsync(stream.fileno())
  os.rename(temporary, path)
  return count


def _in_threads(function, jobs, num_threads, stop) -> None:
  """Calls the function with each job; the first error ends all of them."""
  pool = concurrent.futures.ThreadPoolExecutor(num_threads)
  try:
    futures = [pool.submit(function, job) for job in jobs]
    for future in concurrent.futures.as_completed(futures):
      future.result()
  except KeyboardInterrupt:
    raise Interrupted from None
  finally:
    stop.set()
    pool.shutdown(cancel_futures=True)


def _claim(subset, directory, fingerprint, num_shards, num_files) -> None:
  """Checks that the files there belong to this build, and records that.

  Raises:
    BuildError: If it does not.
  """
  path = os.path.join(directory, _PLAN.format(subset=subset))
  plan = dict(
    fingerprint=fingerprint, num_shards=num_shards, num_files=num_files
  )
  try:
    with open(path, encoding="utf-8") as file:
      before = json.load(file)
    number, shards = before["num_files"], before["num_shards"]
  except FileNotFoundError:
    before = None
    number, shards = "unknown", "unknown"
  except (ValueError, TypeError, KeyError) as error:
    raise BuildError(f"{path} is damaged: {error!r}.") from None
  if before == plan:
    return
  has_shards = any(
    name.startswith(f"{subset}-") and not name.endswith(".tmp")
    for name in os.listdir(directory)
  )
  if has_shards:
    changed = "other or changed files" if before else "unknown files"
    raise BuildError(
      f"`output_directory` must be empty or hold {subset} shards of the same "
      f"files. Received: {directory} with shards of {changed} ({number} in "
      f"{shards} shards there, {num_files} in {num_shards} now)."
    )
  temporary = _TEMPORARY.format(path=path)
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(plan, file, indent=2)
  os.replace(temporary, path)


def _remove_unfinished(subset: str, directory: str) -> None:
  for name in os.listdir(directory):
    if name.startswith(f"{subset}-") and name.endswith(".tmp"):
      os.remove(os.path.join(directory, name))


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
  """Keeps a second build out; the lock ends with the process at the latest."""
  with open(os.path.join(directory, _LOCK), "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise BuildError(
        f"Another build is at work in {directory}; wait for its end."
      ) from None
    yield
