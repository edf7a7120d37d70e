"""The settings of the language recipe: the groups `task`, `model` and `data`."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from unisono import Data, Settings


class LanguageConfig(Settings):
    """How documents become rows."""

    sequence: Annotated[int, Field(ge=2)] = Field(
        256, description="targets per row; longer documents span several rows"
    )
    pad_to_multiple: PositiveInt = Field(
        64, description="rows of a micro-batch are padded to the longest, rounded up to this"
    )
    loss_chunk: PositiveInt = Field(1024, description="number of tokens whose logits are in memory at a time")
    prompts: list[str] = Field([], description="prompts to continue after each evaluation, by the likeliest tokens")
    prompt_tokens: PositiveInt = Field(48, description="number of tokens to continue prompts by")

    @model_validator(mode="after")
    def _check_prompts(self) -> LanguageConfig:
        if not self.prompts and self.prompt_tokens != type(self).model_fields["prompt_tokens"].default:
            raise ValueError("task.prompt_tokens has no effect without task.prompts; set them, e.g. to ['Once upon']")
        return self


class ModelGroup(Settings):
    """What all models have."""

    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = Field(
        "auto", description="attention kernel; auto: flash if installed and supported, else sdpa, flex, eager"
    )
    experts: Literal["auto", "grouped", "loop"] = Field(
        "auto", description="kernel of the experts; auto: grouped if torch has it for device and precision"
    )
    balance_weight: NonNegativeFloat = Field(
        0.0, description="weight of the load-balancing loss of a mixture of experts (Fedus et al., 2022); 0: none"
    )
    balance_over: Literal["global_batch", "row"] = Field(
        "global_batch", description="rows over which experts are balanced; global_batch needs an extra forward pass"
    )
    router_z_weight: NonNegativeFloat = Field(
        0.0, description="weight of the router z-loss of a mixture of experts (Zoph et al., 2022); 0: none"
    )


class FromConfig(ModelGroup):
    """A causal language model of the transformers library, with random weights."""

    kind: Literal["config"]
    architecture: str = Field(description="its model_type, e.g. llama, gpt2, qwen3")
    settings: dict[str, Any] = Field(
        {}, description="settings of its configuration class; vocab_size is the tokenizer's"
    )


class Pretrained(ModelGroup):
    """A causal language model from a local directory, to train on."""

    kind: Literal["pretrained"]
    path: Path = Field(description="directory with config.json and safetensors weights")


Model = Annotated[FromConfig | Pretrained, Field(discriminator="kind")]


class AllDocuments(Data):
    """Settings of all documents, however they are tokenised."""

    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.05, description="fraction of each source's documents to hold out"
    )
    verify: Literal["content", "sizes"] = Field(
        "content",
        description="check of tokenised documents before a start; content: every byte, sizes: only file sizes",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Any:
        path, sources = getattr(self, "path", None) is not None, getattr(self, "sources", None)
        if sources is not None and path == bool(sources):
            raise ValueError("set data.path, or data.sources for several by name" + (", not both" if path else ""))
        if sources and "" in sources:
            raise ValueError("data.sources: a source needs a name")
        return self


_HELD_OUT = "more held-out rows to evaluate on, by name: all that is in their files, and never trained on"

Place = Annotated[str, BeforeValidator(lambda place: fspath(place) if isinstance(place, PathLike) else place)]


class ReadOptions(Settings):
    """How files become documents."""

    pattern: str = Field("*", description="glob that file names must match")
    column: str = Field("text", description="column of the document's text in JSONL, Parquet and Arrow")
    split: str | None = Field(None, description="split of a saved DatasetDict; null: train, or the only one")
    separator: str | None = Field(
        None, description="text files: separator between documents, e.g. two line ends; null: a file is a document"
    )


class CorpusFiles(ReadOptions):
    """Where documents are."""

    path: Place | list[Place] = Field(description="file, directory, glob or URL, or a list of them")


class Documents(AllDocuments):
    """Documents that are tokenised by this run."""

    tokenizer: Path | None = Field(
        None,
        description="a tokenizer's directory or file; null: the pretrained model's, or one trained on the documents",
    )
    vocab_size: Annotated[int, Field(ge=257)] = Field(
        4096, description="vocabulary size of a tokenizer trained on the documents"
    )
    tokenise: Literal["ahead", "on_the_fly"] = Field(
        "ahead", description="ahead: once, into the cache; on_the_fly: when needed, one row per document"
    )
    too_long: Literal["stop", "cut"] = Field(
        "stop",
        description="tokenise=on_the_fly: for documents longer than task.sequence; cut: use only their beginning",
    )
    cache: Path | None = Field(
        None, description="cache for tokenised documents; null: $UNISONO_CACHE or ~/.cache/unisono"
    )
    held_out_sources: dict[str, CorpusFiles] = Field({}, description=_HELD_OUT)


class EmbeddedDocuments(Documents):
    """The example that needs no download: the source of Python's standard library, one document per module."""

    kind: Literal["embedded"]


class Corpus(Documents, ReadOptions):
    """Documents from files; several corpora in `sources`."""

    kind: Literal["corpus"]
    path: Place | list[Place] | None = Field(None, description="file, directory, glob or URL, or a list of them")
    sources: dict[str, CorpusFiles] = Field(
        {}, description="several corpora by name, instead of path; data.mixture weights them"
    )

    @property
    def files(self) -> dict[str, CorpusFiles]:
        """Where the documents of each source are; the only one is called ''."""
        if self.sources:
            return dict(self.sources)
        assert self.path is not None
        return {"": CorpusFiles(**{name: getattr(self, name) for name in CorpusFiles.model_fields})}


class ConversationFiles(Settings):
    """Where conversations are."""

    path: Place | list[Place] = Field(description="file, directory, glob or URL, or a list of them")
    pattern: str = Field("*", description="glob that file names must match")
    split: str | None = Field(None, description="split of a saved DatasetDict; null: train, or the only one")


TooLong = Literal["stop", "cut", "leave_out"]
_TOO_LONG = (
    "for conversations longer than a row; stop: refuse, cut: use only their beginning, leave_out: train without them"
)


class Chat(AllDocuments):
    """Conversations: rows with `messages`, or with `prompt` and `completion`; several data sets in `sources`."""

    kind: Literal["chat"]
    path: Place | list[Place] | None = Field(None, description="file, directory, glob or URL, or a list of them")
    pattern: str = Field("*", description="glob that file names must match")
    split: str | None = Field(None, description="split of a saved DatasetDict; null: train, or the only one")
    sources: dict[str, ConversationFiles] = Field(
        {}, description="several data sets by name, instead of path; data.mixture weights them"
    )
    tokenizer: Path | None = Field(
        None, description="a tokenizer's directory, with its chat template; null: the pretrained model's"
    )
    chat_template: Path | None = Field(None, description="file with a chat template in Jinja; null: the tokenizer's")
    template_settings: dict[str, Any] = Field({}, description="what else the template reads, e.g. enable_thinking")
    loss_on: Literal["assistant", "completion", "all"] = Field(
        "assistant",
        description="tokens that the loss counts; assistant: of all its turns, and with prompt and completion those of "
        "the completion; completion: all after the prompt; all: every token",
    )
    too_long: TooLong = Field("stop", description=_TOO_LONG)
    cache: Path | None = Field(
        None, description="cache for tokenised conversations; null: $UNISONO_CACHE or ~/.cache/unisono"
    )
    held_out_sources: dict[str, ConversationFiles] = Field({}, description=_HELD_OUT)

    @property
    def files(self) -> dict[str, ConversationFiles]:
        """Where the conversations of each source are; the only one is called ''."""
        if self.sources:
            return dict(self.sources)
        assert self.path is not None
        return {"": ConversationFiles(path=self.path, pattern=self.pattern, split=self.split)}


class Preferences(Chat):
    """Pairs of answers, of which one was chosen: rows with `prompt`, `chosen` and `rejected`."""

    kind: Literal["preferences"]  # type: ignore[assignment]
    loss_on: Literal["completion"] = Field(
        "completion", description="tokens whose log-probabilities count: the answer's"
    )
    beta: Annotated[float, Field(gt=0.0)] = Field(
        0.1, description="how strongly the model is held to the one that it began with"
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = Field(
        0.0, description="probability that a choice was a mistake (conservative DPO)"
    )
    reference_precision: Literal["fp32", "fp64"] = Field(
        "fp32", description="precision in which the model that the run began with is asked, once"
    )


class PreparedFolder(Settings):
    """The folder of prepared documents."""

    path: Path = Field(description="folder created by `unisono data prepare`")


class PreparedDocuments(AllDocuments):
    """Documents tokenised by `unisono data prepare`, here or elsewhere."""

    kind: Literal["prepared"]
    path: Path | None = Field(None, description="folder created by `unisono data prepare`")
    too_long: TooLong = Field("stop", description=_TOO_LONG)
    sources: dict[str, PreparedFolder] = Field(
        {}, description="several by name, instead of path; data.mixture weights them"
    )
    held_out_sources: dict[str, PreparedFolder] = Field({}, description=_HELD_OUT)

    @property
    def folders(self) -> dict[str, Path]:
        """Where each source is; the only one is called ''."""
        if self.sources:
            return {name: ready.path for name, ready in self.sources.items()}
        assert self.path is not None
        return {"": self.path}


LanguageData = Annotated[
    EmbeddedDocuments | Corpus | Chat | Preferences | PreparedDocuments, Field(discriminator="kind")
]
