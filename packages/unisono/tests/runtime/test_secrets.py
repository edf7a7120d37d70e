"""What is taken for a secret, what is not, and that a configuration with one in it is refused without repeating it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from packages.unisono.tests import tasks
from unisono.config.compose import compose
from unisono.config.validate import refuse_secrets
from unisono.observe import events
from unisono.runtime import console, secrets
from unisono.runtime.errors import ConfigError
from unisono.task_config import validate_config

LINEAR = f"{tasks.__file__}:LinearTask"
CANARY = "canary5f0c9d1e7a"


@pytest.mark.parametrize(
    "key",
    ["password", "db_password", "api_key", "apikey", "wandb_api_key", "aws_secret_access_key", "hf_token",
     "access_token", "client_secret", "credentials", "private_key", "API_KEY", "data.password", "auth-token",
     "openai_key", "azure_storage_key", "db_pass", "slurm_jwt", "sas_token", "Authorization", "pgpassword"],
)  # fmt: skip
def test_names_of_secrets_are_known(key: str) -> None:
    assert secrets.names_secret(key)
    with pytest.raises(ConfigError) as refused:
        refuse_secrets({"task": {key: CANARY}})
    assert CANARY not in str(refused.value)
    assert f"'task.{key}' is the name of a secret" in str(refused.value)


@pytest.mark.parametrize(
    "key",
    ["tokenizer", "max_tokens", "eos_token", "pad_token", "token", "keys", "key", "monkey", "secretary", "keypoints",
     "passes", "author", "sort_key", "primary_key", "pass", "bypass", "compass"],
)  # fmt: skip
def test_other_names_are_not(key: str) -> None:
    assert not secrets.names_secret(key)
    refuse_secrets({"task": {key: "<|end|>"}})


@pytest.mark.parametrize(
    "text",
    [f"https://me:{CANARY}@example.org/data", f"postgresql://me:{CANARY}@db:5432/x", f"https://{CANARY}@example.org",
     f"s3://me:{CANARY}@bucket/data.parquet", f"https://example.org/a?token={CANARY}&b=1",
     f"https://example.org/a?x=1&X-Amz-Signature={CANARY}", f"two: https://a.org and http://u:{CANARY}@b.org",
     f"hf_{CANARY}{CANARY}", f"ghp_{CANARY}{CANARY}{CANARY}", "AKIAIOSFODNN7EXAMPLE", f"sk-{CANARY}{CANARY}",
     f"sent with Authorization: Bearer {CANARY}", f"{{'authorization': 'Basic {CANARY}'}}"],
)  # fmt: skip
def test_secrets_are_seen_in_texts(text: str) -> None:
    hidden = secrets.mask(text)
    assert CANARY not in hidden
    assert "AKIA" not in hidden
    assert secrets.MASK in hidden
    with pytest.raises(ConfigError) as refused:
        refuse_secrets({"data": {"paths": ["a", text]}})
    assert "'data.paths.1'" in str(refused.value)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["https://example.org/data?rows=3", "ssh://git@github.com/a/b", "s3://bucket/a@2x.png", "a@b.org", "path/to/data",
     "C:\\data", "", "file:///home/me@work/x", "https://example.org/@me", "skip-connections-in-every-residual-block"],
)  # fmt: skip
def test_harmless_texts_stay_as_they_are(text: str) -> None:
    assert secrets.mask(text) == text
    refuse_secrets({"data": {"path": text}})


def test_what_the_environment_keeps_secret_is_seen_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DB_PASSWORD", CANARY)
    monkeypatch.setenv("PIN_CODE", "somethinglong")  # no name of a secret
    monkeypatch.setenv("GOOGLE_CREDENTIALS", "/home/me/key.json")  # a path
    monkeypatch.setenv("SHORT_SECRET", "abc")
    assert (
        secrets.mask(f"a{CANARY}b somethinglong /home/me/key.json abc")
        == "a[hidden]b somethinglong /home/me/key.json abc"
    )
    with pytest.raises(ConfigError, match=r"'task\.name' contains the value of a secret environment variable"):
        refuse_secrets({"task": {"name": CANARY}})


def test_values_under_secret_names_are_hidden_wherever_they_are_nested_and_a_secret_type_is_refused() -> None:
    values = {"a": [{"token": CANARY, "n": 1}], "api_key": CANARY, "none": None, "password": None, "secret": 3}
    assert secrets.hidden(values) == {
        "a": [{"token": secrets.MASK, "n": 1}], "api_key": secrets.MASK, "none": None, "password": None, "secret": 3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"'task\.pin' is the name of a secret"):
        refuse_secrets({"task": {"pin": SecretStr(CANARY)}})


@pytest.mark.parametrize("override", [f"data.path=https://me:{CANARY}@example.org", f"task.hf_token={CANARY}"])
def test_a_configuration_with_a_secret_is_refused_and_the_secret_not_repeated(override: str) -> None:
    composed = compose(LINEAR, [override])
    with pytest.raises(ConfigError) as refused:
        validate_config(composed)
    said = composed.explain(str(refused.value))
    assert "it must not hold secrets" in said
    assert "os.environ" in said
    assert CANARY not in said


def test_a_recipe_has_nothing_to_hide(spirals: Path) -> None:
    values: Any = compose("spirals").values
    assert secrets.hidden(values) == values


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "OPENAI_KEY", "AZURE_STORAGE_KEY", "DB_PASS", "SLURM_JWT", "SAS_TOKEN", "HTTP_AUTHORIZATION"]
)
def test_variables_that_name_a_secret_are_hidden_in_every_text_and_control_characters_in_what_is_printed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, CANARY)
    assert secrets.mask(f"cannot connect with {CANARY}") == "cannot connect with [hidden]"
    console.say(f"host \x1b[2J{CANARY}\r done", error=True)
    assert capsys.readouterr().err == "host \\x1b[2J[hidden]\\x0d done\n"


@pytest.mark.parametrize(
    "text", ["${oc.env:PLAIN}", "${oc.env:PLAIN,none}", "${oc.decode:${oc.env:PLAIN}}", "${oc.${which}:PLAIN}"]
)
def test_neither_a_configuration_nor_an_override_reads_the_environment(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", CANARY)
    (tmp_path / "mine.yaml").write_text(f"defaults: [task, _self_]\nwhich: env\nnotes: '{text}'\n")
    with pytest.raises(ConfigError, match=r"oc\.env:PLAIN.*may not read environment variables") as refused:
        compose("mine", config_dir=tmp_path)
    assert CANARY not in str(refused.value)
    with pytest.raises(ConfigError, match="may not read environment variables"):
        compose(LINEAR, ["run.name='${oc.env:PLAIN}'"])


@pytest.mark.parametrize(
    "options",
    ["{key: CANARY}", "{secret: CANARY}", "{token: CANARY}", "{session: CANARY}", "{client_kwargs: {auth: CANARY}}",
     "{client_kwargs: CANARY}", "{fo: CANARY}", "{anon: [CANARY]}", "{connection_string: CANARY}"],
)  # fmt: skip
def test_a_store_takes_no_option_that_is_not_in_the_list(options: str) -> None:
    composed = compose(LINEAR, [f"checkpoint.upload.options={options.replace('CANARY', CANARY)}"])
    with pytest.raises(ConfigError) as refused:
        validate_config(composed)
    said = composed.explain(str(refused.value))
    assert "checkpoint.upload.options" in said
    assert CANARY not in said


def test_a_store_takes_where_it_lies_and_how_it_is_spoken_to() -> None:
    given = {"endpoint_url": "http://127.0.0.1:9", "anon": True, "client_kwargs": {"region_name": "eu-1"}}
    text = "{endpoint_url: 'http://127.0.0.1:9', anon: true, client_kwargs: {region_name: eu-1}}"
    config = validate_config(compose(LINEAR, [f"checkpoint.upload.options={text}"]))
    assert config.checkpoint.upload.options == given


def test_events_hold_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGPASSWORD", CANARY)
    file = tmp_path / "events.jsonl"
    events.append_event(file, {"step": 1, "restart": 1, "why": f"cannot connect with {CANARY}"})
    with_notes = events.Events(file, 1)
    with_notes.write({"step": 2, "loss": 1.0, "skipped": CANARY, "restored": [CANARY]})
    with_notes.close()
    assert CANARY not in file.read_text()
    assert [event["step"] for event in events.read_events(file)] == [1, 2]
