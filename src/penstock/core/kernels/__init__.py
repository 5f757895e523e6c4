"""Kernels compiled by numba (extra `rl`): none allocates, raises or trusts a length."""
