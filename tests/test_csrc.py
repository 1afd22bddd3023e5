"""The rules of csrc: three kinds of file, no macros with arguments, one list of codes, no leaks between variants."""

import ast
import os
import re
import shutil
import subprocess

import compiler
import nvcc
import pytest
import torch

from fusedtrain import _extension
from fusedtrain.ops import _codes, _schema

CSRC = compiler.CSRC
CUDA_CORE = set(CSRC.glob("core/cuda*"))  # what the CUDA kernels share
CONTRACTS = sorted({*CSRC.glob("*.h"), *CSRC.glob("core/*.h")} - CUDA_CORE)
KERNELS = sorted([*CSRC.glob("cpu/*"), *CSRC.glob("cuda/*"), *CSRC.glob("core/*.cpp"), *CUDA_CORE])
BINDINGS = sorted(CSRC.glob("bindings/*"))
TORCH = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
CUDA = ("cuda", "cub/", "cooperative_groups", "mma.h")
needs_compiler = pytest.mark.skipif(shutil.which(compiler.CXX) is None, reason="needs a C++ compiler")


def includes(path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def relative(path) -> str:
    return str(path.relative_to(CSRC))


def test_every_file_is_of_one_kind():
    files = {path for path in CSRC.rglob("*") if path.is_file()}
    assert files == {*CONTRACTS, *KERNELS, *BINDINGS}


@pytest.mark.parametrize("path", CONTRACTS, ids=relative)
def test_contracts_know_neither_torch_nor_cuda(path):
    wrong = [name for name in includes(path) if name.startswith((*TORCH, *CUDA, "core/cuda"))]
    assert not wrong, f"{relative(path)} includes {wrong}"


@pytest.mark.parametrize("path", KERNELS, ids=relative)
def test_kernels_know_no_torch(path):
    foreign = TORCH if path.parent.name == "cuda" or path in CUDA_CORE else (*TORCH, *CUDA, "core/cuda")
    wrong = [name for name in includes(path) if name.startswith(foreign)]
    assert not wrong, f"{relative(path)} includes {wrong}"


@pytest.mark.parametrize("path", BINDINGS, ids=relative)
def test_bindings_use_the_stable_abi_only(path):
    stable = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/", "torch/headeronly/")
    host = {"module.cpp": ("pybind11/",), "step_table.h": ("pybind11/", "ATen/dlpack.h")}  # DLPack is a C interface
    allowed = stable + host.get(path.name, ())
    wrong = [name for name in includes(path) if name.startswith((*TORCH, *CUDA)) and not name.startswith(allowed)]
    assert not wrong, f"{relative(path)} includes {wrong}"


@pytest.mark.parametrize("path", [*CONTRACTS, *KERNELS, *BINDINGS], ids=relative)
def test_macros_take_no_arguments(path):
    text = path.read_text()
    assert not re.findall(r"^\s*#\s*define\s+\w+\(", text, re.MULTILINE)
    names = re.findall(r"^\s*#\s*define\s+(\w+)", text, re.MULTILINE)
    assert all(name.startswith("FUSEDTRAIN_") for name in names), names


def test_every_cuda_kernel_states_its_block_size():
    for path in [*CSRC.glob("cuda/*"), *CUDA_CORE]:
        for kernel in re.findall(r"__global__ [^;{]*?\w+_kernel\(", path.read_text()):
            assert re.search(r"__launch_bounds__\(k\w+", kernel), f"{relative(path)}: {kernel}"


@needs_compiler
@pytest.mark.parametrize("path", sorted(CSRC.glob("*.h")), ids=relative)
def test_contracts_compile_alone(path, tmp_path):
    source = tmp_path / "contract.cpp"
    source.write_text(f'#include "{path.name}"\n')
    compiler.compile_object(tmp_path / "contract.o", "-std=c++20", "-Wall", "-Wextra", "-Werror", source)


def test_instructions_beyond_a_variant_are_not_executed_early():
    """GCC takes an asm that is not volatile for harmless and may move it before the check for the instruction. The
    empty one has no instruction: it hides a value from the compiler. What nvcc alone sees is of another kind."""
    pattern = re.compile(r'\basm (?!volatile\b)|\basm\("?(\w*)')
    texts = (path.read_text() for path in [*CONTRACTS, *KERNELS, *BINDINGS])
    for seen in ("__CUDACC__", "__CUDA_ARCH__"):  # the first stands within the second
        guard = re.compile(rf"^#ifdef {seen}$.*?^#endif$", re.DOTALL | re.MULTILINE)
        texts = [guard.sub("", text) for text in texts]
    assert {"vdpbf16ps", ""} == {match[1] for text in texts for match in pattern.finditer(text)}


def test_codes_are_the_same_in_python_and_c():
    text = "".join((CSRC / "core" / name).read_text() for name in ("types.h", "update_rule.h", "narrow.h"))
    enums = {"Activation": "ACTIVATIONS", "Pool": "POOLS", "Rule": "RULES", "Rounding": "ROUNDINGS"}
    for name, codes in ((name, getattr(_codes, codes)) for name, codes in enums.items()):
        body = re.search(rf"enum class {name} : int32_t {{(.*?)}}", text, re.DOTALL).group(1)
        enumerators = re.findall(r"\bk(\w+)(?:,|$|\s)", re.sub(r"//.*", "", body))
        snake = [re.sub(r"(?<!^)([A-Z])", r"_\1", enumerator).lower() for enumerator in enumerators]
        assert snake == list(codes), name


X, ROW, SQUARE = torch.ones(2, 8, 4, 4), torch.ones(8), torch.ones(8, 8)
STEP = ([torch.ones(8)], [ROW], [torch.zeros(8), torch.zeros(8)], [torch.ones(())], [])  # lists of an Adam's step
OPTIONS = (False, 0.0, False, None, 0.0, False, None, None, None, None, False)
UNKNOWN_CODES = {  # a call per code, in the order of the schema, and where the code stands in it
    "channel_pool": ((X, "pool", "in_act"), {"pool": 2, "in_act": 6}),
    "channel_scale": ((X, torch.ones(2, 8), "in_act"), {"in_act": 6}),
    "channel_scale_backward": ((X, X, torch.ones(2, 8), "in_act", True, True), {"in_act": -1}),
    "squeeze_excite": (
        (X, SQUARE, ROW, SQUARE, ROW, "act", "gate_act", "pool", "in_act"),
        {"act": 10, "gate_act": -1, "pool": 2, "in_act": 6},
    ),
    "batch_norm_act": ((X, ROW, ROW, ROW, ROW, None, "act", False), {"act": 10}),
    "batch_norm_act_fixed_backward": ((X, X, ROW, "act", True), {"act": 2}),
    "depthwise_conv2d": ((X, torch.ones(8, 1, 3, 3), None, [1, 1], [1, 1, 1, 1], [1, 1], "act"), {"act": 6}),
    "depthwise_bn_act_se": (
        (X, ROW, ROW, ROW, ROW, SQUARE, ROW, SQUARE, ROW, "in_act", "se_act", "gate_act"),
        {"in_act": 6, "se_act": 10, "gate_act": 10},
    ),
    "optimizer_step_narrow_": (
        (*STEP, "rule", 0.1, 0.0, True, [0.9, 0.999, 1e-8], *OPTIONS, [], [], "rounding", None),
        {"rule": len(_codes.RULES), "rounding": 3},
    ),
}


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize(
    ("operator", "name"), [(op, name) for op, (_, wrong) in UNKNOWN_CODES.items() for name in wrong]
)
def test_unknown_codes_are_refused(operator, name):
    arguments, wrong = UNKNOWN_CODES[operator]

    def call(codes):
        getattr(torch.ops.fusedtrain, operator)(*(codes.get(a, 0) if isinstance(a, str) else a for a in arguments))

    call({})
    with pytest.raises(RuntimeError, match=rf"{name} must be a code from 0 to \d+, got {wrong[name]}") as error:
        call({name: wrong[name]})
    assert "/csrc" not in str(error.value)  # the place of a source, not that where it was built


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("operator", _schema.SCHEMAS)
def test_the_library_implements_every_schema(operator):
    for_gpus = _extension.HAS_CUDA_KERNELS and _schema.stem(operator) not in _schema.CPU_ONLY
    for key, wanted in (("CPU", True), ("CUDA", for_gpus)):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedtrain::{operator}", key) == wanted, key


def test_bindings_register_every_schema_for_cuda():
    """What the test above can see only in a build with CUDA."""
    found = set()
    for path in CSRC.glob("bindings/*.cpp"):
        text = path.read_text()
        registered = re.search(r"_LIBRARY_IMPL\(fusedtrain, CUDA, m\) \{(.*?)\}", text, re.DOTALL)
        shared = re.search(r"void implement\(Library& m\) \{(.*?)\}", text, re.DOTALL)
        if registered is not None:
            body = shared[1] if "implement(m)" in registered[1] else registered[1]
            found |= set(re.findall(r'm\.impl\("(\w+)"', body))
    compiled = (*_schema.SCHEMAS, *_schema.UNTRACED)
    assert found == {name for name in compiled if _schema.stem(name) not in _schema.CPU_ONLY}


CLANG = next(filter(shutil.which, (*(f"clang++-{version}" for version in range(24, 15, -1)), "clang++")), None)
# What of g++'s own language there is: shuffles, attributes of lambdas, assembler.
KINDS = ("depthwise_conv2d_dw_planes", "depthwise_bn_act_se", "pointwise_conv2d_dw")


@pytest.mark.skipif(CLANG is None, reason="needs clang++")
@pytest.mark.parametrize("isa", compiler.ISAS)
@pytest.mark.parametrize("stem", sorted(path.stem for path in CSRC.glob("cpu/*.cpp")) if nvcc.SLOW else KINDS)
def test_kernels_compile_with_clang(stem, isa):
    version = subprocess.run([CLANG, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.partition(".")[0]) < 16:
        pytest.skip("clang knows structured bindings in lambdas from 16 on")
    own = [flag for flag in compiler.CXX_FLAGS if flag not in os.environ.get("CXXFLAGS", "").split()]  # may be g++'s
    flags = [*own, *compiler.ISA_FLAGS[isa], f"-DFUSEDTRAIN_ISA={isa}", f"-I{CSRC}", "-Werror"]
    source = CSRC / f"cpu/{stem}.cpp"
    done = subprocess.run([CLANG, *flags, "-fsyntax-only", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_variants_share_no_symbol(tmp_path):
    """A function that two object files both define weakly is kept once by the linker: were it the one compiled for
    AVX-512, the portable path would crash on a CPU without it. So nothing but the variants' own names is external.
    """
    isa = compiler.ISAS[-1]
    if isa == "kPortable":
        pytest.skip("this machine has only the portable variant")
    wrong = {}
    for name, path in compiler.kernel_objects(tmp_path, isa).items():
        listing = subprocess.run(["nm", "-C", "--defined-only", "--extern-only", path], capture_output=True, text=True)
        symbols = [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]
        assert symbols, f"{name} defines nothing"
        foreign = [
            symbol
            for kind, symbol in symbols
            if kind != "T" or f"<(fusedtrain::Isa){compiler.ISAS.index(isa)}>" not in symbol
        ]
        wrong |= {name: foreign} if foreign else {}
    assert not wrong


@needs_compiler
def test_setup_takes_a_compiler_of_several_words(tmp_path, monkeypatch):
    body = ast.parse((compiler.ROOT / "setup.py").read_text()).body
    function = next(node for node in body if getattr(node, "name", None) == "one_program")
    names = {"ROOT": tmp_path, "os": os, "shutil": shutil}
    exec(compile(ast.Module([function], []), "setup.py", "exec"), names)
    monkeypatch.setenv("CXX", f"env {compiler.CXX}")
    program = names["one_program"](os.environ["CXX"])
    texts = [subprocess.run([cxx, "--version"], capture_output=True).stdout for cxx in (program, compiler.CXX)]
    assert texts[0] == texts[1] != b"" and os.environ["CXX"] == program
    assert names["one_program"](compiler.CXX) == compiler.CXX
