"""Contains rules by which replicas train own copies and exchange at times.

An exchange averages the models, moves copies and shared variables toward each
other (elastic averaging), or applies accumulated gradients.
"""
