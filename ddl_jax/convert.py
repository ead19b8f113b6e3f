"""`ddl convert`: official weights into a run directory, and back."""

from pathlib import Path
import sys

from ddl_jax.command_line import parse, plain_parser
from ddl_jax.config.rules import plain, plain_path
from ddl_jax.errors import InputError
from ddl_jax.interop.options import known_variant


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0, or 1 if something cannot be written."""
    parser = plain_parser(
        "ddl convert",
        "Makes a run directory of an official model's weights, as generate, evaluate and train.py take it; or, with "
        "--to, the official weights of a run. Files are .safetensors (extra weights) or .npz.",
        "FILE --run DIR [--variant NAME] [--official-config FILE] [--tokenizer NAME] | --run DIR --to FILE",
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="official weights")
    add("--run", metavar="DIR", help="the run_dir to write, which must not exist yet; with --to, the one to read")
    add("--variant", metavar="NAME", help="baseline, vdim1, tc, tc_ec, cc or cc_ec, unless FILE says which")
    add(
        "--official-config",
        metavar="FILE",
        help="JSON of the official keyword arguments [default: what FILE says, or the .json of the same name, or the "
        "config.json beside it; else the official defaults]",
    )
    add("--tokenizer", metavar="NAME", help="as data.tokenizer [default: gpt2, for a smaller vocabulary bytes]")
    add("--to", metavar="FILE", help="official weights to write, and beside them a .json of the keyword arguments")
    options = parse(parser, arguments)
    if options.run is None:
        raise InputError("--run is missing; name the run_dir to write, or with --to the one to read")
    if (options.file is None) == (options.to is None):
        raise InputError("give either FILE, official weights to read, or --to FILE, where to write them")
    return _from_official(options) if options.to is None else _to_official(options)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _from_official(options) -> int:
    from ddl_jax.interop.files import read_json, read_weights

    file, run = Path(options.file), Path(options.run).expanduser()
    if options.variant is not None:
        known_variant(options.variant)
    if options.tokenizer == "bpe":
        raise InputError("--tokenizer bpe is trained on text, which there is none of; use gpt2 or a tokenizer.json")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise InputError(f"--run {plain(options.run)!r} exists already; name a new folder")
    weights = read_weights(file)
    variant = options.variant or weights.variant
    if variant is None:
        raise InputError(f"--variant is missing: {plain_path(file)} does not say which it is")
    given, origin = weights.options, None
    beside = [path for path in (file.with_suffix(".json"), file.with_name("config.json")) if path.is_file()]
    if options.official_config is not None:
        given = read_json(Path(options.official_config))
    elif given is None and beside:
        given, origin = read_json(beside[0]), f"Keyword arguments from {plain_path(beside[0])}"
    elif given is None:
        given, origin = {}, "No keyword arguments are given: the official defaults"

    import jax

    from ddl_jax.interop.run import default_tokenizer, write_run
    from ddl_jax.interop.weights import from_official

    try:
        model = from_official(given, weights.tensors, variant)
    except InputError as error:  # what was not asked for is said, too
        raise InputError(f"{error} ({origin})" if origin else str(error)) from None
    if origin:
        _say(origin)
    tokenizer = options.tokenizer or default_tokenizer(model.config.vocab_size)
    write_run(run, model, tokenizer, _say)
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"{run}: variant {known_variant(variant)}, {count:,} parameters, tokenizer {tokenizer}")
    return 0


def _to_official(options) -> int:
    from ddl_jax.interop.files import Weights, require_ending, write_weights

    file = Path(options.to).expanduser()
    for name in ("variant", "official_config", "tokenizer"):
        if options[name] is not None:
            raise InputError(f"--{name.replace('_', '-')} does not apply with --to; remove it")
    require_ending(file, "--to")
    for path in (file, file.with_suffix(".json")):
        if path.exists():
            raise InputError(f"--to {plain(options.to)!r}: {plain_path(path)} exists already; name a new file")
    if not file.absolute().parent.is_dir():
        raise InputError(f"--to {plain(options.to)!r}: {plain_path(file.absolute().parent)} is not a folder")

    from ddl_jax.interop.weights import to_official
    from ddl_jax.run import load_checkpoint

    run, step = load_checkpoint(options.run)
    weights = Weights(*to_official(run.model))
    write_weights(file, weights)
    print(f"{file}: variant {weights.variant}, {len(weights.tensors)} tensors, of step {step}")
    return 0
