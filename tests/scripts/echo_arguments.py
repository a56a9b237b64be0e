"""Write the arguments and the environment as JSON to the file that the first argument names."""

import json
import os
import sys
from pathlib import Path

content = {"argv": sys.argv, "env": dict(os.environ)}
Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(content))
