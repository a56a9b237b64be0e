"""An agent for provider tests: does what its arguments say, and says so in its log.

`--name NAME [--exit CODE] [--deaf] [--child] [--eat MIB] [--orphans N] [--say N]`: without --exit it
lives until SIGTERM (75 then); --deaf ignores SIGTERM; --child starts a child in a session of its own;
--eat takes memory; --orphans leaves processes that end without a parent; --say prints long lines.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--name")
parser.add_argument("--exit", type=int)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--child", action="store_true")
parser.add_argument("--eat", type=int, default=0)
parser.add_argument("--orphans", type=int, default=0)
parser.add_argument("--say", type=int, default=0)
options, rest = parser.parse_known_args()


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def leave(number, frame):
    say(f"sigterm {time.time()}")
    sys.exit(75)


signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else leave)
if options.child:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    say(f"child {child.pid}")
say(f"name {options.name} rest {rest} prefect {'PREFECT_API_KEY' in os.environ}")
shared = os.statvfs("/dev/shm")
say(f"uid {os.getuid()} shm {shared.f_blocks * shared.f_frsize}")
for _ in range(options.orphans):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.1)
        os._exit(0)
    os.wait()
if options.orphans:
    say("orphans left")
for number in range(options.say):
    say(f"line {number} " + "x" * 1000)
if options.say:
    say("said all")
eaten = bytearray(os.urandom(1 << 20) * options.eat)
if options.exit is not None:
    sys.exit(options.exit)
while True:
    signal.pause()
