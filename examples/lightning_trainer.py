"""Fused layers and a fused optimizer in a LightningModule; under ``torchrun --nproc_per_node=2`` trained with DDP.

The optimizer clips the gradients in its own pass, so Lightning's ``gradient_clip_val`` stays unset.
"""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain import optim
from fusedtrain.train import SmallNet, load_digits


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = SmallNet(num_classes=10, layers="stock")  # any model of timm or torchvision
        fusedtrain.fuse(self.model)

    def training_step(self, batch, index):
        images, targets = batch
        return nn.functional.cross_entropy(self.model(images), targets)

    def validation_step(self, batch, index):
        images, targets = batch
        right = (self.model(images).argmax(1) == targets).float().mean()
        self.log("accuracy", right, batch_size=len(targets), sync_dist=True)

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), lr=3e-3, max_grad_norm=1.0)


def main() -> None:
    lightning.seed_everything(0)
    digits, world = load_digits(16), int(os.environ.get("WORLD_SIZE", 1))
    train = DataLoader(TensorDataset(digits.train_images, digits.train_targets), 32, shuffle=True)
    valid = DataLoader(TensorDataset(digits.valid_images, digits.valid_targets), 256)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, train, valid)
    weights = torch.cat([p.detach().flatten().double() for p in module.parameters()])
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}  weights {weights.norm().item():.17g}", flush=True)


if __name__ == "__main__":
    main()
