"""Triton kernels that read the stored layouts directly. Importing a module here imports triton."""
