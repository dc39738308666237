//! Copies of model folders, to break.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tempfile::TempDir;

/// A folder of its own for a test, gone when the test is over.
pub fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A copy of a model folder, named `name`, in `scratch`.
pub fn copy(folder: &Path, scratch: &TempDir, name: &str) -> PathBuf {
    let copy = scratch.path().join(name);
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let file = entry.unwrap();
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    copy
}

/// Changes a model's config.
pub fn edit_config(folder: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let file = folder.join("config.json");
    let mut config = crate::fixtures::json(&file);
    edit(config.as_object_mut().unwrap());
    fs::write(file, config.to_string()).unwrap();
}
