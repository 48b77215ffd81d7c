"""Gives access to TensorFlow: shared resources, devices, workarounds, waits.

Only this package uses private names of TensorFlow and Keras.
"""
