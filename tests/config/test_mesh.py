"""`mesh.*` and `distributed.*`: what fits which devices, and how it is said where it does not."""

from pathlib import Path

import pytest

from ddl_jax.config import Config, DistributedConfig, MeshConfig, TrainingConfig, TransformerConfig
from ddl_jax.config.files import from_settings, load_file
from ddl_jax.errors import InputError


@pytest.mark.parametrize(
    "mesh, devices, sizes",
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (8, 1, 1)),
        ({"fsdp": 4}, 8, (2, 4, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, 8, (1, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, (2, 2, 2)),
    ],
)
def test_the_rest_of_the_devices_is_filled_in(mesh, devices, sizes):
    config = MeshConfig(**mesh)
    config.validate()
    on = config.on(devices)
    assert (on.data, on.fsdp, on.tensor) == sizes
    assert on.on(devices) == on


def config(width=768, heads=6, head_dim=128, batch_size=32, microbatch_size=None, **mesh) -> Config:
    return Config(
        model=TransformerConfig(width=width, heads=heads, head_dim=head_dim),
        training=TrainingConfig(batch_size=batch_size, microbatch_size=microbatch_size),
        mesh=MeshConfig(**mesh),
    ).resolve()


@pytest.mark.parametrize(
    "settings, devices, message",
    [
        (
            {"fsdp": 3},
            8,
            "mesh.fsdp 3 times the other sizes is 3, which does not divide the number of devices, 8; nearest: 2, 4",
        ),
        (
            {"fsdp": 2, "tensor": 6},
            8,
            "mesh.tensor 6 times the other sizes is 12, which does not divide the number of devices, 8; nearest: 2, 4",
        ),
        (
            {"data": 4},
            8,
            "mesh.data 4 (data) times 1 (fsdp) times 1 (tensor) is 4, not the number of devices, 8; nearest: 8, or -1",
        ),
        ({"tensor": 4}, 4, "mesh.tensor 4 does not divide model.heads 6; nearest: 1, 2"),
        (
            {"tensor": 3, "width": 100},
            3,
            "mesh.tensor 3 does not divide the MLP's hidden width 266, floor(8/3 model.width); nearest: 1, 2",
        ),
        ({"fsdp": 5, "batch_size": 10}, 5, "mesh.fsdp 5 does not divide model.width 768; nearest: 4, 6"),
        (
            {"batch_size": 30},
            8,
            "training.batch_size 30 does not divide over mesh.data times mesh.fsdp, which is 8 devices; "
            "nearest: 24, 32",
        ),
        (
            {"microbatch_size": 8},
            8,
            "training.microbatch_size 8 does not divide the 4 sequences that a device has of a batch; nearest: 2, 4",
        ),
    ],
)
def test_what_does_not_divide_is_said_with_what_would(settings, devices, message):
    with pytest.raises(InputError) as error:
        config(**settings).on(devices)
    assert str(error.value) == message


def test_sizes_are_global_for_the_batch_and_per_device_for_the_microbatch():
    on = config(fsdp=2, tensor=2).on(8)
    assert (on.training.batch_size, on.training.microbatch_size) == (32, 8)  # 32 over data 2 times fsdp 2
    assert config(microbatch_size=2).on(8).training.microbatch_size == 2


@pytest.mark.parametrize("file", [*Path("configs/small").iterdir(), *Path("configs/medium").iterdir()], ids=str)
def test_the_paper_s_configurations_run_on_one_to_sixteen_devices(file):
    made = from_settings(load_file(file)).resolve()
    for devices in (1, 2, 4, 8, 16):
        assert made.on(devices).mesh.data == devices


@pytest.mark.parametrize(
    "mesh, message",
    [
        ({"data": 0}, "mesh.data 0 must be a number of devices, or -1 for the rest; nearest: 1"),
        ({"tensor": -2}, "mesh.tensor -2 must be a number of devices, or -1 for the rest; nearest: 1"),
        ({"fsdp": -1}, "mesh.data -1 and mesh.fsdp -1 cannot both be the rest; give mesh.fsdp a number"),
    ],
)
def test_broken_rules_of_the_mesh(mesh, message):
    with pytest.raises(InputError) as error:
        Config(mesh=MeshConfig(**mesh)).resolve()
    assert str(error.value) == message


EXPLICIT = {"mode": "explicit", "coordinator": "10.0.0.1:8476", "processes": 2, "process_id": 1}


@pytest.mark.parametrize("changes", [{}, {"coordinator": "[::1]:80"}, {"coordinator": "node-3.cluster:8476"}])
def test_explicit_addresses(changes):
    Config(distributed=DistributedConfig(**(EXPLICIT | changes))).resolve()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mode": "auto"}, "coordinator '10.0.0.1:8476' does not apply: distributed.mode is 'auto', not 'explicit'"),
        ({"coordinator": None}, "coordinator null is needed for distributed.mode 'explicit'"),
        ({"coordinator": "10.0.0.1"}, "coordinator '10.0.0.1' must be host:port; e.g. '10.0.0.1:8476'"),
        ({"coordinator": "a:99999"}, "coordinator 'a:99999' must be host:port; e.g. '10.0.0.1:8476'"),
        ({"process_id": 2}, "process_id 2 must lie in [0, distributed.processes), which is 2; nearest: 1"),
        ({"process_id": None}, "process_id null is needed for distributed.mode 'explicit'"),
        ({"timeout": 0}, "timeout 0 must be at least 1; nearest: 1"),
    ],
)
def test_broken_rules_of_several_processes(changes, message):
    with pytest.raises(InputError) as error:
        Config(distributed=DistributedConfig(**(EXPLICIT | changes))).resolve()
    assert str(error.value).startswith(f"distributed.{message}")
