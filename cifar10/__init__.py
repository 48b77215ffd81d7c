"""The CIFAR-10 tutorial network and the binaries that train it."""
