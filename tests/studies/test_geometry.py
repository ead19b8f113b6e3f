"""The figures of the rewrite's geometry: what they plot is what they were given, where a reader looks for it."""

import os
import subprocess
import sys

from matplotlib import figure as figures
import numpy as np

from ddl_jax.studies import geometry
from pallas_kernels import rewrite

GATES = np.array([0.0, 0.5, 1.0, 1.5, 2.0], np.float32)


def line(axes, label: str) -> np.ndarray:
    """The points (n, 2) of the one line with this label."""
    (found,) = [line for line in axes.get_lines() if line.get_label() == label]
    return found.get_xydata()


def drawn(figure) -> "figures.Figure":
    """The figure, after everything on it was laid out and rendered without a display."""
    assert isinstance(figure, figures.Figure)
    figure.savefig(os.devnull, format="png")
    return figure


def texts(axes) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.xy for text in axes.texts if text.get_text()}


def edited(state, direction, value: float, gates) -> np.ndarray:
    """The state (…, 2), of one channel, rewritten at each gate: (gates, …, 2)."""
    state = np.broadcast_to(np.float32(state), (len(gates), *np.shape(state)))
    tokens = state.shape[:-1]
    gates = np.broadcast_to(gates.reshape(-1, *[1] * (len(tokens) - 1)), tokens)
    branch = np.broadcast_to(np.float32(direction), state.shape)
    return np.asarray(rewrite(state[..., None, :], branch, np.full((*tokens, 1), value, np.float32), gates))[..., 0, :]


def test_importing_the_module_does_not_import_matplotlib():
    program = "import sys, ddl_jax.studies.geometry, ddl_jax.studies.architecture; print('matplotlib' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_edit_figure_skips_overwrites_and_reflects():
    states = edited((4, 2), (1, 0), 1.0, GATES)
    (axes,) = drawn(geometry.edit_figure(states, GATES, np.array([1.0, 0.0]), 1.0)).axes
    path = line(axes, "X'")
    np.testing.assert_allclose(path[[0, 2, 4]], [(4, 2), (1, 2), (-2, 2)], atol=1e-5)
    np.testing.assert_allclose(axes.collections[0].get_offsets(), path)
    for name, place in {"skip": (4, 2), "overwrite": (1, 2), "reflect": (-2, 2), "β = 1.5": (-0.5, 2)}.items():
        np.testing.assert_allclose(texts(axes)[name], place, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(line(axes, "target")[:, 0], 1)


def test_edit_figure_draws_the_target_at_right_angles_to_a_tilted_direction():
    k = np.array([0.6, 0.8])
    states = edited((4, 2), k, 1.5, GATES)
    (axes,) = drawn(geometry.edit_figure(states, GATES, k, 1.5)).axes
    np.testing.assert_allclose(line(axes, "target") @ k, 1.5, atol=1e-9)
    np.testing.assert_allclose(line(axes, "X'")[2] @ k, 1.5, atol=1e-5)


def test_every_dot_and_name_of_the_edit_figure_lies_inside_it():
    states = edited((4, 2), (1, 0), 1.0, GATES)
    figure = drawn(geometry.edit_figure(states, GATES, np.array([1.0, 0.0]), 1.0))
    page, boxes = figure.bbox, [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    overlaps = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert overlaps == []


def test_shapes_figure_has_a_panel_for_each_gate():
    triangle = np.array([(2.0, 0.0), (3.0, 0.0), (2.0, 1.0)])
    outlines = edited(triangle, (1, 0), 1.0, GATES)
    panels = drawn(geometry.shapes_figure(outlines, GATES, np.array([1.0, 0.0]), 1.0)).axes
    assert [axes.get_title().split("\n") for axes in panels] == [
        ["β = 0", "skip"], ["β = 0.5", ""], ["β = 1", "overwrite"], ["β = 1.5", ""], ["β = 2", "reflect"]
    ]  # fmt: skip
    closed = np.array([0, 1, 2, 0])
    for axes, β in zip(panels, GATES, strict=True):
        expected = np.stack([triangle[:, 0] - β * (triangle[:, 0] - 1), triangle[:, 1]], axis=-1)[closed]
        np.testing.assert_allclose(line(axes, "X'"), expected, atol=1e-5)
        np.testing.assert_allclose(axes.patches[0].get_xy(), triangle[closed], atol=1e-5)  # the pale original


def test_spectrum_figure_moves_one_eigenvalue_only():
    matrices = edited(np.eye(2), (0.6, 0.8), 0.0, GATES)
    spectrum, determinants = np.linalg.eigvalsh(matrices), np.linalg.det(matrices)
    (axes,) = drawn(geometry.spectrum_figure(GATES, spectrum, determinants)).axes
    falling = np.stack([GATES, 1 - GATES], axis=-1)
    np.testing.assert_allclose(line(axes, "smallest eigenvalue: 1 − βρ"), falling, atol=1e-5)
    np.testing.assert_allclose(line(axes, "determinant"), falling, atol=1e-5)
    np.testing.assert_allclose(line(axes, "the other 1 eigenvalues")[:, 1], 1, atol=1e-5)
    assert texts(axes)["overwrite"][0] == 1 and texts(axes)["shrinks and flips"][0] == 1.5


def test_norms_figure_has_a_panel_for_each_case_and_a_line_for_each_state():
    ratios = np.array([[[1, 0.5, 1], [1, 0.8, 1]], [[1, 1.5, 2], [1, 1.2, 3]]])
    panels = drawn(geometry.norms_figure(np.array([0, 1, 2]), ratios, ["v = 0", "v = 1"])).axes
    assert [axes.get_title() for axes in panels] == ["v = 0", "v = 1"]
    for axes, case in zip(panels, ratios, strict=True):
        np.testing.assert_array_equal([state.get_ydata() for state in axes.get_lines()[1:]], case)
        np.testing.assert_array_equal(line(axes, "same norm")[:, 1], 1)


def test_repetition_figure_shows_signs_and_sizes():
    values = np.array([[3.0, 1.5, 0.75], [3.0, -3.0, 3.0]])
    signed, size = drawn(geometry.repetition_figure(np.array([0.5, 2.0]), values)).axes
    for label, expected in zip(["β = 0.5", "β = 2"], values, strict=True):
        np.testing.assert_array_equal(line(signed, label), np.stack([np.arange(3), expected], axis=-1))
        np.testing.assert_array_equal(line(size, label)[:, 1], np.abs(expected))
    assert (signed.get_yscale(), size.get_yscale()) == ("linear", "log")


def test_interference_figure_has_a_line_for_each_gate():
    overlaps, gates = np.array([-1.0, 0.0, 1.0]), np.array([0.5, 2.0])
    (axes,) = drawn(geometry.interference_figure(overlaps, gates, gates[:, None] * overlaps)).axes
    np.testing.assert_array_equal(line(axes, "β = 0.5"), [(-1, -0.5), (0, 0), (1, 0.5)])
    np.testing.assert_array_equal(line(axes, "β = 2"), [(-1, -2), (0, 0), (1, 2)])


def test_alternation_figure_counts_rounds_from_one():
    (axes,) = drawn(geometry.alternation_figure(np.array([0.3, 0.9]), np.array([[1, 0.09], [1, 0.81]]))).axes
    np.testing.assert_array_equal(line(axes, "k·k' = 0.3"), [(1, 1), (2, 0.09)])
    np.testing.assert_array_equal(line(axes, "k·k' = 0.9"), [(1, 1), (2, 0.81)])
    assert axes.get_yscale() == "log"


def test_erase_figure_keeps_the_two_rules_apart():
    delta, write_only = np.array([[4.0, 1.0], [-2.0, 1.0]]), np.array([[4.0, 5.0], [-2.0, -1.0]])
    panels = drawn(geometry.erase_figure(delta, write_only, 1.0)).axes
    assert [axes.get_title().split(":")[0] for axes in panels] == ["delta", "write-only"]
    for axes, readouts in zip(panels, (delta, write_only), strict=True):
        np.testing.assert_array_equal(line(axes, "target")[:, 1], 1)
        np.testing.assert_array_equal([state.get_ydata() for state in axes.get_lines()[1:]], readouts)


def test_guard_figure_marks_where_the_output_is_as_long_as_epsilon():
    norms = np.array([1e-7, 1e-5, 1e-3])
    squares = norms**2 / (norms**2 + 1e-10)
    (axes,) = drawn(geometry.guard_figure(norms, squares, 1e-5)).axes
    np.testing.assert_array_equal(line(axes, "ρ"), np.stack([norms, squares], axis=-1))
    assert texts(axes)["‖h‖ = ε"][0] == 1e-5 and axes.get_xscale() == "log"


def test_undo_figure_counts_from_the_last_edit():
    (axes,) = drawn(geometry.undo_figure({"kept": np.array([1e-6, 1e-7]), "divided": np.array([1e2, 1e-3])})).axes
    np.testing.assert_array_equal(line(axes, "kept"), [(1, 1e-7), (2, 1e-6)])
    np.testing.assert_array_equal(line(axes, "divided"), [(1, 1e-3), (2, 1e2)])
    assert axes.get_yscale() == "log"
