"""torchrun whose processes are forks of it, which need not import torch: see forked.py."""

import forked
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

if __name__ == "__main__":
    forked.fork_from_here()
    subprocess_handler.Popen = forked.Python
    run.main()
