"""Access to TensorFlow: shared resources, devices, workarounds, waiting."""
