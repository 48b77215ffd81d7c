"""Prints a list of this package's programs: `python -m inception_mini`."""

from tf_replicas.programs import listing

if __name__ == "__main__":
  listing.print_programs(["inception_mini"])
