"""Counts the bytes that a Mosaic GPU kernel moves: `bytes_moved`."""

from pallas_kernels.traffic.count import Traffic, bytes_moved

__all__ = ["Traffic", "bytes_moved"]
