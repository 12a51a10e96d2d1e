"""A store of each kind: SQLite in a folder of the test, and a real Postgres that is started once."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

SCHEMAS = count()


def missing(service: str) -> None:
    """Skip, or fail where continuous integration demands that every service ran."""
    message = f"{service} is not installed here"
    if os.environ.get("RIDGELINE_REQUIRE_SERVICES") == "1":
        pytest.fail(message)
    pytest.skip(message)


def binaries() -> Path | None:
    """The folder of Postgres' programs."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders and (folders[-1] / "pg_ctl").exists() else None


def run_as_user(command: list[str]) -> None:
    """Postgres refuses to run as root: then its own user runs it."""
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
    subprocess.run(command, check=True, capture_output=True, timeout=1800, cwd="/")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server of our own."""
    folder = binaries()
    try:
        import psycopg  # noqa: F401
    except ImportError:
        folder = None
    if folder is None:
        missing("Postgres (with psycopg)")
        return
    home = Path(tempfile.mkdtemp(prefix="ridgeline-pg-", dir="/tmp"))  # a folder that another user may enter
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(home, user.pw_uid, user.pw_gid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = home / "secret"
    secret.write_text("s3cret-word\n")
    secret.chmod(0o644)
    run_as_user([str(folder / "initdb"), "-D", str(home / "data"), "-U", "tester", f"--pwfile={secret}",
                 "--auth=scram-sha-256", "--no-sync"])  # fmt: skip
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {home} -c fsync=off"
    server = [str(folder / "pg_ctl"), "-D", str(home / "data"), "-w"]
    run_as_user([*server, "-o", options, "-l", str(home / "log"), "start"])
    try:
        yield f"postgresql://tester:s3cret-word@127.0.0.1:{port}/postgres"
    finally:
        run_as_user([*server, "-m", "immediate", "stop"])
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    import psycopg

    server, schema = request.getfixturevalue("postgres"), f"test_{next(SCHEMAS)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]
    return f"{server}?options=-csearch_path%3D{schema}"
