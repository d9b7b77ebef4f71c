"""Benchmarks behind `sparse-loop bench`: times beside the bytes that explain them."""
