"""Hybrid language models: the layer pattern is data."""
