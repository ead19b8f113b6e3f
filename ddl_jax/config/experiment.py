"""One experiment: every setting, of every room."""

import dataclasses

from ddl_jax.config.data import DataConfig
from ddl_jax.config.distributed import DistributedConfig
from ddl_jax.config.mesh import MeshConfig
from ddl_jax.config.rules import LARGEST_INT, require, require_types
from ddl_jax.config.training import OptimizerConfig, TrainingConfig
from ddl_jax.config.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        run_dir: folder for configuration, metrics and checkpoints.
        seed: of the parameters and the data order.
        model: see `TransformerConfig`.
        data: see `DataConfig`.
        optimizer: see `OptimizerConfig`.
        training: see `TrainingConfig`.
        mesh: see `MeshConfig`.
        distributed: see `DistributedConfig`.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    model: TransformerConfig = TransformerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()

    def resolve(self) -> "Config":
        """Fills in what follows from other fields, as far as neither data nor devices are needed; raises InputError."""
        require_types(self, "")
        require(self, "", "run_dir", bool(self.run_dir.strip()), "must name a folder", "e.g. 'runs/first'")
        seed_fits, nearest = 0 <= self.seed < 2**32, min(max(self.seed, 0), 2**32 - 1)
        require(self, "", "seed", seed_fits, "must lie in [0, 2**32)", f"nearest: {nearest}")
        model = self.model.resolve()
        training = self.training
        training.validate(model.layers)
        most = LARGEST_INT // model.context_length
        too_many = f"times model.context_length {model.context_length} is more tokens than can be counted"
        require(training, "training", "batch_size", training.batch_size <= most, too_many, f"nearest: {most}")
        self.optimizer.validate(training.steps)
        self.mesh.validate()
        self.distributed.validate()
        return dataclasses.replace(self, model=model, data=self.data.resolve())

    def on(self, devices: int) -> "Config":
        """The configuration, resolved before, on a number of devices: sizes of the mesh and microbatch filled in.

        Raises:
            InputError: the mesh does not fit the devices, or model or batch do not divide over the mesh.
        """
        mesh = self.mesh.on(devices)
        mesh.require_divisible(self.model)
        training = self.training.on(mesh.data * mesh.fsdp)
        return dataclasses.replace(self, mesh=mesh, training=training)
