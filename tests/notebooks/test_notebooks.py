"""The notebooks: each runs from top to bottom, and is committed with what it printed and drew."""

import json
from pathlib import Path
import re
import subprocess
import sys

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 300  # for a whole notebook; it takes about ten on an idle machine
BYTES = 400_000


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell) -> list[tuple[str, ...]]:
    """What a cell put out, leaving what it says aside: numbers may differ in their last digit between machines."""
    return [(output.output_type, output.get("name", ""), *sorted(output.get("data", {}))) for output in cell.outputs]


def test_there_are_notebooks():
    assert NOTEBOOKS


def run(path: Path) -> subprocess.CompletedProcess:
    """`python notebooks/run.py path`, in another directory than the repository's."""
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_puts_out_what_is_committed(path, tmp_path):
    copy = tmp_path / path.name
    committed, bare = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    for cell in code_cells(bare):
        cell.outputs = []
    nbformat.write(bare, copy)
    done = run(copy)
    assert done.returncode == 0, done.stderr
    ran = nbformat.read(copy, as_version=4)
    for number, (new, old) in enumerate(zip(code_cells(ran), code_cells(committed), strict=True)):
        assert kinds(new) == kinds(old), f"{path.name}, code cell {number}: python notebooks/run.py, and commit"


def test_a_failing_cell_fails_the_run_and_leaves_the_file(tmp_path):
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2, 'no'")]), path)
    before = path.read_bytes()
    done = run(path)
    assert done.returncode == 1 and "AssertionError" in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_outputs_and_without_errors(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    assert any(output.output_type == "stream" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_says_nothing_of_the_machine_it_ran_on(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document["metadata"]) <= {"kernelspec", "language_info"}
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    for cell in document["cells"]:
        assert not cell["metadata"], "run times and editor settings do not belong into the file"
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    paths = re.findall(r"(?:/(?:home|Users|tmp|root|usr|opt|mnt|var)/|[A-Z]:\\\\)\S*", json.dumps(document))
    assert paths == []
