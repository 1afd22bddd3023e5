"""Shows a remedy as an edit of the user's own lines."""

import ast
import inspect
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass

from fusedtrain.diagnose.places import Site


@dataclass(frozen=True)
class Change:
    """One place in the user's code, as it is and as it should be."""

    file: str
    line: int
    before: str
    after: str


def source_line(site: Site) -> str:
    """Returns the text of a line without its indentation; empty where the file cannot be read."""
    return linecache.getline(site.file, site.line).strip()


def edit_call(
    site: Site | None,
    names: tuple[str, ...],
    function: Callable,
    without: tuple[str, ...] = (),
    **keywords: object,
) -> Change | None:
    """Returns the call at a place with other arguments.

    Args:
        site: where the call was made.
        names: what the called function may be called, without its module; the innermost such call is meant.
        function: that is called; its parameters are the names of arguments that are given by position.
        without: names of arguments to leave out; one that is given by position gets its default.
        **keywords: argument names and their new values; an argument that is there is replaced.

    Returns:
        None where the call cannot be found, as when it spreads ``*arguments`` or the file is gone.
    """
    call = _find(site, names)
    if call is None or any(keyword.arg is None for keyword in call.keywords):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    parameters = {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}
    given = [*zip(parameters, call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    left_out = [keyword for keyword in call.keywords if keyword.arg in without]
    defaults = {name: parameters[name] for name, _ in given[: len(call.args)] if name in without}
    lines = "".join(linecache.getlines(site.file)).splitlines(keepends=True)
    text = "".join(lines[call.lineno - 1 : call.end_lineno])
    # ast counts bytes
    raw = text.encode()
    tail = len(lines[call.end_lineno - 1].encode()) - call.end_col_offset
    raw, begin = raw[: len(raw) - tail], call.col_offset
    edits, missing = [], keywords | defaults
    for name, value in given:
        if name in missing:
            start, end = (_offset(lines, call, *place) for place in _ends(value))
            edits.append((start, end, repr(missing.pop(name)).encode()))
    if missing:
        close = len(raw) - 1
        inner = raw[:close].rstrip()
        comma = b"" if inner.endswith((b"(", b",")) else b", "
        comma = b" " if inner.endswith(b",") else comma
        added = ", ".join(f"{name}={value!r}" for name, value in missing.items()).encode()
        edits.append((len(inner), close, comma + added))
    edits += [(*(_offset(lines, call, *place) for place in _ends(keyword)), None) for keyword in left_out]
    new = raw
    for start, end, value in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        head, tail = new[:start], new[end:]
        if value is None:  # with the comma behind it, or before it where there is none
            rest = re.sub(rb"^\s*,\s*", b"", tail)
            head, tail, value = (head if rest != tail else re.sub(rb",\s*$", b"", head)), rest, b""
        new = head + value + tail
    return Change(site.file, call.lineno, raw[begin:].decode(), new[begin:].decode())


def edit_loader(site: Site | None) -> Change | None:
    """Returns the call that makes a DataLoader with one sampler of whole batches.

    Returns:
        None where the call cannot be found or spreads ``*arguments``, and where the order of the samples could not be
        told to stay: it is shuffled by a variable, or what stands in the new line twice is not the same then.
    """
    call = _find(site, ("DataLoader",))
    if call is None or len(call.args) > 3 or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    before = ast.unparse(call)
    values = dict(zip(("dataset", "batch_size", "shuffle"), call.args))
    values |= {keyword.arg: keyword.value for keyword in call.keywords}
    if None in values or "dataset" not in values:
        return None
    values = {name: value for name, value in values.items() if getattr(value, "value", value) is not None}
    shuffle = values.pop("shuffle", ast.Constant(False))
    twice = set() if {"sampler", "batch_sampler"} & values.keys() else {"dataset"}
    if isinstance(shuffle, ast.Constant) and shuffle.value:
        twice |= {"generator"} & values.keys()
    if not isinstance(shuffle, ast.Constant) or not all(isinstance(values[name], ast.Name) for name in twice):
        return None
    given = {name: ast.unparse(value) for name, value in values.items()}
    dataset, size = given.pop("dataset"), given.pop("batch_size", "1")
    generator = f", generator={given['generator']}" if "generator" in twice else ""
    kind = "RandomSampler" if shuffle.value else "SequentialSampler"
    sampler = given.pop("sampler", f"{kind}({dataset}{generator})")
    batches = given.pop("batch_sampler", f"BatchSampler({sampler}, {size}, {given.pop('drop_last', 'False')})")
    given = {"sampler": batches, "batch_size": "None"} | given
    rest = "".join(f", {name}={value}" for name, value in given.items())
    return Change(site.file, call.lineno, before, f"{ast.unparse(call.func)}({dataset}{rest})")


def before_optimizer(site: Site | None, name: str, line: str) -> Change | None:
    """Returns the line that makes an optimizer with another line in front of it: of its statement.

    Args:
        site: where the optimizer was made.
        name: of its class.
        line: to insert; ``{model}`` stands for what the optimizer takes the parameters of.

    Returns:
        None where the optimizer does not take ``something.parameters()``, or the statement makes that something.
    """
    call = _find(site, (name,))
    given = call.args[0] if call is not None and call.args else None
    if not isinstance(given, ast.Call) or getattr(given.func, "attr", None) != "parameters":
        return None
    model, statement = given.func.value, _statement(site, call)
    made = {getattr(n, "arg", None) or n.id for n in ast.walk(statement) if isinstance(n, ast.arg) or _is_target(n)}
    if any(isinstance(n, ast.Call) or getattr(n, "id", None) in made for n in ast.walk(model)):
        return None
    added = line.format(model=ast.unparse(model))
    text = linecache.getline(site.file, statement.lineno).encode()
    before, rest = text[: statement.col_offset].strip(), text[statement.col_offset :].decode().strip()
    return Change(site.file, statement.lineno, rest, f"{added}{'; ' if before else chr(10)}{rest}")


def edit_argument(site: Site | None, names: tuple[str, ...], value: object) -> Change | None:
    """Returns the call at a place with another first positional argument."""
    call = _find(site, names)
    if call is None or len(call.args) != 1 or call.keywords:
        return None
    before = ast.unparse(call)
    call.args = [ast.Constant(value)]
    return Change(site.file, call.lineno, before, ast.unparse(call))


def _tree(site: Site) -> ast.Module:
    return ast.parse("".join(linecache.getlines(site.file)))


def _statement(site: Site, call: ast.Call) -> ast.stmt:
    """Returns the innermost statement that a call stands in."""
    begin, end = _ends(call)
    around = [n for n in ast.walk(_tree(site)) if isinstance(n, ast.stmt) and _ends(n)[0] <= begin < end <= _ends(n)[1]]
    return max(around, key=lambda node: _ends(node)[0])


def _is_target(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _find(site: Site | None, names: tuple[str, ...]) -> ast.Call | None:
    if site is None:
        return None
    try:
        tree = _tree(site)
    except SyntaxError:
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= site.line <= node.end_lineno
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in names
    ]
    calls = [node for node in calls if _ends(node)[1] == site.end] or calls
    return min(calls, key=lambda node: (node.end_lineno - node.lineno, -node.col_offset), default=None)


def _ends(node: ast.expr | ast.keyword | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _offset(lines: list[str], call: ast.Call, line: int, column: int) -> int:
    return sum(len(text.encode()) for text in lines[call.lineno - 1 : line - 1]) + column
