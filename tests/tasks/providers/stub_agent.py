"""An agent for provider tests: does what its arguments say, and says so in its log.

`--name NAME [--exit CODE] [--deaf] [--child]`: without --exit it lives until SIGTERM (75 then);
--deaf ignores SIGTERM; --child starts a child in a session of its own.
"""

import argparse
import os
import signal
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--name")
parser.add_argument("--exit", type=int)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--child", action="store_true")
options, rest = parser.parse_known_args()


def leave(number, frame):
    sys.exit(75)


signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else leave)
if options.child:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    sys.stdout.write(f"child {child.pid}\n")
sys.stdout.write(f"name {options.name} rest {rest} prefect {'PREFECT_API_KEY' in os.environ}\n")
sys.stdout.flush()
if options.exit is not None:
    sys.exit(options.exit)
while True:
    signal.pause()
