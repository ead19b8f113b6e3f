"""The picture of one sublayer: the letters of the code on it, nothing on top of anything else."""

import sys

import pytest

from ddl_jax.studies import architecture


def texts(figure):
    return [text for text in figure.axes[0].texts if text.get_text()]


def test_it_names_the_steps_and_the_letters():
    words = {text.get_text() for text in texts(architecture.sublayer_figure())}
    assert {"reader", "norm", "sublayer", "direction", "gate", "value", "rewrite"} <= words
    assert {"X", "x", "c", "h", "k", "β", "v", "X'", "r = kᵀX", "w = v − r", "X' = X + β k wᵀ"} <= words


def test_no_text_overlaps_another_or_leaves_the_page():
    figure = architecture.sublayer_figure()
    figure.draw_without_rendering()
    page, boxes = figure.bbox, {text: text.get_window_extent() for text in texts(figure)}
    for text, box in boxes.items():
        inside = page.x0 < box.x0 and box.x1 < page.x1 and page.y0 < box.y0 and box.y1 < page.y1
        assert inside, text.get_text()
        others = [other.get_text() for other, space in boxes.items() if other is not text and box.overlaps(space)]
        assert not others, (text.get_text(), others)


def test_the_command_draws_the_same_file_again(tmp_path, monkeypatch):
    for name in ("a.svg", "b.svg"):
        monkeypatch.setattr(sys, "argv", ["architecture", str(tmp_path / name)])
        architecture.main()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_the_command_refuses_another_ending(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["architecture", "picture.doc"])
    with pytest.raises(SystemExit) as stopped:
        architecture.main()
    assert stopped.value.code == 2 and "picture.doc does not end in .svg or .png" in capsys.readouterr().err
