"""Operations on the residual state of Deep Delta Learning. Depends on jax alone."""

from pallas_kernels.rewrite import reversible_rewrite, reversible_rewrite_and_read, rewrite, rewrite_and_read
from pallas_kernels.token_read import token_read

__all__ = ["reversible_rewrite", "reversible_rewrite_and_read", "rewrite", "rewrite_and_read", "token_read"]
