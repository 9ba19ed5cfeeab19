"""Compute backends: tensors in, tensors out.

Does no work at import and has no version attribute: transformers looks for one here
(tests/kernels/test_package.py).
"""
