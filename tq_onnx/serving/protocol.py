"""What OpenAI's clients send and read: requests, and errors.

A field is declared once. The declaration checks requests, is the OpenAPI document, and makes the
sentence of a refusal: the description of a field says what it takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

INT32 = 2**31 - 1
MOST_CHOICES = 64
"""Answers of a request, each computed as a request of its own."""
BODY = "the body takes a JSON object in UTF-8, with Content-Type: application/json"
NO_LOGPROBS = "as onnxruntime-genai's Engine gives no probabilities of tokens"
SHOWN = 60
"""Characters of a name in a message."""

Zero = Annotated[float, Field(ge=0, le=0)]
Empty = Field(max_length=0)
Stop = Annotated[str, Field(min_length=1)]
Prompt = str | list[int]


class Fields(BaseModel):
    """Fields of exact types. Others are refused, and not passed over in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Fields):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A message of a chat. Other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: str = Field(description="a text, such as user")
    content: str | list[TextPart] | None = Field(
        None,
        validate_default=True,
        description='a text, or a list of {"type": "text", "text": ...}, or null of an assistant',
    )

    @field_validator("content")
    @classmethod
    def _only_assistants_say_nothing(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError
        return content

    def for_template(self) -> dict[str, Any]:
        """Return the message with its text in one piece."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        extra = {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }
        if isinstance(extra.get("tool_calls"), list):
            extra["tool_calls"] = [_with_arguments(call) for call in extra["tool_calls"]]
        return {**extra, "role": self.role, "content": text}


def _with_arguments(call: Any) -> Any:
    """Return a call as templates take it, with arguments that are no text of JSON."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class StreamOptions(Fields):
    """What a stream tells besides text."""

    include_usage: bool = Field(False, description="true or false")
    include_obfuscation: bool = Field(False, description="true or false")


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class Named(Fields):
    """The name of a function."""

    name: str


class ToolChoice(Fields):
    """The tool that the model has to use."""

    type: Literal["function"]
    function: Named


class Schema(Fields):
    """A JSON schema of answers."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Format(Fields):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError
        return self

    @property
    def schema_of_answers(self) -> dict[str, Any] | None:
        """The JSON schema, if there is one."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(Fields):
    """What requests have in common. A field that is null counts as left out."""

    model: str = Field(description="the name of the model")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description=f"1 to {INT32}")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: float | None = Field(None, ge=1e-6, le=1, description="a number from 1e-6 to 1")
    top_k: int | None = Field(None, ge=0, le=INT32, description=f"0 (for all) to {INT32}")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        None, description="a text, or a list of up to 4 texts, none of them empty"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="0 to 2^63 - 1")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}')
    # Nothing depends on these.
    user: str | None = Field(None, description="a text")
    safety_identifier: str | None = Field(None, description="a text")
    prompt_cache_key: str | None = Field(None, description="a text")
    store: bool | None = Field(None, description="true or false")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    service_tier: Literal["auto", "default"] | None = Field(None, description='"auto"')
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description=f"1 to {MOST_CHOICES}")
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="a number above 0, to 100"
    )
    # Front ends send these with the value that asks for nothing.
    frequency_penalty: Zero | None = Field(None, description="0, as no penalties are computed")
    presence_penalty: Zero | None = Field(None, description="0, as no penalties are computed")
    min_p: Zero | None = Field(None, description="0, as the Engine has no min-p")
    logit_bias: Annotated[dict[str, float], Empty] | None = Field(
        None, description="an empty object, as logits are not changed"
    )
    response_format: Format | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}}}',
    )
    regex: str | None = Field(
        None, min_length=1, description="an expression that the whole answer matches"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None}
        # The first unknown field is named; explaining thousands of them takes a second.
        unknown = {name: None for name in fields if name not in cls.model_fields}
        first = next(iter(unknown), None)
        return {
            name: value for name, value in fields.items() if name == first or name not in unknown
        }

    @property
    def stops(self) -> list[str]:
        """Texts before which an answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def text_fields(self) -> dict[str, Any]:
        """What the answer has to look like, by the field that says so."""
        schema = None if self.response_format is None else self.response_format.schema_of_answers
        values = {"response_format": schema, "regex": self.regex}
        return {name: value for name, value in values.items() if value is not None}


class ChatRequest(GenerationRequest):
    """A chat completion."""

    messages: Annotated[list[Message], FailFast()] = Field(
        min_length=1, description="a list of one message or more, each with a role and a content"
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32, description=f"1 to {INT32}")
    tools: list[Tool] | None = Field(
        None,
        max_length=128,
        description='a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        ", with names of 1 to 64 letters, digits, _ and -",
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None,
        description='"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    logprobs: Literal[False] | None = Field(None, description=f"false, {NO_LOGPROBS}")
    top_logprobs: Zero | None = Field(None, description=f"0, {NO_LOGPROBS}")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = Field(
        None, description='["text"], as answers are texts'
    )

    @property
    def most(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == name]
        return self.tools or []

    @property
    def has_to_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")


class CompletionRequest(GenerationRequest):
    """A completion of a text."""

    prompt: Prompt | Annotated[list[Prompt], Field(max_length=MOST_CHOICES)] = Field(
        description=f"a text, a list of token ids, or a list of up to {MOST_CHOICES} of either"
    )
    max_tokens: int | None = Field(16, ge=1, le=INT32, description=f"1 to {INT32}")
    best_of: Literal[1] | None = Field(None, description="1, as all answers are sent")
    echo: Literal[False] | None = Field(None, description="false, as prompts are not sent back")
    logprobs: Zero | None = Field(None, description=f"0 or null, {NO_LOGPROBS}")
    suffix: Annotated[str, Empty] | None = Field(
        None, description="an empty text, as nothing is inserted"
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _has_few_mistakes(cls, prompt: Any) -> Any:
        # Pydantic explains each of them, which takes seconds for many.
        if isinstance(prompt, list) and not _are_ids(prompt):
            texts_or_ids = (isinstance(each, str) or _are_ids(each) for each in prompt)
            if len(prompt) > MOST_CHOICES or not all(texts_or_ids):
                raise ValueError
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each to be continued."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts_or_ids = [each for each in self.prompt if not isinstance(each, int)]
        # An empty list is a prompt without tokens, which the Engine refuses.
        return texts_or_ids or [[each for each in self.prompt if isinstance(each, int)]]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


NESTED: Final[dict[str, type[BaseModel]]] = {"messages": Message, "stream_options": StreamOptions}


class RequestError(Exception):
    """A request that cannot be answered as it is.

    Attributes:
        status: of HTTP.
        param: the field, if it is one.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Make an error; see the class for arguments."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def explained(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """Return the first of pydantic's errors in a sentence that says what the field takes."""
    error = errors[0]
    path = list(error["loc"])[1:]
    if error["type"] == "json_invalid" or not path:
        return RequestError(BODY)
    place: list[str] = []
    takes, fields = "", {**CompletionRequest.model_fields, **ChatRequest.model_fields}
    for part in path:
        if part in fields:
            takes = fields[part].description or ""
            fields = NESTED[part].model_fields if part in NESTED else {}
        elif not isinstance(part, int):  # an unknown field, or a member of a union
            break
        place.append(str(part))
    if error["type"] == "extra_forbidden" and len(place) >= len(path) - 1:
        param = ".".join([*place[: len(path) - 1], shown(path[-1])])
        return RequestError(f"{param} is not known here; leave it out", param=param)
    param = ".".join(place)
    if error["type"] == "missing" and len(place) == len(path):
        return RequestError(f"{param} is missing; it takes {takes}", param=param)
    return RequestError(f"{param} takes {takes}; change it or leave it out", param=param)


def shown(name: str) -> str:
    """Return a client's text for a message: short, and of printable characters."""
    short = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
    return ascii(short)[1:-1]


class Document(JSONResponse):
    """JSON in ASCII, which any text can be written in: half a surrogate pair is no UTF-8."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def failure(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(error: RequestError) -> Document:
    """Return the response to a request that cannot be answered."""
    content = failure(str(error), error.status, error.param, error.code)
    return Document(content, error.status, error.headers)
