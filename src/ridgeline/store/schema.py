"""The tables of the store and the migrations that lead to them; one text for SQLite and Postgres.

``{real}``, ``{whole}`` and ``{bytes}`` stand for the types of each. A migration is never edited once released: a change
of the schema is a new entry at the end. `docs/design/store.md` describes every table and column.
"""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE environment (hash TEXT PRIMARY KEY, facts TEXT NOT NULL)",
        "CREATE TABLE document (hash TEXT PRIMARY KEY, body {bytes} NOT NULL)",
        "CREATE TABLE run ("
        "id TEXT PRIMARY KEY, kind TEXT NOT NULL, measured {whole} NOT NULL, thing TEXT NOT NULL,"
        " subject TEXT NOT NULL, device TEXT NOT NULL, settings TEXT NOT NULL, subject_hash TEXT NOT NULL,"
        " at TEXT NOT NULL, version TEXT NOT NULL, git TEXT NOT NULL,"
        " environment TEXT NOT NULL REFERENCES environment (hash), document TEXT NOT NULL REFERENCES document (hash))",
        "CREATE INDEX run_thing ON run (thing, at)",
        "CREATE INDEX run_at ON run (at)",
        "CREATE TABLE metric ("
        "run TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE, name TEXT NOT NULL, value {real} NOT NULL,"
        " low {real}, high {real}, basis TEXT NOT NULL, PRIMARY KEY (run, name))",
        "CREATE TABLE artifact ("
        "run TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE, kind TEXT NOT NULL, path TEXT NOT NULL,"
        " num_bytes {whole} NOT NULL, hash TEXT NOT NULL, PRIMARY KEY (run, kind, path))",
        "CREATE TABLE tag (name TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE)",
    ),
    (
        "CREATE TABLE study ("
        "id TEXT PRIMARY KEY, name TEXT NOT NULL, spec TEXT NOT NULL, spec_hash TEXT NOT NULL, code TEXT NOT NULL,"
        " columns TEXT NOT NULL, num_chunks {whole} NOT NULL, num_points {whole} NOT NULL, state TEXT NOT NULL,"
        " at TEXT NOT NULL, version TEXT NOT NULL, git TEXT NOT NULL,"
        " environment TEXT NOT NULL REFERENCES environment (hash))",
        "CREATE INDEX study_name ON study (name, at)",
        "CREATE TABLE chunk ("
        "study TEXT NOT NULL REFERENCES study (id) ON DELETE CASCADE, number {whole} NOT NULL,"
        " num_points {whole} NOT NULL, hash TEXT NOT NULL, at TEXT NOT NULL, body {bytes} NOT NULL,"
        " PRIMARY KEY (study, number))",
    ),
)
VERSION = len(MIGRATIONS)
TABLES = ("environment", "document", "run", "metric", "artifact", "tag", "study", "chunk")
