"""The settings of the mesh: over how many devices what is divided."""

import dataclasses
import math

from ddl_jax.config.rules import LARGEST_INT, require, require_types
from ddl_jax.config.transformer import TransformerConfig, hidden_width
from ddl_jax.errors import nearest_divisors


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices along each axis of the mesh; one axis may be -1, all that the others leave.

    Attributes:
        data: devices with sequences of their own.
        fsdp: devices with sequences of their own that share the parameters and the optimiser's state among them.
        tensor: devices that share the heads and the hidden features of the MLP among them.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def validate(self, path: str = "mesh") -> None:
        """Raises InputError on a broken rule."""
        require_types(self, path)
        names = [field.name for field in dataclasses.fields(self)]
        for name in names:
            value = getattr(self, name)
            possible = value == -1 or 1 <= value <= LARGEST_INT
            require(self, path, name, possible, "must be a number of devices, or -1 for the rest", "nearest: 1")
        open_axes = [name for name in names if getattr(self, name) == -1]
        if len(open_axes) > 1:
            rule = f"and {path}.{open_axes[1]} -1 cannot both be the rest"
            require(self, path, open_axes[0], False, rule, f"give {path}.{open_axes[1]} a number")

    def on(self, devices: int, path: str = "mesh") -> "MeshConfig":
        """The sizes on a number of devices, -1 filled in; raises InputError where they do not come to that number."""
        names = [field.name for field in dataclasses.fields(self)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) != -1}
        product = math.prod(given.values())
        rest = [name for name in names if name not in given]
        if rest:
            named = max(given, key=given.get)
            others = product // given[named]
            room = devices // others if devices % others == 0 else devices
            rule = f"times the other sizes is {product}, which does not divide the number of devices, {devices}"
            nearest = f"nearest: {nearest_divisors(given[named], room)}"
            require(self, path, named, devices % product == 0, rule, nearest)
            return dataclasses.replace(self, **{rest[0]: devices // product})
        rule = f"(data) times {self.fsdp} (fsdp) times {self.tensor} (tensor) is {product}, not the number of devices"
        rule += f", {devices}"
        others = self.fsdp * self.tensor
        nearest = f"nearest: {devices // others}, or -1" if devices % others == 0 else "use -1 for one of them"
        require(self, path, "data", product == devices, rule, nearest)
        return self

    def require_divisible(self, model: TransformerConfig, path: str = "mesh") -> None:
        """Raises InputError where the sizes do not divide what they are to divide of a model."""
        width, heads, hidden = model.width, model.heads, hidden_width(model.width)
        for name, what, size, both in (
            ("fsdp", f"model.width {width}", width, width),
            ("tensor", f"model.heads {heads}", heads, math.gcd(heads, hidden)),
            ("tensor", f"the MLP's hidden width {hidden}, floor(8/3 model.width)", hidden, math.gcd(heads, hidden)),
        ):
            value = getattr(self, name)
            nearest = f"nearest: {nearest_divisors(value, both)}"
            require(self, path, name, size % value == 0, f"does not divide {what}", nearest)
