"""Flax layers built on the operators."""
