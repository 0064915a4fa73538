"""The demo on the GPU, with the arrays of each framework that it can take."""

import gpu
import pytest
from helpers import printed_by_python
from test_commands import DENSE, SHORT
from test_demo_device import demo, demo_options

from sparse_mla._demo import memory


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        (["--heads", "32"], {"separate", "direct"}),  # the plan weighs a gather against its gain
        (["--heads", "32", "--path", "separate"], {"separate"}),
        (["--heads", "8"], {"mixed"}),
        (["--heads", "3", "--path", "direct", "--block-size", "17"], {"direct"}),
        (["--heads", "8", "--kv-cache-dtype", "bfloat16"], {"bf16"}),
    ],
)
def test_the_demo_is_within_the_bounds(options, paths):
    printed = printed_by_python("-m", "sparse_mla", "demo", "--device", "cuda", *SHORT, *options)
    assert printed.splitlines()[0].endswith(" · PyTorch arrays, cuda")
    assert paths & set(printed.split())
    assert "within the bounds" in printed
    assert "0 pages in use at the end" in printed


@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "bfloat16"])
def test_the_demo_of_a_dense_layer_is_within_the_bounds(kv_format):
    options = [*DENSE, "--device", "cuda", "--kv-format", kv_format]
    printed = printed_by_python("-m", "sparse_mla", "demo", *options)
    assert printed.splitlines()[0].endswith(" · PyTorch arrays, cuda")
    assert "within the bounds" in printed


@pytest.mark.parametrize("options", [[], ["--kv-format", "bfloat16"], ["--path", "separate"]])
def test_the_demo_of_a_v4_layer_is_within_the_bounds(options):
    options = ["--short", "--v4", "--device", "cuda", *options]
    printed = printed_by_python("-m", "sparse_mla", "demo", *options)
    assert printed.splitlines()[0].endswith(" · PyTorch arrays, cuda")
    assert "within the bounds" in printed


@pytest.mark.cupy
@pytest.mark.parametrize("layer", [[], ["--v4"]])
def test_the_demo_with_cupy_s_arrays(layer, cupy, monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_memory", lambda device: memory.Cupy(cupy))
    options = [*SHORT, *layer, "--device", "cuda", "--path", "separate"]
    assert demo.run(demo_options(*options)) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].endswith(" · CuPy arrays, cuda")
    assert "within the bounds" in printed
    assert ("0 differ" in printed) == (not layer)


def test_library_times_include_the_device_s_work():
    """The engine waits for the device before it reads the clock."""
    found = memory.find_memory("cuda")
    stream = gpu.torch.cuda.current_stream()
    gpu.delay()
    assert gpu.is_busy(stream)
    found.wait()
    assert not gpu.is_busy(stream)
