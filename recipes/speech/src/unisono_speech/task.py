"""Speech from text: an audio language model that predicts text and delayed codes of sound, place by place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import Batch, Callback, ConfigError, Context, Loss, SampleContext, Source, Task
from unisono.recipe_tools import safe_paths
from unisono_speech import settings
from unisono_speech.codec import Codec, KMeansCodec
from unisono_speech.data import labels, library, tokens
from unisono_speech.data.labels import IGNORED, Row, Stream
from unisono_speech.data.library import CodeStore, Library, Sample
from unisono_speech.data.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXT = "text"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


class Speech(Task):
    """An audio language model and its conversations.

    The loss has the terms `text` and `codebook_0`, `codebook_1`, …: summed cross-entropies in nats, each with its own
    count. With weights of 1 it is the loss of transformers' own model on a sample.
    """

    Config = settings.SpeechConfig
    Model = settings.Model
    Data = settings.AnyData

    config: settings.SpeechConfig
    model_config: settings.FromConfig | settings.Pretrained
    data_config: settings.SpeechData
    _assets: Path | None = None  # of the run that is used

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Fit or open the codec now, which samples and the model share."""
        _ = self.codec

    def data(self) -> Source:
        """The samples to learn from."""
        return self.library.training()

    def held_out(self) -> Source | None:
        """The samples kept apart."""
        return self.library.held_out()

    def sample(self, record: Sample, context: SampleContext) -> Row:
        """A sample as ids, codes and labels; each of its recordings is read once."""
        conversation = self.library.conversation(record, context)
        return labels.row_of(conversation, self.tokens, self.stream, self.codes)

    def collate(self, samples: Sequence[Row]) -> Batch:
        """Rows to arrays, padded at their ends.

        `ids` and `text` (rows, length) int64: ids and, of each place, the id to be predicted there. `audio` (rows,
        length, codebooks): the codes to be predicted. `frames` (rows, frames, codebooks) and `real` (rows, frames): the
        frames that stand at the audio places of a row, in order. Targets are -100 where nothing is.
        """
        multiple = self.config.pad_to_multiple
        length = -(-max(len(row.ids) for row in samples) // multiple) * multiple
        most = max(1, *(len(row.frames) for row in samples))
        books = self.stream.codebooks
        batch = {
            "ids": np.full((len(samples), length), self.tokens.ids[tokens.PAD], dtype=np.int64),
            "text": np.full((len(samples), length), IGNORED, dtype=np.int64),
            "audio": np.full((len(samples), length, books), IGNORED, dtype=np.int64),
            "frames": np.full((len(samples), most, books), self.stream.end, dtype=np.int64),
            "real": np.zeros((len(samples), most), dtype=bool),
        }
        for number, row in enumerate(samples):
            text, audio = self.targets(row)
            batch["ids"][number, : len(row.ids)] = row.ids
            batch["text"][number, : len(text)] = text
            batch["audio"][number, : len(audio)] = audio
            batch["frames"][number, : len(row.frames)] = row.frames
            batch["real"][number, : len(row.frames)] = True
        return batch

    def targets(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The label of each place of a row: what comes next."""
        return labels.next_targets(row, self.tokens)

    def counts(self, batch: Batch) -> dict[str, float]:
        """Targets of each term."""
        audio = (batch["audio"] != IGNORED).sum((0, 1))
        made = {name: float(count) for name, count in zip(self.audio_terms, audio, strict=True)}
        return ({TEXT: float((batch["text"] != IGNORED).sum())} if self.text_head else {}) | made

    def work(self, batch: Batch) -> dict[str, float]:
        """Tokens of text and frames of sound, without padding."""
        frames = float(batch["real"].sum())
        text = float((batch["ids"] != self.tokens.ids[tokens.PAD]).sum()) - frames
        return {"tokens": text + frames, "frames": frames}

    # model and loss ---------------------------------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The model."""
        from unisono_speech import model

        return model.build(self.model_config, self.settings, self.text_head, self._assets)

    def outputs(self, model: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Of each row and term, nats and how many targets the model would have chosen itself, both (rows, terms).

        Heads are applied where there are targets only. Rows are padded at their ends and attention is causal, so no
        real place sees padding and no mask is needed. A micro-batch without audio passes through the same layers,
        empty.
        """
        import torch

        hidden = model.model(
            input_ids=batch["ids"], audio_input_ids=batch["frames"], audio_input_ids_mask=batch["real"], use_cache=False
        ).last_hidden_state
        rows = len(hidden)
        nats, right = [], []
        if self.text_head:
            chosen = batch["text"] != IGNORED
            logits = model.text_lm_head(hidden[chosen])
            columns = _scores(logits[:, None], batch["text"][chosen][:, None], chosen, rows)
            nats.append(columns[0])
            right.append(columns[1])
        chosen = (batch["audio"] != IGNORED).any(-1)
        logits = model.audio_lm_head(hidden[chosen]).unflatten(-1, (self.stream.codebooks, -1))
        columns = _scores(logits, batch["audio"][chosen], chosen, rows)
        nats.append(columns[0])
        right.append(columns[1])
        if not context.training:
            self._keep(logits, batch, chosen)
        return {"nats": torch.cat(nats, 1), "right": torch.cat(right, 1)}

    def loss(self, outputs: dict[str, Tensor], batch: Batch, context: Context) -> Loss:
        """Summed cross-entropies, and the share of targets that are the most likely prediction."""
        names = [TEXT] * self.text_head + self.audio_terms
        # No `unbind`: its views would be outputs of the wrapped module, of which FSDP2 warns.
        sums = {name: outputs["nats"][:, number].sum() for number, name in enumerate(names)}
        right = dict(zip(names, outputs["right"].sum(0).unbind(), strict=True))
        counts = (batch["audio"] != IGNORED).sum((0, 1))
        metrics: dict[str, tuple[Any, Any]] = {
            "accuracy": (sum(right[name] for name in self.audio_terms), counts.sum()),
        }
        if not context.training:
            metrics |= {
                f"accuracy/{name}": (right[name], count) for name, count in zip(self.audio_terms, counts, strict=True)
            }
            if self.text_head:
                metrics["accuracy/text"] = (right[TEXT], (batch["text"] != IGNORED).sum())
        return Loss(sums, self._weights, metrics)

    def predictions(self, outputs: dict[str, Tensor], batch: Batch) -> dict[str, list[float]]:
        """Of each row its audio targets, the nats of each, and the share that the model would have chosen itself."""
        first = int(self.text_head)
        counts = np.asarray((batch["audio"] != IGNORED).sum((1, 2)), dtype=np.float64)
        nats, right = (outputs[name][:, first:].sum(1).cpu().numpy() for name in ("nats", "right"))
        each = np.maximum(1, counts)
        return {
            "targets": counts.tolist(), "nats_per_target": (nats / each).tolist(), "accuracy": (right / each).tolist(),
        }  # fmt: skip

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Data, codec, tokenizer and model against each other."""
        given = self.config.audio_weights
        if isinstance(given, list) and len(given) != self.codec.codebooks:
            raise ConfigError(
                f"task.audio_weights has {len(given)} weights, and the codec {self.codec.codebooks} codebooks; give "
                "one number, or one for each codebook"
            )
        if not any(self._weights.values()):
            raise ConfigError("task.text_weight and task.audio_weights are all 0, which leaves nothing to learn")
        _ = self.library, self.settings

    def facts(self) -> dict[str, Any]:
        """Sizes of the data and of the codec."""
        codec = self.codec
        return {**self.library.facts(), "codebooks": codec.codebooks, "codes": codec.codes, "codec": codec.digest}

    def callbacks(self) -> Sequence[Callback]:
        """What writes predictions as sound and pictures."""
        from unisono_speech.show import Show

        return [Show(self)] if self.config.shown else []

    def save_assets(self, directory: Path) -> None:
        """Tokenizer, codec and the model's configuration, so that the run can be used without its data."""
        self.tokens.save(directory)
        self.codec.save(directory)
        self.settings.save_pretrained(directory)
        if isinstance(self.model_config, settings.Pretrained):
            for name in _BESIDE:
                if (self.model_config.path / name).is_file():
                    (directory / name).write_bytes(safe_paths.read_bytes(self.model_config.path, name))

    def load_assets(self, directory: Path) -> None:
        """Take tokenizer, codec and configuration from a run."""
        self._assets = directory

    def shrink(self, limit: int) -> Speech | None:
        """The same conversations and codec, and a model of two narrow layers."""
        from unisono import count_parameters
        from unisono_speech import model

        size = count_parameters(lambda: model.build_untrained(self.model_config, self.settings, self.text_head))
        if size <= limit or isinstance(self.model_config, settings.Pretrained):
            return None  # a pretrained model's tokenizer belongs to its vocabulary
        narrow = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16,
        }  # fmt: skip
        smaller = self.model_config.model_copy(update={"settings": {**self.model_config.settings, **narrow}})
        return type(self)(self.config, model=smaller, data=self.data_config)

    # what everything shares ---------------------------------------------------------------------------------------

    @cached_property
    def library(self) -> Library:
        """The samples."""
        return Library(self.data_config)

    @cached_property
    def tokens(self) -> Tokens:
        """Of the pretrained model, or of bytes; of a run that is used, the one among its assets."""
        if self._assets is not None:
            return tokens.read(self._assets)
        if isinstance(self.model_config, settings.Pretrained):
            return tokens.read(self.model_config.path)
        return tokens.of_bytes()

    @cached_property
    def codec(self) -> Codec:
        """Between sound and codes."""
        config = self.data_config
        most = getattr(config.codec, "fit_clips", 0)
        fitted = self._assets
        if fitted is None and isinstance(self.model_config, settings.Pretrained):
            beside = self.model_config.path
            fitted = beside if (beside / KMeansCodec.NAME).is_file() else None
        return library.open_codec(config, lambda: self.library.fitting_clips(most), fitted)

    @cached_property
    def codes(self) -> CodeStore:
        """The codes of recordings."""
        return CodeStore(self.codec, self.data_config.cache)

    @cached_property
    def settings(self) -> Any:
        """The model's configuration."""
        from unisono_speech import model

        return model.check(self.model_config, self.tokens, self.codec, self._assets)

    @cached_property
    def stream(self) -> Stream:
        """The codes that say where a stream begins and ends."""
        from unisono_speech import model

        return model.stream_of(self.settings)

    @cached_property
    def audio_terms(self) -> list[str]:
        """The terms of the codebooks."""
        return [f"codebook_{number}" for number in range(self.codec.codebooks)]

    @property
    def text_head(self) -> bool:
        """Whether text is learned."""
        return self.config.text_weight > 0

    @cached_property
    def _weights(self) -> dict[str, float]:
        given = self.config.audio_weights
        each = given if isinstance(given, list) else [given] * self.codec.codebooks
        audio = dict(zip(self.audio_terms, each, strict=True))
        return ({TEXT: self.config.text_weight} if self.text_head else {}) | audio

    @cached_property
    def shown(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Predicted and true codes of this process's first held-out rows, until `show` has written them."""
        return []

    def _keep(self, logits: Tensor, batch: Batch, chosen: Tensor) -> None:
        """Keep what is predicted of the first held-out rows, each code given all true ones before it."""
        places = chosen.sum(1).tolist()
        for row, predicted in enumerate(logits.split(places)):
            if len(self.shown) >= self.config.shown:
                return
            if places[row]:
                truth = batch["audio"][row][chosen[row]]
                self.shown.append((predicted.argmax(-1).cpu().numpy(), truth.cpu().numpy()))


def _scores(logits: Tensor, targets: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sums by row of what is predicted at chosen places: nats, and targets that are the most likely entry.

    Logits are (places, columns, entries), targets (places, columns), -100 where a column has none, `chosen` (rows,
    length) and both results (rows, columns).
    """
    import torch
    from torch.nn import functional

    owner = chosen.nonzero()[:, 0]
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    nats = nats.view(targets.shape)
    right = (logits.argmax(-1) == targets).to(nats.dtype)
    empty = torch.zeros(rows, targets.shape[1], dtype=nats.dtype, device=nats.device)
    return empty.index_add(0, owner, nats), empty.index_add(0, owner, right)
