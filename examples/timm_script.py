"""Fused layers and a fused optimizer in timm's training script, reduced to the parts that meet them.

In timm's own ``train.py`` two lines do it: ``fusedtrain.fuse(model)`` after ``create_model(...)``, and
``fusedtrain.optim.register_with_timm()`` before the options are read; then ``--opt fusedtrainadamw`` is known. The
optimizer clips in its own pass: ``--opt-kwargs max_grad_norm=1.0`` in the place of ``--clip-grad``.
``torchrun --nproc_per_node=2`` of this file is DDP.
"""

import argparse
import os

import torch
from timm import create_model, utils
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fusedtrain
import fusedtrain.optim
from fusedtrain.train import load_digits


def main() -> None:
    fusedtrain.optim.register_with_timm()
    options = argparse.Namespace(
        opt="fusedtrainadamw", lr=3e-3, weight_decay=0.05, momentum=0.9, opt_kwargs={"max_grad_norm": 1.0}
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    utils.random_seed(0)
    digits, epochs = load_digits(32), 3
    train_set = TensorDataset(digits.train_images, digits.train_targets)
    sampler = DistributedSampler(train_set) if world > 1 else None
    train = DataLoader(train_set, 32 // world, shuffle=sampler is None, sampler=sampler, drop_last=True)
    model = create_model("mobilenetv3_small_050", num_classes=10, in_chans=1, drop_path_rate=0.05)
    fusedtrain.fuse(model)
    model = model.to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=options))
    averages = utils.ModelEmaV3(model, decay=0.95)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    schedule, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=1, warmup_lr=1e-4, updates_per_epoch=len(train)
    )
    mix, loss, updates = Mixup(mixup_alpha=0.1, num_classes=10, label_smoothing=0.0), SoftTargetCrossEntropy(), 0
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        wrapped.train()
        for images, targets in train:
            images, targets = mix(images.contiguous(memory_format=torch.channels_last), targets)
            loss(wrapped(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            averages.update(model, step=updates)
            schedule.step_update(num_updates=updates)
        schedule.step(epoch + 1)
    averages.module.eval()
    with torch.inference_mode():
        accuracy = (averages.module(digits.valid_images).argmax(1) == digits.valid_targets).float().mean()
        print("loss", nn.functional.cross_entropy(averages.module(digits.valid_images), digits.valid_targets).item())
    weights = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    print(f"accuracy {accuracy:.4f}  weights {weights.norm().item():.17g}", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
