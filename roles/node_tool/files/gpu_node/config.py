"""What Ansible wrote for this node: node.json, the releases and the two kinds of secrets. Loaded and checked."""

import hashlib
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpu_node.errors import ConfigError
from gpu_node.files import read_json, read_text
from gpu_node.paths import Paths

T = TypeVar("T")
RUN_PLAYBOOK = "run the playbook again, it writes this file"

RELEASE_ID = re.compile(r"[0-9a-f]{12}")
# What a Bearer token may hold (RFC 6750). Without `$`, which nginx would take for a variable and cannot escape.
ENGINE_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
# An HTTP header value can carry these; longer ones would not fit into nginx's configuration buffer once escaped.
CLIENT_KEY = re.compile(r"[\x21-\x7e]{1,512}")
CLIENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Fields:
    """A JSON object whose fields are taken out by name and type; errors name file, field and value."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected an object, found {_shown(value)}: {RUN_PLAYBOOK}")
        self._value: dict[str, Any] = value
        self._where = where

    def take(self, name: str, kind: type[T], valid: Callable[[T], bool] = lambda _: True, wanted: str = "") -> T:
        """The field, of exactly that type (true is no integer) and valid."""
        if name not in self._value:
            raise ConfigError(f"{self._where}: {name!r} is missing: {RUN_PLAYBOOK}")
        value = self._value[name]
        if type(value) is not kind or not valid(value):
            expected = (
                wanted or {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}[kind]
            )
            raise ConfigError(f"{self._where}: {name!r}: expected {expected}, found {_shown(value)}: {RUN_PLAYBOOK}")
        return value

    def port(self, name: str) -> int:
        return self.take(name, int, lambda port: 1 <= port <= 65535, "a port from 1 to 65535")

    def seconds(self, name: str, least: int = 1) -> int:
        return self.take(name, int, lambda value: value >= least, f"whole seconds, at least {least}")

    def text(self, name: str) -> str:
        return self.take(name, str, lambda value: bool(value.strip()), "a text that is not empty")

    def texts(self, name: str) -> list[str]:
        return self.take(name, list, lambda value: all(isinstance(item, str) for item in value), "a list of texts")

    def share(self, name: str) -> float:
        """A number from 0 to 1; JSON writes the whole ones without a point."""
        kind = int if type(self._value.get(name)) is int else float
        return float(self.take(name, kind, lambda value: 0 <= value <= 1, "a share from 0 to 1"))

    def has(self, name: str) -> bool:
        return name in self._value

    def object(self, name: str) -> "Fields":
        return Fields(self._value.get(name), f"{self._where}: {name!r}")

    def objects(self, name: str) -> list["Fields"]:
        return [Fields(item, f"{self._where}: {name!r}[{place}]") for place, item in enumerate(self.take(name, list))]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def endpoint(listen: str) -> tuple[str, int]:
    """Host and port of an nginx listen value: `127.0.0.1:8080`, `[::1]:8080`, `*:80` or a bare port."""
    host, colon, port = listen.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"balancer listen address {listen!r} has no port from 1 to 65535: write it as 127.0.0.1:8080")
    return (host.strip("[]") if colon else "*") or "*", int(port)


def is_loopback(listen: str) -> bool:
    """Whether only this machine can reach the listen address."""
    host, _ = endpoint(listen)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class ReplicaConfig:
    """Where a replica runs."""

    index: int
    port: int
    unit: str
    container: str


@dataclass(frozen=True)
class ProberConfig:
    """The prober's limits, in seconds (http_failures: passes in a row)."""

    interval_s: int
    http_timeout_s: int
    http_failures: int
    stall_s: int
    idle_probe_s: int


@dataclass(frozen=True)
class GateConfig:
    """What a new release has to do. speed_factor: the least share of the speed before; 0: speed is not looked at."""

    tokens: int = 64
    speed_factor: float = 0.5


@dataclass(frozen=True)
class NodeConfig:
    """node.json."""

    replicas: tuple[ReplicaConfig, ...]
    served_model_name: str
    status_port: int
    listen: tuple[str, ...]
    drain_timeout_s: int
    start_timeout_s: int
    shutdown_timeout_s: int
    prober: ProberConfig
    # How long /health says that the node leaves before its last replica goes out.
    announce_s: int = 10
    gate: GateConfig = GateConfig()

    def replica(self, index: int) -> ReplicaConfig:
        for replica in self.replicas:
            if replica.index == index:
                return replica
        known = ", ".join(str(replica.index) for replica in self.replicas)
        raise ConfigError(f"there is no replica {index}: this node has {known}")


def _parse_gate(gate: Fields) -> GateConfig:
    tokens = gate.take("tokens", int, lambda count: 4 <= count <= 512, "a count from 4 to 512")
    return GateConfig(tokens, gate.share("speed_factor"))


def parse_node(value: Any, where: str) -> NodeConfig:
    """The checked form of node.json's value. Raises ConfigError."""
    node = Fields(value, where)
    replicas = tuple(
        ReplicaConfig(
            item.take("index", int, lambda index: index >= 0, "an index from 0"),
            item.port("port"),
            item.text("unit"),
            item.text("container"),
        )
        for item in node.objects("replicas")
    )
    if not replicas:
        raise ConfigError(f"{where}: 'replicas' is empty: {RUN_PLAYBOOK}")
    balancer = node.object("balancer")
    status_port = balancer.port("status_port")
    listen = tuple(balancer.texts("listen"))
    if not listen:
        raise ConfigError(f"{where}: 'balancer': 'listen' is empty: {RUN_PLAYBOOK}")
    for name, values in (
        ("index", [replica.index for replica in replicas]),
        ("port", [status_port, *{endpoint(address)[1] for address in listen}, *(replica.port for replica in replicas)]),
    ):
        if twice := {item for item in values if values.count(item) > 1}:
            raise ConfigError(f"{where}: {name} {min(twice)} is given twice: {RUN_PLAYBOOK}")
    prober = node.object("prober")
    return NodeConfig(
        replicas=replicas,
        served_model_name=node.text("served_model_name"),
        status_port=status_port,
        listen=listen,
        drain_timeout_s=node.seconds("drain_timeout_s", least=0),
        start_timeout_s=node.seconds("start_timeout_s"),
        shutdown_timeout_s=node.seconds("shutdown_timeout_s", least=0),
        prober=ProberConfig(
            interval_s=prober.seconds("interval_s"),
            http_timeout_s=prober.seconds("http_timeout_s"),
            http_failures=prober.take("http_failures", int, lambda count: count >= 1, "a count from 1"),
            stall_s=prober.seconds("stall_s"),
            idle_probe_s=prober.seconds("idle_probe_s"),
        ),
        # A node that is being upgraded has the file of the version before for a moment.
        announce_s=node.seconds("announce_s", least=0) if node.has("announce_s") else NodeConfig.announce_s,
        gate=_parse_gate(node.object("gate")) if node.has("gate") else NodeConfig.gate,
    )


def load_node(paths: Paths) -> NodeConfig:
    return parse_node(read_json(paths.node_json, RUN_PLAYBOOK), str(paths.node_json))


@dataclass(frozen=True)
class Release:
    """One release of one replica."""

    id: str
    replica: int
    model: str
    model_digest: str  # its first 12 hex digits, as its folder has it
    image_ref: str
    image_id: str
    served_model_name: str
    port: int
    cpus: str
    memory_nodes: str
    gpus: tuple[tuple[str, str], ...]  # PCI address and UUID, by rank
    podman_args: tuple[str, ...]
    command: tuple[str, ...]


def release_id(value: dict[str, Any]) -> str:
    """The id that the content of a release.json has: first 12 hex digits of the SHA-256 of its canonical JSON."""
    content = {name: item for name, item in value.items() if name != "id"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()[:12]


def _quoted(value: Any, path: str) -> list[str]:
    """Where a text begins with a quote: a shell or template left it, and the engine would take it literally."""
    if isinstance(value, str):
        return [f"{path} = {value[:60]}"] if value[:1] in ("'", '"') else []
    if isinstance(value, dict):
        return [place for name, item in value.items() for place in _quoted(item, f"{path}.{name}")]
    if isinstance(value, list):
        return [place for number, item in enumerate(value) for place in _quoted(item, f"{path}[{number}]")]
    return []


def load_release(paths: Paths, identity: str) -> Release:
    """A release whose folder is complete and unchanged: id, file hashes, no stray quotes. Raises ConfigError."""
    if not RELEASE_ID.fullmatch(identity):
        raise ConfigError(f"{identity!r} is no release id: it has 12 hexadecimal digits, see {paths.release('')}")
    folder = paths.release(identity)
    path = folder / "release.json"
    remedy = "run the playbook again, it writes releases"
    value = read_json(path, remedy)
    fields = Fields(value, str(path))
    if fields.text("id") != identity or release_id(value) != identity:
        raise ConfigError(f"{path}: its content has the id {release_id(value)}: it was changed; {remedy}")
    for name, digest in fields.take("files", dict).items():
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"{folder / name}: {error.strerror}: the release is not complete; {remedy}") from None
        if found != digest:
            raise ConfigError(f"{folder / name}: SHA-256 is {found}, not {digest}: it was changed; {remedy}")
    for part in ("engine_args", "command", "podman_args", "env"):
        if places := _quoted(value.get(part), part):
            raise ConfigError(f"{path}: a value begins with a quote, the engine would take it literally: {places[0]}")
    if not fields.texts("command"):
        raise ConfigError(f"{path}: 'command' is empty; {remedy}")
    image, model = fields.object("image"), fields.object("model")
    return Release(
        id=identity,
        replica=fields.take("replica", int),
        model=model.text("name"),
        model_digest=model.text("digest")[:12],
        image_ref=image.text("ref"),
        image_id=image.text("id").removeprefix("sha256:"),
        served_model_name=fields.text("served_model_name"),
        port=fields.port("port"),
        cpus=fields.take("cpus", str),
        memory_nodes=fields.take("memory_nodes", str),
        gpus=tuple((gpu.text("pci_address"), gpu.text("uuid")) for gpu in fields.objects("gpus")),
        podman_args=tuple(fields.texts("podman_args")),
        command=tuple(fields.texts("command")),
    )


def release_for(paths: Paths, replica: ReplicaConfig, identity: str) -> Release:
    """The release, checked to be one of this replica. Raises ConfigError."""
    release = load_release(paths, identity)
    if release.replica != replica.index:
        raise ConfigError(
            f"release {identity} is for replica {release.replica}, not for replica {replica.index}:"
            " choose one of this replica's releases"
        )
    return release


def linked_release(paths: Paths, index: int, link: str) -> str | None:
    """The id of the release that `current` or `previous` points at."""
    path: Path = paths.replica(index) / link
    return path.readlink().name if path.is_symlink() else None


def started_release(paths: Paths, index: int) -> str | None:
    """The id of the release that the replica's container was started from; None when none runs, or it was not noted."""
    return (read_text(paths.running(index)) or "").strip() or None


@dataclass(frozen=True)
class Served:
    """Where a replica's engine listens, and under which name it serves."""

    port: int
    model: str


def served(paths: Paths, node: NodeConfig, index: int) -> Served:
    """What the release says that the replica's container was started from, or else its current one.

    node.json says what the plan wants, which a replica may get only at its switch. It counts when there is no release,
    or when one was damaged while its engine serves on.
    """
    release = started_release(paths, index) or linked_release(paths, index, "current")
    try:
        path = paths.release(release or "") / "release.json"
        fields = Fields(read_json(path, RUN_PLAYBOOK), str(path))
        return Served(fields.port("port"), fields.text("served_model_name"))
    except ConfigError:
        return Served(node.replica(index).port, node.served_model_name)


@dataclass(frozen=True)
class Client:
    """Who may ask the balancer."""

    name: str
    key: str

    def __repr__(self) -> str:  # a key must not reach a log through a traceback
        return f"Client({self.name!r})"


def load_engine_key(paths: Paths) -> str:
    """The engine's own key. Errors never carry it."""
    text = read_text(paths.engine_env)
    remedy = "run the playbook again, it writes this file"
    if text is None:
        raise ConfigError(f"{paths.engine_env} is missing: {remedy}")
    keys = [line.removeprefix("VLLM_API_KEY=") for line in text.splitlines() if line.startswith("VLLM_API_KEY=")]
    if len(keys) != 1 or not ENGINE_KEY.fullmatch(keys[0]):
        raise ConfigError(
            f"{paths.engine_env} must hold one line VLLM_API_KEY=<key>, the key of letters, digits and ._~+/=-"
            f" (at most 512): {remedy}"
        )
    return keys[0]


def load_clients(paths: Paths, listen: tuple[str, ...]) -> list[Client]:
    """The clients' names and keys. Errors never carry a key."""
    where = str(paths.clients_json)
    value = read_json(paths.clients_json, RUN_PLAYBOOK)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: expected a list of clients: {RUN_PLAYBOOK}")
    clients: list[Client] = []
    for place, item in enumerate(value):
        name, key = (item.get("name"), item.get("key")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not CLIENT_NAME.fullmatch(name):
            raise ConfigError(f"{where}: client {place}: the name must be 1 to 64 letters, digits or ._-")
        if not isinstance(key, str) or not CLIENT_KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: client {name!r}: the key must be 1 to 512 printable ASCII characters without spaces:"
                " a request header and nginx carry no others"
            )
        if any(key == other.key for other in clients):
            raise ConfigError(f"{where}: client {name!r} has the same key as another client: give each its own")
        clients.append(Client(name, key))
    if not clients and (open_to := [address for address in listen if not is_loopback(address)]):
        raise ConfigError(
            f"{where}: no client key, but the balancer listens on {open_to[0]}: add a client key or listen on loopback"
        )
    return clients
