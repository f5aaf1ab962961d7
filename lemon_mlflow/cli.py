"""The `lemon` command. Thin: it turns arguments into a recipe path and overrides, and calls a verb.

    lemon train --recipe projects/triage/recipe.yaml --seed 7 --lora.rank 4

Any recipe key is an option by its dotted name; `mlflow run -P lora.rank=4` arrives here in the same form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .config import Recipe, flatten, valid_keys
from .errors import Refusal

_SHORT = {"seed": "train.seed", "backend": "train.backend"}
"""Parameters that the MLproject declares, and the recipe keys they stand for; empty means: as the recipe says."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    given, rest = parser.parse_known_args(arguments)
    problem: Refusal | None = None
    overrides: dict[str, str] = {}
    try:
        overrides = read_overrides(rest)
    except Refusal as refusal:
        problem = refusal
    for short, key in _SHORT.items():
        if getattr(given, short):
            overrides.setdefault(key, getattr(given, short))
    from .verbs.train import train  # late: mlflow takes two seconds to import

    return train(given.recipe or None, overrides, problem)


def read_overrides(rest: Sequence[str]) -> dict[str, str]:
    """`--lora.rank 4` and `--lora.rank=4` as a dictionary.

    Raises:
        Refusal: `bad_arguments`.
    """
    overrides: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        if not word.startswith("--") or word == "--":
            raise Refusal(
                "bad_arguments", f"{word!r} is not an option", "command line", "write recipe keys as --lora.rank 4"
            )
        key, equals, value = word[2:].partition("=")
        if not equals:
            try:
                value = next(words)
            except StopIteration:
                raise Refusal(
                    "bad_arguments", f"--{key} has no value", "command line", f"write --{key} VALUE"
                ) from None
        overrides[key] = value
    return overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lemon", allow_abbrev=False, description="Fine-tune open models as MLflow runs that can be trusted later."
    )
    parser.add_argument("--version", action="version", version=f"lemon-mlflow {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    defaults = flatten(Recipe())
    keys = "\n".join(f"  --{key}  (default: {defaults[key]})" for key in valid_keys())
    train = verbs.add_parser(
        "train",
        allow_abbrev=False,
        help="train an adapter under supervision, as one MLflow run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"recipe keys, all of them options:\n{keys}",
    )
    train.add_argument("--recipe", default="", help="YAML recipe (default: the built-in defaults)")
    train.add_argument("--seed", default="", help="short for --train.seed")
    train.add_argument("--backend", default="", help="short for --train.backend: auto, hf or mlx")
    return parser
