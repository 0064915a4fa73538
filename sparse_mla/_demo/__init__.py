"""`python -m sparse_mla demo`: a small inference engine around one layer of sparse MLA.

Read in this order: `engine.py` (how the library is called), `scheduler.py` (requests, pages,
batches), `model.py` (the toy layer that gives the numbers meaning), `memory.py` (where the arrays
are), `check.py` (how the run is judged), `dense.py` and `v4.py` (what a layer of dense MLA and one
of DeepSeek V4 change; `v4_model.py` has the latter's toy), `layers.py` (the table of all layers),
`run.py` (options and the printed table).
"""
