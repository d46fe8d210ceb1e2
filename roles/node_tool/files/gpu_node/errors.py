"""The errors of this tool. Each one's text is shown as it is: it names the thing, the value and the remedy."""


class ToolError(Exception):
    """Any error that this tool expects and explains."""


class ConfigError(ToolError):
    """A file of the configuration, a release or a key is missing or wrong."""


class LockedError(ToolError):
    """Another process holds a lock that this one needs."""


class BalancerError(ToolError):
    """nginx refused the configuration or did not take it over."""


class EngineError(ToolError):
    """The engine did not answer as an OpenAI-compatible server that generates should."""


class ParseError(ToolError):
    """A text that the kernel or the engine gave does not have the documented form."""


class GateError(ToolError):
    """A check that has to pass before the next step did not."""


class RefusedError(ToolError):
    """What was asked for may not begin; nothing was changed."""


class StoppedError(Exception):
    """Somebody stops what this step was to start. No ToolError: nothing may take it for a failure and go on."""
