"""Official weights into a model of ours, and back."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.config.transformer import Dtype
from ddl_jax.errors import InputError
from ddl_jax.interop.options import configuration, foreign, known_variant, official_options, read_options
from ddl_jax.interop.tensors import EMBEDDING, HEAD, Tensors, places, require_complete, unused
from ddl_jax.transformer import Transformer
from ddl_jax.transformer.auto import widest


def from_official(
    config: Mapping[str, Any],
    tensors: Tensors,
    variant: str,
    *,
    compute_dtype: Dtype = "auto",
    state_dtype: Dtype = "auto",
) -> Transformer:
    """A model of ours that computes what an official one does, with its weights.

    Args:
        config: the official keyword arguments; those left out have the official defaults.
        tensors: the official state dictionary, of any floating-point dtype. `lm_head.weight` may be left out, and so
            may the value's projection where the value is a constant; both are not kept.
        variant: `baseline`, `vdim1`, `tc`, `tc_ec`, `cc` or `cc_ec`, in any case.
        compute_dtype: as in `TransformerConfig`.
        state_dtype: likewise.

    Returns:
        The model: its parameters are float32, or float64 with `jax_enable_x64`, its `config` is resolved.

    Raises:
        InputError: an option that is unknown or not supported; a tensor that is missing, not used, of another shape, or
            not of finite floating-point numbers; a head that is not tied.
    """
    variant = known_variant(variant)
    settings = configuration(read_options(config, variant), variant)
    settings = dataclasses.replace(settings, compute_dtype=compute_dtype, state_dtype=state_dtype).resolve()
    dtype = widest()
    tensors = {name: _finite(name, tensor, dtype) for name, tensor in tensors.items()}
    require_complete(tensors, settings)
    placed = {place.path: place for place in places(settings)}
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(settings, rngs=nnx.Rngs(0))))

    def filled(path, parameter):
        array = placed[_dotted(path)].parameter(tensors)
        assert array.shape == parameter.shape, path
        return parameter.replace(jnp.asarray(array))

    return nnx.merge(graph, jax.tree.map_with_path(filled, parameters, is_leaf=_is_parameter))


def to_official(model: Transformer) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """The official keyword arguments, state dictionary and variant that compute what a model of ours does.

    Args:
        model: one whose settings have a counterpart in the official code, as with preset `official_code`.

    Returns:
        The keyword arguments, all of those that matter; the tensors under their official names, in the parameters'
        dtype, the tied head among them; the variant. Tensors that the official code has and does not use (the value's
        projection where the value is a constant) are zero.

    Raises:
        InputError: names the first setting that has no counterpart.
    """
    options, variant = official_options(model.config)
    found = {_dotted(path): parameter for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors: dict[str, np.ndarray] = {}
    for place in places(model.config):
        tensors |= place.tensors(np.asarray(found[place.path][...]))
    embedding = tensors[EMBEDDING]
    tensors |= {name: np.zeros(shape, embedding.dtype) for name, shape in unused(model.config).items()}
    tensors[HEAD] = embedding
    given = {name: value for name, value in dataclasses.asdict(options).items() if name not in foreign(variant)}
    return given, tensors, variant


def _finite(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    array = np.asarray(tensor)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} has dtype {array.dtype}, but has to be of floating-point numbers")
    with np.errstate(over="ignore"):  # said below
        array = array.astype(dtype, copy=False)
    if not np.isfinite(array).all():
        raise InputError(f"{name} holds numbers that are not finite as {array.dtype}; convert weights without any")
    return array


def _is_parameter(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _dotted(path) -> str:
    return ".".join(str(getattr(key, "key", key)) for key in path)
