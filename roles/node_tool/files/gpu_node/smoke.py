"""A real completion, plain and streamed, from every replica and through the balancer."""

from typing import Any

from gpu_node.config import endpoint, load_clients
from gpu_node.engine import Engine
from gpu_node.errors import ToolError
from gpu_node.tool import Tool
from gpu_node.unit import UnitSteps

COLUMNS = (
    "target", "ok", "model", "stream", "prompt_tokens", "completion_tokens", "tokens_per_s", "ttft_ms", "text", "error",
    "kv_tokens",
)  # fmt: skip
MAX_TOKENS = 32
TIMEOUT_S = 120


def balancer(tool: Tool) -> Engine:
    """The node's public side, asked as its first client at its first listen address."""
    host, port = endpoint(tool.node.listen[0])
    address = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    clients = load_clients(tool.paths, tool.node.listen)
    return Engine(address, port, clients[0].key if clients else None)


def _ask(target: str, engine: Engine, model: str, stream: bool) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"target": target, "ok": False, "stream": stream}
    try:
        done = engine.complete(model, MAX_TOKENS, TIMEOUT_S, stream)
    except ToolError as error:
        return row | {"error": str(error)}
    row |= {
        "model": done.model,
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "tokens_per_s": round(done.tokens_per_s, 1),
        "ttft_ms": None if done.first_token_s is None else round(done.first_token_s * 1000, 1),
        "text": done.text,
    }
    if done.model != model:
        return row | {"error": f"answered as {done.model}, not as {model}"}
    return row | {"ok": True}


def smoke(tool: Tool) -> list[dict[str, Any]]:
    """Two rows for each target.

    A replica that is not what its release says fails with its first row, which also has what its KV cache holds.
    """
    table = []
    for replica in tool.node.replicas:
        engine = tool.engine(replica.index)
        model = tool.served(replica.index).model
        both = [_ask(f"replica {replica.index}", engine, model, stream) for stream in (False, True)]
        try:
            both[0]["kv_tokens"] = engine.kv_tokens(TIMEOUT_S)
            UnitSteps(tool, replica.index).verify(TIMEOUT_S)
        except ToolError as error:
            both[0] |= {"ok": False, "error": both[0]["error"] or str(error)}
        table += both
    # What those that are in serve; with nobody in, the balancer refuses every name.
    inside = [replica.index for replica in tool.node.replicas if not tool.reasons.of(replica.index)]
    model = tool.served(inside[0] if inside else tool.node.replicas[0].index).model
    return table + [_ask("balancer", balancer(tool), model, stream) for stream in (False, True)]


def as_text(table: list[dict[str, Any]]) -> str:
    """One line for each row."""
    lines = []
    for row in table:
        head = f"{row['target']:<12}{'streamed' if row['stream'] else 'plain':<10}"
        if row["ok"]:
            first = "" if row["ttft_ms"] is None else f", first token after {row['ttft_ms']} ms"
            lines.append(f"{head}ok    {row['completion_tokens']} tokens, {row['tokens_per_s']} tokens/s{first}")
        else:
            lines.append(f"{head}FAIL  {row['error']}")
    return "\n".join(lines)
