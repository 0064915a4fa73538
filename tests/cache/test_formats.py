"""The fixtures that docs/formats.md offers to other implementations, tested on our own."""

import hashlib
import importlib.util
from pathlib import Path

import device
import numpy as np
import pytest
import reference as ref
import row_formats
from helpers import assert_same_bf16, assert_same_bits
from library import sparse_mla

FOLDER = Path(__file__).parents[1] / "fixtures" / "formats"
SUMS = dict(reversed(line.split("  ")) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())


def load() -> dict[str, np.ndarray]:
    """Reads files as any language would: NAME.DTYPE.SHAPE.bin, little-endian, in C order."""
    arrays = {}
    for path in FOLDER.glob("*.bin"):
        name, dtype, shape, _ = path.name.split(".")
        dtype = ref.BF16 if dtype == "bfloat16" else np.dtype(dtype).newbyteorder("<")
        data = np.frombuffer(path.read_bytes(), dtype).astype(dtype.newbyteorder("="))
        arrays[name] = data.reshape([int(n) for n in shape.split("x")])
    return arrays


@pytest.fixture
def data():
    return load()


def test_checksums_are_right_and_complete():
    assert set(SUMS) == {path.name for path in FOLDER.glob("*.bin")}
    for name, digest in SUMS.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name


def test_the_script_makes_them_bit_for_bit(tmp_path):
    spec = importlib.util.spec_from_file_location("make_formats", FOLDER / "make.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name in made}
    assert set(made) == {*SUMS, "SHA256SUMS"}


def test_they_hold_the_hard_cases(data):
    assert np.isnan(data["kv_c"]).any()
    assert np.isinf(data["kv_c"]).any()
    assert (data["slot_mapping"] < 0).any()
    assert np.isneginf(data["lse"][-1]).all(), "a query without keys"
    assert np.isfinite(data["out"]).all(), "NaN in the cache is not selected"
    size = sum(path.stat().st_size for path in FOLDER.glob("*.bin"))
    assert size < 100_000


@pytest.mark.parametrize("name", ["cache_fp8_ds_mla", "cache_bfloat16"])
def test_cache_write(name, data):
    cache = np.zeros_like(data[name])
    sparse_mla.concat_and_cache_mla(data["kv_c"], data["k_pe"], cache, data["slot_mapping"])
    if name == "cache_bfloat16":  # any NaN equals any other there
        assert_same_bf16(cache, ref.bits16(data[name]))
    else:
        assert_same_bits(cache, data[name])


KEY_FORMATS = [name for name in row_formats.FORMATS if name != "bfloat16"]


@pytest.mark.parametrize("name", KEY_FORMATS)
def test_cache_write_of_whole_keys(name, data):
    cache = np.zeros_like(data[f"cache_{name}"])
    keys, slots = data["kv_c"], data["key_slot_mapping"]
    if row_formats.FORMATS[name].width == 128:
        keys = keys[:, :128]
        sparse_mla.indexer_k_quant_and_cache(keys, cache, slots, kv_format=name)
    else:
        options = {"kv_scale": 0.25} if name == "fp8_e4m3" else {}
        sparse_mla.quantize_and_insert_k_cache(keys, cache, slots, kv_format=name, **options)
    assert_same_bits(cache, data[f"cache_{name}"])


def test_gather(data):
    out = np.zeros_like(data["gathered"])
    request = [data[key] for key in ("block_table", "seq_lens", "workspace_starts")]
    sparse_mla.gather_kv_cache(data["cache_fp8_ds_mla"], *request, out=out)
    assert_same_bf16(out, ref.bits16(data["gathered"]))


def test_index_conversion(data):
    arguments = [data[key] for key in ("req_id_per_token", "block_table", "topk_indices")]
    block_size = data["cache_fp8_ds_mla"].shape[1]
    slots, counts = sparse_mla.convert_req_index_to_global_index(
        *arguments, block_size=block_size, valid_counts=True
    )
    assert_same_bits(slots, data["slots"])
    assert_same_bits(counts, data["valid_counts"])


def test_attention(data):
    options = {key: data[key] for key in ("topk_length", "attn_sink")} | {"softmax_scale": 0.0625}
    inputs = data["q"], data["cache_fp8_ds_mla"], data["indices"]
    out, lse = sparse_mla.sparse_attention(*inputs, **options)
    bounds = {"out": data["out_bound"], "lse": data["lse_bound"]}
    if device.ON_CUDA:  # bounds that allow for scales in f16
        want = ref.attention(*inputs, **options)
        bounds = {
            "out": want.out_tolerance(**device.BOUNDS),
            "lse": want.lse_tolerance(**device.BOUNDS),
        }
    for key, got in (("out", out), ("lse", lse)):
        want = data[key].astype(np.float64)
        assert ref.worst_ratio(got, want, bounds[key]) <= 1, key
