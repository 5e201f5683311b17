"""Experiment configurations, one file each; every file has a `tiny` variant that runs on a CPU."""
