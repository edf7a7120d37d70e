"""Next-token prediction on documents and conversations, with any causal language model of the transformers library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import Batch, Callback, ConfigError, Context, Loss, SampleContext, Source, Task
from unisono.recipe_tools import has_content, real_tensors, safe_paths, write_whole
from unisono_language import losses, settings
from unisono_language.data import by_source, chat, library, preferences
from unisono_language.data.by_source import SourceRow
from unisono_language.data.chat import IGNORED, ChatTemplate
from unisono_language.data.library import Library
from unisono_language.data.preferences import Pair
from unisono_language.data.tokenizer import BESIDE, FILE, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono_language.data.packed import PackedRow
    from unisono_language.data.tokens import TokenisePreparation
    from unisono_language.evaluation.environment import Environment
    from unisono_language.evaluation.harness import Harness
    from unisono_language.kernels import Kernels

_LARGEST_ASKED = 1_000_000  # parameters of a model that is built with content only to be asked


class Language(Task):
    """A causal language model and its documents.

    The loss has the term `next_token`: summed cross-entropy in nats over all targets that are not padding; of
    conversations, over those that `data.loss_on` names. Mixtures of experts can have two more, which guide their
    routers and count every token: `balance` and `router_z`.
    """

    Config = settings.LanguageConfig
    Model = settings.Model
    Data = settings.LanguageData

    config: settings.LanguageConfig
    model_config: settings.FromConfig | settings.Pretrained
    data_config: settings.Documents | settings.Chat | settings.PreparedDocuments
    _assets: Path | None = None  # of the run that is used
    _played: list[dict[str, Any]] | None = None  # answers in the environment, of the newest evaluation

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Count FLOPs now, since torch's default dtype differs while a model is built."""
        _ = self._flops

    def data(self) -> Source | Mapping[str, Source]:
        """Rows of the training documents, which are whole where rows are packed; of several corpora, by name."""
        rows: Mapping[str, Source] = (
            self._pairs[0] if self.library.in_pairs else self.library.training(whole=self._is_packed)
        )
        return rows.get(library.SINGLE_SOURCE, rows)

    def held_out(self) -> Source | None:
        """Rows of the held-out documents, one corpus after the other; of several, each row knows its own."""
        return by_source.join_sources(self._pairs[1] if self.library.in_pairs else self.library.held_out())

    def sample(self, record: Any, context: SampleContext) -> NDArray[np.int64] | Pair | SourceRow:
        """The tokens of a row, or of both answers of a pair; documents are tokenised on the fly if asked for."""
        if isinstance(record, SourceRow):
            return SourceRow(self.sample(record.content, context), record.source)
        if isinstance(record, library.Document):
            assert isinstance(self.data_config, settings.Documents)
            return library.tokenise_document(record, self.library, self.data_config.too_long)
        return record if isinstance(record, Pair) else np.asarray(record)

    def preparation(self) -> dict[str, tuple[TokenisePreparation, Path]]:
        """The corpora to tokenise ahead."""
        return library.preparations(self.data_config, self._tokenizer_of_model)

    @property
    def capacity(self) -> int:
        """Targets of a packed row."""
        return self.config.sequence

    def length(self, sample: NDArray[np.int64]) -> int:
        """Targets of a document."""
        return max(0, len(sample) - 1)

    def cut(self, sample: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
        """A document's targets `first..last-1` and the token before them, so that no target is lost at a cut."""
        return sample[first : last + 1]

    def pack(self, samples: Sequence[NDArray[np.int64]]) -> PackedRow:
        """Documents in one row."""
        from unisono_language.data import packed

        return packed.pack_row(samples)

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Rows to `inputs` and `targets`, both (rows, length) int64; padding is 0 in inputs and ignored in targets.

        Packed rows have `positions`, too, which begin at 0 with each document; padding is a document of its own. Rows
        of conversations have `real`, which is false in padding only; ignored targets are context there, too. Pairs have
        two rows each, (pairs, 2, length), and `reference`. Held-out rows of several sources have `source`, its number.
        """
        if isinstance(samples[0], SourceRow):
            numbers = np.array([one.source for one in samples], dtype=np.int64)
            return {**self.collate([one.content for one in samples]), by_source.SOURCE: numbers}
        if isinstance(samples[0], Pair):
            return preferences.collate([one for one in samples if isinstance(one, Pair)], self.config.pad_to_multiple)
        from unisono_language.data import packed

        rows = [self.pack([one]) if isinstance(one, np.ndarray) else one for one in samples]
        batch = packed.pad_rows(rows, self.config.pad_to_multiple)
        if self.chat is not None:
            batch["real"] = np.arange(batch["inputs"].shape[1]) < np.array([[len(row.inputs)] for row in rows])
        if isinstance(samples[0], np.ndarray):
            del batch["positions"]
        return batch

    def counts(self, batch: Batch) -> dict[str, float]:
        """Targets of the loss, or pairs; of routers, the tokens that are not padding."""
        if "reference" in batch:
            return {"preference": float(len(batch["reference"]))}
        routed = dict.fromkeys(self._router_weights, float(_real_tokens(batch).sum()))
        return {"next_token": float((batch["targets"] != IGNORED).sum()), **routed}

    def work(self, batch: Batch) -> dict[str, float]:
        """Tokens, and the FLOPs of a forward and backward pass over them; padding is no work.

        A third of what a weight is multiplied with is its own gradient.
        """
        real = _real_tokens(batch)
        positions = batch.get("positions", np.arange(real.shape[-1]))
        constant, per_length = self._flops
        squares = (real * (2 * positions + 1)).sum()  # 1 + 3 + 5 + … is the square of a document's length
        products = float(constant * real.sum())
        return {
            "tokens": float(real.sum()), "flops": products + float(per_length * squares), "weight_flops": products / 3,
        }  # fmt: skip

    # model and loss ---------------------------------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The model with the chosen kernels; also checks whether its head can be applied in chunks."""
        from unisono_language import model as models
        from unisono_language.data import packed

        model = models.build_model(self.model_config, self.tokenizer.size, saved=self._assets)
        if has_content(model):
            if self._is_packed:
                packed.check_isolation(model, flash=self._kernels.attention == "flash")
            self._uses_chunks = models.head_is_linear(model)
        self._kernels.use(model)
        return model

    def outputs(self, model: Any, batch: Batch, context: Context) -> dict[str, Any]:
        """Hidden states (rows, length, width) and the head; or logits, from models that do more than multiply.

        Of pairs, rows are the chosen and the rejected answer of each, one after the other.

        Rows are padded at their ends and attention is causal, so no real token sees padding and no mask is needed.
        Positions keep the documents of a packed row apart.
        """
        head = model.get_output_embeddings()
        # A head with an adapter is more than one matrix product, too.
        whole = not self._uses_chunks or hasattr(head, "base_layer")
        inputs = {"input_ids": batch["inputs"].reshape(-1, batch["inputs"].shape[-1]), "use_cache": False}
        if "positions" in batch:
            from unisono_language.data import packed

            inputs["position_ids"] = batch["positions"]
            if self._kernels.attention == "flash":
                inputs |= packed.flash_borders(batch["positions"])
        guided = bool(self._router_weights) and context.training
        if guided:
            inputs["output_router_logits"] = True
        made = (model if whole else model.base_model)(**inputs)
        router = {}
        if guided:
            import torch

            rows, length = batch["inputs"].shape
            router["router"] = torch.stack([logits.view(rows, length, -1) for logits in made.router_logits], dim=2)
        if whole:
            return {"logits": made.logits, **router}
        return {"hidden": made.last_hidden_state, "weight": head.weight, "bias": head.bias, **router}

    def loss(self, outputs: dict[str, Any], batch: Batch, context: Context) -> Loss:
        """Summed cross-entropy; in evaluation also the share of correct predictions. Of pairs, the loss of DPO."""
        if by_source.SOURCE in batch and not context.training:
            return by_source.split_loss(self, outputs, batch, context, self.held_out_names)
        if "reference" in batch:
            assert isinstance(self.data_config, settings.Preferences)
            beta, smoothing = self.data_config.beta, self.data_config.label_smoothing
            found = losses.log_probabilities(outputs, batch, self.config.loss_chunk)
            return preferences.loss(found, batch["reference"], beta, smoothing)
        targets = batch["targets"].reshape(-1)
        total, right = losses.sum_cross_entropy(outputs, targets, self.config.loss_chunk)
        if not context.training:
            return losses.with_metrics(total, right, targets, self.tokenizer.token_bytes)
        if not self._router_weights:
            return Loss({"next_token": total})
        logits, real, per_token = outputs["router"], _real_tokens(batch), self._experts_per_token
        if self.needs_totals:
            counts = context.totals["routed"][None]  # of the global batch
        else:
            from unisono_language import experts

            counts = experts.count_routed(logits, real, per_token)
        return losses.with_routers(total, logits, real, counts, self._router_weights, per_token)

    def summary(self, values: Mapping[str, float]) -> dict[str, float]:
        """With the perplexity beside each loss."""
        return by_source.summarise(values, self.library.in_pairs)

    def inference_inputs(self, batch: Batch) -> Batch:
        """`input_ids` (rows, length), padded at their ends, of documents or of both answers of pairs."""
        return {"input_ids": batch["inputs"].reshape(-1, batch["inputs"].shape[-1])}

    def infer(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`logits` (rows, length, vocabulary) of the next tokens; padding after a text changes none of its own."""
        return {"logits": model(input_ids=inputs["input_ids"], use_cache=False).logits}

    def predictions(self, outputs: dict[str, Any], batch: Batch) -> dict[str, list[float]]:
        """For each row: number of targets, nats per target, and accuracy; for each pair, its log-probabilities."""
        if "reference" in batch:
            assert isinstance(self.data_config, settings.Preferences)
            found = losses.log_probabilities(outputs, batch, self.config.loss_chunk)
            return preferences.predictions(found, batch["reference"], self.data_config.beta)
        return losses.predictions(outputs, batch, self.config.loss_chunk)

    @property
    def held_out_names(self) -> list[str]:
        """The names of the sources that an evaluation tells apart."""
        parts = [name for name, (_, held) in self.library.split.items() if len(held)]
        return [name or by_source.SINGLE for name in parts]

    @property
    def needs_totals(self) -> bool:
        """Whether experts are balanced over the global batch."""
        return self.model_config.balance_weight > 0 and self.model_config.balance_over == "global_batch"

    def totals(self, outputs: dict[str, Any], batch: Batch, context: Context) -> dict[str, Tensor]:
        """Number of tokens of these rows routed to each expert, (layers, experts)."""
        from unisono_language import experts

        routed = experts.count_routed(outputs["router"], _real_tokens(batch), self._experts_per_token)
        return {"routed": routed.sum(0)}

    @cached_property
    def _pairs(self) -> tuple[dict[str, preferences.PairRows], dict[str, preferences.PairRows]]:
        """Pairs to train on, and held out, by source."""
        assert isinstance(self.data_config, settings.Preferences)
        return preferences.pair_rows(self.library, self.data_config, self.model_config)

    @property
    def _is_packed(self) -> bool:
        return self.data_config.packing is not None

    @cached_property
    def _router_weights(self) -> dict[str, float]:
        """Weights of the router losses; empty if there are none."""
        weights = {"balance": self.model_config.balance_weight, "router_z": self.model_config.router_z_weight}
        return {name: weight for name, weight in weights.items() if weight}

    @cached_property
    def _experts_per_token(self) -> int:
        return int(getattr(self._skeleton.config.get_text_config(), "num_experts_per_tok", 0))

    # around the run ---------------------------------------------------------------------------------------------

    def callbacks(self) -> list[Callback]:
        """What continues the prompts of the settings."""
        from unisono_language.evaluation.prompts import PromptSamples

        return [PromptSamples(self)] if self.config.prompts else []

    def harness(self, names: Sequence[str], limit: int | None) -> Harness:
        """Tasks of lm-eval, by name or in YAML files."""
        from unisono_language.evaluation.harness import Harness

        found = Harness(self.tokenizer, self.config.sequence, names, limit)
        found.check()
        return found

    def environment(self, name: str, limit: int | None) -> Environment:
        """A taskset of verifiers; it asks in conversations."""
        from unisono_language.evaluation.environment import open_environment

        given = getattr(self.data_config, "tokenizer", None) or self._tokenizer_of_model
        self._played = []
        return open_environment(name, limit, self.chat, given, self._played)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> dict[str, Any] | None:
        """What the model has answered in the environment."""
        return {"environment": list(self._played)} if self._played else None

    def check(self) -> None:
        """The model's settings or directory, against the tokenizer."""
        from unisono_language import experts
        from unisono_language import model as models
        from unisono_language.data import packed

        models.check_model(self.model_config, self.tokenizer.size)
        self.library.check()
        if self.library.in_pairs and (self._is_packed or self._router_weights):
            given = "data.packing" if self._is_packed else "model.balance_weight and model.router_z_weight"
            raise ConfigError(f"data=preferences trains on pairs of rows, for which there is no {given}; leave it out")
        if self._is_packed:
            packed.check_positions(self._skeleton)
            packing = self.data_config.packing
            if self.chat is not None and packing is not None and packing.method == "concatenate":
                raise ConfigError(
                    "data.packing.method=concatenate cuts conversations where a row is full, so that answers would "
                    "lose what they answer; use online or offline"
                )
        if self._router_weights:
            experts.check_router(self._skeleton)

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        """The kernels of attention and experts; `build` uses them."""
        from unisono_language import kernels

        self._kernels = kernels.select_kernels(self.model_config, self._skeleton, device, precision)
        return self._kernels.describe

    def facts(self) -> dict[str, Any]:
        """Sizes of the corpora, and the loss of a model that knows only how frequent tokens are."""
        return self.library.facts()

    def data_warnings(self) -> list[str]:
        """Documents without a text."""
        return list(self.library.warnings())

    def save_assets(self, directory: Path) -> None:
        """The tokenizer and the model's configuration, so that the run can be used without its corpus."""
        from unisono_language import model as models
        from unisono_language.generate import write_generation_config

        self.tokenizer.save(directory)
        given = getattr(self.data_config, "tokenizer", None) or self._tokenizer_of_model
        beside = [] if given is None else [(given if given.is_dir() else given.parent) / name for name in BESIDE]
        if isinstance(self.model_config, settings.Pretrained):
            beside.append(self.model_config.path / "generation_config.json")
        for path in beside:  # for those who export the run
            if path.is_file():  # the folder of a model may be anybody's, and an export publishes what is copied here
                (directory / path.name).write_bytes(safe_paths.read_bytes(path.parent, path.name))
        if self.tokenizer.path.is_file():  # as it is written, where `save` writes its rules
            (directory / FILE).write_bytes(safe_paths.read_regular(self.tokenizer.path))
        models.check_model(self.model_config, self.tokenizer.size).save_pretrained(directory)
        if self.chat is not None:
            write_generation_config(directory, self.tokenizer, self.chat)
            write_whole(directory / chat.ASSET, json.dumps(self.chat.describe))
            if self.chat.source and self.chat.source == self.chat.source_with_tools:  # else the files have both
                write_whole(directory / chat.TEMPLATE_FILE, self.chat.source)

    def load_assets(self, directory: Path) -> None:
        """The tokenizer, and the configuration of a model whose directory may no longer exist."""
        self.tokenizer, self._assets = Tokenizer.load(directory), directory
        found = (directory / chat.ASSET).is_file()
        values = safe_paths.read_json(directory, chat.ASSET, dict[str, Any]) if found else None
        self.chat = ChatTemplate.from_json(values, directory) if found else None

    def shrink(self, limit: int) -> Language | None:
        """The same documents, read by the same tokenizer, and a small model of the same architecture."""
        from unisono_language.shrink import shrink_config

        model = shrink_config(self.model_config, self.tokenizer.size, limit)
        if model is None:
            return None
        data = self.data_config
        if isinstance(data, settings.Preferences):
            return None  # a small model has no reference
        if isinstance(data, settings.Documents | settings.Chat):
            data = data.model_copy(update={"tokenizer": data.tokenizer or self._tokenizer_of_model})
        return Language(self.config, model=model, data=data)

    @cached_property
    def library(self) -> Library:
        """The documents; a trained run reads them with its own tokenizer."""
        of_run, chat_of_run = (None, None) if self._assets is None else (self.tokenizer, self.chat)
        return library.open_library(
            self.data_config, self.config.sequence, self._tokenizer_of_model, of_run, chat_of_run
        )

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The template of conversations; None for documents. For a run, the one among its assets."""
        return None if isinstance(self.data_config, settings.Documents) else self.library.chat

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the documents; for a run, the one among its assets."""
        given = getattr(self.data_config, "tokenizer", None) or self._tokenizer_of_model
        if given is None or isinstance(self.data_config, settings.PreparedDocuments):
            return self.library.tokenizer
        return load_tokenizer(given)  # needs no documents

    @cached_property
    def _flops(self) -> tuple[float, float]:
        """FLOPs per token."""
        from unisono_language import model as models

        return models.flops_per_token(self._skeleton)

    @cached_property
    def _skeleton(self) -> Any:
        """A copy of the model that has shapes but no numbers."""
        import torch

        from unisono_language import model as models

        with torch.device("meta"):
            return models.build_untrained(self.model_config, self.tokenizer.size, self._assets)

    @cached_property
    def _kernels(self) -> Kernels:
        """The chosen kernels; by default for a CPU in fp32."""
        from unisono_language import kernels

        return kernels.select_kernels(self.model_config, self._skeleton, "cpu", "fp32")

    @cached_property
    def _uses_chunks(self) -> bool:
        """Whether the head can be applied in chunks; `build` has already asked a model that has content.

        Of one without, a small model of the same architecture is asked.
        """
        from unisono_language import model as models
        from unisono_language.shrink import shrink_config

        with real_tensors():
            small = shrink_config(self.model_config, self.tokenizer.size, _LARGEST_ASKED) or self.model_config
            return models.head_is_linear(models.build_untrained(small, self.tokenizer.size, self._assets))

    @property
    def _tokenizer_of_model(self) -> Path | None:
        return self.model_config.path if isinstance(self.model_config, settings.Pretrained) else None


def _real_tokens(batch: Batch) -> Any:
    """The tokens of a batch that are not padding, (rows, length)."""
    return batch["real"] if "real" in batch else batch["targets"] != IGNORED
