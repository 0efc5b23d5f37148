"""Errors for people: what Hydra and omegaconf raise about a configuration, in one line. Imports no torch."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from checks import nearest
from parallelism.ranks import joined
from training.config import Config, StageConfig

CANNOT_RUN = 2  # exit code of a configuration, or of data, that can't be used
GROUP_PROBLEM = "Config group override must be a string"  # how a ValueError of Hydra's begins
CONF = Path(__file__).parent.parent / "conf"
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "list": "a list of",
}


@contextmanager
def explained(hydra_alone: bool = False) -> Iterator[None]:
    """Turns what is wrong with the configuration into one line on stderr, of rank 0 alone, and exit code 2.

    Errors of Hydra's and omegaconf's are always about the configuration; a ValueError is unless `hydra_alone`.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except OSError as error:  # Hydra makes hydra.run.dir itself
        if not hydra_alone or error.filename is None:
            raise
        fail(f"{error.filename} can't be made or read: {error.strerror}")
    except ValueError as error:
        if hydra_alone and not str(error).startswith(GROUP_PROBLEM):
            raise
        fail(explain(error))


def fail(message: str) -> None:
    """Ends this process with exit code 2; under torchrun or srun every rank does, and rank 0 speaks."""
    ranks = joined()
    if ranks is None or ranks.rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun ends all ranks when the first one exits: rank 0 has to have spoken
    raise SystemExit(CANNOT_RUN)


def explain(error: BaseException) -> str:
    """One line for a person."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file)
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return explain(cause)
    key = str(getattr(error, "full_key", None) or "")
    if getattr(error, "object_type", None) is StageConfig and "." not in key:  # omegaconf forgets where the list is
        key = f"batch.stages.N.{key}"
    key = re.sub(r"stages\[(\d+)\]", r"stages.\1", key)  # as the command line takes it
    if isinstance(error, InterpolationResolutionError) or key.startswith("hydra"):
        return f"{key}: {str(error).splitlines()[0]}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and key:
        presets = [f"{group}={key}" for group in groups() if (CONF / group / f"{key}.yaml").exists()]
        if presets:
            return f"there is no key {key}; did you mean {presets[0]}?"
        return f"there is no key {key}{nearest(key, known_keys()) or '; python train.py --help lists them'}"
    if isinstance(error, MissingMandatoryValue) and key:
        return f"{key} has no value; valid: {_type_words(key)}"
    if isinstance(error, OmegaConfBaseException) and key:
        value = re.search(r"[Vv]alue '(.*?)'", str(error))
        words = _type_words(key)
        words += f", in brackets: {key}=[...]" if words.startswith("a list") and "[" not in key else ""
        return f"{f'{key}={value[1]}' if value else key} has the wrong type; valid: {words}"
    if str(error).startswith(GROUP_PROBLEM):  # batch=3; Hydra does not say which
        pairs = (argument.partition("=") for argument in sys.argv[1:])
        named = [f"{key}/{value}" for key, _, value in pairs if key in groups()]
        return next(_no_such_choice(name) for name in named if not (CONF / f"{name}.yaml").exists())
    problem = " ".join(str(error).split("\nSee https")[0].split())
    if isinstance(error, OverrideParseException):
        problem += """; a value with special characters has to be quoted twice: "key='value'\""""
    return problem


def groups() -> list[str]:
    """Every group that the command line takes."""
    return sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


def known_keys() -> list[str]:
    """Every key and every group that the command line takes."""
    return [*_config_keys(Config), *groups()]


def _config_keys(schema: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        inner, dots = (get_args(kind)[0], ".N.") if get_origin(kind) is list else (kind, ".")
        if is_dataclass(inner):
            keys += _config_keys(inner, f"{prefix}{name}{dots}")  # type: ignore[arg-type]
    return keys


def _no_such_choice(file: str) -> str:
    group, _, name = file.rpartition("/")
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "base")
    return f"{group}={name} does not exist; valid: {', '.join(choices)}{nearest(name, choices)}"


def _type_words(key: str) -> str:
    """What the key takes, read off the dataclass that declares it."""
    kind: Any = Config
    for part in re.sub(r"\[\d+\]|\.(N|\d+)\b", "", key).split("."):
        kind = get_type_hints(kind)[part]
        if get_origin(kind) is list and is_dataclass(get_args(kind)[0]):
            kind = get_args(kind)[0]  # a row of the list
    if kind is StageConfig:
        return "a list of {from_tokens: 0, tokens: 2048, seq_len: 128}, quoted: 'batch.stages=[{...},{...}]'"
    if is_dataclass(kind):
        choice = f"{key}=NAME, or " if key in groups() else ""
        return f"{choice}one of its keys, such as {key}.{fields(kind)[0].name}=VALUE"
    words = str(kind).replace("<class '", "").replace("'>", "").replace(" | None", " or null").replace(" | ", " or ")
    for short, spoken in TYPE_WORDS.items():
        words = re.sub(rf"\b{short}\b", spoken, words)
    return words.replace("[", " ").replace("]", "")
