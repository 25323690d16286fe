"""A disk of any size, for the tests that fill one: a tmpfs of its own, where the tests may mount one."""

import subprocess
from pathlib import Path


class SmallDisk:
    """A mounted tmpfs that can grow, shrink and become read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def mount(self, kib: int) -> bool:
        """False where that is not permitted."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(self.path)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
