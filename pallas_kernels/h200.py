"""The H200: its limits as a whole, and as a kernel sees it.

Per multiprocessor of compute capability 9.0: CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; the units in which things are handed out, and the reserve: NVIDIA's occupancy calculator
(cuda_occupancy.h).
"""

MULTIPROCESSORS = 132  # NVIDIA's H200 datasheet, as the next
BANDWIDTH = 4.8e12  # bytes per second
MEMORY = 141e9  # bytes
# FLOPs per second of matrix products, dense: half of what the datasheet says, which is with sparsity. Keys as XLA names
# what is multiplied; f32 becomes TF32, or, asked for highest precision ("exact f32"), goes past the tensor cores.
PRODUCTS = {
    "bf16": 989e12, "f16": 989e12, "f8e4m3fn": 1979e12, "f8e5m2": 1979e12, "s8": 1979e12,
    "f32": 494e12, "exact f32": 67e12, "f64": 67e12,
}  # fmt: skip
NVLINK = 450e9  # bytes per second in each direction, between the GPUs of a host
NETWORK = 50e9  # bytes per second in each direction, between hosts: one 400 Gb/s port per GPU, as in NVIDIA's DGX H200
WARP = 32  # threads
WARPGROUP = 128  # threads
REGISTERS = 65_536  # of 32 bits
REGISTERS_UNIT = 256  # registers are handed out by the warp, in multiples of this
QUARTERS = 4  # a warp lives in one of them; each has its own registers
THREADS = 2_048
BLOCKS = 32
SHARED_MEMORY = 228 * 1024  # bytes
SHARED_MEMORY_PER_BLOCK = 227 * 1024  # bytes, the most that one block may ask for
SHARED_MEMORY_RESERVED = 1024  # bytes, kept by CUDA for each block
SHARED_MEMORY_UNIT = 128  # bytes
BOX = 256  # elements along one dimension of a TMA copy: CUDA driver API, cuTensorMapEncodeTiled
