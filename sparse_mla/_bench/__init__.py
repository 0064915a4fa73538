"""`python -m sparse_mla bench`: the benchmark tables. Recorded results are in benchmarks/RESULTS.md
of the source tree.

`run.py` holds the options, `timing.py` measures and prints, and every table has a file:
`attention.py` (beside the PyTorch operators of `composition.py`), `memory.py`, `calls.py`.
"""
