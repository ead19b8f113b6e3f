"""What the kernels of the rewrite take."""


def unsupported(state_shape: tuple[int, ...], dtype) -> str | None:
    """Why the kernels cannot take a state (…, V, d) of this dtype, or None where they can."""
    return "its kernel has not been written yet"
