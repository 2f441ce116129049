"""Bad input is one line on stderr and exit status 2, in every command."""

import contextlib
import importlib
import os
import re
import signal
import sys
from pathlib import Path


class BadInput(Exception):
    """What the user gave cannot be used. One line: what is wrong, where, and what to do about it."""


class ModelError(ValueError):
    """A configuration that makes no sense, a file that is not a model, a fold without proof. One line."""


class BadFile(ModelError):
    """A model file that is missing, damaged, or not a model file at all."""


class AdaptersAlone(ModelError):
    """A checkpoint that holds adapters, without the network that they are for."""


def out_of_memory(e: Exception) -> bool:
    """Whether this is memory that could not be had, a CPU's or a GPU's."""
    return isinstance(e, MemoryError) or re.search(r"\ballocate\b|out of memory", str(e)) is not None


@contextlib.contextmanager
def one_line_errors(*also: type[Exception]):
    """Report expected failures (BadInput, ModelError, `also`, full memory, I/O) in one line, status 2."""
    with contextlib.suppress(AttributeError):  # stdout may be missing, or a notebook's own object
        sys.stdout.reconfigure(errors="backslashreplace")  # a character the terminal cannot show ends no run
    try:
        yield
    except (BadInput, ModelError, *also) as e:
        leave(str(e))
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        leave(f"not enough memory ({reason}); make the model or the batch smaller")
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT; the terminal has shown ^C already
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # 128 + SIGPIPE
    except OSError as e:  # a name too long, a folder that may not be searched: what no caller foresaw
        what = "reading or writing failed" if e.filename is None else f"cannot use {e.filename}"
        leave(f"{what}: {e.strerror or e}; name another path")


def needed(package: str, install: str = "-r requirements-export.txt", what: str = "this"):
    """The module of an optional package. what: that needs it. Raises: BadInput if it cannot be imported."""
    try:
        return importlib.import_module(package)
    except ImportError as e:
        missing = f"{what} needs {package}, which cannot be imported ({e})"
        raise BadInput(f"{missing}: pip install {install}") from None


def exit_on_signals():
    """From now on a signal to end raises SystemExit, so that what was begun is saved or put away first. Under
    nohup SIGHUP is ignored, and stays so."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and (name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN):
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def leave(message: str):
    """Print "program: message" on one line of stderr and exit with status 2."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
