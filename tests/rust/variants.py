"""Models and truth beyond the cases of `tests/fixtures/make.py`, for the Rust tests.

    python tests/rust/variants.py OUT_DIR

writes OUT_DIR/variants.json: "folders", by name; "rows", prompts of few tokens; and for each model of
"truths" the file OUT_DIR/NAME_last.f32 and OUT_DIR/NAME_mean.f32, [n_layers + 1, prompts, hidden], of
those prompts, each run alone. Does nothing when all that is up to date.
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)

from fixtures.cache import fingerprint

TRUTHS = ("llama", "gpt2", "qwen3_5")
SOURCES = ("architectures.py", "cache.py", "models.py", "oracle.py", "tokenizers.py", "vocabulary.py")
# Case 6 of the hard cases: as many tokens as these, the two prompts of 5 being the same.
LENGTHS = (9, 1, 5, 5, 2, 8, 3)
ROWS = [[10 + (7 * at * at + 13 * length) % 100 for at in range(length)] for length in LENGTHS]


def make(out: Path) -> None:
    from fixtures.models import tiny_folder
    from fixtures.oracle import alone

    out.mkdir(parents=True, exist_ok=True)
    for name in TRUTHS:
        truth = alone(tiny_folder(name), ROWS)
        for pooling in ("last", "mean"):
            (out / f"{name}_{pooling}.f32").write_bytes(truth[pooling].astype("<f4").tobytes())
    folders = {
        "window_16": tiny_folder("gpt2", n_positions=16),
        "no_template": tiny_folder("llama", tokenizer="no_template"),
        "strict_roles": tiny_folder("llama", tokenizer="strict_roles"),
        "beyond_table": tiny_folder("llama", tokenizer="beyond_table"),
        "bos_eos": tiny_folder("llama", tokenizer="bos_eos"),
        "cuts_left": tiny_folder("llama", truncation_side="left"),
        "narrow_final": tiny_folder("opt", word_embed_proj_dim=8),
        # Queries of 4 heads cannot meet keys of 3: it loads, and its forward raises.
        "raises": tiny_folder("llama", num_key_value_heads=3),
    }
    content = {
        "key": key(),
        "folders": {name: str(folder) for name, folder in folders.items()},
        "rows": ROWS,
        "truths": TRUTHS,
    }
    (out / "variants.json").write_text(json.dumps(content))


def key() -> str:
    return fingerprint([*(TESTS / "fixtures" / name for name in SOURCES), Path(__file__)])


def is_current(out: Path) -> bool:
    try:
        made = json.loads((out / "variants.json").read_text())
        return made["key"] == key() and all(Path(folder).is_dir() for folder in made["folders"].values())
    except (OSError, ValueError, KeyError):
        return False


if __name__ == "__main__":
    if not is_current(Path(sys.argv[1])):
        make(Path(sys.argv[1]))
