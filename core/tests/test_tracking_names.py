import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.testing.tracker import HARD_NAMES
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run
from drivetrain.tracking.names import NameCoder
from drivetrain.tracking.parts import join_text, split_text
from drivetrain.tracking.redaction import Redactor, is_secret_name

NARROW = r"A-Za-z0-9_\-./ "
names = (
    st.text(st.characters(codec="utf-8"), max_size=30) | st.text("_xA1F/.", max_size=12) | st.sampled_from(HARD_NAMES)
)


@given(st.lists(names, max_size=8, unique=True), st.booleans())
def test_names_become_legal_different_and_can_be_turned_back(given_names, paths):
    coder = NameCoder(NARROW, paths=paths, reserved=("_step",))
    legal = [coder.legal(name) for name in given_names]
    assert len(set(legal)) == len(given_names)
    for name, text in zip(given_names, legal, strict=True):
        assert set(text) <= set(string.ascii_letters + string.digits + "_-./ ") and text != "_step" and text
        assert coder.original(text) == name
        if paths:
            assert all(part not in ("", ".", "..") for part in text.split("/"))


@given(st.lists(names, max_size=5, unique=True))
def test_long_names_are_cut_and_remembered(given_names):
    coder = NameCoder(NARROW, longest=40)
    long = [name * 20 + "x" * 20 for name in given_names]
    assert [coder.original(coder.legal(name)) for name in long] == long
    assert all(len(coder.legal(name)) <= 40 for name in long)


def test_ordinary_names_stay_as_they_are():
    coder = NameCoder(r"\w\-. :/", paths=True)
    for name in ("train/loss", "lr", "layer.0.weight", "acc@5".replace("@", "_"), "max_x1", "Ünicode é"):
        assert coder.legal(name) == name


@given(st.dictionaries(st.text("ab./", max_size=5), st.text(max_size=50), max_size=4), st.integers(1, 20))
def test_long_texts_are_split_and_joined(texts, limit):
    parts = {k: v for name, text in texts.items() for k, v in split_text(name, text, limit).items()}
    assert all(len(part) <= limit for part in parts.values())
    assert join_text(parts) == texts


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "db/password",
        "api_key",
        "apiKey",
        "hub_token",
        "HF_TOKEN",
        "aws.secret",
        "accessToken",
        "credentials",
        "AUTH_TOKEN",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "pad_token",
        "num_tokens",
        "max_new_tokens",
        "key_dim",
        "sort_key",
        "eos_token_id",
        "keyboard",
        "author",
        "path",
        "monkey",
        "lr",
    ],
)
def test_hyperparameters_that_only_sound_like_secrets(name):
    assert not is_secret_name(name)


def test_secrets_are_nowhere_in_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "from-the-environment")
    hf, github = "hf_" + "a1B2" * 8, "ghp_" + "a1B2" * 9
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path, options=TrackingOptions(interval=0.0))
    hub.start("p", {"hub": {"api_key": "sesame-open"}, "data": "s3://me:sesame-open@host/x", "list": [hf], "n": 3})
    hub.log({"note": f"got {hf}", "url": "https://me:sesame-open@host/?token=sesame-open"}, step=1)
    hub.log({"object": [github, "from-the-environment"]}, step=2)
    hub.log_text("log", f"Authorization: Bearer {github} or from-the-environment")
    hub.log_table("t", ["a"], [["https://me:sesame-open@host"], [{"t": hf}]])
    hub.log_summary({"password": "sesame-open"})
    hub.finish()
    stored = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    for secret in (hf, github, "sesame-open", "from-the-environment"):
        assert secret not in stored
    run = read_run(tmp_path)
    assert (
        run.config["n"] == 3
        and run.config["data"] == "s3://(left out)@host/x"
        and run.config["hub/api_key"] == "(left out)"
    )


@given(st.text(max_size=80))
def test_texts_without_secrets_are_kept(text):
    if "://" not in text and not any(
        mark in text for mark in ("hf_", "gh", "sk-", "xox", "AKIA", "AIza", "eyJ", "earer", "glpat")
    ):
        assert Redactor({}).text(text) == text
