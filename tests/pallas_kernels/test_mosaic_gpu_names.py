"""A release of jax that changes the names of Pallas Mosaic GPU fails here first, by name."""

import dataclasses
import inspect
import pathlib
import re

from jax.experimental.pallas import mosaic_gpu as plgpu

SOURCES = sorted(pathlib.Path(__file__).parents[2].glob("pallas_kernels/**/*.py"))


def test_every_name_of_mosaic_gpu_that_the_kernels_use_exists():
    used = {name for source in SOURCES for name in re.findall(r"\bplgpu\.([A-Za-z_]\w*)", source.read_text())}
    assert {"kernel", "copy_gmem_to_smem", "commit_smem", "Layout"} <= used
    assert {name for name in used if not hasattr(plgpu, name)} == set()


def test_every_option_of_mosaic_gpu_that_the_kernels_use_exists():
    options = {
        plgpu.kernel: "out_type scratch_types grid grid_names num_threads thread_name compiler_params interpret",
        plgpu.copy_smem_to_gmem: "commit_group",
        plgpu.wait_smem_to_gmem: "wait_read_only",
        plgpu.load: "optimized",
        plgpu.Barrier: "num_arrivals num_barriers",
    }
    for function, names in options.items():
        assert set(names.split()) <= set(inspect.signature(function).parameters), function
    fields = {field.name for field in dataclasses.fields(plgpu.CompilerParams)}
    assert {"unsafe_no_auto_barriers", "reduction_scratch_bytes"} <= fields
    assert "detect_races" in {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
    assert {"TILED"} <= set(plgpu.Layout.__members__)
