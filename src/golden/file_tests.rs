//! What is written is what is read, and nothing else is read.

use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;
use crate::contract::{Batching, ForwardRequest, Layer, Message, Overflow, Prompt};
use crate::forward::PrefillForward;
use crate::testing::FakeForward;

fn made(request: &ForwardRequest) -> Golden {
    Golden::make(&mut FakeForward::new(4, 2).with_context_window(9), request).unwrap()
}

/// A golden set in which every field has a value other than its default.
fn golden() -> Golden {
    let chat = vec![Message::new("system", "be brief"), Message::new("user", "zwölf \"ö\"\n\u{1}")];
    let prompts = [
        Prompt::from("route this prompt"),
        Prompt::from(chat),
        Prompt::Raw("one two".to_owned()),
        Prompt::Tokens(vec![7, u32::MAX, 3, 1]),
    ];
    let mut kwargs = Map::new();
    kwargs.insert("z".to_owned(), json!({"deep": [1, 0.1, null, true]}));
    kwargs.insert("a".to_owned(), json!("x"));
    let request = ForwardRequest::reference_builder(prompts)
        .chat_template_kwargs(kwargs)
        .layers([Layer::Final, Layer::Direct(0), Layer::FromEnd(2)])
        .batching(Batching::Padded { batch_size: 3 })
        .max_length(3)
        .overflow(Overflow::KeepTemplate)
        .add_special_tokens(false);
    made(&request.build().unwrap())
}

fn bytes() -> Vec<u8> {
    to_bytes(&golden()).unwrap()
}

/// The file of this header and data.
fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut content = (header.len() as u64).to_le_bytes().to_vec();
    content.extend(header.as_bytes());
    content.extend(data);
    content
}

/// A sound file whose metadata was changed.
fn edited(edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let content = bytes();
    let (header, data) = split(&content).unwrap();
    let mut described: Value =
        serde_json::from_str(&header.metadata().as_ref().unwrap()[KEY]).unwrap();
    edit(&mut described);
    let mut header = serde_json::to_value(&header).unwrap();
    header["__metadata__"][KEY] = json!(described.to_string());
    with_header(&header.to_string(), data)
}

#[test]
fn a_golden_set_comes_back_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("golden.safetensors");
    let defaults = made(&ForwardRequest::new(["hello"]).unwrap());
    let pooled = ForwardRequest::builder(["a"]).pooling([Pooling::Mean]).build().unwrap();
    for golden in [golden(), defaults, made(&pooled)] {
        golden.save(&path).unwrap();
        let loaded = Golden::load(&path).unwrap();
        assert_eq!(loaded.request, golden.request);
        assert_eq!(loaded.output, golden.output);
        assert_eq!(to_bytes(&loaded).unwrap(), fs::read(&path).unwrap());
    }
}

#[test]
fn every_fact_of_a_model_comes_back() {
    let request = ForwardRequest::new(["a"]).unwrap();
    let output = FakeForward::new(2, 1).forward(&request).unwrap();
    let mut model = crate::contract::ModelInfo::clone(output.model());
    model.revision = Some("abc".to_owned());
    model.dtype = "bfloat16".to_owned();
    model.device = "cuda:1".to_owned();
    model.layout = crate::contract::Layout::Packed;
    let blocks = Blocks { last: Some(vec![1.5]), mean: Some(vec![f32::MIN_POSITIVE]) };
    let (layers, receipts) = (output.layers().to_vec(), output.receipts().to_vec());
    let output = ForwardOutput::new(&request, Arc::new(model), layers, blocks, receipts).unwrap();
    let golden = Golden::new(&request, output).unwrap();
    let loaded = from_bytes(&to_bytes(&golden).unwrap()).unwrap();
    assert_eq!(loaded.output, golden.output);
}

#[test]
fn any_reader_of_safetensors_finds_the_blocks() {
    let content = bytes();
    let file = safetensors::SafeTensors::deserialize(&content).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["last", "mean"]);
    let golden = golden();
    for &pooling in Pooling::ALL {
        let tensor = file.tensor(pooling.slug()).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[3, 4, 2][..]));
        let block = golden.output.block(pooling).unwrap();
        let expected: Vec<u8> = block.iter().flat_map(|number| number.to_le_bytes()).collect();
        assert_eq!(tensor.data(), expected);
    }
}

#[test]
fn a_file_replaces_an_older_one_and_leaves_nothing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("golden.safetensors");
    let reader = folder.path().join("reader");
    let older = made(&ForwardRequest::new(["older"]).unwrap());
    older.save(&path).unwrap();
    // Stands for whoever has the older file open.
    fs::hard_link(&path, &reader).unwrap();
    golden().save(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes());
    assert_eq!(fs::read(&reader).unwrap(), to_bytes(&older).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn what_is_no_golden_file_is_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    for content in [&b"{\"prompt\": \"the prompts themselves\"}"[..], b"", &with_header("{}", b"")]
    {
        let path = folder.path().join("taken");
        fs::write(&path, content).unwrap();
        let error = golden().save(&path).unwrap_err().to_string();
        assert!(error.contains("something else is there"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
    #[cfg(unix)]
    assert!(golden().save("/dev/null").unwrap_err().to_string().contains("something else"));
}

#[cfg(unix)]
#[test]
fn whoever_may_read_other_files_may_read_this_one() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
    fs::write(folder.path().join("other"), "").unwrap();
    golden().save(folder.path().join("golden")).unwrap();
    assert_eq!(mode("golden"), mode("other"));
}

#[test]
fn a_place_that_cannot_be_written_is_named_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("folder");
    fs::create_dir(&taken).unwrap();
    for path in [taken, folder.path().join("nowhere/golden"), folder.path().join("..")] {
        let error = golden().save(&path).unwrap_err();
        let PrefillError::InvalidRequest { field, value, .. } = &error else { panic!("{error}") };
        assert_eq!((field.as_str(), value.as_str()), ("golden", path.to_str().unwrap()));
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_could_not_be_read_back_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let kwargs = Map::from_iter([("deep".to_owned(), deep)]);
    let request = ForwardRequest::builder(["a"]).chat_template_kwargs(kwargs).build().unwrap();
    let error = made(&request).save(folder.path().join("golden")).unwrap_err();
    assert!(error.to_string().contains("recursion limit"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let error = Golden::load(&missing).unwrap_err();
    let start = format!("expected a golden file that can be read ({}", "No such file");
    assert!(error.to_string().contains(&start), "{error}");
    let PrefillError::InvalidRequest { field, value, .. } = error else { panic!("{error}") };
    assert_eq!((field.as_str(), value.as_str()), ("golden", missing.to_str().unwrap()));
    // One would block, one would never end.
    for path in [folder.path(), Path::new("/dev/zero")] {
        let error = Golden::load(path).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
    }
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let content = bytes();
    for length in 0..content.len() {
        assert!(from_bytes(&content[..length]).is_err(), "{length} of {} bytes", content.len());
    }
    assert!(from_bytes(&content).is_ok());
    assert!(from_bytes(&[&content[..], b"x"].concat()).unwrap_err().contains("bytes of vectors"));
}

#[test]
fn what_is_wrong_with_a_file_is_said() {
    let set = |pointer: &'static str, value: Value| {
        edited(move |described| *described.pointer_mut(pointer).unwrap() = value)
    };
    let plain = |header: &str| with_header(header, b"");
    let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    for (content, wrong) in [
        (b"{}".to_vec(), "it is cut short, or not a safetensors file"),
        (huge, "it is cut short, or not a safetensors file"),
        (plain("not json"), "its header is not one of safetensors"),
        (plain("[]"), "its header is not one of safetensors"),
        (plain("{}"), "its metadata has no `golden`"),
        (plain(r#"{"__metadata__": {"golden": "{"}}"#), "its metadata `golden` is not JSON"),
        (plain(r#"{"__metadata__": {"golden": "[]"}}"#), "its metadata has no sound `version`"),
        (set("/version", json!(2)), "it is of version 2, later than 1; use a later prefill-router"),
        (set("/version", json!("1")), "its metadata has no sound `version`"),
        (set("/request", json!(null)), "its metadata has no sound `layers`"),
        (set("/request/prompts", json!([])), "invalid prompts `[]`"),
        (set("/request/prompts/0", json!({"image": "a"})), "its metadata has no sound `prompts`"),
        (set("/request/prompts/3/tokens", json!([-1])), "its metadata has no sound `tokens`"),
        (set("/request/prompts/1/chat/0", json!({})), "its metadata has no sound `role`"),
        (set("/request/layers", json!([0, -2, "final"])), "its metadata has no sound `layers`"),
        (set("/request/layers", json!([0, "last"])), "its metadata has no sound `layers`"),
        (set("/request/layers", json!([2, 0, "final"])), "expected layers [0, 2, final]"),
        (set("/request/pooling", json!(["max"])), "invalid pooling `max`"),
        (set("/request/pooling", json!(["last"])), "expected no block for pooling mean"),
        (set("/request/profile", json!("other")), "invalid profile `other`"),
        (set("/request/max_length", json!(0)), "invalid max_length `0`"),
        (set("/request/batching", json!({})), "its metadata has no sound `batch_size`"),
        (set("/request/add_special_tokens", json!(1)), "no sound `add_special_tokens`"),
        (set("/receipts", json!([])), "its tensor `last` is F32 [3, 4, 2], not F32 [3, 0, 2]"),
        (set("/receipts/0/tokens", json!(1.5)), "its metadata has no sound `tokens`"),
        (set("/receipts/1/cut", json!([3, 99])), "expected a cut of some, not all, of"),
        (set("/receipts/1/cut", json!([3])), "its metadata has no sound `cut`"),
        (set("/model/n_layers", json!(2)), "expected an index in 0..1 inclusive"),
        (set("/model/hidden_dim", json!(3)), "is F32 [3, 4, 2], not F32 [3, 4, 3]"),
        (set("/model/hidden_dim", json!(u64::MAX)), "is F32 [3, 4, 2], not F32 [3, 4, 18446"),
        (set("/model/layout", json!("ragged")), "invalid layout `ragged`"),
    ] {
        let error = from_bytes(&content).unwrap_err();
        assert!(error.contains(wrong), "{error}, not {wrong}");
    }
}

#[test]
fn numbers_that_are_none_are_refused() {
    for number in [f32::NAN, f32::INFINITY] {
        let mut content = bytes();
        let end = content.len();
        content[end - 4..].copy_from_slice(&number.to_le_bytes());
        let error = from_bytes(&content).unwrap_err();
        let words = "prompt 3 has a NaN or an infinity in layer `final`, pooling `mean`";
        assert!(error.starts_with(words), "{error}");
    }
}

#[test]
fn tensors_of_another_type_or_shape_are_refused() {
    let described = metadata::to_json(&golden()).to_string();
    for (dtype, shape) in [("F32", "[4, 3, 2]"), ("F32", "[24]"), ("I32", "[3, 4, 2]")] {
        let tensor = |from: usize| {
            let to = from + 96;
            format!(r#"{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{from}, {to}]}}"#)
        };
        let metadata = json!({KEY: described});
        let header = format!(
            r#"{{"__metadata__": {metadata}, "last": {}, "mean": {}}}"#,
            tensor(0),
            tensor(96)
        );
        let error = from_bytes(&with_header(&header, &[0; 192])).unwrap_err();
        assert!(error.starts_with("its tensor `last` is "), "{error}");
    }
}

#[test]
fn offsets_that_add_up_to_more_than_there_is_are_refused() {
    // Eight tensors of 2^61 bytes less a little: their end and the length of the header overflow.
    let size = (1_u64 << 61) - 4;
    let tensor = |at: u64| {
        let (from, to) = (at * size, (at + 1) * size);
        format!(
            r#""t{at}": {{"dtype": "F32", "shape": [{}], "data_offsets": [{from}, {to}]}}"#,
            size / 4
        )
    };
    let header = format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(", "));
    let error = from_bytes(&with_header(&header, b"")).unwrap_err();
    assert!(error.starts_with("it has 0 bytes of vectors, its header says 18446744073"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Some are still golden sets, of another text or other numbers; none is half of one.
    #[test]
    fn a_damaged_file_is_refused_or_whole(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        length in any::<prop::sample::Index>(),
        cut: bool,
    ) {
        let mut content = bytes();
        for (at, byte) in damage {
            let at = at.index(content.len());
            content[at] = byte;
        }
        if cut {
            content.truncate(length.index(content.len()));
        }
        if let Ok(golden) = from_bytes(&content) {
            let output = &golden.output;
            prop_assert_eq!(output.prompts(), golden.request.prompts().len());
            let finite = |&pooling: &Pooling| {
                output.block(pooling).is_none_or(|block| block.iter().all(|n| n.is_finite()))
            };
            prop_assert!(Pooling::ALL.iter().all(finite));
        }
    }

    #[test]
    fn any_bytes_are_refused(content: Vec<u8>) {
        prop_assert!(from_bytes(&content).is_err());
    }
}
