# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Where replicas go: which GPUs, in which order, on which CPUs and NUMA nodes.

A *domain* is what a replica stays inside: the NUMA nodes of one socket, or one NUMA node where the socket is not
known. GPUs whose NUMA node the platform does not tell are in no domain, and those of a node without usable CPUs or
memory are in one that nothing can be pinned to: their replica is pinned to nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

# From the closest link to the farthest, in nvidia-smi's words; NVLink (NV#) is before all of them.
LINK_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
# A group of more GPUs keeps PCI order: all orders of 8 are 40,320, and no kernel of ours pairs more than 4.
MOST_ORDERED = 4
# Groups to choose from: 8 of 16 GPUs are 12,870. Beyond that only neighbours on the bus are compared.
MOST_GROUPS = 20_000


class PlacementError(ValueError):
    """The replicas cannot be placed; ``problems`` holds a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Domain:
    """NUMA nodes that belong together: their numbers, usable CPUs, and memory in bytes (None when not known)."""

    nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_bytes: int | None

    @property
    def name(self) -> str:
        """Return how people call it."""
        if not self.nodes:
            return "this machine"
        return f"NUMA node{'s' if len(self.nodes) > 1 else ''} {', '.join(map(str, self.nodes))}"


@dataclass(frozen=True)
class Place:
    """Where one replica goes. Without ``cpus`` it is pinned to no CPU; a domain without nodes pins no memory."""

    domain: Domain
    cpus: list[int]
    gpus: list[dict[str, Any]] = field(default_factory=list)


def _merge(domains: Iterable[Domain]) -> Domain:
    parts = sorted(set(domains), key=lambda domain: domain.nodes)
    memory = [part.memory_bytes for part in parts]
    return Domain(
        tuple(node for part in parts for node in part.nodes),
        tuple(sorted({cpu for part in parts for cpu in part.cpus})),
        sum(item for item in memory if item is not None) if None not in memory else None,
    )


def whole_machine(topology: dict[str, Any]) -> Domain:
    """Return the domain of a machine that tells of no NUMA node: all its CPUs, nothing to pin memory to."""
    return Domain((), tuple(topology["cpus"]), topology["memory_bytes"])


def node_domains(topology: dict[str, Any]) -> list[Domain]:
    """Return one domain for each usable NUMA node, in their order; the whole machine when there is none."""
    nodes = [Domain((node["id"],), tuple(node["cpus"]), node["memory_bytes"]) for node in topology["numa_nodes"]]
    return sorted(nodes, key=lambda domain: domain.nodes) or [whole_machine(topology)]


def socket_domains(topology: dict[str, Any]) -> dict[int, Domain]:
    """Return the domain of each usable NUMA node: all the nodes of its socket (NPS2, NPS4, sub-NUMA clusters)."""
    sockets: dict[tuple[str, int], list[Domain]] = {}
    keys: dict[int, tuple[str, int]] = {}
    for node in topology["numa_nodes"]:
        key = ("node", node["id"]) if node.get("socket") is None else ("socket", node["socket"])
        keys[node["id"]] = key
        sockets.setdefault(key, []).append(Domain((node["id"],), tuple(node["cpus"]), node["memory_bytes"]))
    return {number: _merge(sockets[key]) for number, key in keys.items()}


def share_cores(cpus: Iterable[int], cores: list[list[int]], shares: int, per_share: int) -> list[list[int]]:
    """Give each of ``shares`` CPUs of its own, whole cores as far as there are enough.

    :param cpus: the CPUs to share out, at least one for each share and ``per_share`` for each.
    :param cores: CPUs by physical core (SMT siblings together); CPUs that are in none count as cores of their own.
    :param per_share: CPUs for each; 0 shares them evenly.
    """
    free = set(cpus)
    units: list[list[int]] = []
    for core in cores:
        part = sorted(set(core) & free)
        if part:
            units.append(part)
            free.difference_update(part)
    units = sorted(units + [[cpu] for cpu in free])
    total = sum(map(len, units))
    for wanted in [per_share] if per_share else range(total // shares, 0, -1):
        taken = _deal(units, shares, wanted)
        if taken:
            return [sorted(share[: per_share or None]) for share in taken]
    # Too few cores for whole ones: single CPUs, siblings next to each other, always are enough.
    single = list(itertools.chain(*units))
    each = per_share or total // shares
    return [sorted(single[index * each : (index + 1) * each]) for index in range(shares)]


def _deal(units: list[list[int]], shares: int, wanted: int) -> list[list[int]]:
    """Deal whole cores to ``shares`` until each has ``wanted`` CPUs or more; empty when there are not enough."""
    left = list(units)
    taken: list[list[int]] = []
    for _ in range(shares):
        share: list[int] = []
        while len(share) < wanted:
            if not left:
                return []
            missing = wanted - len(share)
            # The largest core that does not exceed what is missing, or else the one that wastes least.
            unit = min(left, key=lambda core: (len(core) > missing, abs(missing - len(core))))
            left.remove(unit)
            share += unit
        taken.append(share)
    return taken


def place_on_cpus(topology: dict[str, Any], replicas: int, per_replica: int) -> list[Place]:
    """Place replicas that need no GPU: dealt to the NUMA nodes, each with CPUs of its own inside one node.

    :raises PlacementError: when a node has fewer CPUs than its replicas need.
    """
    domains = node_domains(topology)
    total = sum(len(domain.cpus) for domain in domains)
    if replicas > total:
        raise PlacementError(
            [f"replicas: {replicas} needs as many CPUs, and this node has {total}; set replicas to {total} or less"]
        )
    # Dealing to the node with most CPUs left keeps uneven nodes fair.
    shares = dict.fromkeys(range(len(domains)), 0)
    for _ in range(replicas):
        best = max(shares, key=lambda index: (len(domains[index].cpus) / (shares[index] + 1), -index))
        shares[best] += 1
    placed = []
    for index, count in shares.items():
        placed += _places(domains[index], [[]] * count, topology["cores"], per_replica)
    return placed


def _places(
    domain: Domain, groups: list[list[dict[str, Any]]], cores: list[list[int]], per_replica: int
) -> list[Place]:
    """Return a place in ``domain`` for each group of GPUs, with CPUs of its own."""
    if not groups:
        return []
    need = len(groups) * max(per_replica, 1)
    if need > len(domain.cpus):
        have = len(domain.cpus)
        if per_replica:
            text = (
                f"cpus_per_replica: {per_replica} for {len(groups)} replicas on {domain.name} needs {need} CPUs, and "
                f"it has {have}; lower cpus_per_replica or replicas"
            )
        else:
            text = f"replicas: {need} on {domain.name} need as many CPUs, and it has {have}; lower replicas"
        raise PlacementError([text])
    shares = share_cores(domain.cpus, cores, len(groups), per_replica)
    return [Place(domain, share, group) for share, group in zip(shares, groups, strict=True)]


# ---- GPUs ----


def gpu_name(gpu: dict[str, Any]) -> str:
    """Return a GPU as people find it: PCI address and what it is."""
    kind = gpu["model"] or gpu["device_id"]
    return f"{gpu['pci_address']} ({kind})" if kind else str(gpu["pci_address"])


def _bus_order(gpu: dict[str, Any]) -> tuple[int, str]:
    """Return what sorts GPUs by their address: ``GPU2`` before ``GPU10``, and PCI domains of five digits last."""
    return len(gpu["pci_address"]), gpu["pci_address"]


def _model(gpu: dict[str, Any]) -> str:
    """Return what tells models apart: the PCI device number is known without a driver."""
    return str(gpu["device_id"] or gpu["model"])


def _addresses(gpus: Iterable[dict[str, Any]]) -> str:
    """Return GPUs as the setting ``gpus`` takes them."""
    return "[" + ", ".join(f"'{gpu['pci_address']}'" for gpu in gpus) + "]"


def full_address(address: str) -> str:
    """Return a PCI address as sysfs writes it: ``C1:00.0`` and ``00000000:c1:00.0`` become ``0000:c1:00.0``."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}" if match else address.strip()


def select_gpus(
    topology: dict[str, Any], wanted: list[str], known: dict[str, str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Choose the GPUs to serve with.

    :param wanted: PCI addresses that the operator names; empty takes every card that the profile is made for.
    :param known: the profile's cards, name by PCI device id (``0x2bb5``).
    :returns: the GPUs in PCI order, warnings, problems.
    """
    by_address = {gpu["pci_address"]: gpu for gpu in topology["gpus"]}
    there = ", ".join(gpu_name(gpu) for gpu in topology["gpus"]) or "none"
    if wanted:
        addresses = [full_address(item) for item in wanted]
        problems = [
            f"gpus: '{item}' is no GPU of this node; PCI shows {there}"
            for item, address in zip(wanted, addresses, strict=True)
            if address not in by_address
        ]
        twice = sorted({address for address in addresses if addresses.count(address) > 1})
        problems += [f"gpus: {address} is named more than once" for address in twice]
        chosen = [gpu for address, gpu in by_address.items() if address in addresses]
        strange = [gpu for gpu in chosen if gpu["device_id"] and gpu["device_id"] not in known]
        warnings = [f"{gpu_name(gpu)} is not a card that this profile was measured on" for gpu in strange]
        return chosen, warnings, problems
    if not topology["gpus"]:
        return [], [], ["PCI shows no NVIDIA GPU on this node; look at 'lspci -d 10de:', or plan with another profile"]
    chosen = [gpu for gpu in topology["gpus"] if not gpu["device_id"] or gpu["device_id"] in known]
    left = [gpu_name(gpu) for gpu in topology["gpus"] if gpu not in chosen]
    cards = ", ".join(f"{name} ({device})" for device, name in known.items())
    if left and not chosen:
        return (
            [],
            [],
            [
                f"no GPU of this node is one that the profile is made for ({cards}); PCI shows {there}; to serve with "
                "them all the same, name them in gpus"
            ],
        )
    return chosen, [f"left alone, not a card of this profile: {', '.join(left)}"] if left else [], []


def check_gpus(gpus: list[dict[str, Any]], driver_version: str) -> list[str]:
    """Return a sentence for every GPU that cannot serve whole: in MIG mode, or not seen by the driver."""
    problems = [
        f"{gpu_name(gpu)} is in MIG mode, and a replica needs whole GPUs; switch it off "
        f"(nvidia-smi -i {gpu['pci_address']} -mig 0), or name other GPUs in gpus and set replicas to what they make"
        for gpu in gpus
        if gpu["mig"]
    ]
    if driver_version:
        problems += [
            f"PCI shows {gpu['pci_address']} and the driver ({driver_version}) does not: it fell off the bus or failed "
            "to start; look for 'NVRM' and 'Xid' in the kernel's log, then reset it or reboot, or name other GPUs in "
            "gpus and set replicas to what they make"
            for gpu in gpus
            if not gpu["uuid"]
        ]
    return problems


def _distance(kind: str) -> int:
    """Return how far two GPUs are apart, smaller is closer; an unknown link counts as the farthest."""
    if kind.startswith("NV"):
        return 0
    return LINK_KINDS.index(kind) + 1 if kind in LINK_KINDS else len(LINK_KINDS) + 1


class _Links:
    def __init__(self, links: list[list[str]]) -> None:
        self._kinds = {frozenset(item[:2]): item[2] for item in links}

    def between(self, one: dict[str, Any], other: dict[str, Any]) -> int:
        return _distance(self._kinds.get(frozenset((one["pci_address"], other["pci_address"])), ""))

    def spread(self, group: Iterable[dict[str, Any]]) -> int:
        return sum(self.between(one, other) for one, other in itertools.combinations(group, 2))


def rank_order(group: list[dict[str, Any]], links: list[list[str]]) -> list[dict[str, Any]]:
    """Order a replica's GPUs by rank so that ranks {0,1} and {2,3} share the closest links, then {0,2} and {1,3}.

    That is the order in which the 8-bit all-reduce exchanges. Equal orders are decided by PCI address.
    """
    table = _Links(links)
    in_order = sorted(group, key=_bus_order)
    if len(in_order) > MOST_ORDERED or len(in_order) % 2:
        return in_order
    orders = [list(order) for order in itertools.permutations(in_order)]

    def apart(order: list[dict[str, Any]]) -> tuple[int, int]:
        pairs = sum(table.between(order[index], order[index + 1]) for index in range(0, len(order), 2))
        crossed = sum(table.between(order[index], order[index + 2]) for index in range(len(order) - 2))
        return pairs, crossed

    # Permutations of a sorted list come sorted, and min takes the first of equals.
    return min(orders, key=apart)


def _take_group(
    gpus: list[dict[str, Any]], size: int, table: _Links, fixed: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return ``size`` of ``gpus`` that are closest to each other and to ``fixed``, of one model where that is possible.

    The result has ``fixed`` in it. Of equals the first on the bus are taken.
    """
    base = list(fixed)

    def cost(group: Iterable[dict[str, Any]]) -> tuple[int, int]:
        whole = [*base, *group]
        return len({_model(gpu) for gpu in whole}), table.spread(whole)

    groups: Iterable[Iterable[dict[str, Any]]] = itertools.combinations(gpus, size)
    if math.comb(len(gpus), size) > MOST_GROUPS:
        neighbours = sorted(gpus, key=lambda gpu: (_model(gpu), _bus_order(gpu)))
        groups = [neighbours[first : first + size] for first in range(len(neighbours) - size + 1)]
    return [*base, *min(groups, key=cost)]


def _take_groups(gpus: list[dict[str, Any]], size: int, table: _Links) -> list[list[dict[str, Any]]]:
    """Take groups as long as there are enough GPUs; what remains in ``gpus`` is left over."""
    groups = []
    while len(gpus) >= size:
        group = _take_group(gpus, size, table)
        groups.append(group)
        for gpu in group:
            gpus.remove(gpu)
    return sorted(groups, key=lambda group: min(map(_bus_order, group)))


def _node_text(gpu: dict[str, Any], usable: Iterable[int]) -> str:
    node = gpu["numa_node"]
    if not _is_told(node):
        return f"{gpu['pci_address']} on an unknown NUMA node"
    bare = "" if node in usable else " (no usable CPUs or memory there)"
    return f"{gpu['pci_address']} on NUMA node {node}{bare}"


def _is_told(node: int | None) -> bool:
    """Tell whether the platform told a GPU's NUMA node: the kernel's word for unknown is -1."""
    return node is not None and node >= 0


def _check_models(groups: list[list[dict[str, Any]]]) -> list[str]:
    return [
        f"replica {index} would mix GPU models: {', '.join(gpu_name(gpu) for gpu in group)}; name GPUs of one model in "
        "gpus and set replicas to what they make, or set mixed_gpus: true"
        for index, group in enumerate(groups)
        if len({_model(gpu) for gpu in group}) > 1
    ]


def _span_problem(
    left: list[dict[str, Any]], whole: list[list[dict[str, Any]]], size: int, usable: Iterable[int]
) -> str:
    """Say which GPUs are in no group of one socket, and what to do; the groups that there are need no other change."""
    chosen = [gpu for group in whole for gpu in group]
    fewer = f", or set replicas: {len(whole)} and gpus: {_addresses(chosen)}" if whole else ""
    return (
        f"a replica of {size} GPUs would span sockets: {', '.join(_node_text(gpu, usable) for gpu in left)} are left "
        f"over; move cards so that each socket has a multiple of {size}{fewer}, or set span_sockets: true"
    )


@dataclass(frozen=True)
class _Groups:
    """Groups of GPUs by their domain, those of no domain, and the GPUs that are in no group of one socket."""

    homes: dict[Domain, list[list[dict[str, Any]]]]
    homeless: list[list[dict[str, Any]]]
    left: list[dict[str, Any]]

    @property
    def whole(self) -> list[list[dict[str, Any]]]:
        return [group for groups in self.homes.values() for group in groups] + self.homeless


def _group(gpus: list[dict[str, Any]], size: int, table: _Links, of_node: dict[int, Domain]) -> _Groups:
    """Make groups of ``size`` GPUs that are each inside one socket, as many as there are."""
    by_domain: dict[Domain, list[dict[str, Any]]] = {}
    # By NUMA node where nothing can be pinned to it: such GPUs are apart from all others, and not of unknown place.
    bare: dict[int, list[dict[str, Any]]] = {}
    free: list[dict[str, Any]] = []
    for gpu in sorted(gpus, key=_bus_order):
        node = gpu["numa_node"]
        if not _is_told(node):
            free.append(gpu)
        elif node in of_node:
            by_domain.setdefault(of_node[node], []).append(gpu)
        else:
            bare.setdefault(node, []).append(gpu)
    homes = {domain: _take_groups(by_domain[domain], size, table) for domain in sorted(by_domain, key=_by_nodes)}
    homeless = [group for node in sorted(bare) for group in _take_groups(bare[node], size, table)]
    rests = [*by_domain.values(), *(bare[node] for node in sorted(bare))]
    # A GPU of unknown place may complete what is left over in a domain: nobody can say that it spans.
    for rest in rests:
        if rest and len(rest) + len(free) >= size:
            group = _take_group(free, size - len(rest), table, rest)
            homeless.append(group)
            rest.clear()
            free = [gpu for gpu in free if gpu not in group]
    homeless += _take_groups(free, size, table)
    return _Groups(homes, homeless, sorted((gpu for rest in [*rests, free] for gpu in rest), key=_bus_order))


def count_remedy(topology: dict[str, Any], gpus: list[dict[str, Any]], replicas: int, size: int) -> str:
    """Say how GPUs that are more or fewer than ``replicas`` of ``size`` need can serve: settings that work as given."""
    groups = _group(gpus, size, _Links(topology["links"]), socket_domains(topology)).whole
    whole = [group for group in groups if len({_model(gpu) for gpu in group}) == 1]
    count = min(len(whole), replicas)
    named = _addresses(gpu for group in whole[:count] for gpu in group)
    remedies = []
    if whole and len(whole) * size == len(gpus):
        remedies.append(f"set replicas: {len(whole)}")
    if count == replicas:
        remedies.append(f"set gpus: {named}")
    elif count and not remedies:
        remedies.append(f"set replicas: {count} and gpus: {named}")
    return ", or ".join(remedies) or f"no {size} of them are on one socket and of one model, so add or move cards"


def place_on_gpus(topology: dict[str, Any], gpus: list[dict[str, Any]], settings: dict[str, Any]) -> list[Place]:
    """Place replicas on groups of GPUs, each inside one socket by the measured NUMA nodes.

    :param gpus: the GPUs to use, exactly as many as the replicas need together.
    :param settings: ``tensor_parallel_size``, ``cpus_per_replica``, ``span_sockets``, ``mixed_gpus``.
    :raises PlacementError: when a replica would span sockets or mix models without leave, or lacks CPUs.
    """
    size, links = settings["tensor_parallel_size"], topology["links"]
    table, nowhere, of_node = _Links(links), whole_machine(topology), socket_domains(topology)
    found = _group(gpus, size, table, of_node)
    if found.left and not settings["span_sockets"]:
        raise PlacementError([_span_problem(found.left, found.whole, size, of_node)])
    spanning = _take_groups(list(found.left), size, table)
    problems = [] if settings["mixed_gpus"] else _check_models(found.whole + spanning)
    if problems:
        raise PlacementError(problems)
    per_replica, cores = settings["cpus_per_replica"], topology["cores"]
    placed = [place for domain, taken in found.homes.items() for place in _places(domain, taken, cores, per_replica)]
    others: dict[Domain, list[list[dict[str, Any]]]] = {nowhere: found.homeless} if found.homeless else {}
    for group in spanning:
        touched = [of_node.get(gpu["numa_node"], nowhere) for gpu in group]
        others.setdefault(nowhere if nowhere in touched else _merge(touched), []).append(group)
    for domain, taken in others.items():
        if per_replica:
            used = {cpu for place in placed for cpu in place.cpus}
            spare = replace(domain, cpus=tuple(cpu for cpu in domain.cpus if cpu not in used))
            placed += [replace(place, domain=domain) for place in _places(spare, taken, cores, per_replica)]
        else:
            # With leave to span: all CPUs and memory of the sockets it touches, whoever else is there.
            placed += [Place(domain, list(domain.cpus) if domain.nodes else [], group) for group in taken]
    return [Place(place.domain, place.cpus, rank_order(place.gpus, links)) for place in placed]


def _by_nodes(domain: Domain) -> tuple[int, ...]:
    return domain.nodes
