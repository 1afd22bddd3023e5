"""The command ``fusedtrain``."""

import argparse
import sys

import fusedtrain

COMMANDS = {
    "train": "train a small network on handwritten digits, fused beside stock layers",
    "info": "print versions, build, devices and which backends can run",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 1 for a missing package, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="fusedtrain",
        description="Fused training ops for convolutional networks in PyTorch.",
        epilog="\n".join(f"  {name:<8}{text}" for name, text in COMMANDS.items())
        + "\n\nfusedtrain COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusedtrain {fusedtrain.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return {"train": _train, "info": _info}[args.command](args.arguments)


def _info(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fusedtrain info", description=COMMANDS["info"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    fusedtrain.info(as_json=parser.parse_args(arguments).json)
    return 0


def _train(arguments: list[str]) -> int:
    try:
        import sklearn  # noqa: F401
        import tyro

        from fusedtrain.train import digits
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        if package == "fusedtrain":
            raise
        return _fail(f"needs the package {package}, which is not installed: pip install 'fusedtrain[train]'", 1)
    try:
        digits.run(tyro.cli(digits.Options, args=arguments, prog="fusedtrain train"))
    except digits.InputError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"fusedtrain train: {message}", file=sys.stderr)
    return status
