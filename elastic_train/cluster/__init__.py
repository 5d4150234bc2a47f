"""Clusters of machines: checks of Ray's cluster files, and a cluster of made-up machines that Ray's autoscaler runs."""
