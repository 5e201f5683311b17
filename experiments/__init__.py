"""Ablations launched from absl flags: `python -m experiments.main --config=... --workdir=...`."""
