"""`python -m sparse_mla bench`: the benchmark tables. Recorded results are in benchmarks/RESULTS.md
of the source tree.

`run.py` holds the options, `timing.py` measures on the host and prints, and every table has a file:
on the CPU `attention.py` (beside the PyTorch operators of `composition.py`), `memory.py` and
`calls.py`; on CUDA `cuda_attention.py` (beside FlashMLA, `peer.py`), `cuda_memory.py` and
`cuda_calls.py`, with `cuda_timing.py`, `cuda_inputs.py` and `cuda_judge.py` under them. `plot.py`
draws time against floor. PyTorch gives the CUDA tables their memory, events and graphs.
"""
