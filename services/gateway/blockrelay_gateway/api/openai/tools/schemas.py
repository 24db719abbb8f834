"""The bodies of tools and tool calls as pydantic models."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from blockrelay_gateway.api.common_schemas import Strict


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 letters, digits, `_` and `-`")
    description: str | None = Field(default=None, description="for the model")
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of its arguments, an object; default: it takes none"
    )
    strict: bool | None = Field(default=None, description="arguments always fit the schema, with it or without")


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = Field(description="a JSON object as text")


class ToolCall(Strict):
    """A call of an assistant's message."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
