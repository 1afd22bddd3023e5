"""The CPU kernels in the instruction sets that this CPU would not choose by itself."""

import harness
import pytest

from fusedtrain import _extension

if not _extension.LOADED:
    pytest.skip(_extension.WHY_NOT, allow_module_level=True)

CALL = "import torch, fusedtrain; fusedtrain.use_backend('cpu'); fusedtrain.ops.channel_pool(torch.ones(1, 1, 2, 2));"
LEVELS = [*_extension.BUILD_INFO["isa_variants"], "avx512_bf16"]  # the last is avx512 with instructions for bfloat16
PRINT = CALL + "print(fusedtrain._extension.BUILD_INFO['isa_active'])"


@pytest.mark.parametrize("isa", LEVELS)
def test_every_variant_is_as_good_as_torch(isa):
    if isa == _extension.BUILD_INFO["isa_active"]:
        pytest.skip("all other tests run this variant")
    done = harness.run_python("-c", PRINT, FUSEDTRAIN_ISA=isa)
    if "this CPU does not have it" in done.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    assert done.stdout.strip() == isa, done.stderr
    tests = [
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "test_squeeze_excite.py",
        "test_channel_pool.py",
        "test_grouped_conv2d.py",
        "test_pointwise_conv2d.py",
    ]
    chosen = "cpu-cpu and (as_good_as_torch or repeats or share_its_gradient)"
    if isa.startswith("avx512") and _extension.BUILD_INFO["isa_active"].endswith("_bf16"):  # the same code otherwise
        chosen += " and bfloat16"
    done = harness.run_python(*tests, "-k", chosen, FUSEDTRAIN_ISA=isa)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def test_unknown_variant_is_named():
    done = harness.run_python("-c", CALL, FUSEDTRAIN_ISA="sse9")
    expected = "FUSEDTRAIN_ISA=sse9: expected portable, avx2, avx512, avx512_bf16 or amx_bf16"
    assert done.returncode != 0 and expected in done.stderr
