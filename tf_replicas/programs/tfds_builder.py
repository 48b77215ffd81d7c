"""Finds data sets of TensorFlow Datasets by name, and downloads them."""

import concurrent.futures
import multiprocessing
import urllib.error
import urllib.request


class DataError(Exception):
  """Raised if data cannot be used. The message gives the reason in one line."""


class NotPreparedError(DataError):
  """Raised if a data set is not downloaded yet, and must not be downloaded."""


def builder(
  name: str, data_dir: str | None, *, download: bool, others: str, advice: str
):
  """Returns the TensorFlow Datasets builder of a prepared data set.

  Args:
    name: Name of the data set.
    data_dir: Directory to look in; None is the default of TensorFlow Datasets.
    download: Whether to download and prepare the data set if it is missing.
    others: The names of data sets that the program provides itself, for error
      messages.
    advice: What else the user can do, as the end of an error message.

  Raises:
    DataError: If there is no such data set, or it cannot be loaded.
    NotPreparedError: If the data set is missing and `download` is False.
  """
  place = "its default directory" if data_dir is None else f"`{data_dir}`"
  try:
    # It takes long to import, and other sources do without it.
    try:
      import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
      raise DataError(f"{error}: pip install tf-replicas[tfds]") from error

    try:
      found = tfds.builder(name, data_dir=data_dir)
    except tfds.core.registered.DatasetNotFoundError:
      found = None
    if found is not None and not found.info.splits:
      if not download:
        raise NotPreparedError("it is not prepared there")
      _require_server(found)
      _prepare_elsewhere(name, data_dir)
      found = tfds.builder(name, data_dir=data_dir)
  # Whatever fails in TensorFlow Datasets, the user gets this one line.
  except Exception as error:
    kind = NotPreparedError if type(error) is NotPreparedError else DataError
    raise kind(
      f"TensorFlow Datasets could not load {name!r} from {place}: "
      f"{_one_line(error)}. {advice}"
    ) from error
  if found is None:
    raise DataError(
      f"`dataset` must be {others} or the name of a data set that TensorFlow "
      f"Datasets knows or has prepared in {place}. Received: {name!r}."
    )
  return found


def _prepare_elsewhere(name: str, data_dir: str | None) -> None:
  """Downloads and prepares a data set in a separate process.

  Preparing runs TensorFlow ops, and a process that has run one can no longer
  choose its devices.
  """
  spawned = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as pool:
    pool.submit(_prepare, name, data_dir).result()


def _prepare(name: str, data_dir: str | None) -> None:
  import tensorflow_datasets as tfds

  tfds.builder(name, data_dir=data_dir).download_and_prepare()


def _require_server(found) -> None:
  """Checks that the server with the files of a data set can be reached.

  Otherwise the downloader would retry for minutes.

  Args:
    found: The TensorFlow Datasets builder of the data set.

  Raises:
    DataError: If the server cannot be reached.
  """
  for url in list(found.url_infos or ())[:1]:
    request = urllib.request.Request(url, method="HEAD")
    try:
      urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError:
      pass  # It answered; what it answers is for the downloader to judge.
    except OSError as error:
      raise DataError(f"cannot reach {url}: {error}") from error


def _one_line(error: Exception) -> str:
  """Returns the first line of an error's message, without a final period.

  At most 300 characters are returned.
  """
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0].strip()[:300].rstrip(".")
