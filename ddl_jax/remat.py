"""What backward keeps of a sublayer, and what it computes again: the policies of `model.remat`."""

from collections.abc import Callable

import jax

PRODUCT = "product"  # the name of what a matrix product or attention gave
BRANCH = "branch"  # and of a sublayer's output, h

# cuDNN's forward pass of attention gives, besides its result, what its backward pass needs; it has no name of ours.
_ATTENTION = "dot_product_attention_fwd"


def _keep(*names: str) -> Callable:
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def keep(primitive, *arguments, **parameters) -> bool:
        return primitive.name.startswith(_ATTENTION) or named(primitive, *arguments, **parameters)

    return keep


POLICIES: dict[str, Callable] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "elementwise": _keep(PRODUCT, BRANCH),
    "branch": _keep(PRODUCT),
    "layer": jax.checkpoint_policies.nothing_saveable,
}


def remat(function: Callable, policy: str) -> Callable:
    """`function` whose backward pass computes again what the policy does not keep. Its arguments are always kept.

    Args:
        function: of arrays, in the body of a scan.
        policy: a name of `POLICIES`.
    """
    if policy == "none":
        return function
    # prevent_cse is for code outside of loops, where XLA would find what is computed twice.
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=False)
