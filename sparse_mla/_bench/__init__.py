"""`python -m sparse_mla bench`: the benchmark tables. Recorded results are in benchmarks/RESULTS.md
of the source tree.

`run.py` holds the options, `timing.py` measures on the host and prints. The CPU's tables are in
`attention.py` (compared with the PyTorch operators of `composition.py`), `memory.py` and
`calls.py`. The CUDA tables are in `cuda_attention.py` (flat inputs) and `cuda_sent.py` (inputs as
engines send them), both compared with FlashMLA (`peer.py`), and in `cuda_memory.py` and
`cuda_calls.py`. They share the two timing methods of `cuda_timing.py`, the inputs of
`cuda_inputs.py` and `cuda_kinds.py`, and the reference of `cuda_judge.py`; `cuda_sides.py` puts
these together. `summary.py` sets the slowest input beside the flat one. `plot.py` draws time
against floor, and inputs against flat ones. PyTorch gives the CUDA tables their memory, events and
graphs.
"""
