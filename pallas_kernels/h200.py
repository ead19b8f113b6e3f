"""The H200 as a kernel sees it.

Per multiprocessor of compute capability 9.0: CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; the units in which things are handed out, and the reserve: NVIDIA's occupancy calculator
(cuda_occupancy.h).
"""

MULTIPROCESSORS = 132  # NVIDIA's H200 datasheet, as the next
BANDWIDTH = 4.8e12  # bytes per second
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
