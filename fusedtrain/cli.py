"""The command ``fusedtrain``."""

import argparse
import gc
import os
import sys

import fusedtrain
from fusedtrain._extras import require

COMMANDS = {
    "train": "train --model NAME on --data DIR; alone: a small network on digits, fused beside stock layers",
    "check": "compare a few updates on N processes with one process: gradients, statistics, samples",
    "monitor": "show what a running training uses: GPU, CPU, memory, page faults, disk, network",
    "diagnose": "find out what makes a training script slow, and prove what makes it faster",
    "tune": "find batch size, workers, learning rate, options or backends by measurement",
    "verify-checkpoint": "read a checkpoint, or all of a folder, and say what is damaged",
    "info": "print versions, build, devices and which backends can run",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 2 for bad input, 1 for what else one line can tell, 141, as by
    SIGPIPE, where who reads the output, such as head, has left."""
    try:
        status = _main(argv)
        if sys.stdout is not None:  # started without one
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more at its end
        return 141


def _main(argv: list[str] | None) -> int:
    gc.freeze()  # what is imported stays: no pass of the garbage collector need look at it, nor the end of the process
    parser = argparse.ArgumentParser(
        prog="fusedtrain",
        description="Fused training ops for convolutional networks in PyTorch.",
        epilog="\n".join(f"  {name:<19}{text}" for name, text in COMMANDS.items())
        + "\n\nfusedtrain COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusedtrain {fusedtrain.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    commands = {
        "check": _check,
        "info": _info,
        "verify-checkpoint": _verify,
        "monitor": _monitor,
        "diagnose": _diagnose,
        "tune": _tune,
    }
    if args.command == "train":
        return _train(args.arguments, direct=argv is None)
    return commands[args.command](args.arguments)


def _info(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fusedtrain info", description=COMMANDS["info"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    fusedtrain.info(as_json=parser.parse_args(arguments).json)
    return 0


def _diagnose(arguments: list[str]) -> int:
    from fusedtrain.diagnose import command

    return command.main(arguments)


def _verify(arguments: list[str]) -> int:
    from fusedtrain.train.checkpoint import CheckpointError, verify

    name = "verify-checkpoint"
    parser = argparse.ArgumentParser(prog=f"fusedtrain {name}", description=COMMANDS[name])
    parser.add_argument("path", metavar="PATH", help="a file, or the folder of a run")
    path = parser.parse_args(arguments).path
    try:
        problems = verify(path)
    except CheckpointError as error:
        print(f"fusedtrain {name}: {error}", file=sys.stderr)
        return 2
    print("\n".join(problems) if problems else f"{path}: whole")
    return 1 if problems else 0


def _monitor(arguments: list[str]) -> int:
    from fusedtrain import monitor

    return monitor.main(arguments)


def _tune(arguments: list[str]) -> int:
    from fusedtrain.tune import command

    return command.main(arguments)


def _restart(device: str) -> None:
    """Starts this process once more with the allocator's settings in its environment, where the CPU will train.

    As it was started: with ``-m`` instead of its script, modules in the current folder would go before the installed.
    """
    from fusedtrain import _allocator
    from fusedtrain.train.config import resolve_device

    variables = _allocator.variables() if resolve_device(device).type == "cpu" else {}
    if variables:
        if sys.stdout is not None:  # started without one
            sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)


def _missing(error: ModuleNotFoundError, command: str) -> int:
    package = error.name.partition(".")[0]
    if package == "fusedtrain":
        raise error
    return _fail(f"needs the package {package}, which is not installed: pip install 'fusedtrain[train]'", 1, command)


def _check(arguments: list[str]) -> int:
    try:
        require("sklearn", "train")

        from fusedtrain.train import InputError, run
    except ModuleNotFoundError as error:
        return _missing(error, "check")
    parser = argparse.ArgumentParser(
        prog="fusedtrain check",
        usage="fusedtrain check [--ranks N] [--updates N] OPTIONS",
        description="Trains for a few updates on N processes (gloo, CPU, float64) and on one process with the"
        " batches of all, and tells what differs and why. The status is 1 when anything does.",
        epilog="OPTIONS are those of fusedtrain train --model NAME --help.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--updates", type=int, default=2, help="updates that are compared (default: 2)")
    own, rest = parser.parse_known_args(arguments)
    try:
        report = run.compare(run.parse(rest, "fusedtrain check"), own.ranks, own.updates)
    except InputError as error:
        return _fail(str(error), 2, "check")
    print(report)
    return 1 if report.differences else 0


def _train(arguments: list[str], direct: bool = False) -> int:
    try:
        for package in ("sklearn", "tyro"):
            require(package, "train")

        from fusedtrain.data import SampleError, WorkerError, faults
        from fusedtrain.train import CheckpointError, InputError, NonFiniteError, digits, options
    except ModuleNotFoundError as error:
        return _missing(error, "train")
    try:
        if any(word.partition("=")[0] in ("--model", "--data", "--config") for word in arguments):
            from fusedtrain.train import run

            chosen = run.parse(arguments)
            run.check(chosen)
            if direct:
                _restart(chosen.train.device)
            run.run(chosen)
        else:
            digits.run(options.parse_command(digits.Options, arguments, "fusedtrain train"))
    except InputError as error:
        return _fail(str(error), 2)
    except (CheckpointError, NonFiniteError, SampleError, WorkerError, OSError) as error:
        return _fail(str(error), 1)
    except RuntimeError as error:
        found = faults.worker_error(error)  # torch's handler of SIGCHLD raises wherever the run is
        if found is error:
            raise
        return _fail(str(found), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(message: str, status: int, command: str = "train") -> int:
    print(f"fusedtrain {command}: {message}", file=sys.stderr)
    return status
