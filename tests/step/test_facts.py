"""The facts of each Backend are those of what runs: what a fact says is served, its Config, builder
and layer take, and nothing else."""

from __future__ import annotations

import inspect
import itertools

import device
import numpy as np
import pytest
import reference as ref
from helpers import find_framework

import sparse_mla as package
from sparse_mla import _C

dense, v4 = package.dense, package.v4
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
HEADS = 2
NUM_PAGES = 70  # enough for a request of 64 tokens in pages of one

FORMATS = ("auto", *_C.KV_FORMATS, "fp8", "FP8_V4", "int8", "", None, 0)
HEAD_SIZES = (0, 64, 128, 448, 511, 512, 513, 575, 576, 577, 640)
BLOCK_SIZES = (1, 2, 3, 7, 16, 63, 64, 100, 256)
BAD_BLOCK_SIZES = (0, -1, -64, 2**31, 2**40, 1.0, 64.5, None, "64")


def accepts(call, *args, **options) -> bool:
    try:
        call(*args, **options)
    except (TypeError, ValueError):
        return False
    return True


def cache_of(shape: tuple[int, ...], kv_format: str) -> np.ndarray:
    """A cache of the shape that a fact gives."""
    return np.zeros(shape, ref.BF16 if kv_format in ("auto", "bfloat16") else np.uint8)


def make_common(block_size: int) -> package.CommonAttentionMetadata:
    """A decode of a request of 21 tokens, and a prompt of 3."""
    tables = np.arange(2 * 32, dtype=np.int32).reshape(2, 32)
    slots = [tables[0][20 // block_size] * block_size + 20 % block_size]
    slots += [tables[1][i // block_size] * block_size + i % block_size for i in range(3)]
    starts, lens = np.array([0, 1, 4], np.int32), np.array([21, 3], np.int32)
    return package.CommonAttentionMetadata(starts, lens, np.array(slots), tables)


def bf16(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, shape).astype(ref.BF16)


# --- the layers of a plan ------------------------------------------------------------------------


def v32_config(kv_format, head_size, block_size, **changes):
    return package.Config(
        HEADS,
        softmax_scale=0.1,
        qk_rope_head_dim=head_size - 512,
        kv_cache_dtype=kv_format,
        block_size=block_size,
        topk_tokens=8,
        **(LIMITS | changes),
    )


def run_v32(config, cache, *, dtype=ref.BF16, **options):
    metadata = package.MetadataBuilder(config).build(make_common(config.block_size))
    q = bf16(4, HEADS, 576).astype(dtype)
    indices = np.zeros((4, 8), np.int32)
    return package.SparseMLA(config).forward(q, cache, indices, metadata, **options)[0]


def dense_config(kv_format, head_size, block_size, **changes):
    return dense.Config(
        HEADS,
        softmax_scale=0.1,
        qk_nope_head_dim=16,
        v_head_dim=24,
        qk_rope_head_dim=head_size - 512,
        kv_cache_dtype=kv_format,
        block_size=block_size,
        **(LIMITS | changes),
    )


def run_dense(config, cache, *, dtype=ref.BF16, **options):
    metadata = dense.MetadataBuilder(config).build(make_common(config.block_size))
    layer = dense.DenseMLA(config, kv_b_proj=bf16(512, HEADS * 40))
    rope = config.qk_rope_head_dim
    q, k_pe = bf16(4, HEADS, 16 + rope).astype(dtype), bf16(4, rope) if rope else None
    return layer.forward(q, bf16(4, 512), k_pe, cache, metadata, **options)


PLANS = [
    (package.Backend, v32_config, run_v32, (None, "mixed", "separate", "bf16", "direct")),
    (dense.Backend, dense_config, run_dense, (None, "separate", "mixed")),
]
EACH_PLAN = pytest.mark.parametrize(
    ("backend", "make_config", "run", "paths"), PLANS, ids=lambda x: getattr(x, "name", "")
)


@EACH_PLAN
def test_every_format_and_head_size(backend, make_config, run, paths):
    """A fact accepts what the config accepts; and then a step runs on each path."""
    served = set()
    for kv_format, head_size in itertools.product(FORMATS, HEAD_SIZES):
        is_served = accepts(make_config, kv_format, head_size, 16)
        shape = NUM_PAGES, 16, 1, head_size, kv_format
        assert accepts(backend.get_kv_cache_shape, *shape) == is_served, (kv_format, head_size)
        if is_served:
            served.add((kv_format, head_size))
            ran = 0
            for path in paths:
                if accepts(make_config, kv_format, head_size, 16, path=path):
                    config = make_config(kv_format, head_size, 16, path=path)
                    run(config, cache_of(backend.get_kv_cache_shape(*shape), kv_format))
                    ran += 1
            assert ran >= 2, (kv_format, head_size)
    formats, sizes = zip(*served, strict=True)
    assert set(backend.supported_kv_cache_dtypes) == set(formats)
    assert set(backend.supported_head_sizes) == set(sizes)
    for facts in (backend.supported_kv_cache_dtypes, backend.supported_head_sizes):
        assert len(set(facts)) == len(facts)


@EACH_PLAN
def test_every_page_size(backend, make_config, run, paths):
    for kv_format, head_size in itertools.product(
        backend.supported_kv_cache_dtypes, backend.supported_head_sizes
    ):
        if not accepts(make_config, kv_format, head_size, 16):
            continue
        for block_size in BLOCK_SIZES:
            shape = backend.get_kv_cache_shape(NUM_PAGES, block_size, 1, head_size, kv_format)
            assert shape[:2] == (NUM_PAGES, block_size)
            run(make_config(kv_format, head_size, block_size), cache_of(shape, kv_format))
        for block_size in BAD_BLOCK_SIZES:
            shape = NUM_PAGES, block_size, 1, head_size, kv_format
            assert not accepts(backend.get_kv_cache_shape, *shape), block_size
            assert not accepts(
                lambda *of: backend.get_builder_cls()(make_config(*of)),
                *(kv_format, head_size, block_size),
            ), block_size


@EACH_PLAN
def test_a_layer_takes_the_cache_of_its_facts_alone(backend, make_config, run, paths):
    """Of all shapes that the facts give for any config, a layer takes those of its own row."""
    served = [
        (kv_format, head_size)
        for kv_format in backend.supported_kv_cache_dtypes
        for head_size in backend.supported_head_sizes
        if accepts(backend.get_kv_cache_shape, 1, 16, 1, head_size, kv_format)
    ]
    caches = {
        of: cache_of(backend.get_kv_cache_shape(NUM_PAGES, 16, 1, of[1], of[0]), of[0])
        for of in served
    }
    for of, own in caches.items():
        others = [cache for cache in caches.values() if cache is not own]
        wider = np.zeros((*own.shape[:2], own.shape[2] + 16), own.dtype)
        for cache in (own, own[:, :8], wider, *others):
            same = (cache.shape, cache.dtype) == (own.shape, own.dtype)
            assert accepts(run, make_config(*of, 16), cache) == same, (of, cache.shape)


@EACH_PLAN
def test_every_count_of_heads_and_pages(backend, make_config, run, paths):
    get = backend.get_kv_cache_shape
    for bad in (0, 2, -1, None, "1", 1.5):
        assert not accepts(get, 1, 16, bad)
    for bad in (-1, 1.0, None, "3"):
        with pytest.raises((TypeError, ValueError), match="`num_blocks` must be "):
            get(bad, 16)
    assert get(0, 16)[0] == 0
    assert get(np.int64(3), np.int32(16)) == (3, 16, 576)
    assert type(get(np.int64(3), np.int32(16))[0]) is int


@EACH_PLAN
def test_dtypes_and_results(backend, make_config, run, paths):
    """Queries are of the dtypes that the facts name, and results may be given."""
    config = make_config("auto", 576, 16)
    cache = cache_of(backend.get_kv_cache_shape(NUM_PAGES, 16), "auto")
    for dtype in (ref.BF16, np.float16, np.float32, np.float64, ref.E4M3):
        named = np.dtype(dtype).name in backend.supported_dtypes
        assert accepts(run, config, cache, dtype=dtype) == named, dtype
    assert [run(config, cache).dtype.name] == backend.supported_dtypes
    out = np.empty_like(run(config, cache))
    assert backend.accept_output_buffer
    assert run(config, cache, out=out) is out


@pytest.mark.parametrize("module", [package, dense, v4], ids=lambda module: module.__name__)
def test_classes_and_flags(module):
    backend = module.Backend
    builder, layer = backend.get_builder_cls(), backend.get_impl_cls()
    assert builder is module.MetadataBuilder
    assert layer is (module.SparseMLA if backend.is_sparse else module.DenseMLA)
    parameters = inspect.signature(getattr(layer, "attend", layer.forward)).parameters
    assert ("topk_indices" in parameters) == backend.is_sparse
    assert ("out" in parameters) == backend.accept_output_buffer
    assert backend.is_mla
    assert backend.supported_kernel_block_sizes == "any"


# --- DeepSeek V4 ---------------------------------------------------------------------------------

RATIO = 4


def v4_config(block_size=16, **changes):
    return v4.Config(
        HEADS,
        window=8,
        topk_tokens=4,
        compress_ratios=(RATIO,),
        swa_block_size=block_size,
        block_size=RATIO * block_size,
        **(LIMITS | changes),
    )


def v4_cache(kv_format, block_size, ratio):
    """The cache of a layer in the shape that the facts give."""
    shape = v4.Backend.get_kv_cache_shape(
        NUM_PAGES, ratio * block_size, 1, 512, kv_format, compress_ratio=ratio
    )
    assert shape[:2] == (NUM_PAGES, block_size)
    page = v4.Backend.get_page_bytes(ratio * block_size, kv_format, ratio, align=1)
    cache = np.zeros(shape, ref.BF16 if kv_format == "bfloat16" else np.uint8)
    assert cache.nbytes == NUM_PAGES * page
    return cache


def run_v4(config, swa, compressed):
    builder = v4.MetadataBuilder(config)
    common = make_common(config.swa_block_size)
    pages = np.arange(2 * 32, dtype=np.int32).reshape(2, 32)
    metadata = builder.build(common, compressed={RATIO: pages})
    for ratio in (1, RATIO):
        layer = v4.SparseMLA(config, ratio, v4.Weights(*5 * [None]))
        indices = None if ratio == 1 else np.zeros((4, 4), np.int32)
        layer.attend(bf16(4, HEADS, 512), v4.Caches(swa, compressed), metadata, indices)


@pytest.mark.parametrize("path", [None, "direct", "separate"])
def test_every_format_of_v4(path):
    """`supported_kv_cache_dtypes` are what the sliding window may hold, and a fact gives a shape
    for what any of the config's caches may hold."""
    for kv_format in FORMATS:
        is_main = accepts(v4_config, kv_cache_dtype=kv_format)
        is_extra = kv_format is not None and accepts(v4_config, compressed_kv_cache_dtype=kv_format)
        is_index = accepts(v4_config, index_cache_dtype=kv_format)
        assert is_main == (kv_format in v4.Backend.supported_kv_cache_dtypes), kv_format
        for head_size in (None, *HEAD_SIZES):
            wanted = {None, 512} if is_extra else {None, 128} if is_index else ()
            assert accepts(v4.Backend.get_kv_cache_shape, 3, 8, 1, head_size, kv_format, 4) == (
                head_size in wanted
            ), (kv_format, head_size)
        assert accepts(v4.Backend.get_page_bytes, 8, kv_format, 4) == (is_extra or is_index)
        if is_extra:
            main = kv_format if is_main else "bfloat16"
            formats = {"kv_cache_dtype": main, "compressed_kv_cache_dtype": kv_format}
            config = v4_config(path=path, **formats)
            run_v4(config, v4_cache(main, 16, 1), v4_cache(kv_format, 16, RATIO))
    assert v4.Backend.supported_head_sizes == [512]


def test_every_page_size_of_v4():
    for block_size in BLOCK_SIZES:
        for kv_format in v4.Backend.supported_kv_cache_dtypes:
            config = v4_config(block_size, kv_cache_dtype=kv_format)
            run_v4(config, *(v4_cache(kv_format, block_size, ratio) for ratio in (1, RATIO)))
    for block_size in BAD_BLOCK_SIZES:
        for facts in (v4.Backend.get_kv_cache_shape, v4.Backend.get_page_bytes):
            args = (
                (3, block_size) if facts is v4.Backend.get_kv_cache_shape else (block_size, "auto")
            )
            assert not accepts(facts, *args), block_size
            assert not accepts(facts, *args, compress_ratio=4), block_size
        make = {"block_size": block_size}, {"swa_block_size": block_size}
        for changes in make:
            assert not accepts(
                lambda changes: v4.MetadataBuilder(v4.Config(HEADS, **LIMITS, **changes)), changes
            ), changes
    for ratio in (1.0, None, "4"):
        with pytest.raises(TypeError, match="`compress_ratio` must be an int"):
            v4.Backend.get_kv_cache_shape(3, 64, compress_ratio=ratio)
    for ratio, block_size in itertools.product(range(2, 17), (16, 48, 60)):
        sizes = {"block_size": block_size, "compress_ratios": [ratio]}
        sizes["state_block_sizes"] = {ratio: 4}
        assert accepts(v4.Config, HEADS, **LIMITS, **sizes) == accepts(
            v4.Backend.get_kv_cache_shape, 3, block_size, compress_ratio=ratio
        )


# --- vLLM ----------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_every_fact_of_vllm_s_backend():
    """vLLM's questions have the answers of what `Config` takes."""
    find_framework("vllm")
    torch = device.import_quietly("torch")
    backend = device.import_quietly("sparse_mla.integrations.vllm").SparseMLABackend
    formats = [name for name in FORMATS if name is not None]  # vLLM's None asks about no format
    for kv_format, head_size in itertools.product(formats, HEAD_SIZES):
        is_served = accepts(v32_config, kv_format, head_size, 16)
        assert accepts(backend.get_kv_cache_shape, 3, 16, 1, head_size, kv_format) == is_served
        answers = backend.supports_head_size(head_size), backend.supports_kv_cache_dtype(kv_format)
        assert all(answers) == is_served, (kv_format, head_size)
    assert all(map(backend.supports_block_size, BLOCK_SIZES))
    assert backend.supported_dtypes == [getattr(torch, n) for n in package.Backend.supported_dtypes]
    assert backend.is_sparse() and backend.is_mla()
