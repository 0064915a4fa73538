"""Optional modules for frameworks; none is imported by sparse_mla itself."""
