"""A network trained with fused layers, then unfused, exported and quantised to int8 for inference on a CPU.

Fused layers are for training. ``unfuse`` gives the stock layers back with the trained weights, and from there torchao's
quantisation of exported programs knows every layer: weights and activations become int8, with the ranges that a few
batches of training images show. ``--compile`` lowers the result to oneDNN's int8 kernels through torch.compile.
"""

import argparse
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import _inductor as inductor
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

import fusedtrain
from fusedtrain import optim
from fusedtrain.train import Batches, SmallNet, TrainConfig, Trainer, load_digits


def quantize(model: nn.Module, batches: list[Tensor]) -> torch.export.ExportedProgram:
    """Returns an int8 program of a stock model; the batches, of one size each, show the ranges of the activations."""
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model.eval(), (batches[0],), dynamic_shapes=({0: batch},)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(program, quantizer)
    move_exported_model_to_eval(prepared)
    with torch.no_grad():
        for images in batches:
            prepared(images)
    return torch.export.export(convert_pt2e(prepared), (batches[0],), dynamic_shapes=({0: batch},))


def accuracy(model, images: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == targets).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="run on int8 kernels: compiles for a minute first")
    parser.add_argument("--output", type=Path, default=Path("int8.pt2"))
    args = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits(16)
    train = Batches(digits.train_images, digits.train_targets, 64, shuffle=True)
    model = SmallNet(num_classes=10, layers="fused")
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, TrainConfig(epochs=args.epochs, device="cpu")).fit(train)

    stock = deepcopy(model)
    fusedtrain.unfuse(stock)
    program = quantize(stock, [digits.train_images[i : i + 64] for i in range(0, 512, 64)])
    torch.export.save(program, args.output)  # torch.export.load(...).module() runs it; that needs torchao alone

    int8 = torch.export.load(args.output).module()
    if args.compile:
        inductor.config.freezing = True  # weights are packed once
        int8 = torch.compile(int8)
    images, targets = digits.valid_images, digits.valid_targets
    found = accuracy(model.eval(), images, targets), accuracy(int8, images, targets)
    layers = sum("quantize_per_tensor" in str(node.target) for node in program.graph.nodes)
    print(f"accuracy {found[0]:.4f}  int8 {found[1]:.4f}  quantized {layers}", flush=True)


if __name__ == "__main__":
    main()
