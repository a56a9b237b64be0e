"""A training script that ends when a file tells it how: `finish` well; `fail`, `exit` or `kill` badly."""

import os
import signal
import sys
import time
from pathlib import Path

run = Path(os.environ["ELASTIC_RUN_DIR"])
while not (run / "finish").exists():
    if (run / "fail").exists():
        raise ValueError("bad label 7")
    if (run / "exit").exists():
        sys.exit(3)
    if (run / "kill").exists() and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
