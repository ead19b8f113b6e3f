"""The rewrite of the residual state, alone and fused with the next channel read, saved and reversible."""

from pallas_kernels.rewrite.api import (
    reversible_rewrite,
    reversible_rewrite_and_read,
    rewrite,
    rewrite_and_read,
)

__all__ = ["reversible_rewrite", "reversible_rewrite_and_read", "rewrite", "rewrite_and_read"]
