"""Counts the bytes that a Mosaic GPU kernel moves: `bytes_moved`, `traffic_of_kernels`."""

from pallas_kernels.traffic.count import Traffic, bytes_moved, traffic_of_kernels

__all__ = ["Traffic", "bytes_moved", "traffic_of_kernels"]
