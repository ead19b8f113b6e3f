"""Settings for every test: reproducible draws, and matrix products in full float32 wherever the tests run."""

import os

import hypothesis

if not os.path.exists("/dev/nvidiactl"):  # the CUDA plugin, there to compile for H200s, complains of what it misses
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
import jax
import pytest

# Without it a GPU multiplies float32 matrices in TF32, three decimal digits short of what the tolerances assume.
jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile(
    "reproducible", derandomize=True, deadline=None, database=None, max_examples=12, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("reproducible")


def pytest_runtest_setup(item):
    """Skips what is marked `hopper` where there is no such GPU."""
    if item.get_closest_marker("hopper") is None:
        return
    device = jax.local_devices()[0]
    if not str(getattr(device, "compute_capability", "")).startswith("9."):
        pytest.skip(f"needs a Hopper GPU, such as an H200; here is {device.device_kind}")


@pytest.fixture(scope="session")
def run_of_eight(tmp_path_factory):
    """The folder of a run that was trained on eight devices, in a process of its own. Not to be changed."""
    from tests.training import runs

    folder = tmp_path_factory.mktemp("eight")
    ended = runs.python(runs.ON_EIGHT, str(folder))
    assert ended.returncode == 0, ended.stderr
    return folder / "run"
