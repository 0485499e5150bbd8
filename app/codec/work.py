"""Runs the codec table in a process of its own, because it needs torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from costlab.app.text import plain
from costlab.probes.codec_spec import CodecRequest, CodecResult

MODULE = "costlab.probes.codec_table"


class CodecProblem(Exception):
    """The table could not be made; the message says why. `bad_input` when the file is to blame."""

    def __init__(self, message: str, *, bad_input: bool) -> None:
        super().__init__(message)
        self.bad_input = bad_input


def measure(request: CodecRequest) -> CodecResult:
    """The table. Raises CodecProblem; Ctrl-C ends the process too, which shares the terminal."""
    with tempfile.TemporaryDirectory(prefix="costlab-codec-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-P", "-m", MODULE, str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not answered.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise CodecProblem(plain(lines[-1] if lines else f"ended with {done.returncode}", 300), bad_input=False)
        result = msgspec.json.decode(answered.read_bytes(), type=CodecResult)
    if result.error:
        raise CodecProblem(plain(result.error, 400), bad_input=True)
    return result
