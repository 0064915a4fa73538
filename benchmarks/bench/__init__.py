"""`python -m sparse_mla bench`: the benchmark tables. benchmarks/RESULTS.md has recorded results.

`run.py` holds the options. The CPU's tables are in `cpu/`; attention is compared with the PyTorch
operators of `common/composition.py`. The CUDA tables are in `cuda/`: `attention.py` (flat inputs)
and `sent.py` (inputs as engines send them), both compared with FlashMLA (`common/peer.py`),
`memory.py`, `calls.py` and others. They share the two timing methods of `timing.py`, the inputs of
`inputs.py` and `kinds.py`, and the reference of `judge.py`; `sides.py` puts these together. In
`common/`, `timing.py` measures on the host and prints, `summary.py` sets the slowest input beside
the flat one, and `plot.py` draws time against floor, and inputs against flat ones. PyTorch gives
the CUDA tables their memory, events and graphs.
"""
