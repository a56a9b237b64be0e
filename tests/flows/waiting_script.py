"""A training script that ends when a file tells it how: `finish` well, `fail` with an exception."""

import os
import time
from pathlib import Path

run = Path(os.environ["ELASTIC_RUN_DIR"])
while not (run / "finish").exists():
    if (run / "fail").exists():
        raise ValueError("bad label 7")
    time.sleep(0.05)
