"""The H200 as a kernel sees it: NVIDIA's H200 datasheet, and for compute capability 9.0 the CUDA C++ programming guide,
table "Technical specifications per compute capability"."""

MULTIPROCESSORS = 132
WARPGROUP = 128  # threads
REGISTERS = 65_536  # of 32 bits, per multiprocessor
THREADS = 2_048  # per multiprocessor
SHARED_MEMORY = 228 * 1024  # bytes per multiprocessor
SHARED_MEMORY_BLOCK = 227 * 1024  # bytes one block can have
SHARED_MEMORY_RESERVED = 1024  # bytes the system takes for each block
BANDWIDTH = 4.8e12  # bytes per second
BOX = 256  # elements along one dimension of a TMA copy
