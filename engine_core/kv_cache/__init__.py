"""The paged KV cache's bookkeeping: block ids, reference counts, digests. Imports no torch."""
