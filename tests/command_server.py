"""Runs command lines of ridgeline in forked children, on a pseudo-terminal or piped: nothing is imported twice.

Reads a JSON object a line (argv, cwd, columns, tty), answers with one (code, output).
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios


def main() -> None:
    import ridgeline.api
    import ridgeline.capture
    import ridgeline.cli.app
    import ridgeline.cli.draw  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        code, output = run(asked["argv"], asked["cwd"], asked["columns"], asked["tty"])
        print(json.dumps({"code": code, "output": output.decode(errors="replace")}), flush=True)


def run(argv: list[str], cwd: str, columns: int, tty: bool) -> tuple[int, bytes]:
    ours, theirs = pty.openpty() if tty else os.pipe()
    if tty:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = os.fork()
    if not child:
        code = 70
        try:
            os.close(ours)
            for stream in (1, 2):
                os.dup2(theirs, stream)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
            os.environ |= {"COLUMNS": str(columns), "TERM": "xterm-256color"}
            os.chdir(cwd)
            from ridgeline.cli.app import run as run_command

            code = run_command(argv)
            sys.stdout.flush()
        except BaseException:
            import traceback

            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(theirs)
    output = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last writer of a pseudo-terminal is gone
            break
        if not part:
            break
        output += part
    os.close(ours)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bytes(output)


if __name__ == "__main__":
    main()
