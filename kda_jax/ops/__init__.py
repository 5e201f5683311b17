"""The operators: arrays in, arrays out."""
