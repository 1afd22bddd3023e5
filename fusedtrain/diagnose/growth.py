"""Finds memory that grows from step to step, and what of the user's keeps it."""

import ast
import contextlib
import gc
import itertools
import linecache
import math
import re
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from fusedtrain.diagnose.instrument import graph_of
from fusedtrain.diagnose.machine import gpus
from fusedtrain.diagnose.places import Site, is_users
from fusedtrain.train.memory import available, free_unheld, resident

KINDS = (list, dict, set, deque, defaultdict, OrderedDict)
DEPTH = 4  # attributes and items between a variable and what it holds
OBJECTS = 100_000  # that are looked into
ITEMS = 64  # of each
NODE = 800  # bytes that an operation takes in a graph, measured, without the tensors that it keeps for backward
QUIET = 16 * 2**10  # bytes per step that resident memory may grow by while the allocator finds its place


@dataclass(frozen=True)
class Growing:
    """Something of the user's that holds more after every step.

    Attributes:
        path: how the user's code names it.
        kind: of what it is and holds.
        count: how many more per step; 0 for a tensor whose graph grows.
        size: bytes more per step, without what operations of a graph take.
        emptied: whether the code empties it between passes over the data.
        lines: where it is added to.
        most: bytes that it will take at most, as a deque with a length does.
    """

    path: str
    kind: str
    count: float
    size: float
    emptied: bool
    lines: tuple[Site, ...]
    most: float = math.inf


@dataclass(frozen=True)
class Growth:
    """What memory grows by in a step.

    Attributes:
        size: bytes, as far as every run of steps had them.
        graph: operations of autograd that are kept more.
        free: bytes that are left.
        held: what keeps them, the most first.
    """

    size: float
    graph: float
    free: int
    held: tuple[Growing, ...] = ()


@dataclass
class Watch:
    """Looks at what is alive between runs of steps. An object of others may raise any error when it is looked at."""

    sizes: dict[int, list[int]] = field(default_factory=dict)  # of containers that have grown each time
    memory: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    failed: bool = False

    def look(self) -> None:
        try:
            self._look()
        except Exception:
            self.failed = True

    def _look(self) -> None:
        free_unheld()
        self.memory.append(_taken())
        alive = gc.get_objects()
        tensors = [o for o in alive if type(o) is Tensor and o.grad_fn is not None]
        self.graphs.append(len(graph_of(tensors)))
        sizes = {id(o): len(o) for o in alive if type(o) in KINDS}
        if len(self.memory) == 1:
            self.sizes = {i: [size] for i, size in sizes.items()}
        else:
            self.sizes = {i: [*old, sizes[i]] for i, old in self.sizes.items() if sizes.get(i, 0) > old[-1]}

    @property
    def doubtful(self) -> bool:
        """Whether memory seems to grow and no graph does."""
        return not self.failed and self._resident() > 0 and not _least(self.graphs)

    def _resident(self) -> int:
        return _least(self.memory[2:])  # what the first look noted is let go of at the second

    def found(self, steps: int) -> Growth | None:
        """Returns what grew in each run of so many steps; None: not known."""
        with contextlib.suppress(Exception):
            return None if self.failed else self._found(steps)
        return None

    def _found(self, steps: int) -> Growth:
        resident = self._resident() / steps
        graph = _least(self.graphs) / steps
        growing = [*_containers(self.sizes, steps)] if self.sizes else []
        if graph >= 1 and not any("graph" in g.kind for g in growing):
            growing += _tensors()
        growing.sort(key=lambda g: -g.size)
        size = sum(g.size for g in growing) + NODE * graph
        if growing or resident > QUIET:
            size = max(size, resident)
        return Growth(size, graph, available(), tuple(growing))


def _taken() -> int:
    """Returns the bytes that tensors on GPUs take, or this process; 0 where the system does not tell."""
    if used := gpus():
        return sum(map(torch.cuda.memory_allocated, used))
    try:
        return resident(exact=True)
    except OSError:
        return 0


def _least(values: list[int]) -> int:
    return max(0, min(b - a for a, b in itertools.pairwise(values)))


# --- names ------------------------------------------------------------------------------------------------------------


def user_frames() -> list:
    """Returns the frames of the user's code that are being carried out, the innermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


def _modules() -> list[ModuleType]:
    return [m for m in list(sys.modules.values()) if is_users(getattr(m, "__file__", None) or "<frozen")]


def named():
    """Gives (path, object, frame or None) of what the user's variables hold, the nearest first."""
    queue = deque((n, v, frame, 0) for frame in user_frames() for n, v in [*frame.f_locals.items()])
    queue += [(f"{m.__name__}.{n}", v, None, 0) for m in _modules() for n, v in [*vars(m).items()]]
    queue += [(n, v, None, 0) for frame in user_frames()[-1:] for n, v in [*frame.f_globals.items()]]
    seen: set[int] = set()
    while queue and len(seen) < OBJECTS:
        path, value, frame, depth = queue.popleft()
        if id(value) in seen or type(value).__module__.startswith("fusedtrain.diagnose"):
            continue
        seen.add(id(value))
        yield path, value, frame
        if depth == DEPTH or issubclass(type(value), (Tensor, ModuleType, type)):
            continue
        children = ()
        if type(value) in (dict, defaultdict, OrderedDict):
            children = [(f"[{key!r}]", child) for key, child in itertools.islice(value.items(), ITEMS)]
        elif type(value) in (list, tuple, deque):
            children = [(f"[{i}]", child) for i, child in enumerate(itertools.islice(value, ITEMS))]
        elif type(value).__dictoffset__:  # some types of Python 3.12 hide it
            children = [(f".{name}", child) for name, child in [*getattr(value, "__dict__", {}).items()]]
        queue += [(path + step, child, frame, depth + 1) for step, child in children]


def _containers(sizes: dict[int, list[int]], steps: int):
    for path, value, frame in named():
        if id(value) not in sizes or type(value) not in KINDS or value is getattr(frame, "f_globals", None):
            continue
        old, *_, new = sizes[id(value)]
        more = len(value) - old if len(value) >= new else 0
        items = [*itertools.islice(reversed(value), more)] if type(value) is not set else [*value][:more]
        items = [value[key] for key in items] if isinstance(value, dict) else items
        size, kept = _bytes(items, set()), _of(items)
        runs = steps * (len(sizes[id(value)]) - 1)
        kind, left = f"a {type(value).__name__} of {kept}", getattr(value, "maxlen", None)
        most = math.inf if left is None or not more else size / more * (left - len(value))
        yield Growing(path, kind, more / runs, size / runs, emptied(path, frame), added_to(path), most)


def _tensors() -> list[Growing]:
    """Returns the variable that most operations hang on."""
    found = [(len(graph_of(v)), p, f) for p, v, f in named() if issubclass(type(v), Tensor) and v.grad_fn is not None]
    if not found:
        return []
    _, path, frame = max(found, key=lambda item: item[0])
    return [Growing(path, "a tensor with the graphs of all steps", 0.0, 0.0, emptied(path, frame), added_to(path))]


def _of(items: list) -> str:
    kinds = {type(item).__name__ for item in items}
    if kinds == {"Tensor"}:
        return "tensors" + " with their graphs" * any(item.grad_fn is not None for item in items)
    return kinds.pop() + "s" if len(kinds) == 1 else "objects"


def _bytes(value: object, seen: set[int]) -> int:
    """Returns the bytes that an object holds and no other one that was ``seen``."""
    if issubclass(type(value), Tensor) and value.layout is torch.strided:
        memory = value.untyped_storage()
        known, _ = memory._cdata in seen, seen.add(memory._cdata)
        return 0 if known else memory.nbytes() + sys.getsizeof(value)
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if issubclass(type(value), dict):
        return sys.getsizeof(value) + sum(_bytes(v, seen) for v in value.values())
    if issubclass(type(value), (list, tuple, set, deque)):
        return sys.getsizeof(value) + sum(_bytes(v, seen) for v in value)
    return sys.getsizeof(value) + (getattr(value, "nbytes", 0) if type(value).__module__ == "numpy" else 0)


# --- code -------------------------------------------------------------------------------------------------------------


def _keys(path: str) -> set[str]:
    """Returns what stands for something in the code: its name, or its attributes and items without what has them."""
    name, rest = re.match(r"(\w+)(.*)", path).groups()
    ends = [m.end() for m in re.finditer(r"\.\w+|\[[^]]*\]", rest)]
    return {rest[:end] for end in ends} or {name}


def added_to(path: str) -> tuple[Site, ...]:
    """Returns the lines that add to something: of the code that is running, or else of what it imports."""
    name = re.escape(re.findall(r"\w+", path)[-1])
    calls = r"\.(append|extend|add|update|setdefault|insert)\("
    pattern = re.compile(rf"\b{name}\b\W*({calls}|\[.+\]\s*=[^=]|\+=)|\b{name} = {name} \+")
    running = dict.fromkeys(frame.f_code.co_filename for frame in user_frames())  # the innermost first
    for files in (running, sorted({m.__file__ for m in _modules()} - running.keys())):
        lines = [(file, i, text) for file in files for i, text in enumerate(linecache.getlines(file), 1)]
        found = tuple(Site(file, i) for file, i, text in lines if pattern.search(text))
        if found:
            return found[:4]
    return ()


def emptied(path: str, frame) -> bool:
    """Returns whether code makes something anew, or empties it, once in a pass over the data, as far as it can be read.

    That is so within a loop around that of the batches; in a function that goes over the data once; and, for an
    attribute, in any other function but the one that makes the object.
    """
    keys = _keys(path)
    running = {(f.f_code.co_filename, f.f_code.co_firstlineno): f.f_lineno for f in user_frames()}
    files = {file for file, _ in running}
    return any(_empties(file, keys, running, frame) for file in files)


def _empties(file: str, keys: set[str], running: dict, frame) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return False

    def inside(node, line: int) -> bool:
        return node.lineno <= line <= node.end_lineno

    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))]
    for node in ast.walk(tree):
        if not keys & {*map(_key, _targets(node))} or keys & _read(getattr(node, "value", None)):
            continue
        function = max((f for f in functions if inside(f, node.lineno)), key=lambda f: f.lineno, default=None)
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)]) if function else 1
        local = not next(iter(keys)).startswith((".", "["))
        if local and frame is not None and (file, first) != (frame.f_code.co_filename, frame.f_code.co_firstlineno):
            continue
        line = running.get((file, first))
        if line is None:
            if function is not None and function.name not in ("__init__", "__post_init__"):
                return True
            continue
        around = [loop for loop in loops if inside(loop, line) and (function is None or inside(function, loop.lineno))]
        innermost = max(around, key=lambda loop: loop.lineno, default=None)
        passes = [loop for loop in around if loop is not innermost]
        if any(inside(loop, node.lineno) and not inside(innermost, node.lineno) for loop in passes):
            return True
        if function is not None and not passes and innermost is not None and innermost.lineno == line:
            return True
    return False


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns what a statement makes anew or empties."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [t for target in node.targets for t in getattr(target, "elts", [target])]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [node.target]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("clear", "reset"):
        return [node.func.value]
    return []


def _read(value: ast.expr | None) -> set[str]:
    """Returns what a value is made of."""
    nodes = ast.walk(value) if isinstance(value, ast.expr) else ()
    return {_key(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))}


def _key(target: ast.expr) -> str:
    text = ast.unparse(target)
    return text if isinstance(target, ast.Name) else re.sub(r"^\w+", "", text)
