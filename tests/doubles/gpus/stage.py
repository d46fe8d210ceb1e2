#!/usr/bin/env python3
"""Makes a test node look like one with eight RTX PRO 6000 and a terabyte of memory, to everything that reads it.

Runs on the node, as root, once for each boot; also what undoes it, as all of it lies in mounts and in /srv/gpus:

- PCI devices, the driver's /proc files and memory sizes are laid over the kernel's own;
- nvidia-smi answers from /srv/gpus/cards.json;
- /etc/cdi/nvidia.yaml gives a container /dev/zero in place of each card, by UUID;
- containers are started without resource limits, which a node that is a container itself may not raise.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

HOME = Path("/srv/gpus")
MEMORY_KIB = 1_480_000_000
CARDS = [
    {
        "pci.bus_id": f"00000000:{bus:02X}:00.0",
        "uuid": f"GPU-00000000-0000-0000-0000-0000000000{bus:02x}",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory.total": "97887",
        "mig.mode.current": "Disabled",
        "compute_cap": "12.0",
        "driver_version": "590.48.01",
    }
    for bus in (0x11, 0x12, 0x13, 0x14, 0x91, 0x92, 0x93, 0x94)
]
NVIDIA_SMI = """\
#!/usr/bin/env python3
import json, sys
cards = json.load(open("/srv/gpus/cards.json"))
arguments = sys.argv[1:]
if arguments == ["topo", "-m"]:
    names = [f"GPU{number}" for number in range(len(cards))]
    print("\\t" + "\\t".join(names) + "\\tCPU Affinity\\tNUMA Affinity\\tGPU NUMA ID")
    for row in range(len(cards)):
        links = ["X" if row == column else "NODE" for column in range(len(cards))]
        print("\\t".join([names[row], *links, "0-1", "0", "N/A"]))
elif arguments and arguments[0].startswith("--query-gpu="):
    for card in cards:
        print(", ".join(card.get(name, "[N/A]") for name in arguments[0].partition("=")[2].split(",")))
elif arguments and arguments[0].startswith("--query-compute-apps="):
    pass
else:
    sys.exit(f"the double does not know {arguments}")
"""
RUNTIME = """\
#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
arguments = sys.argv[1:]
given = dict(zip(arguments, arguments[1:]))
if "create" in arguments:
    file = Path(given.get("--bundle") or given.get("-b") or ".") / "config.json"
elif "exec" in arguments:
    file = Path(given.get("--process") or given["-p"])
else:
    file = None
if file:
    config = json.loads(file.read_text())
    config.get("process", config).pop("rlimits", None)
    file.write_text(json.dumps(config))
os.execv("/usr/bin/crun", ["crun", *arguments])
"""


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def lay_over(target: str, source: Path) -> None:
    """Show a file or folder of ours in place of the kernel's, unless it is there already."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    if target not in mounts:
        subprocess.run(["mount", "--bind", str(source), target], check=True)


def meminfo(text: str, name: str = "MemTotal") -> str:
    return "".join(
        f"{line.split(name)[0]}{name}:       {MEMORY_KIB} kB\n" if f"{name}:" in line else f"{line}\n"
        for line in text.splitlines()
    )


def main() -> None:
    HOME.mkdir(exist_ok=True)
    write(HOME / "cards.json", json.dumps(CARDS))
    devices, driver = HOME / "pci", HOME / "proc-driver"
    for number, card in enumerate(CARDS):
        address = card["pci.bus_id"][4:].lower()
        for name, value in {"vendor": "0x10de", "class": "0x030200", "device": "0x2bb5", "numa_node": "0"}.items():
            write(devices / address / name, f"{value}\n")
        information = f"Model: \t\t {card['name']}\nGPU UUID: \t {card['uuid']}\nDevice Minor: \t {number}\n"
        write(driver / "nvidia/gpus" / address / "information", information)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (builder@host)\n"
    write(driver / "nvidia/version", version)
    node = Path("/sys/devices/system/node/node0/meminfo")
    if node.exists():
        write(HOME / "node0-meminfo", meminfo(node.read_text()))
        lay_over(str(node), HOME / "node0-meminfo")
    write(HOME / "meminfo", meminfo(Path("/proc/meminfo").read_text()))
    lay_over("/proc/meminfo", HOME / "meminfo")
    lay_over("/sys/bus/pci/devices", devices)
    lay_over("/proc/driver", driver)
    write(Path("/usr/local/bin/nvidia-smi"), NVIDIA_SMI, 0o755)
    specification = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": card["uuid"],
                "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{number}", "hostPath": "/dev/zero"}]},
            }
            for number, card in enumerate(CARDS)
        ],
    }
    write(Path("/etc/cdi/nvidia.yaml"), json.dumps(specification))
    write(HOME / "crun-without-limits", RUNTIME, 0o755)
    settings = (
        "[containers]\ndefault_sysctls = []\n"
        f'[engine]\nruntime = "test"\n[engine.runtimes]\ntest = ["{HOME}/crun-without-limits"]\n'
    )
    write(Path("/etc/containers/containers.conf.d/test.conf"), settings)


if __name__ == "__main__":
    main()
