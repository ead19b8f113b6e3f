"""Which operations with Pallas kernels a residual stream calls, and why these kernels cannot take its state.

Imports jax when asked, not before: most mistakes in a configuration are found without it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddl_jax.config.residual import ResidualConfig


def unsupported(config: "ResidualConfig", width: int) -> dict[str, str | None]:
    """By operation of `pallas_kernels` that the stream calls: why its kernels cannot take the state, or None.

    Args:
        config: with its reader resolved.
        width: d.

    Returns:
        An empty dictionary where the stream calls none.
    """
    found = {}
    # Any number of tokens will do, and so will each dtype that a state and a branch can be given.
    state = (1, 1, config.value_channels, width)
    if config.kind in ("delta", "write_only"):
        from pallas_kernels.rewrite import shapes

        operation = "rewrite_and_read" if config.reader == "channel" else "rewrite"
        found[operation] = shapes.unsupported(state)
    if config.reader == "token":
        from pallas_kernels.token_read import shapes

        found["token_read"] = shapes.unsupported(state, "float32", config.reader_taps)
    return found
