"""Turn a recorded run into a sample that ships: `python tests/benchmarks/pack_sample.py RUN NAME [FOLDER]`.

Tables, events and the manifest are kept; raw traces and logs, which hold paths, are not. A host name, a user name or an
absolute path anywhere inside is an error, and so is an archive of 3 MB or more.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import re
import socket
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq

LIMIT = 3_000_000
ROOT = Path(__file__).resolve().parent.parent.parent


def manifest_bytes(run: Path, name: str) -> bytes:
    """The manifest without process ids; the run is called after the sample."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    manifest |= {"pid": None, "pid_started": None, "run_id": name}
    return json.dumps(manifest, indent=1).encode()


def event_bytes(run: Path) -> bytes:
    """The event stream without the announcements of process ids and heartbeats."""
    lines = (run / "events.jsonl").read_bytes().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] not in ("hello", "heartbeat")]
    return b"\n".join(kept) + b"\n"


def private_words() -> re.Pattern[str]:
    """What must not be inside: this host's and user's names (where they are words of their own), absolute paths."""
    names = {socket.gethostname(), getpass.getuser()} - {"", "root", "localhost"}
    words = [rf"\b{re.escape(n)}\b" for n in names if len(n) > 2]
    return re.compile("|".join([*words, r"(?<![\w.:/])/(?:home|root|work|tmp|opt|usr|mnt|data)/"]))


def check(label: str, text: str) -> None:
    """Exit with the place of the first private word."""
    found = private_words().search(text)
    if found:
        sys.exit(f"{label} holds '{text[max(0, found.start() - 40) : found.end() + 60]}'")


def collect(run: Path, name: str) -> dict[str, bytes]:
    """Archive members by path."""
    members = {"manifest.json": manifest_bytes(run, name), "events.jsonl": event_bytes(run)}
    for label, data in members.items():
        check(label, data.decode())
    for path in sorted(run.glob("rank-*/*.parquet")):
        table = pq.read_table(path)
        check(path.name, table.to_pandas().to_csv())
        members[str(path.relative_to(run))] = path.read_bytes()
    return members


def pack(members: dict[str, bytes]) -> bytes:
    """A reproducible gzipped tar."""
    sink = io.BytesIO()
    with gzip.GzipFile(fileobj=sink, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for label, data in members.items():
            info = tarfile.TarInfo(label)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def main() -> None:
    """Write `<folder>/<name>.tar.gz`."""
    run, name = Path(sys.argv[1]), sys.argv[2]
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else ROOT / "sample_traces"
    data = pack(collect(run, name))
    if len(data) >= LIMIT:
        sys.exit(f"{name} takes {len(data):,} bytes, more than {LIMIT:,}; profile fewer steps")
    path = folder / f"{name}.tar.gz"
    path.write_bytes(data)
    print(f"{path.name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
