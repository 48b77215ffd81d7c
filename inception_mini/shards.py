"""Writes TFRecord files (shards) in parallel, so that none is incomplete.

A subset (`train` or `validation`) has several shards. A shard is written under
a temporary name and renamed when it is finished. So a shard with its final name
is complete, and the next build writes only the shards that are missing. A file
beside the shards of a subset records from which image files they are made. If
the image files have changed, the next build is refused.
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
  """Raised if shards (TFRecord files) cannot be written.

  The message is one line.
  """


class Interrupted(Exception):
  """Raised if writing shards was interrupted by Ctrl-C.

  Finished shards remain, and the next build continues from there.
  """


class Summary(NamedTuple):
  """The result of writing the shards (TFRecord files) of one subset.

  Attributes:
    num_examples: Number of examples in all shards of the subset.
    num_skipped: Number of image files that were left out as unreadable, in this
      build or an earlier one.
    num_kept: Number of shards that an earlier build had written.
    num_written: Number of shards that this build has written.
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
  as_jpeg: bool = False,
  on_image: Callable[[int], None] = lambda number: None,
  on_skip: Callable[[str, str], None] = lambda path, reason: None,
  on_shard: Callable[[str, int], None] = lambda name, number: None,
) -> Summary:
  """Writes the shards (TFRecord files) of a subset that do not exist yet.

  Args:
    subset: `train` or `validation`.
    directory: Directory for the shards, which is made if needed.
    files: The image files. Each shard gets consecutive ones.
    fingerprint: A digest of `files`, by which a changed set of files is
      recognized.
    num_shards: Number of shards of the subset.
    num_threads: Number of shards written at the same time.
    as_jpeg: Whether to convert PNG and CMYK images to RGB JPEG; see `encode`.
    on_image: Called, from any thread, with the number of files that were
      processed since the last call. Files of shards that exist already count,
      too.
    on_skip: Called, from any thread, with the path of an image file that was
      left out, and the reason.
    on_shard: Called, from any thread, with the name of a finished shard and its
      number of examples.

  Returns:
    How many examples and shards there are, and how many files were left out.

  Raises:
    BuildError: If the directory holds shards of other files, or another build
      is running there.
    Interrupted: On Ctrl-C, after the threads have ended.
    OSError: If a shard cannot be written, or a file has disappeared.
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
      count = _write_shard(path, part, as_jpeg, stop, on_image, on_skip)
      on_shard(os.path.basename(path), count)

    _in_threads(write_one, todo, num_threads, stop)
    counts = [
      records.count_records(os.path.join(directory, name)) for name in names
    ]
  return Summary(sum(counts), len(files) - sum(counts), kept, len(todo))


def are_in(directory: str) -> bool:
  """Returns whether a directory holds a finished shard (TFRecord file)."""
  return any(_SHARD.fullmatch(name) for name in os.listdir(directory))


def encode(file: image_folders.File, *, as_jpeg: bool = False) -> bytes:
  """Makes the TFRecord of an image file.

  It contains the unchanged bytes of the file, unless they are converted.

  Args:
    file: The image file.
    as_jpeg: Whether to convert PNG images, and JPEG images with the four
      channels of CMYK, to RGB JPEG of quality 100, as the TF1 script for
      ImageNet does.

  Returns:
    A serialized `tf.train.Example`.

  Raises:
    ValueError: If the file is to be left out: it is not an image that can be
      decoded, reading it is not permitted, or it did not exist when the files
      were listed. The message is the reason.
    OSError: If the file existed when the files were listed, but cannot be read
      now.
  """
  try:
    encoded = file.read()
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
  file_format = formats[0]
  if as_jpeg and (
    file_format == "PNG" or tf.io.extract_jpeg_shape(encoded)[2] == 4
  ):
    encoded = tf.io.encode_jpeg(image, "rgb", quality=100).numpy()
    file_format = "JPEG"
  return records.serialize(
    encoded,
    file_format=file_format,
    height=image.shape[0],
    width=image.shape[1],
    label=file.label,
    text=file.text,
    filename=os.path.basename(file.path),
    boxes=file.boxes,
    synset=file.synset,
  )


def _write_shard(path, files, as_jpeg, stop, on_image, on_skip) -> int:
  """Writes one shard (TFRecord file).

  Args:
    path: The final path of the shard. Until the shard is complete, it has a
      temporary name.
    files: The image files.
    as_jpeg: Whether to convert PNG and CMYK images to RGB JPEG.
    stop: A `threading.Event`. If it is set, the writing stops.
    on_image: Called after each image file, with the number 1.
    on_skip: Called with the path of an image file that is left out, and the
      reason.

  Returns:
    The number of examples in the shard.

  Raises:
    Interrupted: If `stop` was set.
  """
  temporary = _TEMPORARY.format(path=path)
  count = 0
  with tf.io.TFRecordWriter(temporary) as writer:
    for file in files:
      if stop.is_set():
        raise Interrupted
      try:
        serialized = encode(file, as_jpeg=as_jpeg)
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
  """Calls a function with each job, in several threads.

  If a job raises an error, no further job begins, and the error is raised here.
  The same happens on Ctrl-C. Jobs that are running see that `stop` is set.

  Args:
    function: Called with one job.
    jobs: The jobs.
    num_threads: The number of threads.
    stop: A `threading.Event`, which is set when running jobs must stop.

  Raises:
    Interrupted: On Ctrl-C.
  """
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
  """Checks that existing shards (TFRecord files) are from the same image files.

  Then writes a file that records which image files the shards are made from.

  Args:
    subset: `train` or `validation`.
    directory: Directory of the shards.
    fingerprint: A digest of the image files.
    num_shards: Number of shards of the subset.
    num_files: Number of image files.

  Raises:
    BuildError: If there are shards of other image files or of another number of
      shards, or the file with the record is damaged.
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
  """Returns a context in which no other build can write to a directory.

  Each build holds a lock on a file in the directory. The operating system
  releases the lock if the process dies.

  Args:
    directory: The directory to which shards are written.

  Raises:
    BuildError: If another process holds the lock.
  """
  with open(os.path.join(directory, _LOCK), "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise BuildError(
        f"Another build is at work in {directory}; wait for its end."
      ) from None
    yield
