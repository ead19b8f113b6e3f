"""XLA against Pallas, measured on the device at hand: `python -m pallas_kernels.compare`."""
