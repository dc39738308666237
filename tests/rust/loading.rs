//! Models that cannot be loaded, each with its facts. Once its files are right, the same forward works.

use std::fs;
use std::path::{Path, PathBuf};

use prefill_router::{
    ForwardRequest, PrefillError, PrefillForward, Prompt, TransformersConfig, TransformersForward,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::compare::bits;
use crate::fixtures::{case, config, forward};
use crate::folders::{copy, edit_config, scratch};
use crate::weights::{Weights, file};

/// A copy of the tiny Llama that was broken, and the error it gives.
struct Broken {
    folder: PathBuf,
    forward: TransformersForward,
    error: PrefillError,
    _scratch: TempDir,
}

impl Broken {
    fn by(damage: impl FnOnce(&Path)) -> Self {
        let scratch = scratch();
        let folder = copy(&case("llama").folder, &scratch, "model");
        damage(&folder);
        let mut forward = forward(&folder);
        let error = forward.forward(&hello()).unwrap_err();
        Self { folder, forward, error, _scratch: scratch }
    }

    /// Puts every file right, and asks the same forward again.
    fn works_once_mended(mut self) {
        fs::create_dir_all(&self.folder).unwrap();
        for entry in fs::read_dir(&case("llama").folder).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), self.folder.join(entry.file_name())).unwrap();
        }
        let mended = self.forward.forward(&hello()).unwrap();
        let whole = case("llama").forward().forward(&hello()).unwrap();
        assert!(bits(&mended) == bits(&whole), "after {}", self.error);
    }

    fn model(&self) -> String {
        self.folder.to_str().unwrap().to_owned()
    }

    /// The detail and the names of a `model_load` of this model.
    fn model_load(&self) -> (&str, &[String]) {
        let PrefillError::ModelLoad { model, detail, names } = &self.error else {
            panic!("{:?}", self.error)
        };
        assert_eq!(*model, self.model());
        (detail, names)
    }

    /// What an `unsupported_model` of this model was found to be.
    fn found(&self) -> &str {
        let PrefillError::UnsupportedModel { model, expected, found } = &self.error else {
            panic!("{:?}", self.error)
        };
        assert_eq!(
            (model.as_str(), expected.as_str()),
            (&*self.model(), "a causal language model")
        );
        found
    }
}

fn hello() -> ForwardRequest {
    ForwardRequest::new(["hello"]).unwrap()
}

fn set(key: &'static str, value: Value) -> impl FnOnce(&Path) {
    move |folder: &Path| {
        edit_config(folder, |config| {
            config.insert(key.to_owned(), value);
        });
    }
}

fn edit_weights(folder: &Path, edit: impl FnOnce(&mut Weights)) {
    let mut weights = Weights::read(folder);
    edit(&mut weights);
    weights.write(folder);
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let broken = Broken::by(|folder| fs::remove_dir_all(folder).unwrap());
    assert_eq!(broken.model_load(), ("there is no such folder", &[][..]));
    assert!(broken.error.to_string().contains("there is no such folder"));
    broken.works_once_mended();
}

#[test]
fn a_missing_config_is_named() {
    let broken = Broken::by(|folder| fs::remove_file(folder.join("config.json")).unwrap());
    let (_, names) = broken.model_load();
    assert_eq!(names, ["config.json"]);
    assert!(broken.error.to_string().contains("config.json"), "{}", broken.error);
    broken.works_once_mended();
}

#[test]
fn a_damaged_tokenizer_is_named() {
    let broken = Broken::by(|folder| fs::write(folder.join("tokenizer.json"), "{").unwrap());
    let (detail, _) = broken.model_load();
    assert!(detail.starts_with("tokenizer"), "{detail}");
    broken.works_once_mended();
}

#[test]
fn a_tensor_that_is_missing_is_named() {
    let name = "model.layers.2.mlp.up_proj.weight";
    let broken = Broken::by(|folder| edit_weights(folder, |weights| weights.remove(name)));
    let (detail, names) = broken.model_load();
    assert_eq!(detail, "tensors are missing from the files");
    assert_eq!(names, [name]);
    assert!(broken.error.to_string().contains(name), "{}", broken.error);
    broken.works_once_mended();
}

#[test]
fn a_tensor_of_another_shape_is_named() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let broken = Broken::by(|folder| edit_weights(folder, |weights| weights.shorten(name)));
    let (detail, names) = broken.model_load();
    assert!(detail.contains(name) || names == [name], "{detail} {names:?}");
    broken.works_once_mended();
}

#[test]
fn a_file_that_ends_too_early_is_refused() {
    for keep in [0.0, 0.01, 0.9] {
        let broken = Broken::by(|folder| {
            let content = fs::read(file(folder)).unwrap();
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                clippy::cast_sign_loss
            )]
            let length = (content.len() as f64 * keep) as usize;
            fs::write(file(folder), &content[..length]).unwrap();
        });
        let (detail, _) = broken.model_load();
        assert!(!detail.is_empty());
        broken.works_once_mended();
    }
}

#[test]
fn weights_in_another_format_are_not_read() {
    let broken = Broken::by(|folder| {
        fs::rename(file(folder), folder.join("pytorch_model.bin")).unwrap();
    });
    let (detail, _) = broken.model_load();
    assert!(detail.contains("safetensors"), "{detail}");
    broken.works_once_mended();
}

#[test]
fn a_model_of_another_kind_is_named() {
    let broken = Broken::by(set("model_type", json!("t5")));
    assert!(broken.found().contains("`t5`"), "{}", broken.found());
    broken.works_once_mended();
}

#[test]
fn a_model_that_transformers_does_not_know_is_named() {
    let broken = Broken::by(set("model_type", json!("nonesuch")));
    assert!(broken.found().contains("`nonesuch`"), "{}", broken.found());
    broken.works_once_mended();
    let broken = Broken::by(|folder| {
        edit_config(folder, |config| {
            config.remove("model_type").unwrap();
        });
    });
    assert_eq!(broken.found(), "no model_type");
}

#[test]
fn a_model_with_code_of_its_own_runs_none_of_it_unasked() {
    let broken = Broken::by(|folder| {
        set("model_type", json!("own"))(folder);
        let auto_map = json!({"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"});
        set("auto_map", auto_map)(folder);
        let code = format!("open({:?}, 'w')", folder.join("it_ran"));
        fs::write(folder.join("own.py"), code).unwrap();
    });
    let PrefillError::RemoteCode { model, detail } = &broken.error else {
        panic!("{:?}", broken.error)
    };
    assert_eq!(*model, broken.model());
    assert!(detail.contains("own.Config") && detail.contains("own.Model"), "{detail}");
    assert!(broken.error.to_string().contains("trust_remote_code"), "{}", broken.error);
    assert!(!broken.folder.join("it_ran").exists());
    broken.works_once_mended();
}

#[test]
fn what_needs_no_weights_is_refused_before_they_are_read() {
    let mut broken = Broken::by(|folder| fs::remove_file(file(folder)).unwrap());
    broken.model_load();
    let request = ForwardRequest::new([Prompt::Tokens(vec![40; 1025])]).unwrap();
    let error = broken.forward.forward(&request).unwrap_err();
    let limit = Some(1024);
    assert_eq!(error, PrefillError::ContextWindowExceeded { prompt: 0, tokens: 1025, limit });
    broken.works_once_mended();
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    for device in ["cuda:99", "warp:1", "meta"] {
        let config = TransformersConfig::new(case("llama").folder.to_str().unwrap()).device(device);
        let mut forward = TransformersForward::new(config).unwrap();
        for error in [forward.model().unwrap_err(), forward.forward(&hello()).unwrap_err()] {
            let PrefillError::Device { device: found, available } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(found, device);
            assert!(available.split(", ").any(|device| device == "cpu"), "{available}");
            assert!(error.to_string().starts_with(&format!("device `{device}` is not there;")));
        }
    }
}

#[test]
fn a_dtype_that_is_none_is_refused() {
    let config = config(&case("llama").folder).dtype("int7");
    let error = TransformersForward::new(config).unwrap().model().unwrap_err();
    let expected = "invalid dtype `int7`: expected float32, bfloat16 or float16";
    assert_eq!(error.to_string(), expected);
    assert!(error.is_invalid_request());
}

#[test]
fn a_model_that_fails_in_one_forward_leaves_others_alone() {
    let mut bad = forward(&crate::variants::folder("raises"));
    assert!(bad.forward(&hello()).is_err());
    let good = case("llama").forward().forward(&hello());
    assert_eq!(good.unwrap().shape(), [2, 1, 32]);
    assert!(bad.forward(&hello()).is_err());
}
