"""Fused layers and a fused optimizer in a loop of Accelerate; ``torchrun --nproc_per_node=2`` of this file is DDP.

The optimizer clips the gradients in its own pass, so ``accelerator.clip_grad_norm_`` is not called.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain import optim
from fusedtrain.train import SmallNet, load_digits


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    digits = load_digits(16)
    train = DataLoader(TensorDataset(digits.train_images, digits.train_targets), 16, shuffle=True)
    valid = DataLoader(TensorDataset(digits.valid_images, digits.valid_targets), 128)
    model = SmallNet(num_classes=10, layers="stock")  # any model of timm or torchvision
    fusedtrain.fuse(model)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    model, optimizer, train, valid, schedule = accelerator.prepare(model, optimizer, train, valid, schedule)
    for _ in range(3):
        model.train()
        for images, targets in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    model.eval()
    right = []
    with torch.inference_mode():
        for images, targets in valid:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == targets))
    weights = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    accuracy = torch.cat(right).float().mean()
    print(f"accuracy {accuracy:.4f}  weights {weights.norm().item():.17g}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
