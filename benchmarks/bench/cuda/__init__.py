"""CUDA: tables that are measured on a GPU, with PyTorch."""
