"""Each case needs a process of its own that tells its memory."""

import sys

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]
