"""Weights in and out: one set of names whatever wraps the model, and files of timm, torchvision and this package."""

import argparse
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from fusedtrain._files import write_tensors
from fusedtrain.train import checkpoint_file
from fusedtrain.train.checkpoint_file import CheckpointError

# What torch.compile, activation checkpointing and FSDP1 put into names; nobody calls a layer of their own like this.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# Under which keys training scripts keep the weights, in the order in which timm looks for them.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")


def canonical_keys(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``state`` under the names of the bare model: without ``_orig_mod.``, and without a ``module.`` in front
    of all names, as DistributedDataParallel puts it there.

    Raises:
        ValueError: two names become the same.
    """
    names = {name: [part for part in name.split(".") if part not in _WRAPPERS] for name in state}
    while names and all(parts[0] == "module" and len(parts) > 1 for parts in names.values()):
        names = {name: parts[1:] for name, parts in names.items()}
    result = {".".join(parts): state[name] for name, parts in names.items()}
    if len(result) != len(state):
        raise ValueError("two entries of the state have the same name without the names of the wrappers")
    return result


def load_canonical(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads weights under any wrapper's names into ``model``, wrapped or not.

    Raises:
        RuntimeError: as ``load_state_dict``: names are missing, unexpected, or shapes differ.
    """
    own = dict(zip(canonical_keys(model.state_dict()), model.state_dict()))
    model.load_state_dict({own.get(name, name): t for name, t in canonical_keys(state).items()})


def save_weights(path: Path, model: nn.Module) -> None:
    """Writes the model's state_dict, which ``torch.load(path, weights_only=True)`` reads on any machine.

    The keys are those of the bare model with stock layers, which loads it as it is.
    """
    state = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in canonical_keys(model.state_dict()).items()}
    write_tensors(path, state)


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Reads the weights of a .pt or .pth file of any training script, a .safetensors file, or a checkpoint of a run.

    Nothing in the file is executed. Averaged weights are taken where a file has both.

    Returns:
        Tensors on the CPU under canonical names.

    Raises:
        CheckpointError: the file is damaged or missing, or holds no weights; one line.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            start = file.read(35)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if start[8:] == checkpoint_file._HASH_START:
            state = _averaged(checkpoint_file.read(path).state)
        elif start[8:9] == b"{":
            state = _read_safetensors(path)
        else:
            # timm and others keep their options in a Namespace, which holds data only.
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: no file of weights that loads without executing code: {_reason(error)}"
        ) from error
    for key in _NESTED:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if isinstance(state, dict) and "n_averaged" in state:  # of torch's AveragedModel, beside names with "module."
        others = {name: t for name, t in state.items() if name != "n_averaged"}
        state = others if all(name.startswith("module.") for name in others) else state
    if not isinstance(state, dict) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{path}: holds no weights: expected tensors by name, or such under {', '.join(_NESTED)}")
    return canonical_keys(state)


def _reason(error: Exception) -> str:
    """Returns why a file was not read: of torch.load's text what follows the advice to let the file execute code."""
    text = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
    return text.partition("\n")[0].partition(". Please")[0]


def _averaged(state: dict) -> dict:
    """The state of a run with the averages of its weights in their place, where it has kept some."""
    model, averages = state.get("model"), state.get("averages")
    if not isinstance(model, dict) or not isinstance(averages, dict):
        return state
    if not averages:  # of a sharded run whose optimizer keeps them
        states = state["optimizer"]["state"]
        averages = {name: own["ema"] for name, own in states.items() if isinstance(own, dict) and "ema" in own}
    averages = {name: t.to(model[name].dtype) for name, t in canonical_keys(averages).items() if name in model}
    return {"model": model | averages}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise CheckpointError("another program's safetensors file needs the package: pip install safetensors") from None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(str(error)) from error


def nonfinite_names(model: nn.Module) -> list[str]:
    """Names of the buffers, such as masks, that hold infinity or NaN by design; to be asked before training."""
    names = canonical_keys(model.state_dict(keep_vars=True))
    return [
        name
        for name, t in names.items()
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not checkpoint_file.is_finite(t)
    ]
