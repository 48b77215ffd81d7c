"""A scaled Inception v3, its data, and the binaries that train it."""
