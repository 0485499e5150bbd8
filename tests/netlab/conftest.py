"""Makes the lab's modules importable here and in the ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "kernels" / "schedule"):
    sys.path.insert(0, str(folder))
os.environ.setdefault("OMP_NUM_THREADS", "1")
