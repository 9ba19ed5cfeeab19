"""Set before torch is imported: small tensors gain nothing from a second thread, and lose much on a shared core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
