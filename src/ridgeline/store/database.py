"""A connection to SQLite or Postgres behind one handful of calls; every driver error becomes one line."""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ridgeline.errors import InputError, MissingExtra
from ridgeline.store.schema import MIGRATIONS, VERSION


class StoreError(InputError):
    """A store that cannot be opened, read or written."""


def user_folder() -> Path:
    """Where the platform keeps user data; ``RIDGELINE_HOME`` takes its place."""
    if "RIDGELINE_HOME" in os.environ:
        return Path(os.environ["RIDGELINE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "ridgeline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "ridgeline"
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "ridgeline"


def url_of(given: str | os.PathLike[str] | None = None) -> str:
    """The store that is meant: as given, else ``RIDGELINE_STORE``, else (or for ``default``) the user's own file."""
    found = os.fspath(given) if given else os.environ.get("RIDGELINE_STORE", "")
    return str(user_folder() / "store.db") if found in ("", "default") else found


def shown(url: str) -> str:
    """The address without its password, wherever it stands."""
    if not is_postgres(url):
        return url
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    query = re.sub(r"(?i)(password|passfile)=[^&]*", r"\1=***", parts.query)
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}{at}{host}", query=query))


def is_postgres(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


def opened(url: str) -> Database:
    """A connection; a SQLite file that does not exist is made."""
    if "://" in url and not is_postgres(url):
        raise StoreError(
            f"no store of the kind {url.partition('://')[0]!r}: give a file, or postgresql://user@host/database"
        )
    return Postgres(url) if is_postgres(url) else Sqlite(url)


class Database:
    """What both kinds share: statements with ``?``, transactions, the version of the schema and its migrations."""

    types: dict[str, str]
    begin: str

    def __init__(self, url: str) -> None:
        self.url, self.depth = url, 0

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement; the rows it returns, if any."""
        raise NotImplementedError

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for every row."""
        raise NotImplementedError

    def has_table(self, name: str) -> bool:
        raise NotImplementedError

    def lock(self) -> None:
        """Wait until nobody else changes the schema, within the transaction that is open."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside or none; a transaction inside another joins it."""
        if self.depth:
            yield
            return
        self.execute(self.begin)
        self.depth += 1
        try:
            yield
        except BaseException:
            with suppress(StoreError):  # of a connection that is gone, nothing stands to be taken back
                self.execute("ROLLBACK")
            raise
        else:
            self.execute("COMMIT")
        finally:
            self.depth -= 1

    def version(self) -> int:
        """Of the schema; 0 for a database without tables of ours."""
        if not self.has_table("schema_version"):
            return 0
        return int(self.execute("SELECT MAX(version) FROM schema_version")[0][0] or 0)

    def migrate(self, to: int = VERSION) -> tuple[int, int]:
        """Bring the schema up to date in one transaction; (version before, version after)."""
        with self.transaction():
            self.lock()
            before = self.version()
            self.refuse_newer(before)
            if not before:
                self.execute(f"CREATE TABLE schema_version (version {self.types['whole']} PRIMARY KEY)")
            for number in range(before, to):
                for statement in MIGRATIONS[number]:
                    self.execute(statement.format(**self.types))
                self.execute("INSERT INTO schema_version (version) VALUES (?)", (number + 1,))
        return before, max(before, to)

    def refuse_newer(self, version: int) -> None:
        if version > VERSION:
            raise StoreError(
                f"the store {shown(self.url)} has schema {version}, and this version of ridgeline knows {VERSION}: "
                "update ridgeline; nothing was changed"
            )

    def ready(self) -> None:
        """Make the tables of an empty database; refuse another version than ours."""
        version = self.version()
        self.refuse_newer(version)
        if not version:
            self.migrate()
        elif version < VERSION:
            raise StoreError(
                f"the store {shown(self.url)} has schema {version} of {VERSION}: run `ridgeline store migrate`"
            )


class Sqlite(Database):
    """One file in write-ahead mode: readers never wait, writers wait for each other."""

    types = {"real": "REAL", "whole": "INTEGER", "bytes": "BLOB"}
    begin = "BEGIN IMMEDIATE"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        path = Path(url).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may be switching the new file to write-ahead mode, for which SQLite does not wait.
            self.connection = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the store {path}: {error}") from error
        for attempt in range(200):
            try:
                self.connection.execute("PRAGMA foreign_keys = ON")
                if self.connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    self.connection.execute("PRAGMA journal_mode = WAL")
                self.connection.execute("PRAGMA synchronous = NORMAL")
                return
            except sqlite3.OperationalError as error:
                if "readonly" in str(error):
                    return  # reads still work
                if "locked" not in str(error) or attempt == 199:
                    raise self._failure(error) from error
                time.sleep(0.02)
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        text = str(error)
        advice = {
            "not a database": "; name another file",
            "readonly": "; name a store you may write",
            "locked": "; another process holds it",
            "full": "; free some space",
            "malformed": "; restore a copy, or export what can be read with `ridgeline store export`",
        }
        return StoreError(
            f"the store {self.url}: {text}{next((fix for word, fix in advice.items() if word in text), '')}"
        )

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self.connection.execute(sql, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        try:
            self.connection.executemany(sql, rows)
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def has_table(self, name: str) -> bool:
        return bool(self.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)))

    def lock(self) -> None:
        """BEGIN IMMEDIATE holds the file already."""

    def close(self) -> None:
        self.connection.close()


class Postgres(Database):
    """A database on a server, for many writers on many machines."""

    types = {"real": "DOUBLE PRECISION", "whole": "BIGINT", "bytes": "BYTEA"}
    begin = "BEGIN"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra("psycopg", "postgres", "a store in Postgres") from error
        self.driver = psycopg
        for attempt in range(3):
            try:
                self.connection = psycopg.connect(url, autocommit=True, connect_timeout=5)
                return
            except psycopg.Error as error:
                if attempt == 2 or not isinstance(error, psycopg.OperationalError):
                    raise StoreError(
                        f"cannot reach the store {shown(url)}: {self._reason(error)}; is the server running?"
                    ) from None  # the driver's own error may hold the password
                time.sleep(0.2 * (attempt + 1))

    def _reason(self, error: Exception) -> str:
        """The first line that the server or the driver says, without any password."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = lines[0] if lines else type(error).__name__
        hidden = [urlsplit(self.url).password or "", *re.findall(r"(?i)password=([^&\s]*)", self.url)]
        for word in hidden:
            text = text.replace(word, "***") if word else text
        return text.replace(self.url, shown(self.url))

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            cursor = self.connection.execute(sql.replace("?", "%s") if values else sql, values or None)
            return cursor.fetchall() if cursor.description else []
        except self.driver.Error as error:
            raise StoreError(f"the store {shown(self.url)}: {self._reason(error)}") from None

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        try:
            with self.connection.cursor() as cursor:
                cursor.executemany(sql.replace("?", "%s"), rows)
        except self.driver.Error as error:
            raise StoreError(f"the store {shown(self.url)}: {self._reason(error)}") from None

    def has_table(self, name: str) -> bool:
        return bool(
            self.execute(
                "SELECT 1 FROM information_schema.tables WHERE table_schema = current_schema() AND table_name = ?",
                (name,),
            )
        )

    def lock(self) -> None:
        self.execute("SELECT pg_advisory_xact_lock(1382311015)")

    def close(self) -> None:
        self.connection.close()
