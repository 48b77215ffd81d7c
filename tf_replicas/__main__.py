"""Lists the programs of the library and of a checkout."""

from tf_replicas.programs import listing

if __name__ == "__main__":
  listing.print_programs(
    ["tf_replicas", "cifar10", "inception_mini", "experiments", "benchmarks"]
  )
