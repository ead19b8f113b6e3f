"""The token reader: a causal convolution over a few tokens, pooled over the state's channels."""

from pallas_kernels.token_read.api import token_read

__all__ = ["token_read"]
