"""Steps recorded as CUDA graphs, or compiled by torch."""
