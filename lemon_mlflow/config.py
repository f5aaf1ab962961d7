"""The recipe: one typed, validated object for everything that a run depends on.

A recipe is a YAML file with the sections `base`, `data`, `lora`, `train`, `limits` and `track`. Every key has a default,
and every key can be overridden by its dotted name:

    loaded = load_recipe("projects/triage/recipe.yaml", {"lora.rank": "4", "train.seed": "7"})
    loaded.recipe.lora.rank            # 4, an int
    flatten(loaded.recipe)["lora.rank"]

Mistakes are `Refusal`s that name the file, the line and the nearest valid key. Nothing after this module reads raw strings.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import Refusal


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, str_strip_whitespace=True)


def _no_boolean(value: Any) -> Any:
    # YAML reads `yes` and `on` as true, and pydantic would take true for 1.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _none_from_text(value: Any) -> Any:
    # On a command line nothing but a word can say "no value".
    return None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value


def _list_from_text(value: Any) -> Any:
    if isinstance(value, str) and value != "all-linear":
        return [item.strip() for item in value.strip("[]").split(",") if item.strip()]
    return value


Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
OptionalText = Annotated[str | None, BeforeValidator(_none_from_text)]
OptionalCount = Annotated[Count | None, BeforeValidator(_none_from_text)]
OptionalPositive = Annotated[Annotated[Number, Field(gt=0)] | None, BeforeValidator(_none_from_text)]


class BaseSection(_Section):
    """Which base model, exactly."""

    model: Annotated[str, Field(min_length=1)] = "embedded:smollm2-135m"
    """A local folder, a hub id, or `embedded:smollm2-135m`."""
    revision: OptionalText = None
    """Commit, tag or branch of a hub id; the commit that it means is recorded."""
    quantization: Literal["auto", "none", "4bit", "8bit"] = "auto"
    """`auto` takes the folder as it is (the embedded base: none on hf, 8 bit on mlx). hf `4bit` is NF4 with double
    quantization; mlx `4bit` and `8bit` are affine with groups of 64."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute type. `auto`: bfloat16 on a card that has it, float16 on an older card, float32 on a CPU; mlx: as stored."""


class DataSection(_Section):
    """Which rows, and what is learned from them."""

    path: Annotated[str, Field(min_length=1)] = "data"
    """A folder with train.jsonl, valid.jsonl and test.jsonl (the holdout). Relative to the recipe's folder."""
    format: Literal["auto", "messages", "completion", "text", "classification"] = "auto"
    instruction: str = ""
    """Classification: what the model is asked. `{text}` marks where the message goes (default: after a blank line)."""
    labels: Annotated[tuple[str, ...], BeforeValidator(_list_from_text)] = ()
    """Classification: the allowed answers."""
    train_on: Literal["answers", "last_answer", "all_tokens"] = "answers"
    """Which tokens carry loss: every answer, the last answer of each chat, or all tokens."""
    min_train_rows: Count = 4


class LoraSection(_Section):
    """The adapter's shape."""

    rank: Count = 8
    alpha: Annotated[Number, Field(gt=0)] = 16.0
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    layers: Annotated[int, BeforeValidator(_no_boolean), Field(ge=-1)] = -1
    """Adapt the last N decoder layers; -1 adapts all of them."""
    target_modules: Annotated[tuple[str, ...] | Literal["all-linear"], BeforeValidator(_list_from_text)] = "all-linear"
    """Names of linear layers inside a decoder layer (`q_proj`, `mlp.down_proj`, ...), or `all-linear`."""

    @model_validator(mode="after")
    def _some_layer(self) -> LoraSection:
        if self.layers == 0:
            raise ValueError("lora.layers: 0 would adapt nothing; use -1 for all layers, or a number from 1 up")
        if self.target_modules != "all-linear" and not self.target_modules:
            raise ValueError("lora.target_modules is empty; use all-linear, or name linear layers")
        return self


class TrainSection(_Section):
    """How it is trained. One step is one optimizer update of `batch_size` x `gradient_accumulation` rows."""

    backend: Literal["auto", "hf", "mlx"] = "auto"
    seed: Annotated[int, BeforeValidator(_no_boolean), Field(ge=0, lt=2**32)] = 7
    epochs: Annotated[Number, Field(gt=0)] = 1.0
    max_steps: OptionalCount = None
    batch_size: Count = 1
    gradient_accumulation: Count = 1
    learning_rate: Annotated[Number, Field(gt=0)] = 2e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: CountOrZero = 0
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    max_seq_length: Annotated[Count, Field(ge=2)] = 512
    """In tokens, after the chat template and with its end token. Longer rows are removed whole, never cut."""
    gradient_checkpointing: bool = False
    validate_every: OptionalCount = None
    """Steps between validations; always also before the first step and after the last."""
    checkpoint_every: OptionalCount = None
    """Steps between checkpoints that `train.resume` can go on from."""
    resume: OptionalText = None
    """Id of an MLflow run with a checkpoint: goes on exactly where that checkpoint was made."""


class LimitsSection(_Section):
    """When training is stopped so that the machine stays up. `_gb` is 10^9 bytes."""

    system_available_pct: Annotated[Number, Field(ge=0, lt=100)] = 15.0
    """The guard line: training stops when less of the whole system's memory than this is available. 0 turns it off."""
    framework_peak_gb: OptionalPositive = None
    process_gb: OptionalPositive = None
    minutes: OptionalPositive = None


class TrackSection(_Section):
    """Where the run is recorded."""

    experiment: OptionalText = None
    """MLflow experiment, when `mlflow run` or the environment has not chosen one."""
    run_name: OptionalText = None


class Recipe(_Section):
    """All of it. The attributes are the sections of the YAML file."""

    base: BaseSection = BaseSection()
    data: DataSection = DataSection()
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    limits: LimitsSection = LimitsSection()
    track: TrackSection = TrackSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.data.format == "classification" and not self.data.labels:
            raise ValueError("data.labels is needed for data.format: classification")
        if len(set(self.data.labels)) != len(self.data.labels):
            raise ValueError("data.labels names a label twice")
        return self


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where it came from.

    Attributes:
        recipe: the effective recipe.
        path: the YAML file, or None for a recipe made of overrides alone.
        overridden: dotted names that came from the command line; their relative paths start at `cwd`.
        cwd: the folder that the command was given in.
    """

    recipe: Recipe
    path: Path | None
    overridden: frozenset[str]
    cwd: Path

    def folder_for(self, key: str) -> Path:
        """Where a relative path in `key` starts: the recipe's folder, or for an override the working folder."""
        if self.path is None or key in self.overridden:
            return self.cwd
        return self.path.parent


def valid_keys() -> tuple[str, ...]:
    """Every dotted recipe key, in the order of the sections."""
    return tuple(
        f"{name}.{key}"
        for name, field in Recipe.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    )


def flatten(recipe: Recipe) -> dict[str, Any]:
    """The recipe as dotted names, values as JSON types; what is logged as MLflow params."""
    nested = recipe.model_dump(mode="json")
    return {f"{section}.{key}": value for section, values in nested.items() for key, value in values.items()}


def canonical_text(value: Any) -> str:
    """One spelling per value, so that a param logged twice is the same text: 7.0 and 7 are both "7"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(value)
    if isinstance(value, (list, tuple)):
        return ",".join(canonical_text(item) for item in value)
    return str(value)


def to_yaml(recipe: Recipe) -> str:
    """The effective recipe as YAML that `load_recipe` reads back to an equal object."""
    values = recipe.model_dump(mode="json")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    if yaml.safe_load(text) != values:  # PyYAML loses three rare line ends (U+0085, U+2028, U+2029) unless it escapes
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=110)
    return text


def load_recipe(
    path: str | Path | None, overrides: Mapping[str, Any] | None = None, cwd: Path | None = None
) -> LoadedRecipe:
    """Read, override and validate a recipe.

    Args:
        path: YAML file, or None for defaults and overrides alone.
        overrides: dotted names to values (text or typed).
        cwd: where relative paths of overrides start (default: the working folder).

    Raises:
        Refusal: `recipe_not_found`, `bad_recipe`, `unknown_recipe_key`, `bad_recipe_value`.
    """
    cwd = cwd or Path.cwd()
    overrides = dict(overrides or {})
    source = Path(path).expanduser() if path else None
    if source and not source.is_absolute():
        source = cwd / source
    nested, lines = _read_yaml(source) if source else ({}, {})
    shown = str(path) if path else "recipe"
    _refuse_unknown(nested, overrides, shown, lines)
    for key, value in overrides.items():
        section, name = key.split(".", 1)
        nested.setdefault(section, {})[name] = value
    try:
        recipe = Recipe.model_validate(nested)
    except ValidationError as error:
        raise _bad_value(error, shown, lines, overrides) from None
    return LoadedRecipe(recipe, source.resolve() if source else None, frozenset(overrides), cwd)


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's sections, and the line (from 1) of every section and dotted key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1)
        hint = f"did you mean {near[0]}?" if near else "give the path of a recipe, such as projects/triage/recipe.yaml"
        raise Refusal("recipe_not_found", "there is no such recipe file", str(path), hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal("bad_recipe", f"the recipe cannot be read: {error}", str(path), "save it as UTF-8 text") from None
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        nested = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: an impossible date, nesting too deep
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error) or "not YAML"
        raise Refusal("bad_recipe", f"not valid YAML: {problem}", where, "check indentation and colons there") from None
    nested = {} if nested is None else nested
    if not isinstance(nested, dict):
        raise Refusal("bad_recipe", "a recipe is a mapping of sections", f"{path}:1", "start with `base:`") from None
    return nested, _key_lines(tree, path)


def _key_lines(tree: yaml.Node | None, path: Path) -> dict[str, int]:
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in seen:
                raise Refusal("bad_recipe", f"`{name}` is given twice", f"{path}:{key.start_mark.line + 1}", "keep one")
            seen.add(name)
            lines[name] = key.start_mark.line + 1
            if not prefix:  # a recipe has two levels; an alias could lead round in a circle
                walk(value, f"{name}.")

    if tree is not None:
        walk(tree, "")
    return lines


def _refuse_unknown(nested: dict[str, Any], overrides: Mapping[str, Any], shown: str, lines: dict[str, int]) -> None:
    for section, values in nested.items():
        where = f"{shown}:{lines.get(str(section), 1)}"
        if section not in Recipe.model_fields:
            raise _unknown(str(section), tuple(Recipe.model_fields), where)
        if values is None:
            nested[section] = {}
        elif not isinstance(values, dict):
            raise Refusal(
                "bad_recipe_value", f"`{section}` is a section, not a value", where, "put its keys on lines below"
            )
        for key in nested[section]:
            if f"{section}.{key}" not in valid_keys():
                raise _unknown(f"{section}.{key}", valid_keys(), f"{shown}:{lines.get(f'{section}.{key}', 1)}")
    for key in overrides:
        if key not in valid_keys():
            raise _unknown(key, valid_keys(), f"command line: --{key}")


def _unknown(key: str, valid: tuple[str, ...], where: str) -> Refusal:
    near = difflib.get_close_matches(key, valid, 1, cutoff=0.4) or [
        name for name in valid if name.split(".")[-1] == key.split(".")[-1]
    ]
    remedy = f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"
    return Refusal("unknown_recipe_key", f"`{key}` is not a recipe key", where, remedy)


def _bad_value(error: ValidationError, shown: str, lines: dict[str, int], overrides: Mapping[str, Any]) -> Refusal:
    faults = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"][:2])
        message = item["msg"].removeprefix("Value error, ")
        first_word = message.split(" ")[0].rstrip(":")
        names_itself = first_word in valid_keys()  # a rule of a whole section says itself which key it is about
        key = first_word if names_itself else key
        place = (
            f"command line: --{key}"
            if key in overrides
            else f"{shown}:{lines.get(key, lines.get(key.split('.')[0], 1))}"
        )
        given = item.get("input")
        quoted = f" (given: {given!r})" if isinstance(given, (str, int, float)) and len(str(given)) <= 60 else ""
        faults.append((place, f"`{key}`: {message}{quoted}" if key and not names_itself else message))
    place, message = faults[0]
    more = tuple(f"{p}: {m}" for p, m in faults[1:20])
    return Refusal("bad_recipe_value", message, place, "correct the value; `lemon train --help` lists the keys", more)
