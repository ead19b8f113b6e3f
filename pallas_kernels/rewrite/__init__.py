"""The rewrite of the residual state, alone and fused with the next channel read."""

from pallas_kernels.rewrite.api import rewrite, rewrite_and_read

__all__ = ["rewrite", "rewrite_and_read"]
