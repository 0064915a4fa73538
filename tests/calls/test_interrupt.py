"""Ctrl-C and other signals end long calls of the CPU, and leave short ones and others alone."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from helpers import FOLDERS, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.frameworks

SECONDS = 0.3  # from a call's start to its signal
SLOTS = 4096


class Alarm(Exception):
    """What the handler of these tests' signal raises."""


def attention(num_tokens, num_heads=128, topk=2048):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, num_heads, 576), np.float32).astype(ref.BF16)
    kv = rng.standard_normal((SLOTS, 576), np.float32).astype(ref.BF16)
    indices = rng.integers(SLOTS, size=(1, topk), dtype=np.int32)
    q, indices = np.repeat(q, num_tokens, axis=0), np.repeat(indices, num_tokens, axis=0)
    return lambda: sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.1)


def attention_longer_than(seconds):
    """A call, and its result. How many tokens it takes depends on the machine."""
    num_tokens = 400
    while True:
        call = attention(num_tokens)
        start = time.monotonic()
        result = call()
        if time.monotonic() - start > seconds:
            return call, result
        num_tokens *= 2


def logits():
    q = np.zeros((4096, 64, 128), ref.E4M3)
    weights = np.zeros((4096, 64), np.float32)
    keys = np.zeros((16384, 128), ref.E4M3), np.ones(16384, np.float32)
    lens = np.full(4096, 16384, np.int32)
    return lambda: sparse_mla.indexer_logits(q, weights, keys, lens)


def projection():
    q = np.zeros((8192, 128, 128), ref.BF16)
    weight = np.zeros((512, 128, 128), ref.BF16)
    return lambda: sparse_mla.k_up_proj(q, weight)


def top_k():
    rows = np.random.default_rng(0).standard_normal((1, 1 << 20), np.float32)
    scores = np.broadcast_to(rows, (5000, 1 << 20))
    zeros, ends = np.zeros(5000, np.int32), np.full(5000, 1 << 20, np.int32)
    return lambda: sparse_mla.top_k_per_row(scores, zeros, ends, k=2048)


def forward():
    """A step on path "separate", which ends in its second attention call at the earliest."""
    config = sparse_mla.Config(
        128,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        path="separate",
        max_num_seqs=8,
        max_num_batched_tokens=8000,
        max_model_len=4096,
    )
    starts, lens = np.array([0, 4000, 8000], np.int32), np.array([4096, 4096], np.int32)
    table = np.arange(128, dtype=np.int32).reshape(2, 64)
    common = sparse_mla.CommonAttentionMetadata(starts, lens, np.zeros(8000, np.int64), table)
    metadata = sparse_mla.MetadataBuilder(config).build(common)
    layer = sparse_mla.SparseMLA(config)
    q = np.zeros((8000, 128, 576), ref.BF16)
    cache = np.zeros((128, 64, 656), np.uint8)
    indices = np.tile(np.arange(2048, dtype=np.int32), (8000, 1))
    return lambda: layer.forward(q, cache, indices, metadata)


LONG = {
    "attention": lambda: attention(2000),
    "a few tokens in many parts": lambda: attention(2, topk=1 << 20),
    "logits": logits,
    "projection": projection,
    "top_k": top_k,
    "forward": forward,
}


@pytest.fixture
def alarm():
    """alarm(handler) sends one signal in SECONDS, to a handler that raises Alarm by default."""

    def raise_it(*_):
        raise Alarm

    def send(handler=raise_it):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)

    before = signal.getsignal(signal.SIGALRM)
    yield send
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", LONG)
def test_a_signal_ends_a_long_call(name, alarm):
    call = LONG[name]()
    alarm()
    start = time.monotonic()
    with pytest.raises(Alarm):
        call()
    assert time.monotonic() - start < 4, "two cores need 9 to 40 s for the whole call"


def test_ctrl_c_ends_a_script(tmp_path):
    script = tmp_path / "script.py"
    folders = [str(Path(sparse_mla.__file__).parents[1]), *FOLDERS]
    script.write_text(
        f"import signal, sys; sys.path[:0] = {folders!r}\n"
        # A shell that runs its children in the background lets them ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import test_interrupt\n"
        "call = test_interrupt.attention(2000)\n"
        "print('calling', flush=True)\n"
        "call()\n"
        "print('done')\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script_runs:
        assert script_runs.stdout.readline() == "calling\n"
        time.sleep(SECONDS)
        script_runs.send_signal(signal.SIGINT)
        printed, errors = script_runs.communicate(timeout=120)
    assert script_runs.returncode == -signal.SIGINT
    assert printed == ""
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_handler_that_returns_changes_nothing(alarm):
    """It runs in the middle of the call, and may call the library itself."""
    call, want = attention_longer_than(3 * SECONDS)
    short = attention(1, num_heads=3, topk=10)
    short_want = short()
    seen = []
    alarm(lambda *_: seen.append((time.monotonic(), short())))
    got = call()
    end = time.monotonic()
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)
    [(when, short_got)] = seen
    for x, y in zip(short_got, short_want, strict=True):
        assert_same_bits(x, y)
    assert when < end


def test_the_next_call_is_a_new_one(alarm):
    call, short = attention(2000), attention(1, num_heads=3, topk=10)
    want = short()
    alarm()
    with pytest.raises(Alarm):
        call()
    for x, y in zip(short(), want, strict=True):
        assert_same_bits(x, y)


def test_calls_of_other_threads_go_on(alarm):
    """The main thread gets the signal, and another thread's call is finished."""
    call = attention(400)
    want = call()
    results = []
    thread = threading.Thread(target=lambda: results.extend(call()))
    thread.start()
    alarm()
    with pytest.raises(Alarm):
        attention(2000)()
    thread.join()
    for x, y in zip(results, want, strict=True):
        assert_same_bits(x, y)
