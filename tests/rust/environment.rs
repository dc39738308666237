//! Which Python environment a process uses (case 18), each situation in a process of its own. A wrong one is
//! an ordinary error that says what was searched: no panic, no abort.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::child::Child;
use crate::fixtures::{case, environment, python};
use crate::folders::{copy, edit_config, scratch};
use crate::variants::folder;

/// What a process that is started as `setup` says tells of each step.
fn tells<const N: usize>(steps: [Value; N], setup: impl FnOnce(&mut Command)) -> [Value; N] {
    let arguments = json!({"steps": steps.as_slice()});
    let mut child = Child::start("describe", &arguments, setup);
    let told = steps.map(|_| child.tells());
    child.succeeds();
    told
}

/// What it tells of one model, where nothing but the process's environment is configured.
fn describes(setup: impl FnOnce(&mut Command)) -> Value {
    let [told] = tells([json!({"folder": case("llama").folder})], setup);
    told
}

/// An environment of the interpreter in use, without a single package.
fn bare(folder: PathBuf) -> PathBuf {
    python(&["-m", "venv", "--without-pip", folder.to_str().unwrap()]);
    folder
}

/// What looks like an environment of that version, with an interpreter that nothing may run.
fn pretended(folder: PathBuf, version: &str) -> PathBuf {
    fs::create_dir_all(folder.join("bin")).unwrap();
    fs::write(folder.join("bin/python"), "").unwrap();
    fs::write(folder.join("pyvenv.cfg"), format!("home = /usr/bin\nversion = {version}\n"))
        .unwrap();
    folder
}

/// A package is missing from exactly this environment, and its own pip would install it.
fn assert_bare(told: &Value, environment: &Path) {
    let interpreter = environment.join("bin/python");
    assert_eq!(told["kind"], "environment", "{told}");
    assert_eq!(told["interpreter"], interpreter.to_str().unwrap());
    assert_eq!(told["prefix"], environment.to_str().unwrap());
    let missing = told["missing"].as_str().unwrap();
    assert!(missing.contains("torch"), "{missing}");
    let fix = told["fix"].as_str().unwrap();
    let install = format!("{} -m pip install", interpreter.display());
    assert!(fix.contains(&install), "{fix}");
    let (_, packages) = fix.split_once("pip install").unwrap();
    assert!(packages.contains("torch") && packages.contains("transformers"), "{fix}");
    let words = told["words"].as_str().unwrap();
    assert!(words.contains(&install) && words.contains("torch"), "{words}");
}

#[test]
fn the_active_environment_is_used_and_transformers_comes_from_it() {
    let scratch = scratch();
    let quantized = copy(&case("llama").folder, &scratch, "quantized");
    edit_config(&quantized, |config| {
        let method = json!({"quant_method": "aqlm"});
        config.insert("quantization_config".to_owned(), method);
    });
    let steps = [json!({"folder": quantized}), json!({"folder": folder("raises")})];
    // Nothing near the process leads to the environment but the variable.
    let [lacks, raises] = tells(steps, |command| {
        command.env("VIRTUAL_ENV", environment()).current_dir(scratch.path());
    });

    // The package that reads such weights is not installed; the error tells which Python says so.
    assert_eq!(lacks["kind"], "environment", "{lacks}");
    assert!(lacks["missing"].as_str().unwrap().contains("aqlm"), "{lacks}");
    assert_eq!(lacks["interpreter"], environment().join("bin/python").to_str().unwrap());
    assert_eq!(lacks["prefix"], environment().to_str().unwrap());

    assert_eq!(raises["kind"], "python", "{raises}");
    let traceback = raises["traceback"].as_str().unwrap();
    let frames = traceback.lines().filter_map(|line| line.trim_start().strip_prefix("File \""));
    let files: Vec<&str> = frames.filter_map(|line| Some(line.split_once('"')?.0)).collect();
    let model = "site-packages/transformers/models/llama/modeling_llama.py";
    assert!(files.iter().any(|file| file.ends_with(model)), "{traceback}");
    for file in files.iter().filter(|file| !file.starts_with("<embedded>/")) {
        assert!(Path::new(file).starts_with(environment()), "{file}");
    }
}

#[test]
fn without_an_active_environment_the_one_in_the_working_folder_is_used() {
    let scratch = scratch();
    let here = bare(scratch.path().join(".venv"));
    let told = describes(|command| {
        command.current_dir(scratch.path());
    });
    assert_bare(&told, &here);
}

#[test]
fn an_environment_without_torch_says_what_to_install_and_with_what() {
    let scratch = scratch();
    let bare = bare(scratch.path().join("bare"));
    let told = describes(|command| {
        command.env("VIRTUAL_ENV", &bare);
    });
    assert_bare(&told, &bare);
}

#[test]
fn a_module_of_python_itself_that_fails_is_nothing_to_install() {
    let scratch = scratch();
    let bare = bare(scratch.path().join("bare"));
    let packages = scratch.path().join("packages");
    for name in ["torch", "transformers", "numpy", "safetensors", "huggingface_hub", "jinja2"] {
        fs::create_dir_all(packages.join(name)).unwrap();
        let source = "raise ImportError('_ssl.so: undefined symbol: _PyModule_Add', name='_ssl')";
        fs::write(packages.join(name).join("__init__.py"), source).unwrap();
    }
    let told = describes(|command| {
        command.env("VIRTUAL_ENV", &bare).env("PYTHONPATH", &packages);
    });
    assert_eq!(told["kind"], "environment", "{told}");
    assert!(told["missing"].as_str().unwrap().contains("undefined symbol"), "{told}");
    let fix = told["fix"].as_str().unwrap();
    assert!(fix.contains("libpython") && !fix.contains("pip"), "{fix}");
}

#[test]
fn prefill_router_python_goes_before_the_active_environment() {
    let scratch = scratch();
    let bare = bare(scratch.path().join("bare"));
    for named in [bare.clone(), bare.join("bin/python")] {
        let told = describes(|command| {
            command.env("PREFILL_ROUTER_PYTHON", named).env("VIRTUAL_ENV", environment());
        });
        assert_bare(&told, &bare);
    }
}

#[test]
fn an_active_environment_that_is_gone_is_named() {
    let told = describes(|command| {
        command.env("VIRTUAL_ENV", "/nonexistent/environment");
    });
    assert_eq!(told["kind"], "environment", "{told}");
    assert_eq!(told["interpreter"], "/nonexistent/environment");
    let missing = "a Python interpreter at `/nonexistent/environment`, which VIRTUAL_ENV names";
    assert_eq!(told["missing"], missing);
    assert_eq!(told["fix"], "correct VIRTUAL_ENV, or leave it unset");
}

#[test]
fn an_environment_of_another_version_is_refused_with_both_versions() {
    let scratch = scratch();
    let newer = pretended(scratch.path().join("newer"), "3.99.1");
    let told = describes(|command| {
        command.env("VIRTUAL_ENV", &newer);
    });
    assert_eq!(told["kind"], "environment", "{told}");
    assert_eq!(told["interpreter"], newer.join("bin/python").to_str().unwrap());
    let missing = told["missing"].as_str().unwrap();
    let own = python(&["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]);
    let linked = format!("a Python {} environment", own.trim());
    assert!(missing.starts_with(&linked) && missing.contains("3.99"), "{missing}");
}

#[test]
fn python_home_is_refused_before_it_can_abort_the_process() {
    let told = describes(|command| {
        command.env("PYTHONHOME", "/nonexistent/home").env("VIRTUAL_ENV", environment());
    });
    assert_eq!(told["kind"], "environment", "{told}");
    let missing = told["missing"].as_str().unwrap();
    assert!(missing.contains("PYTHONHOME is set to `/nonexistent/home`"), "{missing}");
    assert_eq!(told["fix"], "unset PYTHONHOME");
}

#[test]
fn a_configured_environment_goes_first_and_can_be_corrected_in_the_same_process() {
    let scratch = scratch();
    let nowhere = scratch.path().join("nowhere");
    let step = |python: &Path| json!({"folder": case("llama").folder, "python": python});
    let [wrong, told] = tells([step(&nowhere), step(&environment())], |command| {
        command.env("VIRTUAL_ENV", scratch.path()).current_dir(scratch.path());
    });
    assert_eq!(wrong["kind"], "environment", "{wrong}");
    assert_eq!(wrong["interpreter"], nowhere.to_str().unwrap());
    assert_eq!(told, json!({"n_layers": 4}));
}
