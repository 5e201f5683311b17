"""Mosaic GPU kernels of Kimi Delta Attention for NVIDIA Hopper."""
