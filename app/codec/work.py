"""Runs the codec table in a process of its own, because it needs torch."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from costlab.app.text import plain
from costlab.probes.child import ask, last_words
from costlab.probes.codec_spec import CodecRequest, CodecResult
from costlab.probes.spec import SpecError

MODULE = "costlab.probes.codec_table"


class CodecProblem(Exception):
    """The table could not be made; the message says why. `bad_input` when the file is to blame."""

    def __init__(self, message: str, *, bad_input: bool) -> None:
        super().__init__(message)
        self.bad_input = bad_input


def measure(request: CodecRequest) -> CodecResult:
    """The table. Raises CodecProblem, and SpecError for what this machine hasn't; the process ends on any way out."""
    with tempfile.TemporaryDirectory(prefix="costlab-codec-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-P", "-m", MODULE, str(asked), str(answered)]
        done = ask(command)
        if done.returncode or not answered.is_file():
            raise CodecProblem(plain(last_words(done), 300), bad_input=False)
        result = msgspec.json.decode(answered.read_bytes(), type=CodecResult)
    if result.error and result.usage:
        raise SpecError(plain(result.error, 400))
    if result.error:
        raise CodecProblem(plain(result.error, 400), bad_input=True)
    return result
