"""One stored run: its manifest, its tables over all ranks, its events. Damage becomes a note, never a crash."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.app.store.liveness import effective_status
from costlab.app.store.manifest import newer, read_manifest, title_of
from costlab.app.text import plain
from costlab.probes.records import AnyEvent, Row, RunStatus, decode_event
from costlab.probes.tables import schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_RANK = re.compile(r"rank-(\d{5,})\Z")
EVENTS = "events.jsonl"
_LINE_LIMIT = 1 << 20  # bytes of one event line

MOST_RANKS = 1_000_000  # a damaged manifest may claim any number; each claimed rank is looked for


class Run:
    """A run directory opened for reading. Tables are read on demand and kept; `notes` grows as damage is met."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, notes = read_manifest(path)
        self.notes: list[str] = notes
        self.status: RunStatus = effective_status(self.manifest)
        self._tables: dict[tuple[str, tuple[int, ...] | None], pd.DataFrame] = {}
        self._check_ranks()

    @property
    def id(self) -> str:
        """The run's id."""
        return self.manifest.run_id

    @property
    def title(self) -> str:
        """One line that tells runs apart, not escaped."""
        return title_of(self.manifest)

    @cached_property
    def rank_directories(self) -> dict[int, Path]:
        """Rank -> directory, of the ranks that left one."""
        found = ((_RANK.match(p.name), p) for p in self.path.iterdir())
        return {int(m[1]): p for m, p in sorted(found, key=lambda f: f[1].name) if m and p.is_dir()}

    def note(self, text: str) -> None:
        """Record once that something is missing or damaged."""
        if text not in self.notes:
            self.notes.append(text)

    def _check_ranks(self) -> None:
        claimed = self.manifest.ranks
        if claimed > MOST_RANKS:
            self.note(f"the manifest claims {claimed:,} ranks, more than {MOST_RANKS:,}: it is damaged")
            return
        absent = sorted(set(range(claimed)) - set(self.rank_directories))
        if absent and self.status != "running":
            self.note(f"no tables from rank{'s' if len(absent) > 1 else ''} {_some(absent)} of {claimed}")

    def table(self, name: str, row: type[Row], ranks: Iterable[int] | None = None) -> pd.DataFrame:
        """All rows of table `name` over all ranks, or over `ranks`; empty where nothing is stored.

        Columns are the fields of `row`: one that a file lacks holds the field's default, one that is unknown is
        dropped. Absent strings are "" unless the field's default is None; other absent values are NaN.
        """
        wanted = None if ranks is None else tuple(ranks)
        key = (name, wanted)
        if key not in self._tables:
            self._tables[key] = self._read(name, row, wanted)
        return self._tables[key]

    def _read(self, name: str, row: type[Row], ranks: tuple[int, ...] | None) -> pd.DataFrame:
        import pyarrow as pa

        chosen = {r: d for r, d in self.rank_directories.items() if ranks is None or r in ranks}
        files = {r: d / f"{name}.parquet" for r, d in chosen.items()}
        present = {r: f for r, f in files.items() if f.is_file()}
        lacking = sorted(set(files) - set(present))
        if present and lacking:
            self.note(
                f"{name}: no table from rank {', '.join(map(str, lacking[:8]))}{' …' if len(lacking) > 8 else ''}"
            )
        read = [self._read_file(r, f, row) for r, f in present.items()]
        whole = pa.concat_tables([t for t in read if t is not None] or [schema(row).empty_table()])
        frame: pd.DataFrame = whole.to_pandas()
        for field in (f for f, default in _defaults(row).items() if default == ""):
            frame[field] = frame[field].fillna("")
        return frame

    def _read_file(self, rank: int, file: Path, row: type[Row]) -> pa.Table | None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(file) as parquet:
                version = (parquet.schema_arrow.metadata or {}).get(b"costlab.schema", b"0")
                for text in newer(int(version) if version.isdigit() else 0):
                    self.note(f"{file.stem}: {text}")
                table = parquet.read()
        except (OSError, pa.ArrowException) as error:
            self.note(f"{file.stem}: the table of rank {rank} cannot be read ({plain(error, 120)})")
            return None
        return self._fit(table, rank, file.stem, row)

    def _fit(self, table: pa.Table, rank: int, name: str, row: type[Row]) -> pa.Table | None:
        """The table with exactly the columns of `row`."""
        import pyarrow as pa

        columns, defaults = [], _defaults(row)
        for field in schema(row):
            if field.name not in table.column_names:
                if defaults[field.name] is msgspec.NODEFAULT:
                    self.note(f"{name}: the table of rank {rank} has no column '{field.name}' and is left out")
                    return None
                columns.append(pa.array([defaults[field.name]] * table.num_rows, field.type))
                continue
            try:
                columns.append(table.column(field.name).cast(field.type))
            except pa.ArrowException as error:
                self.note(f"{name}: column '{field.name}' of rank {rank} cannot be read ({plain(error, 120)})")
                columns.append(pa.nulls(table.num_rows, field.type))
        return pa.table(columns, schema=schema(row)).replace_schema_metadata(None)

    def events(self) -> Iterator[AnyEvent]:
        """The stored events in order; damaged lines are skipped, counted and noted at the end.

        The launcher merges the ranks' files into the run's; where it could not, the ranks' own are read.
        """
        merged = self.path / EVENTS
        files = [merged] if merged.is_file() else [d / EVENTS for d in self.rank_directories.values()]
        present = [f for f in files if f.is_file()]
        if not present:
            self.note(f"{EVENTS}: no events were stored")
        yield from heapq.merge(*map(self._events_of, present), key=lambda e: e.t)

    def _events_of(self, file: Path) -> Iterator[AnyEvent]:
        damaged, name = 0, file.relative_to(self.path)
        try:
            with file.open("rb") as lines:
                while line := lines.readline(_LINE_LIMIT):
                    if not line.strip():
                        continue
                    try:
                        yield decode_event(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        damaged += 1
        except OSError as error:
            self.note(f"{name} cannot be read ({error.strerror})")
        if damaged:
            self.note(f"{name}: {damaged} line{'s' if damaged > 1 else ''} could not be read")


def _defaults(row: type[Row]) -> dict[str, Any]:
    """Field -> default, msgspec.NODEFAULT for a required field."""
    return {f.name: f.default for f in msgspec.structs.fields(row)}


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
