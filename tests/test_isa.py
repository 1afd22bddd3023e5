"""The CPU kernels in the instruction sets that this CPU would not choose by itself."""

import harness
import pytest

from fusedtrain import _extension

if not _extension.LOADED:
    pytest.skip(_extension.WHY_NOT, allow_module_level=True)

CALL = "import torch, fusedtrain; fusedtrain.use_backend('cpu'); fusedtrain.ops.channel_pool(torch.ones(1, 1, 2, 2));"
LEVELS = [*_extension.BUILD_INFO["isa_variants"], "avx512_bf16"]  # the last is avx512 with instructions for bfloat16
PRINT = CALL + "print(fusedtrain._extension.BUILD_INFO['isa_active'], flush=True);"
# The other ops run kernels of these.
OPS = ("squeeze_excite", "depthwise_conv2d", "grouped_conv2d", "pointwise_conv2d", "mlp", "batch_norm_act")
OPS += ("depthwise_bn_act_se", "global_response_norm", "grad_norm", "optimizer_step")
TESTS = PRINT + "import pytest, sys; sys.exit(pytest.main())"


@pytest.mark.parametrize("isa", LEVELS)
def test_every_variant_is_as_good_as_torch(isa):
    if isa == _extension.BUILD_INFO["isa_active"]:
        pytest.skip("all other tests run this variant")
    tests = ["-n0", "-q", "-x", "-p", "no:cacheprovider", *(f"test_{op}.py" for op in OPS)]
    chosen = "cpu-cpu and (as_good_as_torch or share_its_gradient or (as_good_as_plain_torch and float32))"
    if isa.startswith("avx512") and _extension.BUILD_INFO["isa_active"].endswith("_bf16"):  # the same code otherwise
        chosen += " and bfloat16"
    done = harness.run_python("-c", TESTS, *tests, "-k", chosen, FUSEDTRAIN_ISA=isa)
    if "this CPU does not have it" in done.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    assert done.stdout.startswith(f"{isa}\n"), done.stdout[:200] + done.stderr[-2000:]
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def test_avx512_has_no_instructions_for_bfloat16():
    # They take subnormal numbers for 0, on CPUs that have them; others end here.
    code = """
import torch, fusedtrain
fusedtrain.use_backend("cpu")
x = torch.full((1, 16, 8, 8), 2.0**-130, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
weight = torch.zeros(16, 8, 3, 3, dtype=torch.bfloat16)
weight[:, 0, 1, 1] = 1
y = fusedtrain.ops.grouped_conv2d(x, weight, None, padding=1, groups=2)
print(fusedtrain._extension.BUILD_INFO["isa_active"], bool((y == 2.0**-130).all()))
"""
    done = harness.run_python("-c", code, FUSEDTRAIN_ISA="avx512")
    if "this CPU does not have it" in done.stderr:
        pytest.skip("this CPU does not have avx512")
    assert done.returncode == 0 and done.stdout.split() == ["avx512", "True"], (done.returncode, done.stderr)


def test_unknown_variant_is_named():
    done = harness.run_python("-c", CALL, FUSEDTRAIN_ISA="sse9")
    expected = "FUSEDTRAIN_ISA=sse9: expected portable, avx2, avx512, avx512_bf16 or amx_bf16"
    assert done.returncode != 0 and expected in done.stderr
