"""The command line: what it accepts, and one readable line for everything it does not."""

from collections.abc import Callable
import dataclasses
import functools
import gc
import importlib
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import pytest
import yaml

from ddl_jax import __main__ as dispatcher
from ddl_jax.command_line import attribute_docs, config_parser, exit_code, parse, read_config, read_configs
from ddl_jax.config import Config
from ddl_jax.config.files import dump_config, fields, from_settings, load_file, to_dict
from ddl_jax.errors import InputError

ROOT = Path(__file__).parent.parent
FIELDS = {key: field for key, field, _ in fields()}
KEYS = list(FIELDS)


def read(*arguments: str) -> Config:
    return read_config(parse(config_parser("test", "Tests."), list(arguments)))


def message(*arguments: str) -> str:
    with pytest.raises(InputError) as error:
        read(*arguments)
    return str(error.value)


# ---- what it accepts


def test_no_arguments_are_the_defaults():
    assert read() == Config().resolve()


def test_later_files_overlay_earlier_ones_and_overrides_win(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nmodel: {width: 64, residual: {value_channels: 2, reader: token}}")
    (tmp_path / "b.yaml").write_text("model: {width: 128, residual: {value_channels: 3}}")
    files = ("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    config = read(*files, "--model.residual.value_channels", "8", "--optimizer.learning_rate=3e-4")
    assert (config.seed, config.model.width, config.optimizer.learning_rate) == (1, 128, 3e-4)
    assert (config.model.residual.value_channels, config.model.residual.reader) == (8, "token")
    assert read("--seed", "3", *files) == read(*files, "--seed=3"), "overrides win wherever they stand"
    assert read(*files).model.residual.value_channels == 3
    assert read("--seed", "1", "--seed", "2").seed == 2


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        (["--run_dir", "2026"], "run_dir", "2026"),
        (["--run_dir", "null"], "run_dir", "null"),
        (["--model.head_dim", "null"], "model.head_dim", 128),
        (["--model.residual.gate.hidden", "8"], "model.residual.gate.hidden", 8),
        (["--model.residual.value.constant", "-3"], "model.residual.value.constant", -3.0),
        (["--model.qk_norm", "false"], "model.qk_norm", False),
        (["--optimizer.clip_norm", "1"], "optimizer.clip_norm", 1.0),
        (["--optimizer.betas", "[0.8, 0.9]"], "optimizer.betas", (0.8, 0.9)),
        (["--data.corpus", "files", "--data.paths", "[a, b*, 2026]"], "data.paths", ("a", "b*", "2026")),
        (["--data.corpus", "files", "--data.paths", "*.txt"], "data.paths", ("*.txt",)),
    ],
)
def test_overrides_have_their_fields_type(arguments, key, value):
    config: Any = read(*arguments)
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


def test_every_setting_can_be_given_on_the_command_line():
    resolved = Config().resolve()
    for key in KEYS:
        value: Any = resolved
        for name in key.split("."):
            value = getattr(value, name)
        text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
        assert read(f"--{key}", text.split("\n")[0]) == resolved


def test_several_configurations_share_the_overrides(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(f"run_dir: {name}\nmodel: {{layers: 1}}")
    (tmp_path / "over.yaml").write_text("model: {layers: 3}\nseed: 5")
    parser = config_parser("ddl bench", "Times.", several=True)
    parser.add_argument("--json", action="store_true")
    a, b, over = (str(tmp_path / f"{name}.yaml") for name in ("a", "b", "over"))
    options = parse(parser, [a, b, "--model.layers", "2", "--config", over, "--json"])
    assert options.json is True
    configs = read_configs(options)
    assert [(name, c.run_dir, c.model.layers, c.seed) for name, c in configs] == [(a, "a", 2, 5), (b, "b", 2, 5)]
    assert read_configs(parse(parser, ["--config", over])) == [(over, read("--config", over))]
    assert read_configs(parse(parser, [])) == [("defaults", Config().resolve())]
    with pytest.raises(InputError, match=r"a\.yaml: training.unroll 2 must not exceed model.layers 1"):
        read_configs(parse(parser, [a, b, "--training.unroll", "2"]))
    with pytest.raises(InputError, match="unexpected argument .*b.yaml'; settings are given as --KEY VALUE, after any"):
        parse(parser, [a, "--model.layers", "2", b])
    with pytest.raises(InputError, match="unknown option '--jsn'; did you mean '--json'?"):
        parse(parser, [a, "--jsn"])


# ---- what it refuses


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--model.lyers", "3"], "unknown option '--model.lyers'; did you mean '--model.layers'?"),
        (["--value_channels=3"], "unknown option '--value_channels'; did you mean '--model.residual.value_channels'?"),
        (["--model.value_channels", "3"], "unknown option '--model.value_channels'; did you mean '--model.residual."),
        (["--confg", "3"], "unknown option '--confg'; did you mean '--config'?"),
        (["--model.layer", "3"], "unknown option '--model.layer'; did you mean '--model.layers'?"),
        (["--zebra"], "unknown option '--zebra'; see --help"),
        (["-x"], "unknown option '-x'; see --help"),
        (["--model", "3"], "--model is a section, not a setting; did you mean '--model.layers'?"),
        (
            ["--model.residual={}"],
            "--model.residual is a section, not a setting; did you mean '--model.residual.kind'?",
        ),
        (["a.yaml"], "unexpected argument 'a.yaml'; settings are given as --KEY VALUE, after any files"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "--seed", "3"], "argument --config: expected one argument"),
        (["--config", ""], ".: cannot be read: Is a directory"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
        (["--seed"], "argument --seed: expected one argument"),
        (["--seed", ""], "seed '' must be an integer"),
        (["--seed", "1.0"], "seed '1.0' must be an integer"),
        (["--seed", "true"], "seed 'true' must be an integer"),
        (["--seed", "null"], "seed 'null' must be an integer"),
        (["--seed", "[1"], "seed '[1' must be an integer"),
        (["--seed", "{a: 1}"], "seed '{a: 1}' must be an integer"),
        (["--seed=-1"], "seed -1 must lie in [0, 2**32); nearest: 0"),
        (["--model.layers", "0x" + "f" * 5000], "model.layers 0xffffffffffffffffff... is too large"),
        (["--model.residual.kind", "Delta"], "model.residual.kind 'Delta' must be one of additive, additive_expanded,"),
        (["--optimizer.betas", "[1"], "optimizer.betas '[1' must be a list of 2 numbers"),
        (["--optimizer.clip_norm", "inf"], "optimizer.clip_norm 'inf' must be a finite number"),
        (["--run_dir", "a\nb"], "run_dir 'a\\nb' must be printable text"),
        (["--run_dir", "\udcff"], "run_dir '\\udcff' must be printable text"),
        (
            ["--model.width", "770", "--model.heads", "6"],
            "model.width 770 is not divisible by model.heads 6; nearest: ",
        ),
    ],
)
def test_a_bad_command_line(arguments, expected):
    assert message(*arguments).startswith(expected)
    assert len(message(*arguments).splitlines()) == 1


def test_exit_code_is_that_of_the_command_or_2_with_one_line(capsys):
    assert exit_code(lambda: 3) == 3
    assert capsys.readouterr() == ("", "")

    def refuse() -> int:
        raise InputError("first\nsecond")

    assert exit_code(refuse) == 2
    assert capsys.readouterr() == ("", "error: first second\n")


COMMAND = "import sys; from ddl_jax.command_line import exit_code; sys.exit(exit_code(lambda: print('caf\\xe9') or 0))"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_that_cannot_be_written_is_one_line_or_none(unbuffered):
    run = functools.partial(
        subprocess.run,
        [sys.executable, "-c", COMMAND],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        cwd=ROOT,
    )
    with open("/dev/full", "w") as full:
        failed = run(stdout=full)
    assert (failed.returncode, failed.stderr) == (1, b"failed: [Errno 28] No space left on device\n")
    nobody, pipe = os.pipe()
    os.close(nobody)
    unread = run(stdout=pipe)
    os.close(pipe)
    assert (unread.returncode, unread.stderr) == (1, b"")


def test_what_the_output_has_no_letter_for_is_replaced():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, env=env, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf?\n", b"")


@pytest.mark.parametrize("where", ["a callback", "an import"])
def test_ctrl_c_waits_where_an_exception_would_be_lost(where, tmp_path, monkeypatch, capsys):
    done = []

    def press(*_):
        if not done:
            signal.raise_signal(signal.SIGINT)
            done.append(where)

    def work() -> int:
        if where == "an import":
            importlib.import_module("pressed_while_imported")
        else:
            gc.callbacks.append(press)
            gc.collect()
        time.sleep(5)
        done.append("work")
        return 0

    (tmp_path / "pressed_while_imported.py").write_text("import signal\nsignal.press()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signal, "press", press, raising=False)
    try:
        assert exit_code(work) == 1
    finally:
        if press in gc.callbacks:
            gc.callbacks.remove(press)
    assert done == [where], "the callback or import ends, and nothing after it"
    assert capsys.readouterr() == ("", "stopped at once; what was saved before stays\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_ctrl_c_becomes_on_its_way_is_not_the_users_mistake(capsys):
    def work() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:  # as storage does while it reads a checkpoint
            raise InputError("the checkpoint is damaged") from None
        return 0

    assert exit_code(work) == 1
    assert capsys.readouterr() == ("", "stopped at once; what was saved before stays\n")


def test_ctrl_c_comes_again_where_it_was_swallowed_and_lets_cleaning_up_end(capsys):
    done = []

    def work() -> int:
        try:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:  # as jax does where it looks for devices
                done.append("swallowed")
            time.sleep(5)
        finally:
            time.sleep(0.3)  # longer than it waits before it looks again
            done.append("cleaned up")
        return 0

    assert exit_code(work) == 1
    assert done == ["swallowed", "cleaned up"]
    assert capsys.readouterr() == ("", "stopped at once; what was saved before stays\n")


def test_out_of_memory_is_said_in_one_line(capsys):
    def work(error: Exception) -> int:
        raise error

    said = "INTERNAL: Error dispatching computation: Out of memory allocating 250 bytes."
    for error in (RuntimeError(said), RuntimeError("RESOURCE_EXHAUSTED: ..."), MemoryError()):
        assert exit_code(lambda error=error: work(error)) == 1
        assert capsys.readouterr().err == f"failed: out of memory ({error})\n"
    with pytest.raises(RuntimeError, match="another"):
        exit_code(lambda: work(RuntimeError("another")))


# ---- help


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        read("--help")
    assert exit.value.code == 0
    # argparse breaks lines at blanks and hyphens
    text = "".join(capsys.readouterr().out.split())
    for key, field, section in fields():
        assert f"--{key}" in text
        assert "".join(attribute_docs(section)[field.name].split()) in text
    assert "peak.[default:0.001]" in text and "--configFILE" in text
    assert "--model.residual.reader{identity,channel,token}howasublayerseesthestate" in text


def test_every_field_is_documented_and_nothing_else_is():
    sections = {section for _, _, section in fields()}
    for section in sections:
        assert list(attribute_docs(section)) == [field.name for field in dataclasses.fields(section)]
        assert all(len(text) > 4 for text in attribute_docs(section).values())


# ---- fuzz

# Separated by "|": what YAML or a converter may stumble over, and values that are right for some field.
ODD = (
    "nan|inf|-.inf|1e400|1e-400|0x|0x1f|1_0|1:30|010|~|null|yes|off|[|{|[]|{}|- a|a: b|&a [*a]|*a|!!int x|"
    "!!timestamp x|!!python/object:os.system x|%|@|`|2020-13-45|2020-01-01|'|\"|\\|[[1]]|--|<<|=|?|#|\t|\x00|\ud800|"
    "8.0|8.5|-1|0|1|2|3|4|8|4294967296|99999999999999999999|none|mup|auto|token|identity|channel|repeat|convolution|additive|delta|"
    "branch|files|bpe|gpt2|official_code|mlp|sigmoid"
)
ODD_TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(ODD.split("|")),
    st.integers(4000, 6000).map(lambda n: "9" * n),
    st.integers(900, 3000).map(lambda n: "[" * n),
)
ODD_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ODD_TEXT, st.dates(), st.binary(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_TEXT, inner, max_size=3)),
    max_leaves=4,
)
FILES = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "studies"]
START = [to_dict(from_settings(load_file(path)).resolve()) for path in FILES]
FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def resolves_or_refuses(*arguments: str) -> Config | None:
    """The configuration, or None after an InputError of one printable line; any other exception is a bug."""
    try:
        config = read(*arguments)
    except InputError as error:
        text = str(error)
        assert text.isprintable() and len(text.splitlines()) == 1 and len(text) < 500
        return None
    assert config.resolve() == config
    return config


def paths_of(tree: Any, path: tuple = ()) -> list[tuple]:
    below = [p for key, value in tree.items() for p in paths_of(value, (*path, key))] if isinstance(tree, dict) else []
    return [path, *below] if path else below


def mutate(tree: dict, draw: Callable) -> None:
    """One change in place: of a value, a key or the structure."""
    paths = paths_of(tree)
    if not paths:
        return
    *section, key = draw(st.sampled_from(paths))
    for name in section:
        tree = tree[name]
    change = draw(st.sampled_from(["value", "value", "value", "number", "remove", "rename", "add", "wrap", "misspell"]))
    if change == "value":
        tree[key] = draw(ODD_VALUE)
    elif change == "number":
        tree[key] = draw(st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**63, 10**30, 0.5, 1e-9, 1e300])))
    elif change == "remove":
        del tree[key]
    elif change == "rename":
        tree[draw(ODD_TEXT)] = tree.pop(key)
    elif change == "add":
        tree[draw(st.sampled_from(KEYS).map(lambda k: k.rpartition(".")[2]))] = draw(ODD_VALUE)
    elif change == "wrap":
        tree[key] = draw(st.sampled_from([[tree[key]], {key: tree[key]}]))
    else:
        tree[f"{key}s"] = tree.pop(key)


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


@FUZZ
@given(st.data())
def test_fuzz_of_valid_trees(tmp_path, data):
    tree = yaml.safe_load(yaml.safe_dump(data.draw(st.sampled_from(START))))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(tree, data.draw)
    file = write(tmp_path / "a.yaml", yaml.safe_dump(tree, allow_unicode=data.draw(st.booleans())))
    config = resolves_or_refuses("--config", file)
    if config is not None:
        again = from_settings(load_file(write(tmp_path / "b.yaml", dump_config(config))))
        assert again == config


@FUZZ
@given(st.data())
def test_fuzz_of_the_text_of_a_file(tmp_path, data):
    text = yaml.safe_dump(data.draw(st.sampled_from(START)), sort_keys=False)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 5, 100]))
        text = text[:start] + data.draw(ODD_TEXT) + text[end:]
    resolves_or_refuses("--config", write(tmp_path / "a.yaml", text))


@FUZZ
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(KEYS).map("--{}".format), ODD_TEXT),
            st.tuples(st.sampled_from(KEYS).map("--{}".format), st.integers(0, 9).map(str)),
            st.builds(lambda key, value: (f"--{key}={value}",), st.sampled_from(KEYS), ODD_TEXT),
            st.tuples(st.sampled_from(["--config", "--model", "--model.", "--.", "-", "--", "--seed.x", "--=", "-h1"])),
            st.tuples(ODD_TEXT),
            st.builds(lambda key: (f"--{key}s", "1"), st.sampled_from(KEYS)),
        ),
        min_size=1,
        max_size=4,
    )
)
@example([("--config", "\x00")])
@example([("--", "--seed", "3")])
def test_fuzz_of_the_command_line(parts):
    arguments = [argument for part in parts for argument in part]
    if not {"-h", "--help"} & {argument.strip() for argument in arguments}:
        resolves_or_refuses(*arguments)


def of_type(hint: Any) -> st.SearchStrategy[str]:
    """Text that is right for a field's type, so that the rules are reached: often null, near a bound or outside it."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(st.sampled_from(["0", "0.9", "0.5", "1", "1e-3"]), min_size=2, max_size=2).map(
            lambda items: f"[{', '.join(items)}]"
        )
    if get_args(hint):
        return st.one_of(*map(of_type, get_args(hint)))
    numbers = st.sampled_from([0, 1, 2, 3, 4, 8, 64, 96, 257, 2**31 - 1, 2**31, -1])
    return {
        int: numbers.map(str),
        float: st.one_of(numbers, st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1)).map(str),
        bool: st.sampled_from(["true", "false"]),
        str: st.sampled_from(["bytes", "bpe", "gpt2", "x/tokenizer.json", " "]),
        type(None): st.just("null"),
    }[hint]


@FUZZ
@given(
    st.dictionaries(st.sampled_from(KEYS), st.none(), max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({key: of_type(FIELDS[key].type) for key in chosen})
    )
)
def test_fuzz_of_the_rules(tmp_path, chosen):
    config = resolves_or_refuses(*(f"--{key}={value}" for key, value in chosen.items()))
    if config is not None:
        assert from_settings(load_file(write(tmp_path / "b.yaml", dump_config(config)))) == config


# ---- the real command


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--config", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
        (["--config", "."], ".: cannot be read: Is a directory"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "syntax.yaml"], "syntax.yaml: line 2: "),
        (["--config", "list.yaml"], "list.yaml: must hold keys and values"),
        (["--config", "latin.yaml"], "latin.yaml: is not UTF-8 text"),
        (["--config", "key.yaml"], "key.yaml: model.lyers is not a setting; did you mean 'model.layers'?"),
        (["--config", "cycle.yaml"], "cycle.yaml (base of cycle.yaml): the base files form a cycle"),
        (["--model.lyers", "3"], "unknown option '--model.lyers'; did you mean '--model.layers'?"),
        (["--model.layers", "eight"], "model.layers 'eight' must be an integer"),
        (["--model.width", "770", "--model.heads", "6"], "model.width 770 is not divisible by model.heads 6"),
        (["--model.residual.kind", "plain"], "model.residual.kind 'plain' must be one of additive,"),
        (["--optimizer.learning_rate", "nan"], "optimizer.learning_rate 'nan' must be a finite number"),
        (["--run_dir", "\udcff"], "run_dir '\\udcff' must be printable text"),
    ],
)
def test_train_refuses_with_one_line_and_exit_code_2(tmp_path, arguments, expected):
    (tmp_path / "syntax.yaml").write_text("seed: 1\nmodel: ]")
    (tmp_path / "list.yaml").write_text("- seed")
    (tmp_path / "latin.yaml").write_bytes("run_dir: ä".encode("latin-1"))
    (tmp_path / "key.yaml").write_text("model: {lyers: 3}")
    (tmp_path / "cycle.yaml").write_text("base: cycle.yaml")
    result = run(str(ROOT / "train.py"), *arguments, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {expected}")
    assert re.fullmatch(r"[^\n]+\n", result.stderr)
    assert not list(tmp_path.glob("runs")), "nothing is made of bad input"


def test_train_prints_help():
    result = run("train.py", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--model.residual.value_channels INT" in result.stdout


def test_parsing_is_quick_and_loads_nothing_heavy():
    program = """if True:
        import sys, time
        import jsonargparse, yaml
        import train
        from ddl_jax.command_line import config_parser, parse, read_config
        start = time.perf_counter()
        read_config(parse(config_parser("test", ""), ["--config", "configs/small/cc.yaml", "--seed", "3"]))
        print(time.perf_counter() - start)
        heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "tokenizers", "matplotlib", "lm_eval"}
        print(sorted(heavy & set(sys.modules)))
    """
    started = time.perf_counter()
    result = run("-c", program)
    assert result.returncode == 0, result.stderr
    seconds, heavy = result.stdout.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 0.5
    assert time.perf_counter() - started < 10


# ---- the dispatcher


def test_the_dispatcher(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(dispatcher.importlib, "import_module", lambda name: calls.append(name) or FakeCommand)

    class FakeCommand:
        @staticmethod
        def main(arguments: list[str]) -> int:
            calls.append(arguments)
            return 4

    assert dispatcher.dispatch(["bench", "a.yaml", "--help"]) == 4
    assert calls == ["ddl_jax.bench", ["a.yaml", "--help"]]
    assert dispatcher.dispatch(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w.*", out, re.MULTILINE) for name in dispatcher.COMMANDS)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["bnch"], "error: 'bnch' is not a command; did you mean 'bench'?\n"),
        (["\nx"], f"error: '\\nx' is not a command; known: {', '.join(dispatcher.COMMANDS)}\n"),
        ([], f"error: a command is missing; known: {', '.join(dispatcher.COMMANDS)}\n"),
    ],
)
def test_the_dispatcher_refuses_what_is_no_command(arguments, expected):
    result = run("-m", "ddl_jax", *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)
