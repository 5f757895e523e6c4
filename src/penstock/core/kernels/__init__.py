"""Compiled kernels (numba): whole batches of frames and blocks in one call, without the GIL.

Import these modules only where numba is known to be there: it is part of the extra `rl`. Nothing in
them allocates, raises or trusts a length.
"""
