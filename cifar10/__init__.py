"""Contains the CIFAR-10 tutorial's network, and programs that train it."""
