"""Shows a remedy as an edit of the user's own lines."""

import ast
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass

from fusedtrain.diagnose.instrument import Site


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


def edit_call(site: Site | None, names: tuple[str, ...], function: Callable, **keywords: object) -> Change | None:
    """Returns the call at a place with other arguments.

    Args:
        site: where the call was made.
        names: what the called function may be called, without its module; the innermost such call is meant.
        function: that is called; its parameters are the names of arguments that are given by position.
        **keywords: argument names and their new values; an argument that is there is replaced.

    Returns:
        None where the call cannot be found, as when it spreads ``*arguments`` or the file is gone.
    """
    call = _find(site, names)
    if call is None or any(keyword.arg is None for keyword in call.keywords):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    given = [*zip(parameters, call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    lines = "".join(linecache.getlines(site.file)).splitlines(keepends=True)
    text = "".join(lines[call.lineno - 1 : call.end_lineno])
    # ast counts bytes
    raw = text.encode()
    tail = len(lines[call.end_lineno - 1].encode()) - call.end_col_offset
    raw, begin = raw[: len(raw) - tail], call.col_offset
    edits, missing = [], dict(keywords)
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
    new = raw
    for start, end, value in sorted(edits, reverse=True):
        new = new[:start] + value + new[end:]
    return Change(site.file, call.lineno, raw[begin:].decode(), new[begin:].decode())


def edit_loader(site: Site | None) -> Change | None:
    """Returns the call that makes a DataLoader with one sampler of whole batches.

    Returns:
        None where the call cannot be found or spreads ``*arguments``.
    """
    call = _find(site, ("DataLoader",))
    if call is None or len(call.args) > 3 or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    before = ast.unparse(call)
    given = dict(zip(("dataset", "batch_size", "shuffle"), map(ast.unparse, call.args)))
    given |= {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if None in given or "dataset" not in given:
        return None
    dataset, size, shuffle = given.pop("dataset"), given.pop("batch_size", "1"), given.pop("shuffle", "False")
    kind = "SequentialSampler" if shuffle in ("False", "None") else "RandomSampler"
    sampler = given.pop("sampler", f"{kind}({dataset})")
    batches = given.pop("batch_sampler", f"BatchSampler({sampler}, {size}, {given.pop('drop_last', 'False')})")
    given = {"sampler": batches, "batch_size": "None"} | given
    rest = "".join(f", {name}={value}" for name, value in given.items())
    return Change(site.file, call.lineno, before, f"{ast.unparse(call.func)}({dataset}{rest})")


def before_optimizer(site: Site | None, name: str, line: str) -> Change | None:
    """Returns the line that makes an optimizer with another line in front of it.

    Args:
        site: where the optimizer was made.
        name: of its class.
        line: to insert; ``{model}`` stands for what the optimizer takes the parameters of.

    Returns:
        None where the optimizer does not take ``something.parameters()``.
    """
    call = _find(site, (name,))
    given = call.args[0] if call is not None and call.args else None
    if not isinstance(given, ast.Call) or getattr(given.func, "attr", None) != "parameters":
        return None
    before = linecache.getline(site.file, call.lineno).strip()
    added = line.format(model=ast.unparse(given.func.value))
    return Change(site.file, call.lineno, before, f"{added}\n{before}")


def edit_argument(site: Site | None, names: tuple[str, ...], value: object) -> Change | None:
    """Returns the call at a place with another first positional argument."""
    call = _find(site, names)
    if call is None or len(call.args) != 1 or call.keywords:
        return None
    before = ast.unparse(call)
    call.args = [ast.Constant(value)]
    return Change(site.file, call.lineno, before, ast.unparse(call))


def _find(site: Site | None, names: tuple[str, ...]) -> ast.Call | None:
    if site is None:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(site.file)))
    except SyntaxError:
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= site.line <= node.end_lineno
        and getattr(node.func, "attr", getattr(node.func, "id", None)) in names
    ]
    return min(calls, key=lambda node: (node.end_lineno - node.lineno, -node.col_offset), default=None)


def _ends(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _offset(lines: list[str], call: ast.Call, line: int, column: int) -> int:
    return sum(len(text.encode()) for text in lines[call.lineno - 1 : line - 1]) + column
