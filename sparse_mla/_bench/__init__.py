"""`python -m sparse_mla bench`: the benchmark tables. Recorded results are in benchmarks/RESULTS.md
of the source tree.

`run.py` holds the options, `timing.py` measures on the host and prints, and every table has a file:
on the CPU `attention.py` (beside the PyTorch operators of `composition.py`), `memory.py` and
`calls.py`; on CUDA `cuda_attention.py` has flat inputs and `cuda_sent.py` what engines send (both
beside FlashMLA, `peer.py`), `cuda_memory.py` and `cuda_calls.py` the rest. Under them
`cuda_timing.py` has the two methods, `cuda_inputs.py` and `cuda_kinds.py` the inputs,
`cuda_judge.py` their reference, and `cuda_sides.py` puts these together. `summary.py` sets the
slowest input beside the flat one; `plot.py` draws time against floor, and inputs against flat ones.
PyTorch gives the CUDA tables their memory, events and graphs.
"""
