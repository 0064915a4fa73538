"""SGLang's plugin: SGLang's own plugins, hooks and module of FlashMLA, of the released wheel, with
our functions behind them.

Collected where SGLang's files are: `make sglang`. With SMLA_DEVICE=cuda the arrays are on the GPU,
beside FlashMLA where that is installed. test_gpu_sglang.py runs FlashMLA's functions, too.
"""

import inspect
import os

import numpy as np
import pytest
import reference as ref
import sglang_calls as calls
import sglang_files
from entry_points import write_entry_point
from flash_mla_cases import ON_GPU, Decode, Prefill, assert_results
from helpers import BESIDE_TESTS, assert_same_bits, assert_within_bounds, run_python
from sglang_files import GROUP, MODULE
from test_flash_mla_dense import make as make_dense
from test_flash_mla_fp8 import make as make_fp8
from test_flash_mla_v4 import Decode as V4Decode

from sparse_mla import flash_mla

pytestmark = pytest.mark.torch

FUNCTIONS = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    """SGLang's module of FlashMLA, after SGLang has loaded the plugin by its entry point. FlashMLA
    is taken from it, so that nothing but the hooks can serve a call."""
    folders = write_entry_point(tmp_path_factory.mktemp("plugin"), group=GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLUGINS", "sparse_mla")
        with sglang_files.loaded(folders) as module:
            patch.delattr(module, "flash_mla")
            yield module


# ---- Results -------------------------------------------------------------------------------------

DECODES = {
    "one rank's heads": {"H": 16, "K": 64},
    "64 heads": {"K": 128},
    "scale": {"softmax_scale": 0.21, "K": 128, "b": 5},
}


@pytest.mark.parametrize("name", DECODES)
def test_decode_of_v32(name, wrapper, torch_arrays):
    case = Decode(s_q=1, **DECODES[name])
    assert_results(calls.decode_v32(wrapper, torch_arrays, case), case.reference())


PREFILLS = {
    "V3.2": {"H": 16},
    "V3.2, lengths": {"topk_length": True},
    "V4": {"d_qk": 512, "sink": True, "topk_length": True, "sm_scale": 512**-0.5},
}


@pytest.mark.parametrize("use_legacy", [None, False])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name, use_legacy, wrapper, torch_arrays):
    case, changes = Prefill(**PREFILLS[name]), {} if use_legacy is None else {"use_legacy": False}
    assert_results(calls.prefill(wrapper, torch_arrays, case, **changes), case.reference())


@pytest.mark.parametrize("name", calls.V4_LAYERS)
def test_decode_of_v4(name, wrapper, torch_arrays):
    case = calls.v4_layer(name)
    got = calls.decode_v4(wrapper, torch_arrays, case)
    assert_within_bounds(case.inputs.reference(), got)


@pytest.mark.parametrize(
    ("fmt", "extra"), [("fp8_v41_split", "fp4_v41_split"), ("fp8_v41", "fp4_v41")]
)
def test_decode_of_v41(fmt, extra, wrapper, torch_arrays):
    """SGLang says by `use_legacy` how the rows of a page lie."""
    case = V4Decode(fmt, extra, s_q=1, H=16, K=128, block_size=64, extra_block_size=64)
    got = calls.decode_v4(wrapper, torch_arrays, case)
    assert_within_bounds(case.inputs.reference(), got)


def test_older_pages_are_the_default(wrapper, torch_arrays):
    """Without `use_legacy`, unlike those of FlashMLA's function."""
    case = V4Decode("fp8_v41_split", s_q=1, H=16, K=64, block_size=64)
    del case.arguments["use_legacy"]
    meta, _ = wrapper.get_mla_metadata()
    args = (case.q, case.k_cache, None, None, 512, meta)
    got = torch_arrays.call(wrapper.flash_mla_with_kvcache, *args, **case.arguments)
    assert_within_bounds(case.inputs.reference(), calls.by_row(*got))


@pytest.mark.parametrize("kv_format", ["V32_NO_ROPE", None])
def test_keys_without_rope(kv_format, wrapper, torch_arrays):
    """Rows of 528 bytes are this format's beside a schedule of tensors, which V4.1 never has."""
    case = V4Decode("fp8_nope", s_q=1, H=16, K=64, sink=False, lengths=False)
    lens = torch_arrays.put(np.full(case.b, 64, np.int32))
    schedule, splits = wrapper.get_mla_metadata(lens, 16, 1, 16, True, 64)
    got = torch_arrays.call(
        wrapper.flash_mla_with_kvcache,
        *(case.q, case.k_cache, np.zeros((case.b, 0), np.int32), lens, 512, schedule, splits),
        is_fp8_kvcache=True, indices=case.arguments["indices"], kv_format=kv_format,
    )  # fmt: skip
    assert_within_bounds(case.inputs.reference(), calls.by_row(*got))


def test_a_schedule_s_sizes_and_the_name_of_a_format_are_kept(wrapper, torch_arrays):
    case, put = V4Decode("fp8_nope", s_q=1, H=16, K=64), torch_arrays.put
    lens = put(np.full(case.b, 64, np.int32))
    schedule, splits = wrapper.get_mla_metadata(lens, 16, 1, 16, True, 64)
    assert (tuple(schedule.shape), tuple(splits.shape)) == ((1, 8), (case.b + 1,))
    assert schedule.device == splits.device == lens.device
    indices = put(case.arguments["indices"])
    with pytest.raises(ValueError, match="`kv_format` must"):
        wrapper.flash_mla_with_kvcache(
            put(case.q), put(case.k_cache), None, lens, 512, schedule, splits,
            is_fp8_kvcache=True, indices=indices, kv_format="V5",
        )  # fmt: skip


@pytest.mark.parametrize("s_q", [1, 3])
def test_dense_decoding(s_q, wrapper, torch_arrays):
    """V3 and V2 with SGLang's backend `flashmla`: decodes, and drafts that are verified."""
    case = make_dense([140, 70, 64], s_q)
    got = calls.decode_dense(wrapper, torch_arrays, case)
    assert_within_bounds(case.reference(), got)


@pytest.mark.parametrize("s_q", [1, 3])
def test_dense_decoding_of_fp8(s_q, wrapper, torch_arrays):
    """The same with an e4m3 cache, whose query is cast with the layer's scale of keys."""
    case = make_fp8([140, 70, 64], s_q, q_scale=0.7, kv_scale=0.7)
    cache = case.arguments()[1][:, :, None].view(ref.E4M3)
    scale = np.array([0.7], np.float32)
    got = calls.decode_dense(
        wrapper, torch_arrays, case, k_cache=cache, descale_q=scale, descale_k=scale
    )
    assert_within_bounds(case.reference(), got)


def test_arguments_by_position_are_in_sglang_s_order(wrapper, torch_arrays):
    """There `descale_q` and `descale_k` stand before `is_fp8_kvcache`, here behind everything."""
    case, put = Decode(s_q=1, H=16, K=64, sink=True), torch_arrays.put
    meta, splits = wrapper.get_mla_metadata()
    assert type(meta) is flash_mla.FlashMLASchedMeta
    sink = put(case.options["attn_sink"])
    got = wrapper.flash_mla_with_kvcache(
        put(case.q), put(case.k_cache), None, None, 512, meta, splits, None, False, None, None,
        True, put(case.indices), sink,
    )  # fmt: skip
    for a, b in zip(got, case.run(torch_arrays), strict=True):
        assert_same_bits(torch_arrays.get(a), b)
    assert meta.have_initialized
    prefill = Prefill(H=16, sink=True)
    args = (put(prefill.q), put(prefill.kv), put(prefill.indices), prefill.sm_scale, 512)
    out, *_ = wrapper.flash_mla_sparse_fwd(*args, put(prefill.options["attn_sink"]))
    assert_same_bits(torch_arrays.get(out), prefill.run(torch_arrays)[0])
    with pytest.raises(ValueError, match="longer"):
        wrapper.flash_mla_sparse_fwd(*args, None, None, True, None)
    with pytest.raises(TypeError, match="multiple values"):
        wrapper.flash_mla_sparse_fwd(*args, q=args[0])


def test_bits_are_those_of_the_drop_in(wrapper, torch_arrays):
    case = Decode(s_q=1, K=128)
    got = calls.decode_v32(wrapper, torch_arrays, case)
    for a, b in zip(got, case.run(torch_arrays), strict=True):
        assert_same_bits(a, b)


def test_our_functions_take_what_sglang_passes(wrapper):
    """By the signatures that SGLang's functions have in this version."""
    for name in FUNCTIONS:
        theirs = inspect.signature(getattr(wrapper, name).__wrapped__).parameters
        inspect.signature(getattr(flash_mla, name)).bind_partial(**dict.fromkeys(theirs))
        assert len(theirs) >= 6


# ---- Plugin --------------------------------------------------------------------------------------

EXPOSE = f"{BESIDE_TESTS}import sglang_files; sglang_files.expose(); MODULE = {MODULE!r}\n"
LOAD = """
import importlib, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
"""
SHOW = """
wrapper = importlib.import_module(MODULE)
for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"):
    print(name, hasattr(getattr(wrapper, name), "__wrapped__"))
print(sorted(target.rpartition(".")[2] for target in HookRegistry._patched))
"""
OURS = [*(f"{name} True" for name in FUNCTIONS), str([*FUNCTIONS])]
THEIRS = [*(f"{name} False" for name in FUNCTIONS), "[]"]


@pytest.fixture
def run(tmp_path):
    """Runs a script with pyproject.toml's entry points, and `more`, as an installation has them."""

    def run_script(script: str, *more: str, plugins="", **environment):
        path = [*write_entry_point(tmp_path / "plugin", *more, group=GROUP), tmp_path]
        path.append(os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "SGLANG_PLUGINS": plugins}
        done = run_python("-W", "ignore", "-c", EXPOSE + LOAD + script, **environment)
        assert done.returncode == 0, done.stderr
        return done

    return run_script


def test_functions_become_ours_when_sglang_imports_them(run):
    lines = run(f"load_plugins(); print(MODULE in sys.modules)\n{SHOW}").stdout.splitlines()
    assert lines == ["False", *OURS]


def test_functions_that_are_imported_already_become_ours(run):
    """Also where a module has them by `from … import …`, as SGLang's backend `flashmla` has."""
    script = f"""
from {MODULE} import flash_mla_with_kvcache
load_plugins(); load_plugins()
print(hasattr(flash_mla_with_kvcache, "__wrapped__"))
{SHOW}"""
    assert run(script).stdout.splitlines() == ["True", *OURS]


def test_sglang_plugins_without_us_leaves_theirs(run):
    done = run(f"load_plugins()\n{SHOW}print('sparse_mla_sglang' in sys.modules)", plugins="none")
    assert done.stdout.splitlines() == [*THEIRS, "False"]


ANOTHER = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    target = "sglang.kernels.ops.attention.flash_mla_interface.get_mla_metadata"
    HookRegistry.register(target, around, HookType.AROUND)

def around(plain, *args, **kwargs):
    print("around")
    return plain(*args, **kwargs)
"""


@pytest.mark.parametrize("imports", ["", "import MODULE; "])
def test_hooks_of_another_plugin_stay_around_ours(imports, run, tmp_path):
    """SGLang then imports the module while it applies hooks, or the plugin while it is loaded."""
    (tmp_path / "another.py").write_text(
        ANOTHER.replace("    target", f"    {imports}target".replace("MODULE", MODULE))
    )
    script = f"load_plugins()\n{SHOW}print(type(wrapper.get_mla_metadata()[0]).__module__)"
    lines = run(script, "another = another:register").stdout.splitlines()
    assert lines == [*OURS, "around", "sparse_mla.flash_mla"]


CHANGES = {
    "a function is missing": (
        "def flash_mla_sparse_fwd(", "def sparse_fwd(", "flash_mla_sparse_fwd",
    ),
    "a parameter is new": (
        "    kv_format: Optional[str] = None,", "    kv_format=None,\n    x=0,",
        "flash_mla_with_kvcache",
    ),
}  # fmt: skip


def test_a_registry_without_its_private_name(run):
    """Of which the plugin asks whether SGLang is loading plugins."""
    script = f"""
from sglang.srt.plugins import hook_registry
load_plugins()
del hook_registry._current_plugin_source
{SHOW}"""
    assert run(script).stdout.splitlines() == OURS


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(
    "order", ["load_plugins(); import MODULE", "import MODULE; load_plugins()"]
)
def test_another_version_of_sglang_runs_its_own_functions(what, order, run, tmp_path):
    """SGLang's file, changed; the log has one line."""
    old, new, name = CHANGES[what]
    package, _, stem = MODULE.rpartition(".")
    folder = sglang_files.folder_of(package)
    text = (folder / f"{stem}.py").read_text()
    assert old in text
    (tmp_path / f"{stem}.py").write_text(text.replace(old, new))
    done = run(f"""
import {package}
{package}.__path__.insert(0, {str(tmp_path)!r})
{order.replace("MODULE", MODULE)}
wrapper = sys.modules[MODULE]
print([name for name in dir(wrapper) if hasattr(getattr(wrapper, name), "__wrapped__")])
import torch
torch.set_default_device({"cuda" if ON_GPU else "cpu"!r})
q, cache = torch.ones(1, 1, 64, 576).bfloat16(), torch.zeros(2, 64, 1, 656).byte()
indices, meta = torch.zeros(1, 1, 64).int(), wrapper.get_mla_metadata()[0]
out, lse = wrapper.flash_mla_with_kvcache(
    q, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=indices
)
print(tuple(out.shape), HookRegistry._patched)
""")
    assert done.stdout.splitlines() == ["[]", "(1, 1, 64, 512) set()"]
    (line,) = [line for line in done.stderr.splitlines() if "SGLang" in line]
    assert line.startswith(f"SGLang 0.5.23: no hook for {MODULE}.{name}, so SGLang's own functions")
    assert line.endswith("None is not a callable object" if "missing" in what else "argument 'x'")


def test_another_backend_pays_the_entry_point_alone(run):
    script = """
import time
from importlib.metadata import entry_points
plugins = entry_points(group="sglang.srt.plugins", name="sparse_mla")
seconds = []
for _ in range(3):
    sys.modules.pop("sparse_mla_sglang", None)
    began = time.process_time()
    for plugin in plugins:
        plugin.load()()
    seconds.append(time.process_time() - began)
print(min(seconds))
names = "torch", "numpy", "flash_mla", "sparse_mla", MODULE
print([name for name in names if name in sys.modules])
"""
    seconds, modules = run(script).stdout.splitlines()
    assert float(seconds) <= 0.005
    assert modules == "[]"
