# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the NVIDIA driver says about the GPUs: the texts of /proc/driver/nvidia and of nvidia-smi.

Pure functions only: the module ``gpu_topology`` does the reading. The driver completes what sysfs tells and is
checked against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    GPU_MODELS,
    PCIE_LINKS,
    TopologyError,
    parse_cpu_list,
    pci_address,
    pci_addresses_in,
)

# The fields of one line of the query, in this order; parse_gpu_query reads them.
GPU_QUERY = "pci.bus_id,uuid,name,memory.total,mig.mode.current"

_UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NO_UUID = "GPU-00000000-0000-0000-0000-000000000000"
# Colours and underlines, also where the escape character was lost or written out on the way into a file.
_ANSI = re.compile(r"(?:\x1b|\^\[|\\x1b|\\033|\\e)?\[[0-9;]{0,20}[mK]")
_GPU_NAME = re.compile(r"GPU[0-9]{1,4}")
_DEVICE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,63}")
_LINK = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|SOC|N/A|NV[0-9]{1,3}")
_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_COLUMN = re.compile("|".join(name.replace(" ", r"\s+") for name in _COLUMNS))
_COPY_WHOLE = "copy the whole output of nvidia-smi topo -m"
_SHOWN = 4
# Text before the matrix may have lines that look like a header; no more than these are tried.
_HEADERS = 8
# A wrapped line was cut by a terminal's width, also within words, or between words; nothing tells which. The first is
# tried first, since a cut list may end like a whole one. At first every row must have a field for every column.
_READINGS = ((True, True), (False, True), (False, False), (True, False))


def parse_uuid(text: str) -> str:
    """Return a GPU's UUID, or an empty text when there is none.

    The driver writes question marks until the card was opened once, and zeros stand where a text was made anonymous.
    """
    uuid = text.strip()
    uuid = uuid[:4] + uuid[4:].lower()
    return uuid if _UUID.fullmatch(uuid) and uuid != _NO_UUID else ""


def parse_driver_version(text: str) -> dict[str, Any]:
    """Return ``{"version": str, "open": bool}`` from ``/proc/driver/nvidia/version``.

    :raises TopologyError: when there is no such line.
    """
    match = re.search(
        r"^NVRM version:(.*?)[ \t]([0-9]{2,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)(?:[ \t]|$)", text, re.MULTILINE
    )
    if match is None:
        raise TopologyError("no 'NVRM version: ...' line with a version in /proc/driver/nvidia/version")
    return {"version": match[2], "open": "Open Kernel Module" in match[1]}


def parse_gpu_information(text: str) -> dict[str, Any]:
    """Return what ``/proc/driver/nvidia/gpus/ADDRESS/information`` says.

    :returns: ``{"uuid": str, "model": str, "minor": int or None, "excluded": bool}``; empty texts when unknown.
    """
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    minor = fields.get("Device Minor", "")
    return {
        "uuid": parse_uuid(fields.get("GPU UUID", "")),
        "model": _known(fields.get("Model", "")),
        "minor": int(minor) if re.fullmatch("[0-9]{1,6}", minor) else None,
        # excluded by a parameter of the driver: there, and given to nobody
        "excluded": fields.get("GPU Excluded", "") == "Yes",
    }


def _known(text: str) -> str:
    """Return a field of the driver, or an empty text where it says that it does not know."""
    word = text.strip()
    return "" if not word or word[0] in "[?" or word in ("N/A", "ERR!", "Unknown", "Unknown Error") else word


def _mig_mode(text: str) -> bool | None:
    """Return whether MIG is on; a card that has no MIG says N/A, any other bracket is an unknown."""
    word = text.strip().strip("[]")
    return {"Enabled": True, "Disabled": False, "N/A": False, "Not Supported": False}.get(word)


def parse_gpu_query(text: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Read ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits`` with the fields of :data:`GPU_QUERY`.

    :returns: by PCI address, in the driver's order, ``{"uuid": str, "model": str, "memory_mib": int or None,
        "mig": bool or None, "state": str}``, where ``state`` is the driver's word for a card that cannot be used
        (lost, needs a reset) and empty otherwise; and the lines that are no card: what nvidia-smi complains of.
    """
    cards: dict[str, dict[str, Any]] = {}
    others = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        address = pci_address(fields[0])
        if not address or len(fields) < 5:
            others += [line.strip()[:300]] if line.strip() else []
            continue
        memory = re.fullmatch(r"([0-9]{1,9})(?: MiB)?", fields[-2])
        states = [
            field.strip("[]") for field in fields[1:] if re.search(r"requires reset|is lost", field, re.IGNORECASE)
        ]
        cards.setdefault(
            address,
            {
                "uuid": parse_uuid(fields[1]),
                "model": _known(", ".join(fields[2:-2])),
                "memory_mib": int(memory[1]) if memory else None,
                "mig": _mig_mode(fields[-1]),
                "state": states[0] if states else "",
            },
        )
    return cards, others


def complete_gpus(
    gpus: list[dict[str, Any]],
    known: dict[str, dict[str, Any]],
    cards: dict[str, dict[str, Any]],
    complaints: list[str],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add to the GPUs of the PCI bus what a loaded driver says about them.

    :param gpus: of sysfs, each with ``pci_address`` and ``device_id``.
    :param known: by address what :func:`parse_gpu_information` returned, with ``mig`` (True: it has MIG instances).
    :param cards: of :func:`parse_gpu_query`; empty when nvidia-smi did not answer.
    :param complaints: the other lines of nvidia-smi; a card that they name cannot be used.
    :returns: the GPUs, and a sentence for everything that is wrong. A card that cannot be used has no UUID.
    """
    blamed = {address for line in complaints for address in pci_addresses_in(line)}
    completed, warnings = [], []
    for gpu in gpus:
        address = gpu["pci_address"]
        proc, card = known.get(address), cards.get(address)
        problem = _card_problem(proc, card, bool(cards), address in blamed)
        proc, card = proc or {}, card or {}
        uuid = "" if problem else card.get("uuid") or proc.get("uuid") or ""
        if not uuid and not problem:
            problem = (
                "the driver gives no UUID for this card; run nvidia-smi -L on the node and look into the kernel's log"
            )
        elif uuid and proc.get("uuid") and proc["uuid"] != uuid:
            warnings.append(f"{address}: nvidia-smi gives the UUID {uuid} and /proc {proc['uuid']}; the first is taken")
        if problem:
            warnings.append(f"{address}: {problem}")
        completed.append(
            {
                **gpu,
                "uuid": uuid,
                "model": card.get("model") or proc.get("model") or gpu["model"],
                "memory_mib": card.get("memory_mib"),
                "mig": True if proc.get("mig") else card.get("mig"),
            }
        )
    for address in sorted((known.keys() | cards.keys()) - {gpu["pci_address"] for gpu in gpus}):
        warnings.append(
            f"{address}: the driver has this card and the PCI bus no longer shows it; it may have been removed"
        )
    return _without_shared_uuids(completed, warnings), warnings


def _card_problem(proc: dict[str, Any] | None, card: dict[str, Any] | None, answered: bool, blamed: bool) -> str:
    """Say why a card cannot be used, or return an empty text."""
    if card is not None and card["state"]:
        return f"nvidia-smi says '{card['state']}'; reset the card (nvidia-smi --gpu-reset) or restart the node"
    if proc is not None and proc["excluded"]:
        return "the driver excludes this card; take it out of the module parameter NVreg_ExcludedGpus"
    if card is None and blamed:
        return (
            "nvidia-smi cannot reach this card; it may have fallen off the bus, look into the kernel's log for Xid 79"
        )
    if card is None and proc is None:
        return (
            "the PCI bus shows this card and the driver does not have it; look at its binding and into the kernel's log"
        )
    if card is None and answered:
        return "the PCI bus shows this card and nvidia-smi does not list it; look into the kernel's log"
    return ""


def _without_shared_uuids(gpus: list[dict[str, Any]], warnings: list[str]) -> list[dict[str, Any]]:
    """Take away a UUID that two cards have, since it addresses neither."""
    holders: dict[str, list[str]] = {}
    for gpu in gpus:
        holders.setdefault(gpu["uuid"], []).append(gpu["pci_address"])
    shared = {uuid for uuid, addresses in holders.items() if uuid and len(addresses) > 1}
    warnings += [f"{', '.join(holders[uuid])}: these cards have the same UUID {uuid}" for uuid in sorted(shared)]
    return [{**gpu, "uuid": ""} if gpu["uuid"] in shared else gpu for gpu in gpus]


def without_driver(gpu: dict[str, Any]) -> dict[str, Any]:
    """Return a GPU of sysfs with every field that the driver would fill, as unknown."""
    return {**gpu, "uuid": "", "model": GPU_MODELS.get(gpu["device_id"], ""), "memory_mib": None, "mig": None}


def parse_topo_matrix(text: str) -> dict[str, Any]:
    """Read the matrix of ``nvidia-smi topo -m``, by the names in its header and never by position.

    Takes tabs and spaces, colours, rows wrapped by a terminal, NIC columns, text before and after, and headers
    without some of the affinity columns (which ones there are depends on the driver).

    :returns: ``{"gpus": ["GPU0"], "links": [["GPU0", "GPU1", "PIX"]], "cpus": {"GPU0": [int] or None}, "numa_nodes":
        {"GPU0": [int] or None}, "warnings": [sentence]}``; None is unknown. A link that is ``N/A`` is left out.
    :raises TopologyError: when there is no such matrix, or one that contradicts itself. A matrix that is not symmetric
        is refused: it was edited or cut, and nobody can tell which of the two fields is right.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if _is_header(line.split())]
    if not starts:
        raise TopologyError(f"no header line 'GPU0 GPU1 ... CPU Affinity' in the text; {_COPY_WHOLE}")
    failure: TopologyError | None = None
    for start in starts[:_HEADERS]:
        for cut_words, strict in _READINGS:
            try:
                return _read_matrix(lines[start:], cut_words, strict)
            except TopologyError as error:
                # What is wrong with the whole lines below the first header says most.
                if failure is None or (start == starts[0] and (cut_words, strict) == (False, False)):
                    failure = error
    assert failure is not None
    raise failure


def has_topo_matrix(text: str) -> bool:
    """Tell whether a text looks like ``nvidia-smi topo -m``: a line of it begins with a name like ``GPU0``."""
    return any(_GPU_NAME.fullmatch(word) for line in text.splitlines() for word in _ANSI.sub("", line).split()[:1])


def _is_header(words: list[str]) -> bool:
    return bool(words and _GPU_NAME.fullmatch(words[0])) and not (len(words) > 1 and _LINK.fullmatch(words[1]))


def _join(pieces: list[str], width: int) -> str:
    """Join the pieces of a wrapped line.

    :param width: of the terminal that cut it, also within words; spaces before the cut may be lost. 0: it was cut
        between words.
    """
    if not width or len(pieces) == 1:
        return " ".join(pieces)
    wide = [piece.expandtabs() for piece in pieces]
    return "".join([piece.ljust(width) for piece in wide[:-1]] + wide[-1:])


def _read_matrix(lines: list[str], cut_words: bool, strict: bool) -> dict[str, Any]:
    """Read a matrix whose header begins with the first line; see :func:`parse_topo_matrix`."""
    first_row = next(
        (number for number, line in enumerate(lines) if number and _is_first_row(line.split())), len(lines)
    )
    end = next((number for number in range(first_row, len(lines)) if not lines[number]), len(lines))
    width = max(len(line.expandtabs()) for line in lines[:end]) if cut_words else 0
    header = [line for line in lines[:first_row] if line]
    devices, columns = _read_header(_join(header, width), strict)
    rows: dict[str, str] = {}
    pieces: list[str] = []
    after_blank = False
    for line in [*lines[first_row:], "Legend:"]:
        words = line.split()
        starts_row = bool(words) and (words[0] in devices or bool(_GPU_NAME.fullmatch(words[0])))
        complete = bool(pieces) and len(_join(pieces, width).split()) >= 1 + len(devices) + len(columns)
        if width and pieces and len(pieces[-1].expandtabs()) >= width:
            # Its last field may have been cut.
            complete = False
        ends = not starts_row and bool(words) and (after_blank or complete or words[0].endswith("egend:"))
        if pieces and (starts_row or ends):
            row = _join(pieces, width)
            name = row.split()[0]
            if name in rows:
                raise TopologyError(f"{name} has two rows in the matrix; {_COPY_WHOLE}")
            rows[name] = row
            pieces = []
        if ends:
            break
        if words:
            pieces.append(line)
        after_blank = not words
    return _fill_matrix(devices, columns, rows, strict)


def _is_first_row(words: list[str]) -> bool:
    return len(words) > 1 and bool(_GPU_NAME.fullmatch(words[0])) and bool(_LINK.fullmatch(words[1]))


def _read_header(header: str, strict: bool) -> tuple[list[str], list[str]]:
    """Return the devices and the names of the other columns."""
    first = _COLUMN.search(header)
    devices = header[: first.start() if first else len(header)].split()
    columns: list[str] = []
    rest = header[first.start() :] if first else ""
    while rest:
        match = _COLUMN.match(rest)
        if match:
            columns.append(" ".join(match[0].split()))
        elif strict:
            raise TopologyError(f"the header of the matrix ends in '{rest[:60]}', which is no known column")
        else:
            match = re.match(r"\S+(?: \S+)*", rest)
            assert match is not None
            columns.append(match[0])
        rest = rest[match.end() :].strip()
    for names in (devices, columns):
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise TopologyError(f"'{doubled[0][:60]}' is twice in the header of the matrix; {_COPY_WHOLE}")
    strange = [name for name in devices if not _DEVICE_NAME.fullmatch(name)]
    if strange:
        raise TopologyError(f"'{strange[0][:60]}' in the header of the matrix is no device's name; {_COPY_WHOLE}")
    return devices, columns


def _fill_matrix(devices: list[str], columns: list[str], rows: dict[str, str], strict: bool) -> dict[str, Any]:
    gpus = sorted((name for name in devices if _GPU_NAME.fullmatch(name)), key=lambda name: int(name[3:]))
    unknown = sorted(set(rows) - set(devices))
    if unknown:
        raise TopologyError(f"the row {unknown[0]} has no column in the header of the matrix; {_COPY_WHOLE}")
    missing = [name for name in (devices if strict else gpus) if name not in rows]
    if missing:
        raise TopologyError(f"the matrix has no row for {', '.join(missing[:_SHOWN])}; {_COPY_WHOLE}")
    fields = {name: _row_links(name, row, devices) for name, row in rows.items()}
    links = []
    for number, one in enumerate(gpus):
        for other in gpus[number + 1 :]:
            kind, back = fields[one][other], fields[other][one]
            if kind != back:
                raise TopologyError(
                    f"the link of {one} to {other} is {kind} in one row and {back} in the other; {_COPY_WHOLE}"
                )
            if kind != "N/A":
                links.append([one, other, kind])
    affinity = {name: _row_affinity(name, rows[name], len(devices), columns, strict) for name in gpus}
    vague = [name for name in gpus if affinity[name] is None]
    warnings = []
    if vague:
        warnings.append(f"the affinity of {', '.join(vague)} is unknown: its row has fewer fields than the header")
    return {
        "gpus": gpus,
        "links": links,
        "cpus": {name: _numbers(name, "CPU Affinity", affinity[name]) for name in gpus},
        "numa_nodes": {name: _numbers(name, "NUMA Affinity", affinity[name]) for name in gpus},
        "warnings": warnings,
    }


def _row_links(name: str, row: str, devices: list[str]) -> dict[str, str]:
    """Return a row's links by device."""
    words = row.split()[1 : 1 + len(devices)]
    found = [bool(_LINK.fullmatch(word)) for word in words]
    if not all(found) or len(words) < len(devices):
        count = [*found, False].index(False)
        wrong = f"; '{words[count][:60]}' is none" if count < len(words) else ""
        raise TopologyError(
            f"the row {name} of the matrix has {count} link fields and needs {len(devices)}, one for each of "
            f"{devices[0]} to {devices[-1]}{wrong}; {_COPY_WHOLE}"
        )
    links = {device: "SYS" if word == "SOC" else word for device, word in zip(devices, words, strict=True)}
    for device, word in links.items():
        if (word == "X") != (device == name):
            raise TopologyError(
                f"the row {name} of the matrix has '{word}' in the column {device}; X stands for the device itself and "
                f"nothing else; {_COPY_WHOLE}"
            )
    return links


def _row_affinity(name: str, row: str, devices: int, columns: list[str], strict: bool) -> dict[str, str] | None:
    """Return a row's other fields by column; None when it cannot be told which field belongs to which column."""
    fields = row.split()[1 + devices :]
    if len(fields) > len(columns):
        raise TopologyError(
            f"the row {name} of the matrix has {len(fields)} fields after its links ('{' '.join(fields)[:60]}') and "
            f"the header {len(columns)} columns there; {_COPY_WHOLE}"
        )
    if len(fields) == len(columns):
        return dict(zip(columns, fields, strict=True))
    if strict:
        raise TopologyError(f"the row {name} of the matrix has fewer fields than the header; {_COPY_WHOLE}")
    # Tabs keep the place of an empty field.
    cells = [cell.strip() for cell in row.rstrip("\t").split("\t")][1 + devices :]
    if "\t" in row and len(cells) >= len(fields):
        return dict(zip(columns, cells, strict=False))
    return None


def _numbers(name: str, column: str, fields: dict[str, str] | None) -> list[int] | None:
    text = (fields or {}).get(column, "")
    if text in ("", "N/A", "-", "-1"):
        return None
    try:
        return parse_cpu_list(text) or None
    except TopologyError as error:
        raise TopologyError(f"{column} of {name}: {error}; {_COPY_WHOLE}") from error


def compare_with_matrix(
    gpus: list[dict[str, Any]], links: list[list[str]], matrix: dict[str, Any], addresses: list[str]
) -> tuple[list[list[str]], list[str]]:
    """Lay the driver's matrix beside what sysfs says.

    NVLink and links that sysfs does not tell come from the driver. In everything else sysfs stays, so that the answer
    is the same with and without a driver, and a sentence says where they differ.

    :param gpus: in PCI order, with ``pci_address`` and ``numa_node``.
    :param links: of sysfs.
    :param matrix: of :func:`parse_topo_matrix`.
    :param addresses: PCI addresses in the driver's order: that of its names ``GPU0``, ``GPU1``.
    :returns: links of both, and sentences.
    """
    if len(addresses) != len(matrix["gpus"]):
        return links, [
            f"nvidia-smi lists {len(addresses)} GPUs and its matrix has {len(matrix['gpus'])}; the matrix is left aside"
        ]
    names = dict(zip(matrix["gpus"], addresses, strict=True))
    warnings: list[str] = list(matrix["warnings"])
    nodes = {names[name]: numbers for name, numbers in matrix["numa_nodes"].items() if numbers}
    untold = [gpu["pci_address"] for gpu in gpus if gpu["numa_node"] is None and gpu["pci_address"] in nodes]
    if untold:
        said = sorted({number for address in untold for number in nodes[address]})
        warnings.append(
            f"{_shorten(untold)}: sysfs does not tell the NUMA node and nvidia-smi says {', '.join(map(str, said))}; "
            "sysfs is followed, the node is unknown"
        )
    for gpu in gpus:
        told = nodes.get(gpu["pci_address"])
        if told and gpu["numa_node"] is not None and gpu["numa_node"] not in told:
            warnings.append(
                f"{gpu['pci_address']}: sysfs says NUMA node {gpu['numa_node']} and nvidia-smi says "
                f"{', '.join(map(str, told))}; sysfs is followed"
            )
    place = {gpu["pci_address"]: number for number, gpu in enumerate(gpus)}
    merged = {(one, other): kind for one, other, kind in links}
    differing: dict[tuple[str, str], list[str]] = {}
    for first, second, kind in matrix["links"]:
        if names[first] not in place or names[second] not in place:
            continue
        one, other = sorted((names[first], names[second]), key=lambda address: place[address])
        ours = merged.get((one, other))
        if ours is None or kind not in PCIE_LINKS:
            merged[one, other] = kind
        elif ours != kind:
            differing.setdefault((ours, kind), []).append(f"{one} to {other}")
    for (ours, theirs), pairs in sorted(differing.items()):
        warnings.append(f"{_shorten(pairs)}: the link is {ours} by sysfs and {theirs} by nvidia-smi; sysfs is followed")
    ordered = sorted(merged.items(), key=lambda item: (place[item[0][0]], place[item[0][1]]))
    return [[one, other, kind] for (one, other), kind in ordered], warnings


def _shorten(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
