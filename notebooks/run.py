"""Runs notebooks from top to bottom on the CPU and writes what they put out into them, and nothing of this machine.

    python notebooks/run.py                         every notebook of this folder
    python notebooks/run.py notebooks/1_geometry.ipynb

Needs the extras `notebooks` and `plots`. A notebook that fails is left as it was; the exit code is then 1.
"""

import base64
import io
import os
from pathlib import Path
import sys

import nbclient
from nbclient.exceptions import CellExecutionError
import nbformat
from PIL import Image  # which matplotlib brings

FOLDER = Path(__file__).resolve().parent
SECONDS = 240  # for one cell, on a slow and busy machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> None:
    """Executes one notebook in its own folder and replaces the outputs in the file.

    Args:
        path: the notebook.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # where a text is cut depends on how busy the machine is
        resources={"metadata": {"path": str(path.parent)}},
    )
    # The packages of this checkout, installed or not.
    packages = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    client.execute(env=os.environ | {"PYTHONPATH": packages, "JAX_PLATFORMS": "cpu"})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    nbformat.write(notebook, path)


def smaller(png: str) -> str:
    """A picture of lines and letters, as base64, with a palette of 128 colours: a third of the bytes."""
    drawn, stored = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), io.BytesIO()
    drawn.quantize(128, dither=Image.Dither.NONE).save(stored, format="PNG", optimize=True)
    return base64.b64encode(stored.getvalue()).decode()


def main(paths: list[Path]) -> int:
    """Runs these notebooks, or all of the folder; returns the exit code."""
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        try:
            run(path)
        except CellExecutionError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
