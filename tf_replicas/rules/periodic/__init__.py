"""Contains update rules by which replicas train their own copies.

After a number of batches, a replica exchanges values with the shared variables:
it averages models, moves its copy and the shared variables toward each other
(elastic averaging), or hands over accumulated gradients.
"""
