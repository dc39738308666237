"""What a model name stands for: a folder, or a commit in the hub's cache; and whose code may run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import prefill_router as pr
from fixtures.models import tiny_folder

from .helpers import assert_same_bits, copy_of, edit_json, llama

MAIN, DEV = "a" * 40, "b" * 40


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama to damage."""
    return copy_of(tiny_folder("llama"), tmp_path / "model")


def fails(kind: type[pr.PrefillError], words: str, model: Any, **settings: Any) -> Any:
    """The error of asking for anything of the model, before its weights are looked at."""
    with pytest.raises(kind, match=words) as caught:
        pr.TransformersForward(model, **settings).extract(["a"])
    assert caught.value.model == str(model)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture(autouse=True)
def no_network() -> None:
    """The hub is offline in every test; a look at it would be an error of another kind."""
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "..", "a/b/c", "a\\b"])
def test_a_path_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    if name == "nowhere":
        name = str(tmp_path / name)
    if name == "..":
        fails(pr.ModelLoadError, "the config is missing or empty", name)
    else:
        fails(pr.ModelLoadError, "there is no such folder", name)


def test_a_file_is_no_folder(folder: Path) -> None:
    fails(pr.ModelLoadError, "there is no such folder", folder / "config.json")


def test_a_folder_is_found_from_where_the_process_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("model", "./model", Path("model")):
        forward = pr.TransformersForward(name)
        assert_same_bits(forward.extract(["a"]), llama().extract(["a"]))
        assert (forward.model().id, forward.model().revision) == (str(name), None)


def test_a_folder_below_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert pr.TransformersForward("~/model").model().n_layers == 4


def test_a_folder_with_spaces_and_other_letters(folder: Path) -> None:
    moved = folder.rename(folder.parent / "ein Modell 日本 🚆")
    assert pr.TransformersForward(moved).model().id == str(moved)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"model_type": "llama"', "\0", "null", "3"], ids=repr)
def test_a_config_that_is_not_there_or_damaged(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    fails(pr.ModelLoadError, "config", folder)


def test_a_config_with_a_value_of_another_type(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers="four")
    fails(pr.ModelLoadError, "config.json: .*num_hidden_layers", folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a')
    fails(pr.ModelLoadError, "tokenizer", folder)


def test_no_tokenizer_at_all(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    fails(pr.ModelLoadError, "tokenizer: ", folder)


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("t5", "model_type `t5`, which has no causal language model"),
        ("clip", "model_type `clip`, which has no causal language model"),
        ("nonesuch", "model_type `nonesuch`, which this transformers does not know"),
        (..., "no model_type"),
        (None, "no model_type"),
        (["llama"], "which this transformers does not know"),
        ({"a": 1}, "which this transformers does not know"),
    ],
    ids=repr,
)
def test_a_model_of_another_kind(folder: Path, model_type: Any, found: str) -> None:
    edit_json(folder / "config.json", model_type=model_type)
    (folder / "model.safetensors").unlink()
    error = fails(pr.UnsupportedModelError, "expected a causal language model", folder)
    assert found in error.found


# The hub's cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository org/tiny as huggingface_hub keeps it: main and dev are different commits and different models."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--org--tiny"
    for branch, commit, name in (("main", MAIN, "llama"), ("dev", DEV, "llama_n5")):
        snapshot = repository / "snapshots" / commit
        for folder in (repository / "refs", repository / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        for file in tiny_folder(name).iterdir():
            blob = f"{branch}-{file.name}"
            shutil.copyfile(file, repository / "blobs" / blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    return cache


@pytest.mark.parametrize(
    ("revision", "commit", "n_layers"), [(None, MAIN, 4), ("main", MAIN, 4), ("dev", DEV, 5), (DEV, DEV, 5)]
)
def test_a_revision_is_resolved_to_its_commit(cache: Path, revision: str | None, commit: str, n_layers: int) -> None:
    forward = pr.TransformersForward("org/tiny", revision=revision, cache_dir=cache)
    out = forward.extract(["a"])
    assert (out.model.id, out.model.revision, out.model.n_layers) == ("org/tiny", commit, n_layers)
    if n_layers == 4:
        assert_same_bits(out, llama().extract(["a"]))


def test_a_branch_that_moves_moves_no_loaded_model(tmp_path: Path, cache: Path) -> None:
    moving = tmp_path / "hub"
    shutil.copytree(cache, moving)
    # Tiny models share their weights by name, so those of the other commit have to be told apart.
    file = moving / "models--org--tiny" / "snapshots" / DEV / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"].mul_(2)
    save_file(tensors, file, metadata={"format": "pt"})
    forward = pr.TransformersForward("org/tiny", cache_dir=moving)
    with pytest.raises(pr.ContextWindowExceededError):
        forward.extract(["a"], max_length=1)  # reads the tokenizer, not the weights
    (moving / "models--org--tiny" / "refs" / "main").write_text(DEV)
    assert (forward.model().revision, forward.model().n_layers) == (MAIN, 4)
    assert_same_bits(forward.extract(["a"]), llama().extract(["a"]))
    forward.unload()
    assert (forward.model().revision, forward.model().n_layers) == (DEV, 5)


def test_the_commit_is_found_wherever_the_cache_is(tmp_path: Path, cache: Path) -> None:
    odd = tmp_path / "snapshots" / "models--a--b"
    shutil.copytree(cache, odd, symlinks=True)
    out = pr.TransformersForward("org/tiny", revision="dev", cache_dir=odd).extract(["a"])
    assert out.model.revision == DEV


@pytest.mark.parametrize("cache_dir", [None, "elsewhere"])
def test_the_cache_is_where_it_is_said_to_be(tmp_path: Path, cache_dir: str | None) -> None:
    where = None if cache_dir is None else tmp_path / cache_dir
    fails(pr.ModelLoadError, "config.json: ", "org/tiny", cache_dir=where)


def test_the_default_cache_is_that_of_the_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert pr.TransformersForward("org/tiny").model().revision == MAIN


@pytest.mark.parametrize("revision", ["nope", "c" * 40, "refs/pr/1", MAIN[:7]])
def test_an_unknown_revision(cache: Path, revision: str) -> None:
    fails(pr.ModelLoadError, "config.json: ", "org/tiny", revision=revision, cache_dir=cache)


@pytest.mark.parametrize(
    "model", ["org/none", "tiny", "org/ti ny", "org/tiny.git", "org--tiny", "-tiny", "org/", "https://hf.co/a"]
)
def test_an_unknown_repository(cache: Path, model: str) -> None:
    fails(pr.ModelLoadError, "cannot load", model, cache_dir=cache)


def test_a_snapshot_that_is_not_complete(tmp_path: Path, cache: Path) -> None:
    partial = tmp_path / "hub"
    shutil.copytree(cache, partial)
    (partial / "models--org--tiny" / "snapshots" / MAIN / "model.safetensors").unlink()
    fails(pr.ModelLoadError, "cannot load `org/tiny`", "org/tiny", cache_dir=partial)
    assert pr.TransformersForward("org/tiny", revision="dev", cache_dir=partial).model().n_layers == 5


# Code that comes with a model


CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM

os.environ["PREFILL_ROUTER_TEST_CODE_RAN"] = "1"

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaForCausalLM):
    config_class = Config
"""
AUTO_MAP = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}
RAN = "PREFILL_ROUTER_TEST_CODE_RAN"


def bring_code(folder: Path, model_type: str = "mine", auto_map: Any = AUTO_MAP) -> None:
    edit_json(folder / "config.json", model_type=model_type, auto_map=auto_map)
    (folder / "modeling_mine.py").write_text(CODE)


@pytest.fixture(autouse=True)
def not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that any test's code ran."""
    monkeypatch.setenv(RAN, "0")


def ran() -> bool:
    import os

    return os.environ[RAN] == "1"


def test_code_in_a_folder_runs_only_if_it_is_allowed_to(folder: Path) -> None:
    bring_code(folder)
    fails(pr.RemoteCodeError, "needs code of its own", folder)
    fails(pr.RemoteCodeError, "trust_remote_code", folder, trust_remote_code=False)
    assert not ran()
    out = pr.TransformersForward(folder, trust_remote_code=True).extract(["a"])
    assert ran()
    assert_same_bits(out, llama().extract(["a"]))


def test_code_for_a_model_that_transformers_has_is_left_alone(folder: Path) -> None:
    bring_code(folder, model_type="llama")
    assert_same_bits(pr.TransformersForward(folder).extract(["a"]), llama().extract(["a"]))
    assert not ran()


def test_code_for_a_model_that_transformers_has_in_another_shape_only(folder: Path) -> None:
    bring_code(folder, model_type="t5")
    fails(pr.RemoteCodeError, "needs code of its own", folder)
    assert not ran()


@pytest.mark.parametrize("where", ["other/repository--modeling_mine.Model", "org/tiny--modeling_mine.Model"])
@pytest.mark.parametrize("trust", [False, True])
def test_code_from_elsewhere_cannot_be_pinned(folder: Path, where: str, trust: bool) -> None:
    bring_code(folder, auto_map=AUTO_MAP | {"AutoModelForCausalLM": where})
    error = fails(pr.RemoteCodeError, "needs code of its own", folder, trust_remote_code=trust)
    assert ("which cannot be pinned" in error.detail) == trust
    assert not ran()


@pytest.mark.parametrize(
    "reference", ["other/repository--tokenization.Tokenizer", ["a/b--c.Slow", None], {"AutoTokenizer": "a/b--c.T"}]
)
def test_the_code_of_a_tokenizer_counts_as_well(folder: Path, reference: Any) -> None:
    auto_map = reference if isinstance(reference, dict) else {"AutoTokenizer": reference}
    edit_json(folder / "tokenizer_config.json", auto_map=auto_map)
    fails(pr.RemoteCodeError, "which cannot be pinned", folder, trust_remote_code=True)
    assert_same_bits(pr.TransformersForward(folder).extract(["a"]), llama().extract(["a"]))


@pytest.fixture
def coded(tmp_path: Path, cache: Path) -> Path:
    """The hub's cache with code in the commit of dev."""
    coded = tmp_path / "hub"
    shutil.copytree(cache, coded)
    bring_code(coded / "models--org--tiny" / "snapshots" / DEV)
    return coded


@pytest.mark.parametrize("revision", ["dev", DEV])
def test_code_of_a_repository_is_refused(coded: Path, revision: str) -> None:
    error = fails(pr.RemoteCodeError, "needs code of its own", "org/tiny", revision=revision, cache_dir=coded)
    assert "full commit" in error.detail
    assert not ran()


@pytest.mark.parametrize("revision", ["dev", DEV[:39], "DEV"])
def test_code_of_a_repository_needs_a_commit_that_cannot_change(coded: Path, revision: str) -> None:
    (coded / "models--org--tiny" / "refs" / revision).write_text(DEV)
    error = fails(
        pr.RemoteCodeError,
        "needs code of its own",
        "org/tiny",
        revision=revision,
        cache_dir=coded,
        trust_remote_code=True,
    )
    assert f"`{revision}`" in error.detail
    assert "full commit" in error.detail
    assert not ran()


def test_no_revision_is_main_which_can_change(coded: Path) -> None:
    (coded / "models--org--tiny" / "refs" / "main").write_text(DEV)
    error = fails(pr.RemoteCodeError, "needs code of its own", "org/tiny", cache_dir=coded, trust_remote_code=True)
    assert "`main`" in error.detail
    assert not ran()


def test_code_of_a_repository_runs_from_a_commit_if_it_is_allowed_to(coded: Path) -> None:
    forward = pr.TransformersForward("org/tiny", revision=DEV, cache_dir=coded, trust_remote_code=True)
    assert (forward.model().revision, forward.model().n_layers) == (DEV, 5)
    assert ran()


def test_trust_changes_nothing_for_a_model_without_code(cache: Path) -> None:
    forward = pr.TransformersForward("org/tiny", cache_dir=cache, trust_remote_code=True)
    assert (forward.model().revision, forward.model().n_layers) == (MAIN, 4)


# Names that no loader could make sense of


@pytest.mark.parametrize("model", ["a\0b", "", "  ", "\ud800", None, 3, b"/tmp"], ids=repr)
def test_a_name_of_another_kind_is_refused_at_once(model: Any) -> None:
    with pytest.raises(pr.InvalidRequestError) as caught:
        pr.TransformersForward(model)
    assert caught.value.field == "model"


@pytest.mark.parametrize("field", ["revision", "device", "dtype", "cache_dir"])
@pytest.mark.parametrize("value", ["a\0b", "", " ", "\ud800"], ids=repr)
def test_a_setting_of_another_kind_is_refused_at_once(field: str, value: str) -> None:
    with pytest.raises(pr.InvalidRequestError) as caught:
        pr.TransformersForward("org/tiny", **{field: value})
    assert caught.value.field == field


def test_switches_are_true_or_false_and_settings_have_names() -> None:
    for name in ("trust_remote_code", "verify"):
        for value in (1, None, "yes"):
            with pytest.raises(TypeError, match="bool"):
                pr.TransformersForward("org/tiny", **{name: value})
    with pytest.raises(TypeError, match="nonsense"):
        pr.TransformersForward("org/tiny", nonsense=1)
    with pytest.raises(TypeError, match="positional"):
        pr.TransformersForward("org/tiny", "main")
