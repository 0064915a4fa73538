"""Steps of an engine, a file for each plan of csrc/step/plans/. `sparse_mla.backend` and
`sparse_mla.v4` have their public names."""
