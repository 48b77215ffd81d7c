"""Finds data sets of TensorFlow Datasets by name, and downloads them."""

import concurrent.futures
import multiprocessing
import urllib.error
import urllib.request

from tf_replicas.runtime import processes


class DataError(Exception):
  """Raised if data cannot be used. The message gives the reason in one line."""


class NotPreparedError(DataError):
  """Raised if a data set is missing, and the caller allows no download."""


def builder(
  name: str, data_dir: str | None, *, download: bool, others: str, advice: str
):
  """Returns the TensorFlow Datasets builder of a data set on this machine.

  If the data set is missing, it may be downloaded first.

  Args:
    name: The name of the data set.
    data_dir: The directory of data sets. None: the default of TensorFlow
      Datasets.
    download: Whether to download and prepare the data set if it is missing.
    others: A phrase for error messages: the names of data sets that do not come
      from TensorFlow Datasets.
    advice: The end of error messages, which says what else the user can do.

  Raises:
    DataError: If there is no such data set, or it cannot be loaded.
    NotPreparedError: If the data set is missing and `download` is False.
  """
  place = "its default directory" if data_dir is None else f"`{data_dir}`"
  try:
    # It takes long to import, and other sources do without it.
    try:
      with processes.importing_tensorflow():
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
      raise DataError(
        f"{error}: pip install tensorflow-datasets importlib_resources"
      ) from error

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

  Preparing runs TensorFlow ops. This process must not run any yet: afterwards,
  it could not choose its devices.

  Args:
    name: The name of the data set.
    data_dir: The directory of data sets; None: the default.
  """
  spawned = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as pool:
    pool.submit(_prepare, name, data_dir).result()


def _prepare(name: str, data_dir: str | None) -> None:
  import tensorflow_datasets as tfds

  tfds.builder(name, data_dir=data_dir).download_and_prepare()


def _require_server(found) -> None:
  """Checks that the server with the files of a data set can be reached.

  If it could not, the downloader would retry for minutes.

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
  """Returns the first line of the message of an error, for another message.

  It is cut after 300 characters, and has no period at its end.
  """
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0].strip()[:300].rstrip(".")
