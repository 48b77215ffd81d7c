"""Lists the programs of a checkout: `python -m tf_replicas`."""

from tf_replicas.programs import listing

if __name__ == "__main__":
  listing.print_programs(
    ["cifar10", "inception_mini", "experiments", "benchmarks"]
  )
