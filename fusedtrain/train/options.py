"""Options on the command line and as YAML: written beside the results of a run, read to start it again."""

import contextlib
import dataclasses
import io
import re
import types
import typing
from pathlib import Path

from fusedtrain._extras import need
from fusedtrain._files import write_atomic
from fusedtrain.train.errors import InputError, require

VERSION = 1


def parse_command(kind: type, arguments: list[str], prog: str, **more):
    """Returns an object of the dataclass ``kind`` with the options of a command line, by ``tyro.cli``.

    Raises:
        InputError: an option is unknown, or its value is of another kind; where tyro draws a box, one line.
        SystemExit: after the text for ``--help``.
    """
    tyro, said = need("tyro", "train"), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=arguments, prog=prog, **more)
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[\d;]*m", "", said.getvalue()).splitlines()]
        inside = [line for line in lines if not line.startswith(("╭", "╰"))]
        ends = next((at for at, line in enumerate(inside) if line.startswith("───")), len(inside))
        raise InputError(f"{' '.join(inside[:ends])}; {prog} --help lists the options") from None


def write_yaml(path: Path, options) -> None:
    """Writes a dataclass with all its parts."""
    yaml = need("yaml", "train")
    text = yaml.safe_dump({"version": VERSION, **_plain(dataclasses.asdict(options))}, sort_keys=False)
    write_atomic(path, lambda file: file.write(text.encode()))


def read_yaml(path: Path, kind: type):
    """Returns an object of the dataclass ``kind`` with the values of the file and the defaults of the others.

    Raises:
        InputError: the file cannot be read, is of a newer version, or holds an unknown option or one twice.
    """
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no options")
    version = content.pop("version", VERSION)
    require(type(version) is int and version >= 1, f"{path}: version must be a number from 1 on, got {version!r}")
    if version > VERSION:
        raise InputError(f"{path} was written by a newer version ({version}); this one reads up to {VERSION}")
    return _build(kind, content, str(path))


def load_yaml(path: Path | str):
    """Returns the content of a YAML file; InputError where it cannot be read or names a key twice."""
    yaml = need("yaml", "train")

    class Loader(yaml.SafeLoader):  # which takes the last of them
        def compose_mapping_node(self, anchor):
            node, names = super().compose_mapping_node(anchor), set()
            for key, _ in node.value:
                place = f"in line {key.start_mark.line + 1}"
                require((key.tag, str(key.value)) not in names, f"{path}: {key.value} is named twice, again {place}")
                names.add((key.tag, str(key.value)))
            return node

    try:
        return yaml.load(Path(path).read_text(), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _build(kind: type, content: dict, where: str):
    if not isinstance(content, dict):
        raise InputError(f"{where} must hold options, got {content!r}")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in content if key not in hints]
    if unknown:
        raise InputError(f"{where}: unknown option {', '.join(map(str, unknown))}; known are {', '.join(hints)}")
    try:
        return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in content.items()})
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None


def _value(hint, value, where: str):
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        hint = next(a for a in arguments if a is not type(None))
        return _value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where} must be a list, got {value!r}")
        return tuple(_value(arguments[0], item, where) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise InputError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-3 as text
            return float(value)
        except ValueError:
            raise InputError(f"{where} must be a number, got {value!r}") from None
    if hint is str and type(value) is int:  # a name of digits, or the number of workers instead of "auto"
        return str(value)
    if (isinstance(hint, type) and not isinstance(value, hint)) or (isinstance(value, bool) and hint in (int, float)):
        raise InputError(f"{where} must be {hint.__name__}, got {value!r}")
    return value
