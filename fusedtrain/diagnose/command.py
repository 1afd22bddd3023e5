"""The command ``fusedtrain diagnose``."""

import argparse
import io
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from fusedtrain import _files
from fusedtrain.diagnose.script import TERMINATED, ScriptError, Terminated, diagnose_script

DESCRIPTION = """Runs a training script, unchanged, for some steps; names what makes it slow and ranks remedies by the
gain they promise. The script's loop itself carries out the measurements and ends when they are done; what it writes by
then is written."""

FIRST = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun, the one that reports


def main(arguments: list[str]) -> int:
    """Runs the command and returns the exit status: 0, 1 where the script fails, 2 for bad input, 130 and 143 where
    Ctrl-C or SIGTERM ends it."""
    parser = argparse.ArgumentParser(prog="fusedtrain diagnose", description=DESCRIPTION)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="try each remedy in turns with the run as it is, keep what is surely faster, look again (minutes)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps to watch (default: 50 to 200, about 5 seconds)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the report")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with timeline and bars")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module, as for python -m")
    parser.add_argument("script", help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(arguments)
    if args.steps is not None and args.steps < 10:
        return _fail(f"steps must be at least 10, got {args.steps}", 2)
    if not args.module and not Path(args.script).is_file():
        return _fail(f"there is no file {args.script}", 2)
    if args.html is not None and not args.html.parent.is_dir():
        return _fail(f"there is no folder {args.html.parent}", 2)
    if args.html is not None:
        written = args.html if args.html.exists() else args.html.parent
        if args.html.is_dir() or not os.access(written, os.W_OK):
            return _fail(f"no page can be written to {args.html}", 2)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        report = _diagnose(args)
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        return _fail("needs the package rich, which is not installed: pip install 'fusedtrain[train]'", 1)
    except ScriptError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Terminated:
        return _fail(TERMINATED, 143)
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.html is not None and FIRST:
        from fusedtrain.diagnose.html import page

        try:
            args.html.write_text(page(report), encoding="utf-8")
        except OSError as error:
            return _fail(f"no page can be written to {args.html}: {error.strerror}", 1)
    if report["failure"] == TERMINATED:
        return _fail(TERMINATED, 143)
    return _fail(f"the script failed:\n{report['traceback']}", 1) if report["traceback"] else 0


def _terminate(*_) -> NoReturn:
    raise Terminated


def _diagnose(args: argparse.Namespace) -> dict:
    options = {"module": args.module, "steps": args.steps, "verify": args.verify}
    if args.json or not FIRST:
        report = diagnose_script(args.script, args.arguments, **options)
        if FIRST:
            print(_files.json_text(report, indent=1))
        return report
    from rich.console import Console

    from fusedtrain.diagnose.report import show

    with Console(stderr=True).status("starting") as status:
        report = diagnose_script(args.script, args.arguments, **options, stage=lambda text: status.update(text))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has its bars, and what the script's lines hold
    show(report)
    return report


def _fail(message: str, status: int) -> int:
    print(f"fusedtrain diagnose: {message}", file=sys.stderr)
    return status
