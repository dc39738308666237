//! Cases to compare with: a model folder, prompts, and the vectors that are right.
//!
//! `tests/fixtures/make.py` makes them, once per test run; a second run finds them up to date.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::{env, fs};

use prefill_router::{Layer, Pooling, TransformersConfig, TransformersForward};
use serde_json::Value;

/// The real model, as a case.
pub const SMOLLM2: &str = "smollm2";

/// One model, its prompts, and what is right.
pub struct Case {
    pub name: String,
    pub folder: PathBuf,
    pub prompts: Vec<String>,
    /// Tokens of each prompt, as the reference profile counts them.
    pub tokens: Vec<usize>,
    pub n_layers: usize,
    pub hidden: usize,
    files: PathBuf,
}

impl Case {
    /// The forward over the model that all tests share.
    pub fn forward(&self) -> MutexGuard<'static, TransformersForward> {
        shared(&self.folder)
    }

    /// Every layer, in the order of the truth.
    pub fn layers(&self) -> Vec<Layer> {
        (0..self.n_layers).map(Layer::Direct).chain([Layer::Final]).collect()
    }

    /// The shape of the truth and of a request for everything.
    pub fn shape(&self) -> [usize; 3] {
        [self.n_layers + 1, self.prompts.len(), self.hidden]
    }

    /// The right block of `reference` or `alone`.
    pub fn truth(&self, profile: &str, pooling: Pooling) -> Vec<f32> {
        let block = floats(&self.files.join(format!("{profile}_{pooling}.f32")));
        assert_eq!(block.len(), self.shape().iter().product::<usize>(), "{profile} {pooling}");
        block
    }

    fn read(files: PathBuf) -> Self {
        let case = json(&files.join("case.json"));
        let texts = |key: &str| -> Vec<String> {
            let list = case[key].as_array().unwrap();
            list.iter().map(|text| text.as_str().unwrap().to_owned()).collect()
        };
        let counts = case["tokens"].as_array().unwrap();
        Self {
            name: case["name"].as_str().unwrap().to_owned(),
            folder: PathBuf::from(case["folder"].as_str().unwrap()),
            prompts: texts("prompts"),
            tokens: counts.iter().map(|count| size(count).unwrap()).collect(),
            n_layers: size(&case["n_layers"]).unwrap(),
            hidden: size(&case["hidden"]).unwrap(),
            files,
        }
    }
}

/// Every case there is.
pub fn cases() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(|| {
        let out = target().join("test-cases");
        let made = python(&["tests/fixtures/make.py", "--all", out.to_str().unwrap()]);
        // A line per case: `llama: made`, `llama: up to date`.
        let names = made.lines().filter_map(|line| Some(line.split_once(": ")?.0));
        names.map(|name| Case::read(out.join(name))).collect()
    })
}

/// The case of that name.
pub fn case(name: &str) -> &'static Case {
    cases().iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
}

/// The forward over a model that all tests share: loading is most of the time of a small model.
pub fn shared(folder: &Path) -> MutexGuard<'static, TransformersForward> {
    static FORWARDS: Mutex<BTreeMap<PathBuf, &Mutex<TransformersForward>>> =
        Mutex::new(BTreeMap::new());
    let new = || &*Box::leak(Box::new(Mutex::new(forward(folder))));
    let forward = *FORWARDS.lock().unwrap().entry(folder.to_owned()).or_insert_with(new);
    // A test that failed while it held the lock has not hurt the forward.
    forward.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forward on the cpu, where the truth was made.
pub fn forward(folder: &Path) -> TransformersForward {
    TransformersForward::new(config(folder)).unwrap()
}

/// What [`forward`] is made of.
pub fn config(folder: &Path) -> TransformersConfig {
    TransformersConfig::new(folder.to_str().unwrap()).device("cpu")
}

/// The folder of the Python environment that the tests run with.
pub fn environment() -> PathBuf {
    let active = env::var_os("VIRTUAL_ENV").filter(|folder| !folder.is_empty());
    active.map_or_else(|| root().join(".venv"), PathBuf::from)
}

/// What the environment's Python prints, run with these arguments in the folder of the crate.
pub fn python(arguments: &[&str]) -> String {
    let mut command = Command::new(environment().join("bin/python"));
    command.args(arguments).current_dir(root());
    keep_bytecode(&mut command);
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Lets a Python that starts often compile its modules once, into the target folder.
pub fn keep_bytecode(command: &mut Command) {
    command.env_remove("PYTHONDONTWRITEBYTECODE");
    command.env("PYTHONPYCACHEPREFIX", target().join("test-bytecode"));
}

/// The folder of the crate.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo's target folder.
pub fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap()
}

/// A file of JSON.
pub fn json(file: &Path) -> Value {
    let text = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_slice(&text).unwrap()
}

/// A file of little-endian float32.
pub fn floats(file: &Path) -> Vec<f32> {
    let bytes = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let (numbers, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty(), "{}", file.display());
    numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A number of things, out of JSON.
pub fn size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}
