"""timm and torchvision, also beside a torch for CPUs alone, for which there is no build of torchvision."""

import sys

import torch


class Zoo:
    """timm and torchvision as attributes.

    Beside a CPU-only torch the import of torchvision fails for want of two operators, whose schemas are defined here.
    """

    _library = None

    def __init__(self):
        try:
            import torchvision
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            Zoo._library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                Zoo._library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import torchvision
        import timm

        self.timm, self.torchvision = timm, torchvision
