"""Parquet files of typed rows: the columns of a table are the fields of its struct. Torch-free."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costlab.probes.records import SCHEMA_VERSION, Row

if TYPE_CHECKING:
    import pyarrow as pa


def _plain(annotation: Any) -> Any:
    """The Python type behind Annotated, Optional and Literal."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if origin is typing.Literal:
        return type(typing.get_args(annotation)[0])
    return annotation


@cache
def schema(row: type[Row]) -> pa.Schema:
    """Arrow schema of a row struct, with the costlab schema version in its metadata."""
    import pyarrow as pa

    arrow = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    hints = typing.get_type_hints(row, include_extras=True)
    fields = [pa.field(name, arrow[_plain(hints[name])]) for name in row.__struct_fields__]
    return pa.schema(
        fields, metadata={b"costlab.table": row.table.encode(), b"costlab.schema": str(SCHEMA_VERSION).encode()}
    )


def write_rows(directory: Path, row: type[Row], rows: Iterable[Row]) -> Path:
    """Write `<directory>/<table>.parquet` under a temporary name, fsync, rename; never leaves half a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = row.__struct_fields__
    data = list(rows)
    table = pa.table({n: [getattr(r, n) for r in data] for n in names}, schema=schema(row))
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"{row.table}.parquet"
    partial = final.with_suffix(".parquet.partial")
    with partial.open("wb") as sink:
        pq.write_table(table, sink, compression="zstd")
        sink.flush()
        os.fsync(sink.fileno())
    partial.replace(final)
    return final


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` atomically and durably."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
    partial.replace(path)
