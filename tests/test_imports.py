"""What importing the package costs, and in which direction its parts may depend on each other."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEAVY = ("grain", "lm_eval", "matplotlib", "tokenizers", "orbax")


@pytest.mark.parametrize("module", ["ddl_jax", "ddl_jax.residual", "ddl_jax.transformer", "pallas_kernels"])
def test_importing_the_model_imports_nothing_heavy(module):
    program = f"import sys, {module}; print([n for n in {HEAVY} if n in sys.modules], 'ddl_jax' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["[]", str(module.startswith("ddl_jax"))]


def imported_by(folder):
    """(file, imported module) for every import in a folder, those inside functions too."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path.relative_to(ROOT), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield from ((path.relative_to(ROOT), f"{node.module}.{alias.name}") for alias in node.names)


FORBIDDEN = {
    "pallas_kernels": ("ddl_jax",),
    "ddl_jax/residual": ("ddl_jax.transformer", "ddl_jax.training", "ddl_jax.data"),
    # The Transformer knows the stream's interface, not its kinds.
    "ddl_jax/transformer": (
        "ddl_jax.training",
        "ddl_jax.data",
        "pallas_kernels",
        *(f"ddl_jax.residual.{part}" for part in ("update", "gate", "value", "reader", "expansion", "direction")),
    ),
    "ddl_jax/data": ("jax", "flax", "ddl_jax.training", "ddl_jax.transformer", "ddl_jax.residual"),
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_dependencies_point_downwards_only(folder):
    found = list(imported_by(folder))
    assert found
    for path, module in found:
        assert not any(f"{module}.".startswith(f"{name}.") for name in FORBIDDEN[folder]), f"{path} imports {module}"


@pytest.mark.parametrize("folder", ["ddl_jax", "pallas_kernels"])
def test_no_private_parts_of_jax(folder):
    assert not [(path, module) for path, module in imported_by(folder) if "._src" in module]
