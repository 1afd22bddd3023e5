"""Fused layers and a fused optimizer in the Trainer of Hugging Face; ``torchrun --nproc_per_node=2`` makes it DDP.

The optimizer clips the gradients in its own pass, so the Trainer's ``max_grad_norm`` is 0.
"""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

import fusedtrain
from fusedtrain import optim
from fusedtrain.train import SmallNet, load_digits


class Images(Dataset):
    def __init__(self, images, targets):
        self.images, self.targets = images, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.targets[index]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = SmallNet(num_classes=10, layers="stock")  # any model of timm or torchvision
        fusedtrain.fuse(self.model)

    def forward(self, pixel_values, labels=None):
        logits = self.model(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main() -> None:
    set_seed(0)
    digits, model = load_digits(16), Classifier()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            max_grad_norm=0.0,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="gloo" if "RANK" in os.environ and not torch.cuda.is_available() else None,
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Images(digits.train_images, digits.train_targets),
            eval_dataset=Images(digits.valid_images, digits.valid_targets),
            optimizers=(optimizer, None),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
        trainer.accelerator.wait_for_everyone()
    weights = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    print(f"accuracy {accuracy:.4f}  weights {weights.norm().item():.17g}", flush=True)


if __name__ == "__main__":
    main()
