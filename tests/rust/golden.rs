//! Golden vectors of a real model: the same folder passes to the bit, an edited copy is told by its edit.

use std::fs;
use std::path::Path;

use prefill_router::golden::{Golden, Moved, Report};
use prefill_router::{ForwardRequest, Layer, Message, Pooling, PrefillForward, Prompt, Receipt};
use tempfile::TempDir;

use crate::compare::bits;
use crate::fixtures::{Case, case, forward};
use crate::folders::{copy, scratch};
use crate::weights::Weights;

/// Prompts of every kind, both poolings, every layer.
fn request(case: &Case) -> ForwardRequest {
    let chat = vec![Message::new("system", "be brief"), Message::new("user", "hello there")];
    let prompts = [
        Prompt::from("hello"),
        Prompt::from(chat),
        Prompt::Raw("one two three".to_owned()),
        Prompt::Tokens(vec![40, 41, 42]),
    ];
    ForwardRequest::builder(prompts).layers(case.layers()).build().unwrap()
}

/// What was made of the case's model, through a file.
fn golden(case: &Case, scratch: &TempDir) -> Golden {
    let path = scratch.path().join("golden.safetensors");
    Golden::make(&mut *case.forward(), &request(case)).unwrap().save(&path).unwrap();
    Golden::load(path).unwrap()
}

fn check(golden: &Golden, folder: &Path) -> Report {
    golden.check(&mut forward(folder), None).unwrap()
}

/// What differs apart from the folder's name.
fn moved(report: &Report) -> Vec<Moved> {
    report.moved().iter().filter(|moved| moved.what() != "id").cloned().collect()
}

#[test]
fn a_model_loaded_again_gives_the_same_bits() {
    for name in ["llama", "gpt2", "qwen3_5"] {
        let (case, scratch) = (case(name), scratch());
        let golden = golden(case, &scratch);
        assert_eq!(golden.output().shape(), [case.n_layers + 1, 4, case.hidden]);
        let made = case.forward().forward(golden.request()).unwrap();
        assert!(bits(golden.output()) == bits(&made), "the file holds other bits");

        let report = golden.check(&mut forward(&case.folder), 0.0).unwrap();
        assert_eq!(report.moved(), [], "{report}");
        assert_eq!(report.worst().map(|worst| worst.relative_l2), Some(0.0));
        report.into_result().unwrap();
    }
}

#[test]
fn an_edited_weight_is_found_behind_the_last_layer_that_agrees() {
    let (case, scratch) = (case("llama"), scratch());
    let golden = golden(case, &scratch);
    let direct = Layer::Direct;
    for (tensor, after, layer, words) in [
        ("model.embed_tokens.weight", None, direct(0), ": the tokens or the embeddings moved"),
        (
            "model.layers.0.self_attn.o_proj.weight",
            Some(direct(0)),
            direct(1),
            ": the weights or the numerics of block 0 moved",
        ),
        (
            "model.layers.2.mlp.up_proj.weight",
            Some(direct(2)),
            direct(3),
            ": the weights or the numerics of block 2 moved",
        ),
        (
            "model.layers.3.mlp.down_proj.weight",
            Some(direct(3)),
            Layer::Final,
            ": the weights or the numerics of block 3, or the final norm moved",
        ),
        (
            "model.norm.weight",
            Some(direct(3)),
            Layer::Final,
            ": the weights or the numerics of block 3, or the final norm moved",
        ),
    ] {
        let folder = copy(&case.folder, &scratch, tensor);
        let mut weights = Weights::read(&folder);
        weights.edit(tensor, |number| number * 1.01);
        weights.write(&folder);
        let report = check(&golden, &folder);
        let [Moved::Vectors { after: found_after, worst, .. }] = &moved(&report)[..] else {
            panic!("{tensor}: {report}")
        };
        assert_eq!((*found_after, worst.layer), (after, layer), "{tensor}: {report}");
        assert!(worst.relative_l2 > 1e-4, "{tensor}: {report}");
        let error = report.into_result().unwrap_err();
        assert!(error.is_invalid_result());
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn another_chat_template_is_found_by_the_tokens_of_chats_alone() {
    let (case, scratch) = (case("llama"), scratch());
    let golden = golden(case, &scratch);
    let folder = copy(&case.folder, &scratch, "chatty");
    let template = folder.join("chat_template.jinja");
    let content = fs::read_to_string(&template).unwrap();
    fs::write(&template, format!("01{content}")).unwrap();
    let report = check(&golden, &folder);
    let receipts = golden.output().receipts();
    let longer = |prompt: usize| Moved::Tokens {
        prompt,
        golden: receipts[prompt].clone(),
        found: Receipt::new(receipts[prompt].tokens() + 2),
    };
    assert_eq!(moved(&report), [longer(0), longer(1)], "{report}");
    assert!(!report.passed());
    // The other prompts show that the model is the same.
    assert!(report.worst().unwrap().relative_l2 < 1e-5, "{report}");
}

#[test]
fn another_template_of_as_many_tokens_is_found_in_the_embeddings() {
    let (case, scratch) = (case("llama"), scratch());
    let golden = golden(case, &scratch);
    let folder = copy(&case.folder, &scratch, "renamed");
    let template = folder.join("chat_template.jinja");
    let content = fs::read_to_string(&template).unwrap();
    assert!(content.contains("<|end|>"), "{content}");
    fs::write(&template, content.replace("<|end|>", "<|start|>")).unwrap();
    let report = check(&golden, &folder);
    let [Moved::Vectors { after: None, worst, .. }] = &moved(&report)[..] else {
        panic!("{report}")
    };
    assert_eq!((worst.layer, worst.pooling), (Layer::Direct(0), Pooling::Mean), "{report}");
    assert!(worst.prompt < 2, "{report}");
}

#[test]
fn a_shallower_model_cannot_be_compared() {
    let scratch = scratch();
    let golden = golden(case("llama"), &scratch);
    let report = check(&golden, &case("llama_n1").folder);
    assert_eq!(moved(&report)[0], Moved::Layers { golden: 4, found: 1 });
    assert_eq!(report.worst(), None);
}
