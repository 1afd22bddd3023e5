"""What a running training uses: GPUs, CPU, memory, page faults, disks and network, live or per stage of a step."""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

from fusedtrain._extras import need

MIB = 2**20


class MonitorError(ValueError):
    """The process or run cannot be watched; one line that says why."""


class Sampler:
    """Reads what a process, its children and the machine used since the last reading.

    Args:
        pid: of the process; its children at any depth are watched with it.

    Raises:
        MonitorError: there is no such process.
        ModuleNotFoundError: psutil is missing.

    Cost: about a millisecond of the caller's CPU per process and reading; nothing in the process that is watched.
    """

    def __init__(self, pid: int):
        self._psutil = need("psutil", "data")
        try:
            self.process = self._psutil.Process(pid)
        except self._psutil.NoSuchProcess:
            raise MonitorError(f"there is no process {pid}") from None
        self._gpus = Gpus()
        self._last: dict[int, tuple[float, dict[str, float]]] = {}
        self._last_machine: tuple[float, dict[str, float]] | None = None
        self.sample()  # rates need a first reading

    def running(self) -> bool:
        """Returns whether the process is still there."""
        try:
            return self.process.is_running() and self.process.status() != self._psutil.STATUS_ZOMBIE
        except self._psutil.NoSuchProcess:  # it has ended between the two
            return False

    def sample(self) -> dict:
        """Returns nested dicts of numbers; None where the system does not tell.

        ``processes``: pid, name, cpu (cores in use), threads, rss (bytes), minor_faults, major_faults, read, written
        (all per second). ``machine``: cpu (cores in use), cores, memory_used, memory (bytes), and bytes per second of
        disk_read, disk_written, net_received, net_sent. ``gpus``: index, name, utilization (0 to 1), memory_used,
        memory (bytes), power (W), clock (MHz), temperature (degrees Celsius); ``gpu_note`` says why there are none.
        """
        processes = [found for found in map(self._read_process, self._tree()) if found is not None]
        self._last = {process["pid"]: self._last[process["pid"]] for process in processes}
        gpus, note = self._gpus.read()
        return {
            "time": time.time(),
            "processes": processes,
            "machine": self._read_machine(),
            "gpus": gpus,
            "gpu_note": note,
        }

    def _tree(self) -> list:
        try:
            return [self.process, *self.process.children(recursive=True)]
        except self._psutil.NoSuchProcess:
            return []

    def _read_process(self, process) -> dict | None:
        try:
            with process.oneshot():
                cpu, memory = process.cpu_times(), process.memory_info()
                found = {
                    "pid": process.pid,
                    "name": process.name(),
                    "threads": process.num_threads(),
                    "rss": memory.rss,
                }
                totals = {"cpu": cpu.user + cpu.system, **_faults(process.pid)}
            try:
                io = process.io_counters()
                totals |= {"read": io.read_bytes, "written": io.write_bytes}
            except (self._psutil.AccessDenied, AttributeError):
                totals |= {"read": None, "written": None}
        except (self._psutil.NoSuchProcess, self._psutil.AccessDenied):
            return None
        rates, self._last[process.pid] = _rates(self._last.get(process.pid), totals)
        return found | rates

    def _read_machine(self) -> dict:
        psutil = self._psutil
        cpu, memory = psutil.cpu_times(), psutil.virtual_memory()
        disk, net = psutil.disk_io_counters(), psutil.net_io_counters()
        totals = {
            "cpu": sum(cpu[:3]) + getattr(cpu, "steal", 0.0),  # user, nice, system
            "disk_read": disk and disk.read_bytes,
            "disk_written": disk and disk.write_bytes,
            "net_received": net and net.bytes_recv,
            "net_sent": net and net.bytes_sent,
        }
        rates, self._last_machine = _rates(self._last_machine, totals)
        return {
            "cores": os.cpu_count(),
            "memory": memory.total,
            "memory_used": memory.total - memory.available,
            **rates,
        }


def _rates(last, totals: dict) -> tuple[dict, tuple[float, dict]]:
    """Returns what grew per second since the last reading, and this reading."""
    now = time.monotonic()
    before, old = last or (now, totals)
    seconds = max(now - before, 1e-9)
    rates = {n: None if None in (t, old.get(n)) else max(t - old[n], 0) / seconds for n, t in totals.items()}
    return rates, (now, totals)


def _faults(pid: int) -> dict:
    """Returns the page faults of a process so far; a minor one costs a page of memory, a major one a disk access."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return {"minor_faults": int(fields[7]), "major_faults": int(fields[9])}
    except (OSError, IndexError, ValueError):
        return {"minor_faults": None, "major_faults": None}


class Gpus:
    """Reads all GPUs through NVIDIA's management library, where its package (nvidia-ml-py) is installed."""

    def __init__(self):
        self._nvml, self._note = None, None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ModuleNotFoundError:
            self._note = "no GPU values: pip install nvidia-ml-py"
        except Exception as error:  # no driver: the library has a class of its own for it
            self._note = f"no GPU values: {error}"

    def read(self) -> tuple[list[dict], str | None]:
        """Returns one dict per GPU, and why there are none."""
        if self._nvml is None:
            return [], self._note
        count = self._ask(self._nvml.nvmlDeviceGetCount) or 0
        # The driver counts GPUs too that belong to others, and that this process may not look at.
        found = [gpu for gpu in map(self._gpu, range(count)) if gpu is not None]
        return found, None if found else f"no GPU values: the driver shows none of {count}"

    def _gpu(self, index: int) -> dict | None:
        nvml = self._nvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        name = None if handle is None else self._ask(nvml.nvmlDeviceGetName, handle)
        if name is None:
            return None
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "index": index,
            "name": name.decode() if isinstance(name, bytes) else name,
            "utilization": None if rates is None else rates.gpu / 100,
            "memory_used": memory and memory.used,
            "memory": memory and memory.total,
            "power": None if milliwatts is None else milliwatts / 1000,
            "clock": self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "temperature": self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        }

    def _ask(self, function, *args):
        try:
            return function(*args)
        except self._nvml.NVMLError:  # this card does not have it
            return None


class StageUsage:
    """Sums up what this process uses in each stage of a step: call :meth:`enter` wherever one begins.

    It tells what the system counts for a process, of this one alone: workers of a loader are left out. Network and GPU
    have no such counters: one is counted per machine, the other over a sixth of a second or more, which is many stages.
    :class:`Sampler` reads both.

    Cost: 2 us per call, no thread; exact for stages of any length, since the counters are read where a stage ends.
    """

    def __init__(self):
        self._totals: dict[str, dict[str, float]] = {}
        self._stage, self._last = None, self._read()

    def enter(self, stage: str) -> None:
        """Ends the stage at hand and begins another."""
        now = self._read()
        if self._stage is not None:
            totals = self._totals.setdefault(self._stage, dict.fromkeys(now, 0.0))
            for name, value in now.items():
                totals[name] += value - self._last[name]
        self._stage, self._last = stage, now

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns stage -> seconds, rss_growth (bytes by which the process then grew beyond the most it ever held), cpu
        (cores in use), minor_faults and major_faults per second, blocks_read and blocks_written (of 512 bytes, from and
        to disks) per second; the stage at hand is not in it."""
        return {
            stage: {
                n: v if n in ("seconds", "rss_growth") else v / max(totals["seconds"], 1e-9) for n, v in totals.items()
            }
            for stage, totals in self._totals.items()
        }

    def take(self) -> dict[str, dict[str, float]]:
        """Returns the same, and begins anew."""
        found, self._totals = self.summary(), {}
        return found

    @staticmethod
    def _read() -> dict[str, float]:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": time.perf_counter(),
            "rss_growth": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "cpu": used.ru_utime + used.ru_stime,
            "minor_faults": used.ru_minflt,
            "major_faults": used.ru_majflt,
            "blocks_read": used.ru_inblock,
            "blocks_written": used.ru_oublock,
        }


class RunUsage:
    """What this process uses, for the log of its run.

    Attributes:
        stages: a :class:`StageUsage` that the loop tells where each stage begins.
    """

    def __init__(self):
        self.stages, self._sampler = StageUsage(), Sampler(os.getpid())

    def read(self) -> dict[str, float]:
        """Returns flat names and numbers since the last call: ``stage/forward/cpu``, and those of :func:`scalars`."""
        stages = self.stages.take().items()
        return {f"stage/{stage}/{name}": value for stage, found in stages for name, value in found.items()} | scalars(
            self._sampler.sample()
        )


def find(target: str) -> int:
    """Returns the process that is meant: by its number, or by the folder of a run in which it keeps a file open.

    Raises:
        MonitorError: no process has a file open below the folder or was started with it, or it is not a folder.
    """
    if target.isdecimal():
        return int(target)
    folder = Path(target)
    if not folder.is_dir():
        raise MonitorError(f"{target} is neither a process number nor the folder of a run")
    psutil, folder = need("psutil", "data"), folder.resolve()
    inside, holders, named = os.path.join(folder, ""), [], []
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if any(f.path.startswith(inside) and getattr(f, "mode", "w") != "r" for f in process.open_files()):
                holders.append(process)
            elif process.pid not in own and _names(process.cmdline(), process.cwd(), folder):
                named.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    found = holders or named
    if not found:
        raise MonitorError(f"no process has a file open in {target} or was started with it: is the run over?")
    return min(found, key=lambda process: process.create_time()).pid  # the workers inherit its files


def _names(arguments: list[str], cwd: str, folder: Path) -> bool:
    """Returns whether a command line, that of no monitor, names a folder."""
    values = [argument.rpartition("=")[2] for argument in arguments[1:]]
    return "monitor" not in values and any(
        os.path.realpath(os.path.join(cwd, value)) == str(folder) for value in values if value
    )


def line(sample: dict) -> str:
    """Returns a reading in one line."""
    total, machine = _sum(sample["processes"]), sample["machine"]
    parts = [
        time.strftime("%H:%M:%S", time.localtime(sample["time"])),
        f"{len(sample['processes'])} proc",
        f"cpu {_number(total['cpu'])}/{machine['cores']} cores",
        f"memory {_bytes(total['rss'])}",
        f"faults {_number(total['minor_faults'])}+{_number(total['major_faults'])}/s",
        f"disk {_bytes(machine['disk_read'])}/s in {_bytes(machine['disk_written'])}/s out",
        f"net {_bytes(machine['net_received'])}/s in {_bytes(machine['net_sent'])}/s out",
    ]
    return "  ".join(parts + [_gpu_text(gpu) for gpu in sample["gpus"]])


def scalars(sample: dict) -> dict[str, float]:
    """Returns a reading as flat names and numbers, for TensorBoard or the log of a run."""
    found = {f"process/{name}": value for name, value in _sum(sample["processes"]).items()}
    found |= {f"machine/{name}": value for name, value in sample["machine"].items()}
    for gpu in sample["gpus"]:
        found |= {f"gpu{gpu['index']}/{name}": v for name, v in gpu.items() if name not in ("index", "name")}
    return {name: value for name, value in found.items() if value is not None}


def _sum(processes: list[dict]) -> dict:
    names = ("cpu", "rss", "threads", "minor_faults", "major_faults", "read", "written")
    values = {name: [p[name] for p in processes if p[name] is not None] for name in names}
    return {name: sum(found) if found else None for name, found in values.items()}


def _gpu_text(gpu: dict) -> str:
    busy = "-" if gpu["utilization"] is None else f"{gpu['utilization']:.0%}"
    memory = f"{_bytes(gpu['memory_used'])} of {_bytes(gpu['memory'])}"
    return f"gpu{gpu['index']} {busy} {memory} {_number(gpu['power'])} W {_number(gpu['clock'])} MHz"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / MIB:.1f} MiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _table(sample: dict, target: str):
    """Returns a reading as a table of rich."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"{target}   {line(sample | {'gpus': []})}", box=box.SIMPLE, title_justify="left")
    for name in ("process", "cores", "memory", "faults/s", "read/s", "written/s", "threads"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for p in sorted(sample["processes"], key=lambda p: -p["cpu"]):
        faults = f"{_number(p['minor_faults'])}+{_number(p['major_faults'])}"
        cells = [_number(p["cpu"]), _bytes(p["rss"]), faults, _bytes(p["read"]), _bytes(p["written"])]
        table.add_row(f"{p['pid']} {p['name']}", *cells, str(p["threads"]))
    table.caption = "\n".join(map(_gpu_text, sample["gpus"])) or sample["gpu_note"]
    return table


def main(arguments: list[str]) -> int:
    """Runs ``fusedtrain monitor`` until the process ends, ``--count`` readings are made, or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="fusedtrain monitor", description="Show what a running training uses, until it ends."
    )
    parser.add_argument("target", metavar="PID|RUN", help="a process number, or the folder that a run writes to")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two readings (default: 1)")
    parser.add_argument("--count", type=int, help="end after so many readings")
    parser.add_argument("--json", action="store_true", help="print one JSON object per reading")
    parser.add_argument("--tensorboard", metavar="DIR", help="write the values there too")
    args = parser.parse_args(arguments)
    try:
        if not 0 < args.interval < threading.TIMEOUT_MAX or (args.count is not None and args.count < 1):
            raise MonitorError("--interval must be a positive number of seconds, and --count at least 1")
        return _watch(args)
    except (MonitorError, ModuleNotFoundError) as error:
        print(f"fusedtrain monitor: {error}", file=sys.stderr)
        return 2 if isinstance(error, MonitorError) else 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except OSError as error:  # such as a folder of --tensorboard that cannot be made
        print(f"fusedtrain monitor: {error}", file=sys.stderr)
        return 1


def _watch(args) -> int:
    sampler = Sampler(find(args.target))
    writer = None
    if args.tensorboard is not None:
        need("tensorboard", "train")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard)
    live = None
    if sys.stdout.isatty() and not args.json:
        live = need("rich.live", "train").Live(transient=False)
        live.start()
    elif not args.json:
        first = sampler.sample()
        name = next((process["name"] for process in first["processes"]), "it has ended")
        print(*filter(None, [f"watching {sampler.process.pid} ({name})", first["gpu_note"]]), sep="; ", flush=True)
    try:
        count = 0
        while args.count is None or count < args.count:
            time.sleep(args.interval)
            if not sampler.running():
                break
            sample, count = sampler.sample(), count + 1
            if live is not None:
                live.update(_table(sample, args.target), refresh=True)
            else:
                print(json.dumps(sample) if args.json else line(sample), flush=True)
            for name, value in scalars(sample).items() if writer is not None else ():
                writer.add_scalar(name, value, count, sample["time"])
    finally:
        if live is not None:
            live.stop()
        if writer is not None:
            writer.close()
    return 0
