"""The command ``fusedtrain tune``."""

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from pathlib import Path

import torch

from fusedtrain import _files
from fusedtrain.train import run as training
from fusedtrain.train.errors import InputError
from fusedtrain.train.precision import PRECISIONS
from fusedtrain.tune.state import State
from fusedtrain.tune.target import LAYERS, Target, TuneError, load, program

TUNERS = {
    "batch-size": "the largest batch that fits, and the one that is fastest per sample",
    "loader": "how many workers and batches ahead a dataset needs on this machine",
    "lr": "a learning rate, by a range test",
    "search": "the best options in a space from a YAML file, with Optuna",
    "backend": "the fastest backend of each op of a model, kept for this machine",
}

OTHERS = """OPTIONS are those of fusedtrain train --model NAME --help: what changes a step of it counts here, such as
--ema-decay, --weight-decay, --accumulate, --freeze or --checkpoint-modules."""

SPACE = """SPACE.yaml, for instance:

  objective: train.py:objective     # objective(params, report) returns the value, the less the better;
                                    # report(step, value) on the way lets the pruner end it
  # command: python train.py --lr {lr} --width {width}    instead; it prints lines such as {"step": 3, "loss": 0.5}
  # metric: loss
  params:
    lr: {low: 1e-5, high: 1e-1, log: true}
    width: [64, 128, 256]
  direction: minimize               # or maximize
  sampler: tpe                      # random, grid, cmaes, qmc, gp, nsgaii
  pruner: median                    # percentile, hyperband, halving, none
  trials: 20
"""


def main(arguments: list[str]) -> int:
    """Runs one tuner and returns the exit status: 0, 1 for a missing package or a file that cannot be read or written,
    2 for bad input, 130 for Ctrl-C."""
    parser = _parser()
    args, args.others = parser.parse_known_args(arguments)
    if args.others and not hasattr(args, "config"):
        parser.error(f"unrecognized arguments: {' '.join(args.others)}")
    try:
        with _stdout_is_stderr():
            result = args.run(args)
    except (InputError, ValueError) as error:  # of the latter: TuneError
        return _fail(str(error), 2)
    except OSError as error:  # a folder that cannot be written to, a full disk
        return _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if not str(error).startswith("needs the package"):
            raise
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on from here", 130)
    print(_files.json_text(result) if args.json else args.show(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusedtrain tune",
        description="Find by measurement what to train with. Killed at any time, the same command goes on.",
    )
    commands = parser.add_subparsers(title="what to tune", required=True, metavar="WHAT")
    adders = {"batch-size": _batch_size, "loader": _loader, "lr": _lr, "search": _search, "backend": _backend}
    for name, text in TUNERS.items():
        # Without abbreviations: --mode is an option of training, and --model begins like that.
        command = commands.add_parser(name, help=text, description=f"Find {text}.", allow_abbrev=False)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        adders[name](command)
    return parser


@contextlib.contextmanager
def _stdout_is_stderr():
    """Lets what models, data and objectives print, here and in processes, go to stderr: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str, status: int) -> int:
    print(f"fusedtrain tune: {message}", file=sys.stderr)
    return status


def _add_target(command) -> None:
    command.usage, command.epilog = f"fusedtrain tune {command.prog.split()[-1]} [options] OPTIONS", OTHERS
    command.add_argument("--config", metavar="FILE", help="options.yaml of a run of fusedtrain train, to begin with")
    command.add_argument("--model", help="as for train, or FILE.py:FUNCTION (default: smallnet)")
    command.add_argument(
        "--image", metavar="CxHxW", help="size of an image (default: of --data or --config; 1x32x32, 3x224x224)"
    )
    command.add_argument("--classes", type=int, help="of the targets (default: of --data or --config; 10, 1000)")
    command.add_argument("--layers", choices=LAYERS, help="(default: fused)")
    command.add_argument("--optimizer", choices=training.OPTIMIZERS, help="(default: adamw)")
    command.add_argument("--precision", choices=PRECISIONS, help="(default: fp32)")
    command.add_argument("--device", help="auto, cpu, cuda or cuda:INDEX (default: auto)")
    _add_fresh(command)


def _add_fresh(command) -> None:
    command.add_argument("--fresh", action="store_true", help="measure again instead of going on")


def _options(args) -> training.Options:
    """Returns the options of training, but for those that a Target takes by itself."""
    words = ([] if args.config is None else ["--config", args.config]) + args.others
    options = training.parse(words) if words else training.Options()
    data = getattr(args, "data", None)
    return options if data is None else dataclasses.replace(options, data=data)


def _target(args, options: training.Options) -> Target:
    images = options.data != "digits"
    small = (args.model or options.model) in ("small", "smallnet") or args.config is not None
    side = options.size if images else min(options.size, 32)  # as training takes the digits
    text = args.image or (f"3x{side}x{side}" if images else f"1x{side}x{side}" if small else "3x224x224")
    try:
        image = tuple(int(side) for side in text.split("x"))
    except ValueError:
        image = ()
    if len(image) != 3:
        raise TuneError(f"--image must be CxHxW, 3x224x224 for instance, got {text!r}")
    classes = args.classes
    if classes is None:
        classes = len(_images(options.data, side).classes) if images else 10 if small else 1000
    return Target(args.model, image, classes, args.layers, args.optimizer, args.precision, args.device, options)


def _batch_size(command) -> None:
    _add_target(command)
    command.add_argument("--smallest", type=int, default=2, help="(default: 2)")
    command.add_argument("--largest", type=int, default=4096, help="(default: 4096)")
    command.add_argument("--steps", type=int, default=5, help="timed per size (default: 5)")
    command.add_argument("--memory", type=float, metavar="GIB", help="that it may use (default: 9/10 of what is free)")

    def run(args) -> dict:
        from fusedtrain.tune.batch_size import tune_batch_size

        if args.memory is not None and not 0 < args.memory < math.inf:
            raise TuneError(f"memory must be a positive, finite number of GiB, got {args.memory}")
        memory = None if args.memory is None else int(args.memory * 2**30)
        options = {"smallest": args.smallest, "largest": args.largest, "steps": args.steps, "memory": memory}
        return tune_batch_size(_target(args, _options(args)), **options, fresh=args.fresh, progress=_progress)

    def show(result: dict) -> str:
        return f"largest that fits: {result['largest']} ({result['limit']})\nfastest per sample: {result['fastest']}"

    command.set_defaults(run=run, show=show)


def _loader(command) -> None:
    command.add_argument(
        "--data", required=True, help="image folder, Parquet or Arrow files, or FILE.py:FUNCTION of a dataset"
    )
    command.add_argument("--size", type=int, default=224, help="of images from a folder (default: 224)")
    command.add_argument("--batch-size", type=int, default=64, help="(default: 64)")
    _add_fresh(command)

    def run(args) -> dict:
        from dataclasses import asdict

        from fusedtrain.data import SampleError, WorkerError, workers

        if args.batch_size < 1:
            raise TuneError(f"--batch-size must be at least 1, got {args.batch_size}")
        dataset = _dataset(args.data, args.size)
        fresh = args.fresh or _rewritten(args.data)
        try:
            return asdict(workers.plan(dataset, args.batch_size, remember=not fresh, progress=_progress))
        except (SampleError, WorkerError) as error:
            raise TuneError(f"{args.data}: {error}") from None

    def show(result: dict) -> str:
        ahead = f", prefetch_factor={result['prefetch_factor']}" if result["num_workers"] else ""
        return f"num_workers={result['num_workers']}{ahead}\n{result['reason']}"

    command.set_defaults(run=run, show=show)


def _dataset(name: str, size: int):
    from fusedtrain import data
    from fusedtrain.data.table import SUFFIXES

    if ".py:" in name:
        found = load(name)()
        if not hasattr(found, "__getitem__") and not hasattr(found, "__iter__"):
            raise TuneError(f"--data: {name} must return a dataset, got {type(found).__name__}")
        return found
    if not Path(name).exists() and "://" not in name and not any(mark in name for mark in "*?["):
        raise TuneError(f"--data: there is no {name}")
    if Path(name).is_dir() and not any(file.suffix in SUFFIXES for file in Path(name).iterdir()):
        return data.ImageFolder(_training_part(name), size=size)
    return data.TableDataset(name)


def _rewritten(name: str) -> bool:
    """Returns whether a dataset of FILE.py:FUNCTION has other code than when it was tuned last, and notes this one."""
    if ".py:" not in name:
        return False
    file, _, function = name.rpartition(":")
    with contextlib.suppress(OSError):  # nothing is remembered: what measures says so
        state, now = State("loader", {"data": f"{Path(file).resolve()}:{function}"}), program(Path(file))
        known = state.get("program") == now
        state.add("program", now)
        return not known
    return False


def _training_part(folder: str) -> Path:
    """Returns what of a folder of images ``fusedtrain train`` trains on."""
    from fusedtrain.data.folder import parts

    found = parts(folder) if Path(folder).is_dir() else None
    return Path(folder) if found is None else found[0]


def _lr(command) -> None:
    _add_target(command)
    command.add_argument("--data", help="image folder, as for train (default: the digits of scikit-learn)")
    command.add_argument("--batch-size", type=int, help="(default: that of --config, else 64)")
    command.add_argument("--lowest", type=float, default=1e-6, help="(default: 1e-6)")
    command.add_argument("--highest", type=float, default=1.0, help="(default: 1)")
    command.add_argument("--steps", type=int, default=100, help="(default: 100)")

    def run(args) -> dict:
        from fusedtrain.tune.lr import tune_lr

        options = _options(args)
        target, dataset, key = _target(args, options), None, None
        if options.data != "digits":
            if target.image[0] != 3 or target.image[1] != target.image[2]:
                raise TuneError(f"images of a folder become 3xNxN, --image is {target.image}")
            dataset = _images(options.data, target.image[1], _normalized)
            key = dataset.fingerprint()
            if len(dataset.classes) > target.classes:
                raise TuneError(f"{options.data} has {len(dataset.classes)} classes, --classes is {target.classes}")
        elif target.image[0] != 1 or target.image[1] != target.image[2]:
            raise TuneError(f"the digits have one channel and are square, --image is {target.image}: pass --data")
        numbers = {"lowest": args.lowest, "highest": args.highest, "steps": args.steps}
        numbers["batch_size"] = options.batch_size if args.batch_size is None else args.batch_size
        return tune_lr(target, dataset, **numbers, data_key=key, fresh=args.fresh, progress=_progress)

    def show(result: dict) -> str:
        end = "" if result["diverged_at"] is None else f", diverged at {result['diverged_at']:.1e}"
        return f"suggested lr: {result['suggested']:.2e}\nlowest loss at {result['lowest_loss_at']:.1e}{end}"

    command.set_defaults(run=run, show=show)


def _images(folder: str, size: int, transform=None):
    from fusedtrain import data

    if not Path(folder).is_dir():
        raise TuneError(f"--data: there is no folder {folder}")
    return data.ImageFolder(_training_part(folder), size=size, transform=transform)


def _normalized(image):
    """The image as training sees it, but for augmentation."""
    from fusedtrain.data.folder import to_tensor

    mean, std = (torch.tensor(part)[:, None, None] for part in (training.MEAN, training.STD))
    return (to_tensor(image).float().div_(255) - mean) / std


def _search(command) -> None:
    command.formatter_class, command.epilog = argparse.RawDescriptionHelpFormatter, SPACE
    command.add_argument(
        "space", metavar="SPACE.yaml", help="parameters, objective or command, sampler, pruner, trials"
    )
    command.add_argument("--storage", help="SQLite file of the trials (default: SPACE.db beside the space)")
    command.add_argument("--workers", type=int, default=1, help="trials at a time (default: 1)")
    command.add_argument("--trials", type=int, help="in all, instead of the space's number")

    def run(args) -> dict:
        from dataclasses import replace

        from fusedtrain.tune.search import read_space, search

        space = read_space(args.space)
        if args.trials is not None:
            space = replace(space, trials=args.trials)
        storage = args.storage or Path(args.space).with_suffix(".db")
        return search(space, storage, workers=args.workers, progress=_progress)

    def show(result: dict) -> str:
        best, counts = result["best"], {name: result[name] for name in ("complete", "pruned", "failed")}
        lines = [f"best: {best['value']:.6g} in trial {best['trial']}"]
        lines += [f"  {name}: {value}" for name, value in best["params"].items()]
        return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items())])

    command.set_defaults(run=run, show=show)


def _backend(command) -> None:
    _add_target(command)
    command.add_argument("--batch-size", type=int, help="(default: that of --config, else 32)")

    def run(args) -> dict:
        from fusedtrain.tune.backend import tune_backend

        options = _options(args)
        target, known = _target(args, options), 32 if args.config is None else options.batch_size
        if not target.options.fuse:
            raise TuneError("--layers stock has no fused ops to choose backends for")
        batch_size = known if args.batch_size is None else args.batch_size
        return tune_backend(target, batch_size=batch_size, fresh=args.fresh, progress=_progress)

    def show(result: dict) -> str:
        changed = sum(entry["backend"] is not None for entry in result["entries"])
        return f"{changed} of {len(result['entries'])} calls get another backend than before; table: {result['table']}"

    command.set_defaults(run=run, show=show)
